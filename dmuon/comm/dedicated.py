"""The `dedicated` layout: a matrix and its momentum lie with its owner, and nowhere else.

::

    forward    before a group of modules runs: its weights <---broadcast--- owners; then dropped
    backward   weights again; gradients ---reduce---> owners as soon as a group has all of its own
    step       owner: momentum, Newton-Schulz, its own weights. Nothing travels
    next       the first groups' broadcasts leave as soon as their owners are done

With replicas (HSDP) weights travel inside a replica, from the owner or, elsewhere, from its
holder; gradients go to the holders first and from there to the owner; the step ends with one
broadcast of each weight from the owner to the holders, awaited by the next forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmuon.comm.dedicated_hooks import check_first_forward, hook_gradients, hook_module
from dmuon.comm.dedicated_routes import Slices, group_window
from dmuon.comm.dedicated_wire import GridWire, Publisher
from dmuon.comm.fsdp import fsdp_roots
from dmuon.comm.grid import Lanes
from dmuon.comm.layout import Apply, Compute, Gradients, check_frozen, not_bound
from dmuon.comm.materialize import Materializer
from dmuon.comm.module_groups import hook_points, module_groups
from dmuon.comm.owned import OwnedUnits
from dmuon.comm.reduction import GradientReducer
from dmuon.comm.routes import Unit, Window, units_of
from dmuon.comm.transport import Meter, Transport
from dmuon.comm.vault import Vault, shed_on_meta
from dmuon.config import DedicatedOptions
from dmuon.scheduler.dtensors import is_distributed, local_shard, local_tensor, mesh_axes
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.specs import dtype_name
from dmuon.types import OwnershipError

__all__ = ["DedicatedRuntime"]


@dataclass(frozen=True)
class _Bound:
    reducer: GradientReducer
    owned: OwnedUnits


class DedicatedRuntime:
    """See the module's docstring. ``tensor_axes`` are the mesh axes of tensor parallelism."""

    def __init__(
        self,
        plan: OwnershipPlan,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        lanes: Lanes,
        options: DedicatedOptions,
        tensor_axes: frozenset[str],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.device = device
        self.transport: Transport = lanes.world
        self.units: tuple[Unit, ...] = ()
        self.meter = Meter()
        self.loads = 0
        self.steps = 0
        self.lanes = lanes
        self._slices = slices
        self._options = options
        self._tensor_axes = tensor_axes
        self._model = weakref.ref(model)
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._muon = frozenset(plan.specs.muon())
        self._place = slices.grid.place(lanes.world.rank)
        self._sync = True
        self._backwards = 0  # since the last step
        self._gathered = 0  # rounds of reduction whose slices have been gathered
        self._live: _Bound | None = None
        self._closed = False
        self._stored: tuple[Vault, Materializer] | None = None
        self.keeps_whole = slices.grid.shape[2] == 1
        self._publisher = Publisher(
            lanes.replicas, self.meter, *self._place[:2], slices.grid.shape[0]
        )
        index = {id(p): i for i, p in enumerate(parameters)}
        self._modules = module_groups(model, options.groups, index)
        self._carrying = [g for g in self._modules if not self._muon.isdisjoint(g.parameters)]
        muon = {key: p for key, p in index.items() if p in self._muon}
        points = hook_points(model, self._carrying, muon)
        self._muon_below = {
            point.module: [muon[id(p)] for p in point.module.parameters() if id(p) in muon]
            for point in points
        }
        self._on_meta = any(p.device.type == "meta" for p in parameters)
        if self._on_meta:
            shed_on_meta(slices, parameters, lanes.world.rank)
        else:
            if options.broadcast_parameters:
                self._broadcast([*model.parameters(), *model.buffers()])
            self._store()
        self._removers = [remove for point in points for remove in hook_module(self, point)]
        self._removers.append(check_first_forward(self, model))

    # ---- weights -------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Start from the values of the first rank; a `DTensor` from those of its slice's."""
        works = []
        for tensor in tensors:
            lane = self.lanes.data if is_distributed(tensor) else self.transport
            data = local_tensor(tensor)
            whole = data if data.is_contiguous() else data.contiguous()
            works.append((lane.broadcast(whole, 0, tag="initial weights"), data, whole))
        for work, data, whole in works:
            work.wait()
            if whole is not data:
                data.copy_(whole)

    def _store(self) -> None:
        vault = Vault(
            self._slices,
            self._carrying,
            self.parameters,
            self.transport.rank,
            self.lanes.weights,
            self._options.param_dtype,
            self.device,
        )
        self._publisher.plan(vault.groups)
        materializer = Materializer(
            vault.groups,
            self.lanes.weights,
            self.meter,
            prefetch=self._options.prefetch,
            free_after_forward=self._options.free_after_forward,
            first=[g for g, spec in enumerate(self._carrying) if spec.is_root],
            before_launch=self._publisher.wait_for,
        )
        self._stored = vault, materializer

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
        for i, (spec, known) in enumerate(
            zip(self.plan.specs.parameters, self.parameters, strict=True)
        ):
            p = now.get(spec.name, known)
            if i in self._muon and p is not known and (not self._on_meta or is_distributed(p)):
                raise _replaced(spec.name, p)
            found.append(p)
        self.parameters = found
        if self._on_meta:
            self._leave_meta(model)

    def _leave_meta(self, model: nn.Module) -> None:
        for spec, p in zip(self.plan.specs.parameters, self.parameters, strict=True):
            if p.device.type == "meta":
                raise OwnershipError(
                    f"parameter {spec.name!r} is still on the meta device: call "
                    "model.to_empty(device=...) and initialize the model before dmuon.Muon(model) "
                    "and the first forward pass"
                )
        self._on_meta = False
        if self._options.broadcast_parameters:
            rest = [p for i, p in enumerate(self.parameters) if i not in self._muon]
            self._broadcast([t for t in [*rest, *model.buffers()] if not is_distributed(t)])
        self._store()
        self._publisher.publish_all()

    @property
    def _storage(self) -> tuple[Vault, Materializer]:
        if self._closed:
            raise not_bound(True)
        if self._stored is None:
            self.adopt()
        assert self._stored is not None
        return self._stored

    @property
    def dedicated(self) -> list[nn.Parameter]:
        """The parameters that are kept by their owners only."""
        return [self.parameters[p] for p in sorted(self._muon)]

    @contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """Inside, the parameters of ``module`` are whole; a collective call."""
        vault, materializer = self._storage
        inside = materializer.forward_open  # of a forward pass: it goes on afterwards
        if not inside:
            self._recover()
            vault.check()
        self._publisher.wait()
        index = {id(p): i for i, p in enumerate(self.parameters)}
        members = [index[id(p)] for p in module.parameters() if id(p) in index]
        members = [p for p in members if p in self._muon]
        vault.pin(members)
        try:
            yield
        finally:
            vault.unpin(members)
            if not inside:
                materializer.drop()  # what was launched ahead may have been written to
            self.loads += 1

    def check_state_dict(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be saved or loaded into."""
        vault, _ = self._storage
        for p in self._muon_below.get(module, ()):
            if not vault.is_pinned(p):
                raise OwnershipError(
                    f"{self.plan.specs.parameters[p].name!r} is stored by its owner only; the "
                    "other ranks have a placeholder. Call state_dict and load_state_dict on every "
                    "rank, inside `with own.materialized(model):`"
                )

    # ---- passes --------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._stored is not None and self._stored[1].backward_open

    def begin_forward(self) -> None:
        """The root is about to run."""
        vault, materializer = self._storage
        self._recover()
        vault.check()
        materializer.begin_forward()

    def end_forward(self) -> None:
        """The root has run."""
        self._storage[1].end_forward()

    def enter(self, groups: Sequence[int]) -> None:
        """A module of these groups is about to run."""
        for g in groups:
            self._storage[1].enter(g)

    def touch(self, groups: Sequence[int]) -> None:
        """A part of these groups' modules runs, normally inside them."""
        vault, materializer = self._storage
        for g in groups:
            if not vault.groups[g].in_use:
                materializer.enter(g)
                materializer.leave(g, recorded=torch.is_grad_enabled(), keep=True)

    def leave(self, groups: Sequence[int], *, recorded: bool, announced: bool) -> None:
        """A module of these groups has run. ``recorded``: by autograd; ``announced``: a hook will
        tell when its backward begins."""
        for g in groups:
            self._storage[1].leave(g, recorded=recorded, keep=recorded and not announced)

    def begin_backward(self) -> None:
        """The first hook of a backward pass has fired."""
        vault, materializer = self._storage
        materializer.begin_backward()
        for group in vault.groups:
            # Changing the dtype of a parameter's data makes autograd accumulate apart.
            parts = [max(1, group.epochs) if vault.casts(p) else 1 for p in group.parameters]
            group.awaited = sum(parts)
            if self._live is not None:
                for p, count in zip(group.parameters, parts, strict=True):
                    self._live.reducer.expected[p] = count
        if self._live is not None and self._sync:
            self._live.reducer.begin()

    def need(self, groups: Sequence[int]) -> None:
        """The backward of these groups is about to run."""
        vault, materializer = self._storage
        for g in groups:
            materializer.need(g)
        if self._live is not None and self._live.reducer.open:
            # They have no gradients: the others need not wait for the end.
            self._live.reducer.give_up(
                p
                for group in materializer.idle()
                for p in group.parameters
                if not vault.is_pinned(p)
            )

    def take_gradient(self, parameter: int) -> None:
        """Autograd has accumulated into a parameter's ``grad``."""
        is_matrix = parameter in self._muon
        if is_matrix:
            self._storage[0].group_of[parameter].arrived += 1
        if self._live is None or not self._live.reducer.open:
            return
        reducer = self._live.reducer
        reducer.take(parameter, reducer.gradient_of(parameter))
        if is_matrix:
            self.parameters[parameter].grad = None
        reducer.launch_ready()

    def end_backward(self) -> None:
        """Autograd is done, or has raised."""
        vault, materializer = self._storage
        reducer = None if self._live is None else self._live.reducer
        if reducer is not None and reducer.open:
            # First, for another rank may wait for these before it sends what comes next.
            reducer.flush()
        materializer.end_backward()
        if reducer is not None and reducer.open:
            reducer.finish()
        self._backwards += 1
        for group in vault.groups:
            group.epochs = 0

    def _recover(self) -> None:
        """End a backward that raised: the other ranks count on the rest of it."""
        if self.in_backward:
            self.end_backward()

    # ---- binding and closing -------------------------------------------------------------

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        if self._live is not None:
            raise OwnershipError(
                "these parameters already have a dmuon.Muon; to make another one, call "
                "own.close() and dmuon.dedicate_params(model) again"
            )
        vault, _ = self._storage
        self.units = units_of(self.plan, groups)
        owned = OwnedUnits(
            self._slices,
            self.units,
            self.transport.rank,
            self.lanes.tensors,
            self.meter,
            vault.weight_of,
            payload_dtype,
            self._options.reduce_dtype,
            self.device,
        )
        windows = self._windows()
        reducer = GradientReducer(
            self.plan.specs,
            self.parameters,
            GridWire(self.lanes, self._slices, *self._place[:2], self.meter),
            None,
            self.meter,
            windows,
            owned.deliver,
        )
        self._live = _Bound(reducer, owned)
        tracked = [(p, self.parameters[p]) for window in windows for p in window.parameters]
        self._removers += hook_gradients(self, tracked)

    def _windows(self) -> list[Window]:
        """One window a group in the order of backward; the root's, and what is in none, last.

        Parameters that neither dmuon nor tensor parallelism has distributed are all-reduced here;
        the others are the framework's.
        """
        dtype = self._options.reduce_dtype
        name = None if dtype is None else dtype_name(dtype)
        rest = {
            i: local_tensor(p).numel()
            for i, p in enumerate(self.parameters)
            if i not in self._muon and set(mesh_axes(p)) <= self._tensor_axes
        }
        windows, last = [], []
        for spec in reversed(self._modules):
            members = [p for p in spec.parameters if p in self._muon or p in rest]
            if spec.is_root or self._muon.isdisjoint(members):
                last += members
            else:
                windows.append(group_window(self._slices, members, rest, self._place[2], name))
        if last:
            windows.append(group_window(self._slices, last, rest, self._place[2], name))
        return windows

    @property
    def _bound(self) -> _Bound:
        if self._live is None:
            raise not_bound(self._closed)
        return self._live

    def close(self) -> None:
        """Give every rank the whole weights again and remove every hook; a collective call."""
        if self._stored is not None:
            vault, materializer = self._stored
            try:
                materializer.drop()
                self._publisher.wait()
                vault.restore()
            except OwnershipError:
                pass  # torch.distributed was shut down first: nothing can travel any more
        for remove in self._removers:
            remove()
        self._removers = []
        self._live = None
        self._stored = None
        self._closed = True
        self.lanes.close()

    # ---- gradients -----------------------------------------------------------------------

    def set_sync(self, sync: bool) -> bool:
        reducer = self._bound.reducer
        previous, self._sync = self._sync, sync
        reducer.owed = reducer.owed or (sync and not previous)
        model = self._model()
        for root in () if model is None else fsdp_roots(model):
            root.set_requires_gradient_sync(sync)
        return previous

    def reduce_gradients(self) -> None:
        reducer, owned = self._bound.reducer, self._bound.owned
        vault, materializer = self._storage
        vault.check()
        check_frozen(self._frozen)
        self._recover()
        if not self._backwards:
            # No backward ran here. The other ranks' passes count on this one all the same.
            materializer.pass_by()
            self._backwards = 1
        left = None if reducer.owed or not reducer.rounds else reducer.local_matrix()
        if left:
            raise OwnershipError(
                f"{left!r} has a p.grad that was set after backward. Its owner has the reduced "
                "gradient already, so this one would be lost: change gradients in a hook "
                "(p.register_hook)"
            )
        reducer.ensure()
        if self._gathered != reducer.rounds:  # not again between clipping and step
            owned.gather()
            self._gathered = reducer.rounds

    def unit_gradients(self, unit: Unit) -> Tensor:
        return self._bound.owned.gradients[unit]

    def weights(self, unit: Unit) -> list[Tensor]:
        return self._bound.owned.weights(unit)

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, FSDP2's in shards, the others everywhere."""
        reducer, owned = self._bound.reducer, self._bound.owned
        counted, common = owned.owned(reducer.present), []
        stored = owned.stored(reducer.present)
        for i, p in enumerate(self.parameters):
            grad = None if i in self._muon else reducer.gradient_of(i)
            if grad is None:
                continue
            stored.append(grad)
            if not is_distributed(p):
                common.append(grad)
            elif self._counts(p):
                counted.append(grad)
        return Gradients(counted, common, stored)

    def _counts(self, p: Tensor) -> bool:
        """Whether this rank's shard of ``p`` is the first of its kind in the mesh."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if any(local_shard("", p, rank).replica):
            return False
        axes, (replica, shard, tensor) = set(mesh_axes(p)), self._place
        over_tensors, over_data = bool(axes & self._tensor_axes), bool(axes - self._tensor_axes)
        return (over_tensors or tensor == 0) and (over_data or (replica, shard) == (0, 0))

    def zero_grad(self) -> None:
        if self._live is not None:
            self._recover()
            self._live.reducer.clear()
            self._gathered = 0

    # ---- step ----------------------------------------------------------------------------

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer, owned = self._bound.reducer, self._bound.owned
        self._storage[1].begin_step()
        self._publisher.begin()
        self.steps += 1
        todo = {i for unit in owned.mine for i in unit.matrices}
        sliced = not self.keeps_whole
        if not sliced:
            self._launch_ahead(todo)
        for unit in owned.mine:
            where = owned.where(unit, reducer.present)
            owned.compute(unit, where, compute)
            if not sliced:
                owned.apply(unit, where, apply)
                todo.difference_update(unit.matrices)
                self._launch_ahead(todo)
        if sliced:
            owned.scatter(reducer.present, apply)
        self._launch_ahead(set())
        reducer.clear()
        self._backwards = self._gathered = 0

    def _launch_ahead(self, todo: set[int]) -> None:
        """Publish to holders, or launch the next forward pass's first groups, as far as done."""
        if self._slices.grid.shape[0] > 1:
            self._publisher.launch_ready(todo)
            return
        _, materializer = self._storage
        matrices = self.plan.specs.matrices
        pending = {matrices[i].parameter for i in todo}
        while (group := materializer.next_ahead()) and pending.isdisjoint(group.parameters):
            materializer.prelaunch()

    def synchronize(self) -> None:
        self._publisher.wait()

    def update_rms(self) -> dict[str, Tensor]:
        return self._bound.owned.update_rms()


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
