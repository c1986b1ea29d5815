"""The ``plan`` command: who would own which matrix, without the model and without the machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon.catalogue.presets import PRESETS
from dmuon.report.data import LoadBalanceReport, build_report
from dmuon.scheduler.json_files import read_text
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.tools.plan_request import COMPARED, Request, add_plan_arguments, read_request
from dmuon.types import DmuonError, PlanError

__all__ = ["add_plan_arguments", "run"]

WIDTH = 100  # columns of what is printed to anything but a terminal

# ---- one plan ----------------------------------------------------------------------------


def _header(request: Request) -> str:
    topology, specs = request.topology, request.specs
    everything = specs.parameters + specs.frozen
    dtypes = sorted({p.dtype for p in everything})
    mesh = " x ".join(str(size) for size in topology.shape)
    nodes = f"{topology.nodes} node{'s' * (topology.nodes != 1)}"
    lines = [
        f"{request.model}: {_count(sum(p.numel for p in everything))} parameters "
        f"({', '.join(dtypes)}), mesh {mesh} ({', '.join(topology.axes)}) on {nodes}"
    ]
    preset = PRESETS.get(request.model.lower())
    if preset is not None:
        lines.append(f"shapes: {preset.source}")
    return "\n".join(lines)


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
    request = read_request(args)
    plan = request.solve(args.solver or "auto")
    report = build_report(plan)
    if args.json == "-":
        _out(_json(report.to_dict()))
    else:
        _out(f"{_header(request)}\n\n{report}")
        _save(args.json, lambda: _json(report.to_dict()))
    _save(args.save, plan.to_json)
    _save_html(args.html, report)
    return 0


def _save(path: str | None, text: Callable[[], str]) -> None:
    if path is not None:
        _written(path, lambda: Path(path).write_text(text() + "\n", encoding="utf-8"))


def _save_html(path: str | None, report: LoadBalanceReport) -> None:
    if path is not None:
        _written(path, lambda: report.to_html(path))


def _written(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        # What the operating system raises says why, what we raise ourselves says all.
        known = f"cannot write {path!r}: {error.strerror}" if error.strerror else str(error)
        raise PlanError(known) from error
    sys.stderr.write(f"wrote {path}\n")


# ---- several solvers ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """What one solver reached; ``plan`` None and ``note`` the reason where it found no plan."""

    solver: str
    plan: OwnershipPlan | None
    note: str


def _row(request: Request, solver: str) -> _Row:
    try:
        plan = request.solve(solver)
    except PlanError as error:
        return _Row(solver, None, str(error))
    ran = "" if plan.solver == solver else f"{plan.solver} ran"
    return _Row(solver, plan, ": ".join(text for text in (ran, plan.note) if text))


def _row_numbers(row: _Row, request: Request, bound: float) -> dict[str, Any]:
    """One row with the keys of the benchmarks; the gap is to the best bound of all solvers."""
    numbers: dict[str, Any] = {
        "model": request.model,
        "owners": request.topology.world,
        "solver": row.solver,
        "makespan_ms": None,
        "lower_bound_ms": bound,
        "gap": None,
        "imbalance": None,
        "status": "no plan",
        "seconds": None,
    }
    if row.plan is not None:
        report = build_report(row.plan)
        numbers |= {
            "makespan_ms": report.makespan_ms,
            "gap": report.makespan_ms / bound - 1 if bound else 0.0,
            "imbalance": report.imbalance,
            "status": row.plan.status,
            "seconds": row.plan.seconds,
        }
    return numbers


def _compare(args: argparse.Namespace) -> int:
    request = read_request(args)
    rows = [_row(request, solver) for solver in COMPARED]
    bounds = [row.plan.lower_bound_ms for row in rows if row.plan is not None]
    if not bounds:
        raise PlanError("no solver found a plan. " + rows[-1].note)
    numbers = [_row_numbers(row, request, max(bounds)) for row in rows]
    if args.json == "-":
        _out(_json({"rows": numbers}))
        return 0
    notes = [f"{row.solver}: {row.note}" for row in rows if row.note]
    summary = f"{len(request.specs.matrices)} matrices, costs {request.costs.source}"
    _out("\n".join([_header(request), summary, _rendered(_comparison(numbers)), *notes]))
    _save(args.json, lambda: _json({"rows": numbers}))
    return 0


def _comparison(rows: Sequence[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("solver", "status")
    headings = ("makespan ms", "lower bound ms", "gap", "imbalance", "seconds")
    for heading in (left[0], *headings, left[1]):
        table.add_column(heading, justify="left" if heading in left else "right")
    best = min(row["makespan_ms"] for row in rows if row["makespan_ms"] is not None)
    for row in rows:
        if row["makespan_ms"] is None:
            table.add_row(row["solver"], *["-"] * len(headings), row["status"], style="dim")
            continue
        table.add_row(
            row["solver"],
            f"{row['makespan_ms']:.3f}",
            f"{row['lower_bound_ms']:.3f}",
            f"{row['gap']:.2%}",
            f"{row['imbalance']:.2%}",
            f"{row['seconds']:.2f}",
            row["status"],
            style="bold green" if row["makespan_ms"] == best else None,
        )
    return table


# ---- a saved plan ------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from dmuon.scheduler.certificate import certify

    try:
        certificate = certify(OwnershipPlan.from_json(read_text(args.verify)))
    except OSError as error:
        raise PlanError(f"cannot read {args.verify!r}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"cannot verify {args.verify!r}: {error}") from error
    _out(str(certificate))
    return 0 if certificate.ok else 1


# ---- the command -------------------------------------------------------------------------


def _json(data: object) -> str:
    return json.dumps(data, indent=1)


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")


def _rendered(table: Any) -> str:
    """A table as text, with colours where standard output is a terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _check_combination(args: argparse.Namespace) -> None:
    given = {
        f"--{name}": getattr(args, name) is not None
        for name in ("mesh", "solver", "json", "html", "save")
    } | {"--compare": args.compare}
    alone = [name for name, there in given.items() if there]
    if args.verify is not None and alone:
        raise PlanError(f"--verify takes a saved plan and nothing else: drop {', '.join(alone)}")
    if args.compare:
        single = [name for name in ("--solver", "--html", "--save") if given[name]]
        if single:
            raise PlanError(f"--compare makes several plans: drop it, or drop {', '.join(single)}")


