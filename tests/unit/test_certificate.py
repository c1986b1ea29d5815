"""A certificate that notices every lie about a plan."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.plan import Batch, OwnershipPlan, StepTimes
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import OwnerLimits
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError
from tests.unit.models import plan_of, specs_of

KEYS = [(64, 64, "float32"), (64, 256, "float32"), (128, 128, "float32")] * 7
H100 = CostTable.analytic("h100")


def planned(solver: str = "milp", layout: Layout = Layout.REDUCED, **limits) -> OwnershipPlan:
    return solve(
        specs_of(KEYS, rest=2), Topology.flat(4), H100, layout=layout, solver=solver,
        limits=OwnerLimits(**limits),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> OwnershipPlan:
    return planned(fixed_bytes=(5, 0, 0, 9), memory_bytes=500_000)


@pytest.fixture(scope="module")
def turns() -> OwnershipPlan:
    """Valid, and far from the best."""
    return planned("round_robin")


def test_an_honest_plan_is_proven_without_a_solver_from_the_file_alone(plan, turns):
    text = plan.to_json()
    with mock.patch.dict("sys.modules", {"pulp": None, "highspy": None}):
        certificate = certify(OwnershipPlan.from_json(text))
    assert certificate.ok and certificate.proven and certificate.findings == ()
    assert certificate.makespan_ms == pytest.approx(plan.makespan_ms)
    assert certificate.lower_bound_ms >= plan.lower_bound_ms - 1e-9
    assert 0 <= certificate.makespan_ms / certificate.lower_bound_ms - 1 <= 0.02
    assert str(certificate).startswith("certificate valid")
    assert turns.status == "feasible" and certify(turns).ok and certify(turns).proven


def changed_batch(plan: OwnershipPlan, **changes) -> OwnershipPlan:
    first, *others = plan.batches
    return replace(plan, batches=(replace(first, **changes), *others))


def changed_prices(plan: OwnershipPlan, factor: float = 1.0, **changes) -> OwnershipPlan:
    rows = [replace(r, ms=tuple(factor * ms for ms in r.ms), **changes) for r in plan.prices]
    return replace(plan, prices=tuple(rows))


def wrong_dims(plan: OwnershipPlan) -> OwnershipPlan:
    old = plan.specs.matrices[2].key  # 128 x 128
    wrong = tuple(
        replace(m, rows=m.rows // 4, cols=m.cols * 4) if m.key == old else m
        for m in plan.specs.matrices
    )
    prices = tuple(replace(r, key=wrong[2].key) if r.key == old else r for r in plan.prices)
    return replace(plan, specs=replace(plan.specs, matrices=wrong), prices=prices)


def tight(plan: OwnershipPlan) -> OwnershipPlan:
    return replace(plan, limits=replace(plan.limits, memory_bytes=max(plan.state_bytes) - 1))


def step_of(plan: OwnershipPlan, work: float = 1.0) -> StepTimes:
    """As short as the plan's makespan lets it be."""
    ms = plan.makespan_ms
    return StepTimes(ms, ms, None, work * plan.work_ms, ms)


def test_a_step_may_be_as_short_as_its_work_and_its_links(plan):
    assert certify(replace(plan, step=step_of(plan))).ok


def false_optimum(plan: OwnershipPlan, values: tuple[int, ...]) -> OwnershipPlan:
    """Round robin's plan, said to be optimal."""
    lie = planned("round_robin")
    return replace(lie, proof=values, status="optimal", lower_bound_ms=lie.makespan_ms)


LIES = {
    "a bound": (lambda p: replace(p, lower_bound_ms=p.lower_bound_ms * 1.001), "claims a lower b"),
    "the clock": (lambda p: replace(p, status="time_limit"), "was not stopped by the clock"),
    "dims": (wrong_dims, "is no matrix of a parameter"),
    "a batch's price": (lambda p: changed_batch(p, ms=p.batches[0].ms / 2), "its price is"),
    "a batch's kernel": (
        lambda p: changed_batch(p, kernel="gram[2]/torch/float16"), "its price is of ''",
    ),
    "a cap": (tight, "more than owner_memory_bytes="),
    "too few values": (lambda p: replace(p, proof=(1, 2)), "values prove"),
    "no values": (lambda p: replace(p, proof=()), "values prove"),
    "negative values": (lambda p: replace(p, proof=(-1, 1, 1)), "values prove"),
    "values beyond 64 bits": (lambda p: replace(p, proof=(2**62, 2**62, 2**62)), "values prove"),
    "values of nothing": (lambda p: false_optimum(p, (0, 0, 0)), "claims to be optimal"),
    "lower prices": (lambda p: changed_prices(p, 0.5), "claims a lower bound"),
    "less work in a step": (lambda p: replace(p, step=step_of(p, 0.9)), "ms of work on a rank"),
    "a step without its links": (
        lambda p: replace(p, step=replace(step_of(p), link_ms=2 * p.makespan_ms)), "shorter than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(plan, lie):
    make, message = LIES[lie]
    certificate = certify(make(plan))
    assert not certificate.ok and not certificate.proven
    assert message in str(certificate) and str(certificate).startswith("certificate INVALID")


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"proof": None}, "no proof"), ({"prices": (), "proof": None}, "no prices")],
)
def test_what_is_missing_leaves_a_plan_valid_and_its_bound_unproven(plan, changes, missing):
    bare = replace(plan, **changes)
    certificate = certify(bare)
    assert certificate.ok and not certificate.proven and missing in str(certificate)
    assert not certify(tight(bare)).ok
    if "proof" in changes:
        assert certificate.lower_bound_ms == 0.0


