"""The parts of `benchmarks.gpu` that train: smoke, step, profile; and kernels under a sanitizer.

``python -m benchmarks.gpu_parts smoke --json out.json``, and so on:

=========  =====================================================================================
smoke      each kernel once, a capture and its replays, three steps of each layout
step       `dmuon.Muon` beside `ReferenceMuon`: every layout, plain and Triton products, what tuning
           chooses, with and without CUDA graphs
profile    a full and a block step of large layers: launches, host time, gaps, peak memory
sanitizer  three small tests of tests/gpu under ``compute-sanitizer --tool memcheck``
=========  =====================================================================================

One process. Nothing would travel in it, so `travelling` makes the `sharded` layout send matrices to
itself: all-to-all, slots and streams run as on many ranks. In ``smoke`` torch raises where the host
would wait for the GPU inside ``Muon.step``. ``--toy`` takes sizes for a CPU.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from benchmarks.ranks import joined
from benchmarks.results import Rows, command, dtype_name, row_options
from benchmarks.timing import laps
from dmuon.config import KernelOptions
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.kernels.choice import default_restarts, offered_backends, why_not
from dmuon.kernels.newton_schulz import newton_schulz, normalize, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.measure import ERROR_LIMITS, Case, gate_errors
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.shards import ShardMap
from dmuon.types import KernelChoice

LAYOUTS = ("replicated", "dedicated", "sharded")
STEPS = 5  # graphs are captured in the second and replayed from the third on
LIMITS = {"float32": 5e-3, "float16": 5e-2, "bfloat16": 0.2}
"""How far an update may be from the reference's, in Frobenius norm, by Newton-Schulz dtype."""

SANITIZED = (
    "test_batches_of_strided_matrices",
    "test_a_bad_entry_makes_its_matrix_nan",
    "test_small_strides_and_coefficients",
)
"""Of tests/gpu/test_triton.py: symmetric products, momentum and cast, small matrices."""


# ---- training in one process ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One training run. ``costs``: "measured" lets tuning choose the kernels; ``travels``: see
    `travelling`; ``period``: of MuonBP."""

    layout: str
    backend: str = "auto"
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
    """Within it no matrix counts as local, so that in the `sharded` layout of one rank all of them
    go to their owner and back through the pipeline."""
    with mock.patch.object(ShardMap, "is_local", lambda shards, matrix: False):
        yield


@contextmanager
def _training(
    setting: Setting,
    model: nn.Module,
    device: torch.device,
    *,
    may_wait: bool,
    **muon: Any,
) -> Iterator[tuple[dmuon.Ownership, dmuon.Muon]]:
    """The optimizer of a model. ``may_wait`` False: its `step` raises where the host would wait
    for the device."""
    with ExitStack() as stack:
        if setting.travels:
            stack.enter_context(travelling())
        if setting.layout == "sharded":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        own = dmuon.dedicate_params(
            model,
            layout=setting.layout,
            costs=setting.costs,
            solver="greedy",  # one owner: there is nothing to plan, and no solver is needed
            planner=dmuon.PlannerOptions(profile_budget_s=2.0),
            kernels=KernelOptions(
                backend=setting.backend, cuda_graphs=setting.graphs, tune_budget_s=5.0
            ),
        )
        stack.callback(own.close)
        dtype = getattr(torch, setting.ns_dtype)
        opt = dmuon.Muon(model, ns_dtype=dtype, period=setting.period, **muon)
        if device.type == "cuda" and not may_wait:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            opt.register_step_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
            opt.register_step_post_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"))
        yield own, opt


class Block(nn.Module):
    """Square, wide and tall matrices, two of them narrow enough for the kernel of few rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.narrow, self.widen = nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.norm(x))
        y = y + self.down(torch.tanh(self.up(y)))
        return x + self.widen(torch.tanh(self.narrow(y)))


def two_blocks(width: int = 256, hidden: int = 640) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), *(Block(width, hidden) for _ in range(2)))


