"""Buckets on their way to the owners and back, several at once.

Two sets of buffers, *inbound* and *outbound*, each with a few slots that buckets take in turn.
Timeline of a step with two slots each (G gather, S scatter, NS the owner's work)::

    link   G0  G1       G2   S0      G3   S1           S2       S3
    rank           NS0            NS1           NS2         NS3
                                  ^ applies what S brought two buckets ago, as slots are reused;
                                    the last ones land later, before the next forward needs them

An inbound slot is free again when its matrices are assembled, before their Newton-Schulz begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dmuon.comm.routes import Unit
from dmuon.comm.shard_routes import BucketRoute, Message, Part
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.scheduler.shards import Form, ShardMap

__all__ = ["BucketWork", "Pipeline", "in_parameter_dims", "pipeline_elements"]


class BucketWork(Protocol):
    """What a step does with the buckets; called in the same order on every rank."""

    def pack(self, parts: Sequence[Part], views: list[Tensor]) -> None:
        """Write what this rank holds of the operands of Newton-Schulz into ``views``."""

    def compute(
        self, batches: Sequence[tuple[int, Tensor]], done: Callable[[int, Tensor], None]
    ) -> None:
        """The owner's updates of (unit, operands ``[b, rows, cols]``), which may be overwritten.

        ``done(n, update)`` is called once for each, with an update that is valid during the call.
        """

    def apply(self, parts: Sequence[Part], views: list[Tensor]) -> None:
        """Update the local parts of the parameters with these parts of the updates."""


@dataclass(slots=True)
class _Slots:
    """Buffers of one kind, one a slot; a bucket's buffer is the beginning of its slot."""

    buffers: list[Tensor]

    @classmethod
    def of(cls, sizes: Sequence[int], count: int, like: Tensor) -> _Slots:
        largest = [max(sizes[slot::count], default=0) for slot in range(count)]
        return cls([like.new_empty(size) for size in largest])

    def take(self, bucket: int, numel: int) -> Tensor:
        return self.buffers[bucket % len(self.buffers)].narrow(0, 0, numel)


