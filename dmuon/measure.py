"""Measuring: one loop that times Newton-Schulz as owners run it chooses kernels and fills costs.

every rank   its device and Newton-Schulz dtype                  -> exchange
first rank   choose kernels: cached, or measured                 -> exchange
every rank   times of these kernels in its cache                 -> exchange
             measure, all at once, what any rank lacks           -> exchange, the slowest counts
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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

PASSES = 10  # over everything, the first of which warms up
_MIN_TIMES = 5  # medians are of at least so many, where that is quick
_FEW_PASSES = 2  # where it is not
_STABLE = 0.05  # of the median, between the quartiles
_PRICES_SHARE = 0.025  # of the budget is quick, as prices need be right to a few percent only
_CHOICE_MS = 20.0  # of running the kernels of one case are quick
_LOST = 1.2  # times as long as the fastest: another pass would change nothing
_MARGIN = 0.97  # of the fixed choice's time: noise does not decide
_MEMORY_SHARE = 0.25  # of what is free
_SHOW_AFTER_S = 2.0

# Relative Frobenius error that a kernel may have: several times that of each dtype's safe forms.
ERROR_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of ``batch`` matrices of a (wide) shape, of which the model has ``count``."""

    key: ShapeKey
    batch: int
    count: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, *self.key[:2]


Run = tuple[Case, str]  # with a kernel, "" for the fixed rule's
Progress = Callable[[int, Case], object]  # gets the number of runs done, and the next case


def cases_of(
    keys: Iterable[ShapeKey], max_batch: int, batch_numel: int = BATCH_NUMEL
) -> tuple[Case, ...]:
    """The cases that planning for these matrices needs, sorted: batches of powers of two, and the
    largest one (see `largest_batch`).

    >>> [(c.batch, c.count) for c in cases_of([(4, 6, "float32")] * 2 + [(6, 4, "float32")], 16)]
    [(1, 3), (2, 3), (3, 3)]
    """
    cases: list[Case] = []
    for key, count in sorted(Counter(map(canonical_key, keys)).items()):
        most = min(count, largest_batch(*key[:2], max_batch, batch_numel))
        sizes = {*(2**i for i in range(most.bit_length())), most}
        cases += [Case(key, batch, count) for batch in sorted(sizes)]
    return tuple(cases)


def _smaller(case: Case) -> Iterator[Case]:
    """The smaller batches that `cases_of` lists."""
    sizes = (2**i for i in range(case.batch.bit_length()))
    return (replace(case, batch=size) for size in sizes if size < case.batch)


def by_smaller_batches(times: Mapping[Case, float], cases: Iterable[Case]) -> dict[Case, float]:
    """Milliseconds of these batches on a CPU, some of them `costs.by_smaller`."""
    found = dict(times)
    for case in sorted(cases, key=lambda case: case.batch):
        known = {smaller.batch: found[smaller] for smaller in _smaller(case) if smaller in found}
        is_long = any(ms >= costs.LONG_MS for ms in known.values())
        most = math.inf if is_long else found.get(case, math.inf)
        found[case] = min(most, costs.by_smaller(known, case.batch))
    return found


# ---- the timing loop ---------------------------------------------------------------------


@dataclass
class Pace:
    """How long a run will take: as before (``known``, in milliseconds), or as the model says,
    corrected by known times."""

    _model: CostTable
    known: dict[Case, float]
    clock: Callable[[], float] = time.perf_counter

    def is_late(self, case: Case, deadline: float, runs: int = 1) -> bool:
        """Whether this number of runs is expected to end after the deadline."""
        ms = self.known.get(case)
        if ms is None:
            table = replace(self._model, entries=_by_row(self.known))
            ms = table.batch_ms(case.key, case.batch)
        return runs * ms / 1e3 > deadline - self.clock()

    def alike(self, case: Case) -> Case:
        """The smallest known batch of this shape that is so long that a CPU runs larger ones, such
        as ``case``, alike; ``case`` if there is none."""
        return next((c for c in _smaller(case) if self.known.get(c, 0.0) >= costs.LONG_MS), case)

    def in_order(self, cases: Iterable[Case]) -> list[Case]:
        """Single matrices before larger batches, each by the time of all matrices of its shape,
        longest first; the smallest before all others where nothing is known of the device."""
        ms = {case: self._model.batch_ms(case.key, 1) for case in cases}
        ordered = sorted(ms, key=lambda case: (case.batch, -case.count * ms[case], case.key))
        if ordered and not self.known:
            smallest = min(ordered, key=lambda case: (case.batch, ms[case], case.key))
            ordered.sort(key=lambda case: case != smallest)
        return ordered


