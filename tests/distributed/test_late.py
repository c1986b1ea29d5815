"""Parameters that come late: unfrozen or added with `add_param_group` in the middle of training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.types import ConsensusError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, assert_close
from tests.distributed.harness import distributed
from tests.distributed.models import Used, batch, loss_of, seeded, wrap
from tests.distributed.twins import MUON, both

# Of new shapes, and some that share one; and a bias.
MATRICES = ("mid.weight", "blocks.1.up.weight", "blocks.1.up.bias", "blocks.2.down.weight")


class Late:
    """A pair whose parameters ``names`` are trained later; the twin has no gradient of them until
    then."""

    def __init__(self, kind: str, how: str, names: tuple[str, ...], **only: Any) -> None:
        self.how, self.names, self.begun = how, names, False
        late = {"wrap": wrap} if kind == "ddp" else {}
        with both(Used, kind, alone=True, **late) as self.pair:
            pass
        self.bare, self.twin = self.pair.bare, self.pair.twin
        self.late = [(n, p) for n, p in self.bare.named_parameters() if n in names]
        for _, p in self.late:
            p.requires_grad_(False)
        given: Any = self.pair.model
        if how == "group":
            given = [(n, p) for n, p in self.bare.named_parameters() if n not in names]
        self.opt = self.pair.opt = dmuon.Muon(given, **(MUON | only))

    def begin(self) -> None:
        self.begun = True
        for _, p in self.late:
            p.requires_grad_(True)
        if self.how == "group":
            self.opt.add_param_group({"params": self.late})

    def train(self, steps: range) -> None:
        for step in steps:
            self.pair.both_backward(step)
            for name, p in self.twin.named_parameters():
                if name in self.names and not self.begun:
                    p.grad = None
            self.pair.advance()

    def weights(self) -> dict[str, Tensor]:
        return {n: whole_tensor(p.detach()).clone() for n, p in self.bare.named_parameters()}

    def check(self) -> None:
        assert_close(self.weights(), {n: p.detach() for n, p in self.twin.named_parameters()})


@distributed(2)
def test_where_a_head_is_trained_first_all_matrices_come_late(rank, world):
    """The first plan has none. What was there goes on in the same memory."""
    shapes = {n: p.shape for n, p in seeded(Used).named_parameters() if n != "tok.weight"}
    late = Late("fsdp2", "unfrozen", tuple(n for n, shape in shapes.items() if len(shape) > 1))
    late.train(range(2))
    kept = {p: dict(entry) for p, entry in late.opt.state.items()}
    late.begin()
    late.train(range(2, 5))
    late.check()
    for p, entry in kept.items():
        assert all(late.opt.state[p][key] is value for key, value in entry.items())
    assert late.opt.stats()["steps"] == 5
    late.opt.ownership.close()


@pytest.mark.parametrize(
    ("kind", "how", "on"), [("fsdp2", "group", "host"), ("ddp", "unfrozen", "accelerator")]
)
@distributed(2)
def test_on_one_rank_alone_they_are_an_error_on_all(rank, world, kind, how, on):
    """Nothing changes, and when the others have followed, training goes on. Where the host cannot
    read they learn it at the next step."""
    with host_cannot_read() if on != "host" else nullcontext():
        late = Late(kind, how, MATRICES)
        late.train(range(2))
        late.pair.backward(2)
        before, told = late.weights(), pytest.raises(ConsensusError, match="rank 1 refuses")
        if rank == 1:
            late.begin()
            with pytest.raises(OwnershipError, match="not on every"):
                late.opt.step()
        else:
            with told if on == "host" else nullcontext():
                late.opt.step()
        assert_bitwise(late.weights(), before)
        if rank == 0:
            late.begin()
        late.opt.zero_grad()
        late.begun = True
        if on == "host":
            late.train(range(2, 4))
            late.check()
        else:
            late.pair.backward(2)
            with pytest.raises(ConsensusError, match="rank 1 refuses"):
                late.opt.step()
        late.opt.ownership.close()


@distributed(2)
def test_groups_that_differ_can_be_mended(rank, world):
    late = Late("ddp", "group", MATRICES)
    late.train(range(2))
    late.begin()
    group = late.opt.param_groups[-1]
    lr, group["lr"] = group["lr"], 0.1 + rank
    late.pair.backward(2)
    with pytest.raises(ConsensusError, match=r"'param_groups\[1\]: lr=1\.1' where rank 0 has"):
        late.opt.step()
    late.opt.zero_grad()
    late.opt.param_groups[-1]["lr"] = lr
    late.train(range(2, 5))
    late.check()
    assert late.opt.stats()["steps"] == 5


@distributed(2)
def test_block_steps_go_on_until_the_next_full_step(rank, world):
    late = Late("fsdp2", "unfrozen", MATRICES, period=3)
    late.train(range(4))
    late.begin()
    before = late.weights()
    late.train(range(4, 6))  # block steps
    after = late.weights()
    assert all(torch.equal(before[n], after[n]) for n in MATRICES)
    assert not torch.equal(before["tok.weight"], after["tok.weight"])
    late.train(range(6, 8))
    after = late.weights()
    assert not any(torch.equal(before[n], after[n]) for n in MATRICES)
    assert late.opt.stats()["steps"] == 8
    late.opt.ownership.close()
    late = Late("fsdp2", "unfrozen", MATRICES, period=float("inf"))
    late.train(range(1))
    late.begin()
    with pytest.raises(OwnershipError, match="period=math.inf"):
        late.train(range(1, 2))
    late.opt.ownership.close()


@distributed(2)
def test_what_ddp_does_not_average_is_told(rank, world):
    """A parameter that was frozen when DDP was made is none of its."""
    model = seeded(Used)
    model.mid.weight.requires_grad_(False)
    ddp = wrap(model, True)
    opt = dmuon.Muon(ddp, **MUON)
    for step in range(5):  # by now gradients are compared rarely
        loss_of(ddp, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
    model.mid.weight.requires_grad_(True)
    loss_of(ddp, batch(5, rank)).backward()
    with pytest.raises(OwnershipError, match="mid.weight.*wrap it again"):
        opt.step()
    opt.ownership.close()
