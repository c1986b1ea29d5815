"""Coefficient sets of the quintic iteration, with their sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType

from dmuon.types import Triple

__all__ = ["COEFFICIENT_SETS", "resolve_coefficients"]

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
