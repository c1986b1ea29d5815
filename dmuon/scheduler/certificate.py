"""Checks a plan by itself: what it costs, what it may do, and that no plan costs less.

No solver is asked and nothing is believed that the plan says of itself: the makespan is added up
from its batches and its stored prices, the lower bound is computed again from its stored duals
(see `bound`) and by searching (see `exhaustive`), and the baselines are run again. All arithmetic
is on integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dmuon.scheduler.bound import bound_of
from dmuon.scheduler.costs import ORIGINS, ShapeKey
from dmuon.scheduler.exhaustive import cover
from dmuon.scheduler.plan import Batch, OwnershipPlan, Proof
from dmuon.scheduler.problem import Problem
from dmuon.scheduler.solve import alternatives_of, launch_order, problem_of
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
    problem = problem_of(plan.specs, plan.topology, plan.limits, plan.prices, plan.layout)
    prices = {
        row.key: tuple(round(ms * problem.ticks_per_ms) for ms in row.ms) for row in plan.prices
    }
    wrong = [
        *_wrong_batches(plan, problem, prices),
        *_wrong_owners(plan),
        *_wrong_matrices(plan),
        *_wrong_origins(plan),
        *_wrong_alternatives(plan, problem),
    ]
    makespan = _executed(plan, problem, prices)
    claimed = round(plan.lower_bound_ms * problem.ticks_per_ms)
    if plan.proof is None:
        wrong_bound, bound = ["the plan stores no proof of its lower bound"], 0
    else:
        wrong_bound, bound = [], _bound(plan.proof, problem, makespan)
        if bound < claimed:
            wrong.append(
                f"the plan claims a lower bound of {plan.lower_bound_ms:.6g} ms; its duals prove "
                f"{problem.ms(bound):.6g} ms"
            )
    if plan.proof is not None and plan.status == "optimal" and bound < makespan:
        wrong.append("the plan claims to be optimal, which its proof does not show")
    if plan.claim is None:
        wrong_bound.append("the plan does not say which makespan and fingerprint it was made with")
    else:
        wrong += _wrong_claim(plan, problem, makespan)
    return Certificate(
        not wrong,
        not wrong and not wrong_bound,
        problem.ms(makespan),
        problem.ms(bound),
        tuple(wrong + wrong_bound),
    )


def _without_prices(plan: OwnershipPlan) -> Certificate:
    """A plan by hand: there is nothing to compute times from."""
    findings = [
        "the plan stores no prices: its times are what it claims, and nothing bounds them",
        *_wrong_owners(plan),
    ]
    return Certificate(len(findings) == 1, False, plan.makespan_ms, 0.0, tuple(findings))


def _wrong_claim(plan: OwnershipPlan, problem: Problem, makespan: int) -> list[str]:
    claim = plan.claim
    assert claim is not None
    found = []
    if abs(round(claim.makespan_ms * problem.ticks_per_ms) - makespan) > len(plan.batches):
        found.append(
            f"the plan was made with a makespan of {claim.makespan_ms:.6g} ms; its batches take "
            f"{problem.ms(makespan):.6g} ms"
        )
    if claim.fingerprint != plan.fingerprint():
        found.append(
            f"the plan was made with the fingerprint {claim.fingerprint}; its contents have "
            f"{plan.fingerprint()}"
        )
    return found


def _bound(proof: Proof, problem: Problem, makespan: int) -> int:
    try:
        bound = bound_of(problem, proof.dual, makespan)
    except ValueError:
        return 0  # duals of another problem prove nothing
    if bound <= proof.impossible < makespan:
        tried = cover(problem, proof.impossible, proof.dual)
        if tried.counts is None and tried.complete:
            return proof.impossible + 1
    return bound


_Prices = Mapping[ShapeKey, tuple[int, ...]]


def _price(plan: OwnershipPlan, batch: Batch, prices: _Prices) -> int | None:
    """Ticks of a batch; None where it has no price."""
    row = prices.get(plan.specs.matrices[batch.matrices[0]].key, ())
    return row[len(batch.matrices) - 1] if len(batch.matrices) <= len(row) else None


def _executed(plan: OwnershipPlan, problem: Problem, prices: _Prices) -> int:
    """Ticks of the busiest owner, batch by batch."""
    loads = problem.fixed.copy()
    for group in problem.forced:
        loads[group.rank] -= group.ticks  # they are among the plan's batches
    for batch in plan.batches:
        loads[batch.owner] += _price(plan, batch, prices) or 0
    return int(loads.max())


def _wrong_batches(plan: OwnershipPlan, problem: Problem, prices: _Prices) -> list[str]:
    found = []
    kernels = {row.key: row for row in plan.prices}
    for batch in plan.batches:
        key, size = plan.specs.matrices[batch.matrices[0]].key, len(batch.matrices)
        name = f"a batch of {size} matrices {key[0]} x {key[1]}"
        if plan.limits.pool_of and len({plan.limits.pool_of[i] for i in batch.matrices}) > 1:
            found.append(f"a batch on rank {batch.owner} mixes matrices of different pools")
        expected = _price(plan, batch, prices)
        if expected is None:
            found.append(f"{name} has no price")
            continue
        if abs(expected - round(batch.ms * problem.ticks_per_ms)) > 1:
            found.append(
                f"{name} is planned with {batch.ms:.6g} ms; its price is "
                f"{problem.ms(expected):.6g} ms"
            )
        kernel = kernels[key].kernel(size)
        if batch.kernel != kernel:
            found.append(
                f"{name} is planned with the kernel {batch.kernel!r}; its price is of {kernel!r}"
            )
    return _short(found)


def _wrong_matrices(plan: OwnershipPlan) -> list[str]:
    """Matrices whose rows and columns cannot be those of their parameter."""
    found = []
    for matrix in plan.specs.matrices:
        shape = plan.specs.parameters[matrix.parameter].shape
        if matrix.transposed and len(shape) > 1:
            whole = (shape[1], shape[0] * math.prod(shape[2:]))
            fits = matrix.shape == whole and matrix.start == 0
        else:
            ends = {math.prod(shape[dim:]) for dim in range(1, len(shape))}
            fits = matrix.cols in ends and matrix.start % matrix.cols == 0
        if not fits:
            found.append(
                f"{matrix.name} of {matrix.rows} x {matrix.cols} is no matrix of a parameter "
                f"{list(shape)}"
            )
    return _short(found)


def _wrong_origins(plan: OwnershipPlan) -> list[str]:
    """Prices that say they come from where they cannot."""
    analytic = plan.cost_source.startswith("analytic")
    found = [
        f"the prices of {row.key[0]} x {row.key[1]} say {origin!r}; the costs are "
        f"{plan.cost_source!r}"
        for row in plan.prices
        for origin in dict.fromkeys(row.origin)
        if origin not in ORIGINS or (analytic and origin != "analytic")
    ]
    return _short(found)


def _wrong_alternatives(plan: OwnershipPlan, problem: Problem) -> list[str]:
    """Makespans of simpler solvers that these do not have. A clock may have cut them short, and in
    a plan by hand they are anyone's.
    """
    if plan.claim is None or plan.hit_time_limit or not plan.alternatives:
        return []
    known = alternatives_of(problem, launch_order(plan.specs), dict(plan.alternatives))
    return [
        f"the plan says that {name} takes {ms:.6g} ms; it takes "
        + (f"{problem.ms(known[name]):.6g} ms" if name in known else "nothing: there is none")
        for name, ms in plan.alternatives
        if name not in known or abs(round(ms * problem.ticks_per_ms) - known[name]) > 1
    ]


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