def _loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """On as many tokens that gradients have full rank: what is not determined is not compared."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1024, 64, generator=generator).to(device)
    found = model(x)
    y = torch.randn(found.shape, generator=generator).to(device)
    return (found - y).square().mean()


def _weights(own: dmuon.Ownership, model: nn.Module) -> dict[str, Tensor]:
    with own.materialized(model), torch.no_grad():
        names = [spec.name for spec in own.plan.specs.parameters]
        return {n: whole_tensor(p).clone() for n, p in zip(names, own.parameters, strict=True)}


def step_row(
    setting: Setting,
    device: torch.device,
    steps: int = STEPS,
    *,
    toy: bool = False,
    may_wait: bool = True,
) -> dict[str, Any]:
    """Train beside the reference, which starts each step from the same weights; the verdict.

    ``passed``: every update is within its limit, all calls were captured where graphs are on, and
    the backend that was asked for ran. Needs an initialized process group.
    """
    torch.manual_seed(0)
    model: nn.Module = (two_blocks(96, 160) if toy else two_blocks()).to(device)
    twin = copy.deepcopy(model)
    twins = dict(trainable_parameters(twin))
    dtype = getattr(torch, setting.ns_dtype)
    reference = ReferenceMuon(
        twin, lr=0.02, orthogonalize=lambda x: newton_schulz(x, method="standard", dtype=dtype)
    )
    worst, where = 0.0, "-"
    host_ms: list[float] = []
    with _training(setting, model, device, may_wait=may_wait, lr=0.02) as (own, opt):
        for step in range(steps):
            before = _weights(own, model)
            with torch.no_grad():
                for name, weight in before.items():
                    twins[name].copy_(weight)
            for one in (model, twin):
                _loss(one, step, device).backward()
            host_ms += laps(opt.step)
            full = opt.stats().get("full_step", True)
            reference.step()
            after = _weights(own, model)
            for name, weight in after.items():
                expected = (twins[name].detach() - before[name]).double()
                found = (weight - before[name]).double()
                difference = float((found - expected).norm() / expected.norm())
                if not difference <= worst:  # not a number is the worst there is
                    kind = "full" if full else "block"
                    worst, where = difference, f"{name} at step {step} ({kind})"
            opt.zero_grad()
            reference.zero_grad()
        kernels = opt.stats()["kernels"]
        sent = _travelled(own)
    captured = not setting.graphs or _all_captured(kernels["cuda_graphs"])
    meant = setting.backend == "auto" or _all_on(setting.backend, kernels["ran"])
    limit = LIMITS[setting.ns_dtype]
    return {
        "setting": str(setting),
        "passed": worst <= limit and captured and meant and (sent > 0 or not setting.travels),
        "update_difference": worst,
        "limit": limit,
        "worst": where,
        "host_ms": [round(ms, 3) for ms in host_ms],
        "travelled": sent,
        "cuda_graphs": kernels["cuda_graphs"],
        "ran": kernels["ran"],
    }


def _travelled(own: dmuon.Ownership) -> int:
    """Matrices that went through the pipeline of the `sharded` layout in a full step."""
    pipeline = getattr(own.runtime, "pipeline", None)
    if pipeline is None:
        return 0
    return sum(len(stack) for bucket in pipeline.buckets for _, stack in bucket.stacks)


def _all_captured(state: str) -> bool:
    """Whether `Graphs.state` says that all calls are captured.

    >>> _all_captured("2 of 2 captured"), _all_captured("0 of 2 captured"), _all_captured("off: x")
    (True, False, False)
    """
    words = state.split()
    return len(words) == 4 and words[0] == words[2] != "0"


def _all_on(backend: str, ran: dict[str, str]) -> bool:
    """Whether everything that ran was multiplied by one backend.

    >>> _all_on("triton", {"1 x [64, 64]": "standard/triton/float16"}), _all_on("torch", {})
    (True, False)
    """
    return bool(ran) and {KernelChoice.parse(text).backend for text in ran.values()} == {backend}


# ---- parts ---------------------------------------------------------------------------------


def smoke(rows: Rows, device: torch.device, toy: bool) -> None:
    """The shortest run that touches everything."""
    on_cuda = device.type == "cuda"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for m, n in ((96, 200),) if toy else ((96, 200), (256, 640)):
            for backend in offered_backends(device, dtype, m):
                for method in ("standard", "gram"):
                    restarts = default_restarts(dtype, 5) if method == "gram" else ()
                    choice = KernelChoice(method, restarts, backend, dtype_name(dtype))
                    measure = partial(_kernel_row, Case((m, n, "float32"), 2), choice, device)
                    rows.attempt(f"{choice} on 2 x [{m}, {n}]", measure)
    rows.attempt("capture and replay", partial(_replay_row, device))
    with one_process(device):
        half = "float16" if on_cuda else "float32"
        some = [Setting(layout, "auto", on_cuda, half) for layout in LAYOUTS]
        some += [Setting("sharded", "auto", on_cuda, half, travels=True)]
        some += [Setting("sharded", "auto", on_cuda, half, travels=True, period=2)]
        for setting in some:
            measure = partial(step_row, setting, device, 3, toy=toy, may_wait=False)
            rows.attempt(str(setting), measure)


def _kernel_row(case: Case, choice: KernelChoice, device: torch.device) -> dict[str, Any]:
    error = gate_errors(case, [choice], device)[choice]
    return {"error": error, "passed": error <= ERROR_LIMITS[getattr(torch, choice.dtype)]}


def _replay_row(device: torch.device) -> dict[str, Any]:
    """A call four times: eagerly, captured, and replayed on other operands and on the first."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    shape = (2, 96, 200)
    runner = Orthogonalizer(device, dtype, KernelOptions())
    call = Call(shape, resolve_coefficients("polar_express", 5))
    runner.reserve([call])
    inputs = [normalize(torch.randn(shape, device=device), dtype) for _ in range(2)]
    found = []
    for which in (0, 0, 1, 0):
        operand = runner.operand(call)
        operand.copy_(inputs[which])
        found.append(runner.run(call, operand).clone())
    state = runner.report()["cuda_graphs"]
    alike = torch.equal(found[0], found[1]) and torch.equal(found[0], found[3])
    passed = alike and not torch.equal(found[0], found[2])
    return {"cuda_graphs": state, "passed": passed and (device.type != "cuda" or "1 of 1" in state)}


