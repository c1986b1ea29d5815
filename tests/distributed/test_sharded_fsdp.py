"""Who gathers FSDP2's shards, and when: nobody sees a weight before its update is there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dmuon.tools.parallel_models import ParallelModel
from tests.distributed.harness import distributed
from tests.distributed.layouts import Layout, sharded
from tests.distributed.models import batch
from tests.distributed.twins import both
from tests.transports import DelayingTransport

SLOW = {"transport": partial(DelayingTransport, delay_s=0.005)}


class Scored(ParallelModel):
    """Can be called by another method than `forward`."""

    def score(self, tokens):
        return self.forward(tokens)


GATHERED = {
    "a registered method": lambda model: model.score,
    "unshard": lambda model: model.unshard() or model,
    "unshard a block": lambda model: model.blocks[1].unshard(async_op=True) and model,
}


@pytest.mark.parametrize("how", GATHERED)
@distributed(2)
def test_what_gathers_without_a_hook_sees_published_values(rank, world, how):
    root = Layout(wrap=lambda model, mesh: fully_shard(model, mesh=mesh), from_first=False)
    with both(Scored, sharded() if "block" in how else root, **SLOW) as pair:
        if how == "a registered method":
            register_fsdp_forward_method(pair.model, "score")
        pair.train([0])
        with torch.no_grad():
            found = GATHERED[how](pair.model)(batch(9, rank)[0])
            expected = pair.twin(batch(9, rank)[0])
        assert float((found - expected).abs().max()) <= 1e-4
        pair.model.reshard()
    assert "unshard" not in vars(pair.model), "left behind by close()"


class _Stream:
    """Notes whether anything was still pending when it was told to wait for the current stream."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.seen = []

    def wait_stream(self, stream):
        self.seen.append(len(self.pipeline.pending))

    def __getattr__(self, name):
        return lambda *args: None


@distributed(2)
def test_streams_that_read_shards_wait_for_each_update(rank, world):
    """On CUDA FSDP2 reads shards on a stream of its own, which it orders once a forward."""
    with both(layout="fsdp2") as pair:
        pair.train_alone([0])
        context = pair.model._get_fsdp_state()._comm_ctx
        stream = context.all_gather_copy_in_stream = _Stream(pair.own.runtime.pipeline)
        assert pair.pending
        pair.loss(pair.model, 1, rank)
        assert stream.seen[0] > stream.seen[-1] == 0
