"""A plan on its network: the parts of its simulated step, and the plan whose step ends first.

Bytes are counted as `dmuon.comm.routes` sends them, for all ranks at once: the bytes that each rank
sends inside its node and to other nodes, and the bytes that it receives.

On a slow network, computing a matrix in each replica (or node, or rank) is cheaper than publishing
it. A share of the matrices, the cheapest per element, is computed in this way, and the rest is
published: a mixture keeps cores and links busy at once. Simulated steps decide how large it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from dmuon.config import BATCH_BUCKETS, BATCH_BYTES, PlannerOptions, ShardedOptions
from dmuon.scheduler import simulate as sim
from dmuon.scheduler.costs import MAX_BATCH, CostTable, largest_batch
from dmuon.scheduler.plan import (
    OwnershipPlan,
    Parts,
    Sizes,
    StepTimes,
    Unit,
    Way,
    buckets_of,
    units_of,
)
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs, OwnerLimits
from dmuon.scheduler.topology import Topology, holds_replicas, layer_of
from dmuon.types import KernelChoice, Layout, PlanError, grouped

_CROWDED = 0.85  # share of a link that gloo's messages to several nodes at once reach: network.md
_NOTHING = sim.Exchange("", 0, 0, 0.0, 0.0, 0.0)
Sets = tuple[tuple[int, ...], ...]  # sets of ranks that share updates


# ---- traffic -------------------------------------------------------------------------------


class Routes:
    """The buckets of a plan as they travel; an element has ``item`` bytes. ``classes`` has one rank
    for each class of ranks that do the same."""

    def __init__(
        self, plan: OwnershipPlan, shards: ShardMap, sizes: Sizes, item: int, machine: sim.Machine
    ) -> None:
        self.plan, self.shards, self.item, self.machine = plan, shards, item, machine
        self.sizes, self.units = sizes, units_of(plan, [0] * len(plan.specs.matrices))
        self.owners = [unit.copies or (unit.owner,) for unit in self.units]
        is_local = [shards.is_local(unit.matrices[0], unit.copies) for unit in self.units]
        self.local = [u for u, alone in enumerate(is_local) if alone]  # for these nothing travels
        travel = [u for u, alone in enumerate(is_local) if not alone]
        self.cuts, self.slots = buckets_of(self.units, travel, sizes, item)
        self.node = np.array([plan.topology.node(rank) for rank in range(shards.world)])
        self._is_near = self.node[:, None] == self.node
        self._spreads: dict[Sets, sim.Floats] = {}
        self._counts: dict[Sets, sim.Floats] = {}  # ranks that each passes data on to
        self._held: dict[tuple[object, ...], sim.Floats] = {}

    def each(self, units: Sequence[int], value: Callable[[Unit], float]) -> sim.Floats:
        """Return, [world], the sum of a value over the units that each rank computes."""
        found = np.zeros(self.shards.world)
        for u in units:
            found[[*self.owners[u]]] += value(self.units[u])
        return found

    @cached_property
    def classes(self) -> np.ndarray[Any, Any]:
        rows = []
        for cut in [*self.cuts, self.local]:
            rows += [self.each(cut, value) for value in (lambda u: u.ms, lambda u: u.numel)]
        kinds = {p.shape: i for i, p in enumerate(self.shards.specs.parameters)}
        for i in kinds.values():
            rows.append(np.array([r.shards[i].box.numel for r in self.shards.reports], float))
        _, first = np.unique(np.array(rows), axis=1, return_index=True)
        return np.sort(first)

    def buckets(self) -> list[sim.Bucket]:
        return [self._bucket(members, *self._exchanges(members)) for members in self.cuts]

    def published(self) -> list[sim.Bucket]:
        """Return the buckets that owners compute in `dedicated`, where a step sends nothing."""
        cuts, _ = buckets_of(self.units, range(len(self.units)), self.sizes, self.item)
        return [self._bucket(members, _NOTHING, ()) for members in cuts]

    def _bucket(
        self, members: Sequence[int], gather: sim.Exchange, turns: tuple[sim.Exchange, ...]
    ) -> sim.Bucket:
        held = np.zeros(self.shards.world)
        for u in members:
            held += sum(self._elements(i) for i in self.units[u].matrices)
        by_rank = {
            "ms": self.each(members, lambda u: u.ms), "units": self.each(members, lambda _: 1),
            "owned": self.each(members, lambda u: u.numel), "held": held,
        }  # fmt: skip
        return sim.Bucket(gather, turns, **{k: v[self.classes] for k, v in by_rank.items()})

    def _place(self, matrix: int) -> tuple[Any, ...]:
        """Return a key that matrices with equal parts share, as items of one stack may do."""
        box, is_stack = self.shards.boxes[matrix], self.shards.specs.matrices[matrix].form.is_stack
        at = (box.offset[-2:], box.shape, box.steps[-2:]) if is_stack else box
        return self.shards.kind(matrix), self.shards.domains[matrix], at

    def _elements(self, matrix: int) -> sim.Floats:
        """Return how many elements of a matrix each rank holds, [world]."""
        if (key := self._place(matrix)) not in self._held:
            found = self._held[key] = np.zeros(self.shards.world)
            for rank in self.shards.domains[matrix]:
                found[rank] = self.shards.piece(matrix, rank).numel
        return self._held[key]

    def _spread(self, sets: Sets) -> sim.Floats:
        """Return [turn, (inside, across nodes), world, world], with 1 if a rank passes its data on
        to another one: in the first turn to the ranks of its column, in the second to the ranks of
        its node (`Topology.columns_of`)."""
        if sets not in self._spreads:
            found = np.zeros((2, self.shards.world, self.shards.world))
            for ranks in sets:
                columns = self.plan.topology.columns_of(ranks)
                nodes = [*zip(*columns)] * (len(columns) > 1)
                for turn, some in [*((0, of) for of in columns), *((1, of) for of in nodes)]:
                    found[turn][np.ix_(some, some)] = 1 - np.eye(len(some))
            self._spreads[sets] = np.stack([found * self._is_near, found * ~self._is_near], 1)
            self._counts[sets] = self._spreads[sets].sum(-1)
        return self._spreads[sets]

    def _exchanges(self, members: Sequence[int]) -> tuple[sim.Exchange, tuple[sim.Exchange, ...]]:
        """Return the gather of a bucket, and the exchanges, in order, that bring its updates.
        `Transport.all_gather` uses rings on NCCL, and on gloo if the plan says so."""
        world, shards, topology = self.shards.world, self.shards, self.plan.topology
        every = np.arange(world)
        alike: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        for u in members:
            unit = self.units[u]
            for i in unit.matrices:
                key = self._place(i), self.owners[u]
                alike[key] = i, u, alike.get(key, (0, 0, 0))[2] + 1
        ways = np.zeros((2, 2, world))  # the gather's (near, far) x (sent, received)
        sources: dict[Sets, sim.Floats] = defaultdict(lambda: np.zeros(world))
        for i, u, count in alike.values():
            numbers, owners = shards.replica_numbers(i), np.array(self.owners[u])
            of_replica = np.full(numbers.max() + 2, -1)  # the last: for ranks without a part
            of_replica[numbers[owners]] = owners
            owner = of_replica[numbers]
            pieces = count * self._elements(i) * (owner >= 0)
            sources[shards.sharing(i, self.units[u].copies, topology)] += pieces
            sent = pieces * (owner != every)
            is_near = self.node == self.node[owner]
            for level, some in enumerate((sent * is_near, sent * ~is_near)):
                ways[level, 0] += some
                ways[level, 1] += np.bincount(owner.clip(0), some, world)
        ways *= self.item
        turns = self._turns({sets: self.item * of for sets, of in sources.items()}, not ways.any())
        if not ways.any():
            return _NOTHING, (*turns,)
        scatter = self._direct("scatter", ways[:, ::-1])
        return self._direct("gather", ways), (scatter, *turns)

    def _turns(self, sources: Mapping[Sets, sim.Floats], is_published: bool) -> list[sim.Exchange]:
        """Return the all-gathers of ``sources``, which has, by sets, each rank's bytes, [world]."""
        purpose, world = "updates" if is_published else "replicate", self.shards.world
        is_cpu = self.machine.is_cpu
        ways, rings = np.zeros((2, 2, 2, world)), np.zeros((2, 2))  # by turn (turns, hops)
        for sets, own in sources.items():
            for turn, levels in enumerate(self._spread(sets)):
                counts = self._counts[sets][turn]
                came = [own @ of if n.any() else 0 * own for of, n in zip(levels, counts)]
                far = counts[1].max()
                is_ring = (self.sizes.rings and far > 1) or not is_cpu
                part = own.max() if is_ring else own  # gloo makes the parts in a ring equal
                for level, there in enumerate(came):
                    ways[turn, level] += part * counts[level] if is_cpu else there, there
                own = own + came[0] + came[1]
                if is_ring:
                    rings[turn] = np.maximum(rings[turn], (counts.sum(0).max(), far))
        return [e for of in zip(ways, *rings.T) if (e := self._direct(purpose, *of))]

    def _direct(self, purpose: str, ways: Any, turns: float = 0, hops: float = 0) -> sim.Exchange:
        """Return an all-to-all of ``ways``, each rank's bytes (inside, across) x (sent, received);
        or rings of so many ``turns``, of which ``hops`` go to other nodes."""
        across = float(ways[1].max())
        if self.machine.is_shared:  # a node has one network card
            most = max(float(np.bincount(self.node, way).max()) for way in ways[1])
            across = most / float(np.bincount(self.node).max())
        handed = float(ways[:, 0].sum(0).mean())
        is_crowded = self.machine.is_cpu and not turns and int(self.node.max()) > 1
        levels = float(ways[0].max()), across, handed, _CROWDED if is_crowded else 1.0
        return sim.Exchange(purpose, turns or 1, hops or across > 0, *levels)


