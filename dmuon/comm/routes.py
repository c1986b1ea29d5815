"""Routes, from a plan to the contents of each message: pure data, equal on every rank.

A route says what each rank sends and receives for a bucket of units (`scheduler.plan.Unit`)::

    gather     holders of the owner's replica ---pieces---> owner          (all-to-all)
    scatter    owner ---pieces of the update---> the same holders          (all-to-all, mirrored)
    replicate  each holder ---its piece---> ranks with equal shards        (all-gather, HSDP only)

Matrices that every rank holds whole (the `replicated` layout) need only one phase::

    publish    owner ---its updates---> everyone                           (all-gather)

If several ranks of a node need the same data, an all-gather takes two turns, so that data crosses
to a node once: first among the ranks of a column, one per node, then inside nodes. If a matrix has
copies, each owner sends only to its audience, in the same phases.

The parts of a message are in the order of the bucket's units and of the matrices in a unit, so that
sender and receiver need no header.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, compress, groupby, pairwise
from operator import itemgetter, not_

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.comm.transport import Transport
from dmuon.dtensors import local_box, local_rows, sharded_rows, whole_tensor
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.specs import Box, Form
from dmuon.scheduler.topology import Topology

Ranks = tuple[int, ...]
Units = Sequence[Unit]


@dataclass(frozen=True, slots=True)
class Part:
    """The same box of several matrices, consecutive in a flat buffer from ``start`` on."""

    unit: int
    position: int  # of its first matrix in the unit, where all are neighbours
    matrices: tuple[int, ...]
    box: Box
    whole: tuple[int, ...]  # the shape of each matrix in its parameter's dims
    form: Form  # how such a shape is read as rows and columns
    transposed: bool  # whether its slot in the unit's stack holds the transpose
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all its boxes, stacked."""
        return len(self.matrices), *self.box.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, buffer: Tensor) -> Tensor:
        """Return the part's view of its flat buffer."""
        return buffer.narrow(0, self.start, self.numel).view(self.shape)


def places(stack: Tensor, part: Part) -> Tensor:
    """Return the part's view, of ``part.shape``, of its unit's stack ``[b, rows, cols]``."""
    slots = stack[part.position : part.position + len(part.matrices)]
    if part.transposed:
        slots = slots.mT
    whole = part.whole
    if part.form.is_stack:
        slots = slots.mT if part.form.is_in_out else slots
        slots = slots[(slice(None),) + (None,) * (len(whole) - 2)]
    elif part.form is Form.FLAT_IN_OUT:
        slots = slots.unflatten(2, (whole[0], *whole[2:])).transpose(1, 2)
    elif len(whole) > 2:
        slots = slots.unflatten(2, whole[1:])
    index = (slice(None), *part.box.slices())
    return slots if part.box.shape == whole else slots[index]


@dataclass(frozen=True, slots=True)
class Message:
    """Parts in the order of the buffer, and how many elements each rank sends or receives."""

    parts: tuple[Part, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)

    @property
    def matrices(self) -> list[int]:
        return [i for part in self.parts for i in part.matrices]


@dataclass(frozen=True, slots=True)
class Replication:
    """An all-gather that gives each of some ranks with equal shards the updates that came to any of
    them. Its buffer holds the updates of all, by the rank that had them first, in the order of
    ``columns`` (`Topology.columns_of`). A rank whose own updates are all that came to it receives
    them there in the first place."""

    columns: tuple[Ranks, ...]
    others: Message  # the other ranks' updates; ``splits`` count all ranks', in the same order
    copies: tuple[tuple[int, int, int], ...]  # of this rank's updates: see `_runs`
    is_all: bool  # whether its own are all that came, in the same order; then nothing is copied


@dataclass(frozen=True, slots=True)
class BucketRoute:
    """One rank's view of a bucket. If all ranks hold the bucket whole, ``held`` and ``owned`` both
    are this rank's matrices, and nothing is copied."""

    units: tuple[int, ...]  # owned by this rank
    held: Message  # its pieces by owner: sent in the gather; their updates come in the scatter
    owned: Message  # all pieces of the matrices that it owns, by holder
    updates: Message  # as they arrive: like ``held``, or by owner, in the order of ``columns``
    replications: tuple[Replication, ...]  # by ranks, in the same order everywhere
    columns: tuple[Ranks, ...]  # of the ranks, if all of them hold the bucket whole


