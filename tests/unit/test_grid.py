"""The grid of a mesh, and what each place of it keeps, sends and receives."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dmuon.comm.buckets import Slices, slice_boxes, weight_buckets
from dmuon.comm.process_groups import Grid
from dmuon.scheduler.costs import resolve_costs
from dmuon.scheduler.select import collect
from dmuon.scheduler.shards import RankShards
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import Box, LocalShard
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, OwnershipError
from tests.unit.models import plan_of as made_of
from tests.unit.models import tree

AXES = ("replicate", "shard", "tp")
# Shapes of meshes of those axes; of the last two, tensor parallelism cuts the parameters.
MESHES = [(1,), (5,), (2, 3), (3, 2), (1, 3, 2), (2, 2, 3)]


class Model(nn.Module):
    """Plain, fused and stacked matrices, a convolution each way, and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.qkv_proj = nn.Linear(6, 12, bias=False)
        self.w1 = nn.Parameter(torch.zeros(4, 3, 5))
        self.conv = nn.Conv1d(4, 6, 3)
        self.deconv = nn.ConvTranspose1d(4, 6, 3)


def plan_of(mesh):
    """A plan for `Model` on a mesh, and its grid."""
    specs = collect(Model(), heads={"*qkv_proj*": 3})
    topology = Topology(mesh, AXES[: len(mesh)], math.prod(mesh))
    costs = resolve_costs("analytic", "cpu")
    plan = solve(specs, topology, costs, layout=Layout.DEDICATED, solver="round_robin")
    return plan, Grid.of(topology, {"tp"})


def slices_of(mesh):
    plan, grid = plan_of(mesh)
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
    sizes, world = (replicas, shards, tensors), replicas * shards * tensors
    shape, axes = tuple(sizes[i] for i in order), tuple(AXES[i] for i in order)
    grid = Grid.of(Topology(shape, axes, world), {"tp"})
    assert sorted(grid.ranks) == list(range(world))
    assert [grid.rank_at(*grid.place(r)) for r in range(world)] == list(range(world))
    assert grid.shape[2] == tensors and math.prod(grid.shape[:2]) == replicas * shards
    for dims in ({0}, {1}, {2}, {0, 1}):
        found = {grid.along(dims, r) for r in range(world)}
        assert all(r in grid.along(dims, r) for r in range(world))
        assert {len(ranks) for ranks in found} == {math.prod(grid.shape[d] for d in dims)}
        assert sorted(r for ranks in found for r in ranks) == list(range(world))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_element_is_kept_at_exactly_one_place(mesh):
    plan, slices = slices_of(mesh)
    for t in range(slices.grid.shape[2]):
        for bucket in weight_buckets(slices, plan.specs.muon_parameters(), t):
            shards = []
            for ranges in (bucket.sends, bucket.publishes):
                pieces = sorted((p.start, p.start + p.numel, p.shard) for p in ranges)
                ends = [0, *(end for _, end, _ in pieces)]
                assert [start for start, _, _ in pieces] == ends[:-1], "once, without gaps"
                assert ends[-1] == bucket.numel
                shards.append([s for start, end, s in pieces for _ in range(start, end)])
            assert shards[0] == shards[1], "published in the column that sends it"
            assert bucket.keeper is None or set(shards[0]) <= {bucket.keeper}
    for i in range(len(plan.specs.matrices)):  # one owner for every matrix, at one place
        assert slices.grid.rank_at(*slices.place_of[i]) == plan.owners[i]


@pytest.mark.parametrize(("rows", "fits"), [
    ([(0, 5), (5, 5), (0, 5), (5, 5)], True),
    ([(0, 5), (5, 5), (0, 4), (4, 6)], False),  # not alike on all data ranks
    ([(0, 4), (5, 5), (0, 4), (5, 5)], False),  # a row is nowhere
])  # fmt: skip
def test_slices_must_be_alike_on_all_data_ranks_and_tile_the_parameter(rows, fits):
    plan, grid = plan_of((1, 2, 2))
    others = [LocalShard((0,), (), Box.at_origin(p.shape)) for p in plan.specs.parameters[1:]]
    reports = [
        RankShards.of(rank, [LocalShard((0, 1), (), Box((offset, 0), (size, 6))), *others])
        for rank, (offset, size) in enumerate(rows)
    ]
    if fits:
        first, *rest = slice_boxes(plan.specs, grid, reports)
        assert first == (Box((0, 0), (5, 6)), Box((5, 0), (5, 6)))
        assert rest == [None] * len(others)
        return
    with pytest.raises(OwnershipError, match="the same way on every data-parallel rank"):
        slice_boxes(plan.specs, grid, reports)


@pytest.mark.parametrize("cut", [[4, 5], "interleaved:3"], ids=["beside each other", "interleaved"])
def test_pieces_that_are_no_ranges_travel_in_their_own_order_or_are_refused(cut):
    model = tree({"qkv.weight": (4, 9)})
    specs = collect(model, splits={"qkv.weight": {"sizes": cut, "transposed": True}})
    owners = [0, 1, 1][: len(specs.matrices)]
    plan, weight = made_of(specs, owners, 2), torch.arange(36).view(4, 9)
    slices = Slices.flat(plan)
    pieces = (
        [weight[:, :4], weight[:, 4:]] if cut == [4, 5] else [weight[:, k::3] for k in range(3)]
    )
    expected = torch.cat([piece.flatten() for piece in pieces])
    assert slices.flat_of(0, weight).tolist() == expected.tolist()
    first = pieces[0].numel()
    spans = [(s.start, s.numel, s.shard) for s in slices.spans(0, 0)]
    assert spans == [(0, first, 0), (first, 36 - first, 1)]
    with pytest.raises(OwnershipError, match=r"'qkv.weight\[:, 0:.*layout='sharded'"):
        Slices(plan, slices.grid, [None])
    whole = collect(model, splits={"qkv.weight": {"sizes": [9], "transposed": True}})
    grid = Slices.flat(made_of(whole, [1], 2)).grid
    assert [s.numel for s in Slices(made_of(whole, [1], 2), grid, [None]).spans(0, 0)] == [36]
