"""What is asserted of the Triton kernels, wherever they run: in the interpreter and on a GPU.

Every check takes the module whose kernels it runs, so that the interpreted copy can be given.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FLOAT32_EPS = torch.finfo(torch.float32).eps


def on(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers; the same on every device."""
    return torch.randn(shape).to(dtype).to(device)


def assert_within(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    """|found - wanted| <= bound, element by element; a nan is never within."""
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"off by {(error - bound).max():.3g} more than {bound.max():.3g}"


def check_symm(
    syrk: ModuleType,
    a: Tensor,
    bt: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    plain: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    tile: Any = None,
) -> None:
    """The lower triangle is that of the product, and the upper one mirrors it to the bit.

    The operands may be such that the product is not symmetric: then mixing up its halves shows.
    """
    for result in (out, plain):
        if result is not None:
            result.fill_(float("nan"))
    before = [x if x is None else x.clone() for x in (a, bt, c)]
    syrk.symm_mm(a, bt, c, out=out, alpha=alpha, beta=beta, diag=diag, plain=plain, tile=tile)
    for x, old in zip((a, bt, c), before, strict=True):
        assert x is None or old is None or torch.equal(x, old), "operands stay as they are"
    wide_a, wide_b = a.double(), bt.double()
    without = alpha * (wide_a @ wide_b.mT)
    size = abs(alpha) * (wide_a.abs() @ wide_b.mT.abs())
    if c is not None:
        without, size = without + beta * c.double(), size + abs(beta) * c.double().abs()
    shift = diag * torch.eye(a.shape[-2], dtype=torch.float64, device=a.device)
    for result, wanted in ((out, without + shift), (plain, without)):
        if result is None:
            continue
        assert torch.equal(result, result.mT), "exactly symmetric"
        sums = (a.shape[-1] + 4) * FLOAT32_EPS * (size + shift.abs())
        bound = torch.finfo(out.dtype).eps * wanted.abs() + sums + 1e-7
        assert_within(result.tril(), wanted.tril(), bound)


# ---- momentum, normalization, cast ---------------------------------------------------------


def momentum_reference(
    buffer: Tensor, grad: Tensor, *, momentum: float, nesterov: bool, mode: str, dampening: float
) -> tuple[Tensor, Tensor]:
    """The buffer in its dtype and the operand in float64."""
    m, g = buffer.double(), grad.double()
    share = 1 - momentum if mode == "ema" else 1 - dampening
    m = (momentum * m + share * g).to(buffer.dtype).double()
    if not nesterov:
        return m.to(buffer.dtype), m
    return m.to(buffer.dtype), (share * g if mode == "ema" else g) + momentum * m


def check_momentum(
    elementwise: ModuleType,
    buffer: Tensor,
    grad: Tensor,
    out: Tensor,
    *,
    eps: float = 1e-7,
    **how: Any,
) -> None:
    wanted_buffer, operand = momentum_reference(buffer, grad, **how)
    kept = grad.clone()
    out.fill_(float("nan"))
    elementwise.momentum_norm_cast(buffer, grad, **how, eps=eps, out=out)
    assert torch.equal(grad, kept)
    size = wanted_buffer.double().abs() + grad.double().abs()
    step = 2 * torch.finfo(buffer.dtype).eps
    assert_within(buffer, wanted_buffer.double(), step * size)
    norm = torch.linalg.vector_norm(operand, dim=(-2, -1), keepdim=True).clamp_min(eps)
    rounding = torch.finfo(out.dtype).eps * (operand / norm).abs()
    # The buffer may round the other way, and a float16 result may be subnormal.
    bound = rounding + 4 * (step + 4 * FLOAT32_EPS) * size / norm + torch.finfo(out.dtype).tiny
    assert_within(out, operand / norm, bound)


# ---- the whole iteration -------------------------------------------------------------------


def exact_iteration(x: Tensor, coefficients: Any) -> Tensor:
    """The standard form in float64."""
    x = x.double()
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def check_small(
    small: ModuleType, x: Tensor, coefficients: Any, restarts: Any, tolerance: float
) -> None:
    wanted = exact_iteration(x, coefficients)
    small.small_iteration(x, small.tables(x, coefficients, restarts))
    error = torch.linalg.vector_norm(x.double() - wanted, dim=(-2, -1))
    assert (error <= tolerance * torch.linalg.vector_norm(wanted, dim=(-2, -1))).all(), error
