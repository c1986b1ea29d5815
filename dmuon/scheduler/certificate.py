"""Checks a plan by itself: what it costs, what it may do, and that no plan costs less.

No solver is asked and nothing is believed that the plan says of itself: the makespan is added up
from its batches and stored prices, and the lower bound is computed again from its stored duals
(see `proof`). All arithmetic is on integers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dmuon.scheduler.exhaustive import counts_within, is_small
from dmuon.scheduler.plan import OwnershipPlan, problem_of
from dmuon.scheduler.problem import Problem
from dmuon.scheduler.proof import bound_of

__all__ = ["Certificate", "certify"]

# What numbers of the wrong kind or size in a saved plan end in.
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, ArithmeticError)


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
    """Check a plan and its lower bound. Takes about as long as one step of planning."""
    try:
        return _certify(plan)
    except _MALFORMED as error:
        findings = (f"the stored prices, limits or duals do not fit the model: {error}",)
        return Certificate(False, False, math.inf, 0.0, findings)


def _certify(plan: OwnershipPlan) -> Certificate:
    plan.limits.check(len(plan.specs.matrices), plan.topology.world)
    if not plan.prices and plan.specs.matrices:
        return _without_prices(plan)
    problem = problem_of(plan.specs, plan.topology, plan.limits, plan.prices, plan.layout)
    wrong = [*_wrong_batches(plan, problem), *_wrong_owners(plan)]
    makespan = _executed(plan, problem)
    if plan.proof is None:
        wrong_bound, bound = ["the plan stores no proof of its lower bound"], 0
    else:
        wrong_bound, bound = [], _bound(plan, problem, makespan)
        claimed = round(plan.lower_bound_ms * problem.ticks_per_ms)
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


def _bound(plan: OwnershipPlan, problem: Problem, makespan: int) -> int:
    assert plan.proof is not None
    try:
        bound = bound_of(problem, plan.proof.dual, makespan)
    except ValueError:
        return 0  # duals of another problem prove nothing
    settled = plan.proof.exhaustive and is_small(problem)
    if settled and bound < makespan and counts_within(problem, makespan - 1) is None:
        return makespan
    return bound


def _ticks(problem: Problem) -> dict[tuple[object, int], int]:
    """(shape, batch size) -> ticks"""
    kinds = [*problem.kinds, *(group.kind for group in problem.forced)]
    prices = {kind.key: kind.batch_ticks for kind in kinds}
    return {(key, b): ticks for key, row in prices.items() for b, ticks in enumerate(row, 1)}


def _executed(plan: OwnershipPlan, problem: Problem) -> int:
    """Ticks of the busiest owner, batch by batch."""
    ticks = _ticks(problem)
    loads = problem.fixed.copy()
    for group in problem.forced:
        loads[group.rank] -= group.ticks  # they are among the plan's batches
    for batch in plan.batches:
        key = plan.specs.matrices[batch.matrices[0]].key
        loads[batch.owner] += ticks.get((key, len(batch.matrices)), 0)
    return int(loads.max())


def _wrong_batches(plan: OwnershipPlan, problem: Problem) -> list[str]:
    ticks = _ticks(problem)
    found = []
    for batch in plan.batches:
        key, size = plan.specs.matrices[batch.matrices[0]].key, len(batch.matrices)
        if plan.limits.pool_of and len({plan.limits.pool_of[i] for i in batch.matrices}) > 1:
            found.append(f"a batch on rank {batch.owner} mixes matrices of different pools")
        expected = ticks.get((key, size))
        if expected is None:
            found.append(f"a batch of {size} matrices {key[0]} x {key[1]} has no price")
        elif abs(expected - round(batch.ms * problem.ticks_per_ms)) > 1:
            found.append(
                f"a batch of {size} matrices {key[0]} x {key[1]} is planned with {batch.ms:.6g} "
                f"ms; its price is {problem.ms(expected):.6g} ms"
            )
    return _short(found)


def _wrong_owners(plan: OwnershipPlan) -> list[str]:
    found = [
        f"rank {rank} may not own {plan.specs.matrices[i].name}"
        for i, rank in enumerate(plan.owners)
        if not plan.limits.may_own(rank, i)
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
