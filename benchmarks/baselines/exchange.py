"""Matrices whose rows are spread over the ranks, brought to owners and back, W at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.baselines.common import Baseline, local, shard_rows


class Exchange:
    """Up to W matrices ``[m_j, n_j]``, the j-th of them owned by rank j.

    ::

        every rank: rows of 0 | rows of 1 | ...  --all-to-all-->  rank j: all rows of matrix j

    `depart` -> `arrive` (the owner's matrix, None on ranks without one) -> `send_back` -> `finish`
    """

    def __init__(self, optimizer: Baseline, matrices: Sequence[Tensor]) -> None:
        assert all(isinstance(p, DTensor) for p in matrices)
        assert len(matrices) <= optimizer.world
        self.optimizer = optimizer
        self.matrices = matrices
        rank, world = optimizer.rank, optimizer.world
        self._here = [local(p).numel() for p in matrices] + [0] * (world - len(matrices))
        self._mine = matrices[rank].shape if rank < len(matrices) else None
        columns = 0 if self._mine is None else self._mine[1]
        rows = [0] * world if self._mine is None else shard_rows(self._mine[0], world)
        self._from = [n * columns for n in rows]

    def depart(self) -> None:
        """Advance the momenta and send the rows held here to their owners."""
        pieces = [self.optimizer.direction(p).flatten() for p in self.matrices]
        self._launch(torch.cat(pieces), self._here, self._from)

    def arrive(self) -> Tensor | None:
        self._work.wait()
        return None if self._mine is None else self._received.view(self._mine)

    def send_back(self, result: Tensor | None) -> None:
        flat = self._received if result is None else result.contiguous().flatten()
        self._launch(flat, self._from, self._here)

    def finish(self) -> None:
        """Apply the rows that came back."""
        self._work.wait()
        for p, piece in zip(self.matrices, self._received.split(self._here)):
            self.optimizer.apply(p, piece.view_as(local(p)))

    def _launch(self, send: Tensor, counts: list[int], received: list[int]) -> None:
        rank = self.optimizer.rank
        self.optimizer.sent_bytes += (send.numel() - counts[rank]) * send.itemsize
        self._sent = send  # alive until it has left
        self._received = send.new_empty(sum(received))
        self._work = dist.all_to_all_single(self._received, send, received, counts, async_op=True)


def run(optimizer: Baseline, chunks: Sequence[Sequence[Tensor]]) -> None:
    """Update all chunks; the next one arrives and the last one returns while one is computed."""
    exchanges = [Exchange(optimizer, chunk) for chunk in chunks]
    if exchanges:
        exchanges[0].depart()
    for i, exchange in enumerate(exchanges):
        if i + 1 < len(exchanges):
            exchanges[i + 1].depart()
        matrix = exchange.arrive()
        exchange.send_back(None if matrix is None else optimizer.orthogonalize(matrix))
    for exchange in exchanges:
        exchange.finish()


def chunked(matrices: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [matrices[i : i + size] for i in range(0, len(matrices), size)]
