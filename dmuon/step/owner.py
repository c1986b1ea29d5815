"""Muon where owners keep the momentum: in the `replicated` and the `dedicated` layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import adamw_step, refresh_masters
from dmuon.comm.owners import OwnerRuntime
from dmuon.comm.reducer import oriented, rows_of, set_rows, unstacker
from dmuon.comm.transport import host_can_read
from dmuon.config import KernelOptions
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.scheduler.plan import Unit
from dmuon.step.engine import Amp, Settings, StepTelemetry, adamw_parameters, group_of_matrices
from dmuon.types import OwnershipError
from dmuon.update import (
    Rates,
    apply_all,
    is_fused,
    merged_master,
    normalized_momentum,
    update_rms,
)

__all__ = ["OwnerEngine"]


class _OwnerState:
    """Momentum stacked per owned unit, ``[b, m, n]``, made eagerly.

    With ``with_masters`` both are float32; masters are made from the weights at the first step,
    so that weights loaded before it count. Stacks are found by their unit's first matrix.
    """

    def __init__(self, runtime: OwnerRuntime, with_masters: bool) -> None:
        self._runtime = runtime
        self._specs = runtime.plan.specs
        self._with_masters = with_masters
        self._units = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._momentum: dict[int, Tensor] = {}
        self._masters: dict[int, Tensor] = {}
        for unit in self._units:
            weight = runtime.parameters[self._specs.matrices[unit.matrices[0]].parameter]
            dtype = torch.float32 if with_masters else weight.dtype
            self._momentum[unit.matrices[0]] = torch.zeros(
                unit.shape, dtype=dtype, device=runtime.device
            )

    def of(self, unit: Unit) -> list[Tensor]:
        """The momentum of a unit and, where they are kept, its masters."""
        key = unit.matrices[0]
        if not self._with_masters:
            return [self._momentum[key]]
        if key not in self._masters:
            self._masters[key] = torch.empty(unit.shape, device=self._runtime.device)
            for slot, weight in self._slots(unit):
                slot.copy_(weight)
        return [self._momentum[key], self._masters[key]]

    def refresh_masters(self) -> None:
        """Take over weights that were loaded into the model since the masters were made."""
        for unit in self._units:
            if unit.matrices[0] in self._masters:
                for slot, weight in self._slots(unit):
                    slot.copy_(merged_master(slot, weight))

    def _slots(self, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
        """Where each master of a unit is kept, and the weight."""
        masters = oriented(unit, self._masters[unit.matrices[0]])
        for slot, weight in zip(masters, self._runtime.weights(unit), strict=True):
            yield slot, weight.reshape(slot.shape)

    def views(self, key: str) -> Iterator[tuple[Tensor, str | None, Tensor]]:
        """Of "momentum_buffer" or "master_weight", for ``optimizer.state``: (parameter, the name of
        its matrix, or None where that is all of it, a view)."""
        stacks = self._momentum if key == "momentum_buffer" else self._masters
        for unit in self._units:
            stack = stacks.get(unit.matrices[0])
            if stack is None:
                continue
            whole = unstacker(self._specs, unit)(stack)
            for i, matrix, view in zip(unit.matrices, oriented(unit, stack), whole, strict=True):
                spec = self._specs.matrices[i]
                p = self._runtime.parameters[spec.parameter]
                if spec.numel == self._specs.parameters[spec.parameter].numel:
                    yield p, None, view
                else:
                    yield p, spec.name, matrix

    def check(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise OwnershipError if an owned matrix has no momentum among the saved entries."""
        for p, name, _ in self.views("momentum_buffer"):
            source = saved.get(p, {}).get("momentum_buffer")
            if source is None or (name is not None and name not in source):
                raise OwnershipError(
                    "the optimizer state has no momentum for an owned parameter of shape "
                    f"{tuple(p.shape)}: it was saved by another rank or another plan"
                )

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy momentum and masters from saved entries of the same form (see `check`)."""
        self._masters.clear()
        keys = ["momentum_buffer"]
        if self._with_masters and any(
            "master_weight" in e for e in saved.values() if "momentum_buffer" in e
        ):
            for unit in self._units:
                self.of(unit)
            keys.append("master_weight")
        for key in keys:
            for p, name, view in self.views(key):
                source = saved[p].get(key)
                if source is not None:  # else a master that its weight had not needed yet
                    view.copy_(source if name is None else source[name])


def _by_rate(rate: Rates, unit: Unit, where: list[int]) -> list[tuple[float, Sequence[int]]]:
    """The adjusted learning rates of matrices at positions of a unit: (rate, numbers in ``where``).

    A matrix's own rows and columns count, whichever way its slot holds it.
    """
    plain = rate.adjusted(unit.rows, unit.cols), rate.adjusted(unit.cols, unit.rows)
    if not unit.transposed or plain[0] == plain[1]:
        return [(plain[0], range(len(where)))]
    turned = [unit.holds_transpose(k) for k in where]
    split = [[n for n, is_turned in enumerate(turned) if is_turned == t] for t in (False, True)]
    return [(lr, at) for lr, at in zip(plain, split, strict=True) if at]


class OwnerEngine:
    """See `dmuon.step.engine.Engine`."""

    def __init__(
        self,
        runtime: OwnerRuntime,
        telemetry: StepTelemetry,
        kernels: KernelOptions,
        optimizer: Optimizer,
        settings: Settings,
    ) -> None:
        self._telemetry = telemetry
        self._runtime = runtime
        self._optimizer = optimizer
        self._settings = settings
        self._seen_loads = 0
        self._layout = runtime.plan.layout.value
        if settings.master_weights and not self._runtime.keeps_whole:
            raise OwnershipError(
                f"master_weights=True: in the {self._layout!r} layout under tensor parallelism an "
                "owner keeps a slice of a weight only. Keep the parameters in float32 and compute "
                "in bfloat16 (torch.autocast), or leave master_weights off"
            )
        groups = group_of_matrices(runtime.parameters, runtime.plan.specs, optimizer)
        self._runtime.bind(groups, self._payload_dtype)
        self._state = _OwnerState(self._runtime, settings.master_weights)
        self._rest = adamw_parameters(runtime.parameters, optimizer)
        self._kernels = Orthogonalizer(self._runtime.device, settings.ns_dtype, kernels)
        mine = [u for u in self._runtime.units if u.owner == self._runtime.transport.rank]
        self._kernels.reserve(self._call(unit, len(unit.matrices)) for unit in mine)
        self._show("momentum_buffer")

    def _call(self, unit: Unit, count: int) -> Call:
        """Newton-Schulz on ``count`` matrices of ``unit``."""
        group = self._optimizer.param_groups[unit.group]
        coefficients = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        return Call((count, unit.rows, unit.cols), coefficients, unit.kernel)

    def _payload_dtype(self, parameter_dtype: str) -> torch.dtype:
        if self._settings.master_weights:
            dtype: torch.dtype = getattr(torch, parameter_dtype)
            return dtype
        return self._settings.ns_dtype

    def _show(self, key: str) -> None:
        """Have the optimizer's state refer to what is kept: a tensor, or one a matrix by name."""
        for p, name, view in self._state.views(key):
            state = self._optimizer.state[p]
            if name is None:
                state[key] = view
            else:
                state.setdefault(key, {})[name] = view

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, amp: Amp) -> None:
        if amp.found_inf is not None:
            raise OwnershipError(
                f"GradScaler does not work in the {self._layout!r} layout: it cannot see the "
                "gradients that owners hold. Train in bfloat16, or call opt.step() without a scaler"
            )
        self._runtime.reduce_gradients()
        if self._settings.master_weights and self._runtime.loads != self._seen_loads:
            self._seen_loads = self._runtime.loads
            self._state.refresh_masters()
            for params in self._rest.values():
                refresh_masters(self._optimizer.state, params)

    def launch(self) -> None:
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        rates = [Rates.of(group) for group in self._optimizer.param_groups]
        watch = self._telemetry.begin_step()

        def compute(unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
            """Momentum, Newton-Schulz, and the new masters where there are some."""
            call, rate = self._call(unit, len(where)), rates[unit.group]
            group = self._optimizer.param_groups[unit.group]
            kept = self._state.of(unit)
            watch.start()
            rows = [rows_of(stack, where) for stack in kept]
            operand = self._kernels.operand(call)
            fused = self._kernels.is_fused(call)
            normalized_momentum(rows[0], gradients, group, out=operand, fused=fused)
            payload = self._kernels.run(call, operand)
            watch.stop()
            steps = _by_rate(rate, unit, where)
            rms = update_rms(payload, steps[0][0] / rate.lr if rate.lr else 0.0)
            for lr, at in steps[1:]:
                torch._foreach_mul_([rms[n] for n in at], lr / steps[0][0] if rate.lr else 0.0)
            if self._settings.master_weights:
                update, payload = payload, rows[1].mul_(rate.decay)
                for lr, at in steps:
                    if len(steps) == 1:
                        payload.add_(update, alpha=-lr)
                    else:
                        some, updates = [payload[n] for n in at], [update[n] for n in at]
                        torch._foreach_add_(some, updates, alpha=-lr)
            for whole, part in zip(kept, rows, strict=True):
                if part is not whole:
                    set_rows(whole, where, part)
            return payload, rms

        def apply(
            unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
        ) -> None:
            if self._settings.master_weights:
                torch._foreach_copy_(targets, payload)
                return
            rate, fused = rates[unit.group], is_fused(unit.kernel, targets[0])
            for lr, at in _by_rate(rate, unit, where):
                some = targets if len(at) == len(targets) else [targets[n] for n in at]
                updates = payload if len(at) == len(payload) else [payload[n] for n in at]
                apply_all(some, updates, decay=rate.decay, lr=lr, fused=fused)

        self._runtime.step(compute, apply)

    def update_others(self) -> None:
        for g, params in self._rest.items():
            found = [(p, gradient_like(p.grad, p)) for p in params if p.grad is not None]
            adamw_step(
                self._optimizer.param_groups[g],
                self._optimizer.state,
                [p for p, _ in found],
                [local_tensor(grad) for _, grad in found],
                master_weights=self._settings.master_weights,
                fused=not host_can_read(self._runtime.device),
            )

    def finish(self) -> None:
        self._telemetry.finish_step()

    # ---- reading and state -------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        rms = {name: float(value) for name, value in self._runtime.update_rms().items()}
        return {"update_rms": rms, "kernels": self._kernels.report()}

    def before_state_dict(self) -> None:
        self._show("master_weight")

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.check(saved)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.load(saved)
        self._show("momentum_buffer")
        for p in (p for params in self._rest.values() for p in params):
            self._optimizer.state.pop(p, None)
            if "exp_avg" in saved.get(p, {}):
                self._optimizer.state[p] = {
                    k: v.detach().clone().to(p.device) for k, v in saved[p].items()
                }
