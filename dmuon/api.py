"""`dedicate_params`: plan the ownership of a model on a mesh, and set up its layout.

`assemble` lists the steps; the functions below it follow in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

from dmuon import config, devices, dtensors
from dmuon.comm import process_groups
from dmuon.comm.buckets import Slices, slice_boxes
from dmuon.comm.dedicated_runtime import DedicatedRuntime
from dmuon.comm.hooks import fsdp_roots, refuse_fsdp1, reshard
from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.owners_runtime import ReducedRuntime
from dmuon.comm.params_runtime import ParamsRuntime, open_peers
from dmuon.comm.process_groups import attempt_in_all, solve_on_first
from dmuon.comm.transport import C10dTransport, Transport, connect, splits_communicators, timeout_of
from dmuon.groups import Group, ParamGroups
from dmuon.kernels.choice import BACKENDS, restarts_of
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.measure import measured_costs, on_links
from dmuon.ownership import Ownership, ownerships_in, ownerships_of
from dmuon.scheduler.costs import CostTable, analytic_class, resolve_costs
from dmuon.scheduler.network import parts_of, planned
from dmuon.scheduler.plan import OwnershipPlan, fitted_plan, refitted
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.shards import RankShards, ShardMap, shard_map
from dmuon.scheduler.specs import ModelSpecs, OwnerLimits, StateSizes, canonical_name
from dmuon.scheduler.topology import Topology, local_world_size
from dmuon.types import (
    Heads,
    KernelChoice,
    Layout,
    LayoutName,
    OwnershipError,
    PlanError,
    Select,
    SolverName,
    Splits,
    warn,
)

Options = config.DedicatedOptions | config.ReplicatedOptions | config.ShardedOptions

_OPTIONS: dict[Layout, type[Options]] = {
    Layout.DEDICATED: config.DedicatedOptions,
    Layout.REPLICATED: config.ReplicatedOptions,
    Layout.SHARDED: config.ShardedOptions,
}


@dataclass(frozen=True)
class Given:
    """The model to plan, or an optimizer's named parameters with the function ``routed`` that gives
    their specs, and their model if known. ``before`` is the ownership to replace. ``sizes`` gives
    the bytes of the optimizer's state, as far as known."""

    model: nn.Module | None
    named: dtensors.Named | None = None
    routed: Callable[[], ModelSpecs] | None = None
    before: Ownership | None = None
    sizes: Callable[[ModelSpecs], StateSizes] = StateSizes.plain

    @property
    def caller(self) -> str:
        return "dmuon.dedicate_params" if self.named is None else "dmuon.Muon"

    @property
    def ddp(self) -> DDP | None:
        return self.model if isinstance(self.model, DDP) else None

    @property
    def inner(self) -> nn.Module | None:
        """The module inside `DistributedDataParallel`, or the model itself."""
        return self.model if self.ddp is None else self.ddp.module

    def trainable(self) -> dtensors.Named:
        """Return the trainable parameters with their names, in the order of the specs."""
        if self.named is not None:
            return [(name, p) for name, p in self.named if p.requires_grad]
        return trainable_parameters(self.inner) if isinstance(self.inner, nn.Module) else []


@dataclass(frozen=True)
class Request:
    """The arguments of `dedicate_params`, and the Newton-Schulz dtype of the optimizer."""

    layout: str = "auto"
    select: Select | None = None
    splits: Splits | None = None
    heads: Heads | None = None
    costs: Any = "measured"
    solver: str = "auto"
    planner: config.PlannerOptions = config.PlannerOptions()  # noqa: RUF009  frozen
    options: Options | None = None
    plan: OwnershipPlan | None = None
    kernels: config.KernelOptions = config.KernelOptions()  # noqa: RUF009  frozen
    mesh: DeviceMesh | None = None
    ns_dtype: str | torch.dtype = "auto"

    @classmethod
    def of(cls, dedicate: Mapping[str, Any] | None, planned: Sequence[Ownership]) -> Request:
        """Read an optimizer's ``dedicate=``, or how its parameters were ``planned`` already."""
        asked = dict(dedicate or {})
        known = [f.name for f in fields(cls) if f.name != "ns_dtype"]
        if unknown := sorted(asked.keys() - {*known}):
            raise TypeError(
                "dedicate= takes keyword arguments of dmuon.dedicate_params "
                f"({', '.join(known)}), found {unknown}"
            )
        if asked and planned:
            raise OwnershipError(
                "dedicate= says how to plan, but these parameters are planned: say it there (in "
                "dmuon.dedicate_params), or call own.close() if they had another dmuon.Muon"
            )
        if planned:
            return planned[0].asked
        request = cls(**asked)
        reduces = getattr(request.options, "reduce_to_owner", False)
        if request.layout == Layout.DEDICATED or reduces:
            raise OwnershipError(
                "dedicate= says how to plan at the first step, and layout='dedicated' and "
                "reduce_to_owner=True take gradients in the backward before it: call "
                "dmuon.dedicate_params(model, ...) with these arguments before dmuon.Muon(model)"
            )
        return request


