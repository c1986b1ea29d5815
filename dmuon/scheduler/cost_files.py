"""The JSON form of a cost table, and what is said of a file that is none."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from dmuon.scheduler.analytic import AnalyticDevice
from dmuon.scheduler.cost_entries import ShapeKey, SquareKey
from dmuon.scheduler.json_files import (
    cut,
    different,
    each,
    parse,
    read_text,
    real,
    record,
    text,
    whole,
)
from dmuon.types import PlanError

__all__ = ["MOST_CHARACTERS", "damaged", "fields_of", "parsed", "plain", "text_of"]

_FORMAT = "dmuon cost table"
_VERSION = 1
MOST_CHARACTERS = 16 << 20  # some 10,000 shapes
_MOST_STEPS = 100
_SIZE = re.compile("[1-9][0-9]{0,6}")
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


def fields_of(data: Any, where: str) -> dict[str, Any]:
    """The fields of the table that `plain` wrote; keys that it does not know are ignored.

    Tables written before kernels and squares were kept have none.

    Raises:
        PlanError: not a cost table, or one of another version; the message begins with ``where``.
    """
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"{where} is no cost table: found format {cut(repr(found))}, expected {_FORMAT!r}; "
            f"{_HOW} writes one"
        )
    if data.get("version") != _VERSION:
        found = cut(repr(data.get("version")))
        raise PlanError(
            f"{where} is a cost table of version {found}, this dmuon reads version {_VERSION}: "
            f"write it again with {_HOW}"
        )
    try:
        return _fields(data)
    except ValueError as error:
        raise damaged(where, error) from error


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    record(data, "", "source", "origin", "ns_steps", "device", "entries")
    entries = each(data, "entries", "", lambda e, at: (_shape(e, at), _by_size(e, "ms", at, real)))
    kernels = each(data, "kernels", "", _kernels) if "kernels" in data else ()
    squares = each(data, "squares", "", _square) if "squares" in data else ()
    different((shape for shape, _ in entries), "the shapes of entries")
    different((shape for shape, _ in kernels), "the shapes of kernels")
    different((side for side, _ in squares), "the short sides of squares")
    return {
        "source": text(data, "source", ""),
        "entries": dict(entries),
        "device": None if data["device"] is None else _device(data["device"], "device"),
        "ns_steps": whole(data, "ns_steps", "", 0, _MOST_STEPS),
        "entry_origin": text(data, "origin", ""),
        "kernels": dict(kernels),
        "squares": dict(squares),
    }


def _shape(data: Any, at: str) -> ShapeKey:
    record(data, at, "rows", "cols", "dtype")
    return whole(data, "rows", at, 1), whole(data, "cols", at, 1), text(data, "dtype", at)


def _kernels(data: Any, at: str) -> tuple[ShapeKey, dict[int, str]]:
    return _shape(data, at), _by_size(data, "kernel", at, text)


def _square(data: Any, at: str) -> tuple[SquareKey, dict[int, float]]:
    record(data, at, "m", "dtype")
    return (whole(data, "m", at, 1), text(data, "dtype", at)), _by_size(data, "ms", at, real)


def _by_size(data: Any, name: str, at: str, take: Callable[[Any, Any, str], T]) -> dict[int, T]:
    """Something by batch size, which JSON has as a text."""
    by_text = record(record(data, at, name)[name], f"{at}.{name}")
    for size in by_text:
        if not _SIZE.fullmatch(size):
            raise PlanError(f"{at}.{name}: expected batch sizes such as '16', found {cut(size)!r}")
    return {int(size): take(by_text, size, f"{at}.{name}") for size in by_text}


def _device(data: Any, at: str) -> AnalyticDevice:
    names = [field.name for field in fields(AnalyticDevice)]
    record(data, at, *names)
    return AnalyticDevice(**{name: real(data, name, at, high=math.inf) for name in names})


def damaged(where: str, error: ValueError) -> PlanError:
    """The error for a cost table with a wrong entry."""
    return PlanError(f"{where} is damaged ({cut(str(error))}): write it again with {_HOW}")


def parsed(content: str, where: str) -> Any:
    """The data in a JSON text; PlanError that begins with ``where`` if it is none."""
    try:
        return parse(content, MOST_CHARACTERS)
    except PlanError as error:
        raise PlanError(f"{where} is no cost table: {error}; {_HOW} writes one") from error


def text_of(path: str | os.PathLike[str], where: str) -> str:
    """The text of a file; PlanError that begins with ``where`` if there is none."""
    try:
        return read_text(path, MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{where} cannot be read ({error}): give the path of a cost table as {_HOW} writes it"
        ) from error
