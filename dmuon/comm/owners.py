"""What the layouts share whose momentum and gradients lie with owners: `replicated`, `dedicated`.

An owner stacks the gradients of a unit as ``[batch, rows, cols]``, so that one call serves all of
its matrices. Under tensor parallelism a matrix arrives in slices, one at each rank that shares the
owner's data coordinates, and these keep them until the step assembles them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Slices
from dmuon.comm.layout import Apply, Compute, PlannedPlaces, check_frozen, not_bound
from dmuon.comm.reducer import GradientReducer, LiveSegment
from dmuon.comm.routes import Unit, units_of
from dmuon.comm.transport import Meter, Transport
from dmuon.scheduler.shards import Form, matrix_box
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import OwnershipError

__all__ = ["OwnedGradients", "OwnerRuntime", "Unstack", "oriented", "rows_of", "set_rows"]


def rows_of(stack: Tensor, where: list[int]) -> Tensor:
    """The matrices of ``[b, m, n]`` at these increasing positions; the stack itself if all."""
    if len(where) == len(stack):
        return stack
    # No index: copying it to an accelerator would wait for the device.
    return torch.stack([stack[k] for k in where])


def set_rows(stack: Tensor, where: list[int], rows: Tensor) -> None:
    """Write ``rows`` to these increasing positions of ``stack``, in its dtype."""
    if len(where) == len(stack):
        stack.copy_(rows)
    else:
        torch._foreach_copy_([stack[k] for k in where], list(rows.unbind()))


def oriented(unit: Unit, stack: Tensor) -> list[Tensor]:
    """Views of a unit's matrices, each of its own rows and columns."""
    matrices = list(stack.unbind())
    if not unit.transposed:
        return matrices
    return [m.mT if unit.holds_transpose(k) else m for k, m in enumerate(matrices)]


class Unstack:
    """Cuts a unit's stack ``[b, rows, cols]`` into views of its matrices, in the dims that each has
    in its parameter."""

    def __init__(self, specs: ModelSpecs, unit: Unit) -> None:
        matrices = [specs.matrices[i] for i in unit.matrices]
        wholes = [matrix_box(m, specs.parameters[m.parameter].shape) for m in matrices]
        self._forms = [(whole.form, whole.box.shape) for whole in wholes]
        self._plain = all(form is Form.FLAT and len(shape) == 2 for form, shape in self._forms)
        self._unit = unit

    def __call__(self, stack: Tensor) -> list[Tensor]:
        views = oriented(self._unit, stack)
        if self._plain:
            return views
        return [_in_dims(v, *form) for v, form in zip(views, self._forms, strict=True)]


def _in_dims(matrix: Tensor, form: Form, shape: tuple[int, ...]) -> Tensor:
    if form is Form.STACK:
        return matrix[(None,) * (len(shape) - 2)]
    if form is Form.TRANSPOSED:
        return matrix.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1)
    return matrix if len(shape) == 2 else matrix.unflatten(1, shape[1:])


