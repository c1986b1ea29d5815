"""With fixed kernels a step gives the same bits on every mesh, in every layout and plan."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dtensors import distributed_as, local_shard
from tests.distributed.compare import whole
from tests.distributed.harness import Pools
from tests.distributed.layouts import LAYOUTS, Layout, on
from tests.distributed.twins import Trained

STEPS = 4
# Several of a shape, so that batches of 1, 2, 3, ... occur, and matrices beside their transposes.
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"square{i}": (48, 48) for i in range(5)},
    **{f"wide{i}": (40, 96) for i in range(3)},
    **{f"tall{i}": (96, 40) for i in range(2)},
    "odd": (33, 50),
    "flat": (7, 129),
    "thin": (129, 7),
    "tiny0": (3, 5),
    "tiny1": (3, 5),
    "tiny2": (5, 3),
    "large0": (256, 320),
    "large1": (300, 130),
    "experts": (5, 12, 21),
    "qkv": (72, 24),
    "bias": (129,),
    "gain": (1,),
    "embedding": (61, 33),
}
SPLITS = {"qkv.weight": (24, 24, 24)}


class Holder(nn.Module):
    """A parameter whose gradient is what its forward is given."""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, gradient: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            return (weight * gradient).full_tensor().sum()
        return (weight * gradient).sum()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        for name, shape in SHAPES.items():
            self.add_module(name, Holder(shape, generator))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        found = [module(gradients[name]) for name, module in self.named_children()]
        return torch.stack(found).sum()


def gradients_of(step: int) -> dict[str, Tensor]:
    """The same on every rank, and such that dividing by 2, 3, 4 or 8 and adding up is exact, in
    bfloat16 too: three times small whole numbers, and a power of two."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 + step)
    found = {}
    for name, shape in SHAPES.items():
        small = torch.randn(shape, generator=generator).mul_(9).round_().clamp_(-42, 42)
        found[name] = small.mul_(3 * 2.0**-8) * 2.0 ** (-7 * (step % 3))
    return found


def in_tp(model: nn.Module, mesh: Any) -> nn.Module:
    for number, module in enumerate(model.children()):
        p = module.weight
        if p.ndim > 1:
            part = distribute_tensor(p.detach(), mesh["tp"], [Shard(number % p.ndim)])
            module.weight = nn.Parameter(part)
    return model


def in_both(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(in_tp(model, mesh), mesh=mesh["dp"])


def of(world: int, form: str) -> Layout:
    """How the model lies on its mesh."""
    grid, axes = (world // 2, 2), ("dp", "tp")
    reduced = dmuon.ReplicatedOptions(reduce_to_owner=True, publish_bucket_bytes=40_000)
    known = {
        "fsdp": on("fsdp2", world),
        "hsdp": on("fsdp2", 2, world // 2),
        "tp": Layout((world,), ("tp",), wrap=in_tp),
        "tp+fsdp": Layout(grid, axes, wrap=in_both),
        "dp+tp": replace(LAYOUTS["dedicated"], mesh=grid, axes=axes, wrap=in_tp),
        "reduced": Layout((world,), own={"options": reduced}),
        "dedicated hsdp": on("dedicated", 2, world // 2),
    }
    return known.get(form) or on(form, world)


FORMS = {
    1: ["plain", "fsdp", "reduced", "dedicated"],
    2: ["ddp", "reduced"],
    3: ["fsdp", "plain", "reduced", "dedicated"],
    4: ["hsdp", "tp+fsdp", "dp+tp", "dedicated hsdp"],
}


def _set_gradients(trained: Trained, laid: Layout, whole: dict[str, Tensor], rank: int) -> None:
    if laid.own or isinstance(trained.model, DistributedDataParallel):
        trained.model(whole).backward()  # which averages
        return
    for name, module in trained.model.named_children():
        p, grad = module.weight, whole[name]
        if isinstance(p, DTensor):
            box = local_shard(name, p, rank).box
            local = grad[box.slices()].clone().view(p.to_local().shape)
            p.grad = distributed_as(p, local)
        else:
            p.grad = grad


def weights_of(
    rank: int,
    world: int,
    form: str,
    ns_dtype: torch.dtype,
    method: str,
    *,
    dtype: torch.dtype = torch.float32,
    request: dict[str, Any] | None = None,
    **muon: Any,
) -> dict[str, str]:
    """A hash of every full weight after some steps."""
    kernels = dmuon.KernelOptions(method=method, backend="torch")
    planning = {"kernels": kernels, "splits": SPLITS, "costs": "analytic"} | (request or {})
    laid, settings = of(world, form), {"lr": 0.02, "ns_dtype": ns_dtype} | muon
    trained = Trained(laid, Parts().to(dtype), planning=planning, **settings)
    for step in range(STEPS):
        gradients = {n: g.to(dtype) for n, g in gradients_of(step).items()}
        _set_gradients(trained, laid, gradients, rank)
        trained.opt.step()
        trained.opt.zero_grad()
    trained.opt.synchronize()
    found = {}
    for name, weight in whole(trained.bare, trained.opt.ownership).items():
        assert bool(weight.isfinite().all()), name
        data = weight.contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(data).hexdigest()
    trained.close()
    return found


Setting = tuple[torch.dtype, str, dict[str, Any]]  # of Newton-Schulz, its form, other arguments


@lru_cache
def _expected(pools: Pools, number: int) -> dict[str, str]:
    return pools(1).run(__name__, "weights_of", _arguments("plain", number))[0]


def _arguments(form: str, number: int) -> dict[str, Any]:
    ns_dtype, method, others = SETTINGS[number]
    return {"form": form, "ns_dtype": ns_dtype, "method": method} | others


F32, BF16 = torch.float32, torch.bfloat16
SETTINGS: list[Setting] = [
    (F32, "standard", {}),
    (BF16, "gram", {}),
    (F32, "gram", {}),
    (BF16, "standard", {}),
    (F32, "standard", {"momentum_mode": "sgd", "request": {"solver": "round_robin"}}),
    (BF16, "gram", {"nesterov": False}),
    (BF16, "gram[1,3]", {"dtype": BF16, "master_weights": True}),
]


@pytest.mark.parametrize(("world", "form"), [(w, f) for w, forms in FORMS.items() for f in forms])
def test_bits_are_those_of_one_process(pools, world, form):
    for number in range(2):
        _check(pools, world, form, number)


@pytest.mark.parametrize("number", range(2, len(SETTINGS)))
@pytest.mark.parametrize(("world", "form"), [(2, "tp"), (3, "reduced")])
def test_so_they_are_with_other_settings(pools, world, form, number):
    _check(pools, world, form, number)


def _check(pools: Pools, world: int, form: str, number: int) -> None:
    expected = _expected(pools, number)
    for rank, found in enumerate(
        pools(world).run(__name__, "weights_of", _arguments(form, number))
    ):
        others = [name for name in expected if found[name] != expected[name]]
        assert not others, f"rank {rank}, {SETTINGS[number]}: {others} differ"
