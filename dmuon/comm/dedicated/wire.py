"""Traffic of the `dedicated` layout besides weights for forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import groupby

from torch import Tensor

from dmuon.comm.dedicated.homes import Group
from dmuon.comm.dedicated.routes import Range, Slices
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.routes import EVERYONE, Pack
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.comm.windows import LivePack

__all__ = ["GridWire", "Publisher"]


class _Relay:
    """A reduction along shards, and where it ends the ones along replicas that follow it.

    `advance` launches these. It waits for the first level, and which rank has finished that is a
    matter of time; so it may be called at a fixed place only.
    """

    def __init__(
        self, first: Work, second: Sequence[tuple[Tensor, int]], transport: Transport, meter: Meter
    ) -> None:
        self._first = first
        self._second = second
        self._transport = transport
        self._meter = meter
        self._works: list[Work] | None = None

    def advance(self) -> None:
        self._first.wait()
        self._works = []
        for tensor, replica in self._second:
            self._meter.add("gradients across replicas", tensor)
            tag = "gradients across replicas"
            self._works.append(self._transport.reduce(tensor, replica, tag=tag))

    def wait(self) -> None:
        assert self._works is not None, "waited for before the end of the round"
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return self._works is not None and all(work.is_completed() for work in self._works)


class GridWire:
    """Gradients to the shard coordinate of their owner, and at the end of a round to its replica.

    Between the two an owner's column holds what it has summed: as much as it keeps of the weights.
    """

    def __init__(
        self, process_groups: ProcessGroups, slices: Slices, replica: int, shard: int, meter: Meter
    ) -> None:
        self.scale = 1.0 / slices.grid.data_ranks
        self._process_groups = process_groups
        self._slices = slices
        self._replica = replica
        self._shard = shard
        self._meter = meter
        self._several = slices.grid.shape[0] > 1
        self._relays: list[_Relay] = []

    def is_mine(self, pack: Pack) -> bool:
        return pack.owner == self._shard

    def send(self, live: LivePack) -> Work:
        if live.pack.owner == EVERYONE:
            return self._process_groups.data.all_reduce(live.buffer, tag="rest")
        work = self._process_groups.gradients.reduce(live.buffer, live.pack.owner, tag="gradients")
        if not self._several or live.pack.owner != self._shard:
            return work
        relay = _Relay(
            work, list(self._by_replica(live)), self._process_groups.replicas, self._meter
        )
        self._relays.append(relay)
        return relay

    def end_round(self) -> None:
        # In the order of the first level, which is the same on all ranks of the column.
        for relay in self._relays:
            relay.advance()
        self._relays = []

    def _by_replica(self, live: LivePack) -> Iterator[tuple[Tensor, int]]:
        start = 0
        spans = [(self._slices.owner_place(s.matrices[0])[0], s.numel) for s in live.pack.spans]
        for replica, members in groupby(spans, lambda s: s[0]):
            numel = sum(n for _, n in members)
            yield live.buffer.narrow(0, start, numel), replica
            start += numel

    def all_reduce_flags(self, flags: Tensor) -> Work:
        return self._process_groups.world.all_reduce(flags, tag="flags", maximum=True)


class Publisher:
    """Once a step, weights from their owners to the holders in the other replicas."""

    def __init__(
        self, transport: Transport, meter: Meter, replica: int, shard: int, replicas: int
    ) -> None:
        self._transport = transport
        self._meter = meter
        self._replica = replica
        self._shard = shard
        self._several = replicas > 1
        self._order: list[tuple[Group, Range, Tensor, frozenset[int]]] = []
        self._next = 0
        self._pending: dict[int, list[Work]] = {}  # by id of the group

    def plan(self, groups: Sequence[Group]) -> None:
        """Fix what is published, in the order in which the next forward pass needs it."""
        self._order = []
        for group in groups if self._several else ():
            for live in group.carriers:
                for piece in live.carrier.publishes:
                    if piece.shard != self._shard:
                        continue
                    matrices = frozenset(
                        part.matrix
                        for run, start in live.carrier.runs
                        if piece.start <= start < piece.start + piece.numel
                        for part in run.parts
                    )
                    stored = live.stored(piece.start, piece.numel)
                    self._order.append((group, piece, stored, matrices))

    def begin(self) -> None:
        """Weights are about to change."""
        self.wait()
        self._next = 0

    def launch_ready(self, todo: Set[int]) -> None:
        """Publish, in the fixed order, up to the first range with a matrix of ``todo``."""
        while self._next < len(self._order):
            group, piece, stored, matrices = self._order[self._next]
            if piece.replica == self._replica and not matrices.isdisjoint(todo):
                return
            self._meter.add("weights to holders", stored)
            tag = f"publish {group.name}"
            work = self._transport.broadcast(stored, piece.replica, tag=tag)
            self._pending.setdefault(id(group), []).append(work)
            self._next += 1

    def publish_all(self) -> None:
        """Publish everything, as it is."""
        self.begin()
        self.launch_ready(frozenset())

    def wait_for(self, group: Group) -> None:
        """Have what was published of a group."""
        for work in self._pending.pop(id(group), ()):
            work.wait()

    def wait(self) -> None:
        for works in self._pending.values():
            for work in works:
                work.wait()
        self._pending.clear()