class Dedicate(TypedDict, total=False):
    """Arguments of `dedicate_params`, for ``dmuon.Muon(..., dedicate=...)``."""

    layout: LayoutName
    select: Select | None
    splits: Splits | None
    heads: Heads | None
    costs: str | os.PathLike[str] | CostTable
    solver: SolverName
    planner: config.PlannerOptions
    options: Options | None
    plan: OwnershipPlan | None
    kernels: config.KernelOptions
    mesh: DeviceMesh | None


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    layout: LayoutName = "auto",
    select: Select | None = None,
    splits: Splits | None = None,
    heads: Heads | None = None,
    costs: str | os.PathLike[str] | CostTable = "measured",
    solver: SolverName = "auto",
    planner: config.PlannerOptions = config.PlannerOptions(),  # noqa: B008  frozen
    options: Options | None = None,
    plan: OwnershipPlan | None = None,
    kernels: config.KernelOptions = config.KernelOptions(),  # noqa: B008  frozen
) -> Ownership:
    """Decide which rank owns which matrix of ``model``, the same on every rank.

    A collective call: every rank of ``mesh`` makes it with the same model and arguments. Without
    ``mesh`` it uses the model's largest mesh (`sharded`), the ranks of `DistributedDataParallel`,
    or all ranks. A plain module, and any module in the `dedicated` layout, starts from the weights
    of the mesh's first rank; other models keep theirs.

    Args:
        layout: "sharded" for a model with `DTensor` parameters (FSDP2, HSDP, tensor and expert
            parallelism), "replicated" for a plain module or `DistributedDataParallel`; "auto" looks
            at the parameters. "dedicated": only its owner stores a matrix. Choose it before
            ``fully_shard(..., ignored_params=own.dedicated_params)``, or on a plain module, even on
            the meta device; a mesh of two axes, besides tensor parallelism, is (replicate, shard).
        options: `ShardedOptions`, `ReplicatedOptions` or `DedicatedOptions`, matching the layout.
        select: ``(name, parameter) -> bool`` picks the matrices instead of the default rules.
        splits: name pattern -> sizes along the outputs, or ``{"sizes": ..., "dim": ...}``; cuts a
            fused parameter into several matrices (docs/routing.md).
        heads: name pattern -> number of equal pieces; each piece is a matrix.
        costs: "measured" chooses kernels and times each shape (at most about 10 seconds per shape;
            results are cached), "analytic" estimates times for this device, "analytic:<device>" for
            another (docs/costs.md); or a `CostTable`, or its path.
        solver: "auto", "milp", "greedy" or "round_robin" (docs/scheduler.md).
        plan: a saved plan to reuse, after a check that it fits.
        kernels: how owners compute Newton-Schulz (docs/kernels.md). The kernels that a saved plan
            names are used; asking for others beside it is an error.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the arguments or the model do not fit, or several processes were launched
            without a process group. Raised on every rank, as ConsensusError on ranks without it.
    """
    request = Request(
        layout, select, splits, heads, costs, solver, planner, options, plan, kernels, mesh
    )  # fmt: skip
    return plan_given(Given(model), request)


def plan_given(given: Given, request: Request) -> Ownership:
    """Plan a model or an optimizer's parameters; `dedicate_params` and `plan_groups` call this."""
    process_groups.check_launched(given.caller)
    if isinstance(given.model, nn.Module):
        refuse_fsdp1(given.model.modules())
        reshard(given.model.modules())
    named, mesh = given.trainable(), request.mesh
    if given.ddp is None and mesh is None:
        mesh = dtensors.covering_mesh(named)
    timeout_s = getattr(request.options, "timeout_s", None)
    transport = _transport(mesh, given.ddp, timeout_s, dtensors.flaw_of_device(named))
    at = mesh, transport.world, [p for _, p in named], given.ddp, request.planner
    # Not compiled: timed code must be the code that runs. Loading the compiler here takes seconds.
    plan_on_all = torch.compiler.disable(assemble) if "torch._dynamo" in sys.modules else assemble
    topology = partial(mesh_topology, *at)
    ownership = plan_on_all(given, replace(request, mesh=mesh), transport, topology)
    if transport.rank == 0:
        ddp = given.ddp and {"DDP": given.ddp.process_group}
        _warn_of_timeouts(ddp or dtensors.groups_of(mesh, named))
    return ownership


