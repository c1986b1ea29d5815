"""What comes before and after Newton-Schulz, in one pass over memory each.

    momentum_norm_cast: momentum_kernel (momentum, sums of squares) -> scale_kernel (divide, cast)
    apply_update:       update_kernel

Only imported where Triton is installed; nothing else of the package imports it at its top.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.kernels.triton_host import as_batch, check, on_device_of, strides

__all__ = ["apply_update", "momentum_norm_cast"]

# Rows x columns of a tile: long rows where all tensors are stored row by row, squares where one of
# them is stored column by column, one row where they are as good as vectors.
_ROWS = (8, 512)
_SQUARE = (64, 64)
_FLAT = (1, 4096)
_WARPS = 4
# Every program of the second launch reads all partial sums of its matrix.
_MAX_PARTS = 1024


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp computes it: exact at both ends."""
    near = start + weight * (end - start)
    return tl.where(weight < 0.5, near, end - (end - start) * (1.0 - weight))


@triton.jit
def _operand(held, grad, momentum, EMA: tl.constexpr, NESTEROV: tl.constexpr):
    """What Newton-Schulz gets, of a buffer that has been advanced."""
    if not NESTEROV:
        return held
    elif EMA:
        return _lerp(grad, held, momentum)
    else:
        return grad + momentum * held


