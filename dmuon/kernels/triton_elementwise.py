"""The elementwise work before and after Newton-Schulz, in one pass over memory each.

    momentum_norm_cast: momentum_kernel (momentum, sums of squares) -> scale_kernel (scale, cast)
    apply_update:       update_kernel

Matrices are contiguous, so each is treated as a vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.devices import of
from dmuon.kernels.triton_syrk import check

_TILE = 4096  # elements that a program takes at a time
_WARPS = 4
_MAX_PARTS = 1024  # every program of the second launch reads all partial sums of its matrix


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp computes it: exact at both ends."""
    near = start + weight * (end - start)
    return tl.where(weight < 0.5, near, end - (end - start) * (1.0 - weight))


@triton.jit
def _operand(held, grad, momentum, EMA: tl.constexpr, NESTEROV: tl.constexpr):
    """The operand of Newton-Schulz, from a momentum buffer after its update."""
    if not NESTEROV:
        return held
    elif EMA:
        return _lerp(grad, held, momentum)
    else:
        return grad + momentum * held


@triton.jit
def _place(tile, matrix, numel, TILE: tl.constexpr):
    """Offsets of the elements of a tile of a matrix, and its mask, empty past the last tile."""
    inside = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    return matrix.to(tl.int64) * numel + inside, inside < numel


@triton.jit
def momentum_kernel(
    buffer_ptr,
    grad_ptr,
    peaks_ptr,
    sums_ptr,
    numel,
    parts,
    rounds,
    momentum,
    weight,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update the buffer; store the operand's largest entry, and its sum of squares over that².

    Program p of a matrix does tiles p, p + parts, p + 2 parts, ...
    """
    program = tl.program_id(0)
    peak = 0.0
    total = 0.0
    for turn in range(rounds):
        at, fits = _place(program % parts + turn * parts, program // parts, numel, TILE)
        held = tl.load(buffer_ptr + at, mask=fits, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=fits, other=0.0).to(tl.float32)
        if EMA:
            held = _lerp(held, grad, weight)
        else:
            held = held * momentum + weight * grad
        rounded = held.to(buffer_ptr.dtype.element_ty)
        tl.store(buffer_ptr + at, rounded, mask=fits)
        operand = _operand(rounded.to(tl.float32), grad, momentum, EMA, NESTEROV)
        high = tl.max(tl.abs(operand), axis=0)
        # Squares of entries over the peak neither overflow nor vanish. An inf or a nan makes the
        # sum nan (inf / inf), whatever the maximum makes of a nan.
        scaled = operand / tl.where(high > 0.0, high, 1.0)
        add = tl.sum(scaled * scaled, axis=0)
        joint = tl.maximum(peak, high)
        safe = tl.where(joint > 0.0, joint, 1.0)
        total = total * (peak / safe) * (peak / safe) + add * (high / safe) * (high / safe)
        peak = joint
    tl.store(peaks_ptr + program, peak)
    tl.store(sums_ptr + program, total)


@triton.jit
def _power(x):
    """The largest power of two not above `x`; a subnormal `x` itself, and inf for inf or nan."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0.0, power, x)


@triton.jit
def scale_kernel(
    buffer_ptr,
    grad_ptr,
    out_ptr,
    peaks_ptr,
    sums_ptr,
    numel,
    parts,
    rounds,
    momentum,
    eps,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``out``: the operand over a power of two that leaves its norm in [2, 8), or over eps where
    the norm is less, with the tiles of `momentum_kernel`."""
    program = tl.program_id(0)
    part = tl.arange(0, PARTS)
    here = (program // parts).to(tl.int64) * parts + part
    peaks = tl.load(peaks_ptr + here, mask=part < parts, other=0.0)
    sums = tl.load(sums_ptr + here, mask=part < parts, other=0.0)
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak > 0.0, peak, 1.0)
    shares = peaks / peak
    first = _power(peak)
    norm = tl.sqrt(tl.sum(sums * shares * shares, axis=0)) * (peak / first)
    # A nan is not less, and stays nan: so does inf.
    second = tl.where(norm < eps / first, eps / first, 0.5 * _power(norm) + (norm - norm))

    for turn in range(rounds):
        at, fits = _place(program % parts + turn * parts, program // parts, numel, TILE)
        operand = tl.load(buffer_ptr + at, mask=fits, other=0.0).to(tl.float32)
        if NESTEROV:
            grad = tl.load(grad_ptr + at, mask=fits, other=0.0).to(tl.float32)
            operand = _operand(operand, grad, momentum, EMA, NESTEROV)
        result = operand / first / second
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=fits)


@triton.jit
def update_kernel(weight_ptr, update_ptr, decay_ptr, numel, lr, TILE: tl.constexpr):
    """``weight = weight * decay - lr * update``, one tile."""
    program = tl.program_id(0)
    at, fits = _place(program, program * 0, numel, TILE)
    weight = tl.load(weight_ptr + at, mask=fits, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + at, mask=fits, other=0.0).to(tl.float32)
    weight = weight * tl.load(decay_ptr) - lr * update
    tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=fits)


def momentum_norm_cast(
    buffer: Tensor,
    grad: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    mode: str,
    dampening: float,
    eps: float,
    out: Tensor,
) -> None:
    """Momentum, scaling and cast of contiguous ``[b, m, n]``, in two launches.

    ``buffer`` is updated in place and keeps its dtype. ``out`` gets the operand of Newton-Schulz
    (`dmuon.rule.momentum_update` in float32, ``mode`` "ema" or "sgd"), each matrix over a power
    of two, ready for `dmuon.tensors.normalize_`. The same input gives the same bits.
    Tensors may have different dtypes (float16, bfloat16, float32) and share no memory.
    """
    check(buffer.shape, buffer, grad, out)
    assert all(x.ndim == 3 and x.is_contiguous() for x in (buffer, grad, out))
    if buffer.numel() == 0:
        return
    batch, numel = len(buffer), buffer[0].numel()
    tiles = triton.cdiv(numel, _TILE)
    parts = min(tiles, _MAX_PARTS)
    peaks, sums = torch.empty(2, batch * parts, dtype=torch.float32, device=buffer.device)
    sizes = (numel, parts, triton.cdiv(tiles, parts))
    weight = float(1 - (momentum if mode == "ema" else dampening))
    options = {"EMA": mode == "ema", "NESTEROV": bool(nesterov), "TILE": _TILE, "num_warps": _WARPS}
    with of(buffer.device).current():
        momentum_kernel[(batch * parts,)](
            *(buffer, grad, peaks, sums, *sizes, float(momentum), weight), **options
        )
        options["PARTS"] = triton.next_power_of_2(parts)
        scale_kernel[(batch * parts,)](
            *(buffer, grad, out, peaks, sums, *sizes, float(momentum), float(eps)), **options
        )


def apply_update(weight: Tensor, update: Tensor, *, decay: Tensor, lr: float) -> None:
    """``weight = weight * decay - lr * update`` in place, in float32, rounded once; contiguous
    tensors of one shape and any dtypes of float16, bfloat16 and float32, which share no memory.
    ``decay``: 0-d, float32."""
    check(weight.shape, weight, update)
    assert weight.is_contiguous() and update.is_contiguous()
    if weight.numel() == 0:
        return
    grid = (triton.cdiv(weight.numel(), _TILE),)
    with of(weight.device).current():
        update_kernel[grid](
            *(weight, update, decay, weight.numel(), float(lr)), TILE=_TILE, num_warps=_WARPS
        )
