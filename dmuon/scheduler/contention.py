"""How the owners of matrices that travel together share nodes and columns of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.scheduler.topology import Topology

__all__ = ["Contention", "contention", "row_major"]


@dataclass(frozen=True, slots=True)
class Contention:
    """How many of ``window`` consecutive matrices have owners on one node, or in one column.

    Of each window counts the most crowded node or column; ``max`` and ``mean`` are over all
    windows. Fewer is better; 1 means that no two ever meet.
    """

    window: int
    node_max: int
    node_mean: float
    column_max: int
    column_mean: float


def contention(
    owners_in_launch_order: Sequence[int], topology: Topology, window: int | None = None
) -> Contention:
    """How the owners of consecutive matrices share nodes and columns.

    ``window`` is the number of matrices in flight, by default one for each column. With fewer
    matrices than that, all of them are the one window.
    """
    owners = owners_in_launch_order
    window = min(window or topology.columns, len(owners))
    node, column = [0] * topology.world, [0] * topology.world
    for n, row in enumerate(topology.slots()):
        for c, rank in enumerate(row):
            node[rank], column[rank] = n, c
    nodes = _crowds([node[owner] for owner in owners], window)
    columns = _crowds([column[owner] for owner in owners], window)
    return Contention(
        window,
        max(nodes, default=0),
        sum(nodes) / max(len(nodes), 1),
        max(columns, default=0),
        sum(columns) / max(len(columns), 1),
    )


def _crowds(places: Sequence[int], window: int) -> list[int]:
    """For each window of consecutive entries, how often its most frequent value occurs."""
    count: Counter[int] = Counter()  # of each value in the window
    having: Counter[int] = Counter()  # how many values occur this often
    most, crowds = 0, []
    for end, place in enumerate(places):
        if end >= window:
            gone = places[end - window]
            having[count[gone]] -= 1
            count[gone] -= 1
            having[count[gone]] += 1
            most -= not having[most]  # the value that left the top is just below it now
        having[count[place]] -= 1
        count[place] += 1
        having[count[place]] += 1
        most = max(most, count[place])
        if end >= window - 1:
            crowds.append(most)
    return crowds


def row_major(matrices: int, world: int) -> list[int]:
    """Consecutive matrices to consecutive ranks: what the owner order is compared with.

    >>> row_major(5, 3)
    [0, 1, 2, 0, 1]
    """
    return [i % world for i in range(matrices)]
