"""The walk of `placement`: matrices in launch order, each to the owner whose turn it is.

An owner is its position in the owner order, a kind's owners take turns, and among those whose turn
it is the one that meets the fewest matrices in flight takes the matrix::

    kind k     owners 0 1 2 3 take 2 each, owner 4 takes 4         n = 12 matrices
    turns      |  0 1 2 3 once      |  0 1 2 3 again     |         a turn is n/2 matrices long
               |  4     |  4     |  4     |  4     |               a turn is n/4 matrices long
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from dmuon.scheduler.topology import Topology

__all__ = ["Flight", "Pattern", "walk"]

Pattern = tuple[tuple[int, int], ...]  # (kind, how many), ascending: what one owner takes

LANES = (4, 8)  # groups of nodes and of columns
OWNERS_SEEN = 16  # about how many owners of each list one step looks at
PATIENCE = 0.5  # how many meetings it outweighs to have waited for one turn
OVERDUE = 4.0  # and for each turn after the second


class Flight:
    """The matrices handed out last, which travel together, and where their owners sit.

    An owner's lane is a group of slots: whoever looks at one owner of each lane has seen all parts
    of the machine. Without a topology all owners are on one node.
    """

    def __init__(self, order: Sequence[int], topology: Topology | None = None) -> None:
        rows = (tuple(order),) if topology is None else topology.slots()
        slot = {rank: (n, c) for n, row in enumerate(rows) for c, rank in enumerate(row)}
        self.nodes = [slot[rank][0] for rank in order]
        self.columns = [slot[rank][1] for rank in order]
        self.lanes = [
            n % LANES[0] * LANES[1] + c % LANES[1] for n, c in zip(self.nodes, self.columns)
        ]
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
        on_column = self.on_column[self.columns[position]]
        return self.on_node[self.nodes[position]] + 2 * min(on_column, 2)

    def use(self, position: int) -> None:
        self.last_use[position] = self.now
        self.now += 1
        self.recent.append(position)
        self._count(position, 1)
        if len(self.recent) > self.window:
            self._count(self.recent.popleft(), -1)

    def _count(self, position: int, change: int) -> None:
        self.on_node[self.nodes[position]] += change
        self.on_column[self.columns[position]] += change


@dataclass(slots=True)
class _Turns:
    """Who may take the next matrix of one kind.

    An owner with c of the kind's n matrices should take its j-th (from 0) while the matrices
    ``j*n/c`` to ``(j+1)*n/c`` go out, so that large and small shares are handed out evenly. Owners
    with equal ``(j, c)`` form a class: for each lane a heap by last use. ``ready`` holds the
    classes whose turn has begun, sorted by its end; ``later`` the others, sorted by its begin.
    """

    total: int
    flight: Flight
    handed: int = 0
    heaps: dict[tuple[int, int], dict[int, list[tuple[int, int]]]] = field(default_factory=dict)
    ready: list[tuple[int, int, int]] = field(default_factory=list)
    later: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, position: int, turn: int, count: int) -> None:
        heaps = self.heaps.get((turn, count))
        if heaps is None:
            heaps = self.heaps[turn, count] = {}
            insort(self._list(turn, count), self._class(turn, count))
        heap = heaps.setdefault(self.flight.lanes[position], [])
        heappush(heap, (self.flight.last_use[position], position))

    def take(self, avoid: Collection[int]) -> int:
        """Hand the next matrix to an owner, to none of ``avoid`` if that is possible."""
        while self.later and self.later[0][0] <= self.handed:
            _, turn, count = self.later.pop(0)
            insort(self.ready, self._class(turn, count))
        offer = self._best(avoid) or self._best(())
        assert offer is not None, "the counts add up, so somebody has room"
        _, _, position, turn, count = offer
        self._remove(position, turn, count)
        self.handed += 1
        self.flight.use(position)
        if turn + 1 < count:
            self.add(position, turn + 1, count)
        return position

    def _begin(self, turn: int, count: int) -> int:
        return -(-turn * self.total // count)

    def _list(self, turn: int, count: int) -> list[tuple[int, int, int]]:
        return self.ready if self._begin(turn, count) <= self.handed else self.later

    def _class(self, turn: int, count: int) -> tuple[int, int, int]:
        ready = self._begin(turn, count) <= self.handed
        return self._begin(turn + 1 if ready else turn, count), turn, count

    def _remove(self, position: int, turn: int, count: int) -> None:
        heaps, lane = self.heaps[turn, count], self.flight.lanes[position]
        heappop(heaps[lane])
        if not heaps[lane]:
            del heaps[lane]
        if not heaps:
            del self.heaps[turn, count]
            self._list(turn, count).remove(self._class(turn, count))

    def _best(self, avoid: Collection[int]) -> tuple[float, int, int, int, int] | None:
        """The best ``(score, last use, position, turn, count)``: the lower, the better.

        Whoever has waited longest in a lane stands for it. If that is one to avoid, then mostly
        the whole lane is.
        """
        flight, best = self.flight, None
        for classes in (self.ready, self.later):
            seen = 0
            for _, turn, count in classes:
                waited = self.handed * count / self.total - turn
                bonus = PATIENCE * waited + OVERDUE * max(0.0, waited - 2.0)
                for heap in self.heaps[turn, count].values():
                    last_use, position = self._longest_unused(heap)
                    if position not in avoid:
                        offer = (flight.crowd(position) - bonus, last_use, position, turn, count)
                        best = offer if best is None or offer < best else best
                seen += len(self.heaps[turn, count])
                if best and flight.crowd(best[2]) <= flight.floor:
                    return best
                if seen >= OWNERS_SEEN:
                    break
        return best

    def _longest_unused(self, heap: list[tuple[int, int]]) -> tuple[int, int]:
        # Owners are used for other kinds too; last uses only grow, so the top is corrected lazily.
        last_use = self.flight.last_use
        while heap[0][0] != last_use[heap[0][1]]:
            position = heap[0][1]
            heapreplace(heap, (last_use[position], position))
        return heap[0]


def walk(
    kinds: Sequence[int], layers: Sequence[str], patterns: Sequence[Pattern], flight: Flight
) -> list[int]:
    """The owner of each matrix: how many of each kind an owner takes is given in ``patterns``."""
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
