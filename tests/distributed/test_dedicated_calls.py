"""Programs that call their modules in ways of their own (`dedicated` layout)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint_sequential

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.types import DmuonError
from tests.distributed.harness import distributed
from tests.distributed.models import Block, Net, batch, loss_of, seeded, weights
from tests.distributed.owners import (
    DEDICATED,
    FSDP,
    KEPT,
    MUON,
    PLAIN,
    REPLICATED,
    Checkpointed,
    Ordered,
    assert_close,
    both,
    follow,
    gathered,
    layouts,
    whole,
)

# ---- the order of calls ----------------------------------------------------------------------


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


def some_and_several(model, step, rank):
    model.order = [[2, 0, 1], [1], [0, 2, 2]][step % 3]


ORDERS = [
    twice,
    twice_with_others_between,
    backwards,
    in_turn,
    another_order_each_step,
    more_and_more_calls,
    some_and_several,
]

# ---- parts called alone ----------------------------------------------------------------------


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


# ---- tied weights ----------------------------------------------------------------------------


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


# ---- what goes in and out --------------------------------------------------------------------


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


def frozen_start(model):
    model.tok.requires_grad_(False)


def frozen_first_block(model):
    frozen_start(model)
    model.blocks[0].requires_grad_(False)


# Re-entrant checkpointing of a block whose input has no gradient gives it none: with torch alone
# as well, so the first block is left out.
FROZEN = {
    "no gradient of the inputs": {"change": frozen_start},
    "nor of the first block": {"change": frozen_first_block},
    "saved checkpoints": {"build": partial(Checkpointed, False), "change": frozen_start},
    "saved, first block too": {"build": partial(Checkpointed, False), "change": frozen_first_block},
    "reentrant": {"build": partial(Checkpointed, True, (1, 2)), "change": frozen_start},
}

# ---- all of them -----------------------------------------------------------------------------

GROUPS = {
    "linears": lambda name, module: isinstance(module, nn.Linear),
    "nested": lambda name, module: name in ("blocks.0", "blocks.0.up", "blocks.1", "blocks.2.down"),
    "none": lambda name, module: False,
    "one": lambda name, module: name == "blocks.1",
}

BOTH = (PLAIN, KEPT)
PROGRAMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{f.__name__: (BOTH, {"build": Ordered, "prepare": f, "steps": 4}) for f in ORDERS},
    **{
        f"{f.__name__} with FSDP2 and prefetch={n}": (
            (FSDP,),
            {"build": Ordered, "prepare": f, "steps": 4, "options": {"prefetch": n}},
        )
        for f in (backwards, in_turn, twice_with_others_between)
        for n in (0, 3)
    },
    **{f.__name__: (BOTH, {"loss_of": f}) for f in WAYS},
    "a part later": (BOTH, {"build": PartLater}),
    "losses kept as attributes": ((PLAIN,), {"build": WithLosses, "loss_of": loss_with_kept}),
    **{f"groups: {n}": ((PLAIN, FSDP), {"options": {"groups": f}}) for n, f in GROUPS.items()},
    **{
        f"groups: {name}, {way['id']}": ((PLAIN,), way["case"] | {"options": {"groups": f}})
        for name, f in list(GROUPS.items())[:2]
        for way in (
            {"id": "in another order", "case": {"build": Ordered, "prepare": some_and_several}},
            {"id": "children alone", "case": {"loss_of": children_alone}},
        )
    },
    "a block at two places": (BOTH, {"change": shared}),
    "two tied blocks": ((*BOTH, FSDP), {"change": tied}),
    "a block tied to the root": (BOTH, {"build": squares, "change": tied_inside_and_to_the_root}),
    **{f"{kind} out": ((PLAIN,), {"build": partial(Wrapping, kind)}) for kind in WRAPPINGS},
    **{kind: ((PLAIN,), case) for kind, case in FROZEN.items()},
}


@pytest.mark.parametrize("program", PROGRAMS)
@distributed(2)
def test_programs_follow_the_reference(rank, world, program):
    names, case = PROGRAMS[program]
    for layout in names:
        follow(layout=layout, **case)


@distributed(4)
def test_orders_of_calls_with_replicas(rank, world):
    for prepare in (another_order_each_step, twice_with_others_between):
        follow(Ordered, mesh=(2, 2), prepare=prepare)


@layouts(PLAIN, KEPT)
@distributed(2)
def test_ways_of_calling_alternate(rank, world, layout):
    with both(Net, layout) as pair:
        for step in range(3):
            pair.loss_of = [without_root, loss_of, children_alone][step % 3]
            pair.train([step])
            for way in (children_alone, without_root, loss_of):
                pair.loss_of = way
                pair.assert_same_loss(50 + step)
        pair.check()


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


@layouts(*DEDICATED)
@distributed(2)
def test_multihead_attention(rank, world, layout):
    with both(attending, layout) as pair:
        pair.train(range(3))
        pair.check()
        pair.model.eval(), pair.twin.eval()  # another code path
        pair.assert_same_loss(9)
        assert any("out_proj" in n for r in range(world) for n in pair.own.owned_by(r))


# ---- several forwards, several backwards -----------------------------------------------------


@layouts(*DEDICATED)
@distributed(2)
def test_several_forwards_before_backward(rank, world, layout):
    for how in ("one backward", "two", "two, last first", "retained"):
        with both(Net, layout) as pair:
            for step in (0, 2):
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


def without_biases(model):
    """So that no gain or bias holds a group's bucket open."""
    for block in model.blocks:
        block.norm, block.up.bias = nn.Identity(), None


