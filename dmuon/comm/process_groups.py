"""The ranks of a mesh as replicas x shards x tensor-parallel ranks, their process groups, and the
ways in which ranks agree.

A matrix of the `dedicated` layout is owned at one place ``(replica, shard, tensor)``. In HSDP with
two replicas of three shards, owner ``o`` at (0, 1) has a *holder* ``h`` in the other replica::

              shard 0   shard 1   shard 2
    replica 0    .         o ------> .         weights go along rows before a module runs,
    replica 1    .         h ------> .         gradients come back along them, then along the
                           ^                   column; the update goes down the column once a step
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.comm.transport import GivenTransport, Meter, Transport
from dmuon.scheduler.topology import Topology
from dmuon.types import ConsensusError, OwnershipError, first_of, grouped

T = TypeVar("T")

NewGroup = Callable[[Sequence[Sequence[int]]], Transport]  # see `Transport.subgroup`


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh arranged by place: ``ranks`` are row-major in (replica, shard, tensor).

    >>> Grid.of(Topology((2, 3), ("replicate", "shard"), 6)).place(4)
    (1, 1, 0)
    """

    shape: tuple[int, int, int]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, tensor_axes: Collection[str] = ()) -> Grid:
        """Make a grid: the last axis without tensor parallelism shards, axes before it replicate.

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
        """Return the (replica, shard, tensor) of a mesh rank."""
        _, shards, tensors = self.shape
        index = self.ranks.index(rank)
        return index // (shards * tensors), index // tensors % shards, index % tensors

    def rank_at(self, replica: int, shard: int, tensor: int) -> int:
        _, shards, tensors = self.shape
        return self.ranks[(replica * shards + shard) * tensors + tensor]

    def along(self, dims: Collection[int], rank: int) -> tuple[int, ...]:
        """Return mesh ranks, row-major, whose places differ from that of ``rank`` only in ``dims``
        of (replica, shard, tensor).

        >>> Grid.of(Topology((2, 3), ("replicate", "shard"), 6)).along({0}, 4)
        (1, 4)
        """
        place = self.place(rank)
        ranges = [range(n) if d in dims else (place[d],) for d, n in enumerate(self.shape)]
        return tuple(self.rank_at(*at) for at in product(*ranges))


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """A transport for each purpose, so that the order in one never depends on another. ``meter``
    counts the bytes sent in all of them."""

    world: Transport  # flags, norms, planning
    weights: Transport  # materialization along shards
    gradients: Transport  # reduction along shards
    replicas: Transport  # second level of reduction, and publishing
    tensors: Transport  # gather and scatter among tensor-parallel ranks
    data: Transport  # all-reduce of AdamW parameters' gradients
    meter: Meter = field(default_factory=Meter)

    @classmethod
    def flat(cls, world: Transport) -> ProcessGroups:
        """Use one transport for all purposes: every rank is a data-parallel rank of its own."""
        return cls(world, world, world, world, world, world)

    @classmethod
    def open(cls, grid: Grid, world: Transport, new_group: NewGroup) -> ProcessGroups:
        """Open the groups of this rank; a collective call of all ranks of the mesh."""
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


class Stages:
    """One rank of each pipeline stage, which skip steps together: `dmuon.Muon`'s
    ``nonfinite_group``."""

    def __init__(self, group: object) -> None:
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise TypeError(
                "nonfinite_group must be a process group that has this rank, or a DeviceMesh of "
                f'one axis, such as mesh["pp"], found {group!r}'
            )
        self.ranks = dist.get_process_group_ranks(group)
        # Stages may have made different numbers of groups, and torch could not match a new one.
        self.transport = GivenTransport(group)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        self.transport.all_reduce(tensor, tag="nonfinite_group", maximum=maximum).wait()

    def check(self, transports: Sequence[Transport]) -> None:
        """Raise OwnershipError unless this is the only rank of its meshes in the group; a
        collective call of these meshes."""
        meshes = [set(transport.gather_objects(dist.get_rank())) for transport in transports]

        def alone() -> None:
            if any(len(shared := mesh.intersection(self.ranks)) > 1 for mesh in meshes):
                raise OwnershipError(
                    f"nonfinite_group has the ranks {sorted(shared)}, which train one stage and "
                    "skip together anyway: pass a group with one rank of each pipeline stage, such "
                    'as mesh["pp"]'
                )

        attempt_in_all(transports, alone)


@torch.no_grad()
def start_from_first(tensors: Iterable[tuple[Tensor, Transport]]) -> None:
    """Copy the first rank's values to all, as DDP does, for pairs (local tensor, its sharers)."""
    works = []
    for tensor, transport in tensors:
        data = tensor.detach()
        whole = data.contiguous()
        works.append((transport.broadcast(whole, 0, tag="initial weights"), data, whole))
    for work, data, whole in works:
        work.wait()
        if whole is not data:
            data.copy_(whole)


