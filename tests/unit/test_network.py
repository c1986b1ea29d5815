"""What a plan chooses for its links, and the bytes that it reckons with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dmuon.catalogue import model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable, Rates
from dmuon.scheduler.network import job_of, planned
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.shards import evenly_sharded
from dmuon.scheduler.simulate import Machine, optimizer_ms
from dmuon.scheduler.specs import MatrixSpec, StateSizes
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError
from tests.unit.test_shards import specs_of

H100 = CostTable.analytic("h100", momentum=False)
HSDP = ("replicate", "shard")
RATES = Rates(1e9, 1e9, 1e9, 0.0, 0.0, 0.0)


def chosen(
    shape=(4, 8), nic="400Gb/node", layout=Layout.SHARDED, model="gpt2", solver="auto", axes=HSDP,
    each=0, **options,
) -> tuple[OwnershipPlan, float]:  # fmt: skip
    """A plan, and its simulated step."""
    each = each or shape[-1]
    topology, specs = Topology(shape, axes[-len(shape) :], each, "cuda"), model_specs(model)
    costs = H100.on_network(nic, each)
    shards = evenly_sharded(specs, topology, whole=layout is not Layout.SHARDED)
    how = layout, solver, PlannerOptions(**options), shards.limits(None)
    plan = planned(shards.specs, topology, costs, shards, *how)
    job = job_of(plan, shards, costs, Machine.of(costs, topology))
    return plan, optimizer_ms(job)


def copies(plan: OwnershipPlan) -> dict[int, int]:
    found: dict[int, int] = {}
    for batch in plan.batches:
        n = max(1, len(batch.copies))
        found[n] = found.get(n, 0) + len(batch.matrices)
    return found


def test_where_the_link_is_slow_replicas_compute_by_themselves():
    slow = chosen(nic="10Gb/node")[0]
    fast = chosen(nic="400Gb/gpu", model="llama3-8b")[0]
    assert copies(slow) == {4: 48}
    assert copies(fast) == {1: 224}, "computing once is less work"
    assert slow.step.link_ms < slow.step.work_ms < slow.step.once_ms
    for plan in (slow, fast):
        assert plan.step.ms <= min(plan.step.once_ms, plan.step.copied_ms) * (1 + 1e-9)
        assert certify(plan).ok and certify(plan).proven, certify(plan)


def on_cpus(nic: str, each: int, world: int = 4, **options) -> tuple[OwnershipPlan, float]:
    """DDP over nodes of CPUs, and its simulated step."""
    shapes = [(64, 64), (64, 64), (256, 64), (64, 256)] * 8
    specs = specs_of(shapes, [MatrixSpec(f"{i}", i, *s, "float32") for i, s in enumerate(shapes)])
    topology = Topology.flat(world, ranks_per_node=each)
    shards = evenly_sharded(specs, topology, whole=True)
    entries = {(64, 64, "float32"): {1: 2.0}, (64, 256, "float32"): {1: 4.0}}
    rates = Rates(1e11, 5e9, 4e9, 1e-6, 1e-4, 1e-10)
    device = ANALYTIC_DEVICES["cpu"]
    table = CostTable("made", entries, device, entry_origin="given", momentum=False, rates=rates)
    table = table.on_network(nic, each)
    how = Layout.REPLICATED, "auto", PlannerOptions(**options), shards.limits(None)
    plan = planned(specs, topology, table, shards, *how)
    return plan, optimizer_ms(job_of(plan, shards, table, Machine.of(table, topology)))


def test_between_the_ends_lies_a_mixture():
    """Of DDP over two nodes of CPUs: what a trial found by hand, at three speeds of the link."""
    found = [on_cpus(nic, 2)[0] for nic in ("0.0005Gb/node", "0.05Gb/node", "10Gb/node")]
    levels = [copies(plan) for plan in found]
    assert levels[0].keys() <= {2, 4} and levels[2].keys() == {1}
    assert len(levels[1]) > 1, "some are published across nodes, some are not"
    assert found[1].step.ms < 0.97 * min(found[1].step.once_ms, found[1].step.copied_ms)


@pytest.mark.parametrize(("solver", "redundancy"), [("auto", "auto"), ("round_robin", 1)])
def test_a_memory_cap_that_copies_do_not_fit_leaves_one_owner(solver, redundancy):
    """What variants keep lies with each copy; what all copies would take is left open."""
    topology, specs = Topology((4, 2), HSDP, 2, "cuda"), model_specs("gpt2")
    costs, shards = H100.on_network("10Gb/node", 2), evenly_sharded(specs, topology)
    kept = tuple(4 * matrix.rows for matrix in shards.specs.matrices)
    kept = replace(StateSizes.plain(shards.specs), at_owners=kept)

    def with_cap(cap, redundancy=redundancy):
        limits = shards.limits(cap, kept)
        options = PlannerOptions(redundancy=redundancy, owner_memory_bytes=cap)
        return planned(
            shards.specs, topology, costs, shards, Layout.SHARDED, solver, options, limits
        )

    every, once = max(with_cap(None, 4).state_bytes), with_cap(None, 1)
    assert max(once.state_bytes) < every - 1
    for cap in np.linspace(max(once.state_bytes), every - 1, 3)[1:]:  # at the least few plans fit
        plan = with_cap(int(cap))
        assert max(plan.state_bytes) <= cap and plan.step.copied_ms is None
    assert redundancy == "auto" or copies(plan) == copies(once)
    with pytest.raises(PlanError, match=r"does not fit all copies, with which rank"):
        with_cap(every - 1, 4)


def test_rings_where_several_nodes_have_slow_links():
    """On fast links their turns take longer, and between two nodes there is one way."""
    slow, fast, two = (
        on_cpus(nic, each, redundancy=1)[0]
        for nic, each in (("0.05Gb/node", 1), ("10Gb/node", 1), ("0.05Gb/node", 2))
    )
    assert (slow.rings, fast.rings, two.rings) == (True, False, False)
    assert slow.fingerprint() != replace(slow, rings=False).fingerprint()
    assert OwnershipPlan.from_json(slow.to_json()).rings
    assert chosen((4, 8), "10Gb/node", Layout.REPLICATED)[0].rings is False, "NCCL has its own"


@pytest.mark.parametrize("layout", [Layout.SHARDED, Layout.REPLICATED])
@pytest.mark.parametrize("redundancy", [1, 4])
def test_what_is_asked_for_is_planned(layout, redundancy):
    plan, _ = chosen(layout=layout, redundancy=redundancy)
    assert copies(plan) == {redundancy: 48}
    assert OwnershipPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="redundancy=3: so many parts of this mesh"):
        chosen(layout=layout, redundancy=3)


@pytest.mark.parametrize(("model", "shape", "nic", "each"), [
    ("gpt2", (2, 2), "1Gb/node", 2),
    ("gpt2", (4, 2), "400Gb/node", 2),  # buckets for copies
    ("qwen2.5-0.5b", (16,), "400Gb/gpu", 8),
])  # fmt: skip
def test_no_solver_has_a_shorter_step(model, shape, nic, each):
    """Though a plan with the best makespan may have the longer one."""
    ms = {
        solver: chosen(shape, nic, solver=solver, each=each, model=model)[1]
        for solver in ("auto", "greedy", "round_robin")
    }
    assert ms["auto"] <= min(ms.values()) * (1 + 1e-9), ms
