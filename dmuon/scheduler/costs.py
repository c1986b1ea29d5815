"""What an owner's work costs: batched Newton-Schulz time per shape, dtype and device.

`docs/costs.md` explains where the numbers come from and how far to trust them.
"""

from __future__ import annotations

import json
import os
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from dmuon.scheduler import cost_files
from dmuon.scheduler.analytic import (
    ANALYTIC_DEVICES,
    AnalyticDevice,
    analytic_class,
    analytic_ms,
    newton_schulz_flops,
)
from dmuon.scheduler.cost_entries import (
    ORIGINS,
    ShapeKey,
    SquareKey,
    canonical_key,
    check_entry,
    check_kernels,
    check_squares,
    interpolated,
    merge_slowest,
    square_key,
)
from dmuon.types import PlanError

__all__ = [
    "ANALYTIC_DEVICES",
    "ORIGINS",
    "AnalyticDevice",
    "CostModel",
    "CostTable",
    "ShapeKey",
    "SquareKey",
    "analytic_class",
    "canonical_key",
    "merge_slowest",
    "newton_schulz_flops",
    "resolve_costs",
    "square_key",
]


class CostModel(Protocol):
    """The price list that planning sees."""

    @property
    def source(self) -> str:
        """Where the numbers come from, for the report."""

    def batch_ms(self, key: ShapeKey, batch: int) -> float:
        """Milliseconds of one owner-local update of ``batch`` matrices of this shape."""

    def origin(self, key: ShapeKey, batch: int) -> str:
        """One of `ORIGINS`. A model without this method is taken to say "given"."""

    def kernel(self, key: ShapeKey, batch: int) -> str:
        """The kernel whose time `batch_ms` is, as `KernelChoice` writes it, "" for no choice.

        A model without this method leaves the choice to the fixed rule at run time.
        """

    def square_ms(self, key: ShapeKey, batch: int) -> float | None:
        """Milliseconds of the m x m part of an update of ``batch`` matrices, m the short side.

        Under the Gram kernel of such matrices, whatever their long sides; None if unknown. A model
        without this method knows none.
        """


@dataclass(frozen=True)
class CostTable:
    """Costs in milliseconds: table entries first, and what follows from them.

    ``entries`` maps ``(rows, cols, dtype)`` to a mapping from batch size to milliseconds. A shape
    costs the same as its transpose. A batch between two entries is interpolated linearly; beyond
    the largest each matrix costs what it costs there. A shape without any entry is estimated by
    the ``device``'s analytic model, times the median ratio of the entries to that model; with
    ``device`` None it has no price. ``entry_origin`` says how the entries came about.

    ``kernels`` names, by canonical shape and batch size, the kernel that took the time of an entry,
    or would run a batch whose time was not reached;
    ``squares`` holds the time of the m x m part under the Gram kernel, by ``(m, dtype)`` and batch
    size.

    Raises:
        PlanError: an entry is not a shape with positive batch sizes and finite times >= 0, or a
            kernel is none or not by canonical shape.
    """

    source: str
    entries: Mapping[ShapeKey, Mapping[int, float]] = field(default_factory=dict)
    device: AnalyticDevice | None = None
    ns_steps: int = 5
    entry_origin: str = "given"
    kernels: Mapping[ShapeKey, Mapping[int, str]] = field(default_factory=dict)
    squares: Mapping[SquareKey, Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.entry_origin not in ORIGINS:
            raise PlanError(
                f"{self.source}: entry_origin must be one of {ORIGINS}, found {self.entry_origin!r}"
            )
        for key, by_batch in self.entries.items():
            check_entry(self.source, key, by_batch)
        check_kernels(self.source, self.kernels)
        check_squares(self.source, self.squares)

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
            ms / analytic_ms(self.device, key, batch, self.ns_steps)
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
        found = interpolated(known, batch)
        if found is None:
            smallest = next(iter(known))
            return self._below(key, batch, smallest, known[smallest]), "estimated"
        ms, origin = found
        return ms, origin or self.entry_origin

    def _below(self, key: ShapeKey, batch: int, smallest: int, ms: float) -> float:
        """A batch smaller than any entry: as the device model shrinks it, or as if padded."""
        if self.device is None:
            return ms
        ratio = analytic_ms(self.device, key, batch, self.ns_steps)
        return ms * ratio / analytic_ms(self.device, key, smallest, self.ns_steps)

    def _unknown_shape(self, key: ShapeKey, batch: int) -> tuple[float, str]:
        if self.device is None:
            raise PlanError(
                f"{self.source} has no cost for {key} in a batch of {batch}, and no device to "
                "estimate it by: add the shape to the table (python -m dmuon profile writes one), "
                "or pass costs='measured' or 'analytic'"
            )
        ms = analytic_ms(self.device, key, batch, self.ns_steps)
        return self._scale * ms, "estimated" if self._known else "analytic"

    # ---- kernels -------------------------------------------------------------------------

    def kernel(self, key: ShapeKey, batch: int) -> str:
        """The kernel of `batch_ms`; "" where none was named.

        A batch size with neither an entry nor a kernel runs as the next larger one that has any,
        beyond the largest as the largest: a kernel chosen for more work fills the device.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, found {batch}")
        names = self.kernels.get(canonical_key(key), {})
        sizes = sorted({*names, *self._known.get(canonical_key(key), ())})
        if not sizes:
            return ""
        return names.get(sizes[min(bisect_left(sizes, batch), len(sizes) - 1)], "")

    def square_ms(self, key: ShapeKey, batch: int) -> float | None:
        """Milliseconds of the m x m part, None if unknown; between and beyond as `batch_ms`.

        Below the smallest entry each matrix costs what it costs there, the least that it can be
        worth to have it run with others.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, found {batch}")
        known = dict(sorted(self.squares.get(square_key(key), {}).items()))
        if not known:
            return None
        found = interpolated(known, batch)
        if found is None:
            smallest = next(iter(known))
            return known[smallest] / smallest * batch
        return found[0]

    # ---- files ---------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives an equal table."""
        return cost_files.plain(
            source=self.source,
            entries=self.entries,
            device=self.device,
            ns_steps=self.ns_steps,
            entry_origin=self.entry_origin,
            kernels=self.kernels,
            squares=self.squares,
        )

    @classmethod
    def from_dict(cls, data: Any, where: str = "the cost table") -> CostTable:
        """The table that `to_dict` wrote; keys that it does not know are ignored.

        Raises:
            PlanError: not a cost table, one of another version, or a wrong entry; the message
                begins with ``where``.
        """
        fields = cost_files.fields_of(data, where)
        try:
            return cls(**fields)
        except ValueError as error:
            raise cost_files.damaged(where, error) from error

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal table."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the cost table") -> CostTable:
        """The table that `to_json` wrote; PlanError that begins with ``where`` otherwise."""
        return cls.from_dict(cost_files.parsed(text, where), where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file that `load` and ``costs=path`` read."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """The table in a file; PlanError that names the file if there is none."""
        where = f"costs={os.fspath(path)!r}"
        return cls.from_json(cost_files.text_of(path, where), where)


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
