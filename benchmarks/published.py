"""How far is the simulator from what others have published? docs/simulate.md tells.

`published.json` has the rows as data: what was measured, where, on which device, and of what a
prediction is made. Constants are those of `ANALYTIC_DEVICES` and `Machine.of` for all rows; which
form, kernels and passes others ran are parameters of a row. No row is fitted.

A row's ``groups`` are executed one after another, each "before" (bytes that passes read and write),
"gather", "work", "scatter", "after", with the exchanges of up to two groups under the work of
others, as dion's runtime does it. "work" is ``[form, how many, rows, columns, steps, triangles]``,
or ``["product", how many, m, n, k, triangles]``; an exchange is ``[op, bytes, ranks, near]``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from dmuon.scheduler.costs import ANALYTIC_DEVICES, AnalyticDevice, CostTable, nic_bandwidth
from dmuon.scheduler.simulate import Exchange, Group, Machine, Run, collective
from dmuon.scheduler.topology import Topology

Devices = Mapping[str, AnalyticDevice]
PUBLISHED = Path(__file__).with_suffix(".json")
COUNTED = ("newton-schulz", "optimizer", "difference")
MS = {"ms": 1.0, "s": 1e3}
# What a sensitivity changes, each for the worse, and how much.
CONSTANTS = ("rate of products", "HBM", "link", "network card", "host call")
CHANGE = 0.1


@cache
def document() -> dict[str, Any]:
    """``published.json``: "rows", "missed" with reasons by name, and "host", how calls were
    counted."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text())
    return found


# ---- a prediction ------------------------------------------------------------------------


def worse(device: AnalyticDevice, constant: str) -> AnalyticDevice:
    """A device with one of `CONSTANTS` a tenth worse."""
    less = 1 / (1 + CHANGE)
    changed: dict[str, Any] = {
        "rate of products": {"flops": less * device.flops},
        "HBM": {"bandwidth": less * device.bandwidth},
        "link": {"link": less * device.link},
        "network card": {"network": less * device.network},
        "host call": {"launch_s": device.launch_s / less},
    }[constant]
    return replace(device, **changed)


def machine_of(device: AnalyticDevice, calls: float = 1.0) -> Machine:
    """With calls of the host that take so many times as long."""
    found = Machine.of(CostTable("published", device=device), Topology.flat(1))
    return replace(found, rates=replace(found.rates, call_s=calls * found.rates.call_s))


def work_ms(device: AnalyticDevice, entry: Sequence[Any]) -> float:
    """Milliseconds of an entry of "work"."""
    form, count, rows, cols, depth, triangles = entry
    device = replace(device, triangles=triangles)
    if form == "standard":
        return device.standard_ms(rows, cols, count, depth)
    if form == "gram":
        return device.gram_ms(rows, cols, count, depth)
    if form == "standard one by one":
        return float(count * device.standard_ms(rows, cols, 1, depth))
    if form in ("passes", "operations"):  # so many bytes, or operations at full rate
        return float(1e3 * count / (device.bandwidth if form == "passes" else device.flops))
    # One of [rows, depth] by [depth, cols], as `AnalyticDevice` prices those of Newton-Schulz.
    area = float(rows * cols)
    operations = 2 * area * depth * (0.5 if triangles else 1.0)
    moved = 2 * (area + depth * (rows + cols))
    rate = device.flops * area / (area + device.half_batch_dim**2)
    each = max(operations / rate, moved / device.bandwidth)
    return 1e3 * count * (each + device.launch_s)


def exchange_of(purpose: str, given: Sequence[Any]) -> Exchange:
    op, nbytes, ranks, near = given
    return collective(purpose, op, nbytes, Group(ranks, near), is_gloo=False)


def _task(
    run: Run, device: AnalyticDevice, group: Mapping[str, Any], calls: float
) -> Iterator[None]:
    """A group, up to where it waits."""
    passes = run.machine.passes_ms
    run.compute("before", "elementwise", passes(group.get("before", 0)), calls)
    for exchange in ("gather", "scatter"):
        sent = -1
        if exchange in group:
            sent = run.send(exchange, exchange_of(exchange, group[exchange]))
            yield
        if sent >= 0:
            run.wait(sent)
        if exchange == "gather":
            ms = sum(work_ms(device, entry) for entry in group.get("work", ()))
            run.compute("work", "Newton-Schulz", ms, calls)
    run.compute("after", "elementwise", passes(group.get("after", 0)), calls)


def executed_ms(
    device: AnalyticDevice, machine: Machine, groups: Sequence[Mapping[str, Any]], calls: int = 0
) -> float:
    """Milliseconds of groups, with so many calls of the host in equal parts."""
    timeline = Run(machine, 1)
    tasks = [_task(timeline, device, group, calls / (3 * len(groups))) for group in groups]
    for turn in range(len(tasks) + 2):
        for task in tasks[max(0, turn - 2) : turn + 1][::-1]:
            next(task, None)
    return float(timeline.now.max())


