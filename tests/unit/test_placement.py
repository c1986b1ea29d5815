"""Which matrix goes to which owner once the counts are known, and how crowded links get."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


TRANSFORMER = (0, 1, 1, 0, 2, 2, 3)  # the shapes of a layer's matrices


@dataclass
class Case:
    """What `place` is asked for."""

    shapes: list[int]
    layers: list[str]
    counts: Sequence[Mapping[int, int]]
    groups: list[list[int]]
    topology: Topology

    def place(self) -> list[int]:
        return place(self.shapes, self.layers, self.counts, self.groups, self.topology)

    def repeats(self, owners: Sequence[int]) -> int:
        """How many matrices have an owner that has one of their layer already."""
        pairs = [pair for pair in zip(self.layers, owners, strict=True) if pair[0]]
        return len(pairs) - len(set(pairs))


def model(layers: int, shapes: Sequence[int]) -> tuple[list[int], list[str]]:
    """Shapes and layers of a model whose layers hold these shapes."""
    return list(shapes) * layers, [f"layers.{i}" for i in range(layers) for _ in shapes]


def dealt(shapes: Sequence[int], owners: Sequence[int], world: int) -> list[Counter[int]]:
    """Counts of ``world`` ranks when the matrices, shape by shape, go to these owners in turn."""
    counts: list[Counter[int]] = [Counter() for _ in range(world)]
    for i, shape in enumerate(sorted(shapes)):
        counts[owners[i % len(owners)]][shape] += 1
    return counts


@st.composite
def cases(draw, shapes: int = 4, matrices: int = 40, ranks: int = 12) -> Case:
    nodes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=ranks))
    world = len(nodes)
    found = draw(st.lists(st.integers(0, shapes - 1), max_size=matrices))
    layers = [draw(st.sampled_from(["", "a", "b", "c.1"])) for _ in found]
    counts: list[Counter[int]] = [Counter() for _ in range(world)]
    for shape in found:
        counts[draw(st.integers(0, world - 1))][shape] += 1
    group_of = [draw(st.integers(0, 2)) for _ in range(world)]  # 0: not interchangeable
    groups = [[r for r in range(world) if group_of[r] == g] for g in (1, 2)]
    return Case(found, layers, counts, groups, Topology.on_nodes((world,), ("dp",), nodes))


# ---- the counts --------------------------------------------------------------------------


@given(cases())
def test_every_owner_takes_what_was_decided(case):
    """Exactly, for ranks that are like no other; in some arrangement inside a group."""
    owners = case.place()
    taken = [
        Counter(k for k, o in zip(case.shapes, owners) if o == r) for r in range(len(case.counts))
    ]
    groups = [
        *case.groups,
        *([r] for r in range(len(taken)) if not any(r in g for g in case.groups)),
    ]
    for group in groups:
        found, decided = ([sorted(c[r].items()) for r in group] for c in (taken, case.counts))
        assert sorted(found) == sorted(decided)


@given(cases(), st.randoms(use_true_random=False))
def test_the_arrangement_inside_a_group_does_not_matter(case, shuffled):
    expected = case.place()
    for group in case.groups:
        handed = [case.counts[rank] for rank in group]
        shuffled.shuffle(handed)
        for rank, counts in zip(group, handed):
            case.counts[rank] = Counter(dict(reversed(counts.items())))
        shuffled.shuffle(group)
    case.groups.reverse()
    assert case.place() == expected


# ---- layers ------------------------------------------------------------------------------


def fewest_repeats(case: Case) -> int:
    """By trying everything, layer after layer."""
    order = sorted(range(len(case.shapes)), key=case.layers.__getitem__)

    @cache
    def least(at: int, left: tuple[tuple[int, ...], ...], used: frozenset[int]) -> int:
        if at == len(order):
            return 0
        shape, layer = case.shapes[order[at]], case.layers[order[at]]
        if at and layer != case.layers[order[at - 1]]:
            used = frozenset()
        found = len(order)
        for rank, room in enumerate(left):
            if room[shape]:
                less = tuple(n - (k == shape) for k, n in enumerate(room))
                repeats = bool(layer) and rank in used
                others = (*left[:rank], less, *left[rank + 1 :])
                found = min(found, repeats + least(at + 1, others, used | {rank}))
        return found

    return least(0, tuple(tuple(c.get(k, 0) for k in range(3)) for c in case.counts), frozenset())


@pytest.mark.parametrize(("shapes", "allowed"), [(1, 0), (3, 1)])
def test_layers_repeat_an_owner_as_seldom_as_possible(shapes, allowed):
    """Never more often with one shape; within one of the least with several."""

    @given(cases(shapes, matrices=8, ranks=4))
    def check(case):
        case.groups = []
        owners = case.place()
        assert case.repeats(owners) <= fewest_repeats(case) + allowed

    check()


@pytest.mark.parametrize("nodes", [1, 3, 4, 32])
@pytest.mark.parametrize("dealing", ["evenly", "to half of the ranks", "specialists"])
def test_layers_of_a_transformer_have_an_owner_for_each_matrix(nodes, dealing):
    topology = Topology.flat(nodes * 8, ranks_per_node=8)
    world = topology.world
    shapes, layers = model(80, TRANSFORMER)
    room = -(-len(shapes) // world)
    counts = dealt(shapes, range(0, world, 1 if dealing == "evenly" or nodes == 1 else 2), world)
    if dealing == "specialists":
        counts = [Counter(sorted(shapes)[r * room : (r + 1) * room]) for r in range(world)]
    case = Case(shapes, layers, counts, [list(range(world))], topology)
    owners = case.place()
    assert case.repeats(owners) == 0
    in_turn = contention([i % world for i in range(len(shapes))], topology)
    found = contention(owners, topology)
    assert nodes == 1 or found[0] < in_turn[0] * 0.6
    assert found[1] < 2.0


# ---- the order ---------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3, 4, 8, 32])
def test_where_all_take_alike_nothing_is_worse_than_the_owner_order(nodes):
    topology = Topology.flat(nodes * 8, ranks_per_node=8)
    shapes, layers = model(topology.world, TRANSFORMER)
    case = Case(shapes, layers, dealt(shapes, range(topology.world), topology.world), [], topology)
    order = list(topology.owner_order()) * 7
    found, ideal = contention(case.place(), topology), contention(order, topology)
    assert found[1] == 1.0 and found[0] <= ideal[0]


# ---- speed -------------------------------------------------------------------------------


def calls_of(action: Callable[[], object]) -> int:
    """How many functions, Python's own among them, an action calls."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_for_a_matrix_does_not_grow_with_owners():
    """A pass over all owners for each matrix would: by as many calls as there are owners."""
    shapes = (0, 1, 1, 0) + (2,) * 256 + (3,) * 128
    for world in (64, 1024):
        topology = Topology.flat(world, ranks_per_node=8)
        matrices, names = model(2400 // len(shapes), shapes)
        counts = dealt(matrices, range(world), world)
        case = Case(matrices, names, counts, [list(range(world))], topology)
        owners: list[int] = []
        calls = calls_of(lambda case=case, owners=owners: owners.extend(case.place()))  # type: ignore[misc]
        assert calls < 150 * len(matrices)
        assert case.repeats(owners) <= sum(max(0, n - world) for n in Counter(names).values())


# ---- names -------------------------------------------------------------------------------


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
