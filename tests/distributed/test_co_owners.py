"""Matrices that several ranks share, against Muon in one process."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.tools.parallel_models import CASES, ParallelModel, batch, loss_of
from dmuon.types import ConsensusError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, assert_close, gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, Layout, on, shared
from tests.distributed.test_collective_order import Recorders, assert_one_order
from tests.distributed.twins import MUON, Trained, both, follow, laid_out, planned
from tests.internals import ParamsRuntime

STEPS = 3
LAID: dict[str, Layout] = {
    **{n: laid for n, laid in LAYOUTS.items() if isinstance(laid.options, dmuon.ShardedOptions)},
    "hsdp 2x4": on("hsdp", 2, 4),
    "tp+fsdp8": on("tp+fsdp", 4, 2),
    "ddp4": replace(on("ddp", 4), build=ParallelModel),
}


def plan_of(case: str, k: int, **planner: Any) -> OwnershipPlan:
    own = dmuon.dedicate_params(laid_out(LAID[case])[0], **shared(k, **planner))
    own.close()
    return own.plan


def planned_anew(case: str, k: int, change: Any, **planner: Any) -> OwnershipPlan:
    """The plan with so many co-owners, its batches changed."""
    plan = plan_of(case, k, **planner)
    return replace(plan, batches=tuple(map(change, plan.batches)))


# On every mesh as many co-owners as there are ranks, and on half of those of up to 4 ranks pairs;
# of some co-owners also share the products of short side x short side.
NAMES = [case.name for case in CASES]
MESHES = [(name, min(8, LAID[name].world), n % 2 == 0) for n, name in enumerate(NAMES)]
MESHES += [(name, 2, n % 4 == 1) for n, name in enumerate(NAMES) if n % 2 and LAID[name].world < 8]
MESHES += [
    *(("hsdp 2x4", 2, True), ("tp+fsdp8", 4, False), ("ddp4", 2, True), ("ddp4", 4, False)),
]


@pytest.mark.parametrize(
    ("case", "k", "is_split", "world"), [(*mesh, LAID[mesh[0]].world) for mesh in MESHES]
)
@distributed()
def test_every_mesh_is_equal_to_the_reference(rank, world, case, k, is_split):
    plan = planned_anew(case, k, lambda b: replace(b, split=is_split and bool(b.co_owners)))
    assert k in {len(batch.ranks) for batch in plan.batches}
    follow(layout=LAID[case], request={"plan": plan, "solver": "auto"}, steps=STEPS)


@pytest.mark.parametrize("case", ["fsdp4", "hsdp", "tp+fsdp"])
@distributed(4)
def test_matrices_of_one_shape_with_different_numbers_of_co_owners(rank, world, case):
    numbers = iter(range(1000))
    limits = plan_of(case, 2, max_batch=1).limits

    def change(batch: Any) -> Any:
        n, of = next(numbers), -1
        if limits.domains:
            of = limits.domain_of[batch.matrices[0]]
        is_everyone = of < 0 or len(limits.domains[of]) == world
        if not batch.co_owners or n % 3 == 1 or not is_everyone:
            return batch
        ranks = (0, 1, 2, 3) if n % 3 else ()
        return replace(batch, owner=ranks[0] if ranks else 3, co_owners=ranks)

    plan = planned_anew(case, 2, change, max_batch=1)
    kinds = {(plan.specs.matrices[b.matrices[0]].key, len(b.ranks)) for b in plan.batches}
    assert any({(key, 1), (key, 2), (key, 4)} <= kinds for key, _ in kinds)
    follow(layout=LAID[case], request={"plan": plan, "solver": "auto"}, steps=STEPS)


@distributed(4)
def test_distributed_data_parallel_over_a_part_of_the_ranks(rank, world):
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
    ddp = partial(DistributedDataParallel, process_group=group)
    case = {"mesh": mesh, "wrap": ddp, "seed": 100 + rank % 2, "request": shared(2)}
    with both(ParallelModel, "ddp", **case) as pair:
        assert pair.own.plan.has_co_owners and pair.data_world == 2
        pair.train(range(4))
        pair.check()
    dist.destroy_process_group(group)


# ---- what may be late or saved ----------------------------------------------------------------


@distributed(4)
def test_a_checkpoint_moves_between_numbers_of_co_owners(rank, world, tmp_path):
    whole = {}
    for k, first, last in ((4, 0, 3), ("off", 3, 5), (2, 3, 5)):
        torch.manual_seed(0)
        trained = Trained(LAYOUTS["hsdp"], ParallelModel(), planning=shared(k), **MUON)
        assert trained.opt.report() and trained.opt.ownership.plan.has_co_owners == (k != "off")
        if first:
            trained.load(str(tmp_path))
        for step in range(first, last):
            loss_of(trained.model, batch(step, rank)).backward()
            trained.opt.step()
            trained.opt.zero_grad()
        if not first:
            trained.save(str(tmp_path))
        whole[k] = trained.weights()
        trained.close()
    assert_close(whole[2], whole["off"])


@contextmanager
def recorded(case: str, k: int, max_batch: int = 16):
    """A model whose collectives, those of co-owners too, are noted in one log."""
    recorders = Recorders()
    with both(layout=case, request=shared(k, max_batch=max_batch), transport=recorders) as pair:
        recorders.log.clear()
        yield pair, recorders.log


@distributed(4)
def test_every_group_has_its_first_all_to_all_in_planning(rank, world):
    """On an accelerator, and in one order; a step that had it could wait for another's."""
    for is_accelerator in (True, False):
        recorders = Recorders()
        with host_cannot_read() if is_accelerator else nullcontext():
            own, _ = planned(laid_out("fsdp4")[0], recorders, **shared(2))
            log = [one for one in recorders.log if one[2].op == "all_to_all"]
            found = [(number, event.tag) for number, _, event in log]
            numbers = range(1, recorders.made + 1)
            assert found == [(n, "connecting") for n in numbers] * is_accelerator
            assert len(numbers) > 1
            assert_one_order(gathered(log))
        own.close()


