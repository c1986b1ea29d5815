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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dmuon.comm.consensus import attempt
from dmuon.comm.transport import Transport
from dmuon.config import KernelOptions, MuonDefaults, PlannerOptions
from dmuon.kernel_tuning import Kernels, Tuned, choose_kernels
from dmuon.kernels.backends import backend_version
from dmuon.kernels.newton_schulz import KERNEL_VERSION, resolve_ns_dtype
from dmuon.progress import Progress
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
from dmuon.scheduler.specs import dtype_name
from dmuon.workbench import NewtonSchulzBench, SquareBench

__all__ = ["device_name", "measured_costs"]

T = TypeVar("T")

# From the Newton-Schulz dtype, the processes that share this machine's memory, and the kernels.
BenchFactory = Callable[[torch.dtype, int, Kernels], Workbench]


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
