"""Measured costs: the scheduler's profiler over the kernels that train, agreed on by all ranks.

::

    every rank   which device, which Newton-Schulz dtype           -> exchange
    first rank   choose kernels: cached, or measured               -> exchange
    every rank   read the cache, say what it lacks                 -> exchange
                 measure, all at once, what anyone lacks           -> exchange, the slowest counts
                 write the cache
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmuon.comm.consensus import attempt
from dmuon.comm.streams import Stopwatch
from dmuon.comm.transport import Transport
from dmuon.config import KernelOptions, MuonDefaults, PlannerOptions
from dmuon.kernel_tuning import Kernels, Tuned, choose_kernels
from dmuon.kernels.backends import backend_version, ops_of
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.iterations import squares_program
from dmuon.kernels.newton_schulz import KERNEL_VERSION, resolve_ns_dtype
from dmuon.kernels.ops import MatmulOps
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.kernels.workspace import Workspace, aligned_bytes
from dmuon.operand import normalized_momentum
from dmuon.scheduler import cost_cache
from dmuon.scheduler.cost_cache import CacheKey, Found
from dmuon.scheduler.costs import (
    ANALYTIC_DEVICES,
    CostTable,
    ShapeKey,
    SquareKey,
    analytic_class,
    merge_slowest,
    square_key,
)
from dmuon.scheduler.profile import (
    PASSES,
    Entries,
    Want,
    Workbench,
    batch_sizes,
    measure,
    wanted,
)
from dmuon.scheduler.specs import ITEM_SIZE, dtype_name
from dmuon.types import KernelChoice

__all__ = ["NewtonSchulzBench", "Progress", "SquareBench", "device_name", "measured_costs"]

T = TypeVar("T")
_SHOW_AFTER_S = 2.0
_GROUP = {name: getattr(MuonDefaults(), name) for name in MuonDefaults.__slots__}
_MEMORY_SHARE = 0.25  # of what is free

# From the Newton-Schulz dtype, the processes that share this machine's memory, and the kernels.
BenchFactory = Callable[[torch.dtype, int, Kernels], Workbench]


# ---- what all ranks agree on -------------------------------------------------------------


def measured_costs(
    transport: Transport,
    keys: Sequence[ShapeKey],
    device: torch.device,
    options: PlannerOptions,
    *,
    kernels: KernelOptions = KernelOptions(),  # noqa: B008  frozen
    fresh: bool = False,
    bench: BenchFactory | None = None,
    clock: Callable[[], float] = time.perf_counter,
    squares: bool | None = None,
) -> CostTable:
    """What batches of matrices with these (rows, cols, dtype) cost on the slowest rank, and with
    which kernels.

    A collective call; the entries are equal on all ranks. The mesh's first rank chooses kernels
    (at most ``kernels.tune_budget_s`` seconds), then all measure, for about
    ``options.profile_budget_s`` seconds at most. Both take next to nothing where every rank finds
    all it needs in its cache. ``fresh`` ignores what is cached. ``bench`` makes the `Workbench`.
    ``squares``: measure the m x m part alone too, which tells what batches of several widths gain
    by running together (None: on CUDA; a CPU gains nothing).

    Raises:
        Exception: what measuring raised here; ConsensusError if that was on another rank.
    """
    directory = cost_cache.default_directory() if options.cache_dir is None else options.cache_dir
    places = _exchange(transport, lambda: _Place.of(device, directory))
    here = _Setting.of(places, transport.rank, device, kernels)
    wants = wanted(keys, options.max_batch)
    found = here.recall(fresh)
    chosen, tuned = _agreed_kernels(transport, here, wants, found, kernels, clock)
    parts: list[tuple[Sequence[Want], Entries]] = []
    parts.append((wants, _usable(found, wants, chosen)))
    if squares or (squares is None and device.type == "cuda"):
        sides = _squares(wants, chosen)
        parts.append((sides, _usable_squares(found, sides, chosen)))
    lacking = [_lacking(transport, some, cached) for some, cached in parts]
    cached = [entries for _, entries in parts]
    if all(agreed and not missing for missing, agreed in lacking):
        is_new = any(not sizes <= found.tuned.get(key, set()) for key, sizes in tuned.items())
        lost = here.keep(chosen, tuned, *cached) if is_new else None
        here.warn(found.problem or lost)
        return here.table(chosen, *cached)

    def work() -> list[Entries]:
        make = bench or (
            lambda ns_dtype, sharing, chosen: NewtonSchulzBench(
                device, ns_dtype, sharing, chosen, kernels
            )
        )
        benches = [
            make(here.ns_dtype, here.sharing, chosen),
            SquareBench(device, here.ns_dtype, chosen),
        ]
        deadline = clock() + options.profile_budget_s
        total = PASSES * sum(len(missing) for missing, _ in lacking)
        results = []
        with torch.no_grad(), Progress(total, shown=transport.rank == 0) as progress:
            for (missing, _), known, one in zip(lacking, cached, benches):
                measured = measure(
                    missing,
                    one,
                    here.table({}, {}),
                    budget_s=max(deadline - clock(), 0.0),
                    known=known,
                    clock=clock,
                    progress=progress.update,
                )
                # A fresh time replaces the cached one, whichever is larger.
                results.append(
                    {k: known.get(k, {}) | measured.get(k, {}) for k in known | measured}
                )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return results

    by_rank = _exchange(transport, work)
    merged = [merge_slowest(part) for part in zip(*by_rank, strict=True)]
    lost = here.keep(chosen, tuned, *merged)
    here.warn(found.problem or lost)
    return here.table(chosen, *merged)


def _exchange(transport: Transport, work: Callable[[], T]) -> list[T]:
    """What ``work`` gave on each rank; if it failed on one, all raise."""
    mine = attempt(transport, work, what="dmuon: measuring costs", digest=lambda _: "")
    return transport.gather_objects(mine)


def _agreed_kernels(
    transport: Transport,
    here: _Setting,
    wants: Sequence[Want],
    found: Found,
    options: KernelOptions,
    clock: Callable[[], float],
) -> tuple[Kernels, Tuned]:
    """The first rank's choices, on every rank, and which of them were measured."""
    known = {
        key: {batch: kernel for batch, kernel in by.items() if batch in found.tuned.get(key, ())}
        for key, by in found.kernels.items()
    }

    def work() -> tuple[Kernels, Tuned]:
        if transport.rank != 0:
            return {}, {}
        what = "dmuon chooses kernels"
        with torch.no_grad(), Progress(len(wants), shown=True, what=what) as progress:
            return choose_kernels(
                wants,
                known,
                here.table({}, {}),
                here.device,
                here.ns_dtype,
                options,
                clock=clock,
                progress=lambda done, case: progress.show(done, case.rows, case.cols, case.batch),
            )

    return _exchange(transport, work)[0]


