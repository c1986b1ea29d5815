"""Muon in the `sharded` layout: momentum on shards, Newton-Schulz at owners or on blocks.

A full step, on every rank::

    operands    momentum and Nesterov on the local blocks, into a workspace: nothing is changed yet
    verdict     one all-reduce: every matrix's squared norm, who has gradients, who found an inf
    pipeline    normalized blocks to the owners, Newton-Schulz there, updates back to the blocks;
                while the first buckets travel: the momentum, what lies here alone, AdamW

A block step (MuonBP, arXiv 2510.16981, Algorithm 1) orthogonalizes blocks by themselves, without
any collective. A block without a gradient here, or with one that is not finite, is left alone:
that is all that a rank can know by itself, and replicas know the same.

Where the host cannot read from the device without waiting, every decision is a mask there: what is
bad gets an operand of zeros, hence an update of zeros, and neither momentum nor decay.

A *block* is what this rank holds of one matrix. The operands of Newton-Schulz of all blocks lie in
one workspace, in the order in which a step needs them (`Operands`), so that what is equal is done
for many blocks in one call: norms, scaling, casts, masks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import adamw_step, make_adamw_state, refresh_masters
from dmuon.comm.pipeline import places
from dmuon.comm.routes import Message, Part, parts_of
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import Stopwatch, Work, host_can_read
from dmuon.config import KernelOptions
from dmuon.dtensors import layout_stamp, local_tensor, stored_tensor
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.shards import Box
from dmuon.step.engine import Amp, Settings, StepTelemetry, adamw_parameters, group_of_matrices
from dmuon.step.verdict import Verdict, VerdictMessage
from dmuon.types import OwnershipError
from dmuon.update import (
    Rates,
    advance_momentum,
    apply_updates,
    operands_of_newton_schulz,
    scale_all,
    scale_into,
    update_rms,
)

__all__ = ["ShardedEngine"]

_BLOCK_BATCH = 16  # blocks of one shape that are orthogonalized together

# What is worked on together: on a CPU a few passes over so much stay in its caches, elsewhere it
# bounds the copy that a masked update of momentum takes.
CHUNK_BYTES = {"cpu": 1 << 18}
_DEVICE_CHUNK_BYTES = 1 << 28

Gradients = Sequence[Tensor | None]


@dataclass(slots=True)
class _Outcome:
    """What a step did. ``finite`` is a 0-d device bool where the host has not read it.

    ``rms[n]`` is the RMS of the update of matrix ``matrices[n]``, once ``work`` is done.
    """

    full: bool = True
    finite: bool | Tensor = True
    matrices: Sequence[int] = ()
    rms: Tensor | None = None
    work: Work | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(frozen=True, slots=True)
class _Share:
    """Blocks of one param group whose matrices have one shape, with views of where their updates
    land. ``positions`` [blocks] is for masks."""

    group: int
    rows: int
    cols: int
    blocks: list[int]
    updates: list[Tensor]
    positions: Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """Blocks ``[b, rows, cols]`` that this rank orthogonalizes by itself: a unit that lies here
    alone, or equal blocks in a block step. ``first`` is the position of the first one."""

    group: int
    shape: tuple[int, int, int]
    kernel: str
    operands: Operands
    first: int
    parts: list[Part]
    is_whole: bool
    matrices: tuple[int, ...]
    index: Tensor  # [b]: of the matrices


def _pieces(buffer: Tensor, message: Message) -> Iterator[tuple[int, Tensor]]:
    """(matrix, its piece in the buffer) of a message."""
    for part in message.parts:
        views = buffer.narrow(0, part.start, part.numel).view(part.shape)
        yield from zip(part.matrices, views.unbind(), strict=True)


class ShardedEngine:
    """See `dmuon.step.engine.Engine`."""

    def __init__(
        self,
        runtime: ShardedRuntime,
        telemetry: StepTelemetry,
        options: KernelOptions,
        optimizer: Optimizer,
        settings: Settings,
    ) -> None:
        self._runtime = runtime
        self._telemetry = telemetry
        self._optimizer = optimizer
        self._settings = settings
        self._on_host = host_can_read(runtime.device)
        groups = group_of_matrices(runtime.parameters, runtime.plan.specs, optimizer)
        runtime.bind(groups, settings.ns_dtype)
        self._state = ShardState(runtime, optimizer, groups, settings.master_weights)
        index: dict[Tensor, int] = {p: i for i, p in enumerate(runtime.parameters)}
        # By param group: AdamW's parameters, as (index, parameter).
        self._adamw = {
            g: [(index[p], p) for p in params]
            for g, params in adamw_parameters(runtime.parameters, optimizer).items()
        }
        for params in self._adamw.values():
            for _, p in params:  # made now, so that every rank saves the same keys
                make_adamw_state(p, optimizer.state, settings.master_weights)
        self._kernels = Orthogonalizer(runtime.device, settings.ns_dtype, options)
        self._bind_full_step()
        self._bind_block_step()
        if not self._on_host:
            self._operands.prepare_masks()
        calls = [self._call(stack) for stack in (*self._local, *self._block_stacks)]
        lasting = [
            (self._call(runtime.units[u]), stack)
            for bucket in runtime.bound().buckets
            for u, stack in bucket.stacks
        ]
        self._kernels.reserve(calls, lasting)
        self._outcome = _Outcome()
        self._grads: list[Tensor | None] = []
        self._amp = Amp()
        self._skipped: int | Tensor = 0
        self._seen_loads = 0

    # ---- once ----------------------------------------------------------------------------

    def _bind_full_step(self) -> None:
        """Lay out the operands in the order in which they leave; then what stays; then replicas."""
        runtime, state = self._runtime, self._state
        rank, buckets = runtime.transport.rank, runtime.bound().buckets
        sent = [[i for part in b.route.held.parts for i in part.matrices] for b in buckets]
        local = [u for u in runtime.units if runtime.is_local(u) and u.owner == rank]
        used = chain(*sent, *(unit.matrices for unit in local))
        order = [state.block_of[i] for i in used]
        order += sorted(set(range(len(state.blocks))) - set(order))
        self._operands = operands = Operands(state, order)

        blocks = [state.blocks[k] for k in order]
        counted = [n for n, b in enumerate(blocks) if b.travels and b.counts]
        self._message = VerdictMessage(
            runtime.shards, rank, runtime.device, [blocks[n].matrix for n in counted]
        )
        self._counted = self._index(counted, state.device)
        travels = [n for n, b in enumerate(blocks) if b.travels]
        number = {i: j for j, i in enumerate(self._message.travelling)}
        self._travels = self._index(travels, state.device)
        self._norm_of = self._index([number[blocks[n].matrix] for n in travels], runtime.device)

        self._fills: list[list[tuple[int, Tensor, Tensor]]] = []  # (first, operands, places)
        self._shares: list[list[_Share]] = []
        first = 0
        for bucket, matrices in zip(buckets, sent, strict=True):
            last = first + len(matrices)
            runs = operands.runs(first, last) if last > first else []
            sizes = [flat.numel() for _, flat in runs]
            into = [view.view(flat.shape) for view, (_, flat) in
                    zip(bucket.send.split(sizes), runs, strict=True)]  # fmt: skip
            self._fills.append([(n, flat, to) for (n, flat), to in zip(runs, into, strict=True)])
            first = last
            landing = _pieces(bucket.landed, bucket.route.held)
            copies = _pieces(bucket.copies_in, bucket.route.copies_in)
            self._shares.append(self._shares_of([*landing, *copies]))
        self._local: list[_Stack] = []
        for unit in local:
            pieces = (
                (k, i, unit.holds_transpose(k), runtime.shards.piece(i, rank).box)
                for k, i in enumerate(unit.matrices)
            )
            parts = parts_of(runtime.shards, -1, pieces)
            self._local.append(
                _Stack(
                    unit.group, unit.shape, unit.kernel, operands, first, parts, True,
                    unit.matrices, self._index(unit.matrices, runtime.device),
                )
            )  # fmt: skip
            first += len(unit.matrices)
        self._owned: dict[int, tuple[Tensor, Tensor | None]] = {}  # matrices, which are turned
        for bucket in buckets:
            for u in bucket.route.units:
                unit = runtime.units[u]
                turned = None
                if unit.transposed:
                    turned = torch.tensor(unit.transposed, device=runtime.device)
                self._owned[u] = self._index(unit.matrices, runtime.device), turned

    def _bind_block_step(self) -> None:
        self._block_stacks: list[_Stack] = []
        self._block_operands = self._operands
        if self._settings.schedule.always_full:
            return
        state, shards = self._state, self._runtime.shards
        rank = self._runtime.transport.rank
        alike: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
        for k, b in enumerate(state.blocks):
            alike[b.group, b.rows, b.cols, b.is_whole].append(k)
        self._block_operands = Operands(state, [k for equal in alike.values() for k in equal])
        first = 0
        for (group, rows, cols, whole), equal in alike.items():
            for start in range(0, len(equal), _BLOCK_BATCH):
                some = equal[start : start + _BLOCK_BATCH]
                matrices = tuple(state.blocks[k].matrix for k in some)
                pieces = ((n, i, False, shards.piece(i, rank).box) for n, i in enumerate(matrices))
                # Here a block is a whole by itself.
                parts = [
                    replace(
                        part,
                        whole=part.box.shape,
                        box=Box((0,) * len(part.box.shape), part.box.shape),
                    )
                    for part in parts_of(shards, -1, pieces)
                ]
                self._block_stacks.append(
                    _Stack(
                        group, (len(some), rows, cols), "", self._block_operands, first, parts,
                        whole, matrices, self._index(matrices, self._runtime.device),
                    )
                )  # fmt: skip
                first += len(some)

    def _index(self, values: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def _shares_of(self, landing: Sequence[tuple[int, Tensor]]) -> list[_Share]:
        """(matrix, its update here), by param group, shape and dtype of the matrix."""
        state, specs = self._state, self._runtime.plan.specs
        alike: dict[tuple[int, int, int, str], list[tuple[int, Tensor]]] = defaultdict(list)
        for i, update in landing:
            k, matrix = state.block_of[i], specs.matrices[i]
            kind = (state.blocks[k].group, *matrix.shape, matrix.dtype)
            alike[kind].append((k, update))
        found = []
        for (group, rows, cols, _), members in alike.items():
            blocks = [k for k, _ in members]
            positions = self._index([self._operands.position_of[k] for k in blocks], state.device)
            found.append(_Share(group, rows, cols, blocks, [u for _, u in members], positions))
        return found

    # ---- a step --------------------------------------------------------------------------

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def begin(self, amp: Amp) -> None:
        self._runtime.reduce_gradients()
        self._outcome.wait()
        self._state.begin_step()
        self._refresh_masters()
        self._grads = self._runtime.local_gradients()
        self._amp = amp
        present = [g for g in self._grads if g is not None]
        if amp.scale is not None and present:
            # A tensor, because reading it would wait for the device.
            scale_all(present, amp.scale.reciprocal().to(present[0].device))

    def _refresh_masters(self) -> None:
        if not self._settings.master_weights:
            return
        self._state.make_masters()
        if self._runtime.loads != self._seen_loads:
            self._seen_loads = self._runtime.loads
            refresh_masters(self._optimizer.state, self._runtime.parameters)

    def launch(self) -> None:
        schedule = self._settings.schedule
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        rates = [Rates.of(group) for group in self._groups]
        watch = self._telemetry.begin_step()
        run = self._full_step if schedule.is_full(schedule.t) else self._block_step
        self._outcome = run(self._grads, rates, watch, self._amp.found_inf)
        self._grads = []

    def update_others(self) -> None:
        """AdamW ran while the first buckets travelled."""

    def finish(self) -> None:
        if self._outcome.full:  # a block step issues no collective, and this may
            self._telemetry.finish_step()

    def _full_step(
        self, grads: Gradients, rates: list[Rates], watch: Stopwatch, found_inf: Tensor | None
    ) -> _Outcome:
        """Take the step; the updates of the last buckets are applied later."""
        runtime, operands, groups = self._runtime, self._operands, self._groups
        of_blocks = self._state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, groups)
        here = [g is not None for g in grads]
        counted = norms.index_select(0, self._counted)
        _, peaks = self._peaks(grads)
        vector = self._message.fill(counted, [norms, *peaks], here, found_inf)
        runtime.all_reduce(vector, "norms").wait()
        verdict = self._message.read(vector, here, on_host=self._on_host)
        if verdict.finite is False:
            runtime.pass_by()
            self._skipped = self._skipped + 1
            return _Outcome(full=True, finite=False)
        bad = self._bad(verdict)
        shared = verdict.norms.index_select(0, self._norm_of).to(norms.device)
        scales = operands.scales(norms.index_copy_(0, self._travels, shared), groups)
        buckets, units = runtime.bound().buckets, runtime.units
        matrices = range(len(runtime.plan.specs.matrices))
        rms = torch.zeros(len(matrices), dtype=torch.float32, device=runtime.device)

        def fill(b: int) -> None:
            for first, flat, to in self._fills[b]:
                scale_into(to, flat, scales.narrow(0, first, len(flat)))
            if bad is not None:
                own = bad.to(runtime.device)
                mask([(first, to) for first, _, to in self._fills[b]], own)

        def compute(b: int, done: Callable[[int, Tensor], None]) -> None:
            for n, (u, stack) in enumerate(buckets[b].stacks):
                if verdict.absent_matrices.issuperset(units[u].matrices):
                    done(n, stack)  # of zeros, which nobody applies
                    continue
                update = self._orthogonalize(self._call(units[u]), stack, watch)
                rms.index_copy_(0, *self._rms(u, update, rates))
                done(n, update)

        def apply(b: int) -> None:
            for share in self._shares[b]:
                rate = rates[share.group]
                lr = rate.adjusted(share.rows, share.cols)
                own = bad
                if bad is not None and bad.ndim:
                    own = bad.index_select(0, share.positions)
                self._apply(share.blocks, share.updates, rate.decay, lr, own)

        def meanwhile() -> None:
            operands.commit(of_blocks, groups, bad)
            for stack in self._local:
                if not verdict.absent_matrices.issuperset(stack.matrices):
                    values = self._step_alone(stack, scales, rates, bad, watch)
                    rms.index_copy_(0, stack.index, values)
            skip = None if verdict.ok is None else verdict.ok.logical_not().float()
            self._update_adamw(grads, verdict.absent_parameters, verdict.flags, skip)

        runtime.run(fill, compute, apply, meanwhile)
        if verdict.ok is not None:
            self._skipped = self._skipped + verdict.ok.logical_not()
        work = runtime.all_reduce(rms, "rms")
        return _Outcome(True, True if verdict.ok is None else verdict.ok, matrices, rms, work)

    def _block_step(
        self, grads: Gradients, rates: list[Rates], watch: Stopwatch, found_inf: Tensor | None
    ) -> _Outcome:
        """Take the step; nothing changes where ``found_inf`` (0-d) is not zero: torch's scaler has
        shared its verdict, and lowers its scale on all ranks."""
        state, operands, groups = self._state, self._block_operands, self._groups
        device = self._runtime.device
        self._runtime.pass_by()
        overflow = None if found_inf is None else found_inf.to(device) != 0
        if overflow is not None and self._on_host:
            if bool(overflow):
                self._skipped = self._skipped + 1
                return _Outcome(full=False, finite=False)
            overflow = None
        of_blocks = state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, groups)
        numbers, peaks = self._peaks(grads)
        own_bad = norms.isfinite().logical_not_()
        for n, k in enumerate(operands.order):
            if grads[state.blocks[k].parameter] is None:
                own_bad.narrow(0, n, 1).fill_(True)
        all_finite = torch.stack([v.isfinite().all().to(device) for v in (norms, *peaks)]).all()
        if overflow is not None:
            own_bad = own_bad | overflow.to(own_bad.device)
            all_finite = all_finite & ~overflow
        self._skipped = self._skipped + all_finite.logical_not()
        finite = bool(all_finite) if self._on_host else all_finite
        bad = None if self._on_host and not bool(own_bad.any()) else own_bad
        scales = operands.scales(norms, groups)
        operands.commit(of_blocks, groups, bad)
        updates = [self._step_alone(s, scales, rates, bad, watch) for s in self._block_stacks]
        # What this rank knows by itself, and replicas alike.
        skipped = {i for i, grad in enumerate(grads) if grad is None}
        flags: dict[int, Tensor] = {}
        if not self._on_host:
            masks = [peak.isfinite().logical_not() for peak in peaks]
            if overflow is not None:
                masks = [mask | overflow.to(mask.device) for mask in masks]
            found = [flag for mask in masks for flag in mask.float().unbind()]
            flags = dict(zip(numbers, found, strict=True))
        elif not finite:
            values = [v for peak in peaks for v in peak.tolist()]
            skipped |= {i for i, v in zip(numbers, values, strict=True) if not math.isfinite(v)}
        nothing = None if overflow is None else overflow.float()
        self._update_adamw(grads, skipped, flags, nothing)
        rms = torch.cat(updates) if updates else None
        matrices = [state.blocks[k].matrix for k in operands.order]
        return _Outcome(False, finite, matrices, rms)

    # ---- masks ---------------------------------------------------------------------------

    def _bad(self, verdict: Verdict) -> Tensor | None:
        """Which blocks are left as they are: a bool where all are alike, else one by position; None
        for no block."""
        state, operands = self._state, self._operands
        bad = None if verdict.ok is None else verdict.ok.logical_not().to(state.device)
        absent = [
            n
            for n, k in enumerate(operands.order)
            if state.blocks[k].matrix in verdict.absent_matrices
        ]
        if not absent and not verdict.bad:
            return bad
        own = torch.zeros(len(operands.order), dtype=torch.bool, device=state.device)
        for n in absent:
            own.narrow(0, n, 1).fill_(True)
        for i, is_bad in verdict.bad.items():
            if i in state.block_of:
                n = operands.position_of[state.block_of[i]]
                own.narrow(0, n, 1).copy_(is_bad)
        return own if bad is None else own.logical_or_(bad)

    # ---- Newton-Schulz -------------------------------------------------------------------

    def _call(self, work: Unit | _Stack) -> Call:
        settings = self._groups[work.group]
        triples = resolve_coefficients(settings["ns_coefficients"], settings["ns_steps"])
        return Call(work.shape, triples, work.kernel)

    def _orthogonalize(self, call: Call, stack: Tensor, watch: Stopwatch) -> Tensor:
        """Newton-Schulz on normalized matrices ``[b, rows, cols]``, which are overwritten; the
        result is valid until the next call."""
        watch.start()
        update = self._kernels.run(call, stack)
        watch.stop()
        return update

    def _rms(self, u: int, update: Tensor, rates: Sequence[Rates]) -> tuple[Tensor, Tensor]:
        """(the matrices of unit ``u``, the RMS of their updates)."""
        unit, (matrices, turned) = self._runtime.units[u], self._owned[u]
        rate = rates[unit.group]
        factor: float | Tensor = rate.ratio(unit.rows, unit.cols)
        if turned is not None:
            factor = torch.where(turned, rate.ratio(unit.cols, unit.rows), factor)
        return matrices, update_rms(update, factor)

    def _step_alone(
        self,
        stack: _Stack,
        scales: Tensor,
        rates: Sequence[Rates],
        bad: Tensor | None,
        watch: Stopwatch,
    ) -> Tensor:
        """Orthogonalize and apply what needs nobody else; the RMS of the updates, ``[b]``."""
        call = self._call(stack)
        batch = self._kernels.operand(call)
        for part in stack.parts:
            first, count = stack.first + part.position, len(part.matrices)
            to = places(batch, part)
            operands = stack.operands.stack(first, first + count)
            scale_into(to, operands, scales.narrow(0, first, count))
            if bad is not None:
                mask([(first, to)], bad.to(to.device))
        update = self._orthogonalize(call, batch, watch)
        rate, ratio = rates[stack.group], self._settings.block_lr_ratio
        rms = []
        for part in stack.parts:
            first, count = stack.first + part.position, len(part.matrices)
            _, rows, cols = stack.shape
            if part.transposed:
                rows, cols = cols, rows
            # A matrix that is whole here always takes full steps.
            lr = rate.adjusted(rows, cols) * (1.0 if stack.is_whole or ratio is None else ratio)
            own = update.narrow(0, part.position, count)
            rms.append(update_rms(own, lr / rate.lr if rate.lr else 0.0))
            own_bad = bad.narrow(0, first, count) if bad is not None and bad.ndim else bad
            blocks = stack.operands.order[first : first + count]
            self._apply(blocks, [*places(update, part).unbind()], rate.decay, lr, own_bad)
        return torch.cat(rms) if len(rms) > 1 else rms[0]

    # ---- weights -------------------------------------------------------------------------

    def _apply(
        self,
        blocks: Sequence[int],
        updates: list[Tensor],
        decay: float,
        lr: float,
        bad: Tensor | None,
    ) -> None:
        """Decay and update the weights of blocks; where ``bad``, a bool or one a block, is true
        they stay as they are (and the update is zero)."""
        state = self._state
        targets = [state.targets[k] for k in blocks]
        where = targets[0].device
        if updates[0].device != where:  # CPU offload
            updates = [update.to(where) for update in updates]
        factor = decay if bad is None else torch.where(bad.to(where), 1.0, decay)
        apply_updates(targets, updates, decay=factor, lr=lr)
        if state.targets is not state.weights:
            torch._foreach_copy_([state.weights[k] for k in blocks], targets)

    # ---- AdamW ---------------------------------------------------------------------------

    def _peaks(self, grads: Gradients) -> tuple[list[int], list[Tensor]]:
        """Of AdamW's gradients: their numbers, and (in vectors, a dtype each) their largest
        absolute values, which are not finite where one of the elements is not."""
        alike: dict[torch.dtype, list[tuple[int, Tensor]]] = defaultdict(list)
        for params in self._adamw.values():
            for i, _ in params:
                grad = grads[i]
                if grad is not None and grad.numel():
                    alike[grad.dtype].append((i, grad))
        peaks = [
            torch.stack(torch._foreach_norm([grad for _, grad in members], math.inf))
            for members in alike.values()
        ]
        return [i for members in alike.values() for i, _ in members], peaks

    def _update_adamw(
        self,
        grads: Gradients,
        skipped: Collection[int],
        flags: Mapping[int, Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """All but the parameters ``skipped``; a gradient that is missing here counts as zero.

        Nothing changes where ``found_inf`` (0-d float32) is not zero. ``flags`` are those of
        parameters that have their own.
        """
        for g, params in self._adamw.items():
            joint: list[tuple[Tensor, Tensor]] = []
            for i, p in params:
                if i in skipped:
                    continue
                grad = grads[i]
                if grad is None:
                    grad = torch.zeros_like(local_tensor(p))
                if i in flags:  # by itself, because the fused form takes one flag for all
                    self._adamw_step(g, [(p, grad)], flags[i])
                else:
                    joint.append((p, grad))
            self._adamw_step(g, joint, found_inf)

    def _adamw_step(
        self, group: int, pairs: Sequence[tuple[Tensor, Tensor]], found_inf: Tensor | None
    ) -> None:
        """``pairs`` of a parameter and its local gradient."""
        if not pairs:
            return
        adamw_step(
            self._groups[group],
            self._optimizer.state,
            [p for p, _ in pairs],
            [grad for _, grad in pairs],
            master_weights=self._settings.master_weights,
            fused=True,
            found_inf=None if found_inf is None else found_inf.to(pairs[0][0].device),
        )

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        self._runtime.synchronize()
        outcome = self._outcome
        outcome.wait()
        names = [m.name for m in self._runtime.plan.specs.matrices]
        values = [] if outcome.rms is None else outcome.rms.tolist()
        return {
            "update_rms": {names[i]: v for i, v in zip(outcome.matrices, values)},
            "full_step": outcome.full,
            "finite": bool(outcome.finite),
            # Wholly or in part, because of non-finite gradients.
            "skipped": int(self._skipped),
            "step_bytes": self.step_bytes(),
            "kernels": self._kernels.report(),
        }

    def step_bytes(self) -> dict[str, int]:
        """Bytes beside weights, gradients and optimizer state that a full step takes, by purpose.

        "operands" to "assembly" are allocated once and kept (see `buffer_elements`), and so are
        "newton_schulz", the workspace of `Orthogonalizer`, and "commit", the copy of a chunk of
        momentum that masks take. Of the others one is alive at a time: "norms" for float64 copies
        of blocks whose norms are taken (on a CPU), "updates" while an owner computes, a float32
        copy of half-precision updates for their RMS; "block_step" for what "updates" is there.
        """
        found = self._state.nbytes()
        itemsize = self._settings.ns_dtype.itemsize
        for purpose, elements in self._runtime.buffer_elements().items():
            found[purpose] = elements * itemsize
        found["newton_schulz"] = self._kernels.nbytes
        found["norms"] = 8 * self._operands.largest_run if self._state.device.type == "cpu" else 0
        mine = [u.numel for u in self._runtime.units if u.owner == self._runtime.transport.rank]
        found["updates"] = 0 if itemsize >= 4 else 4 * max(mine, default=0)
        if not self._settings.schedule.always_full:
            sizes = [math.prod(stack.shape) for stack in self._block_stacks]
            found["block_step"] = 0 if itemsize >= 4 else 4 * max(sizes, default=0)
        return found

    def before_state_dict(self) -> None:
        """Everything is in the optimizer's state already."""

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.check(saved)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.load(saved)


