"""Weights to where they are used: before a group of modules runs, and again before its backward.

Each forward pass broadcasts every group once, in the order of registration, each backward pass in
the reverse order; an *order* knows how far it has come. A rank that skips a module, or calls two in
another order, still issues the same broadcasts in the same order as the others::

    forward    b0 b1 | run 0 | b2 | run 1 | b3 | run 2 ...      prefetch = 1
    backward   b3 b2 | run 3 | b1 | run 2 | ...

Backward passes by group g right before the broadcast of its place g + prefetch + 1, on every rank:
there the gradients of g leave if it is known that none will come, and on a rank that has them all
they have left by then.

What a rank has not asked for when the pass ends, it receives then, and drops. A group that is asked
for again after it has been dropped is sent once more, on all ranks that run the same program; from
the next pass on it is kept until its last call.

With replicas (HSDP) the owner's weights go once a step to the holders in the other replicas first
(`Publisher`); forward and backward broadcast inside a replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Slices
from dmuon.comm.dedicated.storage import Group, Range, Storage, shed_on_meta
from dmuon.comm.layout import not_bound
from dmuon.comm.process_groups import ProcessGroups, start_from_first
from dmuon.comm.reducer import GradientReducer
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed
from dmuon.scheduler.select import trainable_parameters
from dmuon.types import OwnershipError

__all__ = ["Prefetcher", "Publisher", "Weights"]


class _Order:
    """In which order a pass launches groups, and how many of them it has: ``cursor``."""

    def __init__(self, groups: Sequence[int], phase: str) -> None:
        self.groups = groups
        self.phase = phase
        self.place = {g: i for i, g in enumerate(groups)}
        self.cursor = 0
        self.open = False


class Prefetcher:
    """Has weights there when passes over the model need them, and sends gradients in turn.

    ``first`` groups (those of the root) are needed first in both passes. ``before_launch`` is
    called with a group whose weights are about to leave. There is a ``reducer`` once an optimizer
    has bound itself; without ``sync`` it waits. ``steps`` counts how often weights have changed,
    ``backwards`` the backward passes since then.
    """

    def __init__(
        self,
        storage: Storage,
        transport: Transport,
        meter: Meter,
        options: DedicatedOptions,
        first: Sequence[int],
        before_launch: Callable[[Group], None],
    ) -> None:
        self.groups = storage.groups
        self.steps = 0
        self.backwards = 0
        self.sync = True
        self.reducer: GradientReducer | None = None
        self._storage = storage
        self._transport = transport
        self._meter = meter
        self._prefetch = options.prefetch
        self._free = options.free_after_forward
        self._before_launch = before_launch
        others = [g for g in range(len(self.groups)) if g not in first]
        self._first = len(first)
        self._forward = _Order([*first, *others], "forward")
        self._backward = _Order([*first, *reversed(others)], "backward")
        self._prelaunched = 0
        self._needed: set[int] = set()  # asked for in this backward pass, and not freed
        self._passed = 0  # how many groups of it are passed
        self._recorded = False  # by autograd, in the forward pass that is open
        self._recordings = 0  # forward passes that were, since the last step

    # ---- broadcasts --------------------------------------------------------------------------

    def _launch(self, g: int, phase: str) -> None:
        self._before_launch(self.groups[g])
        self._meter.add_bytes("weights", self.groups[g].launch(self._transport, phase))

    def _next(self, order: _Order, *, ending: bool = False) -> Group:
        if order is self._backward:
            self._pass(ending=ending)
        g = order.groups[order.cursor]
        order.cursor += 1
        if self._free or not self.groups[g].valid:
            self._launch(g, order.phase)
        return self.groups[g]

    def _ask(self, order: _Order, g: int) -> None:
        """Launch ``g``, what comes before it, and what is prefetched behind it."""
        last = min(order.place[g] + self._prefetch, len(order.groups) - 1)
        while order.cursor <= last:
            self._next(order)
        if not self.groups[g].valid:
            self._launch(g, order.phase)  # again: it was dropped in this pass

    def _complete(self, order: _Order) -> None:
        """Take part in the broadcasts of what was not asked for."""
        while order.cursor < len(order.groups):
            group = self._next(order, ending=True)
            if self._free and not group.in_use:
                group.free()
        order.open = False

    # ---- forward -----------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        return self._forward.open

    def begin_forward(self) -> None:
        """The root is about to run; a pass that was broken off ends first."""
        self.recover()
        self._storage.check()
        if self._forward.open:
            self.end_forward()
        self._open_forward()

    def _open_forward(self) -> None:
        order = self._forward
        order.open = True
        self._recorded = False
        order.cursor, self._prelaunched = self._prelaunched, 0
        for group in self.groups:
            group.running = group.calls = 0

    def enter(self, g: int) -> None:
        """A module of the group is about to run."""
        if not self._forward.open:
            self._open_forward()
        self._ask(self._forward, g)
        group = self.groups[g]
        group.use()
        group.ran = True
        group.running += 1

    def touch(self, g: int) -> None:
        """A part of the group's modules runs, normally inside them."""
        if not self.groups[g].running:  # called by itself, so nobody announces its backward
            recorded = torch.is_grad_enabled()
            self.enter(g)
            self.leave(g, recorded=recorded, keep=recorded, free=False)

    def leave(self, g: int, *, recorded: bool, keep: bool, free: bool = True) -> None:
        """It has run. ``recorded``: by autograd; ``keep``: its backward may come unannounced; not
        ``free``: it is only about to run, and nothing will tell when it has."""
        group = self.groups[g]
        if recorded:
            group.record()
            self._recorded = True
        group.running -= 1
        group.keep = group.keep or keep
        if group.running > 0:
            return
        group.calls += 1
        if free and self._free and group.calls >= group.expected and not group.keep:
            group.free()

    def end_forward(self) -> None:
        """Every rank has issued every broadcast of the pass when this returns."""
        if not self._forward.open:
            return
        for group in self.groups:
            if group.calls:
                group.expected = group.calls
            group.running = 0
            if self._free and group.valid and not group.keep:
                group.free()
        self._recordings += self._recorded
        self._complete(self._forward)

    # ---- backward ----------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._backward.open

    def begin_backward(self) -> None:
        """The first hook of a backward pass has fired."""
        self._open_backward()
        for group in self.groups:
            # Changing the dtype of a parameter's data makes autograd accumulate apart.
            casts = self._storage.casts
            parts = [max(1, group.epochs) if casts(p) else 1 for p in group.parameters]
            group.awaited = sum(parts)
            if self.reducer is not None:
                self.reducer.expected.update(zip(group.parameters, parts, strict=True))
        if self.reducer is not None and self.sync:
            self.reducer.begin()

    def _open_backward(self) -> None:
        self.end_forward()
        self._backward.open = True
        self._backward.cursor = 0
        self._passed = self._first
        self._needed.clear()
        for group in self.groups:
            group.arrived, group.asked = 0, False

    def need(self, g: int) -> None:
        """The backward of the group is about to run."""
        for i in [i for i in self._needed if i != g and self.groups[i].done]:
            self.groups[i].free()
            self._needed.discard(i)
        self._needed.add(g)
        self.groups[g].asked = True
        self._ask(self._backward, g)
        self.groups[g].use()
        self._pass()

    def _pass(self, *, ending: bool = False) -> None:
        """Send gradients of the groups that backward has passed by, at their places among the
        broadcasts, where the ranks that have all of theirs send them.

        Zeros of a group that neither ran in forward nor was asked for since; as the pass is
        ``ending``, what there is of any.
        """
        end = max(self._passed, self._backward.cursor - self._prefetch)
        passed = self._backward.groups[self._passed : end]
        self._passed = end
        if self.reducer is None or not self.reducer.open:
            return
        for group in (self.groups[g] for g in passed):
            if ending:
                self.reducer.give_up(group.parameters)
            elif not (group.ran or group.asked):
                pinned = self._storage.is_pinned
                self.reducer.give_up([p for p in group.parameters if not pinned(p)])

    def take_gradient(self, parameter: int, p: Tensor) -> None:
        """Autograd has accumulated into the ``grad`` of ``p``."""
        group = self._storage.group_of.get(parameter)
        if group is not None:
            group.arrived += 1
        reducer = self.reducer
        if reducer is None or not reducer.open:
            return
        reducer.take(parameter, reducer.gradient_of(parameter))
        if group is not None:
            p.grad = None
        reducer.launch_ready()

    def end_backward(self) -> None:
        """Autograd is done, or has raised. Every rank has issued every broadcast of the pass when
        this returns; nothing stays materialized."""
        self._close_backward()
        if self.reducer is not None and self.reducer.open:
            self.reducer.finish()
        self.backwards += 1
        for group in self.groups:
            group.settle()

    def _close_backward(self) -> None:
        for group in self.groups:
            if self._free and group.valid:
                group.free()
        self._passed = self._first
        self._complete(self._backward)
        self.drop()

    def recover(self) -> None:
        """End a backward that raised: the other ranks count on the rest of it."""
        if self._backward.open:
            self.end_backward()

    # ---- between passes ----------------------------------------------------------------------

    def pass_by(self) -> None:
        """Join the other ranks' passes since the step if no backward ran here.

        They count on this rank's part all the same, and in the same order: of a backward pass, and
        of the forward pass before it if there was none here.
        """
        if self.backwards:
            return
        if self.reducer is not None:
            self.reducer.begin_owed()
        if not self._forward.open and not self._recordings:
            self._open_forward()
        self._open_backward()
        self._close_backward()
        self.backwards = 1

    def drop(self) -> None:
        """Free every group: the weights may have changed, or are no longer needed."""
        for group in self.groups:
            if group.valid or group.in_use:
                group.free()
        self._forward.open = self._backward.open = False
        self._prelaunched = 0

    def begin_step(self) -> None:
        """The weights are about to change."""
        self.drop()
        self.steps += 1
        self.backwards = 0
        self._recordings = 0
        for group in self.groups:
            group.ran = False
            group.epochs = 0

    def launch_ahead(self, todo: Set[int]) -> None:
        """Launch the first groups of the next forward pass, up to one with a matrix of ``todo``."""
        groups = self._forward.groups
        while self._prelaunched < min(self._first + self._prefetch + 1, len(groups)):
            g = groups[self._prelaunched]
            if not self.groups[g].matrices.isdisjoint(todo):
                return
            self._launch(g, "forward")
            self._prelaunched += 1


