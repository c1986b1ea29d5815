"""How fast is Newton-Schulz here, against the plain iteration and against the machine's limit?

``python -m benchmarks.kernels --json out.json`` (docs/benchmarks.md). Contenders that the page does
not name:

==================  ============================================================================
standard_batched    standard on whole stacks (CUDA, where there are stacks)
compiled_bfloat16   compiled, in that dtype (CUDA)
function            `dmuon.newton_schulz` as a user calls it (CPU); beside it
                    standard_function: standard on whole stacks, with the same normalization
ours_whole          ours, but a stack in one call, however large (CUDA)
==================  ============================================================================

``tflops`` counts what the plain standard form would multiply. ``error``: relative, in Frobenius
norm, of the first matrix of each stack, against the standard form in float64; the largest of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks import baselines, rivals
from benchmarks.results import Row, Rows, command, in_words, row_options, table
from benchmarks.timing import Laps, first_laps, laps, ratio, spread, take_turns
from dmuon import measure
from dmuon.config import KernelOptions
from dmuon.kernels.choice import (
    default_restarts,
    fixed_choice,
    fixed_speeds,
    multiplications,
    offered_tiles,
)
from dmuon.kernels.newton_schulz import newton_schulz, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.scheduler.costs import MAX_BATCH, CostTable, nearest_device
from dmuon.scheduler.specs import dtype_name
from dmuon.tensors import normalize
from dmuon.types import KernelChoice

STEPS = 5
TRIPLES = resolve_coefficients("polar_express", STEPS)

Stack = tuple[int, int, int]  # matrices, rows, cols
Kernels = dict[Stack, str]  # of a batch of wide matrices


# ---- what is orthogonalized ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What is orthogonalized in one go."""

    name: str
    stacks: tuple[Stack, ...]

    def sources(self, device: torch.device) -> list[Tensor]:
        """Normalized Gaussian stacks in float32, the same in each run."""
        generator = torch.Generator(device).manual_seed(0)
        stacks = (torch.empty(s, device=device).normal_(generator=generator) for s in self.stacks)
        return [normalize(stack, torch.float32) for stack in stacks]


def _alone(*shapes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(f"{rows} x {cols}", ((1, rows, cols),)) for rows, cols in shapes)


def _layer(name: str, *stacks: Stack) -> tuple[Case, ...]:
    """All matrices of a layer, then every shape once alone."""
    return (Case(f"{name} layer", stacks), *_alone(*((m, n) for _, m, n in stacks)))


_LLAMA = _layer("llama-8b", (2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336))


SETS: dict[str, tuple[Case, ...]] = {
    "judged": (_LLAMA[0], Case("128 experts 768 x 2048", ((128, 768, 2048),))),
    "llama-8b": _LLAMA[1:],
    # Shapes that other projects report too.
    "rivals": tuple(Case(f"{b} of {m} x {n}", ((b, m, n),)) for b, m, n in (
        (2, 4096, 4096), (3, 4096, 14336), (2, 1024, 4096), (16, 768, 2048))),
    # One layer of each of the three towers of the preset "vla": vision, language, action head.
    "vla": (Case("vla layers", (
        (4, 1152, 1152), (2, 1152, 4304), (2, 2048, 2048), (2, 256, 2048), (3, 2048, 16384),
        (2, 256, 1024), (2, 1024, 2048), (3, 1024, 4096))),),
    "qwen2.5-7b": _layer("qwen2.5-7b", (2, 3584, 3584), (2, 512, 3584), (3, 3584, 18944)),
    "small-experts": (Case("16 experts 128 x 512", ((16, 128, 512),)),),
    "sweep": _alone((256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 1024), (1024, 4096)),
    "gpt2": _layer("gpt2", (1, 768, 768), (1, 768, 2304), (2, 768, 3072)),
    "odd": _alone((17, 33), (65, 100), (127, 127), (130, 520)),
    "tiny": tuple(
        Case(f"{b} of {m} x {n}", ((b, m, n),))
        for b, m, n in ((1, 16, 16), (64, 16, 16), (16, 16, 64), (16, 32, 32), (16, 64, 64))
    ),
    "toy": (Case("toy", ((3, 24, 40),)),),
}  # fmt: skip
"""Layers have the shapes of the presets of `dmuon.catalogue`; a weight ``[n, m]`` that is
taller than wide counts as its transpose, which is how it runs. What the targets are about comes
first: a run that is short of time leaves out the last ones."""

