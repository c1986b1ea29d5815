"""What an accelerator needs and a CPU does not: timers, and decisions without the host."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "Stopwatch", "host_can_read"]


def host_can_read(device: torch.device) -> bool:
    """Whether reading a tensor of ``device`` costs no device synchronization.

    Callers look it up in this module each time: tests replace it here, so that the branches of
    an accelerator run on a CPU.
    """
    return device.type == "cpu"


class HostCopy:
    """A small tensor on its way from the device to the host, which does not wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._values = tensor.clone()
            return
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensor.device)
        self._event.record()

    def read(self) -> list[Any]:
        """The values; waits for what the device did up to the copy, and for nothing behind it."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._values.tolist()
        return values


class _HostEvent:
    """What `torch.Event` is on an accelerator, for work that is done when the call returns."""

    __slots__ = ("_at",)

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds from this event to ``end``."""
        return 1e3 * (end._at - self._at)


def _event(device: torch.device) -> torch.Event:
    if device.type == "cpu":
        return _HostEvent()  # type: ignore[return-value]
    return torch.Event(device, enable_timing=True)


class Stopwatch:
    """Milliseconds between `start` and `stop` on ``device``, summed; read when asked. One a step.

    It records events on the current stream, so timing costs no synchronization until
    `milliseconds` is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def ready(self) -> bool:
        """Whether `milliseconds` can be read without waiting for the device."""
        # One stream executes them in order, so the last one tells.
        return not self._events or self._events[-1][1].query()

    def start(self) -> None:
        self._events.append((_event(self._device), _event(self._device)))
        self._events[-1][0].record()

    def stop(self) -> None:
        self._events[-1][1].record()

    def milliseconds(self) -> float:
        """The sum so far; waits for the device."""
        total = 0.0
        for begin, end in self._events:
            end.synchronize()
            total += begin.elapsed_time(end)
        return total
