"""The layout of distributed parameters; no other module reads `DTensor` metadata."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon import devices
from dmuon.scheduler.specs import Box, LocalShard, dtype_name
from dmuon.types import INTERLEAVED, OwnershipError

if TYPE_CHECKING:  # imported at run time only where needed, because it loads slowly
    from torch.distributed.tensor import DTensor

Named = Sequence[tuple[str, nn.Parameter]]


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def placed(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors whose shards have the same replicas."""
    return (tensor.device_mesh, tensor.placements) if is_distributed(tensor) else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` stored here, detached; all of a plain tensor."""
    if is_distributed(tensor):
        with torch.no_grad():  # with gradients this would make an autograd node
            tensor = tensor.to_local()
    return tensor.detach()


def stored_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor whose data this rank stores: ``tensor``, or the one inside a `DTensor`.
    Reads a private name: `DTensor.to_local` returns a new tensor, so an assignment to its data
    would not reach the parameter, and it costs twenty times as much."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank, detached; a collective call for a `DTensor`."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def distributed_as(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a `DTensor` placed as ``parameter`` with part ``local``; ``local`` for a plain one."""
    if not is_distributed(parameter):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    size, stride = parameter.shape, parameter.stride()
    return parameter.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def sharded_rows(local: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> Tensor:
    """Return a `DTensor` of this shape whose rows are consecutive over the ranks of a mesh of one
    axis, with this rank's part ``local``."""
    from torch.distributed.tensor import DTensor, Shard

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)


def local_rows(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor | None:
    """Return this rank's part of a tensor placed as by `sharded_rows`; None for other tensors."""
    stamp = LayoutStamp.of(tensor)
    if mesh is None or stamp.mesh != mesh or not stamp.placements[0].is_shard(0):
        return None
    return local_tensor(tensor)


def copy_state(target: Tensor, source: Tensor) -> None:
    """Copy a saved tensor of any placement into ``target``; a collective call if the placements
    differ."""
    if placed(target) == placed(source):
        source = local_tensor(source)
    else:
        source = whole_tensor(source)
        if is_distributed(target) and target.ndim:
            source = source[local_shard("state", target, dist.get_rank()).box.slices()]
    local_tensor(target).copy_(source)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the axes of a mesh, made up if it has none."""
    return tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim)))


def mesh_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of a `DTensor`'s mesh axes; none for a plain tensor."""
    return axis_names(tensor.device_mesh) if is_distributed(tensor) else ()


@dataclass(frozen=True, slots=True)
class LayoutStamp:
    """The layout of a tensor at one moment; equal stamps mean equal layouts."""

    placements: Any  # None for a plain tensor
    mesh: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> LayoutStamp:
        placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
        return cls(placements, mesh, tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        where = "plain" if self.placements is None else f"{self.placements} on {self.mesh}"
        return f"{list(self.shape)} {dtype_name(self.dtype)} on {self.device}, {where}"


class LocalParameters:
    """The local tensors of parameters, looked up again only if they have changed; ``version``
    counts the changes.

    CPU offload, `nn.Module.to`, or FSDP2 after loading a state dict may give a parameter another
    inner tensor, or that tensor other memory. The tensors here keep their memory alive, so the same
    tensor at the same address has the same memory, and views of it remain valid.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.parameters = list(parameters)
        self.version = 0
        self._names = list(names)
        self._stamps = [LayoutStamp.of(p) for p in parameters]
        self._are_plain = not any(map(is_distributed, parameters))
        self._look_up()

    def _stored(self) -> list[Any]:
        return self.parameters if self._are_plain else [*map(stored_tensor, self.parameters)]

    def _look_up(self) -> None:
        self._inner = [*self._stored()]
        self._addresses = [t.data_ptr() for t in self._inner]
        self.tensors = [t.detach() for t in self._inner]

    def check(self) -> None:
        """Check again, at every step; OwnershipError if a parameter's layout has changed."""
        inner = self._stored()
        if all(map(is_, inner, self._inner)) and [*map(Tensor.data_ptr, inner)] == self._addresses:
            return
        for p, name, stamp in zip(self.parameters, self._names, self._stamps, strict=True):
            now = LayoutStamp.of(p)
            if now != stamp:
                raise OwnershipError(
                    f"parameter {name!r} is now {now}; it was planned as {stamp}. Shard, move or "
                    "convert the model before dmuon.dedicate_params(model), or call own.close() "
                    "and dmuon.dedicate_params(model) again"
                )
        self._look_up()
        self.version += 1

    def gradients(self) -> list[Tensor | None]:
        """Return the local part of each gradient, None if it is missing; a collective call if a
        gradient's placements differ from its parameter's."""
        grads = [p.grad for p in self.parameters]
        for n, (grad, stamp) in enumerate(zip(grads, self._stamps, strict=True)):
            if grad is not None and grad.layout is not torch.strided:
                raise OwnershipError(
                    f"parameter {self._names[n]!r} got a gradient that is not dense (a sparse "
                    "layout); dmuon needs dense gradients (for an embedding: sparse=False)"
                )
            placements = getattr(grad, "placements", None)
            if placements is not None and placements != stamp.placements:
                p = self.parameters[n]
                p.grad = grads[n] = gradient_like(grad, p)  # type: ignore[arg-type]
        return [grad if grad is None else stored_tensor(grad) for grad in grads]


def gradient_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return ``grad`` with the placements of its parameter. Autograd may leave a gradient `Partial`
    (a gain under sequence parallelism); making it whole is a collective over the parameter's mesh,
    which every optimizer on `DTensor` issues."""
    given, wanted = getattr(grad, "placements", None), getattr(parameter, "placements", None)
    if given is None or wanted is None or given == wanted:
        return grad
    return grad.redistribute(parameter.device_mesh, wanted)  # type: ignore[attr-defined]


def local_shard(name: str, parameter: Tensor, rank: int) -> LocalShard:
    """Return the box of ``parameter`` that this process, global rank ``rank``, holds.
    OwnershipError if it is `Partial`, on a mesh without this rank, or not as its placements say."""
    if not is_distributed(parameter):
        return LocalShard((rank,), (), Box.at_origin(tuple(parameter.shape)))
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
    shards: list[Any] = [None if p.is_replicate() else p for p in placements]
    # Only a strided shard has a split factor.
    cuts = [s and (s.dim % parameter.ndim, getattr(s, "split_factor", 1)) for s in shards]
    box = local_box(name, parameter.shape, mesh.shape, coordinate, cuts)
    found = tuple(parameter.to_local().shape)
    if found != box.shape and (box.numel or math.prod(found)):
        raise OwnershipError(
            f"parameter {name!r} of shape {list(parameter.shape)} stores {list(found)} here, but "
            f"its placements {tuple(placements)} on mesh {tuple(mesh.shape)} say "
            f"{list(box.shape)}: shard it with fully_shard, parallelize_module or "
            "distribute_tensor"
        )
    replica = tuple(c for c, cut in zip(coordinate, cuts, strict=True) if cut is None)
    return LocalShard(tuple(sorted(ranks_of(mesh))), replica, box)


def local_box(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[tuple[int, int] | None],
) -> Box:
    """Return the box of a parameter of ``shape`` at ``coordinate`` of a mesh.

    ``cuts`` has for each mesh axis None if it replicates, otherwise (dim, before): the axis cuts
    this dim as `torch.chunk` does, after axes to its right have cut it into ``before`` pieces. That
    is 1, so that the leftmost axis cuts first, except in a strided shard (FSDP2 on top of tensor
    parallelism). OwnershipError if no order of the axes gives these pieces.

    >>> local_box("w", (25, 3), (4, 2), (3, 0), [(0, 2), (0, 1)])  # 13 rows of 2 x 4, 4, 4, 1
    Box(offset=(12, 0), shape=(1, 3))
    """
    orders: dict[int, list[int]] = defaultdict(list)
    for axis in reversed(range(len(mesh))):
        cut = cuts[axis]
        if cut is not None:
            dim, before = cut
            order = orders[dim]
            pieces = [math.prod(mesh[a] for a in order[:n]) for n in range(len(order) + 1)]
            if before not in pieces:
                raise OwnershipError(
                    f"parameter {name!r} is sharded with a stride: mesh axis {axis} cuts dim {dim} "
                    f"after it was cut into {before}, but the axes to its right cut it into "
                    f"{pieces[-1]}. {INTERLEAVED}"
                )
            order.insert(pieces.index(before), axis)
    offset, size = [0] * len(shape), list(shape)
    for dim, order in orders.items():
        for axis in order:
            chunk = -(-size[dim] // mesh[axis])
            start = min(coordinate[axis] * chunk, size[dim])
            offset[dim] += start
            size[dim] = min(chunk, size[dim] - start)
    return Box(tuple(offset), tuple(size))


def sample(tensor: Tensor, count: int) -> Tensor:
    """Return up to ``count`` elements of a plain tensor, evenly spread."""
    return tensor.reshape(-1)[:: max(1, tensor.numel() // count)][:count]


def replica(parameter: Tensor, rank: int, world: int) -> LocalShard:
    """Return the shard at ``rank`` of a plain parameter that each of ``world`` ranks has."""
    return LocalShard(tuple(range(world)), (rank,), Box.at_origin(tuple(parameter.shape)))


def ranks_of(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def compute_device(parameters: Sequence[Tensor]) -> torch.device:
    """Return the device of Newton-Schulz: the parameters', or their mesh's with CPU offload."""
    device = parameters[0].device
    for p in parameters:
        mesh: DeviceMesh | None = getattr(p, "device_mesh", None)
        if mesh is not None and mesh.device_type != device.type:
            return devices.current_device(mesh.device_type)
    return device


def flaw_of_device(named: Named) -> str | None:
    """Return an error text if a parameter is on another device than the current one, where object
    collectives run; None if there is no such parameter or no other process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    for name, p in named:
        kind, index = p.device.type, p.device.index
        if kind in ("cpu", "meta") or index in (None, torch.accelerator.current_device_index()):
            continue
        return (
            f"parameter {name!r} lies on {p.device}, and the current device of this process is "
            f"{kind}:{torch.accelerator.current_device_index()}, where torch.distributed exchanges "
            f"objects: call torch.{kind}.set_device(local_rank), or "
            "torch.accelerator.set_device_index(local_rank), before init_process_group"
        )
    return None


def groups_of(mesh: DeviceMesh | None, named: Named) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of the axes of a mesh and of parameters' meshes, by axis."""
    meshes = [] if mesh is None else [mesh]
    meshes += [p.device_mesh for _, p in named if is_distributed(p)]
    found: dict[str, dist.ProcessGroup] = {}
    for one in dict.fromkeys(meshes):
        with suppress(RuntimeError):  # a mesh without process groups
            axes = enumerate(axis_names(one))
            found |= {axis: one.get_group(i) for i, axis in axes if one.size(i) > 1}
    return found


def covering_mesh(named: Named) -> DeviceMesh | None:
    """Return the mesh of a parameter that contains every other parameter's (of equal ones that with
    the most axes); None without a `DTensor`. OwnershipError if no mesh contains all."""
    meshes = [(name, p.device_mesh) for name, p in named if is_distributed(p)]
    if not meshes:
        return None
    largest: DeviceMesh = max((mesh for _, mesh in meshes), key=lambda m: (m.size(), m.ndim))
    inside = set(ranks_of(largest))
    for name, mesh in meshes:
        if not inside.issuperset(ranks_of(mesh)):
            raise OwnershipError(
                f"parameter {name!r} lies on mesh {mesh}, which is no part of the largest mesh of "
                f"this model, {largest}: pass the mesh of all its ranks, "
                "dmuon.dedicate_params(model, mesh)"
            )
    return largest