def plan_groups(
    groups: ParamGroups,
    held: Sequence[Group],
    named: Callable[[], dtensors.Named],
    request: Request,
    sizes: Callable[[ModelSpecs], StateSizes],
    before: Ownership | None,
) -> Ownership:
    """Plan the parameters that an optimizer's param groups hold now.

    ``held`` are these groups; parameters that were replaced in the model are refreshed in them.
    ``named`` reads them. ``before`` is the ownership to replace.
    """
    model, flaw = None, None
    try:
        named()
        model = groups.refresh(held)
        now = named()
    except Exception as error:  # may concern this rank alone
        flaw, now = error, [("", p) for group in held for p in group["params"]]
    # This ends another optimizer of these parameters, such as that of an earlier run.
    for other in ownerships_in(model, (p for _, p in now), by_optimizers=True):
        if other is not before:
            other.close()

    def routed() -> ModelSpecs:
        if flaw is not None:
            raise flaw
        return groups.specs(now)

    ownership = plan_given(Given(model, now, routed, before, sizes), request)
    if not (ownership.plan.specs.matrices or groups.is_stage) and ownership.rank == 0:
        warn(
            "dmuon: no matrix is trained yet, so AdamW updates all parameters; Muon begins "
            "when one is unfrozen, or added with opt.add_param_group",
            of_rank=True,
        )
    ownership.by_optimizer = True
    return ownership


def log_plan(plan: OwnershipPlan, seconds: float, why: str = "") -> None:
    """Log a plan in one line, with ``why`` it replaces another, and its choices at debug level."""
    log, loads = logging.getLogger("dmuon"), plan.loads_ms
    mean = sum(loads) / len(loads)
    text = "%s: layout %s, matrices: %d, ranks: %d, makespan %.3g ms, imbalance %.1f%%"
    head = f"planned{' again' * bool(why)} in {seconds:.2f} s" + (why and f", because {why}")
    sizes = plan.layout.value, len(plan.specs.matrices), len(loads)
    excess = plan.makespan_ms / mean - 1 if mean else 0.0
    log.info(text, head, *sizes, plan.makespan_ms, 100 * excess)
    search = plan.search.engine or plan.solver, plan.status, plan.search.seconds
    log.debug("owners by %s (%s, %.2f s); costs: %s", *search, plan.cost_source)
    kernels = Counter(batch.kernel or "chosen by shape" for batch in plan.batches)
    listed = ", ".join(f"{kernel} ({count})" for kernel, count in kernels.items())
    log.debug("kernels (batches): %s", listed)


def assemble(
    given: Given, request: Request, transport: Transport, topology: Callable[[], Topology]
) -> Ownership:
    """Plan over a given transport, closed on failure, as are its subgroups."""
    opened, began = [transport], time.perf_counter()
    purpose = given.caller
    if given.before is not None:
        purpose = "planning again, because parameters were unfrozen or added"
    with ExitStack() as undo:
        undo.callback(transport.close)
        # Finds everything that can be wrong on one rank.
        inspect = partial(_inspect, given, request, transport, topology)
        found = attempt_in_all([transport], inspect, what=purpose, digest=_Found.text)
        found.held = replace(found.held, device=devices.of(found.device).name())
        found.reports = transport.gather_objects(found.held)
        kinds = Counter(report.device for report in found.reports)
        if len(kinds) > 1:
            each = ", ".join(f"{bits} ({count})" for bits, count in sorted(kinds.items()))
            found.differ = f"ranks would not compute the same bits: {each}"
        if found.layout is not Layout.DEDICATED:
            # Pure, so that every rank gets the same result or the same error.
            found.shards = shards = shard_map(found.specs, found.reports)
        if not found.layout.keeps_state_at_owners:
            found.specs, sizes = shards.specs, given.sizes(shards.specs)
            found.limits = shards.limits(request.planner.owner_memory_bytes, sizes)
            if given.before is not None:
                found.plan = refitted(given.before.plan, found.specs, found.limits)
        if found.plan is not None:
            found.plan = fitted_plan(found.plan, found.specs, found.topology, found.layout)
            _check_owners(found.plan, found.limits, found.shards, found.differ)
        plan = _priced_plan(found)

        def open_group(partition: Sequence[Sequence[int]]) -> Transport:
            opened.append(transport.subgroup(partition))
            undo.callback(opened[-1].close)
            return opened[-1]

        runtime = _runtime(found, plan, open_group)
        undo.pop_all()
    for one in opened:
        if isinstance(one, C10dTransport):
            one.end_planning()
    if transport.rank == 0 and given.before is None:  # otherwise `Muon` logs why it plans again
        log_plan(plan, time.perf_counter() - began)
    return Ownership(plan, runtime, given.inner, request)


