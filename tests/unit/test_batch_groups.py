"""Batches that run together: what they cost, what bounds them, and who notices a lie about them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.comm.buckets import cut_buckets
from dmuon.comm.routes import Unit, publish_buckets, runs_of, units_of
from dmuon.config import PlannerOptions
from dmuon.report.bottleneck import least_ms
from dmuon.report.report import build_report
from dmuon.scheduler.batches import groups_of
from dmuon.scheduler.batching import Batching
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.grouping import PriceBook
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan import Batch, OwnershipPlan, SquareRow, solve
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError
from tests.unit.models import partitions, plan_of, specs_of

A, B, C = (4, 6, "float32"), (8, 4, "float32"), (4, 4, "float32")  # m = 4, all of them
D, E = (2, 4, "float32"), (4, 6, "bfloat16")  # another m, another dtype
GRAM, OTHER, STANDARD = "gram[2]/torch/float32", "gram[1,3]/torch/float32", "standard/torch/float32"
MAX_BATCH = 3
LARGEST = 6

Key = tuple[int, int, str]


@dataclass(frozen=True)
class Costs:
    """Any prices, kernels and times of m x m parts; ``known`` is how far the latter go."""

    whole: dict[Key, tuple[float, ...]]
    names: dict[Key, tuple[str, ...]]
    squares: dict[tuple[int, str], tuple[float, ...]] = field(default_factory=dict)
    source: str = "made up"

    def batch_ms(self, key, batch):
        return self.whole[key][batch - 1]

    def kernel(self, key, batch):
        return self.names[key][batch - 1]

    def square_ms(self, key, batch):
        row = self.squares.get((min(key[:2]), key[2]), ())
        return row[batch - 1] if batch <= len(row) else None


def physical(sizes: dict[Key, float], fixed: float = 3.0, each: float = 1.0) -> Costs:
    """W = rectangular + square, the square part with a fixed cost that grouping saves."""
    rows = range(1, 17)
    square = tuple(fixed + each * b for b in rows)
    return Costs(
        {key: tuple(n * b + square[b - 1] for b in rows) for key, n in sizes.items()},
        dict.fromkeys(sizes, (GRAM,) * 16),
        {(min(key[:2]), key[2]): square for key in sizes},
    )


@st.composite
def cost_models(draw, keys: Sequence[Key] = (A, B, C, D, E)) -> Costs:
    """Neither monotone nor concave, some kernels that cannot share, some unknown squares."""
    ms = st.floats(0.125, 8.0, width=16)
    kernels = st.sampled_from([GRAM, GRAM, GRAM, OTHER, STANDARD, ""])
    whole = {key: tuple(draw(ms) for _ in range(LARGEST)) for key in keys}
    names = {key: tuple(draw(kernels) for _ in range(LARGEST)) for key in keys}
    known = draw(st.integers(0, LARGEST))
    squares = {
        (min(k[:2]), k[2]): tuple(draw(st.floats(0.0, 8.0, width=16)) for _ in range(known))
        for k in keys
    }
    return Costs(whole, names, squares)


# ---- an independent count of everything that could be done -------------------------------


def set_partitions(items: Sequence) -> Iterator[list[tuple]]:
    if not items:
        yield []
        return
    first, rest = items[0], list(items[1:])
    for size in range(len(rest) + 1):
        for chosen in combinations(range(len(rest)), size):
            block = (first, *(rest[i] for i in chosen))
            others = [item for i, item in enumerate(rest) if i not in chosen]
            for more in set_partitions(others):
                yield [block, *more]


def group_ms(costs: Costs, block: Sequence[tuple[Key, int]]) -> float | None:
    """What batches cost that run together; None where they cannot."""
    whole = sum(costs.batch_ms(key, b) for key, b in block)
    if len(block) == 1:
        return whole
    total = sum(b for _, b in block)
    shared = costs.square_ms(block[0][0], total)
    alike = {(min(key[:2]), key[2], costs.kernel(key, b)) for key, b in block}
    if len(alike) > 1 or len({key for key, _ in block}) < len(block) or total > MAX_BATCH:
        return None
    if shared is None or not next(iter(alike))[2].startswith("gram"):
        return None
    own = sum(min(costs.square_ms(key, b), costs.batch_ms(key, b)) for key, b in block)
    return whole - (own - shared)


def cheapest(costs: Costs, mine: Sequence[Key]) -> float:
    """Over all cuts into batches and all groups of these, of what one owner has in one pool."""
    count = Counter(mine)
    cuts = [
        [[(k, b) for b in parts] for parts in partitions(n, MAX_BATCH)] for k, n in count.items()
    ]
    best = float("inf")
    for cut in product(*cuts):
        batches = [batch for some in cut for batch in some]
        for blocks in set_partitions(batches):
            ms = [group_ms(costs, block) for block in blocks]
            if None not in ms:
                best = min(best, sum(ms))
    return best


def optimum(costs: Costs, keys: Sequence[Key], world: int, limits: OwnerLimits) -> float:
    pools = limits.pool_of or (0,) * len(keys)

    @lru_cache
    def of(mine: tuple[Key, ...]) -> float:
        return cheapest(costs, mine) if mine else 0.0

    def load(owners: Sequence[int], rank: int) -> float:
        held: dict[int, list[Key]] = defaultdict(list)
        for key, owner, pool in zip(keys, owners, pools):
            if owner == rank:
                held[pool].append(key)
        return limits.fixed_ms_of(rank) + sum(of(tuple(sorted(mine))) for mine in held.values())

    return min(
        max(load(owners, rank) for rank in range(world))
        for owners in product(range(world), repeat=len(keys))
        if all(limits.may_own(rank, i) for i, rank in enumerate(owners))
    )


def options() -> PlannerOptions:
    return PlannerOptions(max_batch=MAX_BATCH)


@st.composite
def instances(draw):
    keys = draw(st.lists(st.sampled_from([A, A, B, B, C, D, E]), min_size=1, max_size=5))
    world = draw(st.integers(1, 3))
    fixed = draw(st.sampled_from([(), tuple(0.5 * r for r in range(world))]))
    if world == 1 or draw(st.booleans()):
        return draw(cost_models()), keys, world, OwnerLimits(fixed_ms=fixed)
    pools = (tuple(range(world)), (0,), tuple(range(1, world)))
    pool_of = tuple(draw(st.integers(0, 2)) for _ in keys)
    return draw(cost_models()), keys, world, OwnerLimits(fixed, pools=pools, pool_of=pool_of)


solvers = st.sampled_from(["auto", "greedy", "round_robin", "milp"])


@settings(max_examples=150, deadline=None)
@given(instances(), solvers)
def test_no_assignment_and_no_grouping_beats_the_bound(instance, solver):
    costs, keys, world, limits = instance
    plan = solve(
        specs_of(keys), Topology.flat(world), costs, solver=solver, options=options(), limits=limits
    )
    best = optimum(costs, keys, world, limits)
    # Times count in ticks of 1e-9 ms, rounded price by price.
    assert plan.lower_bound_ms <= best * (1 + 1e-9) + 1e-8
    assert plan.makespan_ms >= best * (1 - 1e-9) - 1e-8
    if plan.status == "optimal":
        assert plan.makespan_ms == pytest.approx(best, abs=1e-8)
    certificate = certify(plan)
    assert certificate.ok and certificate.proven, certificate
    assert certificate.makespan_ms == pytest.approx(plan.makespan_ms, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(instances(), solvers)
def test_a_plan_costs_exactly_its_batches_and_groups(instance, solver):
    costs, keys, world, limits = instance
    plan = solve(
        specs_of(keys), Topology.flat(world), costs, solver=solver, options=options(), limits=limits
    )
    blocks = [[b] for b, batch in enumerate(plan.batches) if batch.group < 0]
    blocks += groups_of(plan.batches).values()
    loads = [limits.fixed_ms_of(rank) for rank in range(world)]
    for members in blocks:
        batches = [plan.batches[b] for b in members]
        parts = [(keys[b.matrices[0]], len(b.matrices)) for b in batches]
        ms = group_ms(costs, parts)
        assert ms is not None, "a group that cannot run in one call"
        assert sum(b.ms for b in batches) == pytest.approx(ms, abs=1e-8)
        assert min(b.ms for b in batches) >= 0
        if len(parts) > 1:
            assert ms < sum(costs.batch_ms(*part) for part in parts), "a group that saves nothing"
            assert (
                len({limits.pool_of[i] for b in batches for i in b.matrices if limits.pool_of}) < 2
            )
        for batch, part in zip(batches, parts):
            assert batch.kernel == costs.kernel(*part)
        loads[batches[0].owner] += ms
    assert plan.loads_ms == pytest.approx(tuple(loads), abs=1e-8)
    numbers = list(groups_of(plan.batches))
    assert numbers == list(range(len(numbers)))


@settings(max_examples=60, deadline=None)
@given(instances(), st.data())
def test_the_order_of_the_matrices_does_not_matter(instance, data):
    costs, keys, world, limits = instance
    order = data.draw(st.permutations(range(len(keys))))
    specs = specs_of(keys)
    moved = ModelSpecs(
        tuple(specs.parameters[i] for i in order),
        tuple(replace(specs.matrices[i], parameter=at) for at, i in enumerate(order)),
    )
    pool_of = tuple(limits.pool_of[i] for i in order) if limits.pool_of else ()
    plans = [
        solve(s, Topology.flat(world), costs, options=options(), limits=bound)
        for s, bound in ((specs, limits), (moved, replace(limits, pool_of=pool_of)))
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()


@settings(max_examples=40, deadline=None)
@given(instances())
def test_json_gives_an_equal_plan_back(instance):
    costs, keys, world, limits = instance
    plan = solve(specs_of(keys), Topology.flat(world), costs, options=options(), limits=limits)
    again = OwnershipPlan.from_json(plan.to_json())
    assert again == plan and again.fingerprint() == plan.fingerprint()
    assert certify(again) == certify(plan)


# ---- groups ------------------------------------------------------------------------------

PHYSICAL = physical({A: 1.0, B: 2.0, C: 0.5})


def test_batches_of_one_short_side_run_together():
    plan = solve(specs_of([A, B, C]), Topology.flat(1), PHYSICAL)
    assert [(b.group, b.kernel) for b in plan.batches] == [(0, GRAM)] * 3
    assert plan.makespan_ms == pytest.approx(3.5 + 3.0 + 3.0)  # one fixed cost in place of three
    assert plan.status == "optimal", "one group of all that there is cannot be beaten"
    assert plan.makespan_ms == plan.lower_bound_ms


def test_other_short_sides_dtypes_and_kernels_run_alone():
    costs = physical({A: 1.0, D: 1.0, E: 1.0})
    assert not groups_of(solve(specs_of([A, D, E]), Topology.flat(1), costs).batches)
    named = {A: (GRAM,) * 16, B: (OTHER,) * 16, C: (STANDARD,) * 16}
    costs = replace(PHYSICAL, names=named)
    plan = solve(specs_of([A, B, C]), Topology.flat(1), costs)
    assert not groups_of(plan.batches) and plan.squares == ()


def test_a_group_is_no_larger_than_a_batch_may_be():
    keys = [A] * 5 + [B] * 5 + [C] * 5
    for most in (1, 2, 3, 4, 7):
        plan = solve(
            specs_of(keys), Topology.flat(2), PHYSICAL, options=PlannerOptions(max_batch=most)
        )
        sizes = [
            sum(len(plan.batches[b].matrices) for b in members)
            for members in groups_of(plan.batches).values()
        ]
        assert max(sizes, default=0) <= most
        assert bool(sizes) == (most in (2, 4, 7))  # all matrices fill batches of 1 or 3


def test_without_squares_or_with_nothing_to_save_all_is_as_without_groups():
    keys = [A] * 4 + [B] * 3
    unknown = replace(PHYSICAL, squares={})
    linear = physical({A: 1.0, B: 2.0}, fixed=0.0)
    for costs in (unknown, linear):
        bare = CostTable("made up", {k: dict(enumerate(row, 1)) for k, row in costs.whole.items()})
        with_names, without = (
            solve(specs_of(keys), Topology.flat(3), c, options=options()) for c in (costs, bare)
        )
        assert not groups_of(with_names.batches)
        for name in ("owners", "makespan_ms", "lower_bound_ms", "status", "proof", "alternatives"):
            assert getattr(with_names, name) == getattr(without, name)


def test_a_saving_changes_who_owns_what():
    """Apart, two of a shape are best kept together; in groups any two are, and these are even."""
    whole = {A: (4.0, 5.0), B: (6.0, 7.0)}
    costs = Costs(whole, dict.fromkeys(whole, (GRAM, GRAM)), {(4, "float32"): (3.0, 3.0)})
    specs = specs_of([A, B, A, B])
    apart = solve(specs, Topology.flat(2), replace(costs, squares={}))
    plan = solve(specs, Topology.flat(2), costs)
    assert apart.makespan_ms == plan.makespan_ms == 7.0
    assert plan.status == "optimal"
    whole[B] = (4.5, 8.0)
    apart = solve(specs, Topology.flat(2), replace(costs, squares={}))
    plan = solve(specs, Topology.flat(2), costs)
    assert apart.makespan_ms == 8.0 and plan.makespan_ms == 5.5
    assert plan.status == "optimal"


def test_the_baselines_are_grouped_too():
    plan = solve(specs_of([A, B, C]), Topology.flat(1), PHYSICAL, solver="milp")
    assert {ms for _, ms in plan.alternatives} == {plan.makespan_ms}


parts_lists = st.lists(
    st.tuples(st.sampled_from([A, B, C, (4, 9, "float32")]), st.integers(1, 3)),
    min_size=1,
    max_size=6,
)


def book_of(row: Sequence[int]) -> PriceBook:
    keys = (A, B, C, (4, 9, "float32"))
    return PriceBook(
        dict.fromkeys(keys, (20,) * 3),
        dict.fromkeys(keys, (GRAM,) * 3),
        {(4, "float32"): tuple(row)},
    )


@settings(max_examples=150, deadline=None)
@given(parts_lists, st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_few_batches_are_grouped_best_and_many_never_badly(parts, row):
    book = book_of(row)

    def worth(groups) -> int:
        return sum(book.saving([parts[i] for i in group]) for group in groups)

    best = max(worth(blocks) for blocks in set_partitions(range(len(parts))))
    exact = book.partition(parts)
    with mock.patch("dmuon.scheduler.grouping._MOST_EXACT", 0):
        fitted = book.partition(parts)
    assert worth(exact) == max(best, 0)
    assert 0 <= worth(fitted) <= worth(exact)
    for groups in (exact, fitted):
        assert len({i for group in groups for i in group}) == sum(map(len, groups))
        for group in groups:
            members = [parts[i] for i in group]
            assert len(group) > 1 and book.saving(members) > 0
            shares = book.shares(members)
            assert sum(shares) == book.saving(members)
            assert all(0 <= s <= book.whole[k][b - 1] for s, (k, b) in zip(shares, members))


@settings(max_examples=150, deadline=None)
@given(
    parts_lists,
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.one_of(st.none(), st.integers(0, 90)),
)
def test_the_lowered_prices_are_below_every_group(parts, row, within):
    book = book_of(row)
    there = Counter()
    for key, size in parts:
        there[key] += size
    low = {
        key: prices
        for (key, _), prices in book.lowered_all(
            [(key, -1, tuple(range(n))) for key, n in there.items()], within
        ).items()
    }
    assert all(0 <= a <= b for key, prices in low.items() for a, b in zip(prices, book.whole[key]))
    for size in range(1, len(parts) + 1):
        for group in combinations(parts, size):
            total = sum(book.whole[k][b - 1] for k, b in group) - book.saving(group)
            if within is None or total <= within:
                assert sum(low[k][b - 1] for k, b in group) <= total


def test_many_batches_on_one_owner_are_grouped_in_little_time():
    keys = [(64, 64 + i, "float32") for i in range(40)] * 3
    costs = physical(dict.fromkeys(set(keys), 1.0))
    plan = solve(specs_of(keys), Topology.flat(1), costs)
    grouped = sum(len(members) for members in groups_of(plan.batches).values())
    assert grouped == len(plan.batches) == 40
    assert certify(plan).ok


def test_the_floor_of_a_matrix_is_what_it_costs_in_the_best_group():
    plan = solve(specs_of([A, B, C]), Topology.flat(1), PHYSICAL)
    alone = {row.key: row.ms[0] for row in plan.prices}
    assert all(0 < ms < alone[key] for key, ms in least_ms(plan).items())


def test_only_groups_that_fit_a_better_plan_lower_the_bound():
    """With an owner for each matrix no group fits, and the costliest matrix is the floor."""
    plan = solve(specs_of([A, B, C]), Topology.flat(3), PHYSICAL)
    assert plan.makespan_ms == plan.lower_bound_ms == PHYSICAL.batch_ms(B, 1)
    assert plan.status == "optimal" and certify(plan).proven
    assert plan.proof.within == round(plan.makespan_ms * 1e9)
    for within in (None, 100 * plan.proof.within, plan.proof.within // 2):
        proof = replace(plan.proof, within=within)
        assert "claims" in str(certify(replace(plan, proof=proof)))


# ---- a plan that is invalid --------------------------------------------------------------


def hand_made(*batches: Batch, keys=(A, B, D, E)) -> OwnershipPlan:
    owners = [0] * len(keys)
    return replace(plan_of(specs_of(keys), owners, 2), batches=batches)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([Batch(0, (0,), 1.0, GRAM, 0), Batch(1, (1,), 1.0, GRAM, 0)], "same owner"),
        ([Batch(0, (0,), 1.0, GRAM, 0), Batch(0, (1,), 1.0, OTHER, 0)], "same kernel"),
        ([Batch(0, (0,), 1.0, "", 0), Batch(0, (1,), 1.0, "", 0)], "need a Gram kernel"),
        ([Batch(0, (0,), 1.0, STANDARD, 0), Batch(0, (1,), 1.0, STANDARD, 0)], "a Gram kernel"),
        ([Batch(0, (0,), 1.0, "gram", 0), Batch(0, (1,), 1.0, "gram", 0)], "no kernel choice"),
        ([Batch(0, (0,), 1.0, GRAM, -2), Batch(0, (1,), 1.0)], "a group >= 0"),
    ],
)
def test_a_group_that_cannot_run_is_refused(batches, message):
    with pytest.raises(PlanError, match=message):
        hand_made(*batches, Batch(0, (2,), 1.0), Batch(0, (3,), 1.0))


def test_a_group_over_short_sides_dtypes_or_of_one_shape_twice_is_refused():
    rest = (Batch(0, (1,), 1.0),)
    for i, j in ((2, 3), (3, 2)):
        grouped = (Batch(0, (0,), 1.0, GRAM, 0), Batch(0, (i,), 1.0, GRAM, 0))
        with pytest.raises(PlanError, match="same short side and dtype"):
            hand_made(*grouped, Batch(0, (j,), 1.0), *rest)
    grouped = (Batch(0, (0,), 1.0, GRAM, 0), Batch(0, (1,), 1.0, GRAM, 0))
    with pytest.raises(PlanError, match="make them one batch"):
        hand_made(*grouped, keys=(A, A))


def test_kernels_and_groups_are_part_of_what_runs_where():
    plan = hand_made(Batch(0, (0,), 1.0, GRAM), Batch(0, (1,), 1.0, GRAM), keys=(A, B))
    other = hand_made(Batch(0, (0,), 1.0, OTHER), Batch(0, (1,), 1.0, GRAM), keys=(A, B))
    grouped = hand_made(Batch(0, (0,), 1.0, GRAM, 0), Batch(0, (1,), 1.0, GRAM, 0), keys=(A, B))
    assert len({p.fingerprint() for p in (plan, other, grouped)}) == 3


def test_plans_of_the_second_format_are_still_read():
    plan = solve(specs_of([A, B]), Topology.flat(2), CostTable.analytic())
    data = json.loads(plan.to_json()) | {"format": 2}
    del data["squares"]
    data["batches"] = [fields[:3] for fields in data["batches"]]
    data["prices"] = [fields[:3] for fields in data["prices"]]
    old = OwnershipPlan.from_json(json.dumps(data))
    assert old == plan and certify(old).proven


# ---- a plan that lies --------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> OwnershipPlan:
    """Two owners with two groups of three batches and one without a group."""
    keys = [A, B, C] * 2 + [D]
    costs = physical({A: 1.0, B: 2.0, C: 0.5, D: 0.25})
    made = solve(specs_of(keys), Topology.flat(2), costs, options=PlannerOptions(max_batch=8))
    assert groups_of(made.batches) and certify(made).ok
    return made


def in_group(plan: OwnershipPlan) -> int:
    return next(b for b, batch in enumerate(plan.batches) if batch.group >= 0)


def with_batch(plan: OwnershipPlan, at: int, **changes) -> OwnershipPlan:
    batches = list(plan.batches)
    batches[at] = replace(batches[at], **changes)
    return replace(plan, batches=tuple(batches))


def findings(plan: OwnershipPlan) -> str:
    certificate = certify(plan)
    assert not certificate.ok, "a lie that nobody noticed"
    return str(certificate)


def test_a_wrong_kernel_is_found(plan):
    group = plan.batches[in_group(plan)].group
    batches = [replace(b, kernel=OTHER) if b.group == group else b for b in plan.batches]
    assert "its price is of" in findings(replace(plan, batches=tuple(batches)))
    alone = next(b for b, batch in enumerate(plan.batches) if batch.group < 0)
    assert "its price is of" in findings(with_batch(plan, alone, kernel=STANDARD))


def test_a_saving_without_a_group_and_a_group_without_its_saving_are_found(plan):
    at = in_group(plan)
    assert "its price is" in findings(with_batch(plan, at, group=-1))
    costly = tuple(replace(b, ms=b.ms + 1.0) if b.group >= 0 else b for b in plan.batches)
    assert "its price is" in findings(replace(plan, batches=costly))


def test_cheaper_m_x_m_parts_of_many_are_found(plan):
    (row,) = plan.squares
    count = max(
        sum(len(plan.batches[b].matrices) for b in members)
        for members in groups_of(plan.batches).values()
    )
    ms = [*row.ms]
    ms[count - 1] /= 2
    assert "its price is" in findings(replace(plan, squares=(SquareRow(row.key, tuple(ms)),)))


def test_a_bound_without_its_m_x_m_parts_is_found(plan):
    """With prices that are not lowered the same duals would prove more than is true."""
    bare = tuple(replace(b, group=-1) for b in plan.batches)
    assert "no price" in findings(replace(plan, squares=()))
    assert not certify(replace(plan, squares=(), batches=bare)).ok


def test_more_m_x_m_parts_than_were_known_lower_the_bound(plan):
    (row,) = plan.squares
    cheap = SquareRow(row.key, (*row.ms[:-1], row.ms[-1] / 100))
    assert "duals prove" in findings(replace(plan, squares=(cheap,)))


def test_a_group_over_two_pools_is_found():
    limits = OwnerLimits(pools=((0, 1), (0,)), pool_of=(0, 1))
    made = solve(specs_of([A, B]), Topology.flat(2), PHYSICAL, limits=limits)
    assert not groups_of(made.batches) and certify(made).ok
    batches = tuple(replace(b, owner=0, group=0) for b in made.batches)
    assert "different pools" in findings(replace(made, batches=batches))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("squares", 0, 1), []),
        (("squares", 0, 1), ["1"]),
        (("squares", 0, 1, 0), -1.0),
        (("squares", 0, 1, 0), float("nan")),
        (("squares", 0, 0), [4]),
        (("squares", 0, 0), [5, "float32"]),
        (("squares",), []),
        (("prices", 0, 3), []),
        (("prices", 0, 3, 0), "gram"),
        (("prices", 0, 3), [1]),
        (("batches", 0, 3), ""),
        (("batches", 0, 3), None),
        (("batches", 0, 4), 7.0),
        (("batches", 0, 4), -1),
        (("batches", 0, 4), 17),
    ],
)
def test_a_damaged_file_is_refused_or_invalid_but_never_a_traceback(plan, path, value):
    data = json.loads(plan.to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        loaded = OwnershipPlan.from_json(json.dumps(data))
    except PlanError:
        return
    findings(loaded)


# ---- what travels ------------------------------------------------------------------------


def test_runs_of_a_group_follow_each_other_where_its_first_matrix_is():
    keys = [A, D, B, D, C]
    batches = (
        Batch(0, (0,), 1.0, GRAM, 3),
        Batch(0, (1,), 1.0),
        Batch(0, (2,), 1.0, GRAM, 3),
        Batch(1, (3,), 1.0, STANDARD),
        Batch(0, (4,), 1.0, GRAM, 3),
    )
    made = hand_made(*batches, keys=keys)
    whole = units_of(made, [0] * 5)
    assert [(u.matrices, u.kernel, u.fused) for u in whole] == [
        ((0,), GRAM, 0), ((2,), GRAM, 0), ((4,), GRAM, 0), ((1,), "", -1), ((3,), STANDARD, -1)
    ]  # fmt: skip
    cut = units_of(made, [0, 0, 1, 0, 0])
    assert [(u.matrices, u.group, u.fused) for u in cut] == [
        ((0,), 0, 0), ((4,), 0, 0), ((2,), 1, -1), ((1,), 0, -1), ((3,), 0, -1)
    ]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(instances(), st.data())
def test_units_of_a_plan_keep_kernels_and_groups(instance, data):
    costs, keys, world, limits = instance
    made = solve(specs_of(keys), Topology.flat(world), costs, options=options(), limits=limits)
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(keys), max_size=len(keys)))
    units = units_of(made, groups)
    batch_of = {i: batch for batch in made.batches for i in batch.matrices}
    expected: dict[tuple[int, int], int] = Counter()
    for unit in units:
        batch = batch_of[unit.matrices[0]]
        assert unit.kernel == batch.kernel
        if batch.group >= 0:
            expected[batch.group, unit.group] += 1
    fused: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for unit in units:
        group = batch_of[unit.matrices[0]].group
        assert (unit.fused >= 0) == (group >= 0 and expected[group, unit.group] > 1)
        if unit.fused >= 0:
            fused[unit.fused].add((group, unit.group))
    assert all(len(found) == 1 for found in fused.values())
    assert sorted(fused) == list(range(len(fused)))
    runs = runs_of(units, range(len(units)))
    assert len(runs) == len(fused) + sum(unit.fused < 0 for unit in units)


@st.composite
def unit_lists(draw) -> list[Unit]:
    units, number = [], 0
    for _ in range(draw(st.integers(1, 8))):
        owner, size = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        for _ in range(size):
            ms = draw(st.floats(0, 5, width=16))
            rows = draw(st.integers(1, 6))
            fused = number if size > 1 else -1
            units.append(Unit(owner, 0, (len(units),), rows, 4, ms, GRAM, fused))
        number += size > 1
    return units


@settings(max_examples=150, deadline=None)
@given(unit_lists(), st.integers(1, 300), st.integers(1, 6))
def test_buckets_never_cut_a_run(units, size, least):
    published = [bucket.units for bucket in publish_buckets(units, size, 2)]
    wired = cut_buckets(units, range(len(units)), size, least, 2)
    for buckets in (published, wired):
        assert sorted(u for bucket in buckets for u in bucket) == list(range(len(units)))
        where = {u: n for n, bucket in enumerate(buckets) for u in bucket}
        homes: dict[int, set[int]] = defaultdict(set)
        for u, unit in enumerate(units):
            if unit.fused >= 0:
                homes[unit.fused].add(where[u])
        assert all(len(found) == 1 for found in homes.values())
    for bucket in published:
        runs = runs_of(units, bucket)
        assert len(runs) == 1 or sum(units[u].numel for u in bucket) * 2 <= size


# ---- what the report says ----------------------------------------------------------------


def test_the_report_names_kernels_and_what_groups_save(plan):
    report = build_report(plan)
    text = " ".join(str(report).split())
    assert f"kernels {GRAM} {len(plan.batches)} batches" in text
    alone = {row.key: row.ms for row in plan.prices}
    saved = sum(
        alone[plan.specs.matrices[b.matrices[0]].key][len(b.matrices) - 1] - b.ms
        for b in plan.batches
    )
    assert f"{saved:.3f} ms less over all ranks" in text
    data = report.to_dict()
    assert data["together"]["saved_ms"] == pytest.approx(saved)
    assert data["kernels"] == [
        {"kernel": GRAM, "batches": len(plan.batches), "matrices": len(plan.specs.matrices)}
    ]


def test_the_page_says_it_too_and_a_plan_without_kernels_points_to_the_rule(plan, tmp_path):
    build_report(plan).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert GRAM in page and "ms less over all ranks" in page
    bare = build_report(solve(specs_of([A, B]), Topology.flat(2), CostTable.analytic()))
    assert "chosen by the fixed rule at run time" in " ".join(str(bare).split())
    assert bare.to_dict()["together"] is None


def test_ranks_are_alike_only_if_they_run_the_same_groups():
    from dmuon.report.measured import compare

    keys = [A, B, A, B]
    batches = [
        Batch(0, (0,), 1.0, GRAM, 0),
        Batch(0, (1,), 1.0, GRAM, 0),
        Batch(1, (2,), 1.0, GRAM),
        Batch(1, (3,), 1.0, GRAM),
    ]
    assert compare(hand_made(*batches, keys=keys), (1.0, 3.0)).alike_ms == (1.0, 3.0)
    batches[2:] = (replace(b, group=1) for b in batches[2:])
    assert compare(hand_made(*batches, keys=keys), (1.0, 3.0)).alike_ms == (2.0, 2.0)


# ---- exchange of owners ------------------------------------------------------------------


def test_ranks_whose_own_matrices_group_differently_are_not_exchanged():
    """Equal fixed loads by single prices, unlike ones once the forced matrices run together."""
    keys = [A, B, C, A]
    whole = {A: (4.0, 9.0), B: (4.0, 9.0), C: (8.0, 9.0)}
    costs = Costs(whole, dict.fromkeys(whole, (GRAM,) * 2), {(4, "float32"): (3.0, 3.0)})
    limits = OwnerLimits(pools=((0,), (1,), (0, 1)), pool_of=(1, 1, 0, 2))
    plan = solve(specs_of(keys), Topology.flat(2), costs, limits=limits)
    assert plan.loads_ms == (8.0, 9.0) and plan.status == "optimal"


def test_batching_prices_counts_as_the_plan_does():
    from dmuon.scheduler.plan import price_rows, problem_of, square_rows

    specs = specs_of([A, A, B, C, D])
    rows = price_rows(specs, PHYSICAL_D, 4)
    squares = square_rows(specs, PHYSICAL_D, 4, rows)
    assert [row.key for row in squares] == [(4, "float32")] and len(squares[0].ms) == 4
    topology = Topology.flat(2)
    whole = problem_of(specs, topology, OwnerLimits(), rows)
    lowered = problem_of(specs, topology, OwnerLimits(), rows, squares=squares)
    batching = Batching(whole, lowered, PriceBook.of(rows, squares, whole.ticks_per_ms))
    plan = solve(specs, topology, PHYSICAL_D, options=PlannerOptions(max_batch=4))
    counts = [[0] * len(whole.kinds) for _ in range(2)]
    for s, members in enumerate(whole.members):
        for i in members:
            counts[plan.owners[i]][s] += 1
    import numpy as np

    loads = batching.loads(np.array(counts))
    assert [whole.ms(t) for t in loads] == pytest.approx(plan.loads_ms)
    assert (loads <= whole.loads(np.array(counts))).all()
    assert (loads >= lowered.loads(np.array(counts))).all()


PHYSICAL_D = physical({A: 1.0, B: 2.0, C: 0.5, D: 0.25})
