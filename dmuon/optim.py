"""`Muon`: one `torch.optim.Optimizer` over matrices (Muon) and everything else (AdamW).

The class comes first, then the checks of its arguments and of the plan.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from inspect import signature
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import Unpack

from dmuon import config, devices
from dmuon.api import Dedicate, Request, log_plan, plan_groups
from dmuon.comm.owners_runtime import OwnersRuntime
from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.comm.process_groups import Stages, attempt_in_all, check_planned_together
from dmuon.comm.transport import C10dTransport, Transport
from dmuon.config import Period, Schedule
from dmuon.devices import host_can_read
from dmuon.dtensors import local_tensor
from dmuon.groups import (
    MEMBERS,
    PROGRESS,
    Accepted,
    Group,
    ParamGroups,
    check_group,
    completed,
    describe,
    entries_of,
    read_groups,
)
from dmuon.kernels import choice
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.kernels.runner import Orthogonalizer
from dmuon.ownership import Ownership, ownerships_in, routes_in, staged
from dmuon.rule import Hyper, Rule, element_bytes, rule_of
from dmuon.saved_state import SavedState, read_state
from dmuon.scheduler.specs import ModelSpecs, StateSizes, dtype_name
from dmuon.step.at_owners import OwnersEngine
from dmuon.step.engine import Amp, Engine, Settings, join
from dmuon.step.on_params import ParamsEngine
from dmuon.types import (
    Adjustment,
    Coefficients,
    DtypeName,
    KernelChoice,
    Layout,
    NewParameters,
    OthersFlags,
    OwnershipError,
    first_of,
    warn,
)

if TYPE_CHECKING:
    from dmuon.report.data import LoadBalanceReport


_LOG = logging.getLogger("dmuon")


class Muon(Optimizer):
    """Muon on the matrices of a model, AdamW on everything else.

    ``lr`` to ``adjust_lr_fn`` are those of `torch.optim.Muon`; two defaults differ: Polar Express,
    and "match_rms_adamw", with which an AdamW learning rate carries over as a safe start; the best
    rate is often 3 to 10 times higher (docs/learning-rate.md).

    It plans who owns which matrix at its first `step` (or `report`, or ``ownership``), from the
    parameters that ``param_groups`` hold by then: `DTensor` parameters in the `sharded` layout,
    others in the `replicated` one, where ``p.grad`` must be the average over all ranks (DDP).
    To look at the plan first, or for another layout, call `dmuon.dedicate_params(model)` before.

    ``param_groups`` are the groups you pass, with the hyperparameters of `torch.optim.Muon` for
    matrices and of `torch.optim.AdamW` for others. A group with both has Muon's and
    ``adamw_betas``, ``adamw_eps``, ``adamw_weight_decay`` and ``adamw_lr_ratio`` (over ``lr``).

    Args:
        params: a module (also in `DistributedDataParallel`), parameters, (name, parameter) pairs,
            or group dicts of either. A parameter's algorithm follows from the live module that
            holds it, or from its name if no module does; ``algorithm="muon"`` or ``"adamw"`` (or
            ``use_muon=``) in its group wins.
        lr: a number, or a tensor of one element, which `step` reads.
        adjust_lr_fn: the factor on ``lr`` for an ``m x n`` matrix. None or "original":
            ``sqrt(max(1, m / n))``; "spectral_unclamped": ``sqrt(m / n)``; a number: the root mean
            square of an update over ``lr``, ``number * sqrt(max(m, n))``; "match_rms_adamw": 0.2,
            about the value of AdamW's updates. Weight decay is never adjusted.
        momentum_mode: "ema" (as `torch.optim.Muon`) or "sgd" (with ``dampening``).
        period: MuonBP (`sharded` layout only, docs/muonbp.md). An integer P takes a full step when
            the step count, from 0, is a multiple of P, and block steps between: each rank
            orthogonalizes the blocks it holds, without any traffic. `math.inf`: block steps only; a
            function of the step count gives a varying period, as `LinearPeriod` does.
        block_lr_ratio: multiplies the learning rate of block steps; in theory it lies between 1 and
            one over the square root of the number of blocks.
        ns_dtype: dtype of Newton-Schulz and of published updates, as a torch dtype or its name;
            "auto" is float16 on CUDA, bfloat16 on a CPU that supports it, and float32 otherwise or
            where ranks differ.
        master_weights: keep float32 weights behind lower-precision parameters. Without them one
            rank warns if rounding to the parameters' dtype would lose a typical update.
        nonfinite: "skip" a step with a non-finite gradient on any rank, on all ranks and for all
            parameters of the model, with a warning that names the first matrices (on an
            accelerator at the next step), and count it in `stats`; or "raise". Block steps skip
            the blocks with such gradients; all ranks learn of it, or raise, in the next full step,
            and with ``period=math.inf`` that rank alone warns or raises.
        nonfinite_group: ranks of all pipeline stages, one of each, that skip a (full) step together
            and whose gradients `clip_grad_norm_` and `metrics` join: a process group or a mesh of
            one axis, ``mesh["pp"]`` (docs/frameworks/pipeline.md). One more small all-reduce; to
            make the optimizer is then a collective call of these ranks.
        verify_every: after this many steps each rank recomputes the updates of some matrices and
            compares them with its weights; corruption raises on every rank (docs/reliability.md).
        variant: a change to orthogonalized matrices: "normuon" (a second moment per row, arXiv
            2510.05491) or an instance of a subclass of `dmuon.Rule` (docs/variants.md). Per group.
        cautious_weight_decay: decay only the elements that the update shrinks as well (arXiv
            2510.12402). Per group; matrices only.
        momentum_dtype: "bfloat16" keeps momentum of float32 weights in half the memory; it is
            advanced in their dtype. None: the weights' dtype, float32 with masters. Per group.
        adamw_lr: AdamW's learning rate; None means ``lr``.
        adamw_weight_decay: AdamW's weight decay; None means ``weight_decay``.
        dedicate: options of planning, as for `dmuon.dedicate_params`; a dict such as
            ``{"heads": {"*.qkv.weight": 12}}``.
        others: keywords of other optimizers, ignored if False or None, as in ``foreach=False``.

    Raises:
        TypeError: a hyperparameter has a wrong type, or a keyword is unknown.
        ValueError: a hyperparameter is out of range, there are no parameters, neither modules nor
            names identify them, or they do not fit the ownership. Errors of planning, such as a
            launch without a process group, are raised at the first step, on every rank.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell `torch.amp.GradScaler` to leave its scale and verdict to `step`, except in a
        closure, which it never accepts and in which Lightning may clip the gradients."""
        return not self._run.in_closure

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Adjustment | float | None = "match_rms_adamw",
        *,
        momentum_mode: Literal["ema", "sgd"] = "ema",
        dampening: float = 0.0,
        period: Period = 1,
        block_lr_ratio: float | None = None,
        ns_dtype: DtypeName | torch.dtype = "auto",
        master_weights: bool = False,
        nonfinite: Literal["skip", "raise"] = "skip",
        nonfinite_group: DeviceMesh | dist.ProcessGroup | None = None,
        verify_every: int | None = None,
        variant: Literal["normuon"] | Rule | None = None,
        cautious_weight_decay: bool = False,
        momentum_dtype: Literal["bfloat16", "float32"] | torch.dtype | None = None,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        dedicate: Dedicate | None = None,
        **others: Unpack[OthersFlags],
    ) -> None:
        given_too = config.renamed("Muon", others)
        both = _betas_of(given_too, adamw_betas)
        for name, value in given_too.items():
            if not config.is_idle(name, value):
                raise TypeError(f"dmuon.Muon has no keyword {name!r}: {_instead(name)}")
        muon = config.MuonDefaults(
            lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            momentum_mode, dampening, variant, cautious_weight_decay, momentum_dtype,
        )  # fmt: skip
        adamw = config.AdamWDefaults(adamw_lr, both, adamw_eps, adamw_weight_decay)
        switches = {
            "master_weights": master_weights, "block_lr_ratio": block_lr_ratio,
            "ns_dtype": ns_dtype, "nonfinite": nonfinite, "verify_every": verify_every,
        }  # fmt: skip
        given = read_groups(params)
        ownerships = ownerships_in(params, entries_of(given))
        transports = [o.runtime.transport for o in ownerships]
        run = self._run = _Run(switches, ParamGroups(params))
        if nonfinite_group is not None:
            run.stages = attempt_in_all(transports, lambda: Stages(nonfinite_group))
        prepare = partial(self._prepare, given, ownerships, muon, adamw, period, dedicate)
        made = attempt_in_all([*transports, *run.others], prepare)
        _keep_compiler_out()
        super().__init__(made, {})
        self.defaults = dict(run.groups.defaults[0])
        self._note_progress(self.param_groups)
        run.ready = True
        if ownerships:
            self._plan()

    def _prepare(
        self,
        given: list[Group],
        ownerships: Sequence[Ownership],
        muon: config.MuonDefaults,
        adamw: config.AdamWDefaults,
        period: Period,
        dedicate: Dedicate | None,
    ) -> list[Group]:
        """Check and complete the param groups. Not a collective call: `_bind` compares ranks."""
        run = self._run
        check_planned_together([o.runtime.transport for o in ownerships])
        staged[run.groups] = run.stages
        run.groups.defaults = muon.group(), adamw.group()
        config.checked(config.SWITCH_RULES, run.switches)
        resolve_ns_dtype(run.switches["ns_dtype"], torch.device("cpu"))
        run.schedule = Schedule(period)
        run.groups.is_stage = run.stages is not None
        if run.groups.is_stage and run.schedule.never_full:
            raise ValueError(
                "nonfinite_group with period=math.inf: ranks agree in full steps, and there is "
                "none. Leave nonfinite_group out, or pass a finite period"
            )
        run.asked = Request.of(dedicate, ownerships)
        run.groups.selection = {n: getattr(run.asked, n) for n in ("select", "splits", "heads")}
        made = run.groups.read(given, routes_in(ownerships))
        if ownerships:
            _check_members(made, ownerships)
        return made

    # ---- param groups --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, the same on every rank. The next full step after planning plans again."""
        run = self._run
        if not run.ready:
            super().add_param_group(param_group)
            return
        (group,) = run.groups.read(read_groups([param_group]))
        added = self.defaults.keys() - group.keys()  # torch adds all defaults to every group
        try:
            super().add_param_group(group)
        except Exception:
            del run.groups.names[-1], run.groups.algorithms[-1]
            raise
        for name in added:
            self.param_groups[-1].pop(name)
        self._note_progress(self.param_groups[-1:])

    def _named(self) -> list[tuple[str, Any]]:
        """Name the parameters. Also read groups that Lightning's `BaseFinetuning` has appended."""
        run = self._run
        if (added := self.param_groups[len(run.groups.names) :]) and not run.engines:
            for group, full in zip(added, run.groups.read(read_groups(added)), strict=True):
                group.update(full)
            self._note_progress(added)
        return run.groups.named(self.param_groups)

    # ---- planning ------------------------------------------------------------------------

    def _plan(self) -> _Run:
        """Plan unless that has been done; a collective call."""
        run = self._run
        if run.engines:
            return run

        def plan() -> None:
            # dedicate_params may have been called since the optimizer was made.
            ownerships = ownerships_in(run.groups.passed, entries_of(self.param_groups))
            # Training uses these tensors, even if a report was asked for in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._bind(ownerships or [self._new_ownership()])

        what = "planning all pipeline stages (by their rank in nonfinite_group)"
        try:
            attempt_in_all(run.others, plan, what=what, digest=lambda _: self._text_of_run())
        except Exception:
            if run.engines:  # another stage has failed
                self._unbind(run.ownerships)
            raise
        return run

    def _new_ownership(self, before: Ownership | None = None) -> Ownership:
        """Plan an ownership of the parameters in the groups, to replace ``before`` if given."""
        run = self._run
        request = replace(run.asked, ns_dtype=run.switches["ns_dtype"])

        def sizes(specs: ModelSpecs) -> StateSizes:
            own = map(dict(self._named()).__getitem__, (spec.name for spec in specs.parameters))
            return self._state_sizes(specs, own, self.param_groups)

        return plan_groups(run.groups, self.param_groups, self._named, request, sizes, before)

    def _refusal(self) -> Exception | None:
        """Return the error of ``param_groups``, or `NewParameters` to plan again, or None."""
        run = self._run
        assert run.accepted is not None
        try:
            run.accepted.check(self.param_groups, len(run.groups.names))
        except (TypeError, ValueError) as error:
            return error
        name = next((n for n, p in run.frozen if p.requires_grad), None)
        added = len(run.groups.names) - len(run.accepted.params)
        if name is None and not added:
            return None
        change = f"param groups added since owners were planned: {added}"
        if name is not None:
            change = (
                f"parameter {name!r} was frozen when owners were planned (at dedicate_params, or "
                "at the first step) and is trainable now"
            )
        kept = [o.plan.layout.value for o in run.ownerships if o.plan.layout.keeps_state_at_owners]
        if kept or len(run.ownerships) > 1:
            where = f"in the {kept[0]!r} layout" if kept else "with several ownerships"
            return OwnershipError(
                f"{change}: {where} this needs a new optimizer. Call own.close(), "
                "dmuon.dedicate_params(model) and dmuon.Muon again, and load the old state_dict"
            )
        if run.schedule.never_full:
            return OwnershipError(
                f"{change}: planning takes a full step, and period=math.inf has none"
            )
        if not run.schedule.is_full(run.schedule.t):  # ranks can agree only in a full step
            return None
        return NewParameters(
            f"{change}, but not on every rank: unfreeze, and add groups, on all of them before the "
            "same step"
        )

    def _plan_again(self, why: str) -> None:
        """Plan for the parameters trained now, and keep the state; a collective call."""
        run, began = self._run, time.perf_counter()
        (ownership,), (engine,) = run.ownerships, run.engines
        self.synchronize()
        with torch.inference_mode(False):
            entries = dict(self.state) | engine.saved_state()
            ownership.become(self._new_ownership(ownership))
            # Also kept here, in case binding fails.
            run.loaded |= {n: entries[p] for n, p in self._named() if p in entries}
            self._bind(run.ownerships)
        run.engines[0].skips = engine.skips
        if ownership.rank == 0:
            log_plan(ownership.plan, time.perf_counter() - began, why)

    def _bind(self, ownerships: list[Ownership]) -> None:
        """Make the engines; a collective call."""
        run, transports = self._run, [o.runtime.transport for o in ownerships]
        check_planned_together(transports)
        again = bool(run.engines)
        try:
            complete = partial(self._completed_for, ownerships)
            made = attempt_in_all(transports, complete, digest=partial(self._text, ownerships))
        except Exception:
            if again:
                self._unbind(ownerships)
            raise
        for group, full in zip(self.param_groups, made, strict=True):
            group.update(full)
        run.frozen = [(n, p) for n, p in self._named() if not p.requires_grad]
        # Fixed speeds choose kernels that no plan names, so that a resumed run has the same bits.
        device = ownerships[0].runtime.device
        mine = resolve_ns_dtype(run.switches["ns_dtype"], device)
        asked = mine, choice.fixed_speeds(device, mine)
        found = {c for transport in transports for c in transport.gather_objects(asked)}
        ns_dtype, speeds = choice.common_choice(found, device)
        agreed = run.switches | {"ns_dtype": ns_dtype}
        accepted = Accepted(self.param_groups, run.groups.algorithms)
        if run.stages is not None and not again:
            run.stages.check(transports)
        del agreed["verify_every"]
        settings = Settings(run.schedule, accepted.digest, **agreed)
        if not again:
            self.state.clear()

        def make() -> list[str | None]:
            """Issue no collective: a rank may fail alone, for instance out of memory."""
            run.engines = []
            for o in ownerships:
                on_params = isinstance(o.runtime, ParamsRuntime)
                kind: type[Engine] = ParamsEngine if on_params else OwnersEngine
                kernels = Orthogonalizer(o.runtime.device, ns_dtype, o.asked.kernels, speeds=speeds)
                run.engines.append(kind(o.runtime, o.telemetry, kernels, self, settings))
            run.ownerships, run.accepted = ownerships, accepted
            self._note_progress(self.param_groups)
            flaws = [_flaw_of_dtype(ownerships, ns_dtype)]
            if not settings.master_weights and not again:
                flaws.append(_flaw_of_rounding(ownerships, self.param_groups))
            return flaws

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
        for engine, ownership in zip(run.engines, ownerships, strict=True):
            if ownership.rank == 0:
                _LOG.debug("Newton-Schulz in %s; %s", dtype_name(ns_dtype), engine.describe())
        for flaw in filter(None, flaws):
            warn(flaw)

    def _completed_for(self, ownerships: Sequence[Ownership]) -> list[Group]:
        """Complete the groups with their planned parameters' hyperparameters, and check them."""
        run, groups = self._run, self._run.groups
        for ownership in ownerships:
            if ownership.runtime.units:
                raise OwnershipError(
                    "these parameters already have a dmuon.Muon; to make another one, call "
                    "own.close() and dmuon.dedicate_params(model) again"
                )
        _check_members(self.param_groups, ownerships)
        _check_switches(run, ownerships)
        planned, made = routes_in(ownerships), []
        for number, group in enumerate(self.param_groups):
            algorithms = groups.algorithms[number]
            algorithms |= {planned[p][0].algorithm for p in group["params"] if p in planned}
            full = completed(group, algorithms, *groups.defaults)
            made.append(full | check_group(full, number, algorithms))
        ns_dtype = resolve_ns_dtype(run.switches["ns_dtype"], ownerships[0].runtime.device)
        for ownership in ownerships:
            _check_kernels(ownership, ns_dtype, made)
            sizes = self._state_sizes(ownership.plan.specs, ownership.parameters, made)
            ownership.count_state(sizes)
        return made

    def _state_sizes(
        self, specs: ModelSpecs, parameters: Iterable[Tensor], groups: Sequence[Group]
    ) -> StateSizes:
        """Return the bytes of state of ``parameters``, in the order of the specs, in ``groups``."""
        masters = self._run.switches["master_weights"]
        group_of = {p: full for g, full in zip(self.param_groups, groups) for p in g["params"]}
        own = [group_of.get(p, {}) for p in parameters]
        per_element = (
            element_bytes(group, getattr(torch, spec.dtype), masters, spec.algorithm)
            for group, spec in zip(own, specs.parameters, strict=True)
        )
        at_owners = (rule_of(own[m.parameter]).bytes(*m.shape) for m in specs.matrices)
        return StateSizes(tuple(per_element), tuple(at_owners))

    def _text(self, ownerships: Sequence[Ownership], made: Sequence[Group]) -> str:
        """List, in lines, values to agree on; shapes are logical, because of placeholders."""
        shapes = {p: spec.shape for p, (spec, _) in routes_in(ownerships).items()}
        lines = [self._text_of_run()]
        for number, group in enumerate(made):
            found = [shapes.get(p, tuple(p.shape)) for p in self.param_groups[number]["params"]]
            lines += describe(group, number, found)
        return "\n".join(lines)

    def _text_of_run(self) -> str:
        """List, in lines, values to agree on with other pipeline stages, too."""
        run = self._run
        stages = None if run.stages is None else len(run.stages.ranks)
        values = run.switches | run.schedule.state() | {"nonfinite_group": stages}
        return "\n".join(f"{k}={v}" for k, v in values.items())

    def _unbind(self, ownerships: Sequence[Ownership]) -> None:
        """Drop the engines, so that the next step plans again."""
        run = self._run
        run.engines, run.ownerships = [], []
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
            TypeError, ValueError: a hyperparameter in ``param_groups`` is wrong, or groups or
                parameters differ from the planned ones; nothing has changed.
            ConsensusError: another rank has such an error, or ranks take full steps at different
                step counts. It is raised in a full step (on an accelerator at the next `step`). If
                owners hold gradients, the flaw must exist by the end of backward; otherwise the
                other ranks wait for the failed rank until the next collective times out.
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
            self._launch(self._refusal(), verifies)
        except NewParameters as reason:
            if not reason.agreed:
                raise
            self._plan_again(str(reason).partition(", but")[0])
            self._launch(self._refusal(), verifies)
        for engine in run.engines:
            engine.update_others()
        for engine in run.engines:
            engine.finish()
        self.synchronize()
        run.schedule.advance()
        self._note_progress(self.param_groups)
        for engine in run.engines if verifies else ():
            engine.check_sample()
        for engine in run.engines:
            engine.count_bytes()
        return loss

    def _launch(self, refusal: Exception | None, verifies: bool) -> None:
        """Run the first part of a step, up to the point where updates may be in transit."""
        run = self._run
        # `torch.amp.GradScaler` sets these around the call, and expects skipped steps.
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for engine in run.engines:
            refusal = engine.begin(amp, refusal) or refusal
        for engine in run.engines if verifies else ():
            engine.take_sample(run.verified)
        full = run.schedule.is_full(run.schedule.t)
        for engine in run.engines:
            engine.send(refusal)
        if run.stages is not None and full:
            error = join(run.stages, run.engines)
            if error is not None:
                raise refusal or error
        for engine, ownership in zip(run.engines, run.ownerships, strict=True):
            try:
                engine.launch(refusal)
            except Exception as error:
                agreed = isinstance(error, NewParameters) and error.agreed
                known = host_can_read(ownership.runtime.device) or agreed
                if error is not refusal or known or not full:
                    raise
        if refusal is not None:
            # On an accelerator this step counts, because other ranks cannot know of it yet.
            for engine in run.engines:
                engine.finish()
            run.schedule.advance()
            self._note_progress(self.param_groups)
            raise refusal

    def _makes_state_only(self) -> bool:
        """Whether all ranks take the step of torch's `get_state_dict`, with zero lr and grads."""
        run, groups = self._run, self.param_groups
        if run.schedule.t or any(float(group.get("lr", 1.0)) for group in groups):
            return False
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        mine = all(p.grad is not None and not local_tensor(p.grad).any() for p in params)
        return all(a for o in run.ownerships for a in o.runtime.transport.gather_objects(mine))

    def _verifies(self) -> bool:
        """Whether this step is verified: the first full one after every ``verify_every`` steps."""
        every, schedule = self._run.switches["verify_every"], self._run.schedule
        if every is None or not schedule.is_full(schedule.t):
            return False
        is_due = (schedule.t + 1) // every > (schedule.last_full + 1) // every
        self._run.verified += is_due
        return is_due

    def _note_progress(self, groups: Iterable[Group]) -> None:
        """Record the position in the schedule in the groups with matrices."""
        progress = self._run.schedule.state()
        C10dTransport.steps = self._run.schedule.t
        for group in groups:
            if "ns_steps" in group:
                group.update((name, progress[key]) for key, name in PROGRESS.items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those that owners hold besides ``p.grad``."""
        # First, because an open round of a failed backward still writes to p.grad.
        for ownership in self._run.ownerships:
            ownership.runtime.zero_grad()
        super().zero_grad(set_to_none)

    # ---- reading -------------------------------------------------------------------------

    @property
    def ownership(self) -> Ownership:
        """The plan's ownership; OwnershipError if there are several. Plans if that has not been
        done, which is a collective call."""
        found = self._plan().ownerships
        if len(found) > 1:
            raise OwnershipError(
                f"this optimizer spans {len(found)} ownerships: ask each model for its own"
            )
        return found[0]

    def report(self) -> LoadBalanceReport:
        """Return the load-balance report, after a few steps with measured times beside predicted
        ones. A collective call if nothing is planned yet."""
        found, groups = self.ownership.report(), []
        for n, (group, by) in enumerate(zip(self.param_groups, self._run.groups.algorithms)):
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if "muon" in by:
                groups.append((n, "muon", lr, decay))
            if "adamw" in by:
                own = group.get("adamw_weight_decay")
                lr *= group.get("adamw_lr_ratio", 1.0)
                groups.append((n, "adamw", lr, decay if own is None else float(own)))
        return replace(found, groups=tuple(groups))

    def synchronize(self) -> None:
        """Wait until every parameter holds its published value. No collective is issued."""
        with torch.no_grad():
            for ownership in self._run.ownerships:
                ownership.runtime.synchronize()

    def stats(self) -> dict[str, Any]:
        """Return numbers of the last step. Not a collective call, but waits for pending updates.

        ``steps``, ``update_rms`` by matrix, ``ns_ms``, ``bytes`` and ``step_bytes`` by purpose,
        ``kernels``, ``finite``, ``skipped``, ``below_eps`` and ``full_step`` (docs/metrics.md).
        """
        run = self._run
        if not run.engines:
            return {"steps": run.schedule.t, "update_rms": {}}
        return {
            "steps": run.schedule.t,
            "ns_ms": sum(o.telemetry.watch.milliseconds() for o in run.ownerships),
            **_combined([engine.stats() for engine in run.engines]),
        }

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger (docs/metrics.md). Issues no collective and
        does not wait for a device: if that lags, the numbers are those of the newest step that it
        has finished. Unknown numbers have no key, so the dict is empty before the first step.
        """
        run = self._run
        found = [engine.records() for engine in run.engines]
        steps = max(set(found[0]).intersection(*found), default=None) if found else None
        if steps is None:
            return {}
        times: dict[str, float] = defaultdict(float)
        in_groups: dict[int, list[float]] = defaultdict(list)
        records = [each[steps] for each in found]
        planned = sum(o.telemetry.planned_ms or math.nan for o in run.ownerships)
        for engine, record in zip(run.engines, records, strict=True):
            for name, ms in record.times().items():
                times[name] += ms
            for group, rms in engine.in_groups(record):
                in_groups[group].append(rms)
        metrics = {"steps": float(steps), **times}
        metrics["bytes"] = float(sum(record.bytes for record in records))
        metrics["skipped"] = max(record.numbers.read()[-1] for record in records)
        metrics["below_eps"] = float(sum(record.below_eps for record in records))
        squares = [record.square for record in records if record.square is not None]
        if len(squares) == len(records) and math.isfinite(square := math.fsum(squares)):
            metrics["grad_norm"] = math.sqrt(square)
        if planned > 0 and times["ns_ms"] > 0 and all(record.full for record in records):
            metrics["planned_ratio"] = metrics["ns_ms"] / planned
        names = [str(group.get("name", n)) for n, group in enumerate(self.param_groups)]
        are_clear = len({*names}) == len(names)
        for group, values in sorted(in_groups.items()):
            name = names[group] if are_clear else str(group)
            metrics[f"update_rms/{name}/mean"] = math.fsum(values) / len(values)
            metrics[f"update_rms/{name}/max"] = max(values)
        return metrics

    # ---- state ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Format as torch's optimizers do, without the parameters' names."""
        return re.sub(r"\n    param_names: .*", "", super().__repr__())

    def state_dict(self) -> dict[str, Any]:
        """Return whole parameters' state as `torch.optim.Muon` and `torch.optim.AdamW` name it.

        In `replicated` any rank has the whole state; in `sharded` it is distributed like the
        parameters; where momentum lies with owners (``reduce_to_owner``, `dedicated`), by rows,
        which makes this a collective call, as does a ``variant`` with state. Distributed state can
        be saved by `torch.distributed.checkpoint` and loaded into any layout (docs/checkpoints.md).

        Raises:
            OwnershipError: momentum lies with owners, and another rank does not call this.
        """
        self.synchronize()
        self._show_loaded()
        with torch.no_grad():
            shown = [engine.saved_state() for engine in self._run.engines]
        kept = dict(self.state)
        try:
            for entries in shown:
                self.state.update(entries)
            found = super().state_dict()
        finally:
            self.state.update(kept)
        # New dicts, because torchtune changes these entries before it loads them.
        found["state"] = {key: dict(entry) for key, entry in found["state"].items()}
        for group in found["param_groups"]:
            if isinstance(group.get("variant"), Rule):  # files can hold plain values only
                group["variant"] = repr(group["variant"])
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a `state_dict`, of this layout or another, bit for bit where the precision is the
        same. A collective call after planning; before, the state is kept for the plan.

        A list of states of several optimizers that shared these parameters, such as
        ``[muon.state_dict(), adamw.state_dict()]`` of `torch.optim`, gives momentum and moments by
        name or (without names) in order; hyperparameters stay as they are here.

        Raises:
            OwnershipError: this is no optimizer's state, another model's, or has a wrong value;
                nothing is changed.
            ConsensusError: another rank refuses it, or ranks load different states; nothing is
                changed.
        """
        run, call = self._run, "opt.load_state_dict()"
        self.synchronize()

        def read() -> SavedState:
            self._named()
            masters = run.switches["master_weights"]
            return read_state(state_dict, self.param_groups, run.groups, run.schedule, masters)

        transports = [o.runtime.transport for o in run.ownerships]
        for transport in transports:
            transport.meet(call)
        saved = attempt_in_all(transports, read, what=call, digest=SavedState.text)
        # The base class would cast state to the parameter's dtype and lose bits.
        kept, entries = dict(self.state), saved.entries
        super().load_state_dict({"state": {}, "param_groups": saved.groups})
        if run.engines:
            self.state.update(kept)
            self._load(entries)
        later = entries.keys() - (kept.keys() if run.engines else ())
        # Parameters planned later get a copy of their state, because the caller's may change.
        run.loaded = {
            name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries[p].items()}
            for name, p in self._named()
            if p in later
        }
        self._show_loaded()
        if saved.progress is not None:
            run.schedule.load(saved.progress)
        self._note_progress(self.param_groups)
        known = (n for n, p in self._named() if p.requires_grad and p not in entries)
        lost = [name for name in known if name in run.groups.routes]
        if entries and lost:  # their state begins at zero, unlike that of other parameters
            warn(
                f"dmuon: the optimizer state has nothing of {len(lost)} trainable parameters, such "
                f"as {first_of(lost)}: their momentum, or AdamW's moments, begin at zero. That is "
                "right for those that had no gradient before it was saved, or were frozen"
            )

    def _show_loaded(self) -> None:
        """Show state that was loaded before planning in ``state``."""
        if (loaded := self._run.loaded) and not self._run.engines:
            self.state.clear()
            self.state.update((p, loaded[n]) for n, p in self._named() if n in loaded)

    def _load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        with torch.no_grad():
            for engine in self._run.engines:
                engine.load_state(saved)


def _combined(values: Sequence[Any], path: str = "") -> Any:
    """Combine `Engine.stats` of all engines: merge dicts key by key, add up bytes."""
    if path == "/update_rms":
        joint: dict[str, float] = {}
        for number, rms in enumerate(values):  # two models may use the same names
            joint |= {f"{n} ({number})" if n in joint else n: v for n, v in rms.items()}
        return joint
    if isinstance(values[0], dict):
        keys = dict.fromkeys(chain(*values))
        return {k: _combined([v[k] for v in values if k in v], f"{path}/{k}") for k in keys}
    if isinstance(values[0], str):  # descriptions of kernels
        return " and ".join(dict.fromkeys(values))
    if "bytes" in path:
        return sum(values)
    return all(values) if path == "/finite" else max(values)


def _betas_of(given: dict[str, Any], named: tuple[float, float]) -> tuple[float, float]:
    """Return AdamW's betas, from ``given`` if their retired name was passed."""
    found = given.pop("adamw_betas", named)
    if found != named != (0.9, 0.95):
        raise TypeError(
            f"betas={found} and adamw_betas={named} are the same thing: pass one of them"
        )
    return found


def _instead(name: str) -> str:
    """Advise on a keyword that `Muon` does not have."""
    if name in MEMBERS:
        return f"it is a key of a param group, [{{'params': ..., {name!r}: ...}}, ...]"
    if name in {f.name for f in fields(Request)}:
        return f"how to plan goes into dedicate={{{name!r}: ...}}"
    return config.instead(name, [*signature(Muon.__init__).parameters][1:])


@dataclass(eq=False)
class _Run:
    """The mutable part of an optimizer. A framework (Lightning) may wrap the optimizer in an object
    that forwards reads but not writes of attributes, so they are written here instead."""

    switches: dict[str, Any]
    groups: ParamGroups
    ready: bool = False
    in_closure: bool = False
    schedule: Schedule = field(default_factory=lambda: Schedule(1))
    asked: Request = Request()  # noqa: RUF009  frozen
    verified: int = 0
    # Loaded state by name, until the plan is made.
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Set by planning:
    frozen: list[tuple[str, Any]] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    ownerships: list[Ownership] = field(default_factory=list)
    accepted: Accepted | None = None
    stages: Stages | None = None

    @property
    def others(self) -> list[Transport]:
        """The transport to other pipeline stages, if there are any."""
        return [] if self.stages is None else [self.stages.transport]


def _check_members(groups: Sequence[Group], ownerships: Sequence[Ownership]) -> None:
    """Check that each planned parameter is in exactly one group, each trainable one planned."""
    names = {p: spec.name for p, (spec, _) in routes_in(ownerships).items()}
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
                    "dedicate_params: call own.close() and dmuon.dedicate_params(model) again"
                )
    if missing := [name for p, name in names.items() if p not in seen]:
        raise OwnershipError(
            f"{len(missing)} dedicated parameters were not passed to dmuon.Muon: "
            f"{', '.join(missing[:5])}. Pass them, or freeze them before dmuon.dedicate_params"
        )


