"""What `replicated` and `dedicated` share: momentum and gradients lie with owners."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Slices
from dmuon.comm.layout import LayoutRuntime, ParameterWatch
from dmuon.comm.reducer import GradientReducer, OwnedGradients
from dmuon.comm.transport import Transport
from dmuon.scheduler.plan import Unit

__all__ = ["Apply", "Compute", "OwnerRuntime"]

# (unit, gradients [b, rows, cols] of the matrices at these positions of it, the positions) to
# (what is published [b, rows, cols], RMS of the updates [b]), both valid until the next call.
Compute = Callable[[Unit, Tensor, list[int]], tuple[Tensor, Tensor]]
# (unit, positions in it, views of the parameters, views of what was published)
Apply = Callable[[Unit, list[int], list[Tensor], list[Tensor]], None]


class OwnerRuntime(LayoutRuntime):
    """A `LayoutRuntime` whose momentum and gradients lie with the owners.

    An owner calls `Compute` for its units; every rank that stores a part of a matrix calls `Apply`
    for it, in any order, before the parameters are read again. ``keeps_whole``: an owner stores its
    matrices whole. ``reducer`` is there once an optimizer has bound itself.
    """

    keeps_whole = True

    def __init__(
        self, slices: Slices, model: nn.Module, transport: Transport, device: torch.device
    ) -> None:
        super().__init__(slices.plan, model, transport, device)
        self.reducer: GradientReducer | None = None
        self._slices = slices
        self._watch: ParameterWatch | None = None

    @abstractmethod
    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        """Prepare for an optimizer: the param group of each matrix, and the dtype of what is
        published of a parameter by its dtype. OwnershipError if there is one already."""

    def _collect_at(
        self, groups: Sequence[int], reduce_dtype: torch.dtype | None
    ) -> OwnedGradients:
        """The first part of `bind`: units, and where their gradients are collected."""
        self._bind_units(groups, self.reducer)
        return OwnedGradients(
            self._slices, self.units, self.transport.rank, reduce_dtype, self.device
        )

    @property
    def _bound(self) -> GradientReducer:
        if self.reducer is None:
            raise self._not_bound()
        return self.reducer

    def _check_model(self) -> None:
        """Raise OwnershipError if the model trains other parameters than planned."""
        if self._watch is not None:
            self._watch.check()
        self._check_frozen()

    def set_sync(self, sync: bool) -> bool:
        reducer = self._bound
        previous, reducer.sync = reducer.sync, sync
        # What was accumulated meanwhile must be reduced, by the next backward or by `step`.
        reducer.owed = reducer.owed or (sync and not previous)
        return previous

    def zero_grad(self) -> None:
        if self.reducer is not None:
            self.reducer.clear()

    @abstractmethod
    def step(self, compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch all publishing."""

    @abstractmethod
    def weights(self, unit: Unit) -> list[Tensor]:
        """The weights of a unit that lie whole on this rank, ``[m, ...]`` each."""

    @abstractmethod
    def update_rms(self) -> dict[str, Tensor]:
        """RMS of the last update of each matrix known here, by name; waits for pending ones."""

    def _unbind(self) -> None:
        self._remove_hooks()
        self.reducer = None
