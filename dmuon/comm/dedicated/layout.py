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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmuon.comm.dedicated.hooks import check_first_forward, hook_gradients, hook_module
from dmuon.comm.dedicated.materialize import Materializer
from dmuon.comm.dedicated.module_groups import hook_points, module_groups
from dmuon.comm.dedicated.owned import OwnedUnits
from dmuon.comm.dedicated.passes import WeightPasses
from dmuon.comm.dedicated.routes import Slices, group_window
from dmuon.comm.dedicated.vault import Vault
from dmuon.comm.dedicated.weights import DedicatedWeights
from dmuon.comm.dedicated.wire import GridWire
from dmuon.comm.hooks import fsdp_roots
from dmuon.comm.layout import (
    Apply,
    Compute,
    Gradients,
    PlannedPlaces,
    check_frozen,
    not_bound,
)
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.reduction import GradientReducer
from dmuon.comm.routes import Unit, Window, units_of
from dmuon.comm.transport import Meter, Transport
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed, local_shard, local_tensor, mesh_axes
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import dtype_name
from dmuon.types import OwnershipError

__all__ = ["DedicatedRuntime"]


@dataclass(frozen=True)
class _Bound:
    reducer: GradientReducer
    owned: OwnedUnits
    counted: frozenset[int]  # distributed parameters whose shard here counts in a norm


