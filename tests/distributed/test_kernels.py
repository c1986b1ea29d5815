"""Planned kernels, in every layout, against Muon in one process."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from dmuon.kernels import runner
from dmuon.kernels.newton_schulz import prepared
from dmuon.scheduler.costs import CostTable
from tests.distributed.compare import assert_bitwise, gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import REDUCING, layouts
from tests.distributed.twins import MUON, both, laid_out
from tests.products import Products

pytestmark = pytest.mark.cpu_only("kernels of CPUs")

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


def loss_of(model: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of numbers that the tokens of a batch seed."""
    generator = torch.Generator(torch.get_default_device())
    generator.manual_seed(int((inputs[0] * torch.arange(16)).sum()))
    x = torch.randn(4, SIDE, generator=generator)
    return (model(x) - 2 * x.roll(1, 0)).square().mean()


def gram_costs(kernel: str = GRAM) -> CostTable:
    entries = {(SIDE, n, "float32"): {b: 1.0 + 0.01 * n * b for b in range(1, 5)} for n in SIZES}
    kernels = {key: dict.fromkeys(by, kernel) for key, by in entries.items()}
    return CostTable("by hand", entries, kernels=kernels)


def planned_as(layout, *, build=Widths, **case):
    """`both` with these costs (or a plan)."""
    request = {"solver": "auto", **case.pop("request", {})}
    return both(build, layout, loss_of=loss_of, request=request, **case)


def ran(pair) -> set[tuple[str, str]]:
    """(shapes, kernel) that ran anywhere."""
    everyone = gathered(pair.opt.stats()["kernels"]["ran"])
    return {item for mine in everyone for item in mine.items()}


@pytest.mark.parametrize(("layout", "period"), [("reduced", 1), ("fsdp2", 3)])
@distributed(2)
def test_planned_calls_equal_the_reference_and_are_prepared_once(rank, world, layout, period):
    """Also where matrices without gradients leave smaller batches: their calls are prepared when
    they first come."""
    for skips in (False, True):

        def prepare(model, step, rank, skips=skips):
            model.skipped = step % 2 if skips and step % 6 else None

        case = {"request": {"costs": gram_costs()}, "only": {"period": period}, "prepare": prepare}
        with planned_as(layout, **case) as pair:
            nbytes = pair.opt.stats()["kernels"]["workspace_bytes"]
            pair.train(range(6))
            pair.opt.synchronize()
            if period == 1:  # the reference has no block steps
                pair.check()
                assert {kernel for _, kernel in ran(pair)} == {GRAM}
            with mock.patch.object(runner, "prepared", wraps=prepared) as built:
                pair.train(range(6))
            assert not built.called
            assert pair.opt.stats()["kernels"]["workspace_bytes"] == nbytes


@layouts("reduced", "fsdp2")
def test_the_planned_kernel_is_the_one_that_runs(rank, world, layout):
    for kernel in ("standard/torch/float32", "gram[1,3]/torch_strips/float32"):
        saved, results = None, []
        for _ in range(2):  # a restart from the saved plan runs the same, bit for bit
            plan = saved and dmuon.OwnershipPlan.from_json(saved)
            request = {"plan": plan} if plan else {"costs": gram_costs(kernel)}
            with planned_as(layout, request=request) as pair:
                pair.train(range(2))
                pair.check()
                assert {k for _, k in ran(pair)} == {kernel}
                results.append(pair.whole())
                saved = pair.own.plan.to_json()
        assert_bitwise(*results)


@distributed(2)
def test_what_cannot_run_here_is_refused_on_every_rank(rank, world):
    model = laid_out("plain", Widths)[0]
    costs = gram_costs("gram[2]/triton-128x64-w4-s3/float32")
    own = dmuon.dedicate_params(model, options=REDUCING, costs=costs)
    with pytest.raises(ValueError, match=r"the plan runs gram\[2\]/triton.*on cpu"):
        dmuon.Muon(model, **MUON)
    own.close()


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


@pytest.mark.parametrize(
    ("layout", "dtype", "period"),
    [("dedicated", torch.bfloat16, 1), ("fsdp2", torch.bfloat16, math.inf)],
)
@distributed(2)
def test_products_get_memory_that_they_are_fast_on(rank, world, layout, dtype, period):
    """Batches of tall matrices included: strided results were up to 900 times slower on a CPU."""
    entries = {(6, n, "float32"): {1: 1.0, 2: 1.2, 3: 1.3, 6: 1.5} for n in (20, 24)}
    request = {
        "costs": CostTable("by hand", entries),
        "kernels": dmuon.KernelOptions(backend="torch"),  # real products in this dtype
    }
    case = {"request": request, "muon": {"ns_dtype": dtype}, "only": {"period": period}}
    with planned_as(layout, build=Alike, **case) as pair:
        for step in range(3):
            pair.backward(step)
            with Products() as seen:
                pair.opt.step()
                pair.opt.synchronize()
            assert not seen.slow, seen.slow
            counts = torch.tensor([seen.batched, seen.tall])
            dist.all_reduce(counts)  # an owner may have wide ones alone
            assert counts.all(), "nothing was tested"
            pair.opt.zero_grad()
