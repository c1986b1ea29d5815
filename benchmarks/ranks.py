"""Ranks of a benchmark: gloo processes of one thread each, that find each other through a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["Row", "Rows", "joined", "on_ranks"]

Row = dict[str, Any]
Rows = list[Row]


@contextmanager
def joined(
    folder: str, rank: int = 0, world: int = 1, device: torch.device | None = None
) -> Iterator[None]:
    """In it this process is one rank of a group; ``folder`` is the same one on all ranks."""
    dist.init_process_group(
        "nccl" if device is not None and device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _work(
    rank: int, world: int, folder: str, body: Callable[..., Rows], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with joined(folder, rank, world):
        rows = body(rank, *given)
        if rank == 0:
            with open(os.path.join(folder, "rows.json"), "w") as file:
                json.dump(rows, file)


def on_ranks(world: int, body: Callable[..., Rows], *given: Any) -> Rows:
    """``body(rank, *given)`` in ``world`` processes; what the first one returns."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (world, folder, body, given), nprocs=world)
        with open(os.path.join(folder, "rows.json")) as file:
            rows: Rows = json.load(file)
    return rows
