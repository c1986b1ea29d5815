"""Mistakes with sharded models give a clear error on every rank, and nothing hangs afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.tools.parallel_models import ParallelModel
from tests.distributed.harness import distributed
from tests.distributed.models import batch, loss_of, seeded
from tests.distributed.twins import (
    BARE,
    FSDP2,
    MUON,
    REDUCING,
    both,
    follow,
    is_same,
    laid_out,
    mesh_of,
    shard_units,
    sharded,
)


def sharded_model():
    return laid_out(FSDP2)[0]


def replaced(local, placement, **shape):
    """A mistake: a parameter made of this local tensor."""

    def make(model):
        mix = model.blocks[0].mix
        known = {name: getattr(mix.weight, name) for name in shape}
        known["stride"] = known["stride"]() if "stride" in known else None
        part = DTensor.from_local(
            local, mix.weight.device_mesh, [placement], run_check=False, **known
        )
        mix.weight = nn.Parameter(part)
        dmuon.dedicate_params(model)

    return make


def planned(**arguments):
    return lambda model: dmuon.dedicate_params(model, **arguments)


# What is done, the error, and whether it is also one where all ranks do it.
MISTAKES = [
    (replaced(torch.zeros(50, 50), Partial()), r"mix\.weight.*Partial.*[Rr]edistribute", True),
    # A local tensor that is not what the placements say.
    (replaced(torch.zeros(3, 50), Replicate(), shape=0, stride=0), r"mix\.weight.*stores \[3, 50\]",
     True),
    (planned(layout="replicated"), r"'tok\.weight' is a DTensor", True),
    (planned(options=dmuon.ReplicatedOptions()), "must be ShardedOptions, found Replicated", True),
    (planned(splits={"*.mix.weight": [1]}), "50 rows", True),
    (planned(splits={"*.mix.weight": [20, 30]}), r"mix\.weight", False),
    (planned(options=dmuon.ShardedOptions(buffers=3)), "disagree.*buffers", False),
]  # fmt: skip


@distributed(2)
def test_planning_mistakes(rank, world):
    for mistake, message, everywhere in MISTAKES:
        for only_one in (True, False)[: 1 + everywhere]:
            make = dmuon.dedicate_params if only_one and rank == 0 else mistake
            with pytest.raises((TypeError, ValueError), match=message):
                make(sharded_model())
    follow(layout=FSDP2, steps=2)  # nothing is left behind


@distributed(2)
def test_layouts_that_do_not_fit_the_model(rank, world):
    with pytest.raises(ValueError, match=r"does not take DistributedDataParallel.*HSDP"):
        dmuon.dedicate_params(DistributedDataParallel(seeded()), layout="sharded")
    with pytest.raises(ValueError, match=r"sharded.*(plain|DTensor)"):
        dmuon.dedicate_params(seeded(), layout="sharded")


@distributed(2)
def test_a_mesh_without_all_ranks_of_a_parameter(rank, world):
    model = sharded_model()
    alone = mesh_of((world, 1), ("other", "mine"))["mine"]
    with pytest.raises(ValueError, match=rf"also lies on global ranks \[{1 - rank}\].*mesh of all"):
        dmuon.dedicate_params(model, alone)
    dmuon.dedicate_params(model).close()


@distributed(2)
def test_plans_of_another_mesh_or_layout(rank, world):
    def plan_of(model, **kwargs):
        own = dmuon.dedicate_params(model, **kwargs)
        own.close()
        return own.plan

    at_owners = {"options": REDUCING}
    flat, tensor_parallel = plan_of(sharded_model()), plan_of(laid_out("tp")[0])
    nested = plan_of(laid_out(sharded(1, 2))[0])
    plain, reduced = plan_of(ParallelModel()), plan_of(ParallelModel(), **at_owners)
    with pytest.raises(ValueError, match="layout 'reduce_to_owner'; this model is 'sharded'"):
        plan_of(sharded_model(), plan=reduced)
    with pytest.raises(ValueError, match="layout 'sharded'; this model is 'reduce_to_owner'"):
        plan_of(ParallelModel(), plan=flat, **at_owners)
    # Who owns what is the same wherever momentum lies with the parameters.
    assert plan_of(ParallelModel(), plan=flat).owners == flat.owners
    with pytest.raises(ValueError, match="the saved plan does not fit"):
        plan_of(sharded_model(), plan=tensor_parallel)
    for other in (nested, plain):
        assert plan_of(sharded_model(), plan=other).owners == other.owners
    with pytest.raises(ValueError, match="disagree"):
        plan_of(sharded_model(), plan=flat if rank else None)
    follow(layout=FSDP2, steps=2, request={"plan": flat, "solver": "auto"})


# ---- after planning ----------------------------------------------------------------------


@distributed(2)
def test_fully_shard_after_planning(rank, world):
    mesh = mesh_of((world,))
    for layout, late in (
        (BARE, lambda model: shard_units(model, mesh)),
        # All others stay as they were planned.
        ("tp", lambda model: fully_shard(model.blocks[0].mix, mesh=mesh)),
    ):
        model = laid_out(layout, ParallelModel)[0]
        own = dmuon.dedicate_params(model)
        opt = dmuon.Muon(model)
        late(model)
        loss_of(model, batch(0, 0)).backward()
        with pytest.raises(ValueError, match=r"fully_shard.*before"):
            opt.step()
        own.close()
    model = ParallelModel()
    own = dmuon.dedicate_params(model)
    shard_units(model, mesh)
    with pytest.raises(ValueError, match="dedicate_params"):
        dmuon.Muon(model)
    own.close()


@distributed(2)
def test_a_parameter_that_was_replaced(rank, world):
    """Its gradient would be lost, while all others train on."""
    with both(layout="tp") as pair:
        pair.train_alone([0])
        mix = pair.model.blocks[0].mix
        mix.weight = nn.Parameter(mix.weight.detach().clone())
        pair.backward(1)
        with pytest.raises(ValueError, match=r"blocks\.0\.mix\.weight.*another parameter object"):
            pair.opt.step()


@distributed(2)
def test_a_model_that_was_converted_or_moved(rank, world):
    with both(layout=FSDP2) as pair:
        for step in range(3):
            pair.train([step])
            pair.model.to("cpu").float()  # to where it is: changes nothing
        pair.check()
    with both(layout=FSDP2) as pair:
        pair.model.to(torch.bfloat16)  # FSDP2 itself takes this before its first forward only
        pair.backward(0)
        message = r"'tok\.weight' is now.*bfloat16.*planned as.*float32.*own\.close\(\)"
        with pytest.raises(ValueError, match=message):
            pair.opt.step()
        with pytest.raises(ValueError, match=message):
            dmuon.clip_grad_norm_(pair.model, 1.0)


@distributed(2)
def test_closing_and_dedicating_again(rank, world):
    """Momentum begins anew; pending updates arrive; the old optimizer says what to do."""
    with both(layout=FSDP2) as pair:
        pair.train(range(2))
        with pytest.raises(ValueError, match="dedicated already"):
            dmuon.dedicate_params(pair.model)
        with pytest.raises(ValueError, match="already have"):
            dmuon.Muon(pair.model)
        hooks = len(pair.model._forward_pre_hooks)
        pair.own.close()
        assert len(pair.model._forward_pre_hooks) < hooks
        pair.backward(5)
        before = pair.snapshot()
        with pytest.raises(ValueError, match=r"closed.*dedicate_params"):
            pair.opt.step()
        assert is_same(pair.snapshot(), before)
        pair.model.zero_grad()
        pair.check()
        again = dmuon.dedicate_params(pair.model)
        pair.opt, pair.refs = dmuon.Muon(pair.model, **MUON), [ReferenceMuon(pair.twin, **MUON)]
        pair.train(range(2))
        pair.check()
        again.close()
