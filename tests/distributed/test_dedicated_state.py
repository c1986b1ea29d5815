"""Weights from outside in the `dedicated` layout: read, written, saved, evaluated, given back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon
from dmuon.dtensors import is_distributed
from dmuon.reference import ReferenceMuon
from dmuon.types import DmuonError
from tests.distributed.harness import distributed
from tests.distributed.layouts import DEDICATED, IN_TURN, layouts, mesh_of
from tests.distributed.models import Net, Pieces, seeded, weights
from tests.distributed.twins import MUON, both

# ---- reading and writing ---------------------------------------------------------------------


@layouts("dedicated", "dedicated fsdp")
def test_weights_can_be_read_inside_materialized_only(rank, world, layout):
    with both(Net, layout) as pair:
        pair.train(range(2))
        model, named = pair.model, dict(pair.model.named_parameters())
        expected = weights(pair.twin)
        for name in pair.matrices:
            full = pair.own.shape_of(name)
            owned = pair.own.owner_of(name) == rank
            with pair.own.materialized(model.get_submodule(name.rpartition(".")[0])):
                assert named[name].shape == full == expected[name].shape
                assert float((named[name] - expected[name]).abs().max()) <= 1e-5, name
                assert named[name] is dict(model.named_parameters())[name]
            assert (named[name].numel() > 0) == owned, name
        with pair.own.materialized(model.blocks[0]):
            with pair.own.materialized(model):
                assert model.blocks[1].up.weight.shape == (56, 24)
            assert model.blocks[0].up.weight.shape == (56, 24)
        pair.train([2])
        pair.check()


@torch.no_grad()
def rewrite(model, seed):
    torch.manual_seed(seed)  # the same on every rank
    if isinstance(model, Pieces):
        nn.init.normal_(model.blocks[0].qkv.weight, std=0.2)  # of several owners
        model.blocks[1].o_proj.weight.mul_(0.5)
        model.blocks[1].w1[1:3] += 0.25
    else:
        nn.init.normal_(model.blocks[0].up.weight, std=0.2)
        nn.init.orthogonal_(model.blocks[1].down.weight)
        model.mid.weight.mul_(0.5)
        model.blocks[2].up.weight[3:5] = 0.25


def write_and_train(*args, **kwargs):
    with both(*args, **kwargs) as pair:
        for step in range(3):
            with pair.own.materialized(pair.model):
                rewrite(pair.model, step)
            rewrite(pair.twin, step)
            pair.check(1e-5 if step else 0.0)
            pair.train([step])
        pair.check()


@layouts(*DEDICATED)
def test_what_is_written_inside_materialized_persists(rank, world, layout):
    write_and_train(Net, layout)
    write_and_train(Pieces, layout, **IN_TURN)


@distributed(4)
def test_what_is_written_reaches_every_replica(rank, world):
    write_and_train(Net, mesh=(2, 2))
    write_and_train(Pieces, mesh=(2, 2), **IN_TURN)


# ---- closing ---------------------------------------------------------------------------------


def assert_ordinary(model, twin):
    """Whole trained weights on this rank, in a model that nothing of dmuon is left in."""
    expected = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        assert p.shape == expected[name].shape, name
        if not is_distributed(p):
            assert float((p - expected[name]).abs().max()) <= 1e-5, name
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            assert not any(type(hook).__module__.startswith("dmuon") for hook in hooks.values())


@layouts(*DEDICATED)
def test_closing_makes_the_model_ordinary_again(rank, world, layout):
    with both(Net, layout) as pair:
        pair.train(range(3))
        pair.own.close()
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)
        if layout == "dedicated fsdp":
            return
        if rank:  # no collective any more: one rank alone can use it
            pair.assert_same_loss(9)
        with pytest.raises(DmuonError, match="closed"):
            pair.opt.step()


@distributed(2)
def test_closing_at_any_time_and_dedicating_again(rank, world):
    with both() as pair:
        pair.own.close()  # before any step
        assert_ordinary(pair.model, pair.twin)
        for begin in (0, 2):
            again = {"layout": "dedicated", "solver": "greedy"}
            dmuon.dedicate_params(pair.model, mesh_of((world,)), **again)
            pair.opt = dmuon.Muon(pair.model, **MUON)
            pair.refs = [ReferenceMuon(pair.twin, **MUON)]
            pair.train(range(begin, begin + 2))
            pair.backward(9)  # gradients that no step takes
            pair.own.close()
            assert_ordinary(pair.model, pair.twin)
            pair.model.zero_grad()
    model = seeded()
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    own.close()  # without an optimizer
    assert_ordinary(model, seeded())
