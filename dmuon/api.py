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

from dmuon.comm.buckets import Slices, slice_boxes
from dmuon.comm.consensus import attempt, solve_on_first
from dmuon.comm.dedicated.layout import DedicatedRuntime
from dmuon.comm.hooks import reshard
from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.process_groups import Grid, NewGroup, ProcessGroups
from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import Transport
from dmuon.config import (
    DedicatedOptions,
    KernelOptions,
    PlannerOptions,
    ReplicatedOptions,
    ShardedOptions,
)
from dmuon.dtensors import compute_device, covering_mesh, is_distributed, local_shard
from dmuon.measure import measured_costs
from dmuon.meshes import (
    check_launched,
    group_maker,
    make_transport,
    mesh_device,
    mesh_topology,
    tensor_axes,
)
from dmuon.ownership import Ownership, ownerships_of
from dmuon.requirements import (
    check_axes,
    check_ddp,
    check_dedicated,
    check_kernels,
    check_pools,
    check_saved,
    check_wrapping,
)
from dmuon.scheduler.assembly import assemble as assemble_shards
from dmuon.scheduler.costs import CostTable, resolve_costs
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan import OwnershipPlan, check_plan_fits, solve
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.shards import RankShards, ShardMap
from dmuon.scheduler.specs import ModelSpecs, canonical_name
from dmuon.scheduler.topology import Topology
from dmuon.types import DmuonError, Layout, OwnershipError, Select

__all__ = ["assemble", "dedicate_params"]

