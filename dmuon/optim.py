"""`Muon`: one `torch.optim.Optimizer` over matrices (Muon) and the rest (AdamW)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dmuon.comm.owners import OwnerRuntime
from dmuon.comm.sharded import ShardedRuntime
from dmuon.config import AdamWDefaults, MuonDefaults
from dmuon.groups import (
    check_groups,
    collected,
    input_groups,
    ownerships_in,
    planned_names,
    split_groups,
)
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.meshes import check_launched, check_planned_together
from dmuon.ownership import Ownership
from dmuon.period import Period, Schedule
from dmuon.report.data import LoadBalanceReport
from dmuon.settings import (
    agreed_dtype,
    check_defaults,
    check_group,
    check_kernels,
    check_switches,
    fields,
    together,
    warn_of_dtype,
    warn_of_rounding,
)
from dmuon.step.engine import Amp, Engine, Settings
from dmuon.step.owner import OwnerEngine
from dmuon.step.sharded import ShardedEngine
from dmuon.types import Coefficients, Layout, OwnershipError

__all__ = ["Muon"]

_STATE_FORMAT = 1
# Kept in every param group, so that tools which save groups alone (torch's distributed checkpoint)
# save where the optimizer is in its schedule.
_PROGRESS = {"step": "muon_step", "last_full": "muon_last_full", "period": "muon_period"}


class Muon(Optimizer):
    """Muon on the matrices of a dedicated model, AdamW on everything else.

    ``lr`` to ``adjust_lr_fn`` mean what they mean in `torch.optim.Muon`; two defaults differ:
    Polar Express coefficients, and "match_rms_adamw", so that an AdamW learning rate carries over.

    One `step`, on every rank::

        gradients   are where they belong: with their shards, or (replicated, dedicated) with owners
        owners      Newton-Schulz, batch by batch; each result leaves at once
        everyone    AdamW on the rest, while matrices travel
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
        adamw_lr, adamw_weight_decay: None means the same as Muon's.

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
        adjust_lr_fn: str | None = "match_rms_adamw",
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
        rest = AdamWDefaults(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        check_launched("dmuon.Muon")
        given = collected(model_or_params)
        self._ownerships = ownerships_in(given)
        check_planned_together([o.runtime.transport for o in self._ownerships])
        self._sealed = False

        layouts = {o.plan.layout for o in self._ownerships}
        schedule = Schedule(1)

        def prepare() -> list[dict[str, Any]]:
            nonlocal schedule
            groups = input_groups(given)
            check_defaults(muon, rest)
            schedule = check_switches(period, block_lr_ratio, publish, master_weights, layouts)
            mine = resolve_ns_dtype(ns_dtype, self._ownerships[0].runtime.device)
            check_groups(groups, self._ownerships, planned_names(self._ownerships))
            made = split_groups(groups, self._ownerships, fields(muon), fields(rest))
            for number, group in enumerate(made):
                group.update(check_group(group, number))
            for ownership in self._ownerships:
                check_kernels(ownership, mine, made)
            return made

        def switches() -> str:
            return f"{master_weights=}, period={schedule.describe()}, {block_lr_ratio=}"

        split = together(self._ownerships, prepare, switches)
        super().__init__(split, fields(muon))
        self._sealed = True
        self._publish = publish
        self._schedule = schedule
        self._note_progress()
        dtype = agreed_dtype(self._ownerships, ns_dtype)
        warn_of_dtype(self._ownerships, dtype)
        self._settings = Settings(dtype, master_weights, schedule, block_lr_ratio)
        self._bytes: dict[str, int] = {}
        self._engines = [_engine(o, self, self._settings) for o in self._ownerships]
        if not master_weights:
            warn_of_rounding(self._ownerships, self.param_groups)

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
                now, or a parameter is not what was planned; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Before anything travels, for a scheduler or a user may have set something else.
        kept = [check_group(group, number) for number, group in enumerate(self.param_groups)]
        for group, numbers in zip(self.param_groups, kept, strict=True):
            group.update(numbers)
        # Set by `torch.amp.GradScaler` around the call.
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for engine in self._engines:
            engine.begin(amp)
        for engine in self._engines:
            engine.launch()
        for engine in self._engines:
            engine.rest()
        for engine in self._engines:
            engine.finish()
        self._schedule.advance()
        self._note_progress()
        if self._publish == "sync":
            self.synchronize()
        self._bytes = self._read_meters()
        return loss

    def _note_progress(self) -> None:
        progress = self._schedule.state()
        for group in self.param_groups:
            for key, name in _PROGRESS.items():
                group[name] = progress[key]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those that owners hold apart from ``p.grad`` included."""
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
        ``kernels``: which kernels
        Newton-Schulz ran on this rank, by the shapes that ran together (``ran``, such as
        ``gram[2]/torch_strips/float32``), the ``workspace_bytes`` they keep, and the state of
        ``cuda_graphs``. In the `sharded` layout also ``full_step`` (or a block step),
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
            OwnershipError: it is another model's state or, except in the `sharded` layout, another
                rank's or another plan's; nothing is changed.
        """
        expected = self._owners()
        info = state_dict.get("dmuon")
        found = None if info is None else [tuple(pair) for pair in info["owners"]]
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
        both = (one["ran"], other["ran"])
        return {
            "ran": {
                shapes: " and ".join(dict.fromkeys(ran[shapes] for ran in both if shapes in ran))
                for shapes in both[0] | both[1]
            },
            "workspace_bytes": one["workspace_bytes"] + other["workspace_bytes"],
            "cuda_graphs": " and ".join(dict.fromkeys([one["cuda_graphs"], other["cuda_graphs"]])),
        }
    return max(one, other)
