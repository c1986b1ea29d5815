"""What the `sharded` layout must know of FSDP2: when it reads which parameters.

FSDP2 gathers a unit's parameters in a forward pre-hook of the unit's modules, and those of units
named by ``set_modules_to_forward_prefetch`` even earlier. Published values have to be there by
then. That list, the modules of a shared unit and the stream that reads shards have no public name;
they are read here alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from dmuon.comm.blocks import WaitPoint

__all__ = ["Gathers", "drain_before_unshard", "fsdp_roots", "fsdp_wait_points", "reshard"]


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (m for m in model.modules() if isinstance(m, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Show the sharded parameters again: after a forward pass without backward the root's are
    still gathered."""
    for module in _fsdp_modules(model):
        module.reshard()


def _below(module: nn.Module, inner: set[nn.Module]) -> Iterator[int]:
    """Ids of the parameters under ``module`` that belong to no FSDP unit further down."""
    for p in module.parameters(recurse=False):
        yield id(p)
    for child in module.children():
        if child not in inner:
            yield from _below(child, inner)


def fsdp_wait_points(model: nn.Module) -> list[WaitPoint]:
    """A wait point for each module that makes FSDP2 gather a unit: it needs the whole unit."""
    modules = list(_fsdp_modules(model))
    every = set(modules)
    units: dict[int, list[Any]] = defaultdict(list)
    for module in modules:
        units[id(module._get_fsdp_state())].append(module)
    points = []
    for members in units.values():
        needed = frozenset(i for m in members for i in _below(m, every - {m}))
        points += [WaitPoint(m, needed) for m in members]
    return points


def fsdp_roots(model: nn.Module) -> list[Any]:
    """The outermost modules that were given to `fully_shard`."""
    modules = list(_fsdp_modules(model))
    inside = {child for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if m not in inside]


class Gathers:
    """Whether and where units are gathered; may change at any time, so it is looked up anew."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        # Weak: what belongs to an ownership must not keep the model.
        self._references = [weakref.ref(m) for m in _fsdp_modules(model)]
        self._device_module = torch.get_device_module(device)

    def _modules(self) -> list[Any]:
        return [m for m in (reference() for reference in self._references) if m is not None]

    def _states(self) -> list[Any]:
        return [m._get_fsdp_state() for m in self._modules()]

    def ahead(self) -> bool:
        """Whether any unit gathers others, or the order of gathering cannot be told."""
        # Where torch keeps the list elsewhere, it is assumed to be in use.
        if any(getattr(s, "_states_to_forward_prefetch", True) for s in self._states()):
            return True
        return bool(self._references) and not self._streams()

    def by_other_methods(self) -> bool:
        """Whether `register_fsdp_forward_method` made a method gather, which calls no hook.

        It puts a bound method of the module into the module; as others do with ``forward``, which
        runs between hooks.
        """
        return any(
            isinstance(value, MethodType) and value.__self__ is module and name != "forward"
            for module in self._modules()
            for name, value in vars(module).items()
        )

    def follow(self) -> None:
        """Have the streams that read shards wait for what was written on the current one.

        FSDP2 does so when the root's forward begins, and for a unit inside not again.
        """
        current = self._device_module.current_stream()
        for stream in self._streams().values():
            stream.wait_stream(current)

    def _streams(self) -> dict[int, Any]:
        """None before the first forward pass: what its root does then is enough."""
        contexts = [getattr(s, "_comm_ctx", None) for s in self._states()]
        streams = [getattr(c, "all_gather_copy_in_stream", None) for c in contexts]
        return {id(stream): stream for stream in streams if stream is not None}


def drain_before_unshard(model: nn.Module, drain: Callable[[], None]) -> list[Callable[[], None]]:
    """Call ``drain`` before every ``module.unshard()`` of the user's, which calls no hook.

    Returns the removers.
    """
    return [_wrapped(module, drain) for module in _fsdp_modules(model)]


def _wrapped(module: Any, drain: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.ref(module)
    unshard = type(module).unshard

    @wraps(unshard)
    def drained(*args: Any, **kwargs: Any) -> Any:
        drain()
        return unshard(reference(), *args, **kwargs)

    module.unshard = drained

    def remove() -> None:
        alive = reference()
        if alive is not None and vars(alive).get("unshard") is drained:
            del alive.unshard

    return remove
