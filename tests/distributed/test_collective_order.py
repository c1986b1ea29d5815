"""One order of all collectives over all process groups, on every rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import chain, combinations, pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dmuon
import dmuon.comm.transport as transport_module
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import IN_TURN, layouts
from tests.distributed.models import Net, Ordered, Pieces
from tests.distributed.twins import both
from tests.internals import C10dTransport, Work
from tests.transports import Event, RecordingTransport

# One collective: the number of its process group, the ranks in it, and what it does.
Entry = tuple[int, tuple[int, ...], Event]


@dataclass
class Doubtful:
    """Says by chance, in a ``share`` of the cases, whether it is completed; otherwise that it is
    not. It never waits to find out: what another rank launches last must not be waited for here.
    """

    inner: Work
    chance: random.Random
    share: float

    def wait(self) -> None:
        self.inner.wait()

    def is_completed(self) -> bool:
        return self.chance.random() < self.share and self.inner.is_completed()


@dataclass
class Recorder(RecordingTransport):
    """Notes every collective together with its process group."""

    chance: random.Random = field(default_factory=random.Random)
    share: float = 0.0

    def wrapped(self, work: Work, tag: str) -> Work:
        return Doubtful(work, self.chance, self.share)


class GroupEvents(list):
    """The events of one process group; all groups' go to one log."""

    def __init__(self, number: int, ranks: Sequence[int], log: list[Entry]) -> None:
        self.number, self.ranks, self.log = number, tuple(ranks), log

    def append(self, event: Event) -> None:
        self.log.append((self.number, self.ranks, event))


class Recorders:
    """Makes recorders with one log, whose works answer by a seed of this rank's own."""

    def __init__(self, seed: int = 0, share: float = 0.0) -> None:
        self.log: list[Entry] = []
        self.made, self.share = 0, share
        self.chance = random.Random(1000 * seed + dist.get_rank())

    def __call__(self, inner: C10dTransport, events: object = None) -> Recorder:
        ranks = dist.get_process_group_ranks(inner.group)
        self.made += 1
        events = GroupEvents(self.made, ranks, self.log)
        return Recorder(inner, events, chance=self.chance, share=self.share)


def assert_groups_agree(logs: list[list[Entry]]) -> None:
    """In each process group all its ranks issue the same."""
    for a, b in combinations(range(len(logs)), 2):
        for group in {number for number, ranks, _ in logs[a] if b in ranks}:
            mine, theirs = ([e for e in log if e[0] == group] for log in (logs[a], logs[b]))
            assert mine == theirs, (a, b, group)


