"""When the `dedicated` layout materializes weights and takes gradients: hooks on modules.

What is materialized together is by default what users pass to `fully_shard`: a member of the
outermost `ModuleList`, `ModuleDict` or `Sequential`. What is in no such block belongs to the root,
and stays materialized while the root runs. A parameter that several use (tied weights) belongs to
the first.

A module's outputs carry a tensor hook that fires before its backward begins. Hooks live on modules
and in autograd's graph, so they refer to the weights, whose `Prefetcher` they tell everything,
weakly.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dmuon.comm.dedicated.prefetch import Weights
from dmuon.comm.hooks import UNCALLED, Hook, Remove, area, outermost_members, parameter_ids
from dmuon.comm.reducer import at_end_of_backward
from dmuon.scheduler.specs import canonical_name
from dmuon.types import DmuonError

__all__ = [
    "HookPoint",
    "ModuleGroup",
    "check_first_forward",
    "hook_gradients",
    "hook_module",
    "hook_points",
    "module_groups",
]

_ANNOUNCED = "_dmuon_announced"  # set on what a module keeps from one pass to the next


# ---- which modules ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleGroup:
    """Modules whose weights travel together.

    ``parameters`` are numbers of planned parameters, in registration order. ``uses``: at how many
    places the module stands in the model, hence how often a forward pass calls it, as far as one
    can see.
    """

    name: str
    module: weakref.ref[nn.Module]  # who keeps groups keeps no model
    parameters: tuple[int, ...]
    is_root: bool
    uses: int = 1


@dataclass(frozen=True)
class HookPoint:
    """A module, and the groups that must be there while it runs.

    ``is_part``: it lies inside a group's module, which normally has seen to it. ``area``: itself
    and what lies below it, without other groups' modules.
    """

    module: nn.Module
    groups: tuple[int, ...]
    is_root: bool = False
    is_part: bool = False
    area: tuple[nn.Module, ...] = ()


def module_groups(
    root: nn.Module, chooses: Callable[[str, nn.Module], bool] | None, index: Mapping[int, int]
) -> list[ModuleGroup]:
    """The groups with at least one parameter, in registration order; the root's is the first.

    ``chooses(name, module)`` says which modules are groups, instead of the default. ``index`` gives
    the numbers of the planned parameters by id.
    """
    if chooses is None:
        chosen = set(outermost_members(root)) - {root}
    else:
        named = root.named_modules()
        chosen = {m for name, m in named if m is not root and chooses(canonical_name(name), m)}
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if module is root or module in chosen:
            names.setdefault(module, []).append(canonical_name(name))
    seen: set[int] = set()
    found = []
    for module, where in names.items():
        numbers = dict.fromkeys(index[i] for i in parameter_ids(module, chosen) if i in index)
        mine = tuple(p for p in numbers if p not in seen)
        seen.update(mine)
        if mine:
            reference, name = weakref.ref(module), where[0] or "root"
            found.append(ModuleGroup(name, reference, mine, module is root, len(where)))
    return found


def hook_points(
    root: nn.Module, groups: Sequence[ModuleGroup], index: Mapping[int, int]
) -> list[HookPoint]:
    """Where to materialize: the root, every group's module, what lies between, and their parts."""
    modules = {g.module() for g in groups if not g.is_root}
    group_of = {p: g for g, group in enumerate(groups) for p in group.parameters}
    inside: dict[nn.Module, nn.Module | None] = {}

    def visit(module: nn.Module, group: nn.Module | None) -> None:
        if module in inside:
            return
        inside[module] = group = module if module in modules else group
        for child in module.children():
            visit(child, group)

    visit(root, None)
    points = []
    for module, group in inside.items():
        numbers = (index[i] for i in parameter_ids(module, modules) if i in index)
        needs = tuple(sorted({group_of[p] for p in numbers if p in group_of}))
        is_part = group is not None and module is not group
        if module is root or (needs and not isinstance(module, UNCALLED)):
            below = () if is_part else tuple(area(module, modules))
            points.append(HookPoint(module, needs, module is root, is_part, below))
    return points


# ---- hooks -----------------------------------------------------------------------------------


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output: in tuples, lists, mappings and dataclasses, nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors_in(member)
    elif isinstance(value, list | tuple | set | frozenset):
        for member in value:
            yield from _tensors_in(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name, None))


