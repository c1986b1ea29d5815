"""Hooks that materialize a group's weights before its modules run, forward and backward.

A module's outputs carry a tensor hook that fires before its backward begins. Hooks live on modules
and in autograd's graph, so they refer to the runtime weakly.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dmuon.comm.dedicated.module_groups import HookPoint
from dmuon.comm.triggers import at_end_of_backward
from dmuon.types import DmuonError

__all__ = ["Passes", "check_first_forward", "hook_gradients", "hook_module"]

Remove = Callable[[], None]
_ANNOUNCED = "_dmuon_announced"  # set on what a module keeps from one pass to the next


class Passes(Protocol):
    """What the hooks tell; ``steps`` counts how often weights have changed."""

    steps: int

    @property
    def in_backward(self) -> bool: ...

    def begin_forward(self) -> None: ...
    def end_forward(self) -> None: ...
    def enter(self, groups: Sequence[int]) -> None: ...
    def touch(self, groups: Sequence[int]) -> None: ...
    def leave(self, groups: Sequence[int], *, recorded: bool, announced: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def need(self, groups: Sequence[int]) -> None: ...
    def end_backward(self) -> None: ...
    def take_gradient(self, parameter: int) -> None: ...
    def adopt(self) -> None: ...
    def check_whole(self, module: nn.Module) -> None: ...


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copied or pickled model, which has no runtime behind it."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _Hook:
    """Calls ``action(passes, module, output)`` while there is a runtime; a copy does nothing."""

    def __init__(
        self,
        passes: Passes,
        module: nn.Module,
        action: Callable[[Passes, nn.Module, Any], None],
    ) -> None:
        self._passes = weakref.ref(passes)
        self._module = weakref.ref(module)
        self._action = action
        # Opaque to torch.compile: the graph breaks, and what is traced never sees placeholders.
        self._opaque = torch.compiler.disable(self._act)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self._opaque(module, *args)

    def _act(self, module: nn.Module, *args: Any) -> None:
        passes = self._passes()
        if passes is not None:
            self._action(passes, module, args[-1] if args else None)

    def __reduce__(self) -> tuple[Any, ...]:
        passes, module = self._passes(), self._module()
        if passes is not None and module is not None:
            passes.check_whole(module)  # a copy of placeholders would be of no use
        return (_make_nothing, ())


class _PartHook(_Hook):
    """For what lies inside a group: in compiled code the group's own hook has done it."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(module, *args)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output: in tuples, lists, mappings and dataclasses, nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from tensors_in(member)
    elif isinstance(value, list | tuple | set | frozenset):
        for member in value:
            yield from tensors_in(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Results that a forward keeps as attributes of modules, such as the loss of a router."""
    for part in modules:
        for name, value in vars(part).items():
            if isinstance(value, Tensor) or (name[0] != "_" and isinstance(value, list | tuple)):
                yield from (t for t in tensors_in(value) if t.grad_fn is not None)


def ensure_backward(passes: Passes) -> None:
    """Begin the backward pass if this is the first that is heard of it."""
    if passes.in_backward:
        return
    passes.begin_backward()
    weak = weakref.ref(passes)

    def end() -> None:
        # Nested backward calls (re-entrant checkpointing) each end once; it may be over.
        passes = weak()
        if passes is not None and passes.in_backward:
            passes.end_backward()

    at_end_of_backward(end)


def _announce(passes: Passes, point: HookPoint, output: Any) -> bool:
    """Have the weights there before the backward of ``output``; whether that can be.

    Backward may also begin at what the module keeps.
    """
    groups, step, weak = point.groups, passes.steps, weakref.ref(passes)

    def before_backward(grad: Tensor) -> None:
        passes = weak()
        if passes is None:
            return
        if passes.steps != step:
            raise DmuonError(
                "opt.step() changed weights between this forward pass and its backward, which "
                "would give gradients of neither: call backward before opt.step()"
            )
        if torch.is_grad_enabled():
            raise DmuonError(
                "create_graph=True: weights of the 'dedicated' layout are freed when backward is "
                "done, so there is no second derivative. Use layout='replicated' for it"
            )
        ensure_backward(passes)
        passes.need(groups)

    found = [t for t in tensors_in(output) if t.requires_grad]
    for tensor in found:
        tensor.register_hook(before_backward)
    for tensor in kept_tensors(point.area):
        if not any(tensor is t for t in found) and not hasattr(tensor, _ANNOUNCED):
            tensor.register_hook(before_backward)
            setattr(tensor, _ANNOUNCED, True)
    return bool(found)


def hook_module(passes: Passes, point: HookPoint) -> list[Remove]:
    """Hooks of one module; returns their removers."""
    module, groups = point.module, point.groups

    def before(passes: Passes, module: nn.Module, _: Any) -> None:
        if passes.in_backward:
            passes.need(groups)  # recomputation of a checkpointed forward
            return
        if point.is_root:
            passes.begin_forward()
        passes.enter(groups)

    def after(passes: Passes, module: nn.Module, output: Any) -> None:
        if passes.in_backward:
            return
        recorded = torch.is_grad_enabled()
        announced = _announce(passes, point, output) if recorded else False
        passes.leave(groups, recorded=recorded, announced=announced)
        if point.is_root:
            passes.end_forward()

    def touch(passes: Passes, module: nn.Module, _: Any) -> None:
        passes.need(groups) if passes.in_backward else passes.touch(groups)

    def check(passes: Passes, module: nn.Module, _: Any) -> None:
        passes.check_whole(module)

    if point.is_part:
        handles = [module.register_forward_pre_hook(_PartHook(passes, module, touch))]
    else:
        handles = [
            module.register_forward_pre_hook(_Hook(passes, module, before), prepend=True),
            module.register_forward_hook(_Hook(passes, module, after)),
        ]
    handles.append(module.register_state_dict_pre_hook(_Hook(passes, module, check)))
    handles.append(module.register_load_state_dict_pre_hook(_Hook(passes, module, check)))
    return [handle.remove for handle in handles]


def hook_gradients(passes: Passes, parameters: Sequence[tuple[int, nn.Parameter]]) -> list[Remove]:
    """Take each gradient as soon as it has been accumulated."""
    weak = weakref.ref(passes)

    def make(index: int) -> Callable[[Tensor], None]:
        def on_gradient(p: Tensor) -> None:
            passes = weak()
            if passes is not None:
                ensure_backward(passes)
                passes.take_gradient(index)

        return on_gradient

    return [p.register_post_accumulate_grad_hook(make(i)).remove for i, p in parameters]


def check_first_forward(passes: Passes, root: nn.Module) -> Remove:
    """Look for replaced parameters in the first forward pass, before any other hook.

    `fully_shard` puts its hooks before those of modules, and gathers there; only a global hook
    comes first. It removes itself when the first module of ``root`` runs.
    """
    weak = weakref.ref(passes)
    members = weakref.WeakSet(root.modules())

    def hook(module: nn.Module, inputs: Any) -> None:
        passes = weak()
        if passes is None:
            handle.remove()
        elif module in members:
            passes.adopt()
            handle.remove()

    handle = register_module_forward_pre_hook(torch.compiler.disable(hook))
    return handle.remove
