"""Where the weights of the `dedicated` layout are kept, and the buffers in which they are used.

What modules use together is broadcast in a few *weight buckets*: one for each shard coordinate
that keeps whole parameters of it, and one for each parameter that several keep pieces of. Spans
with one owner follow each other, so they leave in one broadcast::

    bucket 0   | a.weight  c.weight |                 kept at shard 0: one broadcast
    bucket 1   | b.weight |                           kept at shard 1
    bucket 2   | experts[0:3] | experts[3:5] |        kept at shards 0 and 1: two broadcasts

A *slot* is the tensor whose data is switched: the `Parameter` itself, or the local tensor inside a
`DTensor`. Between uses it shows what is kept: the whole weight where it is, elsewhere a placeholder
``(0, ...)``. In use it is a view of its bucket's buffer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Buffer, Slices, Span
from dmuon.comm.transport import Transport, Work
from dmuon.dtensors import local_cell
from dmuon.types import OwnershipError

__all__ = ["Group", "Range", "Storage", "WeightBucket", "shed_on_meta", "weight_buckets"]


# ---- pure data -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start .. start + numel`` of a bucket, owned at (``replica``, ``shard``)."""

    start: int
    numel: int
    shard: int
    replica: int
    matrices: frozenset[int]


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """One buffer of parameters: (index, first element, number of elements) each.

    ``sends`` are the ranges that leave in one broadcast along shards each (their ``replica`` says
    nothing), ``publishes`` those that leave in one along replicas. ``keeper`` is the shard
    coordinate that keeps all of it, None where there are several.
    """

    dtype: str
    numel: int
    parameters: tuple[tuple[int, int, int], ...]
    sends: tuple[Range, ...]
    publishes: tuple[Range, ...]
    keeper: int | None


def weight_buckets(
    slices: Slices, parameters: Sequence[int], tensor: int
) -> tuple[WeightBucket, ...]:
    """Those of parameters that are used together, in the order of their broadcasts: equal along
    shards."""
    specs = slices.plan.specs.parameters
    spans = {p: slices.spans(p, tensor) for p in parameters}
    single: dict[tuple[str, int], list[int]] = defaultdict(list)
    mixed: list[int] = []
    for p in parameters:
        shards = {span.shard for span in spans[p]}
        if len(shards) > 1:
            mixed.append(p)
        else:
            single[specs[p].dtype, shards.pop() if shards else 0].append(p)
    found = []
    for (dtype, keeper), members in sorted(single.items()):
        members.sort(key=lambda p: min((span.replica for span in spans[p]), default=0))
        found.append(_bucket(slices, members, spans, tensor, dtype, keeper))
    found += [_bucket(slices, [p], spans, tensor, specs[p].dtype, None) for p in mixed]
    return tuple(found)


def _bucket(
    slices: Slices,
    members: Sequence[int],
    spans: dict[int, list[Span]],
    tensor: int,
    dtype: str,
    keeper: int | None,
) -> WeightBucket:
    parameters, placed, start = [], [], 0
    for p in members:
        numel = math.prod(slices.shape(p, tensor))
        parameters.append((p, start, numel))
        placed += [(span, start + span.start) for span in spans[p]]
        start += numel
    sends = _ranges(placed, lambda span: (span.shard, 0))
    publishes = _ranges(placed, lambda span: (span.shard, span.replica))
    return WeightBucket(dtype, start, tuple(parameters), sends, publishes, keeper)


def _ranges(
    placed: Sequence[tuple[Span, int]], place: Callable[[Span], tuple[int, int]]
) -> tuple[Range, ...]:
    """Spans that follow each other at one place, joined."""
    found: list[Range] = []
    for span, start in placed:
        shard, replica = place(span)
        numel, matrices = span.numel, frozenset(span.matrices)
        last = found[-1] if found else None
        if last and (last.shard, last.replica, last.start + last.numel) == (shard, replica, start):
            found.pop()
            start, numel = last.start, last.numel + numel
            matrices |= last.matrices
        found.append(Range(start, numel, shard, replica, matrices))
    return tuple(found)


# ---- buffers ---------------------------------------------------------------------------------


