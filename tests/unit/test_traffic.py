"""What a plan says of the bytes of a step: by formula, by single messages, over links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dmuon.catalogue import model_specs
from dmuon.config import PlannerOptions
from dmuon.report.data import build_report
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable
from dmuon.scheduler.plan import OwnershipPlan, bucket_count
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import OwnerLimits
from dmuon.scheduler.topology import Topology
from dmuon.scheduler.traffic import traffic
from dmuon.types import Layout

H100 = ANALYTIC_DEVICES["h100"]


def planned(
    *shape: int,
    axes: tuple[str, ...] = ("node", "gpu"),
    layout: Layout = Layout.SHARDED,
    costs: CostTable | None = None,
    **how,
) -> OwnershipPlan:
    topology = Topology(shape, axes, shape[-1], "cuda")
    costs = costs or CostTable.analytic("h100", momentum=layout.keeps_state_at_owners)
    return solve(model_specs("llama3-8b"), topology, costs, layout=layout, **how)


ELEMENTS = sum(m.numel for m in planned(1, 2).specs.matrices)
ADAMW = sum(p.numel for p in planned(1, 2).specs.parameters) - ELEMENTS
REPLICATE = ("replicate", "shard")


@pytest.mark.parametrize(("shape", "axes"), [((4, 8), ("node", "gpu")), ((4, 8), REPLICATE)])
def test_bytes_follow_the_formula_on_fsdp_and_hsdp(shape, axes):
    replicas = shape[0] if axes is REPLICATE else 1
    world, shards = 32, 32 // replicas
    found = traffic(planned(*shape, axes=axes)).flows
    mean = sum(flow.handed.mean() for flow in found)
    expected = 2 * ELEMENTS / world * (2 * (shards - 1) / shards + replicas - 1)
    assert mean == pytest.approx(expected, rel=1e-9)
    for flow in found:
        assert (flow.inside[0] + flow.across[0]).sum() == pytest.approx(flow.handed.sum())
        for level in (flow.inside, flow.across):
            assert level[0].sum() == pytest.approx(level[1].sum()), "what is sent comes"
    near = [flow.across.any() for flow in found if flow.purpose != "replicate"]
    assert near == [replicas == 1] * 2, "a replica is a node"


def test_levels_are_those_of_single_messages():
    for how in ({}, {"options": PlannerOptions(co_owners=2)}):
        plan = planned(2, 4, axes=REPLICATE, **how)
        sent = np.zeros((2, 2, 8))  # (gather, scatter) x (inside, across)
        for batch in plan.batches:
            for i in batch.matrices:
                rows, cols = plan.specs.matrices[i].shape
                k, replica = len(batch.ranks), batch.owner // 4
                for n, owner in enumerate(batch.ranks):
                    for holder in range(4 * replica, 4 * replica + 4):
                        low, high = (holder % 4) * rows // 4, (holder % 4 + 1) * rows // 4
                        mine = (high - low) * cols / k
                        if rows > cols:
                            low, high = max(low, n * rows // k), min(high, (n + 1) * rows // k)
                            mine = max(0, high - low) * cols
                        if holder != owner:
                            sent[0, int(holder // 4 != owner // 4), holder] += 2 * mine
                            sent[1, int(holder // 4 != owner // 4), owner] += 2 * mine
        flows = {flow.purpose: flow for flow in traffic(plan).flows}
        for found, level in zip((flows["gather"], flows["scatter"]), sent):
            assert np.allclose(found.inside[0], level[0]) and np.allclose(found.across[0], level[1])
            assert np.allclose(found.handed, level.sum(0))
        assert not flows["replicate"].inside.any(), "replicas are nodes"
        assert np.allclose(flows["replicate"].across.sum((0, 1)), 2 * 2 * ELEMENTS)


def test_what_only_one_rank_may_own_stays_there_and_a_part_of_the_mesh_shares_alike():
    plan = planned(2, 4)
    half = tuple(range(4)), (5,)
    domain_of = tuple(i % 2 for i in range(len(plan.owners)))
    some = planned(2, 4, limits=OwnerLimits(domains=half, domain_of=domain_of))
    flows = traffic(some).flows
    shared = sum(m.numel for i, m in enumerate(some.specs.matrices) if i % 2 == 0)
    for flow in flows:
        assert flow.handed.sum() == pytest.approx(2 * shared * 3 / 4)
        assert not flow.handed[4:].any() and not flow.across.any()


def test_time_is_that_of_the_slower_link():
    plan = planned(4, 8)
    found = traffic(plan)
    flows = found.flows
    for flow in flows:
        inside, across = flow.inside.max() / H100.link, flow.across.max() / H100.network
        assert flow.ms(H100) == pytest.approx(1e3 * max(inside, across), rel=1e-3)
    assert found.ms == pytest.approx(sum(flow.ms(H100) for flow in flows))
    slow = traffic(planned(4, 8, costs=CostTable.analytic("h100").on_network("400Gb/node", 8)))
    assert slow.ms == pytest.approx(8 * found.ms)
    told = found.to_dict()
    assert [flow["purpose"] for flow in told["flows"]] == ["gather", "scatter"]
    assert told["flows"][0]["across"]["max"] == flows[0].across[0].max()
    text = " ".join(str(build_report(plan)).split())
    assert "a rank sends 806.0 MiB in a step (624.0 MiB to other nodes), 14.540 ms" in text
    # One answer to what computing hides: the simulator's.
    assert set(told) == {"ms", "flows"} and "hidden" not in text
    other = replace(plan, cost_source="mine")
    unknown = traffic(other)
    assert unknown.ms is None
    text = " ".join(str(build_report(other)).split())
    assert "MiB in a step (624.0 MiB to other nodes). dmuon simulate says how much of it" in text
    assert unknown.to_dict()["flows"][0]["bytes"] == told["flows"][0]["bytes"]
    alone = traffic(planned(1, 1))
    assert (alone.flows, alone.ms) == ((), 0)


@pytest.mark.parametrize(("layout", "expected"), [
    (Layout.REPLICATED, {("updates", "step"): 1.0}),
    (Layout.REDUCED, {
        ("updates", "step"): 1.0, ("gradients", "backward"): 1.0 + ADAMW / ELEMENTS,
    }),
    (Layout.DEDICATED, {
        ("weights", "forward"): 1.0, ("weights", "backward"): 1.0, ("gradients", "backward"): 1.0,
        ("weights to holders", "forward"): 1 / 8,
        ("gradients across replicas", "backward"): 1 / 8,
    }),
])  # fmt: skip
def test_what_other_layouts_hand_over(layout, expected):
    plan = planned(4, 8, layout=layout)
    found = traffic(plan)
    assert {(f.purpose, f.when): f.handed.mean() / (2 * ELEMENTS) for f in found.flows} == {
        key: pytest.approx(part) for key, part in expected.items()
    }
    text = " ".join(str(build_report(plan)).split())
    assert [f" {when} (" in text for when in ("step", "forward", "backward")] == [
        any(when == flow.when for flow in found.flows) for when in ("step", "forward", "backward")
    ]
    assert bool(found.ms) == (layout is not Layout.DEDICATED)
    if layout is Layout.DEDICATED:  # nothing in the step, and forward and backward are not known
        assert found.to_dict()["ms"] is None
        assert all(flow["ms"] > 0 for flow in found.to_dict()["flows"])
    if layout is Layout.REDUCED:  # AdamW's come back, those of matrices stay with their owners
        sent = sum((f.inside + f.across)[0].sum() for f in found.flows if f.when == "backward")
        assert sent == pytest.approx(2 * 31 * (ELEMENTS + 2 * ADAMW))


def test_buckets():
    assert [bucket_count(n << 20, 9, 32 << 20, None) for n in (0, 1, 4, 40, 400)] == [1, 1, 2, 4, 9]
    assert bucket_count(1, 9, 32 << 20, 4) == 4 and bucket_count(400 << 20, 1, 32 << 20, 4) == 1
