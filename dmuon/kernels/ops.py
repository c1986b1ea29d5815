"""The matrix products that Newton-Schulz consists of, one class per backend.

Operands are one matrix ``[m, k]`` or a batch ``[b, m, k]``, of one dtype and on one device,
contiguous or transposed from a contiguous tensor. Results are written to ``out``, so a step
allocates nothing. ``out`` is contiguous, because otherwise a batched half-precision product on a
CPU takes a path that is hundreds of times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LEAST_STRIP = 256  # rows, unless measured
MAX_STRIPS = 4


Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Provides memory of a shape and dtype."""


class MatmulOps:
    """``torch``: plain products on any device, and the interface of the other backends.

    ``held``: the dtype that holds matrices between products, None for their own.
    ``batch_rows``: the largest m for which a batched call beats one call per matrix, None for any.
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
        """Compute ``alpha * a @ b + beta * c``, or ``a @ b``; ``out`` has its own memory."""
        is_matrix = out.ndim == 2
        if c is None:
            (torch.mm if is_matrix else torch.bmm)(a, b, out=out)
        else:
            add = torch.addmm if is_matrix else torch.baddbmm
            add(c, a, b, beta=beta, alpha=alpha, out=out)

    symmetric = general
    """The same for a product known to be symmetric, so that one triangle is enough."""

    def gram(self, x: Tensor, xt: Tensor, *, out: Tensor) -> None:
        """Compute ``out = x @ x^T``."""
        self.symmetric(x, xt, out=out)

    def shifted(
        self, *operands: Tensor, diag: float, out: Tensor, plain: Tensor, **factors: Any
    ) -> None:
        """Run `symmetric` into ``plain``, and add ``diag`` to its diagonal in ``out``."""
        self.symmetric(*operands, out=plain, **factors)
        out.copy_(plain).diagonal(dim1=-2, dim2=-1).add_(diag)

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        """Return the bytes that a product of a batch, m <= n, allocates temporarily."""
        return 0


class StripsOps(MatmulOps):
    """``torch_strips``, on a CPU: symmetric products compute the lower block triangle in s strips,
    with (s + 1) / 2s of the multiplications, and mirror it, if there are two strips of at least
    ``strip`` rows. Batching such products gains nothing.
    """

    def __init__(self, strip: int = LEAST_STRIP) -> None:
        self._strip = strip
        self.batch_rows = 2 * strip - 1

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, out: Tensor, **factors: float
    ) -> None:
        # Strips of a transposed operand are not contiguous, and in half precision torch copies such
        # an operand before it multiplies, which costs more than strips save.
        scattered = a.stride(-1) != 1 and a.dtype.itemsize < 4
        count = strips_in(out.shape[-1], self._strip)
        if count == 1 or scattered:
            self.general(a, b, c, out=out, **factors)
            return
        if out.ndim == 3:
            for i in range(len(out)):
                self.symmetric(a[i], b[i], None if c is None else c[i], out=out[i], **factors)
            return
        strips = _strips(len(out), count)
        for low, high in strips:
            add = None if c is None else c[low:high, :high]
            self.general(a[low:high], b[:, :high], add, out=out[low:high, :high], **factors)
        self.mirror(out, strips)

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        _, high = _strips(m, strips_in(m, self._strip))[0]
        return 2 * (m - high) * high * itemsize

    def mirror(self, out: Tensor, strips: Sequence[tuple[int, int]]) -> None:
        """Fill the blocks above the diagonal from the blocks below."""
        for low, high in strips[:-1]:
            # torch transposes contiguous blocks by tiles, two to three times as fast.
            out[low:high, high:].copy_(out[high:, low:high].contiguous().mT.contiguous())


def strips_in(rows: int, strip: int) -> int:
    """Return the number of strips of a symmetric product; 1 means a plain product.

    >>> [strips_in(rows, 256) for rows in (511, 512, 1024, 4096)]
    [1, 2, 4, 4]
    """
    return max(1, min(MAX_STRIPS, rows // strip))


def _strips(rows: int, count: int) -> list[tuple[int, int]]:
    """Return row ranges of nearly equal height.

    >>> _strips(700, 2)
    [(0, 350), (350, 700)]
    """
    return list(pairwise(rows * i // count for i in range(count + 1)))


class RoundedOps(StripsOps):
    """``torch_rounded``: float32 products, each result rounded to ``dtype`` as by a half-precision
    unit. For CPUs without such a unit, where torch's emulation takes 10 to 100 times as long."""

    held = torch.float32

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        b = b if m < 2 * self._strip else 1
        return max(b * m * n * itemsize, super().temporary_bytes(b, m, n, 4))

    def general(self, *operands: Tensor | None, out: Tensor, **factors: float) -> None:  # type: ignore[override]
        super().general(*operands, out=out, **factors)  # type: ignore[arg-type]
        out.copy_(out.to(self._dtype))

    def shifted(self, *operands: Tensor, out: Tensor, **how: Any) -> None:
        super().shifted(*operands, out=out, **how)
        out.copy_(out.to(self._dtype))


class TritonOps(MatmulOps):
    """``triton``: symmetric products by triangles of tiles, see `triton_syrk.symm_mm`; by torch if
    a size is no multiple of 16, which the kernel would copy element by element.

    Factors of m x m are symmetric: the second one is passed as its own transpose, with contiguous
    columns, which suits tensor cores best.
    """

    def __init__(self, multiply: Callable[..., None]) -> None:
        self._multiply = multiply

    def symmetric(self, a: Tensor, b: Tensor, c: Tensor | None = None, **how: Any) -> None:
        multiply = self._multiply if is_even(*a.shape[-2:]) else self.general
        multiply(a, b, c, **how)

    def gram(self, x: Tensor, xt: Tensor, *, out: Tensor) -> None:
        self.symmetric(x, x if is_even(*x.shape[-2:]) else xt, out=out)

    def shifted(self, *operands: Tensor, **how: Any) -> None:
        is_ours = is_even(*operands[0].shape[-2:])
        (self.symmetric if is_ours else super().shifted)(*operands, **how)


def is_even(*sizes: int) -> bool:
    """Return whether Triton's products accept matrices of these sizes."""
    return not any(size % 16 for size in sizes)
