"""How much memory `newton_schulz.iterate` takes beside its input, counted from its source."""

from __future__ import annotations

from itertools import pairwise

import torch

from dmuon.kernels.newton_schulz import choose_method, default_restarts
from dmuon.kernels.ops import ops_for

__all__ = ["iterate_elements"]


def iterate_elements(
    batch: int, rows: int, cols: int, dtype: torch.dtype, steps: int, device: torch.device | str
) -> int:
    """Elements of ``dtype`` alive at the peak of ``iterate`` on ``[batch, rows, cols]``, its
    result included.

    A standard step holds ``X X^T``, the polynomial of it, X and the next X; a Gram segment five
    square matrices, or four of them with X and the next X.
    """
    m, n = min(rows, cols), max(rows, cols)
    if choose_method(m, n, dtype, steps) == "gram":
        edges = (0, *default_restarts(dtype, steps), steps)
        one = max(_segment(m, n, high - low, first=low == 0) for low, high in pairwise(edges))
    else:
        one = max((_segment(m, n, 1, first=s == 0) for s in range(steps)), default=0)
    limit = ops_for(device).batch_rows
    if batch == 1 or limit is None or m <= limit:
        return batch * one
    # One by one; the results are stacked at the end.
    return max((batch - 1) * m * n + one, 2 * batch * m * n)


def _segment(m: int, n: int, length: int, *, first: bool) -> int:
    x = 0 if first else m * n  # the first X is the input
    if length == 1:
        return x + 2 * m * m + m * n
    return x + max(5 * m * m, 4 * m * m + m * n)
