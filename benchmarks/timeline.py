"""What does every rank do during a step on slow links: compute, wait, send?

``python -m benchmarks.timeline --json out.json --trace out/trace.json --picture out.png`` runs the
optimizers' steps on emulated nodes (`benchmarks.nodes`), one rank each, FSDP2, gradients as given:
unprofiled rounds for times, and profiled ones for what happened when. Trace (for
https://ui.perfetto.dev) and picture are of the last nodes and rate. On as many nodes as cores each
rank has a core of its own.

A row, in ms: ``compute``, what the step takes if nothing ever waits: CPU time of the slowest rank's
thread, or of all processes over the cores if that is more; ``wire``, what the busiest direction of
a link takes for its bytes; ``idle`` of each rank, what its thread does not compute between the
first rank's begin and the last one's end. ``bound`` is the critical path, the longer of two chains:
``compute`` with the first gather before and the last scatter after it, and ``wire`` with what is
computed before the first gather and after the last scatter.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

import dmuon
from benchmarks import baselines
from benchmarks.demo import GPT, GPTConfig
from benchmarks.nodes import LinkBytes, Nodes, bits_per_s, emulated
from benchmarks.results import Row, command, picture, read_rows, table, write
from benchmarks.timing import Laps, over_ranks, spread, take_turns

CONFIG = GPTConfig(width=512, hidden=1408, depth=6, heads=8)
WARM_UP, PROFILED = 2, 3
KINDS: dict[str, Callable[..., Optimizer]] = {
    "Parallel Muon": baselines.ParallelMuon,
    "gather-then-compute": baselines.GatherThenCompute,
}
BATCHES = "dmuon, batches of "
NAMES = ("dmuon", f"{BATCHES}2", *KINDS)
DRAWN = ("dmuon", "Parallel Muon")

# ---- what happened, as spans ---------------------------------------------------------------

# What the main thread does, in the order of the picture; and what a message is for.
NEWTON_SCHULZ, OTHER, IDLE = "Newton-Schulz", "other work", "idle"
GATHER, SCATTER, AGREEMENT = "gather", "scatter", "agreement"
_STEP, _SENT = "timeline::step", "timeline::sent "
# By the beginning of a range's name: of a computation, of what waits, of what a message is for.
_COMPUTES = "dmuon::newton_schulz", "timeline::newton_schulz"
_WAITS = "timeline::wait", "_c10d_functional::wait_tensor"
_PURPOSES = {"dmuon::gather": GATHER, "dmuon::publish": SCATTER}
_PURPOSES |= {f"timeline::{purpose}": purpose for purpose in (GATHER, SCATTER)}


class Span(NamedTuple):
    """Something that a rank did from ``begin`` to ``end`` (ms, one clock for all ranks). A message
    is on its way from where one of gloo's two threads begins it to its completion on this rank, and
    counts what the rank sends to others and receives from them."""

    rank: int
    kind: str
    name: str
    begin: float
    end: float
    sent: int = 0
    received: int = 0

    @property
    def is_message(self) -> bool:
        return self.kind in (GATHER, SCATTER, AGREEMENT)

    @property
    def ms(self) -> float:
        return self.end - self.begin


class Event(NamedTuple):
    """Of a profiler: µs of its own clock."""

    name: str
    thread: int
    begin: float
    end: float

    def holds(self, moment: float) -> bool:
        return self.begin <= moment <= self.end


def spans_of(events: Iterable[Event], rank: int, begin_ms: float) -> list[Span]:
    """The step of a rank, which began at ``begin_ms``: what its main thread did without gaps, then
    its messages in the order of their issue."""
    events = sorted(events, key=lambda event: event.begin)
    (step,) = (event for event in events if event.name == _STEP)
    mine = [e for e in events if e.thread == step.thread and step.begin <= e.begin < step.end]

    def at(moment: float) -> float:
        return begin_ms + (moment - step.begin) / 1e3

    found, now = [], step.begin
    for event in mine:
        kind = NEWTON_SCHULZ if event.name.startswith(_COMPUTES) else IDLE
        if event.begin < now or not event.name.startswith(_COMPUTES + _WAITS):
            continue
        found.append(Span(rank, OTHER, OTHER, at(now), at(event.begin)))
        found.append(Span(rank, kind, event.name, at(event.begin), at(event.end)))
        now = event.end
    found.append(Span(rank, OTHER, OTHER, at(now), at(step.end)))
    issued = [event for event in mine if event.name.startswith(_SENT)]
    for event in events:
        if not (event.name.startswith("gloo:") and step.holds(event.begin)):
            continue
        kind, sent, received = GATHER, 0, 0
        if event.name == "gloo:all_to_all":  # its threads begin them in the order of their issue
            issue = issued.pop(0)
            sent, received = map(int, issue.name[len(_SENT) :].split())
            around = [e.name for e in mine if e.holds(issue.begin)]
            of = [k for name in around for key, k in _PURPOSES.items() if name.startswith(key)]
            kind = of[-1] if of else AGREEMENT
        times = at(event.begin), at(event.end)
        found.append(Span(rank, kind, event.name, *times, sent, received))
    return found


def idle_ms(spans: Sequence[Span]) -> list[float]:
    """By rank: of the time from the first one's begin to the last one's end what it does not
    compute; so what it waits for, and how much earlier it ends."""
    work = [span for span in spans if not span.is_message]
    whole = max(span.end for span in work) - min(span.begin for span in work)
    ranks = sorted({span.rank for span in work})
    busy = [sum(s.ms for s in work if s.rank == rank and s.kind != IDLE) for rank in ranks]
    return [whole - ms for ms in busy]


def message_ms(messages: Iterable[Sequence[Span]], rate: str) -> list[float]:
    """Of each message, given by its spans on all ranks: what the busiest link takes for it."""
    most = (max(max(span.sent, span.received) for span in spans) for spans in messages)
    return [8e3 * nbytes / bits_per_s(rate) for nbytes in most]


def critical_ms(spans: Sequence[Span], compute: float, wire: float, rate: str | None) -> float:
    """The bound of the module's docstring, by the messages of a step."""
    if rate is None:
        return compute
    ranks = sorted({span.rank for span in spans})
    heads, tails, messages = [], [], []
    for rank in ranks:
        of = [span for span in spans if span.rank == rank]
        work = [span for span in of if span.kind in (NEWTON_SCHULZ, OTHER)]
        sent = [span for span in of if span.kind in (GATHER, SCATTER)]
        leaves, arrived = sent[0].begin, max(span.end for span in sent)
        heads.append(sum(min(s.end, leaves) - s.begin for s in work if s.begin < leaves))
        tails.append(sum(s.end - max(s.begin, arrived) for s in work if s.end > arrived))
        messages.append(sent)
    alone = message_ms(zip(*messages, strict=True), rate)
    return max(compute + alone[0] + alone[-1], min(heads) + wire + min(tails))


