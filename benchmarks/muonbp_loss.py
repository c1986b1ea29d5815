"""Validation loss of the demo's model with MuonBP, for `benchmarks.muonbp`.

Every training starts from the same weights and sees the same batches, on FSDP2 over 4 processes and
on tensor parallelism over 2. Periods differ, and so do the step sizes of a block step, compared
with a full step of the same matrix:

- ``one``: the same. The learning rate is adjusted by the dims of the whole matrix in both.
- ``two``: the default of `dmuon.Muon`, each adjusted by the dims of what is orthogonalized.
- ``low``: two, with ``block_lr_ratio`` at the lower end that theory gives, ``1 / sqrt(blocks)``.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from benchmarks.ranks import Rows

# The examples are scripts: their folder is on the path when they run, and so it must be here.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_gpt as demo
from _gpt import GPTConfig
from _parallel import shard_with_fsdp2, split_with_tensor_parallelism
from _results import Run
from _text import load_standard_library

PERIODS = (1, 2, 5, math.inf)
MESHES = {"fsdp=4": 4, "tp=2": 2}  # with their numbers of ranks
STEP_SIZES = ("one", "two", "low")
STREAMS = 4  # a batch is what four ranks of the demo read in a step, whoever reads it here


def period_name(period: float) -> float | str:
    """The period as JSON has it, which knows no infinity."""
    return "inf" if period == math.inf else period


def is_full(step: int, period: float) -> bool:
    """Whether the step of this number, from 0, is a full one."""
    return period != math.inf and step % period == 0


@dataclass(frozen=True)
class Dealt(demo.Job):
    """The demo's training on the batch of `STREAMS` ranks, of which this rank reads its share.

    All ranks of a tensor-parallel group read the same share; on FSDP2 each has one of its own.
    """

    share: int
    shares: int

    @property
    def tokens_per_step(self) -> int:
        return demo.SEQUENCES * self.config.context * STREAMS

    def training_batch(self, step: int) -> demo.Batch:
        each = STREAMS // self.shares
        size = {"sequences": demo.SEQUENCES, "context": self.config.context}
        parts = [
            self.text.training_batch(step, stream, seed=self.arguments.seed, **size)
            for stream in range(self.share * each, (self.share + 1) * each)
        ]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def validation_batches(self) -> Iterator[demo.Batch]:
        found = self.text.validation_batches(
            self.share,
            self.shares,
            sequences=2 * demo.SEQUENCES,
            context=self.config.context,
            total=demo.VALIDATION_WINDOWS,
        )
        return iter(found)


def matrices(model: nn.Module) -> list[DTensor]:
    """What Muon updates here: the linear weights of the blocks."""
    named_parameters = model.named_parameters()
    return [p for n, p in named_parameters if n.startswith("blocks.") and p.ndim == 2]  # type: ignore[misc]


def groups_of_one_step_size(model: nn.Module) -> list[dict[str, Any]]:
    """A param group for each factor by which a block's learning rate falls short of the whole's.

    ``match_rms_adamw`` goes with the root of the longer dim. Every block of a matrix has the same
    shape here, so that all ranks make the same groups.
    """
    factors = {p: math.sqrt(max(p.shape) / max(p.to_local().shape)) for p in matrices(model)}
    groups: dict[float, list[Tensor]] = {1.0: []}
    for p in model.parameters():
        groups.setdefault(factors.get(p, 1.0), []).append(p)  # type: ignore[call-overload]
    return [{"params": params, "factor": factor} for factor, params in groups.items()]


def tie_step_sizes(opt: torch.optim.Optimizer, period: float) -> None:
    """In block steps, raise each group's learning rate by its factor, and leave its decay alone."""
    rates: list[tuple[Any, Any]] = []
    steps = [0]

    def before(opt: Any, *_: Any) -> None:
        rates[:] = [(group["lr"], group["weight_decay"]) for group in opt.param_groups]
        for group in () if is_full(steps[0], period) else opt.param_groups:
            group["lr"] *= group["factor"]
            group["weight_decay"] /= group["factor"]

    def after(opt: Any, *_: Any) -> None:
        for group, (lr, decay) in zip(opt.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        steps[0] += 1

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(after)


def make_muon(model: nn.Module, period: float, sizes: str, blocks: int) -> dmuon.Muon:
    settings: Any = {"lr": demo.LR, "weight_decay": demo.WEIGHT_DECAY, "period": period}
    settings["adjust_lr_fn"] = "match_rms_adamw"
    if sizes != "one":
        ratio = 1 / math.sqrt(blocks) if sizes == "low" else None
        return dmuon.Muon(model, block_lr_ratio=ratio, **settings)
    opt = dmuon.Muon(groups_of_one_step_size(model), **settings)
    tie_step_sizes(opt, period)
    return opt


def weight_norm(model: nn.Module) -> float:
    """Frobenius norm of all matrices together: every rank holds other elements of them."""
    total = torch.zeros((), dtype=torch.float64)
    for p in matrices(model):
        total += p.to_local().detach().double().square().sum()
    dist.all_reduce(total)
    return math.sqrt(float(total))


def train(job: Dealt, mesh: str, period: float | None, sizes: str) -> dict[str, Any]:
    """Train the demo's model once; period None is AdamW."""
    model = job.build_model()
    world = job.ranks.world
    parallelize = shard_with_fsdp2 if mesh.startswith("fsdp") else split_with_tensor_parallelism
    parallelize(model, init_device_mesh("cpu", (world,)))
    own: dmuon.Ownership | None = None
    opt: Any
    if period is None:
        run = Run("adamw", demo.ADAMW_LR)
        rates: Any = {"lr": demo.ADAMW_LR, "weight_decay": demo.WEIGHT_DECAY}
        opt = torch.optim.AdamW(model.parameters(), **rates)
        clip: Any = partial(nn.utils.clip_grad_norm_, list(model.parameters()), demo.CLIP_NORM)
    else:
        run = Run("muonbp", demo.LR)
        own = dmuon.dedicate_params(model, layout="sharded", costs="analytic")
        opt = make_muon(model, period, sizes, blocks=world)
        clip = partial(dmuon.clip_grad_norm_, model, demo.CLIP_NORM)
    demo.train(job, run, model, opt, clip)
    row = {
        "set": "demo loss",
        "optimizer": run.name,
        "layout": "sharded",
        "mesh": mesh,
        "world": world,
        "period": None if period is None else period_name(period),
        "step_sizes": sizes,
        "lr": run.lr,
        "seed": job.arguments.seed,
        "steps": len(run.losses),
        "validation_loss": run.validation_loss,
        "train_loss": run.train_loss,
        "weight_norm": weight_norm(model),
        "seconds": run.seconds,
        "validation": run.validation,
    }
    if own is not None:
        own.close()
    return row


def loss_rows(rank: int, args: Namespace, mesh: str) -> Rows:
    """Every period with every kind of step sizes; plain Muon takes no block step, so it has one."""
    world = dist.get_world_size()
    is_fsdp = mesh.startswith("fsdp")
    kinds: list[tuple[float | None, str]] = [(None, "one")] if is_fsdp else []
    kinds += [(1, "one"), *((p, sizes) for p in PERIODS[1:] for sizes in args.step_sizes)]
    text = load_standard_library()
    rows: Rows = []
    for seed in range(args.seeds):
        job = Dealt(
            Namespace(steps=args.steps, seed=seed, dtype="float32"),
            demo.Ranks(rank, world, torch.device("cpu")),
            Console(quiet=True),
            text,
            GPTConfig(heads=4),  # instead of the demo's five, so that two ranks can share them
            *((rank, world) if is_fsdp else (0, 1)),
        )
        for period, sizes in kinds:
            rows.append(train(job, mesh, period, sizes))
            if rank == 0:
                print(loss_line(rows[-1]), flush=True)
    return rows


def loss_line(row: dict[str, Any]) -> str:
    name = row["optimizer"] if row["optimizer"] == "adamw" else f"P={row['period']}"
    return (
        f"{row['mesh']}  {name:6} {row['step_sizes']:4} seed {row['seed']}  "
        f"validation {row['validation_loss']:.4f}  train {row['train_loss']:.4f}  "
        f"weights {row['weight_norm']:6.1f}  {row['seconds']:5.0f} s"
    )
