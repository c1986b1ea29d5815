"""Slots of a mesh, its nodes, and the owner order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dmuon.api import _transport, mesh_topology
from dmuon.comm.process_groups import Grid, ProcessGroups
from dmuon.comm.transport import C10dTransport
from dmuon.config import PlannerOptions
from dmuon.scheduler.topology import Topology, diagonal_slots, local_world_size
from dmuon.types import DmuonError, OwnershipError


def most_in_a_stretch(places: list[int]) -> list[int]:
    """For each m, how often at most one value occurs among m consecutive entries of a cycle."""
    size = len(places)
    hits = np.equal.outer(places + places, np.unique(places)).astype(np.int64)
    before = np.concatenate([np.zeros((1, hits.shape[1]), np.int64), hits.cumsum(axis=0)])
    return [int((before[m : m + size] - before[:size]).max()) for m in range(size + 1)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 16])
def test_a_stretch_of_the_order_is_spread_over_nodes_and_columns(nodes):
    """All lengths, all beginnings, also across the end."""
    for columns in range(1, 17):
        slots = diagonal_slots(nodes, columns)
        assert sorted(slots) == list(product(range(nodes), range(columns)))
        on_node, on_column = map(list, zip(*slots, strict=True))
        for m, most in enumerate(most_in_a_stretch(on_node)):
            assert most <= -(-m // nodes) + 1, (columns, m)
        for m, most in enumerate(most_in_a_stretch(on_column)):
            assert most == -(-m // columns), (columns, m)
        for begin in range(0, len(on_node), nodes):
            assert sorted(on_node[begin : begin + nodes]) == list(range(nodes)), columns


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.permutations(range(5)))
def test_slots_nodes_columns_and_the_order_agree(nodes, names):
    topology = Topology.on_nodes((len(nodes),), ("dp",), nodes)
    rows = topology.slots()
    assert len(rows) == topology.nodes == len(set(nodes))
    assert max(map(len, rows)) == topology.columns == max(map(nodes.count, nodes))
    assert sorted(rank for row in rows for rank in row) == list(range(len(nodes)))
    assert sorted(topology.owner_order()) == list(range(len(nodes)))
    for node, row in enumerate(rows):
        assert list(row) == sorted(row)
        assert {topology.node(rank) for rank in row} == {node}
        assert len({nodes[rank] for rank in row}) == 1
    renamed = [names[node] for node in nodes]
    assert Topology.on_nodes((len(nodes),), ("dp",), renamed) == topology


@pytest.mark.parametrize(("nodes", "per_node", "node_of"), [
    ([0, 0, 1, 1], 2, ()),
    ([3, 3, 3, 1], 3, ()),  # the last node may be smaller
    ([0, 0, 0, 0], 4, ()),
    ([0, 1, 2], 1, ()),
    ([0, 1, 1, 1], 3, (0, 1, 1, 1)),  # another may not
    ([5, 2, 5, 2], 2, (0, 1, 0, 1)),
    ([0, 0, 1, 2, 2], 2, (0, 0, 1, 2, 2)),
])  # fmt: skip
def test_runs_of_equal_length_need_no_list_of_nodes(nodes, per_node, node_of):
    topology = Topology.on_nodes((len(nodes),), ("dp",), nodes)
    assert (topology.ranks_per_node, topology.node_of) == (per_node, node_of)
    if not node_of:
        assert topology == Topology.flat(len(nodes), ranks_per_node=per_node)


@pytest.mark.parametrize(("make", "arguments"), [
    *((Topology, ((3,), ("dp",), 2, "cpu", nodes)) for nodes in ((0, 1), (0, 2, 2), (1, 1, 2))),
    (Topology, ((3,), ("dp",), 3, "cpu", (0, 1, 1))),
    (Topology, ((), (), 1)),
    (Topology, ((2, 0), ("a", "b"), 1)),
    (Topology, ((2, 2), ("a",), 1)),
    (Topology, ((2,), ("a",), 0)),
    (Topology.on_nodes, ((3,), ("dp",), [0, 0])),
    (Topology.on_nodes, ((2, 2), ("a", "b"), [0, 0, 0, 0, 0])),
])  # fmt: skip
def test_impossible_meshes_and_nodes_that_do_not_fit_are_refused(make, arguments):
    with pytest.raises(ValueError):
        make(*arguments)


def test_local_world_size(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_world_size() is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_world_size() == 8
    for wrong in ("", "0", "-2", "4.0", "8 ", "²"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        told = rf"LOCAL_WORLD_SIZE.*{re.escape(repr(wrong))}.*PlannerOptions\(ranks_per_node=...\)"
        with pytest.raises(DmuonError, match=told):
            local_world_size()


@pytest.fixture
def sixteen_ranks(monkeypatch) -> Iterator[None]:
    """Rank 0 of 16 in a process group that moves nothing; four ranks on a node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


