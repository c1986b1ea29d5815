"""How much memory Newton-Schulz takes beside its input, counted from its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmuon.kernels.backends import ops_of
from dmuon.kernels.iterations import Shape, workspace_bytes
from dmuon.types import KernelChoice

__all__ = ["call_bytes"]


def call_bytes(
    shapes: Sequence[Shape], choice: KernelChoice, steps: int, device: torch.device | str
) -> int:
    """Bytes of workspace of one call on batches of these shapes that run together."""
    dtype: torch.dtype = getattr(torch, choice.dtype)
    restarts = choice.restarts if choice.method == "gram" else tuple(range(1, steps))
    ops = ops_of(choice, device, min(shapes[0][1:]))
    return workspace_bytes(shapes, dtype, restarts, steps, ops)
