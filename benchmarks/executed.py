"""Do owners take as long as planned? Four processes, measured costs, a plan and a bad plan.

Each process measures, plans, trains a small model for some steps and times its own Newton-Schulz.
With the balanced plan the busiest owner's measured time is compared with the planned makespan; with
round robin on unequal layers the loads differ, and their order is compared with the planned one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import dmuon

WORLD = 4
STEPS = 14
WARM_UP = 4
WIDTHS = (256, 512, 384, 768, 320)


class Uneven(nn.Module):
    """Linear layers of several widths, each with a way in and out of a common width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, w, bias=False) for w in WIDTHS for _ in range(3))
        self.mid = nn.ModuleList(nn.Linear(w, w, bias=False) for w in WIDTHS for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(w, 256, bias=False) for w in WIDTHS for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, mid, down in zip(self.up, self.mid, self.down, strict=True):
            x = x + down(torch.relu(mid(torch.relu(up(x)))))
        return x


def _train(own: dmuon.Ownership, model: nn.Module) -> list[float]:
    """Milliseconds of this rank's Newton-Schulz in each step after the warm-up."""
    opt = dmuon.Muon(model, lr=1e-3)
    times = []
    for step in range(STEPS):
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + own.rank))
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
        times.append(opt.stats()["ns_ms"])
    return times[WARM_UP:]


def _worker(rank: int, folder: str) -> None:
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
        mine = statistics.median(_train(own, model))
        times: list[Any] = [None] * WORLD
        dist.all_gather_object(times, mine)
        planned = own.plan.loads_ms
        rows.append(
            {
                "set": "executed",
                "solver": solver,
                "world": WORLD,
                "planned_ms": list(planned),
                "measured_ms": times,
                "makespan_ms": max(planned),
                "measured_makespan_ms": max(times),
                "ratio": max(times) / max(planned),
                "same_order": _order(planned) == _order(times),
            }
        )
        own.close()
    if rank == 0:
        torch.save(rows, os.path.join(folder, "rows.pt"))
    dist.destroy_process_group()


def _order(loads: Any) -> list[int]:
    return sorted(range(len(loads)), key=lambda r: loads[r])


def executed_rows() -> list[dict[str, Any]]:
    """One row for the balanced plan and one for round robin."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, (folder,), nprocs=WORLD)
        rows: list[dict[str, Any]] = torch.load(os.path.join(folder, "rows.pt"))
    return rows


if __name__ == "__main__":
    for row in executed_rows():
        print(row)
