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
(`Columns.round`, class by class where classes are alike).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.bound import bound_of
from dmuon.scheduler.exhaustive import cover, spread
from dmuon.scheduler.greedy import greedy, improve
from dmuon.scheduler.knapsack import MAX_POINTS
from dmuon.scheduler.master import (
    Master,
    Orbits,
    Pattern,
    levelled,
    orbits_of,
)
from dmuon.scheduler.plan import Dual
from dmuon.scheduler.problem import Counts, Problem

__all__ = ["Columns", "fits_columns"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_ROUNDS = 200  # master programs while climbing
_MOST_WORK = 150_000  # points of knapsacks, in one climb
_CLOSE = 1e-4  # a gap not worth any work
_CLOSE_IF_VAGUE = 1e-3  # the same, where knapsacks have more points than can be kept
_RELAXED = (0.0, 0.0005, 0.002, 0.004, 0.008, 0.02, 0.05)  # how far above the bound
_CLOSE_AT_LAST = 5e-3
_CLOSE_IF_MANY = 1e-2  # the same, where there are many classes
_MOST_APART = 4  # classes by themselves, after which the others are no longer the busiest
_ENOUGH_APART = 1000  # the part of the bound that is close enough for one of many classes
_POINTS = 2_000  # of a frontier while climbing
_MOST_PRICINGS = 6  # at one limit
_GIVEN_BACK = (0, 1, 2)  # uses of each pattern that are decided anew
_STATES = 1_000  # of the search for what is left
_WORK = 4_000_000
_MOST_KINDS = 200  # more make the master program too slow for what it gains
_MOST_MOVES = 2_000  # of single matrices between classes
_GIVE_TO = 16  # classes tried
_WHOLE = 1e-6  # a fraction closer to a whole number than this is one


def fits_columns(problem: Problem) -> bool:
    """Whether the master program is small enough to be worth its time."""
    return len(set(orbits_of(problem).kinds)) <= _MOST_KINDS


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

        The closer, the fewer patterns fit: of a few limits above the bound the first that works.
        """
        if not self._orbits.are_trivial:
            if not self.is_close(_CLOSE_IF_MANY):
                self._round_levelled()
            if not self.is_close(_CLOSE_IF_MANY):
                self._round_apart()
            return
        for relaxation in _RELAXED:
            limit = self.bound + int(self.bound * relaxation)
            if limit >= self.makespan or self.is_close(_CLOSE) or self.budget.spent():
                break
            counts = self._whole(limit)
            if counts is not None:
                self.offer(counts)

    def _whole(self, limit: int) -> Counts | None:
        """Whole uses of patterns, rounded down, and what is then left by a covering search."""
        for _ in range(_MOST_PRICINGS):
            _, dual, used = self.master(limit)
            near = (limit, limit - limit // 1000, limit - limit // 200)
            real = self.real(dual, limit, self.everything())
            if not self.price(real, near) or self.budget.spent():
                break
        for back in _GIVEN_BACK:
            if self.budget.spent():
                break
            fixed = [(p, max(int(times + _WHOLE) - back, 0)) for p, times in used]
            counts = _completed(self.problem, fixed, limit, dual)
            if counts is not None:
                return counts
        return None

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


# ---- whole owners ---------------------------------------------------------------------------


def _completed(
    problem: Problem, fixed: Sequence[tuple[Pattern, int]], limit: int, dual: Dual
) -> Counts | None:
    """Counts with these patterns, and with what is left of matrices and owners."""
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    free = [list(owner.ranks) for owner in problem.classes]
    for (c, pattern), times in fixed:
        for _ in range(min(times, len(free[c]))):
            counts[free[c].pop(0)] = pattern
    spread(problem, counts)
    left = problem.demand - counts.sum(0)
    ranks = [rank for some in free for rank in some]
    kinds = np.flatnonzero(left)
    if not len(kinds):
        return counts
    if not ranks:
        return None
    number = {rank: i for i, rank in enumerate(ranks)}
    classes = tuple(
        replace(
            owner,
            ranks=tuple(number[rank] for rank in some),
            allowed=tuple(owner.allowed[s] for s in kinds.tolist()),
        )
        for owner, some in zip(problem.classes, free, strict=True)
        if some
    )
    rest = replace(
        problem,
        kinds=tuple(replace(problem.kinds[s], count=int(left[s])) for s in kinds.tolist()),
        classes=classes,
        members=((),) * len(kinds),
        forced=(),
    )
    some_dual = Dual(
        tuple(dual.values[s] for s in kinds.tolist()),
        tuple(dual.works[s] for s in kinds.tolist()),
        dual.byte_price,
    )
    found = cover(rest, limit, some_dual, _WORK, _STATES).counts
    if found is None:
        return None
    counts[np.array(ranks)[:, None], kinds] += found
    return counts


# ---- classes one by one ---------------------------------------------------------------------


def shares(
    problem: Problem,
    orbits: Orbits,
    kinds_of: Sequence[Sequence[int]],
    used: Sequence[tuple[Pattern, float]],
) -> Ints:
    """[classes, kinds]: how many of each kind a class takes, near what the patterns used say.

    ``used`` are patterns of the first of alike classes, for all of them together; ``kinds_of`` are
    each class's kinds, so that the i-th of alike classes are alike.
    """
    ideal = np.zeros((len(problem.classes), len(problem.kinds)))
    for (c, counts), times in used:
        ideal[c] += np.array(counts) * times
    first, owners = orbits.first_classes, Counter[int]()
    for c, orbit in enumerate(orbits.classes):
        owners[orbit] += problem.classes[c].size
    for c in range(len(problem.classes) - 1, -1, -1):  # the first of alike classes is the last
        origin, part = first[orbits.classes[c]], problem.classes[c].size
        all_of_them = ideal[origin, list(kinds_of[origin])]
        ideal[c, list(kinds_of[c])] = all_of_them * (part / owners[orbits.classes[c]])
    return _rounded(problem, ideal)


def _rounded(problem: Problem, ideal: Floats) -> Ints:
    """Rounded so that every kind adds up, and that no class gets much more work than is ideal."""
    taken = np.floor(ideal + _WHOLE).astype(np.int64)
    sizes = np.array([c.size for c in problem.classes], float)
    allowed = np.array([c.allowed for c in problem.classes]).T  # [kinds, classes]
    # What a matrix costs where owners take about as many of its kind as is usual.
    usual = [-(-kind.count // int(sizes[may].sum())) for kind, may in zip(problem.kinds, allowed)]
    each = np.array([kind.ticks[k] / k for kind, k in zip(problem.kinds, usual)])
    surplus = (taken - ideal) @ each / sizes  # ticks of an owner
    for s, kind in enumerate(problem.kinds):
        missing = kind.count - int(taken[:, s].sum())
        for _ in range(abs(missing)):
            step = 1 if missing > 0 else -1
            may = np.flatnonzero(allowed[s] & (taken[:, s] + step >= 0))
            c = may[int((step * surplus[may]).argmin())]
            taken[c, s] += step
            surplus[c] += step * each[s] / sizes[c]
    for _ in range(_MOST_MOVES):
        if not _move(taken, surplus, each, sizes, allowed):
            break
    return taken


def _move(
    taken: Ints, surplus: Floats, each: Floats, sizes: Floats, allowed: npt.NDArray[np.bool_]
) -> bool:
    """Let the class of most surplus give a matrix to another one, for another or for none."""
    top = int(surplus.argmax())
    best, chosen = float(surplus[top]), None
    for c in np.argsort(surplus, kind="stable")[:_GIVE_TO].tolist():
        both = np.flatnonzero(allowed[:, top] & allowed[:, c]).tolist()
        for s in (s for s in both if taken[top, s]):
            for t in (-1, *(t for t in both if taken[c, t] and t != s)):
                ticks = each[s] - (each[t] if t >= 0 else 0.0)
                after = max(surplus[top] - ticks / sizes[top], surplus[c] + ticks / sizes[c])
                if after < best - _WHOLE * abs(best):
                    best, chosen = after, (c, s, t, ticks)
    if chosen is None:
        return False
    c, s, t, ticks = chosen
    for kind, step in ((s, 1), (t, -1)):
        if kind >= 0:
            taken[top, kind] -= step
            taken[c, kind] += step
    surplus[top] -= ticks / sizes[top]
    surplus[c] += ticks / sizes[c]
    return True


def alone(problem: Problem, c: int, demand: Ints) -> Problem:
    """The problem of class ``c`` with its share of the matrices: equal for equal shares."""
    owner = problem.classes[c]
    kinds = tuple(
        replace(problem.kinds[s], pool=-1, count=int(demand[s]))
        for s in np.flatnonzero(demand).tolist()
    )
    owners = replace(owner, ranks=tuple(range(owner.size)), allowed=(True,) * len(kinds))
    return Problem(kinds, (owners,), ((),) * len(kinds), problem.ticks_per_ms, problem.memory_cap)


def together(problem: Problem, demand: Ints, parts: Sequence[Counts]) -> Counts:
    """The counts of all ranks from those of each class ``alone``."""
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    for owner, mine, part in zip(problem.classes, demand, parts, strict=True):
        counts[np.array(owner.ranks)[:, None], np.flatnonzero(mine)] = part
    return counts
