"""`Muon`: one `torch.optim.Optimizer` over matrices (Muon) and everything else (AdamW).

The class comes first; below it are what users pass to it (param groups of one algorithm each), and
its settings, checked and agreed on by all ranks.
"""

from __future__ import annotations

import logging
import math
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from inspect import signature
from itertools import islice, repeat, takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon.api import Given, Request, plan_given
from dmuon.comm.consensus import attempt_in_all
from dmuon.comm.hooks import refuse_fsdp1, reshard
from dmuon.comm.layout import OwnerRuntime
from dmuon.comm.process_groups import check_launched, check_planned_together
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import C10dTransport, host_can_read
from dmuon.config import (
    FINITE,
    SWITCH_RULES,
    AdamWDefaults,
    MuonDefaults,
    check_muon_group,
    checked,
    instead,
    is_idle,
)
from dmuon.dtensors import local_tensor
from dmuon.groups import (
    PROGRESS,
    Accepted,
    Found,
    Group,
    algorithm_of,
    as_here,
    check_group,
    completed,
    describe,
    find_models,
    held_by_modules,
    is_pair,
    joined_states,
    members,
    names_in,
    read_groups,
    unwrapped,
)
from dmuon.kernels.choice import common_choice, default_backend, fixed_choice, is_safe, why_not
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.ownership import Ownership, ownership_of, ownerships_of
from dmuon.period import Period, Schedule
from dmuon.report.data import LoadBalanceReport
from dmuon.rule import Hyper, Rule
from dmuon.scheduler.select import (
    THREE_WAYS,
    Member,
    collect,
    routes_of,
)
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ParameterSpec, canonical_name
from dmuon.step.at_owners import OwnerEngine
from dmuon.step.engine import Amp, Engine, Settings
from dmuon.step.on_params import ShardedEngine
from dmuon.tensors import not_finite
from dmuon.types import (
    Algorithm,
    Coefficients,
    DmuonError,
    KernelChoice,
    Layout,
    NewParameters,
    OwnershipError,
    SelectionError,
    first_of,
)

Route = tuple[ParameterSpec, tuple[MatrixSpec, ...]]
_log = logging.getLogger("dmuon")


