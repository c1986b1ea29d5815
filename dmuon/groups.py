"""From what a user passes to an optimizer to param groups that hold one algorithm each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from dmuon.comm.hooks import reshard
from dmuon.ownership import Ownership, ownership_of, ownerships_of
from dmuon.scheduler.specs import canonical_name
from dmuon.types import Algorithm, OwnershipError

__all__ = ["check_groups", "collected", "input_groups", "ownerships_in", "split_groups"]

# Keys of a user's group that set AdamW's side of it, by the name they have there.
_ADAMW_KEYS = {
    "adamw_lr": "lr",
    "adamw_betas": "betas",
    "adamw_eps": "eps",
    "adamw_weight_decay": "weight_decay",
}


def collected(model_or_params: Any) -> Any:
    """The same, with generators turned into lists, so that it can be looked at twice."""
    if isinstance(model_or_params, nn.Module):
        reshard(model_or_params)
    if isinstance(model_or_params, nn.Module | Tensor) or not isinstance(model_or_params, Iterable):
        return model_or_params
    members = list(model_or_params)
    for i, member in enumerate(members):
        if isinstance(member, dict):
            params: Any = member.get("params")
            lazy = isinstance(params, Iterable) and not isinstance(params, Tensor | str)
            members[i] = {**member, "params": list(params)} if lazy else dict(member)
    return members


def input_groups(given: Any) -> list[dict[str, Any]]:
    """Group dicts whose "params" are lists of tensors, from any of the accepted forms.

    Raises:
        TypeError: something in there is no tensor.
    """
    if isinstance(given, nn.Module):
        return [{"params": list(given.parameters())}]
    if not isinstance(given, list):
        raise TypeError(
            f"Muon takes a module or an iterable of parameters, found {type(given).__name__}"
        )
    grouped = bool(given) and isinstance(given[0], dict)
    groups = [dict(g) for g in given] if grouped else [{"params": given}]
    for group in groups:
        params = group.get("params")
        if params is None:
            raise TypeError("a param group needs a 'params' entry")
        params = [params] if isinstance(params, Tensor) else params
        group["params"] = [_tensor_of(p) for p in params]
    return groups


def _tensor_of(entry: Any) -> Tensor:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        entry = entry[1]
    if not isinstance(entry, Tensor):
        raise TypeError(
            "a param group holds parameters or (name, parameter) pairs, found "
            f"{type(entry).__name__}"
        )
    return entry


def _tensors(given: Any) -> Iterator[Tensor]:
    """Every tensor in there, however malformed the rest is."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, nn.Module):
        yield from given.parameters()
    elif isinstance(given, dict):
        yield from _tensors(given.get("params"))
    elif isinstance(given, list | tuple):
        for member in given:
            yield from _tensors(member)


def ownerships_in(given: Any) -> list[Ownership]:
    """The ownerships of all parameters in ``given`` (see `collected`), each once.

    Raises:
        TypeError: there is none, and ``given`` is not what an optimizer takes.
        OwnershipError: there is none: `dedicate_params` was not called.
    """
    if isinstance(given, nn.Module):
        ownerships = ownerships_of(given)
    else:
        found = [ownership_of(p) for p in _tensors(given)]
        ownerships = list(dict.fromkeys(o for o in found if o is not None))
    for ownership in ownerships:
        ownership.adopt()
    if not ownerships:
        input_groups(given)  # if it is malformed, that is the better error
        raise OwnershipError(
            "dmuon.Muon got no dedicated parameter: call own = dmuon.dedicate_params(model) "
            "before opt = dmuon.Muon(model)"
        )
    return ownerships


def check_groups(
    groups: list[dict[str, Any]], ownerships: list[Ownership], names: dict[Tensor, str]
) -> None:
    """Each planned parameter must be in exactly one group, and each trainable one planned.

    ``names`` gives the planned parameters' names.
    """
    seen: dict[Tensor, int] = {}
    for number, group in enumerate(groups):
        for p in group["params"]:
            name = names.get(p, f"of shape {tuple(p.shape)}")
            if p in seen:
                raise OwnershipError(
                    f"parameter {name!r} appears twice, in group {seen[p]} and in group "
                    f"{number}: list each parameter once"
                )
            seen[p] = number
            if p not in names and p.requires_grad:
                raise OwnershipError(
                    f"parameter {name!r} in group {number} is trainable but was not part of "
                    "dedicate_params: was it added or unfrozen since? Call own.close() and "
                    "dmuon.dedicate_params(model) again"
                )
    missing = [name for p, name in names.items() if p not in seen]
    if missing:
        raise OwnershipError(
            f"{len(missing)} dedicated parameters were not passed to dmuon.Muon: "
            f"{', '.join(missing[:5])}. Pass all of them, or freeze them (requires_grad_(False)) "
            "before dmuon.dedicate_params(model)"
        )


def planned_names(ownerships: list[Ownership]) -> dict[Tensor, str]:
    """Every planned parameter of these ownerships with its canonical name."""
    return {
        p: canonical_name(spec.name)
        for o in ownerships
        for p, spec in zip(o.parameters, o.plan.specs.parameters, strict=True)
    }


def _algorithms(ownerships: list[Ownership]) -> dict[Tensor, Algorithm]:
    return {
        p: spec.algorithm
        for o in ownerships
        for p, spec in zip(o.parameters, o.plan.specs.parameters, strict=True)
    }


def split_groups(
    groups: list[dict[str, Any]],
    ownerships: list[Ownership],
    muon: dict[str, Any],
    adamw: dict[str, Any],
) -> list[dict[str, Any]]:
    """One Muon and one AdamW group for each given group that has such parameters.

    ``muon`` and ``adamw`` are the defaults. A group's own ``lr`` and ``weight_decay`` count for
    both sides, unless ``adamw_lr``/``adamw_weight_decay`` say otherwise; None in ``adamw`` means
    the same as Muon's.
    """
    algorithms = _algorithms(ownerships)
    made = []
    for group in groups:
        own = {k: v for k, v in group.items() if k != "params" and k not in _ADAMW_KEYS}
        # Such as "initial_lr" or "name": kept on both sides, as torch keeps them.
        foreign = {k: v for k, v in own.items() if k not in muon and k not in adamw}
        muon_side = muon | {k: v for k, v in own.items() if k in muon}
        inherited = {k: own[k] for k in ("lr", "weight_decay") if k in own and adamw[k] is None}
        adamw_side = adamw | inherited | ({"betas": own["betas"]} if "betas" in own else {})
        adamw_side |= {_ADAMW_KEYS[k]: v for k, v in group.items() if k in _ADAMW_KEYS}
        for name in ("lr", "weight_decay"):
            if adamw_side[name] is None:
                adamw_side[name] = muon_side[name]
        for algorithm, side in ((Algorithm.MUON, muon_side), (Algorithm.ADAMW, adamw_side)):
            params = [p for p in group["params"] if algorithms.get(p) is algorithm]
            if params:
                made.append({"params": params, "algorithm": algorithm.value, **foreign, **side})
    return made
