"""Measured costs: the scheduler's profiler over the kernels that train, agreed on by all ranks.

::

    every rank   which device, which Newton-Schulz dtype           -> exchange
                 read the cache, say what it lacks                 -> exchange
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmuon.comm.consensus import attempt
from dmuon.comm.streams import Stopwatch
from dmuon.comm.transport import Transport
from dmuon.config import MuonDefaults, PlannerOptions
from dmuon.kernels.newton_schulz import KERNEL_VERSION, newton_schulz, resolve_ns_dtype
from dmuon.kernels.ops import ops_for
from dmuon.scheduler import cost_cache
from dmuon.scheduler.cost_cache import CacheKey
from dmuon.scheduler.costs import (
    ANALYTIC_DEVICES,
    CostTable,
    ShapeKey,
    analytic_class,
    merge_slowest,
)
from dmuon.scheduler.profile import PASSES, Entries, Want, Workbench, measure, wanted
from dmuon.scheduler.specs import ITEM_SIZE, dtype_name
from dmuon.update import momentum_update

__all__ = ["NewtonSchulzBench", "Progress", "device_name", "measured_costs"]

T = TypeVar("T")
_SHOW_AFTER_S = 2.0
_MEMORY_SHARE = 0.25  # of what is free

BenchFactory = Callable[[torch.dtype, int], Workbench]


# ---- what all ranks agree on -------------------------------------------------------------


def measured_costs(
    transport: Transport,
    keys: Sequence[ShapeKey],
    device: torch.device,
    options: PlannerOptions,
    *,
    fresh: bool = False,
    bench: BenchFactory | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """What batches of matrices with these (rows, cols, dtype) cost on the slowest rank.

    A collective call; the entries are equal on all ranks. Takes about
    ``options.profile_budget_s`` seconds at most, and next to none where every rank finds all it
    needs in its cache. ``fresh`` ignores what is cached. ``bench`` makes the `Workbench` from the
    Newton-Schulz dtype and the number of processes that share this machine's memory.

    Raises:
        Exception: what measuring raised here; ConsensusError if that was on another rank.
    """
    directory = cost_cache.default_directory() if options.cache_dir is None else options.cache_dir
    places = _exchange(transport, lambda: _Place.of(device, directory))
    here = _Setting.of(places, transport.rank, device)
    wants = wanted(keys, options.max_batch)
    cached, trouble = here.recall(wants, fresh)
    lacking, agreed = _lacking(transport, wants, cached)
    if not lacking and agreed:
        here.warn(trouble)
        return here.table(cached)

    def work() -> Entries:
        make = bench or (lambda ns_dtype, sharing: NewtonSchulzBench(device, ns_dtype, sharing))
        with (
            torch.no_grad(),
            Progress(PASSES * len(lacking), shown=transport.rank == 0) as progress,
        ):
            measured = measure(
                lacking,
                make(here.ns_dtype, here.sharing),
                here.table({}),
                budget_s=options.profile_budget_s,
                known=cached,
                clock=clock,
                progress=progress.update,
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
        # A fresh time replaces the cached one, whichever is larger.
        return {k: cached.get(k, {}) | measured.get(k, {}) for k in cached | measured}

    merged = merge_slowest(_exchange(transport, work))
    lost = here.keep(merged) if merged != cached else None
    here.warn(trouble or lost)
    return here.table(merged)


def _exchange(transport: Transport, work: Callable[[], T]) -> list[T]:
    """What ``work`` gave on each rank; if it failed on one, all raise."""
    mine = attempt(transport, work, what="dmuon: measuring costs", digest=lambda _: "")
    return transport.gather_objects(mine)


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
    def of(cls, places: Sequence[_Place], rank: int, device: torch.device) -> _Setting:
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
            kernels=f"{ops_for(device).name}-{KERNEL_VERSION}",
            ns_dtype=dtype_name(ns_dtype),
            ns_steps=MuonDefaults().ns_steps,
        )
        directory = None if mine.directory is None else Path(mine.directory)
        return cls(device, ns_dtype, sharing, key, directory, places.index(mine) == rank)

    def table(self, entries: Entries) -> CostTable:
        row = ANALYTIC_DEVICES[analytic_class(self.device.type, self.key.device)]
        source = f"measured on {self.key.device}"
        return CostTable(source, entries, row, self.key.ns_steps, "measured")

    def recall(self, wants: Sequence[Want], fresh: bool) -> tuple[Entries, str | None]:
        """The cached entries among ``wants``, and what was wrong with the cache."""
        if self.directory is None:
            return {}, "costs are not cached: there is no home directory and no cache_dir was given"
        if fresh:
            return {}, None
        found = cost_cache.read(self.directory, self.key)
        entries: Entries = {}
        for want in wants:
            if want.batch in found.entries.get(want.key, {}):
                entries.setdefault(want.key, {})[want.batch] = found.entries[want.key][want.batch]
        return entries, found.problem

    def keep(self, entries: Entries) -> str | None:
        """Write ``entries`` to the cache, once for all ranks that share it; what went wrong."""
        if not self.leads or self.directory is None:
            return None
        return cost_cache.add(self.directory, self.key, entries, self.table({}).device)

    def warn(self, trouble: str | None) -> None:
        if trouble is not None and self.leads:
            warnings.warn(f"dmuon: {trouble}", RuntimeWarning, stacklevel=3)


# ---- what is measured --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewtonSchulzBench:
    """Times what an owner does in `Muon.step` for one batch: momentum and Newton-Schulz.

    With the default settings of `Muon`, in the dtype that all ranks use. ``sharing`` processes
    take their operands from the same memory.
    """

    device: torch.device
    ns_dtype: torch.dtype
    sharing: int = 1

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether the operands take no more than a quarter of the free memory."""
        free = _free_bytes(self.device)
        if free is None:
            return True
        return _needed_bytes(key, batch, self.ns_dtype) <= _MEMORY_SHARE * free / self.sharing

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """One update of a stack ``[batch, rows, cols]``; a call returns its milliseconds."""
        rows, cols, dtype = key
        # A generator of our own, and every factory told its device and dtype: the user's random
        # state and defaults neither change nor matter.
        generator = torch.Generator(self.device).manual_seed(0)
        try:
            grads = torch.empty(
                batch, rows, cols, dtype=getattr(torch, dtype), device=self.device
            ).uniform_(-1, 1, generator=generator)
            buffer = torch.zeros_like(grads)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        return lambda: self._run(buffer, grads)

    @torch.no_grad()
    def _run(self, buffer: Tensor, grads: Tensor) -> float:
        muon = MuonDefaults()
        try:
            with _current(self.device):
                watch = Stopwatch(self.device)
                watch.start()
                operand = momentum_update(
                    buffer,
                    grads,
                    momentum=muon.momentum,
                    nesterov=muon.nesterov,
                    mode=muon.momentum_mode,
                    dampening=muon.dampening,
                )
                newton_schulz(
                    operand,
                    steps=muon.ns_steps,
                    coefficients=muon.ns_coefficients,
                    dtype=self.ns_dtype,
                    eps=muon.eps,
                )
                watch.stop()
                return watch.milliseconds()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None


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
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
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
        if self._visible_at is None or self._clock() < self._visible_at:
            return
        if self._bar is None and not self._start():
            return
        rows, cols, _ = want.key
        text = f"dmuon measures Newton-Schulz: {want.batch} x [{rows}, {cols}]"
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
