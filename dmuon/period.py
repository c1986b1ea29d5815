"""When MuonBP takes a full step: a period that is a number, infinite, or changes over the steps.

A full step orthogonalizes whole matrices, a block step only what each rank holds; Algorithm 1 of
MuonBP (https://openreview.net/forum?id=mHouLSUQP5). Nothing here communicates: the schedule is a
function of the step count alone, so that all ranks agree without asking.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dmuon.config import COUNT, FINITE_PERIOD, PERIOD, PERIOD_OF_STEP, STEP, checked

Period = float | Callable[[int], float]
"""A whole number of steps >= 1, `math.inf` (never a full step), or a function of the step."""

_NEVER = -1


@dataclass(frozen=True, slots=True)
class LinearPeriod:
    """A period that goes from ``start`` at step 0 to ``end`` at step ``steps``, and stays there.

    >>> period = LinearPeriod(2, 20, steps=90)
    >>> period(0), period(45), period(90), period(1000)
    (2.0, 11.0, 20.0, 20.0)

    Raises:
        TypeError: an argument is no number, or ``steps`` no whole one.
        ValueError: a period is below 1 or not finite, or ``steps`` below 1.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        rules = {"start": FINITE_PERIOD, "end": FINITE_PERIOD, "steps": COUNT}
        checked(rules, {n: getattr(self, n) for n in rules}, owner="LinearPeriod.")

    def __call__(self, t: int) -> float:
        """The period at step ``t``."""
        if t >= self.steps:
            return float(self.end)
        # Multiplied first: whole periods at whole steps come out whole, as `Schedule` rounds down.
        return self.start + (self.end - self.start) * t / self.steps


class Schedule:
    """The step counter of an optimizer, and which of its steps are full.

    With an integer period P step t is full when ``t % P == 0``; with `math.inf` never. With a
    function the first step is full, and then every step with ``t - last_full >= floor(P(t))``.
    A step that is skipped because of non-finite gradients counts like any other.

    ``t`` is the step to come, counted from 0; ``last_full`` the last full step that was taken, -1
    when there was none.

    >>> schedule, full = Schedule(3), []
    >>> for _ in range(7):
    ...     full.append(schedule.is_full(schedule.t))
    ...     schedule.advance()
    >>> full
    [True, False, False, True, False, False, True]
    """

    def __init__(self, period: Period) -> None:
        self.t = 0
        self.last_full = _NEVER
        kept = checked({"period": PERIOD}, {"period": period})["period"]
        self._period: Period = kept if callable(kept) or kept == math.inf else int(kept)

    @property
    def always_full(self) -> bool:  # plain Muon
        return self._period == 1

    @property
    def never_full(self) -> bool:
        return self._period == math.inf

    def is_full(self, t: int) -> bool:
        """Whether step ``t`` is full, after the full steps up to now. Changes nothing."""
        if not callable(self._period):
            return self._period != math.inf and t % self._period == 0
        # Asked for even where the answer is known, so that a bad function fails at once.
        name = f"the period at step t={t}, from {self.describe()},"
        period = checked({name: PERIOD_OF_STEP}, {name: self._period(t)})[name]
        whole = period if period == math.inf else math.floor(period)
        return self.last_full == _NEVER or t - self.last_full >= whole

    def advance(self) -> None:
        """Commit the step: it has been taken, or skipped on all ranks."""
        if self.is_full(self.t):
            self.last_full = self.t
        self.t += 1

    def describe(self) -> str:
        """The period as text, alike on all ranks that were given the same one.

        >>> Schedule(5).describe(), Schedule(LinearPeriod(2, 20, 90)).describe()
        ('5', 'LinearPeriod(start=2, end=20, steps=90)')
        """
        if isinstance(self._period, LinearPeriod) or not callable(self._period):
            return str(self._period)
        # Not the repr of other callables: it holds an address, which differs from rank to rank.
        named = self._period if hasattr(self._period, "__qualname__") else type(self._period)
        return f"{named.__module__}.{named.__qualname__}"

    def state(self) -> dict[str, int | str]:
        """Counter, last full step and period as plain numbers and text, for a checkpoint."""
        return {"step": self.t, "last_full": self.last_full, "period": self.describe()}

    def read(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """(step, last full step) of what `state` gave. Changes nothing."""
        if missing := self.state().keys() - state.keys():
            raise ValueError(
                f"the state of a period schedule lacks {sorted(missing)}; it has {sorted(state)}"
            )
        try:
            step, last_full = STEP.read(state["step"]), STEP.read(state["last_full"])
        except (TypeError, ValueError):
            step, last_full = -1, _NEVER
        if not (STEP.fits(step) and _NEVER <= last_full < step):
            raise ValueError(
                "the state of a period schedule must have integers step >= 0 and -1 <= last_full < "
                f"step, found step={state['step']}, last_full={state['last_full']}"
            )
        return step, last_full

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in the middle of a period too.

        A saved period that differs from this schedule's gives a warning; this schedule's counts."""
        step, last_full = self.read(state)
        if state["period"] != self.describe():
            warnings.warn(
                f"the saved state has period {state['period']}, this optimizer has "
                f"{self.describe()}: it continues at step {step} with its own",
                stacklevel=2,
            )
        self.t, self.last_full = step, last_full


_EVERY = 256


def is_exchange_step(step: int) -> bool:
    """Whether the ranks exchange their times at the end of this step, counted from 1.

    >>> [step for step in range(1, 800) if is_exchange_step(step)]
    [4, 16, 64, 256, 512, 768]
    """
    return step in (4, 16, 64) or (step > 0 and step % _EVERY == 0)
