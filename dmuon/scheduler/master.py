"""The master program of column generation: patterns shared out over owners, through PuLP.

Linear and integer programs go to HiGHS, else to CBC. No answer is believed here or elsewhere:
callers check what it says by their own arithmetic.

Where kinds and classes are alike, as under expert parallelism, the program has one row for all of
them. For that it looks at one of alike classes only, and at its kinds in an order that is the same
for all alike classes; sums over alike kinds are what the rows are about::

    kinds        A0  B0 | A1  B1        equal shapes, each for the ranks of one ep coordinate
    classes      0, 1 (fewer owners)    patterns of class 0: (a, b) of A0, B0, taken for A1, B1 too
    rows         A: d_A0 + d_A1 = ...   B: ...    owners of classes 0 and 1 together
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.bound import byte_units, dual_options, scaled, work_tables
from dmuon.scheduler.knapsack import Frontier, Option, frontier
from dmuon.scheduler.plan import Dual
from dmuon.scheduler.problem import UNLIMITED, Counts, OwnerClass, Problem

__all__ = [
    "Answer",
    "Budget",
    "EngineError",
    "Frontiers",
    "Left",
    "LinearProgram",
    "Master",
    "Orbits",
    "Pattern",
    "Row",
    "available_engines",
    "levelled",
    "minimize",
    "orbits_of",
]

Ints = npt.NDArray[np.int64]
Frontiers = dict[tuple[bool, ...], Frontier]
Pattern = tuple[int, tuple[int, ...]]  # class, count of each kind

_COARSE = 500  # points of a frontier that only suggests patterns
PREFERRED = ("HiGHS", "PULP_CBC_CMD")  # in PuLP's names
_TOLERANCE = 1e-5
_MOST_CLASSES = 24  # that are not alike
_LEVELS = 8  # of fixed loads, where there are more


class Budget:
    """The wall clock, asked only after the work limits; remembers whether it ever cut short."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._end, self.hit = now, now() + seconds, False

    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit


# ---- programs and solvers ------------------------------------------------------------------


class EngineError(Exception):
    """A solver raised, is not there, or gave no solution."""


@dataclass(frozen=True, slots=True)
class Row:
    """``sum coefficient * x[index]  (<=, >=, ==)  bound``."""

    terms: Sequence[tuple[int, float]]
    sense: str
    bound: float


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """Minimize ``cost . x`` for x >= 0; ``whole`` marks the integer variables."""

    cost: Sequence[float]
    rows: Sequence[Row]
    whole: Sequence[bool] = ()
    most: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Values of the variables, and the dual of each row (of a program without integers)."""

    values: npt.NDArray[np.float64]
    duals: npt.NDArray[np.float64]


def _import_pulp() -> None:
    """Import PuLP on a stack of its own.

    It keeps an exception of its import, and an exception keeps the frames of all callers: with
    them the model that is being planned for would never be freed.
    """

    def run() -> None:
        with suppress(ImportError):
            importlib.import_module("pulp")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def available_engines() -> tuple[str, ...]:
    """The solvers that PuLP finds here, in order of preference."""
    _import_pulp()
    try:
        import pulp
    except ImportError:
        return ()
    found = set(pulp.listSolvers(onlyAvailable=True))
    return tuple(name for name in PREFERRED if name in found)


def minimize(
    program: LinearProgram, engine: str, *, time_limit_s: float, most_nodes: int = 20_000
) -> Answer:
    """Solve with one engine and one thread, so that equal input gives an equal answer.

    Raises:
        EngineError: whatever went wrong, a time limit without a solution included.
    """
    import pulp

    try:
        model, x, rows = _build(pulp, program)
        accepted = _run(pulp, model, _solver(pulp, engine, program, time_limit_s, most_nodes))
    except Exception as error:  # a solver may raise anything; planning must go on
        raise EngineError(f"{engine} failed: {type(error).__name__}: {error}") from error
    if not accepted:
        raise EngineError(f"{engine} found no solution: {pulp.LpSolution[model.sol_status]}")
    values = np.array([v.varValue if v.varValue is not None else np.nan for v in x])
    duals = np.array([0.0 if r.pi is None else r.pi for r in rows])
    if not np.isfinite(values).all() or not np.isfinite(duals).all():
        raise EngineError(f"{engine} gave values that are no numbers")
    _check(program, values, engine)
    return Answer(values, duals)


def _check(program: LinearProgram, values: npt.NDArray[np.float64], engine: str) -> None:
    """Raise EngineError unless the values satisfy the program, up to a solver's own tolerance."""
    if (values < -_TOLERANCE).any():
        raise EngineError(f"{engine} gave a negative value, whatever its status says")
    if any(program.whole):
        parts = values[np.array(program.whole)]
        if (np.abs(parts - np.rint(parts)) > 10 * _TOLERANCE).any():
            raise EngineError(f"{engine} gave a fraction for an integer, whatever its status says")
    for i, row in enumerate(program.rows):
        index, factors = [j for j, _ in row.terms], np.array([a for _, a in row.terms])
        terms = factors * values[index]
        slack = float(terms.sum()) - row.bound
        wrong = {"<=": slack, ">=": -slack, "==": abs(slack)}[row.sense]
        if wrong > _TOLERANCE * max(1.0, abs(row.bound), float(np.abs(terms).sum())):
            raise EngineError(f"{engine} breaks row {i} of the program, whatever its status says")


def _run(pulp: Any, model: Any, solver: Any) -> bool:
    """Whether there is a solution, be it optimal or not."""
    try:
        model.solve(solver)
    except KeyError:
        # PuLP 3.3 has no name for HiGHS's node limit; the best solution is in the variables then.
        return all(v.varValue is not None for v in model.variables())
    return model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)