class Muon(Optimizer):
    """Muon on the matrices of a model, AdamW on everything else.

    ``lr`` to ``adjust_lr_fn`` mean what they mean in `torch.optim.Muon`; two defaults differ:
    Polar Express coefficients, and "match_rms_adamw". With these an AdamW learning rate carries
    over as a safe start; the best one is often 2 to 5 times higher (docs/learning-rate.md).

    It plans who owns which matrix at its first `step` (or `report`, or ``ownership``), from the
    parameters that are then in ``param_groups``: `DTensor` parameters in the `sharded` layout,
    others in the `replicated` one, where ``p.grad`` must be the average over all ranks (DDP).
    `dmuon.dedicate_params(model)` plans before, for those who want to look first, or another
    layout. One `step`, on every rank::

        verdict     one all-reduce: whether all gradients are finite, who has some
        owners      Newton-Schulz, batch by batch; each result leaves at once
        everyone    momentum, AdamW on its parameters, while matrices travel; then the updates

    A full step that finds a non-finite gradient on any rank changes nothing on any rank; of several
    models in one optimizer, each has a verdict of its own.

    ``param_groups`` are the groups that were given, with the hyperparameters that their parameters
    need: those of `torch.optim.Muon` for matrices, of `torch.optim.AdamW` for others, and where a
    group has both, Muon's and ``adamw_betas``, ``adamw_eps``, ``adamw_weight_decay`` and
    ``adamw_lr_ratio``, AdamW's learning rate over ``lr``.

    Args:
        params: a module (with `DistributedDataParallel` around it or not), or what other optimizers
            take: parameters, (name, parameter) pairs, or group dicts of either. How each is updated
            follows from the live modules that hold it, or from its name where none does. A group
            may say ``algorithm="muon"`` or ``"adamw"`` (or ``use_muon=``), which wins.
        lr: a number, or a tensor of one element, which `step` reads.
        adjust_lr_fn: what multiplies ``lr`` for an ``m x n`` matrix. None or "original":
            ``sqrt(max(1, m / n))``; "spectral_unclamped": ``sqrt(m / n)``; a number: the root mean
            square that an update shall have over ``lr``, ``number * sqrt(max(m, n))``;
            "match_rms_adamw": 0.2, about that of AdamW's updates. Weight decay is never adjusted.
        momentum_mode: "ema" (as `torch.optim.Muon`) or "sgd" (with ``dampening``).
        period: MuonBP (`sharded` layout only). An integer P takes a full step where the step
            count, from 0, is a multiple of P, and block steps between: each rank orthogonalizes
            what it holds, without any traffic. `math.inf` never takes a full step; a function of
            the step count gives a period that changes, as `LinearPeriod` does.
        block_lr_ratio: multiplies the learning rate of block steps, which is adjusted to the dims
            of the block; theory has it between 1 and one over the square root of the number of
            blocks. None is 1.
        ns_dtype: dtype of the Newton-Schulz iteration and of published updates, as a torch dtype or
            its name; "auto" is float16 on CUDA, bfloat16 on a CPU that has it, float32 otherwise or
            where ranks differ.
        publish: "sync": after `step` weights are current (on CUDA the current stream waits).
            "async" returns while updates travel; then weights are current in a forward pass, in
            `state_dict` and after `synchronize`.
        master_weights: keep float32 weights behind lower-precision parameters. Without them one
            rank warns where a typical update is lost in the rounding of such parameters.
        nonfinite: what a gradient that is not finite does on all ranks: "skip" the step, with a
            warning that names the first matrices (on an accelerator at the next step), and count
            it in `stats`; or "raise". Block steps skip the blocks that are concerned, and "raise"
            waits for the next full step. `torch.amp.GradScaler` counts on skipped steps.
        verify_every: check some matrices after every so many steps: each rank makes their updates
            itself and compares what it stores; corruption that nobody noticed raises on every rank
            (docs/reliability.md).
        variant: what becomes of orthogonalized matrices before they are applied: "normuon" (rows of
            equal size by a second moment per row, arXiv 2510.05491) or an instance of a subclass of
            `dmuon.Rule` (docs/variants.md). Per group.
        cautious_weight_decay: decay only the elements that the update shrinks as well (arXiv
            2510.12402). Per group; matrices only.
        momentum_dtype: "bfloat16" keeps half of the momentum of float32 weights; it is advanced in
            their dtype. None: that of the weights, float32 with masters. Per group.
        adamw_lr: of what goes to AdamW; None means ``lr``.
        adamw_weight_decay: of what goes to AdamW; None means ``weight_decay``.
        dedicate: keyword arguments of `dmuon.dedicate_params` for when it plans itself, such as
            ``{"splits": {"*.qkv.weight": [512, 128, 128]}}``.
        others: keywords of other optimizers: ``betas`` are ``adamw_betas``; what is False or None,
            such as ``foreach=False``, is ignored.

    Raises:
        TypeError: a hyperparameter is of a wrong type, such as a string for a number, or there is
            no such keyword.
        ValueError: a hyperparameter is out of range, there are no parameters, neither modules nor
            names tell what they are, they do not fit the ownership, or several processes were
            launched and no process group was made. What is wrong with the plan is raised at the
            first step, on every rank.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes `torch.amp.GradScaler` leave its scale and its verdict to `step`, which shares them
        with all ranks or refuses them. It takes no closure, so in one there is no scaler, and who
        asks there (Lightning, before it clips) need not leave gradients alone."""
        return not self._run.in_closure

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | float | None = "match_rms_adamw",
        *,
        momentum_mode: str = "ema",
        dampening: float = 0.0,
        period: Period = 1,
        block_lr_ratio: float | None = None,
        ns_dtype: str | torch.dtype = "auto",
        publish: str = "sync",
        master_weights: bool = False,
        nonfinite: str = "skip",
        verify_every: int | None = None,
        variant: str | Rule | None = None,
        cautious_weight_decay: bool = False,
        momentum_dtype: str | torch.dtype | None = None,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        dedicate: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        betas = others.pop("betas", None)  # as torch.optim.AdamW calls them
        if betas is not None:
            if adamw_betas not in ((0.9, 0.95), betas):
                raise TypeError(
                    f"betas={betas} and adamw_betas={adamw_betas} are two words for one thing: "
                    "pass one of them"
                )
            adamw_betas = betas
        for name, value in others.items():
            if not is_idle(name, value):
                known = signature(Muon.__init__).parameters
                raise TypeError(f"dmuon.Muon has no keyword {name!r}: {instead(name, known)}")
        muon = MuonDefaults(
            lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            momentum_mode, dampening, variant, cautious_weight_decay, momentum_dtype,
        )  # fmt: skip
        adamw = AdamWDefaults(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        check_launched("dmuon.Muon")
        given = read_groups(params)
        ownerships = _ownerships_in(params, given)
        transports = [o.runtime.transport for o in ownerships]
        check_planned_together(transports)
        run = _Run(
            {
                "publish": publish,
                "master_weights": master_weights,
                "block_lr_ratio": block_lr_ratio,
                "ns_dtype": ns_dtype,
                "nonfinite": nonfinite,
                "verify_every": verify_every,
            }
        )
        self._run = run
        if isinstance(params, nn.Module):
            run.model = weakref.ref(params)

        def prepare() -> list[Group]:
            run.muon, run.adamw = muon.group(), adamw.group()
            check_muon_group(run.muon)
            checked(SWITCH_RULES, run.switches)
            resolve_ns_dtype(ns_dtype, torch.device("cpu"))
            run.schedule = Schedule(period)
            run.request, run.mesh = _request(dedicate, ownerships)
            run.names, run.kinds, run.routes, run.if_trained = [], [], {}, {}
            run.models, run.places = [], {}
            made = self._read(given, ownerships)
            if ownerships:
                _check_members(made, ownerships)
            return made

        # What must be alike is compared when engines are made.
        groups = attempt_in_all(transports, prepare)
        _keep_compiler_out()
        super().__init__(groups, {})
        self.defaults = dict(run.muon)
        run.ready = True
        if ownerships:
            self._bind(ownerships)

    # ---- param groups --------------------------------------------------------------------

    def _read(self, given: list[Group], ownerships: Sequence[Ownership] = ()) -> list[Group]:
        """Users' groups with the hyperparameters that their parameters need; how these are to be
        updated is decided now and noted in ``routes``."""
        run, first = self._run, len(self._run.names)
        found = [members(group) for group in given]
        planned = {p: spec.name for p, spec in _planned(ownerships)}
        everyone = self._members(found, [algorithm_of(group) for group in given], planned)
        if ownerships:
            run.routes.update(r for o in ownerships for r in routes_of(o.plan.specs).items())
        with suppress(DmuonError):  # of what may never be trained
            run.if_trained |= self._routed(everyone, frozen=True)
        if not ownerships:
            # A head may be trained before the matrices.
            late = any(matrices for _, matrices in run.if_trained.values())
            partial = bool(first) or run.model is None or late
            run.routes |= self._routed(everyone, partial=partial)
        every = {**run.if_trained, **run.routes}
        made = []
        # torch takes names of all groups or of none.
        are_named = any(names for names, _ in found)
        if run.ready and self.param_groups:
            are_named = "param_names" in self.param_groups[0]
        for number, (group, (names, tensors)) in enumerate(zip(given, found), first):
            # Of frozen ones too, which a schedule of the group's lr may reach later.
            routes = [every[name][0] for name in run.names[number] if name in every]
            algorithms = {route.algorithm for route in routes} or {Algorithm.ADAMW}
            run.kinds.append(algorithms)
            full = completed(group, algorithms, run.muon, run.adamw)
            full.update(check_group(full, number, algorithms))
            kept = {"param_names": names or run.names[number]} if are_named else {}
            made.append({"params": tensors, **kept, **full, **_progress(run, full)})
        return made

    def _read_added(self, groups: Sequence[Group]) -> list[Group]:
        """`_read`, of which nothing stays where it fails."""
        run, count = self._run, len(self._run.names)
        try:
            return self._read(read_groups(groups))
        except Exception:
            del run.names[count:], run.kinds[count:]
            raise

    def _members(
        self,
        found: Sequence[tuple[list[str] | None, list[Tensor]]],
        said: Sequence[Algorithm | None],
        planned: Mapping[Tensor, str],
    ) -> list[Member]:
        """Parameters of param groups with their names, which are noted, and the live modules that
        hold them."""
        run, first = self._run, len(self._run.names)
        pairs = [pair for names, ps in found for pair in zip(names or repeat(None), ps)]
        where: dict[int, tuple[int, tuple[nn.Module | None, ...], list[str]]] = {}
        passed = None if run.model is None else run.model()
        models = [] if passed is None else [Found(unwrapped(passed), passed)]
        known = {} if passed is None else names_in(models[0].model)
        left = [(n, p) for n, p in pairs if p not in planned and id(p) not in known]
        models += find_models(left) if left else []
        for found_model in models:
            refuse_fsdp1(found_model.around.modules())
            reference = weakref.ref(found_model.model)
            if reference not in run.models:
                run.models.append(reference)
            place = run.models.index(reference), found_model
            known = names_in(found_model.model)
            where = {i: (*place, names) for i, names in known.items()} | where
        taken = {name: 0 for names in run.names for name in names}
        made = []
        for number, ((names, tensors), algorithm) in enumerate(zip(found, said), first):
            group: list[str] = []
            for i, (given, p) in enumerate(zip(names or repeat(None), tensors)):
                model, held_by, local = where.get(id(p), (-1, (None, None), []))
                name = planned.get(p) or (None if given is None else canonical_name(given))
                if name is None and local:  # two models may use the same names
                    unique = (f"{k}.{local[0]}" if k else local[0] for k in range(len(taken) + 2))
                    name = next(n for n in unique if taken.setdefault(n, id(p)) == id(p))
                if name is None:
                    if algorithm is None and not planned:
                        raise OwnershipError(
                            f"param group {number} has parameters without names that no live "
                            "module holds, and their shapes do not tell an embedding from a "
                            f"projection: {THREE_WAYS}"
                        )
                    name = f"param_groups.{number}.{i}"
                if local:
                    run.places[name] = model, local[0]
                group.append(name)
                made.append(Member(name, p, algorithm, *held_by))
            run.names.append(group)
        return made

    def _routed(
        self, everyone: Sequence[Member], *, frozen: bool = False, partial: bool = True
    ) -> dict[str, Route]:
        """How trainable parameters are to be updated, or how frozen ones would be."""
        how: dict[str, Any] = {
            n: getattr(self._run.request, n) for n in ("select", "splits", "heads")
        }
        if partial and all(m.parameter.requires_grad is frozen for m in everyone):
            return {}
        return dict(
            routes_of(collect(everyone, **how, allow_meta=True, frozen=frozen, partial=partial))
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As with any optimizer. If it is planned already, the next full step plans again; every
        rank adds the same group before it."""
        run = self._run
        if not run.ready:
            super().add_param_group(param_group)
            return
        count = len(run.names)
        (group,) = self._read_added([param_group])
        own = {*group}
        try:
            super().add_param_group(group)
        except Exception:
            del run.names[count:], run.kinds[count:]
            raise
        for name in self.defaults.keys() - own:  # which torch adds to every group
            self.param_groups[-1].pop(name)

    # ---- planning ------------------------------------------------------------------------

    def _plan(self) -> _Run:
        """Plan where that has not been done: a collective call."""
        run = self._run
        if run.engines:
            return run
        # dedicate_params may have been called since.
        model = None if run.model is None else run.model()
        ownerships = _ownerships_in(model, self.param_groups)
        # Whatever mode a report is asked for in, training goes on with what is made here.
        with torch.inference_mode(False), torch.no_grad():
            if not ownerships:
                ownerships = [self._new_ownership()]
            self._bind(ownerships)
        return run

    def _new_ownership(self, before: Ownership | None = None) -> Ownership:
        """An ownership of the parameters that are in the groups now, which replaces ``before``."""
        run = self._run
        flaw: Exception | None = None
        model = None
        try:
            model = self._exchange()
            named = self._named()
        except Exception as error:  # perhaps on this rank alone
            named = [("", p) for group in self.param_groups for p in group["params"]]
            flaw = error
        # Another optimizer of these parameters ends here, as where one is trained after another.
        for other in _ownerships_in(model, self.param_groups, by_optimizers=True):
            if other is not before:
                other.close()

        def route() -> ModelSpecs:
            if flaw is not None:
                raise flaw
            _check_once(named)
            # Frozen when the optimizer was made.
            run.routes.update((n, r) for n, r in run.if_trained.items() if n not in run.routes)
            missing = [Member(n, p) for n, p in named if p.requires_grad and n not in run.routes]
            run.routes |= self._routed(missing)
            specs = collect([Member(n, p) for n, p in named], routes=run.routes, partial=True)
            # As where a head is trained first, and the rest is unfrozen or added later.
            models = (reference() for reference in run.models)
            others = (p for model in models if model is not None for p in model.parameters())
            late = any(p.ndim > 1 and not p.requires_grad for p in others)
            if not specs.matrices and not late:
                raise SelectionError(
                    "no parameter was selected as a matrix, so there is nothing for Muon to do: "
                    + "; ".join(f"{p.name}: {p.reason}" for p in specs.parameters[:20])
                    + ". Say what is one (dedicate={'select': ...}), or use torch.optim.AdamW"
                )
            return specs

        request = replace(run.request, ns_dtype=run.switches["ns_dtype"])
        ownership = plan_given(Given(model, named, route, before), request, run.mesh)
        if not ownership.plan.specs.matrices and ownership.rank == 0:
            warnings.warn(
                "dmuon: no matrix is trained yet, so AdamW updates all parameters; Muon begins "
                "when one is unfrozen, or added with opt.add_param_group",
                RuntimeWarning,
                stacklevel=4,
            )
        ownership.by_optimizer = True
        return ownership

    def _outgrown(self) -> Exception | None:
        """`NewParameters` where this step has to plan again, or why that cannot be."""
        run = self._run
        name = next((n for n, p in run.frozen if p.requires_grad), None)
        added = len(run.names) - len(run.members)
        if name is None and not added:
            return None
        what = f"opt.add_param_group was called {added} times since owners were planned"
        if name is not None:
            what = (
                f"parameter {name!r} was frozen when owners were planned (at dedicate_params, or "
                "at the first step) and is trainable now"
            )
        kept = [o.plan.layout.value for o in run.ownerships if o.plan.layout.keeps_state_at_owners]
        if kept or len(run.ownerships) > 1:
            where = f"in the {kept[0]!r} layout" if kept else "with several ownerships"
            return OwnershipError(
                f"{what}: {where} that takes a new optimizer. Call own.close(), "
                "dmuon.dedicate_params(model) and dmuon.Muon again, and load the old state_dict"
            )
        if run.schedule.never_full:
            return OwnershipError(
                f"{what}: that is planned in a full step, and period=math.inf takes none"
            )
        if not run.schedule.is_full(run.schedule.t):  # where ranks could not agree on it
            return None
        return NewParameters(
            f"{what}, but not on every rank: unfreeze, and add groups, on all of them before the "
            "same step"
        )

    def _plan_again(self, why: str) -> None:
        """Have what is trained now planned, and go on with the state of all that was: a collective
        call."""
        run, began = self._run, time.perf_counter()
        (ownership,), (engine,) = run.ownerships, run.engines
        self.synchronize()
        with torch.inference_mode(False):
            ownership.become(self._new_ownership(ownership))
            # Kept here too, in case that binding fails.
            entries = dict(self.state) | engine.saved_state()
            state = {n: entries[p] for n, p in self._named() if p in entries}
            run.loaded = state | {n: e for n, e in run.loaded.items() if n not in state}
            self._bind(run.ownerships)
        run.engines[0].skips = engine.skips
        if ownership.rank == 0:
            seconds = time.perf_counter() - began
            _log.info("planned again in %.2f s, because %s", seconds, why)

    def _exchange(self) -> nn.Module | None:
        """Put those of now into the groups in place of parameters that no module holds any more,
        because `fully_shard` has replaced them; the model whose parameters all of them are."""
        run = self._run
        models = [reference() for reference in run.models]
        now: dict[tuple[int, str], Any] = {}
        for number, model in enumerate(models):
            if model is not None:
                reshard(model.modules())
                now |= {(number, canonical_name(n)): p for n, p in model.named_parameters()}
        named, held = self._named(), {id(p) for p in now.values()}
        held |= held_by_modules({id(p) for _, p in named} - held)
        given = iter(named)
        for group in self.param_groups:
            group["params"] = [
                p if id(p) in held else now.get(run.places.get(name, (-1, "")), p)
                for name, p in islice(given, len(group["params"]))
            ]
        ours = {id(p) for group in self.param_groups for p in group["params"]}
        if run.model is not None:
            passed = run.model()
            return passed if ours <= {id(p) for p in now.values()} else None
        model = models[0] if len(models) == 1 else None
        trained = () if model is None else model.parameters()
        return model if all(id(p) in ours for p in trained if p.requires_grad) else None

    def _bind(self, ownerships: list[Ownership]) -> None:
        """Make the engines: a collective call."""
        run, transports = self._run, [o.runtime.transport for o in ownerships]
        check_planned_together(transports)
        dtype = run.switches["ns_dtype"]
        algorithms = {p: spec.algorithm for p, spec in _planned(ownerships)}
        again = bool(run.engines)

        def prepare() -> list[Group]:
            for ownership in ownerships:
                ownership.runtime.check_unbound()
            _check_members(self.param_groups, ownerships)
            _check_switches(run, ownerships)
            mine = resolve_ns_dtype(dtype, ownerships[0].runtime.device)
            made = []
            for number, group in enumerate(self.param_groups):
                kinds = {algorithms[p] for p in group["params"] if p in algorithms}
                run.kinds[number] |= kinds
                made.append(completed(group, run.kinds[number], run.muon, run.adamw))
                made[-1].update(check_group(made[-1], number, run.kinds[number]))
            for ownership in ownerships:
                _check_kernels(ownership, mine, made)
            return made

        # A rank may have a placeholder where another has the weight.
        shapes = {p: spec.shape for p, spec in _planned(ownerships)}

        def text(made: list[Group]) -> str:
            pairs = zip(self.param_groups, made, strict=True)
            lines = [f"{k}={v}" for k, v in run.switches.items()]
            lines.append(f"period={run.schedule.describe()}")
            for number, (old, new) in enumerate(pairs):
                found = [shapes.get(p, tuple(p.shape)) for p in old["params"]]
                lines += describe(new, number, found)
            return "\n".join(lines)

        try:
            made = attempt_in_all(transports, prepare, digest=text)
        except Exception:
            if again:
                self._unbind(ownerships)
            raise
        for group, known in zip(self.param_groups, made, strict=True):
            group.update(known)
        run.accepted = Accepted(run.kinds)
        # What each group must still be at every step: engines are bound to it.
        run.members = [list(group["params"]) for group in self.param_groups]
        run.frozen = [(n, p) for n, p in self._named() if not p.requires_grad]
        common, backend = _agreed(ownerships, dtype)
        masters = run.switches["master_weights"]
        ratio, publish = run.switches["block_lr_ratio"], run.switches["publish"]
        nonfinite = run.switches["nonfinite"]
        how = ratio, publish, nonfinite, backend
        settings = Settings(common, masters, run.schedule, run.accepted, *how)
        if not again:
            self.state.clear()

        def make() -> list[str | None]:
            """No collective call: a rank that fails, for lack of memory perhaps, fails alone."""
            run.engines = [_engine(o, self, settings) for o in ownerships]
            run.ownerships, run.settings = ownerships, settings
            self._note_progress()
            return [
                _flaw_of_dtype(ownerships, common),
                None if masters or again else _flaw_of_rounding(ownerships, self.param_groups),
            ]

        def load() -> None:
            if run.loaded:
                self._load({p: run.loaded[n] for n, p in self._named() if n in run.loaded})

        try:
            flaws = attempt_in_all(transports, make)
            attempt_in_all(transports, load, what="loading")
        except Exception:
            self._unbind(ownerships)
            raise
        run.loaded = {}
        for flaw in flaws:
            if flaw is not None:
                warnings.warn(flaw, RuntimeWarning, stacklevel=3)

    def _unbind(self, ownerships: Sequence[Ownership]) -> None:
        """Leave nothing of engines, so that the next step plans anew."""
        run = self._run
        run.engines, run.ownerships, run.settings = [], [], None
        for ownership in ownerships:
            ownership.close()
        self.state.clear()
        self._show_loaded()

    def __getstate__(self) -> dict[str, Any]:
        if self._run.engines:
            raise OwnershipError(
                "a dmuon.Muon that has planned cannot be copied or pickled, because it has process "
                "groups and buffers: save opt.state_dict() and load it into another optimizer, or "
                "copy it before its first step"
            )
        return {**super().__getstate__(), "_run": self._run}

    # ---- step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient on any rank. A collective call.

        Raises:
            TypeError, ValueError: a hyperparameter in ``param_groups`` is not what it should be by
                now, groups or parameters are not those that were planned; nothing has changed.
                Where that is so on some ranks alone, the others raise ConsensusError, which names
                them, if a collective that exists anyway can tell: in a full step; where owners have
                the gradients, if it was so at the end of backward already. Otherwise
                (in a block step, or changed between backward and `step`) they wait for that rank
                in the next collective until it times out. On an accelerator, whose host does not
                wait, the others raise at the next `step`.
            ConsensusError: a ``period`` that is a function has ranks take full steps at different
                step counts; found when they meet in a full step.
        """
        run = self._plan()
        if closure is None and self._makes_state_only():
            return None
        loss = None
        if closure is not None:
            run.in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                run.in_closure = False
        verifies = self._verifies()
        try:
            # A scheduler or a user may have set something else.
            self._launch(self._check_groups() or self._outgrown(), verifies)
        except NewParameters as reason:
            if not reason.agreed:
                raise
            self._plan_again(str(reason).partition(", but")[0])
            self._launch(self._check_groups(), verifies)
        for engine in run.engines:
            engine.update_others()
        for engine in run.engines:
            engine.finish()
        if run.switches["publish"] == "sync" or verifies:
            self.synchronize()
        run.schedule.advance()
        self._note_progress()
        for engine in run.engines if verifies else ():
            engine.check_sample()
        run.bytes = self._read_meters()
        return loss

    def _launch(self, refusal: Exception | None, verifies: bool) -> None:
        """The first part of a step, up to where updates may be on their way."""
        run = self._run
        # Set by `torch.amp.GradScaler` around the call.
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for engine in run.engines:
            refusal = engine.begin(amp, refusal) or refusal
        for engine in run.engines if verifies else ():
            engine.take_sample(run.verified)
        full = run.schedule.is_full(run.schedule.t)
        for engine, ownership in zip(run.engines, run.ownerships, strict=True):
            try:
                engine.launch(refusal)
            except Exception as error:
                agreed = isinstance(error, NewParameters) and error.agreed
                known = host_can_read(ownership.runtime.device) or agreed
                if error is not refusal or known or not full:
                    raise
        if refusal is not None:
            # Elsewhere this step counts: the others cannot know yet.
            for engine in run.engines:
                engine.finish()
            run.schedule.advance()
            self._note_progress()
            raise refusal

    def _makes_state_only(self) -> bool:
        """Whether this is no step: where an optimizer has no state yet, torch's `get_state_dict`
        has it made by a first one, with an lr of 0 and gradients of 0. A collective call at such a
        first one."""
        run, groups = self._run, self.param_groups
        if run.schedule.t or any(float(group.get("lr", 1.0)) for group in groups):
            return False
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        mine = all(p.grad is not None and not local_tensor(p.grad).any() for p in params)
        return all(a for o in run.ownerships for a in o.runtime.transport.gather_objects(mine))

    def _verifies(self) -> bool:
        """Whether this step is checked: every so many, or the first full one after them."""
        run, every = self._run, self._run.switches["verify_every"]
        t = run.schedule.t
        run.verify_due = run.verify_due or (bool(every) and t % every == every - 1)
        if not run.verify_due or not run.schedule.is_full(t):
            return False
        run.verify_due = False
        run.verified += 1
        return True

    def _check_groups(self) -> Exception | None:
        """What is wrong with ``param_groups``; None if nothing is, and then they hold numbers as
        Python's own."""
        try:
            self._check_structure()
            # What was added is checked when it is planned.
            run = self._run
            run.accepted.check(self.param_groups[: len(run.members)])
        except (TypeError, ValueError) as error:
            return error
        return None

    def _check_structure(self) -> None:
        """Raise OwnershipError unless ``param_groups`` are those that were made, in their order."""
        planned, count = self._run.members, len(self._run.names)
        if len(self.param_groups) != count:
            raise OwnershipError(
                f"opt.param_groups has {len(self.param_groups)} groups, but {count} were given: "
                "add groups with opt.add_param_group, and freeze what is not to be trained. To "
                "plan other groups call own.close(), dmuon.dedicate_params(model) and "
                "dmuon.Muon(...) again"
            )
        for number, (group, params) in enumerate(zip(self.param_groups, planned)):
            now = group.get("params", ())
            if len(now) != len(params) or not all(map(operator.is_, now, params)):
                raise OwnershipError(
                    f"opt.param_groups[{number}] holds other parameters than it was made with "
                    f"({len(now)}, then {len(params)}), or in another order: leave "
                    "group['params'] as it is, and freeze a parameter by giving it no gradient"
                )

    def _note_progress(self) -> None:
        C10dTransport.steps = self._run.schedule.t
        for group in self.param_groups:
            group.update(_progress(self._run, group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those that owners hold beside ``p.grad`` included."""
        # First, for a round that a failed backward left open still writes to p.grad.
        for ownership in self._run.ownerships:
            ownership.runtime.zero_grad()
        super().zero_grad(set_to_none)

    # ---- reading -------------------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """Who owns which matrix. Plans where that has not been done, which is a collective call.

        Raises:
            OwnershipError: the parameters have several ownerships.
        """
        found = self._plan().ownerships
        if len(found) > 1:
            raise OwnershipError(
                f"this optimizer spans {len(found)} ownerships: ask each of the models for its own"
            )
        return found[0]

    def report(self) -> LoadBalanceReport:
        """The load-balance report of the ownership; a collective call where nothing is planned yet.

        After a few steps with measured times beside the predicted ones.
        """
        return self.ownership.report()

    def synchronize(self) -> None:
        """Wait until every parameter holds its published value. No collective is issued."""
        with torch.no_grad():
            for ownership in self._run.ownerships:
                ownership.runtime.synchronize()

    def stats(self) -> dict[str, Any]:
        """What the last step did, without any collective. Waits for pending updates.

        ``update_rms``: name -> RMS of the matrix's update over the learning rate, on every rank
        (`dedicated`: on its owner); after a block step, of this rank's blocks. ``ns_ms``:
        milliseconds of Newton-Schulz on this rank (`replicated` and `dedicated`: and momentum).
        ``bytes``: what this rank handed to collectives since the step before, by purpose.
        ``kernels``: what Newton-Schulz ran on this rank, by the shapes that ran together (``ran``,
        such as ``gram[2]/torch_strips/float32``), the ``workspace_bytes`` that are kept, and the
        state of ``cuda_graphs``. In the `sharded` layout also ``full_step`` (or a block step),
        ``finite`` (no rank found a non-finite gradient; after a block step: this rank did not),
        ``skipped``, the number of steps that were not, ``below_eps``, how many matrices had a
        norm below ``eps`` (docs/reliability.md), and ``step_bytes``, the memory that a full
        step takes on this rank, by purpose.
        """
        run = self._run
        if run.settings is None:
            return {"steps": run.schedule.t, "update_rms": {}}
        found = [engine.stats() for engine in run.engines]
        joint: dict[str, Any] = {"update_rms": {}}
        for number, stats in enumerate(found):
            rms = stats.pop("update_rms")
            clash = joint["update_rms"].keys() & rms.keys()  # two models may use the same names
            joint["update_rms"] |= {
                f"{n} ({number})" if n in clash else n: v for n, v in rms.items()
            }
        for stats in found:
            for key, value in stats.items():
                joint[key] = _combined(key, joint[key], value) if key in joint else value
        return {
            "steps": run.schedule.t,
            "ns_dtype": str(run.settings.ns_dtype).removeprefix("torch."),
            "ns_ms": sum(o.telemetry.watch.milliseconds() for o in run.ownerships),
            "bytes": dict(run.bytes),
            **joint,
        }

    def _read_meters(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for ownership in self._run.ownerships:
            for tag, count in ownership.runtime.meter.reset().items():
                total[tag] = total.get(tag, 0) + count
        return total

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.Muon` and `torch.optim.AdamW` have it, of whole parameters.

        In the `replicated` layout the whole state, on any rank; in the `sharded` one distributed
        like the parameters; no collective call. Where momentum lies with owners
        (``reduce_to_owner``, `dedicated`) a collective call, which every rank makes: it is then
        distributed by rows. Whatever is distributed is saved by
        `torch.distributed.checkpoint.save`, or made whole by `get_optimizer_state_dict` with
        ``full_state_dict=True``, and loads into any layout (docs/checkpoints.md).

        Raises:
            OwnershipError: momentum lies with owners, and another rank does not make this call.
        """
        self.synchronize()
        self._show_loaded()
        shown: dict[Any, Any] = {}
        with torch.no_grad():
            for engine in self._run.engines:
                shown |= engine.saved_state()
        kept = dict(self.state)
        try:
            self.state.update(shown)
            found = super().state_dict()
        finally:
            self.state.update(kept)
        for group in found["param_groups"]:
            if isinstance(group.get("variant"), Rule):  # files hold plain values
                group["variant"] = repr(group["variant"])
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `state_dict` gave, in this layout or another, bit for bit where the
        precision is the same. A collective call.

        Before anything is planned it is none: the state is kept, and taken over by the plan. It may
        also be a
        list of the states of several optimizers that had these parameters between them, such as
        ``[muon.state_dict(), adamw.state_dict()]`` of `torch.optim`: momentum and moments are taken
        over, by the names of the parameters or (without names) in their order; hyperparameters stay
        as they are here.

        Raises:
            OwnershipError: it is no optimizer's state or another model's, or one of its numbers is
                not what it should be; nothing is changed.
            ConsensusError: that is so on another rank, or ranks load different states; nothing is
                changed.
        """
        run = self._run
        self.synchronize()

        def read() -> _Saved:
            return self._read_state(state_dict)

        transports = [o.runtime.transport for o in run.ownerships]
        for transport in transports:
            transport.meet("opt.load_state_dict()")
        saved = attempt_in_all(transports, read, what="opt.load_state_dict()", digest=_Saved.forms)
        # The base class casts state to the parameter's dtype; ours must come back exactly, and
        # stays where it is.
        kept = dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": saved.groups})
        if run.engines:
            self.state.update(kept)
            self._load(saved.entries)
            later = [(n, p) for n, p in self._named() if p in saved.entries and p not in kept]
            run.loaded = {n: _copied(saved.entries[p]) for n, p in later}
        else:
            entries = saved.entries
            run.loaded = {n: _copied(entries[p]) for n, p in self._named() if p in entries}
            self._show_loaded()
        if saved.progress is not None:
            run.schedule.load(saved.progress)
        self._note_progress()
        self._warn_of_lost(saved.entries)

    def _read_state(self, state_dict: Any) -> _Saved:
        """What was given; OwnershipError if it does not fit. Changes nothing."""
        run = self._run
        is_list = isinstance(state_dict, list | tuple)
        for state in state_dict if is_list else [state_dict]:
            flaw = _flaw(state)
            if flaw is not None:
                raise OwnershipError(
                    f"this is not what opt.state_dict() of a dmuon.Muon gave: {flaw}"
                )
        order = [p for group in self.param_groups for p in group["params"]]
        if is_list:
            named = [(n, p) for n, p in self._named() if n in run.routes]  # others were frozen
            matrices = [name for name, _ in named if run.routes[name][1]]
            states = joined_states(state_dict, [name for name, _ in named], matrices)
            saved = dict(zip((p for _, p in named), states))
            groups = super().state_dict()["param_groups"]
        else:
            groups = [dict(group) for group in state_dict["param_groups"]]
            # Keys are numbers, or names where torch's distributed checkpoint made them.
            keys = [key for group in groups for key in group["params"]]
            if len(keys) != len(order) or len(groups) != len(self.param_groups):
                raise OwnershipError(
                    f"the optimizer state has {len(keys)} parameters in {len(groups)} groups; this "
                    f"optimizer has {len(order)} in {len(self.param_groups)}: make it with the "
                    "groups of then; the states of several optimizers (torch.optim.Muon, AdamW) "
                    "are loaded together, as a list"
                )
            labels = [n for group in groups for n in group.get("param_names", ())]
            here = self._named()
            are_named = all(group.get("param_names") for group in self.param_groups)
            ours = _unprefixed([name for name, _ in here])
            if all(isinstance(key, str) for key in keys) and {*_unprefixed(keys)} == {*ours}:
                labels = keys
            if len(labels) == len(keys) and are_named:
                theirs = _unprefixed(labels)
                if {*theirs} != {*ours}:
                    raise OwnershipError(
                        "the optimizer state is of other parameters: it has, for instance, "
                        f"{sorted({*theirs} - {*ours})[:3]} and not "
                        f"{sorted({*ours} - {*theirs})[:3]}. It was saved by another model; "
                        "if only names have changed, remove 'param_names' from its param_groups, "
                        "and the order of the parameters counts"
                    )
                known = {name: p for name, (_, p) in zip(ours, here)}
                order = [known[name] for name in theirs]  # elsewhere listed in another order
            entries = state_dict["state"]
            foreign = sorted(map(str, entries.keys() - {*keys}))
            if foreign:
                raise OwnershipError(
                    f"the optimizer state has entries of {foreign[:3]}, which none of its "
                    "param_groups lists: it was put together from several, or changed since"
                )
            saved = {p: entries[key] for key, p in zip(keys, order) if key in entries}
        saved = {p: entry for p, entry in saved.items() if entry}
        self._check_saved(saved)
        progress = self._check_saved_groups(groups)
        taken = 0 if progress is None else int(progress["step"])
        has_momentum = any("momentum_buffer" in entry for entry in saved.values())
        if taken and not has_momentum and not is_list:
            raise OwnershipError(
                f"the optimizer state is of {taken} steps and has no momentum of any matrix. What "
                "dcp.load is given must have the entries that it shall read, and those of an "
                "optimizer are made by its first step, or by get_optimizer_state_dict(model, opt) "
                "of torch.distributed.checkpoint.state_dict: load into what that gives"
            )
        return _Saved(groups, saved, progress)

    def _check_saved_groups(self, groups: list[Group]) -> dict[str, Any] | None:
        """Where the schedule was. Gives ``groups`` the hyperparameters that they lack, as those of
        torch's optimizers do."""
        run, progress = self._run, None
        for number, (group, now) in enumerate(zip(groups, self.param_groups, strict=True)):
            # Names are those of here: they say how parameters are routed.
            if group.get("param_names") != now.get("param_names"):
                group.pop("param_names", None)
            try:
                if progress is None and PROGRESS["step"] in group:
                    found = {k: group[name] for k, name in PROGRESS.items() if name in group}
                    run.schedule.read(found)
                    progress = found
                groups[number] = group = as_here(group, now)
                check_group(group, number, run.kinds[number])
            except (TypeError, ValueError) as error:
                raise OwnershipError(
                    f"the optimizer state does not fit: in its param_groups[{number}] {error}"
                ) from error
        return progress

    def _warn_of_lost(self, saved: Mapping[Tensor, Any]) -> None:
        """Say on one rank whose state begins anew, beside that of others."""
        routes = self._run.routes
        lost = [n for n, p in self._named() if p.requires_grad and n in routes and p not in saved]
        if saved and lost and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(
                f"dmuon: the optimizer state has nothing of {len(lost)} trainable parameters, such "
                f"as {first_of(lost)}: their momentum, or AdamW's moments, begin at zero. That is "
                "right for those that had no gradient before it was saved, or were frozen",
                RuntimeWarning,
                stacklevel=3,
            )

    def _named(self) -> list[tuple[str, Any]]:
        """The parameters in the groups, with the names that they have here. Groups that were put
        behind the others before planning are read (Lightning's `BaseFinetuning` does so).

        Raises:
            OwnershipError: a group has gone, or has come since owners were planned otherwise than
                by `add_param_group`; or its parameters have.
        """
        known: list[list[str]] = self._run.names
        if not self._run.engines and len(self.param_groups) > len(known):
            added = self.param_groups[len(known) :]
            for group, full in zip(added, self._read_added(added), strict=True):
                group.update(full)
        found: list[tuple[str, Any]] = []
        for number, group in enumerate(self.param_groups):
            own = [canonical_name(name) for name in group.get("param_names", ())]
            names = own or (known[number] if number < len(known) else [])
            if len(names) != len(group["params"]) or len(known) != len(self.param_groups):
                raise OwnershipError(
                    f"opt.param_groups has {len(self.param_groups)} groups, {len(known)} were "
                    f"given; group {number} has {len(group['params'])} parameters and "
                    f"{len(names)} names: add groups with opt.add_param_group, and freeze what is "
                    "not to be trained"
                )
            found += zip(names, group["params"])
        return found

    def _show_loaded(self) -> None:
        """Have what was loaded before planning in ``state``, by the parameters as they are now."""
        if self._run.loaded and not self._run.engines:
            loaded = self._run.loaded
            self.state.clear()
            self.state.update((p, loaded[n]) for n, p in self._named() if n in loaded)

    def _check_saved(self, saved: Mapping[Tensor, Any]) -> None:
        """Raise OwnershipError for state of another shape than its parameter's, for that of another
        algorithm, and for values that are not finite. A parameter without any had no gradient so
        far."""
        routes = self._run.if_trained | self._run.routes
        kept: list[tuple[str, Tensor]] = []
        for name, p in self._named() if saved else ():
            entry = saved.get(p, {})
            if not entry or not p.requires_grad or name not in routes:
                continue
            spec = routes[name][0]
            is_muon = spec.algorithm is Algorithm.MUON
            if ("momentum_buffer" if is_muon else "exp_avg") not in entry:
                raise OwnershipError(
                    f"the optimizer state has {sorted(entry)} for parameter {name!r}, which is "
                    f"updated by {spec.algorithm.value} here and needs "
                    f"{'momentum_buffer' if is_muon else 'exp_avg'!r}: it was saved by another "
                    "optimizer, or with other routes"
                )
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "master_weight"):
                value = entry.get(key)
                is_tensor = isinstance(value, Tensor)
                if key in entry and not (is_tensor and value.shape == spec.shape):
                    shape = list(value.shape) if is_tensor else type(value).__name__
                    raise OwnershipError(
                        f"the optimizer state has {key} of shape {shape} for parameter {name!r} of "
                        f"shape {list(spec.shape)}: it was saved by another model, or the "
                        "parameters were listed in another order"
                    )
                if key in entry and not value.is_floating_point():
                    raise OwnershipError(
                        f"the optimizer state has {key} of {value.dtype} for parameter {name!r}: "
                        "it must be of a floating dtype"
                    )
                if key in entry and (local := local_tensor(value)).numel():
                    if local.is_meta:
                        raise OwnershipError(
                            f"the optimizer state has {key} on the meta device for parameter "
                            f"{name!r}, where it has no values: load it from the checkpoint first"
                        )
                    if self._run.switches["master_weights"]:
                        dtype = torch.promote_types(p.dtype, torch.float32)
                    else:
                        dtype = p.dtype
                    if torch.finfo(local.dtype).max > torch.finfo(dtype).max:
                        local = local.to(dtype)  # as it is kept
                    kept.append((f"{key} of {name}", local))
            step = entry.get("step", 0)
            try:
                checked(
                    {"step": FINITE}, {"step": step.item() if isinstance(step, Tensor) else step}
                )
            except (TypeError, ValueError, RuntimeError):
                raise OwnershipError(
                    f"the optimizer state has step={step!r} for parameter {name!r}: it must be a "
                    "number >= 0"
                ) from None
        bad = not_finite(kept)
        if bad:
            raise OwnershipError(
                f"the optimizer state has values that are not finite: {first_of(bad)}, in the "
                "dtype that keeps them here. With them no step could ever be taken again: load an "
                "older checkpoint"
            )

    def _load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        with torch.no_grad():
            for engine in self._run.engines:
                engine.load_state(saved)


def _unprefixed(names: Sequence[str]) -> list[str]:
    """Names of parameters without what all of them begin with.

    >>> _unprefixed(["model.a.weight", "model.b.weight"]), _unprefixed(["a.weight", "b.weight"])
    (['a.weight', 'b.weight'], ['a.weight', 'b.weight'])
    """
    parts = [canonical_name(name).split(".") for name in names]
    levels = zip(*(path[:-1] for path in parts))
    common = len([*takewhile(lambda level: len({*level}) == 1, levels)])
    return [".".join(path[common:]) for path in parts]


class _Saved(NamedTuple):
    """A state that was read and fits: param groups, entries by parameter, and where the schedule
    was (None: it does not say)."""

    groups: list[Group]
    entries: dict[Any, Any]
    progress: dict[str, Any] | None

    def forms(self) -> str:
        """What ranks must have in common of it."""
        lines: list[str] = []
        for number, group in enumerate(self.groups):
            lines += describe(group, number, len(group["params"]))
        for entry in self.entries.values():
            lines.append(f"{sorted((k, type(v).__name__) for k, v in entry.items())}")
        return "\n".join(lines)


def _copied(entry: Mapping[str, Any]) -> dict[str, Any]:
    """State of its own: the given one may go on changing."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()}


def _progress(run: _Run, group: Group) -> Group:
    """Where the schedule is, as it is kept in a group with matrices."""
    if "ns_steps" not in group:
        return {}
    progress = run.schedule.state()
    return {name: progress[key] for key, name in PROGRESS.items()}


def _flaw(given: Any) -> str | None:
    """Why this cannot be what `Muon.state_dict` gave, if so."""

    def are(kind: Any, values: Any, container: Any) -> bool:
        return isinstance(values, container) and all(isinstance(value, kind) for value in values)

    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        return f"it must be a dict with 'state' and 'param_groups', found {found}"
    entries, groups = given["state"], given["param_groups"]
    if not isinstance(entries, Mapping) or not are(Mapping, list(entries.values()), list):
        return "'state' must be a dict with a dict for each parameter"
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    if any(adamw & entry.keys() and not adamw <= entry.keys() for entry in entries.values()):
        return f"what AdamW keeps of a parameter must have {sorted(adamw)}"
    if not are(Mapping, groups, (list, tuple)) or not all(
        isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        return "'param_groups' must be a list of dicts, each with a list as 'params'"
    return None


def _engine(ownership: Ownership, optimizer: Optimizer, settings: Settings) -> Engine:
    runtime = ownership.runtime
    if isinstance(runtime, ShardedRuntime):
        return ShardedEngine(runtime, ownership.telemetry, ownership.kernels, optimizer, settings)
    assert isinstance(runtime, OwnerRuntime)
    return OwnerEngine(runtime, ownership.telemetry, ownership.kernels, optimizer, settings)


def _combined(key: str, one: Any, other: Any) -> Any:
    """A number of `Muon.stats` over two ownerships."""
    if key == "finite":
        return one and other
    if key == "step_bytes":
        return {k: one.get(k, 0) + other.get(k, 0) for k in one.keys() | other.keys()}
    if key == "kernels":
        ran = {**one["ran"], **other["ran"]}
        for shapes in one["ran"].keys() & other["ran"].keys():
            ran[shapes] = _both(one["ran"][shapes], other["ran"][shapes])
        return {
            "ran": ran,
            "workspace_bytes": one["workspace_bytes"] + other["workspace_bytes"],
            "cuda_graphs": _both(one["cuda_graphs"], other["cuda_graphs"]),
        }
    return max(one, other)


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} and {other}"


# ---- what is given -----------------------------------------------------------------------


class _Run:
    """All that changes about an optimizer, in one object: a framework may put another in front of
    it, whose reads reach this one and whose writes do not (Lightning).

    ``model``, if one was passed; ``models``, all that hold parameters, and ``places``, by name, the
    number of the model and the name there. ``names`` of all parameters by group, canonical or made
    up, and ``kinds``, the algorithms that they need; ``routes`` as decided at construction, and of
    frozen ones ``if_trained``; ``loaded``: state that waits for the plan, by name. What begins with
    ``members`` is there once it is planned.
    """

    def __init__(self, switches: dict[str, Any]) -> None:
        self.switches = switches
        self.ready = False
        self.in_closure = False
        self.model: weakref.ref[nn.Module] | None = None
        self.models: list[weakref.ref[nn.Module]] = []
        self.places: dict[str, tuple[int, str]] = {}
        self.muon: Group = {}
        self.adamw: Group = {}
        self.names: list[list[str]] = []
        self.kinds: list[set[Algorithm]] = []
        self.routes: dict[str, Route] = {}
        self.if_trained: dict[str, Route] = {}
        self.schedule = Schedule(1)
        self.request = Request()
        self.mesh: Any = None
        self.loaded: dict[str, dict[str, Any]] = {}
        self.members: list[list[Tensor]] = []
        self.frozen: list[tuple[str, Any]] = []
        self.accepted = Accepted([])
        self.engines: list[Engine] = []
        self.ownerships: list[Ownership] = []
        self.settings: Settings | None = None
        self.bytes: dict[str, int] = {}
        self.verified = 0
        self.verify_due = False

    def __getstate__(self) -> dict[str, Any]:
        # A copied optimizer is not of these models.
        return {**vars(self), "model": None, "models": [], "places": {}}


def _ownerships_in(
    model: object, groups: Sequence[Group], *, by_optimizers: bool = False
) -> list[Ownership]:
    """The ownerships of what was given, each once; none where nothing of it is planned.

    Those that `dedicate_params` made, or those that optimizers made for themselves.
    """
    entries = [e[1] if is_pair(e) else e for group in groups for e in group["params"]]
    found = [ownership_of(e) for e in entries if isinstance(e, Tensor)]
    ownerships = list(dict.fromkeys(o for o in found if o is not None))
    if isinstance(model, nn.Module):
        ownerships = ownerships_of(unwrapped(model)) if by_optimizers else ownerships_of(model)
        ownerships += [o for o in dict.fromkeys(found) if o is not None and o not in ownerships]
    ownerships = [o for o in ownerships if o.by_optimizer is by_optimizers]
    for ownership in ownerships if not by_optimizers else ():
        ownership.find_parameters()
    return ownerships


def _request(
    dedicate: Mapping[str, Any] | None, ownerships: Sequence[Ownership]
) -> tuple[Request, Any]:
    """What ``dedicate`` asks for, and its mesh; TypeError for what `dedicate_params` does not
    know."""
    asked = dict(dedicate or {})
    known = ["mesh", *(f.name for f in fields(Request) if f.name != "ns_dtype")]
    unknown = sorted(asked.keys() - {*known})
    if unknown:
        raise TypeError(
            f"dedicate= takes keyword arguments of dmuon.dedicate_params ({', '.join(known)}), "
            f"found {unknown}"
        )
    if asked and ownerships:
        raise OwnershipError(
            "dedicate= says how to plan, but these parameters are planned: say it there (in "
            "dmuon.dedicate_params), or call own.close() if they had another dmuon.Muon"
        )
    if ownerships:  # for when it plans again
        return ownerships[0].asked
    mesh = asked.pop("mesh", None)
    request = Request(**asked)
    if request.layout == Layout.DEDICATED or getattr(request.options, "reduce_to_owner", False):
        raise OwnershipError(
            "dedicate= says how to plan at the first step, and layout='dedicated' and "
            "reduce_to_owner=True take gradients in the backward before it: call "
            "dmuon.dedicate_params(model, ...) with these arguments before dmuon.Muon(model)"
        )
    return request, mesh


def _check_members(groups: Sequence[Group], ownerships: Sequence[Ownership]) -> None:
    """Each planned parameter must be in exactly one group, and each trainable one planned."""
    names = {p: canonical_name(spec.name) for p, spec in _planned(ownerships)}
    seen: dict[Tensor, int] = {}
    for number, group in enumerate(groups):
        for p in group["params"]:
            name = names.get(p, f"of shape {tuple(p.shape)}")
            if p in seen:
                raise OwnershipError(
                    f"parameter {name!r} appears twice, in group {seen[p]} and in group "
                    f"{number}: list each parameter once"
                )
            seen[p] = number
            if p not in names and p.requires_grad:
                raise OwnershipError(
                    f"parameter {name!r} in group {number} is trainable but was not part of "
                    "dedicate_params: was it added or unfrozen since? Call own.close() and "
                    "dmuon.dedicate_params(model) again"
                )
    missing = [name for p, name in names.items() if p not in seen]
    if missing:
        raise OwnershipError(
            f"{len(missing)} dedicated parameters were not passed to dmuon.Muon: "
            f"{', '.join(missing[:5])}. Pass all of them, or freeze them (requires_grad_(False)) "
            "before dmuon.dedicate_params(model)"
        )


def _check_once(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise OwnershipError for a parameter or a name that comes twice."""
    for what in ({id(p) for _, p in named}, {name for name, _ in named}):
        if len(what) < len(named):
            seen: set[Any] = set()
            for name, p in named:
                if id(p) in seen or name in seen:
                    raise OwnershipError(
                        f"parameter {name!r} appears twice in the param groups: list each once"
                    )
                seen |= {id(p), name}


def _planned(ownerships: Sequence[Ownership]) -> Iterator[tuple[Tensor, ParameterSpec]]:
    """Every planned parameter of these ownerships, with what is known of it."""
    for ownership in ownerships:
        yield from zip(ownership.parameters, ownership.plan.specs.parameters, strict=True)


# ---- settings, checked and agreed on -----------------------------------------------------


def _check_switches(run: _Run, ownerships: Sequence[Ownership]) -> None:
    """Raise OwnershipError for block steps, or masters, where there can be none."""
    ratio = run.switches["block_lr_ratio"]
    for layout in {o.plan.layout for o in ownerships} - {Layout.SHARDED}:
        if not run.schedule.always_full or ratio is not None:
            raise OwnershipError(
                f"period={run.schedule.describe()}, block_lr_ratio={ratio!r}: in the "
                f"{layout.value!r} layout each matrix is whole at its owner, so there is no block "
                "step; leave them at 1 and None"
            )
    for runtime in (o.runtime for o in ownerships if run.switches["master_weights"]):
        if isinstance(runtime, OwnerRuntime) and not runtime.keeps_whole:
            raise OwnershipError(
                f"master_weights=True: in the {runtime.plan.layout.value!r} layout under tensor "
                "parallelism an owner keeps a slice of a weight only. Keep the parameters in "
                "float32 and compute in bfloat16 (torch.autocast), or leave master_weights off"
            )


def _check_kernels(ownership: Ownership, dtype: torch.dtype, groups: list[Group]) -> None:
    """Raise ValueError if a kernel that was asked for, or that the plan names, cannot run here."""
    options, device, plan = ownership.kernels, ownership.runtime.device, ownership.plan
    if options.cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"KernelOptions.cuda_graphs=True needs a CUDA device, found {device}: leave it None"
        )
    steps = {group["ns_steps"] for group in groups if "ns_steps" in group}
    shapes = {m.shape for m in plan.specs.matrices}
    for rows, cols in shapes:
        for count in steps:
            fixed_choice(rows, cols, dtype, device, count, options.method, options.backend)
    for kernel in {batch.kernel for batch in plan.batches} - {""}:
        choice = KernelChoice.parse(kernel)
        planned: torch.dtype = getattr(torch, choice.dtype)
        if choice.restarts and not is_safe(choice.restarts, planned, MuonDefaults().ns_steps):
            raise ValueError(
                f"the plan runs {kernel}, with which the iteration diverges: it was not made by "
                "this version of dmuon. Plan again (without plan=)"
            )
        reason = why_not(choice.backend, device, planned)
        if reason is not None:
            raise ValueError(
                f"the plan runs {kernel} on {device}, which is not possible: {reason}. Plan again "
                "on this hardware (without plan=)"
            )


def _agreed(ownerships: list[Ownership], ns_dtype: str | torch.dtype) -> tuple[torch.dtype, str]:
    """The Newton-Schulz dtype of all ranks, and the backend where no plan names a kernel."""
    device = ownerships[0].runtime.device
    mine = resolve_ns_dtype(ns_dtype, device)
    choice = mine, default_backend(device, mine)
    found = {c for o in ownerships for c in o.runtime.transport.gather_objects(choice)}
    return common_choice(found, device)


def _flaw_of_dtype(ownerships: list[Ownership], dtype: torch.dtype) -> str | None:
    """That kernels were chosen for another Newton-Schulz dtype than runs, on one rank."""
    name = str(dtype).removeprefix("torch.")
    for ownership in ownerships:
        kernels = {batch.kernel for batch in ownership.plan.batches} - {""}
        others = sorted({KernelChoice.parse(kernel).dtype for kernel in kernels} - {name})
        if others and ownership.rank == 0:
            return (
                f"dmuon: the plan's kernels were chosen for {' and '.join(others)}, and "
                f"Newton-Schulz runs in {name}: the fixed rule chooses instead. Leave ns_dtype out "
                "to use them"
            )
    return None


def _half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Half a unit in the last place of numbers of this magnitude: what a smaller change is lost in.

    >>> _half_ulp(0.02, torch.bfloat16) == 2.0**-14, _half_ulp(1.0, torch.float16) == 2.0**-11
    (True, True)
    """
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.smallest_normal))
    return 0.5 * info.eps * math.ldexp(1.0, exponent - 1)


def _flaw_of_rounding(ownerships: list[Ownership], groups: list[Group]) -> str | None:
    """That typical updates of half-precision weights are lost in rounding, on one rank.

    Compares root mean squares over the matrices of each param group and dtype, as far as they are
    stored on that rank. An update's follows from the learning rate: the entries of an orthogonal
    ``m x n`` matrix have the root mean square ``1 / sqrt(max(m, n))``. Reads the weights once.
    """
    group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
    updates: dict[tuple[int, torch.dtype], list[tuple[float, int]]] = {}
    weights: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for ownership in ownerships:
        plan = ownership.plan
        # In the dedicated layout the first rank may store no matrix.
        if ownership.rank != (min(plan.owners) if plan.layout is Layout.DEDICATED else 0):
            continue
        stored = {}
        for i in plan.specs.muon_parameters():
            p = ownership.parameters[i]
            local = local_tensor(p)
            if p.dtype.itemsize < 4 and local.numel():
                stored[i] = group_of[p], p.dtype
                weights.setdefault(stored[i], []).append(local)
        for matrix in plan.specs.matrices:
            if matrix.parameter in stored:
                key = stored[matrix.parameter]
                lr = Hyper.of(groups[key[0]]).adjusted(*matrix.shape)
                rms = lr / math.sqrt(max(matrix.shape))
                updates.setdefault(key, []).append((rms, matrix.numel))
    lost = []
    for key, sizes in updates.items():
        update = math.sqrt(sum(r * r * n for r, n in sizes) / sum(n for _, n in sizes))
        norms = [torch.linalg.vector_norm(w, dtype=torch.float32) for w in weights[key]]
        count = sum(w.numel() for w in weights[key])
        weight = float(torch.linalg.vector_norm(torch.stack(norms))) / math.sqrt(count)
        if 0 < weight < math.inf and 0 < update < _half_ulp(weight, key[1]):
            lost.append((update / _half_ulp(weight, key[1]), update, weight, key))
    if not lost:
        return None
    _, update, weight, (number, dtype) = min(lost, key=lambda entry: entry[0])
    name = str(dtype).removeprefix("torch.")
    return (
        f"dmuon: with lr={float(groups[number]['lr']):g} a typical update of a {name} matrix is "
        f"{update:.2g}, and half a unit in the last place of its typical weight, {weight:.2g}, is "
        f"{_half_ulp(weight, dtype):.2g}: most updates are rounded away and change nothing. Pass "
        "master_weights=True, which keeps float32 weights behind the parameters, or keep the "
        "parameters in float32 and compute under torch.autocast"
    )


@cache
def _keep_compiler_out() -> None:
    """Of what a compiled training step may call: it would cut a step into a hundred graphs, and
    planning would time what it made of kernels. Not at import, because this loads the compiler; so
    does the first of torch's own optimizers that is made."""
    for name in ("step", "zero_grad", "synchronize"):
        setattr(Muon, name, torch.compiler.disable(getattr(Muon, name)))


def hf_factory() -> type[Muon]:
    """The factory for the `Trainer` of Hugging Face's transformers (5.2 and newer).

    ``Trainer(model, args, optimizer_cls_and_kwargs=(dmuon.hf_factory, {"lr": 1e-3}))``: it calls
    this without arguments, and what comes with the model and the dict, which so holds keyword
    arguments of `Muon`. Given the class itself, it makes two groups, of which one has no decay.
    """
    return Muon
