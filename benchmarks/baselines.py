"""What dmuon is measured against: the known ways to run Muon on W ranks, each in its smallest form.

| class | model | each matrix is orthogonalized | what travels in `step` |
|---|---|---|---|
| `GatherThenCompute` | FSDP2 | on every rank | all-gather of every momentum |
| `SameShapeBuckets` | FSDP2 | on one rank | two all-to-alls, per W matrices of one shape |
| `ParallelMuon` | FSDP2 | on one rank | the same, per W matrices in the order of their cost |
| `Redundant` | replicated | on every rank | nothing |
| `RoundRobin` | replicated | on one rank | every new weight, from its owner to all |
| `SameShapeAllGather` | replicated | on one rank | an all-gather of weights, per W of one shape |

All of them are Muon with the meanings of `torch.optim.Muon` and ``match_rms_adamw``, for 2-D
parameters with a gradient, and all of them send what goes into and comes out of Newton-Schulz in
its dtype. Those on replicated weights also read parameters of more dims as (out, rest).
`sent_bytes` is what this rank sent to others in the last `step`, by formula: pieces that a rank
keeps for itself do not count, and a broadcast counts once for each receiver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.timing import over_ranks
from dmuon import devices
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.types import Triple

QUINTIC = resolve_coefficients("quintic", 5)


def standard_form(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The iteration of `torch.optim.Muon` on a normalized matrix or a stack, operation by operation
    (https://kellerjordan.github.io/posts/muon/)."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in triples:
        gram = x @ x.mT
        update = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, update, x, beta=a)
    return x.mT if is_tall else x


def zeropower(x: Tensor, dtype: torch.dtype, triples: Sequence[Triple] = QUINTIC) -> Tensor:
    """Newton-Schulz of torch.optim.Muon in ``dtype``."""
    y = x.to(dtype)
    norms = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    return standard_form(y / norms.clamp(min=1e-7), triples)


def ns_dtype() -> torch.dtype:
    """The dtype of Newton-Schulz on CPUs: float32 if any rank finds bfloat16 slow. Ranks time
    products, and on a busy machine they may differ."""
    size = torch.tensor(devices.of("cpu").ns_dtype().itemsize)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    return torch.bfloat16 if size == 2 else torch.float32


def floor(matrices: Iterable[Tensor], dtype: torch.dtype, cores: int) -> Callable[[], tuple[float]]:
    """A turn: milliseconds of one pass over random matrices of these shapes on rank 0 while the
    others wait, divided by the cores in use."""
    generator = torch.Generator().manual_seed(0)
    shapes = [matrix.shape for matrix in matrices] if dist.get_rank() == 0 else []
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def one_pass() -> None:
        for x in inputs:
            zeropower(x, dtype)

    return lambda: (over_ranks(one_pass)[0] / min(dist.get_world_size(), cores),)


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


class Baseline(Optimizer):
    """Muon on W ranks; a subclass says in `update` what is computed where.

    The arguments are those of `torch.optim.Muon`; ``ns_dtype`` is Newton-Schulz's.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.matrices = list(params)
        self.weight_decay = weight_decay
        self.momentum, self.nesterov, self.ns_dtype = momentum, nesterov, ns_dtype
        super().__init__(self.matrices, {"lr": lr})
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.sent_bytes = 0
        self.update()

    def update(self) -> None:
        """Update every matrix; every rank calls it."""
        raise NotImplementedError

    def sync_gradients(self) -> None:
        """All-reduce ``p.grad`` to its mean: what DistributedDataParallel does in backward."""
        average((p.grad, None) for p in self.matrices if p.grad is not None)

    def direction(self, p: Tensor) -> Tensor:
        """Advance the momentum of what this rank holds of ``p``; what goes into Newton-Schulz."""
        assert p.grad is not None
        grad, state = local(p.grad), self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - self.momentum)
        return (grad.lerp(buffer, self.momentum) if self.nesterov else buffer).to(self.ns_dtype)

    def orthogonalize(self, x: Tensor) -> Tensor:
        return zeropower(x.flatten(1), self.ns_dtype).view(x.shape)

    def apply(self, p: Tensor, update: Tensor) -> None:
        """Decay and move what this rank holds of ``p``; ``update`` has the same rows."""
        weight, lr = local(p), self.param_groups[0]["lr"]
        larger = max(p.shape[0], math.prod(p.shape[1:]))
        weight.mul_(1 - lr * self.weight_decay)
        weight.add_(update, alpha=-lr * 0.2 * larger**0.5)  # match_rms_adamw


# ---- on FSDP2 ------------------------------------------------------------------------------


