"""Muon where owners keep the momentum: in the `replicated` and the `dedicated` layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.comm.layout import OwnerRuntime
from dmuon.comm.routes import Unit
from dmuon.comm.streams import Stopwatch
from dmuon.engine import Amp, Settings, group_of_matrices, rest_by_group
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.owner_state import OwnerState
from dmuon.ownership import Ownership
from dmuon.rest import adamw_step, refresh_masters
from dmuon.scheduler.dtensors import gradient_like, local_tensor
from dmuon.types import OwnershipError
from dmuon.update import Rates, apply_updates, momentum_update, update_rms

__all__ = ["OwnerEngine"]


class OwnerEngine:
    """See `dmuon.engine.Engine`."""

    def __init__(self, ownership: Ownership, optimizer: Optimizer, settings: Settings) -> None:
        self._ownership = ownership
        self._runtime = cast(OwnerRuntime, ownership.runtime)
        self._optimizer = optimizer
        self._settings = settings
        self._seen_loads = 0
        layout = ownership.plan.layout
        if settings.master_weights and not self._runtime.keeps_whole:
            raise OwnershipError(
                f"master_weights=True: in the {layout.value!r} layout under tensor parallelism an "
                "owner keeps a slice of a weight only. Keep the parameters in float32 and compute "
                "in bfloat16 (torch.autocast), or leave master_weights off"
            )
        self._runtime.bind(group_of_matrices(ownership, optimizer), self._payload_dtype)
        self._owned = OwnerState(ownership, settings.master_weights)
        self._rest = rest_by_group(ownership, optimizer)
        self._show_momentum()

    def _payload_dtype(self, parameter_dtype: str) -> torch.dtype:
        if self._settings.master_weights:
            dtype: torch.dtype = getattr(torch, parameter_dtype)
            return dtype
        return self._settings.ns_dtype

    def _show_momentum(self) -> None:
        for p, entry in self._owned.momentum_entries():
            self._optimizer.state[p]["momentum_buffer"] = entry

    # ---- a step --------------------------------------------------------------------------

    def begin(self, amp: Amp) -> None:
        if amp.found_inf is not None:
            raise OwnershipError(
                f"GradScaler does not work in the {self._ownership.plan.layout.value!r} layout: it "
                "cannot see the gradients that owners hold. Train in bfloat16, or call opt.step() "
                "without a scaler"
            )
        self._runtime.reduce_gradients()
        if self._settings.master_weights and self._runtime.loads != self._seen_loads:
            self._seen_loads = self._runtime.loads
            self._owned.refresh_masters()
            for params in self._rest.values():
                refresh_masters(self._optimizer.state, params)

    def launch(self) -> None:
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        rates = [Rates.of(group) for group in self._optimizer.param_groups]
        watch = self._ownership.telemetry.begin_step()

        def compute(unit: Unit, grads: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
            return self._compute(watch, rates[unit.group], unit, grads, where)

        def apply(
            unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
        ) -> None:
            if self._settings.master_weights:
                torch._foreach_copy_(targets, payload)
                return
            rate = rates[unit.group]
            lr = rate.adjusted(unit.rows, unit.cols)
            apply_updates(targets, payload, decay=rate.decay, lr=lr)

        self._runtime.step(compute, apply)

    def _compute(
        self, watch: Stopwatch, rate: Rates, unit: Unit, grads: Tensor, where: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The owner's part: momentum, Newton-Schulz, and what to publish."""
        group = self._optimizer.param_groups[unit.group]
        watch.start()
        with self._owned.rows(unit, where) as (buffer, master):
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
                dtype=self._settings.ns_dtype,
                eps=group["eps"],
            )
            watch.stop()
            lr = rate.adjusted(unit.rows, unit.cols)
            rms = update_rms(update, lr / rate.lr if rate.lr else 0.0)
            if master is None:
                return update, rms
            master.mul_(rate.decay).add_(update, alpha=-lr)
            return master, rms

    def rest(self) -> None:
        for g, params in self._rest.items():
            with_grad = [p for p in params if p.grad is not None]
            grads = [
                local_tensor(gradient_like(p.grad, p)) for p in with_grad if p.grad is not None
            ]
            adamw_step(
                self._optimizer.param_groups[g],
                self._optimizer.state,
                with_grad,
                grads,
                master_weights=self._settings.master_weights,
            )

    def finish(self) -> None:
        self._ownership.telemetry.finish_step()

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        rms = {name: float(value) for name, value in self._runtime.update_rms().items()}
        return {"update_rms": rms}

    def before_state_dict(self) -> None:
        for p, entry in self._owned.master_entries():
            self._optimizer.state[p]["master_weight"] = entry

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._owned.check(saved)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._owned.load(saved)
        self._show_momentum()
        for params in self._rest.values():
            for p in params:
                self._optimizer.state.pop(p, None)
                if "exp_avg" in saved.get(p, {}):
                    self._optimizer.state[p] = {
                        k: v.detach().clone().to("cpu" if k == "step" else p.device)
                        for k, v in saved[p].items()
                    }