# ---- the state of torch.distributed ------------------------------------------------------


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def check_launched(caller: str) -> None:
    """Raise OwnershipError if a launcher started several processes without a process group:
    ``WORLD_SIZE``, which torchrun sets, is then greater than 1."""
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
    """Raise OwnershipError if a plan was made before this process joined the others."""
    alone = any(type(transport) is Transport for transport in transports)
    if alone and is_initialized() and dist.get_world_size() > 1:
        raise OwnershipError(
            "dmuon.Muon: the model was dedicated in a world of one process, before "
            f"torch.distributed was initialized with {dist.get_world_size()} processes. Call "
            "torch.distributed.init_process_group() before dmuon.dedicate_params"
        )


# ---- agreement: solve once, compare, and fail together ------------------------------------


def attempt_in_all(
    transports: Sequence[Transport],
    work: Callable[[], T],
    *,
    what: str = "dmuon.Muon",
    digest: Callable[[T], str] = lambda _: "",
) -> T:
    """Run ``work`` on every rank, exchange outcomes once in each mesh, succeed or fail together.

    A rank whose ``work`` raised raises that error again, the others a ConsensusError that quotes
    it. All ranks raise if ``digest``, the result in lines, differs between ranks of a mesh.
    """
    value, error = _outcome(work)
    text = digest(value) if transports and error is None else ""  # type: ignore[arg-type]
    for transport in transports:
        _, failure = _outcome(lambda: _compare(transport, what, text, error))  # noqa: B023
        error = error or failure
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _compare(transport: Transport, what: str, text: str, error: Exception | None) -> None:
    """Raise ConsensusError, on every rank, with the first error, or the differing lines."""
    failure_text = None if error is None else f"{type(error).__name__}: {error}"
    reports = transport.gather_objects((failure_text, hashlib.sha256(text.encode()).hexdigest()))
    for rank, (failure, _) in enumerate(reports):
        if failure is not None:
            raise ConsensusError(f"{what} failed on rank {rank}: {failure}")
    if len(set(reports)) == 1:
        return
    ours, theirs = text.splitlines(), transport.broadcast_object(text, 0).splitlines()
    even = len(ours) == len(theirs)
    both = zip([*ours, "(nothing)"], [*theirs, "(nothing)"])
    # A line missing on one side shifts all lines after it.
    pairs = [(repr(a), repr(b)) for a, b in both if a != b][: None if even else 1]
    everyone = transport.gather_objects(tuple(map(first_of, zip(*pairs))))
    mine, firsts = next(found for found in everyone if found)
    ranks = [rank for rank, found in enumerate(everyone) if found and found[0] == mine]
    raise ConsensusError(
        f"{what}: ranks disagree: {_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {mine} "
        f"where rank 0 has {firsts}. Build the same model with the same arguments on every rank, "
        "or plan each pipeline stage on its own ranks: dmuon.dedicate_params(stage, mesh)"
    )


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # of any kind: a rank that dies alone would hang the others
        return None, error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {first_of([*map(str, ranks)])}"


def different(values: Sequence[Mapping[str, str]]) -> str:
    """Describe the differences between the values of ranks, by name; "" if there are none.

    >>> different([{"lr": "1.0", "eps": "0.1"}, {"lr": "1.0", "eps": "0.2"}])
    'eps is 0.1 on rank 0, 0.2 on rank 1'
    """
    found = []
    for name in dict.fromkeys(name for each in values for name in each):
        where = grouped((each.get(name, "missing"), rank) for rank, each in enumerate(values))
        if len(where) > 1:
            places = [f"{value} on {_ranks(ranks)}" for value, ranks in where.items()]
            found.append(f"{name} is {first_of(places)}")
    return first_of(found, 8)


def solve_on_first(transport: Transport, solve: Callable[[], str]) -> str:
    """Run ``solve`` on the first rank and send its text to all; ConsensusError if it raised."""
    text = attempt_in_all([transport], solve if transport.rank == 0 else str, what="planning")
    return transport.broadcast_object(text, 0)  # type: ignore[no-any-return]