# ---- what a rank keeps -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of matrix ``matrix``, of param group ``group``.

    ``index`` takes it out of the local part of its parameter (None: it is all of it). ``rows`` and
    ``cols`` are its own; ``is_whole`` says that they are the matrix's. ``travels``: it has an owner
    elsewhere or other holders, so in a full step its norm is shared and its operand sent.
    ``counts``: among the replicas of the matrix, this rank's is the one that sends.
    """

    matrix: int
    parameter: int
    group: int
    index: tuple[slice, ...] | None
    rows: int
    cols: int
    is_whole: bool
    travels: bool
    counts: bool


def _blocks(runtime: ShardedRuntime, groups: Sequence[int]) -> Iterator[Block]:
    shards, rank, plan = runtime.shards, runtime.transport.rank, runtime.plan
    for i, matrix in enumerate(plan.specs.matrices):
        piece = shards.piece(i, rank)
        if not piece.numel:
            continue
        box, local = shards.boxes[i], shards.local_box(rank, matrix.parameter)
        rows, cols = box.matrix_shape(piece.box.shape)
        low = tuple(a + b for a, b in zip(box.box.offset, piece.box.offset, strict=True))
        here = tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(low, local.offset, piece.box.shape, strict=True)
        )
        yield Block(
            matrix=i,
            parameter=matrix.parameter,
            group=groups[i],
            index=None if piece.numel == local.numel else here,
            rows=rows,
            cols=cols,
            is_whole=(rows, cols) == matrix.shape,
            travels=not shards.is_local(i),
            counts=piece.replica == shards.replica_of(i, plan.owners[i]),
        )


class ShardState:
    """Blocks with views of weights and momentum, lists in the order of ``blocks``.

    With ``masters`` momentum is float32, and ``targets`` are float32 weights behind parameters of
    lower precision.
    """

    def __init__(
        self, runtime: ShardedRuntime, optimizer: Optimizer, groups: Sequence[int], masters: bool
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._masters = masters
        self.blocks = list(_blocks(runtime, groups))
        self.block_of = {block.matrix: k for k, block in enumerate(self.blocks)}
        self._muon = runtime.plan.specs.muon_parameters()
        for i in self._muon:
            p = runtime.parameters[i].detach()
            self._state(i)["momentum_buffer"] = torch.zeros_like(
                p,
                dtype=torch.float32 if masters else p.dtype,
                memory_format=torch.contiguous_format,
            )
        self._look_up()
        sizes: dict[torch.dtype, int] = {}
        for view in self.momentum:
            sizes[view.dtype] = sizes.get(view.dtype, 0) + view.numel()
        self.device = self.momentum[0].device if self.momentum else runtime.parameters[0].device
        # Of one size with the momentum; each kind of step lays out its operands in it anew.
        self.workspace = {
            dtype: torch.empty(size, dtype=dtype, device=self.device)
            for dtype, size in sizes.items()
        }
        self.chunk_bytes = CHUNK_BYTES.get(self.device.type, _DEVICE_CHUNK_BYTES)
        self._memory: dict[torch.dtype, Tensor] = {}

    def memory_for(self, dtype: torch.dtype, numel: int) -> Tensor:
        """``numel`` elements to copy the momentum of a chunk to; the same at every call."""
        if dtype not in self._memory:
            largest = max(m.numel() for m in self.momentum if m.dtype is dtype)
            size = min(self.workspace[dtype].numel(), self.chunk_bytes // dtype.itemsize + largest)
            self._memory[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self._memory[dtype].narrow(0, 0, numel)

    def nbytes(self) -> dict[str, int]:
        """Bytes that a step takes beside what is saved, by purpose."""
        found = {"operands": sum(memory.nbytes for memory in self.workspace.values())}
        if self._memory:
            found["commit"] = sum(memory.nbytes for memory in self._memory.values())
        return found

    # ---- views ---------------------------------------------------------------------------

    def _state(self, parameter: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[self._runtime.parameters[parameter]]
        return state

    def _of_blocks(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """The view of every block in the local tensor of its parameter."""
        return [
            whole[b.parameter] if b.index is None else whole[b.parameter][b.index]
            for b in self.blocks
        ]

    def _look_up(self) -> None:
        """Find where weights and momentum lie."""
        self._version = self._runtime.locals.version
        weights = {i: self._runtime.locals.tensors[i] for i in self._muon}
        self.weights = self.targets = self._of_blocks(weights)
        self.momentum = self._of_blocks(
            {i: stored_tensor(self._state(i)["momentum_buffer"]) for i in self._muon}
        )
        if self._masters and any("master_weight" in self._state(i) for i in self._muon):
            self.targets = self._of_blocks(
                {i: stored_tensor(self._state(i).get("master_weight", weights[i])) for i in weights}
            )

    def begin_step(self) -> None:
        """Someone may have moved a parameter's storage; called once a step."""
        if self._version != self._runtime.locals.version:
            self._look_up()

    def gradients_of_blocks(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradient of every block, zeros where there is none, from local ones by parameter."""
        found = []
        for k, b in enumerate(self.blocks):
            grad = grads[b.parameter]
            if grad is None:
                grad = self.momentum[k].new_zeros(()).expand(self.momentum[k].shape)
            elif b.index is not None:
                grad = grad[b.index]
            found.append(grad)
        return found

    # ---- masters -------------------------------------------------------------------------

    def make_masters(self) -> None:
        """Float32 weights behind parameters of lower precision, made at the first step, so that
        weights loaded before it count."""
        if not self._masters:
            return
        for i in self._muon:
            state, p = self._state(i), self._runtime.parameters[i]
            if "master_weight" not in state and p.dtype.itemsize < 4:
                state["master_weight"] = p.detach().float()
        if self.targets is self.weights:
            self._look_up()

    # ---- saved state ---------------------------------------------------------------------

    def check(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise OwnershipError if a matrix parameter has no momentum of its shape."""
        for i in self._muon:
            p, spec = self._runtime.parameters[i], self._runtime.plan.specs.parameters[i]
            source = saved.get(p, {}).get("momentum_buffer")
            if not isinstance(source, Tensor) or source.shape != p.shape:
                found = "none" if source is None else getattr(source, "shape", type(source))
                raise OwnershipError(
                    f"the optimizer state has no momentum for parameter {spec.name!r} of shape "
                    f"{list(p.shape)} (found: {found}); it was saved by another model or layout"
                )

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy saved entries (see `check`), those of AdamW's parameters too."""
        for p in self._runtime.parameters:
            state, entry = self._optimizer.state[p], saved.get(p, {})
            if "exp_avg" in state and "exp_avg" not in entry:
                for value in state.values():  # it had no gradient before the state was saved
                    local_tensor(value).zero_()
                continue
            if self._masters and "master_weight" in entry and "master_weight" not in state:
                state["master_weight"] = torch.empty_like(p.detach(), dtype=torch.float32)
            if "momentum_buffer" in state and "master_weight" not in entry:
                state.pop("master_weight", None)  # made anew at the next step
            for key in state:
                _copy_state(state[key], torch.as_tensor(entry[key]))
        self._look_up()


def _copy_state(target: Tensor, source: Tensor) -> None:
    """Copy a saved tensor, whether it was saved with the shards of ``target`` or otherwise."""
    stamps = layout_stamp(target), layout_stamp(source)
    if (stamps[0].placements, stamps[0].mesh) == (stamps[1].placements, stamps[1].mesh):
        local_tensor(target).copy_(local_tensor(source))
        return
    assert math.prod(target.shape) == math.prod(source.shape)
    target.copy_(source)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks ``blocks`` of one param group and dtype, which are worked on together.

    ``operands`` are their views of the workspace. ``runs`` are equal blocks that follow each other:
    (first position, all their operands ``[count, numel]``).
    """

    group: int
    dtype: torch.dtype
    first: int
    blocks: list[int]
    operands: list[Tensor]
    runs: list[tuple[int, Tensor]]

    @property
    def numel(self) -> int:
        return sum(flat.numel() for _, flat in self.runs)


class Operands:
    """The operands of Newton-Schulz in the order of a step: position n is block ``order[n]``."""

    def __init__(self, state: ShardState, order: Sequence[int]) -> None:
        self._state = state
        self.order = list(order)
        self.position_of = {k: n for n, k in enumerate(self.order)}
        self._starts = []
        ends = dict.fromkeys(state.workspace, 0)
        for k in self.order:
            momentum = state.momentum[k]
            self._starts.append(ends[momentum.dtype])
            ends[momentum.dtype] += momentum.numel()
        self._chunks = [self._chunk(first, last) for first, last in self._cuts(state.chunk_bytes)]
        self._norms = torch.zeros(len(self.order), dtype=torch.float64, device=state.device)
        self._made: dict[int, tuple[list[tuple[int, Tensor]], list[Tensor]]] = {}

    def _kind(self, position: int) -> tuple[int, torch.dtype]:
        k = self.order[position]
        return self._state.blocks[k].group, self._state.momentum[k].dtype

    def _cuts(self, limit: int) -> Iterator[tuple[int, int]]:
        first = size = 0
        for n, k in enumerate(self.order):
            if n > first and (size >= limit or self._kind(n) != self._kind(first)):
                yield first, n
                first, size = n, 0
            size += self._state.momentum[k].nbytes
        if self.order:
            yield first, len(self.order)

    def _chunk(self, first: int, last: int) -> _Chunk:
        blocks = self.order[first:last]
        runs = self.runs(first, last)
        operands = [self.stack(n, n + 1)[0] for n in range(first, last)]
        return _Chunk(*self._kind(first), first, blocks, operands, runs)

    def stack(self, first: int, last: int) -> Tensor:
        """The operands of equal blocks at these positions, ``[count, *dims of the parameter]``."""
        like = self._state.momentum[self.order[first]]
        flat = self._state.workspace[like.dtype]
        return flat.narrow(0, self._starts[first], (last - first) * like.numel()).view(
            last - first, *like.shape
        )

    def runs(self, first: int, last: int) -> list[tuple[int, Tensor]]:
        """Equal blocks that follow each other from ``first`` on: (position, ``[count, numel]``)."""
        momentum = self._state.momentum
        cuts, start = [first], first
        for n in range(first + 1, last):
            view, before = momentum[self.order[n]], momentum[self.order[n - 1]]
            is_full = (n + 1 - start) * view.nbytes > self._state.chunk_bytes
            if is_full or (view.dtype, view.numel()) != (before.dtype, before.numel()):
                cuts.append(n)
                start = n
        found = []
        for a, b in pairwise([*cuts, last]):
            view = momentum[self.order[a]]
            flat = self._state.workspace[view.dtype].narrow(
                0, self._starts[a], (b - a) * view.numel()
            )
            found.append((a, flat.view(b - a, view.numel())))
        return found

    @property
    def largest_run(self) -> int:
        """Elements of the largest run whose norms are taken together."""
        return max((flat.numel() for c in self._chunks for _, flat in c.runs), default=0)

    # ---- a step --------------------------------------------------------------------------

    def fill(self, grads: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Momentum and Nesterov into the workspace; the momentum itself stays as it is.

        Returns the norm of every operand, by position, in float64: the square of 1e30 overflows in
        float32, and long sums in float32 are off. Valid until the next call.
        """
        momentum, norms = self._state.momentum, self._norms
        for chunk in self._chunks:
            operands_of_newton_schulz(
                chunk.operands,
                [momentum[k] for k in chunk.blocks],
                [grads[k] for k in chunk.blocks],
                groups[chunk.group],
            )
            for first, flat in chunk.runs:
                out = norms.narrow(0, first, len(flat))
                torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64, out=out)
        return norms

    def scales(self, norms: Tensor, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """One over each norm, or over its group's eps where that is larger."""
        wide = torch.float64 if torch.float64 in self._state.workspace else torch.float32
        scales = norms.clone()
        for chunk in self._chunks:
            own = scales.narrow(0, chunk.first, len(chunk.blocks))
            own.clamp_(min=float(groups[chunk.group]["eps"])).reciprocal_()
        return scales.to(wide)

    def commit(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        bad: Tensor | None,
    ) -> None:
        """Advance the momentum. ``bad``: a bool, or one by position; where it is true the momentum
        stays as it is, whatever the gradient."""
        momentum = self._state.momentum
        for number, chunk in enumerate(self._chunks):
            buffers = [momentum[k] for k in chunk.blocks]
            found = [grads[k] for k in chunk.blocks]
            if any(grad.dtype is not chunk.dtype for grad in found):
                found = [grad.to(chunk.dtype) for grad in found]
            if bad is None:
                advance_momentum(buffers, found, groups[chunk.group])
                continue
            runs, copies = self._copies(number)
            torch._foreach_copy_(copies, buffers)
            advance_momentum(copies, found, groups[chunk.group])
            mask(runs, bad)
            own = bad.narrow(0, chunk.first, len(buffers)) if bad.ndim else bad
            scale_all(buffers, own.float())  # by one or by zero, which is exact
            torch._foreach_add_(buffers, copies)

    def _copies(self, number: int) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
        """Memory for the momentum of a chunk: as runs, and block by block."""
        if number not in self._made:
            chunk = self._chunks[number]
            memory = self._state.memory_for(chunk.dtype, chunk.numel)
            flats = memory.split([flat.numel() for _, flat in chunk.runs])
            runs = [
                (first, copy.view(flat.shape))
                for (first, flat), copy in zip(chunk.runs, flats, strict=True)
            ]
            views = [view for _, flat in runs for view in flat.unbind()]
            shaped = [view.view_as(o) for view, o in zip(views, chunk.operands, strict=True)]
            self._made[number] = runs, shaped
        return self._made[number]

    def prepare_masks(self) -> None:
        """Have the memory that `commit` takes where it is given ``bad``."""
        for number in range(len(self._chunks)):
            self._copies(number)


def mask(runs: Sequence[tuple[int, Tensor]], bad: Tensor) -> None:
    """Zero the blocks that are bad: a bool, or one by position; ``runs`` as of `Operands.runs`."""
    for first, stack in runs:
        own = (
            bad.narrow(0, first, len(stack)).view(-1, *(1,) * (stack.ndim - 1)) if bad.ndim else bad
        )
        stack.masked_fill_(own, 0.0)
