"""Proofs that no plan is faster: values of matrices, and an exhaustive search.

Give k matrices of shape s on one owner the worth ``w_s(k) = v_s * k + u_s * C_s(k)`` with any
values ``v_s`` and any ``u_s >= 0``. However the ``d_s`` matrices are shared out, their worth adds
up to at least ``w_s(d_s)``, because C is subadditive. An owner of class c that is busy for at most
T holds at most some worth ``sigma_c(T)``: a knapsack, solved exactly or rounded in favour of the
owner. No plan has a makespan of T if all owners together hold less,

    sum_c n_c * sigma_c(T)  <  sum_s w_s(d_s).

A linear program finds good ``v`` and ``u`` (its duals; Farley 1990 gives the bound for a master
program that has not converged). All of it is integer arithmetic.

Where duals leave a gap, `cover` closes it if it can, without a solver: a search in breadth, owner
by owner. A state is how many matrices of each shape are left; it is dropped if they are worth more
than the owners left can hold. Only patterns matter that nothing can be added to; surplus is taken
away afterwards. Where C falls somewhere, patterns are exact instead. All limits are numbers of
states and pairs, so equal input gives equal answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from dmuon.scheduler.plan import Dual, Proof
from dmuon.scheduler.problem import Counts, Frontier, Ints, Option, Problem, frontier
from dmuon.types import grouped

_MOST_WORTH = 1 << 61
_WORK = 10**11  # units of all work, about
_KNAPSACKS = 16_000_000  # pairs formed by the knapsacks behind one bound: some seconds at most
_QUICK = 500_000  # the same, where density alone says about as much
_LEAST_WORK = 2_000  # for each option of a knapsack; fewer are of no use
_MOST_SIMPLE = 8  # duals of one shape, or of one set of owners

_COVER_WORK = 40_000_000  # numbers formed in one search
_MOST_STATES = 20_000  # kept after an owner
_MOST_PATTERNS = 60_000  # of one class, and ten times as many on the way
_MOST_PAIRS = 20_000_000  # formed by listing the patterns of a class
_LISTED = 4  # and at most so many for each number that the search may form
_AT_ONCE = 1_000_000  # pairs
_MOST_OWNERS = 2_000


# ---- what duals show -------------------------------------------------------------------------


def work_tables(problem: Problem) -> list[Ints]:
    """``C_s(k)`` for k = 0 .. d_s, in units rounded up: still subadditive."""
    unit = max(1, sum(int(shape.ticks[-1]) for shape in problem.shapes) // _WORK)
    return [-(-shape.ticks // unit) for shape in problem.shapes]


class Holdings:
    """The worth that a dual gives matrices, and how much of it owners hold within a limit.

    All knapsacks together form at most about ``_KNAPSACKS`` pairs; where that is too few for each
    class to be of use, density alone bounds. ``work`` is how many they formed; they ``are_exact``
    if no points were merged. ValueError: the dual is of another problem, or 64 bits would overflow.
    """

    def __init__(
        self, problem: Problem, dual: Dual, limit: int, real: bool = False, work: int | None = None
    ) -> None:
        if not len(dual.values) == len(dual.works) == len(problem.shapes):
            raise ValueError(f"{len(dual.values)} values for {len(problem.shapes)} shapes")
        if min(dual.works, default=0) < 0:
            raise ValueError("the value of work must be >= 0")
        terms = list(zip(dual.values, dual.works, work_tables(problem), strict=True))
        worth = sum(abs(v) * (len(work) - 1) + u * int(work[-1]) for v, u, work in terms)
        if worth >= _MOST_WORTH:
            raise ValueError(f"duals are too large to be checked: {worth} of at most {_MOST_WORTH}")
        self.problem, self.limit = problem, limit
        self.tables = [v * np.arange(len(work)) + u * work for v, u, work in terms]
        self.total = sum(int(table[-1]) for table in self.tables)
        options = [Option(k.ticks, w) for k, w in zip(problem.shapes, self.tables, strict=True)]
        dense = [option.density(limit) for option in options]
        self._dense = {
            c.allowed: max((d for d, yes in zip(dense, c.allowed, strict=True) if yes), default=0.0)
            for c in problem.classes
        }
        # Every owner must hold so much, if all others hold as much as density allows.
        fluid = [(c, self._fluid(c.allowed, limit - c.fixed)) for c in problem.classes]
        surplus = sum(c.size * most for c, most in fluid) - self.total
        least: dict[tuple[bool, ...], int] = defaultdict(lambda: _MOST_WORTH)
        for c, most in fluid:
            least[c.allowed] = max(min(most - surplus // c.size, least[c.allowed]), -_MOST_WORTH)
        self.frontiers: dict[tuple[bool, ...], Frontier] = {}
        left = _KNAPSACKS if work is None else work
        order = sorted(self._dense, key=lambda allowed: (sum(allowed), allowed))
        for number, allowed in enumerate(order):
            mine = [o for o, yes in zip(options, allowed, strict=True) if yes]
            if not real:
                mine = [option for option in mine if (option.value > 0).any()]
            if (share := left // (len(order) - number)) < _LEAST_WORK * len(mine) and not real:
                most = sum(int(option.value.max()) for option in mine)
                made = Frontier(np.zeros(1, np.int64), np.array([most]), False, least[allowed])
            else:
                made = frontier(
                    mine, max(limit, 0), bounding=not real, least=least[allowed], max_work=share
                )
            left -= made.work
            self.frontiers[allowed] = made
        self.work = sum(made.work for made in self.frontiers.values())
        self.are_exact = all(made.exact for made in self.frontiers.values())

    def _fluid(self, allowed: tuple[bool, ...], free: int) -> int:
        """The most that an owner holds if any part of a choice could be taken."""
        dense = self._dense[allowed]
        if math.isinf(dense):
            return _MOST_WORTH
        return int(min(dense * max(free, 0), float(_MOST_WORTH))) + 1

    def most(self, limit: int) -> list[int]:
        """By class, an upper bound of what an owner holds that is busy for at most ``limit``."""
        free = [(c.allowed, limit - c.fixed) for c in self.problem.classes]
        return [min(self.frontiers[k].best_value(left), self._fluid(k, left)) for k, left in free]

    def bound(self) -> int:
        """The least makespan in ticks, up to the limit, that the dual does not rule out."""

        def is_open(limit: int) -> bool:
            most = zip(self.problem.classes, self.most(limit), strict=True)
            return sum(c.size * worth for c, worth in most) >= self.total

        low = max((c.fixed for c in self.problem.classes), default=0)
        return min(low + bisect_left(range(low, self.limit), True, key=is_open), self.limit)


def certified(problem: Problem, proof: Proof, bound: int) -> int:
    """The bound as a certificate computes it: merged points depend on how far knapsacks reach."""
    while proof.impossible < 0 and (found := Holdings(problem, proof.dual, bound).bound()) < bound:
        bound = found
    return bound


def proven(problem: Problem, proof: Proof, limit: int) -> int:
    """The makespan in ticks, at most ``limit``, that a proof shows; ValueError as `Holdings`."""
    simpler = relaxed(problem)
    if (bound := Holdings(simpler, proof.dual, limit).bound()) <= proof.impossible < limit:
        for some in dict.fromkeys((simpler, problem)):
            counts, complete = cover(some, proof.impossible, proof.dual)
            if counts is None and complete:
                return proof.impossible + 1
    return bound


def simple_bound(problem: Problem, limit: int) -> tuple[int, Dual]:
    """The best bound that needs no solver, at most ``limit``: all work shared by all owners, the
    work that only some owners may do by those, or one of the few most promising shapes by itself
    (the pigeonhole principle: some owner has its share, rounded up)."""
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


def relaxed(problem: Problem) -> Problem:
    """The problem with alike shapes and alike classes as one, such as all domains of experts and
    their owners; itself where none are alike. What it cannot reach, the problem cannot either."""
    table = np.array([c.allowed for c in problem.classes])  # [classes, shapes]
    takes, taken = ([np.flatnonzero(row).tolist() for row in of] for of in (table, table.T))
    shapes = _coloured((k.key, k.batch_ticks, k.count, k.nbytes) for k in problem.shapes)
    classes = _coloured((c.room, c.fixed, c.size) for c in problem.classes)
    before: tuple[list[int], list[int]] | None = None
    while before != (shapes, classes):  # until neighbours tell no more apart: colour refinement
        before = shapes, classes
        around = [tuple(sorted(shapes[s] for s in mine)) for mine in takes]
        classes = _coloured(zip(classes, around, strict=True))
        near = (tuple(sorted(classes[c] for c in mine)) for mine in taken)
        shapes = _coloured(zip(shapes, near, strict=True))
    if len({*shapes}) == len(shapes) or any(len({*mine}) < len(mine) for mine in around):
        return problem  # none are alike, or alike domains overlap: as one they would say too little
    alike = grouped(zip(shapes, problem.shapes, strict=True))
    merged = []
    for number, those in grouped(zip(classes, problem.classes, strict=True)).items():
        ranks = tuple(sorted(rank for c in those for rank in c.ranks))
        mine = around[classes.index(number)]
        allowed = tuple(shape in mine for shape in alike)
        merged.append(replace(those[0], ranks=ranks, allowed=allowed))
    some = (replace(k[0], count=sum(s.count for s in k), members=()) for k in alike.values())
    return replace(problem, shapes=tuple(some), classes=tuple(merged), forced=())


def _coloured(found: Iterable[Hashable]) -> list[int]:
    """A number for each, equal for those that are equal."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(one, len(number)) for one in found]


