"""How much value one owner can hold at each load: a knapsack over batched costs.

For each kind an owner takes k matrices, k = 0, 1, ..., at cost ``C(k)`` and value ``v(k)``, one k
for each kind (a multiple-choice knapsack). `frontier` gives the whole trade-off: the pairs (cost,
value) that no other choice beats in both. Nothing is assumed of C or v; all numbers are integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Frontier", "Option", "density", "frontier"]

Ints = npt.NDArray[np.int64]

MAX_POINTS = 8_000  # kept after each kind
_MOST_WORK = 16_000_000  # pairs formed in one knapsack: about a second


@dataclass(frozen=True, slots=True)
class Option:
    """The choices of one kind: ``cost[k]``, ``value[k]`` for taking k; k = 0 costs nothing."""

    cost: Ints
    value: Ints


@dataclass(frozen=True, slots=True)
class _Points:
    """Pairs, both ascending; where each comes from: a point of the stage before, and a choice."""

    cost: Ints
    value: Ints
    parent: Ints
    taken: Ints

    def __len__(self) -> int:
        return len(self.cost)

    def at(self, index: Ints) -> _Points:
        return _Points(self.cost[index], self.value[index], self.parent[index], self.taken[index])


@dataclass(frozen=True, slots=True)
class Frontier:
    """Pareto-optimal pairs, both ascending, of a value of ``least`` or more.

    ``exact`` is False where points were merged. ``work``: pairs that were formed on the way.
    """

    cost: Ints
    value: Ints
    exact: bool
    least: int
    stages: tuple[_Points, ...] = ()
    work: int = 0

    def best_values(self, limits: Ints) -> Ints:
        """At least the largest value within each limit; below ``least`` that less one."""
        at = np.searchsorted(self.cost, limits, side="right")
        best: Ints = np.concatenate(([self.least - 1], self.value))[at]
        return best

    def choice(self, limit: int) -> Ints | None:
        """How many of each kind are worth most within the limit; None if all are worth too little.

        Of a frontier that is not bounding.
        """
        at = int(np.searchsorted(self.cost, limit, side="right")) - 1
        if at < 0:
            return None
        taken = []
        for stage in reversed(self.stages):
            taken.append(int(stage.taken[at]))
            at = int(stage.parent[at])
        return np.array(taken[::-1], np.int64)


def density(option: Option) -> float:
    """The most value that a unit of cost brings, rounded up."""
    cost, value = option.cost[1:], option.value[1:]
    if (value[cost == 0] > 0).any():
        return math.inf
    some = cost > 0
    return float((value[some] / cost[some]).max(initial=0.0)) * (1 + 1e-12)


def frontier(
    options: Sequence[Option],
    limit: int,
    *,
    bounding: bool,
    least: int = 0,
    max_points: int = MAX_POINTS,
    max_work: int = _MOST_WORK,
) -> Frontier:
    """All trade-offs at a cost of at most ``limit`` >= 0 that are worth at least ``least``.

    Where there are too many, neighbouring ones are merged: with ``bounding`` into a point as cheap
    as the cheapest and as valuable as the best of them, so that `Frontier.best_values` are never
    too small; otherwise into the most valuable real one, so that `Frontier.choice` exists.
    ``max_work`` bounds the pairs formed: what an option leaves of its share is for those after it.
    """
    zero = np.zeros(1, np.int64)
    points, exact, work = _Points(zero, zero, zero, zero), True, 0
    each = [density(option) for option in options]
    later = np.maximum.accumulate([0.0, *each[:0:-1]])[::-1].tolist()
    densest = max(each, default=0.0)
    stages: list[_Points] = []
    for i, (option, dense) in enumerate(zip(options, later, strict=False)):
        pairs = max(1, (max_work - work) // (len(options) - i))
        choices = _useful(option.cost, option.value, limit, least, densest)
        taken = _Points(option.cost[choices], option.value[choices], choices, choices)
        if len(points) * len(taken) > pairs:
            exact = False
            few = math.isqrt(pairs)
            points = _thin(points, bounding, max(few, pairs // len(taken)))
            taken = _thin(taken, bounding, max(few, pairs // len(points)))
            points = _thin(points, bounding, max(1, pairs // len(taken)))
            if stages:
                stages[-1] = points
        work += len(points) * len(taken)
        points = _products(points, taken, limit, least, dense)
        if len(points) > max_points:
            points, exact = _thin(points, bounding, max_points), False
        stages.append(points)
    points = points.at(np.flatnonzero(points.value >= least))
    kept = () if bounding else (*stages[:-1], points)
    return Frontier(points.cost, points.value, exact, least, kept, work)


def _products(points: _Points, taken: _Points, limit: int, least: int, dense: float) -> _Points:
    """All pairs of a point and a choice, without those that another one beats, and those that
    cannot be worth ``least`` with what comes later, of this density."""
    cost = (points.cost[None, :] + taken.cost[:, None]).ravel()
    value = (points.value[None, :] + taken.value[:, None]).ravel()
    keep = _useful(cost, value, limit, least, dense)
    return _Points(cost[keep], value[keep], keep % len(points), taken.taken[keep // len(points)])


def _useful(cost: Ints, value: Ints, limit: int, least: int, dense: float) -> Ints:
    """Indices, by ascending cost, of pairs within the limit that beat every cheaper one and are
    worth ``least`` if the rest of the limit brings this density."""
    kept: Ints = np.flatnonzero(cost <= limit)
    if not math.isinf(dense):
        reach = value[kept] + dense * (limit - cost[kept]) * (1 + 1e-9) + 1.0
        kept = kept[reach >= least]
    kept = kept[np.argsort(cost[kept], kind="stable")]  # quick, because it is made of sorted runs
    best = np.maximum.accumulate(value[kept])
    kept = kept[np.concatenate((np.ones(min(len(kept), 1), np.bool_), best[1:] > best[:-1]))]
    kept = kept[np.append(np.diff(cost[kept]) > 0, np.ones(min(len(kept), 1), np.bool_))]
    return kept


def _thin(points: _Points, bounding: bool, most: int) -> _Points:
    """At most one point in each of ``most`` equal intervals of cost, and one more."""
    if len(points) <= most:
        return points
    edges = np.linspace(int(points.cost[0]), int(points.cost[-1]) + 1, most + 1)[:-1]
    first = np.unique(np.searchsorted(points.cost, edges.astype(np.int64), side="left"))
    last = np.append(first[1:], len(points)) - 1
    if not bounding:
        last = np.unique(np.append(0, last))  # the cheapest stays: nothing taken, at first
        first = last
    thin = points.at(last)
    return replace(thin, cost=points.cost[first])