# (position in the unit, matrix, its shape, whether its slot is transposed, box in the matrix).
MatrixPart = tuple[int, int, tuple[int, ...], bool, Box]


def parts_of(
    shards: ShardMap, unit: int, pieces: Iterable[MatrixPart], start: int = 0
) -> list[Part]:
    """Return parts of a buffer from element ``start`` on; neighbours with equal boxes merge."""

    def kind(numbered: tuple[int, MatrixPart]) -> tuple[int, Box, tuple[int, ...], Form, bool]:
        n, (position, i, shape, transposed, box) = numbered
        return position - n, box, shape, shards.specs.matrices[i].form, transposed

    parts: list[Part] = []
    for (_, box, whole, form, turned), members in groupby(enumerate(pieces), kind):
        positions, matrices, *_ = zip(*(piece for _, piece in members))
        parts.append(Part(unit, positions[0], matrices, box, whole, form, turned, start))
        start += parts[-1].numel
    return parts


# (the peer that sends or receives it, unit, part), in the order of units for each peer.
_Pieces = list[tuple[int, int, MatrixPart]]


def units_for(units: Units, shards: ShardMap, topology: Topology, rank: int) -> tuple[Unit, ...]:
    """Return units as ``rank`` sees them: of a unit with copies, the one that serves the rank."""
    found = []
    for unit in units:
        if unit.copies:
            served = shards.audiences(unit.matrices[0], unit.copies, topology)
            n = next((n for n, ranks in enumerate(served) if rank in ranks), 0)
            unit = replace(unit, owner=unit.copies[n], audience=served[n])
        found.append(unit)
    return tuple(found)


def _message(shards: ShardMap, pieces: _Pieces) -> Message:
    parts: list[Part] = []
    splits = [0] * shards.world
    for (peer, unit), members in groupby(sorted(pieces, key=itemgetter(0)), itemgetter(0, 1)):
        found = [piece for _, _, piece in members]
        parts += parts_of(shards, unit, found, sum(splits))
        splits[peer] += sum(box.numel for *_, box in found)
    return Message(tuple(parts), tuple(splits))


def _contents(
    shards: ShardMap, unit: Unit, position: int, rank: int, order: Ranks
) -> Iterator[tuple[str, int, MatrixPart]]:
    """Yield (message of `BucketRoute`, peer, its part) of a matrix: pieces, or, if every rank holds
    it whole, the matrix for the ranks of ``order``."""
    i, part = unit.matrices[position], partial(_part_at, shards, unit, position)
    if order:
        yield "updates", order.index(unit.owner), part(rank)
        if unit.owner == rank:
            yield "held", rank, part(rank)
        return
    replica = shards.replica_of(i, unit.owner)
    for holder in shards.pieces(i) if unit.owner == rank else ():
        if shards.replica_of(i, holder) == replica:
            yield "owned", holder, part(holder)
    if shards.replica_of(i, rank) == replica and shards.piece(i, rank).numel:
        yield "held", unit.owner, part(rank)


def _part_at(shards: ShardMap, unit: Unit, position: int, rank: int) -> MatrixPart:
    """Return everything that a rank holds of a matrix."""
    i = unit.matrices[position]
    box, turned = shards.piece(i, rank), unit.holds_transpose(position)
    return position, i, shards.boxes[i].shape, turned, box


def _replicated(
    shards: ShardMap, unit: Unit, position: int, rank: int
) -> Iterator[tuple[Ranks, int, MatrixPart]]:
    """Yield (ranks with equal shards, the rank that the update comes to first, its part)."""
    i = unit.matrices[position]
    if shards.is_replicated(i) and shards.piece(i, rank).numel:
        replica, ranks = shards.replica_of(i, unit.owner), shards.partners(i, rank)
        if unit.audience:
            ranks = tuple(r for r in ranks if r in unit.audience)
        source = next(r for r in ranks if shards.replica_of(i, r) == replica)
        if len(ranks) > 1:
            yield ranks, source, _part_at(shards, unit, position, rank)


