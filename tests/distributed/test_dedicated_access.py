"""The `dedicated` layout from outside: direct reads, parts called alone, groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.dedicated_models import FREED, MODES, RESTS, Skipping, both, follow
from tests.distributed.harness import distributed
from tests.distributed.models import batch, loss_of, weights

# ---- direct reads and writes -------------------------------------------------------------


def matrices(pair):
    return [n for n, p in pair.model.named_parameters() if p in pair.own.dedicated_params]


@RESTS
@distributed(2)
def test_weights_can_be_read_inside_materialized_only(rank, world, rest):
    with both(rest=rest) as pair:
        pair.train(range(2))
        named, expected = dict(pair.model.named_parameters()), weights(pair.twin)
        for name in matrices(pair):
            full = pair.own.shape_of(name)
            owned = pair.own.owner_of(name) == rank
            with pair.own.materialized(pair.model.get_submodule(name.rpartition(".")[0])):
                assert named[name].shape == full == expected[name].shape
                assert float((named[name] - expected[name]).abs().max()) <= 1e-5, name
                assert named[name] is dict(pair.model.named_parameters())[name]
            assert (named[name].numel() > 0) == owned, name
        with pair.own.materialized(pair.model.blocks[0]):
            assert pair.model.blocks[0].up.weight.shape == (56, 24)
            with pair.own.materialized(pair.model):
                assert pair.model.blocks[1].up.weight.shape == (56, 24)
            assert pair.model.blocks[0].up.weight.shape == (56, 24)
        pair.train(range(2, 4))
        pair.check()


@torch.no_grad()
def rewrite(model, seed):
    torch.manual_seed(seed)  # the same on every rank
    nn.init.normal_(model.blocks[0].up.weight, std=0.2)
    nn.init.orthogonal_(model.blocks[1].down.weight)
    model.mid.weight.mul_(0.5)
    model.blocks[2].up.weight[3:5] = 0.25


@MODES
@distributed(2)
def test_what_is_written_inside_materialized_persists(rank, world, mode):
    with both(**mode) as pair:
        for step in range(3):
            with pair.own.materialized(pair.model):
                rewrite(pair.model, step)
            rewrite(pair.twin, step)
            pair.check(1e-5 if step else 0.0)
            pair.train([step])
        pair.check()


@distributed(4)
def test_what_is_written_reaches_every_replica(rank, world):
    with both(mesh=(2, 2)) as pair:
        for step in range(2):
            with pair.own.materialized(pair.model):
                rewrite(pair.model, step)
            rewrite(pair.twin, step)
            pair.train([step])
        pair.check()


@FREED
@distributed(2)
def test_forward_and_backward_inside_materialized(rank, world, freed):
    with both(options={"free_after_forward": freed}) as pair:
        for step in range(3):
            with pair.own.materialized(pair.model):
                pair.backward(step)
                assert pair.model.blocks[0].up.weight.shape == (56, 24)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


@distributed(2)
def test_a_penalty_on_weights_read_directly(rank, world):
    """Gradients of a term outside of every module: backward inside the context."""

    def penalty(model):
        return sum(b.up.weight.square().sum() for b in model.blocks) * 0.01

    with both() as pair:
        for step in range(3):
            with pair.own.materialized(pair.model):
                (pair.loss(pair.model, step, rank) + penalty(pair.model)).backward()
            pair.joint_backward(step)
            penalty(pair.twin).backward()
            pair.advance()
        pair.check()


# ---- parts called alone ------------------------------------------------------------------


def without_root(model, inputs):
    """The root's forward, spelled out: no hook of the root runs."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = block(x)
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


def children_alone(model, inputs):
    """Nor hooks of blocks."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = x + block.down(F.gelu(block.up(block.norm(x))))
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


def one_block_alone(model, inputs):
    x = model.tok(inputs[0])
    return model.blocks[1](x).square().mean()


def a_child_and_the_model(model, inputs):
    extra = model.blocks[1].up(model.tok(inputs[0])).square().mean()
    return loss_of(model, inputs) + 0.1 * extra


def a_block_and_its_child(model, inputs):
    block, x = model.blocks[0], model.tok(inputs[0])
    return (block(x) + block.down(block.up(x))).square().mean()


WAYS = [without_root, children_alone, one_block_alone, a_child_and_the_model, a_block_and_its_child]


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@FREED
@distributed(2)
def test_parts_called_alone(rank, world, freed, way):
    follow(steps=4, loss_of=way, options={"free_after_forward": freed})


@FREED
@distributed(2)
def test_ways_of_calling_alternate(rank, world, freed):
    with both(options={"free_after_forward": freed}) as pair:
        for step in range(6):
            pair.loss_of = [without_root, loss_of, children_alone][step % 3]
            pair.train([step])
            with torch.no_grad():
                for way in (children_alone, without_root, loss_of):
                    found = way(pair.model, batch(50 + step, rank))
                    expected = way(pair.twin, batch(50 + step, rank))
                    assert abs(float(found) - float(expected)) <= 1e-4, way.__name__
        pair.check()


# ---- groups ------------------------------------------------------------------------------

GROUPS = {
    "linears": lambda name, module: isinstance(module, nn.Linear),
    "nested": lambda name, module: name in ("blocks.0", "blocks.0.up", "blocks.1", "blocks.2.down"),
    "none": lambda name, module: False,
    "one": lambda name, module: name == "blocks.1",
}


@pytest.mark.parametrize("groups", GROUPS)
@RESTS
@distributed(2)
def test_groups_by_predicate(rank, world, rest, groups):
    follow(rest=rest, options={"groups": GROUPS[groups]})


@pytest.mark.parametrize("groups", ["linears", "nested"])
@distributed(2)
def test_groups_and_parts_in_another_order(rank, world, groups):
    def prepare(model, step, rank):
        model.order = [[2, 0, 1], [1], [0, 2, 2]][step % 3]

    options = {"groups": GROUPS[groups]}
    follow(Skipping, steps=4, prepare=prepare, options=options)
    follow(Skipping, steps=4, loss_of=children_alone, options=options)
