"""What does MuonBP cost in loss? The demo's training with periods 1, 2, 5 and infinity.

``python -m benchmarks.muonbp --json out.json`` (docs/muonbp.md), on FSDP2 over 4 processes. Step
sizes of a block step: ``two`` is `dmuon.Muon`'s default; ``low`` multiplies ``block_lr_ratio`` at
the lower end that theory gives, ``1 / sqrt(blocks)``.
"""

from __future__ import annotations

import math
from argparse import Namespace

from benchmarks.demo import demo, job_of, row_of
from benchmarks.results import Row, command, write
from benchmarks.timing import on_ranks

WORLD = 4
PERIODS = (1, 2, 5, math.inf)
STEP_SIZES = {"two": None, "low": 1 / math.sqrt(WORLD)}


def work(rank: int, args: Namespace) -> list[Row]:
    """AdamW, and every period with every kind of step sizes; plain Muon takes no block step."""
    kinds = [(None, "two"), (1, "two"), *((p, s) for p in PERIODS[1:] for s in args.step_sizes)]
    rows: list[Row] = []
    for seed in range(args.seeds):
        rates = {"lr": demo.LR, "adamw_lr": demo.ADAMW_LR}
        job = job_of(rank, steps=args.steps, seed=seed, layout="sharded", **rates)
        for period, sizes in kinds:
            if period is None:
                [run] = demo.train(job, demo.adamw_training(job))
            else:
                job.arguments.period, job.arguments.block_lr_ratio = period, STEP_SIZES[sizes]
                training, own = demo.dmuon_training(job)
                [run] = demo.train(job, training)
                own.close()
            row = row_of(run, seed) | {
                "layout": "sharded",
                "world": WORLD,
                "period": "inf" if period == math.inf else period,
                "step_sizes": sizes,
                "validation": run.validation,
            }
            rows.append(row)
            if rank == 0:
                about = "{optimizer:6} P={period} {step_sizes} seed {seed}".format(**row)
                losses = "validation {validation_loss:.4f}, train {train_loss:.4f}".format(**row)
                print(f"{about}: {losses}, {run.seconds:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument("--step-sizes", nargs="+", choices=STEP_SIZES, default=["two"])
    args = parser.parse_args()
    write(args.json, on_ranks(WORLD, work, args))


if __name__ == "__main__":
    main()
