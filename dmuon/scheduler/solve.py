"""Planning: from a model, a mesh and prices to the plan that says who owns what.

::

    prices ─▶ problem ─▶ counts ─▶ owners ─▶ batches ─▶ plan
                                  (placement)

Counts come from the greedy solver; if that is not proven optimal, from the covering search
(`exhaustive`); if that leaves something open, from column generation (`columns`), and from the
covering search again, with the prices that it found. Whatever a solver says is checked here by our
own arithmetic: counts must be feasible and better than those known, and a bound counts only if
`bound` or `exhaustive` computes it again. Work limits come first, the wall clock is the last one.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dmuon.config import PlannerOptions
from dmuon.scheduler.bound import bound_of, simple_bound
from dmuon.scheduler.columns import Columns, fits_columns
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.exhaustive import cover
from dmuon.scheduler.greedy import greedy, improve, longest_first, round_robin
from dmuon.scheduler.master import Budget, EngineError, available_engines
from dmuon.scheduler.placement import layer_of, natural_key, place
from dmuon.scheduler.plan import Batch, Claim, OwnershipPlan, PriceRow, Proof
from dmuon.scheduler.problem import UNLIMITED, Counts, Kind, Problem, build_problem
from dmuon.scheduler.shards import OwnerLimits
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = ["SOLVERS", "alternatives_of", "launch_order", "price_rows", "problem_of", "solve"]

SOLVERS = ("auto", "milp", "greedy", "round_robin")

_LOOKS = 14  # limits tried between the bound and the best counts known
_NEAR = 20_000  # parts of the makespan: closer limits are not told apart
_QUICK_STATES = 300
_FIRST_WORK = 1_500_000
_LAST_WORK = 20_000_000


@dataclass(frozen=True)
class Found:
    """Counts, and what is known about them; times in ticks.

    ``alternatives`` are the counts of simpler solvers.
    """

    counts: Counts
    solver: str
    bound: int
    alternatives: tuple[tuple[str, Counts], ...]
    proof: Proof
    engine: str = ""
    note: str = ""
    hit_time_limit: bool = False


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
    budget = Budget(options.time_limit_s)
    limits = limits or OwnerLimits(memory_bytes=options.owner_memory_bytes)
    rows = price_rows(specs, costs, options.max_batch)
    _check_fixed_bytes(limits, topology.world, layout)
    problem = problem_of(specs, topology, limits, rows, layout)
    order = launch_order(specs)
    found = _search(problem, order, solver, budget)
    owners = _placed(specs, topology, problem, found.counts, order)
    makespan = problem.makespan(found.counts)
    status = "optimal" if found.bound >= makespan else "feasible"
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=_batches(problem, rows, owners, order),
        layout=layout,
        solver=found.solver,
        status="time_limit" if status == "feasible" and found.hit_time_limit else status,
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
    claim = Claim(plan.makespan_ms, plan.fingerprint())
    return replace(plan, seconds=time.perf_counter() - begin, claim=claim)


def launch_order(specs: ModelSpecs) -> list[int]:
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


# ---- counts ------------------------------------------------------------------------------


def alternatives_of(
    problem: Problem, order: Sequence[int], names: Collection[str]
) -> dict[str, int]:
    """The makespan in ticks of each of these simpler solvers that finds a plan."""
    found = {}
    turns = _turns(problem, order)
    if turns is not None:
        found["round_robin"] = problem.makespan(turns)
    if "greedy" in names:
        with suppress(PlanError):  # nothing fits
            counts = _greedy(problem, _starts(problem, turns), Budget(math.inf))
            found["greedy"] = problem.makespan(counts)
    return found


def _turns(problem: Problem, order: Sequence[int]) -> Counts | None:
    """Round robin, if it fits; ``order`` lists the matrices."""
    turns = round_robin(problem, order)
    # A rank that owns nothing may be over the cap.
    return turns if turns is not None and problem.is_feasible(turns) else None


def _starts(problem: Problem, turns: Counts | None) -> list[Counts]:
    return [c for c in (longest_first(problem), turns) if c is not None]


def _search(problem: Problem, order: Sequence[int], solver: str, budget: Budget) -> Found:
    """Counts by the solver asked for.

    Raises:
        PlanError: no assignment fits the memory cap; states the smallest cap that is known to.
    """
    turns = _turns(problem, order)
    if solver == "round_robin":
        if turns is None:
            raise PlanError(
                "solver='round_robin' finds no plan inside owner_memory_bytes: use solver='auto'"
            )
        bound, dual = simple_bound(problem, problem.makespan(turns))
        return Found(turns, "round_robin", bound, (), Proof(dual))
    counts = _greedy(problem, _starts(problem, turns), budget)
    alternatives = [("greedy", counts)] + ([] if turns is None else [("round_robin", turns)])
    bound, dual = simple_bound(problem, problem.makespan(counts))
    plain = Found(counts, "greedy", bound, tuple(alternatives), Proof(dual))
    if solver == "greedy" or (solver == "auto" and bound >= problem.makespan(counts)):
        return replace(plain, hit_time_limit=budget.hit)
    return _improved(problem, plain, budget)


def _greedy(problem: Problem, starts: list[Counts], budget: Budget) -> Counts:
    counts = greedy(problem, starts, budget.spent)
    if counts is None:
        tight, nbytes, bound = _least_memory(problem, budget)
        if not problem.is_feasible(tight):
            raise _too_little_memory(problem, nbytes, bound)
        counts = greedy(problem, [tight], budget.spent)
    assert counts is not None
    return counts


def _improved(problem: Problem, plain: Found, budget: Budget) -> Found:
    """The covering search, column generation, and the covering search again."""
    best = _settled(problem, plain, _FIRST_WORK, budget)
    notes: list[str] = []
    engine = ""
    if best.bound < problem.makespan(best.counts) and fits_columns(problem):
        engines = available_engines()
        if not engines:
            notes.append("no MILP solver is installed (pip install 'pulp[highs]')")
        for name in engines:
            columns = Columns(problem, name, budget, best.counts, best.bound, best.proof.dual)
            try:
                columns.climb()
                columns.round()
                engine = name
            except EngineError as error:
                notes.append(str(error))
            raised = columns.bound > best.bound
            proof = Proof(columns.dual) if raised else best.proof
            best = replace(best, counts=columns.counts, bound=columns.bound, proof=proof)
            if engine:
                break
        if best.bound < problem.makespan(best.counts):
            best = _settled(problem, best, _LAST_WORK, budget)
    makespan = problem.makespan(best.counts)
    if best.proof.impossible < 0:
        # What a certificate will find: merged points depend on how far the knapsacks reach.
        best = replace(best, bound=bound_of(problem, best.proof.dual, makespan))
    better = makespan < problem.makespan(plain.counts) or best.bound > plain.bound
    if not engine and not better:
        notes.append("this is the greedy plan")
    return replace(
        best,
        solver="milp" if engine else "search" if better else "greedy",
        engine=engine,
        note="; ".join(notes),
        hit_time_limit=budget.hit,
    )


def _settled(problem: Problem, found: Found, work: int, budget: Budget) -> Found:
    """Counts and bound brought closer by covering searches; ``work`` bounds each of them."""
    counts, makespan, dual = found.counts, problem.makespan(found.counts), found.proof.dual
    bound, impossible = found.bound, found.proof.impossible
    low = bound  # nothing below it was found, or can be
    for _ in range(_LOOKS):
        if makespan - low <= makespan // _NEAR or budget.spent():
            break
        limit = (low + makespan) // 2
        tried = cover(problem, limit, dual, work // 10, _QUICK_STATES)
        if tried.counts is not None:
            counts = improve(problem, tried.counts, budget.spent)
            makespan = problem.makespan(counts)
        else:
            low = limit + 1
            if tried.complete:
                bound, impossible = low, limit
    while bound < makespan and not budget.spent():
        tried = cover(problem, makespan - 1, dual, work)
        if tried.counts is None:
            if tried.complete:
                bound, impossible = makespan, makespan - 1
            break
        counts = improve(problem, tried.counts, budget.spent)
        makespan = problem.makespan(counts)
    if impossible == found.proof.impossible:
        return replace(found, counts=counts)
    return replace(found, counts=counts, bound=bound, proof=Proof(dual, impossible))


# ---- memory ------------------------------------------------------------------------------


def _least_memory(problem: Problem, budget: Budget) -> tuple[Counts, int, int]:
    """How to store everything so that the fullest rank stores least, whatever the time.

    Counts, the bytes of the fullest rank, and what no counts get below: the same assignment
    problem, with bytes for ticks.
    """
    cap = problem.memory_cap
    assert cap is not None
    kinds = tuple(
        Kind(kind.key, kind.pool, kind.count, kind.nbytes, (max(kind.nbytes, 1),))
        for kind in problem.kinds
    )
    classes = tuple(replace(c, fixed=cap - c.room, room=UNLIMITED) for c in problem.classes)
    in_bytes = replace(problem, kinds=kinds, classes=classes)
    counts = greedy(in_bytes, [], budget.spent)
    assert counts is not None  # nothing is capped
    bound, dual = simple_bound(in_bytes, in_bytes.makespan(counts))
    found = Found(counts, "greedy", bound, (), Proof(dual))
    if bound < in_bytes.makespan(counts):
        found = _improved(in_bytes, found, budget)
    return found.counts, in_bytes.makespan(found.counts), found.bound


def _too_little_memory(problem: Problem, nbytes: int, bound: int) -> PlanError:
    """The error for a cap that nothing fits."""
    matrices = int(problem.demand.sum()) + sum(group.kind.count for group in problem.forced)
    known = (
        f"the smallest feasible cap is {nbytes} bytes{_mebibytes(nbytes)}"
        if bound >= nbytes
        else f"a cap of {nbytes} bytes is feasible, and none below {bound} is"
    )
    return PlanError(
        f"owner_memory_bytes={problem.memory_cap} is too small for the optimizer state of "
        f"{matrices} matrices on {problem.world} ranks: {known}. Raise "
        "PlannerOptions(owner_memory_bytes=...), or use more ranks"
    )


def _check_fixed_bytes(limits: OwnerLimits, world: int, layout: Layout) -> None:
    """Raise PlanError if, in the sharded layout, a rank stores more than the cap.

    There the momentum lies with the shards, so that no ownership changes what a rank stores.
    """
    cap = limits.memory_bytes
    if layout is not Layout.SHARDED or cap is None:
        return
    nbytes, rank = max((limits.fixed_bytes_of(r), -r) for r in range(world))
    if nbytes > cap:
        raise PlanError(
            f"owner_memory_bytes={cap} is too small: rank {-rank} stores {nbytes} bytes"
            f"{_mebibytes(nbytes)} of optimizer state. In the sharded layout that state lies with "
            "the parameters' shards, so no other ownership meets the cap: use more ranks or a "
            "lower-precision state, or raise PlannerOptions(owner_memory_bytes=...)"
        )


def _mebibytes(nbytes: int) -> str:
    return f" ({nbytes / 2**20:.1f} MiB)" if nbytes >= 2**20 else ""


# ---- owners and batches ------------------------------------------------------------------


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
