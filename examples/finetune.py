"""Fine-tune a model that AdamW pretrained, with AdamW and with dmuon; and go from AdamW to dmuon in
the middle of a run.

    OMP_NUM_THREADS=1 python examples/finetune.py --json finetune.json    # minutes, on one core

A GPT like the demo's, but smaller, learns the sources of Python's standard library, then Python's
manual in English. Losses are of validation, in nats per byte. The file has every row as soon as it
is measured.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import train_gpt as demo
from _gpt import GPTConfig
from _results import machine, versions, write_json
from _text import Text, load_manual, load_standard_library
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

STEPS, TUNING_STEPS = 400, 60
PRETRAINING_LR = 1e-3  # AdamW's best in docs/learning-rate.md
LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of both optimizers in fine-tuning
CHANGES = ((1e-3, True), (1e-3, False), (3e-3, True))  # dmuon's rate; with AdamW's moments?
MOMENTS = (0, 10, 50)  # steps after the change at which validation is looked at
MODEL = GPTConfig(width=64, heads=2, hidden=176, depth=3)  # 0.2 M parameters

Row = dict[str, Any]
Weights = list[Tensor]


def training_of(
    optimizer: str, lr: float, text: Text, steps: int, seed: int, start: Weights | None = None
) -> demo.Training:
    """A training in one process from ``start``, or from the seed's initial weights."""
    arguments = argparse.Namespace(
        seed=seed, steps=steps, lr=lr, adamw_lr=lr,
        layout="auto", dtype="float32", period=1, block_lr_ratio=None,
    )  # fmt: skip
    ranks = demo.Ranks(0, 1, torch.device("cpu"))
    job = demo.Job(arguments, ranks, Console(quiet=True), text, MODEL)
    training = demo.adamw_training(job) if optimizer == "AdamW" else demo.dmuon_training(job)[0]
    if start is not None:
        with torch.no_grad():
            for parameter, weight in zip(training.model.parameters(), start, strict=True):
                parameter.copy_(weight)
    return training


def weights_of(training: demo.Training) -> Weights:
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def losses_of(training: demo.Training, *moments: int) -> dict[str, float]:
    """Train on, and look at validation so many steps after now."""
    losses = {}
    for step in range(moments[-1] + 1):
        if step in moments:
            losses[str(step)] = demo.validation_loss(training.job, training.model)
        if step < moments[-1]:
            training.step()
    return losses


def change(before: demo.Training, lr: float, moments: bool) -> demo.Training:
    """dmuon, which goes on with AdamW's run: its weights, its schedule, the batches that follow."""
    job, steps = before.job, before.job.arguments.steps
    after = training_of("dmuon", lr, job.text, steps, job.arguments.seed, weights_of(before))
    if moments:
        after.opt.load_state_dict([copy.deepcopy(before.opt.state_dict())])
    after.losses = list(before.losses)
    done = len(before.losses)
    after.schedule = LambdaLR(after.opt, lambda step: demo.warmup_then_cosine(done + step, steps))
    return after


def rows_of(seeds: range) -> Iterator[Row]:
    library, manual = load_standard_library(manual=False), load_manual()
    for seed in seeds:
        training = training_of("AdamW", PRETRAINING_LR, library, STEPS, seed)
        for _ in range(STEPS // 2):
            training.step()
        changed = [(lr, kept, change(training, lr, kept)) for lr, kept in CHANGES]
        row = {"set": "one run", "optimizer": "AdamW", "lr": PRETRAINING_LR, "seed": seed}
        yield row | {"losses": losses_of(training, *MOMENTS, STEPS - STEPS // 2)}
        for lr, kept, after in changed:
            row = {"set": "one run", "optimizer": "AdamW, then dmuon", "lr": lr, "seed": seed}
            yield row | {"moments": kept, "losses": losses_of(after, *MOMENTS)}
        start = weights_of(training)
        for lr in LRS:
            for optimizer in ("AdamW", "dmuon"):
                tuning = training_of(optimizer, lr, manual, TUNING_STEPS, seed, start)
                row = {"set": "fine-tuning", "optimizer": optimizer, "lr": lr, "seed": seed}
                row |= {"losses": losses_of(tuning, 0, TUNING_STEPS)}
                yield row | {"library": demo.validation_loss(training.job, tuning.model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("out/finetune.json"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows: list[Row] = []
    with demo.process_group("cpu"):
        for row in rows_of(range(args.seeds)):
            rows.append(row)
            print(row, flush=True)
            here = machine(torch.device("cpu"))
            about: Row = {"machine": {"cpu": here["processor"], "cores": here["cpus"]}}
            about |= {"versions": versions(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
            about |= {"steps": STEPS, "tuning_steps": TUNING_STEPS, "model": asdict(MODEL)}
            write_json(args.json, about | {"rows": rows})


if __name__ == "__main__":
    main()
