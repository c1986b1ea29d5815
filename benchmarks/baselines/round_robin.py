"""Round robin: matrix i, largest first, belongs to rank i mod W of a replicated model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.baselines.common import ReplicatedBaseline, average


class RoundRobin(ReplicatedBaseline):
    """Owners update their matrices, and all ranks gather the new weights.

    The weights travel in their own dtype, W matrices of any shapes at a time, each in a broadcast
    from its owner: that is what an all-gather of unequal pieces is on NCCL, and gloo refuses it.
    They travel while later matrices are computed. The order is that of
    https://github.com/KellerJordan/Muon.

    ``reduce_to_owner``: gradients are reduced to the owner alone instead of all-reduced, as in the
    third of the AlgoPerf submissions for Muon. That saves traffic in backward, not in the step.
    """

    def __init__(
        self, params: Iterable[Tensor], *args: Any, reduce_to_owner: bool = False, **kwargs: Any
    ) -> None:
        largest_first = sorted(params, key=lambda p: p.shape, reverse=True)
        super().__init__(largest_first, *args, **kwargs)
        self.reduce_to_owner = reduce_to_owner

    def sync_gradients(self) -> None:
        if not self.reduce_to_owner:
            return super().sync_gradients()
        average((p.grad, i % self.world) for i, p in enumerate(self.matrices) if p.grad is not None)

    def update(self) -> None:
        works = []
        for i, p in enumerate(self.matrices):
            owner = i % self.world
            if owner == self.rank:
                self.apply(p, self.orthogonalize(self.direction(p)))
                self.sent_bytes += p.nbytes * (self.world - 1)
            works.append(dist.broadcast(p.detach(), owner, async_op=True))
        for work in works:
            work.wait()