# ---- the covering search ---------------------------------------------------------------------


def cover(
    problem: Problem, limit: int, dual: Dual | None = None, most_work: int = _COVER_WORK
) -> tuple[Counts | None, bool]:
    """Counts with a makespan of at most ``limit``, or None, which is a proof if True follows. The
    values of a good ``dual`` leave less to try."""
    if any(c.fixed > limit or c.room < 0 for c in problem.classes):
        return None, True
    if not problem.shapes:
        return np.zeros((problem.world, 0), np.int64), True
    if problem.world > _MOST_OWNERS or float(np.log2(problem.demand + 1.0).sum()) > 61.0:
        return None, False
    tables = [shape.ticks for shape in problem.shapes]
    holds = [limit - c.fixed for c in problem.classes]
    if dual is not None:
        with suppress(ValueError):  # values of another problem
            held = Holdings(problem, dual, limit)
            tables, holds = held.tables, held.most(limit)
    return _Search(problem, limit, tables, holds, most_work).run()


def _total(tables: Sequence[Ints], rows: Ints) -> Ints:
    """The worth of each of these rows of counts."""
    total: Ints = np.zeros(len(rows), np.int64)
    for s, table in enumerate(tables):
        total += table[rows[:, s]]
    return total


class _Search:
    """The search: states [states, shapes] after each owner, and their parents. By worth, ``left``
    is the least of k or more matrices of a shape, ``most`` the largest of at most k; an owner
    ``holds`` so much, by class."""

    def __init__(
        self, problem: Problem, limit: int, tables: Sequence[Ints], holds: Sequence[int], work: int
    ) -> None:
        self.problem, self.limit, self.holds = problem, limit, holds
        self.work, self.complete = work, True
        self.left = [np.minimum.accumulate(table[::-1])[::-1] for table in tables]
        self.most = [np.maximum.accumulate(table) for table in tables]
        self.held = sum(c.size * most for c, most in zip(problem.classes, holds, strict=True))
        self.surplus = self.held - int(_total(self.left, problem.demand[None])[0])
        self.monotone = all((np.diff(shape.ticks) >= 0).all() for shape in problem.shapes)

    def run(self) -> tuple[Counts | None, bool]:
        if self.surplus < 0:
            return None, True
        problem, held = self.problem, self.held
        most_pairs = min(_MOST_PAIRS, _LISTED * self.work)
        patterns: list[Ints] = []
        for c in range(len(problem.classes)):
            if (listed := self._patterns(c, most_pairs)) is None:
                return None, False
            patterns.append(listed)
        states: Ints = problem.demand[None].copy()
        owners = [(c, rank) for c, owner in enumerate(problem.classes) for rank in owner.ranks]
        steps: list[tuple[int, Ints, Ints]] = []  # rank, parent, what it takes
        for number, (c, rank) in enumerate(owners):
            held -= self.holds[c]
            most = max(self.work // (len(owners) - number) // max(patterns[c].size, 1), 1)
            if len(states) > most:
                states, self.complete = states[:most], False
            # The last owners are alike, so one of them has the costliest matrix that is left.
            pivot = c == len(problem.classes) - 1 and self.monotone
            states, parent, pattern = self._step(states, patterns[c], held, pivot)
            if not len(states):
                break
            steps.append((rank, parent, patterns[c][pattern]))
            if not states[0].any():
                return self._found(steps)
        return None, self.complete

    def _patterns(self, c: int, most_pairs: int) -> Ints | None:
        """The patterns that an owner of a class may take [patterns, shapes], the worthiest first.
        They are maximal, and worth as much as it must hold if all others hold the most they can.
        None if they are more than are worth listing."""
        owner, shapes = self.problem.classes[c], self.problem.shapes
        free, least = self.limit - owner.fixed, self.holds[c] - self.surplus
        rows, ticks, got = np.zeros((1, 0), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
        dense = [
            Option(shape.ticks, most - most[0]).density(free) if yes else 0.0
            for shape, most, yes in zip(shapes, self.most, owner.allowed, strict=True)
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
                value = got[some, None] + self.most[s][k]
                more = np.minimum(later * (free - total), float(1 << 62)) if later else np.zeros(1)
                at, which = np.nonzero((total <= free) & (value + more * (1 + 1e-9) + 1 >= least))
                grown = np.column_stack((rows[some][at], k[which]))
                found.append((grown, total[at, which], value[at, which]))
            rows, ticks, got = (np.concatenate(parts) for parts in zip(*found, strict=True))
            if len(rows) > 10 * _MOST_PATTERNS:
                return None
        stored = rows @ self.problem.nbytes
        keep = stored <= owner.room
        for s in np.flatnonzero(owner.allowed).tolist() if self.monotone else ():
            shape, has = shapes[s], rows[:, s]
            longer = ticks - shape.ticks[has] + shape.ticks.take(has + 1, mode="clip") <= free
            keep &= (has == shape.count) | ~longer | (stored + shape.nbytes > owner.room)
        rows = rows[keep]
        if len(rows) > _MOST_PATTERNS:
            return None
        return rows[np.lexsort((*rows.T, -_total(self.most, rows)))]

    def _step(
        self, states: Ints, patterns: Ints, held: int, pivot: bool
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
                # The rest of each state after each pattern, as far as other owners can hold it.
                left = states[part][:, None] - patterns[some]
                self.work -= left.size
                fits = self.monotone or (left >= 0).all(2).ravel()
                left = np.maximum(left, 0, out=left).reshape(-1, states.shape[1])
                keep = np.flatnonzero(fits & (_total(self.left, left) <= held))
                parts.append((left[keep], part[keep // len(some)], some[keep % len(some)]))
        left, parent, pattern = (np.concatenate(column) for column in zip(*parts, strict=True))
        strides = np.cumprod([1, *(self.problem.demand[:-1] + 1).tolist()], dtype=np.int64)
        _, once = np.unique(left @ strides, return_index=True)
        order = once[np.argsort(_total(self.left, left[once]), kind="stable")]
        if len(order) > _MOST_STATES:
            order, self.complete = order[:_MOST_STATES], False
        return left[order], parent[order], pattern[order]

    def _found(self, steps: Sequence[tuple[int, Ints, Ints]]) -> tuple[Counts | None, bool]:
        counts, at = np.zeros((self.problem.world, len(self.problem.shapes)), np.int64), 0
        for rank, parent, taken in reversed(steps):
            counts[rank] = taken[at]
            at = int(parent[at])
        spread(self.problem, counts)
        fits = self.problem.is_feasible(counts) and self.problem.makespan(counts) <= self.limit
        return (counts if fits else None), fits


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
