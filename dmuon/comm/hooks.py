"""Hooks on a model, and lookups in it: wait points, its parameters, FSDP2's units.

In `dedicated`, forward waits for weights before each layer, and before modules outside of layers.
Layers are the modules that users pass to `fully_shard`: members of `ModuleList`, `ModuleDict` and
`Sequential`. A layer waits for all of its weights, because not every module calls its children
(`nn.MultiheadAttention` never calls ``out_proj``). Modules inside a layer wait too, in case someone
calls them on their own; compiled code skips these waits, which would break its graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.scheduler.specs import canonical_name
from dmuon.types import OwnershipError

Remove = Callable[[], None]

# These are never called themselves, unlike a Sequential, which calls its members.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class WaitPoint:
    """A module, and the ids of the parameters that it waits for before it runs."""

    module: nn.Module
    parameters: frozenset[int]
    is_root: bool = False
    in_layer: bool = False  # inside a layer, which has a wait point of its own


# ---- layers ----------------------------------------------------------------------------------


def outermost_members(root: nn.Module) -> Iterator[nn.Module]:
    """Yield members of the outermost containers below ``root``, leaves included; may repeat."""
    inside = isinstance(root, (*_UNCALLED, nn.Sequential))
    for child in root.children():
        if inside and not isinstance(child, _UNCALLED):
            yield child
        else:
            yield from outermost_members(child)


def area(module: nn.Module, others: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yield ``module`` and its descendants, except ``others`` and theirs."""
    yield module
    for child in module.children():
        if child not in others:
            yield from area(child, others)


def parameter_ids(module: nn.Module, others: Container[nn.Module] = ()) -> Iterator[int]:
    """Yield the ids of the parameters in the `area` of a module; may repeat."""
    return (id(p) for part in area(module, others) for p in part.parameters(recurse=False))


def wait_points(root: nn.Module, layers: Collection[nn.Module]) -> list[WaitPoint]:
    """Return wait points for all parameters of ``root``: one for each module with any, which waits
    for the parameters below it that are in no other layer.

    >>> model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    >>> [type(point.module).__name__ for point in wait_points(model, [])]
    ['ModuleDict', 'Linear']
    """
    others = set(layers)
    layer_of: dict[nn.Module, nn.Module | None] = dict.fromkeys(area(root, others))
    for layer in layers:
        for part in area(layer, others):
            layer_of.setdefault(part, layer)
    points = [
        WaitPoint(m, frozenset(parameter_ids(m, others)), m is root, layer not in (None, m))
        for m, layer in layer_of.items()
        if m is root or not isinstance(m, _UNCALLED)
    ]
    return [point for point in points if point.parameters or point.is_root]


# ---- hooks -----------------------------------------------------------------------------------


def _nothing(*args: Any, **kwargs: Any) -> None: ...


@dataclass(eq=False)
class Hook:
    """Calls ``action`` with the arguments of a module's hook. ``before_copy`` is called when a
    model with the hook is copied or pickled; the copy's hook does nothing, having no runtime."""

    action: Callable[..., None]
    before_copy: Callable[[], None] = _nothing

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.action(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        self.before_copy()
        return Hook, (_nothing,)


def opaque(action: Callable[..., None], point: WaitPoint) -> Callable[..., None]:
    """Hide ``action``, run before the module of ``point``, from torch.compile. Inside a layer
    compiled code leaves it out, because the hook of the layer around it has done the work."""
    hidden = torch.compiler.disable(action)

    def unless_compiled(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hidden(*args)

    return unless_compiled if point.in_layer else hidden


@contextmanager
def hidden_parameters(model: nn.Module, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Remove ``parameters`` from all modules of ``model`` inside the context. Afterwards each is
    back in its place and order; parameters that others have put in meanwhile stay."""
    hidden = {id(p) for p in parameters}
    every = ((module, module._parameters) for module in model.modules())
    before = [(m, known) for m, known in every if not hidden.isdisjoint(map(id, known.values()))]
    for module, known in before:
        module._parameters = {n: p for n, p in known.items() if id(p) not in hidden}
    try:
        yield
    finally:
        for module, known in before:
            module._parameters = known | module._parameters


# ---- parameters that a model trains -----------------------------------------------------------


class ParameterWatch:
    """Notices cheaply when a model trains other ``parameters`` than planned. Holds no module.
    ``exempt`` are parameters that a framework may replace (FSDP2 while a unit is gathered)."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], exempt: Collection[Tensor] = ()
    ) -> None:
        self._model = weakref.ref(model)
        # Strong references, so that no new parameter can get the id of a removed one.
        self._planned = {id(p): p for p in parameters}
        others = {id(p) for p in exempt}
        self._exempts = bool(others)
        named = model.named_parameters(remove_duplicate=False)
        self._names = {canonical_name(n) for n, p in named if id(p) not in others}
        self._seen = _parameters_of(model)

    def check(self) -> None:
        """Raise OwnershipError if the model trains a parameter that was not planned. Takes 0.2 ms
        for 400 modules, as long as nothing has changed."""
        if (model := self._model()) is None:
            return
        now = _parameters_of(model)
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return
        for name, p in model.named_parameters(remove_duplicate=False):
            is_place = canonical_name(name) in self._names
            # Where a framework replaces parameters, only names that it leaves alone are evidence.
            if id(p) not in self._planned and p.requires_grad and (is_place or not self._exempts):
                raise replaced(canonical_name(name), new=not is_place)
        self._seen = now


def _parameters_of(model: nn.Module) -> list[nn.Parameter | None]:
    """List all parameters, module by module, without the cost of building names."""
    found: list[nn.Parameter | None] = []
    modules = [model]
    seen = {model}
    for module in modules:  # the list grows meanwhile
        found += module._parameters.values()
        if module._modules:
            new = [m for m in module._modules.values() if m is not None and m not in seen]
            modules += new
            seen.update(new)
    return found


def replaced(name: str, *, new: bool = False) -> OwnershipError:
    """Return the error for a parameter that replaced a planned one, or (``new``) was added."""
    change = "was no parameter" if new else "is another parameter object now than"
    return OwnershipError(
        f"{name!r} {change} at dmuon.dedicate_params, and would never be trained: change values in "
        "place (layout='dedicated': inside `with own.materialized(module):`), or call own.close(), "
        "dmuon.dedicate_params(model) and dmuon.Muon(model) again. Call fully_shard and "
        "parallelize_module before dmuon.dedicate_params"
    )


# ---- FSDP2 -----------------------------------------------------------------------------------


def _fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [m for m in modules if isinstance(m, FSDPModule)]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard, because the root's parameters stay whole after a forward without backward."""
    for module in _fsdp_modules(modules):
        module.reshard()


def refuse_fsdp1(modules: Iterable[nn.Module]) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(m, FullyShardedDataParallel) for m in modules):
        raise OwnershipError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which leaves no matrices: "
            "use FSDP2, torch.distributed.fsdp.fully_shard (accelerate, Trainer: fsdp_version 2)"
        )


def fsdp_roots(model: nn.Module) -> list[Any]:
    """Return the outermost modules that were passed to `fully_shard`."""
    modules = _fsdp_modules(model.modules())
    inside = {child for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if m not in inside]