def _build(pulp: Any, program: LinearProgram) -> tuple[Any, list[Any], list[Any]]:
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    x = []
    for i in range(len(program.cost)):
        category = "Integer" if program.whole and program.whole[i] else "Continuous"
        most = program.most[i] if program.most else None
        x.append(model.add_variable(f"x{i:06d}", 0, most, category))
    model += pulp.LpAffineExpression(list(zip(x, program.cost, strict=True)))
    rows = []
    for i, row in enumerate(program.rows):
        left = pulp.LpAffineExpression([(x[j], value) for j, value in row.terms])
        if row.sense == "<=":
            constraint = left <= row.bound
        else:
            constraint = left >= row.bound if row.sense == ">=" else left == row.bound
        model += constraint, f"r{i:06d}"
        rows.append(model.get_constraint_by_name(f"r{i:06d}"))
    return model, x, rows


def _solver(
    pulp: Any, engine: str, program: LinearProgram, time_limit_s: float, most_nodes: int
) -> Any:
    integer = any(program.whole)
    if engine == "HiGHS":
        options: dict[str, Any] = {"mip_max_nodes": most_nodes} if integer else {}
        return pulp.HiGHS(
            msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, mip=integer, **options
        )
    return pulp.PULP_CBC_CMD(
        msg=False,
        timeLimit=time_limit_s,
        threads=None,  # one, unless told otherwise
        gapRel=0.0,
        mip=integer,
        maxNodes=most_nodes if integer else None,
    )


# ---- what is alike -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Orbits:
    """The orbit of each kind and of each class, numbered in order of their first members."""

    kinds: tuple[int, ...]
    classes: tuple[int, ...]

    @classmethod
    def trivial(cls, problem: Problem) -> Orbits:
        """Everything for itself."""
        return cls(tuple(range(len(problem.kinds))), tuple(range(len(problem.classes))))

    @property
    def first_classes(self) -> tuple[int, ...]:
        """One class of each orbit."""
        return _firsts(self.classes)

    @property
    def first_kinds(self) -> tuple[int, ...]:
        """One kind of each orbit."""
        return _firsts(self.kinds)

    @property
    def are_trivial(self) -> bool:
        """No two kinds and no two classes are alike."""
        return len(set(self.kinds)) == len(self.kinds) and (
            len(set(self.classes)) == len(self.classes)
        )


def _firsts(orbit_of: Sequence[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    for i, orbit in enumerate(orbit_of):
        first.setdefault(orbit, i)
    return tuple(first.values())


def orbits_of(problem: Problem) -> Orbits:
    """The coarsest grouping that refinement finds.

    Where that leaves too many classes, because each rank has its own fixed load, those with about
    the same load pass for alike: what follows from it is a suggestion, and proofs do not rest on
    it (`proof.bound_of` looks at every class as it is).
    """
    exact = _refine(problem, [(c.size, c.fixed, c.room) for c in problem.classes])
    if len(set(exact.classes)) <= _MOST_CLASSES:
        return exact
    levels = _levels(problem)
    return _refine(problem, [(n, c.room) for n, c in zip(levels, problem.classes, strict=True)])


def levelled(problem: Problem) -> Problem | None:
    """The problem with about equal fixed loads raised to the largest of them; None if as many.

    Its counts are counts of the problem, with a makespan that is no larger.
    """
    if len(problem.classes) <= _MOST_CLASSES:
        return None
    merged: dict[tuple[int, int, tuple[bool, ...]], list[OwnerClass]] = {}
    for level, c in zip(_levels(problem), problem.classes, strict=True):
        merged.setdefault((level, c.room, c.allowed), []).append(c)
    classes = tuple(
        replace(
            group[0],
            ranks=tuple(sorted(rank for c in group for rank in c.ranks)),
            fixed=max(c.fixed for c in group),
        )
        for group in merged.values()
    )
    return replace(problem, classes=classes) if len(classes) < len(problem.classes) else None


def _levels(problem: Problem) -> list[int]:
    low = min(c.fixed for c in problem.classes)
    width = max(c.fixed for c in problem.classes) - low + 1
    return [(c.fixed - low) * _LEVELS // width for c in problem.classes]


def _refine(problem: Problem, owners: Sequence[Hashable]) -> Orbits:
    takes = [[s for s, yes in enumerate(c.allowed) if yes] for c in problem.classes]
    taken: list[list[int]] = [[] for _ in problem.kinds]
    for c, some in enumerate(takes):
        for s in some:
            taken[s].append(c)
    kinds = _numbered([(k.key, k.count, k.nbytes, k.batch_ticks) for k in problem.kinds])
    classes = _numbered(owners)
    while True:
        before = kinds, classes
        classes = _refined(classes, takes, kinds)
        kinds = _refined(kinds, taken, classes)
        if (kinds, classes) == before:
            return Orbits(kinds, classes)


def _refined(
    own: Sequence[int], neighbours: Sequence[Sequence[int]], colours: Sequence[int]
) -> tuple[int, ...]:
    """Split by how many neighbours of each colour there are."""
    around = [tuple(sorted(Counter(colours[n] for n in near).items())) for near in neighbours]
    return _numbered(list(zip(own, around, strict=True)))


def _numbered(colours: Sequence[Hashable]) -> tuple[int, ...]:
    number: dict[Hashable, int] = {}
    return tuple(number.setdefault(colour, len(number)) for colour in colours)


# ---- the program over patterns -------------------------------------------------------------


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
        dual = scaled(problem, values, works.tolist(), byte_price)
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
