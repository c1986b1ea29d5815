"""Measures batches of each shape on this machine's device and prints the times; with --out writes
the cost table for `plan --costs` and `simulate --costs`. Under torchrun all ranks measure at once,
and the slowest counts. Exit status 2 for a mistake, 3 for a crash of the command itself.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from dmuon import devices
from dmuon.catalogue import model_specs
from dmuon.comm.transport import C10dTransport, Transport
from dmuon.config import BATCH_BYTES, PlannerOptions
from dmuon.measure import Case, cases_of, local_rates, measured_costs, slowest_s
from dmuon.report.render import grid, printed
from dmuon.scheduler.costs import MAX_BATCH, CostTable, Rates
from dmuon.scheduler.simulate import Group, collective
from dmuon.scheduler.specs import ITEM_SIZE, ShapeKey
from dmuon.tools.plan import MODELS, positive, wrote
from dmuon.types import PlanError

_WIDTH = 110  # columns of output that is not to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure").add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"{MODELS} (see python -m dmuon plan --help)")
    what.add_argument("--shapes", metavar="MxN,...", help="such as 1024x4096,512x512")
    add = parser.add_argument
    add("--dtype", help="of the parameters (default: the model's own; float32 for --shapes)")
    layouts = ("replicated", "sharded", "dedicated")
    whose = "whose owners to measure: in sharded they run Newton-Schulz alone, in the others "
    whose += "momentum and normalization too (default: %(default)s)"
    add("--layout", choices=layouts, default="replicated", help=whose)
    blocks = "also blocks of each matrix, its rows cut into so many, for block steps"
    add("--blocks", type=_counts, default=(), metavar="N,...", help=blocks)
    count, many = positive(int), "matrices of each of these shapes (default: %(default)s)"
    add("--max-batch", type=count, default=MAX_BATCH, metavar="B", help=many)
    late = "what is not reached in this time is estimated (default: %(default)g)"
    add("--budget", type=positive(float), default=60.0, metavar="SECONDS", help=late)
    device = "such as cpu, cuda, xpu (default: the accelerator, or cpu)"
    add("--device", metavar="TYPE", help=device)
    add("--threads", type=count, metavar="N", help="threads of a CPU measurement, as in training")
    add("--fresh", action="store_true", help="measure again what is cached already")
    add("--cache-dir", metavar="DIR", help="default: the user's cache directory")
    out = "write the cost table there, for costs=PATH and python -m dmuon plan --costs PATH; - for "
    add("--out", metavar="PATH", help=out + "standard output alone")


def run(args: argparse.Namespace) -> int:
    """Measure, and print or write the table."""
    device = devices.default_device()
    if args.device == "cpu":
        device = torch.device("cpu")
    elif args.device not in (None, device.type):
        raise PlanError(
            f"--device {args.device}: torch finds no such device here; try --device {device.type}"
        )
    options = PlannerOptions(cache_dir=args.cache_dir)
    how = {"momentum": args.layout != "sharded", "fresh": args.fresh, "budget_s": args.budget}
    keys, begin, threads = _keys(args), time.perf_counter(), torch.get_num_threads()
    try:
        torch.set_num_threads(args.threads or threads)
        with _all_ranks() as transport:
            table = measured_costs(transport, keys, device, options, **how)
            table = replace(table, rates=measured_rates(transport, device))
            if transport.rank:
                return 0
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - begin
    cases = cases_of(keys, BATCH_BYTES // devices.of(device).ns_dtype().itemsize)
    print(table.to_json() if args.out == "-" else _rendered(table, cases, seconds))
    if args.out not in (None, "-"):
        wrote(args.out, lambda: table.save(args.out))
    return 0


@contextmanager
def _all_ranks() -> Iterator[Transport]:
    """Open a transport of all ranks that torchrun has started, or of this process alone."""
    if not dist.is_torchelastic_launched():
        yield Transport()
        return
    dist.init_process_group()
    try:
        yield C10dTransport(range(dist.get_world_size()))
    finally:
        dist.destroy_process_group()


_TOKENS, _WIDTHS = 1024, (1024, 4096)  # of products
_EXCHANGED = 1 << 14, 1 << 20, 3 << 20  # elements of a collective


def measured_rates(transport: Transport, device: torch.device) -> Rates:
    """Measure the slowest rank's rates of a training step apart from Newton-Schulz, while all ranks
    work. Products are in float32 on a CPU, else in bfloat16. A collective call."""
    dtype = torch.float32 if devices.of(device).is_cpu else torch.bfloat16
    x, w = (torch.ones(n, _WIDTHS[0], dtype=dtype, device=device) for n in (_TOKENS, _WIDTHS[1]))
    products = 2.0 * _TOKENS * math.prod(_WIDTHS) / slowest_s(transport, device, lambda: x @ w.mT)
    return Rates(products, *local_rates(transport, device), *_of_exchanges(transport, device))


def _of_exchanges(transport: Transport, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a turn, and of each byte that a rank sends, by a fit to frameworks'
    collectives with the least relative errors."""
    world, rows, times = transport.world, [], []
    if world == 1:
        return 0.0, 0.0
    group, is_gloo = Group(world, world), dist.get_backend() == "gloo"
    for numel in _EXCHANGED:
        whole, other = torch.zeros(2, numel // world * world, device=device)
        part = torch.zeros(numel // world, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(dist.all_gather, [*other.chunk(world)], part),
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(dist.reduce_scatter, part, [*other.chunk(world)]),
            "all_to_all": partial(dist.all_to_all_single, other, whole),
        }
        for op, call in calls.items():
            of = collective("", op, float(whole.nbytes), group, is_gloo=is_gloo)
            rows.append((of.turns, of.sent))
            times.append(slowest_s(transport, device, call, 9))
    of_each = np.array(rows) / np.array(times)[:, None]
    turn_s, sent_s = np.linalg.lstsq(of_each, np.ones(len(times)), rcond=None)[0]
    return max(0.0, float(turn_s)), max(0.0, float(sent_s))


def _keys(args: argparse.Namespace) -> list[ShapeKey]:
    """Return the matrices to measure: the model's, or enough of each shape for every batch."""
    if args.model is not None:
        if not (matrices := model_specs(args.model, args.dtype).matrices):
            raise PlanError(f"--model {args.model} has no matrices")
        cut = [replace(m, rows=-(-m.rows // n)) for n in args.blocks for m in matrices]
        return [matrix.key for matrix in (*matrices, *cut)]
    if (dtype := args.dtype or "float32") not in ITEM_SIZE:
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {', '.join(ITEM_SIZE)}")
    return [(*shape, dtype) for shape in parse_shapes(args.shapes) for _ in range(args.max_batch)]


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(positive(int), text.split(",")))


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """
    >>> parse_shapes("1024x4096, 512X512, 512x512")
    [(1024, 4096), (512, 512)]
    """
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", part.strip(), re.IGNORECASE)
        if match is None:
            raise PlanError(f"--shapes: {part.strip()!r} is no shape; give rows x cols: 1024x4096")
        shapes.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(shapes))


def _rendered(table: CostTable, cases: Sequence[Case], seconds: float) -> str:
    origins = Counter(table.origin(case.key, case.batch) for case in cases)
    counts = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
    headings = "shape", "dtype", "batch", "ms", "ms per matrix", "GFLOP/s", "origin", "kernel"
    rows = grid(headings, ("shape", "dtype", "origin", "kernel"))
    for key, of_shape in groupby(cases, lambda case: case.key):
        m, n, dtype = key
        named = f"{m} x {n}", dtype
        for batch in (case.batch for case in of_shape):
            ms, origin = table.batch_ms(key, batch), table.origin(key, batch)
            operations = 2.0 * table.ns_steps * batch * (2 * n * m**2 + m**3)  # MuonBP, section 2
            rate = operations / 1e6 / ms if ms else 0.0
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"
            kernel = table.kernel(key, batch).rpartition("/")[0]
            cells = *named, str(batch), f"{ms:.3f}", f"{ms / batch:.3f}", speed, origin, kernel
            rows.add_row(*cells, style=None if origin == "measured" else "dim")
            named = "", ""
        rows.add_section()
    note = "GFLOP/s: of the standard iteration's operations, whatever form ran."
    if (found := table.rates) is not None:
        note += (
            f"\nOf a training step: products {found.products / 1e9:,.0f} GFLOP/s, passes "
            f"{found.copies / 1e9:.1f} GB/s, into new memory {found.new / 1e9:.1f}; "
            f"{1e6 * found.call_s:.1f} us a call, {1e6 * found.turn_s:.0f} us a turn of a "
            f"collective, {1e9 * found.sent_s:.2f} ns of a core per byte sent."
        )
    text = printed(f"{counts}, in {seconds:.1f} s", rows, note, width=_WIDTH, plain=False)
    return f"Newton-Schulz {table.source}\n{text}"
