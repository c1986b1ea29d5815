"""The elementwise work around Newton-Schulz, an operation at a time or in Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dmuon.kernels.newton_schulz import normalize
from dmuon.update import apply_updates, momentum_update

__all__ = ["apply_all", "is_fused", "normalized_momentum"]

# Below this one launch a tensor costs more than two passes over a list of tensors.
_FUSED_NUMEL = 1 << 20


def normalized_momentum(
    buffer: Tensor, grad: Tensor, group: Mapping[str, Any], *, out: Tensor, fused: bool = False
) -> None:
    """`momentum_update`, divided by each matrix's norm, into ``out`` in its dtype.

    ``fused``: in two Triton kernels instead of a pass an operation, which compute in float32 (so
    not where momentum is kept in float64), where all are contiguous.
    """
    settings = {name: group[name] for name in ("momentum", "nesterov", "dampening")}
    mode, eps = group["momentum_mode"], group["eps"]
    tensors = (buffer, grad, out)
    if fused and all(t.dtype.itemsize <= 4 and t.is_contiguous() for t in tensors):
        from dmuon.kernels.triton_elementwise import momentum_norm_cast

        momentum_norm_cast(buffer, grad, mode=mode, eps=eps, out=out, **settings)
        return
    operand = momentum_update(buffer, grad.to(buffer.dtype), mode=mode, **settings)
    normalize(operand, out.dtype, eps, out=out)


def is_fused(kernel: str, tensor: Tensor) -> bool:
    """Whether a plan's kernel, as text, has its elementwise work on this tensor in Triton too."""
    return "/triton" in kernel and tensor.device.type == "cuda"


def apply_all(
    targets: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    decay: float | Tensor,
    lr: float,
    fused: bool = False,
) -> None:
    """``target = target * decay - lr * update`` for each pair, in place.

    ``fused``: in one Triton kernel a target where all of them are large and contiguous, which reads
    and writes weights once instead of twice.
    """
    suits = all(
        t.numel() >= _FUSED_NUMEL and t.dtype.itemsize <= 4 and x.is_contiguous()
        for t, u in zip(targets, updates, strict=True)
        for x in (t, u)
    )
    if not fused or not suits or isinstance(decay, Tensor):
        apply_updates(list(targets), list(updates), decay=decay, lr=lr)
        return
    from dmuon.kernels.triton_elementwise import apply_update

    for target, update in zip(targets, updates, strict=True):
        apply_update(target, update, decay=decay, lr=lr)
