"""The ranks of a mesh as replicas x shards x tensor-parallel ranks, and the lanes through them.

A matrix of the `dedicated` layout is owned at one place ``(replica, shard, tensor)``. HSDP, two
replicas of three shards, owner ``o`` at (0, 1), its *holder* ``h`` in the other replica::

              shard 0   shard 1   shard 2
    replica 0    .         o ------> .         weights go along rows before a module runs,
    replica 1    .         h ------> .         gradients come back along them, then along the
                           ^                   column; the update goes down the column once a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product

from dmuon.comm.transport import Transport
from dmuon.scheduler.topology import Topology

__all__ = ["Grid", "Lanes", "NewLane", "open_lanes"]


@dataclass(frozen=True, slots=True)
class Grid:
    """``ranks`` are the mesh ranks of all places, row-major in (replica, shard, tensor).

    >>> Grid.of(Topology((2, 3), ("replicate", "shard"), 6)).place(4)
    (1, 1, 0)
    """

    shape: tuple[int, int, int]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, tensor_axes: Collection[str] = ()) -> Grid:
        """The last axis without tensor parallelism shards, the ones before it replicate.

        >>> Grid.of(Topology((2, 2), ("tp", "dp"), 4), ["tp"]).ranks
        (0, 2, 1, 3)
        """
        data = [i for i, axis in enumerate(topology.axes) if axis not in tensor_axes]
        tensor = [i for i, axis in enumerate(topology.axes) if axis in tensor_axes]
        order = (*data, *tensor)
        strides = [math.prod(topology.shape[i + 1 :]) for i in range(len(topology.shape))]
        sizes = [topology.shape[i] for i in order]
        ranks = tuple(
            sum(c * strides[i] for c, i in zip(where, order, strict=True))
            for where in product(*map(range, sizes))
        )
        replicas = math.prod(topology.shape[i] for i in data[:-1])
        shards = topology.shape[data[-1]] if data else 1
        return cls((replicas, shards, math.prod(topology.shape[i] for i in tensor)), ranks)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(replica, shard, tensor) of a mesh rank."""
        _, shards, tensors = self.shape
        index = self.ranks.index(rank)
        return index // (shards * tensors), index // tensors % shards, index % tensors

    def rank_at(self, replica: int, shard: int, tensor: int) -> int:
        """The mesh rank at a place."""
        _, shards, tensors = self.shape
        return self.ranks[(replica * shards + shard) * tensors + tensor]

    @property
    def data_ranks(self) -> int:
        """How many different batches there are."""
        return self.shape[0] * self.shape[1]

    def along_shards(self, rank: int) -> tuple[int, ...]:
        """The mesh ranks of this rank's replica that have its tensor coordinate, by shard."""
        r, _, t = self.place(rank)
        return tuple(self.rank_at(r, s, t) for s in range(self.shape[1]))

    def along_replicas(self, rank: int) -> tuple[int, ...]:
        """The mesh ranks at this rank's shard and tensor coordinate, by replica."""
        _, s, t = self.place(rank)
        return tuple(self.rank_at(r, s, t) for r in range(self.shape[0]))

    def along_tensors(self, rank: int) -> tuple[int, ...]:
        """The mesh ranks that share this rank's replica and shard coordinates, by tensor."""
        r, s, _ = self.place(rank)
        return tuple(self.rank_at(r, s, t) for t in range(self.shape[2]))

    def along_data(self, rank: int) -> tuple[int, ...]:
        """The mesh ranks with this rank's tensor coordinate, by (replica, shard)."""
        _, _, t = self.place(rank)
        return tuple(
            self.rank_at(r, s, t) for r, s in product(range(self.shape[0]), range(self.shape[1]))
        )


@dataclass(frozen=True, slots=True)
class Lanes:
    """One process group a purpose, so that the order in one never depends on another.

    ``world``: flags, norms, planning. ``weights``: materialization along shards. ``gradients``:
    reduction along shards. ``replicas``: second level of reduction, and publishing. ``tensors``:
    gathering and scattering among tensor-parallel ranks. ``data``: the all-reduced rest.
    """

    world: Transport
    weights: Transport
    gradients: Transport
    replicas: Transport
    tensors: Transport
    data: Transport

    def close(self) -> None:
        """Release each transport, every one once."""
        everyone = (
            self.weights, self.gradients, self.replicas, self.tensors, self.data, self.world,
        )  # fmt: skip
        for transport in {id(t): t for t in everyone}.values():
            transport.close()


# Makes a transport over the lane with this rank of a partition of the mesh's ranks.
NewLane = Callable[[Sequence[tuple[int, ...]]], Transport]


def open_lanes(grid: Grid, world: Transport, new_lane: NewLane) -> Lanes:
    """The lanes of this rank; a collective call of all ranks of the mesh."""
    replicas, _, tensors = grid.shape

    def along(lane_of: Callable[[int], tuple[int, ...]]) -> Transport:
        return new_lane(sorted({lane_of(rank) for rank in range(world.world)}))

    flat = replicas == 1 and tensors == 1
    weights = along(grid.along_shards)
    gradients = world if flat else along(grid.along_shards)
    across = gradients if replicas == 1 else along(grid.along_replicas)
    within = world if tensors == 1 else along(grid.along_tensors)
    data = gradients if replicas == 1 else along(grid.along_data)
    return Lanes(world, weights, gradients, across, within, data)
