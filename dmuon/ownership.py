"""`Ownership`, the live handle of a plan; `no_sync` and `clip_grad_norm_` for a whole model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.hooks import fsdp_roots, hidden_parameters
from dmuon.comm.layout import Gradients, LayoutRuntime
from dmuon.comm.process_groups import Stages
from dmuon.dtensors import compute_device, is_distributed, local_tensor, whole_tensor
from dmuon.groups import ParamGroups
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.select import Route, routes_of
from dmuon.scheduler.specs import StateSizes, canonical_name
from dmuon.step.engine import StepTelemetry
from dmuon.tensors import scale_all, wide_norms
from dmuon.types import Layout, OwnershipError, PlanError

if TYPE_CHECKING:
    from dmuon.report.data import LoadBalanceReport

# Keys are ids: an ownership keeps its parameters, so their ids stay unique while it lives. Weak
# references to parameters would not do: torch refuses to convert such a DTensor (`model.to`).
_owner_by_parameter: weakref.WeakValueDictionary[int, Ownership] = weakref.WeakValueDictionary()
# A model keeps its ownership alive, even without its handle; an ownership keeps no module.
_owner_by_model: weakref.WeakKeyDictionary[nn.Module, Ownership] = weakref.WeakKeyDictionary()
# The other pipeline stages that an optimizer with these param groups agrees with.
staged: weakref.WeakKeyDictionary[ParamGroups, Stages | None] = weakref.WeakKeyDictionary()


class Ownership:
    """Who owns which matrix of a model, and the runtime that moves gradients and updates. Made by
    `dmuon.dedicate_params`, with its arguments in ``asked``. The model keeps it alive."""

    def __init__(
        self, plan: OwnershipPlan, runtime: LayoutRuntime, model: nn.Module | None, asked: Any
    ) -> None:
        self.plan = plan
        self.runtime = runtime
        self.asked = asked
        planned_ms = None  # comparable only if costs were measured
        if not plan.cost_source.startswith("analytic"):
            planned_ms = sum(batch.ms for batch in plan.batches if self.rank in batch.ranks)
        self.telemetry = StepTelemetry(runtime.transport, runtime.meter, runtime.device, planned_ms)
        self.closed = False
        self.by_optimizer = False  # whether a `dmuon.Muon` made it, so that no user has it
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._ids: list[int] = []
        self._register()

    def _register(self) -> None:
        self._forget()
        self._ids = [id(p) for p in self.runtime.parameters]
        _owner_by_parameter.update(dict.fromkeys(self._ids, self))
        if (model := self._model()) is not None:
            _owner_by_model[model] = self

    def _forget(self) -> None:
        for i in self._ids:
            if _owner_by_parameter.get(i) is self:
                del _owner_by_parameter[i]
        if (model := self._model()) is not None:
            _owner_by_model.pop(model, None)

    def find_parameters(self) -> None:
        """Take over parameters that a framework has made since planning (`dedicated` layout);
        OwnershipError if a parameter that dmuon keeps was replaced."""
        self.runtime.find_parameters()
        self._register()

    def count_state(self, sizes: StateSizes) -> None:
        """Add the state of the optimizer being bound to plan and report; PlanError if it exceeds
        ``owner_memory_bytes`` on a rank."""
        found, known = self.runtime.limits(sizes), self.plan.limits
        known = replace(known, fixed_bytes=found.fixed_bytes, matrix_bytes=found.matrix_bytes)
        if known == self.plan.limits:
            return
        plan = replace(self.plan, limits=known)
        cap, fullest = known.memory_bytes, max(plan.state_bytes)
        if cap is not None and fullest > cap:
            raise PlanError(
                f"rank {plan.state_bytes.index(fullest)} stores {fullest} bytes of optimizer state "
                "with these master_weights, momentum_dtype and variant, more than "
                f"owner_memory_bytes={cap}: raise the cap, keep less state, or use more ranks"
            )
        self.plan = plan

    def __repr__(self) -> str:
        return repr(self.plan).replace("Plan", "", 1)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The planned parameters, in the order of ``plan.specs.parameters``."""
        return self.runtime.parameters

    @property
    def rank(self) -> int:
        """This process's rank in the mesh, as in `owner_of` and `owned_by`."""
        return self.runtime.transport.rank

    def adamw_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that AdamW updates, to clip them separately (docs/recipes.md)."""
        return [self.parameters[i] for i in self.plan.specs.adamw_parameters()]

    def report(self) -> LoadBalanceReport:
        """Report the balance of the work and the route of every parameter; after a few training
        steps also measured beside predicted times. Not a collective call: any rank may ask."""
        from dmuon.report.data import LoadBalanceReport  # not at import: it loads rich

        model = self._model()
        name = "" if model is None else type(model).__name__
        return LoadBalanceReport(self.plan, self.telemetry.measured_ms(), name)

    def owner_of(self, fqn: str) -> int | tuple[int, ...]:
        """Return the mesh rank that owns a matrix, by the name of the matrix or its parameter; for
        a parameter of several matrices, one rank per matrix. KeyError for others."""
        name, specs = canonical_name(fqn), self.plan.specs
        owned = [*zip(specs.matrices, self.plan.owners, strict=True)]
        if whole := [owner for m, owner in owned if m.name == name]:
            return whole[-1]
        if not (owners := tuple(o for m, o in owned if specs.parameters[m.parameter].name == name)):
            why = next((p.reason for p in specs.parameters if p.name == name), "unknown")
            raise KeyError(f"{fqn!r} is not a matrix ({why})")
        return owners

    def owned_by(self, rank: int) -> tuple[str, ...]:
        """Return the names of the matrices that a mesh rank owns."""
        return self.plan.owned_by(rank)

    def numel(self) -> int:
        """Return the number of elements of all planned parameters, by their logical shapes."""
        return sum(p.numel for p in self.plan.specs.parameters)

    def shape_of(self, fqn: str) -> tuple[int, ...]:
        """Return a parameter's logical shape, wherever it is stored. KeyError for other names."""
        shapes = {p.name: p.shape for p in self.plan.specs.parameters}
        if (name := canonical_name(fqn)) not in shapes:
            raise KeyError(f"{fqn!r} is no planned parameter")
        return shapes[name]

    @property
    def dedicated_params(self) -> set[nn.Parameter]:
        """Parameters that only their owner stores; empty except in the `dedicated` layout."""
        return set(self.runtime.dedicated)

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        """Make the published weights of ``module`` readable inside the context.

        In the `dedicated` layout this is a collective call, for the same module on every rank; all
        ranks get the whole weights in the dtype in which they are stored. Each rank that stores a
        weight keeps its own writes to it, so write the same values on every rank."""
        return self.runtime.materialized(module)

    @contextmanager
    def ignored_by_fully_shard(self) -> Iterator[None]:
        """Hide the dedicated parameters from `fully_shard` inside the context, for code that cannot
        pass ``ignored_params=own.dedicated_params``. Not a collective call. OwnershipError in other
        layouts than `dedicated`."""
        model = self._model()
        if self.plan.layout is not Layout.DEDICATED or model is None:
            raise OwnershipError(
                f"ignored_by_fully_shard() belongs to layout='dedicated'; this ownership is "
                f"{self.plan.layout.value!r}, which leaves every parameter to the framework: call "
                "fully_shard before dmuon.dedicate_params"
            )
        with hidden_parameters(model, self.dedicated_params):
            yield

    def become(self, other: Ownership) -> None:
        """Continue as another ownership of the same model, whose handle is no longer used."""
        self.telemetry.wait()
        self.runtime.close()
        self.plan, self.runtime, self.telemetry = other.plan, other.runtime, other.telemetry
        self._register()

    def close(self) -> None:
        """Publish pending updates, remove every hook, and destroy the process group, so that the
        model is an ordinary module again. Call it on every rank."""
        if self.closed:
            return
        self.closed = True
        self.telemetry.wait()
        self.runtime.close()
        self._forget()


