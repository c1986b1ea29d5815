"""Which modules are materialized together, and before which modules that happens.

By default a group is what users pass to `fully_shard`: a member of the outermost `ModuleList`,
`ModuleDict` or `Sequential`. What is in no such block belongs to the root, and stays materialized
while the root runs. A parameter that several groups use (tied weights) belongs to the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dmuon.comm.hooks import outermost_members
from dmuon.scheduler.specs import canonical_name

__all__ = ["HookPoint", "ModuleGroup", "hook_points", "module_groups"]

Chooses = Callable[[str, nn.Module], bool]


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
    and what lies below it, other groups apart.
    """

    module: nn.Module
    groups: tuple[int, ...]
    is_root: bool = False
    is_part: bool = False
    area: tuple[nn.Module, ...] = ()


def _group_modules(root: nn.Module, chooses: Chooses | None) -> dict[nn.Module, None]:
    if chooses is None:
        return dict.fromkeys(m for m in outermost_members(root) if m is not root)
    return dict.fromkeys(
        m for name, m in root.named_modules() if m is not root and chooses(canonical_name(name), m)
    )


def _own_parameters(module: nn.Module, groups: Container[nn.Module | None]) -> Iterator[int]:
    """Ids of the parameters below ``module`` and in no group inside it."""
    for p in module.parameters(recurse=False):
        yield id(p)
    for child in module.children():
        if child not in groups:
            yield from _own_parameters(child, groups)


def _area(module: nn.Module, groups: Container[nn.Module | None]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in groups:
            yield from _area(child, groups)


def module_groups(
    root: nn.Module, chooses: Chooses | None, index: Mapping[int, int]
) -> list[ModuleGroup]:
    """The groups with at least one parameter, in registration order; the root's is the first.

    ``chooses(name, module)`` says which modules are groups, instead of the default. ``index`` gives
    the numbers of the planned parameters by id.
    """
    groups = _group_modules(root, chooses)
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if module is root or module in groups:
            names.setdefault(module, []).append(canonical_name(name))
    seen: set[int] = set()
    found = []
    for module, where in names.items():
        numbers = dict.fromkeys(index[i] for i in _own_parameters(module, groups) if i in index)
        mine = tuple(p for p in numbers if p not in seen)
        seen.update(mine)
        if mine:
            is_root = module is root
            found.append(
                ModuleGroup(where[0] or "root", weakref.ref(module), mine, is_root, len(where))
            )
    return found


def hook_points(
    root: nn.Module, groups: Sequence[ModuleGroup], index: Mapping[int, int]
) -> list[HookPoint]:
    """Where to materialize: the root, every group's module, what lies between, and their parts."""
    modules = dict.fromkeys(g.module() for g in groups if not g.is_root)
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
        numbers = (index[i] for i in _own_parameters(module, modules) if i in index)
        needs = tuple(sorted({group_of[p] for p in numbers if p in group_of}))
        is_part = group is not None and module is not group
        called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if module is root or (needs and called):
            area = () if is_part else tuple(_area(module, modules))
            points.append(HookPoint(module, needs, module is root, is_part, area))
    return points
