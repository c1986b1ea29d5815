"""Programs that train in ways of their own, in the owners' layouts, against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dmuon
from dmuon.types import DmuonError
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import layouts
from tests.distributed.models import (
    VOCAB,
    Block,
    Checkpointed,
    Net,
    Ordered,
    children_alone,
    loss_of,
    net_of,
    tied,
    without_root,
)
from tests.distributed.twins import Rows, both

# ---- the order of calls ----------------------------------------------------------------------


ORDERS = {
    "twice with others between": lambda step: [0, 1, 2, 0, 1],
    "backwards": lambda step: [2, 1, 0],
    "some and several": lambda step: [[2, 0, 1], [1], [0, 2, 2]][step % 3],
}


def ordered(name):
    """Of `follow`: the blocks run in this order at each step."""

    def prepare(model, step, rank):
        model.order = ORDERS[name](step)

    return {"build": Ordered, "prepare": prepare}


# ---- parts called alone ----------------------------------------------------------------------


def one_block_alone(model, inputs):
    x = model.tok(inputs[0])
    return model.blocks[1](x).square().mean()


def a_block_and_its_child(model, inputs):
    block, x = model.blocks[0], model.tok(inputs[0])
    return (block(x) + block.down(block.up(x))).square().mean()


WAYS = [children_alone, one_block_alone, a_block_and_its_child]


class PartLater(Net):
    """Calls a part of the first block once more, after all blocks."""

    def body(self, x):
        x = super().body(x)
        return x + self.blocks[0].up(x)[..., :24]


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


def keep_losses(model):
    model.blocks = nn.ModuleList(KeepsLoss(block) for block in model.blocks)


def loss_with_kept(model, inputs):
    loss = loss_of(model, inputs)
    return loss + sum(block.aux + block.losses[0] for block in model.blocks)


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


# ---- tied weights ----------------------------------------------------------------------------


def repeated(model):
    """One block at two places of the list."""
    model.blocks.append(model.blocks[0])


def tied_inside_and_to_the_root(model):
    model.use_spare = True
    model.spare.weight = model.blocks[1].square.weight


class Square(Block):
    def __init__(self) -> None:
        super().__init__(24, 56)
        self.square = nn.Linear(24, 24)

    def forward(self, x):
        return super().forward(x) + self.square(x)


def tied_head(model):
    model.mid, model.lm_head = nn.Identity(), nn.Linear(24, VOCAB, bias=False)
    model.lm_head.weight = model.tok.weight


# ---- what goes in and out --------------------------------------------------------------------


@dataclass
class Pair:
    hidden: Any
    others: Any


WRAPPINGS = {
    "tuple and dict": (lambda x, other: (other, {"a": (x,)}), lambda y: y[1]["a"][0]),
    "dataclass": (lambda x, other: Pair([x], None), lambda y: y.hidden[0]),
}


class Wrapping(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WrappingBlock(kind) for _ in range(3))
        self.unwrap = WRAPPINGS[kind][1]

    def body(self, x):
        for block in self.blocks:
            x = self.unwrap(block(hidden=x, mask=x.detach()))
        return x


class WrappingBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__(24, 56)
        self.wrap = WRAPPINGS[kind][0]

    def forward(self, *, hidden, mask):
        return self.wrap(super().forward(hidden), mask)


def frozen_start(model):
    model.tok.requires_grad_(False)


def frozen_first_block(model):
    frozen_start(model)
    model.blocks[0].requires_grad_(False)


def without_biases(model):
    """So that no gain or bias holds a group's bucket open."""
    for block in model.blocks:
        block.norm, block.up.bias = nn.Identity(), None


# ---- activation checkpointing ----------------------------------------------------------------


class InnerCheckpoint(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(24, 56)
        self.again = partial(checkpoint, use_reentrant=reentrant)

    def hidden(self, x):
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x):
        return x + self.down(self.again(self.hidden, x))


