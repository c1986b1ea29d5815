"""Counts and bounds against brute force: every solver, on every small problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmuon.catalogue import model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import AnalyticDevice, CostTable
from dmuon.scheduler.patterns import every_pattern, exhaust, most_worth, refuted, simple_bound
from dmuon.scheduler.problem import UNLIMITED, Problem, build_problem, greedy, improve
from dmuon.scheduler.solve import SOLVERS, solve
from dmuon.scheduler.specs import OwnerLimits
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError
from tests.unit.models import partitions, specs_of

SHAPES = ((4, 6, "float32"), (8, 8, "float32"), (4, 6, "bfloat16"))
MAX_BATCH = 4
TICKS = 1e-8  # ms; costs are rounded to picoseconds, each by half of one
slow = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Instance:
    keys: tuple[tuple[int, int, str], ...]
    world: int
    prices: dict[tuple[int, int, str], tuple[float, ...]]  # of batches of 1, 2, ...
    limits: OwnerLimits

    @property
    def specs(self):
        return specs_of(self.keys)

    @property
    def costs(self) -> CostTable:
        return CostTable(
            "made up", {key: dict(enumerate(ms, 1)) for key, ms in self.prices.items()}
        )

    def problem(self) -> Problem:
        return build_problem(self.specs.matrices, self.world, self.limits, self.prices)

    def assignments(self) -> Iterator[tuple[int, ...]]:
        """Every allowed assignment that fits the memory cap."""
        sizes = [r * c * (4 if d == "float32" else 2) for r, c, d in self.keys]
        for owners in product(range(self.world), repeat=len(self.keys)):
            domains = (self.limits.domains[d] for d in self.limits.domain_of)
            if not all(r in domain for r, domain in zip(owners, domains)):
                continue
            stored = [self.limits.fixed_bytes_of(r) for r in range(self.world)]
            for r, size in zip(owners, sizes):
                stored[r] += size
            cap = self.limits.memory_bytes
            if cap is None or max(stored) <= cap:
                yield owners

    def makespan(self, owners: tuple[int, ...]) -> float:
        """A batch holds matrices of one shape, dtype and domain."""
        loads = [0.0] * self.world
        shapes = list(zip(self.keys, self.limits.domain_of or [0] * len(self.keys)))
        for r in range(self.world):
            mine = [k for k, o in zip(shapes, owners) if o == r]
            loads[r] += sum(cheapest(self.prices[k[0]], mine.count(k)) for k in set(mine))
        return max(loads)

    def optimum(self) -> float | None:
        return min((self.makespan(o) for o in self.assignments()), default=None)

    def solve(self, solver: str, **options):
        return solve(
            self.specs,
            Topology.flat(self.world),
            self.costs,
            solver=solver,
            limits=self.limits,
            options=PlannerOptions(max_batch=MAX_BATCH, **options),
            batch_numel=UNLIMITED,
        )


def counts_of(problem: Problem, owners: tuple[int, ...]):
    counts = np.zeros((problem.world, len(problem.shapes)), np.int64)
    for s, shape in enumerate(problem.shapes):
        for i in shape.members:
            counts[owners[i], s] += 1
    return counts


def cheapest(price: tuple[float, ...], count: int) -> float:
    return min(sum(price[b - 1] for b in parts) for parts in partitions(count, MAX_BATCH))


costs = st.floats(0.125, 8.0, width=16)


@st.composite
def instances(draw) -> Instance:
    """Non-monotone prices, memory caps; domains, of which some may be single ranks."""
    table = {key: tuple(draw(costs) for _ in range(MAX_BATCH)) for key in SHAPES}
    world = draw(st.integers(1, 3))
    keys = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6))
    ranks = range(world)
    fixed_bytes = draw(st.sampled_from([(), tuple(draw(st.integers(0, 200)) for _ in ranks)]))
    memory = draw(st.sampled_from([None, None, 300, 500, 800, 1500]))
    everyone, some = tuple(ranks), draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True))
    singles = (*((r,) for r in ranks), everyone, everyone[-2:])
    domains = draw(st.sampled_from([(), (everyone, tuple(sorted(some))), singles]))
    domain_of = tuple(draw(st.integers(0, len(domains) - 1)) for _ in keys if domains)
    limits = OwnerLimits(fixed_bytes, memory, domains, domain_of)
    return Instance(tuple(keys), world, table, limits)


# ---- against brute force -----------------------------------------------------------------


@slow
@given(instances(), st.sampled_from(list(SOLVERS)))
def test_no_plan_breaks_a_limit_no_bound_exceeds_the_optimum_and_milp_proves_it(instance, solver):
    """Where a batch may cost less than a smaller one, milp may stop before it is proven."""
    best = instance.optimum()
    try:
        plan = instance.solve(solver)
    except PlanError as error:
        assert "owner_memory_bytes" in str(error)
        assert best is None or solver == "round_robin"
        return
    assert plan.lower_bound_ms <= best + TICKS
    assert plan.makespan_ms >= best - TICKS
    rising = all((np.diff(shape.ticks) >= 0).all() for shape in instance.problem().shapes)
    if solver in ("auto", "milp") and rising:
        assert plan.status == "optimal"
        assert plan.makespan_ms <= best + TICKS and plan.lower_bound_ms >= best - TICKS
    assert plan.makespan_ms >= plan.lower_bound_ms - TICKS
    assert plan.owners in set(instance.assignments()) and plan.limits == instance.limits
    loads = [0.0] * instance.world
    for batch in plan.batches:
        (key,) = {instance.keys[i] for i in batch.matrices}
        assert batch.ms == pytest.approx(instance.prices[key][len(batch.matrices) - 1])
        loads[batch.owner] += batch.ms
    assert plan.loads_ms == pytest.approx(tuple(loads))
    assert sorted(i for b in plan.batches for i in b.matrices) == list(range(len(instance.keys)))
    certificate = certify(plan)
    assert certificate.ok and certificate.proven, str(certificate)
    assert certificate.makespan_ms == pytest.approx(plan.makespan_ms)


@slow
@given(instances(), st.lists(st.integers(0, 60), min_size=9, max_size=9), st.booleans())
def test_no_values_whatever_they_are_rule_out_what_is_possible(instance, values, coarse):
    if (best := instance.optimum()) is None:
        return
    problem = instance.problem()
    values, limit = values[: len(problem.shapes)], problem.ticks(best) + 3
    assert simple_bound(problem) <= limit
    exact = refuted(problem, limit // 2, values)
    with mock.patch("dmuon.scheduler.patterns._MOST_LISTED", 0 if coarse else 6_000):
        assert not refuted(problem, limit, values)
        assert exact or not refuted(problem, limit // 2, values), "a grid proves no more"


@slow
@given(instances())
def test_every_possible_owner_is_within_a_listed_pattern(instance):
    if instance.optimum() is None:
        return
    problem = instance.problem()
    for owners in list(instance.assignments())[:5]:
        counts = counts_of(problem, owners)
        limit = problem.makespan(counts)
        listed = every_pattern(problem, limit)
        for c, owner in enumerate(problem.classes):
            for row in counts[list(owner.ranks)]:
                assert (listed[c] >= row).all(1).any()
        worth = np.arange(1, len(problem.shapes) + 1)
        most = most_worth(problem, limit, worth, listed)
        grid = most_worth(problem, limit, worth, None)
        assert all(a <= b for a, b in zip(most, grid, strict=True))
        found, complete = exhaust(problem, listed, worth, most)
        assert complete and (found.sum(0) == problem.demand).all()


@slow
@given(instances())
def test_local_search_keeps_feasibility_and_never_loses(instance):
    problem = instance.problem()
    for owners in list(instance.assignments())[:3]:
        counts = counts_of(problem, owners)
        better = improve(problem, counts)
        assert problem.is_feasible(better)
        assert problem.makespan(better) <= problem.makespan(counts)
        assert problem.ms(problem.makespan(counts)) == pytest.approx(instance.makespan(owners))
        best = greedy(problem, [counts])
        assert problem.is_feasible(best) and problem.makespan(best) <= problem.makespan(better)


@slow
@given(instances(), st.randoms(use_true_random=False))
def test_neither_the_order_of_matrices_nor_the_numbers_of_domains_matter(instance, random):
    try:
        plan = instance.solve("auto")
    except PlanError:
        return
    order, numbers = list(range(len(instance.keys))), list(range(len(instance.limits.domains)))
    random.shuffle(order)
    random.shuffle(numbers)
    place = {old: new for new, old in enumerate(order)}
    old, limits = instance.specs, instance.limits
    again = solve(
        replace(
            old,
            parameters=tuple(old.parameters[i] for i in order),
            matrices=tuple(
                replace(old.matrices[i], parameter=place[old.matrices[i].parameter]) for i in order
            ),
        ),
        Topology.flat(instance.world),
        instance.costs,
        options=PlannerOptions(max_batch=MAX_BATCH),
        limits=replace(
            limits,
            domains=tuple(limits.domains[n][::-1] for n in numbers),
            domain_of=tuple(numbers.index(limits.domain_of[i]) for i in order if limits.domain_of),
        ),
    )
    assert again.fingerprint() == plan.fingerprint()


@slow
@given(instances())
def test_the_smallest_feasible_cap_in_the_error_is_feasible_and_none_below_it_is(instance):
    if instance.optimum() is not None:
        return
    with pytest.raises(PlanError, match=r"smallest feasible cap is (\d+) bytes") as error:
        instance.solve("auto")
    cap = int(str(error.value).split("feasible cap is ")[1].split()[0])
    enough = replace(instance, limits=replace(instance.limits, memory_bytes=cap))
    assert enough.optimum() is not None
    assert max(enough.solve("auto").state_bytes) <= cap
    less = replace(instance, limits=replace(instance.limits, memory_bytes=cap - 1))
    assert less.optimum() is None


# Some device, priced by the operations of the standard form.
H200 = CostTable("h200", device=AnalyticDevice(7.9e14, 4.3e12, 5e-6, 768.0))


@pytest.mark.parametrize(("owners", "close"), [(24, 1.016), (64, 1.06)])
def test_bound_and_counts_come_close_where_patterns_are_too_many_to_list(owners, close):
    """A vision-language-action mix of 11 shapes."""
    plan = solve(model_specs("vla"), Topology.flat(owners), H200, solver="milp")
    prices = {row.key: row.ms for row in plan.prices}
    problem = build_problem(plan.specs.matrices, owners, plan.limits, prices)
    assert every_pattern(problem, problem.ticks(plan.makespan_ms)) is None
    assert plan.makespan_ms <= close * plan.lower_bound_ms
    assert certify(plan).ok and certify(plan).proven


# ---- how large batches are ---------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout.REDUCED, Layout.SHARDED])
def test_a_batch_is_two_buckets_at_most_or_one_matrix(layout):
    specs, numel = model_specs("llama3-8b"), 2 * (32 << 20) // 2
    plan = solve(
        specs, Topology.flat(8), CostTable.analytic("h100", momentum=layout is Layout.REDUCED),
        layout=layout, solver="greedy", batch_numel=numel,
    )  # fmt: skip
    sizes = Counter()
    for batch in plan.batches:
        each = specs.matrices[batch.matrices[0]].numel
        assert len(batch.matrices) == 1 or len(batch.matrices) * each <= numel
        sizes[each] = max(sizes[each], len(batch.matrices))
    assert certify(plan).ok, str(certify(plan))
    # Larger batches are cheaper, so within the limit they are made.
    assert sizes == {4096 * 14336: 1, 4096 * 4096: 2, 1024 * 4096: 8}


def test_of_equal_prices_the_smaller_batch_wins():
    specs = specs_of(((4, 6, "float32"),) * 12)
    each = CostTable("by the matrix", {(4, 6, "float32"): {b: 1.0 * b for b in range(1, 17)}})
    plan = solve(specs, Topology.flat(2), each, solver="greedy")
    assert {len(batch.matrices) for batch in plan.batches} == {1}
    pairs = CostTable("by pairs", {(4, 6, "float32"): {1: 1.0, 2: 1.5, 4: 3.0, 6: 4.5}})
    plan = solve(specs, Topology.flat(2), pairs, solver="greedy")
    assert {len(batch.matrices) for batch in plan.batches} == {2} and plan.makespan_ms == 4.5


# ---- solvers that fail -------------------------------------------------------------------

# GPT-2 XL's shapes: greedy is 7% above the optimum.
GPT2_XL = ((1600, 4800), (1600, 1600), (1600, 6400))
GPT2_PRICES = {
    (r, c, "bfloat16"): tuple(H200.batch_ms((r, c, "bfloat16"), b) for b in range(1, MAX_BATCH + 1))
    for r, c in GPT2_XL
}
HARD = Instance((*GPT2_PRICES, (1600, 6400, "bfloat16")) * 48, 16, GPT2_PRICES, OwnerLimits())


def test_a_hard_enough_problem_needs_the_solver():
    plan, plain = HARD.solve("milp"), HARD.solve("greedy")
    assert plan.solver == "milp" and plan.search.engine == "HiGHS" and plan.search.note == ""
    assert plan.makespan_ms < plain.makespan_ms
    assert plan.makespan_ms <= plan.lower_bound_ms * 1.0001


def failing(*args, **kwargs):
    raise RuntimeError("crash")


def answering(status: int, sol_status: int, value: float | None):
    """A solver that returns this status with this value for every variable."""

    def solve(self, lp, **kwargs):
        for v in lp.variables():
            v.varValue = value
        for constraint in lp._constraints.values():
            constraint.pi = 0.0
        lp.assignStatus(status, sol_status)
        return status

    return solve


@pytest.mark.parametrize(("fault", "note"), [
    (failing, "HiGHS failed"),
    (answering(0, 0, None), ""),  # a time limit
    (answering(1, 1, float("nan")), "no numbers"),
    (answering(1, 1, 0.0), ""),  # lies: optimal, but nothing is assigned
    (None, "HiGHS is not installed"),
])  # fmt: skip
def test_a_solver_that_fails_or_lies_is_not_believed(fault, note):
    with (
        mock.patch("pulp.HiGHS.actualSolve", fault),
        mock.patch("dmuon.scheduler.solve.has_engine", lambda: fault is not None),
    ):
        plan = HARD.solve("milp", time_limit_s=1.0)
    assert note in plan.search.note and plan.makespan_ms <= HARD.solve("greedy").makespan_ms
    if note:
        assert plan.solver == "greedy" and "this is the greedy plan" in plan.search.note
    certificate = certify(plan)
    assert certificate.ok and certificate.proven


def test_a_plan_that_hit_the_clock_is_marked():
    keys = tuple((8 * i, 8 * i, "float32") for i in range(1, 12) for _ in range(7))
    prices = {k: tuple(k[0] ** 1.7 * b**0.93 for b in range(1, 5)) for k in set(keys)}
    instance = Instance(keys, 6, prices, OwnerLimits())
    plan = instance.solve("milp", time_limit_s=1e-6)
    assert plan.search.hit_time_limit
    assert plan.status in ("time_limit", "optimal")
    assert certify(plan).ok


def test_a_search_that_ran_out_of_work_proves_nothing():
    problem = HARD.problem()
    limit = 2 * simple_bound(problem)
    listed, worth = every_pattern(problem, limit), np.ones(len(problem.shapes), np.int64)
    most = most_worth(problem, limit, worth, listed)
    with mock.patch("dmuon.scheduler.patterns._EXHAUSTED", 1_000):
        assert exhaust(problem, listed, worth, most) == (None, False)
