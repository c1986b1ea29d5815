"""Train a small GPT with dmuon and, from the same weights on the same text, with AdamW.

    make demo
    torchrun --standalone --nproc-per-node=4 examples/train_gpt.py --steps 300
    torchrun --standalone --nproc-per-node=8 examples/train_gpt.py --device cuda

Both models are sharded with FSDP2; with `--layout replicated` they are whole on every rank. They
train by turns, a step each, so that their seconds can be compared on a machine that others use.
Plain `python examples/train_gpt.py` runs in one process. Every rank reads different text. Only rank
0 prints; it writes `demo.json`, `demo.png` and `report.html` (who owns which matrix) to `--out`. To
start your own script, copy `dmuon_training` and `Training.step`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, GPTConfig
from _progress import Ticker, Timer
from _results import (
    Run,
    at_equal_time,
    machine,
    plot_losses,
    results_table,
    versions,
    write_json,
)
from _text import Text, load_standard_library
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import dmuon

SEQUENCES = 4  # per step and rank
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1

# Validation losses of a sweep: 300 steps, the text of 4 ranks, seed 0, plain Muon in one process.
#   Muon   1e-3 1.858  2e-3 1.641  3e-3 1.581  6e-3 1.527  8e-3 1.526  1e-2 1.523  1.5e-2 1.554
#   AdamW  1e-3 1.851  2e-3 1.785  3e-3 1.790  4e-3 1.860  6e-3 1.926  1e-2 2.086
# Both rates are also used for fewer steps: after 120, Muon has 1.951 and AdamW 2.271.
# Muon is flat around 8e-3. AdamW's line is for betas (0.9, 0.95). At 2e-3, betas (0.9, 0.99) gave
# 1.783 and weight decay 0.01 gave 1.782. Torch's own betas (0.9, 0.999) are the best found, used
# here: 1.786 at 1.5e-3, 1.778 at 2e-3, 1.796 at 3e-3. With seed 1 Muon gives 1.558 at 6e-3 and
# 1.537 at 1e-2, AdamW 1.832 at 2e-3.
LR = 8e-3
ADAMW_LR = 2e-3

WARMUP = 0.1  # of the steps
FINAL_LR = 0.1  # of the peak
VALIDATION_WINDOWS = 128
VALIDATIONS = 6  # per run

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    def mean(self, values: list[float]) -> list[float]:
        return [total / self.world for total in self._reduce(values, dist.ReduceOp.SUM)]

    def slowest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()


@dataclass(frozen=True)
class Job:
    """Settings and data that the two runs share."""

    arguments: argparse.Namespace
    ranks: Ranks
    console: Console
    text: Text
    config: GPTConfig

    @property
    def tokens_per_step(self) -> int:
        return SEQUENCES * self.config.context * self.ranks.world

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def build_model(self) -> GPT:
        """The same initial weights every time, on every rank."""
        torch.manual_seed(self.arguments.seed)
        return GPT(self.config).to(self.ranks.device, getattr(torch, self.arguments.dtype))

    def shard(self, model: GPT) -> GPT:
        """FSDP2 for each block separately and the rest with the root, in place."""
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        return model

    def training_batch(self, step: int) -> Batch:
        seed, context = self.arguments.seed, self.config.context
        batch = self.text.training_batch(
            step, self.ranks.rank, sequences=SEQUENCES, context=context, seed=seed
        )
        return self._to_device(batch)

    def validation_batches(self) -> Iterator[Batch]:
        batches = self.text.validation_batches(
            self.ranks.rank,
            self.ranks.world,
            sequences=2 * SEQUENCES,
            context=self.config.context,
            total=VALIDATION_WINDOWS,
        )
        return map(self._to_device, batches)

    def _to_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.ranks.device), targets.to(self.ranks.device)


@dataclass
class Training:
    """A model with its optimizer, trained a step at a time, and what is measured on the way."""

    job: Job
    run: Run
    model: nn.Module
    opt: torch.optim.Optimizer
    clip_gradients: Callable[[], object]

    def __post_init__(self) -> None:
        steps, device = self.job.arguments.steps, self.job.ranks.device
        self.schedule = LambdaLR(self.opt, lambda step: warmup_then_cosine(step, steps))
        self.clock, self.optimizer_clock = Timer(device), Timer(device)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        dist.barrier()  # no rank is still at the step of another training
        with self.clock:
            loss = next_byte_loss(self.model, *self.job.training_batch(len(self.losses)))
            loss.backward()
            self.clip_gradients()
            with self.optimizer_clock:
                self.opt.step()
            self.opt.zero_grad()
            self.schedule.step()
        self.losses.append(loss.detach())

    def validate(self) -> None:
        self.run.validation.append((len(self.losses), validation_loss(self.job, self.model)))

    def finish(self) -> Run:
        """Write the measurements into `run`, the same on every rank."""
        run, ranks = self.run, self.job.ranks
        run.tokens = len(self.losses) * self.job.tokens_per_step
        run.losses = ranks.mean(torch.stack(self.losses).tolist())
        run.step_ms = ranks.slowest(self.optimizer_clock.milliseconds())
        run.elapsed = list(accumulate(ms / 1e3 for ms in ranks.slowest(self.clock.milliseconds())))
        return run


def dmuon_training(job: Job, *, adamw_lr: float | None = None) -> tuple[Training, dmuon.Ownership]:
    """``adamw_lr``: of what goes to AdamW, None for as much as the matrices have."""
    model = job.build_model()
    if job.arguments.layout == "sharded":
        job.shard(model)
    # The model is plain, so nobody else averages its gradients.
    averages = job.arguments.layout == "replicated"
    options = dmuon.ReplicatedOptions(reduce_to_owner=True) if averages else None
    own = dmuon.dedicate_params(model, layout=job.arguments.layout, options=options)
    opt = dmuon.Muon(
        model,
        lr=job.arguments.lr,
        weight_decay=WEIGHT_DECAY,
        period=job.arguments.period,
        block_lr_ratio=job.arguments.block_lr_ratio,
        adamw_lr=adamw_lr,
    )
    run = Run("dmuon", job.arguments.lr)
    return Training(job, run, model, opt, lambda: dmuon.clip_grad_norm_(model, CLIP_NORM)), own


def adamw_training(job: Job) -> Training:
    model = job.build_model()
    sharded = job.arguments.layout == "sharded"
    wrapped = job.shard(model) if sharded else DistributedDataParallel(model)
    opt = torch.optim.AdamW(
        model.parameters(), lr=job.arguments.adamw_lr, weight_decay=WEIGHT_DECAY, fused=True
    )
    run = Run("AdamW", job.arguments.adamw_lr)
    return Training(
        job, run, wrapped, opt, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    )


def train(job: Job, *trainings: Training) -> list[Run]:
    """Train for `--steps`, by turns: what else the machine does then slows all of them alike."""
    steps = job.arguments.steps
    names = [training.run.name for training in trainings]
    with Ticker(job.console, names, steps, tokens_per_step=job.tokens_per_step) as ticker:
        for first, last in stretches(steps):
            for _ in range(first, last):
                for training in trainings:
                    training.step()
                    ticker.tick(training.run.name, training.losses, training.clock)
            for training in trainings:
                training.validate()
    return [training.finish() for training in trainings]


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def warmup_then_cosine(step: int, steps: int) -> float:
    """The factor on every learning rate: a linear warm-up, then a half cosine to `FINAL_LR`."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done))


