"""Which form of Newton-Schulz runs where: the fixed rule, and what there is to choose from.

Everything here is a pure function of shapes, dtypes and what the device can do, so that ranks on
equal hardware agree. What a measurement chose is in the plan instead, see `autotune`.
"""

from __future__ import annotations

import re
from itertools import pairwise

import torch

from dmuon.kernels.backends import default_backend, offered_backends, offered_tiles, why_not
from dmuon.kernels.iterations import segments
from dmuon.types import KernelChoice

__all__ = [
    "METHODS",
    "candidates",
    "check_method",
    "choose_method",
    "default_restarts",
    "fixed_choice",
    "is_safe",
    "multiplications",
    "restarts_of",
]

METHODS = ("auto", "standard", "gram")
_METHOD = re.compile(r"gram(?:\[([0-9]+(?:,[0-9]+)*)\])?")
_WORTH = 1.5  # candidates with more multiplications than this, against the fewest, cannot win
_SMALL = 512  # with fewer rows a matrix pays by the operation too


def default_restarts(dtype: torch.dtype, steps: int) -> tuple[int, ...]:
    """The steps after which the Gram form goes back to X.

    Rounding leaves R slightly indefinite, and each further step multiplies a negative eigenvalue
    by about a^2. So bfloat16 carries R over two steps at most (1 first, where a is largest), the
    other dtypes over three (2 first): (1, 3) and (2,) for five steps.
    """
    first, stride = (1, 2) if dtype == torch.bfloat16 else (2, 3)
    return tuple(range(first, steps, stride))


def longest_segment(dtype: torch.dtype) -> int:
    """How many steps the Gram form may carry R over in a dtype."""
    return 2 if dtype == torch.bfloat16 else 3


def multiplications(m: int, n: int, restarts: tuple[int, ...], steps: int, symmetric: bool) -> int:
    """Multiplications of one m x n matrix, m <= n, in units of m^2; symmetric products count half.

    A segment of s steps: 4n + (8s - 6)m without symmetric products, and with them 3n + (4s - 3)m; a
    segment of one step is a standard one, 4n + 2m or 3n + m.
    """
    lengths = [high - low for low, high in segments(restarts, steps)]
    if symmetric:
        return sum(3 * n + (4 * s - 3) * m for s in lengths)
    return sum(4 * n + (8 * s - 6) * m for s in lengths)


def choose_method(m: int, n: int, dtype: torch.dtype, steps: int) -> str:
    """The form that "auto" runs an m x n matrix in without a measurement.

    Counts multiplications without symmetric kernels and asks for a margin of 5%: equal counts
    measure 1 to 3% slower. Small matrices pay by the operation, of which the Gram form has more.
    """
    m, n = min(m, n), max(m, n)
    if steps < 2 or m < (256 if dtype.itemsize <= 2 else 128):
        return "standard"
    gram = multiplications(m, n, default_restarts(dtype, steps), steps, symmetric=False)
    standard = multiplications(m, n, _every(steps), steps, symmetric=False)
    return "gram" if 20 * gram <= 19 * standard else "standard"


def _every(steps: int) -> tuple[int, ...]:
    return tuple(range(1, steps))


def check_method(method: object) -> None:
    """Raise ValueError unless it is "auto", "standard", "gram" or "gram[k,...]"."""
    if method not in METHODS and not (isinstance(method, str) and _METHOD.fullmatch(method)):
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, or a Gram form with its restarts such as "
            f"'gram[2]', found {method!r}"
        )


def restarts_of(method: str) -> tuple[int, ...]:
    """The restarts of a Gram form that names them.

    >>> restarts_of("gram[1,3]")
    (1, 3)
    """
    given = _METHOD.fullmatch(method)
    assert given is not None and given[1] is not None, method
    return tuple(map(int, given[1].split(",")))


def fixed_choice(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int,
    method: str = "auto",
    backend: str = "auto",
) -> KernelChoice:
    """What runs without a measurement: `choose_method` and `default_backend`, where not given.

    Raises ValueError for an unknown method or backend, one that cannot run on this device, and
    restarts with which this dtype diverges.
    """
    check_method(method)
    m, n = min(m, n), max(m, n)
    chosen = choose_method(m, n, dtype, steps) if method == "auto" else method
    restarts: tuple[int, ...] = _every(steps)
    if chosen != "standard":
        restarts = default_restarts(dtype, steps)
        if chosen != "gram":
            restarts = restarts_of(chosen)
            _check_restarts(restarts, dtype, steps)
    if backend == "auto":
        backend = default_backend(device, dtype)
    reason = why_not(backend, device, dtype, m)
    if reason is not None:
        raise ValueError(f"kernel backend {backend!r} cannot run on {device}: {reason}")
    name = str(dtype).removeprefix("torch.")
    if chosen == "standard":
        return KernelChoice("standard", (), backend, name)
    return KernelChoice("gram", restarts, backend, name)


def is_safe(restarts: tuple[int, ...], dtype: torch.dtype, steps: int) -> bool:
    """Whether these are restarts of so many steps with which the Gram form does not diverge."""
    edges = (0, *restarts, steps)
    lengths = [high - low for low, high in pairwise(edges)]
    longest = max(lengths) if dtype is torch.float64 else longest_segment(dtype)
    return min(lengths) > 0 and max(lengths) <= longest


def _check_restarts(restarts: tuple[int, ...], dtype: torch.dtype, steps: int) -> None:
    longest = max((high - low for low, high in segments(restarts, steps)), default=0)
    if dtype is not torch.float64 and longest > longest_segment(dtype):
        good = ",".join(map(str, default_restarts(dtype, steps)))
        raise ValueError(
            f"the Gram form diverges in {dtype} over {longest} steps without a restart (at most "
            f"{longest_segment(dtype)}): found restarts {list(restarts)}, use 'gram[{good}]'"
        )


def candidates(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int,
    method: str = "auto",
    backend: str = "auto",
) -> tuple[KernelChoice, ...]:
    """What is worth measuring for m x n matrices, the fixed choice first.

    Raises ValueError as `fixed_choice` does.
    """
    m, n = min(m, n), max(m, n)
    fixed = fixed_choice(m, n, dtype, device, steps, method, backend)
    methods = [fixed] if method != "auto" else [fixed, *_forms(fixed, m, n, dtype, steps)]
    backends = offered_backends(device, dtype, m) if backend == "auto" else (backend,)
    found = dict.fromkeys(
        KernelChoice(one.method, one.restarts, name, one.dtype, tile)
        for name in backends
        for tile in offered_tiles(name, device, dtype)
        for one in methods
    )
    return tuple(dict.fromkeys((fixed, *found)))


def _forms(
    fixed: KernelChoice, m: int, n: int, dtype: torch.dtype, steps: int
) -> list[KernelChoice]:
    """The other safe forms, without those that have clearly more to multiply."""
    gram = {default_restarts(dtype, steps), default_restarts(torch.bfloat16, steps)}
    forms: dict[KernelChoice, int] = {}
    for restarts in [_every(steps), *sorted(gram)]:
        is_standard = restarts == _every(steps)
        choice = KernelChoice(
            "standard" if is_standard else "gram",
            () if is_standard else restarts,
            fixed.backend,
            fixed.dtype,
        )
        forms[choice] = multiplications(m, n, restarts, steps, symmetric=True)
    fewest = min(forms.values())
    return [c for c, count in forms.items() if m < _SMALL or count <= _WORTH * fewest]
