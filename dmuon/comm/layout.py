"""The interface of every layout to the optimizer and its tools, and the part of it that layouts
with momentum at owners share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Slices
from dmuon.comm.hooks import ParameterWatch
from dmuon.comm.reducer import GradientReducer, OwnedGradients
from dmuon.comm.routes import Keepers, RowShards
from dmuon.comm.transport import Meter, Transport
from dmuon.dtensors import is_distributed
from dmuon.scheduler.plan import OwnershipPlan, Unit, units_of
from dmuon.scheduler.specs import Box
from dmuon.types import OwnershipError

# (unit, gradients [b, rows, cols] of the matrices at these positions of it, the positions) to
# (what is published [b, rows, cols], RMS of the updates [b]), both valid until the next call.
Compute = Callable[[Unit, Tensor, list[int]], tuple[Tensor, Tensor]]
# (unit, positions in it, views of the parameters, views of what was published)
Apply = Callable[[Unit, list[int], list[Tensor], list[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The averaged gradients as this rank sees them, ``stored`` here.

    For a norm, ``counted`` summed over the ranks and ``common`` once count every element once. Of a
    distributed parameter the first shard of its kind in the mesh is counted.
    """

    counted: list[Tensor]
    common: list[Tensor]
    stored: list[Tensor]


class LayoutRuntime(ABC):
    """Moves the bytes of one ownership.

    ``units`` are what is computed at once, in the order of execution; there are none before the
    optimizer has bound itself. ``parameters`` are the planned ones, in the order of the plan,
    ``dedicated`` those that only their owners store. Newton-Schulz and the collectives run on
    ``device``; ``apart`` is that of `units_of`.
    """

    parameters: Sequence[nn.Parameter]
    dedicated: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        plan: OwnershipPlan,
        model: nn.Module | None,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.transport = transport
        self.device = device
        self.units: tuple[Unit, ...] = ()
        self.apart = False
        self.meter = Meter()
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._removers: list[Callable[[], None]] = []
        self._closed = False

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, the parameters of ``module`` are whole and hold their published values."""
        self.synchronize()
        return nullcontext()

    def find_parameters(self) -> None:  # noqa: B027
        """Find the parameters as they are now, where the layout lets a framework replace them."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Move all gradients to where they are needed; a collective call."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """The gradients of the planned parameters; after `reduce_gradients`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every parameter holds its published value."""

    def zero_grad(self) -> None:  # noqa: B027
        """Forget gradients that are not kept in ``p.grad``."""

    def gradients_changed(self) -> None:  # noqa: B027
        """Everything that `gradients` gave has been changed in place."""

    @abstractmethod
    def set_sync(self, sync: bool) -> bool:
        """Whether backward reduces gradients; returns the previous setting."""

    @abstractmethod
    def close(self) -> None:
        """Remove every hook and release the transport."""

    @cached_property
    def rows(self) -> RowShards:
        """The form in which what lies with owners is saved."""
        return RowShards(self.transport, self.device)

    def check_unbound(self) -> None:
        """Raise OwnershipError if an optimizer has bound itself."""
        if self.units:
            raise OwnershipError(
                "these parameters already have a dmuon.Muon; to make another one, call "
                "own.close() and dmuon.dedicate_params(model) again"
            )

    def _not_bound(self) -> OwnershipError:
        """The error of a call that needs an optimizer when there is none."""
        return OwnershipError(
            "this ownership was closed: call dmuon.dedicate_params(model) and dmuon.Muon again"
            if self._closed
            else "no optimizer yet: make opt = dmuon.Muon(model, ...) first"
        )

    def _remove_hooks(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []
        self._closed = True


class OwnerRuntime(LayoutRuntime):
    """A `LayoutRuntime` whose momentum and gradients lie with the owners.

    An owner calls `Compute` for its units; every rank that stores a part of a matrix calls `Apply`
    for it, in any order, before the parameters are read again. ``keeps_whole``: an owner stores its
    matrices whole. ``reducer`` is there once an optimizer has bound itself.
    """

    keeps_whole = True

    def __init__(
        self,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        device: torch.device,
    ) -> None:
        super().__init__(slices.plan, model, transport, device)
        self.parameters: list[nn.Parameter] = list(parameters)
        self.reducer: GradientReducer | None = None
        self._slices = slices
        self._counted: frozenset[int] = frozenset()  # distributed parameters; see `Gradients`
        self._watch: ParameterWatch | None = None
        self._rms: dict[int, Tensor] = {}  # of updates ``[b]``, by a unit's first matrix

    @abstractmethod
    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        """Prepare for an optimizer: the param group of each matrix, and the dtype of what is
        published of a parameter by its dtype. OwnershipError if there is one already."""

    def _collect_at(
        self, groups: Sequence[int], reduce_dtype: torch.dtype | None
    ) -> OwnedGradients:
        """The first part of `bind`: units, and where their gradients are collected."""
        self.units = units_of(self.plan, groups, apart=self.apart)
        return OwnedGradients(
            self._slices, self.units, self.transport.rank, reduce_dtype, self.device
        )

    def matrices_of(self, parameter: int) -> list[int]:
        return self._slices.matrices_of[parameter]

    def owned_places(self, parameter: int, *, in_slices: bool = False) -> Keepers:
        """The owners of a parameter's matrices, each with its box (see `Slices.keepers`)."""
        return self._slices.keepers(parameter, in_slices=in_slices, replicas=False)

    @abstractmethod
    def stored(self, box: Box, parameter: int) -> list[tuple[int, Box, Tensor]]:
        """The weights that this rank stores of the matrix that is this box of a parameter: (matrix,
        box in the parameter, a view)."""

    @property
    def _bound(self) -> GradientReducer:
        if self.reducer is None:
            raise self._not_bound()
        return self.reducer

    def raise_noted(self) -> None:
        """Raise what earlier rounds found that no host could read then: on every rank alike, before
        anything is sent."""
        self._bound.flags.raise_noted()

    def gradients(self) -> Gradients:
        """Matrices' gradients lie with their owners, FSDP2's in shards, the others everywhere."""
        reducer, common = self._bound, []
        counted = reducer.owned.collected(reducer.present)
        stored = list(counted)
        for i, p in enumerate(self.parameters):
            grad = None if self._slices.matrices_of.get(i) else reducer.gradient_of(i)
            if grad is None:
                continue
            stored.append(grad)
            if not is_distributed(p):
                common.append(grad)
            elif i in self._counted:
                counted.append(grad)
        return Gradients(counted, common, stored)

    def set_sync(self, sync: bool) -> bool:
        return self._bound.set_sync(sync)

    def zero_grad(self) -> None:
        if self.reducer is not None:
            self.reducer.clear()

    def gradients_changed(self) -> None:
        self._bound.note_averaged()

    def skip(self) -> None:
        """Make `step` change nothing, on all ranks alike."""
        present = self._bound.present
        present[:] = [False] * len(present)

    def _with_gradients(self, unit: Unit) -> list[int]:
        """Positions of the matrices of a unit that have a gradient on any rank: the same on all."""
        present, matrices = self._bound.present, self.plan.specs.matrices
        return [k for k, i in enumerate(unit.matrices) if present[matrices[i].parameter]]

    @abstractmethod
    def step(self, compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch all publishing."""

    @abstractmethod
    def weights(self, unit: Unit) -> list[Tensor]:
        """The weights of a unit that lie whole on this rank, ``[m, ...]`` each."""

    def update_rms(self) -> dict[str, Tensor]:
        """RMS of the last update of each matrix known here, by name; waits for pending ones."""
        self.synchronize()
        specs = self.plan.specs.matrices
        return {
            specs[i].name: rms
            for unit in self.units
            if unit.matrices[0] in self._rms
            for i, rms in zip(unit.matrices, self._rms[unit.matrices[0]].unbind(), strict=True)
        }

    def _unbind(self) -> None:
        self._remove_hooks()
        self.reducer = None
