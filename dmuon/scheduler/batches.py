"""What a plan is made of: batches of matrices, the prices paid for them, and what makes them valid.

A batch is one shape, one owner, one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dmuon.scheduler.costs import ShapeKey
from dmuon.scheduler.specs import MatrixSpec
from dmuon.types import KernelChoice, PlanError

__all__ = ["Batch", "PriceRow", "check_batches", "check_kernel"]


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


@lru_cache(maxsize=1024)
def check_kernel(kernel: str) -> None:
    """Raise ValueError unless a kernel is "" or as `KernelChoice` writes it."""
    if kernel:
        KernelChoice.parse(kernel)


def check_batches(batches: Sequence[Batch], matrices: Sequence[MatrixSpec], world: int) -> None:
    """Raise PlanError unless each matrix has one owner and batches can run as such."""
    _check_owned_once(batches, matrices)
    for batch in batches:
        if not 0 <= batch.owner < world:
            raise PlanError(f"owner {batch.owner} is not a rank of a mesh of {world} ranks")
        if not batch.matrices or len({matrices[i].key for i in batch.matrices}) != 1:
            raise PlanError(f"a batch must hold matrices of one shape and dtype, found {batch}")
        try:
            check_kernel(batch.kernel)
        except ValueError as error:
            raise PlanError(f"a batch on rank {batch.owner} cannot be run: {error}") from None


def _check_owned_once(batches: Sequence[Batch], matrices: Sequence[MatrixSpec]) -> None:
    count = Counter(i for batch in batches for i in batch.matrices)
    known = range(len(matrices))
    wrong = [i for i in known if count[i] != 1] + [i for i in count if i not in known]
    if wrong:
        names = [matrices[i].name if i in known else f"#{i}" for i in wrong[:5]]
        raise PlanError(f"each matrix needs exactly one owner; this plan fails for {names}")
