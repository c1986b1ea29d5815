"""Muon where momentum lies with the parameters: the `sharded` and the `replicated` layout.

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
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.comm.routes import Message, Part, parts_of, places
from dmuon.comm.transport import Work
from dmuon.devices import host_can_read
from dmuon.dtensors import distributed_as, local_tensor, whole_tensor
from dmuon.kernels.ops import Peers
from dmuon.kernels.runner import SliceCall
from dmuon.rule import MOMENTUM, merged_master, update_rms
from dmuon.scheduler.costs import largest_batch
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import Box, Form
from dmuon.step.engine import SUSPECTS, Amp, Engine, load_entry
from dmuon.step.operands import BlockState, Operands, at, fill_scaled
from dmuon.step.verdict import Verdict, VerdictMessage, own_verdict, suspects
from dmuon.step.verify import Stored
from dmuon.tensors import into_range, scale_all
from dmuon.types import Layout, NewParameters, OwnershipError

_BLOCK_BATCH = 16  # blocks of one shape that are orthogonalized together

Gradients = Mapping[int, Tensor]  # local ones by parameter


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
class _Arrivals:
    """Blocks of one param group whose matrices have one shape, with views of where their updates
    arrive. ``positions`` [blocks] is for masks."""

    group: int
    rows: int
    cols: int
    blocks: list[int]
    updates: list[Tensor]
    positions: Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """A unit that this rank orthogonalizes: ``index`` [b] are its matrices, ``turned`` [b] says
    which slots hold the transpose (None: none of them), ``shape`` is that of whole matrices,
    ``numbers`` [b] say where their norms are, which co-owners need.

    Of one that is made and applied here alone, ``parts`` are (first position, part, operands of the
    part); ``lr_ratio`` is that of blocks in a block step.
    """

    unit: Unit
    index: Tensor
    turned: Tensor | None
    shape: tuple[int, int]
    numbers: Tensor
    parts: Sequence[tuple[int, Part, Tensor]]
    lr_ratio: float


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


class ParamsEngine(Engine):
    """The engine of `ParamsRuntime`."""

    _runtime: ParamsRuntime

    def _bind(self) -> None:
        runtime, masters = self._runtime, self._settings.master_weights
        self._rank = runtime.transport.rank
        self._outcome = _Outcome()
        hooks = self._settings.publish == "async"
        runtime.bind(self._group_of, self._settings.ns_dtype, hooks)
        self._check_variants()
        self._state = BlockState(
            runtime, self._optimizer, self._group_of, self._momentum_dtypes, masters
        )
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

    def _check_variants(self) -> None:
        """OwnershipError where a variant would see less than whole matrices."""
        plan, shards = self._runtime.plan, self._runtime.shards
        shared = {i for b in plan.batches if b.co_owners for i in b.matrices}
        for i, matrix in enumerate(plan.specs.matrices):
            rule = self._rules[self._group_of[i]]
            if rule.is_plain:
                continue
            if i in shared:
                raise OwnershipError(
                    f"variant {rule} needs whole matrices, and {matrix.name!r} has co-owners: plan "
                    "with dmuon.PlannerOptions(co_owners='off')"
                )
            if not self._settings.schedule.always_full and not shards.is_local(i):
                raise OwnershipError(
                    f"variant {rule} needs whole rows, and what it keeps lies with one owner: "
                    f"MuonBP takes block steps of {matrix.name!r}, which is cut, or lies on "
                    "several ranks. Use period=1, or leave variant= out"
                )

    def _bind_full_step(self) -> None:
        """Lay out the operands in the order in which they leave; then what stays; then replicas."""
        runtime, state = self._runtime, self._state
        buckets = runtime.bound().buckets
        sent = [b.route.blocks.matrices for b in buckets]
        local = [u for u in runtime.units if runtime.is_local(u) and u.owner == self._rank]
        order = [state.block_of[i] for i in chain(*sent, *(unit.matrices for unit in local))]
        others = sorted(set(range(len(state.blocks))) - set(order))
        every = order if self._settings.schedule.always_full else order + others
        state.reserve(every, self._settings.ns_dtype)
        self._operands = operands = Operands(state, self._rules, order, others)
        blocks = [state.blocks[k] for k in operands.order]
        how = self._settings.schedule, self._settings.digest, self._group_of
        matrices, counts = [b.matrix for b in blocks], [b.counts for b in blocks]
        self._message = VerdictMessage(runtime, runtime.shards, *how, matrices, counts)
        self._fills: list[list[tuple[int, Tensor, Tensor]]] = []  # (first, operands, places)
        self._arrivals: list[list[_Arrivals]] = []
        first = 0
        for bucket, matrices in zip(buckets, sent, strict=True):
            runs = operands.runs(first, first + len(matrices))
            views = bucket.send.split([flat.numel() for _, flat in runs])
            self._fills.append([(n, x, v.view(x.shape)) for (n, x), v in zip(runs, views)])
            first += len(matrices)
            self._arrivals.append(self._arrivals_of(bucket.updates))
        self._local = []
        for unit in local:
            boxes = [runtime.shards.piece(i, self._rank).box for i in unit.matrices]
            shapes = [runtime.shards.boxes[i].shape for i in unit.matrices]
            turned = map(unit.holds_transpose, range(len(boxes)))
            held = zip(range(len(boxes)), unit.matrices, shapes, turned, boxes)
            parts = operands.placed(parts_of(runtime.shards, -1, held), first)
            self._local.append(self._stack(unit, parts))
            first += len(unit.matrices)
        owned = chain.from_iterable(bucket.route.units for bucket in buckets)
        self._owned = {u: self._stack(runtime.units[u]) for u in owned}

    def _stack(
        self, unit: Unit, parts: Sequence[tuple[int, Part, Tensor]] = (), lr_ratio: float = 1.0
    ) -> _Stack:
        device, matrices = self._runtime.device, self._runtime.plan.specs.matrices
        index = numbers = _index(unit.matrices, device)
        shape = unit.rows, unit.cols
        if unit.co_owners:
            shape = unit.rows, max(matrices[unit.matrices[0]].shape)
            numbers = self._message.numbers_of(unit.matrices)
        turned = torch.tensor(unit.transposed, device=device) if unit.transposed else None
        return _Stack(unit, index, turned, shape, numbers, parts, lr_ratio)

    def _arrivals_of(self, updates: Sequence[tuple[Tensor, Message]]) -> list[_Arrivals]:
        """What arrives in these buffers, by param group, shape and dtype of the matrix."""
        state, specs = self._state, self._runtime.plan.specs
        alike: dict[tuple[int, int, int, str], list[tuple[int, Tensor]]] = defaultdict(list)
        for buffer, message in updates:
            for part in message.parts:
                for i, update in zip(part.matrices, part.within(buffer).unbind(), strict=True):
                    k, matrix = state.block_of[i], specs.matrices[i]
                    kind = (state.blocks[k].group, *matrix.shape, matrix.dtype)
                    alike[kind].append((k, update))
        found = []
        for (group, rows, cols, _), members in alike.items():
            blocks = [k for k, _ in members]
            positions = _index([self._operands.position_of[k] for k in blocks], state.device)
            found.append(_Arrivals(group, rows, cols, blocks, [u for _, u in members], positions))
        return found

    def _bind_block_step(self) -> None:
        self._block_stacks: list[_Stack] = []
        self._block_operands = self._operands
        if self._settings.schedule.always_full:
            return
        state, specs = self._state, self._runtime.shards.specs
        alike: dict[tuple[int, bool, Form, tuple[int, ...]], list[int]] = defaultdict(list)
        for k, b in enumerate(state.blocks):
            form, shape = specs.matrices[b.matrix].form, tuple(state.momentum[k].shape)
            alike[b.group, b.is_whole, form, shape].append(k)
        order = [*chain.from_iterable(alike.values())]
        self._block_operands = Operands(state, self._rules, order)
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
                parts = self._block_operands.placed([part], first)
                self._block_stacks.append(self._stack(unit, parts, own))

    # ---- a step --------------------------------------------------------------------------

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        refusal = super().begin(amp, refusal)
        self._outcome.wait()
        if refusal is None:
            self._state.begin_step()
            grads = [*self._grads.values()]
            if amp.scale is not None and grads:
                # A tensor, because reading it would wait for the device.
                scale_all(grads, amp.scale.reciprocal().to(grads[0].device))
        return refusal

    def _take_gradients(self) -> None:
        found = enumerate(self._runtime.local_gradients())
        self._grads = {i: grad for i, grad in found if grad is not None}

    def launch(self, refusal: Exception | None) -> None:
        grads, self._grads = self._grads, {}
        is_full = self._settings.schedule.is_full(self._settings.schedule.t)
        if refusal is not None:
            if is_full:
                self._refuse(refusal)
            raise refusal
        if not grads and not self._settings.schedule.t:
            warnings.warn(
                "dmuon: no parameter has a gradient at the first step. If the model was sharded or "
                "wrapped since dmuon.Muon got its parameters, they are no longer the model's: pass "
                "the module itself, dmuon.Muon(model), or make the optimizer afterwards",
                stacklevel=5,
            )
        self._begin_update()
        step = self._full_step if is_full else self._block_step
        outcome = step(grads, [i in grads for i in range(len(self._runtime.parameters))])
        if outcome is None or not is_full:
            self._runtime.pass_by()
        self._outcome = outcome or _Outcome(is_full, finite=False)
        skipped = self._note(self._outcome.finite)
        if is_full:
            self.skips.late = 0
            if host_can_read(self._runtime.device):
                self._tell()
            self.skips.names = []
        elif self._settings.nonfinite == "raise":
            self.skips.late = self.skips.late + skipped

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
        spread = self._message.compare({})
        if host_can_read(runtime.device):
            return
        self._message.note(vector, spread)
        # They cannot know yet: their blocks travel as zeros.
        buckets = runtime.bound().buckets

        def fill(b: int) -> None:
            buckets[b].send.zero_()

        runtime.bound().run(
            fill,
            lambda u, operand: operand.zero_(),
            lambda b: None,
            lambda: None,
            share=lambda stacks: self._kernels.run_together(
                self._slices(stacks), [torch.ones(len(x), device=x.device) for _, x in stacks]
            ),
        )
        runtime.apply_missed()
        squares = torch.zeros(len(runtime.plan.specs.matrices), device=runtime.device)
        runtime.all_reduce(squares, "rms").wait()
        self._outcome, self.skips.finite = _Outcome(), False

    def _full_step(self, grads: Gradients, here: Sequence[bool]) -> _Outcome | None:
        """Take the step; the updates of the last buckets are applied later. None: nothing was done,
        because a gradient is not finite."""
        runtime, operands = self._runtime, self._operands
        of_blocks = self._state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, self._hypers)
        inf, late = self._amp.found_inf, self.skips.late
        if isinstance(late, Tensor) or late:
            inf = torch.as_tensor(late, dtype=torch.float64, device=runtime.device)
        checked = self._checked(grads)
        vector, sent = self._message.fill(norms, checked, here, inf)
        work = runtime.all_reduce(sent, "norms")

        def agreed() -> Verdict | None:
            work.wait()
            spread = self._message.compare(grads)
            return self._message.read(vector, norms, here, spread)

        # With every gradient, and whole matrices, the first Newton-Schulz need not wait for it. Not
        # where a variant would note what is then called off, nor with co-owners: who waits for the
        # verdict first must not be waited for in a sum.
        is_ahead = runtime.bound().only_publishes and host_can_read(runtime.device) and all(here)
        is_ahead = is_ahead and not self._kept and not runtime.plan.has_co_owners
        verdict = Verdict(True) if is_ahead else agreed()
        if verdict is None:
            return None
        bad, scales = verdict.bad, operands.scales(norms, self._hypers)
        matrices = range(len(runtime.plan.specs.matrices))
        squares = torch.zeros(len(matrices), dtype=torch.float32, device=runtime.device)

        def meanwhile() -> None:
            operands.commit(of_blocks, self._hypers, bad)
            for stack in self._local:
                own = self._step_alone(stack, operands, scales, bad)
                squares.index_copy_(0, stack.index, own)
            self._update_adamw(self._with_zeros(grads, verdict), verdict)

        if not runtime.bound().run(
            partial(self._fill, scales, bad),
            partial(self._compute, squares),
            partial(self._apply_arrived, bad),
            meanwhile,
            (lambda: agreed() is not None) if is_ahead else None,
            partial(self._share, vector, squares),
        ):
            return None
        runtime.apply_missed()
        work = runtime.all_reduce(squares, "rms")
        return _Outcome(True, verdict.finite, matrices, squares, work)

    def _fill(self, scales: Tensor, bad: Tensor | None, bucket: int) -> None:
        """The operands of a bucket, scaled, to where it leaves from."""
        for first, flat, to in self._fills[bucket]:
            fill_scaled(to, flat, scales, bad, first)

    def _compute(self, squares: Tensor, unit: int, operand: Tensor) -> Tensor:
        stack = self._owned[unit]
        update = self._orthogonalize(stack.unit, operand)
        squares.index_copy_(0, stack.index, self._squares(stack, update))
        return update

    def _share(
        self, vector: Tensor, squares: Tensor, stacks: list[tuple[int, Tensor]]
    ) -> list[Tensor]:
        """The updates of units that have co-owners, as slices."""
        owned = [self._owned[u] for u, _ in stacks]
        # As their holders have scaled them.
        found = [self._message.norms_of(vector, stack.numbers) for stack in owned]
        eps = [self._hypers[stack.unit.group].eps for stack in owned]
        scaled = [norms * into_range(norms, own) for norms, own in zip(found, eps, strict=True)]
        self._telemetry.watch.start()
        updates = self._kernels.run_together(self._slices(stacks), scaled)
        self._telemetry.watch.stop()
        for stack, update in zip(owned, updates, strict=True):
            squares.index_copy_(0, stack.index, self._squares(stack, update))
        return updates

    def _apply_arrived(self, bad: Tensor | None, bucket: int) -> None:
        for arrived in self._arrivals[bucket]:
            own = bad.index_select(0, arrived.positions) if bad is not None and bad.ndim else bad
            lr = self._hypers[arrived.group].adjusted(arrived.rows, arrived.cols)
            self._apply(arrived.group, arrived.blocks, arrived.updates, lr, own)

    def _block_step(self, grads: Gradients, here: Sequence[bool]) -> _Outcome | None:
        state, operands = self._state, self._block_operands
        of_blocks = state.gradients_of_blocks(grads)
        norms = operands.fill(of_blocks, self._hypers)
        blocks, checked = [state.blocks[k] for k in operands.order], self._checked(grads)
        parameters, inf = [b.parameter for b in blocks], self._amp.found_inf
        verdict = own_verdict(norms, parameters, checked, here, inf, self._runtime.device)
        if verdict is None:
            return None
        scales, matrices = operands.scales(norms, self._hypers), [b.matrix for b in blocks]
        operands.commit(of_blocks, self._hypers, verdict.bad)
        own = [self._step_alone(s, operands, scales, verdict.bad) for s in self._block_stacks]
        self._update_adamw(self._with_zeros(grads, verdict), verdict)
        if verdict.finite is False:  # the host knows
            found = [(of, ~marks.isfinite()) for of, marks in ((matrices, norms), *checked)]
            self.skips.names += suspects(self._runtime.plan.specs, found)
            del self.skips.names[SUSPECTS:]
        return _Outcome(False, verdict.finite, matrices, torch.cat(own) if own else None)

    # ---- Newton-Schulz -------------------------------------------------------------------

    def _orthogonalize(self, unit: Unit, operand: Tensor) -> Tensor:
        """The updates of normalized matrices ``[b, rows, cols]``, which are overwritten; valid
        until the next call."""
        self._telemetry.watch.start()
        update = self._kernels.run(self._call(unit), operand)
        self._kept.accept(unit, update)
        self._telemetry.watch.stop()
        return update

    def _momentum(self) -> Mapping[int, Tensor]:
        state = self._state
        return {b.matrix: m for b, m in zip(state.blocks, state.momentum, strict=True)}

    def _slices(self, stacks: Iterable[tuple[int, Tensor]]) -> list[tuple[SliceCall, Tensor]]:
        runtime, found = self._runtime, []
        for u, stack in stacks:
            unit, ranks = runtime.units[u], runtime.units[u].co_owners
            peers = Peers(runtime.index_among(ranks), len(ranks), partial(runtime.exchange, ranks))
            found.append((SliceCall(self._call(unit), peers, unit.split), stack))
        return found

    def _squares(self, stack: _Stack, update: Tensor) -> Tensor:
        """The mean squares of the updates of a unit, ``[b]``; of a slice its share of them."""
        h = self._hypers[stack.unit.group]
        rows, cols = stack.shape
        factor: float | Tensor = h.ratio(rows, cols) * stack.lr_ratio
        if stack.turned is not None:
            factor = torch.where(stack.turned, h.ratio(cols, rows), factor)
        return update_rms(update, factor).square_().mul_(stack.unit.cols / cols)

    def _step_alone(
        self, stack: _Stack, operands: Operands, scales: Tensor, bad: Tensor | None
    ) -> Tensor:
        """Orthogonalize and apply what needs nobody else; the `_squares` of the updates."""
        unit, h = stack.unit, self._hypers[stack.unit.group]
        batch = self._kernels.operand(self._call(unit))
        for first, part, source in stack.parts:
            fill_scaled(places(batch, part), source, scales, bad, first)
        update = self._orthogonalize(unit, batch)
        for first, part, source in stack.parts:
            rows, cols = (unit.cols, unit.rows) if part.transposed else (unit.rows, unit.cols)
            blocks = operands.order[first : first + len(source)]
            lr = h.adjusted(rows, cols) * stack.lr_ratio
            updates = [*places(update, part).unbind()]
            self._apply(unit.group, blocks, updates, lr, at(bad, first, len(source)))
        return self._squares(stack, update)

    # ---- weights -------------------------------------------------------------------------

    def _apply(
        self,
        group: int,
        blocks: Sequence[int],
        updates: list[Tensor],
        lr: float,
        bad: Tensor | None,
    ) -> None:
        """Decay and update the weights of blocks of a param group; where ``bad``, a bool or one per
        block, is true they stay as they are (and the update is zero)."""
        state, h = self._state, self._hypers[group]
        targets = [state.targets[k] for k in blocks]
        where = targets[0].device
        if updates[0].device != where:  # CPU offload
            updates = [update.to(where) for update in updates]
        weights = None
        if state.targets is not state.weights:
            weights = [state.weights[k] for k in blocks]
        kept = h.kept(None if bad is None else bad.to(where))
        self._rules[group].apply(targets, updates, h, lr=lr, kept=kept, weights=weights)

    def _with_zeros(self, grads: Gradients, verdict: Verdict) -> dict[int, Tensor]:
        """The gradients of AdamW's parameters: one that is missing here counts as zero where it is
        not missing everywhere."""
        return {
            i: grads[i] if i in grads else torch.zeros_like(local_tensor(p))
            for i, p in chain.from_iterable(self._adamw.values())
            if verdict.stays.get(i) is not True
        }

    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        p = self._runtime.parameters[parameter]
        grad = self._grads.get(parameter)
        local = torch.zeros_like(local_tensor(p)) if grad is None else grad
        momentum = self._optimizer.state[p][MOMENTUM]
        return whole_tensor(momentum).clone(), whole_tensor(distributed_as(p, local))

    def stored(self, box: Box, parameter: int) -> Stored:
        found, shards = [], self._runtime.shards
        state = self._state
        for b, target, weight in zip(state.blocks, state.targets, state.weights, strict=True):
            if b.parameter == parameter and shards.boxes[b.matrix] == box:
                local = shards.shard(self._rank, parameter).box
                now = target if target is weight else merged_master(target, weight)
                found.append((b.matrix, box.intersection(local), now))
        return found

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        of_step = {"full_step": self._outcome.full, "step_bytes": self.step_bytes()}
        return super().stats() | of_step

    def _update_rms(self) -> dict[str, float]:
        outcome = self._outcome
        outcome.wait()
        names = [m.name for m in self._runtime.plan.specs.matrices]
        values = [] if outcome.squares is None else outcome.squares.sqrt().tolist()
        return {names[i]: v for i, v in zip(outcome.matrices, values)}

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
        """A collective call where variants keep something with the owners."""
        parameters = self._runtime.parameters
        found = self._entries_as_weights_are(parameters)
        if not self._kept:
            return found
        self._runtime.transport.meet("opt.state_dict()")
        is_whole = self._runtime.plan.layout is Layout.REPLICATED
        for i, kept in self._spread(self._kept.rows()).items():
            p = parameters[i]
            kept = {k: whole_tensor(v) for k, v in kept.items()} if is_whole else kept
            found[p] = {**self._optimizer.state[p], **found.get(p, {}), **kept}
        return found

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        parameters = self._runtime.parameters
        for p in parameters:
            load_entry(p, self._optimizer.state[p], saved.get(p, {}), self._kept.names)
        self._collect(self._kept.rows(), saved)
