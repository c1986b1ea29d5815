"""Buckets: which tensors travel together, in which order, and the memory for them.

The gradients of a *bucket* of parameters leave as soon as all of them have arrived: one *segment*
for each place that owns some of them, together, and one for parameters that every rank updates::

    bucket 0 (the last parameters)   [ -> shard 2 | -> shard 3 ]  [ everyone ]
    bucket 1                         [ -> shard 0 | -> shard 2 ]  ...

A segment consists of *spans*: neighbouring elements of a parameter, or of this rank's
tensor-parallel slice of it, whose matrices have owners at one place of the grid. If matrices are no
contiguous ranges, the elements are in the order of the matrices (`Slices.flat_of`). Everything but
`Buffer` is pure data, equal on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from dmuon.comm.process_groups import Grid
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.shards import RankShards, ShardMap
from dmuon.scheduler.specs import Box, LocalShard, ModelSpecs
from dmuon.types import OwnershipError, grouped

EVERYONE = -1  # the "owner" of parameters that all ranks update


# ---- slices of parameters --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """``numel`` elements from element ``start`` on, owned at the place (``replica``, ``shard``): of
    a bucket of weights, or of the slice of ``parameter``, where they belong to ``matrices``."""

    start: int
    numel: int
    shard: int = EVERYONE
    replica: int = 0
    parameter: int = -1
    matrices: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class Slices:
    """The tensor-parallel slices of all parameters, and their owners. ``boxes[p]`` has the slices
    of parameter p by tensor coordinate, or None if every rank has it whole; ``shards`` has the same
    for ranks with equal data coordinates."""

    plan: OwnershipPlan
    grid: Grid
    boxes: Sequence[Sequence[Box] | None]
    ranges_only: InitVar[bool] = True

    def __post_init__(self, ranges_only: bool) -> None:
        plan, grid, boxes = self.plan, self.grid, self.boxes
        # First elements of matrices that are not ranges of their parameter, and of others in it.
        self._starts: dict[int, int] = {}
        specs, together = plan.specs, tuple(range(grid.shape[2]))
        # In element order.
        self.matrices_of = grouped((m.parameter, i) for i, m in enumerate(specs.matrices))

        def held(p: int, t: int) -> LocalShard:
            if (cut := boxes[p]) is not None:
                return LocalShard(together, (), cut[t])
            # Whole everywhere: each of these ranks has a replica.
            return LocalShard(together, (t,), Box.at_origin(specs.parameters[p].shape))

        every = range(len(specs.parameters))
        reports = tuple(RankShards.of(t, [held(p, t) for p in every]) for t in together)
        copies, holders = ((together,),) * len(specs.parameters), (together,) * len(specs.matrices)
        self.shards = ShardMap(specs, reports, copies, holders)
        for p, members in self.matrices_of.items():
            spec, outer = specs.parameters[p], [self.shards.boxes[i] for i in members]
            odd = [i for i, box in zip(members, outer) if not box.is_range_of(spec.shape)]
            if odd and ranges_only:
                raise OwnershipError(
                    f"{specs.matrices[odd[0]].name!r} is no contiguous range of {spec.name!r} "
                    f"{list(spec.shape)}, and layout='dedicated' keeps such ranges only: leave it "
                    "out of splits/heads, or use layout='sharded' or 'replicated'"
                )
            if odd:
                self._starts |= zip(members, accumulate((b.numel for b in outer), initial=0))
        # (replica, shard, tensor) of the owner of each matrix.
        self.place_of = [grid.place(owner) for owner in plan.owners]

    @classmethod
    def flat(cls, plan: OwnershipPlan) -> Slices:
        """Make slices without tensor parallelism and replicas: the shard coordinate is the rank."""
        grid = Grid((1, plan.topology.world, 1), tuple(range(plan.topology.world)))
        return cls(plan, grid, [None] * len(plan.specs.parameters), ranges_only=False)

    def is_cut(self, matrix: int) -> bool:
        return self.boxes[self.plan.specs.matrices[matrix].parameter] is not None

    def shape(self, parameter: int, tensor: int) -> tuple[int, ...]:
        return self.shards.shard(tensor, parameter).box.shape

    def keepers(
        self, parameter: int, *, in_slices: bool = False, replicas: bool = False
    ) -> list[tuple[int, int, Box]]:
        """List who keeps a parameter as (matrix, mesh rank, box in the parameter): the owners, or
        with ``in_slices`` all ranks with an owner's data coordinates, each its slice. ``replicas``
        adds the ranks in other replicas; otherwise each element is kept once."""
        found = []
        for i in self.matrices_of[parameter]:
            replica, shard, tensor = self.place_of[i]
            every = in_slices and (replicas or self.is_cut(i))
            box = self.shards.boxes[i]
            for r in range(self.grid.shape[0]) if replicas else [replica]:
                for t in range(self.grid.shape[2]) if every else [tensor]:
                    kept = box.intersection(self.shards.shard(t, parameter).box)
                    found.append((i, self.grid.rank_at(r, shard, t), kept if in_slices else box))
        return found

    def held(self, matrix: int, tensor: int) -> tuple[int, Box]:
        """Return the part of a matrix on ranks with this tensor coordinate: its first element in
        their slice of the parameter, and its box relative to the matrix's corner."""
        outer = self.shards.boxes[matrix]
        if matrix in self._starts:
            return self._starts[matrix], Box.at_origin(outer.shape)
        local = self.shards.shard(tensor, self.plan.specs.matrices[matrix].parameter).box
        common, start = outer.intersection(local), 0
        if common.numel:
            # Row-major in the slice; a range of the whole has no gaps in a slice either.
            for corner, size in zip(common.within(local).offset, local.shape, strict=True):
                start = start * size + corner
        return start, common.within(outer)

    def flat_of(self, parameter: int, values: Tensor) -> Tensor:
        """Return the elements of a parameter's slice in the order in which they travel."""
        members = self.matrices_of.get(parameter, [])
        if self._starts.keys().isdisjoint(members[:1]):
            return values.reshape(-1)
        pieces = (values[self.shards.boxes[i].slices()] for i in members)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def spans(self, parameter: int, tensor: int) -> list[Span]:
        """Return the spans of a matrix parameter's slice in element order; none if it is empty."""
        parts = [(*self.held(i, tensor), i) for i in self.matrices_of[parameter]]
        held = sorted((start, box.numel, i) for start, box, i in parts if box.numel)
        found = []
        for (replica, shard), members in groupby(held, lambda part: self.place_of[part[2]][:2]):
            starts, numels, matrices = zip(*members)
            found.append(Span(starts[0], sum(numels), shard, replica, parameter, matrices))
        return found


