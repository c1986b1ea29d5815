"""How fast is Newton-Schulz here, against the plain iteration and against the machine's limit?

``python -m benchmarks.kernels --json out.json`` times single shapes and whole layers. Contenders
(`benchmarks.kernel_contenders`) take turns within a run (`benchmarks.timing`). ``--table`` prints
the page from such a file; ``--check`` exits with 1 where dmuon misses a limit (`MUSTS`, on a CPU
only).

``floor_ms``: the fewest multiplications that are possible in the dtype, with exactly half of each
symmetric product, at the rate of large matrix products that are measured in the same rounds, on a
GPU ten in a row: a sustained rate, not that of one cold product.
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
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_contenders import (
    DEFAULT_SETS,
    MAX_BATCH,
    QUICK_SETS,
    SETS,
    STEPS,
    Case,
    Contender,
    Kernels,
    contenders,
    floor_flops,
    is_emulated,
    kernel_key,
    standard_flops,
    standard_form,
)
from benchmarks.results import Rows, command, dtype_name, in_words, row_options, table
from benchmarks.timing import Laps, Times, laps, ratio, spread, take_turns
from dmuon import measure
from dmuon.config import KernelOptions
from dmuon.kernels.choice import candidates, fixed_choice
from dmuon.scheduler.costs import ANALYTIC_DEVICES, CostTable, analytic_class

_FEWEST, _MOST = 3, 41  # rounds
_SHORT_MS, _MOST_REPEATS = 2.0, 10  # of a contender in a round
_FLOAT64_LIMIT = {"cpu": 5e9, "cuda": 1e11}  # m^2 n of the largest matrix that float64 checks
_WARM_UPS = 3  # on CUDA: kernels compile in the first, graphs are captured in the second
# Side and number of the products that give the rate. A large one fills a GPU, which runs the first
# after a pause at another clock than the next.
RATE_PRODUCTS = {"cpu": (1024, 1), "cuda": (8192, 10)}

Row = dict[str, Any]


# ---- tuning --------------------------------------------------------------------------------


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

    def tune(self, rows: Rows, cases: Sequence[Case], budget_s: float) -> None:
        """Choose kernels as `dedicate_params` does, for the first cases first.

        A row a shape and batch says what was chosen. The fixed rule chooses what is expected to end
        after ``budget_s`` seconds, and where tuning failed.
        """
        begin = time.perf_counter()
        counts: dict[tuple[tuple[int, int, str], int], int] = {}
        for case in cases:
            for count, *shape in case.stacks:
                for batch in batches_of(count, self.device):
                    one = kernel_key(*shape), batch
                    counts[one] = max(count, counts.get(one, 0))
        for (key, batch), count in counts.items():
            name = f"tune {batch} x [{key[0]}, {key[1]}], {dtype_name(self.dtype)}, {self.threads}"
            known = [r["kernel"] for r in rows.rows if r["name"] == name and "kernel" in r]
            chosen = self.kernels.setdefault(key, {})
            if known:  # by a process before this one
                chosen[batch] = known[0]
                continue
            offered = len(candidates(*key[:2], self.dtype, self.device, STEPS))
            flops = standard_flops(Case("", ((batch, *key[:2]),)))
            expected_s = offered * self.tune_pace[0] * max(1.0, flops / self.tune_pace[1])
            left_s = budget_s - (time.perf_counter() - begin)
            tuned = partial(self._tuned, measure.Case(key, batch, count), left_s, offered, flops)
            if expected_s > left_s or not rows.attempt(name, tuned):
                rule = fixed_choice(*key[:2], self.dtype, self.device, STEPS)
                chosen[batch] = str(rule)
                print(f"  {name}: the fixed rule's, {rule}", flush=True)

    @torch.no_grad()
    def _tuned(self, case: measure.Case, budget_s: float, offered: int, flops: float) -> Row:
        begin = time.perf_counter()
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        prices = ANALYTIC_DEVICES[analytic_class(self.device.type, gpu)]
        found = measure.choose_kernels(
            [case],
            {},
            measure.OwnerTimer(self.device, self.dtype, momentum=False),
            measure.Pace(CostTable("benchmark", device=prices, ns_steps=STEPS)),
            KernelOptions(tune_budget_s=budget_s),
        )
        took = time.perf_counter() - begin
        if found and offered > 1:
            self.tune_pace = took / offered, flops
        rule = fixed_choice(*case.key[:2], self.dtype, self.device, STEPS)
        kernel = found.get(case, str(rule))
        self.kernels[case.key][case.batch] = kernel
        return {"kernel": kernel, "tuned": bool(found), "offered": offered, "seconds": took}


def batches_of(count: int, device: torch.device) -> set[int]:
    """The sizes in which a stack of ``count`` runs."""
    sizes = {min(count, MAX_BATCH)} | ({count % MAX_BATCH} if count > MAX_BATCH else set())
    return (sizes | ({count} if device.type == "cuda" else set())) - {0}


# ---- one case ------------------------------------------------------------------------------


def turn(contender: Contender, device: torch.device, repeats: int = 1) -> Laps:
    """Milliseconds of one pass: the median of ``repeats``, each on operands written anew."""
    actions = [f for piece in contender.pieces for f in (piece.refill, piece.run)]
    times = laps(*actions * repeats, device=device)
    count = len(actions)
    passes = (times[i : i + count] for i in range(0, len(times), count))
    return (statistics.median(sum(one[1::2]) for one in passes),)


def rate_turn(device: torch.device, dtype: torch.dtype) -> Callable[[], Laps]:
    """Times large products of random matrices, one after the other: zeros would run faster."""
    side, products = RATE_PRODUCTS[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    return lambda: laps(run, device=device)


def skip_reason(bench: Bench, case: Case, name: str) -> str:
    """Why a contender is left out; "" if it runs."""
    if name.startswith("compiled") and bench.compiles:
        return bench.compiles
    if name in ("compiled", "gram") and is_emulated(bench.dtype, bench.device):
        products = f"{dtype_name(bench.dtype)} products"
        return f"its {products} are emulated here as those of standard are"
    expected_s = bench.pace.get(name, 0.0) * standard_flops(case)
    if expected_s > bench.max_call_s:
        return (
            f"one call would take about {expected_s:.0f} s, by the cases before; the limit is "
            f"{bench.max_call_s:g} s (--max-call-s)"
        )
    return ""


@torch.no_grad()
def run_case(bench: Bench, set_name: str, case: Case, add: Callable[[Row], None]) -> None:
    """Measure one case; a row for each contender, whatever becomes of it and of the others."""
    sources = case.sources(bench.device)
    references = references_of(case, bench.dtype, bench.device)
    base = {
        "set": set_name,
        "case": case.name,
        "stacks": [list(stack) for stack in case.stacks],
        "dtype": dtype_name(bench.dtype),
        "threads": bench.threads,
    }
    rows: dict[str, Row] = {}
    taking_part: dict[str, Contender] = {}
    first_ms: dict[str, float] = {}
    times: Times = {}
    failures: dict[str, Exception] = {}
    try:
        for name, build in contenders(case, sources, bench.dtype, bench.kernels):
            row = rows[name] = {**base, "contender": name}
            if reason := skip_reason(bench, case, name):
                row["left_out"] = reason
                continue
            try:
                contender, ms, peak = _warm(build, bench.device)
                row["error"] = error_of(contender, references)
            except Exception as failure:  # whatever it is: the others do not depend on it
                is_torch = name.startswith("compiled")  # which has many reasons not to compile
                row["left_out" if is_torch else "failure"] = in_words(failure)
                continue
            # The fastest so far: small cases are slow for their size.
            pace = ms / 1e3 / standard_flops(case)
            bench.pace[name] = min(pace, bench.pace.get(name, pace))
            row |= {"kernel": contender.kernel, "workspace_bytes": contender.workspace_bytes}
            row["peak_bytes"] = peak
            taking_part[name], first_ms[name] = contender, ms
        if taking_part:
            # Where half precision is emulated it is so through float32.
            rate_dtype = torch.float32 if is_emulated(bench.dtype, bench.device) else bench.dtype
            turns = {"rate": rate_turn(bench.device, rate_dtype)}
            repeats = {
                name: max(1, min(_MOST_REPEATS, int(_SHORT_MS / max(ms, 1e-3))))
                for name, ms in first_ms.items()
            }
            for name, contender in taking_part.items():
                turns[name] = partial(turn, contender, bench.device, repeats[name])
            round_s = sum(max(repeats[name] * ms, 0.1) for name, ms in first_ms.items()) / 1e3
            take_turns(turns, rounds(round_s, bench.case_s), times=times, failures=failures)
    finally:  # also where this is interrupted
        complete = min(map(len, times.values()), default=0)
        ms_of = {name: [one[0] for one in found[:complete]] for name, found in times.items()}
        for name, row in rows.items():
            if name in failures:
                row["failure"] = in_words(failures[name])
            elif name in taking_part and complete:
                row |= _numbers(taking_part[name], case, bench, ms_of)
            elif name in taking_part:
                row["left_out"] = "interrupted before it was timed"
            for why in ("left_out", "failure"):
                if why in row:
                    print(f"  {case.name}: {name} {why.replace('_', ' ')}: {row[why]}", flush=True)
            add(row)


def rounds(round_s: float, budget_s: float) -> int:
    """As many as fit in the budget, 3 to 41; 1 where a round takes three times the budget."""
    fewest = _FEWEST if round_s <= 3 * budget_s else 1
    return max(fewest, min(_MOST, int(budget_s / round_s)))


def _warm(
    build: Callable[[], Contender], device: torch.device
) -> tuple[Contender, float, int | None]:
    """A contender that has run, the milliseconds of a call, and on CUDA the bytes that it took."""
    if device.type != "cuda":
        contender = build()
        (ms,) = turn(contender, device)
        # A second call where it is short or compiled: the first sets up threads, and compiles.
        again = ms < 1e3 or contender.name.startswith("compiled")
        return contender, turn(contender, device)[0] if again else ms, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contender = build()
    for _ in range(_WARM_UPS):
        (ms,) = turn(contender, device)
    return contender, ms, torch.cuda.max_memory_allocated(device) - before


@lru_cache(maxsize=64)
def references_of(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The standard form of the first matrix of each stack, rounded to ``dtype`` before it."""
    found = []
    for source in case.sources(device):
        m, n = sorted(source.shape[1:])
        is_small = m * m * n <= _FLOAT64_LIMIT[source.device.type]
        wide = torch.float64 if is_small else torch.float32
        found.append(standard_form(source[0].to(dtype).to(wide)))
    return found


