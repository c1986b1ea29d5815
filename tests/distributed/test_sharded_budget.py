"""What a step of the `sharded` layout takes: bytes that travel, memory, operations, waiting."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.dtensors import local_tensor
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import layouts, mesh_of, sharded
from tests.distributed.twins import Both, both, laid_out
from tests.transports import Clock, ClockTransport


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


@distributed(2)
def test_memory_of_a_step_follows_the_published_formula(rank, world):
    build = partial(Wide, width=256)
    model = laid_out(sharded(build=build))[0]
    own = dmuon.dedicate_params(model)
    made: list[dmuon.Muon] = []
    _, kept = peak_bytes(lambda: made.append(dmuon.Muon(model, ns_dtype=torch.float32, period=2)))
    pair = Both(model, model, made[0], None, mesh_of((world,)))
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


@layouts("reduced", "dedicated")
def test_memory_of_a_step_at_owners_follows_the_formula(rank, world, layout):
    with both(partial(Wide, width=256), layout, loss_of=loss_of_wide) as pair:
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


@distributed(2)
def test_a_slow_network_costs_the_critical_path_not_the_sum(rank, world):
    """A step has 2 + 2n collectives, of which each takes a second."""
    buckets = 6
    laid = sharded(2, build=partial(Wide, width=32, layers=buckets))
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
    assert collectives >= 2 * buckets + 2
    # What is left are dependencies: the norms, gathers by twos, as there are two buffers for them,
    # and the last scatter; small buckets have slots for all scatters.
    assert seconds == 2 + buckets / 2, (seconds, collectives)