def ownership_of(parameter: Tensor) -> Ownership | None:
    """Return the open ownership that a parameter belongs to."""
    ownership = _owner_by_parameter.get(id(parameter))
    return None if ownership is None or ownership.closed else ownership


def ownerships_of(model: nn.Module) -> list[Ownership]:
    """Return the ownerships of a model's parameters, each once, in order of first use."""
    # A gathered FSDP2 unit shows other parameters, so modules are looked up as well.
    found = [*map(_owner_by_model.get, model.modules()), *map(ownership_of, model.parameters())]
    return list(dict.fromkeys(o for o in found if o is not None and not o.closed))


def ownerships_in(
    model: object, parameters: Iterable[object], *, by_optimizers: bool = False
) -> list[Ownership]:
    """Return the open ownerships of a model and parameters in order of first use: ownerships by
    `dedicate_params`, which first take over replaced parameters, or ``by_optimizers``."""
    of_model = ownerships_of(model) if isinstance(model, nn.Module) else []
    found = [*of_model, *(ownership_of(p) for p in parameters if isinstance(p, Tensor))]
    ownerships = [o for o in dict.fromkeys(found) if o and o.by_optimizer is by_optimizers]
    for ownership in ownerships if not by_optimizers else ():
        ownership.find_parameters()
    return ownerships


def routes_in(ownerships: Sequence[Ownership]) -> dict[Tensor, Route]:
    """Return how each planned parameter is updated."""
    routes = (zip(o.parameters, routes_of(o.plan.specs).values()) for o in ownerships)
    return dict(chain.from_iterable(routes))


