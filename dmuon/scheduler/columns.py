"""Column generation: how owners can be filled, instead of who owns what.

A *pattern* is how many matrices of each shape one owner of a class takes. For a makespan T the
master program shares the matrices out over patterns that take at most T, each class with its own
number of owners, and its owners work on a shape at least as long as one owner would on all of it::

    minimize  theta    such that   sum_p x[p, s] * y[p]        = d_s          for every shape s
                                   sum_(p of class c) y[p]    <= n_c * theta  for every class c
                                   sum_p C_s(x[p, s]) * y[p]  >= C_s(d_s)     for every shape s

T is out of reach if theta > 1 at the optimum. From the duals `bound` computes the least T that they
do not rule out; that is the next T to try. So T climbs from below, every value passed is proven
impossible, and no tolerance is involved. Knapsacks, solved exactly, add patterns.

Programs go to HiGHS through PuLP, else to CBC. No answer is believed: the bounds and counts that it
implies are computed and checked by our own arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import eq, ge, le
from typing import Any

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.bound import Holdings, cover, spread, work_tables
from dmuon.scheduler.plan import Dual
from dmuon.scheduler.problem import Counts, Problem, improve, longest_first

Floats = npt.NDArray[np.float64]
Pattern = tuple[int, tuple[int, ...]]  # class, count of each shape
_Used = tuple[Pattern, float]  # how often
_Sense = Callable[[Any, float], Any]

PREFERRED = ("HiGHS", "PULP_CBC_CMD")  # in PuLP's names
_WORTH = 1e17  # of everything, about: exact in 64 bits, and fine enough
_CLIMB_WORK = 30_000_000  # pairs formed by knapsacks while climbing
_ROUND_WORK = 28_000_000
_CLIMB = 1_000  # the bound is raised by one part in so many at a time, or an eighth of the gap
_NEAR = (0, 2, 5, 10, 20, 50, 100)  # patterns are added so far below a limit, in 1/10,000
_MOST_PRICINGS = 12  # at one limit
_LIMITS = (0, 3, 6, 10, 20, 30, 50, 80, 160, 400)  # above the bound, in 1/10,000
_LEVELS = 64  # one owner in so many at least is filled at a time
_FEW = 8  # owners that a covering search is tried for
_WORK = 1_500_000  # of this search
_MASTER = 20  # the work that a number in a master program counts as
MOST_SHAPES = 200  # more make the master program too slow for what it gains
MOST_CLASSES = 100
_WHOLE = 1e-6  # a fraction closer to a whole number than this is one


class Budget:
    """The wall clock, which is asked only after the work limits; ``hit`` if it ever cut short."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end, self.hit = now, now() + seconds, False

    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit


class EngineError(Exception):
    """A solver raised, is not there, or gave no solution."""


def available_engines() -> tuple[str, ...]:
    """The solvers that PuLP finds here, in order of preference."""
    found: set[str] = set()

    def find() -> None:
        with suppress(ImportError):
            import pulp

            found.update(pulp.listSolvers(onlyAvailable=True))

    # On a stack of its own: PuLP keeps an exception of its import, and that all callers' frames.
    thread = threading.Thread(target=find)
    thread.start()
    thread.join()
    return tuple(name for name in PREFERRED if name in found)


def minimize_last(
    table: Floats, senses: Sequence[_Sense], bounds: Floats, engine: str, time_limit_s: float
) -> tuple[Floats, Floats]:
    """(x, dual of each row) with x >= 0 and the least last x such that each row of ``table @ x``
    compares to its bound as its ``sense`` (`eq`, `le` or `ge`) says; EngineError if anything goes
    wrong. One thread, so that equal input gives an equal answer."""
    import pulp

    try:
        model = pulp.LpProblem("plan", pulp.LpMinimize)
        x = [model.add_variable(f"x{i:06d}", 0) for i in range(table.shape[1])]
        model += pulp.LpAffineExpression([(x[-1], 1.0)])
        rows = []
        for i, (row, sense, bound) in enumerate(zip(table, senses, bounds.tolist(), strict=True)):
            at = np.flatnonzero(row).tolist()
            left = pulp.LpAffineExpression([(x[j], float(row[j])) for j in at])
            model += sense(left, bound), f"r{i:06d}"
            rows.append(model.get_constraint_by_name(f"r{i:06d}"))
        solver = pulp.HiGHS if engine == "HiGHS" else pulp.PULP_CBC_CMD
        threads = 1 if engine == "HiGHS" else None  # one, unless CBC is told otherwise
        model.solve(solver(msg=False, mip=False, timeLimit=time_limit_s, threads=threads))
    except Exception as error:  # a solver may raise anything; planning must go on
        raise EngineError(f"{engine} failed: {type(error).__name__}: {error}") from error
    if model.sol_status != pulp.LpSolutionOptimal:
        raise EngineError(f"{engine} found no solution: {pulp.LpSolution[model.sol_status]}")
    values = np.array([np.nan if v.varValue is None else v.varValue for v in x])
    duals = np.array([0.0 if r.pi is None else r.pi for r in rows])
    if not (np.isfinite(values).all() and np.isfinite(duals).all()):
        raise EngineError(f"{engine} gave values that are no numbers")
    return values, duals


