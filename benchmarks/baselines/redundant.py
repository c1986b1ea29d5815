"""Redundant Muon: a replicated model, every rank does all the work."""

from __future__ import annotations

from benchmarks.baselines.common import ReplicatedBaseline


class Redundant(ReplicatedBaseline):
    """torch.optim.Muon under DistributedDataParallel: no traffic in the step, W times the work."""

    def update(self) -> None:
        for p in self.matrices:
            self.apply(p, self.orthogonalize(self.direction(p)))