def error_of(contender: Contender, references: Sequence[Tensor]) -> float:
    """The largest relative error of the first matrices; infinite where one is not a number."""
    worst = 0.0
    for piece in contender.pieces:
        piece.refill()
        result = piece.run()
        if piece.stack is not None:
            expected = references[piece.stack]
            error = float((result[0].to(expected.dtype) - expected).norm() / expected.norm())
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _numbers(contender: Contender, case: Case, bench: Bench, ms: dict[str, list[float]]) -> Row:
    mine = ms[contender.name]
    side, products = RATE_PRODUCTS[bench.device.type]
    rates = [2.0 * products * side**3 / one / 1e9 for one in ms["rate"]]  # TFLOP/s
    floors = [floor_flops(case, bench.dtype) / rate / 1e9 for rate in rates]
    row: Row = {"rounds": len(mine), **spread(mine, tail=25)}
    row["tflops"] = standard_flops(case) / row["median_ms"] / 1e9
    row["rate_tflops"] = statistics.median(rates)
    row["floor_ms"] = statistics.median(floors)
    row["ratio_to_floor"] = ratio(mine, floors)
    if contender.executed is not None:
        row["executed_tflops"] = contender.executed / row["median_ms"] / 1e9
    for other in ("standard", "compiled", "compiled_bfloat16", "standard_function"):
        if other in ms:
            row[f"ratio_to_{other}"] = ratio(mine, ms[other])
    return row