def bucket_route(
    shards: ShardMap, topology: Topology, units: Units, bucket: Sequence[int], rank: int,
    *, is_whole: bool = False,
) -> BucketRoute:  # fmt: skip
    """Return the messages of ``rank`` for a bucket of units from `units_for`. ``is_whole``: ranks
    hold all matrices whole, even a rank alone."""
    within = (i for u in bucket for i in units[u].matrices)
    columns: tuple[Ranks, ...] = ()
    if is_whole or all(map(shards.is_everywhere, within)):
        columns = topology.columns_of(units[bucket[0]].audience or range(shards.world))
    order = tuple(chain(*columns))
    contents: dict[str, _Pieces] = defaultdict(list)
    replicated: dict[Ranks, _Pieces] = defaultdict(list)
    # Replicated pieces are in the order of ``updates``: by owner, then by unit.
    for u in sorted(bucket, key=lambda u: units[u].owner):
        for position in () if order else range(len(units[u].matrices)):
            for ranks, source, part in _replicated(shards, units[u], position, rank):
                replicated[ranks].append((source, u, part))
    for u in bucket:
        for position in range(len(units[u].matrices)):
            for name, peer, part in _contents(shards, units[u], position, rank, order):
                contents[name].append((peer, u, part))
    held = _message(shards, contents["held"])
    updates = _message(shards, contents["updates"]) if order else held
    return BucketRoute(
        units=tuple(u for u in bucket if units[u].owner == rank),
        held=held,
        owned=held if order else _message(shards, contents["owned"]),
        updates=updates,
        replications=tuple(
            _replication(shards, topology.columns_of(ranks), pieces, rank, updates)
            for ranks, pieces in sorted(replicated.items())
        ),
        columns=columns,
    )


def _replication(
    shards: ShardMap, columns: tuple[Ranks, ...], pieces: _Pieces, rank: int, updates: Message
) -> Replication:
    order = tuple(chain(*columns))
    at = {r: n for n, r in enumerate(order)}
    every = _message(shards, [(at[source], u, part) for source, u, part in pieces])
    alone = _message(shards, [piece for piece in pieces if piece[0] == rank])
    start = sum(every.splits[: at[rank]])
    is_own = [start <= part.start < start + alone.numel for part in every.parts]
    own = Message(tuple(compress(every.parts, is_own)), alone.splits)
    others = Message(tuple(compress(every.parts, map(not_, is_own))), every.splits)
    is_all = alone.parts == updates.parts
    copies = () if is_all else _runs(own, updates)
    return Replication(columns, others, copies, is_all)


def _runs(own: Message, updates: Message) -> tuple[tuple[int, int, int], ...]:
    """Return (start in a buffer of ``updates``, start in a buffer of ``own``, elements) for all
    matrices of ``own``. Neighbours in both buffers form one run."""
    at = {i: p.start + n * p.box.numel for p in updates.parts for n, i in enumerate(p.matrices)}
    found: list[tuple[int, int, int]] = []
    for part in own.parts:
        for n, i in enumerate(part.matrices):
            to, start, numel = at[i], part.start + n * part.box.numel, part.box.numel
            if found and found[-1][:2] == (to - found[-1][2], start - found[-1][2]):
                to, start, numel = *found[-1][:2], numel + found.pop()[2]
            found.append((to, start, numel))
    return tuple(found)


def turns_of(
    columns: Sequence[Ranks], splits: Sequence[int], rank: int
) -> list[tuple[Ranks, list[tuple[int, int]]]]:
    """Return the all-gathers, (ranks, (start, numel) of each rank's share), that bring shares of
    ``splits`` elements, consecutive in the order of `Topology.columns_of`, to all ranks."""
    ends = [0, *accumulate(splits)]
    edges = [0, *accumulate(map(len, columns))]
    k = next(k for k, column in enumerate(columns) if rank in column)
    near = tuple(column[columns[k].index(rank)] for column in columns)
    own = [(ends[n], ends[n + 1]) for n in range(edges[k], edges[k + 1])]
    whole = [(ends[a], ends[b]) for a, b in pairwise(edges)]
    found = []
    for ranks, parts in ((columns[k], own), (near, whole)):
        placed = sorted(zip(ranks, parts, strict=True))
        sizes = [(start, end - start) for _, (start, end) in placed]
        found.append((tuple(r for r, _ in placed), sizes))
    return found


