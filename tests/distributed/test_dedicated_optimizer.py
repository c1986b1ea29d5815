"""Hyperparameters, dtypes and kinds of matrices in the `dedicated` layout."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from tests.distributed.dedicated import MUON, mesh_of, shard_rest, whole
from tests.distributed.dedicated_models import (
    FREED,
    FSDP,
    MODES,
    PIECES,
    PLAIN,
    Casting,
    Pieces,
    ZooBlocks,
    both,
    copy_weights,
    follow,
)
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded, weights

# ---- hyperparameters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "muon",
    [
        {"weight_decay": 0.0},
        {"weight_decay": 0.7, "adamw_weight_decay": 0.3},
        {"momentum_mode": "sgd", "dampening": 0.1, "nesterov": False},
        {"adjust_lr_fn": "original", "ns_coefficients": "quintic", "ns_steps": 4},
    ],
    ids="-".join,
)
@distributed(2)
def test_hyperparameters_mean_the_same(rank, world, muon):
    follow(muon=muon)


SCHEDULES = {
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=6),
    "lambda": lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
}


def two_groups(model):
    """The parameters of the embedding and the first block by name, and all the others."""
    named = dict(model.named_parameters())
    first = {n: p for n, p in named.items() if n.startswith(("tok.", "blocks.0."))}
    return first, {n: p for n, p in named.items() if n not in first}


def an_optimizer_each(model, rates, matrices):
    """What two groups must amount to: Muon and AdamW for each of them."""
    made = []
    for group, lr in zip(two_groups(model), rates):
        muon = [p for n, p in group.items() if n in matrices]
        rest = [p for n, p in group.items() if n not in matrices]
        made.append(ReferenceMuon(muon, lr=lr, ns_dtype=torch.float32))
        made.append(torch.optim.AdamW(rest, lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))
    return made


@pytest.mark.parametrize("rest, schedule", [(PLAIN, "cosine"), (FSDP, "lambda")])
@distributed(2)
def test_param_groups_and_schedules(rank, world, rest, schedule):
    model, twin, mesh = seeded(), seeded(), mesh_of((world,))
    own = dmuon.dedicate_params(model, mesh, layout="dedicated", solver="greedy")
    if rest == FSDP:
        shard_rest(model, own, mesh)
    first, second = two_groups(model)
    groups = [{"params": first.values(), "lr": 0.04}, {"params": second.values()}]
    opt = dmuon.Muon(groups, lr=0.01, ns_dtype=torch.float32)
    matrices = {m.name for m in own.plan.specs.matrices}
    others = an_optimizer_each(twin, (0.04, 0.01), matrices)
    schedules = [SCHEDULES[schedule](each) for each in (opt, *others)]
    for step in range(5):
        loss_of(model, batch(step, rank)).backward()
        (sum(loss_of(twin, batch(step, r)) for r in range(world)) / world).backward()
        for each in (opt, *others, *schedules):
            each.step()
        opt.zero_grad()
        twin.zero_grad()
    assert {group["lr"] for group in opt.param_groups}.isdisjoint({0.04, 0.01})
    found, expected = whole(model, own), weights(twin)
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-5), name
    own.close()


@distributed(2)
def test_a_rate_changed_right_after_step_does_not_touch_that_step(rank, world):
    with both() as pair:
        pair.train(range(2))
        for group in pair.opt.param_groups:
            group["lr"] = 100.0
        pair.check()


# ---- dtypes ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduce32", "reduce16"])
@distributed(2)
def test_bfloat16_parameters_with_master_weights(rank, world, reduce):
    """The twin is in float32; its gradients are those of a bfloat16 copy of the real weights."""
    with both(
        change=lambda model: model.to(torch.bfloat16),
        options={"reduce_dtype": reduce},
        only={"master_weights": True},
    ) as pair:
        working = Net().to(torch.bfloat16)
        pair.twin.float()
        for step in range(4):
            pair.backward(step)
            current = whole(pair.model, pair.own)
            working.load_state_dict(current, strict=False)
            for p in pair.twin.parameters():
                p.grad = torch.zeros_like(p)
            for r in range(world):
                working.zero_grad()
                loss_of(working, batch(step, r)).backward()
                for p, twin in zip(working.parameters(), pair.twin.parameters()):
                    if p.grad is None:
                        twin.grad = None  # not used: nobody has a gradient
                    else:
                        twin.grad += p.grad.float() / world
            pair.advance()
        tolerance = 1e-5 if reduce is torch.float32 else 5e-3
        state = pair.opt.state_dict()  # makes the masters visible
        assert state["state"]
        found, expected = whole(pair.model, pair.own), weights(pair.twin)
        seen = 0
        for name, p in trainable_parameters(pair.model):
            assert torch.allclose(found[name].float(), expected[name], 2**-7, tolerance), name
            master = pair.opt.state[p].get("master_weight")
            if master is not None:
                seen += 1
                assert float((master - expected[name]).abs().max()) <= tolerance, name
                assert torch.equal(master.bfloat16(), found[name]), name
        assert seen >= len(pair.own.owned_by(rank)) > 0


def as_bfloat16(twin, names):
    """A model like ``twin`` whose matrices are rounded, gradients going to the twin's weights."""

    def run(tokens):
        rounded = {n: p.bfloat16() for n, p in twin.named_parameters() if n in names}
        return functional_call(twin, rounded, (tokens,))

    return run