# ---- limits --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Must:
    """An upper limit of the time of a contender over that of a baseline, on a CPU."""

    limit: float
    cases: tuple[str, ...]
    contender: str = "ours"
    baseline: str = "standard"


_SWEEP = tuple(case.name for case in SETS["sweep"])
MUSTS = (
    Must(0.62, ("1024 x 4096",)),
    Must(0.80, ("256 x 1024",)),
    Must(1.03, _SWEEP),
    Must(1.03, _SWEEP, "function", "standard_function"),
)


def verdicts(found: dict[str, Any]) -> Iterator[tuple[Row, Must, float | None, str]]:
    """(row, limit, ratio, "kept", "missed", "shown" or "emulated") of dmuon's rows with a limit.

    Limits are for bfloat16, and for the dtype that dmuon takes on this CPU: float32 where bfloat16
    is emulated. Elsewhere float32 is shown beside it. An emulated baseline says nothing.
    """
    machine = found["machine"]
    for row in found["rows"] if machine["device"] == "cpu" else ():
        if row.get("set") != "sweep" or row["dtype"] == "float16" or "left_out" in row:
            continue
        is_half = row["dtype"] == "bfloat16"
        for must in MUSTS:
            if row["contender"] != must.contender or row["case"] not in must.cases:
                continue
            measured = row.get(f"ratio_to_{must.baseline}")
            verdict = "shown"
            if measured is None or (is_half and machine["bf16_emulated"]):
                verdict = "emulated"
            elif is_half or machine["bf16_emulated"]:
                verdict = "kept" if measured <= must.limit else "missed"
            yield row, must, measured, verdict


