"""Counts where batches may run together: solved with prices that bound, chosen by true costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dmuon.config import PlannerOptions
from dmuon.scheduler.batching import Batching
from dmuon.scheduler.problem import Counts, Problem
from dmuon.scheduler.proof import bound_of
from dmuon.scheduler.search import Found, search

__all__ = ["search_grouped"]


def search_grouped(
    batching: Batching,
    lowered_within: Callable[[int], Problem],
    order: Sequence[int],
    solver: str,
    options: PlannerOptions,
) -> Found:
    """Counts by the solver asked for, good for batches that are grouped afterwards.

    Greedy counts by the prices of batches alone come first: their makespan, with groups, tells how
    large a group can be in any better plan, and so which prices bound those. Of these counts, the
    solver's by the bounding prices, and the greedy ones by them, those with the smallest makespan
    count; of equal ones the solver's. ``lowered_within`` gives the problem that bounds plans within
    a makespan in ticks.

    Raises:
        PlanError: as `search` does.
    """
    if not batching.saves:
        return search(batching.whole, order, solver, options)
    turns = solver == "round_robin"
    first = search(batching.whole, order, "round_robin" if turns else "greedy", options)
    within = batching.makespan(first.counts)
    lowered = lowered_within(within)
    found = search(lowered, order, solver, options)
    alternatives = _best_by_name(batching, found.alternatives + first.alternatives)
    candidates = [found.counts, first.counts, *(counts for _, counts in alternatives)]
    counts = min(candidates[: 2 if turns else None], key=batching.makespan)
    makespan = batching.makespan(counts)
    bound = found.bound
    if not found.proof.exhaustive:
        # What a certificate will find: merged points depend on how far the knapsacks reach.
        bound = bound_of(lowered, found.proof.dual, makespan)
    return replace(
        found,
        counts=counts,
        status=_status(found, bound >= makespan),
        bound=bound,
        alternatives=alternatives,
        proof=replace(found.proof, within=within),
    )


def _best_by_name(
    batching: Batching, known: Sequence[tuple[str, Counts]]
) -> tuple[tuple[str, Counts], ...]:
    """Of each simpler solver's counts those that are best with groups."""
    return tuple(
        (name, min((c for n, c in known if n == name), key=batching.makespan))
        for name in dict.fromkeys(name for name, _ in known)
    )


def _status(found: Found, optimal: bool) -> str:
    if optimal:
        return "optimal"
    return "time_limit" if found.hit_time_limit else "feasible"
