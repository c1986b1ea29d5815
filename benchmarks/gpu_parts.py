"""What the parts of `benchmarks.gpu` measure, but for the times of kernels (`benchmarks.kernels`).

``python -m benchmarks.gpu_parts smoke --json out.json``, and so on; docs/gpu.md tells what each
part does. ``--toy`` takes sizes for a CPU. One process, in which nothing would travel: `travelling`
makes the `sharded` layout send matrices to itself.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dmuon
from benchmarks.results import Row, Rows, command, row_options
from benchmarks.timing import first_laps, joined, laps, spread, take_turns
from dmuon import devices
from dmuon.config import KernelOptions
from dmuon.dtensors import whole_tensor
from dmuon.kernels.choice import offered_backends, offered_tiles, why_not
from dmuon.kernels.newton_schulz import newton_schulz, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.shards import ShardMap
from dmuon.tensors import normalize
from dmuon.types import KernelChoice

ROOT = Path(__file__).parents[1]


# ---- training in one process ---------------------------------------------------------------

LAYOUTS = ("replicated", "dedicated", "sharded")
STEPS = 5  # graphs are captured in the second and replayed from the third on
LIMITS = {"float32": 5e-3, "float16": 6.4e-2, "bfloat16": 0.2}
"""How far an update may be from the reference's, in Frobenius norm, by Newton-Schulz dtype. In
float16 the reference has an error of its own: 1.25 x (3.5e-2 of the Gram form + 1.6e-2 of the
standard one), see `EXPECTED`; an H100 gave 5.8e-2."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One training run. ``costs``: "measured" lets tuning choose the kernels; ``travels``: see
    `travelling`; ``period``: of MuonBP."""

    layout: Any
    backend: Any = "auto"
    graphs: bool = False
    ns_dtype: str = "float32"
    costs: str = "analytic"
    travels: bool = False
    period: int = 1

    def __str__(self) -> str:
        graphs = "graphs" if self.graphs else "no graphs"
        words = [self.layout, self.backend, graphs, self.ns_dtype, f"{self.costs} costs"]
        words += ["travelling"] * self.travels + [f"period {self.period}"] * (self.period > 1)
        return ", ".join(words)


@contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder, joined(folder, device=device):
        yield


@contextmanager
def travelling() -> Iterator[None]:
    """In it no matrix counts as local: in the `sharded` layout of one rank all of them go to their
    owner and back through the pipeline."""
    with mock.patch.object(ShardMap, "is_local", lambda shards, matrix, copies=(): False):
        yield


@contextmanager
def _training(
    setting: Setting, model: nn.Module, device: torch.device, *, may_wait: bool, lr: float
) -> Iterator[dmuon.Muon]:
    """The optimizer of a model. ``may_wait`` False: its `step` raises where the host would wait
    for the device."""
    with ExitStack() as stack:
        if setting.travels:
            stack.enter_context(travelling())
        if setting.layout == "sharded":
            fully_shard(model)
        own = dmuon.dedicate_params(
            model,
            layout=setting.layout,
            costs=setting.costs,
            solver="greedy",  # one owner: there is nothing to plan, and no solver is needed
            kernels=KernelOptions(backend=setting.backend, cuda_graphs=setting.graphs),
        )
        stack.callback(own.close)
        dtype = getattr(torch, setting.ns_dtype)
        opt = dmuon.Muon(model, ns_dtype=dtype, period=setting.period, lr=lr)
        if device.type == "cuda" and not may_wait:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            opt.register_step_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
            opt.register_step_post_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"))
        yield opt


class Block(nn.Module):
    """Square, wide and tall matrices, two of them narrow."""

    def __init__(self, width: int, narrow: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.narrow, self.widen = nn.Linear(width, narrow), nn.Linear(narrow, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.norm(x))
        y = y + self.down(torch.tanh(self.up(y)))
        return x + self.widen(torch.tanh(self.narrow(y)))


def _half(device: torch.device) -> str:
    """The dtype that steps are measured in."""
    return "float16" if device.type == "cuda" else "float32"


def _model(blocks: int, sizes: tuple[int, int, int], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return nn.Sequential(nn.Linear(64, sizes[0]), *(Block(*sizes) for _ in range(blocks)))


def _loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """On as many tokens that gradients have full rank: what is not determined is not compared."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1024, 64, generator=generator).to(device)
    found = model(x)
    y = torch.randn(found.shape, generator=generator).to(device)
    return (found - y).square().mean()


