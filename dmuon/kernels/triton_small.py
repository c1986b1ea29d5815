"""The whole Newton-Schulz iteration of a small matrix in one program: m <= 128.

Below that, products are bound by their launches. One program keeps R, Z and Q of its matrix on chip
and reads X from memory (in practice from L2) twice per segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.devices import of
from dmuon.kernels.triton_syrk import check, strides
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
def _triple(triples_ptr, step):
    at = triples_ptr + 3 * step
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _chunk(x_ptr, start, m, n, x_row, x_col, M: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers to the columns from ``start`` on, and which of them are in the matrix."""
    row, col = tl.arange(0, M)[:, None], tl.arange(0, CHUNK)[None, :]
    at = x_ptr + row.to(tl.int64) * x_row + (start + col).to(tl.int64) * x_col
    return at, (row < m) & (col < n - start)


@triton.jit
def iteration_kernel(
    x_ptr, triples_ptr, edges_ptr, q_ptr, m, n, segments, x_batch, x_row, x_col,
    M: tl.constexpr, CHUNK: tl.constexpr, KEEP_Q: tl.constexpr,
):  # fmt: skip
    """One matrix; ``edges`` are the steps at which segments begin, and the number of steps.

    Unless KEEP_Q, Q is kept in memory, at ``q_ptr``, M x M elements per program.
    """
    dtype = x_ptr.dtype.element_ty
    matrix = tl.program_id(0).to(tl.int64)
    x_ptr += matrix * x_batch
    row = tl.arange(0, M)
    q_at = q_ptr + matrix * (M * M) + row[:, None] * M + row[None, :]
    on_diagonal = row[:, None] == row[None, :]
    for segment in range(segments):
        first = tl.load(edges_ptr + segment)
        end = tl.load(edges_ptr + segment + 1)
        gram = tl.zeros((M, M), dtype=tl.float32)
        for start in range(0, n, CHUNK):
            at, fits = _chunk(x_ptr, start, m, n, x_row, x_col, M, CHUNK)
            x = tl.load(at, mask=fits, other=0.0)
            gram = _product(x, tl.trans(x), gram)
        r = gram.to(dtype)
        a, b, c = _triple(triples_ptr, first)
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
            a, b, c = _triple(triples_ptr, step)
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
            at, fits = _chunk(x_ptr, start, m, n, x_row, x_col, M, CHUNK)
            x = tl.load(at, mask=fits, other=0.0)
            x = _product(q, x, own * x.to(tl.float32)).to(dtype)
            tl.store(at, x, mask=fits)
        # Other threads read in the next segment what this one has stored.
        tl.debug_barrier()


def max_rows(dtype: torch.dtype) -> int:
    """The most rows that `prepared_iteration` takes.

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


def prepared_iteration(
    x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int]
) -> Callable[[], None]:
    """Newton-Schulz on ``[b, m, n]`` in place at each call: one launch, one program per matrix.

    The formulas are those of `dmuon.kernels.newton_schulz.iterate`. ``x`` is normalized when it
    runs, with m <= n and m <= `max_rows`, float16, bfloat16 or float32, of any strides. Products
    accumulate in float32. Preparing copies from the host, so do it before a step.
    """
    check(x.shape, x)
    batch, m, n = x.shape
    assert m <= min(n, max_rows(x.dtype)), x.shape
    options = launch_options(m, x.dtype)
    edges = (0, *restarts, len(coefficients))
    triples = torch.tensor(coefficients, dtype=torch.float32, device=x.device)
    begins = torch.tensor(edges, dtype=torch.int32, device=x.device)
    scratch = x.new_empty(0 if options["KEEP_Q"] else batch * options["M"] ** 2)

    def run() -> None:
        if coefficients and x.numel():
            given = (x, triples, begins, scratch, m, n, len(edges) - 1, *strides(x))
            with of(x.device).current():
                iteration_kernel[(batch,)](*given, **options)

    return run
