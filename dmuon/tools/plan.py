"""Plans which rank owns which matrix and prints the load balance with a proven lower bound.

Needs neither the model's weights nor the machine. Exit status 0; with --verify 1 if the certificate
does not hold; 2 for a mistake, or a file that cannot be read or is too large; 3 for a crash of the
command itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from dmuon.catalogue import PRESETS, model_specs
from dmuon.config import CO_OWNERS, PlannerOptions
from dmuon.devices import GPU
from dmuon.report.data import LoadBalanceReport, build_report
from dmuon.report.render import WIDTH, count_text, grid, printed
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import resolve_costs
from dmuon.scheduler.json_files import read_text, write_text
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.solve import SOLVERS, solve
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.scheduler.topology import MAX_RANKS, Topology
from dmuon.types import Layout, PlanError

COMPARED = ("round_robin", "greedy", "milp")
MODELS = "a preset, the path of a Hugging Face config.json, or module:function that returns a model"
_AXES = {1: ("dp",), 2: ("node", "gpu"), 3: ("group", "node", "gpu")}


def positive(number: type[int] | type[float]) -> Callable[[str], Any]:
    """A reader of finite numbers above zero, for ``type=`` of an option."""

    def read(text: str) -> int | float:
        value = number(text)
        if not 0 < value < math.inf:
            raise ArgumentTypeError(f"must be positive, found {text}")
        return value

    read.__name__ = number.__name__  # argparse names it where a text is no number
    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    defaults = PlannerOptions()
    group = parser.add_argument_group("what to plan for")
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"{MODELS}. Presets: {', '.join(PRESETS)}")
    verify = "only check the certificate of a saved plan"
    what.add_argument("--verify", metavar="PLAN.json", help=verify)
    add = group.add_argument
    add("--dtype", help=f"dtype of the parameters: {', '.join(ITEM_SIZE)}")
    splits = "rows of the matrices that a fused parameter holds; may be repeated"
    many = partial(add, action="append", default=[])
    many("--splits", type=_splits, metavar="PATTERN=R,R", help=splits)
    heads = "number of equal pieces of a parameter's rows; may be repeated"
    many("--heads", type=_heads, metavar="PATTERN=N", help=heads)

    add = parser.add_argument_group("owners").add_argument
    add("--mesh", type=mesh_shape, metavar="NxG", help="nodes x GPUs: 4x8; also 64 or 2x4x8")
    add("--axes", metavar="A,B", help="names of the mesh's axes (default: node,gpu)")
    add("--ranks-per-node", type=positive(int), metavar="N", help="default: the mesh's last size")
    most = "most optimizer state on one owner, such as 80GiB"
    add("--memory", type=memory_bytes, metavar="SIZE", help=most)

    add = parser.add_argument_group("planning").add_argument
    table = "analytic:h200, analytic:a100, ... or the path of a cost table (default: %(default)s)"
    add("--costs", default="analytic:h200", help=table)
    shared = (
        "ranks that share a matrix, where momentum lies with the parameters: auto where the step "
        "becomes 5%% faster (default: none, momentum lies with owners)"
    )
    add("--co-owners", type=_co_owners, metavar="auto|off|2|4|8", help=shared)
    add("--solver", help=f"one of {', '.join(SOLVERS)} (default: auto)")
    add("--compare", action="store_true", help=f"run {', '.join(COMPARED)} side by side")
    seconds, limit = positive(float), "bound on the solver (default: %(default)g)"
    add("--time-limit", type=seconds, default=defaults.time_limit_s, metavar="SECONDS", help=limit)
    most = "most matrices in one batch (default: %(default)s)"
    add("--max-batch", type=positive(int), default=defaults.max_batch, metavar="B", help=most)

    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="PATH", help="write the numbers there; - for standard output alone")
    add("--html", metavar="PATH", help="write the report as a web page")
    add("--save", metavar="PATH", help="write the plan, for --verify and dedicate_params(plan=)")


def mesh_shape(text: str) -> tuple[int, ...]:
    """
    >>> mesh_shape("4x8")
    (4, 8)
    """
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,7}", text.strip(), re.IGNORECASE):
        raise ArgumentTypeError(f"{text!r} is no mesh: give sizes with an x between them: 4x8")
    shape = tuple(int(size) for size in text.lower().split("x"))
    world = math.prod(shape)
    if not 1 <= world <= MAX_RANKS:
        raise ArgumentTypeError(f"{text} has {world:,} ranks, expected 1 to {MAX_RANKS:,}")
    return shape


def memory_bytes(text: str) -> int:
    """
    >>> memory_bytes("80GiB")
    85899345920
    """
    match = re.fullmatch(r"([0-9]{1,18}(\.[0-9]+)?) *(([KMGT])(I?)B|B)?", text.strip().upper())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size: give bytes, or 80GiB, 512MiB, 2GB")
    unit = (1024 if match[5] else 1000) ** " KMGT".index(match[4] or " ")
    size = int(Fraction(match[1]) * unit)
    if size < 1:
        raise ArgumentTypeError(f"{text} is less than a byte")
    return size


def _co_owners(text: str) -> str | int:
    value = int(text) if text.isdigit() else text
    CO_OWNERS.read(value)
    if not CO_OWNERS.fits(value):
        raise ArgumentTypeError(f"must be {CO_OWNERS.expected}, found {text!r}")
    return value


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


def _planner(args: argparse.Namespace) -> Callable[[str], OwnershipPlan]:
    """Makes the plan that is asked for, with the solver of a name."""
    if args.mesh is None:
        raise PlanError("--model needs --mesh, such as --mesh 4x8")
    shape = args.mesh
    axes = _AXES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape)))
    if args.axes is not None:
        axes = tuple(name.strip() for name in args.axes.split(","))
    ranks_per_node = shape[-1] if args.ranks_per_node is None else args.ranks_per_node
    device_type = "cpu" if args.costs == "analytic:cpu" else GPU
    try:
        topology = Topology(shape, axes, ranks_per_node, device_type)
    except ValueError as error:
        raise PlanError(f"--mesh: {error}") from error
    options = PlannerOptions(
        time_limit_s=args.time_limit,
        owner_memory_bytes=args.memory,
        max_batch=args.max_batch,
        ranks_per_node=ranks_per_node,
        co_owners=args.co_owners or "off",
    )
    # Momentum then lies with the shards, as it must where matrices are shared.
    layout = Layout.REDUCED if args.co_owners is None else Layout.SHARDED
    costs = resolve_costs(args.costs, device_type, momentum=layout.keeps_state_at_owners)
    specs = model_specs(args.model, args.dtype, splits=dict(args.splits), heads=dict(args.heads))
    return lambda name: solve(specs, topology, costs, layout=layout, solver=name, options=options)


def _header(model: str, plan: OwnershipPlan) -> str:
    topology, everything = plan.topology, plan.specs.parameters + plan.specs.frozen
    dtypes = ", ".join(sorted({p.dtype for p in everything}))
    mesh = " x ".join(map(str, topology.shape))
    preset = PRESETS.get(model.lower())
    return (
        f"{model}: {_count(sum(p.numel for p in everything))} parameters ({dtypes}), "
        f"mesh {mesh} ({', '.join(topology.axes)}) on {count_text(topology.nodes, 'node')}"
        + (f"\nshapes: {preset['source']}" if preset else "")
    )


def _count(number: float) -> str:
    """
    >>> _count(7_615_616_512)
    '7.62 B'
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _plan(args: argparse.Namespace) -> int:
    plan = _planner(args)(args.solver or "auto")
    report = build_report(plan)
    show(lambda: f"{_header(args.model, plan)}\n\n{report}", report.to_dict, args.json)
    if args.save is not None:
        wrote(args.save, lambda: write_text(args.save, plan.to_json() + "\n"))
    if args.html is not None:
        wrote(args.html, lambda: report.to_html(args.html))
    return 0


