"""Co-owners in one process: Newton-Schulz on slices of matrices, as several ranks run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon.kernels.choice import fixed_choice, ops_of, segments_of
from dmuon.kernels.newton_schulz import prepared_slice, resolve_coefficients
from dmuon.kernels.ops import Peers, SliceOps


@dataclass
class Work:
    wait: Callable[[], None]


class Together:
    """Co-owners in one process: every exchange happens when the last one has come to it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.log: list[list[str]] = [[] for _ in range(count)]

    def peers(self, index: int) -> Peers:
        def exchange(to: Tensor, source: Tensor, tag: str) -> Work:
            number = len(self.log[index])
            self.log[index].append(tag)
            self.sent[number, index] = source.clone()

            def receive() -> None:
                others = [j for j in range(self.count) if j != index]
                for row, j in zip(to, others, strict=True):
                    row.copy_(self.sent[number, j][index - (index > j)])

            return Work(receive)

        return Peers(index, self.count, exchange)


def by_co_owners(
    x: Tensor, count: int, dtype: torch.dtype, split: bool, backend: str = "auto"
) -> tuple[Tensor, list[list[str]], list[SliceOps]]:
    """Newton-Schulz on ``[b, m, n]``, the exchanges of each co-owner, and their products."""
    b, m, n = x.shape
    device = x.device
    choice = fixed_choice(m, n, dtype, device, 5, "gram", backend)
    triples = resolve_coefficients("polar_express", 5)
    together, slices = Together(count), []
    ops: list[SliceOps] = []
    norms = x.to(dtype).double().norm(dim=(1, 2)).to(torch.promote_types(dtype, torch.float32))
    for j in range(count):
        mine = x[:, :, n * j // count : n * (j + 1) // count].to(dtype).contiguous()

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        inner = ops_of(choice, device, m)
        ops.append(SliceOps(inner, together.peers(j), split, b, m, dtype, take))
        segments = segments_of(choice, 5)
        slices.append(prepared_slice(mine, triples, segments, ops[-1], take)(norms))
    found: list[Tensor | None] = [None] * count
    while any(result is None for result in found):
        found = [next(s) if r is None else r for s, r in zip(slices, found, strict=True)]
    return torch.cat(found, 2), together.log, ops  # type: ignore[arg-type]
