"""What limits a plan, and what splitting the costliest matrices would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from dmuon.scheduler.costs import ShapeKey, newton_schulz_flops
from dmuon.scheduler.plan import Batch, OwnershipPlan
from dmuon.scheduler.specs import MatrixSpec

__all__ = ["Bottleneck", "Floor", "Split", "bottleneck_of", "key_of", "least_ms"]


@dataclass(frozen=True, slots=True)
class Split:
    """An estimate of cutting the costliest matrices in two by rows, as `heads` or `splits` would.

    ``rows x cols`` is the larger half of the named matrix and ``ms`` its price; ``makespan_ms`` is
    what would then limit the plan.
    """

    rows: int
    cols: int
    ms: float
    makespan_ms: float
    saves_ms: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The matrix that no plan can get below: its owner needs ``ms`` for it alone.

    ``count`` matrices cost as much. ``split`` is None where one of them has a single row.
    """

    name: str
    rows: int
    cols: int
    count: int
    ms: float
    split: Split | None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The busiest rank and its costliest batch; ``floor`` if one matrix limits the plan.

    ``movable``: some matrix of this rank could have another owner.
    """

    rank: int
    ms: float
    rows: int
    cols: int
    matrices: tuple[str, ...]
    batch_ms: float
    floor: Floor | None
    movable: bool = True


def key_of(plan: OwnershipPlan, batch: Batch) -> ShapeKey:
    """The shape and dtype of a batch's matrices."""
    return plan.specs.matrices[batch.matrices[0]].key


def least_ms(plan: OwnershipPlan) -> dict[ShapeKey, float]:
    """What an owner needs at least to have a matrix of each shape: its cheapest batch."""
    least: dict[ShapeKey, float] = {}
    for batch in plan.batches:
        # Without prices: a batch is rarely cheaper alone than its share in a larger one.
        key, share = key_of(plan, batch), batch.ms / len(batch.matrices)
        least[key] = min(share, least.get(key, share))
    least.update((row.key, min(row.ms)) for row in plan.prices if row.key in least)
    return least


def bottleneck_of(plan: OwnershipPlan) -> Bottleneck | None:
    """What limits a plan; None when it has no matrices."""
    if not plan.batches:
        return None
    # A rank with fixed load alone has nothing that a plan could move.
    rank = max({b.owner for b in plan.batches}, key=lambda r: (plan.loads_ms[r], -r))
    batch = max((b for b in plan.batches if b.owner == rank), key=lambda b: b.ms)
    rows, cols, _ = key_of(plan, batch)
    return Bottleneck(
        rank=rank,
        ms=plan.loads_ms[rank],
        rows=rows,
        cols=cols,
        matrices=tuple(plan.specs.matrices[i].name for i in batch.matrices),
        batch_ms=batch.ms,
        floor=_floor(plan),
        movable=not all(
            plan.limits.is_forced(i) for b in plan.batches if b.owner == rank for i in b.matrices
        ),
    )


def _floor(plan: OwnershipPlan) -> Floor | None:
    """The costliest matrix, if it limits the plan: no other is on its owner, or ranks are idle."""
    least = least_ms(plan)
    most = max(least.values())
    fixed = min(plan.limits.fixed_ms, default=0.0)
    alone = plan.makespan_ms <= (most + fixed) * (1 + 1e-9)
    # With pools, ranks may be idle while those of one pool have much to do.
    enough = plan.topology.world <= len(plan.specs.matrices) or bool(plan.limits.pool_of)
    if not alone and enough:
        return None
    # A shape costs what its transpose costs, so several shapes may be the floor together.
    keys = {key for key, ms in least.items() if ms >= most * (1 - 1e-9)}
    members = [m for m in plan.specs.matrices if m.key in keys]
    first = members[0]
    split = _split(plan, least, keys, first) if all(m.rows > 1 for m in members) else None
    return Floor(first.name, first.rows, first.cols, len(members), most, split)


def _split(
    plan: OwnershipPlan, least: Mapping[ShapeKey, float], keys: Set[ShapeKey], first: MatrixSpec
) -> Split:
    """What limits the plan once all matrices of these shapes are cut in two by rows, about."""
    world = plan.topology.world
    mean = sum(plan.loads_ms) / world
    count = Counter(m.key for m in plan.specs.matrices)
    halves = {key: _half_ms(key, least[key]) for key in keys}
    more = sum(count[key] * (2 * halves[key] - least[key]) for key in keys)
    # By pigeonhole some owner takes this many of the halves.
    together = -(-2 * sum(count[key] for key in keys) // world)
    others = [ms for key, ms in least.items() if key not in keys]
    then = max(
        [mean + more / world, together * min(halves.values()), *halves.values()]
        + [*others, *plan.limits.fixed_ms]
    )
    return Split(
        rows=_half_rows(first.rows),
        cols=first.cols,
        ms=halves[first.key],
        makespan_ms=then,
        saves_ms=max(0.0, plan.makespan_ms - then),
    )


def _half_rows(rows: int) -> int:
    return rows - rows // 2


def _half_ms(key: ShapeKey, ms: float) -> float:
    """There is no price for the half, so it is its whole's price, scaled by the operations."""
    rows, cols, _ = key
    return ms * newton_schulz_flops(_half_rows(rows), cols, 1) / newton_schulz_flops(rows, cols, 1)
