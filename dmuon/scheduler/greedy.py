"""Owner assignment without a solver: longest processing time, local search, round robin.

All of them decide counts (see `problem`): how many matrices of each kind a rank takes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.knapsack import Option, frontier
from dmuon.scheduler.problem import Counts, Kind, Problem

__all__ = ["greedy", "improve", "longest_first", "longest_first_by_weight", "round_robin"]

Ints = npt.NDArray[np.int64]

_MOST_MOVES = 4000  # of one local search: a work limit, so that equal input gives equal plans
_MOST_WORK = 150_000_000  # exchanges looked at
_MOST_SPLITS = 48  # pairs of ranks whose matrices are shared out anew
_SPLIT_WITH = 64  # ranks tried at a time
_SPLIT_POINTS = 500
_LOOK_INTO = 64  # ranks whose matrices are considered for a swap
_STRIDES = (1, 2, 3, 4, 8, 16)  # how many matrices of a kind one move takes along


def longest_first(problem: Problem, chunk: int = 1) -> Counts | None:
    """The costliest kind first, each matrix to the owner whose load stays lowest with it.

    The load counts the marginal batched cost. With ``chunk`` > 1 that many matrices go together,
    so that they are batched. Ties go to the lower rank. None if the memory cap leaves no owner.
    """
    return _one_by_one(problem, problem.fixed, [kind.ticks for kind in problem.kinds], chunk)


def longest_first_by_weight(problem: Problem, weights: Sequence[int]) -> Counts | None:
    """Longest first on a fixed weight a matrix, by kind; batching is not seen.

    With the number of elements or the cost of a single matrix as the weight these are the usual
    baselines.
    """
    nothing = np.zeros(problem.world, np.int64)
    tables = [_linear(kind, weight) for kind, weight in zip(problem.kinds, weights, strict=True)]
    return _one_by_one(problem, nothing, tables, 1)


def least_memory_first(problem: Problem) -> Counts | None:
    """Balance what owners store: the start where the memory cap is tight."""
    free = [min(int(room), 1 << 50) for room in problem.room]
    start = np.array([max(free) - room for room in free], np.int64)
    tables = [_linear(kind, kind.nbytes) for kind in problem.kinds]
    return _one_by_one(problem, start, tables, 1)


def _linear(kind: Kind, weight: int) -> Ints:
    return np.arange(kind.count + 1, dtype=np.int64) * weight


def _one_by_one(problem: Problem, start: Ints, tables: Sequence[Ints], chunk: int) -> Counts | None:
    """``tables[s][k]`` is the load of k matrices of kind s; ``start`` what ranks have already."""
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    loads = [int(v) for v in start]
    room = [int(v) for v in problem.room]
    for s in sorted(range(len(tables)), key=lambda s: (-int(tables[s][1]), s)):
        kind, table = problem.kinds[s], [int(v) for v in tables[s]]
        taken = [0] * problem.world
        ranks = np.flatnonzero(problem.allowed[:, s])
        heap = [(loads[r] + table[min(chunk, kind.count)], r) for r in ranks.tolist()]
        heapq.heapify(heap)
        left = kind.count
        while left:
            if not heap:
                return None
            _, r = heapq.heappop(heap)
            size = min(chunk, left, room[r] // kind.nbytes if kind.nbytes else left)
            if size <= 0:
                continue  # full: this rank takes no more of this kind
            loads[r] += table[taken[r] + size] - table[taken[r]]
            room[r] -= size * kind.nbytes
            taken[r] += size
            left -= size
            after = table[min(taken[r] + min(chunk, max(left, 1)), kind.count)]
            heapq.heappush(heap, (loads[r] + after - table[taken[r]], r))
        counts[:, s] = taken
    return counts


def round_robin(problem: Problem, order: Sequence[int]) -> Counts | None:
    """Matrices in turn to ranks 0, 1, 2, ..., whatever they cost: the baseline.

    ``order`` lists the matrices; one that a single rank may own takes no turn. A rank that may not
    own a matrix is passed over; None if the memory cap is in the way.
    """
    kind_of = {i: s for s, members in enumerate(problem.members) for i in members}
    may_own = [np.flatnonzero(problem.allowed[:, s]).tolist() for s in range(len(problem.kinds))]
    counts = np.zeros((problem.world, len(problem.kinds)), np.int64)
    room = problem.room.tolist()
    turn = 0
    for s in (kind_of[i] for i in order if i in kind_of):
        nbytes, at = problem.kinds[s].nbytes, bisect_left(may_own[s], turn)
        in_turn = chain(may_own[s][at:], may_own[s][:at])
        rank = next((r for r in in_turn if room[r] >= nbytes), None)
        if rank is None:
            return None
        counts[rank, s] += 1
        room[rank] -= nbytes
        turn = (rank + 1) % problem.world
    return counts


def greedy(
    problem: Problem, starts: Sequence[Counts], spent: Callable[[], bool] = lambda: False
) -> Counts | None:
    """The best of several longest-first runs and of ``starts``, improved; None if none fits."""
    sizes = [1] + [b for b in (2, 4, 8, 16) if any(len(k.batch_ticks) >= b for k in problem.kinds)]
    found = [*starts, *(longest_first(problem, b) for b in sizes), least_memory_first(problem)]
    fitting = [c for c in found if c is not None and problem.is_feasible(c)]
    if not fitting:
        return None
    ranked = sorted(fitting, key=problem.makespan)
    improved = [improve(problem, counts, spent) for counts in ranked[:2]]
    return min(improved, key=problem.makespan)


# ---- local search ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The busiest rank gives ``give`` of kind s to ``rank`` for ``take`` of kind t (-1: none)."""

    rank: int
    s: int
    give: int
    t: int = -1
    take: int = 0


