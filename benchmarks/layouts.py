"""What do the layouts cost on one model: time of a step, traffic, memory?

``python -m benchmarks.layouts --json out.json`` trains two models on gloo processes with one thread
each, in every layout of dmuon and with AdamW on the same model: FSDP2 (on two replicas: HSDP) where
FSDP2 has the rest or everything, `DistributedDataParallel` for plain models.

Time: the contenders take turns, round after round in an order rotated by one; a time is that of the
slowest rank, from before backward to the end of the next forward, for that is where a step's last
messages are waited for. ``ratio_to_adamw`` is the median of the ratios within a round.

``bytes``: received by a rank in a step for matrices, mean over ranks, counted from every collective
that dmuon issues (`benchmarks.layout_theory.received`); ``theory_bytes`` is the formula. What FSDP2
moves by itself for matrices that it shards is not counted: ``framework_bytes``, by formula.
``rest_bytes``: everything else that dmuon sends (flags, and the parameters that are no matrices).

Memory, each the largest of the ranks: ``state_bytes`` weights and optimizer state; ``kept_bytes``
all that a training loop holds between steps, so with buffers and what is sent ahead;
``peak_bytes`` that and the most that was alive besides at a moment of a step.

``--table out.json`` prints the results as Markdown and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.layout_contenders import WORKLOADS, Contender, Kind, Workload, kinds
from benchmarks.ranks import on_ranks
from benchmarks.results import spread, write
from dmuon.dtensors import local_tensor

WARM_UP = 2
PHASES = ("whole", "backward", "step", "forward")

Row = dict[str, Any]
Times = list[tuple[float, ...]]  # milliseconds by phase


# ---- measuring -----------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes behind the tensors of this process, looked at after each operation inside.

    Not by torch's profiler: gloo's threads free tensors when it may already have ended, which
    crashes. What an operation allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                self._note(found)
        self.most = self.now()

    def _note(self, tensor: Tensor) -> None:
        storage = local_tensor(tensor).untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)

    def now(self) -> int:
        """Those of all storages that are still there, as large as they are now."""
        alive = 0
        for key, known in list(self._storages.items()):
            storage = known()
            if storage is None:
                del self._storages[key]
            else:
                alive += storage.nbytes()
        return alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, Tensor):
                self._note(found)
        self.most = max(self.most, self.now())
        return result


def most_alive(action: Callable[[], Any]) -> int:
    """Most bytes that were alive at once during ``action`` beyond those before it."""
    with LiveBytes() as live:
        before = live.most
        action()
    return live.most - before


def timed(contender: Contender, step: int) -> tuple[float, ...]:
    """Milliseconds of the slowest rank, by phase."""
    batch = contender.load.batch(step, dist.get_rank())
    dist.barrier()
    begin = time.perf_counter()
    contender.backward()
    middle = time.perf_counter()
    contender.step()
    stepped = time.perf_counter()
    contender.forward(batch)
    end = time.perf_counter()
    mine = [end - begin, middle - begin, stepped - middle, end - stepped]
    times = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return tuple(times.mul_(1e3).tolist())


def largest(*values: float) -> list[int]:
    """The largest of each over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [round(value) for value in found.tolist()]


def memory(contender: Contender) -> Row:
    """Build the contender, train it a little, and see what that takes."""
    rank = dist.get_rank()
    before = LiveBytes().now()
    contender.build()
    for step in range(WARM_UP):
        contender.whole_step(contender.load.batch(step, rank))
    kept = LiveBytes().now() - before
    batch = contender.load.batch(WARM_UP, rank)
    above = most_alive(lambda: contender.whole_step(batch))
    names = ("state_bytes", "kept_bytes", "step_bytes", "peak_bytes")
    found = largest(contender.persistent_bytes(), kept, above, kept + above)
    return dict(zip(names, found, strict=True))


def traffic(contender: Contender) -> Row:
    """What one step moves, and what it should move."""
    matrices = contender.matrices()
    if matrices is None:
        return {}
    world, kind = dist.get_world_size(), contender.kind
    theory = kind.theory(matrices, world)
    contender.traffic.clear()
    contender.whole_step(contender.load.batch(WARM_UP, dist.get_rank()))
    found = contender.traffic.by_purpose(list(theory))
    rest = found.pop("rest")
    return {
        "matrix_bytes": round(matrices.kept),
        "bytes": round(sum(found.values())),
        "theory_bytes": round(sum(theory.values())),
        "bytes_by_purpose": {key: round(value) for key, value in found.items() if value},
        "framework_bytes": round(kind.by_framework(matrices, world)),
        "rest_bytes": round(rest),
    }


