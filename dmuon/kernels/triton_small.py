"""The whole Newton-Schulz iteration of a small matrix in one program: m <= 128.

Below that, products are bound by their launches. One program keeps R, Z and Q of its matrix on chip
and reads X from memory (in practice from L2) twice per segment.

Only imported where Triton is installed; nothing else of the package imports it at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.kernels.triton_syrk import check, on_device_of, strides
from dmuon.types import Triple

_MAX_ROWS = 128
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _product(left, right, total):
    """``total + left @ right`` in float32."""
    if INTERPRETED:  # where products of bfloat16 are wrong
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _polynomial(r, b, c):
    """``bR + cR^2`` in float32."""
    return b * r.to(tl.float32) + c * _product(r, r, tl.zeros(r.shape, dtype=tl.float32))


@triton.jit
def _times_p(r, z, a):
    """``R P = R Z + aR`` in R's dtype."""
    return _product(r, z, a * r.to(tl.float32)).to(r.dtype)


@triton.jit
def iteration_kernel(
    x_ptr,
    triples_ptr,
    edges_ptr,
    q_ptr,
    m,
    n,
    segments,
    x_batch,
    x_row,
    x_col,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP_Q: tl.constexpr,
):
    """One matrix; ``edges`` are the steps at which segments begin, and the number of steps.

    Unless KEEP_Q, Q is kept in memory, at ``q_ptr``, M x M elements per program.
    """
    dtype = x_ptr.dtype.element_ty
    row = tl.arange(0, M)
    col = tl.arange(0, CHUNK)
    rows = x_ptr + tl.program_id(0).to(tl.int64) * x_batch + row[:, None].to(tl.int64) * x_row
    q_at = q_ptr + tl.program_id(0).to(tl.int64) * (M * M) + row[:, None] * M + row[None, :]
    on_diagonal = row[:, None] == row[None, :]
    for segment in range(segments):
        first = tl.load(edges_ptr + segment)
        end = tl.load(edges_ptr + segment + 1)
        gram = tl.zeros((M, M), dtype=tl.float32)
        for start in range(0, n, CHUNK):
            fits = (row[:, None] < m) & (col[None, :] < n - start)
            at = rows + (start + col[None, :]).to(tl.int64) * x_col
            x = tl.load(at, mask=fits, other=0.0)
            gram = _product(x, tl.trans(x), gram)
        r = gram.to(dtype)
        a = tl.load(triples_ptr + 3 * first)
        b = tl.load(triples_ptr + 3 * first + 1)
        c = tl.load(triples_ptr + 3 * first + 2)
        wide = _polynomial(r, b, c)
        # A segment of one step is X <- aX + ZX: in P = aI + Z, rounding would cost more.
        single = end - first == 1
        own = tl.where(single, a, 0.0)
        z = wide.to(dtype)
        q = (wide + tl.where(on_diagonal, a - own, 0.0)).to(dtype)
        if not KEEP_Q:
            tl.store(q_at, q)
        for step in range(first + 1, end):
            r = _times_p(_times_p(r, z, a), z, a)
            a = tl.load(triples_ptr + 3 * step)
            b = tl.load(triples_ptr + 3 * step + 1)
            c = tl.load(triples_ptr + 3 * step + 2)
            z = _polynomial(r, b, c).to(dtype)
            if KEEP_Q:
                q = _times_p(q, z, a)
            else:
                tl.debug_barrier()
                next_q = _times_p(tl.load(q_at), z, a)
                tl.debug_barrier()
                tl.store(q_at, next_q)
        if not KEEP_Q:
            tl.debug_barrier()
            q = tl.load(q_at)
        for start in range(0, n, CHUNK):
            fits = (row[:, None] < m) & (col[None, :] < n - start)
            at = rows + (start + col[None, :]).to(tl.int64) * x_col
            x = tl.load(at, mask=fits, other=0.0)
            x = _product(q, x, own * x.to(tl.float32)).to(dtype)
            tl.store(at, x, mask=fits)
        # Other threads read in the next segment what this one has stored.
        tl.debug_barrier()


def max_rows(dtype: torch.dtype) -> int:
    """The most rows that `small_iteration` takes.

    No tensor core multiplies IEEE float32: its products unroll into code that takes minutes to
    compile for larger matrices.
    """
    return 32 if dtype == torch.float32 else _MAX_ROWS


def launch_options(m: int, dtype: torch.dtype) -> dict[str, int]:
    """The constants of `iteration_kernel`: padded rows, columns of X per load, and so on."""
    size = max(16, triton.next_power_of_2(m))
    return {
        "M": size,
        "CHUNK": 32 if dtype == torch.float32 else 64,
        "KEEP_Q": size < _MAX_ROWS,  # 128 rows fill the registers with R and Z alone
        "num_warps": {16: 1, 32: 4}.get(size, 8),
        "num_stages": 2,
    }


def tables(
    x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The other inputs of `small_iteration`, on the device of ``x``: coefficients, the steps at
    which segments begin, memory for Q. Copied from the host, so make them before a step."""
    check(x.shape, x)
    batch, m, n = x.shape
    assert m <= min(n, max_rows(x.dtype)), x.shape
    options = launch_options(m, x.dtype)
    edges = (0, *restarts, len(coefficients))
    return (
        torch.tensor(coefficients, dtype=torch.float32, device=x.device),
        torch.tensor(edges, dtype=torch.int32, device=x.device),
        x.new_empty(0 if options["KEEP_Q"] else batch * options["M"] ** 2),
    )


def small_iteration(x: Tensor, beside: tuple[Tensor, Tensor, Tensor]) -> None:
    """Newton-Schulz on ``[b, m, n]`` in place, one program per matrix, in a single launch.

    The steps, restarts and formulas are those of `dmuon.kernels.newton_schulz.iterate`. ``x`` is
    normalized, with m <= n and m <= `max_rows`, float16, bfloat16 or float32, of any strides;
    ``beside`` is `tables` of such an x. Products accumulate in float32.
    """
    coefficients, edges, scratch = beside
    batch, m, n = x.shape
    if len(coefficients) and x.numel():
        with on_device_of(x):
            iteration_kernel[(batch,)](
                *(x, coefficients, edges, scratch, m, n, len(edges) - 1),
                *strides(x),
                **launch_options(m, x.dtype),
            )


def prepared_iteration(
    x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int]
) -> Callable[[], None]:
    """`small_iteration` of one ``x``, with its `tables` made now."""
    return partial(small_iteration, x, tables(x, coefficients, restarts))