def test_a_plan_by_hand_and_one_of_nothing():
    by_hand = certify(plan_of(specs_of(KEYS[:3]), [0, 1, 0], 2))
    assert by_hand.ok and not by_hand.proven and "no prices" in str(by_hand)
    nothing = solve(specs_of([], rest=2), Topology.flat(2), H100)
    assert nothing.status == "optimal" and certify(nothing).ok and certify(nothing).proven


def test_owners_outside_the_domain_and_batches_over_two_are_found():
    domains = {
        "domains": ((0, 1, 2, 3), (2, 3)),
        "domain_of": tuple(i % 2 for i in range(len(KEYS))),
    }
    plan = planned(**domains)
    assert certify(plan).ok
    outside = next(b for b in plan.batches if plan.limits.domain_of[b.matrices[0]] == 1)
    others = [b for b in plan.batches if b is not outside]
    certificate = certify(replace(plan, batches=(*others, replace(outside, owner=0))))
    assert not certificate.ok and "rank 0 may not own" in str(certificate)
    two = solve(
        specs_of([KEYS[0]] * 2), Topology.flat(2), H100,
        limits=OwnerLimits(domains=((0,), (0, 1)), domain_of=(0, 1)),
    )  # fmt: skip
    mixed = certify(replace(two, batches=(Batch(0, (0, 1), H100.batch_ms(KEYS[0], 2)),)))
    assert not mixed.ok and "different domains" in str(mixed)


def test_costs_and_caps_out_of_all_range_are_errors_or_no_limit():
    keys = [(4, 6, "float32")]
    huge = CostTable("huge", {keys[0]: {1: 1e20}})
    with pytest.raises(PlanError, match="1e\\+12 milliseconds"):
        solve(specs_of(keys), Topology.flat(2), huge)
    limits = OwnerLimits(memory_bytes=10**30)
    assert solve(specs_of(keys), Topology.flat(2), H100, limits=limits).owners


def test_in_the_sharded_layout_owners_store_nothing_for_their_matrices():
    fixed = (10, 20, 30, 40)
    plan = planned(layout=Layout.SHARDED, fixed_bytes=fixed, memory_bytes=40)
    assert plan.state_bytes == fixed and certify(plan).ok and certify(plan).proven
    elsewhere = certify(replace(plan, layout=Layout.REDUCED))
    assert "owner_memory_bytes=40" in str(elsewhere) and not elsewhere.ok
    with pytest.raises(PlanError, match=r"rank 3 stores 40 bytes.*no other ownership.*more ranks"):
        planned(layout=Layout.SHARDED, fixed_bytes=fixed, memory_bytes=39)
    tight = replace(plan, limits=replace(plan.limits, memory_bytes=39))
    assert "rank 3 stores 40 bytes" in str(certify(tight))


def test_many_alike_domains_are_planned_near_the_bound():
    """Experts of 16 groups of 4 ranks, two per group and layer, two more in the first group, beside
    dense matrices that any rank may own."""
    experts, dense = ((1408, 2048), (2048, 1536)), ((1024, 1024), (1024, 2560))
    keys, domain_of = [], []
    for _ in range(24):
        for group in range(16):
            count = 4 if group == 0 else 2
            keys += experts * count
            domain_of += [group] * (len(experts) * count)
        keys += dense
        domain_of += [16] * len(dense)
    domains = (*(tuple(range(4 * c, 4 * c + 4)) for c in range(16)), tuple(range(64)))
    plan = solve(
        specs_of((*shape, "float32") for shape in keys), Topology.flat(64), H100,
        layout=Layout.SHARDED, limits=OwnerLimits(domains=domains, domain_of=tuple(domain_of)),
        options=PlannerOptions(time_limit_s=300),  # work limits end it first, on any machine
    )  # fmt: skip
    assert not plan.search.hit_time_limit
    assert plan.makespan_ms <= plan.lower_bound_ms * 1.04
    assert certify(plan).ok and certify(plan).proven
