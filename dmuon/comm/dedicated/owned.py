"""The gradients and weights of the matrices that are owned at this place of the grid.

An owner stacks the gradients of a unit as ``[batch, rows, cols]``. Under tensor parallelism they
arrive in slices, one at each rank that shares the owner's data coordinates; these send theirs to
the owner before Newton-Schulz, and get their part of the update after it::

    tensor 0 (owner)   stack  <--slice-- tensor 1        stack --update's slice--> tensor 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dmuon.comm.dedicated.routes import Part, Slices
from dmuon.comm.layout import Apply, Compute, Job, rows_of, set_rows
from dmuon.comm.routes import Unit
from dmuon.comm.transport import Meter, Transport
from dmuon.comm.windows import LivePack
from dmuon.scheduler.shards import Form, matrix_box

__all__ = ["OwnedUnits"]


class OwnedUnits:
    """``weight_of(matrix)`` is this rank's part of a weight, as a flat view of what is kept.

    ``transport`` connects the ranks that differ in their tensor coordinate only.
    """

    def __init__(
        self,
        slices: Slices,
        units: Sequence[Unit],
        rank: int,
        transport: Transport,
        meter: Meter,
        weight_of: Callable[[int], Tensor],
        payload_dtype: Callable[[str], torch.dtype],
        reduce_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._slices = slices
        self._specs = slices.plan.specs
        self._rank = rank
        self._transport = transport
        self._meter = meter
        self._payload_dtype = payload_dtype
        self._reduce_dtype = reduce_dtype
        self._device = device
        place = slices.grid.place(rank)
        self._replica, self._shard, self._tensor = place
        self.mine = [u for u in units if u.owner == rank]
        # Owned by a rank of this transport: their slices are kept here.
        self.near = [u for u in units if slices.owner_place(u.matrices[0])[:2] == place[:2]]
        self._weight_of = weight_of
        self.gradients: dict[Unit, Tensor] = {}
        self._payload: dict[Unit, Tensor] = {}
        # Where each matrix collects its gradient here: in the parameter's dims.
        self._targets: dict[int, Tensor] = {}
        self._parts = {i: slices.part(i, self._tensor) for u in self.near for i in u.matrices}
        self._stacked: dict[int, tuple[Unit, int]] = {}
        for unit in self.mine:
            self._make_stack(unit)
        for unit in self.near:
            for i in unit.matrices:
                if unit.owner != rank and slices.is_cut(i):
                    box = self._parts[i].box
                    self._targets[i] = torch.zeros(
                        box.shape, dtype=self._grad_dtype(i), device=device
                    )
        self._rms = {unit: torch.zeros(len(unit.matrices), device=device) for unit in self.mine}
        # Views of what is kept, which never moves.
        self._weights = {
            unit: [self._weight(i) for i in unit.matrices]
            for unit in self.mine
            if not any(slices.is_cut(i) for i in unit.matrices)
        }

    def _grad_dtype(self, matrix: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._specs.matrices[matrix].dtype)
        return self._reduce_dtype or dtype

    def _make_stack(self, unit: Unit) -> None:
        shape = (len(unit.matrices), unit.rows, unit.cols)
        dtype = self._grad_dtype(unit.matrices[0])
        stack = torch.zeros(shape, dtype=dtype, device=self._device)
        self.gradients[unit] = stack
        for k, i in enumerate(unit.matrices):
            self._stacked[i] = (unit, k)
            self._targets[i] = self._region(stack[k], i, self._parts[i])

    def _region(self, matrix: Tensor, i: int, part: Part) -> Tensor:
        """The elements of ``part`` in a whole matrix ``[rows, cols]``, in the parameter's dims."""
        spec = self._specs.matrices[i]
        box = matrix_box(spec, self._specs.parameters[spec.parameter].shape)
        shape = box.box.shape
        if box.form is Form.TRANSPOSED:
            whole = matrix.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        else:
            whole = matrix.view(shape)
        return whole[part.box.slices()]

    # ---- gradients -----------------------------------------------------------------------

    def deliver(self, packs: list[LivePack], first: bool) -> None:
        """Add the gradients that arrived here to where they are collected."""
        destinations, sources = [], []
        for live in packs:
            if live.deliveries is None:
                live.deliveries = self._deliveries(live)
            for destination, source in live.deliveries:
                destinations.append(destination)
                sources.append(source)
        if destinations and first:
            torch._foreach_copy_(destinations, sources)
        elif destinations:
            torch._foreach_add_(destinations, sources)

    def _deliveries(self, live: LivePack) -> list[tuple[Tensor, Tensor]]:
        found = []
        for span, view in zip(live.pack.spans, live.views, strict=True):
            offset = 0
            for i in span.matrices:
                part = self._parts.get(i) or self._slices.part(i, self._tensor)
                if i in self._targets:
                    source = view.narrow(0, offset, part.numel).view(part.box.shape)
                    found.append((self._targets[i], source))
                offset += part.numel
        return found

    def stored(self, present: Sequence[bool]) -> list[Tensor]:
        """Every gradient collected here of the parameters that have one: stacks and slices."""
        slices = [g for i, g in self._targets.items() if i not in self._stacked]
        return self.owned(present) + slices

    def owned(self, present: Sequence[bool]) -> list[Tensor]:
        """The gradients of the matrices owned here that have one."""
        return [
            self.gradients[unit][k]
            for i, (unit, k) in self._stacked.items()
            if present[self._specs.matrices[i].parameter]
        ]

    def gather(self) -> None:
        """Slices to their owners; a collective call along tensors."""
        by_dtype: dict[torch.dtype, list[tuple[Unit, int]]] = defaultdict(list)
        for unit in self.near:
            for i in unit.matrices:
                if self._slices.is_cut(i):
                    by_dtype[self._grad_dtype(i)].append((unit, i))
        for dtype, members in by_dtype.items():
            out, into = self._messages(members)
            source = self._flat(out, dtype)
            self._copy(out, source, pack=True)
            target = self._flat(into, dtype)
            self._exchange(target, source, into, out, "slices")
            self._copy(into, target, pack=False)

    _Message = list[list[tuple[int, Tensor]]]  # by peer: (matrix, where it is or goes)

    def _messages(self, members: Sequence[tuple[Unit, int]]) -> tuple[_Message, _Message]:
        """What goes to each peer, and what comes from it: views in the parameters' dims."""
        out: OwnedUnits._Message = [[] for _ in range(self._transport.world)]
        into: OwnedUnits._Message = [[] for _ in range(self._transport.world)]
        for unit, i in members:
            owner = self._slices.owner_place(i)[2]
            if owner == self._tensor:
                k = self._stacked[i][1]
                for peer in range(self._transport.world):
                    if peer != self._tensor:
                        part = self._slices.part(i, peer)
                        into[peer].append((i, self._region(self.gradients[unit][k], i, part)))
            else:
                out[owner].append((i, self._targets[i]))
        return out, into

    def _flat(self, message: _Message, dtype: torch.dtype) -> Tensor:
        numel = sum(t.numel() for peer in message for _, t in peer)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _copy(self, message: _Message, flat: Tensor, *, pack: bool) -> None:
        tensors = [t for peer in message for _, t in peer]
        views = [
            v.view(t.shape)
            for t, v in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True)
        ]
        if tensors:
            torch._foreach_copy_(views if pack else tensors, tensors if pack else views)

    def _exchange(
        self, target: Tensor, source: Tensor, into: _Message, out: _Message, tag: str
    ) -> None:
        self._meter.add(tag, source)
        self._transport.all_to_all(
            target,
            source,
            [sum(t.numel() for _, t in peer) for peer in into],
            [sum(t.numel() for _, t in peer) for peer in out],
            tag=tag,
        ).wait()

    # ---- updates -------------------------------------------------------------------------

    def weights(self, unit: Unit) -> list[Tensor]:
        """The weights of a unit that lie whole on this rank, ``[rows, ...]``."""
        return self._weights[unit]

    def _weight(self, i: int) -> Tensor:
        spec = self._specs.matrices[i]
        view = self._weight_of(i).view(self._parts[i].box.shape)
        return view.transpose(0, 1) if spec.transposed else view

    def where(self, unit: Unit, present: Sequence[bool]) -> list[int]:
        """The positions in a unit whose parameter has a gradient on any rank."""
        matrices = self._specs.matrices
        return [k for k, i in enumerate(unit.matrices) if present[matrices[i].parameter]]

    def compute(
        self, units: Sequence[Unit], present: Sequence[bool], compute: Compute, apply: Apply | None
    ) -> None:
        """The owner's part of a step for units that run together.

        Updates weights that lie whole on this rank at once; without ``apply`` the updates are kept
        for `scatter`.
        """
        jobs = []
        for unit in units:
            where = self.where(unit, present)
            if len(where) < len(unit.matrices):
                self._rms[unit].zero_()
            if where:
                jobs.append(Job(unit, rows_of(self.gradients[unit], where), where))

        def done(number: int, payload: Tensor, rms: Tensor) -> None:
            unit, where = jobs[number].unit, jobs[number].where
            set_rows(self._rms[unit], where, rms)
            if apply is None:
                self._payload[unit] = payload.clone()
            else:
                self._apply_whole(unit, where, payload, apply)

        if jobs:
            compute(jobs, done)

    def _apply_whole(self, unit: Unit, where: list[int], payload: Tensor, apply: Apply) -> None:
        weights = self._weights[unit]
        targets = weights if len(where) == len(weights) else [weights[k] for k in where]
        apply(
            unit, where, targets, [p.view(t.shape) for p, t in zip(payload, targets, strict=True)]
        )

    def scatter(self, present: Sequence[bool], apply: Apply) -> None:
        """Updates to the slices, and to whole copies on other tensor coordinates."""
        by_dtype: dict[torch.dtype, list[Unit]] = defaultdict(list)
        for unit in self.near:
            by_dtype[self._payload_dtype(self._specs.matrices[unit.matrices[0]].dtype)].append(unit)
        for dtype, units in by_dtype.items():
            out, into = self._update_messages(units, present, dtype)
            source = self._flat(out, dtype)
            self._copy(out, source, pack=True)
            target = self._flat(into, dtype)
            self._exchange(target, source, into, out, "updates")
            self._copy(into, target, pack=False)
            arrived = {i: t for peer in into for i, t in peer}
            for unit in units:
                self._apply_parts(unit, self.where(unit, present), arrived, apply)
        self._payload.clear()

    def _update_messages(
        self, units: Sequence[Unit], present: Sequence[bool], dtype: torch.dtype
    ) -> tuple[_Message, _Message]:
        out: OwnedUnits._Message = [[] for _ in range(self._transport.world)]
        into: OwnedUnits._Message = [[] for _ in range(self._transport.world)]
        for unit in units:
            owner = self._slices.owner_place(unit.matrices[0])[2]
            for position, k in enumerate(self.where(unit, present)):
                i = unit.matrices[k]
                if owner != self._tensor:
                    shape = self._parts[i].box.shape
                    into[owner].append((i, torch.empty(shape, dtype=dtype, device=self._device)))
                    continue
                update = self._payload[unit][position].to(dtype)
                for peer in range(self._transport.world):
                    part = self._slices.part(i, peer)
                    if peer != self._tensor and part.numel:
                        out[peer].append((i, self._region(update, i, part)))
        into = [[(i, t) for i, t in peer if t.numel()] for peer in into]
        return out, into

    def _apply_parts(
        self, unit: Unit, where: list[int], arrived: dict[int, Tensor], apply: Apply
    ) -> None:
        places, targets, updates = [], [], []
        for position, k in enumerate(where):
            i = unit.matrices[k]
            if not self._parts[i].numel:
                continue
            update = arrived.get(i)
            if update is None:  # owned here
                update = self._region(self._payload[unit][position], i, self._parts[i])
            places.append(k)
            targets.append(self._weight_of(i).view(self._parts[i].box.shape))
            updates.append(update)
        if targets:
            apply(unit, places, targets, updates)

    def update_rms(self) -> dict[str, Tensor]:
        """RMS of the last update of each matrix owned here, by name."""
        found: dict[str, Tensor] = {}
        for unit, rms in self._rms.items():
            names = [self._specs.matrices[i].name for i in unit.matrices]
            found.update(zip(names, rms.unbind(), strict=True))
        return found
