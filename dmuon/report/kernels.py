"""Which kernels run the batches of a plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dmuon.scheduler.plan import OwnershipPlan

__all__ = [
    "KernelUse",
    "kernel_uses",
    "kernels_text",
    "ms_text",
]


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel, and how many batches and matrices it runs; "" is the fixed rule at run time."""

    kernel: str
    batches: int
    matrices: int


def kernel_uses(plan: OwnershipPlan) -> tuple[KernelUse, ...]:
    """Every kernel of the plan, that with most batches first."""
    batches: Counter[str] = Counter(b.kernel for b in plan.batches)
    matrices: Counter[str] = Counter()
    for batch in plan.batches:
        matrices[batch.kernel] += len(batch.matrices)
    order = sorted(batches, key=lambda kernel: (-batches[kernel], kernel))
    return tuple(KernelUse(kernel, batches[kernel], matrices[kernel]) for kernel in order)


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
