"""Column generation: how owners can be filled, instead of who owns what.

A *pattern* is how many matrices of each shape one owner of a class takes. For a makespan T the
master program shares the matrices out over patterns that take at most T, each class with its own
number of owners, and its owners work on a shape at least as long as one owner would on all of it::

    minimize  theta    such that   sum_p x[p, s] * y[p]        = d_s          for every shape s
                                   sum_(p of class c) y[p]    <= n_c * theta  for every class c
                                   sum_p C_s(x[p, s]) * y[p]  >= C_s(d_s)     for every shape s

T is out of reach if theta > 1 at the optimum. Its duals are values of matrices, from which `bound`
computes the least T that they do not rule out; that is the next T to try. So T climbs from below,
every value passed is proven impossible, and no tolerance is involved. Patterns are added by solving
the knapsack exactly. The size of the master does not grow with the number of owners.

Programs go to HiGHS through PuLP, else to CBC. No answer is believed: bounds and counts that follow
from it are computed and checked by our own arithmetic.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.bound import MAX_POINTS, Holdings, cover, spread, work_tables
from dmuon.scheduler.greedy import improve
from dmuon.scheduler.plan import Dual
from dmuon.scheduler.problem import Counts, Problem

Floats = npt.NDArray[np.float64]
Pattern = tuple[int, tuple[int, ...]]  # class, count of each shape

PREFERRED = ("HiGHS", "PULP_CBC_CMD")  # in PuLP's names
_WORTH = 1e17  # of everything, about: exact in 64 bits, and fine enough
_MOST_ROUNDS = 200  # master programs while climbing
_MOST_WORK = 20_000_000  # pairs formed by knapsacks in one climb
_POINTS = 2_000  # of a frontier, until they are too few
_MOST_PRICINGS = 6  # at one limit
_RELAXED = (0.0, 0.0005, 0.002, 0.004, 0.008, 0.02, 0.05)  # how far above the bound
_GIVEN_BACK = (0, 1, 2)  # uses of each pattern that are decided anew
_STATES = 1_000  # of the search for what is left
_WORK = 4_000_000
_MOST_SHAPES = 200  # more make the master program too slow for what it gains
_MOST_CLASSES = 100
_WHOLE = 1e-6  # a fraction closer to a whole number than this is one


class Budget:
    """The wall clock, asked only after the work limits; remembers whether it ever cut short."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end, self.hit = now, now() + seconds, False

    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit


# ---- solvers ---------------------------------------------------------------------------------


class EngineError(Exception):
    """A solver raised, is not there, or gave no solution."""


def available_engines() -> tuple[str, ...]:
    """The solvers that PuLP finds here, in order of preference."""

    def find() -> None:
        with suppress(ImportError):
            importlib.import_module("pulp")

    # On a stack of its own: PuLP keeps an exception of its import, and an exception keeps the
    # frames of all callers, so that the model that is being planned for would never be freed.
    thread = threading.Thread(target=find)
    thread.start()
    thread.join()
    try:
        import pulp
    except ImportError:
        return ()
    found = set(pulp.listSolvers(onlyAvailable=True))
    return tuple(name for name in PREFERRED if name in found)


def minimize_last(
    table: Floats, senses: Sequence[str], bounds: Floats, engine: str, time_limit_s: float
) -> tuple[Floats, Floats]:
    """(x, dual of each row) for the least last x >= 0 such that ``table @ x`` keeps to the bounds.

    One thread, so that equal input gives an equal answer.

    Raises:
        EngineError: whatever went wrong, a time limit without a solution included.
    """
    import pulp

    try:
        model = pulp.LpProblem("plan", pulp.LpMinimize)
        x = [model.add_variable(f"x{i:06d}", 0) for i in range(table.shape[1])]
        model += pulp.LpAffineExpression([(x[-1], 1.0)])
        rows = []
        for i, (row, sense, bound) in enumerate(zip(table, senses, bounds.tolist(), strict=True)):
            at = np.flatnonzero(row).tolist()
            left = pulp.LpAffineExpression([(x[j], float(row[j])) for j in at])
            equal = left == bound if sense == "==" else left >= bound
            model += left <= bound if sense == "<=" else equal, f"r{i:06d}"
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


