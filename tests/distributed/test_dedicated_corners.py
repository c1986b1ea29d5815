"""Programs in which backward asks for weights in an order of its own (`dedicated` layout)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import dmuon
from tests.distributed.dedicated_models import FREED, KEPT, both, follow
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of


def without_biases(model: Net) -> None:
    """So that no gain or bias holds a group's window open."""
    for block in model.blocks:
        block.norm, block.up.bias = nn.Identity(), None


class PartLater(Net):
    """Calls a part of the first block once more, after all blocks."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.blocks[0].up(x)[..., :24]
        return self.lm_head(self.mid(x))


class KeepsLoss(nn.Module):
    """A loss kept as an attribute, whose backward comes before that of the output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.losses: list = []

    def forward(self, x):
        y = self.inner(x)
        self.aux = self.inner.up(y).square().mean()
        self.losses = [self.inner.down.weight.square().mean()]
        return y


class WithLosses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsLoss(block) for block in self.blocks)


def loss_with_kept(model, inputs):
    loss = loss_of(model, inputs)
    return loss + sum(block.aux + block.losses[0] for block in model.blocks)


class Segments(Net):
    """Re-entrant checkpoints of two blocks each."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, tokens):
        x = self.tok(tokens)
        x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True)
        return self.lm_head(self.mid(x))


class Reversed(Net):
    """Runs its blocks in another order than they are registered in, by step."""

    order = (2, 0, 1)

    def forward(self, tokens):
        x = self.tok(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        return self.lm_head(self.mid(x))


@FREED
@distributed(2)
def test_a_part_called_after_its_block(rank, world, freed):
    follow(PartLater, steps=4, options={"free_after_forward": freed})


@distributed(2)
def test_losses_kept_as_attributes(rank, world):
    follow(WithLosses, steps=3, loss_of=loss_with_kept)


@pytest.mark.parametrize("accumulate", [False, True])
@distributed(2)
def test_reentrant_checkpoints_of_several_blocks(rank, world, accumulate):
    with both(Segments, change=without_biases) as pair:
        for step in range(3):
            if accumulate:
                with dmuon.no_sync(pair.model):
                    pair.backward(step + 100)
                pair.joint_backward(step + 100)
            pair.backward(step)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


@pytest.mark.parametrize("options", [{}, KEPT], ids=["freed", "kept"])
@distributed(2)
def test_two_forwards_then_two_backwards_in_another_order(rank, world, options):
    with both(Reversed, change=without_biases, options=options) as pair:
        for step in range(3):
            losses = [pair.loss(pair.model, s, pair.data_rank) for s in (step, step + 50)]
            for loss in reversed(losses):
                loss.backward()
            for s in (step, step + 50):
                pair.joint_backward(s)
            pair.advance()
        pair.check()


@distributed(2)
def test_uses_in_another_dtype_are_counted_over_several_backwards(rank, world):
    """Each use of a weight that is cast has a gradient of its own, and arrives by itself."""
    half = {"param_dtype": torch.bfloat16}
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with both(Reversed, change=without_biases, options=half, context=autocast) as pair:
        for step in range(2):
            losses = []
            for order in ((0, 0, 1, 2), (2, 1, 1, 0)):
                pair.model.order = order
                losses.append(pair.loss(pair.model, step, pair.data_rank))
            for loss in reversed(losses):
                loss.backward()
            for order in ((0, 0, 1, 2), (2, 1, 1, 0)):
                pair.twin.order = order
                pair.joint_backward(step)
            pair.advance()
        pair.check(0.05)


@distributed(2)
def test_a_second_derivative_is_refused(rank, world):
    with both() as pair:
        loss = loss_of(pair.model, batch(0, rank))
        inputs = [p for p in pair.model.parameters() if p.ndim == 1]
        with pytest.raises(dmuon.types.DmuonError, match="create_graph=True"):
            torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
