"""What does training with Muon cost, on nodes whose links are slow?

``python -m benchmarks.end_to_end --json out.json`` (docs/evidence.md) trains a GPT of 20 M
parameters on emulated nodes (`benchmarks.nodes`). Within a case, contenders take turns step by step
in one process group, each on a model of its own, all with the same batches and the same
Newton-Schulz coefficients. A turn goes from before `step` to the end of the next backward, so that
what an optimizer leaves to the next forward counts.

``floor_ms``: one pass of `torch.optim.Muon`'s iteration over all matrices on one core, divided by
the cores, in the same rounds. ``link_bytes``: out of a node in a turn, as the link counts them,
mean over nodes; those of the framework are in it. P = 2 and 20 are not run: `in_the_long_run`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from benchmarks import baselines
from benchmarks.demo import COLORS, GPT, GPTConfig, demo
from benchmarks.models import Loss, Training
from benchmarks.nodes import LinkBytes, Nodes, emulated
from benchmarks.results import Benchmark, Cases, Row, picture, table
from benchmarks.timing import Laps, Times, over_ranks, take_turns, timed_row

MODEL = GPTConfig(width=512, heads=8, hidden=1408, depth=6)
MUON: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
WARM_UP = 1
REFERENCES = ("AdamW", "gather-then-compute", "torch.optim.Muon")

SHARDED_BASELINES: dict[str, type[baselines.Baseline]] = {
    "gather-then-compute": baselines.GatherThenCompute,
    "same-shape buckets": baselines.SameShapeBuckets,
    "Parallel Muon": baselines.ParallelMuon,
}
PERIODS = {"dmuon P=2": 2, "dmuon P=5": 5, "dmuon P=20": 20, "dmuon P=inf": math.inf}
RUN = ("dmuon", "dmuon P=5", "dmuon P=inf")  # the others mix the steps of these
MAIN = ("AdamW", "gather-then-compute", *RUN)
SHARDED = ("AdamW", *SHARDED_BASELINES, *RUN, "dmuon dedicated")
REPLICATED = ("AdamW", "torch.optim.Muon", "round robin", "dmuon", "dmuon reduced to owner",
              "dmuon dedicated")  # fmt: skip

ORDER = dict.fromkeys((*SHARDED[:4], *REPLICATED[:4], *SHARDED, *REPLICATED))  # of tables


@dataclass(frozen=True)
class Case:
    """One process group: where it runs, how the model is distributed, and who takes turns.

    ``around``: "FSDP2" over all ranks, "HSDP" with a replica per node, or "DDP". ``tokens``: of a
    rank in a step.
    """

    nodes: int
    each: int
    rate: str | None
    around: str
    tokens: int
    contenders: tuple[str, ...]
    rounds: int
    model: GPTConfig = MODEL

    @property
    def name(self) -> str:
        link = self.rate or "unshaped"
        return f"{self.nodes}x{self.each} {link} {self.around} {self.tokens} tokens"

    @property
    def world(self) -> int:
        return self.nodes * self.each


LINKS = {None: 6, "1gbit": 5, "200mbit": 4}  # and the rounds: a slow link takes time
CASES = (
    *(Case(4, 1, rate, "FSDP2", 1024, SHARDED, n) for rate, n in LINKS.items()),
    Case(4, 1, None, "FSDP2", 128, MAIN, 8),
    Case(4, 1, "1gbit", "FSDP2", 128, MAIN, 6),
    Case(4, 1, "1gbit", "FSDP2", 8192, MAIN, 3),
    *(Case(4, 1, rate, "DDP", 1024, REPLICATED, n) for rate, n in LINKS.items()),
    *(Case(n, each, "1gbit", "FSDP2", 1024, MAIN, 5) for n, each in ((1, 1), (2, 1), (4, 2))),
    *(Case(2, 2, "200mbit", around, 1024, MAIN, 4) for around in ("HSDP", "FSDP2")),
    *(Case(2, 2, "1gbit", around, 1024, MAIN, 5) for around in ("HSDP", "FSDP2")),
)


# ---- contenders ----------------------------------------------------------------------------


class Trained(Training):
    """A training with a backward behind it: the next thing is `step`."""

    def __init__(self, model: nn.Module, loss: Loss, optimizers: Sequence[Any]) -> None:
        super().__init__(model, loss, optimizers)
        self.link: list[float] = []  # bytes out of a node, a number per turn
        self.backward()

    def turn_on(self, nodes: Nodes) -> Laps:
        """Milliseconds of `step` with the next forward and backward; of each."""

        def compute() -> None:
            self.forward()
            self.backward()

        before = nodes.link_bytes()
        found = over_ranks(self.step, compute)
        self.link.append(_sent(before, nodes.link_bytes()))
        return found


def _sent(before: LinkBytes, after: LinkBytes) -> float:
    return statistics.fmean(b[0] - a[0] for a, b in zip(before, after, strict=True))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What dmuon's rules give to Muon: the weights of the blocks."""
    return [p for name, p in model.named_parameters() if ".blocks." in f".{name}" and p.ndim == 2]


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """As dmuon updates what is not a matrix."""
    return torch.optim.AdamW(params, betas=(0.9, 0.95), fused=True, **MUON)


