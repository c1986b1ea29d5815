"""Which form of Newton-Schulz and which products run where: the fixed rule, and the candidates.

Pure functions of shapes, dtypes and what the device can do, so that ranks on equal hardware agree.
A measured choice is part of the plan instead. A backend that was asked for and cannot run is an
error; nothing falls back by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from functools import lru_cache, partial
from itertools import pairwise, product

import torch

from dmuon import devices
from dmuon.devices import cpu_has_bf16
from dmuon.kernels import ops
from dmuon.kernels.ops import MatmulOps
from dmuon.types import KernelChoice

BACKENDS = ("torch", "torch_strips", "torch_rounded", "triton", "triton_small")
METHODS = ("auto", "standard", "gram")
_METHOD = re.compile(r"gram\[([0-9]+(?:,[0-9]+)*)\]")
_TINY_ROWS = 32  # up to here rounding may cost more than emulation
_WORTH = 1.5  # candidates with more multiplications than this, against the fewest, cannot win
_SMALL = 512  # with fewer rows the number of operations counts too

Segments = tuple[tuple[int, int], ...]
"""Ranges of steps; X is formed anew after each."""


def segments_of(choice: KernelChoice, steps: int) -> Segments:
    """The segments of a choice; the standard form goes back to X after every step."""
    return _segments(choice.restarts if choice.method == "gram" else _every(steps), steps)


def _every(steps: int) -> tuple[int, ...]:
    return tuple(range(1, steps))


def _segments(restarts: tuple[int, ...], steps: int) -> Segments:
    return tuple(pairwise((0, *restarts, steps))) if steps else ()


def default_restarts(dtype: torch.dtype, steps: int) -> tuple[int, ...]:
    """The steps after which the Gram form goes back to X: of five steps (1, 3) in bfloat16, else
    (2,). Segments are as long as is safe; the first is shorter, because a is largest there."""
    first, stride = (1, 2) if dtype is torch.bfloat16 else (2, 3)
    return tuple(range(first, steps, stride))


def is_safe(restarts: tuple[int, ...], dtype: torch.dtype, steps: int) -> bool:
    """Whether the Gram form converges with these restarts.

    Rounding leaves R slightly indefinite, and each further step multiplies a negative eigenvalue
    by about a^2.
    """
    most = _longest(dtype, steps)
    return all(0 < high - low <= most for low, high in _segments(restarts, steps))


def _longest(dtype: torch.dtype, steps: int) -> int:
    return {torch.float64: max(steps, 1), torch.bfloat16: 2}.get(dtype, 3)


def multiplications(m: int, n: int, restarts: tuple[int, ...], steps: int, symmetric: bool) -> int:
    """Multiplications of one m x n matrix, m <= n, in units of m^2; symmetric products count half.

    A segment of s steps: 4n + (8s - 6)m without symmetric products, and with them 3n + (4s - 3)m. A
    segment of one step is a standard one, 4n + 2m or 3n + m.
    """
    wide, square = (3, 1) if symmetric else (4, 2)
    lengths = (high - low for low, high in _segments(restarts, steps))
    return sum(wide * n + square * (4 * s - 3) * m for s in lengths)


def choose_method(m: int, n: int, dtype: torch.dtype, steps: int) -> str:
    """The form that "auto" stands for where nothing was measured.

    The Gram form must save 5% of the multiplications, because at equal counts it measures 1 to 3%
    slower. For small matrices the number of operations decides, and it has more of these.
    """
    m, n = min(m, n), max(m, n)
    if steps < 2 or m < (256 if dtype.itemsize <= 2 else 128):
        return "standard"
    gram = multiplications(m, n, default_restarts(dtype, steps), steps, symmetric=False)
    standard = multiplications(m, n, _every(steps), steps, symmetric=False)
    return "gram" if 20 * gram <= 19 * standard else "standard"


def restarts_of(method: object) -> tuple[int, ...] | None:
    """The restarts that a Gram form names; None for one of `METHODS`, ValueError for anything else.

    >>> restarts_of("gram[1,3]")
    (1, 3)
    """
    given = _METHOD.fullmatch(method) if isinstance(method, str) else None
    if given is None and method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, or a Gram form with its restarts such as "
            f"'gram[2]', found {method!r}"
        )
    return None if given is None else tuple(map(int, given[1].split(",")))


def default_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend of a device where nothing was measured."""
    if not devices.of(device).is_cpu:
        return "torch"
    emulated = dtype is torch.float16 or (dtype is torch.bfloat16 and not cpu_has_bf16())
    return "torch_rounded" if emulated else "torch_strips"