def topology_of(mesh=None, model=None, world=16, **options) -> Topology:
    parameters = list((model or nn.Linear(2, 2)).parameters())
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return mesh_topology(mesh, world, parameters, ddp, PlannerOptions(**options))


def test_all_ranks_without_a_mesh(sixteen_ranks, monkeypatch):
    """The option comes before the environment; without torchrun there is one node."""
    assert topology_of() == Topology.flat(16, ranks_per_node=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "nonsense")
    assert topology_of(ranks_per_node=8) == Topology.flat(16, ranks_per_node=8)
    with pytest.raises(DmuonError, match="LOCAL_WORLD_SIZE"):
        topology_of()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert topology_of() == Topology.flat(16)


@pytest.mark.parametrize(("shape", "axes", "axis", "options", "expected"), [
    ((2, 8), ("replicate", "shard"), None, {}, Topology((2, 8), ("replicate", "shard"), 4)),
    ((2, 8), None, None, {}, Topology((2, 8), ("axis0", "axis1"), 4)),
    # The dp axis of dp x tp: global ranks 0, 2, 4, ... so two of them on a node of four.
    ((8, 2), ("dp", "tp"), "dp", {}, Topology((8,), ("dp",), 2)),
    ((8, 2), ("dp", "tp"), "tp", {}, Topology((2,), ("tp",), 2)),
    ((2, 8), ("dp", "tp"), "dp", {}, Topology((2,), ("dp",), 1)),
    ((2, 8), ("dp", "tp"), "dp", {"ranks_per_node": 16}, Topology((2,), ("dp",), 2)),
])  # fmt: skip
def test_a_mesh_lies_where_its_ranks_are(sixteen_ranks, shape, axes, axis, options, expected):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    mesh = mesh if axis is None else mesh[axis]
    assert topology_of(mesh, world=mesh.size(), **options) == expected


def test_groups_of_some_ranks_lie_on_nodes_of_unequal_size(sixteen_ranks):
    """Ranks 3 to 10: one on node 0, four on node 1, three on node 2. And of a wrapped model."""
    mesh = dist.device_mesh.DeviceMesh("cpu", list(range(3, 11)), mesh_dim_names=("dp",))
    topology = topology_of(mesh, world=8)
    assert topology.node_of == (0, 1, 1, 1, 1, 2, 2, 2)
    assert topology.slots() == ((0,), (1, 2, 3, 4), (5, 6, 7))
    group = dist.new_group([0, 4, 5, 12])
    wrapped = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    assert topology_of(model=wrapped, world=4).node_of == (0, 1, 1, 2)


def test_a_mesh_of_other_devices_is_refused(sixteen_ranks, monkeypatch):
    mesh = init_device_mesh("cpu", (16,))
    # A model on the meta device will lie where its mesh does.
    assert topology_of(mesh, nn.Linear(2, 2, device="meta")).device_type == "cpu"
    monkeypatch.setattr(type(mesh), "device_type", "cuda")
    with pytest.raises(OwnershipError, match="'cuda' devices but the model is on cpu"):
        topology_of(mesh, nn.Linear(2, 2))