DEFAULT_SETS = {
    "cuda": tuple(name for name in SETS if name not in ("rivals", "toy")),
    # The others take from ten seconds to minutes a call.
    "cpu": ("sweep", "odd", "tiny", "gpt2", "small-experts"),
}


def _wide(stack: Stack) -> Stack:
    return stack[0], min(stack[1:]), max(stack[1:])


_EVERY = tuple(range(1, STEPS))  # restarts of the standard form


def _flops(stack: Stack, restarts: tuple[int, ...], *, symmetric: bool) -> int:
    b, m, n = _wide(stack)
    return b * m * m * multiplications(m, n, restarts, STEPS, symmetric)


def standard_flops(case: Case) -> int:
    """Of the plain standard form, (20 n/m + 10) m^3: effective rates are given for it."""
    return sum(_flops(stack, _EVERY, symmetric=False) for stack in case.stacks)


def floor_flops(case: Case, dtype: torch.dtype) -> int:
    """Of the form with the fewest that is safe in ``dtype``, with exactly half of each symmetric
    product computed."""
    forms = _EVERY, default_restarts(dtype, STEPS)
    return sum(min(_flops(s, form, symmetric=True) for form in forms) for s in case.stacks)


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has no instructions for products of a dtype."""
    return fixed_speeds(device, dtype).backend == "torch_rounded"


# ---- who takes part ------------------------------------------------------------------------


class Piece(NamedTuple):
    """One call. ``refill`` writes its operand and is not timed; ``run`` returns a batch, whose
    first matrix is that of ``stack`` in the case (None: of none)."""

    refill: Callable[[], object]
    run: Callable[[], Tensor]
    stack: int | None


class Contender(NamedTuple):
    """Runs a case in pieces, one after the other. ``about`` goes into its row."""

    pieces: Sequence[Piece]
    about: Mapping[str, Any] = MappingProxyType({})


def standard_form(x: Tensor) -> Tensor:
    return baselines.standard_form(x, TRIPLES)


def _standard_function(x: Tensor, dtype: torch.dtype) -> Tensor:
    if len(x) == 1:
        return baselines.zeropower(x[0], dtype, TRIPLES)[None]
    return baselines.zeropower(x, dtype, TRIPLES)


def _one_by_one(form: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Results are dropped but for the first."""
    first = form(x[0])
    for one in x[1:]:
        form(one)
    return first[None]


def on_stacks(
    sources: Sequence[Tensor], dtype: torch.dtype, run: Callable[[Tensor], Tensor]
) -> Contender:
    """``run`` on a copy of every stack in ``dtype``."""
    copies = [source.to(dtype, copy=True) for source in sources]
    pieces = [
        Piece(partial(x.copy_, source), partial(run, x), stack)
        for stack, (x, source) in enumerate(zip(copies, sources))
    ]
    return Contender(pieces)


def compiled(sources: Sequence[Tensor], dtype: torch.dtype) -> Contender:
    # A full graph: too many recompilations are an error and not an eager run.
    form = torch.compile(standard_form, fullgraph=True, dynamic=False)
    return on_stacks(sources, dtype, partial(_one_by_one, form))


def ours(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    kernel_of: Callable[[Stack], str],
    max_batch: int = MAX_BATCH,
    *,
    graphs: bool | None = None,
) -> Contender:
    """The calls that an owner makes for a case."""
    runner = Orthogonalizer(sources[0].device, dtype, KernelOptions(cuda_graphs=graphs))
    calls: list[tuple[Call, Tensor, int | None]] = []
    for stack, source in enumerate(sources):
        for number, part in enumerate(source.split(max_batch)):
            shape = len(part), source.shape[1], source.shape[2]
            call = Call(shape, TRIPLES, kernel_of(_wide(shape)))
            calls.append((call, part, None if number else stack))
    runner.reserve(dict.fromkeys(call for call, _, _ in calls))
    pieces = []
    for call, part, of in calls:
        operand = runner.operand(call)
        run = partial(runner.run, call, operand)
        pieces.append(Piece(partial(operand.copy_, part), run, of))
    kernels = {call.shape: str(runner.choice(call)) for call, _, _ in calls}
    text = "; ".join(f"{b} x [{m}, {n}]: {kernel}" for (b, m, n), kernel in kernels.items())
    return Contender(pieces, {"kernel": text, "workspace_bytes": runner.nbytes})


def rival(sources: Sequence[Tensor], name: str) -> Contender:
    """Another project's iteration, whose results are not looked at."""
    pieces = []
    dtype, make = rivals.RIVALS[name]
    for source in sources:
        x = source.to(dtype, copy=True)
        run = rivals.prepared(make, x)
        pieces.append(Piece(partial(x.copy_, source), cast(Callable[[], Tensor], run), None))
    return Contender(pieces)