Options = DedicatedOptions | ReplicatedOptions | ShardedOptions


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
    options: Options | None = None,
    plan: OwnershipPlan | None = None,
    kernels: KernelOptions = KernelOptions(),  # noqa: B008  frozen
) -> Ownership:
    """Decide which rank owns which matrix of ``model``, the same on every rank.

    A collective call: every rank of ``mesh`` calls it with the same model and arguments. Without a
    mesh these are, in the `sharded` layout, the ranks of the model's largest mesh, with
    `DistributedDataParallel` those of its process group, otherwise all ranks; without
    `torch.distributed`, this process alone. A plain module, and in the `dedicated` layout any
    module, starts from the weights of the mesh's first rank; others keep their own.

    Args:
        layout: "sharded" for a model with `DTensor` parameters (FSDP2, HSDP, tensor and expert
            parallelism: shard it before this call), "replicated" for a plain module or
            `DistributedDataParallel`; "auto" looks at the parameters. "dedicated": only its owner
            stores a matrix. Ask for it before ``fully_shard(..., ignored_params=
            own.dedicated_params)``, or on a plain module, also one on the meta device; a mesh of
            two axes is then (replicate, shard), axes of tensor parallelism apart.
        options: `ShardedOptions`, `ReplicatedOptions` or `DedicatedOptions`, as the layout is.
        select: ``(name, parameter) -> bool`` picks the matrices instead of the default rules.
        splits: name pattern -> row sizes; makes several matrices of a fused parameter.
        heads: name pattern -> number of equal row blocks, each a matrix.
        costs: "measured" chooses kernels on the first rank and times each shape with them on all
            ranks (at most ``kernels.tune_budget_s`` and ``planner.profile_budget_s`` seconds; kept
            in a cache), "analytic" or "analytic:<device>" estimates it; or the path of a cost
            table, a `CostTable`, or any object with its ``batch_ms`` and ``source``.
        solver: "auto", "milp", "greedy" or "round_robin" (docs/scheduler.md).
        plan: a saved plan to use again, after checking that it fits.
        kernels: how owners compute Newton-Schulz (docs/kernels.md). A kernel that a saved plan
            names is the one that runs; asking for another beside it is an error.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: the arguments or the model do not fit, or several processes were launched and no
            process group was made. Raised on every rank, on the ranks without the mistake as
            ConsensusError.
    """
    check_launched("dmuon.dedicate_params")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if isinstance(model, nn.Module) and ddp is None:
        reshard(model)
        mesh = covering_mesh(trainable_parameters(model)) if mesh is None else mesh
    timeout_s = getattr(options, "timeout_s", None)
    transport = make_transport(mesh, ddp, timeout_s)
    return assemble(
        model,
        transport,
        lambda: mesh_topology(mesh, transport.world, model, planner),
        layout=layout,
        collect_specs=lambda m: collect(
            m,
            select=select,
            splits=splits,
            heads=heads,
            allow_meta=layout == Layout.DEDICATED,
        ),
        costs=costs,
        solver=solver,
        planner=planner,
        options=options,
        plan=plan,
        kernels=kernels,
        new_group=group_maker(mesh, transport.world, timeout_s),
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
    options: Options | None
    plan: OwnershipPlan | None
    kernels: KernelOptions
    new_group: NewGroup | None

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
        check_wrapping(self.inner)
        if self.chosen is Layout.DEDICATED:
            check_dedicated(self.model, transport)
        if ownerships_of(self.model):
            raise OwnershipError(
                "this model is dedicated already: call close() on its Ownership before "
                "dedicate_params is called again"
            )
        specs = self.collect_specs(self.inner)
        if not isinstance(self.planner, PlannerOptions):
            raise TypeError(f"planner must be PlannerOptions, found {type(self.planner).__name__}")
        if self.ddp is not None:
            check_ddp(self.ddp, self.inner, transport)
        topology = self.topology()
        if self.plan is not None:
            if not isinstance(self.plan, OwnershipPlan):
                raise TypeError(
                    "plan must be an OwnershipPlan (see OwnershipPlan.from_json), found "
                    f"{type(self.plan).__name__}"
                )
            check_saved(self.plan, self.planner, self.chosen)
        check_kernels(self.kernels, self.plan)
        if self.chosen is Layout.REPLICATED:
            return _Prepared(specs, topology, None)
        if self.chosen is Layout.DEDICATED:
            check_axes(trainable_parameters(self.inner), topology, self.options)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        named = trainable_parameters(self.inner)
        return _Prepared(
            specs, topology, RankShards.of(rank, [local_shard(n, p, rank) for n, p in named])
        )

    def _check_layout(self) -> None:
        known = [member.value for member in Layout]
        if self.layout not in known:
            raise DmuonError(f"layout must be one of {known}, found {self.layout!r}")
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
            **self._options_texts(),
            # Each rank may keep its cache where it likes.
            "planner": replace(self.planner, cache_dir=None),
            "costs": _costs_text(self.costs),
            "solver": self.solver,
            "kernels": self.kernels,
            "plan": None if self.plan is None else self.plan.fingerprint(),
        }
        lines = [str(topology), *map(str, specs.parameters), *map(str, specs.matrices)]
        return "\n".join(lines + [f"{name}={value}" for name, value in arguments.items()])

    def _options_texts(self) -> dict[str, Any]:
        """The options; of a function what it chooses, for its own text differs between ranks."""
        options = self.options or _OPTIONS[self.chosen]()
        if not isinstance(options, DedicatedOptions) or options.groups is None:
            return {"options": options}
        chooses = options.groups
        chosen = [n for n, m in self.inner.named_modules() if n and chooses(canonical_name(n), m)]
        return {"options": replace(options, groups=None), "groups": chosen}

    def prices(self, transport: Transport, specs: ModelSpecs) -> Any:
        """The costs; measured, by all ranks together, if that is asked for."""
        if self.plan is not None or not isinstance(self.costs, str) or self.costs != "measured":
            return self.costs
        parameters = [p for _, p in trainable_parameters(self.inner)]
        device = mesh_device(self.topology(), parameters)
        keys = [m.key for m in specs.matrices]
        return measured_costs(
            transport,
            keys,
            device,
            self.planner,
            kernels=self.kernels,
            momentum=self.chosen is not Layout.SHARDED,
        )

    def solve(
        self, specs: ModelSpecs, topology: Topology, costs: Any, limits: OwnerLimits | None
    ) -> OwnershipPlan:
        """The plan; the given one if there is one."""
        return self.plan or solve(
            specs,
            topology,
            resolve_costs(costs, topology.device_type, momentum=self.chosen is not Layout.SHARDED),
            layout=self.chosen,
            solver=self.solver,
            options=self.planner,
            limits=limits,
        )

    def dedicated(
        self, plan: OwnershipPlan, reports: Sequence[RankShards], transport: Transport
    ) -> LayoutRuntime:
        """The machinery of the `dedicated` layout; places the weights. A collective call."""
        named = trainable_parameters(self.inner)
        axes = tensor_axes(named)
        grid = Grid.of(plan.topology, axes)
        slices = Slices(plan, grid, slice_boxes(plan.specs, grid, reports))
        new_group = self.new_group or group_maker(None, transport.world, None)
        process_groups = ProcessGroups.open(grid, transport, new_group)
        options = self.options or DedicatedOptions()
        assert isinstance(options, DedicatedOptions)
        parameters = [p for _, p in named]
        device = mesh_device(plan.topology, parameters)
        return DedicatedRuntime(
            slices, self.inner, parameters, process_groups, options, axes, device
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


_OPTIONS: dict[Layout, type[Options]] = {
    Layout.DEDICATED: DedicatedOptions,
    Layout.REPLICATED: ReplicatedOptions,
    Layout.SHARDED: ShardedOptions,
}


@dataclass(frozen=True)
class _Prepared:
    """``shards``: what this rank holds, in the layouts that look at it."""

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
    options: Options | None = None,
    plan: OwnershipPlan | None = None,
    kernels: KernelOptions = KernelOptions(),  # noqa: B008  frozen
    new_group: NewGroup | None = None,
) -> Ownership:
    """`dedicate_params` over a given transport; on failure the transport is closed.

    ``new_group`` makes the transports of the `dedicated` layout's process groups.
    """
    request = _Request(
        model,
        topology,
        layout,
        collect_specs,
        costs,
        solver,
        planner,
        options,
        plan,
        kernels,
        new_group,
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
        reports: list[RankShards] = []
        if prepared.shards is not None:
            reports = transport.gather_objects(prepared.shards)
        if request.chosen is Layout.SHARDED:
            # Pure from here on: every rank comes to the same result, or to the same error.
            shards = assemble_shards(specs, reports)
            specs = shards.specs
            limits = shards.limits(None, planner.owner_memory_bytes)
        if plan is not None:
            check_plan_fits(plan, specs, mesh)
            check_pools(plan, limits)
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
        if request.chosen is Layout.DEDICATED:
            runtime = request.dedicated(agreed, reports, transport)
        else:
            runtime = request.runtime(agreed, shards, transport)
        undo.pop_all()
    return Ownership(agreed, runtime, request.inner, kernels)


def _costs_text(costs: Any) -> str:
    """What the ``costs=`` of all ranks must have in common."""
    if isinstance(costs, CostTable):
        digest = hashlib.sha256(costs.to_json().encode()).hexdigest()
        return f"{costs.source} (table {digest[:12]})"
    if isinstance(costs, (str, os.PathLike)):
        return os.fspath(costs)
    return str(type(costs))
