"""Measuring one case of the kernel benchmark: who takes part, how long, how exact, how large."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_contenders as field_of
from benchmarks.kernel_cases import STEPS, Case, floor_flops, standard_flops
from benchmarks.kernel_contenders import Contender, Kernels, is_emulated, kernel_key, standard_form
from benchmarks.kernel_timing import Race, Rounds, matmul_rate, once, quartiles, ratios
from benchmarks.results import Rows, in_words
from dmuon import measure
from dmuon.config import KernelOptions, PlannerOptions
from dmuon.kernels.choice import candidates, fixed_choice
from dmuon.kernels.newton_schulz import normalize
from dmuon.measure import choose_kernels
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable, ShapeKey, analytic_class

__all__ = [
    "Bench",
    "batches_of",
    "error_of",
    "references_of",
    "run_case",
    "skip_reason",
    "sources_of",
]

_MAX_BATCH = PlannerOptions().max_batch
_FLOAT64_LIMIT = {"cpu": 5e9, "cuda": 1e11}  # m^2 n of the largest matrix that float64 checks
_WARM_UPS = 3  # on CUDA: kernels compile in the first, graphs are captured in the second


@dataclass(slots=True)
class Bench:
    """One dtype with one number of threads."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    case_s: float
    max_call_s: float
    compiles: str  # "" or why torch.compile is left out
    kernels: Kernels = field(default_factory=dict)
    # What a candidate of the last tuned batch took, compiling and checking it included, in seconds,
    # and the FLOPs of a call.
    tune_pace: tuple[float, float] = (0.0, 1.0)
    # Seconds per FLOP, by contender: what a call will take.
    pace: dict[str, float] = field(default_factory=dict)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def tune(self, rows: Rows, cases: Sequence[Case], budget_s: float) -> float:
        """Choose kernels as `dedicate_params` does, for the first cases first; the seconds it took.

        A row a shape and batch says what was chosen. The fixed rule chooses what is expected to end
        after ``budget_s`` seconds, and where tuning failed.
        """
        counts: dict[tuple[ShapeKey, int], int] = {}
        for case in cases:
            for count, *shape in case.stacks:
                for batch in batches_of(count, self.device):
                    one = kernel_key(*shape), batch
                    counts[one] = max(count, counts.get(one, 0))
        begin = time.perf_counter()
        for (key, batch), count in counts.items():
            want = measure.Case(key, batch, count)
            name = f"tune {batch} x [{key[0]}, {key[1]}], {self.dtype_name}, {self.threads}"
            known = [r["kernel"] for r in rows.rows if r["name"] == name and "kernel" in r]
            if known:  # by a process before this one
                self.kernels.setdefault(key, {})[batch] = known[0]
                continue
            left_s = budget_s - (time.perf_counter() - begin)
            expected_s = self._tuning_s(want)
            if expected_s > left_s or not rows.attempt(name, partial(self._tuned, want, left_s)):
                self._choose(want, 0.0)
                print(f"  {name}: the fixed rule's, {self.kernels[key][batch]}", flush=True)
        return time.perf_counter() - begin

    def _tuning_s(self, want: measure.Case) -> float:
        seconds, flops = self.tune_pace
        return self._offered(want) * seconds * max(1.0, self._flops(want) / flops)

    def _flops(self, want: measure.Case) -> float:
        return standard_flops(Case("", ((want.batch, *want.key[:2]),)))

    def _offered(self, want: measure.Case) -> int:
        return len(candidates(*want.key[:2], self.dtype, self.device, STEPS))

    def _tuned(self, want: measure.Case, budget_s: float) -> dict[str, Any]:
        begin = time.perf_counter()
        is_tuned = self._choose(want, budget_s)
        took = time.perf_counter() - begin
        offered = self._offered(want)
        if is_tuned and offered > 1:
            self.tune_pace = took / offered, self._flops(want)
        kernel = self.kernels[want.key][want.batch]
        return {"kernel": kernel, "tuned": is_tuned, "offered": offered, "seconds": took}

    def _choose(self, want: measure.Case, budget_s: float) -> bool:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        prices = ANALYTIC_DEVICES[analytic_class(self.device.type, name)]
        with torch.no_grad():
            chosen = choose_kernels(
                [want],
                {},
                measure.OwnerTimer(self.device, self.dtype, momentum=False),
                measure.Pace(CostTable("benchmark", device=prices, ns_steps=STEPS)),
                KernelOptions(tune_budget_s=budget_s),
            )
        rule = fixed_choice(*want.key[:2], self.dtype, self.device, STEPS)
        self.kernels.setdefault(want.key, {})[want.batch] = chosen.get(want, str(rule))
        return bool(chosen)


