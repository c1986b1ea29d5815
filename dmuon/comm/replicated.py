"""The `replicated` layout: every rank has every weight, the owner alone has the momentum (ZeRO-1).

::

    backward   gradients ---reduce---> owners          the rest ---all-reduce---> p.grad everywhere
    step       owner: momentum, Newton-Schulz, then    its update ---broadcast---> every rank
    forward    before a block runs: wait for the updates of its matrices and apply them

A broadcast carries what is published of some units of one owner and, behind it, the RMS of each
update, so that every rank can report it without another collective::

    | unit 3 [b, m, n] | unit 7 [b, m, n] | rms [b3 + b7] |
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.buckets import (
    GradientBucket,
    Memory,
    Slices,
    aligned,
    cut_by_bytes,
    gradient_bucket,
    publish_buckets,
)
from dmuon.comm.hooks import Coverage, attach, wait_points
from dmuon.comm.layout import Apply, Compute, Gradients, PlannedPlaces
from dmuon.comm.owners import (
    OwnedGradients,
    OwnerRuntime,
    Unstack,
    oriented,
    rows_of,
    set_rows,
)
from dmuon.comm.process_groups import ProcessGroups, start_from_first
from dmuon.comm.reducer import GradientReducer, hook_ddp, hook_parameters
from dmuon.comm.routes import Unit
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.config import ReplicatedOptions
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.shards import matrix_box
from dmuon.scheduler.specs import ITEM_SIZE, dtype_name
from dmuon.types import DmuonError, OwnershipError

__all__ = ["ReplicatedRuntime"]


@dataclass(slots=True)
class _Published:
    """What travels of a unit, and views of the parameters that it is applied to."""

    unit: Unit
    parameters: list[int]
    targets: list[Tensor]
    payload: Tensor  # [b, m, n]
    views: list[Tensor]  # of the payload, in the parameters' dims
    rms: Tensor  # [b] float32
    pointers: list[int]  # where the parameters of the targets are stored


@dataclass(slots=True)
class _Broadcast:
    """A bucket's bytes, and what is in flight of it: positions in each unit."""

    owner: int
    units: list[_Published]
    flat: Tensor
    rms: Tensor
    seen_rms: Tensor  # as last published, kept when the memory is used again
    work: Work | None = None
    apply: Apply | None = None
    where: Sequence[list[int]] = ()


