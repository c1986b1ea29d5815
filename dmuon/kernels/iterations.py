"""The standard and the Gram iteration, written once over `MatmulOps`.

A run goes through *segments*, the steps between two restarts. A segment of one step is a standard
step. A longer one carries `R = X X^T` and the product Q in m x m space and touches X at its ends.
So the standard iteration is the one with a restart after every step.

Matrices with the same short side m run as one group, whatever their long sides are::

    X_1 [b1, m, n1]  X_2 [b2, m, n2]     X X^T and Q X: a call each
    R, Z, Q, T  [b1 + b2, m, m]          everything else: one call for all

A tall matrix is multiplied from the right, `R = X^T X` and `X Q`: the same polynomial, because the
m x m factors are symmetric. So matrices stay contiguous as they are stored and nothing is
transposed. (Views by columns would give the same numbers, but a batched product in half precision
on a CPU that writes to one takes a path that is hundreds of times slower.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dmuon.kernels.ops import MatmulOps, Steps
from dmuon.kernels.workspace import Workspace, aligned_bytes
from dmuon.types import Triple

__all__ = ["Program", "Shape", "group_program", "segments", "squares_program", "workspace_bytes"]

Shape = tuple[int, int, int]  # matrices, rows, cols


@dataclass(frozen=True, slots=True)
class Program:
    """Calls in order, on memory that is fixed; it can run again once its operands are new."""

    steps: Steps
    results: list[Tensor]

    def run(self) -> list[Tensor]:
        """Where the results lie."""
        for step in self.steps:
            step()
        return list(self.results)


def segments(restarts: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Step ranges between restarts.

    Raises ValueError unless restarts increase and lie between 1 and steps - 1.

    >>> segments((1, 3), 5)
    [(0, 1), (1, 3), (3, 5)]
    """
    if steps == 0:
        return []
    found = list(pairwise((0, *restarts, steps)))
    if any(low >= high for low, high in found):
        raise ValueError(
            f"restarts must increase and lie between 1 and {steps - 1} (steps - 1), "
            f"found {tuple(restarts)}"
        )
    return found


def group_program(
    xs: Sequence[Tensor],
    coefficients: Sequence[Triple],
    restarts: Sequence[int],
    ops: MatmulOps,
    workspace: Workspace,
) -> Program:
    """`aX + (bA + cA^2)X`, `A = X X^T`, once for each triple, on every matrix of every batch.

    ``xs[i]`` is ``[b_i, m, n_i]`` or, tall, ``[b_i, n_i, m]`` with m <= n_i, contiguous, normalized
    when the program runs; it is overwritten. A result lies in its ``xs[i]`` or in the workspace,
    where the next `Workspace.take` may use the memory again.
    """
    parts = segments(restarts, len(coefficients))
    m = min(xs[0].shape[-2:])
    steps: Steps = []
    if ops.whole is not None:
        wide = [x.mT if x.shape[-2] > m else x for x in xs]
        steps += [partial(ops.whole, x, list(coefficients), tuple(restarts)) for x in wide]
        return Program(steps, list(xs))
    with workspace.frame():
        if len(xs) == 1 and len(xs[0]) == 1:
            result = _one(xs[0][0], coefficients, parts, ops, workspace, steps)
            return Program(steps, [result[None]])
        if ops.batch_rows is None or m <= ops.batch_rows:
            return Program(steps, _batches(xs, coefficients, parts, ops, workspace, steps))
    for matrix in (matrix for x in xs for matrix in x):
        with workspace.frame():
            result = _one(matrix, coefficients, parts, ops, workspace, steps)
            if result.data_ptr() != matrix.data_ptr():
                steps.append(partial(matrix.copy_, result))
    return Program(steps, list(xs))


def _one(
    x: Tensor,
    coefficients: Sequence[Triple],
    parts: Sequence[tuple[int, int]],
    ops: MatmulOps,
    workspace: Workspace,
    steps: Steps,
) -> Tensor:
    """One matrix, in 2-D products: a batch of one costs up to twice as much on a CPU."""
    dtype, m = ops.held or x.dtype, min(x.shape)
    here = x
    if dtype is not x.dtype:
        here = workspace.take(x.shape, dtype)
        steps.append(partial(here.copy_, x))
    there = workspace.take(x.shape, dtype)
    squares = [workspace.take((m, m), dtype) for _ in range(_squares(parts))]
    r, p = squares[:2]
    for low, high in parts:
        steps += _gram(here, ops, out=r)
        if high - low == 1:
            a, b, c = coefficients[low]
            steps += ops.symmetric(r, r, r, out=p, alpha=c, beta=b)
            steps += _times(p, here, ops, out=there, own=a)
        else:
            q = _polynomial(squares, coefficients[low:high], ops, steps)
            steps += _times(squares[q], here, ops, out=there)
        here, there = there, here
    if dtype is x.dtype:
        return here
    steps.append(partial(x.copy_, here))
    return x


