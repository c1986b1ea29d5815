"""Do owners take as long as planned? Four processes, measured costs, a plan and a bad plan.

The processes share the cores of one machine, so everything is timed by the CPU time of the
computing thread. The machine's speed drifts, so every step is followed by one standalone run of
each planned batch: ``repriced_ms`` is the plan at the speed of the moment, and ``ratio`` compares
the busiest owner with that. ``planned_ms`` is the plan as it was made. Round robin has unequal
loads, so the order of the ranks says something there.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from benchmarks.results import Row
from benchmarks.timing import on_ranks
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.measure import Case, OwnerTimer
from dmuon.scheduler.costs import canonical_key
from dmuon.types import SolverName

WORLD = 4
STEPS, WARM_UP = 20, 4
WIDTHS = (256, 1024, 512, 640, 384)


class Uneven(nn.Module):
    """Linear layers of several widths, each with a way in and out of a common width."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(256, w, w, 256) for w in WIDTHS for _ in range(2)]
        self.paths = nn.ModuleList(
            nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in pairwise(widths))
            for widths in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        for path in self.paths:
            up, mid, down = path.children()
            x = x + down(torch.relu(mid(torch.relu(up(x)))))
        return x


def train(own: dmuon.Ownership, model: nn.Module) -> tuple[float, float]:
    """Median ms of this rank's Newton-Schulz in a step, and of its batches run by themselves."""
    opt = dmuon.Muon(model, lr=1e-3)
    timer = OwnerTimer(torch.device("cpu"), resolve_ns_dtype("auto", "cpu"), sharing=WORLD)
    mine = [b for b in own.plan.batches if b.owner == own.rank]
    runs = [
        (Case(canonical_key(own.plan.specs.matrices[b.matrices[0]].key), len(b.matrices)), b.kernel)
        for b in mine
    ]
    timer.reserve(runs)
    times, alone = [], []
    for step in range(STEPS):
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + own.rank))
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
        times.append(opt.stats()["ns_ms"])
        opt.synchronize()
        dist.barrier()
        alone.append(sum(timer.run(*run) for run in runs))
        dist.barrier()
    return statistics.median(times[WARM_UP:]), statistics.median(alone[WARM_UP:])


def work(rank: int, folder: str) -> list[Row]:
    with mock.patch("dmuon.devices.time", SimpleNamespace(perf_counter=time.thread_time)):
        return [compare(solver, folder) for solver in ("milp", "round_robin")]


def compare(solver: SolverName, folder: str) -> Row:
    torch.manual_seed(0)
    model = Uneven()
    planner = dmuon.PlannerOptions(cache_dir=folder)
    options = dmuon.ReplicatedOptions(reduce_to_owner=True)
    own = dmuon.dedicate_params(model, solver=solver, planner=planner, options=options)
    pairs: list[Any] = [None] * WORLD
    dist.all_gather_object(pairs, train(own, model))
    times, alone = zip(*pairs, strict=True)
    planned = own.plan.loads_ms
    own.close()
    by_planned, by_time = (sorted(range(WORLD), key=ms.__getitem__) for ms in (planned, times))
    both = torch.tensor([planned, times], dtype=torch.float64)
    return {
        "set": "executed",
        "solver": solver,
        "world": WORLD,
        "planned_ms": list(planned),
        "repriced_ms": list(alone),
        "measured_ms": list(times),
        "makespan_ms": max(planned),
        "measured_makespan_ms": max(times),
        "ratio": max(times) / max(alone),
        "ratio_to_plan": max(times) / max(planned),
        "same_order": by_planned == by_time,
        "rank_correlation": float(torch.corrcoef(both)[0, 1]),
    }


def executed_rows() -> list[Row]:
    """One row for the balanced plan and one for round robin."""
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(WORLD, work, folder)


if __name__ == "__main__":
    for row in executed_rows():
        print(row)
