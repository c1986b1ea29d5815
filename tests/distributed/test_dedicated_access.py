"""The `dedicated` layout from outside: direct reads, parts called alone, compiled blocks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.reference import ReferenceMuon
from tests.distributed.dedicated import MUON, whole
from tests.distributed.dedicated_models import FREED, RESTS, Skipping, both, follow
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded, weights

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


@FREED
@RESTS
@distributed(2)
def test_what_is_written_inside_materialized_persists(rank, world, rest, freed):
    with both(rest=rest, options={"free_after_forward": freed}) as pair:
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
@FREED
@RESTS
@distributed(2)
def test_groups_by_predicate(rank, world, rest, freed, groups):
    options = {"groups": GROUPS[groups], "free_after_forward": freed}
    follow(steps=4, rest=rest, options=options)


@pytest.mark.parametrize("groups", ["linears", "nested"])
@distributed(2)
def test_groups_and_parts_in_another_order(rank, world, groups):
    def prepare(model, step, rank):
        model.order = [[2, 0, 1], [1], [0, 2, 2]][step % 3]

    options = {"groups": GROUPS[groups]}
    follow(Skipping, steps=4, prepare=prepare, options=options)
    follow(Skipping, steps=4, loss_of=children_alone, options=options)


# ---- compiled blocks ---------------------------------------------------------------------


def compile_in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def compile_wrapped(model, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


def compile_children(model, backend):
    for block in model.blocks:
        block.up.compile(backend=backend)


def compile_all(model, backend):
    model.compile(backend=backend)


COMPILED = [compile_in_place, compile_wrapped, compile_children, compile_all]


@pytest.mark.parametrize("how", COMPILED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@FREED
@distributed(2)
def test_compiled_before_planning(rank, world, freed, backend, how):
    torch.compiler.reset()
    options = {"free_after_forward": freed}
    with both(compiled=lambda model: how(model, backend), options=options) as pair:
        pair.train(range(3))
        pair.check()
        with torch.no_grad():
            found = pair.loss(pair.model, 9, rank)
            assert abs(float(found) - float(pair.loss(pair.twin, 9, rank))) <= 1e-5
    torch.compiler.reset()


@pytest.mark.parametrize("how", [compile_in_place, compile_wrapped], ids=lambda f: f.__name__)
@distributed(2)
def test_compiled_after_planning(rank, world, how):
    torch.compiler.reset()
    with both() as pair:
        how(pair.model, "aot_eager")
        pair.train(range(3))
        found, expected = whole(pair.model, pair.own), weights(pair.twin)
        for name, weight in found.items():
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-5), name
    torch.compiler.reset()


# ---- users' own collectives --------------------------------------------------------------


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
        return self.lm_head(self.mid(x))


@FREED
@RESTS
@distributed(2)
def test_collectives_of_the_user_between_ours(rank, world, rest, freed):
    options = {"free_after_forward": freed, "prefetch": 3}
    with both(Talking, rest=rest, options=options) as pair:
        pair.twin.talk = False
        for step in range(3):
            pair.backward(step)
            dist.barrier()
            pair.joint_backward(step)
            pair.advance()
            dist.barrier()
        pair.check()
        heard = [None] * world
        dist.all_gather_object(heard, pair.model.heard)
        assert len(heard[0]) == 18 and heard[0] == heard[1]


# ---- pipeline stages ---------------------------------------------------------------------


def chunk_of(model, i):
    """Four chunks: a model each, of which a stage has the first and the third, or the others."""
    layers = [nn.Sequential(model.tok, model.blocks[0])]
    layers += [nn.Sequential(model.blocks[k]) for k in (1, 2)]
    layers += [nn.Sequential(model.mid, model.lm_head)]
    return layers[i]


def send(tensor, peer):
    dist.send(tensor.detach().contiguous(), peer)


def receive(shape, peer):
    found = torch.empty(shape)
    dist.recv(found, peer)
    return found.requires_grad_()


@pytest.mark.parametrize("micro_batches", [1, 2])
@FREED
@distributed(4)
def test_two_models_in_one_optimizer_of_each_pipeline_stage(rank, world, freed, micro_batches):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    stage, data_rank = divmod(rank, 2)
    peer = (1 - stage) * 2 + data_rank
    model, twin = seeded(), seeded()
    chunks = {i: chunk_of(model, i) for i in range(4) if i % 2 == stage}
    options = dmuon.DedicatedOptions(free_after_forward=freed)
    owns = {
        i: dmuon.dedicate_params(
            chunk, mesh["dp"], layout="dedicated", options=options, solver="greedy"
        )
        for i, chunk in chunks.items()
    }
    named = [p for chunk in chunks.values() for p in chunk.parameters()]
    opt, ref = dmuon.Muon(named, **MUON), ReferenceMuon(twin, **MUON)

    def forward(part):
        seen = {}
        tokens, targets = batch(part, data_rank)
        for i in range(4):
            if i % 2 != stage:
                continue
            x = tokens if i == 0 else receive((4, 8, 24), peer)
            y = chunks[i](x)
            seen[i] = (x, y)
            if i < 3:
                send(y, peer)
            else:
                loss = F.cross_entropy(y.flatten(0, 1), targets.flatten()) / micro_batches
                seen[i] = (x, loss)
        return seen

    def backward(seen):
        for i in (3, 2, 1, 0):
            if i % 2 != stage:
                continue
            x, y = seen[i]
            y.backward() if i == 3 else y.backward(receive(y.shape, peer).detach())
            if i:
                send(x.grad, peer)

    for step in range(3):
        parts = range(step * micro_batches, (step + 1) * micro_batches)
        for seen in [forward(part) for part in parts]:
            backward(seen)
        opt.step(), opt.zero_grad()
        for part in parts:
            for r in range(2):
                (loss_of(twin, batch(part, r)) / (2 * micro_batches)).backward()
        ref.step(), ref.zero_grad()
    for i, own in owns.items():
        found, expected = whole(chunks[i], own), weights(chunk_of(twin, i))
        for name, weight in found.items():
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-5), name
        own.close()
