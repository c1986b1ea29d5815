"""The matrix products that the Newton-Schulz iterations are written over, one record a backend.

Operands are one matrix `[m, k]` or a batch `[b, m, k]`, of one dtype and on one device, contiguous
or transposed views of what is. Results are written where the caller says, so that a step allocates
nothing; they are contiguous, because a batched product in half precision on a CPU takes a path that
is hundreds of times slower where they are not.

A product is given as the calls that compute it, to be made later and as often as one likes: what
Python does to choose and to slice is done once, and not at every optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "STRIPS_FROM_ROWS",
    "TORCH_OPS",
    "TORCH_STRIPS_OPS",
    "General",
    "MatmulOps",
    "Steps",
    "Symmetric",
    "native_ns_dtype",
    "rounded_ops",
]

# Row strips pay from 512 rows up (one thread: 5% of Newton-Schulz at 512, 20% at 1024 and above).
_STRIP_ROWS = 256
STRIPS_FROM_ROWS = 2 * _STRIP_ROWS
_MAX_STRIPS = 4
_TIMED_ROWS = 128
_AS_FAST = 1.5  # so small a product pays for its call, too; a large one in bfloat16 gains more


Steps = list[Callable[[], object]]
"""Calls to be made in order; each holds its operands."""


class Symmetric(Protocol):
    """A product that the caller knows to be symmetric."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        diag: float = 0.0,
        plain: Tensor | None = None,
    ) -> Steps:
        """Calls for ``out = alpha * a @ b + beta * c + diag * I``; ``plain`` gets it without the
        diagonal. Neither result shares memory with an operand.
        """


