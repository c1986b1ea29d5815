"""What an owner's work costs: batched Newton-Schulz time per shape, dtype and device.

`docs/costs.md` explains where the numbers come from and how far to trust them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import PlanError

__all__ = [
    "ANALYTIC_DEVICES",
    "ORIGINS",
    "AnalyticDevice",
    "CostModel",
    "CostTable",
    "ShapeKey",
    "analytic_class",
    "canonical_key",
    "resolve_costs",
]

ShapeKey = tuple[int, int, str]  # rows, cols, dtype of the parameter

ORIGINS = ("measured", "interpolated", "estimated", "analytic", "given")
"""How a price came about; "estimated" is scaled from what was measured, beyond its range."""

_FORMAT = "dmuon cost table"
_VERSION = 1


class CostModel(Protocol):
    """The price list that planning sees."""

    @property
    def source(self) -> str:
        """Where the numbers come from, for the report."""

    def batch_ms(self, key: ShapeKey, batch: int) -> float:
        """Milliseconds of one owner-local update of ``batch`` matrices of this shape."""

    def origin(self, key: ShapeKey, batch: int) -> str:
        """One of `ORIGINS`. A model without this method is taken to say "given"."""


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


def canonical_key(key: ShapeKey) -> ShapeKey:
    """The wide form of a shape: a tall matrix is transposed before Newton-Schulz.

    >>> canonical_key((6, 4, "float32"))
    (4, 6, 'float32')
    """
    rows, cols, dtype = key
    return (min(rows, cols), max(rows, cols), dtype)


@dataclass(frozen=True)
class CostTable:
    """Costs in milliseconds: table entries first, and what follows from them.

    ``entries`` maps ``(rows, cols, dtype)`` to a mapping from batch size to milliseconds. A shape
    costs the same as its transpose. A batch between two entries is interpolated linearly; beyond
    the largest each matrix costs what it costs there. A shape without any entry is estimated by
    the ``device``'s analytic model, times the median ratio of the entries to that model; with
    ``device`` None it has no price. ``entry_origin`` says how the entries came about.

    Raises:
        PlanError: an entry is not a shape with positive batch sizes and finite times >= 0.
    """

    source: str
    entries: Mapping[ShapeKey, Mapping[int, float]] = field(default_factory=dict)
    device: AnalyticDevice | None = None
    ns_steps: int = 5
    entry_origin: str = "given"

    def __post_init__(self) -> None:
        if self.entry_origin not in ORIGINS:
            raise PlanError(
                f"{self.source}: entry_origin must be one of {ORIGINS}, found {self.entry_origin!r}"
            )
        for key, by_batch in self.entries.items():
            _check_entry(self.source, key, by_batch)

    @classmethod
    def analytic(cls, device: str = "cpu", ns_steps: int = 5) -> CostTable:
        """The FLOP model of a device class (see `ANALYTIC_DEVICES`)."""
        if device not in ANALYTIC_DEVICES:
            raise PlanError(
                f"costs='analytic:{device}': unknown device class; known: "
                + ", ".join(sorted(ANALYTIC_DEVICES))
            )
        return cls(f"analytic:{device}", device=ANALYTIC_DEVICES[device], ns_steps=ns_steps)

    # ---- prices --------------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[ShapeKey, dict[int, float]]:
        """Entries by canonical shape, batch sizes ascending; of a shape given both ways the larger
        cost counts."""
        merged = merge_slowest([{canonical_key(key): by} for key, by in self.entries.items()])
        return {key: dict(sorted(by.items())) for key, by in merged.items() if by}

    @cached_property
    def _scale(self) -> float:
        """Median ratio of the entries to the analytic model."""
        ratios = [
            ms / _analytic_ms(self.device, key, batch, self.ns_steps)
            for key, by_batch in self._known.items()
            for batch, ms in by_batch.items()
            if self.device is not None
        ]
        return statistics.median(ratios) if ratios else 1.0

    def batch_ms(self, key: ShapeKey, batch: int) -> float:
        """Milliseconds of one update of ``batch`` matrices; PlanError when it has no price."""
        return self._price(key, batch)[0]

    def origin(self, key: ShapeKey, batch: int) -> str:
        """How `batch_ms` came about: one of `ORIGINS`."""
        return self._price(key, batch)[1]

    def _price(self, key: ShapeKey, batch: int) -> tuple[float, str]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, found {batch}")
        known = self._known.get(canonical_key(key))
        if known is None:
            return self._unknown_shape(key, batch)
        if batch in known:
            return known[batch], self.entry_origin
        sizes = list(known)
        at = bisect_left(sizes, batch)
        if at == len(sizes):
            return known[sizes[-1]] / sizes[-1] * batch, "estimated"
        if at == 0:
            return self._below(key, batch, sizes[0], known[sizes[0]]), "estimated"
        low, high = sizes[at - 1], sizes[at]
        return _between(known[low], known[high], (batch - low) / (high - low)), "interpolated"

    def _below(self, key: ShapeKey, batch: int, smallest: int, ms: float) -> float:
        """A batch smaller than any entry: as the device model shrinks it, or as if padded."""
        if self.device is None:
            return ms
        ratio = _analytic_ms(self.device, key, batch, self.ns_steps)
        return ms * ratio / _analytic_ms(self.device, key, smallest, self.ns_steps)

    def _unknown_shape(self, key: ShapeKey, batch: int) -> tuple[float, str]:
        if self.device is None:
            raise PlanError(
                f"{self.source} has no cost for {key} in a batch of {batch}, and no device to "
                "estimate it by: add the shape to the table (python -m dmuon profile writes one), "
                "or pass costs='measured' or 'analytic'"
            )
        ms = _analytic_ms(self.device, key, batch, self.ns_steps)
        return self._scale * ms, "estimated" if self._known else "analytic"

    # ---- files ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives an equal table."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "source": self.source,
            "origin": self.entry_origin,
            "ns_steps": self.ns_steps,
            "device": None if self.device is None else asdict(self.device),
            "entries": [
                {
                    "rows": rows,
                    "cols": cols,
                    "dtype": dtype,
                    "ms": {str(batch): ms for batch, ms in sorted(by_batch.items())},
                }
                for (rows, cols, dtype), by_batch in sorted(self.entries.items())
            ],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "the cost table") -> CostTable:
        """The table that `to_dict` wrote; keys that it does not know are ignored.

        Raises:
            PlanError: not a cost table, one of another version, or a wrong entry; the message
                begins with ``where``.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"{where} is no cost table: found format {found!r}, expected {_FORMAT!r}; "
                "python -m dmuon profile --out PATH writes one"
            )
        if data.get("version") != _VERSION:
            raise PlanError(
                f"{where} is a cost table of version {data.get('version')!r}, this dmuon reads "
                f"version {_VERSION}: write it again with python -m dmuon profile --out PATH"
            )
        try:
            device = data["device"]
            return cls(
                source=str(data["source"]),
                entries={
                    (e["rows"], e["cols"], e["dtype"]): {int(b): ms for b, ms in e["ms"].items()}
                    for e in data["entries"]
                },
                device=None if device is None else AnalyticDevice(**device),
                ns_steps=int(data["ns_steps"]),
                entry_origin=data["origin"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{where} is damaged ({type(error).__name__}: {error}): write it again with "
                "python -m dmuon profile --out PATH"
            ) from error

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal table."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the cost table") -> CostTable:
        """The table that `to_json` wrote; PlanError that begins with ``where`` otherwise."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(
                f"{where} is no cost table: expected JSON, found {text[:40]!r} ({error}); "
                "python -m dmuon profile --out PATH writes one"
            ) from error
        return cls.from_dict(data, where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file that `load` and ``costs=path`` read."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """The table in a file; PlanError that names the file if there is none."""
        where = f"costs={os.fspath(path)!r}"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"{where} cannot be read ({error}): give the path of a cost table as "
                "python -m dmuon profile --out PATH writes it"
            ) from error
        return cls.from_json(text, where)


def _check_entry(source: str, key: object, by_batch: object) -> None:
    def is_size(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    rows, cols, dtype = key if isinstance(key, tuple) and len(key) == 3 else (0, 0, "")
    if not (is_size(rows) and is_size(cols) and dtype in ITEM_SIZE):
        raise PlanError(
            f"{source}: a shape must be (rows, cols, dtype) with dtype one of "
            f"{', '.join(ITEM_SIZE)}, found {key!r}"
        )
    if not isinstance(by_batch, Mapping):
        raise PlanError(f"{source}: {key} needs a mapping from batch size to ms: {by_batch!r}")
    for batch, ms in by_batch.items():
        number = isinstance(ms, (int, float)) and not isinstance(ms, bool)
        if not is_size(batch) or not number or not 0 <= ms < math.inf:
            raise PlanError(
                f"{source}: {key} needs batch sizes >= 1 and finite milliseconds >= 0, found "
                f"{batch!r}: {ms!r}"
            )


def _between(first: float, last: float, part: float) -> float:
    """``first`` at part 0, ``last`` at part 1, never outside of the two."""
    ms = first * (1 - part) + last * part
    return min(max(ms, min(first, last)), max(first, last))  # rounding may leave them


def merge_slowest(
    parts: Sequence[Mapping[ShapeKey, Mapping[int, float]]],
) -> dict[ShapeKey, dict[int, float]]:
    """Entries of all parts; where several have one, the largest time counts.

    >>> merge_slowest([{(4, 6, "float32"): {1: 2.5}}, {(4, 6, "float32"): {1: 2.0, 2: 3.0}}])
    {(4, 6, 'float32'): {1: 2.5, 2: 3.0}}
    """
    merged: dict[ShapeKey, dict[int, float]] = {}
    for part in parts:
        for key, by_batch in part.items():
            into = merged.setdefault(key, {})
            for batch, ms in by_batch.items():
                into[batch] = max(ms, into.get(batch, ms))
    return merged


def _analytic_ms(device: AnalyticDevice | None, key: ShapeKey, batch: int, steps: int) -> float:
    assert device is not None
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


def resolve_costs(costs: Any, device_type: str, ns_steps: int = 5) -> CostModel:
    """The cost model that the ``costs=`` argument of `dedicate_params` names.

    Raises:
        PlanError: an unknown name or type, or a file that is no cost table.
    """
    if isinstance(costs, os.PathLike):
        return CostTable.load(costs)
    if isinstance(costs, str):
        if costs == "analytic":
            return CostTable.analytic(analytic_class(device_type), ns_steps)
        if costs.startswith("analytic:"):
            return CostTable.analytic(costs.removeprefix("analytic:"), ns_steps)
        if costs.endswith(".json") or os.path.isfile(costs):
            return CostTable.load(costs)
        if costs == "measured":
            raise PlanError(
                "costs='measured' needs the devices that will train: dedicate_params measures on "
                "them. To plan elsewhere, write a table there with python -m dmuon profile "
                "--out PATH and pass its path, or pass 'analytic:<device>'"
            )
        raise PlanError(
            f"costs={costs!r} is unknown: pass 'measured', 'analytic', 'analytic:<device>' with "
            f"one of {', '.join(sorted(ANALYTIC_DEVICES))}, the path of a cost table (.json), or "
            "a CostTable"
        )
    if hasattr(costs, "batch_ms") and hasattr(costs, "source"):
        return costs  # type: ignore[no-any-return]
    raise PlanError(
        "costs must be 'measured', 'analytic', 'analytic:<device>', a path or a CostTable, found "
        f"{type(costs).__name__}"
    )
