"""Plans which rank owns which matrix and prints the load balance with a proven lower bound.

Needs neither the model's weights nor the machine. Exit status 0; with --verify 1 if the certificate
does not hold; 2 for a mistake, or a file that cannot be read; 3 for a crash of the command itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from dmuon.catalogue import PRESETS
from dmuon.scheduler.json_files import read_text, write_text
from dmuon.scheduler.topology import MAX_RANKS
from dmuon.types import Layout, PlanError

if TYPE_CHECKING:  # functions import these when they plan: --help does not load torch
    from dmuon.catalogue import Stage
    from dmuon.report.data import LoadBalanceReport
    from dmuon.scheduler.costs import CostTable
    from dmuon.scheduler.plan import OwnershipPlan, Unit
    from dmuon.scheduler.shards import ShardMap

MODELS = "a preset, the path of a Hugging Face config.json, or module:function that returns a model"
LAYOUTS = tuple(layout.value for layout in Layout if layout is not Layout.AUTO)
# Pipeline schedules, by torch's names: parts of the model on a rank, 0 for any number.
SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 0, "InterleavedZeroBubble": 0, "ZBVZeroBubble": 2}
_KINDS, _LOOKED_AT = 16, 100_000  # ranks checked for the most memory; the same times matrices
_AXES = {1: ("dp",), 2: ("node", "gpu"), 3: ("group", "node", "gpu")}


def positive(number: type[int] | type[float]) -> Callable[[str], Any]:
    """Return a parser of finite numbers above zero, for ``type=`` of an option."""

    def read(text: str) -> int | float:
        if not 0 < (value := number(text)) < math.inf:
            raise ArgumentTypeError(f"must be positive, found {text}")
        return value

    read.__name__ = number.__name__  # argparse names it in errors
    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    verify = "only check the certificate of a saved plan"
    add_planning(parser).add_argument("--verify", metavar="PLAN.json", help=verify)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="PATH", help="write the numbers there; - for standard output alone")
    add("--html", metavar="PATH", help="write the report as a web page")
    add("--save", metavar="PATH", help="write the plan, for --verify and dedicate_params(plan=)")


def add_planning(parser: argparse.ArgumentParser) -> Any:
    """Add the options of `planned`; return the group of --model, which is exclusive."""
    group = parser.add_argument_group("what to plan for")
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"{MODELS}. Presets: {', '.join(PRESETS)}")
    add = group.add_argument
    add("--dtype", help="dtype of the parameters: bfloat16, float32, ...")
    splits = "rows of the matrices that a fused parameter holds; may be repeated"
    many = partial(add, action="append", default=[])
    many("--splits", type=_splits, metavar="PATTERN=R,R", help=splits)
    heads = "number of equal pieces of a parameter's rows; may be repeated"
    many("--heads", type=_heads, metavar="PATTERN=N", help=heads)

    add = parser.add_argument_group("owners").add_argument
    add("--mesh", type=mesh_shape, metavar="NxG", help="nodes x GPUs: 4x8; also 64 or 2x4x8")
    axes = "names of the mesh's axes (default: node,gpu); dp_replicate holds HSDP's replicas"
    add("--axes", metavar="A,B", help=axes)
    add("--layout", choices=LAYOUTS, default="sharded", help="as trained (default: %(default)s)")
    experts = "ranks of expert parallelism: the innermost ones, over which stacks are cut first"
    add("--ep", type=positive(int), default=1, metavar="N", help=experts)
    add("--ranks-per-node", type=positive(int), metavar="N", help="default: the mesh's last size")
    most = "most optimizer state on one owner, such as 80GiB"
    add("--memory", type=memory_bytes, metavar="SIZE", help=most)
    stages = "ranks of pipeline parallelism, each with a --mesh of its own; 4x2: two parts on each"
    add("--pp", type=pipeline_shape, metavar="P[xV]", help=stages)
    schedule = "of the pipeline, by torch's name (default: 1F1B, for several parts Interleaved1F1B)"
    add("--schedule", choices=SCHEDULES, help=schedule)

    add = parser.add_argument_group("planning").add_argument
    table = "analytic:h200, analytic:a100, ... or the path of a cost table (default: %(default)s)"
    add("--costs", default="analytic:h200", help=table)
    nic = "400Gb/node or 400Gb/gpu: a node's network card (default: the device's usual one)"
    add("--nic", metavar="RATE", help=nic)
    parts = "parts of the mesh that compute each matrix by themselves (default: as the step says)"
    add("--redundancy", type=positive(int), metavar="N", help=parts)
    add("--solver", help="auto (default), milp, greedy or round_robin")
    limit = "bound on the solver (default: that of PlannerOptions)"
    add("--time-limit", type=positive(float), metavar="SECONDS", help=limit)
    add("--max-batch", type=positive(int), metavar="B", help="most matrices in one batch")
    return what


def mesh_shape(text: str) -> tuple[int, ...]:
    """
    >>> mesh_shape("4x8")
    (4, 8)
    """
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,7}", text.strip(), re.IGNORECASE):
        raise ArgumentTypeError(f"{text!r} is no mesh: give sizes with an x between them: 4x8")
    shape = tuple(int(size) for size in text.lower().split("x"))
    if not 1 <= (world := math.prod(shape)) <= MAX_RANKS:
        raise ArgumentTypeError(f"{text} has {world:,} ranks, expected 1 to {MAX_RANKS:,}")
    return shape


def pipeline_shape(text: str) -> tuple[int, int]:
    """
    >>> pipeline_shape("4"), pipeline_shape("4x2")
    ((4, 1), (4, 2))
    """
    ranks, parts, *more = (*mesh_shape(text), 1)
    if len(more) > 1:
        raise ArgumentTypeError(f"{text!r} is no pipeline: give ranks, or ranks x parts, 4x2")
    return ranks, parts


def memory_bytes(text: str) -> int:
    """
    >>> memory_bytes("80GiB")
    85899345920
    """
    match = re.fullmatch(r"([0-9]{1,18}(\.[0-9]+)?) *(([KMGT])(I?)B|B)?", text.strip().upper())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size: give bytes, or 80GiB, 512MiB, 2GB")
    unit = (1024 if match[5] else 1000) ** " KMGT".index(match[4] or " ")
    if (size := int(Fraction(match[1]) * unit)) < 1:
        raise ArgumentTypeError(f"{text} is less than a byte")
    return size


def _splits(text: str) -> tuple[str, str | list[int]]:
    pattern, _, values = text.rpartition("=")
    if pattern and re.fullmatch(r"interleaved:[0-9]{1,18}", values):
        return pattern, values
    if not pattern or not re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", values):
        raise ArgumentTypeError(f"{text!r} is not of the form PATTERN=NUMBER[,NUMBER...]")
    return pattern, [int(value) for value in values.split(",")]


def _heads(text: str) -> tuple[str, int]:
    pattern, counts = _splits(text)
    if isinstance(counts, str) or len(counts) > 1:
        raise ArgumentTypeError(f"{pattern!r} takes one number, found {counts}")
    return pattern, counts[0]


def staged(args: argparse.Namespace) -> list[Stage]:
    """Return the stages of --pp, one per rank; without it the whole model is one."""
    from dmuon.catalogue import stages_of

    if args.mesh is None:
        raise PlanError("--model needs --mesh, such as --mesh 4x8")
    ranks, parts = args.pp or (1, 1)
    needed = SCHEDULES.get(args.schedule, 0) or parts
    if args.schedule and (not args.pp or parts != needed):
        fit = f"{ranks if args.pp else 4}x{needed}"
        raise PlanError(f"--schedule {args.schedule} needs {needed} parts a rank, as in --pp {fit}")
    cuts = {"splits": dict(args.splits), "heads": dict(args.heads)}
    is_v = args.schedule == "ZBVZeroBubble"
    return stages_of(args.model, args.dtype, ranks, parts, is_v=is_v, **cuts)


def planned(args: argparse.Namespace, stage: Stage) -> tuple[OwnershipPlan, ShardMap, CostTable]:
    """Return a stage's plan, the shard map and the prices."""
    from dmuon.config import PlannerOptions, ShardedOptions
    from dmuon.devices import GPU
    from dmuon.scheduler import network
    from dmuon.scheduler.costs import resolve_costs
    from dmuon.scheduler.shards import evenly_sharded
    from dmuon.scheduler.topology import Topology

    shape, layout = args.mesh, Layout(args.layout)
    if args.ep > 1 and layout is not Layout.SHARDED:
        raise PlanError("--ep is for --layout sharded: drop one of the two")
    axes = _AXES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape)))
    if args.axes is not None:
        axes = tuple(name.strip() for name in args.axes.split(","))
    ranks_per_node, world = args.ranks_per_node or shape[-1], math.prod(shape)
    if ranks_per_node < world and world % ranks_per_node:
        raise PlanError(
            f"--ranks-per-node {ranks_per_node}: {world} ranks are no whole number of such nodes, "
            f"the last would have {world % ranks_per_node}; pass a divisor of {world}"
        )
    device_type = "cpu" if args.costs == "analytic:cpu" else GPU
    try:
        topology = Topology(shape, axes, ranks_per_node, device_type)
    except ValueError as error:
        raise PlanError(f"--mesh: {error}") from error
    given = {
        "time_limit_s": args.time_limit, "max_batch": args.max_batch,
        "owner_memory_bytes": args.memory, "ranks_per_node": ranks_per_node,
        "redundancy": args.redundancy,
    }  # fmt: skip
    options = PlannerOptions(**{k: v for k, v in given.items() if v is not None})
    costs = resolve_costs(args.costs, device_type, momentum=layout.keeps_state_at_owners)
    costs = costs if args.nic is None else costs.on_network(args.nic, ranks_per_node)
    specs, is_cut = stage.specs, layout is Layout.SHARDED
    tp, ep = getattr(args, "tp", 1) if is_cut else 1, 1 if stage.is_dense else args.ep
    shards = evenly_sharded(specs, topology, ep, tp, whole=not is_cut)
    # If owners keep momentum, any rank may own any matrix.
    limits = None if layout.keeps_state_at_owners else shards.limits(args.memory)

    bucket = getattr(args, "bucket", None)
    asked = None if bucket is None else ShardedOptions(bucket_bytes=bucket)
    how = layout, args.solver or "auto", options, limits
    try:
        plan = network.planned(specs, topology, costs, shards, *how, asked=asked)
    except PlanError as error:  # in the words of the command line
        told = str(error).replace("PlannerOptions(owner_memory_bytes=...)", "--memory")
        raise type(error)(told.replace("owner_memory_bytes", "--memory")) from error
    return plan, shards, costs