def median_times(
    runs: Sequence[Run],
    timer: OwnerTimer,
    pace: Pace,
    *,
    deadline: float = math.inf,
    enough_ms: float = math.inf,
    is_race: bool = False,
    progress: Progress = lambda done, case: None,
) -> dict[Run, float]:
    """The median milliseconds of each run, in their order, of which none begins that is not
    expected to end before the ``deadline``; inf for an optional kernel that raises.

    Everything is run once before anything is run again, up to `PASSES` times, so that no batch
    follows itself, as in training, and a slow second spoils one number of each run. The first pass
    warms up: it counts only for runs that are repeated no more than once, where the smaller number
    does. After ``enough_ms`` of running that is enough. In a race what is clearly slower is not run
    again."""
    times: dict[Run, list[float]] = defaultdict(list)
    medians: dict[Run, float] = {}
    todo, done, spent_ms = list(runs), 0, 0.0
    for number in range(PASSES):
        turns = first_turns(timer.device) if number == 0 else 1
        for run in todo:
            progress(done, run[0])
            done += 1
            if pace.is_late(run[0], deadline, turns):
                continue
            try:
                ms = _attempted(run[1], partial(timer.run, run[0]))
            except torch.OutOfMemoryError:
                continue
            if ms == math.inf:
                medians[run] = ms
                continue
            times[run].append(ms)
            spent_ms += ms
            few = len(times[run]) <= _FEW_PASSES
            ms = min(times[run]) if few else statistics.median(times[run][1:])
            medians[run] = float(f"{ms:.6g}")  # no clock is more exact
            pace.known[run[0]] = medians[run]
        todo = [run for run in todo if medians.get(run, math.inf) < math.inf]
        if is_race and number > 0:
            best = min((medians[run] for run in todo), default=math.inf)
            todo = [run for run in todo if min(times[run]) <= _LOST * best]
        if number > 0 and all(_suffice(times[run], spent_ms >= enough_ms) for run in todo):
            break
    return medians


def first_turns(device: torch.device) -> int:
    """Runs until the first time that counts: an accelerator compiles first, then captures."""
    return 1 if devices.of(device).is_cpu else 3


def _attempted(kernel: str, work: Callable[[str], float]) -> float:
    """What ``work`` finds of a kernel; inf for an optional one that raises, with a warning unless a
    tile is too large for the device."""
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


def _suffice(times: Sequence[float], is_long: bool) -> bool:
    if is_long or len(times) <= _MIN_TIMES:
        return is_long and len(times) >= _FEW_PASSES
    low, middle, high = statistics.quantiles(times[1:], n=4, method="inclusive")
    return high - low <= _STABLE * middle


