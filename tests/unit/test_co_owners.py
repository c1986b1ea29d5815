"""Matrices with co-owners: the slices that travel, the iteration on them, and planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmuon.catalogue import model_specs
from dmuon.comm.routes import BucketRoute, Message, bucket_route, places
from dmuon.config import PlannerOptions
from dmuon.kernels.choice import fixed_choice, ops_of, segments_of
from dmuon.kernels.newton_schulz import finished, iterate, newton_schulz, resolve_coefficients
from dmuon.kernels.ops import Exchange, Peers, RoundedOps, SliceOps
from dmuon.kernels.runner import Call, Orthogonalizer, SliceCall
from dmuon.report.data import build_report
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.co_owners import blocks_of, can_be_shared
from dmuon.scheduler.costs import CostTable, Link
from dmuon.scheduler.plan import Batch, OwnershipPlan, Search, cut_buckets, units_of
from dmuon.scheduler.problem import build_problem
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, OwnerLimits, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.tensors import normalize
from dmuon.types import Algorithm, Layout, PlanError
from tests.co_owners import Work, by_co_owners
from tests.unit.models import specs_of
from tests.unit.test_newton_schulz import EASY, HARD, member, relative
from tests.unit.test_shards import planned, shard_maps, travelling

# ---- what travels ------------------------------------------------------------------------


def shared_by_all(plan: OwnershipPlan, shards: ShardMap) -> OwnershipPlan:
    """The plan, with all ranks of its domain as co-owners of each batch that can be shared."""
    batches = []
    for batch in plan.batches:
        first = plan.specs.matrices[batch.matrices[0]]
        ranks = shards.domains[batch.matrices[0]]
        ranks = (batch.owner, *(r for r in ranks if r != batch.owner))[: max(first.shape)]
        fits = all(can_be_shared(plan.specs, plan.specs.matrices[i]) for i in batch.matrices)
        is_shared = fits and len(ranks) > 1
        batches.append(replace(batch, co_owners=ranks) if is_shared else batch)
    return replace(plan, batches=tuple(batches))


def flat(message: Message) -> Tensor:
    return torch.full((message.numel,), -1.0)


def delivered(routes: Sequence[BucketRoute], sent: Sequence[Tensor], out: str, into: str):
    """What comes to each rank of flat buffers laid out as ``out``, laid out as ``into``."""
    arrived = [flat(getattr(route, into)) for route in routes]
    for a, b in product(range(len(routes)), repeat=2):
        there, here = getattr(routes[a], out).splits, getattr(routes[b], into).splits
        assert there[b] == here[a]
        piece = sent[a][sum(there[:b]) :][: there[b]]
        arrived[b][sum(here[:a]) :][: here[a]] = piece
    return arrived


@settings(max_examples=120, deadline=None)
@given(shard_maps(), st.integers(1, 3))
def test_every_co_owner_gets_its_slice_and_every_holder_its_updates(shards, least):
    plan = shared_by_all(planned(shards, solver="greedy"), shards)
    specs = shards.specs
    units = units_of(plan, [0] * len(specs.matrices))
    values = [torch.randn(box.shape) for box in shards.boxes]
    for bucket in cut_buckets(units, travelling(shards, units), 1 << 20, least, 2):
        routes = [
            bucket_route(shards, plan.topology, units, bucket, rank) for rank in range(shards.world)
        ]
        sent = []
        for rank, route in enumerate(routes):
            blocks = flat(route.blocks)
            for part in route.blocks.parts:
                boxes = [shards.piece(i, rank).box for i in part.matrices]
                pairs = zip(part.matrices, boxes, strict=True)
                part.within(blocks).copy_(torch.stack([values[i][b.slices()] for i, b in pairs]))
            pieces = flat(route.held) if route.cuts else blocks
            for cut in route.cuts:
                piece, place = cut.within(pieces, blocks)
                piece.copy_(place)
            sent.append(pieces)
        is_published = bool(routes[0].columns)
        arrived = sent if is_published else delivered(routes, sent, "held", "owned")
        for route, buffer in zip(routes, arrived, strict=True):
            for u in route.units:
                stack = torch.full(units[u].shape, -1.0)
                for part in (p for p in route.owned.parts if p.unit == u):
                    places(stack, part).copy_(part.within(buffer))
                for k, i in enumerate(units[u].matrices):
                    whole = specs.matrices[i].form.rows_first(values[i]).flatten(1)
                    whole = whole.mT if units[u].holds_transpose(k) else whole
                    mine = whole[:, units[u].start :][:, : units[u].cols]
                    assert torch.equal(stack[k], mine)
        if is_published:
            came = [torch.cat(arrived)] * len(routes)
        else:
            came = delivered(routes, arrived, "owned", "held")
        landed = []
        for route, buffer in zip(routes, came, strict=True):
            blocks = flat(route.updates) if route.joins else buffer
            for cut in route.joins:
                piece, place = cut.within(buffer, blocks)
                place.copy_(piece)
            landed.append(blocks)
        for rank, route in enumerate(routes):
            for part in route.updates.parts:
                for i, update in zip(part.matrices, part.within(landed[rank]), strict=True):
                    assert torch.equal(update, values[i][shards.piece(i, rank).box.slices()])


# ---- the iteration -----------------------------------------------------------------------


SHAPES = [(1, 1, 2), (2, 3, 8), (1, 8, 13), (2, 33, 40), (1, 5, 5), (1, 530, 600)]


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize(
    ("shape", "count"), [(s, k) for s in SHAPES for k in (2, 3, 4, 8) if k <= s[2]], ids=str
)
def test_slices_are_orthogonalized_as_the_whole_is(shape, count, split):
    x = 3 * torch.nn.functional.normalize(torch.randn(shape), dim=(1, 2))
    expected = newton_schulz(x, dtype=torch.float32, method="gram")
    found, log, _ = by_co_owners(x, count, torch.float32, split)
    assert (found - expected).norm() <= 5e-5 * expected.norm()
    assert all(one == log[0] for one in log), "all take the same exchanges, in one order"
    sums = 2 if count == 2 else 4
    assert len(log[0]) == sums + (11 if split else 0)


class Mirrored(RoundedOps):
    def symmetric(self, *operands: Tensor | None, out: Tensor, **factors: float) -> Exchange:
        self.general(*operands, out=out, **factors)
        out.copy_(out.tril() + out.tril(-1).mT)
        return ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("count", [2, 8])
def test_in_half_precision_slices_are_as_exact_as_the_whole(dtype, split, count):
    """On a zoo of spectra, against the standard form in float64. What one owner has more exactly
    than Gaussian matrices need not be so with co-owners."""
    errors: dict[str, tuple[float, float]] = {}
    for name in (*EASY, *HARD):
        x = 3 * torch.nn.functional.normalize(member(name, (96, 160)), dim=(0, 1)).float()[None]
        exact = newton_schulz(x, dtype=torch.float64, method="standard")
        choice = fixed_choice(96, 160, dtype, x.device, 5, "gram", "torch_rounded")
        squares = [torch.empty(1, 96, 96) for _ in range(4)]
        # Of symmetric products only a triangle is split, as symmetric kernels compute it.
        ops = Mirrored(dtype) if split else ops_of(choice, x.device, 96)
        held = normalize(x, dtype).float()
        triples = resolve_coefficients("polar_express", 5)
        steps = iterate(held, held.clone(), squares, triples, segments_of(choice, 5), ops)
        one = finished(steps).double()
        shared, _, _ = by_co_owners(x, count, dtype, split, "torch_rounded")
        errors[name] = relative(shared, exact), relative(one, exact)
    least = errors["Gaussian"][1]
    assert all(by_all <= 1.5 * max(by_one, least) for by_all, by_one in errors.values()), errors


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("count", [2, 4])
def test_co_owners_hold_the_same_bits_of_what_they_share(monkeypatch, count, split):
    seen: dict[int, list[Tensor]] = {}

    def kept(honest):
        def steps(self, *args, **how):
            yield from honest(self, *args, **how)
            out = how.get("out", args[0])
            seen.setdefault(self._peers.index, []).append(out.clone())

        return steps

    monkeypatch.setattr(SliceOps, "gram", kept(SliceOps.gram))
    monkeypatch.setattr(SliceOps, "_gathered", kept(SliceOps._gathered))
    by_co_owners(torch.randn(2, 40, 70), count, torch.float32, split)
    assert len(seen) == count and len(seen[0]) >= 2
    for others in zip(*seen.values(), strict=True):
        assert all(torch.equal(others[0], other) for other in others)


def test_the_norm_of_the_whole_normalizes_a_slice():
    x = torch.zeros(1, 4, 8)
    x[0, :, 5] = 3.0  # one co-owner has all of it
    found, _, _ = by_co_owners(x, 2, torch.float32, False)
    torch.testing.assert_close(found, newton_schulz(x, dtype=torch.float32, method="gram"))


def test_slices_are_prepared_once_and_keep_no_more_than_the_workspace(monkeypatch):
    runner = Orthogonalizer(torch.device("cpu"), torch.float32)
    alone = Peers(0, 2, lambda to, source, tag: Work(lambda: to.copy_(source)))

    def calls(steps: int) -> list[tuple[SliceCall, Tensor]]:
        triples = resolve_coefficients("polar_express", steps)
        return [(SliceCall(Call((1, 4, 6), triples), alone), x) for x in operands]

    operands = [torch.randn(1, 4, 6) for _ in range(300)]
    ones = [torch.ones(1)] * len(operands)
    few, many = calls(1), calls(5)
    runner.reserve([], [], [few[:150], few[150:]])
    kept = set(runner._slices)
    assert len(kept) == len(operands)
    for n in range(0, 300, 150):  # five steps need more squares than one
        runner.run_together(many[n : n + 150], ones[n : n + 150])
    assert set(runner._slices) == kept
    monkeypatch.setattr(runner, "_prepare_slices", None)
    for n in range(0, 300, 150):
        runner.run_together(few[n : n + 150], ones[n : n + 150])


# ---- planning ----------------------------------------------------------------------------

H200 = CostTable.analytic("h200", momentum=False)


def shared_plan(
    specs: ModelSpecs,
    world: int,
    co_owners: str | int = "auto",
    costs: CostTable = H200,
    ranks_per_node: int = 8,
    **how,
) -> OwnershipPlan:
    topology = Topology.flat(world, ranks_per_node=min(ranks_per_node, world))
    options = PlannerOptions(co_owners=co_owners)
    return solve(specs, topology, costs, layout=Layout.SHARDED, options=options, **how)


def sizes(plan: OwnershipPlan) -> set[int]:
    return {len(batch.ranks) for batch in plan.batches}


def test_blocks_are_neighbours_on_one_node():
    on_nodes = Topology.flat(12, ranks_per_node=6)
    assert blocks_of(range(12), on_nodes, 4) == [(0, 1, 2, 3), (6, 7, 8, 9)]
    assert blocks_of((0, 2, 4, 6, 8), on_nodes, 2) == [(0, 2), (6, 8)]
    assert blocks_of(range(4), Topology.flat(4, ranks_per_node=1), 2) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("world, most", [(256, 0.72), (1024, 0.52)])
def test_a_large_world_gains_what_one_owner_cannot(world, most):
    plan = shared_plan(model_specs("llama3-8b"), world)
    assert plan.alone_ms is not None and plan.makespan_ms <= most * plan.alone_ms
    certificate = certify(OwnershipPlan.from_json(plan.to_json()))
    assert certificate.ok and certificate.proven, str(certificate)
    assert plan.status == "optimal" and plan.lower_bound_ms == pytest.approx(plan.makespan_ms)
    for batch in plan.batches:
        nodes = {rank // 8 for rank in batch.ranks}
        assert len(nodes) == 1 and batch.owner % len(batch.ranks) == 0


def test_auto_shares_only_where_that_pays():
    specs = model_specs("llama3-8b")
    for world in (8, 64, 128):
        plan = shared_plan(specs, world)
        assert sizes(plan) == {1} and plan.alone_ms is None
        assert plan.shared_ms is None or 0.95 * plan.makespan_ms <= plan.shared_ms
        alone = shared_plan(specs, world, "off")
        assert plan.makespan_ms == alone.makespan_ms and plan.batches == alone.batches
    assert sizes(shared_plan(specs, 256, "off")) == {1}
    # Latency eats up what slices of small matrices gain.
    assert sizes(shared_plan(model_specs("gpt2"), 256)) == {1}


def test_what_auto_leaves_out_is_told_and_bounded():
    plan = shared_plan(model_specs("vla"), 512, ranks_per_node=1)
    found = certify(OwnershipPlan.from_json(plan.to_json()))
    assert sizes(plan) == {1} and found.ok and found.proven
    assert plan.shared_ms is not None and found.shared_bound_ms is not None
    assert 0.95 * plan.makespan_ms <= plan.shared_ms < plan.makespan_ms
    assert found.shared_bound_ms <= plan.shared_ms
    assert "none: sharing matrices would take 0.844 ms" in " ".join(str(build_report(plan)).split())


def test_without_co_owners_the_report_says_what_auto_would_gain_where_that_is_material(plan):
    off = shared_plan(model_specs("llama3-8b"), 256, PlannerOptions().co_owners)
    assert sizes(off) == {1} and off.makespan_ms == plan.alone_ms
    assert off.shared_ms == pytest.approx(plan.makespan_ms, rel=0.02)
    text = " ".join(str(build_report(off)).split())
    assert f"would take {off.shared_ms:.3f} ms by the costs' model (-29" in text
    assert certify(OwnershipPlan.from_json(off.to_json())).proven
    for specs, world in ((model_specs("llama3-8b"), 8), (model_specs("gpt2"), 256)):
        told = shared_plan(specs, world, "off")
        assert told.shared_ms is None and told.shared_prices == ()
        assert "co-owners" not in str(build_report(told))


def brute_force(plan: OwnershipPlan) -> float:
    """The least makespan of all assignments of matrices to blocks of any size."""
    limits, world = plan.limits, plan.topology.world
    prices = {row.key: row.ms for row in plan.prices}
    problem = build_problem(plan.specs.matrices, world, limits, prices, plan.layout)
    ways = []
    for shape in problem.shapes:
        ranks = range(world) if shape.domain < 0 else limits.domains[shape.domain]
        options = [((rank,), shape.batch_ticks) for rank in ranks]
        for row in (r for r in plan.shared_prices if r.key == shape.key):
            blocks = blocks_of(ranks, plan.topology, row.co_owners)
            options += [(block, tuple(map(problem.ticks, row.ms))) for block in blocks]
        ways.append(list(combinations_with_replacement(options, shape.count)))
    best = float("inf")
    for choice in product(*ways):
        loads = problem.fixed.tolist()
        for shape, options in zip(problem.shapes, choice, strict=True):
            for block, prices in set(options):
                count = options.count((block, prices))
                ticks = replace(shape, batch_ticks=prices[: shape.count]).ticks[count]
                for rank in block:
                    loads[rank] += int(ticks)
        best = min(best, max(loads))
    return problem.ms(best)


@st.composite
def small_problems(draw):
    """(shapes, latency, limits of owners, ranks a node)"""
    world = draw(st.sampled_from([2, 3, 4, 6, 8]))
    some = [(2048, 2048), (2048, 8192), (1024, 4096)]
    shapes = draw(st.lists(st.sampled_from(some), min_size=1, max_size=3))
    # Loads of some, as of experts that they have to own, larger at times than all the rest.
    fixed = draw(st.lists(st.sampled_from([0.0, 0.3, 5.0]), min_size=world, max_size=world))
    half = world // 2
    every = {(*range(world),), (*range(half),), (*range(half, world),), (world - 1,)}
    domains = tuple(sorted(every))
    of = st.lists(st.integers(0, len(domains) - 1), min_size=len(shapes), max_size=len(shapes))
    limits = OwnerLimits(tuple(fixed))
    if draw(st.booleans()):
        limits = replace(limits, domains=domains, domain_of=tuple(draw(of)))
    return shapes, world, draw(st.floats(1e-6, 2e-4)), limits, draw(st.sampled_from([1, 2, 3, 8]))


@settings(max_examples=60, deadline=None)
@given(small_problems())
def test_no_way_to_share_beats_the_bound(problem):
    shapes, world, latency, limits, ranks_per_node = problem
    links = {k: Link(latency, 3e11) for k in (2, 4, 8)}
    costs = replace(H200, source="given", links=links)
    specs = specs_of([(*shape, "float32") for shape in shapes])
    sizes = [2, "auto"] if world >= 2 else ["auto"]
    for size in sizes:
        plan = shared_plan(specs, world, size, costs, ranks_per_node, limits=limits)
        found = certify(plan)
        assert found.ok, str(found)
        if plan.shared_prices:
            best = brute_force(plan)
            bound = plan.lower_bound_ms if plan.has_co_owners else found.shared_bound_ms
            assert bound is not None and bound <= best + 1e-9
            assert plan.has_co_owners or plan.shared_ms >= best - 1e-9


def test_a_rank_that_is_busy_anyway_ends_the_search():
    limits = OwnerLimits(fixed_ms=(300.0, 0.0))
    plan = shared_plan(specs_of([(2048, 8192, "float32")]), 2, limits=limits)
    assert plan.makespan_ms == 300.0 and sizes(plan) == {1}


def test_slices_run_with_the_kernel_of_the_whole_where_that_is_of_the_gram_form():
    keys = {
        (2048, 8192, "float32"): "gram[2]/torch/float16",
        (2048, 2048, "float32"): "standard/torch/float16",
    }
    entries = {key: {1: H200.batch_ms(key, 1)} for key in keys}
    kernels = {key: {1: kernel} for key, kernel in keys.items()}
    costs = CostTable("given", entries, H200.device, kernels=kernels, momentum=False)
    plan = shared_plan(specs_of(list(keys)), 8, 2, costs)
    assert plan.has_co_owners and certify(plan).ok
    ran = {plan.specs.matrices[b.matrices[0]].key: b.kernel for b in plan.batches}
    assert ran == {key: kernel if "gram" in kernel else "" for key, kernel in keys.items()}


@pytest.fixture(scope="module")
def plan() -> OwnershipPlan:
    return shared_plan(model_specs("llama3-8b"), 256)


def with_batches(plan: OwnershipPlan, **changes) -> OwnershipPlan:
    batches = [replace(b, **changes) if b.co_owners else b for b in plan.batches]
    return replace(plan, batches=tuple(batches))


def test_the_certificate_finds_lies_about_co_owners(plan):
    assert certify(plan).ok
    cheaper = [replace(r, ms=tuple(0.5 * ms for ms in r.ms)) for r in plan.shared_prices]
    lies = {
        "more than its prices prove": replace(plan, lower_bound_ms=1.01 * plan.lower_bound_ms),
        "a batch that costs less": with_batches(plan, ms=1.0),
        "unsplit at the price of split": with_batches(plan, split=False),
        "another kernel": with_batches(plan, kernel="gram[2]/torch/float16"),
        "cheap prices": replace(plan, shared_prices=tuple(cheaper)),
        "no prices": replace(plan, shared_prices=()),
        "cheaper without": replace(plan, alone_ms=2 * (plan.alone_ms or 0)),
        "a price left out": replace(plan, shared_prices=plan.shared_prices[1:]),
        "not neighbours": with_batches(plan, owner=1, co_owners=(1, 2)),
        "someone else": with_batches(plan, owner=200, co_owners=(200, 201)),
    }
    for lie, told in lies.items():
        assert not certify(told).ok, lie
    by_two = shared_plan(model_specs("llama3-8b"), 1024, 2)
    assert certify(by_two).ok and by_two.status == "feasible"
    assert by_two.lower_bound_ms <= shared_plan(model_specs("llama3-8b"), 1024).makespan_ms
    open_gap = shared_plan(model_specs("vla"), 256)
    assert open_gap.has_co_owners and certify(open_gap).ok
    assert not certify(replace(open_gap, status="optimal")).ok


@pytest.mark.parametrize(
    "batch, message",
    [
        (Batch(0, (0,), 1.0, co_owners=(0,)), "two ranks or more"),
        (Batch(0, (0,), 1.0, co_owners=(1, 0)), "the owner first"),
        (Batch(0, (0,), 1.0, co_owners=(0, 0)), "the owner first"),
        (Batch(0, (0,), 1.0, co_owners=(0, 9)), "owner 9 is not a rank"),
        (Batch(0, (0,), 1.0, co_owners=(0, 1, 2, 3)), "more than its longer side 3"),
        (Batch(0, (0,), 1.0, "standard/torch/float32", (0, 1)), "run the Gram form"),
        (Batch(0, (0,), 1.0, split=True), "is split, but has no co-owners"),
    ],
)
def test_impossible_co_owners_are_refused(batch, message):
    whole = shared_plan(specs_of([(2, 3, "float32")]), 4, "off")
    with pytest.raises(PlanError, match=message):
        replace(whole, batches=(batch,))


def test_a_number_of_co_owners_that_cannot_be_is_an_error():
    with pytest.raises(PlanError, match="co_owners=8 is more than matrix 'm0.weight' of 2 x 3"):
        shared_plan(specs_of([(2, 3, "float32")]), 8, 8)
    with pytest.raises(PlanError, match="co_owners=4, but there are only 2 ranks"):
        shared_plan(specs_of([(8, 8, "float32")]), 2, 4)
    for layout in (Layout.REDUCED, Layout.DEDICATED):
        options = PlannerOptions(co_owners=2)
        with pytest.raises(PlanError, match=f"in the {layout.value!r} layout each matrix"):
            solve(
                specs_of([(8, 8, "float32")]), Topology.flat(2), H200, layout=layout,
                options=options,
            )  # fmt: skip
    for wrong in (0, 1, 3, 16, "some"):
        with pytest.raises(ValueError, match="'auto', 'off', 2, 4 or 8"):
            PlannerOptions(co_owners=wrong)


def test_columns_of_several_dims_are_left_to_one_owner():
    shape = (8, 6, 3, 3)
    specs = ModelSpecs(
        (
            ParameterSpec("conv", shape, "float32", Algorithm.MUON, ""),
            ParameterSpec("tall", (64, 2, 3, 3), "float32", Algorithm.MUON, ""),
        ),
        (
            MatrixSpec("conv", 0, 8, 54, "float32"),
            MatrixSpec("tall", 1, 64, 18, "float32"),
        ),
    )
    assert [can_be_shared(specs, m) for m in specs.matrices] == [False, True]
    plan = shared_plan(specs, 4, 2)
    assert {b.matrices[0]: len(b.ranks) for b in plan.batches} == {0: 1, 1: 2}


def test_equal_input_gives_an_equal_plan(plan):
    again = shared_plan(model_specs("llama3-8b"), 256)
    assert replace(again, search=Search()) == replace(plan, search=Search())
