"""With fixed kernels a step gives the same bits on every mesh, in every layout and plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dtensors import local_shard, whole_tensor
from tests.distributed.harness import Pools

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
        whole = (
            torch.randn(shape, generator=generator)
            .mul_(9)
            .round_()
            .clamp_(-42, 42)
            .mul_(3 * 2.0**-8)
        )
        found[name] = whole * 2.0 ** (-7 * (step % 3))
    return found


# (ranks, form): how the model lies on its mesh.
FORMS = {
    1: ["plain", "fsdp", "reduced", "dedicated"],
    2: ["fsdp", "tp", "plain", "ddp", "reduced", "dedicated"],
    3: ["fsdp", "plain", "reduced", "dedicated"],
    4: ["fsdp", "hsdp", "tp+fsdp", "dp+tp", "plain", "reduced", "dedicated", "dedicated hsdp"],
    8: ["hsdp"],
}


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    for number, module in enumerate(model.children()):
        p = module.weight
        if p.ndim > 1:
            part = distribute_tensor(p.detach(), mesh, [Shard(number % p.ndim)])
            module.weight = nn.Parameter(part)


@contextmanager
def _made(
    form: str, world: int, dtype: torch.dtype, **kwargs: Any
) -> Iterator[tuple[nn.Module, nn.Module, Any]]:
    """The model, what is called, and its ownership."""
    model: nn.Module = Parts().to(dtype)
    called, layout, options, mesh = model, "auto", None, None
    dims = ("replicate", "shard")
    if form == "fsdp":
        mesh = init_device_mesh(torch.get_default_device().type, (world,), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh)
    elif form == "hsdp":
        mesh = init_device_mesh(
            torch.get_default_device().type, (2, world // 2), mesh_dim_names=dims
        )
        fully_shard(model, mesh=mesh)
    elif form == "tp":
        mesh = init_device_mesh(torch.get_default_device().type, (world,), mesh_dim_names=("tp",))
        _tensor_parallel(model, mesh)
    elif form in ("tp+fsdp", "dp+tp"):
        mesh = init_device_mesh(
            torch.get_default_device().type, (world // 2, 2), mesh_dim_names=("dp", "tp")
        )
        _tensor_parallel(model, mesh["tp"])
        if form == "tp+fsdp":
            fully_shard(model, mesh=mesh["dp"])
        else:
            layout = "dedicated"
    elif form == "ddp":
        called = DistributedDataParallel(model)
    elif form == "reduced":
        options = dmuon.ReplicatedOptions(reduce_to_owner=True, publish_bucket_bytes=40_000)
    elif form == "dedicated":
        layout = "dedicated"
    elif form == "dedicated hsdp":
        layout = "dedicated"
        mesh = init_device_mesh(
            torch.get_default_device().type, (2, world // 2), mesh_dim_names=dims
        )
    own = dmuon.dedicate_params(
        called if form == "ddp" else model,
        mesh,
        layout=layout,
        options=options,
        splits=SPLITS,
        costs="analytic",
        **kwargs,
    )
    yield model, called, own
    own.close()


def _set_gradients(
    model: nn.Module, called: nn.Module, form: str, whole: dict[str, Tensor], rank: int
) -> None:
    if form in ("reduced", "dedicated", "dedicated hsdp", "dp+tp", "ddp"):
        called(whole).backward()
        return
    for name, module in model.named_children():
        p, grad = module.weight, whole[name]
        if isinstance(p, DTensor):
            box = local_shard(name, p, rank).box
            local = grad[box.slices()].clone().view(p.to_local().shape)
            grad = DTensor.from_local(
                local,
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
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
    request = {"kernels": kernels} | (request or {})
    with _made(form, world, dtype, **request) as (model, called, own):
        opt = dmuon.Muon(called, **({"lr": 0.02, "ns_dtype": ns_dtype} | muon))
        for step in range(STEPS):
            gradients = {n: g.to(dtype) for n, g in gradients_of(step).items()}
            _set_gradients(model, called, form, gradients, rank)
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        with own.materialized(model):
            found = {}
            for name, module in model.named_children():
                whole = whole_tensor(module.weight).contiguous()
                assert bool(whole.isfinite().all()), name
                found[name] = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


Setting = tuple[torch.dtype, str, dict[str, Any]]  # of Newton-Schulz, its form, other arguments


@lru_cache
def _expected(pools: Pools, number: int) -> dict[str, str]:
    return pools(1).run(__name__, "weights_of", _arguments("plain", number))[0]


def _arguments(form: str, number: int) -> dict[str, Any]:
    ns_dtype, method, others = SETTINGS[number]
    return {"form": form, "ns_dtype": ns_dtype, "method": method} | others


weights_of.body = weights_of  # type: ignore[attr-defined]

F32, BF16 = torch.float32, torch.bfloat16
SETTINGS: list[Setting] = [
    (F32, "standard", {}),
    (BF16, "gram", {}),
    (F32, "gram", {}),
    (BF16, "standard", {}),
    (F32, "standard", {"momentum_mode": "sgd", "request": {"solver": "round_robin"}}),
    (BF16, "gram", {"nesterov": False, "publish": "async"}),
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
