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
    model = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
    if how == "outside":
        model = compiled(model, how)
    optimizer = common.muon(model)
    losses = common.train(model, optimizer, common.schedule_of(optimizer), rank, world)
    common.assert_same((losses, common.weights(model)), expected)
    torch.compiler.reset()


@pytest.mark.parametrize(("how", "wrap"), [
    ("blocks", "ddp"), ("blocks", "fsdp2"), ("in place", "ddp"), ("inside", "ddp"),
    ("outside", "fsdp2"),
])  # fmt: skip
def test_compiled(pools, how, wrap):
    pools(2).run(__name__, "runs", {"how": how, "wrap": wrap})
