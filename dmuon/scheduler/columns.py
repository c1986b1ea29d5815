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
grow with the number of owners. Rounding comes after, by an integer program over the patterns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.engines import LinearProgram, Row, minimize
from dmuon.scheduler.greedy import improve
from dmuon.scheduler.knapsack import MAX_POINTS, Frontier, Option, frontier
from dmuon.scheduler.patterns import Pattern, maximal_patterns, spread, to_fix
from dmuon.scheduler.problem import UNLIMITED, Counts, Problem
from dmuon.scheduler.proof import Dual, bound_of, byte_units, dual_options, work_tables

__all__ = ["Budget", "Columns"]

Ints = npt.NDArray[np.int64]

_MOST_ROUNDS = 200  # master programs while climbing
_MOST_WORK = 150_000  # points of knapsacks, in one climb
_CLOSE = 1e-4  # a gap not worth any work
_CLOSE_IF_VAGUE = 1e-3  # the same, where knapsacks have more points than can be kept
_DIVES = (0.0, 0.001, 0.003, 0.008, 0.02, 0.05)  # how far above the bound
_PROGRAMS = (0.0, 0.002)
_MORE_PROGRAMS = (0.004, 0.008, 0.012)  # where the gap is still wide
_CLOSE_AT_LAST = 5e-3
_MOST_WHOLE = 300  # patterns in the integer master program
_MOST_PRICINGS = 6  # in one step of a dive
_MOST_NODES = 150  # of one integer master
_POINTS = 2_000  # of a frontier while climbing
_COARSE = 500  # points of a frontier that only suggests patterns


