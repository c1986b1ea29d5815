"""`Muon`: one `torch.optim.Optimizer` over matrices (Muon) and everything else (AdamW).

The class comes first; below it are what users pass to it (param groups of one algorithm each), and
its settings, checked and agreed on by all ranks.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon.comm.consensus import attempt
from dmuon.comm.hooks import reshard
from dmuon.comm.layout import OwnerRuntime
from dmuon.comm.process_groups import check_launched, check_planned_together
from dmuon.comm.sharded import ShardedRuntime
from dmuon.config import (
    ADAMW_RULES,
    MUON_RULES,
    SWITCH_RULES,
    AdamWDefaults,
    MuonDefaults,
    check_adamw_group,
    check_muon_group,
    checked,
)
from dmuon.dtensors import local_tensor
from dmuon.kernels.choice import fixed_choice, is_safe, why_not
from dmuon.kernels.newton_schulz import resolve_coefficients, resolve_ns_dtype
from dmuon.ownership import Ownership, ownership_of, ownerships_of
from dmuon.period import Period, Schedule
from dmuon.report.data import LoadBalanceReport
from dmuon.scheduler.specs import ParameterSpec, canonical_name
from dmuon.step.engine import Amp, Engine, Settings
from dmuon.step.owner import OwnerEngine
from dmuon.step.sharded import ShardedEngine
from dmuon.types import Algorithm, Coefficients, KernelChoice, Layout, OwnershipError
from dmuon.update import Rates

Group = dict[str, Any]

_STATE_FORMAT = 1
# Kept in every param group, so that tools which save groups alone (torch's distributed checkpoint)
# save where the optimizer is in its schedule.
_PROGRESS = {"step": "muon_step", "last_full": "muon_last_full", "period": "muon_period"}


class Muon(Optimizer):
    """Muon on the matrices of a dedicated model, AdamW on everything else.

    ``lr`` to ``adjust_lr_fn`` mean what they mean in `torch.optim.Muon`; two defaults differ:
    Polar Express coefficients, and "match_rms_adamw", with which an AdamW learning rate is a safe
    start (the best one is often 2 to 5 times higher).

    One `step`, on every rank::

        gradients   are where they belong: with their shards, or (replicated, dedicated) with owners
        owners      Newton-Schulz, batch by batch; each result leaves at once
        everyone    AdamW on its parameters, while matrices travel
        later       before a block's next forward its matrices' updates are applied
                    (publish="sync": before `step` returns); dedicated: its matrices are broadcast

    Reading weights through `state_dict`, a forward pass or after `synchronize` sees published
    values; in the `dedicated` layout inside ``own.materialized``. In the `replicated` and
    `dedicated` layouts `step` consumes the matrices' gradients; use ``opt.zero_grad()`` (not
    ``model.zero_grad()``) to drop gradients without a step. In the
    `sharded` layout a full step that finds a non-finite gradient on any rank changes nothing on
    any rank; of several models in one optimizer, each has a verdict of its own.

    Args:
        model_or_params: a dedicated module, or its parameters as frameworks pass them: tensors,
            (name, tensor) pairs, or group dicts with hyperparameters of their own.
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
        publish: "async" returns from `step` while updates travel; "sync" waits.
        master_weights: keep float32 weights behind lower-precision parameters. Without them one
            rank warns where a typical update is lost in the rounding of such parameters.
        adamw_lr: of what goes to AdamW; None means ``lr``.
        adamw_weight_decay: of what goes to AdamW; None means ``weight_decay``.

    Raises:
        TypeError: a hyperparameter is of a wrong type, such as a string for a number.
        ValueError: a hyperparameter is out of range, the parameters do not fit the ownership, or
            several processes were launched and no process group was made. Raised on every rank.
    """

    # Makes `torch.amp.GradScaler` leave its scale and its verdict to `step`: the `sharded` layout
    # shares them with all ranks, the others can refuse.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
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
        publish: str = "async",
        master_weights: bool = False,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ) -> None:
        muon = MuonDefaults(
            lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            momentum_mode, dampening,
        )  # fmt: skip
        adamw = AdamWDefaults(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        check_launched("dmuon.Muon")
        given = _groups_of(model_or_params)
        self._ownerships = _ownerships_in(model_or_params, given)
        check_planned_together([o.runtime.transport for o in self._ownerships])
        self._sealed = False
        switches = {
            "publish": publish,
            "master_weights": master_weights,
            "block_lr_ratio": block_lr_ratio,
        }

        def prepare() -> tuple[list[Group], Schedule]:
            groups = [{**group, "params": _tensors_of(group)} for group in given]
            adamw_side = adamw.group()
            check_muon_group(muon.group())
            checked(SWITCH_RULES, switches)
            schedule = _schedule(period, block_lr_ratio, self._ownerships)
            mine = resolve_ns_dtype(ns_dtype, self._ownerships[0].runtime.device)
            _check_members(groups, self._ownerships)
            made = _split(groups, self._ownerships, muon.group(), adamw_side)
            for number, group in enumerate(made):
                group.update(_check_group(group, number))
            for ownership in self._ownerships:
                _check_kernels(ownership, mine, made)
            return made, schedule

        # A rank may have a placeholder where another has the weight.
        shapes = {p: spec.shape for p, spec in _planned(self._ownerships)}

        def text(result: tuple[list[Group], Schedule]) -> str:
            made, schedule = result
            period = schedule.describe()
            settings = f"{master_weights=}, {period=!s}, {block_lr_ratio=}"
            return "\n".join([settings, *(_describe(group, shapes) for group in made)])

        # What fails or differs on any rank of any mesh is an error on all of them.
        for ownership in self._ownerships:
            transport = ownership.runtime.transport
            made, self._schedule = attempt(transport, prepare, what="dmuon.Muon", digest=text)
        super().__init__(made, muon.group())
        self._sealed = True
        # What each group must still be at every step: engines are bound to it.
        self._members = [(g["algorithm"], list(g["params"])) for g in self.param_groups]
        # Hyperparameters of each group that are known to be right.
        self._accepted: list[Group] = [{} for _ in self._members]
        self._publish = publish
        self._note_progress()
        dtype = _agreed_dtype(self._ownerships, ns_dtype)
        _warn_of_dtype(self._ownerships, dtype)
        self._settings = Settings(
            dtype, master_weights, self._schedule, block_lr_ratio, self._check_groups
        )
        self._bytes: dict[str, int] = {}
        self._engines = [_engine(o, self, self._settings) for o in self._ownerships]
        if not master_weights:
            _warn_of_rounding(self._ownerships, self.param_groups)

    # ---- construction --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once planned: a new parameter would have no owner."""
        if self._sealed:
            raise OwnershipError(
                "add_param_group is not possible after planning: call own.close(), "
                "dmuon.dedicate_params(model) and dmuon.Muon(...) again with all parameters"
            )
        super().add_param_group(param_group)

    # ---- step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient on any rank. A collective call.

        Raises:
            TypeError, ValueError: a hyperparameter in ``param_groups`` is not what it should be by
                now, groups or parameters are not those that were planned; nothing has changed.
                Where that is so on some ranks alone, the others raise ConsensusError, which names
                them, if a collective that exists anyway can tell: in a full step of the `sharded`
                layout; in the other layouts if it was so at the end of backward already. Otherwise
                (in a block step, or changed between backward and `step`) they wait for that rank
                in the next collective until it times out. On an accelerator, whose host does not
                wait, the others raise at the next `step`.
            ConsensusError: a ``period`` that is a function has ranks take full steps at different
                step counts; found when they meet in a full step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A scheduler or a user may have set something else.
        refusal = self._check_groups()
        # Set by `torch.amp.GradScaler` around the call.
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for engine in self._engines:
            engine.begin(amp, refusal)
        for engine in self._engines:
            engine.launch()
        for engine in self._engines:
            engine.update_others()
        for engine in self._engines:
            engine.finish()
        self._schedule.advance()
        self._note_progress()
        if self._publish == "sync":
            self.synchronize()
        self._bytes = self._read_meters()
        return loss

    def _check_groups(self) -> Exception | None:
        """What is wrong with ``param_groups``; None if nothing is, and then they hold numbers as
        Python's own."""
        try:
            self._check_structure()
            for number, group in enumerate(self.param_groups):
                accepted = self._accepted[number]
                if accepted and all(group[name] is value for name, value in accepted.items()):
                    continue
                kept = _check_group(group, number)
                group.update(kept)
                # Tensors and lists can change in place.
                lasting = all(
                    isinstance(v, float | int | str | tuple | None) for v in kept.values()
                )
                self._accepted[number] = kept if lasting else {}
        except (TypeError, ValueError) as error:
            return error
        return None

    def _check_structure(self) -> None:
        """Raise OwnershipError unless ``param_groups`` are those that were made, in their order."""
        found = [group.get("algorithm") for group in self.param_groups]
        expected = [algorithm for algorithm, _ in self._members]
        if found != expected:
            raise OwnershipError(
                f"opt.param_groups have the algorithms {found}, but were made with {expected}: "
                "change hyperparameters, never groups or their order. To plan other groups call "
                "own.close(), dmuon.dedicate_params(model) and dmuon.Muon(...) again"
            )
        for number, (group, (algorithm, params)) in enumerate(
            zip(self.param_groups, self._members)
        ):
            now = group.get("params", ())
            if len(now) != len(params) or not all(map(operator.is_, now, params)):
                raise OwnershipError(
                    f"opt.param_groups[{number}] holds other parameters than it was made with "
                    f"({len(now)}, then {len(params)}), or in another order: leave "
                    "group['params'] as it is, and freeze a parameter by giving it no gradient"
                )
            rules = MUON_RULES if algorithm == Algorithm.MUON.value else ADAMW_RULES
            missing = [name for name in rules if name not in group]
            if missing:
                raise OwnershipError(
                    f"opt.param_groups[{number}] has lost {missing}: set "
                    f"opt.param_groups[{number}][{missing[0]!r}] again"
                )

    def _note_progress(self) -> None:
        progress = self._schedule.state()
        for group in self.param_groups:
            for key, name in _PROGRESS.items():
                group[name] = progress[key]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those that owners hold beside ``p.grad`` included."""
        # First, for a round that a failed backward left open still writes to p.grad.
        for ownership in self._ownerships:
            ownership.runtime.zero_grad()
        super().zero_grad(set_to_none)

    # ---- reading -------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter holds its published value. No collective is issued."""
        with torch.no_grad():
            for ownership in self._ownerships:
                ownership.runtime.synchronize()

    def report(self) -> LoadBalanceReport:
        """The load-balance report of the ownership (of one: several have one each).

        After a few steps with measured times beside the predicted ones. No collective call.
        """
        if len(self._ownerships) > 1:
            raise OwnershipError(
                f"this optimizer spans {len(self._ownerships)} ownerships: call report() on each"
            )
        return self._ownerships[0].report()

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
        ``skipped``, the number of steps that were not, and ``step_bytes``, the memory that a full
        step takes on this rank, by purpose.
        """
        found = [engine.stats() for engine in self._engines]
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
            "steps": self._schedule.t,
            "ns_dtype": str(self._settings.ns_dtype).removeprefix("torch."),
            "ns_ms": sum(o.telemetry.watch.milliseconds() for o in self._ownerships),
            "bytes": dict(self._bytes),
            **joint,
        }

    def _read_meters(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for ownership in self._ownerships:
            for tag, count in ownership.runtime.meter.reset().items():
                total[tag] = total.get(tag, 0) + count
        return total

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank stores.

        In the `sharded` layout momentum and AdamW's state are distributed like their parameters,
        and `torch.distributed.checkpoint` saves and reshards them. In the other layouts it is
        what this rank owns: each rank must save its own, bound to the plan and to the rank, and
        `load_state_dict` refuses any other.
        """
        self.synchronize()
        for engine in self._engines:
            engine.before_state_dict()
        data = super().state_dict()
        owners = self._owners()
        if owners:
            data["dmuon"] = {"format": _STATE_FORMAT, "steps": self._schedule.t, "owners": owners}
        return data

    def _owners(self) -> list[tuple[str, int]]:
        """What state that lies with owners is bound to."""
        return [
            (o.plan.fingerprint(), o.rank)
            for o in self._ownerships
            if o.plan.layout is not Layout.SHARDED
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, bit for bit.

        Raises:
            OwnershipError: it is no optimizer's state, or another model's or, except in the
                `sharded` layout, another rank's or another plan's; nothing is changed.
        """
        flaw = _flaw(state_dict)
        if flaw is not None:
            raise OwnershipError(f"this is not what opt.state_dict() of a dmuon.Muon gave: {flaw}")
        expected = self._owners()
        info = state_dict.get("dmuon") or {}
        found = [tuple(pair) for pair in info.get("owners", ())] or None
        if expected and found != expected:
            raise OwnershipError(
                "this optimizer state does not belong here: it has (plan, rank) "
                f"{found}, this process is {expected}. Each rank loads the state that it saved, "
                "with dedicate_params(model, plan=saved_plan)"
            )
        self.synchronize()
        groups = state_dict["param_groups"]
        # Keys are numbers, or names where torch's distributed checkpoint made them.
        keys = [key for group in groups for key in group["params"]]
        order = [p for group in self.param_groups for p in group["params"]]
        if len(keys) != len(order) or len(groups) != len(self.param_groups):
            raise OwnershipError(
                f"the optimizer state has {len(keys)} parameters in {len(groups)} groups; this "
                f"optimizer has {len(order)} in {len(self.param_groups)}"
            )
        for number, (group, (algorithm, _)) in enumerate(zip(groups, self._members)):
            if group.get("algorithm", algorithm) != algorithm:
                raise OwnershipError(
                    f"param group {number} of the optimizer state is of {group['algorithm']!r}, "
                    f"here it is of {algorithm!r}: list the groups in the order of that time"
                )
        saved = {p: state_dict["state"][k] for k, p in zip(keys, order) if k in state_dict["state"]}
        for engine in self._engines:
            engine.check_state(saved)
        # The base class casts state to the parameter's dtype; ours must come back exactly, and
        # stays where it is.
        kept = dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.state.update(kept)
        with torch.no_grad():
            for engine in self._engines:
                engine.load_state(saved)
        progress = {key: groups[0].get(name) for key, name in _PROGRESS.items()}
        if progress["step"] is not None:
            self._schedule.load(progress)
        self._note_progress()


def _flaw(given: Any) -> str | None:
    """Why this cannot be what `Muon.state_dict` gave, if so."""

    def are(kind: Any, values: Any, container: Any) -> bool:
        return isinstance(values, container) and all(isinstance(value, kind) for value in values)

    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        return f"it must be a dict with 'state' and 'param_groups', found {found}"
    entries, groups, info = given["state"], given["param_groups"], given.get("dmuon")
    if not isinstance(entries, Mapping) or not are(Mapping, list(entries.values()), list):
        return "'state' must be a dict with a dict for each parameter"
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    if any(adamw & entry.keys() and not adamw <= entry.keys() for entry in entries.values()):
        return f"what AdamW keeps of a parameter must have {sorted(adamw)}"
    if not are(Mapping, groups, (list, tuple)) or not all(
        isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        return "'param_groups' must be a list of dicts, each with a list as 'params'"
    owners = info.get("owners") if isinstance(info, Mapping) else info
    if owners is not None and not are((list, tuple), owners, (list, tuple)):
        return f"'dmuon' must tell its 'owners' as pairs of a plan and a rank, found {info!r}"
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


# ---- what users pass ---------------------------------------------------------------------

# Keys of a user's group that set AdamW's side of it, by the name they have there.
_ADAMW_KEYS = {
    "adamw_lr": "lr",
    "adamw_betas": "betas",
    "adamw_eps": "eps",
    "adamw_weight_decay": "weight_decay",
}


def _groups_of(given: Any) -> list[Group]:
    """Group dicts with lists as "params", from any of the accepted forms; a copy.

    What is in the lists is for `_tensors_of`, on all ranks alike.

    Raises:
        TypeError: ``given`` is not what an optimizer takes.
    """
    if isinstance(given, nn.Module):
        reshard(given)
        return [{"params": list(given.parameters())}]
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise TypeError(
            f"Muon takes a module or an iterable of parameters, found {type(given).__name__}"
        )
    members = list(given)
    if not members or not isinstance(members[0], dict):
        return [{"params": members}]
    groups = [dict(group) for group in members]
    for group in groups:
        params: Any = group.get("params")
        single = isinstance(params, Tensor) or not isinstance(params, Iterable)
        group["params"] = [params] if single else list(params)
    return groups


def _tensors_of(group: Group) -> list[Tensor]:
    """The parameters of a group; TypeError for what is none."""
    found = [e[1] if _is_pair(e) else e for e in group["params"]]
    for entry in found:
        if not isinstance(entry, Tensor):
            raise TypeError(
                "the 'params' of a param group are parameters or (name, parameter) pairs, found "
                f"{type(entry).__name__}"
            )
    return found


def _is_pair(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _ownerships_in(given: Any, groups: list[Group]) -> list[Ownership]:
    """The ownerships of all parameters in ``given``, each once.

    Raises:
        TypeError: there is none, and ``given`` is not what an optimizer takes.
        OwnershipError: there is none: `dedicate_params` was not called.
    """
    if isinstance(given, nn.Module):
        ownerships = ownerships_of(given)
    else:
        entries = [e[1] if _is_pair(e) else e for group in groups for e in group["params"]]
        found = [ownership_of(e) for e in entries if isinstance(e, Tensor)]
        ownerships = list(dict.fromkeys(o for o in found if o is not None))
    for ownership in ownerships:
        ownership.find_parameters()
    if not ownerships:
        for group in groups:
            _tensors_of(group)  # if it is malformed, that is the better error
        raise OwnershipError(
            "dmuon.Muon got no dedicated parameter: call own = dmuon.dedicate_params(model) "
            "before opt = dmuon.Muon(model)"
        )
    return ownerships


def _check_members(groups: list[Group], ownerships: list[Ownership]) -> None:
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


def _planned(ownerships: list[Ownership]) -> Iterator[tuple[Tensor, ParameterSpec]]:
    """Every planned parameter of these ownerships, with what is known of it."""
    for ownership in ownerships:
        yield from zip(ownership.parameters, ownership.plan.specs.parameters, strict=True)


def _split(
    groups: list[Group], ownerships: list[Ownership], muon: Group, adamw: Group
) -> list[Group]:
    """One Muon and one AdamW group for each given group that has such parameters.

    ``muon`` and ``adamw`` are the defaults. A group's own ``lr`` and ``weight_decay`` count for
    both sides, unless ``adamw_lr``/``adamw_weight_decay`` say otherwise; None in ``adamw`` means
    the same as Muon's.
    """
    algorithms = {p: spec.algorithm for p, spec in _planned(ownerships)}
    made = []
    for group in groups:
        own = {k: v for k, v in group.items() if k != "params" and k not in _ADAMW_KEYS}
        # Such as "initial_lr" or "name": kept on both sides, as torch keeps them.
        foreign = {k: v for k, v in own.items() if k not in muon and k not in adamw}
        muon_side = muon | {k: v for k, v in own.items() if k in muon}
        inherited = {k: own[k] for k in ("lr", "weight_decay") if k in own and adamw[k] is None}
        adamw_side = adamw | inherited | ({"betas": own["betas"]} if "betas" in own else {})
        adamw_side |= {_ADAMW_KEYS[k]: v for k, v in group.items() if k in _ADAMW_KEYS}
        for name in ("lr", "weight_decay"):
            if adamw_side[name] is None:
                adamw_side[name] = muon_side[name]
        for algorithm, side in ((Algorithm.MUON, muon_side), (Algorithm.ADAMW, adamw_side)):
            params = [p for p in group["params"] if algorithms.get(p) is algorithm]
            if params:
                made.append({"params": params, "algorithm": algorithm.value, **foreign, **side})
    return made


# ---- settings, checked and agreed on -----------------------------------------------------


def _schedule(
    period: Period, block_lr_ratio: float | None, ownerships: list[Ownership]
) -> Schedule:
    """The schedule of ``period``; TypeError, ValueError or OwnershipError where it cannot be."""
    schedule = Schedule(period)
    for layout in {o.plan.layout for o in ownerships} - {Layout.SHARDED}:
        if period != 1 or block_lr_ratio is not None:
            raise OwnershipError(
                f"period={period!r}, block_lr_ratio={block_lr_ratio!r}: in the {layout.value!r} "
                "layout each matrix is whole at its owner, so there is no block step; leave them "
                "at 1 and None"
            )
    return schedule


def _check_group(group: Group, number: int) -> Group:
    """The hyperparameters of param group ``number``, numbers as Python's own.

    Raises TypeError or ValueError for one of a wrong type or out of range.
    """
    place = f" in opt.param_groups[{number}]"
    if group["algorithm"] == Algorithm.ADAMW.value:
        return check_adamw_group(group, place)
    kept = check_muon_group(group, place)
    resolve_coefficients(kept["ns_coefficients"], kept["ns_steps"])
    return kept


def _check_kernels(ownership: Ownership, dtype: torch.dtype, groups: list[Group]) -> None:
    """Raise ValueError if a kernel that was asked for, or that the plan names, cannot run here."""
    options, device, plan = ownership.kernels, ownership.runtime.device, ownership.plan
    if options.cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"KernelOptions.cuda_graphs=True needs a CUDA device, found {device}: leave it None"
        )
    steps = {g["ns_steps"] for g in groups if g["algorithm"] == Algorithm.MUON.value}
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


def _describe(group: Group, planned: Mapping[Tensor, tuple[int, ...]]) -> str:
    shapes = [planned.get(p, tuple(p.shape)) for p in group["params"]]
    values = {k: v for k, v in group.items() if k != "params"}
    # Not as text: that of a tensor names its device, another one on each rank.
    values |= {k: v.tolist() for k, v in values.items() if isinstance(v, Tensor)}
    return ", ".join([f"{k}={v}" for k, v in values.items()] + [str(shapes)])


def _agreed_dtype(ownerships: list[Ownership], ns_dtype: str | torch.dtype) -> torch.dtype:
    """The NS dtype of all ranks: their common choice, or float32 where they differ.

    Updates travel in this dtype, so ranks that differ would disagree on sizes.
    """
    mine = resolve_ns_dtype(ns_dtype, ownerships[0].runtime.device)
    choices = {c for o in ownerships for c in o.runtime.transport.gather_objects(str(mine))}
    return mine if choices == {str(mine)} else torch.float32


def _warn_of_dtype(ownerships: list[Ownership], dtype: torch.dtype) -> None:
    """Say on one rank that kernels were chosen for another Newton-Schulz dtype than runs."""
    name = str(dtype).removeprefix("torch.")
    for ownership in ownerships:
        kernels = {batch.kernel for batch in ownership.plan.batches} - {""}
        others = sorted({KernelChoice.parse(kernel).dtype for kernel in kernels} - {name})
        if others and ownership.rank == 0:
            warnings.warn(
                f"dmuon: the plan's kernels were chosen for {' and '.join(others)}, and "
                f"Newton-Schulz runs in {name}: the fixed rule chooses instead. Leave ns_dtype out "
                "to use them",
                RuntimeWarning,
                stacklevel=3,
            )


def _half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Half a unit in the last place of numbers of this magnitude: what a smaller change is lost in.

    >>> _half_ulp(0.02, torch.bfloat16) == 2.0**-14, _half_ulp(1.0, torch.float16) == 2.0**-11
    (True, True)
    """
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.smallest_normal))
    return 0.5 * info.eps * math.ldexp(1.0, exponent - 1)


