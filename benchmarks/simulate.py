"""How far is `python -m dmuon simulate` from what was measured, here and elsewhere?

``python -m benchmarks.simulate --json out.json`` (docs/simulate.md) profiles this machine once per
number of ranks, simulates the cases of `benchmarks.end_to_end` from that and the rate of the links,
and compares with the committed rows; then published rows (`benchmarks.published`), and up to 4,096
ranks on paper. Nothing is fitted to a row. About ten minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import published
from benchmarks.demo import COLORS, GPT
from benchmarks.end_to_end import CASES, PERIODS, Case
from benchmarks.nodes import bits_per_s
from benchmarks.results import Benchmark, Cases, Row, picture, read_rows, table
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.network import job_of
from dmuon.scheduler.select import collect
from dmuon.scheduler.shards import evenly_sharded
from dmuon.scheduler.simulate import (
    Job,
    Load,
    Machine,
    Program,
    adamw,
    block_step,
    full_step,
    owners_step,
    redundant_step,
    simulate,
)  # fmt: skip
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.tools.simulate import Setting, enough
from dmuon.types import Layout

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
RESULTS = Path(__file__).parent / "results"
PAYLOAD = 1448 / 1514  # of a packet on Ethernet
LOOPBACK = 1e15  # there is no wire inside a machine: its cores do all of it

# The layout that an optimizer of a case runs in, and what it executes.
RAN: dict[str, tuple[Layout, Program]] = {
    "AdamW": (Layout.SHARDED, adamw),
    "gather-then-compute": (Layout.SHARDED, redundant_step),
    "dmuon": (Layout.SHARDED, full_step),
    "dmuon dedicated": (Layout.DEDICATED, owners_step),
    "dmuon P=5": (Layout.SHARDED, full_step),
    "dmuon P=inf": (Layout.SHARDED, block_step),
    "torch.optim.Muon": (Layout.REPLICATED, redundant_step),
}  # `reduce_to_owner` was measured before its owners published together


def model() -> torch.nn.Module:
    """What the cases train, for ``profile --model benchmarks.simulate:model``."""
    with torch.device("meta"):
        return GPT(CASES[0].model)


@cache
def specs() -> ModelSpecs:
    return collect(model(), allow_meta=True)


# ---- profiles ------------------------------------------------------------------------------


def profiled(world: int, layout: str) -> list[Row]:
    """What so many ranks find who work on this machine at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/costs.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={world}", "-m", "dmuon", "profile", "--device", "cpu",
                   "--model", "benchmarks.simulate:model", "--layout", layout, "--threads", "1",
                   "--fresh", "--cache-dir", folder, "--out", path]  # fmt: skip
        command += ["--blocks", "2,4,8"] if layout == "sharded" else []
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env=ONE_THREAD)  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"profile failed: {done.stderr[-2000:]}")
        row = {"set": "profile", "world": world, "layout": layout}
        return [row | {"table": Path(path).read_text()}]


def tables_of(rows: Sequence[Row]) -> dict[tuple[int, str], CostTable]:
    found = [row for row in rows if row.get("set") == "profile"]
    return {(row["world"], row["layout"]): CostTable.from_json(row["table"]) for row in found}


# ---- emulated nodes ------------------------------------------------------------------------


def job(case: Case, layout: Layout, profiles: dict[tuple[int, str], CostTable]) -> Job:
    """A case of `benchmarks.end_to_end` as it is simulated."""
    if case.around == "DDP" and layout is Layout.SHARDED:
        layout = Layout.REPLICATED
    is_pair = case.around == "HSDP"
    shape, axes = (
        ((case.nodes, case.each), ("replicate", "shard"))
        if is_pair
        else ((case.world,), ("shard",))
    )
    topology = Topology(shape, axes, case.each)
    costs = profiles[case.world, "dedicated" if layout.keeps_state_at_owners else "sharded"]
    shards = evenly_sharded(specs(), topology, whole=layout is not Layout.SHARDED)
    limits = None if layout.keeps_state_at_owners else shards.limits(None)
    plan = solve(specs(), topology, costs, layout=layout, limits=limits)
    network = LOOPBACK if case.rate is None else PAYLOAD * bits_per_s(case.rate) / 8 / case.each
    assert costs.rates is not None
    machine = Machine(costs.rates, LOOPBACK, network, is_cpu=True)
    how = {"shards_rest": case.around != "DDP"}
    load = Load(case.tokens, case.model.context)
    return job_of(plan, shards, costs, machine, load, None, **how)


