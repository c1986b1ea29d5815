"""The assignment problem behind a plan, in integers: shapes, classes of owners and their limits;
and the simplest solvers, which need no library.

Costs are whole ticks (picoseconds, or coarser if a model takes hours), so that sums are exact and a
proof needs no tolerance.

::

    shapes     s = 0 .. S-1    d_s equal matrices, C_s(k) ticks for k of them on one owner
    classes    c = 0 .. I-1    n_c interchangeable owners: fixed ticks, free bytes, allowed shapes
    forced                     matrices that only one rank may own: part of its fixed ticks
    counts     x[rank, s]      how many of each shape a rank takes; a solver decides it
    load       fixed_c + sum_s C_s(x[rank, s])          makespan = the largest load
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.specs import MatrixSpec, OwnerLimits, ShapeKey
from dmuon.types import Layout, SizeError, grouped

Ints = npt.NDArray[np.int64]
Counts = Ints  # [ranks, shapes]

_FINEST = 10**9  # ticks per millisecond
_LARGEST_TOTAL = 10**15  # ticks of all matrices one by one; leaves room for products in 64 bits
UNLIMITED = 1 << 62  # bytes
_MOST_MS = 1e15  # 30,000 years
_MOST_SPLITS = 4_000_000_000
_MOST_TABLE = 100_000_000


@lru_cache(maxsize=4096)
def cheapest(price: tuple[int, ...], count: int) -> tuple[Ints, Ints]:
    """Return ``C(k)`` for k = 0 .. count, and the first batch of a cheapest split of k.

    ``price[b - 1]`` is the cost of one batch of b. It is neither concave nor monotone in general,
    so every size is tried. Ties go to the smaller batch, which takes less memory and lets more
    travel meanwhile. Results are cached: hundreds of experts have equal prices and counts."""
    prices = np.array(price, np.int64)
    best, first = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for k in range(1, count + 1):
        most = min(k, len(price))
        ticks = best[k - most : k][::-1] + prices[:most]
        at = int(ticks.argmin())
        best[k], first[k] = ticks[at], at + 1
    best.setflags(write=False)
    return best, first


@dataclass(frozen=True)
class Shape:
    """``count`` interchangeable matrices, all of one shape, dtype and domain.

    ``batch_ticks[b - 1]`` is the cost of one batch of b. ``domain`` is an index into
    `OwnerLimits.domains`, or -1 for every rank. ``nbytes`` is the optimizer state that one matrix
    puts on its owner. ``members`` are the indices of the matrices."""

    key: ShapeKey
    domain: int
    count: int
    nbytes: int
    batch_ticks: tuple[int, ...]
    members: tuple[int, ...] = ()

    @cached_property
    def ticks(self) -> Ints:
        """``C(k)``: ticks of the cheapest split of k matrices into batches, k = 0 .. count."""
        return cheapest(self.batch_ticks, self.count)[0]

    def batches(self, k: int) -> tuple[int, ...]:
        """Return the batch sizes of a cheapest split of k matrices, largest first."""
        sizes, first = [], cheapest(self.batch_ticks, self.count)[1]
        while k:
            sizes.append(int(first[k]))
            k -= sizes[-1]
        return tuple(sorted(sizes, reverse=True))


@dataclass(frozen=True, slots=True)
class OwnerClass:
    """Interchangeable ranks. ``fixed`` is the load of forced matrices and of copies, in ticks,
    ``room`` the bytes that each may store of other matrices' state. ``room`` is negative, and no
    counts are feasible, if fixed bytes alone exceed the memory cap."""

    ranks: tuple[int, ...]
    fixed: int  # ticks
    room: int
    allowed: tuple[bool, ...]  # by shape

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Problem:
    """See the module's docstring. ``forced`` has (rank, shape) for each domain of one rank."""

    shapes: tuple[Shape, ...]
    classes: tuple[OwnerClass, ...]
    ticks_per_ms: int = _FINEST
    memory_cap: int | None = None  # bytes
    forced: tuple[tuple[int, Shape], ...] = ()

    def ms(self, ticks: int) -> float:
        return int(ticks) / self.ticks_per_ms

    def ticks(self, ms: float) -> int:
        return round(ms * self.ticks_per_ms)

    @cached_property
    def world(self) -> int:
        return sum(c.size for c in self.classes)

    @cached_property
    def demand(self) -> Ints:
        return np.array([shape.count for shape in self.shapes], np.int64)

    @cached_property
    def nbytes(self) -> Ints:
        return np.array([shape.nbytes for shape in self.shapes], np.int64)

    @cached_property
    def class_of(self) -> Ints:
        number = {rank: n for n, c in enumerate(self.classes) for rank in c.ranks}
        return np.array([number[rank] for rank in range(self.world)], np.int64)

    @cached_property
    def fixed(self) -> Ints:
        """The fixed load of each rank in ticks."""
        return np.array([c.fixed for c in self.classes], np.int64)[self.class_of]

    @cached_property
    def room(self) -> Ints:
        return np.array([c.room for c in self.classes], np.int64)[self.class_of]

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether a rank may own matrices of a shape, [ranks, shapes]."""
        return np.array([c.allowed for c in self.classes], np.bool_)[self.class_of]

    def loads(self, counts: Counts) -> Ints:
        return self.fixed + sum(k.ticks[counts[:, s]] for s, k in enumerate(self.shapes))

    def makespan(self, counts: Counts) -> int:
        return int(self.loads(counts).max())

    def is_feasible(self, counts: Counts) -> bool:
        """Return whether each matrix has one allowed owner, within the memory cap."""
        return bool(
            (counts >= 0).all()
            and (counts.sum(0) == self.demand).all()
            and not (counts[~self.allowed] > 0).any()
            and (counts @ self.nbytes <= self.room).all()
        )


def build_problem(
    matrices: Sequence[MatrixSpec],
    world: int,
    limits: OwnerLimits,
    prices: Mapping[ShapeKey, Sequence[float]],
    layout: Layout = Layout.REDUCED,
    *,
    without: Collection[int] = (),
    busy: Sequence[int] | Ints = (),
) -> Problem:
    """Build the problem of a model on ``world`` ranks; permuting matrices changes only ``members``.

    ``prices`` are the milliseconds of batches of 1, 2, ... matrices of each shape. Matrices that
    only one rank may own form no shapes, because these would make each rank a class of its own.
    ``without``: matrices with copies, which keep each rank ``busy`` for so many ticks.
    PlanError if ``limits`` do not fit, SizeError if the problem is too large to work on."""
    limits.check(len(matrices), world)
    total = math.fsum(prices[matrix.key][0] for matrix in matrices)
    most = max((total, *(ms for row in prices.values() for ms in row)))
    scale = _FINEST
    while scale > 1 and most * scale > _LARGEST_TOTAL:
        scale //= 10
    batch_ticks = {key: tuple(round(ms * scale) for ms in row) for key, row in prices.items()}
    groups = _groups(matrices, limits, batch_ticks, frozenset(without))
    splits = sum(len(mine) * min(len(batch_ticks[key]), len(mine)) for key, _, mine in groups)
    domains = [domain for _, domain, _ in groups if domain < 0 or len(limits.domains[domain]) > 1]
    for what, found, at_most in (
        ("milliseconds of all matrices", most, _MOST_MS),
        ("matrices x batch sizes", splits, _MOST_SPLITS),
        ("shapes in domains x ranks",
         len(domains) * (world if len(set(domains)) > 1 else 1), _MOST_TABLE),
    ):  # fmt: skip
        if found > at_most:
            raise SizeError(
                f"too large to plan or to verify: {found:,} {what}, expected at most {at_most:,}"
            )
    shapes, forced = [], []
    for key, domain, mine in groups:
        # State may differ between param groups; the largest keeps a plan within the cap.
        nbytes = max(limits.state_bytes(i, matrices[i], layout) for i in mine)
        shape = Shape(key, domain, len(mine), nbytes, batch_ticks[key], mine)
        if domain >= 0 and len(limits.domains[domain]) == 1:
            forced.append((limits.domains[domain][0], shape))
        else:
            shapes.append(shape)
    classes = _classes(shapes, forced, world, limits, busy)
    return Problem(tuple(shapes), classes, scale, limits.memory_bytes, tuple(forced))


def _groups(
    matrices: Sequence[MatrixSpec],
    limits: OwnerLimits,
    batch_ticks: Mapping[ShapeKey, tuple[int, ...]],
    without: Collection[int],
) -> list[tuple[ShapeKey, int, tuple[int, ...]]]:
    """Return (shape, domain, matrices), the costliest first. Equal shapes are ordered by their
    domains' ranks (not by numbers, which depend on the order of discovery), then by a name."""
    domain_of = limits.domain_of or (-1,) * len(matrices)
    dealt_out = (i for i in range(len(matrices)) if i not in without)
    members = grouped(((matrices[i].key, domain_of[i]), i) for i in dealt_out)
    ranks = {-1: ()} | {i: tuple(sorted(domain)) for i, domain in enumerate(limits.domains)}
    name = {group: min(matrices[i].name for i in mine) for group, mine in members.items()}
    order = sorted(members, key=lambda kp: (-batch_ticks[kp[0]][0], kp[0], ranks[kp[1]], name[kp]))
    return [(key, domain, tuple(members[key, domain])) for key, domain in order]


