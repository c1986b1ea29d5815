"""Operations on lists of tensors (scaling, norms, finiteness), and the normalization of matrices.

Normalization has two halves, because shards of a matrix travel in the Newton-Schulz dtype. The rank
that holds a part multiplies it by a power of two (`into_range`), unless that would change no bit
(`are_raw`), and casts it; the rank that has the whole matrix divides by its norm (`normalize_`). So
the result depends neither on the cut of a matrix nor on the order in which norms were summed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property, partial, reduce
from itertools import chain

import torch
from torch import Tensor

from dmuon.devices import host_can_read
from dmuon.types import grouped

_SAFE_NORMS = 1e-10, 1e15  # float32 matrices with such norms can be squared without scaling
_FEW_ELEMENTS, _MANY_ELEMENTS = 1 << 12, 1 << 17  # below, calls dominate; above, copies miss caches
_PIECE = 4096  # elements per float32 sum of squares; norms of pieces are combined in float64


class Tensors(tuple[Tensor, ...]):
    """Tensors of one device with fixed storage, so that kernels inspect each of them only once."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Tensors:
        return tensors if isinstance(tensors, Tensors) else cls(tensors)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return (*map(Tensor.numel, self),)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple([t.dtype for t in self])

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        return (*map(Tensor.data_ptr, self),)

    @cached_property
    def are_flat(self) -> bool:
        """Whether all are contiguous and at most 32 bits wide."""
        is_narrow = all(dtype.itemsize <= 4 for dtype in {*self.dtypes})
        return is_narrow and all(map(Tensor.is_contiguous, self))

    def part(self, first: int, last: int) -> Tensors:
        """Return a contiguous range of the tensors along with their cached properties."""
        found = Tensors(self[first:last])
        for name in ("numels", "dtypes", "pointers"):
            found.__dict__[name] = getattr(self, name)[first:last]
        if self.are_flat:
            found.__dict__["are_flat"] = True
        return found


TensorList = list[Tensor] | tuple[Tensor, ...]


def scale_all(tensors: TensorList, factor: float | Tensor) -> None:
    """Multiply each tensor in place by a number, a 0-d tensor, or its own element of a 1-D one."""
    if not tensors:
        return
    if isinstance(factor, Tensor):
        torch._foreach_mul_(tensors, list(factor.unbind()) if factor.ndim else factor)
    elif tensors[0].device.type == "cpu":
        # On a CPU the list form with a number is four times as slow, and rounds the number to
        # the tensors' dtype first: in bfloat16 a decay of 0.998 would be 1.
        torch._foreach_mul_(tensors, torch.full((), factor, dtype=torch.float64))
    else:
        torch._foreach_mul_(tensors, factor)


def scale_into(out: Tensor, stack: Tensor, scales: Tensor) -> None:
    """Compute ``out[i] = stack[i] * scales[i]`` in float32 or wider, rounded once. ``scales`` is
    ``[b]``, float32 or wider, on the stack's device. ``stack`` may be overwritten."""
    factors = scales.view(-1, *(1,) * (stack.ndim - 1))
    is_wide = stack.dtype.itemsize >= 4
    if out.device != stack.device:  # CPU offload
        out.copy_(stack * factors, non_blocking=True)
    elif stack.device.type == "cpu" and is_wide and out.dtype is not stack.dtype:
        out.copy_(stack.mul_(factors))  # faster on a CPU than casting while multiplying
    else:
        torch.mul(stack, factors, out=out)


