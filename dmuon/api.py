"""`dedicate_params`: the composition root, where planning, moving and computing meet."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.consensus import attempt, solve_on_first
from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import C10dTransport, LocalTransport, Transport
from dmuon.config import PlannerOptions, ReplicatedOptions, ShardedOptions
from dmuon.measure import measured_costs
from dmuon.ownership import Ownership, ownerships_of
from dmuon.scheduler.costs import CostTable, resolve_costs
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan import OwnershipPlan, check_plan_fits, solve
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.shards import RankShards, ShardMap
from dmuon.scheduler.shards import assemble as assemble_shards
from dmuon.scheduler.specs import (
    ModelSpecs,
    compute_device,
    covering_mesh,
    is_distributed,
    local_shard,
)
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
    options: ReplicatedOptions | ShardedOptions | None = None,
    plan: OwnershipPlan | None = None,
) -> Ownership:
    """Decide which rank owns which matrix of ``model``, the same on every rank.

    A collective call: every rank of ``mesh`` calls it with the same model and arguments. Without a
    mesh these are, in the `sharded` layout, the ranks of the model's largest mesh, otherwise all
    ranks; without `torch.distributed`, this process alone. A plain module starts from the weights
    of the mesh's first rank, any other keeps its own.

    Args:
        layout: "sharded" for a model with `DTensor` parameters (FSDP2, HSDP, tensor and expert
            parallelism: shard it before this call), "replicated" for a plain module or
            `DistributedDataParallel`; "auto" looks at the parameters.
        options: `ShardedOptions` or `ReplicatedOptions`, as the layout is.
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
    if mesh is None and isinstance(model, nn.Module) and ddp is None:
        mesh = covering_mesh(trainable_parameters(model))
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