# ---- saved state -----------------------------------------------------------------------------

# (number, rank, box): which rank keeps which box of a parameter. Its tensors are by number.
Keepers = Sequence[tuple[int, int, Box]]
Kept = Mapping[int, Tensor]


@dataclass(eq=False)
class RowShards:
    """Moves owners' state into the form in which it is saved, and back; collective calls.

    A parameter becomes a `DTensor` of even rows on all ranks, which torch saves and reshards::

        owner of a.weight    rows 0 .. 7 ---all-to-all---> rank 0: rows 0-1, rank 1: rows 2-3, ...

    With one rank the result is a plain tensor. A loaded plain tensor is whole on every rank.
    """

    _transport: Transport
    device: torch.device

    @cached_property
    def _mesh(self) -> DeviceMesh | None:
        return self._transport.mesh(self.device)

    def spread(
        self, shape: tuple[int, ...], dtype: torch.dtype, keepers: Keepers, mine: Kept
    ) -> Tensor:
        """Return the whole tensor from ``keepers``, which keep every element once."""
        rows, rank = self._rows(shape), self._transport.rank
        local = torch.empty(rows[rank][2].shape, dtype=dtype, device=self.device)
        self._move(keepers, mine, rows, {rank: local}, dtype)
        return local if self._mesh is None else sharded_rows(local, self._mesh, shape)

    def collect(self, value: Tensor, keepers: Keepers, mine: Kept) -> None:
        """Write to each of ``keepers`` its box of ``value``, which may have any form."""
        local, rank = local_rows(value, self._mesh), self._transport.rank
        if local is not None:
            self._move(self._rows(tuple(value.shape)), {rank: local}, keepers, mine, local.dtype)
            return
        whole = whole_tensor(value)
        for i, r, box in keepers:
            if r == rank and box.numel:
                mine[i].copy_(whole[box.slices()])

    def _rows(self, shape: tuple[int, ...]) -> list[tuple[int, int, Box]]:
        """Cut into even rows as torch does: the last ranks may have fewer rows, or none."""
        world = self._transport.world
        return [(r, r, local_box("", shape, [world], [r], [(0, 1)])) for r in range(world)]

    def _move(
        self, keepers: Keepers, mine: Kept, targets: Keepers, into: Kept, dtype: torch.dtype
    ) -> None:
        """Copy tensors from ``keepers`` (local ones in ``mine``) to ``targets`` (in ``into``)."""
        rank, world = self._transport.rank, self._transport.world
        # Views by peer, ordered by targets, then by keepers.
        sent: list[list[Tensor]] = [[] for _ in range(world)]
        received: list[list[Tensor]] = [[] for _ in range(world)]
        for i, receiver, target in targets:
            for j, sender, box in keepers:
                if rank not in (sender, receiver):
                    continue
                shared = box.intersection(target)
                if shared.numel and sender == rank:
                    sent[receiver].append(mine[j][shared.within(box).slices()])
                if shared.numel and receiver == rank:
                    received[sender].append(into[i][shared.within(target).slices()])
        out, back = ([sum(v.numel() for v in views) for views in each] for each in (sent, received))
        arrived = torch.empty(sum(back), dtype=dtype, device=self.device)
        flats = (view.reshape(-1).to(arrived) for view in chain.from_iterable(sent))
        source = torch.cat([arrived[:0], *flats])
        self._transport.all_to_all(arrived, source, back, out, tag="saved state").wait()
        views = [*chain.from_iterable(received)]
        for flat, view in zip(arrived.split([v.numel() for v in views]), views):
            view.copy_(flat.view(view.shape))
