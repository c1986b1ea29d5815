"""Exact answers about one makespan: whether any plan for all matrices meets it.

A *pattern* says how many matrices of each shape one owner of a class takes within a limit. If there
are few maximal patterns, to which no matrix can be added, all are listed. A linear program
distributes the matrices over patterns; its duals are a *value* per matrix of each shape. Whatever
the values, no plan meets the limit if all owners together hold less than the matrices are worth::

    sum_c n_c * (largest worth of a pattern of class c)  <  sum_s value_s * d_s

So a bound needs no trust in a solver: `refuted` checks it again in integers. If values leave a gap,
an exhaustive search over the listed patterns closes it, provided that it is small. If there are too
many patterns, worths are bounded from above on a grid of costs, and only patterns near those of the
best known plan are listed: enough to look for a better plan, but not to prove anything.

A pattern may hold more matrices than exist; `spread` removes the surplus. For that reason, and so
that only maximal patterns matter, k matrices count as the least of ``C(k), C(k + 1), ...``, so that
one more never costs less. This is the cost itself unless prices fall with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.problem import Counts, Ints, Problem, Shape

_MOST_LISTED = 6_000  # patterns of all classes together
_ON_THE_WAY = 20  # times as many intermediate ones
_MOST_NEAR = 3_000  # patterns near known counts, if there are too many to list all
_MOST_TRIED = 20_000_000  # numbers computed to find these for a class
_EXHAUSTED = 20_000_000  # numbers computed in one exhaustive search
_GRID = 8_192  # steps of cost within a limit
_GRID_WORK = 400_000_000  # numbers computed on the grid for one limit
WORTH = 10**9  # approximate value of the most valuable matrix
_NODES = 300  # nodes of one branch and bound
_MOST_SETS = 64  # sets of owners whose exclusive work is considered


class EngineError(Exception):
    """HiGHS raised an error, or returned values that are not numbers."""


def has_engine() -> bool:
    """Return whether PuLP finds HiGHS here."""

    def find() -> bool:
        with suppress(ImportError):
            import pulp

            return "HiGHS" in pulp.listSolvers(onlyAvailable=True)
        return False

    # In a thread: PuLP stores an exception of its import, which would keep callers' frames alive.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(find).result()


# ---- bounds ----------------------------------------------------------------------------------


def simple_bound(problem: Problem) -> int:
    """Return the best simple lower bound of the makespan in ticks: the largest fixed load; all
    work, or the work that only some ranks may do, spread evenly over these ranks; or an owner's
    share of one shape, rounded up (the pigeonhole principle)."""
    best = int(problem.fixed.max(initial=0))
    owners = [tuple(np.flatnonzero(column).tolist()) for column in problem.allowed.T]
    everyone = tuple(range(problem.world))
    work = dict.fromkeys(owners, 0)
    for mine, shape in zip(owners, problem.shapes, strict=True):
        work[mine] += int(shape.ticks[-1])
    ranked = sorted(work, key=lambda mine: (-work[mine] / len(mine), mine))
    for ranks in dict.fromkeys((everyone, *ranked[:_MOST_SETS])):
        inside = frozenset(ranks)
        total = sum(ticks for mine, ticks in work.items() if inside.issuperset(mine))
        if total:
            # The ranks with the least fixed load are filled up to one level.
            filled = total + np.cumsum(np.sort(problem.fixed[[*ranks]]))
            level = -(-filled // np.arange(1, len(ranks) + 1))
            best = max(best, int(level.min()))
    for mine, shape in zip(owners, problem.shapes, strict=True):
        share = shape.ticks[-(-shape.count // len(mine)) :].min()
        best = max(best, int(problem.fixed[[*mine]].min() + share))
    return best


def refuted(problem: Problem, limit: int, values: Sequence[int]) -> bool:
    """Return True if ``values``, or exhaustion, prove that no plan's makespan is <= ``limit``."""
    if limit < simple_bound(problem):
        return True
    within = all(0 <= value <= WORTH for value in values)  # sums do not overflow
    if not within or len(values) != len(problem.shapes):
        return False
    worth, listed = np.array(values, np.int64), every_pattern(problem, limit)
    if (most := most_worth(problem, limit, worth, listed)) is None:
        return False
    if is_short(problem, most, worth) or (listed is not None and leaves_out(listed)):
        return True
    if listed is None:
        return False
    counts, complete = exhaust(problem, listed, worth, most)
    return complete and counts is None