def measure(load: Workload, rounds: int) -> list[Row]:
    """Rows of one model; every rank calls it and gets the same."""
    world = dist.get_world_size()
    field = [Contender(kind, load) for kind in kinds(world)]
    facts = {c.kind: memory(c) | traffic(c) for c in field}
    times: dict[Kind, Times] = {c.kind: [] for c in field}
    for contender in field:
        contender.forward(load.batch(0, dist.get_rank()))
    gc.collect()
    gc.disable()
    for i in range(WARM_UP + rounds):
        turn = i % len(field)
        for contender in field[turn:] + field[:turn]:
            result = timed(contender, i)
            contender.traffic.clear()
            if i >= WARM_UP:
                times[contender.kind].append(result)
        gc.collect()
    gc.enable()
    rows = [row(load, c.kind, times) | facts[c.kind] for c in field]
    for contender in field:
        contender.close()
    return rows


def row(load: Workload, kind: Kind, times: dict[Kind, Times]) -> Row:
    """What is known from times."""
    world = dist.get_world_size()
    phases = dict(zip(PHASES, zip(*times[kind], strict=True), strict=True))
    whole, adamw = phases["whole"], [t[0] for t in times[kind.baseline]]
    entry: Row = {
        "set": load.name,
        "optimizer": kind.optimizer,
        "layout": kind.layout,
        "name": kind.label(world),
        "mesh": "x".join(map(str, kind.mesh_shape(world))),
        "world": world,
        **spread(whole),
        "baseline": kind.baseline.label(world),
        "ratio_to_adamw": statistics.median(a / b for a, b in zip(whole, adamw, strict=True)),
        "rounds": len(whole),
    }
    return entry | {f"{name}_ms": statistics.median(phases[name]) for name in PHASES[1:]}


# ---- showing -------------------------------------------------------------------------------

HEADINGS = (
    "layout",
    "ms (p10-p90)",
    "x AdamW",
    "bwd, step, fwd ms",
    "MB received",
    "theory",
    "FSDP2's",
    "MB state",
    "kept",
    "peak",
)


def cells(entry: Row) -> list[str]:
    def mega(key: str) -> str:
        return f"{entry[key] / 1e6:.2f}" if entry.get(key) else ""

    return [
        entry["name"],
        f"{entry['median_ms']:.0f} ({entry['p10_ms']:.0f}-{entry['p90_ms']:.0f})",
        f"{entry['ratio_to_adamw']:.2f}",
        ", ".join(f"{entry[f'{name}_ms']:.0f}" for name in PHASES[1:]),
        *map(mega, ("bytes", "theory_bytes", "framework_bytes")),
        *map(mega, ("state_bytes", "kept_bytes", "peak_bytes")),
    ]


def title(rows: list[Row]) -> str:
    first = rows[0]
    matrices = max(row.get("matrix_bytes", 0) for row in rows) / 1e6
    return (
        f"{first['set']}: P = {matrices:.2f} MB of matrices, {first['world']} processes, "
        f"{first['rounds']} rounds"
    )


def by_set(rows: list[Row]) -> list[list[Row]]:
    return [[r for r in rows if r["set"] == name] for name in dict.fromkeys(r["set"] for r in rows)]


def show(rows: list[Row]) -> None:
    for mine in by_set(rows):
        table = Table(title=title(mine))
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if i else "left", no_wrap=True)
        for entry in mine:
            table.add_row(*cells(entry))
        Console(width=150).print(table)


def markdown(rows: list[Row]) -> str:
    """The tables of ``docs/layouts.md``."""
    lines: list[str] = []
    for mine in by_set(rows):
        lines += [f"**{title(mine)}**", "", "| " + " | ".join(HEADINGS) + " |"]
        lines.append("|---|" + "---:|" * (len(HEADINGS) - 1))
        lines += ["| " + " | ".join(cells(entry)) + " |" for entry in mine]
        lines.append("")
    return "\n".join(lines)


# ---- running -------------------------------------------------------------------------------


def work(rank: int, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for name in args.sets:
        load = WORKLOADS[name]()
        rows += measure(load, args.rounds or load.rounds)
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows there, - for stdout")
    parser.add_argument("--sets", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, help=f"timed ones, after {WARM_UP} to warm up")
    parser.add_argument("--world", type=int, default=4, help="processes")
    parser.add_argument("--table", metavar="PATH", help="print these results as Markdown and stop")
    args = parser.parse_args()
    if args.table:
        with open(args.table) as file:
            print(markdown(json.load(file)["rows"]))
        return
    if args.rounds is not None and args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; percentiles need at least 2")
    rows = on_ranks(args.world, work, args)
    if args.json:
        write(args.json, rows)
    show(rows)


if __name__ == "__main__":
    main()
