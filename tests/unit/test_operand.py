"""The elementwise work around Newton-Schulz: when it goes to the Triton kernels, and what else."""

from __future__ import annotations

import pytest
import torch

from dmuon.kernels.newton_schulz import normalize, normalize_
from dmuon.update import apply_updates, is_fused, momentum_update, scaled_momentum

GROUP = {
    "momentum": 0.9,
    "nesterov": True,
    "dampening": 0.0,
    "momentum_mode": "ema",
    "eps": 1e-7,
    "lr": 0.1,
}
LARGE = (1 << 10, 1 << 10)


@pytest.mark.parametrize(
    ("mode", "nesterov", "dtype"),
    [("ema", True, torch.bfloat16), ("ema", False, torch.float32), ("sgd", True, torch.float32)],
)
def test_momentum_is_scaled_into_the_operand(mode, nesterov, dtype):
    how = {"momentum": 0.9, "nesterov": nesterov, "dampening": 0.0}
    grad, buffer = torch.randn(2, 2, 6, 9)
    expected = buffer.clone()
    operand = momentum_update(expected, grad, mode=mode, **how)
    out = torch.empty(2, 6, 9, dtype=dtype)
    scaled_momentum(buffer, grad, GROUP | how | {"momentum_mode": mode}, out=out)
    assert torch.equal(buffer, expected)
    within = 2 * torch.finfo(dtype).eps  # of two formulas of Nesterov
    torch.testing.assert_close(normalize_(out), normalize(operand, dtype), rtol=within, atol=1e-7)


def test_the_fused_form_gets_the_groups_settings(monkeypatch):
    seen = []

    def fake(buffer, grad, **settings):
        seen.append(settings)

    monkeypatch.setattr("dmuon.kernels.triton_elementwise.momentum_norm_cast", fake)
    out = torch.empty(2, 6, 9)
    scaled_momentum(torch.zeros(2, 6, 9), torch.ones(2, 6, 9), GROUP, out=out, fused=True)
    settings = {name: value for name, value in GROUP.items() if name not in ("lr", "momentum_mode")}
    assert seen == [settings | {"mode": "ema", "out": out}]
    wide = torch.zeros(2, 6, 9, dtype=torch.float64)
    scaled_momentum(wide, torch.ones(2, 6, 9), GROUP, out=out, fused=True)
    assert len(seen) == 1 and bool(out.isfinite().all())


def test_large_weights_are_updated_in_one_pass(monkeypatch):
    seen = []

    def fake(weight, update, *, decay, lr):
        seen.append(weight.shape)
        weight.mul_(decay).sub_(update, alpha=lr)

    monkeypatch.setattr("dmuon.kernels.triton_elementwise.apply_update", fake)

    def updated(shape, dtype=torch.float32, decay=0.5, fused=True):
        weight = torch.ones(shape, dtype=dtype)
        apply_updates([weight], [torch.ones(shape)], decay=decay, lr=0.25, fused=fused)
        assert torch.equal(weight, torch.full(shape, 0.25, dtype=dtype))
        return len(seen)

    assert updated(LARGE) == 1
    assert updated((4, 6)) == 1  # small ones go by lists
    assert updated(LARGE, fused=False) == 1
    assert updated(LARGE, dtype=torch.float64) == 1
    assert updated(LARGE, decay=torch.tensor(0.5)) == 2
    assert updated(LARGE, decay=torch.tensor([0.5])) == 3
    weight = torch.ones(LARGE)  # nor what is stored otherwise
    apply_updates([weight.mT], [torch.ones(LARGE)], decay=0.5, lr=0.25, fused=True)
    assert len(seen) == 3 and torch.equal(weight, torch.full(LARGE, 0.25))


def test_only_a_planned_triton_kernel_on_cuda_is_fused():
    class OnCuda:
        device = torch.device("cuda", 0)

    assert is_fused("gram[2]/triton-128x64-w8-s3/float16", OnCuda())
    assert not is_fused("gram[2]/torch/float16", OnCuda())
    assert not is_fused("", OnCuda())
    assert not is_fused("gram[2]/triton-128x64-w8-s3/float16", torch.empty(1))
