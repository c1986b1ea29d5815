"""Measures batches of each shape on this machine's device and prints the times; with --out writes
the cost table for `plan --costs`. Exit status 2 for a mistake, 3 for a crash of the command itself.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch

from dmuon import devices
from dmuon.catalogue import model_specs
from dmuon.comm.transport import Transport
from dmuon.config import BATCH_BYTES, PlannerOptions
from dmuon.measure import Case, cases_of, measured_costs
from dmuon.report.render import grid, printed
from dmuon.scheduler.costs import CostTable, newton_schulz_flops
from dmuon.scheduler.specs import ITEM_SIZE, ShapeKey
from dmuon.tools.plan import MODELS, positive, wrote
from dmuon.types import PlanError

_WIDTH = 110  # columns of what is printed to anything but a terminal


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
    count, most = positive(int), PlannerOptions().max_batch
    add("--max-batch", type=count, default=most, metavar="B", help="default: %(default)s matrices")
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
    options = PlannerOptions(
        max_batch=args.max_batch, profile_budget_s=args.budget, cache_dir=args.cache_dir
    )
    how = {"momentum": args.layout != "sharded", "fresh": args.fresh}
    keys, begin, threads = _keys(args), time.perf_counter(), torch.get_num_threads()
    try:
        torch.set_num_threads(args.threads or threads)
        table = measured_costs(Transport(), keys, device, options, **how)
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - begin
    cases = cases_of(keys, options.max_batch, BATCH_BYTES // devices.of(device).ns_dtype().itemsize)
    print(table.to_json() if args.out == "-" else _rendered(table, cases, seconds))
    if args.out not in (None, "-"):
        wrote(args.out, lambda: table.save(args.out))
    return 0


def _keys(args: argparse.Namespace) -> list[ShapeKey]:
    """The matrices to measure for: the model's, or enough of each shape for every batch size."""
    if args.model is not None:
        matrices = model_specs(args.model, args.dtype).matrices
        if not matrices:
            raise PlanError(f"--model {args.model} has no matrices")
        return [matrix.key for matrix in matrices]
    dtype = args.dtype or "float32"
    if dtype not in ITEM_SIZE:
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {', '.join(ITEM_SIZE)}")
    return [(*shape, dtype) for shape in parse_shapes(args.shapes) for _ in range(args.max_batch)]


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
            rate = batch * newton_schulz_flops(m, n, table.ns_steps) / 1e6 / ms if ms else 0.0
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"
            kernel = table.kernel(key, batch).rpartition("/")[0]
            cells = *named, str(batch), f"{ms:.3f}", f"{ms / batch:.3f}", speed, origin, kernel
            rows.add_row(*cells, style=None if origin == "measured" else "dim")
            named = "", ""
        rows.add_section()
    note = "GFLOP/s: of the standard iteration's operations, whatever form ran."
    text = printed(f"{counts}, in {seconds:.1f} s", rows, note, width=_WIDTH, plain=False)
    return f"Newton-Schulz {table.source}\n{text}"
