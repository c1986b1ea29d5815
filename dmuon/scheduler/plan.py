"""The ownership plan: pure data, made by `solve`, the same on every rank.

::

    matrices   q0 k0 v0 o0 up0 down0 | q1 k1 v1 o1 up1 down1 | ...
    owner       2  3  1  3   0    2  |  1  2  3  1   0    1  | ...
    batches    rank 0: [up0 up1 ...]    rank 1: [q1 v0 o1 ...] [down1 ...]   ...
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import CostModel, ShapeKey
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.memory import check_fixed_bytes
from dmuon.scheduler.placement import layer_of, natural_key, place
from dmuon.scheduler.problem import Counts, Problem, build_problem, state_bytes
from dmuon.scheduler.proof import Proof
from dmuon.scheduler.search import SOLVERS, search
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = ["Batch", "OwnershipPlan", "solve"]

FORMAT_VERSION = 2  # 1 had neither limits nor prices nor proof


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that their owner orthogonalizes together.

    ``matrices`` are indices into `ModelSpecs.matrices`; ``ms`` is the predicted time.
    """

    owner: int
    matrices: tuple[int, ...]
    ms: float


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What planning paid for one shape: milliseconds of batches of 1, 2, 3, ... matrices.

    ``origin`` says of each where it comes from: "measured", "interpolated", "estimated" (not
    reached by the measurement), "analytic" or "given".
    """

    key: ShapeKey
    ms: tuple[float, ...]
    origin: tuple[str, ...]


@dataclass(frozen=True)
class OwnershipPlan:
    """Who owns which matrix, in which batches, and how good that is.

    Owners execute ``batches`` in order of their first matrix. ``lower_bound_ms`` is proven:
    no assignment has a smaller makespan under the same costs, and ``proof`` lets anyone recompute
    that without a solver (see `certificate`). ``alternatives`` holds the makespan of other
    solvers for comparison. ``engine`` names the MILP solver that ran, ``note`` says why something
    else was done than what was asked for, and ``hit_time_limit`` marks a plan that depends on the
    clock. ``prices`` are the costs it was made with, ``limits`` what bound the owners.
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
        count = Counter(i for batch in self.batches for i in batch.matrices)
        total = len(self.specs.matrices)
        wrong = [i for i in range(total) if count[i] != 1] + [
            i for i in count if not 0 <= i < total
        ]
        if wrong:
            known = range(total)
            names = [self.specs.matrices[i].name if i in known else f"#{i}" for i in wrong[:5]]
            raise PlanError(f"each matrix needs exactly one owner; this plan fails for {names}")
        for batch in self.batches:
            if not 0 <= batch.owner < self.topology.world:
                raise PlanError(f"owner {batch.owner} is not a rank of {self.topology}")
            if not batch.matrices or len({self.specs.matrices[i].key for i in batch.matrices}) != 1:
                raise PlanError(f"a batch must hold matrices of one shape and dtype, found {batch}")

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

    def _identity(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "specs": self.specs.to_dict(),
            "topology": self.topology.to_dict(),
            "batches": [[b.owner, list(b.matrices), b.ms] for b in self.batches],
            "layout": self.layout.value,
        }

    def _by_name(self) -> dict[str, Any]:
        """What runs where, in terms of names: independent of the order of the parameters."""
        specs = self.specs
        matrices = [
            [m.name, specs.parameters[m.parameter].name, *m.to_list()[2:]] for m in specs.matrices
        ]
        batches = [[b.owner, [matrices[i][0] for i in b.matrices], b.ms] for b in self.batches]
        return {
            "format": FORMAT_VERSION,
            "parameters": sorted((p.to_dict() for p in specs.parameters), key=lambda p: p["name"]),
            "frozen": sorted((p.to_dict() for p in specs.frozen), key=lambda p: p["name"]),
            "matrices": sorted(matrices),
            "topology": self.topology.to_dict(),
            "batches": batches,
            "layout": self.layout.value,
        }

    @cached_property
    def _fingerprint(self) -> str:
        text = json.dumps(self._by_name(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """A hash of everything that decides what runs where; equal on ranks that agree."""
        return self._fingerprint

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal plan."""
        data = self._identity() | {
            "solver": self.solver,
            "status": self.status,
            "cost_source": self.cost_source,
            "lower_bound_ms": self.lower_bound_ms,
            "alternatives": [list(a) for a in self.alternatives],
            "seconds": self.seconds,
            "limits": self.limits.to_dict(),
            "prices": [[list(row.key), list(row.ms), list(row.origin)] for row in self.prices],
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
            PlanError: not a plan, or one of another format version.
        """
        try:
            data = json.loads(text)
            if data["format"] not in (1, FORMAT_VERSION):
                raise PlanError(
                    f"the plan has format {data['format']}, this version reads {FORMAT_VERSION}"
                )
            return cls(
                specs=ModelSpecs.from_dict(data["specs"]),
                topology=Topology.from_dict(data["topology"]),
                batches=tuple(
                    Batch(_whole(o), tuple(map(_whole, m)), _number(ms))
                    for o, m, ms in data["batches"]
                ),
                layout=Layout(data["layout"]),
                solver=data["solver"],
                status=data["status"],
                cost_source=data["cost_source"],
                lower_bound_ms=_number(data["lower_bound_ms"]),
                alternatives=tuple((name, ms) for name, ms in data["alternatives"]),
                seconds=data["seconds"],
                **({} if data["format"] == 1 else _evidence(data)),
            )
        except PlanError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise PlanError(f"not an ownership plan: {error!r}") from error


def _number(value: Any) -> float:
    """A finite number from JSON, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value!r}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r}")
    return value


def _evidence(data: dict[str, Any]) -> dict[str, Any]:
    """What a saved plan tells of how it was made."""
    return {
        "limits": OwnerLimits.from_dict(data["limits"]),
        "prices": tuple(
            PriceRow((int(k[0]), int(k[1]), str(k[2])), tuple(map(_number, ms)), tuple(origin))
            for k, ms, origin in data["prices"]
        ),
        "proof": None if data["proof"] is None else Proof.from_dict(data["proof"]),
        "engine": data["engine"],
        "note": data["note"],
        "hit_time_limit": data["hit_time_limit"],
    }


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


def _walking_order(specs: ModelSpecs) -> list[int]:
    """Matrices in natural order of their names: about launch order, whatever order they came in."""
    return sorted(range(len(specs.matrices)), key=lambda i: natural_key(specs.matrices[i].name))


def _batches(problem: Problem, owners: Sequence[int], order: Sequence[int]) -> tuple[Batch, ...]:
    """Cut every owner's matrices of a kind into the cheapest batches, earliest layers first."""
    position = {i: at for at, i in enumerate(order)}
    batches = []
    groups = [*zip(problem.kinds, problem.members, strict=True)]
    groups += [(group.kind, group.members) for group in problem.forced]
    for kind, members in groups:
        by_owner: dict[int, list[int]] = defaultdict(list)
        for i in sorted(members, key=position.__getitem__):
            by_owner[owners[i]].append(i)
        for owner, mine in by_owner.items():
            start = 0
            for size in kind.batches(len(mine)):
                ms = problem.ms(kind.batch_ticks[size - 1])
                batches.append(Batch(owner, tuple(mine[start : start + size]), ms))
                start += size
    return tuple(sorted(batches, key=lambda b: (position[b.matrices[0]], b.owner)))


def price_rows(specs: ModelSpecs, costs: CostModel, max_batch: int) -> tuple[PriceRow, ...]:
    """What every shape of the model costs in batches of 1, 2, ... up to ``max_batch``."""
    origin = getattr(costs, "origin", lambda key, batch: "given")
    rows = []
    for key, count in sorted(Counter(m.key for m in specs.matrices).items()):
        sizes = range(1, min(count, max_batch) + 1)
        rows.append(
            PriceRow(
                key,
                tuple(float(costs.batch_ms(key, b)) for b in sizes),
                tuple(origin(key, b) for b in sizes),
            )
        )
    return tuple(rows)


def problem_of(
    specs: ModelSpecs,
    topology: Topology,
    limits: OwnerLimits,
    prices: Sequence[PriceRow],
    layout: Layout = Layout.REPLICATED,
) -> Problem:
    """The assignment problem that a plan answers."""
    rows = {row.key: row.ms for row in prices}
    return build_problem(specs.matrices, topology.world, limits, rows, layout)


def solve(
    specs: ModelSpecs,
    topology: Topology,
    costs: CostModel,
    *,
    layout: Layout = Layout.REPLICATED,
    solver: str = "auto",
    options: PlannerOptions | None = None,
    limits: OwnerLimits | None = None,
) -> OwnershipPlan:
    """Assign every matrix to an owner, balancing predicted time.

    Pure; equal input gives an equal plan, in whatever order the matrices come. A matrix that one
    rank alone may own goes there, whatever the solver; it counts in that rank's load and bytes.

    Raises:
        PlanError: unknown solver, a shape without a cost, or a memory cap that no plan fits.
    """
    options = options or PlannerOptions()
    if solver not in SOLVERS:
        raise PlanError(f"solver={solver!r} is unknown: choose from {SOLVERS}")
    begin = time.perf_counter()
    limits = limits or OwnerLimits(memory_bytes=options.owner_memory_bytes)
    rows = price_rows(specs, costs, options.max_batch)
    check_fixed_bytes(limits, topology.world, layout)
    problem = problem_of(specs, topology, limits, rows, layout)
    order = _walking_order(specs)
    found = search(problem, order, solver, options)
    owners = _placed(specs, topology, problem, found.counts, order)
    plan = OwnershipPlan(
        specs=specs,
        topology=topology,
        batches=_batches(problem, owners, order),
        layout=layout,
        solver=found.solver,
        status=found.status,
        cost_source=costs.source,
        lower_bound_ms=problem.ms(found.bound),
        alternatives=tuple((name, problem.ms(t)) for name, t in found.alternatives),
        limits=limits,
        prices=rows,
        proof=found.proof,
        engine=found.engine,
        note=found.note,
        hit_time_limit=found.hit_time_limit,
    )
    return replace(plan, seconds=time.perf_counter() - begin)


def _placed(
    specs: ModelSpecs, topology: Topology, problem: Problem, counts: Counts, order: Sequence[int]
) -> list[int]:
    """The owner of each matrix: counts made concrete, with consecutive matrices apart."""
    owners = [0] * len(order)
    for group in problem.forced:
        for i in group.members:
            owners[i] = group.rank
    kind_of = {i: s for s, members in enumerate(problem.members) for i in members}
    free = [i for i in order if i in kind_of]
    placed = place(
        [kind_of[i] for i in free],
        [layer_of(specs.matrices[i].name) for i in free],
        [{s: int(k) for s, k in enumerate(row) if k} for row in counts],
        [c.ranks for c in problem.classes],
        topology.owner_order(),
        topology,
    )
    for i, owner in zip(free, placed, strict=True):
        owners[i] = owner
    return owners
