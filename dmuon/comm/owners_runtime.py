"""Momentum at owners: the base of both layouts that keep it there, and `replicated` with
``reduce_to_owner``, where every rank has whole weights (ZeRO-1).

::

    backward   matrices' gradients ---reduce---> owners    adamw's ---all-reduce---> p.grad
    step       owner: momentum, Newton-Schulz; its updates ---all-gather---> every rank
               the RMS of each update ---all-reduce---> every rank
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm import reducer as reduction
from dmuon.comm.buckets import Slices, gradient_bucket
from dmuon.comm.hooks import Hook, ParameterWatch
from dmuon.comm.layout import Gradients, LayoutRuntime
from dmuon.comm.pipeline import Copies, Pipeline
from dmuon.comm.process_groups import Grid, ProcessGroups
from dmuon.comm.transport import Transport, Work
from dmuon.config import ReplicatedOptions, ShardedOptions
from dmuon.dtensors import LocalParameters, is_distributed
from dmuon.scheduler.plan import OwnershipPlan, Sizes, Unit, units_of
from dmuon.scheduler.specs import ITEM_SIZE, Box
from dmuon.types import DmuonError, grouped, runs_of

# (unit, gradients [b, rows, cols] of some of its matrices, the positions of these in it) to
# (results to publish [b, rows, cols], RMS of the updates [b]), both valid until the next call.
Compute = Callable[[Unit, Tensor, list[int]], tuple[Tensor, Tensor]]
# (unit, positions in it, views of the parameters, views of the published results)
Apply = Callable[[Unit, list[int], list[Tensor], list[Tensor]], None]
Parts = list[tuple[int, int, Tensor]]  # (position in a unit, matrix, its part here)


class Exchange:
    """Units that travel in a `Pipeline`. ``sources`` copy gradients into each bucket, if they do
    not lie with the owner already."""

    def __init__(
        self, pipeline: Pipeline, units: Sequence[Unit], sources: Sequence[Copies] = ()
    ) -> None:
        self.pipeline, self._units, self._sources = pipeline, units, sources
        # Buffers never move, so views of them are made once.
        self._results: list[list[tuple[Unit, Parts]]] = [
            [
                (units[part.unit], [*zip(count(part.position), part.matrices, part.within(flat))])
                for flat, message in bucket.updates
                for part in message.parts
            ]
            for bucket in pipeline.buckets
        ]

    def run(
        self,
        compute: Callable[[Unit, Tensor], Tensor | None],
        update: Callable[[Unit, Parts], None],
    ) -> None:
        """Call ``compute(unit, gradients)`` at owners, and ``update`` with parts of results on all
        ranks; for the last buckets `Pipeline.apply_pending` calls it."""

        def fill(b: int) -> None:
            if self._sources:
                self._sources[b].run()

        def apply(b: int) -> None:
            for unit, parts in self._results[b]:
                update(unit, parts)

        self.pipeline.run(fill, lambda u, x: compute(self._units[u], x), apply, lambda _: None)


class OwnersRuntime(LayoutRuntime):
    """Momentum and gradients lie with the owners. An owner calls `Compute` for its units; every
    rank that stores a part of a matrix calls `Apply` for it, in any order, before the parameters
    are read again. ``keeps_whole``: an owner stores its matrices whole. ``reducer`` is set once an
    optimizer has bound itself."""

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
        self._exchanges: list[Exchange] = []
        self._rms: dict[int, Tensor] = {}  # [b] of the owner's updates, by a unit's first matrix

    @abstractmethod
    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        """Prepare for an optimizer, given the param group of each matrix and the dtype of results
        by a parameter's dtype. OwnershipError if there is an optimizer already."""

    @abstractmethod
    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        """Return (matrix, box, view) of the parts of a parameter's box that this rank stores."""

    @property
    def _bound(self) -> reduction.GradientReducer:
        if self.reducer is None:
            raise self._not_bound()
        return self.reducer

    def raise_noted(self) -> None:
        """Raise, on every rank and before sending, errors that no host could read before."""
        self._bound.flags.raise_noted()

    def gradients(self) -> Gradients:
        """Return matrices' gradients at their owners, FSDP2's as shards, others on every rank."""
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

    def _computed(self, compute: Compute, unit: Unit, gradients: Tensor) -> Tensor | None:
        """Return the results of a unit, ``[b, rows, cols]``, undefined for matrices without a
        gradient; None if none has a gradient. Note the RMS of the updates in ``_rms``."""
        present, matrices = self._bound.present, self.plan.specs.matrices
        where = [k for k, i in enumerate(unit.matrices) if present[matrices[i].parameter]]
        rms = self._rms[unit.matrices[0]]
        if len(where) < len(unit.matrices):
            rms.zero_()
        if not where:
            return None
        results, found = compute(unit, reduction.rows_of(gradients, where), where)
        reduction.set_rows(rms, where, found)
        if len(where) == len(unit.matrices):
            return results
        whole = results.new_empty(unit.shape)
        reduction.set_rows(whole, where, results)
        return whole

    def update(self, apply: Apply, present: Sequence[bool], unit: Unit, parts: Parts) -> None:
        """Apply parts of results, for parameters that are ``present``, to the parameters here."""
        matrices = self.plan.specs.matrices
        if came := [(k, view) for k, i, view in parts if present[matrices[i].parameter]]:
            targets, where = self.targets(unit), [k for k, _ in came]
            apply(unit, where, [targets[k] for k in where], [view for _, view in came])

    @abstractmethod
    def targets(self, unit: Unit) -> Sequence[Tensor]:
        """Return the parts of a unit's matrices that this rank stores, in the parameters' dims."""

    @abstractmethod
    def step(self, compute: Compute, apply: Apply) -> None:
        """Compute the updates of matrices owned here and launch all publishing."""

    @abstractmethod
    def update_rms(self) -> tuple[list[int], Tensor]:
        """Return the matrices whose updates are known here, and the RMS of each update."""

    @property
    def nbytes(self) -> dict[str, int]:
        found = Counter[str]()
        for exchange in self._exchanges:
            found.update(exchange.pipeline.nbytes)
        return dict(found)

    def counts(self, parameter: int) -> bool:
        is_cut = is_distributed(self.parameters[parameter])
        return parameter in self._counted if is_cut else self.transport.rank == 0


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
        self._peers = peers
        self._views: dict[int, tuple[list[int], list[Tensor]]] = {}  # see `targets`
        # The RMS of every update: this rank's, and all ranks' once the work is done.
        self._own_rms = self._all_rms = torch.zeros(0, device=device)
        self._work = Work()

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
        sizes = Sizes.of(ShardedOptions(bucket_bytes=options.publish_bucket_bytes), self.plan)
        world = self.transport.world
        grid = Grid((1, 1, world), tuple(range(world)))  # every rank has all weights
        shards = Slices(self.plan, grid, self.slices.boxes, ranges_only=False).shards
        what = shards, self.plan.topology, self.units
        how = self.transport, self.meter, sizes
        for dtype, members in grouped((dtype, u) for u, dtype in enumerate(dtypes)).items():
            like = torch.empty(0, dtype=dtype, device=self.device)
            pipeline = Pipeline(*what, members, *how, like, gathers=False, replicas=self._peers)
            self._exchanges.append(Exchange(pipeline, self.units))
        counts = [len(unit.matrices) for unit in self.units]
        self._own_rms = torch.zeros(sum(counts), device=self.device)
        parts = self._own_rms.split(counts) if counts else ()
        self._rms = {u.matrices[0]: part for u, part in zip(self.units, parts, strict=True)}
        self._all_rms = torch.zeros_like(self._own_rms)
        reducer = reduction.GradientReducer(self.parameters, self.process_groups, buckets, owned)
        self.reducer = reducer
        self._install_hooks(reducer)

    def _install_hooks(self, reducer: reduction.GradientReducer) -> None:
        model, ddp = self._model(), None if self._ddp is None else self._ddp()
        assert model is not None
        self._watch = ParameterWatch(model, self.parameters)
        if ddp is not None:
            self._removers += reduction.hook_ddp(ddp, self._handed_over)
        else:
            numbered = enumerate(self.parameters)
            self._removers += reduction.hook_gradients(numbered, self._accumulated)
            # A backward that raised left its round open, and the other ranks wait for its end.
            finish = Hook(torch.compiler.disable(lambda *_: reducer.finish()))
            handle = model.register_forward_pre_hook(finish, prepend=True)
            self._removers.append(handle.remove)

    def _begin_round(self, reducer: reduction.GradientReducer) -> None:
        """Begin a round. Pending updates are applied first; they belong to earlier gradients."""
        self.synchronize()
        reducer.begin()

    def _accumulated(self, parameter: int) -> None:
        """Take a gradient as soon as it has been accumulated, without DDP."""
        reducer = self._bound
        if not reducer.sync:
            return
        if not reducer.open:
            self._begin_round(reducer)
            reduction.at_end_of_backward(reducer.finish)
        reducer.accumulated(parameter)

    def _handed_over(self, bucket: Any) -> None:
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
        self._work.wait()  # no collective may be under way when its group goes
        self._remove_hooks()
        self.reducer, self._exchanges = None, []
        for transport in (*self._peers.values(), self.transport):
            transport.close()

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
        # A copy, because the last updates are applied when gradients have been cleared.
        update = partial(self.update, apply, [*reducer.present])

        def computed(unit: Unit, _: Tensor) -> Tensor | None:
            return self._computed(compute, unit, reducer.owned.stack(unit))

        for exchange in self._exchanges:
            exchange.run(computed, update)
        self._work.wait()
        self._all_rms.copy_(self._own_rms)
        self.meter["rms"] += self._all_rms.nbytes
        self._work = self.transport.all_reduce(self._all_rms, tag="rms")
        reducer.clear()

    def update_rms(self) -> tuple[list[int], Tensor]:
        self._work.wait()
        self._work = Work()
        return [*chain.from_iterable(unit.matrices for unit in self.units)], self._all_rms

    def targets(self, unit: Unit) -> Sequence[Tensor]:
        specs = [self.plan.specs.matrices[i] for i in unit.matrices]
        wholes = [self.parameters[m.parameter] for m in specs]
        pointers = [p.data_ptr() for p in wholes]
        known = self._views.get(unit.matrices[0])
        if known is None or known[0] != pointers:  # at first, and after an assignment to p.data
            views = [p.detach()[m.box(tuple(p.shape)).slices()] for m, p in zip(specs, wholes)]
            known = self._views[unit.matrices[0]] = pointers, views
        return known[1]

    def synchronize(self) -> None:
        for exchange in self._exchanges:
            exchange.pipeline.apply_pending(exchange.pipeline.pending)

    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        whole, specs = self.parameters[parameter].detach(), self.plan.specs.matrices
        mine = self.slices.matrices_of[parameter]
        i = next(i for i in mine if specs[i].box(tuple(whole.shape)) == box)
        return [(i, box, whole[box.slices()])]