class Segments(Net):
    """Re-entrant checkpoints of two blocks each."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def body(self, x):
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True)


# ---- forwards and backwards of a step --------------------------------------------------------


def inside_no_sync(pair, step):
    ddp = isinstance(pair.model, DistributedDataParallel)
    with pair.model.no_sync() if ddp else dmuon.no_sync(pair.model):
        pair.backward(step)
    pair.joint_backward(step)


def some_in_no_sync(pair, step):
    inside_no_sync(pair, step + 100)
    pair.both_backward(step)


def after_dropped_gradients(pair, step):
    pair.backward(10 + step)
    pair.opt.zero_grad()
    pair.both_backward(step)


def two_losses(pair, step, how):
    parts = (step, step + 50)
    losses = [pair.loss(pair.model, part, pair.data_rank) / 2 for part in parts]
    if how == "graph retained":
        sum(losses).backward(retain_graph=True)
        (losses[0] * 0).backward()
    else:
        for loss in reversed(losses):
            loss.backward()
    for part in parts:
        pair.joint_backward(part, 2)


def penalty(model):
    return sum(b.up.weight.square().sum() for b in model.blocks) * 0.01


def inside_materialized(pair, step):
    """With a term of weights that are read directly, outside of every module."""
    with pair.own.materialized(pair.model):
        loss = pair.loss(pair.model, step, pair.data_rank)
        (loss + penalty(pair.model)).backward()
        assert pair.model.blocks[0].up.weight.shape == (56, 24)
    pair.joint_backward(step)
    penalty(pair.twin).backward()


def evaluate(pair, step):
    """Twice in a row."""
    pair.model.eval()
    for _ in range(2):
        pair.assert_same_loss(100 + step)
    if hasattr(pair.model, "reshard"):
        pair.model.reshard()  # FSDP2 leaves the root gathered until a backward
    pair.model.train()


def evaluated_at_any_time(pair, step):
    evaluate(pair, step)
    pair.backward(step)
    evaluate(pair, step + 50)
    pair.joint_backward(step)


def losses_thrown_away(pair, step):
    with torch.inference_mode():
        pair.assert_same_loss(40 + step)
    pair.loss(pair.model, 70 + step, pair.data_rank)
    loss = pair.loss(pair.model, step, pair.data_rank)
    evaluate(pair, step)
    loss.backward()
    pair.loss(pair.model, 80 + step, pair.data_rank)
    pair.joint_backward(step)


def ways_alternate(pair, step):
    pair.loss_of = [without_root, loss_of, children_alone][step % 3]
    pair.both_backward(step)
    for pair.loss_of in (children_alone, without_root, loss_of):
        pair.assert_same_loss(50 + step)


# ---- all of them -----------------------------------------------------------------------------

PROGRAMS = Rows()
program = PROGRAMS.add


EACH = ("dedicated", "reduced")
GROUPS = {
    "linears": lambda name, module: isinstance(module, nn.Linear),
    "nested": lambda name, module: name in ("blocks.0", "blocks.0.up", "blocks.1", "blocks.2.down"),
}

program("twice with others between", **ordered("twice with others between"), steps=4)
some_and_several = ordered("some and several")
program("some and several", **some_and_several, options={"prefetch": 3}, steps=4)
program("some and several, FSDP2", "dedicated fsdp", **some_and_several, options={"prefetch": 0})
program("some and several, replicas", world=4, mesh=(2, 2), **some_and_several)
for f in WAYS:
    program(f.__name__, *EACH, loss_of=f)
program("ways alternate", round=ways_alternate)
program("a part later", *EACH, build=PartLater)
program("losses kept as attributes", change=keep_losses, loss_of=loss_with_kept)
for name, f in GROUPS.items():
    program(f"groups: {name}", **some_and_several, options={"groups": f})
nested = {"options": {"groups": GROUPS["nested"]}}
program("groups: nested, children alone", loss_of=children_alone, **nested)
program("a block at two places", change=repeated)
program("two tied blocks", "dedicated fsdp", "reduced", change=tied)
program("a tied head", change=tied_head)
square = partial(net_of, Square)
program("a block tied to the root", build=square, change=tied_inside_and_to_the_root)
for name in WRAPPINGS:
    program(f"{name} out", build=partial(Wrapping, name))

for again in (False, True):
    kind = "reentrant" if again else "saved"
    build = partial(Checkpointed, again)
    program(f"{kind} blocks", "dedicated kept", "dedicated fsdp", build=build)
    inner = partial(net_of, partial(InnerCheckpoint, again))
    program(f"{kind} inside", build=inner)
    # Re-entrant checkpointing of a block whose input has no gradient gives it none: with torch
    # alone as well, so the first block is left out.
    some = partial(Checkpointed, again, (1, 2) if again else (0, 1, 2))
    program(f"{kind}, no gradient of the inputs", build=some, change=frozen_start)
program("saved, first block frozen", build=some, change=frozen_first_block)
segments = {"build": Segments, "change": without_biases}
program("two blocks a checkpoint, accumulated", **segments, round=some_in_no_sync)

program("backward only in no_sync", "dedicated", "reduced ddp", round=inside_no_sync)
program("gradients dropped", *EACH, round=after_dropped_gradients)
program("two losses, graph retained", round=partial(two_losses, how="graph retained"))
last_first = ordered("backwards") | {"round": partial(two_losses, how="last first")}
program("two losses, another order", **last_first, change=without_biases)
program("inside materialized", round=inside_materialized)
program("evaluated at any time", "dedicated kept", round=evaluated_at_any_time)
build = partial(net_of, Attending)
program("attention without hooks", "dedicated fsdp", build=build, round=evaluated_at_any_time)
program("losses thrown away", round=losses_thrown_away)


@PROGRAMS.each()
@distributed()
def test_programs_follow_the_reference(rank, world, name):
    PROGRAMS.follow(name)


@distributed(2)
def test_uses_in_another_dtype_are_counted_over_several_backwards(rank, world):
    """Each use of a weight that is cast has a gradient of its own, and arrives by itself."""
    orders = ((0, 0, 1, 2), (2, 1, 1, 0))
    options = {"param_dtype": torch.bfloat16}
    autocast = partial(torch.autocast, torch.get_default_device().type, dtype=torch.bfloat16)
    with both(Ordered, change=without_biases, options=options, context=autocast) as pair:
        for step in range(2):
            losses = []
            for pair.model.order in orders:
                losses.append(pair.loss(pair.model, step, rank))
            for loss in reversed(losses):
                loss.backward()
            for pair.twin.order in orders:
                pair.joint_backward(step)
            pair.advance()
        pair.check(0.05)


@distributed(2)
def test_gradients_of_inputs_alone_and_second_derivatives(rank, world):
    """`torch.autograd.grad` accumulates nothing: nothing is reduced, and training goes on. A
    second derivative is refused."""
    with both() as pair:
        for step in range(3):
            generator = torch.Generator(torch.get_default_device()).manual_seed(step)
            x = torch.randn(2, 24, generator=generator, requires_grad=True)
            found = torch.autograd.grad(pair.model.blocks[0](x).square().sum(), x)[0]
            expected = torch.autograd.grad(pair.twin.blocks[0](x).square().sum(), x)[0]
            assert torch.allclose(found, expected, atol=1e-4)
            pair.train([step])
        pair.check()
        loss = pair.loss(pair.model, 0, rank)
        inputs = [p for p in pair.model.parameters() if p.ndim == 1]
        with pytest.raises(DmuonError, match="create_graph=True"):
            torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)


# ---- compiled blocks -------------------------------------------------------------------------


def compiled(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@distributed(2)
def test_compiled_blocks(rank, world):
    """They are compiled before planning, or after."""
    torch.compiler.reset()
    for wrap in (compiled, lambda model: model):
        with both(wrap=wrap) as pair:
            compiled(pair.model)
            pair.train(range(2))
            pair.check()
            pair.assert_same_loss(9)
    torch.compiler.reset()


# ---- users' own collectives ------------------------------------------------------------------


class Talking(Net):
    """All ranks exchange statistics in forward and gradients' norms in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = True
        self.heard = []

    def tell(self, value):
        if self.talk:
            value = value.detach().clone()
            dist.all_reduce(value)
            self.heard.append(float(value))

    def body(self, x):
        for block in self.blocks:
            x = block(x)
            self.tell(x.square().mean())
            if x.requires_grad:
                x.register_hook(lambda grad: self.tell(grad.square().sum()))
        return x + self.spare(x) if self.use_spare else x


def some_ranks_use_spare(model, step, rank):
    model.use_spare = (step + rank) % 2 == 0


@layouts("dedicated", "reduced")
def test_collectives_of_the_user_between_ours(rank, world, layout):
    """In backward while ours are in flight: in another group, so none cross, whoever is late."""
    with both(Talking, layout) as pair:
        pair.prepare = some_ranks_use_spare
        pair.twin.talk = False
        for step in range(3):
            pair.backward(step)
            dist.barrier()
            pair.joint_backward(step)
            pair.advance()
            dist.barrier()
        pair.check()
        assert gathered(pair.model.heard) == [pair.model.heard] * world
        assert len(pair.model.heard) == 18
