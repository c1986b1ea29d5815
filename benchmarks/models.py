"""Models that several benchmarks train, and a training of one that is timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon
from benchmarks.timing import Laps, over_ranks

Loss = Callable[[nn.Module, int], Tensor]
"""Of a model in a step, on the data of this rank."""


class Layer(nn.Module):
    """w x w, w x w, 4w x w, w x 4w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.b(torch.relu(self.a(y))) + self.down(torch.relu(self.up(y)))


class Stack(nn.Module):
    """Layers of four matrices, one after the other; ``[..., width]`` to the same."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Alike(nn.Module):
    """``count`` matrices ``[width, width]``, side by side: all have gradients of a size."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def shard(model: nn.Module, **how: Any) -> None:
    """FSDP2 for each layer of a `Stack`, then for the root; ``how`` as `fully_shard` takes it."""
    for module in (*(model.layers if isinstance(model, Stack) else ()), model):
        fully_shard(module, **how)


def on_random(*shape: int) -> Loss:
    """The mean square of what comes of random inputs of ``shape``."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return lambda model, _: model(torch.randn(shape, generator=data)).square().mean()


class Training:
    """A model with its optimizers, in the middle of a step: the next thing is `backward`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizers: Sequence[Any],
        own: dmuon.Ownership | None = None,
        sync: Callable[[], Any] | None = None,
    ) -> None:
        """``sync`` exchanges gradients after backward, where nobody else does."""
        self.model, self.optimizers, self.own, self._sync = model, optimizers, own, sync
        self._loss, self.steps = loss, 0
        self.forward()

    @classmethod
    def of_muon(cls, model: nn.Module, loss: Loss, plan: dict[str, Any], **muon: Any) -> Training:
        """``plan``: the arguments of `dmuon.dedicate_params`; the others are `dmuon.Muon`'s.

        Replicated gradients are averaged by dmuon, unless ``plan`` has other options.
        """
        if plan["layout"] == "replicated":
            plan = {"options": dmuon.ReplicatedOptions(reduce_to_owner=True)} | plan
        own = dmuon.dedicate_params(model, **plan)
        return cls(model, loss, [dmuon.Muon(model, **muon)], own)

    def forward(self) -> None:
        for one in self.optimizers or [self.model]:
            one.zero_grad()
        self.loss = self._loss(self.model, self.steps)
        self.steps += 1

    def backward(self) -> None:
        self.loss.backward()
        if self._sync is not None:
            self._sync()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def turn(self) -> Laps:
        """Milliseconds from before backward to the end of the next forward; of backward, of the
        optimizers' `step`, and of the forward."""
        return over_ranks(self.backward, self.step, self.forward)

    def step_turn(self) -> Laps:
        """Milliseconds of the optimizers' `step`, which all ranks begin together."""
        self.backward()
        found = over_ranks(self.step)
        self.forward()
        return found

    def sent_bytes(self) -> int:
        """What the optimizer of the matrices sent in the last step; AdamW sends nothing."""
        if self.own is not None:
            return sum(self.optimizers[0].stats()["bytes"].values())
        return sum(getattr(optimizer, "sent_bytes", 0) for optimizer in self.optimizers)

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
