"""Pipeline of buckets to the owners and back, several at once.

There are two sets of buffers, *inbound* and *outbound*, with a few slots that buckets use in turn.
Timeline of a step with two slots each (G gather, S scatter, NS the owner's work)::

    link   G0  G1       G2   S0      G3   S1           S2       S3
    rank           NS0            NS1           NS2         NS3
                                  ^ applies the updates of two buckets ago, whose slot is reused;
                                    the last updates are applied before `step` returns

An inbound slot is free again once its matrices are assembled, before their Newton-Schulz begins.
A bucket that every rank holds whole has no G; its S is an all-gather of its owners' updates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.profiler import record_function

from dmuon.comm.routes import (
    BucketRoute,
    Message,
    Ranks,
    Units,
    bucket_route,
    places,
    turns_of,
    units_for,
)
from dmuon.comm.transport import Gathering, Meter, Transport, Work
from dmuon.scheduler.plan import Sizes, buckets_of
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.topology import Topology

Copier = Callable[[list[Tensor], list[Tensor]], Callable[[], object]]
Gathers = Mapping[Ranks, Callable[..., Work]]  # `Transport.all_gather` by set of ranks
_listed: Copier = partial(partial, torch._foreach_copy_)


def _room(route: BucketRoute, gathers: bool) -> tuple[int, ...]:
    """Return the elements of a bucket's buffers, in the order in which `Bucket` takes them:
    operands held here (none without ``gathers``); operands arriving at this owner, and its updates;
    updates of matrices held here; replicas' shares of the updates, which hold these too if all are
    replicated alike. The owner of a bucket that all ranks hold whole needs no extra buffers.
    """
    owned = 0 if route.columns else route.owned.numel
    is_within = any(one.is_all for one in route.replications)
    updates = 0 if is_within else route.updates.numel
    replicated = sum(one.others.numel for one in route.replications)
    return route.held.numel * gathers, owned, owned, updates, replicated


def layers_in(names: Sequence[str]) -> str:
    """Name the layers of matrices with these names.

    >>> layers_in(["layers.3.up.weight", "layers.3.down.weight"]), layers_in(["a.weight", "b.0.w"])
    ('layers.3', 'a to b.0')
    """
    of = [re.match(r"(.*?\.\d+)\.", name) for name in names]
    found = [m[1] if m else name.rpartition(".")[0] or name for m, name in zip(of, names)]
    first, last = found[0], found[-1]
    return first if {*found} == {first} else f"{first} to {last}"


def _aligned(numel: int) -> int:
    """Round up to whole cache lines, because some libraries round depending on the address."""
    return -(-numel // 32) * 32


def all_gathers(peers: Mapping[Ranks, Transport], topology: Topology, rings: bool) -> Gathers:
    """Return the all-gather for each set of ranks: by broadcasts on one node, where messages need
    an extra copy; by direct messages between two nodes; among more by a ring, if ``rings``."""
    ways: list[Gathering] = ["broadcasts", "messages", "ring" if rings else "messages"]
    nodes = {ranks: len({*map(topology.node, ranks)}) for ranks in peers}
    return {r: partial(one.all_gather, by=ways[min(nodes[r], 3) - 1]) for r, one in peers.items()}


class Turns:
    """Consecutive all-gathers that bring shares of flat buffers to all ranks that need them
    (`turns_of`): ``found`` has (buffer, its turns). ``is_published``: all ranks need them, else
    only ranks with equal shards."""

    def __init__(
        self,
        found: Iterable[tuple[Tensor, list[tuple[Ranks, list[tuple[int, int]]]]]],
        is_published: bool,
    ) -> None:
        self._turns: list[list[tuple[Ranks, list[Tensor]]]] = [[], []]
        for buffer, turns in found:
            for into, (ranks, parts) in zip(self._turns, turns, strict=True):
                if len(ranks) > 1 and any(size for _, size in parts):  # all of these ranks know
                    into.append((ranks, [buffer.narrow(0, *part) for part in parts]))
        while self._turns and not self._turns[-1]:
            self._turns.pop()
        self._is_published, self.sent = is_published, 0

    def __len__(self) -> int:
        return len(self._turns)

    def send(self, rank: int, gathers: Gathers, meter: Meter) -> list[Work]:
        """Launch the next turn. The data that it passes on must have arrived."""
        tag, works = "updates" if self._is_published else "replicate", []
        for ranks, parts in self._turns[self.sent]:
            own = parts[ranks.index(rank)].nbytes * (len(ranks) - 1)
            meter[tag] += sum(part.nbytes for part in parts) if self._is_published else own
            works.append(gathers[ranks](parts, tag=tag))
        self.sent += 1
        return works


class Bucket:
    """A bucket's buffers, and views of them made once. ``send`` has the operands that this rank
    holds, in the order of ``route.held``; ``updates`` has the buffers for arriving updates, (flat
    buffer, its layout). In ``stacks``, (unit, ``[b, rows, cols]``), the matrices that this rank
    owns are assembled at every step; without an ``assembly`` these have no memory."""

    def __init__(
        self, route: BucketRoute, units: Units, buffers: list[Tensor], rank: int,
        assembly: Tensor | None,
    ) -> None:  # fmt: skip
        self.route = route
        self.works: list[Work] = []
        self.send, arrived, leaving, updates, replicated = buffers
        every = [one.others for one in route.replications]
        gathered = replicated.split([others.numel for others in every])
        found = []
        copies: list[tuple[Tensor, Tensor]] = []
        for one, buffer in zip(route.replications, gathered, strict=True):
            order = [*chain(*one.columns)]
            shares = buffer.split(one.others.splits[: len(order)])
            updates = shares[order.index(rank)] if one.is_all else updates
            copies += [
                (buffer.narrow(0, start, numel), updates.narrow(0, at, numel))
                for at, start, numel in one.copies
            ]
            found.append((buffer, turns_of(one.columns, one.others.splits, rank)))
        self.copies = Copies(copies)
        self.updates = [(updates, route.updates), *zip(gathered, every)]
        self.is_published = bool(route.columns)
        if route.columns:
            order = [*chain(*route.columns)]
            leaving = updates.split(route.updates.splits[: len(order)])[order.index(rank)]
            arrived = self.send
            found.append((updates, turns_of(route.columns, route.updates.splits, rank)))
        self.turns = Turns(found, self.is_published)
        # Each exchange: its tag, the received buffer and message, and the sent ones.
        self.gather = "gather", (arrived, route.owned), (self.send, route.held)
        self.scatter = "scatter", (updates, route.updates), (leaving, route.owned)
        stacks, start = [], 0
        for u in route.units:
            flat = self.send if assembly is None else assembly.narrow(0, start, units[u].numel)
            stacks.append((u, flat if assembly is None else flat.view(units[u].shape)))
            start += _aligned(units[u].numel)
        self.stacks = stacks
        owned, stack_of = route.owned.parts, dict(self.stacks)
        # Views of the stacks, and the parts that arrive for them.
        self.assembly = Copies(
            (places(stack_of[part.unit], part), part.within(arrived))
            for part in (() if assembly is None else owned)
        )
        # For each stack its parts, and views of them in the leaving buffer.
        of_units = [[part for part in owned if part.unit == u] for u in stack_of]
        self.results = [(parts, [p.within(leaving) for p in parts]) for parts in of_units]
        self._made: dict[int, tuple[Tensor, Copies]] = {}

    def leaving(self, n: int, update: Tensor) -> Copies:
        """Return the copies of the n-th stack's update to the buffer that leaves."""
        known = self._made.get(n)
        if known is None or known[0] is not update:  # usually the same tensor in every step
            parts, leaving = self.results[n]
            pairs = zip(leaving, [places(update, part) for part in parts], strict=True)
            known = self._made[n] = update, Copies(pairs)
        return known[1]


