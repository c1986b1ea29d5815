"""The convention of torchtitan's optimizer container: groups of tensors with ``param_names``, on
FSDP2. `outside.torchtitan` trains with its own package.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.distributed.harness import distributed
from tests.frameworks import common


def sharded(world: int) -> nn.Module:
    model = common.net()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_convention(model: nn.Module) -> tuple[Any, Any]:
    """The optimizer, and what saves it."""
    decayed = {n: p for n, p in model.named_parameters() if p.ndim >= 2}
    others = {n: p for n, p in model.named_parameters() if p.ndim < 2}
    flags = {"fused": True, "foreach": False}  # which the container adds for all optimizers
    groups = [
        {"params": [*part.values()], "param_names": [*part], **flags, **common.SETTINGS, **own}
        for part, own in ((decayed, {}), (others, {"weight_decay": 0.0}))
    ]
    dtype = common.SETTINGS["ns_dtype"]
    groups = [{k: v for k, v in group.items() if k != "ns_dtype"} for group in groups]
    optimizer = dmuon.Muon(groups, ns_dtype=dtype)
    return optimizer, common.Flat(model, optimizer)


@distributed()
def runs(rank, world, folder, resume):
    expected = common.by_hand(common.net, decay_vectors=False)
    model = sharded(world)
    optimizer, saved = by_convention(model)
    schedule = common.schedule_of(optimizer)
    state = {"model": model.state_dict(), "optimizer": saved, "schedule": schedule}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    save = partial(dcp.save, state, checkpoint_id=folder)
    losses = common.train(model, optimizer, schedule, rank, world, resume=resume, save=save)
    common.assert_same((losses, common.weights(model)), expected)


def test_the_convention(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path)
