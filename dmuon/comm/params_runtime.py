"""The `sharded` layout: weights, gradients and momentum stay where the framework put them.

::

    backward   the framework reduces gradients to shards, as always
    step       norms and verdict ---all-reduce---> everyone
               shards of the operands ---all-to-all---> owners: Newton-Schulz
               shards of the updates  <---all-to-all--- owners, then <---all-gather---> replicas
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from dmuon.comm import hooks
from dmuon.comm.layout import Gradients, LayoutRuntime
from dmuon.comm.pipeline import Pipeline
from dmuon.comm.process_groups import NewGroup
from dmuon.comm.routes import units_for
from dmuon.comm.transport import Transport, Work, connect
from dmuon.config import BATCH_BUCKETS, ShardedOptions
from dmuon.dtensors import LocalParameters
from dmuon.scheduler.plan import OwnershipPlan, Sizes, Unit, units_of
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.specs import OwnerLimits, StateSizes, canonical_name
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout


class ParamsRuntime(LayoutRuntime):
    """``device`` is where Newton-Schulz runs; with CPU offload the parameters lie elsewhere."""

    def __init__(
        self,
        plan: OwnershipPlan,
        shards: ShardMap,
        model: nn.Module | None,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        options: ShardedOptions,
        device: torch.device,
        peers: dict[tuple[int, ...], Transport],
    ) -> None:
        super().__init__(plan, model, transport, device)
        self._peers = peers
        self.shards = shards
        self.parameters = list(parameters)
        self.pipeline: Pipeline | None = None
        self.batch_numel = 0  # elements of a batch of several blocks, set by `bind`
        self._options = options
        self.locals = LocalParameters(self.parameters, [p.name for p in plan.specs.parameters])
        if model is not None and plan.layout is Layout.REPLICATED:
            self._watch = hooks.ParameterWatch(model, parameters)
        self._missing: list[bool] = []  # which parameters had no gradient at the last look

    def limits(self, sizes: StateSizes) -> OwnerLimits:
        return self.shards.limits(self.plan.limits.memory_bytes, sizes)

    def bind(
        self,
        groups: Sequence[int],
        ns_dtype: torch.dtype,
        memory: Callable[[int], Tensor] | None,
    ) -> None:
        """Prepare for an optimizer: the param group of each matrix, the dtype of messages, and the
        memory of `Pipeline`."""
        plan, units = self.plan, units_of(self.plan, groups, one_by_one=self.one_by_one)
        sizes = Sizes.of(self._options, plan)
        self.batch_numel = BATCH_BUCKETS * sizes.room // ns_dtype.itemsize
        travelling = [u for u, unit in enumerate(units) if not self.is_local(unit)]
        like = torch.empty(0, dtype=ns_dtype, device=self.device)
        # Units as this rank sees them; `memory` may use them.
        self.units = units_for(units, self.shards, plan.topology, self.transport.rank)
        given, how = (self.shards, plan.topology, units, travelling), (self.meter, sizes, like)
        self.pipeline = Pipeline(*given, self.transport, *how, memory=memory, replicas=self._peers)

    def is_local(self, unit: Unit) -> bool:
        """Whether a unit needs no traffic."""
        # Matrices of different domains are never batched together, so the first one decides.
        return self.shards.is_local(unit.matrices[0], unit.copies)

    def close(self) -> None:
        self.synchronize()
        self._remove_hooks()
        self.pipeline = None
        for peers in self._peers.values():
            peers.close()
        self._peers = {}
        self.transport.close()

    def bound(self) -> Pipeline:
        """Return the pipeline; OwnershipError without an optimizer, or after closing."""
        if self.pipeline is None:
            raise self._not_bound()
        return self.pipeline

    def reduce_gradients(self) -> None:
        """Check the parameters against the plan; the framework has reduced their gradients."""
        self.bound()
        self.locals.check()
        if self._watch is not None:
            self._watch.check()
        self.synchronize()

    def local_gradients(self) -> list[Tensor | None]:
        """Return the local part of each parameter's gradient, None if it is missing here."""
        found = self.locals.gradients()
        missing = [grad is None for grad in found]
        if any(missing) and missing != self._missing:
            known, model = {id(p) for p in self.parameters}, self._model()
            for name, p in () if model is None else model.named_parameters():
                if id(p) not in known and p.requires_grad and p.grad is not None:
                    raise hooks.replaced(canonical_name(name))
        self._missing = missing  # modules that are unused stay so, step after step
        return found

    def gradients(self) -> Gradients:
        """Return all local gradients; each parameter's first replica of its first copy counts."""
        found = [(i, grad) for i, grad in enumerate(self.local_gradients()) if grad is not None]
        counted = [grad for i, grad in found if self.counts(i)]
        return Gradients(counted, [], [grad for _, grad in found])

    @property
    def nbytes(self) -> dict[str, int]:
        return self.bound().nbytes

    def counts(self, parameter: int) -> bool:
        return self.shards.counts(parameter, self.transport.rank)

    def all_reduce(self, vector: Tensor, tag: str) -> Work:
        """Sum ``vector`` over all ranks, counted in the meter."""
        self.meter[tag] += vector.nbytes
        return self.transport.all_reduce(vector, tag=tag)

    def synchronize(self) -> None:
        if self.pipeline is not None and self.pipeline.pending:
            with torch.no_grad():
                self.pipeline.apply_pending(self.pipeline.pending)


def open_peers(
    sets: Iterable[tuple[int, ...]],
    topology: Topology,
    transport: Transport,
    new_group: NewGroup,
    device: torch.device,
) -> dict[tuple[int, ...], Transport]:
    """Open a transport for each set of ranks that this rank belongs to, and run its first
    collective; a collective call."""
    rank, everyone = transport.rank, tuple(range(transport.world))
    sharing: set[tuple[int, ...]] = set()
    for ranks in sets:
        columns = topology.columns_of(ranks)
        nodes = zip(*columns, strict=True) if len(columns) > 1 else ()
        sharing |= {tuple(sorted(some)) for some in (*columns, *nodes) if len(some) > 1}
    found: list[list[tuple[int, ...]]] = []
    for ranks in sorted(sharing - {everyone}, key=lambda ranks: (len(ranks), ranks)):
        # Groups come as partitions of the mesh, and every rank takes part in making each.
        free = (parts for parts in found if not set(ranks) & set(chain.from_iterable(parts)))
        if (parts := next(free, None)) is None:
            found.append(parts := [])
        parts.append(ranks)
    peers = {}
    for parts in found:
        left = set(everyone).difference(*parts)
        whole = [*parts, tuple(sorted(left))] if left else parts
        mine = next(part for part in whole if rank in part)
        peers[mine] = new_group(whole)
        if mine in sharing:
            connect(peers[mine], device, gathers=True)
    if everyone in sharing:
        connect(transport, device, gathers=True)
    return peers