def slice_boxes(
    specs: ModelSpecs, grid: Grid, reports: Sequence[RankShards]
) -> list[tuple[Box, ...] | None]:
    """Return each parameter's slices by tensor coordinate, None if every rank has all of it.
    OwnershipError if data-parallel ranks have different slices, or the slices do not tile it."""
    found: list[tuple[Box, ...] | None] = []
    for p, spec in enumerate(specs.parameters):
        boxes = [report.shards[p].box for report in reports]
        first = tuple(boxes[grid.rank_at(0, 0, t)] for t in range(grid.shape[2]))
        whole = Box.at_origin(spec.shape)
        alike = all(box == first[grid.place(rank)[2]] for rank, box in enumerate(boxes))
        if all(box == whole for box in boxes):
            found.append(None)
        elif alike and sum(box.numel for box in first) == spec.numel:
            found.append(first)
        else:
            raise OwnershipError(
                f"the slices of parameter {spec.name!r} of shape {list(spec.shape)} are "
                f"{boxes[:4]}: parallelize the model in the same way on every data-parallel rank"
            )
    return found


# ---- buckets of gradients --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Spans of one dtype in order: one place's share of a reduce-scatter, or of all ranks."""

    shard: int  # where it arrives; EVERYONE if it is all-reduced
    dtype: str
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Parameters whose gradients are reduced as soon as all of them have arrived."""

    parameters: tuple[int, ...]
    segments: tuple[Segment, ...]


def gradient_bucket(
    slices: Slices,
    parameters: Sequence[int],
    adamw: Mapping[int, int],
    tensor: int,
    reduce_dtype: torch.dtype | None,
) -> GradientBucket:
    """Make a segment for each shard coordinate that owns some elements, ordered by replica, then
    one for parameters of all ranks, whose local sizes ``adamw`` gives. Empty spans are left out."""
    specs = slices.plan.specs.parameters
    spans: dict[tuple[bool, int, str], list[Span]] = defaultdict(list)
    for p in parameters:
        dtype = str(reduce_dtype).removeprefix("torch.") if reduce_dtype else specs[p].dtype
        mine = [Span(0, adamw[p], parameter=p)] if p in adamw else slices.spans(p, tensor)
        for span in mine:
            if span.numel:
                spans[span.shard == EVERYONE, span.shard, dtype].append(span)
    segments = tuple(
        Segment(shard, dtype, tuple(sorted(mine, key=lambda span: span.replica)))
        for (_, shard, dtype), mine in sorted(spans.items())
    )
    return GradientBucket(tuple(parameters), segments)


# ---- buckets of weights ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Parameters whose weights are consecutive in one buffer."""

    dtype: str
    parameters: tuple[int, ...]
    sends: tuple[Span, ...]  # along shards, each from one place; ``replica`` has no meaning there
    publishes: tuple[Span, ...]  # along replicas, each in one broadcast
    keeper: int | None  # the shard coordinate that keeps all of it, if there is one

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.sends)