def _usable(found: Found, wants: Sequence[Want], chosen: Kernels) -> Entries:
    """The cached times among ``wants`` that were measured with the chosen kernels."""
    entries: Entries = {}
    for want in wants:
        ms = found.entries.get(want.key, {}).get(want.batch)
        kernel = found.kernels.get(want.key, {}).get(want.batch)
        if ms is not None and kernel == chosen[want.key][want.batch]:
            entries.setdefault(want.key, {})[want.batch] = ms
    return entries


def _squares(wants: Sequence[Want], chosen: Kernels) -> list[Want]:
    """The m x m parts to measure, where matrices of several widths run a Gram form: as wants of
    shape (m, m)."""
    by_side: dict[SquareKey, dict[ShapeKey, int]] = {}
    for want in wants:
        if chosen[want.key][want.batch].startswith("gram"):
            largest = by_side.setdefault(square_key(want.key), {})
            largest[want.key] = max(want.batch, largest.get(want.key, 0))
    return [
        Want((m, m, dtype), batch)
        for (m, dtype), largest in sorted(by_side.items())
        if len(largest) > 1
        for batch in batch_sizes(sum(largest.values()))
    ]


def _usable_squares(found: Found, wants: Sequence[Want], chosen: Kernels) -> Entries:
    """The cached times among these, where no kernel of that short side has changed since."""
    changed = {
        square_key(key)
        for key, by_batch in chosen.items()
        for batch, kernel in by_batch.items()
        if found.kernels.get(key, {}).get(batch) != kernel
    }
    entries: Entries = {}
    for want in wants:
        side = square_key(want.key)
        ms = found.squares.get(side, {}).get(want.batch)
        if ms is not None and side not in changed:
            entries.setdefault(want.key, {})[want.batch] = ms
    return entries


