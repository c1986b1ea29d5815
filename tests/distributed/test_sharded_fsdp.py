"""What FSDP2 offers, with the `sharded` layout on top: everything as with AdamW."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from tests.distributed.fsdp import TOLERANCE, advance, assert_close, follow, fsdp
from tests.distributed.harness import distributed
from tests.distributed.sharded import dedicated, pair, reference
from tests.transports import DelayingTransport

SLOW = partial(DelayingTransport, delay_s=0.005)


def take_gradients(both):
    """Give the twin the full gradients of the parallelized model, in the twin's dtype."""
    for p, twin in zip(both.model.parameters(), both.twin.parameters(), strict=True):
        twin.grad = None if p.grad is None else whole_tensor(p.grad).to(twin.dtype)


def reads_published_values(both, opt, step):
    """A forward pass right after `step` sees what it sees once everything has landed."""
    with torch.no_grad():
        first = loss_of(both.model, batch(step, both.data_rank))
        opt.synchronize()
        assert torch.equal(first, loss_of(both.model, batch(step, both.data_rank)))
    both.model.reshard()  # without a backward the root stays gathered, and has other parameters


# ---- gradient accumulation ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["every backward", "set_requires_gradient_sync", "no_sync"])
@distributed(2)
def test_accumulated_gradients_equal_one_big_batch(rank, world, how):
    both = fsdp()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(2):
            for last in (False, True):
                number = 2 * step + last
                if how == "set_requires_gradient_sync":
                    both.model.set_requires_gradient_sync(last)
                quiet = how == "no_sync" and not last
                with dmuon.no_sync(both.model) if quiet else nullcontext():
                    (loss_of(both.model, batch(number, rank)) / 2).backward()
                assert not quiet or all(p.grad is None for p in both.model.parameters())
                both.joint_backward(number)
            for p in both.twin.parameters():
                p.grad /= 2
            advance(opt, ref)
    assert_close(both)


@distributed(2)
def test_no_sync_puts_back_what_was_set(rank, world):
    both = fsdp()
    with dedicated(both.model):
        with dmuon.no_sync(both.model), dmuon.no_sync(both.model):
            both.backward(0)
        both.both_backward(0)
        for p, twin in zip(both.model.parameters(), both.twin.parameters(), strict=True):
            assert torch.allclose(whole_tensor(p.grad), 2 * twin.grad, atol=1e-6)


# ---- models and policies -----------------------------------------------------------------


class Checkpointed(ParallelModel):
    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(x)


class Tied(ParallelModel):
    """The head is the embedding, and keys are queries."""

    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.tok.weight
        for block in self.blocks:
            block.attention.k_proj.weight = block.attention.q_proj.weight