# What the library calls its arguments, and the flags of the commands.
_FLAGS = (
    ("PlannerOptions(owner_memory_bytes=...)", "--memory"),
    ("PlannerOptions.max_batch", "--max-batch"),
    ("PlannerOptions.time_limit_s", "--time-limit"),
    ("PlannerOptions.profile_budget_s", "--budget"),
    ("PlannerOptions.ranks_per_node", "--ranks-per-node"),
    ("owner_memory_bytes=", "--memory "),
    ("owner_memory_bytes", "--memory"),
    ("solver='round_robin'", "round robin"),
    ("solver='auto'", "--solver auto"),
)


def in_terms_of_flags(message: str) -> str:
    """An error of the library as someone at a terminal would say it."""
    for argument, flag in _FLAGS:
        message = message.replace(argument, flag)
    return message


def run(args: argparse.Namespace) -> int:
    """Plan, compare or verify; 1 if a certificate does not hold, 2 for a mistake of the user.

    A file that cannot be read, or not be a plan, is a mistake too.
    """
    try:
        _check_combination(args)
        if args.verify is not None:
            return _verify(args)
        return _compare(args) if args.compare else _plan(args)
    except DmuonError as error:
        message = in_terms_of_flags(" ".join(str(error).split()))
        sys.stderr.write(f"python -m dmuon plan: error: {message}\n")
        return 2