def _lacking(
    transport: Transport, wants: Sequence[Want], cached: Entries
) -> tuple[list[Want], bool]:
    """What any rank lacks, and whether what is cached is the same on all ranks."""
    mine = [(w.key, w.batch) for w in wants if w.batch not in cached.get(w.key, {})]
    text = repr(sorted((key, sorted(by_batch.items())) for key, by_batch in cached.items()))
    answers = transport.gather_objects((mine, hashlib.sha256(text.encode()).hexdigest()))
    anyone = {pair for pairs, _ in answers for pair in pairs}
    lacking = [w for w in wants if (w.key, w.batch) in anyone]
    return lacking, len({digest for _, digest in answers}) == 1


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank runs, as the others need to know it."""

    host: str
    directory: str | None
    device: str
    ns_dtype: str

    @classmethod
    def of(cls, device: torch.device, directory: str | os.PathLike[str] | None) -> _Place:
        return cls(
            socket.gethostname(),
            None if directory is None else os.fspath(directory),
            device_name(device),
            str(resolve_ns_dtype("auto", device)),
        )


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a rank measures, for whom, and where it keeps the result.

    ``sharing``: the processes on this machine that measure at the same time. ``leads``: whether
    this rank is the one that speaks and writes for all that use the same cache.
    """

    device: torch.device
    ns_dtype: torch.dtype
    sharing: int
    key: CacheKey
    directory: Path | None
    leads: bool

    @classmethod
    def of(
        cls, places: Sequence[_Place], rank: int, device: torch.device, options: KernelOptions
    ) -> _Setting:
        mine = places[rank]
        same_dtype = len({place.ns_dtype for place in places}) == 1
        # As in `settings.agreed_dtype`: updates travel in this dtype.
        ns_dtype = resolve_ns_dtype("auto", device) if same_dtype else torch.float32
        sharing, name = 1, mine.device
        if device.type == "cpu":
            sharing = sum(place.host == mine.host for place in places)
            name = f"{name}, {sharing} process{'es' if sharing > 1 else ''}"
        key = CacheKey(
            device=name,
            torch=torch.__version__,
            # What was chosen among a few kernels says nothing of the others.
            kernels=f"{backend_version(device)}-{KERNEL_VERSION}-{options.method}-{options.backend}",
            ns_dtype=dtype_name(ns_dtype),
            ns_steps=MuonDefaults().ns_steps,
        )
        directory = None if mine.directory is None else Path(mine.directory)
        return cls(device, ns_dtype, sharing, key, directory, places.index(mine) == rank)

    def table(
        self, kernels: Kernels, entries: Entries, squares: Entries | None = None
    ) -> CostTable:
        row = ANALYTIC_DEVICES[analytic_class(self.device.type, self.key.device)]
        source = f"measured on {self.key.device}"
        steps, sides = self.key.ns_steps, _by_side(squares or {})
        return CostTable(source, entries, row, steps, "measured", kernels, sides)

    def recall(self, fresh: bool) -> Found:
        """What is cached, and what was wrong with the cache."""
        if self.directory is None:
            return Found(
                {}, "costs are not cached: there is no home directory and no cache_dir was given"
            )
        return Found({}) if fresh else cost_cache.read(self.directory, self.key)

    def keep(
        self, kernels: Kernels, tuned: Tuned, entries: Entries, squares: Entries | None = None
    ) -> str | None:
        """Write to the cache, once for all ranks that share it; what went wrong."""
        if not self.leads or self.directory is None:
            return None
        # A choice is worth keeping although there was no time for its price.
        named = {
            key: {b: kernels[key][b] for b in {*entries.get(key, {}), *tuned.get(key, ())}}
            for key in entries | tuned
        }
        device, sides = self.table({}, {}).device, _by_side(squares or {})
        return cost_cache.add(
            self.directory, self.key, entries, device, kernels=named, squares=sides, tuned=tuned
        )

    def warn(self, trouble: str | None) -> None:
        if trouble is not None and self.leads:
            warnings.warn(f"dmuon: {trouble}", RuntimeWarning, stacklevel=3)