def predicted(
    case: Case, name: str, profiles: dict[tuple[int, str], CostTable]
) -> tuple[float, float]:
    """Milliseconds of a training step, and of the optimizer in it."""
    layout, program = RAN[name]
    of = job(case, layout, profiles)
    found = simulate(of, program)
    ms, optimizer_ms = found.ms, found.optimizer_ms
    period = PERIODS.get(name, 1)
    if program is full_step and period > 1:
        block = simulate(of, block_step)
        ms += (1 - 1 / period) * (block.ms - ms)
        optimizer_ms += (1 - 1 / period) * (block.optimizer_ms - optimizer_ms)
    return ms, optimizer_ms


def emulated(profiles: dict[tuple[int, str], CostTable]) -> list[Row]:
    """Each row of the emulated nodes that was run, beside its prediction."""
    measured = read_rows(str(RESULTS / "end_to_end.json"))
    cases = {case.name: case for case in CASES}
    found: dict[tuple[str, str], Row] = {}
    for row in measured:
        name = row["optimizer"]
        if name in RAN and row["set"] in cases:
            ms, optimizer_ms = predicted(cases[row["set"]], name, profiles)
            found[row["set"], name] = {
                "set": "emulated", "case": row["set"], "optimizer": name,
                "measured_ms": row["mean_ms"], "predicted_ms": ms,
                "measured_step_ms": row["step_ms"], "predicted_step_ms": optimizer_ms,
            }  # fmt: skip
    for (case, _), row in found.items():
        base = found[case, "AdamW"]
        for kind in ("measured", "predicted"):
            row[f"{kind}_over_AdamW"] = row[f"{kind}_ms"] / base[f"{kind}_ms"]
            row[f"{kind}_more_ms"] = row[f"{kind}_ms"] - base[f"{kind}_ms"]
    return [*found.values()]


def error(row: Row, of: str = "ms") -> float:
    """Of a prediction, relative to what was measured."""
    return float(row[f"predicted_{of}"] / row[f"measured_{of}"] - 1)


def quantile(errors: Sequence[float], share: float) -> float:
    """Of their sizes: so many are at most as large."""
    found = sorted(map(abs, errors))
    return found[math.ceil(share * len(found)) - 1]


def difference(row: Row) -> float:
    """The error of what an optimizer takes more than AdamW, relative to AdamW's step."""
    return float(row["predicted_more_ms"] - row["measured_more_ms"]) / (
        row["measured_ms"] - row["measured_more_ms"]
    )


# ---- advice --------------------------------------------------------------------------------

# Layouts that train alike, by the case and optimizer that was measured.
LAYOUTS = (("FSDP2", "dmuon"), ("HSDP", "dmuon"), ("FSDP2", "dmuon dedicated"), ("DDP", "dmuon"),
           ("DDP", "dmuon dedicated"))  # fmt: skip


PERIODS_MEASURED = (1.0, 2.0, 5.0, 20.0)


def advised(found: Sequence[Row], profiles: dict[tuple[int, str], CostTable]) -> list[Row]:
    """For each setting that was measured in several ways, the way that is predicted to be fastest
    beside the one that was; layouts with P = 1 first, then the period that `enough` advises."""
    of = {(row["case"], row["optimizer"]): row for row in found}
    settings: dict[str, list[tuple[str, Row]]] = {}
    for (case, optimizer), row in of.items():
        nodes, rate, around, tokens, _ = case.split()
        if (around, optimizer) in LAYOUTS:
            name = f"{nodes} {rate} {tokens} tokens"
            settings.setdefault(name, []).append((f"{around}, {optimizer}", row))
    rows = []
    for name, ways in settings.items():
        if len(ways) > 1:
            chosen = min(ways, key=lambda way: float(way[1]["predicted_ms"]))
            best = min(ways, key=lambda way: float(way[1]["measured_ms"]))
            rows.append(_advice(name, "layout", chosen, best))
    for case in CASES:
        if (case.name, "dmuon P=inf") in of:
            full, block = of[case.name, "dmuon"], of[case.name, "dmuon P=inf"]
            planned = job(case, Layout.SHARDED, profiles)
            steps = {"adamw": simulate(planned, adamw), "Muon": simulate(planned)}
            period = enough(Setting(case.name, planned, 1.0, 0, steps), PERIODS_MEASURED)[0].period
            ms = full["measured_ms"] / period + block["measured_ms"] * (1 - 1 / period)
            mixed = f"P = {period:g}", {"measured_ms": ms}
            rows.append(_advice(case.name, "period", mixed, ("block steps", block)))
    return rows


