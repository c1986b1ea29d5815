"""What the `sharded` layout sends, when, and how much memory it takes for it."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import dmuon
from tests.distributed.harness import distributed
from tests.distributed.sharded import dedicated, pair, recorded
from tests.transports import DelayingTransport, RecordingTransport


class Wide(nn.Module):
    """Enough of each shape that matrices, not flags, are what travels."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))


def sharded_wide(mesh_shape: tuple[int, ...], **kwargs: Any) -> nn.Module:
    axes = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    torch.manual_seed(0)
    model = Wide(**kwargs)
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes))
    return model


def set_gradients(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(31 * step + rank)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        local.copy_(torch.randn(local.shape, generator=generator))


def bytes_of_a_step(model: nn.Module, rank: int, dtype: torch.dtype) -> tuple[int, dict]:
    """Bytes that all ranks hand to collectives in one step, and what they hold of it."""
    with dedicated(model, RecordingTransport, ns_dtype=dtype) as (own, opt):
        set_gradients(model, 0, rank % own.plan.topology.world)
        transport = recorded(own)
        transport.events.clear()
        opt.step()
        opt.synchronize()
        mine = sum(event.nbytes for event in transport.events)
        assert mine == sum(opt.stats()["bytes"].values())
        total = sum(own.runtime.transport.gather_objects(mine))
        return total, own.runtime.sent_elements()


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (4, 1), (1, 4)])
@distributed(4)
def test_bytes_follow_the_formula_on_fsdp_and_hsdp(rank, world, mesh):
    model = sharded_wide(mesh)
    total, _ = bytes_of_a_step(model, rank // mesh[-1], torch.bfloat16)
    elements = sum(p.numel() for p in model.parameters())
    replicas, shards = (1, 4) if len(mesh) == 1 else mesh
    expected = 2 * elements / world * (2 * (shards - 1) / shards + replicas - 1)
    assert abs(total / world / expected - 1) <= 0.02, (total / world, expected)


@pytest.mark.parametrize("case", ["fsdp4", "tp+fsdp", "ep+fsdp", "ep+fsdp, split experts"])
@distributed(4)
def test_bytes_follow_the_routes_on_every_mesh(rank, world, case):
    """The general form: what owners lack of a matrix comes and goes once."""
    both = pair(case)
    with dedicated(both.model, RecordingTransport, ns_dtype=torch.bfloat16) as (own, opt):
        both.backward(0)
        transport = recorded(own)
        transport.events.clear()
        opt.step()
        counted = {"gather": 0, "scatter": 0, "replicate": 0}
        for event in transport.events:
            if event.tag in counted:
                counted[event.tag] += event.nbytes
        everyone = own.runtime.transport.gather_objects(counted)
        sums = {tag: sum(c[tag] for c in everyone) for tag in counted}
        assert sums == {tag: 2 * n for tag, n in own.runtime.sent_elements().items()}
        held = 0
        for i, matrix in enumerate(own.plan.specs.matrices):
            owner = own.plan.owners[i]
            if own.runtime.shards.is_replicated(i):
                continue
            held += matrix.numel - own.runtime.shards.piece(i, owner).numel
        assert sums["gather"] == sums["scatter"]
        if not sums["replicate"]:
            assert sums["gather"] == 2 * held


def peak_bytes(action: Any) -> tuple[int, int]:
    """Most bytes that were alive at once beyond those at the start, and how many are left."""
    gc.collect()  # what goes during the action would count against it
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            action()
    finally:
        gc.enable()
    kineto = prof.profiler.kineto_results
    events = sorted(
        (e for e in kineto.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    alive = most = 0
    for event in events:
        alive += event.nbytes()
        most = max(most, alive)
    return most, alive


# Of `step_bytes`, what is alive for a moment only; one at a time.
TEMPORARIES = ("norms", "updates", "block_step")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_memory_of_a_step_follows_the_published_formula(rank, world, dtype):
    model = sharded_wide((2,), width=256 if dtype is torch.float32 else 128)
    own = dmuon.dedicate_params(model)
    made: list[dmuon.Muon] = []
    _, kept = peak_bytes(lambda: made.append(dmuon.Muon(model, ns_dtype=dtype)))
    opt = made[0]
    formula = opt.stats()["step_bytes"]
    state = sum(p.to_local().numel() for p in model.parameters()) * 4
    buffers = sum(n for purpose, n in formula.items() if purpose not in TEMPORARIES)
    assert abs(kept / (state + buffers) - 1) <= 0.1, (kept, state, formula)
    set_gradients(model, 0, rank)
    opt.step()
    opt.synchronize()
    most, left = peak_bytes(lambda: (opt.step(), opt.synchronize()))
    assert abs(most / max(formula[t] for t in TEMPORARIES if t in formula) - 1) <= 0.1, (
        most,
        formula,
    )
    assert abs(left) <= 0.01 * formula["newton_schulz"]
    own.close()


@distributed(2)
def test_adamw_on_a_large_embedding_takes_no_memory(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 64), nn.Linear(64, 32, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with dedicated(model, period=2) as (_, opt):
        for _ in range(2):  # a full step and a block step
            set_gradients(model, 0, rank)
            opt.step()
            opt.synchronize()
        for _ in range(2):
            most, _ = peak_bytes(lambda: (opt.step(), opt.synchronize()))
            assert most <= 0.1 * 4 * 2000 * 64, most


@distributed(2)
def test_memory_of_a_block_step_is_published_too(rank, world):
    model = sharded_wide((2,))
    with dedicated(model, period=100) as (_, opt):
        for _ in range(2):
            set_gradients(model, 0, rank)
            opt.step()
            opt.synchronize()
        formula = opt.stats()["step_bytes"]
        most, _ = peak_bytes(opt.step)
        expected = max(formula["block_step"], formula["norms"])
        assert abs(most / expected - 1) <= 0.1, (most, formula)


@pytest.mark.parametrize("slots", [1, 3])
@distributed(4)
def test_any_number_of_buffers_gives_the_same_bits(rank, world, slots):
    planner = dmuon.PlannerOptions(max_batch=1)
    found: list[list[Tensor]] = []
    for buffers in (2, slots):
        both = pair("hsdp")
        options = dmuon.ShardedOptions(buffers=buffers, bucket_bytes=1)
        with dedicated(both.model, options=options, planner=planner) as (own, opt):
            assert len(own.runtime.pipeline.buckets) > 3
            for step in range(3):
                both.backward(step)
                opt.step()
                opt.zero_grad()
        found.append([w for _, w in sorted(both.whole().items())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@distributed(2)
def test_a_step_allocates_nothing_that_grows_with_the_model(rank, world):
    for layers in (6, 18):  # the workspace of Newton-Schulz is there before
        model = sharded_wide((2,), width=64, layers=layers)
        options = dmuon.ShardedOptions(min_buckets=layers)
        with dedicated(model, options=options) as (_, opt):
            set_gradients(model, 0, rank)
            opt.step()
            opt.synchronize()
            most, _ = peak_bytes(lambda: (opt.step(), opt.synchronize()))
            assert most <= 1.1 * opt.stats()["step_bytes"]["norms"] <= 1 << 20


def seconds_of_a_step(own: dmuon.Ownership, opt: dmuon.Muon) -> float:
    own.runtime.transport.gather_objects(None)
    start = time.perf_counter()
    opt.step()
    opt.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
@distributed(2)
def test_a_slow_network_costs_the_critical_path_not_the_sum(rank, world, mesh):
    """Each collective takes 100 ms longer; the step has 2 + 2n (3n with replicas) of them."""
    delay, buckets = 0.1, 6
    options = dmuon.ShardedOptions(min_buckets=buckets, bucket_bytes=1 << 30)
    model = sharded_wide(mesh, width=32, layers=buckets)
    slow, fast = [], []
    with dedicated(
        model,
        lambda t: DelayingTransport(t, delay_s=delay),
        options=options,
        planner=dmuon.PlannerOptions(max_batch=1),
        publish="sync",
    ) as (own, opt):
        transport = own.runtime.transport
        set_gradients(model, 0, rank)
        for sample in range(6):
            transport.delay_s = 0.0 if sample % 2 else delay
            transport.events.clear()
            seconds = seconds_of_a_step(own, opt)
            if sample > 1:
                (fast if sample % 2 else slow).append(seconds)
            collectives = len(transport.events)
    grown = statistics.median(slow) - statistics.median(fast)
    trips = 3 if len(mesh) == 2 else 2
    assert collectives >= trips * buckets + 2
    # Nothing to compute here hides the delay, so what is left is dependencies: the norms, the
    # first gather, and a scatter (and a copy) for every `buffers` buckets, which wait for slots.
    rounds = buckets // 2
    path = delay * (1 + rounds + (trips - 1) * rounds)
    assert delay * 3 <= grown <= path + delay, (grown, path)
    assert grown <= 0.75 * delay * collectives


@pytest.mark.parametrize("case", ["tp+fsdp", "hsdp"])
@distributed(4)
def test_async_and_sync_publishing_give_the_same_bits(rank, world, case):
    found: list[list[Tensor]] = []
    for publish in ("sync", "async"):
        both = pair(case)
        with dedicated(both.model, publish=publish) as (own, opt):
            for step in range(4):
                both.backward(step)
                opt.step()
                if publish == "async" and step == 0:
                    assert own.runtime.pipeline.pending, "nothing is under way"
                opt.zero_grad()
        found.append([w for _, w in sorted(both.whole().items())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
