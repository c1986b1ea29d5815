"""The one way in which benchmarks measure time: contenders in turns, and ratios within a round; and
the processes in which they run.

A machine that slows down for a while slows every contender of a round, so a ratio is the median
over the rounds of the ratio within a round. Times are in milliseconds, by phase; over ranks that of
the slowest one counts; on CUDA they are measured by events.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Row, read_rows, write_json

Laps = tuple[float, ...]
"""Milliseconds of one turn, by phase."""
Times = dict[str, list[Laps]]
"""What was measured in each round, by contender."""

_CPU = torch.device("cpu")


def take_turns(
    contenders: Mapping[str, Callable[[], Laps]],
    rounds: int,
    *,
    warm_up: int = 0,
    failures: dict[str, Exception] | None = None,
) -> Times:
    """Run each contender once a round, in an order that is rotated by one from round to round.

    With ``failures`` a contender that raises is noted there, leaves the result and takes part no
    more. Python's garbage is collected between rounds, never in one.
    """
    times: Times = {name: [] for name in contenders}
    names = list(contenders)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if name not in times:
                    continue
                try:
                    found = contenders[name]()
                except Exception as error:  # whatever it is: the others do not depend on it
                    if failures is None:
                        raise
                    failures[name] = error
                    del times[name]
                    continue
                if number >= warm_up:
                    times[name].append(found)
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return times


def laps(*actions: Callable[[], Any], device: torch.device = _CPU) -> Laps:
    """Milliseconds that each of the actions takes, one after the other."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for action in actions:
            action()
            marks.append(time.perf_counter())
        return tuple(1e3 * (end - begin) for begin, end in pairwise(marks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(actions) + 1)]
    events[0].record()
    for action, event in zip(actions, events[1:]):
        action()
        event.record()
    torch.cuda.synchronize(device)
    return tuple(begin.elapsed_time(end) for begin, end in pairwise(events))


def over_ranks(*actions: Callable[[], Any]) -> Laps:
    """The sum of the laps, then each: all ranks begin together, and the slowest one counts."""
    dist.barrier()  # blocks in the kernel: who waits here leaves the cores to the others
    mine = laps(*actions)
    slowest = torch.tensor((sum(mine), *mine), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return tuple(slowest.tolist())


def first_laps(times: Times) -> dict[str, list[float]]:
    return {name: [laps[0] for laps in found] for name, found in times.items()}


def spread(values_ms: Sequence[float], tail: int = 10) -> dict[str, float]:
    """Median and the percentiles ``tail`` and ``100 - tail``.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0], tail=25)
    {'median_ms': 3.0, 'p25_ms': 2.0, 'p75_ms': 4.0}
    """
    low = high = values_ms[0]
    if len(values_ms) > 1:
        cuts = statistics.quantiles(values_ms, n=100, method="inclusive")
        low, high = cuts[tail - 1], cuts[-tail]
    return {
        "median_ms": statistics.median(values_ms),
        f"p{tail}_ms": low,
        f"p{100 - tail}_ms": high,
    }


def timed_row(
    name: str, optimizer: str, layout: str, world: int, values_ms: Sequence[float]
) -> Row:
    """What all rows of timed steps have in common."""
    row = {"set": name, "optimizer": optimizer, "layout": layout, "world": world}
    return row | spread(values_ms) | {"rounds": len(values_ms)}


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round.

    >>> ratio([1.0, 10.0, 3.0], [2.0, 20.0, 2.0])
    0.5
    """
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


# ---- ranks ---------------------------------------------------------------------------------


@contextmanager
def joined(
    folder: str, rank: int = 0, world: int = 1, device: torch.device | None = None
) -> Iterator[None]:
    """In it this process is one rank of a group, which meets in ``folder``."""
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


def as_rank(
    rank: int, world: int, folder: str, body: Callable[..., list[Row]], *given: Any
) -> None:
    """``body(rank, *given)`` in a group that meets in ``folder``; the first one's rows go there."""
    torch.set_num_threads(1)
    with joined(folder, rank, world):
        rows = body(rank, *given)
        if rank == 0:
            write_json(f"{folder}/rows.json", {"rows": rows})


def on_ranks(world: int, body: Callable[..., list[Row]], *given: Any) -> list[Row]:
    """``body(rank, *given)`` in ``world`` gloo processes of one thread; the first one's rows."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(as_rank, (world, folder, body, *given), nprocs=world)
        return read_rows(f"{folder}/rows.json")