class Copies:
    """Pairs (target, source) to copy in every step; `run` prepares the two lists once."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        found = list(pairs)
        self.targets, self.sources = [to for to, _ in found], [source for _, source in found]
        self._run: Callable[[], object] | None = None

    def run(self, prepare: Copier = _listed) -> None:
        if self.targets:
            if self._run is None:
                self._run = prepare(self.targets, self.sources)
            self._run()


class Pipeline:
    """Cuts the units at ``travelling`` into buckets, and moves the buckets of one rank; messages
    have the dtype and device of ``like``.

    ``inbound`` is the dtype on the way to the owners, if it differs. ``memory(numel)`` returns
    memory in which the operands of all buckets lie consecutively, and from which they are sent;
    without it they use slots as well. Without ``gathers``, for ranks that hold all matrices whole,
    owners have the operands elsewhere. ``replicas`` has a transport over each set of ranks that
    this rank shares updates with; ``transport`` is over all ranks. ``nbytes`` are of its own
    buffers: "inbound" and "outbound" have room, slot by slot, for a bucket's matrices that the rank
    and its replicas hold, and that it owns; "assembly" has room for the largest owned bucket.
    """

    def __init__(
        self, shards: ShardMap, topology: Topology, units: Units, travelling: Sequence[int],
        transport: Transport, meter: Meter, sizes: Sizes, like: Tensor,
        inbound: torch.dtype | None = None, memory: Callable[[int], Tensor] | None = None,
        replicas: Mapping[Ranks, Transport] | None = None, *, gathers: bool = True,
    ) -> None:  # fmt: skip
        cuts, self._slots = buckets_of(units, travelling, sizes, like.element_size())
        units = units_for(units, shards, topology, transport.rank)
        what = shards, topology, units
        routes = [bucket_route(*what, cut, transport.rank, is_whole=not gathers) for cut in cuts]
        self._transport = transport
        peers = {tuple(range(transport.world)): transport, **(replicas or {})}
        self._gathers = all_gathers(peers, topology, sizes.rings)
        self._meter = meter
        self._ahead = sizes.buffers
        self._pending: dict[int, Callable[[int], None]] = {}
        self.copier = _listed  # an engine may set a faster one
        incoming = like.to(inbound or like.dtype)
        largest = max((sum(_aligned(units[u].numel) for u in r.units) for r in routes), default=0)
        assembly = incoming.new_empty(largest) if gathers else None
        assembled = 0 if assembly is None else assembly.nbytes
        self.nbytes = {"inbound": 0, "outbound": 0, "assembly": assembled}
        # For each kind of buffer its part of a slot, bucket by bucket.
        rooms = [_room(route, gathers) for route in routes]
        held, arriving, *leaving = zip(*rooms, strict=True) if routes else ((), ())
        if routes and memory is not None:
            rings = [list(memory(sum(held)).split(held))]
        else:
            rings = [self._ring("inbound", held, self._ahead, incoming)]
        rings.append(self._ring("inbound", arriving, self._ahead, incoming))
        rings += [self._ring("outbound", numels, self._slots, like) for numels in leaving]
        self.buckets = [
            Bucket(route, units, [ring[b] for ring in rings], transport.rank, assembly)
            for b, route in enumerate(routes)
        ]
        self.only_publishes = bool(routes) and all(bucket.is_published for bucket in self.buckets)
        # The range of each bucket in a profile.
        within = [sorted(chain(*(units[u].matrices for u in members))) for members in cuts]
        names = [[shards.specs.matrices[i].name for i in some] for some in within]
        self._gathering: list[AbstractContextManager[object]] = [
            nullcontext()
            if bucket.is_published
            else record_function(f"dmuon::gather {layers_in(some)}")
            for bucket, some in zip(self.buckets, names, strict=True)
        ]
        self._publishing = record_function("dmuon::publish")

    def _ring(self, purpose: str, numels: Sequence[int], slots: int, like: Tensor) -> list[Tensor]:
        """Return the buffers of all buckets, which use slots in turn."""
        # A slot holds the largest of its buckets.
        sizes = [max(numels[slot::slots], default=0) for slot in range(slots)]
        ring = [like.new_empty(size) for size in sizes]
        self.nbytes[purpose] += sum(buffer.nbytes for buffer in ring)
        return [ring[b % slots].narrow(0, 0, numel) for b, numel in enumerate(numels)]

    def run(
        self,
        fill: Callable[[int], None],
        compute: Callable[[int, Tensor], Tensor | None],
        apply: Callable[[int], None],
        meanwhile: Callable[[float], None],
        may_send: Callable[[], bool] | None = None,
    ) -> bool:
        """Send every bucket to its owners and the updates back, on every rank alike. Return False
        if ``may_send`` does, else True.

        Args:
            fill: write the operands of Newton-Schulz that this rank holds to a bucket's ``send``.
            compute: return the owner's update of a unit from its stack, which may be overwritten;
                valid until the next call. None if nobody will apply the update.
            apply: update the parameters from a bucket's ``updates``; for the last buckets
                `apply_pending` calls it later.
            meanwhile: do a given fraction of the remaining other work while buckets travel: all of
                it with the first buckets; if only updates travel, before each wait and at the end.
            may_send: called once before the first updates are sent, if only updates travel.
        """
        assert not self._pending, "the updates of the last step were not applied"
        count, slots = len(self.buckets), self._slots
        depth = max((len(bucket.turns) for bucket in self.buckets), default=0)
        for bucket in self.buckets:
            bucket.turns.sent = 0
        for b in range(min(self._ahead, count)):
            self._gather(b, fill)
        # If nothing is gathered, there are only updates to wait for.
        if not self.only_publishes:
            meanwhile(1.0)
        for b, bucket in enumerate(self.buckets):
            with self._gathering[b]:
                self._meter.wait("gather", bucket.works)
                bucket.assembly.run(self.copier)
            if b + self._ahead < count:
                self._gather(b + self._ahead, fill)
            if b >= slots:  # its slot is needed now
                if self.only_publishes:
                    meanwhile(1 / (count + 1 - b))
                self._send_on(b - slots, to_the_end=True)
                self.apply_pending([b - slots])
            for n, (u, stack) in enumerate(bucket.stacks):
                if (update := compute(u, stack)) is not None:
                    bucket.leaving(n, update).run(self.copier)
            if not b and may_send is not None and not may_send():
                return False
            if bucket.is_published:
                self._send_on(b)
            else:
                with self._publishing:
                    self._exchange(bucket, *bucket.scatter)
            self._pending[b] = apply
            for back in range(1, depth + 1):
                self._send_on(b - back)
        for b in range(count, count + depth):
            for back in range(1, depth + 1):
                self._send_on(b - back)
        if self.only_publishes:
            meanwhile(1.0)
        return True

    def _exchange(
        self, bucket: Bucket, tag: str, came: tuple[Tensor, Message], sent: tuple[Tensor, Message]
    ) -> None:
        (output, into), (source, to) = came, sent
        self._meter[tag] += (to.numel - to.splits[self._transport.rank]) * source.element_size()
        work = self._transport.all_to_all(output, source, into.splits, to.splits, tag=tag)
        bucket.works.append(work)

    def _gather(self, b: int, fill: Callable[[int], None]) -> None:
        bucket = self.buckets[b]
        with self._gathering[b]:
            fill(b)
            if not bucket.is_published:
                self._exchange(bucket, *bucket.gather)

    def _send_on(self, b: int, *, to_the_end: bool = False) -> None:
        """Launch the next all-gather of a bucket's updates, if there is one, or all remaining."""
        if not 0 <= b < len(self.buckets):
            return
        bucket = self.buckets[b]
        while bucket.turns.sent < len(bucket.turns):
            with self._publishing:
                if bucket.turns.sent or not bucket.is_published:
                    self._meter.wait("scatter", bucket.works)
                if not bucket.turns.sent:
                    bucket.copies.run(self.copier)
                bucket.works += bucket.turns.send(self._transport.rank, self._gathers, self._meter)
            if not to_the_end:
                return

    def apply_pending(self, buckets: Sequence[int]) -> None:
        """Wait for the pending updates of these buckets, and apply them."""
        for b in buckets:
            if (apply := self._pending.pop(b, None)) is None:
                continue
            bucket = self.buckets[b]
            if bucket.turns.sent < len(bucket.turns):
                continue  # its step failed before all of it was sent
            with self._publishing:
                self._meter.wait("scatter", bucket.works)
            apply(b)

    @property
    def pending(self) -> tuple[int, ...]:
        """Buckets whose updates are still to be applied, in order."""
        return tuple(self._pending)
