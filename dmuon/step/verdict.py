"""What all ranks must know before a full step changes anything, in one all-reduce.

::

    message   | squared norm of each matrix that travels | who has a gradient | non-finite found |
                sum over the ranks that hold it            > 0: somebody          > 0: skip
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon.scheduler.shards import ShardMap

__all__ = ["Verdict", "VerdictMessage"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``finite``: whether no rank found a non-finite gradient; None where only the device knows:
    then ``ok`` is a 0-d bool there.

    ``norms``: of each matrix that travels, 0-d tensors where only the device knows them. ``absent``
    are the parameters, as this rank counts them, and the matrices of which the host knows that they
    have no gradient anywhere. ``present``: for those that lack one here, and of which only the
    device knows, whether another rank has it: 0-d bools.
    """

    finite: bool | None
    ok: Tensor | None
    norms: Mapping[int, float | Tensor]
    absent_matrices: frozenset[int]
    absent_parameters: frozenset[int]
    present_matrices: Mapping[int, Tensor] = field(default_factory=dict)
    present_parameters: Mapping[int, Tensor] = field(default_factory=dict)


class VerdictMessage:
    """Fills and reads the message of one rank.

    A parameter that this rank holds alone needs no flag, and a matrix that lies whole on one rank
    no norm. ``counted`` are the matrices whose norms this rank contributes to.
    """

    def __init__(
        self, shards: ShardMap, rank: int, device: torch.device, counted: Sequence[int]
    ) -> None:
        self._device = device
        travelling = [i for i in range(len(shards.specs.matrices)) if not shards.is_local(i)]
        self._travelling = travelling
        at = {i: j for j, i in enumerate(travelling)}
        self._counted = torch.tensor([at[i] for i in counted], dtype=torch.int64, device=device)
        self._first_flag = len(travelling)
        # One flag for every copy that several ranks hold.
        self._flags: dict[tuple[int, tuple[int, ...]], int] = {}
        for p, copies in enumerate(shards.copies):
            for ranks in copies:
                if len(ranks) > 1:
                    self._flags[p, ranks] = len(self._flags)
        self._mine = [  # (parameter, flag) of the copies that this rank holds a part of
            (p, flag) for (p, ranks), flag in self._flags.items() if rank in ranks
        ]
        self._size = self._first_flag + len(self._flags) + 1
        flags = [0.0] * len(self._flags)
        for _, flag in self._mine:
            flags[flag] = 1.0
        self._all_here = torch.tensor(flags, dtype=torch.float64, device=device)
        self._matrices = [
            (i, self._flags.get((m.parameter, shards.holders[i])), m.parameter)
            for i, m in enumerate(shards.specs.matrices)
        ]
        self._alone = {p for p in range(len(shards.copies)) if p not in {q for q, _ in self._mine}}

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return 8 * self._size

    def fill(
        self,
        counted: Sequence[Tensor],
        checked: Sequence[Tensor],
        here: Sequence[bool],
        found_inf: Tensor | None,
    ) -> Tensor:
        """This rank's message, ``[size]`` float64.

        ``counted``: norms of the matrices given at construction, ``checked``: everything that must
        be finite (0-d tensors), ``here``: which parameters have a gradient on this rank.
        """
        vector = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        if counted:
            squares = torch.stack(list(counted)).to(self._device).square_()
            vector.index_copy_(0, self._counted, squares)
        flags = vector.narrow(0, self._first_flag, len(self._flags))
        flags.copy_(self._all_here)
        for p, flag in self._mine:
            if not here[p]:
                flags[flag].zero_()
        if checked:
            found = torch.stack([c.double() for c in checked]).isfinite().logical_not_().sum()
            vector[-1].copy_(found)
        if found_inf is not None:
            vector[-1].add_(found_inf.to(self._device).double())
        return vector

    def read(self, vector: Tensor, here: Sequence[bool], *, on_host: bool) -> Verdict:
        """The sum of all messages. Nothing of it is read unless ``on_host``."""
        if on_host:
            values = vector.tolist()
            norms = [math.sqrt(v) if v >= 0 else v for v in values[: self._first_flag]]
            absent = self._absent(values[self._first_flag : -1], here)
            # A norm beyond float64 leaves no way to normalize.
            finite = values[-1] == 0 and all(map(math.isfinite, norms))
            return Verdict(finite, None, dict(zip(self._travelling, norms, strict=True)), *absent)
        roots = vector.narrow(0, 0, self._first_flag).sqrt()
        ok = (vector[-1] == 0) & roots.isfinite().all()
        known = dict(zip(self._travelling, roots.unbind(), strict=True))
        # What is here is somewhere. Of the rest, what others may have is left to the device.
        absent = self._absent([1.0] * len(self._flags), here)
        present = self._present(vector.narrow(0, self._first_flag, len(self._flags)), here)
        return Verdict(None, ok, known, *absent, *present)

    def _present(
        self, flags: Tensor, here: Sequence[bool]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Of the matrices and parameters without a gradient here, whether any rank has one."""
        if all(here):
            return {}, {}
        anywhere = flags > 0
        matrices = {
            i: anywhere[flag] for i, flag, p in self._matrices if flag is not None and not here[p]
        }
        return matrices, {p: anywhere[flag] for p, flag in self._mine if not here[p]}

    def _absent(
        self, flags: Sequence[float], here: Sequence[bool]
    ) -> tuple[frozenset[int], frozenset[int]]:
        if all(here) and all(flags):
            return frozenset(), frozenset()
        parameters = {p for p, flag in self._mine if not flags[flag]}
        parameters |= {p for p in self._alone if not here[p]}
        matrices = {
            i for i, flag, p in self._matrices if (not here[p] if flag is None else not flags[flag])
        }
        return frozenset(matrices), frozenset(parameters)