@pytest.mark.parametrize("case", ["fsdp4", "hsdp", "tp+fsdp"])
@distributed(4)
def test_all_ranks_follow_the_order_of_the_plan(rank, world, case):
    with recorded(case, 2, max_batch=1) as (pair, log):
        orders = []
        for step in range(3):
            log.clear()
            pair.backward(step)
            if rank == step:  # late, and without some gradients
                time.sleep(0.1)
                pair.model.get_parameter("blocks.0.mix.weight").grad = None
            pair.step()
            orders.append([(number, event) for number, _, event in log])
            tags = {event.tag for _, _, event in log}
            assert {"gram", "gather", "scatter"} <= tags
            # Co-owners send each other as much, in other all-to-alls each an amount of its own.
            alike = ("gram", "rows")
            sized = [(n, r, replace(e, nbytes=e.nbytes * (e.tag in alike))) for n, r, e in log]
            assert_one_order(gathered(sized))
        assert orders[0] == orders[1] == orders[2]


@distributed(4)
def test_the_sums_of_all_are_under_way_before_the_first_is_waited_for(rank, world):
    log, honest = [], ParamsRuntime.exchange

    def exchange(self, ranks, to, source, tag):
        log.append("sent")
        work = honest(self, ranks, to, source, tag)

        class Waited:
            def wait(self):
                log.append("waited")
                work.wait()

        return Waited()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamsRuntime, "exchange", exchange)
        with both(layout="fsdp4", request=shared(4, max_batch=1)) as pair:
            pair.train_alone([0])
            count = pair.own.runtime.bound().buckets[0].shared
    assert count > 2
    assert log[:count] == ["sent"] * count
    # Then in rounds: each waits for its last exchange and sends the next one.
    assert log[count:][: 2 * count] == ["waited", "sent"] * count


@distributed(2)
def test_a_refusal_reaches_co_owners_where_no_host_can_read(rank, world):
    """The others learn it on the way: the step changes nothing, and the next one raises."""
    case = {"request": shared(2), "only": {"publish": "sync"}}
    with host_cannot_read(), both(layout="fsdp2", **case) as pair:
        assert pair.own.plan.has_co_owners
        before = pair.whole()
        pair.backward(0)
        if rank == 1:
            pair.opt.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match="lr must be") if rank == 1 else nullcontext():
            pair.opt.step()
        pair.opt.param_groups[0]["lr"] = MUON["lr"]
        assert_bitwise(pair.whole(), before)
        with pytest.raises(ConsensusError, match="rank 1 refuses"):
            pair.opt.step()
        pair.opt.step()  # and then it goes on
        after = pair.whole()
        assert not any(torch.equal(before[name], after[name]) for name in before)


@distributed(2)
def test_slices_run_in_the_gram_form_and_stats_say_so(rank, world):
    with both(layout="fsdp2", request=shared(2)) as pair:
        pair.train_alone([0])
        ran = pair.opt.stats()["kernels"]["ran"]
        assert ran and all("gram" in kernel and "2 co-owners" in kernel for kernel in ran.values())
        assert set(pair.own.owned_by(0)) == set(pair.own.owned_by(1))
        assert "co-owners" in str(pair.own.report())
