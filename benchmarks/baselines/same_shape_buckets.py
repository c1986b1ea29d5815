"""Same-shape buckets: W matrices of one shape at a time, one a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.baselines.common import Baseline, ReplicatedBaseline
from benchmarks.baselines.exchange import chunked, run


def buckets(matrices: Sequence[Tensor], world: int) -> list[Sequence[Tensor]]:
    """Groups of up to ``world`` matrices of one shape. In a short one, ranks have nothing to do."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for p in matrices:
        shapes.setdefault(p.shape, []).append(p)
    return [chunk for group in shapes.values() for chunk in chunked(group, world)]


class SameShapeBuckets(Baseline):
    """On FSDP2, as in https://github.com/microsoft/dion: two all-to-alls a bucket."""

    def update(self) -> None:
        run(self, buckets(self.matrices, self.world))


class SameShapeAllGather(ReplicatedBaseline):
    """On a replicated model, the bucketed variant of the AlgoPerf submissions for Muon.

    New weights of a bucket, padded to W, are gathered while the next bucket is computed.
    """

    def update(self) -> None:
        flights = []
        for bucket in buckets(self.matrices, self.world):
            everyone = [p.detach() for p in bucket]
            padding = [torch.empty_like(everyone[0]) for _ in range(self.world - len(bucket))]
            mine = (everyone + padding)[self.rank]
            if self.rank < len(bucket):
                p = bucket[self.rank]
                self.apply(p, self.orthogonalize(self.direction(p)))
            self.sent_bytes += mine.nbytes * (self.world - 1)
            flights.append(dist.all_gather(everyone + padding, mine, async_op=True))
        for flight in flights:
            flight.wait()
