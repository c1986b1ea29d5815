"""Momentum at owners: the base of both such layouts, and `replicated` with ``reduce_to_owner``,
where every rank has whole weights (ZeRO-1).

::

    backward   gradients ---reduce---> owners     those of adamw ---all-reduce---> p.grad everywhere
    step       owner: momentum, Newton-Schulz, then    its updates ---all-gather---> every rank
    forward    before a block runs: wait for the updates of its matrices and apply them

A bucket of updates has a share of each owner: what is published of its units and, behind it, the
RMS of each update, so that every rank can report it without another collective::

    | unit 3 [b, m, n] | unit 7 [b, m, n] | rms [b3 + b7] | unit 4 [b, m, n] | rms [b4] | ...
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from dmuon.comm import reducer as reduction
from dmuon.comm.buckets import Buffer, Slices, allocate, gradient_bucket, rooms
from dmuon.comm.hooks import Hook, ParameterWatch
from dmuon.comm.layout import Gradients, LayoutRuntime
from dmuon.comm.pipeline import Turns, all_gathers
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.routes import turns_of
from dmuon.comm.transport import Transport, Work
from dmuon.config import ReplicatedOptions, ShardedOptions
from dmuon.dtensors import LocalParameters, is_distributed
from dmuon.scheduler.plan import OwnershipPlan, Sizes, Unit, buckets_of, units_of
from dmuon.scheduler.specs import ITEM_SIZE, Box
from dmuon.types import DmuonError, grouped, runs_of

# (unit, gradients [b, rows, cols] of the matrices at these positions of it, the positions) to
# (what is published [b, rows, cols], RMS of the updates [b]), both valid until the next call.
Compute = Callable[[Unit, Tensor, list[int]], tuple[Tensor, Tensor]]
# (unit, positions in it, views of the parameters, views of what was published)
Apply = Callable[[Unit, list[int], list[Tensor], list[Tensor]], None]


class OwnersRuntime(LayoutRuntime):
    """Momentum and gradients lie with the owners. An owner calls `Compute` for its units; every
    rank that stores a part of a matrix calls `Apply` for it, in any order, before the parameters
    are read again. ``keeps_whole``: an owner stores its matrices whole. ``reducer`` is there once
    an optimizer has bound itself."""

    keeps_whole = True

    def __init__(
        self, slices: Slices, model: nn.Module, parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(slices.plan, model, process_groups.world, device)
        self.process_groups = process_groups
        self.meter = process_groups.meter
        self.meter.device = device
        self.parameters: list[nn.Parameter] = list(parameters)
        self.reducer: reduction.GradientReducer | None = None
        self.slices = slices
        self._counted: frozenset[int] = frozenset()  # distributed parameters; see `Gradients`
        self._rms: dict[int, Tensor] = {}  # of updates ``[b]``, by a unit's first matrix

    @abstractmethod
    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        """Prepare for an optimizer: the param group of each matrix, and the dtype of what is
        published of a parameter by its dtype. OwnershipError if there is one already."""

    @abstractmethod
    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        """(matrix, its box, view) of what this rank stores of this box of a parameter."""

    @property
    def _bound(self) -> reduction.GradientReducer:
        if self.reducer is None:
            raise self._not_bound()
        return self.reducer

    def raise_noted(self) -> None:
        """Raise what no host could read in earlier rounds, on every rank, before any sending."""
        self._bound.flags.raise_noted()

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, FSDP2's in shards, the others everywhere."""
        reducer, common = self._bound, []
        counted = [*reducer.owned.collected(reducer.present).values()]
        stored = list(counted)
        for i, p in enumerate(self.parameters):
            grad = None if self.slices.matrices_of.get(i) else reducer.gradient_of(i)
            if grad is None:
                continue
            stored.append(grad)
            if not is_distributed(p):
                common.append(grad)
            elif i in self._counted:
                counted.append(grad)
        return Gradients(counted, common, stored)

    def set_sync(self, sync: bool) -> bool:
        self._bound.set_sync(sync)
        return super().set_sync(sync)

    def zero_grad(self) -> None:
        if self.reducer is not None:
            self.reducer.clear()

    def gradients_changed(self) -> None:
        self._bound.note_averaged()

    def _with_gradients(self, unit: Unit) -> list[int]:
        """Positions of the matrices of a unit that have a gradient on any rank: the same on all."""
        present, matrices = self._bound.present, self.plan.specs.matrices
        return [k for k, i in enumerate(unit.matrices) if present[matrices[i].parameter]]

    def _computed(
        self,
        compute: Compute,
        unit: Unit,
        where: list[int],
        gradients: Tensor,
        rms: Tensor,
        out: Tensor | None = None,
    ) -> Tensor | None:
        """The payload of a unit, ``[b, rows, cols]``, in ``out`` if given: of the matrices at
        ``where``, which have gradients. Undefined elsewhere, and None where none has."""
        if len(where) < len(unit.matrices):
            rms.zero_()
        if not where:
            return None
        payload, found = compute(unit, reduction.rows_of(gradients, where), where)
        reduction.set_rows(rms, where, found)
        if out is None and len(where) == len(unit.matrices):
            return payload
        out = payload.new_empty(unit.shape) if out is None else out
        reduction.set_rows(out, where, payload)
        return out

    @abstractmethod
    def step(self, compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch all publishing."""

    @abstractmethod
    def weights(self, unit: Unit) -> list[Tensor]:
        """The weights of a unit that lie whole on this rank, ``[m, ...]`` each."""

    def update_rms(self) -> tuple[list[int], Tensor]:
        """The matrices whose updates are known here, and the RMS of those that are not pending."""
        known = [unit for unit in self.units if unit.matrices[0] in self._rms]
        rms = [torch.zeros(0, device=self.device), *(self._rms[u.matrices[0]] for u in known)]
        return [*chain.from_iterable(u.matrices for u in known)], torch.cat(rms)

    def counts(self, parameter: int) -> bool:
        is_cut = is_distributed(self.parameters[parameter])
        return parameter in self._counted if is_cut else self.transport.rank == 0


@dataclass(slots=True)
class _Published:
    """A unit in a bucket, and views of the parameters that its update is applied to."""

    unit: Unit
    payload: Tensor  # [b, m, n]
    views: list[Tensor]  # of the payload, in the parameters' dims
    rms: Tensor  # [b] float32
    parameters: list[int]
    where: list[int] = field(default_factory=list)  # positions in the unit that were published last
    targets: Sequence[Tensor] = ()
    pointers: Sequence[int] = ()  # where the parameters of the targets are stored


@dataclass(slots=True)
class _Bucket:
    """A bucket of updates. ``buffer`` has memory from a step to the next backward. ``rms`` are
    views of it, one per owner; ``seen`` are copies of those that were published last."""

    units: list[_Published]
    buffer: Buffer
    turns: Turns
    rms: list[Tensor]
    seen: list[Tensor]
    works: list[Work] = field(default_factory=list)


class ReducedRuntime(OwnersRuntime):
    """See the module's docstring. ``ddp`` is the wrapper whose buckets trigger the reduction."""

    def __init__(
        self,
        plan: OwnershipPlan,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        options: ReplicatedOptions,
        ddp: DistributedDataParallel | None,
        peers: dict[tuple[int, ...], Transport],
    ) -> None:
        groups, device = ProcessGroups.flat(transport), parameters[0].device
        super().__init__(Slices.flat(plan), model, parameters, groups, device)
        self._options = options
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._locals = LocalParameters(parameters, [spec.name for spec in plan.specs.parameters])
        self._peers = {tuple(range(transport.world)): transport} | peers
        self._gathers = all_gathers(self._peers, plan.topology, plan.rings)
        self._buckets: list[_Bucket] = []
        self._pending: dict[int, Apply] = {}  # buckets that were not applied yet
        self._publishing = record_function("dmuon::publish")

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        options, specs = self._options, self.plan.specs
        rank, reduced = self.transport.rank, options.reduce_dtype
        self.units = units_of(self.plan, groups, one_by_one=self.one_by_one)
        owned = reduction.OwnedGradients(self.slices, self.units, rank, reduced, self.device)
        adamw = {p: specs.parameters[p].numel for p in specs.adamw_parameters()}

        def nbytes(p: int) -> int:
            spec = specs.parameters[p]
            return spec.numel * (reduced.itemsize if reduced else ITEM_SIZE[spec.dtype])

        # Backward reaches parameters roughly in reverse order.
        order = reversed(range(len(specs.parameters)))
        buckets = [
            gradient_bucket(self.slices, members, adamw, 0, reduced)
            for members in runs_of(order, nbytes, options.bucket_bytes)
        ]
        dtypes = [payload_dtype(specs.matrices[u.matrices[0]].dtype) for u in self.units]
        item = max((dtype.itemsize for dtype in dtypes), default=1)
        sizes = Sizes.of(ShardedOptions(bucket_bytes=options.publish_bucket_bytes), self.plan)
        for members in buckets_of(self.units, range(len(self.units)), sizes, item)[0]:
            self._buckets.append(self._bucket([(self.units[u], dtypes[u]) for u in members]))
        reducer = reduction.GradientReducer(self.parameters, self.process_groups, buckets, owned)
        self.reducer = reducer
        self._install_hooks(reducer)

    def _bucket(self, members: Iterable[tuple[Unit, torch.dtype]]) -> _Bucket:
        specs, columns = self.plan.specs, self.plan.topology.columns_of(range(self.transport.world))
        of_owner = grouped((unit.owner, (unit, dtype)) for unit, dtype in members)
        shares: list[list[tuple[int, torch.dtype]]] = []
        for owner in chain(*columns):
            mine = of_owner.get(owner, [])
            count = sum(len(unit.matrices) for unit, _ in mine)
            last = [(count, torch.float32)] * bool(mine)
            shares.append([*((unit.numel, dtype) for unit, dtype in mine), *last])
        flat, parts = allocate([*chain(*shares)], self.device)
        turns = turns_of(columns, [sum(rooms(share)) for share in shares], self.transport.rank)
        made = _Bucket([], Buffer(flat), Turns([(flat, turns)], True), [], [])
        rest = iter(parts)
        for owner in filter(of_owner.__contains__, chain(*columns)):
            units = [unit for unit, _ in of_owner[owner]]
            stacks, rms = [next(rest).view(unit.shape) for unit in units], next(rest)
            made.rms.append(rms)
            made.seen.append(torch.zeros_like(rms))
            each = (part.split([len(u.matrices) for u in units]) for part in (rms, made.seen[-1]))
            for unit, stack, own, seen in zip(units, stacks, *each, strict=True):
                parameters = [specs.matrices[i].parameter for i in unit.matrices]
                views = reduction.unstacker(specs, unit)(stack)
                made.units.append(_Published(unit, stack, views, own, parameters))
                self._rms[unit.matrices[0]] = seen
        made.buffer.release()
        return made

    def _install_hooks(self, reducer: reduction.GradientReducer) -> None:
        model, ddp = self._model(), None if self._ddp is None else self._ddp()
        assert model is not None
        if ddp is None:
            numbered = enumerate(self.parameters)
            self._removers += reduction.hook_gradients(numbered, self._accumulated)
        else:
            self._removers += reduction.hook_ddp(ddp, self._handed_over)
        self._watch = ParameterWatch(model, self.parameters)

        if ddp is None:
            # A backward that raised left its round open; the others count on its end.
            finish = Hook(torch.compiler.disable(lambda *_: reducer.finish()))
            handle = model.register_forward_pre_hook(finish, prepend=True)
            self._removers.append(handle.remove)

    def _begin_round(self, reducer: reduction.GradientReducer) -> None:
        """Apply the updates first, because gradients take their memory."""
        self.synchronize()
        for bucket in self._buckets:
            self.meter.wait("scatter", bucket.works)  # if a step failed
            bucket.buffer.release()
            for live in bucket.units:
                live.where = []
        reducer.begin()

    def _accumulated(self, parameter: int) -> None:
        """Without DDP a gradient is taken as soon as it has been accumulated."""
        reducer = self._bound
        if not reducer.sync:
            return
        if not reducer.open:
            self._begin_round(reducer)
            reduction.at_end_of_backward(reducer.finish)
        reducer.accumulated(parameter)

    def _handed_over(self, bucket: Any) -> None:
        """With DDP gradients are taken from its buckets."""
        reducer = self._bound
        if bucket.index() == 0:
            self._begin_round(reducer)
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            reducer.take(self._index[id(p)], None if p.grad is None else grad)
        reducer.launch_ready()
        if bucket.is_last():
            # DDP queues its own end right after this hook returns; ours must come after that.
            reduction.at_end_of_backward(lambda: reduction.at_end_of_backward(reducer.finish))

    def close(self) -> None:
        self.synchronize()
        self._remove_hooks()
        self.reducer, self._buckets = None, []
        for peers in self._peers.values():
            peers.close()

    def reduce_gradients(self) -> None:
        # Inside DistributedDataParallel.no_sync gradients stay in p.grad.
        self.synchronize()
        self._bound.ensure(self._check, accumulated=self._ddp is not None)

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.check()
        self._locals.check()
        if self._ddp is not None and self._bound.open:
            raise DmuonError(
                "DistributedDataParallel did not hand over the gradients of "
                f"{', '.join(self._bound.missing()[:5])}: their part of the model was not used in "
                "this backward. Build it with find_unused_parameters=True"
            )

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer = self._bound
        # Which parameters have a gradient is known alike, so all ranks leave the same buckets out.
        leaving: list[int] = []
        for b, bucket in enumerate(self._buckets):
            for live in bucket.units:
                live.where = self._with_gradients(live.unit)
            if not any(live.where for live in bucket.units):
                torch._foreach_zero_(bucket.seen)
                continue
            bucket.buffer.hold()
            for live in bucket.units:
                if live.unit.owner == self.transport.rank:
                    gradients = reducer.owned.stack(live.unit)
                    payload = live.rms, live.payload
                    self._computed(compute, live.unit, live.where, gradients, *payload)
            bucket.turns.sent = 0
            leaving = self._sent_on([b, *leaving], apply)
        while leaving:
            leaving = self._sent_on(leaving, apply)
        reducer.clear()

    def _sent_on(self, leaving: Sequence[int], apply: Apply) -> list[int]:
        """Launch the next turn of each bucket, the newest bucket first. Return the buckets that
        have more turns; the others are pending."""
        left = []
        for b in leaving:
            bucket, rank = self._buckets[b], self.transport.rank
            with self._publishing:
                if bucket.turns.sent:
                    self.meter.wait("scatter", bucket.works)
                if bucket.turns.sent < len(bucket.turns):
                    bucket.works += bucket.turns.send(rank, self._gathers, self.meter)
            if bucket.turns.sent < len(bucket.turns):
                left.append(b)
            else:  # not before, or a step that fails would leave memory that nobody has written
                self._pending[b] = apply
        return left

    def _wait_for(self, buckets: Iterable[int]) -> None:
        for b in sorted(self._pending.keys() & buckets):
            bucket, apply = self._buckets[b], self._pending.pop(b)
            with self._publishing:
                self.meter.wait("scatter", bucket.works)
            for live in bucket.units:
                if live.where:
                    self._apply(live, apply)
            torch._foreach_copy_(bucket.seen, bucket.rms)

    def _apply(self, live: _Published, apply: Apply) -> None:
        pointers = [self.parameters[p].data_ptr() for p in live.parameters]
        if pointers != live.pointers:  # the first time, or someone has assigned to p.data
            specs = [self.plan.specs.matrices[i] for i in live.unit.matrices]
            wholes = [self.parameters[p].detach() for p in live.parameters]
            live.targets = [p[m.box(tuple(p.shape)).slices()] for m, p in zip(specs, wholes)]
            live.pointers = pointers
        targets = [live.targets[k] for k in live.where]
        apply(live.unit, live.where, targets, [live.views[k] for k in live.where])

    def synchronize(self) -> None:
        self._wait_for(range(len(self._buckets)))

    def weights(self, unit: Unit) -> list[Tensor]:
        specs = self.plan.specs.matrices
        return [specs[i].view(self.parameters[specs[i].parameter].detach()) for i in unit.matrices]

    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        whole, specs = self.parameters[parameter].detach(), self.plan.specs.matrices
        mine = self.slices.matrices_of[parameter]
        i = next(i for i in mine if specs[i].box(tuple(whole.shape)) == box)
        return [(i, box, whole[box.slices()])]

    @property
    def nbytes(self) -> dict[str, int]:
        return {"outbound": sum(bucket.buffer.nbytes for bucket in self._buckets)}

    def published(self) -> dict[str, Tensor]:
        """The last updates, ``[m, n]``, of matrices with a gradient, until the next backward."""
        self.synchronize()
        specs, found = self.plan.specs.matrices, dict[str, Tensor]()
        for live in chain.from_iterable(bucket.units for bucket in self._buckets):
            if live.where:  # else its buffer may have no memory
                matrices = reduction.oriented(live.unit, live.payload)
                found |= {specs[live.unit.matrices[k]].name: matrices[k] for k in live.where}
        return found
