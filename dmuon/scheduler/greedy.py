"""Owner assignment without a solver: longest processing time, local search, round robin.

All of them decide counts (see `problem`): how many matrices of each shape a rank takes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.problem import Counts, Ints, Option, Problem, frontier

_MOST_MOVES = 4000  # of one local search: a work limit, so that equal input gives equal plans
_MOST_WORK = 150_000_000  # exchanges looked at
_MOST_SPLITS = 48  # pairs of ranks whose matrices are shared out anew
_SPLIT_POINTS = 500
_SPLIT_WORK = 2_000_000  # pairs formed by the knapsack of one split
_LOOK_INTO = 64  # ranks whose matrices are considered for a swap
_STRIDES = (1, 2, 3, 4, 8, 16)  # how many matrices of a shape one move takes along
_AMOUNTS = 300  # of shapes that are tried in one exchange, the costliest shapes first
_REPRESENTATIVES = 256
_CHUNKS = (1, 2, 4, 8, 16)
_NEVER = np.iinfo(np.int64).max // 64


def longest_first(
    problem: Problem,
    chunk: int = 1,
    tables: Sequence[Ints] | None = None,
    start: Ints | None = None,
) -> Counts | None:
    """The costliest shape first, each ``chunk`` of matrices to the owner whose load stays lowest;
    ties go to the lower rank. None if the memory cap leaves no owner. ``tables[s][k]`` is the load
    of k matrices of shape s (default: with batching), ``start`` of each rank before (fixed)."""
    if tables is None:
        tables = [shape.ticks for shape in problem.shapes]
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    loads = (problem.fixed if start is None else start).tolist()
    room = problem.room.tolist()
    for s in sorted(range(len(tables)), key=lambda s: (-int(tables[s][1]), s)):
        shape, table = problem.shapes[s], tables[s].tolist()
        taken = [0] * problem.world
        ranks = np.flatnonzero(problem.allowed[:, s])
        heap = [(loads[r] + table[min(chunk, shape.count)], r) for r in ranks.tolist()]
        heapq.heapify(heap)
        left = shape.count
        while left:
            if not heap:
                return None
            _, r = heapq.heappop(heap)
            size = min(chunk, left, room[r] // shape.nbytes if shape.nbytes else left)
            if size <= 0:
                continue  # full: this rank takes no more of this shape
            loads[r] += table[taken[r] + size] - table[taken[r]]
            room[r] -= size * shape.nbytes
            taken[r] += size
            left -= size
            after = table[min(taken[r] + min(chunk, max(left, 1)), shape.count)]
            heapq.heappush(heap, (loads[r] + after - table[taken[r]], r))
        counts[:, s] = taken
    return counts


def round_robin(problem: Problem, order: Sequence[int]) -> Counts | None:
    """Matrices in ``order`` to ranks 0, 1, 2, ... that may own them, whatever they cost: the
    baseline. One that a single rank may own takes no turn. None if the memory cap is in the way."""
    shape_of = {i: s for s, shape in enumerate(problem.shapes) for i in shape.members}
    may_own = [np.flatnonzero(problem.allowed[:, s]).tolist() for s in range(len(problem.shapes))]
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    room = problem.room.tolist()
    turn = 0
    for s in (shape_of[i] for i in order if i in shape_of):
        nbytes, at = problem.shapes[s].nbytes, bisect_left(may_own[s], turn)
        in_turn = chain(may_own[s][at:], may_own[s][:at])
        rank = next((r for r in in_turn if room[r] >= nbytes), None)
        if rank is None:
            return None
        counts[rank, s] += 1
        room[rank] -= nbytes
        turn = (rank + 1) % problem.world
    return counts if problem.is_feasible(counts) else None  # a rank without any may be over the cap


def greedy(
    problem: Problem, starts: Sequence[Counts], spent: Callable[[], bool] = lambda: False
) -> Counts | None:
    """The best of several longest-first runs and of ``starts``, improved; None if none fits."""
    largest = max((len(shape.batch_ticks) for shape in problem.shapes), default=1)
    found = [*starts, *(longest_first(problem, b) for b in _CHUNKS if b <= largest)]
    if problem.memory_cap is not None:
        # Where the cap is tight: balance what owners store.
        free = np.minimum(problem.room, 1 << 50)
        stored = [np.arange(shape.count + 1) * shape.nbytes for shape in problem.shapes]
        found.append(longest_first(problem, 1, stored, free.max() - free))
    fitting = [c for c in found if c is not None and problem.is_feasible(c)]
    ranked = sorted(fitting, key=problem.makespan)
    improved = [improve(problem, counts, spent) for counts in ranked[:2]]
    return min(improved, key=problem.makespan, default=None)


def baselines(
    problem: Problem, order: Sequence[int], spent: Callable[[], bool] = lambda: False
) -> dict[str, Counts]:
    """The counts of "greedy" and "round_robin", if they find any; ``order`` as in `round_robin`."""
    turns = round_robin(problem, order)
    starts = [] if turns is None else [turns]
    found = {"greedy": greedy(problem, starts, spent), "round_robin": turns}
    return {name: counts for name, counts in found.items() if counts is not None}


def improve(problem: Problem, counts: Counts, spent: Callable[[], bool] = lambda: False) -> Counts:
    """Local search: lower the load of the busiest rank while that is possible, by moving or
    swapping a few matrices, else by sharing out anew all that it and one other rank have. The
    makespan never rises. Memory caps and allowed owners are kept."""
    state = _State(problem, counts)
    for _ in range(_MOST_MOVES):
        if state.work <= 0 or spent():
            break
        busiest = int(state.loads.argmax())
        if not (state.exchange(busiest) or state.share_anew(busiest)):
            break
    return state.counts


class _State:
    def __init__(self, problem: Problem, counts: Counts) -> None:
        self.problem, self.work, self.splits = problem, _MOST_WORK, _MOST_SPLITS
        self.counts: Counts = counts.copy()
        self.loads = problem.loads(counts)
        self.free = problem.room - counts @ problem.nbytes
        self._weights = np.random.default_rng(0).integers(1, 1 << 40, len(problem.shapes) + 1)

    def exchange(self, b: int) -> bool:
        """Give another rank some matrices of one shape, and maybe take some of another, where that
        leaves the larger of the two loads lowest, and below that of rank ``b`` now."""
        others = self._representatives(b)
        gives = [(s, -j) for s, j in self._amounts([b])]
        if not len(others) or not gives:
            return False
        takes = [(0, 0), *self._amounts(others[:_LOOK_INTO].tolist())]
        self.work -= len(gives) * len(takes) * len(others)
        both = gives, takes
        mine, mine_fits = zip(*(self._changes(some, np.array([b])) for some in both))
        reverse = ([(s, -j) for s, j in some] for some in both)
        theirs, theirs_fit = zip(*(self._changes(some, others) for some in reverse))
        moved = [np.array([j * self.problem.nbytes[s] for s, j in some]) for some in both]
        # [gives, takes, others]
        total = (moved[0][:, None] + moved[1][None, :])[:, :, None]
        own = self.loads[b] + mine[0][:, None] + mine[1][None, :]
        fits = theirs_fit[0][:, None] & theirs_fit[1][None, :]
        fits &= mine_fits[0][:, None] & mine_fits[1][None, :] & (own < self.loads[b])
        fits &= (total <= self.free[b]) & (-total <= self.free[others])
        fits &= np.array([[s != t or not j for t, j in takes] for s, _ in gives])[:, :, None]
        after = np.maximum(own, self.loads[others] + theirs[0][:, None] + theirs[1][None, :])
        after[~fits] = np.iinfo(np.int64).max
        g, t, at = np.unravel_index(int(after.argmin()), after.shape)
        if after[g, t, at] >= self.loads[b]:
            return False
        gained = np.zeros_like(self.counts[b])
        for s, j in (gives[g], takes[t]):
            gained[s] += j
        self._give(int(others[at]), b, gained)
        return True

    def _changes(
        self, changes: Sequence[tuple[int, int]], ranks: Ints
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """[changes, ranks]: the ticks of so many more or fewer of a shape; which are possible."""
        ticks = np.zeros((len(changes), len(ranks)), np.int64)
        possible = np.ones(ticks.shape, np.bool_)
        counts, allowed = self.counts[ranks].T.copy(), self.problem.allowed[ranks].T
        for i, (s, j) in enumerate(changes):
            table, has = self.problem.shapes[s].ticks, counts[s]
            ticks[i] = table.take(has + j, mode="clip") - table[has]
            possible[i] = has + j >= 0 if j <= 0 else allowed[s]
        return ticks, possible

    def _representatives(self, b: int) -> Ints:
        """Some ranks that are not alike, the least loaded first."""
        rows = np.column_stack((self.problem.class_of, self.counts))
        _, first = np.unique(rows @ self._weights, return_index=True)
        first = first[self.loads[first] < self.loads[b]]
        chosen: Ints = first[np.argsort(self.loads[first], kind="stable")[:_REPRESENTATIVES]]
        return chosen

    def _amounts(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """(shape, how many) that some of ``ranks`` could part with."""
        most = self.counts[list(ranks)].max(0)
        there = ((s, int(most[s])) for s in np.flatnonzero(most).tolist())
        return [(s, j) for s, k in there for j in sorted({*_STRIDES, k}) if j <= k][:_AMOUNTS]

    def share_anew(self, b: int) -> bool:
        """Split what rank ``b`` and another one have between the two, as evenly as can be: a
        knapsack, in which the value of k matrices with ``b`` is what the other then saves."""
        problem, most = self.problem, int(self.loads[b]) - 1
        for o in self._representatives(b)[: self.splits].tolist():
            self.splits -= 1
            both, options = self.counts[b] + self.counts[o], []
            there = np.flatnonzero(both)
            for s in there.tolist():
                cost = problem.shapes[s].ticks[: both[s] + 1].copy()
                saved = cost[-1] - cost[::-1]
                if not problem.allowed[b, s]:
                    cost[1:] = _NEVER
                if not problem.allowed[o, s]:
                    saved[:-1] = -_NEVER  # it may keep none of it
                options.append(Option(cost, saved))
            mine, everything = int(problem.fixed[b]), int(problem.fixed[o])
            everything += sum(int(option.value[-1]) for option in options)
            found = frontier(
                options, most - mine, bounding=False, least=everything - most,
                max_points=_SPLIT_POINTS, max_work=_SPLIT_WORK,
            )  # fmt: skip
            self.work -= found.work
            after = np.maximum(mine + found.cost, everything - found.value)
            for at in np.argsort(after, kind="stable")[:8].tolist():
                gained = -self.counts[b]
                gained[there] += found.choice(int(found.cost[at]))
                nbytes = int(gained @ problem.nbytes)
                if nbytes <= self.free[b] and -nbytes <= self.free[o]:
                    self._give(o, b, gained)
                    return True
        return False

    def _give(self, giver: int, taker: int, counts: Ints) -> None:
        problem = self.problem
        for rank, more in ((taker, counts), (giver, -counts)):
            self.counts[rank] += more
            taken = zip(problem.shapes, self.counts[rank].tolist(), strict=True)
            ticks = sum(int(shape.ticks[k]) for shape, k in taken if k)
            self.loads[rank] = problem.fixed[rank] + ticks
            self.free[rank] -= more @ problem.nbytes