def improve(problem: Problem, counts: Counts, spent: Callable[[], bool] = lambda: False) -> Counts:
    """Lower the busiest rank's load, again and again, until nothing does.

    First by moving or swapping a few matrices; where that fails, by sharing out anew all that it
    and one other rank have. The makespan never rises. Memory caps and allowed owners are kept.
    """
    state = _State(problem, counts)
    splits = _MOST_SPLITS
    for _ in range(_MOST_MOVES):
        if state.work <= 0 or spent():
            break
        busiest = int(state.loads.argmax())
        exchange = state.best_exchange(busiest)
        if exchange is not None:
            state.apply(busiest, exchange)
            continue
        tried, done = state.share_anew(busiest, splits)
        splits -= tried
        if not done:
            break
    return state.counts


class _State:
    def __init__(self, problem: Problem, counts: Counts) -> None:
        self.problem = problem
        self.work = _MOST_WORK
        self.counts: Counts = counts.copy()
        self.loads = problem.loads(counts)
        self.free = problem.room - counts @ problem.nbytes
        self._class_of = np.zeros(problem.world, np.int64)
        for c, members in enumerate(problem.classes):
            self._class_of[list(members.ranks)] = c

    def best_exchange(self, b: int) -> _Exchange | None:
        """What lowers the larger of the two loads most, below the load of rank ``b``."""
        others = self._representatives(b)
        if not len(others):
            return None
        gives = self._amounts([b])
        if not gives:
            return None
        may_take = self.problem.allowed[b]
        found = self._amounts(others[:_LOOK_INTO].tolist())
        takes = [(-1, 0), *((s, j) for s, j in found if may_take[s])]
        lost, gained, given, they_take = self._changes(gives, b, others)
        back, away, taken, they_give = self._changes(takes, b, others, sign=-1)
        # [gives, takes, others]
        self.work -= len(gives) * len(takes) * len(others)
        mine = self.loads[b] - lost[:, None] + back[None, :]
        theirs = self.loads[others] + gained[:, None, :] - away[None, :, :]
        after = np.maximum(mine[:, :, None], theirs)
        moved = given[:, None] - taken[None, :]
        fits = they_take[:, None, :] & they_give[None, :, :]
        fits &= (mine < self.loads[b])[:, :, None] & (self.free[b] >= -moved)[:, :, None]
        fits &= self.free[others] >= moved[:, :, None]
        for g, (s, _) in enumerate(gives):
            for t, (other, _) in enumerate(takes):
                if s == other:
                    fits[g, t] = False
        after[~fits] = np.iinfo(np.int64).max
        g, t, at = (int(i) for i in np.unravel_index(int(after.argmin()), after.shape))
        if after[g, t, at] >= self.loads[b]:
            return None
        return _Exchange(int(others[at]), *gives[g], *takes[t])

    def _changes(
        self, amounts: Sequence[tuple[int, int]], b: int, others: Ints, sign: int = 1
    ) -> tuple[Ints, Ints, Ints, npt.NDArray[np.bool_]]:
        """What it means for ``b`` to give (sign -1: to take) these amounts to each of ``others``.

        Ticks that the giver loses or ``b`` gains [amounts], ticks of the others [amounts, others],
        bytes [amounts], and whether the others can take part [amounts, others].
        """
        problem, n = self.problem, len(amounts)
        mine, nbytes = np.zeros(n, np.int64), np.zeros(n, np.int64)
        theirs = np.zeros((n, len(others)), np.int64)
        possible = np.ones((n, len(others)), np.bool_)
        for a, (s, j) in enumerate(amounts):
            if s < 0:
                continue
            kind, own, has = problem.kinds[s], int(self.counts[b, s]), self.counts[others, s]
            nbytes[a] = j * kind.nbytes
            if sign > 0:
                mine[a] = kind.ticks[own] - kind.ticks[own - j]
                theirs[a] = kind.ticks[np.minimum(has + j, kind.count)] - kind.ticks[has]
                possible[a] = problem.allowed[others, s]
            else:
                possible[a] = has >= j
                mine[a] = kind.ticks[min(own + j, kind.count)] - kind.ticks[own]
                theirs[a] = kind.ticks[has] - kind.ticks[np.maximum(has - j, 0)]
        return mine, theirs, nbytes, possible

    def _representatives(self, b: int) -> Ints:
        """One rank of each set of ranks that are alike; ranks are many, patterns few."""
        rows = np.column_stack((self._class_of, self.counts))
        weights = np.random.default_rng(0).integers(1, 1 << 40, rows.shape[1])
        _, first = np.unique(rows @ weights, return_index=True)
        first = first[self.loads[first] < self.loads[b]]
        # The least loaded are the ones that can take something; more would cost time for little.
        order = np.argsort(self.loads[first], kind="stable")
        chosen: Ints = first[order[:256]]
        return chosen

    def share_anew(self, b: int, most: int) -> tuple[int, bool]:
        """Split what rank ``b`` and another one have between the two, as evenly as can be.

        Returns how many ranks were tried, and whether one of them lowered the load.
        """
        others = self._representatives(b)[: min(most, _SPLIT_WITH)]
        for tried, o in enumerate(others.tolist(), 1):
            mine = self._even_split(b, o)
            if mine is not None:
                pool = self.counts[b] + self.counts[o]
                for rank, row in ((b, mine), (o, pool - mine)):
                    self.counts[rank] = row
                    self.loads[rank] = self._load(rank, row)
                    self.free[rank] = self.problem.room[rank] - row @ self.problem.nbytes
                return tried, True
        return len(others), False

    def _load(self, rank: int, row: Ints) -> int:
        kinds = self.problem.kinds
        ticks = sum(int(kind.ticks[k]) for kind, k in zip(kinds, row.tolist(), strict=True))
        return ticks + int(self.problem.fixed[rank])

    def _even_split(self, a: int, b: int) -> Ints | None:
        """What rank ``a`` should have of both, if that makes the busier of the two less busy.

        The trade-off between the two loads is a knapsack: the value of k matrices with ``a`` is
        what ``b`` then saves.
        """
        problem, options = self.problem, []
        fixed_a, fixed_b = int(problem.fixed[a]), int(problem.fixed[b])
        pool, most = self.counts[a] + self.counts[b], int(self.loads[a]) - 1
        never = np.iinfo(np.int64).max // 64
        there = np.flatnonzero(pool)
        for s in there.tolist():
            kind, k = problem.kinds[s], np.arange(pool[s] + 1)
            cost, saved = kind.ticks[k].copy(), kind.ticks[pool[s]] - kind.ticks[pool[s] - k]
            if not problem.allowed[a, s]:
                cost[1:] = never
            if not problem.allowed[b, s]:
                saved[:-1] = -never  # ``b`` may keep none of it
            options.append(Option(cost, saved))
        found = frontier(options, most - fixed_a, bounding=False, max_points=_SPLIT_POINTS)
        everything = sum(int(problem.kinds[s].ticks[pool[s]]) for s in there.tolist())
        ours = fixed_a + found.cost
        after = np.maximum(ours, fixed_b + everything - found.value)
        for at in np.argsort(after, kind="stable")[:8].tolist():
            if after[at] > most:
                return None
            mine: Ints = np.zeros_like(pool)
            mine[there] = found.choice(int(found.cost[at]))
            if self._fits(a, mine) and self._fits(b, pool - mine):
                return mine
        return None

    def _fits(self, rank: int, row: Ints) -> bool:
        allowed = not (row[~self.problem.allowed[rank]] > 0).any()
        return allowed and int(row @ self.problem.nbytes) <= int(self.problem.room[rank])

    def _amounts(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """(kind, how many) that some of ``ranks`` could part with."""
        most = self.counts[list(ranks)].max(0).tolist()
        return [(s, j) for s, k in enumerate(most) for j in sorted({*_STRIDES, k}) if 0 < j <= k]

    def _change(self, s: int, by: int, rank: int) -> tuple[int, int]:
        """Ticks and bytes that a rank gains by ``by`` more matrices of kind s."""
        kind, k = self.problem.kinds[s], int(self.counts[rank, s])
        return int(kind.ticks[k + by] - kind.ticks[k]), by * kind.nbytes

    def apply(self, b: int, exchange: _Exchange) -> None:
        for s, by in ((exchange.s, exchange.give), (exchange.t, -exchange.take)):
            if s < 0 or by == 0:
                continue
            for rank, amount in ((b, -by), (exchange.rank, by)):
                ticks, nbytes = self._change(s, amount, rank)
                self.counts[rank, s] += amount
                self.loads[rank] += ticks
                self.free[rank] -= nbytes
