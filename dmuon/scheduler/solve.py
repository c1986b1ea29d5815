"""Planning: prices -> problem -> counts -> owners (placement) -> batches -> plan.

Counts come from one of `SOLVERS`. "auto" begins with the greedy solver; until a plan is proven
optimal, it asks the covering search (`bound.cover`), column generation (`columns`), and the search
again with the values that were found. Counts must be feasible and better than those known, and a
bound counts only if `bound` computes it again. Work limits come first, the wall clock is the last.
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
from dmuon.scheduler import columns
from dmuon.scheduler.bound import certified, cover, relaxed, simple_bound
from dmuon.scheduler.columns import Budget, Columns, EngineError, available_engines
from dmuon.scheduler.costs import BATCH_NUMEL, CostTable, largest_batch
from dmuon.scheduler.plan import Batch, Claim, OwnershipPlan, PriceRow, Proof, Search, Way
from dmuon.scheduler.problem import (
    UNLIMITED,
    Counts,
    OwnerClass,
    Problem,
    baselines,
    build_problem,
    greedy,
    improve,
)
from dmuon.scheduler.specs import ModelSpecs, OwnerLimits, StateSizes
from dmuon.scheduler.topology import Topology, launch_order, layer_of, place
from dmuon.types import Layout, PlanError, grouped

_MOST_DOMAINS = 8  # filled by themselves, after which the others are no longer the busiest
_FIRST_WORK = 1_500_000
_LAST_WORK = 20_000_000


@dataclass(frozen=True)
class Found:
    """Counts, and what is known about them; times in ticks."""

    counts: Counts
    solver: str
    bound: int
    proof: Proof
    engine: str = ""
    note: str = ""


def solve(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostTable,
    *,
    layout: Layout = Layout.REDUCED,
    solver: str = "auto",
    options: PlannerOptions | None = None,
    limits: OwnerLimits | None = None,
    batch_numel: int = BATCH_NUMEL,
    way: Way = Way(),  # noqa: B008  frozen
) -> OwnershipPlan:
    """Assign every matrix to an owner, balancing predicted time; ``way`` says what parts of the
    mesh compute by themselves, and how buckets are cut.

    Pure; equal input gives an equal plan, in whatever order the matrices come. Without ``limits``
    any rank may own anything, and keeps what `StateSizes.limits` says. ``batch_numel``: the most
    elements of a batch of several matrices.

    Raises:
        PlanError: unknown solver, a shape without a cost, or a memory cap that no plan fits.
    """
    options = options or PlannerOptions()
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
    order = launch_order([matrix.name for matrix in specs.matrices])
    simple = baselines(problem, order, spent=budget.spent)
    # A search that the clock cut short is not compared with.
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
    plan = replace(plan, bucket_bytes=way.bucket_bytes, rings=way.rings)
    search = replace(plan.search, seconds=time.perf_counter() - begin)
    return replace(plan, search=search, claim=Claim(plan.makespan_ms, plan.fingerprint()))


def _outcome(
    problem: Problem, found: Found, budget: Budget, alternatives: tuple[tuple[str, float], ...]
) -> dict[str, Any]:
    """The fields of a plan that say what was found, and how."""
    is_optimal = found.bound >= problem.makespan(found.counts)
    return {
        "solver": found.solver,
        "status": "optimal" if is_optimal else "time_limit" if budget.hit else "feasible",
        "lower_bound_ms": problem.ms(found.bound),
        "search": Search(alternatives, 0.0, found.engine, found.note, budget.hit),
        "proof": found.proof,
    }


def price_rows(
    specs: ModelSpecs, costs: CostTable, max_batch: int, batch_numel: int = BATCH_NUMEL
) -> tuple[PriceRow, ...]:
    """The prices of every shape of the model in batches of 1, 2, ... up to `largest_batch`."""
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
    """The best that is found, and the bound; alike domains are looked at as one first."""
    plain = _greedy(problem, simple, budget)
    if plain.bound >= problem.makespan(plain.counts):
        return plain
    if len({c.allowed for c in problem.classes}) > 1:
        plain = replace(plain, counts=_by_domain(problem, plain.counts, budget))
    if (simpler := relaxed(problem)) is problem:
        return _solved(problem, plain, budget)
    if (start := greedy(simpler, [], budget.spent)) is None:
        return plain
    found = _solved(simpler, replace(plain, counts=start), budget)
    bound = min(found.bound, problem.makespan(plain.counts))
    return _closed(problem, replace(found, counts=plain.counts, bound=bound), _FIRST_WORK, budget)


# A solver is given the problem, the counts of simple methods by name, and the clock. It raises
# PlanError where no assignment fits the memory cap, with the smallest cap that is known to.
SOLVERS: Mapping[str, Callable[[Problem, dict[str, Counts], Budget], Found]] = MappingProxyType(
    {"auto": _best, "milp": _best, "greedy": _greedy, "round_robin": _round_robin}
)


def _plain(problem: Problem, counts: Counts, name: str = "greedy") -> Found:
    """Counts with the bound that needs no solver."""
    bound, dual = simple_bound(relaxed(problem), problem.makespan(counts))
    return Found(counts, name, bound, Proof(dual))


def _solved(problem: Problem, plain: Found, budget: Budget) -> Found:
    """The covering search, column generation, and the covering search again."""
    best = _closed(problem, plain, _FIRST_WORK, budget)
    notes: list[str] = []
    engine = ""
    few = len(problem.shapes) <= columns.MOST_SHAPES
    few = few and len(problem.classes) <= columns.MOST_CLASSES
    if best.bound < problem.makespan(best.counts) and few:
        if not (engines := available_engines()):
            notes.append("no MILP solver is installed (pip install 'pulp[highs]')")
        for name in engines:
            search = Columns(problem, name, budget, best.counts, best.bound, best.proof.dual)
            try:
                search.climb()
                search.round()
                engine = name
            except EngineError as error:
                notes.append(str(error))
            proof = Proof(search.dual) if search.bound > best.bound else best.proof
            best = replace(best, counts=search.counts, bound=search.bound, proof=proof)
            if engine:
                break
        if best.bound < problem.makespan(best.counts):
            best = _closed(problem, best, _LAST_WORK, budget)
    makespan = problem.makespan(best.counts)
    best = replace(best, bound=certified(problem, best.proof, best.bound))
    solver = "milp" if engine else "search"
    if makespan >= problem.makespan(plain.counts) and best.bound <= plain.bound:
        solver = "greedy"
        notes.append("this is the greedy plan")
    return replace(best, solver=solver, engine=engine, note="; ".join(notes))


def _closed(problem: Problem, found: Found, work: int, budget: Budget) -> Found:
    """Counts and bound brought closer by covering searches; ``work`` bounds each of them."""
    counts, makespan = found.counts, problem.makespan(found.counts)
    while found.bound < makespan and not budget.spent():
        better, complete = cover(problem, makespan - 1, found.proof.dual, work)
        if better is not None:
            counts = improve(problem, better, budget.spent)
            makespan = problem.makespan(counts)
            continue
        if complete:
            proof = replace(found.proof, impossible=makespan - 1)
            found = replace(found, bound=makespan, proof=proof)
        break
    return replace(found, counts=counts)


def _shares(problem: Problem, domains: Sequence[Sequence[OwnerClass]]) -> Counts:
    """[domains, shapes]: how many of each shape a domain takes: what only one may take first, then
    the costliest, each where owners are least busy."""
    shares = np.zeros((len(domains), len(problem.shapes)), np.int64)
    sizes = np.array([sum(c.size for c in domain) for domain in domains])
    loads = np.array([sum(c.fixed * c.size for c in domain) for domain in domains]) / sizes
    allowed = np.array([domain[0].allowed for domain in domains])
    may = [np.flatnonzero(column) for column in allowed.T]  # by shape
    for s in sorted(range(len(may)), key=lambda s: (len(may[s]) > 1, s)):
        shape, those = problem.shapes[s], may[s]
        usual = -(-shape.count // int(sizes[those].sum()))  # of an owner, about
        more = int(shape.ticks[usual]) / usual / sizes[those]
        for _ in range(shape.count):
            after = loads[those] + more
            at = after.argmin()
            loads[those[at]] = after[at]
            shares[those[at], s] += 1
    return shares


def _by_domain(problem: Problem, counts: Counts, budget: Budget) -> Counts:
    """Counts of domains that are filled by themselves, if better than the ``counts`` known."""
    domains = list(grouped((owner.allowed, owner) for owner in problem.classes).values())
    found: dict[Problem, Counts] = {}
    parts = []
    for domain, share in zip(domains, _shares(problem, domains), strict=True):
        mine = [owner.ranks if owner in domain else () for owner in problem.classes]
        parts.append(problem.part(mine, share))
        if (part := parts[-1][0]) not in found:
            if (start := greedy(part, [], budget.spent)) is None:
                return counts  # shares do not look at memory
            found[part] = start
    for _ in range(_MOST_DOMAINS):
        worst = max(found, key=lambda part: part.makespan(found[part]))
        before = worst.makespan(found[worst])
        found[worst] = _closed(worst, _plain(worst, found[worst]), _FIRST_WORK, budget).counts
        if worst.makespan(found[worst]) == before or budget.spent():
            break
    filled = np.zeros_like(counts)
    for part, ranks, shapes in parts:
        filled[np.ix_(ranks, shapes)] = found[part]
    filled = improve(problem, filled, budget.spent)
    is_better = problem.is_feasible(filled) and problem.makespan(filled) < problem.makespan(counts)
    return filled if is_better else counts


def _with_copies(
    plan: OwnershipPlan, problem: Problem, way: Way, order: Sequence[int], solver: str,
    budget: Budget,
) -> OwnershipPlan:  # fmt: skip
    """``plan``, in which each part of the mesh computes some matrices: shared out in each part in
    the same way, and then what has one owner around them. Its bound holds, as that adds work."""
    specs, world, batches = plan.specs, plan.topology.world, list[Batch]()
    prices, busy = {row.key: row.ms for row in plan.prices}, np.zeros(world, np.int64)
    limits, stored = plan.limits, [plan.limits.fixed_bytes_of(rank) for rank in range(world)]
    members = grouped((way.redundant[i], i) for i in order if i in way.redundant)
    for parts, mine in sorted(members.items(), key=lambda pair: (-len(pair[0][0]), pair)):
        chosen, places = tuple(specs.matrices[i] for i in mine), len(parts[0])
        part = build_problem(chosen, places, OwnerLimits(), prices, plan.layout)
        counts = greedy(part, [], budget.spent)
        assert counts is not None  # nothing is capped
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
    search = replace(plan.search, hit_time_limit=budget.hit)
    return replace(made, status=status, search=search)


def _tight(problem: Problem, budget: Budget) -> Counts:
    """Counts where the memory cap leaves little. They start from how the fullest rank stores least:
    the same assignment problem, with bytes in place of ticks. PlanError, with the smallest cap that
    is known to fit, if none is found."""
    cap = problem.memory_cap
    assert cap is not None
    in_bytes = replace(
        problem,
        shapes=tuple(replace(k, batch_ticks=(max(k.nbytes, 1),)) for k in problem.shapes),
        classes=tuple(replace(c, fixed=cap - c.room, room=UNLIMITED) for c in problem.classes),
        memory_cap=None,
    )
    counts = greedy(in_bytes, [], budget.spent)
    assert counts is not None  # nothing is capped
    found = _best(in_bytes, {"greedy": counts}, budget)
    if problem.is_feasible(found.counts):
        counts = greedy(problem, [found.counts], budget.spent)
        assert counts is not None
        return counts
    nbytes = in_bytes.makespan(found.counts)
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
    """Raise PlanError if a rank stores more than the cap, whatever it owns."""
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
    """Counts made concrete: consecutive matrices on different owners."""
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
    """Each owner's matrices in the cheapest batches, first layers first."""
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
