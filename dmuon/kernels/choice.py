"""The choice of form and products of Newton-Schulz: the rule, and candidates for measuring.

The rule is a pure function of shape, dtype and `Speeds`, the cost of products here. A process
measures that once; ranks that work together agree on one `Speeds` (`common_choice`), which is fixed
where nothing was measured. Choices made by timing whole kernels are part of the plan instead. A
requested backend that cannot run is an error; nothing falls back silently.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence, Set
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import NamedTuple

import torch

from dmuon import devices
from dmuon.devices import cpu_has_bf16, undisturbed
from dmuon.kernels import ops
from dmuon.kernels.ops import LEAST_STRIP, MatmulOps
from dmuon.types import KernelChoice

BACKENDS = ("torch", "torch_strips", "torch_rounded", "triton")
METHODS = ("auto", "standard", "gram")
_METHOD = re.compile(r"gram\[([0-9]+(?:,[0-9]+)*)\]")
_TINY_ROWS = 32  # up to here rounding may cost more than emulation
_WORTH = 1.5  # candidates with this many times the fewest multiplications cannot win
_CAUTIOUS_FIRST = ("torch_rounded", "torch", "torch_strips")  # for ranks that differ
_SMALL = 512  # with fewer rows the number of operations matters too

Device = torch.device | str
Segments = tuple[tuple[int, int], ...]
"""Ranges of steps; X is formed anew after each."""


def segments_of(choice: KernelChoice, steps: int) -> Segments:
    """Return the segments of a choice; the standard form returns to X after every step."""
    return _segments(choice.restarts if choice.method == "gram" else range(1, steps), steps)


def _segments(restarts: Sequence[int], steps: int) -> Segments:
    return tuple(pairwise((0, *restarts, steps))) if steps else ()


def default_restarts(dtype: torch.dtype, steps: int) -> tuple[int, ...]:
    """Return the steps after which the Gram form returns to X: of five steps (1, 3) in bfloat16,
    else (2,). Segments are as long as is safe; the first is shorter, because a is largest there."""
    first, stride = (1, 2) if dtype is torch.bfloat16 else (2, 3)
    return tuple(range(first, steps, stride))


def is_safe(restarts: tuple[int, ...], dtype: torch.dtype, steps: int) -> bool:
    """Whether the Gram form converges with these restarts. Rounding leaves R slightly indefinite;
    each step multiplies a negative eigenvalue by about a^2."""
    return all(0 < high - low <= _longest(dtype, steps) for low, high in _segments(restarts, steps))


def _longest(dtype: torch.dtype, steps: int) -> int:
    return {torch.float64: max(steps, 1), torch.bfloat16: 2}.get(dtype, 3)


def multiplications(m: int, n: int, restarts: Sequence[int], steps: int, symmetric: bool) -> int:
    """Count multiplications of an m x n matrix, m <= n, in units of m^2; symmetric ones as half.

    A segment of s steps takes 4n + (8s - 6)m, with symmetric products 3n + (4s - 3)m. A segment of
    one step is a standard step, 4n + 2m or 3n + m.
    """
    wide, square = (3, 1) if symmetric else (4, 2)
    lengths = (high - low for low, high in _segments(restarts, steps))
    return sum(wide * n + square * (4 * s - 3) * m for s in lengths)


class Speeds(NamedTuple):
    """The cost of products, for the rule: the ``backend`` of a device; the multiplications (as in
    `multiplications`, times m^2) that take as long as a ``call`` of a product; the least rows of a
    ``strip`` that pays, see `ops.StripsOps`."""

    backend: str
    call: float
    strip: int


def fixed_speeds(device: Device, dtype: torch.dtype) -> Speeds:
    """Return the `Speeds` used if nothing was measured: those of a CPU with AVX-512 BF16."""
    call, backend = 1.3e7 if dtype.itemsize <= 2 else 3e5, "torch"
    if devices.of(device).is_cpu:
        emulated = dtype is torch.float16 or (dtype is torch.bfloat16 and not cpu_has_bf16())
        backend = "torch_rounded" if emulated else "torch_strips"
    return Speeds(backend, call, LEAST_STRIP)


def choose_method(m: int, n: int, dtype: torch.dtype, steps: int, speeds: Speeds) -> str:
    """Return the form for "auto" in plans without measured kernels, and in `newton_schulz`.

    The Gram form must save 5% of the cost, because at equal cost it measures 1 to 3% slower.
    """
    m, n = min(m, n), max(m, n)
    if steps < 2:
        return "standard"
    gram = _cost(m, n, default_restarts(dtype, steps), steps, speeds)
    return "gram" if gram <= 0.95 * _cost(m, n, range(1, steps), steps, speeds) else "standard"


def _cost(m: int, n: int, restarts: Sequence[int], steps: int, speeds: Speeds) -> float:
    """Count multiplications, with calls of products converted to multiplications."""
    half, full = (multiplications(m, n, restarts, steps, is_half) for is_half in (True, False))
    count = ops.strips_in(m, speeds.strip) if speeds.backend == "torch_strips" else 1
    calls = 4 * steps - len(_segments(restarts, steps))
    return m * m * (half + (full - half) / count) + speeds.call * calls


def restarts_of(method: object) -> tuple[int, ...] | None:
    """Return the restarts of a Gram form; None for one of `METHODS`, ValueError for other text.

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


