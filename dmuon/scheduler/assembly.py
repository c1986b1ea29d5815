"""From what every rank reports to one `ShardMap`, or one error, on all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dmuon.scheduler.shards import Box, RankShards, ShardMap
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs
from dmuon.types import OwnershipError

__all__ = ["assemble"]


def assemble(specs: ModelSpecs, reports: Sequence[RankShards]) -> ShardMap:
    """Join the reports of all ranks; the same result, or the same error, on every rank.

    Raises:
        OwnershipError: ranks contradict each other, or their boxes do not tile a parameter.
    """
    mesh_rank = {report.global_rank: rank for rank, report in enumerate(reports)}
    copies = [
        _copies(specs.parameters[p].name, p, reports, mesh_rank)
        for p in range(len(specs.parameters))
    ]
    checked: set[tuple[object, ...]] = set()
    for p in specs.muon():
        shape = specs.parameters[p].shape
        for ranks in copies[p]:
            key = (shape, *(reports[r].shard(p) for r in ranks))
            if key not in checked:
                _check_tiling(specs.parameters[p].name, shape, p, ranks, reports)
                checked.add(key)
    matrices: list[MatrixSpec] = []
    holders: list[tuple[int, ...]] = []
    for matrix in specs.matrices:
        found = copies[matrix.parameter]
        for number, ranks in enumerate(found, 1):
            name = f"{matrix.name} (copy {number} of {len(found)})"
            matrices.append(matrix if len(found) == 1 else replace(matrix, name=name))
            holders.append(ranks)
    expanded = replace(specs, matrices=tuple(matrices))
    return ShardMap(expanded, tuple(reports), tuple(copies), tuple(holders))


def _copies(
    name: str, parameter: int, reports: Sequence[RankShards], mesh_rank: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that hold a copy of the parameter each, in order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        groups[report.shard(parameter).ranks].append(rank)
    for ranks, reporters in groups.items():
        missing = [r for r in ranks if r not in mesh_rank]
        if missing:
            raise OwnershipError(
                f"parameter {name!r} also lies on global ranks {missing[:8]}, which are no part of "
                f"the mesh of {len(reports)} ranks: pass a mesh of all of them to "
                "dmuon.dedicate_params(model, mesh)"
            )
        expected = sorted(mesh_rank[r] for r in ranks)
        if reporters != expected:
            raise OwnershipError(
                f"mesh ranks {reporters} say that {name!r} lies on ranks {expected}, but not all "
                "of these say so: shard the model in the same way on every rank"
            )
    return tuple(sorted(tuple(reporters) for reporters in groups.values()))


def _check_tiling(
    name: str,
    shape: tuple[int, ...],
    parameter: int,
    ranks: Sequence[int],
    reports: Sequence[RankShards],
) -> None:
    replicas: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for rank in ranks:
        shard = reports[rank].shard(parameter)
        box = Box(shard.offset, shard.shape)
        if box.numel:
            replicas[shard.replica].append(box)
        else:
            replicas.setdefault(shard.replica, [])
    whole = Box((0,) * len(shape), shape)
    shares = {coordinates: Counter(boxes) for coordinates, boxes in replicas.items()}
    first = next(iter(shares.values()))
    for boxes in replicas.values():
        inside = all(box.intersection(whole) == box for box in boxes)
        if not inside or sum(box.numel for box in boxes) != whole.numel or _overlap(boxes):
            raise OwnershipError(
                f"the shards of parameter {name!r} of shape {list(shape)} on ranks "
                f"{list(ranks)[:8]} do not tile it with boxes: found {boxes[:4]}. Interleaved "
                "shards cannot be routed; shard it with fully_shard or parallelize_module"
            )
    if any(share != first for share in shares.values()):
        raise OwnershipError(
            f"the replicas of parameter {name!r} are sharded differently: shard each in one way"
        )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes share an element.

    Sorted by their first offset, a box can only meet those that begin before it ends.
    """
    ordered = sorted(boxes, key=lambda box: box.offset)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if box.intersection(other).numel:
                return True
    return False
