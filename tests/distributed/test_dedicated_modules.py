"""Models with habits in the `dedicated` layout: how modules are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.dedicated_models import FREED, MODES, Skipping, both, follow
from tests.distributed.harness import distributed
from tests.distributed.models import Block, Net

# ---- several forwards, several backwards -------------------------------------------------


@pytest.mark.parametrize("how", ["one backward", "two", "two, last first", "retained"])
@MODES
@distributed(2)
def test_several_forwards_before_backward(rank, world, mode, how):
    with both(**mode) as pair:
        for step in range(0, 6, 2):
            losses = [pair.loss(pair.model, part, rank) / 2 for part in (step, step + 1)]
            if how == "one backward":
                sum(losses).backward()
            elif how == "retained":
                (losses[0] + losses[1]).backward(retain_graph=True)
                (losses[0] * 0).backward()
            else:
                for loss in losses[::-1] if "last" in how else losses:
                    loss.backward()
            for part in (step, step + 1):
                pair.joint_backward(part, 2)
            pair.advance()
        pair.check()


@distributed(2)
def test_gradients_of_inputs_and_of_some_weights(rank, world):
    """`torch.autograd.grad` accumulates nothing: nothing is reduced, and training goes on."""
    with both() as pair:
        for step in range(3):
            x = torch.randn(
                2, 24, generator=torch.Generator().manual_seed(step), requires_grad=True
            )
            found = torch.autograd.grad(pair.model.blocks[0](x).square().sum(), x)[0]
            expected = torch.autograd.grad(pair.twin.blocks[0](x).square().sum(), x)[0]
            assert torch.allclose(found, expected, atol=1e-4)
            pair.train([step])
        pair.check()


# ---- the order of calls ------------------------------------------------------------------


def twice(model, step, rank):
    model.order = [0, 1, 1, 2]


def twice_with_others_between(model, step, rank):
    model.order = [0, 1, 2, 0, 1]


def backwards(model, step, rank):
    model.order = [2, 1, 0]


def in_turn(model, step, rank):
    model.order = [[0, 1], [0, 2], [1, 2], [0, 1, 2]][step % 4]


def another_order_each_step(model, step, rank):
    generator = torch.Generator().manual_seed(step)
    model.order = torch.randperm(3, generator=generator).tolist()


def more_and_more_calls(model, step, rank):
    model.order = [0, 1, 2] * (1 + step)


ORDERS = [
    twice,
    twice_with_others_between,
    backwards,
    in_turn,
    another_order_each_step,
    more_and_more_calls,
]


@pytest.mark.parametrize("prepare", ORDERS, ids=lambda f: f.__name__)
@FREED
@distributed(2)
def test_orders_of_calls(rank, world, freed, prepare):
    follow(Skipping, steps=5, prepare=prepare, options={"free_after_forward": freed})


@pytest.mark.parametrize("prefetch", [0, 3])
@distributed(2)
def test_orders_of_calls_with_fsdp2_and_prefetch(rank, world, prefetch):
    for prepare in (backwards, in_turn, twice_with_others_between):
        follow(Skipping, rest="fsdp", steps=4, prepare=prepare, options={"prefetch": prefetch})


@distributed(4)
def test_orders_of_calls_with_replicas(rank, world):
    for prepare in (another_order_each_step, twice_with_others_between):
        follow(Skipping, steps=4, prepare=prepare, mesh=(2, 2))


def shared(model):
    """One block at two places of the list."""
    model.blocks.append(model.blocks[0])


def tied(model):
    model.blocks[2].up.weight = model.blocks[0].up.weight


def tied_inside_and_to_the_root(model):
    model.spare.weight = model.blocks[1].square.weight


class Square(Block):
    def __init__(self) -> None:
        super().__init__(24, 56)
        self.square = nn.Linear(24, 24)

    def forward(self, x):
        return super().forward(x) + self.square(x)


def squares():
    model = Net()
    model.blocks = nn.ModuleList(Square() for _ in range(3))
    model.use_spare = True
    return model


TIED = {
    "a block at two places": (Net, shared),
    "two blocks": (Net, tied),
    "a block and the root": (squares, tied_inside_and_to_the_root),
}


@pytest.mark.parametrize("kind", TIED)
@FREED
@distributed(2)
def test_tied_weights(rank, world, freed, kind):
    build, change = TIED[kind]
    follow(build, steps=4, change=change, options={"free_after_forward": freed})


@FREED
@distributed(2)
def test_tied_weights_and_fsdp2(rank, world, freed):
    follow(Net, steps=4, rest="fsdp", change=tied, options={"free_after_forward": freed})
