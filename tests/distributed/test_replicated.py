"""The `replicated` layout: when updates are seen, what else gradients do, and what is around it."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.comm.transport import C10dTransport
from dmuon.types import ConsensusError, DmuonError
from tests.accelerator import host_cannot_read
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    largest_difference,
    loss_of,
    seeded,
    weights,
)
from tests.distributed.owners import (
    MUON,
    PLAIN,
    REPLICATED,
    both,
    children_alone,
    follow,
    gathered,
    layouts,
    mesh_of,
    without_root,
)
from tests.transports import Clock, ClockTransport, RecordingTransport

REDUCING = dmuon.ReplicatedOptions(reduce_to_owner=True)
# One matrix a batch and a batch a bucket, so that there is something to overlap.
SINGLY = {
    "options": {"bucket_bytes": 2048, "publish_bucket_bytes": 2048},
    "request": {"planner": dmuon.PlannerOptions(max_batch=1)},
}

# ---- when published values are seen ----------------------------------------------------------


class LazyTransport(RecordingTransport):
    """Updates arrive only when somebody waits for them; ``waited`` counts the waits."""

    waited = 0

    def broadcast(self, tensor, src, *, tag):
        work = super().broadcast(tensor, src, tag=tag)
        return _Watched(work, self) if tag == "updates" else work

    @property
    def issued(self) -> int:
        return sum(event.tag == "updates" for event in self.events)


class _Watched:
    def __init__(self, work, transport):
        self.work, self.transport = work, transport

    def wait(self):
        self.work.wait()
        self.transport.waited += 1


@contextmanager
def after_a_step(publish="async"):
    """A model just after `step`, and what its weights will be."""
    settings = {"muon": {"lr": 0.05}, **SINGLY}
    with both(Net, REPLICATED, only={"publish": "sync"}, **settings) as pair:
        pair.train([0])
        expected = weights(pair.model)
    settings |= {"only": {"publish": publish}, "transport": LazyTransport}
    with both(Net, REPLICATED, **settings) as pair:
        pair.backward(0)
        pair.opt.step()
        yield pair, expected


@distributed(2)
def test_step_returns_before_updates_are_waited_for(rank, world):
    with after_a_step() as (pair, expected):
        assert pair.transport.waited == 0
        assert largest_difference(weights(pair.model), expected) > 1e-3, "not published yet"
        pair.opt.synchronize()
        assert pair.transport.waited == pair.transport.issued > 4
        assert largest_difference(weights(pair.model), expected) == 0.0
    with after_a_step(publish="sync") as (pair, expected):  # read by code that holds the tensors
        assert largest_difference(weights(pair.model), expected) == 0.0


@distributed(2)
def test_a_block_waits_for_its_own_matrices_only(rank, world):
    with after_a_step() as (pair, expected):
        pair.model.blocks[0](torch.randn(2, 24))
        assert 0 < pair.transport.waited < pair.transport.issued
        for name, p in pair.model.blocks[0].named_parameters():
            assert torch.equal(p, expected[f"blocks.0.{name}"]), name
        pair.model(batch(0, rank)[0])
        assert largest_difference(weights(pair.model), expected) == 0.0


def forward(pair, train):
    pair.model.train(train)
    with torch.set_grad_enabled(train):
        pair.model(batch(5, pair.data_rank)[0])


READ = [
    lambda pair: pair.model.state_dict(),
    lambda pair: pair.model.blocks[1].state_dict(prefix="blocks.1."),
    lambda pair: forward(pair, True) or weights(pair.model),
    lambda pair: forward(pair, False) or weights(pair.model),
    lambda pair: pair.whole(),
    lambda pair: pair.own.close() or weights(pair.model),
]


@distributed(2)
def test_reading_right_after_step_sees_published_values(rank, world):
    for read in READ:
        with after_a_step() as (pair, expected):
            found = read(pair)
            assert found and all(torch.equal(v, expected[n]) for n, v in found.items())


@distributed(2)
def test_closing_gives_ddp_back(rank, world):
    """DDP takes one communication hook for life; ours steps aside and comes back."""
    model = seeded(Net)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        own = dmuon.dedicate_params(wrapped, options=REDUCING)
        opt = dmuon.Muon(wrapped, lr=0.02)
        loss_of(wrapped, batch(0, rank)).backward()
        opt.step()
        opt.zero_grad()
        own.close()
        with pytest.raises(ValueError, match="closed"):
            opt.step()
        loss_of(wrapped, batch(1, rank)).backward()
        mine = model.blocks[0].up.weight.grad.clone()
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.allclose(mine, total / world, atol=1e-7), "DDP averages by itself"
        wrapped.zero_grad()


@distributed(2)
def test_models_that_bypass_wait_points_are_trained_right(rank, world):
    for way in (without_root, children_alone):
        follow(Net, REPLICATED, transport=LazyTransport, loss_of=way, **SINGLY)


@distributed(2)
def test_slow_collectives_cost_the_critical_path_not_their_sum(rank, world):
    clock = Clock()
    slow = {"transport": partial(ClockTransport, clock=clock, delay_s=1.0), **SINGLY}
    with both(lambda: Net(layers=6), REPLICATED, only={"publish": "sync"}, **slow) as pair:
        pair.train([0])
        pair.backward(1)
        pair.events.clear()
        begin = clock.now
        pair.opt.step()
        assert sum(e.tag == "updates" for e in pair.events) >= 12
        assert clock.now - begin == 2, "the verdict, and then all updates at once"


@distributed(2)
def test_bytes_handed_to_collectives_follow_the_shapes(rank, world):
    with both(Net, REPLICATED, muon={"ns_dtype": torch.bfloat16}) as pair:
        pair.backward(0)
        pair.opt.step()
        stats = pair.opt.stats()
        # Gradients in float32 once; updates in bfloat16, the padding of a few buffers beside.
        assert stats["bytes"]["gradients"] == 4 * pair.own.numel()
        assert 0 <= stats["bytes"]["updates"] - 2 * sum(pair.matrices.values()) <= 64 * 64
        rms = stats["update_rms"]
        assert rms.keys() == pair.matrices.keys() and rms["spare.weight"] == 0.0
        assert all(0.1 < v < 0.3 for n, v in rms.items() if "spare" not in n)  # aims at 0.2
        assert gathered(rms) == [rms] * world
        assert stats["ns_ms"] > 0


# ---- gradients -------------------------------------------------------------------------------


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_clipping_a_non_finite_norm(rank, world, layout):
    with both(Net, layout) as pair:
        loss = pair.loss(pair.model, 0, rank)
        (loss * (float("inf") if rank == 1 else 1.0)).backward()
        with pytest.raises(RuntimeError, match="total norm"):
            dmuon.clip_grad_norm_(pair.model, 1.0, error_if_nonfinite=True)
        assert not torch.isfinite(dmuon.clip_grad_norm_(pair.model, 1.0))
        pair.opt.zero_grad()
        pair.backward(1)
        assert torch.isfinite(dmuon.clip_grad_norm_(pair.model, 1.0, error_if_nonfinite=True))


class SparseAtWill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 6))
        self.out = nn.Linear(6, 5)
        self.sparse = False

    def forward(self, tokens):
        return self.out(F.embedding(tokens, self.table, sparse=self.sparse))


@distributed(2)
def test_a_sparse_gradient_on_one_rank_is_an_error_on_every_rank(rank, world):
    with both(SparseAtWill, REPLICATED) as pair:
        pair.model.sparse = rank == 1
        with pytest.raises(DmuonError, match=r"'table'.*dense"):
            pair.model(torch.arange(4)).sum().backward()
        pair.model.sparse = False
        pair.opt.zero_grad()
        pair.model(torch.arange(4)).sum().backward()  # and the next round is in order
        pair.opt.step()
        pair.opt.synchronize()
        assert_equal_on_all_ranks(pair.model)


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_a_sparse_gradient_where_no_host_can_read_is_an_error_at_the_next_step(rank, world, layout):
    """On both ranks, though only one of them misses a gradient and reads the flags."""
    with host_cannot_read(), both(SparseAtWill, layout) as pair:

        def advance(sparse_on=None):
            pair.model.sparse = rank == sparse_on
            pair.model(torch.arange(4) + rank).square().sum().backward()
            for r in range(world):
                (pair.twin(torch.arange(4) + r).square().sum() / world).backward()
                if r == sparse_on:
                    pair.twin.table.grad = None  # counts as missing
            pair.ref.step(), pair.ref.zero_grad()
            pair.opt.step()

        advance(sparse_on=0)  # nobody raises yet
        pair.opt.zero_grad()
        with pytest.raises(DmuonError, match=r"'table'.*not dense.*sparse=False") as caught:
            advance()
        assert len(set(gathered(str(caught.value)))) == 1
        pair.opt.step(), pair.opt.zero_grad()  # told once; the gradients are in order
        advance()
        pair.check()


# ---- around a model --------------------------------------------------------------------------


class Used(Net):
    """Every parameter is used, as DDP without find_unused_parameters wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.use_spare = True


