"""The `dedicated` layout: a matrix and its momentum lie with its owner, and nowhere else.

::

    forward    before a group of modules runs: its weights <---broadcast--- owners; then dropped
    backward   weights again; gradients ---reduce---> owners as soon as a group has all of its own
    step       owner: momentum, Newton-Schulz, its own weights. Nothing travels
    next       the first groups' broadcasts leave as soon as their owners are done

With replicas (HSDP) weights travel inside a replica, from the owner or, elsewhere, from its
holder; gradients go to the holders first and from there to the owner; the step ends with one
broadcast of each weight from the owner to the holders, awaited by the next forward pass.

Under tensor parallelism a weight, and what is reduced of its gradient, lies in slices on the ranks
with the owner's data coordinates. In the step these travel as boxes, in a `Pipeline` over those
ranks: gradients to the owner, updates back.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmuon.comm.buckets import GradientBucket, Slices, cut_buckets, gradient_bucket
from dmuon.comm.dedicated.hooks import (
    ModuleGroup,
    check_first_forward,
    hook_gradients,
    hook_module,
    hook_points,
    module_groups,
)
from dmuon.comm.dedicated.prefetch import Weights
from dmuon.comm.hooks import fsdp_roots
from dmuon.comm.layout import Apply, Compute, Gradients, PlannedPlaces
from dmuon.comm.owners import OwnedGradients, OwnerRuntime, Unstack, rows_of, set_rows
from dmuon.comm.pipeline import Pipeline
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.reducer import GradientReducer
from dmuon.comm.routes import Part, Unit, bucket_route
from dmuon.comm.transport import Meter
from dmuon.config import DedicatedOptions, ShardedOptions
from dmuon.dtensors import is_distributed, local_shard, local_tensor, mesh_axes
from dmuon.scheduler.shards import LocalShard, RankShards, ShardMap
from dmuon.types import OwnershipError

__all__ = ["DedicatedRuntime"]


_Parts = list[tuple[int, int, Tensor]]  # position in a unit, matrix, its part


class _Assembly:
    """The step under tensor parallelism, of units whose gradients have one dtype, and what is
    published of them one, that of ``like``."""

    def __init__(
        self,
        slices: Slices,
        units: Sequence[Unit],
        owned: OwnedGradients,
        groups: ProcessGroups,
        meter: Meter,
        reduced: torch.dtype,
        like: Tensor,
    ) -> None:
        self._units = units
        specs, together = slices.plan.specs, tuple(range(slices.grid.shape[2]))
        # A parameter that is whole everywhere is one that each of these ranks replicates.
        reports = [
            RankShards.of(
                t,
                [
                    LocalShard(together, (t,), (0,) * len(spec.shape), spec.shape)
                    if boxes is None
                    else LocalShard(together, (), boxes[t].offset, boxes[t].shape)
                    for spec, boxes in zip(specs.parameters, slices.boxes, strict=True)
                ],
            )
            for t in together
        ]
        copies, holders = ((together,),) * len(specs.parameters), (together,) * len(specs.matrices)
        shards = ShardMap(specs, tuple(reports), copies, holders)
        near = [replace(u, owner=slices.owner_place(u.matrices[0])[2]) for u in units]
        options = ShardedOptions()
        buckets = cut_buckets(
            near, range(len(near)), options.bucket_bytes, options.min_buckets, like.element_size()
        )
        routes = [bucket_route(shards, near, b, groups.tensors.rank) for b in buckets]
        self._pipeline = Pipeline(
            routes, near, groups.tensors, meter, options.buffers, like, inbound=reduced
        )
        self._sources: list[tuple[list[Tensor], list[Tensor]]] = []
        self._landed: list[list[tuple[int, _Parts]]] = []
        for bucket in self._pipeline.buckets:
            sent = [part for _, part in _views(bucket.send, bucket.route.held.parts)]
            here = [
                (view, owned.here[i]) for parts in sent for _, i, view in parts
            ]  # made once: what is kept never moves
            self._sources.append(([view for view, _ in here], [grad for _, grad in here]))
            landed = _views(bucket.landed, bucket.route.held.parts)
            copied = _views(bucket.copies_in, bucket.route.copies_in.parts)
            self._landed.append([*landed, *copied])

    def run(
        self,
        compute: Callable[[Unit, Tensor], Tensor | None],
        update: Callable[[Unit, _Parts], None],
    ) -> None:
        """Call ``compute(unit, gradients)`` at the unit's owner, and on every rank with its data
        coordinates ``update`` with the parts of the results."""

        def fill(b: int) -> None:
            if self._sources[b][0]:
                torch._foreach_copy_(*self._sources[b])

        def assembled(b: int, done: Callable[[int, Tensor], None]) -> None:
            for n, (u, gradients) in enumerate(self._pipeline.buckets[b].stacks):
                payload = compute(self._units[u], gradients)
                if payload is not None:  # else nobody applies it
                    done(n, payload)

        def apply(b: int) -> None:
            for u, parts in self._landed[b]:
                update(self._units[u], parts)

        self._pipeline.run(fill, assembled, apply, lambda: None)
        self._pipeline.land(range(len(self._landed)))


def _views(flat: Tensor, parts: Sequence[Part]) -> list[tuple[int, _Parts]]:
    """The pieces in a message's buffer: (unit, pieces)."""
    found = []
    for part in parts:
        views = flat.narrow(0, part.start, part.numel).view(part.shape).unbind()
        places = range(part.position, part.position + len(views))
        found.append((part.unit, list(zip(places, part.matrices, views, strict=True))))
    return found


