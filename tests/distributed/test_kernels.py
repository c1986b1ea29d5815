"""Planned kernels, in every layout, against Muon in one process."""

from __future__ import annotations

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.kernels import runner
from dmuon.kernels.newton_schulz import prepared
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.costs import CostTable
from tests.distributed.harness import distributed
from tests.products import Products

pytestmark = pytest.mark.cpu_only("kernels of CPUs")

MUON = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}
LAYOUTS = pytest.mark.parametrize("layout", ["replicated", "sharded", "dedicated"])
GRAM = "gram[2]/torch/float32"
SIDE = 6
SIZES = (20, 9, 6)


class Widths(nn.Module):
    """Matrices with one short side and several long ones, wide and tall; a part may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(SIDE, n, bias=False) for n in SIZES)
        self.down = nn.ModuleList(nn.Linear(n, SIDE) for n in SIZES)
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            if i != self.skipped:
                x = x + down(torch.tanh(up(x)))
        return x


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        4,
        SIDE,
        generator=torch.Generator(torch.get_default_device()).manual_seed(100 * step + rank),
    )


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 2 * x.roll(1, 0)).square().mean()


def gram_costs(kernel: str = GRAM) -> CostTable:
    entries = {(SIDE, n, "float32"): {b: 1.0 + 0.01 * n * b for b in range(1, 5)} for n in SIZES}
    kernels = {key: dict.fromkeys(by, kernel) for key, by in entries.items()}
    return CostTable("by hand", entries, kernels=kernels)


def made(layout: str, **planning):
    """Model, twin, ownership; FSDP2 where the layout wants it."""
    torch.manual_seed(0)
    model = Widths()
    twin = copy.deepcopy(model)
    if layout == "sharded":
        fully_shard(
            model, mesh=init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
        )
    if layout == "replicated":
        planning["options"] = dmuon.ReplicatedOptions(reduce_to_owner=True)
    return model, twin, dmuon.dedicate_params(model, layout=layout, **planning)


def follow(model, twin, own, opt, references, steps, world, skips=False):
    """Train both; the largest difference of a weight. ``skips``: matrices lack gradients."""
    for step in range(steps):
        model.skipped = twin.skipped = step % 2 if skips and step else None
        loss_of(model, data(step, dist.get_rank())).backward()
        opt.step()
        opt.zero_grad()
        for r in range(world):
            (loss_of(twin, data(step, r)) / world).backward()
        for reference in references:
            reference.step()
            reference.zero_grad()
    opt.synchronize()
    with own.materialized(model):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        return max(float((whole_tensor(p) - q).detach().abs().max()) for p, q in pairs)


def ran(own, opt) -> set[tuple[str, str]]:
    """(shapes, kernel) that ran anywhere."""
    everyone = own.runtime.transport.gather_objects(opt.stats()["kernels"]["ran"])
    return {item for mine in everyone for item in mine.items()}


@pytest.mark.parametrize(
    ("layout", "period"), [("replicated", 1), ("sharded", 1), ("sharded", 3), ("dedicated", 1)]
)
@distributed(2)
def test_planned_calls_equal_the_reference_and_are_prepared_once(rank, world, layout, period):
    """Also where param groups differ, and where matrices without gradients leave smaller batches:
    their calls are prepared when they first come."""
    for skips in (False, True):
        model, twin, own = made(layout, costs=gram_costs())
        ups = {"lr": 0.01, "ns_steps": 4}
        groups = [
            {"params": list(model.up.parameters()), **ups},
            {"params": list(model.down.parameters())},
        ]
        opt = dmuon.Muon(groups, **MUON, period=period)
        nbytes = opt.stats()["kernels"]["workspace_bytes"]
        reference = [ReferenceMuon(twin.up, **(MUON | ups)), ReferenceMuon(twin.down, **MUON)]
        # The reference takes no block steps.
        difference = follow(model, twin, own, opt, reference, 6, world, skips)
        assert period > 1 or difference <= 1e-5
        assert period > 1 or {kernel for _, kernel in ran(own, opt)} == {GRAM}
        with mock.patch.object(runner, "prepared", wraps=prepared) as built:
            follow(model, twin, own, opt, reference, 6, world, skips)
        assert not built.called
        assert opt.stats()["kernels"]["workspace_bytes"] == nbytes
        own.close()


@LAYOUTS
@distributed(2)
def test_the_planned_kernel_is_the_one_that_runs(rank, world, layout):
    for kernel in ("standard/torch/float32", "gram[1,3]/torch_strips/float32"):
        saved, results = None, []
        for _ in range(3):  # a restart from the saved plan runs the same, bit for bit
            plan = saved and dmuon.OwnershipPlan.from_json(saved)
            planning = {"plan": plan} if plan else {"costs": gram_costs(kernel)}
            model, twin, own = made(layout, **planning)
            opt = dmuon.Muon(model, **MUON)
            assert follow(model, twin, own, opt, [ReferenceMuon(twin, **MUON)], 2, world) <= 1e-5
            assert {k for _, k in ran(own, opt)} == {kernel}
            with own.materialized(model):
                results.append([whole_tensor(p).clone() for p in model.parameters()])
            saved = own.plan.to_json()
            own.close()
        for others in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


@distributed(2)
def test_what_cannot_run_here_or_differs_is_refused_on_every_rank(rank, world):
    model, _, own = made("replicated", costs=gram_costs("gram[2]/triton-128x64-w4-s3/float32"))
    with pytest.raises(ValueError, match=r"the plan runs gram\[2\]/triton.*on cpu"):
        dmuon.Muon(model, **MUON)
    own.close()
    options = dmuon.KernelOptions(method=("standard", "gram")[rank])
    with pytest.raises(ValueError, match=r"disagree.*KernelOptions\(method='(standard|gram)'"):
        made("replicated", kernels=options)


class Alike(nn.Module):
    """Tall and wide matrices, several of each shape, so that they are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.ModuleList(nn.Linear(SIDE, 20, bias=False) for _ in range(6))
        self.wide = nn.ModuleList(nn.Linear(24, SIDE, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tall, wide in zip(self.tall, self.wide, strict=True):
            x = x + wide(nn.functional.pad(torch.tanh(tall(x)), (0, 4), value=1.0))
        return x


@distributed(2)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("replicated", torch.float32),
        ("sharded", torch.bfloat16),
        ("dedicated", torch.bfloat16),
        ("block steps", torch.bfloat16),
    ],
)
def test_products_get_memory_that_they_are_fast_on(rank, world, layout, dtype):
    """Batches of tall matrices included: strided results were up to 900 times slower on a CPU."""
    torch.manual_seed(0)
    model = Alike()
    sharded = layout in ("sharded", "block steps")
    if sharded:
        fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (world,)))
    entries = {(6, n, "float32"): {1: 1.0, 2: 1.2, 3: 1.3, 6: 1.5} for n in (20, 24)}
    own = dmuon.dedicate_params(
        model,
        layout="sharded" if sharded else layout,
        options=dmuon.ReplicatedOptions(reduce_to_owner=True) if layout == "replicated" else None,
        costs=CostTable("by hand", entries),
        kernels=dmuon.KernelOptions(backend="torch"),  # real products in this dtype
    )
    period = math.inf if layout == "block steps" else 1
    opt = dmuon.Muon(model, lr=0.01, ns_dtype=dtype, period=period)
    for step in range(3):
        loss_of(model, data(step, rank)).backward()
        with Products() as seen:
            opt.step()
            opt.synchronize()
        assert not seen.slow, seen.slow
        counts = torch.tensor([seen.batched, seen.tall])
        dist.all_reduce(counts)  # an owner may have wide ones alone
        assert counts.all(), "nothing was tested"
        opt.zero_grad()
    own.close()