# ---- the master program ----------------------------------------------------------------------


class Columns:
    """The bound of a problem raised, and its counts improved, step by step."""

    def __init__(
        self, problem: Problem, engine: str, budget: Budget, counts: Counts, bound: int, dual: Dual
    ) -> None:
        self.problem, self.engine, self.budget = problem, engine, budget
        self.counts, self.makespan = counts, problem.makespan(counts)
        self.bound, self.dual = bound, dual
        self._patterns: dict[Pattern, int] = {}  # -> ticks
        self._works = work_tables(problem)
        self._scale = np.array([max(1, int(table[1])) for table in self._works], float)
        for c, owner in enumerate(problem.classes):
            for row in np.unique(counts[list(owner.ranks)], axis=0):
                self._add(c, tuple(row.tolist()))
            for s, allowed in enumerate(owner.allowed):
                if allowed:
                    self._add(c, tuple(int(t == s) for t in range(len(problem.shapes))))

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the master program is small enough to be worth its time."""
        return len(problem.shapes) <= _MOST_SHAPES and len(problem.classes) <= _MOST_CLASSES

    def climb(self) -> None:
        """Raise the bound until the master program shares everything out."""
        points, work = _POINTS, 0
        for _ in range(_MOST_ROUNDS):
            if self.bound >= self.makespan or work > _MOST_WORK or self.budget.spent():
                return
            theta, dual, _ = self._master(self.bound)
            real = Holdings(self.problem, dual, self.makespan, real=True, points=points)
            work += real.work
            proving = real
            if not real.are_exact:
                proving = Holdings(self.problem, dual, self.makespan, points=points)
                work += proving.work
            proven = proving.bound()
            climbed = proven > self.bound
            if climbed:
                self.bound, self.dual = proven, dual
            new = self._price(real, (self.bound, self.bound - self.bound // 200))
            if not climbed and (theta <= 1 + 1e-9 or not new):
                if real.are_exact or points == MAX_POINTS:
                    return  # everything is shared out, or converged up to rounding
                points = MAX_POINTS

    def round(self) -> None:
        """Look for counts as close to the bound as possible; keeps the best in ``counts``.

        The closer, the fewer patterns fit: of a few limits above the bound the first that works.
        """
        for relaxation in _RELAXED:
            limit = self.bound + int(self.bound * relaxation)
            if limit >= self.makespan or self.budget.spent():
                break
            counts = self._whole(limit)
            if counts is not None:
                counts = improve(self.problem, counts, self.budget.spent)
                if self.problem.makespan(counts) < self.makespan:
                    self.counts, self.makespan = counts, self.problem.makespan(counts)

    def _whole(self, limit: int) -> Counts | None:
        """Whole uses of patterns, rounded down, and what is then left by a covering search."""
        for _ in range(_MOST_PRICINGS):
            _, dual, used = self._master(limit)
            real = Holdings(self.problem, dual, limit, real=True, points=_POINTS)
            near = (limit, limit - limit // 1000, limit - limit // 200)
            if not self._price(real, near) or self.budget.spent():
                break
        for back in _GIVEN_BACK:
            if self.budget.spent():
                break
            fixed = [(p, max(int(times + _WHOLE) - back, 0)) for p, times in used]
            counts = _completed(self.problem, fixed, limit, dual)
            if counts is not None and self.problem.is_feasible(counts):
                return counts
        return None

    def _add(self, c: int, counts: tuple[int, ...]) -> bool:
        """Remember a pattern; whether it is new."""
        problem = self.problem
        stored = sum(k * shape.nbytes for k, shape in zip(counts, problem.shapes, strict=True))
        if not any(counts) or (c, counts) in self._patterns or stored > problem.classes[c].room:
            return False
        ticks = sum(int(shape.ticks[k]) for shape, k in zip(problem.shapes, counts, strict=True))
        self._patterns[c, counts] = ticks + problem.classes[c].fixed
        return True

    def _price(self, real: Holdings, limits: Sequence[int]) -> bool:
        """Add the most valuable patterns within each limit; whether any is new."""
        new = False
        for limit in limits:
            for c, owner in enumerate(self.problem.classes):
                taken = real.frontiers[owner.allowed].choice(limit - owner.fixed)
                if taken is not None:
                    counts = np.zeros(len(self.problem.shapes), np.int64)
                    counts[list(owner.allowed)] = taken
                    new |= self._add(c, tuple(counts.tolist()))
        return new

    def _master(self, limit: int) -> tuple[float, Dual, list[tuple[Pattern, float]]]:
        """(theta, dual, how often each pattern is used) over the patterns known."""
        try:
            return self._solved([p for p, ticks in self._patterns.items() if ticks <= limit])
        except EngineError:
            # Where prices fall with the batch, the patterns known within the limit may not share
            # everything out. With those of the best counts they do, and whatever the duals are,
            # they prove a bound. If it was the solver that failed, it fails again.
            most = max(limit, self.makespan)
            return self._solved([p for p, ticks in self._patterns.items() if ticks <= most])

    def _solved(self, patterns: Sequence[Pattern]) -> tuple[float, Dual, list[Any]]:
        problem, shapes = self.problem, len(self.problem.shapes)
        taken = np.array([counts for _, counts in patterns], np.int64).reshape(-1, shapes).T
        sizes = np.array([[c.size] for c in problem.classes], float)
        mine = np.zeros((len(sizes), len(patterns)))
        mine[[c for c, _ in patterns], range(len(patterns))] = 1.0
        works = zip(self._works, taken, self._scale, strict=True)
        each = np.array([work[k] / scale for work, k, scale in works]).reshape(shapes, -1)
        least = [float(work[-1]) for work in self._works] / self._scale
        rows = np.vstack((taken, mine, each))
        theta = np.vstack((np.zeros((shapes, 1)), -sizes, np.zeros((shapes, 1))))
        values, duals = minimize_last(
            np.hstack((rows, theta)),
            ["=="] * shapes + ["<="] * len(sizes) + [">="] * shapes,
            np.concatenate((problem.demand.astype(float), np.zeros(len(sizes)), least)),
            self.engine,
            self.budget.left_s() + 1.0,
        )
        dual = self._integers(duals[:shapes], np.maximum(duals[-shapes:] / self._scale, 0.0))
        used = [(p, float(y)) for p, y in zip(patterns, values, strict=False) if y > 1e-9]
        return float(values[-1]), dual, used

    def _integers(self, values: Floats, works: Floats) -> Dual:
        """A dual in integers; any rounding leaves a valid proof."""
        total = np.abs(values) @ self.problem.demand
        total += works @ np.array([float(table[-1]) for table in self._works])
        scale = _WORTH / float(total) if total > 1e-200 else 0.0
        return Dual(
            tuple(round(v * scale) for v in values.tolist()),
            tuple(round(u * scale) for u in works.tolist()),
        )


def _completed(
    problem: Problem, fixed: Sequence[tuple[Pattern, int]], limit: int, dual: Dual
) -> Counts | None:
    """Counts with these patterns, and with what is left of matrices and owners."""
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    free = [list(owner.ranks) for owner in problem.classes]
    for (c, pattern), times in fixed:
        for _ in range(min(times, len(free[c]))):
            counts[free[c].pop(0)] = pattern
    spread(problem, counts)
    rest, ranks, shapes = problem.part(free, problem.demand - counts.sum(0))
    if not shapes:
        return counts
    if not ranks:
        return None
    some_dual = Dual(tuple(dual.values[s] for s in shapes), tuple(dual.works[s] for s in shapes))
    found = cover(rest, limit, some_dual, _WORK, _STATES).counts
    if found is not None:
        counts[np.ix_(ranks, shapes)] += found
    return None if found is None else counts
