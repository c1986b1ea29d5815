"""Where a distributed parameter lies: the only file that looks at `DTensor` metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon.scheduler.shards import LocalShard
from dmuon.scheduler.specs import dtype_name
from dmuon.types import OwnershipError

__all__ = [
    "LayoutStamp",
    "compute_device",
    "covering_mesh",
    "gradient_like",
    "is_distributed",
    "layout_stamp",
    "local_cell",
    "local_shard",
    "local_tensor",
    "mesh_axes",
    "whole_tensor",
]


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a `DTensor`."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that is stored here, detached; a plain tensor's whole."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        with torch.no_grad():  # with gradients it would make an autograd node
            tensor = tensor.to_local()
    return tensor.detach()


def local_cell(tensor: Tensor) -> Tensor:
    """The tensor whose data is what this rank stores: ``tensor``, or what is inside a `DTensor`.

    Not a public name: `DTensor.to_local` gives a new tensor, and what is assigned to its data does
    not reach the parameter.
    """
    inner: Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner


def mesh_axes(tensor: Tensor) -> tuple[str, ...]:
    """The names of the mesh axes that a `DTensor` lies on; none for a plain tensor."""
    if not is_distributed(tensor):
        return ()
    mesh: DeviceMesh = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The full tensor on every rank, detached; a collective call for a `DTensor`."""
    from torch.distributed.tensor import DTensor

    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


@dataclass(frozen=True, slots=True)
class LayoutStamp:
    """How a parameter lies at one moment: compared at every step, so it holds what is cheap."""

    placements: Any  # None for a plain tensor
    mesh: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def fits(self, parameter: Tensor) -> bool:
        """Whether the parameter still lies in this way."""
        if parameter.shape != self.shape or parameter.dtype is not self.dtype:
            return False
        if parameter.device != self.device:
            return False
        placements = getattr(parameter, "placements", None)
        if placements is None or self.placements is None:
            return placements is self.placements
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        same_mesh = mesh is self.mesh or mesh == self.mesh
        return same_mesh and (placements is self.placements or placements == self.placements)

    def __str__(self) -> str:
        where = "plain" if self.placements is None else f"{self.placements} on {self.mesh}"
        return f"{list(self.shape)} {dtype_name(self.dtype)} on {self.device}, {where}"


def layout_stamp(parameter: Tensor) -> LayoutStamp:
    """How ``parameter`` lies now."""
    distributed = is_distributed(parameter)
    return LayoutStamp(
        parameter.placements if distributed else None,  # type: ignore[attr-defined]
        parameter.device_mesh if distributed else None,  # type: ignore[attr-defined]
        parameter.shape,
        parameter.dtype,
        parameter.device,
    )


def gradient_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """``grad`` with the placements of its parameter.

    Autograd may leave a gradient `Partial` (a gain under sequence parallelism); making it whole is
    a collective over the parameter's mesh, which every optimizer on `DTensor` issues.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
        return grad
    if grad.placements is parameter.placements or grad.placements == parameter.placements:
        return grad
    return grad.redistribute(parameter.device_mesh, parameter.placements)


def local_shard(name: str, parameter: Tensor, rank: int) -> LocalShard:
    """The box of ``parameter`` that this process, global rank ``rank``, holds.

    Raises:
        OwnershipError: the parameter is `Partial`, lies on a mesh without this rank, or its local
            tensor is not what its placements say.
    """
    from torch.distributed.tensor import DTensor

    # Not a public name; the only place where strided, uneven and empty shards are worked out.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return LocalShard((rank,), (), (0,) * parameter.ndim, tuple(parameter.shape))
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OwnershipError(
            f"parameter {name!r} lies on mesh {mesh}, which this process (rank {rank}) is no part "
            "of: build each rank's model from meshes that contain the rank"
        )
    if any(p.is_partial() for p in placements):
        raise OwnershipError(
            f"parameter {name!r} has placements {tuple(placements)}: a Partial parameter has no "
            "values of its own. Redistribute it to Shard or Replicate before dmuon.dedicate_params"
        )
    box = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    shape, offset = (tuple(map(int, numbers)) for numbers in box)
    found = tuple(parameter.to_local().shape)
    if math.prod(found) != math.prod(shape) or (0 not in shape and found != shape):
        raise OwnershipError(
            f"parameter {name!r} of shape {list(parameter.shape)} stores {list(found)} here, but "
            f"its placements {tuple(placements)} on mesh {tuple(mesh.shape)} say {list(shape)}: "
            "shard it with fully_shard, parallelize_module or distribute_tensor"
        )
    replica = tuple(c for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    return LocalShard(ranks, replica, offset, found)


def compute_device(parameters: Sequence[Tensor]) -> torch.device:
    """Where Newton-Schulz runs: the parameters' device, or with CPU offload their mesh's."""
    from torch.distributed.tensor import DTensor

    device = parameters[0].device
    for p in parameters:
        if isinstance(p, DTensor) and p.device_mesh.device_type != device.type:
            return torch.device(p.device_mesh.device_type, torch.accelerator.current_device_index())
    return device


def covering_mesh(named: list[tuple[str, nn.Parameter]]) -> DeviceMesh | None:
    """The mesh of a parameter that contains every other parameter's; None without a `DTensor`.

    Of several with the same ranks the one with the most axes, then the first.

    Raises:
        OwnershipError: no mesh contains all.
    """
    from torch.distributed.tensor import DTensor

    meshes = [(name, p.device_mesh) for name, p in named if isinstance(p, DTensor)]
    if not meshes:
        return None
    largest = max(meshes, key=lambda m: (m[1].size(), m[1].ndim))[1]
    inside = set(largest.mesh.flatten().tolist())
    for name, mesh in meshes:
        if not set(mesh.mesh.flatten().tolist()) <= inside:
            raise OwnershipError(
                f"parameter {name!r} lies on mesh {mesh}, which is no part of the largest mesh of "
                f"this model, {largest}: pass the mesh of all its ranks, "
                "dmuon.dedicate_params(model, mesh)"
            )
    return largest
