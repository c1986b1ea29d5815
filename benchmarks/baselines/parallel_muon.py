"""Parallel Muon: an owner a matrix, in chunks of W matrices whose costs are alike."""

from __future__ import annotations

from torch import Tensor

from benchmarks.baselines.common import Baseline
from benchmarks.baselines.exchange import chunked, run


def flops(p: Tensor) -> int:
    """Multiplications of one Newton-Schulz step."""
    m, n = sorted(p.shape)
    return m * m * (2 * n + m)


class ParallelMuon(Baseline):
    """Gather W matrices to W owners, orthogonalize, scatter, with the next chunk on its way.

    After https://huggingface.co/Motif-Technologies/optimizer: chunks are cut from the
    matrices in the order of their cost, so that a chunk's owners take equally long. The W gathers
    of a chunk start together and are one all-to-all, and so are its scatters.
    """

    def update(self) -> None:
        run(self, chunked(sorted(self.matrices, key=flops, reverse=True), self.world))
