"""The load-balance report: what a plan does to each rank, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon.report.balance import Balance, RankLoad
from dmuon.report.measured import MeasuredBalance
from dmuon.scheduler.plan import OwnershipPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LoadBalanceReport", "RankLoad", "build_report"]


@dataclass(frozen=True)
class LoadBalanceReport(Balance):
    """The balance of a plan: `str()` for a terminal, `to_html` for a browser, `to_dict` as data.

    ``measured_ms`` are the ranks' Newton-Schulz milliseconds a step, None before training steps.
    """

    def __str__(self) -> str:
        # The renderers are imported when used: planning needs neither of them.
        from dmuon.report.text import text

        return text(self)

    def __rich__(self) -> RenderableType:
        from dmuon.report.text import renderable

        return renderable(self)

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page with pictures; it appears whole or not at all.

        Raises:
            FileNotFoundError: the directory does not exist.
        """
        from dmuon.report.html import page, write_whole

        write_whole(Path(path), page(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; keys as in the benchmarks."""
        plan = self.plan
        return {
            "layout": plan.layout.value,
            "owners": plan.topology.world,
            "solver": plan.solver,
            "engine": plan.engine,
            "status": plan.status,
            "hit_time_limit": plan.hit_time_limit,
            "note": plan.note,
            "seconds": plan.seconds,
            "costs": plan.cost_source,
            "fingerprint": plan.fingerprint(),
            "makespan_ms": self.makespan_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "imbalance": self.imbalance,
            "certificate": asdict(self.certificate) | {"verdict": str(self.certificate)},
            "alternatives_ms": dict(plan.alternatives),
            "kernels": [asdict(use) for use in self.kernels],
            "idle": list(self.idle),
            "memory": asdict(self.memory) | {"cap": plan.limits.memory_bytes},
            "bottleneck": None if self.bottleneck is None else asdict(self.bottleneck),
            "contention": None if self.contention is None else asdict(self.contention),
            "shapes": [asdict(shape) | {"each_ms": shape.each_ms} for shape in self.shapes],
            "measured": None if self.measured is None else _measured_dict(self.measured),
            "ranks": [
                {"rank": r.rank, "matrices": r.matrices, "ms": r.ms, "state_bytes": r.state_bytes}
                for r in self.ranks
            ],
            "parameters": [
                p.to_dict() | {"numel": p.numel} for p in plan.specs.parameters + plan.specs.frozen
            ],
        }


def _measured_dict(measured: MeasuredBalance) -> dict[str, Any]:
    return {
        "ms": list(measured.ms),
        "predicted_ms": list(measured.predicted_ms),
        "makespan_ms": measured.makespan_ms,
        "imbalance": measured.imbalance,
        "ratio": measured.ratio,
        "plannable_ms": measured.plannable_ms,
        "best_ms": measured.best_ms,
        "saving_ms": measured.saving_ms,
        "replan": measured.replan,
    }


def build_report(plan: OwnershipPlan, measured: Sequence[float] | None = None) -> LoadBalanceReport:
    """Sum up a plan per rank. State is what `OwnershipPlan.state_bytes` says.

    ``measured`` are the milliseconds of momentum and Newton-Schulz that each rank needs a step.
    """
    counts = Counter(plan.owners)
    ranks = tuple(
        RankLoad(rank, counts[rank], ms, plan.state_bytes[rank])
        for rank, ms in enumerate(plan.loads_ms)
    )
    if measured is not None and len(measured) != len(ranks):
        raise ValueError(f"measured holds {len(measured)} times for {len(ranks)} ranks")
    return LoadBalanceReport(plan, ranks, None if measured is None else tuple(measured))
