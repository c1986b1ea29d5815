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

    ``norms``: of the matrices that travel, in the order of `VerdictMessage.travelling`. ``absent``
    are the parameters, as this rank counts them, and the matrices of which the host knows that
    they have no gradient anywhere. Of those that lack one here, and of which only the device knows
    more: ``bad`` says of a matrix (0-d bool), ``flags`` of a parameter (0-d float32, not zero) that
    no rank has a gradient, or that the step is not ok.
    """

    finite: bool | None
    ok: Tensor | None
    norms: Tensor
    absent_matrices: frozenset[int]
    absent_parameters: frozenset[int]
    bad: Mapping[int, Tensor] = field(default_factory=dict)
    flags: Mapping[int, Tensor] = field(default_factory=dict)


class VerdictMessage:
    """Fills and reads the message of one rank.

    A parameter that this rank holds alone needs no flag, and a matrix that lies whole on one rank
    no norm: ``travelling`` are the others. ``counted`` are the matrices whose norms this rank
    contributes to.
    """

    def __init__(
        self, shards: ShardMap, rank: int, device: torch.device, counted: Sequence[int]
    ) -> None:
        self._device = device
        self.travelling = [i for i in range(len(shards.specs.matrices)) if not shards.is_local(i)]
        at = {i: j for j, i in enumerate(self.travelling)}
        self._counted = torch.tensor([at[i] for i in counted], dtype=torch.int64, device=device)
        self._first_flag = len(self.travelling)
        # One flag for every copy that several ranks hold.
        copies = [(p, ranks) for p, copies in enumerate(shards.copies) for ranks in copies]
        flags = {copy: n for n, copy in enumerate(c for c in copies if len(c[1]) > 1)}
        self._count = len(flags)
        self._mine = [(p, flag) for (p, ranks), flag in flags.items() if rank in ranks]
        all_here = torch.zeros(self._count, dtype=torch.float64)
        for _, flag in self._mine:
            all_here[flag] = 1.0
        self._all_here = all_here.to(device)
        self._matrices = [
            (i, flags.get((m.parameter, shards.holders[i])), m.parameter)
            for i, m in enumerate(shards.specs.matrices)
        ]
        self._alone = set(range(len(shards.copies))) - {p for p, _ in self._mine}

    def fill(
        self,
        norms: Tensor,
        checked: Sequence[Tensor],
        here: Sequence[bool],
        found_inf: Tensor | None,
    ) -> Tensor:
        """This rank's message, float64.

        ``norms`` of the ``counted`` matrices, ``checked``: vectors of what must be finite,
        ``here``: which parameters have a gradient on this rank.
        """
        size = self._first_flag + self._count + 1
        vector = torch.zeros(size, dtype=torch.float64, device=self._device)
        vector.index_copy_(0, self._counted, norms.to(self._device, torch.float64).square())
        flags = vector.narrow(0, self._first_flag, self._count)
        flags.copy_(self._all_here)
        if not all(here):
            for p, flag in self._mine:
                if not here[p]:
                    flags[flag].zero_()
        for values in checked:
            vector[-1].add_(values.isfinite().logical_not_().sum().to(self._device))
        if found_inf is not None:
            vector[-1].add_(found_inf.to(self._device).double())
        return vector

    def read(self, vector: Tensor, here: Sequence[bool], *, on_host: bool) -> Verdict:
        """The sum of all messages. Nothing of it is read unless ``on_host``."""
        norms = vector.narrow(0, 0, self._first_flag).sqrt()
        if on_host:
            values = vector.tolist()
            # A norm beyond float64 leaves no way to normalize.
            finite = values[-1] == 0 and all(map(math.isfinite, values[: self._first_flag]))
            return Verdict(finite, None, norms, *self._absent(values[self._first_flag : -1], here))
        ok = (vector[-1] == 0) & norms.isfinite().all()
        # What is here is somewhere. Of the rest, what others may have is left to the device.
        absent = self._absent([1.0] * self._count, here)
        if all(here):
            return Verdict(None, ok, norms, *absent)
        alone = (vector.narrow(0, self._first_flag, self._count) == 0) | ok.logical_not()
        flags = alone.float()
        return Verdict(
            None,
            ok,
            norms,
            *absent,
            {i: alone[flag] for i, flag, p in self._matrices if flag is not None and not here[p]},
            {p: flags[flag] for p, flag in self._mine if not here[p]},
        )

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
