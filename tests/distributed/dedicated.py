"""Helpers for tests of the `dedicated` layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.api import Request, assemble, group_maker, mesh_topology
from dmuon.comm.transport import C10dTransport, Transport
from dmuon.config import PlannerOptions
from dmuon.dtensors import whole_tensor
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.topology import Topology
from tests.transports import Event, RecordingTransport

MUON = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}


def mesh_of(shape: Sequence[int], axes: Sequence[str] | None = None) -> DeviceMesh:
    names = axes or (("replicate", "shard") if len(shape) == 2 else ("dp",))
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def shard_rest(model: nn.Module, own: dmuon.Ownership, mesh: DeviceMesh) -> None:
    """FSDP2 on everything that dmuon does not keep: the blocks, then the root."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, ignored_params=own.dedicated_params)
    fully_shard(model, mesh=mesh, ignored_params=own.dedicated_params)


def whole(model: nn.Module, own: dmuon.Ownership) -> dict[str, Tensor]:
    """Copies of the full weights; a collective call."""
    with own.materialized(model):
        return {n: whole_tensor(p).clone() for n, p in trainable_parameters(model)}


def recorded(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    wrapper: Callable[..., Any] = RecordingTransport,
    **kwargs: Any,
) -> tuple[dmuon.Ownership, list[Event]]:
    """`dedicate_params` whose process groups all note their collectives in one list."""
    world = C10dTransport(list(range(dist.get_world_size())))
    first = wrapper(world)

    make = group_maker(mesh, world.world, None)

    def new_group(partition: Sequence[tuple[int, ...]]) -> Transport:
        return wrapper(make(partition), events=first.events)

    own = assemble(
        model,
        Request(layout="dedicated", **kwargs),
        first,
        lambda: (
            Topology.flat(world.world)
            if mesh is None
            else mesh_topology(mesh, world.world, model, PlannerOptions())
        ),
        new_group,
    )
    return own, first.events
