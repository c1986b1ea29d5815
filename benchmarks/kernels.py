"""How fast is Newton-Schulz here, against the plain iteration and against the machine's limit?

``python -m benchmarks.kernels --json out.json`` times single shapes and whole layers. Contenders
(`benchmarks.kernel_contenders`) take turns within a run; a ratio is the median over rounds of the
ratio within a round. ``--table`` prints the page from such a file; ``--check`` exits with 1 where
dmuon misses a limit (`benchmarks.kernel_cases.MUSTS`, on a CPU only).

``floor_ms``: the fewest multiplications that are possible in the dtype, with exactly half of each
symmetric product, at the rate of a large matrix product that is measured in the same rounds.
``tflops`` counts what the plain standard form would multiply, ``executed_tflops`` what ran.
``error``: relative Frobenius error of the first matrix of each stack, the largest of them, on
Gaussian input, against the standard form in float64 (float32 where that would take too long).

A contender is left out, with the reason in its row, where one call is expected to take longer than
``--max-call-s``: on a CPU without bfloat16 instructions plain bfloat16 products are emulated.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_cases import CPU_SETS, CUDA_SETS, QUICK_SETS, SETS
from benchmarks.kernel_contenders import is_emulated
from benchmarks.kernel_measure import Bench, run_case
from benchmarks.kernel_page import misses, page
from benchmarks.results import Rows, row_options

__all__ = ["main"]


def why_not_compiled(device: torch.device, wanted: bool) -> str:
    """Why `torch.compile` is left out; "" if it takes part."""
    if not wanted:
        return "not asked for (--no-compile, --quick)"
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "torch.compile needs a C++ compiler on a CPU, and none is on the PATH"
    return ""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The document of all rows, which are written when they are measured."""
    device = torch.device(args.device)
    names = args.sets or _default_sets(device, args.quick)
    cases = [(name, case) for name in names for case in SETS[name]]
    compiles = why_not_compiled(device, args.compile and not args.quick)
    case_s = 1.0 if args.quick else args.case_s
    rows = Rows.of(args)
    rows.facts["machine"]["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    rows.facts["machine"]["bf16_emulated"] = is_emulated(torch.bfloat16, device)
    gc.collect()
    gc.disable()
    for dtype in (getattr(torch, name) for name in args.dtype or _default_dtypes(device)):
        for threads in args.threads if device.type == "cpu" else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            bench = Bench(device, dtype, threads, case_s, args.max_call_s, compiles)
            took = bench.tune(rows, [case for _, case in cases], args.tune_s)
            print(f"{bench.dtype_name}, {threads} threads: tuned in {took:.1f} s", flush=True)
            for set_name, case in cases:
                label = f"{case.name}, {bench.dtype_name}, {threads} threads"
                measure = partial(run_case, bench, set_name, case, rows.add)
                if rows.attempt(f"{set_name}: {label}", measure):
                    _progress(label, rows.rows)
                gc.collect()
                if not compiles:
                    torch.compiler.reset()
    gc.enable()
    return rows.document()


def _default_sets(device: torch.device, quick: bool) -> Sequence[str]:
    if quick:
        return QUICK_SETS[device.type]
    return CUDA_SETS if device.type == "cuda" else CPU_SETS


def _default_dtypes(device: torch.device) -> Sequence[str]:
    return ("float16", "bfloat16") if device.type == "cuda" else ("float32", "bfloat16")


def _progress(label: str, rows: Sequence[dict[str, Any]]) -> None:
    last = next(row for row in reversed(rows) if row.get("contender") == "ours")
    if "median_ms" not in last:
        return
    ratio = last.get("ratio_to_standard")
    against = "" if ratio is None else f", {ratio:.2f} x standard"
    print(f"  {label}: ours {last['median_ms']:.3g} ms{against}", flush=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0]
    )
    row_options(found, device="cpu")
    found.add_argument("--dtype", nargs="+", choices=["float16", "bfloat16", "float32"])
    found.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="CPU only")
    found.add_argument("--sets", nargs="+", choices=list(SETS))
    found.add_argument("--quick", action="store_true", help="small sets, one second a case")
    found.add_argument("--case-s", type=float, default=3.0, help="seconds of rounds a case")
    found.add_argument("--max-call-s", type=float, default=5.0, help="longer calls are left out")
    found.add_argument("--tune-s", type=float, default=15.0, help="seconds of tuning a dtype")
    found.add_argument("--no-compile", dest="compile", action="store_false")
    found.add_argument("--table", action="store_true", help="print the page of --json, run nothing")
    found.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    commands = parser()
    args = commands.parse_args(argv)
    if args.table:
        if args.json is None:
            commands.error("--table prints what a file holds: name it with --json")
        with open(args.json) as file:
            found = json.load(file)
    elif args.device == "cuda" and not torch.cuda.is_available():
        commands.error("--device cuda: torch finds no GPU here; use --device cpu")
    else:
        found = run(args)
    print(page(found))
    missed = misses(found)
    for text in missed:
        print(f"missed: {text}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
