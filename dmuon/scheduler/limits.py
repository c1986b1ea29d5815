"""What an owner is bound by besides the matrices it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmuon.scheduler.json_files import listed, reals, record, whole, wholes
from dmuon.types import PlanError

__all__ = ["OwnerLimits"]

_MOST_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Fixed loads, the memory cap, and which ranks may own which matrix.

    ``fixed_ms`` and ``fixed_bytes`` hold, for each rank, work and optimizer state that it has
    anyway (AdamW on the rest; in the sharded layout the momentum of its shards); empty means none.
    ``memory_bytes`` caps the optimizer state of a rank, fixed bytes included. ``pools`` are sets of
    ranks (dense matrices on ``dp``, the experts of one ``ep`` coordinate on that coordinate's
    ranks, a matrix that is whole on its rank on that rank alone), and ``pool_of`` is the pool of
    each matrix; empty means that every rank may own every matrix. Matrices of different pools are
    never batched together, so equal sets of ranks should be one pool.
    """

    fixed_ms: tuple[float, ...] = ()
    fixed_bytes: tuple[int, ...] = ()
    memory_bytes: int | None = None
    pools: tuple[tuple[int, ...], ...] = ()
    pool_of: tuple[int, ...] = ()

    def check(self, matrices: int, world: int) -> None:
        """Raise PlanError unless everything has the right length and range."""
        for name in ("fixed_ms", "fixed_bytes"):
            values = getattr(self, name)
            if values and len(values) != world:
                raise PlanError(f"OwnerLimits.{name} has {len(values)} entries for {world} ranks")
            if any(not 0 <= v < float("inf") for v in values):
                raise PlanError(f"OwnerLimits.{name} must be finite and >= 0, found {min(values)}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise PlanError(f"owner_memory_bytes must be at least 1, found {self.memory_bytes}")
        ranks = frozenset(range(world))
        for pool in self.pools:
            if not pool or len(set(pool)) != len(pool) or not ranks.issuperset(pool):
                raise PlanError(
                    f"a pool of OwnerLimits must name ranks of 0..{world - 1}, each once, "
                    f"found {pool[:8]}"
                )
        if bool(self.pools) != bool(self.pool_of):
            raise PlanError("OwnerLimits.pools and pool_of belong together: give both or none")
        if self.pool_of and len(self.pool_of) != matrices:
            raise PlanError(
                f"OwnerLimits.pool_of has {len(self.pool_of)} entries for {matrices} matrices"
            )
        if any(not 0 <= pool < len(self.pools) for pool in self.pool_of):
            raise PlanError("OwnerLimits.pool_of names a pool that is not in OwnerLimits.pools")

    def fixed_ms_of(self, rank: int) -> float:
        return self.fixed_ms[rank] if self.fixed_ms else 0.0

    def fixed_bytes_of(self, rank: int) -> int:
        return self.fixed_bytes[rank] if self.fixed_bytes else 0

    def may_own(self, rank: int, matrix: int) -> bool:
        return not self.pool_of or rank in self.pools[self.pool_of[matrix]]

    def is_forced(self, matrix: int) -> bool:
        """Whether a single rank may own it."""
        return bool(self.pool_of) and len(self.pools[self.pool_of[matrix]]) == 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "fixed_ms": list(self.fixed_ms),
            "fixed_bytes": list(self.fixed_bytes),
            "memory_bytes": self.memory_bytes,
            "pools": [list(pool) for pool in self.pools],
            "pool_of": list(self.pool_of),
        }

    @classmethod
    def from_dict(cls, data: Any, at: str = "limits") -> OwnerLimits:
        """The limits that `to_dict` wrote; PlanError that begins with the path of a field."""
        record(data, at, "fixed_ms", "fixed_bytes", "memory_bytes", "pools", "pool_of")
        pools = data["pools"]
        return cls(
            reals(data, "fixed_ms", at),
            wholes(data, "fixed_bytes", at, high=_MOST_BYTES),
            None if data["memory_bytes"] is None else whole(data, "memory_bytes", at, 1, 10**39),
            tuple(wholes(pools, i, f"{at}.pools") for i in range(len(listed(data, "pools", at)))),
            wholes(data, "pool_of", at),
        )
