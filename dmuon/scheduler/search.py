"""Which solver decides how many matrices of each kind an owner takes, and what is known of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmuon.config import PlannerOptions
from dmuon.scheduler.engines import available_engines
from dmuon.scheduler.greedy import greedy, longest_first, round_robin
from dmuon.scheduler.memory import least_memory, too_little_memory
from dmuon.scheduler.milp import Improved, improve_by_programs, prove, settle
from dmuon.scheduler.problem import Counts, Problem
from dmuon.scheduler.proof import Proof, bound_of
from dmuon.types import PlanError

__all__ = ["SOLVERS", "Found", "search"]

SOLVERS = ("auto", "milp", "greedy", "round_robin")


@dataclass(frozen=True)
class Found:
    """Counts, and what is known about them; times in ticks.

    ``alternatives`` are the counts of simpler solvers.
    """

    counts: Counts
    solver: str
    status: str
    bound: int
    alternatives: tuple[tuple[str, Counts], ...]
    proof: Proof
    engine: str = ""
    note: str = ""
    hit_time_limit: bool = False


def search(problem: Problem, order: Sequence[int], solver: str, options: PlannerOptions) -> Found:
    """Counts by the solver asked for; ``order`` lists the matrices for round robin.

    Raises:
        PlanError: no assignment fits the memory cap; states the smallest cap that is known to.
    """
    turns = round_robin(problem, order)
    if turns is not None and not problem.is_feasible(turns):
        turns = None  # a rank that owns nothing is over the cap
    if solver == "round_robin":
        if turns is None:
            raise PlanError(
                "solver='round_robin' finds no plan inside owner_memory_bytes: use solver='auto'"
            )
        return _found(problem, turns, "round_robin", ())
    starts = [c for c in (longest_first(problem), turns) if c is not None]
    counts = _greedy(problem, options, starts)
    alternatives = [("greedy", counts)]
    if turns is not None:
        alternatives.append(("round_robin", turns))
    plain = _found(problem, counts, "greedy", tuple(alternatives))
    if solver == "greedy" or (solver == "auto" and plain.status == "optimal"):
        return plain
    return _by_programs(problem, plain, options)


def _greedy(problem: Problem, options: PlannerOptions, starts: list[Counts]) -> Counts:
    counts = greedy(problem, starts)
    if counts is None:
        tight = least_memory(problem, options.time_limit_s)
        if not problem.is_feasible(tight.counts):
            raise too_little_memory(problem, tight)
        counts = greedy(problem, [tight.counts])
    assert counts is not None
    return counts


def _found(
    problem: Problem, counts: Counts, solver: str, alternatives: tuple[tuple[str, Counts], ...]
) -> Found:
    makespan = problem.makespan(counts)
    bound, proof = prove(problem, makespan)
    status = "optimal" if bound >= makespan else "feasible"
    return Found(counts, solver, status, bound, alternatives, proof)


def _by_programs(problem: Problem, plain: Found, options: PlannerOptions) -> Found:
    """Integer programming on top of the greedy plan, with the first engine that works."""
    engines = available_engines()
    best, notes, used = Improved(plain.counts, plain.bound, plain.proof), [], ""
    if not engines:
        notes.append("no MILP solver is installed (pip install 'pulp[highs]')")
    for engine in engines:
        best = improve_by_programs(
            problem, best.counts, best.bound, best.proof, engine, options.time_limit_s
        )
        notes += best.failures
        if not best.failures:
            used = engine
            break
    hit = best.hit_time_limit
    best = settle(problem, best.counts, best.bound, best.proof)
    makespan = problem.makespan(best.counts)
    if not best.proof.exhaustive:
        # What a certificate will find: merged points depend on how far the knapsacks reach.
        best = replace(best, bound=bound_of(problem, best.proof.dual, makespan))
    better = makespan < problem.makespan(plain.counts)
    if not used and not better:
        notes.append("this is the greedy plan")
    status = "optimal" if best.bound >= makespan else "time_limit" if hit else "feasible"
    return Found(
        best.counts,
        "milp" if used or better else "greedy",
        status,
        best.bound,
        plain.alternatives,
        best.proof,
        engine=used,
        note="; ".join(notes),
        hit_time_limit=hit,
    )
