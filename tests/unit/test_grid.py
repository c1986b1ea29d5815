"""The grid of a mesh, and what each place of it keeps, sends and receives."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dmuon.comm.buckets import EVERYONE, Slices, gradient_bucket, slice_boxes
from dmuon.comm.dedicated.storage import weight_buckets
from dmuon.comm.process_groups import Grid
from dmuon.scheduler.costs import resolve_costs
from dmuon.scheduler.select import collect
from dmuon.scheduler.shards import Box, LocalShard, RankShards
from dmuon.scheduler.solve import solve
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, OwnershipError

MESHES = [(1,), (5,), (2, 3), (3, 2), (2, 2, 3)]
AXES = ("replicate", "shard", "tp")


class Model(nn.Module):
    """Plain, fused and stacked matrices, a convolution each way, and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.qkv_proj = nn.Linear(6, 12, bias=False)
        self.w1 = nn.Parameter(torch.zeros(4, 3, 5))
        self.conv = nn.Conv1d(4, 6, 3)
        self.deconv = nn.ConvTranspose1d(4, 6, 3)


def plan_of(topology):
    model = Model()
    specs = collect(model, heads={"*qkv_proj*": 3})
    costs = resolve_costs("analytic", "cpu")
    return model, solve(specs, topology, costs, layout=Layout.DEDICATED, solver="round_robin")


def slices_of(mesh, tensor_parallel=False):
    axes = ("dp", "tp") if tensor_parallel and len(mesh) == 2 else AXES[: len(mesh)]
    topology = Topology(mesh, axes if len(mesh) > 1 else ("dp",), math.prod(mesh))
    _, plan = plan_of(topology)
    grid = Grid.of(topology, {"tp"} if tensor_parallel else ())
    boxes = []
    for spec in plan.specs.parameters:
        *others, last = spec.shape  # cut along the last dim: through every matrix
        ends = [last * t // grid.shape[2] for t in range(grid.shape[2] + 1)]
        zeros = (0,) * len(others)
        cut = [Box((*zeros, low), (*others, high - low)) for low, high in pairwise(ends)]
        boxes.append(tuple(cut) if grid.shape[2] > 1 and last > 1 else None)
    return plan, Slices(plan, grid, boxes)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.permutations([0, 1, 2]))
def test_every_rank_has_one_place_and_the_process_groups_partition_the_mesh(
    replicas, shards, tensors, order
):
    """Of any mesh, whichever axis comes first."""
    sizes, names = (replicas, shards, tensors), ("replicate", "shard", "tp")
    topology = Topology(
        tuple(sizes[i] for i in order), tuple(names[i] for i in order), math.prod(sizes)
    )
    grid, world = Grid.of(topology, {"tp"}), topology.world
    assert sorted(grid.ranks) == list(range(world))
    assert [grid.rank_at(*grid.place(r)) for r in range(world)] == list(range(world))
    assert grid.shape[2] == tensors and grid.data_ranks == replicas * shards
    for dims in ({0}, {1}, {2}, {0, 1}):
        found = {grid.along(dims, r) for r in range(world)}
        assert all(r in grid.along(dims, r) for r in range(world))
        assert {len(ranks) for ranks in found} == {math.prod(grid.shape[d] for d in dims)}
        assert sorted(r for ranks in found for r in ranks) == list(range(world))


def test_only_tensor_parallelism_makes_one_data_rank():
    grid = Grid.of(Topology((4,), ("tp",), 4), {"tp"})
    assert grid.shape == (1, 1, 4) and grid.data_ranks == 1


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_element_is_kept_at_exactly_one_place(mesh, tensor_parallel):
    plan, slices = slices_of(mesh, tensor_parallel)
    muon = plan.specs.muon_parameters()
    for t in range(slices.grid.shape[2]):
        for bucket in weight_buckets(slices, muon, t):
            kept = [0] * bucket.numel
            owners: list[set] = [set() for _ in range(bucket.numel)]
            for ranges in (bucket.sends, bucket.publishes):
                for piece in ranges:
                    for e in range(piece.start, piece.start + piece.numel):
                        kept[e] += 1
                        owners[e].add(piece.shard)
            assert kept == [2] * bucket.numel  # sent once, published once
            assert all(len(o) == 1 for o in owners)  # by the same column
            assert bucket.keeper is None or {p.shard for p in bucket.sends} <= {bucket.keeper}
    for i in range(len(plan.specs.matrices)):  # one owner for every matrix, at one place
        replica, shard, tensor = slices.owner_place(i)
        assert slices.grid.rank_at(replica, shard, tensor) == plan.owners[i]


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_of_a_matrix_are_where_the_parameter_has_them(mesh, tensor_parallel):
    """Numbered elements: the part of each rank is what indexing the parameter gives."""
    plan, slices = slices_of(mesh, tensor_parallel)
    for i, matrix in enumerate(plan.specs.matrices):
        spec = plan.specs.parameters[matrix.parameter]
        whole = torch.arange(spec.numel).view(spec.shape)
        seen = []
        for t in range(slices.grid.shape[2]):
            boxes = slices.boxes[matrix.parameter]
            local = whole if boxes is None else whole[boxes[t].slices()]
            part = slices.part(i, t)
            seen.append(local.reshape(-1)[part.start : part.start + part.numel])
        cut = slices.is_cut(i)
        joint = torch.cat(seen) if cut else seen[0]
        assert sorted(joint.tolist()) == sorted(matrix.view(whole).reshape(-1).tolist())
        assert cut or all(torch.equal(s, seen[0]) for s in seen)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_bucket_carries_every_gradient_once(mesh):
    plan, slices = slices_of(mesh)
    everything = range(len(plan.specs.parameters))
    rest = {p: plan.specs.parameters[p].numel for p in plan.specs.adamw_parameters()}
    bucket = gradient_bucket(slices, list(everything), rest, 0, torch.float32)
    sent = {p: torch.zeros(plan.specs.parameters[p].numel) for p in everything}
    for segment in bucket.segments:
        for span in segment.spans:
            sent[span.parameter][span.start : span.start + span.numel] += 1
            for i in span.matrices:
                assert slices.owner_place(i)[1] == segment.shard
        assert (segment.shard == EVERYONE) == all(s.parameter in rest for s in segment.spans)
    assert all((count == 1).all() for count in sent.values())


def test_slices_must_be_alike_on_all_data_ranks_and_tile_the_parameter():
    topology = Topology((2, 2), ("dp", "tp"), 4)
    _, plan = plan_of(topology)
    grid = Grid.of(topology, {"tp"})

    def report(rank, rows):
        shards = [
            LocalShard((rank,), (), (0,) * len(p.shape), p.shape) for p in plan.specs.parameters
        ]
        offset, size = rows
        shards[0] = LocalShard((0, 1), (), (offset, 0), (size, 6))
        return RankShards.of(rank, shards)

    halves = [(0, 5), (5, 5), (0, 5), (5, 5)]
    boxes = slice_boxes(plan.specs, grid, [report(r, rows) for r, rows in enumerate(halves)])
    assert boxes[0] == (Box((0, 0), (5, 6)), Box((5, 0), (5, 6)))
    assert boxes[1:] == [None] * (len(plan.specs.parameters) - 1)
    for wrong in ([(0, 5), (5, 5), (0, 4), (4, 6)], [(0, 4), (5, 5), (0, 4), (5, 5)]):
        reports = [report(r, rows) for r, rows in enumerate(wrong)]
        with pytest.raises(OwnershipError, match="the same way on every data-parallel rank"):
            slice_boxes(plan.specs, grid, reports)
