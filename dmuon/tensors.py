"""Lists of tensors, worked on together: scaling, norms, and whether all is finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.devices import host_can_read

_PIECE = 4096  # elements whose squares a float32 sum takes; their norms are joined in float64


def scale_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor in place by a number, a 0-d tensor, or its own element of a 1-D one."""
    if not tensors:
        return
    if isinstance(factor, Tensor):
        torch._foreach_mul_(tensors, list(factor.unbind()) if factor.ndim else factor)
    elif tensors[0].device.type == "cpu":
        # There the list form with a number is four times as slow, and rounds it to the tensors'
        # dtype first: in bfloat16 a decay of 0.998 would be 1.
        torch._foreach_mul_(tensors, torch.full((), factor, dtype=torch.float64))
    else:
        torch._foreach_mul_(tensors, factor)


def scale_into(out: Tensor, stack: Tensor, scales: Tensor) -> None:
    """``out[i] = stack[i] * scales[i]``, computed in float32 or wider and rounded once.

    ``scales`` is ``[b]``, float32 or wider, on the stack's device. ``stack`` may be overwritten.
    """
    factors = scales.view(-1, *(1,) * (stack.ndim - 1))
    is_wide = stack.dtype.itemsize >= 4
    if out.device != stack.device:  # CPU offload
        out.copy_(stack * factors, non_blocking=True)
    elif stack.device.type == "cpu" and is_wide and out.dtype is not stack.dtype:
        out.copy_(stack.mul_(factors))  # faster there than to cast as it multiplies
    else:
        torch.mul(stack, factors, out=out)


def norms_into(out: Tensor, stack: Tensor, *, exact: bool = False) -> None:
    """The norms of the rows of ``[count, numel]`` in float64.

    On a CPU right to 1e-7 where `squares_fit`; ``exact``: right anyway, from 1e-30 to 1e30.
    """
    numel = stack.shape[1]
    if stack.device.type != "cpu":
        torch.stack(wide_norms(stack.unbind()), out=out)
        return
    if exact or stack.dtype is torch.float64:
        torch.linalg.vector_norm(stack, dim=1, dtype=torch.float64, out=out)
        return
    # There the conversion to float64 takes ten times as long as the norm.
    even = numel // _PIECE * _PIECE
    parts = []
    if even:
        pieces = stack[:, :even].unflatten(1, (-1, _PIECE))
        parts.append(torch.linalg.vector_norm(pieces, dim=2, dtype=torch.float32))
    if even < numel:
        tail = stack[:, even:]
        parts.append(torch.linalg.vector_norm(tail, dim=1, keepdim=True, dtype=torch.float32))
    joint = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    torch.linalg.vector_norm(joint, dim=1, dtype=torch.float64, out=out)


def wide_norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor in float64, so that no square overflows or vanishes.

    On an accelerator a list is converted as it is read; one tensor would be copied first.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for n, t in enumerate(tensors):
        alike[t.device, t.dtype].append(n)
    found: dict[int, Tensor] = {}
    for some in alike.values():
        norms = torch._foreach_norm([tensors[n] for n in some], order, dtype=torch.float64)
        found |= zip(some, norms, strict=True)
    return [found[n] for n in range(len(tensors))]


def squares_fit(norms: Tensor) -> Tensor:
    """Which norms are far from the square roots of the least and the largest float32."""
    return (norms > 1e-15) & (norms < 1e15)


def finite_marks(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor of a device that is finite where all of its elements are; none of
    them is empty."""
    if host_can_read(tensors[0].device):
        # Vectorized there, as the largest absolute value is not. It overflows early at most.
        sums = [t.sum(dtype=t.dtype if t.dtype.itemsize > 2 else torch.float32) for t in tensors]
        joint = torch.stack(sums)
        if bool(joint.isfinite().all()):
            return joint
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


def not_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of those tensors, none of which is empty, that have a value that is not finite."""
    found = []
    for device in {tensor.device for _, tensor in named}:
        some = [(name, tensor) for name, tensor in named if tensor.device == device]
        marks = finite_marks([tensor for _, tensor in some]).tolist()
        found += [name for (name, _), mark in zip(some, marks) if not math.isfinite(mark)]
    return found