# ---- in the ranks --------------------------------------------------------------------------


@contextmanager
def marked() -> Iterator[None]:
    """In it a profiler sees when the host waits for others, what is sent, and what for."""

    def within(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marks(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return call(*args, **kwargs)

        return marks

    def exchanged(*args: Any) -> Iterator[None]:
        stages = original(*args)
        for name in (GATHER, SCATTER, "apply"):
            with record_function(f"timeline::{name}"):
                is_over = next(stages, stages) is stages
            if not is_over:
                yield

    def all_to_all_single(
        output: Tensor, source: Tensor, came: Any = None, sent: Any = None, **how: Any
    ) -> Any:
        rank, world = dist.get_rank(), dist.get_world_size()
        others = []
        for tensor, splits in ((source, sent), (output, came)):
            own = tensor.numel() // world if splits is None else splits[rank]
            others.append((tensor.numel() - own) * tensor.itemsize)
        with record_function(f"{_SENT}{others[0]} {others[1]}"):
            return issue(output, source, came, sent, **how)

    original, issue = baselines.exchanged, dist.all_to_all_single
    orthogonalize = within("timeline::newton_schulz", baselines.Baseline.orthogonalize)
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(dist.Work, "wait", within("timeline::wait", dist.Work.wait)),
            mock.patch.object(dist, "all_to_all_single", all_to_all_single),
            mock.patch.object(baselines.Baseline, "orthogonalize", orthogonalize),
            mock.patch.object(baselines, "exchanged", exchanged),
        ):
            stack.enter_context(patch)
        yield


def profiled(step: Callable[[], Any]) -> list[Span]:
    """What this rank does in a step that all begin together."""
    with marked(), profile(activities=[ProfilerActivity.CPU]) as found:
        dist.barrier()
        begin = 1e3 * time.perf_counter()
        with record_function(_STEP):
            step()
        dist.barrier()  # nothing of the step is left in gloo's threads when the profiler ends
    events = (Event(e.name, e.thread, e.time_range.start, e.time_range.end) for e in found.events())
    return spans_of(events, dist.get_rank(), begin)


def everyones(mine: Any) -> list[Any]:
    """``mine`` of every rank, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def contender(name: str, config: GPTConfig) -> Optimizer:
    """An optimizer of the matrices in the blocks of a model, which have their gradients.

    "dmuon, batches of 2": of at most so many matrices, and so in as many buckets as that allows.
    """
    torch.manual_seed(0)
    model = GPT(config)
    for module in (*model.blocks, model):
        fully_shard(module)
    generator = torch.Generator().manual_seed(dist.get_rank())
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    for p in matrices:
        p.grad = torch.zeros_like(p)
        baselines.local(p.grad).normal_(generator=generator)
    if name in KINDS:
        return KINDS[name](matrices)
    plan: dict[str, Any] = {}
    _, is_cut, most = name.partition(BATCHES)
    if is_cut:
        plan = {"planner": dmuon.PlannerOptions(max_batch=int(most))}
        plan["options"] = dmuon.ShardedOptions(min_buckets=len(matrices))
    dmuon.dedicate_params(model, **plan)
    return dmuon.Muon(model)


class Turn:
    """Steps of one contender, and what they took."""

    def __init__(self, optimizer: Optimizer, nodes: Nodes | None) -> None:
        self._optimizer, self._nodes = optimizer, nodes
        self.cpu: list[tuple[float, float]] = []  # of this rank's main thread and its process
        self.links: list[LinkBytes] = []

    def _counts(self) -> LinkBytes:
        return () if self._nodes is None else self._nodes.link_bytes()

    def __call__(self) -> Laps:
        dist.barrier()
        before, thread, process = self._counts(), time.thread_time(), time.process_time()
        found = over_ranks(self._optimizer.step)
        times = time.thread_time() - thread, time.process_time() - process
        self.cpu.append((1e3 * times[0], 1e3 * times[1]))
        pairs = [zip(a, b, strict=True) for a, b in zip(before, self._counts(), strict=True)]
        self.links.append(tuple(tuple(new - old for old, new in pair) for pair in pairs))  # type: ignore[misc]
        return found

    def profiled(self) -> list[Span]:
        """Of all ranks, the median one of some steps by how long they took."""
        found = []
        for _ in range(PROFILED):
            spans = [span for mine in everyones(profiled(self._optimizer.step)) for span in mine]
            found.append((max(s.end for s in spans) - min(s.begin for s in spans), spans))
        return sorted(found, key=lambda pair: pair[0])[len(found) // 2][1]

    def row(self, times: Sequence[Laps], rate: str | None, cores: int) -> Row:
        """A row, with its spans; on every rank."""
        cpu = everyones([statistics.median(ms) for ms in zip(*self.cpu[-len(times) :])])
        threads, processes = zip(*cpu)
        compute = max(*threads, sum(processes) / cores)
        links = [max(map(max, counts), default=0) for counts in self.links[-len(times) :]]
        nbytes = statistics.median(links)
        wire = 0.0 if rate is None else 8e3 * nbytes / bits_per_s(rate)
        spans = self.profiled()
        bound = critical_ms(spans, compute, wire, rate)
        step = spread([laps[0] for laps in times])
        return step | {
            "rounds": len(times),
            "profiled_ms": max(s.end for s in spans) - min(s.begin for s in spans),
            "compute_ms": compute,
            "cpu_ms": list(threads),
            "idle_ms": idle_ms(spans),
            "link_bytes": nbytes,
            "wire_ms": wire,
            "sum_ms": compute + wire,
            "bound_ms": bound,
            "over_bound": step["median_ms"] / bound,
            "messages": sum(s.is_message for s in spans if s.rank == 0),
            "spans": spans,
        }


def pin(core: int) -> None:
    """Keep all threads of this process, and those that they start, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def work(
    rank: int, nodes: Nodes | None, config: GPTConfig, rounds: int, names: Sequence[str]
) -> list[Row]:
    """A row for each contender; they take turns."""
    cores, world = sorted(os.sched_getaffinity(0)), dist.get_world_size()
    if is_pinned := world <= len(cores):
        pin(cores[rank])
    rate = None if nodes is None else nodes.rate
    turns = {name: Turn(contender(name, config), nodes) for name in names}
    times = take_turns(turns, rounds, warm_up=WARM_UP)
    same = {"nodes": world, "rate": rate, "pinned": is_pinned}
    used = min(world, len(cores))
    return [
        same | {"optimizer": name} | turn.row(times[name], rate, used)
        for name, turn in turns.items()
    ]


# ---- trace and picture ---------------------------------------------------------------------


def lanes(spans: Sequence[Span]) -> list[int]:
    """For each span, by begin, the first lane in which none is under way."""
    ends: list[float] = []
    found = []
    for span in spans:
        free = [n for n, end in enumerate(ends) if end <= span.begin]
        lane = free[0] if free else len(ends)
        ends[lane : lane + 1] = [span.end]
        found.append(lane)
    return found


Sample = tuple[float, LinkBytes]


def trace_of(rows: Sequence[Row], samples: Sequence[Sample] = ()) -> dict[str, Any]:
    """The steps of these rows as Chrome's trace events: a process for each contender's rank, whose
    thread 0 computes and whose others send; and the rates on its link."""
    events: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        spans = row["spans"]
        begin, end = min(s.begin for s in spans), max(s.end for s in spans)
        for rank in sorted({s.rank for s in spans}):
            pid = 100 * number + rank

            def named(what: str, name: str, tid: int, pid: int = pid) -> dict[str, Any]:
                return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

            work = [s for s in spans if s.rank == rank and not s.is_message]
            messages = [s for s in spans if s.rank == rank and s.is_message]
            tids = [0] * len(work) + [1 + lane for lane in lanes(messages)]
            events.append(named("process_name", f"{row['optimizer']}, rank {rank}", 0))
            for tid in sorted(set(tids)):
                events.append(named("thread_name", f"messages {tid}" if tid else "compute", tid))
            for span, tid in zip((*work, *messages), tids, strict=True):
                event = {"ph": "X", "name": span.kind, "cat": span.name, "pid": pid, "tid": tid}
                event |= {"ts": round(1e3 * (span.begin - begin)), "dur": round(1e3 * span.ms)}
                if span.is_message:
                    event["args"] = {"sent": span.sent, "received": span.received}
                events.append(event)
            for (old, before), (new, after) in pairwise(samples):
                if begin <= 1e3 * old and 1e3 * new <= end:
                    pairs = zip(before[rank], after[rank], strict=True)
                    rates = [round(8e-6 * (b - a) / (new - old), 1) for a, b in pairs]
                    counter = {"ph": "C", "name": "link, Mbit/s", "pid": pid, "tid": 0}
                    counter |= {"ts": round(1e3 * (1e3 * old - begin))}
                    events.append(counter | {"args": dict(zip(("out", "in"), rates))})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


COLORS = {
    NEWTON_SCHULZ: "#1f5fa8",
    OTHER: "#8fb8de",
    IDLE: "#eeeeee",
    GATHER: "#e08a1e",
    SCATTER: "#3f9b57",
    AGREEMENT: "#a05fb4",
}


def draw(path: str, rows: Sequence[Row]) -> None:
    """A picture of one step of each row: what each rank computes, and its messages in flight."""
    with picture(path, len(rows), 1, (6.67, 2.9 * len(rows))) as (figure, axes):
        for axis, row in zip([axes] if len(rows) == 1 else axes, rows, strict=True):
            _draw_step(axis, row)
        axis.set_xlabel("ms since the step began")
        handles = [axis.barh(0, 0, color=color, label=kind) for kind, color in COLORS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=7,
                      frameon=False, columnspacing=1.2, handlelength=1.2)  # fmt: skip


def _draw_step(axis: Any, row: Row) -> None:
    spans, idle = row["spans"], row["idle_ms"]
    begin, whole = min(s.begin for s in spans), row["profiled_ms"]
    ticks: dict[float, str] = {}
    for rank in sorted({s.rank for s in spans}):
        top = -2.4 * rank
        for span in spans:
            if span.rank == rank and not span.is_message:
                axis.barh(top, span.ms, 0.9, span.begin - begin, color=COLORS[span.kind])
        messages = [s for s in spans if s.rank == rank and s.is_message]
        of = lanes(messages)
        height = 0.9 / (1 + max(of))
        for span, lane in zip(messages, of, strict=True):
            y = top - 0.55 - height * (lane + 0.5)
            color = COLORS[span.kind]
            axis.barh(y, span.ms, 0.85 * height, span.begin - begin, color=color,
                      edgecolor="white", linewidth=0.4)  # fmt: skip
        ticks |= {top: f"rank {rank}", top - 1.0: "messages"}
        told = f"idle {idle[rank]:.0f} ms\n{100 * idle[rank] / whole:.0f}%"
        axis.text(1.01, top - 0.5, told, transform=axis.get_yaxis_transform(), fontsize=8,
                  va="center")  # fmt: skip
    axis.set_yticks([*ticks], [*ticks.values()], fontsize=7)
    for label in axis.get_yticklabels()[1::2]:
        label.set_color("#777777")
    link = "links as fast as the machine" if row["rate"] is None else f"links of {row['rate']}/s"
    axis.set_title(f"{row['optimizer']}: {whole:.0f} ms, {row['nodes']} nodes, {link}", fontsize=9)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)


