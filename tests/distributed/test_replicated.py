"""The `replicated` layout with momentum at the owners: closing, traffic, process groups."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dmuon
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import REDUCING
from tests.distributed.models import Net, batch, loss_of, seeded
from tests.distributed.twins import both
from tests.internals import C10dTransport
from tests.transports import Clock, ClockTransport


@distributed(2)
def test_closing_gives_ddp_back(rank, world):
    """DDP takes one communication hook for life; ours steps aside and comes back."""
    model = seeded(Net)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        own = dmuon.dedicate_params(wrapped, options=REDUCING)
        opt = dmuon.Muon(wrapped, lr=0.02)
        loss_of(wrapped, batch(0, rank)).backward()
        opt.step()
        opt.zero_grad()
        own.close()
        with pytest.raises(ValueError, match="closed"):
            opt.step()
        loss_of(wrapped, batch(1, rank)).backward()
        mine = model.blocks[0].up.weight.grad.clone()
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.allclose(mine, total / world, atol=1e-7), "DDP averages by itself"
        wrapped.zero_grad()


@distributed(2)
def test_slow_collectives_cost_the_critical_path_not_their_sum(rank, world):
    clock = Clock()
    # One matrix a batch and a batch a bucket, so that there is something to overlap.
    case = {
        "options": {"bucket_bytes": 2048, "publish_bucket_bytes": 2048},
        "request": {"planner": dmuon.PlannerOptions(max_batch=1)},
        "transport": partial(ClockTransport, clock=clock, delay_s=1.0),
    }
    with both(lambda: Net(layers=6), "reduced", **case) as pair:
        pair.train([0])
        pair.backward(1)
        pair.events.clear()
        begin = clock.now
        pair.opt.step()
        assert sum(e.tag == "updates" for e in pair.events) >= 6
        assert clock.now - begin == 2, "the verdict, and then all updates at once"


@distributed(2)
def test_bytes_handed_to_collectives_follow_the_shapes(rank, world):
    with both(Net, "reduced", muon={"ns_dtype": torch.bfloat16}) as pair:
        pair.backward(0)
        pair.opt.step()
        stats = pair.opt.stats()
        # Gradients in float32 once; updates in bfloat16, the padding of a few buffers beside.
        assert stats["bytes"]["gradients"] == 4 * pair.own.numel()
        assert 0 <= stats["bytes"]["updates"] - 2 * sum(pair.matrices.values()) <= 64 * 64
        rms = stats["update_rms"]
        assert rms.keys() == pair.matrices.keys() and rms["spare.weight"] == 0.0
        assert all(0.1 < v < 0.3 for n, v in rms.items() if "spare" not in n)  # aims at 0.2
        assert gathered(rms) == [rms] * world
        assert stats["ns_ms"] > 0


@distributed(2)
def test_our_group_ends_with_torch_distributed(rank, world):
    """Whoever forgets `close` must not carry our group's threads into the interpreter's exit."""
    transport = C10dTransport(range(world))
    dist.barrier()  # the other one may still be connecting
    dist.destroy_process_group(transport.group)  # as destroying all of them does
    gc.collect()
    with pytest.raises(ValueError, match="process group is gone"):
        transport.group  # noqa: B018
