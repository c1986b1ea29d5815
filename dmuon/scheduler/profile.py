"""Measuring costs: which prices a plan needs, and timing them within a budget.

What is timed, and on what, is the caller's: a `Workbench` prepares one owner-local update of a
batch and runs it. Nothing here knows a device, a rank or Newton-Schulz.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmuon.scheduler.costs import CostModel, ShapeKey, canonical_key

__all__ = ["PASSES", "Entries", "Want", "Workbench", "batch_sizes", "measure", "wanted"]

Entries = dict[ShapeKey, dict[int, float]]
"""Milliseconds by canonical shape and batch size."""

PASSES = 10  # over everything, the first of which warms up
_MIN_TIMES = 5  # medians are of at least so many, if the budget allows
_STABLE = 0.05  # of the median, between the quartiles


@dataclass(frozen=True, slots=True)
class Want:
    """A price that planning may ask for: a batch of ``batch`` matrices of a (wide) shape.

    ``count`` is the number of such matrices in the model.
    """

    key: ShapeKey
    batch: int
    count: int = 1


class Workbench(Protocol):
    """Runs what is to be timed."""

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether there is memory for it to spare."""

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """Operands for one batch, held by the result: each call is one update, and returns its
        milliseconds. Either may raise MemoryError."""


def batch_sizes(largest: int) -> tuple[int, ...]:
    """The batch sizes to measure: powers of two, and the largest one itself.

    >>> batch_sizes(6), batch_sizes(8)
    ((1, 2, 4, 6), (1, 2, 4, 8))
    """
    powers = [2**i for i in range(largest.bit_length())]
    return tuple(sorted({*powers, largest}))


def wanted(keys: Iterable[ShapeKey], max_batch: int) -> tuple[Want, ...]:
    """What planning for these matrices needs to know, sorted.

    Only equal shapes are batched together, but a shape and its transpose have one price.

    >>> [(w.batch, w.count) for w in wanted([(4, 6, "float32")] * 2 + [(6, 4, "float32")], 16)]
    [(1, 3), (2, 3)]
    """
    largest: dict[ShapeKey, int] = {}
    counts: Counter[ShapeKey] = Counter()
    for key, count in Counter(keys).items():
        wide = canonical_key(key)
        counts[wide] += count
        largest[wide] = max(largest.get(wide, 1), min(count, max_batch))
    return tuple(
        Want(key, batch, counts[key])
        for key in sorted(counts)
        for batch in batch_sizes(largest[key])
    )


def measure(
    wants: Sequence[Want],
    bench: Workbench,
    model: CostModel,
    *,
    budget_s: float,
    known: Entries | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, Want], None] | None = None,
) -> Entries:
    """The median time of each want, as far as ``budget_s`` seconds reach.

    ``model`` estimates in advance what a run will take, and ``known`` (or, without it, the smallest
    batch of one, which then goes first) tells how far off that is here. Next come batches of one,
    what weighs most first, then larger batches. Nothing is begun that is not expected to end in
    time, so at most one run overruns the budget. ``progress`` is told how many wants have been
    dealt with, and the next.

    Everything is run once before anything is run again, up to `PASSES` times, and the median
    counts. So each run finds caches and memory as it does in a training step, where no batch
    follows itself; and since machines are slower for a second now and then, such a second spoils
    one of several numbers of every shape, not all numbers of one. The first pass warms up: it
    counts only for what is not run again.
    """
    session = _Session(bench, model, clock, clock() + budget_s, dict(known or {}))
    todo = _in_order(wants, model)
    if todo and not known:
        probe = min(todo, key=lambda w: (w.batch, model.batch_ms(w.key, w.batch), w.key))
        todo = [probe, *(w for w in todo if w is not probe)]
    done = 0
    for number in range(PASSES):
        for want in todo:
            if progress is not None:
                progress(done, want)
            session.take(want, warm_up=number == 0)
            done += 1
        todo = [w for w in todo if w.batch in session.entries.get(w.key, {})]
        if session.is_steady():
            break
    return session.entries


def _in_order(wants: Sequence[Want], model: CostModel) -> list[Want]:
    def weight(want: Want) -> tuple[int, float, ShapeKey]:
        return (want.batch, -want.count * model.batch_ms(want.key, 1), want.key)

    return sorted(wants, key=weight)


@dataclass(slots=True)
class _Session:
    """Measurements so far, and what they say about the runs to come."""

    bench: Workbench
    model: CostModel
    clock: Callable[[], float]
    deadline: float
    known: Entries
    entries: Entries = field(default_factory=dict)
    times: dict[tuple[ShapeKey, int], list[float]] = field(default_factory=dict)

    def is_steady(self) -> bool:
        """Whether the runs so far agree on every time."""
        return bool(self.times) and all(
            len(times) >= _MIN_TIMES and _stable(times) for times in self.times.values()
        )

    def take(self, want: Want, warm_up: bool) -> None:
        """Run one batch if the time and the memory allow it."""
        left = self.deadline - self.clock()
        if self.expected_s(want) > left or not self.bench.fits(want.key, want.batch):
            return
        try:
            ms = self.bench.prepare(want.key, want.batch)()
        except MemoryError:
            return
        times = [ms]
        if not warm_up:
            times = self.times.setdefault((want.key, want.batch), [])
            times.append(ms)
        # No clock is better than this, and files are for people too.
        self.entries.setdefault(want.key, {})[want.batch] = float(f"{statistics.median(times):.6g}")

    def expected_s(self, want: Want) -> float:
        """Seconds of one run: the model's, corrected by the most similar measurement."""
        guess = self.model.batch_ms(want.key, want.batch)
        of_shape = [(b, ms) for b, ms in self.of_shape(want.key).items()]
        if of_shape:
            near, ms = min(of_shape, key=lambda pair: (abs(math.log(pair[0] / want.batch)), pair))
            return guess * ms / self.model.batch_ms(want.key, near) / 1e3
        return guess * self.nearest_ratio(guess) / 1e3

    def of_shape(self, key: ShapeKey) -> dict[int, float]:
        return self.known.get(key, {}) | self.entries.get(key, {})

    def nearest_ratio(self, guess: float) -> float:
        """Measured over modelled time, where the modelled time is nearest to ``guess``."""
        pairs = [
            (self.model.batch_ms(key, batch), ms)
            for key in self.known | self.entries
            for batch, ms in self.of_shape(key).items()
        ]
        if not pairs:
            return 1.0
        modelled, ms = min(pairs, key=lambda pair: (abs(math.log(pair[0] / guess)), pair))
        return ms / modelled


def _stable(times: Sequence[float]) -> bool:
    ordered = sorted(times)
    n = len(ordered)
    spread = ordered[(3 * n) // 4] - ordered[n // 4]
    return spread <= _STABLE * statistics.median(ordered)
