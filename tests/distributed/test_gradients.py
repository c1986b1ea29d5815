"""What backward does: reduction to owners, missing gradients, accumulation, clipping."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dmuon
import dmuon.comm.streams
from dmuon.types import ConsensusError, DmuonError
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    dedicate,
    largest_difference,
    loss_of,
    reference_for,
    seeded,
    weights,
    wrap,
)
from tests.transports import RecordingTransport

DDP = pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
FP32 = {"ns_dtype": torch.float32, "lr": 0.02}

# Which ranks use the spare layer at a step.
PATTERNS = {
    "one rank": lambda step, rank: rank != 1,
    "all ranks": lambda step, rank: False,
    "alternating": lambda step, rank: (step + rank) % 2 == 0,
    "every third step": lambda step, rank: step % 3 == 0,
    "only rank 0": lambda step, rank: rank == 0,
}


def joint_backward(twin, step, world, uses_spare=lambda step, rank: False):
    for r in range(world):
        twin.use_spare = uses_spare(step, r)
        (loss_of(twin, batch(step, r)) / world).backward()


@DDP
@distributed(2)
def test_after_backward_matrices_have_no_grad_and_the_rest_the_mean(rank, world, ddp):
    model = seeded(Net)
    twin = copy.deepcopy(model)
    wrapped = wrap(model, ddp)
    own = dmuon.dedicate_params(wrapped)
    dmuon.Muon(wrapped, **FP32)
    loss_of(wrapped, batch(0, rank)).backward()
    joint_backward(twin, 0, world)
    routed = {p.name: p.algorithm.value for p in own.plan.specs.parameters}
    twins = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        if routed[name] == "muon" or twins[name].grad is None:
            assert p.grad is None, name
        else:
            assert (p.grad - twins[name].grad).abs().max() <= 1e-6, name
    own.close()


@distributed(2)
def test_clipping_a_non_finite_norm(rank, world):
    model = seeded(Net)
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    loss = loss_of(model, batch(0, rank))
    (loss * (float("inf") if rank == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="total norm"):
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(dmuon.clip_grad_norm_(model, 1.0))
    opt.zero_grad()
    loss_of(model, batch(1, rank)).backward()
    assert torch.isfinite(dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    own.close()


@distributed(2)
def test_step_twice_without_a_backward_leaves_the_matrices(rank, world):
    model = seeded(Net)
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, **FP32)
    opt.step()  # before any backward: nothing to do
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    opt.zero_grad()
    opt.synchronize()
    before = weights(model)
    opt.step()
    opt.synchronize()
    assert largest_difference(before, weights(model)) == 0.0
    own.close()


class _FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fail = False

    def forward(self, x):
        if self.fail:
            x = x.clone()
            x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        raise RuntimeError("planted")


class Failing(Net):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.trap = _FailsOnce()

    def forward(self, tokens):
        x = self.tok(tokens)
        for i, block in enumerate(self.blocks):
            x = self.trap(block(x)) if i == 1 else block(x)
        return self.lm_head(self.mid(x))


@pytest.mark.parametrize("who", ["one rank", "all ranks"])
@distributed(2)
def test_training_goes_on_after_a_backward_that_raised(rank, world, who):
    model = seeded(Failing)
    twin = seeded(Failing)
    own = dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions(bucket_bytes=4096))
    opt = dmuon.Muon(model, **FP32)
    reference = reference_for(twin, lr=0.02)
    for step in range(3):
        model.trap.fail = step == 1 and (who == "all ranks" or rank == 0)
        loss = loss_of(model, batch(step, rank))
        if model.trap.fail:
            with pytest.raises(RuntimeError, match="planted"):
                loss.backward()
        else:
            loss.backward()
        if step == 1:
            opt.zero_grad()  # every rank drops this batch
            continue
        opt.step()
        opt.zero_grad()
        joint_backward(twin, step, world)
        reference.step()
        reference.zero_grad()
    opt.synchronize()
    assert largest_difference(weights(model), weights(twin)) <= 1e-5
    own.close()


class SparseAtWill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 6))
        self.fc = nn.Linear(6, 5)
        self.sparse = False

    def forward(self, tokens):
        return self.fc(F.embedding(tokens, self.table, sparse=self.sparse))


@distributed(2)
def test_a_sparse_gradient_on_one_rank_is_an_error_on_every_rank(rank, world):
    model = seeded(SparseAtWill)
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, **FP32)
    model.sparse = rank == 1
    with pytest.raises(DmuonError, match=r"'table'.*dense"):
        model(torch.arange(4)).sum().backward()
    model.sparse = False
    opt.zero_grad()
    model(torch.arange(4)).sum().backward()  # and the next round is in order
    opt.step()
    opt.synchronize()
    assert_equal_on_all_ranks(model, own.runtime.transport)
    own.close()


@pytest.mark.parametrize("layout", ["replicated", "dedicated"])
@distributed(2)
def test_a_sparse_gradient_where_no_host_can_read_is_an_error_at_the_next_step(rank, world, layout):
    """On both ranks, though only one of them misses a gradient and reads the flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmuon.comm.streams, "host_can_read", lambda device: False)
        model, twin = seeded(SparseAtWill), seeded(SparseAtWill)
        own = dmuon.dedicate_params(model, layout=layout)
        opt, reference = dmuon.Muon(model, **FP32), reference_for(twin, lr=0.02)

        def advance(sparse_on=None):
            model.sparse = rank == sparse_on
            model(torch.arange(4) + rank).square().sum().backward()
            for r in range(world):
                (twin(torch.arange(4) + r).square().sum() / world).backward()
                if r == sparse_on:
                    twin.table.grad = None  # counts as missing
            reference.step(), reference.zero_grad()
            opt.step()

        advance(sparse_on=0)  # nobody raises yet
        opt.zero_grad()
        with pytest.raises(DmuonError, match=r"'table'.*not dense.*sparse=False") as caught:
            advance()
        texts = own.runtime.transport.gather_objects(str(caught.value))
        assert texts[0] == texts[1]
        opt.step(), opt.zero_grad()  # told once; the gradients are in order
        advance()
        opt.synchronize()
        with own.materialized(model):
            assert largest_difference(weights(model), weights(twin)) <= 1e-5
            assert_equal_on_all_ranks(model, own.runtime.transport)
        own.close()


