"""Measuring: one loop times Newton-Schulz as owners run it, to choose kernels and fill costs.

every rank   its device and Newton-Schulz dtype                  -> exchange
first rank   choose kernels: cached, or measured                 -> exchange
every rank   times of these kernels in its cache                 -> exchange
             measure missing times, all ranks at once            -> exchange, the slowest counts
             write the cache
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmuon import devices
from dmuon.comm.process_groups import attempt_in_all
from dmuon.comm.transport import Transport
from dmuon.config import BATCH_BYTES, KernelOptions, MuonDefaults, PlannerOptions
from dmuon.devices import Stopwatch
from dmuon.kernels import choice as choosing
from dmuon.kernels import newton_schulz as ns
from dmuon.kernels.choice import Speeds, backend_version, candidates, fixed_choice, why_not
from dmuon.kernels.newton_schulz import resolve_coefficients, resolve_ns_dtype
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.rule import Hyper, Rule
from dmuon.scheduler import costs
from dmuon.scheduler.costs import (
    BATCH_NUMEL,
    MAX_BATCH,
    NIC_SHARE,
    CostTable,
    Rates,
    canonical_key,
    largest_batch,
)
from dmuon.scheduler.specs import ShapeKey, dtype_name
from dmuon.scheduler.topology import Topology
from dmuon.tensors import are_raw, normalize
from dmuon.types import KernelChoice, warn

T = TypeVar("T")

BUDGET_S = 10.0  # for choosing kernels, and again for prices
PASSES = 4  # over all runs; the first pass warms up
_CAPTURING = 2  # more passes on an accelerator, which compiles, then captures
_PRICES_S, _CHOICE_S = 0.25, 0.02  # of running time, after which two passes are enough
_LONG_MS = 4.0  # a CPU runs batches that take so long matrix by matrix
_MARGIN = 0.97  # of the fixed choice's time, so that noise does not decide
_MEMORY_SHARE = 0.25  # of free memory
_SHOW_AFTER_S = 2.0

# Allowed relative Frobenius error of a kernel: several times that of each dtype's safe forms.
ERROR_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of ``batch`` matrices of a (wide) shape; the model has ``count`` matrices of it."""

    key: ShapeKey
    batch: int
    count: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, *self.key[:2]


Run = tuple[Case, str]  # (case, kernel; "" is the fixed rule's)


def cases_of(keys: Iterable[ShapeKey], batch_numel: int = BATCH_NUMEL) -> tuple[Case, ...]:
    """Return the cases that planning for these matrices needs, sorted: batches of powers of two,
    and the largest batch (see `largest_batch`).

    >>> [(c.batch, c.count) for c in cases_of([(4, 6, "float32")] * 2 + [(6, 4, "float32")])]
    [(1, 3), (2, 3), (3, 3)]
    """
    cases: list[Case] = []
    for key, count in sorted(Counter(map(canonical_key, keys)).items()):
        most = min(count, largest_batch(*key[:2], MAX_BATCH, batch_numel))
        sizes = {*(2**i for i in range(most.bit_length())), most}
        cases += [Case(key, batch, count) for batch in sorted(sizes)]
    return tuple(cases)


def long_batch(case: Case, ms: Mapping[Case, float]) -> Case:
    """Return the smallest batch of the same shape that is known to take so long that a CPU runs
    larger ones, such as ``case``, in as much time per matrix; ``case`` if there is none."""
    smaller = (replace(case, batch=1 << i) for i in range((case.batch - 1).bit_length()))
    return next((one for one in smaller if ms.get(one, 0.0) >= _LONG_MS), case)


def in_order(cases: Iterable[Case], model: CostTable) -> list[Case]:
    """Sort single matrices before larger batches, both by the time of all matrices of a shape,
    longest first; only the smallest case precedes these, because it shows the device's speed."""
    ms = {case: model.batch_ms(case.key, 1) for case in cases}
    smallest = min(ms, key=lambda case: (case.batch, ms[case], case.key), default=None)
    return sorted(ms, key=lambda c: (c != smallest, c.batch, -c.count * ms[c], c.key))


