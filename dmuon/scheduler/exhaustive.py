"""The covering search: every way to fill owners within a makespan, owner after owner.

::

    demand  (12, 12, 24)  ─owner 1─▶  what is left  ─owner 2─▶  ...  ─owner n─▶  nothing left?
                                      of each of its maximal patterns, without what is worse

If no combination of patterns within a makespan covers the matrices, no plan is that fast. So this
settles what linear programming leaves open, and without a solver. It is a search in breadth: the
state is how many matrices of each kind are left, and of two states that have as many owners left
the one with more of every kind is dropped. A state is dropped too where its matrices are worth
more than the owners left can hold (see `bound`), which leaves little where the bound is tight.

Costs are lowered to ``min over j >= k of C(j)``, so that only patterns matter that nothing can be
added to; surplus is taken away afterwards. Where C falls somewhere, patterns are exact instead.
All limits are numbers of states and pairs, so equal input gives equal answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.bound import Dual, most_worth, worth_tables
from dmuon.scheduler.problem import Counts, Problem

__all__ = ["Cover", "cover", "spread"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MOST_WORK = 40_000_000  # numbers formed in one search
_MOST_PATTERNS = 60_000  # of one class, and ten times as many on the way
MOST_STATES = 20_000  # kept after an owner
_COMPARED = 64  # states that the others are compared with
_AT_ONCE = 1_000_000  # pairs
_MOST_OWNERS = 2_000


@dataclass(frozen=True, slots=True)
class Cover:
    """Counts within the limit, or None: ``complete`` says whether that means there are none."""

    counts: Counts | None
    complete: bool


@dataclass(frozen=True, slots=True)
class _Worth:
    """By kind, the least worth of what is left if that is k matrices or more; what owners hold."""

    left: Sequence[Ints]
    most: Sequence[Ints]  # by kind, the largest worth of at most k matrices
    holds: Sequence[int]  # by class


class _TooMany(Exception):
    pass


def cover(
    problem: Problem,
    limit: int,
    dual: Dual | None = None,
    most_work: int = MOST_WORK,
    most_states: int = MOST_STATES,
) -> Cover:
    """Counts with a makespan of at most ``limit``.

    ``dual`` are good prices, if any are known: they decide how much has to be tried, and where it
    is too much, what is tried. Few ``most_states`` make it a quick look for counts.
    """
    demand = problem.demand
    if any(c.fixed > limit or c.room < 0 for c in problem.classes):
        return Cover(None, True)
    if not len(demand):
        return Cover(np.zeros((problem.world, 0), np.int64), True)
    if problem.world > _MOST_OWNERS or float(np.prod(demand + 1.0)) > 2.0**61:
        return Cover(None, False)
    worths = _worths(problem, limit, dual)
    if any(_needed(w, demand[None])[0] > _held(problem, w) for w in worths):
        return Cover(None, True)
    try:
        patterns = [_patterns(problem, c, limit, worths) for c in range(len(problem.classes))]
    except _TooMany:
        return Cover(None, False)
    return _Search(problem, limit, worths, patterns, most_work, most_states).run()


def _worths(problem: Problem, limit: int, dual: Dual | None) -> list[_Worth]:
    """What prunes: the prices given, and work."""
    ticks = [kind.ticks for kind in problem.kinds]
    found = []
    if dual is not None and not dual.byte_price:
        with suppress(ValueError):  # prices of another problem
            found.append(_worth(worth_tables(problem, dual), most_worth(problem, dual, limit)))
    found.append(_worth(ticks, [limit - c.fixed for c in problem.classes]))
    return found


def _fits(problem: Problem, limit: int) -> Ints:
    """[classes, kinds]: how many of a kind alone an owner may take."""
    found = np.zeros((len(problem.classes), len(problem.kinds)), np.int64)
    for c, owner in enumerate(problem.classes):
        for s, kind in enumerate(problem.kinds):
            if owner.allowed[s]:
                found[c, s] = np.flatnonzero(kind.ticks <= limit - owner.fixed)[-1]
    return found


def _worth(tables: Sequence[Ints], holds: Sequence[int]) -> _Worth:
    left = [np.minimum.accumulate(table[::-1])[::-1] for table in tables]
    return _Worth(left, [np.maximum.accumulate(table) for table in tables], holds)


def _needed(worth: _Worth, left: Ints) -> Ints:
    """The worth of each of these states [states, kinds]."""
    total: Ints = np.zeros(len(left), np.int64)
    for s, table in enumerate(worth.left):
        total += table[left[:, s]]
    return total


def _held(problem: Problem, worth: _Worth) -> int:
    return sum(c.size * most for c, most in zip(problem.classes, worth.holds, strict=True))


def _patterns(problem: Problem, c: int, limit: int, worths: Sequence[_Worth]) -> Ints:
    """What an owner of a class may take: maximal patterns, those that matter, no owner worth less.

    Raises:
        _TooMany: more than are worth listing.
    """
    owner, kinds, free = problem.classes[c], problem.kinds, limit - problem.classes[c].fixed
    exact = not _is_monotone(problem)
    rows, ticks = np.zeros((1, 0), np.int64), np.zeros(1, np.int64)
    worth = worths[0]
    # Of this worth an owner needs so much, if all others hold the most they can.
    least = int(_needed(worth, problem.demand[None])[0]) - _held(problem, worth) + worth.holds[c]
    density = [_density(kind.ticks, most) for kind, most in zip(kinds, worth.most, strict=True)]
    got = np.zeros(1, np.int64)
    for s, kind in enumerate(kinds):
        k = np.arange(kind.count + 1 if owner.allowed[s] else 1)
        k = k[kind.ticks[k] <= free]
        total = ticks[:, None] + kind.ticks[k][None, :]
        value = got[:, None] + worth.most[s][k][None, :]
        later = max((density[t] for t in range(s + 1, len(kinds)) if owner.allowed[t]), default=0.0)
        reach = value + np.minimum(later * (free - total), float(1 << 62)) * (1 + 1e-9) + 1
        at, which = np.nonzero((total <= free) & (reach >= least))
        if len(at) > 10 * _MOST_PATTERNS:
            raise _TooMany
        rows = np.column_stack((rows[at], k[which]))
        ticks, got = total[at, which], value[at, which]
    fits = rows @ problem.nbytes <= owner.room
    rows, ticks = rows[fits], ticks[fits]
    if not exact:
        full = np.ones(len(rows), np.bool_)
        stored = rows @ problem.nbytes
        for s, kind in enumerate(kinds):
            if owner.allowed[s]:
                more = np.minimum(rows[:, s] + 1, kind.count)
                longer = ticks - kind.ticks[rows[:, s]] + kind.ticks[more] <= free
                longer &= stored + kind.nbytes <= owner.room
                full &= ~((rows[:, s] < kind.count) & longer)
        rows, ticks = rows[full], ticks[full]
    if len(rows) > _MOST_PATTERNS:
        raise _TooMany
    order = np.lexsort((*rows.T, -_most(worth, rows)))
    chosen: Ints = rows[order]
    return chosen


def _most(worth: _Worth, rows: Ints) -> Ints:
    total: Ints = np.zeros(len(rows), np.int64)
    for s, table in enumerate(worth.most):
        total += table[rows[:, s]]
    return total


def _density(ticks: Ints, worth: Ints) -> float:
    """The most worth that a tick brings."""
    gains = worth[1:] - worth[0]
    if (gains[ticks[1:] == 0] > 0).any():
        return float("inf")
    some = ticks[1:] > 0
    return float((gains[some] / ticks[1:][some]).max(initial=0.0))


def _is_monotone(problem: Problem) -> bool:
    return all((np.diff(kind.ticks) >= 0).all() for kind in problem.kinds)


class _Search:
    """States [states, kinds] after each owner; parents tell how they came about."""

    def __init__(
        self,
        problem: Problem,
        limit: int,
        worths: Sequence[_Worth],
        patterns: Sequence[Ints],
        most_work: int,
        most_states: int,
    ) -> None:
        self.problem, self.limit, self.worths, self.patterns = problem, limit, worths, patterns
        self.work, self.complete, self.most_states = most_work, True, most_states
        self.exact = not _is_monotone(problem)
        strides = np.cumprod([1, *(problem.demand[:-1] + 1).tolist()])
        self._strides: Ints = strides.astype(np.int64)

    def run(self) -> Cover:
        problem = self.problem
        states: Ints = problem.demand[None].copy()
        owners = [(c, rank) for c, owner in enumerate(problem.classes) for rank in owner.ranks]
        held = [_held(problem, worth) for worth in self.worths]
        fits = _fits(problem, self.limit)
        alone = np.array([c.size for c in problem.classes]) @ fits
        steps: list[tuple[int, int, Ints, Ints]] = []  # class, rank, parent, pattern
        for number, (c, rank) in enumerate(owners):
            held = [h - w.holds[c] for h, w in zip(held, self.worths, strict=True)]
            alone = alone - fits[c]
            # The last owners are alike, so one of them has the costliest matrix that is left.
            pivot = c == len(problem.classes) - 1 and not self.exact
            made = self._step(states, self.patterns[c], (held, alone), pivot, len(owners) - number)
            if made is None:
                return Cover(None, self.complete)
            states, parent, pattern = made
            steps.append((c, rank, parent, pattern))
            if not states[0].any():
                return self._found(steps)
        return Cover(None, self.complete)

    def _step(
        self,
        states: Ints,
        patterns: Ints,
        held: tuple[Sequence[int], Ints],
        pivot: bool,
        owners: int,
    ) -> tuple[Ints, Ints, Ints] | None:
        """States after one more owner, the most promising first; None if there are none."""
        share = max(self.work // max(owners, 1), 1)
        most = max(share // max(len(patterns) * states.shape[1], 1), 1)
        if len(states) > most:
            states, self.complete = states[:most], False
        parts: list[tuple[Ints, Ints, Ints]] = []
        for rows, some in self._pairs(states, patterns, pivot):
            size = max(_AT_ONCE // max(len(some), 1), 1)
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                self.work -= len(part) * len(some) * states.shape[1]
                parts.append(self._children(states, part, patterns, some, held))
        if not parts:
            return None
        left, parent, pattern = (np.concatenate(column) for column in zip(*parts, strict=True))
        if not len(left):
            return None
        _, first = np.unique(left @ self._strides, return_index=True)
        left, parent, pattern = left[first], parent[first], pattern[first]
        order = np.argsort(_needed(self.worths[0], left), kind="stable")
        for most in (4 * self.most_states, self.most_states):
            if len(order) > most:
                order, self.complete = order[:most], False
            order = order[self._undominated(left[order])]
        return left[order], parent[order], pattern[order]

    def _pairs(self, states: Ints, patterns: Ints, pivot: bool) -> list[tuple[Ints, Ints]]:
        """(states, patterns) to combine, as indices."""
        everything = np.arange(len(patterns))
        if not pivot:
            return [(np.arange(len(states)), everything)]
        first = (states > 0).argmax(1)
        return [
            (np.flatnonzero(first == s), everything[patterns[:, s] > 0])
            for s in np.unique(first).tolist()
        ]

    def _children(
        self, states: Ints, rows: Ints, patterns: Ints, some: Ints, held: tuple[Sequence[int], Ints]
    ) -> tuple[Ints, Ints, Ints]:
        left = (states[rows][:, None, :] - patterns[some][None, :, :]).reshape(-1, states.shape[1])
        index: Ints = np.arange(len(left))
        if self.exact:
            index = np.flatnonzero((left >= 0).all(1))
            left = left[index]
        np.maximum(left, 0, out=left)
        worths, alone = held
        for worth, most in zip(self.worths, worths, strict=True):
            keep = _needed(worth, left) <= most
            left, index = left[keep], index[keep]
        left, index = left[(left <= alone).all(1)], index[(left <= alone).all(1)]
        return left, rows[index // max(len(some), 1)], some[index % max(len(some), 1)]

    def _undominated(self, left: Ints) -> Ints:
        """Indices of states that none of the first has less of every kind than."""
        keep = np.ones(len(left), np.bool_)
        columns = np.ascontiguousarray(left.T.astype(np.int32))
        for at in range(0 if self.exact else min(len(left), _COMPARED)):
            if keep[at]:
                worse = np.ones(len(left) - at - 1, np.bool_)
                for column in columns:
                    worse &= column[at + 1 :] >= column[at]
                keep[at + 1 :] &= ~worse
        return np.flatnonzero(keep)

    def _found(self, steps: Sequence[tuple[int, int, Ints, Ints]]) -> Cover:
        counts = np.zeros((self.problem.world, len(self.problem.kinds)), np.int64)
        at = 0
        for c, rank, parent, pattern in reversed(steps):
            counts[rank] = self.patterns[c][pattern[at]]
            at = int(parent[at])
        spread(self.problem, counts)
        if self.problem.is_feasible(counts) and self.problem.makespan(counts) <= self.limit:
            return Cover(counts, True)
        return Cover(None, False)


def spread(problem: Problem, counts: Counts) -> None:
    """Take surplus matrices away, each from the rank that gains most by it."""
    loads = problem.loads(np.minimum(counts, problem.demand))
    for s, kind in enumerate(problem.kinds):
        for _ in range(int(counts[:, s].sum()) - kind.count):
            has = np.flatnonzero(counts[:, s])
            k = np.minimum(counts[has, s], kind.count)
            after = loads[has] - kind.ticks[k] + kind.ticks[k - 1]
            # Prefer what shortens the longest; a removal may also lengthen (costs need not grow).
            at = has[np.lexsort((has, -loads[has], after - loads[has]))[0]]
            held = int(counts[at, s])
            loads[at] += kind.ticks[min(held, kind.count) - 1] - kind.ticks[min(held, kind.count)]
            counts[at, s] -= 1
