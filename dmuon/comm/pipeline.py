"""Buckets on their way to the owners and back, several at once.

Two sets of buffers, *inbound* and *outbound*, each with a few slots that buckets take in turn.
Timeline of a step with two slots each (G gather, S scatter, NS the owner's work)::

    link   G0  G1       G2   S0      G3   S1           S2       S3
    rank           NS0            NS1           NS2         NS3
                                  ^ applies what S brought two buckets ago, as slots are reused;
                                    the last ones land later, before the next forward needs them

An inbound slot is free again when its matrices are assembled, before their Newton-Schulz begins.

A bucket that every rank holds whole has no G; its S are broadcasts from its owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dmuon.comm.routes import BucketRoute, Message, places
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.scheduler.plan import Unit

# What each buffer of a bucket has room for: two inbound ones, then the outbound ones.
_KINDS = ("held", "owned", "owned", "held", "copies_out", "copies_in", "published")


def _room(route: BucketRoute, kind: str, number: int) -> int:
    """Elements of a bucket's buffer; of what every rank holds whole two are needed, which are the
    first and the last."""
    is_needed = route.published is None or number in (0, len(_KINDS) - 1)
    message: Message | None = getattr(route, kind) if is_needed else None
    return 0 if message is None else message.numel


class Bucket:
    """A bucket's buffers, and views of them made once.

    ``send`` is flat: the operands of what this rank holds, in the order of ``route.held``.
    ``landings`` are where updates come in, (flat buffer, its layout). ``stacks`` are the units that
    it owns, (unit, ``[b, rows, cols]``), where their matrices are assembled at every step.
    """

    def __init__(
        self,
        route: BucketRoute,
        units: Sequence[Unit],
        buffers: list[Tensor],
        assembly: Tensor,
        rank: int,
    ) -> None:
        self.route = route
        self.works: list[Work] = []
        # Inbound: what is held here, to the owners; what is owned here. Outbound: updates of what
        # is owned here; of what is held here; then those that replicas copy; then all updates.
        self.send, self.arrived, self.leaving, self.landed, *others = buffers
        self.copies_out, self.copies_in, every = others
        self.landings = [(self.landed, route.held), (self.copies_in, route.copies_in)]
        # What each owner broadcasts.
        self.shares: list[Tensor] = []
        if route.published is not None:
            self.shares = list(every.split(route.published.splits))
            self.leaving, self.arrived = self.shares[rank], self.send
            self.landings = [(every, route.published)]
        numels = [units[u].numel for u in route.units]
        flats = assembly.narrow(0, 0, sum(numels)).split(numels)
        self.stacks = [(u, flat.view(units[u].shape)) for u, flat in zip(route.units, flats)]
        owned, copied, stack_of = route.owned.parts, route.copies_out.parts, dict(self.stacks)
        # Places in the stacks, and the parts that arrive for them.
        self.assembly = (
            [places(stack_of[part.unit], part) for part in owned],
            [part.within(self.arrived) for part in owned],
        )
        # Of each stack: parts, and their places in `leaving`.
        of_units = [[part for part in owned if part.unit == u] for u in stack_of]
        self.results = [(parts, [p.within(self.leaving) for p in parts]) for parts in of_units]
        # Places in `copies_out`, and what they copy. Matrices that follow each other there do so in
        # `landed`, where no fewer are joined.
        lands_at = {
            (part.unit, part.position + j): part.start + j * part.box.numel
            for part in route.held.parts
            for j in range(len(part.matrices))
        }
        starts = [lands_at[part.unit, part.position] for part in copied]
        self.copies = (
            [self.copies_out.narrow(0, part.start, part.numel) for part in copied],
            [self.landed.narrow(0, start, p.numel) for start, p in zip(starts, copied)],
        )


class Pipeline:
    """Moves the buckets of one rank; ``like`` gives the dtype and device of what travels.

    ``inbound`` is the dtype on the way to the owners, where it is another. ``nbytes`` are those of
    its buffers: "inbound" and "outbound" have room, slot by slot, for what the rank holds and what
    it owns of a bucket ("outbound" also for the copies of replicas); "assembly" is the largest
    owned bucket.
    """

    def __init__(
        self,
        routes: Sequence[BucketRoute],
        units: Sequence[Unit],
        transport: Transport,
        meter: Meter,
        slots: int,
        like: Tensor,
        inbound: torch.dtype | None = None,
    ) -> None:
        self._transport = transport
        self._meter = meter
        self._slots = slots
        self._pending: dict[int, Callable[[int], None]] = {}
        inbound = inbound or like.dtype
        largest = max((sum(units[u].numel for u in r.units) for r in routes), default=0)
        assembly = like.new_empty(largest, dtype=inbound)
        self.nbytes = {"inbound": 0, "outbound": 0, "assembly": assembly.nbytes}
        rings = []  # of each kind of buffer: its part of a slot, bucket by bucket
        for number, kind in enumerate(_KINDS):
            sizes = [_room(route, kind, number) for route in routes]
            # A slot holds the largest of its buckets.
            slot_sizes = [max(sizes[slot::slots], default=0) for slot in range(slots)]
            dtype = inbound if number < 2 else like.dtype
            ring = [like.new_empty(size, dtype=dtype) for size in slot_sizes]
            rings.append([ring[b % slots].narrow(0, 0, size) for b, size in enumerate(sizes)])
            purpose = "inbound" if number < 2 else "outbound"
            self.nbytes[purpose] += sum(buffer.nbytes for buffer in ring)
        self.buckets = [
            Bucket(route, units, [ring[b] for ring in rings], assembly, transport.rank)
            for b, route in enumerate(routes)
        ]
        self.only_publishes = bool(routes) and all(bucket.shares for bucket in self.buckets)

    # ---- a step --------------------------------------------------------------------------

    def run(
        self,
        fill: Callable[[int], None],
        compute: Callable[[int, Tensor], Tensor | None],
        apply: Callable[[int], None],
        meanwhile: Callable[[], None],
        may_send: Callable[[], bool] | None = None,
    ) -> bool:
        """Send every bucket to its owners and the updates back; called alike on every rank.

        Args:
            fill: write the operands of Newton-Schulz that this rank holds to a bucket's ``send``.
            compute: the owner's update of a unit from its stack, which may be overwritten; valid
                until the next call. None: of zeros, or whatever nobody applies.
            apply: update the parameters by what came to a bucket's ``landings``. Of the last
                buckets it is called by `land`, later.
            meanwhile: what to do while the first buckets travel; the last ones, where only updates
                do.
            may_send: asked once, where only updates travel, before the first of them does.

        Returns whether it went through: not, where ``may_send`` was false.
        """
        assert not self._pending, "the updates of the last step were not applied"
        count = len(self.buckets)
        for b in range(min(self._slots, count)):
            self._gather(b, fill)
        # Where nothing is gathered the updates are what there is to wait for.
        if not self.only_publishes:
            meanwhile()
        for b, bucket in enumerate(self.buckets):
            self._wait(bucket)
            if bucket.assembly[0]:
                torch._foreach_copy_(*bucket.assembly)
            if b + self._slots < count:
                self._gather(b + self._slots, fill)
            if b and self._slots == 1:  # its slot is needed now
                self._replicate(b - 1)
            if b >= self._slots:
                self.land([b - self._slots])
            for (u, stack), (parts, leaving) in zip(bucket.stacks, bucket.results, strict=True):
                update = compute(u, stack)
                if update is not None:
                    torch._foreach_copy_(leaving, [places(update, part) for part in parts])
            if not b and may_send is not None and not may_send():
                return False
            if bucket.shares:
                self._publish(bucket)
            else:
                route = bucket.route
                self._all_to_all(
                    bucket, bucket.landed, bucket.leaving, route.owned, route.held, "scatter"
                )
            self._pending[b] = apply
            if b and self._slots > 1:
                self._replicate(b - 1)
        if count:
            self._replicate(count - 1)
        if self.only_publishes:
            meanwhile()
        return True

    def _wait(self, bucket: Bucket) -> None:
        for work in bucket.works:
            work.wait()
        bucket.works = []

    def _all_to_all(
        self, bucket: Bucket, output: Tensor, source: Tensor, to: Message, came: Message, tag: str
    ) -> None:
        """Send ``source``, laid out as ``to``; what comes is laid out as ``came``."""
        sent = to.numel - to.splits[self._transport.rank]
        self._meter.add_bytes(tag, sent * source.element_size())
        work = self._transport.all_to_all(output, source, came.splits, to.splits, tag=tag)
        bucket.works.append(work)

    def _gather(self, b: int, fill: Callable[[int], None]) -> None:
        bucket, route = self.buckets[b], self.buckets[b].route
        fill(b)
        if not bucket.shares:
            self._all_to_all(bucket, bucket.arrived, bucket.send, route.held, route.owned, "gather")

    def _publish(self, bucket: Bucket) -> None:
        for owner, share in enumerate(bucket.shares):
            if share.numel():
                self._meter.add("updates", share)
                bucket.works.append(self._transport.broadcast(share, owner, tag="updates"))

    def _replicate(self, b: int) -> None:
        bucket, route = self.buckets[b], self.buckets[b].route
        if not route.replicates:
            return
        self._wait(bucket)
        if bucket.copies[0]:
            torch._foreach_copy_(*bucket.copies)
        self._all_to_all(
            bucket,
            bucket.copies_in,
            bucket.copies_out,
            route.copies_out,
            route.copies_in,
            "replicate",
        )

    def land(self, buckets: Sequence[int]) -> None:
        """Wait for the updates of these buckets, where they are pending, and apply them."""
        for b in buckets:
            apply = self._pending.pop(b, None)
            if apply is None:
                continue
            self._wait(self.buckets[b])
            apply(b)

    @property
    def pending(self) -> tuple[int, ...]:
        """Buckets whose updates are still to be applied, in order."""
        return tuple(self._pending)
