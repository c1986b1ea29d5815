"""The ownership plan: pure data, the same on every rank, and its JSON.

::

    matrices   q0 k0 v0 o0 up0 down0 | q1 k1 v1 o1 up1 down1 | ...
    owner       2  3  1  3   0    2  |  1  2  3  1   0    1  | ...
    batches    rank 0: [up0 up1 ...]    rank 1: [q1 v0 o1 ...] [down1 ...]   ...

A batch has one shape, one owner, one kernel.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from dmuon.config import BATCH_BUCKETS, BUCKET_BYTES, ShardedOptions
from dmuon.scheduler.json_files import cut, decode, different, parse, sha256
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, OwnerLimits, ParameterSpec, ShapeKey
from dmuon.scheduler.topology import Topology
from dmuon.types import KernelChoice, Layout, PlanError, grouped

FORMAT_VERSION = 15
_BUCKETS, _LEAST_BYTES = 4, 1 << 21  # by default so many buckets, if all get so many bytes
STATUSES = ("optimal", "feasible", "time_limit")
_MOST_BATCH_MS = 1e12  # 30 years


Parts = tuple[tuple[int, ...], ...]
"""Sets of ranks, all of one size, each of which may compute a matrix by itself."""


@dataclass(frozen=True)
class Way:
    """How a step is divided. ``redundant``: the parts of the mesh that each compute a matrix, by
    matrix; ``bucket_bytes``: the size of buckets (None: the layout's own); ``by_shape``: all owners
    compute one shape at a time, else matrices in the order in which the next forward needs them;
    ``rings``: all-gathers between more than two nodes use rings on gloo, too."""

    redundant: Mapping[int, Parts] = field(default_factory=dict)
    bucket_bytes: int | None = None
    by_shape: bool = False
    rings: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that their owner orthogonalizes together.

    ``matrices`` are indices into `ModelSpecs.matrices`; ``ms`` is the predicted time; ``kernel`` is
    the text of a `KernelChoice`, or "" for the fixed rule at run time. ``copies``, if any, are the
    ranks that each compute the whole batch (redundancy), the owner first: one for each part of the
    mesh, whose ranks take its result."""

    owner: int
    matrices: tuple[int, ...]
    ms: float
    kernel: str = ""
    copies: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that compute the batch."""
        return self.copies or (self.owner,)


@dataclass(frozen=True, slots=True)
class PriceRow:
    """The prices of one shape in planning: milliseconds of batches of 1, 2, 3, ... matrices.
    ``origin`` says where each price comes from (`costs.ORIGINS`), ``kernels``, if any, which kernel
    takes that time."""

    key: ShapeKey
    ms: tuple[float, ...]
    origin: tuple[str, ...]
    kernels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        columns = [self.origin, *([self.kernels] if self.kernels else [])]
        if not self.ms or any(len(column) != len(self.ms) for column in columns):
            raise PlanError(f"expected as many origins and kernels as prices, found {self}")
        for batch, ms in enumerate(self.ms, 1):
            if not 0 <= ms <= _MOST_BATCH_MS:
                raise PlanError(
                    "the cost of {} matrices of {} x {} {}".format(batch, *self.key)
                    + f" must be between 0 and {_MOST_BATCH_MS:g} milliseconds, found {ms}: "
                    "measure again, or correct the cost table"
                )
        for kernel in filter(None, self.kernels):
            KernelChoice.parse(kernel)

    def kernel(self, batch: int) -> str:
        """Return the kernel of a batch of this size, "" for none."""
        return self.kernels[batch - 1] if batch <= len(self.kernels) else ""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of the optimizer's part of a simulated step: as planned (``ms``); with one owner
    per matrix and the layout's own buckets (``once_ms``); with all matrices computed by each part
    of the mesh (``copied_ms``; None: impossible). ``work_ms`` is Newton-Schulz, averaged over
    ranks; ``link_ms`` is the traffic if the links never wait: no order of sending is faster."""

    ms: float
    once_ms: float
    copied_ms: float | None
    work_ms: float
    link_ms: float


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan was found: makespans of other solvers, the MILP ``engine``, a ``note`` if the plan
    differs from the request, and whether the plan depends on the clock."""

    alternatives: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    engine: str = ""
    note: str = ""
    hit_time_limit: bool = False


@dataclass(frozen=True, repr=False)
class OwnershipPlan:
    """The owner of every matrix, the batches, and a bound on how good a plan can be.

    ``lower_bound_ms``: no assignment has a smaller makespan under the same ``prices``. The values
    of matrices in ``proof`` prove it (`patterns.refuted`; empty: simple reasons are enough; None in
    a plan made by hand).

    ``bucket_bytes`` is the chosen size of buckets (None: the layout's own), ``rings`` is as in
    `Way`. ``step`` has the simulated times behind these choices (None: link rates are unknown, or
    nothing travels).
    """

    specs: ModelSpecs
    topology: Topology
    batches: tuple[Batch, ...]
    layout: Layout
    solver: str
    status: str
    cost_source: str
    lower_bound_ms: float
    search: Search = Search()
    limits: OwnerLimits = OwnerLimits()  # noqa: RUF009  frozen
    prices: tuple[PriceRow, ...] = ()
    proof: tuple[int, ...] | None = None
    bucket_bytes: int | None = None
    rings: bool = False
    step: StepTimes | None = None

    def __post_init__(self) -> None:
        self.limits.check(len(self.specs.matrices), self.topology.world)
        _check_batches(self.batches, self.specs.matrices, self.topology.world)
        different((price.key for price in self.prices), "the shapes in prices")
        if self.status not in STATUSES:
            raise PlanError(f"status: expected one of {', '.join(STATUSES)}, found {self.status!r}")
        missing = {m.key for m in self.specs.matrices} - {p.key for p in self.prices}
        if missing and self.prices:
            raise PlanError("there is no price for matrices of {} x {} {}".format(*min(missing)))

    def __repr__(self) -> str:
        counts = f"matrices={len(self.specs.matrices)}, ranks={self.topology.world}"
        return f"OwnershipPlan({counts}, layout={self.layout.value!r})"

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The owner of each matrix."""
        return tuple(ranks[0] for ranks in self.copies)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that compute each matrix, the owner first."""
        found = {i: b.ranks for b in self.batches for i in b.matrices}
        return tuple(found[i] for i in range(len(self.specs.matrices)))

    @cached_property
    def loads_ms(self) -> tuple[float, ...]:
        """Predicted milliseconds of each rank."""
        loads = [0.0] * self.topology.world
        for batch in self.batches:
            for rank in batch.ranks:
                loads[rank] += batch.ms
        # Costs are whole ticks, at the finest picoseconds; smaller digits are errors of the sum.
        return tuple(round(load, 9) for load in loads)

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of optimizer state of each rank: fixed bytes, and the state of its own matrices."""
        state = [self.limits.fixed_bytes_of(rank) for rank in range(self.topology.world)]
        for i, (matrix, owners) in enumerate(zip(self.specs.matrices, self.copies, strict=True)):
            for owner in owners:
                state[owner] += self.limits.state_bytes(i, matrix, self.layout)
        return tuple(state)

    @property
    def work_ms(self) -> float:
        """Predicted milliseconds of all batches, averaged over ranks."""
        return math.fsum(b.ms * len(b.ranks) for b in self.batches) / self.topology.world

    @property
    def makespan_ms(self) -> float:
        """Predicted milliseconds of the busiest owner."""
        return max(self.loads_ms)

    def owned_by(self, rank: int) -> tuple[str, ...]:
        """Return the names of the matrices that ``rank`` orthogonalizes, in registration order."""
        mine = sorted(i for b in self.batches if rank in b.ranks for i in b.matrices)
        return tuple(self.specs.matrices[i].name for i in mine)

    @cached_property
    def _fingerprint(self) -> str:
        specs = self.specs
        matrices = [
            (m.name, specs.parameters[m.parameter].name, *m.shape)
            + (m.dtype, m.start, m.form, m.steps)
            for m in specs.matrices
        ]
        # By name, because the order of the parameters must not matter.
        data = {
            "format": FORMAT_VERSION,
            "parameters": sorted(specs.parameters, key=lambda p: p.name),
            "frozen": sorted(specs.frozen, key=lambda p: p.name),
            "matrices": sorted(matrices),
            "topology": _plain(self.topology) | {"axes": None},  # axis names do not matter
            "batches": [
                (b.ranks, [matrices[i][0] for i in b.matrices], b.ms, b.kernel)
                for b in self.batches
            ],
            "layout": self.layout,
        }
        if self.bucket_bytes is not None:
            data["bucket_bytes"] = self.bucket_bytes
        if self.rings:
            data["rings"] = True
        return sha256(data, _plain)[:16]

    def fingerprint(self) -> str:
        """Return a hash of all that decides which work runs where; equal on ranks that agree."""
        return self._fingerprint

    def to_json(self) -> str:
        """Return one JSON object, with the fingerprint; `from_json` makes an equal plan of it."""
        data = {"format": FORMAT_VERSION, "fingerprint": self.fingerprint()} | _plain(self)
        return json.dumps(data, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> OwnershipPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan, has another format, or was changed; names the field.
        """
        try:
            data = parse(text)
            version = data.get("format") if isinstance(data, dict) else None
            if version != FORMAT_VERSION:
                raise PlanError(f"found format {version!r}, this version reads {FORMAT_VERSION}")
            plan: OwnershipPlan = decode(cls, data)
            if data.get("fingerprint") != plan.fingerprint():
                raise PlanError(
                    "its fingerprint is not that of its content, so it was changed or damaged: "
                    "plan again, or change the plan in code (dataclasses.replace) and write that"
                )
            return plan
        except (ValueError, RecursionError) as error:
            raise PlanError(f"not an ownership plan: {cut(str(error))}") from error


_ROWS = (Batch, MatrixSpec, PriceRow)


def _plain(value: Any) -> Any:
    """Return a dataclass as JSON data: its fields by name, or a list if there may be thousands."""
    named = {one.name: getattr(value, one.name) for one in fields(value)}
    return list(named.values()) if isinstance(value, _ROWS) else named


def fitted_plan(
    plan: OwnershipPlan, specs: ModelSpecs, topology: Topology, layout: Layout
) -> OwnershipPlan:
    """Fit a plan to a model and its mesh: the same owners and batches, by the names of matrices.

    The order of parameters does not matter, nor do mesh axes if ranks are numbered alike, nor the
    layout, as long as momentum lies with owners in both, or with parameters in both. Raise
    PlanError, listing the differences, if the plan is for another model, mesh or layout."""
    if plan.layout.keeps_state_at_owners != layout.keeps_state_at_owners:
        raise PlanError(
            f"the saved plan is for layout {plan.layout.value!r}; this model is {layout.value!r}"
        )
    old, new = ({p.name: p for p in of.parameters} for of in (plan.specs, specs))
    found = _misfits(plan.topology, topology, old, new)
    number = {key: i for i, key in enumerate(_keys(specs))}
    keys = _keys(plan.specs)
    if not found and (number.keys() != {*keys} or len(number) != len(keys)):
        found.append("the parameters are split into other matrices (splits or heads)")
    if found:
        more = f" (+{len(found) - 12} more)" if len(found) > 12 else ""
        raise PlanError("the saved plan does not fit: " + "; ".join(found[:12]) + more)
    place, limits = [number[key] for key in keys], plan.limits
    domains, sizes = (
        tuple(values[i] for i in sorted(range(len(values)), key=place.__getitem__))
        for values in (limits.domain_of, limits.matrix_bytes)
    )
    return replace(
        plan,
        # The plan's reasons of routing are kept, so that its fingerprint stays the same.
        specs=replace(plan.specs, parameters=tuple(old[n] for n in new), matrices=specs.matrices),
        topology=topology,
        layout=layout,
        batches=tuple(
            replace(b, matrices=tuple(place[i] for i in b.matrices)) for b in plan.batches
        ),
        limits=replace(limits, domain_of=domains, matrix_bytes=sizes),
    )


def _misfits(
    before: Topology, now: Topology, old: dict[str, ParameterSpec], new: dict[str, ParameterSpec]
) -> list[str]:
    """List how the mesh and parameters (by name) of a saved plan differ from the current ones."""
    found: list[str] = []
    saved, mesh = ([n for n in t.shape if n > 1] for t in (before, now))
    if before.world != now.world:
        found.append(f"the plan is for {before.world} ranks, the mesh has {now.world}")
    elif saved != mesh and min(len(saved), len(mesh)) > 1:
        found.append(f"the plan is for mesh {before.shape}, the mesh is {now.shape}")
    kinds = {(old[name].dtype, new[name].dtype) for name in old.keys() & new.keys()}
    if len(kinds) == 1 and (kind := next(iter(kinds)))[0] != kind[1]:  # else one line for each
        found.append(f"the plan is for {kind[0]}: plan with --dtype {kind[1]}")
        old = {name: replace(spec, dtype=kind[1]) for name, spec in old.items()}
    lines = [f"- {name} {list(old[name].shape)}" for name in old if name not in new]
    lines += [f"+ {name} {list(new[name].shape)}" for name in new if name not in old]
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        if (a.shape, a.dtype, a.algorithm) != (b.shape, b.dtype, b.algorithm):
            lines.append(
                f"! {name}: plan {list(a.shape)} {a.dtype} {a.algorithm.value}, "
                f"model {list(b.shape)} {b.dtype} {b.algorithm.value}"
            )
    return [*found, *sorted(lines)]


def _keys(specs: ModelSpecs) -> list[tuple[str, MatrixSpec]]:
    """Return the matrices of a model by the names, not the indices, of their parameters."""
    return [(specs.parameters[m.parameter].name, replace(m, parameter=0)) for m in specs.matrices]


def refitted(plan: OwnershipPlan, specs: ModelSpecs, limits: OwnerLimits) -> OwnershipPlan | None:
    """Fit a plan to a model with the same matrices in the same order, and other parameters beside
    them, whose time affects no plan. None if the matrices differ or the cap is exceeded."""
    if _keys(plan.specs) != _keys(specs):
        return None
    found = replace(plan, specs=specs, limits=limits)
    if limits.memory_bytes is not None and max(found.state_bytes) > limits.memory_bytes:
        return None
    return found


# ---- batches as they are executed ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices of one shape, owner and param group, stacked ``[b, rows, cols]`` to be
    orthogonalized together.

    A unit with both tall and wide matrices is stacked short side first, and ``transposed`` says
    which slots hold a transpose (empty: none). If there are ``copies``, the ranks of ``audience``
    (empty: all) take this owner's result.
    """

    owner: int
    group: int
    matrices: tuple[int, ...]
    rows: int
    cols: int
    ms: float
    kernel: str = ""
    transposed: tuple[bool, ...] = ()
    copies: tuple[int, ...] = ()
    audience: tuple[int, ...] = ()

    @property
    def is_counted(self) -> bool:
        """Whether its owner is the first of all copies, so that norms count the unit once."""
        return not self.copies or self.owner == self.copies[0]

    def holds_transpose(self, position: int) -> bool:
        """Return True if the slot of the matrix at this position holds its transpose."""
        return bool(self.transposed) and self.transposed[position]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.matrices), self.rows, self.cols

    @property
    def numel(self) -> int:
        return len(self.matrices) * self.rows * self.cols


def units_of(
    plan: OwnershipPlan, groups: Sequence[int], *, one_by_one: bool = False
) -> tuple[Unit, ...]:
    """Return the planned batches as they are executed, in the order of the plan: split by the
    ``groups`` of their matrices, and with ``one_by_one`` also into tall and wide matrices. The
    units of a split batch share its predicted time."""
    return tuple(unit for batch in plan.batches for unit in _cut(plan, batch, groups, one_by_one))


def _cut(plan: OwnershipPlan, batch: Batch, groups: Sequence[int], one_by_one: bool) -> list[Unit]:
    matrices, units = plan.specs.matrices, []
    tall = {i: one_by_one and matrices[i].rows > matrices[i].cols for i in batch.matrices}
    for (group, _), members in grouped(((groups[i], tall[i]), i) for i in batch.matrices).items():
        shapes = [matrices[i].shape for i in members]
        is_mixed = len(set(shapes)) > 1
        rows, cols = sorted(shapes[0]) if is_mixed else shapes[0]
        transposed = tuple(shape != (rows, cols) for shape in shapes) if is_mixed else ()
        share = batch.ms * len(members) / len(batch.matrices)
        what = batch.owner, group, tuple(members), rows, cols, share, batch.kernel, transposed
        units.append(Unit(*what, batch.copies))
    return units


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in a pipeline: a bucket has about ``bucket_bytes`` of each owner, a step at ``least``
    so many buckets. There are ``buffers`` of ``room`` bytes, which hold more buckets if these are
    smaller. ``rings`` as in `Way`."""

    bucket_bytes: int = BUCKET_BYTES
    room: int = BUCKET_BYTES
    least: int | None = None
    buffers: int = 2
    rings: bool = False

    @classmethod
    def of(cls, options: ShardedOptions, plan: OwnershipPlan) -> Sizes:
        """Return the sizes that ``options`` ask for, or else the planned ones."""
        size, least = options.bucket_bytes, options.min_buckets
        room = size or BUCKET_BYTES
        if size is None and least is None and plan.bucket_bytes is not None:
            size, least, room = plan.bucket_bytes, 1, max(BUCKET_BYTES, plan.bucket_bytes)
        if plan.layout is Layout.REDUCED:
            # Owners wait for no gather that more buckets would hide, and all may be on their way.
            room, least = max(room, BUCKET_BYTES), 1
        return cls(size or BUCKET_BYTES, room, least, rings=plan.rings)


def buckets_of(
    units: Sequence[Unit], travelling: Sequence[int], sizes: Sizes, item: int
) -> tuple[list[tuple[int, ...]], int]:
    """Return buckets (`cut_buckets`, by number of copies) in the order in which they travel, and
    how many may be on their way back at once. Buckets with the most traffic go first, to travel
    while others are computed; if not all of these may be on their way, the rest go in between."""
    levels = grouped((len(units[u].copies), u) for u in travelling)
    cuts = [
        cut_buckets(units, levels[n], sizes.bucket_bytes, sizes.least, item) for n in sorted(levels)
    ]
    every = [cut for of_level in cuts for cut in of_level]
    owned = (grouped((units[u].owner, units[u].numel * item) for u in cut) for cut in every)
    largest = max((sum(mine) for of in owned for mine in of.values()), default=1)
    slots = max(sizes.buffers, min(len(every), sizes.buffers * sizes.room // largest))
    first, rest = every[: min([slots, *map(len, cuts[:1])])], []
    for k, of_level in enumerate(cuts):
        left = of_level[0 if k else len(first) :]
        rest += [((n + 0.5) / len(left), k, cut) for n, cut in enumerate(left)]
    return [*first, *(cut for *_, cut in sorted(rest))], slots


def cut_buckets(
    units: Sequence[Unit],
    travelling: Sequence[int],
    bucket_bytes: int,
    min_buckets: int | None,
    item: int,
) -> tuple[tuple[int, ...], ...]:
    """Cut the units at ``travelling`` into buckets of units that travel together, in order.

    Every owner has about the same share of its time in each bucket, so that none waits for another.
    The first and the last are half as large, because nothing hides the gather of the first and the
    scatter of the last. In a bucket, an owner has at most as many bytes as a batch may have, or a
    single unit; otherwise the bucket is cut once more.
    """
    if not (by_owner := grouped((units[u].owner, u) for u in travelling)):
        return ()
    fullest = max(sum(units[u].numel for u in mine) * item for mine in by_owner.values())
    most = max(len(mine) for mine in by_owner.values())
    least = min(_BUCKETS, fullest // _LEAST_BYTES) if min_buckets is None else min_buckets
    count = max(1, min(max(least, math.ceil(fullest / bucket_bytes)), most))
    weights = [2.0] * count
    if count > 2:
        weights[0] = weights[-1] = 1.0
    # The fractions of an owner's time at which one bucket ends and the next begins.
    edges = [edge / sum(weights) for edge in accumulate(weights[:-1])]
    middles: list[tuple[float, int]] = []
    for mine in by_owner.values():
        weights = [units[u].ms for u in mine]
        if not sum(weights) > 0:
            weights = [float(units[u].numel) for u in mine]
        ends = accumulate(weights)
        total = sum(weights)
        middles += [((end - w / 2) / total, u) for u, w, end in zip(mine, weights, ends)]
    bucket_of: dict[int, int] = {}
    part, bucket, sizes = 0, 0, dict.fromkeys(by_owner, 0)  # bytes of each owner in the bucket
    for middle, u in sorted(middles):
        owner, nbytes = units[u].owner, units[u].numel * item
        is_full = 0 < sizes[owner] > BATCH_BUCKETS * bucket_bytes - nbytes
        # An edge that would follow soon after is skipped.
        if (now := bisect_right(edges, middle + is_full / (2 * count))) > part or is_full:
            part, bucket, sizes = max(now, part), bucket + 1, dict.fromkeys(by_owner, 0)
        sizes[owner] += nbytes
        bucket_of[u] = bucket
    buckets: list[list[int]] = [[] for _ in range(bucket + 1)]
    for u, b in sorted(bucket_of.items()):
        buckets[b].append(u)
    return tuple(tuple(bucket) for bucket in buckets if bucket)


def _check_batches(batches: Sequence[Batch], matrices: Sequence[MatrixSpec], world: int) -> None:
    count = Counter(i for batch in batches for i in batch.matrices)
    known = range(len(matrices))
    if wrong := [i for i in known if count[i] != 1] + [i for i in count if i not in known]:
        names = [matrices[i].name if i in known else f"#{i}" for i in wrong[:5]]
        raise PlanError(f"each matrix needs exactly one owner; this plan fails for {names}")
    for batch in batches:
        for rank in batch.ranks:
            if not 0 <= rank < world:
                raise PlanError(f"owner {rank} is not a rank of a mesh of {world} ranks")
        if not batch.matrices or len({matrices[i].key for i in batch.matrices}) != 1:
            raise PlanError(f"a batch must hold matrices of one shape and dtype, found {batch}")
        copies = batch.copies
        if copies and (copies[0] != batch.owner or not 1 < len(copies) == len({*copies})):
            raise PlanError(
                "copies must be two ranks or more, the owner first, found "
                f"{copies[:8]} for owner {batch.owner}"
            )
        try:
            if batch.kernel:
                KernelChoice.parse(batch.kernel)
        except ValueError as error:
            raise PlanError(f"a batch on rank {batch.owner} cannot be run: {error}") from None
