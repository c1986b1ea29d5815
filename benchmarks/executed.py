"""Do owners take as long as planned? Four processes, measured costs, a plan and a bad plan.

Each process measures, plans, trains a small model and times its own Newton-Schulz in every step.
Four processes share the cores of one machine, so a wall clock would mostly measure who had to wait
for whom: everything is timed by the CPU time of the computing thread, which is what the wall clock
shows where every process has a core of its own. And since the machine's speed drifts, every step
is followed by one standalone run of each planned batch, as costs are measured: ``repriced_ms`` is
the plan at the speed of the moment, and ``ratio`` compares the busiest owner with that.
``planned_ms`` is the plan as it was made. Round robin on unequal layers has unequal loads, so the
order of the ranks says something there; with a balanced plan it does not.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import dmuon
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.measure import Case, OwnerTimer
from dmuon.scheduler.costs import canonical_key

WORLD = 4
STEPS = 20
WARM_UP = 4
WIDTHS = (256, 1024, 512, 640, 384)


class Uneven(nn.Module):
    """Linear layers of several widths, each with a way in and out of a common width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, w, bias=False) for w in WIDTHS for _ in range(2))
        self.mid = nn.ModuleList(nn.Linear(w, w, bias=False) for w in WIDTHS for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(w, 256, bias=False) for w in WIDTHS for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, mid, down in zip(self.up, self.mid, self.down, strict=True):
            x = x + down(torch.relu(mid(torch.relu(up(x)))))
        return x


def _train(own: dmuon.Ownership, model: nn.Module) -> tuple[float, float]:
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


def _worker(rank: int, folder: str) -> None:
    with mock.patch("dmuon.comm.streams.time", SimpleNamespace(perf_counter=time.thread_time)):
        _compare(rank, folder)


def _compare(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=300),
    )
    rows: list[dict[str, Any]] = []
    for solver in ("milp", "round_robin"):
        torch.manual_seed(0)
        model = Uneven()
        own = dmuon.dedicate_params(
            model, solver=solver, planner=dmuon.PlannerOptions(cache_dir=folder)
        )
        pairs: list[Any] = [None] * WORLD
        dist.all_gather_object(pairs, _train(own, model))
        times, alone = zip(*pairs, strict=True)
        planned = own.plan.loads_ms
        rows.append(
            {
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
                "same_order": _order(planned) == _order(times),
                "rank_correlation": _correlation(planned, times),
            }
        )
        own.close()
    if rank == 0:
        torch.save(rows, os.path.join(folder, "rows.pt"))
    dist.destroy_process_group()


def _order(loads: Any) -> list[int]:
    return sorted(range(len(loads)), key=lambda r: loads[r])


def _correlation(planned: Sequence[float], times: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.tensor([planned, times], dtype=torch.float64))[0, 1])


def executed_rows() -> list[dict[str, Any]]:
    """One row for the balanced plan and one for round robin."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, (folder,), nprocs=WORLD)
        rows: list[dict[str, Any]] = torch.load(os.path.join(folder, "rows.pt"))
    return rows


if __name__ == "__main__":
    for row in executed_rows():
        print(row)
