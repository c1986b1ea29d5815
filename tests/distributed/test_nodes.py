"""Emulated nodes: rate, counts, cleaning up, refusing; and dmuon on two of them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from benchmarks import nodes
from benchmarks.nodes import Nodes, emulated
from benchmarks.results import Row
from dmuon.dtensors import whole_tensor

REASON = nodes.why_not()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=REASON or "")
WIDTH = 128
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


def train(rank: int, cluster: Nodes) -> list[Row]:
    """A step of Muon over nodes, on FSDP2 and on replicas: the difference from the reference, and
    the bytes that left each node."""
    rows = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)])
        twin = [p.detach().clone() for p in model.parameters()]
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        planner = dmuon.PlannerOptions(redundancy=1)
        given: dict[str, Any] = {"select": lambda name, p: True, "planner": planner}
        given["costs"] = "analytic:cpu"
        opt = dmuon.Muon(model, lr=0.1, ns_dtype=torch.float32, dedicate=given)
        x = torch.randn(
            8, WIDTH, generator=torch.Generator().manual_seed(rank if is_sharded else 0)
        )
        model(x).square().mean().backward()
        for p, q in zip(twin, model.parameters(), strict=True):
            p.grad = whole_tensor(q.grad)
        reference = dmuon.reference.ReferenceMuon(twin, lr=0.1, ns_dtype=torch.float32)
        before = twin[0].clone()
        reference.step()
        opt.report()  # plans
        assert opt.ownership is not None
        dist.barrier()
        counted = cluster.link_bytes()
        dist.barrier()
        opt.step()
        opt.synchronize()
        dist.barrier()
        sent = [b[0] - a[0] for a, b in zip(counted, cluster.link_bytes(), strict=True)]
        ours = [whole_tensor(p) for p in model.parameters()]
        worst = max(float((p - q).abs().max()) for p, q in zip(twin, ours, strict=True))
        topology = opt.ownership.plan.topology
        assert [topology.node(r) for r in range(dist.get_world_size())] == [0, 0, 1, 1]
        moved = float((twin[0] - before).abs().max())
        rows.append({"worst": worst, "moved": moved, "sent": sent})
        opt.ownership.close()
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
def test_muon_on_two_nodes_of_two_ranks() -> None:
    with emulated(2, "1gbit") as cluster:
        rows = cluster.on_ranks(2, train, cluster)
    assert all(row["moved"] > 1e-3 and row["worst"] < 1e-5 for row in rows)
    # Half of every matrix crosses to the owner's node and comes back; an update crosses once, and
    # not to each rank of the other node.
    whole = 6 * WIDTH * WIDTH * 4
    for row in rows:
        assert whole / 2 < statistics.fmean(row["sent"]) < 1.1 * whole / 2 + 30_000, row
    assert not left_over(cluster.prefix)


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
