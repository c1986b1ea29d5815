"""Muon's update rule: all that a param group does to its matrices apart from Newton-Schulz.

::

    gradient -- operand: momentum, Nesterov --> Newton-Schulz -- accept: variants --> apply: decay,
                (momentum itself advances once the step is taken)     at the owner    step, masters

A `Rule` knows nothing of ranks, buckets or layouts. It takes and returns lists of tensors, or
stacks of matrices ``[b, m, n]``. Engines, `verify_every` and the planner's timer call it;
`dmuon.reference.ReferenceMuon` has formulas of its own, because it is the oracle.

The formulas are those of `torch.optim.Muon` (``ema``) and `torch.optim.SGD` (``sgd``).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmuon import devices
from dmuon.devices import host_can_read
from dmuon.tensors import (
    TensorList,
    Tensors,
    into_range,
    norms_of,
    scale_all,
    scale_into,
    scaled,
    wide_norms,
)
from dmuon.types import Algorithm, runs_of, warn

# Up to this size two passes over a list of tensors cost less than one launch per tensor.
_FUSED_NUMEL = 1 << 20
CACHED = 1 << 17  # elements that stay in a CPU's caches over a few passes
_LARGEST = 1 << 25  # elements that an accelerator copies at once
_FEW = 1 << 12  # elements that are not worth a call of their own
_JOINED = 1 << 14  # fewer elements are cheaper on a CPU when joined with others in one tensor

MOMENTUM, MASTER = "momentum_buffer", "master_weight"


# ---- hyperparameters ---------------------------------------------------------------------


def adjusted_lr(lr: float, adjust_lr_fn: str | float | None, rows: int, cols: int) -> float:
    """Return the learning rate of a ``rows x cols`` matrix, as `torch.optim.Muon` adjusts it.

    None and "original": ``lr * sqrt(max(1, rows / cols))``
    (https://kellerjordan.github.io/posts/muon/). "spectral_unclamped": ``lr * sqrt(rows / cols)``
    (https://jeremybernste.in/writing/deriving-muon). A number: ``lr * number * sqrt(max(rows,
    cols))``, so that an update's entries have a root mean square of ``lr * number``: entries of an
    orthogonal matrix have ``1 / sqrt(max(rows, cols))``. "match_rms_adamw": the number 0.2, about
    the value of AdamW's updates (arXiv 2502.16982).

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
class Hyper:
    """A param group's hyperparameters at one moment, because a scheduler may change the group
    before a computed update is applied. ``decay`` is the factor that weight decay puts on a weight,
    ``1 - lr * weight_decay``."""

    lr: float
    decay: float
    adjust_lr_fn: str | float | None
    momentum: float = 0.0
    nesterov: bool = False
    mode: str = "ema"
    dampening: float = 0.0
    eps: float = 1e-7
    cautious: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        lr = float(group["lr"])
        decay = 1 - lr * group["weight_decay"]
        names = ["adjust_lr_fn", "momentum", "nesterov", "momentum_mode", "dampening", "eps"]
        names.append("cautious_weight_decay")
        if not group.keys() >= {*names}:  # AdamW's group, which may hold some of Muon's unused
            return cls(lr, decay, None)
        return cls(lr, decay, *map(group.__getitem__, names))

    def adjusted(self, rows: int, cols: int) -> float:
        """Return the learning rate of a ``rows x cols`` matrix."""
        return adjusted_lr(self.lr, self.adjust_lr_fn, rows, cols)

    def ratio(self, rows: int, cols: int) -> float:
        """Return the adjusted learning rate divided by the plain one."""
        return self.adjusted(rows, cols) / self.lr if self.lr else 0.0

    def momentum_settings(self) -> dict[str, Any]:
        """Return the arguments of `list_kernels`; ``weight`` is the factor on a gradient."""
        is_ema = self.mode == "ema"
        weight = 1 - (self.momentum if is_ema else self.dampening)
        numbers = {"momentum": float(self.momentum), "weight": float(weight)}
        return numbers | {"EMA": is_ema, "NESTEROV": self.nesterov}


