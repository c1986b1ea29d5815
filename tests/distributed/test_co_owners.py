"""Matrices that several ranks share, against Muon in one process."""

from __future__ import annotations

import copy
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.api import Given, Request, assemble
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.transport import C10dTransport
from dmuon.config import PlannerOptions
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.topology import Topology
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from dmuon.types import ConsensusError
from tests.accelerator import host_cannot_read
from tests.distributed.harness import Pools, distributed
from tests.distributed.owners import gathered
from tests.distributed.sharded import (
    BY_NAME,
    MUON,
    average_gradients,
    dedicated,
    pair,
    reference,
    train,
)
from tests.distributed.test_collective_order import Late, Recorders, assert_one_order

STEPS = 5
ON_EIGHT = {
    "fsdp8": replace(BY_NAME["fsdp4"], mesh_shape=(8,)),
    "hsdp 2x4": replace(BY_NAME["hsdp"], mesh_shape=(2, 4)),
    "tp+fsdp8": replace(BY_NAME["tp+fsdp"], mesh_shape=(4, 2)),
}


def shared(k: int) -> PlannerOptions:
    return PlannerOptions(co_owners=k)


def split(plan: OwnershipPlan, is_split: bool) -> OwnershipPlan:
    """The same plan, in which co-owners also share the products of short side x short side."""
    batches = tuple(replace(b, split=is_split and bool(b.co_owners)) for b in plan.batches)
    return replace(plan, batches=batches)


def assert_equal_to_reference(
    rank: int, world: int, *, case: str, k: int, is_split: bool, **settings: Any
) -> None:
    both = pair(ON_EIGHT.get(case) or BY_NAME[case])
    own = dmuon.dedicate_params(both.model, planner=shared(k))
    plan = split(own.plan, is_split)
    own.close()
    sizes = {len(batch.ranks) for batch in plan.batches}
    assert k in sizes, sizes
    train(both, STEPS, plan=plan, **settings)
    worst, where = both.difference()
    assert worst <= 1e-5, (worst, where)


assert_equal_to_reference.body = assert_equal_to_reference  # type: ignore[attr-defined]


NUMBERED = list(enumerate(BY_NAME.items()))
# On every mesh as many co-owners as there are ranks, and on half of those of up to 4 ranks pairs.
MESHES = [(name, min(8, case.world), n % 2 == 0) for n, (name, case) in NUMBERED]
MESHES += [(name, 2, n % 4 == 1) for n, (name, case) in NUMBERED if n % 2 and case.world < 8]
MESHES += [
    ("fsdp8", 4, False),
    ("hsdp 2x4", 2, True),
    ("tp+fsdp8", 4, True),
]


@pytest.mark.parametrize(("case", "k", "is_split"), MESHES)
def test_every_mesh_is_equal_to_the_reference(pools: Pools, case: str, k: int, is_split: bool):
    kwargs = {"case": case, "k": k, "is_split": is_split}
    pools((ON_EIGHT.get(case) or BY_NAME[case]).world).run(
        __name__, "assert_equal_to_reference", kwargs
    )


@pytest.mark.parametrize("case", ["fsdp4", "hsdp", "tp+fsdp"])
@distributed(4)
def test_matrices_of_one_shape_with_different_numbers_of_co_owners(rank, world, case):
    both = pair(case)
    planner = PlannerOptions(co_owners=2, max_batch=1)
    own = dmuon.dedicate_params(both.model, planner=planner)
    limits, found = own.plan.limits, []
    for n, batch_ in enumerate(own.plan.batches):
        of = limits.domain_of[batch_.matrices[0]] if limits.domains else -1
        is_everyone = of < 0 or len(limits.domains[of]) == world
        if batch_.co_owners and n % 3 != 1 and is_everyone:
            ranks = (0, 1, 2, 3) if n % 3 else ()
            batch_ = replace(batch_, owner=ranks[0] if ranks else 3, co_owners=ranks)
        found.append(batch_)
    plan = replace(own.plan, batches=tuple(found))
    own.close()
    kinds = {(plan.specs.matrices[b.matrices[0]].key, len(b.ranks)) for b in plan.batches}
    assert any({(key, 1), (key, 2), (key, 4)} <= kinds for key, _ in kinds)
    train(both, STEPS, plan=plan)
    assert both.difference()[0] <= 1e-5, both.difference()