class OwnedGradients:
    """The gradients of what is owned at this rank's data coordinates.

    ``mine`` are the units that this rank computes; ``near`` those that a rank of its data
    coordinates computes. ``here`` are the gradients by matrix, in the parameter's dims: views of
    the owner's stacks, or this rank's slices of the matrices that tensor parallelism cuts.
    """

    def __init__(
        self,
        slices: Slices,
        units: Sequence[Unit],
        rank: int,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._slices = slices
        self._specs = slices.plan.specs
        place = slices.grid.place(rank)
        self._tensor = place[2]
        self.mine = [u for u in units if u.owner == rank]
        self.near = [u for u in units if slices.owner_place(u.matrices[0])[:2] == place[:2]]
        self.here: dict[int, Tensor] = {}
        self._stacks: dict[int, Tensor] = {}  # by a unit's first matrix
        self._whole: dict[int, Tensor] = {}  # what is in stacks, ``[rows, cols]``
        for unit in self.near:
            parameter_dtype = self._specs.matrices[unit.matrices[0]].dtype
            dtype = reduce_dtype or getattr(torch, parameter_dtype)
            for i in unit.matrices:
                if slices.is_cut(i):
                    shape = slices.part(i, self._tensor).box.shape
                    self.here[i] = torch.zeros(shape, dtype=dtype, device=device)
            if unit.owner == rank and not all(map(slices.is_cut, unit.matrices)):
                stack = torch.zeros(unit.shape, dtype=dtype, device=device)
                self._stacks[unit.matrices[0]] = stack
                views = Unstack(self._specs, unit)(stack)
                for i, matrix, view in zip(unit.matrices, stack, views, strict=True):
                    if not slices.is_cut(i):
                        self._whole[i], self.here[i] = matrix, view

    def stack(self, unit: Unit) -> Tensor:
        """The gradients of a unit that lies whole on this rank, ``[b, m, n]``."""
        return self._stacks[unit.matrices[0]]

    def where(self, unit: Unit, present: Sequence[bool]) -> list[int]:
        """The positions in a unit whose parameter has a gradient on any rank."""
        matrices = self._specs.matrices
        return [k for k, i in enumerate(unit.matrices) if present[matrices[i].parameter]]

    def collected(self, present: Sequence[bool]) -> list[Tensor]:
        """Every gradient kept here of the parameters that have one, each element once."""
        matrices = self._specs.matrices
        kept = self.here | self._whole
        return [g for i, g in kept.items() if present[matrices[i].parameter]]

    def deliver(self, segments: list[LiveSegment], first: bool) -> None:
        """Add the gradients that arrived here to where they are collected."""
        into: list[Tensor] = []
        arrived: list[Tensor] = []
        for live in segments:
            if live.deliveries is None:
                live.deliveries = self._deliveries(live)
            into += live.deliveries[0]
            arrived += live.deliveries[1]
        if into:
            (torch._foreach_copy_ if first else torch._foreach_add_)(into, arrived)

    def _deliveries(self, live: LiveSegment) -> tuple[list[Tensor], list[Tensor]]:
        into, arrived = [], []
        for span, view in zip(live.segment.spans, live.views, strict=True):
            start = 0
            for i in span.matrices:
                part = self._slices.part(i, self._tensor)
                if i in self.here:
                    into.append(self.here[i])
                    arrived.append(view.narrow(0, start, part.numel).view(part.box.shape))
                start += part.numel
        return into, arrived


class OwnerRuntime(ABC):
    """A `LayoutRuntime` whose momentum and gradients lie with the owners.

    An owner calls `Compute` for its units; every rank that stores a part of a matrix calls `Apply`
    for it, in any order, before the parameters are read again. ``keeps_whole``: an owner stores its
    matrices whole. ``loads``: see `LayoutRuntime`.
    """

    keeps_whole = True
    parameters: Sequence[nn.Parameter]
    loads: int

    def __init__(
        self, slices: Slices, model: nn.Module, transport: Transport, device: torch.device
    ) -> None:
        self.plan = slices.plan
        self.device = device
        self.transport = transport
        self.units: tuple[Unit, ...] = ()
        self.meter = Meter()
        self._slices = slices
        self._model = weakref.ref(model)
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._live: tuple[GradientReducer, OwnedGradients] | None = None
        self._places: PlannedPlaces | None = None
        self._removers: list[Callable[[], None]] = []
        self._closed = False

    def _collect_at(
        self, groups: Sequence[int], reduce_dtype: torch.dtype | None
    ) -> OwnedGradients:
        """The first part of `bind`: units, and where their gradients are collected."""
        if self._live is not None:
            raise OwnershipError(
                "these parameters already have a dmuon.Muon; to make another one, call "
                "own.close() and dmuon.dedicate_params(model) again"
            )
        self.units = units_of(self.plan, groups)
        return OwnedGradients(
            self._slices, self.units, self.transport.rank, reduce_dtype, self.device
        )

    @abstractmethod
    def bind(self, groups: Sequence[int], payload_dtype: Callable[[str], torch.dtype]) -> None:
        """Prepare for an optimizer: the param group of each matrix, and the dtype of what is
        published of a parameter by its dtype.

        Raises:
            OwnershipError: there is an optimizer already.
        """

    @property
    def _bound(self) -> tuple[GradientReducer, OwnedGradients]:
        if self._live is None:
            raise not_bound(self._closed)
        return self._live

    def _check(self) -> None:
        """Raise OwnershipError if the model trains other parameters than planned."""
        if self._places is not None:
            self._places.check()
        check_frozen(self._frozen)

    def _unbind(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []
        self._live = None
        self._closed = True

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Have all gradients where they belong; a collective call."""

    def zero_grad(self) -> None:
        if self._live is not None:
            self._live[0].clear()

    @abstractmethod
    def step(self, compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch all publishing."""

    @abstractmethod
    def weights(self, unit: Unit) -> list[Tensor]:
        """The weights of a unit that lie whole on this rank, ``[m, ...]`` each."""

    @abstractmethod
    def update_rms(self) -> dict[str, Tensor]:
        """RMS of the last update of each matrix known here, by name; waits for pending ones."""