def memory_of(plan: OwnershipPlan, shards: ShardMap, rank: int) -> dict[str, int]:
    """Return the bytes on one rank by purpose, without activations, for ``shards`` from
    `evenly_sharded`. Gradients and state have the dtypes of the parameters; buffers ("operands" to
    "assembly" in the "step_bytes" of `Muon.stats`) and Newton-Schulz, which a step keeps, two bytes
    per element. FSDP2 shards frozen parameters, and in `dedicated` all parameters without owner."""
    from dmuon.scheduler.plan import units_of
    from dmuon.scheduler.specs import ITEM_SIZE
    from dmuon.scheduler.topology import holds_replicas

    specs, layout = plan.specs, plan.layout
    item = [ITEM_SIZE.get(p.dtype, 4) for p in specs.parameters]
    held = [shard.box.numel * size for shard, size in zip(shards.reports[rank].shards, item)]
    muon, adamw = (sum(held[i] for i in some()) for some in (
        specs.muon_parameters, specs.adamw_parameters))  # fmt: skip
    # In `dedicated` a rank also holds the weights of owners at its place in all replicas.
    places = plan.topology.shape[-1] if layout is Layout.DEDICATED else plan.topology.world
    owned = stored = 0
    for matrix, owner in zip(specs.matrices, plan.owners, strict=True):
        nbytes = matrix.numel * item[matrix.parameter]
        owned += nbytes * (owner == rank)
        stored += nbytes * (owner % places == rank % places)
    adamw //= places if layout is Layout.DEDICATED else 1
    frozen = sum(p.numel * ITEM_SIZE.get(p.dtype, 4) for p in specs.frozen)
    if layout is Layout.DEDICATED:
        frozen //= places
    elif layout is Layout.SHARDED:
        axes = zip(plan.topology.axes, plan.topology.shape, strict=True)
        frozen //= math.prod(size for axis, size in axes if not holds_replicas(axis))
    state = owned if layout.keeps_state_at_owners else muon
    weights, gradients = (stored, stored) if layout is Layout.DEDICATED else (muon, state)
    kept = {"buffers": 0, "Newton-Schulz": 0}
    units = units_of(plan, [0] * len(specs.matrices))
    if not layout.keeps_state_at_owners:
        kept["buffers"] = _pipeline_bytes(plan, units, shards, rank)
    elif layout is Layout.REDUCED:  # updates of all matrices
        kept["buffers"] = 2 * sum(m.numel for m in specs.matrices)
    for unit in units:
        # The next X, four squares of the short side, and operands that are not assembled.
        if rank in (unit.copies or (unit.owner,)):
            b, m, n = unit.shape
            is_alone = shards.is_local(unit.matrices[0], unit.copies)
            is_alone |= layout.keeps_state_at_owners
            numel = b * (m * n * (1 + is_alone) + 4 * min(m, n) ** 2)
            kept["Newton-Schulz"] = max(kept["Newton-Schulz"], 2 * numel)
    return {
        "weights": adamw + weights + frozen, "gradients": adamw + gradients, "momentum": state,
        "AdamW state": 2 * adamw, **kept,
    }  # fmt: skip