def batches_of(count: int, device: torch.device) -> set[int]:
    """The sizes in which a stack of ``count`` runs."""
    sizes = {min(count, _MAX_BATCH)} | ({count % _MAX_BATCH} if count > _MAX_BATCH else set())
    return (sizes | ({count} if device.type == "cuda" else set())) - {0}


# ---- one case ----------------------------------------------------------------------------


def sources_of(case: Case, device: torch.device) -> list[Tensor]:
    """Normalized Gaussian stacks in float32, the same in each run."""
    generator = torch.Generator(device).manual_seed(0)
    stacks = (torch.empty(s, device=device).normal_(generator=generator) for s in case.stacks)
    return [normalize(stack, torch.float32) for stack in stacks]


def _builders(bench: Bench, case: Case, sources: list[Tensor]) -> Iterator[tuple[str, Any]]:
    """Name and constructor of every contender of a case, the baseline first."""
    dtype, on_cuda = bench.dtype, bench.device.type == "cuda"
    yield "standard", lambda: field_of.standard(sources, dtype)
    if on_cuda and case.count > 1:
        yield "standard_batched", lambda: field_of.standard_batched(sources, dtype)
    yield "compiled", lambda: field_of.compiled(sources, dtype, "compiled")
    if on_cuda and dtype is not torch.bfloat16:
        name = "compiled_bfloat16"
        yield name, lambda: field_of.compiled(sources, torch.bfloat16, name)
    yield "gram", lambda: field_of.gram(sources, dtype)
    if not on_cuda:
        yield "standard_function", lambda: field_of.standard_function(sources, dtype)
        yield "function", lambda: field_of.function(sources, dtype)

    def ours(name: str, max_batch: int = _MAX_BATCH) -> Contender:
        return field_of.ours(case, sources, dtype, bench.kernels, max_batch=max_batch, name=name)

    yield "ours", lambda: ours("ours")
    if on_cuda and max(stack[0] for stack in case.stacks) > _MAX_BATCH:
        yield "ours_whole", lambda: ours("ours_whole", case.count)


def skip_reason(bench: Bench, case: Case, name: str) -> str:
    """Why a contender is left out; "" if it runs."""
    if name.startswith("compiled") and bench.compiles:
        return bench.compiles
    if name in ("compiled", "gram") and is_emulated(bench.dtype, bench.device):
        return f"its {bench.dtype_name} products are emulated here as those of standard are"
    expected_s = bench.pace.get(name, 0.0) * standard_flops(case)
    if expected_s > bench.max_call_s:
        return (
            f"one call would take about {expected_s:.0f} s, by the cases before; the limit is "
            f"{bench.max_call_s:g} s (--max-call-s)"
        )
    return ""


