"""The smallest memory cap that a plan fits: the same assignment problem, with bytes for ticks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dmuon.scheduler.engines import available_engines
from dmuon.scheduler.greedy import greedy
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.milp import Improved, improve_by_programs, prove, settle
from dmuon.scheduler.problem import UNLIMITED, Counts, Kind, Problem
from dmuon.types import Layout, PlanError

__all__ = ["LeastMemory", "check_fixed_bytes", "least_memory", "too_little_memory"]


@dataclass(frozen=True)
class LeastMemory:
    """Counts whose fullest rank stores ``nbytes``; no counts need less than ``bound``."""

    counts: Counts
    nbytes: int
    bound: int


def least_memory(problem: Problem, seconds: float) -> LeastMemory:
    """How to store everything so that the fullest rank stores least, whatever the time."""
    cap = problem.memory_cap
    assert cap is not None
    kinds = tuple(
        Kind(kind.key, kind.pool, kind.count, kind.nbytes, (max(kind.nbytes, 1),))
        for kind in problem.kinds
    )
    classes = tuple(replace(c, fixed=cap - c.room, room=UNLIMITED) for c in problem.classes)
    in_bytes = replace(problem, kinds=kinds, classes=classes)
    counts = greedy(in_bytes, [])
    assert counts is not None  # nothing is capped
    nbytes = in_bytes.makespan(counts)
    bound, proof = prove(in_bytes, nbytes)
    found = Improved(counts, bound, proof)
    if bound < nbytes and nbytes > cap:
        for engine in available_engines()[:1]:
            found = improve_by_programs(in_bytes, counts, bound, proof, engine, seconds)
        found = settle(in_bytes, found.counts, found.bound, found.proof)
    return LeastMemory(found.counts, in_bytes.makespan(found.counts), found.bound)


def too_little_memory(problem: Problem, least: LeastMemory) -> PlanError:
    """The error for a cap that nothing fits."""
    mebibytes = _mebibytes(least.nbytes)
    matrices = int(problem.demand.sum()) + sum(group.kind.count for group in problem.forced)
    known = (
        f"the smallest feasible cap is {least.nbytes} bytes{mebibytes}"
        if least.bound >= least.nbytes
        else f"a cap of {least.nbytes} bytes is feasible, and none below {least.bound} is"
    )
    return PlanError(
        f"owner_memory_bytes={problem.memory_cap} is too small for the optimizer state of "
        f"{matrices} matrices on {problem.world} ranks: {known}. Raise "
        "PlannerOptions(owner_memory_bytes=...), or use more ranks"
    )


def check_fixed_bytes(limits: OwnerLimits, world: int, layout: Layout) -> None:
    """Raise PlanError if, in the sharded layout, a rank stores more than the cap.

    There the momentum lies with the shards, so that no ownership changes what a rank stores.
    """
    cap = limits.memory_bytes
    if layout is not Layout.SHARDED or cap is None:
        return
    nbytes, rank = max((limits.fixed_bytes_of(r), -r) for r in range(world))
    if nbytes > cap:
        raise PlanError(
            f"owner_memory_bytes={cap} is too small: rank {-rank} stores {nbytes} bytes"
            f"{_mebibytes(nbytes)} of optimizer state. In the sharded layout that state lies with "
            "the parameters' shards, so no other ownership meets the cap: use more ranks or a "
            "lower-precision state, or raise PlannerOptions(owner_memory_bytes=...)"
        )


def _mebibytes(nbytes: int) -> str:
    return f" ({nbytes / 2**20:.1f} MiB)" if nbytes >= 2**20 else ""
