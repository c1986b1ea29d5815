"""Does a batch of tall matrices cost what a batch of wide ones does?

``python -m benchmarks.tall --json out.json --check`` times `newton_schulz`, a `step()` of each
layout and a block step on b matrices ``n x m`` and on b matrices ``m x n``, in turns, on two gloo
processes of one thread each; the slowest rank counts. ``ratio`` is the median over rounds of tall
over wide. ``--check`` fails where one is above 1.3.

In bfloat16 the layouts run what dmuon chooses on this CPU, and ``newton_schulz torch`` multiplies
in bfloat16 in any case: on a CPU without instructions for it products are emulated, but one that
writes to a strided batch is still hundreds of times slower than the others.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import dmuon
from benchmarks.ranks import Rows, on_ranks
from benchmarks.results import spread, write

SHAPES = ((96, 256), (256, 1024), (512, 2048))
BATCHES = (1, 2, 4, 8)
LIMIT = 1.3
WORLD = 2
FORMS = ("newton_schulz", "newton_schulz torch", "replicated", "sharded", "dedicated", "block step")
_MOST_ROUNDS, _ROUNDS_MS = 60, 600.0
_EMULATED_NUMEL = 1 << 20  # of real bfloat16 products: beyond, an emulated call takes many seconds

Call = tuple[
    Callable[[], float], Callable[[], object]
]  # what is timed, in seconds; how to close it


class Alike(nn.Module):
    """``count`` matrices of one shape ``[rows, cols]`` for each rank."""

    def __init__(self, count: int, rows: int, cols: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(cols, rows, bias=False) for _ in range(count * WORLD))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


def function(batch: int, rows: int, cols: int, dtype: torch.dtype, backend: str) -> Call:
    x = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(0))

    def call() -> float:
        begin = time.perf_counter()
        dmuon.newton_schulz(x, dtype=dtype, backend=backend)
        return time.perf_counter() - begin

    return call, lambda: None


def step(form: str, batch: int, rows: int, cols: int, dtype: torch.dtype) -> Call:
    """Of ``batch`` matrices a rank; tall ones are sharded by columns, so that blocks are alike."""
    torch.manual_seed(0)
    model = Alike(batch, rows, cols)
    layout = form if form in ("replicated", "dedicated") else "sharded"
    if layout == "sharded":
        dim = 0 if rows <= cols else 1
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (WORLD,)),
            shard_placement_fn=lambda p: Shard(dim),
        )
    own = dmuon.dedicate_params(
        model, layout=layout, costs="analytic:cpu", kernels=dmuon.KernelOptions(tune_budget_s=0)
    )
    period = math.inf if form == "block step" else 1
    opt = dmuon.Muon(model, ns_dtype=dtype, period=period, publish="sync")
    x = torch.randn(4, cols, generator=torch.Generator().manual_seed(dist.get_rank()))

    def call() -> float:
        opt.zero_grad()
        model(x).backward()
        dist.barrier()
        begin = time.perf_counter()
        opt.step()
        return time.perf_counter() - begin

    return call, own.close


def cases(forms: tuple[str, ...]) -> Iterator[tuple[str, torch.dtype, int, tuple[int, int]]]:
    for form in forms:
        for dtype in (torch.float32, torch.bfloat16):
            if form == "newton_schulz torch" and dtype == torch.float32:
                continue  # what newton_schulz runs
            for shape in SHAPES:
                for batch in BATCHES:
                    small = batch * math.prod(shape) <= _EMULATED_NUMEL
                    if form != "newton_schulz torch" or small:
                        yield form, dtype, batch, shape


def slowest_ms(call: Callable[[], float]) -> float:
    """Of the ranks, which begin together."""
    dist.barrier()
    seconds = torch.tensor(call(), dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 1e3 * float(seconds)


def measure(rounds: int, forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for form, dtype, batch, (m, n) in cases(forms):
        if form.startswith("newton_schulz"):
            backend = "torch" if form.endswith("torch") else "auto"
            calls = [function(batch, *shape, dtype, backend) for shape in ((n, m), (m, n))]
        else:
            calls = [step(form, batch, *shape, dtype) for shape in ((n, m), (m, n))]
        for _ in range(2):
            warm = [slowest_ms(call) for call, _ in calls]
        # What takes a millisecond is noisier than what takes a second.
        count = max(rounds, min(_MOST_ROUNDS, int(_ROUNDS_MS / min(warm))))
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(count):
            for k in (0, 1) if i % 2 else (1, 0):
                times[k].append(slowest_ms(calls[k][0]))
        for _, close in calls:
            close()
        del calls
        gc.collect()
        tall, wide = times
        yield {
            "set": f"{batch} x [{n}, {m}] over its transpose",
            "optimizer": "dmuon",
            "layout": form,
            "ns_dtype": str(dtype).removeprefix("torch."),
            "world": WORLD,
            **spread(tall),
            "wide_ms": statistics.median(wide),
            "ratio": statistics.median(a / b for a, b in zip(tall, wide, strict=True)),
        }


def work(rank: int, args: argparse.Namespace) -> Rows:
    rows = []
    for row in measure(args.rounds, tuple(args.forms)):
        rows.append(row)
        if rank == 0:
            print(
                f"{row['layout']:20} {row['ns_dtype']:8} {row['set']:38} "
                f"{row['median_ms']:9.2f} ms, wide {row['wide_ms']:9.2f}: {row['ratio']:.2f}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows there, - for stdout")
    parser.add_argument("--rounds", type=int, default=7, help="more where a call is short")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT}")
    args = parser.parse_args()
    rows = on_ranks(WORLD, work, args)
    if args.json:
        write(args.json, rows)
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"worst: {worst['ratio']:.2f} x wide, {worst['layout']}, {worst['set']}")
    return int(args.check and worst["ratio"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
