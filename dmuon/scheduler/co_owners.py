"""Matrices that several neighbouring ranks share: which ones, and which ranks.

Where owners outnumber matrices the costliest matrix is the floor of every plan, unless k ranks
share it, a slice of its longer dim each. That adds work, so k is as small as a makespan T allows:
for a given T, the costliest shape first and k in order of work, as many matrices go to each block
of k ranks as T leaves room for, the fullest blocks first, and what is left is tried with the next k
(`CoOwners.fit`). The least T that is found counts; what has one owner is then planned anew, with
the blocks' work as fixed loads. The same numbers bound all ways to share (`CoOwners.bound`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from dmuon.scheduler.costs import CostTable, canonical_key, largest_batch
from dmuon.scheduler.plan import OwnershipPlan, SharedPrice
from dmuon.scheduler.problem import Counts, Ints, Problem, cheapest
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ShapeKey
from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError, grouped

SIZES = (2, 4, 8)
GAIN = 0.05  # of the makespan: what "auto" asks for
_CLOSE = 1000  # in the search, makespans that differ by less than a part of so many are one
_EXACT = 10_000  # the same for bounds
_MOST_STATES = 20_000  # of blocks, where several shapes are counted together
_TOGETHER = 3  # shapes

Block = tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """One way to share: ``parts`` (shape, block, number of matrices), the ticks that they keep each
    rank ``busy``, how many of each shape a rank has ``alone``, and the makespan."""

    parts: tuple[tuple[int, Block, int], ...]
    busy: Ints
    alone: Counts
    makespan: int


def can_be_shared(specs: ModelSpecs, matrix: MatrixSpec) -> bool:
    """True if a slice of the longer dim is a box, unlike of the columns of a convolution."""
    shape = specs.parameters[matrix.parameter].shape
    rows, cols = matrix.form.dims(len(shape))
    long = rows if matrix.rows > matrix.cols else cols
    return matrix.box(shape).shape[long] == max(matrix.shape)


@lru_cache(maxsize=4096)
def blocks_of(ranks: Sequence[int], topology: Topology, size: int) -> list[Block]:
    """Neighbouring ranks in sets of ``size``, each on one node where nodes have so many of them.

    >>> blocks_of(range(6), Topology.flat(6, ranks_per_node=3), 2)
    [(0, 1), (3, 4)]
    """
    nodes = grouped((topology.node(rank), rank) for rank in sorted(ranks))
    inside, across = (
        [tuple(s[i : i + size]) for s in sets for i in range(0, len(s) - size + 1, size)]
        for sets in (nodes.values(), [sorted(ranks)])
    )
    return inside or across


def blocks_in(plan: OwnershipPlan, domain: int, size: int) -> list[Block]:
    """`blocks_of` a domain, or of all ranks where it is -1."""
    ranks = range(plan.topology.world) if domain < 0 else plan.limits.domains[domain]
    return blocks_of(ranks, plan.topology, size)


class CoOwners:
    """The ways to share matrices in a problem. ``sizes`` are the numbers of co-owners that each
    shape may have, the least work first; each shape and size has prices of batches, and blocks."""

    def __init__(
        self, problem: Problem, plan: OwnershipPlan, prices: Sequence[SharedPrice]
    ) -> None:
        self.problem, specs = problem, plan.specs
        rows = {(row.key, row.co_owners): row for row in prices}
        self.sizes: list[list[int]] = []
        self._price: dict[tuple[int, int], tuple[int, ...]] = {}  # ticks of batches of 1, 2, ...
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        for s, shape in enumerate(problem.shapes):
            sizes = [1]
            if all(can_be_shared(specs, specs.matrices[i]) for i in shape.members):
                priced = [k for k in SIZES if (shape.key, k) in rows]
                sizes += [k for k in priced if blocks_in(plan, shape.domain, k)]
            for k in sizes:
                self._blocks[s, k] = blocks_in(plan, shape.domain, k)
                ms = rows[shape.key, k].ms[: shape.count] if k > 1 else ()
                self._price[s, k] = tuple(map(problem.ticks, ms)) or shape.batch_ticks
            self.sizes.append(sorted(sizes, key=lambda k: k * self._price[s, k][0]))
        # For bounds: the classes that may have each shape; for each of its sizes the least ticks of
        # an owner, and the least work of all of them together for one matrix, in parts of a tick.
        self._owners = [
            frozenset(c for c, o in enumerate(problem.classes) if o.allowed[s])
            for s in range(len(problem.shapes))
        ]
        self._unit = math.lcm(*range(1, 1 + max(map(len, self._price.values()), default=1)))
        self._work: list[list[tuple[int, int]]] = [[] for _ in problem.shapes]
        for (s, k), price in self._price.items():
            work = min(k * t * self._unit // b for b, t in enumerate(price, 1))
            self._work[s].append((min(price), work))
        self._is_halved = self._are_halved()

    def _ticks(self, s: int, k: int) -> Ints:
        """`Shape.ticks` with k co-owners."""
        return cheapest(self._price[s, k], self.problem.shapes[s].count)[0]

    def fit(self, limit: int, only: int | None = None) -> Sharing | None:
        """A way to do all within a makespan; ``only``: so many co-owners where there may be any."""
        problem = self.problem
        busy, shared = problem.fixed.copy(), np.zeros_like(problem.fixed)
        if busy.max() > limit:
            return None
        alone = np.zeros((problem.world, len(problem.shapes)), np.int64)
        parts: list[tuple[int, Block, int]] = []
        for s, shape in enumerate(problem.shapes):
            left = shape.count
            for k in [only] if only in self.sizes[s] else self.sizes[s]:
                blocks, ticks = np.array(self._blocks[s, k], np.int64), self._ticks(s, k)
                loads = busy[blocks].max(1)
                room = np.searchsorted(np.maximum.accumulate(ticks), limit - loads, side="right")
                fullest = np.argsort(-loads, kind="stable")
                until = np.minimum(np.cumsum(np.maximum(room - 1, 0)[fullest]), left)
                taken = np.diff(until, prepend=0)
                for at in np.flatnonzero(taken).tolist():
                    b, count = int(fullest[at]), int(taken[at])
                    busy[blocks[b]] += ticks[count]
                    if k == 1:
                        alone[blocks[b], s] = count
                    else:
                        shared[blocks[b]] += ticks[count]
                        parts.append((s, tuple(blocks[b].tolist()), count))
                left -= int(until[-1]) if len(until) else 0
                if not left:
                    break
            if left:
                return None
        return Sharing(tuple(parts), shared, alone, int(busy.max()))

    def best(self, most: int | None = None, only: int | None = None) -> Sharing | None:
        """The fastest way that is found, of those with a makespan below ``most``; see `fit`."""
        low, high = 0, 1 if most is None else max(0, most - 1)
        best = self.fit(high, only)
        while best is None and most is None:
            low, high = high, 2 * high
            best = self.fit(high, only)
        while best is not None and best.makespan - low > best.makespan // _CLOSE:
            middle = (low + best.makespan) // 2
            found = self.fit(middle, only)
            low, best = (middle + 1, best) if found is None else (low, found)
        return best

    def bound(self, makespan: int) -> int:
        """A lower bound in ticks for every plan, whatever it shares, of at most ``makespan``: the
        least, to one part in `_EXACT`, at which the ranks that may have some shapes have room for
        their least work, and all blocks for the few shapes of most work, counted one by one."""
        low, high = max((c.fixed for c in self.problem.classes), default=0), makespan
        if not self._is_possible(makespan - 1):
            return makespan
        while high - low > low // _EXACT:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_possible(middle) else (middle + 1, high)
        return low

    def _is_possible(self, limit: int) -> bool:
        problem = self.problem
        work: list[int] = []
        for s, mine in enumerate(self._owners):
            free = limit - min(problem.classes[c].fixed for c in mine)
            if not (fitting := [w for least, w in self._work[s] if least <= free]):
                return False
            work.append(problem.shapes[s].count * min(fitting))
        for some in {*self._owners, frozenset(range(len(problem.classes)))}:
            total = sum(w for w, mine in zip(work, self._owners, strict=True) if mine <= some)
            classes = [problem.classes[c] for c in some]
            if total > self._unit * sum(c.size * max(0, limit - c.fixed) for c in classes):
                return False
        if not self._is_halved:
            return True
        free = limit - min(c.fixed for c in problem.classes)
        most = sorted(range(len(work)), key=lambda s: -work[s])[:_TOGETHER]
        together = [most[:n] for n in range(2, len(most) + 1)]
        return all(self._have_room(shapes, work, free) for shapes in [[s] for s in most] + together)

    def _are_halved(self) -> bool:
        """True if all shapes have the same blocks, of all ranks, whose halves are blocks, too."""
        blocks = {k: found for (_, k), found in self._blocks.items()}
        most = max(blocks, default=0)

        def halves(k: int) -> list[Block]:
            return [half for b in blocks[k] for half in (b[: k // 2], b[k // 2 :])]

        return (
            most > 0
            and len(blocks[most]) * most == self.problem.world
            and all(found == blocks[k] for (_, k), found in self._blocks.items())
            and all(k == 1 or blocks.get(k // 2) == halves(k) for k in blocks)
        )

    def _have_room(self, shapes: Sequence[int], work: Sequence[int], limit: int) -> bool:
        """True if the largest blocks, each with as much ``work`` as fits, do all of some shapes."""
        most = max(k for _, k in self._blocks)
        tables: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for s in shapes:
            for k in self.sizes[s]:
                # Less, where more matrices take less.
                ticks = np.minimum.accumulate(self._ticks(s, k)[::-1])[::-1]
                table = ticks[: np.searchsorted(ticks, limit, side="right")].tolist()
                tables[k].append((table, work[s] // self.problem.shapes[s].count))
        states = 0

        @cache
        def value(k: int, free: int) -> int:
            """The most work that a block of k ranks does in this time."""
            return filled(k, 0, free)

        def filled(k: int, n: int, free: int) -> int:
            """The same with shapes from the n-th on."""
            nonlocal states
            states += 1
            if states > _MOST_STATES:
                raise OverflowError
            if n == len(tables[k]):
                return 2 * value(k // 2, free) if k > 1 else 0
            table, each = tables[k][n]
            counts = range(bisect_right(table, free))
            return max(i * each + filled(k, n + 1, free - table[i]) for i in counts)

        try:
            room = self.problem.world // most * value(most, limit)
        except OverflowError:  # too many: say nothing
            return True
        return sum(work[s] for s in shapes) <= room


def shared_prices(
    plan: OwnershipPlan, costs: CostTable, max_batch: int, batch_numel: int
) -> tuple[SharedPrice, ...]:
    """The price of every shape for each of 2, 4, 8 co-owners, where it has as many columns."""
    found = []
    for (key, k), (count, blocks) in sharable(plan).items():
        # The slowest link that these blocks go over.
        across = any(len({plan.topology.node(rank) for rank in block}) > 1 for block in blocks)
        rows, cols, _ = canonical_key(key)
        most = largest_batch(rows, -(-cols // k), max_batch, batch_numel)
        prices = [costs.shared_ms(key, b, k, across) for b in range(1, min(count, most) + 1)]
        ms, split, origin = zip(*prices, strict=True)
        found.append(SharedPrice(key, k, ms, split, origin, costs.slice_kernel(key)))
    return tuple(found)


def _shared(plan: OwnershipPlan) -> list[MatrixSpec]:
    """The matrices that co-owners may have."""
    free = [m for i, m in enumerate(plan.specs.matrices) if not plan.limits.is_forced(i)]
    return [matrix for matrix in free if can_be_shared(plan.specs, matrix)]


def sharable(plan: OwnershipPlan) -> dict[tuple[ShapeKey, int], tuple[int, list[Block]]]:
    """(matrices, blocks) by shape and number of co-owners that can share so many of them."""
    counts = Counter(matrix.key for matrix in _shared(plan))
    domains = range(len(plan.limits.domains)) or (-1,)
    found = {}
    for k in SIZES:
        blocks = [block for domain in domains for block in blocks_in(plan, domain, k)]
        for key in sorted(counts) if blocks else ():
            if max(key[:2]) >= k:
                found[key, k] = counts[key], blocks
    return found


def check_size(plan: OwnershipPlan, size: int) -> None:
    """Raise PlanError unless so many ranks can share every matrix that is to be shared."""
    world = plan.topology.world
    if plan.layout.keeps_state_at_owners:
        raise PlanError(
            f"co_owners={size} needs momentum that lies with the parameters, and in the "
            f"{plan.layout.value!r} layout each matrix and its momentum lie with one owner: use "
            "layout='sharded' or 'replicated', or co_owners='auto'"
        )
    if size > world:
        raise PlanError(
            f"co_owners={size}, but there are only {world} ranks to share a matrix: use fewer, or "
            "co_owners='auto'"
        )
    for matrix in _shared(plan):
        if size > max(matrix.shape):
            raise PlanError(
                f"co_owners={size} is more than matrix {matrix.name!r} of {matrix.rows} x "
                f"{matrix.cols} has columns to share: use a smaller number, or co_owners='auto', "
                "which leaves it to one owner"
            )