def _priced_plan(found: _Found) -> OwnershipPlan:
    """Plan by the requested costs; a collective call."""
    request = found.request
    if found.plan is not None or request.costs != "measured":
        return _plan_by(request.costs, found)
    keys = [m.key for m in found.specs.matrices]
    # In the other layouts owners run Newton-Schulz alone.
    momentum = found.layout.keeps_state_at_owners
    costs = measured_costs(
        found.transport, keys, found.device, found.planner, kernels=request.kernels,
        ns_dtype=request.ns_dtype, momentum=momentum, batch_bytes=found.batch_bytes,
    )  # fmt: skip
    is_asked = found.planner.links == "measured" or found.device.type == "cpu"  # CPU cores send
    if costs.entries and found.shards is not None and is_asked and found.transport.world > 1:
        costs = on_links(costs, found.transport, found.device, found.planner, found.topology)
    return _plan_by(costs, found)


def _plan_by(costs: Any, found: _Found) -> OwnershipPlan:
    """Plan by ``costs`` on the first rank and send the plan to all; a collective call."""
    ns_dtype, device_type = found.request.ns_dtype, found.topology.device_type

    def solved() -> str:
        if found.plan is not None:
            return found.plan.to_json()
        momentum = found.layout.keeps_state_at_owners
        itemsize = resolve_ns_dtype(ns_dtype, found.device).itemsize
        links, table = found.planner.links, resolve_costs(costs, device_type, momentum=momentum)
        if links != "measured":
            table = table.on_network(links, found.topology.columns)
        how = found.layout, found.request.solver, found.planner, found.limits
        plan = planned(
            found.specs, found.topology, table, found.shards, *how, batch_bytes=found.batch_bytes,
            item=itemsize, asked=_sharded(found.options), differ=found.differ,
        )  # fmt: skip
        return plan.to_json()

    read = partial(OwnershipPlan.from_json, solve_on_first(found.transport, solved))
    what, digest = "dmuon.dedicate_params (the plan)", OwnershipPlan.fingerprint
    return attempt_in_all([found.transport], read, what=what, digest=digest)


# ---- this rank's view of the model -------------------------------------------------------