class Columns:
    """Raises the bound of a problem and improves its counts, step by step."""

    def __init__(
        self, problem: Problem, engine: str, budget: Budget, counts: Counts, bound: int, dual: Dual
    ) -> None:
        self.problem, self.engine, self.budget = problem, engine, budget
        self.counts, self.makespan = counts, problem.makespan(counts)
        self.bound, self.dual = bound, dual
        self.left = 0  # of the work
        self._patterns: dict[Pattern, int] = {}  # -> ticks
        self._works = work_tables(problem)
        self._scale = np.array([max(1, int(table[1])) for table in self._works], float)
        for c, owner in enumerate(problem.classes):
            for row in np.unique(counts[list(owner.ranks)], axis=0):
                self._add(c, tuple(row.tolist()))
            for s, allowed in enumerate(owner.allowed):
                if allowed:
                    self._add(c, tuple(int(t == s) for t in range(len(problem.shapes))))

    def climb(self) -> None:
        """Raise the bound until the master program shares everything out."""
        self.left = _CLIMB_WORK
        while self.bound < self.makespan and self.left > 0 and not self.budget.spent():
            theta, dual, _ = self._master(self.bound)
            # Close to the bound few points can be worth enough.
            limit = self.bound + max(self.bound // _CLIMB, (self.makespan - self.bound) // 8) + 1
            limit = min(limit, self.makespan)
            real = proving = Holdings(self.problem, dual, limit, real=True)
            self.left -= real.work
            if not real.are_exact:
                proving = Holdings(self.problem, dual, limit)
                self.left -= proving.work
            proven = proving.bound()
            if climbed := proven > self.bound:
                self.bound, self.dual = proven, dual
            new = self._price(real, self.bound)
            if not climbed and (theta <= 1 + 1e-9 or not new):
                return  # everything is shared out, or converged up to rounding

    def round(self) -> None:
        """Look for better ``counts`` close to the bound, under limits that rise to those known."""
        self.left = _ROUND_WORK
        for far in _LIMITS:
            limit = self.bound + self.bound * far // 10_000
            if limit >= self.makespan or self.left <= 0 or self.budget.spent():
                return
            if (counts := self._whole(limit)) is not None and self.problem.is_feasible(counts):
                counts = improve(self.problem, counts, self.budget.spent)
                if self.problem.makespan(counts) < self.makespan:
                    self.counts, self.makespan = counts, self.problem.makespan(counts)

    def _whole(self, limit: int) -> Counts | None:
        """Counts within a limit or, if none are found, above it; None if what is left fits nowhere.
        Patterns that the master program uses whole times are kept, else its most used; then the
        same with what is left. A covering search is tried for the last few owners."""
        problem = self.problem
        for _ in range(_MOST_PRICINGS):
            theta, dual, used = self._master(limit)
            real = Holdings(problem, dual, limit, real=True)
            self.left -= real.work
            if not self._price(real, limit) or self.left <= 0:
                break
        if not used or theta > 1 + _WHOLE or self.left <= 0 or self.budget.spent():
            return self.counts
        if problem.world <= _FEW:
            found, complete = cover(problem, limit, dual, _WORK)
            self.left -= _WORK
            if found is not None or complete:
                return self.counts if found is None else found
        counts = np.zeros_like(self.counts)
        free = [list(owner.ranks) for owner in problem.classes]
        kept = [(p, int(times + _WHOLE)) for p, times in used if times > 1 - _WHOLE]
        some = 1 + problem.world // _LEVELS
        if sum(times for _, times in kept) < some:
            kept = [(p, 1) for p, _ in sorted(used, key=lambda u: -u[1])[:some]]
        for (c, pattern), times in kept:
            for _ in range(min(times, len(free[c]))):
                counts[free[c].pop(0)] = pattern
        spread(problem, counts)
        remaining, ranks, shapes = problem.part(free, problem.demand - counts.sum(0))
        if not shapes:
            return counts
        start = longest_first(remaining) if ranks else None
        if start is None:
            return None
        columns = Columns(remaining, self.engine, self.budget, start, 0, dual)
        number = {c: n for n, c in enumerate(c for c, some in enumerate(free) if some)}
        for c, pattern in self._patterns:
            if c in number:
                most = np.minimum(np.array(pattern)[shapes], remaining.demand)
                columns._add(number[c], tuple(most.tolist()))
        columns.left = self.left
        inner = columns._whole(limit)
        self.left = columns.left
        if inner is None:
            return None
        counts[np.ix_(ranks, shapes)] += inner
        return counts

    def _add(self, c: int, counts: tuple[int, ...]) -> bool:
        """Remember a pattern; True if it is new."""
        problem = self.problem
        stored = sum(k * shape.nbytes for k, shape in zip(counts, problem.shapes, strict=True))
        if not any(counts) or (c, counts) in self._patterns or stored > problem.classes[c].room:
            return False
        ticks = sum(int(shape.ticks[k]) for shape, k in zip(problem.shapes, counts, strict=True))
        self._patterns[c, counts] = ticks + problem.classes[c].fixed
        return True

    def _price(self, real: Holdings, limit: int) -> bool:
        """Add the most valuable patterns close to a limit; True if any is new."""
        new = False
        for near in (limit - limit * far // 10_000 for far in _NEAR):
            for c, owner in enumerate(self.problem.classes):
                taken = real.frontiers[owner.allowed].choice(near - owner.fixed)
                if taken is not None:
                    counts = np.zeros(len(self.problem.shapes), np.int64)
                    counts[list(owner.allowed)] = taken
                    new |= self._add(c, tuple(counts.tolist()))
        return new

    def _master(self, limit: int) -> tuple[float, Dual, list[_Used]]:
        """(theta, dual, how often each pattern is used) over the patterns known."""
        try:
            return self._solved(limit)
        except EngineError:
            # Where prices fall with the batch, the patterns known within the limit may not share
            # everything out; with those of the best counts they do, and any duals prove a bound.
            return self._solved(max(limit, self.makespan))

    def _solved(self, limit: int) -> tuple[float, Dual, list[_Used]]:
        problem, shapes = self.problem, len(self.problem.shapes)
        patterns = [p for p, ticks in self._patterns.items() if ticks <= limit]
        taken = np.array([counts for _, counts in patterns], np.int64).reshape(-1, shapes).T
        sizes = np.array([[c.size] for c in problem.classes], float)
        mine = np.zeros((len(sizes), len(patterns)))
        mine[[c for c, _ in patterns], range(len(patterns))] = 1.0
        each = np.array([w[k] / one for w, k, one in zip(self._works, taken, self._scale)])
        least = [float(work[-1]) for work in self._works] / self._scale
        rows = np.vstack((taken, mine, each.reshape(shapes, -1)))
        theta = np.vstack((np.zeros((shapes, 1)), -sizes, np.zeros((shapes, 1))))
        self.left -= _MASTER * rows.size
        values, duals = minimize_last(
            np.hstack((rows, theta)),
            [eq] * shapes + [le] * len(sizes) + [ge] * shapes,
            np.concatenate((problem.demand.astype(float), np.zeros(len(sizes)), least)),
            self.engine,
            self.budget.left_s() + 1.0,
        )
        # A dual in integers; any rounding leaves a valid proof.
        prices, works = duals[:shapes], np.maximum(duals[-shapes:] / self._scale, 0.0)
        total = np.abs(prices) @ problem.demand
        total += works @ np.array([float(table[-1]) for table in self._works])
        scale = _WORTH / float(total) if total > 1e-200 else 0.0
        dual = Dual(*(tuple(round(v * scale) for v in row.tolist()) for row in (prices, works)))
        used = [(p, float(y)) for p, y in zip(patterns, values, strict=False) if y > 1e-9]
        return float(values[-1]), dual, used
