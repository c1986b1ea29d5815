"""What batches save by running together, in ticks, and the prices that no grouping gets below.

Gram Newton-Schulz does most of its work on m x m matrices (m the short side), whatever n is. So
batches of different n may share one call for that part. With W the price of a batch alone and S the
price of its m x m part, both by the number of matrices, batches of b_1, b_2, ... together cost

    sum_i W_i(b_i)  -  [sum_i S(b_i) - S(sum_i b_i)].

A batch of b in a group of K matrices has ``b / K`` of ``S(K)``, so together they never cost less
than the sum of

    L(b) = W(b) - S(b) + b * min_K S(K) / K,        L(b) <= W(b),

whatever the groups are: a problem with the prices L bounds every plan from below. Here K runs from
``b + 1``, for a group has another batch, to what fits: as many as have a price, and as there are.
To bound plans within a known makespan alone, K leaves out groups that take longer by themselves.
The m x m part of a batch counts as at most the whole of it, so that nothing is negative.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from dmuon.scheduler.batches import PriceRow, SquareRow, is_gram
from dmuon.scheduler.cost_entries import ShapeKey, SquareKey, square_key

__all__ = ["Others", "Part", "PriceBook"]

_MOST_EXACT = 8  # batches whose partitions are all tried

Part = tuple[ShapeKey, int]  # a batch: the shape, and how many matrices


@dataclass(frozen=True, slots=True)
class Others:
    """Matrices that a batch may share a call with, and the least ticks of one of them besides."""

    count: int
    rest: Fraction


@dataclass(frozen=True)
class PriceBook:
    """Ticks of batches of 1, 2, ... matrices by shape, their kernels, and ticks of m x m parts."""

    whole: Mapping[ShapeKey, tuple[int, ...]]
    kernels: Mapping[ShapeKey, tuple[str, ...]]
    squares: Mapping[SquareKey, tuple[int, ...]]

    @classmethod
    def in_ticks(
        cls,
        prices: Mapping[ShapeKey, Sequence[float]],
        kernels: Mapping[ShapeKey, Sequence[str]],
        squares: Mapping[SquareKey, Sequence[float]],
        scale: int,
    ) -> PriceBook:
        """Milliseconds in ticks, ``scale`` to one; where no kernel is named it is ""."""
        named = {key: (*kernels.get(key, ()), *[""] * len(row)) for key, row in prices.items()}
        return cls(
            {key: tuple(round(ms * scale) for ms in row) for key, row in prices.items()},
            {key: tuple(named[key][: len(row)]) for key, row in prices.items()},
            {key: tuple(round(ms * scale) for ms in row) for key, row in squares.items()},
        )

    @classmethod
    def of(cls, prices: Sequence[PriceRow], squares: Sequence[SquareRow], scale: int) -> PriceBook:
        """The prices of a plan, in ticks."""
        return cls.in_ticks(
            {row.key: row.ms for row in prices},
            {row.key: row.kernels for row in prices},
            {row.key: row.ms for row in squares},
            scale,
        )

    def square(self, part: Part) -> int | None:
        """Ticks of the m x m part of a batch; None where it can share that with no other."""
        key, size = part
        row = self.squares.get(square_key(key), ())
        if size >= len(row) or not is_gram(self.kernels[key][size - 1]):
            return None
        return min(row[size - 1], self.whole[key][size - 1])

    def saving(self, parts: Sequence[Part]) -> int:
        """Ticks by which batches of one m and kernel cost less together than apart.

        0 where they cannot run together: several of one shape, a batch without a price for its
        m x m part, or more matrices than have one. Negative where together they cost more.
        """
        total = sum(size for _, size in parts)
        row = self.squares.get(square_key(parts[0][0]), ())
        own = [self.square(part) for part in parts]
        if total > len(row) or len({key for key, _ in parts}) < len(parts):
            return 0
        known = [ticks for ticks in own if ticks is not None]
        return sum(known) - row[total - 1] if len(known) == len(parts) > 1 else 0

    def shares(self, parts: Sequence[Part]) -> list[int]:
        """The saving of a group shared out to its batches, in proportion to their m x m parts.

        Whole ticks that add up to the saving; none is more than the batch's price.
        """
        saving = self.saving(parts)
        done = list(accumulate((self.square(part) or 0 for part in parts), initial=0))
        edges = [saving * ticks // max(done[-1], 1) for ticks in done]
        return [after - before for before, after in pairwise(edges)]

    def lowered(
        self, key: ShapeKey, others: Mapping[str, Others], within: int | None = None
    ) -> tuple[int, ...]:
        """``L`` of batches of 1, 2, ...; see the module's docstring.

        ``others`` are the matrices of other shapes that a batch could share a call with, by kernel.
        ``within``: in plans with a makespan of at most so many ticks.
        """
        row = self.squares.get(square_key(key), ())
        found = []
        for size, ticks in enumerate(self.whole[key], 1):
            own = self.square((key, size))
            other = others.get(self.kernels[key][size - 1])
            if own is not None and other is not None:
                rest, per = other.rest.numerator, other.rest.denominator
                shared = [
                    size * row[k - 1] // k
                    for k in range(size + 1, min(len(row), size + other.count) + 1)
                    if within is None
                    or ticks - own + (k - size) * rest // per + row[k - 1] <= within
                ]
                ticks = min([ticks, *(ticks - own + part for part in shared)])
            found.append(ticks)
        return tuple(found)

    def lowered_all(
        self, groups: Sequence[tuple[ShapeKey, int, tuple[int, ...]]], within: int | None = None
    ) -> dict[tuple[ShapeKey, int], tuple[int, ...]]:
        """``L`` by shape and pool, of a model with ``groups`` of (shape, pool, matrices).

        Only matrices of one pool run together, as they travel together.
        """
        if not self.squares:
            return {(key, pool): self.whole[key] for key, pool, _ in groups}
        there: dict[tuple[SquareKey, int], list[tuple[ShapeKey, int]]] = defaultdict(list)
        for key, pool, members in groups:
            there[square_key(key), pool].append((key, len(members)))
        rests = {key: self._rests(key) for key in self.whole}
        found = {}
        for key, pool, _ in groups:
            others: dict[str, Others] = {}
            for shape, count in there[square_key(key), pool]:
                for kernel, rest in rests[shape].items() if shape != key else ():
                    known = others.get(kernel, Others(0, rest))
                    others[kernel] = Others(known.count + count, min(known.rest, rest))
            found[key, pool] = self.lowered(key, others, within)
        return found

    def work(self, groups: Sequence[tuple[ShapeKey, int, tuple[int, ...]]]) -> int:
        """The steps that `lowered_all` takes, about."""
        there = Counter((square_key(key), pool) for key, pool, _ in groups)
        return sum(
            len(self.whole[key]) * len(self.squares.get(square_key(key), ()))
            + there[square_key(key), pool]
            for key, pool, _ in groups
            if self.squares
        )

    def _rests(self, key: ShapeKey) -> dict[str, Fraction]:
        """By kernel, the least that a matrix costs besides its m x m part."""
        rests: dict[str, Fraction] = {}
        for size, (ticks, kernel) in enumerate(zip(self.whole[key], self.kernels[key]), 1):
            own = self.square((key, size))
            if own is not None:
                rest = Fraction(ticks - own, size)
                rests[kernel] = min(rest, rests.get(kernel, rest))
        return rests

    def partition(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        """Groups of batches of one m and kernel, as positions in ``parts``, that save the most.

        Of up to 8 batches the best of all partitions; of more, each from the largest on joins the
        group where it saves most. A group saves something; batches that run alone are left out.
        """
        exact = len(parts) <= _MOST_EXACT
        groups = self._best(parts) if exact else self._first_fit(parts)
        return sorted(group for group in groups if len(group) > 1)

    def _best(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        """Over all subsets, by what the group of their first batch is."""
        bits = range(len(parts))
        gain = [
            self.saving([parts[i] for i in bits if mask >> i & 1]) if mask.bit_count() > 1 else 0
            for mask in range(1 << len(parts))
        ]
        best, group = [0], [0]
        for mask in range(1, 1 << len(parts)):
            low = mask & -mask
            rest = mask ^ low
            most, chosen = best[rest], low
            more = rest
            while more:
                found = gain[low | more] + best[rest ^ more]
                if gain[low | more] > 0 and found > most:
                    most, chosen = found, low | more
                more = (more - 1) & rest
            best.append(most)
            group.append(chosen)
        left, groups = (1 << len(parts)) - 1, []
        while left:
            groups.append(tuple(i for i in bits if group[left] >> i & 1))
            left ^= group[left]
        return groups

    def _first_fit(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        groups: list[list[int]] = []
        savings: list[int] = []
        for i in sorted(range(len(parts)), key=lambda i: (-parts[i][1], parts[i][0], i)):
            joined = [self.saving([parts[j] for j in (*group, i)]) for group in groups]
            more = [after - before for after, before in zip(joined, savings)]
            at = max(range(len(more)), key=lambda g: (more[g], -g), default=-1)
            if at >= 0 and more[at] > 0:
                groups[at].append(i)
                savings[at] = joined[at]
            else:
                groups.append([i])
                savings.append(0)
        return [tuple(sorted(group)) for group in groups]
