"""Measured times against predicted ones, and whether a new plan would pay."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dmuon.report.bottleneck import key_of, least_ms
from dmuon.scheduler.costs import ShapeKey
from dmuon.scheduler.plan import OwnershipPlan

__all__ = ["REPLAN_FRACTION", "REPLAN_MS", "MeasuredBalance", "compare", "excess"]

# Below these a new plan is not worth a restart: measured times vary by as much.
REPLAN_FRACTION = 0.05
REPLAN_MS = 0.05

_Run = tuple[ShapeKey, int, str]  # shape, size and kernel of a batch


def excess(most: float, mean: float) -> float:
    """The imbalance: ``most / mean - 1``, 0 without any load."""
    return most / mean - 1 if mean else 0.0


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if predicted else None


@dataclass(frozen=True)
class MeasuredBalance:
    """Measured milliseconds a step against predicted ones, by rank.

    ``ms`` and ``predicted_ms`` are of momentum and Newton-Schulz; ``loads_ms`` add the fixed load
    of the plan. ``alike_ms`` averages ``ms`` over ranks that execute the same batches: costs tell
    those ranks not apart, so no plan from costs can mend a difference between them.
    ``plannable_ms`` is the largest of these loads, and ``best_ms`` what no new plan gets below: the
    even share of the measured work, or the costliest matrix or the plan's lower bound at the
    measured speed.
    """

    predicted_ms: tuple[float, ...]
    ms: tuple[float, ...]
    alike_ms: tuple[float, ...]
    loads_ms: tuple[float, ...]
    plannable_ms: float
    best_ms: float

    @property
    def makespan_ms(self) -> float:
        """Milliseconds of the rank that was busiest."""
        return max(self.loads_ms)

    @property
    def busiest(self) -> int:
        """The rank of the measured makespan."""
        return self.loads_ms.index(self.makespan_ms)

    @property
    def mean_ms(self) -> float:
        """The even share of the measured work."""
        return sum(self.loads_ms) / len(self.loads_ms)

    @property
    def imbalance(self) -> float:
        """``busiest / mean - 1``."""
        return excess(self.makespan_ms, self.mean_ms)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, all ranks together; None when nothing was predicted."""
        return _ratio(sum(self.ms), sum(self.predicted_ms))

    @cached_property
    def ratios(self) -> tuple[float | None, ...]:
        """Measured over predicted of each rank; None where nothing was predicted."""
        return tuple(map(_ratio, self.ms, self.predicted_ms))

    @property
    def saving_ms(self) -> float:
        """What a new plan could save at most."""
        return max(0.0, self.plannable_ms - self.best_ms)

    @property
    def replan(self) -> bool:
        """Whether a new plan from measured costs would pay."""
        return self.saving_ms > max(REPLAN_MS, REPLAN_FRACTION * self.makespan_ms)

    @property
    def straggles_ms(self) -> float:
        """How much longer the busiest rank takes than the ranks that do the same work."""
        return self.ms[self.busiest] - self.alike_ms[self.busiest]


def compare(plan: OwnershipPlan, measured_ms: tuple[float, ...]) -> MeasuredBalance:
    """The measured milliseconds of each rank against the plan's."""
    world = plan.topology.world
    fixed = plan.limits.fixed_ms or (0.0,) * world
    predicted = [0.0] * world
    for batch in plan.batches:
        predicted[batch.owner] += batch.ms
    alike = _alike(plan, measured_ms)
    loads = tuple(m + f for m, f in zip(measured_ms, fixed, strict=True))
    mean = sum(loads) / world
    return MeasuredBalance(
        predicted_ms=tuple(predicted),
        ms=measured_ms,
        alike_ms=alike,
        loads_ms=loads,
        plannable_ms=max(m + f for m, f in zip(alike, fixed, strict=True)),
        best_ms=max(mean, _measured_floor(plan, predicted, alike)),
    )


def _alike(plan: OwnershipPlan, measured: Sequence[float]) -> tuple[float, ...]:
    """Each rank's time, averaged over the ranks that execute the same batches."""
    runs: list[Counter[_Run]] = [Counter() for _ in measured]
    for batch in plan.batches:
        runs[batch.owner][key_of(plan, batch), len(batch.matrices), batch.kernel] += 1
    same: dict[frozenset[tuple[_Run, int]], list[float]] = defaultdict(list)
    patterns = [frozenset(counts.items()) for counts in runs]
    for pattern, ms in zip(patterns, measured, strict=True):
        same[pattern].append(ms)
    return tuple(sum(same[p]) / len(same[p]) for p in patterns)


def _measured_floor(
    plan: OwnershipPlan, predicted: Sequence[float], measured: Sequence[float]
) -> float:
    """What no plan gets below at the measured speed, however evenly it shares the work out.

    The costliest matrix; and the plan's own lower bound, for if every batch takes at least
    ``slowest`` times its prediction, then so does every plan.
    """
    speed: dict[ShapeKey, float] = {}
    for batch in plan.batches:
        key, p, m = key_of(plan, batch), predicted[batch.owner], measured[batch.owner]
        if p and m:  # no time where no gradient came: that says nothing of the speed
            speed[key] = min(m / p, speed.get(key, math.inf))
    if not speed:
        return 0.0
    least, fixed = least_ms(plan), plan.limits.fixed_ms
    costliest = max(ratio * least[key] for key, ratio in speed.items())
    # Fixed loads were not measured: they count once, as they are.
    slowest = min([*speed.values(), 1.0] if any(fixed) else speed.values())
    return max(costliest + min(fixed, default=0.0), slowest * plan.lower_bound_ms)
