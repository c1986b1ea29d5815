"""Muon in the `sharded` layout: momentum on shards, Newton-Schulz at owners or on blocks.

A full step, on every rank::

    operands    momentum and Nesterov on the local blocks, into a workspace: nothing is changed yet
    verdict     one all-reduce: every matrix's squared norm, who has gradients, who found an inf
    pipeline    normalized blocks to the owners, Newton-Schulz there, updates back to the blocks;
                while the first buckets travel: the momentum, what lies here alone, AdamW

Where every rank holds all matrices whole, the first Newton-Schulz runs while the verdict travels.

A block step (MuonBP, arXiv 2510.16981, Algorithm 1) orthogonalizes blocks by themselves, without
any collective.

Where the host cannot read from the device without waiting, every decision is a mask there: what is
bad gets an operand of zeros, hence an update of zeros, and neither momentum nor decay.

A *block* is what this rank holds of one matrix. The operands of Newton-Schulz of all blocks lie in
one workspace, in the order in which a step needs them (`Operands`), so that what is equal is done
for many blocks in one call: norms, scaling, casts, masks.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import adamw_step, make_adamw_state
from dmuon.comm.routes import Message, Part, parts_of, places
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import Work, host_can_read
from dmuon.dtensors import distributed_as, local_tensor, stored_tensor, whole_tensor
from dmuon.kernels.newton_schulz import into_range
from dmuon.kernels.ops import Peers
from dmuon.kernels.runner import Call, SliceCall
from dmuon.scheduler.costs import largest_batch
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import Box, Form
from dmuon.step.engine import SUSPECTS, Amp, Engine, load_entry
from dmuon.step.verdict import Verdict, VerdictMessage, own_verdict, suspects
from dmuon.step.verify import Stored
from dmuon.types import DmuonError, Layout, NewParameters
from dmuon.update import (
    advance_momentum,
    apply_updates,
    finite_marks,
    merged_master,
    norms_into,
    operands_of_newton_schulz,
    scale_all,
    scale_into,
    squares_fit,
    update_rms,
)

_BLOCK_BATCH = 16  # blocks of one shape that are orthogonalized together

# What is worked on together: on a CPU a few passes over so much stay in its caches, elsewhere it
# bounds the copy that a masked update of momentum takes.
CHUNK_BYTES = {"cpu": 1 << 18}
_DEVICE_CHUNK_BYTES = 1 << 28

Gradients = Sequence[Tensor | None]
Bad = TypeVar("Bad", Tensor, Tensor | None)


@dataclass(slots=True)
class _Outcome:
    """What a step did. ``squares[n]`` is the mean square of the update of matrix ``matrices[n]``,
    once ``work`` is done; ``finite`` is that of `Verdict`."""

    full: bool = True
    finite: bool | Tensor = True
    matrices: Sequence[int] = ()
    squares: Tensor | None = None
    work: Work | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(frozen=True, slots=True)
class _Landing:
    """Blocks of one param group whose matrices have one shape, with views of where their updates
    land. ``positions`` [blocks] is for masks."""

    group: int
    rows: int
    cols: int
    blocks: list[int]
    updates: list[Tensor]
    positions: Tensor


class _Stack:
    """A unit that this rank orthogonalizes: ``index`` [b] are its matrices, ``turned`` [b] says
    which slots hold the transpose (None: none of them).

    Of one that is made and applied here alone, ``parts`` are (first position, part, operands of the
    part), at position ``first`` and on; ``lr_ratio`` is that of blocks in a block step.
    """

    def __init__(
        self,
        unit: Unit,
        device: torch.device,
        parts: Sequence[Part] = (),
        operands: Operands | None = None,
        first: int = 0,
        lr_ratio: float = 1.0,
    ) -> None:
        self.unit = unit
        self.lr_ratio = lr_ratio
        self.index = _index(unit.matrices, device)
        self.shape = unit.rows, unit.cols  # of whole matrices
        self.numbers = self.index  # of their norms, where there are co-owners
        self.turned = torch.tensor(unit.transposed, device=device) if unit.transposed else None
        self.parts: list[tuple[int, Part, Tensor]] = []
        for part in parts:
            assert operands is not None
            start = first + part.position
            self.parts.append((start, part, operands.stack(start, start + len(part.matrices))))


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _pieces(buffer: Tensor, message: Message) -> Iterator[tuple[int, Tensor]]:
    """(matrix, its piece in the buffer) of a message."""
    for part in message.parts:
        yield from zip(part.matrices, part.within(buffer).unbind(), strict=True)


class ShardedEngine(Engine):
    """The engine of `ShardedRuntime`."""

    _runtime: ShardedRuntime

    def _bind(self) -> None:
        runtime, masters = self._runtime, self._settings.master_weights
        self._rank = runtime.transport.rank
        self._outcome = _Outcome()
        self._grads: list[Tensor | None] = []
        self._amp = Amp()
        hooks = self._settings.publish == "async"
        runtime.bind(self._group_of, self._settings.ns_dtype, hooks)
        self._state = ShardState(runtime, self._optimizer, self._group_of, masters)
        for _, p in chain.from_iterable(self._adamw.values()):
            # Made now, so that every rank saves the same keys.
            make_adamw_state(p, self._optimizer.state, masters)
        self._bind_full_step()
        self._bind_block_step()
        if not host_can_read(runtime.device):
            self._operands.copies  # noqa: B018  made now, because every step needs them
        buckets = runtime.bound().buckets
        stacks = chain.from_iterable(bucket.stacks[bucket.shared :] for bucket in buckets)
        self._kernels.reserve(
            [self._call(stack.unit) for stack in (*self._local, *self._block_stacks)],
            [(self._call(runtime.units[u]), operands) for u, operands in stacks],
            [self._slices(bucket.stacks[: bucket.shared]) for bucket in buckets],
            capture=True,
        )

    # ---- once ----------------------------------------------------------------------------

    def _bind_full_step(self) -> None:
        """Lay out the operands in the order in which they leave; then what stays; then replicas."""
        runtime, state = self._runtime, self._state
        buckets = runtime.bound().buckets
        sent = [[i for part in b.route.blocks.parts for i in part.matrices] for b in buckets]
        local = [u for u in runtime.units if runtime.is_local(u) and u.owner == self._rank]
        order = [state.block_of[i] for i in chain(*sent, *(unit.matrices for unit in local))]
        others = sorted(set(range(len(state.blocks))) - set(order))
        every = order if self._settings.schedule.always_full else order + others
        state.reserve(every, self._settings.ns_dtype)
        self._operands = operands = Operands(state, order, others)
        blocks = [state.blocks[k] for k in operands.order]
        self._message = VerdictMessage(
            runtime.plan.specs,
            runtime.shards,
            runtime.transport,
            runtime.device,
            self._settings.schedule,
            self._settings.accepted,
            self._group_of,
            [b.matrix for b in blocks],
            [b.counts for b in blocks],
            alike=runtime.plan.layout is Layout.REPLICATED,
        )
        self._fills: list[list[tuple[int, Tensor, Tensor]]] = []  # (first, operands, places)
        self._landings: list[list[_Landing]] = []
        first = 0
        for bucket, matrices in zip(buckets, sent, strict=True):
            runs = operands.runs(first, first + len(matrices))
            views = bucket.send.split([flat.numel() for _, flat in runs])
            self._fills.append([(n, x, v.view(x.shape)) for (n, x), v in zip(runs, views)])
            first += len(matrices)
            landing = chain.from_iterable(_pieces(*each) for each in bucket.landings)
            self._landings.append(self._landings_of(landing))
        self._local = []
        for unit in local:
            boxes = [runtime.shards.piece(i, self._rank).box for i in unit.matrices]
            shapes = [runtime.shards.boxes[i].box.shape for i in unit.matrices]
            turned = map(unit.holds_transpose, range(len(boxes)))
            pieces = zip(range(len(boxes)), unit.matrices, shapes, turned, boxes)
            parts = parts_of(runtime.shards, -1, pieces)
            self._local.append(_Stack(unit, runtime.device, parts, operands, first))
            first += len(unit.matrices)
        owned = chain.from_iterable(bucket.route.units for bucket in buckets)
        self._owned = {u: _Stack(runtime.units[u], runtime.device) for u in owned}
        for stack in self._owned.values():
            if stack.unit.co_owners:
                long = max(runtime.plan.specs.matrices[stack.unit.matrices[0]].shape)
                stack.shape = stack.unit.rows, long
                stack.numbers = self._message.numbers_of(stack.unit.matrices)

    def _landings_of(self, landing: Iterator[tuple[int, Tensor]]) -> list[_Landing]:
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
            positions = _index([self._operands.position_of[k] for k in blocks], state.device)
            found.append(_Landing(group, rows, cols, blocks, [u for _, u in members], positions))
        return found

    def _bind_block_step(self) -> None:
        self._block_stacks: list[_Stack] = []
        self._block_operands = self._operands
        if self._settings.schedule.always_full:
            return
        state, boxes = self._state, self._runtime.shards.boxes
        alike: dict[tuple[int, bool, Form, tuple[int, ...]], list[int]] = defaultdict(list)
        for k, b in enumerate(state.blocks):
            form, shape = boxes[b.matrix].form, tuple(state.momentum[k].shape)
            alike[b.group, b.is_whole, form, shape].append(k)
        self._block_operands = Operands(state, [*chain.from_iterable(alike.values())])
        ratio = self._settings.block_lr_ratio
        for (group, is_whole, form, shape), equal in alike.items():
            # A matrix that is whole here always takes full steps.
            own = 1.0 if is_whole or ratio is None else ratio
            block = state.blocks[equal[0]]
            most = largest_batch(block.rows, block.cols, _BLOCK_BATCH, self._runtime.batch_numel)
            for start in range(0, len(equal), most):
                some = [state.blocks[k] for k in equal[start : start + most]]
                matrices = tuple(b.matrix for b in some)
                # Here a block is a whole by itself.
                part = Part(-1, 0, matrices, Box.at_origin(shape), shape, form, False)
                unit = Unit(self._rank, group, matrices, some[0].rows, some[0].cols, 0.0)
                first = self._block_operands.position_of[equal[start]]
                self._block_stacks.append(
                    _Stack(unit, self._runtime.device, [part], self._block_operands, first, own)
                )

    # ---- a step --------------------------------------------------------------------------

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        self._message.raise_noted()
        self._tell_of_skipped(self._amp, self._late_names)
        self._tell_of_eps()
        self._outcome.wait()
        self._amp = amp
        try:
            self._runtime.reduce_gradients()
            self._grads = self._runtime.local_gradients()
        except DmuonError as error:
            refusal = refusal or error  # perhaps on this rank alone
        if refusal is not None:
            return refusal
        self._state.begin_step()
        present = [g for g in self._grads if g is not None]
        if amp.scale is not None and present:
            # A tensor, because reading it would wait for the device.
            scale_all(present, amp.scale.reciprocal().to(present[0].device))
        return None

    def launch(self, refusal: Exception | None) -> None:
        grads, self._grads = self._grads, []
        is_full = self._settings.schedule.is_full(self._settings.schedule.t)
        if refusal is not None:
            if is_full:
                self._refuse(refusal)
            raise refusal
        if not any(grad is not None for grad in grads) and not self._settings.schedule.t:
            warnings.warn(
                "dmuon: no parameter has a gradient at the first step. If the model was sharded or "
                "wrapped since dmuon.Muon got its parameters, they are no longer the model's: pass "
                "the module itself, dmuon.Muon(model), or make the optimizer afterwards",
                stacklevel=5,
            )
        self._begin_update()
        step = self._full_step if is_full else self._block_step
        outcome = step(grads, [grad is not None for grad in grads])
        if outcome is None or not is_full:
            self._runtime.pass_by()
        self._outcome = outcome or _Outcome(is_full, finite=False)
        self._finite = finite = self._outcome.finite
        skipped = finite.logical_not() if isinstance(finite, Tensor) else not finite
        self._skipped = self._skipped + skipped
        if is_full:
            self._late = 0
            if host_can_read(self._runtime.device):
                self._tell_of_skipped(self._amp, self._late_names)
                self._tell_of_eps()
            self._late_names = []
        elif self._settings.nonfinite == "raise":
            self._late = self._late + skipped

    def update_others(self) -> None:
        """AdamW ran while the first buckets travelled."""

    def finish(self) -> None:
        if self._outcome.full:  # a block step issues no collective, and this may
            super().finish()

    def _refuse(self, refusal: Exception) -> None:
        """Take part in a full step in which nothing changes, and which the other ranks know by."""
        runtime = self._runtime
        vector = self._message.refuse(is_new=isinstance(refusal, NewParameters))
        runtime.all_reduce(vector, "norms").wait()
        if isinstance(refusal, NewParameters):
            refusal.agreed = self._message.all_are_new(vector)
            if refusal.agreed:
                return
        spread = self._message.compare(())
        if host_can_read(runtime.device):
            return
        self._message.note(vector, spread)
        # They cannot know yet: their blocks travel as zeros.
        buckets = runtime.bound().buckets

        def fill(b: int) -> None:
            buckets[b].send.zero_()

        runtime.run(
            fill,
            lambda u, operand: operand.zero_(),
            lambda b: None,
            lambda: None,
            share=lambda stacks: self._kernels.run_together(
                self._slices(stacks), [torch.ones(len(x), device=x.device) for _, x in stacks]
            ),
        )
        squares = torch.zeros(len(runtime.plan.specs.matrices), device=runtime.device)
        runtime.all_reduce(squares, "rms").wait()
        self._outcome = _Outcome(finite=False)

    def _full_step(self, grads: Gradients, here: Sequence[bool]) -> _Outcome | None:
        """Take the step; the updates of the last buckets are applied later. None: nothing was done,
        because a gradient is not finite."""
        runtime, operands, groups = self._runtime, self._operands, self._groups
        of_blocks = self._state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, groups)
        inf = self._amp.found_inf
        if isinstance(self._late, Tensor) or self._late:
            inf = torch.as_tensor(self._late, dtype=torch.float64, device=runtime.device)
        vector, sent = self._message.fill(norms, self._peaks(grads), here, inf)
        work = runtime.all_reduce(sent, "norms")

        def agreed() -> Verdict | None:
            work.wait()
            spread = self._message.compare(grads)
            return self._message.read(vector, norms, here, spread)

        # With every gradient, and whole matrices, the first Newton-Schulz need not wait for it.
        on_host = host_can_read(runtime.device)
        is_ahead = runtime.bound().only_publishes and on_host and all(here)
        # Who waits for the verdict first must not be waited for in a sum.
        is_ahead = is_ahead and not runtime.plan.has_co_owners
        verdict = Verdict(True) if is_ahead else agreed()
        if verdict is None:
            return None
        bad = verdict.bad
        scales = operands.scales(norms, groups)
        matrices = range(len(runtime.plan.specs.matrices))
        squares = torch.zeros(len(matrices), dtype=torch.float32, device=runtime.device)

        def fill(b: int) -> None:
            for first, flat, to in self._fills[b]:
                _fill(to, flat, scales, bad, first)

        def compute(u: int, operand: Tensor) -> Tensor:
            stack = self._owned[u]
            update = self._orthogonalize(self._call(stack.unit), operand)
            squares.index_copy_(0, stack.index, self._squares(stack, update))
            return update

        def share(stacks: list[tuple[int, Tensor]]) -> list[Tensor]:
            # As their holders have scaled them.
            found = [self._message.norms_of(vector, self._owned[u].numbers) for u, _ in stacks]
            eps = [float(groups[runtime.units[u].group]["eps"]) for u, _ in stacks]
            scaled = [norms * into_range(norms, own) for norms, own in zip(found, eps, strict=True)]
            self._telemetry.watch.start()
            updates = self._kernels.run_together(self._slices(stacks), scaled)
            self._telemetry.watch.stop()
            for (u, _), update in zip(stacks, updates, strict=True):
                stack = self._owned[u]
                squares.index_copy_(0, stack.index, self._squares(stack, update))
            return updates

        def apply(b: int) -> None:
            for landing in self._landings[b]:
                own = bad
                if bad is not None and bad.ndim:
                    own = bad.index_select(0, landing.positions)
                rate = self._rates[landing.group]
                lr = rate.adjusted(landing.rows, landing.cols)
                self._apply(landing.blocks, landing.updates, rate.decay, lr, own)

        def meanwhile() -> None:
            operands.commit(of_blocks, groups, bad)
            for stack in self._local:
                own = self._step_alone(stack, operands, scales, bad)
                squares.index_copy_(0, stack.index, own)
            self._update_adamw(grads, verdict)

        def may_send() -> bool:
            return agreed() is not None

        may = may_send if is_ahead else None
        if not runtime.run(fill, compute, apply, meanwhile, may, share):
            return None
        work = runtime.all_reduce(squares, "rms")
        return _Outcome(True, verdict.finite, matrices, squares, work)

    def _block_step(self, grads: Gradients, here: Sequence[bool]) -> _Outcome | None:
        state, operands, groups = self._state, self._block_operands, self._groups
        of_blocks = state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, groups)
        blocks = [state.blocks[k] for k in operands.order]
        matrices, peaks = [b.matrix for b in blocks], self._peaks(grads)
        verdict = own_verdict(
            norms,
            [b.parameter for b in blocks],
            peaks,
            here,
            self._amp.found_inf,
            self._runtime.device,
        )
        if verdict is None:
            return None
        scales = operands.scales(norms, groups)
        operands.commit(of_blocks, groups, verdict.bad)
        own = [self._step_alone(s, operands, scales, verdict.bad) for s in self._block_stacks]
        self._update_adamw(grads, verdict)
        if verdict.finite is False:  # the host knows
            found = [(of, ~marks.isfinite()) for of, marks in ((matrices, norms), *peaks)]
            self._late_names += suspects(self._runtime.plan.specs, *found)
            del self._late_names[SUSPECTS:]
        return _Outcome(False, verdict.finite, matrices, torch.cat(own) if own else None)

    # ---- Newton-Schulz -------------------------------------------------------------------

    def _orthogonalize(self, call: Call, operand: Tensor) -> Tensor:
        """Newton-Schulz on normalized matrices ``[b, rows, cols]``, which are overwritten; the
        result is valid until the next call."""
        self._telemetry.watch.start()
        update = self._kernels.run(call, operand)
        self._telemetry.watch.stop()
        return update

    def _momentum(self) -> Mapping[int, Tensor]:
        state = self._state
        return {b.matrix: m for b, m in zip(state.blocks, state.momentum, strict=True)}

    def _peers(self, ranks: tuple[int, ...]) -> Peers:
        exchange = partial(self._runtime.exchange, ranks)
        return Peers(self._runtime.index_among(ranks), len(ranks), exchange)

    def _slices(self, stacks: Iterable[tuple[int, Tensor]]) -> list[tuple[SliceCall, Tensor]]:
        runtime = self._runtime
        units = [(runtime.units[u], stack) for u, stack in stacks]
        return [
            (SliceCall(self._call(unit), self._peers(unit.co_owners), unit.split), stack)
            for unit, stack in units
        ]

    def _squares(self, stack: _Stack, update: Tensor) -> Tensor:
        """The mean squares of the updates of a unit, ``[b]``; of a slice its share of them."""
        rate = self._rates[stack.unit.group]
        rows, cols = stack.shape
        factor: float | Tensor = rate.ratio(rows, cols) * stack.lr_ratio
        if stack.turned is not None:
            factor = torch.where(stack.turned, rate.ratio(cols, rows), factor)
        return update_rms(update, factor).square_().mul_(stack.unit.cols / cols)

    def _step_alone(
        self, stack: _Stack, operands: Operands, scales: Tensor, bad: Tensor | None
    ) -> Tensor:
        """Orthogonalize and apply what needs nobody else; the `_squares` of the updates."""
        unit, rate = stack.unit, self._rates[stack.unit.group]
        call = self._call(unit)
        batch = self._kernels.operand(call)
        for first, part, source in stack.parts:
            _fill(places(batch, part), source, scales, bad, first)
        update = self._orthogonalize(call, batch)
        for first, part, source in stack.parts:
            rows, cols = (unit.cols, unit.rows) if part.transposed else (unit.rows, unit.cols)
            blocks = operands.order[first : first + len(source)]
            lr = rate.adjusted(rows, cols) * stack.lr_ratio
            updates = [*places(update, part).unbind()]
            self._apply(blocks, updates, rate.decay, lr, _at(bad, first, len(source)))
        return self._squares(stack, update)

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
        weights = None
        if state.targets is not state.weights:
            weights = [state.weights[k] for k in blocks]
        factor = decay if bad is None else torch.where(bad.to(where), 1.0, decay)
        on_host = host_can_read(where)
        apply_updates(targets, updates, decay=factor, lr=lr, weights=weights, on_host=on_host)

    def _peaks(self, grads: Gradients) -> list[tuple[list[int], Tensor]]:
        """Numbers that are finite where AdamW's gradients are: the parameters and a vector."""
        found: dict[int, Tensor] = {}
        for i, _ in chain.from_iterable(self._adamw.values()):
            grad = grads[i]
            if grad is not None and grad.numel():
                found[i] = grad
        if not found:
            return []
        on_host = host_can_read(self._runtime.device)
        return [(list(found), finite_marks([*found.values()], on_host))]

    def _update_adamw(self, grads: Gradients, verdict: Verdict) -> None:
        """A gradient that is missing here, and not everywhere, counts as zero."""
        for g, params in self._adamw.items():
            joint: list[tuple[Tensor, Tensor]] = []
            # The fused form takes one flag for all parameters of a call.
            calls = [(verdict.skip, joint)]
            for i, p in params:
                if i in verdict.skipped:
                    continue
                grad = grads[i]
                pair = p, torch.zeros_like(local_tensor(p)) if grad is None else grad
                if i in verdict.flags:
                    calls.append((verdict.flags[i], [pair]))
                else:
                    joint.append(pair)
            for flag, pairs in calls:
                adamw_step(
                    self._groups[g],
                    self._optimizer.state,
                    [p for p, _ in pairs],
                    [grad for _, grad in pairs],
                    master_weights=self._settings.master_weights,
                    # On a CPU that form rounds an element as its place in a vector is.
                    fused=not (self._runtime.apart and host_can_read(self._runtime.device)),
                    found_inf=flag if flag is None or not pairs else flag.to(pairs[0][0].device),
                )

    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        p = self._runtime.parameters[parameter]
        grad = self._grads[parameter] if self._grads else None
        local = torch.zeros_like(local_tensor(p)) if grad is None else grad
        momentum = self._optimizer.state[p]["momentum_buffer"]
        return whole_tensor(momentum).clone(), whole_tensor(distributed_as(p, local))

    def stored(self, box: Box, parameter: int) -> Stored:
        found, shards = [], self._runtime.shards
        state = self._state
        for b, target, weight in zip(state.blocks, state.targets, state.weights, strict=True):
            if b.parameter == parameter and shards.boxes[b.matrix].box == box:
                local = shards.shard(self._rank, parameter).box
                now = target if target is weight else merged_master(target, weight)
                found.append((b.matrix, box.intersection(local), now))
        return found

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        self._runtime.synchronize()
        outcome = self._outcome
        outcome.wait()
        names = [m.name for m in self._runtime.plan.specs.matrices]
        values = [] if outcome.squares is None else outcome.squares.sqrt().tolist()
        return {
            "update_rms": {names[i]: v for i, v in zip(outcome.matrices, values)},
            "full_step": outcome.full,
            "finite": bool(outcome.finite),
            # Wholly or in part, because of non-finite gradients.
            "skipped": int(self._skipped),
            "below_eps": self._message.below_eps,
            "step_bytes": self.step_bytes(),
            "kernels": self._kernels.report(),
        }

    def step_bytes(self) -> dict[str, int]:
        """Bytes beside weights, gradients and optimizer state that a full step takes, by purpose.

        "operands" to "assembly" are allocated once and kept (see `Pipeline.nbytes`), and so are
        "newton_schulz", the workspace of `Orthogonalizer`, and "commit", the copy of a chunk of
        momentum that masks take. Of the others one is alive at a time: "norms" for wider copies of
        half-precision blocks whose norms are taken (on a CPU), "updates" while an owner computes, a
        float32 copy of half-precision updates for their RMS; "block_step" for what "updates" is
        there.
        """
        state, itemsize = self._state, self._settings.ns_dtype.itemsize
        found = {"operands": sum(memory.nbytes for memory in state.workspace.values())}
        if state.copies:
            found["commit"] = sum(memory.nbytes for memory in state.copies.values())
        found |= self._runtime.bound().nbytes
        found["newton_schulz"] = self._kernels.nbytes
        wide = 8 if not host_can_read(state.device) else 4 * (self._operands.narrowest < 4)
        found["norms"] = wide * self._operands.largest_run if state.device.type == "cpu" else 0

        def wide_bytes(units: Iterator[Unit]) -> int:
            return 0 if itemsize >= 4 else 4 * max((unit.numel for unit in units), default=0)

        found["updates"] = wide_bytes(u for u in self._runtime.units if u.owner == self._rank)
        if not self._settings.schedule.always_full:
            found["block_step"] = wide_bytes(stack.unit for stack in self._block_stacks)
        return found

    def saved_state(self) -> dict[Tensor, dict[str, Any]]:
        return self._entries_as_weights_are(self._runtime.parameters)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self._state.load(saved)