def _pipeline_bytes(plan: OwnershipPlan, units: Sequence[Unit], shards: ShardMap, rank: int) -> int:
    """Return the bytes of a rank's `Pipeline` on the meta device, and on a CPU of its operands."""
    import torch

    from dmuon.comm.pipeline import Pipeline
    from dmuon.comm.transport import Meter, Transport
    from dmuon.config import ShardedOptions
    from dmuon.scheduler.plan import Sizes

    local = [shards.is_local(unit.matrices[0], unit.copies) for unit in units]
    is_cpu = plan.topology.device_type == "cpu"
    transport, like = Transport(), torch.empty(0, dtype=torch.bfloat16, device="meta")
    transport.rank, transport.world = rank, shards.world
    mine = zip(units, local) if is_cpu else ()
    operands = [u.numel for u, alone in mine if alone and rank in (u.copies or (u.owner,))]

    def memory(numel: int) -> torch.Tensor:
        operands.append(numel)
        return like.new_empty(numel)

    travelling = [u for u, alone in enumerate(local) if not alone]
    what, sizes = (shards, plan.topology, units, travelling), Sizes.of(ShardedOptions(), plan)
    how = transport, Meter(), sizes, like
    made = Pipeline(*what, *how, memory=memory if is_cpu else None)
    return sum(made.nbytes.values()) + like.itemsize * sum(operands)


