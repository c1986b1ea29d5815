"""What a step of the `sharded` layout takes: bytes that travel, memory, operations, waiting."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from dmuon.dtensors import local_tensor
from tests.accelerator import host_cannot_read
from tests.distributed.harness import distributed
from tests.distributed.sharded import dedicated, pair, recorded
from tests.transports import ClockTransport, RecordingTransport


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
    fully_shard(
        model,
        mesh=init_device_mesh(torch.get_default_device().type, mesh_shape, mesh_dim_names=axes),
    )
    return model


def step_of(model: nn.Module, opt: dmuon.Muon, rank: int) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        local = local_tensor(p.grad)
        local.copy_(torch.randn(local.shape, generator=generator))
    opt.step()
    opt.synchronize()


# ---- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "shards"), [(1, 4), (2, 2)])
@distributed(4)
def test_bytes_follow_the_formula_on_fsdp_and_hsdp(rank, world, replicas, shards):
    model = sharded_wide((4,) if replicas == 1 else (replicas, shards))
    with dedicated(model, RecordingTransport, ns_dtype=torch.bfloat16) as (own, opt):
        transport = recorded(own)
        transport.events.clear()
        step_of(model, opt, rank // shards)
        mine = sum(event.nbytes for event in transport.events)
        assert mine == sum(opt.stats()["bytes"].values())
        mean = sum(transport.gather_objects(mine)) / world
    elements = sum(p.numel() for p in model.parameters())
    expected = 2 * elements / world * (2 * (shards - 1) / shards + replicas - 1)
    assert abs(mean / expected - 1) <= 0.02, (mean, expected)


@pytest.mark.parametrize("case", ["tp+fsdp", "ep+fsdp, split experts"])
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
        everyone = transport.gather_objects(counted)
        shards, owners = own.runtime.shards, own.plan.owners
        expected = {"gather": 0, "scatter": 0, "replicate": 0}
        for i in range(len(owners)):
            if shards.is_local(i):
                continue
            for piece in shards.pieces(i):
                if piece.replica != shards.replica_of(i, owners[i]):
                    expected["replicate"] += 2 * piece.numel
                elif piece.rank != owners[i]:
                    expected["gather"] += 2 * piece.numel
                    expected["scatter"] += 2 * piece.numel
        assert {tag: sum(c[tag] for c in everyone) for tag in counted} == expected


# ---- memory ------------------------------------------------------------------------------


def peak_bytes(action: Any) -> tuple[int, int]:
    """Most bytes that were alive at once beyond those at the start, and how many are left."""
    gc.collect()  # what goes during the action would count against it
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            action()
    finally:
        gc.enable()
    events = (e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most, alive


# Of `step_bytes`, what is alive for a moment only; one at a time.
TEMPORARIES = ("norms", "updates")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_memory_of_a_step_follows_the_published_formula(rank, world, dtype):
    model = sharded_wide((2,), width=256 if dtype is torch.float32 else 128)
    own = dmuon.dedicate_params(model)
    made: list[dmuon.Muon] = []
    _, kept = peak_bytes(lambda: made.append(dmuon.Muon(model, ns_dtype=dtype, period=2)))
    opt = made[0]
    formula = opt.stats()["step_bytes"]
    block = formula.pop("block_step")
    state = sum(local_tensor(p).numel() for p in model.parameters()) * 4
    buffers = sum(n for purpose, n in formula.items() if purpose not in TEMPORARIES)
    assert abs(kept / (state + buffers) - 1) <= 0.1, (kept, state, formula)
    for _ in range(2):
        step_of(model, opt, rank)
    full = max(formula[t] for t in TEMPORARIES)
    for expected in (full, max(block, formula["norms"])):  # of a full and of a block step
        most, left = peak_bytes(lambda: (opt.step(), opt.synchronize()))
        assert abs(most - expected) <= 0.1 * expected + 8192, (most, expected, formula)
        assert abs(left) <= 0.01 * formula["newton_schulz"]
    own.close()


@distributed(2)
def test_a_step_allocates_nothing_that_grows_with_the_model(rank, world):
    """Neither with the number of matrices nor with what AdamW updates."""
    for layers in (6, 18):  # the workspace of Newton-Schulz is there before
        model = sharded_wide((2,), width=64, layers=layers)
        with dedicated(model, options=dmuon.ShardedOptions(min_buckets=layers)) as (_, opt):
            step_of(model, opt, rank)
            most, _ = peak_bytes(lambda: (opt.step(), opt.synchronize()))
            assert opt.stats()["step_bytes"]["norms"] == 0 and most <= 16384, most
    model = nn.Sequential(nn.Embedding(4000, 64), nn.Linear(64, 32, bias=False))
    fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (2,)))
    with dedicated(model, period=2) as (_, opt):
        for _ in range(2):  # a full step and a block step
            step_of(model, opt, rank)
        for _ in range(2):
            most, _ = peak_bytes(lambda: (opt.step(), opt.synchronize()))
            assert most <= 0.1 * 4 * 2000 * 64, most


# ---- operations --------------------------------------------------------------------------

# Llama-8B's layer, each dim a 64th: q, k, v, o, gate, up, down.
SHAPES = [(64, 64), (16, 64), (16, 64), (64, 64), (224, 64), (224, 64), (64, 224)]
LAYERS = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for n, shape in enumerate(SHAPES):
            self.register_parameter(f"w{n}_weight", nn.Parameter(torch.randn(shape)))
        for n in range(2):
            self.register_parameter(f"norm{n}", nn.Parameter(torch.ones(64)))


class Counter(TorchDispatchMode):
    """Counts operations on what a rank stores, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(t.__module__.endswith("_api") for t in types):
            return NotImplemented  # a DTensor's: its local operations come by in turn
        if not func.is_view:
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_host", [True, False], ids=["host reads", "device decides"])
@distributed(2)
def test_a_step_takes_few_operations_however_many_matrices(rank, world, on_host):
    """224 matrices; what Newton-Schulz itself takes (5 iterations of a batch) is in it."""
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (2,)))
    with (
        nullcontext() if on_host else host_cannot_read(),
        dedicated(model, period=2) as (own, opt),
    ):
        assert len(own.plan.specs.matrices) == len(SHAPES) * LAYERS
        for _ in range(2):
            step_of(model, opt, rank)
        for most in (700, 800):  # of a full and of a block step
            with Counter() as counter:
                opt.step()
                opt.synchronize()
            calls = counter.calls
            common = sorted((calls.count(name), name) for name in set(calls))[-12:]
            assert len(calls) <= most, (len(calls), common)


