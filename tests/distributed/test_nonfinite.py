"""Gradients that are not finite: no layout applies them, and all ranks skip the step alike."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.types import NonFiniteError
from tests.accelerator import host_cannot_read
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded
from tests.distributed.owners import (
    DDP,
    FSDP,
    KEPT,
    PLAIN,
    REPLICATED,
    WHOLE,
    assert_bitwise,
    both,
    gathered,
    layouts,
    mesh_of,
)
from tests.poison import Poison


def poisoned(pair, step, name, value):
    """A backward pass after which the gradient of this weight has a bad value."""
    module = pair.bare.get_submodule(name.rpartition(".")[0])
    handle = module.register_forward_hook(
        lambda module, args, output: output + Poison.apply(module.weight, value)
    )
    loss_of(pair.model, batch(step, pair.data_rank)).backward()
    handle.remove()


def state_of(pair):
    """Weights and optimizer state, whole."""
    entries = pair.opt.state_dict()["state"]
    found = pair.whole()
    for key, entry in entries.items():
        found |= {f"{key}.{n}": whole_tensor(torch.as_tensor(v)).clone() for n, v in entry.items()}
    return found


CASES = {
    "a matrix on the last rank": ("mid.weight", math.nan, (-1,)),
    "a matrix on all ranks": ("blocks.1.up.weight", math.inf, (0, -1)),
    "AdamW's on the first rank": ("blocks.0.norm.weight", -math.inf, (0,)),
}


@pytest.mark.parametrize("host", ["reads", "does not read"])
@layouts(PLAIN, KEPT, FSDP, REPLICATED, DDP, WHOLE)
@distributed(2)
def test_a_step_is_skipped_on_all_ranks(rank, world, layout, host):
    for name, value, where in CASES.values():
        with host_cannot_read() if host != "reads" else nullcontext(), both(Net, layout) as pair:
            pair.train(range(2))
            before = state_of(pair)
            here = value if rank in [r % world for r in where] else 0.0
            pair.opt.zero_grad()
            poisoned(pair, 2, name, here)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                pair.opt.step()
                assert pair.opt.stats()["finite"] is False
                assert pair.opt.stats()["skipped"] == 1
                assert_bitwise(state_of(pair), before)
                pair.opt.zero_grad()
                pair.twin.zero_grad()
                pair.train([3])  # goes on
                texts = [str(w.message) for w in told if "a step was skipped" in str(w.message)]
            assert len(texts) == (rank == 0)
            if rank == 0:
                assert "matrices" in texts[0] if "norm" in name else name in texts[0], texts
            pair.check()
            assert pair.opt.stats()["finite"] is True
            assert gathered(pair.opt.stats()["skipped"]) == [1] * world


@layouts(PLAIN, FSDP, REPLICATED, WHOLE)
@distributed(2)
def test_raise_is_an_error_on_every_rank(rank, world, layout):
    with both(Net, layout, only={"nonfinite": "raise"}) as pair:
        pair.train(range(2))
        before = state_of(pair)
        pair.opt.zero_grad()
        poisoned(pair, 2, "mid.weight", math.nan if rank else 0.0)
        with pytest.raises(NonFiniteError, match=r"mid\.weight"):
            pair.opt.step()
        assert_bitwise(state_of(pair), before)
        pair.opt.zero_grad()
        pair.twin.zero_grad()
        pair.train([3])
        pair.check()


@layouts(PLAIN, REPLICATED)
@distributed(4)
def test_replicas_skip_too(rank, world, layout):
    mesh = (2, 2) if layout == PLAIN else (4,)
    with both(Net, layout, mesh=mesh) as pair:
        pair.train(range(2))
        before = state_of(pair)
        pair.opt.zero_grad()
        poisoned(pair, 2, "blocks.2.down.weight", math.nan if rank == 3 else 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.opt.step()
        assert_bitwise(state_of(pair), before)
        pair.opt.zero_grad()
        pair.twin.zero_grad()
        pair.train([3])
        pair.check()


@pytest.mark.parametrize("host", ["reads", "does not read"])
@pytest.mark.parametrize("period", [1, 3])
@distributed(2)
def test_raise_waits_for_the_next_full_step(rank, world, period, host):
    """In a block step no rank knows of the others."""
    with host_cannot_read() if host != "reads" else nullcontext():
        model = seeded(Net)
        mesh = mesh_of((world,))
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)
        opt = dmuon.Muon(model, lr=0.02, period=period, nonfinite="raise", ns_dtype=torch.float32)

        def step(number, scale=1.0):
            opt.zero_grad()
            loss_of(model, batch(number, rank)).backward()
            if rank:
                model.blocks[1].up.weight.grad.to_local().mul_(scale)
            opt.step()

        def whole():
            return {n: whole_tensor(p).clone() for n, p in model.named_parameters()}

        step(0)
        before = whole()
        raised, numbers = [], [1, 2, 3, 3, 4]
        for number in numbers:
            try:
                step(number, math.nan if number == 1 and not raised else 1.0)
            except NonFiniteError as error:
                raised.append((number, str(error)))
        late = host != "reads"  # at the beginning of the next step
        at = 3 if period == 3 else 1 + late
        assert [number for number, _ in raised] == [at], raised
        assert gathered(raised[0][1]) == [raised[0][1]] * world
        if period == 1:
            assert "blocks.1.up.weight" in raised[0][1]
        assert all(bool(w.isfinite().all()) for w in whole().values())
        assert not torch.equal(whole()["mid.weight"], before["mid.weight"])
        opt.ownership.close()


def test_what_may_be_asked_for():
    with pytest.raises(ValueError, match="nonfinite"):
        dmuon.Muon(nn.Linear(3, 3), nonfinite="ignore")