def _blocks(shards: ShardMap, rank: int, costs: CostTable, ns_item: int) -> tuple[float, int]:
    """Return Newton-Schulz's milliseconds and number of batches for all blocks of a rank."""
    kinds = Counter[tuple[int, int, str]]()
    for i, matrix in enumerate(shards.specs.matrices):
        if (box := shards.piece(i, rank)).numel:
            m, n = sorted(matrix.form.matrix_shape(box.shape))
            kinds[m, n, matrix.dtype] += 1
    ms, batches = 0.0, 0
    for key, count in kinds.items():
        most = largest_batch(*key[:2], MAX_BATCH, BATCH_BYTES // ns_item)
        for batch in [most] * (count // most) + [count % most] * (count % most > 0):
            ms += costs.batch_ms(key, batch)
            batches += 1
    return ms, batches


def _unevenness(plan: OwnershipPlan, places: int) -> float:
    """Return the busiest owner's share of two consecutive layers, which travel at the same time,
    relative to an even share."""
    owned: dict[str, Counter[int]] = defaultdict(Counter)
    for matrix, owner in zip(plan.specs.matrices, plan.owners, strict=True):
        owned[layer_of(matrix.name)][owner % places] += matrix.numel
    layers = [*owned.values()]
    pairs = [a + b for a, b in pairwise(layers)] or layers
    return float(np.mean([places * max(of.values()) / sum(of.values()) for of in pairs]))


def _groups(plan: OwnershipPlan, ep: int, tp: int) -> sim.Groups:
    """Return the groups of FSDP2, which shards over all ranks but replicas, tp and (experts) ep."""
    topology = plan.topology
    every = range(len(topology.shape))
    axes = [i for i in every if holds_replicas(topology.axes[i])]
    if plan.layout is Layout.DEDICATED:
        axes = [*every[:-1]]
    world, replicas = sim.Group.along(topology, every), sim.Group.along(topology, axes)
    shards = sim.Group.along(topology, [i for i in every if i not in axes])
    ordinary, experts = (sim.Group(shards.ranks // n, max(1, shards.near // n)) for n in (tp, ep))
    inner = (sim.Group(n, min(n, topology.columns)) for n in (ep, tp))
    return sim.Groups(world, ordinary, experts, replicas, *inner)


def job_of(
    plan: OwnershipPlan,
    shards: ShardMap,
    costs: CostTable,
    machine: sim.Machine,
    load: sim.Load | None = None,
    options: ShardedOptions | None = None,
    **how: bool,
) -> sim.Job:
    """Return the job of a training step of this plan; ``costs`` price blocks, too, and ``how`` is
    passed to `Job`. Without a ``load`` the job is the optimizer's part alone."""
    is_alone, load = load is None, load or sim.Load(0, 0)
    specs, layout = plan.specs, plan.layout
    kernel = next((batch.kernel for batch in plan.batches if batch.kernel), "")
    ns_item = ITEM_SIZE[KernelChoice.parse(kernel).dtype] if kernel else 2
    sizes = Sizes.of(options or ShardedOptions(), plan)
    routes = Routes(plan, shards, sizes, ns_item, machine)
    groups = _groups(plan, load.ep, load.tp)
    is_dedicated = layout is Layout.DEDICATED
    places_alone = is_dedicated or (layout is Layout.REDUCED and plan.topology.world == 1)
    # On gloo each owner sends its own messages; NCCL passes them on in rings.
    uneven = _unevenness(plan, groups.shards.ranks) if is_dedicated and machine.is_cpu else 1.0
    nbytes = 8.0 * len(specs.matrices)
    verdict = sim.collective("verdict", "all_reduce", nbytes, groups.world, is_gloo=machine.is_cpu)
    return sim.Job(
        machine, layout, [] if is_alone else sim.blocks_of(specs, load), groups, load,
        routes.published() if places_alone else routes.buckets(),
        replace(verdict, turns=min(1, verdict.turns)) if machine.is_cpu else verdict,
        _work(routes, costs, ns_item, groups.shards.ranks if is_dedicated else 1, is_alone),
        sizes.buffers, routes.slots, uneven, **how,
    )  # fmt: skip


def _work(routes: Routes, costs: CostTable, ns_item: int, places: int, is_alone: bool) -> sim.Work:
    """Return the elements and times of a step; ``places`` ranks of `dedicated` share a replica."""
    shards, specs = routes.shards, routes.plan.specs
    muon, adam = specs.muon_parameters(), specs.adamw_parameters()

    def held(some: Sequence[int]) -> sim.Floats:
        reports = [shards.reports[rank].shards for rank in routes.classes]
        each = [sum(mine[i].box.numel for i in some) for mine in reports]
        return np.array(each, float) / places

    is_cut = routes.plan.layout is Layout.SHARDED and not is_alone
    blocks = [_blocks(shards, r, costs, ns_item) if is_cut else (0.0, 0) for r in routes.classes]
    alone = routes.each(routes.local, lambda unit: unit.ms)[routes.classes]
    shapes = Counter(matrix.key for matrix in specs.matrices)
    every = sum(n * costs.batch_ms(key, 1) for key, n in shapes.items())
    block_ms, batches = np.array(blocks, float).T
    item = max((ITEM_SIZE.get(specs.parameters[i].dtype, 4) for i in muon), default=4)
    return sim.Work(
        held(muon), held(adam), float(sum(m.numel for m in specs.matrices)), alone,
        (block_ms, batches), (every, len(specs.matrices)), item, ns_item,
    )  # fmt: skip


# ---- the plan whose step ends first ---------------------------------------------------------

_GAIN = 0.02  # of the optimizer's part of a step; nothing is changed for less
_COPIES_GAIN = 0.2  # nothing is computed more than once for less: a simulation errs as much
# Shares of elements to compute in each part, in the order in which they are tried.
_SHARES = (1.0, 0.5, 0.75, 0.25, 0.875, 0.625, 0.375, 0.125, 0.0)
_SIZES = (16 << 20, 8 << 20, 4 << 20, 2 << 20, 1 << 20, 1 << 19, 1 << 18)  # bytes of a bucket
_MOST_LOOKED_AT, _MOST_SIMULATED = 100_000, 3_000  # matrices, in all plans and in a model


def parts_of(replicas: Sequence[Sequence[int]], topology: Topology) -> list[Parts]:
    """Return the ways to divide a mesh into parts that each compute a matrix with these replicas:
    a node's replicas together, and each replica by itself; the fewest parts first.

    >>> parts_of([(0,), (1,), (2,), (3,)], Topology.flat(4, ranks_per_node=2))
    [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))]
    """
    nodes = grouped((topology.node(ranks[0]), ranks) for ranks in replicas).values()
    inside = all(len({*map(topology.node, ranks)}) == 1 for ranks in replicas)
    by_node = tuple(tuple(rank for ranks in some for rank in ranks) for some in nodes)
    found = [by_node] * inside + [tuple(map(tuple, replicas))]
    return [of for of in dict.fromkeys(found) if len(of) > 1 and len({*map(len, of)}) == 1]


class Search:
    """Searches for the way whose step ends first. ``make`` plans a way, ``ms_of`` simulates it at a
    cost ``of_each``; ``parts`` has the possible parts of matrices, beside those in ``start``."""

    def __init__(
        self, start: Way, make: Callable[[Way], OwnershipPlan], ms_of: Callable[[OwnershipPlan],
        float], parts: Mapping[int, Sequence[Parts]], of_each: int, rings: Sequence[bool],
    ) -> None:  # fmt: skip
        self._make, self._ms_of, self._parts, self._rings = make, ms_of, parts, rings
        self._left = max(3, min(120, _MOST_LOOKED_AT // of_each))
        self.best, self._start, plan = start, start, make(start)
        self.ms = self.first_ms = ms_of(plan)
        prices = {row.key: row.ms[0] for row in plan.prices}
        matrices = plan.specs.matrices
        self._numel = [m.numel for m in matrices]
        # The cheapest per element first; of equal ones the last first: they are published last.
        each = [(prices[m.key] / m.numel, m.key, -i) for i, m in enumerate(matrices)]
        self._order = sorted(parts, key=each.__getitem__)

    def redundant(self, level: int, share: float) -> dict[int, Parts]:
        """Choose matrices with this share of all elements, each with its parts of this level."""
        chosen: dict[int, Parts] = {}
        left = share * sum(self._numel[i] for i in self._order)
        for i in self._order:
            if left < self._numel[i] / 2:
                break
            left -= self._numel[i]
            chosen[i] = self._parts[i][min(level, len(self._parts[i]) - 1)]
        return chosen

    def run(self, sizes: Sequence[int]) -> None:
        """Search without copies, then with copies, which must save `_COPIES_GAIN`."""
        levels = range(max(map(len, self._parts.values()), default=0))
        kept = (self._left + 1) // 2 if levels else 0
        self._left -= kept
        self._climb(sizes, ())
        alone, self._left = (self.best, self.ms), self._left + kept
        if levels:
            self._climb(sizes, levels)
            if self.ms > (1 - _COPIES_GAIN) * alone[1]:
                self.best, self.ms = alone
        if self.ms > (1 - _GAIN) * self.first_ms:
            self.best = self._start

    def _climb(self, sizes: Sequence[int], levels: Sequence[int]) -> None:
        """Change one property of the way after another, as long as the step becomes shorter."""
        while self._left > 0:
            before = self.ms
            for level in levels:  # also with the buckets, and so the batches, of the start
                sized = dict.fromkeys((self.best.bucket_bytes, self._start.bucket_bytes))
                some = product(sized, (self.redundant(level, share) for share in _SHARES))
                self._try(replace(self.best, bucket_bytes=n, redundant=of) for n, of in some)
            self._try(replace(self.best, by_shape=to) for to in (False, True))
            self._try(replace(self.best, bucket_bytes=size) for size in sizes)
            self._try(replace(self.best, rings=to) for to in self._rings)
            if self.ms > 0.995 * before:
                break

    def _try(self, ways: Iterable[Way]) -> None:
        for way in [*ways]:
            if way == self.best or self._left <= 0:
                continue
            self._left -= 1
            try:
                plan = self._make(way)
            except PlanError:  # too much state, because variants keep some with each copy
                continue
            if (ms := self._ms_of(plan)) < (1 - 1e-6) * self.ms:
                self.best, self.ms = way, ms


def planned(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostTable,
    shards: ShardMap | None,
    layout: Layout,
    solver: str,
    options: PlannerOptions,
    limits: OwnerLimits | None,
    *,
    batch_bytes: int = BATCH_BYTES,
    item: int = 2,
    asked: ShardedOptions | None = None,
    differ: str = "",
) -> OwnershipPlan:
    """Return the plan of `solve` whose simulated step ends first. ``asked`` are the options of the
    layout; ``differ`` says why copies would not compute the same bits, or is empty."""

    def make(way: Way, by: str = solver) -> OwnershipPlan:
        size = min(batch_bytes, BATCH_BUCKETS * (way.bucket_bytes or batch_bytes))
        return solve(
            specs, topology, costs, layout=layout, solver=by, options=options, limits=limits,
            batch_numel=size // item, way=way,
        )  # fmt: skip

    parts = {} if shards is None else _parts(shards, topology, layout)
    asked_for = options.redundancy if topology.world > 1 else 1
    redundancy, note = _redundancy(parts, asked_for, differ, layout)
    if shards is None or layout is Layout.DEDICATED or topology.world == 1:
        return make(Way())
    start = Way({i: each for i, of in parts.items() for each in of if len(each) == redundancy})
    machine, unknown = _machine(costs, topology, options.links)
    is_large = len(specs.matrices) > _MOST_SIMULATED  # one plan takes seconds
    quick, free = ("round_robin", {}) if solver == "round_robin" else ("greedy", parts)
    free = free if redundancy == "auto" else {}
    if machine is None or (is_large and not free):
        return _noted(make(start), note, unknown)
    job = partial(job_of, shards=shards, costs=costs, machine=machine, options=asked)

    def ms_of(plan: OwnershipPlan) -> float:
        return sim.optimizer_ms(job(plan))

    of_each = max(1, len(specs.matrices)) * max(1, topology.world // 64)
    sizes = () if asked and (asked.bucket_bytes or asked.min_buckets) else _SIZES
    rings = (False, True)[: 1 + (machine.is_cpu and topology.nodes > 2)]
    search = Search(start, partial(make, by=quick), ms_of, free, of_each, rings)
    search.run(() if is_large else sizes)
    best, plan = search.best, make(search.best)
    if solver == "auto" and not is_large:  # the best makespan need not give the best step
        with suppress(PlanError):  # it may exceed a memory cap
            in_turn = partial(make, by="round_robin")
            other = Search(replace(best, bucket_bytes=None), in_turn, ms_of, {}, of_each, rings)
            other.run(sizes)
            others = make(best, quick), in_turn(other.best), in_turn(best)
            plan = _bounded(min(plan, *others, key=ms_of), plan)
    whole = replace(best, redundant={i: of[-1] for i, of in parts.items()}, by_shape=False)
    once_ms = search.first_ms if redundancy in (1, "auto") else ms_of(make(Way()))
    copied_ms = None
    with suppress(PlanError):  # so many copies may exceed a memory cap
        copied_ms = ms_of(make(whole)) if parts else None
    step = StepTimes(ms_of(plan), once_ms, copied_ms, plan.work_ms, sim.link_ms(job(plan)))
    return _noted(replace(plan, step=step), note)


def _machine(costs: CostTable, topology: Topology, links: str) -> tuple[sim.Machine | None, str]:
    """Return the machine, or None if link rates are unknown, and why if the user gave links."""
    try:
        return sim.Machine.of(costs, topology), ""
    except PlanError as error:
        return None, "" if links == "measured" else f"links are ignored: {error}"


def _parts(shards: ShardMap, topology: Topology, layout: Layout) -> dict[int, list[Parts]]:
    """Return, by matrix, the parts (`parts_of`) that can each compute it."""
    every = () if layout.keeps_state_at_owners else range(len(shards.specs.matrices))
    return {i: of for i in every if (of := parts_of(shards.replicas(i), topology))}


def _redundancy(
    parts: Mapping[int, Sequence[Parts]], asked: str | int, differ: str, layout: Layout
) -> tuple[str | int, str]:
    """Return the redundancy ``asked`` for, or 1 and why; PlanError if no ``parts`` are so many."""
    ends = sorted({1, *(len(each) for of in parts.values() for each in of)})
    if layout.keeps_state_at_owners and asked not in ("auto", 1):
        raise PlanError(
            f"redundancy={asked}: where momentum lies with owners (layout {layout.value!r}) every "
            "matrix has one owner; leave redundancy out"
        )
    if asked != "auto" and asked not in ends:
        raise PlanError(
            f"redundancy={asked}: so many parts of this mesh can compute a matrix by "
            f"themselves: {', '.join(map(str, ends))}. Pass one of these, or 'auto'"
        )
    if differ and asked != 1 and parts:
        return 1, f"redundancy 1, because {differ}"
    return asked, ""


def _bounded(plan: OwnershipPlan, other: OwnershipPlan) -> OwnershipPlan:
    """Return ``plan`` with the bound of another plan, which holds for it if prices are equal."""
    if plan.prices != other.prices:
        return plan
    status = "optimal" if plan.makespan_ms <= other.lower_bound_ms else plan.status
    return replace(plan, lower_bound_ms=other.lower_bound_ms, proof=other.proof, status=status)


def _noted(plan: OwnershipPlan, *notes: str) -> OwnershipPlan:
    text = "; ".join(filter(None, (plan.search.note, *notes)))
    return replace(plan, search=replace(plan.search, note=text))
