"""What travels between nodes, and what does a slow link between them change?

``python -m benchmarks.links --json out.json`` (docs/evidence.md) emulates nodes
(`benchmarks.nodes`), so it needs root. Questions (``--ask``), each over some ``--on`` (nodes x
ranks a node) and ``--rates`` of a node's link; contenders take turns:

- ``placement``: dmuon's owner order against the same plan on ranks numbered node by node, and
  against one in which each node owns a run of layers.
- ``hsdp``: replicas on nodes of their own against FSDP2 over all ranks.
- ``ddp``: gradients that are all-reduced against gradients that are reduced to their owner; what
  the plan computes more than once against each matrix once, against every rank computing all
  ("redundant"), and against an all-gather of new weights, which is a ring on gloo.

``link_out_bytes``, ``link_in_bytes``: of each node's link in a turn, as its interface counts them,
TCP's headers included. ``theory_link_bytes``: the mean over nodes, in one direction, by formula.
A row replaces that of the same contender, nodes and rate in the file; all others stay there.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import dmuon
from benchmarks import baselines, steps
from benchmarks.layout_theory import Matrices, all_reduce, fsdp, one_root, sharded
from benchmarks.models import FIXED, Stack, Training, shard
from benchmarks.nodes import LinkBytes, Nodes, emulated
from benchmarks.results import Row, command, document, read_rows, table, write_json
from benchmarks.timing import Laps, over_ranks, ratio, take_turns
from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import canonical_key
from dmuon.scheduler.plan import Batch, OwnershipPlan
from dmuon.scheduler.topology import Topology, launch_order
from dmuon.types import grouped

WARM_UP = 1
RATES = ("200mbit", "1gbit")
LAYERS, WIDTH = 8, 192
SET = f"{LAYERS} layers, w={WIDTH}"
BATCH = (4, 8, WIDTH)
WINDOW_S = 0.015  # of what counts as one moment, at least; samples come every 10 ms
Sent = tuple[list[int], list[int]]
"""Bytes out of each node, bytes into it."""


def contention(owners: Sequence[int], topology: Topology) -> tuple[float, float]:
    """How many of as many consecutive matrices, in launch order, as there are columns have owners
    on one node, and in one column: the most crowded in each window, in the mean of all windows."""
    window = min(topology.columns, len(owners))
    slot = {rank: (n, c) for n, row in enumerate(topology.slots()) for c, rank in enumerate(row)}
    node, column = (_crowds([slot[o][axis] for o in owners], window) for axis in (0, 1))
    return sum(node) / len(node), sum(column) / len(column)


def _crowds(places: Sequence[int], window: int) -> list[int]:
    """For each window of consecutive entries, how often its most frequent value occurs."""
    starts = range(max(1, len(places) - window + 1))
    return [max(Counter(places[i : i + window]).values(), default=0) for i in starts]


@dataclass(frozen=True)
class Case:
    """What one group of processes finds out."""

    question: str
    nodes: int
    each: int
    rate: str
    what: Any  # a layout, or what `CO_OWNED` has; None where there is nothing to choose
    rounds: int

    @property
    def row(self) -> Row:
        """The keys of all rows."""
        own = {"question": self.question, "nodes": self.nodes, "ranks_per_node": self.each}
        return own | {"rate": self.rate}


# ---- links ---------------------------------------------------------------------------------


def between(before: LinkBytes, after: LinkBytes) -> Sent:
    """What left each node between two counts, and what came to it.

    >>> between(((1, 2), (3, 4)), ((11, 2), (3, 14)))
    ([10, 0], [0, 10])
    """
    pairs = list(zip(before, after, strict=True))
    return [new[0] - old[0] for old, new in pairs], [new[1] - old[1] for old, new in pairs]


def over_links(cluster: Nodes, action: Callable[[], Any]) -> Sent:
    """What goes over the links while all ranks do ``action``."""
    dist.barrier()
    before = cluster.link_bytes()
    dist.barrier()
    action()
    dist.barrier()
    after = cluster.link_bytes()
    dist.barrier()
    return between(before, after)


def of_step(cluster: Nodes, training: Training) -> Sent:
    """What goes over them in the optimizers' step alone."""
    training.backward()
    found = over_links(cluster, training.step)
    training.forward()
    return found


