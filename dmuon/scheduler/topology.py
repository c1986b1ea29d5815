"""The owner slots of a mesh, and which owner gets which matrix of a shape.

A mesh of N nodes with G ranks each is a grid of slots. The results of consecutive matrices travel
at the same time, so their owners should share neither a node (its network cards) nor a column (the
g-th GPU of every node: one rail of the network): the owner order goes through the grid diagonally.
N=4, G=8, in XOR order::

    column    0   1   2   3   4   5   6   7      position w sits in
    node 0    0   9  18  27   4  13  22  31          column  w mod G
    node 1    8   1  26  19  12   5  30  23          node    (w mod N) xor (floor(w/G) mod N)
    node 2   16  25   2  11  20  29   6  15
    node 3   24  17  10   3  28  21  14   7

Given how many matrices of each shape every owner takes, `place` gives different owners to matrices
that travel at the same time, as docs/scheduler.md explains. It represents an owner by its position
in the owner order.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dmuon.types import DmuonError, grouped

MAX_RANKS = 100_000
_Matrix = tuple[int, str]  # shape and layer
_Pattern = tuple[tuple[int, int], ...]  # (shape, number), ascending: one owner's matrices

_SEEN = 24  # turns that one matrix chooses from
_PARTNERS_SEEN = 512  # matrices that one exchange chooses from
_COPY = re.compile(r" \(copy [0-9]+ of [0-9]+\)$")
_LAYER = re.compile(r"(?:[^.]*\.)*?[0-9]+(?=\.|\Z)")  # parts up to the first number


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks among which matrices are distributed, numbered 0 .. world-1 in mesh order.

    ``shape`` and ``axes`` are the mesh's sizes and axis names. ``ranks_per_node`` consecutive
    ranks are on one node, and the last node may have fewer; or ``node_of`` gives the node of every
    rank, and ``ranks_per_node`` is the size of the largest node.

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
        sizes = Counter(self.node_of) or {0: self.ranks_per_node}
        largest, given = max(sizes.values()), self.ranks_per_node
        for is_right, wrong in (
            (self.world <= MAX_RANKS, f"a mesh has at most {MAX_RANKS:,} ranks: {self.shape}"),
            (len(set(self.axes)) == len(self.axes), f"axes need different names: {self.axes}"),
            (len(self.shape) == len(self.axes), f"mesh {self.shape} needs as many axis names"),
            (given >= 1, f"ranks_per_node must be at least 1, found {given}"),
            (len(self.node_of) in (0, self.world), f"node_of needs {self.world} entries"),
            (sizes.keys() == {*range(len(sizes))}, "node_of must number the nodes from 0 on"),
            (largest == given, f"ranks_per_node is {given}, the largest node has {largest} ranks"),
        ):
            if not is_right:
                raise ValueError(wrong)

    @classmethod
    def flat(cls, world: int, *, ranks_per_node: int | None = None) -> Topology:
        """Return a one-axis mesh of ``world`` data-parallel ranks."""
        return cls((world,), ("dp",), ranks_per_node or world)

    @classmethod
    def on_nodes(
        cls,
        shape: Sequence[int],
        axes: Sequence[str],
        nodes: Sequence[int],
        device_type: str = "cpu",
    ) -> Topology:
        """Return a mesh whose rank ``i`` is on the node called ``nodes[i]``. Nodes are numbered in
        order of appearance, so equal groupings give equal topologies.

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
        """The number of ranks on the largest node."""
        return min(self.ranks_per_node, self.world)

    def node(self, rank: int) -> int:
        return self.node_of[rank] if self.node_of else rank // self.ranks_per_node

    def columns_of(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Arrange ranks so that they can share their data in two turns: inside columns of one rank
        per node, and then inside nodes. Return a single column if that gains nothing: with one
        node, one rank per node, or different numbers of ranks on the nodes.

        >>> topology = Topology.flat(8, ranks_per_node=4)
        >>> topology.columns_of((0, 2, 4, 7)), topology.columns_of((1, 2))
        (((0, 4), (2, 7)), ((1, 2),))
        """
        rows = grouped((self.node(rank), rank) for rank in ranks).values()
        if len(rows) > 1 and len({len(row) for row in rows}) == 1:
            return tuple(tuple(column) for column in zip(*rows, strict=True))
        return (tuple(ranks),)

    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node by column.

        >>> Topology.flat(5, ranks_per_node=2).slots()
        ((0, 1), (2, 3), (4,))
        """
        rows = grouped((self.node(rank), rank) for rank in range(self.world))
        return tuple(tuple(rows[node]) for node in range(self.nodes))

    def owner_order(self) -> tuple[int, ...]:
        """Return all ranks in an order whose neighbours share neither a node nor a column, as
        `diagonal_slots` promises for nodes of equal size.

        >>> Topology.flat(8, ranks_per_node=4).owner_order()
        (0, 5, 2, 7, 4, 1, 6, 3)
        """
        rows = self.slots()
        grid = diagonal_slots(len(rows), self.columns)
        return tuple(rows[node][column] for node, column in grid if column < len(rows[node]))


def holds_replicas(axis: str) -> bool:
    """Return whether HSDP replicates along a mesh axis, by its name.

    >>> [holds_replicas(axis) for axis in ("replicate", "dp_replicate", "dp_shard")]
    [True, True, False]
    """
    return "replic" in axis.lower()


def diagonal_slots(nodes: int, columns: int) -> list[tuple[int, int]]:
    """Return every ``(node, column)`` of a grid once, in owner order.

    The order is XOR (see above) if both sizes are powers of two and ``columns >= nodes``; all other
    grids use a rotation. docs/scheduler.md says what both orders promise, and why.

    >>> diagonal_slots(2, 3)
    [(0, 0), (1, 1), (0, 2), (1, 0), (0, 1), (1, 2)]
    """
    every, period = range(nodes * columns), math.lcm(nodes, columns)
    powers_of_two = all(size & (size - 1) == 0 for size in (nodes, columns))
    if powers_of_two and columns >= nodes:
        return [((w % nodes) ^ (w // columns), w % columns) for w in every]
    return [((w + w // period) % nodes, w % columns) for w in every]


def local_world_size() -> int | None:
    """Return the number of ranks per node that ``torchrun`` tells its processes, or None without
    torchrun. DmuonError if it is not a positive integer."""
    if (text := os.environ.get("LOCAL_WORLD_SIZE")) is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise DmuonError(
            f"the environment variable LOCAL_WORLD_SIZE={text!r} must be a positive integer: "
            "correct it (torchrun sets it itself), or pass PlannerOptions(ranks_per_node=...)"
        )
    return int(text)


# ---- from counts to owners ---------------------------------------------------------------


def place(
    shapes: Sequence[int],
    layers: Sequence[str],
    counts: Sequence[Mapping[int, int]],
    interchangeable: Sequence[Sequence[int]],
    topology: Topology,
) -> list[int]:
    """Return the owner of each matrix, given how many of each shape every owner takes.

    ``shapes`` and ``layers`` ("" for none) are given per matrix, in launch order; a layer's
    matrices get different owners if such owners are found. ``counts`` maps, for each rank, shape to
    number of matrices; ``interchangeable`` ranks may exchange their counts.
    """
    order = topology.owner_order()
    patterns = _share_out(counts, interchangeable, order)
    matrices = list(zip(shapes, layers, strict=True))
    # If owners have equal counts, the owner order is best; if not, avoid conflicts one by one.
    if (positions := _in_order(matrices, patterns)) is None:
        positions = _hand_out(matrices, patterns, topology)
    _separate(matrices, positions)
    return [order[position] for position in positions]


def _share_out(
    counts: Sequence[Mapping[int, int]], groups: Sequence[Sequence[int]], order: Sequence[int]
) -> list[_Pattern]:
    """Return patterns in the owner order: a group's patterns follow it, most matrices first. If
    they alternated, every second owner could be in one half of the columns."""
    shared = [tuple(sorted((shape, n) for shape, n in taken.items() if n)) for taken in counts]
    position = {rank: i for i, rank in enumerate(order)}
    for group in groups:
        patterns = sorted((shared[r] for r in group), key=lambda p: (-sum(n for _, n in p), p))
        for rank, pattern in zip(sorted(group, key=position.__getitem__), patterns, strict=True):
            shared[rank] = pattern
    return [shared[rank] for rank in order]


def _hand_out(
    matrices: Sequence[_Matrix], patterns: Sequence[_Pattern], topology: Topology
) -> list[int]:
    """Return the position of each matrix's owner; ``patterns`` are given by position."""
    turns, rows = _turns(patterns), enumerate(topology.slots())
    slots = {rank: (n, c) for n, row in rows for c, rank in enumerate(row)}
    places = [slots[rank] for rank in topology.owner_order()]
    window = topology.columns - 1  # so many matrices travel at once
    on_node, on_column = [0] * topology.nodes, [0] * topology.columns
    last_use = [-1] * len(places)
    in_layer: defaultdict[str, set[int]] = defaultdict(set)
    handed: list[int] = []

    def cost(waiting: Sequence[int], turn: int) -> tuple[bool, int, int]:
        """Return the cost of a turn. More than two matrices in a column count as two."""
        position = waiting[-1 - turn]
        node, column = places[position]
        crowd = on_node[node] + 2 * min(on_column[column], 2)
        return position in used, crowd, last_use[position]

    for now, (shape, layer) in enumerate(matrices):
        used = in_layer[layer] if layer else set()
        waiting = turns[shape]
        at = min(range(min(len(waiting), _SEEN)), key=partial(cost, waiting))
        position = waiting.pop(-1 - at)
        handed.append(position)
        used.add(position)
        last_use[position] = now
        for changed, change in ((now, 1), (now - window, -1)):
            if changed >= 0:
                node, column = places[handed[changed]]
                on_node[node] += change
                on_column[column] += change
    return handed


def _in_order(matrices: Sequence[_Matrix], patterns: Sequence[_Pattern]) -> list[int] | None:
    """Return positions that follow the owner order, or None if the patterns do not allow that."""
    left = [dict(pattern) for pattern in patterns]
    in_layer: defaultdict[str, set[int]] = defaultdict(set)
    handed: list[int] = []
    for shape, layer in matrices:
        at = handed[-1] + 1 if handed else 0
        used = in_layer[layer] if layer else set()
        near = ((at + step) % len(left) for step in range(min(_SEEN, len(left))))
        found = next((p for p in near if left[p].get(shape) and p not in used), None)
        if found is None:
            return None
        left[found][shape] -= 1
        used.add(found)
        handed.append(found)
    return handed


def _turns(patterns: Sequence[_Pattern]) -> dict[int, list[int]]:
    """Return, by shape, the positions that take its matrices, the first one last. Owners that take
    equally many do so in turn, in as many rounds, which are spread over the shape's matrices."""
    takers = grouped((entry, p) for p, pattern in enumerate(patterns) for entry in pattern)
    turns: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for (shape, rounds), alike in takers.items():
        total = rounds * len(alike)
        turns[shape] += [((i + 0.5) / total, alike[i % len(alike)]) for i in range(total)]
    return {shape: [p for _, p in sorted(found, reverse=True)] for shape, found in turns.items()}


def _separate(matrices: Sequence[_Matrix], positions: list[int]) -> None:
    """Exchange the owners of two matrices of a shape, in place, if a layer has an owner twice."""
    layers = [layer for _, layer in matrices]
    held = Counter(zip(layers, positions, strict=True))
    owners = Counter(layer for layer, _ in held)  # how many each layer has
    most = {layer: min(n, len(set(positions))) for layer, n in Counter(layers).items()}

    def give(i: int, position: int) -> None:
        layer = layers[i]
        held[layer, positions[i]] -= 1
        owners[layer] -= not held[layer, positions[i]]
        owners[layer] += not held[layer, position]
        held[layer, position] += 1
        positions[i] = position

    for same in grouped((shape, i) for i, (shape, _) in enumerate(matrices)).values():
        for at, i in enumerate(same):
            layer, mine = layers[i], positions[i]
            if not layer or held[layer, mine] < 2 or owners[layer] == most[layer]:
                continue
            # Matrices of the next layers are tried first.
            for step in range(1, min(_PARTNERS_SEEN, len(same))):
                j = same[(at + step) % len(same)]
                other, theirs = layers[j], positions[j]
                # The other layer must not lose an owner that it has once.
                loses = other and held[other, mine] and held[other, theirs] == 1
                if not held[layer, theirs] and not loses:
                    give(i, theirs)
                    give(j, mine)
                    break


def layer_of(name: str) -> str:
    """Return the layer that a parameter, matrix or copy belongs to: its name up to the first
    number.

    >>> layer_of("model.scales.3 (copy 2 of 4)"), layer_of("lm_head.weight")
    ('model.scales.3', '')
    """
    found = _LAYER.match(_COPY.sub("", name).partition("#")[0])
    return found[0] if found else ""


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sort key, different for each name, that puts "layers.2" before "layers.10".

    >>> sorted(["layers.10.up", "layers.2.up", "layers.2.down"], key=natural_key)
    ['layers.2.down', 'layers.2.up', 'layers.10.up']
    """
    # Text and numbers alternate, beginning with text, so that like is compared with like.
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name
