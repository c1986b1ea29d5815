"""Newton-Schulz orthogonalization: `U S V^T -> about U V^T` by matrix products alone.

One step applies an odd quintic to every singular value: `X <- aX + (bA + cA^2)X` with `A = X X^T`
(https://kellerjordan.github.io/posts/muon/). The Gram form evaluates the same polynomial in m x m
space (https://github.com/Dao-AILab/gram-newton-schulz). Everything here is local to one device.

    newton_schulz = normalize -> iterate -> (standard_iteration | gram_iteration)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from numbers import Real
from types import MappingProxyType

import torch
from torch import Tensor

from dmuon.kernels.ops import TORCH_OPS, MatmulOps, native_ns_dtype, ops_for
from dmuon.types import Triple

__all__ = [
    "COEFFICIENT_SETS",
    "KERNEL_VERSION",
    "METHODS",
    "choose_method",
    "default_restarts",
    "gram_iteration",
    "iterate",
    "newton_schulz",
    "normalize",
    "resolve_coefficients",
    "resolve_ns_dtype",
    "standard_iteration",
]

METHODS = ("auto", "standard", "gram")
KERNEL_VERSION = 1
"""To be raised whenever Newton-Schulz becomes faster or slower: measured costs are kept by it."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Published for the interval [1e-3, 1] with cushion 0.02.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def _with_safety(triples: tuple[Triple, ...], safety: float) -> tuple[Triple, ...]:
    """p(x) -> p(x / safety), so that rounding cannot push a singular value out of the interval.

    Not for the last triple: repeated, it has to converge to 1, and p(x / safety) does not.
    """
    scaled = tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in triples[:-1])
    return (*scaled, triples[-1])


COEFFICIENT_SETS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        # https://arxiv.org/abs/2505.16932 (Polar Express), safety factor 1.05.
        "polar_express": _with_safety(_POLAR_EXPRESS, 1.05),
        # https://kellerjordan.github.io/posts/muon/ and the default of torch.optim.Muon.
        "quintic": ((3.4445, -4.7750, 2.0315),),
        # https://x.com/YouJiacheng/status/1905861218138804534, tuned for five steps; used in
        # https://github.com/KellerJordan/modded-nanogpt.
        "you_jiacheng": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # https://arxiv.org/abs/2510.16981 (MuonBP), Algorithm 2. Slow, but converges to U V^T.
        "simple": ((2.0, -1.5, 0.5),),
    }
)
"""One triple a step; fewer steps than triples take the first ones, more repeat the last."""


