"""The owner slots of a mesh, as pure data, and the order in which owners are handed out.

A mesh of N nodes with G ranks each is a grid of slots: a row is a node, a column is the position
on its node. The results of consecutive matrices travel at the same time, so their owners should
share neither a node (its network cards) nor a column (the g-th GPU of every node: one rail of
the network). The owner order therefore goes through the grid diagonally. N=4, G=8, in XOR order::

    column    0   1   2   3   4   5   6   7      position w sits in
    node 0    0   9  18  27   4  13  22  31          column  w mod G
    node 1    8   1  26  19  12   5  30  23          node    (w mod N) xor (floor(w/G) mod N)
    node 2   16  25   2  11  20  29   6  15
    node 3   24  17  10   3  28  21  14   7

Positions 0 to 7 lie in 8 columns and 4 nodes; row by row they would all lie on node 0.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.types import DmuonError

MAX_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks among which matrices are shared out, numbered 0 .. world-1 in mesh order.

    ``shape`` and ``axes`` are the mesh's sizes and axis names. ``ranks_per_node`` consecutive
    ranks sit on one node, the last node may have fewer; or ``node_of`` gives the node of every
    rank, and ``ranks_per_node`` is the size of the largest node.

    >>> Topology.flat(4).world
    4
    >>> Topology(shape=(2, 4), axes=("replicate", "shard"), ranks_per_node=4).nodes
    2
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    ranks_per_node: int
    device_type: str = "cpu"
    node_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= 64 or min(self.shape) < 1:
            raise ValueError(f"a mesh has 1 to 64 sizes >= 1, found {self.shape[:8]}")
        if self.world > MAX_RANKS:
            raise ValueError(f"a mesh has at most {MAX_RANKS:,} ranks, found sizes {self.shape}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"mesh axes must have different names, found {self.axes}")
        if len(self.shape) != len(self.axes):
            raise ValueError(f"mesh {self.shape} needs {len(self.shape)} axis names: {self.axes}")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, found {self.ranks_per_node}")
        if not self.node_of:
            return
        if len(self.node_of) != self.world:
            raise ValueError(f"node_of has {len(self.node_of)} entries for {self.world} ranks")
        sizes = Counter(self.node_of)
        if sizes.keys() != set(range(len(sizes))):
            raise ValueError(f"node_of must number the nodes from 0 on, found {sorted(sizes)[:8]}")
        if (largest := max(sizes.values())) != self.ranks_per_node:
            found = f"ranks_per_node is {self.ranks_per_node}"
            raise ValueError(f"{found} but the largest node of node_of has {largest} ranks")

    @classmethod
    def flat(
        cls, world: int, *, ranks_per_node: int | None = None, device_type: str = "cpu"
    ) -> Topology:
        """A one-axis mesh of ``world`` data-parallel ranks."""
        return cls((world,), ("dp",), ranks_per_node or world, device_type)

    @classmethod
    def on_nodes(
        cls,
        shape: Sequence[int],
        axes: Sequence[str],
        nodes: Sequence[int],
        device_type: str = "cpu",
    ) -> Topology:
        """A mesh of which rank ``i`` sits on the node called ``nodes[i]``. Nodes are numbered as
        they appear, so equal groupings give equal topologies.

        >>> Topology.on_nodes((4,), ("dp",), [7, 3, 7, 3]).node_of
        (0, 1, 0, 1)
        """
        if len(nodes) != math.prod(shape):
            raise ValueError(f"{len(nodes)} ranks do not fill a mesh of shape {tuple(shape)}")
        number: dict[int, int] = {}
        node_of = tuple(number.setdefault(node, len(number)) for node in nodes)
        largest = max(Counter(node_of).values())
        if node_of == tuple(rank // largest for rank in range(len(node_of))):
            node_of = ()
        return cls(tuple(shape), tuple(axes), largest, device_type, node_of)

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def nodes(self) -> int:
        return max(self.node_of) + 1 if self.node_of else -(-self.world // self.ranks_per_node)

    @property
    def columns(self) -> int:
        """Ranks on the largest node."""
        return min(self.ranks_per_node, self.world)

    def node(self, rank: int) -> int:
        return self.node_of[rank] if self.node_of else rank // self.ranks_per_node

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node by column.

        >>> Topology.flat(5, ranks_per_node=2).slots()
        ((0, 1), (2, 3), (4,))
        """
        rows: list[list[int]] = [[] for _ in range(self.nodes)]
        for rank in range(self.world):
            rows[self.node(rank)].append(rank)
        return tuple(map(tuple, rows))

    def owner_order(self) -> tuple[int, ...]:
        """All ranks, so that consecutive ones share neither a node nor a column, as
        `diagonal_slots` promises for nodes of equal size.

        >>> Topology.flat(8, ranks_per_node=4).owner_order()
        (0, 5, 2, 7, 4, 1, 6, 3)
        """
        rows = self.slots()
        grid = diagonal_slots(len(rows), self.columns)
        return tuple(rows[node][column] for node, column in grid if column < len(rows[node]))


def diagonal_slots(nodes: int, columns: int) -> list[tuple[int, int]]:
    """Every ``(node, column)`` of a grid once, in owner order.

    With N nodes and G columns, both powers of two and ``G >= N``, position w is in XOR order, for
    which see above; all other grids use a rotation::

        column = w mod G        node = (w + floor(w/L)) mod N        L = lcm(N, G)

    Of any m consecutive positions, also from the last on to the first, at most ``ceil(m/G)`` share
    a column and at most ``ceil(m/N) + 1`` a node (row by row: ``min(m, G)``); docs/placement.md
    says why.

    >>> diagonal_slots(2, 3)
    [(0, 0), (1, 1), (0, 2), (1, 0), (0, 1), (1, 2)]
    """
    powers_of_two = all(size & (size - 1) == 0 for size in (nodes, columns))
    if powers_of_two and columns >= nodes:
        return [
            ((w % nodes) ^ (w // columns), w % columns)  # the row number is less than N already
            for w in range(nodes * columns)
        ]
    period = math.lcm(nodes, columns)
    return [((w + w // period) % nodes, w % columns) for w in range(nodes * columns)]


def local_world_size() -> int | None:
    """The number of ranks per node that ``torchrun`` tells its processes; None without torchrun.

    Raises:
        DmuonError: LOCAL_WORLD_SIZE is no positive integer.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise DmuonError(
            f"the environment variable LOCAL_WORLD_SIZE={text!r} must be a positive integer: "
            "correct it (torchrun sets it itself), or pass PlannerOptions(ranks_per_node=...)"
        )
    return int(text)