def _report(args: argparse.Namespace, stage: Stage) -> LoadBalanceReport:
    from dmuon.report.data import LoadBalanceReport

    plan, shards, _ = planned(args, stage)
    owned = Counter[int]()
    for matrix, owner in zip(plan.specs.matrices, plan.owners, strict=True):
        owned[owner] += matrix.numel
    # One rank of each kind, first those with the most state and work; at least four.
    kinds = {(plan.state_bytes[r], owned[r]): r for r in reversed(range(shards.world))}
    most = max(4, min(_KINDS, _LOOKED_AT // max(1, len(plan.owners))))
    kept = [memory_of(plan, shards, kinds[k]) for k in sorted(kinds, reverse=True)[:most]]
    memory = tuple(max(kept, key=lambda found: sum(found.values())).items())
    source = PRESETS.get(args.model.lower(), {}).get("source", "")
    name = args.model + f", stage {stage.rank}" * (args.pp is not None)
    return LoadBalanceReport(plan, model=name, source=source, memory=memory)


def _plan(args: argparse.Namespace) -> int:
    """Plan every stage; print the report of the slowest one, below a table of all of a pipeline."""
    from dmuon.report.render import bytes_text, ms_text, percent, printed

    stages = staged(args)
    reports = each_once(stages, partial(_report, args))
    slowest = max(reports, key=lambda report: report.makespan_ms)  # the first one of equal ones
    shown, numbers, top = [slowest], slowest.to_dict(), slowest.makespan_ms
    if args.pp is not None:
        kept = "makespan_ms", "lower_bound_ms", "gap", "imbalance", "memory"
        both = zip(stages, (report.to_dict() for report in reports), strict=True)
        numbers["stages"] = rows = [s.to_dict() | {key: r[key] for key in kept} for s, r in both]
        less = 1 - min(row["makespan_ms"] for row in rows) / top if top else 0.0
        cells = {
            "makespan ms": lambda row: ms_text(row["makespan_ms"], top),
            "imbalance": lambda row: percent(row["imbalance"]),
            "state per rank": lambda row: bytes_text(row["memory"]["max"]),
            "all memory": lambda row: bytes_text(sum(row["memory"]["fullest_rank"].values())),
        }
        told = f"All stages wait for the slowest one, stage {reports.index(slowest)}, in the next "
        told += f"iteration. The fastest takes {percent(less, '.1%')} less."
        shown = [f"{args.model}: each stage on a mesh of its own", stage_table(rows, cells), told]
        shown += ["", slowest]
    show(lambda: printed(*shown, plain=False), lambda: numbers, args.json)
    if args.save is not None:
        wrote(args.save, lambda: write_text(args.save, slowest.plan.to_json() + "\n"))
    if args.html is not None:
        wrote(args.html, lambda: slowest.to_html(args.html))
    return 0


def each_once(stages: Sequence[Stage], make: Callable[[Stage], Any]) -> list[Any]:
    """Return what ``make`` returns for each stage, called once for equal ones."""
    found = {key: make(stage) for key, stage in {s.key: s for s in reversed(stages)}.items()}
    return [found[stage.key] for stage in stages]


def stage_table(
    rows: Sequence[dict[str, Any]], cells: Mapping[str, Callable[[dict[str, Any]], str]]
) -> Any:
    """Return a table of a pipeline's stages, with more cells by heading."""
    from dmuon.report.render import fold_names, grid

    table = grid(["stage", "holds", "matrices", *cells], ("holds",), overflow="fold")
    for row in rows:
        holds = "\n".join(name for name, _ in fold_names(row["holds"]))
        more = (cell(row) for cell in cells.values())
        table.add_row(str(row["stage"]), holds, f"{row['matrices']:,}", *more)
    return table


def show(text: Callable[[], str], numbers: Callable[[], object], path: str | None) -> None:
    """Print the text, and write the numbers as JSON to a path (PlanError if that fails); for "-"
    print only the JSON."""
    as_json = "" if path is None else json.dumps(numbers(), indent=1) + "\n"
    sys.stdout.write(as_json if path == "-" else text() + "\n")
    if path is not None and path != "-":
        wrote(path, lambda: write_text(path, as_json))


def wrote(path: str, write: Callable[[], object]) -> None:
    """Write a file and say so; PlanError if that fails."""
    try:
        write()
    except OSError as error:  # since `check_writable` the disk became full, or the folder vanished
        raise PlanError(f"cannot write {path!r}: {error.strerror or error}") from error
    sys.stderr.write(f"wrote {path}\n")


def check_writable(path: str) -> None:
    """Raise PlanError for a path that cannot be written, before minutes go into planning."""
    folder = os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path) or "."
    exists = os.path.exists(path)
    # A file is replaced by a new one, unless it is a device.
    needed = [path] * exists + [folder] * (os.path.isfile(path) or not exists)
    if not path:
        reason = "the path is empty"
    elif os.path.isdir(path):
        reason = "it is a directory"
    elif not os.path.isdir(folder):
        reason = f"there is no directory {folder!r}"
    elif not all(os.access(p, os.W_OK) for p in needed):
        reason = "permission denied"
    else:
        return
    raise PlanError(f"cannot write {path!r}: {reason}")


def _verify(args: argparse.Namespace) -> int:
    from dmuon.scheduler.certificate import certify
    from dmuon.scheduler.plan import OwnershipPlan

    try:
        certificate = certify(OwnershipPlan.from_json(read_text(args.verify)))
    except OSError as error:
        raise PlanError(f"cannot read {args.verify!r}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"cannot verify {args.verify!r}: {error}") from error
    print(certificate)
    return 0 if certificate.ok and certificate.proven else 1


def run(args: argparse.Namespace) -> int:
    """Plan or verify; return 1 if a certificate does not hold."""
    names = ("mesh", "pp", "schedule", "solver", "json", "html", "save")
    given = [f"--{name}" for name in names if getattr(args, name) is not None]
    if args.verify is not None and given:
        raise PlanError(f"--verify takes a saved plan and nothing else: drop {', '.join(given)}")
    several = [name for name in given if name in ("--html", "--save")]
    if args.pp and several:
        raise PlanError(f"--pp makes a plan per stage: drop it, or drop {', '.join(several)}")
    for path in (args.json, args.html, args.save):
        if path not in (None, "-"):
            check_writable(path)
    if args.verify is not None:
        return _verify(args)
    return _plan(args)
