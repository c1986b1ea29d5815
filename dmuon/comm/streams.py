"""What CUDA needs and a CPU does not: timers and waiting, each a plain call on CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "Stopwatch", "host_can_read"]


def host_can_read(device: torch.device) -> bool:
    """Whether reading a tensor of ``device`` costs no device synchronization."""
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


class Stopwatch:
    """Milliseconds between `start` and `stop` on ``device``, summed; read when asked. One a step.

    On CUDA it records events on the current stream, so timing costs no synchronization until
    `milliseconds` is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = 0.0
        self._sum = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def ready(self) -> bool:
        """Whether `milliseconds` can be read without waiting for the device."""
        # One stream executes them in order, so the last one tells.
        return not self._events or self._events[-1][1].query()

    def start(self) -> None:
        if host_can_read(self._device):
            self._begin = time.perf_counter()
        else:
            pair = (
                torch.Event(self._device, enable_timing=True),
                torch.Event(self._device, enable_timing=True),
            )
            pair[0].record()
            self._events.append(pair)

    def stop(self) -> None:
        if host_can_read(self._device):
            self._sum += 1e3 * (time.perf_counter() - self._begin)
        else:
            self._events[-1][1].record()

    def milliseconds(self) -> float:
        """The sum so far; waits for the device."""
        total = self._sum
        for begin, end in self._events:
            end.synchronize()
            total += begin.elapsed_time(end)
        return total