@dataclass
class _Found:
    """This rank's inputs of planning. ``reports``, ``shards`` and ``limits`` follow from the shards
    that each rank ``held``, where the layout needs them; ``plan`` is a reused plan."""

    given: Given
    request: Request
    transport: Transport
    parameters: list[nn.Parameter]
    layout: Layout
    options: Options
    specs: ModelSpecs
    topology: Topology
    held: RankShards
    planner: config.PlannerOptions
    plan: OwnershipPlan | None
    reports: Sequence[RankShards] = ()
    shards: ShardMap | None = None
    limits: OwnerLimits | None = None
    differ: str = ""

    @property
    def device(self) -> torch.device:
        """The device of Newton-Schulz; for a model on the meta device, the device of its mesh."""
        device = dtensors.compute_device(self.parameters)
        is_meta = device.type == "meta"
        return devices.current_device(self.topology.device_type) if is_meta else device

    @property
    def batch_bytes(self) -> int:
        """The most bytes in a batch of several matrices, in the Newton-Schulz dtype."""
        is_cut = isinstance(self.options, config.ShardedOptions)
        name = "bucket_bytes" if is_cut else "publish_bucket_bytes"
        return config.BATCH_BUCKETS * (getattr(self.options, name, None) or config.BUCKET_BYTES)

    def text(self) -> str:
        """List, in lines, the values that must agree on all ranks."""
        request, options, costs = self.request, self.options, self.request.costs
        if isinstance(costs, CostTable):
            digest = hashlib.sha256(costs.to_json().encode()).hexdigest()
            costs = f"{costs.source} (table {digest[:12]})"
        arguments: dict[str, Any] = {
            "layout": self.layout.value,
            "options": options,
            # Each rank may have a cache of its own.
            "planner": replace(request.planner, cache_dir=None),
            "costs": os.fspath(costs) if isinstance(costs, (str, os.PathLike)) else type(costs),
            "solver": request.solver,
            "kernels": request.kernels,
            "plan": None if request.plan is None else request.plan.fingerprint(),
        }
        if isinstance(options, config.DedicatedOptions) and options.groups is not None:
            assert self.given.inner is not None
            # A function's repr differs between ranks, so compare the modules that it chooses.
            modules = [(canonical_name(n), m) for n, m in self.given.inner.named_modules() if n]
            arguments["options"] = replace(options, groups=None)
            arguments["groups"] = [n for n, m in modules if options.groups(n, m)]
        lines = [f"code=dmuon {code_hash()}, torch {torch.__version__}"]
        each = self.topology.ranks_per_node  # before what follows from it
        lines += [f"ranks per node, LOCAL_WORLD_SIZE or PlannerOptions(ranks_per_node=...)={each}"]
        lines += [str(self.topology)]
        specs: list[Any] = [*self.specs.parameters, *self.specs.matrices]
        for spec in specs:
            values = ((f.name, getattr(spec, f.name)) for f in fields(spec))
            lines.append(", ".join(f"{k} {getattr(v, 'value', v)}" for k, v in values))
        if self.layout is Layout.REPLICATED and not _starts_from_first(self.given, options):
            # Replicas that start from different weights never converge.
            for known, p in zip(self.specs.parameters, self.parameters, strict=True):
                some = dtensors.sample(p.detach(), 8).tolist()
                lines.append(f"some weights of parameter {known.name!r}: {some}")
        return "\n".join([*lines, *(f"{k}={v}" for k, v in arguments.items())])


@cache
def code_hash() -> str:
    """Return twelve hexadecimal digits that change with any source file of this package."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _starts_from_first(given: Given, options: object) -> bool:
    """Whether all ranks start from the first rank's weights."""
    asked = isinstance(options, config.ReplicatedOptions) and options.broadcast_parameters
    return given.ddp is None and given.named is None and asked


def _inspect(
    given: Given, request: Request, transport: Transport, topology: Callable[[], Topology]
) -> _Found:
    inner, named = given.inner, given.trainable()
    if given.named is None and not isinstance(inner, nn.Module):
        raise TypeError(f"dedicate_params takes an nn.Module, found {type(inner).__name__}")
    layout = _layout(request, given)
    if inner is not None:
        _check_wrapping(inner, given.ddp, layout)
        if any(ownership is not given.before for ownership in ownerships_of(inner)):
            raise OwnershipError(
                "this model is dedicated already: call close() on its Ownership before "
                "dedicate_params is called again"
            )
    if given.routed is not None:
        specs = given.routed()
    else:
        assert inner is not None
        specs = collect(
            inner, select=request.select, splits=request.splits, heads=request.heads,
            allow_meta=layout is Layout.DEDICATED,
        )  # fmt: skip
    _check_request(request)
    if (ddp := given.ddp) is not None:
        if (world := dist.get_world_size(ddp.process_group)) != transport.world:
            raise OwnershipError(
                f"DistributedDataParallel averages over {world} ranks but the mesh has "
                f"{transport.world}: pass the mesh that DDP was built on, or none"
            )
        ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
        for name, p in ddp.module.named_parameters():
            if p.requires_grad and name in ignored:
                raise OwnershipError(
                    f"parameter {name!r} is ignored by DistributedDataParallel, so its gradient "
                    "would not be averaged: freeze it, or let DDP have it"
                )
    mesh = topology()
    if layout is Layout.DEDICATED:
        _check_axes(named, mesh, request.options)
    if layout in (Layout.REPLICATED, Layout.REDUCED):
        rank, world = transport.rank, transport.world
        held = RankShards.of(rank, [dtensors.replica(p, rank, world) for _, p in named])
    else:
        rank = dist.get_rank() if process_groups.is_initialized() else 0
        held = RankShards.of(rank, [dtensors.local_shard(n, p, rank) for n, p in named])
    found = _Found(
        given, request, transport, [p for _, p in named], layout,
        request.options or _OPTIONS[layout](), specs, mesh, held, request.planner, request.plan,
    )  # fmt: skip
    if request.costs == "analytic" and request.plan is None:
        # Ranks compare this name: on mixed devices none would be right for all.
        name = analytic_class(found.device.type, devices.of(found.device).name())
        found.request = replace(request, costs=f"analytic:{name}")
    return found


