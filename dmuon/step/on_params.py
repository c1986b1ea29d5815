"""Muon where momentum lies with the parameters: the `sharded` and the `replicated` layout.

A full step, on every rank::

    operands    momentum and Nesterov on the local blocks, into a workspace; nothing is changed yet
    verdict     one all-reduce: squared norms of matrices, which gradients exist, any inf or nan
    pipeline    normalized blocks to the owners, Newton-Schulz there, updates back to the blocks;
                while the first buckets travel: momentum, matrices that need no others, AdamW

If every rank holds all matrices whole, the first Newton-Schulz runs while the verdict travels.
A block step (MuonBP, arXiv 2510.16981, Algorithm 1) orthogonalizes each block on its own, without
any collective.

If the host cannot read from the device without waiting, every decision is a mask: a bad block gets
an operand of zeros, hence an update of zeros, and neither momentum nor decay. Then operands are not
stored, see `PassingOperands`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.comm.routes import Message, Part, parts_of, places
from dmuon.comm.transport import Work
from dmuon.devices import host_can_read
from dmuon.dtensors import distributed_as, local_tensor, whole_tensor
from dmuon.rule import CACHED, MOMENTUM, Hyper, copier, merged_master, update_norms
from dmuon.scheduler.costs import largest_batch
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import Box, Form
from dmuon.step.engine import Amp, Engine, load_entry
from dmuon.step.operands import BlockState, Operands, Outlet, Pass, PassingOperands, at
from dmuon.step.verdict import Sent, Verdict, VerdictMessage, own_verdict
from dmuon.step.verify import Stored
from dmuon.tensors import TensorList, Tensors, are_raw, scale_all
from dmuon.types import Layout, NewParameters, OwnershipError, warn

_BLOCK_BATCH = 16  # blocks of one shape that are orthogonalized together

Gradients = Mapping[int, Tensor]  # local gradients by parameter
AnyOperands = Operands | PassingOperands


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Blocks of one param group, with matrices of one shape, and views of the buffers where their
    updates arrive. ``positions`` [blocks] index masks."""

    group: int
    rows: int
    cols: int
    blocks: list[int]
    updates: Tensors
    positions: Tensor


@dataclass(frozen=True, slots=True)
class _Stack:
    """A unit that this rank orthogonalizes, with its matrices as ``index`` [b]. If it is applied on
    this rank only, ``parts`` are (first position, part). ``lr_ratio`` is that of block steps."""

    unit: Unit
    index: Tensor
    parts: Sequence[tuple[int, Part]]
    lr_ratio: float


class _Sizes:
    """Norms of updates, with their factors to root mean squares, combined when all are there."""

    def __init__(self) -> None:
        self._index: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._factors: list[float] = []

    def note(self, stack: _Stack, update: Tensor, h: Hyper) -> None:
        """Add the norms of a unit's updates; of several copies of a unit one counts."""
        if not stack.unit.is_counted:
            return
        (_, rows, cols), norms, turned = stack.unit.shape, update_norms(update), [False]
        plain, other = h.ratio(rows, cols), h.ratio(cols, rows)
        if stack.unit.transposed and plain != other:
            turned = [*map(stack.unit.holds_transpose, range(len(norms)))]
        per = stack.lr_ratio / math.sqrt(rows * cols)
        self._factors += (per * (other if is_turned else plain) for is_turned in turned)
        self._norms += norms.split(1) if len(turned) > 1 else [norms]
        self._index.append(stack.index)

    def squares(self) -> Tensor | None:
        """Return the mean squares in the order of `note`, or None if there are none."""
        if not self._norms:
            return None
        torch._foreach_mul_(self._norms, self._factors)
        return torch.cat(self._norms).square_()

    def spread(self, to: Tensor) -> None:
        """Write the mean squares to the positions of their matrices in ``to``."""
        squares = self.squares()
        if squares is not None:
            to.index_copy_(0, torch.cat(self._index), squares)


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