def momentum_dtypes(
    asked: str | None, weight: torch.dtype, master_weights: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which momentum is kept, and the dtype in which it is advanced."""
    plain = torch.float32 if master_weights else weight
    kept = plain if asked is None else getattr(torch, str(asked).removeprefix("torch."))
    return kept, torch.promote_types(kept, plain)


def element_bytes(
    group: Mapping[str, Any], weight: torch.dtype, master_weights: bool, algorithm: Algorithm
) -> int:
    """Return the bytes of state per element of a weight: master, momentum or AdamW's moments."""
    master = 4 if master_weights and weight.itemsize < 4 else 0
    if algorithm is Algorithm.ADAMW:
        return master + 2 * (master or weight.itemsize)
    return master + momentum_dtypes(group.get("momentum_dtype"), weight, master_weights)[0].itemsize


# ---- the rule ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State that a rule keeps of each matrix besides momentum, with the matrix's owner: its
    ``name`` in the optimizer's state, and one number ``per`` "row", "element" or "matrix"."""

    name: str
    per: str = "row"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                "StateSpec: name must be a string and dtype a torch dtype, found "
                f"{self.name!r} and {self.dtype!r}"
            )
        if self.per not in ("row", "element", "matrix"):
            raise ValueError(
                f"StateSpec {self.name!r}: per must be 'row', 'element' or 'matrix', found "
                f"{self.per!r}"
            )
        if self.name in (MOMENTUM, MASTER, "step", "exp_avg", "exp_avg_sq"):
            raise ValueError(f"StateSpec: {self.name!r} is taken; give the state another name")

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of this state for a ``rows x cols`` matrix."""
        return {"row": (rows,), "element": (rows, cols), "matrix": ()}[self.per]


class Rule:
    """Muon's update. A subclass is a variant, passed as ``dmuon.Muon(variant=MyRule())``.

    A variant lists its state per matrix, kept by the owner, in ``state``, and overrides `accept`,
    which sees whole matrices in every layout. Its attributes are its settings: they must be equal
    on all ranks and appear in its `repr`. Other methods must not be overridden, because layouts see
    different parts of momentum and fused kernels have formulas of their own; `rule_of` refuses it.
    """

    state: tuple[StateSpec, ...] = ()

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    @property
    def is_plain(self) -> bool:
        """Return whether orthogonalized matrices are applied as they are."""
        return type(self).accept is Rule.accept

    def accept(self, update: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the update that is applied in place of orthogonalized momentum.

        ``update`` is a stack ``[b, m, n]`` of matrices (outputs, inputs) in the Newton-Schulz
        dtype, which may be changed in place. ``state`` maps names to stacks ("row": ``[b, m]``),
        to be advanced in place. A zero matrix must stay zero: it was skipped, and its state is
        restored.
        """
        return update

    def accepted(self, update: Tensor, state: Mapping[str, Tensor]) -> None:
        """Run `accept` in place and restore the state of matrices whose update is zero."""
        is_alive = torch.linalg.vector_norm(update, dim=(1, 2), dtype=_wide(update)) > 0
        before = {name: kept.clone() for name, kept in state.items()}
        made = self.accept(update, state)
        if made is not update:
            if not isinstance(made, Tensor) or made.shape != update.shape:
                found = list(made.shape) if isinstance(made, Tensor) else made
                raise ValueError(
                    f"variant {self}: accept must return a tensor of the update's shape "
                    f"{list(update.shape)}, found {found}"
                )
            update.copy_(made)
        for name, kept in before.items():
            alive = is_alive.view(-1, *(1,) * (kept.ndim - 1))
            torch.where(alive, state[name], kept, out=state[name])

    def rehearse(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> None:
        """Run `accepted` on a random and a zero matrix of this shape, with fresh state, so that all
        ranks find a user's errors before a step. ValueError: it fails, returns values that are not
        finite, or nonzero values for the zero matrix."""
        rule, generator = copy.deepcopy(self), devices.of(device).generator(0)
        update = torch.zeros(2, rows, cols, dtype=dtype, device=device)
        update[0].normal_(generator=generator)
        state = {
            spec.name: torch.zeros(2, *spec.shape(rows, cols), dtype=spec.dtype, device=device)
            for spec in self.state
        }
        try:
            rule.accepted(update, state)
        except Exception as error:
            raise ValueError(
                f"variant {self} fails on a stack {list(update.shape)} of {dtype}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for required, flaw in (
            ("a finite update", not update.isfinite().all()),
            ("finite state", not all(s.isfinite().all() for s in state.values())),
            ("zeros for a matrix of zeros", update[1].any()),
        ):
            if flaw:
                raise ValueError(
                    f"variant {self} must give {required}, and does not on a random matrix"
                )

    def bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of ``state`` for a ``rows x cols`` matrix, which its owner stores."""
        return sum(s.dtype.itemsize * math.prod(s.shape(rows, cols)) for s in self.state)

    # ---- momentum ------------------------------------------------------------------------

    def advance(self, buffers: TensorList, grads: TensorList, h: Hyper) -> None:
        """Advance momentum, in place on every buffer.

        ``buffer = mu * buffer + weight * grad``; weight: 1 - mu ("ema") or 1 - dampening ("sgd").
        """
        if h.mode == "ema":
            torch._foreach_lerp_(buffers, grads, 1 - h.momentum)
            return
        scale_all(buffers, h.momentum)
        torch._foreach_add_(buffers, grads, alpha=1 - h.dampening)

    def operands(self, out: TensorList, buffers: TensorList, grads: TensorList, h: Hyper) -> None:
        """Write the operands of Newton-Schulz to ``out``, computed in its dtype; buffers stay the
        same. Nesterov: ``(1 - mu) * grad + mu * advanced`` ("ema"), ``grad + mu * advanced``.
        """
        if any(grad.dtype is not to.dtype for to, grad in zip(out, grads, strict=True)):
            grads = [grad.to(to.dtype) for to, grad in zip(out, grads, strict=True)]
        torch._foreach_copy_(out, buffers)
        self.advance(out, grads, h)
        if h.nesterov and h.mode == "ema":
            torch._foreach_lerp_(out, grads, _lerp_weight(h.momentum, out[0]))
        elif h.nesterov:
            torch._foreach_copy_(out, torch._foreach_add(grads, out, alpha=h.momentum))

    def operand(
        self,
        buffer: Tensor,
        grad: Tensor,
        h: Hyper,
        *,
        out: Tensor,
        working: torch.dtype | None = None,
        stays: Tensor | None = None,
    ) -> Tensor:
        """Run `advance` and `operands` on a stack, and write the `scaled` operands to ``out`` in
        its dtype. Return the norms ``[b]`` before scaling.

        ``working`` is the second of `momentum_dtypes` (None: the buffer's). Where ``stays`` holds,
        a bool per matrix or one for all, momentum does not change and the operand is zero.
        """
        working = working or buffer.dtype
        if not host_can_read(buffer.device) and len(buffer):
            to, buffers, grads = (list(stack.unbind()) for stack in (out, buffer, grad))
            norms = self.operand_norms(buffers, grads, h, working)[0]
            scales = into_range(norms, h.eps)
            scales = scales if working is torch.float64 else scales.float()
            self.advance_into(to, buffers, grads, h, working, scales=scales, stays=stays)
            return norms
        assert stays is None or not len(buffer), "the host knows the verdict and skips such steps"
        wide = buffer.to(working)
        operand = momentum_update(wide, grad.to(wide.dtype), h)
        if wide is not buffer:
            buffer.copy_(wide)
        norms = norms_of(operand)
        scaled(operand, out.dtype, h.eps, out=out, norms=norms)
        return norms.view(-1)

    # Where the host cannot read, operands are computed twice, which is cheaper than storing them:
    # first for their norms, then, with the norms known, together with momentum into the buckets.

    def operand_norms(
        self, buffers: TensorList, grads: TensorList, h: Hyper, working: torch.dtype
    ) -> Tensor:
        """Return norms of operands and of gradients, ``[2, n]`` float64, not finite where a tensor
        is not. Nothing is changed. ``working``: see `operand`."""
        found: dict[int, Tensor] = {}
        for kernels, some, (held, own) in _routes(buffers, grads, working=working):
            if kernels is None:
                each = self._norms_of_some(held, own, h, working)
            else:
                norms = kernels.norms(held, own, working, **h.momentum_settings())
                if len(some) == len(buffers):
                    return norms
                each = norms.unbind(1)
            found |= zip(some, each, strict=True)
        return torch.stack([found[n] for n in range(len(buffers))], 1)

    def _norms_of_some(
        self, buffers: TensorList, grads: TensorList, h: Hyper, working: torch.dtype
    ) -> list[Tensor]:
        made = [_empty(b, working) for b in buffers]
        self.operands(made, buffers, grads, h)
        norms = torch.stack([*wide_norms(made), *wide_norms(grads)])
        return [*norms.view(2, -1).unbind(1)]

    def advance_into(
        self, out: TensorList | None, buffers: TensorList, grads: TensorList, h: Hyper,
        working: torch.dtype, *, scales: Tensor | None = None, stays: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Run `advance`, and write operands times ``scales`` ``[n]`` to ``out``; see `operand`."""
        lists = [buffers, grads] if out is None else [buffers, grads, out]
        for kernels, some, (held, own, *to) in _routes(*lists, working=working):
            mask, factors = (_values_at(values, some, len(buffers)) for values in (stays, scales))
            to_list = to[0] if to else None
            if kernels is None:
                self._advance_some(to_list, held, own, h, working, mask, factors)
                continue
            how = h.momentum_settings()
            kernels.advance(to_list, held, own, working, scales=factors, stays=mask, **how)

    def _advance_some(
        self, out: TensorList | None, buffers: TensorList, grads: TensorList, h: Hyper,
        working: torch.dtype, stays: Tensor | None, scales: Tensor | None,
    ) -> None:  # fmt: skip
        """Do the work of `advance_into` with torch's operations, on two copies of everything."""
        grads = [grad.to(working) for grad in grads]
        made = [_empty(b, working) for b in buffers]
        torch._foreach_copy_(made, buffers)
        self.advance(made, grads, h)
        flags: Sequence[Tensor] = ()
        if stays is not None:
            flags = stays.unbind() if stays.ndim else [stays] * len(buffers)
        if out is not None and scales is not None:
            for n, (to, operand) in enumerate(zip(out, _ahead(made, grads, h), strict=True)):
                scale_into(to.unsqueeze(0), operand.unsqueeze(0), scales[n : n + 1])
                if flags:
                    to.masked_fill_(flags[n], 0.0)
        if not flags:
            torch._foreach_copy_(buffers, made)
        for stay, buffer, advanced in zip(flags, buffers, made, strict=False):
            torch.where(stay, buffer, advanced.to(buffer.dtype), out=buffer)

    # ---- weights -------------------------------------------------------------------------

    def apply(
        self,
        targets: TensorList,
        updates: TensorList,
        h: Hyper,
        *,
        lr: float,
        stays: Tensor | None = None,
        weights: TensorList | None = None,
    ) -> None:
        """Compute ``target = target * h.decay - lr * update`` for each pair, in place.

        Where ``stays`` holds, a bool per pair or one for all, targets do not change; their updates
        are zero. If ``targets`` are masters, ``weights`` are their parameters:
        masters first follow them (see `follow_weights`), then are rounded into them.

        With `cautious`, an element decays only if its update has its sign, so that both shrink it
        (arXiv 2510.12402: where ``update * target >= 0``).
        """
        lists = [targets, updates] if weights is None else [targets, updates, weights]
        for kernels, some, (own, change, *of) in _routes(*lists):
            mask = _values_at(stays, some, len(targets))
            if kernels is None:
                kept = h.decay if mask is None else torch.where(mask, 1.0, h.decay)
                self._apply_some(own, change, h, lr, kept, of[0] if of else None)
                continue
            kernels.update(
                own, change, of[0] if of else None,
                decay=h.decay, lr=lr, stays=mask, cautious=h.cautious,
            )  # fmt: skip

    def _apply_some(
        self,
        targets: TensorList,
        updates: TensorList,
        h: Hyper,
        lr: float,
        kept: float | Tensor,
        weights: TensorList | None,
    ) -> None:
        """Do the work of `apply` with torch's operations."""
        # On a CPU each chunk stays in the caches during all passes.
        some = max(1, CACHED // max(1, targets[0].numel())) if targets[0].is_cpu else len(targets)
        for first in range(0, len(targets), some):
            now = slice(first, first + some)
            own = kept[now] if isinstance(kept, Tensor) and kept.ndim else kept
            if weights is not None:
                follow_weights(targets[now], weights[now])
            if h.cautious:
                _decay_cautiously(targets[now], updates[now], own)
            else:
                scale_all(targets[now], own)
            torch._foreach_add_(targets[now], updates[now], alpha=-lr)
            if weights is not None:
                torch._foreach_copy_(weights[now], targets[now])


# ---- lists on an accelerator ---------------------------------------------------------------


@cache
def list_kernels(device: torch.device) -> Any:
    """Return the one-pass kernels of `triton_lists`, or None; a GPU that could run them but lacks
    a requirement gives one warning."""
    if not devices.of(device).has_triton:
        return None
    from dmuon.kernels.choice import why_not

    reason = why_not("triton", device, torch.float32)
    if reason is None:
        from dmuon.kernels import triton_lists

        return triton_lists
    warn(f"dmuon: elementwise work takes about three times as long on {device}, because {reason}")
    return None


def _routes(
    *lists: TensorList, working: torch.dtype | None = None
) -> Iterator[tuple[Any, Sequence[int], list[Any]]]:
    """Yield (`list_kernels`, positions, the tensors there) for contiguous tensors of at most 32
    bits on one device, and None in place of kernels for the rest, which torch's operations handle,
    with ``working`` in pieces of about `Device.chunk_bytes` in that dtype."""
    if not lists[0]:
        return
    device = lists[0][0].device
    kernels = list_kernels(device)
    if kernels is not None:
        looked = [*map(Tensors.of, lists)]
        if all(one.are_flat for one in looked):
            yield kernels, range(len(lists[0])), looked
            return
    found: tuple[list[int], list[int]] = [], []
    for n, tensors in enumerate(zip(*lists, strict=True)):
        suits = kernels and all(t.is_contiguous() and t.dtype.itemsize <= 4 for t in tensors)
        found[bool(suits)].append(n)
    plain: Iterable[list[int]] = found[:1]
    if working is not None:
        sizes = [t.numel() * working.itemsize for t in lists[0]]
        plain = runs_of(found[0], sizes.__getitem__, devices.of(device).chunk_bytes)
    for kind, some in *((None, piece) for piece in plain), (kernels, found[1]):
        if some:
            is_all = len(some) == len(lists[0])
            yield kind, some, [t if is_all else [t[n] for n in some] for t in lists]


def copier(targets: list[Tensor], sources: list[Tensor]) -> Callable[[], None]:
    """Return a function that copies sources into targets of their shape; it sorts pairs once."""
    device = targets[0].device if targets else torch.device("meta")
    kernels, found = list_kernels(device), {"flat": (targets, sources)}
    if kernels is not None or device.type == "cpu":
        found = _by_kind(targets, sources, _FEW if kernels is None else 0)
    flat, launches = found.pop("flat", None), []
    if kernels is not None:
        launches = [kernels.copier(*some, turned=k == "turned") for k, some in found.items()]
        found = {}

    def run() -> None:
        if flat is not None:
            torch._foreach_copy_(*flat)
        for launch in launches:
            launch()
        for lists in found.values():
            # On a CPU torch transposes by tiles, three times as fast, if both are contiguous.
            for to, source in zip(*lists, strict=True):
                source = source.mT.contiguous().mT  # only one such copy exists at a time
                to.copy_(source if to.is_contiguous() else source.contiguous())

    return run


def _by_kind(
    targets: list[Tensor], sources: list[Tensor], least: int
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Sort pairs of matrices into "rows", where both are contiguous along rows, "turned", where the
    source is contiguous along columns, and "flat", for torch. With ``least``, the elements that are
    worth a call, all pairs but turned ones are flat."""
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    left = [*zip(targets, sources, strict=True)][::-1]
    while left:
        to, source = left.pop()
        kind = "flat"
        rows = to.dtype is source.dtype and to.ndim == 2 and to.dtype.itemsize in (2, 4)
        if to.is_contiguous() and source.is_contiguous():
            to, source = to.view(-1), source.view(-1)
        elif to.ndim > 2 and to[0].numel() >= least:
            left += [*zip(to.unbind(), source.unbind(), strict=True)][::-1]
            continue
        elif least and (to.numel() < least or to.stride(-1) == source.stride(-1)):
            pass
        elif rows and to.stride(1) == source.stride(1) == 1:
            kind = "rows"
        elif rows and to.stride(1) == source.stride(0) == 1:
            kind = "turned"
        elif rows and to.stride(0) == source.stride(1) == 1:
            kind, to, source = "turned", to.mT, source.mT
        found[kind][0].append(to)
        found[kind][1].append(source)
    return found


def _values_at(values: Tensor | None, some: Sequence[int], count: int) -> Tensor | None:
    """Return the values at these positions; a single value for all is returned unchanged."""
    if values is None or not values.ndim or len(some) == count:
        return values
    return torch.stack([values[n] for n in some])


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _lerp_weight(momentum: float, buffer: Tensor) -> float:
    """Return 1 - momentum as `lerp` computes it: then ``buffer.lerp(grad, ...)``, possible in
    place, has the bits of ``grad.lerp(buffer, momentum)`` in `torch.optim.Muon` (above 0.5)."""
    return 1 - (momentum if buffer.dtype is torch.float64 else c_float(momentum).value)


def momentum_update(buffer: Tensor, grad: Tensor, h: Hyper) -> Tensor:
    """Advance one tensor and return its operand, which may be ``buffer``: do not write to it."""
    Rule().advance([buffer], [grad], h)
    return _ahead([buffer], [grad], h)[0] if h.nesterov else buffer


def _ahead(advanced: TensorList, grads: TensorList, h: Hyper) -> Sequence[Tensor]:
    """Return the operands of momentum that has advanced, without changing it."""
    if not h.nesterov:
        return [buffer.clone() for buffer in advanced]
    if h.mode == "ema":
        return torch._foreach_lerp(advanced, grads, _lerp_weight(h.momentum, advanced[0]))
    return torch._foreach_add(grads, advanced, alpha=h.momentum)


def operand_peaks(grads: list[Tensor], buffers: list[Tensor], hypers: Sequence[Hyper]) -> Tensor:
    """Return a bound on the elements of each `momentum_update`, ``[n]`` float64; inf if they may
    overflow."""
    peaks = torch.stack(torch._foreach_norm(grads, math.inf)).double()
    bounds = []
    for peak, before, buffer, h in zip(
        peaks.unbind(), torch._foreach_norm(buffers, math.inf), buffers, hypers, strict=True
    ):
        bound = peak
        if h.mode == "sgd":
            bound = before.double() * h.momentum + peak * abs(1 - h.dampening)
            bound = torch.maximum(bound, peak + h.momentum * bound) if h.nesterov else bound
        bounds.append(torch.where(bound > torch.finfo(buffer.dtype).max, math.inf, bound))
    return torch.stack(bounds)


def _decay_cautiously(targets: TensorList, updates: TensorList, kept: float | Tensor) -> None:
    """Decay the elements whose update has the same sign or is zero."""
    decays = torch._foreach_mul(targets, [u.to(t.dtype) for t, u in zip(targets, updates)])
    torch._foreach_sign_(decays)  # the product may underflow a comparison with zero
    torch._foreach_add_(decays, 1.0)
    torch._foreach_clamp_max_(decays, 1.0)
    torch._foreach_mul_(decays, targets)
    scale_all(list(decays), 1.0 - kept)
    torch._foreach_sub_(targets, decays)


def update_norms(updates: Tensor) -> Tensor:
    """Return the norm of each matrix of ``[b, m, n]`` as ``[b]`` float32."""
    if updates.is_cpu:
        # Row by row, because half precision would be copied to float32. Three digits are enough.
        updates = torch.linalg.vector_norm(updates, dim=-1)
    return torch.linalg.vector_norm(updates.flatten(1), dim=1, dtype=_wide(updates)).float()


# ---- variants ----------------------------------------------------------------------------


class NorMuon(Rule):
    """NorMuon (arXiv 2510.05491): scale rows to equal size by a second moment per row and keep the
    norm of each matrix. ``beta2`` is the moment's decay."""

    state = (StateSpec("row_moment"),)
    _EPS = 1e-8

    def __init__(self, beta2: float = 0.95) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"NorMuon: beta2 must be >= 0 and < 1, found {beta2}")
        self.beta2 = beta2

    def accept(self, update: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        moment = state["row_moment"]
        squares = torch.linalg.vector_norm(update, dim=2, dtype=_wide(update)).square_()
        moment.lerp_((squares / update.shape[2]).to(moment.dtype), 1 - self.beta2)
        factors = (moment.to(squares.dtype).sqrt() + self._EPS).reciprocal_()
        changed = (squares * factors.square()).sum(1)
        ratio = (squares.sum(1) / changed.clamp_min_(torch.finfo(squares.dtype).tiny)).sqrt_()
        return torch.mul(update, (factors * ratio.unsqueeze(1)).unsqueeze(2), out=update)


VARIANTS: Mapping[str, type[Rule]] = {"normuon": NorMuon}


def rule_of(group: Mapping[str, Any], place: str = "") -> Rule:
    """Return the rule of a param group. TypeError or ValueError, which name its ``place``: the
    ``variant`` is invalid."""
    variant = group.get("variant")
    if isinstance(variant, Rule):
        for name, own in vars(Rule).items():
            if name == "state" or name.startswith("__"):
                continue
            is_changed = name != "accept" and getattr_static(type(variant), name) is not own
            if is_changed or name in vars(variant):  # `is_plain` looks at the class
                raise TypeError(
                    f"variant {variant}{place} overrides {name!r}, which not every layout and "
                    "device would use: a subclass of dmuon.Rule may override the method 'accept' "
                    "and the tuple 'state' alone; attributes of your own need other names"
                )
        state = variant.state
        if not isinstance(state, tuple) or not all(isinstance(s, StateSpec) for s in state):
            raise TypeError(
                f"variant {variant}{place}: state must be a tuple of dmuon.StateSpec, such as "
                f'(dmuon.StateSpec("size"),), found {state!r}'
            )
        if len({spec.name for spec in state}) < len(state):
            raise ValueError(f"variant {variant}{place}: two of its states have one name: {state}")
        return variant
    if variant is None:
        return Rule()
    known = f"None, one of {', '.join(map(repr, VARIANTS))}, or an instance of a dmuon.Rule"
    if not isinstance(variant, str):
        hint = ": call it" if isinstance(variant, type) else ""
        raise TypeError(f"variant must be {known}, found {variant!r}{place}{hint}")
    if variant not in VARIANTS:
        raise ValueError(f"variant must be {known}, found {variant!r}{place}")
    return VARIANTS[variant]()


# ---- masters -----------------------------------------------------------------------------

# A weight equals its rounded master unless somebody wrote to it. Versions do not tell: `.data`,
# numpy and `DTensor` write without raising them. So contents are compared.


def merged_master(master: Tensor, weight: Tensor) -> Tensor:
    """Merge a float32 master with a weight that may have been written to: elements that still
    round to the weight keep their extra bits, others take the weight."""
    return torch.where(master.to(weight.dtype) == weight, master, weight)


def rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Return whether the weight still equals its rounded master. Waits for the device."""
    return bool((master.to(weight.dtype) == weight).all())


def follow_weights(masters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Run `merged_master` in place, except on masters of their weight's dtype, which are none.
    Where the host can read, weights that nobody wrote to cost one comparison."""
    if not masters:
        return
    on_host = host_can_read(masters[0].device)
    most = _JOINED if on_host else _FUSED_NUMEL
    small: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for master, weight in zip(masters, weights, strict=True):
        if master.dtype is weight.dtype or not master.numel():
            continue
        if master.numel() < most:
            small[weight.dtype].append((master, weight))
            continue
        rows = max(1, (CACHED if on_host else _LARGEST) * len(master) // master.numel())
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
    """Return whether any weight may have been written to."""
    rounded = master.to(weight.dtype)
    bits = torch.int16 if weight.itemsize == 2 else torch.int8
    # numpy compares bits here, six times as fast as torch compares values.
    if on_host and np.array_equal(rounded.view(bits).numpy(), weight.view(bits).numpy()):
        return False
    torch.where(rounded == weight, master, weight, out=master)
    return True
