"""What `dedicate_params` requires of a model's wrapping and of a saved plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.hooks import fsdp_roots
from dmuon.comm.transport import Transport
from dmuon.config import DedicatedOptions, KernelOptions, PlannerOptions
from dmuon.dtensors import mesh_axes
from dmuon.kernels.choice import BACKENDS, check_method
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.topology import Topology
from dmuon.types import KernelChoice, Layout, OwnershipError, PlanError

__all__ = [
    "check_axes",
    "check_ddp",
    "check_dedicated",
    "check_kernels",
    "check_pools",
    "check_saved",
    "check_wrapping",
]


def check_dedicated(model: nn.Module, transport: Transport) -> None:
    """What the `dedicated` layout cannot be laid over."""
    if isinstance(model, DistributedDataParallel):
        raise OwnershipError(
            "layout='dedicated' does not take DistributedDataParallel, whose constructor refuses "
            "the placeholders that ranks without a weight have: pass the plain module (dmuon "
            "reduces all of its gradients), or call fully_shard(..., "
            "ignored_params=own.dedicated_params) after dmuon.dedicate_params"
        )
    root = next(iter(fsdp_roots(model)), None)
    if root is not None:
        raise OwnershipError(
            "layout='dedicated' was asked for after fully_shard: call own = "
            "dmuon.dedicate_params(model, mesh, layout='dedicated') first, then fully_shard(..., "
            "ignored_params=own.dedicated_params)"
        )


def check_axes(
    named: Sequence[tuple[str, nn.Parameter]], topology: Topology, options: object
) -> None:
    """In the `dedicated` layout distributed parameters lie on tensor-parallel axes of the mesh."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    for name, p in named:
        axes = mesh_axes(p)
        if not axes:
            continue
        missing = [axis for axis in axes if axis not in topology.axes]
        if missing or topology.world < world:
            raise OwnershipError(
                f"parameter {name!r} lies on the mesh axes {list(axes)}; pass the whole mesh of "
                "named axes, data-parallel ones included: dmuon.dedicate_params(model, mesh, "
                f"layout='dedicated'). Found {list(topology.axes)} with {topology.world} ranks"
            )
        if isinstance(options, DedicatedOptions) and options.param_dtype is not None:
            raise OwnershipError(
                f"DedicatedOptions.param_dtype={options.param_dtype} but parameter {name!r} is "
                "tensor-parallel: its local part cannot change its dtype. Leave param_dtype None "
                "and use torch.autocast"
            )


def check_pools(plan: OwnershipPlan, limits: OwnerLimits | None) -> None:
    """A saved plan must let the same ranks own each matrix as the model's shards do."""
    wanted = limits or OwnerLimits()
    everyone = tuple(range(plan.topology.world))
    for i, matrix in enumerate(plan.specs.matrices):
        pool = wanted.pools[wanted.pool_of[i]] if wanted.pool_of else everyone
        if plan.owners[i] not in pool:
            raise PlanError(
                f"in the saved plan rank {plan.owners[i]} owns {matrix.name!r}, which only ranks "
                f"{list(pool)[:8]} hold in this model: plan anew"
            )


def check_saved(plan: OwnershipPlan, planner: PlannerOptions, layout: Layout) -> None:
    if plan.layout is not layout:
        raise PlanError(
            f"the saved plan is for layout {plan.layout.value!r}; this model is {layout.value!r}"
        )
    caps = (planner.owner_memory_bytes, plan.limits.memory_bytes)
    cap = min((c for c in caps if c is not None), default=None)
    fullest = max(plan.state_bytes)
    if cap is not None and fullest > cap:
        raise PlanError(
            f"in the saved plan rank {plan.state_bytes.index(fullest)} stores {fullest} bytes of "
            f"optimizer state, more than owner_memory_bytes={cap}: plan anew, or raise the cap"
        )


def check_wrapping(inner: nn.Module) -> None:
    for name, module in inner.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise OwnershipError(
                f"the model holds a DistributedDataParallel at {name!r}, which would average "
                "gradients a second time: pass the DistributedDataParallel itself to "
                "dedicate_params (and compile the module inside it, or the blocks)"
            )


def check_ddp(ddp: DistributedDataParallel, inner: nn.Module, transport: Transport) -> None:
    world = dist.get_world_size(ddp.process_group)
    if world != transport.world:
        raise OwnershipError(
            f"DistributedDataParallel averages over {world} ranks but the mesh has "
            f"{transport.world}: pass the mesh that DDP was built on, or none"
        )
    reduced = {id(p) for p in ddp.parameters() if p.requires_grad}
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    for name, p in inner.named_parameters():
        if p.requires_grad and (id(p) not in reduced or name in ignored):
            raise OwnershipError(
                f"parameter {name!r} is ignored by DistributedDataParallel, so its gradient would "
                "not be averaged: freeze it, or let DDP have it"
            )


def check_kernels(options: object, plan: OwnershipPlan | None) -> None:
    """Raise TypeError or ValueError unless these are `KernelOptions` that name what there is, and
    that do not contradict a saved plan."""
    if not isinstance(options, KernelOptions):
        raise TypeError(f"kernels must be KernelOptions, found {type(options).__name__}")
    check_method(options.method)
    if options.backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"KernelOptions.backend must be 'auto' or one of {', '.join(BACKENDS)}, found "
            f"{options.backend!r}"
        )
    for kernel in {batch.kernel for batch in (plan.batches if plan else ())} - {""}:
        choice = KernelChoice.parse(kernel)
        form = kernel.partition("/")[0]
        same_form = options.method in ("auto", choice.method, form)
        if not same_form or options.backend not in ("auto", choice.backend):
            raise PlanError(
                f"the saved plan runs {kernel}, and kernels= asks for method={options.method!r}, "
                f"backend={options.backend!r}: leave kernels= out to run what the plan says, or "
                "plan= to plan again"
            )
