"""The targets on a GPU, judged by what the other parts of `benchmarks.gpu` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernel_cases import H200_LAYER_FLOOR_MS

__all__ = ["Target", "table", "targets"]

_LAYER, _EXPERTS = "llama-8b layer", "128 experts 768 x 2048"
_OURS = ("ours", "ours_whole")


@dataclass(frozen=True, slots=True)
class Target:
    """``value`` None: it was not measured, which is a failure; ``passed`` None: does not apply."""

    name: str
    limit: str
    value: float | None
    passed: bool | None
    note: str = ""


def targets(folder: Path) -> list[Target]:
    """Every target, from the files of the parts in ``folder``."""
    kernels = _read(folder / "kernels_float16.json")
    accuracy = _read(folder / "accuracy.json")
    return [
        *_layer(kernels),
        _ratio(kernels, _LAYER, "ratio_to_compiled_bfloat16", 1.7, "over compiled standard"),
        _ratio(kernels, _EXPERTS, "ratio_to_standard", 3.0, "over the unbatched loop"),
        _within(accuracy),
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # the part failed, or was stopped
        return {"rows": [], "machine": {}}
    return found


def _ours(kernels: dict[str, Any], case: str) -> Iterator[dict[str, Any]]:
    for row in kernels["rows"]:
        if "median_ms" in row and row["case"] == case and row["contender"] in _OURS:
            yield row


def _best(
    kernels: dict[str, Any], case: str, value: Callable[[dict[str, Any]], float | None]
) -> tuple[float | None, str]:
    """The lowest value among dmuon's ways to run a case, and which it is: planning takes the
    cheapest by measurement."""
    found = [
        (number, row["contender"])
        for row in _ours(kernels, case)
        if (number := value(row)) is not None
    ]
    return min(found) if found else (None, "not measured")


def _layer(kernels: dict[str, Any]) -> Iterator[Target]:
    name = f"{_LAYER}, float16"
    is_h200 = "H200" in kernels["machine"].get("gpu", "")
    value, note = _best(kernels, _LAYER, lambda row: row["median_ms"] / H200_LAYER_FLOOR_MS)
    limit = f"<= 1.2 x {H200_LAYER_FLOOR_MS} ms"
    passed = value is not None and value <= 1.2
    yield Target(name, limit, value, passed if is_h200 or value is None else None, note)
    value, note = _best(kernels, _LAYER, lambda row: row["ratio_to_floor"])
    limit = "<= 1.2 x floor at the rate measured beside it"
    yield Target(name, limit, value, value is not None and value <= 1.2, note)


def _ratio(kernels: dict[str, Any], case: str, key: str, least: float, words: str) -> Target:
    value, note = _best(kernels, case, lambda row: row.get(key))
    gain = None if value is None else 1 / value
    passed = gain is not None and gain >= least
    dtype = "float16 over bfloat16" if key.endswith("bfloat16") else "float16"
    return Target(f"{case}, {dtype}", f">= {least:g} x {words}", gain, passed, note)


def _within(accuracy: dict[str, Any]) -> Target:
    rows = [row for row in accuracy["rows"] if "float16" in row["name"]]
    worst = max((row["error"] / row["expected"] for row in rows if "error" in row), default=None)
    passed = bool(rows) and all(row.get("passed", False) for row in rows)
    name = "errors in half precision"
    return Target(name, "within the table of each form", worst, passed, f"{len(rows)} rows")


def table(found: list[Target]) -> str:
    lines = ["| target | limit | measured | by | |", "|---|---|---:|---|---|"]
    for target in found:
        value = "" if target.value is None else f"{target.value:.2f}"
        verdict = {True: "pass", False: "**fail**", None: "not for this GPU"}[target.passed]
        lines.append(f"| {target.name} | {target.limit} | {value} | {target.note} | {verdict} |")
    return "\n".join(lines)