def _views(buffer: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    return [buffer.narrow(0, p.start, p.box.numel).view(p.box.shape) for p in parts]


def in_parameter_dims(matrix: Tensor, form: Form, shape: Sequence[int]) -> Tensor:
    """A view of ``[rows, cols]`` in the ``shape`` that these elements have in their parameter."""
    if form is Form.STACK:
        return matrix[(None,) * (len(shape) - 2)]
    if form is Form.TRANSPOSED:
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix if len(shape) == 2 else matrix.unflatten(1, tuple(shape[1:]))


@dataclass(slots=True)
class _Bucket:
    """A bucket's buffers and views of them, made once."""

    route: BucketRoute
    send: Tensor  # inbound: what is held here, to the owners
    send_views: list[Tensor]
    arrived: Tensor  # inbound: what is owned here
    leaving: Tensor  # outbound: updates of what is owned here
    landed: Tensor  # outbound: updates of what is held here
    landed_views: list[Tensor]
    copies_out: Tensor
    copies_in: Tensor
    copies_out_views: list[Tensor]
    copies_in_views: list[Tensor]
    copy_sources: list[Tensor]  # of the landed views, one for each of copies_out
    batches: list[tuple[int, Tensor]]  # (unit, [b, rows, cols]) in the workspace
    assembly: tuple[list[Tensor], list[Tensor]]  # parts in the workspace, parts as arrived
    results: list[tuple[list[Part], list[Tensor]]]  # of each batch: parts, places in `leaving`
    work: Work | None = None
    copying: Work | None = None


def pipeline_elements(
    routes: Sequence[BucketRoute], units: Sequence[Unit], slots: int
) -> dict[str, int]:
    """Elements of the Newton-Schulz dtype that a `Pipeline` allocates on one rank, by purpose.

    Slot s holds the largest of the buckets s, s + slots, s + 2 slots ...: "inbound" and "outbound"
    each have room for what the rank holds and what it owns of a bucket ("outbound" also for the
    copies of replicas); "assembly" is the largest owned bucket.
    """

    def largest(sizes: list[int]) -> int:
        return sum(max(sizes[slot::slots], default=0) for slot in range(slots))

    held = largest([r.held.numel for r in routes])
    owned = [r.owned.numel for r in routes]
    copies = largest([r.copies_out.numel for r in routes])
    copies += largest([r.copies_in.numel for r in routes])
    sizes = [sum(units[u].numel for u in r.units) for r in routes]
    return {
        "inbound": held + largest(owned),
        "outbound": held + largest(owned) + copies,
        "assembly": max(sizes, default=0),
    }


class Pipeline:
    """Moves the buckets of one rank; ``like`` gives the dtype and device of the wire."""

    def __init__(
        self,
        routes: Sequence[BucketRoute],
        units: Sequence[Unit],
        shards: ShardMap,
        transport: Transport,
        meter: Meter,
        slots: int,
        like: Tensor,
    ) -> None:
        self._transport = transport
        self._meter = meter
        self._slots = slots
        self._item = like.element_size()
        self._boxes = shards.boxes
        kinds = ("held", "owned", "owned", "held", "copies_out", "copies_in")
        sizes = [[getattr(route, kind).numel for route in routes] for kind in kinds]
        rings = [_Slots.of(size, slots, like) for size in sizes]
        owned_here = [[units[u] for u in route.units] for route in routes]
        largest = max((sum(u.numel for u in members) for members in owned_here), default=0)
        workspace = like.new_empty(largest)
        self._buckets = [
            self._bucket(b, route, units, [ring.take(b, s[b]) for ring, s in zip(rings, sizes)],
                         workspace)
            for b, route in enumerate(routes)
        ]  # fmt: skip
        self._pending: dict[int, Callable[[Sequence[Part], list[Tensor]], None]] = {}

    def _bucket(
        self,
        number: int,
        route: BucketRoute,
        units: Sequence[Unit],
        buffers: list[Tensor],
        workspace: Tensor,
    ) -> _Bucket:
        send, arrived, leaving, landed, out, into = buffers
        batches, start = [], 0
        for u in route.units:
            unit = units[u]
            batches.append((u, workspace.narrow(0, start, unit.numel).view(unit.shape)))
            start += unit.numel
        index_of = {u: n for n, (u, _) in enumerate(batches)}
        arrived_views = _views(arrived, route.owned.parts)
        leaving_views = _views(leaving, route.owned.parts)
        spots = [self._part_of(batches[index_of[p.unit]][1], p) for p in route.owned.parts]
        results: list[tuple[list[Part], list[Tensor]]] = [([], []) for _ in batches]
        for part, view in zip(route.owned.parts, leaving_views, strict=True):
            parts, places = results[index_of[part.unit]]
            parts.append(part)
            places.append(view)
        landed_views = _views(landed, route.held.parts)
        of_matrix = {(p.unit, p.position): v for p, v in zip(route.held.parts, landed_views)}
        return _Bucket(
            route=route,
            send=send,
            send_views=_views(send, route.held.parts),
            arrived=arrived,
            leaving=leaving,
            landed=landed,
            landed_views=landed_views,
            copies_out=out,
            copies_in=into,
            copies_out_views=_views(out, route.copies_out.parts),
            copies_in_views=_views(into, route.copies_in.parts),
            copy_sources=[of_matrix[p.unit, p.position] for p in route.copies_out.parts],
            batches=batches,
            assembly=(spots, arrived_views),
            results=results,
        )

    def _part_of(self, batch: Tensor, part: Part) -> Tensor:
        """The place of a part in a batch of whole matrices."""
        whole = self._boxes[part.matrix]
        matrix = in_parameter_dims(batch[part.position], whole.form, whole.box.shape)
        return matrix[part.box.slices()]

    # ---- a step --------------------------------------------------------------------------

    def run(self, work: BucketWork, meanwhile: Callable[[], None]) -> None:
        """Send every bucket to its owners and the updates back; all that is needed of the last
        ones is `land`. ``meanwhile`` runs while the first buckets travel."""
        assert not self._pending, "the updates of the last step were not applied"
        count = len(self._buckets)
        for b in range(min(self._slots, count)):
            self._gather(b, work)
        meanwhile()
        for b, bucket in enumerate(self._buckets):
            self._assemble(bucket)
            if b + self._slots < count:
                self._gather(b + self._slots, work)
            if b and self._slots == 1:  # its slot is needed now
                self._replicate(b - 1)
            if b >= self._slots:
                self.land([b - self._slots])
            self._compute(bucket, work)
            self._scatter(b, work)
            if b and self._slots > 1:
                self._replicate(b - 1)
        if count:
            self._replicate(count - 1)

    def _all_to_all(
        self, output: Tensor, source: Tensor, to: Message, came: Message, tag: str
    ) -> Work:
        sent = to.numel - to.splits[self._transport.rank]
        self._meter.add_bytes(tag, sent * self._item)
        return self._transport.all_to_all(output, source, came.splits, to.splits, tag=tag)

    def _gather(self, b: int, work: BucketWork) -> None:
        bucket = self._buckets[b]
        if bucket.send_views:
            work.pack(bucket.route.held.parts, bucket.send_views)
        route = bucket.route
        bucket.work = self._all_to_all(
            bucket.arrived, bucket.send, route.held, route.owned, "gather"
        )

    def _assemble(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        bucket.work.wait()
        bucket.work = None
        if bucket.assembly[0]:
            torch._foreach_copy_(*bucket.assembly)

    def _compute(self, bucket: _Bucket, work: BucketWork) -> None:
        def done(n: int, update: Tensor) -> None:
            parts, places = bucket.results[n]
            torch._foreach_copy_(places, [self._part_of(update, part) for part in parts])

        if bucket.batches:
            work.compute(bucket.batches, done)

    def _scatter(self, b: int, work: BucketWork) -> None:
        bucket, route = self._buckets[b], self._buckets[b].route
        bucket.work = self._all_to_all(
            bucket.landed, bucket.leaving, route.owned, route.held, "scatter"
        )
        self._pending[b] = work.apply

    def _replicate(self, b: int) -> None:
        bucket = self._buckets[b]
        route = bucket.route
        if not route.replicates:
            return
        assert bucket.work is not None
        bucket.work.wait()
        bucket.work = None
        if bucket.copy_sources:
            torch._foreach_copy_(bucket.copies_out_views, bucket.copy_sources)
        bucket.copying = self._all_to_all(
            bucket.copies_in, bucket.copies_out, route.copies_out, route.copies_in, "replicate"
        )

    def land(self, buckets: Sequence[int]) -> None:
        """Wait for the updates of these buckets, where they are pending, and apply them."""
        for b in buckets:
            apply = self._pending.pop(b, None)
            if apply is None:
                continue
            bucket = self._buckets[b]
            for work in (bucket.work, bucket.copying):
                if work is not None:
                    work.wait()
            bucket.work = bucket.copying = None
            if bucket.landed_views:
                apply(bucket.route.held.parts, bucket.landed_views)
            if bucket.copies_in_views:
                apply(bucket.route.copies_in.parts, bucket.copies_in_views)

    @property
    def batches(self) -> list[list[tuple[int, Tensor]]]:
        """By bucket: (unit, where its matrices ``[b, rows, cols]`` are assembled at every step)."""
        return [bucket.batches for bucket in self._buckets]

    @property
    def pending(self) -> tuple[int, ...]:
        """Buckets whose updates are still to be applied, in order."""
        return tuple(self._pending)
