"""Which matrices the kernel benchmark runs, how much arithmetic they are, and what it has to reach.

FLOPs follow `dmuon.kernels.choice.multiplications`: for r = n/m and five steps the standard form
takes (20r + 10) m^3, and with symmetric products at half price 15r + 5; the Gram form with one
restart 6r + 14, and with two 9r + 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmuon.kernels.choice import default_restarts, multiplications, segments
from dmuon.kernels.runner import Shape
from dmuon.types import KernelChoice

__all__ = [
    "CPU_SETS",
    "CUDA_SETS",
    "H200_LAYER_FLOOR_MS",
    "MUSTS",
    "QUICK_SETS",
    "SETS",
    "STEPS",
    "Case",
    "Must",
    "executed_flops",
    "floor_flops",
    "standard_flops",
]

STEPS = 5
_EVERY = tuple(range(1, STEPS))
_MAX_STRIPS, _STRIP_ROWS = 4, 256  # of the backends that multiply by row strips


@dataclass(frozen=True, slots=True)
class Case:
    """What is orthogonalized in one go: stacks ``(matrices, rows, cols)``."""

    name: str
    stacks: tuple[Shape, ...]

    @property
    def count(self) -> int:
        return sum(stack[0] for stack in self.stacks)


def _shape(rows: int, cols: int) -> Case:
    return Case(f"{rows} x {cols}", ((1, rows, cols),))


def _set(layer: str, *stacks: Shape) -> tuple[Case, ...]:
    """Every shape once alone, then all matrices of a layer."""
    return (*(_shape(rows, cols) for _, rows, cols in stacks), Case(layer, stacks))


_VLA = (  # one layer of each of the three towers of the preset "vla"
    *((4, 1152, 1152), (2, 1152, 4304)),  # vision
    *((2, 2048, 2048), (2, 256, 2048), (3, 2048, 16384)),  # language
    *((2, 256, 1024), (2, 1024, 2048), (3, 1024, 4096)),  # action head
)

SETS: dict[str, tuple[Case, ...]] = {
    "sweep": tuple(
        _shape(m, n)
        for m, n in ((256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 1024), (1024, 4096))
    ),
    "odd": (_shape(17, 33), _shape(65, 100), _shape(127, 127), _shape(130, 520)),
    "tiny": tuple(
        Case(f"{b} of {m} x {n}", ((b, m, n),))
        for b, m, n in ((1, 16, 16), (64, 16, 16), (16, 16, 64), (16, 32, 32), (16, 64, 64))
    ),
    "gpt2": _set("gpt2 layer", (1, 768, 768), (1, 768, 2304), (2, 768, 3072)),
    "llama-8b": _set("llama-8b layer", (2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336)),
    "qwen2.5-7b": _set("qwen2.5-7b layer", (2, 3584, 3584), (2, 512, 3584), (3, 3584, 18944)),
    "experts": (Case("128 experts 768 x 2048", ((128, 768, 2048),)),),
    "small-experts": (Case("16 experts 128 x 512", ((16, 128, 512),)),),
    "vla": (Case("vla layers", _VLA),),
}
"""Layers have the shapes of the presets of `dmuon.catalogue.presets`; a weight ``[n, m]`` that is
taller than wide counts as its transpose, which is how it runs."""

CPU_SETS = ("sweep", "odd", "tiny", "gpt2", "small-experts")
"""On a CPU the others take from ten seconds to minutes a call."""
CUDA_SETS = (
    "llama-8b",
    "experts",
    "vla",
    "qwen2.5-7b",
    "small-experts",
    "sweep",
    "gpt2",
    "odd",
    "tiny",
)
"""What the targets are about first: a run that is short of time leaves out the last ones."""
QUICK_SETS = {"cpu": ("odd", "small-experts"), "cuda": ("llama-8b", "experts")}


def _wide(stack: Shape) -> tuple[int, int, int]:
    count, rows, cols = stack
    return count, min(rows, cols), max(rows, cols)


def standard_flops(case: Case) -> float:
    """Of the plain standard form: the convention in which effective rates are given."""
    wide = map(_wide, case.stacks)
    return float(sum(b * m * m * multiplications(m, n, _EVERY, STEPS, False) for b, m, n in wide))


def floor_flops(case: Case, dtype: torch.dtype) -> float:
    """Of the form with the fewest that is safe in ``dtype``, with exactly half of each symmetric
    product computed."""
    total = 0.0
    for b, m, n in map(_wide, case.stacks):
        forms = (_EVERY, default_restarts(dtype, STEPS))
        total += b * m * m * min(multiplications(m, n, form, STEPS, True) for form in forms)
    return total


def executed_flops(stack: Shape, choice: KernelChoice) -> float:
    """What a choice really multiplies on a stack."""
    b, m, n = _wide(stack)
    restarts = choice.restarts if choice.method == "gram" else _EVERY
    share = _symmetric_share(choice, m)
    lengths = [high - low for low, high in segments(restarts, STEPS)]
    columns = sum(2 * n + share * (2 * n + (8 * s - 6) * m) for s in lengths)
    return b * m * m * columns


def _symmetric_share(choice: KernelChoice, m: int) -> float:
    """The part of a symmetric product that a backend computes: (t + 1) / 2t of t block rows."""
    blocks = 1
    if choice.backend in ("torch_strips", "torch_rounded"):
        blocks = max(1, min(_MAX_STRIPS, m // _STRIP_ROWS))
    elif choice.backend == "triton" and choice.tile:
        blocks = -(-m // int(choice.tile.split("x")[0]))
    return (blocks + 1) / (2 * blocks)


# ---- what has to be reached --------------------------------------------------------------

H200_LAYER_FLOOR_MS = 12.72
"""A Llama-8B layer in the Gram form with restart [2] and half of each symmetric product, at the
790 TFLOP/s that a large float16 product reaches on an H200."""


@dataclass(frozen=True, slots=True)
class Must:
    """An upper limit of the time of a contender over that of a baseline, on a CPU."""

    ratio: float
    cases: tuple[str, ...]
    contender: str = "ours"
    baseline: str = "standard"

    def __str__(self) -> str:
        return f"<= {self.ratio:.2f} x {self.baseline}"


_SWEEP = tuple(case.name for case in SETS["sweep"])
MUSTS = (
    Must(0.62, ("1024 x 4096",)),
    Must(0.80, ("256 x 1024",)),
    Must(1.03, _SWEEP),
    Must(1.03, _SWEEP, "function", "standard_function"),
)
