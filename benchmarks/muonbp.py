"""What does MuonBP save, and what does it cost? Periods 1, 2, 5 and infinity.

``python -m benchmarks.muonbp --json out.json`` measures two things. Steps: the time of `step`, and
the collectives and bytes in it, on FSDP2 over 4 gloo processes, every period in turn in one run.
Loss: see `benchmarks.muonbp_loss`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.models import Stack, Training, shard
from benchmarks.muonbp_loss import MESHES, PERIODS, STEP_SIZES, is_full, loss_rows, period_name
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import command, write
from benchmarks.timing import Laps, spread, take_turns

CYCLE = 10  # steps: a multiple of every finite period
LAYERS, WIDTH = 8, 256


class Contender:
    """One period, or AdamW (None), on its own FSDP2 copy of the model."""

    def __init__(self, period: float | None) -> None:
        torch.manual_seed(0)
        self.period = period
        model, shape = Stack(LAYERS, WIDTH), (4, 8, WIDTH)
        shard(model, model.layers)
        if period is None:
            adamw = torch.optim.AdamW(model.parameters(), foreach=True)
            self.training = Training(model, shape, [adamw])
        else:
            # "sync": nothing of the step may be left for the next forward, which is not counted.
            plan = {"layout": "sharded"}
            self.training = Training.of_muon(model, shape, plan, period=period, publish="sync")
        self.counts: list[tuple[int, int]] = []  # collectives and bytes of the first steps

    def turn(self) -> Laps:
        """Of one `step`. Counting is slow, so the first `CYCLE` steps are counted, and those after
        them are timed."""
        if len(self.counts) >= CYCLE:
            return self.training.step_turn()
        self.training.loss.backward()
        with CommDebugMode() as mode:
            self.training.step()
        nbytes = 0 if self.period is None else sum(self._stats()["bytes"].values())
        self.counts.append((mode.get_total_counts(), nbytes))
        self.training.forward()
        return (0.0,)

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.training.optimizers[0].stats()
        return stats

    def row(self, ms: list[float]) -> dict[str, Any]:
        """Bytes are of this rank."""
        collectives, nbytes = zip(*self.counts)
        row: dict[str, Any] = {
            "set": f"step, {LAYERS} layers, w={WIDTH}",
            "optimizer": "adamw" if self.period is None else "muonbp",
            "layout": "sharded",
            "mesh": "fsdp=4",
            "world": dist.get_world_size(),
            **spread(ms),
            "mean_ms": statistics.fmean(ms),
            "collectives": statistics.fmean(collectives),
            "bytes": statistics.fmean(nbytes),
        }
        if self.period is None:
            return row
        row |= {"period": period_name(self.period), "ns_dtype": self._stats()["ns_dtype"]}
        for kind in ("full", "block"):
            steps = [
                t for t in range(CYCLE + len(ms)) if is_full(t, self.period) == (kind == "full")
            ]
            of_kind = [ms[t - CYCLE] for t in steps if t >= CYCLE]
            row[f"{kind}_ms"] = statistics.median(of_kind) if of_kind else None
            row[f"collectives_{kind}"] = sorted({collectives[t] for t in steps if t < CYCLE})
            row[f"bytes_{kind}"] = sum(nbytes[t] for t in steps if t < CYCLE)
        return row


def step_rows(rank: int, args: argparse.Namespace) -> Rows:
    """AdamW and every period, step by step in turn."""
    field = {str(period): Contender(period) for period in (None, *PERIODS)}
    turns = {name: contender.turn for name, contender in field.items()}
    times = take_turns(turns, args.repeats, warm_up=CYCLE)
    rows = [field[name].row([laps[0] for laps in found]) for name, found in times.items()]
    for contender in field.values():
        contender.training.close()
    return rows


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
    parser = command(__doc__)
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