@triton.jit
def _place(tile, wide_cols, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """First row and column of a tile, and its mask: empty for a tile past the last one."""
    row = (tile // wide_cols).to(tl.int64) * ROWS
    col = (tile % wide_cols).to(tl.int64) * COLS
    fits = (tl.arange(0, ROWS)[:, None] < m - row) & (tl.arange(0, COLS)[None, :] < n - col)
    return row, col, fits


@triton.jit
def _pointers(base, row, col, stride_r, stride_c, ROWS: tl.constexpr, COLS: tl.constexpr):
    down = row + tl.arange(0, ROWS)[:, None]
    right = col + tl.arange(0, COLS)[None, :]
    return base + down * stride_r + right * stride_c


@triton.jit
def momentum_kernel(
    buffer_ptr,
    grad_ptr,
    peaks_ptr,
    sums_ptr,
    m,
    n,
    parts,
    rounds,
    buffer_batch,
    buffer_row,
    buffer_col,
    grad_batch,
    grad_row,
    grad_col,
    momentum,
    weight,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Advance the buffer; the largest entry of the operand, and its sum of squares over that².

    Program p of a matrix does its tiles p, p + parts, p + 2 parts, ...
    """
    program = tl.program_id(0)
    batch = (program // parts).to(tl.int64)
    wide_cols = tl.cdiv(n, COLS)
    peak = 0.0
    total = 0.0
    for turn in range(rounds):
        tile = program % parts + turn * parts
        row, col, fits = _place(tile, wide_cols, m, n, ROWS, COLS)
        at = _pointers(
            buffer_ptr + batch * buffer_batch, row, col, buffer_row, buffer_col, ROWS, COLS
        )
        grads = _pointers(grad_ptr + batch * grad_batch, row, col, grad_row, grad_col, ROWS, COLS)
        held = tl.load(at, mask=fits, other=0.0).to(tl.float32)
        grad = tl.load(grads, mask=fits, other=0.0).to(tl.float32)
        if EMA:
            held = _lerp(held, grad, weight)
        else:
            held = held * momentum + weight * grad
        rounded = held.to(buffer_ptr.dtype.element_ty)
        tl.store(at, rounded, mask=fits)
        operand = _operand(rounded.to(tl.float32), grad, momentum, EMA, NESTEROV)
        high = tl.max(tl.max(tl.abs(operand), axis=1), axis=0)
        # Entries over the peak stay between squares that overflow and squares that vanish. An inf
        # or a nan makes the sum nan (inf / inf), whatever the maximum makes of a nan.
        scaled = operand / tl.where(high > 0.0, high, 1.0)
        add = tl.sum(tl.sum(scaled * scaled, axis=1), axis=0)
        joint = tl.maximum(peak, high)
        safe = tl.where(joint > 0.0, joint, 1.0)
        total = total * (peak / safe) * (peak / safe) + add * (high / safe) * (high / safe)
        peak = joint
    tl.store(peaks_ptr + program, peak)
    tl.store(sums_ptr + program, total)


@triton.jit
def scale_kernel(
    buffer_ptr,
    grad_ptr,
    out_ptr,
    peaks_ptr,
    sums_ptr,
    m,
    n,
    parts,
    rounds,
    buffer_batch,
    buffer_row,
    buffer_col,
    grad_batch,
    grad_row,
    grad_col,
    out_batch,
    out_row,
    out_col,
    momentum,
    eps,
    EMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``out = operand / max(||operand||, eps)`` of the tiles that `momentum_kernel` numbered."""
    program = tl.program_id(0)
    batch = (program // parts).to(tl.int64)
    lane = tl.arange(0, PARTS)
    here = batch * parts + lane
    peaks = tl.load(peaks_ptr + here, mask=lane < parts, other=0.0)
    sums = tl.load(sums_ptr + here, mask=lane < parts, other=0.0)
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak > 0.0, peak, 1.0)
    shares = peaks / peak
    norm = tl.sqrt(tl.sum(sums * shares * shares, axis=0))
    # Not tl.maximum: it drops a nan.
    norm = tl.where(norm < eps / peak, eps / peak, norm)

    wide_cols = tl.cdiv(n, COLS)
    for turn in range(rounds):
        tile = program % parts + turn * parts
        row, col, fits = _place(tile, wide_cols, m, n, ROWS, COLS)
        at = _pointers(
            buffer_ptr + batch * buffer_batch, row, col, buffer_row, buffer_col, ROWS, COLS
        )
        operand = tl.load(at, mask=fits, other=0.0).to(tl.float32)
        if NESTEROV:
            grads = _pointers(
                grad_ptr + batch * grad_batch, row, col, grad_row, grad_col, ROWS, COLS
            )
            grad = tl.load(grads, mask=fits, other=0.0).to(tl.float32)
            operand = _operand(operand, grad, momentum, EMA, NESTEROV)
        result = operand / peak / norm
        to = _pointers(out_ptr + batch * out_batch, row, col, out_row, out_col, ROWS, COLS)
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=fits)


@triton.jit
def update_kernel(
    weight_ptr,
    update_ptr,
    m,
    n,
    weight_batch,
    weight_row,
    weight_col,
    update_batch,
    update_row,
    update_col,
    decay,
    lr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """``weight = weight * decay - lr * update``, one tile."""
    wide_cols = tl.cdiv(n, COLS)
    tiles = tl.cdiv(m, ROWS) * wide_cols
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    row, col, fits = _place(program % tiles, wide_cols, m, n, ROWS, COLS)
    at = _pointers(weight_ptr + batch * weight_batch, row, col, weight_row, weight_col, ROWS, COLS)
    by = _pointers(update_ptr + batch * update_batch, row, col, update_row, update_col, ROWS, COLS)
    weight = tl.load(at, mask=fits, other=0.0).to(tl.float32)
    update = tl.load(by, mask=fits, other=0.0).to(tl.float32)
    weight = weight * decay - lr * update
    tl.store(at, weight.to(weight_ptr.dtype.element_ty), mask=fits)


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
    """Momentum, normalization and cast of ``[m, n]`` or ``[b, m, n]``, in two launches.

    ``buffer`` is advanced in place and keeps its dtype; ``out`` gets ``x / max(||x||_F, eps)`` of
    every matrix, where x is what Newton-Schulz is to get. The formulas are those of
    `dmuon.update.momentum_update` (``mode`` "ema" or "sgd") and of
    `dmuon.kernels.newton_schulz.normalize`, computed in float32; the same input gives the same
    bits. A matrix with an inf or a nan becomes nan throughout, a zero matrix stays zero. Tensors
    may have different dtypes (float16, bfloat16, float32) and strides: ``out`` may be the transpose
    of a tensor stored row by row.

    None of them shares memory with another.
    """
    buffer, grad, out = as_batch(buffer), as_batch(grad), as_batch(out)
    check(buffer.shape, buffer, grad, out)
    if buffer.numel() == 0:
        return
    (buffer, grad, out), (rows, cols) = _arranged(buffer, grad, out)
    batch, m, n = buffer.shape
    tiles = triton.cdiv(m, rows) * triton.cdiv(n, cols)
    parts = min(tiles, _MAX_PARTS)
    peaks, sums = torch.empty(2, batch * parts, dtype=torch.float32, device=buffer.device)
    sizes = (m, n, parts, triton.cdiv(tiles, parts))
    grid = (batch * parts,)
    weight = float(1 - (momentum if mode == "ema" else dampening))
    options = {"EMA": mode == "ema", "NESTEROV": bool(nesterov), "ROWS": rows, "COLS": cols}
    with on_device_of(buffer):
        momentum_kernel[grid](
            *(buffer, grad, peaks, sums, *sizes, *strides(buffer), *strides(grad)),
            *(float(momentum), weight),
            **options,
            num_warps=_WARPS,
        )
        scale_kernel[grid](
            *(buffer, grad, out, peaks, sums, *sizes),
            *(*strides(buffer), *strides(grad), *strides(out)),
            *(float(momentum), float(eps)),
            **options,
            PARTS=triton.next_power_of_2(parts),
            num_warps=_WARPS,
        )


def apply_update(weight: Tensor, update: Tensor, *, decay: float, lr: float) -> None:
    """``weight = weight * decay - lr * update`` in place, in float32, rounded once.

    Of any dtypes of float16, bfloat16 and float32. Up to three dimensions with any strides, so that
    ``update`` may be a transposed view; more of them where both are contiguous. The two share no
    memory.
    """
    w, u = weight, update
    if w.ndim < 2 or (w.shape == u.shape and w.is_contiguous() and u.is_contiguous()):
        w, u = w.view(1, 1, -1), u.view(1, 1, -1)
    w, u = as_batch(w), as_batch(u)
    check(w.shape, w, u)
    if w.numel() == 0:
        return
    (w, u), (rows, cols) = _arranged(w, u)
    batch, m, n = w.shape
    grid = (batch * triton.cdiv(m, rows) * triton.cdiv(n, cols),)
    with on_device_of(w):
        update_kernel[grid](
            *(w, u, m, n, *strides(w), *strides(u), float(decay), float(lr)),
            ROWS=rows,
            COLS=cols,
            num_warps=_WARPS,
        )


def _arranged(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """The tensors seen such that the first is stored row by row, and the tile that suits them."""
    first = tensors[0]
    if first.stride(2) != 1 and first.stride(1) == 1:
        tensors = tuple(x.mT for x in tensors)
    if all(x[0].is_contiguous() for x in tensors):
        return tuple(x.flatten(1)[:, None] for x in tensors), _FLAT
    straight = all(x.stride(2) == 1 for x in tensors)
    return tensors, _ROWS if straight else _SQUARE