@distributed(2)
def test_ddp_options_a_mesh_and_compiled_models(rank, world):
    ways = [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.005},
        {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"device_mesh": mesh_of((world,))},
    ]
    for way in ways:
        mesh = way.get("device_mesh")
        follow(Used, REPLICATED, wrap=partial(DistributedDataParallel, **way), mesh=mesh)
    follow(Used, REPLICATED, wrap=partial(torch.compile, backend="eager"))
    torch.compiler.reset()


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 6)
        self.a = nn.Linear(6, 9, bias=False)
        self.b = nn.Linear(9, 50, bias=False)
        self.w_empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return self.b(self.a(self.tok(tokens))) * self.scale


class OnlyMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(9, 7, bias=False)
        self.b = nn.Linear(7, 12, bias=False)

    def forward(self, tokens):
        return self.b(self.a(F.one_hot(tokens, 50).float()[..., :9]))


def norm_loss(model, inputs):
    return model(inputs[0]).square().sum(-1).add(1).sqrt().mean()


@distributed(4)
def test_models_of_unusual_make_up(rank, world):
    follow(TwoMatrices, REPLICATED)  # more ranks than matrices
    follow(OnlyMatrices, REPLICATED, loss_of=norm_loss)


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_the_handle_may_be_dropped_and_the_model_still_dies(rank, world, layout):
    model = seeded(Net)
    asked = {"layout": "dedicated"} if layout == PLAIN else {"options": REDUCING}
    seen = [weakref.ref(model), weakref.ref(dmuon.dedicate_params(model, **asked))]
    gc.collect()
    assert seen[1]() is not None, "the model keeps it"
    opt = dmuon.Muon(model, **MUON)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
    opt.synchronize()
    seen.append(weakref.ref(model.blocks[0].up.weight))
    del model, opt
    gc.collect()  # the model, which keeps its ownership
    gc.collect()  # that one
    assert [ref() for ref in seen] == [None] * 3


@distributed(2)
def test_a_model_that_differs_between_ranks_is_refused_by_name(rank, world):
    model = seeded(Net, hidden=56 if rank == 0 else 48)
    with pytest.raises(ConsensusError, match=r"rank 1 has .*up\.weight.*48"):
        dmuon.dedicate_params(model)


@distributed(2)
def test_our_group_ends_with_torch_distributed(rank, world):
    """Whoever forgets `close` must not carry our group's threads into the interpreter's exit."""
    transport = C10dTransport(range(world))
    dist.barrier()  # the other one may still be connecting
    dist.destroy_process_group(transport.group)  # as destroying all of them does
    gc.collect()
    with pytest.raises(ValueError, match="process group is gone"):
        transport.group  # noqa: B018
