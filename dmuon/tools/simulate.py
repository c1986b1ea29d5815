"""Simulates a training step: what Muon costs on a mesh and a network, against AdamW, and why.

Nothing is measured and nothing runs. docs/simulate.md says how far to trust the numbers. Exit
status 2 for a mistake, 3 for a crash of the command itself.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dmuon.catalogue import Stage
from dmuon.config import ShardedOptions
from dmuon.report.render import grid, percent, printed
from dmuon.scheduler import simulate as sim
from dmuon.scheduler.json_files import write_text
from dmuon.scheduler.network import job_of
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.scheduler.topology import Topology, holds_replicas
from dmuon.tools.plan import (
    LAYOUTS,
    add_planning,
    check_writable,
    each_once,
    memory_bytes,
    memory_of,
    planned,
    positive,
    show,
    stage_table,
    staged,
    wrote,
)  # fmt: skip
from dmuon.types import Layout, PlanError

# ---- the command -------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_planning(parser)
    count, dtypes = positive(int), tuple(ITEM_SIZE)
    add = parser.add_argument_group("the step").add_argument
    for name, default, told in (
        ("tokens", None, "tokens of a rank (default: 8192, or with --pp two sequences a stage)"),
        ("sequence", 4096, "tokens of a sequence (default: %(default)s)"),
        ("microbatches", None, "parts of a step in a pipeline (default: a sequence each)"),
        ("active", 0, "experts that see each token"),
        ("tp", 1, "ranks of tensor parallelism, the innermost ones"),
    ):
        add(f"--{name}", type=count, default=default, metavar="N", help=told)
    add("--recompute", action="store_true", help="activation checkpointing: forward in backward")
    used = "dtype of weights where FSDP2 gathers them (default: the parameters')"
    add("--param-dtype", choices=dtypes, help=used)
    reduced = "dtype in which gradients are reduced (default: that of --param-dtype)"
    add("--reduce-dtype", choices=dtypes, help=reduced)
    every = "period of MuonBP: a full step every P steps, inf for none (default: 1, plain Muon)"
    add("--period", type=period, default=1.0, metavar="P", help=every)
    add("--bucket", type=memory_bytes, metavar="SIZE", help="size of the layout's buckets")
    add("--clip", dest="clips", action="store_true", help="gradients are clipped by their norm")
    one_way = "GB/s that a GPU reaches one way inside its node (default: the device's)"
    add("--nvlink", type=positive(float), metavar="RATE", help=one_way)
    add = parser.add_argument_group("output").add_argument
    naive = "naive: each rank gathers and orthogonalizes everything (default: %(default)s)"
    add("--against", choices=("adamw", "naive"), default="adamw", help=naive)
    other = "also simulate other layouts, periods and redundancies"
    add("--advise", action="store_true", help=other)
    fits = "with --advise: most weights, gradients and state of a rank (default: %(default)s)"
    add("--fits", type=memory_bytes, default="60GiB", metavar="SIZE", help=fits)
    add("--json", metavar="PATH", help="write the numbers there; - for standard output alone")
    add("--trace", metavar="PATH", help="write what happens for https://ui.perfetto.dev")


def period(text: str) -> float:
    """
    >>> period("5"), period("inf")
    (5.0, inf)
    """
    return math.inf if text == "inf" else float(positive(int)(text))


@dataclass(frozen=True)
class Setting:
    """A way to train. ``steps`` by name: the baseline's, then Muon's, or with a ``period`` Muon's
    full and block step. ``memory``: bytes of a rank's weights, gradients and state."""

    name: str
    job: sim.Job
    period: float
    memory: int
    steps: Mapping[str, sim.Step]
    code: str = ""  # see `_code`
    stages: Sequence[tuple[Stage, Setting]] = ()  # of a pipeline

    @classmethod
    def of(cls, args: argparse.Namespace, **changed: Any) -> Setting:
        """Simulate the setting of the command line, with some options ``changed``."""
        given = argparse.Namespace(**{**vars(args), **changed})
        stages = staged(given)
        every = [p for stage in stages for p in stage.specs.parameters]
        width = next((p.shape[-1] for p in every if p.reason.startswith("embedding")), 0)
        each: list[Setting] = each_once(stages, lambda stage: cls._of_stage(given, stage, width))
        if not given.pp:
            return each[0]
        job, world = each[0].job, math.prod(given.mesh)
        near = (given.ranks_per_node or given.mesh[-1]) >= world * len(stages)
        sent = float(given.tokens // given.microbatches * width * (job.load.used or job.work.item))
        hop = sim.Exchange("activations", 1, not near, sent * near, sent * (not near), sent)
        share = 1 / given.pp[1]
        if "Zero" in given.schedule:  # of forward and both backwards, that of weights fills it
            share *= (1 + given.recompute) / (3 + given.recompute)
        how = given.microbatches, share, job.machine.ms(hop)
        steps = {n: sim.pipelined([one.steps[n] for one in each], *how) for n in each[0].steps}
        return replace(each[0], steps=steps, stages=tuple(zip(stages, each, strict=True)))

    @classmethod
    def _of_stage(cls, given: argparse.Namespace, stage: Stage, width: int) -> Setting:
        plan, shards, costs = planned(given, stage)
        is_cut = plan.layout is Layout.SHARDED
        limited = {"--period": given.period > 1, "--tp": given.tp > 1} if not is_cut else {}
        if plan.layout is Layout.DEDICATED:
            limited |= {"--bucket": given.bucket is not None}
        for name in (name for name, is_given in limited.items() if is_given):
            raise PlanError(f"{name} is not for --layout {plan.layout.value}: drop one of the two")
        machine = sim.Machine.of(costs, plan.topology)
        if given.nvlink is not None:
            machine = replace(machine, inside=1e9 * given.nvlink)
        used, reduced = (ITEM_SIZE.get(d, 0) for d in (given.param_dtype, given.reduce_dtype))
        active, ep = (0, 1) if stage.is_dense else (given.active, given.ep)
        how = given.tokens, given.sequence, given.recompute, active, given.tp, ep
        # FSDP2 reduces gradients in the dtype of its products, other wrappers in the parameters'.
        of_fsdp = sim.Load(*how, used, reduced or used, width)
        load = of_fsdp if is_cut else replace(of_fsdp, reduced=reduced)
        options = None if given.bucket is None else ShardedOptions(bucket_bytes=given.bucket)
        job = job_of(plan, shards, costs, machine, load, options, clips=given.clips)
        kept = sum(memory_of(plan, shards, 0).values()) if given.advise else 0
        has_replicas = any(map(holds_replicas, plan.topology.axes)) and is_cut
        is_grid = has_replicas or plan.layout is Layout.DEDICATED
        sizes_of = "x".join(map(str, given.mesh if is_grid else [plan.topology.world]))
        name = f"{plan.layout.value}, {'HSDP ' * has_replicas}{sizes_of}"
        # AdamW has no owners to keep state at.
        base_of = {Layout.REDUCED: Layout.REPLICATED, Layout.DEDICATED: Layout.SHARDED}
        around = base_of.get(job.around, job.around)
        base = replace(job, around=around)
        if around is Layout.SHARDED:
            base = replace(base, uneven=1.0, blocks=sim.blocks_of(plan.specs, of_fsdp))
        step = sim.adamw if given.against == "adamw" else sim.redundant_step
        steps = {given.against: sim.simulate(base, step)}
        if given.period < math.inf:
            steps["Muon" if given.period == 1 else "full step"] = sim.simulate(job)
        if given.period > 1:
            steps["block step"] = sim.simulate(job, sim.block_step)
        return cls(name, job, given.period, kept, steps, _code(given, job.around, plan.topology))

    @property
    def ms(self) -> float:
        """Milliseconds of a training step with Muon, on average."""
        first, *others = [step.ms for step in self.steps.values()][1:]
        return first if not others else others[0] + (first - others[0]) / self.period

    @property
    def over(self) -> float:
        """Time relative to that of the baseline."""
        return self.ms / next(iter(self.steps.values())).ms

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON."""
        every = None if self.period == math.inf else self.period
        return {
            "setting": self.name, "period": every, "ms": self.ms, "over": self.over,
            "memory": self.memory or None,
            "steps": {
                name: {
                    "ms": step.ms, "optimizer_ms": step.optimizer_ms, "parts_ms": step.parts,
                    "critical_path_ms": step.critical_path,
                }
                for name, step in self.steps.items()
            },
            "stages": [stage.to_dict() | one.to_dict() for stage, one in self.stages],
        }  # fmt: skip


def _code(given: argparse.Namespace, around: Layout, topology: Topology) -> str:
    """Return the lines of a script, with the call of `Muon` left open for the period."""
    size, parts = given.bucket, given.redundancy
    asked = [f'"planner": dmuon.PlannerOptions(redundancy={parts})'] * bool(parts)
    options = f"ShardedOptions(bucket_bytes={size})"
    if around is not Layout.SHARDED:
        options = f"ReplicatedOptions(publish_bucket_bytes={size})"
    asked += [f'"options": dmuon.{options}'] * (bool(size) and around is not Layout.REDUCED)
    size_too = f", publish_bucket_bytes={size}" * bool(size)
    more = f", dedicate={{{', '.join(asked)}}}" * bool(asked)
    mesh = f"init_device_mesh(device, {topology.shape}, mesh_dim_names={topology.axes})"
    setup = {
        Layout.SHARDED: f"fully_shard(model, mesh={mesh})",
        Layout.REPLICATED: "model = DistributedDataParallel(model)",
        Layout.REDUCED: "own = dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions("
        f"reduce_to_owner=True{size_too}))",
        Layout.DEDICATED: f'own = dmuon.dedicate_params(model, {mesh}, layout="dedicated")',
    }
    return f"{setup[around]}\nopt = dmuon.Muon(model{more}"


def run(args: argparse.Namespace) -> int:
    """Simulate, and print or write the results."""
    _fill(args)
    if args.trace == "-":
        raise PlanError("--trace is a file: give a path, not -")
    for path in (args.json, args.trace):
        if path not in (None, "-"):
            check_writable(path)
    setting = Setting.of(args)
    advice = advised(args) if args.advise else []

    def found() -> dict[str, Any]:
        rows = [one.to_dict() | {"why": why} for one, why in advice]
        more: dict[str, Any] = {"advice": rows} if rows else {}
        if args.pp:
            more = {"schedule": args.schedule, "microbatches": args.microbatches}
        return {"model": args.model, **setting.to_dict()} | more

    show(lambda: _text(args, setting, advice), found, args.json)
    if args.trace is not None:
        muon = [*setting.steps.values()][1]
        wrote(args.trace, lambda: write_text(args.trace, json.dumps(trace(muon))))
    return 0


def _fill(args: argparse.Namespace) -> None:
    """Replace absent options of a pipeline by defaults; PlanError if they do not fit together."""
    ranks, parts = args.pp or (1, 1)
    if args.pp and args.advise:
        raise PlanError("--advise compares layouts of a whole model: drop it, or drop --pp")
    if args.microbatches and not args.pp:
        raise PlanError("--microbatches are those of a pipeline: add --pp, such as --pp 4")
    args.tokens = args.tokens or (8192 if ranks == 1 else 2 * ranks * args.sequence)
    of_length = 1 if ranks == 1 else max(1, args.tokens // args.sequence)
    count = args.microbatches = args.microbatches or of_length
    if args.pp:
        args.schedule = args.schedule or ("1F1B" if parts == 1 else "Interleaved1F1B")
    # As in torch: a round has at least as many microbatches as ranks.
    if args.tokens % count or count < ranks or count % (count // ranks):
        raise PlanError(
            f"--microbatches {count} must divide --tokens {args.tokens} and fill whole rounds of "
            f"{ranks} stages or more, as --microbatches {2 * ranks} --tokens "
            f"{2 * ranks * args.sequence} do"
        )


def _text(args: argparse.Namespace, setting: Setting, advice: Sequence[tuple[Setting, str]]) -> str:
    """Return the results as text for a terminal."""
    steps, first = setting.steps, "the slowest rank, ms"
    parts = {name: step.parts for name, step in steps.items()}
    table = grid([first, *steps], (first,))
    for kind in dict.fromkeys(kind for of in parts.values() for kind in of):
        cells = (of.get(kind) for of in parts.values())
        table.add_row(kind, *("" if ms is None else f"{ms:,.1f}" for ms in cells))
    table.add_section()
    table.add_row("training step", *(f"{step.ms:,.1f}" for step in steps.values()), style="bold")
    table.add_row("of it the optimizer", *(f"{s.optimizer_ms:,.1f}" for s in steps.values()))
    name, muon = [*steps.items()][1]
    chain = (f"{kind} {ms:,.1f}" for kind, ms in muon.critical_path.items() if ms > 1e-3 * muon.ms)
    network = f", network card {args.nic}" if args.nic else ""
    average = f", on average with P = {setting.period:g}" if 1 < setting.period < math.inf else ""
    shown: list[Any] = [
        f"{args.model}, {setting.name}: {args.tokens:,} tokens per rank, sequences of "
        f"{args.sequence:,}; costs {args.costs}{network}",
        table,
        f"Muon: {setting.ms:,.1f} ms per step{average}, {percent(abs(setting.over - 1), '.1%')} "
        f"{'more' if setting.over >= 1 else 'less'} than {args.against}",
        f"critical path of {name}, ms: {', '.join(chain)}",
    ]
    if args.pp:
        shown_of = {f"{n}, ms": partial(_ms_text, n, "ms") for n in steps}
        shown_of["optimizer, ms"] = partial(_ms_text, name, "optimizer_ms")
        bubble = percent(muon.waits.get("bubble", 0.0) / muon.ms, ".1%")
        each = f"{args.microbatches} microbatches of {args.tokens // args.microbatches:,} tokens"
        told = f"{args.schedule}, {each}: a bubble of {bubble}"
        shown += ["", stage_table(setting.to_dict()["stages"], shown_of), told]
    if advice:
        other = f"{args.against} there, ms"
        rows = grid(["setting", "ms", other, "over it", "GiB per rank"], ("setting",))
        for n, (one, _) in enumerate(advice):
            times = f"{one.ms:,.1f}", f"{one.ms / one.over:,.1f}", percent(one.over - 1, "+.1%")
            style = "" if n else "bold green"
            rows.add_row(one.name, *times, f"{one.memory / 2**30:.1f}", style=style)
        best = advice[0][0]
        code = best.code + (f", period={best.period:g})" if best.period > 1 else ")")
        changes = " (block steps are not Muon's: see the losses)" * (best.period > 1)
        beside = f", after tensor parallelism of {args.tp}" * (args.tp > 1)
        last = f"With costs {args.costs} the fastest is {best.name}{changes}{beside}:"
        shown += ["", rows, *(f"{one.name}: {why}" for one, why in advice), _LOSS, last, code]
    return printed(*shown, plain=False)


def _ms_text(name: str, key: str, stage: Mapping[str, Any]) -> str:
    return f"{stage['steps'][name][key]:,.1f}"


# ---- advice ------------------------------------------------------------------------------

_PERIODS = (1.0, 2.0, 5.0, 10.0, 20.0)
_LOSS = (
    "Loss by period, from MuonBP's tables: perplexity 12.77 with P = 5, 12.90 with P = 1, "
    "13.68 with block steps alone (8B); 15.12, 15.33, 20.29 (960M). GiB are without activations."
)


def advised(args: argparse.Namespace) -> list[tuple[Setting, str]]:
    """Return settings with reasons: layouts and HSDP's splits that fit, sharded ones with P = 1 and
    with the period that is `enough`, fastest first; then the fastest sharded setting with P = 1
    under other redundancies."""
    found, shards = list[tuple[Setting, str]](), list[tuple[Setting, dict[str, Any]]]()
    for way in _ways(args):
        if (one := Setting.of(args, **way)).memory > args.fits:
            continue
        found.append((one, _why(one)))
        if one.job.around is Layout.SHARDED:
            shards.append((one, way))
            if math.prod(args.mesh) > 1 and (other := enough(one))[0].period > 1:
                found.append(other)
    if not found:
        raise PlanError(f"no layout keeps weights, gradients and state of a rank below {args.fits}")
    found.sort(key=lambda pair: round(pair[0].ms, 6))  # at equal times the plainer one first
    if not shards or math.prod(args.mesh) == 1:
        return found
    best, way = min(shards, key=lambda pair: pair[0].ms)
    more = dict[str, dict[str, Any]]()
    if (replicas := best.job.groups.replicas.ranks) > 1:
        more["each matrix once"] = {"redundancy": 1}
        more["all in each replica"] = {"redundancy": replicas}
    for name, changed in more.items():
        one = Setting.of(args, **way | changed)
        gain = 1 - one.ms / best.ms
        why = f"{'saves' if gain > 0 else 'costs'} {percent(abs(gain), '.1%')}"
        why = why if abs(gain) > 0.002 else "changes nothing"
        found.append((replace(one, name=f"{best.name}, {name}"), why))
    return found


def enough(one: Setting, periods: Sequence[float] = _PERIODS) -> tuple[Setting, str]:
    """Give a sharded setting the smallest period within 1% of block steps, or the last one."""
    block = sim.simulate(one.job, sim.block_step)
    mixed = [replace(one, period=p, steps={**one.steps, "block step": block}) for p in periods]
    found = next((each for each in mixed if each.ms <= 1.01 * block.ms), mixed[-1])
    why = f"the smallest P of {', '.join(f'{p:g}' for p in periods)} within 1% of block steps"
    if found.ms > 1.01 * block.ms:
        why = "none of these is within 1% of block steps"
    return replace(found, name=f"{one.name}, P = {found.period:g}"), f"{why} ({block.ms:,.1f} ms)"


def _ways(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return other layouts and meshes on the same ranks, as options of the command line."""
    world = math.prod(args.mesh)
    each = min(world, args.ranks_per_node or args.mesh[-1])
    flat = {"ranks_per_node": each, "period": 1.0, "mesh": (world,), "axes": "dp"}
    ways: list[dict[str, Any]] = [flat | {"layout": "sharded"}]
    nodes, inner = world // each, args.ep * args.tp
    for replicas in sorted({2**k for k in range(12) if nodes % 2**k == 0} | {nodes, 2 * nodes}):
        shards = world // replicas
        if 1 < replicas < world and world % replicas == 0 and shards % inner == 0:
            split = {"mesh": (replicas, shards), "axes": "replicate,shard"}
            ways.append(flat | {"layout": "sharded"} | split)
    if args.ep == args.tp == 1:
        alone = {"redundancy": None, "bucket": None}
        names = LAYOUTS[1:] if world > 1 else LAYOUTS[1:2]  # one process needs no other
        ways = ways[world == 1 :] + [flat | alone | {"layout": name} for name in names]
        if 1 < nodes < world:
            split = {"mesh": (nodes, each), "axes": "node,gpu", "layout": "dedicated"}
            ways.append(flat | alone | split)
    return ways


def _why(one: Setting) -> str:
    """Describe the parts of a setting's step apart from forward and backward."""
    muon = [*one.steps.values()][1]
    waits = [(ms, kind[9:]) for kind, ms in muon.parts.items() if kind.startswith("wait for ")]
    longest = sorted(waits, reverse=True)[:3]
    shown = ", ".join(f"{kind} {ms:,.1f} ms" for ms, kind in longest if ms > 0.002 * muon.ms)
    work = f"Newton-Schulz {muon.parts.get('Newton-Schulz', 0):,.1f} of {muon.optimizer_ms:,.1f} ms"
    return f"{work} in the optimizer; " + (f"waits for {shown}" if shown else "nothing waits")


# ---- the trace -----------------------------------------------------------------------------


def trace(step: sim.Step) -> dict[str, Any]:
    """Return a trace for https://ui.perfetto.dev: the work of each class of ranks, and the wires,
    without times of waiting."""
    events = []
    for c in range(len(step.run.now)):
        for span in step.run.spans:
            begin, end = max(step.since, float(span.begin[c])), float(span.end[c])
            if end > begin and (span.on != sim.DEVICE or span.cause < 0):
                events.append({
                    "ph": "X", "name": span.name, "cat": span.kind, "pid": f"ranks of class {c}",
                    "tid": span.on, "ts": 1e3 * (begin - step.since), "dur": 1e3 * (end - begin),
                })  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}
