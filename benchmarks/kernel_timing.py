"""Timing contenders in turns, on a CPU by the clock and on CUDA by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.kernel_contenders import Contender
from benchmarks.results import in_words

__all__ = ["Race", "Rounds", "matmul_rate", "once", "quartiles", "ratios"]

FEWEST, MOST = 3, 41
_SHORT_MS = 2.0
_MAX_REPEATS = 10
_SIDES = {"cpu": 1024, "cuda": 8192}  # of the product that gives the rate; it fills a GPU
# ... and how many make a sample: a GPU runs the first after a pause at another clock than the next.
_PRODUCTS = {"cpu": 1, "cuda": 10}

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
    """Products whose rate is the machine's limit; ``flops`` of all of them."""

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
    """``rate.tflops(device)`` times large products of random matrices, one after the other.

    Zeros would run faster than what is in real ones.
    """
    side, products = _SIDES[device.type], _PRODUCTS[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    rate = _Rate(run, 2.0 * products * side**3)
    rate.tflops(device)
    return rate


@dataclass
class Race:
    """Contenders in turns. What was measured is in ``times`` and ``rates`` (TFLOP/s of the large
    product, one a round) however `run` ends; who raised is in ``failures``, and in no other."""

    times: Rounds = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        contenders: Sequence[Contender],
        device: torch.device,
        rate: _Rate,
        first_ms: Mapping[str, float],
        budget_s: float,
    ) -> None:
        """As many rounds as fit in the budget, 3 to 41 (1 where that is three times the budget).

        ``first_ms`` are the times of warm-up calls. A contender runs once in a round, in an order
        that is rotated, several times if it is short. One that raises takes part no more.
        """
        if not contenders:
            return
        total_s = sum(max(first_ms[c.name], 0.1) for c in contenders) / 1e3
        repeats = {c.name: _repeats(first_ms[c.name]) for c in contenders}
        total_s += sum((repeats[c.name] - 1) * first_ms[c.name] for c in contenders) / 1e3
        fewest = FEWEST if total_s <= 3 * budget_s else 1
        count = max(fewest, min(MOST, int(budget_s / total_s)))
        self.times |= {c.name: [] for c in contenders}
        for number in range(count):
            turn = number % len(contenders)
            self.rates.append(rate.tflops(device))
            for contender in [*contenders[turn:], *contenders[:turn]]:
                if contender.name not in self.failures:
                    self._once(contender, device, repeats[contender.name])

    def _once(self, contender: Contender, device: torch.device, repeats: int) -> None:
        try:
            self.times[contender.name].append(once(contender, device, repeats))
        except Exception as error:  # whatever it is: the others do not depend on it
            self.failures[contender.name] = in_words(error)
            del self.times[contender.name]

    def complete(self) -> tuple[Rounds, list[float]]:
        """The rounds in which everyone ran."""
        count = min(map(len, self.times.values()), default=0)
        return {name: values[:count] for name, values in self.times.items()}, self.rates[:count]


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
