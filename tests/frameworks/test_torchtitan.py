"""torchtitan's optimizer container: groups of tensors with ``param_names``, on FSDP2.

The convention is tried without torchtitan too, which needs more packages than all else here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.distributed.harness import distributed
from tests.frameworks import common

VECTORS = r"norm|bias"


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


def by_torchtitan(model: nn.Module) -> tuple[Any, Any]:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Container(OptimizersContainer):  # type: ignore[misc]
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
            return {"Muon": dmuon.Muon}[name]

    kwargs = {k: v for k, v in common.SETTINGS.items() if k != "ns_dtype"}
    vectors = ParamGroupConfig(
        pattern=VECTORS, optimizer_name="Muon", optimizer_kwargs=kwargs | {"weight_decay": 0.0}
    )
    rest = ParamGroupConfig(pattern=".*", optimizer_name="Muon", optimizer_kwargs=kwargs)
    config = OptimizersContainer.Config(
        param_groups=[vectors, rest],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"Muon": {"ns_dtype": common.SETTINGS["ns_dtype"]}},
    )
    container = Container(config, model_parts=[model])
    return container, container


@distributed()
def runs(rank, world, folder, resume, build):
    expected = common.by_hand(common.net, decay_vectors=False)
    model = sharded(world)
    optimizer, saved = {"convention": by_convention, "torchtitan": by_torchtitan}[build](model)
    inner = optimizer if build == "convention" else next(iter(optimizer))
    schedule = common.schedule_of(inner)
    state = {"model": model.state_dict(), "optimizer": saved, "schedule": schedule}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    save = partial(dcp.save, state, checkpoint_id=folder)
    losses = common.train(model, optimizer, schedule, rank, world, resume=resume, save=save)
    common.assert_same((losses, common.weights(model)), expected)


def test_the_convention(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path, build="convention")


def test_the_container(pools, tmp_path):
    pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)
    common.saved_and_resumed(pools, runs, tmp_path, build="torchtitan")
