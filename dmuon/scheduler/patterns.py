"""Patterns of one owner, and how owners become counts: small steps of column generation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmuon.scheduler.problem import Counts, Problem

__all__ = ["Pattern", "maximal_patterns", "spread", "to_fix"]

Pattern = tuple[int, tuple[int, ...]]  # class, count of each kind

_COMPLETE = 2_000  # so many patterns at most are listed in full


def maximal_patterns(problem: Problem, c: int, limit: int) -> list[tuple[int, ...]] | None:
    """Patterns of a class to which no matrix can be added within ``limit``; None if too many."""
    owner, kinds = problem.classes[c], problem.kinds
    rows = np.zeros((1, 0), np.int64)
    ticks = np.zeros(1, np.int64)
    for s, kind in enumerate(kinds):
        k = np.arange(kind.count + 1 if owner.allowed[s] else 1)
        k = k[kind.ticks[k] <= limit]
        total = ticks[:, None] + kind.ticks[k][None, :]
        at, which = np.nonzero(total <= limit)
        if len(at) > 40 * _COMPLETE:
            return None
        rows = np.column_stack((rows[at], k[which]))
        ticks = total[at, which]
    full = np.ones(len(rows), np.bool_)
    for s, kind in enumerate(kinds):
        if owner.allowed[s]:
            more = np.minimum(rows[:, s] + 1, kind.count)
            longer = ticks - kind.ticks[rows[:, s]] + kind.ticks[more] <= limit
            full &= ~((rows[:, s] < kind.count) & longer)
    if full.sum() > _COMPLETE:
        return None
    return [tuple(int(k) for k in row) for row in rows[full]]


def to_fix(used: Sequence[tuple[Pattern, float]]) -> list[tuple[Pattern, int]]:
    """Whole numbers of uses, rounded down; the most used pattern once if that leaves none."""
    whole = [(p, int(y + 1e-6)) for p, y in used if int(y + 1e-6)]
    return whole or [(max(used, key=lambda u: (u[1], u[0]))[0], 1)]


def spread(problem: Problem, used: Sequence[tuple[Pattern, int]]) -> Counts | None:
    """Patterns given to ranks; surplus taken away, and what is missing put where it fits best."""
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    free = {c: list(owner.ranks)[::-1] for c, owner in enumerate(problem.classes)}
    for (c, pattern), times in used:
        for _ in range(times):
            if not free[c]:
                return None
            counts[free[c].pop()] = pattern
    _trim(problem, counts)
    return _fill(problem, counts)


def _trim(problem: Problem, counts: Counts) -> None:
    """Take surplus matrices away, each from the rank that gains most by it."""
    loads = problem.loads(counts)
    for s, kind in enumerate(problem.kinds):
        for _ in range(int(counts[:, s].sum()) - kind.count):
            has = np.flatnonzero(counts[:, s])
            k = counts[has, s]
            after = loads[has] - kind.ticks[np.minimum(k, kind.count)] + kind.ticks[k - 1]
            # Prefer what shortens the longest; a removal may also lengthen (costs need not grow).
            at = has[np.lexsort((has, -loads[has], after - loads[has]))[0]]
            loads[at] += kind.ticks[counts[at, s] - 1] - kind.ticks[counts[at, s]]
            counts[at, s] -= 1


def _fill(problem: Problem, counts: Counts) -> Counts | None:
    """Put missing matrices, the costliest kind first, where the load stays lowest."""
    loads = problem.loads(counts)
    free = problem.room - counts @ problem.nbytes
    for s, kind in enumerate(problem.kinds):
        for _ in range(kind.count - int(counts[:, s].sum())):
            may = np.flatnonzero(problem.allowed[:, s] & (free >= kind.nbytes))
            if not len(may):
                return None
            k = counts[may, s]
            after = loads[may] - kind.ticks[k] + kind.ticks[k + 1]
            at = may[int(after.argmin())]
            loads[at] = after.min()
            counts[at, s] += 1
            free[at] -= kind.nbytes
    return counts