class Publisher:
    """Once a step, weights from their owners to the holders in the other replicas.

    ``place`` is this rank's (replica, shard); ``transport`` connects the ranks of one shard.
    """

    def __init__(
        self, groups: Sequence[Group], transport: Transport, meter: Meter, place: tuple[int, int]
    ) -> None:
        self._transport = transport
        self._meter = meter
        self._replica, shard = place
        # In the order in which the next forward pass needs it.
        self._order: list[tuple[Group, Range, Tensor]] = [
            (group, piece, live.stored(piece.start, piece.numel))
            for group in groups
            for live in group.buckets
            for piece in live.bucket.publishes
            if piece.shard == shard
        ]
        self._next = 0
        self._pending: dict[int, list[Work]] = {}  # by id of the group

    def begin(self) -> None:
        """Weights are about to change."""
        self.wait()
        self._next = 0

    def launch_ready(self, todo: Set[int]) -> None:
        """Publish, in the fixed order, up to the first range with a matrix of ``todo``."""
        while self._next < len(self._order):
            group, piece, stored = self._order[self._next]
            if piece.replica == self._replica and not piece.matrices.isdisjoint(todo):
                return
            self._meter.add("weights to holders", stored)
            tag = f"publish {group.name}"
            work = self._transport.broadcast(stored, piece.replica, tag=tag)
            self._pending.setdefault(id(group), []).append(work)
            self._next += 1

    def wait_for(self, group: Group) -> None:
        """Have what was published of a group."""
        for work in self._pending.pop(id(group), ()):
            work.wait()

    def wait(self) -> None:
        for works in self._pending.values():
            for work in works:
                work.wait()
        self._pending.clear()