# ---- the command ---------------------------------------------------------------------------

HEADINGS = ("nodes", "links", "optimizer", "step ms (p10-p90)", "compute", "wire", "sum", "bound",
            "step / bound", "idle by rank, ms")  # fmt: skip


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Markdown by name, for docs/evidence.md."""
    return {"steps": table(HEADINGS, map(_cells, rows), left=3)}


def _cells(row: Row) -> tuple[object, ...]:
    wire = (f"{row['wire_ms']:.0f}", f"{row['sum_ms']:.0f}") if row["rate"] else (None, None)
    return (
        f"{row['nodes']}{', a core each' if row['pinned'] else ''}",
        row["rate"] or "unshaped",
        row["optimizer"],
        "{median_ms:.0f} ({p10_ms:.0f}-{p90_ms:.0f})".format(**row),
        f"{row['compute_ms']:.0f}",
        *wire,
        f"{row['bound_ms']:.0f}",
        f"{row['over_bound']:.2f}",
        ", ".join(f"{ms:.0f}" for ms in row["idle_ms"]),
    )


def measured(nodes: int, rate: str | None, *how: Any) -> tuple[list[Row], list[Sample]]:
    with emulated(nodes, rate) as cluster, cluster.sampled(0.02) as samples:
        rows = cluster.on_ranks(1, work, cluster, CONFIG, *how)
    for row in rows:
        row["spans"] = [Span(*span) for span in row["spans"]]
    return rows, samples


def key(row: Row) -> tuple[object, ...]:
    return row["nodes"], row["rate"], row["optimizer"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["unshaped", "1gbit", "200mbit"])
    parser.add_argument("--optimizers", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5, help=f"after {WARM_UP} to warm up")
    parser.add_argument("--trace", metavar="PATH", help="write the events of a step there")
    parser.add_argument("--picture", metavar="PATH", help="draw a step there")
    parser.add_argument("--add", action="store_true", help="keep other rows in the JSON file")
    parser.add_argument("--table", metavar="PATH", help="print these results as Markdown and stop")
    args = parser.parse_args(argv)
    if args.table:
        print(tables(read_rows(args.table))["steps"])
        return
    rows = read_rows(args.json) if args.add and os.path.exists(args.json) else []
    for nodes in args.nodes:
        for name in args.rates:
            rate = None if name == "unshaped" else name
            found, samples = measured(nodes, rate, args.rounds, args.optimizers)
            print(tables(found)["steps"], flush=True)
            kept = [{k: v for k, v in row.items() if k != "spans"} for row in found]
            rows = [row for row in rows if key(row) not in map(key, kept)] + kept
    write(args.json, rows)
    if args.trace:
        with open(args.trace, "w") as file:
            json.dump(trace_of(found, samples), file, separators=(",", ":"))
    if args.picture:
        draw(args.picture, [row for row in found if row["optimizer"] in DRAWN])


if __name__ == "__main__":
    main()