def resolve_coefficients(
    coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int
) -> tuple[Triple, ...]:
    """Exactly `steps` triples `(a, b, c)`.

    A name takes a set of `COEFFICIENT_SETS`, cut to `steps` or continued with its last triple. One
    `(a, b, c)` is used in every step. A list of triples must have length `steps`.

    Raises ValueError for an unknown name, a malformed triple, a list of another length, or `steps`
    that is not an integer >= 0.

    >>> resolve_coefficients((3, -3, 1), steps=2)
    ((3.0, -3.0, 1.0), (3.0, -3.0, 1.0))
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer >= 0, found {steps!r}; Muon uses steps=5")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            known = ", ".join(repr(name) for name in COEFFICIENT_SETS)
            raise ValueError(
                f"unknown coefficient set {coefficients!r}; use one of {known}, one (a, b, c), "
                "or one triple a step"
            )
        triples = COEFFICIENT_SETS[coefficients]
        return (triples + triples[-1:] * (steps - len(triples)))[:steps]
    items = tuple(coefficients) if isinstance(coefficients, Iterable) else (coefficients,)
    if items and all(isinstance(item, Real) for item in items):
        return (_triple(items),) * steps
    if len(items) != steps:
        raise ValueError(
            f"{len(items)} coefficient triples for steps={steps}; give one triple a step, "
            f"or set steps={len(items)}"
        )
    return tuple(_triple(item) for item in items)


def _triple(values: object) -> Triple:
    items = tuple(values) if isinstance(values, Iterable) else (values,)
    if len(items) != 3 or not all(isinstance(v, Real) and math.isfinite(v) for v in items):
        raise ValueError(
            f"a coefficient triple is three finite numbers (a, b, c), found {values!r}; "
            "an example is (3.4445, -4.775, 2.0315)"
        )
    a, b, c = items
    return float(a), float(b), float(c)


def resolve_ns_dtype(dtype: str | torch.dtype, device: torch.device | str) -> torch.dtype:
    """The dtype that the iteration runs in: "auto" is `native_ns_dtype(device)`.

    Raises ValueError unless it is "auto" or float16, bfloat16, float32 or float64.
    """
    if dtype == "auto":
        return native_ns_dtype(device)
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES:
        return dtype
    raise ValueError(
        f'the Newton-Schulz dtype must be "auto" or one of {_names(_DTYPES)}, found {dtype!r}'
    )


def default_restarts(dtype: torch.dtype, steps: int) -> tuple[int, ...]:
    """The steps after which the Gram form goes back to X.

    Rounding leaves R slightly indefinite, and each further step multiplies a negative eigenvalue
    by about a^2. So bfloat16 carries R over two steps at most (1 first, where a is largest), the
    other dtypes over three (2 first): (1, 3) and (2,) for five steps.
    """
    first, stride = (1, 2) if dtype == torch.bfloat16 else (2, 3)
    return tuple(range(first, steps, stride))


def choose_method(m: int, n: int, dtype: torch.dtype, steps: int) -> str:
    """The form that "auto" runs an m x n matrix in: a pure function, so that all ranks agree.

    Counts multiplications without symmetric kernels, `4n + 2m` a standard step and `4n + (8s - 6)m`
    a Gram segment of s steps (in m^2), and asks for a margin of 5%: equal counts measure 1 to 3%
    slower. Small matrices pay by the operation, of which the Gram form has more.
    """
    m, n = min(m, n), max(m, n)
    if m < (256 if dtype.itemsize <= 2 else 128):
        return "standard"
    edges = (0, *default_restarts(dtype, steps), steps)
    lengths = [high - low for low, high in pairwise(edges)]
    gram = sum(4 * n + (8 * s - 6) * m for s in lengths)
    return "gram" if 20 * gram <= 19 * steps * (4 * n + 2 * m) else "standard"


def standard_iteration(x: Tensor, coefficients: Sequence[Triple], ops: MatmulOps) -> Tensor:
    """One X <- aX + (bA + cA^2)X a triple; `x` is `[m, n]` or `[b, m, n]`, normalized, m <= n."""
    for a, b, c in coefficients:
        gram = ops.symmetric(x, x.mT)
        x = ops.addmm(x, ops.symmetric_addmm(gram, gram, gram, b, c), x, a, 1.0)
    return x


def gram_iteration(
    x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int], ops: MatmulOps = TORCH_OPS
) -> Tensor:
    """`standard_iteration` in m x m space: X is touched at the start, the restarts and the end.

    `restarts` are step counts k with 0 < k < len(coefficients), increasing; X is formed anew after
    step k. A restart after every step is the standard iteration. In half precision a run of more
    than three steps (bfloat16: two) diverges, see `default_restarts`; this function does not check.

    Raises ValueError for other restarts.
    """
    edges = (0, *restarts, len(coefficients))
    pairs = list(pairwise(edges))
    if coefficients and any(low >= high for low, high in pairs):
        raise ValueError(
            f"restarts must increase and lie between 1 and {len(coefficients) - 1} "
            f"(steps - 1), found {tuple(restarts)}"
        )
    for low, high in pairs:
        x = _gram_segment(x, coefficients[low:high], ops)
    return x


def _gram_segment(x: Tensor, coefficients: Sequence[Triple], ops: MatmulOps) -> Tensor:
    """P_s ... P_1 X with P = aI + Z, Z = bR + cR^2, R_1 = X X^T and R_(i+1) = P_i R_i P_i.

    All of them are polynomials in X X^T, so they are symmetric and commute. P is never formed (but
    for the first factor of Q): in half precision adding a to Z's diagonal doubles the error.
    """
    if len(coefficients) < 2:
        return standard_iteration(x, coefficients, ops)
    a, b, c = coefficients[0]
    r = ops.symmetric(x, x.mT)
    z = ops.symmetric_addmm(r, r, r, b, c)
    q = z.clone()
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, b, c in coefficients[1:]:
        rp = ops.symmetric_addmm(r, r, z, a, 1.0)
        r = ops.symmetric_addmm(rp, rp, z, a, 1.0)
        z = ops.symmetric_addmm(r, r, r, b, c)
        a = next_a
        q = ops.symmetric_addmm(q, q, z, a, 1.0)
    return ops.matmul(q, x)


@torch.no_grad()
def normalize(x: Tensor, dtype: torch.dtype, eps: float = 1e-7) -> Tensor:
    """`x / max(||x||_F, eps)` for every matrix of `[..., m, n]`, cast to `dtype` at the very end.

    Computed in float32 or wider on entries divided by the largest one, so that squares neither
    overflow nor vanish, and row by row: one float32 sum over a large matrix is off by 0.5%.
    A matrix with an inf or a nan becomes nan throughout, a zero matrix stays zero.
    """
    if x.numel() == 0:
        return x.to(dtype)
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    y = x.to(wide)
    peak = torch.maximum(y.amax((-2, -1), keepdim=True), -y.amin((-2, -1), keepdim=True))
    peak = peak.masked_fill(peak == 0, 1.0)
    y = y / peak
    rows = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    return y.div_(torch.maximum(norm, eps / peak)).to(dtype)


@torch.no_grad()
def iterate(
    x: Tensor,
    coefficients: Sequence[Triple],
    *,
    method: str = "auto",
    ops: MatmulOps | None = None,
) -> Tensor:
    """Newton-Schulz on matrices that are normalized already, in the dtype they have.

    `x` is `[..., m, n]` with singular values in [0, 1]. The result has its shape; for
    m > n it is a transposed view. Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, found {method!r}")
    if x.numel() == 0:
        return x
    if x.shape[-2] > x.shape[-1]:
        return iterate(x.mT, coefficients, method=method, ops=ops).mT
    m, n = x.shape[-2:]
    steps = len(coefficients)
    backend = ops or ops_for(x.device)
    if method == "auto":
        method = choose_method(m, n, x.dtype, steps)

    def run(matrices: Tensor) -> Tensor:
        if method == "standard":
            return standard_iteration(matrices, coefficients, backend)
        return gram_iteration(matrices, coefficients, default_restarts(x.dtype, steps), backend)

    batch = x.contiguous().view(-1, m, n)
    with _no_autocast(x.device):
        if len(batch) == 1:  # a batch of one costs up to twice the plain 2-D products on a CPU
            return run(batch[0]).view(x.shape)
        if backend.batch_rows is not None and m > backend.batch_rows:
            return torch.stack([run(matrix) for matrix in batch]).view(x.shape)
        return run(batch).view(x.shape)


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "polar_express",
    method: str = "auto",
    dtype: str | torch.dtype = "auto",
    eps: float = 1e-7,
) -> Tensor:
    """Orthogonalize every matrix of `x`, `[..., m, n]`; the same shape, in the Newton-Schulz dtype.

    Each matrix is divided by `max(||x||_F, eps)`, as torch.optim.Muon does: one whose norm is below
    `eps` comes out smaller than orthogonal. A zero matrix gives zeros, a matrix with an inf or a
    nan gives nan, and neither affects the others. `x` is not changed and no gradient is recorded.
    For m > n the work is done on the transpose, and the result is a transposed view.

    steps: iterations, always as many as asked for; 0 returns the normalized matrix.
    coefficients: a name of `COEFFICIENT_SETS`, one `(a, b, c)`, or one triple a step.
    method: "standard", "gram", or "auto", see `choose_method`.
    dtype: what to iterate in, "auto" or a torch dtype, see `native_ns_dtype`.

    Raises TypeError for what is not a dense real floating-point tensor, ValueError for the rest.
    """
    _check_input(x)
    if not (isinstance(eps, Real) and 0 < eps < math.inf):
        raise ValueError(f"eps must be a finite number > 0, found {eps!r}; torch uses 1e-7")
    triples = resolve_coefficients(coefficients, steps)
    ns_dtype = resolve_ns_dtype(dtype, x.device)
    tall = x.shape[-2] > x.shape[-1]
    matrices = (x.detach().mT if tall else x.detach()).contiguous()
    result = iterate(normalize(matrices, ns_dtype, eps), triples, method=method)
    return result.mT if tall else result


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


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """An enclosing autocast region would change the dtype of the products."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
