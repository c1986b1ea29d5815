"""Resuming, closing, evaluating in the `dedicated` layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon
from dmuon.reference import ReferenceMuon
from tests.distributed.dedicated import MUON, mesh_of, shard_rest, whole
from tests.distributed.dedicated_models import (
    FREED,
    FSDP,
    RESTS,
    Pieces,
    assert_bitwise,
    both,
)
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    seeded,
    weights,
)

# ---- resuming ----------------------------------------------------------------------------


def start(kind, rest, seed, plan=None, mesh=None, **settings):
    mesh = mesh_of(mesh or (torch.distributed.get_world_size(),))
    model = seeded(kind, seed)
    own = dmuon.dedicate_params(model, mesh, layout="dedicated", plan=plan)
    if rest == FSDP:
        shard_rest(model, own, mesh)
    return model, own, dmuon.Muon(model, **MUON, **settings)


def train(model, opt, rank, steps):
    for step in steps:
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()


def saved(model, own, opt):
    with own.materialized(model):
        state = {n: v.detach().clone() for n, v in model.state_dict().items()}
    return state, torch.utils._pytree.tree_map(
        lambda v: v.clone() if isinstance(v, torch.Tensor) else v, opt.state_dict()
    )


def resume(kind, rest, saved_model, saved_opt, plan, **kwargs):
    model, own, opt = start(kind, rest, 7, plan, **kwargs)
    with own.materialized(model):
        model.load_state_dict(saved_model)
    opt.load_state_dict(saved_opt)
    return model, own, opt


@pytest.mark.parametrize("kind", [Net, Pieces])
@RESTS
@distributed(2)
def test_resuming_is_bitwise(rank, world, rest, kind):
    model, own, opt = start(kind, rest, 0)
    train(model, opt, rank, range(3))
    state, opt_state = saved(model, own, opt)
    train(model, opt, rank, range(3, 5))
    expected = whole(model, own)
    own.close()
    model, own, opt = resume(kind, rest, state, opt_state, own.plan)
    train(model, opt, rank, range(3, 5))
    assert_bitwise(whole(model, own), expected)
    own.close()
