"""When does it pay that several ranks share a matrix, and how near are the predictions?

``python -m benchmarks.co_owners --json out.json`` (docs/co-owners.md). Modelled: plans under the
analytic costs of an H200, where co-owners share a node of 8 ranks (NVLink) and where every rank is
a node of its own (network); ``mean_ms`` is that of the plan without co-owners, the work that there
is. Measured: FSDP2 on gloo processes, each on a core of its own as far as there are cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from benchmarks.models import Alike, shard
from benchmarks.results import Row, command, picture, read_rows, table, write
from benchmarks.timing import first_laps, on_ranks, over_ranks, ratio, spread, take_turns
from dmuon.api import Dedicate
from dmuon.catalogue import model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.solve import solve
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout

MODELS = ("gpt2", "vla", "qwen2.5-7b", "llama3-8b", "llama3-70b", "mixtral-8x7b")
OWNERS = (64, 128, 256, 512, 1024, 4096)
NODES = {"nvlink": 8, "network": 1}  # ranks a node
# Matrices of a shape, ranks, and how many share one.
MEASURED = (((1024, 4096), 1, 2, 2), ((512, 2048), 1, 2, 2), ((1024, 4096), 2, 4, 2))


# ---- modelled ----------------------------------------------------------------------------


def modelled() -> list[Row]:
    rows = []
    for name, owners, (link, per_node) in product(MODELS, OWNERS, NODES.items()):
        rows.append({"set": "modelled", "model": name, "owners": owners, "link": link})
        rows[-1] |= planned(name, Topology.flat(owners, ranks_per_node=per_node))
        about = (
            "{model:13} {owners:5} {link:8} makespan / mean {alone_over_mean:6.2f} -> "
            "{over_mean:6.2f}  k {co_owners}"
        )
        print(about.format(**rows[-1]), flush=True)
    return rows


def planned(name: str, topology: Topology) -> Row:
    """Without and with co-owners."""
    costs, specs = CostTable.analytic("h200", momentum=False), model_specs(name)
    plans = []
    for how in ("off", "auto"):
        begin = time.perf_counter()
        options = PlannerOptions(co_owners=how)
        plans.append(solve(specs, topology, costs, layout=Layout.SHARDED, options=options))
        seconds = time.perf_counter() - begin
    alone, plan = plans
    certificate = certify(plan)
    mean = statistics.fmean(alone.loads_ms)
    row: Row = {"alone_ms": alone.makespan_ms, "mean_ms": mean, "seconds": seconds}
    row["alone_over_mean"] = alone.makespan_ms / mean
    row["over_mean"] = plan.makespan_ms / mean
    row["gap"] = plan.makespan_ms / plan.lower_bound_ms - 1
    row["co_owners"] = sorted({len(batch.ranks) for batch in plan.batches})
    row["certified"] = certificate.ok and certificate.proven
    same = ("makespan_ms", "lower_bound_ms", "status")
    return row | {name: getattr(plan, name) for name in same}


# ---- measured ----------------------------------------------------------------------------


def measured() -> list[Row]:
    rows: list[Row] = []
    for shape, count, world, k in MEASURED:
        for asked in (k, "auto"):
            rows += on_ranks(world, _trained, shape, count, world, asked)
            row = rows[-1]
            print(
                f"{count} x {shape} on {world}, co_owners={asked}: {row['ratio']:.3f} x one owner; "
                f"predicted {row['predicted_ms']:.4g} ms, measured {row['measured_ms']:.4g} ms",
                flush=True,
            )
    return rows


def sharing(count: int, rows: int, cols: int, hows: Sequence[Any]) -> dict[str, dmuon.Muon]:
    """By ``co_owners``: an optimizer of ``count`` matrices on FSDP2, which have gradients. In
    float32, where Newton-Schulz takes long, so that sharing it saves most."""
    made = {}
    for how in hows:
        torch.manual_seed(0)
        model = Alike(count, rows, cols)
        shard(model)
        dedicate: Dedicate = {
            "planner": PlannerOptions(co_owners=how),
            "select": lambda name, p: True,
        }
        opt = dmuon.Muon(model, lr=1e-3, ns_dtype=torch.float32, dedicate=dedicate)
        for n, p in enumerate(model.parameters()):
            assert isinstance(p, DTensor)
            grad = torch.randn(rows, cols, generator=torch.Generator().manual_seed(n))
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        made[str(how)] = opt
    return made


def _trained(
    rank: int, shape: tuple[int, int], count: int, world: int, asked: str | int
) -> list[Row]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    rows, cols = shape
    made = sharing(count, rows, cols, ("off", asked))
    turns = {how: partial(over_ranks, opt.step) for how, opt in made.items()}
    times = first_laps(take_turns(turns, 15, warm_up=3))
    opt = made[str(asked)]
    own = opt.ownership
    opt.synchronize()
    report = own.report()
    return [
        {
            "set": "measured",
            "shape": list(shape),
            "matrices": count,
            "world": world,
            "cores": len(cores),
            "asked": asked,
            "co_owners": sorted({len(batch.ranks) for batch in own.plan.batches}),
            "split": any(batch.split for batch in own.plan.batches),
            "ratio": ratio(times[str(asked)], times["off"]),
            "one_owner": spread(times["off"]),
            "shared": spread(times[str(asked)]),
            "predicted_ms": report.makespan_ms,
            "measured_ms": max(report.measured_ms or (0.0,)),
        }
    ]


# ---- results -----------------------------------------------------------------------------


def pages(rows: list[Row]) -> str:
    """The modelled rows as a table: makespan / mean without and with co-owners."""
    of = {(r["model"], r["owners"], r["link"]): r for r in rows if r["set"] == "modelled"}
    lines = []
    for name in MODELS:
        for link in NODES:
            cells = [
                f"{of[name, n, link]['alone_over_mean']:.2f} → {of[name, n, link]['over_mean']:.2f}"
                for n in OWNERS
            ]
            lines.append((name, link, *cells))
    return table(("model", "link", *map(str, OWNERS)), lines, left=2)


def draw(rows: list[Row], path: str) -> None:
    """Makespan over mean against owners, a panel a model."""
    with picture(path, 2, 3, (10, 5.6)) as (figure, panels):
        for name, axes in zip(MODELS, panels.flat, strict=True):
            mine = [r for r in rows if r["set"] == "modelled" and r["model"] == name]
            alone = [r["alone_over_mean"] for r in mine if r["link"] == "nvlink"]
            axes.plot(OWNERS, alone, "o-", label="one owner a matrix")
            for link, style in (("network", "s--"), ("nvlink", "^-")):
                over = [r["over_mean"] for r in mine if r["link"] == link]
                axes.plot(OWNERS, over, style, label=f"co-owners, {link}")
            axes.set(title=name, xscale="log", yscale="log", ylim=(0.9, None))
            axes.set_xticks(OWNERS, [str(n) for n in OWNERS], rotation=45)
            axes.minorticks_off()
            ticks = [t for t in (1, 2, 4, 8, 16, 32, 64) if t <= 1.3 * axes.get_ylim()[1]]
            axes.set_yticks(ticks, [str(t) for t in ticks])
            axes.grid(alpha=0.3)
        panels[0, 0].legend(fontsize=8)
        figure.supxlabel("owners")
        figure.supylabel("busiest owner / mean of the work without co-owners")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--only", choices=["modelled", "measured"])
    parser.add_argument("--picture", nargs=2, metavar=("PATH", "JSON"), help="draw JSON into PATH")
    parser.add_argument("--table", metavar="JSON", help="print the modelled rows of a file")
    args = parser.parse_args()
    if args.picture or args.table:
        rows = read_rows(args.table or args.picture[1])
        draw(rows, args.picture[0]) if args.picture else print(pages(rows))
        return
    rows = [] if args.only == "measured" else modelled()
    rows += [] if args.only == "modelled" else measured()
    write(args.json, rows)


if __name__ == "__main__":
    main()
