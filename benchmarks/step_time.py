"""What does the optimizer step cost on a model that FSDP2 has sharded: dmuon and the known ways?

``python -m benchmarks.step_time --json out.json`` starts gloo processes with one thread each and
times `step()` alone, on gradients that are already there (synthetic, different on every rank), the
optimizers in turns (`benchmarks.timing`).

``floor``: one pass of the standard Newton-Schulz of torch.optim.Muon over all matrices on one core
while the other ranks wait in a barrier, divided by the number of cores; it takes its turn in each
round. It is Muon without traffic, momentum and weight update, spread without loss.

Newton-Schulz runs in bfloat16 where the CPU has instructions for it, else in float32, for all alike
and for the floor too (``--ns-dtype``): emulated bfloat16 is some forty times slower than float32.

Baselines (`benchmarks.baselines`) use torch's coefficients, dmuon its own defaults; five steps all.
For optimizers of replicated models ``sync_ms`` is what their backward would spend on exchanging
gradients; FSDP2 exchanges them in its own backward, and neither is part of the step. ``dmuon
async``: ``median_ms`` is step and synchronize together, ``step_ms`` is step alone. ``bytes``: sent
by a rank to others in one step, mean over ranks; dmuon counts, the baselines have formulas.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from benchmarks import baselines
from benchmarks.models import shard
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import command, dtype_name, table, write
from benchmarks.timing import Laps, over_ranks, ratio, spread, take_turns
from dmuon.kernels.ops import native_ns_dtype

WARM_UP = 2
ROUNDS = {"first": 21, "qwen": 9}
LAYERS = 8
SETS = {
    # w x w, w x w, 4w x w, w x 4w; w = 256
    "first": ((256, 256), (256, 256), (1024, 256), (256, 1024)),
    # q, k, v, o with grouped keys and values, gate, up, down; w = 512
    "qwen": ((512, 512), (128, 512), (128, 512), (512, 512), (1408, 512), (1408, 512), (512, 1408)),
}
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def nothing() -> None:
    """Of a contender that has nothing to do there."""


@dataclass
class Contender:
    """One optimizer: ``step`` is timed, then ``finish`` with it; ``prepare`` is timed apart."""

    name: str
    layout: str
    step: Callable[[], Any]
    finish: Callable[[], Any] = nothing
    prepare: Callable[[], Any] = nothing
    sent: Callable[[], int] = lambda: 0
    counted: str = "nothing to send"
    divide: int = 1
    close: Callable[[], Any] = nothing

    def turn(self) -> Laps:
        """Milliseconds of `prepare`, of `step`, and of step and finish together."""
        prepare, _ = over_ranks(self.prepare)
        whole, step, _ = over_ranks(self.step, self.finish)
        return prepare, step / self.divide, whole / self.divide


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of matrices, and the dtype that all optimizers run Newton-Schulz in."""

    name: str
    layers: int
    ns_dtype: torch.dtype

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = (
            nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in SETS[self.name]))
            for _ in range(self.layers)
        )
        return nn.Sequential(*layers)

    def sharded(self, mesh: DeviceMesh) -> nn.Module:
        """FSDP2 a layer, then the root; random gradients, different on each rank, always alike."""
        model = self.build()
        shard(model, model, mesh=mesh)
        generator = torch.Generator().manual_seed(1 + mesh.get_rank())
        for p in model.parameters():
            assert isinstance(p, DTensor)
            rows = torch.randn(p.to_local().shape, generator=generator)
            like: Any = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            p.grad = DTensor.from_local(rows, p.device_mesh, p.placements, **like)
        return model


def floor(load: Workload, cores: int) -> Contender:
    """One pass of the standard form over all matrices on rank 0, divided by the cores."""
    matrices = [torch.randn(p.shape) for p in load.build().parameters()]

    def one_pass() -> None:
        for matrix in matrices if dist.get_rank() == 0 else ():
            baselines.zeropower(matrix, load.ns_dtype)

    return Contender("floor", "one process", one_pass, divide=min(dist.get_world_size(), cores))


def on_shards(load: Workload, mesh: DeviceMesh) -> Iterator[Contender]:
    for publish in ("sync", "async"):
        model = load.sharded(mesh)
        own = dmuon.dedicate_params(model)
        muon = dmuon.Muon(model, ns_dtype=load.ns_dtype, publish=publish, **HYPERPARAMETERS)
        yield Contender(
            f"dmuon {publish}",
            "sharded",
            muon.step,
            finish=muon.synchronize,
            sent=lambda muon=muon: sum(muon.stats()["bytes"].values()),  # type: ignore[misc]
            counted="opt.stats()",
            close=own.close,
        )
    adamw = torch.optim.AdamW(load.sharded(mesh).parameters(), foreach=True, **HYPERPARAMETERS)
    yield Contender("AdamW foreach", "sharded", adamw.step)
    for kind, name in (
        (baselines.GatherThenCompute, "gather-then-compute"),
        (baselines.SameShapeBuckets, "same-shape buckets"),
        (baselines.ParallelMuon, "Parallel Muon"),
    ):
        opt = kind(load.sharded(mesh).parameters(), ns_dtype=load.ns_dtype, **HYPERPARAMETERS)
        sent = partial(getattr, opt, "sent_bytes")
        yield Contender(name, "sharded", opt.step, sent=sent, counted="formula")


