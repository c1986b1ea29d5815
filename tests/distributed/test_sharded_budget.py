"""What a step of the `sharded` layout takes: bytes that travel, memory, operations, waiting."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.dtensors import local_tensor
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import layouts, mesh_of, sharded
from tests.distributed.twins import Both, both, laid_out
from tests.transports import Clock, ClockTransport, RecordingTransport


class Wide(nn.Module):
    """Enough of each shape that matrices, not flags, are what travels."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))


def loss_of_wide(model: nn.Module, batch: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, model.up[0].in_features).expand(2, -1)
    for up, down in zip(model.up, model.down):
        x = down(up(x))
    return x.square().mean()


def step_of(pair: Both) -> None:
    """On gradients of this rank's own; of replicas the same."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(
        pair.mesh.get_local_rank(pair.mesh.ndim - 1)
    )
    for p in pair.model.parameters():
        p.grad = torch.zeros_like(p)
        local = local_tensor(p.grad)
        local.copy_(torch.randn(local.shape, generator=generator))
    step_and_wait(pair)


def step_and_wait(pair: Both) -> None:
    pair.opt.step()
    pair.opt.synchronize()


# ---- bytes -------------------------------------------------------------------------------


HALF = {"transport": RecordingTransport, "muon": {"ns_dtype": torch.bfloat16}}


@pytest.mark.parametrize(("replicas", "shards"), [(1, 4), (2, 2)])
@distributed(4)
def test_bytes_follow_the_formula_on_fsdp_and_hsdp(rank, world, replicas, shards):
    laid = sharded(*((4,) if replicas == 1 else (replicas, shards)), build=Wide)
    with both(layout=laid, **HALF) as pair:
        pair.events.clear()
        step_of(pair)
        # In an all-gather each rank is told of all bytes, and passes on those of all but one.
        passed = {"all_gather": (replicas - 1) / replicas}
        mine = sum(event.nbytes * passed.get(event.op, 1) for event in pair.events)
        total = sum(gathered(sum(pair.opt.stats()["bytes"].values())))
        mean = sum(gathered(mine)) / world
        assert round(mean * world) == total
        elements = sum(p.numel() for p in pair.model.parameters())
    expected = 2 * elements / world * (2 * (shards - 1) / shards + replicas - 1)
    assert abs(mean / expected - 1) <= 0.02, (mean, expected)


@pytest.mark.parametrize("case", ["tp+fsdp", "ep+fsdp, split experts"])
@distributed(4)
def test_bytes_follow_the_routes_on_every_mesh(rank, world, case):
    """The general form: what owners lack of a matrix comes and goes once, and each part of it is
    gathered once by all that hold it."""
    with both(layout=case, **HALF) as pair:
        pair.backward(0)
        pair.events.clear()
        pair.opt.step()
        counted = {"gather": 0, "scatter": 0, "replicate": 0}
        for event in pair.events:
            if event.tag in counted:
                counted[event.tag] += event.nbytes
        everyone = gathered(counted)
        shards, owners = pair.own.runtime.shards, pair.own.plan.owners
        expected = {"gather": 0, "scatter": 0, "replicate": 0}
        for i in range(len(owners)):
            if shards.is_local(i):
                continue
            for rank, piece in shards.pieces(i).items():
                expected["replicate"] += 2 * piece.numel * shards.is_replicated(i)
                is_near = shards.replica_of(i, rank) == shards.replica_of(i, owners[i])
                if is_near and rank != owners[i]:
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
TEMPORARIES = ("norms", "updates", "transposes", "products")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_memory_of_a_step_follows_the_published_formula(rank, world, dtype):
    build = partial(Wide, width=256 if dtype is torch.float32 else 128)
    model = laid_out(sharded(build=build))[0]
    own = dmuon.dedicate_params(model)
    made: list[dmuon.Muon] = []
    _, kept = peak_bytes(lambda: made.append(dmuon.Muon(model, ns_dtype=dtype, period=2)))
    pair = Both(model, model, made[0], [], mesh_of((world,)))
    formula = pair.opt.stats()["step_bytes"]
    state = sum(local_tensor(p).numel() for p in model.parameters()) * 4
    buffers = sum(n for purpose, n in formula.items() if purpose not in TEMPORARIES)
    assert abs(kept / (state + buffers) - 1) <= 0.1, (kept, state, formula)
    for _ in range(2):
        step_of(pair)
    full = max(formula[t] for t in TEMPORARIES)
    for least in (0.9 * full, 0.0):  # of a full and of a block step
        most, left = peak_bytes(lambda: step_and_wait(pair))
        assert least - 16384 <= most <= 1.1 * full + 16384, (most, least, formula)
        assert abs(left) <= 0.01 * formula["newton_schulz"]
    own.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@layouts("reduced", "dedicated")
def test_memory_of_a_step_at_owners_follows_the_formula(rank, world, layout, dtype):
    build = partial(Wide, width=256 if dtype is torch.float32 else 128)
    with both(build, layout, loss_of=loss_of_wide, muon={"ns_dtype": dtype}) as pair:
        for step in range(2):
            pair.backward(step)
            most, left = peak_bytes(pair.opt.step)
            formula = pair.opt.stats()["step_bytes"]
            pair.opt.zero_grad()
        passes = formula["passes"]
        assert passes >= 4 * max(u.numel for u in pair.own.runtime.units if u.owner == rank)
        # In the dedicated layout the first weights of the next forward are left.
        kept = 2 * formula["outbound"] if layout == "reduced" else left  # and gloo's own copies
        assert left <= kept + 4096 and most <= kept + passes + 16384, (most, left, formula)
        # An owner may be done with its batch before the buffers of others have memory.
        assert max(gathered((most - kept) / passes)) >= 0.9 or layout == "reduced", formula


# ---- waiting -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(2,), (2, 1)])
@distributed(2)
def test_a_slow_network_costs_the_critical_path_not_the_sum(rank, world, mesh):
    """A step has 2 + 2n collectives, of which each takes a second. Where every rank has the whole,
    the n gathers are left out."""
    buckets = 6
    laid = sharded(*mesh, build=partial(Wide, width=32, layers=buckets))
    case = {
        "options": {"min_buckets": buckets, "bucket_bytes": 1 << 30},
        "request": {"planner": dmuon.PlannerOptions(max_batch=1)},
    }
    clock = Clock()
    slow = partial(ClockTransport, clock=clock, delay_s=1.0)
    with both(layout=laid, transport=slow, **case) as pair:
        pair.events.clear()
        begin = clock.now
        step_of(pair)
        seconds, collectives = clock.now - begin, len(pair.events)
    assert collectives >= (2 if mesh == (2,) else 1) * buckets + 2
    # What is left are dependencies: the norms, gathers by twos, as there are two buffers for them,
    # and the last scatter; small buckets have slots for all scatters.
    assert seconds == 2 + (buckets / 2 if mesh == (2,) else 0), (seconds, collectives)
