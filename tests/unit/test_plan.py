"""Costs, owner assignment, and the plan as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dmuon
from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable
from dmuon.scheduler.plan import Batch, OwnershipPlan, Search, fitted_plan
from dmuon.scheduler.problem import Shape
from dmuon.scheduler.select import collect
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import Form, ModelSpecs, OwnerLimits, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout, PlanError
from tests.unit.models import (
    Mixed,
    TinyGPT,
    partitions,
    plan_of,
    plan_of_mixed,
    sealed,
    specs_of,
    tree,
)

A, B = (8, 8, "float32"), (4, 6, "float32")


@pytest.mark.parametrize("device", sorted(ANALYTIC_DEVICES))
@given(
    rows=st.integers(1, 8192),
    cols=st.integers(1, 8192),
    batch=st.integers(1, 16),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=30)
def test_analytic_costs_are_positive_monotone_and_symmetric(device, rows, cols, batch, dtype):
    table = CostTable.analytic(device)
    ms = table.batch_ms((rows, cols, dtype), batch)
    assert 0 < ms < float("inf")
    assert table.batch_ms((cols, rows, dtype), batch) == ms
    assert table.batch_ms((rows + 1, cols, dtype), batch) > ms
    assert table.batch_ms((rows, cols, dtype), batch + 1) > ms
    assert CostTable.analytic(device, ns_steps=6).batch_ms((rows, cols, dtype), batch) > ms
    one_by_one = batch * table.batch_ms((rows, cols, dtype), 1)
    assert ms <= one_by_one * (1 + 1e-12)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 99), min_size=8, max_size=8), st.integers(0, 8), st.integers(1, 8))
def test_cheapest_batches_are_the_cheapest_of_all_partitions(prices, count, max_batch):
    shape = Shape(A, -1, count, 4, tuple(prices[:max_batch]))
    sizes = shape.batches(count)
    assert sum(sizes) == count and list(sizes) == sorted(sizes, reverse=True)
    ways = [sum(prices[b - 1] for b in parts) for parts in partitions(count, max_batch)]
    assert shape.ticks[count] == min(ways) == sum(prices[size - 1] for size in sizes)
    # What proofs rest on: one owner's batches cost no more than those of several.
    assert all(shape.ticks[a] + shape.ticks[count - a] >= shape.ticks[count] for a in range(count))


def test_every_process_makes_the_same_plan_whatever_its_hash_seed():
    code = "from tests.unit.models import plan_of_mixed; print(plan_of_mixed().fingerprint())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == plan_of_mixed().fingerprint()


@pytest.mark.timeout(60)
def test_thousands_of_owners_plan_without_delay():
    shapes = [(4096, 4096, "bfloat16"), (14336, 4096, "bfloat16"), (1024, 4096, "bfloat16")]
    keys = [shapes[i % 3] for i in range(2000)]
    plan = solve(specs_of(keys), Topology.flat(4096), CostTable.analytic("h100"))
    assert len(set(plan.owners)) == 2000
    assert OwnershipPlan.from_json(plan.to_json()).fingerprint() == plan.fingerprint()


def test_the_cap_counts_the_moments_of_adamw():
    specs, momentum = specs_of([(64, 64, "float32")] * 2, rest=2), 64 * 64 * 4
    moments = 2 * 4 * (3 + 4)  # of two vectors
    least = momentum + moments

    def planned(cap: int) -> OwnershipPlan:
        options = PlannerOptions(owner_memory_bytes=cap)
        return solve(specs, Topology.flat(2), CostTable.analytic(), options=options)

    assert planned(least).state_bytes == (least, least)
    with pytest.raises(PlanError, match=f"smallest feasible cap is {least} bytes"):
        planned(least - 1)
    dedicated = solve(specs, Topology.flat(2), CostTable.analytic(), layout=Layout.DEDICATED)
    assert dedicated.state_bytes == (momentum,) * 2


def test_json_keeps_stacks_splits_transposed_and_frozen_parameters():
    model = Mixed()
    model.blocks[1].requires_grad_(False)
    specs = collect(model, splits=Mixed.splits, heads=Mixed.heads)
    topology = Topology((2, 2), ("replicate", "shard"), 2, "cuda")
    plan = solve(specs, topology, CostTable.analytic())
    assert specs.frozen
    assert any(m.form.is_in_out for m in specs.matrices)
    assert OwnershipPlan.from_json(plan.to_json()) == plan


def with_specs(plan: OwnershipPlan, *parameters: ParameterSpec, **of_last: object) -> OwnershipPlan:
    """With other parameters, or another last matrix, which is alone in its batch."""
    *others, last = plan.specs.matrices
    matrices = (*others, replace(last, **of_last))  # type: ignore[arg-type]
    return replace(plan, specs=ModelSpecs(parameters, matrices))


def with_batches(plan: OwnershipPlan, *batches: Batch) -> OwnershipPlan:
    return replace(plan, batches=batches)


@pytest.mark.parametrize("change", [
    lambda p: with_batches(p, Batch(1, (0, 1), 1.0), Batch(1, (2,), 1.0)),
    lambda p: with_batches(p, Batch(0, (1, 0), 1.0), Batch(1, (2,), 1.0)),
    lambda p: with_batches(p, Batch(1, (2,), 1.0), Batch(0, (0, 1), 1.0)),
    lambda p: with_batches(p, Batch(0, (0, 1), 2.0), Batch(1, (2,), 1.0)),
    lambda p: with_batches(p, *(Batch(o, (i,), 1.0) for i, o in enumerate([0, 0, 1]))),
    lambda p: replace(p, topology=Topology.flat(3)),
    lambda p: replace(p, topology=Topology((2,), ("dp",), 1)),
    lambda p: replace(p, topology=Topology((2,), ("dp",), 2, "cuda")),
    lambda p: replace(p, layout=Layout.DEDICATED),
    lambda p: with_specs(p, replace(p.specs.parameters[0], name="other"), *p.specs.parameters[1:]),
    lambda p: with_specs(p, replace(p.specs.parameters[0], shape=(6, 4)), *p.specs.parameters[1:]),
    lambda p: with_specs(p, *p.specs.parameters[::-1]),
    lambda p: with_specs(p, *p.specs.parameters, name="other"),
    lambda p: with_specs(p, *p.specs.parameters, rows=2, cols=12),
    lambda p: with_specs(p, *p.specs.parameters, form=Form.FLAT_IN_OUT),
    lambda p: with_specs(p, *p.specs.parameters, steps=(2, 1)),
])  # fmt: skip
def test_the_fingerprint_changes_with_what_runs_where(change):
    plan = with_batches(
        plan_of(specs_of([B] * 3), [0, 0, 0], 2), Batch(0, (0, 1), 1.0), Batch(1, (2,), 1.0)
    )
    assert change(plan).fingerprint() != plan.fingerprint()
    found = {
        "search": Search((("greedy", 3.0),), 9.0), "solver": "round_robin", "status": "optimal",
        "cost_source": "elsewhere", "lower_bound_ms": 0.5,
    }  # fmt: skip
    assert replace(plan, **found).fingerprint() == plan.fingerprint(), "not how it was found"
    named = replace(plan, topology=replace(plan.topology, axes=("shard",)))
    assert named.fingerprint() == plan.fingerprint(), "nor what a mesh calls its axes"


def broken(**changes: object) -> str:
    """A saved plan with other fields, or without those that are None; its fingerprint is right."""
    data = json.loads(plan_of(specs_of([B] * 2), [0, 1], 2).to_json())
    return sealed({k: v for k, v in (data | changes).items() if v is not None or k not in changes})


NO_RANKS = {"shape": [], "axes": [], "ranks_per_node": 1, "device_type": "cpu", "node_of": []}


@pytest.mark.parametrize("changes", [
    {"specs": None}, {"batches": 7}, {"status": "perfect"}, {"layout": "scattered"},
    {"topology": NO_RANKS}, {"batches": [[0, [0, 1], 1.0, "fast"]]},
])  # fmt: skip
def test_what_is_no_plan_is_refused_as_one(changes):
    OwnershipPlan.from_json(broken())
    with pytest.raises(PlanError):
        OwnershipPlan.from_json(broken(**changes))


@pytest.mark.parametrize("text", ["", "null", "[]", '"text"', broken()[:-20], "[" * 100_000])
def test_what_is_no_json_of_a_plan_is_refused_as_such(text):
    with pytest.raises(PlanError):
        OwnershipPlan.from_json(text)


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("matrices", {"rows": 60}, "no part of parameter"),
    ("matrices", {"steps": (1, 0)}, "no part of parameter"),
    ("matrices", {"start": 1}, "no part of parameter"),
    ("matrices", {"parameter": 5}, "has no parameter #5"),
    ("matrices", {"dtype": "bfloat16"}, "dtype of its parameter, 'float32'"),
    ("parameters", {"algorithm": Algorithm.ADAMW}, "."),
    ("parameters", {"name": "m1.weight"}, "."),
])  # fmt: skip
def test_a_matrix_is_a_part_of_its_parameter(kind, changes, message):
    specs = specs_of([B] * 2)
    first, *others = getattr(specs, kind)
    with pytest.raises(PlanError, match=message):
        replace(specs, **{kind: (replace(first, **changes), *others)})


def test_a_plan_of_another_format_says_which():
    for version in (99, 1, 14):
        with pytest.raises(PlanError, match=rf"format {version}, this version reads 15"):
            OwnershipPlan.from_json(broken(format=version))


@pytest.mark.parametrize(("batches", "message"), [
    ([(0, (0,))], "exactly one owner.*m1.weight"),
    ([(0, (0,)), (1, (0,)), (1, (1,))], "exactly one owner.*m0.weight"),
    ([(0, (0,)), (1, (1,)), (1, (2,))], "exactly one owner"),
    ([(0, (0,)), (1, (1,)), (1, (-1,))], "exactly one owner"),
    ([(0, (0,)), (2, (1,))], "owner 2 is not a rank"),
    ([(0, (0, 1))], "one shape and dtype"),
    ([(0, (0,)), (1, (1,)), (0, ())], "one shape and dtype"),
])  # fmt: skip
def test_a_plan_is_validated_when_made(batches, message):
    plan = plan_of(specs_of([A, B]), [0, 1], 2)
    with pytest.raises(PlanError, match=message):
        with_batches(plan, *(Batch(owner, matrices, 1.0) for owner, matrices in batches))


SAME = {"a.weight": (4, 6), "b.weight": (6, 6), "c.bias": (6,)}


def fits(
    parameters: Mapping[str, Sequence[int]],
    world: int = 2,
    dtype: torch.dtype = torch.float32,
    **selection: object,
) -> None:
    """Fit the plan of `SAME` on two ranks to a model."""
    plan = solve(collect(tree(SAME)), Topology.flat(2), CostTable.analytic())
    new = collect(tree(parameters).to(dtype), **selection)  # type: ignore[arg-type]
    fitted_plan(plan, new, Topology.flat(world), plan.layout)


@pytest.mark.parametrize(("parameters", "options", "message"), [
    (SAME | {"d.weight": (2, 2)}, {}, r"\+ d.weight \[2, 2\]"),
    (SAME | {"a.weight": (6, 4)}, {}, r"! a.weight: plan \[4, 6\].*model \[6, 4\]"),
    (SAME, {"world": 4}, r"for 2 ranks, the mesh has 4"),
    (SAME, {"heads": {"b.weight": 2}}, r"split"),
    (SAME, {"dtype": torch.bfloat16}, r"for float32: plan with --dtype bfloat16$"),
    (SAME, {"select": lambda name, p: name == "a.weight"}, r"b.weight.*muon.*adamw"),
    ({f"x{i}.weight": (2, 2) for i in range(30)}, {}, r"\+\d+ more"),
])  # fmt: skip
def test_a_saved_plan_that_does_not_fit_says_where(parameters, options, message):
    fits(SAME)
    with pytest.raises(PlanError, match=message):
        fits(parameters, **options)


def owners_by_name(plan: OwnershipPlan) -> dict[str, int]:
    return {m.name: owner for m, owner in zip(plan.specs.matrices, plan.owners, strict=True)}


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(9)), st.booleans())
def test_a_saved_plan_fits_parameters_in_any_order(order, in_domains):
    sizes = {"a.weight": (4, 6), "b.weight": (6, 6), "c.bias": (6,), "d.weight": (6, 4)}
    sizes |= {f"e{i}.weight": (6, 4 + i) for i in range(5)}
    specs = collect(tree(sizes))
    rows = len(specs.matrices)
    limits = OwnerLimits(domains=((0, 1), (2,)), domain_of=tuple(i % 2 for i in range(rows)))
    mesh = Topology((1, 3), ("node", "gpu"), 3, "cuda")
    plan = solve(
        specs, mesh, CostTable.analytic("h200"),
        layout=Layout.SHARDED, limits=limits if in_domains else None,
    )  # fmt: skip
    new = collect(tree({list(sizes)[i]: sizes[list(sizes)[i]] for i in order}))
    found = fitted_plan(plan, new, Topology.flat(3), Layout.REPLICATED)
    assert owners_by_name(found) == owners_by_name(plan)
    assert found.specs.matrices == new.matrices and found.loads_ms == plan.loads_ms
    assert [p.name for p in found.specs.parameters] == [p.name for p in new.parameters]
    assert (found.topology, found.layout) == (Topology.flat(3), Layout.REPLICATED)
    certificate = certify(found)
    assert certificate.ok and certificate.proven
    assert certificate.lower_bound_ms == certify(plan).lower_bound_ms
    assert OwnershipPlan.from_json(found.to_json()) == found
    back = fitted_plan(found, specs, mesh, Layout.SHARDED)
    assert back == plan and back.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize(("saved", "mesh", "fits"), [
    ((1, 8), (8,), True), ((8,), (8, 1), True), ((2, 4), (8,), True), ((8,), (2, 2, 2), True),
    ((2, 1, 4), (2, 4), True), ((2, 4), (4, 2), False),
])  # fmt: skip
def test_the_meshes_that_a_saved_plan_fits(saved, mesh, fits):
    specs = collect(tree(SAME))
    one, other = (Topology(t, tuple("abc"[: len(t)]), t[-1]) for t in (saved, mesh))
    plan = solve(specs, one, CostTable.analytic())
    if fits:
        found = fitted_plan(plan, specs, other, plan.layout)
        assert found.topology == other and certify(found).ok
        return
    with pytest.raises(PlanError, match=r"is for mesh \(2, 4\), the mesh is \(4, 2\)"):
        fitted_plan(plan, specs, other, plan.layout)


def test_a_saved_plan_for_another_layout_or_memory_is_refused():
    model = TinyGPT()
    own = dmuon.dedicate_params(model, costs="analytic")
    plan = own.plan
    own.close()
    small = PlannerOptions(owner_memory_bytes=100)
    over = replace(plan, limits=replace(plan.limits, memory_bytes=max(plan.state_bytes) - 1))
    for saved, planner, message in (
        (replace(plan, layout=Layout.REDUCED), PlannerOptions(), "layout 'reduce_to_owner'"),
        (plan, small, "owner_memory_bytes=100"),
        (over, PlannerOptions(), "owner_memory_bytes="),
    ):
        with pytest.raises(PlanError, match=message):
            dmuon.dedicate_params(model, plan=saved, planner=planner)
    dmuon.dedicate_params(model, plan=plan).close()


def test_algorithms_and_layouts_have_stable_names():
    # They are written into saved plans.
    assert [a.value for a in Algorithm] == ["muon", "adamw", "frozen"]
    names = ["auto", "sharded", "replicated", "reduce_to_owner", "dedicated"]
    assert [layout.value for layout in Layout] == names
