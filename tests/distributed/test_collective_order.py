"""One order of all collectives over all process groups, on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from dmuon.comm.transport import C10dTransport, Work
from dmuon.reference import ReferenceMuon
from tests.distributed.dedicated import MUON, mesh_of, recorded, shard_rest
from tests.distributed.dedicated_models import FSDP, PLAIN, Both, Skipping
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, dedicate, loss_of, reference_for, weights
from tests.transports import Event, RecordingTransport

# One collective: the number of its process group, the ranks in it, and what it does.
Entry = tuple[int, tuple[int, ...], Event]


@dataclass
class Doubtful:
    """Says at random whether it is completed. Where it says so, it is.

    It waits for nothing: what another rank launches last must not be waited for here.
    """

    inner: Work
    chance: random.Random

    def wait(self) -> None:
        self.inner.wait()

    def is_completed(self) -> bool:
        return self.chance.random() < 0.5 and self.inner.is_completed()


@dataclass
class Prompt(Doubtful):
    """Is completed whenever somebody asks."""

    def is_completed(self) -> bool:
        self.inner.wait()
        return True


@dataclass
class Late(Doubtful):
    """Never says that it is completed, and never waits to find out."""

    def is_completed(self) -> bool:
        return False


@dataclass
class Recorder(RecordingTransport):
    """Notes every collective together with its process group."""

    chance: random.Random = field(default_factory=random.Random)
    work: type[Doubtful] = Doubtful

    def reduce(self, *args, **kwargs):
        return self.work(super().reduce(*args, **kwargs), self.chance)

    def all_reduce(self, *args, **kwargs):
        return self.work(super().all_reduce(*args, **kwargs), self.chance)

    def broadcast(self, *args, **kwargs):
        return self.work(super().broadcast(*args, **kwargs), self.chance)

    def all_to_all(self, *args, **kwargs):
        return self.work(super().all_to_all(*args, **kwargs), self.chance)


class Lane(list):
    """The events of one process group; all groups' go to one log."""

    def __init__(self, number: int, ranks: Sequence[int], log: list[Entry]) -> None:
        self.number, self.ranks, self.log = number, tuple(ranks), log

    def append(self, event: Event) -> None:
        self.log.append((self.number, self.ranks, event))


class Recorders:
    """Makes recorders with one log, whose works answer by a seed of this rank's own."""

    def __init__(self, seed: int, work: type[Doubtful] = Doubtful) -> None:
        self.log: list[Entry] = []
        self.made = 0
        self.work = work
        self.chance = random.Random(1000 * seed + dist.get_rank())

    def __call__(self, inner: C10dTransport, events: object = None) -> Recorder:
        ranks = dist.get_process_group_ranks(inner.group)
        self.made += 1
        return Recorder(inner, Lane(self.made, ranks, self.log), self.chance, self.work)


def all_logs(log: list[Entry]) -> list[list[Entry]]:
    logs: list = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)
    return logs


def assert_lanes_agree(logs: list[list[Entry]]) -> None:
    """In each process group all its ranks issue the same."""
    for a, b in combinations(range(len(logs)), 2):
        for lane in {number for number, ranks, _ in logs[a] if b in ranks}:
            mine, theirs = ([e for e in log if e[0] == lane] for log in (logs[a], logs[b]))
            assert mine == theirs, (a, b, lane)


def assert_one_order(logs: list[list[Entry]]) -> None:
    """Any two ranks issue what they have in common in one order, and all orders fit together."""
    assert_lanes_agree(logs)
    for a, b in combinations(range(len(logs)), 2):
        mine, theirs = [e for e in logs[a] if b in e[1]], [e for e in logs[b] if a in e[1]]
        assert mine == theirs, (a, b)
    order: TopologicalSorter = TopologicalSorter()
    for log in logs:
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        nodes = []
        for number, ranks, _ in log:
            seen[number, ranks] = seen.get((number, ranks), 0) + 1
            nodes.append((number, ranks, seen[number, ranks]))
        for before, after in pairwise(nodes):
            order.add(after, before)
    order.prepare()  # CycleError: ranks wait for each other in a ring


@contextmanager
def pair_with_log(
    seed: int,
    mesh: Sequence[int],
    *,
    build: type[nn.Module] = Net,
    rest: str = PLAIN,
    work: type[Doubtful] = Doubtful,
    **options,
):
    """A `dedicated` model with its twin, and the log of its collectives."""
    torch.manual_seed(100)
    twin, model = build(), build()
    model.load_state_dict(twin.state_dict())
    grid, recorders = mesh_of(mesh), Recorders(seed, work)
    settings = dmuon.DedicatedOptions(**options)
    own, _ = recorded(model, grid, recorders, options=settings, solver="greedy")
    if rest == FSDP:
        shard_rest(model, own, grid)
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    world = dist.get_world_size()
    recorders.log.clear()
    yield Both(model, twin, own, opt, ref, dist.get_rank(), world), recorders.log
    own.close()


CASES = [
    {},
    {"rest": FSDP},
    {"prefetch": 0},
    {"free_after_forward": False},
]


def train_and_compare(seed: int, mesh: Sequence[int], **case) -> None:
    with pair_with_log(seed, mesh, **case) as (pair, log):
        pair.train(range(3))
        logs = all_logs(log)
        tags = {event.tag for entry in logs for _, _, event in entry}
        assert {"flags", "gradients"} <= tags
        assert ("gradients across replicas" in tags) == (len(mesh) == 2)
        assert_one_order(logs)
        pair.check()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_no_collective_depends_on_what_is_completed(rank, world, mesh, case):
    for seed in range(3):
        train_and_compare(seed, mesh, **case)