@torch.no_grad()
def run_case(
    bench: Bench, set_name: str, case: Case, add: Callable[[dict[str, Any]], None]
) -> None:
    """Measure one case; a row for each contender, whatever becomes of it and of the others."""
    sources = sources_of(case, bench.device)
    references = references_of(case, bench.dtype, bench.device)
    base = {
        "set": set_name,
        "case": case.name,
        "stacks": [list(stack) for stack in case.stacks],
        "dtype": bench.dtype_name,
        "threads": bench.threads,
    }
    field: list[Contender] = []
    rows: dict[str, dict[str, Any]] = {}
    first_ms: dict[str, float] = {}
    race = Race()
    try:
        for name, build in _builders(bench, case, sources):
            row = rows[name] = {**base, "contender": name}
            reason = skip_reason(bench, case, name)
            if reason:
                row["left_out"] = reason
                print(f"  {case.name}, {bench.dtype_name}: {name} left out: {reason}", flush=True)
                continue
            try:
                contender, ms, peak = _warm(build, bench.device)
                error = error_of(contender, references)
            except Exception as failure:  # whatever it is: the others do not depend on it
                is_torch = name.startswith("compiled")  # which has many reasons not to compile
                row["left_out" if is_torch else "failure"] = in_words(failure)
                continue
            # The fastest so far: small cases are slow for their size.
            pace = ms / 1e3 / standard_flops(case)
            bench.pace[name] = min(pace, bench.pace.get(name, pace))
            first_ms[name] = ms
            row |= {"kernel": contender.kernel, "workspace_bytes": contender.workspace_bytes}
            row |= {"peak_bytes": peak, "error": error}
            field.append(contender)
        rate = matmul_rate(bench.device, _rate_dtype(bench))
        race.run(field, bench.device, rate, first_ms, bench.case_s)
    finally:  # also where this is interrupted
        times, rates = race.complete()
        for contender in field:
            row = rows[contender.name]
            if contender.name in race.failures:
                row["failure"] = race.failures[contender.name]
            elif rates:
                row |= _numbers(contender, case, bench.dtype, times, rates)
            else:
                row["left_out"] = "interrupted before it was timed"
        for row in rows.values():
            if "failure" in row:
                print(f"  {case.name}: {row['contender']} FAILED, {row['failure']}", flush=True)
            add(row)


def _rate_dtype(bench: Bench) -> torch.dtype:
    """What the floor's products run in: float32 where half precision is emulated through it."""
    return torch.float32 if is_emulated(bench.dtype, bench.device) else bench.dtype


def _warm(build: Any, device: torch.device) -> tuple[Contender, float, int | None]:
    """A contender that has run, the milliseconds of a call, and on CUDA the bytes that it took."""
    if device.type != "cuda":
        contender = build()
        ms = once(contender, device)
        # A second call where it is short or compiled: the first sets up threads, and compiles.
        again = ms < 1e3 or contender.name.startswith("compiled")
        return contender, once(contender, device) if again else ms, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contender = build()
    for _ in range(_WARM_UPS):
        ms = once(contender, device)
    return contender, ms, torch.cuda.max_memory_allocated(device) - before


@lru_cache(maxsize=64)
def references_of(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The standard form of the first matrix of each stack, rounded to ``dtype`` before it."""
    found = []
    for source in sources_of(case, device):
        m, n = sorted(source.shape[1:])
        is_small = m * m * n <= _FLOAT64_LIMIT[source.device.type]
        wide = torch.float64 if is_small else torch.float32
        found.append(standard_form(source[0].to(dtype).to(wide)))
    return found


def error_of(contender: Contender, references: Sequence[Tensor]) -> float:
    worst = 0.0
    for piece in contender.pieces:
        piece.refill()
        results = piece.run()
        for stack, (which, index) in piece.firsts.items():
            expected = references[stack]
            found = results[which][index].to(expected.dtype)
            error = float((found - expected).norm() / expected.norm())
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _numbers(
    contender: Contender, case: Case, dtype: torch.dtype, times: Rounds, rates: list[float]
) -> dict[str, Any]:
    mine = times[contender.name]
    low, middle, high = quartiles(mine)
    floors = [floor_flops(case, dtype) / (rate * 1e12) * 1e3 for rate in rates]
    numbers: dict[str, Any] = {
        "rounds": len(mine),
        "median_ms": middle,
        "p25_ms": low,
        "p75_ms": high,
        "tflops": standard_flops(case) / middle / 1e9,
        "rate_tflops": statistics.median(rates),
        "floor_ms": statistics.median(floors),
        "ratio_to_floor": ratios(mine, floors),
    }
    if contender.executed is not None:
        numbers["executed_tflops"] = contender.executed / middle / 1e9
    for other in ("standard", "compiled", "compiled_bfloat16", "standard_function"):
        if other in times:
            numbers[f"ratio_to_{other}"] = ratios(mine, times[other])
    return numbers
