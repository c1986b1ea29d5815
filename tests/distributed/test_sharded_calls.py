"""The host's work in a step of the `sharded` layout: how many operations, and none that waits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator import host_cannot_read
from tests.distributed.harness import distributed
from tests.distributed.sharded import dedicated

# Llama-8B's layer, each dim a 64th: q, k, v, o, gate, up, down.
SHAPES = [(64, 64), (16, 64), (16, 64), (64, 64), (224, 64), (224, 64), (64, 224)]
LAYERS = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for n, shape in enumerate(SHAPES):
            self.register_parameter(f"w{n}_weight", nn.Parameter(torch.randn(shape)))
        for n in range(2):
            self.register_parameter(f"norm{n}", nn.Parameter(torch.ones(64)))


class Counter(TorchDispatchMode):
    """Counts operations on what a rank stores, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(t.__module__.endswith("_api") for t in types):
            return NotImplemented  # a DTensor's: its local operations come by in turn
        if not func.is_view:
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


def calls_of_steps(rank: int) -> dict[str, list[str]]:
    """The operations of a full and of a block step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = {}
    with dedicated(model, period=2) as (own, opt):
        assert len(own.plan.specs.matrices) == len(SHAPES) * LAYERS
        for step in range(4):
            generator = torch.Generator().manual_seed(2 * step + rank)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
                local = p.grad.to_local()
                local.copy_(torch.randn(local.shape, generator=generator))
            with Counter() as counter:
                opt.step()
                opt.synchronize()
            found["block" if step % 2 else "full"] = counter.calls
    return found


@pytest.mark.parametrize("on_host", [True, False], ids=["host reads", "device decides"])
@distributed(2)
def test_a_step_takes_few_operations_however_many_matrices(rank, world, on_host):
    """224 matrices; what Newton-Schulz itself takes (5 iterations of a batch) is in it."""
    with nullcontext() if on_host else host_cannot_read():
        found = calls_of_steps(rank)
    counts = {kind: len(calls) for kind, calls in found.items()}
    print(on_host, counts, flush=True)
    assert counts["full"] <= 500 and counts["block"] <= 600, {
        kind: sorted((calls.count(name), name) for name in set(calls))[-12:]
        for kind, calls in found.items()
    }