def _by_side(squares: Entries) -> dict[SquareKey, dict[int, float]]:
    return {square_key(key): dict(by_batch) for key, by_batch in squares.items()}


# ---- what is measured --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewtonSchulzBench:
    """Times what an owner does in `Muon.step` for one batch: momentum and Newton-Schulz.

    With the default settings of `Muon`, in the dtype that all ranks use, with the chosen
    ``kernels`` (those of the fixed rule where there is none). ``sharing`` processes take their
    operands from the same memory.
    """

    device: torch.device
    ns_dtype: torch.dtype
    sharing: int = 1
    kernels: Kernels = field(default_factory=dict)
    options: KernelOptions = KernelOptions()  # noqa: RUF009  frozen

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether the operands take no more than a quarter of the free memory."""
        free = _free_bytes(self.device)
        if free is None:
            return True
        return _needed_bytes(key, batch, self.ns_dtype) <= _MEMORY_SHARE * free / self.sharing

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """One update of a stack ``[batch, rows, cols]``; a call returns its milliseconds."""
        rows, cols, dtype = key
        muon = MuonDefaults()
        triples = resolve_coefficients(muon.ns_coefficients, muon.ns_steps)
        kernel = self.kernels.get(key, {}).get(batch, "")
        call = Call(((batch, rows, cols),), triples, kernel)
        # A generator of our own, and every factory told its device and dtype: the user's random
        # state and defaults neither change nor matter.
        generator = torch.Generator(self.device).manual_seed(0)
        try:
            grads = torch.empty(
                batch, rows, cols, dtype=getattr(torch, dtype), device=self.device
            ).uniform_(-1, 1, generator=generator)
            buffer = torch.zeros_like(grads)
            runner = Orthogonalizer(self.device, self.ns_dtype, self.options)
            runner.reserve([call])
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        if self.device.type == "cuda":
            for _ in range(2):  # kernels compile in the first, graphs are captured in the second
                self._run(runner, call, buffer, grads)
        return lambda: self._run(runner, call, buffer, grads)

    @torch.no_grad()
    def _run(self, runner: Orthogonalizer, call: Call, buffer: Tensor, grads: Tensor) -> float:
        try:
            with _current(self.device):
                watch = Stopwatch(self.device)
                watch.start()
                (operand,) = runner.operands(call)
                normalized_momentum(buffer, grads, _GROUP, out=operand, fused=runner.is_fused(call))
                orthogonalize(runner, call, [operand])
                watch.stop()
                return watch.milliseconds()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None


@dataclass(frozen=True, slots=True)
class SquareBench:
    """Times the m x m part of Gram Newton-Schulz alone; its shapes are (m, m).

    With the Gram kernel that is chosen most often for matrices of this short side: the m x m parts
    of two forms or tiles differ by little.
    """

    device: torch.device
    ns_dtype: torch.dtype
    kernels: Kernels

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether the operands take no more than a quarter of the free memory."""
        free = _free_bytes(self.device)
        needed = 4 * batch * key[0] ** 2 * self._operands(key)[1].itemsize
        return free is None or needed <= _MEMORY_SHARE * free

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """One pass over ``[batch, m, m]``; a call returns its milliseconds."""
        m, muon = key[0], MuonDefaults()
        triples = resolve_coefficients(muon.ns_coefficients, muon.ns_steps)
        choice = self._choice(key)
        ops, dtype = self._operands(key)
        workspace = Workspace(self.device)
        try:
            workspace.reserve(3 * aligned_bytes((batch, m, m), dtype))
            eye = torch.eye(m, dtype=dtype, device=self.device)
            r = eye.expand(batch, m, m).contiguous()
            program = squares_program(r, triples, choice.restarts, ops, workspace)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

        def run() -> float:
            with _current(self.device):
                watch = Stopwatch(self.device)
                watch.start()
                program.run()
                watch.stop()
                return watch.milliseconds()

        return run

    def _operands(self, key: ShapeKey) -> tuple[MatmulOps, torch.dtype]:
        """What multiplies, and the dtype in which it holds m x m matrices."""
        ops = ops_of(self._choice(key), self.device, key[0])
        return ops, ops.held or self.ns_dtype

    def _choice(self, key: ShapeKey) -> KernelChoice:
        names = Counter(
            kernel
            for shape, by_batch in self.kernels.items()
            for kernel in by_batch.values()
            if square_key(shape) == square_key(key) and kernel.startswith("gram")
        )
        return KernelChoice.parse(min(names, key=lambda name: (-names[name], name)))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Events are recorded on the current device's stream, which may be another's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _needed_bytes(key: ShapeKey, batch: int, ns_dtype: torch.dtype) -> int:
    rows, cols, dtype = key
    wide = 2 * max(4, ITEM_SIZE[dtype])  # Newton-Schulz normalizes in float32 at least
    stacks = rows * cols * (3 * ITEM_SIZE[dtype] + wide + 3 * ns_dtype.itemsize)
    squares = 6 * min(rows, cols) ** 2 * ns_dtype.itemsize
    return batch * (stacks + squares)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_bytes() if device.type == "cpu" else None


