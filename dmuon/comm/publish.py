"""Owned units and the way of their results to every rank.

Owners keep gradients stacked as ``[batch, rows, cols]``, so that one call serves all matrices of a
unit. A bucket's wire holds the payloads of its units and, behind them, the RMS of each update, so
that every rank can report it without another collective::

    wire   | payload of unit 3 [b, m, n] | payload of unit 7 [b, m, n] | rms [b3 + b7] |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon.comm.arena import Arena
from dmuon.comm.layout import Apply, Compute, Job, rows_of, set_rows
from dmuon.comm.routes import PublishBucket, Unit, aligned
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import dtype_name
from dmuon.types import OwnershipError

__all__ = ["Publisher", "wire_bytes"]


@dataclass(slots=True)
class _LiveUnit:
    """A unit with the tensors it works on; ``gradients`` is None where it is not owned."""

    unit: Unit
    parameter_of: list[int]
    targets: list[Tensor]  # views of the parameters
    payload: Tensor  # [b, m, n]
    payload_views: list[Tensor]  # of the targets' shapes
    rms: Tensor  # [b] float32
    gradients: Tensor | None  # [b, m, n]
    stamp: list[int]  # where the parameters of the targets are stored


@dataclass(slots=True)
class _LiveBucket:
    """A bucket's wire, and what is in flight of it."""

    bucket: PublishBucket
    wire: Tensor
    tail: Tensor
    seen_rms: Tensor  # the tail as last published, kept when the wire's memory is used again
    work: Work | None = None
    apply: Apply | None = None
    positions: list[list[int]] | None = None


def wire_bytes(units: Sequence[Unit], item_size: int) -> int:
    """Arena bytes for the wires of all units, whatever buckets they are in, with alignment."""
    return sum(
        aligned(unit.numel * item_size) + aligned(4 * len(unit.matrices)) + aligned(1)
        for unit in units
    )


