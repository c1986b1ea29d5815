"""Planning: prices -> problem -> counts -> owners (placement) -> batches -> plan.

Counts come from one of `SOLVERS`. "auto" begins with the greedy solver; until a plan is proven
optimal, it looks for better counts, and for proofs that there are none, with `patterns`. Counts are
taken only if they are feasible and better than the known ones, and bounds are computed in integers
here, whatever a solver says. Work limits come first, the wall clock last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import BATCH_NUMEL, CostTable, largest_batch
from dmuon.scheduler.patterns import (
    WORTH,
    EngineError,
    counts_of,
    every_pattern,
    exhaust,
    has_engine,
    is_short,
    leaves_out,
    most_worth,
    near_patterns,
    shared_out,
    simple_bound,
)
from dmuon.scheduler.plan import Batch, OwnershipPlan, PriceRow, Search, Way
from dmuon.scheduler.problem import (
    UNLIMITED,
    Counts,
    Problem,
    baselines,
    build_problem,
    greedy,
    improve,
)
from dmuon.scheduler.specs import ModelSpecs, OwnerLimits, StateSizes
from dmuon.scheduler.topology import Topology, layer_of, natural_key, place
from dmuon.types import Layout, PlanError, grouped

_ATTEMPTS = 16  # to find better counts, and as many to raise the bound
_CLOSE = 1e-5  # of the makespan: smaller gaps are not halved any more
_MOST_SHAPES = 200  # more shapes make linear programs too slow for their gain
_MOST_CLASSES = 12


class Budget:
    """The wall clock, asked only after the work limits; ``hit`` once it has cut a search short."""

    def __init__(self, seconds: float) -> None:
        self._end, self.hit = time.perf_counter() + seconds, False

    def left_s(self) -> float:
        return max(self._end - time.perf_counter(), 0.0)

    def spent(self) -> bool:
        self.hit = self.hit or self.left_s() <= 0
        return self.hit


@dataclass(frozen=True)
class Found:
    """Counts, their makespan and its bound in ticks. With ``values``, `patterns.refuted` shows that
    ``bound - 1`` is out of reach."""

    counts: Counts
    solver: str
    makespan: int
    bound: int
    values: tuple[int, ...] = ()
    engine: str = ""
    note: str = ""


def solve(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostTable,
    *,
    layout: Layout = Layout.REDUCED,
    solver: str = "auto",
    options: PlannerOptions = PlannerOptions(),  # noqa: B008  frozen
    limits: OwnerLimits | None = None,
    batch_numel: int = BATCH_NUMEL,
    way: Way = Way(),  # noqa: B008  frozen
) -> OwnershipPlan:
    """Assign every matrix to an owner, balancing predicted time; ``way`` says which matrices each
    part of the mesh computes by itself, and how buckets are cut.

    The function is pure; equal input gives an equal plan, whatever the order of the matrices.
    Without ``limits`` any rank may own any matrix, and stores as much as `StateSizes.limits` says.
    ``batch_numel``: the most elements of a batch of several matrices.

    Raises:
        PlanError: the solver is unknown, a shape has no cost, or no plan fits the memory cap.
    """
    if solver not in SOLVERS:
        raise PlanError(f"solver={solver!r} is unknown: choose from {tuple(SOLVERS)}")
    begin = time.perf_counter()
    budget = Budget(options.time_limit_s)
    if limits is None:
        sizes = StateSizes.plain(specs)
        limits = sizes.limits(specs, layout, topology.world, options.owner_memory_bytes)
    rows = price_rows(specs, costs, options.max_batch, batch_numel)
    _check_fixed_bytes(limits, topology.world, layout)
    prices = {row.key: row.ms for row in rows}
    problem = build_problem(specs.matrices, topology.world, limits, prices, layout)
    # About launch order: matrices in natural order of their names, however given.
    names = [natural_key(matrix.name) for matrix in specs.matrices]
    order = sorted(range(len(names)), key=names.__getitem__)
    simple = baselines(problem, order, spent=budget.spent)
    # A search that the clock cut short is not reported for comparison.
    known = [name for name in simple if name != "greedy" or not budget.hit]
    alternatives = tuple((n, problem.ms(problem.makespan(simple[n]))) for n in known)
    found = SOLVERS[solver](problem, simple, budget)
    owners = _owners(specs, topology, problem, found.counts, order)
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=_batches(problem, owners, order, rows),
        layout=layout,
        cost_source=costs.source,
        limits=limits,
        prices=rows,
        **_outcome(problem, found, budget, alternatives),
    )
    if way.redundant:
        plan = _with_copies(plan, problem, way, order, solver, budget)
    if way.by_shape:  # the largest first; else in launch order
        size = {row.key: -row.ms[0] for row in rows}
        key = [size[m.key] for m in specs.matrices]
        plan = replace(plan, batches=tuple(sorted(plan.batches, key=lambda b: key[b.matrices[0]])))
    search = replace(plan.search, seconds=time.perf_counter() - begin, hit_time_limit=budget.hit)
    return replace(plan, bucket_bytes=way.bucket_bytes, rings=way.rings, search=search)


def _outcome(
    problem: Problem, found: Found, budget: Budget, alternatives: tuple[tuple[str, float], ...]
) -> dict[str, Any]:
    """Return the fields of a plan that describe the solution and the search."""
    is_optimal = found.bound >= found.makespan
    return {
        "solver": found.solver,
        "status": "optimal" if is_optimal else "time_limit" if budget.hit else "feasible",
        "lower_bound_ms": problem.ms(found.bound),
        "search": Search(alternatives, engine=found.engine, note=found.note),
        "proof": found.values,
    }


def price_rows(
    specs: ModelSpecs, costs: CostTable, max_batch: int, batch_numel: int = BATCH_NUMEL
) -> tuple[PriceRow, ...]:
    """Return prices of every shape of the model in batches of 1, 2, ... up to `largest_batch`."""
    rows = []
    for key, count in sorted(Counter(m.key for m in specs.matrices).items()):
        sizes = range(1, min(count, largest_batch(*key[:2], max_batch, batch_numel)) + 1)
        ms = tuple(float(costs.batch_ms(key, b)) for b in sizes)
        origin = tuple(costs.origin(key, b) for b in sizes)
        kernels = tuple(costs.kernel(key, b) for b in sizes)
        rows.append(PriceRow(key, ms, origin, kernels if any(kernels) else ()))
    return tuple(rows)


# ---- counts ------------------------------------------------------------------------------


def _round_robin(problem: Problem, simple: dict[str, Counts], _: Budget) -> Found:
    if "round_robin" not in simple:
        raise PlanError(
            "solver='round_robin' finds no plan inside owner_memory_bytes: use solver='auto'"
        )
    return _plain(problem, simple["round_robin"], "round_robin")


def _greedy(problem: Problem, simple: dict[str, Counts], budget: Budget) -> Found:
    counts = simple["greedy"] if "greedy" in simple else _tight(problem, budget)
    return _plain(problem, counts, "greedy")


def _best(problem: Problem, simple: dict[str, Counts], budget: Budget) -> Found:
    """Return the greedy counts, or better counts and a better bound from patterns."""
    plain = _greedy(problem, simple, budget)
    if plain.bound >= plain.makespan:
        return plain
    is_small = len(problem.shapes) <= _MOST_SHAPES and len(problem.classes) <= _MOST_CLASSES
    note = "" if has_engine() else "HiGHS is not installed (pip install 'pulp[highs]')"
    if is_small and not note:
        search = _Bisection(problem, plain, budget)
        try:
            search.improve()
            search.prove()
        except EngineError as error:
            note = str(error)
        else:
            if search.found is not plain:
                return replace(search.found, solver="milp", engine="HiGHS")
    return replace(plain, note="; ".join(filter(None, (note, "this is the greedy plan"))))


# A solver takes the problem, the counts of simple methods by name, and the clock. It raises
# PlanError if no assignment fits the memory cap, with the smallest cap that is known to suffice.
SOLVERS: Mapping[str, Callable[[Problem, dict[str, Counts], Budget], Found]] = MappingProxyType(
    {"auto": _best, "milp": _best, "greedy": _greedy, "round_robin": _round_robin}
)


def _plain(problem: Problem, counts: Counts, name: str = "greedy") -> Found:
    """Return counts with the bound that needs no solver."""
    makespan = problem.makespan(counts)
    return Found(counts, name, makespan, min(simple_bound(problem), makespan))


class _Bisection:
    """Finds better counts and raises the bound, by trying makespans in between."""

    def __init__(self, problem: Problem, found: Found, budget: Budget) -> None:
        self.problem, self.found, self.budget = problem, found, budget

    def improve(self) -> None:
        """Look for better counts, by turns just below the known makespan, because the search ends
        if that is out of reach, and halfway down to the largest makespan found out of reach."""
        hopeless = self.found.bound - 1  # no counts were found for this makespan
        for attempt in range(_ATTEMPTS):
            if hopeless >= self.found.makespan - 1 or self.budget.spent():
                return
            limit = (
                (hopeless + self.found.makespan) // 2 if attempt % 2 else self.found.makespan - 1
            )
            if not self._try(limit):
                hopeless = limit

    def prove(self) -> None:
        """Raise the bound towards the makespan of the counts."""
        low, high = self.found.bound, self.found.makespan - 1  # makespans in between are open
        for _ in range(_ATTEMPTS):
            if high - low <= _CLOSE * high or self.budget.spent():
                return
            middle = (low + high) // 2
            self._try(middle, prove=True)
            low, high = (self.found.bound, high) if self.found.bound > middle else (low, middle)

    def _try(self, limit: int, *, prove: bool = False) -> bool:
        """Find counts within a makespan, or show that none exist; True if better counts are found.
        With ``prove`` no integer program is solved."""
        problem = self.problem
        listed = every_pattern(problem, limit)
        some = near_patterns(problem, self.found.counts, limit) if listed is None else listed
        if leaves_out(some):
            if listed is not None:
                self._refute(limit, (0,) * len(problem.shapes))
            return False
        solved = shared_out(problem, some, self.budget.left_s() + 1.0, whole=False)
        if solved is None:
            return False
        times, duals = solved
        duals = np.maximum(duals, 0.0)
        values = np.rint(duals / max(float(duals.max()), 1e-200) * WORTH).astype(np.int64)
        most = most_worth(problem, limit, values, listed)
        if most is not None and is_short(problem, most, values):
            self._refute(limit, tuple(values.tolist()))
            return False
        counts, complete = None, False
        if listed is not None and most is not None:
            counts, complete = exhaust(problem, listed, values, most)
            if complete and counts is None:
                self._refute(limit, tuple(values.tolist()))
        if complete or prove or times > 1 + 1e-6:
            return self._take(counts)
        limit_s = self.budget.left_s() + 1.0
        if (whole := shared_out(problem, some, limit_s, whole=True)) is None:
            return False
        return self._take(counts_of(problem, some, whole[1]))

    def _refute(self, limit: int, values: tuple[int, ...]) -> None:
        if limit + 1 > self.found.bound:
            self.found = replace(self.found, bound=limit + 1, values=values)

    def _take(self, counts: Counts | None) -> bool:
        """Keep counts if they are better than the known ones; True if so."""
        if counts is None or not self.problem.is_feasible(counts):
            return False
        counts = improve(self.problem, counts, self.budget.spent)
        if (makespan := self.problem.makespan(counts)) >= self.found.makespan:
            return False
        self.found = replace(self.found, counts=counts, makespan=makespan)
        return True


def _with_copies(
    plan: OwnershipPlan, problem: Problem, way: Way, order: Sequence[int], solver: str,
    budget: Budget,
) -> OwnershipPlan:  # fmt: skip
    """Return ``plan`` with some matrices computed by each part of the mesh, distributed alike in
    each; the others are assigned around them. The bound still holds, because copies add work."""
    specs, world, batches = plan.specs, plan.topology.world, list[Batch]()
    prices, busy = {row.key: row.ms for row in plan.prices}, np.zeros(world, np.int64)
    limits, stored = plan.limits, [plan.limits.fixed_bytes_of(rank) for rank in range(world)]
    members = grouped((way.redundant[i], i) for i in order if i in way.redundant)
    for parts, mine in sorted(members.items(), key=lambda pair: (-len(pair[0][0]), pair)):
        chosen, places = tuple(specs.matrices[i] for i in mine), len(parts[0])
        part = build_problem(chosen, places, OwnerLimits(), prices, plan.layout)
        counts = greedy(part, [], budget.spent)
        assert counts is not None  # there is no memory cap
        at, every = Topology.flat(places), [*range(len(mine))]
        owners = _owners(replace(specs, matrices=chosen), at, part, counts, every)
        for batch in _batches(part, owners, every, plan.prices):
            copies = tuple(ranks[batch.owner] for ranks in parts)
            numbers = tuple(mine[i] for i in batch.matrices)
            batches.append(replace(batch, owner=copies[0], matrices=numbers, copies=copies))
            busy[[*copies]] += problem.ticks(batch.ms)
            for rank in copies:
                own = (limits.state_bytes(i, specs.matrices[i], plan.layout) for i in numbers)
                stored[rank] += sum(own)
    cap, fullest = limits.memory_bytes, max(stored)
    if cap is not None and fullest > cap:
        raise PlanError(
            f"owner_memory_bytes={cap:,} does not fit all copies, with which rank "
            f"{stored.index(fullest)} keeps {fullest:,} bytes: pass redundancy=1, or a larger cap"
        )
    limits = replace(limits, fixed_bytes=tuple(stored))
    remaining = build_problem(
        specs.matrices, world, limits, prices, plan.layout, without=way.redundant, busy=busy
    )
    found = SOLVERS[solver](remaining, baselines(remaining, order, spent=budget.spent), budget)
    owners = _owners(specs, plan.topology, remaining, found.counts, order)
    batches += _batches(remaining, owners, order, plan.prices)
    position = {i: at for at, i in enumerate(order)}
    made = replace(plan, batches=tuple(sorted(batches, key=lambda b: position[b.matrices[0]])))
    is_optimal = made.makespan_ms <= made.lower_bound_ms
    status = "optimal" if is_optimal else "time_limit" if budget.hit else "feasible"
    return replace(made, status=status)


def _tight(problem: Problem, budget: Budget) -> Counts:
    """Return counts under a tight memory cap. The search starts from counts whose fullest rank
    stores least: the same assignment problem, with bytes in place of ticks. PlanError, with the
    smallest cap that is known to suffice, if it finds none."""
    cap = problem.memory_cap
    assert cap is not None
    in_bytes = replace(
        problem,
        shapes=tuple(replace(k, batch_ticks=(max(k.nbytes, 1),)) for k in problem.shapes),
        classes=tuple(replace(c, fixed=cap - c.room, room=UNLIMITED) for c in problem.classes),
        memory_cap=None,
    )
    counts = greedy(in_bytes, [], budget.spent)
    assert counts is not None  # there is no memory cap
    found = _best(in_bytes, {"greedy": counts}, budget)
    if problem.is_feasible(found.counts):
        counts = greedy(problem, [found.counts], budget.spent)
        assert counts is not None
        return counts
    nbytes = found.makespan
    known = f"a cap of {nbytes} bytes is feasible, and none below {found.bound} is"
    if found.bound >= nbytes:
        known = f"the smallest feasible cap is {nbytes} bytes{_mebibytes(nbytes)}"
    matrices = int(problem.demand.sum()) + sum(shape.count for _, shape in problem.forced)
    raise PlanError(
        f"owner_memory_bytes={cap} is too small for the optimizer state of {matrices} matrices on "
        f"{problem.world} ranks: {known}. Raise PlannerOptions(owner_memory_bytes=...), or use "
        "more ranks"
    )


def _check_fixed_bytes(limits: OwnerLimits, world: int, layout: Layout) -> None:
    """Raise PlanError if a rank's fixed bytes alone exceed the cap."""
    cap = limits.memory_bytes
    if layout.keeps_state_at_owners or cap is None:
        return
    nbytes, rank = max((limits.fixed_bytes_of(r), -r) for r in range(world))
    if nbytes > cap:
        raise PlanError(
            f"owner_memory_bytes={cap} is too small: rank {-rank} stores {nbytes} bytes"
            f"{_mebibytes(nbytes)} of optimizer state. In the {layout.value} layout that state "
            "lies with the parameters, so no other ownership meets the cap: use more ranks or a "
            "lower-precision state, or raise PlannerOptions(owner_memory_bytes=...)"
        )


