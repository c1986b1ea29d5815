"""Checks of a saved state of `Muon`, as passed to `load_state_dict`.

`read_state` makes all of them, in the order of the functions below it, and changes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon.config import FINITE, Schedule, checked
from dmuon.dtensors import local_tensor
from dmuon.groups import PROGRESS, Group, ParamGroups, as_here, check_group, describe
from dmuon.rule import MASTER, MOMENTUM, momentum_dtypes, rule_of
from dmuon.scheduler.select import Route
from dmuon.scheduler.specs import canonical_name
from dmuon.tensors import not_finite
from dmuon.types import Algorithm, OwnershipError, first_of

# The keys that an entry must have, named as in torch.optim, by the algorithm of its parameter.
_NEEDED = {Algorithm.MUON: (MOMENTUM,), Algorithm.ADAMW: ("exp_avg", "exp_avg_sq", "step")}


class SavedState(NamedTuple):
    """A checked state: param groups, entries by parameter, and the schedule's position if saved."""

    groups: list[Group]
    entries: dict[Any, Any]
    progress: dict[str, Any] | None

    def text(self) -> str:
        """List, in lines, the values that must agree on all ranks."""
        groups = (describe(g, n, len(g["params"])) for n, g in enumerate(self.groups))
        entries = ([(k, type(v).__name__) for k, v in e.items()] for e in self.entries.values())
        return "\n".join([*chain.from_iterable(groups), *map(str, map(sorted, entries))])


def read_state(
    given: Any, here: Sequence[Group], parameters: ParamGroups, schedule: Schedule, masters: bool
) -> SavedState:
    """Check ``given`` for an optimizer with the param groups ``here``; ``masters`` says whether it
    keeps master weights."""
    is_list = isinstance(given, list | tuple)
    for state in given if is_list else [given]:
        _check_form(state)
    named = parameters.named(here)
    if is_list:
        # Hyperparameters keep the values of this optimizer.
        groups = [group | {"params": [*range(len(group["params"]))]} for group in here]
        entries = _joined(given, named, parameters)
    else:
        groups = [dict(group) for group in given["param_groups"]]
        entries = _by_parameter(given, here, named)
    entries = {p: entry for p, entry in entries.items() if entry}
    values: list[tuple[str, Tensor]] = []
    group_of = {p: group for group in here for p in group["params"]}
    for name, p in named:
        if p in entries and p.requires_grad and name in parameters.routes:
            values += _values_of(entries[p], p, parameters.routes[name], group_of[p], masters)
    if bad := not_finite(values):
        raise OwnershipError(
            f"the optimizer state has values that are not finite: {first_of(bad)}, in the "
            "dtype that keeps them here. With them every later step would be skipped: load an "
            "older checkpoint"
        )
    progress = _read_groups(groups, here, parameters, schedule)
    taken = 0 if progress is None else int(progress["step"])
    if taken and not is_list and not any(MOMENTUM in e for e in entries.values()):
        raise OwnershipError(
            f"the optimizer state is of {taken} steps and has no momentum of any matrix. dcp.load "
            "reads only entries of the state that it is given, and an optimizer's entries are made "
            "by its first step, or by get_optimizer_state_dict(model, opt) of "
            "torch.distributed.checkpoint.state_dict: load into the result of that"
        )
    return SavedState(groups, entries, progress)


def _check_form(given: Any) -> None:
    def are_dicts(values: Iterable[Any]) -> bool:
        return all(isinstance(value, Mapping) for value in values)

    flaw = None
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        flaw = f"it must be a dict with 'state' and 'param_groups', found {found}"
    elif not isinstance(given["state"], Mapping) or not are_dicts(given["state"].values()):
        flaw = "'state' must be a dict with a dict for each parameter"
    elif not isinstance(groups := given["param_groups"], list | tuple) or not all(
        are_dicts([group]) and isinstance(group.get("params"), list | tuple) for group in groups
    ):
        flaw = "'param_groups' must be a list of dicts, each with a list as 'params'"
    if flaw is not None:
        raise OwnershipError(f"this did not come from opt.state_dict() of a dmuon.Muon: {flaw}")


