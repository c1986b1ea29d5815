"""Checks a plan by itself: what it costs, what it may do, and that no plan costs less.

No solver is asked and nothing is believed that the plan says of itself: the makespan is added up
from its batches, its groups and its stored prices, and the lower bound is computed again from its
stored duals (see `proof`) and the prices that no grouping gets below (see `grouping`). All
arithmetic is on integers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dmuon.scheduler.batches import Batch, groups_of
from dmuon.scheduler.cost_entries import square_key
from dmuon.scheduler.exhaustive import counts_within, is_small
from dmuon.scheduler.grouping import Part, PriceBook
from dmuon.scheduler.plan import OwnershipPlan, bounding_problem
from dmuon.scheduler.problem import Problem
from dmuon.scheduler.proof import bound_of
from dmuon.types import SizeError

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on a plan. ``str()`` reads as a sentence or two.

    ``ok``: nothing that the plan claims is wrong. ``proven``: the lower bound was computed anew
    from the stored duals. ``findings`` are what is wrong or missing.
    """

    ok: bool
    proven: bool
    makespan_ms: float
    lower_bound_ms: float
    findings: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """``makespan / lower bound - 1``"""
        return self.makespan_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0

    def __str__(self) -> str:
        head = f"makespan {self.makespan_ms:.6g} ms"
        if self.lower_bound_ms:
            head += f", no plan is faster than {self.lower_bound_ms:.6g} ms (gap {self.gap:.3%})"
        if self.ok and self.proven:
            return f"certificate valid: {head}"
        verdict = "plan valid, bound not proven" if self.ok else "certificate INVALID"
        return "\n".join([f"{verdict}: {head}", *(f"- {f}" for f in self.findings)])


def certify(plan: OwnershipPlan) -> Certificate:
    """Check a plan and its lower bound. Takes about as long as one step of planning.

    However the numbers in it are chosen, that is seconds: knapsacks that would take longer are
    solved coarsely, as they are in planning, and prove less (see `proof.bound_of`).

    Raises:
        SizeError: so many matrices, prices and pools that this would take too long.
    """
    try:
        return _certify(plan)
    except SizeError:
        raise
    except ValueError as error:
        findings = (f"the stored prices, limits or duals do not fit the model: {error}",)
        return Certificate(False, False, math.inf, 0.0, findings)


def _certify(plan: OwnershipPlan) -> Certificate:
    plan.limits.check(len(plan.specs.matrices), plan.topology.world)
    if not plan.prices and plan.specs.matrices:
        return _without_prices(plan)
    problem = bounding_problem(plan)
    book = PriceBook.of(plan.prices, plan.squares, problem.ticks_per_ms)
    wrong = [*_wrong_batches(plan, problem, book), *_wrong_owners(plan)]
    makespan = _executed(plan, problem, book)
    claimed = round(plan.lower_bound_ms * problem.ticks_per_ms)
    if plan.proof is None:
        wrong_bound, bound = ["the plan stores no proof of its lower bound"], 0
    else:
        wrong_bound, bound = [], _bound(plan, problem, makespan, claimed)
        if bound < claimed:
            wrong.append(
                f"the plan claims a lower bound of {plan.lower_bound_ms:.6g} ms; its duals prove "
                f"{problem.ms(bound):.6g} ms"
            )
    if plan.proof is not None and plan.status == "optimal" and bound < makespan:
        wrong.append("the plan claims to be optimal, which its proof does not show")
    return Certificate(
        not wrong,
        plan.proof is not None and not wrong,
        problem.ms(makespan),
        problem.ms(bound),
        tuple(wrong + wrong_bound),
    )


def _without_prices(plan: OwnershipPlan) -> Certificate:
    """A plan by hand, or one of the first format: there is nothing to compute times from."""
    findings = [
        "the plan stores no prices: its times are what it claims, and nothing bounds them",
        *_wrong_owners(plan),
    ]
    return Certificate(len(findings) == 1, False, plan.makespan_ms, 0.0, tuple(findings))


def _bound(plan: OwnershipPlan, problem: Problem, makespan: int, claimed: int) -> int:
    assert plan.proof is not None
    within = plan.proof.within
    if within is not None:
        # Plans that take longer have other prices, but none of them is faster than that.
        makespan = min(makespan, within)
    try:
        bound = bound_of(problem, plan.proof.dual, makespan)
    except ValueError:
        return 0  # duals of another problem prove nothing
    if plan.proof.exhaustive and is_small(problem):
        # Where batches are grouped, the bound may be settled and yet lie below the makespan.
        for settled in (makespan, min(claimed, makespan)):
            if settled > bound and counts_within(problem, settled - 1) is None:
                return settled
    return bound


