"""What does a step cost: dmuon, AdamW and the known ways to run Muon?

``python -m benchmarks.steps --json out.json`` starts gloo processes of one thread each, on which
the contenders of a question train copies of one model in turns, step by step (`benchmarks.timing`).
All orthogonalize in the dtype that suits the CPU (``--ns-dtype``). Questions (``--ask``):

- ``sharded``: `step` on a model that FSDP2 has sharded. ``floor`` is one pass of torch.optim.Muon's
  iteration over all matrices on one core, divided by the number of cores: Muon without traffic,
  momentum and weight update, spread without loss.
- ``replicated``: from before backward, in which gradients travel, to the end of the next forward,
  where a step's last messages are waited for. ``local`` exchanges and updates nothing. Without
  "DDP" in its name a contender exchanges gradients itself. ``--check`` fails where dmuon with DDP
  takes more than the round robin that DDP feeds.
- ``periods``: `step` of MuonBP on FSDP2, and the collectives and bytes in it (loss:
  `benchmarks.muonbp`).
- ``tall``: `newton_schulz` and `step` on b matrices ``n x m`` against b matrices ``m x n``.
  ``--check`` fails above 1.3.

``bytes``: sent by a rank to others in a step, mean over ranks; dmuon counts what it hands to
collectives, the baselines (`benchmarks.baselines`) have formulas, DDP's are not counted.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import dmuon
from benchmarks import baselines
from benchmarks.models import FIXED, Alike, Stack, Training, shard
from benchmarks.ranks import Row, Rows, on_ranks
from benchmarks.results import command, dtype_name, show, write
from benchmarks.timing import Laps, over_ranks, ratio, take_turns, timed_row
from dmuon import devices

WARM_UP = 2
SETS = {"8 layers, w=256": (8, 256), "4 layers, w=512": (4, 512)}
ON_SHARDS = {
    "gather-then-compute": baselines.GatherThenCompute,
    "same-shape buckets": baselines.SameShapeBuckets,
    "Parallel Muon": baselines.ParallelMuon,
}
ON_REPLICAS: dict[str, Callable[..., baselines.Baseline]] = {
    "redundant": baselines.Redundant,
    "round robin, DDP": baselines.RoundRobin,
    "round robin, reduced to owner": partial(baselines.RoundRobin, reduce_to_owner=True),
    "same-shape all-gather": baselines.SameShapeAllGather,
}
PERIODS = (1, 2, 5, math.inf)
CYCLE = 10  # steps in which a period's collectives are counted: a multiple of every finite one


def row_of(
    set_name: str, name: str, layout: str, ms: Sequence[float], training: Training | None = None
) -> Row:
    """What all rows have in common."""
    sent = torch.tensor(0.0 if training is None else float(training.sent_bytes()))
    dist.all_reduce(sent)
    row = timed_row(set_name, name, layout, world := dist.get_world_size(), ms)
    return row | {"bytes": round(float(sent) / world)}


# ---- on FSDP2 and on replicas --------------------------------------------------------------


def on_shards(name: str, layers: int, width: int, dtype: torch.dtype) -> Training:
    torch.manual_seed(0)
    model, shape = Stack(layers, width), (4, 8, width)
    shard(model, model.layers)
    if name.startswith("dmuon"):
        muon = {"ns_dtype": dtype, "publish": name.split()[1]}
        return Training.of_muon(model, shape, {"layout": "sharded"}, **muon)
    others = list(model.parameters())
    optimizers: list[Any] = []
    if name in ON_SHARDS:
        matrices = [p for p in others if p.ndim == 2]
        others = [p for p in others if p.ndim != 2]
        optimizers.append(ON_SHARDS[name](matrices, ns_dtype=dtype))
    return Training(model, shape, [*optimizers, torch.optim.AdamW(others, foreach=True)])


def on_replicas(name: str, layers: int, width: int, dtype: torch.dtype) -> Training:
    torch.manual_seed(0)
    model: nn.Module = Stack(layers, width)
    shape = (4, 8, width)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    if name.endswith("DDP"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name.startswith("dmuon"):
        frugal = not name.endswith("DDP") or "reduced" in name
        plan = {"options": dmuon.ReplicatedOptions(reduce_to_owner=frugal)}
        return Training.of_muon(model, shape, plan, ns_dtype=dtype)
    if name == "local":
        return Training(model, shape, [])
    if name == "AdamW, DDP":
        return Training(model, shape, [torch.optim.AdamW(model.parameters(), foreach=True)])
    muon = ON_REPLICAS[name](matrices, ns_dtype=dtype)
    sync = None if name.endswith("DDP") else muon.sync_gradients
    return Training(model, shape, [muon, torch.optim.AdamW(others, foreach=True)], sync=sync)


def floor(layers: int, width: int, dtype: torch.dtype, cores: int) -> Callable[[], Laps]:
    """One pass over all matrices on rank 0 while the others wait, divided by the cores."""
    matrices = [torch.randn(p.shape) for p in Stack(layers, width).parameters() if p.ndim == 2]

    def one_pass() -> None:
        for matrix in matrices if dist.get_rank() == 0 else ():
            baselines.zeropower(matrix, dtype)

    return lambda: (over_ranks(one_pass)[0] / min(dist.get_world_size(), cores),)


def ask_sharded(args: argparse.Namespace, dtype: torch.dtype) -> Rows:
    rows = []
    for name, size in SETS.items():
        kinds = ("dmuon sync", "dmuon async", "AdamW foreach", *ON_SHARDS)
        field = {kind: on_shards(kind, *size, dtype) for kind in kinds}
        turns = {"floor": floor(*size, dtype, args.cores)}
        turns |= {kind: training.step_turn for kind, training in field.items()}
        times = take_turns(turns, args.rounds or 15, warm_up=WARM_UP)
        ms = {kind: [laps[0] for laps in found] for kind, found in times.items()}
        for kind in turns:
            row = row_of(name, kind, "sharded", ms[kind], field.get(kind))
            row["ratio_to_floor"] = ratio(ms[kind], ms["floor"])
            row["gather_over_this"] = ratio(ms["gather-then-compute"], ms[kind])
            rows.append(row)
        for training in field.values():
            training.close()
    return rows


def ask_replicated(args: argparse.Namespace, dtype: torch.dtype) -> Rows:
    rows = []
    for name, size in SETS.items():
        ours = ("dmuon, DDP", "dmuon, reduced to owner", "dmuon, reduced to owner, DDP")
        kinds = ("local", "AdamW, DDP", *ours, *ON_REPLICAS)
        field = {kind: on_replicas(kind, *size, dtype) for kind in kinds}
        turns = {kind: training.turn for kind, training in field.items()}
        times = take_turns(turns, args.rounds or 15, warm_up=WARM_UP)
        ms = {kind: [laps[0] for laps in found] for kind, found in times.items()}
        for kind, training in field.items():
            row = row_of(name, kind, "replicated", ms[kind], training)
            row["step_ms"] = statistics.median(laps[2] for laps in times[kind])
            row["ratio_to_adamw"] = ratio(ms[kind], ms["AdamW, DDP"])
            row["ratio_to_round_robin"] = ratio(ms[kind], ms["round robin, DDP"])
            rows.append(row)
            training.close()
    return rows


# ---- MuonBP --------------------------------------------------------------------------------


def is_full(step: int, period: float) -> bool:
    """Whether the step of this number, from 0, is a full one."""
    return period != math.inf and step % period == 0


def count(training: Training) -> tuple[int, int]:
    """Collectives and bytes of one step."""
    training.loss.backward()
    with CommDebugMode() as mode:
        training.step()
    training.forward()
    return mode.get_total_counts(), training.sent_bytes()


def ask_periods(args: argparse.Namespace, dtype: torch.dtype) -> Rows:
    """A mean counts full and block steps as they come; bytes are of this rank."""
    set_name, (layers, width) = next(iter(SETS.items()))
    field = {}
    for period in PERIODS:
        torch.manual_seed(0)
        model = Stack(layers, width)
        shard(model, model.layers)
        # "sync": nothing of the step may be left for the next forward, which is not counted.
        muon = {"ns_dtype": dtype, "period": period, "publish": "sync"}
        plan = {"layout": "sharded"}
        field[period] = Training.of_muon(model, (4, 8, width), plan, **muon)
    counts = {period: [count(field[period]) for _ in range(CYCLE)] for period in PERIODS}
    turns = {str(period): training.step_turn for period, training in field.items()}
    turns["AdamW"] = (adamw := on_shards("AdamW foreach", layers, width, dtype)).step_turn
    times = take_turns(turns, args.rounds or 30)
    ms = {name: [laps[0] for laps in found] for name, found in times.items()}
    rows = [row_of(set_name, "AdamW foreach", "sharded", ms["AdamW"], adamw)]
    for period, training in field.items():
        mine = ms[str(period)]
        row = row_of(set_name, f"P={period}", "sharded", mine, training)
        row |= {
            "period": "inf" if period == math.inf else period,
            "mean_ms": statistics.fmean(mine),
        }
        for kind in ("full", "block"):
            steps = [t for t in range(CYCLE + len(mine)) if is_full(t, period) == (kind == "full")]
            timed = [mine[t - CYCLE] for t in steps if t >= CYCLE]
            row[f"{kind}_ms"] = statistics.median(timed) if timed else None
            row[f"collectives_{kind}"] = sorted({counts[period][t][0] for t in steps if t < CYCLE})
        row["bytes"] = statistics.fmean(nbytes for _, nbytes in counts[period])
        rows.append(row)
        training.close()
    return rows


# ---- tall matrices -------------------------------------------------------------------------

FORMS = ("newton_schulz", "replicated", "sharded", "dedicated", "block step")
SHAPES = ((96, 256), (256, 1024), (512, 2048))
BATCHES = (1, 2, 4, 8)


def on_matrices(
    form: str, batch: int, rows: int, cols: int, dtype: torch.dtype
) -> tuple[Callable[[], Laps], Callable[[], None]]:
    """A turn on ``batch`` matrices a rank, and what closes it."""
    if form == "newton_schulz":
        x = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(0))
        return partial(over_ranks, partial(dmuon.newton_schulz, x, dtype=dtype)), lambda: None
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = Alike(batch * world, rows, cols)
    layout = form if form in ("replicated", "dedicated") else "sharded"
    if layout == "sharded":  # tall ones by columns, so that blocks are alike
        dim = 0 if rows <= cols else 1
        mesh = init_device_mesh("cpu", (world,))
        shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim))
    muon = {"ns_dtype": dtype, "publish": "sync", "period": math.inf if form == "block step" else 1}
    training = Training.of_muon(model, (4, cols), {"layout": layout, **FIXED}, **muon)
    return training.step_turn, training.close


def ask_tall(args: argparse.Namespace, dtype: torch.dtype) -> Rows:
    rows = []
    for form in FORMS:
        for m, n in SHAPES:
            for batch in BATCHES:
                made = {"tall": on_matrices(form, batch, n, m, dtype)}
                made["wide"] = on_matrices(form, batch, m, n, dtype)
                turns = {name: turn for name, (turn, _) in made.items()}
                (once,) = take_turns(turns, 1, warm_up=1)["wide"]
                # What takes a millisecond is noisier than what takes a second.
                rounds = args.rounds or max(7, min(60, int(600 / once[0])))
                times = take_turns(turns, rounds)
                tall, wide = ([laps[0] for laps in times[name]] for name in made)
                row = row_of(f"{batch} x [{n}, {m}] over its transpose", "dmuon", form, tall)
                rows.append(row | {"ratio": ratio(tall, wide)})
                for _, close in made.values():
                    close()
                gc.collect()
    return rows


# ---- the command ---------------------------------------------------------------------------

QUESTIONS = {
    "sharded": ask_sharded,
    "replicated": ask_replicated,
    "periods": ask_periods,
    "tall": ask_tall,
}
# What `--check` looks at: the question, the optimizer, the key, the most that passes.
LIMITS = (
    ("replicated", "dmuon, DDP", "ratio_to_round_robin", 1.0),
    ("tall", "dmuon", "ratio", 1.3),
)
_SHOWN = ("ratio_to_floor", "ratio_to_adamw", "ratio_to_round_robin", "ratio", "step_ms",
          "full_ms", "block_ms", "collectives_full", "collectives_block")  # fmt: skip


def work(rank: int, args: argparse.Namespace, question: str) -> Rows:
    is_auto = args.ns_dtype == "auto"
    dtype = devices.of("cpu").ns_dtype() if is_auto else getattr(torch, args.ns_dtype)
    rows = QUESTIONS[question](args, dtype)
    return [{"question": question, "ns_dtype": dtype_name(dtype)} | row for row in rows]


def line(row: Row) -> str:
    """A row in words."""
    found = {key: row[key] for key in _SHOWN if row.get(key) is not None}
    facts = (f"{key} {x:.2f}" if isinstance(x, float) else f"{key} {x}" for key, x in found.items())
    return (
        f"{row['set']:38} {row['layout']:13} {row['optimizer']:29} {row['median_ms']:8.1f} ms "
        f"({row['p10_ms']:.1f}-{row['p90_ms']:.1f}), {row['bytes'] / 1e6:.2f} MB, "
        + ", ".join(facts)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__)
    parser.add_argument("--ask", nargs="+", choices=QUESTIONS, default=["sharded", "replicated"])
    parser.add_argument("--rounds", type=int, help=f"after {WARM_UP} to warm up")
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--world", type=int, default=4, help="processes; tall runs on 2")
    parser.add_argument("--check", action="store_true", help="fail above the limits")
    args = parser.parse_args(argv)
    args.cores = len(os.sched_getaffinity(0))
    rows: Rows = []
    for question in args.ask:
        found = on_ranks(2 if question == "tall" else args.world, work, args, question)
        print(question)
        show(found, line)
        rows += found
    write(args.json, rows)
    slow = [
        row
        for row in rows
        for question, optimizer, key, most in LIMITS
        if (row["question"], row["optimizer"]) == (question, optimizer) and row[key] > most
    ]
    for row in slow:
        print(f"above its limit: {line(row)}")
    return int(args.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
