"""What does Muon cost with replicated weights: dmuon, round robin, redundant Muon, AdamW?

``python -m benchmarks.replicated --json out.json`` starts gloo processes that train the same model
with each optimizer in turn, step by step, so that a noisy machine hits all of them alike. A step's
time is that of the slowest rank, from before backward to the end of the next forward, which is
where asynchronously published updates are waited for; ``step_ms`` is `step` alone.

``dmuon`` reduces gradients by itself, ``dmuon ddp`` through DDP's hook. Baselines: ``adamw`` is DDP
and `torch.optim.AdamW(foreach)`; ``round robin`` is DDP, which all-reduces, and an owner a matrix
by its number (`benchmarks.baselines`); ``redundant`` is DDP and torch.optim.Muon for the matrices
on every rank; ``local`` is one forward and backward without any gradient exchange or optimizer: the
floor of all. ``--ns-dtype`` is that of dmuon and of round robin (torch.optim.Muon knows bfloat16
alone): bfloat16 products of theirs are emulated, and slow, on a CPU without instructions for them.

``ratio_to_round_robin`` is the median over rounds of the ratio within one; ``--check`` fails where
that of ``dmuon ddp`` is above 1.0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dmuon
from benchmarks.baselines import RoundRobin
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import spread, write
from dmuon.kernels.newton_schulz import resolve_ns_dtype

SETS = {"8 layers, w=256": (8, 256), "4 layers, w=512": (4, 512)}


class Layer(nn.Module):
    """w x w, w x w, 4w x w, w x 4w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.b(torch.relu(self.a(y))) + self.down(torch.relu(self.up(y)))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Contender:
    """One optimizer on its own copy of the model."""

    def __init__(self, name: str, layers: int, width: int, ns_dtype: str | torch.dtype) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model: nn.Module = Stack(layers, width)
        self.own: dmuon.Ownership | None = None
        self.steps: list[Callable[[], Any]] = []
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]
        if name not in ("local", "dmuon"):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if name.startswith("dmuon"):
            self.own = dmuon.dedicate_params(self.model)
            opt: Any = dmuon.Muon(self.model, ns_dtype=ns_dtype)
            self.steps = [opt.step, opt.zero_grad]
            self.stats = opt.stats
        elif name != "local":
            groups = [matrices + others] if name == "adamw" else [others]
            opts: list[Any] = [torch.optim.AdamW(g, foreach=True) for g in groups]
            if name == "redundant":
                opts.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
            elif name == "round robin":
                dtype = resolve_ns_dtype(ns_dtype, "cpu")
                opts.append(RoundRobin(matrices, ns_dtype=dtype))
            self.steps = [opt.step for opt in opts] + [opt.zero_grad for opt in opts]
        self.loss = self.forward(torch.zeros(4, 8, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def iterate(self, x: Tensor) -> tuple[float, float]:
        """Milliseconds from backward to the end of the next forward, and of the step in it."""
        dist.barrier()
        begin = time.perf_counter()
        self.loss.backward()
        middle = time.perf_counter()
        for step in self.steps:
            step()
        stepped = time.perf_counter()
        if not self.steps:
            self.model.zero_grad()
        self.loss = self.forward(x)
        end = time.perf_counter()
        return 1e3 * (end - begin), 1e3 * (stepped - middle)


CONTENDERS = ("local", "adamw", "dmuon", "dmuon ddp", "round robin", "redundant")


def measure(
    name: str, layers: int, width: int, args: argparse.Namespace, rank: int
) -> list[dict[str, Any]]:
    world, repeats = dist.get_world_size(), args.repeats
    ns_dtype = "auto" if args.ns_dtype == "auto" else getattr(torch, args.ns_dtype)
    names = [c for c in CONTENDERS if c != "redundant" or not args.skip_redundant]
    contenders = [Contender(c, layers, width, ns_dtype) for c in names]
    times: dict[str, list[tuple[float, float]]] = {c: [] for c in names}
    generator = torch.Generator().manual_seed(rank)
    for repeat in range(repeats + 2):
        for contender in contenders:
            mine = torch.tensor(contender.iterate(torch.randn(4, 8, width, generator=generator)))
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if repeat >= 2:
                times[contender.name].append((float(mine[0]), float(mine[1])))
    rows = []
    for contender in contenders:
        whole, step = zip(*times[contender.name], strict=True)
        row = {
            "set": name,
            "optimizer": contender.name,
            "layout": "replicated",
            "world": world,
            **spread(whole),
            "step_ms": statistics.median(step),
            "ratio_to_adamw": statistics.median(whole)
            / statistics.median(t[0] for t in times["adamw"]),
            "ratio_to_round_robin": statistics.median(
                mine[0] / theirs[0]
                for mine, theirs in zip(times[contender.name], times["round robin"], strict=True)
            ),
        }
        if contender.own is not None:
            row["bytes"] = contender.stats()["bytes"]
            row["ns_dtype"] = contender.stats()["ns_dtype"]
            contender.own.close()
        rows.append(row)
    return rows


def work(rank: int, args: argparse.Namespace) -> Rows:
    return [
        row
        for name, (layers, width) in SETS.items()
        if args.set in ("all", name)
        for row in measure(name, layers, width, args, rank)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", default="-", metavar="PATH")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--set", choices=["all", *SETS], default="all")
    parser.add_argument("--ns-dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--skip-redundant", action="store_true", help="it takes seconds a step")
    parser.add_argument("--check", action="store_true", help="fail above 1.0 x round robin")
    args = parser.parse_args()
    rows = on_ranks(args.nproc, work, args)
    write(args.json, rows)
    for row in rows:
        print(
            f"{row['set']:18} {row['optimizer']:10} {row['median_ms']:8.1f} ms "
            f"(step {row['step_ms']:7.1f} ms)  {row['ratio_to_adamw']:5.2f} x AdamW  "
            f"{row['ratio_to_round_robin']:5.2f} x round robin"
        )
    slow = [r for r in rows if r["optimizer"] == "dmuon ddp" and r["ratio_to_round_robin"] > 1.0]
    return int(args.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