def contenders(
    sources: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels, *, compiles: bool, others: bool
) -> dict[str, Callable[[], Contender]]:
    """What makes everyone who takes part, the baseline first. ``others``: `rivals` too, and ours
    with the default tile."""
    on_cuda = sources[0].is_cuda
    largest = max(map(len, sources))
    gram = str(KernelChoice("gram", default_restarts(dtype, STEPS), "torch", dtype_name(dtype)))
    stacks, tuned = partial(on_stacks, sources), partial(ours, sources, dtype)
    field = (
        ("standard", True, partial(stacks, dtype, partial(_one_by_one, standard_form))),
        ("standard_batched", on_cuda and largest > 1, partial(stacks, dtype, standard_form)),
        ("compiled", compiles, partial(compiled, sources, dtype)),
        ("compiled_bfloat16", compiles and on_cuda and dtype is not torch.bfloat16,
         partial(compiled, sources, torch.bfloat16)),
        ("gram", True, partial(tuned, lambda _: gram, largest, graphs=False)),
        ("standard_function", not on_cuda,
         partial(stacks, torch.float32, partial(_standard_function, dtype=dtype))),
        ("function", not on_cuda,
         partial(stacks, torch.float32, partial(newton_schulz, dtype=dtype))),
        ("ours", True, partial(tuned, kernels.__getitem__)),
        ("ours_whole", on_cuda and largest > MAX_BATCH,
         partial(tuned, kernels.__getitem__, largest)),
    )  # fmt: skip
    found: dict[str, Callable[[], Contender]]
    found = {name: make for name, takes_part, make in field if takes_part}
    if not others:
        return found
    found |= {name: partial(rival, sources, name) for name in rivals.RIVALS}
    if on_cuda:
        tile = offered_tiles("triton", sources[0].device, dtype)[0]
        kernel = f"{gram.partition('/')[0]}/triton-{tile}/{dtype_name(dtype)}"
        found[f"ours, {tile}"] = partial(tuned, lambda _: kernel, largest)
    return found


# ---- tuning --------------------------------------------------------------------------------


def batch_sizes(count: int, device: torch.device) -> set[int]:
    """In which a stack runs: in batches, and on CUDA as a whole too."""
    sizes = {min(MAX_BATCH, count - low) for low in range(0, count, MAX_BATCH)}
    return sizes | ({count} if device.type == "cuda" else set())


def tune(
    rows: Rows, cases: Sequence[Case], dtype: torch.dtype, about: str, budget_s: float
) -> Kernels:
    """Kernels as `dedicate_params` chooses them, for the first cases first.

    A row a batch says what was chosen. The fixed rule chooses after ``budget_s`` seconds, which
    compiling and checking count in, and where tuning failed.
    """
    deadline = time.perf_counter() + budget_s
    device = rows.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    prices = nearest_device(device.type, gpu)
    model = CostTable("benchmark", device=prices, ns_steps=STEPS)
    timer = measure.OwnerTimer(device, dtype, momentum=False)

    @torch.no_grad()
    def choose(case: measure.Case) -> Row:
        begin = time.perf_counter()
        left, options = max(0.0, deadline - begin), KernelOptions()
        found = measure.choose_kernels([case], {}, timer, model, options, budget_s=left)
        return {"kernel": found.get(case), "seconds": time.perf_counter() - begin}

    counts: dict[Stack, int] = {}
    for count, m, n in (_wide(stack) for case in cases for stack in case.stacks):
        for batch in batch_sizes(count, device):
            counts[batch, m, n] = max(count, counts.get((batch, m, n), 0))
    kernels = {}
    for (batch, m, n), count in counts.items():
        name = f"tune {batch} x [{m}, {n}], {about}"
        rows.attempt(name, partial(choose, measure.Case((m, n, "float32"), batch, count)))
        row = next(row for row in rows.rows if row["name"] == name)  # also of an earlier process
        rule = str(fixed_choice(m, n, dtype, device, STEPS))
        kernels[batch, m, n] = row.get("kernel") or rule
    return kernels


# ---- one case ------------------------------------------------------------------------------

_FEWEST, _MOST = 3, 41  # rounds
_SHORT_MS, _MOST_REPEATS = 2.0, 10  # of a contender in a round
# Side and number of the products that give the rate. A large one fills a GPU, which runs the first
# after a pause at another clock than the next.
RATE_PRODUCTS = {"cpu": (1024, 1), "cuda": (8192, 10)}
BASELINES = ("standard", "compiled", "compiled_bfloat16", "standard_function")