# ---- settings, checked and agreed on -----------------------------------------------------


def _check_switches(run: _Run, ownerships: Sequence[Ownership]) -> None:
    """Raise OwnershipError for block steps or masters in layouts that do not support them."""
    ratio = run.switches["block_lr_ratio"]
    for layout in {o.plan.layout for o in ownerships} - {Layout.SHARDED}:
        if not run.schedule.always_full or ratio is not None:
            raise OwnershipError(
                f"period={run.schedule.describe()}, block_lr_ratio={ratio!r}: in the "
                f"{layout.value!r} layout each matrix is whole at its owner, so there is no block "
                "step; leave them at 1 and None"
            )
    for runtime in (o.runtime for o in ownerships if run.switches["master_weights"]):
        if isinstance(runtime, OwnersRuntime) and not runtime.keeps_whole:
            raise OwnershipError(
                f"master_weights=True: in the {runtime.plan.layout.value!r} layout under tensor "
                "parallelism an owner keeps a slice of a weight only. Keep the parameters in "
                "float32 and compute in bfloat16 (torch.autocast), or leave master_weights off"
            )


def _check_kernels(ownership: Ownership, dtype: torch.dtype, groups: list[Group]) -> None:
    """Raise ValueError if a kernel that the options or the plan name cannot run here."""
    options, device, plan = ownership.asked.kernels, ownership.runtime.device, ownership.plan
    if options.cuda_graphs and devices.of(device).graphs() is None:
        raise ValueError(
            f"KernelOptions.cuda_graphs=True needs a CUDA device, found {device}: leave it None"
        )
    counts = {group["ns_steps"] for group in groups if config.MUON_RULES.keys() <= group.keys()}
    for shape, count in product({m.shape for m in plan.specs.matrices}, counts):
        choice.fixed_choice(*shape, dtype, device, count, options.method, options.backend)
    for kernel in {batch.kernel for batch in plan.batches} - {""}:
        named = KernelChoice.parse(kernel)
        planned: torch.dtype = getattr(torch, named.dtype)
        steps = config.MuonDefaults().ns_steps
        if named.restarts and not choice.is_safe(named.restarts, planned, steps):
            raise ValueError(
                f"the plan runs {kernel}, with which the iteration diverges: plan again without it"
            )
        if (reason := choice.why_not(named.backend, device, planned)) is not None:
            raise ValueError(
                f"the plan runs {kernel} on {device}, which is not possible: {reason}. Plan again "
                "on this hardware (without plan=)"
            )