class _Publisher:
    """Calls the owner's `Compute`, broadcasts its results, and applies them when needed."""

    def __init__(
        self,
        plan: OwnershipPlan,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        meter: Meter,
        owned: OwnedGradients,
    ) -> None:
        self._specs = plan.specs
        self._parameters = parameters
        self._transport = transport
        self._meter = meter
        self._owned = owned
        self._device = parameters[0].device
        self._pointers = [p.data_ptr() for p in parameters]
        self._buckets: list[_Broadcast] = []
        self._pending: set[int] = set()

    def make(
        self,
        buckets: Iterable[tuple[int, Sequence[Unit]]],
        memory: Memory,
        payload_dtype: Callable[[str], torch.dtype],
    ) -> None:
        """Lay out the buckets, (owner, units) each, in ``memory``."""
        begin = 0
        for owner, units in buckets:
            counts = [len(u.matrices) for u in units]
            dtypes = [payload_dtype(self._specs.matrices[u.matrices[0]].dtype) for u in units]
            sizes = [(u.numel, dtype) for u, dtype in zip(units, dtypes, strict=True)]
            (*payloads, rms), flat = memory.carve(begin, [*sizes, (sum(counts), torch.float32)])
            begin += flat.numel()
            published = [
                self._published(unit, payload.view(unit.shape), part)
                for unit, payload, part in zip(units, payloads, rms.split(counts), strict=True)
            ]
            self._buckets.append(_Broadcast(owner, published, flat, rms, torch.zeros_like(rms)))

    def _published(self, unit: Unit, payload: Tensor, rms: Tensor) -> _Published:
        parameters = [self._specs.matrices[i].parameter for i in unit.matrices]
        targets = self._targets(unit)
        views = Unstack(self._specs, unit)(payload)
        pointers = [self._parameters[p].data_ptr() for p in parameters]
        return _Published(unit, parameters, targets, payload, views, rms, pointers)

    def _targets(self, unit: Unit) -> list[Tensor]:
        found = []
        for i in unit.matrices:
            spec = self._specs.matrices[i]
            box = matrix_box(spec, self._specs.parameters[spec.parameter].shape).box
            found.append(self._parameters[spec.parameter].detach()[box.slices()])
        return found

    def check_storage(self) -> None:
        """Raise OwnershipError if a parameter has another shape, dtype or device than planned."""
        pointers = [p.data_ptr() for p in self._parameters]
        if pointers == self._pointers:
            return
        for p, spec in zip(self._parameters, self._specs.parameters, strict=True):
            planned = (spec.shape, spec.dtype, self._device)
            if (tuple(p.shape), dtype_name(p.dtype), p.device) != planned:
                raise OwnershipError(
                    f"parameter {spec.name!r} is now {list(p.shape)} {p.dtype} on {p.device}; it "
                    f"was planned as {list(spec.shape)} {spec.dtype} on {self._device}. Move or "
                    "convert the model before dmuon.dedicate_params(model)"
                )
        self._pointers = pointers

    # ---- a step ------------------------------------------------------------------------------

    def launch(self, present: Sequence[bool], compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch every broadcast, in the buckets' order.

        ``present`` says which parameters have a gradient on any rank; it is the same on every
        rank, so all leave the same buckets out.
        """
        for b, bucket in enumerate(self._buckets):
            where = [[k for k, p in enumerate(u.parameters) if present[p]] for u in bucket.units]
            if not any(where):
                bucket.seen_rms.zero_()
                continue
            if bucket.owner == self._transport.rank:
                bucket.rms.zero_()
                for live, mine in zip(bucket.units, where, strict=True):
                    if mine:
                        gradients = rows_of(self._owned.stack(live.unit), mine)
                        payload, rms = compute(live.unit, gradients, mine)
                        set_rows(live.payload, mine, payload)
                        set_rows(live.rms, mine, rms)
            self._meter.add("updates", bucket.flat)
            bucket.work = self._transport.broadcast(bucket.flat, bucket.owner, tag="updates")
            bucket.apply, bucket.where = apply, where
            self._pending.add(b)

    def wait_for(self, buckets: Iterable[int]) -> None:
        """Wait for these buckets, if they are pending, and apply them."""
        if not self._pending:
            return
        for b in sorted(self._pending.intersection(buckets)):
            bucket = self._buckets[b]
            assert bucket.work is not None and bucket.apply is not None
            bucket.work.wait()
            for live, where in zip(bucket.units, bucket.where, strict=True):
                if where:
                    self._apply(live, where, bucket.apply)
            bucket.seen_rms.copy_(bucket.rms)
            bucket.work = bucket.apply = None
            self._pending.discard(b)

    def _apply(self, live: _Published, where: list[int], apply: Apply) -> None:
        pointers = [self._parameters[p].data_ptr() for p in live.parameters]
        if pointers != live.pointers:  # someone has assigned to p.data
            live.pointers, live.targets = pointers, self._targets(live.unit)
        targets, views = live.targets, live.views
        if len(where) != len(targets):
            targets, views = [targets[k] for k in where], [views[k] for k in where]
        apply(live.unit, where, targets, views)

    def wait_for_parameters(self, parameters: Set[int]) -> None:
        """Wait for the pending updates of these parameters, given by their ids."""
        self.wait_for([b for b in self._pending if self._touches(self._buckets[b], parameters)])

    def _touches(self, bucket: _Broadcast, parameters: Set[int]) -> bool:
        return any(
            id(self._parameters[live.parameters[k]]) in parameters
            for live, where in zip(bucket.units, bucket.where, strict=True)
            for k in where
        )

    def synchronize(self) -> None:
        """Wait for all of them."""
        self.wait_for(range(len(self._buckets)))

    # ---- reading -----------------------------------------------------------------------------

    def buckets_by_parameter(self) -> dict[int, set[int]]:
        """``id(parameter)`` -> the buckets that publish a part of it."""
        found: dict[int, set[int]] = defaultdict(set)
        for b, bucket in enumerate(self._buckets):
            for live in bucket.units:
                for p in live.parameters:
                    found[id(self._parameters[p])].add(b)
        return found

    def published(self) -> dict[str, Tensor]:
        """What was last received for each matrix, ``[m, n]``; overwritten by the next backward."""
        return {
            self._specs.matrices[i].name: matrix
            for bucket in self._buckets
            for live in bucket.units
            for i, matrix in zip(live.unit.matrices, oriented(live.unit, live.payload), strict=True)
        }

    def update_rms(self) -> dict[str, Tensor]:
        """RMS of each matrix's update in the last step, by name: device scalars."""
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            members = [i for live in bucket.units for i in live.unit.matrices]
            names = [self._specs.matrices[i].name for i in members]
            found.update(zip(names, bucket.seen_rms.unbind(), strict=True))
        return found


class ReplicatedRuntime(OwnerRuntime):
    """See the module's docstring. ``ddp`` is the wrapper whose buckets trigger the reduction."""

    def __init__(
        self,
        plan: OwnershipPlan,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        options: ReplicatedOptions,
        ddp: DistributedDataParallel | None,
    ) -> None:
        super().__init__(Slices.flat(plan), model, transport, parameters[0].device)
        self.parameters = list(parameters)
        self.loads = 0
        self._options = options
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._publisher: _Publisher | None = None
        if ddp is None and options.broadcast_parameters:
            start_from_first([(t, transport) for t in [*model.parameters(), *model.buffers()]])

    # ---- binding and closing -----------------------------------------------------------------

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        options, specs = self._options, self.plan.specs
        owned = self._collect_at(groups, options.reduce_dtype)
        numel = {p: spec.numel for p, spec in enumerate(specs.parameters)}
        rest = {p: numel[p] for p in specs.adamw_parameters()}

        def make_bucket(members: Sequence[int]) -> GradientBucket:
            return gradient_bucket(self._slices, members, rest, 0, options.reduce_dtype)

        def nbytes(p: int) -> int:
            dtype = options.reduce_dtype
            return numel[p] * (dtype.itemsize if dtype else ITEM_SIZE[specs.parameters[p].dtype])

        # Backward reaches parameters roughly in reverse order.
        order = reversed(range(len(specs.parameters)))
        buckets = [make_bucket(m) for m in cut_by_bytes(order, nbytes, options.bucket_bytes)]
        published = [payload_dtype(specs.matrices[u.matrices[0]].dtype) for u in self.units]
        item = max(dtype.itemsize for dtype in published)
        # Gradients are read by their owners before the step publishes, and updates are applied
        # before the next backward, so both can lie in the same memory. DDP cuts buckets of its own:
        # at worst every span is a segment by itself and pads its end.
        segments = [s for bucket in buckets for s in bucket.segments]
        gradients = sum(aligned(s.numel * getattr(torch, s.dtype).itemsize) for s in segments)
        if self._ddp is not None:
            gradients += aligned(1) * sum(len(s.spans) for s in segments)
        updates = sum(
            aligned(u.numel * item) + aligned(4 * len(u.matrices)) + aligned(1) for u in self.units
        )
        memory = Memory(self.device, max(gradients, updates))
        publisher = _Publisher(self.plan, self.parameters, self.transport, self.meter, owned)
        publisher.make(
            [
                (owner, [self.units[u] for u in members])
                for owner, members in publish_buckets(
                    self.units, options.publish_bucket_bytes, item
                )
            ],
            memory,
            payload_dtype,
        )
        reducer = GradientReducer(
            self._slices,
            self.parameters,
            ProcessGroups.flat(self.transport),
            memory,
            self.meter,
            buckets,
            owned.deliver,
        )
        self._live, self._publisher = (reducer, owned), publisher
        self._install_hooks(reducer, publisher, make_bucket)

    def _install_hooks(
        self,
        reducer: GradientReducer,
        publisher: _Publisher,
        make_bucket: Callable[[Sequence[int]], GradientBucket],
    ) -> None:
        ddp = None if self._ddp is None else self._ddp()
        before = publisher.synchronize
        if ddp is None:
            self._removers += hook_parameters(reducer, self.parameters, before)
        else:
            self._removers += hook_ddp(reducer, ddp, self.parameters, before, make_bucket)
        model = self._model()
        assert model is not None
        self._places = PlannedPlaces(model, self.parameters)
        buckets_of = publisher.buckets_by_parameter()
        points = wait_points(model)
        self._coverage = coverage = Coverage(points)

        def waiter(number: int, needed: frozenset[int], at_root: bool) -> Callable[[], None]:
            def wait() -> None:
                coverage.passed(number)
                if at_root and reducer.open:
                    # A backward that raised left its round open; the others count on the rest.
                    reducer.finish()
                publisher.wait_for(needed)

            return wait

        def loaded() -> None:
            self.loads += 1

        for number, point in enumerate(points):
            needed = frozenset().union(*(buckets_of.get(i, set()) for i in point.parameters))
            wait = waiter(number, needed, point.is_root and ddp is None)
            self._removers += attach(point, wait, publisher.synchronize, loaded)

    def close(self) -> None:
        self.synchronize()
        self._unbind()
        self._publisher = None
        self.transport.close()

    @property
    def dedicated(self) -> Sequence[nn.Parameter]:
        return ()

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        self.synchronize()
        return nullcontext()

    def adopt(self) -> None:
        """Nobody may replace a parameter."""

    # ---- gradients ---------------------------------------------------------------------------

    def set_sync(self, sync: bool) -> bool:
        reducer, _ = self._bound
        previous, reducer.sync = reducer.sync, sync
        # What was accumulated meanwhile must be reduced, by the next backward or by `step`.
        reducer.owed = reducer.owed or (sync and not previous)
        return previous

    def reduce_gradients(self) -> None:
        reducer, _ = self._bound
        assert self._publisher is not None
        self._check()
        self._publisher.check_storage()
        self._publisher.synchronize()
        if not reducer.open and reducer.rounds and not reducer.owed:
            left = reducer.local_matrix()
            if left and self._ddp is None:
                raise OwnershipError(
                    f"{left!r} has a p.grad that was set after backward. Its owner has the reduced "
                    "gradient already, so this one would be lost: change gradients in a hook "
                    "(p.register_hook), or set all of them and run no backward"
                )
            reducer.owed = left is not None  # by DistributedDataParallel.no_sync
        if self._ddp is not None and reducer.open:
            raise DmuonError(
                "DistributedDataParallel did not hand over the gradients of "
                f"{', '.join(reducer.missing()[:5])}: their part of the model was not used in "
                "this backward. Build it with find_unused_parameters=True"
            )
        reducer.ensure()

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, the others are the same everywhere."""
        reducer, owned = self._bound
        collected = owned.collected(reducer.present)
        shared = [p.grad for p in self.parameters if p.grad is not None]
        return Gradients(collected, shared, shared + collected)

    # ---- step --------------------------------------------------------------------------------

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer, _ = self._bound
        assert self._publisher is not None
        self._publisher.launch(reducer.present, compute, apply)
        reducer.clear()
        missed = self._coverage.take_missed()
        if missed:
            # The forward that led here read them without passing their wait point.
            self._publisher.wait_for_parameters(missed)

    def synchronize(self) -> None:
        if self._publisher is not None:
            self._publisher.synchronize()

    def weights(self, unit: Unit) -> list[Tensor]:
        specs = self.plan.specs.matrices
        return [specs[i].view(self.parameters[specs[i].parameter].detach()) for i in unit.matrices]

    def published(self) -> dict[str, Tensor]:
        """What was last published of each matrix, by name; waits for pending ones."""
        assert self._publisher is not None
        self._publisher.synchronize()
        return self._publisher.published()

    def update_rms(self) -> dict[str, Tensor]:
        assert self._publisher is not None
        self._publisher.synchronize()
        return self._publisher.update_rms()