def wrap(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def shard_root(model, mesh):
    return fully_shard(model, mesh=mesh)


def shard_together(model, mesh):
    """Both blocks are one unit: running the first gathers the second."""
    fully_shard(list(model.blocks), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_inside(model, mesh):
    """Units in units, and blocks that are no unit."""
    for block in model.blocks:
        fully_shard(block.mlp, mesh=mesh)
    return fully_shard(model, mesh=mesh)


SETTINGS = {
    "units stay gathered": {"reshard_after_forward": False},
    "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "the root is the unit": {"shard": shard_root},
    "all blocks are one unit": {"shard": shard_together},
    "units in units": {"shard": shard_inside},
    "checkpoint in forward": {"build": Checkpointed},
    "checkpoint_wrapper": {"change": wrap},
    "tied weights": {"build": Tied},
}


@pytest.mark.parametrize("setting", SETTINGS)
@distributed(2)
def test_what_fsdp_offers(rank, world, setting):
    both = fsdp(**SETTINGS[setting])
    with dedicated(both.model) as (own, _):
        assert own.owner_of("blocks.1.mix.weight") in range(world)
        assert not any("wrapped" in name for r in range(world) for name in own.owned_by(r))
        if setting == "tied weights":
            named = {p.name: p for p in own.plan.specs.parameters}
            matrices = {m.name for m in own.plan.specs.matrices}
            assert "tied" in named["tok.weight"].reason and "lm_head.weight" not in named
            assert "blocks.0.attention.q_proj.weight" in matrices
            assert "blocks.0.attention.k_proj.weight" not in matrices
    follow(both, 3, transport=SLOW)
    assert_close(both)


@distributed(4)
def test_resharding_to_a_smaller_mesh_after_forward(rank, world):
    both = fsdp(reshard_after_forward=2)
    follow(both, 2)
    assert_close(both)


@pytest.mark.parametrize("masters", [False, True], ids=["float32 shards", "bfloat16 shards"])
@distributed(2)
def test_compute_in_bfloat16(rank, world, masters):
    """By FSDP2's policy, or with master weights behind parameters of low precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both = fsdp(
        change=(lambda model: model.to(torch.bfloat16)) if masters else None,
        **({} if masters else {"mp_policy": policy}),
    )
    both.twin.float()
    with dedicated(both.model, master_weights=masters) as (_, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.backward(step)
            take_gradients(both)
            advance(opt, ref)
            reads_published_values(both, opt, step + 1)
        for (name, p), twin in zip(both.model.named_parameters(), both.twin.parameters()):
            kept = whole_tensor(opt.state[p]["master_weight"] if masters else p)
            assert float((kept - twin).abs().max()) <= TOLERANCE, name
            assert torch.equal(whole_tensor(p), kept.to(p.dtype)), name


@distributed(2)
def test_frozen_parameters(rank, world):
    both = fsdp(change=lambda model: model.blocks[0].mlp.requires_grad_(False))
    before = whole_tensor(both.model.blocks[0].mlp.up.weight).clone()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.both_backward(step)
            advance(opt, ref)
        opt.synchronize()
        assert torch.equal(whole_tensor(both.model.blocks[0].mlp.up.weight), before)
        assert_close(both)


# ---- who gathers what, and when ----------------------------------------------------------


@distributed(2)
def test_explicit_prefetch_sees_published_values(rank, world):
    both = fsdp()
    with dedicated(both.model, transport=SLOW) as (_, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.both_backward(step)
            advance(opt, ref)
            if step == 0:  # in the middle of training
                both.model.set_modules_to_forward_prefetch(list(both.model.blocks))
    assert_close(both)


@distributed(2)
def test_evaluation_and_state_dict_right_after_step(rank, world):
    both = fsdp()
    with dedicated(both.model, transport=SLOW) as (own, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.model.train()
            both.both_backward(step)
            advance(opt, ref)
            assert own.runtime.pipeline.pending, "nothing to wait for"
            if step == 1:
                saved = {n: whole_tensor(v).clone() for n, v in both.model.state_dict().items()}
                for name, p in both.twin.named_parameters():
                    assert float((saved[name] - p).abs().max()) <= TOLERANCE, name
            both.model.eval()
            with torch.no_grad():
                found = loss_of(both.model, batch(9, rank))
                expected = loss_of(both.twin, batch(9, rank))
            assert abs(float(found) - float(expected)) <= TOLERANCE
    assert_close(both)


class Scored(ParallelModel):
    """Can be called by another method than `forward`."""

    def score(self, tokens):
        return self.forward(tokens)


GATHERED = {
    "a registered method": lambda both: both.model.score,
    "unshard": lambda both: both.model.unshard() or both.model,
    "unshard a block": lambda both: both.model.blocks[1].unshard(async_op=True) and both.model,
}


@pytest.mark.parametrize("how", GATHERED)
@distributed(2)
def test_what_gathers_without_a_hook_sees_published_values(rank, world, how):
    both = fsdp(Scored, shard=None if "block" in how else shard_root)
    if how == "a registered method":
        register_fsdp_forward_method(both.model, "score")
    with dedicated(both.model, transport=SLOW) as (_, opt):
        ref = reference(both.twin)
        both.both_backward(0)
        advance(opt, ref)
        with torch.no_grad():
            found = GATHERED[how](both)(batch(9, rank)[0])
            expected = both.twin(batch(9, rank)[0])
        assert float((found - expected).abs().max()) <= 1e-4
        both.model.reshard()
    assert "unshard" not in vars(both.model), "left behind by close()"


class _Stream:
    """Notes what was still pending when it was told to wait for the current stream."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.seen = []

    def wait_stream(self, stream):
        self.seen.append(len(self.pipeline.pending))

    def __getattr__(self, name):
        return lambda *args: None


@distributed(2)
def test_streams_that_read_shards_wait_for_each_update(rank, world):
    """On CUDA FSDP2 reads shards on a stream of its own, which it orders once a forward."""
    both = fsdp()
    with dedicated(both.model) as (own, opt):
        both.backward(0)
        opt.step()
        opt.zero_grad()
        context = both.model._get_fsdp_state()._comm_ctx
        stream = context.all_gather_copy_in_stream = _Stream(own.runtime.pipeline)
        assert own.runtime.pipeline.pending
        loss_of(both.model, batch(1, rank))
        assert stream.seen[0] > stream.seen[-1] == 0


# ---- gradients that are not there --------------------------------------------------------


class Optional(ParallelModel):
    """A part that a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(50, 50)
        self.use_extra = True

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x + self.extra(x) if self.use_extra else x)


@distributed(2)
def test_a_module_that_one_rank_does_not_use(rank, world):
    both = fsdp(Optional)
    both.model.set_reduce_scatter_unused_params(True)
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(2):
            both.model.use_extra = rank == step
            both.backward(step)
            for r in range(world):
                both.twin.use_extra = r == step
                (loss_of(both.twin, batch(step, r)) / world).backward()
            advance(opt, ref)
    assert_close(both)


@distributed(2)
def test_a_parameter_that_nobody_uses_stays_as_it_is(rank, world):
    both = fsdp(Optional)
    before = whole_tensor(both.model.extra.weight).clone()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(4):
            both.model.use_extra = both.twin.use_extra = step > 1
            both.both_backward(step)
            advance(opt, ref)
            opt.synchronize()
            now = whole_tensor(both.model.extra.weight)
            assert torch.equal(now, before) is (step <= 1), "weight decay as well"
    assert_close(both)


def drop(both, names, victim):
    """Take gradients away from one rank by hand; they count as zero there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    twins = dict(both.twin.named_parameters())
    for name, p in both.model.named_parameters():
        if name not in names:
            continue
        if rank == victim:
            p.grad = None
        per_rank = -(-p.shape[0] // world)
        twins[name].grad[victim * per_rank : (victim + 1) * per_rank] = 0


@distributed(2)
def test_a_gradient_missing_on_one_rank_counts_as_zero(rank, world):
    both = fsdp()
    names = ("blocks.0.mix.weight", "blocks.1.mlp.up.weight", "tok.weight", "blocks.0.norm.bias")
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(4):
            both.both_backward(step)
            if step:
                drop(both, names, victim=step % 2)
            norm = dmuon.clip_grad_norm_(both.model, 0.1)
            expected = nn.utils.clip_grad_norm_(both.twin.parameters(), 0.1)
            assert abs(float(norm) - float(expected)) <= 1e-5
            advance(opt, ref)
    assert_close(both)


@distributed(4)
def test_missing_gradients_of_empty_shards(rank, world):
    """`narrow.up.weight` has 3 rows on 4 ranks: the last one stores nothing."""
    both = pair("fsdp4")
    weight = both.model.blocks[0].narrow.up.weight
    assert (local_tensor(weight).numel() == 0) == (rank == 3)
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(3):
            both.both_backward(step)
            drop(both, ["blocks.0.narrow.up.weight"], victim=3)  # changes nothing
            drop(both, ["blocks.1.narrow.up.weight"], victim=0)
            advance(opt, ref)
    assert_close(both)