def _part(plan: OwnershipPlan, batch: Batch) -> Part:
    return plan.specs.matrices[batch.matrices[0]].key, len(batch.matrices)


def _price(book: PriceBook, part: Part) -> int | None:
    """Ticks of a batch alone; None where it has no price."""
    key, size = part
    row = book.whole.get(key, ())
    return row[size - 1] if size <= len(row) else None


def _group_parts(plan: OwnershipPlan) -> list[tuple[list[int], list[Part]]]:
    """The batches of each group, and their parts."""
    groups = groups_of(plan.batches).values()
    return [(members, [_part(plan, plan.batches[b]) for b in members]) for members in groups]


def _executed(plan: OwnershipPlan, problem: Problem, book: PriceBook) -> int:
    """Ticks of the busiest owner, batch by batch, less what its groups save."""
    loads = problem.fixed.copy()
    for group in problem.forced:
        loads[group.rank] -= group.ticks  # they are among the plan's batches
    for batch in plan.batches:
        loads[batch.owner] += _price(book, _part(plan, batch)) or 0
    for members, parts in _group_parts(plan):
        if all(_price(book, part) is not None for part in parts):
            loads[plan.batches[members[0]].owner] -= book.saving(parts)
    return int(loads.max())


def _shares(plan: OwnershipPlan, book: PriceBook) -> dict[int, int]:
    """Ticks by which each batch of a group is cheaper than alone."""
    shares: dict[int, int] = {}
    for members, parts in _group_parts(plan):
        if all(_price(book, part) is not None for part in parts):
            shares.update(zip(members, book.shares(parts), strict=True))
    return shares


def _wrong_batches(plan: OwnershipPlan, problem: Problem, book: PriceBook) -> list[str]:
    found, shares = _wrong_groups(plan, book), _shares(plan, book)
    for b, batch in enumerate(plan.batches):
        key, size = _part(plan, batch)
        name = f"a batch of {size} matrices {key[0]} x {key[1]}"
        if plan.limits.pool_of and len({plan.limits.pool_of[i] for i in batch.matrices}) > 1:
            found.append(f"a batch on rank {batch.owner} mixes matrices of different pools")
        alone = _price(book, (key, size))
        if alone is None:
            found.append(f"{name} has no price")
            continue
        expected = alone - shares.get(b, 0)
        if abs(expected - round(batch.ms * problem.ticks_per_ms)) > 1:
            found.append(
                f"{name} is planned with {batch.ms:.6g} ms; its price is "
                f"{problem.ms(expected):.6g} ms"
            )
        kernel = book.kernels[key][size - 1]
        if batch.kernel != kernel:
            found.append(
                f"{name} is planned with the kernel {batch.kernel!r}; its price is of {kernel!r}"
            )
    return _short(found)


def _wrong_groups(plan: OwnershipPlan, book: PriceBook) -> list[str]:
    found = []
    for members, parts in _group_parts(plan):
        (m, _), count = square_key(parts[0][0]), sum(size for _, size in parts)
        name = f"a group of {count} matrices with m = {m}"
        pools = {
            plan.limits.pool_of[plan.batches[b].matrices[0]] for b in members if plan.limits.pool_of
        }
        if len(pools) > 1:
            found.append(f"{name} mixes matrices of different pools")
        row = book.squares.get(square_key(parts[0][0]), ())
        if len(parts) > 1 and count > len(row):
            found.append(f"{name} has no price")
    return found


def _wrong_owners(plan: OwnershipPlan) -> list[str]:
    pools, pool_of = [frozenset(pool) for pool in plan.limits.pools], plan.limits.pool_of
    found = [
        f"rank {rank} may not own {plan.specs.matrices[i].name}"
        for i, rank in enumerate(plan.owners)
        if pool_of and rank not in pools[pool_of[i]]
    ]
    cap = plan.limits.memory_bytes
    found += [
        f"rank {rank} stores {stored} bytes, more than owner_memory_bytes={cap}"
        for rank, stored in enumerate(plan.state_bytes)
        if cap is not None and stored > cap
    ]
    return _short(found)


def _short(findings: list[str]) -> list[str]:
    times = Counter(findings)
    lines = [line if n == 1 else f"{line} ({n} times)" for line, n in times.items()]
    return lines if len(lines) <= 5 else [*lines[:5], f"... and {len(lines) - 5} more"]