def _layout(request: Request, given: Given) -> Layout:
    """Resolve "auto", and check that the model and the options fit the layout."""
    known = [member.value for member in Layout if member is not Layout.REDUCED]
    if request.layout not in known:
        raise OwnershipError(f"layout must be one of {known}, found {request.layout!r}")
    distributed = next((n for n, p in given.trainable() if dtensors.is_distributed(p)), None)
    if (layout := Layout(request.layout)) is Layout.AUTO:
        layout = Layout.REPLICATED if distributed is None else Layout.SHARDED
    if layout is Layout.REPLICATED and distributed is not None:
        raise OwnershipError(
            f"layout='replicated' but parameter {distributed!r} is a DTensor: use layout='sharded'"
        )
    if layout is Layout.SHARDED and given.ddp is not None:
        raise OwnershipError(
            "layout='sharded' does not take DistributedDataParallel; replicate with a 2-D mesh "
            "in fully_shard (HSDP), or use layout='replicated'"
        )
    if layout is Layout.SHARDED and distributed is None:
        raise OwnershipError(
            "layout='sharded' but no parameter is a DTensor: call fully_shard or "
            "parallelize_module before dmuon.dedicate_params, or use layout='replicated'"
        )
    expected = _OPTIONS[layout]
    if request.options is not None and not isinstance(request.options, expected):
        raise TypeError(
            f"options for layout {layout.value!r} must be {expected.__name__}, found "
            f"{type(request.options).__name__}"
        )
    return Layout.REDUCED if getattr(request.options, "reduce_to_owner", False) else layout


def _check_wrapping(inner: nn.Module, ddp: DDP | None, layout: Layout) -> None:
    remedy = (
        "call own = dmuon.dedicate_params(model, mesh, layout='dedicated') on the plain module, "
        "before any fully_shard(..., ignored_params=own.dedicated_params)"
    )
    for name, module in inner.named_modules():
        if isinstance(module, DDP) and layout.keeps_state_at_owners:
            raise OwnershipError(
                f"the model holds a DistributedDataParallel at {name!r}, which would average "
                "gradients a second time: pass the DistributedDataParallel itself to "
                "dedicate_params (and compile the module inside it, or the blocks)"
            )
    if layout is Layout.DEDICATED and ddp is not None:
        raise OwnershipError(
            "layout='dedicated' does not take DistributedDataParallel, whose constructor refuses "
            f"the placeholders that ranks without a weight have: {remedy}"
        )
    if layout is Layout.DEDICATED and fsdp_roots(inner):
        raise OwnershipError(f"layout='dedicated' was asked for after fully_shard: {remedy}")


def _check_axes(named: dtensors.Named, topology: Topology, options: object) -> None:
    """Check that distributed parameters of the `dedicated` layout lie on axes of the mesh."""
    world = dist.get_world_size() if process_groups.is_initialized() else 1
    for name, p in named:
        if not (axes := dtensors.mesh_axes(p)):
            continue
        if not {*axes} <= {*topology.axes} or topology.world < world:
            raise OwnershipError(
                f"parameter {name!r} lies on the mesh axes {list(axes)}; pass the whole mesh of "
                "named axes, data-parallel ones included: dmuon.dedicate_params(model, mesh, "
                f"layout='dedicated'). Found {list(topology.axes)} with {topology.world} ranks"
            )
        if isinstance(options, config.DedicatedOptions) and options.param_dtype is not None:
            raise OwnershipError(
                f"DedicatedOptions.param_dtype={options.param_dtype} but parameter {name!r} is "
                "tensor-parallel: leave param_dtype None and use torch.autocast"
            )


