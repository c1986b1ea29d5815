"""Momentum, learning-rate adjustment, decay and update: pure tensor maths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim._muon import _adjust_lr as torch_adjust_lr

from dmuon.update import (
    adjusted_lr,
    advance_momentum,
    apply_updates,
    follow_weights,
    momentum_update,
    operands_of_newton_schulz,
    update_rms,
    wide_norms,
)

EMA = {"momentum": 0.9, "mode": "ema", "dampening": 0.0}
SGD = {"momentum": 0.9, "mode": "sgd", "dampening": 0.25}
EVERY = pytest.mark.parametrize("settings", [EMA, SGD], ids=["ema", "sgd"])
NESTEROV = pytest.mark.parametrize("nesterov", [False, True])


def gradients(steps: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


# ---- momentum ----------------------------------------------------------------------------


@EVERY
@NESTEROV
def test_momentum_in_two_halves_is_the_same(settings, nesterov):
    """The operand first, the buffer later: as a step does that may still be called off."""
    group = {**settings, "momentum_mode": settings["mode"], "nesterov": nesterov}
    buffer, grad = gradients(2, 4, 3)
    expected_buffer = buffer.clone()
    expected = momentum_update(expected_buffer, grad, nesterov=nesterov, **settings)
    before, out = buffer.clone(), torch.empty(4, 3)
    operands_of_newton_schulz([out], [buffer], [grad], group)
    assert torch.equal(buffer, before)
    advance_momentum([buffer], [grad], group)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(buffer, expected_buffer, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("nesterov", "dampening"), [(False, 0.0), (True, 0.0), (False, 0.25)])
def test_sgd_momentum_is_that_of_torch_sgd(nesterov, dampening):
    p = nn.Parameter(torch.zeros(4, 3))
    sgd = torch.optim.SGD([p], 1.0, 0.9, nesterov=nesterov, dampening=dampening)
    first, *others = gradients(5, 4, 3)
    p.grad = first.clone()
    sgd.step()
    buffer = first.clone()  # torch starts its buffer from the first gradient undamped
    for grad in others:
        before = p.detach().clone()
        p.grad = grad.clone()
        sgd.step()
        operand = momentum_update(
            buffer, grad, momentum=0.9, nesterov=nesterov, mode="sgd", dampening=dampening
        )
        torch.testing.assert_close(sgd.state[p]["momentum_buffer"], buffer, rtol=0, atol=0)
        torch.testing.assert_close(p.detach(), before - operand, rtol=0, atol=0)


@EVERY
@NESTEROV
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_is_updated_as_each_of_its_matrices(settings, nesterov, dtype):
    # Of 256 elements each: torch rounds the end of a bf16 tensor unlike its vectorized middle.
    stack = torch.zeros(3, 16, 16, dtype=dtype)
    each = list(stack.clone())
    for grad in gradients(2, 3, 16, 16):
        grad = grad.to(dtype)
        operands = momentum_update(stack, grad, nesterov=nesterov, **settings)
        for i, buffer in enumerate(each):
            operand = momentum_update(buffer, grad[i], nesterov=nesterov, **settings)
            assert torch.equal(operands[i], operand) and torch.equal(stack[i], buffer)


# ---- learning rate, decay, update --------------------------------------------------------


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 2), (2, 8), (5, 5), (25, 100), (1, 7)])
def test_the_rate_is_adjusted_as_torch_adjusts_it(adjust, shape):
    assert adjusted_lr(0.02, adjust, *shape) == torch_adjust_lr(0.02, adjust, torch.Size(shape))
    if adjust == "match_rms_adamw":
        assert adjusted_lr(0.02, 0.2, *shape) == adjusted_lr(0.02, adjust, *shape)


def test_the_unclamped_rate_is_what_torch_and_torchtitan_have():
    """pytorch/pytorch#187402; torch 2.13 does not have it yet."""
    shapes = {(8, 2): 2.0, (2, 8): 0.5, (5, 5): 1.0}
    assert {s: adjusted_lr(1.0, "spectral_unclamped", *s) for s in shapes} == shapes
    for tall in [(8, 2), (5, 5), (7, 3)]:
        original = adjusted_lr(0.02, "original", *tall)
        assert adjusted_lr(0.02, "spectral_unclamped", *tall) == original


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_dtype", [torch.float32, torch.bfloat16])
def test_updates_are_applied_as_torch_muon_applies_them(dtype, update_dtype):
    targets = [g.to(dtype) for g in gradients(3, 4, 5)]
    updates = [g.to(update_dtype) for g in gradients(6, 4, 5)[3:]]
    expected = [t.clone() for t in targets]
    for target, update in zip(expected, updates):
        target.mul_(1 - 0.1 * 0.02)
        target.add_(update, alpha=-0.03)
    apply_updates(targets, updates, decay=1 - 0.1 * 0.02, lr=0.03)
    assert all(map(torch.equal, targets, expected))