class DedicatedRuntime:
    """See the module's docstring. ``tensor_axes`` are the mesh axes of tensor parallelism."""

    def __init__(
        self,
        plan: OwnershipPlan,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups,
        options: DedicatedOptions,
        tensor_axes: frozenset[str],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.device = device
        self.transport: Transport = process_groups.world
        self.units: tuple[Unit, ...] = ()
        self.meter = Meter()
        self.keeps_whole = slices.grid.shape[2] == 1
        self.process_groups = process_groups
        self._slices = slices
        self._options = options
        self._tensor_axes = tensor_axes
        self._model = weakref.ref(model)
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._place = slices.grid.place(process_groups.world.rank)
        self._gathered = 0  # rounds of reduction whose slices have been gathered
        self._live: _Bound | None = None
        self._places: PlannedPlaces | None = None
        self._closed = False
        self._muon = muon = frozenset(plan.specs.muon())
        index = {id(p): i for i, p in enumerate(parameters)}
        modules = module_groups(model, options.groups, index)
        # Not kept: an ownership refers to no module, for the model refers to it.
        points = hook_points(
            model,
            [group for group in modules if not muon.isdisjoint(group.parameters)],
            {key: p for key, p in index.items() if p in muon},
        )
        self.kept = DedicatedWeights(
            plan,
            slices,
            model,
            parameters,
            process_groups,
            self.meter,
            options,
            device,
            modules,
            points,
        )
        self.passes = WeightPasses(self.kept)
        self._removers = [r for point in points for r in hook_module(self.passes, point)]
        self._end_watch = check_first_forward(self.passes, model)
        self._removers.append(self._end_watch)

    # ---- weights -------------------------------------------------------------------------

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self.kept.parameters

    @property
    def loads(self) -> int:
        return self.kept.loads

    @property
    def dedicated(self) -> list[nn.Parameter]:
        """The parameters that are kept by their owners only."""
        return [self.parameters[p] for p in sorted(self._muon)]

    def adopt(self) -> None:
        self.kept.adopt()

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, the parameters of ``module`` are whole; a collective call."""
        return self.kept.materialized(module, self.passes.recover)

    @property
    def _storage(self) -> tuple[Vault, Materializer]:
        return self.kept.storage

    # ---- binding and closing -------------------------------------------------------------

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        if self._live is not None:
            raise OwnershipError(
                "these parameters already have a dmuon.Muon; to make another one, call "
                "own.close() and dmuon.dedicate_params(model) again"
            )
        vault, _ = self._storage
        self._end_watch()  # `Muon` has looked
        self.units = units_of(self.plan, groups)
        owned = OwnedUnits(
            self._slices,
            self.units,
            self.transport.rank,
            self.process_groups.tensors,
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
            GridWire(self.process_groups, self._slices, *self._place[:2], self.meter),
            None,
            self.meter,
            windows,
            owned.deliver,
        )
        counted = frozenset(
            i
            for i, p in enumerate(self.parameters)
            if i not in self._muon and is_distributed(p) and self._counts(p)
        )
        self._live = _Bound(reducer, owned, counted)
        self._places = self._planned_places()
        self.passes.reducer = reducer
        tracked = [(p, self.parameters[p]) for window in windows for p in window.parameters]
        self._removers += hook_gradients(self.passes, tracked)

    def _planned_places(self) -> PlannedPlaces | None:
        model = self._model()
        if model is None:
            return None
        # FSDP2 puts other objects into the place of its own parameters while a unit is gathered.
        theirs = [p for p in self.parameters if is_distributed(p)] if fsdp_roots(model) else []
        dedicated = set(self.dedicated)
        return PlannedPlaces(model, self.parameters, [p for p in theirs if p not in dedicated])

    def _windows(self) -> list[Window]:
        """One window a group in the order of backward; the root's, and what is in none, last.

        Parameters that neither dmuon nor tensor parallelism has distributed are all-reduced here;
        the others are the framework's. All are in the last window: nothing tells of a gain or bias
        that no gradient will come, so in a group's window it would hold that one up.
        """
        dtype = self._options.reduce_dtype
        name = None if dtype is None else dtype_name(dtype)
        rest = {
            i: local_tensor(p).numel()
            for i, p in enumerate(self.parameters)
            if i not in self._muon and set(mesh_axes(p)) <= self._tensor_axes
        }
        windows, last = [], []
        for spec in reversed(self.kept.modules):
            matrices = [] if spec.is_root else [p for p in spec.parameters if p in self._muon]
            if matrices:
                windows.append(group_window(self._slices, matrices, rest, self._place[2], name))
            last += [
                p for p in spec.parameters if p not in matrices and (p in self._muon or p in rest)
            ]
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
        self.kept.close()
        for remove in self._removers:
            remove()
        self._removers = []
        self._live = self.passes.reducer = None
        self._closed = True
        self.process_groups.close()

    # ---- gradients -----------------------------------------------------------------------

    def set_sync(self, sync: bool) -> bool:
        reducer = self._bound.reducer
        previous, self.passes.sync = self.passes.sync, sync
        reducer.owed = reducer.owed or (sync and not previous)
        model = self._model()
        for root in () if model is None else fsdp_roots(model):
            root.set_requires_gradient_sync(sync)
        return previous

    def reduce_gradients(self) -> None:
        reducer, owned = self._bound.reducer, self._bound.owned
        if self._places is not None:
            self._places.check()
        self._storage[0].check()
        check_frozen(self._frozen)
        self.passes.recover()
        self.passes.pass_by()
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
            elif i in self._bound.counted:
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
            self.passes.recover()
            self._live.reducer.clear()
            self._gathered = 0

    # ---- step ----------------------------------------------------------------------------

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer, owned = self._bound.reducer, self._bound.owned
        self._storage[1].begin_step()
        self.kept.publisher.begin()
        self.passes.steps += 1
        todo = {i for unit in owned.mine for i in unit.matrices}
        sliced = not self.keeps_whole
        if not sliced:
            self._launch_ahead(todo)
        for unit in owned.mine:
            owned.compute([unit], reducer.present, compute, None if sliced else apply)
            if not sliced:
                todo.difference_update(unit.matrices)
                self._launch_ahead(todo)
        if sliced:
            owned.scatter(reducer.present, apply)
        self._launch_ahead(set())
        reducer.clear()
        self.passes.backwards = self._gathered = 0

    def _launch_ahead(self, todo: set[int]) -> None:
        """Publish to holders, or launch the next forward pass's first groups, as far as done."""
        if self._slices.grid.shape[0] > 1:
            self.kept.publisher.launch_ready(todo)
            return
        _, materializer = self._storage
        while (group := materializer.next_ahead()) and group.matrices.isdisjoint(todo):
            materializer.prelaunch()

    def synchronize(self) -> None:
        self.kept.publisher.wait()

    def update_rms(self) -> dict[str, Tensor]:
        return self._bound.owned.update_rms()
