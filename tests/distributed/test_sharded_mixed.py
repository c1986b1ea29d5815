"""Matrices and transposes of one shape in one batch: equal to the reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.costs import CostTable
from tests.distributed.harness import distributed
from tests.distributed.sharded import MUON

SHAPES = {"tall": (20, 6), "tall2": (20, 6), "wide": (6, 20), "wide2": (6, 20), "stack": (2, 20, 6)}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@distributed(2)
def test_a_matrix_and_its_transpose_in_one_batch(rank, world, adjust, placement):
    torch.manual_seed(0)
    model, twin = nn.Module(), nn.Module()
    mesh = init_device_mesh("cpu", (world,))
    for side in (model, twin):
        for name, shape in SHAPES.items():
            side.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(shape)))
        side.conv = nn.Conv2d(5, 6, 2, bias=False)
        for part in (side, side.conv):
            for name, p in list(part.named_parameters(recurse=False)):
                value = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                if side is model:
                    value = distribute_tensor(value, mesh, [placement])
                part.register_parameter(name, nn.Parameter(value))
    costs = CostTable("made up", {(6, 20, "float32"): {1: 3.0, 8: 3.1}})  # batches are cheap
    own = dmuon.dedicate_params(model, select=lambda n, p: True, costs=costs)
    settings = MUON | {"adjust_lr_fn": adjust, "period": 3}
    opt = dmuon.Muon(model, **settings)
    settings.pop("period")
    assert any(any(unit.transposed) for unit in own.runtime.units)
    ref = ReferenceMuon(twin, select=lambda n, p: True, **settings)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(q.numel() + q.ndim))
        p.grad = distribute_tensor(q.grad, mesh, p.placements)
    opt.step()
    ref.step()
    opt.synchronize()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((whole_tensor(p) - q.detach()).abs().max()) <= 1e-5, name
    rms = opt.stats()["update_rms"]
    for name, value in rms.items():
        if adjust == "original":
            tall = name.startswith(("tall", "stack"))
            ratio = (20 / 6) ** 0.5 if tall else 1.0
            assert 0.7 < value / (ratio / 20**0.5) < 1.3, (name, value)
    own.close()
