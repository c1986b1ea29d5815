"""The ownership plan: pure data, the same on every rank, and its JSON.

::

    matrices   q0 k0 v0 o0 up0 down0 | q1 k1 v1 o1 up1 down1 | ...
    owner       2  3  1  3   0    2  |  1  2  3  1   0    1  | ...
    batches    rank 0: [up0 up1 ...]    rank 1: [q1 v0 o1 ...] [down1 ...]   ...

A batch is one shape, one owner, one kernel.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from dmuon.scheduler.costs import ShapeKey
from dmuon.scheduler.json_files import (
    MOST_WHOLE,
    choice,
    cut,
    different,
    each,
    flag,
    parse,
    real,
    reals,
    record,
    row,
    text,
    texts,
    whole,
    wholes,
)
from dmuon.scheduler.shards import OwnerLimits, state_bytes
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import KernelChoice, Layout, PlanError

__all__ = [
    "Batch",
    "Dual",
    "OwnershipPlan",
    "PriceRow",
    "Proof",
    "Unit",
    "check_plan_fits",
    "units_of",
]

FORMAT_VERSION = 6
_MOST_PRICE = 1e12  # milliseconds of one batch, as in planning
_MOST_KERNEL = 200  # characters of a kernel's name


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that their owner orthogonalizes together.

    ``matrices`` are indices into `ModelSpecs.matrices`; ``ms`` is the predicted time. ``kernel`` is
    what runs it, as `KernelChoice` writes it, or "" for the fixed rule at run time.
    """

    owner: int
    matrices: tuple[int, ...]
    ms: float
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What planning paid for one shape: milliseconds of batches of 1, 2, 3, ... matrices.

    ``origin`` says of each where it comes from: "measured", "interpolated", "estimated" (not
    reached by the measurement), "analytic" or "given". ``kernels`` names for each the kernel that
    the price is of; empty where none is named.
    """

    key: ShapeKey
    ms: tuple[float, ...]
    origin: tuple[str, ...]
    kernels: tuple[str, ...] = ()

    def kernel(self, batch: int) -> str:
        """The kernel of a batch of this size, "" for none."""
        return self.kernels[batch - 1] if batch <= len(self.kernels) else ""


@dataclass(frozen=True, slots=True)
class Dual:
    """The value of a matrix and of a unit of work of each kind; see `bound.work_tables`."""

    values: tuple[int, ...]
    works: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Why no plan is faster. ``dual`` proves the makespan that `bound.bound_of` computes from it.

    ``impossible``: no plan takes so many ticks or fewer, as `bound.cover` finds by trying
    everything; -1 where nothing was tried or the dual alone shows as much.
    """

    dual: Dual
    impossible: int = -1


@dataclass(frozen=True, slots=True)
class Claim:
    """What a plan says of itself when it is made, so that a change afterwards is found."""

    makespan_ms: float
    fingerprint: str


