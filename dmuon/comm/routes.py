"""From a plan to what travels together: pure data, equal on every rank.

::

    backward    windows of parameters in reverse order; in each, one pack per owner and one for
                the rest:        window 0: [->rank 2 | ->rank 3 | all]   window 1: ...
    step        units (a batch, cut where parameter groups differ), runs of units that share a
                call, and the buckets in which their updates are published, in the order in which
                owners finish them
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.scheduler.batches import Batch
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import ITEM_SIZE

__all__ = [
    "Pack",
    "PublishBucket",
    "Span",
    "Unit",
    "Window",
    "make_window",
    "publish_buckets",
    "reduction_windows",
    "units_of",
]

EVERYONE = -1  # the "owner" of parameters that all ranks update


@dataclass(frozen=True, slots=True)
class Span:
    """``numel`` elements of a parameter from flat element ``start``; the matrices they hold."""

    parameter: int
    start: int
    numel: int
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pack:
    """Spans that travel in one collective, one after the other, all of dtype ``dtype``.

    ``owner`` is the destination of a reduce, or EVERYONE for an all-reduce.
    """

    owner: int
    dtype: str
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)


@dataclass(frozen=True, slots=True)
class Window:
    """Parameters whose gradients are reduced as soon as all of them are there."""

    parameters: tuple[int, ...]
    packs: tuple[Pack, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Same-shape matrices of one owner and one param group, which are orthogonalized together.

    ``kernel`` is what runs them, as `KernelChoice` writes it, "" for the fixed rule.
    """

    owner: int
    group: int
    matrices: tuple[int, ...]
    rows: int
    cols: int
    ms: float
    kernel: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its stacked matrices."""
        return len(self.matrices), self.rows, self.cols

    @property
    def numel(self) -> int:
        return len(self.matrices) * self.rows * self.cols


@dataclass(frozen=True, slots=True)
class PublishBucket:
    """Units of one owner whose results leave in one broadcast."""

    owner: int
    units: tuple[int, ...]


def _owner_spans(
    plan: OwnershipPlan, matrices_of: dict[int, list[int]], parameter: int
) -> list[tuple[int, Span]]:
    """The spans of one parameter by owner, runs of neighbouring matrices merged."""
    members = matrices_of.get(parameter)
    if members is None:
        return [(EVERYONE, Span(parameter, 0, plan.specs.parameters[parameter].numel))]
    found: list[tuple[int, Span]] = []
    for i in members:
        matrix, owner = plan.specs.matrices[i], plan.owners[i]
        if found and found[-1][0] == owner:
            last = found[-1][1]
            if last.start + last.numel == matrix.start:
                merged = Span(parameter, last.start, last.numel + matrix.numel, (*last.matrices, i))
                found[-1] = (owner, merged)
                continue
        found.append((owner, Span(parameter, matrix.start, matrix.numel, (i,))))
    return found


def matrices_by_parameter(plan: OwnershipPlan) -> dict[int, list[int]]:
    """Indices of the matrices of each parameter, in element order."""
    by_parameter: dict[int, list[int]] = defaultdict(list)
    for i, matrix in enumerate(plan.specs.matrices):
        by_parameter[matrix.parameter].append(i)
    return by_parameter


def make_window(
    plan: OwnershipPlan,
    parameters: Sequence[int],
    matrices_of: dict[int, list[int]],
    reduce_dtype: str | None,
) -> Window:
    """Pack ``parameters`` by destination: owners by rank, the rest last."""
    by_target: dict[tuple[bool, int, str], list[Span]] = defaultdict(list)
    for p in parameters:
        dtype = reduce_dtype or plan.specs.parameters[p].dtype
        for owner, span in _owner_spans(plan, matrices_of, p):
            if span.numel == 0:
                continue  # an empty parameter takes part in the flags, but nothing travels
            by_target[owner == EVERYONE, owner, dtype].append(span)
    packs = tuple(
        Pack(owner, dtype, tuple(spans)) for (_, owner, dtype), spans in sorted(by_target.items())
    )
    return Window(tuple(parameters), packs)


def reduction_windows(
    plan: OwnershipPlan, bucket_bytes: int, reduce_dtype: str | None = None
) -> tuple[Window, ...]:
    """Windows of about ``bucket_bytes`` over all parameters in reverse registration order.

    Backward reaches parameters roughly in that order, so early windows leave while later
    gradients are still being computed.
    """
    matrices_of = matrices_by_parameter(plan)
    windows: list[Window] = []
    members: list[int] = []
    size = 0
    for p in reversed(range(len(plan.specs.parameters))):
        spec = plan.specs.parameters[p]
        members.append(p)
        size += spec.numel * ITEM_SIZE[reduce_dtype or spec.dtype]
        if size >= bucket_bytes:
            windows.append(make_window(plan, members, matrices_of, reduce_dtype))
            members, size = [], 0
    if members:
        windows.append(make_window(plan, members, matrices_of, reduce_dtype))
    return tuple(windows)


def units_of(plan: OwnershipPlan, groups: Sequence[int]) -> tuple[Unit, ...]:
    """The planned batches as executed: cut where their matrices are in different param groups.

    ``groups`` gives the param group of each matrix. A cut batch shares its predicted time out by
    the number of matrices. Owners execute them in order of registration, for that is the order in
    which the next forward pass needs the results.
    """
    batches = sorted(plan.batches, key=lambda batch: (min(batch.matrices), batch.owner))
    return tuple(unit for batch in batches for unit in _cut(plan, batch, groups))


def _cut(plan: OwnershipPlan, batch: Batch, groups: Sequence[int]) -> list[Unit]:
    """A unit for each param group in a batch, in order of their first matrix."""
    by_group: dict[int, list[int]] = defaultdict(list)
    for i in batch.matrices:
        by_group[groups[i]].append(i)
    units = []
    for group, members in by_group.items():
        rows, cols = plan.specs.matrices[members[0]].shape
        share = batch.ms * len(members) / len(batch.matrices)
        units.append(Unit(batch.owner, group, tuple(members), rows, cols, share, batch.kernel))
    return units


def publish_buckets(
    units: Sequence[Unit], bucket_bytes: int, item_size: int
) -> tuple[PublishBucket, ...]:
    """Buckets in the order of their predicted completion, the same on every rank.

    Each owner fills its buckets in its order of execution, up to ``bucket_bytes`` of payload; a
    unit is never cut, and may fill a bucket beyond its size.
    """
    clock: dict[int, float] = defaultdict(float)
    open_buckets: dict[int, tuple[list[int], int]] = {}
    done: list[tuple[float, int, PublishBucket]] = []

    def close(owner: int) -> None:
        members, _ = open_buckets.pop(owner)
        done.append((clock[owner], owner, PublishBucket(owner, tuple(members))))

    for u, unit in enumerate(units):
        owner, size = unit.owner, unit.numel * item_size
        if owner in open_buckets and open_buckets[owner][1] + size > bucket_bytes:
            close(owner)
        members, filled = open_buckets.setdefault(owner, ([], 0))
        open_buckets[owner] = ([*members, u], filled + size)
        clock[owner] += unit.ms
    for owner in sorted(open_buckets):
        close(owner)
    return tuple(bucket for _, _, bucket in sorted(done, key=lambda d: (d[0], d[1], d[2].units)))


def aligned(nbytes: int, alignment: int = 64) -> int:
    """``nbytes`` rounded up, so that what follows in a buffer can be viewed in any dtype.

    >>> aligned(65)
    128
    """
    return math.ceil(nbytes / alignment) * alignment
