"""`torch.compile`: the whole model, before DDP or after, its blocks, or in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import distributed
from tests.frameworks import common

BACKEND = "aot_eager"  # traces and functionalizes; what inductor would add is a C++ compiler


def compiled(model: nn.Module, how: str) -> nn.Module:
    if how == "blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=BACKEND)
    elif how == "in place":
        model.compile(backend=BACKEND)
    else:
        model = torch.compile(model, backend=BACKEND)
    return model


@distributed()
def runs(rank, world, how, wrap):
    expected = common.by_hand(common.net)
    model: nn.Module = common.net()
    if how != "outside":
        model = compiled(model, how)
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = fully_shard(model)
    if how == "outside":
        model = compiled(model, how)
    optimizer = common.muon(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, common.factor)
    losses = []
    for step in range(common.STEPS):
        loss = common.loss_of(model, common.batch(step, rank, world))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(common.mean_over_ranks(loss))
    common.assert_same((losses, common.weights(model)), expected)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "how, wrap",
    [
        ("blocks", "ddp"),
        ("blocks", "fsdp2"),
        ("in place", "ddp"),
        ("inside", "ddp"),
        ("outside", "fsdp2"),
    ],
)
def test_compiled(pools, how, wrap):
    pools(2).run(__name__, "runs", {"how": how, "wrap": wrap})
