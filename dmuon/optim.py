"""`Muon`: one `torch.optim.Optimizer` over matrices (Muon) and the rest (AdamW)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon.comm.routes import Unit
from dmuon.comm.streams import Stopwatch
from dmuon.config import (
    AdamWDefaults,
    MuonDefaults,
)
from dmuon.groups import (
    check_groups,
    collected,
    input_groups,
    ownerships_in,
    planned_names,
    split_groups,
)
from dmuon.kernels.newton_schulz import newton_schulz, resolve_ns_dtype
from dmuon.owner_state import OwnerState
from dmuon.ownership import Ownership
from dmuon.rest import adamw_step, refresh_masters
from dmuon.scheduler.report import LoadBalanceReport
from dmuon.settings import agreed_dtype, check_group, check_switches, fields, together
from dmuon.types import Algorithm, Coefficients, OwnershipError
from dmuon.update import Rates, apply_updates, momentum_update, update_rms

__all__ = ["Muon"]

_STATE_FORMAT = 1


class Muon(Optimizer):
    """Muon on the matrices of a dedicated model, AdamW on everything else.

    ``lr`` to ``adjust_lr_fn`` mean what they mean in `torch.optim.Muon`; two defaults differ:
    Polar Express coefficients, and "match_rms_adamw", so that an AdamW learning rate carries over.

    One `step`, on every rank::

        gradients   whatever has not been reduced yet is; owners add up what arrived
        owners      momentum and Newton-Schulz, batch by batch; each result leaves at once
        everyone    AdamW on the rest, while results travel
        later       before a block's next forward its matrices' updates are applied
                    (publish="sync": before `step` returns)

    Reading weights through `state_dict`, a forward pass or after `synchronize` sees published
    values. `step` consumes the matrices' gradients; use ``opt.zero_grad()`` (not
    ``model.zero_grad()``) to drop gradients without a step.

    Args:
        model_or_params: a dedicated module, or its parameters as frameworks pass them: tensors,
            (name, tensor) pairs, or group dicts with hyperparameters of their own.
        momentum_mode: "ema" (as `torch.optim.Muon`) or "sgd" (with ``dampening``).
        period: 1; other periods belong to the `sharded` layout.
        ns_dtype: dtype of the Newton-Schulz iteration and of published updates; "auto" is float16
            on CUDA, bfloat16 on a CPU that has it, float32 otherwise or where ranks differ.
        publish: "async" returns from `step` while updates travel; "sync" waits.
        master_weights: keep float32 weights behind lower-precision parameters.
        adamw_lr, adamw_weight_decay: None means the same as Muon's.

    Raises:
        ValueError: a hyperparameter is out of range, or the parameters do not fit the ownership;
            on every rank.
    """

    # Makes `torch.amp.GradScaler` tell `step` about itself, so that it can be refused.
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
        period: int = 1,
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
        given = collected(model_or_params)
        self._ownerships = ownerships_in(given)
        self._sealed = False

        def prepare() -> list[dict[str, Any]]:
            groups = input_groups(given)
            check_switches(period, block_lr_ratio, publish)
            resolve_ns_dtype(ns_dtype, self._ownerships[0].parameters[0].device)
            check_groups(groups, self._ownerships, planned_names(self._ownerships))
            made = split_groups(groups, self._ownerships, fields(muon), fields(rest))
            for group in made:
                check_group(group)
            return made

        split = together(self._ownerships, prepare, f"master_weights={master_weights}")
        super().__init__(split, fields(muon))
        self._sealed = True
        self._publish = publish
        self._master_weights = master_weights
        self._steps = 0
        self._seen_loads = 0
        self._ns_dtype = agreed_dtype(self._ownerships, ns_dtype)
        self._bytes: dict[str, int] = {}
        self._owner_states = [self._bind(o) for o in self._ownerships]

    # ---- construction --------------------------------------------------------------------

    def _bind(self, ownership: Ownership) -> OwnerState:
        """Tell the ownership's runtime our groups, and make the state of what is owned here."""
        group_of = {p: g for g, group in enumerate(self.param_groups) for p in group["params"]}
        groups = [
            group_of[ownership.parameters[m.parameter]] for m in ownership.plan.specs.matrices
        ]
        ownership.runtime.bind(groups, self._payload_dtype)
        state = OwnerState(ownership, self._master_weights)
        for p, entry in state.momentum_entries():
            self.state[p]["momentum_buffer"] = entry
        return state

    def _payload_dtype(self, parameter_dtype: str) -> torch.dtype:
        return getattr(torch, parameter_dtype) if self._master_weights else self._ns_dtype

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
        """Update all parameters that have a gradient on any rank. A collective call."""
        if hasattr(self, "found_inf"):
            raise OwnershipError(
                "GradScaler does not work with dmuon.Muon: it cannot see the gradients that owners "
                "hold. Train in bfloat16, or call opt.step() without a scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for ownership in self._ownerships:
            ownership.runtime.reduce_gradients()
        if self._master_weights:
            self._refresh_masters()
        for ownership, state in zip(self._ownerships, self._owner_states, strict=True):
            self._launch(ownership, state)
        for group in self.param_groups:
            if group["algorithm"] == Algorithm.ADAMW.value:
                adamw_step(group, self.state, master_weights=self._master_weights)
        # Here, for all ranks have the same collectives behind them.
        for ownership in self._ownerships:
            ownership.telemetry.finish_step()
        if self._publish == "sync":
            self.synchronize()
        self._steps += 1
        self._bytes = self._read_meters()
        return loss

    def _refresh_masters(self) -> None:
        loads = sum(o.runtime.loads for o in self._ownerships)
        if loads == self._seen_loads:
            return
        self._seen_loads = loads
        for state in self._owner_states:
            state.refresh_masters()
        for group in self.param_groups:
            if group["algorithm"] == Algorithm.ADAMW.value:
                refresh_masters(self.state, group["params"])

    def _launch(self, ownership: Ownership, state: OwnerState) -> None:
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        rates = [Rates.of(group) for group in self.param_groups]
        watch = ownership.telemetry.begin_step()

        def compute(unit: Unit, grads: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
            return self._compute(state, watch, rates[unit.group], unit, grads, where)

        def apply(
            unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
        ) -> None:
            if self._master_weights:
                torch._foreach_copy_(targets, payload)
                return
            rate = rates[unit.group]
            lr = rate.adjusted(unit.rows, unit.cols)
            apply_updates(targets, payload, decay=rate.decay, lr=lr)

        ownership.runtime.step(compute, apply)

    def _compute(
        self,
        state: OwnerState,
        watch: Stopwatch,
        rate: Rates,
        unit: Unit,
        grads: Tensor,
        where: list[int],
    ) -> tuple[Tensor, Tensor]:
        """The owner's part: momentum, Newton-Schulz, and what to publish."""
        group = self.param_groups[unit.group]
        watch.start()
        with state.rows(unit, where) as (buffer, master):
            operand = momentum_update(
                buffer,
                grads.to(buffer.dtype),
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                mode=group["momentum_mode"],
                dampening=group["dampening"],
            )
            update = newton_schulz(
                operand,
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                dtype=self._ns_dtype,
                eps=group["eps"],
            )
            watch.stop()
            lr = rate.adjusted(unit.rows, unit.cols)
            rms = update_rms(update, lr / rate.lr if rate.lr else 0.0)
            if master is None:
                return update, rms
            master.mul_(rate.decay).add_(update, alpha=-lr)
            return master, rms

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
        """What the last step did, without any collective.

        ``update_rms``: name -> RMS of the matrix's update over the learning rate, on every rank.
        ``ns_ms``: milliseconds of momentum and Newton-Schulz on this rank. ``bytes``: what this
        rank handed to collectives since the step before, by purpose. Waits for pending updates.
        """
        rms: dict[str, float] = {}
        for ownership in self._ownerships:
            rms.update((n, float(v)) for n, v in ownership.runtime.update_rms().items())
        return {
            "steps": self._steps,
            "ns_dtype": str(self._ns_dtype).removeprefix("torch."),
            "ns_ms": sum(o.telemetry.watch.milliseconds() for o in self._ownerships),
            "update_rms": rms,
            "bytes": dict(self._bytes),
        }

    def _read_meters(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for ownership in self._ownerships:
            for tag, count in ownership.runtime.meter.reset().items():
                total[tag] = total.get(tag, 0) + count
        return total

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the momentum it owns, and AdamW's.

        Each rank must save its own. It is bound to the plan and to the rank, and
        `load_state_dict` refuses any other.
        """
        self.synchronize()
        for state in self._owner_states:
            for p, entry in state.master_entries():
                self.state[p]["master_weight"] = entry
        data = super().state_dict()
        data["dmuon"] = {
            "format": _STATE_FORMAT,
            "steps": self._steps,
            "owners": [(o.plan.fingerprint(), o.rank) for o in self._ownerships],
        }
        return data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave on this rank under the same plan, bit for bit.

        Raises:
            OwnershipError: it is another rank's or another plan's state; nothing is changed.
        """
        expected = [(o.plan.fingerprint(), o.rank) for o in self._ownerships]
        info = state_dict.get("dmuon")
        found = None if info is None else [tuple(pair) for pair in info["owners"]]
        if found != expected:
            raise OwnershipError(
                "this optimizer state does not belong here: it has (plan, rank) "
                f"{found}, this process is {expected}. Each rank loads the state that it saved, "
                "with dedicate_params(model, plan=saved_plan)"
            )
        self.synchronize()
        order = [p for group in self.param_groups for p in group["params"]]
        saved = {order[int(i)]: entry for i, entry in state_dict["state"].items()}
        for ownership_state in self._owner_states:
            ownership_state.check(saved)
        # The base class casts state to the parameter's dtype; ours must come back exactly.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for ownership_state in self._owner_states:
            ownership_state.load(saved)
            for p, entry in ownership_state.momentum_entries():
                self.state[p]["momentum_buffer"] = entry
        for p, entry in saved.items():
            if "exp_avg" in entry:
                self.state[p] = {
                    k: v.detach().clone().to("cpu" if k == "step" else p.device)
                    for k, v in entry.items()
                }
        self._steps = info["steps"]  # type: ignore[index]