def _check_request(request: Request) -> None:
    """Check types, that the kernels exist, and that a saved plan agrees with the other options."""
    planner, kernels, plan = request.planner, request.kernels, request.plan
    if not isinstance(planner, config.PlannerOptions):
        raise TypeError(f"planner must be PlannerOptions, found {type(planner).__name__}")
    if not isinstance(kernels, config.KernelOptions):
        raise TypeError(f"kernels must be KernelOptions, found {type(kernels).__name__}")
    restarts_of(kernels.method)
    if kernels.backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"KernelOptions.backend must be 'auto' or one of {', '.join(BACKENDS)}, found "
            f"{kernels.backend!r}"
        )
    if plan is None:
        return
    if not isinstance(plan, OwnershipPlan):
        how = ": read a file by OwnershipPlan.from_json(text)" * isinstance(plan, str | Path)
        raise TypeError(f"plan must be an OwnershipPlan, found {type(plan).__name__}{how}")
    asked, found = planner.redundancy, {max(1, len(batch.copies)) for batch in plan.batches}
    if asked != "auto" and not found <= {1, asked}:
        raise PlanError(
            f"redundancy={asked}, but the saved plan computes some matrices {max(found)} times: "
            "leave out redundancy= or plan="
        )
    caps = [c for c in (planner.owner_memory_bytes, plan.limits.memory_bytes) if c is not None]
    fullest = max(plan.state_bytes)
    if caps and fullest > min(caps):
        raise PlanError(
            f"in the saved plan rank {plan.state_bytes.index(fullest)} stores {fullest} bytes of "
            f"optimizer state, more than owner_memory_bytes={min(caps)}: plan anew, or raise it"
        )
    for kernel in {batch.kernel for batch in plan.batches} - {""}:
        choice = KernelChoice.parse(kernel)
        same_form = kernels.method in ("auto", choice.method, kernel.partition("/")[0])
        if not same_form or kernels.backend not in ("auto", choice.backend):
            raise PlanError(
                f"the saved plan runs {kernel}, and kernels= asks for method={kernels.method!r}, "
                f"backend={kernels.backend!r}: leave one of them out, plan= to plan again"
            )


def _check_owners(
    plan: OwnershipPlan, limits: OwnerLimits | None, shards: ShardMap | None, differ: str
) -> None:
    """Check that the model's shards let a saved plan's owners own their matrices, and that several
    ranks compute a matrix only where planning could choose these ranks."""
    if differ and any(batch.copies for batch in plan.batches):
        raise PlanError(
            f"in the saved plan several ranks compute a matrix, and {differ}: plan anew"
        )
    domain_of = limits.domain_of if limits else ()
    for batch in plan.batches:
        for i in batch.matrices:
            name, ranks = plan.specs.matrices[i].name, batch.copies
            domain = limits.domains[domain_of[i]] if limits and domain_of else batch.ranks
            for rank in set(batch.ranks).difference(domain):
                raise PlanError(
                    f"in the saved plan rank {rank} owns {name!r}, which only ranks "
                    f"{list(domain)[:8]} hold in this model: plan anew"
                )
            has_parts = shards is not None and ranks and not plan.layout.keeps_state_at_owners
            ways = parts_of(shards.replicas(i), plan.topology) if shards and has_parts else []
            ways = [way for way in ways if len(way) == len(ranks)]
            each = [all(len({*part} & {*ranks}) == 1 for part in way) for way in ways]
            if ranks and not any(each):
                raise PlanError(
                    f"in the saved plan ranks {list(ranks)[:8]} compute {name!r} each, "
                    "expected one rank of each part of this mesh: plan anew"
                )


def _runtime(
    found: _Found, plan: OwnershipPlan, new_group: process_groups.NewGroup
) -> LayoutRuntime:
    """Set up the layout: collective calls first, then work that may fail on one rank alone."""
    options, transport = found.options, found.transport
    model, named = found.given.inner, found.parameters
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    made: Callable[[], LayoutRuntime]
    if isinstance(options, config.ReplicatedOptions) and _starts_from_first(found.given, options):
        process_groups.start_from_first(zip(tensors, repeat(transport)))
    if isinstance(options, config.ReplicatedOptions) and options.reduce_to_owner:
        assert model is not None
        sets = {tuple(range(transport.world))}
        peers = open_peers(sets, plan.topology, transport, new_group, found.device)
        how = transport, options, found.given.ddp, peers
        made = partial(ReducedRuntime, plan, model, named, *how)
    elif not isinstance(options, config.DedicatedOptions):
        options = _sharded(options)
        assert found.shards is not None
        device = dtensors.compute_device(named)
        connect(transport, device)
        sharing, every = found.shards.sharing, enumerate(plan.copies)
        sets = {ranks for i, of in every for ranks in sharing(i, of, plan.topology)}
        at = device, open_peers(sets, plan.topology, transport, new_group, device)
        made = partial(ParamsRuntime, plan, found.shards, model, named, transport, options, *at)
    else:
        assert model is not None
        axes = frozenset(axis for p in named for axis in dtensors.mesh_axes(p))
        grid = process_groups.Grid.of(plan.topology, axes)
        slices = Slices(plan, grid, slice_boxes(plan.specs, grid, found.reports))
        groups = process_groups.ProcessGroups.open(grid, transport, new_group)
        connect(groups.tensors, found.device)
        if options.broadcast_parameters and all(p.device.type != "meta" for p in named):
            # Each slice of a `DTensor` has equal values on all ranks that hold it.
            among = [groups.data if dtensors.is_distributed(t) else groups.world for t in tensors]
            process_groups.start_from_first(zip(map(dtensors.local_tensor, tensors), among))
        made = partial(DedicatedRuntime, slices, model, named, groups, options, axes, found.device)
    return attempt_in_all([transport], made, what="dmuon.dedicate_params")


