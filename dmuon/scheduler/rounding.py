"""Whole owners from the linear program's fractions of them: diving, and an integer program."""

from __future__ import annotations

import numpy as np

from dmuon.scheduler.engines import EngineError, LinearProgram, Row, minimize
from dmuon.scheduler.master import Left, Master
from dmuon.scheduler.patterns import Pattern, maximal_patterns, spread, to_fix
from dmuon.scheduler.problem import Counts
from dmuon.scheduler.proof import dual_options

__all__ = ["dive", "whole"]

_MOST_WHOLE = 300  # patterns in the integer master program
_MOST_PRICINGS = 6  # in one step of a dive
_MOST_NODES = 150  # of one integer master


def dive(master: Master, limit: int) -> Counts | None:
    """Fix the most used patterns of the linear program, solve it for the rest, and so on."""
    left = master.everything()
    fixed: list[tuple[Pattern, int]] = []
    known = master.patterns
    master.patterns = dict(known)  # what is cut to fit the rest is of no use later
    while any(left.demand) and _is_covered(master, limit, left) and not master.budget.spent():
        try:
            used = _enriched(master, limit, left)
        except EngineError:  # what is left cannot be shared out: what was fixed before was wrong
            master.patterns = known
            return None
        for pattern, times in to_fix(used):
            times = min(times, left.owners[pattern[0]])
            if times and left.without(pattern, times).is_possible():
                fixed.append((pattern, times))
                left = left.without(pattern, times)
        master.patterns = {p: t for p, t in master.patterns.items() if left.covers(p)}
        for pattern, _ in used:
            if left.owners[pattern[0]]:
                master.add(*left.cut(pattern))
    master.patterns = known
    return spread(master.problem, fixed)


def _is_covered(master: Master, limit: int, left: Left) -> bool:
    """Whether every kind that is left is in a pattern; else its owners are used up."""
    found = np.zeros(len(left.demand), np.bool_)
    for pattern in master.within(limit):
        if left.covers(pattern):
            found |= np.array(pattern[1]) > 0
    return bool(found[np.array(left.demand) > 0].all())


def _enriched(master: Master, limit: int, left: Left) -> list[tuple[Pattern, float]]:
    """The linear program's use of patterns, after a few rounds of pricing on what is left."""
    for _ in range(_MOST_PRICINGS):
        theta, dual, used = master.master(limit, left)
        real = master.real(dual, limit, left)
        near = [limit - int(limit * step) for step in (0.0, 0.001, 0.004, 0.016)]
        if theta <= 1 or not master.price(real, near) or master.budget.spent():
            break
    return used


def _promising(master: Master, limit: int) -> list[Pattern]:
    """The patterns that fit and that the linear program's prices like best."""
    _complete(master, limit)
    for _ in range(_MOST_PRICINGS):
        _, dual, used = master.master(limit)
        near = (limit, limit - limit // 500, limit - limit // 100)
        if not master.price(master.real(dual, limit, master.everything()), near):
            break
    patterns = [p for p in master.within(limit) if master.fits_memory(p)]
    if len(patterns) <= _MOST_WHOLE:
        return patterns
    everything = [True] * len(master.problem.kinds)
    values = [o.value for o in dual_options(master.problem, dual, everything)]
    chosen = {p for p, _ in used}

    def worth(pattern: Pattern) -> int:
        _, counts = pattern
        return sum(int(value[k]) for value, k in zip(values, counts, strict=True))

    ranked = sorted(patterns, key=lambda p: (p not in chosen, -worth(p), p))
    return ranked[:_MOST_WHOLE]


def _complete(master: Master, limit: int) -> bool:
    """Add every pattern that no matrix can be added to, if they are few."""
    for c, owner in enumerate(master.problem.classes):
        full = maximal_patterns(master.problem, c, limit - owner.fixed)
        if full is None:
            return False
        for counts in full:
            master.add(c, counts)
    return True


def whole(master: Master, limit: int) -> Counts | None:
    """The integer master program: cover as much as possible with patterns within ``limit``."""
    problem = master.problem
    patterns = _promising(master, limit)
    n, kinds = len(patterns), len(problem.kinds)
    rows = []
    for s, d in enumerate(problem.demand.tolist()):
        terms = [(p, counts[s]) for p, (_, counts) in enumerate(patterns) if counts[s]]
        rows.append(Row([*terms, (n + s, 1.0)], ">=", d))
    for c, owner in enumerate(problem.classes):
        mine = [(p, 1.0) for p, (of, _) in enumerate(patterns) if of == c]
        rows.append(Row(mine, "<=", float(owner.size)))
    missing = [float(kind.ticks[1]) / max(1.0, limit) for kind in problem.kinds]
    program = LinearProgram([0.0] * n + missing, rows, [True] * (n + kinds))
    answer = minimize(
        program, master.engine, time_limit_s=master.lp_seconds(), most_nodes=_MOST_NODES
    )
    used = np.rint(answer.values[:n]).astype(np.int64).tolist()
    return spread(problem, [(p, k) for p, k in zip(patterns, used, strict=True) if k])
