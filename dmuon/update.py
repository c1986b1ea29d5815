"""Muon's tensor maths around Newton-Schulz: momentum, learning-rate adjustment, decay, update.

The formulas are those of `torch.optim.Muon` (``ema``) and of `torch.optim.SGD` (``sgd``); all work
on one matrix ``[m, n]`` as well as on a stack ``[b, m, n]``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmuon.kernels.newton_schulz import norms_of, scaled

# Below this one launch a tensor costs more than two passes over a list of tensors.
_FUSED_NUMEL = 1 << 20
_CACHED = 1 << 17  # elements that a few passes over stay in the caches of a CPU
_LARGEST = 1 << 25  # elements of which an accelerator makes a copy
_JOINED = 1 << 14  # fewer cost a CPU less copied into one tensor than looked at alone

# ---- momentum ----------------------------------------------------------------------------


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
        return buffer.lerp(grad, _rest(momentum, buffer)) if nesterov else buffer
    assert mode == "sgd", mode
    buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
    return grad.add(buffer, alpha=momentum) if nesterov else buffer


def _rest(momentum: float, buffer: Tensor) -> float:
    """1 - momentum as `lerp` has it: with it ``buffer.lerp(grad, ...)``, which can be in place, has
    the bits of ``grad.lerp(buffer, momentum)``, the form of `torch.optim.Muon` (above 0.5)."""
    return 1 - (momentum if buffer.dtype is torch.float64 else c_float(momentum).value)


def scaled_momentum(
    buffer: Tensor, grad: Tensor, group: Mapping[str, Any], *, out: Tensor, fused: bool = False
) -> Tensor:
    """`momentum_update`, `scaled` for Newton-Schulz, into ``out`` in its dtype. Returns the norms
    ``[b]`` of what was scaled; where ``fused``, those of momentum.

    ``fused``: in two Triton kernels instead of one pass per operation, which compute in float32 (so
    not where momentum is kept in float64), where all are contiguous.
    """
    settings = {name: group[name] for name in ("momentum", "nesterov", "dampening")}
    mode, eps = group["momentum_mode"], group["eps"]
    if fused and all(t.dtype.itemsize <= 4 and t.is_contiguous() for t in (buffer, grad, out)):
        from dmuon.kernels.triton_elementwise import momentum_norm_cast

        momentum_norm_cast(buffer, grad, mode=mode, eps=eps, out=out, **settings)
        return norms_of(buffer).view(-1)
    operand = momentum_update(buffer, grad.to(buffer.dtype), mode=mode, **settings)
    norms = norms_of(operand)
    scaled(operand, out.dtype, eps, out=out, norms=norms)
    return norms.view(-1)


def advance_momentum(buffers: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]) -> None:
    """The momentum half of `momentum_update`, in place on every buffer."""
    if group["momentum_mode"] == "ema":
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return
    scale_all(buffers, group["momentum"])
    torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])


def operands_of_newton_schulz(
    out: list[Tensor], buffers: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]
) -> None:
    """What `momentum_update` returns, bit for bit, into ``out``; buffers stay as they are."""
    grads = [grad.to(to.dtype) for to, grad in zip(out, grads, strict=True)]
    torch._foreach_copy_(out, buffers)
    advance_momentum(out, grads, group)
    if not group["nesterov"]:
        return
    if group["momentum_mode"] == "ema":
        torch._foreach_lerp_(out, grads, _rest(group["momentum"], out[0]))
        return
    torch._foreach_copy_(out, torch._foreach_add(grads, out, alpha=group["momentum"]))


def operand_peaks(
    grads: list[Tensor], buffers: list[Tensor], groups: Sequence[Mapping[str, Any]]
) -> Tensor:
    """Bounds of the elements of what `momentum_update` makes of each pair, ``[n]`` float64; inf
    where it may overflow in its buffer's dtype."""
    peaks = torch.stack(torch._foreach_norm(grads, math.inf)).double()
    bounds = []
    for peak, before, buffer, group in zip(
        peaks.unbind(), torch._foreach_norm(buffers, math.inf), buffers, groups, strict=True
    ):
        bound = peak
        if group["momentum_mode"] == "sgd":
            mu = group["momentum"]
            bound = before.double() * mu + peak * abs(1 - group["dampening"])
            bound = torch.maximum(bound, peak + mu * bound) if group["nesterov"] else bound
        bounds.append(torch.where(bound > torch.finfo(buffer.dtype).max, math.inf, bound))
    return torch.stack(bounds)