@pytest.mark.parametrize(
    ("world", "k", "is_split"), [(4, 2, True), (4, 4, False), (8, 2, False), (8, 4, True)]
)
@distributed()
def test_distributed_data_parallel(rank, world, k, is_split):
    torch.manual_seed(0)
    model = ParallelModel()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    own = dmuon.dedicate_params(ddp, planner=shared(k))
    plan = split(own.plan, is_split)
    own.close()
    own = dmuon.dedicate_params(ddp, plan=plan)
    opt, ref = dmuon.Muon(ddp, **MUON), reference(twin)
    for step in range(STEPS):
        loss_of(ddp, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        loss_of(twin, batch(step, rank)).backward()
        average_gradients(twin)
        ref.step()
        ref.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    own.close()


# ---- what may be missing, late or saved -------------------------------------------------------


@distributed(4)
def test_a_rank_without_a_gradient_and_a_matrix_without_any(rank, world):
    both = pair("fsdp4")
    with dedicated(both.model, planner=shared(4)) as (_, opt):
        ref = reference(both.twin)
        for step in range(4):
            both.both_backward(step)
            params = dict(both.model.named_parameters())
            twins = dict(both.twin.named_parameters())
            lost = f"blocks.{step % 2}.mix.weight"
            if rank == step:
                params[lost].grad = None  # counts as zeros, because other ranks have one
            chunks = twins[lost].grad.chunk(world)
            if step < len(chunks):
                chunks[step].zero_()
            nowhere = f"blocks.{step % 2}.mlp.up.weight"
            params[nowhere].grad = twins[nowhere].grad = None
            opt.step()
            ref.step()
            opt.zero_grad()
            ref.zero_grad()
        opt.synchronize()
        assert both.difference()[0] <= 1e-5, both.difference()


@pytest.mark.parametrize("period", [3, dmuon.LinearPeriod(2, 4, 6)], ids=["3", "linear"])
@distributed(4)
def test_block_steps_between_full_ones(rank, world, period):
    """Co-owners change nothing but who computes: block steps are the same, bit for bit."""
    weights = {}
    for k in ("off", 4):
        both = pair("fsdp4")
        with dedicated(both.model, planner=PlannerOptions(co_owners=k), period=period) as (_, opt):
            full = []
            for step in range(7):
                both.backward(step)
                opt.step()
                opt.zero_grad()
                full.append(opt.stats()["full_step"])
            opt.synchronize()
            assert True in full and False in full
            weights[k] = both.whole()
    for name, weight in weights["off"].items():
        torch.testing.assert_close(weights[4][name], weight, rtol=0, atol=1e-5)


@distributed(4)
def test_a_checkpoint_moves_between_numbers_of_co_owners(rank, world):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    whole = {}
    for k, first, last in ((4, 0, 3), ("off", 3, 5), (2, 3, 5)):
        both = pair("hsdp")
        with dedicated(both.model, planner=PlannerOptions(co_owners=k)) as (own, opt):
            if first:
                model_state, state = get_state_dict(both.model, opt)
                saved = {"model": model_state, "optimizer": state}
                dcp.load(saved, checkpoint_id=folder[0])
                set_state_dict(
                    both.model, opt, model_state_dict=saved["model"],
                    optim_state_dict=saved["optimizer"],
                )  # fmt: skip
            for step in range(first, last):
                both.backward(step)
                opt.step()
                opt.zero_grad()
            opt.synchronize()
            assert own.plan.has_co_owners == (k != "off")
            if not first:
                model_state, state = get_state_dict(both.model, opt)
                dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
            whole[k] = both.whole()
    for name, weight in whole["off"].items():
        torch.testing.assert_close(whole[2][name], weight, rtol=0, atol=1e-5)


@contextmanager
def recorded(case: str, k: int, max_batch: int = 16):
    """A model whose collectives, those of co-owners too, are noted in one log."""
    both, recorders = pair(case), Recorders(0, Late)
    inner = C10dTransport(list(range(dist.get_world_size())))
    wrapped = recorders(inner)
    planner = PlannerOptions(co_owners=k, max_batch=max_batch)
    own = assemble(
        Given(both.model),
        Request(planner=planner, costs="analytic"),
        wrapped,
        lambda: Topology.flat(wrapped.world),
        lambda partition: recorders(inner.subgroup(partition)),
    )
    try:
        opt = dmuon.Muon(both.model, **MUON)
        recorders.log.clear()
        yield both, opt, recorders.log
    finally:
        own.close()


@distributed(4)
def test_every_group_has_its_first_all_to_all_in_planning(rank, world):
    """On an accelerator, and in one order; a step that had it could wait for another's."""
    for is_accelerator in (True, False):
        recorders, both = Recorders(0, Late), pair("fsdp4")
        inner = C10dTransport(list(range(world)))
        with host_cannot_read() if is_accelerator else nullcontext():
            own = assemble(
                Given(both.model),
                Request(planner=PlannerOptions(co_owners=2), costs="analytic"),
                recorders(inner),
                lambda: Topology.flat(world),
                lambda partition, inner=inner, to=recorders: to(inner.subgroup(partition)),
            )
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
    with recorded(case, 2, max_batch=1) as (both, opt, log):
        orders = []
        for step in range(3):
            log.clear()
            both.backward(step)
            if rank == step:  # late, and without some gradients
                time.sleep(0.1)
                both.model.get_parameter("blocks.0.mix.weight").grad = None
            opt.step()
            opt.zero_grad()
            orders.append([(number, event) for number, _, event in log])
            tags = {event.tag for _, _, event in log}
            assert {"gram", "gather", "scatter"} <= tags
            # Co-owners send each other as much, in other all-to-alls each an amount of its own.
            own = {"gram", "rows"}
            alike = [e.nbytes * (e.tag in own) for _, _, e in log]
            sized = [
                (n, r, replace(e, nbytes=size)) for (n, r, e), size in zip(log, alike, strict=True)
            ]
            assert_one_order(gathered(sized))
        assert orders[0] == orders[1] == orders[2]


@distributed(4)
def test_the_sums_of_all_are_under_way_before_the_first_is_waited_for(rank, world):
    both, log = pair("fsdp4"), []
    honest = ShardedRuntime.exchange

    def exchange(self, ranks, to, source, tag):
        log.append("sent")
        work = honest(self, ranks, to, source, tag)

        class Waited:
            def wait(self):
                log.append("waited")
                work.wait()

        return Waited()

    planner = PlannerOptions(co_owners=4, max_batch=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedRuntime, "exchange", exchange)
        with dedicated(both.model, planner=planner) as (own, opt):
            both.backward(0)
            opt.step()
            count = own.runtime.bound().buckets[0].shared
    assert count > 2
    assert log[:count] == ["sent"] * count
    # Then in rounds: each waits for its last exchange and sends the next one.
    assert log[count:][: 2 * count] == ["waited", "sent"] * count


@distributed(2)
def test_a_refusal_reaches_co_owners_where_no_host_can_read(rank, world):
    """The others learn it on the way: the step changes nothing, and the next one raises."""
    with host_cannot_read():
        both = pair("fsdp2")
        with dedicated(both.model, planner=shared(2), publish="sync") as (own, opt):
            assert own.plan.has_co_owners
            before = both.whole()
            both.backward(0)
            if rank == 1:
                opt.param_groups[0]["lr"] = -1.0
            with pytest.raises(ValueError, match="lr must be") if rank == 1 else nullcontext():
                opt.step()
            opt.param_groups[0]["lr"] = MUON["lr"]
            after = both.whole()
            assert all(torch.equal(before[name], after[name]) for name in before)
            with pytest.raises(ConsensusError, match="rank 1 refuses"):
                opt.step()
            opt.step()  # and then it goes on
            after = both.whole()
            assert not any(torch.equal(before[name], after[name]) for name in before)


# ---- what is refused -------------------------------------------------------------------------


@distributed(2)
def test_layouts_and_kernels_that_cannot_share_say_why(rank, world):
    torch.manual_seed(0)
    for layout in ("dedicated", "replicated"):
        options = dmuon.ReplicatedOptions(reduce_to_owner=True) if layout != "dedicated" else None
        with pytest.raises(ValueError, match="lie with one owner"):
            dmuon.dedicate_params(
                ParallelModel(), layout=layout, options=options, planner=shared(2)
            )
    fixed = dmuon.KernelOptions(method="gram", backend="torch")
    with pytest.raises(ValueError, match="the same bits on every mesh"):
        dmuon.dedicate_params(pair("fsdp2").model, planner=shared(2), kernels=fixed)
    with pytest.raises(ValueError, match="only 2 ranks to share"):
        dmuon.dedicate_params(pair("fsdp2").model, planner=shared(4))
    with pytest.raises(ValueError, match="more than matrix .* has columns"):
        narrow = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 4))
        dmuon.dedicate_params(
            narrow, select=lambda name, p: p.ndim == 2, options=None,
            planner=shared(2),
        )  # fmt: skip


