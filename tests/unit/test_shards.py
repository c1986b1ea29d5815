"""Boxes, copies, pools and routes: pure data, checked for every rank at once."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.buckets import cut_buckets
from dmuon.comm.routes import bucket_route, sent_elements
from dmuon.scheduler.costs import resolve_costs
from dmuon.scheduler.plan import units_of
from dmuon.scheduler.shards import Box, LocalShard, RankShards, ShardMap, assemble, matrix_box
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout, OwnershipError

REPLICATE = -1


def held(ranks, replica, offset, shape) -> LocalShard:
    return LocalShard(ranks, replica, Box(offset, shape))


def local_box(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    where: tuple[int, ...],
    order: list[int],
    dims: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and replica of a rank: mesh axes cut their dim in ``order``, as torch.chunk."""
    offset, size = [0] * len(shape), list(shape)
    for axis in order:
        dim = dims[axis]
        if dim == REPLICATE:
            continue
        chunk = -(-size[dim] // mesh[axis])
        low = min(where[axis] * chunk, size[dim])
        offset[dim] += low
        size[dim] = min(chunk, size[dim] - low)
    replica = tuple(c for c, d in zip(where, dims, strict=True) if d == REPLICATE)
    return tuple(offset), tuple(size), replica


def shard_everywhere(
    shapes: list[tuple[int, ...]],
    matrices: list[list[MatrixSpec]],
    mesh: tuple[int, ...],
    dims: list[tuple[int, ...]],
    orders: list[list[int]],
) -> ShardMap:
    world = math.prod(mesh)
    specs = ModelSpecs(
        tuple(
            ParameterSpec(f"p{i}", shape, "float32", Algorithm.MUON, "weight")
            for i, shape in enumerate(shapes)
        ),
        tuple(m for found in matrices for m in found),
    )
    reports = []
    for rank, where in enumerate(product(*map(range, mesh))):
        shards = []
        for shape, placed, order in zip(shapes, dims, orders, strict=True):
            offset, size, replica = local_box(shape, mesh, where, order, placed)
            shards.append(held(tuple(range(world)), replica, offset, size))
        reports.append(RankShards.of(rank, shards))
    return assemble(specs, reports)


@st.composite
def shard_maps(draw: st.DrawFn) -> ShardMap:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shapes, matrices, dims, orders = [], [], [], []
    for i in range(draw(st.integers(1, 3))):
        stacked = draw(st.booleans())
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=2)))
        count = 1
        if stacked:
            count = draw(st.integers(2, 4))
            shape = (count, *shape)
        rows, cols = shape[-2:]
        # A fused parameter: pieces of rows.
        split = rows > 1 and not stacked and draw(st.booleans())
        sizes = [1, rows - 1] if split else [rows]
        found, start = [], 0
        for _ in range(count):
            for size in sizes:
                found.append(MatrixSpec(f"p{i}@{start}", i, size, cols, "float32", start))
                start += size * cols
        shapes.append(shape)
        matrices.append(found)
        choices = [REPLICATE, *range(len(shape))]
        dims.append(tuple(draw(st.sampled_from(choices)) for _ in mesh))
        orders.append(draw(st.permutations(range(len(mesh)))))
    return shard_everywhere(shapes, matrices, mesh, dims, orders)


@settings(max_examples=150, deadline=None)
@given(shard_maps())
def test_every_replica_tiles_each_matrix_exactly(shards):
    for i, matrix in enumerate(shards.specs.matrices):
        replicas: dict[tuple[int, ...], torch.Tensor] = {}
        for piece in shards.pieces(i):
            seen = replicas.setdefault(
                piece.replica, torch.zeros(shards.boxes[i].box.shape, dtype=torch.int64)
            )
            seen[piece.box.slices()] += 1
        assert replicas, matrix
        assert all((seen == 1).all() for seen in replicas.values())