def assert_one_order(logs: list[list[Entry]]) -> None:
    """Any two ranks issue what they have in common in one order, and all orders fit together."""
    assert_groups_agree(logs)
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
def logged(build=Net, layout="dedicated", *, seed=0, share=0.0, **kwargs):
    """A model with its twin, and the log of its collectives; on four ranks two replicas of two."""
    recorders, world = Recorders(seed, share), dist.get_world_size()
    mesh = (2, world // 2) if world > 2 and layout != "reduced" else (world,)
    with both(build, layout, mesh=mesh, transport=recorders, **kwargs) as pair:
        recorders.log.clear()
        yield pair, recorders.log


CASES = [
    ("dedicated", {}),
    ("dedicated fsdp", {}),
    ("dedicated", {"prefetch": 0}),
    ("dedicated kept", {}),
    ("reduced", {"bucket_bytes": 4096, "publish_bucket_bytes": 4096}),
]


@distributed(4)
def test_no_collective_depends_on_what_is_completed(rank, world):
    for seed, (layout, options) in enumerate(CASES):
        with logged(Net, layout, seed=seed, share=0.5, options=options) as (pair, log):
            pair.train(range(2))
            logs = gathered(log)
            tags = {event.tag for entry in logs for _, _, event in entry}
            assert {"flags", "gradients"} <= tags
            replicas = world > 2 and layout != "reduced"
            assert ("gradients across replicas" in tags) == replicas
            assert_one_order(logs)
            pair.check()


# ---- what several ranks own, in one collective ------------------------------------------


def of_rank(rank, sizes, dtype=torch.float32):
    """What a rank has of the parts of every rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def sizes_of(world):
    """Sizes of the parts of all ranks: uneven, equal, of one rank, of one rank almost alone."""
    yield [5 + 3 * r for r in range(world)]
    yield [0, *([7] * (world - 1))] if world > 1 else [7]
    yield [4] * world
    yield [1] * world
    yield [0] * (world - 1) + [6]
    yield [100] + [1] * (world - 1)


def as_grouping(patch, world):
    """A backend that launches lists of uneven tensors together, as torch does it for NCCL: by a
    broadcast or a reduction for each rank, in place. Equal ones it would copy."""
    issued = []

    def check(tensors, mine):
        assert len(tensors) == world and len({t.numel() for t in tensors}) > 1
        assert mine is tensors[dist.get_rank()]
        issued.append(len(tensors))

    def one_by_one(issue, tensors, **how):
        for r, tensor in enumerate(tensors):
            if tensor.numel():
                work = issue(tensor, r, **how)
                work.wait()
        return work

    def all_gather(tensors, mine, **how):
        check(tensors, mine)
        return one_by_one(dist.broadcast, tensors, **how)

    def reduce_scatter(mine, tensors, **how):
        check(tensors, mine)
        return one_by_one(dist.reduce, tensors, **how)

    patch.setattr(transport_module, "backend_of", lambda *_: "nccl")
    patch.setattr(dist, "all_gather", all_gather)
    patch.setattr(dist, "reduce_scatter", reduce_scatter)
    return issued


@pytest.mark.parametrize(("grouping", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
@distributed(3)
def test_parts_of_any_sizes_reach_every_rank_and_sums_their_owners(rank, world, grouping, dtype):
    with pytest.MonkeyPatch.context() as patch:
        transport = C10dTransport(range(world))
        issued = as_grouping(patch, world) if grouping else []
        for sizes in sizes_of(world):
            everyone = [of_rank(r, sizes, dtype) for r in range(world)]
            parts = of_rank(rank, sizes, dtype)
            for by in ("messages", "ring", "broadcasts"):
                with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
                    transport.all_gather(parts, tag="gathered", by=by).wait()
                if not grouping and len({*sizes}) == 1 < world:
                    assert gathered.called is (by == "ring")
                for r, part in enumerate(parts):
                    assert torch.equal(part, everyone[r][r]), (sizes, r, by)
                parts = of_rank(rank, sizes, dtype)
            work = transport.reduce_scatter(parts, tag="reduced")
            for _ in range(2):  # more than one segment may wait for it
                work.wait()
            assert work.is_completed()
            expected = torch.stack([e[rank].double() for e in everyone]).sum(0)
            torch.testing.assert_close(
                parts[rank].double(), expected, rtol=0, atol=0.1 if dtype.itemsize < 4 else 1e-5
            )
        several = [sizes for sizes in sizes_of(world) if sum(map(bool, sizes)) > 1]
        assert len(issued) == 4 * len(several) * grouping
        transport.close()


@distributed(4)
def test_a_sum_does_not_depend_on_the_rank_that_it_goes_to(rank, world):
    """Gradients are added in the order of the ranks, so another plan gives the same bits."""
    transport, found = C10dTransport(range(world)), []
    for turn in range(world):
        parts = of_rank(rank, [40] * world)
        same = of_rank(10 + rank, [40])[0]
        parts[turn].copy_(same)
        transport.reduce_scatter(parts, tag="reduced").wait()
        found.append(parts[turn].tolist() if turn == rank else None)
    (mine,) = [one for one in found if one is not None]
    assert len({tuple(one) for one in gathered(mine)}) == 1
    transport.close()


@distributed(2)
def test_a_group_takes_as_many_all_gathers_as_one_owner_has_parts_of_it(rank, world):
    """Whole parameters of an owner are one part; of a stack whose matrices have several owners each
    stretch of one owner's is another."""
    with both(Pieces, transport=RecordingTransport, **IN_TURN) as pair:
        pair.train([0])
        pair.events.clear()
        pair.train([1])
        gathers = [event for event in pair.events if event.op == "all_gather"]
        found = {event.tag: [e.peer for e in gathers if e.tag == event.tag] for event in gathers}
        for peers in found.values():
            assert len(peers) == max(Counter(chain(*peers)).values())
        assert max(map(len, found.values())) > 1
        reduced = [event for event in pair.events if event.op == "reduce_scatter"]
        assert len(reduced) == len(found) // 2, "forward and backward; one for gradients"
        assert len({event.op for event in pair.events} & {"broadcast", "reduce"}) == 0
        pair.check()


# ---- ranks that do not do the same -------------------------------------------------------


def skips_a_block(model, step, rank):
    model.order = [i for i in range(3) if i != (step + rank) % 3]


def skips_all(model, step, rank):
    model.order = [] if rank == 0 else [0, 1, 2]


def stops_short(model, step, rank):
    model.detached = rank == 1


DIFFERENT = [skips_a_block, skips_all, stops_short]


@pytest.mark.parametrize("prepare", DIFFERENT, ids=lambda f: f.__name__)
@distributed(4)
def test_one_order_where_ranks_skip_blocks(rank, world, prepare):
    with logged(Ordered, options={"prefetch": 2}, prepare=prepare) as (pair, log):
        pair.train(range(2))
        assert_one_order(gathered(log))
        pair.check()


@distributed(4)
def test_one_order_where_a_rank_runs_no_backward(rank, world):
    for forward in (False, True):
        with logged() as (pair, log):
            for step in range(2):
                if rank != step:
                    pair.backward(step)
                elif forward:
                    pair.loss(pair.model, step, rank)
                pair.joint_backward(step, without=step)
                pair.advance()
            assert_one_order(gathered(log))
            pair.check()


class Choosing(Net):
    """Uses all blocks, but not every matrix of the second."""

    whole = True

    def body(self, x):
        for i, block in enumerate(self.blocks):
            if i == 1 and not self.whole:
                x = x + block.down(x.repeat(1, 1, 3)[..., :56])
            else:
                x = block(x)
        return x


def misses_a_matrix(model, step, rank):
    model.whole = rank != 1


def parts_of_blocks(name, module):
    return name.endswith((".up", ".down"))


@distributed(4)
def test_orders_where_a_block_misses_a_gradient(rank, world):
    """Nothing tells that a gradient of a block that runs will never come, so its bucket waits for
    the end: the one freedom that is left, between process groups (docs/decisions/0007). There is
    none where the branch is a group of its own."""
    for groups, check in [(None, assert_groups_agree), (parts_of_blocks, assert_one_order)]:
        case = {"options": {"groups": groups}, "prepare": misses_a_matrix}
        with logged(Choosing, **case) as (pair, log):
            pair.train(range(3))
            check(gathered(log))
            pair.check()


# Which ranks use the spare layer at a step.
PATTERNS = [lambda step, rank: (step + rank) % 2 == 0, lambda step, rank: step % 3 == 0]


@layouts("dedicated", "reduced")
def test_collectives_are_the_same_on_every_rank_whatever_the_gradients(rank, world, layout):
    small = {"bucket_bytes": 4096, "publish_bucket_bytes": 4096} if layout == "reduced" else {}
    for uses_spare in PATTERNS:
        with both(Net, layout, options=small, transport=RecordingTransport) as pair:
            pair.events.clear()
            for step in range(3):
                pair.model.use_spare = uses_spare(step, rank)
                if not (step == 2 and rank == 0):  # one rank skips its backward altogether
                    pair.backward(step)
                dmuon.clip_grad_norm_(pair.model, 1.0)
                pair.opt.step()
                pair.opt.zero_grad()
            everyone = gathered(pair.events)
            assert everyone[0] == everyone[1]
            assert len(everyone[0]) > 3 * 8
