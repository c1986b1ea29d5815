"""Which owner gets which matrix of a shape, once it is decided how many each owner takes.

The counts leave freedom: matrices of one shape are alike, and so are many owners. It is used to
give different owners to matrices that travel at the same time::

    counts       how many of each shape every owner takes          (from the solver)
    share out    alike owners exchange their counts: equal ones lie together in the owner order
    hand out     matrices in launch order: in the owner order, or each to an owner whose turn it is
    separate     two matrices of a shape change places where a layer has an owner twice
    choice       the better of the two, by repeated owners in layers, then by `contention`

A stretch of the owner order touches all nodes and columns evenly (see `diagonal_slots`), so owners
that take the same fill one stretch. Handing out, an owner is its position in the owner order, a
shape's owners take turns, and among the next few the one that meets the fewest matrices on their
way takes the matrix.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dmuon.scheduler.topology import Topology

_Matrix = tuple[int, str]  # shape and layer
_Pattern = tuple[tuple[int, int], ...]  # (shape, how many), ascending: what one owner takes

_SEEN = 24  # turns that one matrix chooses from
_PARTNERS_SEEN = 512  # matrices that one exchange chooses from
_COPY = re.compile(r" \(copy [0-9]+ of [0-9]+\)$")
_LAYER = re.compile(r"(?:[^.]*\.)*?[0-9]+(?=\.|\Z)")  # parts up to the first number


def place(
    shapes: Sequence[int],
    layers: Sequence[str],
    counts: Sequence[Mapping[int, int]],
    interchangeable: Sequence[Sequence[int]],
    topology: Topology,
) -> list[int]:
    """The owner of each matrix, given how many of each shape every owner takes.

    It does not depend on how ``counts`` are arranged inside a group of ``interchangeable`` ranks.

    Args:
        shapes: the shape of each matrix, matrices in the order in which they are launched.
        layers: the layer of each matrix, "" for none. That a layer's matrices have different
            owners is a goal, met best where they follow each other, not a promise.
        counts: for each rank, shape -> how many of that shape it takes.
        interchangeable: groups of ranks that may exchange their counts.
        topology: where the ranks are; owners evade nodes and columns of the matrices before.
    """
    order = topology.owner_order()
    patterns = _share_out(counts, interchangeable, order)
    matrices = list(zip(shapes, layers, strict=True))
    placed = []
    # Where owners take alike, nothing is better than the owner order; where not, to evade.
    for positions in (_in_order(matrices, patterns), _hand_out(matrices, patterns, topology)):
        if positions is not None:
            _separate(matrices, positions)
            placed.append([order[position] for position in positions])

    def judged(owners: Sequence[int]) -> tuple[int, float]:
        layered = [pair for pair in zip(layers, owners, strict=True) if pair[0]]
        found = contention(owners, topology)
        return len(layered) - len(set(layered)), found.node_mean + 2 * found.column_mean

    return min(placed, key=judged)


def _share_out(
    counts: Sequence[Mapping[int, int]], groups: Sequence[Sequence[int]], order: Sequence[int]
) -> list[_Pattern]:
    """The patterns in the owner order: a group's go along it, most matrices first, so that like
    patterns fill one stretch. In turn, they could put every second owner in half of the columns."""
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
    """The position of each matrix's owner; ``patterns`` are those of the positions."""
    turns, slots = _turns(patterns), _slots(topology)
    places = [slots[rank] for rank in topology.owner_order()]
    window = topology.columns - 1  # so many travel at once
    on_node, on_column = [0] * topology.nodes, [0] * topology.columns
    last_use = [-1] * len(places)
    in_layer: defaultdict[str, set[int]] = defaultdict(set)
    handed: list[int] = []

    def cost(waiting: Sequence[int], turn: int) -> tuple[bool, int, int]:
        """The lower, the better. More than two matrices in a column count as two."""
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
    """The positions in the owner order; None where owners do not take alike."""
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
    """The positions that take a shape's matrices, the first one last. Owners that take equally many
    go one after the other, in as many rounds, which are spread over the shape's matrices."""
    takers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for position, pattern in enumerate(patterns):
        for entry in pattern:
            takers[entry].append(position)
    turns: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for (shape, rounds), alike in takers.items():
        total = rounds * len(alike)
        turns[shape] += [((i + 0.5) / total, alike[i % len(alike)]) for i in range(total)]
    return {shape: [p for _, p in sorted(found, reverse=True)] for shape, found in turns.items()}


def _separate(matrices: Sequence[_Matrix], positions: list[int]) -> None:
    """Exchange, in place, two matrices of a shape where a layer has an owner twice."""
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

    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, (shape, _) in enumerate(matrices):
        members[shape].append(i)
    for same in members.values():
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


@dataclass(frozen=True, slots=True)
class Contention:
    """How many of ``window`` consecutive matrices have owners on one node, or in one column.

    Of each window counts the most crowded node or column; ``max`` and ``mean`` are over all
    windows. Fewer is better; 1 means that no two ever meet."""

    window: int
    node_max: int
    node_mean: float
    column_max: int
    column_mean: float


def contention(owners: Sequence[int], topology: Topology) -> Contention:
    """How the owners of consecutive matrices, in launch order, share nodes and columns.

    As many matrices as there are columns are in flight; if there are fewer, all of them."""
    window = min(topology.columns, len(owners))
    slot = _slots(topology)
    node, column = (_crowds([slot[o][axis] for o in owners], window) or [0] for axis in (0, 1))
    means = sum(node) / len(node), sum(column) / len(column)
    return Contention(window, max(node), means[0], max(column), means[1])


def _slots(topology: Topology) -> dict[int, tuple[int, int]]:
    """Node and column of each rank."""
    return {rank: (n, c) for n, row in enumerate(topology.slots()) for c, rank in enumerate(row)}


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


def layer_of(name: str) -> str:
    """The layer that a parameter or matrix belongs to: its name up to the first number.

    Copies of a matrix, which several parts of the mesh hold, belong to the same layer.

    >>> layer_of("model.layers.12.mlp.experts.w1#5")
    'model.layers.12'
    >>> layer_of("model.scales.3 (copy 2 of 4)")
    'model.scales.3'
    >>> layer_of("lm_head.weight")
    ''
    """
    found = _LAYER.match(_COPY.sub("", name).partition("#")[0])
    return found[0] if found else ""


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key that counts: "layers.2" comes before "layers.10". Different for each name.

    >>> sorted(["layers.10.up", "layers.2.up", "layers.2.down"], key=natural_key)
    ['layers.2.down', 'layers.2.up', 'layers.10.up']
    """
    # Text and numbers alternate, beginning with text, so that like is compared with like.
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name


def launch_order(names: Sequence[str]) -> list[int]:
    """Matrices in natural order of their names: about launch order, whatever order they came in."""
    return sorted(range(len(names)), key=lambda i: natural_key(names[i]))
