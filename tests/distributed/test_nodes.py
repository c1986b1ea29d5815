"""Emulated nodes: rate, counts, cleaning up, refusing. `test_end_to_end` trains on two of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks import nodes
from benchmarks.nodes import Nodes, emulated
from benchmarks.results import Row

REASON = nodes.why_not()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=REASON or "")
SENT = 4_000_000  # bytes of a broadcast


def send(rank: int, cluster: Nodes) -> list[Row]:
    """A broadcast from each rank to all: seconds, and what the links counted."""
    rows = []
    for sender in range(dist.get_world_size()):
        dist.barrier()
        before, begin = cluster.link_bytes(), time.perf_counter()
        dist.broadcast(torch.ones(SENT // 4), sender)
        dist.barrier()
        seconds = time.perf_counter() - begin
        pairs = zip(before, cluster.link_bytes(), strict=True)
        counted = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]
        rows.append({"seconds": seconds, "counted": counted, "pid": os.getpid()})
    return rows


@needs_nodes
def test_links_carry_their_rate_and_count_their_bytes() -> None:
    with emulated(2, "100mbit") as cluster, emulated(2) as idle:
        rows = cluster.on_ranks(1, send, cluster)
        assert max(map(max, idle.link_bytes())) < 10_000, "two sets of nodes do not meet"
    for sender, row in enumerate(rows):
        # A lower limit alone: a busy machine may take longer. The bucket's burst comes at once.
        assert row["seconds"] > 0.9 * 8 * SENT / 100e6
        out, into = row["counted"][sender]
        assert SENT < out < 1.1 * SENT and into < 0.1 * SENT
        assert SENT < row["counted"][1 - sender][1] < 1.1 * SENT
    assert not left_over(cluster.prefix) and not left_over(idle.prefix)


@needs_nodes
def test_what_a_killed_process_left_is_removed_by_the_next_start() -> None:
    script = "import time\nfrom benchmarks.nodes import emulated\n"
    script += "with emulated(2):\n    print('made', flush=True)\n    time.sleep(60)\n"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        process.kill()
    assert left_over(prefix := f"dm{process.pid}")
    with emulated(1):
        assert not left_over(prefix)


def fail(rank: int) -> list[Row]:
    if rank == 1:
        raise ValueError("rank 1 fails")
    time.sleep(3600)  # far beyond the time limit of a test
    return []


@needs_nodes
def test_a_rank_that_fails_ends_all() -> None:
    with pytest.raises(Exception, match="rank 1 fails"), emulated(2) as cluster:
        cluster.on_ranks(1, fail)
    assert not left_over(cluster.prefix)


def left_over(prefix: str) -> list[str]:
    found = os.listdir("/var/run/netns") + os.listdir("/sys/class/net")
    return [name for name in found if name.startswith(prefix)]