def _by_parameter(
    given: Mapping[str, Any], here: Sequence[Group], named: Sequence[tuple[str, Any]]
) -> dict[Any, Any]:
    """Map parameters to one state's entries, keyed by number, or by name as torch's DCP does."""
    groups, entries = given["param_groups"], given["state"]
    keys = [key for group in groups for key in group["params"]]
    if len(keys) != len(named) or len(groups) != len(here):
        raise OwnershipError(
            f"the optimizer state has {len(keys)} parameters in {len(groups)} groups; this "
            f"optimizer has {len(named)} in {len(here)}: make it with the saved groups; the "
            "states of several optimizers (torch.optim.Muon, AdamW) are loaded together, as a list"
        )
    labels = [name for group in groups for name in group.get("param_names", ())]
    ours = _unprefixed([name for name, _ in named])
    if all(isinstance(key, str) for key in keys) and {*_unprefixed(keys)} == {*ours}:
        labels = keys
    order = [p for _, p in named]
    if len(labels) == len(keys) and all(group.get("param_names") for group in here):
        theirs = _unprefixed(labels)
        if {*theirs} != {*ours}:
            raise OwnershipError(
                "the optimizer state is of other parameters: it has, for instance, "
                f"{sorted({*theirs} - {*ours})[:3]} and not {sorted({*ours} - {*theirs})[:3]}. It "
                "was saved by another model; if only names have changed, remove 'param_names' from "
                "its param_groups, and the order of the parameters counts"
            )
        order = [*map(dict(zip(ours, order)).__getitem__, theirs)]
    if foreign := sorted(map(str, entries.keys() - {*keys})):
        raise OwnershipError(
            f"the optimizer state has entries of {foreign[:3]}, which are in none "
            "of its param_groups: it was combined from several, or changed after saving"
        )
    return {p: entries[key] for key, p in zip(keys, order) if key in entries}


def _joined(
    given: Sequence[Mapping[str, Any]], named: Sequence[tuple[str, Any]], parameters: ParamGroups
) -> dict[Any, Any]:
    """Combine several states that cover the parameters together. Without names the order counts:
    states with momentum fill matrices, the others fill the rest, or all parameters. AdamW's entries
    of matrices are dropped."""
    routes = parameters.routes
    trained = {name: p for name, p in named if p.requires_grad and name in routes}
    groups = [(state, group) for state in given for group in state["param_groups"]]
    found: dict[str, Any] = {}
    if all("param_names" in group for _, group in groups):
        for state, group in groups:
            for name, key in zip(group["param_names"], group["params"], strict=True):
                found[canonical_name(name)] = state["state"].get(key, {})
    else:
        for state in given:
            keys = [key for group in state["param_groups"] for key in group["params"]]
            entries = [state["state"].get(key, {}) for key in keys]
            is_muon = any(MOMENTUM in entry for entry in entries)
            is_all = len(given) == 1 and len(entries) == len(trained)
            left = [n for n in trained if is_all or bool(routes[n][1]) == is_muon]
            left = [n for n in left if n not in found]
            if len(entries) > len(left):
                raise OwnershipError(
                    f"one of the optimizer states has {len(entries)} parameters; "
                    f"{len(left)} {'matrices' if is_muon else 'others'} are left for them. Give "
                    "both optimizers model.named_parameters(), so that names decide"
                )
            found |= zip(left, entries)
    if differing := sorted(found.keys() ^ trained.keys()):
        raise OwnershipError(
            "the optimizer states must together cover the parameters of this optimizer; these are "
            f"on one side only: {differing[:5]}"
        )
    adamws = {n for n, entry in found.items() if routes[n][1] and MOMENTUM not in entry}
    return {p: {} if name in adamws else found[name] for name, p in trained.items()}


