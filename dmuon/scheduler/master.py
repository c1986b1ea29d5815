"""The master program of column generation over the patterns found so far, and its prices.

Of classes that are alike (see `symmetry`) only the first has patterns, and stands for all of them:
the program has a row for each orbit of kinds and of classes, not for each kind and class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.budget import Budget
from dmuon.scheduler.engines import EngineError, LinearProgram, Row, minimize
from dmuon.scheduler.knapsack import Frontier, Option, frontier
from dmuon.scheduler.patterns import Pattern
from dmuon.scheduler.problem import UNLIMITED, Counts, Problem
from dmuon.scheduler.proof import Dual, byte_units, dual_options, work_tables
from dmuon.scheduler.symmetry import Orbits, orbits_of

__all__ = ["Frontiers", "Left", "Master"]

Ints = npt.NDArray[np.int64]
Frontiers = dict[tuple[bool, ...], Frontier]

_COARSE = 500  # points of a frontier that only suggests patterns


@dataclass(frozen=True, slots=True)
class Left:
    """What is still to be shared out: matrices of each kind, owners of each class.

    The owners of alike classes are counted with the first of them.
    """

    demand: tuple[int, ...]
    owners: tuple[int, ...]

    @classmethod
    def all_of(cls, problem: Problem, orbits: Orbits) -> Left:
        owners, first = [0] * len(problem.classes), orbits.first_classes
        for c, orbit in enumerate(orbits.classes):
            owners[first[orbit]] += problem.classes[c].size
        return cls(tuple(problem.demand.tolist()), tuple(owners))

    def covers(self, pattern: Pattern) -> bool:
        c, counts = pattern
        return self.owners[c] > 0 and all(k <= d for k, d in zip(counts, self.demand, strict=True))

    def cut(self, pattern: Pattern) -> Pattern:
        """The pattern without what is not there any more."""
        c, counts = pattern
        return c, tuple(min(k, d) for k, d in zip(counts, self.demand, strict=True))

    def is_possible(self) -> bool:
        return min(self.demand) >= 0 and min(self.owners) >= 0

    def without(self, pattern: Pattern, times: int) -> Left:
        c, counts = pattern
        demand = tuple(d - k * times for k, d in zip(counts, self.demand, strict=True))
        owners = tuple(n - times * (i == c) for i, n in enumerate(self.owners))
        return Left(demand, owners)


@dataclass
class Master:
    """The patterns found so far for a problem, the best counts and the best bound."""

    problem: Problem
    engine: str
    budget: Budget
    counts: Counts
    bound: int
    dual: Dual
    orbits: Orbits | None = None  # None: what refinement finds
    patterns: dict[Pattern, int] = field(default_factory=dict)  # -> ticks

    def __post_init__(self) -> None:
        problem = self.problem
        self.makespan = problem.makespan(self.counts)
        self._sizes, self._rooms = byte_units(problem)
        self._works = work_tables(problem)
        self._work_scale = np.array([max(1, int(table[1])) for table in self._works], float)
        self._orbits = self.orbits or orbits_of(problem)
        self._first = self._orbits.first_classes
        self._fold = np.zeros((len(problem.kinds), len(set(self._orbits.kinds))), np.int64)
        self._fold[range(len(problem.kinds)), self._orbits.kinds] = 1
        self.learn(self.counts)
        for c in self._first:
            for s, allowed in enumerate(problem.classes[c].allowed):
                if allowed:
                    self.add(c, tuple(int(t == s) for t in range(len(problem.kinds))))

    # ---- patterns ------------------------------------------------------------------------

    def kinds_of(self, c: int) -> list[int]:
        """The kinds that a class may take, so that the i-th of alike classes are alike."""
        allowed = np.flatnonzero(self.problem.classes[c].allowed).tolist()
        return sorted(allowed, key=lambda s: (self._orbits.kinds[s], s))

    def learn(self, counts: Counts) -> None:
        """Remember the patterns of these counts, as those of the first of alike classes."""
        for c, owner in enumerate(self.problem.classes):
            first = self._first[self._orbits.classes[c]]
            rows = np.zeros((owner.size, len(self.problem.kinds)), np.int64)
            rows[:, self.kinds_of(first)] = counts[np.array(owner.ranks)[:, None], self.kinds_of(c)]
            for row in np.unique(rows, axis=0):
                self.add(first, tuple(row.tolist()))

    def add(self, c: int, counts: tuple[int, ...]) -> bool:
        """Remember a pattern; whether it is new."""
        if not any(counts) or (c, counts) in self.patterns:
            return False
        kinds = self.problem.kinds
        ticks = sum(int(kinds[s].ticks[k]) for s, k in enumerate(counts) if k)
        self.patterns[c, counts] = ticks + self.problem.classes[c].fixed
        return True

    def within(self, limit: int) -> list[Pattern]:
        return [p for p, ticks in self.patterns.items() if ticks <= limit]

    def fits_memory(self, pattern: Pattern) -> bool:
        c, counts = pattern
        need = sum(k * kind.nbytes for k, kind in zip(counts, self.problem.kinds, strict=True))
        return need <= self.problem.classes[c].room

    # ---- the master program and its prices ------------------------------------------------

    def everything(self) -> Left:
        return Left.all_of(self.problem, self._orbits)

    def master(
        self, limit: int, left: Left | None = None
    ) -> tuple[float, Dual, list[tuple[Pattern, float]]]:
        """(theta, dual, how often each pattern is used) over the patterns known.

        With ``left`` only what is left of the demand is shared out over the owners left.
        """
        if left is not None:
            return self._solved([p for p in self.within(limit) if left.covers(p)], left)
        try:
            return self._solved(self.within(limit), self.everything())
        except EngineError:
            # Where prices fall with the batch, the patterns known within the limit may not share
            # everything out. With those of the best counts they do, and whatever the duals are,
            # they prove a bound. If it was the solver that failed, it fails again.
            return self._solved(self.within(max(limit, self.makespan)), self.everything())

    def _solved(
        self, patterns: Sequence[Pattern], left: Left
    ) -> tuple[float, Dual, list[tuple[Pattern, float]]]:
        problem = self.problem
        theta = len(patterns)
        table = np.array([counts for _, counts in patterns], np.int64)
        table = table.reshape(theta, len(problem.kinds))
        rows = _rows(table @ self._fold, "==", np.array(left.demand, np.int64) @ self._fold)
        rows += self._owner_rows(patterns, theta, left)
        rows += self._work_rows(table, left)
        memory = [c for c in self._first if problem.classes[c].room < UNLIMITED]
        rows += [self._memory_row(patterns, c, theta, left) for c in memory]
        cost = [0.0] * theta + [1.0]
        answer = minimize(LinearProgram(cost, rows), self.engine, time_limit_s=self.lp_seconds())
        kinds, classes = self._fold.shape[1], len(self._first)
        orbit = list(self._orbits.kinds)
        values = answer.duals[:kinds][orbit].tolist()
        works = answer.duals[kinds + classes : 2 * kinds + classes][orbit] / self._work_scale
        # One price for all classes: the largest is the safe one.
        byte_price = max([0.0, *(-v for v in answer.duals[2 * kinds + classes :])])
        used = [(p, float(y)) for p, y in zip(patterns, answer.values, strict=False) if y > 1e-9]
        dual = Dual.scaled(problem, values, works.tolist(), byte_price)
        return float(answer.values[theta]), dual, used

    def _owner_rows(self, patterns: Sequence[Pattern], theta: int, left: Left) -> list[Row]:
        mine: dict[int, list[tuple[int, float]]] = {c: [] for c in self._first}
        for p, (c, _) in enumerate(patterns):
            mine[c].append((p, 1.0))
        return [Row([*mine[c], (theta, -float(left.owners[c]))], "<=", 0.0) for c in self._first]

    def _work_rows(self, table: Ints, left: Left) -> list[Row]:
        """All owners together work at least as long on a kind as one owner would on all of it."""
        works = [t / scale for t, scale in zip(self._works, self._work_scale, strict=True)]
        each = np.zeros(table.shape)
        for s, work in enumerate(works):
            each[:, s] = work[table[:, s]]
        least = np.array([work[d] for work, d in zip(works, left.demand, strict=True)])
        return _rows(each @ self._fold, ">=", least @ self._fold)

    def _memory_row(self, patterns: Sequence[Pattern], c: int, theta: int, left: Left) -> Row:
        used = [
            (p, float(sum(k * size for k, size in zip(counts, self._sizes, strict=True))))
            for p, (of, counts) in enumerate(patterns)
            if of == c
        ]
        room = float(self._rooms[c] * left.owners[c])
        return Row([*used, (theta, -room)], "<=", 0.0)

    def lp_seconds(self) -> float:
        return self.budget.left_s() + 1.0

    def frontiers(self, dual: Dual, limit: int, points: int) -> tuple[Frontiers, Frontiers]:
        """By allowed kinds: what proves, and what real patterns come from."""
        proving, real = {}, {}
        for allowed in dict.fromkeys(self.problem.classes[c].allowed for c in self._first):
            options = dual_options(self.problem, dual, allowed)
            found = frontier(options, limit, bounding=False, max_points=points)
            real[allowed] = proving[allowed] = found
            if not found.exact:
                proving[allowed] = frontier(options, limit, bounding=True, max_points=points)
        return proving, real

    def real(self, dual: Dual, limit: int, left: Left) -> Frontiers:
        """Frontiers of patterns from what is left; coarse, for they prove nothing."""
        found = {}
        for allowed in dict.fromkeys(self.problem.classes[c].allowed for c in self._first):
            demand = [d for d, yes in zip(left.demand, allowed, strict=True) if yes]
            options = [
                Option(o.cost[: d + 1], o.value[: d + 1])
                for o, d in zip(dual_options(self.problem, dual, allowed), demand, strict=True)
            ]
            found[allowed] = frontier(options, limit, bounding=False, max_points=_COARSE)
        return found

    def price(self, real: Frontiers, limits: Iterable[int]) -> bool:
        """Add the most valuable patterns within each limit; whether any is new."""
        new = False
        for limit in limits:
            for c in self._first:
                owner = self.problem.classes[c]
                if limit >= owner.fixed:
                    counts = np.zeros(len(self.problem.kinds), np.int64)
                    counts[list(owner.allowed)] = real[owner.allowed].choice(limit - owner.fixed)
                    new |= self.add(c, tuple(counts.tolist()))
        return new


def _rows(table: npt.NDArray[np.generic], sense: str, bounds: npt.NDArray[np.generic]) -> list[Row]:
    """A row for each column of ``table`` [patterns, rows]; zeros are left out."""
    rows = []
    for column, bound in zip(table.T, bounds.tolist(), strict=True):
        at = np.flatnonzero(column)
        terms = zip(at.tolist(), column[at].astype(float).tolist(), strict=True)
        rows.append(Row(list(terms), sense, float(bound)))
    return rows