def _mebibytes(nbytes: int) -> str:
    return f" ({nbytes / 2**20:.1f} MiB)" if nbytes >= 2**20 else ""


def _owners(
    specs: ModelSpecs, topology: Topology, problem: Problem, counts: Counts, order: Sequence[int]
) -> dict[int, int]:
    """Return the owner of each matrix by ``counts``; consecutive matrices get different owners."""
    owners = {i: rank for rank, shape in problem.forced for i in shape.members}
    shape_of = {i: s for s, shape in enumerate(problem.shapes) for i in shape.members}
    free = [i for i in order if i in shape_of]
    placed = place(
        [shape_of[i] for i in free],
        [layer_of(specs.matrices[i].name) for i in free],
        [{s: int(k) for s, k in enumerate(row) if k} for row in counts],
        [c.ranks for c in problem.classes],
        topology,
    )
    return owners | dict(zip(free, placed, strict=True))


def _batches(
    problem: Problem, owners: Mapping[int, int], order: Sequence[int], prices: Iterable[PriceRow]
) -> tuple[Batch, ...]:
    """Divide each owner's matrices into the cheapest batches, the first layers first."""
    position = {i: at for at, i in enumerate(order)}
    rows = {row.key: row for row in prices}
    made = []
    for shape in (*problem.shapes, *(shape for _, shape in problem.forced)):
        held = grouped((owners[i], i) for i in sorted(shape.members, key=position.__getitem__))
        for owner, mine in held.items():
            for size in shape.batches(len(mine)):
                some, mine = tuple(mine[:size]), mine[size:]
                ms = problem.ms(shape.batch_ticks[size - 1])
                made.append(Batch(owner, some, ms, rows[shape.key].kernel(size)))
    return tuple(sorted(made, key=lambda b: position[b.matrices[0]]))
