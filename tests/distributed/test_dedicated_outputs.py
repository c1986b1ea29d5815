"""What modules take and return in the `dedicated` layout."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.dedicated_models import MODES, Checkpointed, both, follow
from tests.distributed.harness import distributed
from tests.distributed.models import Block, Net, batch, loss_of

# ---- what goes in and out ----------------------------------------------------------------


@dataclass
class Pair:
    hidden: Any
    others: Any


class Output(OrderedDict):
    """As Hugging Face's ModelOutput: a mapping whose values are attributes too."""

    def __init__(self, hidden) -> None:
        super().__init__(hidden=hidden, logits=None)
        self.hidden = hidden


@dataclass
class DataOutput(OrderedDict):
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            self[field.name] = getattr(self, field.name)


WRAPPINGS = {
    "tuple": (lambda x, other: (other, (x,)), lambda y: y[1][0]),
    "dict": (lambda x, other: {"a": [other], "b": {"c": x}}, lambda y: y["b"]["c"]),
    "dataclass": (lambda x, other: Pair([x], None), lambda y: y.hidden[0]),
    "mapping": (lambda x, other: Output(x), lambda y: y["hidden"]),
    "mapping and dataclass": (lambda x, other: DataOutput(x), lambda y: y.hidden),
    "none": (lambda x, other: (x, None, "text", 3), lambda y: y[0]),
}


class Wrapping(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WrappingBlock(kind) for _ in range(3))
        self.unwrap = WRAPPINGS[kind][1]

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = self.unwrap(block(hidden=x, mask=tokens))
        return self.lm_head(self.mid(x))


class WrappingBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__(24, 56)
        self.wrap = WRAPPINGS[kind][0]

    def forward(self, *, hidden, mask):
        return self.wrap(super().forward(hidden), mask)


@pytest.mark.parametrize("kind", WRAPPINGS)
@distributed(2)
def test_nested_outputs(rank, world, kind):
    follow(lambda: Wrapping(kind))


def frozen_start(model):
    model.tok.requires_grad_(False)


def frozen_first_block(model):
    frozen_start(model)
    model.blocks[0].requires_grad_(False)


@pytest.mark.parametrize("change", [frozen_start, frozen_first_block])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@distributed(2)
def test_inputs_without_gradients(rank, world, reentrant, change):
    follow(Net, steps=4, change=change)
    if not reentrant or change is frozen_start:
        # Re-entrant checkpointing of a block whose input has no gradient gives it none: with
        # torch alone as well, so the first block is left out.
        which = (1, 2) if reentrant else (0, 1, 2)
        follow(lambda: Checkpointed(reentrant, which), steps=4, change=change)


class Attending(nn.Module):
    """`nn.MultiheadAttention` reads the weights of its ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 3, bias=False, batch_first=True)
        self.mlp = Block(24, 56)

    def forward(self, x):
        y = self.norm(x)
        return self.mlp(x + self.attention(y, y, y, need_weights=False)[0])


def attending():
    model = Net()
    model.blocks = nn.ModuleList(Attending() for _ in range(2))
    return model


@MODES
@distributed(2)
def test_multihead_attention(rank, world, mode):
    with both(attending, **mode) as pair:
        pair.train(range(3))
        pair.check()
        pair.model.eval(), pair.twin.eval()  # another code path
        with torch.no_grad():
            found = loss_of(pair.model, batch(9, rank))
            assert abs(float(found) - float(loss_of(pair.twin, batch(9, rank)))) <= 1e-5
        assert any("out_proj" in n for r in range(world) for n in pair.own.owned_by(r))
