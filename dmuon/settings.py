"""The settings of an optimizer: checked, and agreed on by all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.consensus import agree, attempt
from dmuon.config import (
    ADAMW_RULES,
    SWITCH_RULES,
    AdamWDefaults,
    MuonDefaults,
    check_adamw_group,
    check_muon_group,
    checked,
)
from dmuon.dtensors import local_tensor
from dmuon.kernels.choice import fixed_choice, is_safe, why_not
from dmuon.kernels.newton_schulz import resolve_coefficients, resolve_ns_dtype
from dmuon.kernels.runner import check_graphs
from dmuon.ownership import Ownership
from dmuon.period import Period, Schedule
from dmuon.types import Algorithm, KernelChoice, Layout, OwnershipError
from dmuon.update import Rates

__all__ = [
    "agreed_dtype",
    "check_defaults",
    "check_group",
    "check_kernels",
    "check_switches",
    "fields",
    "together",
    "warn_of_dtype",
    "warn_of_rounding",
]


def fields(defaults: MuonDefaults | AdamWDefaults) -> dict[str, Any]:
    """The hyperparameters by name."""
    return {name: getattr(defaults, name) for name in type(defaults).__slots__}


def check_switches(
    period: Period,
    block_lr_ratio: object,
    publish: object,
    master_weights: object,
    layouts: set[Layout],
) -> Schedule:
    """The schedule of ``period``, when it and the settings for all groups are what they should be.

    Raises:
        TypeError: a setting is of a wrong type.
        ValueError: it is out of range, or (OwnershipError) a layout does not have it.
    """
    schedule = Schedule.of(period)
    checked(
        SWITCH_RULES,
        {"publish": publish, "master_weights": master_weights, "block_lr_ratio": block_lr_ratio},
    )
    for layout in layouts - {Layout.SHARDED}:
        if period != 1 or block_lr_ratio is not None:
            raise OwnershipError(
                f"period={period!r}, block_lr_ratio={block_lr_ratio!r}: in the {layout.value!r} "
                "layout each matrix is whole at its owner, so there is no block step; leave them "
                "at 1 and None"
            )
    return schedule


def check_defaults(muon: MuonDefaults, rest: AdamWDefaults) -> None:
    """Raise TypeError or ValueError for a hyperparameter, by the name that `Muon` has for it."""
    check_muon_group(fields(muon))
    rules = {
        name: rule.or_none() if name in ("lr", "weight_decay") else rule
        for name, rule in ADAMW_RULES.items()
    }
    checked(rules, fields(rest), owner="adamw_")


def check_group(group: dict[str, Any], number: int) -> dict[str, Any]:
    """The hyperparameters of param group ``number``, numbers as Python's own.

    Raises TypeError or ValueError for one of a wrong type or out of range.
    """
    place = f" in opt.param_groups[{number}]"
    if group["algorithm"] == Algorithm.ADAMW.value:
        return check_adamw_group(group, place)
    kept = check_muon_group(group, place)
    resolve_coefficients(kept["ns_coefficients"], kept["ns_steps"])
    return kept


def check_kernels(ownership: Ownership, dtype: torch.dtype, groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if a kernel that was asked for, or that the plan names, cannot run here."""
    options, device, plan = ownership.kernels, ownership.runtime.device, ownership.plan
    check_graphs(options, device)
    steps = {g["ns_steps"] for g in groups if g["algorithm"] == Algorithm.MUON.value}
    shapes = {m.shape for m in plan.specs.matrices}
    for rows, cols in shapes:
        for count in steps:
            fixed_choice(rows, cols, dtype, device, count, options.method, options.backend)
    for kernel in {batch.kernel for batch in plan.batches} - {""}:
        choice = KernelChoice.parse(kernel)
        planned: torch.dtype = getattr(torch, choice.dtype)
        if choice.restarts and not is_safe(choice.restarts, planned, MuonDefaults().ns_steps):
            raise ValueError(
                f"the plan runs {kernel}, with which the iteration diverges: it was not made by "
                "this version of dmuon. Plan again (without plan=)"
            )
        reason = why_not(choice.backend, device, planned)
        if reason is not None:
            raise ValueError(
                f"the plan runs {kernel} on {device}, which is not possible: {reason}. Plan again "
                "on this hardware (without plan=)"
            )


def together(
    ownerships: list[Ownership],
    prepare: Callable[[], list[dict[str, Any]]],
    switches: Callable[[], str],
) -> list[dict[str, Any]]:
    """Run ``prepare``; if it fails or differs on any rank of any mesh, raise on all of them."""
    result: list[dict[str, Any]] = []
    # A rank may have a placeholder where another has the weight.
    planned: dict[Tensor, tuple[int, ...]] = {
        p: spec.shape
        for o in ownerships
        for p, spec in zip(o.parameters, o.plan.specs.parameters, strict=True)
    }
    for ownership in ownerships:
        result = attempt(
            ownership.runtime.transport,
            prepare,
            what="dmuon.Muon",
            digest=lambda groups: "\n".join(
                [switches(), *(_describe(group, planned) for group in groups)]
            ),
        )
    return result


