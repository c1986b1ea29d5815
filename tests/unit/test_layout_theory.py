"""The traffic formulas of the layouts, against counting every message on random grids."""

from __future__ import annotations

import doctest
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import layout_theory
from tests.layout_theory import Matrices, dedicated, fsdp, received, replicated, sharded

# Bytes of an element: all different, so that none can stand for another.
ITEMS = {"kept": 8, "used": 2, "gradients": 4, "updates": 1}
KEPT, USED, REDUCED, UPDATED = ITEMS.values()
NUMELS = [720 * k for k in (1, 4, 7, 30)]  # divide by every number of shards and slices
GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))

Place = tuple[int, int, int]  # replica, shard, slice


def along(place: Place, axis: int, size: int) -> list[Place]:
    """All places that differ from one along an axis only."""
    return [place[:axis] + (i,) + place[axis + 1 :] for i in range(size)]  # type: ignore[misc]


class Messages(Counter[str]):
    """Bytes that are received, by purpose."""

    def one_root(self, purpose: str, ranks: Sequence[Place], root: Place, nbytes: float) -> None:
        """A broadcast or a reduce: one message for everyone but the root."""
        self[purpose] += sum(nbytes for rank in ranks if rank != root)  # type: ignore[assignment]

    def agree(self, formula: dict[str, float], ranks: int) -> None:
        for purpose in self.keys() | formula.keys():
            assert self[purpose] / ranks == pytest.approx(formula.get(purpose, 0.0)), purpose


@settings(max_examples=60, deadline=None)
@given(GRIDS, st.integers(0, 1000), st.booleans(), st.booleans())
def test_formulas_count_every_message_of_any_grid(shape, seed, freed, cut):
    replicas, shards, slices = shape
    generator = random.Random(seed)
    found = {name: Messages() for name in ("dedicated", "sharded", "replicated", "fsdp")}
    for numel in NUMELS:
        owner: Place = tuple(map(generator.randrange, shape))  # type: ignore[assignment]
        held, flat = numel / slices if cut else numel, (owner[0], owner[1], 0)
        mine = found["dedicated"]
        for root in (r for t in along(owner, 2, slices) for r in along(t, 0, replicas)):
            ranks = along(root, 1, shards)
            for purpose in ("forward", "backward") if freed else ("forward",):
                mine.one_root(purpose, ranks, root, held * USED)
            mine.one_root("gradients", ranks, root, held * REDUCED)
        for root in along(owner, 2, slices):
            ranks = along(root, 0, replicas)
            mine.one_root("gradients across replicas", ranks, root, held * REDUCED)
            mine.one_root("publish", ranks, root, held * KEPT)
        mine.one_root("slices", along(owner, 2, slices), owner, held * REDUCED * cut)
        mine.one_root("updates", along(owner, 2, slices), owner, held * UPDATED)
        mine, piece = found["sharded"], numel / shards
        mine.one_root("gather", along(flat, 1, shards), flat, piece * UPDATED)
        mine.one_root("scatter", along(flat, 1, shards), flat, piece * UPDATED)
        for rank in along(flat, 1, shards):
            mine.one_root("replicate", along(rank, 0, replicas), rank, piece * UPDATED)
        mine, everyone = found["replicated"], [(0, r, 0) for r in range(replicas * shards)]
        mine.one_root("gradients", everyone, everyone[0], numel * REDUCED)
        mine.one_root("updates", everyone, everyone[0], numel * UPDATED)
        mine = found["fsdp"]
        for rank in (r for one in along(flat, 0, replicas) for r in along(one, 1, shards)):
            for purpose in ("forward", "backward") if freed else ("forward",):
                mine.one_root(purpose, along(rank, 1, shards), rank, piece * USED)
            mine.one_root("gradients", along(rank, 1, shards), rank, piece * REDUCED)
            # Reduce-scatter, then all-gather, of its part of the shard.
            part = 2 * piece / replicas * REDUCED
            mine.one_root("gradients across replicas", along(rank, 0, replicas), rank, part)
    total = Matrices.of(sum(NUMELS), **ITEMS)
    ranks = replicas * shards
    formula = dedicated(total, shards, replicas, slices, freed=freed, cut=cut)
    found["dedicated"].agree(formula, ranks * slices)
    found["sharded"].agree(sharded(total, shards, replicas), ranks)
    found["replicated"].agree(replicated(total, ranks), ranks)
    found["fsdp"].agree(fsdp(total, shards, replicas, freed=freed), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_published_forms_hold_on_a_flat_mesh(ranks):
    matrices = Matrices.of(1000)
    once = matrices.kept * (ranks - 1) / ranks
    forms = {
        3.0: dedicated(matrices, ranks),
        2.0: dedicated(matrices, ranks, freed=False),
        2 + 1e-9: replicated(matrices, ranks),
        2 / ranks: sharded(matrices, ranks),
        3 + 1e-9: fsdp(matrices, ranks),
    }
    for factor, traffic in forms.items():
        assert sum(traffic.values()) == pytest.approx(factor * once)


def test_recorded_collectives_are_counted_as_the_formulas_count_them():
    for op in ("broadcast", "reduce", "all_gather", "reduce_scatter"):
        assert received(op, 800, 4) == 600
    assert received("all_reduce", 800, 4) == 1200 and received("all_to_all", 800, 4) == 800
    with pytest.raises(ValueError, match="op is 'gather'; expected 'broadcast'"):
        received("gather", 800, 4)
    result = doctest.testmod(layout_theory)
    assert result.attempted >= 2 and not result.failed
