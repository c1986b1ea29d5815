"""Benchmarks on several gloo processes of one thread each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["Rows", "on_ranks"]

Rows = list[dict[str, Any]]


def _work(
    rank: int, world: int, folder: str, body: Callable[..., Rows], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    rows = body(rank, *given)
    if rank == 0:
        with open(os.path.join(folder, "rows.json"), "w") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def on_ranks(world: int, body: Callable[..., Rows], *given: Any) -> Rows:
    """``body(rank, *given)`` in ``world`` processes; what the first one returns."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (world, folder, body, given), nprocs=world)
        with open(os.path.join(folder, "rows.json")) as file:
            rows: Rows = json.load(file)
    return rows
