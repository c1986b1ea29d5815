"""The interface of every layout to the optimizer and its tools, with its shared parts."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dmuon.comm.hooks import ParameterWatch, fsdp_roots
from dmuon.comm.routes import RowShards
from dmuon.comm.transport import Meter, Transport
from dmuon.scheduler.plan import OwnershipPlan, Unit
from dmuon.scheduler.specs import OwnerLimits, StateSizes
from dmuon.types import OwnershipError


@dataclass(frozen=True, slots=True)
class Gradients:
    """The averaged gradients as this rank sees them, as ``stored`` here. In a norm every element
    counts once if ``counted`` is summed over the ranks and ``common`` added once; of a distributed
    parameter the first shard of each kind in the mesh counts."""

    counted: list[Tensor]
    common: list[Tensor]
    stored: list[Tensor]


class LayoutRuntime(ABC):
    """Moves the bytes of one ownership. Newton-Schulz and the collectives run on ``device``."""

    parameters: Sequence[nn.Parameter]  # the planned parameters, in the order of the plan
    dedicated: Sequence[nn.Parameter] = ()  # parameters that only their owners store

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
        self.units: tuple[Unit, ...] = ()  # set when an optimizer binds itself
        self.one_by_one = False  # see `units_of`
        self.meter = Meter()
        self.meter.device = device
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._sync = True
        self._watch: ParameterWatch | None = None  # set if no other check sees replaced parameters
        self._removers: list[Callable[[], None]] = []
        self._closed = False

    def materialized(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep the parameters of ``module`` whole, with published values, inside the context."""
        self.synchronize()
        return nullcontext()

    def find_parameters(self) -> None:  # noqa: B027
        """Look up the current parameters, if the layout lets a framework replace them."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Move all gradients to where they are needed; a collective call."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return the gradients of the planned parameters, after `reduce_gradients`."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes of a step's buffers by purpose; see `Muon.stats`."""

    @abstractmethod
    def counts(self, parameter: int) -> bool:
        """Whether this rank's part of one of AdamW's gradients counts for their joint norm."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every parameter holds its published value."""

    def zero_grad(self) -> None:  # noqa: B027
        """Drop gradients that are not kept in ``p.grad``."""

    def gradients_changed(self) -> None:  # noqa: B027
        """Take note that all tensors of `gradients` have been changed in place."""

    def set_sync(self, sync: bool) -> bool:
        """Set whether backward reduces gradients, also in FSDP2; return the previous setting."""
        previous, self._sync = self._sync, sync
        model = self._model()
        for root in () if model is None else fsdp_roots(model):
            root.set_requires_gradient_sync(sync)
        return previous

    @abstractmethod
    def close(self) -> None:
        """Remove every hook and release the transport."""

    def limits(self, sizes: StateSizes) -> OwnerLimits:
        """Return the plan's limits for optimizer state of these sizes."""
        plan = self.plan
        return sizes.limits(plan.specs, plan.layout, plan.topology.world, plan.limits.memory_bytes)

    @cached_property
    def rows(self) -> RowShards:
        """The form in which owners' state is saved."""
        return RowShards(self.transport, self.device)

    def _not_bound(self) -> OwnershipError:
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
