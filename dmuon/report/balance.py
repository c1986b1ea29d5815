"""The numbers behind the load-balance report: what a plan does to each rank, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dmuon.report.bottleneck import Bottleneck, bottleneck_of, key_of
from dmuon.report.kernels import KernelUse, kernel_uses
from dmuon.report.measured import MeasuredBalance, compare, excess
from dmuon.scheduler.certificate import Certificate, certify
from dmuon.scheduler.costs import ShapeKey
from dmuon.scheduler.placement import Contention, contention, natural_key, row_major
from dmuon.scheduler.plan import Batch, OwnershipPlan

__all__ = ["Balance", "ContentionPair", "RankLoad", "ShapeUse", "Spread", "launch_owners"]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank has: matrices, predicted ms a step, bytes of optimizer state."""

    rank: int
    matrices: int
    ms: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, mean and most over the ranks."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """All matrices of one shape: how they are batched, and what that costs.

    ``batches`` holds (size, how many of them), largest first. ``single_ms`` is the price of one
    matrix alone, None where the plan has no prices; ``origins`` say where the prices come from.
    """

    rows: int
    cols: int
    dtype: str
    count: int
    batches: tuple[tuple[int, int], ...]
    total_ms: float
    single_ms: float | None
    origins: tuple[str, ...]

    @property
    def each_ms(self) -> float:
        """Mean milliseconds of a matrix, batched as planned."""
        return self.total_ms / self.count


@dataclass(frozen=True, slots=True)
class ContentionPair:
    """How the owners of consecutive matrices share nodes and columns.

    ``plan`` is as planned, ``row_major`` as it would be with the ranks taking turns in order.
    """

    row_major: Contention
    plan: Contention


@dataclass(frozen=True)
class Balance:
    """A plan with what it gives to each rank, and the ranks' measured times if there are any."""

    plan: OwnershipPlan
    ranks: tuple[RankLoad, ...]
    measured_ms: tuple[float, ...] | None = None

    @property
    def makespan_ms(self) -> float:
        """Predicted milliseconds of the busiest owner."""
        return self.plan.makespan_ms

    @property
    def lower_bound_ms(self) -> float:
        """No assignment has a smaller makespan under the same costs."""
        return self.plan.lower_bound_ms

    @property
    def gap(self) -> float:
        """``makespan / lower bound - 1``."""
        return self.makespan_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0

    @property
    def mean_ms(self) -> float:
        """The even share: mean predicted milliseconds of a rank."""
        return sum(r.ms for r in self.ranks) / len(self.ranks)

    @property
    def imbalance(self) -> float:
        """``busiest / mean - 1``."""
        return excess(self.makespan_ms, self.mean_ms)

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """Ranks that own no matrix."""
        return tuple(r.rank for r in self.ranks if not r.matrices)

    @cached_property
    def memory(self) -> Spread:
        """Bytes of optimizer state of a rank."""
        state = [r.state_bytes for r in self.ranks]
        return Spread(min(state), sum(state) / len(state), max(state))

    @cached_property
    def shapes(self) -> tuple[ShapeUse, ...]:
        """Every shape with its batches, the costliest first."""
        return _shapes(self.plan)

    @cached_property
    def kernels(self) -> tuple[KernelUse, ...]:
        """Which kernels run how many batches; empty where the plan names none."""
        return kernel_uses(self.plan)

    @cached_property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the plan; None when it has no matrices."""
        return bottleneck_of(self.plan)

    @property
    def certificate(self) -> Certificate:
        """The verdict of an independent check of the plan and of its lower bound."""
        return _certified(self.plan)

    @cached_property
    def contention(self) -> ContentionPair | None:
        """Crowding of nodes and columns before and after placement; None on a single node."""
        topology, owners = self.plan.topology, launch_owners(self.plan)
        if topology.nodes < 2 or not owners:
            return None
        turns = row_major(len(owners), topology.world)
        return ContentionPair(contention(turns, topology), contention(owners, topology))

    @cached_property
    def measured(self) -> MeasuredBalance | None:
        """Measured against predicted; None before any training step."""
        return None if self.measured_ms is None else compare(self.plan, self.measured_ms)


@lru_cache(maxsize=8)
def _certified(plan: OwnershipPlan) -> Certificate:
    # Kept, for it may take as long as a step of planning, and reports are made again and again.
    return certify(plan)


def launch_owners(plan: OwnershipPlan) -> list[int]:
    """The owner of each matrix, in about the order in which the matrices travel.

    Without those that a single rank may own: they do not travel.
    """
    named = [
        (natural_key(matrix.name), owner)
        for i, (matrix, owner) in enumerate(zip(plan.specs.matrices, plan.owners, strict=True))
        if not plan.limits.is_forced(i)
    ]
    return [owner for _, owner in sorted(named)]


# ---- shapes ------------------------------------------------------------------------------


def _shapes(plan: OwnershipPlan) -> tuple[ShapeUse, ...]:
    by_key: dict[ShapeKey, list[Batch]] = defaultdict(list)
    for batch in plan.batches:
        by_key[key_of(plan, batch)].append(batch)
    prices = {row.key: row for row in plan.prices}
    rows = []
    for key, batches in by_key.items():
        sizes = Counter(len(b.matrices) for b in batches)
        price = prices.get(key)
        origins = {o for size in sizes if price for o in price.origin[size - 1 : size]}
        rows.append(
            ShapeUse(
                *key,
                count=sum(len(b.matrices) for b in batches),
                batches=tuple(sorted(sizes.items(), reverse=True)),
                total_ms=sum(b.ms for b in batches),
                single_ms=None if price is None else price.ms[0],
                origins=tuple(sorted(origins)),
            )
        )
    return tuple(sorted(rows, key=lambda s: (-s.total_ms, s.rows, s.cols, s.dtype)))
