"""Planning: from a model, a mesh and prices to the plan that says who owns what.

::

    prices ─▶ problem ─▶ counts ─▶ owners ─▶ batches and groups ─▶ plan
              (search.py)          (placement.py)  (batching.py)   (ownership_plan.py)
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dmuon.config import PlannerOptions
from dmuon.scheduler.batches import Batch, PriceRow, SquareRow, is_gram
from dmuon.scheduler.batching import Batching
from dmuon.scheduler.costs import CostModel, SquareKey, square_key
from dmuon.scheduler.group_search import search_grouped
from dmuon.scheduler.grouping import PriceBook
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.memory import check_fixed_bytes
from dmuon.scheduler.ownership_plan import OwnershipPlan, check_plan_fits
from dmuon.scheduler.placement import layer_of, natural_key, place
from dmuon.scheduler.problem import Counts, Problem, build_problem
from dmuon.scheduler.search import SOLVERS
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = [
    "Batch",
    "OwnershipPlan",
    "PriceRow",
    "SquareRow",
    "bounding_problem",
    "check_plan_fits",
    "price_rows",
    "problem_of",
    "solve",
    "square_rows",
]


def _walking_order(specs: ModelSpecs) -> list[int]:
    """Matrices in natural order of their names: about launch order, whatever order they came in."""
    return sorted(range(len(specs.matrices)), key=lambda i: natural_key(specs.matrices[i].name))


def price_rows(specs: ModelSpecs, costs: CostModel, max_batch: int) -> tuple[PriceRow, ...]:
    """What every shape of the model costs in batches of 1, 2, ... up to ``max_batch``."""
    origin = getattr(costs, "origin", lambda key, batch: "given")
    kernel = getattr(costs, "kernel", lambda key, batch: "")
    rows = []
    for key, count in sorted(Counter(m.key for m in specs.matrices).items()):
        sizes = range(1, min(count, max_batch) + 1)
        kernels = tuple(kernel(key, b) for b in sizes)
        rows.append(
            PriceRow(
                key,
                tuple(float(costs.batch_ms(key, b)) for b in sizes),
                tuple(origin(key, b) for b in sizes),
                kernels if any(kernels) else (),
            )
        )
    return tuple(rows)


def square_rows(
    specs: ModelSpecs, costs: CostModel, max_batch: int, prices: Sequence[PriceRow]
) -> tuple[SquareRow, ...]:
    """What m x m parts cost for 1, 2, ... matrices, where shapes of one m share a Gram kernel.

    Up to ``max_batch`` matrices, or as far as ``costs`` knows; nothing where there is nothing to
    share.
    """
    square_ms = getattr(costs, "square_ms", lambda key, batch: None)
    count = Counter(m.key for m in specs.matrices)
    shapes: dict[SquareKey, list[PriceRow]] = defaultdict(list)
    for row in prices:
        shapes[square_key(row.key)].append(row)
    rows = []
    for key, sharing in sorted(shapes.items()):
        uses = Counter(k for row in sharing for k in set(row.kernels) if is_gram(k))
        if max(uses.values(), default=0) < 2:
            continue
        most = min(sum(count[row.key] for row in sharing), max_batch)
        ms: list[float] = []
        for size in range(1, most + 1):
            found = square_ms(sharing[0].key, size)
            if found is None:
                break
            ms.append(float(found))
        if len(ms) > 1:
            rows.append(SquareRow(key, tuple(ms)))
    return tuple(rows)


def problem_of(
    specs: ModelSpecs,
    topology: Topology,
    limits: OwnerLimits,
    prices: Sequence[PriceRow],
    layout: Layout = Layout.REPLICATED,
    squares: Sequence[SquareRow] = (),
    within: int | None = None,
) -> Problem:
    """The assignment problem that a plan answers.

    With ``squares`` the one that bounds it: its prices are those that no grouping gets below, in
    plans with a makespan of at most ``within`` ticks if that is given.
    """
    return build_problem(
        specs.matrices,
        topology.world,
        limits,
        {row.key: row.ms for row in prices},
        layout,
        {row.key: row.kernels for row in prices},
        {row.key: row.ms for row in squares},
        within,
    )


def bounding_problem(plan: OwnershipPlan) -> Problem:
    """The problem whose optimum no plan within the makespan that its proof speaks of gets below."""
    within = None if plan.proof is None else plan.proof.within
    return problem_of(
        plan.specs, plan.topology, plan.limits, plan.prices, plan.layout, plan.squares, within
    )


def solve(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostModel,
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
    squares = square_rows(specs, costs, options.max_batch, rows)
    check_fixed_bytes(limits, topology.world, layout)

    def lowered_within(ticks: int | None) -> Problem:
        return problem_of(specs, topology, limits, rows, layout, squares, ticks)

    whole = problem_of(specs, topology, limits, rows, layout)
    lowered = lowered_within(None) if squares else whole
    batching = Batching(whole, lowered, PriceBook.of(rows, squares, whole.ticks_per_ms))
    order = _walking_order(specs)
    found = search_grouped(batching, lowered_within, order, solver, options)
    owners = _placed(specs, topology, batching, found.counts, order)
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=batching.batches(owners, order),
        layout=layout,
        solver=found.solver,
        status=found.status,
        cost_source=costs.source,
        lower_bound_ms=whole.ms(found.bound),
        alternatives=tuple((n, whole.ms(batching.makespan(c))) for n, c in found.alternatives),
        limits=limits,
        prices=rows,
        proof=found.proof,
        engine=found.engine,
        note=found.note,
        hit_time_limit=found.hit_time_limit,
        squares=squares,
    )
    return replace(plan, seconds=time.perf_counter() - begin)


def _placed(
    specs: ModelSpecs, topology: Topology, batching: Batching, counts: Counts, order: Sequence[int]
) -> list[int]:
    """The owner of each matrix: counts made concrete, with consecutive matrices apart."""
    problem = batching.whole
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
        batching.interchangeable(),
        topology.owner_order(),
        topology,
    )
    for i, owner in zip(free, placed, strict=True):
        owners[i] = owner
    return owners
