"""The ``check`` command: dmuon on several processes against Muon in one, on built-in models."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from dmuon.config import DedicatedOptions, ReplicatedOptions, ShardedOptions
from dmuon.tools.equivalence import EquivalenceReport, EquivalenceRow, check_step_equivalence

if TYPE_CHECKING:
    from dmuon.tools.parallel_models import ParallelCase

__all__ = ["run"]

_NPROC = 4  # processes of the replicated layout
_TIMEOUT_S = 300  # of a collective; a check that hangs has failed
_VOCAB = 61
_DATA_OF_A_SEED = 10_000  # steps until the data are those of the next seed


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.norm(x)).chunk(3, -1)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _CheckModel(nn.Module):
    """A small language model with odd widths: wide, tall and square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(_VOCAB, 50)
        self.blocks = nn.ModuleList(_Block(50, 126) for _ in range(3))
        self.lm_head = nn.Linear(50, _VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def _loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(inputs[0]).float().flatten(0, 1), inputs[1].flatten())


def _batch(step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(104729 * (step + _DATA_OF_A_SEED * seed) + rank)
    tokens = torch.randint(0, _VOCAB, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# (DDP, dtype of the parameters, dtype of Newton-Schulz)
_CASES = (
    (False, torch.float32, torch.float32),
    (True, torch.float32, torch.float32),
    (False, torch.float32, torch.bfloat16),
    (False, torch.bfloat16, torch.bfloat16),
)


# Cases that are also compared with Newton-Schulz in half precision.
_HALF_PRECISION = ("fsdp4", "tp+fsdp")

_LAYOUTS = ("replicated", "sharded", "dedicated")

# What an owner calls for Newton-Schulz, by layout.
NEWTON_SCHULZ = {
    "replicated": "dmuon.step.owner.orthogonalize",
    "sharded": "dmuon.step.sharded.orthogonalize",
    "dedicated": "dmuon.step.owner.orthogonalize",
}


@dataclass(frozen=True, slots=True)
class _Job:
    """Comparisons that share ``world`` processes; ``case`` is None in the replicated layout."""

    layout: str
    world: int
    case: ParallelCase | None = None


def _jobs(args: argparse.Namespace) -> list[_Job]:
    """What is compared, layout by layout; cases of more than ``--nproc`` processes are left out."""
    chosen = _LAYOUTS if args.layout == "all" else (args.layout,)
    jobs = [_Job("replicated", args.nproc or _NPROC)] if "replicated" in chosen else []
    if chosen == ("replicated",):
        return jobs
    # Only here, for FSDP takes a second to import, which the other commands do not need.
    from dmuon.tools.parallel_models import CASES, DEDICATED_CASES

    for layout, cases in (("sharded", CASES), ("dedicated", DEDICATED_CASES)):
        fitting = [case for case in cases if args.nproc is None or case.world <= args.nproc]
        jobs += [_Job(layout, case.world, case) for case in fitting if layout in chosen]
    return jobs


def _fault(args: argparse.Namespace, layout: str) -> AbstractContextManager[Any]:
    """With --plant-fault the last rank publishes updates that are wrong by 20%."""
    if not args.plant_fault or dist.get_rank() != dist.get_world_size() - 1:
        return nullcontext()
    honest = resolve_name(NEWTON_SCHULZ[layout])
    return mock.patch(NEWTON_SCHULZ[layout], lambda *a: [1.2 * u for u in honest(*a)])


def _replicated_rows(args: argparse.Namespace) -> Iterator[EquivalenceRow]:
    for (ddp, dtype, ns_dtype), seed in product(_CASES, range(args.seeds)):

        def build(dtype: torch.dtype = dtype, seed: int = seed) -> nn.Module:
            torch.manual_seed(1000 * seed + dist.get_rank())  # rank 0's weights count
            return _CheckModel().to(dtype)

        half = dtype.itemsize < 4
        with _fault(args, "replicated"):
            report = check_step_equivalence(
                build,
                _loss,
                partial(_batch, seed=seed),
                parallelize=DistributedDataParallel if ddp else None,
                layout="replicated",
                steps=args.steps,
                # In half precision the wire's own rounding would hide what is to be checked.
                options=ReplicatedOptions(
                    reduce_dtype=torch.float32 if half else None, timeout_s=_TIMEOUT_S
                ),
                lr=args.lr,
                ns_dtype=ns_dtype,
            )
        yield from (replace(row, seed=seed) for row in report.rows)


def _parallel_rows(
    args: argparse.Namespace, layout: str, case: ParallelCase
) -> Iterator[EquivalenceRow]:
    from dmuon.tools.parallel_models import batch, loss_of

    mesh = case.make_mesh()
    options = ShardedOptions if layout == "sharded" else DedicatedOptions
    half = (torch.bfloat16,) if case.name in _HALF_PRECISION else ()
    for ns_dtype, seed in product((torch.float32, *half), range(args.seeds)):

        def build(seed: int = seed) -> nn.Module:
            torch.manual_seed(seed)  # replicas must start alike
            return case.build()

        def batches(step: int, data_rank: int, seed: int = seed) -> tuple[Tensor, Tensor]:
            return batch(_DATA_OF_A_SEED * seed + step, data_rank)

        with _fault(args, layout):
            report = check_step_equivalence(
                build,
                loss_of,
                batches,
                mesh,
                tensor_parallel=lambda model: case.tensor_parallel(model, mesh),
                parallelize=lambda model: case.data_parallel(model, mesh),
                layout=layout,
                steps=args.steps,
                options=options(timeout_s=_TIMEOUT_S),
                data_axes=case.data_axes,
                lr=args.lr,
                ns_dtype=ns_dtype,
                # AdamW divides by |g| + eps: where g is all but zero, its last bits would decide.
                adamw_eps=1e-4,
            )
        yield from (replace(row, case=case.name, seed=seed) for row in report.rows)


def _check_worker(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)  # the ranks share this machine's cores
    # DTensor warns of slow gathers, of which comparing whole tensors has many.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    # Some rows ask for a dtype that measured kernels are not for; the table says which ran.
    warnings.filterwarnings("ignore", "dmuon: the plan's kernels were chosen for")
    try:
        rows: list[EquivalenceRow] = []
        for job in _jobs(args):
            if job.world != world:
                continue
            if job.case is None:
                rows += _replicated_rows(args)
            else:
                rows += _parallel_rows(args, job.layout, job.case)
        if rank == 0:
            with open(os.path.join(folder, f"rows{world}.json"), "w") as file:
                json.dump([asdict(row) for row in rows], file)
    finally:
        # DistributedDataParallel holds the group; let go of it first, so that the group's threads
        # end here and not in the interpreter's exit.
        gc.collect()
        dist.destroy_process_group()


# What takes seconds to import; the last for what `DTensor` imports when it is first used.
_IMPORTS = ["dmuon.__main__", "dmuon.tools.parallel_models", "torch.distributed.pipelining"]


def _start_method() -> str:
    """How to start processes: where there is fork, all share one import of torch."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(_IMPORTS)
    return "forkserver"


def _compare(args: argparse.Namespace, worlds: Collection[int]) -> EquivalenceReport:
    """All rows, layout by layout."""
    rows: list[EquivalenceRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            if len(worlds) > 1:  # minutes on few cores
                print(f"comparing on {world} processes ...", file=sys.stderr, flush=True)
            start_processes(
                _check_worker, (world, args, folder), nprocs=world, start_method=_start_method()
            )
            with open(os.path.join(folder, f"rows{world}.json")) as file:
                rows += (EquivalenceRow(**row) for row in json.load(file))
    order = {layout: i for i, layout in enumerate(_LAYOUTS)}
    return EquivalenceReport(tuple(sorted(rows, key=lambda row: order[row.layout.split()[0]])))


def run(args: argparse.Namespace) -> int:
    """Compare, print the table or JSON; 1 if anything differs, 2 if there is nothing to do."""
    worlds = sorted({job.world for job in _jobs(args)})
    if not worlds:
        sys.stderr.write(
            f"python -m dmuon check: error: --nproc {args.nproc} leaves no mesh to check with "
            f"--layout {args.layout}: give 2 or more, or leave it out\n"
        )
        return 2
    report = _compare(args, worlds)
    if args.json != "-":
        print(report, flush=True)
    if args.json == "-":
        print(json.dumps(report.to_dict(), indent=1))
    elif args.json:
        with open(args.json, "w") as file:
            json.dump(report.to_dict(), file, indent=1)
    if not report.passed:
        print("dmuon differs from the reference", file=sys.stderr)
    return 0 if report.passed else 1
