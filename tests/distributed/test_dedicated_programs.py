"""Programs around the `dedicated` layout: compiled blocks, collectives, pipeline stages."""

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
from tests.distributed.dedicated_models import MODES, both
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded, weights

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


@pytest.mark.parametrize(
    "backend, how",
    [
        ("eager", compile_in_place),
        ("eager", compile_all),
        ("aot_eager", compile_in_place),
        ("aot_eager", compile_wrapped),
        ("aot_eager", compile_children),
    ],
)
@distributed(2)
def test_compiled_before_planning(rank, world, backend, how):
    torch.compiler.reset()
    with both(compiled=lambda model: how(model, backend)) as pair:
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


@MODES
@distributed(2)
def test_collectives_of_the_user_between_ours(rank, world, mode):
    with both(Talking, **mode) as pair:
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
