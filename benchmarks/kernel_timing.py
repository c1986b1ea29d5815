"""Timing contenders in turns, on a CPU by the clock and on CUDA by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernel_contenders import Contender

__all__ = ["Rounds", "alternate", "matmul_rate", "once", "quartiles", "ratios"]

FEWEST, MOST = 3, 41
_SHORT_MS = 2.0
_MAX_REPEATS = 10
_SIDES = {"cpu": 1024, "cuda": 8192}  # of the product that gives the rate; it fills a GPU

Rounds = dict[str, list[float]]
"""Milliseconds in each round, by contender."""


def once(contender: Contender, device: torch.device, repeats: int = 1) -> float:
    """Milliseconds of one pass: the median of ``repeats``, each on operands written anew."""
    if device.type != "cuda":
        return statistics.median(_on_cpu(contender) for _ in range(repeats))
    passes = [_enqueue(contender) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    return statistics.median(
        sum(start.elapsed_time(end) for start, end in events) for events in passes
    )


def _on_cpu(contender: Contender) -> float:
    total = 0.0
    for piece in contender.pieces:
        piece.refill()
        start = time.perf_counter()
        piece.run()
        total += time.perf_counter() - start
    return 1e3 * total


def _enqueue(contender: Contender) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    events = []
    for piece in contender.pieces:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        piece.refill()
        start.record()
        piece.run()
        end.record()
        events.append((start, end))
    return events


@dataclass(frozen=True, slots=True)
class _Rate:
    """A product whose rate is the machine's limit."""

    run: Callable[[], object]
    flops: float

    def tflops(self, device: torch.device) -> float:
        if device.type != "cuda":
            begin = time.perf_counter()
            self.run()
            return self.flops / (time.perf_counter() - begin) / 1e12
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.run()
        end.record()
        torch.cuda.synchronize(device)
        return self.flops / (start.elapsed_time(end) / 1e3) / 1e12


def matmul_rate(device: torch.device, dtype: torch.dtype) -> _Rate:
    """``rate.tflops(device)`` times one large product of random matrices.

    Zeros would run faster than what is in real ones.
    """
    side = _SIDES[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    rate = _Rate(lambda: torch.mm(a, b, out=out), 2.0 * side**3)
    rate.tflops(device)
    return rate


def alternate(
    contenders: Sequence[Contender],
    device: torch.device,
    rate: _Rate,
    first_ms: Mapping[str, float],
    budget_s: float,
) -> tuple[Rounds, list[float]]:
    """As many rounds as fit in the budget, 3 to 41 (1 where that is three times the budget);
    TFLOP/s of the large product in each round.

    ``first_ms`` are the times of warm-up calls. A contender runs once in a round, in an order
    that is rotated, several times if it is short.
    """
    total_s = sum(max(first_ms[c.name], 0.1) for c in contenders) / 1e3
    repeats = {c.name: _repeats(first_ms[c.name]) for c in contenders}
    total_s += sum((repeats[c.name] - 1) * first_ms[c.name] for c in contenders) / 1e3
    fewest = FEWEST if total_s <= 3 * budget_s else 1
    count = max(fewest, min(MOST, int(budget_s / total_s)))
    times: Rounds = {c.name: [] for c in contenders}
    rates = []
    for number in range(count):
        turn = number % len(contenders)
        rates.append(rate.tflops(device))
        for contender in [*contenders[turn:], *contenders[:turn]]:
            times[contender.name].append(once(contender, device, repeats[contender.name]))
    return times, rates


def _repeats(ms: float) -> int:
    return max(1, min(_MAX_REPEATS, int(_SHORT_MS / max(ms, 1e-3))))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; of one value, that value.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round: a machine that slows down for a while
    slows both."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))
