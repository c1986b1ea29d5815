"""Why no plan is faster: prices that show it, checked by integer arithmetic without any solver.

Give k matrices of kind s on one owner the worth ``w_s(k) = v_s * k + u_s * C_s(k)`` with any values
``v_s`` and any ``u_s >= 0``. However the ``d_s`` matrices are shared out, their worth adds up to at
least ``w_s(d_s)``: the first term is linear, and C is subadditive, for putting two owners' batches
on one owner never costs more than both. An owner of class c that is busy for less than T holds at
most some worth ``sigma_c(T)``: a knapsack, solved exactly or rounded in favour of the owner. If all
owners together hold less than that,

    sum_c n_c * sigma_c(T)  <  sum_s w_s(d_s),

then no plan has a makespan below T. A linear program finds good ``v`` and ``u`` (its duals;
Farley 1990 gives the bound for a master program that has not converged). Under a memory cap a byte
may have a price too: matrices are then worth that much less, and every owner is credited with its
free bytes.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dmuon.scheduler.knapsack import Frontier, Option, frontier
from dmuon.scheduler.plan import Dual
from dmuon.scheduler.problem import UNLIMITED, OwnerClass, Problem

__all__ = [
    "Dual",
    "bound_of",
    "byte_units",
    "dual_options",
    "most_worth",
    "scaled",
    "simple_bound",
    "work_tables",
    "worth_tables",
]

Ints = npt.NDArray[np.int64]

_WORTH = 1e17  # of everything, about: exact in 64 bits, and fine enough
_MOST_WORTH = 1 << 61
_WORK = 10**11  # units of all work, about
_MOST_WORK = 16_000_000  # pairs formed by the knapsacks behind one bound: some seconds at most
_LEAST_WORK = 2_000  # for each option of a knapsack
_MOST_SIMPLE = 8  # duals of one kind, or of one set of owners
_BYTE_STEPS = 1000  # units of the bytes of the smallest matrix, about


def scaled(
    problem: Problem, values: Sequence[float], works: Sequence[float], byte_price: float
) -> Dual:
    """A dual of integers from a linear program's; any rounding leaves a valid proof."""
    tables = work_tables(problem)
    worth = sum(
        abs(v) * kind.count + max(u, 0.0) * float(table[-1])
        for v, u, kind, table in zip(values, works, problem.kinds, tables, strict=True)
    )
    scale = _WORTH / max(worth, 1e-300)
    return Dual(
        tuple(round(v * scale) for v in values),
        tuple(max(0, round(u * scale)) for u in works),
        max(0, round(byte_price * scale)),
    )


