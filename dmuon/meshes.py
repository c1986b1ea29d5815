"""The ranks that plan and train together: their transport, and where they sit."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.transport import C10dTransport, LocalTransport, Transport
from dmuon.config import PlannerOptions
from dmuon.scheduler.dtensors import compute_device
from dmuon.scheduler.topology import Topology, local_world_size
from dmuon.types import OwnershipError

__all__ = ["make_transport", "mesh_topology"]


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
