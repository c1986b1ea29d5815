"""What does MuonBP cost in loss? The demo's model with periods 1, 2, 5 and infinity.

``python -m benchmarks.muonbp --json out.json``: every training starts from the same weights and
sees the same batches, on FSDP2 over 4 processes and on tensor parallelism over 2. Step sizes of a
block step: ``two`` is `dmuon.Muon`'s default, each kind of step adjusted by the dims of what it
orthogonalizes; ``low`` multiplies ``block_lr_ratio`` at the lower end that theory gives,
``1 / sqrt(blocks)``. What a step costs in time and traffic: `benchmarks.steps`.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import command, write

# The examples are scripts: their folder is on the path when they run, and so it must be here.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_gpt as demo
from _gpt import GPTConfig
from _parallel import shard_with_fsdp2, split_with_tensor_parallelism
from _results import Run
from _text import load_standard_library

PERIODS = (1, 2, 5, math.inf)
MESHES = {"fsdp=4": 4, "tp=2": 2}  # with their numbers of ranks
STEP_SIZES = ("two", "low")
STREAMS = 4  # a batch is what four ranks of the demo read in a step, whoever reads it here


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
        opt = dmuon.Muon(
            model,
            lr=demo.LR,
            weight_decay=demo.WEIGHT_DECAY,
            period=period,
            block_lr_ratio=1 / math.sqrt(world) if sizes == "low" else None,
        )
        clip = partial(dmuon.clip_grad_norm_, model, demo.CLIP_NORM)
    demo.train(job, run, model, opt, clip)
    row = {
        "set": "demo loss",
        "optimizer": run.name,
        "layout": "sharded",
        "mesh": mesh,
        "world": world,
        "period": "inf" if period == math.inf else period,
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
    kinds: list[tuple[float | None, str]] = [(None, "two")] if is_fsdp else []
    kinds += [(1, "two"), *((p, sizes) for p in PERIODS[1:] for sizes in args.step_sizes)]
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


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    parser.add_argument("--step-sizes", nargs="+", choices=STEP_SIZES, default=["two"])
    args = parser.parse_args()
    rows: Rows = []
    for mesh, world in MESHES.items():
        rows += on_ranks(world, loss_rows, args, mesh)
    write(args.json, rows)


if __name__ == "__main__":
    main()
