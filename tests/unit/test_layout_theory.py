"""The traffic formulas of the layouts, against counting every message on random grids."""

from __future__ import annotations

import doctest
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import layout_theory
from benchmarks.layout_theory import (
    Matrices,
    all_reduce,
    dedicated,
    fsdp,
    one_root,
    received,
    replicated,
    sharded,
)
from dmuon.comm.process_groups import Grid

GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
# Bytes of an element: all different, so that none can stand for another.
ITEMS = {"kept": 8, "used": 2, "gradients": 4, "updates": 1}
KEPT, USED, REDUCED, UPDATED = ITEMS.values()


def grid_of(replicas: int, shards: int, tensors: int) -> Grid:
    return Grid((replicas, shards, tensors), tuple(range(replicas * shards * tensors)))


class Messages:
    """Bytes that each rank receives, by purpose, one message after another."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.ranks = grid.ranks
        self.by_purpose: dict[str, float] = defaultdict(float)

    def send(self, purpose: str, source: int, target: int, nbytes: float) -> None:
        assert source != target
        self.by_purpose[purpose] += nbytes

    def broadcast(self, purpose: str, lane: tuple[int, ...], source: int, nbytes: float) -> None:
        """A chain: each rank passes it on."""
        chain = [source, *(rank for rank in lane if rank != source)]
        for sender, receiver in pairwise(chain):
            self.send(purpose, sender, receiver, nbytes)

    def reduce(self, purpose: str, lane: tuple[int, ...], target: int, nbytes: float) -> None:
        """A star: everyone sends to the target."""
        for rank in lane:
            if rank != target:
                self.send(purpose, rank, target, nbytes)

    def mean(self) -> dict[str, float]:
        return {key: total / len(self.ranks) for key, total in self.by_purpose.items()}


def agree(found: dict[str, float], formula: dict[str, float]) -> None:
    for purpose in found.keys() | formula.keys():
        assert found.get(purpose, 0.0) == pytest.approx(formula.get(purpose, 0.0)), purpose


def owners(grid: Grid, seed: int, count: int = 7) -> list[tuple[int, int]]:
    """(owner, elements) of some matrices; elements divide by every number of shards and slices."""
    generator = random.Random(seed)
    return [
        (generator.randrange(len(grid.ranks)), 720 * generator.randint(1, 50)) for _ in range(count)
    ]


@settings(max_examples=80, deadline=None)
@given(GRIDS, st.integers(0, 1000), st.booleans(), st.booleans())
def test_dedicated_counts_every_message_of_any_grid(shape, seed, freed, cut):
    grid = grid_of(*shape)
    replicas, shards, tensors = shape
    messages = Messages(grid)
    matrices = owners(grid, seed)
    for owner, numel in matrices:
        place = grid.place(owner)
        held = numel / tensors if cut else numel
        for replica in range(replicas):
            for tensor in range(tensors):
                home = grid.rank_at(replica, place[1], tensor)
                lane = grid.along_shards(home)
                assert len(lane) == shards
                messages.broadcast("forward", lane, home, held * USED)
                if freed:
                    messages.broadcast("backward", lane, home, held * USED)
                messages.reduce("gradients", lane, home, held * REDUCED)
        for tensor in range(tensors):
            first = grid.rank_at(place[0], place[1], tensor)
            lane = grid.along_replicas(first)
            messages.reduce("gradients across replicas", lane, first, held * REDUCED)
            messages.broadcast("publish", lane, first, held * KEPT)
        for rank in grid.along_tensors(owner):
            if rank != owner:
                if cut:
                    messages.send("slices", rank, owner, held * REDUCED)
                messages.send("updates", owner, rank, held * UPDATED)
    total = Matrices.of(sum(n for _, n in matrices), **ITEMS)
    agree(messages.mean(), dedicated(total, shards, replicas, tensors, freed=freed, cut=cut))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_sharded_counts_every_piece(replicas, shards, seed):
    grid = grid_of(replicas, shards, 1)
    messages = Messages(grid)
    matrices = owners(grid, seed)
    for owner, numel in matrices:
        piece = numel / shards * UPDATED
        for rank in grid.along_shards(owner):
            if rank != owner:
                messages.send("gather", rank, owner, piece)
                messages.send("scatter", owner, rank, piece)
            for copy in grid.along_replicas(rank):
                if copy != rank:
                    messages.send("replicate", rank, copy, piece)
    total = Matrices.of(sum(n for _, n in matrices), **ITEMS)
    agree(messages.mean(), sharded(total, shards, replicas))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 1000))
def test_replicated_counts_every_message(ranks, seed):
    grid = grid_of(1, ranks, 1)
    messages = Messages(grid)
    matrices = owners(grid, seed)
    for owner, numel in matrices:
        messages.reduce("gradients", grid.ranks, owner, numel * REDUCED)
        messages.broadcast("updates", grid.ranks, owner, numel * UPDATED)
    agree(messages.mean(), replicated(Matrices.of(sum(n for _, n in matrices), **ITEMS), ranks))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_fsdp_counts_every_shard(replicas, shards, freed):
    grid, numel = grid_of(replicas, shards, 1), 720
    messages = Messages(grid)
    for rank in grid.ranks:
        for peer in grid.along_shards(rank):
            if peer != rank:
                messages.send("forward", peer, rank, numel / shards * USED)
                if freed:
                    messages.send("backward", peer, rank, numel / shards * USED)
                messages.send("gradients", peer, rank, numel / shards * REDUCED)
        column = grid.along_replicas(rank)
        for peer in column:
            if peer != rank:  # reduce-scatter, then all-gather, of its part of the shard
                part = numel / shards / len(column) * REDUCED
                messages.send("gradients across replicas", peer, rank, part)
                messages.send("gradients across replicas", peer, rank, part)
    agree(messages.mean(), fsdp(Matrices.of(numel, **ITEMS), shards, replicas, freed=freed))


def total(traffic: dict[str, float]) -> float:
    return sum(traffic.values())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_published_forms_hold_on_a_flat_mesh(ranks):
    matrices = Matrices.of(1000)
    once = matrices.kept * (ranks - 1) / ranks
    assert total(dedicated(matrices, ranks)) == pytest.approx(3 * once)
    assert total(dedicated(matrices, ranks, freed=False)) == pytest.approx(2 * once)
    assert total(replicated(matrices, ranks)) == pytest.approx(2 * once)
    assert total(sharded(matrices, ranks)) == pytest.approx(2 * once / ranks)
    assert total(fsdp(matrices, ranks)) == pytest.approx(3 * once)
    assert total(sharded(matrices, ranks)) + total(fsdp(matrices, ranks)) > 3 * once


def test_hsdp_of_two_by_two():
    """Half of three times P along shards; the owner's half of P down its column, there and back."""
    traffic = dedicated(Matrices.of(100), shards=2, replicas=2)
    assert traffic["forward"] == traffic["backward"] == traffic["gradients"] == 200
    assert traffic["gradients across replicas"] == traffic["publish"] == 100
    assert total(traffic) == 800


