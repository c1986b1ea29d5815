"""How far is each kernel from the exact polynomial, and is it within what its form allows?

``python -m benchmarks.gpu_accuracy --json out.json`` runs 256 x 1024 matrices whose singular values
are log-spaced from 1e-6 to 1 (then divided by the Frobenius norm, as Muon does), and Gaussian ones.
``error`` is relative, in Frobenius norm; the exact result is the polynomial of the singular values
in float64. ``expected`` are errors of the forms measured on a CPU with results rounded to the dtype
after each product; a kernel that sums in float32 should not exceed them. cuBLAS may add up parts
in half precision where torch allows it (``allow_fp16_reduced_precision_reduction``, which it does
by default): ``--both-ways`` runs half precision with that allowed and not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import Rows, command, row_options, table
from dmuon.kernels.choice import offered_backends, offered_tiles
from dmuon.kernels.newton_schulz import iterate_with, normalize, resolve_coefficients
from dmuon.types import KernelChoice

TRIPLES = resolve_coefficients("polar_express", 5)
ROWS, COLS = 256, 1024
SMALL = (96, 384)  # for the backend that takes few rows
# Half precision: inputs of another generator, of which three seeds differ by 2% on a CPU. What is
# not rounded after each product depends on the order in which a machine adds: by 1.6 between two
# CPUs.
SLACK = {"float16": 1.25, "bfloat16": 1.25, "float32": 4.0, "float64": 4.0}

EXPECTED: dict[tuple[str, str], dict[str, float]] = {
    ("log-spaced", "float64"): {"standard": 5e-14, "gram[2]": 2e-13},
    ("log-spaced", "float32"): {"standard": 7e-6, "gram[2]": 6e-5},
    ("log-spaced", "float16"): {"standard": 1.6e-2, "gram[2]": 3.5e-2, "gram[1,3]": 1.7e-2},
    ("log-spaced", "bfloat16"): {"standard": 0.13, "gram[1,3]": 0.13},
    ("gaussian", "float16"): {"standard": 1.1e-3, "gram[2]": 3.8e-3},
}
"""Relative errors of 256 x 1024 matrices, by input and dtype, and form."""


def inputs(rows: int, cols: int, seed: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, normalized matrix, exact result), float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, _ = torch.linalg.qr(random(rows, rows))
    right, _ = torch.linalg.qr(random(cols, rows))
    values = torch.logspace(-6, 0, rows, dtype=torch.float64)
    values /= values.norm()
    yield "log-spaced", (left * values) @ right.mT, (left * _polynomial(values)) @ right.mT
    x = normalize(random(rows, cols), torch.float64)
    left, values, right_t = torch.linalg.svd(x, full_matrices=False)
    yield "gaussian", x, (left * _polynomial(values)) @ right_t


def _polynomial(values: Tensor) -> Tensor:
    for a, b, c in TRIPLES:
        values = a * values + b * values**3 + c * values**5
    return values


def measure(rows: Rows, device: torch.device, *, both_ways: bool) -> None:
    """A row for each input, dtype, form and backend that can run here."""
    for name, x, exact, choice, expected in _cases(device):
        is_half = choice.dtype in ("float16", "bfloat16")
        for reduced in (True, False) if both_ways and is_half else (True,):
            label = f"{name} {x.shape[0]} x {x.shape[1]} {choice}" + " full sums" * (not reduced)
            _reduce_in_half_precision(reduced)
            row = partial(_row, name, x, exact, choice, expected, device)
            rows.attempt(label, row, reduced=reduced)
            _reduce_in_half_precision(True)


def _cases(
    device: torch.device,
) -> Iterator[tuple[str, Tensor, Tensor, KernelChoice, float | KernelChoice]]:
    """Input, matrix, exact result, kernel, and the error that is expected or whose."""
    for name, x, exact in inputs(ROWS, COLS):
        for dtype, forms in ((d, f) for (n, d), f in EXPECTED.items() if n == name):
            for form, expected in forms.items():
                for choice in _choices(form, dtype, device, ROWS):
                    yield name, x, exact, choice, expected
    for name, x, exact in inputs(*SMALL):
        for dtype, form in product(("float16", "bfloat16"), ("standard", "gram[1,3]")):
            plain = KernelChoice.parse(f"{form}/torch/{dtype}")
            for choice in _choices(form, dtype, device, SMALL[0]):
                if choice.backend == "triton_small":  # against plain products, where it serves
                    yield name, x, exact, choice, plain


def _reduce_in_half_precision(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


def _choices(form: str, dtype: str, device: torch.device, rows: int) -> Iterator[KernelChoice]:
    number = getattr(torch, dtype)
    for backend in offered_backends(device, number, rows):
        for tile in offered_tiles(backend, device, number):
            yield replace(KernelChoice.parse(f"{form}/{backend}/{dtype}"), tile=tile)


def _error(x: Tensor, exact: Tensor, choice: KernelChoice, device: torch.device) -> float:
    operand = x.to(device, getattr(torch, choice.dtype))[None].clone()
    found = iterate_with(operand, TRIPLES, choice)[0]
    return float((found.cpu().double() - exact).norm() / exact.norm())


def _row(
    name: str,
    x: Tensor,
    exact: Tensor,
    choice: KernelChoice,
    expected: float | KernelChoice,
    device: torch.device,
) -> dict[str, Any]:
    error = _error(x, exact, choice, device)
    if isinstance(expected, KernelChoice):
        expected = _error(x, exact, expected, device)
    return {
        "input": name,
        "shape": list(x.shape),
        "kernel": str(choice),
        "error": error,
        "expected": expected,
        "passed": error <= SLACK[choice.dtype] * expected,  # NaN does not pass
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if why := row.get("failure") or row.get("left_out"):
            lines.append((row["name"], "", "", f"**{why}**", "", ""))
            continue
        kernel = f"`{row['kernel']}`" + ", full sums" * (not row["reduced"])
        shape = " x ".join(map(str, row["shape"]))
        verdict = "pass" if row["passed"] else "**fail**"
        errors = (f"{row[key]:.2g}" for key in ("error", "expected"))
        lines.append((row["input"], shape, kernel, verdict, *errors))
    return table(("input", "shape", "kernel", "", "error", "expected"), lines, left=4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, prog="python -m benchmarks.gpu_accuracy")
    row_options(parser, device="cuda")
    parser.add_argument("--both-ways", action="store_true", help="see above")
    args = parser.parse_args(argv)
    rows = Rows.of(args)
    measure(rows, torch.device(args.device), both_ways=args.both_ways)
    print(page(rows.rows))
    return 1 if rows.failed else 0


if __name__ == "__main__":
    sys.exit(main())