def _sharded(options: Options) -> config.ShardedOptions:
    """Return the options of the pipeline that moves bytes."""
    if isinstance(options, config.ReplicatedOptions):
        return config.ShardedOptions(bucket_bytes=options.publish_bucket_bytes)
    return options if isinstance(options, config.ShardedOptions) else config.ShardedOptions()


def _transport(
    mesh: DeviceMesh | None, ddp: DDP | None, timeout_s: float | None, flaw: str | None = None
) -> Transport:
    if not process_groups.is_initialized():
        if mesh is not None:
            raise OwnershipError(
                "a mesh was given but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() first"
            )
        return Transport()
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, found {type(mesh).__name__}")
    parent = None
    if mesh is None and ddp is not None:
        parent = ddp.process_group
    elif mesh is not None and mesh.ndim == 1 and splits_communicators():
        parent = mesh.get_group()
    transport = C10dTransport(_ranks(mesh, ddp), timeout_s, parent=parent)
    try:
        transport.begin(flaw)
    except Exception:
        transport.close()
        raise
    return transport


def _warn_of_timeouts(groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Warn if a group waits longer for a hanging rank than `init_process_group` was told to."""
    asked = timeout_of(dist.group.WORLD) if groups else None
    longer = {name: t for name, g in groups.items() if asked and (t := timeout_of(g)) and t > asked}
    if asked and longer:
        most = max(longer.values()).total_seconds()
        warn(
            f"dmuon: the default process group waits {asked.total_seconds():g} s for a rank that "
            f"hangs, the groups of {', '.join(longer)} wait {most:g} s, because init_device_mesh "
            "and new_group have timeouts of their own. Set them: group.set_timeout(timeout), or "
            "mesh.get_group(i).set_timeout(timeout) for each of range(mesh.ndim)"
        )


def _ranks(mesh: DeviceMesh | None, ddp: DDP | None) -> list[int]:
    """Return the global ranks that plan together, in order."""
    if mesh is not None:
        return dtensors.ranks_of(mesh)
    if ddp is not None:
        return dist.get_process_group_ranks(ddp.process_group)
    return list(range(dist.get_world_size() if process_groups.is_initialized() else 1))


def mesh_topology(
    mesh: DeviceMesh | None,
    world: int,
    parameters: Sequence[nn.Parameter],
    ddp: DDP | None,
    planner: config.PlannerOptions,
) -> Topology:
    device = dtensors.compute_device(parameters)
    if device.type == "meta":
        device = devices.default_device() if mesh is None else torch.device(mesh.device_type)
    if mesh is not None and mesh.device_type != device.type:
        raise OwnershipError(
            f"the mesh is of {mesh.device_type!r} devices but the model is on {device}: move the "
            f"model, or make the mesh with init_device_mesh({device.type!r}, ...)"
        )
    ranks = range(world) if mesh is None and ddp is None else _ranks(mesh, ddp)
    shape = (world,) if mesh is None else tuple(mesh.shape)
    axes = ("dp",) if mesh is None else dtensors.axis_names(mesh)
    # The mesh may cover some ranks only, with gaps: their nodes follow from their global ranks.
    if (per_node := planner.ranks_per_node) is None and process_groups.is_initialized():
        per_node = local_world_size()
    nodes = [0 if per_node is None else rank // per_node for rank in ranks]
    return Topology.on_nodes(shape, axes, nodes, device.type)