def misses(found: dict[str, Any]) -> list[str]:
    """The limits that are not kept, in words."""
    return [
        f"{row['case']}, {row['dtype']}, {row['threads']} threads: {must.contender} takes "
        f"{measured:.2f} x {must.baseline}, must be <= {must.limit:.2f} x {must.baseline}"
        for row, must, measured, verdict in verdicts(found)
        if verdict == "missed"
    ]


# ---- the page ------------------------------------------------------------------------------

_EMULATED = (
    "**This CPU has no bfloat16 instructions.** torch emulates plain bfloat16 products, tens of "
    "times slower than float32 ones; dmuon multiplies in float32 and rounds each result "
    "(`torch_rounded`). A ratio of the two is no gain of a kernel. What dmuon runs on such a CPU "
    "by itself is float32: those are the rows to read."
)
_SUMMARY = ("case", "dtype", "threads", "standard ms", "ours ms", "ours / standard",
            "compiled / standard", "gram / standard", "ours / floor", "error of ours",
            "function / its standard")  # fmt: skip
_DETAILS = ("case", "contender", "ms (quartiles)", "/ standard", "/ compiled", "TFLOP/s",
            "executed", "/ floor", "error", "MB")  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """Hardware, limits, a line a case, and a table for each dtype, number of threads and set."""
    machine, versions = found["machine"], found["versions"]
    where = machine.get("gpu") or f"{machine['cpu']} ({machine['cpu_capability']})"
    told = [found["date"], where, f"torch {versions['torch']}", f"Python {versions['python']}"]
    told += [f"Triton {versions['triton']}"] * (machine["device"] == "cuda")
    blocks = [", ".join(told), *[_EMULATED] * machine["bf16_emulated"]]
    limits = [
        (row["case"], row["dtype"], row["threads"], must.contender, _in(".2f", measured),
         f"<= {must.limit:.2f} x {must.baseline}", verdict)
        for row, must, measured, verdict in verdicts(found)
    ]  # fmt: skip
    if limits:
        blocks.append(table(("case", "dtype", "threads", "", "ratio", "limit", ""), limits, left=2))
    # Without the rows that say what was tuned, or which case ended before its first row.
    rows = [row for row in found["rows"] if "contender" in row]
    cases: dict[tuple[str, str, int], dict[str, Row]] = {}
    sets: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        sets.setdefault((row["set"], row["dtype"], row["threads"]), []).append(row)
        key = row["case"], row["dtype"], row["threads"]
        cases.setdefault(key, {})[row["contender"]] = row
    lines = [(*key, *_summary(by_name)) for key, by_name in cases.items()]
    blocks.append(table(_SUMMARY, [line for line in lines if line[4]], left=2))
    for (name, dtype, threads), mine in sets.items():
        blocks.append(f"**{name}, {dtype}, {threads} thread{'s' * (threads > 1)}**")
        measured_rows = [row for row in mine if "median_ms" in row]
        blocks.append(table(_DETAILS, map(_details, measured_rows), left=2))
        kernels = [r for r in measured_rows if r["contender"] == "ours"]
        notes = [f"- {r['case']}: `{r['kernel']}`" for r in kernels]
        notes += dict.fromkeys(
            f"- {r['contender']} of {r['case']} left out: {r[why]}"
            for r in mine
            for why in ("left_out", "failure")
            if why in r
        )
        blocks.append("\n".join(notes))
    if found["left_out"]:
        blocks.append("Not in this run: " + "; ".join(found["left_out"]) + ".")
    return "\n\n".join(block for block in blocks if block)


