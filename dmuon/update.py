"""Muon's tensor maths around Newton-Schulz: momentum, learning-rate adjustment, decay, update.

The formulas are those of `torch.optim.Muon` (``ema``) and of `torch.optim.SGD` (``sgd``); all work
on one matrix ``[m, n]`` as well as on a stack ``[b, m, n]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Rates",
    "adjusted_lr",
    "advance_momentum",
    "apply_updates",
    "merged_master",
    "momentum_update",
    "nesterov_operands",
    "scale_all",
    "scale_into",
    "update_rms",
]


def momentum_update(
    buffer: Tensor, grad: Tensor, *, momentum: float, nesterov: bool, mode: str, dampening: float
) -> Tensor:
    """Advance ``buffer`` in place by ``grad`` and return what Newton-Schulz gets.

    ``ema``: ``buffer = mu * buffer + (1 - mu) * grad``, Nesterov ``(1 - mu) * grad + mu * buffer``.
    ``sgd``: ``buffer = mu * buffer + (1 - dampening) * grad``, Nesterov ``grad + mu * buffer``.
    The result may be ``buffer`` itself; do not write to it.
    """
    if mode == "ema":
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if nesterov else buffer
    assert mode == "sgd", mode
    buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
    return grad.add(buffer, alpha=momentum) if nesterov else buffer


def advance_momentum(
    buffers: list[Tensor],
    grads: list[Tensor],
    group: Mapping[str, Any],
    ok: Sequence[Tensor] | None = None,
) -> None:
    """The momentum half of `momentum_update`, in place on every buffer.

    ``ok``: 0-d bools on the device, one a buffer; where it is false the buffer stays as it is.
    """
    if ok is not None:
        before = [buffer.clone() for buffer in buffers]
    if group["momentum_mode"] == "ema":
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    else:
        scale_all(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
    if ok is not None:
        for buffer, old, keep in zip(buffers, before, ok, strict=True):
            torch.where(keep, buffer, old, out=buffer)


def nesterov_operands(
    out: list[Tensor], buffers: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]
) -> None:
    """What Newton-Schulz gets, as `momentum_update` returns it, into ``out``; buffers stay."""
    torch._foreach_copy_(out, buffers)
    advance_momentum(out, grads, group)
    if not group["nesterov"]:
        return
    if group["momentum_mode"] == "ema":
        torch._foreach_lerp_(out, grads, 1 - group["momentum"])
    else:
        scale_all(out, group["momentum"])
        torch._foreach_add_(out, grads)


def adjusted_lr(lr: float, adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """The learning rate of a ``rows x cols`` matrix, as `torch.optim.Muon` adjusts it.

    None and "original": ``lr * sqrt(max(1, rows / cols))``
    (https://kellerjordan.github.io/posts/muon/). "match_rms_adamw":
    ``lr * 0.2 * sqrt(max(rows, cols))`` (arXiv 2502.16982).

    >>> adjusted_lr(1.0, "original", 8, 2), adjusted_lr(1.0, "match_rms_adamw", 25, 100)
    (2.0, 2.0)
    """
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / cols))
    assert adjust_lr_fn == "match_rms_adamw", adjust_lr_fn
    return lr * (0.2 * math.sqrt(max(rows, cols)))


def apply_updates(
    targets: list[Tensor], updates: list[Tensor], *, decay: float | Tensor, lr: float
) -> None:
    """``target = target * decay - lr * update`` for each pair, in place."""
    scale_all(targets, decay)
    torch._foreach_add_(targets, updates, alpha=-lr)


def scale_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply each tensor by a number (or a 0-d tensor), in place."""
    if not tensors:
        return
    if tensors[0].device.type == "cpu" and any(t.dtype.itemsize < 4 for t in tensors):
        # There the list form rounds the factor to the tensors' dtype first: in bfloat16 a decay of
        # 0.998 would be 1.
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def scale_into(out: list[Tensor], tensors: list[Tensor], scales: Sequence[float | Tensor]) -> None:
    """``out[i] = tensors[i] * scales[i]``, computed in float32 or wider and rounded once."""
    for target, tensor, scale in zip(out, tensors, scales, strict=True):
        wide = tensor if tensor.dtype.itemsize >= 4 else tensor.float()
        if target.device == wide.device:
            torch.mul(wide, scale, out=target)
        else:  # with CPU offload
            factor = scale.to(wide.device) if isinstance(scale, Tensor) else scale
            target.copy_(wide.mul(factor), non_blocking=True)


def merged_master(master: Tensor, weight: Tensor) -> Tensor:
    """A float32 master after weights may have been loaded over what it rounds to.

    Elements that still round to the weight keep their extra bits; the others take the weight.
    """
    return torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))


def update_rms(updates: Tensor, scale: float) -> Tensor:
    """Root mean square of ``scale * update`` of each matrix of ``[b, m, n]``: ``[b]`` float32.

    With "match_rms_adamw" and ``scale`` the adjusted over the plain learning rate this is about
    0.2, the RMS of an AdamW update.
    """
    rows, cols = updates.shape[-2:]
    wide = torch.promote_types(updates.dtype, torch.float32)
    norms = torch.linalg.vector_norm(updates, dim=(-2, -1), dtype=wide)
    return norms.mul_(scale / math.sqrt(rows * cols)).float()


@dataclass(frozen=True, slots=True)
class Rates:
    """The step sizes of a param group at one moment: a scheduler may change the group before an
    update that has been computed is applied."""

    lr: float
    decay: float
    adjust_lr_fn: str | None

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rates:
        """``decay``, ``1 - lr * weight_decay``, is what weight decay leaves of a weight."""
        lr = float(group["lr"])
        return cls(lr, 1 - lr * group["weight_decay"], group.get("adjust_lr_fn"))

    def adjusted(self, rows: int, cols: int) -> float:
        """The learning rate of a ``rows x cols`` matrix."""
        return adjusted_lr(self.lr, self.adjust_lr_fn, rows, cols)
