"""What lies with owners, in the form in which it is saved: rows on all ranks.

A checkpoint knows a parameter by its name and its whole shape, whoever owns its matrices. So what
owners keep becomes a `DTensor`, which torch's distributed checkpoint saves, loads and reshards::

    owner of a.weight    rows 0 .. 7 ---all-to-all---> rank 0: rows 0-1, rank 1: rows 2-3, ...

and what was loaded goes back the same way. Where there is one rank it stays a plain tensor, and a
plain tensor that is loaded is whole on every rank: each takes out of it what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dmuon.comm.transport import Transport
from dmuon.dtensors import local_rows, sharded_rows, whole_tensor
from dmuon.scheduler.specs import Box

# What is kept of a parameter: number of the piece, the rank that keeps it, its box. Equal on all
# ranks. A rank has its own tensors by these numbers.
Places = Sequence[tuple[int, int, Box]]


class RowShards:
    """Spreads tensors over the ranks of a transport, and collects them; collective calls."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._mesh = transport.mesh(device)

    def spread(
        self, shape: tuple[int, ...], dtype: torch.dtype, places: Places, mine: Mapping[int, Tensor]
    ) -> Tensor:
        """The whole tensor, of which ``places`` keep every element once."""
        rows, rank = self._rows(shape), self._transport.rank
        local = torch.empty(rows[rank][2].shape, dtype=dtype, device=self._device)
        self._move(places, mine, rows, {rank: local}, dtype)
        return local if self._mesh is None else sharded_rows(local, self._mesh, shape)

    def collect(self, value: Tensor, places: Places, mine: Mapping[int, Tensor]) -> None:
        """Write what each of ``places`` keeps of a tensor there, from whatever form it has."""
        local, rank = local_rows(value, self._mesh), self._transport.rank
        if local is not None:
            self._move(self._rows(tuple(value.shape)), {rank: local}, places, mine, local.dtype)
            return
        whole = whole_tensor(value)
        for i, r, box in places:
            if r == rank and box.numel:
                mine[i].copy_(whole[box.slices()])

    def _rows(self, shape: tuple[int, ...]) -> list[tuple[int, int, Box]]:
        """Even rows, as torch cuts them: the last ranks may have fewer, or none."""
        world, rest = self._transport.world, shape[1:]
        step = math.ceil(shape[0] / world)
        starts = [min(r * step, shape[0]) for r in range(world + 1)]
        return [
            (r, r, Box((a, *(0 for _ in rest)), (b - a, *rest)))
            for r, (a, b) in enumerate(pairwise(starts))
        ]

    def _move(
        self,
        places: Places,
        mine: Mapping[int, Tensor],
        targets: Places,
        into: Mapping[int, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Copy what lies at ``places``, ``mine`` here, to ``targets``, ``into`` here."""
        rank, world = self._transport.rank, self._transport.world
        sends: list[tuple[int, Tensor]] = []  # by peer, then in the order of targets and of places
        lands: list[tuple[int, Tensor]] = []
        here = [(box, mine[i]) for i, r, box in places if r == rank and box.numel]
        for i, peer, box in targets:
            shared = ((b.intersection(box).within(b), tensor) for b, tensor in here)
            sends += [(peer, tensor[b.slices()]) for b, tensor in shared if b.numel]
            if peer == rank:
                parts = ((r, box.intersection(b).within(box)) for _, r, b in places)
                lands += [(r, into[i][b.slices()]) for r, b in parts if b.numel]
        sends.sort(key=lambda pair: pair[0])
        lands.sort(key=lambda pair: pair[0])
        out, back = ([0] * world for _ in range(2))
        for splits, views in ((out, sends), (back, lands)):
            for peer, view in views:
                splits[peer] += view.numel()
        source = torch.empty(sum(out), dtype=dtype, device=self._device)
        landed = torch.empty(sum(back), dtype=dtype, device=self._device)
        for flat, (_, view) in zip(source.split([v.numel() for _, v in sends]), sends):
            flat.view(view.shape).copy_(view)
        self._transport.all_to_all(landed, source, back, out, tag="saved state").wait()
        for flat, (_, view) in zip(landed.split([v.numel() for _, v in lands]), lands):
            view.copy_(flat.view(view.shape))
