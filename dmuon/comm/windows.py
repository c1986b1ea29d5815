"""Windows of gradients with their buffers, and the wires that they leave by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dmuon.comm.arena import Carver
from dmuon.comm.routes import EVERYONE, Pack, Window, aligned
from dmuon.comm.transport import Transport, Work

__all__ = ["FlatWire", "LivePack", "LiveWindow", "Wire", "window_bytes"]


class LivePack:
    """The buffer of one pack, cut into the views of its spans.

    ``apart``: the buffer's memory is its own, and there between `hold` and `release` only.
    ``deliveries`` is where the owner's side keeps (destination, source) of what it receives.
    """

    def __init__(self, pack: Pack, buffer: Tensor, *, apart: bool = False) -> None:
        self.pack = pack
        self.buffer = buffer
        self.views = list(buffer.split([span.numel for span in pack.spans]))
        self.deliveries: list[tuple[Tensor, Tensor]] | None = None
        self._store = buffer.untyped_storage() if apart else None
        self._nbytes = buffer.untyped_storage().nbytes()
        self.release()

    def hold(self) -> None:
        """Have memory; its content is undefined if there was none."""
        if self._store is not None and self._store.nbytes() != self._nbytes:
            self._store.resize_(self._nbytes)

    def release(self) -> None:
        """Give memory back that is this pack's alone."""
        if self._store is not None:
            self._store.resize_(0)


class Wire(Protocol):
    """Takes packs where they belong; ``scale`` turns a sum of gradients into their mean."""

    scale: float

    def is_mine(self, pack: Pack) -> bool:
        """Whether this rank is the one that collects the pack."""

    def send(self, live: LivePack) -> Work:
        """Launch a pack; the same sequence of calls on every rank."""

    def end_round(self) -> None:
        """Every rank has sent every pack of the round: launch what follows from that.

        The only place for collectives that need the result of an earlier one. It is the same in
        the order of every rank, whichever of them is fast.
        """

    def all_reduce_flags(self, flags: Tensor) -> Work:
        """The maximum of the participation flags over all ranks."""


class FlatWire:
    """Every rank has data of its own, and a pack goes straight to the rank that owns it."""

    def __init__(self, transport: Transport) -> None:
        self.scale = 1.0 / transport.world
        self._transport = transport

    def is_mine(self, pack: Pack) -> bool:
        return pack.owner == self._transport.rank

    def send(self, live: LivePack) -> Work:
        if live.pack.owner == EVERYONE:
            return self._transport.all_reduce(live.buffer, tag="rest")
        return self._transport.reduce(live.buffer, live.pack.owner, tag="gradients")

    def end_round(self) -> None:
        """Packs went straight to their owners."""

    def all_reduce_flags(self, flags: Tensor) -> Work:
        return self._transport.all_reduce(flags, tag="flags", maximum=True)


class LiveWindow:
    """A window with its buffers: in an arena, or in memory that each pack has for itself.

    Such memory is there from the window's first gradient until the pack has been collected.
    ``end`` is where the next window may begin in the arena.
    """

    def __init__(self, window: Window, packs: Sequence[LivePack], end: int = 0) -> None:
        self.window = window
        self.packs = packs
        self.end = end
        self.targets: dict[int, list[tuple[int, Tensor]]] = {p: [] for p in window.parameters}
        for live in self.packs:
            for span, view in zip(live.pack.spans, live.views, strict=True):
                self.targets[span.parameter].append((span.start, view))
        self.empty = set(window.parameters)
        self.waiting = set(window.parameters)  # for gradients that are still to come
        self.launched = False

    @classmethod
    def within(cls, window: Window, carver: Carver) -> LiveWindow:
        """A window in an arena."""
        packs = [
            LivePack(pack, carver.take(pack.numel, getattr(torch, pack.dtype)))
            for pack in window.packs
        ]
        return cls(window, packs, carver.offset)

    @classmethod
    def apart(cls, window: Window, device: torch.device) -> LiveWindow:
        """A window whose packs have memory of their own."""

        def buffer(pack: Pack) -> Tensor:
            return torch.empty(pack.numel, dtype=getattr(torch, pack.dtype), device=device)

        return cls(window, [LivePack(pack, buffer(pack), apart=True) for pack in window.packs])

    def reset(self) -> None:
        self.empty.update(self.window.parameters)
        self.waiting.update(self.window.parameters)
        self.launched = False

    def fill(self, parameter: int, grad: Tensor | None, scale: float) -> None:
        """Write ``scale * grad`` (zeros for None) to where the parameter's gradient travels."""
        for pack in self.packs:
            pack.hold()
        self.empty.discard(parameter)
        if grad is None:
            for _, view in self.targets[parameter]:
                view.zero_()
            return
        flat = grad.detach().reshape(-1)
        for start, view in self.targets[parameter]:
            part = flat.narrow(0, start, view.numel())
            if part.dtype is view.dtype:
                torch.mul(part, scale, out=view)
            else:
                view.copy_(part).mul_(scale)  # in the wider dtype

    def add(self, parameter: int, grad: Tensor, scale: float) -> None:
        """Add ``scale * grad`` to what is there."""
        flat = grad.detach().reshape(-1)
        for start, view in self.targets[parameter]:
            view.add_(flat.narrow(0, start, view.numel()), alpha=scale)


def window_bytes(windows: Sequence[Window]) -> int:
    """Bytes of arena that these windows take together."""
    return sum(
        aligned(pack.numel * getattr(torch, pack.dtype).itemsize)
        for window in windows
        for pack in window.packs
    )
