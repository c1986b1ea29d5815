"""Boxes, copies, domains and routes: pure data, checked for every rank at once."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, chain, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.routes import bucket_route, turns_of, units_for
from dmuon.dtensors import local_box
from dmuon.scheduler.costs import resolve_costs
from dmuon.scheduler.plan import OwnershipPlan, Sizes, Unit, buckets_of, cut_buckets, units_of
from dmuon.scheduler.shards import RankShards, ShardMap, shard_map
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import Box, Form, LocalShard, MatrixSpec, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout, OwnershipError

REPLICATE = -1
Shape = tuple[int, ...]


def held(ranks, replica, offset, shape) -> LocalShard:
    return LocalShard(ranks, replica, Box(offset, shape))


def specs_of(shapes: list[Shape], matrices: list[MatrixSpec]) -> ModelSpecs:
    parameters = (
        ParameterSpec(f"p{i}", shape, "float32", Algorithm.MUON, "weight")
        for i, shape in enumerate(shapes)
    )
    return ModelSpecs(tuple(parameters), tuple(matrices))


def shard_of(
    shape: Shape, mesh: Shape, where: Shape, order: list[int], dims: tuple[int, ...]
) -> LocalShard:
    """What a rank holds: mesh axes cut their dim in ``order``, as torch.chunk does."""
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
    return held(tuple(range(math.prod(mesh))), replica, tuple(offset), tuple(size))


def shard_everywhere(
    specs: ModelSpecs, mesh: Shape, dims: list[tuple[int, ...]], orders: list[list[int]]
) -> ShardMap:
    given = [(p.shape, d, o) for p, d, o in zip(specs.parameters, dims, orders, strict=True)]
    places = enumerate(product(*map(range, mesh)))
    return shard_map(specs, [
        RankShards.of(rank, [shard_of(shape, mesh, where, o, d) for shape, d, o in given])
        for rank, where in places
    ])  # fmt: skip


@st.composite
def shard_maps(draw: st.DrawFn) -> ShardMap:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shapes: list[Shape] = []
    matrices, dims, orders = [], [], []
    for i in range(draw(st.integers(1, 3))):
        rows, cols = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        count = draw(st.sampled_from([1, 2, 4]))
        # A stack, or a fused parameter: pieces of rows.
        split = count == 1 and rows > 1 and draw(st.booleans())
        by_columns = split and cols > 1 and draw(st.booleans())
        start, form = 0, Form.FLAT if count == 1 else Form.STACK
        for size in [1, (cols if by_columns else rows) - 1] if split else [rows] * count:
            shape = (size, rows) if by_columns else (size, cols)
            of = Form.FLAT_IN_OUT if by_columns else form
            matrices.append(MatrixSpec(f"p{i}@{start}", i, *shape, "float32", start, of))
            start += size if by_columns else size * cols
        long = max(rows, cols)
        if count == 1 and not split and long > 1 and draw(st.booleans()):  # interleaved
            step = draw(st.sampled_from([n for n in range(2, long + 1) if long % n == 0]))
            by_rows = rows == long
            shape, steps = (rows // step, cols), (step, 1)
            if not by_rows:
                shape, steps = (rows, cols // step), (1, step)
            matrices[-1:] = [
                MatrixSpec(
                    f"p{i}@{n}", i, *shape, "float32", n * cols if by_rows else n, form, steps
                )
                for n in range(step)
            ]
        shapes.append((rows, cols) if count == 1 else (count, rows, cols))
        choices = [REPLICATE, *range(len(shapes[-1]))]
        dims.append(tuple(draw(st.sampled_from(choices)) for _ in mesh))
        orders.append(draw(st.permutations(range(len(mesh)))))
    return shard_everywhere(specs_of(shapes, matrices), mesh, dims, orders)


def chunks(box: Box, dim: int, count: int) -> list[Box]:
    """What `torch.chunk` makes of a box, with the empty ones that it leaves out."""
    rows = torch.arange(box.offset[dim], box.ends[dim])
    made = []
    for part in [*rows.chunk(count), *[rows[:0]] * count][:count]:
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = int(part[0]) if len(part) else box.ends[dim], len(part)
        made.append(Box(tuple(offset), tuple(shape)))
    return made


@given(st.data())
def test_boxes_with_steps_meet_as_slices_do(data):
    """Of a matrix that takes every step-th row, and of a shard."""
    step, size, low, count = (
        data.draw(st.integers(a, b)) for a, b in ((1, 5), (1, 6), (0, 20), (0, 20))
    )
    phase = data.draw(st.integers(0, step - 1))
    rows = list(range(60))
    comb = Box((phase, 0), (size, 2), (step, 1) if step > 1 else ())
    other = Box((low, 0), (count, 2))
    where, cut = comb.slices()[0], other.slices()[0]
    shared = comb.intersection(other)
    expected = sorted({*rows[where]} & {*rows[cut]})
    assert rows[shared.slices()[0]] == expected and shared.shape == (len(expected), 2)
    assert rows[where][shared.within(comb).slices()[0]] == expected or not expected
    assert rows[cut][shared.within(other).slices()[0]] == expected or not expected
    assert other.intersection(comb).slices() == shared.slices()
    again = Box((phase + 1, 0), (size, 2), comb.steps)
    assert step == 1 or not comb.intersection(again).numel
    assert comb.intersection(comb) == comb or not comb.numel


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mesh_axes_cut_in_any_order(data):
    mesh = tuple(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=4)))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=2)))
    dims = [data.draw(st.sampled_from([REPLICATE, 0, 1])) for _ in mesh]
    order = data.draw(st.permutations(range(len(mesh))))
    where = tuple(data.draw(st.integers(0, size - 1)) for size in mesh)
    cuts: list[tuple[int, int] | None] = []
    for axis, dim in enumerate(dims):
        before = [a for a in order[: order.index(axis)] if a > axis and dims[a] == dim]
        cuts.append(None if dim == REPLICATE else (dim, math.prod(mesh[a] for a in before)))
    box = Box.at_origin(shape)
    for axis in order:
        if dims[axis] != REPLICATE:
            box = chunks(box, dims[axis], mesh[axis])[where[axis]]
    found = local_box("w", shape, mesh, where, cuts)
    assert found.shape == box.shape and (found == box or not box.numel)


def test_shards_that_no_order_gives_are_refused():
    with pytest.raises(OwnershipError, match="'w' .* after it was cut into 3, .* cut it into 2"):
        local_box("w", (12, 4), (2, 2), (0, 0), [(0, 3), (0, 1)])


@st.composite
def copied(draw: st.DrawFn, shards: ShardMap, topology: Topology) -> OwnershipPlan:
    """A plan in which some matrices are computed in each replica, or in a replica of each node."""
    plan = solve(
        shards.specs, Topology.flat(shards.world), resolve_costs("analytic", "cpu"),
        layout=Layout.SHARDED, limits=shards.limits(None), solver="greedy",
    )  # fmt: skip
    batches = []
    for batch in plan.batches:
        for i in batch.matrices:
            level = draw(st.sampled_from(["once", "by replica", "by node"]))
            found: dict[object, int] = {}
            for rank in draw(st.permutations(shards.domains[i])):
                replica = shards.replica_of(i, rank)
                found.setdefault(replica if level == "by replica" else topology.node(rank), rank)
            owners = tuple(found.values())
            alone = len({shards.replica_of(i, r) for r in owners}) < max(2, len(owners))
            if level == "once" or alone:
                batches.append(replace(batch, matrices=(i,)))
            else:
                batches.append(replace(batch, matrices=(i,), owner=owners[0], copies=owners))
    return replace(plan, batches=tuple(batches), topology=topology)


@settings(max_examples=100, deadline=None)
@given(st.data(), shard_maps(), st.integers(1, 4), st.integers(1, 400), st.integers(1, 5))
def test_every_holder_gets_every_update_once(data, shards, least, size, per_node):
    """Whatever has copies, on nodes of any size: each message is read as it was written, in an
    order of collectives that is the same on all ranks."""
    world, numels = shards.world, [box.numel for box in shards.boxes]
    topology = Topology.flat(world, ranks_per_node=min(per_node, world))
    plan = data.draw(copied(shards, topology))
    units = units_of(plan, [0] * len(shards.specs.matrices))
    travel = [u for u, t in enumerate(units) if not shards.is_local(t.matrices[0], t.copies)]
    values = [
        torch.arange(end - n, end).view(box.shape)
        for n, end, box in zip(numels, accumulate(numels), shards.boxes, strict=True)
    ]

    def is_written(message, buffer) -> bool:
        """Whether the right values lie in its parts."""
        found = [(part, torch.stack([values[i][part.box.slices()] for i in part.matrices]))
                 for part in message.parts]  # fmt: skip
        return all(torch.equal(part.within(buffer), right) for part, right in found)

    def write(message, buffer) -> torch.Tensor:
        for part in message.parts:
            part.within(buffer).copy_(
                torch.stack([values[i][part.box.slices()] for i in part.matrices])
            )
        return buffer

    cuts, _ = buckets_of(units, travel, Sizes(size, size, least), 2)
    assert sorted(u for bucket in cuts for u in bucket) == travel
    seen = [units_for(units, shards, topology, rank) for rank in range(world)]
    each = (shards.sharing(i, of, topology) for i, of in enumerate(plan.copies))
    sets = {ranks for some in each for ranks in some}
    for bucket in cuts:
        routes = [bucket_route(shards, topology, seen[r], bucket, r) for r in range(world)]
        landed = []
        for a, route in enumerate(routes):
            for b in range(world):
                assert peer_parts(route.held, b) == peer_parts(routes[b].owned, a) or route.columns
            owned = sum(seen[a][u].numel for u in route.units)
            assert route.owned.numel == owned, "who computes a matrix has all of it"
            arrived = write(route.updates, torch.full((route.updates.numel,), -1))
            if route.columns:
                order = [*chain(*route.columns)]
                arrived.fill_(-1)
                write(route.held, arrived.split(route.updates.splits)[order.index(a)])
                landed.append([(arrived, route.columns, route.updates)])
                continue
            of_rank = []
            for one in route.replications:
                order, buffer = [*chain(*one.columns)], torch.full((one.others.numel,), -1)
                for to, start, numel in one.copies:
                    buffer[start : start + numel] = arrived[to : to + numel]
                if one.is_all:
                    buffer.split(one.others.splits)[order.index(a)].copy_(arrived)
                of_rank.append((buffer, one.columns, one.others))
            landed.append(of_rank)
        for turn in range(2):  # all-gathers, each among ranks that mean the same one
            parts = {
                (ranks, rank): (buffer, sizes)
                for rank, spreads in enumerate(landed)
                for buffer, columns, message in spreads
                for ranks, sizes in [turns_of(columns, message.splits, rank)[turn]]
            }
            for (ranks, _), (buffer, sizes) in parts.items():
                for n, peer in enumerate(ranks):
                    theirs, its_sizes = parts[ranks, peer]
                    assert its_sizes == sizes
                    buffer.narrow(0, *sizes[n]).copy_(theirs.narrow(0, *sizes[n]))
        for rank, (route, spreads) in enumerate(zip(routes, landed, strict=True)):
            came = [] if route.columns else [*route.updates.parts]
            for buffer, columns, message in spreads:
                ranks = tuple(sorted(chain(*columns)))
                assert (ranks in sets or ranks == (rank,)) and (buffer >= 0).all()
                assert is_written(message, buffer)
                came += message.parts
            assert sorted(i for part in came for i in part.matrices) == sorted(
                i for u in bucket for i in units[u].matrices if shards.piece(i, rank).numel
            )


def peer_parts(message, peer: int) -> list[tuple[int, Box]]:
    """What goes to (or comes from) a peer, in order."""
    start = sum(message.splits[:peer])
    end = start + message.splits[peer]
    return [(i, p.box) for p in message.parts if start <= p.start < end for i in p.matrices]


BOTH = (0, 1)
TOP, BOTTOM = held(BOTH, (), (0, 0), (2, 4)), held(BOTH, (), (2, 0), (2, 4))


@pytest.mark.parametrize(("shards", "words"), [
    ([TOP, TOP], "do not tile"),
    ([TOP, held(BOTH, (), (3, 0), (1, 4))], "do not tile"),
    ([TOP, held(BOTH, (), (2, 1), (2, 4))], "do not tile"),
    ([TOP, held((1,), (), (0, 0), (4, 4))], "not all"),
    ([held((0, 7), (), (0, 0), (2, 4)), BOTTOM], r"global ranks \[7\]"),
    ([held((0, 1, 2), (0,), (0, 0), (4, 4)), held((0, 1, 2), (1,), (0, 0), (2, 4)),
      held((0, 1, 2), (1,), (2, 0), (2, 4))], "sharded differently"),
])  # fmt: skip
def test_contradictions_are_refused(shards, words):
    spec = specs_of([(4, 4)], [MatrixSpec("w", 0, 4, 4, "float32")])
    shard_map(spec, [RankShards.of(r, [s]) for r, s in enumerate((TOP, BOTTOM))])
    with pytest.raises(OwnershipError, match=words):
        shard_map(spec, [RankShards.of(r, [s]) for r, s in enumerate(shards)])


def test_no_bucket_is_larger_than_a_batch_may_be():
    """However owners' times are spread, what each has of a bucket is bounded."""
    sizes = [4, 1, 2, 1, 9, 1, 1, 1, 2, 3]
    units = [
        Unit(o, 0, (i,), 8, 8 * n, 0.1 if i else 9.0) for o in (0, 1) for i, n in enumerate(sizes)
    ]
    units += [Unit(2, 0, (i,), 8, 8, 0.01) for i in range(40)]
    bucket = 2 * 64 * 2  # bytes: a batch may have four times 64 elements
    cuts = cut_buckets(units, range(len(units)), bucket, 3, 2)
    assert sorted(u for members in cuts for u in members) == list(range(len(units)))
    for members in cuts:
        for owner in range(3):
            mine = [units[u].numel for u in members if units[u].owner == owner]
            assert len(mine) < 2 or sum(mine) <= 4 * 64


def test_twins_hold_the_same_of_every_parameter():
    """Two parameters over two replicas; a third is cut among these, as a vocabulary may be."""
    shapes, mesh = [(4, 4), (6, 4), (8, 4)], (2, 2)
    dims = [(REPLICATE, 0), (REPLICATE, 1), (0, REPLICATE)]
    for count, twins in ((2, [{0, 2}, {1, 3}, {0, 2}, {1, 3}]), (3, [{0}, {1}, {2}, {3}])):
        specs = specs_of(shapes[:count], [MatrixSpec("p0", 0, 4, 4, "float32")])
        made = shard_everywhere(specs, mesh, dims[:count], [[0, 1]] * count)
        assert [made.twins(rank) for rank in range(4)] == twins
