"""The wall clock of planning."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """The wall clock, asked only after the work limits; remembers whether it ever cut short."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end, self.hit = now, now() + seconds, False

    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit
