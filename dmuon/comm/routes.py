"""From a plan to what travels together: pure data, equal on every rank.

Routes say what every rank sends and receives of a bucket of units (`dmuon.scheduler.plan.Unit`)::

    gather     holders of the owner's replica ---pieces---> owner          (all-to-all)
    scatter    owner ---pieces of the update---> the same holders          (all-to-all, mirrored)
    replicate  each of these ---its piece---> the ranks with equal shards  (all-to-all, HSDP only)

What every rank holds whole (the `replicated` layout) needs one phase alone::

    publish    owner ---its updates---> everyone                           (a broadcast an owner)

Pieces follow each other in the order of the bucket's units and of the matrices in a unit, so sender
and receiver need no header.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """Parts in the order of the buffer, and how many elements each rank sends or receives."""

    parts: tuple[Part, ...]
    splits: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class BucketRoute:
    """One rank's view of a bucket.

    ``held``: this rank's pieces, by owner; what it sends in the gather and receives in the
    scatter. ``owned``: all pieces of the matrices that it owns, by holder. ``copies_out`` and
    ``copies_in``: its pieces of updates, by the rank that they go to or come from, along the axes
    that replicate. ``replicates`` is the same on every rank: whether anyone copies.

    ``published``: of a bucket that every rank holds whole, the updates by owner; None for others.
    ``held`` and ``owned`` are then what is owned here, and nothing is copied.
    """

    units: tuple[int, ...]  # owned here
    held: Message
    owned: Message
    copies_out: Message
    copies_in: Message
    replicates: bool
    published: Message | None = None


def parts_of(
    shards: ShardMap, unit: int, pieces: Iterable[tuple[int, int, bool, Box]], start: int = 0
) -> list[Part]:
    """Pieces (position, matrix, whether its slot holds the transpose, box), equal ones joined, in a
    buffer from element ``start`` on."""
    parts: list[Part] = []
    for position, i, transposed, box in pieces:
        whole = shards.boxes[i]
        kind = (box, whole.box.shape, whole.form, transposed)
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
        self._pieces: dict[int, dict[int, list[tuple[int, int, bool, Box]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, peer: int, unit: int, position: int, matrix: int, turned: bool, box: Box) -> None:
        self._pieces[peer][unit].append((position, matrix, turned, box))

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
    own = tuple(u for u in bucket if units[u].owner == rank)
    if all(shards.is_everywhere(i) for u in bucket for i in units[u].matrices):
        published, own_part = _Pieces(shards), _Pieces(shards)
        for u in bucket:
            for k, i in enumerate(units[u].matrices):
                whole = u, k, i, units[u].holds_transpose(k), shards.piece(i, rank).box
                published.add(units[u].owner, *whole)
                if units[u].owner == rank:
                    own_part.add(rank, *whole)
        held, nothing = own_part.message(), _Pieces(shards).message()
        return BucketRoute(own, held, held, nothing, nothing, False, published.message())
    sent, owned, out, into = (_Pieces(shards) for _ in range(4))
    replicates = False
    for u in bucket:
        owner = units[u].owner
        for k, i in enumerate(units[u].matrices):
            turned = units[u].holds_transpose(k)
            of_owner = shards.replica_of(i, owner)
            if owner == rank:
                for piece in shards.pieces(i):
                    if piece.replica == of_owner:
                        owned.add(piece.rank, u, k, i, turned, piece.box)
            mine = shards.piece(i, rank)
            is_sender = mine.replica == of_owner
            if mine.numel and is_sender:
                sent.add(owner, u, k, i, turned, mine.box)
            if not shards.is_replicated(i):
                continue
            replicates = True
            for peer, replica in shards.partners(i, rank) if mine.numel else ():
                if is_sender:
                    out.add(peer, u, k, i, turned, mine.box)
                elif replica == of_owner:
                    into.add(peer, u, k, i, turned, mine.box)
    return BucketRoute(
        own, sent.message(), owned.message(), out.message(), into.message(), replicates
    )
