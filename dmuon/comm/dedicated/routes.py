"""What each group of modules sends and receives in the `dedicated` layout: pure data.

A parameter, or this rank's tensor-parallel slice of it, is cut into *runs*: neighbouring elements
of matrices with owners at one place of the grid. A *carrier* is one buffer of parameters that are
materialized together; runs with one home follow each other, so they leave in one broadcast::

    carrier 0   | a.weight  c.weight |                 home 0: one broadcast
    carrier 1   | b.weight |                           home 1
    carrier 2   | experts[0:3] | experts[3:5] |        homes 0 and 1: two broadcasts
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dmuon.comm.process_groups import Grid
from dmuon.comm.routes import EVERYONE, Pack, Span, Window, matrices_by_parameter
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.shards import Box, RankShards, matrix_box
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs
from dmuon.types import OwnershipError

__all__ = [
    "Carrier",
    "Part",
    "Range",
    "Run",
    "Slices",
    "carriers_of",
    "group_window",
    "slice_boxes",
]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a matrix: ``numel`` elements of its slice of the parameter, from
    ``start`` on, which are the box ``box`` of the matrix, counted from the matrix's corner."""

    matrix: int
    start: int
    numel: int
    box: Box


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring parts of one parameter that are owned at one place, as kept by one rank."""

    parameter: int
    start: int
    numel: int
    shard: int
    replica: int
    parts: tuple[Part, ...]


class Slices:
    """The tensor-parallel slices of all parameters.

    ``boxes[p]`` are those of parameter p by tensor coordinate, None where it is whole everywhere.
    """

    def __init__(
        self, plan: OwnershipPlan, grid: Grid, boxes: Sequence[Sequence[Box] | None]
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.boxes = boxes
        self.matrices_of = matrices_by_parameter(plan)
        self._place = [grid.place(owner) for owner in plan.owners]

    def owner_place(self, matrix: int) -> tuple[int, int, int]:
        """(replica, shard, tensor) of a matrix's owner."""
        return self._place[matrix]

    def is_cut(self, matrix: int) -> bool:
        """Whether the matrix lies in slices on several ranks."""
        return self.boxes[self.plan.specs.matrices[matrix].parameter] is not None

    def shape(self, parameter: int, tensor: int) -> tuple[int, ...]:
        """The shape of a parameter's slice."""
        boxes = self.boxes[parameter]
        return self.plan.specs.parameters[parameter].shape if boxes is None else boxes[tensor].shape

    def numel(self, parameter: int, tensor: int) -> int:
        return math.prod(self.shape(parameter, tensor))

    def part(self, matrix: int, tensor: int) -> Part:
        """What the ranks with this tensor coordinate hold of a matrix."""
        spec: MatrixSpec = self.plan.specs.matrices[matrix]
        shape = self.plan.specs.parameters[spec.parameter].shape
        outer = matrix_box(spec, shape).box
        boxes = self.boxes[spec.parameter]
        local = Box((0,) * len(shape), shape) if boxes is None else boxes[tensor]
        common = outer.intersection(local)
        if not common.numel:
            nothing = Box((0,) * len(shape), (0,) * len(shape))
            return Part(matrix, 0, 0, nothing)
        # Row-major in the slice: matrices divide leading dims only, so their parts have no gaps.
        start = 0
        for corner, size in zip(common.within(local).offset, local.shape, strict=True):
            start = start * size + corner
        return Part(matrix, start, common.numel, common.within(outer))

    def runs(self, parameter: int, tensor: int) -> list[Run]:
        """The runs of a parameter's slice, in element order; empty slices have none."""
        parts = [self.part(i, tensor) for i in self.matrices_of[parameter]]
        parts = sorted((p for p in parts if p.numel), key=lambda p: p.start)
        found = []
        for (replica, shard), members in groupby(parts, lambda p: self._place[p.matrix][:2]):
            mine = tuple(members)
            numel = sum(part.numel for part in mine)
            found.append(Run(parameter, mine[0].start, numel, shard, replica, mine))
        return found


