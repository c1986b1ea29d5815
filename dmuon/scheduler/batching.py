"""How an owner runs the matrices that it takes: cut into batches, and batches put into groups.

::

    taken      5 x [m, n1]   3 x [m, n2]            of one owner, in one pool
    batches    [. . . .] [.]   [. . .]              the cheapest cut, alone or with groups in mind
    groups     [. . . .]   ([.] [. . .])            what saves most; it costs exactly that
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dmuon.scheduler.batches import Batch, groups_of, is_gram
from dmuon.scheduler.costs import square_key
from dmuon.scheduler.grouping import Part, PriceBook
from dmuon.scheduler.problem import Counts, Ints, Kind, Problem

__all__ = ["Batching"]

Taken = tuple[tuple[int, int], ...]  # (kind, how many of it): what one owner takes of a family


@dataclass(frozen=True)
class _Cut:
    """Sizes of the batches of each kind, the parts that share a call, and ticks of it all."""

    ticks: int
    sizes: dict[int, tuple[int, ...]]  # by kind
    groups: tuple[tuple[Part, ...], ...] = ()


class Batching:
    """Cuts what owners take into batches and groups, and says what exactly that costs.

    ``whole`` is the problem with the prices of batches alone, ``lowered`` with those that no
    grouping gets below; ``book`` has the prices of both. Kinds count first those that a solver
    decides on, then the forced ones.
    """

    def __init__(self, whole: Problem, lowered: Problem, book: PriceBook) -> None:
        self.whole = whole
        self.lowered = lowered
        self.book = book
        self._kinds = [*whole.kinds, *(group.kind for group in whole.forced)]
        self._low = [*lowered.kinds, *(group.kind for group in lowered.forced)]
        self._cuts: dict[Taken, _Cut] = {}

    @cached_property
    def _families(self) -> list[tuple[int, ...]]:
        """Kinds that may share calls: of one pool, short side and dtype, with something to save."""
        families: dict[object, list[int]] = defaultdict(list)
        for s, kind in enumerate(self._kinds):
            families[kind.pool, square_key(kind.key)].append(s)
        return [
            tuple(family)
            for family in families.values()
            if any(self._kinds[s].batch_ticks != self._low[s].batch_ticks for s in family)
        ]

    @property
    def saves(self) -> bool:
        """Whether any grouping could save anything."""
        return bool(self._families)

    # ---- costs ---------------------------------------------------------------------------

    def loads(self, counts: Counts) -> Ints:
        """Ticks of every rank, with its batches grouped."""
        loads = self.whole.loads(counts)
        free = len(self.whole.kinds)
        for family in self._families:
            if family[0] < free:
                rows, where = np.unique(counts[:, family], axis=0, return_inverse=True)
                saved = np.array([self._saved(family, row.tolist()) for row in rows], np.int64)
                loads -= saved[where.reshape(-1)]
            else:
                rank = self.whole.forced[family[0] - free].rank
                loads[rank] -= self._saved(family, [self._kinds[s].count for s in family])
        return loads

    def makespan(self, counts: Counts) -> int:
        """Ticks of the busiest rank, with its batches grouped."""
        return int(self.loads(counts).max())

    def interchangeable(self) -> list[tuple[int, ...]]:
        """Groups of ranks that may exchange what they take, and no load changes."""
        fixed = self.loads(np.zeros((self.whole.world, len(self.whole.kinds)), np.int64))
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for c, owners in enumerate(self.whole.classes):
            for rank in owners.ranks:
                groups[c, int(fixed[rank])].append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def _saved(self, family: Sequence[int], taken: Sequence[int]) -> int:
        alone = sum(int(self._kinds[s].ticks[k]) for s, k in zip(family, taken))
        return alone - self._cut(tuple((s, k) for s, k in zip(family, taken) if k)).ticks

    # ---- cuts ----------------------------------------------------------------------------

    def _cut(self, taken: Taken) -> _Cut:
        """The cheapest known way to run what an owner takes of one family.

        Of two: batches that are cheapest alone, and those that are by the lowered prices.
        """
        if taken not in self._cuts:
            cuts = [self._grouped(taken, kinds) for kinds in (self._kinds, self._low)]
            self._cuts[taken] = min(cuts, key=lambda cut: cut.ticks)
        return self._cuts[taken]

    def _grouped(self, taken: Taken, kinds: Sequence[Kind]) -> _Cut:
        sizes = {s: kinds[s].batches(k) for s, k in taken}
        parts = sorted((kinds[s].key, size) for s, found in sizes.items() for size in found)
        ticks = sum(self.book.whole[key][size - 1] for key, size in parts)
        by_kernel: dict[str, list[Part]] = defaultdict(list)
        for key, size in parts:
            kernel = self.book.kernels[key][size - 1]
            if is_gram(kernel):
                by_kernel[kernel].append((key, size))
        groups = tuple(
            tuple(mine[i] for i in group)
            for _, mine in sorted(by_kernel.items())
            for group in self.book.partition(mine)
        )
        return _Cut(ticks - sum(map(self.book.saving, groups)), sizes, groups)

    # ---- batches -------------------------------------------------------------------------

    def batches(self, owners: Sequence[int], order: Sequence[int]) -> tuple[Batch, ...]:
        """Cut every owner's matrices into batches and groups, earliest layers first.

        ``order`` lists the matrices about as they are launched.
        """
        position = {i: at for at, i in enumerate(order)}
        held = self._held(owners, position)
        made: list[Batch] = []
        family_of = {s: family for family in self._families for s in family}
        done: set[tuple[int, tuple[int, ...]]] = set()
        groups = 0
        for owner, s in held:
            family = family_of.get(s)
            if family is None:
                sizes = self._kinds[s].batches(len(held[owner, s]))
                made += self._of_kind(owner, s, held[owner, s], sizes)
            elif (owner, family) not in done:
                done.add((owner, family))
                mine = {f: held[owner, f] for f in family if (owner, f) in held}
                found = self._of_family(owner, mine, groups)
                groups += len(groups_of(found))
                made += found
        made.sort(key=lambda b: (position[b.matrices[0]], b.owner))
        return self._priced(made)

    def _held(
        self, owners: Sequence[int], position: Mapping[int, int]
    ) -> dict[tuple[int, int], list[int]]:
        """(owner, kind) -> its matrices in launch order."""
        members = [*self.whole.members, *(group.members for group in self.whole.forced)]
        held: dict[tuple[int, int], list[int]] = defaultdict(list)
        for s, mine in enumerate(members):
            for i in sorted(mine, key=position.__getitem__):
                held[owners[i], s].append(i)
        return dict(held)

    def _of_kind(
        self, owner: int, s: int, mine: Sequence[int], sizes: Sequence[int]
    ) -> list[Batch]:
        kind, start, made = self._kinds[s], 0, []
        for size in sizes:
            ms = self.whole.ms(kind.batch_ticks[size - 1])
            kernel = self.book.kernels[kind.key][size - 1]
            made.append(Batch(owner, tuple(mine[start : start + size]), ms, kernel))
            start += size
        return made

    def _of_family(self, owner: int, mine: Mapping[int, Sequence[int]], first: int) -> list[Batch]:
        """Batches of one owner and family; groups are numbered from ``first`` on."""
        cut = self._cut(tuple((s, len(members)) for s, members in mine.items()))
        free: dict[Part, list[Batch]] = defaultdict(list)
        for s, members in mine.items():
            for batch in self._of_kind(owner, s, members, cut.sizes[s]):
                free[self._kinds[s].key, len(batch.matrices)].append(batch)
        # Of equal batches the earliest go into the first groups, so that a group waits for little.
        grouped = [
            replace(free[part].pop(0), group=first + g)
            for g, group in enumerate(cut.groups)
            for part in group
        ]
        return grouped + [batch for rest in free.values() for batch in rest]

    def _priced(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """Groups numbered in order of their first batch, with their savings taken off."""
        final = list(batches)
        key_of = {i: kind.key for kind, mine in self._members() for i in mine}
        for number, members in enumerate(groups_of(batches).values()):
            parts = [(key_of[batches[b].matrices[0]], len(batches[b].matrices)) for b in members]
            for b, part, share in zip(members, parts, self.book.shares(parts)):
                key, size = part
                ms = self.whole.ms(self.book.whole[key][size - 1] - share)
                final[b] = replace(batches[b], group=number, ms=ms)
        return tuple(final)

    def _members(self) -> list[tuple[Kind, tuple[int, ...]]]:
        members = [*self.whole.members, *(group.members for group in self.whole.forced)]
        return list(zip(self._kinds, members))
