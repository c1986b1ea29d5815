"""Classes one by one: once it is decided how many matrices each takes, they are apart.

The linear program shares out fractions: of 60 dense matrices on 8 alike pools, 7.5 each. `shares`
makes them whole, so that every class gets about the work it should have, and `alone` is then the
problem of one class, with interchangeable owners only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.patterns import Pattern
from dmuon.scheduler.problem import Counts, Problem
from dmuon.scheduler.symmetry import Orbits

__all__ = ["alone", "shares", "together"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_MOVES = 2_000  # of single matrices between classes
_GIVE_TO = 16  # classes tried
_WHOLE = 1e-6  # a fraction closer to a whole number than this is one


def shares(
    problem: Problem,
    orbits: Orbits,
    kinds_of: Sequence[Sequence[int]],
    used: Sequence[tuple[Pattern, float]],
) -> Ints:
    """[classes, kinds]: how many of each kind a class takes, near what the patterns used say.

    ``used`` are patterns of the first of alike classes, for all of them together; ``kinds_of`` are
    each class's kinds, so that the i-th of alike classes are alike.
    """
    ideal = np.zeros((len(problem.classes), len(problem.kinds)))
    for (c, counts), times in used:
        ideal[c] += np.array(counts) * times
    first, owners = orbits.first_classes, Counter[int]()
    for c, orbit in enumerate(orbits.classes):
        owners[orbit] += problem.classes[c].size
    for c in range(len(problem.classes) - 1, -1, -1):  # the first of alike classes is the last
        origin, part = first[orbits.classes[c]], problem.classes[c].size
        all_of_them = ideal[origin, list(kinds_of[origin])]
        ideal[c, list(kinds_of[c])] = all_of_them * (part / owners[orbits.classes[c]])
    return _whole(problem, ideal)


def _whole(problem: Problem, ideal: npt.NDArray[np.float64]) -> Ints:
    """Rounded so that every kind adds up, and that no class gets much more work than is ideal."""
    taken = np.floor(ideal + _WHOLE).astype(np.int64)
    sizes = np.array([c.size for c in problem.classes], float)
    allowed = np.array([c.allowed for c in problem.classes]).T  # [kinds, classes]
    # What a matrix costs where owners take about as many of its kind as is usual.
    usual = [-(-kind.count // int(sizes[may].sum())) for kind, may in zip(problem.kinds, allowed)]
    each = np.array([kind.ticks[k] / k for kind, k in zip(problem.kinds, usual)])
    surplus = (taken - ideal) @ each / sizes  # ticks of an owner
    for s, kind in enumerate(problem.kinds):
        missing = kind.count - int(taken[:, s].sum())
        for _ in range(abs(missing)):
            step = 1 if missing > 0 else -1
            may = np.flatnonzero(allowed[s] & (taken[:, s] + step >= 0))
            c = may[int((step * surplus[may]).argmin())]
            taken[c, s] += step
            surplus[c] += step * each[s] / sizes[c]
    for _ in range(_MOST_MOVES):
        if not _move(taken, surplus, each, sizes, allowed):
            break
    return taken


def _move(
    taken: Ints, surplus: Floats, each: Floats, sizes: Floats, allowed: npt.NDArray[np.bool_]
) -> bool:
    """Let the class of most surplus give a matrix to another one, for another or for none."""
    top = int(surplus.argmax())
    best, chosen = float(surplus[top]), None
    for c in np.argsort(surplus, kind="stable")[:_GIVE_TO].tolist():
        both = np.flatnonzero(allowed[:, top] & allowed[:, c]).tolist()
        for s in (s for s in both if taken[top, s]):
            for t in (-1, *(t for t in both if taken[c, t] and t != s)):
                ticks = each[s] - (each[t] if t >= 0 else 0.0)
                after = max(surplus[top] - ticks / sizes[top], surplus[c] + ticks / sizes[c])
                if after < best - _WHOLE * abs(best):
                    best, chosen = after, (c, s, t, ticks)
    if chosen is None:
        return False
    c, s, t, ticks = chosen
    for kind, step in ((s, 1), (t, -1)):
        if kind >= 0:
            taken[top, kind] -= step
            taken[c, kind] += step
    surplus[top] -= ticks / sizes[top]
    surplus[c] += ticks / sizes[c]
    return True


def alone(problem: Problem, c: int, demand: Ints) -> Problem:
    """The problem of class ``c`` with its share of the matrices: equal for equal shares."""
    owner = problem.classes[c]
    kinds = tuple(
        replace(problem.kinds[s], pool=-1, count=int(demand[s]))
        for s in np.flatnonzero(demand).tolist()
    )
    owners = replace(owner, ranks=tuple(range(owner.size)), allowed=(True,) * len(kinds))
    return Problem(kinds, (owners,), ((),) * len(kinds), problem.ticks_per_ms, problem.memory_cap)


def together(problem: Problem, demand: Ints, parts: Sequence[Counts]) -> Counts:
    """The counts of all ranks from those of each class ``alone``."""
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    for owner, mine, part in zip(problem.classes, demand, parts, strict=True):
        counts[np.array(owner.ranks)[:, None], np.flatnonzero(mine)] = part
    return counts
