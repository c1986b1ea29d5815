"""How far from the optimum are plans, and how long do they take?

``python -m benchmarks.scheduler --json out.json`` plans six model families on 8 to 4096 owners
with every solver, under analytic costs of a GPU (full size) and under costs measured on this CPU
(all dims divided by 8, so that measuring ends). ``gap`` is the makespan over the proven lower
bound, less one; the bound of each cell is the best one that any solver proved, checked again by
`certify`. ``lpt_elements`` and ``lpt_cost`` are longest-processing-time on the number of elements
and on the cost of a single matrix: what is usual. Then one large cell in a process of its own, for
its peak memory, and `benchmarks.executed`: do owners take as long as planned?
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.executed import executed_rows
from benchmarks.results import command, table, write
from dmuon.catalogue.presets import model_specs
from dmuon.comm.transport import LocalTransport
from dmuon.config import PlannerOptions
from dmuon.measure import measured_costs
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.greedy import longest_first_by_weight
from dmuon.scheduler.problem import build_problem
from dmuon.scheduler.shards import OwnerLimits
from dmuon.scheduler.solve import price_rows, solve
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology

FAMILIES = ("gpt2-xl", "llama3-70b", "qwen2.5-7b", "mixtral-8x7b", "deepseek-v3", "vla")
OWNERS = (8, 16, 32, 64, 128, 256, 1024, 4096)
LARGE = ("moe-60x256", 4096)
SHRINK = 8
GPUS = 8  # per node
ANALYTIC = "analytic:h200"

Row = dict[str, Any]


def shrunk(specs: ModelSpecs, factor: int) -> ModelSpecs:
    """The same model with every dim of a matrix divided, at least 8: one parameter a matrix."""
    parameters, matrices = [], []
    for i, m in enumerate(specs.matrices):
        rows, cols = (max(8, size // factor) for size in m.shape)
        parent = specs.parameters[m.parameter]
        parameters.append(replace(parent, name=m.name, shape=(rows, cols), dtype="float32"))
        matrices.append(
            replace(
                m, parameter=i, rows=rows, cols=cols, start=0, dtype="float32", transposed=False
            )
        )
    return ModelSpecs(tuple(parameters), tuple(matrices))


def cell(family: str, specs: ModelSpecs, owners: int, costs: CostTable) -> list[Row]:
    """All solvers on one model and number of owners."""
    topology = Topology.flat(owners, ranks_per_node=min(GPUS, owners))
    rows = baselines(specs, topology, costs)
    proven = True
    for solver in ("round_robin", "greedy", "milp"):
        plan = solve(specs, topology, costs, solver=solver)
        certificate = certify(plan)
        proven = proven and certificate.ok and certificate.proven
        rows.append(
            {
                "solver": solver,
                "makespan_ms": plan.makespan_ms,
                "imbalance": plan.makespan_ms / statistics.fmean(plan.loads_ms) - 1,
                "status": plan.status,
                "seconds": plan.seconds,
                "hit_time_limit": plan.hit_time_limit,
                "bound": plan.lower_bound_ms,
            }
        )
    bound = max(row.pop("bound", 0.0) for row in rows)
    for row in rows:
        row["lower_bound_ms"] = bound
        row["gap"] = row["makespan_ms"] / bound - 1
        row["certified"] = proven
    common = {"model": family, "costs": costs.source, "owners": owners}
    return [common | {"matrices": len(specs.matrices)} | row for row in rows]


def baselines(specs: ModelSpecs, topology: Topology, costs: CostTable) -> list[Row]:
    prices = {row.key: row.ms for row in price_rows(specs, costs, PlannerOptions().max_batch)}
    problem = build_problem(specs.matrices, topology.world, OwnerLimits(), prices)
    elements = [kind.key[0] * kind.key[1] for kind in problem.kinds]
    single = [int(kind.ticks[1]) for kind in problem.kinds]
    rows = []
    for name, weights in (("lpt_elements", elements), ("lpt_cost", single)):
        begin = time.perf_counter()
        counts = longest_first_by_weight(problem, weights)
        seconds = time.perf_counter() - begin
        assert counts is not None
        loads = problem.loads(counts)
        rows.append(
            {
                "solver": name,
                "makespan_ms": problem.ms(int(loads.max())),
                "imbalance": float(loads.max() / loads.mean() - 1),
                "status": "feasible",
                "seconds": seconds,
            }
        )
    return rows


def measured(specs: ModelSpecs, budget_s: float) -> CostTable:
    """Costs of this CPU, measured anew."""
    keys = [m.key for m in specs.matrices]
    options = PlannerOptions(profile_budget_s=budget_s, cache_dir=None)
    return measured_costs(LocalTransport(), keys, torch.device("cpu"), options)


def large() -> Row:
    """The large cell, alone in its process: seconds and peak memory."""
    name, owners = LARGE
    specs = model_specs(name)
    begin = time.perf_counter()
    plan = solve(
        specs, Topology.flat(owners, ranks_per_node=GPUS), CostTable.analytic("h200"), solver="milp"
    )
    seconds = time.perf_counter() - begin
    certificate = certify(plan)
    return {
        "set": "large",
        "model": name,
        "costs": ANALYTIC,
        "owners": owners,
        "matrices": len(specs.matrices),
        "solver": "milp",
        "makespan_ms": plan.makespan_ms,
        "lower_bound_ms": plan.lower_bound_ms,
        "gap": plan.makespan_ms / plan.lower_bound_ms - 1,
        "status": plan.status,
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "certified": certificate.ok and certificate.proven,
    }


def show(rows: list[Row]) -> None:
    """One line a cell: gaps of all solvers to the proven lower bound, in percent."""
    names = ("round_robin", "lpt_elements", "lpt_cost", "greedy", "milp")
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        if row.get("set") == "cells":
            key = (row["model"], row["costs"], row["owners"])
            cells.setdefault(key, {})[row["solver"]] = row
    lines = []
    for (model, costs, owners), by_solver in cells.items():
        gaps = [f"{100 * by_solver[n]['gap']:.2f}" for n in names]
        milp = by_solver["milp"]
        ended = milp["status"], f"{milp['seconds']:.2f}"
        lines.append((model, costs.split(" ")[0], owners, *gaps, *ended))
    print(table(("model", "costs", "owners", *names, "status", "seconds"), lines, left=2))
    milps = [by_solver["milp"] for by_solver in cells.values()]
    within = sum(m["gap"] <= 0.005 for m in milps)
    print(
        f"{len(milps)} cells: largest gap {max(m['gap'] for m in milps):.3%}, {within} within "
        f"0.5%, slowest {max(m['seconds'] for m in milps):.1f} s, all certified: "
        f"{all(m['certified'] for m in milps)}"
    )
    for row in rows:
        if row.get("set") != "cells":
            print(json.dumps(row))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--owners", nargs="+", type=int, default=OWNERS)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of measuring a family")
    parser.add_argument("--large", action="store_true", help="only the large cell, in this process")
    args = parser.parse_args()
    if args.large:
        print(json.dumps(large()))
        return
    rows: list[Row] = []
    for family in args.families:
        specs = model_specs(family)
        small = shrunk(specs, SHRINK)
        tables = ((specs, CostTable.analytic("h200")), (small, measured(small, args.budget)))
        for these, costs in tables:
            for owners in args.owners:
                rows += [{"set": "cells"} | row for row in cell(family, these, owners, costs)]
                print(f"{family} {costs.source} {owners}: {rows[-1]['gap']:.3%}", file=sys.stderr)
    large_alone = [sys.executable, "-m", "benchmarks.scheduler", "--large"]
    done = subprocess.run(large_alone, stdout=subprocess.PIPE, text=True, check=True)
    rows.append(json.loads(done.stdout.splitlines()[-1]))
    rows += executed_rows()
    show(rows)
    write(args.json, rows)


if __name__ == "__main__":
    main()
