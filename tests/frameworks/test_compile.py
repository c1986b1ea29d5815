"""`torch.compile`: the whole model inside DDP, or blocks with FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import distributed
from tests.frameworks import common

BACKEND = "aot_eager"  # traces and functionalizes; what inductor would add is a C++ compiler


@distributed()
def runs(rank, world, wrap):
    expected = common.by_hand(common.net)
    model: nn.Module = common.net()
    if wrap == "fsdp2":  # its blocks
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=BACKEND)
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(torch.compile(model, backend=BACKEND))
    optimizer = common.muon(model)
    losses = common.train(model, optimizer, common.schedule_of(optimizer), rank, world)
    common.assert_same((losses, common.weights(model)), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_compiled(pools, wrap):
    pools(2).run(__name__, "runs", {"wrap": wrap})