def crowding(
    samples: Sequence[tuple[float, LinkBytes]], spans: Iterable[tuple[float, float]]
) -> tuple[float, float]:
    """How unevenly links were used at each moment of some spans of time, out of nodes and into
    them: the bytes of each window's busiest link, summed over windows, over those of the mean link.
    1: all links always carry alike; as many as there are nodes: always one alone; NaN: nothing.
    """
    busiest, mean = [0.0, 0.0], [0.0, 0.0]
    for begin, end in spans:
        edges: list[tuple[float, LinkBytes]] = []
        for sample in samples:
            is_next = not edges or sample[0] - edges[-1][0] >= WINDOW_S
            if begin <= sample[0] <= end and is_next:
                edges.append(sample)
        for (_, before), (_, after) in pairwise(edges):
            for way, sent in enumerate(between(before, after)):
                busiest[way] += max(sent)
                mean[way] += statistics.fmean(sent)
    out, into = (b / m if m else float("nan") for b, m in zip(busiest, mean, strict=True))
    return out, into


def pin(rank: int) -> None:
    """This process, and the threads that it starts, to one core; ranks take turns."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def in_turns(
    case: Case, field: dict[str, Training], turns: dict[str, Callable[[], Laps]]
) -> Iterator[tuple[str, Training, list[Laps]]]:
    """Each contender with its laps, after all have taken their turns."""
    times = take_turns(turns, case.rounds, warm_up=WARM_UP)
    for name, training in field.items():
        yield name, training, times[name]


# ---- placement -----------------------------------------------------------------------------

ORDERS = ("XOR", "row-major", "a node's layers")
# Matrices travel one by one, as those of a model do that are as large as a bucket. In "sharded"
# only `step` is timed: nothing else depends on owners there.
PLACED: dict[str, dict[str, Any]] = {
    "sharded": {"layout": "sharded", "options": dmuon.ShardedOptions(bucket_bytes=1 << 16)},
    "reduce_to_owner": {
        "layout": "replicated",
        "options": dmuon.ReplicatedOptions(
            reduce_to_owner=True, bucket_bytes=1, publish_bucket_bytes=1
        ),
    },
    "dedicated": {"layout": "dedicated", "options": dmuon.DedicatedOptions()},
}


def reordered(plan: OwnershipPlan, order: str) -> OwnershipPlan:
    """The same work with owners in another of the `ORDERS`: every batch keeps its size, its price
    and its kernel.

    "row-major": where the plan goes along its owner order, this one goes from rank to rank, so it
    exchanges the loads of ranks. "a node's layers": each owner keeps its batches; they are filled
    anew, so that the matrices of a shape go to node after node, and to a node's ranks in turn.
    """
    batches = plan.batches
    if order == "row-major":
        place = {rank: i for i, rank in enumerate(plan.topology.owner_order())}
        batches = tuple(replace(batch, owner=place[batch.owner]) for batch in batches)
    elif order == "a node's layers":
        batches = tuple(_node_by_node(plan))
    elif order != "XOR":
        raise ValueError(f"order is {order!r}; expected one of {', '.join(ORDERS)}")
    return replace(plan, batches=batches)


def _node_by_node(plan: OwnershipPlan) -> list[Batch]:
    matrices, topology = plan.specs.matrices, plan.topology
    waiting = grouped(
        (canonical_key(matrices[i].key), i) for i in launch_order([m.name for m in matrices])
    )
    rooms: dict[Any, list[int]] = grouped(
        (canonical_key(matrices[batch.matrices[0]].key), b) for b, batch in enumerate(plan.batches)
    )
    filled: dict[int, list[int]] = defaultdict(list)
    for key, mine in rooms.items():
        on_node = grouped((topology.node(plan.batches[b].owner), b) for b in mine)
        for _, here in sorted(on_node.items()):
            # The first place of each batch, then the second ones; ranks in turn.
            places = [(k, n, b) for n, b in enumerate(_ranks_in_turn(plan, here))
                      for k in range(len(plan.batches[b].matrices))]  # fmt: skip
            for _, _, b in sorted(places):
                filled[b].append(waiting[key].pop(0))
    return [
        replace(batch, matrices=tuple(sorted(filled[b]))) for b, batch in enumerate(plan.batches)
    ]


def _ranks_in_turn(plan: OwnershipPlan, batches: Sequence[int]) -> list[int]:
    """A batch of each owner, then the second one of each, and so on."""
    by_owner = grouped((plan.batches[b].owner, b) for b in batches)
    turns = [(turn, owner, b) for owner, mine in by_owner.items() for turn, b in enumerate(mine)]
    return [b for _, _, b in sorted(turns)]


def noted(turn: Callable[[], Laps], spans: list[tuple[float, float]]) -> Callable[[], Laps]:
    """The same turn, which notes when it began and ended."""

    def noting() -> Laps:
        dist.barrier()
        begin = time.perf_counter()
        found = turn()
        spans.append((begin, time.perf_counter()))
        return found

    return noting


def ask_placement(case: Case, cluster: Nodes) -> list[Row]:
    layout: str = case.what
    field: dict[str, Training] = {}
    spans: dict[str, list[tuple[float, float]]] = {order: [] for order in ORDERS}
    for order in ORDERS:
        torch.manual_seed(0)
        model = Stack(LAYERS, WIDTH)
        if layout == "sharded":
            shard(model)
        given = PLACED[layout] | FIXED | {"planner": PlannerOptions(max_batch=1)}
        if field:
            own = field[ORDERS[0]].own
            assert own is not None
            given["plan"] = reordered(own.plan, order)
        field[order] = Training.of_muon(model, BATCH, given)
    actions: dict[str, Callable[[], Any]] = {}
    turns: dict[str, Callable[[], Laps]] = {}
    for order, training in field.items():
        turn: Callable[[], Laps] = training.turn
        if layout == "sharded":  # the gradients stay
            training.backward()
            actions[order], turn = training.step, partial(over_ranks, training.step)
        else:
            actions[order] = turn
        turns[order] = noted(turn, spans[order])
    rows, first = [], [0.0]
    for order, training, laps in in_turns(case, field, turns):
        ms = [lap[0] for lap in laps]
        first = ms if order == ORDERS[0] else first
        row = steps.row_of(SET, order, layout, ms, training)
        row["link_out_bytes"], row["link_in_bytes"] = over_links(cluster, actions[order])
        assert training.own is not None
        plan = training.own.plan
        owners = [plan.owners[i] for i in launch_order([m.name for m in plan.specs.matrices])]
        row |= {
            "ratio": ratio(ms, first),
            "node_mean": contention(owners, plan.topology)[0],
            "loads_ms": sorted(plan.loads_ms),
            "spans": spans[order][WARM_UP:],  # for `answered`
        }
        rows.append(row)
        training.close()
    return rows


# ---- HSDP ----------------------------------------------------------------------------------


def hsdp_field(case: Case, dtype: torch.dtype) -> dict[str, Training]:
    """Contenders on replicas that are nodes ("HSDP"), and on FSDP2 over all ranks."""
    # The groups of a mesh wait as long as torch has it, and not as long as `timing.joined` says.
    warnings.filterwarnings("ignore", "dmuon: the default process group waits")
    mesh = init_device_mesh("cpu", (case.nodes, case.each), mesh_dim_names=("replicate", "shard"))
    field = {}
    for name in HSDP_KINDS:
        torch.manual_seed(0)
        model = Stack(LAYERS, WIDTH)
        shard(model, **({"mesh": mesh} if name.endswith("HSDP") else {}))
        if name.startswith("dmuon"):
            given = {"layout": "sharded"} | FIXED
            field[name] = Training.of_muon(model, BATCH, given, ns_dtype=dtype)
            continue
        optimizers: list[Any] = []
        kind = HSDP_KINDS[name]
        rest = list(model.parameters())
        if kind is not None:
            optimizers.append(kind([p for p in rest if p.ndim == 2], ns_dtype=dtype))
            rest = [p for p in rest if p.ndim != 2]
        field[name] = Training(model, BATCH, [*optimizers, torch.optim.AdamW(rest, foreach=True)])
    return field


HSDP_KINDS: dict[str, Callable[..., baselines.Baseline] | None] = {
    "AdamW, HSDP": None,
    "dmuon, HSDP": None,
    "AdamW, FSDP2": None,
    "dmuon, FSDP2": None,
    "same-shape buckets, FSDP2": baselines.SameShapeBuckets,
    "gather-then-compute, FSDP2": baselines.GatherThenCompute,
}


def hsdp_links(name: str, matrices: Matrices, nodes: int) -> tuple[float, float]:
    """What must go over a node's link, in one direction: in the optimizer's step, and in a turn.

    With a replica on each node the step's gather and scatter stay inside; then each element goes
    to every other node: P' (N-1)/N a link. Over all ranks N-1 of N parts of a matrix lie on other
    nodes than its owner, and come and go: 2 P' (N-1)/N^2. Who gathers everything everywhere
    receives P' (N-1)/N. FSDP2: an all-reduce of gradients among nodes, or, flat, three times what a
    node lacks.
    """
    optimizer, _, mesh = name.rpartition(", ")
    if optimizer == "AdamW":
        step = 0.0
    elif optimizer in ("dmuon", "same-shape buckets") and mesh == "FSDP2":
        step = 2 * one_root(matrices.updates, nodes) / nodes
    else:
        step = one_root(matrices.updates, nodes)
    if mesh == "HSDP":
        return step, step + all_reduce(matrices.gradients, nodes)
    return step, step + sum(fsdp(matrices, nodes).values())


def ask_hsdp(case: Case, cluster: Nodes) -> list[Row]:
    dtype = baselines.ns_dtype()
    field = hsdp_field(case, dtype)
    matrices = bytes_of(dtype)
    rows = []
    turns = {name: training.turn for name, training in field.items()}
    base: dict[str, list[float]] = {}
    for name, training, laps in in_turns(case, field, turns):
        ms = [lap[0] for lap in laps]
        mesh = name.rpartition(", ")[2]
        base.setdefault(mesh, ms)
        row = steps.row_of(SET, name, "sharded", ms, training)
        row |= {"step_ms": statistics.median(lap[2] for lap in laps)}
        row["ratio_to_adamw"] = ratio(ms, base[mesh])
        row["ratio"] = ratio(ms, base["HSDP"])
        replicas = case.nodes if mesh == "HSDP" else 1
        shards = case.nodes * case.each // replicas
        if name.startswith("dmuon"):
            row["theory_bytes"] = round(sum(sharded(matrices, shards, replicas).values()))
        rows.append(row | counted(cluster, training, hsdp_links(name, matrices, case.nodes)))
    for training in field.values():
        training.close()
    return rows


def bytes_of(dtype: torch.dtype) -> Matrices:
    """Of the matrices of `SET`, whose updates are of ``dtype``."""
    numel = sum(p.numel() for p in Stack(LAYERS, WIDTH).parameters() if p.ndim == 2)
    return Matrices.of(numel, updates=dtype.itemsize)


def counted(cluster: Nodes, training: Training, theory: tuple[float, float]) -> Row:
    """What links carry in a step and in a turn; ``theory`` says what they should."""
    step, turn = of_step(cluster, training), over_links(cluster, training.turn)
    return {
        "link_out_bytes": turn[0],
        "link_in_bytes": turn[1],
        "theory_link_bytes": round(theory[1]),
        "step_link_out_bytes": step[0],
        "step_link_in_bytes": step[1],
        "step_theory_link_bytes": round(theory[0]),
    }


# ---- DDP -----------------------------------------------------------------------------------

DDP_KINDS = (
    "AdamW, DDP",
    "dmuon, DDP",
    "dmuon once, DDP",
    "redundant, DDP",
    "same-shape all-gather, DDP",
    "dmuon, reduced to owner, DDP",
    "dmuon, reduced to owner",
    "round robin, DDP",
    "round robin, reduced to owner",
)


def ddp_links(name: str, matrices: Matrices, nodes: int, each: int) -> tuple[float, float]:
    """As `hsdp_links`, of ``each`` ranks a node: dmuon publishes updates, the most that it may
    choose to, once to every other node, others weights. A ring goes through all ranks and crosses
    to the next node once, as gloo's all-reduce does. Each rank sends its own gradients to owners.
    Of trees, by which round robin broadcasts and reduces, this is what crosses at least."""
    ranks, is_tree, step = nodes * each, name.startswith("round robin"), 0.0
    if name.startswith("dmuon"):
        step = one_root(matrices.updates, nodes)
    elif not name.startswith(("AdamW", "redundant")):
        step = one_root(matrices.kept, nodes if is_tree else ranks)
    if "reduced" not in name:
        return step, step + all_reduce(matrices.gradients, ranks)
    return step, step + one_root(matrices.gradients, nodes) * (1 if is_tree else each)


def ask_ddp(case: Case, cluster: Nodes) -> list[Row]:
    dtype = baselines.ns_dtype()
    field = {name: steps.contender("replicated", name, LAYERS, WIDTH, dtype) for name in DDP_KINDS}
    matrices = bytes_of(dtype)
    turns = {name: training.turn for name, training in field.items()}
    rows: list[Row] = []
    base: dict[str, list[float]] = {}
    for name, training, laps in in_turns(case, field, turns):
        base[name] = ms = [lap[0] for lap in laps]
        row = steps.row_of(SET, name, "replicated", ms, training)
        for key, lap in (("backward_ms", 1), ("step_ms", 2)):
            row[key] = statistics.median(one[lap] for one in laps)
        row["ratio_to_adamw"] = ratio(ms, base["AdamW, DDP"])
        row["ratio"] = ratio(ms, base["dmuon, DDP"]) if "dmuon, DDP" in base else None
        theory = ddp_links(name, matrices, case.nodes, case.each)
        rows.append(row | counted(cluster, training, theory))
    for training in field.values():
        training.close()
    return rows


# ---- tables --------------------------------------------------------------------------------


def _place(row: Row) -> tuple[Any, ...]:
    return row["set"], row["nodes"], row["ranks_per_node"], row["rate"]


def _about(row: Row) -> tuple[str, str]:
    return "{nodes} x {ranks_per_node}".format(**row), row["rate"]


def _ms(row: Row) -> str:
    return "{median_ms:.0f} ({p10_ms:.0f}-{p90_ms:.0f})".format(**row)


def _mb(nbytes: Sequence[int]) -> str:
    """One number where links carry alike, else the least and the most."""
    low, high = min(nbytes) / 1e6, max(nbytes) / 1e6
    return f"{high:.2f}" if high - low < 0.05 * high else f"{low:.2f}-{high:.2f}"


def placement_table(rows: Sequence[Row]) -> str:
    headings = ("layout", "nodes x ranks", "link", "owner order", "ms (p10-p90)", "x XOR",
                "MB out, by link", "in", "busiest / mean out", "in")  # fmt: skip
    cells = [
        (row["layout"], *_about(row), row["optimizer"], _ms(row), f"{row['ratio']:.2f}",
         _mb(row["link_out_bytes"]), _mb(row["link_in_bytes"]),
         f"{row['crowd_out']:.2f}", f"{row['crowd_in']:.2f}")
        for row in rows if row["question"] == "placement"
    ]  # fmt: skip
    return table(headings, cells, left=4)


def _carried(row: Row, prefix: str = "") -> tuple[str, str]:
    sent = row[f"{prefix}link_out_bytes"]
    return _mb(sent), f"{row[f'{prefix}theory_link_bytes'] / 1e6:.2f}"


def hsdp_table(rows: Sequence[Row]) -> str:
    headings = ("nodes x ranks", "link", "optimizer, model", "ms (p10-p90)", "x AdamW",
                "step ms", "step: MB of a rank", "theory", "MB of a link", "theory",
                "turn: MB of a link", "theory")  # fmt: skip
    cells = []
    for row in (row for row in rows if row["question"] == "hsdp"):
        theory = row.get("theory_bytes")
        cells.append(
            (*_about(row), row["optimizer"], _ms(row), f"{row['ratio_to_adamw']:.2f}",
             f"{row['step_ms']:.0f}", f"{row['bytes'] / 1e6:.2f}" if row["bytes"] else None,
             f"{theory / 1e6:.2f}" if theory else None,
             *_carried(row, "step_"), *_carried(row))
        )  # fmt: skip
    return table(headings, cells, left=3)


def ddp_table(rows: Sequence[Row]) -> str:
    headings = ("nodes x ranks", "link", "optimizer", "ms (p10-p90)", "x AdamW", "x dmuon, DDP",
                "backward ms", "step ms", "MB of a link", "theory")  # fmt: skip
    cells = [
        (*_about(row), row["optimizer"], _ms(row), f"{row['ratio_to_adamw']:.2f}",
         f"{row['ratio']:.2f}" if row["ratio"] else None,
         f"{row['backward_ms']:.0f}", f"{row['step_ms']:.0f}", *_carried(row))
        for row in rows if row["question"] == "ddp"
    ]  # fmt: skip
    return table(headings, cells, left=3)


# ---- the command ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    ask: Callable[[Case, Nodes], list[Row]]
    told: Callable[[Sequence[Row]], str]
    on: tuple[str, ...]
    of: tuple[Any, ...] = (None,)


QUESTIONS = {
    "placement": Question(ask_placement, placement_table, ("4x2",), tuple(PLACED)),
    "hsdp": Question(ask_hsdp, hsdp_table, ("2x2", "2x4", "4x2")),
    "ddp": Question(ask_ddp, ddp_table, ("4x1", "2x2")),
}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Markdown by name, for docs/evidence.md and the pages of what is asked about."""
    return {name.replace("-", "_"): q.told(rows) for name, q in QUESTIONS.items()}