@dataclass(frozen=True, slots=True)
class Setup:
    """How cases run."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    case_s: float
    compiles: bool
    rivals: bool = False


def turn(contender: Contender, device: torch.device, repeats: int = 1) -> Laps:
    """Milliseconds of one pass: the median of ``repeats``, each on operands written anew."""
    actions = [f for piece in contender.pieces for f in (piece.refill, piece.run)]
    times = laps(*actions * repeats, device=device)
    count = len(actions)
    passes = (times[i : i + count] for i in range(0, len(times), count))
    return (statistics.median(sum(one[1::2]) for one in passes),)


def _rate_turn(device: torch.device, dtype: torch.dtype) -> Callable[[], Laps]:
    """Times large products of random matrices, one after the other: zeros would run faster."""
    side, count = RATE_PRODUCTS[device.type]
    # Where half precision is emulated it is so through float32.
    dtype = torch.float32 if is_emulated(dtype, device) else dtype
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return lambda: laps(run, device=device)


def references_of(sources: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The standard form of the first matrix of each stack, rounded to ``dtype`` before it."""
    return [standard_form(source[0].to(dtype).double()) for source in sources]


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


def rounds(round_s: float, budget_s: float) -> int:
    """As many as fit in the budget, 3 to 41; 1 where a round takes three times the budget."""
    fewest = _FEWEST if round_s <= 3 * budget_s else 1
    return max(fewest, min(_MOST, int(budget_s / round_s)))


@torch.no_grad()
def run_case(setup: Setup, about: Row, case: Case, add: Callable[[Row], None]) -> None:
    """Measure one case; a row for each contender, whatever becomes of it and of the others."""
    device, dtype = setup.device, setup.dtype
    sources = case.sources(device)
    references = references_of(sources, dtype)
    rows: dict[str, Row] = {}
    turns = {"rate": _rate_turn(device, dtype)}
    round_s = 0.0
    failures: dict[str, Exception] = {}
    how = {"compiles": setup.compiles, "others": setup.rivals}
    field = contenders(sources, dtype, setup.kernels, **how)
    for name, build in field.items():
        rows[name] = about | {"case": case.name, "contender": name}
        try:
            contender = build()
            # What compiles does so in the first call, and graphs are captured in the second.
            for _ in range(3):
                (ms,) = turn(contender, device)
            rows[name] |= contender.about
            if any(piece.stack is not None for piece in contender.pieces):
                rows[name]["error"] = error_of(contender, references)
        except Exception as error:  # whatever it is: the others do not depend on it
            failures[name] = error
            continue
        repeats = max(1, min(_MOST_REPEATS, int(_SHORT_MS / max(ms, 1e-3))))
        turns[name] = partial(turn, contender, device, repeats)
        round_s += max(repeats * ms, 0.1) / 1e3
    count = rounds(round_s, setup.case_s) if round_s else 1
    ms_of = first_laps(take_turns(turns, count, failures=failures))
    for name, row in rows.items():
        if name in failures:
            # torch.compile has many reasons not to compile, and none is a fault of ours.
            of_others = name.startswith("compiled") or name in rivals.RIVALS
            why = "left_out" if of_others else "failure"
            row[why] = in_words(failures[name])
        else:
            row |= _numbers(name, case, setup, ms_of)
        add(row)


def _numbers(name: str, case: Case, setup: Setup, ms_of: dict[str, list[float]]) -> Row:
    mine = ms_of[name]
    side, count = RATE_PRODUCTS[setup.device.type]
    rates = [2.0 * count * side**3 / ms / 1e9 for ms in ms_of["rate"]]  # TFLOP/s
    floors = [floor_flops(case, setup.dtype) / rate / 1e9 for rate in rates]
    row: Row = {"rounds": len(mine), **spread(mine, tail=25)}
    row["tflops"] = standard_flops(case) / row["median_ms"] / 1e9
    row["rate_tflops"] = statistics.median(rates)
    row["floor_ms"] = statistics.median(floors)
    row["ratio_to_floor"] = ratio(mine, floors)
    for other in BASELINES:
        if other in ms_of:
            row[f"ratio_to_{other}"] = ratio(mine, ms_of[other])
    return row


# ---- limits and the page -------------------------------------------------------------------