class GatherThenCompute(Baseline):
    """Every rank gathers every matrix, orthogonalizes all of it, and keeps its own rows; with HSDP
    within its replica, the last axis of the mesh.

    The plain way to run Muon on DTensors, and that of https://arxiv.org/abs/2502.16982: W times the
    work, W - 1 of W rows of each result thrown away.
    """

    def update(self) -> None:
        for p in self.matrices:
            assert isinstance(p, DTensor)
            mine = self.direction(p)
            shards, place = p.device_mesh.size(-1), p.device_mesh.get_local_rank(-1)
            self.sent_bytes += mine.nbytes * (shards - 1)
            like: Any = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            spread = DTensor.from_local(mine, p.device_mesh, p.placements, **like)
            result = self.orthogonalize(spread.full_tensor())
            self.apply(p, result.split(shard_rows(p.shape[0], shards))[place])


def exchanged(optimizer: Baseline, matrices: Sequence[Tensor]) -> Iterator[None]:
    """Update up to W matrices ``[m_j, n_j]`` whose rows are spread over the ranks; rank j owns the
    j-th. Pauses twice, while the two all-to-alls travel::

        every rank: rows of 0 | rows of 1 | ...  -->  rank j: all rows of matrix j  -->  rows of ...
    """
    rank, world = optimizer.rank, optimizer.world
    here = [local(p).numel() for p in matrices] + [0] * (world - len(matrices))
    mine = matrices[rank].shape if rank < len(matrices) else torch.Size((0, 0))
    there = [rows * mine[1] for rows in shard_rows(mine[0], world)]

    def launch(send: Tensor, counts: list[int], received: list[int]) -> tuple[Tensor, Any]:
        optimizer.sent_bytes += (send.numel() - counts[rank]) * send.itemsize
        came = send.new_empty(sum(received))
        return came, dist.all_to_all_single(came, send, received, counts, async_op=True)

    rows = torch.cat([optimizer.direction(p).flatten() for p in matrices])
    whole, work = launch(rows, here, there)
    yield
    work.wait()
    if whole.numel():
        whole = optimizer.orthogonalize(whole.view(mine)).flatten()
    rows, work = launch(whole, there, here)
    yield
    work.wait()
    for p, piece in zip(matrices, rows.split(here)):
        optimizer.apply(p, piece.view_as(local(p)))


def exchange(optimizer: Baseline, chunks: Sequence[Sequence[Tensor]]) -> None:
    """Update all chunks; the next one arrives and the last one returns while one is computed."""
    exchanges = [exchanged(optimizer, chunk) for chunk in chunks]
    for one, following in pairwise([iter(()), *exchanges, iter(())]):
        next(following, None)
        next(one, None)
    for one in exchanges:
        next(one, None)


def chunked(matrices: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [matrices[i : i + size] for i in range(0, len(matrices), size)]


def buckets(matrices: Sequence[Tensor], world: int) -> list[Sequence[Tensor]]:
    """Up to ``world`` matrices of one shape each. In a short one, some ranks have nothing to do."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for p in matrices:
        shapes.setdefault(p.shape, []).append(p)
    return [chunk for alike in shapes.values() for chunk in chunked(alike, world)]


class SameShapeBuckets(Baseline):
    """As in https://github.com/microsoft/dion: two all-to-alls a bucket, one matrix a rank."""

    def update(self) -> None:
        exchange(self, buckets(self.matrices, self.world))


class ParallelMuon(Baseline):
    """Gather W matrices to W owners, orthogonalize, scatter, with the next chunk on its way.

    After https://huggingface.co/Motif-Technologies/optimizer: chunks are cut from the
    matrices in the order of their cost, so that a chunk's owners take equally long. The W gathers
    of a chunk start together and are one all-to-all, and so are its scatters.
    """

    def update(self) -> None:
        def flops(p: Tensor) -> int:
            m, n = sorted(p.shape)
            return m * m * (2 * n + m)

        exchange(self, chunked(sorted(self.matrices, key=flops, reverse=True), self.world))


# ---- on replicated weights -----------------------------------------------------------------


class Redundant(Baseline):
    """torch.optim.Muon under DistributedDataParallel: no traffic in the step, W times the work."""

    def update(self) -> None:
        for p in self.matrices:
            self.apply(p, self.orthogonalize(self.direction(p)))


class RoundRobin(Baseline):
    """Matrix i, largest first, belongs to rank i mod W; all ranks receive the new weights.

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


class SameShapeAllGather(Baseline):
    """The bucketed variant of the AlgoPerf submissions for Muon.

    New weights of a bucket, padded to W, are gathered while the next bucket is computed.
    """

    def update(self) -> None:
        works = []
        for bucket in buckets(self.matrices, self.world):
            everyone = [p.detach() for p in bucket]
            everyone += [torch.empty_like(everyone[0]) for _ in range(self.world - len(bucket))]
            mine = everyone[self.rank]
            if self.rank < len(bucket):
                p = bucket[self.rank]
                self.apply(p, self.orthogonalize(self.direction(p)))
            self.sent_bytes += mine.nbytes * (self.world - 1)
            works.append(dist.all_gather(everyone, mine, async_op=True))
        for work in works:
            work.wait()