def _warn_of_rounding(ownerships: list[Ownership], groups: list[Group]) -> None:
    """Say on one rank that typical updates of half-precision weights are lost in rounding.

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
                lr = Rates.of(groups[key[0]]).adjusted(*matrix.shape)
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
        return
    _, update, weight, (number, dtype) = min(lost, key=lambda entry: entry[0])
    name = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"dmuon: with lr={float(groups[number]['lr']):g} a typical update of a {name} matrix is "
        f"{update:.2g}, and half a unit in the last place of its typical weight, {weight:.2g}, is "
        f"{_half_ulp(weight, dtype):.2g}: most updates are rounded away and change nothing. Pass "
        "master_weights=True, which keeps float32 weights behind the parameters, or keep the "
        "parameters in float32 and compute under torch.autocast",
        RuntimeWarning,
        stacklevel=3,
    )


def hf_factory() -> type[Muon]:
    """The factory for the `Trainer` of Hugging Face's transformers (5.2 and newer).

    ``Trainer(model, args, optimizer_cls_and_kwargs=(dmuon.hf_factory, {"lr": 1e-3}))``: it calls
    this without arguments, and what comes with the model and the dict, which so holds keyword
    arguments of `Muon`. Given the class itself, it would pass parameters without names.
    """
    return Muon
