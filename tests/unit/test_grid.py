"""What each place of a mesh keeps of a parameter that is cut, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmuon.comm.buckets import Slices, slice_boxes
from dmuon.comm.process_groups import Grid
from dmuon.scheduler.select import collect
from dmuon.scheduler.shards import RankShards
from dmuon.scheduler.specs import Box, LocalShard
from dmuon.scheduler.topology import Topology
from dmuon.types import OwnershipError
from tests.unit.models import plan_of, tree


@pytest.mark.parametrize(("rows", "fits"), [
    ([(0, 5), (5, 5), (0, 5), (5, 5)], True),
    ([(0, 5), (5, 5), (0, 4), (4, 6)], False),  # not alike on all data ranks
    ([(0, 4), (5, 5), (0, 4), (5, 5)], False),  # a row is nowhere
])  # fmt: skip
def test_slices_must_be_alike_on_all_data_ranks_and_tile_the_parameter(rows, fits):
    specs = collect(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4)))
    grid = Grid.of(Topology((1, 2, 2), ("replicate", "shard", "tp"), 4), {"tp"})
    others = [LocalShard((0,), (), Box.at_origin(p.shape)) for p in specs.parameters[1:]]
    reports = [
        RankShards.of(rank, [LocalShard((0, 1), (), Box((offset, 0), (size, 6))), *others])
        for rank, (offset, size) in enumerate(rows)
    ]
    if fits:
        first, *rest = slice_boxes(specs, grid, reports)
        assert first == (Box((0, 0), (5, 6)), Box((5, 0), (5, 6)))
        assert rest == [None] * len(others)
        return
    with pytest.raises(OwnershipError, match="the same way on every data-parallel rank"):
        slice_boxes(specs, grid, reports)


@pytest.mark.parametrize("cut", [[4, 5], "interleaved:3"], ids=["beside each other", "interleaved"])
def test_pieces_that_are_no_ranges_travel_in_their_own_order_or_are_refused(cut):
    model = tree({"qkv.weight": (4, 9)})
    specs = collect(model, splits={"qkv.weight": {"sizes": cut, "transposed": True}})
    owners = [0, 1, 1][: len(specs.matrices)]
    plan, weight = plan_of(specs, owners, 2), torch.arange(36).view(4, 9)
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
    grid = Slices.flat(plan_of(whole, [1], 2)).grid
    assert [s.numel for s in Slices(plan_of(whole, [1], 2), grid, [None]).spans(0, 0)] == [36]
