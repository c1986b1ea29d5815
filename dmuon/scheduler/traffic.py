"""What ranks send in a training step because of Muon: bytes, and milliseconds of the links.

Who sends what follows from the plan, the layout (docs/layouts.md), and where ranks sit; what of it
computing hides, `simulate` tells. FSDP2 is taken to cut dim 0 (of short stacks, dim 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmuon.scheduler.costs import AnalyticDevice, device_of
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import ITEM_SIZE, Box
from dmuon.scheduler.topology import holds_replicas
from dmuon.types import KernelChoice, Layout

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Flow:
    """One purpose, as ``Muon.stats()["bytes"]`` names it, in the "step", "forward" or "backward".

    By rank: bytes ``handed`` to collectives, [world]; bytes that it sends and that come to it,
    [2, world], ``inside`` its node and ``across`` nodes."""

    purpose: str
    when: str
    handed: Floats
    inside: Floats
    across: Floats

    def ms(self, device: AnalyticDevice) -> float:
        """Of the slowest rank; what it sends and what comes do not hold each other up."""
        times = self.inside.max(0) / device.link, self.across.max(0) / device.network
        return 1e3 * float(np.maximum(*times).max())

    def to_dict(self, device: AnalyticDevice | None) -> dict[str, Any]:
        columns = {"bytes": self.handed, "inside": self.inside[0], "across": self.across[0]}
        sums = {n: {"mean": float(v.mean()), "max": float(v.max())} for n, v in columns.items()}
        ms = None if device is None else self.ms(device)
        return {"purpose": self.purpose, "when": self.when, **sums, "ms": ms}


@dataclass(frozen=True)
class Traffic:
    """``flows`` of a plan over the links of ``device`` (None: unknown, and so are the times)."""

    flows: tuple[Flow, ...]
    device: AnalyticDevice | None

    @property
    def ms(self) -> float | None:
        """Of what the step sends, by the slowest rank; None also where nothing is sent then."""
        of_step = [flow for flow in self.flows if flow.when == "step"]
        if self.device is None or (self.flows and not of_step):
            return None
        return sum(flow.ms(self.device) for flow in of_step)

    def to_dict(self) -> dict[str, Any]:
        return {"ms": self.ms, "flows": [flow.to_dict(self.device) for flow in self.flows]}


def traffic(plan: OwnershipPlan) -> Traffic:
    """What a plan's ranks send, a pure function of it, in the Newton-Schulz dtype of its kernels
    (where it names none, of two bytes)."""
    kernel = next((batch.kernel for batch in plan.batches if batch.kernel), "")
    item = ITEM_SIZE[KernelChoice.parse(kernel).dtype] if kernel else 2
    topology = plan.topology
    device = device_of(plan.cost_source, topology.device_type, topology.ranks_per_node)
    flows = _FLOWS[plan.layout](_Mesh(plan), item) if topology.world > 1 else ()
    return Traffic(tuple(flow for flow in flows if flow.handed.any()), device)


class _Mesh:
    """Where the ranks of a plan sit: their nodes and replicas, and the ``places`` in a replica."""

    def __init__(self, plan: OwnershipPlan) -> None:
        self.plan, topology = plan, plan.topology
        self.world = topology.world
        self.node = np.array([topology.node(rank) for rank in range(self.world)])
        every = range(len(topology.shape))
        named = [i for i in every if holds_replicas(topology.axes[i])]
        axes = {Layout.SHARDED: named, Layout.DEDICATED: [*every[:-1]]}.get(plan.layout, [])
        others = [i for i in every if i not in axes]
        self.replicas = math.prod(topology.shape[i] for i in axes)
        # The rank at each place of each replica, and where each rank is.
        ranks = np.arange(self.world).reshape(topology.shape).transpose(*axes, *others)
        self.ranks = ranks.reshape(self.replicas, -1)
        self.replica, self.place = np.divmod(self.ranks.argsort(axis=None), self.ranks.shape[1])

    def near(self, values: Floats) -> Floats:
        """For each rank the sum over its node."""
        found: Floats = np.bincount(self.node, values)[self.node]
        return found

    def ring(self, purpose: str, when: str, handed: Floats, ranks: int, part: float = 1.0) -> Flow:
        """So many ranks pass a ``part`` of what they hand over on along rings, as many as there are
        on a node, of which each leaves the node at another rank."""
        columns = min(self.plan.topology.columns, ranks)
        across, sent = (ranks > columns) / columns, np.array([part * handed] * 2)
        return Flow(purpose, when, handed, (1 - across) * sent, across * sent)


def _sharded(mesh: _Mesh, item: int) -> Iterator[Flow]:
    plan, domains = mesh.plan, mesh.plan.limits.domains
    owned: dict[Any, Floats] = defaultdict(lambda: np.zeros(mesh.world))
    for batch in plan.batches:
        for i in batch.matrices:
            matrix = plan.specs.matrices[i]
            shape = plan.specs.parameters[matrix.parameter].shape
            box, long = matrix.box(shape), matrix.form.dims(len(shape))[matrix.cols >= matrix.rows]
            domain = plan.limits.domain_of[i] if domains else -1
            for j, owner in enumerate(batch.ranks):
                key = shape, box, long, j, len(batch.ranks), domain, mesh.replica[batch.owner]
                owned[key][owner] += item
    links, first = np.zeros((2, 2, mesh.world)), np.zeros(mesh.world)  # by level; sent, come
    for (shape, box, long, j, count, domain, replica), owners in owned.items():
        if len(members := np.array(domains[domain] if domain >= 0 else range(mesh.world))) == 1:
            continue
        among = members[mesh.replica[members] == replica]
        pieces = np.zeros(mesh.world)
        pieces[among] = _pieces(shape, box, long, j, count, len(among), mesh)
        moved = np.array([pieces * (owners.sum() - owners), owners * (pieces.sum() - pieces)])
        inside = pieces * (mesh.near(owners) - owners), owners * (mesh.near(pieces) - pieces)
        links += np.array([inside, moved - inside])
        first += pieces * owners.sum()
    yield Flow("gather", "step", links[:, 0].sum(0), *links)
    yield Flow("scatter", "step", links[:, 1].sum(0), *links[:, ::-1])
    links = np.zeros_like(links)
    for step in range(1, mesh.replicas):
        partner = mesh.ranks[(mesh.replica + step) % mesh.replicas, mesh.place]
        is_near = mesh.node == mesh.node[partner]
        for level, some in enumerate((is_near, ~is_near)):
            links[level, 0] += first * some
            links[level, 1, partner] += first * some
    yield Flow("replicate", "step", first * (mesh.replicas - 1), *links)


def _pieces(
    shape: tuple[int, ...], box: Box, long: int, j: int, count: int, among: int, mesh: _Mesh
) -> Floats:
    """Elements that each of these ranks holds of the j-th of ``count`` slices, along dim ``long``,
    of a matrix at this box of a parameter: rows, or even shares of what not all of a replica hold,
    and of stacks of fewer matrices than ranks."""
    low, size = box.offset[long], box.shape[long]
    low, high = low + size * j // count, low + size * (j + 1) // count
    rest = box.numel // size * (high - low)
    if among < mesh.ranks.shape[1] or (len(shape) > 2 and shape[0] < among):
        return np.full(among, rest / among)
    begin, end = (low, high) if long == 0 else (box.offset[0], box.ends[0])
    edges = np.minimum(np.arange(among + 1) * -(-shape[0] // among), shape[0])
    return np.diff(np.clip(edges, begin, end)) * (rest / (end - begin))


def _broadcast(mesh: _Mesh, item: int) -> Iterator[Flow]:
    total = float(item * sum(matrix.numel for matrix in mesh.plan.specs.matrices))
    yield mesh.ring("updates", "step", np.full(mesh.world, total), mesh.world)


def _weight_bytes(mesh: _Mesh) -> Floats:
    """Of the weights whose owner is at the place of each rank, in some replica."""
    plan, found = mesh.plan, np.zeros(mesh.ranks.shape[1])
    for matrix, owner in zip(plan.specs.matrices, plan.owners, strict=True):
        found[mesh.place[owner]] += matrix.numel * ITEM_SIZE[matrix.dtype]
    return found[mesh.place]


def _reduced(mesh: _Mesh, item: int) -> Iterator[Flow]:
    yield from _broadcast(mesh, item)
    specs, muon = mesh.plan.specs, _weight_bytes(mesh).sum()
    others = (specs.parameters[i] for i in specs.adamw_parameters())
    adamw = sum(p.numel * ITEM_SIZE.get(p.dtype, 4) for p in others)
    # Each gradient of AdamW comes back to all ranks.
    part = (1 - 1 / mesh.world) * (muon + 2 * adamw) / ((muon + adamw) or 1)
    yield mesh.ring("gradients", "backward", np.full(mesh.world, muon + adamw), mesh.world, part)


def _dedicated(mesh: _Mesh, item: int) -> Iterator[Flow]:
    kept, (replicas, shards) = _weight_bytes(mesh), mesh.ranks.shape
    every, part = np.full(mesh.world, kept.sum() / replicas), 1 - 1 / shards
    for when in ("forward", "backward"):
        yield mesh.ring("weights", when, every, shards, part)
    yield mesh.ring("gradients", "backward", every, shards, part)
    if replicas > 1:  # along columns of the mesh, so across nodes
        sent = np.array([kept] * 2)
        yield Flow("weights to holders", "forward", kept, 0 * sent, sent)
        yield Flow("gradients across replicas", "backward", kept, 0 * sent, sent)


_FLOWS: dict[Layout, Callable[[_Mesh, int], Iterator[Flow]]] = {
    Layout.SHARDED: _sharded,
    Layout.REPLICATED: _broadcast,
    Layout.REDUCED: _reduced,
    Layout.DEDICATED: _dedicated,
}