# ---- waiting -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
@distributed(2)
def test_a_slow_network_costs_the_critical_path_not_the_sum(rank, world, mesh):
    """A step has 2 + 2n collectives, of which each takes a second. Where every rank has the whole,
    the n gathers are left out, and two owners broadcast."""
    buckets = 6
    model = sharded_wide(mesh, width=32, layers=buckets)
    with dedicated(
        model,
        lambda t: ClockTransport(t, delay_s=1.0),
        options=dmuon.ShardedOptions(min_buckets=buckets, bucket_bytes=1 << 30),
        planner=dmuon.PlannerOptions(max_batch=1),
        publish="sync",
    ) as (own, opt):
        transport = own.runtime.transport
        transport.events.clear()
        begin = transport.clock.now
        step_of(model, opt, rank)
        seconds, collectives = transport.clock.now - begin, len(transport.events)
    assert collectives >= 2 * buckets + 2
    # What is left are dependencies: the norms, the first gather, and a scatter for every two
    # buckets, which wait for their slots.
    assert 3 <= seconds <= 2 + buckets, (seconds, collectives)


@distributed(4)
def test_any_number_of_buffers_and_any_publishing_give_the_same_bits(rank, world):
    planner = dmuon.PlannerOptions(max_batch=1)
    found: list[list[Tensor]] = []
    for buffers, publish in ((2, "sync"), (2, "async"), (1, "async"), (3, "sync")):
        both = pair("hsdp")
        options = dmuon.ShardedOptions(buffers=buffers, bucket_bytes=1)
        settings = {"options": options, "planner": planner, "publish": publish}
        with dedicated(both.model, **settings) as (own, opt):
            assert len(own.runtime.pipeline.buckets) > 3
            for step in range(2):
                both.backward(step)
                opt.step()
                assert bool(own.runtime.pipeline.pending) is (publish == "async")
                opt.zero_grad()
        found.append([w for _, w in sorted(both.whole().items())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