def _kept_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Results that a forward keeps as attributes of modules, such as the loss of a router."""
    for part in modules:
        for name, value in vars(part).items():
            if isinstance(value, Tensor) or (name[0] != "_" and isinstance(value, list | tuple)):
                yield from (t for t in _tensors_in(value) if t.grad_fn is not None)


def _ensure_backward(weights: Weights) -> None:
    """Begin the backward pass if this is the first that is heard of it."""
    if weights.prefetcher.in_backward:
        return
    weights.prefetcher.begin_backward()
    weak = weakref.ref(weights)

    def end() -> None:
        # Nested backward calls (re-entrant checkpointing) each end once; it may be over.
        weights = weak()
        if weights is not None:
            weights.recover()

    at_end_of_backward(end)


def _announce(weights: Weights, point: HookPoint, output: Any) -> bool:
    """Have the weights there before the backward of ``output``; whether that can be.

    Backward may also begin at what the module keeps.
    """
    step, weak = weights.prefetcher.steps, weakref.ref(weights)

    def before_backward(grad: Tensor) -> None:
        weights = weak()
        if weights is None:
            return
        if weights.prefetcher.steps != step:
            raise DmuonError(
                "opt.step() changed weights between this forward pass and its backward, which "
                "would give gradients of neither: call backward before opt.step()"
            )
        if torch.is_grad_enabled():
            raise DmuonError(
                "create_graph=True: weights of the 'dedicated' layout are freed when backward is "
                "done, so there is no second derivative. Use layout='replicated' for it"
            )
        _ensure_backward(weights)
        for g in point.groups:
            weights.prefetcher.need(g)

    found = [t for t in _tensors_in(output) if t.requires_grad]
    for tensor in found:
        tensor.register_hook(before_backward)
    for tensor in _kept_tensors(point.area):
        if not any(tensor is t for t in found) and not hasattr(tensor, _ANNOUNCED):
            tensor.register_hook(before_backward)
            setattr(tensor, _ANNOUNCED, True)
    return bool(found)


def hook_module(weights: Weights, point: HookPoint) -> list[Remove]:
    """Hooks of one module; returns their removers."""
    module, groups = point.module, point.groups
    weak_weights, weak_module = weakref.ref(weights), weakref.ref(module)

    def check_copy() -> None:
        weights, module = weak_weights(), weak_module()
        if weights is not None and module is not None:
            weights.check_whole(module)  # a copy of placeholders would be of no use

    def hook(action: Callable[[Weights, nn.Module, Any], None]) -> Hook:
        def act(module: nn.Module, *args: Any) -> None:
            weights = weak_weights()
            if weights is not None:
                action(weights, module, args[-1] if args else None)

        # Opaque to torch.compile: the graph breaks, and what is traced never sees placeholders.
        opaque = torch.compiler.disable(act)

        def unless_compiled(module: nn.Module, *args: Any) -> None:
            # In compiled code the hook of the module around it has done it.
            if not torch.compiler.is_compiling():
                opaque(module, *args)

        return Hook(unless_compiled if action is touch else opaque, check_copy)

    def before(weights: Weights, module: nn.Module, _: Any) -> None:
        prefetcher = weights.prefetcher
        if not prefetcher.in_backward and point.is_root:
            prefetcher.begin_forward()
        for g in groups:  # in backward for the recomputation of a checkpointed forward
            prefetcher.need(g) if prefetcher.in_backward else prefetcher.enter(g)

    def after(weights: Weights, module: nn.Module, output: Any) -> None:
        prefetcher = weights.prefetcher
        if prefetcher.in_backward:
            return
        recorded = torch.is_grad_enabled()
        announced = _announce(weights, point, output) if recorded else False
        for g in groups:
            prefetcher.leave(g, recorded=recorded, keep=recorded and not announced)
        if point.is_root:
            prefetcher.end_forward()

    def touch(weights: Weights, module: nn.Module, _: Any) -> None:
        prefetcher = weights.prefetcher
        for g in groups:
            prefetcher.need(g) if prefetcher.in_backward else prefetcher.touch(g)

    def check(weights: Weights, module: nn.Module, _: Any) -> None:
        weights.check_whole(module)

    if point.is_part:
        handles = [module.register_forward_pre_hook(hook(touch))]
    else:
        handles = [
            module.register_forward_pre_hook(hook(before), prepend=True),
            module.register_forward_hook(hook(after)),
        ]
    handles.append(module.register_state_dict_pre_hook(hook(check)))
    handles.append(module.register_load_state_dict_pre_hook(hook(check)))
    return [handle.remove for handle in handles]


def hook_gradients(weights: Weights, parameters: Sequence[tuple[int, Tensor]]) -> list[Remove]:
    """Take each gradient as soon as it has been accumulated."""
    weak = weakref.ref(weights)

    def make(index: int) -> Callable[[Tensor], None]:
        def on_gradient(p: Tensor) -> None:
            weights = weak()
            if weights is not None:
                _ensure_backward(weights)
                weights.prefetcher.take_gradient(index, p)

        return on_gradient

    return [p.register_post_accumulate_grad_hook(make(i)).remove for i, p in parameters]


def check_first_forward(weights: Weights, root: nn.Module) -> Remove:
    """Look for replaced parameters in the first forward pass, before any other hook.

    `fully_shard` puts its hooks before those of modules, and gathers there; only a global hook
    comes first. It removes itself when the first module of ``root`` runs.
    """
    weak = weakref.ref(weights)
    members = weakref.WeakSet(root.modules())

    def hook(module: nn.Module, inputs: Any) -> None:
        weights = weak()
        if weights is None:
            handle.remove()
        elif module in members:
            weights.adopt()
            handle.remove()

    handle = register_module_forward_pre_hook(torch.compiler.disable(hook))
    return handle.remove
