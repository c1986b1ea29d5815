"""Muon where owners keep the momentum: in the `replicated` and the `dedicated` layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.adamw import adamw_step
from dmuon.comm.layout import OwnerRuntime
from dmuon.comm.reducer import oriented, rows_of, set_rows, unstacker
from dmuon.comm.transport import host_can_read
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.scheduler.plan import Unit
from dmuon.step.engine import Amp, Engine
from dmuon.types import OwnershipError
from dmuon.update import (
    Rates,
    apply_updates,
    is_fused,
    merged_master,
    normalized_momentum,
    scale_all,
    update_rms,
)

_MOMENTUM, _MASTER = "momentum_buffer", "master_weight"


class _OwnerState:
    """Momentum stacked per owned unit, ``[b, m, n]``, made eagerly.

    With ``with_masters`` both are float32; masters are made from the weights at the first step,
    so that weights loaded before it count. ``stacks`` are by name and by their unit's first matrix.
    """

    def __init__(self, runtime: OwnerRuntime, with_masters: bool) -> None:
        self._runtime = runtime
        self._specs = runtime.plan.specs
        self._with_masters = with_masters
        self._units = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._stacks: dict[str, dict[int, Tensor]] = {_MOMENTUM: {}, _MASTER: {}}
        for unit in self._units:
            weight = runtime.parameters[self._specs.matrices[unit.matrices[0]].parameter]
            self._stacks[_MOMENTUM][unit.matrices[0]] = torch.zeros(
                unit.shape,
                dtype=torch.float32 if with_masters else weight.dtype,
                device=runtime.device,
            )

    def of(self, unit: Unit) -> list[Tensor]:
        """The momentum of a unit and, where they are kept, its masters."""
        key, masters = unit.matrices[0], self._stacks[_MASTER]
        if not self._with_masters:
            return [self._stacks[_MOMENTUM][key]]
        if key not in masters:
            masters[key] = torch.empty(unit.shape, device=self._runtime.device)
            for slot, weight in self._slots(unit):
                slot.copy_(weight)
        return [self._stacks[_MOMENTUM][key], masters[key]]

    def refresh_masters(self) -> None:
        """Take over weights that were loaded into the model since the masters were made."""
        for unit in self._units:
            if unit.matrices[0] in self._stacks[_MASTER]:
                for slot, weight in self._slots(unit):
                    slot.copy_(merged_master(slot, weight))

    def _slots(self, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
        """Where each master of a unit is kept, and the weight."""
        masters = oriented(unit, self._stacks[_MASTER][unit.matrices[0]])
        for slot, weight in zip(masters, self._runtime.weights(unit), strict=True):
            yield slot, weight.reshape(slot.shape)

    def views(self, key: str) -> Iterator[tuple[Tensor, str | None, Tensor]]:
        """Of "momentum_buffer" or "master_weight", for ``optimizer.state``: (parameter, the name of
        its matrix, or None where that is all of it, a view)."""
        for unit in self._units:
            stack = self._stacks[key].get(unit.matrices[0])
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
        for p, name, view in self.views(_MOMENTUM):
            source = saved.get(p, {}).get(_MOMENTUM)
            if name is not None:
                source = source.get(name) if isinstance(source, Mapping) else None
            if not isinstance(source, Tensor) or source.shape != view.shape:
                raise OwnershipError(
                    "the optimizer state has no momentum for an owned parameter of shape "
                    f"{tuple(p.shape)}: it was saved by another rank or another plan"
                )

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy momentum and masters from saved entries of the same form (see `check`)."""
        self._stacks[_MASTER].clear()
        if any(_MASTER in entry for entry in saved.values() if _MOMENTUM in entry):
            for unit in self._units:
                self.of(unit)
        for key in self._stacks:
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


def _some(stack: Tensor, at: Sequence[int]) -> list[Tensor]:
    """These matrices of a stack; all of them as one tensor."""
    return [stack] if len(at) == len(stack) else [stack[n] for n in at]


