"""The ranks that plan and train together: their transport, and where they sit."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.process_groups import NewGroup
from dmuon.comm.transport import C10dTransport, LocalTransport, Transport
from dmuon.config import PlannerOptions
from dmuon.dtensors import compute_device, mesh_axes
from dmuon.scheduler.topology import Topology, local_world_size
from dmuon.types import OwnershipError

__all__ = [
    "check_launched",
    "check_planned_together",
    "group_maker",
    "make_transport",
    "mesh_device",
    "mesh_topology",
    "tensor_axes",
]


def check_launched(caller: str) -> None:
    """Raise OwnershipError if a launcher started several processes and they do not know each other.

    Each would train a model of its own. ``WORLD_SIZE``, which torchrun sets for all of them, is
    read only where there is no process group.
    """
    if dist.is_available() and dist.is_initialized():
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
            "Call torch.distributed.init_process_group() before dmuon, or unset WORLD_SIZE to "
            "train in this process alone"
        )


def check_planned_together(transports: Sequence[Transport]) -> None:
    """Raise OwnershipError if a plan was made before this process got to know the others."""
    alone = any(isinstance(transport, LocalTransport) for transport in transports)
    if alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OwnershipError(
            "dmuon.Muon: the model was dedicated in a world of one process, before "
            f"torch.distributed was initialized, which knows {dist.get_world_size()} now, so each "
            "would train a model of its own. Call torch.distributed.init_process_group() before "
            "dmuon.dedicate_params"
        )


def group_maker(mesh: DeviceMesh | None, world: int, timeout_s: float | None) -> NewGroup:
    """Makes transports of their own over some of the mesh's ranks; collective calls of the mesh."""
    ranks = list(range(world)) if mesh is None else mesh.mesh.flatten().tolist()

    def new_group(partition: Sequence[tuple[int, ...]]) -> Transport:
        if not dist.is_available() or not dist.is_initialized():
            return LocalTransport()
        lanes = [[ranks[r] for r in lane] for lane in partition]
        mine = next(lane for lane in lanes if dist.get_rank() in lane)
        everyone = len(ranks) == dist.get_world_size()
        return C10dTransport(mine, timeout_s, lanes=lanes if everyone else None)

    return new_group


def tensor_axes(named: Sequence[tuple[str, nn.Parameter]]) -> frozenset[str]:
    """The mesh axes along which tensor parallelism has distributed parameters."""
    return frozenset(axis for _, p in named for axis in mesh_axes(p))


def mesh_device(topology: Topology, parameters: Sequence[nn.Parameter]) -> torch.device:
    """Where Newton-Schulz runs; for a model on the meta device, where its mesh lies."""
    device = compute_device(parameters)
    if device.type != "meta":
        return device
    if topology.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(topology.device_type, torch.accelerator.current_device_index())


def make_transport(
    mesh: DeviceMesh | None, ddp: DistributedDataParallel | None, timeout_s: float | None
) -> Transport:
    if not dist.is_available() or not dist.is_initialized():
        if mesh is not None:
            raise OwnershipError(
                "a mesh was given but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() first"
            )
        return LocalTransport()
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh or None, found {type(mesh).__name__}")
        return C10dTransport(mesh.mesh.flatten().tolist(), timeout_s)
    if ddp is not None:
        return C10dTransport(dist.get_process_group_ranks(ddp.process_group), timeout_s)
    return C10dTransport(list(range(dist.get_world_size())), timeout_s)


def mesh_topology(
    mesh: DeviceMesh | None, world: int, model: nn.Module, planner: PlannerOptions
) -> Topology:
    device = compute_device([p for p in model.parameters() if p.requires_grad])
    if mesh is not None and device.type == "meta":
        device = torch.device(mesh.device_type)
    elif mesh is None and device.type == "meta":
        accelerator = torch.accelerator.current_accelerator()
        device = torch.device("cpu") if accelerator is None else accelerator
    if mesh is not None and mesh.device_type != device.type:
        raise OwnershipError(
            f"the mesh is of {mesh.device_type!r} devices but the model is on {device}: move the "
            f"model to {mesh.device_type!r}, or make the mesh with "
            f"init_device_mesh({device.type!r}, ...)"
        )
    shape: tuple[int, ...] = (world,)
    axes: tuple[str, ...] = ("dp",)
    ranks = list(range(world))
    if mesh is not None:
        shape, ranks = tuple(mesh.shape), mesh.mesh.flatten().tolist()
        axes = tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))
    elif isinstance(model, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(model.process_group)
    # A mesh may be a part of all ranks, with gaps: its ranks lie where the launcher put them.
    per_node = planner.ranks_per_node
    if per_node is None and dist.is_available() and dist.is_initialized():
        per_node = local_world_size()
    nodes = [0 if per_node is None else rank // per_node for rank in ranks]
    return Topology.on_nodes(shape, axes, nodes, device.type)