def weight_buckets(slices: Slices, parameters: Sequence[int], tensor: int) -> list[WeightBucket]:
    """Return the buckets of parameters that are used together, in the order in which they travel,
    equal along shards. A parameter that several shard coordinates keep has its own bucket."""
    specs = slices.plan.specs.parameters
    spans = {p: slices.spans(p, tensor) for p in parameters}
    members: dict[tuple[bool, str, int], list[int]] = defaultdict(list)
    for p in parameters:
        shards = {span.shard for span in spans[p]}
        whole = False, specs[p].dtype, min(shards, default=0)
        members[whole if len(shards) < 2 else (True, "", p)].append(p)
    found = []
    for (is_cut, _, keeper), mine in sorted(members.items()):
        mine.sort(key=lambda p: min((span.replica for span in spans[p]), default=0))
        placed = [span for p in mine for span in spans[p]]
        sends = _joined(placed, lambda span: (0, span.shard))
        publishes = _joined(placed, lambda span: (span.replica, span.shard))
        kept_at = None if is_cut else keeper
        found.append(WeightBucket(specs[mine[0]].dtype, tuple(mine), sends, publishes, kept_at))
    return found


def _joined(placed: Sequence[Span], place: Callable[[Span], tuple[int, int]]) -> tuple[Span, ...]:
    """Join neighbouring spans at one place, and place them consecutively in a bucket."""
    found, start = [], 0
    for (replica, shard), members in groupby(placed, place):
        numel = sum(span.numel for span in members)
        found.append(Span(start, numel, shard, replica))
        start += numel
    return tuple(found)


# ---- memory ----------------------------------------------------------------------------------


class Buffer:
    """A flat tensor with memory only between `hold` and `release`, or always if ``lasting``. Its
    storage is resized, never replaced, so views stay valid, also those that autograd saved."""

    def __init__(self, flat: Tensor, *, lasting: bool = False) -> None:
        self.flat = flat
        self._storage = None if lasting else flat.untyped_storage()
        self.nbytes = flat.untyped_storage().nbytes()

    def hold(self) -> None:
        """Allocate memory; its content is undefined if there was none."""
        if self._storage is not None and self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def release(self) -> None:
        if self._storage is not None:
            self._storage.resize_(0)
