"""Milliseconds of every rank, compared with the plan's, at no cost to the step."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque

import torch
from torch import Tensor

from dmuon.comm.transport import Meter, Transport, Work
from dmuon.devices import Stopwatch

WARM_UP = 2  # steps that allocate, compile and fill caches
WINDOW = 8  # steps whose median counts
_EVERY = 256
_FACTOR = 10  # between executed and planned times, from which on the plan is wrong and says so
_FLOOR_MS = 5.0  # below, the call's own overhead and the machine's noise decide


def is_exchange_step(step: int) -> bool:
    """Whether the ranks exchange their times at the end of this step, counted from 1.

    >>> [step for step in range(1, 800) if is_exchange_step(step)]
    [4, 16, 64, 256, 512, 768]
    """
    return step in (4, 16, 64) or (step > 0 and step % _EVERY == 0)


class StepTelemetry:
    """Newton-Schulz milliseconds of every rank of an ownership, at no cost to the step.

    Each rank times its own work. At step counts fixed in advance all ranks exchange the median of
    their recent steps in one small asynchronous all-reduce, so that `report` is no collective call
    and any rank may ask alone::

        step       1  2 | 3  4              ...        16        ...
                   warm-up   `-> exchange: [0 .. mine .. 0], summed over the ranks
                                    `-> waited for in the next step, when it has long arrived

    ``watch`` times the current step; `begin_step` and `finish_step` enclose a step's work. Where a
    rank's times are far from ``planned_ms`` (None: not comparable), it warns once.
    """

    def __init__(
        self,
        transport: Transport,
        meter: Meter,
        device: torch.device,
        planned_ms: float | None = None,
    ) -> None:
        self.watch = Stopwatch(device)
        self._transport = transport
        self._meter = meter
        self._device = device
        self._planned_ms = planned_ms
        self._steps = 0
        self._recent: deque[Stopwatch] = deque(maxlen=WINDOW)
        self._exchange: tuple[Work, Tensor] | None = None
        self._known: Tensor | None = None  # [world]; NaN for a rank that had no number yet

    def begin_step(self) -> None:
        """A new watch for this step; the last ones stay readable."""
        self.watch = Stopwatch(self._device)

    def finish_step(self) -> None:
        """Note this step's time and, at the steps when all do, launch the exchange.

        Every rank calls it once a step, at the same place among its collectives.
        """
        self._steps += 1
        self.wait()
        if self._steps > WARM_UP:
            self._recent.append(self.watch)
        if not is_exchange_step(self._steps):
            return
        # What can be read without waiting for the device; nothing where the host runs ahead.
        seen = [watch.milliseconds() for watch in self._recent if watch.ready()]
        self._compare(seen)
        vector = torch.zeros(self._transport.world, dtype=torch.float32, device=self._device)
        # Filling one element is a kernel launch; copying a Python list would wait for the device.
        vector[self._transport.rank].fill_(statistics.median(seen) if seen else math.nan)
        self._meter.add("telemetry", vector)
        self._exchange = self._transport.all_reduce(vector, tag="telemetry"), vector

    def _compare(self, seen: list[float]) -> None:
        """Warn once if every recent step took many times what was planned, or a small part."""
        planned = self._planned_ms
        if planned is None or not any(seen):  # as where no gradient came
            return
        slowest, fastest = max(seen), min(seen)
        if fastest > max(_FACTOR * planned, planned + _FLOOR_MS):
            executed, times = fastest, f"{fastest / max(planned, 1e-3):.0f} times as much"
        elif planned > max(_FACTOR * slowest, slowest + _FLOOR_MS):
            executed, times = slowest, f"1/{planned / max(slowest, 1e-3):.0f} of it"
        else:
            return
        self._planned_ms = None
        warnings.warn(
            f"dmuon: rank {self._transport.rank} spends {executed:.3g} ms a step on the matrices "
            f"that it owns; the plan expected {planned:.3g} ms, and this is {times}. Owners are "
            "balanced by prices that are wrong here. Usual causes: a plan or a cost table from "
            "another machine, an ns_dtype or ns_steps other than what was measured, gradients that "
            'are missing, or a busy machine. opt.stats()["kernels"] says what ran; '
            'dmuon.dedicate_params(model, costs="measured") plans by the times of this machine',
            stacklevel=2,
        )

    def wait(self) -> None:
        """Wait for the exchange under way, if any. Blocks no host on CUDA."""
        if self._exchange is None:
            return
        work, vector = self._exchange
        self._exchange = None
        work.wait()
        known = self._known
        self._known = vector if known is None else torch.where(vector.isnan(), known, vector)

    def measured_ms(self) -> tuple[float, ...] | None:
        """Milliseconds a step of each rank, as of the last exchange.

        None before there is a number of every rank, or when no rank had anything to do. No
        collective call, but it waits for the exchange under way.
        """
        self.wait()
        if self._known is None:
            return None
        times = tuple(self._known.tolist())
        return times if any(times) and not any(map(math.isnan, times)) else None