def _settings(device: torch.device) -> Iterator[Setting]:
    """Of the part ``step``."""
    on_cuda = device.type == "cuda"
    backends = ["auto"]
    if on_cuda:
        backends = ["torch"] + ["triton"] * (why_not("triton", device, torch.float16) is None)
    half = "float16" if on_cuda else "float32"
    for layout, travels in (*((name, False) for name in LAYOUTS), ("sharded", True)):
        for backend in backends:
            for graphs in (True, False) if on_cuda else (False,):
                yield Setting(layout, backend, graphs, half, travels=travels)
        if on_cuda:
            yield Setting(layout, backends[-1], True, "float32", travels=travels)
        yield Setting(layout, "auto", on_cuda, half, costs="measured", travels=travels)


def step(rows: Rows, device: torch.device, toy: bool) -> None:
    with one_process(device):
        for setting in _settings(device):
            if setting.costs == "analytic" or not toy:
                steps = 3 if toy else STEPS
                measure = partial(step_row, setting, device, steps, toy=toy)
                rows.attempt(str(setting), measure)


def sanitizer(rows: Rows, device: torch.device, toy: bool) -> None:
    tool = shutil.which("compute-sanitizer")
    for name in SANITIZED:
        command = [tool or "", "--tool", "memcheck", sys.executable, "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", f"tests/gpu/test_triton.py::{name}"]
        if toy:
            command = [sys.executable, "-S", "-c", "print('ERROR SUMMARY: 0 errors, as it were')"]
        elif tool is None:
            rows.add({"name": name, "left_out": "compute-sanitizer is not on the PATH"})
            continue
        rows.attempt(name, partial(_sanitizer_row, command, rows.seconds_left()))


