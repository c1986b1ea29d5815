"""Muon where owners keep the momentum: in the `replicated` and the `dedicated` layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import adamw_step, refresh_masters
from dmuon.comm import streams
from dmuon.comm.layout import Done, Job, OwnerRuntime
from dmuon.comm.routes import Unit
from dmuon.comm.streams import Stopwatch
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.operand import apply_all, is_fused, normalized_momentum
from dmuon.ownership import Ownership
from dmuon.step.engine import Amp, Settings, adamw_parameters, group_of_matrices
from dmuon.step.owner_state import OwnerState
from dmuon.types import OwnershipError
from dmuon.update import Rates, update_rms

__all__ = ["OwnerEngine"]


class OwnerEngine:
    """See `dmuon.step.engine.Engine`."""

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
        groups = group_of_matrices(ownership.parameters, ownership.plan.specs, optimizer)
        self._runtime.bind(groups, self._payload_dtype)
        self._owned = OwnerState(ownership, settings.master_weights)
        self._rest = adamw_parameters(ownership.parameters, optimizer)
        self._kernels = Orthogonalizer(self._runtime.device, settings.ns_dtype, ownership.kernels)
        mine = [u for u in self._runtime.units if u.owner == ownership.rank]
        self._kernels.reserve(self._call(u, len(u.matrices)) for u in mine)
        self._show_momentum()

    def _call(self, unit: Unit, count: int) -> Call:
        """Newton-Schulz on so many matrices of a unit."""
        group = self._optimizer.param_groups[unit.group]
        return Call(
            (count, unit.rows, unit.cols),
            resolve_coefficients(group["ns_coefficients"], group["ns_steps"]),
            unit.kernel,
        )

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

        def compute(jobs: Sequence[Job], done: Done) -> None:
            for number, job in enumerate(jobs):
                self._compute(watch, rates[job.unit.group], number, job, done)

        def apply(
            unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
        ) -> None:
            if self._settings.master_weights:
                torch._foreach_copy_(targets, payload)
                return
            rate = rates[unit.group]
            lr = rate.adjusted(unit.rows, unit.cols)
            fused = is_fused(unit.kernel, targets[0])
            apply_all(targets, payload, decay=rate.decay, lr=lr, fused=fused)

        self._runtime.step(compute, apply)

    def _compute(self, watch: Stopwatch, rate: Rates, number: int, job: Job, done: Done) -> None:
        """The owner's part of a job: momentum, Newton-Schulz, what to publish."""
        unit = job.unit
        call = self._call(unit, len(job.where))
        watch.start()
        operand = self._kernels.operand(call)
        fused = self._kernels.is_fused(call)
        group = self._optimizer.param_groups[unit.group]
        with self._owned.rows(unit, job.where) as (buffer, master):
            normalized_momentum(buffer, job.gradients, group, out=operand, fused=fused)
            update = orthogonalize(self._kernels, call, operand)
            watch.stop()
            lr = rate.adjusted(unit.rows, unit.cols)
            rms = update_rms(update, lr / rate.lr if rate.lr else 0.0)
            if master is None:
                done(number, update, rms)
            else:
                master.mul_(rate.decay).add_(update, alpha=-lr)
                done(number, master, rms)

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
                fused=not streams.host_can_read(self._runtime.device),
            )

    def finish(self) -> None:
        self._ownership.telemetry.finish_step()

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        rms = {name: float(value) for name, value in self._runtime.update_rms().items()}
        return {"update_rms": rms, "kernels": self._kernels.report()}

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
                        k: v.detach().clone().to(p.device) for k, v in saved[p].items()
                    }
