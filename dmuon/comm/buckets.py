"""What travels together: the one place that cuts work into buckets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from dmuon.comm.routes import Unit

__all__ = ["cut_buckets"]


def cut_buckets(
    units: Sequence[Unit], wire: Sequence[int], bucket_bytes: int, min_buckets: int, item: int
) -> tuple[tuple[int, ...], ...]:
    """Units that travel together, in the order of the buckets; the same on every rank.

    ``wire`` are the indices of the units that travel at all. Every owner has about the same share
    of its time in each bucket, so that none waits for another; the first and the last bucket are
    half as large, for nothing hides the gather of the first and the scatter of the last.
    """
    by_owner: dict[int, list[int]] = defaultdict(list)
    for u in wire:
        by_owner[units[u].owner].append(u)
    if not by_owner:
        return ()
    fullest = max(sum(units[u].numel for u in mine) * item for mine in by_owner.values())
    most = max(len(mine) for mine in by_owner.values())
    count = min(max(min_buckets, math.ceil(fullest / bucket_bytes)), most)
    edges = _edges(count)
    buckets: list[list[int]] = [[] for _ in range(count)]
    for mine in by_owner.values():
        weights = [units[u].ms for u in mine]
        if not sum(weights) > 0:
            weights = [float(units[u].numel) for u in mine]
        total, done = sum(weights), 0.0
        for u, weight in zip(mine, weights, strict=True):
            middle = (done + weight / 2) / total
            done += weight
            buckets[min(sum(edge <= middle for edge in edges), count - 1)].append(u)
    return tuple(tuple(sorted(bucket)) for bucket in buckets if bucket)


def _edges(count: int) -> list[float]:
    """Where, as parts of an owner's time, one bucket ends and the next begins.

    >>> _edges(3)
    [0.25, 0.75]
    """
    weights = [2.0] * count
    if count > 2:
        weights[0] = weights[-1] = 1.0
    return [edge / sum(weights) for edge in accumulate(weights[:-1])]
