"""Choosing kernels by measurement, under a numeric gate.

For each (m, n, batch) every candidate first has to agree with the standard iteration in float32;
those that do are timed in turns, and the fixed rule's choice is left only for one that is clearly
faster, so that noise does not decide.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.newton_schulz import iterate_all, normalize
from dmuon.kernels.workspace import Workspace
from dmuon.types import KernelChoice

__all__ = ["ERROR_LIMITS", "Case", "TuneBench", "gate_error", "gate_reference", "tune"]

ERROR_LIMITS = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}
"""Relative Frobenius error that a candidate may have on a Gaussian matrix: several times what each
dtype's safe forms measure, and far below what a wrong result gives."""

ROUNDS = 5
_MARGIN = 0.97  # of the fixed choice's time


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of ``batch`` matrices of ``rows x cols``."""

    rows: int
    cols: int
    batch: int


class TuneBench(Protocol):
    """Runs candidates."""

    def error(self, case: Case, choice: KernelChoice) -> float:
        """Relative Frobenius error of a candidate."""

    def run(self, case: Case, choice: KernelChoice) -> float:
        """Milliseconds of one call. May raise MemoryError."""


def gate_reference(
    case: Case, dtype: torch.dtype, device: torch.device, steps: int = 5, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Normalized Gaussian matrices in ``dtype``, and their result in the standard form in float32
    or wider. All candidates of a case are compared with the same ones.

    Of a batch there are two matrices, so that a kernel that confuses them is found.
    """
    triples = resolve_coefficients("polar_express", steps)
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator(device).manual_seed(seed)
    shape = (min(case.batch, 2), case.rows, case.cols)
    x = torch.empty(shape, dtype=wide, device=device).normal_(generator=generator)
    x = normalize(x, dtype)
    exact = KernelChoice("standard", (), "torch", str(wide).removeprefix("torch."))
    return x, iterate_all([x.to(wide, copy=True)], triples, exact, Workspace(device))[0]


def gate_error(
    case: Case,
    choice: KernelChoice,
    device: torch.device,
    steps: int = 5,
    *,
    reference: tuple[Tensor, Tensor] | None = None,
) -> float:
    """Relative Frobenius error of a choice, inf for a nan; ``reference`` is `gate_reference`'s."""
    dtype: torch.dtype = getattr(torch, choice.dtype)
    x, expected = reference or gate_reference(case, dtype, device, steps)
    triples = resolve_coefficients("polar_express", steps)
    (found,) = iterate_all([x.clone()], triples, choice, Workspace(device))
    error = float((found.to(expected.dtype) - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def tune(
    cases: Sequence[Case],
    bench: TuneBench,
    offered: Callable[[Case], Sequence[KernelChoice]],
    estimate_ms: Callable[[Case], float],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, Case], None] | None = None,
) -> dict[Case, KernelChoice]:
    """The choice for each case, in their order as far as ``budget_s`` seconds reach.

    ``offered`` gives the candidates of a case, the fixed rule's choice first. ``estimate_ms``
    predicts one call in advance; nothing is begun that is not expected to end in time, and what
    is not reached is left out of the result.

    Raises:
        RuntimeError: no candidate of a case computes the right thing.
    """
    deadline = clock() + budget_s
    ratio = 1.0  # of measured to estimated time, in the last case
    chosen: dict[Case, KernelChoice] = {}
    for number, case in enumerate(cases):
        if progress is not None:
            progress(number, case)
        choices = offered(case)
        if len(choices) == 1:
            chosen[case] = choices[0]
            continue
        expected_s = estimate_ms(case) * ratio * len(choices) * (ROUNDS + 3) / 1e3
        if expected_s > deadline - clock():
            continue
        try:
            passing = _passing(case, choices, bench)
            times = _times(case, passing, bench)
        except MemoryError:
            continue
        ratio = min(times.values()) / estimate_ms(case)
        best = min(passing, key=lambda c: (times[c], str(c)))
        first = passing[0]
        chosen[case] = best if times[best] < _MARGIN * times[first] else first
    return chosen


def _passing(case: Case, choices: Sequence[KernelChoice], bench: TuneBench) -> list[KernelChoice]:
    errors = {choice: bench.error(case, choice) for choice in choices}
    passing = [
        choice
        for choice, error in errors.items()
        if error <= ERROR_LIMITS[getattr(torch, choice.dtype)]
    ]
    if not passing:
        raise RuntimeError(
            f"no Newton-Schulz kernel is right for {case.batch} x [{case.rows}, {case.cols}] here: "
            + ", ".join(f"{choice} has error {error:.2g}" for choice, error in errors.items())
        )
    return passing


def _times(
    case: Case, choices: Sequence[KernelChoice], bench: TuneBench
) -> dict[KernelChoice, float]:
    """Median milliseconds of each, in turns, after one run each to warm up."""
    if len(choices) == 1:
        return {choices[0]: bench.run(case, choices[0])}
    runs: dict[KernelChoice, list[float]] = {choice: [] for choice in choices}
    for number in range(ROUNDS + 1):
        for choice in choices:
            ms = bench.run(case, choice)
            if number:
                runs[choice].append(ms)
    return {choice: statistics.median(times) for choice, times in runs.items()}