def device_of(row: Row, devices: Devices) -> AnalyticDevice:
    device = devices[row["device"]]
    if "nic" in row:
        device = replace(device, network=nic_bandwidth(row["nic"], row["per_node"]))
    return device


def predicted(row: Row, devices: Devices = ANALYTIC_DEVICES) -> tuple[float, float | None]:
    """In the unit of a row: its prediction, and that of the null model, for which Muon is free."""
    device = device_of(row, devices)
    return _predicted(row, device, machine_of(device))


def _predicted(row: Row, device: AnalyticDevice, machine: Machine) -> tuple[float, float | None]:
    kind, unit = row["kind"], MS.get(row["unit"], 1.0)
    if kind == "exchange":
        exchanges = [group[way] for group in row["groups"] for way in ("gather", "scatter")]
        return sum(machine.ms(exchange_of("", each)) for each in exchanges), None
    ms = executed_ms(device, machine, row["groups"], row.get("calls", 0))
    if "period" in row:  # MuonBP: of several steps all but one are block steps
        ms += (1 - 1 / row["period"]) * (executed_ms(device, machine, row["block"]) - ms)
    if "minus" in row:  # what the other optimizer does
        ms -= executed_ms(device, machine, row["minus"])
    if kind == "step":
        base = 1e3 * row["flops"] / machine.rates.products
        return (base + ms) / unit, base / unit
    if kind == "ratio" and "over" in row:
        return executed_ms(device, machine, row["over"]) / ms, None
    if kind == "ratio":
        return 1 + ms / row["base_ms"], 1.0
    if kind == "rate":  # operations of Newton-Schulz by the time of a step, TFLOP/s
        return row["operations"] / ms / 1e9, None
    return ms / unit, 0.0 if kind == "difference" else None


def sensitivity(row: Row, devices: Devices = ANALYTIC_DEVICES) -> tuple[str, float]:
    """The constant that matters most, and what a tenth worse does to a prediction, as a share."""
    value, device = predicted(row, devices)[0], device_of(row, devices)
    effects = {}
    for name in CONSTANTS:
        changed = worse(device, name)
        is_host = name == "host call"  # of which the launch, in `changed`, is a part
        machine = machine_of(device if is_host else changed, 1 + CHANGE * is_host)
        effects[name] = _predicted(row, changed, machine)[0] / value - 1
    name = max(effects, key=lambda each: abs(effects[each]))
    return name, effects[name]


def rows(devices: Devices = ANALYTIC_DEVICES) -> list[Row]:
    """Each row of `published.json` beside its prediction; those that cannot be predicted as they
    are. "counted" are rows of tier A of `COUNTED` kinds that no constant comes from; of those whose
    host is the limit "factor" counts."""
    found = []
    for given in document()["rows"]:
        row: Row = {"set": "published", "address": document()["addresses"][given["source"]]}
        names = ("name", "tier", "kind", "unit", "published", "device", "unknowns", "assumption")
        row |= {name: given.get(name) for name in names}
        if given["kind"] not in ("not predicted", "headline"):
            value, null = predicted(given, devices)
            name, effect = sensitivity(given, devices)
            factor = max(value / row["published"], row["published"] / value)
            row |= {
                "predicted": value, "null": null, "error": value / row["published"] - 1,
                "factor": factor, "sensitivity": name, "effect": effect,
                "calibrates": given.get("calibrates", False),
                "host_bound": "calls" in given and given.get("host_bound", False),
            }  # fmt: skip
            is_tier = row["tier"] in ("A", "A-") and row["kind"] in COUNTED
            row["counted"] = is_tier and not row["calibrates"]
        found.append(row)
    return found


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Of tier A: how many rows count, the median and the largest of their errors, how many are
    within 15 and 30%; of rows that the host limits, how many and the largest factor."""
    counted = [row for row in found if row.get("counted") and not row["host_bound"]]
    hosts = [row["factor"] for row in found if row.get("counted") and row["host_bound"]]
    errors = [abs(row["error"]) for row in counted]
    others = [row for row in found if row["kind"] == "product" and row["tier"] == "A"]
    products = [abs(row["error"]) for row in others if not row["calibrates"]]
    return {
        "counted": len(counted), "median": statistics.median(errors), "largest": max(errors),
        "within 15%": sum(error <= 0.15 for error in errors),
        "within 30%": sum(error <= 0.3 for error in errors),
        "host-bound": len(hosts), "host-bound within 2x": sum(factor <= 2 for factor in hosts),
        "host-bound factor": max(hosts), "products": len(products),
        "products, median": statistics.median(products), "products, largest": max(products),
    }  # fmt: skip


def missed(found: Sequence[Row]) -> list[str]:
    """Rows of tier A beyond 30%, or twice where the host is the limit; also of products and
    exchanges, that do not count."""
    can = [row for row in found if "predicted" in row and row["tier"] in ("A", "A-")]
    return sorted(
        row["name"]
        for row in can
        if (row["factor"] > 2 if row["host_bound"] else abs(row["error"]) > 0.3)
    )