def test_tensor_parallelism_divides_what_data_parallelism_moves():
    alone = dedicated(Matrices.of(1000), shards=4)
    both = dedicated(Matrices.of(1000), shards=4, tensors=2)
    for purpose in ("forward", "backward", "gradients"):
        assert both[purpose] == alone[purpose] / 2
    assert both["slices"] == both["updates"] == 4000 / 2 / 8
    whole = dedicated(Matrices.of(1000), shards=4, tensors=2, cut=False)
    assert whole["forward"] == alone["forward"]
    assert (whole["slices"], whole["updates"]) == (0.0, 4000 / 8)


FLAT: list[Callable[[Matrices], dict[str, float]]] = [
    lambda m: dedicated(m, 1),
    lambda m: sharded(m, 1),
    lambda m: replicated(m, 1),
    lambda m: fsdp(m, 1),
]


@pytest.mark.parametrize("layout", FLAT)
def test_one_rank_receives_nothing(layout):
    assert total(layout(Matrices.of(1000))) == 0


def test_recorded_collectives_are_counted_as_the_formulas_count_them():
    assert received("broadcast", 800, 4) == received("reduce", 800, 4) == one_root(800, 4) == 600
    assert received("all_reduce", 800, 4) == all_reduce(800, 4) == 1200
    assert received("all_to_all", 800, 4) == 800
    with pytest.raises(ValueError, match="op is 'all_gather'; expected 'broadcast'"):
        received("all_gather", 800, 4)


def test_examples_in_docstrings_are_true():
    result = doctest.testmod(layout_theory)
    assert result.attempted >= 2
    assert not result.failed
