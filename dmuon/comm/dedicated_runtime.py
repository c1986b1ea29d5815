"""The `dedicated` layout: only the owner of a matrix stores it and its momentum.

::

    forward    before a layer runs: its weights <---all-gather--- owners; freed afterwards
    backward   weights again; a layer's gradients ---reduce-scatter---> owners once all have arrived
    step       owner: momentum, Newton-Schulz, its own weights; one small all-reduce
    next       the first layers' weights leave as soon as their owners are done

With replicas (HSDP) weights travel inside a replica, from the owner or, in other replicas, from its
holder; gradients go to the holders first and from there to the owner; the step ends with one
broadcast of each weight from the owner to the holders, and the next forward pass waits for it.

Under tensor parallelism a weight and its reduced gradient lie in slices on the ranks with the
owner's data coordinates. In the step slices travel as boxes, in a `Pipeline` over these ranks:
gradients to the owner, updates back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmuon.comm import prefetch
from dmuon.comm.buckets import GradientBucket, Slices, gradient_bucket
from dmuon.comm.hooks import ParameterWatch, area, fsdp_roots, wait_points
from dmuon.comm.owners_runtime import Apply, Compute, Exchange, OwnersRuntime
from dmuon.comm.pipeline import Copies, Pipeline
from dmuon.comm.process_groups import ProcessGroups, is_initialized
from dmuon.comm.reducer import GradientReducer, OwnedGradients, hook_gradients, unstacker
from dmuon.comm.storage import Storage, layers_of
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed, local_shard, local_tensor, mesh_axes
from dmuon.scheduler.plan import Sizes, Unit, units_of
from dmuon.scheduler.specs import Box
from dmuon.scheduler.topology import Topology
from dmuon.types import OwnershipError


def _assembly(
    slices: Slices,
    units: Sequence[Unit],
    owned: OwnedGradients,
    groups: ProcessGroups,
    reduced: torch.dtype,
    like: Tensor,
) -> Exchange:
    """Make the exchange under tensor parallelism, for units with one dtype of gradients and one of
    results (``like``'s)."""
    near = [replace(u, owner=slices.place_of[u.matrices[0]][2]) for u in units]
    how = groups.tensors, groups.meter, Sizes(), like, reduced
    topology = Topology.flat(slices.shards.world)  # these ranks are on one node
    pipeline = Pipeline(slices.shards, topology, near, range(len(near)), *how)
    sources = [
        Copies(
            (view, owned.here[i])
            for part in bucket.route.held.parts
            for i, view in zip(part.matrices, part.within(bucket.send), strict=True)
        )
        for bucket in pipeline.buckets
    ]
    return Exchange(pipeline, units, sources)


class DedicatedRuntime(OwnersRuntime):
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
        super().__init__(slices, model, parameters, process_groups, device)
        self.keeps_whole = slices.grid.shape[2] == 1
        self._options = options
        self._tensor_axes = tensor_axes
        self._muon = frozenset(self.plan.specs.muon_parameters())
        # Weights here, and `unstacker`, by a unit's first matrix.
        self._applied: dict[int, list[Tensor]] = {}
        self._unstack: dict[int, Callable[[Tensor], list[Tensor]]] = {}
        index = {id(p): i for i, p in enumerate(parameters) if i in self._muon}
        # No module is stored, because the model refers to its ownership.
        modules = layers_of(model, options.groups, index)
        layers, others = list(modules.values()), set(modules) - {model}
        self.storage = Storage(
            slices, model, self.parameters, layers, process_groups, options, self.rows
        )
        self.prefetcher = prefetch.Prefetcher(self.storage, options)
        for point in wait_points(model, others):
            mine = point.parameters & index.keys()
            needs = sorted({self.prefetcher.number_of[index[i]] for i in mine})
            if needs or point.is_root:
                inside = () if point.in_layer else tuple(area(point.module, others))
                self._removers += prefetch.hook_module(self.prefetcher, point, needs, inside)
        self._removers += prefetch.hook_state_dicts(self.prefetcher, model, index)
        self._end_watch = prefetch.check_first_forward(self.storage, model)
        self._removers.append(self._end_watch)

    @property
    def dedicated(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [self.parameters[p] for p in sorted(self._muon)]

    def find_parameters(self) -> None:
        self.storage.find_parameters()

    @contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """Keep the parameters of ``module`` whole inside the context; a collective call."""
        if self._closed:
            raise self._not_bound()
        storage, prefetcher = self.storage, self.prefetcher
        storage.ready()
        in_forward = prefetcher.state is prefetch.PassState.FORWARD  # it goes on afterwards
        prefetcher.begin_access()
        try:
            with storage.whole(module):
                yield
        finally:
            if not in_forward:
                prefetcher.drop()  # weights launched ahead may have been written to

    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        rank, shape = self.transport.rank, self.plan.specs.parameters[parameter].shape
        return [
            (i, part, self.storage.weight_of(i))
            for i, r, part in self.slices.keepers(parameter, in_slices=True, replicas=True)
            if r == rank and part.numel and self.plan.specs.matrices[i].box(shape) == box
        ]

    def synchronize(self) -> None:
        """Wait for weights on their way to the holders."""
        self.storage.wait_published()

    def close(self) -> None:
        """Give every rank whole weights again and remove every hook; a collective call."""
        # If torch.distributed was shut down first, nothing can travel any more.
        with suppress(OwnershipError):
            if not self.process_groups.failed:  # else other ranks may never take part
                self.prefetcher.drop()
                self.storage.restore()
        self._remove_hooks()
        self.reducer = None
        self.process_groups.close()

    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        storage, rank, asked = self.storage, self.transport.rank, self._options.reduce_dtype
        self.units = units_of(self.plan, groups, one_by_one=self.one_by_one)
        owned = OwnedGradients(self.slices, self.units, rank, asked, self.device)
        storage.ready()
        self._end_watch()  # `Muon` has looked
        self._applied = {u.matrices[0]: [*map(storage.weight_of, u.matrices)] for u in owned.near}
        self._rms = {
            u.matrices[0]: torch.zeros(len(u.matrices), device=self.device) for u in owned.mine
        }
        self._unstack = {u.matrices[0]: unstacker(self.plan.specs, u) for u in owned.mine}
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[Unit]] = defaultdict(list)
        for unit in () if self.keeps_whole else owned.near:
            dtype = self.plan.specs.matrices[unit.matrices[0]].dtype
            reduced = asked or getattr(torch, dtype)
            by_dtype[reduced, payload_dtype(dtype)].append(unit)
        for (reduced, published), units in by_dtype.items():
            how = self.process_groups, reduced, torch.empty(0, dtype=published, device=self.device)
            self._exchanges.append(_assembly(self.slices, units, owned, *how))
        buckets = self._buckets()
        self.reducer = GradientReducer(self.parameters, self.process_groups, buckets, owned)
        others = [(i, p) for i, p in enumerate(self.parameters) if i not in self._muon]
        distributed = [(i, p) for i, p in others if is_distributed(p)]
        self._counted = frozenset(i for i, p in distributed if self._counts(p))
        if (model := self._model()) is not None:
            # FSDP2 replaces its own parameters while a unit is gathered.
            exempt = [p for _, p in distributed] if fsdp_roots(model) else []
            self._watch = ParameterWatch(model, self.parameters, exempt)
        self.prefetcher.reducer = self.reducer
        tracked = [(p, self.parameters[p]) for bucket in buckets for p in bucket.parameters]
        self._removers += hook_gradients(tracked, self.prefetcher.accumulated)

    def _buckets(self) -> list[GradientBucket]:
        """Make one bucket per layer in the order of backward, then the root's, with all adamw
        parameters that the framework has not distributed. No hook tells that a gain or bias will
        get no gradient, so in a layer's bucket it would delay that bucket."""
        adamw = {
            i: local_tensor(p).numel()
            for i, p in enumerate(self.parameters)
            if i not in self._muon and set(mesh_axes(p)) <= self._tensor_axes
        }
        members = [layer.parameters for layer in self.storage.layers[::-1] if not layer.is_root]
        root = (p for layer in self.storage.layers if layer.is_root for p in layer.parameters)
        members.append((*root, *adamw))
        dtype, tensor = self._options.reduce_dtype, self.slices.grid.place(self.transport.rank)[2]
        return [gradient_bucket(self.slices, m, adamw, tensor, dtype) for m in members if m]

    def reduce_gradients(self) -> None:
        reducer = self._bound

        def check() -> None:
            if self._watch is not None:
                self._watch.check()
            self.storage.check()

        self.prefetcher.recover()
        self.prefetcher.join_passes()
        reducer.ensure(check)

    def _counts(self, p: Tensor) -> bool:
        """Whether this rank has the first replica of its shard of ``p`` in the mesh."""
        if any(local_shard("", p, dist.get_rank() if is_initialized() else 0).replica):
            return False
        axes = set(mesh_axes(p))
        replica, shard, tensor = self.slices.grid.place(self.transport.rank)
        over_tensors, over_data = bool(axes & self._tensor_axes), bool(axes - self._tensor_axes)
        return (over_tensors or tensor == 0) and (over_data or (replica, shard) == (0, 0))

    def zero_grad(self) -> None:
        if self.reducer is not None:
            self.prefetcher.recover()
        super().zero_grad()

    def step(self, compute: Compute, apply: Apply) -> None:
        reducer = self._bound
        owned, update = reducer.owned, partial(self.update, apply, reducer.present)
        computed = partial(self._computed, compute)
        self.prefetcher.begin_step()

        for exchange in self._exchanges:
            exchange.run(computed, update)
            exchange.pipeline.apply_pending(exchange.pipeline.pending)
        if self.keeps_whole:
            todo = {i for unit in owned.mine for i in unit.matrices}
            self.prefetcher.launch_ahead(todo)
            for unit in owned.mine:
                if (results := computed(unit, owned.stack(unit))) is not None:
                    views = self._unstack[unit.matrices[0]](results)
                    update(unit, list(zip(count(), unit.matrices, views)))
                todo.difference_update(unit.matrices)
                self.prefetcher.launch_ahead(todo)
        self.prefetcher.launch_ahead(set())
        reducer.clear()

    def targets(self, unit: Unit) -> Sequence[Tensor]:
        return self._applied[unit.matrices[0]]

    def update_rms(self) -> tuple[list[int], Tensor]:
        mine = self._bound.owned.mine
        rms = [torch.zeros(0, device=self.device), *(self._rms[u.matrices[0]] for u in mine)]
        return [*chain.from_iterable(unit.matrices for unit in mine)], torch.cat(rms)
