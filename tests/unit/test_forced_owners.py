"""Matrices whose owners are given or few: domains of one rank, alike ones, the sharded layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dmuon.config import PlannerOptions
from dmuon.report.data import build_report
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import OwnerLimits
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError
from tests.unit.models import specs_of
from tests.unit.test_solvers import TICKS

KEYS = [(64, 64, "float32"), (64, 256, "float32"), (128, 128, "float32")] * 4


def planned(domain_of, domains, world=4, keys=KEYS, solver="auto", layout=Layout.REDUCED, **limits):
    return solve(
        specs_of(keys),
        Topology.flat(world),
        CostTable.analytic("h100"),
        solver=solver,
        layout=layout,
        options=PlannerOptions(time_limit_s=300),  # work limits end it first, on any machine
        limits=OwnerLimits(domains=tuple(domains), domain_of=tuple(domain_of), **limits),
    )


def each_rank_alone(**options) -> OwnershipPlan:
    return planned([i % 4 for i in range(len(KEYS))], [(r,) for r in range(4)], **options)


def half_forced(**options) -> OwnershipPlan:
    """Every second matrix is forced, mostly on rank 0."""
    domain_of = [4 if i % 2 else (0 if i < 6 else i % 4) for i in range(len(KEYS))]
    return planned(domain_of, [*((r,) for r in range(4)), (0, 1, 2, 3)], **options)


# ---- forced matrices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "layout"), [("milp", Layout.REDUCED), ("round_robin", Layout.SHARDED)]
)
def test_with_nothing_to_decide_every_plan_is_optimal(solver, layout):
    plan = each_rank_alone(solver=solver, layout=layout, fixed_ms=(0.0, 0.7, 0.0, 0.1))
    assert plan.status == "optimal"
    assert plan.lower_bound_ms == pytest.approx(plan.makespan_ms, abs=TICKS)
    assert plan.owners == tuple(i % 4 for i in range(len(KEYS)))
    assert certify(plan).ok and certify(plan).proven


def test_forced_state_counts_under_a_memory_cap():
    plan = half_forced()
    stored = [0] * 4
    for matrix, owner in zip(plan.specs.matrices, plan.owners):
        stored[owner] += 4 * matrix.numel
    assert plan.state_bytes == tuple(stored)
    forced = sum(
        4 * m.numel for i, m in enumerate(plan.specs.matrices) if plan.limits.domain_of[i] == 0
    )
    with pytest.raises(PlanError, match=rf"for the optimizer state of {len(KEYS)} matrices"):
        half_forced(memory_bytes=forced - 1)
    tight = half_forced(memory_bytes=max(forced, max(stored) - 1))
    assert max(tight.state_bytes) <= tight.limits.memory_bytes
    assert certify(tight).ok


# ---- the sharded layout ------------------------------------------------------------------


def test_in_the_sharded_layout_owners_store_nothing_for_their_matrices():
    fixed = (10, 20, 30, 40)
    plan = half_forced(layout=Layout.SHARDED, fixed_bytes=fixed, memory_bytes=40)
    assert plan.state_bytes == fixed
    assert certify(plan).ok and certify(plan).proven
    assert plan.owners == half_forced(layout=Layout.SHARDED).owners
    elsewhere = certify(replace(plan, layout=Layout.REDUCED))
    assert "owner_memory_bytes=40" in str(elsewhere) and not elsewhere.ok
    assert OwnershipPlan.from_json(plan.to_json()) == plan


def test_a_cap_below_the_shards_state_names_the_rank_and_what_helps():
    stored = (1, 2, 50, 4)
    with pytest.raises(PlanError, match=r"rank 2 stores 50 bytes.*no other ownership.*more ranks"):
        half_forced(layout=Layout.SHARDED, fixed_bytes=stored, memory_bytes=49)
    plan = half_forced(layout=Layout.SHARDED, fixed_bytes=stored)
    tight = replace(plan, limits=replace(plan.limits, memory_bytes=49))
    assert "rank 2 stores 50 bytes" in str(certify(tight))


# ---- alike domains -------------------------------------------------------------------------

EXPERTS = ((1408, 2048, "float32"), (2048, 1536, "float32"))
DENSE = ((1024, 1024, "float32"), (1024, 2560, "float32"))


def experts(coordinates: int, ranks: int, layers: int, each: int, extra: int = 0, **options):
    """``each`` experts a coordinate, ``extra`` more on the first; dense matrices anywhere."""
    world = coordinates * ranks
    keys, domain_of = [], []
    for _ in range(layers):
        for c in range(coordinates):
            count = each + (extra if c == 0 else 0)
            keys += EXPERTS * count
            domain_of += [c] * (len(EXPERTS) * count)
        keys += DENSE
        domain_of += [coordinates] * len(DENSE)
    domains = [tuple(range(c * ranks, (c + 1) * ranks)) for c in range(coordinates)]
    return planned(domain_of, [*domains, tuple(range(world))], world, keys, **options)


def test_many_alike_domains_are_planned_near_the_bound():
    plan = experts(16, 4, layers=24, each=2, extra=2, layout=Layout.SHARDED)
    assert not plan.search.hit_time_limit
    assert plan.makespan_ms <= plan.lower_bound_ms * 1.04
    certificate = certify(plan)
    assert certificate.ok and certificate.proven


# ---- names and reports -------------------------------------------------------------------


def test_the_report_tells_copies_and_where_state_lies():
    specs = specs_of(KEYS)
    names = [f"layers.{i // 2}.w (copy {i % 2 + 1} of 2)" for i in range(len(KEYS))]
    specs = replace(
        specs, matrices=tuple(replace(m, name=n) for m, n in zip(specs.matrices, names))
    )
    domains = ((0,), (2, 3), (0, 1, 2, 3))
    plan = solve(
        specs,
        Topology.flat(4, ranks_per_node=2),
        CostTable.analytic("h100"),
        layout=Layout.SHARDED,
        limits=OwnerLimits(
            fixed_bytes=(1 << 20,) * 4,
            domains=domains,
            domain_of=(0, *(1 + i % 2 for i in range(11))),
        ),
    )
    report = build_report(plan)
    text = " ".join(str(report).split())
    assert "state per rank: 1.0 MiB, with the parameters" in text
    assert "(copy " in text
    assert report.to_dict()["certificate"]["proven"]
    without = str(build_report(replace(plan, layout=Layout.REDUCED)))
    assert "with the parameters" not in without
