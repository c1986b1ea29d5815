"""Mistakes with sharded models give a clear error on every rank, and nothing hangs afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from tests.distributed.fsdp import advance, assert_close, follow, fsdp, snapshot
from tests.distributed.harness import distributed
from tests.distributed.models import Net, seeded
from tests.distributed.sharded import BY_NAME, dedicated, pair, reference


def partial_parameter(model):
    weight = model.blocks[0].mix.weight
    local = torch.zeros(weight.shape)
    part = DTensor.from_local(local, weight.device_mesh, [Partial()], run_check=False)
    model.blocks[0].mix.weight = nn.Parameter(part)
    dmuon.dedicate_params(model)


def short_local(model):
    """A local tensor that is not what the placements say."""
    weight = model.blocks[0].mix.weight
    part = DTensor.from_local(
        torch.zeros(3, 50),
        weight.device_mesh,
        [Replicate()],
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    model.blocks[0].mix.weight = nn.Parameter(part)
    dmuon.dedicate_params(model)


def planned(**arguments):
    return lambda model: dmuon.dedicate_params(model, **arguments)


# What is done, the error, and whether it is also one where all ranks do it.
MISTAKES = [
    (partial_parameter, r"mix\.weight.*Partial.*[Rr]edistribute", True),
    (short_local, r"mix\.weight.*stores \[3, 50\]", True),
    (planned(layout="replicated"), r"'tok\.weight' is a DTensor", True),
    (
        planned(options=dmuon.ReplicatedOptions()),
        "must be ShardedOptions, found ReplicatedOptions",
        True,
    ),
    (planned(splits={"*.mix.weight": [1]}), "50 rows", True),
    (planned(splits={"*.mix.weight": [20, 30]}), r"mix\.weight", False),
    (planned(options=dmuon.ShardedOptions(buffers=3)), "disagree.*buffers", False),
]


@distributed(2)
def test_planning_mistakes(rank, world):
    for mistake, message, everywhere in MISTAKES:
        for only_one in (True, False)[: 1 + everywhere]:
            make = dmuon.dedicate_params if only_one and rank == 0 else mistake
            with pytest.raises((TypeError, ValueError), match=message):
                make(fsdp().model)
    both = fsdp()  # nothing is left behind
    follow(both, 2)
    assert_close(both)


@distributed(2)
def test_layouts_that_do_not_fit_the_model(rank, world):
    with pytest.raises(ValueError, match=r"does not take DistributedDataParallel.*HSDP"):
        dmuon.dedicate_params(DistributedDataParallel(seeded(Net)), layout="sharded")
    with pytest.raises(ValueError, match=r"sharded.*(plain|DTensor)"):
        dmuon.dedicate_params(seeded(Net), layout="sharded")


@distributed(2)
def test_a_mesh_without_all_ranks_of_a_parameter(rank, world):
    model = fsdp().model
    alone = init_device_mesh(
        torch.get_default_device().type, (world, 1), mesh_dim_names=("other", "mine")
    )["mine"]
    with pytest.raises(ValueError, match=rf"also lies on global ranks \[{1 - rank}\].*mesh of all"):
        dmuon.dedicate_params(model, alone)
    dmuon.dedicate_params(model).close()


@distributed(2)
def test_plans_of_another_mesh_or_layout(rank, world):
    def plan_of(model, **kwargs):
        own = dmuon.dedicate_params(model, **kwargs)
        own.close()
        return own.plan

    grid = init_device_mesh(
        torch.get_default_device().type, (1, 2), mesh_dim_names=("replicate", "shard")
    )
    flat, tensor_parallel = plan_of(fsdp().model), plan_of(pair("tp").model)
    nested = plan_of(fsdp(shard=lambda m, _: fully_shard(m, mesh=grid)).model)
    plain = plan_of(ParallelModel())
    at_owners = plan_of(ParallelModel(), options=dmuon.ReplicatedOptions(reduce_to_owner=True))
    with pytest.raises(ValueError, match="layout 'reduce_to_owner'; this model is 'sharded'"):
        dmuon.dedicate_params(fsdp().model, plan=at_owners)
    with pytest.raises(ValueError, match="layout 'sharded'; this model is 'reduce_to_owner'"):
        plan_of(ParallelModel(), plan=flat, options=dmuon.ReplicatedOptions(reduce_to_owner=True))
    # Who owns what is the same wherever momentum lies with the parameters.
    assert plan_of(ParallelModel(), plan=flat).owners == flat.owners
    with pytest.raises(ValueError, match="the saved plan does not fit"):
        plan_of(fsdp().model, plan=tensor_parallel)
    for other in (nested, plain):
        assert plan_of(fsdp().model, plan=other).owners == other.owners
    with pytest.raises(ValueError, match="disagree"):
        dmuon.dedicate_params(fsdp().model, plan=flat if rank else None)
    both = fsdp()
    follow(both, 2, plan=flat)
    assert_close(both)


# ---- after planning ----------------------------------------------------------------------


def shard_blocks(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@distributed(2)
def test_fully_shard_after_planning(rank, world):
    mesh = init_device_mesh(torch.get_default_device().type, (world,), mesh_dim_names=("dp",))
    for model, late in (
        (ParallelModel(), lambda model: shard_blocks(model, mesh)),
        # All others stay as they were planned.
        (pair("tp").model, lambda model: fully_shard(model.blocks[0].mix, mesh=mesh)),
    ):
        own = dmuon.dedicate_params(model)
        opt = dmuon.Muon(model)
        late(model)
        loss_of(model, batch(0, 0)).backward()
        with pytest.raises(ValueError, match=r"fully_shard.*before"):
            opt.step()
        own.close()
    model = ParallelModel()
    own = dmuon.dedicate_params(model)
    shard_blocks(model, mesh)
    with pytest.raises(ValueError, match="dedicate_params"):
        dmuon.Muon(model)
    own.close()


@distributed(2)
def test_a_parameter_that_was_replaced(rank, world):
    """Its gradient would be lost, while all others train on."""
    both = pair("tp")
    with dedicated(both.model) as (_, opt):
        both.backward(0)
        advance(opt)
        mix = both.model.blocks[0].mix
        mix.weight = nn.Parameter(mix.weight.detach().clone())
        both.backward(1)
        with pytest.raises(ValueError, match=r"blocks\.0\.mix\.weight.*another parameter object"):
            opt.step()


@distributed(2)
def test_a_model_that_was_converted(rank, world):
    both = fsdp()
    with dedicated(both.model) as (_, opt):
        both.model.to(torch.bfloat16)  # FSDP2 itself takes this before its first forward only
        both.backward(0)
        message = r"'tok\.weight' is now.*bfloat16.*planned as.*float32.*own\.close\(\)"
        with pytest.raises(ValueError, match=message):
            opt.step()
        with pytest.raises(ValueError, match=message):
            dmuon.clip_grad_norm_(both.model, 1.0)


@distributed(2)
def test_moving_a_model_to_where_it_is_changes_nothing(rank, world):
    both = fsdp()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.both_backward(step)
            advance(opt, ref)
            both.model.to("cpu").float()
    assert_close(both)


@distributed(2)
def test_closing_and_dedicating_again(rank, world):
    """Momentum begins anew; pending updates land; the old optimizer says what to do."""
    both = fsdp()
    follow(both, 2)
    own = dmuon.dedicate_params(both.model)
    with pytest.raises(ValueError, match="dedicated already"):
        dmuon.dedicate_params(both.model)
    old = dmuon.Muon(both.model, publish="async")
    with pytest.raises(ValueError, match="already have"):
        dmuon.Muon(both.model)
    hooks = len(both.model._forward_pre_hooks)
    own.close()
    assert len(both.model._forward_pre_hooks) < hooks
    both.backward(5)
    before = snapshot(both.model, old)
    with pytest.raises(ValueError, match=r"closed.*dedicate_params"):
        old.step()
    after = snapshot(both.model, old)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    both.model.zero_grad()
    follow(both, 2)
    assert_close(both)


@distributed(2)
def test_numbers_of_numpy_in_a_group_count_as_ones_own(rank, world):
    """They are kept as Python's before anything travels: engines take nothing else."""
    both = pair(BY_NAME["fsdp2"])
    control = reference(both.twin, ns_steps=4)
    with dedicated(both.model) as (_, opt):
        for group in opt.param_groups:
            group["ns_steps"], group["lr"] = np.int64(4), np.float64(group["lr"])
        for step in range(2):
            both.backward(step)
            opt.step()
            opt.zero_grad()
            both.joint_backward(step)
            control.step()
            control.zero_grad()
        opt.synchronize()
        assert both.difference()[0] <= 1e-5