@settings(max_examples=150, deadline=None)
@given(shard_maps(), st.integers(1, 4), st.integers(1, 400), st.data())
def test_send_and_receive_plans_agree_pairwise(shards, least, size, data):
    world = shards.world
    limits = shards.limits(None)
    plan = solve(
        shards.specs,
        Topology.flat(world),
        resolve_costs("analytic", "cpu"),
        layout=Layout.SHARDED,
        solver="greedy",
        limits=limits,
    )
    units = units_of(plan, [0] * len(shards.specs.matrices))
    wire = [u for u, unit in enumerate(units) if not shards.is_local(unit.matrices[0])]
    buckets = cut_buckets(units, wire, size, least, 2)
    assert sorted(u for bucket in buckets for u in bucket) == wire
    for pool, owner in zip(shards.pools, plan.owners, strict=True):
        assert owner in pool
    sent = {"gather": 0, "scatter": 0, "replicate": 0}
    for bucket in buckets:
        routes = [bucket_route(shards, units, bucket, rank) for rank in range(world)]
        assert len({route.replicates for route in routes}) == 1
        for a, b in product(range(world), repeat=2):
            for out, into in (("held", "owned"), ("owned", "held"), ("copies_out", "copies_in")):
                left = peer_parts(getattr(routes[a], out), b)
                right = peer_parts(getattr(routes[b], into), a)
                assert left == right, (out, a, b)
                if a != b:
                    name = {"held": "gather", "owned": "scatter"}.get(out, "replicate")
                    sent[name] += sum(box.numel for _, box in left)
        # Whoever holds a part gets its update once; owners get every element once.
        for rank, route in enumerate(routes):
            arriving = (*route.held.parts, *route.copies_in.parts)
            updated = sorted(i for part in arriving for i in part.matrices)
            assert updated == sorted(
                i for u in bucket for i in units[u].matrices if shards.piece(i, rank).numel
            )
            owned = sum(part.numel for part in route.owned.parts)
            assert owned == sum(units[u].numel for u in route.units)
    assert sent == sent_elements(shards, units, wire)


def peer_parts(message, peer: int) -> list[tuple[int, Box]]:
    """What goes to (or comes from) a peer, in order."""
    start = sum(message.splits[:peer])
    end = start + message.splits[peer]
    return [(i, p.box) for p in message.parts if start <= p.start < end for i in p.matrices]


@pytest.mark.parametrize("replicas, shards_", [(1, 4), (2, 2), (4, 2)])
def test_traffic_is_what_the_design_says(replicas, shards_):
    world = replicas * shards_
    made = shard_everywhere(
        [(16, 8)] * 8,
        [[MatrixSpec(f"p{i}", i, 16, 8, "float32")] for i in range(8)],
        (replicas, shards_),
        [(REPLICATE, 0)] * 8,
        [[0, 1]] * 8,
    )
    plan = solve(
        made.specs, Topology.flat(world), resolve_costs("analytic", "cpu"),
        layout=Layout.SHARDED, limits=made.limits(None),
    )  # fmt: skip
    units = units_of(plan, [0] * 8)
    total = sum(sent_elements(made, units, range(len(units))).values())
    elements = 8 * 16 * 8
    expected = elements / world * (2 * (shards_ - 1) / shards_ + replicas - 1)
    assert total / world == expected


def test_experts_belong_to_the_ranks_that_hold_them():
    made = shard_everywhere(
        [(4, 6, 6)],
        [[MatrixSpec(f"e{e}", 0, 6, 6, "float32", 36 * e) for e in range(4)]],
        (2, 2),
        [(1, 0)],
        [[1, 0]],
    )
    assert made.pools == ((0, 2), (0, 2), (1, 3), (1, 3))
    limits = made.limits(None)
    assert limits.pools == ((0, 2), (1, 3))
    assert limits.fixed_bytes == (4 * 36,) * 4
    first, *others = made.specs.parameters
    by_adamw = replace(first, algorithm=Algorithm.ADAMW)
    rest = replace(made, specs=ModelSpecs((by_adamw, *others), ()), holders=())
    assert rest.limits(None).fixed_bytes == (2 * 4 * 36,) * 4, "two moments of every shard"


