"""Emulated nodes: rate, counts, cleaning up, refusing; and dmuon on two of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from benchmarks import nodes
from benchmarks.nodes import Nodes, NoNodes, emulated
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


def train(rank: int) -> list[Row]:
    """Muon on FSDP2 over nodes: what the plan knows of them, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24, bias=False) for _ in range(6)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twin = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, mesh=mesh)
    opt = dmuon.Muon(
        model, lr=0.1, ns_dtype=torch.float32, dedicate={"select": lambda name, p: True}
    )
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    opt.step()
    ours = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    assert opt.ownership is not None
    topology = opt.ownership.plan.topology
    reference = dmuon.reference.ReferenceMuon(twin, lr=0.1, ns_dtype=torch.float32)
    for p, grad in zip(twin, grads, strict=True):
        p.grad = grad
    before = twin[0].clone()
    reference.step()
    worst = max(float((p - q).abs().max()) for p, q in zip(twin, ours))
    assert [topology.node(r) for r in range(dist.get_world_size())] == [0, 0, 1, 1]
    return [{"worst": worst, "moved": float((twin[0] - before).abs().max())}]


@needs_nodes
def test_links_carry_their_rate_and_count_their_bytes() -> None:
    with emulated(2, "100mbit") as cluster, cluster.sampled() as samples:
        rows = cluster.on_ranks(1, send, cluster)
    for sender, row in enumerate(rows):
        # A lower limit alone: a busy machine may take longer. The bucket's burst comes at once.
        assert row["seconds"] > 0.9 * 8 * SENT / 100e6
        out, into = row["counted"][sender]
        assert SENT < out < 1.1 * SENT and into < 0.1 * SENT
        assert SENT < row["counted"][1 - sender][1] < 1.1 * SENT
    sent = [moment[1][0][0] for moment in samples]
    assert sent == sorted(sent) and sent[-1] > SENT
    assert not left_over(cluster.prefix)


@needs_nodes
def test_a_busy_link_and_two_sets_of_nodes_at_once() -> None:
    with emulated(2, "100mbit") as busy, emulated(2) as idle:
        with busy.busy(1, "40mbit"):
            while min(busy.link_bytes()[1]) < 100_000:  # until both ways are in use
                time.sleep(0.01)
            before, begin = busy.link_bytes(), time.perf_counter()
            time.sleep(0.5)
            after, seconds = busy.link_bytes(), time.perf_counter() - begin
        # At most: the machine may be too busy to send so much.
        for way in range(2):
            assert 0 < 8 * (after[1][way] - before[1][way]) / seconds < 60e6
        assert after[0] == pytest.approx(before[0], abs=10_000)
        assert max(*idle.link_bytes()[0], *idle.link_bytes()[1]) < 10_000
    assert not left_over(busy.prefix) and not left_over(idle.prefix)


@needs_nodes
def test_muon_on_two_nodes_of_two_ranks() -> None:
    with emulated(2, "1gbit") as cluster:
        (row,) = cluster.on_ranks(2, train)
    assert row["moved"] > 1e-3
    assert row["worst"] < 1e-5
    assert not left_over(cluster.prefix)


@contextmanager
def process_with_nodes() -> Iterator[subprocess.Popen[str]]:
    """A process that has made nodes and waits."""
    script = "import time\nfrom benchmarks.nodes import emulated\n"
    script += "with emulated(2):\n    print('made', flush=True)\n    time.sleep(60)\n"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        assert left_over(f"dm{process.pid}x")
        yield process


@needs_nodes
def test_what_a_killed_process_left_is_removed_by_the_next_start() -> None:
    with process_with_nodes() as process:
        process.kill()
    assert left_over(prefix := f"dm{process.pid}")
    with emulated(1):
        assert not left_over(prefix)


@needs_nodes
def test_a_terminated_process_cleans_up() -> None:
    with process_with_nodes() as process:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert not left_over(f"dm{process.pid}")


def fail(rank: int) -> list[Row]:
    if rank == 1:
        raise ValueError("rank 1 fails")
    time.sleep(60)
    return []


@needs_nodes
def test_a_rank_that_fails_ends_all() -> None:
    begin = time.monotonic()
    with pytest.raises(Exception, match="rank 1 fails"), emulated(2) as cluster:
        cluster.on_ranks(1, fail)
    assert time.monotonic() - begin < 50
    assert not left_over(cluster.prefix)


def left_over(prefix: str) -> list[str]:
    found = os.listdir("/var/run/netns") + os.listdir("/sys/class/net")
    return [name for name in found if name.startswith(prefix)]


def test_refusals_say_what_helps() -> None:
    with mock.patch("os.geteuid", return_value=1000), pytest.raises(NoNodes, match="need root"):
        emulated(2).__enter__()
    with (
        mock.patch("os.geteuid", return_value=0),
        mock.patch("shutil.which", return_value=None),
        pytest.raises(NoNodes, match="ip and tc not found: install iproute2"),
    ):
        emulated(2).__enter__()
    with pytest.raises(ValueError, match="rate: '1 Gbit/s' is not of the form"):
        emulated(2, "1 Gbit/s").__enter__()
    with pytest.raises(ValueError, match="rate: '0mbit' is not of the form"):
        emulated(2, "0mbit").__enter__()
    with pytest.raises(ValueError, match="count: 201 nodes asked for; 1 to 200"):
        emulated(201).__enter__()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="namespaces are Linux's")
def test_a_kernel_that_refuses_is_told_of() -> None:
    refused = subprocess.CompletedProcess([], 1, "", "mount: Operation not permitted\n")
    with (
        mock.patch("os.geteuid", return_value=0),
        mock.patch("shutil.which", return_value="/sbin/ip"),
        mock.patch("subprocess.run", return_value=refused),
        pytest.raises(NoNodes, match="`ip link add .* failed: mount: Operation not permitted"),
    ):
        emulated(2).__enter__()