def stretches(steps: int) -> list[tuple[int, int]]:
    """The steps from one validation to the next, as half-open ranges."""
    ends = sorted({math.ceil(steps * part / VALIDATIONS) for part in range(1, VALIDATIONS + 1)})
    return list(zip([0, *ends[:-1]], ends, strict=True))


@torch.no_grad()
def validation_loss(job: Job, model: nn.Module) -> float:
    """Mean over the validation windows of all ranks, which have equally many."""
    model.eval()
    total, windows = 0.0, 0
    for inputs, targets in job.validation_batches():
        total += next_byte_loss(model, inputs, targets).item() * len(inputs)
        windows += len(inputs)
    model.train()
    [loss] = job.ranks.mean([total / windows])
    return loss


@contextmanager
def process_group(kind: str) -> Iterator[Ranks]:
    """Join the processes of torchrun, or make a group of one; leave it, also after errors."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        store=None if "RANK" in os.environ else dist.HashStore(),
        device_id=device if kind == "cuda" else None,
    )
    try:
        yield Ranks(rank, world, device)
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with dmuon, and with AdamW beside it."
    )
    parser.add_argument(
        "--layout",
        choices=("auto", "sharded", "replicated"),
        default="sharded",
        help="sharded wraps the model with FSDP2; auto leaves it plain and lets dmuon choose",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters"
    )
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with AdamW too",
    )
    parser.add_argument("--lr", type=float, default=LR, help="of dmuon")
    parser.add_argument(
        "--period",
        type=lambda text: math.inf if text == "inf" else int(text),
        default=1,
        help="of MuonBP (sharded only): one full step in so many; inf: only block steps",
    )
    parser.add_argument(
        "--block-lr-ratio", type=float, help="factor on the learning rate of block steps"
    )
    parser.add_argument("--adamw-lr", type=float, default=ADAMW_LR, help="of the AdamW beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; use --device cpu")
    return arguments


def title(job: Job) -> str:
    parameters = sum(parameter.numel() for parameter in job.build_model().parameters())
    ranks = "1 rank" if job.ranks.world == 1 else f"{job.ranks.world} ranks"
    return (
        f"GPT with {parameters / 1e6:.2f} M {job.arguments.dtype} parameters on {ranks}"
        f" ({job.ranks.device.type}), {job.tokens_per_step:,} tokens per step"
    )


def routes(report: dmuon.LoadBalanceReport) -> str:
    """Which optimizer trains what, in a sentence."""
    specs, owners = report.plan.specs, report.plan.topology.world
    matrices, rest = (
        len(specs.matrices),
        sum(p.algorithm.value == "adamw" for p in specs.parameters),
    )
    told = f"{matrices} matrices -> Muon, {rest} others (embedding, output head, norms) -> AdamW"
    each = f"; each rank orthogonalizes {matrices / owners:g} of the matrices"
    return told + each * (owners > 1)


def save(job: Job, runs: list[Run], report: dmuon.LoadBalanceReport) -> None:
    """Write the numbers, the plot and the report, and print where they are."""
    out: Path = job.arguments.out
    config = {
        **vars(job.arguments),
        "out": str(out),
        "world": job.ranks.world,
        "tokens_per_step": job.tokens_per_step,
        "model": asdict(job.config),
    }
    results = {
        "machine": machine(job.ranks.device),
        "versions": versions(),
        "config": config,
        "parameters": sum(parameter.numel() for parameter in job.build_model().parameters()),
        "load_balance": report.to_dict(),
        "runs": [run.to_dict() for run in runs],
    }
    write_json(out / "demo.json", results)
    report.to_html(out / "report.html")
    job.say(f"figures: {out / 'demo.json'}\nowners:  {out / 'report.html'}")
    try:
        plot_losses(out / "demo.png", runs, title(job))
    except ImportError:
        job.say("no plot: matplotlib is not installed; pip install 'dmuon[plot]' brings it")
    else:
        job.say(f"plot:    {out / 'demo.png'}")


def main() -> None:
    arguments = parse_arguments()
    with process_group(arguments.device) as ranks:
        console = Console(quiet=ranks.rank != 0)
        job = Job(arguments, ranks, console, load_standard_library(), GPTConfig())
        job.say(f"{job.text}\n{title(job)}, {arguments.steps} steps")

        training, own = dmuon_training(job)
        report = own.report()
        job.say(routes(report))
        runs = train(job, training, *([adamw_training(job)] if arguments.compare else []))
        own.close()

        job.say(f"\nHow dmuon shares out the work:\n\n{report}\n")
        console.print(results_table(runs, title(job)))
        job.say(
            "Default learning rates are the best of a sweep (noted in examples/train_gpt.py); "
            "step() of dmuon includes Newton-Schulz."
        )
        if len(runs) > 1:
            job.say(at_equal_time(*runs))
        if ranks.rank == 0:
            save(job, runs, report)


if __name__ == "__main__":
    main()
