"""From a plan to what travels together: pure data, equal on every rank.

Routes say what every rank sends and receives of a bucket of units (`dmuon.scheduler.plan.Unit`)::

    gather     holders of the owner's replica ---pieces---> owner          (all-to-all)
    scatter    owner ---pieces of the update---> the same holders          (all-to-all, mirrored)
    replicate  each of these ---its piece---> the ranks with equal shards  (all-to-all, HSDP only)

What every rank holds whole (the `replicated` layout) needs one phase alone::

    publish    owner ---its updates---> everyone                           (a broadcast an owner)

Pieces follow each other in the order of the bucket's units and of the matrices in a unit, so sender
and receiver need no header.

A rank works on *blocks*: what it holds of a matrix. Where matrices have co-owners a block travels
in pieces, one to and from each co-owner whose slice it meets; `Cut` says where they lie in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add

from torch import Tensor

from dmuon.scheduler.plan import Unit
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.specs import Box, Form


@dataclass(frozen=True, slots=True)
class Part:
    """Equal pieces of matrices that follow each other in a unit, one behind the other in a buffer.

    The piece ``box`` of each of ``matrices``, which are at ``position`` and on in ``unit``. Such a
    matrix is ``whole`` in its parameter's dims, which read as rows and columns by ``form``;
    ``transposed``: its slot in the unit's stack holds the transpose. In the flat buffer the pieces
    begin at element ``start``.
    """

    unit: int
    position: int
    matrices: tuple[int, ...]
    box: Box
    whole: tuple[int, ...]
    form: Form
    transposed: bool
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the pieces together."""
        return len(self.matrices), *self.box.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, buffer: Tensor) -> Tensor:
        """The pieces in their flat buffer."""
        return buffer.narrow(0, self.start, self.numel).view(self.shape)