@dataclass(eq=False, repr=False)
class OwnerTimer:
    """Times an owner's work in `Muon.step` for one batch, with `Muon`'s default settings and one
    workspace. ``momentum``: as in `CostTable`. ``sharing`` processes share memory."""

    device: torch.device
    ns_dtype: torch.dtype
    momentum: bool = True
    sharing: int = 1
    options: KernelOptions = KernelOptions()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        self._runner = Orthogonalizer(self.device, self.ns_dtype, self.options)
        defaults = MuonDefaults()
        self._hyper = Hyper.of(defaults.group())
        self._triples = resolve_coefficients(defaults.ns_coefficients, defaults.ns_steps)
        self._memory: dict[str, tuple[Tensor, Tensor]] = {}  # gradients and momentum, by dtype
        self._warm: set[Run] = set()
        self._own_ms = self._all_own_ms = self._spent_ms = 0.0

    def _call(self, case: Case, kernel: str) -> Call:
        is_raw = not self.momentum and are_raw({self.ns_dtype}, self.device)
        return Call(case.shape, self._triples, kernel, self._hyper.eps if is_raw else None)

    def reserve(self, runs: Iterable[Run]) -> list[Run]:
        """Allocate memory for these, one at a time; returns those that fit a quarter of it."""
        limit = _MEMORY_SHARE * devices.of(self.device).memory()[0] / self.sharing
        fitting = [run for run in runs if self._bytes(*run) <= limit]
        self._memory, self._warm = {}, set()
        self._runner.reserve([self._call(*run) for run in fitting])
        # An own generator, explicit devices and dtypes: the user's defaults do not matter.
        generator = devices.of(self.device).generator(0)
        for dtype in {case.key[2] for case, _ in fitting}:
            most = max(math.prod(case.shape) for case, _ in fitting if case.key[2] == dtype)
            grads = torch.empty(most, dtype=getattr(torch, dtype), device=self.device)
            grads.uniform_(-1, 1, generator=generator)
            self._memory[dtype] = grads, torch.zeros_like(grads)
        return fitting

    def _bytes(self, case: Case, kernel: str) -> int:
        item = getattr(torch, case.key[2]).itemsize
        # Gradient, momentum, operand; normalization makes two more in float32 at least.
        stacks = math.prod(case.shape) * (3 * item + 2 * max(4, item))
        return stacks + self._runner.call_bytes(self._call(case, kernel))

    @torch.no_grad()
    def run(self, case: Case, kernel: str) -> float:
        """Milliseconds of one update of a batch that is reserved, once compiled and captured; on a
        CPU those of the thread itself, which others may interrupt. Raises OutOfMemoryError."""
        is_first = (case, kernel) not in self._warm
        turns = first_turns(self.device) if is_first else 1
        self._warm.add((case, kernel))
        # Events are recorded on the current device's stream, which may be another's.
        with devices.of(self.device).current():
            for _ in range(turns):
                watch = self._once(case, kernel)
            ms = watch.milliseconds()
        if not devices.of(self.device).is_cpu:
            return ms
        own = min(ms, self._own_ms) or ms  # nothing where that clock is coarse
        if not is_first:  # which sets up libraries
            self._spent_ms += ms
            self._all_own_ms += own
        return own

    @property
    def slowdown(self) -> float:
        """Wall time of all runs over the thread's own: 1, unless processes outnumber processors."""
        return self._spent_ms / self._all_own_ms if self._all_own_ms else 1.0

    def _timed(self, work: Callable[[], object]) -> Stopwatch:
        watch, begun = Stopwatch(self.device), time.thread_time()
        watch.start()
        work()
        watch.stop()
        self._own_ms = 1e3 * (time.thread_time() - begun)
        return watch

    def _once(self, case: Case, kernel: str) -> Stopwatch:
        call = self._call(case, kernel)
        memory = self._memory[case.key[2]]
        grads, buffer = (t[: math.prod(case.shape)].view(case.shape) for t in memory)
        operand = self._runner.operand(call)
        if not self.momentum:
            normalize(grads, self.ns_dtype, out=operand)

        def update() -> None:
            if self.momentum:
                Rule().operand(buffer, grads, self._hyper, out=operand)
            self._runner.run(call, operand)

        return self._timed(update)


# ---- choosing kernels --------------------------------------------------------------------


def gate_errors(
    case: Case,
    choices: Sequence[KernelChoice],
    device: torch.device,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[KernelChoice, float]:
    """Relative Frobenius error of each choice on Gaussian matrices (two of a batch, which a kernel
    may confuse), against the standard form in float32 or wider; inf for a nan, and for an optional
    kernel that raises. Ends early when ``is_over``."""
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
    pace: Pace,
    options: KernelOptions,
    speeds: Speeds | None = None,
    *,
    progress: Progress = lambda done, case: None,
) -> dict[Case, str]:
    """The kernels that measurements chose: ``cached`` ones that are still offered, else the fastest
    that pass `gate_errors`, as far as ``options.tune_budget_s`` seconds reach. The rule for these
    ``speeds`` has the other cases, and wins where nothing is clearly faster.

    ValueError if the options ask for what cannot run here, RuntimeError if no candidate is right.
    """
    deadline = pace.clock() + options.tune_budget_s
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
    compile_ahead(todo, timer.device, lambda: pace.clock() >= deadline)
    fastest: dict[Case, KernelChoice | None] = {}
    for number, case in enumerate(pace.in_order(todo)):
        progress(number, case)
        # Where a batch runs matrix by matrix, its size does not matter.
        limit = choosing.ops_of(todo[case][0], timer.device, case.key[0]).batch_rows
        timed = case if limit is None or case.key[0] <= limit else replace(case, batch=1)
        if devices.of(timer.device).is_cpu:
            timed = pace.alike(timed)
        if timed not in fastest:
            fastest[timed] = _fastest(timed, todo[case], timer, pace, deadline)
        if (best := fastest[timed]) is not None:
            chosen[case] = str(best)
    return chosen