class Weights:
    """The weights of a model: taken over, found again, read directly, given back.

    ``parameters`` are the planned ones as they are now; ``dedicated`` the numbers of those that
    their owners keep. ``members`` are (name, parameters, uses, is the root's) of the modules whose
    weights travel together, ``below`` the numbers of the dedicated parameters below a module.
    """

    def __init__(
        self,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups,
        meter: Meter,
        options: DedicatedOptions,
        device: torch.device,
        members: Sequence[tuple[str, Sequence[int], int, bool]],
        below: Mapping[nn.Module, Sequence[int]],
    ) -> None:
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.dedicated = frozenset(slices.plan.specs.muon_parameters())
        self.loads = 0
        self._slices = slices
        self._specs = slices.plan.specs.parameters
        self._groups = process_groups
        self._meter = meter
        self._options = options
        self._device = device
        self._model = weakref.ref(model)
        self._closed = False
        self._stored: tuple[Storage, Prefetcher, Publisher] | None = None
        self._members = members
        self._below = below
        self._on_meta = any(p.device.type == "meta" for p in parameters)
        if self._on_meta:
            shed_on_meta(slices, parameters, process_groups.world.rank)
        else:
            if options.broadcast_parameters:
                self._start_from_first([*model.parameters(), *model.buffers()])
            self._store()

    def _start_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Equal values everywhere; of a `DTensor` wherever the same slice of it lies."""
        world, data = self._groups.world, self._groups.data
        start_from_first([(t, data if is_distributed(t) else world) for t in tensors])

    def _store(self) -> None:
        groups, rank = self._groups, self._groups.world.rank
        storage = Storage(
            self._slices,
            [(name, numbers, uses) for name, numbers, uses, _ in self._members],
            self.parameters,
            rank,
            groups.weights,
            self._options.param_dtype,
            self._device,
        )
        several, place = self._slices.grid.shape[0] > 1, self._slices.grid.place(rank)[:2]
        published = storage.groups if several else ()
        publisher = Publisher(published, groups.replicas, self._meter, place)
        prefetcher = Prefetcher(
            storage,
            groups.weights,
            self._meter,
            self._options,
            [g for g, (_, _, _, is_root) in enumerate(self._members) if is_root],
            publisher.wait_for,
        )
        self._stored = storage, prefetcher, publisher

    def adopt(self) -> None:
        """Find the parameters as they are now: `fully_shard` and `to_empty` make new ones.

        Raises:
            OwnershipError: a dedicated parameter has been replaced, or is still on the meta device.
        """
        model = self._model()
        if model is None:
            return
        now = dict(trainable_parameters(model))
        found = []
        for i, (spec, known) in enumerate(zip(self._specs, self.parameters, strict=True)):
            p = now.get(spec.name, known)
            if i in self.dedicated and p is not known and (not self._on_meta or is_distributed(p)):
                raise _replaced(spec.name, p)
            found.append(p)
        self.parameters = found
        if self._on_meta:
            self._leave_meta(model)

    def _leave_meta(self, model: nn.Module) -> None:
        for spec, p in zip(self._specs, self.parameters, strict=True):
            if p.device.type == "meta":
                raise OwnershipError(
                    f"parameter {spec.name!r} is still on the meta device: call "
                    "model.to_empty(device=...) and initialize the model before dmuon.Muon(model) "
                    "and the first forward pass"
                )
        self._on_meta = False
        if self._options.broadcast_parameters:
            rest = [p for i, p in enumerate(self.parameters) if i not in self.dedicated]
            self._start_from_first([t for t in [*rest, *model.buffers()] if not is_distributed(t)])
        self._store()
        self.publisher.launch_ready(frozenset())

    def _ready(self) -> tuple[Storage, Prefetcher, Publisher]:
        if self._closed:
            raise not_bound(True)
        if self._stored is None:
            self.adopt()
        assert self._stored is not None
        return self._stored

    @property
    def storage(self) -> Storage:
        return self._ready()[0]

    @property
    def prefetcher(self) -> Prefetcher:
        return self._ready()[1]

    @property
    def publisher(self) -> Publisher:
        return self._ready()[2]

    @contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """Inside, the parameters of ``module`` are whole; a collective call."""
        storage, prefetcher, publisher = self._ready()
        inside = prefetcher.in_forward  # of a forward pass: it goes on afterwards
        if not inside:
            prefetcher.recover()
            storage.check()
        publisher.wait()
        index = {id(p): i for i, p in enumerate(self.parameters)}
        numbers = [index[id(p)] for p in module.parameters() if id(p) in index]
        numbers = [p for p in numbers if p in self.dedicated]
        storage.pin(numbers)
        try:
            yield
        finally:
            storage.unpin(numbers)
            if not inside:
                prefetcher.drop()  # what was launched ahead may have been written to
            self.loads += 1

    def check_whole(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be saved, copied or loaded into."""
        storage = self.storage
        if self._groups.weights.world == 1:
            self.loads += 1  # nothing is a placeholder, and this may load weights
            return
        for p in self._below.get(module, ()):
            if not storage.is_pinned(p):
                raise OwnershipError(
                    f"{self._specs[p].name!r} is stored by its owner only; the other ranks have a "
                    "placeholder. Call state_dict, load_state_dict, copy.deepcopy or pickle on "
                    "every rank, inside `with own.materialized(model):`"
                )

    def recover(self) -> None:
        """End a backward pass that was broken off."""
        if self._stored is not None:
            self._stored[1].recover()

    def synchronize(self) -> None:
        """Wait for what is being published to the holders."""
        if self._stored is not None:
            self._stored[2].wait()

    def close(self) -> None:
        """Give every rank the whole weights again; a collective call."""
        if self._stored is not None:
            storage, prefetcher, publisher = self._stored
            try:
                prefetcher.drop()
                publisher.wait()
                storage.restore()
            except OwnershipError:
                pass  # torch.distributed was shut down first: nothing can travel any more
        self._stored = None
        self._closed = True


def _replaced(name: str, p: nn.Parameter) -> OwnershipError:
    if is_distributed(p):
        return OwnershipError(
            f"fully_shard has taken parameter {name!r}, which dmuon dedicates to its owner: pass "
            "ignored_params=own.dedicated_params to every fully_shard call, or make the calls "
            "inside `with own.ignored_by_fully_shard():`"
        )
    return OwnershipError(
        f"{name!r} is another parameter object now than at dedicate_params: change values in "
        "place, inside `with own.materialized(module):`"
    )
