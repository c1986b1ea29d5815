"""The JSON form of a cost table, and what is said of a file that is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from dmuon.scheduler.analytic import AnalyticDevice
from dmuon.scheduler.cost_entries import ShapeKey, SquareKey
from dmuon.types import PlanError

__all__ = ["fields_of", "parsed", "plain", "readable", "text_of"]

_FORMAT = "dmuon cost table"
_VERSION = 1
_HOW = "python -m dmuon profile --out PATH"

T = TypeVar("T")


def plain(
    *,
    source: str,
    entries: Mapping[ShapeKey, Mapping[int, float]],
    device: AnalyticDevice | None,
    ns_steps: int,
    entry_origin: str,
    kernels: Mapping[ShapeKey, Mapping[int, str]],
    squares: Mapping[SquareKey, Mapping[int, float]],
) -> dict[str, Any]:
    """The fields of a cost table as plain data for JSON; `fields_of` gives them back."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "source": source,
        "origin": entry_origin,
        "ns_steps": ns_steps,
        "device": None if device is None else asdict(device),
        "entries": [
            {"rows": rows, "cols": cols, "dtype": dtype, "ms": _by_text(by_batch)}
            for (rows, cols, dtype), by_batch in sorted(entries.items())
        ],
        "kernels": [
            {"rows": rows, "cols": cols, "dtype": dtype, "kernel": _by_text(by_batch)}
            for (rows, cols, dtype), by_batch in sorted(kernels.items())
        ],
        "squares": [
            {"m": m, "dtype": dtype, "ms": _by_text(by_batch)}
            for (m, dtype), by_batch in sorted(squares.items())
        ],
    }


def _by_text(by_batch: Mapping[int, Any]) -> dict[str, Any]:
    return {str(batch): value for batch, value in sorted(by_batch.items())}


def _by_size(by_batch: Mapping[str, Any]) -> dict[int, Any]:
    return {int(batch): value for batch, value in by_batch.items()}


def fields_of(data: Any, where: str) -> dict[str, Any]:
    """The fields of the table that `plain` wrote; keys that it does not know are ignored.

    Tables written before kernels and squares were kept have none.

    Raises:
        PlanError: not a cost table, or one of another version; the message begins with ``where``.
    """
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"{where} is no cost table: found format {found!r}, expected {_FORMAT!r}; "
            f"{_HOW} writes one"
        )
    if data.get("version") != _VERSION:
        raise PlanError(
            f"{where} is a cost table of version {data.get('version')!r}, this dmuon reads "
            f"version {_VERSION}: write it again with {_HOW}"
        )
    return readable(lambda: _fields(data), where)


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    device = data["device"]
    return {
        "source": str(data["source"]),
        "entries": {(e["rows"], e["cols"], e["dtype"]): _by_size(e["ms"]) for e in data["entries"]},
        "device": None if device is None else AnalyticDevice(**device),
        "ns_steps": int(data["ns_steps"]),
        "entry_origin": data["origin"],
        "kernels": {
            (k["rows"], k["cols"], k["dtype"]): _by_size(k["kernel"])
            for k in data.get("kernels", ())
        },
        "squares": {(s["m"], s["dtype"]): _by_size(s["ms"]) for s in data.get("squares", ())},
    }


def readable(make: Callable[[], T], where: str) -> T:
    """What ``make`` makes of a file's data; PlanError if they are not as they should be."""
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"{where} is damaged ({type(error).__name__}: {error}): write it again with {_HOW}"
        ) from error


def parsed(text: str, where: str) -> Any:
    """The data in a JSON text; PlanError that begins with ``where`` if it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise PlanError(
            f"{where} is no cost table: expected JSON, found {text[:40]!r} ({error}); "
            f"{_HOW} writes one"
        ) from error


def text_of(path: str | os.PathLike[str], where: str) -> str:
    """The text of a file; PlanError that begins with ``where`` if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{where} cannot be read ({error}): give the path of a cost table as {_HOW} writes it"
        ) from error
