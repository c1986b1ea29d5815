"""Which matrix of a kind goes to which owner, once it is decided how many each owner takes.

The counts leave freedom: matrices of one kind are alike, and so are many owners. It is used to
keep apart what travels at the same time::

    counts       how many of each kind every owner takes          (from the solver)
    share out    alike owners exchange their counts: equal ones lie together in the owner order
    walk         matrices in launch order, each to an owner whose turn it is, in two ways
    repair       two matrices of a kind change places where a layer meets an owner twice
    choice       the better of the two, by repeated owners in layers, then by `contention`

A stretch of the owner order touches all nodes and columns evenly (see `diagonal_slots`). So owners
that take the same fill one stretch, the busy ones and the idle ones alike.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

from dmuon.scheduler.contention import Contention, contention, row_major
from dmuon.scheduler.topology import Topology
from dmuon.scheduler.walk import Flight, Pattern, walk
from dmuon.types import PlanError

__all__ = ["Contention", "contention", "layer_of", "natural_key", "place", "row_major"]

PARTNERS_SEEN = 512  # how many matrices one exchange chooses from
CHAIN = 3  # how many exchanges may be needed to take one matrix off an owner
FAILURES = 12  # matrices of a layer that could not be moved, before the others are left alone
LOOKS_PER_MATRIX = 5_000  # how many exchanges are tried for it
ONE_WALK = 20_000  # so many matrices take a second or two a walk: the evading one must do
_COPY = re.compile(r" \(copy [0-9]+ of [0-9]+\)$")
LOOKS = 400_000  # and for all matrices together


def place(
    kinds: Sequence[int],
    layers: Sequence[str],
    counts: Sequence[Mapping[int, int]],
    interchangeable: Sequence[Sequence[int]],
    order: Sequence[int],
    topology: Topology | None = None,
) -> list[int]:
    """The owner of each matrix, given how many of each kind every owner takes.

    Depends on nothing but its input, and not on how ``counts`` are arranged inside a group of
    ``interchangeable`` ranks. The work is bounded: one second or a few for 46,000 matrices.

    Args:
        kinds: the kind of each matrix, matrices in the order in which they are launched.
        layers: the layer of each matrix, "" for none. That a layer's matrices have different
            owners is a goal, not a promise; it is met best where a layer's matrices follow each
            other.
        counts: for each rank, kind -> how many of that kind it takes.
        interchangeable: groups of ranks that may exchange their counts.
        order: all ranks, see `Topology.owner_order`.
        topology: if given, a second walk evades owners that share a node or a column with the
            matrices just handed out, and the better one counts.

    Raises:
        PlanError: the counts do not add up to the matrices.
    """
    _check(kinds, layers, counts, order)
    patterns = _share_out([_pattern(c) for c in counts], interchangeable, order)
    placed = []
    flights = _flights(order, topology)
    for flight in flights[-1:] if len(kinds) > ONE_WALK else flights:
        positions = walk(kinds, layers, [patterns[rank] for rank in order], flight)
        _Spread(kinds, layers, positions).run()
        placed.append([order[position] for position in positions])
    return min(placed, key=lambda owners: _meetings(layers, owners, topology))


def _flights(order: Sequence[int], topology: Topology | None) -> list[Flight]:
    """Two ways to walk: keep to the owner order, or evade who shares a node or a column.

    The first is mostly the better one where owners take alike, the second where they do not.
    """
    alone = topology is None or topology.nodes == 1
    return [Flight(order)] if alone else [Flight(order), Flight(order, topology)]


def _meetings(
    layers: Sequence[str], owners: Sequence[int], topology: Topology | None
) -> tuple[float, float]:
    """What a placement is judged by: layers meeting an owner twice, then shared links."""
    layered = [pair for pair in zip(layers, owners, strict=True) if pair[0]]
    twice = len(layered) - len(set(layered))
    if topology is None:
        return twice, 0.0
    found = contention(owners, topology)
    return twice, found.node_mean + 2 * found.column_mean


def _check(
    kinds: Sequence[int],
    layers: Sequence[str],
    counts: Sequence[Mapping[int, int]],
    order: Sequence[int],
) -> None:
    if len(layers) != len(kinds):
        raise PlanError(f"{len(kinds)} matrices have {len(layers)} layers")
    if sorted(order) != list(range(len(counts))):
        raise PlanError(f"the owner order must name each of the {len(counts)} ranks once")
    given: Counter[int] = Counter()
    for taken in counts:
        given.update(taken)
    needed = Counter(kinds)
    wrong = sorted(k for k in needed.keys() | given.keys() if needed[k] != given[k])
    if wrong or any(count < 0 for taken in counts for count in taken.values()):
        found = {kind: (given[kind], needed[kind]) for kind in wrong[:5]}
        raise PlanError(f"the counts of a kind must be >= 0 and add up; (taken, there): {found}")


def _pattern(taken: Mapping[int, int]) -> Pattern:
    return tuple(sorted((kind, count) for kind, count in taken.items() if count))


def _share_out(
    patterns: Sequence[Pattern], interchangeable: Sequence[Sequence[int]], order: Sequence[int]
) -> list[Pattern]:
    """Hand a group's patterns to its ranks along the owner order, those with most matrices first.

    Like patterns then fill one stretch of the order. Dealing them out in turn instead would put
    every second owner, for example, in half of the columns.
    """
    position = {rank: i for i, rank in enumerate(order)}
    shared = list(patterns)
    for group in interchangeable:
        handed = sorted(
            (patterns[rank] for rank in group), key=lambda p: (-sum(n for _, n in p), p)
        )
        for rank, pattern in zip(sorted(group, key=position.__getitem__), handed):
            shared[rank] = pattern
    return shared


# ---- the repair --------------------------------------------------------------------------


class _Spread:
    """Exchanges matrices of a kind between owners where a layer meets an owner twice.

    ``positions`` is changed in place; how many of each kind an owner takes stays.
    """

    def __init__(self, kinds: Sequence[int], layers: Sequence[str], positions: list[int]) -> None:
        self.kinds, self.layers, self.positions = kinds, layers, positions
        self.members: defaultdict[int, list[int]] = defaultdict(list)
        self.after: dict[tuple[int, str], int] = {}  # where a layer ends among a kind's members
        self.held: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for i, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
            self.members[kind].append(i)
            self.after[kind, layer] = len(self.members[kind])
            if layer:
                self.held[layer, positions[i]].append(i)
        self.owners = Counter(layer for layer, _ in self.held)  # how many each layer has
        self.looks = 0

    def run(self) -> None:
        most = self._most_owners()
        left = LOOKS
        failed: Counter[str] = Counter()
        for i in sorted(i for held in self.held.values() if len(held) > 1 for i in held):
            layer = self.layers[i]
            if self._times(layer, self.positions[i]) < 2 or self.owners[layer] >= most[layer]:
                continue
            if failed[layer] >= FAILURES:
                continue
            allowed = self.looks = min(LOOKS_PER_MATRIX, left)
            # Short chains first, so that a long one is looked for only where none is found.
            moved = any(self._move(i, steps) for steps in range(1, CHAIN + 1))
            failed[layer] += not moved
            left -= allowed - self.looks

    def _most_owners(self) -> dict[str, int]:
        """No layer has more owners than matrices, or than there are owners of its kinds."""
        owners: defaultdict[int, set[int]] = defaultdict(set)
        kinds_of: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for kind, layer, position in zip(self.kinds, self.layers, self.positions, strict=True):
            owners[kind].add(position)
            kinds_of[layer][kind] += 1
        union = {
            kinds: len(set().union(*(owners[kind] for kind in kinds)))
            for kinds in {tuple(sorted(found)) for found in kinds_of.values()}
        }
        return {
            layer: min(sum(found.values()), union[tuple(sorted(found))])
            for layer, found in kinds_of.items()
        }

    def _times(self, layer: str, position: int) -> int:
        return len(self.held.get((layer, position), ()))

    def _move(self, i: int, steps: int) -> bool:
        """Give ``i`` to another owner, with at most ``steps`` exchanges.

        ``i`` shares its owner with its layer. True if the layers have more owners in all
        afterwards; otherwise nothing is changed.
        """
        layer, mine = self.layers[i], self.positions[i]
        for j in self._partners(i):
            if self.looks <= 0:
                return False
            self.looks -= 1
            other, theirs = self.layers[j], self.positions[j]
            if other == layer or theirs == mine:
                continue
            gain = (not self._times(layer, theirs)) + (other != "") * (
                (not self._times(other, mine)) - (self._times(other, theirs) == 1)
            )
            if gain < 0 or (gain == 0 and steps == 1):
                continue
            self._exchange(i, j)
            if gain > 0 or self._move_any(layer, theirs, steps - 1):
                return True
            if self._move_any(other, mine, steps - 1):
                return True
            self._exchange(i, j)
        return False

    def _move_any(self, layer: str, position: int, steps: int) -> bool:
        """Move on one of those that now meet on an owner."""
        met = tuple(self.held.get((layer, position), ()))
        return len(met) > 1 and any(self._move(m, steps) for m in met)

    def _partners(self, i: int) -> Iterable[int]:
        """Matrices of the same kind, those of the following layers first."""
        members, start = self.members[self.kinds[i]], self.after[self.kinds[i], self.layers[i]]
        around = chain(range(start, len(members)), range(start))
        return (members[at] for at in islice(around, PARTNERS_SEEN))

    def _exchange(self, i: int, j: int) -> None:
        mine, theirs = self.positions[i], self.positions[j]
        for matrix, old, new in ((i, mine, theirs), (j, theirs, mine)):
            self.positions[matrix] = new
            layer = self.layers[matrix]
            if layer:
                held = self.held[layer, old]
                held.remove(matrix)
                self.owners[layer] -= not held
                held = self.held[layer, new]
                self.owners[layer] += not held
                held.append(matrix)


# ---- names -------------------------------------------------------------------------------


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
    parts = _COPY.sub("", name).partition("#")[0].split(".")
    for i, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key that counts: "layers.2" comes before "layers.10". Different for each name.

    >>> sorted(["layers.10.up", "layers.2.up", "layers.2.down"], key=natural_key)
    ['layers.2.down', 'layers.2.up', 'layers.10.up']
    """
    # Text and numbers alternate, beginning with text, so that like is compared with like.
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name