def show(text: Callable[[], str], numbers: Callable[[], object], path: str | None) -> None:
    """Print the text, and write the numbers as JSON to a path; for "-" print these alone.

    Raises:
        PlanError: the file cannot be written.
    """
    as_json = "" if path is None else json.dumps(numbers(), indent=1) + "\n"
    sys.stdout.write(as_json if path == "-" else text() + "\n")
    if path is not None and path != "-":
        wrote(path, lambda: write_text(path, as_json))


def wrote(path: str, write: Callable[[], object]) -> None:
    """Write a file and say so; PlanError where it cannot be."""
    try:
        write()
    except OSError as error:  # since `_check_writable` a disk is full, or a folder has gone
        raise PlanError(f"cannot write {path!r}: {error.strerror or error}") from error
    sys.stderr.write(f"wrote {path}\n")


def _check_writable(path: str) -> None:
    """Raise PlanError for a path that cannot be written, before minutes go into planning."""
    folder = os.path.dirname(os.path.realpath(path) if os.path.islink(path) else path) or "."
    exists = os.path.exists(path)
    # A file is replaced by another, unless it is a device.
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


def _compare(args: argparse.Namespace) -> int:
    planner = _planner(args)
    reports: dict[str, LoadBalanceReport | None] = dict.fromkeys(COMPARED)
    notes = []
    for solver in COMPARED:
        try:
            plan = planner(solver)
        except PlanError as error:
            note = str(error)
        else:
            reports[solver] = build_report(plan)
            ran = "" if plan.solver == solver else f"{plan.solver} ran"
            note = ": ".join(filter(None, (ran, plan.search.note)))
        if note:
            notes.append(f"{solver}: {note}")
    if not any(reports.values()):
        raise PlanError("no solver found a plan. " + note)
    bound = max(report.lower_bound_ms for report in reports.values() if report)
    rows = [
        {
            "model": args.model,
            "owners": plan.topology.world,
            "solver": solver,
            "makespan_ms": report and report.makespan_ms,
            "lower_bound_ms": bound,
            # To the best bound of all solvers.
            "gap": report and (report.makespan_ms / bound - 1 if bound else 0.0),
            "imbalance": report and report.imbalance,
            "status": report.plan.status if report else "no plan",
            "seconds": report and report.plan.search.seconds,
        }
        for solver, report in reports.items()
    ]
    summary = f"{len(plan.owners)} matrices, costs {plan.cost_source}"
    lines = [_header(args.model, plan), summary, _comparison(rows), *notes]
    show(lambda: "\n".join(lines), lambda: {"rows": rows}, args.json)
    return 0