class DedicatedRuntime(OwnerRuntime):
    """See the module's docstring. ``tensor_axes`` are the mesh axes of tensor parallelism."""

    def __init__(
        self,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups,
        options: DedicatedOptions,
        tensor_axes: frozenset[str],
        device: torch.device,
    ) -> None:
        super().__init__(slices, model, process_groups.world, device)
        self.keeps_whole = slices.grid.shape[2] == 1
        self.process_groups = process_groups
        self._options = options
        self._tensor_axes = tensor_axes
        self._place = slices.grid.place(process_groups.world.rank)
        self._muon = muon = frozenset(self.plan.specs.muon_parameters())
        self._payload_dtype: Callable[[str], torch.dtype] = lambda dtype: getattr(torch, dtype)
        self._assemblies: list[_Assembly] = []
        self._counted: frozenset[int] = frozenset()
        self._rms: dict[int, Tensor] = {}  # by a unit's first matrix
        self._applied: dict[int, list[Tensor]] = {}
        self._unstack: dict[int, Unstack] = {}
        index = {id(p): i for i, p in enumerate(parameters)}
        self._modules: list[ModuleGroup] = module_groups(model, options.groups, index)
        carrying = [group for group in self._modules if not muon.isdisjoint(group.parameters)]
        # Not kept: an ownership refers to no module, for the model refers to it.
        number = {key: p for key, p in index.items() if p in muon}
        points = hook_points(model, carrying, number)
        below = {
            point.module: [number[id(p)] for p in point.module.parameters() if id(p) in number]
            for point in points
        }
        self.weights_here = Weights(
            slices,
            model,
            parameters,
            process_groups,
            self.meter,
            options,
            device,
            [(group.name, group.parameters, group.uses, group.is_root) for group in carrying],
            weakref.WeakKeyDictionary(below),
        )
        self._removers = [r for point in points for r in hook_module(self.weights_here, point)]
        self._end_watch = check_first_forward(self.weights_here, model)
        self._removers.append(self._end_watch)

    # ---- weights -----------------------------------------------------------------------------

    @property
    def parameters(self) -> Sequence[nn.Parameter]:  # type: ignore[override]
        return self.weights_here.parameters

    @property
    def loads(self) -> int:  # type: ignore[override]
        return self.weights_here.loads

    @property
    def dedicated(self) -> list[nn.Parameter]:
        """The parameters that are kept by their owners only."""
        return [self.parameters[p] for p in sorted(self._muon)]

    def adopt(self) -> None:
        self.weights_here.adopt()

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, the parameters of ``module`` are whole; a collective call."""
        return self.weights_here.materialized(module)

    def weights(self, unit: Unit) -> list[Tensor]:
        matrices, storage = self.plan.specs.matrices, self.weights_here.storage
        found = [(matrices[i].transposed, storage.weight_of(i)) for i in unit.matrices]
        return [weight.transpose(0, 1) if turned else weight for turned, weight in found]

    # ---- binding and closing -----------------------------------------------------------------

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        owned = self._collect_at(groups, self._options.reduce_dtype)
        storage = self.weights_here.storage
        self._end_watch()  # `Muon` has looked
        self._payload_dtype = payload_dtype
        # What is kept never moves, so views of it are made once.
        self._applied = {
            u.matrices[0]: [storage.weight_of(i) for i in u.matrices] for u in owned.near
        }
        self._rms = {
            u.matrices[0]: torch.zeros(len(u.matrices), device=self.device) for u in owned.mine
        }
        self._unstack = {u.matrices[0]: Unstack(self.plan.specs, u) for u in owned.mine}
        if not self.keeps_whole:
            self._assemblies = self._make_assemblies(owned)
        buckets = self._buckets()
        reducer = GradientReducer(
            self._slices,
            self.parameters,
            self.process_groups,
            None,
            self.meter,
            buckets,
            owned.deliver,
        )
        self._counted = frozenset(
            i
            for i, p in enumerate(self.parameters)
            if i not in self._muon and is_distributed(p) and self._counts(p)
        )
        self._live = reducer, owned
        self._places = self._planned_places()
        self.weights_here.prefetcher.reducer = reducer
        tracked = [(p, self.parameters[p]) for bucket in buckets for p in bucket.parameters]
        self._removers += hook_gradients(self.weights_here, tracked)

    def _make_assemblies(self, owned: OwnedGradients) -> list[_Assembly]:
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[Unit]] = defaultdict(list)
        for unit in owned.near:
            dtype = self.plan.specs.matrices[unit.matrices[0]].dtype
            reduced = self._options.reduce_dtype or getattr(torch, dtype)
            by_dtype[reduced, self._payload_dtype(dtype)].append(unit)
        return [
            _Assembly(
                self._slices,
                units,
                owned,
                self.process_groups,
                self.meter,
                reduced,
                torch.empty(0, dtype=published, device=self.device),
            )
            for (reduced, published), units in by_dtype.items()
        ]

    def _planned_places(self) -> PlannedPlaces | None:
        model = self._model()
        if model is None:
            return None
        # FSDP2 puts other objects into the place of its own parameters while a unit is gathered.
        theirs = [p for p in self.parameters if is_distributed(p)] if fsdp_roots(model) else []
        dedicated = set(self.dedicated)
        return PlannedPlaces(model, self.parameters, [p for p in theirs if p not in dedicated])

    def _buckets(self) -> list[GradientBucket]:
        """One a group in the order of backward; the root's, and what is in none, last.

        Parameters that neither dmuon nor tensor parallelism has distributed are all-reduced here;
        the others are the framework's. All are in the last bucket: nothing tells of a gain or bias
        that no gradient will come, so in a group's bucket it would hold that one up.
        """
        rest = {
            i: local_tensor(p).numel()
            for i, p in enumerate(self.parameters)
            if i not in self._muon and set(mesh_axes(p)) <= self._tensor_axes
        }
        members, last = [], []
        for group in reversed(self._modules):
            matrices = [] if group.is_root else [p for p in group.parameters if p in self._muon]
            members.append(matrices)
            last += [
                p for p in group.parameters if p not in matrices and (p in self._muon or p in rest)
            ]
        dtype, tensor = self._options.reduce_dtype, self._place[2]
        return [
            gradient_bucket(self._slices, m, rest, tensor, dtype) for m in [*members, last] if m
        ]

    def close(self) -> None:
        """Give every rank the whole weights again and remove every hook; a collective call."""
        self.weights_here.close()
        self._unbind()
        self.process_groups.close()

    # ---- gradients ---------------------------------------------------------------------------

    def set_sync(self, sync: bool) -> bool:
        reducer, _ = self._bound
        prefetcher = self.weights_here.prefetcher
        previous, prefetcher.sync = prefetcher.sync, sync
        reducer.owed = reducer.owed or (sync and not previous)
        model = self._model()
        for root in () if model is None else fsdp_roots(model):
            root.set_requires_gradient_sync(sync)
        return previous

    def reduce_gradients(self) -> None:
        reducer, _ = self._bound
        self._check()
        self.weights_here.storage.check()
        self.weights_here.prefetcher.recover()
        self.weights_here.prefetcher.pass_by()
        left = None if reducer.owed or not reducer.rounds else reducer.local_matrix()
        if left:
            raise OwnershipError(
                f"{left!r} has a p.grad that was set after backward. Its owner has the reduced "
                "gradient already, so this one would be lost: change gradients in a hook "
                "(p.register_hook)"
            )
        reducer.ensure()

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, FSDP2's in shards, the others everywhere."""
        reducer, owned = self._bound
        counted, common = owned.collected(reducer.present), []
        stored = list(counted)
        for i, p in enumerate(self.parameters):
            grad = None if i in self._muon else reducer.gradient_of(i)
            if grad is None:
                continue
            stored.append(grad)
            if not is_distributed(p):
                common.append(grad)
            elif i in self._counted:
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
            self.weights_here.recover()
        super().zero_grad()

    # ---- step --------------------------------------------------------------------------------

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer, owned = self._bound
        self.weights_here.prefetcher.begin_step()
        self.weights_here.publisher.begin()
        present = reducer.present

        def computed(unit: Unit, gradients: Tensor) -> Tensor | None:
            """What is published of a unit, ``[b, rows, cols]``; undefined where nothing came."""
            where, rms = owned.where(unit, present), self._rms[unit.matrices[0]]
            if len(where) < len(unit.matrices):
                rms.zero_()
            if not where:
                return None
            payload, found = compute(unit, rows_of(gradients, where), where)
            set_rows(rms, where, found)
            if len(where) == len(unit.matrices):
                return payload
            whole = payload.new_empty(unit.shape)
            set_rows(whole, where, payload)
            return whole

        def update(unit: Unit, parts: list[tuple[int, int, Tensor]]) -> None:
            came = [(k, v) for k, i, v in parts if present[self.plan.specs.matrices[i].parameter]]
            if came:
                targets, where = self._applied[unit.matrices[0]], [k for k, _ in came]
                apply(unit, where, [targets[k] for k in where], [view for _, view in came])

        if not self.keeps_whole:
            for assembly in self._assemblies:
                assembly.run(computed, update)
        else:
            todo = {i for unit in owned.mine for i in unit.matrices}
            self._launch_ahead(todo)
            for unit in owned.mine:
                payload = computed(unit, owned.stack(unit))
                if payload is not None:
                    views = self._unstack[unit.matrices[0]](payload)
                    update(unit, list(zip(range(len(views)), unit.matrices, views, strict=True)))
                todo.difference_update(unit.matrices)
                self._launch_ahead(todo)
        self._launch_ahead(set())
        reducer.clear()

    def _launch_ahead(self, todo: set[int]) -> None:
        """Publish to holders, or launch the next forward pass's first groups, as far as done."""
        if self._slices.grid.shape[0] > 1:
            self.weights_here.publisher.launch_ready(todo)
        else:
            self.weights_here.prefetcher.launch_ahead(todo)

    def synchronize(self) -> None:
        self.weights_here.synchronize()

    def update_rms(self) -> dict[str, Tensor]:
        matrices = self.plan.specs.matrices
        found: dict[str, Tensor] = {}
        for unit in self._bound[1].mine:
            names = [matrices[i].name for i in unit.matrices]
            found.update(zip(names, self._rms[unit.matrices[0]].unbind(), strict=True))
        return found
