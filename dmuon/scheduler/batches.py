"""What a plan is made of: batches of matrices, the prices paid for them, and what makes them valid.

::

    batch   [q0 q1 q2]     one shape, one owner, one kernel
    group   [q0 q1 q2] [up0 up1] [down0]     batches whose m x m part runs in one call
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dmuon.scheduler.cost_entries import ShapeKey, SquareKey, square_key
from dmuon.scheduler.specs import MatrixSpec
from dmuon.types import KernelChoice, PlanError

__all__ = ["Batch", "PriceRow", "SquareRow", "check_batches", "groups_of", "is_gram"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that their owner orthogonalizes together.

    ``matrices`` are indices into `ModelSpecs.matrices`; ``ms`` is the predicted time. ``kernel`` is
    what runs it, as `KernelChoice` writes it, or "" for the fixed rule at run time. Batches with
    the same ``group`` >= 0 run in one call: their short sides m are equal, so the m x m part of
    Gram Newton-Schulz takes them all at once. Then ``ms`` has the batch's share of the saving
    taken off.
    """

    owner: int
    matrices: tuple[int, ...]
    ms: float
    kernel: str = ""
    group: int = -1


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
class SquareRow:
    """What the m x m part costs: milliseconds for 1, 2, 3, ... matrices, whatever their n.

    As many as there are entries may run in one call.
    """

    key: SquareKey
    ms: tuple[float, ...]


@lru_cache(maxsize=1024)
def is_gram(kernel: str) -> bool:
    """Whether a kernel does its work on m x m matrices, so that batches may share it.

    ValueError if it is not as `KernelChoice` writes it.

    >>> is_gram("gram[2]/torch/float32"), is_gram("standard/torch/float32"), is_gram("")
    (True, False, False)
    """
    return kernel != "" and KernelChoice.parse(kernel).method == "gram"


def groups_of(batches: Sequence[Batch]) -> dict[int, list[int]]:
    """Group -> the indices of its batches, in order; batches that run alone are left out."""
    groups: dict[int, list[int]] = defaultdict(list)
    for b, batch in enumerate(batches):
        if batch.group >= 0:
            groups[batch.group].append(b)
    return dict(groups)


def check_batches(batches: Sequence[Batch], matrices: Sequence[MatrixSpec], world: int) -> None:
    """Raise PlanError unless each matrix has one owner and batches and groups can run as such."""
    _check_owned_once(batches, matrices)
    for batch in batches:
        if not 0 <= batch.owner < world:
            raise PlanError(f"owner {batch.owner} is not a rank of a mesh of {world} ranks")
        if not batch.matrices or len({matrices[i].key for i in batch.matrices}) != 1:
            raise PlanError(f"a batch must hold matrices of one shape and dtype, found {batch}")
        if batch.group < -1:
            raise PlanError(f"a batch needs a group >= 0, or -1 for none, found {batch}")
        try:
            is_gram(batch.kernel)
        except ValueError as error:
            raise PlanError(f"a batch on rank {batch.owner} cannot be run: {error}") from None
    for group, members in groups_of(batches).items():
        _check_group(group, [batches[b] for b in members], matrices)


def _check_owned_once(batches: Sequence[Batch], matrices: Sequence[MatrixSpec]) -> None:
    count = Counter(i for batch in batches for i in batch.matrices)
    known = range(len(matrices))
    wrong = [i for i in known if count[i] != 1] + [i for i in count if i not in known]
    if wrong:
        names = [matrices[i].name if i in known else f"#{i}" for i in wrong[:5]]
        raise PlanError(f"each matrix needs exactly one owner; this plan fails for {names}")


def _check_group(group: int, members: Sequence[Batch], matrices: Sequence[MatrixSpec]) -> None:
    keys = [matrices[batch.matrices[0]].key for batch in members]
    for what, found in (
        ("owner", {batch.owner for batch in members}),
        ("short side and dtype", {square_key(key) for key in keys}),
        ("kernel", {batch.kernel for batch in members}),
    ):
        if len(found) > 1:
            raise PlanError(
                f"the batches of group {group} need the same {what} to run in one call, found "
                f"{sorted(found)}"
            )
    if not is_gram(members[0].kernel):
        raise PlanError(
            f"the batches of group {group} need a Gram kernel to run in one call, found "
            f"{members[0].kernel!r}: leave them without a group"
        )
    twice = [key for key, times in Counter(keys).items() if times > 1]
    if twice:
        raise PlanError(
            f"group {group} has several batches of the shape {twice[0]}: make them one batch"
        )
