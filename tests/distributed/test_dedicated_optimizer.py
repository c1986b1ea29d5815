"""Hyperparameters, dtypes and kinds of matrices in the `dedicated` layout."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

import dmuon
from dmuon.reference import ReferenceMuon
from tests.distributed.dedicated import MUON, mesh_of, whole
from tests.distributed.dedicated_models import (
    FREED,
    FSDP,
    MODES,
    PIECES,
    Casting,
    Pieces,
    ZooBlocks,
    both,
    copy_weights,
    follow,
)
from tests.distributed.harness import distributed
from tests.distributed.models import batch, loss_of, seeded, weights

# ---- dtypes ------------------------------------------------------------------------------


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