def _flaw_of_dtype(ownerships: list[Ownership], dtype: torch.dtype) -> str | None:
    """Return a warning, on one rank, if kernels were chosen for another Newton-Schulz dtype."""
    batches = chain.from_iterable(o.plan.batches for o in ownerships if o.rank == 0)
    found = {KernelChoice.parse(batch.kernel).dtype for batch in batches if batch.kernel}
    if not (others := sorted(found - {dtype_name(dtype)})):
        return None
    return (
        f"dmuon: kernels were measured for {' and '.join(others)} when owners were planned, and "
        f"Newton-Schulz runs in {dtype_name(dtype)}: others are chosen by shape. To use those, "
        "leave ns_dtype out; to measure for it, let dmuon.Muon plan (dedicate= says how)"
    )


def _flaw_of_rounding(ownerships: list[Ownership], groups: list[Group]) -> str | None:
    """Return a warning, on one rank, if rounding would lose typical updates of half-precision
    weights. It compares root mean squares over the matrices of a param group and dtype that the
    rank stores. Entries of an orthogonal ``m x n`` matrix have ``1 / sqrt(max(m, n))``."""
    group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
    # By group and dtype: weights, sums of squares of their updates, and numbers of elements.
    found: dict[tuple[int, torch.dtype], list[tuple[Tensor, float, int]]] = defaultdict(list)
    for ownership in ownerships:
        plan = ownership.plan
        # In the dedicated layout the first rank may store no matrix.
        if ownership.rank != (min(plan.owners) if plan.layout is Layout.DEDICATED else 0):
            continue
        for p, (_, matrices) in routes_in([ownership]).items():
            local = local_tensor(p)
            if matrices and p.dtype.itemsize < 4 and local.numel():
                hyper = Hyper.of(groups[group_of[p]])
                squares = [hyper.adjusted(*m.shape) ** 2 / max(m.shape) * m.numel for m in matrices]
                entry = local, sum(squares), sum(m.numel for m in matrices)
                found[group_of[p], p.dtype].append(entry)
    lost = []
    for (number, dtype), entries in found.items():
        weights, sums, counts = zip(*entries)
        update = math.sqrt(sum(sums) / sum(counts))
        norms = [torch.linalg.vector_norm(w, dtype=torch.float32) for w in weights]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        weight = norm / math.sqrt(sum(w.numel() for w in weights))
        info = torch.finfo(dtype)  # `math.ulp` is for float64, which has 53 bits
        half_ulp = 2.0**51 * info.eps * math.ulp(max(weight, info.smallest_normal))
        if 0 < weight < math.inf and 0 < update < half_ulp:
            lost.append((update / half_ulp, update, weight, half_ulp, number, dtype))
    if not lost:
        return None
    _, update, weight, half_ulp, number, dtype = min(lost, key=lambda row: row[0])
    return (
        f"dmuon: with lr={float(groups[number]['lr']):g} a typical update of a "
        f"{dtype_name(dtype)} matrix is {update:.2g}, and half a unit in the last place of its "
        f"typical weight, {weight:.2g}, is {half_ulp:.2g}: most updates are "
        "rounded away and change nothing. Pass master_weights=True, which keeps float32 weights "
        "behind the parameters, or keep the parameters in float32 and compute under torch.autocast"
    )


@cache
def _keep_compiler_out() -> None:
    """Exclude our methods from a compiled training step: it would be cut into a hundred graphs and
    would time compiled kernels. Not at import, because this loads the compiler."""
    for name in ("step", "zero_grad", "synchronize"):
        setattr(Muon, name, torch.compiler.disable(getattr(Muon, name)))


def hf_factory() -> type[Muon]:
    """Return the class, for the `Trainer` of transformers (5.2 and newer):
    ``optimizer_cls_and_kwargs=(dmuon.hf_factory, {"lr": 1e-3})``. If it got the class itself, it
    would make two groups, one of them without decay."""
    return Muon