def norms_into(out: Tensor, stack: Tensor, *, exact: bool = False) -> None:
    """Write the norms of the rows of ``[count, numel]``, in float64, to ``out``.

    On a CPU they are accurate to 1e-7 from 1e-15 to 1e15; with ``exact``, from 1e-30 to 1e30.
    """
    numel = stack.shape[1]
    if stack.device.type != "cpu":
        torch.stack(wide_norms(stack.unbind()), out=out)
        return
    if exact or stack.dtype is torch.float64:
        torch.linalg.vector_norm(stack, dim=1, dtype=torch.float64, out=out)
        return
    # On a CPU converting to float64 takes ten times as long as the norm.
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
    """Return the norm of each tensor in float64, so that no square overflows or underflows. The
    list form converts on the fly on an accelerator; a single tensor would be copied first."""
    found: dict[int, Tensor] = {}
    for some in grouped(((t.device, t.dtype), n) for n, t in enumerate(tensors)).values():
        norms = torch._foreach_norm([tensors[n] for n in some], order, dtype=torch.float64)
        found |= zip(some, norms, strict=True)
    return [found[n] for n in range(len(tensors))]


def finite_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return norms of one device's tensors, ``[n]`` float64: finite where all elements are."""
    if host_can_read(tensors[0].device):
        # On a CPU float64 is slow and long float32 sums are inexact: combine norms of parts.
        wide = reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
        norm, most = torch.linalg.vector_norm, _MANY_ELEMENTS
        is_small = tensors[0].numel() <= min(_FEW_ELEMENTS, most // len(tensors))
        if is_small and len({t.shape for t in tensors}) == 1:
            stack = torch.stack([*tensors]).reshape(len(tensors), -1)
            norms = norm(stack, dim=1, dtype=wide).double()
        else:
            parts = [t.reshape(-1).split(most) if t.numel() > most else (t,) for t in tensors]
            norms = torch.stack(torch._foreach_norm([*chain(*parts)], dtype=wide)).double()
            if len(norms) > len(parts):
                norms = torch.stack([*map(norm, norms.split([*map(len, parts)]))])
        if math.isfinite(float(norms.sum())):
            return norms
    return torch.stack(wide_norms(tensors))


def not_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that have a non-finite value. No tensor may be empty."""
    found = []
    for some in grouped((tensor.device, (name, tensor)) for name, tensor in named).values():
        norms = finite_norms([tensor for _, tensor in some]).tolist()
        found += [name for (name, _), norm in zip(some, norms) if not math.isfinite(norm)]
    return found


# ---- normalizing matrices ----------------------------------------------------------------


@torch.no_grad()
def normalize(
    x: Tensor, dtype: torch.dtype, eps: float = 1e-7, *, out: Tensor | None = None
) -> Tensor:
    """Compute `x / max(||x||_F, eps)` for every matrix of `[..., m, n]`, as torch.optim.Muon does:
    `x` is rounded to `dtype`, then divided by its norm.

    Each matrix is first scaled by a power of two so that nothing overflows or underflows. A matrix
    with an inf or a nan becomes nan throughout; a zero matrix stays zero. The result is written to
    ``out``, if given, which has x's shape and `dtype`.
    """
    if out is None and x.numel() and may_look(x, dtype):
        # Half as many passes and the same bits: scaling by a power of two changes no mantissa.
        y = x.to(dtype, copy=dtype.itemsize < 4)
        norms = norms_of(y)
        if are_safe(norms, eps):
            return y.div(norms) if dtype.itemsize >= 4 else divide_(y, norms)
    return normalize_(scaled(x, dtype, eps, out=out))


def scaled(
    x: Tensor,
    dtype: torch.dtype,
    eps: float,
    *,
    out: Tensor | None = None,
    norms: Tensor | None = None,
) -> Tensor:
    """Do the first half of `normalize`; ``norms`` are the results of `norms_of`, where known."""
    if x.numel() == 0:
        return x.to(dtype) if out is None else out
    if may_look(x, dtype):
        norms = norms_of(x) if norms is None else norms
        if are_safe(norms, eps):
            scales = into_range(norms, eps)
            if out is not None and out.dtype is x.dtype:
                return torch.mul(x, scales, out=out)
            y = x * scales
            return y.to(dtype) if out is None else out.copy_(y)
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    y = x.to(wide)
    peak = torch.maximum(y.amax((-2, -1), keepdim=True), -y.amin((-2, -1), keepdim=True))
    peak.masked_fill_(peak == 0, 1.0)
    tiny = torch.finfo(wide).tiny  # like its reciprocal, a power of two and a normal number
    scale = (torch.frexp(peak).mantissa / peak).clamp_(tiny, 1 / tiny)  # nan where peak is inf
    y = y * scale
    y.mul_(into_range(norms_of(y), scale.mul_(eps)))
    return y.to(dtype) if out is None else out.copy_(y)


def into_range(norms: Tensor, eps: float | Tensor) -> Tensor:
    """Return the factor that multiplies each matrix before `normalize_`: the power of two that
    brings its norm into [2, 4), 1 / eps for norms below eps, nan for non-finite norms."""
    return torch.where(norms < eps, 1 / eps, torch.frexp(norms).mantissa.mul_(4).div_(norms))


def are_raw(dtypes: Collection[torch.dtype], device: torch.device) -> bool:
    """Whether matrices of these dtypes need no scaling before they travel to the rank that
    normalizes them: they share one range, and the host can check there whether squares fit."""
    return host_can_read(device) and set(dtypes) <= {torch.float32, torch.bfloat16}


def normalize_(x: Tensor, eps: float | None = None) -> Tensor:
    """Divide every matrix of `[..., m, n]` by its norm or by ``eps``, whichever is larger, in
    place.

    Without ``eps`` the matrices must have been scaled (`into_range`); norms below 1 count as 1.
    """
    norms = norms_of(x)
    if eps is not None and not are_safe(norms, eps, and_zero=True):
        scaled(x, x.dtype, eps, out=x)
        norms, eps = norms_of(x), None
    return divide_(x, norms.clamp(min=1.0 if eps is None else eps))


def divide_(x: Tensor, norms: Tensor) -> Tensor:
    """Divide matrices by their norms in place, in float32 or wider, and round once."""
    if not x.is_cpu or x.dtype.itemsize >= 4:
        return torch.div(x, norms, out=x)
    # On a CPU torch would make two float32 copies. It divides by a 0-d tensor as it reads.
    if x.shape[-2] * x.shape[-1] < _FEW_ELEMENTS or not x.is_contiguous():
        return x.copy_(x.float().div_(norms))
    if x.numel() == x.shape[-2] * x.shape[-1]:
        return x.div_(norms.view(()))
    matrices = x.view(-1, *x.shape[-2:]).unbind()
    torch._foreach_div_(list(matrices), list(norms.reshape(-1).unbind()))
    return x


def may_look(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the host may read norms without waiting, and `x` and `dtype` share one range."""
    return not torch.compiler.is_compiling() and are_raw((x.dtype, dtype), x.device)


def are_safe(norms: Tensor, eps: float, *, and_zero: bool = False) -> bool:
    """Whether no square overflows and no relevant one underflows; False for a nan. ``and_zero``: a
    norm of zero is safe too if ``eps`` would dominate anything that underflowed."""
    least, most = max(eps, _SAFE_NORMS[0]), _SAFE_NORMS[1]
    zero = 0.0 if and_zero and eps > 1e-15 else math.nan
    return all(least <= value <= most or value == zero for value in norms.view(-1).tolist())


def norms_of(y: Tensor) -> Tensor:
    """Return norms `[..., 1, 1]`, by rows first: one long float32 sum would be off by 0.5%."""
    wide = torch.promote_types(y.dtype, torch.float32)
    norm = partial(torch.linalg.vector_norm, dim=-1, keepdim=True, dtype=wide)
    if y.is_cpu and y.dtype is not wide and y.numel() > _MANY_ELEMENTS and y.is_contiguous():
        # On a CPU torch would first convert all of it into newly allocated memory.
        parts = y.view(-1, y.shape[-1]).split(max(1, _MANY_ELEMENTS // y.shape[-1]))
        rows = torch.cat([norm(part) for part in parts]).view(*y.shape[:-1], 1)
    else:
        rows = norm(y)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
