"""What travels together: windows of gradients, units of work, buckets of updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.routes import (
    EVERYONE,
    Unit,
    aligned,
    make_window,
    matrices_by_parameter,
    publish_buckets,
    reduction_windows,
    units_of,
)
from dmuon.scheduler.plan import Batch, OwnershipPlan
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ModelSpecs
from tests.unit.models import Mixed, plan_of, specs_of, tree

ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@st.composite
def model_specs(draw) -> ModelSpecs:
    """Plain matrices, stacks, splits of both, and vectors, in any order and of two dtypes."""
    shapes: dict[str, tuple[int, ...]] = {}
    splits: dict[str, tuple[int, ...]] = {}
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["matrix", "stack", "split", "split stack", "vector"]))
        sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
        name, cols = f"p{i}.weight", draw(st.integers(2, 5))
        if kind == "vector":
            shapes[name] = (sum(sizes),)
        elif "stack" in kind:
            shapes[name] = (draw(st.integers(2, 4)), sum(sizes), cols)
        else:
            shapes[name] = (sum(sizes), cols)
        if "split" in kind:
            splits[name] = tuple(sizes)
    shapes["last.weight"] = (3, 4)
    model = tree(shapes)
    for p in model.parameters():
        if draw(st.booleans()):
            p.data = p.data.bfloat16()
    return collect(model, splits=splits)


@st.composite
def plans(draw) -> OwnershipPlan:
    """Any owners, any batches of equal shapes, any predicted times."""
    specs = draw(model_specs())
    world = draw(st.integers(1, 4))
    pools: dict[tuple, list[int]] = defaultdict(list)
    for i, matrix in enumerate(specs.matrices):
        pools[draw(st.integers(0, world - 1)), matrix.key].append(i)
    batches = []
    for (owner, _), members in pools.items():
        while members:
            size = draw(st.integers(1, len(members)))
            batches.append(Batch(owner, tuple(members[:size]), draw(st.floats(0, 5, width=16))))
            members = members[size:]
    base = plan_of(specs, [0] * len(specs.matrices), world)
    return OwnershipPlan(
        specs, base.topology, tuple(draw(st.permutations(batches))), base.layout,
        "made up", "feasible", "made up", 1.0,
    )  # fmt: skip


# ---- windows -----------------------------------------------------------------------------


reduce_dtypes = st.sampled_from([None, "float32"])


@settings(max_examples=80)
@given(plans(), st.integers(1, 400), reduce_dtypes)
def test_windows_cover_every_element_once_in_reverse_registration_order(plan, size, dtype):
    windows = reduction_windows(plan, size, dtype)
    order = [p for window in windows for p in window.parameters]
    assert order == list(reversed(range(len(plan.specs.parameters))))
    for window in windows:
        seen: Counter[tuple[int, int]] = Counter()
        for pack in window.packs:
            for span in pack.spans:
                seen.update((span.parameter, span.start + e) for e in range(span.numel))
        assert seen == Counter(
            (p, e) for p in window.parameters for e in range(plan.specs.parameters[p].numel)
        )


@settings(max_examples=80)
@given(plans(), st.integers(1, 400), reduce_dtypes)
def test_every_matrix_travels_to_its_owner_and_the_rest_to_everyone(plan, size, dtype):
    matrices: Counter[int] = Counter()
    for window in reduction_windows(plan, size, dtype):
        for pack in window.packs:
            assert pack.numel == sum(span.numel for span in pack.spans)
            for span in pack.spans:
                matrices.update(span.matrices)
                if pack.owner == EVERYONE:
                    assert span.matrices == ()
                    assert span.parameter in plan.specs.rest()
                    continue
                start = span.start
                for i in span.matrices:
                    matrix = plan.specs.matrices[i]
                    assert plan.owners[i] == pack.owner
                    assert (matrix.parameter, matrix.start) == (span.parameter, start)
                    start += matrix.numel
                assert start == span.start + span.numel
    assert matrices == Counter(range(len(plan.specs.matrices)))


@settings(max_examples=60)
@given(plans(), st.integers(1, 400), reduce_dtypes)
def test_a_pack_has_one_dtype(plan, size, dtype):
    for window in reduction_windows(plan, size, dtype):
        targets = [(pack.owner, pack.dtype) for pack in window.packs]
        assert len(set(targets)) == len(targets), "two collectives where one would do"
        for pack in window.packs:
            dtypes = {plan.specs.parameters[span.parameter].dtype for span in pack.spans}
            assert ({dtype} if dtype else dtypes) == {pack.dtype}


@settings(max_examples=60)
@given(plans(), st.integers(1, 400), reduce_dtypes)
def test_routes_are_a_function_of_the_plan_alone(plan, size, dtype):
    # So ranks that hold the same plan issue the same collectives in the same order.
    again = OwnershipPlan.from_json(plan.to_json())
    assert reduction_windows(plan, size, dtype) == reduction_windows(again, size, dtype)
    groups = [m.parameter % 2 for m in plan.specs.matrices]
    assert units_of(plan, groups) == units_of(again, groups)
    buckets = publish_buckets(units_of(plan, groups), size, 2)
    assert buckets == publish_buckets(units_of(again, groups), size, 2)


@settings(max_examples=60)
@given(plans(), st.integers(1, 400), reduce_dtypes)
def test_a_window_closes_as_soon_as_it_is_large_enough(plan, size, dtype):
    def nbytes(parameters) -> int:
        specs = [plan.specs.parameters[p] for p in parameters]
        return sum(s.numel * ITEM_SIZE[dtype or s.dtype] for s in specs)

    *full, last = reduction_windows(plan, size, dtype)
    for window in full:
        assert nbytes(window.parameters) >= size
    for window in (*full, last):
        assert nbytes(window.parameters[:-1]) < size


def test_neighbouring_matrices_of_one_owner_are_one_span():
    specs = collect(tree({"w1": (5, 2, 3)}))
    plan = plan_of(specs, [0, 0, 1, 0, 0], 2)
    (window,) = reduction_windows(plan, 1)
    spans = {
        pack.owner: [(s.start, s.numel, s.matrices) for s in pack.spans] for pack in window.packs
    }
    assert spans == {
        0: [(0, 12, (0, 1)), (18, 12, (3, 4))],
        1: [(12, 6, (2,))],
    }


def test_owners_come_by_rank_and_everyone_last():
    plan = plan_of(specs_of([(2, 3, "float32")] * 3, rest=2), [2, 0, 1], 3)
    (window,) = reduction_windows(plan, 1 << 20)
    assert [pack.owner for pack in window.packs] == [0, 1, 2, EVERYONE]


def test_a_window_of_given_parameters_keeps_their_order():
    plan = plan_of(specs_of([(2, 3, "float32")] * 3), [0, 0, 0], 1)
    window = make_window(plan, [2, 0], matrices_by_parameter(plan), None)
    assert window.parameters == (2, 0)
    assert [span.parameter for span in window.packs[0].spans] == [2, 0]


def test_a_transposed_convolution_is_one_span():
    model = Mixed()
    specs = collect(model, splits=Mixed.splits, heads=Mixed.heads)
    plan = plan_of(specs, [i % 3 for i in range(len(specs.matrices))], 3)
    index = next(i for i, p in enumerate(specs.parameters) if p.transposed)
    spans = [
        span
        for window in reduction_windows(plan, 1)
        for pack in window.packs
        for span in pack.spans
        if span.parameter == index
    ]
    assert [(s.start, s.numel) for s in spans] == [(0, model.deconv.weight.numel())]


# ---- units -------------------------------------------------------------------------------


@settings(max_examples=80)
@given(plans(), st.data())
def test_units_are_the_batches_cut_by_group(plan, data):
    groups = data.draw(
        st.lists(
            st.integers(0, 2),
            min_size=len(plan.specs.matrices),
            max_size=len(plan.specs.matrices),
        )
    )
    units = units_of(plan, groups)
    assert sorted(i for u in units for i in u.matrices) == list(range(len(plan.specs.matrices)))
    batch_of = {i: b for b, batch in enumerate(plan.batches) for i in batch.matrices}
    shares: dict[int, float] = defaultdict(float)
    for unit in units:
        assert {groups[i] for i in unit.matrices} == {unit.group}
        assert {plan.owners[i] for i in unit.matrices} == {unit.owner}
        assert {plan.specs.matrices[i].shape for i in unit.matrices} == {(unit.rows, unit.cols)}
        assert unit.numel == sum(plan.specs.matrices[i].numel for i in unit.matrices)
        (batch,) = {batch_of[i] for i in unit.matrices}
        shares[batch] += unit.ms
    assert [shares[b] for b in range(len(plan.batches))] == pytest.approx(
        [batch.ms for batch in plan.batches]
    )
    assert len(units) == len({(batch_of[u.matrices[0]], u.group) for u in units})
    order = [min(plan.batches[batch_of[u.matrices[0]]].matrices) for u in units]
    assert order == sorted(order), "batches are executed in order of their first matrix"


def test_one_group_leaves_the_batches_whole():
    specs = specs_of([(2, 3, "float32")] * 4)
    plan = plan_of(specs, [0] * 4, 1)
    batches = (Batch(0, (0, 2), 3.0), Batch(0, (1, 3), 5.0))
    plan = OwnershipPlan(specs, plan.topology, batches, plan.layout, "", "", "", 1.0)
    whole = [(u.matrices, u.ms) for u in units_of(plan, [0] * 4)]
    assert whole == [((0, 2), 3.0), ((1, 3), 5.0)]
    cut = [(u.matrices, u.group, u.ms) for u in units_of(plan, [0, 0, 1, 0])]
    assert cut == [((0,), 0, 1.5), ((2,), 1, 1.5), ((1, 3), 0, 5.0)]


# ---- publish buckets ---------------------------------------------------------------------


units_lists = st.lists(
    st.builds(
        Unit,
        owner=st.integers(0, 3),
        group=st.just(0),
        matrices=st.integers(1, 3).map(lambda n: tuple(range(n))),
        rows=st.integers(1, 6),
        cols=st.integers(1, 6),
        ms=st.floats(0, 4, width=16),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120)
@given(units_lists, st.integers(1, 300), st.sampled_from([2, 4]))
def test_buckets_hold_each_unit_once_in_its_owners_order(units, size, item):
    buckets = publish_buckets(units, size, item)
    executed: dict[int, list[int]] = defaultdict(list)
    for bucket in buckets:
        assert {units[u].owner for u in bucket.units} == {bucket.owner}
        executed[bucket.owner] += bucket.units
    for owner, order in executed.items():
        assert order == [u for u, unit in enumerate(units) if unit.owner == owner]
    assert sorted(u for b in buckets for u in b.units) == list(range(len(units)))


@settings(max_examples=120)
@given(units_lists, st.integers(1, 300), st.sampled_from([2, 4]))
def test_buckets_respect_their_size_and_waste_none(units, size, item):
    def nbytes(members) -> int:
        return sum(units[u].numel * item for u in members)

    by_owner: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for bucket in publish_buckets(units, size, item):
        assert nbytes(bucket.units) <= size or len(bucket.units) == 1
        by_owner[bucket.owner].append(bucket.units)
    for buckets in by_owner.values():
        for current, following in pairwise(buckets):
            assert nbytes(current + following[:1]) > size


@settings(max_examples=120)
@given(units_lists, st.integers(1, 300), st.sampled_from([2, 4]))
def test_buckets_leave_in_the_order_of_predicted_completion(units, size, item):
    clock: dict[int, float] = defaultdict(float)
    finished = []
    for bucket in publish_buckets(units, size, item):
        clock[bucket.owner] += sum(units[u].ms for u in bucket.units)
        finished.append(clock[bucket.owner])
    assert finished == pytest.approx(sorted(finished))


@given(st.integers(0, 10_000))
def test_aligned_is_the_next_multiple_of_64(nbytes):
    assert aligned(nbytes) % 64 == 0
    assert 0 <= aligned(nbytes) - nbytes < 64