class General(Protocol):
    """Any product."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Steps:
        """Calls for ``out = alpha * a @ b + beta * c``, which shares no memory with an operand."""


Whole = Callable[[Tensor, "list[tuple[float, float, float]]", tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class MatmulOps:
    """What a backend supplies.

    ``symmetric`` may compute one triangle and mirror it. ``held``: the dtype in which matrices are
    kept between products, None for their own. ``batch_rows``: the largest m for which a batched
    call beats one call a matrix, None for any. ``whole``: where not None, the iteration on
    ``[b, m, n]`` in one call, in place, instead of the products.
    """

    name: str
    symmetric: Symmetric
    general: General
    held: torch.dtype | None = None
    batch_rows: int | None = None
    whole: Whole | None = None

    def is_plain(self, rows: int) -> bool:
        """Whether every product of matrices with so many rows is one call of torch."""
        if self.symmetric is _strips_symmetric:
            return rows < STRIPS_FROM_ROWS
        return self.symmetric is _symmetric and self.whole is None


def _general(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Steps:
    if a.ndim == 3 and len(a) == 1:  # a batch of one costs up to twice the 2-D product on a CPU
        return _general(a[0], b[0], None if c is None else c[0], out=out[0], alpha=alpha, beta=beta)
    if c is None and alpha == 1.0:
        return [partial(torch.mm if a.ndim == 2 else torch.bmm, a, b, out=out)]
    add = torch.addmm if a.ndim == 2 else torch.baddbmm
    # With beta 0 the first argument is not read.
    start, beta = (out, 0.0) if c is None else (c, beta)
    return [partial(add, start, a, b, beta=beta, alpha=alpha, out=out)]


def _finish(out: Tensor, plain: Tensor | None, diag: float) -> Steps:
    steps: Steps = []
    if plain is not None:
        steps.append(partial(out.copy_, plain))
    if diag:
        steps.append(partial(out.diagonal(dim1=-2, dim2=-1).add_, diag))
    return steps


def _symmetric(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    plain: Tensor | None = None,
) -> Steps:
    product = _general(a, b, c, out=out if plain is None else plain, alpha=alpha, beta=beta)
    return product + _finish(out, plain, diag)


def _strips(m: int) -> list[tuple[int, int]]:
    """Row ranges, each at least `_STRIP_ROWS` high, that cover m rows.

    >>> _strips(700)
    [(0, 350), (350, 700)]
    """
    count = min(_MAX_STRIPS, m // _STRIP_ROWS)
    edges = [m * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _strips_symmetric(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    plain: Tensor | None = None,
) -> Steps:
    """Lower block triangle in s row strips, then mirrored: (s + 1) / 2s of the multiplications."""
    target = out if plain is None else plain
    steps: Steps = []
    # Strips of a transposed operand lie apart in memory, and torch's half precision copies such
    # an operand before it multiplies, which costs more than the strips save.
    apart = a.stride(-1) != 1 and a.dtype.itemsize < 4
    if a.shape[-2] < STRIPS_FROM_ROWS or apart:
        steps = _general(a, b, c, out=target, alpha=alpha, beta=beta)
    elif a.ndim == 3:
        for i in range(len(a)):
            steps += _lower(a[i], b[i], None if c is None else c[i], target[i], alpha, beta)
    else:
        steps = _lower(a, b, c, target, alpha, beta)
    return steps + _finish(out, plain, diag)


def _lower(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float) -> Steps:
    strips = _strips(len(a))
    steps: Steps = []
    for low, high in strips:
        steps += _general(
            a[low:high],
            b[:, :high],
            None if c is None else c[low:high, :high],
            out=out[low:high, :high],
            alpha=alpha,
            beta=beta,
        )
    for low, high in strips[:-1]:
        steps.append(partial(out[low:high, high:].copy_, out[high:, low:high].mT))
    return steps


TORCH_OPS = MatmulOps("torch", _symmetric, _general)
"""Plain torch on any device; a symmetric product costs as much as a general one."""

TORCH_STRIPS_OPS = MatmulOps(
    "torch_strips",
    _strips_symmetric,
    _general,
    batch_rows=STRIPS_FROM_ROWS - 1,
)
"""Row strips from m = 512 up; there a batch gains nothing on a CPU and runs matrix by matrix."""


def _round(out: Tensor, dtype: torch.dtype) -> None:
    out.copy_(out.to(dtype))


def rounded_ops(dtype: torch.dtype) -> MatmulOps:
    """Products in float32, each result rounded to ``dtype``: what a half-precision unit computes.

    For a CPU without instructions for ``dtype``, where the emulated product takes 10 to 100 times
    as long. Matrices are held in float32; every value in them is one of ``dtype``.
    """

    def rounded(out: Tensor) -> Steps:
        return [partial(_round, out, dtype)]

    def symmetric(
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        diag: float = 0.0,
        plain: Tensor | None = None,
    ) -> Steps:
        target = out if plain is None else plain
        product = _strips_symmetric(a, b, c, out=target, alpha=alpha, beta=beta)
        finish = _finish(out, plain, diag)
        return product + rounded(target) + finish + (rounded(out) if diag else [])

    def general(
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Steps:
        return _general(a, b, c, out=out, alpha=alpha, beta=beta) + rounded(out)

    return MatmulOps(
        "torch_rounded", symmetric, general, held=torch.float32, batch_rows=STRIPS_FROM_ROWS - 1
    )


def native_ns_dtype(device: torch.device | str) -> torch.dtype:
    """The fastest dtype that is accurate enough for Newton-Schulz on a device.

    float16 on CUDA: three more mantissa bits than bfloat16 at the same speed, and after
    normalization nothing leaves its range. bfloat16 on a CPU that is fast in it, float32 on
    everything else (float16 products are emulated, and very slow, on a CPU).
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.float16
    if kind == "cpu" and cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


@cache
def cpu_has_bf16() -> bool:
    """Whether bfloat16 products are fast on this CPU: two small ones are timed, once a process.

    What the processor reports does not decide: a build of torch or a setting of oneDNN may leave
    its instructions unused, and an emulated product takes 5 to 30 times as long as one in float32.
    """
    # In a thread of its own: there no mode of the caller's turns products into fake ones.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(_bf16_is_fast).result()


def _bf16_is_fast() -> bool:
    x = torch.ones(_TIMED_ROWS, _TIMED_ROWS, dtype=torch.float32, device="cpu")
    operands = (x, x.bfloat16())
    results = tuple(map(torch.empty_like, operands))
    best = [math.inf, math.inf]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would decide
    try:
        with torch.no_grad():
            for _ in range(4):  # the first one sets up the library
                for k, (operand, out) in enumerate(zip(operands, results, strict=True)):
                    begin = time.perf_counter()
                    torch.mm(operand, operand, out=out)
                    best[k] = min(best[k], time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return best[1] <= _AS_FAST * best[0]
