"""The weights of a model in the `dedicated` layout: placed, followed, materialized, given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dmuon.comm.dedicated.materialize import Materializer
from dmuon.comm.dedicated.module_groups import HookPoint, ModuleGroup
from dmuon.comm.dedicated.routes import Slices
from dmuon.comm.dedicated.vault import Vault, shed_on_meta
from dmuon.comm.dedicated.wire import Publisher
from dmuon.comm.layout import not_bound
from dmuon.comm.process_groups import ProcessGroups, start_from_first
from dmuon.comm.transport import Meter
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.select import trainable_parameters
from dmuon.types import OwnershipError

__all__ = ["DedicatedWeights"]


class DedicatedWeights:
    """``parameters`` are the planned ones as they are now; ``dedicated`` the numbers of those that
    their owners keep; ``modules`` the groups of modules, also those without such parameters."""

    def __init__(
        self,
        plan: OwnershipPlan,
        slices: Slices,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups,
        meter: Meter,
        options: DedicatedOptions,
        device: torch.device,
        modules: Sequence[ModuleGroup],
        points: Sequence[HookPoint],
    ) -> None:
        self.plan = plan
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.dedicated = frozenset(plan.specs.muon())
        self.loads = 0
        self._slices = slices
        self._process_groups = process_groups
        self._meter = meter
        self._options = options
        self._device = device
        self._model = weakref.ref(model)
        self._closed = False
        self._stored: tuple[Vault, Materializer] | None = None
        place = slices.grid.place(process_groups.world.rank)
        self.publisher = Publisher(process_groups.replicas, meter, *place[:2], slices.grid.shape[0])
        self.modules = list(modules)
        self._carrying = [g for g in modules if not self.dedicated.isdisjoint(g.parameters)]
        number = {id(p): i for i, p in enumerate(parameters) if i in self.dedicated}
        self._below: Mapping[nn.Module, list[int]] = weakref.WeakKeyDictionary(
            (point.module, [number[id(p)] for p in point.module.parameters() if id(p) in number])
            for point in points
        )
        self._on_meta = any(p.device.type == "meta" for p in parameters)
        if self._on_meta:
            shed_on_meta(slices, parameters, process_groups.world.rank)
        else:
            if options.broadcast_parameters:
                self._start_from_first([*model.parameters(), *model.buffers()])
            self._store()

    def _start_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Equal values everywhere; of a `DTensor` wherever the same slice of it lies."""
        world, data = self._process_groups.world, self._process_groups.data
        start_from_first([(t, data if is_distributed(t) else world) for t in tensors])

    def _store(self) -> None:
        vault = Vault(
            self._slices,
            self._carrying,
            self.parameters,
            self._process_groups.world.rank,
            self._process_groups.weights,
            self._options.param_dtype,
            self._device,
        )
        self.publisher.plan(vault.groups)
        materializer = Materializer(
            vault.groups,
            self._process_groups.weights,
            self._meter,
            prefetch=self._options.prefetch,
            free_after_forward=self._options.free_after_forward,
            first=[g for g, spec in enumerate(self._carrying) if spec.is_root],
            before_launch=self.publisher.wait_for,
        )
        self._stored = vault, materializer

    def adopt(self) -> None:
        """Find the parameters as they are now: `fully_shard` and `to_empty` make new ones.

        Raises:
            OwnershipError: a dedicated parameter has been replaced, or is still on the meta device.
        """
        model = self._model()
        if model is None:
            return
        now = dict(trainable_parameters(model))
        found = []
        for i, (spec, known) in enumerate(
            zip(self.plan.specs.parameters, self.parameters, strict=True)
        ):
            p = now.get(spec.name, known)
            if i in self.dedicated and p is not known and (not self._on_meta or is_distributed(p)):
                raise _replaced(spec.name, p)
            found.append(p)
        self.parameters = found
        if self._on_meta:
            self._leave_meta(model)

    def _leave_meta(self, model: nn.Module) -> None:
        for spec, p in zip(self.plan.specs.parameters, self.parameters, strict=True):
            if p.device.type == "meta":
                raise OwnershipError(
                    f"parameter {spec.name!r} is still on the meta device: call "
                    "model.to_empty(device=...) and initialize the model before dmuon.Muon(model) "
                    "and the first forward pass"
                )
        self._on_meta = False
        if self._options.broadcast_parameters:
            rest = [p for i, p in enumerate(self.parameters) if i not in self.dedicated]
            self._start_from_first([t for t in [*rest, *model.buffers()] if not is_distributed(t)])
        self._store()
        self.publisher.publish_all()

    @property
    def storage(self) -> tuple[Vault, Materializer]:
        """What is kept here, and the machinery that materializes it."""
        if self._closed:
            raise not_bound(True)
        if self._stored is None:
            self.adopt()
        assert self._stored is not None
        return self._stored

    @contextmanager
    def materialized(self, module: nn.Module, recover: Callable[[], None]) -> Iterator[None]:
        """Inside, the parameters of ``module`` are whole; a collective call.

        ``recover`` ends a backward pass that was broken off.
        """
        vault, materializer = self.storage
        inside = materializer.forward_open  # of a forward pass: it goes on afterwards
        if not inside:
            recover()
            vault.check()
        self.publisher.wait()
        index = {id(p): i for i, p in enumerate(self.parameters)}
        members = [index[id(p)] for p in module.parameters() if id(p) in index]
        members = [p for p in members if p in self.dedicated]
        vault.pin(members)
        try:
            yield
        finally:
            vault.unpin(members)
            if not inside:
                materializer.drop()  # what was launched ahead may have been written to
            self.loads += 1

    def check_whole(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be saved, copied or loaded into."""
        vault, _ = self.storage
        if self._process_groups.weights.world == 1:
            self.loads += 1  # nothing is a placeholder, and this may load weights
            return
        for p in self._below.get(module, ()):
            if not vault.is_pinned(p):
                raise OwnershipError(
                    f"{self.plan.specs.parameters[p].name!r} is stored by its owner only; the "
                    "other ranks have a placeholder. Call state_dict, load_state_dict, "
                    "copy.deepcopy or pickle on every rank, inside "
                    "`with own.materialized(model):`"
                )

    @property
    def is_backward_open(self) -> bool:
        return self._stored is not None and self._stored[1].backward_open

    def close(self) -> None:
        """Give every rank the whole weights again; a collective call."""
        if self._stored is not None:
            vault, materializer = self._stored
            try:
                materializer.drop()
                self.publisher.wait()
                vault.restore()
            except OwnershipError:
                pass  # torch.distributed was shut down first: nothing can travel any more
        self._stored = None
        self._closed = True


def _replaced(name: str, p: nn.Parameter) -> OwnershipError:
    if is_distributed(p):
        return OwnershipError(
            f"fully_shard has taken parameter {name!r}, which dmuon dedicates to its owner: pass "
            "ignored_params=own.dedicated_params to every fully_shard call, or make the calls "
            "inside `with own.ignored_by_fully_shard():`"
        )
    return OwnershipError(
        f"{name!r} is another parameter object now than at dedicate_params: change values in "
        "place, inside `with own.materialized(module):`"
    )