def trained(case: Case, name: str, mesh: DeviceMesh, dtype: torch.dtype) -> Trained:
    """A contender of ``case``, from the weights that all of them begin with."""
    torch.manual_seed(0)
    model: Any = GPT(case.model)
    text, rank, context = demo.load_standard_library(), dist.get_rank(), case.model.context
    how = {"sequences": case.tokens // context, "context": context, "seed": 0}

    def loss(model: nn.Module, step: int) -> Any:
        return demo.next_byte_loss(model, *text.training_batch(step, rank, **how))

    muon = MUON | {"ns_coefficients": "quintic", "ns_dtype": dtype}
    own = options = None
    if name == "dmuon dedicated":
        own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    ignored = set() if own is None else own.dedicated_params
    if case.around != "DDP":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, ignored_params=ignored)
    elif name == "dmuon reduced to owner" or own is not None:
        options = dmuon.ReplicatedOptions(reduce_to_owner=True)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name.startswith("dmuon"):
        muon["period"] = PERIODS.get(name, 1)
        if own is None:
            dmuon.dedicate_params(model, options=options)
        return Trained(model, loss, [dmuon.Muon(model, **muon)])
    if name == "AdamW":
        return Trained(model, loss, [adamw(list(model.parameters()))])
    mine = matrices(model)
    rest = [p for p in model.parameters() if all(p is not q for q in mine)]
    if name == "torch.optim.Muon":
        first: Any = torch.optim.Muon(mine, adjust_lr_fn="match_rms_adamw", **MUON)
    else:
        kind = SHARDED_BASELINES.get(name, baselines.RoundRobin)
        first = kind(mine, ns_dtype=dtype, **MUON)
    return Trained(model, loss, [first, adamw(rest)])


# ---- a case --------------------------------------------------------------------------------


def in_the_long_run(name: str, values: Mapping[str, Sequence[float]]) -> float:
    """Per step: the median over the rounds; with a period, those of full and of block steps as the
    period mixes them.

    Full steps are those of P = 1 and 5, block steps those of P = 5 and infinity: so there are
    enough of each in few rounds.
    """
    if name not in PERIODS:
        return statistics.median(values[name])
    full, block = list(values["dmuon"]), list(values["dmuon P=inf"])
    for step, value in enumerate(values["dmuon P=5"], start=WARM_UP):
        (block if step % 5 else full).append(value)
    share = 1 / PERIODS[name]
    return share * statistics.median(full) + (1 - share) * statistics.median(block)