# ---- step sizes --------------------------------------------------------------------------


def adjusted_lr(lr: float, adjust_lr_fn: str | float | None, rows: int, cols: int) -> float:
    """The learning rate of a ``rows x cols`` matrix, as `torch.optim.Muon` adjusts it.

    None and "original": ``lr * sqrt(max(1, rows / cols))``
    (https://kellerjordan.github.io/posts/muon/). "spectral_unclamped": ``lr * sqrt(rows / cols)``
    (https://jeremybernste.in/writing/deriving-muon). A number: ``lr * number * sqrt(max(rows,
    cols))``, with which the entries of an update have the root mean square ``lr * number``, for
    those of an orthogonal matrix have ``1 / sqrt(max(rows, cols))``. "match_rms_adamw": the number
    0.2, as of AdamW's updates (arXiv 2502.16982).

    >>> adjusted_lr(1.0, "original", 8, 2), adjusted_lr(1.0, "match_rms_adamw", 25, 100)
    (2.0, 2.0)
    >>> adjusted_lr(1.0, "spectral_unclamped", 2, 8), adjusted_lr(1.0, 0.4, 25, 100)
    (0.5, 4.0)
    """
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / cols))
    if adjust_lr_fn == "spectral_unclamped":
        return lr * math.sqrt(rows / cols)
    rms = 0.2 if adjust_lr_fn == "match_rms_adamw" else adjust_lr_fn
    assert not isinstance(rms, str), rms
    return lr * (rms * math.sqrt(max(rows, cols)))


@dataclass(frozen=True, slots=True)
class Rates:
    """The step sizes of a param group at one moment: a scheduler may change the group before an
    update that has been computed is applied."""

    lr: float
    decay: float
    adjust_lr_fn: str | float | None

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rates:
        """``decay``, ``1 - lr * weight_decay``, is what weight decay leaves of a weight."""
        lr = float(group["lr"])
        return cls(lr, 1 - lr * group["weight_decay"], group.get("adjust_lr_fn"))

    def adjusted(self, rows: int, cols: int) -> float:
        """The learning rate of a ``rows x cols`` matrix."""
        return adjusted_lr(self.lr, self.adjust_lr_fn, rows, cols)

    def ratio(self, rows: int, cols: int) -> float:
        """The adjusted over the plain learning rate."""
        return self.adjusted(rows, cols) / self.lr if self.lr else 0.0


# ---- many tensors at once ----------------------------------------------------------------


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


# ---- norms ---------------------------------------------------------------------------------

_PIECE = 4096  # elements whose squares a float32 sum takes; their norms are joined in float64


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
        rest = stack[:, even:]
        parts.append(torch.linalg.vector_norm(rest, dim=1, keepdim=True, dtype=torch.float32))
    joint = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    torch.linalg.vector_norm(joint, dim=1, dtype=torch.float64, out=out)


def wide_norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor in float64, so no square overflows or vanishes.

    On CUDA a list is converted as it is read, one tensor would be copied to float64 before.
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


def finite_marks(tensors: Sequence[Tensor], on_host: bool) -> Tensor:
    """A number for each tensor, none of which is empty, that is finite where all elements are.

    ``on_host``: the host reads without waiting.
    """
    if on_host:
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
        marks = finite_marks([tensor for _, tensor in some], device.type == "cpu").tolist()
        found += [name for (name, _), mark in zip(some, marks) if not math.isfinite(mark)]
    return found


# ---- updates -------------------------------------------------------------------------------


def is_fused(kernel: str, tensor: Tensor) -> bool:
    """Whether a plan's kernel, as text, has its elementwise work on this tensor in Triton too."""
    return "/triton" in kernel and tensor.device.type == "cuda"