# ---- what a rank keeps -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of matrix ``matrix``, of param group ``group``.

    ``index`` takes it out of the local part of its parameter (None: it is all of it). ``rows`` and
    ``cols`` are its own; ``is_whole`` says that they are the matrix's. ``counts``: among the
    replicas of the matrix, this rank's is the one that sends.
    """

    matrix: int
    parameter: int
    group: int
    index: tuple[slice, ...] | None
    rows: int
    cols: int
    is_whole: bool
    counts: bool


def _blocks(runtime: ShardedRuntime, groups: Sequence[int]) -> Iterator[Block]:
    shards, rank, plan = runtime.shards, runtime.transport.rank, runtime.plan
    for i, matrix in enumerate(plan.specs.matrices):
        piece = shards.piece(i, rank)
        if not piece.numel:
            continue
        whole, local = shards.boxes[i], shards.shard(rank, matrix.parameter).box
        rows, cols = whole.matrix_shape(piece.box.shape)
        here = whole.box.intersection(local).within(local)
        yield Block(
            matrix=i,
            parameter=matrix.parameter,
            group=groups[i],
            index=None if piece.numel == local.numel else here.slices(),
            rows=rows,
            cols=cols,
            is_whole=(rows, cols) == matrix.shape,
            counts=piece.replica == shards.replica_of(i, plan.owners[i]),
        )


class ShardState:
    """Blocks with views of weights and momentum, lists in the order of ``blocks``.

    With ``masters`` momentum is float32, and ``targets`` are float32 weights behind parameters of
    lower precision, which follow them (see `follow_weights`).
    """

    def __init__(
        self, runtime: ShardedRuntime, optimizer: Optimizer, groups: Sequence[int], masters: bool
    ) -> None:
        self._runtime = runtime
        self.blocks = list(_blocks(runtime, groups))
        self.block_of = {block.matrix: k for k, block in enumerate(self.blocks)}
        self._optimizer = optimizer
        self._muon = runtime.plan.specs.muon_parameters()
        for i in self._muon:
            p = runtime.parameters[i].detach()
            entry = self._entry(i)
            if "momentum_buffer" in entry:  # it plans again
                continue
            if masters and p.dtype.itemsize < 4:
                entry["master_weight"] = p.float()
            entry["momentum_buffer"] = torch.zeros_like(
                p,
                dtype=torch.float32 if masters else p.dtype,
                memory_format=torch.contiguous_format,
            )
        self._look_up()
        self.device = self.momentum[0].device if self.momentum else runtime.parameters[0].device
        self.chunk_bytes = CHUNK_BYTES.get(self.device.type, _DEVICE_CHUNK_BYTES)
        # Each kind of step lays out its operands in it anew.
        self.workspace: dict[torch.dtype, Tensor] = {}
        self.copies: dict[torch.dtype, Tensor] = {}

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reserve(self, blocks: Sequence[int], ns_dtype: torch.dtype) -> None:
        """Make a workspace for the operands of these blocks, by the dtype of their momentum: in the
        Newton-Schulz dtype where that is narrower and there is a copy of a chunk anyway."""
        sizes: Counter[torch.dtype] = Counter({view.dtype: 0 for view in self.momentum})
        for k in blocks:
            sizes[self.momentum[k].dtype] += self.momentum[k].numel()
        narrows = not host_can_read(self.device)
        self.workspace = {
            dtype: self._empty(
                size, ns_dtype if narrows and ns_dtype.itemsize < dtype.itemsize else dtype
            )
            for dtype, size in sizes.items()
        }

    def copy_of_chunk(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for the momentum of a chunk; the same at every call."""
        if dtype not in self.copies:
            sizes = [m.numel() for m in self.momentum if m.dtype is dtype]
            most = self.chunk_bytes // dtype.itemsize + max(sizes)
            self.copies[dtype] = self._empty(min(sum(sizes), most), dtype)
        return self.copies[dtype].narrow(0, 0, numel)

    # ---- views ---------------------------------------------------------------------------

    def _entry(self, parameter: int) -> dict[str, Tensor]:
        entry: dict[str, Tensor] = self._optimizer.state[self._runtime.parameters[parameter]]
        return entry

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
        entries = {i: self._entry(i) for i in self._muon}
        self.weights = self.targets = self._of_blocks(weights)
        self.momentum = self._of_blocks(
            {i: stored_tensor(entry["momentum_buffer"]) for i, entry in entries.items()}
        )
        if any("master_weight" in entry for entry in entries.values()):
            self.targets = self._of_blocks(
                {i: stored_tensor(e.get("master_weight", weights[i])) for i, e in entries.items()}
            )

    def begin_step(self) -> None:
        """Someone may have moved a parameter's storage."""
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

    # ---- saved state ---------------------------------------------------------------------

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy saved entries, those of AdamW's parameters too."""
        for p in self._runtime.parameters:
            load_entry(p, self._optimizer.state[p], saved.get(p, {}))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks ``blocks`` of one param group and dtype, which are worked on together.

    ``operands`` are their views of the workspace. ``runs`` are equal blocks that follow each other:
    (first position, all their operands ``[count, numel]``). None of both for blocks without one.
    """

    group: int
    dtype: torch.dtype
    first: int
    blocks: list[int]
    operands: list[Tensor]
    runs: list[tuple[int, Tensor]]


def _cuts(kinds: Sequence[Hashable], sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours of one kind, closed once they have reached the limit.

    >>> list(_cuts("aaab", [2, 2, 2, 2], 4))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = size = 0
    for n, kind in enumerate(kinds):
        if n > first and (size >= limit or kind != kinds[first]):
            yield first, n
            first, size = n, 0
        size += sizes[n]
    if kinds:
        yield first, len(kinds)


class Operands:
    """The operands of Newton-Schulz in the order of a step: position n is block ``order[n]``.

    ``others`` come last. They have no operand: another replica has it, and their momentum follows.

    Where the workspace is narrower than momentum, an operand is computed in the copy of a chunk and
    scaled into the middle of the range by a power of two (``_moved``), which `scales` takes back.
    So it is rounded to its dtype's digits as if it were scaled by the norm of the whole matrix.
    """

    def __init__(self, state: ShardState, order: Sequence[int], others: Sequence[int] = ()) -> None:
        self._state = state
        self.order = [*order, *others]
        self._count = len(order)
        self.position_of = {k: n for n, k in enumerate(self.order)}
        views = [state.momentum[k] for k in self.order]
        self._shapes = [(view.dtype, view.shape) for view in views]
        self._sizes = [view.nbytes for view in views]
        self._starts = []
        ends = dict.fromkeys(state.workspace, 0)
        for view in views[: len(order)]:
            self._starts.append(ends[view.dtype])
            ends[view.dtype] += view.numel()
        kinds = [
            (state.blocks[k].group, view.dtype, n < len(order))
            for n, (k, view) in enumerate(zip(self.order, views, strict=True))
        ]
        self._chunks = []
        for first, last in _cuts(kinds, self._sizes, state.chunk_bytes):
            group, dtype, has_operand = kinds[first]
            here = range(first, last) if has_operand else ()
            stacks = [self.stack(n, n + 1)[0] for n in here]
            runs = self.runs(first, last) if has_operand else []
            blocks = self.order[first:last]
            self._chunks.append(_Chunk(group, dtype, first, blocks, stacks, runs))
        # Elements of the most blocks whose norms are taken together.
        self.largest_run = max((x.numel() for c in self._chunks for _, x in c.runs), default=0)
        self.narrowest = min((dtype.itemsize for dtype, _ in self._shapes), default=4)
        self._norms = torch.zeros(len(self.order), dtype=torch.float64, device=state.device)
        self._moved: Tensor | None = None
        if any(dtype is not memory.dtype for dtype, memory in state.workspace.items()):
            self._moved = torch.ones_like(self._norms)

    def stack(self, first: int, last: int) -> Tensor:
        """The operands of equal blocks at these positions, ``[count, *dims of the parameter]``."""
        dtype, shape = self._shapes[first]
        flat = self._state.workspace[dtype]
        numel = (last - first) * shape.numel()
        return flat.narrow(0, self._starts[first], numel).view(last - first, *shape)

    def runs(self, first: int, last: int) -> list[tuple[int, Tensor]]:
        """Equal blocks that follow each other there: (first position, ``[count, numel]``)."""
        return [(a, self.stack(a, b).flatten(1)) for a, b in self._equal(first, last)]

    def _equal(self, first: int, last: int) -> list[tuple[int, int]]:
        kinds = [(dtype, shape.numel()) for dtype, shape in self._shapes[first:last]]
        cuts = _cuts(kinds, self._sizes[first:last], self._state.chunk_bytes)
        return [(first + a, first + b) for a, b in cuts]

    # ---- a step --------------------------------------------------------------------------

    def fill(self, grads: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Momentum and Nesterov into the workspace; the momentum itself stays as it is.

        Returns the norm of every operand, by position, in float64: the square of 1e30 overflows in
        float32, and long sums in float32 are off. Valid until the next call. Of blocks without an
        operand it is a number that is finite where the gradient is.
        """
        momentum, norms = self._state.momentum, self._norms
        on_host = host_can_read(norms.device)
        for number, chunk in enumerate(self._chunks):
            if not chunk.operands:
                marks = finite_marks([grads[k] for k in chunk.blocks], on_host)
                norms.narrow(0, chunk.first, len(marks)).copy_(marks)
                continue
            runs, operands = chunk.runs, chunk.operands
            is_narrow = operands[0].dtype is not chunk.dtype
            if is_narrow:
                runs, operands = self.copies[number]
            operands_of_newton_schulz(
                operands,
                [momentum[k] for k in chunk.blocks],
                [grads[k] for k in chunk.blocks],
                groups[chunk.group],
            )
            for first, flat in runs:
                norms_into(norms.narrow(0, first, len(flat)), flat, exact=not on_host)
            if is_narrow:
                self._narrow(chunk, runs)
        if on_host and not bool(squares_fit(norms[: self._count]).all()):
            for first, flat in chain.from_iterable(chunk.runs for chunk in self._chunks):
                norms_into(norms.narrow(0, first, len(flat)), flat, exact=True)
        return norms

    def _narrow(self, chunk: _Chunk, runs: Sequence[tuple[int, Tensor]]) -> None:
        """Round the operands of a chunk, whose norms are known, into the workspace."""
        assert self._moved is not None
        here = slice(chunk.first, chunk.first + len(chunk.blocks))
        norms = self._norms[here]
        # No entry overflows in float16, and what is subnormal there vanishes beside the others.
        moved = torch.frexp(norms).mantissa.mul_(2.0**14).div_(norms)
        moved = torch.where(norms.isfinite() & (norms > 0), moved, 1.0).clamp_(2.0**-100, 2.0**100)
        self._moved[here].copy_(moved)
        moved = moved if chunk.dtype is torch.float64 else moved.float()
        for (first, flat), (_, to) in zip(runs, chunk.runs, strict=True):
            scale_into(to, flat, moved.narrow(0, first - chunk.first, len(flat)))

    def scales(self, norms: Tensor, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """`into_range` of each, as it lies in the workspace."""
        each = {chunk.first: float(groups[chunk.group]["eps"]) for chunk in self._chunks}
        if len(set(each.values())) <= 1:
            scales = into_range(norms, next(iter(each.values()), 1.0))
        else:
            own = norms.split([len(chunk.blocks) for chunk in self._chunks])
            scales = torch.cat([into_range(*pair) for pair in zip(own, each.values(), strict=True)])
        if self._moved is not None:
            scales = scales / self._moved
        return scales if torch.float64 in self._state.workspace else scales.float()

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
            runs, copies = self.copies[number]
            torch._foreach_copy_(copies, buffers)
            advance_momentum(copies, found, groups[chunk.group])
            for first, stack in runs:
                _mask(stack, bad, first)
            # By one or by zero, which is exact.
            scale_all(buffers, _at(bad, chunk.first, len(buffers)).float())
            torch._foreach_add_(buffers, copies)

    @cached_property
    def copies(self) -> list[tuple[list[tuple[int, Tensor]], list[Tensor]]]:
        """Memory for the momentum of each chunk, one at a time: as runs, and block by block."""
        found = []
        for chunk in self._chunks:
            shapes = [shape for _, shape in self._shapes[chunk.first :][: len(chunk.blocks)]]
            equal = self._equal(chunk.first, chunk.first + len(shapes))
            sizes = [(b - a) * self._shapes[a][1].numel() for a, b in equal]
            memory = self._state.copy_of_chunk(chunk.dtype, sum(sizes)).split(sizes)
            runs = [(a, m.view(b - a, -1)) for (a, b), m in zip(equal, memory, strict=True)]
            views = chain.from_iterable(stack.unbind() for _, stack in runs)
            found.append((runs, [v.view(s) for v, s in zip(views, shapes, strict=True)]))
        return found


def _fill(to: Tensor, stack: Tensor, scales: Tensor, bad: Tensor | None, first: int) -> None:
    """Scale the operands ``stack`` from position ``first`` on; zeros where they are bad."""
    scale_into(to, stack, scales.narrow(0, first, len(stack)))
    if bad is not None:
        _mask(to, bad.to(to.device), first)


def _mask(stack: Tensor, bad: Tensor, first: int) -> None:
    """Zero the blocks from position ``first`` on that are bad: a bool, or one by position."""
    own = _at(bad, first, len(stack))
    stack.masked_fill_(own.view(-1, *(1,) * (stack.ndim - 1)) if own.ndim else own, 0.0)


def _at(bad: Bad, first: int, count: int) -> Bad:
    """What a mask says of ``count`` positions: a 0-d one is for all."""
    return bad.narrow(0, first, count) if bad is not None and bad.ndim else bad