def common_choice(
    choices: Set[tuple[torch.dtype, Speeds]], device: torch.device
) -> tuple[torch.dtype, Speeds]:
    """Return one Newton-Schulz dtype and one `Speeds` for ranks that found these.

    Updates travel in the dtype, and replicas of a shard take block steps on their own and need the
    same bits. If dtypes differ, the dtype is float32; if backends differ, products are emulated;
    otherwise plain products are favoured the most.

    >>> one, other = Speeds("torch_strips", 3e5, 128), Speeds("torch_strips", 2e5, 256)
    >>> common_choice({(torch.float32, one), (torch.float32, other)}, "cpu")
    (torch.float32, Speeds(backend='torch_strips', call=300000.0, strip=256))
    """
    dtypes = {dtype for dtype, _ in choices}
    if len(dtypes) > 1:
        return torch.float32, fixed_speeds(device, torch.float32)
    found = {speeds for _, speeds in choices}
    backend = min((one.backend for one in found), key=_CAUTIOUS_FIRST.index)
    call, strip = max(one.call for one in found), max(one.strip for one in found)
    return dtypes.pop(), Speeds(backend, call, strip)


def offered_backends(
    device: Device, dtype: torch.dtype, rows: int, speeds: Speeds | None = None
) -> tuple[str, ...]:
    """Return the backends worth measuring for matrices with ``rows`` rows (the short side)."""
    if devices.of(device).is_cpu:
        default, _, strip = speeds or fixed_speeds(device, dtype)
        # Emulated products take 40 times as long, except tiny ones; small strips are "torch".
        is_rounded = default == "torch_rounded"
        torch_pays = rows <= _TINY_ROWS if is_rounded else ops.strips_in(rows, strip) > 1
        return (default, "torch") if torch_pays else (default,)
    found = ("torch", *["triton"] * ops.is_even(rows))
    return tuple(name for name in found if why_not(name, device, dtype) is None)


