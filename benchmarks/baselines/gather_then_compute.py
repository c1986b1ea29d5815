"""Gather-then-compute: Muon on FSDP2 without owners."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from benchmarks.baselines.common import Baseline, shard_rows


class GatherThenCompute(Baseline):
    """Every rank gathers every matrix, orthogonalizes all of it, and keeps its own rows.

    The plain way to run Muon on DTensors, and that of https://arxiv.org/abs/2502.16982: W times the
    work, W - 1 of W rows of each result thrown away.
    """

    def update(self) -> None:
        for p in self.matrices:
            assert isinstance(p, DTensor)
            mine = self.direction(p)
            self.sent_bytes += mine.nbytes * (self.world - 1)
            spread = DTensor.from_local(
                mine,
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
            result = self.orthogonalize(spread.full_tensor())
            self.apply(p, result.split(shard_rows(p.shape[0], self.world))[self.rank])