def _unprefixed(names: Sequence[str]) -> list[str]:
    """Strip the prefix that all parameter names share.

    >>> _unprefixed(["model.a.weight", "model.b.weight"]), _unprefixed(["a.weight", "b.weight"])
    (['a.weight', 'b.weight'], ['a.weight', 'b.weight'])
    """
    parts = [canonical_name(name).split(".") for name in names]
    common = len(os.path.commonprefix([path[:-1] for path in parts]))  # noqa: RUF071
    return [".".join(path[common:]) for path in parts]


def _values_of(
    entry: Mapping[str, Any], p: Tensor, route: Route, group: Group, masters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one entry, which must be finite in the dtype that keeps them here."""
    spec, matrices = route
    where = f"for parameter {spec.name!r}"
    needed = _NEEDED[spec.algorithm]
    if not entry.keys() >= {*needed}:
        raise OwnershipError(
            f"the optimizer state has {sorted(entry)} {where}, which is updated by "
            f"{spec.algorithm.value} here and needs {', '.join(map(repr, needed))}: it was saved "
            "by another optimizer, or with other routes. Of AdamW load the weights alone, or "
            "opt.load_state_dict([state]): moments of what AdamW updates here; momentum begins at 0"
        )
    wide = torch.promote_types(p.dtype, torch.float32) if masters else p.dtype
    momentum, _ = momentum_dtypes(group.get("momentum_dtype"), p.dtype, masters)
    # Shape by key, and the dtype that keeps the value here where it must be floating point.
    known: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
        key: (spec.shape, momentum if key == MOMENTUM else wide)
        for key in (MOMENTUM, MASTER, "exp_avg", "exp_avg_sq")
    }
    for kept in rule_of(group).state:  # one row for all matrices; starts at zero if missing
        known[kept.name] = (sum(math.prod(kept.shape(*m.shape)) for m in matrices),), None
    for key in filter(known.__contains__, entry):
        value, (shape, dtype) = entry[key], known[key]
        if not isinstance(value, Tensor) or value.shape != shape:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OwnershipError(
                f"the optimizer state has {key} of shape {found} {where}, expected {list(shape)}: "
                "it was saved by another model, with other splits or another variant, or the "
                "parameters were listed in another order"
            )
        if dtype is not None and not value.is_floating_point():
            raise OwnershipError(
                f"the optimizer state has {key} of {value.dtype} {where}: it must be of a floating "
                "dtype"
            )
        local = local_tensor(value)
        if local.is_meta and local.numel():
            raise OwnershipError(
                f"the optimizer state has {key} on the meta device {where}, where it has no "
                "values: load it from the checkpoint first"
            )
        if local.numel():
            narrows = dtype and torch.finfo(local.dtype).max > torch.finfo(dtype).max
            yield f"{key} of {spec.name}", local.to(dtype) if narrows else local
    step = entry.get("step", 0)
    try:
        checked({"step": FINITE}, {"step": step.item() if isinstance(step, Tensor) else step})
    except (TypeError, ValueError, RuntimeError):
        raise OwnershipError(
            f"the optimizer state has step={step!r} {where}: it must be a number >= 0"
        ) from None


def _read_groups(
    groups: list[Group], here: Sequence[Group], parameters: ParamGroups, schedule: Schedule
) -> dict[str, Any] | None:
    """Return the schedule's position. Add missing keys to ``groups``, as torch's optimizers do."""
    progress = None
    for number, (group, now) in enumerate(zip(groups, here, strict=True)):
        # The current names apply, because they decide how parameters are routed.
        if group.get("param_names") != now.get("param_names"):
            group.pop("param_names", None)
        try:
            if progress is None and PROGRESS["step"] in group:
                progress = {k: group[name] for k, name in PROGRESS.items() if name in group}
                schedule.read(progress)
            groups[number] = as_here(group, now)
            check_group(groups[number], number, parameters.algorithms[number])
        except (TypeError, ValueError) as error:
            raise OwnershipError(
                f"the optimizer state does not fit: in its param_groups[{number}] {error}"
            ) from error
    return progress
