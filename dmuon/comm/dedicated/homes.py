"""Where the weights of the `dedicated` layout are kept, and the buffers in which they are used.

A *cell* is the tensor whose data is switched: the `Parameter` itself, or the local tensor inside a
`DTensor`. Between uses it is *at home*: the whole weight at its home, elsewhere a placeholder
``(0, ...)``. In use it is a view of its carrier's buffer. The buffer's storage is resized to zero
and back, never replaced, so what autograd saved in forward is there again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon.comm.dedicated.routes import Carrier, Range
from dmuon.comm.transport import Transport, Work

__all__ = ["Cell", "Group", "LiveCarrier", "placeholder"]


class Cell:
    """One parameter's local tensor, and what it holds between uses.

    ``home`` is the whole weight where it is kept, else the placeholder; ``pinned`` replaces it
    while the weight is materialized for direct reading.
    """

    __slots__ = ("home", "pinned", "tensor", "view")

    def __init__(self, tensor: Tensor, home: Tensor, view: Tensor) -> None:
        self.tensor = tensor
        self.home = home
        self.view = view
        self.pinned: Tensor | None = None

    def rest(self) -> None:
        """Out of use."""
        self.tensor.data = self.home if self.pinned is None else self.pinned


def placeholder(tensor: Tensor) -> Tensor:
    """An empty tensor that looks like ``tensor`` otherwise.

    >>> placeholder(torch.ones(3, 5)).shape
    torch.Size([0, 5])
    """
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)


class LiveCarrier:
    """A carrier's buffer on this rank.

    ``stored`` is what this rank keeps of it, by range: slices of the buffer itself where it keeps
    all of it in the dtype of use (``permanent``), tensors of their own otherwise.
    """

    def __init__(
        self,
        carrier: Carrier,
        dtype: torch.dtype,
        shard: int,
        device: torch.device,
    ) -> None:
        """``dtype``: of use; ``shard``: this rank's coordinate."""
        self.carrier = carrier
        stored_dtype: torch.dtype = getattr(torch, carrier.dtype)
        self.permanent = carrier.home == shard and dtype is stored_dtype
        self.buffer = torch.empty(carrier.numel, dtype=dtype, device=device)
        self._storage = self.buffer.untyped_storage()
        self.nbytes = self._storage.nbytes()
        if self.permanent:
            self.kept: Tensor = self.buffer
        elif carrier.home == shard:
            self.kept = torch.empty(carrier.numel, dtype=stored_dtype, device=device)
        else:
            mine = sum(r.numel for r in carrier.sends if r.shard == shard)
            self.kept = torch.empty(mine, dtype=stored_dtype, device=device)
        self.is_home = carrier.home == shard
        self._kept_at: dict[int, int] = {}  # start of a range in the carrier -> in `kept`
        offset = 0
        for piece in carrier.sends:
            if piece.shard == shard:
                self._kept_at[piece.start] = piece.start if self.is_home else offset
                offset += piece.numel
        # Views are made while there is memory behind them; they outlive its release.
        self.cells = {p: self.buffer.narrow(0, a, n) for p, a, n in carrier.cells}
        self.sends: list[tuple[Range, Tensor, Tensor | None]] = []
        for piece in carrier.sends:
            source = None
            if piece.shard == shard and not self.permanent:
                source = self.stored(piece.start, piece.numel)
            self.sends.append((piece, self.buffer.narrow(0, piece.start, piece.numel), source))

    def keep(self, start: int, values: Tensor) -> None:
        """Store what is kept here of ``values``, the carrier's elements from ``start`` on."""
        end = start + values.numel()
        for piece, _, _ in self.sends:
            low, high = max(start, piece.start), min(end, piece.start + piece.numel)
            if piece.start in self._kept_at and low < high:
                part = values.narrow(0, low - start, high - low)
                self.stored(low, high - low).copy_(part)

    def stored(self, start: int, numel: int) -> Tensor:
        """What is kept here of the carrier's elements ``start .. start + numel``."""
        for begin, at in self._kept_at.items():
            size = next(r.numel for r in self.carrier.sends if r.start == begin)
            if begin <= start and start + numel <= begin + size:
                return self.kept.narrow(0, at + start - begin, numel)
        raise AssertionError(f"elements {start} to {start + numel} are not kept here")

    def acquire(self) -> None:
        if not self.permanent and self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def release(self) -> None:
        if not self.permanent:
            self._storage.resize_(0)


@dataclass(slots=True)
class Group:
    """Parameters that are materialized together.

    ``works``: broadcasts under way, None if there are none; ``valid``: the buffers hold the
    current weights, or will once ``works`` are done; ``in_use``: the cells show the buffers.
    """

    name: str
    parameters: tuple[int, ...]
    carriers: Sequence[LiveCarrier]
    cells: list[Cell]
    works: list[Work] | None = None
    valid: bool = False
    in_use: bool = False
    running: int = 0  # forward calls under way
    calls: int = 0  # forward calls that ended in this round
    expected: int = 1  # forward calls in a round, as far as known
    matrices: frozenset[int] = frozenset()
    asked: bool = False  # in this backward
    arrived: int = 0  # gradients in this backward
    awaited: int = 1  # how many of them there will be
    keep: bool = False  # until the end of backward, for nothing would announce that
    epochs: int = 0  # recorded uses whose backward has not come yet
    recorded: bool = False  # in this use
    ran: bool = False  # since the last step, also without autograd: a checkpointed forward does
    tags: dict[str, str] = field(default_factory=dict)

    def settle(self) -> None:
        """A backward is over, in which each parameter got a gradient of so many uses."""
        used = -(-self.arrived // len(self.parameters))
        self.epochs = max(0, self.epochs - used)

    @property
    def done(self) -> bool:
        """Whether backward has all gradients."""
        return self.arrived >= self.awaited

    @torch.no_grad()
    def launch(self, transport: Transport, phase: str) -> int:
        """Broadcast the weights along ``transport``; returns the bytes of it."""
        self.wait()
        tag = self.tags.setdefault(phase, f"{phase} {self.name}")
        works, nbytes = [], 0
        for live in self.carriers:
            live.acquire()
            for piece, target, source in live.sends:
                if source is not None:
                    target.copy_(source)
                works.append(transport.broadcast(target, piece.shard, tag=tag))
                nbytes += target.numel() * target.element_size()
        self.works = works
        self.valid = True
        return nbytes

    def wait(self) -> None:
        """Have what was launched."""
        if self.works is not None:
            for work in self.works:
                work.wait()
            self.works = None

    def use(self) -> None:
        """Show the buffers in the cells."""
        self.wait()
        if not self.in_use:
            for cell in self.cells:
                cell.tensor.data = cell.view
            self.in_use = True
            self.recorded = False

    def record(self) -> None:
        """Autograd records what runs now."""
        self.epochs += not self.recorded
        self.recorded = True

    def free(self) -> None:
        """Back home; the buffers' memory is given back."""
        self.wait()
        if self.in_use:
            for cell in self.cells:
                cell.rest()
            self.in_use = False
        for live in self.carriers:
            live.release()
        self.valid = self.keep = self.recorded = False
