"""Hooks into a model, and what is read from it: wait points, its parameters, FSDP2's units.

In `dedicated`, forward waits for weights before each layer, and before what is in no layer. Layers
are what users pass to `fully_shard`: the members of `ModuleList`, `ModuleDict` and `Sequential`. A
layer waits for all of its weights, because not every module calls its children
(`nn.MultiheadAttention` never calls ``out_proj``). The modules inside a layer wait too, in case
someone calls them without it; in compiled code they do not, so as not to break its graph.
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

# These are never called themselves; a Sequential is, and calls its members.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class WaitPoint:
    """A module, and the ids of the parameters that must be there before it runs."""

    module: nn.Module
    parameters: frozenset[int]
    is_root: bool = False
    in_layer: bool = False  # inside a layer, which has a wait point of its own


# ---- layers ----------------------------------------------------------------------------------


def outermost_members(root: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost containers from ``root`` down, leaf modules too; may repeat."""
    inside = isinstance(root, (*_UNCALLED, nn.Sequential))
    for child in root.children():
        if inside and not isinstance(child, _UNCALLED):
            yield child
        else:
            yield from outermost_members(child)


def area(module: nn.Module, others: Container[nn.Module]) -> Iterator[nn.Module]:
    """``module`` and all below it, without ``others`` and all below those."""
    yield module
    for child in module.children():
        if child not in others:
            yield from area(child, others)


def parameter_ids(module: nn.Module, others: Container[nn.Module] = ()) -> Iterator[int]:
    """Ids of the parameters in the `area` of a module; may repeat."""
    return (id(p) for part in area(module, others) for p in part.parameters(recurse=False))


def wait_points(root: nn.Module, layers: Collection[nn.Module] | None = None) -> list[WaitPoint]:
    """Wait points for all parameters of ``root``: one for each module with any, which waits for
    what is below it and in no other layer.

    >>> model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    >>> [type(point.module).__name__ for point in wait_points(model)]
    ['ModuleDict', 'Linear']
    """
    if layers is None:
        members = dict.fromkeys(outermost_members(root))
        layers = [m for m in members if m is not root and next(m.children(), None) is not None]
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
    model with it is copied or pickled; a copy does nothing, because no runtime is behind it."""

    action: Callable[..., None]
    before_copy: Callable[[], None] = _nothing

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.action(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        self.before_copy()
        return Hook, (_nothing,)


def opaque(action: Callable[..., None], point: WaitPoint) -> Callable[..., None]:
    """``action``, before the module of ``point``, where torch.compile does not look into it. Inside
    a layer it is left out in compiled code: the hook of the layer around it has done it."""
    hidden = torch.compiler.disable(action)

    def unless_compiled(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hidden(*args)

    return unless_compiled if point.in_layer else hidden


@contextmanager
def hidden_parameters(model: nn.Module, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, no module of ``model`` has any of ``parameters``. Afterwards each is where it was, in
    its order, and what others have put in the place of the remaining ones stays."""
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
    """Notices cheaply when a model trains other ``parameters`` than planned. Keeps no module.
    ``exempt`` are those that a framework replaces at will (FSDP2 while a unit is gathered)."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], exempt: Collection[Tensor] = ()
    ) -> None:
        self._model = weakref.ref(model)
        # Held, so that no new parameter can take over the id of one that went.
        self._planned = {id(p): p for p in parameters}
        others = {id(p) for p in exempt}
        self._exempts = bool(others)
        named = model.named_parameters(remove_duplicate=False)
        self._names = {canonical_name(n) for n, p in named if id(p) not in others}
        self._seen = _parameters_of(model)

    def check(self) -> None:
        """Raise OwnershipError if the model trains a parameter that was not planned; 0.2 ms for 400
        modules, as long as nothing has changed."""
        if (model := self._model()) is None:
            return
        now = _parameters_of(model)
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return
        for name, p in model.named_parameters(remove_duplicate=False):
            is_place = canonical_name(name) in self._names
            # Where a framework replaces parameters, only places that it leaves alone tell anything.
            if id(p) not in self._planned and p.requires_grad and (is_place or not self._exempts):
                raise replaced(canonical_name(name), new=not is_place)
        self._seen = now


def _parameters_of(model: nn.Module) -> list[nn.Parameter | None]:
    """All parameters, module by module, without the cost of their names."""
    found: list[nn.Parameter | None] = []
    modules = [model]
    seen = {model}
    for module in modules:  # which grows meanwhile
        found += module._parameters.values()
        if module._modules:
            new = [m for m in module._modules.values() if m is not None and m not in seen]
            modules += new
            seen.update(new)
    return found


def replaced(name: str, *, new: bool = False) -> OwnershipError:
    """The error for a parameter in the place of a planned one, or (``new``) in none's."""
    what = "was no parameter" if new else "is another parameter object now than"
    return OwnershipError(
        f"{name!r} {what} at dmuon.dedicate_params, and would never be trained: change values in "
        "place (layout='dedicated': inside `with own.materialized(module):`), or call own.close(), "
        "dmuon.dedicate_params(model) and dmuon.Muon(model) again. Call fully_shard and "
        "parallelize_module before dmuon.dedicate_params"
    )


# ---- FSDP2 -----------------------------------------------------------------------------------


def _fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [m for m in modules if isinstance(m, FSDPModule)]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Show the sharded parameters again: after a forward without backward the root's are whole."""
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
    """The outermost modules that were given to `fully_shard`."""
    modules = _fsdp_modules(model.modules())
    inside = {child for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if m not in inside]
