"""The analytic cost model: Newton-Schulz time of a batch from the constants of a device class.

`docs/costs.md` has the formula, the sources of the constants, and how far off they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dmuon.scheduler.cost_entries import ShapeKey
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import PlanError

__all__ = [
    "ANALYTIC_DEVICES",
    "AnalyticDevice",
    "analytic_class",
    "analytic_ms",
    "newton_schulz_flops",
]


_MOST = 1e30  # operations or bytes a second: times of any shape stay finite and above 0


@dataclass(frozen=True, slots=True)
class AnalyticDevice:
    """A device class: matmul rate, bytes moved per second, and the cost of one kernel launch.

    ``flops`` is what dense products in the NS dtype reach, ``bandwidth`` in bytes per second,
    ``launch_s`` the overhead of one kernel, ``half_batch_dim`` the matrix dim at which one product
    reaches half of ``flops`` (small matrices underfill the device).
    """

    flops: float
    bandwidth: float
    launch_s: float
    half_batch_dim: float

    def __post_init__(self) -> None:
        rates, rest = (self.flops, self.bandwidth), (self.launch_s, self.half_batch_dim)
        if not (min(rates) >= 1 and max(rates) <= _MOST and min(rest) >= 0 and max(rest) <= 1e9):
            raise PlanError(
                f"a device needs rates from 1 to {_MOST:g}, overheads from 0 to 1e9, found {self}"
            )


# CPU: fitted to measurements of one thread with AMX bf16. GPUs: not measured, but 80% of the
# data sheet's dense fp16 rate and 90% of its bandwidth. `docs/costs.md` has sources and errors.
ANALYTIC_DEVICES: Mapping[str, AnalyticDevice] = MappingProxyType(
    {
        "cpu": AnalyticDevice(8.1e11, 7.3e9, 4.3e-5, 105.0),
        "cuda": AnalyticDevice(2.5e14, 1.8e12, 5e-6, 512.0),
        "a100": AnalyticDevice(2.5e14, 1.8e12, 5e-6, 512.0),
        "h100": AnalyticDevice(7.9e14, 3.0e12, 5e-6, 768.0),
        "h200": AnalyticDevice(7.9e14, 4.3e12, 5e-6, 768.0),
        "b200": AnalyticDevice(1.8e15, 6.9e12, 5e-6, 1024.0),
    }
)


def analytic_class(device_type: str, device_name: str = "") -> str:
    """The row of `ANALYTIC_DEVICES` for a device: by its name if that is known, else by its type.

    >>> analytic_class("cuda", "NVIDIA H100 80GB HBM3"), analytic_class("cuda"), analytic_class("x")
    ('h100', 'cuda', 'cuda')
    """
    if device_type == "cpu":
        return "cpu"
    known = [name for name in ANALYTIC_DEVICES if name not in ("cpu", "cuda")]
    return next((name for name in known if name in device_name.lower()), "cuda")


def newton_schulz_flops(rows: int, cols: int, steps: int) -> float:
    """Floating point operations of the standard iteration.

    Per step two products of ``m^2 n`` and one of ``m^3`` multiply-adds, with m <= n
    (MuonBP, section 2: ``2K(2nm^2 + m^3)``).

    >>> newton_schulz_flops(2, 3, 1)
    64.0
    """
    m, n = min(rows, cols), max(rows, cols)
    return 2.0 * steps * (2 * n * m * m + m**3)


def analytic_ms(device: AnalyticDevice, key: ShapeKey, batch: int, steps: int) -> float:
    """Milliseconds of one update of ``batch`` matrices ``(rows, cols, dtype)`` by the model."""
    rows, cols, dtype = key
    # A product fills the device to work / (work + half): one small matrix leaves it idle,
    # a batch of them does not.
    work = batch * float(min(rows, cols)) ** 2
    rate = device.flops * work / (work + device.half_batch_dim**2)
    compute = batch * newton_schulz_flops(rows, cols, steps) / rate
    # Momentum is read and written, the gradient read, the NS operand written and read per step.
    moved = batch * rows * cols * (3 * ITEM_SIZE.get(dtype, 4) + 2 * 4 * steps)
    launches = 3 * steps + 6
    return 1e3 * (compute + moved / device.bandwidth + launches * device.launch_s)
