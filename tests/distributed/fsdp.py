"""Helpers for tests of FSDP2: sharded twins, and training both sides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dmuon.comm.transport import Transport
from dmuon.dtensors import local_tensor
from dmuon.tools.parallel_models import ParallelCase, ParallelModel
from tests.distributed.sharded import Pair, dedicated, reference

TOLERANCE = 1e-5


def fsdp(
    build: Callable[[], nn.Module] = ParallelModel,
    *,
    shard: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    change: Callable[[nn.Module], Any] | None = None,
    **policy: Any,
) -> Pair:
    """A model on FSDP2 over all ranks, every block and the root a unit, and its twin.

    ``shard`` shards in another way; ``policy`` are keywords of `fully_shard`.
    """

    def blocks_and_root(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        (shard or blocks_and_root)(model, mesh)
        return model

    world = dist.get_world_size()
    case = ParallelCase("fsdp", (world,), ("dp",), ("dp",), build, parallelize)
    torch.manual_seed(0)
    model = build()
    if change is not None:
        change(model)
    twin = copy.deepcopy(model)
    mesh = case.make_mesh(torch.get_default_device().type)
    return Pair(case, mesh, parallelize(model, mesh), twin)


def advance(*optimizers: Any) -> None:
    """A step of each, and no gradients left."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def follow(
    both: Pair,
    steps: int,
    transport: Callable[[Transport], Transport] | None = None,
    **planning: Any,
) -> None:
    """Train both sides on the same data.

    With asynchronous publishing each forward reads weights that were pending after the step
    before, and a stale one would show in the next gradient.
    """
    with dedicated(both.model, transport, **planning) as (own, opt):
        ref = reference(both.twin)
        for step in range(steps):
            both.both_backward(step)
            advance(opt, ref)
            assert own.runtime.pipeline.pending, "nothing to wait for"


def assert_close(both: Pair) -> None:
    """Every full weight against the twin's, after `synchronize`; a collective call."""
    twins = dict(both.twin.named_parameters())
    for name, whole in both.whole().items():
        difference = float((whole.double() - twins[name].detach().double()).abs().max())
        assert difference <= TOLERANCE, f"{name} differs by {difference}"


def snapshot(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of what this rank stores of weights and optimizer state."""
    found = [local_tensor(p).clone() for p in model.parameters()]
    for p in model.parameters():
        found += [local_tensor(value).clone() for value in opt.state[p].values()]
    return found
