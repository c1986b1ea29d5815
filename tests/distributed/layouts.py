"""How a model lies over ranks: every layout, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.tools.parallel_models import CASES, ParallelCase, ParallelModel
from tests.distributed.harness import distributed
from tests.distributed.models import Net, wrap

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
_REPLICATED = dmuon.ReplicatedOptions()


@dataclass(frozen=True)
class Layout:
    """How a model lies over a mesh of ``mesh`` ranks (all of them on one axis if None).

    ``wrap``: what the framework does before dmuon plans; ``own``: arguments of `dedicate_params`;
    ``shard_rest``: FSDP2 shards what dmuon does not keep. Data differ along every axis but "tp".
    """

    mesh: tuple[int, ...] | None = None
    axes: tuple[str, ...] = ("dp",)
    wrap: Wrap = lambda model, mesh: model
    own: Mapping[str, Any] = field(default_factory=dict)
    shard_rest: bool = False
    options: Any = _REPLICATED
    build: Callable[[], nn.Module] = Net
    from_first: bool = True  # every rank may start from other weights: those of the first count

    @property
    def world(self) -> int:
        return math.prod(self.mesh or (2,))


_SHARDED: dict[str, Any] = {"options": dmuon.ShardedOptions(min_buckets=3), "from_first": False}


def sharded(*shape: int, build: Callable[[], nn.Module] = ParallelModel, **policy: Any) -> Layout:
    """FSDP2 (HSDP, of two sizes), every block and the root a unit; ``policy``: arguments of
    `fully_shard`."""
    axes = ("dp",) if len(shape) < 2 else ("replicate", "shard")
    shard = partial(shard_units, **policy)
    return Layout(shape or None, axes, shard, build=build, **_SHARDED)


def shard_units(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> nn.Module:
    """FSDP2 on the blocks, then on the root."""
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(module, mesh=mesh, **policy)
    return model


def _sharded(case: ParallelCase) -> Layout:

    def both(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return case.data_parallel(case.tensor_parallel(model, mesh), mesh)

    return Layout(case.mesh_shape, case.axes, both, build=case.build, **_SHARDED)


def _at_owners(options: Any, **more: Any) -> Layout:
    asked = {"layout": "dedicated"} if isinstance(options, dmuon.DedicatedOptions) else {}
    return Layout(own={**asked, "options": options}, options=options, **more)


def in_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return wrap(model)


def in_two(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Blocks of a `Net` under tensor parallelism."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


# The `dedicated` layout, beside plain parameters and beside FSDP2's; its weights may be kept
# between forward and backward. The `replicated` layout with momentum at the owners
# (reduce_to_owner), on a plain module or under DistributedDataParallel, and with momentum
# everywhere, under that or on a plain module, whose gradients the test averages. The others are
# those of `dmuon.tools.parallel_models`, all of them sharded.
REDUCING = dmuon.ReplicatedOptions(reduce_to_owner=True)
LAYOUTS = {
    "dedicated": _at_owners(dmuon.DedicatedOptions()),
    "dedicated kept": _at_owners(dmuon.DedicatedOptions(free_after_forward=False)),
    "dedicated fsdp": _at_owners(dmuon.DedicatedOptions(), shard_rest=True),
    "reduced": _at_owners(REDUCING),
    "reduced ddp": _at_owners(REDUCING, wrap=in_ddp),
    "ddp": Layout(wrap=in_ddp),
    "plain": Layout(from_first=False),
    **{case.name: _sharded(case) for case in CASES},
    "fsdp2": sharded(),  # on any number of ranks
}


def on(name: str, *mesh: int) -> Layout:
    """This layout over another mesh: of replicas, if it has two sizes where one is usual."""
    laid = LAYOUTS[name]
    axes = laid.axes if len(mesh) == len(laid.axes) else ("replicate", "shard")
    return replace(laid, mesh=mesh, axes=axes)


IN_TWO = replace(LAYOUTS["dedicated"], mesh=(2, 2), axes=("dp", "tp"), wrap=in_two)
DEDICATED = ("dedicated", "dedicated kept", "dedicated fsdp")
AT_OWNERS = (*DEDICATED, "reduced", "reduced ddp")


# One owner after the other, where a good plan would keep equal shapes together: of `Pieces`.
IN_TURN: dict[str, Any] = {
    "select": {"splits": {"*qkv.weight": (8, 8, 12)}, "heads": {"*o_proj.weight": 4}},
    "request": {"solver": "round_robin"},
}


def layouts(*names: str) -> Callable[[Any], Any]:
    """A test of each of these layouts, whose body runs on every rank."""
    each = pytest.mark.parametrize(("layout", "world"), [(n, LAYOUTS[n].world) for n in names])
    return lambda body: each(distributed()(body))


def mesh_of(shape: Sequence[int], axes: Sequence[str] | None = None) -> DeviceMesh:
    """Over all ranks, on torch's default device."""
    names = axes or (("replicate", "shard") if len(shape) == 2 else ("dp",))
    device = torch.get_default_device().type
    return init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Without the axis of tensor parallelism."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name != "tp")] if "tp" in names else mesh


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among those that have other data, and how many there are."""
    rank, world, at = 0, 1, mesh.get_coordinate()
    assert at is not None
    for place, size, axis in zip(at, mesh.shape, mesh.mesh_dim_names or ("dp",) * mesh.ndim):
        if axis != "tp":
            rank, world = rank * size + place, world * size
    return rank, world
