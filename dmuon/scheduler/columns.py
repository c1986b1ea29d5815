"""Column generation: how owners can be filled, instead of who owns what.

A *pattern* is how many matrices of each kind one owner of a class takes. For a makespan T the
master program shares the matrices out over patterns that take at most T, each class with its own
number of owners::

    minimize  theta    such that   sum_p x[p, s] * y[p]       = d_s          for every kind s
                                   sum_(p of class c) y[p]   <= n_c * theta  for every class c

T is out of reach if theta > 1 at the optimum. Its duals are values of matrices, from which
`proof.bound_of` computes the smallest T that they do not rule out; that is the next T to try. So T
climbs from below, every value passed is proven impossible, and no tolerance is involved. Patterns
are added by solving the knapsack exactly (`knapsack.frontier`). The size of the master does not
grow with the number of owners, nor with the number of classes that are alike. Rounding comes after
(`rounding`, and `apart` where classes are alike).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmuon.scheduler.apart import alone, shares, together
from dmuon.scheduler.greedy import greedy, improve
from dmuon.scheduler.knapsack import MAX_POINTS
from dmuon.scheduler.master import Master
from dmuon.scheduler.problem import Counts, Problem
from dmuon.scheduler.proof import Dual, bound_of
from dmuon.scheduler.rounding import dive, whole
from dmuon.scheduler.symmetry import Orbits, levelled

__all__ = ["Columns"]

_MOST_ROUNDS = 200  # master programs while climbing
_MOST_WORK = 150_000  # points of knapsacks, in one climb
_CLOSE = 1e-4  # a gap not worth any work
_CLOSE_IF_VAGUE = 1e-3  # the same, where knapsacks have more points than can be kept
_DIVES = (0.0, 0.001, 0.003, 0.008, 0.02, 0.05)  # how far above the bound
_PROGRAMS = (0.0, 0.002)
_MORE_PROGRAMS = (0.004, 0.008, 0.012)  # where the gap is still wide
_CLOSE_AT_LAST = 5e-3
_CLOSE_IF_MANY = 1e-2  # the same, where there are many classes
_MOST_APART = 4  # classes by themselves, after which the others are no longer the busiest
_ENOUGH_APART = 1000  # the part of the bound that is close enough for one of many classes
_FEW_CLASSES = 4  # that are alike, and still shared out together
_POINTS = 2_000  # of a frontier while climbing


@dataclass
class Columns(Master):
    """The bound raised, and the counts improved, step by step."""

    # ---- the bound -----------------------------------------------------------------------

    def climb(self) -> bool:
        """Raise the bound until the master program shares everything out; whether it got there."""
        if not self._climb(_POINTS, stalled=10):
            return False
        if not self._orbits.are_trivial and not self.is_close(_CLOSE_AT_LAST):
            self._round_apart()  # costs little; more of a bound may not be needed then
            if self.is_close(_CLOSE_AT_LAST):
                return True
        return self._climb(MAX_POINTS, stalled=10)

    def _climb(self, points: int, stalled: int) -> bool:
        vague, work = 0, 0
        for _ in range(_MOST_ROUNDS):
            if self.bound >= self.makespan or self.is_close(_CLOSE):
                return True
            if self.budget.spent():
                return False
            theta, dual, _ = self.master(self.bound)
            proving, real = self.frontiers(dual, self.makespan, points)
            proven = bound_of(self.problem, dual, self.makespan, proving)
            climbed = proven > self.bound
            work += sum(len(found.cost) for found in proving.values())
            if climbed:
                self.bound, self.dual = proven, dual
            if work > _MOST_WORK or (not climbed and theta <= 1 + 1e-9):
                return True
            if not all(found.exact for found in real.values()):
                # So many matrices an owner that trade-offs are merged: the work shared out evenly
                # is then as good a bound as any, and rounds take long.
                vague = 0 if climbed else vague + 1
                if vague > stalled or self.is_close(_CLOSE_IF_VAGUE):
                    return True
            near = (self.bound, self.bound - self.bound // 200)
            new = self.price(real, near)
            if not climbed and not new:
                return True  # no pattern improves the master: converged up to rounding
        return False

    # ---- rounding ------------------------------------------------------------------------

    def round(self) -> None:
        """Look for counts as close to the bound as possible; keeps the best in ``counts``.

        A dive costs little, an integer program much, so dives at all limits come first.
        """
        if not self._orbits.are_trivial:
            if not self.is_close(_CLOSE_IF_MANY):
                self._round_levelled()
            if not self.is_close(_CLOSE_IF_MANY):
                self._round_apart()
            if not self.is_close(_CLOSE_AT_LAST) and len(self.problem.classes) <= _FEW_CLASSES:
                self._round_together()
            return
        floor = self.bound
        steps = (
            (dive, _DIVES, _CLOSE),
            (whole, _PROGRAMS, _CLOSE),
            (whole, _MORE_PROGRAMS, _CLOSE_AT_LAST),
        )
        for attempt, relaxations, close in steps:
            for relaxation in relaxations:
                limit = floor + int(floor * relaxation)
                if limit >= self.makespan or self.is_close(close) or self.budget.spent():
                    break
                counts = attempt(self, limit)
                if counts is not None:
                    self.offer(counts)

    def _round_apart(self) -> None:
        """Fix what each class takes, then fill its owners by themselves, the busiest first."""
        _, _, used = self.master(self.bound)
        kinds_of = [self.kinds_of(c) for c in range(len(self.problem.classes))]
        demand = shares(self.problem, self._orbits, kinds_of, used)
        parts = [alone(self.problem, c, mine) for c, mine in enumerate(demand)]
        found: dict[Problem, Counts] = {}
        for part in dict.fromkeys(parts):
            counts = greedy(part, [])
            if counts is None:
                return  # shares do not look at memory
            found[part] = counts
        goal = self.bound + self.bound // _ENOUGH_APART
        for _ in range(_MOST_APART):
            worst = max(found, key=lambda part: part.makespan(found[part]))
            if worst.makespan(found[worst]) <= goal:
                break
            dual = Dual((0,) * len(worst.kinds), (1,) * len(worst.kinds))
            columns = Columns(worst, self.engine, self.budget, found[worst], goal, dual)
            columns.round()
            if columns.makespan == worst.makespan(found[worst]):
                break
            found[worst] = columns.counts
        self.offer(together(self.problem, demand, [found[part] for part in parts]))

    def _round_levelled(self) -> None:
        """As if ranks with about the same fixed load were interchangeable; for many classes."""
        level = levelled(self.problem)
        if level is None:
            return
        columns = Columns(level, self.engine, self.budget, self.counts, self.bound, self.dual)
        columns.climb()
        columns.round()
        self.offer(columns.counts)

    def _round_together(self) -> None:
        """As if no classes were alike: dear, but without shares fixed beforehand."""
        columns = Columns(
            self.problem,
            self.engine,
            self.budget,
            self.counts,
            self.bound,
            self.dual,
            Orbits.trivial(self.problem),
        )
        for c, first in enumerate(self._first[orbit] for orbit in self._orbits.classes):
            for of, counts in self.patterns:
                if of == first:
                    mine = np.zeros(len(counts), np.int64)
                    mine[self.kinds_of(c)] = np.array(counts)[self.kinds_of(first)]
                    columns.add(c, tuple(mine.tolist()))
        columns.round()
        self.counts, self.makespan = columns.counts, columns.makespan

    def is_close(self, gap: float) -> bool:
        return self.makespan <= self.bound + int(self.bound * gap)

    def offer(self, counts: Counts) -> None:
        """Keep ``counts`` if they are feasible and, after local search, better."""
        if not self.problem.is_feasible(counts):
            return
        counts = improve(self.problem, counts)
        makespan = self.problem.makespan(counts)
        if makespan < self.makespan:
            self.counts, self.makespan = counts, makespan
            self.learn(counts)