_SWEEP = tuple(case.name for case in SETS["sweep"])
LIMITS = (
    ("ours", "standard", 0.62, ("1024 x 4096",)),
    ("ours", "standard", 0.80, ("256 x 1024",)),
    ("ours", "standard", 1.03, _SWEEP),
    ("function", "standard_function", 1.03, _SWEEP),
)
"""Of the time of a contender over that of a baseline, on a CPU."""


def misses(found: Row) -> list[str]:
    """The limits that are not kept: in bfloat16, or in float32 where bfloat16 is emulated."""
    machine = found["machine"]
    judged = "float32" if machine["bf16_emulated"] else "bfloat16"
    rows = found["rows"] if machine["device"] == "cpu" else ()
    return [
        f"{row['case']}, {judged}, {row['threads']} threads: {contender} takes {measured:.2f} x "
        f"{baseline}, must be <= {limit:.2f} x"
        for row, (contender, baseline, limit, cases) in product(rows, LIMITS)
        if row.get("contender") == contender and row["case"] in cases and row["dtype"] == judged
        if (measured := row.get(f"ratio_to_{baseline}", 0.0)) > limit
    ]


_COLUMNS = {"ratio_to_standard": "/ standard", "ratio_to_compiled": "/ compiled",
            "ratio_to_floor": "/ floor", "tflops": "TFLOP/s", "error": "error"}  # fmt: skip


def page(found: Row) -> str:
    """Hardware, a line for each contender of each case, and the limits that are missed."""
    machine, versions = found["machine"], found["versions"]
    where = machine.get("gpu") or f"{machine['cpu']} ({machine['cpu_capability']})"
    told = [found["date"], where, *(f"{name} {text}" for name, text in versions.items() if text)]
    # Without the rows that say what was tuned, or which case ended before its first row.
    lines = [_line(row) for row in found["rows"] if "contender" in row]
    headings = ("case", "dtype", "threads", "contender", "", "ms (quartiles)", *_COLUMNS.values())
    blocks = [", ".join(told), table(headings, lines, left=5)]
    blocks += [f"missed: {text}" for text in misses(found)]
    if found["left_out"]:
        blocks.append("Not in this run: " + "; ".join(found["left_out"]) + ".")
    return "\n\n".join(blocks)


def _line(row: Row) -> list[object]:
    cells = [row[key] for key in ("case", "dtype", "threads", "contender")]
    if "median_ms" not in row:
        return [*cells, row.get("failure") or row["left_out"]] + [None] * (1 + len(_COLUMNS))
    cells += [row.get("kernel"), "{median_ms:.3g} ({p25_ms:.3g}-{p75_ms:.3g})".format(**row)]
    return cells + [f"{row[key]:.3g}" if key in row else None for key in _COLUMNS]


# ---- the command ---------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Row:
    """The document of all rows, which are written when they are measured."""
    rows = Rows.of(args)
    device = rows.device
    on_cpu = device.type == "cpu"
    emulated = is_emulated(torch.bfloat16, device)
    rows.facts["machine"] |= {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_emulated": emulated,
    }
    # Emulated products say nothing of a kernel.
    usual = ["float32"] + ["bfloat16"] * (not emulated) if on_cpu else ["float16", "bfloat16"]
    cases = [(name, one) for name in args.sets or DEFAULT_SETS[device.type] for one in SETS[name]]
    for name, threads in product(args.dtype or usual, args.threads if on_cpu else [1]):
        torch.set_num_threads(threads)
        label = f"{name}, {threads} threads"
        dtype = getattr(torch, name)
        kernels = tune(rows, [case for _, case in cases], dtype, label, args.tune_s)
        setup = Setup(device, dtype, kernels, args.case_s, args.compile, args.rivals)
        for set_name, case in cases:
            about = {"set": set_name, "dtype": name, "threads": threads}
            title = f"{set_name}: {case.name}, {label}"
            rows.attempt(title, partial(run_case, setup, about, case, rows.add))
            print(title, flush=True)
            gc.collect()
            if args.compile:
                torch.compiler.reset()
    return rows.document()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, prog="python -m benchmarks.kernels")
    row_options(parser, device="cpu")
    parser.add_argument("--dtype", nargs="+", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="CPU only")
    parser.add_argument("--sets", nargs="+", choices=list(SETS))
    parser.add_argument("--case-s", type=float, default=3.0, help="seconds of rounds a case")
    parser.add_argument("--tune-s", type=float, default=15.0, help="seconds of tuning a dtype")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rivals", action="store_true", help="other projects take part too")
    parser.add_argument("--table", action="store_true", help="print the page of --json")
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
    return 1 if args.check and misses(found) else 0


if __name__ == "__main__":
    sys.exit(main())
