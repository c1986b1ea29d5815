"""When does it pay that several ranks share a matrix, and how near are the predictions?

``python -m benchmarks.co_owners --json out.json``. Modelled: six models on 64 to 4,096 owners under
the analytic costs of an H200, with and without co-owners, where they share a node of 8 ranks
(NVLink) and where every rank is a node of its own (plain network). ``imbalance`` is makespan / mean
- 1; ``mean_ms`` is that of the plan without co-owners, the work that there is. Measured: FSDP2 on
gloo processes, each on a core of its own as far as there are cores, one owner and co-owners in
turns. ``--picture PATH JSON`` draws the modelled rows, ``--only modelled`` leaves the rest out.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from benchmarks.ranks import Row, Rows, on_ranks
from benchmarks.results import command, read_rows, table, write
from benchmarks.timing import over_ranks, ratio, spread, take_turns
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


def modelled() -> Rows:
    costs = CostTable.analytic("h200", momentum=False)
    rows = []
    for name in MODELS:
        specs = model_specs(name)
        for owners in OWNERS:
            for link, per_node in NODES.items():
                rows.append(_planned(name, specs, owners, link, per_node, costs))
                print(_line(rows[-1]), flush=True)
    return rows


def _planned(name, specs, owners, link, per_node, costs) -> Row:  # type: ignore[no-untyped-def]
    topology = Topology.flat(owners, ranks_per_node=per_node)
    plans = {}
    for how in ("off", "auto"):
        begin = time.perf_counter()
        options = PlannerOptions(co_owners=how)
        plan = solve(specs, topology, costs, layout=Layout.SHARDED, options=options)
        plans[how] = plan, time.perf_counter() - begin
    (alone, _), (plan, seconds) = plans["off"], plans["auto"]
    certificate = certify(plan)
    mean = statistics.fmean(alone.loads_ms)
    return {
        "set": "modelled",
        "model": name,
        "owners": owners,
        "link": link,
        "alone_ms": alone.makespan_ms,
        "makespan_ms": plan.makespan_ms,
        "mean_ms": mean,
        "alone_over_mean": alone.makespan_ms / mean,
        "over_mean": plan.makespan_ms / mean,
        "lower_bound_ms": plan.lower_bound_ms,
        "gap": plan.makespan_ms / plan.lower_bound_ms - 1,
        "co_owners": sorted({len(batch.ranks) for batch in plan.batches}),
        "status": plan.status,
        "certified": certificate.ok and certificate.proven,
        "seconds": seconds,
    }


def _line(row: Row) -> str:
    return (
        f"{row['model']:13} {row['owners']:5} {row['link']:8} makespan / mean "
        f"{row['alone_over_mean']:6.2f} -> {row['over_mean']:6.2f}  k {row['co_owners']}"
    )


# ---- measured ----------------------------------------------------------------------------


def measured() -> Rows:
    rows: Rows = []
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


def _trained(rank: int, shape: tuple[int, int], count: int, world: int, asked: str | int) -> Rows:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    rows, cols = shape
    made = {}
    for how in ("off", asked):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(cols, rows, bias=False) for _ in range(count)])
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        dedicate = {"planner": PlannerOptions(co_owners=how), "select": lambda name, p: True}
        opt = dmuon.Muon(model, lr=1e-3, ns_dtype=torch.float32, dedicate=dedicate)
        for n, p in enumerate(model.parameters()):
            assert isinstance(p, DTensor)
            grad = torch.randn(rows, cols, generator=torch.Generator().manual_seed(n))
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        made[str(how)] = opt.ownership, opt
    contenders = {how: (lambda opt=opt: over_ranks(opt.step)) for how, (_, opt) in made.items()}
    laps = take_turns(contenders, 15, warm_up=3)
    times = {how: [lap[0] for lap in found] for how, found in laps.items()}
    own, opt = made[str(asked)]
    opt.synchronize()
    report = own.report()
    found = report.measured_ms or (0.0,)
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
            "measured_ms": max(found),
        }
    ]


# ---- results -----------------------------------------------------------------------------


def pages(rows: Rows) -> str:
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


def draw(rows: Rows, path: str) -> None:
    """Makespan over mean against owners, a panel a model."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained", sharex=True)
    for name, axes in zip(MODELS, panels.flat, strict=True):
        mine = [r for r in rows if r["set"] == "modelled" and r["model"] == name]
        near = [r for r in mine if r["link"] == "nvlink"]
        owners = [r["owners"] for r in near]
        axes.plot(owners, [r["alone_over_mean"] for r in near], "o-", label="one owner a matrix")
        for link, style in (("network", "s--"), ("nvlink", "^-")):
            over = [r["over_mean"] for r in mine if r["link"] == link]
            axes.plot(owners, over, style, label=f"co-owners, {link}")
        axes.set(title=name, xscale="log", yscale="log", ylim=(0.9, None))
        axes.set_xticks(OWNERS, [str(n) for n in OWNERS], rotation=45)
        axes.minorticks_off()
        ticks = [t for t in (1, 2, 4, 8, 16, 32, 64) if t <= 1.3 * axes.get_ylim()[1]]
        axes.set_yticks(ticks, [str(t) for t in ticks])
        axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.supxlabel("owners")
    figure.supylabel("busiest owner / mean of the work without co-owners")
    figure.savefig(path, dpi=150)


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
