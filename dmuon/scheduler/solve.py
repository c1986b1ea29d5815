"""Planning: from a model, a mesh and prices to the plan that says who owns what.

::

    prices ─▶ problem ─▶ counts ─▶ owners ─▶ batches ─▶ plan
                                  (placement)

Counts come from the greedy solver; if that is not proven optimal, from the covering search
(`bound.cover`); if that leaves something open, from column generation (`columns`), and from the
covering search again, with the values that it found. Whatever a solver says is checked here by our
own arithmetic: counts must be feasible and better than those known, and a bound counts only if
`bound` computes it again. Work limits come first, the wall clock is the last one.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dmuon.config import PlannerOptions
from dmuon.scheduler.bound import certified, cover, simple_bound
from dmuon.scheduler.co_owners import (
    GAIN,
    CoOwners,
    check_size,
    shared_prices,
)
from dmuon.scheduler.columns import Budget, Columns, EngineError, available_engines
from dmuon.scheduler.costs import BATCH_NUMEL, CostTable, largest_batch
from dmuon.scheduler.greedy import baselines, greedy, improve
from dmuon.scheduler.placement import launch_order, layer_of, place
from dmuon.scheduler.plan import Batch, Claim, OwnershipPlan, PriceRow, Proof, SharedPrice
from dmuon.scheduler.problem import (
    UNLIMITED,
    Counts,
    OwnerClass,
    Problem,
    build_problem,
    relaxed,
)
from dmuon.scheduler.shards import OwnerLimits
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

SOLVERS = ("auto", "milp", "greedy", "round_robin")

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
) -> OwnershipPlan:
    """Assign every matrix to an owner, balancing predicted time.

    Pure; equal input gives an equal plan, in whatever order the matrices come. A matrix that one
    rank alone may own goes there, whatever the solver; it counts in that rank's load and bytes.
    Without ``limits`` any rank may own anything; with ``reduce_to_owner`` each has AdamW's state of
    the whole model. (In the dedicated layout it is not known yet who will shard the rest.)
    ``batch_numel``: the most elements of a batch of several matrices.

    Raises:
        PlanError: unknown solver, a shape without a cost, or a memory cap that no plan fits.
    """
    options = options or PlannerOptions()
    if solver not in SOLVERS:
        raise PlanError(f"solver={solver!r} is unknown: choose from {SOLVERS}")
    begin = time.perf_counter()
    budget = Budget(options.time_limit_s)
    if limits is None:
        whole = specs.adamw_state_bytes() if layout is Layout.REDUCED else 0
        fixed = (whole,) * topology.world if whole else ()
        limits = OwnerLimits(fixed_bytes=fixed, memory_bytes=options.owner_memory_bytes)
    rows = price_rows(specs, costs, options.max_batch, batch_numel)
    _check_fixed_bytes(limits, topology.world, layout)
    prices = {row.key: row.ms for row in rows}
    problem = build_problem(specs.matrices, topology.world, limits, prices, layout)
    order = launch_order([matrix.name for matrix in specs.matrices])
    simple = baselines(problem, order, spent=budget.spent)
    # What the clock cut short is nobody's result.
    known = {name: simple[name] for name in simple if name != "greedy" or not budget.hit}
    found = _search(problem, simple, solver, budget)
    makespan = problem.makespan(found.counts)
    alone, alone_ticks, shared, left = problem, makespan, None, None
    if options.co_owners != "off" and (solver != "round_robin" or options.co_owners != "auto"):
        shared = _shared(
            specs, topology, limits, costs, rows, problem, makespan, order, layout, options,
            batch_numel,
        )  # fmt: skip
    # Ranks that share matrices all work, where some might have been idle.
    if (
        options.co_owners == "auto"
        and shared is not None
        and shared.makespan * costs.contention >= (1 - GAIN) * makespan
    ):
        left, shared = shared, None
    if shared is not None:
        problem = shared.rest
        simple = baselines(problem, order, spent=budget.spent)
        if "greedy" not in simple or problem.makespan(simple["greedy"]) > shared.makespan:
            simple["greedy"] = shared.start
        found = _search(problem, simple, solver, budget)
        makespan = problem.makespan(found.counts)
        found = replace(found, bound=shared.ways.bound(makespan))
    status = "optimal" if found.bound >= makespan else "feasible"
    owners = _placed(specs, topology, problem, found.counts, order)
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=_batches(problem, rows, owners, order, shared.batches if shared else ()),
        layout=layout,
        solver=found.solver,
        status="time_limit" if status == "feasible" and budget.hit else status,
        cost_source=costs.source,
        lower_bound_ms=problem.ms(found.bound),
        alternatives=tuple((n, alone.ms(alone.makespan(c))) for n, c in known.items()),
        limits=limits,
        prices=rows,
        proof=None if shared else found.proof,
        engine=found.engine,
        note=found.note,
        hit_time_limit=budget.hit,
        shared_prices=some.prices if (some := shared or left) else (),
        alone_ms=alone.ms(alone_ticks) if shared else None,
        shared_ms=alone.ms(left.makespan) if left else None,
    )
    claim = Claim(plan.makespan_ms, plan.fingerprint())
    return replace(plan, seconds=time.perf_counter() - begin, claim=claim)


def price_rows(
    specs: ModelSpecs, costs: CostTable, max_batch: int, batch_numel: int = BATCH_NUMEL
) -> tuple[PriceRow, ...]:
    """What every shape of the model costs in batches of 1, 2, ... up to `largest_batch`."""
    rows = []
    for key, count in sorted(Counter(m.key for m in specs.matrices).items()):
        sizes = range(1, min(count, largest_batch(*key[:2], max_batch, batch_numel)) + 1)
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


# ---- counts ------------------------------------------------------------------------------


def _search(problem: Problem, simple: dict[str, Counts], solver: str, budget: Budget) -> Found:
    """Counts by the solver asked for.

    Raises:
        PlanError: no assignment fits the memory cap; states the smallest cap that is known to.
    """
    name = "round_robin" if solver == "round_robin" else "greedy"
    if name not in simple and name == "round_robin":
        raise PlanError(
            "solver='round_robin' finds no plan inside owner_memory_bytes: use solver='auto'"
        )
    counts = simple[name] if name in simple else _tight(problem, budget)
    plain = _plain(problem, counts, name)
    if solver in ("greedy", "round_robin") or plain.bound >= problem.makespan(counts):
        return plain
    return _improved(problem, plain, budget)


def _plain(problem: Problem, counts: Counts, name: str = "greedy") -> Found:
    """Counts with the bound that needs no solver."""
    bound, dual = simple_bound(relaxed(problem), problem.makespan(counts))
    return Found(counts, name, bound, Proof(dual))


def _improved(problem: Problem, plain: Found, budget: Budget) -> Found:
    """The best that is found, and the bound; alike domains are looked at as one first."""
    if len({c.allowed for c in problem.classes}) > 1:
        plain = replace(plain, counts=_by_domain(problem, plain.counts, budget))
    simpler = relaxed(problem)
    if simpler is problem:
        return _solved(problem, plain, budget)
    start = greedy(simpler, [], budget.spent)
    if start is None:
        return plain
    found = _solved(simpler, replace(plain, counts=start), budget)
    bound = min(found.bound, problem.makespan(plain.counts))
    return _settled(problem, replace(found, counts=plain.counts, bound=bound), _FIRST_WORK, budget)


def _solved(problem: Problem, plain: Found, budget: Budget) -> Found:
    """The covering search, column generation, and the covering search again."""
    best = _settled(problem, plain, _FIRST_WORK, budget)
    notes: list[str] = []
    engine = ""
    if best.bound < problem.makespan(best.counts) and Columns.fits(problem):
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
            proof = Proof(columns.dual) if columns.bound > best.bound else best.proof
            best = replace(best, counts=columns.counts, bound=columns.bound, proof=proof)
            if engine:
                break
        if best.bound < problem.makespan(best.counts):
            best = _settled(problem, best, _LAST_WORK, budget)
    makespan = problem.makespan(best.counts)
    best = replace(best, bound=certified(problem, best.proof, best.bound))
    better = makespan < problem.makespan(plain.counts) or best.bound > plain.bound
    if not better:
        notes.append("this is the greedy plan")
    solver = "greedy" if not better else "milp" if engine else "search"
    return replace(best, solver=solver, engine=engine, note="; ".join(notes))


def _settled(problem: Problem, found: Found, work: int, budget: Budget) -> Found:
    """Counts and bound brought closer by covering searches; ``work`` bounds each of them."""
    counts, makespan = found.counts, problem.makespan(found.counts)
    while found.bound < makespan and not budget.spent():
        tried = cover(problem, makespan - 1, found.proof.dual, work)
        if tried.counts is not None:
            counts = improve(problem, tried.counts, budget.spent)
            makespan = problem.makespan(counts)
            continue
        if tried.complete:
            found = replace(
                found, bound=makespan, proof=replace(found.proof, impossible=makespan - 1)
            )
        break
    return replace(found, counts=counts)


def _shares(problem: Problem, domains: Sequence[Sequence[OwnerClass]]) -> Counts:
    """[domains, shapes]: how many of each shape a domain takes, so that all owners work alike.

    What only one domain may take comes first, then the costliest, each to the domain whose owners
    are least busy with it.
    """
    shares = np.zeros((len(domains), len(problem.shapes)), np.int64)
    sizes = [sum(c.size for c in domain) for domain in domains]
    loads = [
        sum(c.fixed * c.size for c in domain) / n for domain, n in zip(domains, sizes, strict=True)
    ]
    may = [
        [p for p, domain in enumerate(domains) if domain[0].allowed[s]]
        for s in range(shares.shape[1])
    ]
    for s in sorted(range(len(may)), key=lambda s: (len(may[s]) > 1, s)):
        shape = problem.shapes[s]
        usual = -(-shape.count // sum(sizes[p] for p in may[s]))  # of an owner, about
        each = int(shape.ticks[usual]) / usual
        heap = [(loads[p] + each / sizes[p], p) for p in may[s]]
        heapq.heapify(heap)
        for _ in range(shape.count):
            loads[heap[0][1]], p = heap[0]
            shares[p, s] += 1
            heapq.heapreplace(heap, (loads[p] + each / sizes[p], p))
    return shares


def _by_domain(problem: Problem, counts: Counts, budget: Budget) -> Counts:
    """The owners of each domain filled by themselves with a share of the matrices, the busiest
    first; the ``counts`` known where that is no better."""
    by_allowed: dict[tuple[bool, ...], list[OwnerClass]] = defaultdict(list)
    for owner in problem.classes:
        by_allowed[owner.allowed].append(owner)
    domains = list(by_allowed.values())
    found: dict[Problem, Counts] = {}
    parts = []
    for domain, share in zip(domains, _shares(problem, domains), strict=True):
        mine = [owner.ranks if owner in domain else () for owner in problem.classes]
        parts.append(problem.part(mine, share))
        part = parts[-1][0]
        if part not in found:
            start = greedy(part, [], budget.spent)
            if start is None:
                return counts  # shares do not look at memory
            found[part] = start
    for _ in range(_MOST_DOMAINS):
        worst = max(found, key=lambda part: part.makespan(found[part]))
        before = worst.makespan(found[worst])
        found[worst] = _settled(worst, _plain(worst, found[worst]), _FIRST_WORK, budget).counts
        if worst.makespan(found[worst]) == before or budget.spent():
            break
    filled = np.zeros_like(counts)
    for part, ranks, shapes in parts:
        filled[np.ix_(ranks, shapes)] = found[part]
    filled = improve(problem, filled, budget.spent)
    is_better = problem.is_feasible(filled) and problem.makespan(filled) < problem.makespan(counts)
    return filled if is_better else counts


# ---- co-owners ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """``batches`` of what is shared; the problem of the ``rest`` on top of it, with a start; the
    makespan of both; all ways to share."""

    batches: list[Batch]
    prices: tuple[SharedPrice, ...]
    rest: Problem
    start: Counts
    makespan: int
    ways: CoOwners


def _shared(
    specs: ModelSpecs,
    topology: Topology,
    limits: OwnerLimits,
    costs: CostTable,
    rows: Sequence[PriceRow],
    problem: Problem,
    makespan: int,
    order: Sequence[int],
    layout: Layout,
    options: PlannerOptions,
    batch_numel: int,
) -> _Shared | None:
    """The best way to share matrices that is found; None where none is faster than ``makespan``.

    Raises:
        PlanError: a number of co-owners was asked for that is not possible.
    """
    size = options.co_owners if isinstance(options.co_owners, int) else None
    if layout.keeps_state_at_owners and size is not None:
        raise PlanError(
            f"co_owners={size} needs momentum that lies with the parameters, and in the "
            f"{layout.value!r} layout each matrix and its momentum lie with one owner: use "
            "layout='sharded' or 'replicated', or co_owners='auto'"
        )
    if size is not None:
        check_size(specs, limits, topology.world, size)
    if layout.keeps_state_at_owners or topology.world == 1 or not problem.shapes:
        return None
    prices = shared_prices(specs, topology, limits, costs, options.max_batch, batch_numel)
    ways = CoOwners(problem, specs, topology, limits, prices)
    found = ways.best(None if size else makespan, size)
    if found is None or not found.parts:
        return None
    row_of = {(row.key, row.co_owners): row for row in prices}
    position = {i: at for at, i in enumerate(order)}
    batches: list[Batch] = []
    for s, shape in enumerate(problem.shapes):
        parts = [(block, count) for of, block, count in found.parts if of == s]
        # Dealt out in turn, so that what is computed first is spread over all blocks.
        turns = sorted((n, at) for at, (_, count) in enumerate(parts) for n in range(count))
        members = sorted(shape.members, key=position.__getitem__)
        taken: list[list[int]] = [[] for _ in parts]
        for i, (_, at) in zip(members, turns, strict=False):
            taken[at].append(i)
        for (block, _), mine in zip(parts, taken, strict=True):
            row = row_of[shape.key, len(block)]
            price = tuple(problem.ticks(ms) for ms in row.ms[: shape.count])
            for b in replace(shape, batch_ticks=price).batches(len(mine)):
                some, mine = tuple(mine[:b]), mine[b:]
                ms, split = problem.ms(price[b - 1]), row.split[b - 1]
                batches.append(Batch(block[0], some, ms, row.kernel, block, split))
    ms_of = {row.key: row.ms for row in rows}
    rest = build_problem(
        specs.matrices, topology.world, limits, ms_of, layout,
        without={i for batch in batches for i in batch.matrices}, busy=found.busy,
    )  # fmt: skip
    column = {(shape.key, shape.domain): s for s, shape in enumerate(problem.shapes)}
    columns = [column[shape.key, shape.domain] for shape in rest.shapes]
    return _Shared(batches, prices, rest, found.alone[:, columns], found.makespan, ways)


# ---- memory ------------------------------------------------------------------------------


def _tight(problem: Problem, budget: Budget) -> Counts:
    """Counts where the memory cap leaves little.

    They start from how the fullest rank stores least, whatever the time: the same assignment
    problem, with bytes for ticks.

    Raises:
        PlanError: nothing fits; states the smallest cap that does, as far as it is known.
    """
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
    found = _plain(in_bytes, counts)
    if found.bound < in_bytes.makespan(counts):
        found = _improved(in_bytes, found, budget)
    if problem.is_feasible(found.counts):
        counts = greedy(problem, [found.counts], budget.spent)
        assert counts is not None
        return counts
    nbytes = in_bytes.makespan(found.counts)
    known = (
        f"the smallest feasible cap is {nbytes} bytes{_mebibytes(nbytes)}"
        if found.bound >= nbytes
        else f"a cap of {nbytes} bytes is feasible, and none below {found.bound} is"
    )
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


# ---- owners and batches ------------------------------------------------------------------


def _placed(
    specs: ModelSpecs, topology: Topology, problem: Problem, counts: Counts, order: Sequence[int]
) -> list[int]:
    """The owner of each matrix: counts made concrete, with consecutive matrices apart."""
    owners = [0] * len(order)
    for rank, shape in problem.forced:
        for i in shape.members:
            owners[i] = rank
    shape_of = {i: s for s, shape in enumerate(problem.shapes) for i in shape.members}
    free = [i for i in order if i in shape_of]
    placed = place(
        [shape_of[i] for i in free],
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
    problem: Problem,
    prices: Sequence[PriceRow],
    owners: Sequence[int],
    order: Sequence[int],
    shared: Sequence[Batch] = (),
) -> tuple[Batch, ...]:
    """Every owner's matrices cut into the cheapest batches, and the ``shared`` ones, earliest
    layers first."""
    position = {i: at for at, i in enumerate(order)}
    rows = {row.key: row for row in prices}
    made = list(shared)
    for shape in (*problem.shapes, *(shape for _, shape in problem.forced)):
        held: dict[int, list[int]] = defaultdict(list)
        for i in sorted(shape.members, key=position.__getitem__):
            held[owners[i]].append(i)
        for owner, mine in held.items():
            start = 0
            for size in shape.batches(len(mine)):
                ms = problem.ms(shape.batch_ticks[size - 1])
                kernel = rows[shape.key].kernel(size)
                made.append(Batch(owner, tuple(mine[start : start + size]), ms, kernel))
                start += size
    return tuple(sorted(made, key=lambda b: (position[b.matrices[0]], b.owner)))