@dataclass(frozen=True)
class OwnershipPlan:
    """Who owns which matrix, in which batches, and how good that is.

    Owners execute ``batches`` in order of their first matrix. ``lower_bound_ms`` is proven: no
    assignment has a smaller makespan under the same costs, and ``proof`` lets anyone recompute that
    without a solver (see `certificate`). ``alternatives`` holds the makespan of other solvers for
    comparison. ``engine`` names the MILP solver that ran, ``note`` says why something else was done
    than what was asked for, and ``hit_time_limit`` marks a plan that depends on the clock.
    ``prices`` are the costs it was made with, ``limits`` what bound the owners. ``claim`` is None
    in a plan by hand.
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
    claim: Claim | None = None

    def __post_init__(self) -> None:
        self.limits.check(len(self.specs.matrices), self.topology.world)
        _check_batches(self.batches, self.specs.matrices, self.topology.world)

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
        pairs = zip(self.specs.matrices, self.owners, strict=True)
        return tuple(m.name for m, owner in pairs if owner == rank)

    # ---- identity and JSON ---------------------------------------------------------------

    @cached_property
    def _fingerprint(self) -> str:
        specs = self.specs
        matrices = [
            [m.name, specs.parameters[m.parameter].name, *m.to_list()[2:]] for m in specs.matrices
        ]
        # In terms of names: independent of the order of the parameters.
        data = {
            "format": FORMAT_VERSION,
            "parameters": sorted((p.to_dict() for p in specs.parameters), key=lambda p: p["name"]),
            "frozen": sorted((p.to_dict() for p in specs.frozen), key=lambda p: p["name"]),
            "matrices": sorted(matrices),
            "topology": self.topology.to_dict(),
            "batches": [
                [b.owner, [matrices[i][0] for i in b.matrices], b.ms, b.kernel]
                for b in self.batches
            ],
            "layout": self.layout.value,
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """A hash of everything that decides what runs where; equal on ranks that agree."""
        return self._fingerprint

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal plan."""
        proof, claim = self.proof, self.claim
        data = {
            "format": FORMAT_VERSION,
            "fingerprint": None if claim is None else claim.fingerprint,
            "makespan_ms": None if claim is None else claim.makespan_ms,
            **{name: getattr(self, name) for name in (*_NUMBERS, *_TEXTS)},
            "hit_time_limit": self.hit_time_limit,
            "alternatives": self.alternatives,
            "layout": self.layout.value,
            "topology": self.topology.to_dict(),
            "limits": self.limits.to_dict(),
            "prices": [[r.key, r.ms, r.origin, r.kernels] for r in self.prices],
            "proof": proof and [proof.dual.values, proof.dual.works, proof.impossible],
            "specs": self.specs.to_dict(),
            "batches": [[b.owner, b.matrices, b.ms, b.kernel] for b in self.batches],
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
            return cls(**_fields(parse(text)))
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


# ---- batches as they are executed ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices of one shape, owner and param group, which are orthogonalized together.

    They are stacked ``[b, rows, cols]``. A matrix and its transpose are of one shape; where a unit
    has both, it is stacked short side first, and ``transposed`` says for each matrix whether its
    slot holds the transpose (empty: none does). ``kernel`` is what runs them, as `KernelChoice`
    writes it, "" for the fixed rule.
    """

    owner: int
    group: int
    matrices: tuple[int, ...]
    rows: int
    cols: int
    ms: float
    kernel: str = ""
    transposed: tuple[bool, ...] = ()

    def holds_transpose(self, position: int) -> bool:
        """Whether the slot of the matrix at this position holds its transpose."""
        return bool(self.transposed) and self.transposed[position]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its stacked matrices."""
        return len(self.matrices), self.rows, self.cols

    @property
    def numel(self) -> int:
        return len(self.matrices) * self.rows * self.cols


def units_of(plan: OwnershipPlan, groups: Sequence[int]) -> tuple[Unit, ...]:
    """The planned batches as executed: cut where their matrices are in different param groups.

    ``groups`` gives the param group of each matrix. A cut batch shares its predicted time out by
    the number of matrices. Owners execute them in order of registration, for that is the order in
    which the next forward pass needs the results.
    """
    batches = sorted(plan.batches, key=lambda batch: (min(batch.matrices), batch.owner))
    return tuple(unit for batch in batches for unit in _cut(plan, batch, groups))


def _cut(plan: OwnershipPlan, batch: Batch, groups: Sequence[int]) -> list[Unit]:
    """A unit for each param group in a batch, in order of their first matrix."""
    by_group: dict[int, list[int]] = defaultdict(list)
    for i in batch.matrices:
        by_group[groups[i]].append(i)
    units = []
    for group, members in by_group.items():
        shapes = [plan.specs.matrices[i].shape for i in members]
        rows, cols = shapes[0]
        transposed: tuple[bool, ...] = ()
        if len(set(shapes)) > 1:
            rows, cols = sorted(shapes[0])
            transposed = tuple(shape != (rows, cols) for shape in shapes)
        share = batch.ms * len(members) / len(batch.matrices)
        units.append(
            Unit(
                batch.owner, group, tuple(members), rows, cols, share, batch.kernel,
                transposed=transposed,
            )
        )  # fmt: skip
    return units


# ---- what is valid -----------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _check_kernel(kernel: str) -> None:
    """Raise ValueError unless a kernel is "" or as `KernelChoice` writes it."""
    if kernel:
        KernelChoice.parse(kernel)


def _check_batches(batches: Sequence[Batch], matrices: Sequence[MatrixSpec], world: int) -> None:
    """Raise PlanError unless each matrix has one owner and batches can run as such."""
    count = Counter(i for batch in batches for i in batch.matrices)
    known = range(len(matrices))
    wrong = [i for i in known if count[i] != 1] + [i for i in count if i not in known]
    if wrong:
        names = [matrices[i].name if i in known else f"#{i}" for i in wrong[:5]]
        raise PlanError(f"each matrix needs exactly one owner; this plan fails for {names}")
    for batch in batches:
        if not 0 <= batch.owner < world:
            raise PlanError(f"owner {batch.owner} is not a rank of a mesh of {world} ranks")
        if not batch.matrices or len({matrices[i].key for i in batch.matrices}) != 1:
            raise PlanError(f"a batch must hold matrices of one shape and dtype, found {batch}")
        try:
            _check_kernel(batch.kernel)
        except ValueError as error:
            raise PlanError(f"a batch on rank {batch.owner} cannot be run: {error}") from None


# ---- reading -----------------------------------------------------------------------------


_NUMBERS = ("lower_bound_ms", "seconds")
_TEXTS = ("solver", "status", "engine", "note", "cost_source")
_OTHERS = ("fingerprint", "makespan_ms", "hit_time_limit", "alternatives", "layout", "topology")
_LISTS = ("limits", "prices", "proof", "specs", "batches")


def _fields(data: Any) -> dict[str, Any]:
    """The fields of a plan from the data that were saved of it.

    Raises:
        PlanError: a plan of a format that is not known; or not a plan, and which field is wrong.
        ValueError: the fields do not fit each other.
    """
    version = record(data, "", "format")["format"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise PlanError(f"the plan has format {version!r}, this version reads {FORMAT_VERSION}")
    record(data, "", *_NUMBERS, *_TEXTS, *_OTHERS, *_LISTS)
    specs = ModelSpecs.from_dict(data["specs"])
    prices = each(data, "prices", "", _price_row)
    different((price.key for price in prices), "the shapes in prices")
    missing = {m.key for m in specs.matrices} - {p.key for p in prices} if prices else ()
    for key in sorted(missing):
        raise PlanError(f"prices: there is none for the matrices of {key[0]} x {key[1]} {key[2]}")
    claim = None
    if (data["fingerprint"], data["makespan_ms"]) != (None, None):
        claim = Claim(real(data, "makespan_ms", ""), text(data, "fingerprint", "", _MOST_KERNEL))
    return {
        **{name: real(data, name, "") for name in _NUMBERS},
        **{name: text(data, name, "") for name in _TEXTS},
        "specs": specs,
        "topology": Topology.from_dict(data["topology"], "topology"),
        "batches": each(data, "batches", "", _batch),
        "layout": choice(data, "layout", "", Layout),
        "alternatives": each(data, "alternatives", "", _alternative),
        "limits": OwnerLimits.from_dict(data["limits"], "limits"),
        "prices": prices,
        "proof": None if data["proof"] is None else _proof(data["proof"], "proof"),
        "hit_time_limit": flag(data, "hit_time_limit", ""),
        "claim": claim,
    }


def _batch(data: Any, at: str) -> Batch:
    row(data, at, 4, 4)
    kernel = _kernel(data, 3, at)
    return Batch(whole(data, 0, at), wholes(data, 1, at), real(data, 2, at), kernel)


def _alternative(data: Any, at: str) -> tuple[str, float]:
    row(data, at, 2, 2)
    return text(data, 0, at), real(data, 1, at)


def _proof(data: Any, at: str) -> Proof:
    row(data, at, 3, 3)
    dual = Dual(wholes(data, 0, at, -MOST_WHOLE), wholes(data, 1, at))
    return Proof(dual, whole(data, 2, at, -1))


def _price_row(data: Any, at: str) -> PriceRow:
    row(data, at, 4, 4)
    key = row(data[0], f"{at}[0]", 3, 3)
    ms, origin = reals(data, 1, at, high=_MOST_PRICE), texts(data, 2, at)
    kernels = texts(data, 3, at, _MOST_KERNEL)
    if not ms or len(origin) != len(ms) or len(kernels) not in (0, len(ms)):
        raise PlanError(
            f"{at}: expected a price for one matrix at least, and an origin and a kernel for each "
            f"price, found {len(ms)} prices, {len(origin)} origins and {len(kernels)} kernels"
        )
    for i in range(len(kernels)):
        _kernel(kernels, i, f"{at}[3]")
    shape = whole(key, 0, f"{at}[0]", 1), whole(key, 1, f"{at}[0]", 1)
    return PriceRow((*shape, text(key, 2, f"{at}[0]")), ms, origin, kernels)


def _kernel(of: Any, key: int, at: str) -> str:
    name = text(of, key, at, _MOST_KERNEL)
    try:
        _check_kernel(name)
    except ValueError as error:
        raise PlanError(f"{at}[{key}]: {error}") from None
    return name