def work_tables(problem: Problem) -> list[Ints]:
    """``C_s(k)`` for k = 0 .. d_s, in units rounded up: still subadditive."""
    total = sum(int(kind.ticks[-1]) for kind in problem.kinds)
    unit = max(1, total // _WORK)
    return [-(-kind.ticks // unit) for kind in problem.kinds]


def byte_units(problem: Problem) -> tuple[list[int], list[int]]:
    """(bytes of one matrix of each kind, room of each class), in units rounded down.

    Whatever fits in bytes fits in rounded units too.
    """
    unit = max(1, min((k.nbytes for k in problem.kinds if k.nbytes), default=1) // _BYTE_STEPS)
    return [k.nbytes // unit for k in problem.kinds], [c.room // unit for c in problem.classes]


def worth_tables(problem: Problem, dual: Dual) -> list[Ints]:
    """``w_s(k)`` for k = 0 .. d_s, less the price of their bytes.

    Raises:
        ValueError: the dual is of another problem, or too large to be computed with.
    """
    _check_size(problem, dual)
    sizes, _ = byte_units(problem)
    tables = work_tables(problem)
    return [
        (dual.values[s] - dual.byte_price * sizes[s]) * np.arange(kind.count + 1)
        + dual.works[s] * tables[s]
        for s, kind in enumerate(problem.kinds)
    ]


def dual_options(problem: Problem, dual: Dual, allowed: Sequence[bool]) -> list[Option]:
    """The knapsack choices of an owner: one option for each of the ``allowed`` kinds."""
    tables = worth_tables(problem, dual)
    return [Option(kind.ticks, tables[s]) for s, kind in enumerate(problem.kinds) if allowed[s]]


def most_worth(problem: Problem, dual: Dual, limit: int) -> list[int]:
    """By class, at least the worth that an owner holds who is busy for at most ``limit``."""
    made = _holdings(problem, dual, limit, None)
    return [
        int(_holds(*made[c.allowed], np.array([limit - c.fixed], np.int64))[0])
        for c in problem.classes
    ]


def _holds(points: Frontier, density: float, free: Ints) -> Ints:
    """The most worth within each of these ticks."""
    most = points.value[np.searchsorted(points.cost, free, side="right") - 1]
    if density < math.inf:
        dense = density * free
        sure = dense < _WORTH  # else a float says too little
        most[sure] = np.minimum(most[sure], dense[sure].astype(np.int64) + 1)
    return most


def _likeness(problem: Problem, dual: Dual) -> list[int]:
    """A number for each kind, equal for those of which ``dual`` offers an owner equal choices."""
    number: dict[Hashable, int] = {}
    return [
        number.setdefault(
            (kind.batch_ticks, kind.count, kind.nbytes, dual.values[s], dual.works[s]), len(number)
        )
        for s, kind in enumerate(problem.kinds)
    ]


def _holdings(
    problem: Problem,
    dual: Dual,
    limit: int,
    frontiers: Mapping[tuple[bool, ...], Frontier] | None,
) -> dict[tuple[bool, ...], tuple[Frontier, float]]:
    """By allowed kinds: the worth that an owner holds within a load, and the most a tick brings.

    All knapsacks together form at most about ``_MOST_WORK`` pairs. Where many owners are not alike,
    each has fewer of them, and where that is too few to be of use, density alone bounds.
    """
    every = dual_options(problem, dual, (True,) * len(problem.kinds))
    likeness = _likeness(problem, dual)
    worthy = [bool((option.value > 0).any()) for option in every]
    density = [_density([option]) for option in every]
    wanted: dict[tuple[bool, ...], Frontier | None] = dict(frontiers or {})
    for c in problem.classes:
        wanted.setdefault(c.allowed, None)
    kinds_of = {allowed: [s for s, yes in enumerate(allowed) if yes] for allowed in wanted}
    like_of = {allowed: tuple(likeness[s] for s in kinds_of[allowed]) for allowed in wanted}
    first = {like_of[allowed]: allowed for allowed in reversed(wanted)}
    stages = sum(worthy[s] for allowed in first.values() for s in kinds_of[allowed])
    made: dict[Hashable, tuple[Frontier, float]] = {}
    left = _MOST_WORK
    for like, allowed in sorted(first.items(), key=lambda item: len(item[0])):
        some = [s for s in kinds_of[allowed] if worthy[s]]
        known = wanted[allowed]
        if known is None:
            share = left * len(some) // max(stages, 1)
            known = _bounding([every[s] for s in some], limit, share)
            left -= known.work
        stages -= len(some)
        most = max((density[s] for s in kinds_of[allowed]), default=0.0)
        made[like] = known, most
    return {allowed: made[like_of[allowed]] for allowed in wanted}


def _bounding(worthy: Sequence[Option], limit: int, work: int) -> Frontier:
    """A frontier of at most about so much work; where that is too little, all worth for nothing."""
    if work < _LEAST_WORK * len(worthy):
        everything = sum(int(option.value.max()) for option in worthy)
        return Frontier(np.zeros(1, np.int64), np.array([everything], np.int64), False)
    return frontier(worthy, limit, bounding=True, max_work=work)


def bound_of(
    problem: Problem,
    dual: Dual,
    limit: int,
    frontiers: Mapping[tuple[bool, ...], Frontier] | None = None,
) -> int:
    """The makespan in ticks that ``dual`` proves, at most ``limit``.

    ``frontiers`` maps the allowed kinds of a class to a bounding frontier up to ``limit``, if the
    caller has them already; a coarse one proves less.
    """
    _check_size(problem, dual)
    made = _holdings(problem, dual, limit, frontiers)
    tables = work_tables(problem)
    worth = sum(v * kind.count for v, kind in zip(dual.values, problem.kinds, strict=True))
    worth += sum(u * int(table[-1]) for u, table in zip(dual.works, tables, strict=True))
    if dual.byte_price and any(c.room >= UNLIMITED for c in problem.classes):
        return 0  # free bytes without end have no price
    if dual.byte_price:
        _, rooms = byte_units(problem)
        worth -= sum(
            c.size * dual.byte_price * room for c, room in zip(problem.classes, rooms, strict=True)
        )
    classes: dict[tuple[bool, ...], list[OwnerClass]] = defaultdict(list)
    for c in problem.classes:
        classes[c.allowed].append(c)
    owners = [
        (*made[allowed], np.array([c.fixed for c in some], np.int64), [c.size for c in some])
        for allowed, some in classes.items()
    ]

    def holds(ticks: int) -> bool:
        """Whether owners busy for at most ``ticks`` could hold everything, as far as this shows."""
        total = 0
        for points, density, fixed, sizes in owners:
            free = ticks - fixed
            if (free < 0).any():
                return False
            total += sum(map(operator.mul, _holds(points, density, free).tolist(), sizes))
        return total >= worth

    return _first(holds, limit)


def _check_size(problem: Problem, dual: Dual) -> None:
    """Raise ValueError if a dual is of another problem, or if the worth of everything, in parts or
    whole, leaves 64 bits: knapsacks count in 64 bits and would wrap around unnoticed.
    """
    if not len(dual.values) == len(dual.works) == len(problem.kinds):
        raise ValueError(f"{len(dual.values)} values for {len(problem.kinds)} kinds of matrices")
    if min(dual.works, default=0) < 0 or dual.byte_price < 0:
        raise ValueError("the value of work and the price of bytes must be >= 0")
    sizes, _ = byte_units(problem)
    most = sum(
        (abs(v) + dual.byte_price * size) * kind.count + u * int(table[-1])
        for v, u, size, kind, table in zip(
            dual.values, dual.works, sizes, problem.kinds, work_tables(problem), strict=True
        )
    )
    if most >= _MOST_WORTH:
        raise ValueError(f"duals are too large to be checked: {most} of at most {_MOST_WORTH}")


def _density(options: Sequence[Option]) -> float:
    """The most worth that a tick of any choice brings, rounded up.

    No owner holds more than that times its ticks. It bounds what merged points of a frontier
    overstate where an owner takes very many matrices.
    """
    most = 0.0
    for option in options:
        cost, value = option.cost[1:], option.value[1:]
        if (value[cost == 0] > 0).any():
            return math.inf
        some = cost > 0
        if some.any():
            most = max(most, float((value[some] / cost[some]).max()))
    return most * (1 + 1e-12)


def _first(holds: Callable[[int], bool], limit: int) -> int:
    """The least value up to ``limit`` that holds, ``limit`` if none below it does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def simple_bound(problem: Problem, limit: int) -> tuple[int, Dual]:
    """The best bound that needs no solver, at most ``limit``: work shared out evenly, or one kind.

    All work is shared by all owners, and the work that only some owners may do by those. One kind
    alone counts matrices (the pigeonhole principle; for more owners than matrices, the costliest
    single matrix); only the few most promising kinds are looked at.
    """
    kinds = len(problem.kinds)
    owners = [
        frozenset(c for c, o in enumerate(problem.classes) if o.allowed[s]) for s in range(kinds)
    ]
    none = (0,) * kinds
    duals = [Dual(none, (1,) * kinds)]
    some = sorted(dict.fromkeys(owners), key=lambda mine: -_work_a_rank(problem, owners, mine))
    duals += [
        Dual(none, tuple(int(mine <= those) for mine in owners))
        for those in some[:_MOST_SIMPLE]
        if len(those) < len(problem.classes)
    ]
    ranked = sorted(range(kinds), key=lambda s: -_pigeonhole(problem, owners[s], s))
    duals += [Dual((*none[:s], 1, *none[s + 1 :]), none) for s in ranked[:_MOST_SIMPLE]]
    found = [(bound_of(problem, dual, limit), dual) for dual in duals]
    return max(found, key=lambda f: f[0])


def _work_a_rank(
    problem: Problem, owners: Sequence[frozenset[int]], those: frozenset[int]
) -> float:
    work = sum(
        int(kind.ticks[-1]) for kind, mine in zip(problem.kinds, owners, strict=True)
        if mine <= those
    )  # fmt: skip
    return work / sum(problem.classes[c].size for c in those)


def _pigeonhole(problem: Problem, owners: frozenset[int], s: int) -> int:
    """About what a kind alone proves: some owner has as many of it as the mean."""
    ranks = sum(problem.classes[c].size for c in owners)
    kind = problem.kinds[s]
    least = min(problem.classes[c].fixed for c in owners)
    return least + int(kind.ticks[-(-kind.count // ranks) :].min())