@dataclass
class _Request:
    """The arguments of `dedicate_params`, and what this rank makes of them."""

    model: nn.Module
    topology: Callable[[], Topology]
    layout: str
    collect_specs: Callable[[nn.Module], ModelSpecs]
    costs: Any
    solver: str
    planner: PlannerOptions
    options: ReplicatedOptions | ShardedOptions | None
    plan: OwnershipPlan | None

    @cached_property
    def is_sharded(self) -> bool:
        return any(is_distributed(p) for p in self.inner.parameters())

    @property
    def chosen(self) -> Layout:
        """The layout, "auto" resolved."""
        if self.layout == Layout.AUTO:
            return Layout.SHARDED if self.is_sharded else Layout.REPLICATED
        return Layout(self.layout)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def inner(self) -> nn.Module:
        return self.model if self.ddp is None else self.ddp.module

    def prepare(self, transport: Transport) -> _Prepared:
        """Everything that can be wrong on one rank is found here."""
        if not isinstance(self.model, nn.Module):
            raise TypeError(
                f"dedicate_params takes an nn.Module, found {type(self.model).__name__}"
            )
        self._check_layout()
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
            _check_saved(self.plan, self.planner, self.chosen)
        if self.chosen is not Layout.SHARDED:
            return _Prepared(specs, topology, None)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        named = trainable_parameters(self.inner)
        return _Prepared(
            specs, topology, RankShards.of(rank, [local_shard(n, p, rank) for n, p in named])
        )

    def _check_layout(self) -> None:
        known = [member.value for member in Layout]
        if self.layout not in known:
            raise DmuonError(f"layout must be one of {known}, found {self.layout!r}")
        if self.layout == Layout.DEDICATED:
            raise DmuonError(
                "layout='dedicated' is not part of this version; use 'sharded' on a model with "
                "DTensor parameters, 'replicated' on a plain module or DistributedDataParallel"
            )
        if self.chosen is Layout.REPLICATED and self.is_sharded:
            name = next(n for n, p in self.inner.named_parameters() if is_distributed(p))
            raise DmuonError(
                f"layout='replicated' but parameter {name!r} is a DTensor: use layout='sharded' "
                "(or 'auto')"
            )
        if self.chosen is Layout.SHARDED and not self.is_sharded and self.ddp is None:
            raise DmuonError(
                "layout='sharded' but no parameter is a DTensor: call fully_shard or "
                "parallelize_module before dmuon.dedicate_params, or use layout='replicated'"
            )
        if self.chosen is Layout.SHARDED and self.ddp is not None:
            raise DmuonError(
                "layout='sharded' does not take DistributedDataParallel; replicate with a 2-D mesh "
                "in fully_shard (HSDP), or use layout='replicated'"
            )
        wanted = _OPTIONS[self.chosen]
        if self.options is not None and not isinstance(self.options, wanted):
            raise TypeError(
                f"options for layout {self.chosen.value!r} must be {wanted.__name__}, found "
                f"{type(self.options).__name__}"
            )

    def describe(self, prepared: _Prepared) -> str:
        """What all ranks must have in common, a line each."""
        specs, topology = prepared.specs, prepared.topology
        arguments = {
            "layout": self.chosen.value,
            "options": self.options or _OPTIONS[self.chosen](),
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
        device = compute_device([p for _, p in trainable_parameters(self.inner)])
        return measured_costs(transport, [m.key for m in specs.matrices], device, self.planner)

    def solve(
        self, specs: ModelSpecs, topology: Topology, costs: Any, limits: OwnerLimits | None
    ) -> OwnershipPlan:
        """The plan; the given one if there is one."""
        return self.plan or solve(
            specs,
            topology,
            resolve_costs(costs, topology.device_type),
            layout=self.chosen,
            solver=self.solver,
            options=self.planner,
            limits=limits,
        )

    def runtime(
        self, plan: OwnershipPlan, shards: ShardMap | None, transport: Transport
    ) -> LayoutRuntime:
        """The machinery of the layout; hooks are installed when an optimizer binds to it."""
        named = [p for _, p in trainable_parameters(self.inner)]
        if shards is not None:
            options = self.options or ShardedOptions()
            assert isinstance(options, ShardedOptions)
            device = compute_device(named)
            return ShardedRuntime(plan, shards, self.inner, named, transport, options, device)
        replicated = self.options or ReplicatedOptions()
        assert isinstance(replicated, ReplicatedOptions)
        return ReplicatedRuntime(plan, self.inner, named, transport, replicated, self.ddp)


_OPTIONS: dict[Layout, type[ReplicatedOptions] | type[ShardedOptions]] = {
    Layout.REPLICATED: ReplicatedOptions,
    Layout.SHARDED: ShardedOptions,
}


@dataclass(frozen=True)
class _Prepared:
    """``shards``: what this rank holds, in the `sharded` layout."""

    specs: ModelSpecs
    topology: Topology
    shards: RankShards | None


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
    options: ReplicatedOptions | ShardedOptions | None = None,
    plan: OwnershipPlan | None = None,
) -> Ownership:
    """`dedicate_params` over a given transport; on failure the transport is closed."""
    request = _Request(
        model, topology, layout, collect_specs, costs, solver, planner, options, plan
    )
    with ExitStack() as undo:
        undo.callback(transport.close)
        prepared = attempt(
            transport,
            lambda: request.prepare(transport),
            what="dmuon.dedicate_params",
            digest=request.describe,
        )
        specs, mesh = prepared.specs, prepared.topology
        shards, limits = None, None
        if prepared.shards is not None:
            # Pure from here on: every rank comes to the same result, or to the same error.
            shards = assemble_shards(specs, transport.gather_objects(prepared.shards))
            specs = shards.specs
            limits = shards.limits(None, planner.owner_memory_bytes)
        if plan is not None:
            check_plan_fits(plan, specs, mesh)
            _check_pools(plan, limits)
        prices = request.prices(transport, specs)
        text = solve_on_first(
            transport, lambda: request.solve(specs, mesh, prices, limits).to_json()
        )
        agreed = attempt(
            transport,
            lambda: OwnershipPlan.from_json(text),
            what="dmuon.dedicate_params (the plan)",
            digest=OwnershipPlan.fingerprint,
        )
        runtime = request.runtime(agreed, shards, transport)
        undo.pop_all()
    return Ownership(agreed, runtime, request.inner)


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


def _check_pools(plan: OwnershipPlan, limits: OwnerLimits | None) -> None:
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


def _check_saved(plan: OwnershipPlan, planner: PlannerOptions, layout: Layout) -> None:
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
