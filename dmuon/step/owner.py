"""Muon where owners keep the momentum: in the `replicated` and the `dedicated` layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon.adamw import adamw_step, make_adamw_state
from dmuon.comm.layout import OwnerRuntime
from dmuon.comm.reducer import oriented, rows_of, set_rows, unstacker
from dmuon.comm.transport import host_can_read
from dmuon.dtensors import gradient_like, local_tensor, whole_tensor
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import ITEM_SIZE, Box, ParameterSpec
from dmuon.step.engine import Amp, Engine, load_entry
from dmuon.step.verdict import VerdictMessage
from dmuon.step.verify import Stored
from dmuon.types import DmuonError, OwnershipError
from dmuon.update import (
    Rates,
    apply_updates,
    finite_marks,
    follow_weights,
    is_fused,
    operand_peaks,
    rounds_to,
    scale_all,
    scaled_momentum,
    update_rms,
)

_MOMENTUM, _MASTER = "momentum_buffer", "master_weight"
_COPIED_BYTES = 1 << 28


class _OwnerState:
    """Momentum stacked per owned unit, ``[b, m, n]``, made eagerly.

    With ``with_masters`` it is float32, and beside it are float32 masters of units of lower
    precision. ``stacks`` are by name and by their unit's first matrix.
    """

    def __init__(self, runtime: OwnerRuntime, with_masters: bool) -> None:
        self._runtime = runtime
        self._specs = runtime.plan.specs
        self._units = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._stacks: dict[str, dict[int, Tensor]] = {_MOMENTUM: {}, _MASTER: {}}
        for unit in self._units:
            weight = runtime.parameters[self._specs.matrices[unit.matrices[0]].parameter]
            self._stacks[_MOMENTUM][unit.matrices[0]] = torch.zeros(
                unit.shape,
                dtype=torch.float32 if with_masters else weight.dtype,
                device=runtime.device,
            )
            if with_masters and weight.dtype.itemsize < 4:
                self._stacks[_MASTER][unit.matrices[0]] = torch.empty(
                    unit.shape, dtype=torch.float32, device=runtime.device
                )
        self.take_weights()

    def of(self, unit: Unit) -> list[Tensor]:
        """The momentum of a unit and, where they are kept, its masters."""
        return [s[unit.matrices[0]] for s in self._stacks.values() if unit.matrices[0] in s]

    def take_weights(self) -> None:
        """Make all masters anew."""
        for unit in self._units:
            masters = self._stacks[_MASTER].get(unit.matrices[0])
            for slot, weight in zip(*self._pairs(unit, masters), strict=True):
                slot.copy_(weight)

    def follow(self, unit: Unit) -> None:
        """Have the masters of a unit follow its weights."""
        self._follow(unit, self._stacks[_MASTER].get(unit.matrices[0]))

    def _follow(self, unit: Unit, masters: Tensor | None) -> None:
        on_host = host_can_read(self._runtime.device)
        follow_weights(*self._pairs(unit, masters), on_host=on_host)

    def _pairs(self, unit: Unit, masters: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """The masters of a unit, in a stack of them, and its weights; none without a stack."""
        if masters is None:
            return [], []
        slots, weights = oriented(unit, masters), self._runtime.weights(unit)
        return slots, [w.reshape(s.shape) for s, w in zip(slots, weights, strict=True)]

    def matrices(self, key: str, *, as_weights_are: bool = False) -> dict[int, Tensor]:
        """Of "momentum_buffer" or "master_weight": a view of each owned matrix, by its number, in
        the dims that it has in its parameter. ``as_weights_are``: a view of masters that follow
        weights; those that are kept stay as they are."""
        found: dict[int, Tensor] = {}
        for unit in self._units:
            stack = self._stacks[key].get(unit.matrices[0])
            if stack is None:
                continue
            if as_weights_are and not all(map(rounds_to, *self._pairs(unit, stack))):
                stack = stack.clone()
                self._follow(unit, stack)
            found |= zip(unit.matrices, unstacker(self._specs, unit)(stack), strict=True)
        return found


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
        runtime.bind(self._group_of, self._payload_dtype)
        self._state = _OwnerState(runtime, masters)
        self._members = {i: runtime.matrices_of(i) for i in runtime.plan.specs.muon_parameters()}
        for _, p in chain.from_iterable(self._adamw.values()):
            # Made now, so that every rank saves the same keys.
            make_adamw_state(p, self._optimizer.state, masters)
        mine = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._kernels.reserve(map(self._call, mine), capture=True)
        for key in self._kept:
            self._show(key)
        assert runtime.reducer is not None
        self._owned = runtime.reducer.owned
        self._present = runtime.reducer.present
        transport, matrices = runtime.transport, list(self._owned.here)
        self._message = VerdictMessage(
            *(runtime.plan.specs, None, transport, runtime.device),
            *(self._settings.schedule, self._settings.accepted, self._group_of),
            *(matrices, [True] * len(matrices)),
        )
        # Whether finite gradients can be too large for the dtype of momentum, which lies elsewhere
        # where they come in slices.
        kept = self._momentum() if runtime.keeps_whole else {}
        self._narrows = any(
            torch.finfo(g.dtype).max > 2 * torch.finfo(kept[i].dtype).max
            for i, g in self._owned.here.items()
            if i in kept
        )
        # Of what Newton-Schulz got in the step before: matrices, and their norms.
        self._norms: list[tuple[list[int], list[Tensor]]] = []
        self._bad: Tensor | None = None
        self._rest: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

    @property
    def _kept(self) -> list[str]:
        """What is kept of matrices, the same on every rank."""
        return [_MOMENTUM, _MASTER] if self._settings.master_weights else [_MOMENTUM]

    def _has_master(self, dtype: str) -> bool:
        """Whether parameters of this dtype have masters, so that weights are published."""
        return self._settings.master_weights and ITEM_SIZE[dtype] < 4

    def _payload_dtype(self, parameter_dtype: str) -> torch.dtype:
        if self._has_master(parameter_dtype):
            dtype: torch.dtype = getattr(torch, parameter_dtype)
            return dtype
        return self._settings.ns_dtype

    def _kept_dtype(self, spec: ParameterSpec) -> torch.dtype:
        """Of momentum and masters of a parameter."""
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return torch.float32 if self._settings.master_weights else dtype

    def _show(self, key: str) -> None:
        """Have the optimizer's state refer to what is kept: a tensor, or one a matrix by name; of
        what others keep an empty one, so that every rank has the same keys."""
        here, specs = self._state.matrices(key), self._runtime.plan.specs
        for i, members in self._members.items():
            if key == _MASTER and not self._has_master(specs.parameters[i].dtype):
                continue  # the weight itself
            p = self._runtime.parameters[i]
            mine: Any = here.get(members[0], torch.empty(0, *p.shape[1:], device=p.device))
            if len(members) > 1:
                mine = {specs.matrices[m].name: here[m] for m in members if m in here}
            self._optimizer.state[p][key] = mine

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        if amp.found_inf is not None:
            return OwnershipError(
                f"GradScaler does not work in the {self._name!r} layout: it cannot see the "
                "gradients that owners hold. Train in bfloat16, or call opt.step() without a scaler"
            )
        self._message.raise_noted()
        self._runtime.raise_noted()
        self._tell_of_skipped(amp)
        self._tell_of_eps()
        try:
            self._runtime.reduce_gradients()
        except DmuonError as error:
            refusal = refusal or error  # perhaps on this rank alone
        self._rest = {
            g: [
                (i, p, local_tensor(gradient_like(p.grad, p)))
                for i, p in params
                if p.grad is not None
            ]
            for g, params in self._adamw.items()
        }
        return refusal

    def launch(self, refusal: Exception | None) -> None:
        runtime, on_host = self._runtime, host_can_read(self._runtime.device)
        if refusal is None:
            self._begin_update()
        norms, vector = self._message_of_step(refusal)
        runtime.meter.add("verdict", vector)
        runtime.transport.all_reduce(vector, tag="verdict").wait()
        if refusal is not None and on_host:
            raise refusal
        verdict = self._message.read(vector, norms, ())
        finite = False if verdict is None else verdict.finite
        self._finite = finite
        self._bad = None if verdict is None else verdict.bad
        self._skipped = self._skipped + (
            finite.logical_not() if isinstance(finite, Tensor) else not finite
        )
        if verdict is None:
            runtime.skip()
            self._rest = {}
        runtime.step(self._compute if refusal is None else self._keep, self._apply)
        if refusal is not None:
            self._rest = {}
            raise refusal
        if on_host:
            self._tell_of_skipped(Amp())
            self._tell_of_eps()

    def _message_of_step(self, refusal: Exception | None) -> tuple[Tensor, Tensor]:
        """(norms of what is owned here, what the ranks sum up)."""
        here, on_host = self._owned.here, host_can_read(self._runtime.device)
        norms = torch.zeros(len(here), dtype=torch.float64, device=self._runtime.device)
        if refusal is not None:
            return norms, self._message.refuse()
        matrices = self._runtime.plan.specs.matrices
        found = {i: g for i, g in here.items() if self._present[matrices[i].parameter]}
        if found:
            grads = list(found.values())
            is_sgd = any(g.get("momentum_mode") == "sgd" for g in self._groups)
            if self._runtime.keeps_whole and (self._narrows or is_sgd):
                momentum, groups = (
                    self._momentum(),
                    [self._groups[self._group_of[i]] for i in found],
                )
                marks = operand_peaks(grads, [momentum[i] for i in found], groups).unbind()
            else:
                marks = finite_marks(grads, on_host).double().unbind()
            by_matrix = dict(zip(found, marks, strict=True))
            nothing = norms.new_zeros(())
            norms = torch.stack([by_matrix.get(i, nothing) for i in here])
        rest = chain.from_iterable(self._rest.values())
        others = {i: grad for i, _, grad in rest if grad.numel()}
        checked = [([*others], finite_marks([*others.values()], on_host))] if others else []
        known = [*chain.from_iterable(of for of, _ in self._norms)]
        sizes = [*chain.from_iterable(each for _, each in self._norms)]
        values = torch.cat(sizes).double() if sizes else norms
        self._norms = []
        return norms, self._message.fill(norms, checked, (), None, (known, values))[1]

    def _momentum(self) -> Mapping[int, Tensor]:
        return self._state.matrices(_MOMENTUM)

    def _keep(self, unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
        """What this rank publishes where it refuses, and the others cannot know yet."""
        with suppress(RuntimeError):  # a weight may have another shape, and be why it refuses
            self._state.follow(unit)
        masters = self._state.of(unit)[1:]
        shape = (len(where), unit.rows, unit.cols)
        payload = rows_of(masters[0], where) if masters else gradients.new_zeros(shape)
        return payload, torch.zeros(len(where), device=self._runtime.device)

    def _compute(self, unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
        """Momentum, Newton-Schulz, and the new masters where there are some."""
        call, group = self._call(unit, len(where)), self._groups[unit.group]
        rate, kept = self._rates[unit.group], self._state.of(unit)
        if len(kept) > 1:
            self._state.follow(unit)
        watch = self._telemetry.watch
        watch.start()
        rows, bad = [rows_of(stack, where) for stack in kept], self._bad
        operand = self._kernels.operand(call)
        fused = self._kernels.is_fused(call)
        norms: list[Tensor] = []
        parts = [(rows[0], gradients, operand)]
        if bad is not None:  # the host does not know whether the step is taken
            most = max(1, _COPIED_BYTES // rows[0][0].nbytes)
            parts = [*zip(*(stack.split(most) for stack in parts[0]), strict=True)]
        for buffer, grad, out in parts:
            before = None if bad is None else buffer.clone()
            norms.append(scaled_momentum(buffer, grad, group, out=out, fused=fused))
            if bad is not None and before is not None:
                torch.where(bad, before, buffer, out=buffer)
                out.masked_fill_(bad, 0.0)
        payload = self._kernels.run(call, operand)
        watch.stop()
        self._norms.append(([unit.matrices[n] for n in where], norms))
        rms = update_rms(payload, 1.0)
        for lr, at in _by_rate(rate, unit, where):
            scale_all(_some(rms, at), lr / rate.lr if rate.lr else 0.0)
            if len(rows) > 1:
                apply_updates(
                    _some(rows[1], at), _some(payload, at), decay=self._decay(rate), lr=lr
                )
        for whole, part in zip(kept, rows, strict=True):
            if part is not whole:
                set_rows(whole, where, part)
        return rows[-1] if len(rows) > 1 else payload, rms

    def _apply(
        self, unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
    ) -> None:
        if self._has_master(self._runtime.plan.specs.matrices[unit.matrices[0]].dtype):
            torch._foreach_copy_(targets, payload)
            return
        rate, fused = self._rates[unit.group], is_fused(unit.kernel, targets[0])
        for lr, at in _by_rate(rate, unit, where):
            updates = [payload[n] for n in at]
            decay = self._decay(rate)
            apply_updates([targets[n] for n in at], updates, decay=decay, lr=lr, fused=fused)

    def _decay(self, rate: Rates) -> float | Tensor:
        return rate.decay if self._bad is None else torch.where(self._bad, 1.0, rate.decay)

    def update_others(self) -> None:
        for g, found in self._rest.items():
            adamw_step(
                self._groups[g],
                self._optimizer.state,
                [p for _, p, _ in found],
                [grad for _, _, grad in found],
                master_weights=self._settings.master_weights,
                fused=not host_can_read(self._runtime.device),
                found_inf=None if self._bad is None else self._bad.float(),
            )
        self._rest = {}

    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        runtime, spec = self._runtime, self._runtime.plan.specs.parameters[parameter]
        rows, kept = runtime.rows, self._kept_dtype(spec)
        momentum = rows.spread(
            *(spec.shape, kept, runtime.owned_places(parameter), self._state.matrices(_MOMENTUM))
        )
        places = runtime.owned_places(parameter, in_slices=True)
        wide = torch.promote_types(kept, torch.float32)
        gradient = rows.spread(spec.shape, wide, places, self._owned.here)
        if not self._present[parameter]:
            gradient.zero_()
        return whole_tensor(momentum), whole_tensor(gradient)

    def stored(self, box: Box, parameter: int) -> Stored:
        return self._runtime.stored(box, parameter)

    # ---- reading and state -------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        rms = {name: float(value) for name, value in self._runtime.update_rms().items()}
        return {
            "update_rms": rms,
            "finite": bool(self._finite),
            "skipped": int(self._skipped),
            "below_eps": self._message.below_eps,
            "kernels": self._kernels.report(),
        }

    def saved_state(self) -> dict[Tensor, dict[str, Any]]:
        """Momentum and masters whole, as rows on all ranks; a collective call."""
        runtime, specs = self._runtime, self._runtime.plan.specs
        runtime.transport.meet("opt.state_dict()")
        others = (p for _, p in chain.from_iterable(self._adamw.values()))
        found = self._entries_as_weights_are(others)
        for key in self._kept:
            here = self._state.matrices(key, as_weights_are=key == _MASTER)
            for i in self._members:
                spec = specs.parameters[i]
                if key == _MASTER and not self._has_master(spec.dtype):
                    continue
                entry = found.setdefault(runtime.parameters[i], {})
                places = runtime.owned_places(i)
                entry[key] = runtime.rows.spread(spec.shape, self._kept_dtype(spec), places, here)
        return found

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        runtime, state = self._runtime, self._state
        state.take_weights()  # where masters were not saved
        for key in self._kept:
            here = state.matrices(key)
            for i, members in self._members.items():
                value = saved.get(runtime.parameters[i], {}).get(key)
                if key == _MASTER and not self._has_master(runtime.plan.specs.parameters[i].dtype):
                    continue
                if value is not None:
                    runtime.rows.collect(value, runtime.owned_places(i), here)
                elif key == _MOMENTUM:  # it had no gradient before the state was saved
                    for view in (here[m] for m in members if m in here):
                        view.zero_()
        for _, p in chain.from_iterable(self._adamw.values()):
            load_entry(p, self._optimizer.state[p], saved.get(p, {}))