def places(stack: Tensor, part: Part) -> Tensor:
    """Where a part lies in its unit's stack ``[b, rows, cols]``: a view of ``part.shape``."""
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
    """Parts in the order of the buffer, and how many elements each rank sends or receives (of
    blocks: as if all went to the first)."""

    parts: tuple[Part, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where equal pieces lie in equal blocks that follow each other.

    The pieces ``shape`` begin at ``piece`` in their flat buffer, the blocks ``block_shape`` at
    ``block`` in theirs; in each block its piece is ``box``.
    """

    piece: int
    shape: tuple[int, ...]
    block: int
    block_shape: tuple[int, ...]
    box: Box

    def within(self, pieces: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the pieces and of their places in the blocks."""
        mine = pieces.narrow(0, self.piece, math.prod(self.shape)).view(self.shape)
        whole = blocks.narrow(0, self.block, math.prod(self.block_shape)).view(self.block_shape)
        index = (slice(None), *self.box.slices())
        return mine, whole[index]


@dataclass(frozen=True, slots=True)
class BucketRoute:
    """One rank's view of a bucket.

    ``held``: this rank's pieces, by owner; what it sends in the gather and receives in the
    scatter. ``owned``: all pieces of the matrices that it owns, by holder. ``copies_out`` and
    ``copies_in``: its blocks of updates, by the rank that they go to or come from, along the axes
    that replicate. ``replicates`` is the same on every rank: whether anyone copies.

    ``published``: of a bucket that every rank holds whole, the updates by owner; None for others.
    ``held`` and ``owned`` are then what is owned here, and nothing is copied.

    ``blocks`` are those that are sent, ``landing`` those whose updates come. Where pieces are not
    blocks, because there are co-owners, ``cuts`` and ``joins`` say where they lie in them.
    """

    units: tuple[int, ...]  # owned here
    held: Message
    owned: Message
    copies_out: Message
    copies_in: Message
    replicates: bool
    blocks: Message
    landing: Message
    cuts: tuple[Cut, ...] = ()
    joins: tuple[Cut, ...] = ()
    published: Message | None = None

    @property
    def came(self) -> Message:
        """What updates come in."""
        return self.held if self.published is None else self.published


# A piece of a matrix: (position in its unit, matrix, its shape there, whether its slot holds the
# transpose, box in it).
Piece = tuple[int, int, tuple[int, ...], bool, Box]


def slice_of(shards: ShardMap, unit: Unit, position: int) -> Box:
    """What a unit has of a matrix, counted from the matrix's corner in its parameter's dims: all of
    it, or a co-owner's slice of the longer dim."""
    whole = shards.boxes[unit.matrices[position]]
    box = Box.at_origin(whole.box.shape)
    if not unit.co_owners:
        return box
    long = whole.form.dims(len(box.shape))[0 if unit.holds_transpose(position) else 1]
    return Box(
        tuple(unit.start if dim == long else 0 for dim in range(len(box.shape))),
        tuple(unit.cols if dim == long else size for dim, size in enumerate(box.shape)),
    )


def parts_of(shards: ShardMap, unit: int, pieces: Iterable[Piece], start: int = 0) -> list[Part]:
    """Pieces, equal ones joined, in a buffer from element ``start`` on."""
    parts: list[Part] = []
    for position, i, shape, transposed, box in pieces:
        kind = (box, shape, shards.boxes[i].form, transposed)
        last = parts[-1] if parts else None
        if (
            last is not None
            and position == last.position + len(last.matrices)
            and kind == (last.box, last.whole, last.form, last.transposed)
        ):
            parts[-1] = replace(last, matrices=(*last.matrices, i))
        else:
            parts.append(Part(unit, position, (i,), *kind, start))
        start += box.numel
    return parts


class _Pieces:
    """Collects the pieces for each peer, and lays them out one peer behind the other."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards
        # By peer and unit.
        self._pieces: dict[int, dict[int, list[Piece]]] = defaultdict(lambda: defaultdict(list))

    def add(self, peer: int, unit: int, piece: Piece) -> None:
        self._pieces[peer][unit].append(piece)

    def message(self) -> Message:
        parts: list[Part] = []
        splits = [0] * self._shards.world
        for peer in sorted(self._pieces):
            for unit, pieces in self._pieces[peer].items():
                parts += parts_of(self._shards, unit, pieces, sum(splits))
                splits[peer] += sum(box.numel for *_, box in pieces)
        return Message(tuple(parts), tuple(splits))


def bucket_route(
    shards: ShardMap, units: Sequence[Unit], bucket: Sequence[int], rank: int
) -> BucketRoute:
    """What ``rank`` sends and receives for a bucket."""
    everywhere = all(shards.is_everywhere(i) for u in bucket for i in units[u].matrices)
    sent, owned, published, out, into, blocks, landing = (_Pieces(shards) for _ in range(7))
    replicates = False
    for u in bucket:
        unit = units[u]
        is_first = unit.owner == unit.first_owner
        for k, i in enumerate(unit.matrices):
            turned, cut = unit.holds_transpose(k), slice_of(shards, unit, k)

            def of(box: Box, k: int = k, i: int = i, t: bool = turned, cut: Box = cut) -> Piece:
                """What the unit has of a box of the matrix."""
                return k, i, cut.shape, t, box.intersection(cut).within(cut)

            mine = shards.piece(i, rank)
            block = k, i, shards.boxes[i].box.shape, turned, mine.box
            if everywhere:
                published.add(unit.owner, u, of(mine.box))
                if is_first:
                    landing.add(0, u, block)
                if unit.owner == rank:
                    sent.add(rank, u, of(mine.box))
                    blocks.add(0, u, block)
                continue
            # Co-owners work on what the replica of the first one holds.
            of_owner = shards.replica_of(i, unit.first_owner)
            if unit.owner == rank:
                for piece in shards.pieces(i):
                    found = of(piece.box)
                    if piece.replica == of_owner and found[-1].numel:
                        owned.add(piece.rank, u, found)
            is_sender = mine.replica == of_owner
            found = of(mine.box)
            if found[-1].numel and is_sender:
                sent.add(unit.owner, u, found)
            if mine.numel and is_sender and is_first:
                blocks.add(0, u, block)
            if not shards.is_replicated(i):
                continue
            replicates = True
            for peer, replica in shards.partners(i, rank) if mine.numel and is_first else ():
                if is_sender:
                    out.add(peer, u, block)
                elif replica == of_owner:
                    into.add(peer, u, block)
    held, of_all = sent.message(), published.message() if everywhere else None
    came = of_all or held
    route = BucketRoute(
        units=tuple(u for u in bucket if units[u].owner == rank),
        held=held,
        owned=held if everywhere else owned.message(),
        copies_out=out.message(),
        copies_in=into.message(),
        replicates=replicates,
        blocks=held,
        landing=came,
        published=of_all,
    )
    if not any(units[u].co_owners for u in bucket):
        return route
    sending = blocks.message()
    lands = landing.message() if everywhere else sending
    return replace(
        route,
        blocks=sending,
        landing=lands,
        cuts=_cuts(shards, units, held, sending),
        joins=_cuts(shards, units, came, lands),
    )


def _cuts(
    shards: ShardMap, units: Sequence[Unit], pieces: Message, blocks: Message
) -> tuple[Cut, ...]:
    """Where the pieces of a rank lie in its blocks."""
    at: dict[int, tuple[int, Part]] = {
        i: (part.start + j * part.box.numel, part)
        for part in blocks.parts
        for j, i in enumerate(part.matrices)
    }
    found: list[Cut] = []
    for part in pieces.parts:
        for j, i in enumerate(part.matrices):
            start, block = at[i]
            offset = slice_of(shards, units[part.unit], part.position + j).offset
            in_matrix = Box(tuple(map(add, part.box.offset, offset)), part.box.shape)
            box, size = in_matrix.within(block.box), block.box.numel
            last = found[-1] if j else None
            if (
                last is not None
                and (last.block_shape[1:], last.box) == (block.box.shape, box)
                and start == last.block + last.shape[0] * size
            ):
                count = last.shape[0] + 1
                found[-1] = replace(
                    last, shape=(count, *box.shape), block_shape=(count, *block.box.shape)
                )
            else:
                piece = part.start + j * part.box.numel
                found.append(Cut(piece, (1, *box.shape), start, (1, *block.box.shape), box))
    return tuple(found)