@distributed(6)
def test_no_collective_depends_on_what_is_completed_in_two_replicas_of_three(rank, world):
    train_and_compare(0, (2, 3))


@distributed(4)
def test_no_collective_depends_on_what_is_completed_in_the_replicated_layout(rank, world):
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    recorders = Recorders(0)
    options = dmuon.ReplicatedOptions(bucket_bytes=4096, publish_bucket_bytes=4096)
    own, _ = dedicate(model, recorders, options=options)
    opt, ref = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32), reference_for(twin, lr=0.02)
    recorders.log.clear()
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        opt.step(), opt.zero_grad()
        for r in range(world):
            (loss_of(twin, batch(step, r)) / world).backward()
        ref.step(), ref.zero_grad()
    opt.synchronize()
    assert_one_order(all_logs(recorders.log))
    for name, weight in weights(model).items():
        assert torch.allclose(weight, weights(twin)[name], rtol=0, atol=1e-5), name
    own.close()


# ---- ranks that do not do the same -------------------------------------------------------


def skips_a_block(model, step, rank):
    model.order = [i for i in range(3) if i != (step + rank) % 3]


def skips_the_last(model, step, rank):
    model.order = [0, 1] if rank == 1 else [0, 1, 2]


def skips_the_first(model, step, rank):
    model.order = [1, 2] if rank == 1 else [0, 1, 2]


def skips_all(model, step, rank):
    model.order = [] if rank == 0 else [0, 1, 2]


def stops_short(model, step, rank):
    model.detached = rank == 1


DIFFERENT = [skips_a_block, skips_the_last, skips_the_first, skips_all, stops_short]


@pytest.mark.parametrize("prepare", DIFFERENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_one_order_where_ranks_skip_blocks(rank, world, mesh, prepare):
    for prefetch in (0, 1, 2):
        case = {"build": Skipping, "work": Late, "prefetch": prefetch}
        with pair_with_log(0, mesh, **case) as (pair, log):
            pair.prepare = prepare
            pair.train(range(3))
            assert_one_order(all_logs(log))
            pair.check()


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_one_order_where_a_rank_runs_no_backward(rank, world, mesh, forward):
    with pair_with_log(0, mesh, work=Late) as (pair, log):
        for step in range(4):
            if rank != step:
                pair.backward(step)
            elif forward:
                pair.loss(pair.model, step, rank)
            for r in range(world):
                if r != step:
                    (pair.loss(pair.twin, step, r) / world).backward()
            pair.advance()
        assert_one_order(all_logs(log))
        pair.check()


class Choosing(Net):
    """Uses all blocks, but not every matrix of the second."""

    whole = True

    def forward(self, tokens):
        x = self.tok(tokens)
        for i, block in enumerate(self.blocks):
            x = (
                x + block.down(x.repeat(1, 1, 3)[..., :56])
                if i == 1 and not self.whole
                else block(x)
            )
        return self.lm_head(self.mid(x))


def misses_a_matrix(model, step, rank):
    model.whole = rank != 1


def parts_of_blocks(name, module):
    return name.endswith((".up", ".down"))


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_each_process_groups_order_where_a_block_misses_a_gradient(rank, world, mesh):
    """Nothing tells that a gradient of a block that runs will never come, so its window waits for
    the end: the one freedom that is left, between process groups (docs/decisions/0007)."""
    with pair_with_log(0, mesh, build=Choosing, work=Late) as (pair, log):
        pair.prepare = misses_a_matrix
        pair.train(range(3))
        assert_lanes_agree(all_logs(log))
        pair.check()


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_one_order_where_the_branch_is_a_group_of_its_own(rank, world, mesh):
    case = {"build": Choosing, "work": Late, "groups": parts_of_blocks}
    with pair_with_log(0, mesh, **case) as (pair, log):
        pair.prepare = misses_a_matrix
        pair.train(range(3))
        assert_one_order(all_logs(log))
        pair.check()


# ---- memory ------------------------------------------------------------------------------


class Stack(nn.Module):
    """Large matrices and hardly any activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@distributed(4)
def test_gradients_on_their_way_take_no_more_memory_than_owners_need(rank, world, mesh):
    """Beside one bucket, at most what the owners of this column are to get of all gradients."""
    with pair_with_log(0, mesh, build=Stack, work=Prompt) as (pair, _):
        reducer = pair.own.runtime.reducer
        one = 4 * 64 * 64
        column = range(rank % mesh[-1], world, mesh[-1])
        mine = [i for i in range(8) if pair.own.owner_of(f"blocks.{i}.weight") in column]
        peak, send = 0, reducer._send

        def held() -> int:
            buffers = (s.buffer.flat for bucket in reducer._buckets for s in bucket.flights)
            return sum(flat.untyped_storage().nbytes() for flat in buffers)

        def watched(live):
            nonlocal peak
            peak = max(peak, held())
            send(live)

        reducer._send = watched
        for _ in range(3):
            pair.model(torch.randn(2, 64)).square().mean().backward()
            pair.opt.step()
        kept = len(mine) if len(mesh) == 2 else 0
        assert one <= peak <= (1 + kept) * one, (peak / one, mine)
        assert held() == 0