def _advice(name: str, what: str, chosen: tuple[str, Row], best: tuple[str, Row]) -> Row:
    ratio = chosen[1]["measured_ms"] / best[1]["measured_ms"]
    return {
        "set": "advice", "case": name, "what": what, "advised": chosen[0], "best": best[0],
        "measured_ms": chosen[1]["measured_ms"], "best_ms": best[1]["measured_ms"], "ratio": ratio,
        "passed": ratio <= 1.05,
    }  # fmt: skip


# ---- on paper ------------------------------------------------------------------------------

SCALED = {
    "llama3-8b": (8, 32, 128, 512, 1024, 4096),
    "llama3-405b": (512, 1024, 4096),
    "deepseek-v3": (512, 1024, 4096),
}
EXPERTS = "--ep 64 --active 8"
WAYS = {
    "FSDP2": "--mesh {nodes}x8",
    "FSDP2, P = 5": "--mesh {nodes}x8 --period 5",
    "HSDP, shards on 64 ranks": "--mesh {replicas}x64 --axes replicate,shard --ranks-per-node 8",
    "dedicated": "--mesh {nodes}x8 --axes node,gpu --layout dedicated",
    "gather-then-compute": "--mesh {nodes}x8 --against naive",
}


# Ranks would keep 394, 87 and 119 GiB; experts are nobody's to gather, or not yet `dedicated`.
LEFT_OUT = {
    "llama3-405b": ("dedicated", "HSDP, shards on 64 ranks"),
    "deepseek-v3": ("dedicated", "HSDP, shards on 64 ranks", "gather-then-compute"),
}


def scaled(model: str, world: int, way: str) -> list[Row]:
    """What Muon costs on so many H100 with a network card of 400 Gbit/s each; with the seconds and
    memory that the command takes. None where the mesh or the layout does not exist."""
    if way in LEFT_OUT.get(model, ()) or ("replicas" in WAYS[way] and world < 128):
        return []
    options = WAYS[way].format(nodes=world // 8, replicas=world // 64)
    options += f" {EXPERTS}" * (model == "deepseek-v3")
    command = [sys.executable, "-m", "dmuon", "simulate", "--model", model, *options.split(),
               "--costs", "analytic:h100", "--nic", "400Gb/gpu", "--dtype", "float32",
               "--param-dtype", "bfloat16", "--json", "-"]  # fmt: skip
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ONE_THREAD)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    steps = found["steps"]
    muon = steps.get("naive") or steps.get("Muon") or steps["full step"]
    base = steps["adamw"]["ms"] if "adamw" in steps else None
    row: Row = {
        "set": "scale", "model": model, "world": world, "way": way,
        "ms": muon["ms"] if "naive" in steps else found["ms"], "adamw_ms": base,
        "optimizer_ms": muon["optimizer_ms"], "seconds": time.monotonic() - begin,
        "peak_bytes": usage.ru_maxrss << 10,
    }  # fmt: skip
    return [row]


WALKS = {
    "walk_llama": "--model llama3-8b --mesh 4x8 --costs analytic:h100 --nic 400Gb/node "
    "--dtype float32 --param-dtype bfloat16 --advise",
}


