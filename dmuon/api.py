"""`dedicate_params`: the composition root, where planning, moving and computing meet."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.consensus import attempt, solve_on_first
from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.comm.transport import C10dTransport, LocalTransport, Transport
from dmuon.config import PlannerOptions, ReplicatedOptions
from dmuon.measure import measured_costs
from dmuon.ownership import Ownership, ownerships_of
from dmuon.scheduler.costs import CostTable, resolve_costs
from dmuon.scheduler.plan import OwnershipPlan, check_plan_fits, solve
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology, local_world_size
from dmuon.types import DmuonError, Layout, OwnershipError, PlanError, Select

__all__ = ["assemble", "dedicate_params"]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    layout: str = "auto",
    select: Select | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    heads: Mapping[str, int] | None = None,
    costs: Any = "measured",
    solver: str = "auto",
    planner: PlannerOptions = PlannerOptions(),  # noqa: B008  frozen
    options: ReplicatedOptions | None = None,
    plan: OwnershipPlan | None = None,
) -> Ownership:
    """Decide which rank owns which matrix of ``model``, the same on every rank.

    A collective call: every rank of ``mesh`` (default: all ranks; without `torch.distributed`,
    this process alone) calls it with the same model and arguments. A plain module starts from the
    weights of the mesh's first rank; one wrapped in `DistributedDataParallel` keeps DDP's.

    Args:
        layout: "auto" or "replicated".
        select: ``(name, parameter) -> bool`` picks the matrices instead of the default rules.
        splits: name pattern -> row sizes; makes several matrices of a fused parameter.
        heads: name pattern -> number of equal row blocks, each a matrix.
        costs: "measured" times each shape on all ranks (at most ``planner.profile_budget_s``
            seconds; kept in a cache), "analytic" or "analytic:<device>" estimates it; or the path
            of a cost table, a `CostTable`, or any object with its ``batch_ms`` and ``source``.
        solver: "auto", "milp", "greedy" or "round_robin" (docs/scheduler.md).
        plan: a saved plan to use again, after checking that it fits.

    Raises:
        ValueError: the arguments or the model do not fit; raised on every rank, on the ranks
            without the mistake as ConsensusError.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    transport = _make_transport(mesh, ddp, getattr(options, "timeout_s", None))
    return assemble(
        model,
        transport,
        lambda: _topology(mesh, transport.world, model, planner),
        layout=layout,
        collect_specs=lambda m: collect(m, select=select, splits=splits, heads=heads),
        costs=costs,
        solver=solver,
        planner=planner,
        options=options,
        plan=plan,
    )


@dataclass(frozen=True)
class _Request:
    """The arguments of `dedicate_params`, and what this rank makes of them."""

    model: nn.Module
    topology: Callable[[], Topology]
    layout: str
    collect_specs: Callable[[nn.Module], ModelSpecs]
    costs: Any
    solver: str
    planner: PlannerOptions
    options: ReplicatedOptions | None
    plan: OwnershipPlan | None

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def inner(self) -> nn.Module:
        return self.model if self.ddp is None else self.ddp.module

    def prepare(self, transport: Transport) -> tuple[ModelSpecs, Topology]:
        """Everything that can be wrong on one rank is found here."""
        if not isinstance(self.model, nn.Module):
            raise TypeError(
                f"dedicate_params takes an nn.Module, found {type(self.model).__name__}"
            )
        _check_layout(self.layout, self.options)
        _check_wrapping(self.inner)
        if ownerships_of(self.model):
            raise OwnershipError(
                "this model is dedicated already: call close() on its Ownership before "
                "dedicate_params is called again"
            )
        specs = self.collect_specs(self.inner)
        if not isinstance(self.planner, PlannerOptions):
            raise TypeError(f"planner must be PlannerOptions, found {type(self.planner).__name__}")
        if self.ddp is not None:
            _check_ddp(self.ddp, self.inner, transport)
        topology = self.topology()
        if self.plan is not None:
            if not isinstance(self.plan, OwnershipPlan):
                raise TypeError(
                    "plan must be an OwnershipPlan (see OwnershipPlan.from_json), found "
                    f"{type(self.plan).__name__}"
                )
            check_plan_fits(self.plan, specs, topology)
            _check_saved(self.plan, self.planner)
        return specs, topology

    def describe(self, prepared: tuple[ModelSpecs, Topology]) -> str:
        """What all ranks must have in common, a line each."""
        specs, topology = prepared
        arguments = {
            "options": self.options or ReplicatedOptions(),
            # Each rank may keep its cache where it likes.
            "planner": replace(self.planner, cache_dir=None),
            "costs": _costs_text(self.costs),
            "solver": self.solver,
            "plan": None if self.plan is None else self.plan.fingerprint(),
        }
        lines = [str(topology), *map(str, specs.parameters), *map(str, specs.matrices)]
        return "\n".join(lines + [f"{name}={value}" for name, value in arguments.items()])

    def prices(self, transport: Transport, specs: ModelSpecs) -> Any:
        """The costs; measured, by all ranks together, if that is asked for."""
        if self.plan is not None or not isinstance(self.costs, str) or self.costs != "measured":
            return self.costs
        device = trainable_parameters(self.inner)[0][1].device
        return measured_costs(transport, [m.key for m in specs.matrices], device, self.planner)

    def solve(self, specs: ModelSpecs, topology: Topology, costs: Any) -> OwnershipPlan:
        """The plan; the given one if there is one."""
        return self.plan or solve(
            specs,
            topology,
            resolve_costs(costs, topology.device_type),
            layout=Layout.REPLICATED,
            solver=self.solver,
            options=self.planner,
        )