class ParamsEngine(Engine):
    _runtime: ParamsRuntime

    def _bind(self) -> None:
        runtime, masters = self._runtime, self._settings.master_weights
        self._rank = runtime.transport.rank
        # The last step's (matrices, mean squares of their updates), valid once the work is done.
        self._updates: tuple[Sequence[int], Tensor | None] = (), None
        self._work = Work()
        self._state = BlockState(
            runtime, self._optimizer, self._group_of, self._momentum_dtypes, masters
        )
        ns_dtype, every = self._settings.ns_dtype, range(len(runtime.plan.specs.matrices))
        dtypes = {ns_dtype, *(self._momentum_dtypes(i)[1] for i in every)}
        self._are_raw = are_raw(dtypes, runtime.device)  # then they leave from the workspace
        memory = partial(self._reserve, ns_dtype) if self._are_raw else None
        runtime.bind(self._group_of, ns_dtype, memory)
        runtime.bound().copier = copier
        self._check_variants()
        self._bind_full_step()
        self._bind_block_step()
        buckets = runtime.bound().buckets
        stacks = chain.from_iterable(bucket.stacks for bucket in buckets)
        self._kernels.reserve(
            [self._call(stack.unit) for stack in (*self._local, *self._block_stacks)],
            [(self._call(runtime.units[u]), operands) for u, operands in stacks],
            capture=True,
        )

    # ---- once ----------------------------------------------------------------------------

    def _reserve(self, dtype: torch.dtype, sent: int) -> Tensor:
        """Allocate the workspace; return the part for the ``sent`` elements that travel."""
        state = self._state
        numel = sum(momentum.numel() for momentum in state.momentum)
        if self._settings.schedule.always_full:
            here = chain.from_iterable(unit.matrices for unit in self._local_units())
            numel = sent + sum(state.momentum[state.block_of[i]].numel() for i in here)
        state.workspace = torch.empty(numel, dtype=dtype, device=state.device)
        return state.workspace.narrow(0, 0, sent)

    def _local_units(self) -> list[Unit]:
        runtime = self._runtime
        return [u for u in runtime.units if runtime.is_local(u) and u.owner == self._rank]

    def _check_variants(self) -> None:
        """Raise OwnershipError where a variant would see only part of a matrix."""
        plan, shards = self._runtime.plan, self._runtime.shards
        takes_blocks = not self._settings.schedule.always_full
        for i, matrix in enumerate(plan.specs.matrices if takes_blocks else ()):
            rule = self._rules[self._group_of[i]]
            if not rule.is_plain and not shards.is_local(i):
                raise OwnershipError(
                    f"variant {rule} needs whole rows and keeps its state with one owner, but "
                    f"MuonBP takes block steps of {matrix.name!r}, which is cut, or lies on "
                    "several ranks. Use period=1, or leave variant= out"
                )

    def _bind_full_step(self) -> None:
        """Lay out operands in the order in which they leave, then local ones, then replicas'."""
        runtime, state = self._runtime, self._state
        buckets = runtime.bound().buckets
        sent = [b.route.held.matrices for b in buckets]
        local = self._local_units()
        order = [state.block_of[i] for i in chain(*sent, *(unit.matrices for unit in local))]
        others = sorted(set(range(len(state.blocks))) - set(order))
        if host_can_read(state.device) and not (self._are_raw and buckets):
            wide = reduce(torch.promote_types, state.working, self._settings.ns_dtype)
            self._reserve(wide, sum(b.route.held.numel for b in buckets))
        self._operands = operands = self._operands_in(order, others)
        blocks = [state.blocks[k] for k in operands.order]
        how = self._settings.schedule, self._settings.digest, self._group_of
        matrices, counts = [b.matrix for b in blocks], [b.counts for b in blocks]
        self._message = VerdictMessage(runtime, runtime.shards, *how, matrices, counts)
        self._outlets: list[list[Outlet]] = []  # by bucket
        self._arrivals: list[list[_Arrivals]] = []
        first = 0
        for bucket, matrices in zip(buckets, sent, strict=True):
            self._outlets.append(operands.outlets(first, first + len(matrices), bucket.send))
            first += len(matrices)
            self._arrivals.append(self._arrivals_of(bucket.updates))
        self._local = []
        for unit in local:
            boxes = [runtime.shards.piece(i, self._rank) for i in unit.matrices]
            shapes = [runtime.shards.boxes[i].shape for i in unit.matrices]
            turned = map(unit.holds_transpose, range(len(boxes)))
            held = zip(range(len(boxes)), unit.matrices, shapes, turned, boxes)
            parts = parts_of(runtime.shards, -1, held)
            self._local.append(self._stack(unit, [(first + p.position, p) for p in parts]))
            first += len(unit.matrices)
        owned = chain.from_iterable(bucket.route.units for bucket in buckets)
        self._owned = {u: self._stack(runtime.units[u]) for u in owned}

    def _operands_in(self, order: Sequence[int], others: Sequence[int] = ()) -> AnyOperands:
        kind = Operands if host_can_read(self._state.device) else PassingOperands
        return kind(self._state, self._rules, order, others)

    def _stack(
        self, unit: Unit, parts: Sequence[tuple[int, Part]] = (), lr_ratio: float = 1.0
    ) -> _Stack:
        return _Stack(unit, _index(unit.matrices, self._runtime.device), parts, lr_ratio)

    def _arrivals_of(self, updates: Sequence[tuple[Tensor, Message]]) -> list[_Arrivals]:
        """Group the updates that arrive in these buffers by param group, shape and dtype."""
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
            arrive = Tensors(update for _, update in members)
            found.append(_Arrivals(group, rows, cols, blocks, arrive, positions))
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
        self._block_operands = self._operands_in(order)
        ratio = self._settings.block_lr_ratio
        for (group, is_whole, form, shape), equal in alike.items():
            own = 1.0 if is_whole or ratio is None else ratio  # whole matrices take full steps
            block = state.blocks[equal[0]]
            most = largest_batch(block.rows, block.cols, _BLOCK_BATCH, self._runtime.batch_numel)
            for start in range(0, len(equal), most):
                some = [state.blocks[k] for k in equal[start : start + most]]
                matrices = tuple(b.matrix for b in some)
                # A block counts as a whole matrix here.
                part = Part(-1, 0, matrices, Box.at_origin(shape), shape, form, False)
                unit = Unit(self._rank, group, matrices, some[0].rows, some[0].cols, 0.0)
                first = self._block_operands.position_of[equal[start]]
                self._block_stacks.append(self._stack(unit, [(first, part)], own))

    # ---- a step --------------------------------------------------------------------------

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        refusal = super().begin(amp, refusal)
        self._wait()
        if refusal is None:
            self._state.begin_step()
            grads = [*self._grads.values()]
            if amp.scale is not None and grads:
                # A tensor, because reading its value would wait for the device.
                scale_all(grads, amp.scale.reciprocal().to(grads[0].device))
        return refusal

    def _wait(self) -> None:
        self._work.wait()
        self._work = Work()

    def _take_gradients(self) -> None:
        found = enumerate(self._runtime.local_gradients())
        self._grads = {i: grad for i, grad in found if grad is not None}

    def send(self, refusal: Exception | None) -> None:
        is_full = self._settings.schedule.is_full(self._settings.schedule.t)
        if refusal is not None:
            if is_full:
                self._send_refusal(refusal)
            return
        if not self._grads:
            warn(
                "dmuon: no parameter has a gradient in this step: did you call backward()? (HSDP "
                "needs model.set_requires_all_reduce(True).) If the model was sharded or wrapped "
                "since dmuon.Muon got its parameters, pass the module itself, dmuon.Muon(model), "
                "or make the optimizer afterwards",
                UserWarning,
            )
        self._begin_update()
        self._updates = (), None
        if is_full:
            self._send_message()

    def launch(self, refusal: Exception | None) -> None:
        grads, self._grads = self._grads, {}
        is_full = self._settings.schedule.is_full(self._settings.schedule.t)
        if refusal is not None:
            if is_full:
                self._keep()
            raise refusal
        finite = self._full_step(grads) if is_full else self._block_step(grads)
        never = self._settings.schedule.never_full
        self._note(finite, is_late=not (is_full or never))
        if never:
            self._message.note_alone(finite)
        if (is_full or never) and host_can_read(self._runtime.device):
            self._report_skips()

    def finish(self) -> None:
        if self._last.full:  # this may issue a collective, and a block step must not
            super().finish()

    def _send_refusal(self, refusal: Exception) -> None:
        """Tell the other ranks that nothing may change. Raise `NewParameters` if all have some."""
        vector = self._message.refuse(self._late, is_new=isinstance(refusal, NewParameters))
        self._message.sent = Sent(vector, self._runtime.all_reduce(vector, "norms"), vector[:0])
        if isinstance(refusal, NewParameters):
            refusal.agreed = self._message.all_are_new(self.received())
            if refusal.agreed:
                raise refusal

    def _keep(self) -> None:
        """Take part in the rest of a full step that changes nothing."""
        runtime, vector = self._runtime, self.received()
        if host_can_read(runtime.device):
            return
        self._message.note(vector)
        # The other ranks cannot know yet, so this rank's blocks travel as zeros.
        buckets = runtime.bound().buckets

        def fill(b: int) -> None:
            buckets[b].send.zero_()

        def nothing(_: float) -> None: ...

        runtime.bound().run(fill, lambda u, x: x.zero_(), nothing, nothing)
        squares = torch.zeros(len(runtime.plan.specs.matrices), device=runtime.device)
        runtime.all_reduce(squares, "rms").wait()
        self._updates = (), None
        self._note(False)
        self._count_late(vector)

    def _count_late(self, vector: Tensor) -> None:
        """Count the skipped block steps since the last full one, now that all ranks know them."""
        if self._late is not None:
            self.skips.count = self.skips.count + self._message.late_steps(vector)
            self.skips.late.zero_()

    @property
    def _late(self) -> Tensor | None:
        """The flags of block steps to send in a full step; None if there are no block steps."""
        return None if self._settings.schedule.always_full else self.skips.late

    def _here(self, grads: Gradients) -> list[bool]:
        """Return which parameters have a gradient on this rank."""
        return [i in grads for i in range(len(self._runtime.parameters))]

    def _send_message(self) -> None:
        operands, grads, here = self._operands, self._grads, self._here(self._grads)
        of_blocks = operands.gradients(grads)
        norms = operands.fill(of_blocks, self._hypers)
        inf, late = self._amp.found_inf, self._late
        if late is not None and self._settings.nonfinite == "raise":  # then this step is skipped
            inf = late.sum() if inf is None else late.sum() + inf.to(late)
        checked, of_grads = self._checked(grads)
        of_grads += operands.gradient_squares(of_blocks)
        how = checked, here, inf, of_grads, None, late, grads
        vector, sent = self._message.fill(norms, *how)
        work = self._runtime.all_reduce(sent, "norms")
        self._message.sent = Sent(vector, work, norms, of_blocks, here)

    def _full_step(self, grads: Gradients) -> bool | Tensor:
        """Take the step except for the last updates; False if a non-finite gradient stopped it."""
        runtime, operands = self._runtime, self._operands
        _, _, norms, of_blocks, here = self._message.sent
        self._message.sent = self._message.sent._replace(gradients=())  # which it must not keep

        def agreed() -> Verdict | None:
            vector = self.received()
            verdict = self._message.read(vector, norms, here)
            self._count_late(vector)
            return verdict

        # With every gradient and whole matrices the first Newton-Schulz need not wait for the
        # verdict; except with variants, whose state a skipped step must not change.
        is_ahead = runtime.bound().only_publishes and host_can_read(runtime.device) and all(here)
        is_ahead = is_ahead and not self._kept
        verdict = Verdict(True) if is_ahead else agreed()
        if verdict is None:
            return False
        bad, now = verdict.bad, self._pass(operands, of_blocks, norms, verdict.bad)
        sizes = _Sizes()

        alone = deque(self._local)

        def meanwhile(part: float) -> None:
            for _ in range(math.ceil(part * len(alone))):
                self._step_alone(alone.popleft(), operands, now, sizes)
            if part == 1:
                operands.commit(of_blocks, self._hypers, bad)
                self._update_adamw(self._with_zeros(grads, verdict), verdict)

        if not runtime.bound().run(
            partial(self._fill, now),
            partial(self._compute, sizes),
            partial(self._apply_arrived, bad),
            meanwhile,
            (lambda: agreed() is not None) if is_ahead else None,
        ):
            return False
        matrices = range(len(runtime.plan.specs.matrices))
        squares = torch.zeros(len(matrices), dtype=torch.float32, device=runtime.device)
        sizes.spread(squares)
        self._updates, self._work = (matrices, squares), runtime.all_reduce(squares, "rms")
        return verdict.finite

    def _pass(
        self, operands: AnyOperands, grads: Sequence[Tensor], norms: Tensor, bad: Tensor | None
    ) -> Pass:
        """Gather the inputs of `operands.write`; mask stored operands at once."""
        scales = None if self._are_raw else operands.scales(norms, self._hypers)
        if bad is not None and isinstance(operands, Operands):
            operands.mask(bad)
            scales = None if scales is None else scales.masked_fill_(bad, 0.0)
        return Pass(grads, self._hypers, scales, bad)

    def _fill(self, now: Pass, bucket: int) -> None:
        """Write the operands of a bucket to its send buffer, unless they lie there."""
        for outlet in () if self._are_raw else self._outlets[bucket]:
            self._operands.write(outlet, now)

    def _compute(self, sizes: _Sizes, unit: int, operand: Tensor) -> Tensor:
        stack = self._owned[unit]
        update = self._orthogonalize(stack.unit, operand)
        sizes.note(stack, update, self._hypers[stack.unit.group])
        return update

    def _apply_arrived(self, bad: Tensor | None, bucket: int) -> None:
        for arrived in self._arrivals[bucket]:
            own = bad.index_select(0, arrived.positions) if bad is not None and bad.ndim else bad
            lr = self._hypers[arrived.group].adjusted(arrived.rows, arrived.cols)
            self._apply(arrived.group, arrived.blocks, arrived.updates, lr, own)

    def _block_step(self, grads: Gradients) -> bool | Tensor:
        here = self._here(grads)
        state, operands = self._state, self._block_operands
        of_blocks = operands.gradients(grads)
        norms = operands.fill(of_blocks, self._hypers)
        blocks, (checked, _) = [state.blocks[k] for k in operands.order], self._checked(grads)
        parameters, inf = [b.parameter for b in blocks], self._amp.found_inf
        verdict = own_verdict(norms, parameters, checked, here, inf, self._runtime.device)
        if verdict is None:
            return False
        matrices = [b.matrix for b in blocks]
        now = self._pass(operands, of_blocks, norms, verdict.bad)
        operands.commit(of_blocks, self._hypers, verdict.bad)
        sizes = _Sizes()
        for stack in self._block_stacks:
            self._step_alone(stack, operands, now, sizes)
        self._update_adamw(self._with_zeros(grads, verdict), verdict)
        if verdict.finite is not True:
            numbers = matrices, *(of for of, _ in checked)
            self.skips.flags.append([*zip(numbers, verdict.not_finite, strict=True)])
        self._updates = matrices, sizes.squares()
        return verdict.finite

    # ---- Newton-Schulz -------------------------------------------------------------------

    def _orthogonalize(self, unit: Unit, operand: Tensor) -> Tensor:
        """Return updates of normalized matrices and overwrite those; valid until the next call."""
        self._telemetry.watch.start()
        update = self._kernels.run(self._call(unit), operand)
        self._kept.accept(unit, update)
        self._telemetry.watch.stop()
        return update

    def _momentum(self) -> Mapping[int, Tensor]:
        state = self._state
        return {b.matrix: m for b, m in zip(state.blocks, state.momentum, strict=True)}

    def _step_alone(self, stack: _Stack, operands: AnyOperands, now: Pass, sizes: _Sizes) -> None:
        """Orthogonalize and apply a unit that needs no other rank."""
        unit, h = stack.unit, self._hypers[stack.unit.group]
        batch = self._kernels.operand(self._call(unit))
        for first, part in stack.parts:
            operands.write((first, places(batch, part)), now)
        update = self._orthogonalize(unit, batch)
        sizes.note(stack, update, h)
        for first, part in stack.parts:
            rows, cols = (unit.cols, unit.rows) if part.transposed else (unit.rows, unit.cols)
            blocks = operands.order[first : first + len(part.matrices)]
            lr = h.adjusted(rows, cols) * stack.lr_ratio
            updates = [*places(update, part).unbind()]
            self._apply(unit.group, blocks, updates, lr, at(now.bad, first, len(blocks)))

    # ---- weights -------------------------------------------------------------------------

    def _apply(
        self, group: int, blocks: Sequence[int], updates: TensorList, lr: float, bad: Tensor | None
    ) -> None:
        """Decay and update the weights of blocks of a param group, except where ``bad``, one bool
        or one per block, is true."""
        state, h = self._state, self._hypers[group]
        targets = state.listed("targets", blocks)
        where = targets[0].device
        if updates[0].device != where:  # CPU offload
            updates = [update.to(where) for update in updates]
        has_masters = state.targets is not state.weights
        weights = state.listed("weights", blocks) if has_masters else None
        stays = None if bad is None else bad.to(where)
        self._rules[group].apply(targets, updates, h, lr=lr, stays=stays, weights=weights)

    def _with_zeros(self, grads: Gradients, verdict: Verdict) -> dict[int, Tensor]:
        """Return gradients of AdamW's parameters, with zeros for those missing only here."""
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
        return super().stats() | {"full_step": self._last.full}

    def describe(self) -> str:
        travel = f"buckets that travel: {len(self._runtime.bound().buckets)}"
        return f"{super().describe()}, of which lie here whole: {len(self._local)}; {travel}"

    def _update_rms(self) -> tuple[Sequence[int], Tensor]:
        self._wait()
        matrices, squares = self._updates
        if squares is None:
            return (), torch.zeros(0, device=self._runtime.device)
        return matrices, squares.sqrt()

    def step_bytes(self) -> dict[str, int]:
        state, itemsize = self._state, self._settings.ns_dtype.itemsize
        found = {"operands": state.workspace.nbytes} | super().step_bytes()
        if state.copies:
            found["commit"] = sum(memory.nbytes for memory in state.copies.values())
        is_cpu = self._runtime.device.type == "cpu"
        if isinstance(self._operands, Operands):
            found["norms"] = 4 * (self._operands.narrowest < 4) * self._operands.largest_run
        elif self._operands.largest_piece:
            found["passes"] = self._operands.largest_piece
        owned = [part for b in self._runtime.bound().buckets for part in b.route.owned.parts]
        cut = [part for part in owned if part.transposed and part.box.shape != part.whole]
        turned = [part.box.numel for part in cut if is_cpu]
        found["transposes"] = itemsize * max(turned, default=0)
        is_cast = is_cpu and itemsize < 4
        cast = [t.nbytes for t in state.targets if is_cast and t.dtype.itemsize >= 4]
        found["updates"] = max(min(sum(cast), 4 * CACHED), *cast, 0)
        return found

    def saved_state(self) -> dict[Tensor, dict[str, Any]]:
        """See `Engine.saved_state`; a collective call where variants keep state with the owners."""
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
