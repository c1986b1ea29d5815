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

    ``deliveries`` is where the owner's side keeps (destination, source) of what it receives.
    """

    def __init__(self, pack: Pack, buffer: Tensor) -> None:
        self.pack = pack
        self.buffer = buffer
        self.views = list(buffer.split([span.numel for span in pack.spans]))
        self.deliveries: list[tuple[Tensor, Tensor]] | None = None


class Wire(Protocol):
    """Takes packs where they belong; ``scale`` turns a sum of gradients into their mean."""

    scale: float

    def begin_window(self) -> None:
        """The packs of another window follow."""

    def is_mine(self, pack: Pack) -> bool:
        """Whether this rank is the one that collects the pack."""

    def send(self, live: LivePack) -> Work:
        """Launch a pack; the same sequence of calls on every rank."""

    def all_reduce_flags(self, flags: Tensor) -> Work:
        """Sum the participation flags over all ranks."""


class FlatWire:
    """Every rank has data of its own, and a pack goes straight to the rank that owns it."""

    def __init__(self, transport: Transport) -> None:
        self.scale = 1.0 / transport.world
        self._transport = transport

    def begin_window(self) -> None:
        """Nothing depends on windows."""

    def is_mine(self, pack: Pack) -> bool:
        return pack.owner == self._transport.rank

    def send(self, live: LivePack) -> Work:
        if live.pack.owner == EVERYONE:
            return self._transport.all_reduce(live.buffer, tag="rest")
        return self._transport.reduce(live.buffer, live.pack.owner, tag="gradients")

    def all_reduce_flags(self, flags: Tensor) -> Work:
        return self._transport.all_reduce(flags, tag="flags")


class LiveWindow:
    """A window with its buffers: in an arena, or (``store``) in memory that it has for itself.

    Such memory is there from the first gradient until what was sent has been collected.
    """

    def __init__(
        self, window: Window, carver: Carver, store: torch.UntypedStorage | None = None
    ) -> None:
        self.window = window
        self._store = store
        self._nbytes = 0 if store is None else store.nbytes()
        self.packs = [
            LivePack(pack, carver.take(pack.numel, getattr(torch, pack.dtype)))
            for pack in window.packs
        ]
        self.targets: dict[int, list[tuple[int, Tensor]]] = {p: [] for p in window.parameters}
        for live in self.packs:
            for span, view in zip(live.pack.spans, live.views, strict=True):
                self.targets[span.parameter].append((span.start, view))
        self.end = carver.offset
        self.empty = set(window.parameters)
        self.waiting = set(window.parameters)  # for gradients that are still to come
        self.launched = False
        self.release()

    @classmethod
    def apart(cls, window: Window, device: torch.device) -> LiveWindow:
        """A window with memory of its own."""
        whole = torch.empty(window_bytes([window]), dtype=torch.uint8, device=device)
        return cls(window, Carver(whole, 0), whole.untyped_storage())

    def release(self) -> None:
        if self._store is not None:
            self._store.resize_(0)

    def reset(self) -> None:
        self.empty.update(self.window.parameters)
        self.waiting.update(self.window.parameters)
        self.launched = False

    def fill(self, parameter: int, grad: Tensor | None, scale: float) -> None:
        """Write ``scale * grad`` (zeros for None) to where the parameter's gradient travels."""
        if self._store is not None and self._store.nbytes() != self._nbytes:
            self._store.resize_(self._nbytes)
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
