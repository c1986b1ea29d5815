"""The matrix products that Newton-Schulz is written over, one class a backend.

Operands are one matrix ``[m, k]`` or a batch ``[b, m, k]``, of one dtype and on one device,
contiguous or transposed views of what is. Results are written where the caller says and contiguous:
a step allocates nothing, and a batched product in half precision on a CPU takes a path that is
hundreds of times slower where they are not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmuon.types import Triple

# Row strips pay from 512 rows up (one thread: 5% of Newton-Schulz at 512, 20% at 1024 and above).
_STRIP_ROWS = 256
STRIPS_FROM_ROWS = 2 * _STRIP_ROWS
_MAX_STRIPS = 4
_TIMED_ROWS = 128
_AS_FAST = 1.5  # so small a product pays for its call, too; a large one in bfloat16 gains more


class MatmulOps:
    """``torch``: plain products on any device, symmetric ones too; and what other backends supply.

    ``held``: the dtype in which matrices are kept between products, None for their own.
    ``batch_rows``: the largest m for which a batched call beats one call a matrix, None for any.
    """

    held: torch.dtype | None = None
    batch_rows: int | None = None

    def general(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """``out = alpha * a @ b + beta * c``, or ``a @ b``; ``out`` shares no memory with an
        operand."""
        is_matrix = out.ndim == 2
        if c is None:
            (torch.mm if is_matrix else torch.bmm)(a, b, out=out)
        else:
            add = torch.addmm if is_matrix else torch.baddbmm
            add(c, a, b, beta=beta, alpha=alpha, out=out)

    symmetric = general
    """The same of a product that is known to be symmetric: a triangle of it says all."""

    def shifted(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        diag: float,
        out: Tensor,
        plain: Tensor,
        **factors: float,
    ) -> None:
        """`symmetric` into ``plain``, and with ``diag`` on its diagonal into ``out``."""
        self.symmetric(a, b, c, out=plain, **factors)
        out.copy_(plain).diagonal(dim1=-2, dim2=-1).add_(diag)

    def whole(
        self, x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int]
    ) -> Callable[[], None] | None:
        """A function that runs the whole iteration on wide matrices ``[b, m, n]`` in place, for
        backends that do so instead of making products; None for the others."""
        return None


class StripsOps(MatmulOps):
    """``torch_strips``, on a CPU: of a symmetric product with m >= 512 the lower block triangle
    in s strips, (s + 1) / 2s of the multiplications, then mirrored. There a batch gains nothing."""

    batch_rows = STRIPS_FROM_ROWS - 1

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, out: Tensor, **factors: float
    ) -> None:
        # Strips of a transposed operand lie apart in memory, and torch's half precision copies such
        # an operand before it multiplies, which costs more than the strips save.
        scattered = a.stride(-1) != 1 and a.dtype.itemsize < 4
        if out.shape[-1] < STRIPS_FROM_ROWS or scattered:
            self.general(a, b, c, out=out, **factors)
            return
        if out.ndim == 3:
            for i in range(len(out)):
                self.symmetric(a[i], b[i], None if c is None else c[i], out=out[i], **factors)
            return
        strips = _strips(len(out))
        for low, high in strips:
            add = None if c is None else c[low:high, :high]
            self.general(a[low:high], b[:, :high], add, out=out[low:high, :high], **factors)
        for low, high in strips[:-1]:
            out[low:high, high:].copy_(out[high:, low:high].mT)


def _strips(m: int) -> list[tuple[int, int]]:
    """Row ranges, each at least `_STRIP_ROWS` high, that cover m rows.

    >>> _strips(700)
    [(0, 350), (350, 700)]
    """
    count = min(_MAX_STRIPS, m // _STRIP_ROWS)
    return list(pairwise(m * i // count for i in range(count + 1)))


class RoundedOps(StripsOps):
    """``torch_rounded``: products in float32, each result rounded to ``dtype``, as a half-precision
    unit computes; for a CPU without one, where torch's emulation takes 10 to 100 times as long."""

    held = torch.float32

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def general(self, *operands: Tensor | None, out: Tensor, **factors: float) -> None:  # type: ignore[override]
        super().general(*operands, out=out, **factors)  # type: ignore[arg-type]
        out.copy_(out.to(self._dtype))

    def shifted(self, *operands: Tensor, out: Tensor, **how: Any) -> None:  # type: ignore[override]
        super().shifted(*operands, out=out, **how)
        out.copy_(out.to(self._dtype))


class TritonOps(MatmulOps):
    """``triton``: symmetric products by triangles of tiles, ``tile`` or, where "", a default."""

    def __init__(self, tile: str) -> None:
        from dmuon.kernels import triton_syrk

        chosen = triton_syrk.parse_tile(tile) if tile else None
        self._multiply: Callable[..., None] = partial(triton_syrk.symm_mm, tile=chosen)

    def symmetric(self, a: Tensor, b: Tensor, c: Tensor | None = None, **how: Any) -> None:
        self._multiply(a, b.mT, c, **how)

    shifted = symmetric


class TritonSmallOps(MatmulOps):
    """``triton_small``: the whole iteration of a matrix in one program."""

    def whole(
        self, x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int]
    ) -> Callable[[], None]:
        from dmuon.kernels.triton_small import small_iteration, tables

        return partial(small_iteration, x, tables(x, coefficients, restarts))


# ---- which dtype is fast ---------------------------------------------------------------------


def native_ns_dtype(device: torch.device | str) -> torch.dtype:
    """The fastest dtype that is accurate enough for Newton-Schulz on a device.

    float16 on CUDA: three more mantissa bits than bfloat16 at the same speed, and after
    normalization nothing leaves its range. On a CPU it is emulated, and very slow.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.float16
    return torch.bfloat16 if kind == "cpu" and cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Whether bfloat16 products are fast on this CPU: two small ones are timed, once a process.

    What the processor reports does not decide: a build of torch or a setting of oneDNN may leave
    its instructions unused, and an emulated product takes 5 to 30 times as long as one in float32.
    """
    if not _has_bf16:
        # In a thread of its own: there no mode of the caller's turns products into fake ones.
        with ThreadPoolExecutor(1) as threads:
            _has_bf16.append(threads.submit(_bf16_is_fast).result())
    return _has_bf16[0]


_has_bf16: list[bool] = []  # not a cache, which torch.compile would look behind


@torch.no_grad()
def _bf16_is_fast() -> bool:
    best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would decide
    try:
        for _ in range(4):  # the first one sets up the library
            for dtype in best:
                x = torch.ones(_TIMED_ROWS, _TIMED_ROWS, dtype=dtype, device="cpu")
                out = torch.empty_like(x)
                begin = time.perf_counter()
                torch.mm(x, x, out=out)
                best[dtype] = min(best[dtype], time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return best[torch.bfloat16] <= _AS_FAST * best[torch.float32]
