"""What all baselines share: hyperparameters, momentum, Newton-Schulz and the update of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.update import adjusted_lr, momentum_update


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it: its rows of a DTensor, all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_rows(rows: int, world: int) -> list[int]:
    """Rows of each rank under ``Shard(0)``, which deals as torch.chunk does.

    >>> shard_rows(10, 4), shard_rows(2, 4)
    ([3, 3, 3, 1], [1, 1, 0, 0])
    """
    each = -(-rows // world)
    edges = [min(rows, each * rank) for rank in range(world + 1)]
    return [high - low for low, high in pairwise(edges)]


def zeropower(x: Tensor, *, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz ``[m, n] -> [m, n]`` in ``dtype``, operation by operation as torch.optim.Muon.

    Neither batched nor in the Gram form: public implementations run one matrix after the other.
    """
    tall = x.shape[0] > x.shape[1]
    x = (x.mT if tall else x).to(dtype)
    x = x / x.norm().clamp(min=eps)
    for a, b, c in resolve_coefficients("quintic", steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Baseline(Optimizer):
    """Muon on W ranks; a subclass says in `update` what is computed where.

    ``lr``, ``weight_decay``, ``momentum``, ``nesterov``, ``eps`` and ``ns_steps`` are those of
    `torch.optim.Muon`. Raises ValueError for a parameter that is not 2-D.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        eps: float = 1e-7,
        ns_steps: int = 5,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.matrices = list(params)
        for p in self.matrices:
            if p.ndim != 2:
                raise ValueError(
                    f"params must be 2-D, found shape {tuple(p.shape)}; leave others to AdamW"
                )
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
            "ns_steps": ns_steps,
        }
        super().__init__(self.matrices, settings)
        self.ns_dtype = ns_dtype
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.sent_bytes = 0
        self.update()
        return loss

    def update(self) -> None:
        """Update every matrix; every rank calls it."""
        raise NotImplementedError

    def direction(self, p: Tensor) -> Tensor:
        """Advance the momentum of what this rank holds of ``p``; what goes into Newton-Schulz."""
        if p.grad is None:
            raise ValueError(f"a parameter of shape {tuple(p.shape)} has no gradient; give it one")
        group, grad = self.param_groups[0], local(p.grad)
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        direction = momentum_update(
            state["momentum_buffer"],
            grad,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            mode="ema",
            dampening=0.0,
        )
        return direction.to(self.ns_dtype)

    def orthogonalize(self, x: Tensor) -> Tensor:
        group = self.param_groups[0]
        return zeropower(x, steps=group["ns_steps"], eps=group["eps"], dtype=self.ns_dtype)

    def apply(self, p: Tensor, update: Tensor) -> None:
        """Decay and move what this rank holds of ``p``; ``update`` has the same rows."""
        group = self.param_groups[0]
        lr = adjusted_lr(group["lr"], "match_rms_adamw", *p.shape)
        weight = local(p)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-lr)


class ReplicatedBaseline(Baseline):
    """A baseline whose parameters are whole and equal on every rank."""

    def sync_gradients(self) -> None:
        """All-reduce ``p.grad`` to its mean: what DistributedDataParallel does in backward."""
        average([(p.grad, None) for p in self.matrices if p.grad is not None])


def average(gradients: Iterable[tuple[Tensor, int | None]]) -> None:
    """Replace each gradient by its mean over the ranks, on one rank or (None) on all of them."""
    works = []
    for grad, owner in gradients:
        grad.div_(dist.get_world_size())
        if owner is None:
            works.append(dist.all_reduce(grad, async_op=True))
        else:
            works.append(dist.reduce(grad, owner, async_op=True))
    for work in works:
        work.wait()