class OwnerEngine(Engine):
    """The engine of `OwnerRuntime`."""

    _runtime: OwnerRuntime

    def _bind(self) -> None:
        runtime, masters = self._runtime, self._settings.master_weights
        self._name = runtime.plan.layout.value
        if masters and not runtime.keeps_whole:
            raise OwnershipError(
                f"master_weights=True: in the {self._name!r} layout under tensor parallelism an "
                "owner keeps a slice of a weight only. Keep the parameters in float32 and compute "
                "in bfloat16 (torch.autocast), or leave master_weights off"
            )
        runtime.bind(self._group_of, self._payload_dtype)
        self._state = _OwnerState(runtime, masters)
        mine = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._kernels.reserve(map(self._call, mine))
        self._show(_MOMENTUM)
        # Weakly, because the runtime outlives the optimizer.
        weak = weakref.WeakMethod(self._refuses)

        def refuses() -> bool:
            check = weak()
            return check is not None and check()

        assert runtime.reducer is not None
        runtime.reducer.refuses = refuses

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

    def _refuses(self) -> bool:
        """Whether param groups are wrong, at the end of a backward: what stands there then is told
        to the other ranks, what is changed before `step` is known here alone."""
        rates = [group.get("lr") for group in self._groups]
        if any(isinstance(lr, Tensor) and not host_can_read(lr.device) for lr in rates):
            return False  # reading it would wait for the device
        return self._settings.check() is not None

    def begin(self, amp: Amp, refusal: Exception | None) -> None:  # raises what it finds
        if amp.found_inf is not None:
            raise OwnershipError(
                f"GradScaler does not work in the {self._name!r} layout: it cannot see the "
                "gradients that owners hold. Train in bfloat16, or call opt.step() without a scaler"
            )
        self._runtime.reduce_gradients()
        self._runtime.raise_refusal(refusal)
        if self._take_over_loaded():
            self._state.refresh_masters()

    def launch(self, refusal: Exception | None) -> None:
        if refusal is not None:
            raise refusal
        self._begin_update()
        self._runtime.step(self._compute, self._apply)

    def _compute(self, unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
        """Momentum, Newton-Schulz, and the new masters where there are some."""
        call, group = self._call(unit, len(where)), self._groups[unit.group]
        rate, kept = self._rates[unit.group], self._state.of(unit)
        watch = self._telemetry.watch
        watch.start()
        rows = [rows_of(stack, where) for stack in kept]
        operand = self._kernels.operand(call)
        fused = self._kernels.is_fused(call)
        normalized_momentum(rows[0], gradients, group, out=operand, fused=fused)
        payload = self._kernels.run(call, operand)
        watch.stop()
        rms = update_rms(payload, 1.0)
        for lr, at in _by_rate(rate, unit, where):
            scale_all(_some(rms, at), lr / rate.lr if rate.lr else 0.0)
            if len(rows) > 1:
                apply_updates(_some(rows[1], at), _some(payload, at), decay=rate.decay, lr=lr)
        for whole, part in zip(kept, rows, strict=True):
            if part is not whole:
                set_rows(whole, where, part)
        return rows[-1] if len(rows) > 1 else payload, rms

    def _apply(
        self, unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
    ) -> None:
        if self._settings.master_weights:
            torch._foreach_copy_(targets, payload)
            return
        rate, fused = self._rates[unit.group], is_fused(unit.kernel, targets[0])
        for lr, at in _by_rate(rate, unit, where):
            updates = [payload[n] for n in at]
            apply_updates([targets[n] for n in at], updates, decay=rate.decay, lr=lr, fused=fused)

    def update_others(self) -> None:
        for g, params in self._adamw.items():
            found = [(p, gradient_like(p.grad, p)) for _, p in params if p.grad is not None]
            adamw_step(
                self._groups[g],
                self._optimizer.state,
                [p for p, _ in found],
                [local_tensor(grad) for _, grad in found],
                master_weights=self._settings.master_weights,
                fused=not host_can_read(self._runtime.device),
            )

    # ---- reading and state -------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        rms = {name: float(value) for name, value in self._runtime.update_rms().items()}
        return {"update_rms": rms, "kernels": self._kernels.report()}

    def before_state_dict(self) -> None:
        self._show(_MASTER)

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.check(saved)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.load(saved)
        self._show(_MOMENTUM)
        for _, p in (pair for params in self._adamw.values() for pair in params):
            self._optimizer.state.pop(p, None)
            if "exp_avg" in saved.get(p, {}):
                self._optimizer.state[p] = {
                    k: v.detach().clone().to(p.device) for k, v in saved[p].items()
                }