class Budget:
    """The wall clock, asked only after the work limits; remembers whether it ever cut short."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end, self.hit = now, now() + seconds, False

    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit


@dataclass(frozen=True, slots=True)
class _Left:
    """What is still to be shared out: matrices of each kind, owners of each class."""

    demand: tuple[int, ...]
    owners: tuple[int, ...]

    @classmethod
    def all_of(cls, problem: Problem) -> _Left:
        return cls(tuple(problem.demand.tolist()), tuple(c.size for c in problem.classes))

    def covers(self, pattern: Pattern) -> bool:
        c, counts = pattern
        return self.owners[c] > 0 and all(k <= d for k, d in zip(counts, self.demand, strict=True))

    def cut(self, pattern: Pattern) -> Pattern:
        """The pattern without what is not there any more."""
        c, counts = pattern
        return c, tuple(min(k, d) for k, d in zip(counts, self.demand, strict=True))

    def is_possible(self) -> bool:
        return min(self.demand) >= 0 and min(self.owners) >= 0

    def without(self, pattern: Pattern, times: int) -> _Left:
        c, counts = pattern
        return _Left(
            tuple(d - times * k for d, k in zip(self.demand, counts, strict=True)),
            tuple(n - times * (i == c) for i, n in enumerate(self.owners)),
        )


@dataclass
class Columns:
    """The patterns found so far for a problem, the best counts and the best bound."""

    problem: Problem
    engine: str
    budget: Budget
    counts: Counts
    bound: int
    dual: Dual
    patterns: dict[Pattern, int] = field(default_factory=dict)  # -> ticks

    def __post_init__(self) -> None:
        self.makespan = self.problem.makespan(self.counts)
        self._sizes, self._rooms = byte_units(self.problem)
        self._works = work_tables(self.problem)
        self._work_scale = np.array([max(1, int(table[1])) for table in self._works], float)
        self._capped = any(c.room < UNLIMITED for c in self.problem.classes)
        self._learn(self.counts)
        for c, owner in enumerate(self.problem.classes):
            for s, allowed in enumerate(owner.allowed):
                if allowed:
                    self._add(c, tuple(int(t == s) for t in range(len(self.problem.kinds))))

    # ---- patterns ------------------------------------------------------------------------

    def _learn(self, counts: Counts) -> None:
        for c, owner in enumerate(self.problem.classes):
            for row in np.unique(counts[list(owner.ranks)], axis=0):
                self._add(c, tuple(int(k) for k in row))

    def _add(self, c: int, counts: tuple[int, ...]) -> bool:
        """Remember a pattern; whether it is new."""
        if not any(counts) or (c, counts) in self.patterns:
            return False
        kinds = self.problem.kinds
        ticks = sum(int(kind.ticks[k]) for kind, k in zip(kinds, counts, strict=True))
        self.patterns[c, counts] = ticks + self.problem.classes[c].fixed
        return True

    def _within(self, limit: int) -> list[Pattern]:
        return [p for p, ticks in self.patterns.items() if ticks <= limit]

    def _fits_memory(self, pattern: Pattern) -> bool:
        c, counts = pattern
        need = sum(k * kind.nbytes for k, kind in zip(counts, self.problem.kinds, strict=True))
        return need <= self.problem.classes[c].room

    # ---- the master program and its prices ------------------------------------------------

    def _master(
        self, limit: int, left: _Left | None = None
    ) -> tuple[float, Dual, list[tuple[Pattern, float]]]:
        """(theta, dual, how often each pattern is used) over the patterns known.

        With ``left`` only what is left of the demand is shared out over the owners left.
        """
        problem = self.problem
        left = left or _Left.all_of(problem)
        patterns = [p for p in self._within(limit) if left.covers(p)]
        theta = len(patterns)
        rows = [
            Row([(p, counts[s]) for p, (_, counts) in enumerate(patterns) if counts[s]], "==", d)
            for s, d in enumerate(left.demand)
        ]
        rows += self._owner_rows(patterns, theta, left)
        rows += self._work_rows(patterns, left)
        memory = [c for c, owner in enumerate(problem.classes) if owner.room < UNLIMITED]
        rows += [self._memory_row(patterns, c, theta, left) for c in memory]
        cost = [0.0] * theta + [1.0]
        answer = minimize(LinearProgram(cost, rows), self.engine, time_limit_s=self._lp_seconds())
        kinds, classes = len(problem.kinds), len(problem.classes)
        values = answer.duals[:kinds].tolist()
        works = (answer.duals[kinds + classes : 2 * kinds + classes] / self._work_scale).tolist()
        # One price for all classes: the largest is the safe one.
        byte_price = max([0.0, *(-v for v in answer.duals[2 * kinds + classes :])])
        used = [(p, float(y)) for p, y in zip(patterns, answer.values, strict=False) if y > 1e-9]
        return float(answer.values[theta]), Dual.scaled(problem, values, works, byte_price), used

    def _owner_rows(self, patterns: Sequence[Pattern], theta: int, left: _Left) -> list[Row]:
        rows = []
        for c, owners in enumerate(left.owners):
            mine = [(p, 1.0) for p, (of, _) in enumerate(patterns) if of == c]
            rows.append(Row([*mine, (theta, -float(owners))], "<=", 0.0))
        return rows

    def _work_rows(self, patterns: Sequence[Pattern], left: _Left) -> list[Row]:
        """All owners together work at least as long on a kind as one owner would on all of it."""
        rows = []
        for s, d in enumerate(left.demand):
            table = self._works[s] / self._work_scale[s]
            terms = [(p, float(table[k[s]])) for p, (_, k) in enumerate(patterns) if k[s]]
            rows.append(Row(terms, ">=", float(table[d])))
        return rows

    def _memory_row(self, patterns: Sequence[Pattern], c: int, theta: int, left: _Left) -> Row:
        used = [
            (p, float(sum(k * size for k, size in zip(counts, self._sizes, strict=True))))
            for p, (of, counts) in enumerate(patterns)
            if of == c
        ]
        room = float(self._rooms[c] * left.owners[c])
        return Row([*used, (theta, -room)], "<=", 0.0)

    def _lp_seconds(self) -> float:
        return self.budget.left_s() + 1.0

    def _frontiers(
        self, dual: Dual, limit: int, points: int
    ) -> tuple[dict[tuple[bool, ...], Frontier], dict[tuple[bool, ...], Frontier]]:
        """By allowed kinds: what proves, and what real patterns come from."""
        proving, real = {}, {}
        for allowed in dict.fromkeys(c.allowed for c in self.problem.classes):
            options = dual_options(self.problem, dual, allowed)
            found = frontier(options, limit, bounding=False, max_points=points)
            real[allowed] = proving[allowed] = found
            if not found.exact:
                proving[allowed] = frontier(options, limit, bounding=True, max_points=points)
        return proving, real

    def _real(self, dual: Dual, limit: int, left: _Left) -> dict[tuple[bool, ...], Frontier]:
        """Frontiers of patterns from what is left; coarse, for they prove nothing."""
        found = {}
        for allowed in dict.fromkeys(c.allowed for c in self.problem.classes):
            options = [
                Option(o.cost[: d + 1], o.value[: d + 1])
                for o, d in zip(dual_options(self.problem, dual, allowed), left.demand, strict=True)
            ]
            found[allowed] = frontier(options, limit, bounding=False, max_points=_COARSE)
        return found

    def _price(self, real: dict[tuple[bool, ...], Frontier], limits: Iterable[int]) -> bool:
        """Add the most valuable patterns within each limit; whether any is new."""
        new = False
        for limit in limits:
            for c, owner in enumerate(self.problem.classes):
                if limit >= owner.fixed:
                    taken = real[owner.allowed].choice(limit - owner.fixed)
                    new |= self._add(c, tuple(int(k) for k in taken))
        return new

    # ---- the bound -----------------------------------------------------------------------

    def climb(self) -> bool:
        """Raise the bound until the master program shares everything out; whether it got there."""
        if not self._climb(_POINTS, stalled=10):
            return False
        return self._climb(MAX_POINTS, stalled=10)

    def _climb(self, points: int, stalled: int) -> bool:
        vague, work = 0, 0
        for _ in range(_MOST_ROUNDS):
            if self.bound >= self.makespan or self._is_close(_CLOSE):
                return True
            if self.budget.spent():
                return False
            theta, dual, _ = self._master(self.bound)
            proving, real = self._frontiers(dual, self.makespan, points)
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
                if vague > stalled or self._is_close(_CLOSE_IF_VAGUE):
                    return True
            near = (self.bound, self.bound - self.bound // 200)
            new = self._price(real, near)
            if not climbed and not new:
                return True  # no pattern improves the master: converged up to rounding
        return False

    # ---- rounding ------------------------------------------------------------------------

    def round(self) -> None:
        """Look for counts as close to the bound as possible; keeps the best in ``counts``.

        A dive costs little, an integer program much, so dives at all limits come first.
        """
        floor = self.bound
        steps = (
            (self._dive, _DIVES, _CLOSE),
            (self._whole, _PROGRAMS, _CLOSE),
            (self._whole, _MORE_PROGRAMS, _CLOSE_AT_LAST),
        )
        for attempt, relaxations, close in steps:
            for relaxation in relaxations:
                limit = floor + int(floor * relaxation)
                if limit >= self.makespan or self._is_close(close) or self.budget.spent():
                    break
                counts = attempt(limit)
                if counts is not None:
                    self.offer(counts)

    def _is_close(self, gap: float) -> bool:
        return self.makespan <= self.bound + int(self.bound * gap)

    def _dive(self, limit: int) -> Counts | None:
        """Fix the most used patterns of the linear program, solve it for the rest, and so on."""
        left = _Left.all_of(self.problem)
        fixed: list[tuple[Pattern, int]] = []
        known = self.patterns
        self.patterns = dict(known)  # what is cut to fit the rest is of no use later
        while any(left.demand) and any(left.owners) and not self.budget.spent():
            used = self._enriched(limit, left)
            for pattern, times in to_fix(used):
                times = min(times, left.owners[pattern[0]])
                if times and left.without(pattern, times).is_possible():
                    fixed.append((pattern, times))
                    left = left.without(pattern, times)
            self.patterns = {p: t for p, t in self.patterns.items() if left.covers(p)}
            for pattern, _ in used:
                if left.owners[pattern[0]]:
                    self._add(*left.cut(pattern))
        self.patterns = known
        return spread(self.problem, fixed)

    def _enriched(self, limit: int, left: _Left) -> list[tuple[Pattern, float]]:
        """The linear program's use of patterns, after a few rounds of pricing on what is left."""
        for _ in range(_MOST_PRICINGS):
            theta, dual, used = self._master(limit, left)
            real = self._real(dual, limit, left)
            near = [limit - int(limit * step) for step in (0.0, 0.001, 0.004, 0.016)]
            if theta <= 1 or not self._price(real, near) or self.budget.spent():
                break
        return used

    def _promising(self, limit: int) -> list[Pattern]:
        """The patterns that fit and that the linear program's prices like best."""
        self._complete(limit)
        for _ in range(_MOST_PRICINGS):
            _, dual, used = self._master(limit)
            near = (limit, limit - limit // 500, limit - limit // 100)
            if not self._price(self._real(dual, limit, _Left.all_of(self.problem)), near):
                break
        patterns = [p for p in self._within(limit) if self._fits_memory(p)]
        if len(patterns) <= _MOST_WHOLE:
            return patterns
        values = {
            c: [o.value for o in dual_options(self.problem, dual, owner.allowed)]
            for c, owner in enumerate(self.problem.classes)
        }
        chosen = {p for p, _ in used}

        def worth(pattern: Pattern) -> int:
            c, counts = pattern
            return sum(int(value[k]) for value, k in zip(values[c], counts, strict=True))

        ranked = sorted(patterns, key=lambda p: (p not in chosen, -worth(p), p))
        return ranked[:_MOST_WHOLE]

    def _complete(self, limit: int) -> bool:
        """Add every pattern that no matrix can be added to, if they are few."""
        for c, owner in enumerate(self.problem.classes):
            full = maximal_patterns(self.problem, c, limit - owner.fixed)
            if full is None:
                return False
            for counts in full:
                self._add(c, counts)
        return True

    def _whole(self, limit: int) -> Counts | None:
        """The integer master program: cover as much as possible with patterns within ``limit``."""
        problem = self.problem
        patterns = self._promising(limit)
        n, kinds = len(patterns), len(problem.kinds)
        rows = []
        for s, d in enumerate(problem.demand.tolist()):
            terms = [(p, counts[s]) for p, (_, counts) in enumerate(patterns) if counts[s]]
            rows.append(Row([*terms, (n + s, 1.0)], ">=", d))
        for c, owner in enumerate(problem.classes):
            mine = [(p, 1.0) for p, (of, _) in enumerate(patterns) if of == c]
            rows.append(Row(mine, "<=", float(owner.size)))
        missing = [float(kind.ticks[1]) / max(1.0, limit) for kind in problem.kinds]
        program = LinearProgram([0.0] * n + missing, rows, [True] * (n + kinds))
        answer = minimize(
            program, self.engine, time_limit_s=self._lp_seconds(), most_nodes=_MOST_NODES
        )
        used = np.rint(answer.values[:n]).astype(np.int64).tolist()
        return spread(problem, [(p, k) for p, k in zip(patterns, used, strict=True) if k])

    def offer(self, counts: Counts) -> None:
        """Keep ``counts`` if they are feasible and, after local search, better."""
        if not self.problem.is_feasible(counts):
            return
        counts = improve(self.problem, counts)
        makespan = self.problem.makespan(counts)
        if makespan < self.makespan:
            self.counts, self.makespan = counts, makespan
            self._learn(counts)
