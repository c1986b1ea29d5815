"""Proofs that no plan is faster: values of matrices, and an exhaustive search.

Give k matrices of shape s on one owner the worth ``w_s(k) = v_s * k + u_s * C_s(k)`` with any
values ``v_s`` and any ``u_s >= 0``. However the ``d_s`` matrices are shared out, their worth adds
up to at least ``w_s(d_s)``: the first term is linear, and C is subadditive, because putting two
owners' batches on one owner never costs more than both. An owner of class c that is busy for at
most T holds at most some worth ``sigma_c(T)``: a knapsack, solved exactly or rounded in favour of
the owner. If all owners together hold less than that,

    sum_c n_c * sigma_c(T)  <  sum_s w_s(d_s),

then no plan has a makespan of T. A linear program finds good ``v`` and ``u`` (its duals; Farley
1990 gives the bound for a master program that has not converged). All of it is integer arithmetic.

Where duals leave a gap, `cover` closes it if it can, without a solver::

    demand  (12, 12, 24)  ─owner 1─▶  what is left  ─owner 2─▶  ...  ─owner n─▶  nothing left?
                                      of each of its maximal patterns

It is a search in breadth: the state is how many matrices of each shape are left, and one whose
matrices are worth more than the owners left can hold is dropped. Only patterns matter that nothing
can be added to; surplus is taken away afterwards. Where C falls somewhere, patterns are exact
instead. All limits are numbers of states and pairs, so equal input gives equal answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from dmuon.scheduler.plan import Dual, Proof
from dmuon.scheduler.problem import Counts, Ints, Problem, relaxed

MAX_POINTS = 8_000  # of a knapsack, kept after each shape
_MOST_WORK = 16_000_000  # pairs formed in one knapsack: about a second
_MOST_WORTH = 1 << 61
_WORK = 10**11  # units of all work, about
_KNAPSACKS = 16_000_000  # pairs formed by the knapsacks behind one bound: some seconds at most
_QUICK = 500_000  # the same, where density alone says about as much
_LEAST_WORK = 2_000  # for each option of a knapsack; fewer are of no use
_MOST_SIMPLE = 8  # duals of one shape, or of one set of owners

COVER_WORK = 40_000_000  # numbers formed in one search
COVER_STATES = 20_000  # kept after an owner
_MOST_PATTERNS = 60_000  # of one class, and ten times as many on the way
_PAIRS = 1_000  # formed by listing the patterns of a class, for each state that is kept
_LISTED = 4  # and at most so many for each number that the search may form
_AT_ONCE = 1_000_000  # pairs
_MOST_OWNERS = 2_000


# ---- a knapsack over batched costs -----------------------------------------------------------
# For each shape an owner takes k matrices, k = 0, 1, ..., at cost C(k) and value v(k): a
# multiple-choice knapsack. A frontier is the whole trade-off: the pairs (cost, value) that no other
# choice beats in both. Nothing is assumed of C or v.


@dataclass(frozen=True, slots=True)
class Option:
    """The choices of one shape: ``cost[k]``, ``value[k]`` for taking k; k = 0 costs nothing."""

    cost: Ints
    value: Ints


@dataclass(frozen=True, slots=True)
class _Points:
    """Pairs, both ascending; the point of the stage before and the choice that made each."""

    cost: Ints
    value: Ints
    parent: Ints
    taken: Ints

    def __len__(self) -> int:
        return len(self.cost)

    def at(self, index: Ints) -> _Points:
        return _Points(self.cost[index], self.value[index], self.parent[index], self.taken[index])


_NOTHING = _Points(*np.zeros((4, 1), np.int64))


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
        """An upper bound of the largest value within each limit; ``least - 1`` if it is less."""
        at = np.searchsorted(self.cost, limits, side="right")
        best: Ints = np.concatenate(([self.least - 1], self.value))[at]
        return best

    def choice(self, limit: int) -> Ints | None:
        """The most valuable counts of each shape within the limit; None if all are worth too
        little. Only for a frontier that is not bounding."""
        at = int(np.searchsorted(self.cost, limit, side="right")) - 1
        if at < 0:
            return None
        taken = []
        for stage in reversed(self.stages):
            taken.append(int(stage.taken[at]))
            at = int(stage.parent[at])
        return np.array(taken[::-1], np.int64)


def density(option: Option, limit: int) -> float:
    """The most value per unit of cost among choices within the limit, rounded up."""
    within = np.flatnonzero(option.cost[1:] <= limit) + 1
    cost, value = option.cost[within], option.value[within]
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

    Where there are too many, neighbouring ones are merged: with ``bounding`` into a point as
    cheap as the cheapest and as valuable as the best of them, so that `Frontier.best_values` are
    never too small; otherwise into the most valuable real one, so that `Frontier.choice` exists.
    ``max_work`` bounds the pairs formed: what an option leaves of its share is for those after it.
    """
    points, exact, work = _NOTHING, True, 0
    each = [density(option, limit) for option in options]
    later = np.maximum.accumulate([0.0, *each[:0:-1]])[::-1].tolist()
    densest = max(each, default=0.0)
    stages: list[_Points] = []
    for i, (option, dense) in enumerate(zip(options, later, strict=False)):
        taken = _choices(option, limit, least, densest)
        pairs = max(1, (max_work - work) // (len(options) - i))
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


def _choices(option: Option, limit: int, least: int, dense: float) -> _Points:
    kept = _useful(option.cost, option.value, limit, least, dense)
    return _Points(option.cost[kept], option.value[kept], kept, kept)


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
    if not bounding:  # the cheapest stays: nothing taken, at first
        first = last = np.unique(np.append(0, last))
    return replace(points.at(last), cost=points.cost[first])


# ---- what duals show -------------------------------------------------------------------------


def work_tables(problem: Problem) -> list[Ints]:
    """``C_s(k)`` for k = 0 .. d_s, in units rounded up: still subadditive."""
    total = sum(int(shape.ticks[-1]) for shape in problem.shapes)
    unit = max(1, total // _WORK)
    return [-(-shape.ticks // unit) for shape in problem.shapes]


class Holdings:
    """The worth that a dual gives matrices, and how much of it owners hold within a limit.

    All knapsacks together form at most about ``_KNAPSACKS`` pairs. Where many owners are not alike
    each has fewer of them, and where that is too few to be of use, density alone bounds.

    Raises:
        ValueError: the dual is of another problem, or so large that 64 bits would wrap around.
    """

    def __init__(
        self,
        problem: Problem,
        dual: Dual,
        limit: int,
        real: bool = False,
        points: int = MAX_POINTS,
        work: int | None = None,
    ) -> None:
        self.problem, self.limit = problem, limit
        self.tables = _worth_tables(problem, dual)
        self.total = sum(int(table[-1]) for table in self.tables)
        options = [Option(k.ticks, w) for k, w in zip(problem.shapes, self.tables, strict=True)]
        dense = [density(option, limit) for option in options]
        self._dense = {
            c.allowed: max((d for d, yes in zip(dense, c.allowed, strict=True) if yes), default=0.0)
            for c in problem.classes
        }
        # Every owner must hold so much, if all others hold as much as density allows.
        fluid = [self._fluid(c.allowed, limit - c.fixed) for c in problem.classes]
        sizes = [c.size for c in problem.classes]
        surplus = sum(n * most for n, most in zip(sizes, fluid, strict=True)) - self.total
        least: dict[tuple[bool, ...], int] = defaultdict(lambda: _MOST_WORTH)
        for c, most in zip(problem.classes, fluid, strict=True):
            needed = most - surplus // c.size
            least[c.allowed] = max(min(needed, least[c.allowed]), -_MOST_WORTH)
        self.frontiers: dict[tuple[bool, ...], Frontier] = {}
        left = _KNAPSACKS if work is None else work
        order = sorted(self._dense, key=lambda allowed: (sum(allowed), allowed))
        for number, allowed in enumerate(order):
            mine = [o for o, yes in zip(options, allowed, strict=True) if yes]
            if not real:
                mine = [option for option in mine if (option.value > 0).any()]
            share = left // (len(order) - number)
            if share < _LEAST_WORK * len(mine) and not real:
                most = sum(int(option.value.max()) for option in mine)
                made = Frontier(np.zeros(1, np.int64), np.array([most]), False, least[allowed])
            else:
                made = frontier(
                    mine, max(limit, 0), bounding=not real, least=least[allowed],
                    max_points=points, max_work=share,
                )  # fmt: skip
            left -= made.work
            self.frontiers[allowed] = made

    @property
    def work(self) -> int:
        """The number of pairs that the knapsacks formed."""
        return sum(made.work for made in self.frontiers.values())

    @property
    def are_exact(self) -> bool:
        """True if no points were merged."""
        return all(made.exact for made in self.frontiers.values())

    def _fluid(self, allowed: tuple[bool, ...], free: int) -> int:
        """The most that an owner holds if any part of a choice could be taken."""
        dense = self._dense[allowed]
        if math.isinf(dense):
            return _MOST_WORTH
        return int(min(dense * max(free, 0), float(_MOST_WORTH))) + 1

    def most(self, limit: int) -> list[int]:
        """By class, an upper bound of what an owner holds that is busy for at most ``limit``."""
        return [
            min(
                int(self.frontiers[c.allowed].best_values(np.array([limit - c.fixed]))[0]),
                self._fluid(c.allowed, limit - c.fixed),
            )
            for c in self.problem.classes
        ]

    def bound(self) -> int:
        """The least makespan up to the limit that is not ruled out."""
        low, high = max((c.fixed for c in self.problem.classes), default=0), self.limit
        while low < high:
            middle = (low + high) // 2
            most = zip(self.problem.classes, self.most(middle), strict=True)
            is_open = sum(c.size * worth for c, worth in most) >= self.total
            low, high = (low, middle) if is_open else (middle + 1, high)
        return high


def _worth_tables(problem: Problem, dual: Dual) -> list[Ints]:
    if not len(dual.values) == len(dual.works) == len(problem.shapes):
        raise ValueError(f"{len(dual.values)} values for {len(problem.shapes)} shapes")
    if min(dual.works, default=0) < 0:
        raise ValueError("the value of work must be >= 0")
    works = work_tables(problem)
    most = sum(
        abs(v) * shape.count + u * int(work[-1])
        for v, u, shape, work in zip(dual.values, dual.works, problem.shapes, works, strict=True)
    )
    if most >= _MOST_WORTH:
        raise ValueError(f"duals are too large to be checked: {most} of at most {_MOST_WORTH}")
    return [
        v * np.arange(shape.count + 1) + u * work
        for v, u, shape, work in zip(dual.values, dual.works, problem.shapes, works, strict=True)
    ]


def bound_of(problem: Problem, dual: Dual, limit: int) -> int:
    """The makespan in ticks that ``dual`` proves, at most ``limit``; ValueError as `Holdings`."""
    return Holdings(problem, dual, limit).bound()


def certified(problem: Problem, proof: Proof, bound: int) -> int:
    """The bound as a certificate computes it: merged points depend on how far knapsacks reach."""
    while proof.impossible < 0 and (found := bound_of(problem, proof.dual, bound)) < bound:
        bound = found
    return bound


def proven(problem: Problem, proof: Proof, limit: int) -> int:
    """The makespan in ticks that a proof shows, at most ``limit``, computed anew; ValueError as
    `Holdings`."""
    simpler = relaxed(problem)
    bound = bound_of(simpler, proof.dual, limit)
    if bound <= proof.impossible < limit:
        for some in dict.fromkeys((simpler, problem)):
            tried = cover(some, proof.impossible, proof.dual)
            if tried.counts is None and tried.complete:
                return proof.impossible + 1
    return bound


def simple_bound(problem: Problem, limit: int) -> tuple[int, Dual]:
    """The best bound that needs no solver, at most ``limit``: work shared out evenly, or one shape.
    All work is shared by all owners, and the work that only some owners may do by those. One shape
    alone counts matrices (the pigeonhole principle; for more owners than matrices, the costliest
    single matrix); only the few most promising shapes are looked at.
    """
    shapes = range(len(problem.shapes))
    owners = [frozenset(c for c, o in enumerate(problem.classes) if o.allowed[s]) for s in shapes]
    ranks = {mine: sum(problem.classes[c].size for c in mine) for mine in owners}
    work = dict.fromkeys(ranks, 0)
    for mine, shape in zip(owners, problem.shapes, strict=True):
        work[mine] += int(shape.ticks[-1])
    none = (0,) * len(shapes)
    duals = [Dual(none, (1,) * len(shapes))]
    for those in sorted(work, key=lambda mine: -work[mine] / ranks[mine])[:_MOST_SIMPLE]:
        if len(those) < len(problem.classes):
            duals.append(Dual(none, tuple(int(mine <= those) for mine in owners)))

    def pigeonhole(s: int) -> int:
        shape, mine = problem.shapes[s], owners[s]
        least = min(problem.classes[c].fixed for c in mine)
        return least + int(shape.ticks[-(-shape.count // ranks[mine]) :].min())

    ranked = sorted(shapes, key=lambda s: -pigeonhole(s))
    duals += [Dual((*none[:s], 1, *none[s + 1 :]), none) for s in ranked[:_MOST_SIMPLE]]
    found = [(Holdings(problem, dual, limit, work=_QUICK).bound(), dual) for dual in duals]
    return max(found, key=lambda f: f[0])


# ---- the covering search ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cover:
    """Counts within the limit, or None. If the search was ``complete``, None proves that there are
    none."""

    counts: Counts | None
    complete: bool


class _Worth:
    """Tables of worth, and the worth that owners hold, by class. ``left`` is the least worth of k
    or more matrices of a shape, ``most`` the largest worth of at most k."""

    def __init__(self, problem: Problem, tables: Sequence[Ints], holds: Sequence[int]) -> None:
        self.left = [np.minimum.accumulate(table[::-1])[::-1] for table in tables]
        self.most = [np.maximum.accumulate(table) for table in tables]
        self.holds = holds
        self.held = sum(c.size * most for c, most in zip(problem.classes, holds, strict=True))
        self.needed = int(_total(self.left, problem.demand[None])[0])


def _total(tables: Sequence[Ints], rows: Ints) -> Ints:
    """The worth of each of these rows of counts."""
    total: Ints = np.zeros(len(rows), np.int64)
    for s, table in enumerate(tables):
        total += table[rows[:, s]]
    return total


def cover(
    problem: Problem,
    limit: int,
    dual: Dual | None = None,
    most_work: int = COVER_WORK,
    most_states: int = COVER_STATES,
) -> Cover:
    """Counts with a makespan of at most ``limit``.

    ``dual`` are good values, if any are known: they decide how much has to be tried, and where it
    is too much, what is tried. Few ``most_states`` make it a quick look for counts.
    """
    demand = problem.demand
    if any(c.fixed > limit or c.room < 0 for c in problem.classes):
        return Cover(None, True)
    if not len(demand):
        return Cover(np.zeros((problem.world, 0), np.int64), True)
    if problem.world > _MOST_OWNERS or float(np.log2(demand + 1.0).sum()) > 61.0:
        return Cover(None, False)
    ticks = [shape.ticks for shape in problem.shapes]
    worths = [_Worth(problem, ticks, [limit - c.fixed for c in problem.classes])]
    if dual is not None:
        with suppress(ValueError):  # values of another problem
            held = Holdings(problem, dual, limit)
            worths.insert(0, _Worth(problem, held.tables, held.most(limit)))
    if any(worth.needed > worth.held for worth in worths):
        return Cover(None, True)
    monotone = all((np.diff(shape.ticks) >= 0).all() for shape in problem.shapes)
    most_pairs = min(_PAIRS * most_states, _LISTED * most_work)
    patterns: list[Ints] = []
    for c in range(len(problem.classes)):
        found = _patterns(problem, c, limit, worths[0], monotone, most_pairs)
        if found is None:
            return Cover(None, False)
        patterns.append(found)
    return _Search(problem, limit, worths, patterns, monotone, most_work, most_states).run()


def _patterns(
    problem: Problem, c: int, limit: int, worth: _Worth, monotone: bool, most_pairs: int
) -> Ints | None:
    """The patterns that an owner of a class may take [patterns, shapes], the worthiest first. They
    are maximal, and worth as much as it must hold if all others hold the most they can. None if
    they are more than are worth listing."""
    owner, shapes, free = problem.classes[c], problem.shapes, limit - problem.classes[c].fixed
    rows, ticks, got = np.zeros((1, 0), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    least = worth.needed - worth.held + worth.holds[c]
    dense = [
        density(Option(shape.ticks, most - most[0]), free) if yes else 0.0
        for shape, most, yes in zip(shapes, worth.most, owner.allowed, strict=True)
    ]
    for s, shape in enumerate(shapes):
        k = np.arange(shape.count + 1 if owner.allowed[s] else 1)
        k = k[shape.ticks[k] <= free]
        most_pairs -= len(ticks) * len(k)
        if most_pairs < 0:
            return None
        later, found = max(dense[s + 1 :], default=0.0), []
        size = max(_AT_ONCE // len(k), 1)
        for start in range(0, max(len(rows), 1), size):
            some = slice(start, start + size)
            total = ticks[some, None] + shape.ticks[k]
            value = got[some, None] + worth.most[s][k]
            more = np.minimum(later * (free - total), float(1 << 62)) if later else np.zeros(1)
            at, which = np.nonzero((total <= free) & (value + more * (1 + 1e-9) + 1 >= least))
            grown = np.column_stack((rows[some][at], k[which]))
            found.append((grown, total[at, which], value[at, which]))
        rows, ticks, got = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if len(rows) > 10 * _MOST_PATTERNS:
            return None
    stored = rows @ problem.nbytes
    keep = stored <= owner.room
    for s in np.flatnonzero(owner.allowed).tolist() if monotone else ():
        shape, has = shapes[s], rows[:, s]
        longer = ticks - shape.ticks[has] + shape.ticks.take(has + 1, mode="clip") <= free
        keep &= (has == shape.count) | ~longer | (stored + shape.nbytes > owner.room)
    rows = rows[keep]
    if len(rows) > _MOST_PATTERNS:
        return None
    return rows[np.lexsort((*rows.T, -_total(worth.most, rows)))]


@dataclass
class _Search:
    """The search: states [states, shapes] after each owner, and their parents."""

    problem: Problem
    limit: int
    worths: Sequence[_Worth]
    patterns: Sequence[Ints]
    monotone: bool
    work: int
    most_states: int
    complete: bool = True

    def run(self) -> Cover:
        problem = self.problem
        states: Ints = problem.demand[None].copy()
        owners = [(c, rank) for c, owner in enumerate(problem.classes) for rank in owner.ranks]
        held = [worth.held for worth in self.worths]
        steps: list[tuple[int, int, Ints, Ints]] = []  # class, rank, parent, pattern
        for number, (c, rank) in enumerate(owners):
            held = [h - w.holds[c] for h, w in zip(held, self.worths, strict=True)]
            share = self.work // (len(owners) - number)
            most = max(share // max(self.patterns[c].size, 1), 1)
            if len(states) > most:
                states, self.complete = states[:most], False
            # The last owners are alike, so one of them has the costliest matrix that is left.
            pivot = c == len(problem.classes) - 1 and self.monotone
            states, parent, pattern = self._step(states, self.patterns[c], held, pivot)
            if not len(states):
                break
            steps.append((c, rank, parent, pattern))
            if not states[0].any():
                return self._found(steps)
        return Cover(None, self.complete)

    def _step(
        self, states: Ints, patterns: Ints, held: Sequence[int], pivot: bool
    ) -> tuple[Ints, Ints, Ints]:
        """(states after one more owner, their parents, their patterns), the promising first."""
        first = (states > 0).argmax(1) if pivot else np.full(len(states), -1)
        nothing = np.zeros(0, np.int64)
        parts = [(states[:0], nothing, nothing)]
        for s in np.unique(first).tolist():
            rows = np.flatnonzero(first == s)
            some = np.flatnonzero(patterns[:, s] > 0) if pivot else np.arange(len(patterns))
            size = max(_AT_ONCE // max(len(some), 1), 1)
            for start in range(0, len(rows) if len(some) else 0, size):
                part = rows[start : start + size]
                self.work -= len(part) * len(some) * states.shape[1]
                left, index = self._children(states[part], patterns[some], held)
                parts.append((left, part[index // len(some)], some[index % len(some)]))
        left, parent, pattern = (np.concatenate(column) for column in zip(*parts, strict=True))
        strides = np.cumprod([1, *(self.problem.demand[:-1] + 1).tolist()], dtype=np.int64)
        _, once = np.unique(left @ strides, return_index=True)
        order = once[np.argsort(_total(self.worths[0].left, left[once]), kind="stable")]
        if len(order) > self.most_states:
            order, self.complete = order[: self.most_states], False
        return left[order], parent[order], pattern[order]

    def _children(self, states: Ints, patterns: Ints, held: Sequence[int]) -> tuple[Ints, Ints]:
        """The rest of each state after each pattern, as far as the other owners can hold it."""
        left = (states[:, None, :] - patterns[None, :, :]).reshape(-1, states.shape[1])
        index: Ints = np.arange(len(left))
        if not self.monotone:
            index = np.flatnonzero((left >= 0).all(1))
            left = left[index]
        np.maximum(left, 0, out=left)
        for worth, most in zip(self.worths, held, strict=True):
            keep = np.flatnonzero(_total(worth.left, left) <= most)
            left, index = left[keep], index[keep]
        return left, index

    def _found(self, steps: Sequence[tuple[int, int, Ints, Ints]]) -> Cover:
        counts, at = np.zeros((self.problem.world, len(self.problem.shapes)), np.int64), 0
        for c, rank, parent, pattern in reversed(steps):
            counts[rank] = self.patterns[c][pattern[at]]
            at = int(parent[at])
        spread(self.problem, counts)
        fits = self.problem.is_feasible(counts) and self.problem.makespan(counts) <= self.limit
        return Cover(counts if fits else None, fits)


def spread(problem: Problem, counts: Counts) -> None:
    """Take surplus matrices away, each from the rank that gains most by it."""
    loads = problem.loads(np.minimum(counts, problem.demand))
    for s, shape in enumerate(problem.shapes):
        for _ in range(int(counts[:, s].sum()) - shape.count):
            has = np.flatnonzero(counts[:, s])
            k = np.minimum(counts[has, s], shape.count)
            change = shape.ticks[k - 1] - shape.ticks[k]
            # Prefer what shortens the longest; a removal may also lengthen (costs need not grow).
            best = np.lexsort((has, -loads[has], change))[0]
            loads[has[best]] += change[best]
            counts[has[best], s] -= 1
