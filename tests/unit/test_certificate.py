"""A certificate that notices every lie about a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest

from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.plan import Batch, Dual, OwnershipPlan, PriceRow, Proof
from dmuon.scheduler.shards import OwnerLimits
from dmuon.scheduler.solve import solve
from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError
from tests.unit.models import plan_of, specs_of

KEYS = [(64, 64, "float32"), (64, 256, "float32"), (128, 128, "float32")] * 7
CAP = 500_000


def planned(**limits) -> OwnershipPlan:
    return solve(
        specs_of(KEYS, rest=2),
        Topology.flat(4),
        CostTable.analytic("h100"),
        solver="milp",
        limits=OwnerLimits(**limits),
    )


@pytest.fixture(scope="module")
def plan() -> OwnershipPlan:
    return planned(fixed_ms=(0.1, 0.0, 0.2, 0.0), fixed_bytes=(5, 0, 0, 9), memory_bytes=CAP)


def test_an_honest_plan_is_proven(plan):
    certificate = certify(plan)
    assert certificate.ok and certificate.proven and certificate.findings == ()
    assert certificate.makespan_ms == pytest.approx(plan.makespan_ms)
    assert certificate.lower_bound_ms >= plan.lower_bound_ms - 1e-9
    assert 0 <= certificate.gap <= 0.02
    assert str(certificate).startswith("certificate valid")


def test_it_needs_no_solver_and_nothing_but_the_file(plan):
    text = plan.to_json()
    with mock.patch.dict("sys.modules", {"pulp": None, "highspy": None}):
        certificate = certify(OwnershipPlan.from_json(text))
    assert certificate.ok and certificate.proven


def test_a_bound_that_is_too_high_is_found(plan):
    certificate = certify(replace(plan, lower_bound_ms=plan.lower_bound_ms * 1.001))
    assert not certificate.ok and not certificate.proven
    assert "claims a lower bound" in str(certificate)
    assert certificate.lower_bound_ms == pytest.approx(plan.lower_bound_ms, rel=1e-4)


def changed_batch(plan: OwnershipPlan, **changes) -> OwnershipPlan:
    first, *others = plan.batches
    return replace(plan, batches=(replace(first, **changes), *others))


def test_all_batches_on_one_rank_are_found(plan):
    """Valid batches at the right prices, of which the plan says nothing but the truth otherwise."""
    moved = tuple(replace(batch, owner=0) for batch in plan.batches)
    certificate = certify(replace(plan, batches=moved, status="feasible"))
    assert not certificate.ok and not certificate.proven
    assert "was made with a makespan" in str(certificate) and "fingerprint" in str(certificate)


def test_a_proof_and_what_the_plan_was_made_with_are_required(plan):
    bare = replace(plan, claim=None)
    assert certify(bare).ok and not certify(bare).proven
    assert "which makespan and fingerprint" in str(certify(bare))
    other = replace(plan, claim=replace(plan.claim, fingerprint="0" * 16))
    assert not certify(other).ok and "fingerprint 0000" in str(certify(other))


@pytest.mark.parametrize("name", ["greedy", "round_robin", "oracle"])
def test_makespans_of_other_solvers_are_run_again(plan, name):
    others = tuple(a for a in plan.alternatives if a[0] != name)
    certificate = certify(replace(plan, alternatives=(*others, (name, 0.01))))
    assert not certificate.ok and f"the plan says that {name} takes 0.01 ms" in str(certificate)


def test_prices_with_a_false_origin_are_found(plan):
    first, *others = plan.prices
    for origin in ("measured", "heaven"):
        row = replace(first, origin=(origin,) * len(first.ms))
        certificate = certify(replace(plan, prices=(row, *others)))
        assert not certificate.ok and f"say {origin!r}" in str(certificate)


def test_dims_that_are_not_the_parameters_are_found(plan):
    wrong = tuple(
        replace(m, rows=m.rows // 2, cols=m.cols * 2) if m.key == plan.specs.matrices[0].key else m
        for m in plan.specs.matrices
    )
    key = wrong[0].key
    prices = tuple(
        replace(r, key=key) if r.key == plan.specs.matrices[0].key else r for r in plan.prices
    )
    specs = replace(plan.specs, matrices=wrong)
    certificate = certify(replace(plan, specs=specs, prices=prices))
    assert not certificate.ok and "is no matrix of a parameter" in str(certificate)


def test_a_batch_cheaper_than_its_price_is_found(plan):
    certificate = certify(changed_batch(plan, ms=plan.batches[0].ms / 2))
    assert not certificate.ok
    assert "its price is" in str(certificate)
    assert certificate.makespan_ms == pytest.approx(plan.makespan_ms)


def test_a_makespan_counts_what_is_executed_and_not_what_is_claimed(plan):
    merged = tuple(replace(b, owner=0) for b in plan.batches)
    certificate = certify(replace(plan, batches=merged, limits=OwnerLimits()))
    assert certificate.makespan_ms == pytest.approx(sum(b.ms for b in plan.batches))


def test_a_full_owner_is_found(plan):
    tight = replace(plan, limits=replace(plan.limits, memory_bytes=max(plan.state_bytes) - 1))
    certificate = certify(tight)
    assert not certificate.ok
    assert f"owner_memory_bytes={max(plan.state_bytes) - 1}" in str(certificate)


def test_an_owner_outside_the_pool_is_found():
    pools = {"pools": ((0, 1, 2, 3), (2, 3)), "pool_of": tuple(i % 2 for i in range(len(KEYS)))}
    plan = planned(**pools)
    assert certify(plan).ok
    outside = next(b for b in plan.batches if plan.limits.pool_of[b.matrices[0]] == 1)
    others = [b for b in plan.batches if b is not outside]
    certificate = certify(replace(plan, batches=(*others, replace(outside, owner=0))))
    assert not certificate.ok
    assert "rank 0 may not own" in str(certificate)


def test_a_batch_over_two_pools_is_found():
    keys = [(64, 64, "float32")] * 2
    limits = OwnerLimits(pools=((0,), (0, 1)), pool_of=(0, 1))
    plan = solve(specs_of(keys), Topology.flat(2), CostTable.analytic("h100"), limits=limits)
    ms = CostTable.analytic("h100").batch_ms(keys[0], 2)
    certificate = certify(replace(plan, batches=(Batch(0, (0, 1), ms),)))
    assert not certificate.ok and "different pools" in str(certificate)


@pytest.mark.parametrize(
    "proof",
    [
        Proof(Dual((1, 2), (0, 0))),
        Proof(Dual((0, 0, 0), (0, 0, 0))),
        Proof(Dual((1, 1, 1), (-5, 0, 0))),
    ],
)
def test_duals_that_prove_too_little_are_found(plan, proof):
    certificate = certify(replace(plan, proof=proof))
    assert not certificate.ok and "duals prove" in str(certificate)


def test_prices_that_do_not_belong_to_the_model_are_found(plan):
    wrong = (PriceRow((1, 2, "float32"), (1.0,), ("given",)),)
    assert "do not fit" in str(certify(replace(plan, prices=wrong)))
    negative = tuple(replace(row, ms=(-1.0, *row.ms[1:])) for row in plan.prices)
    assert "do not fit" in str(certify(replace(plan, prices=negative)))


def test_lower_prices_lower_the_bound(plan):
    cheap = tuple(replace(row, ms=tuple(ms / 2 for ms in row.ms)) for row in plan.prices)
    assert not certify(replace(plan, prices=cheap)).ok


def test_a_plan_by_hand_has_nothing_to_prove():
    plan = plan_of(specs_of(KEYS[:3]), [0, 1, 0], 2)
    certificate = certify(plan)
    assert certificate.ok and not certificate.proven
    assert "no prices" in str(certificate)


def test_a_plan_without_a_proof_is_valid_but_its_bound_is_not_proven(plan):
    certificate = certify(replace(plan, proof=None))
    assert certificate.ok and not certificate.proven
    assert certificate.lower_bound_ms == 0.0


def test_a_kernel_other_than_the_priced_one_is_found(plan):
    certificate = certify(changed_batch(plan, kernel="gram[2]/torch/float16"))
    assert not certificate.ok and "its price is of ''" in str(certificate)


def test_a_wrong_claim_of_exhaustion_is_found(plan):
    worse = solve(
        specs_of(KEYS, rest=2), Topology.flat(4), CostTable.analytic("h100"), solver="round_robin"
    )
    assert worse.makespan_ms > plan.makespan_ms * 1.05
    lie = replace(
        worse,
        proof=Proof(Dual((0, 0, 0), (0, 0, 0)), impossible=round(worse.makespan_ms * 1e9) - 1),
        lower_bound_ms=worse.makespan_ms,
    )
    assert not certify(lie).ok


def test_exhaustion_proves_what_duals_cannot():
    """Three owners, four matrices of 3 and two of 2: the average is 16/3, but 6 is the least."""
    keys = [KEYS[0]] * 4 + [KEYS[1]] * 2
    table = {
        KEYS[0]: {b: 3.0 * b for b in range(1, 17)},
        KEYS[1]: {b: 2.0 * b for b in range(1, 17)},
    }
    plan = solve(
        specs_of(keys), Topology.flat(3), CostTable("given", table), options=PlannerOptions()
    )
    assert plan.makespan_ms == plan.lower_bound_ms == 6.0
    assert certify(plan).ok


@pytest.mark.parametrize(
    "dual",
    [
        Dual((2**62, 2**62, 2**62), (0, 0, 0)),
        Dual((10**30, 0, 0), (0, 0, 0)),
        Dual((0, 0, 0), (2**50, 2**50, 2**50)),
    ],
)
def test_duals_that_would_wrap_around_prove_nothing(dual):
    worse = solve(
        specs_of(KEYS), Topology.flat(4), CostTable.analytic("h100"), solver="round_robin"
    )
    lie = replace(worse, proof=Proof(dual), lower_bound_ms=worse.makespan_ms, status="optimal")
    assert not certify(lie).ok
    assert certify(worse).ok


def test_a_false_claim_of_optimality_is_found():
    worse = solve(
        specs_of(KEYS), Topology.flat(4), CostTable.analytic("h100"), solver="round_robin"
    )
    assert worse.status == "feasible" and certify(worse).ok
    assert "claims to be optimal" in str(certify(replace(worse, status="optimal")))


def tampered(plan: OwnershipPlan, *path, value) -> str:
    data = json.loads(plan.to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("lower_bound_ms",), float("nan")),
        (("lower_bound_ms",), "1"),
        (("lower_bound_ms",), None),
        (("batches", 0, 2), float("inf")),
        (("batches", 0, 2), "x"),
        (("batches", 0, 0), 1.5),
        (("batches", 0, 0), True),
        (("limits", "memory_bytes"), "80GiB"),
        (("limits", "fixed_ms"), ["a", "b", "c", "d"]),
        (("limits", "fixed_ms"), [1.0]),
        (("limits", "pool_of"), ["a"] * 21),
        (("prices", 0, 1), []),
        (("prices", 0, 1), ["1"]),
        (("prices", 0, 1), [1e300]),
        (("proof", 0), [10**30] * 3),
        (("proof", 1), "abc"),
    ],
)
def test_a_damaged_file_is_refused_or_invalid_but_never_a_traceback(plan, path, value):
    text = tampered(plan, *path, value=value)
    try:
        loaded = OwnershipPlan.from_json(text)
    except PlanError:
        return
    certificate = certify(loaded)
    assert not certificate.ok
    assert str(certificate).startswith("certificate INVALID")


def test_without_prices_owners_are_still_checked(plan):
    bare = replace(plan, prices=(), proof=None)
    assert certify(bare).ok and not certify(bare).proven
    assert certify(bare).lower_bound_ms == 0.0
    tight = replace(bare, limits=replace(plan.limits, memory_bytes=max(plan.state_bytes) - 1))
    assert not certify(tight).ok


def test_a_model_without_matrices_is_proven():
    plan = solve(specs_of([], rest=2), Topology.flat(2), CostTable.analytic())
    assert plan.status == "optimal" and certify(plan).ok and certify(plan).proven


def test_round_robin_never_breaks_the_cap_unseen():
    limits = OwnerLimits(fixed_bytes=(0, 100), memory_bytes=96)
    with pytest.raises(PlanError, match="round_robin"):
        solve(
            specs_of([(4, 6, "float32")]),
            Topology.flat(2),
            CostTable.analytic(),
            solver="round_robin",
            limits=limits,
        )


def test_costs_and_caps_out_of_all_range_are_errors_or_no_limit():
    keys = [(4, 6, "float32")]
    huge = CostTable("huge", {keys[0]: {1: 1e20}})
    with pytest.raises(PlanError, match="1e\\+12 milliseconds"):
        solve(specs_of(keys), Topology.flat(2), huge)
    limits = OwnerLimits(memory_bytes=10**30)
    assert solve(specs_of(keys), Topology.flat(2), CostTable.analytic(), limits=limits).owners
