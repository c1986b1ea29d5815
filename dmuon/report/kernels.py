"""Which kernels run the batches of a plan, and what running them together saves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dmuon.report.bottleneck import key_of
from dmuon.scheduler.batches import groups_of
from dmuon.scheduler.plan import OwnershipPlan

__all__ = [
    "KernelUse",
    "Together",
    "kernel_uses",
    "kernels_text",
    "ms_text",
    "together_of",
    "together_text",
]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel, and how many batches and matrices it runs; "" is the fixed rule at run time."""

    kernel: str
    batches: int
    matrices: int


@dataclass(frozen=True, slots=True)
class Together:
    """Batches that share a call for their m x m part.

    ``saved_ms`` is what they would take more in calls of their own, over all ranks, and
    ``busiest_saved_ms`` on the busiest rank.
    """

    groups: int
    batches: int
    saved_ms: float
    busiest_saved_ms: float


def kernel_uses(plan: OwnershipPlan) -> tuple[KernelUse, ...]:
    """Every kernel of the plan, that with most batches first."""
    batches: Counter[str] = Counter(b.kernel for b in plan.batches)
    matrices: Counter[str] = Counter()
    for batch in plan.batches:
        matrices[batch.kernel] += len(batch.matrices)
    order = sorted(batches, key=lambda kernel: (-batches[kernel], kernel))
    return tuple(KernelUse(kernel, batches[kernel], matrices[kernel]) for kernel in order)


def together_of(plan: OwnershipPlan) -> Together | None:
    """The groups of the plan and what they save; None where there are none."""
    groups = groups_of(plan.batches)
    if not groups:
        return None
    alone = {row.key: row.ms for row in plan.prices}
    saved = [0.0] * plan.topology.world
    for batch in (plan.batches[b] for members in groups.values() for b in members):
        row = alone.get(key_of(plan, batch), ())
        if len(batch.matrices) <= len(row):
            saved[batch.owner] += row[len(batch.matrices) - 1] - batch.ms
    busiest = max(range(plan.topology.world), key=lambda rank: (plan.loads_ms[rank], -rank))
    return Together(
        groups=len(groups),
        batches=sum(map(len, groups.values())),
        saved_ms=sum(saved),
        busiest_saved_ms=saved[busiest],
    )


def ms_text(ms: float, top: float) -> str:
    """Milliseconds with as many decimals as a table whose largest entry is ``top`` needs.

    >>> ms_text(12.3456, 20.0), ms_text(0.0012345, 0.02)
    ('12.346', '0.00123')
    """
    decimals = 3 if top >= 0.1 or top <= 0 else min(6, 2 - math.floor(math.log10(top)) + 1)
    return f"{ms:.{decimals}f}"


def kernels_text(uses: tuple[KernelUse, ...]) -> str:
    """
    >>> kernels_text((KernelUse("", 3, 5),))
    'chosen by the fixed rule at run time: Muon.stats()["kernels"] names them'
    >>> kernels_text((KernelUse("gram[2]/torch/float16", 60, 90), KernelUse("", 1, 1)))
    'gram[2]/torch/float16 60 batches, by the fixed rule 1 batch'
    """
    if [use.kernel for use in uses] == [""]:
        return 'chosen by the fixed rule at run time: Muon.stats()["kernels"] names them'
    return ", ".join(
        f"{use.kernel or 'by the fixed rule'} {use.batches} batch{'es' * (use.batches != 1)}"
        for use in uses
    )


def together_text(together: Together | None, top: float) -> str:
    """How many batches share calls, and what that saves; "" if none do."""
    if together is None:
        return ""
    calls = f"{together.groups} call{'s' * (together.groups != 1)}"
    return (
        f"{together.batches} batches with equal short sides run in {calls}: "
        f"{ms_text(together.saved_ms, top)} ms less over all ranks, "
        f"{ms_text(together.busiest_saved_ms, top)} ms on the busiest"
    )
