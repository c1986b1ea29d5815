"""What an owner keeps for its matrices: momentum, and float32 masters if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from dmuon.comm.layout import OwnerRuntime, rows_of, set_rows
from dmuon.comm.routes import Unit
from dmuon.ownership import Ownership
from dmuon.types import OwnershipError
from dmuon.update import merged_master

__all__ = ["OwnerState"]


class OwnerState:
    """Momentum stacked per owned unit, ``[b, m, n]``, made eagerly.

    With ``master_weights`` both are float32; masters are made from the weights at the first step,
    so that weights loaded before it count.
    """

    def __init__(self, ownership: Ownership, master_weights: bool) -> None:
        self._ownership = ownership
        self._runtime = cast(OwnerRuntime, ownership.runtime)
        self._with_masters = master_weights
        rank = ownership.rank
        self._units = [u for u in ownership.runtime.units if u.owner == rank]
        self._momentum: dict[int, Tensor] = {}
        self._masters: dict[int, Tensor] = {}
        for unit in self._units:
            gradients = self._runtime.unit_gradients(unit)
            dtype = torch.float32 if master_weights else self._parameter(unit, 0).dtype
            self._momentum[unit.matrices[0]] = torch.zeros_like(gradients, dtype=dtype)

    def _parameter(self, unit: Unit, k: int) -> Tensor:
        matrix = self._ownership.plan.specs.matrices[unit.matrices[k]]
        return self._ownership.parameters[matrix.parameter]

    @contextmanager
    def rows(self, unit: Unit, where: list[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The momentum and masters of the given positions of a unit, to be updated in place."""
        key = unit.matrices[0]
        kept = [self._momentum[key]]
        if self._with_masters:
            kept.append(self._master(unit))
        some = [rows_of(t, where) for t in kept]
        yield some[0], some[1] if self._with_masters else None
        for whole, part in zip(kept, some, strict=True):
            if part is not whole:
                set_rows(whole, where, part)

    def _master(self, unit: Unit) -> Tensor:
        key = unit.matrices[0]
        if key not in self._masters:
            shape = (unit.rows, unit.cols)
            weights = self._runtime.weights(unit)
            self._masters[key] = torch.stack([w.float().reshape(shape) for w in weights])
        return self._masters[key]

    def refresh_masters(self) -> None:
        """Take over weights that were loaded into the model since the masters were made."""
        for unit in self._units:
            master = self._masters.get(unit.matrices[0])
            if master is None:
                continue
            for k, weight in enumerate(self._runtime.weights(unit)):
                master[k].copy_(merged_master(master[k], weight.reshape(master[k].shape)))

    def _entries(self, stacked: dict[int, Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """(parameter, its part): one tensor of the parameter's shape, or one a matrix by name."""
        plan = self._ownership.plan
        by_parameter: dict[int, dict[str, Tensor]] = {}
        for unit in self._units:
            if unit.matrices[0] not in stacked:
                continue
            for k, i in enumerate(unit.matrices):
                matrix = plan.specs.matrices[i]
                by_parameter.setdefault(matrix.parameter, {})[matrix.name] = _in_parameter_shape(
                    stacked[unit.matrices[0]][k],
                    matrix.transposed,
                    plan.specs.parameters[matrix.parameter].shape,
                    matrix.numel,
                )
        for p, parts in by_parameter.items():
            whole = parts.get(plan.specs.parameters[p].name)
            yield self._ownership.parameters[p], parts if whole is None else whole

    def momentum_entries(self) -> Iterator[tuple[Tensor, Any]]:
        """Views of the momentum for ``optimizer.state``, by parameter."""
        return self._entries(self._momentum)

    def master_entries(self) -> Iterator[tuple[Tensor, Any]]:
        """Views of the masters for ``optimizer.state``, by parameter."""
        return self._entries(self._masters)

    def check(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise OwnershipError if an owned matrix has no momentum among the saved entries."""
        for p, entry in self.momentum_entries():
            source = saved.get(p, {}).get("momentum_buffer")
            names = set(entry) if isinstance(entry, dict) else None
            if source is None or (names is not None and not names <= set(source)):
                raise OwnershipError(
                    "the optimizer state has no momentum for an owned parameter of shape "
                    f"{tuple(p.shape)}: it was saved by another rank or another plan"
                )

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy momentum and masters from saved entries of the same form (see `check`)."""
        _copy_entries(self.momentum_entries(), saved, "momentum_buffer")
        if not self._with_masters:
            return
        if any(
            "master_weight" in entry for p, entry in saved.items() if "momentum_buffer" in entry
        ):
            for unit in self._units:
                self._master(unit)
            _copy_entries(self.master_entries(), saved, "master_weight")
        else:
            self._masters.clear()


def _in_parameter_shape(
    matrix: Tensor, transposed: bool, shape: tuple[int, ...], numel: int
) -> Tensor:
    if transposed:
        return matrix.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    whole = matrix.numel() == numel and torch.Size(shape).numel() == numel
    return matrix.view(shape) if whole else matrix


def _copy_entries(
    entries: Iterator[tuple[Tensor, Any]], saved: Mapping[Tensor, dict[str, Any]], key: str
) -> None:
    for p, entry in entries:
        source = saved[p].get(key)
        if source is None:
            continue  # a master that its weight had not needed yet
        if isinstance(entry, dict):
            for name, target in entry.items():
                target.copy_(source[name])
        else:
            entry.copy_(source)