def work(rank: int, case: Case, cluster: Nodes) -> list[Row]:
    pin(rank)
    return [case.row | row for row in QUESTIONS[case.question].ask(case, cluster)]


def answered(case: Case) -> list[Row]:
    """The rows of one case."""
    with emulated(case.nodes, case.rate) as cluster, cluster.sampled() as samples:
        rows = cluster.on_ranks(case.each, work, case, cluster)
    for row in rows:
        spans = row.pop("spans", None)
        if spans is not None:
            row["crowd_out"], row["crowd_in"] = crowding(samples, spans)
    return rows


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, sorted; a new one replaces that of the same contender and place."""

    def key(row: Row) -> tuple[Any, ...]:
        question = list(QUESTIONS).index(row["question"])
        bits = RATES.index(row["rate"]) if row["rate"] in RATES else len(RATES)
        place = row["nodes"], row["ranks_per_node"], row["set"], bits, row["rate"]
        return question, row["layout"], *place, row["optimizer"]

    found = {key(row): row for row in [*old, *new]}
    places = sorted({one[:-1] for one in found})
    return [found[one] for place in places for one in found if one[:-1] == place]


def shapes(text: str) -> tuple[int, int]:
    """
    >>> shapes("4x2")
    (4, 2)
    """
    nodes, _, each = text.partition("x")
    return int(nodes), int(each)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__)
    parser.add_argument("--ask", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--on", nargs="+", metavar="NxR", help="nodes x ranks a node")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of a node's link: 200mbit, ...")
    parser.add_argument("--layouts", nargs="+", choices=PLACED, help="of placement")
    parser.add_argument("--rounds", type=int, default=9, help=f"after {WARM_UP} to warm up")
    parser.add_argument("--table", metavar="JSON", help="print the tables of a file")
    args = parser.parse_args(argv)
    if args.table:
        rows = read_rows(args.table)
        print(*tables(rows).values(), sep="\n\n")
        return 0
    rows = []
    for name in args.ask:
        question = QUESTIONS[name]
        of = args.layouts if name == "placement" and args.layouts else question.of
        for on, rate, what in product(args.on or question.on, args.rates, of):
            case = Case(name, *shapes(on), rate, what, args.rounds)
            found = answered(case)
            print(question.told(found), flush=True)
            rows += found
            if args.json not in (None, "-"):
                known = read_rows(args.json) if os.path.exists(args.json) else []
                date = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
                write_json(args.json, document(merged(known, found)) | date)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