class Publisher:
    """Calls the owner's `Compute`, broadcasts its results, and applies them when needed."""

    def __init__(
        self,
        plan: OwnershipPlan,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        arena: Arena,
        meter: Meter,
        units: Sequence[Unit],
        buckets: Sequence[PublishBucket],
        payload_dtype: Callable[[str], torch.dtype],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._transport = transport
        self._meter = meter
        self._units = units
        self._payload_dtype = payload_dtype
        self._reduce_dtype = reduce_dtype
        self._device = parameters[0].device
        self._live: dict[int, _LiveUnit] = {}
        self._buckets: list[_LiveBucket] = []
        self._pending: set[int] = set()
        self._make_wires(buckets, arena)
        # Where each owned matrix collects its gradient.
        self.gradient_of: dict[int, Tensor] = {
            i: live.gradients[k]
            for live in self._live.values()
            if live.gradients is not None
            for k, i in enumerate(live.unit.matrices)
        }
        self._stamp = [p.data_ptr() for p in parameters]

    def _unit_dtype(self, unit: Unit) -> str:
        return self._plan.specs.matrices[unit.matrices[0]].dtype

    def _make_wires(self, buckets: Sequence[PublishBucket], arena: Arena) -> None:
        carver = arena.carve()
        for bucket in buckets:
            begin = carver.offset
            units = [self._units[u] for u in bucket.units]
            payloads = [
                carver.take(u.numel, self._payload_dtype(self._unit_dtype(u))) for u in units
            ]
            tail = carver.take(sum(len(u.matrices) for u in units), torch.float32)
            wire = arena.slice(begin, carver.offset)
            self._buckets.append(_LiveBucket(bucket, wire, tail, torch.zeros_like(tail)))
            parts = tail.split([len(u.matrices) for u in units])
            for number, unit, payload, rms in zip(
                bucket.units, units, payloads, parts, strict=True
            ):
                self._live[number] = self._live_unit(unit, payload, rms)

    def _live_unit(self, unit: Unit, payload: Tensor, rms: Tensor) -> _LiveUnit:
        stacked = payload.view(len(unit.matrices), unit.rows, unit.cols)
        matrices = [self._plan.specs.matrices[i] for i in unit.matrices]
        targets = [m.view(self._parameters[m.parameter].detach()) for m in matrices]
        views = [stacked[i].view(t.shape) for i, t in enumerate(targets)]
        gradients = None
        if unit.owner == self._transport.rank:
            dtype = self._reduce_dtype or self._parameters[matrices[0].parameter].dtype
            gradients = torch.zeros_like(stacked, dtype=dtype)
        parameter_of = [m.parameter for m in matrices]
        stamp = self._unit_stamp(parameter_of)
        return _LiveUnit(unit, parameter_of, targets, stacked, views, rms, gradients, stamp)

    # ---- where parameters are stored -----------------------------------------------------

    def _unit_stamp(self, parameter_of: list[int]) -> list[int]:
        return [self._parameters[p].data_ptr() for p in parameter_of]

    def _follow(self, live: _LiveUnit) -> None:
        """Someone may have assigned ``p.data``: write to where the parameter is stored now."""
        stamp = self._unit_stamp(live.parameter_of)
        if stamp != live.stamp:
            live.stamp = stamp
            live.targets = [
                self._plan.specs.matrices[i].view(self._parameters[p].detach())
                for i, p in zip(live.unit.matrices, live.parameter_of, strict=True)
            ]

    def check_storage(self) -> None:
        """Raise OwnershipError if a parameter has another shape, dtype or device than planned."""
        stamp = [p.data_ptr() for p in self._parameters]
        if stamp == self._stamp:
            return
        for p, spec in zip(self._parameters, self._plan.specs.parameters, strict=True):
            planned = (spec.shape, spec.dtype, self._device)
            if (tuple(p.shape), dtype_name(p.dtype), p.device) != planned:
                raise OwnershipError(
                    f"parameter {spec.name!r} is now {list(p.shape)} {p.dtype} on {p.device}; it "
                    f"was planned as {list(spec.shape)} {spec.dtype} on {self._device}. Move or "
                    "convert the model before dmuon.dedicate_params(model)"
                )
        self._stamp = stamp

    # ---- a step --------------------------------------------------------------------------

    def launch(self, present: Sequence[bool], compute: Compute, apply: Apply) -> None:
        """Compute what is owned here and launch every broadcast, in the buckets' order.

        ``present`` says which parameters have a gradient on any rank; it is the same on every
        rank, so all leave the same buckets out.
        """
        for b, live in enumerate(self._buckets):
            units = [self._live[u] for u in live.bucket.units]
            positions = [[k for k, p in enumerate(u.parameter_of) if present[p]] for u in units]
            if not any(positions):
                live.seen_rms.zero_()
                continue
            if live.bucket.owner == self._transport.rank:
                live.tail.zero_()
                _compute_units(units, positions, compute)
            self._meter.add("updates", live.wire)
            live.work = self._transport.broadcast(live.wire, live.bucket.owner, tag="updates")
            live.apply, live.positions = apply, positions
            self._pending.add(b)

    def wait_for(self, buckets: Iterable[int]) -> None:
        """Wait for these buckets, if they are pending, and apply them."""
        if not self._pending:
            return
        for b in sorted(self._pending.intersection(buckets)):
            live = self._buckets[b]
            assert live.work is not None and live.apply is not None and live.positions is not None
            live.work.wait()
            for u, where in zip(live.bucket.units, live.positions, strict=True):
                if where:
                    self._follow(self._live[u])
                    _apply_unit(self._live[u], where, live.apply)
            live.seen_rms.copy_(live.tail)
            live.work = live.apply = live.positions = None
            self._pending.discard(b)

    def wait_for_parameters(self, parameters: Set[int]) -> None:
        """Wait for the pending updates of these parameters, given by their ids."""
        needed = []
        for b in self._pending:
            live = self._buckets[b]
            assert live.positions is not None
            for u, where in zip(live.bucket.units, live.positions, strict=True):
                touched = (self._live[u].parameter_of[k] for k in where)
                if any(id(self._parameters[p]) in parameters for p in touched):
                    needed.append(b)
                    break
        self.wait_for(needed)

    def synchronize(self) -> None:
        """Wait for all of them."""
        self.wait_for(range(len(self._buckets)))

    # ---- reading -------------------------------------------------------------------------

    def buckets_by_parameter(self) -> dict[int, set[int]]:
        """``id(parameter)`` -> the buckets that publish a part of it."""
        found: dict[int, set[int]] = {}
        for b, live in enumerate(self._buckets):
            for u in live.bucket.units:
                for p in self._live[u].parameter_of:
                    found.setdefault(id(self._parameters[p]), set()).add(b)
        return found

    def unit_gradients(self, unit: Unit) -> Tensor:
        """The stacked gradients of a unit that is owned here, ``[b, m, n]``."""
        gradients = self._live[self._units.index(unit)].gradients
        assert gradients is not None, f"rank {self._transport.rank} does not own {unit}"
        return gradients

    def owned_gradients(self, present: Sequence[bool]) -> list[Tensor]:
        """Gradients collected here, of the parameters that have one."""
        matrices = self._plan.specs.matrices
        return [g for i, g in self.gradient_of.items() if present[matrices[i].parameter]]

    def published(self) -> dict[str, Tensor]:
        """What was last received for each matrix, ``[m, n]``; overwritten by the next backward."""
        return {
            self._plan.specs.matrices[i].name: live.payload[k]
            for live in self._live.values()
            for k, i in enumerate(live.unit.matrices)
        }

    def update_rms(self) -> dict[str, Tensor]:
        """RMS of each matrix's update in the last step, by name: device scalars."""
        found: dict[str, Tensor] = {}
        for live in self._buckets:
            members = [i for u in live.bucket.units for i in self._units[u].matrices]
            names = [self._plan.specs.matrices[i].name for i in members]
            found.update(zip(names, live.seen_rms.unbind(), strict=True))
        return found


def _compute_units(
    units: Sequence[_LiveUnit], positions: Sequence[list[int]], compute: Compute
) -> None:
    members = [(live, where) for live, where in zip(units, positions, strict=True) if where]
    jobs = []
    for live, where in members:
        assert live.gradients is not None
        jobs.append(Job(live.unit, rows_of(live.gradients, where), where))

    def done(number: int, payload: Tensor, rms: Tensor) -> None:
        live, where = members[number]
        set_rows(live.payload, where, payload)
        set_rows(live.rms, where, rms)

    compute(jobs, done)


def _apply_unit(live: _LiveUnit, where: list[int], apply: Apply) -> None:
    targets, views = live.targets, live.payload_views
    if len(where) != len(targets):
        targets, views = [targets[k] for k in where], [views[k] for k in where]
    apply(live.unit, where, targets, views)