@layouts(PLAIN, KEPT)
@distributed(2)
def test_two_forwards_then_two_backwards_in_another_order(rank, world, layout):
    with both(Ordered, layout, change=without_biases) as pair:
        pair.model.order = pair.twin.order = (2, 0, 1)
        for step in range(3):
            losses = [pair.loss(pair.model, s, rank) for s in (step, step + 50)]
            for loss in reversed(losses):
                loss.backward()
            for s in (step, step + 50):
                pair.joint_backward(s)
            pair.advance()
        pair.check()


@distributed(2)
def test_uses_in_another_dtype_are_counted_over_several_backwards(rank, world):
    """Each use of a weight that is cast has a gradient of its own, and arrives by itself."""
    orders = ((0, 0, 1, 2), (2, 1, 1, 0))
    options = {"param_dtype": torch.bfloat16}
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
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


class Segments(Net):
    """Re-entrant checkpoints of two blocks each."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, tokens):
        x = self.tok(tokens)
        x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True)
        return self.lm_head(self.mid(x))


@distributed(2)
def test_reentrant_checkpoints_of_several_blocks(rank, world):
    for accumulate in (False, True):
        with both(Segments, change=without_biases) as pair:
            for step in range(3):
                if accumulate:
                    with dmuon.no_sync(pair.model):
                        pair.backward(step + 100)
                    pair.joint_backward(step + 100)
                pair.train([step])
            pair.check()


@distributed(2)
def test_gradients_of_inputs_alone_and_second_derivatives(rank, world):
    """`torch.autograd.grad` accumulates nothing: nothing is reduced, and training goes on. A
    second derivative is refused."""
    with both() as pair:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
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


def in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrapped(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def children(model, backend):
    for block in model.blocks:
        block.up.compile(backend=backend)
    return model


def all_of_it(model, backend):
    model.compile(backend=backend)
    return model


COMPILED = [
    ("eager", in_place),
    ("eager", all_of_it),
    ("aot_eager", in_place),
    ("aot_eager", wrapped),
    ("aot_eager", children),
]


@pytest.mark.parametrize("backend, how", COMPILED)
@distributed(2)
def test_compiled_models(rank, world, backend, how):
    torch.compiler.reset()
    with both(wrap=partial(how, backend=backend)) as pair:
        pair.train(range(2))
        pair.check()
        pair.assert_same_loss(9)
    if backend == "aot_eager" and how is not children:
        with both() as pair:  # after planning
            how(pair.model, backend)
            pair.train(range(2))
            pair.check()
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

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
            self.tell(x.square().mean())
            if x.requires_grad:
                x.register_hook(lambda grad: self.tell(grad.square().sum()))
        if self.use_spare:
            x = x + self.spare(x)
        return self.lm_head(self.mid(x))


def some_ranks_use_spare(model, step, rank):
    model.use_spare = (step + rank) % 2 == 0


@layouts(*DEDICATED, REPLICATED)
@distributed(2)
def test_collectives_of_the_user_between_ours(rank, world, layout):
    """In backward while ours are in flight: in another group, so none cross, whoever is late."""
    with both(Talking, layout) as pair:
        if layout != FSDP:  # which wants gradients of every rank
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


# ---- pipeline stages -------------------------------------------------------------------------


class Chunk(nn.Module):
    """Children of a model under the names that they have there, run one after the other."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                x = part(x)
        return x


def chunk_of(model, i):
    """Four chunks: stages take turns."""
    blocks = model.blocks
    if i == 0:
        return Chunk(tok=model.tok, blocks=blocks[:1])
    if i == 3:
        return Chunk(mid=model.mid, lm_head=model.lm_head)
    return Chunk(blocks=blocks[i : i + 1])


def send(tensor, peer):
    dist.send(tensor.detach().contiguous(), peer)


def receive(shape, peer):
    found = torch.empty(shape)
    dist.recv(found, peer)
    return found.requires_grad_()


@pytest.mark.parametrize("freed, micro_batches", [(False, 1), (True, 2)])
@distributed(4)
def test_two_models_in_one_optimizer_of_each_pipeline_stage(rank, world, freed, micro_batches):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage, data_rank = divmod(rank, 2)
    peer = (1 - stage) * 2 + data_rank
    model, twin = seeded(), seeded()
    chunks = {i: chunk_of(model, i) for i in range(4) if i % 2 == stage}
    options = dmuon.DedicatedOptions(free_after_forward=freed)
    dedicate = partial(dmuon.dedicate_params, mesh=mesh["dp"], layout="dedicated", options=options)
    owns = {i: dedicate(chunk, solver="greedy") for i, chunk in chunks.items()}
    named = [p for chunk in chunks.values() for p in chunk.parameters()]
    opt, ref = dmuon.Muon(named, **MUON), ReferenceMuon(twin, **MUON)

    def forward(part):
        seen = {}
        tokens, targets = batch(part, data_rank)
        for i, chunk in chunks.items():
            x = tokens if i == 0 else receive((4, 8, 24), peer)
            y = chunk(x)
            if i < 3:
                send(y, peer)
            else:
                y = F.cross_entropy(y.flatten(0, 1), targets.flatten()) / micro_batches
            seen[i] = (x, y)
        return seen

    def backward(seen):
        for i, (x, y) in reversed(seen.items()):
            y.backward() if i == 3 else y.backward(receive(y.shape, peer).detach())
            if i:
                send(x.grad, peer)

    for step in range(2):
        parts = range(step * micro_batches, (step + 1) * micro_batches)
        for seen in [forward(part) for part in parts]:
            backward(seen)
        opt.step(), opt.zero_grad()
        for part in parts:
            for r in range(2):
                (loss_of(twin, batch(part, r)) / (2 * micro_batches)).backward()
        ref.step(), ref.zero_grad()
    for i, own in owns.items():
        assert_close(whole(chunks[i], own), weights(chunk_of(twin, i)))
        own.close()