# ---- the timing loop ---------------------------------------------------------------------


def median_times(
    runs: Sequence[Run],
    timer: OwnerTimer,
    model: CostTable,
    known: dict[Case, float],
    *,
    deadline: float = math.inf,
    enough_s: float = math.inf,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[Run, float]:
    """Return the median milliseconds of each run; inf for an optional kernel that raises.

    The runs take turns, so that no batch follows itself, as in training, and a slow second spoils
    one number of each run. A run begins only if the ``model``, scaled by the ``known`` times (which
    are updated), expects it to end before the ``deadline``. After ``enough_s`` seconds two numbers
    of each run are enough, and the smaller one counts."""
    is_cpu, begin, done = devices.of(timer.device).is_cpu, timer.clock(), 0
    skipped = 0 if is_cpu else _CAPTURING
    ran, times, medians = Counter[Run](), defaultdict[Run, list[float]](list), dict[Run, float]()
    for number in range(skipped + PASSES):
        if number > skipped + 1 and timer.clock() - begin > enough_s:
            break
        for run in runs:
            progress(done)
            done += 1
            if medians.get(run) == math.inf or (is_cpu and long_batch(run[0], known) != run[0]):
                continue
            if (expected := known.get(run[0])) is None:
                expected = replace(model, entries=_by_row(known)).batch_ms(run[0].key, run[0].batch)
            if max(1, skipped + 1 - ran[run]) * expected / 1e3 > deadline - timer.clock():
                continue
            try:
                ms = _attempted(run[1], partial(timer.run, run[0]))
            except torch.OutOfMemoryError:
                continue
            ran[run] += 1
            if ms == math.inf:
                medians[run] = ms
            elif ran[run] > skipped:
                times[run].append(ms)
                ms = statistics.median(times[run][1:]) if len(times[run]) > 2 else min(times[run])
                medians[run] = known[run[0]] = float(f"{ms:.6g}")  # no clock is more exact
    return medians


def _attempted(kernel: str, work: Callable[[str], float]) -> float:
    """Return ``work(kernel)``; inf if an optional kernel raises, with a warning unless a tile is
    too large for the device."""
    try:
        return work(kernel)
    except Exception as failure:
        if "/triton" not in kernel or isinstance(failure, torch.OutOfMemoryError):
            raise
        if type(failure).__name__ != "OutOfResources":
            backend, why = kernel.split("/")[1].partition("-")[0], choosing.described(failure)
            message = f"dmuon: kernel backend {backend!r} is left out where it fails: {why}"
            warn(message, of_rank=True)
        return math.inf


@dataclass(eq=False, repr=False)
class OwnerTimer:
    """Times an owner's work in `Muon.step` for one batch, with `Muon`'s default settings and one
    workspace. ``momentum``: as in `CostTable`. ``sharing`` processes share memory."""

    device: torch.device
    ns_dtype: torch.dtype
    momentum: bool = True
    sharing: int = 1
    options: KernelOptions = KernelOptions()  # noqa: RUF009  frozen
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._runner = Orthogonalizer(self.device, self.ns_dtype, self.options)
        defaults = MuonDefaults()
        self._hyper = Hyper.of(defaults.group())
        self._triples = resolve_coefficients(defaults.ns_coefficients, defaults.ns_steps)
        self._memory: dict[str, tuple[Tensor, Tensor]] = {}  # gradients and momentum, by dtype

    def _call(self, case: Case, kernel: str) -> Call:
        is_raw = not self.momentum and are_raw({self.ns_dtype}, self.device)
        return Call(case.shape, self._triples, kernel, self._hyper.eps if is_raw else None)

    def reserve(self, runs: Iterable[Run]) -> list[Run]:
        """Allocate memory for one run at a time; return the runs that fit a quarter of it."""
        limit = _MEMORY_SHARE * devices.of(self.device).memory()[0] / self.sharing
        fitting = [run for run in runs if self._bytes(*run) <= limit]
        self._memory = {}
        self._runner.reserve([self._call(*run) for run in fitting])
        # Its own generator, explicit devices and dtypes, so that users' defaults do not matter.
        generator = devices.of(self.device).generator(0)
        for dtype in {case.key[2] for case, _ in fitting}:
            most = max(math.prod(case.shape) for case, _ in fitting if case.key[2] == dtype)
            grads = torch.empty(most, dtype=getattr(torch, dtype), device=self.device)
            grads.uniform_(-1, 1, generator=generator)
            self._memory[dtype] = grads, torch.zeros_like(grads)
        return fitting

    def _bytes(self, case: Case, kernel: str) -> int:
        item = getattr(torch, case.key[2]).itemsize
        # Gradient, momentum, operand; normalization makes two more stacks, at least in float32.
        stacks = math.prod(case.shape) * (3 * item + 2 * max(4, item))
        return stacks + self._runner.call_bytes(self._call(case, kernel))

    @torch.no_grad()
    def run(self, case: Case, kernel: str) -> float:
        """Return the milliseconds of one update of a reserved batch. Raises OutOfMemoryError."""
        call, memory = self._call(case, kernel), self._memory[case.key[2]]
        grads, buffer = (t[: math.prod(case.shape)].view(case.shape) for t in memory)
        # Events are recorded on the current device's stream, and another device may be current.
        with devices.of(self.device).current():
            operand = self._runner.operand(call)
            if not self.momentum:
                normalize(grads, self.ns_dtype, out=operand)
            watch = Stopwatch(self.device)
            watch.start()
            if self.momentum:
                Rule().operand(buffer, grads, self._hyper, out=operand)
            self._runner.run(call, operand)
            watch.stop()
            return watch.milliseconds()


# ---- choosing kernels --------------------------------------------------------------------


def gate_errors(
    case: Case,
    choices: Sequence[KernelChoice],
    device: torch.device,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[KernelChoice, float]:
    """Return the relative Frobenius error of each choice on Gaussian matrices (two of a batch,
    which a kernel may confuse), against the standard form in float32 or wider; inf for a nan, and
    for an optional kernel that raises. Stops early when ``is_over``."""
    dtype: torch.dtype = getattr(torch, choices[0].dtype)
    wide = torch.promote_types(dtype, torch.float32)
    generator = devices.of(device).generator(0)
    shape = (min(case.batch, 2), *case.key[:2])
    x = normalize(torch.empty(shape, dtype=wide, device=device).normal_(generator=generator), dtype)
    triples = resolve_coefficients("polar_express", MuonDefaults().ns_steps)

    def result(values: Tensor, kernel: str) -> Tensor:
        runner = Orthogonalizer(device, values.dtype, KernelOptions(cuda_graphs=False))
        return runner.run(Call(shape, triples, kernel), values).to(wide)

    expected = result(x.to(wide, copy=True), f"standard/torch/{dtype_name(wide)}")

    def error_of(kernel: str) -> float:
        return float((result(x.clone(), kernel) - expected).norm() / expected.norm())

    errors: dict[KernelChoice, float] = {}
    for choice in choices:
        if is_over():
            break
        error = _attempted(str(choice), error_of)
        errors[choice] = math.inf if math.isnan(error) else error
    return errors


def choose_kernels(
    cases: Iterable[Case],
    cached: Mapping[Case, str],
    timer: OwnerTimer,
    model: CostTable,
    options: KernelOptions,
    speeds: Speeds | None = None,
    *,
    budget_s: float = BUDGET_S,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[Case, str]:
    """Return kernels chosen by measuring: ``cached`` ones that are still offered, else the fastest
    that pass `gate_errors`, as far as ``budget_s`` seconds reach. Other cases are left to the rule
    for these ``speeds``, which also wins if no kernel is clearly faster.

    ValueError if the options ask for a kernel that cannot run here, RuntimeError if none is right.
    """
    deadline = timer.clock() + budget_s
    steps = MuonDefaults().ns_steps
    how = timer.ns_dtype, timer.device, steps, options.method, options.backend, speeds
    chosen: dict[Case, str] = {}
    todo: dict[Case, tuple[KernelChoice, ...]] = {}
    for case in cases:
        choices = candidates(case.key[0], case.key[1], *how)
        if cached.get(case, "") in map(str, choices):
            chosen[case] = cached[case]
        elif len(choices) > 1:
            todo[case] = choices
    compile_ahead(todo, timer.device, lambda: timer.clock() >= deadline)
    fastest: dict[Case, KernelChoice | None] = {}
    known: dict[Case, float] = {}
    for number, case in enumerate(in_order(todo, model)):
        progress(number)
        timed = long_batch(case, known) if devices.of(timer.device).is_cpu else case
        if timed not in fastest:
            fastest[timed] = _fastest(timed, todo[case], timer, model, known, deadline)
        if (best := fastest[timed]) is not None:
            chosen[case] = str(best)
    return chosen


def _fastest(
    case: Case,
    choices: Sequence[KernelChoice],
    timer: OwnerTimer,
    model: CostTable,
    known: dict[Case, float],
    deadline: float,
) -> KernelChoice | None:
    """Return the choice for a case; None if time or memory is too short to measure it."""
    # Checks take a run, too, and a case is decided only if all of its kernels are timed.
    each_s = replace(model, entries=_by_row(known)).batch_ms(case.key, case.batch) / 1e3
    latest = deadline - 3 * len(choices) * each_s
    if timer.clock() > latest:
        return None
    try:
        errors = gate_errors(case, choices, timer.device, is_over=lambda: timer.clock() > latest)
    except torch.OutOfMemoryError:
        return None
    right = [choice for choice, error in errors.items() if error <= ERROR_LIMITS[timer.ns_dtype]]
    if not right and len(errors) == len(choices):
        rows, cols, _ = case.key
        raise RuntimeError(
            f"no Newton-Schulz kernel is right for {case.batch} x [{rows}, {cols}] here: "
            + ", ".join(f"{choice} has error {error:.2g}" for choice, error in errors.items())
        )
    runs = [(case, str(choice)) for choice in right]
    if len(errors) < len(choices) or timer.reserve(runs) != runs:
        return None
    times = median_times(runs, timer, model, known, deadline=deadline, enough_s=_CHOICE_S)
    if len(times) < len(runs):
        return None
    ms = {choice: times[run] for choice, run in zip(right, runs) if times[run] < math.inf}
    if not ms:
        return None
    best, first = min(ms, key=lambda choice: (ms[choice], str(choice))), next(iter(ms))
    return best if ms[best] < _MARGIN * ms[first] else first


def compile_ahead(
    todo: Mapping[Case, Sequence[KernelChoice]],
    device: torch.device,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Compile the Triton kernels of all cases, a second or more each, on all processors at once.
    Errors here are raised again in `gate_errors`. Compiled code depends only on whether tiles
    divide a size, so small matrices are enough."""

    def compile_one(run: tuple[Case, KernelChoice]) -> None:
        if not is_over():
            with suppress(Exception):
                gate_errors(run[0], run[1:], device)

    def small(case: Case) -> Case:
        rows, cols, dtype = case.key
        few = min(rows, rows % 256 + 256)
        return Case((few, few if rows == cols else min(cols, cols % 256 + 512), dtype), 1)

    runs = {
        (small(case), choice): None
        for case, choices in todo.items()
        for choice in choices
        if choice.backend.startswith("triton")
    }
    if runs:
        with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1)) as threads:
            list(threads.map(compile_one, runs))


# ---- measured costs ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """The common settings of all ranks that measure together. ``sharing`` processes share this
    machine; ``model`` has the estimates for this hardware; of the ranks that share a cache, one
    ``leads`` and writes it."""

    transport: Transport
    device: torch.device
    ns_dtype: torch.dtype
    speeds: Speeds
    kernels: KernelOptions
    sharing: int
    model: CostTable
    folder: str | None
    key: costs.CacheKey
    leads: bool

    @classmethod
    def agreed(
        cls,
        transport: Transport,
        device: torch.device,
        cache_dir: str | os.PathLike[str] | None,
        kernels: KernelOptions,
        ns_dtype: str | torch.dtype,
        momentum: bool,
        keys: Sequence[ShapeKey],
    ) -> _Setting:
        """Agree with all ranks on dtype, speeds and backends for ``keys``; a collective call."""
        given = costs.cache_directory() if cache_dir is None else cache_dir
        folder, own = None if given is None else os.fspath(given), devices.of(device)

        def here() -> tuple[Any, ...]:
            dtype = resolve_ns_dtype(ns_dtype, device)
            is_open = own.has_triton and kernels.backend == "auto"
            reason = why_not("triton", device, torch.float32) if is_open else None
            rows = max((min(key[:2]) for key in keys), default=0)
            speeds = choosing.measured_speeds(device, dtype, rows)
            return socket.gethostname(), folder, own.name(), dtype, speeds, reason

        ranks = exchanged(transport, here)
        host, _, name, *_ = ranks[transport.rank]
        found = {(dtype, speeds) for *_, dtype, speeds, _ in ranks}
        dtype, speeds = choosing.common_choice(found, device)
        if len(found) > 1 and kernels.backend == "auto" and speeds.backend == "torch_rounded":
            kernels = replace(kernels, backend="torch_rounded")
        lacking = [(rank, why) for rank, (*_, why) in enumerate(ranks) if why is not None]
        if lacking:
            kernels = replace(kernels, backend="torch")
        if lacking and transport.rank == 0:
            (first, why), count = lacking[0], f"{len(lacking)} of {len(ranks)} ranks"
            message = f"dmuon: the kernel backend 'triton' is not available on {count}, so all do "
            warn(f"{message}without; on rank {first}: {why}", of_rank=True)
        row, sharing = costs.nearest_device(device.type, name), 1
        if own.is_cpu:
            sharing = sum(rank[0] == host for rank in ranks)
            name = f"{name}, {sharing} process{'es' if sharing > 1 else ''}"
        # Choices among fewer kernels, and times without graphs, must not serve other settings.
        parts = [backend_version(device), ns.KERNEL_VERSION, kernels.method, kernels.backend]
        parts += ["eager"] if own.graphs() and kernels.cuda_graphs is False else []
        version, steps = "-".join(map(str, parts)), MuonDefaults().ns_steps
        model = CostTable(f"measured on {name}", {}, row, steps, "measured", momentum=momentum)
        of_dtype = dtype_name(dtype), steps, momentum
        key = costs.CacheKey(name, torch.__version__, version, *of_dtype)
        caches = [rank[:4] for rank in ranks]
        leads = caches.index(caches[transport.rank]) == transport.rank
        return cls(transport, device, dtype, speeds, kernels, sharing, model, folder, key, leads)

    def cached(self, fresh: bool) -> tuple[CostTable, str | None]:
        """Return (the table in this rank's cache, without entries if there is none or ``fresh``;
        the problem, if there was one)."""
        found, problem = None, None
        if self.folder is not None and not fresh:
            found, problem = costs.read_cache(self.folder, self.key)
        return found or self.model, problem

    def write(self, new: CostTable, old: CostTable, problem: str | None) -> None:
        """Write new entries to the cache; warn of problems."""
        if not self.leads:
            return
        if self.folder is None:
            problem = "costs are not cached: there is no home directory and no cache_dir was given"
        elif old.updated(new) != old:
            lost = costs.add_to_cache(self.folder, self.key, new)
            problem = problem or lost
        if problem is not None:
            warn(f"dmuon: {problem}", of_rank=True)

    def times(
        self,
        names: Mapping[Case, str],
        cached: Mapping[Case, float],
        make: Callable[[], OwnerTimer],
        budget_s: float,
    ) -> dict[Case, float]:
        """Return the milliseconds of each case on the slowest rank with its kernel in ``names``,
        inf if it fails: ``cached`` times that all ranks have, others measured by all at once."""
        by_rank = exchanged(self.transport, lambda: dict(cached))
        is_cpu = devices.of(self.device).is_cpu

        def is_known(case: Case, ms: Mapping[Case, float]) -> bool:
            return case in ms or (is_cpu and long_batch(case, ms) != case)

        lacking = [case for case in names if not all(is_known(case, ms) for ms in by_rank)]

        def measure() -> dict[Case, float]:
            timer, known = make(), dict(cached)
            runs = timer.reserve([(case, names[case]) for case in in_order(lacking, self.model)])
            found = median_times(
                runs, timer, self.model, known, deadline=timer.clock() + budget_s,
                enough_s=_PRICES_S, progress=self.progress("measures Newton-Schulz", 2 * len(runs)),
            )  # fmt: skip
            # A new time replaces the cached one, larger or not.
            return dict(cached) | {case: ms for (case, _), ms in found.items()}

        if lacking:
            by_rank = exchanged(self.transport, measure)
        cases = dict.fromkeys(chain.from_iterable(by_rank))
        return {case: max(ms[case] for ms in by_rank if case in ms) for case in cases}

    def progress(self, what: str, total: int) -> Callable[[int], None]:
        """Return a function that reports the first rank's work once on stderr, if it takes long."""
        begin, told = time.monotonic(), self.transport.rank != 0

        def show(done: int) -> None:  # a thread would disturb the timing
            nonlocal told
            if not told and time.monotonic() - begin > _SHOW_AFTER_S:
                told = True
                what_of = f"dmuon {what} ({done} of {total})"
                sys.stderr.write(f"{what_of}; later runs find it in the cache\n")

        return show


def exchanged(transport: Transport, work: Callable[[], T]) -> list[T]:
    """Return the result of ``work`` from each rank; if it fails on one rank, all raise."""
    with torch.no_grad():
        mine = attempt_in_all([transport], work, what="dmuon: measuring costs")
    return transport.gather_objects(mine)


def measured_costs(
    transport: Transport,
    keys: Iterable[ShapeKey],
    device: torch.device,
    options: PlannerOptions,
    *,
    kernels: KernelOptions = KernelOptions(),  # noqa: B008  frozen
    ns_dtype: str | torch.dtype = "auto",
    momentum: bool = True,
    fresh: bool = False,
    timer: Callable[..., OwnerTimer] = OwnerTimer,
    batch_bytes: int = BATCH_BYTES,
    budget_s: float = BUDGET_S,
) -> CostTable:
    """Return the slowest rank's costs of batches of these (rows, cols, dtype), and kernels to run.

    A collective call; the table is equal on all ranks. The mesh's first rank chooses kernels in at
    most about ``budget_s`` seconds, then all ranks measure costs that are not cached (all costs if
    ``fresh``) in as many seconds again. ``momentum`` is as in `CostTable`, ``timer`` makes the
    timers, ``batch_bytes`` is the largest size of a batch of several matrices, in the Newton-Schulz
    dtype. An error in measuring is raised on its rank, and ConsensusError on the other ranks."""
    keys = list(keys)
    at = _Setting.agreed(transport, device, options.cache_dir, kernels, ns_dtype, momentum, keys)
    old, problem = at.cached(fresh)
    cases = cases_of(keys, batch_bytes // at.ns_dtype.itemsize)
    how = {"momentum": momentum, "sharing": at.sharing, "options": at.kernels}
    make = partial(timer, device, at.ns_dtype, **how)

    def choose() -> dict[Case, str]:
        if transport.rank != 0:
            return {}
        known, progress = _of_cases(old.kernels, cases), at.progress("chooses kernels", len(cases))
        given = cases, known, make(), at.model, at.kernels, at.speeds
        return choose_kernels(*given, budget_s=budget_s, progress=progress)

    offered = at.ns_dtype, device, MuonDefaults().ns_steps, at.kernels.method, at.kernels.backend
    rule = {c: str(fixed_choice(c.key[0], c.key[1], *offered, at.speeds)) for c in cases}
    tuned = exchanged(transport, choose)[0]
    names, timed = rule | tuned, rule | _of_cases(old.kernels, cases)
    cached = {
        case: ms
        for case, ms in _of_cases(old.entries, cases).items()
        if timed[case] == names[case]  # measured with the kernel to run
    }
    times = at.times(names, cached, make, budget_s)
    # A kernel that failed on a rank has no time, and no rank runs it.
    for case in [case for case, ms in times.items() if ms == math.inf]:
        names[case] = rule[case]
        del times[case]
        tuned.pop(case, None)
    table = replace(at.model, entries=_by_row(times), kernels=_by_row(names))
    devices.of(device).release_memory()
    # The rule's choices for lack of time are not cached, so that a later run can measure.
    at.write(replace(table, kernels=_by_row(tuned)), old, problem)
    return table


# ---- links and rates -----------------------------------------------------------------------

_FEW_BYTES, _MOST_BYTES, _ENOUGH_S = 1 << 12, 1 << 26, 0.03  # of an exchange
_PASSED = 1 << 23  # elements of a pass
_RUNS = 5


def slowest_s(
    transport: Transport, device: torch.device, work: Callable[[], object], runs: int = _RUNS
) -> float:
    """Return the median seconds on the slowest rank; all ranks begin together."""
    token, times = torch.zeros(1, device=device), []
    for _ in range(runs):
        transport.all_reduce(token, tag="measuring").wait()
        watch = Stopwatch(device)
        watch.start()
        work()
        watch.stop()
        times.append(watch.milliseconds() / 1e3)
    return max(transport.gather_objects(statistics.median(times[1:])))


def local_rates(transport: Transport, device: torch.device) -> tuple[float, float, float]:
    """Return the slowest rank's rates while all ranks work: bytes per second of elementwise passes,
    and of passes into new memory; seconds per call."""
    source, few, calls = torch.ones(_PASSED, device=device), torch.ones(8, device=device), 1000
    target, slowest = torch.empty_like(source), partial(slowest_s, transport, device)
    copied, cloned = slowest(lambda: target.copy_(source)), slowest(source.clone)
    call_s = slowest(lambda: [few.add_(1.0) for _ in range(calls)]) / calls
    return 2 * source.nbytes / copied, 2 * source.nbytes / cloned, call_s


def on_links(
    table: CostTable,
    transport: Transport,
    device: torch.device,
    options: PlannerOptions,
    topology: Topology,
) -> CostTable:
    """Return ``table`` with measured links, in about a second (or from the cache): how fast each
    rank sends inside its node, and to other nodes while all ranks do. A collective call."""
    each, folder = transport.gather_objects(socket.gethostname()), options.cache_dir
    hosts = ", ".join(f"{n} on {host}" for host, n in sorted(Counter(each).items()))
    name = f"{table.source}: {hosts}; nodes of {[*map(len, topology.slots())]}"
    key, row = costs.CacheKey(name, torch.__version__, "links", "", 0, False), table.device
    assert row is not None, "what was measured has a row"
    folder = costs.cache_directory() if folder is None else folder
    known = costs.read_cache(folder, key)[0] if transport.rank == 0 and folder else None
    found = transport.broadcast_object(known, 0)
    with torch.no_grad():
        links = _Links(transport, device, topology)
        if found is None or not links.are_as(found):
            link, network, turn_s, sent_s = links.measure()
            at, own = replace(row, link=link or row.link, network=network or row.network), None
            if devices.of(device).is_cpu:
                own = Rates(row.flops, *local_rates(transport, device), turn_s, sent_s)
            found = CostTable(name, device=at, rates=own)
            if transport.rank == 0 and folder:
                costs.add_to_cache(folder, key, found)
    table = replace(table, rates=found.rates, device=replace(row, link=found.device.link))
    if topology.nodes == 1:
        return table
    card = 8e-9 * found.device.network * topology.columns / NIC_SHARE
    return table.on_network(f"{card:.4f}Gb/node", topology.columns)


class _Links:
    """Exchanges of all ranks at once, each with one other rank: the next on its node (``step`` 0),
    or the rank at its place on the next node (1)."""

    def __init__(self, transport: Transport, device: torch.device, topology: Topology) -> None:
        self._transport, self._device, rows = transport, device, topology.slots()
        self._peers: list[list[int]] = [[], []]
        for rank in range(transport.world):
            n = topology.node(rank)
            c, other = rows[n].index(rank), rows[(n + 1) % len(rows)]
            self._peers[0].append(rows[n][(c + 1) % len(rows[n])])
            self._peers[1].append(other[min(c, len(other) - 1)])
        self._has = topology.columns > 1, topology.nodes > 1

    def exchange(self, step: int, nbytes: int) -> float:
        """Return the seconds of sending ``nbytes``."""
        rank, peers = self._transport.rank, self._peers[step]
        sent = [nbytes * (r == peers[rank] != rank) for r in range(len(peers))]
        came = [nbytes * (peer == rank != r) for r, peer in enumerate(peers)]
        source, output = (
            torch.zeros(sum(splits), dtype=torch.uint8, device=self._device)
            for splits in (sent, came)
        )
        work = partial(self._transport.all_to_all, output, source, came, sent, tag="measuring")
        runs = _RUNS * (1 + 2 * (nbytes <= _FEW_BYTES))
        return slowest_s(self._transport, self._device, lambda: work().wait(), runs)

    def are_as(self, known: CostTable) -> bool:
        """Whether an exchange still takes about as long as in ``known``; networks may change."""
        rates, device = known.rates, known.device
        if not self._has[1] or device is None:
            return True
        latency, per_byte = (0.0, 0.0) if rates is None else (rates.turn_s, rates.sent_s)
        nbytes = _FEW_BYTES << 7
        expected = latency + nbytes * (per_byte + 1 / device.network)
        return 2 / 3 < self.exchange(1, nbytes) / expected < 3 / 2

    def rate(self, step: int) -> tuple[float, float, float]:
        """Return the seconds of a few bytes, of each further byte, and of a core per byte."""
        few = taken = self.exchange(step, _FEW_BYTES)
        nbytes, less = _FEW_BYTES << 6, _FEW_BYTES
        while True:
            before, began = taken, time.process_time()
            taken = self.exchange(step, nbytes)
            spent = time.process_time() - began
            if taken > max(_ENOUGH_S, 2 * few) or nbytes >= _MOST_BYTES:
                break
            nbytes, less = 4 * nbytes, nbytes
        cores = statistics.fmean(self._transport.gather_objects(spent)) / (_RUNS * nbytes)
        # The time of the last bytes, because a shaped link lets a burst pass, or half the mean.
        return few, max(taken / nbytes / 2, (taken - before) / (nbytes - less)), cores

    def measure(self) -> tuple[float, float, float, float]:
        """Return the slowest rank's bytes per second inside a node and across nodes (0: there is no
        other rank, or node); seconds of a turn, and of a core for each byte that is sent."""
        is_cpu, inside, across, turn_s, sent_s = devices.of(self._device).is_cpu, 0.0, 0.0, 0.0, 0.0
        if self._has[0]:
            turn_s, per_byte, _ = self.rate(0)
            inside, sent_s = 1 / per_byte, per_byte * is_cpu
        if self._has[1]:
            few, per_byte, cores = self.rate(1)
            turn_s, sent_s = max(few, turn_s), sent_s or min(cores, per_byte) * is_cpu
            across = 1 / max(per_byte - sent_s, 0.05 * per_byte)  # without the cores' time
        return inside, across, turn_s, sent_s


def _by_row(values: Mapping[Case, T]) -> dict[ShapeKey, dict[int, T]]:
    """Return values by shape and batch size, as in a `CostTable`."""
    found: dict[ShapeKey, dict[int, T]] = defaultdict(dict)
    for case, value in values.items():
        found[case.key][case.batch] = value
    return dict(found)


def _of_cases(table: Mapping[ShapeKey, Mapping[int, T]], cases: Iterable[Case]) -> dict[Case, T]:
    """Return the values of these cases, as the inverse of `_by_row`."""
    return {c: table[c.key][c.batch] for c in cases if c.batch in table.get(c.key, ())}
