"""Which backends there are, and whether one can run on a device.

==============  =====================================================================
torch           plain products, any device
torch_strips    symmetric products by row strips, CPU
torch_rounded   float16 and bfloat16 on a CPU without instructions for them
triton          symmetric products by triangles of tiles, CUDA
triton_small    the whole iteration of a matrix in one thread block, CUDA, m <= 128
==============  =====================================================================

Nothing falls back by itself: a backend that was asked for and cannot run is an error.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

import torch

from dmuon.kernels.ops import (
    STRIPS_FROM_ROWS,
    TORCH_OPS,
    TORCH_STRIPS_OPS,
    MatmulOps,
    Steps,
    cpu_has_bf16,
    rounded_ops,
)
from dmuon.types import KernelChoice

__all__ = [
    "BACKENDS",
    "backend_version",
    "default_backend",
    "launch_errors",
    "offered_backends",
    "offered_tiles",
    "ops_of",
    "why_not",
]

BACKENDS = ("torch", "torch_strips", "torch_rounded", "triton", "triton_small")
_HALF = (torch.float16, torch.bfloat16)
_TINY_ROWS = 32  # up to here rounding may cost more than emulation


def default_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend that serves a device without a measurement."""
    kind = torch.device(device).type
    if kind != "cpu":
        return "torch"
    emulated = dtype is torch.float16 or (dtype is torch.bfloat16 and not cpu_has_bf16())
    return "torch_rounded" if emulated else "torch_strips"


def offered_backends(device: torch.device | str, dtype: torch.dtype, rows: int) -> tuple[str, ...]:
    """The backends that are worth measuring for matrices with ``rows`` rows (the short side)."""
    kind = torch.device(device).type
    if kind == "cpu":
        default = default_backend(device, dtype)
        if default == "torch_rounded":  # emulated products take 40 times as long, but tiny ones
            return (default, "torch") if rows <= _TINY_ROWS else (default,)
        # Below that strips are plain torch.
        return (default, "torch") if rows >= STRIPS_FROM_ROWS else (default,)
    found = ["torch"]
    if why_not("triton", device, dtype) is None:
        found.append("triton")
        if why_not("triton_small", device, dtype, rows) is None:
            found.append("triton_small")
    return tuple(found)


def offered_tiles(backend: str, device: torch.device | str, dtype: torch.dtype) -> tuple[str, ...]:
    """The tile configurations of a backend that are worth measuring; ("",) if it has none."""
    if backend != "triton":
        return ("",)
    capability = torch.cuda.get_device_capability(device)
    return tuple(str(tile) for tile in _syrk().tiles_for(capability, dtype))


def why_not(
    backend: str, device: torch.device | str, dtype: torch.dtype, rows: int = 1
) -> str | None:
    """Why a backend cannot run here, in words; None if it can."""
    if backend not in BACKENDS:
        return f"there is no backend {backend!r}; choose one of {', '.join(BACKENDS)}"
    kind = torch.device(device).type
    if backend == "torch" or kind == "meta":
        return None
    if backend == "torch_strips":
        return None if kind == "cpu" else f"it serves the CPU, found {kind}; use 'torch'"
    if backend == "torch_rounded":
        if kind != "cpu":
            return f"it serves the CPU, found {kind}; use 'torch'"
        return None if dtype in _HALF else f"it rounds to half precision, found {dtype}"
    try:
        syrk = _syrk()
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install 'dmuon[triton]'"
    if dtype is torch.float64:
        return "Triton kernels accumulate in float32, found float64; use 'torch'"
    reason: str | None = syrk.why_unavailable(torch.device(device))
    if reason is None and backend == "triton_small" and rows > _small().max_rows(dtype):
        most = _small().max_rows(dtype)
        return f"it takes up to {most} rows in {dtype}, found {rows}; use 'triton'"
    return reason


@cache
def ops_of(choice: KernelChoice, device: torch.device | str, rows: int = 1) -> MatmulOps:
    """The products of a choice; ValueError with the reason where it cannot run."""
    dtype: torch.dtype = getattr(torch, choice.dtype)
    reason = why_not(choice.backend, device, dtype, rows)
    if reason is not None:
        raise ValueError(f"kernel backend {choice.backend!r} cannot run on {device}: {reason}")
    return _ops(choice.backend, dtype, choice.tile)


@cache
def _ops(backend: str, dtype: torch.dtype, tile: str) -> MatmulOps:
    if backend == "torch":
        return TORCH_OPS
    if backend == "torch_strips":
        return TORCH_STRIPS_OPS
    if backend == "torch_rounded":
        return rounded_ops(dtype)
    if backend == "triton_small":
        small = _small()

        def whole(x: torch.Tensor, coefficients: object, restarts: tuple[int, ...]) -> None:
            small.small_iteration(x, coefficients, restarts)

        return MatmulOps(backend, TORCH_OPS.symmetric, TORCH_OPS.general, whole=whole)
    return _triton_ops(tile)


def _triton_ops(tile: str) -> MatmulOps:
    syrk = _syrk()
    chosen = syrk.Tile.parse(tile) if tile else None

    def symmetric(
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        *,
        out: torch.Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        diag: float = 0.0,
        plain: torch.Tensor | None = None,
    ) -> Steps:
        results = {"out": out, "plain": plain}
        factors = {"alpha": alpha, "beta": beta, "diag": diag}
        return [partial(syrk.symm_mm, a, b.mT, c, **results, **factors, tile=chosen)]

    return MatmulOps(f"triton-{tile}" if tile else "triton", symmetric, TORCH_OPS.general)


def backend_version(device: torch.device | str) -> str:
    """What decides, beside torch, how fast and how exact the backends of a device are."""
    if torch.device(device).type != "cuda":
        return "torch"
    try:
        import triton
    except ImportError:
        return "torch"
    return f"triton{triton.__version__}-{_syrk().SOURCE_HASH}"


def launch_errors() -> tuple[type[Exception], ...]:
    """What a kernel of an optional backend may raise beside torch's errors, as when a tile needs
    more shared memory than the device has."""
    try:
        from triton.runtime.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def _syrk() -> ModuleType:
    from dmuon.kernels import triton_syrk

    return triton_syrk


def _small() -> ModuleType:
    from dmuon.kernels import triton_small

    return triton_small