def stages_of(model: nn.Module) -> Stages | None:
    """Return the ``nonfinite_group`` of the optimizer that trains modules of ``model``."""
    mine = {*model.modules()}
    for groups, stages in reversed([*staged.items()]):  # the latest optimizer
        models = (reference() for reference in groups.models)
        if any(not mine.isdisjoint(m.modules()) for m in models if m is not None):
            return stages
    return None


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Make backward accumulate gradients only locally, as `DistributedDataParallel.no_sync` does.

    The first backward after it (or `step`, or `clip_grad_norm_`) reduces the accumulated gradients.
    On FSDP2 this is ``set_requires_gradient_sync(False)``, and only a backward reduces: run the
    last backward of a step outside.

    Raises:
        OwnershipError: the model is dedicated and has no `dmuon.Muon` yet.
    """
    runtimes = [o.runtime for o in ownerships_of(model)]
    with ExitStack() as undo:
        for runtime in runtimes:
            undo.callback(runtime.set_sync, runtime.set_sync(False))
        for root in () if runtimes else fsdp_roots(model):
            root.set_requires_gradient_sync(False)
            undo.callback(root.set_requires_gradient_sync, True)
        if isinstance(model, DistributedDataParallel):
            undo.enter_context(model.no_sync())
        yield


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of ``model`` so that their joint norm is at most ``max_norm``.

    Like `torch.nn.utils.clip_grad_norm_` in one process on the whole batch: the norm before scaling
    is returned (0-d), counts every gradient once, including matrices at their owners, and is the
    same on every rank. A collective call, after backward and before `step`. Unlike torch's function
    it accepts gradients on several meshes (tensor parallelism of a part of the model), and with
    `Muon`'s ``nonfinite_group`` the norm is that of all pipeline stages: call it once, with all
    parts of the rank (``nn.ModuleList(parts)``).

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``max_norm`` or ``norm_type`` is out of range, or a parameter differs from the
            planned one.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing is scaled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"dmuon.clip_grad_norm_ takes the model itself, found {type(model).__name__}: "
            "dmuon.clip_grad_norm_(model, max_norm)"
        )
    max_norm, norm_type = float(max_norm), float(norm_type)
    if math.isnan(max_norm) or max_norm < 0 or math.isnan(norm_type) or norm_type <= 0:
        raise ValueError(
            f"max_norm must be >= 0 and norm_type > 0, found max_norm={max_norm}, "
            f"norm_type={norm_type}"
        )
    runtimes = [o.runtime for o in ownerships_of(model)]
    for runtime in runtimes:
        runtime.reduce_gradients()
    planned = {id(p) for runtime in runtimes for p in runtime.parameters}
    others = (p.grad for p in model.parameters() if id(p) not in planned)
    extra = [grad for grad in others if grad is not None]
    parts = [runtime.gradients() for runtime in runtimes]
    norms = [_norm_over_ranks(r, g, norm_type) for r, g in zip(runtimes, parts, strict=True)]
    norms += [_norm(extra, norm_type, extra[0].device)] if extra else []
    stages = stages_of(model)
    if not norms and stages is None:
        return torch.zeros(())
    total = _joint(norms or [torch.zeros((), dtype=torch.float64)], norm_type)
    if stages is not None:
        total = _over(total.to(compute_device([*model.parameters()])), norm_type, stages.all_reduce)
    total = total.to(torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to scale them regardless"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for stored in [*(g.stored for g in parts), [local_tensor(grad) for grad in extra]]:
        # With CPU offload gradients are on another device than the norm.
        scale_all(stored, factor.to(stored[0].device) if stored else factor)
    for runtime in runtimes:
        runtime.gradients_changed()
    return total


def _norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the joint norm of local and distributed gradients, 0-d float64: squares fit."""
    # A rank may hold no element of a matrix, and an empty tensor has no maximum.
    held = [g for g in grads if g.numel()]
    norms = wide_norms([g for g in held if not is_distributed(g)], norm_type)
    norms += [
        whole_tensor(torch.linalg.vector_norm(g, norm_type, dtype=torch.float64))
        for g in filter(is_distributed, held)
    ]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(norms or [nothing]), norm_type)


def _norm_over_ranks(runtime: LayoutRuntime, gradients: Gradients, norm_type: float) -> Tensor:
    """Return the norm of one ownership's gradients over all its ranks, the same on each."""
    counted = _norm(gradients.counted, norm_type, runtime.device).to(runtime.device)

    def reduce(tensor: Tensor, *, maximum: bool) -> None:
        runtime.transport.all_reduce(tensor, tag="norm", maximum=maximum).wait()

    norms = [_over(counted, norm_type, reduce)]
    norms += [_norm(gradients.common, norm_type, runtime.device)] if gradients.common else []
    return _joint(norms, norm_type)


def _over(norm: Tensor, norm_type: float, reduce: Callable[..., None]) -> Tensor:
    """Return the joint norm of all ranks' norms, by a collective ``reduce``."""
    is_max = math.isinf(norm_type)
    power = norm.clone() if is_max else norm.pow(norm_type)
    reduce(power, maximum=is_max)
    return power if is_max else power.pow(1 / norm_type)


def _joint(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([*norms]), norm_type)
