"""Which matrix of a kind goes to which owner, once it is decided how many each owner takes.

The counts leave freedom: matrices of one kind are alike, and so are many owners. It is used to
keep apart what travels at the same time::

    counts       how many of each kind every owner takes          (from the solver)
    share out    alike owners exchange their counts: equal ones lie together in the owner order
    hand out     matrices in launch order, each to an owner whose turn it is, in two ways
    repair       two matrices of a kind change places where a layer meets an owner twice
    choice       the better of the two, by repeated owners in layers, then by `contention`

A stretch of the owner order touches all nodes and columns evenly (see `diagonal_slots`). So owners
that take the same fill one stretch, the busy ones and the idle ones alike. Handing out, an owner is
its position in the owner order, a kind's owners take turns, and among those whose turn it is the
one that meets the fewest matrices in flight takes the matrix::

    kind k     owners 0 1 2 3 take 2 each, owner 4 takes 4         n = 12 matrices
    turns      |  0 1 2 3 once      |  0 1 2 3 again     |         a turn is n/2 matrices long
               |  4     |  4     |  4     |  4     |               a turn is n/4 matrices long
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import chain, islice

from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError

__all__ = ["Contention", "contention", "launch_order", "layer_of", "natural_key", "place"]

_Pattern = tuple[tuple[int, int], ...]  # (kind, how many), ascending: what one owner takes
_Turn = tuple[int, int, int]  # when it ends or begins, its number, how many its owner takes

_REGIONS = (4, 8)  # groups of nodes and of columns
_OWNERS_SEEN = 16  # about how many owners of each list one step looks at
_PATIENCE = 0.5  # how many meetings it outweighs to have waited for one turn
_OVERDUE = 4.0  # and for each turn after the second

_PARTNERS_SEEN = 512  # how many matrices one exchange chooses from
_CHAIN = 3  # how many exchanges may be needed to take one matrix off an owner
_FAILURES = 12  # matrices of a layer that could not be moved, before the others are left alone
_LOOKS_PER_MATRIX = 5_000  # how many exchanges are tried for it
_LOOKS = 400_000  # and for all matrices together
_ONE_ROUND = 20_000  # so many matrices take a second or two a round: the evading one must do
_COPY = re.compile(r" \(copy [0-9]+ of [0-9]+\)$")


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
        topology: if given, a second round evades owners that share a node or a column with the
            matrices just handed out, and the better one counts.

    Raises:
        PlanError: the counts do not add up to the matrices.
    """
    _check(kinds, layers, counts, order)
    shared = _share_out(counts, interchangeable, order)
    patterns = [shared[rank] for rank in order]
    # To keep to the owner order is mostly better where owners take alike; to evade who shares a
    # node or a column is better where they do not.
    flights = [_Flight(order)]
    if topology is not None and topology.nodes > 1:
        flights.append(_Flight(order, topology))
    placed = []
    for flight in flights[-1:] if len(kinds) > _ONE_ROUND else flights:
        positions = _hand_out(kinds, layers, patterns, flight)
        _Repair(kinds, layers, positions).run()
        placed.append([order[position] for position in positions])

    def judged(owners: Sequence[int]) -> tuple[float, float]:
        layered = [pair for pair in zip(layers, owners, strict=True) if pair[0]]
        found = contention(owners, topology) if topology is not None else None
        crowded = found.node_mean + 2 * found.column_mean if found else 0.0
        return len(layered) - len(set(layered)), crowded

    return min(placed, key=judged)


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
    needed, given = Counter(kinds), Counter[int]()
    for taken in counts:
        given.update(taken)
    wrong = sorted(k for k in needed.keys() | given.keys() if needed[k] != given[k])
    if wrong or any(count < 0 for taken in counts for count in taken.values()):
        found = {kind: (given[kind], needed[kind]) for kind in wrong[:5]}
        raise PlanError(f"the counts of a kind must be >= 0 and add up; (taken, there): {found}")


def _share_out(
    counts: Sequence[Mapping[int, int]],
    interchangeable: Sequence[Sequence[int]],
    order: Sequence[int],
) -> list[_Pattern]:
    """The pattern of each rank: a group's go along the owner order, most matrices first.

    Like patterns then fill one stretch of the order. Dealing them out in turn instead would put
    every second owner, for example, in half of the columns.
    """
    shared = [tuple(sorted((kind, n) for kind, n in taken.items() if n)) for taken in counts]
    position = {rank: i for i, rank in enumerate(order)}
    for group in interchangeable:
        patterns = sorted((shared[r] for r in group), key=lambda p: (-sum(n for _, n in p), p))
        for rank, pattern in zip(sorted(group, key=position.__getitem__), patterns, strict=True):
            shared[rank] = pattern
    return shared


# ---- handing out -------------------------------------------------------------------------


