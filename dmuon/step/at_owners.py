"""Muon where momentum lies with owners: ``reduce_to_owner`` and the `dedicated` layout.

A step, on every rank::

    gradients   have reached their owners in backward
    verdict     one all-reduce: whether a rank found an inf, or refuses
    owners      momentum and Newton-Schulz, unit by unit; each result is sent at once
    everyone    applies the updates, or copies weights if these are published; AdamW
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon import rule as rules
from dmuon.comm.owners_runtime import OwnersRuntime
from dmuon.comm.reducer import rows_of, set_rows, unstacker
from dmuon.devices import host_can_read
from dmuon.dtensors import gradient_like, local_tensor, whole_tensor
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import ITEM_SIZE, Box
from dmuon.step.engine import Amp, AtOwners, Engine, load_entry, orientations
from dmuon.step.verdict import Sent, Verdict, VerdictMessage
from dmuon.step.verify import Stored
from dmuon.tensors import finite_norms, norms_into, scale_all
from dmuon.types import OwnershipError


class OwnerState:
    """Momentum stacked per owned unit, ``[b, m, n]``, allocated at once. ``with_masters`` adds
    float32 masters of weights in lower precision. Stacks have the name and first matrix as keys."""

    def __init__(
        self, runtime: OwnersRuntime, dtypes: Sequence[torch.dtype], with_masters: bool
    ) -> None:
        self._runtime = runtime
        self._specs = runtime.plan.specs
        self._units = [u for u in runtime.units if u.owner == runtime.transport.rank]
        self._stacks: dict[str, dict[int, Tensor]] = {rules.MOMENTUM: {}, rules.MASTER: {}}
        for unit in self._units:
            first = unit.matrices[0]
            momentum = torch.zeros(unit.shape, dtype=dtypes[first], device=runtime.device)
            self._stacks[rules.MOMENTUM][first] = momentum
            if with_masters and ITEM_SIZE[self._specs.matrices[first].dtype] < 4:
                self._stacks[rules.MASTER][first] = torch.empty_like(momentum, dtype=torch.float32)
        self.take_weights()

    def of(self, unit: Unit) -> list[Tensor]:
        """Return the momentum of a unit and, if there are any, its masters."""
        return [s[unit.matrices[0]] for s in self._stacks.values() if unit.matrices[0] in s]

    def take_weights(self) -> None:
        """Set all masters to the weights."""
        for unit in self._units:
            for masters in self.of(unit)[1:]:
                for slot, weight in zip(*self._pairs(unit, masters), strict=True):
                    slot.copy_(weight)

    def follow(self, unit: Unit, masters: Tensor) -> None:
        """Let the masters of a unit follow its weights."""
        rules.follow_weights(*self._pairs(unit, masters))

    def _pairs(self, unit: Unit, masters: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of a unit's masters, and its weights."""
        slots = [m.mT if unit.holds_transpose(k) else m for k, m in enumerate(masters.unbind())]
        pairs = zip(unit.matrices, self._runtime.targets(unit), strict=True)
        weights = [self._specs.matrices[i].form.rows_first(weight) for i, weight in pairs]
        return slots, [w.reshape(s.shape) for s, w in zip(slots, weights, strict=True)]

    def matrices(self, key: str, *, as_weights_are: bool = False) -> dict[int, Tensor]:
        """Return views of momentum or masters by matrix, in the parameter's dims.
        ``as_weights_are``: copy masters whose weights were edited, and let the copy follow them."""
        found: dict[int, Tensor] = {}
        for unit in self._units:
            stack = self._stacks[key].get(unit.matrices[0])
            if stack is None:
                continue
            if as_weights_are and not all(map(rules.rounds_to, *self._pairs(unit, stack))):
                stack = stack.clone()
                self.follow(unit, stack)
            found |= zip(unit.matrices, unstacker(self._specs, unit)(stack), strict=True)
        return found


def _by_rate(h: rules.Hyper, unit: Unit, where: Sequence[int]) -> list[tuple[float, Sequence[int]]]:
    """Return the adjusted learning rates for positions of a unit: (rate, indices into ``where``).
    A matrix's own rows and columns count, even if its slot holds the transpose."""
    plain, turned = h.adjusted(unit.rows, unit.cols), h.adjusted(unit.cols, unit.rows)
    if plain == turned:
        return [(plain, range(len(where)))]
    return [(turned if is_turned else plain, at) for is_turned, at in orientations(unit, where)]


