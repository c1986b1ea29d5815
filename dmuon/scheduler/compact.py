"""The compact integer program: which owner runs how many batches of each size. For small problems.

::

    minimize T   such that   sum_(r, b) b * x[s, b, r]               = d_s   for every kind s
                             fixed_r + sum_(s, b) c[s, b] * x[s, b, r] <= T   for every owner r
                             load_r >= load_(r + 1)                           inside a class

It has a variable for every owner, so it stalls soon; `columns` has none.
"""

from __future__ import annotations

import numpy as np

from dmuon.scheduler.engines import LinearProgram, Row, minimize
from dmuon.scheduler.problem import UNLIMITED, Counts, Problem

__all__ = ["MOST_VARIABLES", "compact", "variables"]

MOST_VARIABLES = 240
_MOST_NODES = 5_000


def variables(problem: Problem) -> int:
    """How many integer variables the compact model has."""
    allowed = problem.allowed.sum(0).tolist()
    sizes = [min(len(kind.batch_ticks), kind.count) for kind in problem.kinds]
    return sum(n * size for n, size in zip(allowed, sizes, strict=True))


def compact(problem: Problem, makespan: int, engine: str, time_limit_s: float) -> Counts:
    """Counts from the compact model; ``makespan`` is known to be possible and sets the scale.

    Raises:
        EngineError: the solver failed.
    """
    scale = 1.0 / max(makespan, 1)
    index = [
        (r, s, b)
        for r in range(problem.world)
        for s, kind in enumerate(problem.kinds)
        for b in range(1, min(len(kind.batch_ticks), kind.count) + 1)
        if problem.allowed[r, s]
    ]
    top = len(index)
    loads: list[list[tuple[int, float]]] = [[] for _ in range(problem.world)]
    covers: list[list[tuple[int, float]]] = [[] for _ in problem.kinds]
    stored: list[list[tuple[int, float]]] = [[] for _ in range(problem.world)]
    for v, (r, s, b) in enumerate(index):
        kind = problem.kinds[s]
        loads[r].append((v, kind.batch_ticks[b - 1] * scale))
        covers[s].append((v, float(b)))
        stored[r].append((v, float(b * kind.nbytes)))
    rows = [Row(covers[s], "==", float(kind.count)) for s, kind in enumerate(problem.kinds)]
    fixed = problem.fixed * scale
    rows += [Row([*load, (top, -1.0)], "<=", -fixed[r]) for r, load in enumerate(loads)]
    rows += [
        Row([*loads[a], *((v, -c) for v, c in loads[b])], ">=", 0.0)
        for owners in problem.classes
        for a, b in zip(owners.ranks, owners.ranks[1:])
    ]
    unit = max(1, int(problem.nbytes.max(initial=1)))
    rows += [
        Row([(v, n / unit) for v, n in stored[r]], "<=", float(problem.room[r] / unit))
        for r in range(problem.world)
        if problem.room[r] < UNLIMITED
    ]
    program = LinearProgram(
        [0.0] * top + [1.0],
        rows,
        [True] * top + [False],
        [*(float(problem.kinds[s].count // b) for _, s, b in index), None],
    )
    answer = minimize(program, engine, time_limit_s=time_limit_s, most_nodes=_MOST_NODES)
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    for (r, s, b), x in zip(index, answer.values[:top].tolist(), strict=True):
        counts[r, s] += b * round(x)
    return counts
