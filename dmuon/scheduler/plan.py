"""Planning: from a model, a mesh and prices to the plan that says who owns what.

::

    prices ─▶ problem ─▶ counts ─▶ owners ─▶ batches ─▶ plan
              (search.py)          (placement.py)       (ownership_plan.py)
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dmuon.config import PlannerOptions
from dmuon.scheduler.batches import Batch, PriceRow
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.memory import check_fixed_bytes
from dmuon.scheduler.ownership_plan import OwnershipPlan, check_plan_fits
from dmuon.scheduler.placement import layer_of, natural_key, place
from dmuon.scheduler.problem import Counts, Problem, build_problem
from dmuon.scheduler.search import SOLVERS, search
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = [
    "Batch",
    "OwnershipPlan",
    "PriceRow",
    "check_plan_fits",
    "price_rows",
    "problem_of",
    "solve",
]


def _walking_order(specs: ModelSpecs) -> list[int]:
    """Matrices in natural order of their names: about launch order, whatever order they came in."""
    return sorted(range(len(specs.matrices)), key=lambda i: natural_key(specs.matrices[i].name))


def price_rows(specs: ModelSpecs, costs: CostTable, max_batch: int) -> tuple[PriceRow, ...]:
    """What every shape of the model costs in batches of 1, 2, ... up to ``max_batch``."""
    rows = []
    for key, count in sorted(Counter(m.key for m in specs.matrices).items()):
        sizes = range(1, min(count, max_batch) + 1)
        kernels = tuple(costs.kernel(key, b) for b in sizes)
        rows.append(
            PriceRow(
                key,
                tuple(float(costs.batch_ms(key, b)) for b in sizes),
                tuple(costs.origin(key, b) for b in sizes),
                kernels if any(kernels) else (),
            )
        )
    return tuple(rows)


def problem_of(
    specs: ModelSpecs,
    topology: Topology,
    limits: OwnerLimits,
    prices: Sequence[PriceRow],
    layout: Layout = Layout.REPLICATED,
) -> Problem:
    """The assignment problem that a plan answers."""
    return build_problem(
        specs.matrices, topology.world, limits, {row.key: row.ms for row in prices}, layout
    )


def solve(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostTable,
    *,
    layout: Layout = Layout.REPLICATED,
    solver: str = "auto",
    options: PlannerOptions | None = None,
    limits: OwnerLimits | None = None,
) -> OwnershipPlan:
    """Assign every matrix to an owner, balancing predicted time.

    Pure; equal input gives an equal plan, in whatever order the matrices come. A matrix that one
    rank alone may own goes there, whatever the solver; it counts in that rank's load and bytes.

    Raises:
        PlanError: unknown solver, a shape without a cost, or a memory cap that no plan fits.
    """
    options = options or PlannerOptions()
    if solver not in SOLVERS:
        raise PlanError(f"solver={solver!r} is unknown: choose from {SOLVERS}")
    begin = time.perf_counter()
    limits = limits or OwnerLimits(memory_bytes=options.owner_memory_bytes)
    rows = price_rows(specs, costs, options.max_batch)
    check_fixed_bytes(limits, topology.world, layout)
    problem = problem_of(specs, topology, limits, rows, layout)
    order = _walking_order(specs)
    found = search(problem, order, solver, options)
    owners = _placed(specs, topology, problem, found.counts, order)
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=_batches(problem, rows, owners, order),
        layout=layout,
        solver=found.solver,
        status=found.status,
        cost_source=costs.source,
        lower_bound_ms=problem.ms(found.bound),
        alternatives=tuple((n, problem.ms(problem.makespan(c))) for n, c in found.alternatives),
        limits=limits,
        prices=rows,
        proof=found.proof,
        engine=found.engine,
        note=found.note,
        hit_time_limit=found.hit_time_limit,
    )
    return replace(plan, seconds=time.perf_counter() - begin)


def _placed(
    specs: ModelSpecs, topology: Topology, problem: Problem, counts: Counts, order: Sequence[int]
) -> list[int]:
    """The owner of each matrix: counts made concrete, with consecutive matrices apart."""
    owners = [0] * len(order)
    for group in problem.forced:
        for i in group.members:
            owners[i] = group.rank
    kind_of = {i: s for s, members in enumerate(problem.members) for i in members}
    free = [i for i in order if i in kind_of]
    placed = place(
        [kind_of[i] for i in free],
        [layer_of(specs.matrices[i].name) for i in free],
        [{s: int(k) for s, k in enumerate(row) if k} for row in counts],
        [c.ranks for c in problem.classes],
        topology.owner_order(),
        topology,
    )
    for i, owner in zip(free, placed, strict=True):
        owners[i] = owner
    return owners


def _batches(
    problem: Problem, prices: Sequence[PriceRow], owners: Sequence[int], order: Sequence[int]
) -> tuple[Batch, ...]:
    """Every owner's matrices cut into the cheapest batches, earliest layers first."""
    position = {i: at for at, i in enumerate(order)}
    rows = {row.key: row for row in prices}
    groups = [*zip(problem.kinds, problem.members, strict=True)]
    groups += [(group.kind, group.members) for group in problem.forced]
    made: list[Batch] = []
    for kind, members in groups:
        held: dict[int, list[int]] = defaultdict(list)
        for i in sorted(members, key=position.__getitem__):
            held[owners[i]].append(i)
        for owner, mine in held.items():
            start = 0
            for size in kind.batches(len(mine)):
                ms = problem.ms(kind.batch_ticks[size - 1])
                kernel = rows[kind.key].kernel(size)
                made.append(Batch(owner, tuple(mine[start : start + size]), ms, kernel))
                start += size
    return tuple(sorted(made, key=lambda b: (position[b.matrices[0]], b.owner)))