def common_choice(
    choices: Set[tuple[torch.dtype, str]], device: torch.device
) -> tuple[torch.dtype, str]:
    """One Newton-Schulz dtype and `default_backend` for ranks that found these.

    Each process times for itself whether bfloat16 is fast, so ranks may differ. But updates travel
    in the dtype, and replicas of a shard take block steps on their own and need the same bits.
    Where dtypes differ, it is float32; where only backends differ, emulated products.

    >>> common_choice({(torch.bfloat16, "torch_strips"), (torch.bfloat16, "torch_rounded")}, "cpu")
    (torch.bfloat16, 'torch_rounded')
    """
    if len(choices) == 1:
        return next(iter(choices))
    dtypes = {dtype for dtype, _ in choices}
    if len(dtypes) == 1:
        return dtypes.pop(), "torch_rounded"
    return torch.float32, default_backend(device, torch.float32)


def offered_backends(device: torch.device | str, dtype: torch.dtype, rows: int) -> tuple[str, ...]:
    """The backends that are worth measuring for matrices with ``rows`` rows (the short side)."""
    if devices.of(device).is_cpu:
        default = default_backend(device, dtype)
        # Emulated products take 40 times as long, but tiny ones; below 512 rows strips are "torch".
        is_rounded = default == "torch_rounded"
        torch_pays = rows <= _TINY_ROWS if is_rounded else rows >= ops.STRIPS_FROM_ROWS
        return (default, "torch") if torch_pays else (default,)
    found = ("torch", "triton", "triton_small")
    return tuple(name for name in found if why_not(name, device, dtype, rows) is None)


def offered_tiles(backend: str, device: torch.device | str, dtype: torch.dtype) -> tuple[str, ...]:
    """The tile configurations of a backend that are worth measuring; ("",) if it has none."""
    if backend != "triton":
        return ("",)
    from dmuon.kernels.triton_syrk import tiles_for

    return tuple(str(tile) for tile in tiles_for(devices.of(device).capability(), dtype))


def why_not(
    backend: str, device: torch.device | str, dtype: torch.dtype, rows: int = 1
) -> str | None:
    """The reason why a backend cannot run here; None if it can."""
    if backend not in BACKENDS:
        return f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}"
    kind = torch.device(device).type
    if backend == "torch" or kind == "meta":
        return None
    if backend in ("torch_strips", "torch_rounded"):
        if not devices.of(device).is_cpu:
            return f"it serves the CPU, found {kind}; use 'torch'"
        is_rounding = backend == "torch_rounded" and dtype.itemsize > 2
        return f"it rounds to half precision, found {dtype}" if is_rounding else None
    if dtype is torch.float64:
        return "Triton kernels accumulate in float32, found float64; use 'torch'"
    try:
        from dmuon.kernels import triton_syrk
        from dmuon.kernels.triton_small import max_rows

        if backend == "triton_small" and rows > max_rows(dtype):
            return f"it takes up to {max_rows(dtype)} rows in {dtype}, found {rows}; use 'triton'"
        return triton_syrk.why_unavailable(device)
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install 'dmuon[triton]'"
    except Exception as error:  # of its libraries, its compiler, the driver
        return f"Triton does not work here ({described(error)})"