def _placeholder(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty((0, *shape[1:]), dtype=like.dtype, device=like.device)


class _Slot:
    """One parameter's local tensor ``tensor``, and what it shows.

    ``kept`` between uses: the whole weight where it is kept, else the placeholder; ``pinned``
    replaces it while the weight is there for direct reading. ``view`` in use.
    """

    __slots__ = ("kept", "pinned", "tensor", "view")

    def __init__(self, tensor: Tensor, kept: Tensor, view: Tensor) -> None:
        self.tensor = tensor
        self.kept = kept
        self.view = view
        self.pinned: Tensor | None = None

    def show_kept(self) -> None:
        self.tensor.data = self.kept if self.pinned is None else self.pinned


class _LiveBucket:
    """A bucket on this rank, at shard coordinate ``shard``; weights are used in ``dtype``.

    What this rank keeps lies in the buffer itself where it keeps all in the dtype of use, else in a
    tensor of its own.
    """

    def __init__(
        self, bucket: WeightBucket, dtype: torch.dtype, shard: int, device: torch.device
    ) -> None:
        self.bucket = bucket
        self.is_keeper = bucket.keeper == shard
        kept_dtype: torch.dtype = getattr(torch, bucket.dtype)
        lasting = self.is_keeper and dtype is kept_dtype
        flat = torch.empty(bucket.numel, dtype=dtype, device=device)
        self.buffer = Buffer(flat, lasting=lasting)
        # Ranges kept here: (start, end) in the bucket, and the start in `kept`.
        self._places: list[tuple[int, int, int]] = []
        size = 0
        for piece in bucket.sends:
            if piece.shard == shard:
                at = piece.start if self.is_keeper else size
                self._places.append((piece.start, piece.start + piece.numel, at))
                size += piece.numel
        size = bucket.numel if self.is_keeper else size
        self.kept = flat if lasting else torch.empty(size, dtype=kept_dtype, device=device)
        # Views are made while there is memory behind them; they outlive its release.
        self.sends: list[tuple[int, Tensor, Tensor | None]] = []  # (shard, buffer, source here)
        for piece in bucket.sends:
            source = None
            if piece.shard == shard and not lasting:
                source = self.stored(piece.start, piece.numel)
            self.sends.append((piece.shard, flat.narrow(0, piece.start, piece.numel), source))

    def keep(self, start: int, values: Tensor) -> None:
        """Store what is kept here of ``values``, the bucket's elements from ``start`` on."""
        for first, last, _ in self._places:
            low, high = max(start, first), min(start + values.numel(), last)
            if low < high:
                self.stored(low, high - low).copy_(values[low - start : high - start])

    def stored(self, start: int, numel: int) -> Tensor:
        """What is kept here of the bucket's elements ``start .. start + numel``."""
        if not numel:
            return self.kept[:0]
        for first, last, at in self._places:
            if first <= start and start + numel <= last:
                return self.kept.narrow(0, at + start - first, numel)
        raise AssertionError(f"elements {start} to {start + numel} are not kept here")


@dataclass(slots=True)
class Group:
    """Parameters that are materialized together.

    ``works``: broadcasts under way, None if there are none; ``valid``: the buffers hold the
    current weights, or will once ``works`` are done; ``in_use``: the slots show the buffers.
    """

    name: str
    parameters: tuple[int, ...]
    buckets: Sequence[_LiveBucket]
    slots: list[_Slot]
    matrices: frozenset[int]
    works: list[Work] | None = None
    valid: bool = False
    in_use: bool = False
    running: int = 0  # forward calls under way
    calls: int = 0  # forward calls that ended in this round
    expected: int = 1  # forward calls in a round, as far as known
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
        for live in self.buckets:
            live.buffer.hold()
            for shard, target, source in live.sends:
                if source is not None:
                    target.copy_(source)
                works.append(transport.broadcast(target, shard, tag=tag))
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
        """Show the buffers in the slots."""
        self.wait()
        if not self.in_use:
            for slot in self.slots:
                slot.tensor.data = slot.view
            self.in_use = True
            self.recorded = False

    def record(self) -> None:
        """Autograd records what runs now."""
        self.epochs += not self.recorded
        self.recorded = True

    def free(self) -> None:
        """Show what is kept; the buffers' memory is given back."""
        self.wait()
        if self.in_use:
            for slot in self.slots:
                slot.show_kept()
            self.in_use = False
        for live in self.buckets:
            live.buffer.release()
        self.valid = self.keep = self.recorded = False


@torch.no_grad()
def shed_on_meta(slices: Slices, parameters: Sequence[nn.Parameter], rank: int) -> None:
    """Placeholders on the meta device: `to_empty` then allocates what is kept here only."""
    _, shard, tensor = slices.grid.place(rank)
    for p in slices.plan.specs.muon_parameters():
        spans = slices.spans(p, tensor)
        if spans and all(span.shard != shard for span in spans):
            local = local_cell(parameters[p])
            local.data = _placeholder(local.shape, local)


class Storage:
    """What one rank keeps of the dedicated parameters, in ``groups`` in the order of registration.

    ``members`` are (name, parameters, uses in a forward pass) of what is materialized together.
    Making one takes over the weights: what this rank keeps goes into buckets, and placeholders
    take the place of the rest.
    """

    @torch.no_grad()
    def __init__(
        self,
        slices: Slices,
        members: Iterable[tuple[str, Sequence[int], int]],
        parameters: Sequence[nn.Parameter],
        rank: int,
        transport: Transport,
        param_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._slices = slices
        self._transport = transport
        self._param_dtype = param_dtype
        self._device = device
        self._specs = slices.plan.specs
        _, self._shard, self._tensor = slices.grid.place(rank)
        self._slots: dict[int, _Slot] = {}
        self._where: dict[int, tuple[_LiveBucket, int]] = {}  # its bucket, and where in it
        self._pins: dict[int, int] = {}
        self.groups: list[Group] = []
        muon = set(self._specs.muon_parameters())
        for name, numbers, uses in members:
            mine = tuple(p for p in numbers if p in muon)
            buckets = [
                self._take_over(bucket, parameters)
                for bucket in weight_buckets(slices, mine, self._tensor)
            ]
            matrices = frozenset(i for p in mine for i in slices.matrices_of[p])
            group = Group(name, mine, buckets, [self._slots[p] for p in mine], matrices)
            group.expected = uses
            self.groups.append(group)
        self.group_of = {p: group for group in self.groups for p in group.parameters}

    def _take_over(self, bucket: WeightBucket, parameters: Sequence[nn.Parameter]) -> _LiveBucket:
        dtype = self._param_dtype or getattr(torch, bucket.dtype)
        live = _LiveBucket(bucket, dtype, self._shard, self._device)
        for p, start, numel in bucket.parameters:
            local = local_cell(parameters[p])
            shape = self._slices.shape(p, self._tensor)
            values = local.detach()
            if values.numel() == numel:  # not so where it was made on the meta device
                live.keep(start, values.reshape(-1))
            if live.is_keeper:
                kept = live.stored(start, numel).view(shape) if numel else values.view(shape)
            else:
                kept = _placeholder(shape, live.kept)
            view = live.buffer.flat.narrow(0, start, numel).view(shape)
            self._slots[p] = _Slot(local, kept, view)
            self._where[p] = live, start
            self._slots[p].show_kept()
        live.buffer.release()
        return live

    def casts(self, parameter: int) -> bool:
        """Whether a parameter is used in another dtype than it is kept in."""
        slot = self._slots[parameter]
        return slot.view.dtype is not slot.kept.dtype

    def weight_of(self, matrix: int) -> Tensor:
        """This rank's part of a matrix, in its parameter's dims: a view of what is kept here."""
        live, start = self._where[self._specs.matrices[matrix].parameter]
        part = self._slices.part(matrix, self._tensor)
        return live.stored(start + part.start, part.numel).view(part.box.shape)

    # ---- what users may have done ------------------------------------------------------------

    def check(self) -> None:
        """Show again what is kept where weights were moved.

        Raises:
            OwnershipError: a weight has another shape, dtype or device than it is kept in, or was
                replaced by other values, which ranks without it cannot have followed.
        """
        for p, slot in self._slots.items():
            if slot.pinned is not None or self.group_of[p].in_use:
                continue
            data, kept = slot.tensor, slot.kept
            alike = (data.dtype, data.device) == (kept.dtype, kept.device)
            if alike and data.data_ptr() == kept.data_ptr():
                continue
            local = local_cell(data.detach())
            if not alike or not torch.equal(local, kept):
                raise OwnershipError(
                    f"parameter {self._specs.parameters[p].name!r} is now {list(local.shape)} "
                    f"{data.dtype} on {data.device}, by an assignment to its data; it was kept as "
                    f"{list(kept.shape)} {kept.dtype} on {kept.device}. Move or convert the model "
                    "before dmuon.dedicate_params(model), and change values in place inside "
                    "`with own.materialized(module):`"
                )
            slot.show_kept()

    # ---- direct reading ----------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, parameters: Iterable[int]) -> list[Tensor]:
        """Whole weights (tensor-parallel slices) in the dtype in which they are kept.

        What is kept whole comes as it is, not as a copy. A collective call along shards.
        """
        found, works = [], []
        for p in parameters:
            live, start = self._where[p]
            whole = self._slots[p].kept
            if not live.is_keeper:
                whole = whole.new_empty(self._slices.shape(p, self._tensor))
            for span in self._slices.spans(p, self._tensor):
                piece = whole.view(-1).narrow(0, span.start, span.numel)
                if span.shard == self._shard and not live.is_keeper:
                    piece.copy_(live.stored(start + span.start, span.numel))
                works.append(self._transport.broadcast(piece, span.shard, tag="materialized"))
            found.append(whole)
        for work in works:
            work.wait()
        return found

    def pin(self, parameters: Sequence[int]) -> None:
        """Have these parameters whole until `unpin`; may be nested."""
        fresh = [p for p in parameters if not self._pins.get(p)]
        for p, whole in zip(fresh, self.gather(fresh), strict=True):
            self._slots[p].pinned = whole
            if not self.group_of[p].in_use:
                self._slots[p].show_kept()
        for p in parameters:
            self._pins[p] = self._pins.get(p, 0) + 1

    @torch.no_grad()
    def unpin(self, parameters: Sequence[int]) -> None:
        """Placeholders again; what was written is kept where it is kept."""
        for p in parameters:
            self._pins[p] -= 1
            if self._pins[p]:
                continue
            slot, (live, start) = self._slots[p], self._where[p]
            whole, slot.pinned = slot.pinned, None
            if whole is not None and not live.is_keeper:
                live.keep(start, whole.view(-1))
            if not self.group_of[p].in_use:
                slot.show_kept()

    def is_pinned(self, parameter: int) -> bool:
        return bool(self._pins.get(parameter))

    def restore(self) -> None:
        """Give every rank the whole weights for good, group by group; a collective call."""
        for group in self.groups:
            for slot, whole in zip(group.slots, self.gather(group.parameters), strict=True):
                slot.tensor.data = whole