def _classes(
    shapes: Sequence[Shape], forced: Sequence[tuple[int, Shape]], world: int, limits: OwnerLimits,
    busy: Sequence[int] | Ints,
) -> tuple[OwnerClass, ...]:  # fmt: skip
    """Group ranks with equal fixed load, room and domains, in the order of their first rank."""
    fixed = [*map(int, busy)] if len(busy) else [0] * world
    stored = [limits.fixed_bytes_of(rank) for rank in range(world)]
    for rank, shape in forced:
        fixed[rank] += int(shape.ticks[-1])
        stored[rank] += shape.nbytes * shape.count
    inside: list[list[int]] = [[-1] for _ in range(world)]
    for domain in sorted({shape.domain for shape in shapes} - {-1}):
        for rank in limits.domains[domain]:
            inside[rank].append(domain)
    weightless = not any(shape.nbytes for shape in shapes)
    ranks: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank in range(world):
        room = UNLIMITED
        if limits.memory_bytes is not None:
            room = min(limits.memory_bytes - stored[rank], UNLIMITED)
        if weightless and room >= 0:
            room = UNLIMITED  # everything fits, so ranks need not differ
        ranks[fixed[rank], room, tuple(inside[rank])].append(rank)
    # There are few sets of domains, but many ranks.
    allowed = {mine: tuple(shape.domain in mine for shape in shapes) for _, _, mine in ranks}
    return tuple(
        OwnerClass(tuple(members), fixed, room, allowed[mine])
        for (fixed, room, mine), members in ranks.items()
    )