def _weights(own: dmuon.Ownership, model: nn.Module) -> dict[str, Tensor]:
    names = [spec.name for spec in own.plan.specs.parameters]
    with own.materialized(model), torch.no_grad():
        return {n: whole_tensor(p).clone() for n, p in zip(names, own.parameters, strict=True)}


def step_row(
    setting: Setting,
    device: torch.device,
    steps: int = STEPS,
    *,
    toy: bool = False,
    may_wait: bool = True,
) -> Row:
    """Train beside the reference, which starts each step from the same weights; the verdict.

    ``passed``: every update is within its limit, all calls were captured where graphs are on, and
    the backend that was asked for ran, and so did list kernels. Needs an initialized process group.
    """
    model = _model(2, (96, 96, 160) if toy else (256, 96, 640), device)
    twin = copy.deepcopy(model)
    twins = dict(trainable_parameters(twin))
    dtype = getattr(torch, setting.ns_dtype)
    reference = ReferenceMuon(
        twin, lr=0.02, orthogonalize=lambda x: newton_schulz(x, method="standard", dtype=dtype)
    )
    worst, where = 0.0, "-"
    host_ms: list[float] = []
    with _training(setting, model, device, may_wait=may_wait, lr=0.02) as opt:
        own = opt.ownership
        for step in range(steps):
            before = _weights(own, model)
            with torch.no_grad():
                for name, weight in before.items():
                    twins[name].copy_(weight)
            for one in (model, twin):
                _loss(one, step, device).backward()
            host_ms += laps(opt.step)
            reference.step()
            for name, weight in _weights(own, model).items():
                expected = (twins[name].detach() - before[name]).double()
                found = (weight - before[name]).double()
                difference = float((found - expected).norm() / expected.norm())
                if not difference <= worst:  # not a number is the worst there is
                    worst, where = difference, f"{name} at step {step}"
            opt.zero_grad()
            reference.zero_grad()
        kernels = opt.stats()["kernels"]
        # Matrices that went through the pipeline of the `sharded` layout in a full step.
        buckets = getattr(getattr(own.runtime, "pipeline", None), "buckets", ())
        sent = sum(len(stack) for bucket in buckets for _, stack in bucket.stacks)
    ran = {KernelChoice.parse(text).backend for text in kernels["ran"].values()}
    # Read anew: a probe that failed inside a step would have left the lists to torch in silence.
    may_run = devices.of(device).has_triton and why_not("triton", device, torch.float32) is None
    captured = not setting.graphs or re.match(r"([1-9]\d*) of \1 captured", kernels["cuda_graphs"])
    meant = setting.backend == "auto" or ran == {setting.backend}
    meant = meant and kernels["lists"] == ("triton" if may_run else "torch")
    limit = LIMITS[setting.ns_dtype]
    return {
        "setting": str(setting),
        "passed": worst <= limit and all((captured, meant, sent > 0 or not setting.travels)),
        "update_difference": worst,
        "limit": limit,
        "worst": where,
        "host_ms": [round(ms, 3) for ms in host_ms],
        "travelled": sent,
        "cuda_graphs": kernels["cuda_graphs"],
        "lists": kernels["lists"],
        "ran": kernels["ran"],
    }


# ---- smoke, step ---------------------------------------------------------------------------


def smoke(rows: Rows, device: torch.device, toy: bool) -> None:
    """The shortest run that touches everything."""
    _accuracy(rows, device, is_short=True)
    graphs = device.type == "cuda"
    some = [Setting(layout, "auto", graphs, _half(device)) for layout in LAYOUTS]
    travels = replace(some[-1], travels=True)
    with one_process(device):
        for setting in (*some, travels, replace(travels, period=2)):
            row = partial(step_row, setting, device, 3, toy=toy, may_wait=False)
            rows.attempt(str(setting), row)


def step(rows: Rows, device: torch.device, toy: bool) -> None:
    """Every layout; toys with the costs of the model alone."""
    with one_process(device):
        for setting in _settings(device):
            if setting.costs == "analytic" or not toy:
                row = partial(step_row, setting, device, 3 if toy else STEPS, toy=toy)
                rows.attempt(str(setting), row)


def _settings(device: torch.device) -> Iterator[Setting]:
    on_cuda = device.type == "cuda"
    backends = ["auto"]
    if on_cuda:
        backends = ["torch"] + ["triton"] * (why_not("triton", device, torch.float16) is None)
    half = _half(device)
    for layout, travels in (*((name, False) for name in LAYOUTS), ("sharded", True)):
        for backend, graphs in product(backends, (True, False) if on_cuda else (False,)):
            yield Setting(layout, backend, graphs, half, travels=travels)
        if on_cuda:
            yield Setting(layout, backends[-1], True, "float32", travels=travels)
        yield Setting(layout, "auto", on_cuda, half, costs="measured", travels=travels)