def offered_tiles(backend: str, device: Device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the tile configurations of a backend that are worth measuring; ("",) if it has
    none."""
    if backend != "triton":
        return ("",)
    from dmuon.kernels.triton_syrk import tiles_for

    return tuple(map(str, tiles_for(devices.of(device).capability(), dtype)))


def why_not(backend: str, device: Device, dtype: torch.dtype) -> str | None:
    """Return the reason why a backend cannot run here, or None if it can."""
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
        from dmuon.kernels.triton_syrk import why_unavailable

        return why_unavailable(device)
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install 'dmuon[triton]'"
    except Exception as error:  # from its libraries, its compiler or the driver
        return f"Triton does not work here ({described(error)})"


def described(error: Exception) -> str:
    """Return an error of another library as one line of limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_backend(backend: str, device: Device, dtype: torch.dtype) -> None:
    if (reason := why_not(backend, device, dtype)) is not None:
        raise ValueError(f"kernel backend {backend!r} cannot run on {device}: {reason}")


@lru_cache(maxsize=1024)
def ops_of(choice: KernelChoice, device: Device, rows: int = 1) -> MatmulOps:
    """Return the products of a choice for matrices with ``rows`` rows (the short side). ValueError,
    with the reason, if it cannot run."""
    dtype: torch.dtype = getattr(torch, choice.dtype)
    _check_backend(choice.backend, device, dtype)
    if choice.backend == "torch_rounded":
        return ops.RoundedOps(dtype)
    if choice.backend == "torch_strips":
        strip = int(choice.tile or LEAST_STRIP)
        # Without strips, checking at each product costs tiny matrices a tenth of their time.
        return ops.StripsOps(strip) if ops.strips_in(rows, strip) > 1 else MatmulOps()
    if choice.backend == "triton":
        from dmuon.kernels.triton_syrk import parse_tile, symm_mm

        tile = parse_tile(choice.tile) if choice.tile else None
        return ops.TritonOps(partial(symm_mm, tile=tile))
    return MatmulOps()


def backend_version(device: Device) -> str:
    """Name the versions, besides torch's, that decide a device's speed and rounding."""
    if not devices.of(device).has_triton:
        return "torch"
    try:
        import triton

        from dmuon.kernels.triton_syrk import source_hash

        return f"triton{triton.__version__}-{source_hash()}"
    except Exception:  # see `why_not`
        return "torch"


def fixed_choice(
    m: int, n: int, dtype: torch.dtype, device: Device, steps: int, method: str = "auto",
    backend: str = "auto", speeds: Speeds | None = None,
) -> KernelChoice:  # fmt: skip
    """Return the rule's choice for ``speeds`` (None: fixed) within ``method`` and ``backend``.
    ValueError for unknown ones, for a backend that cannot run on this device, and for restarts with
    which this dtype diverges."""
    restarts, safe = restarts_of(method), default_restarts(dtype, steps)
    if restarts is not None and not is_safe(restarts, dtype, steps):
        raise ValueError(
            f"{method!r} diverges in {dtype} over {steps} steps: restarts must increase from 1 to "
            f"at most {steps - 1}, with at most {_longest(dtype, steps)} steps between two; "
            f"use 'gram[{','.join(map(str, safe))}]'"
        )
    speeds = speeds or fixed_speeds(device, dtype)
    is_auto = method == "auto"
    form = choose_method(m, n, dtype, steps, speeds) if is_auto else method.partition("[")[0]
    if form == "standard":
        restarts = ()
    tile = ""
    if backend == "auto":
        backend = speeds.backend
        if backend == "torch_strips" and speeds.strip != LEAST_STRIP:
            tile = str(speeds.strip)
    _check_backend(backend, device, dtype)
    name = str(dtype).removeprefix("torch.")
    return KernelChoice(form, safe if restarts is None else restarts, backend, name, tile)


def candidates(
    m: int, n: int, dtype: torch.dtype, device: Device, steps: int, method: str = "auto",
    backend: str = "auto", speeds: Speeds | None = None,
) -> tuple[KernelChoice, ...]:  # fmt: skip
    """Return the choices worth measuring for m x n matrices, the rule's first: safe forms that do
    not need clearly more multiplications, with each backend and tile of the device. Errors as in
    `fixed_choice`."""
    m, n = min(m, n), max(m, n)
    fixed = fixed_choice(m, n, dtype, device, steps, method, backend, speeds)
    forms = [(fixed.method, fixed.restarts)]
    if method == "auto":
        every = tuple(range(1, steps))
        safe = {default_restarts(dtype, steps), default_restarts(torch.bfloat16, steps), every}
        counts = {r: multiplications(m, n, r, steps, symmetric=True) for r in safe}
        most = math.inf if m < _SMALL else _WORTH * min(counts.values())
        forms += [
            ("standard", ()) if restarts == every else ("gram", restarts)
            for restarts in sorted(safe, key=lambda r: (r != every, r))
            if counts[restarts] <= most
        ]
    found = [fixed]
    for name in offered_backends(device, dtype, m, speeds) if backend == "auto" else (backend,):
        offered = offered_tiles(name, device, dtype)
        tiles = (fixed.tile,) if name == fixed.backend else offered
        found += [KernelChoice(*form, name, fixed.dtype, t) for t, form in product(tiles, forms)]
    return tuple(dict.fromkeys(found))


# ---- measured speeds -------------------------------------------------------------------------

_SIDES = (256, 512, 1024)  # of the timed products
_SMALL_SIDE = 64  # of a product dominated by its call; smaller ones may take a path of their own
_ROUNDS = 5
_KEPT_BYTES = 1 << 24
_CLEARLY = 0.95  # of the time of plain products, so that noise does not decide
_seconds: dict[tuple[torch.dtype, int, int], tuple[float, float, float]] = {}
_speeds: dict[tuple[Device, torch.dtype, int, int], Speeds] = {}


def measured_speeds(device: Device, dtype: torch.dtype, rows: int) -> Speeds:
    """Measure a CPU, once per process for each dtype and number of threads. Products of up to
    ``rows`` x ``rows`` are timed from small to large until two strips win, because then strips of
    that height win in larger ones too. Return fixed `Speeds` for other devices, emulated products,
    and in a compiled graph."""
    if torch.compiler.is_compiling():
        return fixed_speeds(device, dtype)
    key = device, dtype, rows, torch.get_num_threads()
    if key not in _speeds:
        fixed = fixed_speeds(device, dtype)
        is_measured = fixed.backend == "torch_strips" and rows >= _TINY_ROWS
        _speeds[key] = _measured(fixed, dtype, rows) if is_measured else fixed
    return _speeds[key]


def _measured(fixed: Speeds, dtype: torch.dtype, rows: int) -> Speeds:
    call = fixed.call
    for side in _SIDES:
        key = dtype, torch.get_num_threads(), side
        if key not in _seconds:
            _seconds[key] = undisturbed(partial(_product_seconds, dtype, side))
        small, whole, strips = _seconds[key]
        if side == _SIDES[0]:
            # Both consist of a call, and of work that grows with the third power of the side.
            work = max(whole - small, 1e-9) / (1 - (_SMALL_SIDE / side) ** 3)
            call = max(whole / work - 1, 0.0) * 2 * side**3
        if side > rows:  # too small for strips
            return fixed._replace(call=call)
        if strips <= _CLEARLY * whole:
            return Speeds("torch_strips", call, side // 2)
        if 2 * side > rows:
            break
    return Speeds("torch", call, LEAST_STRIP)


@torch.no_grad()
def _product_seconds(dtype: torch.dtype, side: int) -> tuple[float, float, float]:
    """Return the shortest times of a small product, one of side x side, and the latter in two
    strips; timed in turns, so that a slow moment of the machine spoils one number of each."""
    # Freed at once, so that malloc keeps blocks of this size from then on, as in training.
    torch.empty(_KEPT_BYTES, dtype=torch.uint8, device="cpu")
    whole, strips = MatmulOps(), ops.StripsOps(side // 2)
    runs = []
    for who, rows in ((whole, _SMALL_SIDE), (whole, side), (strips, side)):
        x = torch.full((rows, rows), 1 / rows, dtype=dtype, device="cpu")
        runs.append(partial(who.symmetric, x, x, out=torch.empty_like(x)))
    times: list[list[float]] = [[] for _ in runs]
    for i, run in [*enumerate(runs)] * (_ROUNDS + 1):
        begin = time.perf_counter()
        run()
        times[i].append(time.perf_counter() - begin)
    small, plain, cut = (min(each[1:]) for each in times)  # the first sets up the library
    return small, plain, cut
