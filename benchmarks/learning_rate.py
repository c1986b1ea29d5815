"""Which learning rate? The demo's training over five rates, with AdamW and with dmuon; and with the
best rate for the matrices alone.

``python -m benchmarks.learning_rate --json out.json`` (docs/learning-rate.md): in one process,
every training of a seed starts from the same weights and sees the same batches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.demo import COLORS, demo, job_of
from benchmarks.results import Benchmark, Cases, Row, picture
from benchmarks.timing import on_ranks

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
APART = (1e-2, 1e-3)  # of the matrices, and of what goes to AdamW


def work(rank: int, seed: int, steps: int) -> list[Row]:
    """Each rate with each optimizer, and `APART`."""
    rows: list[Row] = []
    for lr, adamw_lr in [*((lr, None) for lr in LRS), APART]:
        job = job_of(rank, steps=steps, seed=seed, layout="auto", lr=lr, adamw_lr=lr)
        dmuon_training, own = demo.dmuon_training(job, adamw_lr=adamw_lr)
        trainings = [dmuon_training]
        if adamw_lr is None:
            trainings.append(demo.adamw_training(job))
        for run in demo.train(job, *trainings):
            row: Row = {"set": "demo loss", "optimizer": run.name, "seed": seed, "steps": steps}
            same = ("lr", "validation_loss", "train_loss", "seconds", "tokens")
            row |= {name: getattr(run, name) for name in same}
            rows.append(row | ({"adamw_lr": adamw_lr} if adamw_lr else {}))
        own.close()
    return rows


def draw(rows: Sequence[Row], path: str) -> None:
    """Mean validation loss over the seeds against the rate, each seed a dot."""
    with picture(path, 1, 1, (7, 4.2)) as (_, axes):
        for name, color in COLORS.items():
            mine = [row for row in rows if row["optimizer"] == name and "adamw_lr" not in row]
            by_lr = {lr: [r["validation_loss"] for r in mine if r["lr"] == lr] for lr in LRS}
            axes.plot(LRS, [statistics.fmean(by_lr[lr]) for lr in LRS], color=color, label=name)
            for lr, losses in by_lr.items():
                axes.scatter([lr] * len(losses), losses, 16, color=color)
        axes.set(xscale="log", xlabel="lr", ylabel="validation loss (nats a byte)")
        axes.set_xticks(LRS, [f"{lr:g}" for lr in LRS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    for seed in range(args.seeds):
        yield f"seed {seed}", partial(on_ranks, 1, work, seed, args.steps)


LINE = "{optimizer:6} {lr:g} seed {seed}: {validation_loss:.4f}, {seconds:.0f} s"
BENCHMARK = Benchmark(__doc__, cases, lambda row: LINE.format(**row), options, draw=draw)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
