"""Parameters taken out of their modules for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["hidden_parameters"]


@contextmanager
def hidden_parameters(model: nn.Module, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, no module of ``model`` has any of ``parameters``.

    Afterwards each is where it was, also in the order of its module's parameters, and what others
    have put in the place of the remaining ones stays.
    """
    hidden = {id(p) for p in parameters}
    orders: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
    for module in model.modules():
        names = dict(module._parameters)
        taken = [name for name, p in names.items() if p is not None and id(p) in hidden]
        if taken:
            orders.append((module, names))
        for name in taken:
            delattr(module, name)
    try:
        yield
    finally:
        for module, names in orders:
            now = dict(module._parameters)
            for name in now:
                delattr(module, name)
            for name, p in (names | now).items():
                module.register_parameter(name, p)
