"""Matrices that several neighbouring ranks share: which, by how many, and who.

Where owners outnumber matrices the costliest matrix is the floor of every plan, unless k ranks
share it, a slice of its longer dim each. That adds work (each runs the iteration of short side x
short side, and sums travel), so k is as small as a makespan T allows::

    T  ─▶  k of each shape: the least whose slice takes no more than T
       ─▶  blocks: what has most co-owners first, each matrix to the block that is least busy
       ─▶  what has one owner, on top of that: the usual problem with other fixed loads

Every T at which a k changes is tried. The same numbers give a lower bound for all choices of k:
within T each matrix takes the least rank time of the k that T allows, and all ranks together have
no more than T each (`shared_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable, ShapeKey
from dmuon.scheduler.plan import SharedPrice
from dmuon.scheduler.problem import Ints, Problem, cheapest
from dmuon.scheduler.shards import OwnerLimits
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError

SIZES = (2, 4, 8)
GAIN = 0.05  # of the makespan: what "auto" asks for
_MOST_TRIED = 48  # makespans

Block = tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """What is shared: (shape, block, how many of it); the ticks that it takes of each rank."""

    parts: tuple[tuple[int, Block, int], ...]
    busy: Ints


def can_be_shared(specs: ModelSpecs, matrix: MatrixSpec) -> bool:
    """Whether a slice of the longer dim is a box of the parameter: not of columns that are several
    dims of a convolution."""
    shape = specs.parameters[matrix.parameter].shape
    rows, cols = matrix.form.dims(len(shape))
    box = matrix.box(shape).shape
    return box[rows if matrix.rows > matrix.cols else cols] == max(matrix.shape)


def blocks_of(ranks: Sequence[int], topology: Topology, size: int) -> list[Block]:
    """Neighbouring ranks in sets of ``size``: on one node each, where nodes have so many of them.

    >>> blocks_of(range(6), Topology.flat(6, ranks_per_node=3), 2)
    [(0, 1), (3, 4)]
    """
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(topology.node(rank), []).append(rank)
    inside = [
        tuple(mine[i : i + size]) for mine in nodes.values()
        for i in range(0, len(mine) - size + 1, size)
    ]  # fmt: skip
    if inside:
        return inside
    every = sorted(ranks)
    return [tuple(every[i : i + size]) for i in range(0, len(every) - size + 1, size)]


class CoOwners:
    """The choices of sharing in a problem: ``shapes`` that can be shared, by number; their tables
    ``ticks[shape, k]``, as `Shape.ticks`; the ``blocks[shape, k]`` that may do so."""

    def __init__(
        self,
        problem: Problem,
        specs: ModelSpecs,
        topology: Topology,
        limits: OwnerLimits,
        prices: Sequence[SharedPrice],
    ) -> None:
        self.problem = problem
        rows = {(row.key, row.co_owners): row for row in prices}
        self.batch_ticks: dict[tuple[int, int], tuple[int, ...]] = {}
        self.blocks: dict[tuple[int, int], list[Block]] = {}
        found: dict[tuple[int, int], list[Block]] = {}
        for s, shape in enumerate(problem.shapes):
            if not all(can_be_shared(specs, specs.matrices[i]) for i in shape.members):
                continue
            ranks = range(topology.world) if shape.domain < 0 else limits.domains[shape.domain]
            for k in SIZES:
                row = rows.get((shape.key, k))
                if row is None or k > len(ranks):
                    continue
                if (shape.domain, k) not in found:
                    found[shape.domain, k] = blocks_of(ranks, topology, k)
                self.blocks[s, k] = found[shape.domain, k]
                ms = row.ms[: shape.count]
                self.batch_ticks[s, k] = tuple(problem.ticks(value) for value in ms)

    def least(self, s: int, k: int) -> int:
        """Ticks that an owner of a matrix of this shape is busy at least."""
        return min(self._batches(s, k))

    def _batches(self, s: int, k: int) -> tuple[int, ...]:
        return self.problem.shapes[s].batch_ticks if k == 1 else self.batch_ticks[s, k]

    def sizes(self, s: int) -> list[int]:
        return [1, *(k for k in SIZES if (s, k) in self.blocks)]

    # ---- what to share -------------------------------------------------------------------

    def choices(self) -> list[dict[int, int]]:
        """The k above 1 of each shape, for makespans from which on another k is enough."""
        shapes = range(len(self.problem.shapes))
        limits = {self._batches(s, k)[0] for s in shapes for k in self.sizes(s)}
        found: list[dict[int, int]] = []
        for limit in sorted(limits, reverse=True):
            choice: dict[int, int] = {}
            for s in shapes:
                sizes = self.sizes(s)
                fitting = [k for k in sizes if self._batches(s, k)[0] <= limit]
                fastest = min((self._batches(s, k)[0], k) for k in sizes)[1]
                k = min(fitting, default=fastest)
                if k > 1:
                    choice[s] = k
            if choice and choice not in found:
                found.append(choice)
        step = -(-len(found) // _MOST_TRIED)
        return found[:: step or 1]

    def share(self, choice: Mapping[int, int]) -> Sharing:
        """All matrices of the shapes of a choice on blocks of their k, evenly."""
        problem = self.problem
        busy = problem.fixed.copy()
        parts: list[tuple[int, Block, int]] = []
        order = sorted(choice, key=lambda s: (-choice[s], -self._batches(s, choice[s])[0], s))
        for s in order:
            k, shape = choice[s], problem.shapes[s]
            blocks, ticks = self.blocks[s, k], cheapest(self._batches(s, k), shape.count)[0]
            ranks = np.array(blocks, np.int64)
            loads = busy[ranks].max(1)
            taken = np.zeros(len(blocks), np.int64)
            for _ in range(shape.count):  # to the block that is least busy with it
                after = loads + ticks[taken + 1]
                taken[int(after.argmin())] += 1
            for b in np.flatnonzero(taken).tolist():
                parts.append((s, blocks[b], int(taken[b])))
                busy[ranks[b]] += ticks[taken[b]]
        return Sharing(tuple(parts), busy - problem.fixed)

    # ---- what no choice gets below -----------------------------------------------------------

    def bound(self) -> int:
        """Ticks that every plan takes, whatever it shares."""
        problem = self.problem
        options = [
            [
                (
                    self.least(s, k),
                    min(Fraction(k * t, b) for b, t in enumerate(self._batches(s, k), 1)),
                )
                for k in self.sizes(s)
            ]
            for s in range(len(problem.shapes))
        ]
        owners = [
            frozenset(c for c, o in enumerate(problem.classes) if o.allowed[s])
            for s in range(len(problem.shapes))
        ]
        sets = set(owners) | {frozenset(range(len(problem.classes)))}

        def is_possible(limit: int) -> bool:
            work: list[Fraction] = []
            for s, mine in enumerate(owners):
                free = limit - min(problem.classes[c].fixed for c in mine)
                fitting = [rank_ticks for ticks, rank_ticks in options[s] if ticks <= free]
                if not fitting:
                    return False
                work.append(problem.shapes[s].count * min(fitting))
            for some in sets:
                total = sum((w for w, o in zip(work, owners, strict=True) if o <= some), Fraction())
                room = sum(
                    problem.classes[c].size * max(0, limit - problem.classes[c].fixed) for c in some
                )
                if total > room:
                    return False
            return True

        low = max((c.fixed for c in problem.classes), default=0)
        high = max(low, 1)
        while not is_possible(high):
            high *= 2
        while low < high:
            middle = (low + high) // 2
            if is_possible(middle):
                high = middle
            else:
                low = middle + 1
        return high


def shared_prices(
    specs: ModelSpecs,
    topology: Topology,
    limits: OwnerLimits,
    costs: CostTable,
    max_batch: int,
    sizes: Sequence[int] = SIZES,
) -> tuple[SharedPrice, ...]:
    """What every shape costs each of 2, 4, 8 co-owners, where it has as many columns."""
    counts: dict[ShapeKey, int] = {}
    for i, matrix in enumerate(specs.matrices):
        if not limits.is_forced(i) and can_be_shared(specs, matrix):
            counts[matrix.key] = counts.get(matrix.key, 0) + 1
    domains = limits.domains or (tuple(range(topology.world)),)
    found = []
    for k in sizes:
        link = _link(costs, topology, [d for d in domains if len(d) >= k], k)
        if not link:
            continue
        for key, count in sorted(counts.items()):
            if key[1] < k:
                continue
            batches = range(1, min(count, max_batch) + 1)
            prices = [costs.shared_ms(key, b, k, link) for b in batches]
            ms, split, origin = zip(*prices, strict=True)
            found.append(SharedPrice(key, k, ms, split, origin))
    return tuple(found)


def _link(costs: CostTable, topology: Topology, domains: Sequence[Sequence[int]], size: int) -> str:
    """The slowest link that blocks of this size go over; "" where there are none."""
    blocks = [block for domain in domains for block in blocks_of(domain, topology, size)]
    if not blocks:
        return ""
    if costs.device in (None, ANALYTIC_DEVICES["cpu"]):
        return "cpu"
    inside = all(len({topology.node(rank) for rank in block}) == 1 for block in blocks)
    return "nvlink" if inside else "network"


def check_size(specs: ModelSpecs, limits: OwnerLimits, world: int, size: int) -> None:
    """Raise PlanError unless so many ranks can share every matrix that is to be shared."""
    if size > world:
        raise PlanError(
            f"co_owners={size}, but there are only {world} ranks to share a matrix: use fewer, or "
            "co_owners='auto'"
        )
    for i, matrix in enumerate(specs.matrices):
        if limits.is_forced(i) or not can_be_shared(specs, matrix):
            continue
        if size > max(matrix.shape):
            raise PlanError(
                f"co_owners={size} is more than matrix {matrix.name!r} of {matrix.rows} x "
                f"{matrix.cols} has columns to share: use a smaller number, or co_owners='auto', "
                "which leaves it to one owner"
            )