class _Flight:
    """The matrices handed out last, which travel together, and where their owners sit.

    An owner's region is a group of slots: whoever looks at one owner of each region has seen all
    parts of the machine. Without a topology all owners are on one node.
    """

    def __init__(self, order: Sequence[int], topology: Topology | None = None) -> None:
        rows = (tuple(order),) if topology is None else topology.slots()
        slot = {rank: (n, c) for n, row in enumerate(rows) for c, rank in enumerate(row)}
        self.slots = [slot[rank] for rank in order]
        self.regions = [n % _REGIONS[0] * _REGIONS[1] + c % _REGIONS[1] for n, c in self.slots]
        self.on_node = [0] * len(rows)
        self.on_column = [0] * max(map(len, rows))
        self.last_use = [-1] * len(order)
        self.recent: deque[int] = deque()
        self.window = len(self.on_column) - 1
        self.floor = self.window // len(rows)  # the crowd at the best place, at most
        self.now = 0

    def crowd(self, position: int) -> int:
        """How many matrices in flight it would meet on its node and, counting double, column.

        One matrix for each column is in flight, but several for each node: columns can stay free
        of meetings. Where two meet already, it is too late to save the column.
        """
        node, column = self.slots[position]
        return self.on_node[node] + 2 * min(self.on_column[column], 2)

    def use(self, position: int) -> None:
        self.last_use[position] = self.now
        self.now += 1
        self.recent.append(position)
        changes = [(position, 1)]
        if len(self.recent) > self.window:
            changes.append((self.recent.popleft(), -1))
        for changed, change in changes:
            node, column = self.slots[changed]
            self.on_node[node] += change
            self.on_column[column] += change


