"""Owner counts from integer programming: the compact model where it is small, else columns.

Whatever a solver says is checked here by our own arithmetic: counts must be feasible and better
than those known, and a bound counts only if `proof` or `exhaustive` computes it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmuon.scheduler.budget import Budget
from dmuon.scheduler.columns import Columns
from dmuon.scheduler.compact import MOST_VARIABLES, compact, variables
from dmuon.scheduler.engines import EngineError
from dmuon.scheduler.exhaustive import counts_within, is_small
from dmuon.scheduler.greedy import improve
from dmuon.scheduler.problem import Counts, Problem
from dmuon.scheduler.proof import Proof, bound_of, simple_duals

__all__ = ["Improved", "improve_by_programs", "prove"]


@dataclass(frozen=True)
class Improved:
    """The best counts, the bound that ``proof`` shows, and what went wrong on the way."""

    counts: Counts
    bound: int
    proof: Proof
    failures: tuple[str, ...] = ()
    hit_time_limit: bool = False


def prove(problem: Problem, makespan: int) -> tuple[int, Proof]:
    """The best bound that needs no solver."""
    found = [(bound_of(problem, dual, makespan), dual) for dual in simple_duals(problem)]
    bound, dual = max(found, key=lambda f: f[0])
    return bound, Proof(dual)


def improve_by_programs(
    problem: Problem, counts: Counts, bound: int, proof: Proof, engine: str, seconds: float
) -> Improved:
    """Raise ``bound`` and lower the makespan of ``counts`` until they meet or the work is done."""
    budget = Budget(seconds)
    columns = Columns(problem, engine, budget, counts, bound, proof.dual)
    failures = []
    steps = [columns.climb, columns.round]
    if variables(problem) <= MOST_VARIABLES:
        steps.insert(1, lambda: _offer_compact(columns))
    for step in steps:
        try:
            step()
        except EngineError as error:
            failures.append(str(error))
            break
        if columns.bound >= columns.makespan:
            break
    return Improved(columns.counts, columns.bound, Proof(columns.dual), tuple(failures), budget.hit)


def _offer_compact(columns: Columns) -> None:
    counts = compact(
        columns.problem, columns.makespan, columns.engine, columns.budget.left_s() + 1.0
    )
    columns.offer(counts)


def settle(problem: Problem, counts: Counts, bound: int, proof: Proof) -> Improved:
    """Of a small problem: the optimum, by exhaustion."""
    if not is_small(problem):
        return Improved(counts, bound, proof)
    while problem.makespan(counts) > bound:
        better = counts_within(problem, problem.makespan(counts) - 1)
        if better is None:
            makespan = problem.makespan(counts)
            return Improved(counts, makespan, Proof(proof.dual, exhaustive=True))
        counts = improve(problem, better)
    return Improved(counts, bound, proof)
