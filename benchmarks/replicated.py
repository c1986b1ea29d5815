"""What does Muon cost with replicated weights: dmuon, round robin, redundant Muon, AdamW?

``python -m benchmarks.replicated --json out.json`` starts gloo processes that train the same model
with each optimizer in turn, step by step (`benchmarks.timing`). A step's time is that of the
slowest rank, from before backward to the end of the next forward, which is where asynchronously
published updates are waited for; ``step_ms`` is `step` alone.

``dmuon`` reduces gradients by itself, ``dmuon ddp`` through DDP's hook. Baselines: ``adamw`` is DDP
and `torch.optim.AdamW(foreach)`; ``round robin`` is DDP, which all-reduces, and an owner a matrix
by its number (`benchmarks.baselines`); ``redundant`` is DDP and torch.optim.Muon for the matrices
on every rank; ``local`` is one forward and backward without any gradient exchange or optimizer: the
floor of all. ``--ns-dtype`` is that of dmuon and of round robin (torch.optim.Muon knows bfloat16
alone): bfloat16 products of theirs are emulated, and slow, on a CPU without instructions for them.

``--check`` fails where ``ratio_to_round_robin`` of ``dmuon ddp`` is above 1.0.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.baselines import RoundRobin
from benchmarks.models import Stack, Training
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import command, write
from benchmarks.timing import ratio, spread, take_turns
from dmuon.kernels.newton_schulz import resolve_ns_dtype

SETS = {"8 layers, w=256": (8, 256), "4 layers, w=512": (4, 512)}
CONTENDERS = ("local", "adamw", "dmuon", "dmuon ddp", "round robin", "redundant")
WARM_UP = 2


def contender(name: str, layers: int, width: int, ns_dtype: str | torch.dtype) -> Training:
    """One optimizer on its own copy of the model."""
    torch.manual_seed(0)
    model: nn.Module = Stack(layers, width)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    if name not in ("local", "dmuon"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    shape = (4, 8, width)
    if name.startswith("dmuon"):
        return Training.of_muon(model, shape, {}, ns_dtype=ns_dtype)
    optimizers: list[Any] = []
    if name != "local":
        mine = matrices + others if name == "adamw" else others
        optimizers.append(torch.optim.AdamW(mine, foreach=True))
    if name == "redundant":
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
    elif name == "round robin":
        optimizers.append(RoundRobin(matrices, ns_dtype=resolve_ns_dtype(ns_dtype, "cpu")))
    return Training(model, shape, optimizers)


def measure(name: str, layers: int, width: int, args: argparse.Namespace) -> Rows:
    ns_dtype = "auto" if args.ns_dtype == "auto" else getattr(torch, args.ns_dtype)
    names = [c for c in CONTENDERS if c != "redundant" or not args.skip_redundant]
    field = {c: contender(c, layers, width, ns_dtype) for c in names}
    times = take_turns({c: field[c].turn for c in names}, args.repeats, warm_up=WARM_UP)
    wholes = {c: [laps[0] for laps in times[c]] for c in names}
    rows = []
    for c, training in field.items():
        row: dict[str, Any] = {
            "set": name,
            "optimizer": c,
            "layout": "replicated",
            "world": dist.get_world_size(),
            **spread(wholes[c]),
            "step_ms": statistics.median(laps[2] for laps in times[c]),
            "ratio_to_adamw": ratio(wholes[c], wholes["adamw"]),
            "ratio_to_round_robin": ratio(wholes[c], wholes["round robin"]),
        }
        if training.own is not None:
            stats = training.optimizers[0].stats()
            row |= {"bytes": stats["bytes"], "ns_dtype": stats["ns_dtype"]}
        training.close()
        rows.append(row)
    return rows


def work(rank: int, args: argparse.Namespace) -> Rows:
    names = SETS if args.set == "all" else (args.set,)
    return [row for name in names for row in measure(name, *SETS[name], args)]


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--set", choices=["all", *SETS], default="all")
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--skip-redundant", action="store_true", help="it takes seconds a step")
    parser.add_argument("--check", action="store_true", help="fail above 1.0 x round robin")
    args = parser.parse_args()
    rows = on_ranks(args.nproc, work, args)
    write(args.json, rows)
    for row in rows:
        print(
            f"{row['set']:18} {row['optimizer']:11} {row['median_ms']:8.1f} ms "
            f"(step {row['step_ms']:7.1f} ms)  {row['ratio_to_adamw']:5.2f} x AdamW  "
            f"{row['ratio_to_round_robin']:5.2f} x round robin"
        )
    slow = [r for r in rows if r["optimizer"] == "dmuon ddp" and r["ratio_to_round_robin"] > 1.0]
    return int(args.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
