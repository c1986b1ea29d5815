"""Small problems settled in full: everything that owners can hold together, owner after owner.

This is the integer argument behind a bound that linear programming alone cannot reach: if no
combination of whole patterns within a makespan covers the matrices, no plan is that fast. The
state is how many matrices of each kind are covered, so it is for few kinds with small counts.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.problem import Counts, Problem

__all__ = ["MOST_WORK", "counts_within", "is_small"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MOST_WORK = 200_000_000  # states x patterns x owners
_MOST_PATTERNS = 1_000_000  # of all classes


def counts_within(problem: Problem, limit: int) -> Counts | None:
    """Counts with a makespan of at most ``limit``, or None: there are none."""
    shape = tuple(int(d) + 1 for d in problem.demand)
    reached: list[Flags] = [np.zeros(shape, np.bool_)]
    reached[0][(0,) * len(shape)] = True
    owners = []
    for c, owner in enumerate(problem.classes):
        if owner.fixed > limit or owner.room < 0:
            return None
        patterns = _patterns(problem, c, limit)
        for rank in owner.ranks:
            before, after = reached[-1], reached[-1].copy()
            for pattern in patterns:
                there, here = _shift(pattern, shape)
                after[there] |= before[here]
            if (after == before).all():
                break  # more owners of this class add nothing
            owners.append((rank, patterns))
            reached.append(after)
    return _trace(problem, owners, reached)


def _trace(
    problem: Problem, owners: list[tuple[int, list[tuple[int, ...]]]], reached: list[Flags]
) -> Counts | None:
    """Who holds what, read backwards from everything being covered."""
    left = tuple(int(d) for d in problem.demand)
    if not reached[-1][left]:
        return None
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    for (rank, patterns), before in zip(owners[::-1], reached[-2::-1], strict=True):
        for pattern in patterns:
            rest = tuple(d - k for d, k in zip(left, pattern, strict=True))
            if min(rest, default=0) >= 0 and before[rest]:
                counts[rank] = pattern
                left = rest
                break
    return counts


def _shift(
    pattern: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    there = tuple(slice(k, None) for k in pattern)
    here = tuple(slice(0, size - k) for k, size in zip(pattern, shape, strict=True))
    return there, here


def _patterns(problem: Problem, c: int, limit: int) -> list[tuple[int, ...]]:
    """Everything that an owner of class c can hold within ``limit``; nothing comes first."""
    owner, kinds = problem.classes[c], problem.kinds
    choices = [range(kind.count + 1 if owner.allowed[s] else 1) for s, kind in enumerate(kinds)]
    found = []
    for pattern in product(*choices):
        ticks = sum(int(kind.ticks[k]) for kind, k in zip(kinds, pattern, strict=True))
        nbytes = sum(kind.nbytes * k for kind, k in zip(kinds, pattern, strict=True))
        if ticks <= limit - owner.fixed and nbytes <= owner.room:
            found.append(pattern)
    return found


def is_small(problem: Problem) -> bool:
    """Whether `counts_within` takes no more than `MOST_WORK`, whatever the limit."""
    states = 1.0
    for kind in problem.kinds:
        states *= kind.count + 1
    return (
        states <= 5_000
        and states * states * problem.world <= MOST_WORK
        and states * len(problem.classes) <= _MOST_PATTERNS
    )
