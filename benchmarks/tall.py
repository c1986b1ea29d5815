"""Does a batch of tall matrices cost what a batch of wide ones does?

``python -m benchmarks.tall --json out.json --check`` times `newton_schulz`, a `step()` of each
layout and a block step on b matrices ``n x m`` and on b matrices ``m x n``, in turns, on two gloo
processes of one thread each; the slowest rank counts. ``ratio`` is the median over rounds of tall
over wide. ``--check`` fails where one is above 1.3.

In bfloat16 the layouts run what dmuon chooses on this CPU, and ``newton_schulz torch`` multiplies
in bfloat16 in any case: on a CPU without instructions for it products are emulated, but one that
writes to a strided batch is still hundreds of times slower than the others.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard

import dmuon
from benchmarks.models import Alike, Training, shard
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import command, dtype_name, write
from benchmarks.timing import Laps, over_ranks, ratio, spread, take_turns

SHAPES = ((96, 256), (256, 1024), (512, 2048))
BATCHES = (1, 2, 4, 8)
LIMIT = 1.3
WORLD = 2
FORMS = ("newton_schulz", "newton_schulz torch", "replicated", "sharded", "dedicated", "block step")
_MOST_ROUNDS, _ROUNDS_MS = 60, 600.0
_EMULATED_NUMEL = 1 << 20  # of real bfloat16 products: beyond, an emulated call takes many seconds

Turn = tuple[Callable[[], Laps], Callable[[], object]]  # and how to close what it runs on


def function(form: str, batch: int, rows: int, cols: int, dtype: torch.dtype) -> Turn:
    x = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(0))
    backend = "torch" if form.endswith("torch") else "auto"

    def turn() -> Laps:
        return over_ranks(lambda: dmuon.newton_schulz(x, dtype=dtype, backend=backend))

    return turn, lambda: None


def step(form: str, batch: int, rows: int, cols: int, dtype: torch.dtype) -> Turn:
    """Of ``batch`` matrices a rank; tall ones are sharded by columns, so that blocks are alike."""
    torch.manual_seed(0)
    model = Alike(batch * WORLD, rows, cols)
    layout = form if form in ("replicated", "dedicated") else "sharded"
    if layout == "sharded":
        dim = 0 if rows <= cols else 1
        shard(
            model, mesh=init_device_mesh("cpu", (WORLD,)), shard_placement_fn=lambda p: Shard(dim)
        )
    plan: dict[str, Any] = {"layout": layout, "costs": "analytic:cpu"}
    plan["kernels"] = dmuon.KernelOptions(tune_budget_s=0)
    period = math.inf if form == "block step" else 1
    muon = {"ns_dtype": dtype, "period": period, "publish": "sync"}
    training = Training.of_muon(model, (4, cols), plan, **muon)
    return training.step_turn, training.close


def cases(forms: tuple[str, ...]) -> Iterator[tuple[str, torch.dtype, int, tuple[int, int]]]:
    for form in forms:
        for dtype in (torch.float32, torch.bfloat16):
            if form == "newton_schulz torch" and dtype == torch.float32:
                continue  # what newton_schulz runs
            for shape in SHAPES:
                for batch in BATCHES:
                    small = batch * math.prod(shape) <= _EMULATED_NUMEL
                    if form != "newton_schulz torch" or small:
                        yield form, dtype, batch, shape


def measure(rounds: int, forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for form, dtype, batch, (m, n) in cases(forms):
        make = function if form.startswith("newton_schulz") else step
        made = {"tall": make(form, batch, n, m, dtype), "wide": make(form, batch, m, n, dtype)}
        turns = {name: turn for name, (turn, _) in made.items()}
        first = take_turns(turns, 1, warm_up=1)
        # What takes a millisecond is noisier than what takes a second.
        shortest = min(found[0][0] for found in first.values())
        count = max(rounds, min(_MOST_ROUNDS, int(_ROUNDS_MS / shortest)))
        tall, wide = ([laps[0] for laps in found] for found in take_turns(turns, count).values())
        for _, close in made.values():
            close()
        del made, turns
        gc.collect()
        yield {
            "set": f"{batch} x [{n}, {m}] over its transpose",
            "optimizer": "dmuon",
            "layout": form,
            "ns_dtype": dtype_name(dtype),
            "world": WORLD,
            **spread(tall),
            "wide_ms": statistics.median(wide),
            "ratio": ratio(tall, wide),
        }


def work(rank: int, args: argparse.Namespace) -> Rows:
    rows = []
    for row in measure(args.rounds, tuple(args.forms)):
        rows.append(row)
        if rank == 0:
            print(
                f"{row['layout']:20} {row['ns_dtype']:8} {row['set']:38} "
                f"{row['median_ms']:9.2f} ms, wide {row['wide_ms']:9.2f}: {row['ratio']:.2f}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="more where a call is short")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT}")
    args = parser.parse_args()
    rows = on_ranks(WORLD, work, args)
    write(args.json, rows)
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"worst: {worst['ratio']:.2f} x wide, {worst['layout']}, {worst['set']}")
    return int(args.check and worst["ratio"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