# ---- tests, sanitizer ----------------------------------------------------------------------


def tests(rows: Rows, device: torch.device, toy: bool) -> None:
    # On a CPU all of tests/gpu are skipped. On a GPU kernels compile in parallel.
    what = ["--doctest-modules", "benchmarks/timing.py"] if toy else ["tests/gpu"]
    if not toy and importlib.util.find_spec("xdist") is not None:
        what = ["-n", "12", *what]
    rows.attempt("pytest", partial(_pytest, what))


def _pytest(what: Sequence[str], before: Sequence[str] = (), **env: str) -> Row:
    """Whether some tests ran and none failed, in a process of their own."""
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what]
    environment = {**os.environ, **env}
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    passed = found.returncode == 0 and re.search(r"\d passed", found.stdout) is not None
    print(found.stdout, found.stderr, sep="\n", flush=True)
    told = found.stdout + found.stderr
    return {"passed": passed, "exit_code": found.returncode, "tail": told[-4000:]}


SANITIZED = "test_batches_of_strided_matrices", "test_a_bad_entry_makes_its_matrix_nan"
"""Of tests/gpu/test_triton.py: symmetric products, momentum and cast."""


def sanitizer(rows: Rows, device: torch.device, toy: bool) -> None:
    tool = shutil.which("compute-sanitizer")
    for name in SANITIZED:
        if tool is None:
            rows.add({"name": name, "left_out": "compute-sanitizer is not on the PATH"})
        else:
            rows.attempt(name, partial(_sanitizer_row, tool, name))


def _sanitizer_row(tool: str, name: str) -> Row:
    # Without the cache: or torch hands out parts of large blocks, and writing beyond is no error.
    row = _pytest([f"tests/gpu/test_triton.py::{name}"], [tool, "--tool", "memcheck"],
                  PYTORCH_NO_CUDA_MEMORY_CACHING="1")  # fmt: skip
    # Who could not start the tool at all prints no summary, and has not passed.
    return row | {"passed": row["passed"] and "ERROR SUMMARY: 0 errors" in row["tail"]}


# ---- accuracy ------------------------------------------------------------------------------

EXPECTED: dict[tuple[str, int, int, str], dict[str, float]] = {
    ("log-spaced", 256, 1024, "float64"): {"standard": 5e-14, "gram[2]": 2e-13},
    ("log-spaced", 256, 1024, "float32"): {"standard": 7e-6, "gram[2]": 6e-5},
    ("log-spaced", 256, 1024, "float16"):
        {"standard": 1.6e-2, "gram[2]": 3.5e-2, "gram[1,3]": 1.7e-2},
    ("log-spaced", 256, 1024, "bfloat16"): {"standard": 0.13, "gram[1,3]": 0.13},
    ("gaussian", 256, 1024, "float16"): {"standard": 1.1e-3, "gram[2]": 3.8e-3},
    ("log-spaced", 96, 384, "float16"): {"standard": 2.3e-2, "gram[1,3]": 2.3e-2},
    ("log-spaced", 96, 384, "bfloat16"): {"standard": 0.18, "gram[1,3]": 0.19},
    ("gaussian", 96, 384, "float16"): {"standard": 1.2e-3, "gram[1,3]": 1.8e-3},
    ("gaussian", 96, 384, "bfloat16"): {"standard": 1e-2, "gram[1,3]": 1.5e-2},
}  # fmt: skip
"""Relative errors in Frobenius norm, by input, shape and dtype, and form.

The singular values of an input are log-spaced from 1e-6 to 1 or a Gaussian matrix's, then divided
by their norm; the exact result is the polynomial of them in float64. The errors are measured on a
CPU with results rounded to the dtype after each product: a kernel that sums in float32 should not
exceed them."""

# Three seeds differ by 2%. Without rounding after each product the order of sums decides: by 1.6
# between two CPUs.
SLACK = {"float16": 1.25, "bfloat16": 1.25, "float32": 4.0, "float64": 4.0}
TRIPLES = resolve_coefficients("polar_express", 5)


