"""How much value one owner can hold at each load: a knapsack over batched costs.

For each kind an owner takes k matrices, k = 0, 1, ..., at cost ``C(k)`` and value ``v(k)``, one k
for each kind (a multiple-choice knapsack). `frontier` gives the whole trade-off: the pairs (cost,
value) that no other choice beats in both. Nothing is assumed of C or v; all numbers are integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Frontier", "Option", "frontier"]

Ints = npt.NDArray[np.int64]

MAX_POINTS = 8_000  # kept after each kind
_MANY = 10_000  # pairs: more are sifted before they are sorted
_INTERVALS = 2_048
_PAIRS_A_POINT = 200  # formed at once, for each point kept


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


@dataclass(frozen=True, slots=True)
class Frontier:
    """Pareto-optimal pairs, both ascending. ``exact`` is False where points were merged.

    ``work``: pairs that were formed on the way.
    """

    cost: Ints
    value: Ints
    exact: bool
    stages: tuple[_Points, ...] = ()
    work: int = 0

    def best_value(self, limit: int) -> int:
        """The largest value at a cost of at most ``limit`` >= 0; -1 for a negative limit."""
        at = int(np.searchsorted(self.cost, limit, side="right")) - 1
        return int(self.value[at]) if at >= 0 else -1

    def choice(self, limit: int) -> Ints:
        """How many of each kind reach `best_value`; of a frontier that is not bounding."""
        at = int(np.searchsorted(self.cost, limit, side="right")) - 1
        taken = []
        for stage in reversed(self.stages):
            taken.append(int(stage.taken[at]))
            at = int(stage.parent[at])
        return np.array(taken[::-1], np.int64)


def frontier(
    options: Sequence[Option],
    limit: int,
    *,
    bounding: bool,
    max_points: int = MAX_POINTS,
    max_work: int | None = None,
) -> Frontier:
    """All trade-offs at a cost of at most ``limit`` >= 0.

    Where there are too many, neighbouring ones are merged: with ``bounding`` into a point as cheap
    as the cheapest and as valuable as the best of them, so that `Frontier.best_value` is never too
    small; otherwise into the most valuable real one, so that `Frontier.choice` exists. ``max_work``
    bounds the pairs that are formed: what an option leaves of its share is for those after it.
    """
    zero = np.zeros(1, np.int64)
    points, exact, work = _Points(zero, zero, zero, zero), True, 0
    stages: list[_Points] = []
    for i, option in enumerate(options):
        pairs = _PAIRS_A_POINT * max_points
        if max_work is not None:
            pairs = max(1, min(pairs, (max_work - work) // (len(options) - i)))
        choices = _undominated(option.cost, option.value, limit)
        taken = _Points(option.cost[choices], option.value[choices], choices, choices)
        if len(points) * len(taken) > pairs:
            most = max(math.isqrt(pairs), pairs // min(len(points), len(taken)))
            points, taken = _thin(points, bounding, most), _thin(taken, bounding, most)
            if len(points) * len(taken) > pairs:
                most = math.isqrt(pairs)
                points, taken = _thin(points, bounding, most), _thin(taken, bounding, most)
            exact = False
            if stages:
                stages[-1] = points
        work += len(points) * len(taken)
        points = _products(points, taken, limit)
        if len(points) > max_points:
            points, exact = _thin(points, bounding, max_points), False
        stages.append(points)
    return Frontier(points.cost, points.value, exact, () if bounding else tuple(stages), work)


def _products(points: _Points, taken: _Points, limit: int) -> _Points:
    """All pairs of a point and a choice, without those that another one beats."""
    cost = (points.cost[None, :] + taken.cost[:, None]).ravel()
    value = (points.value[None, :] + taken.value[:, None]).ravel()
    keep = _undominated(cost, value, limit)
    return _Points(cost[keep], value[keep], keep % len(points), taken.taken[keep // len(points)])


def _undominated(cost: Ints, value: Ints, limit: int) -> Ints:
    """Indices, by ascending cost, of pairs within the limit that beat every cheaper one."""
    inside = np.flatnonzero(cost <= limit)
    if len(inside) > _MANY:
        inside = inside[_promising(cost[inside], value[inside], limit)]
    order = inside[np.lexsort((-value[inside], cost[inside]))]
    best = np.maximum.accumulate(value[order])
    better = np.concatenate((np.ones(min(len(order), 1), np.bool_), best[1:] > best[:-1]))
    kept: Ints = order[better]
    return kept


def _promising(cost: Ints, value: Ints, limit: int) -> npt.NDArray[np.bool_]:
    """Without what a pair of a lower interval of cost beats: most of them, and no sorting."""
    interval = cost * _INTERVALS // (limit + 1)
    best = np.full(_INTERVALS + 1, np.iinfo(np.int64).min)
    np.maximum.at(best, interval + 1, value)
    kept: npt.NDArray[np.bool_] = value > np.maximum.accumulate(best)[interval]
    return kept


def _thin(points: _Points, bounding: bool, most: int) -> _Points:
    """At most one point in each of ``most`` equal intervals of cost."""
    if len(points) <= most:
        return points
    edges = np.linspace(0, int(points.cost[-1]) + 1, most + 1)[:-1].astype(np.int64)
    first = np.unique(np.searchsorted(points.cost, edges, side="left"))
    last = np.append(first[1:], len(points)) - 1
    # The first interval must keep the origin: nothing taken.
    cost = points.cost[first if bounding else last]
    if not bounding:
        last = np.unique(np.append(0, last))
        cost = points.cost[last]
    return _Points(cost, points.value[last], points.parent[last], points.taken[last])
