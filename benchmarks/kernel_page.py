"""The kernel benchmark's page, in Markdown, and whether its limits are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.kernel_cases import MUSTS, Must

__all__ = ["misses", "page", "verdicts"]

_HEADINGS = (
    "contender | ms (quartiles) | / standard | / compiled | TFLOP/s | executed | / floor | error"
    " | MB"
)


def page(found: dict[str, Any]) -> str:
    """Hardware, limits, a line a case, and a table for each dtype, number of threads and set."""
    blocks = [_hardware(found), _limits(found), _summary(found)]
    tables: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in _of_contenders(found):
        tables.setdefault((row["dtype"], row["threads"], row["set"]), []).append(row)
    blocks += [_table(found, *key, rows) for key, rows in tables.items()]
    if found["left_out"]:
        blocks.append("Not in this run: " + "; ".join(found["left_out"]) + ".")
    return "\n\n".join(block for block in blocks if block)


def _of_contenders(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows that say what was tuned, or which case ended before its first row."""
    return [row for row in found["rows"] if "contender" in row]


def _hardware(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    where = machine.get("gpu") or f"{machine['cpu']} ({machine['cpu_capability']})"
    text = f"{found['date']}, {where}, torch {versions['torch']}, Python {versions['python']}"
    if versions["triton"] and machine["device"] == "cuda":
        text += f", Triton {versions['triton']}"
    if machine["bf16_emulated"]:
        text += (
            ".\n\n**This CPU has no bfloat16 instructions.** torch emulates plain bfloat16 "
            "products, tens of times slower than float32 ones; dmuon multiplies in float32 and "
            "rounds each result (`torch_rounded`). A ratio of the two is no gain of a kernel. What "
            "dmuon runs on such a CPU by itself is float32: those are the rows to read."
        )
    return text


def _summary(found: dict[str, Any]) -> str:
    """dmuon against the baseline, a line a case."""
    cases: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in _of_contenders(found):
        if "median_ms" in row:
            key = (row["dtype"], row["threads"], row["case"])
            cases.setdefault(key, {})[row["contender"]] = row
    lines = [
        "| case | dtype | threads | standard ms | ours ms | ours / standard | compiled / standard "
        "| gram / standard | ours / floor | error of ours | function / its standard |",
        "|---|---|" + "---:|" * 9,
    ]
    for (dtype, threads, case), by_name in cases.items():
        ours = by_name.get("ours")
        if ours is None:
            continue
        others = [by_name.get(name, {}).get("ratio_to_standard") for name in ("compiled", "gram")]
        cells = [
            _number(by_name["standard"].get("median_ms"), ".3g") or "left out",
            f"{ours['median_ms']:.3g}",
            *(_number(ratio, ".2f") for ratio in (ours.get("ratio_to_standard"), *others)),
            f"{ours['ratio_to_floor']:.2f}",
            f"{ours['error']:.1e}",
            _number(by_name.get("function", {}).get("ratio_to_standard_function"), ".2f"),
        ]
        lines.append(f"| {case} | {dtype} | {threads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _table(
    found: dict[str, Any], dtype: str, threads: int, name: str, rows: Sequence[dict[str, Any]]
) -> str:
    on_cuda = found["machine"]["device"] == "cuda"
    title = f"**{name}, {dtype}" + ("" if on_cuda else f", {threads} thread{'s' * (threads > 1)}")
    lines = [f"{title}**", "", f"| case | {_HEADINGS} |", "|---|---|" + "---:|" * 8]
    measured = [row for row in rows if "median_ms" in row]
    lines += map(_line, measured)
    chosen = [f"- {r['case']}: `{r['kernel']}`" for r in measured if r["contender"] == "ours"]
    reasons = dict.fromkeys(
        f"- {r['contender']} of {r['case']} left out: {r[why]}"
        for r in rows
        for why in ("left_out", "failure")
        if why in r
    )
    return "\n".join([*lines, "", *chosen, *reasons])


def _line(row: dict[str, Any]) -> str:
    start = f"| {row['case']} | {row['contender']} | "
    memory = row["peak_bytes"] if row["peak_bytes"] is not None else row["workspace_bytes"]
    cells = [
        f"{row['median_ms']:.3g} ({row['p25_ms']:.3g}-{row['p75_ms']:.3g})",
        _number(row.get("ratio_to_standard"), ".2f"),
        _number(row.get("ratio_to_compiled"), ".2f"),
        _number(row["tflops"], ".3g"),
        _number(row.get("executed_tflops"), ".3g"),
        _number(row["ratio_to_floor"], ".2f"),
        _number(row["error"], ".1e"),
        _number(None if memory is None else memory / 1e6, ".3g"),
    ]
    return start + " | ".join(cells) + " |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# ---- limits ------------------------------------------------------------------------------


def verdicts(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Must, str]]:
    """(row, limit, "kept", "missed", "shown" or "emulated") of dmuon's rows that have a limit.

    Limits are for bfloat16, and for the dtype that dmuon takes on this CPU: float32 where bfloat16
    is emulated. Elsewhere float32 is shown beside it. An emulated baseline says nothing.
    """
    machine = found["machine"]
    if machine["device"] != "cpu":
        return
    for row in found["rows"]:
        if "contender" not in row or row["dtype"] == "float16" or "left_out" in row:
            continue
        is_emulated = machine["bf16_emulated"] and row["dtype"] == "bfloat16"
        counts = row["dtype"] == "bfloat16" or machine["bf16_emulated"]
        for must in MUSTS:
            if row["contender"] != must.contender or row["set"] != "sweep":
                continue
            if row["case"] not in must.cases:
                continue
            ratio = _ratio(row, must)
            verdict = "shown"
            if ratio is None or is_emulated:
                verdict = "emulated"
            elif counts:
                verdict = "kept" if ratio <= must.ratio else "missed"
            yield row, must, verdict


def _ratio(row: dict[str, Any], must: Must) -> float | None:
    found: float | None = row.get(f"ratio_to_{must.baseline}")
    return found


def misses(found: dict[str, Any]) -> list[str]:
    """The limits that are not kept, in words."""
    return [
        f"{row['case']}, {row['dtype']}, {row['threads']} threads: {must.contender} takes "
        f"{_number(_ratio(row, must), '.2f')} x {must.baseline}, must be {must}"
        for row, must, verdict in verdicts(found)
        if verdict == "missed"
    ]


def _limits(found: dict[str, Any]) -> str:
    lines = [
        f"| {row['case']} | {row['dtype']} | {row['threads']} | {must.contender} | "
        f"{_number(_ratio(row, must), '.2f')} | {must} | {verdict} |"
        for row, must, verdict in verdicts(found)
    ]
    if not lines:
        return ""
    head = ["| case | dtype | threads | | ratio | limit | |", "|---|---|---:|---|---:|---|---|"]
    return "\n".join([*head, *lines])