def described(error: Exception) -> str:
    """An error of another library as one line of limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_backend(backend: str, device: torch.device | str, dtype: torch.dtype, rows: int) -> None:
    reason = why_not(backend, device, dtype, rows)
    if reason is not None:
        raise ValueError(f"kernel backend {backend!r} cannot run on {device}: {reason}")


@lru_cache(maxsize=1024)
def ops_of(choice: KernelChoice, device: torch.device | str, rows: int = 1) -> MatmulOps:
    """The products of a choice for matrices with ``rows`` rows (the short side).

    Raises ValueError with the reason where it cannot run.
    """
    dtype: torch.dtype = getattr(torch, choice.dtype)
    _check_backend(choice.backend, device, dtype, rows)
    if choice.backend == "torch_rounded":
        return ops.RoundedOps(dtype)
    # Where there are no strips, asking at each product costs tiny matrices a tenth of their time.
    if choice.backend == "torch_strips" and rows >= ops.STRIPS_FROM_ROWS:
        return ops.StripsOps()
    if choice.backend == "triton":
        from dmuon.kernels.triton_syrk import parse_tile, symm_mm

        tile = parse_tile(choice.tile) if choice.tile else None
        return ops.TritonOps(partial(symm_mm, tile=tile))
    if choice.backend == "triton_small":
        from dmuon.kernels.triton_small import prepared_iteration

        return ops.WholeOps(prepared_iteration)
    return MatmulOps()


def backend_version(device: torch.device | str) -> str:
    """A name for all that decides, beside torch, how fast and how exact a device's backends are."""
    if not devices.of(device).has_triton:
        return "torch"
    try:
        import triton

        from dmuon.kernels.triton_syrk import source_hash

        return f"triton{triton.__version__}-{source_hash()}"
    except Exception:  # see `why_not`
        return "torch"


def fixed_choice(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int,
    method: str = "auto",
    backend: str = "auto",
) -> KernelChoice:
    """The choice where nothing was measured: `choose_method` and `default_backend`, unless given.

    Raises ValueError for an unknown method or backend, for one that cannot run on this device, and
    for restarts with which this dtype diverges.
    """
    restarts, safe = restarts_of(method), default_restarts(dtype, steps)
    if restarts is not None and not is_safe(restarts, dtype, steps):
        raise ValueError(
            f"{method!r} diverges in {dtype} over {steps} steps: restarts must increase from 1 to "
            f"at most {steps - 1}, with at most {_longest(dtype, steps)} steps between two; "
            f"use 'gram[{','.join(map(str, safe))}]'"
        )
    form = choose_method(m, n, dtype, steps) if method == "auto" else method.partition("[")[0]
    if form == "standard":
        restarts = ()
    if backend == "auto":
        backend = default_backend(device, dtype)
    _check_backend(backend, device, dtype, min(m, n))
    name = str(dtype).removeprefix("torch.")
    return KernelChoice(form, safe if restarts is None else restarts, backend, name)


def candidates(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int,
    method: str = "auto",
    backend: str = "auto",
) -> tuple[KernelChoice, ...]:
    """The choices that are worth measuring for m x n matrices, the fixed one first: safe forms that
    do not have clearly more to multiply, with each backend and tile of the device.

    Raises ValueError as `fixed_choice` does.
    """
    m, n = min(m, n), max(m, n)
    fixed = fixed_choice(m, n, dtype, device, steps, method, backend)
    forms = [(fixed.method, fixed.restarts)]
    if method == "auto":
        every = _every(steps)
        safe = {default_restarts(dtype, steps), default_restarts(torch.bfloat16, steps), every}
        counts = {r: multiplications(m, n, r, steps, symmetric=True) for r in safe}
        most = math.inf if m < _SMALL else _WORTH * min(counts.values())
        forms += [
            ("standard", ()) if restarts == every else ("gram", restarts)
            for restarts in sorted(safe, key=lambda r: (r != every, r))
            if counts[restarts] <= most
        ]
    found = [fixed]
    for name in offered_backends(device, dtype, m) if backend == "auto" else (backend,):
        tiles = offered_tiles(name, device, dtype)
        found += [KernelChoice(*form, name, fixed.dtype, t) for t, form in product(tiles, forms)]
    return tuple(dict.fromkeys(found))