@distributed(2)
def test_slices_run_in_the_gram_form_and_stats_say_so(rank, world):
    both = pair("fsdp2")
    with dedicated(both.model, planner=shared(2)) as (own, opt):
        both.backward(0)
        opt.step()
        ran = opt.stats()["kernels"]["ran"]
        assert ran and all("gram" in kernel and "2 co-owners" in kernel for kernel in ran.values())
        assert set(own.owned_by(0)) == set(own.owned_by(1))
        assert "co-owners" in str(own.report())


@distributed(4)
def test_a_mesh_whose_ranks_are_in_another_order(rank, world):
    mesh = DeviceMesh(
        torch.get_default_device().type, [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = ParallelModel()
    twin = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    with dedicated(model, planner=shared(2)) as (own, opt):
        assert own.plan.has_co_owners
        ref = reference(twin)
        for step in range(STEPS):
            loss_of(model, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
            loss_of(twin, batch(step, rank)).backward()
            average_gradients(twin)
            ref.step()
            ref.zero_grad()
        opt.synchronize()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(
                p.full_tensor(), q, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@distributed(4)
def test_distributed_data_parallel_over_a_part_of_the_ranks(rank, world):
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    torch.manual_seed(rank % 2)
    model = ParallelModel()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, process_group=group)
    own = dmuon.dedicate_params(ddp, planner=shared(2))
    opt, ref = dmuon.Muon(ddp, **MUON), reference(twin)
    for step in range(4):
        loss_of(ddp, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        both = [loss_of(twin, batch(step, r)) for r in (rank % 2, rank % 2 + 2)]
        torch.stack(both).mean().backward()
        ref.step()
        ref.zero_grad()
    assert own.plan.has_co_owners
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
    own.close()
    dist.destroy_process_group(group)
