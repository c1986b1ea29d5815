"""Training in the `dedicated` layout: the update is never changed, whatever is switched on."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dmuon
from tests.distributed.dedicated import MUON, mesh_of, whole
from tests.distributed.dedicated_models import (
    FREED,
    MODES,
    RESTS,
    Skipping,
    Sums,
    assert_bitwise,
    both,
    follow,
    trained,
)
from tests.distributed.harness import distributed
from tests.distributed.models import batch, loss_of

# ---- what must not change anything -------------------------------------------------------

SWITCHES = {
    "kept": {"options": {"free_after_forward": False}},
    "no prefetch": {"options": {"prefetch": 0}},
    "prefetch 3": {"options": {"prefetch": 3}},
    "kept, prefetch 3": {"options": {"prefetch": 3, "free_after_forward": False}},
    "sync": {"only": {"publish": "sync"}},
    "sync, no prefetch": {"options": {"prefetch": 0}, "only": {"publish": "sync"}},
}


@RESTS
@distributed(2)
def test_switches_change_nothing_bitwise(rank, world, rest):
    expected = trained(rest=rest)
    for name, switch in SWITCHES.items():
        found = trained(rest=rest, **switch)
        assert all(torch.equal(found[n], expected[n]) for n in expected), name


@distributed(4)
def test_switches_change_nothing_bitwise_with_replicas(rank, world):
    expected = trained(mesh=(2, 2))
    for name in ("kept", "prefetch 3", "sync, no prefetch"):
        found = trained(mesh=(2, 2), **SWITCHES[name])
        assert all(torch.equal(found[n], expected[n]) for n in expected), name


@MODES
@distributed(2)
def test_training_follows_the_reference(rank, world, mode):
    follow(steps=5, **mode)


@distributed(1)
def test_a_group_of_one_rank(rank, world):
    follow()
    follow(rest="fsdp", options={"free_after_forward": False})


# ---- gradients ---------------------------------------------------------------------------


@distributed(2, 4)
def test_gradients_reduce_to_the_exact_mean_at_the_owner_and_nowhere_else(rank, world):
    shapes = [(world,)] + ([(2, 2)] if world == 4 else [])
    for shape in shapes:
        model = Sums()
        own = dmuon.dedicate_params(model, mesh_of(shape), layout="dedicated", costs="analytic")
        dmuon.Muon(model, **MUON)
        model(torch.tensor(rank + 1.0)).backward()
        own.runtime.reduce_gradients()
        mean = (world + 1) / 2
        owned = set()
        for unit in own.runtime.units:
            if unit.owner != rank:
                with pytest.raises(KeyError):
                    own.runtime.unit_gradients(unit)
                continue
            found = own.runtime.unit_gradients(unit)
            assert torch.equal(found, torch.full_like(found, mean))
            owned.update(own.plan.specs.matrices[i].name for i in unit.matrices)
        assert owned == set(own.owned_by(rank))
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                assert p.grad is None, name
            else:
                assert torch.equal(p.grad, torch.full_like(p, mean)), name
        own.close()


@pytest.mark.parametrize("how", ["no_sync", "each", "one batch"])
@RESTS
@distributed(2)
def test_three_micro_batches_are_one_batch(rank, world, rest, how):
    with both(rest=rest) as pair:
        for step in range(0, 9, 3):
            parts = range(step, step + 3)
            if how == "one batch":
                joined = tuple(map(torch.cat, zip(*(batch(part, rank) for part in parts))))
                loss_of(pair.model, joined).backward()
            else:
                for part in parts:
                    wait = how == "no_sync" and part != parts[-1]
                    with dmuon.no_sync(pair.model) if wait else nullcontext():
                        pair.backward(part, 3)
                    local = [p.grad is not None for p in pair.own.dedicated_params]
                    assert any(local) == wait, "gradients of matrices stay here until they sync"
            for part in parts:
                pair.joint_backward(part, 3)
            pair.advance()
        pair.check(1e-6)


@distributed(2)
def test_backward_only_inside_no_sync(rank, world):
    with both() as pair:
        for step in range(3):
            with dmuon.no_sync(pair.model):
                pair.backward(step)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


# ---- gradients that are not there --------------------------------------------------------


def on_one_rank(model, step, rank):
    """One rank uses the spare module, in turn, and the other all the blocks."""
    model.use_spare = rank == step % 2
    model.order = [0, 2] if rank == step % 2 else [0, 1, 2]


def on_no_rank(model, step, rank):
    """Blocks that no rank uses in some steps, and one that is never used."""
    model.order = [0, 1] if step % 2 else [0]


def cut_off(model, step, rank):
    """A rank whose backward ends early: what lies before has no gradients there."""
    model.detached = rank == step % 2


def reaches_almost_nothing(model, step, rank):
    model.order = [] if rank == 1 else [0, 1, 2]


MISSING = [on_one_rank, on_no_rank, cut_off, reaches_almost_nothing]


@pytest.mark.parametrize("prepare", MISSING, ids=lambda f: f.__name__)
@FREED
@distributed(2)
def test_missing_gradients(rank, world, freed, prepare):
    options = {"free_after_forward": freed}
    follow(Skipping, steps=5, prepare=prepare, options=options)


@distributed(2)
def test_a_matrix_without_any_gradient_stays_as_it_is(rank, world):
    with both(Skipping, prepare=on_no_rank) as pair:
        before = whole(pair.model, pair.own)
        pair.train(range(4))
        after = whole(pair.model, pair.own)
        assert torch.equal(before["blocks.2.up.weight"], after["blocks.2.up.weight"])
        assert not torch.equal(before["blocks.1.up.weight"], after["blocks.1.up.weight"])
        pair.check()


@pytest.mark.parametrize("how", ["nothing", "forward"])
@FREED
@distributed(2)
def test_a_rank_that_runs_no_backward_at_all(rank, world, freed, how):
    with both(options={"free_after_forward": freed}) as pair:
        for step in range(5):
            lazy = {1: 0, 3: 1}.get(step)
            if rank != lazy:
                pair.backward(step)
            elif how == "forward":
                pair.loss(pair.model, step, rank)
            for r in range(world):
                if r != lazy:
                    (pair.loss(pair.twin, step, r) / world).backward()
            pair.advance()
        pair.check()


@distributed(2)
def test_gradients_dropped_by_zero_grad(rank, world):
    with both() as pair:
        for step in range(3):
            pair.backward(10 + step)
            pair.opt.zero_grad()
            pair.backward(step)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


def freeze(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.mid.weight.requires_grad_(False)


@MODES
@distributed(2)
def test_frozen_parameters_let_gradients_through(rank, world, mode):
    with both(change=freeze, **mode) as pair:
        assert pair.model.blocks[1].up.weight not in pair.own.dedicated_params
        before = {n: p.clone() for n, p in pair.twin.named_parameters() if not p.requires_grad}
        pair.train(range(3))
        pair.check()
        frozen = {n: p for n, p in pair.twin.named_parameters() if n in before}
        assert_bitwise(frozen, before)


# ---- clipping ----------------------------------------------------------------------------

NORMS = pytest.mark.parametrize("norm_type", [2.0, float("inf")])


def clip_and_compare(norm_type, **kwargs):
    with both(**kwargs) as pair:
        for step in range(3):
            pair.backward(step)
            pair.joint_backward(step)
            found = dmuon.clip_grad_norm_(pair.model, 0.3, norm_type)
            expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.3, norm_type)
            assert abs(float(found) - float(expected)) <= 1e-5
            again = dmuon.clip_grad_norm_(pair.model, 10.0, norm_type)
            assert abs(float(again) - min(float(expected), 0.3)) <= 1e-5
            pair.advance()
        pair.check()


@NORMS
@RESTS
@distributed(2)
def test_clipping_is_that_of_the_joint_batch(rank, world, rest, norm_type):
    clip_and_compare(norm_type, rest=rest)


@RESTS
@distributed(4)
def test_clipping_with_replicas(rank, world, rest):
    clip_and_compare(2.0, rest=rest, mesh=(2, 2))
