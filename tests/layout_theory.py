"""What each layout sends for its matrices in a step: bytes received by a rank, mean over all ranks.

Notation: W ranks are R replicas of S shards of T tensor-parallel ranks, ``W = R S T``; P is the
bytes of all matrices together, in the dtype that travels. No formula depends on who owns what, for
each is a sum over matrices and a mean over ranks; `sharded` and `fsdp` suppose even shards.

Three facts give all of them. A broadcast, or a reduce, of B bytes among n ranks is received n - 1
times whatever tree or ring carries it out: ``B (n-1)/n`` a rank. An all-reduce is a reduce-scatter
and an all-gather: ``2 B (n-1)/n``. What one rank sends, another receives, so means over all ranks
of the one and of the other are equal.

The keys of the results are the tags under which dmuon's transports record the same traffic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrices:
    """Bytes of all matrices together: as they are ``kept`` by their owners, as they are ``used`` in
    forward and backward, as ``gradients`` that are reduced, as ``updates`` from Newton-Schulz."""

    kept: float
    used: float
    gradients: float
    updates: float

    @classmethod
    def of(
        cls, numel: int, kept: int = 4, *, used: int = 0, gradients: int = 0, updates: int = 0
    ) -> Matrices:
        """``numel`` elements in all, and the bytes of one; 0 means as many as ``kept``.

        >>> Matrices.of(10, updates=2)
        Matrices(kept=40, used=40, gradients=40, updates=20)
        """
        sizes = (kept, used or kept, gradients or kept, updates or kept)
        return cls(*(numel * size for size in sizes))


def one_root(nbytes: float, ranks: int) -> float:
    """A broadcast from one of ``ranks``, or a reduce to one: ``B (n-1)/n``.

    >>> one_root(400, 4)
    300.0
    """
    return nbytes * (ranks - 1) / ranks


def all_reduce(nbytes: float, ranks: int) -> float:
    """``2 B (n-1)/n``."""
    return 2 * one_root(nbytes, ranks)


def received(op: str, nbytes: float, ranks: int) -> float:
    """The mean over ``ranks`` for one collective of `dmuon.comm.transport.Transport`.

    ``nbytes`` is the size of the tensor, or of all parts; for an all-to-all what this rank sends
    to, or receives from, others: the means over ranks of the two are equal.

    Raises:
        ValueError: ``op`` is no collective of a transport.
    """
    if op in ("broadcast", "reduce", "all_gather", "reduce_scatter"):
        return one_root(nbytes, ranks)
    if op == "all_reduce":
        return all_reduce(nbytes, ranks)
    if op == "all_to_all":
        return nbytes
    raise ValueError(
        f"op is {op!r}; expected 'broadcast', 'reduce', 'all_gather', 'reduce_scatter', "
        "'all_reduce' or 'all_to_all'"
    )


def replicated(matrices: Matrices, ranks: int) -> dict[str, float]:
    """Each gradient is reduced to its owner, each update broadcast by it: ``2 P (W-1)/W``.

    As much as the all-reduce that `DistributedDataParallel` does, less where updates travel in a
    narrower dtype than gradients.
    """
    return {
        "gradients": one_root(matrices.gradients, ranks),
        "updates": one_root(matrices.updates, ranks),
    }


def sharded(matrices: Matrices, shards: int, replicas: int = 1) -> dict[str, float]:
    """dmuon's own part, in the dtype of Newton-Schulz: ``P/W (2 (S-1)/S + R-1)``.

    The owner has 1/S of a matrix already. It lacks ``P (S-1)/S``, which comes from the ranks of its
    own replica and goes back there; then each element goes once to every other replica. All of
    that is divided by ``W = R S`` ranks. What FSDP2 moves besides: `fsdp`.
    """
    ranks = shards * replicas
    lacking = one_root(matrices.updates, shards) / ranks
    return {
        "gather": lacking,
        "scatter": lacking,
        "replicate": matrices.updates * (replicas - 1) / ranks,
    }


def fsdp(
    matrices: Matrices, shards: int, replicas: int = 1, *, freed: bool = True
) -> dict[str, float]:
    """What FSDP2 itself moves for parameters that it shards, whatever the optimizer.

    All-gather in forward, again in backward if ``freed`` (its ``reshard_after_forward``), and
    reduce-scatter: each rank receives, or adds up, what it lacks, ``P (S-1)/S``. With replicas
    each shard of a gradient, ``P/S``, is all-reduced over R ranks.
    """
    return {
        "forward": one_root(matrices.used, shards),
        "backward": one_root(matrices.used, shards) if freed else 0.0,
        "gradients": one_root(matrices.gradients, shards),
        "gradients across replicas": all_reduce(matrices.gradients / shards, replicas),
    }


def dedicated(
    matrices: Matrices,
    shards: int,
    replicas: int = 1,
    tensors: int = 1,
    *,
    freed: bool = True,
    cut: bool = True,
) -> dict[str, float]:
    """Flat: ``3 P (W-1)/W`` freed, ``2 P (W-1)/W`` kept; ``cut``: tensor parallelism slices them.

    A rank deals with H of the P bytes: its slices, ``H = P/T``, or all of what is not cut. Weights
    are broadcast among the S ranks of a replica, in forward and, if ``freed``, again in backward,
    and gradients reduced in the same way: ``H (S-1)/S`` each. A matrix is stored at one of S shard
    coordinates, by R ranks: there the replicas' gradients are reduced to the owner, and after the
    step its weights are broadcast to the R - 1 holders. Summed over coordinates that is H, of which
    each rank sees 1/S on average: ``(H/S) (R-1)/R`` each. So, without tensor parallelism::

        3 P (S-1)/S + 2 (P/S) (R-1)/R      freed;  2 P (S-1)/S + ... kept

    With it, the T ranks at the owner's data coordinates meet: T - 1 of them send their slice of the
    gradient (not if it is not cut: the owner's own is whole), and get their part of the update:
    ``H (T-1)`` in all, ``H (T-1)/W`` a rank, for each of the two.
    """
    ranks = replicas * shards * tensors
    share = 1 / tensors if cut else 1.0
    once = one_root(share * matrices.used, shards)
    met = share * (tensors - 1) / ranks
    return {
        "forward": once,
        "backward": once if freed else 0.0,
        "gradients": one_root(share * matrices.gradients, shards),
        "gradients across replicas": one_root(share * matrices.gradients / shards, replicas),
        "publish": one_root(share * matrices.kept / shards, replicas),
        "slices": matrices.gradients * met if cut else 0.0,
        "updates": matrices.updates * met,
    }
