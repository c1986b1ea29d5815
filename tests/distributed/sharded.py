"""Helpers for tests of the `sharded` layout: a parallelized model, its twin, and their data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dmuon
from dmuon.api import Given, Request, assemble
from dmuon.comm.transport import C10dTransport, Transport
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.topology import Topology
from dmuon.tools.parallel_models import CASES, ParallelCase, batch, loss_of
from tests.transports import RecordingTransport

BY_NAME = {case.name: case for case in CASES}


def cases(world: int) -> list[str]:
    """Names of the cases that run on so many ranks."""
    return [case.name for case in CASES if case.world == world]


@dataclass
class Pair:
    """A parallelized model and the same model in one process."""

    case: ParallelCase
    mesh: DeviceMesh
    model: nn.Module
    twin: nn.Module

    @property
    def data_rank(self) -> int:
        return self.data_ranks()[dist.get_rank()]

    def data_ranks(self) -> list[int]:
        """The data rank of each rank."""
        axes = [self.case.axes.index(axis) for axis in self.case.data_axes]
        found = []
        for rank in range(self.mesh.size()):
            where = (self.mesh.mesh == rank).nonzero()[0].tolist()
            number = 0
            for axis in axes:
                number = number * self.case.mesh_shape[axis] + where[axis]
            found.append(number)
        return found

    def backward(self, step: int) -> None:
        """One backward pass of the parallelized model on this rank's data."""
        loss_of(self.model, batch(step, self.data_rank)).backward()

    def joint_backward(self, step: int) -> None:
        """One backward pass of the twin on all ranks' data: each rank computes its part, and the
        gradients are averaged. A collective call."""
        earlier = [p.grad for p in self.twin.parameters()]
        self.twin.zero_grad()
        loss_of(self.twin, batch(step, self.data_rank)).backward()
        average_gradients(self.twin)
        for p, before in zip(self.twin.parameters(), earlier, strict=True):
            if before is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)

    def both_backward(self, step: int) -> None:
        self.backward(step)
        self.joint_backward(step)

    def whole(self) -> dict[str, Tensor]:
        """The full weights; a collective call."""
        return {n: whole_tensor(p).clone() for n, p in self.model.named_parameters()}

    def difference(self) -> tuple[float, str]:
        """The largest difference of a weight from the twin's, and where; a collective call."""
        twins = dict(self.twin.named_parameters())
        worst = (0.0, "-")
        for name, weight in self.whole().items():
            value = float((weight.double() - twins[name].detach().double()).abs().max())
            if not value <= worst[0]:  # a NaN too
                worst = (math.inf if math.isnan(value) else value, name)
        return worst


def average_gradients(model: nn.Module) -> None:
    """Replace gradients by their means over all ranks, in one all-reduce; None where no rank has
    one."""
    params = list(model.parameters())
    held = [p.grad is not None for p in params]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([torch.tensor(held), *(part.double().flatten() for part in parts)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    anywhere, *means = flat.split([len(params), *(p.numel() for p in params)])
    for p, mean, found in zip(params, means, anywhere, strict=True):
        p.grad = mean.view_as(p).to(p.dtype) if found else None


def pair(
    name: str | ParallelCase,
    *,
    seed: int = 0,
    change: Callable[[nn.Module], Any] | None = None,
) -> Pair:
    """Model and twin of a case, with equal weights on every rank."""
    case = BY_NAME[name] if isinstance(name, str) else name
    torch.manual_seed(seed)
    model = case.build()
    if change is not None:
        change(model)
    twin = copy.deepcopy(model)
    mesh = case.make_mesh(torch.get_default_device().type)
    return Pair(case, mesh, case.parallelize(model, mesh), twin)


class Vocabulary(nn.Module):
    """GPT-2's vocabulary in an embedding and a head, and between them an uneven MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50257, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 25), nn.GELU(), nn.Linear(25, 6))])
        self.lm_head = nn.Linear(6, 50257, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        return self.lm_head(x + self.blocks[0](x))


def vocabulary(shape: tuple[int, ...]) -> ParallelCase:
    """That on a mesh of data, data and tensor, or replicas, data and tensor parallelism."""
    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "blocks.0.0": ColwiseParallel(use_local_output=False),
        "blocks.0.2": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    axes = ("dp",) if len(shape) == 1 else ("replicate", "dp", "tp")[-len(shape) :]
    case = replace(BY_NAME["tp+fsdp"], mesh_shape=shape, axes=axes, build=Vocabulary)
    tensor_parallel = (
        (lambda model, mesh: parallelize_module(model, mesh["tp"], plan))
        if "tp" in axes
        else lambda model, mesh: model
    )
    data_axes = tuple(axis for axis in axes if axis != "tp")
    return replace(case, data_axes=data_axes, tensor_parallel=tensor_parallel)


# AdamW amplifies rounding where gradients are nearly zero, the more the larger its rate.
MUON = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}


_PLANNING = ("options", "costs", "plan", "mesh", "planner", "solver", "splits", "heads", "select")


@contextmanager
def dedicated(
    model: nn.Module, transport: Callable[[Transport], Transport] | None = None, **kwargs: Any
) -> Iterator[tuple[dmuon.Ownership, dmuon.Muon]]:
    """Ownership and optimizer; keywords that `dedicate_params` knows go there."""
    planning = {k: kwargs.pop(k) for k in _PLANNING if k in kwargs}
    if transport is None:
        own = dmuon.dedicate_params(model, **planning)
    else:
        wrapped = transport(C10dTransport(list(range(dist.get_world_size()))))
        topology = Topology.flat(wrapped.world)
        own = assemble(Given(model), Request(**planning), wrapped, lambda: topology)
    try:
        # What can go wrong with "sync" can with "async" too.
        yield own, dmuon.Muon(model, **(MUON | {"publish": "async"} | kwargs))
    finally:
        own.close()


def reference(model: nn.Module, **kwargs: Any) -> ReferenceMuon:
    return ReferenceMuon(model, **(MUON | kwargs))


def train(both: Pair, steps: int, after: Callable[[int], Any] | None = None, **kwargs: Any) -> None:
    """Train both sides for some steps; ``after`` is called with each step's number."""
    with dedicated(both.model, **kwargs) as (_, opt):
        ours = ("publish", "transport", *_PLANNING)
        shared = {k: v for k, v in kwargs.items() if k not in ours or k == "select"}
        ref = reference(both.twin, **shared)
        for step in range(steps):
            both.backward(step)
            opt.step()
            opt.zero_grad()
            both.joint_backward(step)
            ref.step()
            ref.zero_grad()
            if after is not None:
                after(step)
        opt.synchronize()


def recorded(own: dmuon.Ownership) -> RecordingTransport:
    assert isinstance(own.runtime.transport, RecordingTransport)
    return own.runtime.transport