@lru_cache
def example(kind: str, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """A normalized matrix and the exact result, float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(normalize(x, torch.float64), full_matrices=False)
    if kind == "log-spaced":
        values = torch.logspace(-6, 0, rows, dtype=torch.float64)
        values /= values.norm()
    x = (left * values) @ right
    for a, b, c in TRIPLES:
        values = a * values + b * values**3 + c * values**5
    return x, (left * values) @ right


def accuracy(rows: Rows, device: torch.device, toy: bool) -> None:
    """A row for each input, form and kernel that can run here; of small matrices with one tile."""
    _accuracy(rows, device, is_short=False)


def _accuracy(rows: Rows, device: torch.device, *, is_short: bool) -> None:
    for (kind, m, n, name), forms in EXPECTED.items():
        dtype = getattr(torch, name)
        ways = (True, False) if dtype.itemsize == 2 and not is_short else (True,)
        for form, backend in product(forms, offered_backends(device, dtype, m)):
            tiles = offered_tiles(backend, device, dtype)
            for tile, reduced in product(tiles[:1] if is_short or m <= 96 else tiles, ways):
                choice = replace(KernelChoice.parse(f"{form}/{backend}/{name}"), tile=tile)
                label = f"{kind} {m} x {n} {choice}" + ", full sums" * (not reduced)
                row = partial(accuracy_row, choice, (kind, m, n), forms[form], device, reduced)
                rows.attempt(label, row, kernel=str(choice), reduced=reduced)


def accuracy_row(
    choice: KernelChoice,
    given: tuple[str, int, int],
    expected: float,
    device: torch.device,
    reduced: bool,
) -> Row:
    """``given`` to `example`. ``reduced``: cuBLAS may add up parts in half precision, as torch
    allows by default."""
    x, exact = example(*given)
    operand = x.to(device, getattr(torch, choice.dtype))[None].clone()
    _reduce_in_half_precision(reduced)
    try:
        found = iterated(operand, choice)[0]
    finally:
        _reduce_in_half_precision(True)
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    passed = error <= SLACK[choice.dtype] * expected  # not a number does not pass
    return {"error": error, "expected": expected, "passed": passed}


def iterated(x: Tensor, choice: KernelChoice) -> Tensor:
    runner = Orthogonalizer(x.device, x.dtype, KernelOptions(cuda_graphs=False))
    return runner.run(Call((len(x), *x[0].shape), TRIPLES, str(choice)), x)


def _reduce_in_half_precision(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


# ---- profile -------------------------------------------------------------------------------


def profile(rows: Rows, device: torch.device, toy: bool) -> None:
    """Rows of a full and of a block step; their traces go beside the rows' file."""
    with one_process(device):
        rows.attempt("profile", partial(_profile, rows, device, toy))


def _profile(rows: Rows, device: torch.device, toy: bool) -> None:
    on_cuda = device.type == "cuda"
    # As wide as Llama-8B.
    blocks, sizes, repeats = (2, (64, 16, 160), 2) if toy else (4, (4096, 1024, 14336), 5)
    setting = Setting("sharded", "auto", on_cuda, _half(device), travels=True, period=2)
    model = _model(blocks, sizes, device)
    traced: dict[str, Row] = {}
    timed: dict[str, list[tuple[float, float, int]]] = {"full": [], "block": []}
    with _training(setting, model, device, may_wait=True, lr=1e-4) as opt:
        # Steps of both kinds take turns: three to warm up, in which graphs are captured; some by
        # the clock; one that is traced.
        for turn, kind in product(range(3 + repeats + 1), timed):
            _loss(model, turn, device).backward()
            if turn < 3:
                opt.step()
            elif turn < 3 + repeats:
                timed[kind].append(_timed(opt, device))
            else:
                traced[kind] = _traced(opt, device, rows.beside(f"{kind}.trace.json.gz"))
            opt.synchronize()
            opt.zero_grad()
        stats = opt.stats()
    for kind, times in timed.items():
        host, whole, peak = zip(*times, strict=True)
        row: Row = {"name": f"{kind} step", "setting": str(setting), "matrices": 5 * blocks + 1}
        row |= {"host_ms": statistics.median(host), "whole_ms": statistics.median(whole)}
        row |= {"peak_bytes": max(peak), "step_bytes": stats["step_bytes"]}
        rows.add(row | {"cuda_graphs": stats["kernels"]["cuda_graphs"]} | traced[kind])


def _timed(opt: dmuon.Muon, device: torch.device) -> tuple[float, float, int]:
    """Milliseconds of the host in `step`, and until the updates are applied; bytes allocated
    meanwhile at most, beside what was before (0 on a CPU, where torch does not count them)."""
    if device.type != "cuda":
        host, rest = laps(opt.step, opt.synchronize)
        return host, host + rest, 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    host, rest = laps(opt.step, partial(_finish, opt, device))
    return host, host + rest, torch.cuda.max_memory_allocated(device) - before


def _finish(opt: dmuon.Muon, device: torch.device) -> None:
    opt.synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _traced(opt: dmuon.Muon, device: torch.device, path: str | None) -> Row:
    """One step under torch's profiler: ATen calls (those inside another one not), launches, and how
    long the device had nothing to do."""
    on_cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_cuda
    with torch.profiler.profile(activities=activities) as trace:
        opt.step()
        _finish(opt, device)
    if path is not None:
        trace.export_chrome_trace(path)
    aten_calls = 0
    launches: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    busy: Counter[str] = Counter()
    for event in trace.events() or ():
        if event.is_user_annotation:
            continue
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device or (not on_cuda and not event.cpu_children):
            spans.append((event.time_range.start, event.time_range.end))
            busy[event.name[:100]] += event.time_range.elapsed_us()
        elif event.name.startswith("cu"):  # cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch ...
            launches[event.name] += 1
        parent = event.cpu_parent
        if event.name.startswith("aten::") and not (parent and parent.name.startswith("aten::")):
            aten_calls += 1
    idle = gaps(spans)
    return {
        "aten_calls": aten_calls,
        "launches": dict(launches),
        "kernels": len(spans),
        "busy_ms": sum(busy.values()) / 1e3,
        "idle_ms": sum(idle) / 1e3,
        "longest_gaps_us": [round(gap, 1) for gap in sorted(idle, reverse=True)[:10]],
        "longest_ms": {name: round(us / 1e3, 3) for name, us in busy.most_common(15)},
    }


def gaps(spans: Sequence[tuple[float, float]]) -> list[float]:
    """How long nothing ran, between the first begin and the last end.

    >>> gaps([(5, 7), (0, 2), (1, 3), (9, 10)])
    [2, 2]
    """
    found, busy_until = [], float("inf")
    for begin, end in sorted(spans):
        if begin > busy_until:
            found.append(begin - busy_until)
        busy_until = end if busy_until == float("inf") else max(busy_until, end)
    return found


# ---- a whole step --------------------------------------------------------------------------


def whole(rows: Rows, device: torch.device, toy: bool) -> None:
    """A step on the matrices of two Llama-8B layers, in turns with `torch.optim.Muon`'s."""
    with one_process(device):
        rows.attempt("whole", partial(_whole, rows, device, toy))


def _whole(rows: Rows, device: torch.device, toy: bool) -> None:
    width, narrow, hidden = (64, 16, 160) if toy else (4096, 1024, 14336)
    shapes = [(width, width), (width, width), (narrow, width), (narrow, width)]
    shapes += [(hidden, width), (hidden, width), (width, hidden)]
    steps: dict[str, Any] = {}
    with ExitStack() as stack:
        for name in ("dmuon.Muon", "torch.optim.Muon"):
            torch.manual_seed(0)
            with device:
                layers = [nn.Linear(n, m, bias=False) for m, n in shapes * 2]
            model = nn.ModuleList(layers)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            if name == "dmuon.Muon":
                own = dmuon.dedicate_params(
                    model,
                    layout="replicated",
                    solver="greedy",
                )
                stack.callback(own.close)
                opt = dmuon.Muon(model, lr=1e-3)
                steps[name] = opt.step
            else:
                steps[name] = torch.optim.Muon(model.parameters(), lr=1e-3).step
        turns = {name: partial(laps, step, device=device) for name, step in steps.items()}
        times = first_laps(take_turns(turns, 3 if toy else 9, warm_up=3))
        for name, ms in times.items():
            ran = opt.stats()["kernels"] if name == "dmuon.Muon" else {}
            rows.add({"contender": name, **spread(ms, tail=25), **ran})


# ---- the command ---------------------------------------------------------------------------


PARTS = {f.__name__: f for f in (smoke, tests, whole, profile, accuracy, sanitizer, step)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__, prog="python -m benchmarks.gpu_parts")
    parser.add_argument("part", choices=PARTS)
    row_options(parser, device="cuda")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    rows = Rows.of(args)
    PARTS[args.part](rows, rows.device, args.toy)
    for row in rows.rows:
        shown = {k: v for k, v in row.items() if k not in ("name", "trace", "setting", "tail")}
        print(f"{row['name']}: {json.dumps(shown)}", flush=True)
    return 1 if rows.failed else 0


if __name__ == "__main__":
    sys.exit(main())
