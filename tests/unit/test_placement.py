"""Which matrix goes to which owner once the counts are known, and how crowded links get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from dmuon.scheduler.topology import Topology, layer_of, natural_key, place


def contention(owners: Sequence[int], topology: Topology) -> tuple[float, float]:
    """How many of as many consecutive matrices, in launch order, as there are columns have owners
    on one node, and in one column: the most crowded in each window, in the mean of all windows."""
    window = min(topology.columns, len(owners))
    slot = {rank: (n, c) for n, row in enumerate(topology.slots()) for c, rank in enumerate(row)}
    parts = [owners[i : i + window] for i in range(len(owners) - window + 1)]
    crowds = [
        [max(Counter(slot[owner][axis] for owner in part).values()) for part in parts]
        for axis in (0, 1)
    ]
    return sum(crowds[0]) / len(parts), sum(crowds[1]) / len(parts)


@pytest.mark.parametrize("nodes", [1, 3, 32])
@pytest.mark.parametrize("dealing", ["evenly", "to half of the ranks", "specialists"])
def test_layers_of_a_transformer_have_an_owner_for_each_matrix(nodes, dealing):
    """Owners take exactly what was decided, no owner twice in a layer, spread over nodes."""
    topology = Topology.flat(nodes * 8, ranks_per_node=8)
    world = topology.world
    shapes = [0, 1, 1, 0, 2, 2, 3] * 80
    layers = [f"layers.{n // 7}" for n in range(len(shapes))]
    ranks = range(0, world, 1 if dealing == "evenly" or nodes == 1 else 2)
    counts: list[Counter[int]] = [Counter() for _ in range(world)]
    for i, shape in enumerate(sorted(shapes)):
        alone = i // -(-len(shapes) // world)
        counts[alone if dealing == "specialists" else ranks[i % len(ranks)]][shape] += 1
    owners = place(shapes, layers, counts, [list(range(world))], topology)
    taken: list[Counter[int]] = [Counter() for _ in counts]
    for shape, owner in zip(shapes, owners, strict=True):
        taken[owner][shape] += 1
    assert sorted(sorted(t.items()) for t in taken) == sorted(sorted(c.items()) for c in counts)
    assert len({*zip(layers, owners, strict=True)}) == len(layers)
    in_turn = contention([i % world for i in range(len(shapes))], topology)
    found = contention(owners, topology)
    assert nodes == 1 or found[0] < in_turn[0] * 0.6
    assert found[1] < 2.0


def test_layer_of():
    layers = {
        "blocks.3.attn.q.weight": "blocks.3", "0.weight": "0", "a.1.b.2.weight": "a.1",
        "model.layers.12.mlp.experts.w1#5": "model.layers.12", "stack.7#2": "stack.7",
        "model.layers.12.up (copy 2 of 4)": "model.layers.12", "scales.3 (copy 2 of 4)": "scales.3",
        "layers.1.experts.w1#5 (copy 10 of 16)": "layers.1",
    }  # fmt: skip
    layers |= dict.fromkeys(
        ("experts.w1#5", "layer1.weight", "a.².weight", "", "head (copy 1 of 2)"), ""
    )
    assert {name: layer_of(name) for name in layers} == layers


def test_numbers_count_in_the_natural_order():
    copies = [f"layers.{i}.up (copy {k} of 16)" for i in (2, 10) for k in (1, 2, 10)]
    assert sorted([*copies[3:], *copies[:3]], key=natural_key) == copies
    names = ["l.10.q", "l.2.q", "l.2.k#10", "l.2.k#9", "l.2", "l", "10.a", "9.a", "l.02.q", "m"]
    assert sorted(names, key=natural_key) == [
        "9.a", "10.a", "l", "l.2", "l.2.k#9", "l.2.k#10", "l.02.q", "l.2.q", "l.10.q", "m",
    ]  # fmt: skip