def assemble(
    model: nn.Module,
    transport: Transport,
    topology: Callable[[], Topology],
    *,
    layout: str = "auto",
    collect_specs: Callable[[nn.Module], ModelSpecs] = collect,
    costs: Any = "measured",
    solver: str = "auto",
    planner: PlannerOptions = PlannerOptions(),  # noqa: B008  frozen
    options: ReplicatedOptions | None = None,
    plan: OwnershipPlan | None = None,
) -> Ownership:
    """`dedicate_params` over a given transport; on failure the transport is closed."""
    request = _Request(
        model, topology, layout, collect_specs, costs, solver, planner, options, plan
    )
    with ExitStack() as undo:
        undo.callback(transport.close)
        specs, mesh = attempt(
            transport,
            lambda: request.prepare(transport),
            what="dmuon.dedicate_params",
            digest=request.describe,
        )
        prices = request.prices(transport, specs)
        text = solve_on_first(transport, lambda: request.solve(specs, mesh, prices).to_json())
        agreed = attempt(
            transport,
            lambda: OwnershipPlan.from_json(text),
            what="dmuon.dedicate_params (the plan)",
            digest=OwnershipPlan.fingerprint,
        )
        inner = request.inner
        parameters = [p for _, p in trainable_parameters(inner)]
        runtime = ReplicatedRuntime(
            agreed, inner, parameters, transport, options or ReplicatedOptions(), request.ddp
        )
        undo.pop_all()
    return Ownership(agreed, runtime, inner)


def _costs_text(costs: Any) -> str:
    """What the ``costs=`` of all ranks must have in common."""
    if isinstance(costs, CostTable):
        digest = hashlib.sha256(costs.to_json().encode()).hexdigest()
        return f"{costs.source} (table {digest[:12]})"
    if isinstance(costs, (str, os.PathLike)):
        return os.fspath(costs)
    return str(getattr(costs, "source", type(costs)))


def _make_transport(
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


def _topology(
    mesh: DeviceMesh | None, world: int, model: nn.Module, planner: PlannerOptions
) -> Topology:
    device = next(p.device for p in model.parameters() if p.requires_grad)
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


def _check_layout(layout: str, options: object) -> None:
    known = [member.value for member in Layout]
    if layout not in known:
        raise DmuonError(f"layout must be one of {known}, found {layout!r}")
    if layout in (Layout.SHARDED, Layout.DEDICATED):
        raise DmuonError(
            f"layout={layout!r} is not part of this version; use layout='replicated' on a plain "
            "module or on DistributedDataParallel"
        )
    if options is not None and not isinstance(options, ReplicatedOptions):
        raise TypeError(
            f"options for layout 'replicated' must be ReplicatedOptions, found "
            f"{type(options).__name__}"
        )


def _check_saved(plan: OwnershipPlan, planner: PlannerOptions) -> None:
    if plan.layout is not Layout.REPLICATED:
        raise PlanError(
            f"the saved plan is for layout {plan.layout.value!r}; this model is 'replicated'"
        )
    caps = (planner.owner_memory_bytes, plan.limits.memory_bytes)
    cap = min((c for c in caps if c is not None), default=None)
    fullest = max(plan.state_bytes)
    if cap is not None and fullest > cap:
        raise PlanError(
            f"in the saved plan rank {plan.state_bytes.index(fullest)} stores {fullest} bytes of "
            f"optimizer state, more than owner_memory_bytes={cap}: plan anew, or raise the cap"
        )


def _check_wrapping(inner: nn.Module) -> None:
    for name, module in inner.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise OwnershipError(
                f"the model holds a DistributedDataParallel at {name!r}, which would average "
                "gradients a second time: pass the DistributedDataParallel itself to "
                "dedicate_params (and compile the module inside it, or the blocks)"
            )


def _check_ddp(ddp: DistributedDataParallel, inner: nn.Module, transport: Transport) -> None:
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
