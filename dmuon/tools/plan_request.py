"""What the ``plan`` command is asked: its options, and the request that they make."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dmuon.catalogue.presets import PRESETS, model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import CostTable, resolve_costs
from dmuon.scheduler.plan import OwnershipPlan, solve
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs
from dmuon.scheduler.topology import MAX_RANKS, Topology
from dmuon.types import PlanError

__all__ = ["COMPARED", "Request", "add_plan_arguments", "read_request"]

COMPARED = ("round_robin", "greedy", "milp")
_AXES = {1: ("dp",), 2: ("node", "gpu"), 3: ("group", "node", "gpu")}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}

# ---- arguments ---------------------------------------------------------------------------


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. Texts are read by `run`, whose errors are one line."""
    _add_model_arguments(parser)
    _add_mesh_arguments(parser)
    _add_solver_arguments(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="PATH", help="write the numbers there; - for standard output alone")
    add("--html", metavar="PATH", help="write the report as a web page")
    add("--save", metavar="PATH", help="write the plan, for --verify and dedicate_params(plan=)")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to plan for")
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        help="a preset, the path of a Hugging Face config.json, or module:function that returns "
        f"a model. Presets: {', '.join(PRESETS)}",
    )
    what.add_argument(
        "--verify", metavar="PLAN.json", help="only check the certificate of a saved plan"
    )
    group.add_argument("--dtype", help=f"dtype of the parameters: {', '.join(ITEM_SIZE)}")
    group.add_argument(
        "--splits",
        action="append",
        default=[],
        metavar="PATTERN=R,R",
        help="rows of the matrices that a fused parameter holds; may be repeated",
    )
    group.add_argument(
        "--heads",
        action="append",
        default=[],
        metavar="PATTERN=N",
        help="number of equal pieces of a parameter's rows; may be repeated",
    )


def _add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("owners").add_argument
    add("--mesh", metavar="NxG", help="nodes x GPUs, such as 4x8; also 64 or 2x4x8")
    add("--axes", metavar="A,B", help="names of the mesh's axes (default: node,gpu)")
    add("--ranks-per-node", type=int, metavar="N", help="default: the mesh's last size")
    add("--memory", metavar="SIZE", help="most optimizer state on one owner, such as 80GiB")


def _add_solver_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = PlannerOptions()
    add = parser.add_argument_group("planning").add_argument
    add(
        "--costs",
        default="analytic:h200",
        help="analytic:h200, analytic:a100, ... or the path of a cost table (default: %(default)s)",
    )
    add("--solver", help="auto, milp, greedy or round_robin (default: auto)")
    add("--compare", action="store_true", help=f"run {', '.join(COMPARED)} side by side")
    add(
        "--time-limit",
        type=float,
        default=defaults.time_limit_s,
        metavar="SECONDS",
        help="bound on the solver (default: %(default)g)",
    )
    add(
        "--max-batch",
        type=int,
        default=defaults.max_batch,
        metavar="B",
        help="most matrices in one batch (default: %(default)s)",
    )


def mesh_shape(text: str) -> tuple[int, ...]:
    """
    >>> mesh_shape("4x8")
    (4, 8)
    """
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,7}", text.strip(), re.IGNORECASE):
        raise PlanError(
            f"--mesh {text!r} is no mesh: give sizes with an x between them, such as 4x8"
        )
    shape = tuple(int(size) for size in text.lower().split("x"))
    world = math.prod(shape)
    if not 1 <= world <= MAX_RANKS:
        raise PlanError(f"--mesh {text} has {world:,} ranks, expected 1 to {MAX_RANKS:,}")
    return shape


def memory_bytes(text: str) -> int:
    """
    >>> memory_bytes("80GiB")
    85899345920
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?I?B|)", text.strip().upper())
    if match is None or match[2] not in _BYTES:
        raise PlanError(f"--memory {text!r} is no size: give bytes, or 80GiB, 512MiB, 2GB")
    return int(float(match[1]) * _BYTES[match[2]])


def _pattern(option: str, text: str) -> tuple[str, list[int]]:
    pattern, _, values = text.rpartition("=")
    if not pattern or not re.fullmatch(r"[0-9]+(,[0-9]+)*", values):
        raise PlanError(f"{option} {text!r} is not of the form PATTERN=NUMBER[,NUMBER...]")
    return pattern, [int(value) for value in values.split(",")]


def _splits(texts: Sequence[str]) -> dict[str, list[int]]:
    return dict(_pattern("--splits", text) for text in texts)


def _heads(texts: Sequence[str]) -> dict[str, int]:
    found = [_pattern("--heads", text) for text in texts]
    for pattern, counts in found:
        if len(counts) != 1:
            raise PlanError(f"--heads {pattern!r} takes one number, found {counts}")
    return {pattern: count for pattern, (count,) in found}


Made = TypeVar("Made")


def _checked(make: Callable[[], Made]) -> Made:
    """What ``make`` returns; the ValueError of a bad argument as an error for the user."""
    try:
        return make()
    except ValueError as error:
        raise PlanError(str(error)) from error


def _topology(args: argparse.Namespace) -> Topology:
    if args.mesh is None:
        raise PlanError("--model needs --mesh, such as --mesh 4x8")
    shape = mesh_shape(args.mesh)
    axes = _AXES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape)))
    if args.axes is not None:
        axes = tuple(name.strip() for name in args.axes.split(","))
    ranks_per_node = shape[-1] if args.ranks_per_node is None else args.ranks_per_node
    device_type = "cpu" if args.costs == "analytic:cpu" else "cuda"
    return _checked(lambda: Topology(shape, axes, ranks_per_node, device_type))


# ---- the request -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that planning needs, read from the command line."""

    model: str
    specs: ModelSpecs
    topology: Topology
    costs: CostTable
    options: PlannerOptions

    def solve(self, solver: str) -> OwnershipPlan:
        return solve(self.specs, self.topology, self.costs, solver=solver, options=self.options)


def read_request(args: argparse.Namespace) -> Request:
    topology = _topology(args)
    options = _checked(
        lambda: PlannerOptions(
            time_limit_s=args.time_limit,
            owner_memory_bytes=None if args.memory is None else memory_bytes(args.memory),
            max_batch=args.max_batch,
            ranks_per_node=topology.ranks_per_node,
        )
    )
    costs = resolve_costs(args.costs, topology.device_type)
    specs = model_specs(
        args.model, args.dtype, splits=_splits(args.splits), heads=_heads(args.heads)
    )
    return Request(args.model, specs, topology, costs, options)
