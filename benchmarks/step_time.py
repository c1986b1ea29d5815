"""What does the optimizer step cost on a model that FSDP2 has sharded: dmuon and the known ways?

``python -m benchmarks.step_time --json out.json`` starts gloo processes with one thread each and
times `step()` alone, on gradients that are already there (synthetic, different on every rank). The
optimizers take turns: round i runs each of them once, in an order rotated by i, with a barrier
before each; the slowest rank counts. Ratios are medians over rounds of the ratio within a round, so
that a machine that slows down for a while does not distort them.

``floor``: one pass of torch.optim.Muon's own Newton-Schulz over all matrices on one core while the
other ranks wait in a barrier, divided by the number of cores; it takes its turn in each round. It
is Muon without traffic, momentum and weight update, in the standard form, spread without loss.

Newton-Schulz runs in bfloat16 where the CPU has instructions for it, else in float32, for all alike
and for the floor too (``--ns-dtype``): emulated bfloat16 is some forty times slower than float32.

Baselines (`benchmarks.baselines`) use torch's coefficients, dmuon its own defaults; five steps all.
For optimizers of replicated models ``sync_ms`` is what their backward would spend on exchanging
gradients; FSDP2 exchanges them in its own backward, and neither is part of the step. ``dmuon
async``: ``median_ms`` is step and synchronize together, ``step_ms`` is step alone. ``bytes``: sent
by a rank to others in one step, mean over ranks; dmuon counts, the baselines have formulas.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import init_device_mesh

from benchmarks.baselines.contenders import LAYERS, SETS, Contender, Workload, contenders
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import spread, write
from dmuon.kernels.ops import native_ns_dtype

WARM_UP = 2
ROUNDS = {"first": 21, "qwen": 9}


def timed(contender: Contender) -> tuple[float, float, float]:
    """Milliseconds of the slowest rank: of prepare, of step, of step and finish together."""
    dist.barrier()
    start = time.perf_counter()
    contender.prepare()
    prepared = time.perf_counter()
    dist.barrier()  # blocks in the kernel: who waits here leaves the cores to the others
    begin = time.perf_counter()
    contender.step()
    stepped = time.perf_counter()
    contender.finish()
    end = time.perf_counter()
    times = torch.tensor([prepared - start, stepped - begin, end - begin], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    prepare, step, whole = times.mul_(1e3).tolist()
    return prepare, step / contender.divide, whole / contender.divide


def measure(load: Workload, rounds: int, cores: int, profile: bool) -> list[dict[str, Any]]:
    """Rows of one set; every rank calls it and gets the same."""
    world = dist.get_world_size()
    field = contenders(load, init_device_mesh("cpu", (world,)), cores)
    times: dict[str, list[tuple[float, float, float]]] = {c.name: [] for c in field}
    gc.collect()
    gc.disable()
    for i in range(WARM_UP + rounds):
        turn = i % len(field)
        for contender in field[turn:] + field[:turn]:
            result = timed(contender)
            if i >= WARM_UP:
                times[contender.name].append(result)
        gc.collect()
    gc.enable()
    rows = [row(load, contender, times) for contender in field]
    if profile:
        profiled(next(c for c in field if c.name.startswith("dmuon")))
    for contender in field:
        contender.close()
    return rows


def row(
    load: Workload, contender: Contender, times: dict[str, list[tuple[float, float, float]]]
) -> dict[str, Any]:
    sync, step, whole = zip(*times[contender.name], strict=True)
    floors = [t[2] for t in times["floor"]]
    gathers = [t[2] for t in times["gather-then-compute"]]
    sent = torch.tensor(float(contender.sent()))
    dist.all_reduce(sent)
    entry = {
        "set": load.name,
        "layers": load.layers,
        "ns_dtype": str(load.ns_dtype).removeprefix("torch."),
        "optimizer": contender.name,
        "layout": contender.layout,
        "world": dist.get_world_size(),
        **spread(whole),
        "floor_ms": statistics.median(floors),
        "ratio_to_floor": statistics.median(a / b for a, b in zip(whole, floors)),
        "gather_over_this": statistics.median(b / a for a, b in zip(whole, gathers)),
        "bytes": round(float(sent) / dist.get_world_size()),
        "bytes_by": contender.counted,
        "rounds": len(whole),
    }
    if contender.layout == "replicated":
        entry["sync_ms"] = statistics.median(sync)
    if contender.name == "dmuon async":
        entry["step_ms"] = statistics.median(step)
    return entry


def profiled(contender: Contender) -> None:
    """One more step on every rank; rank 0 prints where its time went."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        contender.step()
        contender.finish()
    if dist.get_rank() == 0:
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def work(rank: int, args: argparse.Namespace, cores: int) -> Rows:
    dtype = native_ns_dtype("cpu") if args.ns_dtype == "auto" else getattr(torch, args.ns_dtype)
    rows = []
    for name in SETS if args.set == "all" else (args.set,):
        load = Workload(name, args.layers, dtype)
        rows += measure(load, args.rounds or ROUNDS[name], cores, args.profile)
        gc.collect()
    return rows


def show(rows: list[dict[str, Any]], cores: int) -> None:
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = [row for row in rows if row["set"] == name]
        first = mine[0]
        table = Table(
            title=f"set {name}, {first['layers']} layers: step() on {first['world']} processes, "
            f"{cores} cores, {first['rounds']} rounds; NS in {first['ns_dtype']}"
        )
        table.add_column("optimizer", no_wrap=True)
        table.add_column("layout", no_wrap=True)
        for heading in ("median ms", "p10", "p90", "x floor", "gather / this", "MB sent", "sync"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in mine:
            label = entry["optimizer"]
            if "step_ms" in entry:
                label += f" (step alone {entry['step_ms']:.1f})"
            table.add_row(
                label,
                entry["layout"],
                *(f"{entry[key]:.1f}" for key in ("median_ms", "p10_ms", "p90_ms")),
                f"{entry['ratio_to_floor']:.2f}",
                f"{entry['gather_over_this']:.2f}",
                f"{entry['bytes'] / 1e6:.2f}",
                f"{entry['sync_ms']:.1f}" if "sync_ms" in entry else "",
            )
        Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows there, - for stdout")
    parser.add_argument("--set", choices=[*SETS, "all"], default="all")
    parser.add_argument("--rounds", type=int, help=f"after {WARM_UP} to warm up; default {ROUNDS}")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="also profile one step of dmuon")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; percentiles need at least 2")
    cores = len(os.sched_getaffinity(0))
    rows = on_ranks(args.world, work, args, cores)
    if args.json:
        write(args.json, rows)
    show(rows, cores)


if __name__ == "__main__":
    main()