def _sanitizer_row(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    found = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=None if limit_s == float("inf") else limit_s,
        # Or torch hands out parts of large blocks, and writing beyond one is no error.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    # Who could not start the tool at all prints no summary, and has not passed.
    clean = "ERROR SUMMARY: 0 errors" in found.stdout and found.returncode == 0
    return {"passed": clean, "exit_code": found.returncode, "tail": found.stdout[-2000:]}


# ---- profile -------------------------------------------------------------------------------


class Layer(nn.Module):
    """The matrices of a Llama layer, with a forward that reaches all of them."""

    def __init__(self, width: int, narrow: int, hidden: int) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kv = self.k(x) * self.v(x)
        x = x + self.o(self.q(x) + kv.repeat(1, x.shape[1] // kv.shape[1]))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def profile(rows: Rows, device: torch.device, toy: bool) -> None:
    """Rows of a full and of a block step; their traces go beside the rows' file."""
    with one_process(device):
        rows.attempt("profile", partial(_profile, rows, device, toy))


def _profile(rows: Rows, device: torch.device, toy: bool) -> None:
    on_cuda = device.type == "cuda"
    sizes, layers, tokens = ((64, 16, 160), 2, 32) if toy else ((4096, 1024, 14336), 4, 256)
    half = "float16" if on_cuda else "float32"
    setting = Setting("sharded", "auto", on_cuda, half, travels=True, period=2)
    torch.manual_seed(0)
    with torch.device(device):
        first = nn.Linear(sizes[0], sizes[0])
        model = nn.Sequential(first, *(Layer(*sizes) for _ in range(layers)))
        x = torch.randn(tokens, sizes[0])
    repeats = 2 if toy else 5
    found: dict[str, dict[str, Any]] = {}
    timed: dict[str, list[tuple[float, float, int]]] = {"full": [], "block": []}
    with _training(setting, model, device, may_wait=True, lr=1e-4) as (_, opt):
        # Steps of both kinds take turns: three to warm up, in which graphs are captured; some by
        # the clock; one that is counted; one that is traced.
        for turn, kind in product(range(3 + repeats + 2), timed):
            model(x).square().mean().backward()
            if turn < 3:
                opt.step()
            elif turn < 3 + repeats:
                timed[kind].append(_timed(opt, device))
            elif turn == 3 + repeats:
                with _Counting() as counting:
                    opt.step()
                found[kind] = {
                    "aten_calls": counting.calls.total(),
                    "most_called": dict(counting.calls.most_common(12)),
                }
            else:
                found[kind] |= _traced(opt, device, rows.beside(f"{kind}.trace.json.gz"))
            opt.synchronize()
            opt.zero_grad()
        stats = opt.stats()
        kept = [*model.parameters(), *(v for state in opt.state.values() for v in state.values())]
    for kind, times in timed.items():
        host, whole, peak = zip(*times, strict=True)
        about = {"name": f"{kind} step", "setting": str(setting), "matrices": 7 * layers + 1}
        about |= {"host_ms": statistics.median(host), "whole_ms": statistics.median(whole)}
        # Of what is allocated at most, step_bytes says what is neither kept nor a gradient.
        about |= {"peak_bytes": max(peak), "weights_and_state_bytes": sum(map(_nbytes, kept))}
        about |= {"gradient_bytes": sum(map(_nbytes, model.parameters()))}
        about |= {"step_bytes": stats["step_bytes"], "cuda_graphs": stats["kernels"]["cuda_graphs"]}
        rows.add(about | found[kind])


def _timed(opt: dmuon.Muon, device: torch.device) -> tuple[float, float, int]:
    """Milliseconds of the host in `step`, and until the updates are applied; most bytes
    allocated meanwhile (0 on a CPU, where torch does not count them)."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    def finish() -> None:
        opt.synchronize()
        if on_cuda:
            torch.cuda.synchronize(device)

    host, rest = laps(opt.step, finish)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else 0
    return host, host + rest, peak


def _nbytes(value: Any) -> int:
    """Of what is stored here of a tensor."""
    return local_tensor(value).nbytes if isinstance(value, Tensor) else 0


class _Counting(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _traced(opt: dmuon.Muon, device: torch.device, path: str | None) -> dict[str, Any]:
    """One step under torch's profiler: launches, and how long the device had nothing to do."""
    on_cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_cuda
    with torch.profiler.profile(activities=activities) as trace:
        opt.step()
        opt.synchronize()
        if on_cuda:
            torch.cuda.synchronize(device)
    if path is not None:
        trace.export_chrome_trace(path)
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
    idle = gaps(spans)
    return {
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
    found = []
    busy_until = None
    for begin, end in sorted(spans):
        if busy_until is not None and begin > busy_until:
            found.append(begin - busy_until)
        busy_until = end if busy_until is None else max(busy_until, end)
    return found


# ---- the command ---------------------------------------------------------------------------


PARTS = {"smoke": smoke, "step": step, "profile": profile, "sanitizer": sanitizer}


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