@pytest.mark.parametrize("pattern", PATTERNS)
@distributed(4)
def test_collectives_are_the_same_on_every_rank_whatever_the_gradients(rank, world, pattern):
    model = seeded(Net)
    own, transport = dedicate(
        model,
        RecordingTransport,
        options=dmuon.ReplicatedOptions(bucket_bytes=4096, publish_bucket_bytes=4096),
    )
    opt = dmuon.Muon(model, **FP32)
    transport.events.clear()
    for step in range(3):
        model.use_spare = PATTERNS[pattern](step, rank)
        if not (step == 2 and rank == 0):  # one rank skips its backward altogether
            loss_of(model, batch(step, rank)).backward()
        dmuon.clip_grad_norm_(model, 1.0)
        opt.step()
        opt.zero_grad()
    everyone = transport.gather_objects(transport.events)
    assert all(events == everyone[0] for events in everyone)
    assert len(everyone[0]) > 3 * 8
    own.close()


@distributed(2)
def test_users_own_collectives_in_between(rank, world):
    """In backward, while ours are in flight: other group, so no crossing, whoever is late."""

    class Talking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            total = grad.clone()
            torch.distributed.all_reduce(total)
            return total / world

    class Synced(Net):
        def forward(self, tokens):
            x = self.tok(tokens)
            for block in self.blocks:
                x = Talking.apply(block(x))
            if self.use_spare:
                x = x + self.spare(x)
            return self.lm_head(self.mid(x))

    model = seeded(Synced)
    own = dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions(bucket_bytes=2048))
    opt = dmuon.Muon(model, **FP32)
    for step in range(4):
        model.use_spare = (step + rank) % 2 == 0
        loss_of(model, batch(step, rank)).backward()
        torch.distributed.all_reduce(torch.ones(3))
        opt.step()
        torch.distributed.all_reduce(torch.ones(5))
        opt.zero_grad()
    opt.synchronize()
    assert_equal_on_all_ranks(model, own.runtime.transport)
    own.close()


@distributed(2)
def test_a_model_that_differs_between_ranks_is_refused_by_name(rank, world):
    model = seeded(Net, hidden=56 if rank == 0 else 48)
    with pytest.raises(ConsensusError, match=r"rank 1 has .*up\.weight.*48"):
        dmuon.dedicate_params(model)
