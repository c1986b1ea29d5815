"""Newton-Schulz orthogonalization, `U S V^T -> about U V^T`, by matrix products alone.

One step applies an odd quintic to every singular value: `X <- aX + (bA + cA^2)X` with `A = X X^T`
(https://kellerjordan.github.io/posts/muon/). The Gram form evaluates the same polynomial in m x m
space (https://github.com/Dao-AILab/gram-newton-schulz). Everything here is local to one device.

    newton_schulz = normalize -> prepared (memory) -> iterate (mathematics) over MatmulOps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from dmuon import devices
from dmuon.kernels.choice import Segments, fixed_choice, measured_speeds, ops_of, segments_of
from dmuon.kernels.ops import MatmulOps, Take
from dmuon.tensors import normalize
from dmuon.types import BackendName, CoefficientSet, DtypeName, Triple

KERNEL_VERSION = 9
"""Raise this when Newton-Schulz becomes faster or slower: it is in the key of cached costs."""
_AS_IT_IS = nullcontext()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)

# ---- coefficients ----------------------------------------------------------------------------

# Published for the interval [1e-3, 1] with cushion 0.02.
_PUBLISHED: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# p(x) -> p(x / 1.05), so that rounding cannot push a singular value out of the interval; except the
# last triple, which repeats and has to converge to 1.
_SCALED = tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in _PUBLISHED[:-1])

COEFFICIENT_SETS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        # https://arxiv.org/abs/2505.16932 (Polar Express), safety factor 1.05.
        "polar_express": (*_SCALED, _PUBLISHED[-1]),
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
"""One triple per step; fewer steps take the first triples, more steps repeat the last."""


def resolve_coefficients(
    coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int
) -> tuple[Triple, ...]:
    """Return exactly `steps` triples `(a, b, c)` for a name in `COEFFICIENT_SETS`, one triple for
    every step, or one triple per step.

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
                "or one triple per step"
            )
        triples = COEFFICIENT_SETS[coefficients]
        return (triples + triples[-1:] * (steps - len(triples)))[:steps]
    items = tuple(coefficients) if isinstance(coefficients, Iterable) else (coefficients,)
    if items and all(isinstance(item, Real) for item in items):
        return (_triple(items),) * steps
    if len(items) != steps:
        raise ValueError(
            f"{len(items)} coefficient triples for steps={steps}; give one triple per step, "
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


# ---- the iteration ---------------------------------------------------------------------------


def iterate(
    x: Tensor,
    spare: Tensor,
    squares: Sequence[Tensor],
    coefficients: Sequence[Triple],
    segments: Segments,
    ops: MatmulOps,
) -> Tensor:
    """Compute `aX + (bA + cA^2)X`, `A = X X^T`, once per triple; returns `x` or `spare`.

    A *segment* is the steps between two restarts. A segment of one step is a standard step. A
    longer one carries `R = X X^T` and the product Q in m x m space and touches X only at its ends.
    So the standard iteration has a restart after every step.

    A tall matrix is multiplied from the right, `R = X^T X` and `X Q`: the same polynomial, because
    the m x m factors are symmetric. So matrices stay contiguous as they are stored.

    `x` and `spare` are ``[m, n]`` or ``[b, m, n]``. ``squares`` are two tensors m x m for the short
    side m, or four if a segment has several steps. All are overwritten.
    """
    is_tall = x.shape[-2] != squares[0].shape[-1]
    xt, spare_t = x.mT, spare.mT
    for low, high in segments:
        r, p = squares[:2]
        left, right = (xt, x) if is_tall else (x, xt)
        ops.gram(left, right, out=r)  # R = X X^T
        if high - low == 1:
            own, b, c = coefficients[low]
            ops.symmetric(r, r, r, out=p, alpha=c, beta=b)  # P = bR + cR^2
        else:
            own, p = 0.0, _polynomial(squares, coefficients[low:high], ops)
        left, right = (x, p) if is_tall else (p, x)
        ops.general(left, right, x if own else None, out=spare, beta=own)  # X <- P X + aX, or Q X
        x, xt, spare, spare_t = spare, spare_t, x, xt
    return x


def _polynomial(squares: Sequence[Tensor], segment: Sequence[Triple], ops: MatmulOps) -> Tensor:
    """Compute Q = P_s ... P_1 from R_1 = X X^T, which the first square holds.

    P = aI + Z, Z = bR + cR^2, R_(i+1) = P_i R_i P_i: all are polynomials in X X^T, so they are
    symmetric and commute. P is never formed (except as the first factor of Q): in half precision
    adding a to Z's diagonal doubles the error.
    """
    r, z, q, t = squares
    a, b, c = segment[0]
    # Z, and Q = P = Z + aI
    ops.shifted(r, r, r, out=q, plain=z, alpha=c, beta=b, diag=a)
    for next_a, b, c in segment[1:]:
        ops.symmetric(r, z, r, out=t, beta=a)  # R <- (R P) P
        ops.symmetric(t, z, t, out=r, beta=a)
        ops.symmetric(r, r, r, out=z, alpha=c, beta=b)  # Z = bR + cR^2
        a = next_a
        ops.symmetric(q, z, q, out=t, beta=a)  # Q <- Q P
        q, t = t, q
    return q


def prepared(
    x: Tensor,
    coefficients: Sequence[Triple],
    segments: Segments,
    ops: MatmulOps,
    take: Take,
    *,
    one_by_one: bool = False,
) -> Callable[[], Tensor]:
    """Prepare Newton-Schulz on a batch, in memory that ``take(shape, dtype)`` gives once. Run the
    result for each new batch, without recording gradients and outside autocast.

    `x` is ``[b, rows, cols]``, contiguous, normalized when it runs, and overwritten. The result is
    in it or beside it, at the same address in every run. Nothing depends on values, so a run can be
    captured in a graph. ``one_by_one``: matrices use the same aligned memory one after the other,
    because some libraries round depending on batch and address. Raises ValueError unless `x` is
    contiguous.
    """
    if not x.is_contiguous():
        raise ValueError(
            "Newton-Schulz runs on contiguous batches [b, rows, cols], found strides "
            f"{x.stride()}: call .contiguous() first"
        )
    rows, cols = x.shape[1:]
    m = min(rows, cols)
    # A batch of one costs up to twice as much as a matrix on a CPU.
    is_split = one_by_one or len(x) == 1 or (ops.batch_rows is not None and m > ops.batch_rows)
    members = x.unbind() if is_split else (x,)
    shape, square = ((rows, cols), (m, m)) if is_split else (tuple(x.shape), (len(x), m, m))
    dtype = ops.held or x.dtype
    held = take(shape, dtype) if one_by_one or dtype is not x.dtype else None
    spare = take(shape, dtype)
    count = 4 if any(high - low > 1 for low, high in segments) else 2
    squares = [take(square, dtype) for _ in range(count)]
    in_place = held is not None or len(members) > 1
    plain = is_plain(ops, segments, len(coefficients))

    def run() -> Tensor:
        for member in members:
            start = member if held is None else held.copy_(member)
            if plain:
                found = _standard(start, spare, squares, coefficients)
            else:
                found = iterate(start, spare, squares, coefficients, segments, ops)
            if in_place and found is not member:
                member.copy_(found)
        return x if in_place else found.view(x.shape)

    return run


def is_plain(ops: MatmulOps, segments: Segments, steps: int) -> bool:
    """Return whether `_standard` computes these segments."""
    return type(ops) is MatmulOps and len(segments) == steps


def _standard(
    x: Tensor, spare: Tensor, squares: Sequence[Tensor], coefficients: Sequence[Triple]
) -> Tensor:
    """Run `iterate` in the standard form over `MatmulOps`; 5% faster for small matrices."""
    is_tall = x.shape[-2] != squares[0].shape[-1]
    multiply, add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    r, p = squares
    for a, b, c in coefficients:
        xt = x.mT
        multiply(xt, x, out=r) if is_tall else multiply(x, xt, out=r)
        add(r, r, r, beta=b, alpha=c, out=p)
        add(x, x, p, beta=a, out=spare) if is_tall else add(x, p, x, beta=a, out=spare)
        x, spare = spare, x
    return x


# ---- dtype -----------------------------------------------------------------------------------


def resolve_ns_dtype(dtype: str | torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the dtype of the iteration: "auto" is `Device.ns_dtype`.

    Raises ValueError unless it is "auto" or a real floating-point dtype, or the name of one.
    """
    if dtype == "auto":
        return devices.of(device).ns_dtype()
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES:
        return dtype
    for known in _DTYPES:
        if dtype in (str(known), str(known).removeprefix("torch.")):
            return known
    raise ValueError(
        f'the Newton-Schulz dtype (ns_dtype) must be "auto" or one of {_NAMES}, found {dtype!r}'
    )


# ---- the function ----------------------------------------------------------------------------


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientSet | Sequence[float] | Sequence[Sequence[float]] = "polar_express",
    method: str = "auto",
    dtype: DtypeName | torch.dtype = "auto",
    eps: float = 1e-7,
    backend: BackendName = "auto",
) -> Tensor:
    """Orthogonalize every matrix of `x`, `[..., m, n]`; return the same shape in `dtype`.

    Each matrix is divided by `max(||x||_F, eps)`, as torch.optim.Muon does: one whose norm is below
    `eps` comes out smaller than orthogonal. A zero matrix gives zeros, a matrix with an inf or a
    nan gives nan, and neither affects the others. `x` is not changed and no gradient is recorded.

    steps: iterations, always exactly as many; 0 returns the normalized matrix.
    coefficients: a name of `COEFFICIENT_SETS`, one `(a, b, c)`, or one triple per step.
    method: "standard", "gram", a Gram form with its restarts such as "gram[2]", or "auto", see
        `choose_method`. On a CPU "auto" depends on measurements in this process.
    dtype: the dtype of the iteration, "auto", a torch dtype or its name, see `resolve_ns_dtype`.
    backend: the products, one of `dmuon.kernels.choice.BACKENDS`, or "auto".

    Raises TypeError for anything but a dense real floating-point tensor, ValueError for other
    mistakes, including a backend that cannot run on this device and restarts with which the
    iteration diverges in this dtype.
    """
    _check_input(x)
    if unpack_dual(x).tangent is not None:
        raise TypeError(
            "newton_schulz records no derivatives, in forward mode (torch.func.jvp) neither: "
            "pass a tensor without a tangent, torch.autograd.forward_ad.unpack_dual(x).primal"
        )
    if not (isinstance(eps, Real) and 0 < eps < math.inf):
        raise ValueError(f"eps must be a finite number > 0, found {eps!r}; torch uses 1e-7")
    triples = resolve_coefficients(coefficients, steps)
    ns_dtype = resolve_ns_dtype(dtype, x.device)
    rows, cols = x.shape[-2:]
    device, how = x.device, (str(method), str(backend))
    speeds = measured_speeds(device, ns_dtype, min(rows, cols)) if "auto" in how else None
    segments, ops = _chosen(rows, cols, ns_dtype, device, steps, *how, speeds)
    # Detaching records no gradient, and costs less than leaving grad mode.
    y = normalize(x.detach() if x.requires_grad else x, ns_dtype, eps)
    if not triples or not y.numel():
        return y
    # A transposed view is computed in its stored orientation.
    is_view = not y.is_contiguous() and y.mT.is_contiguous()
    stored = y.mT if is_view else y.contiguous()

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    with no_autocast(device):
        if stored.ndim == 2 and is_plain(ops, segments, steps):  # nothing to prepare
            m = min(rows, cols)
            squares = take((m, m), ns_dtype), take((m, m), ns_dtype)
            found = _standard(stored, torch.empty_like(stored), squares, triples)
        else:
            batch = stored.view(-1, *stored.shape[-2:])
            found = prepared(batch, triples, segments, ops, take)().view(stored.shape)
    return found.mT if is_view else found


@lru_cache(maxsize=256)
def _chosen(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, steps: int, *how: Any
) -> tuple[Segments, MatmulOps]:
    choice = fixed_choice(rows, cols, dtype, device, steps, *how)
    return segments_of(choice, steps), ops_of(choice, device, min(rows, cols))


def _check_input(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"newton_schulz expects a torch.Tensor, found {type(x).__name__}")
    if x.layout != torch.strided or x.dtype not in _DTYPES:
        raise TypeError(
            f"newton_schulz expects a dense tensor of {_NAMES}, found {x.layout} of {x.dtype}: "
            "convert it first, for example with x.to_dense() or x.float()"
        )
    if x.ndim < 2:
        raise ValueError(
            f"newton_schulz expects matrices [..., m, n], found shape {tuple(x.shape)}; "
            "leave vectors to AdamW, or reshape them"
        )


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave autocast, which would change the dtype of the products."""
    kind = device.type
    # Entering a region costs as much as ten small products, so enter only to leave another.
    is_known = kind == "cpu" or torch.amp.is_autocast_available(kind)
    if is_known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _AS_IT_IS
