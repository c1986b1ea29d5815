"""What travels together: buckets of gradients, units of work, buckets of updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.buckets import (
    EVERYONE,
    Slices,
    gradient_bucket,
)
from dmuon.scheduler.plan import Batch, OwnershipPlan, units_of
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import OwnershipError, runs_of
from tests.unit.models import plan_of, tree

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
    plan = plan_of(specs, [0] * len(specs.matrices), world)
    return replace(plan, batches=tuple(draw(st.permutations(batches))))


def one_bucket(plan, members, dtype=None):
    others = {p: plan.specs.parameters[p].numel for p in plan.specs.adamw_parameters()}
    return gradient_bucket(Slices.flat(plan), members, others, 0, dtype)


def gradient_buckets(plan, size, dtype=None):
    specs = plan.specs.parameters

    def nbytes(p):
        return specs[p].numel * (dtype.itemsize if dtype else ITEM_SIZE[specs[p].dtype])

    order = reversed(range(len(specs)))
    cut = list(runs_of(order, nbytes, size))
    # Closed as soon as they are large enough.
    assert all(sum(map(nbytes, members[:-1])) < size for members in cut)
    assert all(sum(map(nbytes, members)) >= size for members in cut[:-1])
    return [one_bucket(plan, members, dtype) for members in cut]


@settings(max_examples=100)
@given(plans(), st.integers(1, 400), st.sampled_from([None, torch.float32]))
def test_each_element_travels_once_and_matrices_to_their_owners(plan, size, dtype):
    specs = plan.specs.parameters
    buckets = gradient_buckets(plan, size, dtype)
    order = [p for bucket in buckets for p in bucket.parameters]
    assert order == list(reversed(range(len(specs)))), "reverse order of registration"
    matrices: Counter[int] = Counter()
    for bucket in buckets:
        seen: Counter[tuple[int, int]] = Counter()
        targets = [(segment.shard, segment.dtype) for segment in bucket.segments]
        assert len(set(targets)) == len(targets), "two collectives where one would do"
        for segment in bucket.segments:
            assert segment.numel == sum(span.numel for span in segment.spans)
            dtypes = {specs[span.parameter].dtype for span in segment.spans}
            assert ({"float32"} if dtype else dtypes) == {segment.dtype}
            for span in segment.spans:
                seen.update((span.parameter, span.start + e) for e in range(span.numel))
                matrices.update(span.matrices)
                if segment.shard == EVERYONE:
                    assert span.matrices == ()
                    assert span.parameter in plan.specs.adamw_parameters()
                    continue
                start = span.start
                for i in span.matrices:
                    matrix = plan.specs.matrices[i]
                    assert plan.owners[i] == segment.shard
                    assert (matrix.parameter, matrix.start) == (span.parameter, start)
                    start += matrix.numel
                assert start == span.start + span.numel
        assert seen == Counter((p, e) for p in bucket.parameters for e in range(specs[p].numel))
    assert matrices == Counter(range(len(plan.specs.matrices)))


@settings(max_examples=30)
@given(plans(), st.integers(1, 400))
def test_routes_are_a_function_of_the_plan_alone(plan, size):
    # So ranks that hold the same plan issue the same collectives in the same order.
    again = OwnershipPlan.from_json(plan.to_json())
    assert gradient_buckets(plan, size) == gradient_buckets(again, size)
    groups = [m.parameter % 2 for m in plan.specs.matrices]
    units = units_of(plan, groups)
    assert units == units_of(again, groups)


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
        shapes = [plan.specs.matrices[i].shape for i in unit.matrices]
        turned = [unit.holds_transpose(k) for k in range(len(shapes))]
        assert {s[::-1] if t else s for s, t in zip(shapes, turned)} == {(unit.rows, unit.cols)}
        assert not any(turned) or unit.rows < unit.cols
        assert unit.numel == sum(plan.specs.matrices[i].numel for i in unit.matrices)
        (batch,) = {batch_of[i] for i in unit.matrices}
        shares[batch] += unit.ms
    assert [shares[b] for b in range(len(plan.batches))] == pytest.approx(
        [batch.ms for batch in plan.batches]
    )
    assert len(units) == len({(batch_of[u.matrices[0]], u.group) for u in units})
    order = [batch_of[u.matrices[0]] for u in units]
    assert order == sorted(order), "batches are executed in the order of the plan"