def _fastest(
    case: Case, choices: Sequence[KernelChoice], timer: OwnerTimer, pace: Pace, deadline: float
) -> KernelChoice | None:
    """The choice for a case; None where there is too little time or memory to measure it."""
    count = len(choices) * (_FEW_PASSES + 3)
    if pace.is_late(case, deadline, count):
        return None
    try:
        errors = gate_errors(case, choices, timer.device, is_over=lambda: pace.clock() >= deadline)
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
    # Checking compiles too, which may take long.
    if pace.is_late(case, deadline, count) or timer.reserve(runs) != runs:
        return None
    times = median_times(runs, timer, pace, enough_ms=_CHOICE_MS, is_race=True)
    ms = {choice: times[run] for choice, run in zip(right, runs) if times.get(run, 0) < math.inf}
    if len(times) < len(runs) or not ms:
        return None
    best, first = min(ms, key=lambda choice: (ms[choice], str(choice))), next(iter(ms))
    return best if ms[best] < _MARGIN * ms[first] else first


def compile_ahead(
    todo: Mapping[Case, Sequence[KernelChoice]],
    device: torch.device,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Compile the Triton kernels of all cases, a second or more each, on all processors at once.
    What raises here raises again in `gate_errors`. Compiled code depends only on whether tiles
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


class _Session:
    """All ranks that measure together. ``sharing`` processes share this machine. ``model``:
    estimates for this hardware; ``old``: the cached table, the model without one, or if ``fresh``.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        options: PlannerOptions,
        kernels: KernelOptions,
        ns_dtype: str | torch.dtype,
        momentum: bool,
        keys: Iterable[ShapeKey],
        fresh: bool = False,
    ) -> None:
        """A collective call: ranks agree on dtype, speeds and backends for these ``keys``."""
        self.transport, self.budget_s = transport, options.profile_budget_s
        given = costs.cache_directory() if options.cache_dir is None else options.cache_dir
        self._folder = None if given is None else os.fspath(given)
        own = devices.of(device)

        def here() -> tuple[Any, ...]:
            dtype = resolve_ns_dtype(ns_dtype, device)
            is_open = own.has_triton and kernels.backend == "auto"
            reason = why_not("triton", device, torch.float32) if is_open else None
            rows = max((min(key[:2]) for key in keys), default=0)
            speeds = choosing.measured_speeds(device, dtype, rows)
            return socket.gethostname(), self._folder, own.name(), dtype, speeds, reason

        ranks = self.exchanged(here)
        host, _, name, *_ = ranks[transport.rank]
        found = {(dtype, speeds) for *_, dtype, speeds, _ in ranks}
        self.ns_dtype, self.speeds = choosing.common_choice(found, device)
        reasons = [reason for *_, reason in ranks]
        self.kernels = kernels = self._runnable(kernels, reasons, len(found) > 1)
        row = costs.nearest_device(device.type, name)
        self.sharing = 1
        if own.is_cpu:
            self.sharing = sum(rank[0] == host for rank in ranks)
            name = f"{name}, {self.sharing} process{'es' if self.sharing > 1 else ''}"
        # What was chosen among a few kernels, or timed without graphs, says nothing of the others.
        parts = [backend_version(device), ns.KERNEL_VERSION, kernels.method, kernels.backend]
        parts += ["eager"] if own.graphs() and kernels.cuda_graphs is False else []
        version = "-".join(map(str, parts))
        steps, dtype = MuonDefaults().ns_steps, dtype_name(self.ns_dtype)
        self.model = CostTable(f"measured on {name}", {}, row, steps, "measured", momentum=momentum)
        self._key = costs.CacheKey(name, torch.__version__, version, dtype, steps, momentum)
        # The first rank with this cache writes it for all that share it.
        caches = [rank[:4] for rank in ranks]
        self._leads = caches.index(caches[transport.rank]) == transport.rank
        self.progress = ProgressLine(shown=transport.rank == 0)
        cached, self._problem = None, None
        if self._folder is not None and not fresh:
            cached, self._problem = costs.read_cache(self._folder, self._key)
        self.old = cached or self.model

    def _runnable(
        self, kernels: KernelOptions, reasons: Sequence[str | None], differ: bool
    ) -> KernelOptions:
        """What all ranks can run; ``reasons`` why each has no Triton, ``differ``: in speeds."""
        if differ and kernels.backend == "auto" and self.speeds.backend == "torch_rounded":
            kernels = replace(kernels, backend="torch_rounded")
        lacking = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
        if not lacking:
            return kernels
        if self.transport.rank == 0:
            (first, why), found = lacking[0], f"{len(lacking)} of {len(reasons)} ranks"
            message = f"dmuon: the kernel backend 'triton' is not available on {found}, so all do "
            warn(f"{message}without; on rank {first}: {why}", of_rank=True)
        return replace(kernels, backend="torch")

    def exchanged(self, work: Callable[[], T]) -> list[T]:
        """The result of ``work`` on each rank; if it failed on one, all raise."""
        mine = attempt_in_all([self.transport], work, what="dmuon: measuring costs")
        return self.transport.gather_objects(mine)

    def times(
        self,
        names: Mapping[Case, str],
        cached: Mapping[Case, float],
        make: Callable[[], OwnerTimer],
        model: CostTable,
        title: str,
    ) -> dict[Case, float]:
        """The milliseconds of each case with the kernel of this name on the slowest rank, inf where
        it fails: what is ``cached`` on all ranks, and what all measure at once."""
        by_rank = self.exchanged(lambda: dict(cached))
        lacking = [case for case in names if any(case not in times for times in by_rank)]

        def measure() -> dict[Case, float]:
            timer, pace, budget_s = make(), Pace(model, dict(cached)), self.budget_s
            deadline, enough_ms = pace.clock() + budget_s, 1e3 * _PRICES_SHARE * budget_s
            # What takes long enough to be shown is run so many times.
            with torch.no_grad(), self.progress.of(title, _FEW_PASSES * len(lacking)) as shown:
                runs = timer.reserve([(case, names[case]) for case in pace.in_order(lacking)])
                race = partial(median_times, deadline=deadline, enough_ms=enough_ms, progress=shown)
                if not devices.of(timer.device).is_cpu:
                    found = race(runs, timer, pace)
                else:  # what single matrices take may tell what a batch does
                    found = race([run for run in runs if run[0].batch == 1], timer, pace)
                    short = [run for run in runs if pace.alike(run[0]) == run[0]]
                    found |= race([run for run in short if run not in found], timer, pace)
            # A new time replaces the cached one, whichever is larger.
            times = dict(cached) | {case: timer.slowdown * ms for (case, _), ms in found.items()}
            if not devices.of(timer.device).is_cpu:
                return times
            known = (case for case, _ in runs if case in times or pace.alike(case) != case)
            return by_smaller_batches(times, known)

        if lacking:
            by_rank = self.exchanged(measure)
        cases = dict.fromkeys(chain.from_iterable(by_rank))
        return {case: max(ms[case] for ms in by_rank if case in ms) for case in cases}

    def write(self, new: CostTable) -> None:
        """Keep what is new; warn of problems."""
        if not self._leads:
            return
        problem = self._problem
        if self._folder is None:
            problem = "costs are not cached: there is no home directory and no cache_dir was given"
        elif self.old.updated(new) != self.old:
            lost = costs.add_to_cache(self._folder, self._key, new)
            problem = problem or lost
        if problem is not None:
            warn(f"dmuon: {problem}", of_rank=True)


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
) -> CostTable:
    """The slowest rank's costs of batches of these (rows, cols, dtype), and the kernels to run.

    A collective call; the table is equal on all ranks. The mesh's first rank chooses kernels (at
    most ``kernels.tune_budget_s`` seconds), then all measure what is not cached, or all if
    ``fresh``, for about ``options.profile_budget_s`` seconds. ``momentum`` is that of `CostTable`,
    ``timer`` makes the timers, ``batch_bytes`` is the largest size of a batch of several matrices,
    in the Newton-Schulz dtype. What measuring raises here is raised here, ConsensusError on the
    other ranks."""
    keys = list(keys)
    session = _Session(transport, device, options, kernels, ns_dtype, momentum, keys, fresh)
    dtype, old, kernels, speeds = session.ns_dtype, session.old, session.kernels, session.speeds
    cases = cases_of(keys, options.max_batch, batch_bytes // dtype.itemsize)
    how = {"momentum": momentum, "sharing": session.sharing, "options": kernels}
    make = partial(timer, device, dtype, **how)

    def choose() -> dict[Case, str]:
        if transport.rank != 0:
            return {}
        known, pace = _of_cases(old.kernels, cases), Pace(session.model, {})
        with torch.no_grad(), session.progress.of("dmuon chooses kernels", len(cases)) as shown:
            return choose_kernels(cases, known, make(), pace, kernels, speeds, progress=shown)

    offered = dtype, device, MuonDefaults().ns_steps, kernels.method, kernels.backend, speeds
    rule = {case: str(fixed_choice(case.key[0], case.key[1], *offered)) for case in cases}
    tuned = session.exchanged(choose)[0]
    names, timed = rule | tuned, rule | _of_cases(old.kernels, cases)
    cached = {
        case: ms
        for case, ms in _of_cases(old.entries, cases).items()
        if timed[case] == names[case]  # measured with the kernel that is to run
    }
    times = session.times(names, cached, make, session.model, "dmuon measures Newton-Schulz")
    # A kernel that failed on a rank has no time, and nobody runs it.
    for case in [case for case, ms in times.items() if ms == math.inf]:
        names[case] = rule[case]
        del times[case]
        tuned.pop(case, None)
    table = replace(session.model, entries=_by_row(times), kernels=_by_row(names))
    devices.of(device).release_memory()
    # What the rule chose because time was short is not kept, so that it is chosen another time.
    session.write(replace(table, kernels=_by_row(tuned)))
    return table


# ---- links -------------------------------------------------------------------------------

_FEW_BYTES, _MOST_BYTES, _ENOUGH_S = 1 << 12, 1 << 26, 0.03  # of an exchange
_PASSED = 1 << 22  # elements


def on_links(
    table: CostTable,
    transport: Transport,
    device: torch.device,
    options: PlannerOptions,
    topology: Topology,
) -> CostTable:
    """``table`` with links as measured, in about a second (and kept in the cache): how fast each
    rank sends inside its node, and to others while all do. A collective call."""
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
            inside, across, *rates = links.measure()
            at = replace(row, link=inside or row.link, network=across or row.network)
            own = Rates(row.flops, *rates) if devices.of(device).is_cpu else None
            found = CostTable(name, device=at, rates=own)
            if transport.rank == 0 and folder:
                costs.add_to_cache(folder, key, found)
    table = replace(table, rates=found.rates, device=replace(row, link=found.device.link))
    if topology.nodes == 1:
        return table
    card = 8e-9 * found.device.network * topology.columns / NIC_SHARE
    return table.on_network(f"{card:.4f}Gb/node", topology.columns)


class _Links:
    """Exchanges of all ranks at once, each with one other: the next on its node (``step`` 0), or
    the one at its place on the next node (1)."""

    def __init__(self, transport: Transport, device: torch.device, topology: Topology) -> None:
        self._transport, self._device, rows = transport, device, topology.slots()
        self._token = torch.zeros(1, device=device)
        self._peers: list[list[int]] = [[], []]
        for rank in range(transport.world):
            n = topology.node(rank)
            c, other = rows[n].index(rank), rows[(n + 1) % len(rows)]
            self._peers[0].append(rows[n][(c + 1) % len(rows[n])])
            self._peers[1].append(other[min(c, len(other) - 1)])
        self._has = topology.columns > 1, topology.nodes > 1

    def seconds(self, work: Callable[[], object], runs: int = _MIN_TIMES) -> float:
        """The median on the slowest rank."""
        times = []
        for _ in range(runs):
            self._transport.all_reduce(self._token, tag="measuring").wait()  # all begin together
            watch = Stopwatch(self._device)
            watch.start()
            work()
            watch.stop()
            times.append(watch.milliseconds() / 1e3)
        return max(self._transport.gather_objects(statistics.median(times[1:])))

    def exchange(self, step: int, nbytes: int) -> float:
        """Seconds of sending so many bytes."""
        rank, peers = self._transport.rank, self._peers[step]
        sent = [nbytes * (r == peers[rank] != rank) for r in range(len(peers))]
        came = [nbytes * (peer == rank != r) for r, peer in enumerate(peers)]
        source, output = (
            torch.zeros(sum(splits), dtype=torch.uint8, device=self._device)
            for splits in (sent, came)
        )
        work = partial(self._transport.all_to_all, output, source, came, sent, tag="measuring")
        return self.seconds(lambda: work().wait(), _MIN_TIMES * (1 + 2 * (nbytes <= _FEW_BYTES)))

    def are_as(self, known: CostTable) -> bool:
        """Whether one exchange takes about what was measured before: a network may have changed."""
        rates, device = known.rates, known.device
        if not self._has[1] or device is None:
            return True
        latency, per_byte = (0.0, 0.0) if rates is None else (rates.turn_s, rates.sent_s)
        nbytes = _FEW_BYTES << 7
        expected = latency + nbytes * (per_byte + 1 / device.network)
        return 2 / 3 < self.exchange(1, nbytes) / expected < 3 / 2

    def rate(self, step: int) -> tuple[float, float, float]:
        """Seconds of a few bytes, of each more, and of a core for each."""
        few = taken = self.exchange(step, _FEW_BYTES)
        nbytes, less = _FEW_BYTES << 6, _FEW_BYTES
        while True:
            before, began = taken, time.process_time()
            taken = self.exchange(step, nbytes)
            spent = time.process_time() - began
            if taken > max(_ENOUGH_S, 2 * few) or nbytes >= _MOST_BYTES:
                break
            nbytes, less = 4 * nbytes, nbytes
        cores = statistics.fmean(self._transport.gather_objects(spent)) / (_MIN_TIMES * nbytes)
        # Of the last bytes alone, because a shaped link lets a burst pass, but not all of them.
        return few, max(taken / nbytes / 2, (taken - before) / (nbytes - less)), cores

    def measure(self) -> tuple[float, ...]:
        """Of the slowest rank: bytes per second inside a node and across nodes (0: there is no
        other rank, or node), of passes over memory, and of those into new memory; seconds of a
        call, of a turn, and of a core for each byte that is sent."""
        is_cpu, inside, across, turn_s, sent_s = devices.of(self._device).is_cpu, 0.0, 0.0, 0.0, 0.0
        if self._has[0]:
            turn_s, per_byte, _ = self.rate(0)
            inside, sent_s = 1 / per_byte, per_byte * is_cpu
        if self._has[1]:
            few, per_byte, cores = self.rate(1)
            turn_s, sent_s = max(few, turn_s), sent_s or min(cores, per_byte) * is_cpu
            across = 1 / max(per_byte - sent_s, 0.05 * per_byte)  # beside what cores do
        if not is_cpu:
            return inside, across
        source, target = torch.ones(_PASSED), torch.ones(_PASSED)
        some, calls = torch.ones(8), 1000
        times = self.seconds(lambda: target.copy_(source)), self.seconds(source.clone)
        passes = (2 * source.nbytes / each for each in times)
        call_s = self.seconds(lambda: [some.add_(1.0) for _ in range(calls)]) / calls
        return inside, across, *passes, call_s, turn_s, sent_s


def _by_row(values: Mapping[Case, T]) -> dict[ShapeKey, dict[int, T]]:
    """As a `CostTable` has values: by shape and batch size."""
    found: dict[ShapeKey, dict[int, T]] = defaultdict(dict)
    for case, value in values.items():
        found[case.key][case.batch] = value
    return dict(found)


def _of_cases(table: Mapping[ShapeKey, Mapping[int, T]], cases: Iterable[Case]) -> dict[Case, T]:
    """The inverse of `_by_row`, for these cases."""
    return {c: table[c.key][c.batch] for c in cases if c.batch in table.get(c.key, ())}


class ProgressLine:
    """Says on standard error what is measured, once that has taken two seconds: in a terminal the
    case, in a line that leaves nothing behind; elsewhere once."""

    def __init__(self, *, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._visible_at = clock() + (_SHOW_AFTER_S if shown else math.inf)

    @contextmanager
    def of(self, what: str, total: int) -> Iterator[Progress]:
        """Says ``what`` is done, and how many of ``total`` runs are."""
        end = ""

        def show(done: int, case: Case) -> None:  # no thread, which would disturb what is timed
            nonlocal end
            if self._clock() < self._visible_at:
                return
            text, (batch, rows, cols) = f"{what} ({done} of {total})", case.shape
            if sys.stderr.isatty():
                text, end = f"\r{text}: {batch} x [{rows}, {cols}]\x1b[K", "\r\x1b[2K"
            else:
                text, self._visible_at = f"{text}; later runs find it in the cache\n", math.inf
            sys.stderr.write(text)
            sys.stderr.flush()

        try:
            yield show
        finally:
            sys.stderr.write(end)
