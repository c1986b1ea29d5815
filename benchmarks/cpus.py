"""How long does `newton_schulz` take on other kinds of CPU, against the plain standard form?

``python -m benchmarks.cpus --json benchmarks/results/cpus.json``: a process per kind, one thread
each, with the instructions of that kind alone. Caches and clock stay this machine's, and
instructions that it lacks cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import baselines
from benchmarks.results import Row, command, table, write
from benchmarks.timing import Laps, first_laps, laps, ratio, take_turns
from dmuon.kernels.choice import choose_method, measured_speeds
from dmuon.kernels.newton_schulz import newton_schulz, resolve_coefficients

TRIPLES = resolve_coefficients("polar_express", 5)
STACKS = (
    (1, 128, 128), (1, 256, 256), (1, 512, 512), (1, 1024, 1024),
    (1, 256, 1024), (1, 512, 2048), (1, 1024, 4096), (4, 512, 2048),
)  # fmt: skip
KINDS = {
    "AVX512_CORE_AMX": "avx512",
    "AVX512_CORE_BF16": "avx512",
    "AVX512_CORE": "avx512",
    "AVX2": "avx2",
}
"""The limit of oneDNN, and that of torch and MKL."""
NEEDED = {"AVX512_CORE_AMX": "amx_bf16", "AVX512_CORE_BF16": "avx512_bf16"}
_LONGEST_S = 3.0  # of a plain run: emulated products take minutes


def name_of(stack: Sequence[int]) -> str:
    return " x ".join(map(str, stack[1:] if stack[0] == 1 else stack))


def _turn(run: Callable[[], object], repeats: int) -> Laps:
    """The median milliseconds of some calls, one after the other."""
    return (statistics.median(laps(*[run] * repeats)),)


@torch.no_grad()
def rows_here(stacks: Sequence[Sequence[int]], case_s: float) -> list[Row]:
    """A row for each dtype and stack, in this process; none for what would take too long."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float32):
        rate = math.inf  # elements of products a second
        for b, m, n in sorted(stacks, key=lambda s: s[0] * s[1] ** 2 * s[2]):
            work = b * m * m * n
            if work / rate > _LONGEST_S:
                continue
            x = torch.randn(*((b, m, n) if b > 1 else (m, n)))
            plain = partial(baselines.zeropower, x, dtype, TRIPLES)
            ours = partial(newton_schulz, x, dtype=dtype)
            begin = time.perf_counter()
            speeds = measured_speeds(x.device, dtype, m)
            chosen = time.perf_counter() - begin
            plain()
            ours()
            begin = time.perf_counter()
            plain()
            seconds = time.perf_counter() - begin
            rate = work / seconds
            repeats = max(1, min(10, int(2e-3 / seconds)))
            count = max(3, min(101, int(case_s / (2 * seconds * repeats))))
            turns = {"plain": partial(_turn, plain, repeats), "ours": partial(_turn, ours, repeats)}
            ms = first_laps(take_turns(turns, count))
            rows.append({
                "case": name_of((b, m, n)), "dtype": str(dtype).removeprefix("torch."),
                "form": choose_method(m, n, dtype, 5, speeds), **speeds._asdict(),
                "chosen_in_ms": 1e3 * chosen, "rounds": count,
                "plain_ms": statistics.median(ms["plain"]), "ms": statistics.median(ms["ours"]),
                "ratio": ratio(ms["ours"], ms["plain"]),
            })  # fmt: skip
    return rows


def run(kinds: Sequence[str], stacks: Sequence[Sequence[int]], case_s: float) -> list[Row]:
    """The rows of each kind, from a process of its own."""
    rows: list[Row] = []
    found = torch.cpu.get_capabilities()
    for kind in kinds:
        if not found.get(NEEDED.get(kind, ""), kind not in NEEDED):
            rows.append({"kind": kind, "left_out": "this machine has no such instructions"})
            continue
        limit = KINDS[kind]
        env = os.environ | {
            "ONEDNN_MAX_CPU_ISA": kind,
            "ATEN_CPU_CAPABILITY": limit,
            "MKL_ENABLE_INSTRUCTIONS": limit.upper(),
            "OMP_NUM_THREADS": "1",
        }
        given = ["--here", json.dumps(stacks), "--case-s", str(case_s)]
        made = subprocess.run(
            [sys.executable, "-m", "benchmarks.cpus", *given],
            env=env, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        rows += [{"kind": kind, **row} for row in json.loads(made.stdout)]
    return rows


def page(rows: Sequence[Row]) -> str:
    """A line for each dtype and stack, with the ratio of each kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    ratios = {(r["dtype"], r["case"], r["kind"]): r["ratio"] for r in rows if "ratio" in r}
    lines: list[list[object]] = []
    for dtype, case in dict.fromkeys(key[:2] for key in ratios):
        cells = (ratios.get((dtype, case, kind)) for kind in kinds)
        lines.append([case, dtype, *("" if r is None else f"{r:.2f}" for r in cells)])
    return table(("case", "dtype", *kinds), lines, left=2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, prog="python -m benchmarks.cpus")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--case-s", type=float, default=1.0, help="seconds of rounds a case")
    parser.add_argument("--toy", action="store_true", help="one small case")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here is not None:
        print(json.dumps(rows_here(args.here, args.case_s)))
        return 0
    rows = run(args.kinds, [(2, 40, 64)] if args.toy else STACKS, args.case_s)
    write(args.json, rows)
    print(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
