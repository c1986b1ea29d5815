"""The ranks of a mesh as replicas x shards x tensor-parallel ranks, and the process groups of each.

A matrix of the `dedicated` layout is owned at one place ``(replica, shard, tensor)``. HSDP, two
replicas of three shards, owner ``o`` at (0, 1), its *holder* ``h`` in the other replica::

              shard 0   shard 1   shard 2
    replica 0    .         o ------> .         weights go along rows before a module runs,
    replica 1    .         h ------> .         gradients come back along them, then along the
                           ^                   column; the update goes down the column once a step
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dmuon.comm.transport import Meter, Transport
from dmuon.scheduler.topology import Topology
from dmuon.types import OwnershipError

NewGroup = Callable[[Sequence[Sequence[int]]], Transport]  # as `Transport.subgroup`


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
        shape = topology.shape
        data = [i for i, axis in enumerate(topology.axes) if axis not in tensor_axes]
        order = data + [i for i, axis in enumerate(topology.axes) if axis in tensor_axes]
        ranks = tuple(np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel().tolist())
        replicas = math.prod(shape[i] for i in data[:-1])
        shards = shape[data[-1]] if data else 1
        return cls((replicas, shards, len(ranks) // (replicas * shards)), ranks)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(replica, shard, tensor) of a mesh rank."""
        _, shards, tensors = self.shape
        index = self.ranks.index(rank)
        return index // (shards * tensors), index // tensors % shards, index % tensors

    def rank_at(self, replica: int, shard: int, tensor: int) -> int:
        _, shards, tensors = self.shape
        return self.ranks[(replica * shards + shard) * tensors + tensor]

    def along(self, dims: Collection[int], rank: int) -> tuple[int, ...]:
        """The mesh ranks whose places differ from that of ``rank`` in ``dims`` of (replica, shard,
        tensor) only, row-major.

        >>> Grid.of(Topology((2, 3), ("replicate", "shard"), 6)).along({0}, 4)
        (1, 4)
        """
        place = self.place(rank)
        ranges = [range(n) if d in dims else (place[d],) for d, n in enumerate(self.shape)]
        return tuple(self.rank_at(*at) for at in product(*ranges))


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """A transport for each purpose, so that the order in one never depends on another. ``meter``
    counts what is sent in any of them."""

    world: Transport  # flags, norms, planning
    weights: Transport  # materialization along shards
    gradients: Transport  # reduction along shards
    replicas: Transport  # second level of reduction, and publishing
    tensors: Transport  # gathering and scattering among tensor-parallel ranks
    data: Transport  # the all-reduction of adamw parameters' gradients
    meter: Meter = field(default_factory=Meter)

    @classmethod
    def flat(cls, world: Transport) -> ProcessGroups:
        """One transport for all purposes: every rank is a data-parallel rank of its own."""
        return cls(world, world, world, world, world, world)

    @classmethod
    def open(cls, grid: Grid, world: Transport, new_group: NewGroup) -> ProcessGroups:
        """The groups of this rank; a collective call of all ranks of the mesh."""
        replicas, _, tensors = grid.shape

        def along(*dims: int) -> Transport:
            return new_group(sorted({grid.along(dims, rank) for rank in range(world.world)}))

        weights = along(1)
        gradients = world if replicas == tensors == 1 else along(1)
        across = gradients if replicas == 1 else along(0)
        within = world if tensors == 1 else along(2)
        data = gradients if replicas == 1 else along(0, 1)
        return cls(world, weights, gradients, across, within, data)

    @property
    def failed(self) -> bool:
        return any(transport.failed for transport in self._all)

    @property
    def _all(self) -> list[Transport]:
        used = (self.weights, self.gradients, self.replicas, self.tensors, self.data, self.world)
        return list({id(t): t for t in used}.values())

    def close(self) -> None:
        for transport in self._all:
            transport.close()


@torch.no_grad()
def start_from_first(tensors: Iterable[tuple[Tensor, Transport]]) -> None:
    """Give every rank the first one's values, as DDP does: (what is stored here, who shares it)."""
    works = []
    for tensor, transport in tensors:
        data = tensor.detach()
        whole = data.contiguous()
        works.append((transport.broadcast(whole, 0, tag="initial weights"), data, whole))
    for work, data, whole in works:
        work.wait()
        if whole is not data:
            data.copy_(whole)


# ---- what torch.distributed knows --------------------------------------------------------


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def check_launched(caller: str) -> None:
    """Raise OwnershipError if a launcher started several processes and they do not know each other.
    Only where there is no process group is ``WORLD_SIZE`` read, which torchrun sets."""
    if is_initialized():
        return
    text = os.environ.get("WORLD_SIZE")
    try:
        world = int(text or 1)
    except ValueError:
        raise OwnershipError(
            f"{caller}: the environment variable WORLD_SIZE={text!r} must be the number of "
            "processes that train together: correct it, or unset it to train in this process alone"
        ) from None
    if world > 1:
        raise OwnershipError(
            f"{caller}: the environment says WORLD_SIZE={world} (torchrun sets it), but "
            "torch.distributed is not initialized, so each process would train a model of its own. "
            "Call torch.distributed.init_process_group() before dmuon, or unset WORLD_SIZE"
        )


def check_planned_together(transports: Sequence[Transport]) -> None:
    """Raise OwnershipError if a plan was made before this process got to know the others."""
    alone = any(type(transport) is Transport for transport in transports)
    if alone and is_initialized() and dist.get_world_size() > 1:
        raise OwnershipError(
            "dmuon.Muon: the model was dedicated in a world of one process, before "
            f"torch.distributed was initialized, which knows {dist.get_world_size()} now. Call "
            "torch.distributed.init_process_group() before dmuon.dedicate_params"
        )
