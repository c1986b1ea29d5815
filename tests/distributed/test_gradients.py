"""Gradients in all ways: added up, clipped, scaled, missing on some ranks or on all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.types import DmuonError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, assert_equal_on_all_ranks, gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import layouts
from tests.distributed.models import Used
from tests.distributed.twins import both

TOLERANCE = 1e-5


@layouts("fsdp2", "reduced ddp")
def test_no_sync_sends_nothing_and_puts_back_what_was_set(rank, world, layout):
    # Before anything is planned, too.
    with both(layout=layout, alone=layout == "fsdp2") as pair:
        with dmuon.no_sync(pair.model), dmuon.no_sync(pair.model):
            pair.backward(0)
        stays = any(p.grad is not None for p in pair.bare.blocks.parameters() if p.ndim > 1)
        assert stays is (layout != "fsdp2"), "FSDP2 keeps its own"
        pair.joint_backward(0)
        pair.both_backward(1)
        pair.advance()
        pair.check()


CLIPPED = [
    ("plain model", "reduced ddp", 2),
    ("replicas", "dedicated", 4),
    *(("mesh", name, 4) for name in ("tp+fsdp", "ep+fsdp")),
]


@pytest.mark.parametrize(("kind", "layout", "world"), CLIPPED)
@distributed()
def test_clip_grad_norm_counts_every_element_once(rank, world, kind, layout):
    """By any norm, as of one process on all data; and training goes on with what was clipped."""
    mesh = (2, 2) if kind == "replicas" else None
    # Clipped gradients come near AdamW's usual eps.
    with both(layout=layout, mesh=mesh, muon={"adamw_eps": 1e-3}) as pair:
        twins = dict(pair.twin.named_parameters())
        for step, norm_type in enumerate([1.0, 2.0, math.inf]):
            pair.both_backward(step)
            found = dmuon.clip_grad_norm_(pair.model, 0.3, norm_type)
            expected = nn.utils.clip_grad_norm_(twins.values(), 0.3, norm_type)
            assert abs(float(found) / float(expected) - 1) <= TOLERANCE
            assert set(gathered(found.item())) == {found.item()}
            again = dmuon.clip_grad_norm_(pair.model, 10.0, norm_type)
            assert abs(float(again) - min(float(expected), 0.3)) <= TOLERANCE
            for name, p in pair.model.named_parameters() if kind == "mesh" else ():
                assert torch.allclose(whole_tensor(p.grad), twins[name].grad, atol=1e-7), name
                assert step or float(twins[name].grad.abs().max()) > 1e-6, f"nothing in {name}"
            pair.advance()
        pair.check()


@layouts("reduced", "fsdp2")
def test_clipping_a_non_finite_norm(rank, world, layout):
    with both(layout=layout) as pair:
        loss = pair.loss(pair.model, 0, rank)
        (loss * (math.inf if rank == 1 else 1.0)).backward()
        held = [p.grad for p in pair.model.parameters() if p.grad is not None]
        before = [local_tensor(grad).clone() for grad in held]
        with pytest.raises(RuntimeError, match="total norm"):
            dmuon.clip_grad_norm_(pair.model, 1.0, error_if_nonfinite=True)
        for now, old in zip(held, before, strict=True):
            torch.testing.assert_close(local_tensor(now), old, rtol=0, atol=0, equal_nan=True)
        assert not torch.isfinite(dmuon.clip_grad_norm_(pair.model, 1.0))
        pair.opt.zero_grad()
        pair.backward(1)
        assert torch.isfinite(dmuon.clip_grad_norm_(pair.model, 1.0, error_if_nonfinite=True))


SCALES = [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]  # the third step is skipped


def spoil(model, name, value):
    """Put ``value`` into this rank's part of a gradient, on rank 1 alone."""
    if dist.get_rank() == 1:
        local_tensor(model.get_parameter(name).grad).view(-1)[-1] = value


@pytest.mark.parametrize(
    ("layout", "where", "unscale", "period"),
    [("ddp", "loss", True, 1), ("ddp", "other", True, 1), ("fsdp2", "matrix", True, 3)],
)
@distributed(2)
def test_grad_scaler_skips_alike(rank, world, layout, where, unscale, period):
    """An inf in rank 1's loss, which DDP spreads, or in p.grad on that rank alone. Of shards torch
    shares the verdict, so that block steps obey it too; of DDP's gradients it does not."""
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    scales = []
    with both(Used, layout, only={"period": period}) as pair:
        theirs = next(n for n in pair.matrices if pair.own.owner_of(n) == 0)  # another rank's
        for step in range(len(SCALES)):
            bad = step == 2
            factor = math.inf if bad and where == "loss" and rank == 1 else 1.0
            scaler.scale(pair.loss(pair.model, step, rank) * factor).backward()
            if bad and where != "loss":
                spoil(pair.bare, theirs if where == "matrix" else "blocks.1.norm.weight", math.inf)
            if bad:
                pair.opt.synchronize()
                before = pair.snapshot()
            else:
                pair.joint_backward(step)
            if unscale:
                scaler.unscale_(pair.opt)
                dmuon.clip_grad_norm_(pair.model, 0.1)
                nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1)
            scaler.step(pair.opt)
            scaler.update()
            pair.opt.zero_grad()
            stats = pair.opt.stats()
            if bad:
                assert_bitwise(pair.snapshot(), before)
                assert stats["finite"] is False and stats["skipped"] == 1
                if layout == "ddp" and where != "loss":
                    return  # torch lowers the scale of that rank alone
            else:
                pair.ref.step()
                pair.twin.zero_grad()
                assert stats["finite"] is True
            scales.append(scaler.get_scale())
        found = gathered(scales)
        assert found == [SCALES] * world, f"scales by rank and step: {found}"
        pair.check() if period == 1 else None


class SparseAtWill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 6))
        self.out = nn.Linear(6, 5)
        self.sparse = False

    def forward(self, tokens):
        return self.out(nn.functional.embedding(tokens, self.table, sparse=self.sparse))


@distributed(2)
def test_a_sparse_gradient_on_one_rank_is_an_error_on_every_rank(rank, world):
    with both(SparseAtWill, "reduced") as pair:
        pair.model.sparse = rank == 1
        with pytest.raises(DmuonError, match=r"'table'.*dense"):
            pair.model(torch.arange(4)).sum().backward()
        pair.model.sparse = False
        pair.opt.zero_grad()
        pair.model(torch.arange(4)).sum().backward()  # and the next round is in order
        pair.opt.step()
        pair.opt.synchronize()
        assert_equal_on_all_ranks(pair.model)


@layouts("dedicated", "reduced")
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
