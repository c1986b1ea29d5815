"""How far from the optimum are plans, and how long do they take?

``python -m benchmarks.scheduler --json out.json`` plans every preset with each solver, under the
analytic costs of a GPU. ``gap`` is to the best lower bound that any solver proved; ``lpt_elements``
and ``lpt_cost`` are longest-processing-time on the number of elements and on the cost of a single
matrix: what is usual. ``seconds`` are CPU time. Then large models (`LARGE`), each in a process of
its own for its peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.results import Benchmark, Cases, Row, table
from dmuon.catalogue import PRESETS, model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.problem import build_problem, longest_first
from dmuon.scheduler.solve import price_rows, solve
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, OwnerLimits, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm

OWNERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SOLVERS = ("round_robin", "lpt_elements", "lpt_cost", "greedy", "milp")
COSTS = "h200"
GPUS = 8  # per node


def of_shapes(shapes: Iterable[tuple[int, int]]) -> ModelSpecs:
    """A model of plain weights."""
    parameters, matrices = [], []
    for i, (rows, cols) in enumerate(shapes):
        parameters.append(ParameterSpec(f"p{i}", (rows, cols), "float32", Algorithm.MUON, "2-D"))
        matrices.append(MatrixSpec(f"p{i}", i, rows, cols, "float32"))
    return ModelSpecs(tuple(parameters), tuple(matrices))


def distinct(count: int) -> ModelSpecs:
    return of_shapes([(64 + 8 * (i % 61), 64 + 8 * i) for i in range(count)])


def many(count: int) -> ModelSpecs:
    shapes = ((512, 512), (512, 2048), (256, 512), (1024, 4096))
    return of_shapes([shapes[i % 4] for i in range(count)])


# Name: the model, owners, and the most seconds and bytes that planning it may take.
LARGE: dict[str, tuple[Callable[[], ModelSpecs], int, float, int]] = {
    "1,000 distinct shapes": (lambda: distinct(1_000), 64, 10.0, 1 << 30),
    "3,000 distinct shapes": (lambda: distinct(3_000), 256, 15.0, 1 << 30),
    "100,000 matrices of 4 shapes": (lambda: many(100_000), 64, 15.0, 1 << 30),
    "moe-60x256": (lambda: model_specs("moe-60x256"), 4096, 30.0, 2 << 30),
}


def planned(specs: ModelSpecs, owners: int, costs: CostTable, solver: str) -> Row:
    """One plan and what it claims."""
    topology = Topology.flat(owners, ranks_per_node=min(GPUS, owners))
    begin = time.process_time()
    plan = solve(specs, topology, costs, solver=solver)
    row: Row = {"solver": solver, "seconds": time.process_time() - begin}
    row["imbalance"] = plan.makespan_ms / statistics.fmean(plan.loads_ms) - 1
    same = ("makespan_ms", "lower_bound_ms", "status")
    return row | {name: getattr(plan, name) for name in same}


def by_weight(specs: ModelSpecs, owners: int, costs: CostTable) -> list[Row]:
    prices = {row.key: row.ms for row in price_rows(specs, costs, PlannerOptions().max_batch)}
    problem = build_problem(specs.matrices, owners, OwnerLimits(), prices)
    elements = [shape.key[0] * shape.key[1] for shape in problem.shapes]
    single = [int(shape.ticks[1]) for shape in problem.shapes]
    rows = []
    for name, weights in (("lpt_elements", elements), ("lpt_cost", single)):
        begin = time.process_time()
        tables = [np.arange(k.count + 1) * w for k, w in zip(problem.shapes, weights, strict=True)]
        counts = longest_first(problem, 1, tables, np.zeros(owners, np.int64))
        seconds = time.process_time() - begin
        assert counts is not None
        loads = problem.loads(counts)
        makespan_ms, imbalance = problem.ms(int(loads.max())), float(loads.max() / loads.mean() - 1)
        row: Row = {"solver": name, "makespan_ms": makespan_ms, "imbalance": imbalance}
        rows.append(row | {"status": "feasible", "seconds": seconds})
    return rows


def cell(model: str, owners: int) -> list[Row]:
    """All solvers on one model and number of owners."""
    specs, costs = model_specs(model), CostTable.analytic(COSTS)
    rows = by_weight(specs, owners, costs)
    rows += [planned(specs, owners, costs, name) for name in ("round_robin", "greedy", "milp")]
    bound = max(row.get("lower_bound_ms", 0.0) for row in rows)
    common = {"set": "cells", "model": model, "costs": costs.source, "owners": owners}
    common |= {"matrices": len(specs.matrices)}
    gaps = ({"lower_bound_ms": bound, "gap": row["makespan_ms"] / bound - 1} for row in rows)
    return [common | row | gap for row, gap in zip(rows, gaps)]


def large(name: str) -> Row:
    """A large model, alone in its process: seconds and peak memory."""
    build, owners, most_s, most_bytes = LARGE[name]
    specs = build()
    row = planned(specs, owners, CostTable.analytic(COSTS), "auto")
    # Not by getrusage, whose peak is that of the process which started this one, if larger.
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    row |= {"set": "large", "model": name, "owners": owners, "matrices": len(specs.matrices)}
    row |= {"gap": row["makespan_ms"] / row["lower_bound_ms"] - 1, "peak_bytes": peak}
    return row | {"passed": row["seconds"] <= most_s and peak <= most_bytes}


def alone(name: str) -> list[Row]:
    """`large` in a process of its own."""
    code = (
        f"import json; from benchmarks import scheduler as s; print(json.dumps(s.large({name!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return [json.loads(done.stdout.splitlines()[-1])]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Gaps to the bound in percent, by owners: of "milp" for each model, and of each solver the
    mean and the worst."""
    cells = [row for row in rows if row.get("set") == "cells"]
    owners = sorted({row["owners"] for row in cells})
    gaps = {(r["model"], r["owners"]): 100 * r["gap"] for r in cells if r["solver"] == "milp"}
    models = dict.fromkeys(model for model, _ in gaps)
    found = {
        (solver, w): [100 * r["gap"] for r in cells if (r["solver"], r["owners"]) == (solver, w)]
        for solver in SOLVERS
        for w in owners
    }
    lines = [
        (solver, *(f"{statistics.fmean(found[solver, w]):.1f} / {max(found[solver, w]):.1f}"
                   for w in owners))
        for solver in SOLVERS
    ]  # fmt: skip
    return {
        "milp": table(
            ("model", *owners),
            [
                (m, *(f"{gaps[m, w]:.3g}" if (m, w) in gaps else None for w in owners))
                for m in models
            ],
        ),
        "solvers": table(("solver", *owners), lines),
    }


def line(row: Row) -> str:
    """A row in words."""
    told = f"{row['model']:28} {row['owners']:5} owners {row['solver']:12} gap {row['gap']:8.3%}, "
    return told + f"{row['seconds']:6.1f} s, {row['status']}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--owners", nargs="+", type=int, default=OWNERS)


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    for name in args.models:
        for owners in args.owners:
            yield f"{name}, {owners}", partial(cell, name, owners)
    for name in LARGE:
        yield name, partial(alone, name)


BENCHMARK = Benchmark(__doc__, cases, line, options, tables)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
