"""Where forward waits for published values: before each block, and before what is in no block.

Blocks are what users pass to `fully_shard`: the members of `ModuleList`, `ModuleDict` and
`Sequential`. A block waits for all of its weights, for not every module calls its children
(`nn.MultiheadAttention` never calls ``out_proj``). The parts of a block wait too, in case someone
calls them without the block; in compiled code they do not, so as not to cut its graph to pieces.

A hook can only wait where it is called, and a weight can be read without any call. So `Coverage`
watches which points a training forward really passes; what it missed is waited for in `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Coverage", "WaitPoint", "attach", "outermost_members", "wait_points"]

# These are never called themselves; a Sequential is, and calls its members.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


@dataclass(frozen=True)
class WaitPoint:
    """A module, and the ids of the parameters that must be there before it runs.

    ``in_block``: it is a part of a block, which has its own wait point.
    """

    module: nn.Module
    parameters: frozenset[int]
    is_root: bool = False
    in_block: bool = False


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if isinstance(child, _UNCALLED):
            yield from _members(child)
        elif _has_children(child):
            yield child


def outermost_members(root: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost containers from ``root`` down, leaf modules too; may repeat."""
    if isinstance(root, _CONTAINERS):
        for child in root.children():
            if isinstance(child, _UNCALLED):
                yield from outermost_members(child)
            else:
                yield child
        return
    for child in root.children():
        yield from outermost_members(child)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost containers from ``module`` down, those that are no leaf modules."""
    if isinstance(module, _CONTAINERS):
        yield from _members(module)
        return
    for child in module.children():
        yield from _blocks(child)


def _between(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules in no block, below the root: someone may call them instead of the root."""
    for child in module.children():
        if child in blocks:
            continue
        if not isinstance(child, _UNCALLED):
            yield child
        yield from _between(child, blocks)


def wait_points(root: nn.Module) -> list[WaitPoint]:
    """Wait points that together cover all parameters of ``root``.

    The root, and every module that is in no block, wait for what is below them and in no block;
    so the first block can start while the last block's values still travel.

    >>> model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    >>> [type(point.module).__name__ for point in wait_points(model)]
    ['ModuleDict', 'Linear']
    """
    blocks = {m: None for m in _blocks(root) if m is not root}
    outside = dict.fromkeys((root, *_between(root, set(blocks))))
    parts = {p: None for b in blocks for p in b.modules() if p not in blocks and p not in outside}
    points = [
        WaitPoint(module, frozenset(_outside(module, set(blocks))), is_root=module is root)
        for module in outside
    ]
    points += [WaitPoint(b, frozenset(map(id, b.parameters()))) for b in blocks]
    points += [
        WaitPoint(part, frozenset(map(id, part.parameters())), in_block=True)
        for part in parts
        if not isinstance(part, _UNCALLED)
    ]
    return [point for point in points if point.parameters or point.is_root]


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[int]:
    """Ids of the parameters below ``module`` that are in no block."""
    for p in module.parameters(recurse=False):
        yield id(p)
    for child in module.children():
        if child not in blocks:
            yield from _outside(child, blocks)


class Coverage:
    """Which parameters the last training forward passes waited for."""

    def __init__(self, points: Sequence[WaitPoint]) -> None:
        self._waited = [point.parameters for point in points]
        self._everything = frozenset().union(*self._waited)
        self._passed: set[int] = set()
        self._missed: dict[frozenset[int], frozenset[int]] = {}

    def passed(self, point: int) -> None:
        """Point number ``point`` ran in a forward pass."""
        if torch.is_grad_enabled():
            self._passed.add(point)

    def take_missed(self) -> frozenset[int]:
        """Ids of the parameters that no passed point waits for; begins anew."""
        key = frozenset(self._passed)
        self._passed.clear()
        if key not in self._missed:
            waited = frozenset().union(*(self._waited[i] for i in key))
            self._missed = {key: self._everything - waited}  # the same forward, step after step
        return self._missed[key]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copied or pickled model, which has no runtime behind it."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _Hook:
    """Calls ``action`` without arguments; a copy of it does nothing."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._action()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make_nothing, ())


def _unless_compiled(action: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        if not torch.compiler.is_compiling():
            action()

    return run


def attach(
    point: WaitPoint,
    wait: Callable[[], None],
    drain: Callable[[], None],
    loaded: Callable[[], None] = _nothing,
) -> list[Callable[[], None]]:
    """Call ``wait`` before forward, ``drain`` before state dicts, ``loaded`` after loading one.

    Returns the removers.
    """
    module = point.module
    # Opaque to torch.compile: traced, it would recompile for every state of what is in flight.
    before = _unless_compiled(wait) if point.in_block else torch.compiler.disable(wait)
    handles = [
        module.register_forward_pre_hook(_Hook(before), prepend=True),
        module.register_state_dict_pre_hook(_Hook(drain)),
        module.register_load_state_dict_pre_hook(_Hook(drain)),
        module.register_load_state_dict_post_hook(_Hook(loaded)),
    ]
    return [handle.remove for handle in handles]
