"""The ownership plan: pure data, the same on every rank.

::

    matrices   q0 k0 v0 o0 up0 down0 | q1 k1 v1 o1 up1 down1 | ...
    owner       2  3  1  3   0    2  |  1  2  3  1   0    1  | ...
    batches    rank 0: [up0 up1 ...]    rank 1: [q1 v0 o1 ...] [down1 ...]   ...
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from dmuon.scheduler.batches import Batch, PriceRow, check_batches
from dmuon.scheduler.json_files import cut, parse
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan_json import by_name, fields_of, identity, plain_prices
from dmuon.scheduler.problem import state_bytes
from dmuon.scheduler.proof import Proof
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = ["OwnershipPlan", "check_plan_fits"]


@dataclass(frozen=True)
class OwnershipPlan:
    """Who owns which matrix, in which batches, and how good that is.

    Owners execute ``batches`` in order of their first matrix. ``lower_bound_ms`` is proven: no
    assignment has a smaller makespan under the same costs, and ``proof`` lets anyone recompute that
    without a solver (see `certificate`). ``alternatives`` holds the makespan of other solvers for
    comparison. ``engine`` names the MILP solver that ran, ``note`` says why something else was done
    than what was asked for, and ``hit_time_limit`` marks a plan that depends on the clock.
    ``prices`` are the costs it was made with, ``limits`` what bound the owners.
    """

    specs: ModelSpecs
    topology: Topology
    batches: tuple[Batch, ...]
    layout: Layout
    solver: str
    status: str
    cost_source: str
    lower_bound_ms: float
    alternatives: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    limits: OwnerLimits = OwnerLimits()  # noqa: RUF009  frozen
    prices: tuple[PriceRow, ...] = ()
    proof: Proof | None = None
    engine: str = ""
    note: str = ""
    hit_time_limit: bool = False

    def __post_init__(self) -> None:
        self.limits.check(len(self.specs.matrices), self.topology.world)
        check_batches(self.batches, self.specs.matrices, self.topology.world)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Owner of each matrix."""
        owners = [0] * len(self.specs.matrices)
        for batch in self.batches:
            for i in batch.matrices:
                owners[i] = batch.owner
        return tuple(owners)

    @cached_property
    def loads_ms(self) -> tuple[float, ...]:
        """Predicted Newton-Schulz milliseconds of each rank, and its fixed load."""
        loads = [self.limits.fixed_ms_of(rank) for rank in range(self.topology.world)]
        for batch in self.batches:
            loads[batch.owner] += batch.ms
        # Costs are whole ticks, at the finest picoseconds: what is beyond that is noise of adding.
        return tuple(round(load, 9) for load in loads)

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of optimizer state of each rank: momentum, in the parameters' dtypes, and fixed.

        In the sharded layout the fixed bytes alone: momentum lies with the shards, not the owners.
        """
        state = [self.limits.fixed_bytes_of(rank) for rank in range(self.topology.world)]
        for matrix, owner in zip(self.specs.matrices, self.owners, strict=True):
            state[owner] += state_bytes(matrix, self.layout)
        return tuple(state)

    @property
    def makespan_ms(self) -> float:
        """Predicted milliseconds of the busiest owner."""
        return max(self.loads_ms)

    def owned_by(self, rank: int) -> tuple[str, ...]:
        """Names of the matrices that ``rank`` owns, in registration order."""
        return tuple(
            m.name
            for m, owner in zip(self.specs.matrices, self.owners, strict=True)
            if owner == rank
        )

    @cached_property
    def _fingerprint(self) -> str:
        data = by_name(self.specs, self.topology, self.batches, self.layout)
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """A hash of everything that decides what runs where; equal on ranks that agree."""
        return self._fingerprint

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal plan."""
        data = identity(self.specs, self.topology, self.batches, self.layout) | {
            "solver": self.solver,
            "status": self.status,
            "cost_source": self.cost_source,
            "lower_bound_ms": self.lower_bound_ms,
            "alternatives": [list(a) for a in self.alternatives],
            "seconds": self.seconds,
            "limits": self.limits.to_dict(),
            "prices": plain_prices(self.prices),
            "proof": None if self.proof is None else self.proof.to_dict(),
            "engine": self.engine,
            "note": self.note,
            "hit_time_limit": self.hit_time_limit,
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> OwnershipPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: not a plan, one of another format version, or larger than any plan is
                (64 million characters, 100,000 ranks); says which field, and what was found there.
        """
        try:
            return cls(**fields_of(parse(text)))
        except ValueError as error:
            raise PlanError(f"not an ownership plan: {cut(str(error))}") from error


def check_plan_fits(plan: OwnershipPlan, specs: ModelSpecs, topology: Topology) -> None:
    """Raise PlanError with the differences if ``plan`` was made for another model or mesh."""
    found: list[str] = []
    if plan.topology.world != topology.world:
        found.append(f"the plan is for {plan.topology.world} ranks, the mesh has {topology.world}")
    elif plan.topology.shape != topology.shape:
        found.append(f"the plan is for mesh {plan.topology.shape}, the mesh is {topology.shape}")
    old = {p.name: p for p in plan.specs.parameters}
    new = {p.name: p for p in specs.parameters}
    found += [f"- {name} {list(old[name].shape)}" for name in old if name not in new]
    found += [f"+ {name} {list(new[name].shape)}" for name in new if name not in old]
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        if (a.shape, a.dtype, a.algorithm) != (b.shape, b.dtype, b.algorithm):
            found.append(
                f"! {name}: plan {list(a.shape)} {a.dtype} {a.algorithm.value}, "
                f"model {list(b.shape)} {b.dtype} {b.algorithm.value}"
            )
    if not found and plan.specs.matrices != specs.matrices:
        found.append("the parameters are split into other matrices (splits, heads or order)")
    if found:
        more = f" (+{len(found) - 12} more)" if len(found) > 12 else ""
        raise PlanError("the saved plan does not fit: " + "; ".join(sorted(found)[:12]) + more)