def on_replicas(load: Workload) -> Iterator[Contender]:
    """Optimizers of replicated models share the memory of their gradients."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    mine = [torch.randn(p.shape, generator=generator) for p in load.build().parameters()]
    synced = [torch.empty_like(g) for g in mine]
    for kind, name in (
        (baselines.Redundant, "redundant"),
        (baselines.RoundRobin, "round-robin, all-reduced"),
        (partial(baselines.RoundRobin, reduce_to_owner=True), "round-robin, reduced to owner"),
        (baselines.SameShapeAllGather, "same-shape all-gather"),
    ):
        parameters = list(load.build().parameters())
        for p, g in zip(parameters, synced, strict=True):
            p.grad = g
        opt = kind(parameters, ns_dtype=load.ns_dtype, **HYPERPARAMETERS)

        def prepare(opt: baselines.Baseline = opt) -> None:
            torch._foreach_copy_(synced, mine)
            opt.sync_gradients()

        sent = partial(getattr, opt, "sent_bytes")
        yield Contender(name, "replicated", opt.step, prepare=prepare, sent=sent, counted="formula")


def measure(load: Workload, rounds: int, cores: int) -> Rows:
    """Rows of one set; every rank calls it and gets the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    field = [floor(load, cores), *on_shards(load, mesh), *on_replicas(load)]
    times = take_turns({c.name: c.turn for c in field}, rounds, warm_up=WARM_UP)
    floors, gathers = ([t[2] for t in times[name]] for name in ("floor", "gather-then-compute"))
    rows = []
    for contender in field:
        sync, step, whole = zip(*times[contender.name], strict=True)
        sent = torch.tensor(float(contender.sent()))
        dist.all_reduce(sent)
        row = {
            "set": load.name,
            "layers": load.layers,
            "ns_dtype": dtype_name(load.ns_dtype),
            "optimizer": contender.name,
            "layout": contender.layout,
            "world": dist.get_world_size(),
            **spread(whole),
            "floor_ms": statistics.median(floors),
            "ratio_to_floor": ratio(whole, floors),
            "gather_over_this": ratio(gathers, whole),
            "bytes": round(float(sent) / dist.get_world_size()),
            "bytes_by": contender.counted,
            "rounds": rounds,
        }
        if contender.layout == "replicated":
            row["sync_ms"] = statistics.median(sync)
        if contender.name == "dmuon async":
            row["step_ms"] = statistics.median(step)
        rows.append(row)
    for contender in field:
        contender.close()
    return rows


def work(rank: int, args: argparse.Namespace, cores: int) -> Rows:
    dtype = native_ns_dtype("cpu") if args.ns_dtype == "auto" else getattr(torch, args.ns_dtype)
    rows = []
    for name in SETS if args.set == "all" else (args.set,):
        load = Workload(name, args.layers, dtype)
        rows += measure(load, args.rounds or ROUNDS[name], cores)
        gc.collect()
    return rows


HEADINGS = ("optimizer", "layout", "median ms (p10-p90)", "x floor", "gather / this", "MB sent",
            "sync ms", "step alone")  # fmt: skip


def show(rows: Rows, cores: int) -> None:
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = [row for row in rows if row["set"] == name]
        print(
            "\nset {set}, {layers} layers: step() on {world} processes, {cores} cores, {rounds} "
            "rounds; NS in {ns_dtype}\n".format(cores=cores, **mine[0])
        )
        cells = (
            (
                row["optimizer"],
                row["layout"],
                "{median_ms:.1f} ({p10_ms:.1f}-{p90_ms:.1f})".format(**row),
                f"{row['ratio_to_floor']:.2f}",
                f"{row['gather_over_this']:.2f}",
                f"{row['bytes'] / 1e6:.2f}",
                *(f"{row[key]:.1f}" if key in row else None for key in ("sync_ms", "step_ms")),
            )
            for row in mine
        )
        print(table(HEADINGS, cells, left=2))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--set", choices=[*SETS, "all"], default="all")
    parser.add_argument("--rounds", type=int, help=f"after {WARM_UP} to warm up; default {ROUNDS}")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--world", type=int, default=4)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rows = on_ranks(args.world, work, args, cores)
    write(args.json, rows)
    show(rows, cores)


if __name__ == "__main__":
    main()
