"""Trains small models with dmuon on several processes, with different data on each data rank, and
with a plain reference Muon on the joint batch, and compares all weights and losses after every
step. Exit status 1 if they differ, 2 for a mistake, 3 for a crash.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from dmuon import config
from dmuon.rule import Hyper
from dmuon.tools.equivalence import EquivalenceReport, EquivalenceRow, check_step_equivalence
from dmuon.tools.plan import positive, show
from dmuon.types import DmuonError

if TYPE_CHECKING:
    from dmuon.tools.parallel_models import ParallelCase

_NPROC = 4  # processes of the replicated layout
_TIMEOUT_S = 300  # of a collective; a check that hangs has failed
_DATA_OF_A_SEED = 10_000  # steps after which the next seed's data begin

# Cases of the other layouts that are also compared with Newton-Schulz in half precision.
_HALF_PRECISION = ("fsdp4", "tp+fsdp")
_FIXED = config.KernelOptions(method="gram", backend="torch")
_LAYOUTS = ("replicated", "sharded", "dedicated")
_VARIED = ("fsdp2", "hsdp", "tp+fsdp", "ep+fsdp", "plain", "tp+dp")  # also with each variant
_VARIANTS: dict[str, dict[str, Any]] = {
    "normuon": {"variant": "normuon"},
    # If an update is nearly zero, rounding decides whether an element decays. With so little decay
    # one such step stays within the tolerance, and ten steps without the mask do not.
    "cautious": {"cautious_weight_decay": True, "weight_decay": 5e-4},
    "bf16 momentum": {"momentum_dtype": "bfloat16"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    layouts = (
        "replicated: a plain module and DistributedDataParallel; sharded: FSDP2, HSDP, tensor "
        "and expert parallelism and their products, on 2, 4 and 8 processes; dedicated: a plain "
        "module, tensor parallelism, and FSDP2 or HSDP for what owners do not keep, on 2 and 4"
    )
    add("--layout", choices=(*_LAYOUTS, "all"), default="replicated", help=layouts)
    nproc = "processes of the replicated layout (default 4); meshes of more processes are left out "
    add("--nproc", type=positive(int), help=nproc + "in the other layouts (default: none is)")
    add("--steps", type=positive(int), default=10)
    add("--lr", type=float, default=0.02)
    seeds = "make each comparison with that many weights and data; a row each (default 1)"
    add("--seeds", type=positive(int), default=1, help=seeds)
    bits = "fix the kernels, with which a step gives the bits of a single process, and compare them"
    add("--bitwise", action="store_true", help=f"{bits}, too")
    add("--json", metavar="PATH", help="write the rows there; - for standard output")
    fault = "let one rank change weights by a fifth too much, to see that the check can fail"
    add("--plant-fault", action="store_true", help=fault)


class _Job(NamedTuple):
    """Comparisons of one model on one mesh, for each of ``dtypes``: (parameters', Newton-Schulz's).

    ``reduces``: the `replicated` layout with ``reduce_to_owner``. ``variant``: one of
    `_VARIANTS`. ``redundancy``: how many parts of the mesh, whose nodes have ``each`` ranks,
    compute each matrix by themselves."""

    layout: Any  # one of `_LAYOUTS`
    case: ParallelCase
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]]
    reduces: bool = False
    variant: str = ""
    redundancy: Any = "auto"
    each: int | None = None


def _jobs(args: argparse.Namespace) -> list[_Job]:
    """Return the comparisons by layout, without cases of more than ``--nproc`` processes."""
    # Imported here, because FSDP takes a second that the other commands can save.
    from dmuon.tools.parallel_models import CASES, DEDICATED_CASES, replicated_case

    fp32, bf16 = torch.float32, torch.bfloat16
    full, half = (fp32, fp32), (fp32, bf16)
    nproc = args.nproc or _NPROC
    ddp = replicated_case(nproc, DistributedDataParallel)
    jobs = [
        _Job("replicated", ddp, [full, half]),
        _Job("replicated", ddp, [full], reduces=True),
        _Job("replicated", replicated_case(nproc), [full, half, (bf16, bf16)], reduces=True),
    ]
    for layout, case in (*product(["sharded"], CASES), *product(["dedicated"], DEDICATED_CASES)):
        if case.world <= (args.nproc or case.world):
            jobs.append(_Job(layout, case, [full] + [half] * (case.name in _HALF_PRECISION)))
    if not args.bitwise:  # a variant may round batches and matrices differently
        varied = [jobs[0], *(job for job in jobs[1:] if job.reduces or job.case.name in _VARIED)]
        varied = [job._replace(dtypes=[full]) for job in varied]
        jobs += [job._replace(variant=variant) for variant in _VARIANTS for job in varied]
    # Each matrix is computed once, on each node, or on each rank; or with HSDP in each replica.
    on_nodes = [(1, 2), (nproc // 2, 2)] * (nproc > 2 and nproc % 2 == 0)
    ways = [(jobs[0], n, each) for n, each in ((nproc, 1), *on_nodes) if nproc > 1]
    hsdp = [job for job in jobs if job.layout == "sharded" and job.case.name == "hsdp"]
    ways += [(job, n, 2) for job in hsdp for n in (1, 2)]
    ways += [(job, 1, 2) for job in jobs[:4] if job.reduces and on_nodes]
    plain = [(job, n, each) for job, n, each in ways if not job.variant]
    jobs += [j._replace(dtypes=[full], redundancy=n, each=each) for j, n, each in plain]
    return [job for job in jobs if args.layout in (job.layout, "all")]


def _rows(args: argparse.Namespace, job: _Job) -> Iterator[EquivalenceRow]:
    from dmuon.tools.parallel_models import batch, loss_of

    layout, case, _, reduces, variant, redundancy, each = job
    mesh = case.make_mesh()
    for (dtype, ns_dtype), seed in product(job.dtypes, range(args.seeds)):

        def build(dtype: torch.dtype = dtype, seed: int = seed) -> nn.Module:
            # In the replicated layout rank 0's weights count; replicas of shards must start alike.
            torch.manual_seed(1000 * seed + (dist.get_rank() if layout == "replicated" else 0))
            return case.build().to(dtype)

        def batches(step: int, data_rank: int, seed: int = seed) -> tuple[Tensor, Tensor]:
            return batch(_DATA_OF_A_SEED * seed + step, data_rank)

        # Messages in half precision would hide the differences to be found.
        wide = torch.float32 if dtype.itemsize < 4 else None
        options: Any = config.ReplicatedOptions(reduce_to_owner=reduces, reduce_dtype=wide)
        if layout != "replicated":
            options = config.ShardedOptions() if layout == "sharded" else config.DedicatedOptions()
        # AdamW divides by |g| + eps: if g is nearly zero, its last bits would decide.
        muon = {"lr": args.lr, "ns_dtype": ns_dtype, "adamw_eps": 1e-4}
        report = check_step_equivalence(
            build, loss_of, batches, mesh, layout=layout, steps=args.steps,
            parallelize=lambda model: case.data_parallel(model, mesh),
            tensor_parallel=lambda model: case.tensor_parallel(model, mesh),
            options=replace(options, timeout_s=_TIMEOUT_S),
            kernels=_FIXED if args.bitwise else config.KernelOptions(),
            planner=config.PlannerOptions(redundancy=redundancy, ranks_per_node=each),
            data_axes=case.data_axes, **muon, **_VARIANTS.get(variant, {}),
        )  # fmt: skip
        parts = f"redundancy {redundancy}" * (redundancy != "auto")
        name = " ".join(filter(None, (case.name, variant, parts)))
        yield from (replace(row, case=name, seed=seed) for row in report.rows)


def _check_worker(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)  # the ranks share this machine's cores
    # DTensor warns of slow gathers, and comparing whole tensors needs many.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    store, limit = f"file://{folder}/store{world}", timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    warnings.filterwarnings("ignore", "dmuon: the default process group waits")  # these meshes do
    if args.plant_fault and rank == world - 1:
        adjusted = Hyper.adjusted
        Hyper.adjusted = lambda *of: 1.2 * adjusted(*of)  # type: ignore[method-assign]
    try:
        jobs = [job for job in _jobs(args) if job.case.world == world]
        rows = [asdict(row) for job in jobs for row in _rows(args, job)]
        if rank == 0:
            Path(folder, f"rows{world}.json").write_text(json.dumps(rows))
    finally:
        # Frees DistributedDataParallel, which holds the group, so that its threads end here.
        gc.collect()
        dist.destroy_process_group()


def _compare(args: argparse.Namespace, worlds: Collection[int]) -> EquivalenceReport:
    """Make all comparisons; rows are sorted by layout."""
    rows: list[EquivalenceRow] = []
    # Slow imports, made once for all processes; `DTensor` imports the last one on first use.
    slow = ["dmuon.tools.check", "dmuon.tools.parallel_models", "torch.distributed.pipelining"]
    multiprocessing.set_forkserver_preload(slow)
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            if len(worlds) > 1:  # minutes on few cores
                print(f"comparing on {world} processes ...", file=sys.stderr, flush=True)
            start_processes(_check_worker, (world, args, folder), world, start_method="forkserver")
            made = json.loads(Path(folder, f"rows{world}.json").read_text())
            rows += (EquivalenceRow(**row) for row in made)
    rows.sort(key=lambda row: _LAYOUTS.index(row.layout.split()[0]))
    return EquivalenceReport(tuple(rows))


def run(args: argparse.Namespace) -> int:
    """Compare, and print the table or JSON; return 1 if anything differs."""
    if not (worlds := sorted({job.case.world for job in _jobs(args)})):
        raise DmuonError(
            f"--nproc {args.nproc} leaves no mesh to check with --layout {args.layout}: give 2 or "
            "more, or leave it out"
        )
    report = _compare(args, worlds)
    show(report.__str__, report.to_dict, args.json)
    verdict = "PASS" if report.passed else "FAIL: dmuon differs from the reference"
    print(verdict, file=sys.stderr if args.json else sys.stdout)
    return 0 if report.passed else 1