def slice_boxes(
    specs: ModelSpecs, grid: Grid, reports: Sequence[RankShards]
) -> list[tuple[Box, ...] | None]:
    """The slice of each parameter by tensor coordinate, None where every rank has all of it.

    Raises:
        OwnershipError: data-parallel ranks have different slices, or the slices do not tile it.
    """
    found: list[tuple[Box, ...] | None] = []
    _, _, tensors = grid.shape
    for p, spec in enumerate(specs.parameters):
        shards = [report.shard(p) for report in reports]
        boxes = [Box(shard.offset, shard.shape) for shard in shards]
        first = tuple(boxes[grid.rank_at(0, 0, t)] for t in range(tensors))
        whole = Box((0,) * len(spec.shape), spec.shape)
        alike = all(box == first[grid.place(rank)[2]] for rank, box in enumerate(boxes))
        if all(box == whole for box in boxes):
            found.append(None)
            continue
        if not alike or sum(box.numel for box in first) != spec.numel:
            raise OwnershipError(
                f"the slices of parameter {spec.name!r} of shape {list(spec.shape)} are "
                f"{boxes[:4]}: parallelize the model in the same way on every data-parallel rank"
            )
        found.append(first)
    return found


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start .. start + numel`` of a carrier, owned at (``replica``, ``shard``)."""

    start: int
    numel: int
    shard: int
    replica: int


@dataclass(frozen=True, slots=True)
class Carrier:
    """One buffer; ``cells`` are its parameters: (index, first element, number of elements).

    ``sends`` are the ranges that leave in one broadcast along shards each (their ``replica`` says
    nothing), ``publishes`` those that leave in one along replicas. ``home`` is the shard coordinate
    that keeps all of it, None where there are several.
    """

    dtype: str
    numel: int
    cells: tuple[tuple[int, int, int], ...]
    runs: tuple[tuple[Run, int], ...]
    sends: tuple[Range, ...]
    publishes: tuple[Range, ...]
    home: int | None


def carriers_of(slices: Slices, parameters: Sequence[int], tensor: int) -> tuple[Carrier, ...]:
    """The carriers of a group, in the order of their broadcasts: equal along shards."""
    specs = slices.plan.specs.parameters
    single: dict[tuple[str, int], list[int]] = defaultdict(list)
    mixed: list[int] = []
    for p in parameters:
        runs = slices.runs(p, tensor)
        homes = {run.shard for run in runs}
        if len(homes) > 1:
            mixed.append(p)
        else:
            single[specs[p].dtype, homes.pop() if homes else 0].append(p)
    found = [
        _carrier(slices, _by_replica(slices, members, tensor), tensor, dtype, home)
        for (dtype, home), members in sorted(single.items())
    ]
    found += [_carrier(slices, [p], tensor, specs[p].dtype, None) for p in mixed]
    return tuple(found)


def _by_replica(slices: Slices, parameters: Sequence[int], tensor: int) -> list[int]:
    def replica(p: int) -> int:
        return min((run.replica for run in slices.runs(p, tensor)), default=0)

    return sorted(parameters, key=replica)


def _carrier(
    slices: Slices, parameters: Sequence[int], tensor: int, dtype: str, home: int | None
) -> Carrier:
    cells, runs, start = [], [], 0
    for p in parameters:
        numel = slices.numel(p, tensor)
        cells.append((p, start, numel))
        runs += [(run, start + run.start) for run in slices.runs(p, tensor)]
        start += numel
    return Carrier(
        dtype,
        start,
        tuple(cells),
        tuple(runs),
        _ranges(runs, lambda run: (run.shard, 0)),
        _ranges(runs, lambda run: (run.shard, run.replica)),
        home,
    )


def _ranges(
    runs: Sequence[tuple[Run, int]], place: Callable[[Run], tuple[int, int]]
) -> tuple[Range, ...]:
    """Runs that follow each other at one place, joined."""
    found: list[Range] = []
    for run, start in runs:
        shard, replica = place(run)
        last = found[-1] if found else None
        if (
            last is not None
            and (last.shard, last.replica) == (shard, replica)
            and last.start + last.numel == start
        ):
            found[-1] = Range(last.start, last.numel + run.numel, shard, replica)
        else:
            found.append(Range(start, run.numel, shard, replica))
    return tuple(found)


def group_window(
    slices: Slices,
    parameters: Sequence[int],
    rest_numel: Mapping[int, int],
    tensor: int,
    reduce_dtype: str | None,
) -> Window:
    """The gradients of a group: a pack for each home, in it by replica, and one for the rest.

    ``rest_numel`` gives the elements, here, of the parameters that all ranks update.
    """
    specs = slices.plan.specs.parameters
    spans: dict[tuple[bool, int, str], list[tuple[int, Span]]] = defaultdict(list)
    for p in parameters:
        dtype = reduce_dtype or specs[p].dtype
        if p in rest_numel:
            if rest_numel[p]:
                spans[True, EVERYONE, dtype].append((0, Span(p, 0, rest_numel[p])))
            continue
        for run in slices.runs(p, tensor):
            span = Span(p, run.start, run.numel, tuple(part.matrix for part in run.parts))
            spans[False, run.shard, dtype].append((run.replica, span))
    packs = tuple(
        Pack(owner, dtype, tuple(span for _, span in sorted(mine, key=lambda s: s[0])))
        for (_, owner, dtype), mine in sorted(spans.items())
    )
    return Window(tuple(parameters), packs)