def test_updates_of_views_and_other_strides_are_applied_in_place():
    whole = torch.zeros(6, 4)
    channels_last = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    update = torch.arange(24.0)
    targets = [whole[:3], whole[3:].t(), channels_last]
    updates = [update[:12].view(3, 4), update[12:].view(4, 3), update.view(2, 3, 2, 2)]
    apply_updates(targets, updates, decay=1.0, lr=1.0)
    torch.testing.assert_close(whole[:3], -updates[0])
    torch.testing.assert_close(whole[3:], -updates[1].t())
    torch.testing.assert_close(channels_last, -updates[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rms_is_per_matrix_and_scaled(dtype):
    updates = torch.stack([torch.full((3, 4), 2.0), torch.zeros(3, 4), -torch.ones(3, 4)])
    rms = update_rms(updates.to(dtype), 0.5)
    assert rms.dtype == torch.float32
    torch.testing.assert_close(rms, torch.tensor([1.0, 0.0, 0.5]))


def test_an_orthogonal_update_has_the_rms_of_adamw():
    rows, cols = 16, 40
    orthogonal = torch.linalg.qr(gradients(1, cols, rows)[0]).Q.t()[None]
    for adjust, expected in {"match_rms_adamw": 0.2, 0.35: 0.35}.items():
        rms = update_rms(orthogonal, adjusted_lr(1.0, adjust, rows, cols))
        assert rms.item() == pytest.approx(expected)


# ---- masters -------------------------------------------------------------------------------

SHAPES = [(), (3,), (0, 4), (64, 96), (300, 512), (3, 200, 300)]  # joined, alone, and in parts


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_what_is_written_to_weights_and_nothing_else(dtype, on_host):
    torch.manual_seed(0)
    masters = [torch.randn(shape) for shape in SHAPES]
    masters[2] = masters[2].mT
    masters[4] = torch.randn(512, 300).mT  # as an owner may hold it
    weights = [m.to(dtype) for m in masters]
    # Of another dtype in one list; and no master at all.
    masters += [torch.randn(5), torch.randn(6)]
    weights += [masters[-2].to(torch.bfloat16), masters[-1]]
    before = [m.clone() for m in masters]
    follow_weights(masters, weights, on_host=on_host)
    for now, was in zip(masters, before, strict=True):
        assert torch.equal(now, was)
    for n, weight in enumerate(weights[:-1]):
        expected, changed = masters[n].clone(), torch.rand(weight.shape) < 0.1
        changed.view(-1)[-1:] = True
        weight[changed] = weight[changed] * 2 + 10
        expected[changed] = weight[changed].float()
        follow_weights(masters, weights, on_host=on_host)
        assert torch.equal(masters[n], expected), n
        assert masters[n].stride() == before[n].stride()
    assert torch.equal(masters[-1], before[-1])


@pytest.mark.parametrize("on_host", [True, False])
def test_what_is_no_number_counts_too(on_host):
    """A weight that overflowed has a finite master; a nan or inf that somebody wrote is taken, and
    a number in its place. Zeros of both signs are one."""
    inf, nan = math.inf, math.nan
    master = torch.tensor([7e4, 1.0, 1.0, nan, nan, -1e-9, 1.0, inf])
    weight = torch.tensor([inf, nan, inf, nan, 2.0, 0.0, 0.0, 3.0], dtype=torch.float16)
    expected = torch.tensor([7e4, nan, inf, nan, 2.0, -1e-9, 0.0, 3.0])
    follow_weights([master], [weight], on_host=on_host)
    assert torch.equal(master.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert torch.equal(master.isnan(), expected.isnan())


# ---- norms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_lists_are_right_over_the_whole_range(dtype):
    """Where the host cannot look whether squares fit, they are squared in float64."""
    sizes = [(3, 5), (4097,), (64, 128), (1,), (7, 0)]
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    for power in (-30, -22, 0, 22, 30):
        given = [(t * 10.0**power).to(dtype) for t in tensors]
        given.append(given[0].double())  # another dtype in the list
        for order in (1.0, 2.0, 3.0, math.inf):
            held = [t for t in given if t.numel()]
            for norm, t in zip(wide_norms(held, order), held, strict=True):
                expected = torch.linalg.vector_norm(t.double(), order)
                assert norm.dtype is torch.float64 and norm.ndim == 0
                assert abs(norm - expected) <= 1e-12 * expected