def leaves_out(listed: Sequence[Ints]) -> bool:
    """Return whether some shape is in no pattern."""
    return not np.concatenate(listed).any(0).all()


def is_short(problem: Problem, most: Sequence[int], worth: Ints) -> bool:
    """Return whether owners that hold ``most``, by class, hold less than all matrices are worth."""
    held = sum(c.size * each for c, each in zip(problem.classes, most, strict=True))
    return held < int(worth @ problem.demand)


def most_worth(
    problem: Problem, limit: int, worth: Ints, listed: Sequence[Ints] | None
) -> list[int] | None:
    """Return, by class, the largest worth that an owner holds within a limit: exact if all patterns
    are ``listed``, else an upper bound; None if even that takes too much work."""
    if listed is not None:
        return [int((rows @ worth).max(initial=0)) for rows in listed]
    free = [(c.allowed, max(limit - c.fixed, 0)) for c in problem.classes]
    costs = [_at_least(shape) for shape in problem.shapes]
    sizes = [int(np.searchsorted(cost, limit, side="right")) for cost in costs]
    if len({*free}) * sum(sizes) * _GRID > _GRID_WORK:
        return None
    known = {kind: _on_grid(costs, worth, *kind) for kind in {*free}}
    return [known[kind] for kind in free]


def _on_grid(costs: Sequence[Ints], worth: Ints, allowed: Sequence[bool], free: int) -> int:
    """Return an upper bound of the worth that fits into ``free`` ticks: a knapsack over costs that
    are rounded down to steps of a grid."""
    best: Ints = np.zeros(_GRID + 1, np.int64)
    for cost, value, yes in zip(costs, worth.tolist(), allowed, strict=True):
        if not yes or not value:
            continue
        fitting = cost[: np.searchsorted(cost, free, side="right")].astype(float)
        steps = np.floor(fitting / max(free, 1) * _GRID * (1 - 1e-9)).astype(np.int64)
        before = best.copy()
        for k, step in enumerate(steps.tolist()):
            np.maximum(best[step:], before[: _GRID + 1 - step] + k * value, out=best[step:])
    return int(best[-1])


# ---- lists of patterns -------------------------------------------------------------------------


def _at_least(shape: Shape) -> Ints:
    """Return the least cost of k or more matrices, by k."""
    least: Ints = np.minimum.accumulate(shape.ticks[::-1])[::-1]
    return least


def every_pattern(problem: Problem, limit: int) -> list[Ints] | None:
    """Return, by class, all maximal patterns [patterns, shapes] within a limit, to which no matrix
    can be added; None if there are too many."""
    listed, left = [], _MOST_LISTED
    for c in range(len(problem.classes)):
        if (rows := _maximal(problem, c, limit, left)) is None:
            return None
        listed.append(rows)
        left -= len(rows)
    return listed