class Rehearsal:
    """`init_process_group(device_id=...)`: which splits each rank joins, by the parent's ranks.

    A split waits for all ranks of its parent. torch's own code runs; only NCCL is missing.
    """

    def __init__(self, monkeypatch, world: int) -> None:
        self.world = world
        self.joins: list[Counter[tuple[int, ...]]] = []
        self._patch = monkeypatch
        monkeypatch.setattr(C10dTransport, "begin", lambda *_: None)

    def run(self, call: Callable[[int], None]) -> None:
        """``call`` on every rank, one after the other. All ranks of a parent join equally many of
        its splits."""
        for rank in range(self.world):
            self.joins.append(Counter())
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.world)
            with self._patch.context() as patch:
                self._split_instead(patch, rank)
                try:
                    call(rank)
                finally:
                    dist.destroy_process_group()
        for ranks in {ranks for joined in self.joins for ranks in joined}:
            counts = {rank: self.joins[rank][ranks] for rank in ranks}
            assert len(set(counts.values())) == 1, f"ranks {ranks} join splits {counts} times"

    def _split_instead(self, patch, rank: int) -> None:
        c10d, joined, everyone = dist.distributed_c10d, self.joins[rank], tuple(range(self.world))

        def no_color(*_) -> None:
            joined[everyone] += 1

        def new_group(ranks, *, use_local_synchronization=False, **kwargs):
            joined[everyone] += rank in ranks
            how = {"use_local_synchronization": use_local_synchronization}
            return c10d._new_group_with_tag(ranks, **how)

        def split_group(parent, split_ranks, **kwargs):
            known = dist.get_process_group_ranks(parent)
            joined[tuple(known)] += 1
            mine = next(part for part in split_ranks if known.index(rank) in part)
            ranks = [known[r] for r in mine]
            return c10d._new_group_with_tag(ranks, use_local_synchronization=True)

        source = dist.group.WORLD._get_backend(torch.device("cpu"))
        patch.setattr(type(source), "perform_nocolor_split", no_color, raising=False)
        patch.setattr(c10d, "_get_split_source", lambda *_: source)
        for module in (dist, c10d):
            patch.setattr(module, "new_group", new_group)
            patch.setattr(module, "split_group", split_group)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)


def test_ranks_outside_of_a_mesh_need_not_join_in_its_groups(monkeypatch):
    rehearsal, planned = Rehearsal(monkeypatch, 6), []

    def plan(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "dp"))["dp"]
        rehearsal.joins[rank].clear()
        if rank not in (2, 3):
            return
        transport = _transport(mesh, None, 7.0)
        again = _transport(mesh, None, 7.0)
        planned.append((transport.rank, transport.world))
        assert again.subgroup([(0,), (1,)]).world == 1
        for one in (transport, again):
            one.close()

    rehearsal.run(plan)
    assert planned == [(0, 2), (1, 2)]
    assert [*rehearsal.joins[2].items()] == [((2, 3), 3)]


def test_any_number_of_sets_of_ranks_is_one_split(monkeypatch):
    rehearsal = Rehearsal(monkeypatch, 8)
    grid = Grid.of(Topology((2, 2, 2), ("replicate", "shard", "tp"), 8), {"tp"})

    def plan(rank: int) -> None:
        transport = _transport(None, None, None)
        rehearsal.joins[rank].clear()
        peers = transport.subgroup([(0, 5), (1, 7), (2, 3), (4, 6)])
        assert (peers.rank, peers.world) == (rank in (3, 5, 6, 7), 2)
        ProcessGroups.open(grid, transport, transport.subgroup)

    rehearsal.run(plan)
    assert {sum(joined.values()) for joined in rehearsal.joins} == {1 + 5}