# ---- without a solver: longest processing time, local search, round robin -----------------

_MOST_MOVES = 4000  # in one local search: a work limit, so that equal input gives equal plans
_MOST_EXCHANGES = 150_000_000  # exchanges examined
_LOOK_INTO = 64  # ranks whose matrices are considered for a swap
_STRIDES = (1, 2, 3, 4, 8, 16)  # how many matrices of a shape one move takes
_AMOUNTS = 300  # (shape, number) pairs that one exchange tries, the costliest shapes first
_REPRESENTATIVES = 256
_CHUNKS = (1, 2, 4, 8, 16)


def longest_first(
    problem: Problem,
    chunk: int = 1,
    tables: Sequence[Ints] | None = None,
    start: Ints | None = None,
) -> Counts | None:
    """Assign the costliest shape first, each ``chunk`` of matrices to the owner whose load stays
    lowest; ties go to the lower rank. None if the memory cap leaves no owner. ``tables[s][k]`` is
    the load of k matrices of shape s (default: batched), ``start`` the initial loads (fixed)."""
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
    """Assign matrices in ``order`` to ranks 0, 1, 2, ... that may own them, whatever they cost: the
    baseline. A matrix that only one rank may own takes no turn. None if the cap forbids it."""
    shape_of = {i: s for s, shape in enumerate(problem.shapes) for i in shape.members}
    may_own = [np.flatnonzero(problem.allowed[:, s]).tolist() for s in range(len(problem.shapes))]
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    room = problem.room.tolist()
    turn = 0
    for s in (shape_of[i] for i in order if i in shape_of):
        nbytes, at = problem.shapes[s].nbytes, bisect_left(may_own[s], turn)
        rank = next((r for r in may_own[s][at:] + may_own[s][:at] if room[r] >= nbytes), None)
        if rank is None:
            return None
        counts[rank, s] += 1
        room[rank] -= nbytes
        turn = (rank + 1) % problem.world
    return counts if problem.is_feasible(counts) else None  # an idle rank may exceed the cap