class _Turns:
    """Who may take the next matrix of one kind.

    An owner with c of the kind's n matrices should take its j-th (from 0) while the matrices
    ``j*n/c`` to ``(j+1)*n/c`` go out, so that large and small shares are handed out evenly. Owners
    with equal ``(j, c)`` form a class: for each region a heap by last use. ``ready`` holds the
    classes whose turn has begun, sorted by its end; ``later`` the others, sorted by its begin.
    """

    def __init__(self, total: int, flight: _Flight) -> None:
        self.total, self.flight, self.handed = total, flight, 0
        self.heaps: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = {}
        self.ready: list[_Turn] = []
        self.later: list[_Turn] = []

    def add(self, position: int, turn: int, count: int) -> None:
        if (turn, count) not in self.heaps:
            self.heaps[turn, count] = {}
            listed, entry = self._listed(turn, count)
            insort(listed, entry)
        heap = self.heaps[turn, count].setdefault(self.flight.regions[position], [])
        heappush(heap, (self.flight.last_use[position], position))

    def take(self, avoid: Collection[int]) -> int:
        """Hand the next matrix to an owner, to none of ``avoid`` if that is possible."""
        while self.later and self.later[0][0] <= self.handed:
            _, turn, count = self.later.pop(0)
            insort(self.ready, self._listed(turn, count)[1])
        offer = self._best(avoid) or self._best(())
        assert offer is not None, "the counts add up, so somebody has room"
        _, _, position, turn, count = offer
        heaps, region = self.heaps[turn, count], self.flight.regions[position]
        heappop(heaps[region])
        if not heaps[region]:
            del heaps[region]
        if not heaps:
            del self.heaps[turn, count]
            listed, entry = self._listed(turn, count)
            listed.remove(entry)
        self.handed += 1
        self.flight.use(position)
        if turn + 1 < count:
            self.add(position, turn + 1, count)
        return position

    def _listed(self, turn: int, count: int) -> tuple[list[_Turn], _Turn]:
        """The list that a class belongs to, and its entry there."""
        begin, end = (-(-t * self.total // count) for t in (turn, turn + 1))
        ready = begin <= self.handed
        return (self.ready, (end, turn, count)) if ready else (self.later, (begin, turn, count))

    def _best(self, avoid: Collection[int]) -> tuple[float, int, int, int, int] | None:
        """The best ``(score, last use, position, turn, count)``: the lower, the better.

        Whoever has waited longest in a region stands for it. If that is one to avoid, then mostly
        the whole region is.
        """
        flight, best = self.flight, None
        for classes in (self.ready, self.later):
            seen = 0
            for _, turn, count in classes:
                waited = self.handed * count / self.total - turn
                bonus = _PATIENCE * waited + _OVERDUE * max(0.0, waited - 2.0)
                for heap in self.heaps[turn, count].values():
                    # Owners are used for other kinds too. Last uses only grow, so it is enough
                    # to correct the top.
                    while heap[0][0] != flight.last_use[heap[0][1]]:
                        heapreplace(heap, (flight.last_use[heap[0][1]], heap[0][1]))
                    last_use, position = heap[0]
                    if position not in avoid:
                        offer = (flight.crowd(position) - bonus, last_use, position, turn, count)
                        best = offer if best is None else min(best, offer)
                seen += len(self.heaps[turn, count])
                if best and flight.crowd(best[2]) <= flight.floor:
                    return best
                if seen >= _OWNERS_SEEN:
                    break
        return best


def _hand_out(
    kinds: Sequence[int], layers: Sequence[str], patterns: Sequence[_Pattern], flight: _Flight
) -> list[int]:
    """The position of each matrix's owner; ``patterns`` are those of the positions."""
    turns = {kind: _Turns(total, flight) for kind, total in Counter(kinds).items()}
    for position, pattern in enumerate(patterns):
        for kind, count in pattern:
            turns[kind].add(position, 0, count)
    in_layer: defaultdict[str, set[int]] = defaultdict(set)
    positions = []
    for kind, layer in zip(kinds, layers, strict=True):
        used = in_layer[layer] if layer else set()
        positions.append(turns[kind].take(used))
        used.add(positions[-1])
    return positions


# ---- the repair --------------------------------------------------------------------------


class _Repair:
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
        most, left = self._most_owners(), _LOOKS
        failed: Counter[str] = Counter()
        for i in sorted(i for held in self.held.values() if len(held) > 1 for i in held):
            layer = self.layers[i]
            alone = len(self._meeting(layer, self.positions[i])) < 2
            if alone or self.owners[layer] >= most[layer] or failed[layer] >= _FAILURES:
                continue
            allowed = self.looks = min(_LOOKS_PER_MATRIX, left)
            # Short chains first, so that a long one is looked for only where none is found.
            moved = any(self._move(i, steps) for steps in range(1, _CHAIN + 1))
            failed[layer] += not moved
            left -= allowed - self.looks

    def _most_owners(self) -> dict[str, int]:
        """No layer has more owners than matrices, or than there are owners of its kinds."""
        owners: defaultdict[int, set[int]] = defaultdict(set)
        found: defaultdict[str, list[int]] = defaultdict(list)
        for kind, layer, position in zip(self.kinds, self.layers, self.positions, strict=True):
            owners[kind].add(position)
            found[layer].append(kind)
        kinds_of = {layer: frozenset(kinds) for layer, kinds in found.items()}
        union = {
            kinds: len(set().union(*map(owners.__getitem__, kinds)))
            for kinds in {*kinds_of.values()}
        }
        return {layer: min(len(found[layer]), union[kinds]) for layer, kinds in kinds_of.items()}

    def _meeting(self, layer: str, position: int) -> Sequence[int]:
        """The layer's matrices on one owner."""
        return self.held.get((layer, position), ())

    def _move(self, i: int, steps: int) -> bool:
        """Give ``i`` to another owner, with at most ``steps`` exchanges.

        ``i`` shares its owner with its layer. True if the layers have more owners in all
        afterwards; otherwise nothing is changed.
        """
        layer, mine = self.layers[i], self.positions[i]
        # Partners are of the same kind, those of the following layers first.
        members, start = self.members[self.kinds[i]], self.after[self.kinds[i], layer]
        for at in islice(chain(range(start, len(members)), range(start)), _PARTNERS_SEEN):
            if self.looks <= 0:
                return False
            self.looks -= 1
            j = members[at]
            other, theirs = self.layers[j], self.positions[j]
            if other == layer or theirs == mine:
                continue
            gain = int(not self._meeting(layer, theirs))
            if other:
                gain += not self._meeting(other, mine)
                gain -= len(self._meeting(other, theirs)) == 1
            if gain < 0 or (gain == 0 and steps == 1):
                continue
            self._exchange(i, j)
            # Without a gain, one of those that now meet on an owner has to move on.
            if gain > 0 or any(
                len(met) > 1 and any(self._move(m, steps - 1) for m in met)
                for met in (tuple(self._meeting(*a)) for a in ((layer, theirs), (other, mine)))
            ):
                return True
            self._exchange(i, j)
        return False

    def _exchange(self, i: int, j: int) -> None:
        mine, theirs = self.positions[i], self.positions[j]
        for matrix, old, new in ((i, mine, theirs), (j, theirs, mine)):
            self.positions[matrix] = new
            layer = self.layers[matrix]
            if layer:
                left, joined = self.held[layer, old], self.held[layer, new]
                left.remove(matrix)
                self.owners[layer] += (not joined) - (not left)
                joined.append(matrix)


# ---- contention --------------------------------------------------------------------------


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
    slot = {rank: (n, c) for n, row in enumerate(topology.slots()) for c, rank in enumerate(row)}
    found: list[float] = []
    for axis in (0, 1):
        crowds = _crowds([slot[owner][axis] for owner in owners], window)
        found += max(crowds, default=0), sum(crowds) / max(len(crowds), 1)
    return Contention(window, int(found[0]), found[1], int(found[2]), found[3])


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


def launch_order(names: Sequence[str]) -> list[int]:
    """Matrices in natural order of their names: about launch order, whatever order they came in."""
    return sorted(range(len(names)), key=lambda i: natural_key(names[i]))