def _batches(
    xs: Sequence[Tensor],
    coefficients: Sequence[Triple],
    parts: Sequence[tuple[int, int]],
    ops: MatmulOps,
    workspace: Workspace,
    steps: Steps,
) -> list[Tensor]:
    """Batches of one height: all m x m products in one call, the others in one a batch."""
    dtype, m = ops.held or xs[0].dtype, min(xs[0].shape[-2:])
    here = list(xs)
    if dtype is not xs[0].dtype:
        here = [workspace.take(x.shape, dtype) for x in xs]
        steps += [partial(held.copy_, x) for held, x in zip(here, xs, strict=True)]
    there = [workspace.take(x.shape, dtype) for x in here]
    rows = [len(x) for x in xs]
    squares = [workspace.take((sum(rows), m, m), dtype) for _ in range(_squares(parts))]
    split = [square.split(rows) for square in squares]
    for low, high in parts:
        for x, r in zip(here, split[0], strict=True):
            steps += _gram(x, ops, out=r)
        if high - low == 1:
            a, b, c = coefficients[low]
            r, p = squares[:2]
            steps += ops.symmetric(r, r, r, out=p, alpha=c, beta=b)
            for x, factor, y in zip(here, split[1], there, strict=True):
                steps += _times(factor, x, ops, out=y, own=a)
        else:
            q = _polynomial(squares, coefficients[low:high], ops, steps)
            for x, factor, y in zip(here, split[q], there, strict=True):
                steps += _times(factor, x, ops, out=y)
        here, there = there, here
    if dtype is xs[0].dtype:
        return here
    steps += [partial(x.copy_, result) for x, result in zip(xs, here, strict=True)]
    return list(xs)


def _polynomial(
    squares: Sequence[Tensor], segment: Sequence[Triple], ops: MatmulOps, steps: Steps
) -> int:
    """Which of four squares will hold Q = P_s ... P_1, given R_1 = X X^T in the first.

    P = aI + Z, Z = bR + cR^2, R_(i+1) = P_i R_i P_i: all of them are polynomials in X X^T, so they
    are symmetric and commute (https://github.com/Dao-AILab/gram-newton-schulz). P is never formed
    (but for the first factor of Q): in half precision adding a to Z's diagonal doubles the error.
    """
    r, z = squares[0], squares[1]
    q, t = 2, 3
    a, b, c = segment[0]
    steps += ops.symmetric(r, r, r, out=squares[q], alpha=c, beta=b, diag=a, plain=z)
    for next_a, b, c in segment[1:]:
        rp = squares[t]
        steps += ops.symmetric(r, z, r, out=rp, beta=a)
        steps += ops.symmetric(rp, z, rp, out=r, beta=a)
        steps += ops.symmetric(r, r, r, out=z, alpha=c, beta=b)
        a = next_a
        steps += ops.symmetric(squares[q], z, squares[q], out=squares[t], beta=a)
        q, t = t, q
    return q


def squares_program(
    r: Tensor,
    coefficients: Sequence[Triple],
    restarts: Sequence[int],
    ops: MatmulOps,
    workspace: Workspace,
) -> Program:
    """The m x m part of `group_program` alone, on ``R = X X^T`` ``[b, m, m]``, to be timed."""
    steps: Steps = []
    with workspace.frame():
        squares = [r, *(workspace.take(r.shape, r.dtype) for _ in range(3))]
        for low, high in segments(restarts, len(coefficients)):
            segment = coefficients[low:high]
            if len(segment) > 1:
                _polynomial(squares, segment, ops, steps)
            else:
                _, b, c = segment[0]
                steps += ops.symmetric(r, r, r, out=squares[1], alpha=c, beta=b)
    return Program(steps, [])


def _gram(x: Tensor, ops: MatmulOps, out: Tensor) -> Steps:
    """Calls for ``X X^T`` or, of a tall matrix, ``X^T X``: m x m."""
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    return ops.symmetric(wide, wide.mT, out=out)


def _times(factor: Tensor, x: Tensor, ops: MatmulOps, out: Tensor, own: float = 0.0) -> Steps:
    """Calls for ``factor X + own X`` or, of a tall matrix, ``X factor + own X``."""
    left, right = (factor, x) if x.shape[-2] <= x.shape[-1] else (x, factor)
    if own:
        return ops.general(left, right, x, out=out, beta=own)
    return ops.general(left, right, out=out)


def _squares(parts: Sequence[tuple[int, int]]) -> int:
    return 4 if any(high - low > 1 for low, high in parts) else 2


def workspace_bytes(
    shapes: Sequence[Shape], dtype: torch.dtype, restarts: Sequence[int], steps: int, ops: MatmulOps
) -> int:
    """What `group_program` takes of its workspace for batches of these shapes, in bytes."""
    if ops.whole is not None or steps == 0:
        return 0
    m = min(shapes[0][1:])
    if ops.batch_rows is not None and m > ops.batch_rows:
        ones = [(1, rows, cols) for _, rows, cols in shapes]
        return max(_bytes([one], dtype, restarts, steps, ops) for one in ones)
    return _bytes(shapes, dtype, restarts, steps, ops)


def _bytes(
    shapes: Sequence[Shape], dtype: torch.dtype, restarts: Sequence[int], steps: int, ops: MatmulOps
) -> int:
    held = ops.held or dtype
    copies = 1 if held is dtype else 2
    m = min(shapes[0][1:])
    count = sum(shape[0] for shape in shapes)
    squares = _squares(segments(restarts, steps)) * aligned_bytes((count, m, m), held)
    return squares + copies * sum(aligned_bytes(shape, held) for shape in shapes)
