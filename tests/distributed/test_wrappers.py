"""What people put around a model, and models of unusual make-up."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmuon
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    largest_difference,
    loss_of,
    reference_for,
    seeded,
    weights,
)

FP32 = {"ns_dtype": torch.float32, "lr": 0.02}


def train_against_reference(model, wrapped, rank, world, steps=4, loss=loss_of, **kwargs):
    """Largest difference of any weight after the last step; every forward waits by itself."""
    twin = seeded(type(model))
    twin.load_state_dict(model.state_dict())
    own = dmuon.dedicate_params(wrapped, **kwargs)
    opt = dmuon.Muon(wrapped, **FP32)
    reference = reference_for(twin, lr=0.02)
    for step in range(steps):
        loss(wrapped, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        for r in range(world):
            (loss(twin, batch(step, r)) / world).backward()
        reference.step()
        reference.zero_grad()
    opt.synchronize()
    own.close()
    return largest_difference(weights(model), weights(twin))


class Used(Net):
    """Every parameter is used, as DDP without find_unused_parameters wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.use_spare = True


@pytest.mark.parametrize(
    "kwargs",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.005},
        {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
    ids=str,
)
@distributed(2)
def test_ddp_options(rank, world, kwargs):
    model = seeded(Used)
    wrapped = DistributedDataParallel(model, **kwargs)
    assert train_against_reference(model, wrapped, rank, world) <= 1e-5


@distributed(2)
def test_ddp_over_a_subgroup_of_the_mesh(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    model = seeded(Used)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    wrapped = DistributedDataParallel(model, device_mesh=mesh)
    assert train_against_reference(model, wrapped, rank, world, mesh=mesh) <= 1e-5


@distributed(2)
def test_compiled_model(rank, world):
    model = seeded(Used)
    compiled = torch.compile(model, backend="eager")
    assert train_against_reference(model, compiled, rank, world) <= 1e-5


@distributed(2)
def test_the_handle_may_be_dropped_and_the_model_still_dies(rank, world):
    model = seeded(Net)
    dmuon.dedicate_params(model)
    gc.collect()
    opt = dmuon.Muon(model, **FP32)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    opt.synchronize()
    gone = weakref.ref(model)
    del model, opt
    gc.collect()
    assert gone() is None


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 6)
        self.a = nn.Linear(6, 9, bias=False)
        self.b = nn.Linear(9, 50, bias=False)
        self.w_empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return self.b(self.a(self.tok(tokens))) * self.scale


@distributed(4)
def test_more_ranks_than_matrices(rank, world):
    model = seeded(TwoMatrices)
    assert train_against_reference(model, model, rank, world) <= 1e-5


class OnlyMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(9, 7, bias=False)
        self.b = nn.Linear(7, 12, bias=False)

    def forward(self, tokens):
        return self.b(self.a(torch.nn.functional.one_hot(tokens, 50).float()[..., :9]))


def first_dim_loss(model, inputs):
    return model(inputs[0]).square().sum(-1).add(1).sqrt().mean()


@distributed(2)
def test_nothing_but_matrices(rank, world):
    model = seeded(OnlyMatrices)
    assert train_against_reference(model, model, rank, world, loss=first_dim_loss) <= 1e-5


@distributed(2)
def test_shared_module_and_tied_head(rank, world):
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2] = self.blocks[0]  # one block, run twice
            self.mid = nn.Linear(24, 24)
            self.lm_head = nn.Linear(24, 50, bias=False)
            self.lm_head.weight = self.tok.weight

    torch.manual_seed(0)
    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, **FP32)
    reference = reference_for(twin, lr=0.02)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        for r in range(world):
            (loss_of(twin, batch(step, r)) / world).backward()
        reference.step()
        reference.zero_grad()
    opt.synchronize()
    assert largest_difference(weights(model), weights(twin)) <= 1e-5
    assert_equal_on_all_ranks(model, own.runtime.transport)
    own.close()