def _maximal(problem: Problem, c: int, limit: int, most: int) -> Ints | None:
    owner, shapes = problem.classes[c], problem.shapes
    free = limit - owner.fixed
    if free < 0 or owner.room < 0:
        return np.zeros((0, len(shapes)), np.int64)
    costs = {s: _at_least(shapes[s]) for s in np.flatnonzero(owner.allowed).tolist()}
    # The last shape always takes as many as fit, so the shape with the most choices comes last.
    order = sorted(costs, key=lambda s: (int(np.searchsorted(costs[s], free, side="right")), s))
    rows, ticks, stored = np.zeros((1, len(shapes)), np.int64), *np.zeros((2, 1), np.int64)
    for s in order:
        cost, nbytes = costs[s], shapes[s].nbytes
        top = np.searchsorted(cost, free - ticks, side="right") - 1
        if nbytes:
            top = np.minimum(top, (owner.room - stored) // nbytes)
        first = top if s == order[-1] else np.zeros_like(top)
        choices = top - first + 1
        if (total := int(choices.sum())) > _ON_THE_WAY * most:
            return None
        parent = np.repeat(np.arange(len(rows)), choices)
        ends = np.cumsum(choices)
        k = np.arange(total) - np.repeat(ends - choices - first, choices)
        rows, ticks, stored = rows[parent], ticks[parent] + cost[k], stored[parent] + k * nbytes
        rows[:, s] = k
    keep = np.ones(len(rows), np.bool_)
    for s in order[:-1]:
        cost, k = costs[s], rows[:, s]
        more = ticks - cost[k] + cost.take(k + 1, mode="clip") <= free
        keep &= ~(more & (k < shapes[s].count) & (stored + shapes[s].nbytes <= owner.room))
    return rows[keep] if keep.sum() <= most else None


def near_patterns(problem: Problem, counts: Counts, limit: int) -> list[Ints]:
    """Return, by class, the fullest patterns within a limit that differ from an owner's ``counts``
    by one or two matrices added, removed or exchanged."""
    step = np.eye(len(problem.shapes), dtype=np.int64)
    one = np.concatenate((0 * step[:1], step, -step))
    changes = np.unique((one[:, None] + one).reshape(len(one) ** 2, len(step)), axis=0)
    costs = [_at_least(shape) for shape in problem.shapes]
    most = _MOST_NEAR // len(problem.classes) + 1
    listed = []
    for owner in problem.classes:
        taken = np.unique(counts[[*owner.ranks]], axis=0)[: 1 + _MOST_TRIED // changes.size]
        rows = np.unique((taken[:, None] + changes).reshape(-1, len(step)), axis=0)
        rows = rows[((rows >= 0) & (rows <= problem.demand)).all(1)]
        rows = rows[~(rows[:, ~np.array(owner.allowed)] > 0).any(1)]
        ticks = np.full(len(rows), owner.fixed)
        for s, cost in enumerate(costs):
            ticks += cost[rows[:, s]]
        fits = (ticks <= limit) & (rows @ problem.nbytes <= owner.room)
        listed.append(rows[fits][np.argsort(-ticks[fits], kind="stable")[:most]])
    return listed


# ---- whether patterns are enough -----------------------------------------------------------------


def exhaust(
    problem: Problem, listed: Sequence[Ints], worth: Ints, most: Sequence[int]
) -> tuple[Counts | None, bool]:
    """Return (counts made of listed patterns, True), (None, True) if no such counts exist, or
    (None, False) if the search takes too much work. A state is the matrices left of each shape
    after an owner; it is dropped if they are worth more than the remaining owners can hold."""
    strides = [1]
    for count in problem.demand.tolist():
        strides.append(strides[-1] * (count + 1))
    if strides[-1] > 1 << 62:
        return None, False
    number = np.array(strides[:-1], np.int64)
    states: Ints = problem.demand[None].copy()
    held = sum(c.size * each for c, each in zip(problem.classes, most, strict=True))
    work, steps = _EXHAUSTED, list[tuple[int, Ints, Ints]]()  # rank, its patterns, pairs kept
    for c, owner in enumerate(problem.classes):
        for rank in owner.ranks:
            held -= most[c]
            work -= len(states) * listed[c].size
            if work < 0:
                return None, False
            left = np.maximum(states[:, None] - listed[c], 0)
            left = left.reshape(len(states) * len(listed[c]), len(number))
            pairs = np.flatnonzero(left @ worth <= held)
            pairs = pairs[np.unique(left[pairs] @ number, return_index=True)[1]]
            if not len(pairs):
                return None, True
            states = left[pairs]
            steps.append((rank, listed[c], pairs))
            if not states[0].any():  # the lowest number means that no matrix is left
                return _followed(problem, steps), True
    return None, True


def _followed(problem: Problem, steps: Sequence[tuple[int, Ints, Ints]]) -> Counts:
    counts, at = np.zeros((problem.world, len(problem.shapes)), np.int64), 0
    for rank, rows, pairs in reversed(steps):
        at, taken = divmod(int(pairs[at]), len(rows))
        counts[rank] = rows[taken]
    spread(problem, counts)
    return counts


def shared_out(
    problem: Problem, listed: Sequence[Ints], time_limit_s: float, *, whole: bool
) -> tuple[float, npt.NDArray[np.float64]] | None:
    """Solve the linear program over patterns with HiGHS. Return (the multiple of the existing
    owners that it needs, the value of a matrix of each shape). With ``whole``, the existing owners
    use each pattern a whole number of times: (1, how often each is used). None if no solution is
    found. One thread and a limit of nodes, so that equal input gives an equal answer."""
    import pulp

    taken = np.concatenate(listed)
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    kind = pulp.LpInteger if whole else pulp.LpContinuous
    used = [model.add_variable(f"x{i:06d}", 0, None, kind) for i in range(len(taken))]
    times = model.add_variable("times", 1 if whole else 0, 1 if whole else None)
    model += pulp.LpAffineExpression([(times, 1.0)])
    rows = []
    for s, count in enumerate(problem.demand.tolist()):
        at = np.flatnonzero(taken[:, s]).tolist()
        supply = pulp.LpAffineExpression([(used[i], float(taken[i, s])) for i in at])
        model += supply >= float(count), f"shape{s:06d}"
        rows.append(model.get_constraint_by_name(f"shape{s:06d}"))
    first = 0
    for c, mine in enumerate(listed):
        owners = [(used[i], 1.0) for i in range(first, first + len(mine))]
        first += len(mine)
        owners.append((times, -float(problem.classes[c].size)))
        model += pulp.LpAffineExpression(owners) <= 0.0, f"class{c:06d}"
    nodes = {"mip_max_nodes": _NODES} if whole else {}
    try:
        model.solve(pulp.HiGHS(msg=False, mip=whole, timeLimit=time_limit_s, threads=1, **nodes))
    except KeyError:
        # PuLP has no name for HiGHS's status at its limit of nodes. A solution would have ended the
        # search, because any solution is as good as another.
        return None
    except Exception as error:  # a solver may raise anything; planning must go on
        raise EngineError(f"HiGHS failed: {type(error).__name__}: {error}") from error
    solved = (pulp.LpSolutionOptimal, *([pulp.LpSolutionIntegerFeasible] if whole else []))
    if model.sol_status not in solved:
        return None
    found = [times.varValue, *([v.varValue for v in used] if whole else [r.pi for r in rows])]
    answer = np.array([np.nan if value is None else value for value in found], float)
    if not np.isfinite(answer).all() or np.abs(answer).max() > 1e15:
        raise EngineError("HiGHS gave values that are no numbers")
    return float(answer[0]), answer[1:]


def counts_of(problem: Problem, listed: Sequence[Ints], used: npt.NDArray[np.float64]) -> Counts:
    """Return the counts of owners that use patterns this often; they may turn out infeasible."""
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    first = 0
    for owner, rows in zip(problem.classes, listed, strict=True):
        times = np.clip(np.rint(used[first : first + len(rows)]), 0, owner.size).astype(np.int64)
        first += len(rows)
        mine = np.repeat(rows, times, axis=0)[: owner.size]
        counts[[*owner.ranks[: len(mine)]]] = mine
    spread(problem, counts)
    return counts


def spread(problem: Problem, counts: Counts) -> None:
    """Remove surplus matrices, each from the rank that gains most by it."""
    loads = problem.loads(np.minimum(counts, problem.demand))
    for s, shape in enumerate(problem.shapes):
        for _ in range(int(counts[:, s].sum()) - shape.count):
            has = np.flatnonzero(counts[:, s])
            k = np.minimum(counts[has, s], shape.count)
            change = shape.ticks[k - 1] - shape.ticks[k]
            # Prefer the largest drop of a load. A removal may also add time: costs need not grow.
            best = np.lexsort((has, -loads[has], change))[0]
            loads[has[best]] += change[best]
            counts[has[best], s] -= 1
