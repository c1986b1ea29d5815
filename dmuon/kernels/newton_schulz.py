"""Newton-Schulz orthogonalization: `U S V^T -> about U V^T` by matrix products alone.

One step applies an odd quintic to every singular value: `X <- aX + (bA + cA^2)X` with `A = X X^T`
(https://kellerjordan.github.io/posts/muon/). The Gram form evaluates the same polynomial in m x m
space (https://github.com/Dao-AILab/gram-newton-schulz). Everything here is local to one device.

    newton_schulz = normalize -> iterate -> group_program (see iterations.py)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from dmuon.kernels.backends import ops_of
from dmuon.kernels.choice import METHODS, choose_method, default_restarts, fixed_choice
from dmuon.kernels.coefficients import COEFFICIENT_SETS, resolve_coefficients
from dmuon.kernels.iterations import Program, group_program
from dmuon.kernels.ops import native_ns_dtype
from dmuon.kernels.workspace import Workspace
from dmuon.types import KernelChoice, Triple

__all__ = [
    "COEFFICIENT_SETS",
    "KERNEL_VERSION",
    "METHODS",
    "choose_method",
    "default_restarts",
    "iterate",
    "iterate_all",
    "newton_schulz",
    "no_autocast",
    "normalize",
    "program_of",
    "resolve_coefficients",
    "resolve_ns_dtype",
]

KERNEL_VERSION = 5
"""To be raised whenever Newton-Schulz becomes faster or slower: measured costs are kept by it."""
_SAFE_NORMS = 1e-10, 1e15  # of float32 matrices whose entries can be squared as they are
_AS_IT_IS = nullcontext()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def resolve_ns_dtype(dtype: str | torch.dtype, device: torch.device | str) -> torch.dtype:
    """The dtype that the iteration runs in: "auto" is `native_ns_dtype(device)`.

    Raises ValueError unless it is "auto" or float16, bfloat16, float32 or float64, as a dtype or
    as text ("bfloat16" or "torch.bfloat16").
    """
    if dtype == "auto":
        return native_ns_dtype(device)
    if dtype in _DTYPES:
        return dtype
    if isinstance(dtype, (str, torch.dtype)):
        by_name = {str(known).removeprefix("torch."): known for known in _DTYPES}
        found = by_name.get(str(dtype).removeprefix("torch."))
        if found is not None:
            return found
    raise ValueError(
        f'the Newton-Schulz dtype (ns_dtype) must be "auto" or one of {_names(_DTYPES)}, found '
        f"{dtype!r}"
    )


@torch.no_grad()
def normalize(
    x: Tensor, dtype: torch.dtype, eps: float = 1e-7, *, out: Tensor | None = None
) -> Tensor:
    """`x / max(||x||_F, eps)` for every matrix of `[..., m, n]`, cast to `dtype` at the very end.

    Computed in float32 or wider, on entries scaled by a power of two, so that squares neither
    overflow nor vanish, and row by row: one float32 sum over a large matrix is off by 0.5%.
    A matrix with an inf or a nan becomes nan throughout, a zero matrix stays zero. The result is
    written to ``out`` if there is one, of x's shape and of `dtype`.
    """
    if x.numel() == 0:
        return x.to(dtype) if out is None else out
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    y = x.to(wide)
    peak = torch.maximum(y.amax((-2, -1), keepdim=True), -y.amin((-2, -1), keepdim=True))
    peak.masked_fill_(peak == 0, 1.0)
    tiny = torch.finfo(wide).tiny  # like its reciprocal, a power of two and a normal number
    scale = (torch.frexp(peak).mantissa / peak).clamp_(tiny, 1 / tiny)  # nan where peak is inf
    y = y * scale
    y.div_(torch.maximum(_norms(y), scale.mul_(eps)))
    return y.to(dtype) if out is None else out.copy_(y)


def _norms(y: Tensor) -> Tensor:
    rows = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def _normalized(x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """`normalize`, in half as many passes where the host can look whether that is safe.

    The same numbers, bit for bit: scaling by a power of two changes no mantissa.
    """
    may_look = x.is_cpu and not torch.compiler.is_compiling()  # a graph cannot look at values
    if not may_look or x.dtype is not torch.float32 or dtype.itemsize > 4 or not x.numel():
        return normalize(x, dtype, eps)
    norm = _norms(x)
    # Here no square overflows, and what vanishes is too small to matter; a nan is in no range.
    if not all(_SAFE_NORMS[0] <= value <= _SAFE_NORMS[1] for value in norm.view(-1).tolist()):
        return normalize(x, dtype, eps)
    return x.div(norm.clamp_(min=eps)).to(dtype)


@torch.no_grad()
def program_of(
    xs: Sequence[Tensor],
    coefficients: Sequence[Triple],
    choice: KernelChoice,
    workspace: Workspace,
) -> Program:
    """Newton-Schulz on batches that run together: ``[b_i, rows_i, cols_i]`` of one short side.

    When it runs they are normalized, of dtype ``choice.dtype``; they are overwritten. Each is
    contiguous, or the transposed view of what is. Results have their shapes and lie in them or in
    the workspace, valid until it is used again. It is to run where gradients are not recorded and
    outside of autocast.

    Raises ValueError where the choice cannot run on this device, or for other strides.
    """
    if not coefficients or not any(x.numel() for x in xs):
        return Program([], list(xs))
    flip = [is_transposed(x) for x in xs]
    stored = [x.mT if flipped else x for x, flipped in zip(xs, flip, strict=True)]
    if not all(x.is_contiguous() for x in stored):
        raise ValueError(
            "Newton-Schulz runs on contiguous batches [b, rows, cols] or on transposed views of "
            f"them, found strides {[x.stride() for x in xs]}: call .contiguous() first"
        )
    count = len(coefficients)
    restarts = choice.restarts if choice.method == "gram" else tuple(range(1, count))
    ops = ops_of(choice, xs[0].device, min(xs[0].shape[-2:]))
    program = group_program(stored, coefficients, restarts, ops, workspace)
    results = zip(program.results, flip, strict=True)
    return Program(program.steps, [r.mT if flipped else r for r, flipped in results])


def is_transposed(x: Tensor) -> bool:
    """Whether matrices ``[..., m, n]`` are stored by columns: the transposed view is contiguous."""
    return not x.is_contiguous() and x.mT.is_contiguous()


@torch.no_grad()
def iterate_all(
    xs: Sequence[Tensor],
    coefficients: Sequence[Triple],
    choice: KernelChoice,
    workspace: Workspace,
) -> list[Tensor]:
    """The results of `program_of`, which raises the same errors."""
    with no_autocast(xs[0].device):
        return program_of(xs, coefficients, choice, workspace).run()


@torch.no_grad()
def iterate(
    x: Tensor,
    coefficients: Sequence[Triple],
    *,
    method: str = "auto",
    backend: str = "auto",
    overwrite: bool = False,
) -> Tensor:
    """Newton-Schulz on matrices that are normalized already, in the dtype they have.

    `x` is `[..., m, n]` with singular values in [0, 1]; with ``overwrite`` its memory is used, and
    the result may be `x`. The result has its shape. For ``method`` and ``backend`` see
    `newton_schulz`, which raises the same errors.
    """
    return _iterate(x, coefficients, method, backend, overwrite)


def _iterate(
    x: Tensor, coefficients: Sequence[Triple], method: str, backend: str, overwrite: bool
) -> Tensor:
    rows, cols = x.shape[-2:]
    count = len(coefficients)
    choice, is_plain = _chosen(rows, cols, x.dtype, x.device, count, str(method), str(backend))
    if x.numel() == 0 or not coefficients:
        return x
    if is_plain and x.is_contiguous():
        with no_autocast(x.device):
            return _plain_standard(x, coefficients, overwrite)
    if is_transposed(x):
        batch = x.mT.reshape(-1, cols, rows).mT
    else:
        batch = x.contiguous().view(-1, rows, cols)
    if not overwrite and batch.data_ptr() == x.data_ptr():
        batch = batch.clone(memory_format=torch.preserve_format)
    (found,) = iterate_all([batch], coefficients, choice, Workspace(x.device))
    return found.unflatten(0, x.shape[:-2]) if x.ndim != 2 else found[0]


@lru_cache(maxsize=256)
def _chosen(
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    method: str,
    backend: str,
) -> tuple[KernelChoice, bool]:
    """The fixed choice, and whether each of its products is one call of torch in standard form."""
    choice = fixed_choice(rows, cols, dtype, device, steps, method, backend)
    m = min(rows, cols)
    return choice, choice.method == "standard" and ops_of(choice, device, m).is_plain(m)


def _plain_standard(x: Tensor, coefficients: Sequence[Triple], overwrite: bool) -> Tensor:
    """What `program_of` runs in the standard form where every product is one call of torch, bit for
    bit. A small matrix that comes once would pay more for the preparation than for the products.
    """
    y = x if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])
    y = y[0] if y.ndim == 3 and len(y) == 1 else y
    is_tall = y.shape[-2] > y.shape[-1]
    m = min(y.shape[-2:])
    product, add = (torch.mm, torch.addmm) if y.ndim == 2 else (torch.bmm, torch.baddbmm)
    # Four buffers for all steps: new ones each time cost more than a small product.
    gram, p = y.new_empty(*y.shape[:-2], m, m), y.new_empty(*y.shape[:-2], m, m)
    there, spare = torch.empty_like(y), y if overwrite else torch.empty_like(y)
    for a, b, c in coefficients:
        left, right = (y.mT, y) if is_tall else (y, y.mT)
        product(left, right, out=gram)
        add(gram, gram, gram, beta=b, alpha=c, out=p)
        left, right = (y, p) if is_tall else (p, y)
        add(y, left, right, beta=a, out=there)
        y, there, spare = there, spare, there
    return y.view(x.shape)


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "polar_express",
    method: str = "auto",
    dtype: str | torch.dtype = "auto",
    eps: float = 1e-7,
    backend: str = "auto",
) -> Tensor:
    """Orthogonalize every matrix of `x`, `[..., m, n]`; the same shape, in the Newton-Schulz dtype.

    Each matrix is divided by `max(||x||_F, eps)`, as torch.optim.Muon does: one whose norm is below
    `eps` comes out smaller than orthogonal. A zero matrix gives zeros, a matrix with an inf or a
    nan gives nan, and neither affects the others. `x` is not changed and no gradient is recorded.
    A matrix with m > n is multiplied from the right, contiguous as it is.

    steps: iterations, always as many as asked for; 0 returns the normalized matrix.
    coefficients: a name of `COEFFICIENT_SETS`, one `(a, b, c)`, or one triple a step.
    method: "standard", "gram", a Gram form with its restarts such as "gram[2]", or "auto", see
        `choose_method`.
    dtype: what to iterate in, "auto", a torch dtype or its name, see `resolve_ns_dtype`.
    backend: who multiplies, one of `dmuon.kernels.backends.BACKENDS`, or "auto".

    Raises TypeError for what is not a dense real floating-point tensor, ValueError for the rest,
    also where a backend cannot run on this device or a dtype diverges with these restarts.
    """
    _check_input(x)
    if not (isinstance(eps, Real) and 0 < eps < math.inf):
        raise ValueError(f"eps must be a finite number > 0, found {eps!r}; torch uses 1e-7")
    triples = resolve_coefficients(coefficients, steps)
    ns_dtype = resolve_ns_dtype(dtype, x.device)
    # What is made of a tensor without gradients has none: that costs less than to leave grad mode.
    x = x.detach() if x.requires_grad else x
    normalized = _normalized(x, ns_dtype, eps)
    return _iterate(normalized, triples, method, backend, overwrite=True)


def _check_input(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"newton_schulz expects a torch.Tensor, found {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(
            f"newton_schulz expects a dense tensor, found {x.layout}; call x.to_dense()"
        )
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"newton_schulz expects a real floating-point tensor ({_names(_DTYPES)}), "
            f"found {x.dtype}; convert it first, for example with x.float()"
        )
    if x.ndim < 2:
        raise ValueError(
            f"newton_schulz expects matrices [..., m, n], found shape {tuple(x.shape)}; "
            "leave vectors to AdamW, or reshape them"
        )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """An enclosing autocast region would change the dtype of the products."""
    kind = device.type
    # Entering a region costs as much as ten small products, so only where there is one to leave.
    is_known = kind == "cpu" or torch.amp.is_autocast_available(kind)
    if is_known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _AS_IT_IS
