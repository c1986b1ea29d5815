"""Matrices that parts of the mesh compute by themselves, and updates that cross to a node once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import dmuon
from dmuon.measure import measured_costs, on_links
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.topology import Topology
from dmuon.tools.parallel_models import ParallelModel
from dmuon.types import CorruptionError, DmuonError
from tests.distributed.compare import assert_bitwise, gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, Layout, on
from tests.distributed.models import Net
from tests.distributed.test_collective_order import Recorders, assert_one_order
from tests.distributed.twins import both, laid_out
from tests.internals import C10dTransport, LinkTimer, Orthogonalizer, Turns, parts_of

# (layout, ranks per node): replicas on nodes of their own, and several on a node.
LAID: dict[str, tuple[Layout, int]] = {
    "ddp": (replace(on("ddp", 4), build=ParallelModel), 2),
    "ddp alone": (replace(on("ddp", 4), build=ParallelModel), 1),
    "hsdp": (LAYOUTS["hsdp"], 2),
}


def planner(case: str, **more: Any) -> dmuon.PlannerOptions:
    return dmuon.PlannerOptions(ranks_per_node=LAID[case][1], **more)


def asked(case: str, way: str = "mixed", **more: Any) -> dict[str, Any]:
    """Arguments for a plan in which all matrices, or in turn some, are computed in each replica, or
    on each node, or once."""
    own = dmuon.dedicate_params(laid_out(LAID[case][0])[0], planner=planner(case, max_batch=2))
    plan, shards, batches = own.plan, own.runtime.shards, []
    own.close()
    for n, one in enumerate(plan.batches):
        known = parts_of(shards.replicas(one.matrices[0]), plan.topology)
        of = {"once": [], "nodes": known[:1], "replicas": known[-1:]}.get(way)
        if of is None:
            of = [[], known[:1], known[-1:]][n % 3]
        copies = tuple(ranks[(n + k) % len(ranks)] for parts in of for k, ranks in enumerate(parts))
        batches.append(replace(one, owner=copies[0], copies=copies) if copies else one)
    plan = replace(plan, batches=tuple(batches))
    return {"plan": plan, "solver": "auto", "planner": planner(case, max_batch=2), **more}


def levels(plan: OwnershipPlan) -> set[int]:
    return {len(batch.copies) for batch in plan.batches}


@distributed(4)
def test_copies_have_the_bits_of_one_owner(rank, world):
    """Where a kernel gives the same bits whatever is beside it, in each redundancy."""
    kernels = dmuon.KernelOptions(method="gram", backend="torch")
    found = []
    for of in ("once", "mixed"):
        request = asked("hsdp", of)
        whole = tuple(replace(one, kernel="") for one in request["plan"].batches)
        request["plan"] = replace(request["plan"], batches=whole)
        with both(layout=LAID["hsdp"][0], request=request | {"kernels": kernels}) as pair:
            pair.train(range(3))
            pair.check()
            found.append(pair.whole())
    assert_bitwise(*found)


@distributed(4)
def test_rings_between_nodes_change_no_bit(rank, world):
    """And they are among ranks of more than two nodes, each on a node of its own here."""
    honest, found, noted = C10dTransport.all_gather, [], set()

    def noting(self, parts, *, tag, by="messages"):
        noted.add((self.world > 2, by == "ring"))
        return honest(self, parts, tag=tag, by=by)

    for of in (False, True):
        request = asked("ddp alone", "mixed")
        request["plan"] = replace(request["plan"], rings=of)
        noted.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(C10dTransport, "all_gather", noting)
            with both(layout=LAID["ddp alone"][0], request=request) as pair:
                pair.train(range(3))
                pair.check()
                found.append(pair.whole())
        assert (True, of) in noted and noted <= {(True, of), (False, False)}, noted
    assert_bitwise(*found)


@distributed(4)
def test_all_ranks_follow_the_order_of_the_plan(rank, world):
    """Over all process groups, late ranks or not."""
    recorders, orders = Recorders(), []
    with both(layout=LAID["ddp"][0], request=asked("ddp"), transport=recorders) as pair:
        for step in range(3):
            recorders.log.clear()
            pair.backward(step)
            if rank == step:
                time.sleep(0.1)
            pair.step()
            orders.append([(number, event) for number, _, event in recorders.log])
            sized = [(n, r, replace(e, nbytes=0)) for n, r, e in recorders.log]
            assert_one_order(gathered(sized))
        assert orders[0] == orders[1] == orders[2]
        assert len({number for number, _ in orders[0]}) > 1, "several process groups"


@distributed(4)
def test_no_byte_crosses_to_a_node_twice(rank, world):
    """Counted on all ranks: each node gets what its own ranks, or replicas, did not compute."""
    (laid, each), recorders = LAID["ddp"], Recorders()
    with both(layout=laid, request=asked("ddp", "once"), transport=recorders) as pair:
        recorders.log.clear()
        pair.train_alone([0])
        pair.opt.synchronize()
        came = 0.0
        for _, ranks, event in recorders.log:
            if event.op == "all_gather" and len({r // each for r in ranks}) > 1:
                came += event.nbytes * (len(ranks) - 1) / len(ranks)  # in the mean of these ranks
        whole = 4 * sum(m.numel for m in pair.own.plan.specs.matrices)
    assert sum(gathered(came)) == pytest.approx((world // each - 1) * whole, rel=1e-9)


@distributed(4)
def test_owners_publish_to_nodes_and_then_inside_them(rank, world):
    """In steps of all matrices, and of some."""
    recorders = Recorders()
    request = {"planner": dmuon.PlannerOptions(ranks_per_node=2, max_batch=1)}
    case = {"options": {"publish_bucket_bytes": 2048}, "request": request}
    with both(Net, "reduced", transport=recorders, **case) as pair:
        recorders.log.clear()
        pair.prepare = lambda model, step, rank: setattr(model, "use_spare", step == 2)
        pair.train(range(4))
        pair.opt.synchronize()
        came = [ranks for _, ranks, event in recorders.log if event.tag == "updates"]
        among = {tuple(ranks) for ranks in came}
        node, column = rank // 2 * 2, rank % 2
        assert among == {(node, node + 1), (column, column + 2)}, among
        assert came.count((node, node + 1)) == came.count((column, column + 2)) >= 6
        pair.check()
        assert_one_order(gathered(recorders.log))


@distributed(4)
def test_what_a_failed_step_sent_is_waited_for_and_forgotten(rank, world):
    """Before gradients take its memory; the updates that came are not applied later."""
    honest, sent = Turns.send, []

    def failing(self, *args):
        if len(sent) == 2:
            raise ValueError("planted")
        sent.append(self)
        return honest(self, *args)

    request = {"planner": dmuon.PlannerOptions(ranks_per_node=2, max_batch=1)}
    case = {"options": {"publish_bucket_bytes": 2048}, "request": request}
    with both(Net, "reduced", **case) as pair:
        pair.train_alone(range(2))
        pair.opt.synchronize()
        exchanges = pair.own.runtime._exchanges
        buckets = [bucket for each in exchanges for bucket in each.pipeline.buckets]
        pair.backward(2)
        before = pair.whole()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Turns, "send", failing)
            with pytest.raises(ValueError, match="planted"):
                pair.opt.step()
        assert any(bucket.works for bucket in buckets), "something is under way"
        pair.opt.synchronize()
        assert_bitwise(before, pair.whole())
        pair.opt.zero_grad()
        pair.train_alone(range(3, 5))
        pair.opt.synchronize()
        assert not any(bucket.works for bucket in buckets)
        assert not torch.equal(*(next(iter(of.values())) for of in (before, pair.whole())))


@distributed(4)
def test_a_copy_that_computes_wrongly_is_found(rank, world):
    honest, request = Orthogonalizer.run, asked("hsdp", "replicas")

    def broken(self, call, operand):
        update = honest(self, call, operand)
        return update.mul_(1.5) if rank == 3 else update

    with (
        both(layout=LAID["hsdp"][0], request=request, only={"verify_every": 1}) as pair,
        mock.patch.object(Orthogonalizer, "run", broken),
        pytest.raises(CorruptionError, match="rank"),
    ):
        pair.train_alone(range(8))


@distributed(4)
def test_what_the_mesh_cannot_do_is_refused(rank, world):
    model = laid_out(LAID["hsdp"][0])[0]
    with pytest.raises(DmuonError, match="redundancy=4: so many parts"):
        dmuon.dedicate_params(model, planner=planner("hsdp", redundancy=4))
    request = asked("ddp", "replicas")
    request["planner"] = replace(request["planner"], redundancy=1)
    with pytest.raises(DmuonError, match=r"redundancy=1, but the saved plan .* 4 times"):
        dmuon.dedicate_params(laid_out(LAID["ddp"][0])[0], **request)


@distributed(4)
def test_a_saved_plan_with_copies_in_wrong_places_is_refused(rank, world):
    """Ranks 0 and 1 have one replica in HSDP."""
    own = dmuon.dedicate_params(laid_out("hsdp")[0])
    first, *others = own.plan.batches
    own.close()
    for copies in ((0, 1), (0, 2, 3)):
        wrong = replace(first, owner=copies[0], copies=copies)
        plan = replace(own.plan, batches=(wrong, *others))
        with pytest.raises(DmuonError, match=r"compute .* expected one rank of each part"):
            dmuon.dedicate_params(laid_out("hsdp")[0], plan=plan)


@distributed(4)
def test_ranks_that_round_otherwise_compute_nothing_twice(rank, world):
    """Two kinds of CPU: their copies would drift apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmuon.devices.Cpu.name", lambda self: f"CPU {'AB'[rank // 3]}")
        model = laid_out(LAID["hsdp"][0])[0]
        own = dmuon.dedicate_params(model, planner=planner("hsdp", redundancy=2))
        assert levels(own.plan) == {0}
        assert (
            "redundancy 1, because ranks would not compute the same bits: CPU A (3), CPU B (1)"
            in (str(own.report()).replace("\n", " ").replace("  ", " "))
        )
        own.close()
        with pytest.raises(
            DmuonError, match="saved plan several ranks compute a matrix, and ranks"
        ):
            dmuon.dedicate_params(laid_out(LAID["hsdp"][0])[0], **asked("hsdp", "replicas"))


@distributed(4)
def test_links_that_are_given_are_reckoned_with(rank, world, tmp_path):
    """On CPUs beside what their cores do for sending, which is measured."""
    found = []
    for links in ("0.0001Gb/node", "100Gb/node"):
        model = laid_out(LAID["ddp"][0])[0]
        asked_for = planner("ddp", links=links, cache_dir=str(tmp_path))
        with pytest.MonkeyPatch.context() as patch:  # other tests have analytic ones
            patch.setattr("dmuon.api.measured_costs", measured_costs)
            own = dmuon.dedicate_params(model, planner=asked_for, costs="measured")
        assert own.plan.step is not None, own.plan.search.note
        assert own.plan.cost_source.endswith(f", nic {links}")
        found.append(own.plan.step)
        own.close()
    assert found[0].once_ms > 2 * found[1].once_ms
    for wrong in ("400", "0Gb/node", "Measured", ""):
        with pytest.raises(ValueError, match=r"links must be 'measured', or bits per second"):
            planner("ddp", links=wrong)
    model = laid_out(LAID["ddp"][0])[0]
    own = dmuon.dedicate_params(
        model, planner=planner("ddp", links="1Gb/node"), costs="analytic:cpu"
    )
    assert own.plan.search.note.startswith("links are ignored: analytic:cpu")
    own.close()


@distributed(4)
def test_links_are_measured_kept_and_checked(rank, world, tmp_path):
    options = dmuon.PlannerOptions(cache_dir=str(tmp_path))
    transport, cpu = C10dTransport(range(world)), torch.device("cpu")
    topology = Topology.flat(world, ranks_per_node=2)
    row = CostTable("measured on this", device=ANALYTIC_DEVICES["cpu"], momentum=False)

    def measured(limit: float = 1.0) -> CostTable:
        began = time.monotonic()
        found = on_links(row, transport, cpu, options, topology)
        assert len({one.to_json() for one in transport.gather_objects(found)}) == 1
        assert time.monotonic() - began < 10 * limit  # of a machine that others use, too
        return found

    first = measured()
    assert "nic " in first.source and first.rates is not None
    assert 1e6 < first.device.network < 1e12 and 0 < first.rates.turn_s < 0.1
    assert len([*tmp_path.glob("*.json")]) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinkTimer, "are_as", lambda self, known: True)
        patch.setattr(LinkTimer, "measure", lambda self: pytest.fail("it is known"))
        assert measured() == first
    with pytest.MonkeyPatch.context() as patch:  # another network under the same names
        honest = LinkTimer.exchange
        slower = 1, 20  # inside nodes, and across
        patch.setattr(LinkTimer, "exchange", lambda *of: slower[of[1]] * honest(*of))
        assert measured().device.network < first.device.network / 5
    transport.close()
