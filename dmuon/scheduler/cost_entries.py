"""The entries of a price list: shapes, batch sizes, and what is a valid time or kernel for them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import KernelChoice, PlanError

__all__ = [
    "ORIGINS",
    "ShapeKey",
    "SquareKey",
    "canonical_key",
    "check_entry",
    "check_kernels",
    "check_squares",
    "interpolated",
    "merge_slowest",
    "square_key",
]

ShapeKey = tuple[int, int, str]  # rows, cols, dtype of the parameter
SquareKey = tuple[int, str]  # the short side m, dtype of the parameter

ORIGINS = ("measured", "interpolated", "estimated", "analytic", "given")
"""How a price came about; "estimated" is scaled from what was measured, beyond its range."""


def canonical_key(key: ShapeKey) -> ShapeKey:
    """The wide form of a shape: a tall matrix runs the same products, from the right.

    >>> canonical_key((6, 4, "float32"))
    (4, 6, 'float32')
    """
    rows, cols, dtype = key
    return (min(rows, cols), max(rows, cols), dtype)


def square_key(key: ShapeKey) -> SquareKey:
    """What the m x m part of an update depends on, however long the long side is.

    >>> square_key((6, 4, "float32"))
    (4, 'float32')
    """
    rows, cols, dtype = key
    return min(rows, cols), dtype


# ---- what is valid -----------------------------------------------------------------------


_MOST_SIZE = 1 << 40  # of a side or a batch: its price still fits a float


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_SIZE


def _check_times(source: str, key: object, by_batch: object) -> None:
    if not isinstance(by_batch, Mapping):
        raise PlanError(f"{source}: {key} needs a mapping from batch size to ms: {by_batch!r}")
    for batch, ms in by_batch.items():
        number = isinstance(ms, (int, float)) and not isinstance(ms, bool)
        if not _is_size(batch) or not number or not 0 <= ms < math.inf:
            raise PlanError(
                f"{source}: {key} needs batch sizes >= 1 and finite milliseconds >= 0, found "
                f"{batch!r}: {ms!r}"
            )


def check_shape(source: str, key: object) -> None:
    """Raise PlanError unless ``key`` is a shape and a dtype."""
    rows, cols, dtype = key if isinstance(key, tuple) and len(key) == 3 else (0, 0, "")
    if not (_is_size(rows) and _is_size(cols) and dtype in ITEM_SIZE):
        raise PlanError(
            f"{source}: a shape must be (rows, cols, dtype) with dtype one of "
            f"{', '.join(ITEM_SIZE)}, found {key!r}"
        )


def check_entry(source: str, key: object, by_batch: object) -> None:
    """Raise PlanError unless ``by_batch`` maps batch sizes of a shape to finite times >= 0."""
    check_shape(source, key)
    _check_times(source, key, by_batch)


def check_kernels(source: str, kernels: Mapping[ShapeKey, Mapping[int, str]]) -> None:
    """Raise PlanError unless ``kernels`` names kernels by canonical shape and batch size."""
    for key, names in kernels.items():
        check_shape(source, key)
        if canonical_key(key) != key:
            raise PlanError(
                f"{source}: kernels must be given by (short side, long side, dtype), found {key!r}"
            )
        if not isinstance(names, Mapping):
            raise PlanError(f"{source}: {key} needs a mapping from batch size to kernel: {names!r}")
        for batch, name in names.items():
            if not _is_size(batch) or not _is_kernel(name):
                raise PlanError(
                    f"{source}: {key} needs batch sizes >= 1 and kernels such as "
                    f"'gram[2]/torch/float16', found {batch!r}: {name!r}"
                )


def _is_kernel(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        return name == "" or bool(KernelChoice.parse(name))
    except ValueError:
        return False


def check_squares(source: str, squares: Mapping[SquareKey, Mapping[int, float]]) -> None:
    """Raise PlanError unless ``squares`` maps (m, dtype) and batch sizes to finite times >= 0."""
    for key, by_batch in squares.items():
        m, dtype = key if isinstance(key, tuple) and len(key) == 2 else (0, "")
        if not _is_size(m) or dtype not in ITEM_SIZE:
            raise PlanError(
                f"{source}: squares must be given by (short side, dtype) with dtype one of "
                f"{', '.join(ITEM_SIZE)}, found {key!r}"
            )
        _check_times(source, key, by_batch)


# ---- between and beyond ------------------------------------------------------------------


def interpolated(known: Mapping[int, float], batch: int) -> tuple[float, str] | None:
    """The time of a batch and its origin, by ``known`` times of batch sizes in ascending order.

    ``origin`` is "" for a known size. Between two sizes the total is linear; beyond the largest
    each matrix costs what it costs there. None below the smallest.
    """
    if batch in known:
        return known[batch], ""
    sizes = list(known)
    at = bisect_left(sizes, batch)
    if at == len(sizes):
        return known[sizes[-1]] / sizes[-1] * batch, "estimated"
    if at == 0:
        return None
    low, high = sizes[at - 1], sizes[at]
    return _between(known[low], known[high], (batch - low) / (high - low)), "interpolated"


def _between(first: float, last: float, part: float) -> float:
    """``first`` at part 0, ``last`` at part 1, never outside of the two."""
    ms = first * (1 - part) + last * part
    return min(max(ms, min(first, last)), max(first, last))  # rounding may leave them


def merge_slowest(
    parts: Sequence[Mapping[ShapeKey, Mapping[int, float]]],
) -> dict[ShapeKey, dict[int, float]]:
    """Entries of all parts; where several have one, the largest time counts.

    >>> merge_slowest([{(4, 6, "float32"): {1: 2.5}}, {(4, 6, "float32"): {1: 2.0, 2: 3.0}}])
    {(4, 6, 'float32'): {1: 2.5, 2: 3.0}}
    """
    merged: dict[ShapeKey, dict[int, float]] = {}
    for part in parts:
        for key, by_batch in part.items():
            into = merged.setdefault(key, {})
            for batch, ms in by_batch.items():
                into[batch] = max(ms, into.get(batch, ms))
    return merged