def _free_host_bytes(root: Path = Path("/")) -> int | None:
    """What Linux says is available, or less in a container with a limit; None if unknown."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        free = 1024 * int(re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)[1])  # type: ignore[index]
    except (OSError, TypeError):
        return None
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int((root / "sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group, or "max"
        return free
    return min(free, max(0, limit - used))


def device_name(device: torch.device) -> str:
    """The hardware, and how much of it this process has.

    A number of threads belongs to a CPU: it decides the time as much as the model does.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_cpu_model()}, {capability}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


# ---- what the user sees ------------------------------------------------------------------


class Progress:
    """A bar on standard error, if measuring takes more than two seconds and someone watches."""

    def __init__(
        self,
        total: int,
        *,
        shown: bool,
        what: str = "dmuon measures Newton-Schulz",
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._what = what
        self._console = console
        self._clock = clock
        self._visible_at = clock() + _SHOW_AFTER_S if shown else None
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, want: Want) -> None:
        """``done`` of the wants are through, ``want`` is next."""
        self.show(done, *want.key[:2], want.batch)

    def show(self, done: int, rows: int, cols: int, batch: int) -> None:
        """``done`` are through, a batch of this shape is next."""
        if self._visible_at is None or self._clock() < self._visible_at:
            return
        if self._bar is None and not self._start():
            return
        text = f"{self._what}: {batch} x [{rows}, {cols}]"
        self._bar.update(self._bar.task_ids[0], completed=done, description=text, refresh=True)

    def _start(self) -> bool:
        from rich import progress
        from rich.console import Console

        console = self._console or Console(stderr=True)
        if not console.is_terminal:
            self._visible_at = None
            return False
        # It draws when told to, for a thread that draws would disturb what is measured.
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._bar.add_task("", total=self._total)
        self._bar.start()
        return True
