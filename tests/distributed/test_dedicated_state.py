"""Resuming, closing and evaluating in the `dedicated` layout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.dtensors import is_distributed
from dmuon.reference import ReferenceMuon
from dmuon.types import DmuonError
from tests.distributed.dedicated import MUON, mesh_of, shard_rest, whole
from tests.distributed.dedicated_models import (
    FREED,
    FSDP,
    MODES,
    PLAIN,
    RESTS,
    Pieces,
    assert_bitwise,
    both,
)
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded

# ---- resuming ----------------------------------------------------------------------------


def start(kind=Net, rest=PLAIN, seed=0, shape=None, change=lambda model: None, **settings):
    model, plan = seeded(kind, seed), settings.pop("plan", None)
    change(model)
    mesh = mesh_of(shape or (dist.get_world_size(),))
    own = dmuon.dedicate_params(
        model, mesh, layout="dedicated", plan=plan, solver="round_robin", costs="analytic"
    )
    if rest == FSDP:
        shard_rest(model, own, mesh)
    return model, own, dmuon.Muon(model, **MUON, **settings)


def train(model, opt, rank, steps):
    for step in steps:
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()


def saved(model, own, opt):
    """Copies of both state dicts, as they would be read back from files."""
    with own.materialized(model):
        state = copy.deepcopy(model.state_dict())
    return state, copy.deepcopy(opt.state_dict())


def resumed(state, opt_state, plan, **kwargs):
    model, own, opt = start(seed=7, plan=plan, **kwargs)
    with own.materialized(model):
        model.load_state_dict(state)
    opt.load_state_dict(opt_state)
    return model, own, opt


def resumes_bitwise(rank, **kwargs):
    model, own, opt = start(**kwargs)
    train(model, opt, rank, range(3))
    files = saved(model, own, opt)
    train(model, opt, rank, range(3, 6))
    expected = whole(model, own)
    own.close()
    model, own, opt = resumed(*files, own.plan, **kwargs)
    assert opt.stats()["steps"] == 3
    train(model, opt, rank, range(3, 6))
    assert_bitwise(whole(model, own), expected)
    own.close()


@pytest.mark.parametrize("kind", [Net, Pieces])
@RESTS
@distributed(2)
def test_resuming_is_bitwise(rank, world, rest, kind):
    resumes_bitwise(rank, kind=kind, rest=rest)


@distributed(4)
def test_resuming_with_replicas_is_bitwise(rank, world):
    resumes_bitwise(rank, shape=(2, 2), rest=FSDP)


@distributed(2)
def test_resuming_with_master_weights_is_bitwise(rank, world):
    resumes_bitwise(rank, change=lambda model: model.to(torch.bfloat16), master_weights=True)


@distributed(2)
def test_loading_again_into_the_same_model_is_bitwise(rank, world):
    model, own, opt = start()
    train(model, opt, rank, range(2))
    state, opt_state = saved(model, own, opt)
    results = []
    for _ in range(2):
        train(model, opt, rank, range(2, 4))
        results.append(whole(model, own))
        with own.materialized(model):
            model.load_state_dict(state)
        opt.load_state_dict(opt_state)
    assert_bitwise(*results)
    own.close()


# ---- closing -----------------------------------------------------------------------------


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


@MODES
@distributed(2)
def test_closing_makes_the_model_ordinary_again(rank, world, mode):
    with both(**mode) as pair:
        pair.train(range(3))
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)
        if mode["rest"] == FSDP:
            return
        # No collective any more: one rank alone can use it.
        found = pair.loss(pair.model, 9, rank) if rank else torch.zeros(())
        assert not rank or abs(float(found - pair.loss(pair.twin, 9, rank))) <= 1e-5
        with pytest.raises(DmuonError, match="closed"):
            pair.opt.step()


@distributed(2)
def test_dedicating_again_works(rank, world):
    with both() as pair:
        for begin in (0, 2, 4):
            pair.train(range(begin, begin + 2))
            pair.own.close()
            pair.own = dmuon.dedicate_params(
                pair.model, mesh_of((world,)), layout="dedicated", solver="greedy"
            )
            pair.opt = dmuon.Muon(pair.model, **MUON)
            pair.ref = ReferenceMuon(pair.twin, **MUON)
        pair.check()


@distributed(2)
def test_closing_twice_before_any_step_and_after_a_backward(rank, world):
    with both() as pair:
        pair.backward(0)
        pair.own.close()
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)
    with both() as pair:
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)
    model = seeded()
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    own.close()  # without an optimizer
    assert_ordinary(model, seeded())


# ---- evaluating --------------------------------------------------------------------------


def evaluate(pair, step, rank):
    """Twice in a row."""
    pair.model.eval()
    for _ in range(2):
        with torch.no_grad():
            found = pair.loss(pair.model, 100 + step, rank)
            expected = pair.loss(pair.twin, 100 + step, rank)
        assert abs(float(found) - float(expected)) <= 1e-5
    if hasattr(pair.model, "reshard"):
        pair.model.reshard()  # FSDP2 leaves the root gathered until a backward
    pair.model.train()


@MODES
@distributed(2)
def test_forward_without_backward_at_any_time(rank, world, mode):
    with both(**mode) as pair:
        for step in range(4):
            evaluate(pair, step, rank)
            pair.backward(step)
            evaluate(pair, step + 50, rank)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


@FREED
@distributed(2)
def test_training_forwards_whose_results_are_thrown_away(rank, world, freed):
    with both(options={"free_after_forward": freed}) as pair:
        for step in range(3):
            pair.loss(pair.model, 70 + step, rank)
            pair.backward(step)
            pair.loss(pair.model, 80 + step, rank)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


@FREED
@distributed(2)
def test_evaluation_between_forward_and_backward(rank, world, freed):
    with both(options={"free_after_forward": freed}) as pair:
        for step in range(3):
            loss = pair.loss(pair.model, step, rank)
            evaluate(pair, step, rank)
            loss.backward()
            pair.joint_backward(step)
            pair.advance()
        pair.check()


@distributed(2)
def test_inference_mode(rank, world):
    with both() as pair:
        for step in range(3):
            with torch.inference_mode():
                found = pair.loss(pair.model, 40 + step, rank)
                expected = pair.loss(pair.twin, 40 + step, rank)
            assert abs(float(found) - float(expected)) <= 1e-5
            pair.train([step])
        pair.check()
