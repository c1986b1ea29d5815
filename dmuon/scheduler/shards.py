"""Which rank holds which part of which matrix, and so may own it, from the reports of all ranks.

Each rank holds a box of a parameter; replicas hold equal boxes. A matrix is a box too, so a rank's
part of it is the intersection of two boxes.

A parameter may exist several times: a weight that tensor parallelism does not cut is sharded over
the data-parallel ranks of each tensor-parallel coordinate separately. Such *copies* are matrices of
their own, each with an owner among the ranks that hold it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dmuon.scheduler.specs import Box, LocalShard, ModelSpecs, OwnerLimits, StateSizes
from dmuon.scheduler.topology import Topology, holds_replicas
from dmuon.types import INTERLEAVED, OwnershipError, PlanError, grouped

T = TypeVar("T")

# Projections back to the residual stream, which tensor parallelism cuts by their columns.
_BACK = re.compile(r"(?:o_proj|out_proj|down_proj|c_proj|w2|wo|dense_4h_to_h)(?:\.weight)?$")


def is_back(name: str) -> bool:
    """Return whether a weight of this name projects back to the residual stream."""
    return _BACK.search(name) is not None


@dataclass(frozen=True, slots=True)
class RankShards:
    """The report of one rank: its global rank, its shard of each parameter, and its device, because
    only ranks with equal devices compute equal bits."""

    global_rank: int
    shards: tuple[LocalShard, ...]
    device: str = ""

    @classmethod
    def of(cls, global_rank: int, shards: Iterable[LocalShard]) -> RankShards:
        """Make a report in which equal shards, and equal sets of ranks, are one object, which is
        sent once, and hashed once for thousands of ranks."""
        one: dict[LocalShard, LocalShard] = {}
        ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
        found = [one.setdefault(shard, shard) for shard in shards]
        alike = {id(s): replace(s, ranks=ranks.setdefault(s.ranks, s.ranks)) for s in one}
        return cls(global_rank, tuple(alike[id(shard)] for shard in found))


@dataclass(frozen=True)
class ShardMap:
    """The shards of all ranks, in the order of ``reports``. ``specs`` has a matrix for every copy
    of every matrix of the model. ``copies`` has, by parameter, the sets of ranks that hold a copy
    together; ``holders`` has the set of each matrix."""

    specs: ModelSpecs
    reports: tuple[RankShards, ...]
    copies: tuple[tuple[tuple[int, ...], ...], ...]
    holders: tuple[tuple[int, ...], ...]
    _known: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is called once per key, because layers are alike."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    @property
    def world(self) -> int:
        return len(self.reports)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each matrix in its parameter."""
        shapes = [p.shape for p in self.specs.parameters]
        return tuple(m.box(shapes[m.parameter]) for m in self.specs.matrices)

    def shard(self, rank: int, parameter: int) -> LocalShard:
        """Return the part of a parameter that ``rank`` stores."""
        return self.reports[rank].shards[parameter]

    def piece(self, matrix: int, rank: int) -> Box:
        """Return the part of a matrix, from its corner, that ``rank`` holds; it may be empty."""
        outer = self.boxes[matrix]
        if rank not in self._holder_sets[matrix]:
            return Box.at_origin((0,) * len(outer.shape))
        shard = self.shard(rank, self.specs.matrices[matrix].parameter)
        return outer.intersection(shard.box).within(outer)

    def pieces(self, matrix: int) -> dict[int, Box]:
        """Return all pieces of a matrix that are not empty, by rank, replicas included."""
        found = {rank: self.piece(matrix, rank) for rank in self.holders[matrix]}
        return {rank: box for rank, box in found.items() if box.numel}

    def replica_of(self, matrix: int, rank: int) -> tuple[int, ...]:
        """Return the coordinates of ``rank`` along the axes that replicate a matrix."""
        return self.shard(rank, self.specs.matrices[matrix].parameter).replica

    def counts(self, parameter: int, rank: int) -> bool:
        """Return whether ``rank`` holds a part of the first replica of a parameter's first copy."""
        return rank in self.copies[parameter][0] and not any(self.shard(rank, parameter).replica)

    def is_replicated(self, matrix: int) -> bool:
        """Return whether several ranks hold the same part of a matrix."""
        return self._replicas[matrix] > 1

    def is_everywhere(self, matrix: int) -> bool:
        """Return whether there are several ranks, and each of them holds the whole matrix."""
        return self._replicas[matrix] == self.world > 1

    @cached_property
    def _replicas(self) -> list[int]:
        """The number of replicas of each matrix among its holders."""
        keys = [(m.parameter, h) for m, h in zip(self.specs.matrices, self.holders, strict=True)]
        found = {(p, h): len({self.shard(r, p).replica for r in h}) for p, h in {*keys}}
        return [found[key] for key in keys]

    def replicas(self, matrix: int) -> list[tuple[int, ...]]:
        """Return, for each replica, the ranks that may own a matrix."""
        found = grouped((self.replica_of(matrix, r), r) for r in self.domains[matrix])
        return [tuple(found[replica]) for replica in sorted(found)]

    def partners(self, matrix: int, rank: int) -> tuple[int, ...]:
        """Return the ranks, ascending, that hold the same part of a matrix as ``rank`` does."""
        parameter = self.specs.matrices[matrix].parameter
        return self._by_box(parameter, self.holders[matrix])[self.shard(rank, parameter).box]

    def twins(self, rank: int) -> set[int]:
        """Return the ranks that hold the same part of every parameter as ``rank`` does."""
        found = {*range(self.world)}
        for p, copies in enumerate(self.copies):
            for ranks in copies:
                if rank in ranks:
                    found.intersection_update(self._by_box(p, ranks)[self.shard(rank, p).box])
        return found

    def sharing(
        self, matrix: int, copies: tuple[int, ...], topology: Topology
    ) -> tuple[tuple[int, ...], ...]:
        """Return all sets of two or more `partners`, in each of the `audiences` of ``copies``."""
        copies = copies if len(copies) > 1 else ()

        def make() -> tuple[tuple[int, ...], ...]:
            parts = self._by_box(self.specs.matrices[matrix].parameter, self.holders[matrix])
            sets = {ranks for box, ranks in parts.items() if box.numel}
            if copies:
                among = map(frozenset, self.audiences(matrix, copies, topology))
                sets = {tuple(r for r in s if r in of) for of in among for s in sets}
            return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))

        return self._once(("sharing", self.kind(matrix), self.holders[matrix], copies), make)

    def kind(self, matrix: int) -> int:
        """Return a number of the parameter; parameters with the same objects as shards share it."""
        return self._kinds[self.specs.matrices[matrix].parameter]

    @cached_property
    def _kinds(self) -> list[int]:
        known: dict[tuple[int, ...], int] = {}
        columns = zip(*(map(id, report.shards) for report in self.reports))
        return [known.setdefault(column, len(known)) for column in columns]

    def replica_numbers(self, matrix: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return, [world], the number of the replica that each rank holds a part of, else -1."""
        parameter, ranks = self.specs.matrices[matrix].parameter, self.domains[matrix]

        def make() -> np.ndarray[Any, np.dtype[np.int64]]:
            known: dict[tuple[int, ...], int] = {}
            found = np.full(self.world, -1)
            for r in ranks:
                found[r] = known.setdefault(self.shard(r, parameter).replica, len(known))
            return found

        return self._once(("replicas", self.kind(matrix), ranks), make)

    def audiences(
        self, matrix: int, copies: tuple[int, ...], topology: Topology
    ) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that take the result of each of ``copies``, which compute a matrix. A
        replica takes the result of its own copy, or of a copy on its node, or of the first copy."""
        parameter, holders = self.specs.matrices[matrix].parameter, self.holders[matrix]

        def make() -> tuple[tuple[int, ...], ...]:
            at, near = (
                {of(rank): n for n, rank in reversed([*enumerate(copies)])}
                for of in (lambda r: self.shard(r, parameter).replica, topology.node)
            )
            found: list[list[int]] = [[] for _ in copies]
            replicas = grouped((self.shard(r, parameter).replica, r) for r in holders)
            for replica, ranks in replicas.items():
                found[at.get(replica, near.get(topology.node(ranks[0]), 0))] += ranks
            return tuple(tuple(sorted(ranks)) for ranks in found)

        return self._once(("audiences", parameter, holders, copies), make)

    def _by_box(self, parameter: int, holders: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
        """Group the ``holders`` of a parameter by their boxes."""

        def make() -> dict[Box, tuple[int, ...]]:
            found = grouped((self.shard(rank, parameter).box, rank) for rank in holders)
            return {box: tuple(ranks) for box, ranks in found.items()}

        return self._once(("boxes", parameter, holders), make)

    @cached_property
    def _holder_sets(self) -> tuple[frozenset[int], ...]:
        shared = {ranks: frozenset(ranks) for ranks in set(self.holders)}
        return tuple(shared[ranks] for ranks in self.holders)

    def is_local(self, matrix: int, copies: Sequence[int] = ()) -> bool:
        """Return whether nothing has to travel: one rank alone holds the matrix, or each rank that
        does is one of the ``copies`` that compute it."""
        return len(self.domains[matrix]) == max(1, len(copies))

    @cached_property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that may own each matrix: all that hold the parameter, or its item of it."""
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        found = []
        for i, (holders, outer) in enumerate(zip(self.holders, self.boxes)):
            matrix = self.specs.matrices[i]
            lead = outer.offset[:-2] if matrix.form.is_stack else ()
            key = holders, lead and self.kind(i), lead
            if key not in known:
                boxes = ((r, self.shard(r, matrix.parameter).box) for r in holders if lead)
                known[key] = tuple(r for r, box in boxes if box.reaches(lead)) if lead else holders
            found.append(known[key])
        return tuple(found)

    def limits(self, memory_bytes: int | None, sizes: StateSizes | None = None) -> OwnerLimits:
        """Return the domains of matrices, and the bytes of state of each rank's shards."""
        sizes = sizes or StateSizes.plain(self.specs)
        fixed = tuple(
            sum(shard.box.numel * size for shard, size in zip(report.shards, sizes.per_element))
            for report in self.reports
        )
        domains = sorted(set(self.domains), key=lambda domain: (len(domain), domain))
        own = sizes.at_owners if any(sizes.at_owners) else ()
        limits = OwnerLimits(fixed_bytes=fixed, memory_bytes=memory_bytes, matrix_bytes=own)
        if domains == [tuple(range(self.world))]:
            return limits
        number = {domain: i for i, domain in enumerate(domains)}
        domain_of = tuple(number[domain] for domain in self.domains)
        return replace(limits, domains=tuple(domains), domain_of=domain_of)


def shard_map(specs: ModelSpecs, reports: Sequence[RankShards]) -> ShardMap:
    """Join the reports of all ranks, with the same result on every rank. OwnershipError if they
    contradict each other, or their boxes do not tile a parameter."""
    mesh_rank = {report.global_rank: rank for rank, report in enumerate(reports)}
    # Most parameters share their tuples of ranks, so tuples of thousands are examined only once.
    known: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    copies = []
    for i, p in enumerate(specs.parameters):
        ranks_of = [report.shards[i].ranks for report in reports]
        if (key := tuple(map(id, ranks_of))) not in known:
            known[key] = _copies(p.name, ranks_of, mesh_rank)
        copies.append(known[key])
    checked = set()
    for i in specs.muon_parameters():
        p = specs.parameters[i]
        for ranks in copies[i]:
            shards = tuple(reports[r].shards[i] for r in ranks)
            seen = p.shape, tuple(map(id, shards))
            if seen not in checked:
                _check_tiling(p.name, p.shape, shards)
                checked.add(seen)
    each = ((matrix, len(copies[matrix.parameter])) for matrix in specs.matrices)
    matrices = tuple(m.copy(n, count) for m, count in each for n in range(1, count + 1))
    holders = tuple(ranks for matrix in specs.matrices for ranks in copies[matrix.parameter])
    return ShardMap(replace(specs, matrices=matrices), tuple(reports), tuple(copies), holders)


def _copies(
    name: str, ranks_of: Sequence[tuple[int, ...]], mesh_rank: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that hold a copy of a parameter, as the ranks report them."""
    groups = grouped((ranks, rank) for rank, ranks in enumerate(ranks_of))
    for ranks, reporters in groups.items():
        if missing := [r for r in ranks if r not in mesh_rank]:
            raise OwnershipError(
                f"parameter {name!r} also lies on global ranks {missing[:8]}, outside the mesh of "
                f"{len(ranks_of)} ranks: pass a mesh of all to dmuon.dedicate_params(model, mesh)"
            )
        expected = sorted(mesh_rank[r] for r in ranks)
        if reporters != expected:
            raise OwnershipError(
                f"mesh ranks {reporters} say that {name!r} lies on ranks {expected}, but not all "
                "of these say so: shard the model in the same way on every rank"
            )
    return tuple(sorted(tuple(reporters) for reporters in groups.values()))


def _check_tiling(name: str, shape: tuple[int, ...], shards: Sequence[LocalShard]) -> None:
    """Raise OwnershipError unless the boxes of all replicas tile a parameter in one way."""
    replicas: dict[tuple[int, ...], list[Box]] = {shard.replica: [] for shard in shards}
    for shard in shards:
        if shard.box.numel:
            replicas[shard.replica].append(shard.box)
    whole = Box.at_origin(shape)
    for boxes in replicas.values():
        inside = all(box.intersection(whole) == box for box in boxes)
        if not inside or sum(box.numel for box in boxes) != whole.numel or _overlap(boxes):
            raise OwnershipError(
                f"the shards of parameter {name!r} of shape {list(shape)} on ranks "
                f"{list(shards[0].ranks)[:8]} do not tile it with boxes: found {boxes[:4]}. "
                + INTERLEAVED
            )
    if len({frozenset(boxes) for boxes in replicas.values()}) > 1:
        raise OwnershipError(
            f"the replicas of parameter {name!r} are sharded differently: shard each in one way"
        )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes share an element."""
    ordered = sorted(boxes, key=lambda box: box.offset)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offset[0] >= box.ends[0]:
                break  # it and all later ones begin behind the box
            if box.intersection(other).numel:
                return True
    return False


def evenly_sharded(
    specs: ModelSpecs, topology: Topology, ep: int = 1, tp: int = 1, *, whole: bool = False
) -> ShardMap:
    """Return the shards of a model that is not built yet. FSDP2 cuts the rows of every parameter
    into equal chunks over all axes but those of replicas, or over none if ``whole``. With ``ep``
    each stack is first cut into one part for each of the ``ep`` innermost ranks, and each part by
    its rows if there are more ranks than items, as torchtitan does with experts. With ``tp`` every
    other weight is first cut for the ``tp`` innermost ranks, by its rows, or by its columns if it
    has the name of a projection back to the residual stream.
    PlanError if ``ep`` does not divide the ranks or the items of a stack, or there is no stack; or
    if ``tp`` does not divide the ranks."""
    world = topology.world
    every = tuple(range(world))
    stacks = {m.parameter for m in specs.matrices if m.form.is_stack and ep > 1}
    items = {specs.parameters[i].shape[0] for i in stacks}
    cuts = [not whole and not holds_replicas(axis) for axis in topology.axes]
    count = math.prod(size for size, is_cut in zip(topology.shape, cuts) if is_cut)
    if ep > 1 and (not items or count % ep or any(n % ep for n in items)):
        found = f"stacks of {sorted(items)} items" if items else "no stack"
        raise PlanError(
            f"expert parallelism over {ep} ranks (--ep) must divide the experts of each stack and "
            f"the ranks that shard: found {found} on {count} ranks"
        )
    if count % tp:
        raise PlanError(
            f"tensor parallelism over {tp} ranks needs ranks that it divides: found {count} that "
            "shard"
        )

    def shard(
        shape: tuple[int, ...], is_stack: bool, across: int, index: int, replica: int
    ) -> LocalShard:
        offset, size = [0] * len(shape), list(shape)
        steps = [(across, tp, index % tp), (0, count // tp, index // tp)]
        steps = steps if len(shape) > 1 else [(0, count, index)]
        if is_stack:
            steps = [(0, ep, index % ep), (int(count > shape[0]), count // ep, index // ep)]
        for dim, parts, number in steps if shape else ():
            step = -(-size[dim] // parts)
            start = min(size[dim], number * step)
            offset[dim], size[dim] = offset[dim] + start, min(step, size[dim] - start)
        along = (replica,) if count < world else ()
        return LocalShard(every, along, Box(tuple(offset), tuple(size)))

    order = sorted(range(len(cuts)), key=cuts.__getitem__)  # axes that replicate first
    ranks = np.arange(world).reshape(topology.shape).transpose(order)
    kinds = [(p.shape, i in stacks, int(is_back(p.name))) for i, p in enumerate(specs.parameters)]
    reports = []
    for rank, place in enumerate(ranks.argsort(axis=None).tolist()):
        replica, index = divmod(place, count)
        made = {kind: shard(*kind, index, replica) for kind in {*kinds}}
        reports.append(RankShards(rank, tuple(made[kind] for kind in kinds)))
    copies, holders = ((every,),) * len(specs.parameters), (every,) * len(specs.matrices)
    return ShardMap(specs, tuple(reports), copies, holders)
