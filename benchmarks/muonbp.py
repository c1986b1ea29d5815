"""What does MuonBP save, and what does it cost? Periods 1, 2, 5 and infinity.

``python -m benchmarks.muonbp --json out.json`` measures two things. Steps: the time of `step`, and
the collectives and bytes in it, on FSDP2 over 4 gloo processes, every period in turn in one run.
Loss: see `benchmarks.muonbp_loss`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from benchmarks.muonbp_loss import (
    MESHES,
    PERIODS,
    STEP_SIZES,
    loss_rows,
    period_name,
)
from benchmarks.ranks import Rows, on_ranks
from benchmarks.replicated import Stack
from benchmarks.results import spread, write
from dmuon.period import Schedule

CYCLE = 10  # steps: a multiple of every finite period
LAYERS, WIDTH = 8, 256


# ---- steps -------------------------------------------------------------------------------


class Contender:
    """One period, or AdamW, on its own FSDP2 copy of the model."""

    def __init__(self, period: float | None) -> None:
        torch.manual_seed(0)
        self.period = period
        self.schedule = Schedule.of(1 if period is None else period)
        self.model = Stack(LAYERS, WIDTH)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.own: dmuon.Ownership | None = None
        self.opt: Any
        if period is None:
            self.opt = torch.optim.AdamW(self.model.parameters(), foreach=True)
        else:
            self.own = dmuon.dedicate_params(self.model, layout="sharded")
            # "sync": nothing of the step may be left for the next forward, which is not timed.
            self.opt = dmuon.Muon(self.model, period=period, publish="sync")
        self.full: list[bool] = []
        self.ms: list[float] = []
        self.collectives: list[int] = []
        self.bytes: list[int] = []

    def backward(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()

    def finish(self) -> None:
        self.opt.zero_grad()
        self.full.append(self.schedule.is_full(self.schedule.t))
        self.schedule.advance()

    def counted_step(self, x: Tensor) -> None:
        """A step whose collectives and bytes are counted; counting is slow, so it is not timed."""
        self.backward(x)
        with CommDebugMode() as mode:
            self.opt.step()
        self.collectives.append(mode.get_total_counts())
        self.bytes.append(0 if self.own is None else sum(self.opt.stats()["bytes"].values()))
        self.finish()

    def timed_step(self, x: Tensor) -> None:
        self.backward(x)
        dist.barrier()
        begin = time.perf_counter()
        self.opt.step()
        slowest = torch.tensor(1e3 * (time.perf_counter() - begin))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.ms.append(float(slowest))
        self.finish()

    def row(self) -> dict[str, Any]:
        """Counts are of the first `CYCLE` steps, times of those after them; bytes of this rank."""
        timed = list(zip(self.full[CYCLE:], self.ms, strict=True))
        full = [ms for is_full, ms in timed if is_full]
        block = [ms for is_full, ms in timed if not is_full]
        row: dict[str, Any] = {
            "set": f"step, {LAYERS} layers, w={WIDTH}",
            "optimizer": "adamw" if self.period is None else "muonbp",
            "layout": "sharded",
            "mesh": "fsdp=4",
            "world": dist.get_world_size(),
            **spread(self.ms),
            "mean_ms": statistics.fmean(self.ms),
            "collectives": statistics.fmean(self.collectives),
            "bytes": statistics.fmean(self.bytes),
        }
        if self.own is None:
            return row
        counted = list(zip(self.full, self.collectives, self.bytes))
        return row | {
            "period": period_name(self.period or 1),
            "full_ms": statistics.median(full) if full else None,
            "block_ms": statistics.median(block) if block else None,
            "collectives_full": sorted({n for is_full, n, _ in counted if is_full}),
            "collectives_block": sorted({n for is_full, n, _ in counted if not is_full}),
            "bytes_block": sum(size for is_full, _, size in counted if not is_full),
            "ns_dtype": self.opt.stats()["ns_dtype"],
        }


def step_rows(rank: int, args: Namespace) -> Rows:
    """AdamW and every period, step by step in turn, so that a noisy machine hits all alike."""
    contenders = [Contender(period) for period in (None, *PERIODS)]
    generator = torch.Generator().manual_seed(rank)
    for repeat in range(CYCLE + args.repeats):
        for contender in contenders:
            x = torch.randn(4, 8, WIDTH, generator=generator)
            (contender.counted_step if repeat < CYCLE else contender.timed_step)(x)
    rows = [contender.row() for contender in contenders]
    for contender in contenders:
        if contender.own is not None:
            contender.own.close()
    return rows


# ---- running -----------------------------------------------------------------------------


def step_line(row: dict[str, Any]) -> str:
    name = row["optimizer"] if row["optimizer"] == "adamw" else f"P={row['period']}"
    kinds = [
        f"{kind} {row[f'{kind}_ms']:.1f} ms, {row[f'collectives_{kind}']} collectives"
        for kind in ("full", "block")
        if row.get(f"{kind}_ms") is not None
    ]
    return (
        f"{row['mesh']}  {name:6} step {row['mean_ms']:7.1f} ms  {row['collectives']:5.1f} "
        f"collectives  {row['bytes'] / 1e6:6.2f} MB  {'; '.join(kinds)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", default="-", metavar="PATH")
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument(
        "--step-sizes", nargs="+", choices=STEP_SIZES, default=["one", "two"], metavar="SIZES"
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each period")
    parser.add_argument("--only", choices=("steps", "loss"), help="measure one of the two")
    args = parser.parse_args()
    rows: Rows = []
    if args.only != "loss":
        rows += on_ranks(4, step_rows, args)
        print("\n".join(map(step_line, rows)), flush=True)
    if args.only != "steps":
        for mesh, world in MESHES.items():
            rows += on_ranks(world, loss_rows, args, mesh)
    write(args.json, rows)


if __name__ == "__main__":
    main()