def test_copies_are_matrices_of_their_own():
    spec = ModelSpecs(
        (ParameterSpec("gate", (4, 4), "float32", Algorithm.MUON, "weight"),),
        (MatrixSpec("gate", 0, 4, 4, "float32"),),
    )
    reports = [
        RankShards.of(r, [held(pair, (), (2 * k, 0), (2, 4))])
        for r, pair, k in ((0, (0, 2), 0), (1, (1, 3), 0), (2, (0, 2), 1), (3, (1, 3), 1))
    ]
    made = assemble(spec, reports)
    assert [m.name for m in made.specs.matrices] == ["gate (copy 1 of 2)", "gate (copy 2 of 2)"]
    assert made.pools == ((0, 2), (1, 3))
    assert [made.counts(0, r) for r in range(4)] == [True, False, True, False]
    plan = solve(
        made.specs, Topology.flat(4), resolve_costs("analytic", "cpu"),
        layout=Layout.SHARDED, limits=made.limits(None),
    )  # fmt: skip
    assert plan.owners[0] in (0, 2) and plan.owners[1] in (1, 3)


def one_parameter(*shards: LocalShard, shape: tuple[int, ...] = (4, 4)) -> ShardMap:
    spec = ModelSpecs(
        (ParameterSpec("w", shape, "float32", Algorithm.MUON, "weight"),),
        (MatrixSpec("w", 0, *shape, "float32"),),
    )
    return assemble(spec, [RankShards.of(r, [s]) for r, s in enumerate(shards)])


def test_contradictions_are_refused():
    both = (0, 1)
    top, bottom = held(both, (), (0, 0), (2, 4)), held(both, (), (2, 0), (2, 4))
    one_parameter(top, bottom)
    with pytest.raises(OwnershipError, match="do not tile"):
        one_parameter(top, top)
    with pytest.raises(OwnershipError, match="do not tile"):
        one_parameter(top, held(both, (), (3, 0), (1, 4)))
    with pytest.raises(OwnershipError, match="do not tile"):
        one_parameter(top, held(both, (), (2, 1), (2, 4)))
    with pytest.raises(OwnershipError, match="not all"):
        one_parameter(top, held((1,), (), (0, 0), (4, 4)))
    with pytest.raises(OwnershipError, match=r"global ranks \[7\]"):
        one_parameter(held((0, 7), (), (0, 0), (2, 4)), bottom)


def test_a_matrix_box_follows_its_form():
    conv = matrix_box(MatrixSpec("c[2:5]", 0, 3, 12, "float32", 24), (8, 4, 3))
    assert conv.box == Box((2, 0, 0), (3, 4, 3))
    assert conv.matrix_shape((3, 2, 3)) == (3, 6)
    flipped = matrix_box(MatrixSpec("t", 0, 4, 24, "float32", 0, True), (8, 4, 3))
    assert flipped.matrix_shape((4, 4, 3)) == (4, 12)
    expert = matrix_box(MatrixSpec("e", 0, 2, 5, "float32", 2 * 3 * 15 + 15 + 5), (4, 3, 3, 5))
    assert expert.box == Box((2, 1, 1, 0), (1, 1, 2, 5))
    assert expert.matrix_shape((1, 1, 2, 3)) == (2, 3)


def test_buckets_share_out_every_owners_time():
    spec = ModelSpecs(
        tuple(
            ParameterSpec(f"p{i}", (8, 8), "float32", Algorithm.MUON, "weight") for i in range(32)
        ),
        tuple(MatrixSpec(f"p{i}", i, 8, 8, "float32") for i in range(32)),
    )
    costs = resolve_costs("analytic", "cpu")
    plan = solve(spec, Topology.flat(2), costs, solver="round_robin", layout=Layout.SHARDED)
    units = units_of(plan, [0] * 32)
    single = [type(u)(u.owner, 0, (i,), 8, 8, 1.0) for u in units for i in u.matrices]
    buckets = cut_buckets(single, range(32), 1 << 30, 4, 2)
    by_owner = [[sum(single[u].owner == o for u in b) for b in buckets] for o in (0, 1)]
    assert by_owner[0] == by_owner[1]
    assert sum(by_owner[0]) == 16
    assert by_owner[0][0] < by_owner[0][1] and by_owner[0][-1] < by_owner[0][1]
    assert len(cut_buckets(single, range(32), 16 * 128 // 8, 1, 2)) == 8
    assert cut_buckets(single, (), 1, 1, 2) == ()
