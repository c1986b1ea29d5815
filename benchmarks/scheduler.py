"""How far from the optimum are plans, and how long do they take?

``python -m benchmarks.scheduler --json out.json`` plans every preset with each solver, under the
analytic costs of a GPU; ``--measured gpt2-xl vla`` also under costs measured on this CPU (all dims
divided by 8, so that measuring ends). ``gap`` is to the best lower bound that any solver proved;
``lpt_elements`` and ``lpt_cost`` are longest-processing-time on the number of elements and on the
cost of a single matrix: what is usual. ``seconds`` are CPU time. Then large models (`LARGE`), each
in a process of its own for its peak memory, and `benchmarks.executed`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.executed import executed_rows
from benchmarks.results import Row, command, table, write
from dmuon.catalogue import PRESETS, model_specs
from dmuon.comm.transport import Transport
from dmuon.config import PlannerOptions
from dmuon.measure import measured_costs
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.problem import build_problem, longest_first
from dmuon.scheduler.solve import price_rows, solve
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, OwnerLimits, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm

OWNERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SOLVERS = ("round_robin", "lpt_elements", "lpt_cost", "greedy", "milp")
COSTS = "h200"
SHRINK = 8
GPUS = 8  # per node


def of_shapes(shapes: Iterable[tuple[int, int]]) -> ModelSpecs:
    """A model of plain weights."""
    parameters, matrices = [], []
    for i, (rows, cols) in enumerate(shapes):
        parameters.append(ParameterSpec(f"p{i}", (rows, cols), "float32", Algorithm.MUON, "2-D"))
        matrices.append(MatrixSpec(f"p{i}", i, rows, cols, "float32"))
    return ModelSpecs(tuple(parameters), tuple(matrices))


def shrunk(specs: ModelSpecs) -> ModelSpecs:
    """The same model with every dim of a matrix divided, at least 8: one parameter a matrix."""
    return of_shapes((max(8, m.rows // SHRINK), max(8, m.cols // SHRINK)) for m in specs.matrices)


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
    """One plan and what its certificate says."""
    topology = Topology.flat(owners, ranks_per_node=min(GPUS, owners))
    begin = time.process_time()
    plan = solve(specs, topology, costs, solver=solver)
    row: Row = {"solver": solver, "seconds": time.process_time() - begin}
    certificate = certify(plan)
    row["certified"] = certificate.ok and certificate.proven
    row["imbalance"] = plan.makespan_ms / statistics.fmean(plan.loads_ms) - 1
    same = ("makespan_ms", "lower_bound_ms", "status", "hit_time_limit")
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


def cell(model: str, specs: ModelSpecs, owners: int, costs: CostTable) -> list[Row]:
    """All solvers on one model and number of owners."""
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


def measured(specs: ModelSpecs, budget_s: float) -> CostTable:
    """Costs of this CPU, measured anew."""
    keys = [m.key for m in specs.matrices]
    given = Transport(), keys, torch.device("cpu"), PlannerOptions()
    return measured_costs(*given, budget_s=budget_s)


def show(rows: list[Row]) -> None:
    """A line a model: gaps of "milp" to the bound in percent, by owners; then the distribution."""
    cells = [row for row in rows if row["set"] == "cells"]
    milp = [row for row in cells if row["solver"] == "milp"]
    owners = sorted({row["owners"] for row in cells})
    by_model: dict[tuple[str, str], dict[int, Row]] = {}
    for row in milp:
        by_model.setdefault((row["model"], row["costs"].split(" ")[0]), {})[row["owners"]] = row
    lines = [
        (*model, *(f"{100 * found[w]['gap']:.2f}" if w in found else None for w in owners))
        for model, found in by_model.items()
    ]
    print(table(("model", "costs", *owners), lines, left=2), "\n")
    for solver in SOLVERS:
        gaps = sorted(100 * row["gap"] for row in cells if row["solver"] == solver)
        means = f"mean {statistics.fmean(gaps):.2f}%, median {statistics.median(gaps):.2f}%"
        print(f"{solver:12} {means}, worst {gaps[-1]:.2f}% above the bound")
    optimal = sum(row["status"] == "optimal" for row in milp)
    slowest = max(milp, key=lambda row: row["seconds"])
    print(
        f"milp: {optimal} of {len(milp)} cells proven optimal, {sum(r['gap'] > 0.01 for r in milp)}"
        f" above 1%, slowest {slowest['seconds']:.1f} s ({slowest['model']}, {slowest['owners']}), "
        f"{sum(row['hit_time_limit'] for row in milp)} stopped by the clock, "
        f"all certified: {all(row['certified'] for row in milp)}"
    )
    for row in rows:
        if row["set"] != "cells":
            print(json.dumps(row))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--models", nargs="*", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--owners", nargs="+", type=int, default=OWNERS)
    parser.add_argument("--measured", nargs="+", choices=PRESETS, default=[], metavar="MODEL")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of measuring a model")
    parser.add_argument("--large", choices=LARGE, help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    if args.large:
        print(json.dumps(large(args.large)))
        return
    rows: list[Row] = []
    analytic = CostTable.analytic(COSTS)
    models: list[tuple[str, ModelSpecs, CostTable]] = [
        (name, model_specs(name), analytic) for name in args.models
    ]
    for name in args.measured:
        specs = shrunk(model_specs(name))
        models.append((name, specs, measured(specs, args.budget)))
    for name, specs, costs in models:
        for owners in args.owners:
            rows += cell(name, specs, owners, costs)
            write(args.json if args.json != "-" else None, rows)
            print(f"{name} {costs.source} {owners}: {rows[-1]['gap']:.3%}", file=sys.stderr)
    for name in LARGE:
        alone: list[Any] = [sys.executable, "-m", "benchmarks.scheduler", "--large", name]
        done = subprocess.run(alone, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    rows += executed_rows()
    show(rows)
    write(args.json, rows)


if __name__ == "__main__":
    main()