def walked(name: str) -> list[Row]:
    """What the command of a question on the page prints."""
    command = [sys.executable, "-m", "dmuon", "simulate", *WALKS[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ONE_THREAD)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return [{"set": "walk", "walk": name, "command": WALKS[name], "lines": lines}]


# ---- tables --------------------------------------------------------------------------------


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.get("set") == name]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Markdown by name, for docs/simulate.md."""
    return {
        "emulated": _errors(_of(rows, "emulated")),
        "scale": _scales(_of(rows, "scale")),
        "published": _published(_of(rows, "published")),
        **{row["walk"]: _walk(row["lines"]) for row in _of(rows, "walk")},
    }


def _walk(lines: Sequence[str]) -> str:
    """What a command printed, without the explanations of single settings."""
    settings = next(place for place, text in enumerate(lines) if text.startswith(" setting "))
    first = lines.index("", settings)
    last = next(place for place, text in enumerate(lines) if text.startswith("With costs "))
    return "\n".join(["```text", *lines[: first + 1], *lines[last:], "```"])


def _errors(found: Sequence[Row]) -> str:
    """By what ran where: how far predictions are off."""
    groups: dict[str, list[Row]] = {"all": [*found]}
    for row in found:
        groups.setdefault(row["optimizer"], []).append(row)
    lines = []
    for name, some in groups.items():
        totals = [error(row) for row in some]
        cells = [f"{quantile(totals, share):.0%}" for share in (0.5, 0.9, 1)]
        ratios = [difference(row) for row in some if row["optimizer"] != "AdamW"]
        shown = [f"{100 * quantile(ratios, share):.1f}" for share in (0.5, 0.9)] if ratios else []
        lines.append((name, len(some), *cells, *(shown or ("", ""))))
    headings = ("training step of", "rows", "median error", "90% within", "largest",
                "more than AdamW: median error, % of its step", "90% within")  # fmt: skip
    return table(headings, lines)


def _scales(found: Sequence[Row]) -> str:
    """Percent over AdamW, by model and number of ranks."""
    of = {(row["model"], row["world"], row["way"]): row for row in found}
    lines = []
    for model, worlds in SCALED.items():
        for world in worlds:
            base = of[model, world, "FSDP2"]["adamw_ms"]
            cells = []
            for way in WAYS:
                row = of.get((model, world, way))
                over = row["ms"] / (row["adamw_ms"] or base) - 1 if row else None
                cells.append("" if over is None else f"{over:+.1%}")
            lines.append((model, world, *cells))
    return table(("", "ranks", *WAYS), lines)


def _published(found: Sequence[Row]) -> str:
    """How far predictions of others' rows are off."""
    told = published.summary(found)
    lines = [
        ("Newton-Schulz, optimizer, difference", told["counted"], told["median"], told["largest"]),
        ("products of large matrices", told["products"], told["products, median"],
         told["products, largest"]),
    ]  # fmt: skip
    shown = [(name, n, f"{middle:.0%}", f"{most:.0%}") for name, n, middle, most in lines]
    factor = f"{told['host-bound factor']:.1f} x"
    shown.append(("limited by the host", told["host-bound"], "", factor))
    return table(("tier A", "rows", "median error", "largest"), shown)


def draw(rows: Sequence[Row], path: str) -> None:
    """Predicted against measured; and what Muon costs from 8 to 4,096 ranks."""
    with picture(path, 1, 2, (9.5, 3.8), share_x="none") as (_, (left, right)):
        for around, color in (("FSDP2", COLORS["dmuon"]), ("HSDP", "#8b5cf6"), ("DDP", "#f59e0b")):
            found = [row for row in _of(rows, "emulated") if f" {around} " in row["case"]]
            both = (
                [row[f"{kind}_ms"] / 1e3 for row in found] for kind in ("measured", "predicted")
            )
            left.scatter(*both, s=14, color=color, label=around)
        ends = (0.6, 30)
        left.plot(ends, ends, color="#6b7280", lw=0.8)
        left.fill_between(
            ends, [0.8 * x for x in ends], [1.2 * x for x in ends], alpha=0.12, color="#6b7280"
        )
        left.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
        for way in WAYS:
            found = [r for r in _of(rows, "scale") if r["way"] == way and r["model"] == "llama3-8b"]
            base = {r["world"]: r["adamw_ms"] for r in _of(rows, "scale")
                    if r["model"] == "llama3-8b" and r["way"] == "FSDP2"}  # fmt: skip
            over = [100 * (r["ms"] / (r["adamw_ms"] or base[r["world"]]) - 1) for r in found]
            right.plot([r["world"] for r in found], over, marker="o", ms=3, label=way)
        right.axhline(0, color="#d1d5db", lw=0.8)
        right.set(xscale="log", yscale="symlog", xlabel="ranks (llama3-8b)", ylabel="over AdamW, %")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=7.5)


# ---- the command ---------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row in words."""
    values = (f"{key} {value}" for key, value in row.items() if key not in ("table", "name"))
    return ", ".join(values)[:220]


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    for world in sorted({case.world for case in CASES}):
        for layout in ("sharded", "dedicated"):
            yield f"profile {world} {layout}", partial(profiled, world, layout)
    yield "compare", partial(compared, known)
    for name in WALKS:
        yield name, partial(walked, name)
    for model, worlds in SCALED.items():
        for world, way in product(worlds, WAYS):
            yield f"scale {model} {world} {way}", partial(scaled, model, world, way)


def compared(known: Sequence[Row]) -> list[Row]:
    """What was measured and published beside predictions, from the profiles among ``known``."""
    profiles = tables_of(known)
    found = emulated(profiles)
    return [*found, *advised(found, profiles), *published.rows()]


BENCHMARK = Benchmark(__doc__, cases, line, tables=tables, draw=draw)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