def work(rank: int, nodes: Nodes, case: Case, cores: int) -> list[Row]:
    """All contenders of a case, on each rank."""
    warnings.filterwarnings("ignore", "dmuon: the default process group waits")
    dtype = baselines.ns_dtype()
    shape = (case.nodes, case.each) if case.around == "HSDP" else (case.world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    field = {name: trained(case, name, mesh, dtype) for name in case.contenders}
    turns: dict[str, Callable[[], Laps]] = {
        "floor": baselines.floor(matrices(GPT(case.model)), dtype, cores)
    }
    turns |= {name: partial(one.turn_on, nodes) for name, one in field.items()}
    times = take_turns(turns, case.rounds, warm_up=WARM_UP)
    losses = torch.tensor([one.loss.item() for one in field.values()], dtype=torch.float64)
    dist.all_reduce(losses)
    mean = dict(zip(field, (losses / case.world).tolist(), strict=True))
    rows = rows_of(case, times, {name: one.link[WARM_UP:] for name, one in field.items()})
    for row in rows:
        if row["optimizer"] in field:
            name = row["optimizer"]
            row |= {"loss": mean[name], "steps": field[name].steps}
    return rows


def rows_of(case: Case, times: Times, link: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row per contender, and per period that can be mixed from them."""
    totals = {name: [t[0] for t in turns] for name, turns in times.items() if name != "floor"}
    steps = {name: [turn[1] for turn in times[name]] for name in totals}
    others = [name for name in REFERENCES if name in totals]
    within = {
        other: {name: list(map(truediv, mine, totals[other])) for name, mine in totals.items()}
        for other in others
    }
    names = [*totals, *(p for p in PERIODS if p not in totals and "dmuon P=5" in totals)]
    rows = []
    for name in names:
        row: Row = {"set": case.name, "optimizer": name, "layout": case.around, "world": case.world}
        if name in totals:
            row = timed_row(case.name, name, case.around, case.world, totals[name])
        row |= {"nodes": case.nodes, "ranks_per_node": case.each, "rate": case.rate}
        row |= {"tokens": case.tokens, "mean_ms": in_the_long_run(name, totals)}
        row |= {"step_ms": in_the_long_run(name, steps)}
        row["tokens_per_s"] = 1e3 * case.tokens * case.world / row["mean_ms"]
        row["floor_ms"] = statistics.median(lap[0] for lap in times["floor"])
        row |= {f"over_{other}": in_the_long_run(name, within[other]) for other in others}
        rows.append(row | {"link_bytes": round(in_the_long_run(name, link))})
    return rows


def measure(case: Case, cores: int) -> list[Row]:
    with emulated(case.nodes, case.rate) as nodes:
        return nodes.on_ranks(case.each, work, nodes, case, cores)


# ---- tables --------------------------------------------------------------------------------

ByCase = dict[str, dict[str, Row]]
"""Rows by their case's name and their optimizer."""


def _cases(rows: Sequence[Row], **wanted: Any) -> ByCase:
    """Those whose rows have these values, in the order of `CASES`."""
    found: ByCase = {case.name: {} for case in CASES}
    for row in rows:
        if "optimizer" in row and all(row[key] == value for key, value in wanted.items()):
            found.setdefault(row["set"], {})[row["optimizer"]] = row
    return {name: case for name, case in found.items() if case}


def _link(row: Row) -> str:
    return {None: "no limit", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}[row["rate"]]


def _steps(cases: ByCase, title: Callable[[Row], str]) -> str:
    """A training step by optimizer and case, relative to AdamW's and in seconds.

    Only optimizers that ran in every case have a row.
    """
    headings = [title(next(iter(case.values()))) for case in cases.values()]
    names = [name for name in ORDER if all(name in case for case in cases.values())]
    lines = []
    for name in names:
        found = [case[name] for case in cases.values()]
        cells = [f"{r['over_AdamW']:.2f} ({r['mean_ms'] / 1e3:.1f} s)" for r in found]
        lines.append((_named(name), *cells))
    return table(("times AdamW's step", *headings), lines)


def _named(name: str) -> str:
    return f"**{name}**" if name == "dmuon" else name.replace("inf", "∞")


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Markdown by name, for docs/evidence.md."""
    one_a_node = {"nodes": 4, "ranks_per_node": 1, "layout": "FSDP2"}
    pairs = {"nodes": 2, "ranks_per_node": 2}
    few = [row for row in rows if row.get("tokens") != 1024]
    at_1g = [r for r in rows if r.get("rate") == "1gbit" and r["tokens"] == 1024]
    scaled = sorted(_cases(at_1g, layout="FSDP2").items(), key=lambda item: _first(item)["world"])
    return {
        "links": _steps(_cases(rows, tokens=1024, **one_a_node), _link),
        "tokens": _steps(_cases(few), lambda row: f"{row['tokens']}, {_link(row)}"),
        "ddp": _steps(_cases(rows, layout="DDP"), _link),
        "replicas": _steps(_cases(rows, layout="HSDP", **pairs), _link),
        "ranks": _steps(
            {name: case for name, case in scaled if "2x2" not in name},
            lambda row: f"{row['nodes']} x {row['ranks_per_node']}",
        ),
    }


def _first(item: tuple[str, dict[str, Row]]) -> Row:
    return next(iter(item[1].values()))


SHOWN = {  # colours, and what a reader of the README knows
    "gather-then-compute": ("#9ca3af", "every rank gathers every matrix"),
    "same-shape buckets": ("#d6ccf5", "same-shape buckets, like dion"),
    "Parallel Muon": ("#b3a1e6", "Parallel Muon, like Motif"),
    "dmuon": (COLORS["dmuon"], "dmuon"),
    "dmuon P=5": ("#38bdf8", "dmuon, period=5"),
    "dmuon P=inf": ("#a5e0fd", "dmuon, block steps alone"),
}


def draw(rows: Sequence[Row], path: str) -> None:
    """What each optimizer adds to AdamW's training step, in percent, by link."""
    cases = _cases(rows, nodes=4, ranks_per_node=1, layout="FSDP2", tokens=1024)
    with picture(path, 1, 1, (7.2, 3.6)) as (_, axes):
        for place, (name, (color, label)) in enumerate(SHOWN.items()):
            more = [100 * (case[name]["over_AdamW"] - 1) for case in cases.values()]
            at = [k + (place - 2.5) * 0.14 for k in range(len(more))]
            bars = axes.bar(at, more, 0.13, color=color, label=label)
            bold = "bold" if name == "dmuon" else "normal"
            axes.bar_label(bars, [f"{v:.0f}%" for v in more], padding=1, fontsize=8, weight=bold)
        axes.set_xticks(range(len(cases)), [_link(_first(item)) for item in cases.items()])
        axes.set_title("What Muon adds to AdamW's step, by rate of links", loc="left", fontsize=11)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)


# ---- the command ---------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row in words."""
    return (
        f"{row['set']:36} {row['optimizer']:22} {row['mean_ms']:7.0f} ms, "
        f"step {row['step_ms']:6.0f} (floor {row['floor_ms']:.0f}), "
        f"{row['tokens_per_s']:7.0f} tokens/s, x AdamW {row['over_AdamW']:.2f}, "
        f"link {row['link_bytes'] / 1e6:.1f} MB, loss {row.get('loss', math.nan):.4f}"
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="of each case, instead of its own number")


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    cores = len(os.sched_getaffinity(0))
    for case in CASES:
        given = replace(case, rounds=args.rounds or case.rounds)
        yield case.name, partial(measure, given, cores)


BENCHMARK = Benchmark(__doc__, cases, line, options, tables, draw)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