def apply_updates(
    targets: list[Tensor],
    updates: list[Tensor],
    *,
    decay: float | Tensor,
    lr: float,
    fused: bool = False,
    weights: list[Tensor] | None = None,
    on_host: bool = False,
) -> None:
    """``target = target * decay - lr * update`` for each pair, in place (see `scale_all`).

    ``weights`` are those of which ``targets`` are the masters: these follow them first (see
    `follow_weights`), and are rounded into them afterwards.
    ``fused``: in one Triton kernel a target where all of them are large and contiguous, which reads
    and writes weights once instead of twice.
    """
    if weights is None and fused and all(map(_suits, targets, updates)):
        from dmuon.kernels.triton_elementwise import apply_update

        # A fill, which does not wait for the device.
        if not isinstance(decay, Tensor):
            decay = torch.full((), decay, dtype=torch.float32, device=targets[0].device)
        each = decay.unbind() if decay.ndim else [decay] * len(targets)
        for target, update, kept in zip(targets, updates, each, strict=True):
            apply_update(target, update, decay=kept, lr=lr)
        return
    # On a CPU all passes over so much while it lies in its caches.
    some = max(1, _CACHED // max(1, targets[0].numel())) if targets[0].is_cpu else len(targets)
    for first in range(0, len(targets), some):
        now = slice(first, first + some)
        if weights is not None:
            follow_weights(targets[now], weights[now], on_host=on_host)
        scale_all(targets[now], decay[now] if isinstance(decay, Tensor) and decay.ndim else decay)
        torch._foreach_add_(targets[now], updates[now], alpha=-lr)
        if weights is not None:
            torch._foreach_copy_(weights[now], targets[now])


def _suits(target: Tensor, update: Tensor) -> bool:
    is_large = target.numel() >= _FUSED_NUMEL and target.dtype.itemsize <= 4
    return is_large and target.is_contiguous() and update.is_contiguous()


# ---- masters -------------------------------------------------------------------------------

# A weight is what its master rounds to, unless somebody wrote to it. No version of a tensor tells:
# `.data`, numpy and `DTensor` write without raising it. So contents are compared.


def merged_master(master: Tensor, weight: Tensor) -> Tensor:
    """A float32 master of a weight that somebody may have written to.

    Elements that still round to the weight keep their extra bits; the others take the weight, a
    nan too.
    """
    return torch.where(master.to(weight.dtype) == weight, master, weight)


def rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Whether nobody has written to the weight. Waits for the device."""
    return bool((master.to(weight.dtype) == weight).all())


def follow_weights(masters: Sequence[Tensor], weights: Sequence[Tensor], *, on_host: bool) -> None:
    """`merged_master` in place; what has the dtype of its weight is none and stays.

    ``on_host``: the host reads without waiting, so what nobody wrote to costs a look.
    """
    most = _JOINED if on_host else _FUSED_NUMEL
    small: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for master, weight in zip(masters, weights, strict=True):
        if master.dtype is weight.dtype or not master.numel():
            continue
        if master.numel() < most:
            small[weight.dtype].append((master, weight))
            continue
        rows = max(1, (_CACHED if on_host else _LARGEST) * len(master) // master.numel())
        for pair in zip(master.split(rows), weight.split(rows), strict=True):
            _follow(*pair, on_host)
    for pairs in small.values():
        sides = zip(*pairs, strict=True)
        own, given = ([t if t.ndim == 1 else t.reshape(-1) for t in side] for side in sides)
        joint = torch.cat(own)
        if _follow(joint, torch.cat(given), on_host):
            parts = joint.split([t.numel() for t in own])
            views = [part.view(m.shape) for part, (m, _) in zip(parts, pairs, strict=True)]
            torch._foreach_copy_([m for m, _ in pairs], views)


def _follow(master: Tensor, weight: Tensor, on_host: bool) -> bool:
    """Whether anything may have been written to."""
    rounded = master.to(weight.dtype)
    # Equal bits, compared by numpy: six times as fast there as comparing values.
    if on_host and np.array_equal(_bits(rounded), _bits(weight)):
        return False
    torch.where(rounded == weight, master, weight, out=master)
    return True


def _bits(tensor: Tensor) -> Any:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int8).numpy()


def update_rms(updates: Tensor, scale: float | Tensor) -> Tensor:
    """Root mean square of ``scale * update`` of each matrix of ``[b, m, n]``: ``[b]`` float32.

    With "match_rms_adamw" and ``scale`` the adjusted over the plain learning rate this is about
    0.2, the RMS of an AdamW update.
    """
    rows, cols = updates.shape[-2:]
    wide = updates.dtype if updates.dtype.itemsize >= 4 else torch.float32
    norms = torch.linalg.vector_norm(updates.flatten(1), dim=1, dtype=wide)
    return norms.mul_(scale / math.sqrt(rows * cols)).float()
