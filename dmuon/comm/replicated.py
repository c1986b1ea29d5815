"""The `replicated` layout: every rank has every weight, the owner alone has the momentum (ZeRO-1).

::

    backward   gradients ---reduce---> owners          the rest ---all-reduce---> p.grad everywhere
    step       owner: momentum, Newton-Schulz, then    its update ---broadcast---> every rank
    forward    before a block runs: wait for the updates of its matrices and apply them
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.arena import Arena
from dmuon.comm.hooks import Coverage, attach, wait_points
from dmuon.comm.layout import (
    Apply,
    Compute,
    Gradients,
    PlannedPlaces,
    check_frozen,
    not_bound,
)
from dmuon.comm.process_groups import start_from_first
from dmuon.comm.publish import Publisher, wire_bytes
from dmuon.comm.reduction import GradientReducer
from dmuon.comm.routes import (
    Unit,
    Window,
    aligned,
    make_window,
    matrices_by_parameter,
    publish_buckets,
    reduction_windows,
    units_of,
)
from dmuon.comm.transport import Meter, Transport
from dmuon.comm.triggers import hook_ddp, hook_parameters
from dmuon.comm.windows import FlatWire, LivePack, window_bytes
from dmuon.config import ReplicatedOptions
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import dtype_name
from dmuon.types import DmuonError, OwnershipError

__all__ = ["ReplicatedRuntime"]


class ReplicatedRuntime:
    """See the module's docstring. ``ddp`` is the wrapper whose buckets trigger the reduction."""

    keeps_whole = True

    def __init__(
        self,
        plan: OwnershipPlan,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        options: ReplicatedOptions,
        ddp: DistributedDataParallel | None,
    ) -> None:
        self.plan = plan
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.device = self.parameters[0].device
        self.transport = transport
        self.units: tuple[Unit, ...] = ()
        self.meter = Meter()
        self.loads = 0
        self._options = options
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._model = weakref.ref(model)
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._arena = Arena(self.device)
        self._matrices_of = matrices_by_parameter(plan)
        self._live: tuple[GradientReducer, Publisher] | None = None
        self._places: PlannedPlaces | None = None
        self._removers: list[Callable[[], None]] = []
        self._closed = False
        if ddp is None and options.broadcast_parameters:
            start_from_first([(t, transport) for t in [*model.parameters(), *model.buffers()]])

    # ---- binding and closing -------------------------------------------------------------

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        if self._live is not None:
            raise OwnershipError(
                "these parameters already have a dmuon.Muon; to make another one, call "
                "own.close() and dmuon.dedicate_params(model) again"
            )
        options = self._options
        self.units = units_of(self.plan, groups)
        windows = reduction_windows(self.plan, options.bucket_bytes, self._reduce_dtype_name())
        matrices = self.plan.specs.matrices
        item = max(payload_dtype(matrices[u.matrices[0]].dtype).itemsize for u in self.units)
        # DDP cuts windows of its own; at worst every span is a pack by itself and pads its end.
        spans = sum(len(pack.spans) for w in windows for pack in w.packs) if self._ddp else 0
        packs = window_bytes(windows) + aligned(1) * spans
        self._arena.reserve(max(packs, wire_bytes(self.units, item)))
        publisher = Publisher(
            self.plan,
            self.parameters,
            self.transport,
            self._arena,
            self.meter,
            self.units,
            publish_buckets(self.units, options.publish_bucket_bytes, item),
            payload_dtype,
            options.reduce_dtype,
        )
        reducer = GradientReducer(
            self.plan.specs,
            self.parameters,
            FlatWire(self.transport),
            self._arena,
            self.meter,
            windows,
            self._deliver,
        )
        self._live = reducer, publisher
        self._install_hooks(reducer, publisher)

    def _reduce_dtype_name(self) -> str | None:
        dtype = self._options.reduce_dtype
        return None if dtype is None else dtype_name(dtype)

    def _make_window(self, members: Sequence[int]) -> Window:
        return make_window(self.plan, members, self._matrices_of, self._reduce_dtype_name())

    def _install_hooks(self, reducer: GradientReducer, publisher: Publisher) -> None:
        ddp = None if self._ddp is None else self._ddp()
        before = publisher.synchronize
        if ddp is None:
            self._removers += hook_parameters(reducer, self.parameters, before)
        else:
            self._removers += hook_ddp(reducer, ddp, self.parameters, before, self._make_window)
        model = self._model()
        assert model is not None
        self._places = PlannedPlaces(model, self.parameters)
        buckets_of = publisher.buckets_by_parameter()
        points = wait_points(model)
        self._coverage = coverage = Coverage(points)
        for number, point in enumerate(points):
            needed = frozenset().union(*(buckets_of.get(i, set()) for i in point.parameters))
            at_root = reducer if point.is_root and ddp is None else None
            wait = self._waiter(number, needed, coverage, publisher, at_root)
            self._removers += attach(point, wait, publisher.synchronize, self._weights_loaded)

    def _weights_loaded(self) -> None:
        self.loads += 1

    def _waiter(
        self,
        number: int,
        needed: frozenset[int],
        coverage: Coverage,
        publisher: Publisher,
        reducer: GradientReducer | None,
    ) -> Callable[[], None]:
        def wait() -> None:
            coverage.passed(number)
            if reducer is not None and reducer.open:
                # A backward that raised left its round open; the other ranks count on the rest.
                reducer.finish()
            publisher.wait_for(needed)

        return wait

    def close(self) -> None:
        if self._live is not None:
            self._live[1].synchronize()
        for remove in self._removers:
            remove()
        self._removers = []
        self._live = None
        self._closed = True
        self.transport.close()

    @property
    def _bound(self) -> tuple[GradientReducer, Publisher]:
        if self._live is None:
            raise not_bound(self._closed)
        return self._live

    @property
    def dedicated(self) -> Sequence[nn.Parameter]:
        return ()

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        self.synchronize()
        return nullcontext()

    def adopt(self) -> None:
        """Nobody may replace a parameter."""

    # ---- gradients -----------------------------------------------------------------------

    def _deliver(self, packs: list[LivePack], first: bool) -> None:
        """Add the gradients that arrived to the stacked ones of their units."""
        destinations, sources = [], []
        for pack in packs:
            if pack.deliveries is None:
                pack.deliveries = list(self._deliveries(pack))
            for destination, source in pack.deliveries:
                destinations.append(destination)
                sources.append(source)
        if not destinations:
            return
        if first:
            torch._foreach_copy_(destinations, sources)
        else:
            torch._foreach_add_(destinations, sources)

    def _deliveries(self, pack: LivePack) -> Iterator[tuple[Tensor, Tensor]]:
        """Where each matrix of a pack goes: (stacked gradient, view of the pack)."""
        gradient_of = self._bound[1].gradient_of
        for span, view in zip(pack.pack.spans, pack.views, strict=True):
            offset = 0
            for i in span.matrices:
                matrix, target = self.plan.specs.matrices[i], gradient_of[i]
                source = view.narrow(0, offset, matrix.numel)
                offset += matrix.numel
                if matrix.transposed:
                    shape = self.plan.specs.parameters[matrix.parameter].shape
                    source = source.view(shape).transpose(0, 1)
                    yield target.view(source.shape), source
                else:
                    yield target, source.view(matrix.shape)

    def set_sync(self, sync: bool) -> bool:
        reducer, _ = self._bound
        previous, reducer.sync = reducer.sync, sync
        # What was accumulated meanwhile must be reduced, by the next backward or by `step`.
        reducer.owed = reducer.owed or (sync and not previous)
        return previous

    def reduce_gradients(self) -> None:
        reducer, publisher = self._bound
        assert self._places is not None
        self._places.check()
        publisher.check_storage()
        check_frozen(self._frozen)
        publisher.synchronize()
        ddp = self._ddp is not None
        if not reducer.open and reducer.rounds and not reducer.owed:
            left = reducer.local_matrix()
            if left and not ddp:
                raise OwnershipError(
                    f"{left!r} has a p.grad that was set after backward. Its owner has the reduced "
                    "gradient already, so this one would be lost: change gradients in a hook "
                    "(p.register_hook), or set all of them and run no backward"
                )
            reducer.owed = left is not None  # by DistributedDataParallel.no_sync
        if ddp and reducer.open:
            raise DmuonError(
                "DistributedDataParallel did not hand over the gradients of "
                f"{', '.join(reducer.missing()[:5])}: their part of the model was not used in "
                "this backward. Build it with find_unused_parameters=True"
            )
        reducer.ensure()

    def unit_gradients(self, unit: Unit) -> Tensor:
        return self._bound[1].unit_gradients(unit)

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, the others are the same everywhere."""
        reducer, publisher = self._bound
        owned = publisher.owned_gradients(reducer.present)
        shared = [p.grad for p in self.parameters if p.grad is not None]
        return Gradients(owned, shared, shared + owned)

    def zero_grad(self) -> None:
        if self._live is not None:
            self._live[0].clear()

    # ---- step ----------------------------------------------------------------------------

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer, publisher = self._bound
        publisher.launch(reducer.present, compute, apply)
        reducer.clear()
        missed = self._coverage.take_missed()
        if missed:
            # The forward that led here read them without passing their wait point.
            publisher.wait_for_parameters(missed)

    def synchronize(self) -> None:
        if self._live is not None:
            self._live[1].synchronize()

    def weights(self, unit: Unit) -> list[Tensor]:
        specs = self.plan.specs.matrices
        return [specs[i].view(self.parameters[specs[i].parameter].detach()) for i in unit.matrices]

    def published(self) -> dict[str, Tensor]:
        """What was last published of each matrix, by name; waits for pending ones."""
        _, publisher = self._bound
        publisher.synchronize()
        return publisher.published()

    def update_rms(self) -> dict[str, Tensor]:
        _, publisher = self._bound
        publisher.synchronize()
        return publisher.update_rms()