@pytest.mark.parametrize(
    "freed, reduce",
    [(True, None), (False, None), (True, torch.float32), (True, torch.bfloat16)],
    ids=["freed", "kept", "reduce32", "reduce16"],
)
@distributed(2)
def test_weights_used_in_bfloat16(rank, world, freed, reduce):
    options = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": reduce,
        "free_after_forward": freed,
    }
    with both(Casting, options=options) as pair:
        matrices = {m.name for m in pair.own.plan.specs.matrices}
        for step in range(3):
            copy_weights(pair)
            pair.backward(step)
            for r in range(world):
                (loss_of(as_bfloat16(pair.twin, matrices), batch(step, r)) / world).backward()
            pair.advance()
            pair.check(1e-5 if reduce is not torch.bfloat16 else 5e-3)
        used = {n: m.dtypes for n, m in pair.model.named_modules() if hasattr(m, "dtypes")}
        assert all(dtypes == {torch.bfloat16} for dtypes in used.values()) and len(used) == 3
        kept = {p.dtype for p in pair.own.dedicated_params}
        assert kept == {torch.float32}


def called_twice(model, step, rank):
    model.order = [0, 1, 2, 0]


def tied(model):
    model.blocks[2].up.weight = model.blocks[0].up.weight


def two_forwards(model, inputs):
    return loss_of(model, inputs) + loss_of(model, (inputs[0].flip(1), inputs[1]))


SEVERAL = {
    "called twice": {"prepare": called_twice},
    "tied": {"change": tied},
    "two forwards": {"loss_of": two_forwards},
}


@pytest.mark.parametrize("kind", SEVERAL)
@FREED
@distributed(2)
def test_weights_used_in_bfloat16_several_times(rank, world, freed, kind):
    """Autograd accumulates once for every use, for the weight's dtype has changed in between.

    The sum of two uses is rounded to bfloat16 in another order than in the twin.
    """
    options = {"param_dtype": torch.bfloat16, "free_after_forward": freed}
    with both(Casting, options=options, **SEVERAL[kind]) as pair:
        matrices = {m.name for m in pair.own.plan.specs.matrices}
        for step in range(3):
            copy_weights(pair)
            pair.backward(step)
            pair.prepare(pair.twin, step, rank)
            rounded = as_bfloat16(pair.twin, matrices)
            for r in range(world):
                (pair.loss_of(rounded, batch(step, r)) / world).backward()
            pair.advance()
            pair.check(1e-3)


@distributed(2)
def test_mixed_precision_of_both(rank, world):
    """FSDP2 casts inputs and the rest, dmuon the matrices: blocks run in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, twin, mesh = seeded(), seeded(), mesh_of((world,))
    options = dmuon.DedicatedOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    own = dmuon.dedicate_params(model, mesh, layout="dedicated", options=options)
    ignored = own.dedicated_params
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    names = [n for n, p in twin.named_parameters() if p.requires_grad]
    rounded = as_bfloat16(twin, set(names))
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        for r in range(world):
            (loss_of(rounded, batch(step, r)) / world).backward()
        opt.step(), opt.zero_grad(), ref.step(), ref.zero_grad()
    found, expected = whole(model, own), weights(twin)
    before = weights(seeded())
    for name, weight in found.items():
        change = expected[name] - before[name]
        if float(change.norm()):
            assert (weight - expected[name]).norm() <= 0.05 * change.norm(), name
    own.close()


# ---- kinds of matrices -------------------------------------------------------------------


# One owner after the other, where a good plan would keep equal shapes together.
IN_TURN = {"select": PIECES, "solver": "round_robin"}


@MODES
@distributed(2)
def test_pieces_of_one_parameter_have_different_owners(rank, world, mode):
    with both(Pieces, **mode, **IN_TURN) as pair:
        for name, pieces in {"qkv.weight": 3, "o_proj.weight": 4, "w1": 5, "w2": 5}.items():
            owners = pair.own.owner_of(f"blocks.0.{name}")
            assert len(owners) == pieces and set(owners) == {0, 1}, name
        pair.train(range(4))
        pair.check()


@distributed(4)
def test_pieces_with_replicas(rank, world):
    follow(Pieces, steps=4, mesh=(2, 2), rest=FSDP, **IN_TURN)


@distributed(2)
def test_the_comparison_notices_a_lost_split(rank, world):
    with both(Pieces, **IN_TURN) as pair:
        pair.ref = ReferenceMuon(pair.twin, **MUON)
        pair.train(range(2))
        found, other = whole(pair.model, pair.own), weights(pair.twin)
        for name in ("blocks.0.qkv.weight", "blocks.0.o_proj.weight"):
            assert float((found[name] - other[name]).abs().max()) > 1e-3, name


@MODES
@distributed(2)
def test_convolutions_experts_and_attention(rank, world, mode):
    follow(ZooBlocks, **mode)