def _some(stack: Tensor, at: Sequence[int]) -> list[Tensor]:
    """Return some matrices of a stack; all of them as one tensor."""
    return [stack] if len(at) == len(stack) else [stack[n] for n in at]


class OwnersEngine(Engine):
    _runtime: OwnersRuntime

    def _bind(self) -> None:
        runtime, masters = self._runtime, self._settings.master_weights
        runtime.bind(self._group_of, self._payload_dtype)
        specs = runtime.plan.specs
        self._dtypes = [self._momentum_dtypes(i) for i in range(len(specs.matrices))]
        self._state = OwnerState(runtime, [kept for kept, _ in self._dtypes], masters)
        members = {i: runtime.slices.matrices_of[i] for i in specs.muon_parameters()}
        # Owners' state, the same on every rank: for each key its parameters with their matrices. A
        # weight in float32 is its own master.
        some = {i: m for i, m in members.items() if self._has_master(specs.parameters[i].dtype)}
        self._members = {rules.MOMENTUM: members, rules.MASTER: some}
        for key in self._members:
            self._show(key)
        assert runtime.reducer is not None
        self._owned = runtime.reducer.owned
        self._present = runtime.reducer.present
        self._kernels.reserve(map(self._call, self._owned.mine), capture=True)
        matrices = list(self._owned.here)
        how = self._settings.schedule, self._settings.digest, self._group_of
        self._message = VerdictMessage(runtime, None, *how, matrices, [True] * len(matrices))
        # Whether finite gradients can be too large for the dtype of momentum; if they come in
        # slices, momentum lies on another rank.
        kept = self._momentum() if runtime.keeps_whole else {}
        self._narrows = any(
            torch.finfo(g.dtype).max > 2 * torch.finfo(kept[i].dtype).max
            for i, g in self._owned.here.items()
            if i in kept
        )
        # Matrices, and norms of their Newton-Schulz operands, in the step before.
        self._norms: list[tuple[list[int], Tensor]] = []
        self._verdict = Verdict(True)

    @property
    def _fuses_adamw(self) -> bool:
        return not host_can_read(self._runtime.device)

    def _has_master(self, dtype: str) -> bool:
        """Whether parameters of this dtype have masters, so that weights are published."""
        return self._settings.master_weights and ITEM_SIZE[dtype] < 4

    def _payload_dtype(self, dtype: str) -> torch.dtype:
        weight: torch.dtype = getattr(torch, dtype)
        return weight if self._has_master(dtype) else self._settings.ns_dtype

    def _show(self, key: str) -> None:
        """Let the optimizer's state refer to owners' state: a tensor, or one per matrix by name. A
        tensor that another rank keeps is empty here, so that every rank has the same keys."""
        here, specs = self._state.matrices(key), self._runtime.plan.specs
        for i, members in self._members[key].items():
            p = self._runtime.parameters[i]
            mine: Any = here.get(members[0], torch.empty(0, *p.shape[1:], device=p.device))
            if len(members) > 1:
                mine = {specs.matrices[m].name: here[m] for m in members if m in here}
            self._optimizer.state[p][key] = mine

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        if amp.found_inf is not None:
            return OwnershipError(
                f"GradScaler does not work in the {self._runtime.plan.layout.value!r} layout: it "
                "cannot see the gradients that owners hold. Train in bfloat16, or call opt.step() "
                "without a scaler"
            )
        self._runtime.raise_noted()
        return super().begin(amp, refusal)

    def _take_gradients(self) -> None:
        self._grads = {
            i: local_tensor(gradient_like(p.grad, p))
            for i, p in chain.from_iterable(self._adamw.values())
            if p.grad is not None
        }

    def send(self, refusal: Exception | None) -> None:
        runtime = self._runtime
        if refusal is None:
            self._begin_update()
        norms, vector = self._message_of_step(refusal)
        runtime.meter["verdict"] += vector.nbytes
        work = runtime.transport.all_reduce(vector, tag="verdict")
        self._message.sent = Sent(vector, work, norms)

    def launch(self, refusal: Exception | None) -> None:
        runtime, on_host = self._runtime, host_can_read(self._runtime.device)
        vector = self.received()
        if refusal is not None and on_host:
            raise refusal
        verdict = self._message.read(vector, self._message.sent.norms, ())
        self._note(False if verdict is None else verdict.finite)
        self._verdict = verdict or Verdict(False)
        if verdict is None:
            self._present[:] = [False] * len(self._present)
            self._grads = {}
        runtime.step(self._compute if refusal is None else self._keep, self._apply)
        if refusal is not None:
            self._grads = {}
            raise refusal
        if on_host:
            self._report_skips()

    def _message_of_step(self, refusal: Exception | None) -> tuple[Tensor, Tensor]:
        """Return (norms of the gradients owned here, the vector that the ranks sum up)."""
        norms = torch.zeros(len(self._owned.here), dtype=torch.float64, device=self._runtime.device)
        if refusal is not None:
            return norms, self._message.refuse()
        norms, square = self._marks(norms)
        known = [*chain.from_iterable(of for of, _ in self._norms)]
        sizes = [norms for _, norms in self._norms]
        values = torch.cat(sizes).double() if sizes else norms
        self._norms = []
        checked, squares = self._checked(self._grads)
        how = checked, (), None, [*squares, square], (known, values)
        return norms, self._message.fill(norms, *how)[1]

    def _marks(self, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Return (for each matrix here a number that is finite if its momentum stays finite, the
        sum of squares of its gradients)."""
        runtime, here = self._runtime, self._owned.here
        found = self._owned.collected(self._present)
        if not found:
            return zeros, zeros.sum()
        norms = self._norms_of(found)
        square = norms.dot(norms)
        if runtime.keeps_whole and (self._narrows or any(h.mode == "sgd" for h in self._hypers)):
            momentum = self._momentum()
            hypers = [self._hypers[self._group_of[i]] for i in found]
            norms = rules.operand_peaks([*found.values()], [momentum[i] for i in found], hypers)
        if len(found) < len(here):
            by_matrix = dict(zip(found, norms.unbind(), strict=True))
            norms = torch.stack([by_matrix.get(i, zeros[0]) for i in here])
        return norms, square

    def _norms_of(self, found: Mapping[int, Tensor]) -> Tensor:
        is_whole = self._runtime.keeps_whole and len(found) == len(self._owned.here)
        if is_whole and host_can_read(self._runtime.device):
            # One call for each stack; separate norms are computed only if something is wrong.
            norms = torch.empty(len(found), dtype=torch.float64)
            sizes = [len(unit.matrices) for unit in self._owned.mine]
            for unit, to in zip(self._owned.mine, norms.split(sizes), strict=True):
                norms_into(to, self._owned.stack(unit).flatten(1))
            if bool(norms.isfinite().all()):
                return norms
        return finite_norms([*found.values()])

    def _momentum(self) -> Mapping[int, Tensor]:
        return self._state.matrices(rules.MOMENTUM)

    def _keep(self, unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
        """Return results of a refusing rank, which change nothing: others cannot know yet."""
        masters = self._state.of(unit)[1:]
        with suppress(RuntimeError):  # the cause may be a weight of another shape
            for stack in masters:
                self._state.follow(unit, stack)
        shape = (len(where), unit.rows, unit.cols)
        payload = rows_of(masters[0], where) if masters else gradients.new_zeros(shape)
        return payload, torch.zeros(len(where), device=self._runtime.device)

    def _compute(self, unit: Unit, gradients: Tensor, where: list[int]) -> tuple[Tensor, Tensor]:
        """Compute momentum and Newton-Schulz, and update masters if there are any."""
        h, rule, stays = self._hypers[unit.group], self._rules[unit.group], self._verdict.bad
        momentum, *masters = self._state.of(unit)
        for stack in masters:
            self._state.follow(unit, stack)
        watch = self._telemetry.watch
        watch.start()
        buffers = rows_of(momentum, where)
        call, working = self._call(unit, len(where)), self._dtypes[unit.matrices[0]][1]
        operand = self._kernels.operand(call)
        norms = rule.operand(buffers, gradients, h, out=operand, working=working, stays=stays)
        self._norms.append(([unit.matrices[n] for n in where], norms))
        payload = self._kernels.run(call, operand)
        self._kept.accept(unit, payload, where)
        watch.stop()
        if buffers is not momentum:
            set_rows(momentum, where, buffers)
        rms = rules.update_norms(payload).mul_(1 / math.sqrt(unit.rows * unit.cols))
        new = [rows_of(stack, where) for stack in masters]
        for lr, at in _by_rate(h, unit, where):
            scale_all(_some(rms, at), lr / h.lr if h.lr else 0.0)
            if masters:
                rule.apply(_some(new[0], at), _some(payload, at), h, lr=lr, stays=stays)
        for stack, part in zip(masters, new, strict=True):
            if part is not stack:
                set_rows(stack, where, part)
        return new[0] if masters else payload, rms

    def _apply(
        self, unit: Unit, where: list[int], targets: list[Tensor], payload: list[Tensor]
    ) -> None:
        if self._has_master(self._runtime.plan.specs.matrices[unit.matrices[0]].dtype):
            torch._foreach_copy_(targets, payload)
            return
        h, rule, stays = self._hypers[unit.group], self._rules[unit.group], self._verdict.bad
        for lr, at in _by_rate(h, unit, where):
            of = [targets[n] for n in at], [payload[n] for n in at]
            rule.apply(*of, h, lr=lr, stays=stays)

    def update_others(self) -> None:
        self._update_adamw(self._grads, self._verdict)
        self._grads = {}

    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        runtime, shape = self._runtime, self._runtime.plan.specs.parameters[parameter].shape
        slices, rows = runtime.slices, runtime.rows
        dtype, _ = self._dtypes[slices.matrices_of[parameter][0]]
        momentum = rows.spread(shape, dtype, slices.keepers(parameter), self._momentum())
        wide, places = torch.promote_types(dtype, torch.float32), slices.keepers
        gradient = rows.spread(shape, wide, places(parameter, in_slices=True), self._owned.here)
        if not self._present[parameter]:
            gradient.zero_()
        return whole_tensor(momentum), whole_tensor(gradient)

    def stored(self, box: Box, parameter: int) -> Stored:
        return self._runtime.stored(box, parameter)

    # ---- reading and state -------------------------------------------------------------------

    def step_bytes(self) -> dict[str, int]:
        """Add "passes" to `Engine.step_bytes`: without list kernels, operands of the largest batch
        and the casts for them."""
        passes, is_half = [0], self._settings.ns_dtype.itemsize < 4
        for unit in self._owned.mine if rules.list_kernels(self._runtime.device) is None else ():
            kept, working = self._dtypes[unit.matrices[0]]
            cast = 2 * working.itemsize * (kept is not working) + 4 * (working.itemsize < 4)
            passes.append(unit.numel * (working.itemsize + cast + 4 * is_half))
        return super().step_bytes() | {"passes": max(passes)}

    def _update_rms(self) -> tuple[Sequence[int], Tensor]:
        return self._runtime.update_rms()

    def saved_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return momentum, masters and variants' state as rows on all ranks; a collective call."""
        runtime = self._runtime
        runtime.transport.meet("opt.state_dict()")
        others = (p for _, p in chain.from_iterable(self._adamw.values()))
        kept = self._spread(self._at_owners(as_weights_are=True))
        entries = {runtime.parameters[i]: entry for i, entry in kept.items()}
        return self._entries_as_weights_are(others) | entries

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.take_weights()  # in case masters were not saved
        self._collect(self._at_owners(), saved)
        for _, p in chain.from_iterable(self._adamw.values()):
            load_entry(p, self._optimizer.state[p], saved.get(p, {}))

    def _at_owners(self, *, as_weights_are: bool = False) -> Iterator[AtOwners]:
        """Yield all state of owners; ``as_weights_are`` as in `OwnerState.matrices`."""
        specs, places = self._runtime.plan.specs.parameters, self._runtime.slices.keepers
        for key, parameters in self._members.items():
            here = self._state.matrices(key, as_weights_are=as_weights_are and key == rules.MASTER)
            for i, members in parameters.items():
                dtype = torch.float32 if key == rules.MASTER else self._dtypes[members[0]][0]
                yield AtOwners(i, key, specs[i].shape, dtype, places(i), here)
        yield from self._kept.rows()
