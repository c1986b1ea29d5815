"""From a plan and a shard map to what every rank sends and receives: pure data.

::

    gather     holders of the owner's replica ---pieces---> owner          (all-to-all)
    scatter    owner ---pieces of the update---> the same holders          (all-to-all, mirrored)
    replicate  each of these ---its piece---> the ranks with equal shards  (all-to-all, HSDP only)

A *bucket* is what travels together. Within a message, pieces follow each other in the order of the
bucket's units and of the matrices in a unit, so sender and receiver need no header.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.comm.routes import Unit
from dmuon.scheduler.shards import Box, ShardMap

__all__ = ["BucketRoute", "Part", "bucket_route", "wire_elements"]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a matrix in a flat buffer, from element ``start`` on.

    ``unit`` and ``position`` say which matrix it is of, ``box`` which part of the matrix.
    """

    unit: int
    position: int
    matrix: int
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class Message:
    """Parts in the order of the buffer, and how many elements each rank sends or receives."""

    parts: tuple[Part, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class BucketRoute:
    """One rank's view of a bucket.

    ``held``: this rank's pieces, by owner; what it sends in the gather and receives in the
    scatter. ``owned``: all pieces of the matrices that it owns, by holder. ``copies_out`` and
    ``copies_in``: its pieces of updates, by the rank that they go to or come from, along the axes
    that replicate. ``replicates`` is the same on every rank: whether anyone copies.
    """

    units: tuple[int, ...]  # owned here
    held: Message
    owned: Message
    copies_out: Message
    copies_in: Message
    replicates: bool

    @property
    def received(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The pieces of updates that arrive here: in the scatter, and as copies."""
        return self.held.parts, self.copies_in.parts


class _Packing:
    """Collects parts by peer and lays them out one after the other."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._by_peer: dict[int, list[tuple[int, int, int, Box]]] = defaultdict(list)

    def add(self, peer: int, unit: int, position: int, matrix: int, box: Box) -> None:
        self._by_peer[peer].append((unit, position, matrix, box))

    def message(self) -> Message:
        parts, splits, start = [], [0] * self._world, 0
        for peer in sorted(self._by_peer):
            for unit, position, matrix, box in self._by_peer[peer]:
                parts.append(Part(unit, position, matrix, box, start))
                start += box.numel
                splits[peer] += box.numel
        return Message(tuple(parts), tuple(splits))


def bucket_route(
    shards: ShardMap, units: Sequence[Unit], bucket: Sequence[int], rank: int
) -> BucketRoute:
    """What ``rank`` sends and receives for a bucket."""
    held, owned = _Packing(shards.world), _Packing(shards.world)
    out, into = _Packing(shards.world), _Packing(shards.world)
    replicates = False
    for u in bucket:
        owner = units[u].owner
        for k, i in enumerate(units[u].matrices):
            home = shards.replica_of(i, owner)
            if owner == rank:
                for piece in shards.pieces(i):
                    if piece.replica == home:
                        owned.add(piece.rank, u, k, i, piece.box)
            mine = shards.piece(i, rank)
            at_home = mine.replica == home
            if mine.numel and at_home:
                held.add(owner, u, k, i, mine.box)
            replicates = replicates or shards.is_replicated(i)
            if mine.numel and shards.is_replicated(i):
                for peer, replica in shards.partners(i, rank):
                    if at_home:
                        out.add(peer, u, k, i, mine.box)
                    elif replica == home:
                        into.add(peer, u, k, i, mine.box)
    own = tuple(u for u in bucket if units[u].owner == rank)
    return BucketRoute(
        own, held.message(), owned.message(), out.message(), into.message(), replicates
    )


def wire_elements(shards: ShardMap, units: Sequence[Unit], wire: Sequence[int]) -> dict[str, int]:
    """Elements that all ranks together send in a full step, what stays on a rank left out.

    By purpose. On a flat mesh of W ranks and evenly sharded matrices of P elements "gather" and
    "scatter" are ``P (W-1)/W`` each; with R replicas of S shards ``P (S-1)/S`` each, and
    "replicate" is ``P (R-1)``.
    """
    total = {"gather": 0, "scatter": 0, "replicate": 0}
    for u in wire:
        owner = units[u].owner
        for i in units[u].matrices:
            home = shards.replica_of(i, owner)
            for piece in shards.pieces(i):
                if piece.replica != home:
                    total["replicate"] += piece.numel
                elif piece.rank != owner:
                    total["gather"] += piece.numel
                    total["scatter"] += piece.numel
    return total
