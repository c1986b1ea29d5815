"""Kinds and classes that are alike, as under expert parallelism: the same pools again and again.

::

    8 ep coordinates of 8 ranks      8 classes, 8 kinds of each expert shape      1 orbit each
    dense matrices on all 64 ranks   1 kind of each shape                         1 orbit each

Two kinds are alike if they have equal prices, counts and bytes and if alike classes may take them;
two classes, if they are equally large and busy and may take alike kinds (colour refinement). A
linear program over such classes has an optimum that treats what is alike alike: it only needs one
of each. See Grohe, Kersting, Mladenov, Selman 2014, "Dimension reduction via colour refinement".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from dmuon.scheduler.problem import OwnerClass, Problem

__all__ = ["Orbits", "levelled", "orbits_of"]

_MOST_CLASSES = 24  # that are not alike
_LEVELS = 8  # of fixed loads, where there are more


@dataclass(frozen=True, slots=True)
class Orbits:
    """The orbit of each kind and of each class, numbered in order of their first members."""

    kinds: tuple[int, ...]
    classes: tuple[int, ...]

    @classmethod
    def trivial(cls, problem: Problem) -> Orbits:
        """Everything for itself."""
        return cls(tuple(range(len(problem.kinds))), tuple(range(len(problem.classes))))

    @property
    def first_classes(self) -> tuple[int, ...]:
        """One class of each orbit."""
        return _firsts(self.classes)

    @property
    def first_kinds(self) -> tuple[int, ...]:
        """One kind of each orbit."""
        return _firsts(self.kinds)

    @property
    def are_trivial(self) -> bool:
        """No two kinds and no two classes are alike."""
        return len(set(self.kinds)) == len(self.kinds) and (
            len(set(self.classes)) == len(self.classes)
        )


def _firsts(orbit_of: Sequence[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    for i, orbit in enumerate(orbit_of):
        first.setdefault(orbit, i)
    return tuple(first.values())


def orbits_of(problem: Problem) -> Orbits:
    """The coarsest grouping that refinement finds.

    Where that leaves too many classes, because each rank has its own fixed load, those with about
    the same load pass for alike: what follows from it is a suggestion, and proofs do not rest on
    it (`proof.bound_of` looks at every class as it is).
    """
    exact = _refine(problem, [(c.size, c.fixed, c.room) for c in problem.classes])
    if len(set(exact.classes)) <= _MOST_CLASSES:
        return exact
    levels = _levels(problem)
    return _refine(problem, [(n, c.room) for n, c in zip(levels, problem.classes, strict=True)])


def levelled(problem: Problem) -> Problem | None:
    """The problem with about equal fixed loads raised to the largest of them; None if as many.

    Its counts are counts of the problem, with a makespan that is no larger.
    """
    if len(problem.classes) <= _MOST_CLASSES:
        return None
    merged: dict[tuple[int, int, tuple[bool, ...]], list[OwnerClass]] = {}
    for level, c in zip(_levels(problem), problem.classes, strict=True):
        merged.setdefault((level, c.room, c.allowed), []).append(c)
    classes = tuple(
        replace(
            group[0],
            ranks=tuple(sorted(rank for c in group for rank in c.ranks)),
            fixed=max(c.fixed for c in group),
        )
        for group in merged.values()
    )
    return replace(problem, classes=classes) if len(classes) < len(problem.classes) else None


def _levels(problem: Problem) -> list[int]:
    low = min(c.fixed for c in problem.classes)
    width = max(c.fixed for c in problem.classes) - low + 1
    return [(c.fixed - low) * _LEVELS // width for c in problem.classes]


def _refine(problem: Problem, owners: Sequence[Hashable]) -> Orbits:
    takes = [[s for s, yes in enumerate(c.allowed) if yes] for c in problem.classes]
    taken: list[list[int]] = [[] for _ in problem.kinds]
    for c, some in enumerate(takes):
        for s in some:
            taken[s].append(c)
    kinds = _numbered([(k.key, k.count, k.nbytes, k.batch_ticks) for k in problem.kinds])
    classes = _numbered(owners)
    while True:
        before = kinds, classes
        classes = _refined(classes, takes, kinds)
        kinds = _refined(kinds, taken, classes)
        if (kinds, classes) == before:
            return Orbits(kinds, classes)


def _refined(
    own: Sequence[int], neighbours: Sequence[Sequence[int]], colours: Sequence[int]
) -> tuple[int, ...]:
    """Split by how many neighbours of each colour there are."""
    around = [tuple(sorted(Counter(colours[n] for n in near).items())) for near in neighbours]
    return _numbered(list(zip(own, around, strict=True)))


def _numbered(colours: Sequence[Hashable]) -> tuple[int, ...]:
    number: dict[Hashable, int] = {}
    return tuple(number.setdefault(colour, len(number)) for colour in colours)