def greedy(
    problem: Problem, starts: Sequence[Counts], spent: Callable[[], bool] = lambda: False
) -> Counts | None:
    """Return the best of several longest-first runs and ``starts``, improved; None if none fits."""
    largest = max((len(shape.batch_ticks) for shape in problem.shapes), default=1)
    found = [*starts, *(longest_first(problem, b) for b in _CHUNKS if b <= largest)]
    if problem.memory_cap is not None:
        # For a tight cap: balance the bytes that owners store.
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
    """Return counts of "greedy" and "round_robin", if found; ``order`` is for `round_robin`."""
    turns = round_robin(problem, order)
    starts = [] if turns is None else [turns]
    found = {"greedy": greedy(problem, starts, spent), "round_robin": turns}
    return {name: counts for name, counts in found.items() if counts is not None}


def improve(problem: Problem, counts: Counts, spent: Callable[[], bool] = lambda: False) -> Counts:
    """Improve counts by local search: lower the load of the busiest rank by moving or swapping a
    few matrices, as long as that works. The makespan never rises; caps and allowed owners hold."""
    state = _State(problem, counts)
    for _ in range(_MOST_MOVES):
        if state.work <= 0 or spent():
            break
        if not state.exchange(int(state.loads.argmax())):
            break
    return state.counts


class _State:
    def __init__(self, problem: Problem, counts: Counts) -> None:
        self.problem, self.work = problem, _MOST_EXCHANGES
        self.counts: Counts = counts.copy()
        self.loads = problem.loads(counts)
        self.free = problem.room - counts @ problem.nbytes
        self._weights = np.random.default_rng(0).integers(1, 1 << 40, len(problem.shapes) + 1)

    def exchange(self, b: int) -> bool:
        """Give another rank matrices of one shape, and maybe take some of another shape, so that
        the larger of the two loads is lowest. False if that is not below ``b``'s load now."""
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
        for rank, sign in ((b, 1), (int(others[at]), -1)):
            for s, j in (gives[g], takes[t]):
                self.counts[rank, s] += sign * j
            taken = zip(self.problem.shapes, self.counts[rank].tolist(), strict=True)
            ticks = sum(int(shape.ticks[k]) for shape, k in taken if k)
            self.loads[rank] = self.problem.fixed[rank] + ticks
            self.free[rank] = self.problem.room[rank] - self.counts[rank] @ self.problem.nbytes
        return True

    def _changes(
        self, changes: Sequence[tuple[int, int]], ranks: Ints
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the ticks that each change adds, and whether it is possible; [changes, ranks]."""
        ticks = np.zeros((len(changes), len(ranks)), np.int64)
        possible = np.ones(ticks.shape, np.bool_)
        counts, allowed = self.counts[ranks].T.copy(), self.problem.allowed[ranks].T
        for i, (s, j) in enumerate(changes):
            table, has = self.problem.shapes[s].ticks, counts[s]
            ticks[i] = table.take(has + j, mode="clip") - table[has]
            possible[i] = has + j >= 0 if j <= 0 else allowed[s]
        return ticks, possible

    def _representatives(self, b: int) -> Ints:
        """Return ranks less loaded than ``b``, no two of them alike, the least loaded first."""
        rows = np.column_stack((self.problem.class_of, self.counts))
        _, first = np.unique(rows @ self._weights, return_index=True)
        first = first[self.loads[first] < self.loads[b]]
        chosen: Ints = first[np.argsort(self.loads[first], kind="stable")[:_REPRESENTATIVES]]
        return chosen

    def _amounts(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (shape, number) pairs that at least one of ``ranks`` could give away."""
        most = self.counts[list(ranks)].max(0)
        there = ((s, int(most[s])) for s in np.flatnonzero(most).tolist())
        return [(s, j) for s, k in there for j in sorted({*_STRIDES, k}) if j <= k][:_AMOUNTS]
