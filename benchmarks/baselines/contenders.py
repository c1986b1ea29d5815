"""The models of `benchmarks.step_time`, and every optimizer on its own copy, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# Private: the floor is defined as the time of this very function.
from torch.optim._muon import _zeropower_via_newtonschulz

import dmuon
from benchmarks.baselines import (
    GatherThenCompute,
    ParallelMuon,
    Redundant,
    RoundRobin,
    SameShapeAllGather,
    SameShapeBuckets,
)
from benchmarks.baselines.common import zeropower
from dmuon.kernels.newton_schulz import COEFFICIENT_SETS

Shapes = tuple[tuple[int, int], ...]

LAYERS = 8
SETS: dict[str, Shapes] = {
    # w x w, w x w, 4w x w, w x 4w; w = 256
    "first": ((256, 256), (256, 256), (1024, 256), (256, 1024)),
    # q, k, v, o with grouped keys and values, gate, up, down; w = 512
    "qwen": (
        (512, 512),
        (128, 512),
        (128, 512),
        (512, 512),
        (1408, 512),
        (1408, 512),
        (512, 1408),
    ),
}
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of matrices, and the dtype that all optimizers run Newton-Schulz in."""

    name: str
    layers: int
    ns_dtype: torch.dtype

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = (
            nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SETS[self.name]))
            for _ in range(self.layers)
        )
        return nn.Sequential(*layers)


@dataclass
class Contender:
    """One optimizer: ``step`` is timed, then ``finish`` with it; ``prepare`` is timed apart."""

    name: str
    layout: str
    step: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None
    prepare: Callable[[], Any] = lambda: None
    sent: Callable[[], int] = lambda: 0
    counted: str = "nothing to send"
    divide: int = 1
    close: Callable[[], Any] = lambda: None


def sharded(load: Workload, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 a layer, then the root, with random gradients: different on each rank, always alike."""
    model = load.build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(1 + mesh.get_rank())
    for p in model.parameters():
        assert isinstance(p, DTensor)
        rows = torch.randn(p.to_local().shape, generator=generator)
        p.grad = DTensor.from_local(
            rows,
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
    return model


def floor(load: Workload, world: int, cores: int) -> Contender:
    """One pass of torch's Newton-Schulz over all matrices on rank 0, divided by the cores.

    torch's own function knows bfloat16 only; in another dtype it is the same operations.
    """
    matrices = [torch.randn(p.shape) for p in load.build().parameters()]
    coefficients = COEFFICIENT_SETS["quintic"][0]

    def orthogonalize(matrix: Tensor) -> Tensor:
        if load.ns_dtype == torch.bfloat16:
            return _zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
        return zeropower(matrix, steps=5, eps=1e-7, dtype=load.ns_dtype)

    @torch.no_grad()
    def one_pass() -> None:
        if dist.get_rank() == 0:
            for matrix in matrices:
                orthogonalize(matrix)

    return Contender("floor", "one process", one_pass, divide=min(world, cores))


def ours(load: Workload, mesh: DeviceMesh) -> Iterator[Contender]:
    for publish in ("sync", "async"):
        model = sharded(load, mesh)
        own = dmuon.dedicate_params(model)
        opt = dmuon.Muon(model, ns_dtype=load.ns_dtype, publish=publish, **HYPERPARAMETERS)
        yield Contender(
            f"dmuon {publish}",
            "sharded",
            opt.step,
            finish=opt.synchronize,
            sent=lambda opt=opt: sum(opt.stats()["bytes"].values()),  # type: ignore[misc]
            counted="opt.stats()",
            close=own.close,
        )


def on_shards(load: Workload, mesh: DeviceMesh) -> Iterator[Contender]:
    adamw = torch.optim.AdamW(sharded(load, mesh).parameters(), foreach=True, **HYPERPARAMETERS)
    yield Contender("AdamW foreach", "sharded", adamw.step)
    for kind, label in (
        (GatherThenCompute, "gather-then-compute"),
        (SameShapeBuckets, "same-shape buckets"),
        (ParallelMuon, "Parallel Muon"),
    ):
        opt = kind(sharded(load, mesh).parameters(), ns_dtype=load.ns_dtype, **HYPERPARAMETERS)
        yield Contender(label, "sharded", opt.step, sent=sender(opt), counted="formula")


def on_replicas(load: Workload) -> Iterator[Contender]:
    """Optimizers of replicated models share the memory of their gradients."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    mine = [torch.randn(p.shape, generator=generator) for p in load.build().parameters()]
    synced = [torch.empty_like(g) for g in mine]
    no_options: dict[str, Any] = {}
    for kind, label, options in (
        (Redundant, "redundant", no_options),
        (RoundRobin, "round-robin, all-reduced", no_options),
        (RoundRobin, "round-robin, reduced to owner", {"reduce_to_owner": True}),
        (SameShapeAllGather, "same-shape all-gather", no_options),
    ):
        parameters = list(load.build().parameters())
        for p, g in zip(parameters, synced, strict=True):
            p.grad = g
        opt: Any = kind(parameters, ns_dtype=load.ns_dtype, **HYPERPARAMETERS, **options)

        def prepare(opt: Any = opt) -> None:
            torch._foreach_copy_(synced, mine)
            opt.sync_gradients()

        yield Contender(
            label, "replicated", opt.step, prepare=prepare, sent=sender(opt), counted="formula"
        )


def sender(opt: Any) -> Callable[[], int]:
    return lambda: opt.sent_bytes


def contenders(load: Workload, mesh: DeviceMesh, cores: int) -> list[Contender]:
    """All of them for one workload; the floor first."""
    return [
        floor(load, mesh.size(), cores),
        *ours(load, mesh),
        *on_shards(load, mesh),
        *on_replicas(load),
    ]
