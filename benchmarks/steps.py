"""What does a step cost: dmuon, AdamW and the known ways to run Muon?

``python -m benchmarks.steps --json out.json`` (docs/benchmarks.md). Contenders of a question train
copies of one model in turns. Questions (``--ask``):

- ``sharded``: `step` on a model that FSDP2 has sharded.
- ``replicated``: from before backward to the end of the next forward. ``local`` exchanges and
  updates nothing. Without "DDP" in its name a contender exchanges gradients itself. ``--check``
  fails where dmuon with DDP takes more than the round robin that DDP feeds.

``bytes``: sent by a rank to others in a step, mean over ranks; dmuon counts what it hands to
collectives, the baselines (`benchmarks.baselines`) have formulas, DDP's are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmuon
from benchmarks import baselines
from benchmarks.models import Stack, Training, on_random, shard
from benchmarks.results import Benchmark, Cases, Row
from benchmarks.timing import Laps, first_laps, on_ranks, ratio, take_turns, timed_row
from dmuon.scheduler.specs import dtype_name

WARM_UP = 2
SETS = {"8 layers, w=256": (8, 256), "4 layers, w=512": (4, 512)}
KINDS: Mapping[str, Mapping[str, Callable[..., baselines.Baseline] | None]] = {
    "sharded": {
        "dmuon": None,
        "AdamW foreach": None,
        "gather-then-compute": baselines.GatherThenCompute,
        "same-shape buckets": baselines.SameShapeBuckets,
        "Parallel Muon": baselines.ParallelMuon,
    },
    "replicated": {
        "local": None,
        "AdamW, DDP": None,
        "dmuon, DDP": None,
        "dmuon, reduced to owner": None,
        "dmuon, reduced to owner, DDP": None,
        "redundant": baselines.Redundant,
        "round robin, DDP": baselines.RoundRobin,
        "round robin, reduced to owner": partial(baselines.RoundRobin, reduce_to_owner=True),
        "same-shape all-gather": baselines.SameShapeAllGather,
    },
}
RATIOS = {
    "sharded": {"ratio_to_floor": "floor", "ratio_to_gather": "gather-then-compute"},
    "replicated": {"ratio_to_adamw": "AdamW, DDP", "ratio_to_round_robin": "round robin, DDP"},
}


def contender(layout: str, name: str, layers: int, width: int, dtype: torch.dtype) -> Training:
    """A training of a model of `SETS`."""
    torch.manual_seed(0)
    model: nn.Module = Stack(layers, width)
    loss, is_ddp = on_random(4, 8, width), name.endswith("DDP")
    if layout == "sharded":
        shard(model)
    params = list(model.parameters())
    if is_ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name.startswith("dmuon"):
        plan: dict[str, Any] = {"layout": layout}
        muon: dict[str, Any] = {"ns_dtype": dtype}
        if layout == "replicated":
            frugal = not is_ddp or "reduced" in name
            plan["options"] = dmuon.ReplicatedOptions(reduce_to_owner=frugal)
        return Training.of_muon(model, loss, plan, **muon)
    if name == "local":
        return Training(model, loss, [])
    kind = KINDS[layout][name]
    if kind is None:
        return Training(model, loss, [torch.optim.AdamW(params, foreach=True)])
    baseline = kind([p for p in params if p.ndim == 2], ns_dtype=dtype)
    adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], foreach=True)
    sync = None if is_ddp or layout == "sharded" else baseline.sync_gradients
    return Training(model, loss, [baseline, adamw], sync=sync)


def work(rank: int, args: argparse.Namespace, question: str, name: str, cores: int) -> list[Row]:
    """All contenders of a question on one model."""
    dtype = baselines.ns_dtype() if args.ns_dtype == "auto" else getattr(torch, args.ns_dtype)
    size, world = SETS[name], dist.get_world_size()
    field = {kind: contender(question, kind, *size, dtype) for kind in KINDS[question]}
    turns: dict[str, Callable[[], Laps]]
    if question == "sharded":
        matrices = [p for p in Stack(*size).parameters() if p.ndim == 2]
        turns = {"floor": baselines.floor(matrices, dtype, cores)}
        turns |= {kind: training.step_turn for kind, training in field.items()}
    else:
        turns = {kind: training.turn for kind, training in field.items()}
    times = take_turns(turns, args.rounds, warm_up=WARM_UP)
    ms = first_laps(times)
    rows = []
    for kind, mine in ms.items():
        sent = torch.tensor(float(field[kind].sent_bytes()) if kind in field else 0.0)
        dist.all_reduce(sent)
        row: Row = {"question": question, "ns_dtype": dtype_name(dtype)}
        row |= timed_row(name, kind, question, world, mine) | {"bytes": round(float(sent) / world)}
        row |= {key: ratio(mine, ms[other]) for key, other in RATIOS[question].items()}
        if question == "replicated":
            row["step_ms"] = statistics.median(laps[2] for laps in times[kind])
        rows.append(row)
    for training in field.values():
        training.close()
    return rows


def line(row: Row) -> str:
    """A row in words."""
    shown = [key for key in row if key.startswith("ratio") or key == "step_ms"]
    return (
        f"{row['set']:16} {row['layout']:11} {row['optimizer']:29} {row['median_ms']:8.1f} ms "
        f"({row['p10_ms']:.1f}-{row['p90_ms']:.1f}), {row['bytes'] / 1e6:.2f} MB, "
        + ", ".join(f"{key} {row[key]:.2f}" for key in shown)
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ask", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=15, help=f"after {WARM_UP} to warm up")
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--world", type=int, default=4, help="processes")


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    cores = len(os.sched_getaffinity(0))
    for question in args.ask:
        for name in SETS:
            given = args, question, name, cores
            yield f"{question}, {name}", partial(on_ranks, args.world, work, *given)


def misses(row: Row, args: argparse.Namespace) -> bool:
    return row["optimizer"] == "dmuon, DDP" and bool(row["ratio_to_round_robin"] > 1.0)


BENCHMARK = Benchmark(__doc__, cases, line, options, misses=misses)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