def _in(form: str, value: float | None) -> str:
    return "" if value is None else format(value, form)


def _summary(by_name: dict[str, Row]) -> tuple[str, ...]:
    def of(contender: str, key: str, form: str = ".2f") -> str:
        return _in(form, by_name.get(contender, {}).get(key))

    return (
        of("standard", "median_ms", ".3g") or "left out",
        of("ours", "median_ms", ".3g"),
        *(of(name, "ratio_to_standard") for name in ("ours", "compiled", "gram")),
        of("ours", "ratio_to_floor"),
        of("ours", "error", ".1e"),
        of("function", "ratio_to_standard_function"),
    )


def _details(row: Row) -> tuple[str, ...]:
    memory = row["peak_bytes"] if row["peak_bytes"] is not None else row["workspace_bytes"]
    numbers = (("ratio_to_standard", ".2f"), ("ratio_to_compiled", ".2f"), ("tflops", ".3g"),
               ("executed_tflops", ".3g"), ("ratio_to_floor", ".2f"), ("error", ".1e"))  # fmt: skip
    return (
        row["case"],
        row["contender"],
        "{median_ms:.3g} ({p25_ms:.3g}-{p75_ms:.3g})".format(**row),
        *(_in(form, row.get(key)) for key, form in numbers),
        _in(".3g", None if memory is None else memory / 1e6),
    )


# ---- the command ---------------------------------------------------------------------------


def why_not_compiled(device: torch.device, asked: bool) -> str:
    """Why `torch.compile` is left out; "" if it takes part."""
    if not asked:
        return "not asked for (--no-compile, --quick)"
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "torch.compile needs a C++ compiler on a CPU, and none is on the PATH"
    return ""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The document of all rows, which are written when they are measured."""
    device = torch.device(args.device)
    on_cpu = device.type == "cpu"
    names = args.sets or (QUICK_SETS if args.quick else DEFAULT_SETS)[device.type]
    cases = [(name, case) for name in names for case in SETS[name]]
    compiles = why_not_compiled(device, args.compile and not args.quick)
    rows = Rows.of(args)
    rows.facts["machine"]["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    rows.facts["machine"]["bf16_emulated"] = is_emulated(torch.bfloat16, device)
    for dtype in args.dtype or (("float32" if on_cpu else "float16"), "bfloat16"):
        for threads in args.threads if on_cpu else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            case_s = 1.0 if args.quick else args.case_s
            bench = Bench(
                rows.device, getattr(torch, dtype), threads, case_s, args.max_call_s, compiles
            )
            bench.tune(rows, [case for _, case in cases], args.tune_s)
            for set_name, case in cases:
                label = f"{case.name}, {dtype}, {threads} threads"
                one = partial(run_case, bench, set_name, case, rows.add)
                if rows.attempt(f"{set_name}: {label}", one):
                    ours = next(r for r in reversed(rows.rows) if r.get("contender") == "ours")
                    against = _in(".2f", ours.get("ratio_to_standard"))
                    ms = _in(".3g", ours.get("median_ms"))
                    print(f"  {label}: ours {ms} ms, {against} x standard", flush=True)
                gc.collect()
                if not compiles:
                    torch.compiler.reset()
    return rows.document()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, prog="python -m benchmarks.kernels")
    row_options(parser, device="cpu")
    parser.add_argument("--dtype", nargs="+", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="CPU only")
    parser.add_argument("--sets", nargs="+", choices=list(SETS))
    parser.add_argument("--quick", action="store_true", help="small sets, one second a case")
    parser.add_argument("--case-s", type=float, default=3.0, help="seconds of rounds a case")
    parser.add_argument("--max-call-s", type=float, default=5.0, help="longer calls are left out")
    parser.add_argument("--tune-s", type=float, default=15.0, help="seconds of tuning a dtype")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--table", action="store_true", help="print the page of --json, run nothing"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    args = parser.parse_args(argv)
    if args.table:
        if args.json is None:
            parser.error("--table prints what a file holds: name it with --json")
        with open(args.json) as file:
            found = json.load(file)
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    else:
        found = run(args)
    print(page(found))
    missed = misses(found)
    for text in missed:
        print(f"missed: {text}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
