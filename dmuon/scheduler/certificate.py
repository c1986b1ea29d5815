"""Independent check of a plan: its makespan, its bound, its limits.

The check asks no solver and believes no claim of the plan: it adds up the makespan from batches and
stored prices, and proves the lower bound again from the stored values (see `patterns`), all in
integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dmuon.scheduler.patterns import refuted, simple_bound
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.problem import Problem, build_problem
from dmuon.types import printable


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on a plan. ``ok``: no claim of the plan is wrong. ``proven``: in addition, its
    lower bound is proven. ``findings`` lists errors and missing parts."""

    ok: bool
    proven: bool
    makespan_ms: float
    lower_bound_ms: float
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"makespan {self.makespan_ms:.6g} ms"
        if self.lower_bound_ms:
            gap = self.makespan_ms / self.lower_bound_ms - 1
            head += f", no plan is faster than {self.lower_bound_ms:.6g} ms (gap {gap:.3%})"
        if self.ok and self.proven:
            return f"certificate valid: {head}"
        verdict = "plan valid, bound not proven" if self.ok else "certificate INVALID"
        return printable("\n".join([f"{verdict}: {head}", *(f"- {f}" for f in self.findings)]))


def certify(plan: OwnershipPlan) -> Certificate:
    """Check a plan and its claimed lower bound, within seconds whatever numbers it contains.
    SizeError if its matrices, prices and domains are so many that the check would take too long."""
    if not plan.prices and plan.specs.matrices:  # a plan made by hand
        wrong = _short(_wrong_owners(plan))
        bare = "the plan stores no prices: its times are what it claims, and nothing bounds them"
        return Certificate(not wrong, False, plan.makespan_ms, 0.0, (bare, *wrong))
    prices = {row.key: row.ms for row in plan.prices}
    world = plan.topology.world
    problem = build_problem(plan.specs.matrices, world, plan.limits, prices, plan.layout)
    makespan, wrong_batches = _executed(plan, problem)
    bound, claimed = 0, problem.ticks(plan.lower_bound_ms)
    if plan.proof is not None:
        bound = min(simple_bound(problem), makespan, claimed)
        if bound < claimed <= makespan and refuted(problem, claimed - 1, plan.proof):
            bound = claimed
    misfits = (
        f"{m.name} of {m.rows} x {m.cols} is no matrix of a parameter {list(shape)}"
        for m, shape in ((m, plan.specs.parameters[m.parameter].shape) for m in plan.specs.matrices)
        if not m.fits(shape)
    )
    checks = (
        wrong_batches,
        _wrong_owners(plan),
        misfits,
        _wrong_claims(plan, problem, makespan, bound),
    )
    wrong = [finding for check in checks for finding in _short(check)]
    ok = not wrong
    if plan.proof is None:
        wrong.append("the plan stores no proof of its lower bound")
    times = problem.ms(makespan), problem.ms(bound)
    return Certificate(ok, ok and plan.proof is not None, *times, tuple(wrong))


def _executed(plan: OwnershipPlan, problem: Problem) -> tuple[int, list[str]]:
    """Return the ticks of the busiest owner, added up by batch, and errors found in batches."""
    found = []
    loads = [0] * plan.topology.world
    rows, domain_of = {row.key: row for row in plan.prices}, plan.limits.domain_of
    for batch in plan.batches:
        key, size = plan.specs.matrices[batch.matrices[0]].key, len(batch.matrices)
        name, price = f"a batch of {size} matrices {key[0]} x {key[1]}", rows[key].ms
        kernel = rows[key].kernel(size)
        if domain_of and len({domain_of[i] for i in batch.matrices}) > 1:
            found.append(f"a batch on rank {batch.owner} mixes matrices of different domains")
        if size > len(price):
            found.append(f"{name} has no price")
            continue
        for rank in batch.ranks:
            loads[rank] += problem.ticks(price[size - 1])
        planned = f"{name} is planned with"
        if abs(problem.ticks(price[size - 1]) - problem.ticks(batch.ms)) > 1:
            found.append(f"{planned} {batch.ms:.6g} ms; its price is {price[size - 1]:.6g} ms")
        if batch.kernel != kernel:
            found.append(f"{planned} the kernel {batch.kernel!r}; its price is of {kernel!r}")
    return max(loads), found


def _wrong_claims(
    plan: OwnershipPlan, problem: Problem, makespan: int, bound: int
) -> Iterator[str]:
    """Yield false claims of the plan about its bound, status and step."""
    if plan.proof is not None and bound < problem.ticks(plan.lower_bound_ms):
        what, proof = f"{plan.lower_bound_ms:.6g} ms", f"{problem.ms(bound):.6g} ms"
        yield f"the plan claims a lower bound of {what}; its values prove {proof}"
    if plan.proof is not None and plan.status == "optimal" and bound < makespan:
        yield "the plan claims to be optimal, which its proof does not show"
    if (plan.status == "time_limit") != (plan.search.hit_time_limit and plan.status != "optimal"):
        was = "was" if plan.search.hit_time_limit else "was not"
        yield f"the plan claims the status {plan.status!r} and that it {was} stopped by the clock"
    if (step := plan.step) is not None:
        work = plan.work_ms
        if not math.isclose(step.work_ms, work, rel_tol=1e-6, abs_tol=1e-6):
            yield f"the plan claims {step.work_ms:.6g} ms of work on a rank; it has {work:.6g} ms"
        if step.ms < (1 - 1e-6) * max(step.work_ms, step.link_ms):
            yield f"the plan claims a step of {step.ms:.6g} ms, shorter than its work or links"


def _wrong_owners(plan: OwnershipPlan) -> Iterator[str]:
    domains, cap = [frozenset(domain) for domain in plan.limits.domains], plan.limits.memory_bytes
    for batch in plan.batches:
        for i in batch.matrices if domains else ():
            for rank in set(batch.ranks) - domains[plan.limits.domain_of[i]]:
                yield f"rank {rank} may not own {plan.specs.matrices[i].name}"
    for rank, stored in enumerate(plan.state_bytes):
        if cap is not None and stored > cap:
            yield f"rank {rank} stores {stored} bytes, more than owner_memory_bytes={cap}"


def _short(findings: Iterable[str]) -> list[str]:
    lines = [line if n == 1 else f"{line} ({n} times)" for line, n in Counter(findings).items()]
    return lines if len(lines) <= 5 else [*lines[:5], f"... and {len(lines) - 5} more"]
