"""Each baseline of the benchmarks on real processes against Muon in one process.

Newton-Schulz runs in float32: in bfloat16 a difference of 1e-7 becomes one of 3e-2 in an update.
"""

from __future__ import annotations

from itertools import cycle, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import baselines
from benchmarks.baselines import (
    GatherThenCompute,
    ParallelMuon,
    Redundant,
    RoundRobin,
    SameShapeAllGather,
    SameShapeBuckets,
)
from dmuon import devices
from dmuon.reference import ReferenceMuon
from tests.distributed.harness import distributed

pytestmark = pytest.mark.cpu_only("benchmarks of CPUs")

SHARDED = (GatherThenCompute, SameShapeBuckets, ParallelMuon)
REPLICATED = (
    (Redundant, {}),
    (RoundRobin, {}),
    (RoundRobin, {"reduce_to_owner": True}),
    (SameShapeAllGather, {}),
)
SETTINGS = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9}
# Uneven shards, fewer rows than ranks, tall and wide; six matrices of one shape fill no multiple
# of W, and alone they would all be alike.
WIDTHS = (12, 12, 12, 12, 12, 12, 12, 30, 7, 3, 12, 30)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(m, n, bias=False) for m, n in pairwise(WIDTHS)])


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank + 1)
    x, y = torch.randn(2, 16, 12, generator=generator)
    output = model(x)
    return (output[:, :12] - y).square().mean() + output[:, 12:].square().mean()


def reference(steps: int, world: int, nesterov: bool) -> list[Tensor]:
    """The weights after ``steps`` steps on the mean of all ranks' losses."""
    model = stack()
    optimizer = ReferenceMuon(
        model.parameters(),
        nesterov=nesterov,
        ns_coefficients="quintic",
        ns_dtype=torch.float32,
        **SETTINGS,
    )
    for step in range(steps):
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_close(model: nn.Module, expected: list[Tensor]) -> None:
    begin = list(stack().parameters())
    for p, start, end in zip(model.parameters(), begin, expected, strict=True):
        mine = p.full_tensor() if isinstance(p, DTensor) else p
        assert float((mine - end).abs().max()) <= 1e-5
        assert float((start - end).abs().max()) > 1e-2, "nothing moved"


def sharded_model(world: int) -> nn.Module:
    model = stack()
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@distributed(4)
def test_on_fsdp2_shards(rank: int, world: int) -> None:
    for nesterov, kind in zip(cycle((True, False)), SHARDED):
        model = sharded_model(world)
        optimizer = kind(model.parameters(), nesterov=nesterov, ns_dtype=torch.float32, **SETTINGS)
        for step in range(4):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, reference(4, world, nesterov))


@distributed(4)
def test_on_replicated_weights(rank: int, world: int) -> None:
    expected = reference(4, world, nesterov=True)
    for kind, options in REPLICATED:
        model = stack()
        optimizer = kind(model.parameters(), ns_dtype=torch.float32, **SETTINGS, **options)
        for step in range(4):
            loss_of(model, step, rank).backward()
            optimizer.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, expected)


@distributed(4)
def test_gradients_become_means(rank: int, world: int) -> None:
    # Newton-Schulz normalizes, so weights alone cannot tell a mean from a sum.
    here, there = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0)
    baselines.average([(here, None), (there, 2)])
    assert here.tolist() == [2.5] * 3
    assert rank != 2 or there.tolist() == [2.5] * 3


@distributed(2)
def test_ranks_that_time_products_differently_agree(rank: int, world: int) -> None:
    for slow in ({}, {1}, {0, 1}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "_has_bf16", [rank not in slow])
            assert baselines.ns_dtype() is (torch.float32 if slow else torch.bfloat16)


@distributed(4)
def test_sent_bytes_follow_the_formulas(rank: int, world: int) -> None:
    # Even shards, and as many matrices of a shape as there are ranks: no padding, no empty piece.
    models = [nn.Sequential(*[nn.Linear(8, 16, bias=False) for _ in range(4)]) for _ in range(2)]
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    fully_shard(models[1], mesh=mesh)
    numel = 4 * 8 * 16
    others = world - 1
    expected = {
        GatherThenCompute: numel // world * others * 2,  # bfloat16
        SameShapeBuckets: 2 * (numel // world) * others // world * 2,
        ParallelMuon: 2 * (numel // world) * others // world * 2,
        Redundant: 0,
        RoundRobin: numel // world * others * 4,  # weights, float32
        SameShapeAllGather: numel // world * others * 4,
    }
    for kind, sent in expected.items():
        model = models[kind in SHARDED]
        optimizer = kind(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(2):  # the count is of one step
            optimizer.step()
        assert optimizer.sent_bytes == sent, kind.__name__
