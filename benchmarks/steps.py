"""What does a step cost: dmuon, AdamW and the known ways to run Muon?

``python -m benchmarks.steps --json out.json`` (docs/benchmarks.md). Contenders of a question train
copies of one model in turns. Questions (``--ask``):

- ``sharded``: `step` on a model that FSDP2 has sharded.
- ``replicated``: from before backward to the end of the next forward. ``local`` exchanges and
  updates nothing. Without "DDP" in its name a contender exchanges gradients itself. ``--check``
  fails where dmuon with DDP takes more than the round robin that DDP feeds.
- ``periods``: `step` of MuonBP on FSDP2, and the collectives and bytes in it.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
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
from benchmarks.results import Row, command, show, write
from benchmarks.timing import Laps, first_laps, on_ranks, over_ranks, ratio, take_turns, timed_row
from dmuon.scheduler.specs import dtype_name

WARM_UP = 2
SETS = {"8 layers, w=256": (8, 256), "4 layers, w=512": (4, 512)}
KINDS: Mapping[str, Mapping[str, Callable[..., baselines.Baseline] | None]] = {
    "sharded": {
        "dmuon sync": None,
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
PERIODS = (1, 2, 5, math.inf)
CYCLE = 10  # steps in which a period's collectives are counted: a multiple of every finite one


def row_of(
    set_name: str, name: str, layout: str, ms: Sequence[float], training: Training | None = None
) -> Row:
    """The keys of all rows."""
    sent = torch.tensor(0.0 if training is None else float(training.sent_bytes()))
    dist.all_reduce(sent)
    row = timed_row(set_name, name, layout, world := dist.get_world_size(), ms)
    return row | {"bytes": round(float(sent) / world)}


# ---- on FSDP2 and on replicas --------------------------------------------------------------


def contender(
    layout: str, name: str, layers: int, width: int, dtype: torch.dtype, **muon: Any
) -> Training:
    """A training of `SETS`'s model; ``muon`` are further arguments of `dmuon.Muon`."""
    torch.manual_seed(0)
    model: nn.Module = Stack(layers, width)
    shape, is_ddp = (4, 8, width), name.endswith("DDP")
    if layout == "sharded":
        shard(model)
    params = list(model.parameters())
    if is_ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name.startswith("dmuon"):
        plan: dict[str, Any] = {"layout": layout}
        if layout == "replicated":
            frugal = not is_ddp or "reduced" in name
            plan["options"] = dmuon.ReplicatedOptions(reduce_to_owner=frugal)
            plan["planner"] = dmuon.PlannerOptions(redundancy=1 if "once" in name else "auto")
        else:
            muon = {"publish": name.split()[1]} | muon
        return Training.of_muon(model, shape, plan, ns_dtype=dtype, **muon)
    if name == "local":
        return Training(model, shape, [])
    kinds = KINDS[layout]
    kind = kinds[name if name in kinds else name.removesuffix(", DDP")]
    if kind is None:
        return Training(model, shape, [torch.optim.AdamW(params, foreach=True)])
    baseline = kind([p for p in params if p.ndim == 2], ns_dtype=dtype)
    adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], foreach=True)
    sync = None if is_ddp or layout == "sharded" else baseline.sync_gradients
    return Training(model, shape, [baseline, adamw], sync=sync)


def floor(layers: int, width: int, dtype: torch.dtype, cores: int) -> Callable[[], Laps]:
    """One pass over all matrices on rank 0 while the others wait, divided by the cores."""
    matrices = [torch.randn(p.shape) for p in Stack(layers, width).parameters() if p.ndim == 2]

    def one_pass() -> None:
        for matrix in matrices if dist.get_rank() == 0 else ():
            baselines.zeropower(matrix, dtype)

    return lambda: (over_ranks(one_pass)[0] / min(dist.get_world_size(), cores),)


def ask_layout(layout: str, args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    rows = []
    for name, size in SETS.items():
        field = {kind: contender(layout, kind, *size, dtype) for kind in KINDS[layout]}
        turns: dict[str, Callable[[], Laps]]
        if layout == "sharded":
            turns = {"floor": floor(*size, dtype, args.cores)}
            turns |= {kind: training.step_turn for kind, training in field.items()}
        else:
            turns = {kind: training.turn for kind, training in field.items()}
        times = take_turns(turns, args.rounds or 15, warm_up=WARM_UP)
        ms = first_laps(times)
        for kind, mine in ms.items():
            row = row_of(name, kind, layout, mine, field.get(kind))
            if layout == "sharded":
                row["ratio_to_floor"] = ratio(mine, ms["floor"])
                row["gather_over_this"] = ratio(ms["gather-then-compute"], mine)
            else:
                row["step_ms"] = statistics.median(laps[2] for laps in times[kind])
                row["ratio_to_adamw"] = ratio(mine, ms["AdamW, DDP"])
                row["ratio_to_round_robin"] = ratio(mine, ms["round robin, DDP"])
            rows.append(row)
        for training in field.values():
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


def ask_periods(args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    """A mean counts full and block steps as they come; bytes are of this rank."""
    set_name, size = next(iter(SETS.items()))
    # "sync": nothing of the step may be left for the next forward, which is not counted.
    field = {
        period: contender("sharded", "dmuon sync", *size, dtype, period=period)
        for period in PERIODS
    }
    counts = {period: [count(field[period]) for _ in range(CYCLE)] for period in PERIODS}
    turns = {str(period): training.step_turn for period, training in field.items()}
    turns["AdamW"] = (adamw := contender("sharded", "AdamW foreach", *size, dtype)).step_turn
    ms = first_laps(take_turns(turns, args.rounds or 30))
    rows = [row_of(set_name, "AdamW foreach", "sharded", ms["AdamW"], adamw)]
    for period, training in field.items():
        mine = ms[str(period)]
        row = row_of(set_name, f"P={period}", "sharded", mine, training)
        row["period"] = "inf" if period == math.inf else period
        row["mean_ms"] = statistics.fmean(mine)
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


def ask_tall(args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    rows = []
    for form, (m, n), batch in product(FORMS, SHAPES, BATCHES):
        made = {"tall": on_matrices(form, batch, n, m, dtype)}
        made["wide"] = on_matrices(form, batch, m, n, dtype)
        turns = {name: turn for name, (turn, _) in made.items()}
        (once,) = take_turns(turns, 1, warm_up=1)["wide"]
        # What takes a millisecond is noisier than what takes a second.
        rounds = args.rounds or max(7, min(60, int(600 / once[0])))
        ms = first_laps(take_turns(turns, rounds))
        row = row_of(f"{batch} x [{n}, {m}] over its transpose", "dmuon", form, ms["tall"])
        rows.append(row | {"ratio": ratio(ms["tall"], ms["wide"])})
        for _, close in made.values():
            close()
        gc.collect()
    return rows


# ---- the command ---------------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[argparse.Namespace, torch.dtype], list[Row]]] = {
    "sharded": partial(ask_layout, "sharded"),
    "replicated": partial(ask_layout, "replicated"),
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


def work(rank: int, args: argparse.Namespace, question: str) -> list[Row]:
    is_auto = args.ns_dtype == "auto"
    dtype = baselines.ns_dtype() if is_auto else getattr(torch, args.ns_dtype)
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
    rows: list[Row] = []
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