def _describe(group: dict[str, Any], planned: Mapping[Tensor, tuple[int, ...]]) -> str:
    shapes = [planned.get(p, tuple(p.shape)) for p in group["params"]]
    values = {k: v for k, v in group.items() if k != "params"}
    # Not as text: that of a tensor names its device, another one on each rank.
    values |= {k: v.tolist() for k, v in values.items() if isinstance(v, Tensor)}
    return ", ".join([f"{k}={v}" for k, v in values.items()] + [str(shapes)])


def agreed_dtype(ownerships: list[Ownership], ns_dtype: str | torch.dtype) -> torch.dtype:
    """The NS dtype of all ranks: their common choice, or float32 where they differ.

    Updates travel in this dtype, so ranks that differ would disagree on sizes.
    """
    mine = resolve_ns_dtype(ns_dtype, ownerships[0].runtime.device)
    choices = {c for o in ownerships for c in agree(o.runtime.transport, str(mine))}
    return mine if choices == {str(mine)} else torch.float32


def warn_of_dtype(ownerships: list[Ownership], dtype: torch.dtype) -> None:
    """Say on one rank that kernels were chosen for another Newton-Schulz dtype than runs."""
    name = str(dtype).removeprefix("torch.")
    for ownership in ownerships:
        kernels = {batch.kernel for batch in ownership.plan.batches} - {""}
        others = sorted({KernelChoice.parse(kernel).dtype for kernel in kernels} - {name})
        if others and ownership.rank == 0:
            warnings.warn(
                f"dmuon: the plan's kernels were chosen for {' and '.join(others)}, and "
                f"Newton-Schulz runs in {name}: the fixed rule chooses instead. Leave ns_dtype out "
                "to use them",
                RuntimeWarning,
                stacklevel=3,
            )


def half_ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Half a unit in the last place of numbers of this magnitude: what a smaller change is lost in.

    >>> half_ulp(0.02, torch.bfloat16) == 2.0**-14, half_ulp(1.0, torch.float16) == 2.0**-11
    (True, True)
    """
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.smallest_normal))
    return 0.5 * info.eps * math.ldexp(1.0, exponent - 1)


def warn_of_rounding(ownerships: list[Ownership], groups: list[dict[str, Any]]) -> None:
    """Say on one rank that typical updates of half-precision weights are lost in rounding.

    Compares root mean squares over the matrices of each param group and dtype, as far as they are
    stored on that rank. An update's follows from the learning rate: the entries of an orthogonal
    ``m x n`` matrix have the root mean square ``1 / sqrt(max(m, n))``. Reads the weights once.
    """
    group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
    updates: dict[tuple[int, torch.dtype], list[tuple[float, int]]] = {}
    weights: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for ownership in ownerships:
        plan = ownership.plan
        # In the dedicated layout the first rank may store no matrix.
        if ownership.rank != (min(plan.owners) if plan.layout is Layout.DEDICATED else 0):
            continue
        stored = {}
        for i in plan.specs.muon():
            p = ownership.parameters[i]
            local = local_tensor(p)
            if p.dtype.itemsize < 4 and local.numel():
                stored[i] = group_of[p], p.dtype
                weights.setdefault(stored[i], []).append(local)
        for matrix in plan.specs.matrices:
            if matrix.parameter in stored:
                key = stored[matrix.parameter]
                lr = Rates.of(groups[key[0]]).adjusted(*matrix.shape)
                rms = lr / math.sqrt(max(matrix.shape))
                updates.setdefault(key, []).append((rms, matrix.numel))
    lost = []
    for key, sizes in updates.items():
        update = math.sqrt(sum(r * r * n for r, n in sizes) / sum(n for _, n in sizes))
        norms = [torch.linalg.vector_norm(w, dtype=torch.float32) for w in weights[key]]
        count = sum(w.numel() for w in weights[key])
        weight = float(torch.linalg.vector_norm(torch.stack(norms))) / math.sqrt(count)
        if 0 < weight < math.inf and 0 < update < half_ulp(weight, key[1]):
            lost.append((update / half_ulp(weight, key[1]), update, weight, key))
    if not lost:
        return
    _, update, weight, (number, dtype) = min(lost, key=lambda entry: entry[0])
    name = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"dmuon: with lr={float(groups[number]['lr']):g} a typical update of a {name} matrix is "
        f"{update:.2g}, and half a unit in the last place of its typical weight, {weight:.2g}, is "
        f"{half_ulp(weight, dtype):.2g}: most updates are rounded away and change nothing. Pass "
        "master_weights=True, which keeps float32 weights behind the parameters, or keep the "
        "parameters in float32 and compute under torch.autocast",
        RuntimeWarning,
        stacklevel=3,
    )