def _comparison(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, with colours in a terminal."""
    numbers = {"makespan_ms": ".3f", "lower_bound_ms": ".3f", "gap": ".2%", "imbalance": ".2%"}
    numbers["seconds"] = ".2f"
    headings = [name.replace("_", " ") for name in ("solver", *numbers, "status")]
    table = grid(headings, ("solver", "status"))
    best = min(row["makespan_ms"] for row in rows if row["makespan_ms"] is not None)
    for row in rows:
        style, cells = "dim", ["-"] * len(numbers)
        if row["makespan_ms"] is not None:
            style = "bold green" if row["makespan_ms"] == best else ""
            cells = [format(row[name], how) for name, how in numbers.items()]
        table.add_row(row["solver"], *cells, row["status"], style=style)
    return printed(table, width=WIDTH, plain=False)


def _verify(args: argparse.Namespace) -> int:
    try:
        certificate = certify(OwnershipPlan.from_json(read_text(args.verify)))
    except OSError as error:
        raise PlanError(f"cannot read {args.verify!r}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"cannot verify {args.verify!r}: {error}") from error
    print(certificate)
    return 0 if certificate.ok and certificate.proven else 1


def _check_combination(args: argparse.Namespace) -> None:
    names = ("mesh", "solver", "json", "html", "save")
    given = [f"--{name}" for name in names if getattr(args, name) is not None]
    given += ["--compare"] * args.compare
    if args.verify is not None and given:
        raise PlanError(f"--verify takes a saved plan and nothing else: drop {', '.join(given)}")
    single = ", ".join(name for name in given if name in ("--solver", "--html", "--save"))
    if args.compare and single:
        raise PlanError(f"--compare makes several plans: drop it, or drop {single}")
    for path in (args.json, args.html, args.save):
        if path not in (None, "-"):
            _check_writable(path)


def run(args: argparse.Namespace) -> int:
    """Plan, compare or verify; 1 if a certificate does not hold."""
    _check_combination(args)
    if args.verify is not None:
        return _verify(args)
    return _compare(args) if args.compare else _plan(args)
