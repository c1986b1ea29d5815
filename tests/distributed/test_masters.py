"""Masters follow whatever writes to weights between two steps, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from tests.distributed.fsdp import fsdp
from tests.distributed.harness import distributed
from tests.distributed.models import Net
from tests.distributed.owners import DDP, FSDP, PLAIN, REPLICATED, WHOLE, both, layouts
from tests.distributed.sharded import Pair, dedicated, pair

BF16 = torch.bfloat16
Weights = dict[str, Tensor]


def halved(p: Tensor) -> None:
    """As QK-clip does."""
    p.mul_(0.5)


def clamped(p: Tensor) -> None:
    """As for a Wasserstein critic; no version of the parameter tells."""
    p.data.clamp_(-0.03, 0.03)


def pruned(p: Tensor) -> None:
    local_tensor(p).view(torch.int16).numpy()[::2] = 0


def refilled(p: Tensor) -> None:
    """As `dcp.load` writes into live tensors."""
    local_tensor(p).copy_(local_tensor(p).float().cos().mul(0.1))


EDITS = [halved, clamped, refilled, pruned]


def masters_of(opt: dmuon.Muon) -> list[Tensor]:
    """What a checkpoint holds of them; a collective call."""
    entries = opt.state_dict()["state"].values()
    return [whole_tensor(e["master_weight"]).clone() for e in entries if "master_weight" in e]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def edits_count(
    model: nn.Module,
    opt: dmuon.Muon,
    train: Callable[[], Any],
    weights: Callable[[], Weights],
    access: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """``weights`` whole, a collective call; inside ``access`` they may be written to."""

    def write(action: Callable[[Tensor], Any]) -> None:
        opt.synchronize()
        with torch.no_grad(), access():
            for p in model.parameters():
                action(p)

    for _ in range(2):
        train()
    masters = masters_of(opt)
    # To other weights and back: no bit of a master is lost, and a checkpoint follows.
    kept: list[Tensor] = []
    write(lambda p: kept.append(p.data.clone()))
    write(lambda p: p.data.zero_())
    assert not any(m.any() for m in masters_of(opt))
    write(lambda p: p.copy_(kept.pop(0)))
    assert_same(masters_of(opt), masters)
    train()
    masters = masters_of(opt)
    # Steps of no size show what they start from.
    for group in opt.param_groups:
        group["lr"] = 0.0
    for edit in EDITS:
        before = weights()
        write(edit)
        after, saved = weights(), masters_of(opt)
        assert any(not torch.equal(after[n], before[n]) for n in after)
        train()
        opt.synchronize()
        for name, value in weights().items():
            assert torch.equal(value, after[name]), (edit.__name__, name)
        assert_same(masters_of(opt), saved)
        for old, new in zip(masters, saved):
            same = old.to(BF16) == new.to(BF16)
            assert torch.equal(old[same], new[same])  # what was not written to keeps its bits
            assert torch.equal(new[~same], new[~same].to(BF16).float())
        masters = saved
    assert all(m.count_nonzero() < m.numel() for m in masters)


@layouts(PLAIN, FSDP, REPLICATED, DDP, WHOLE)
@distributed(2)
def test_what_is_written_to_weights_counts(rank, world, layout):
    publish = "sync" if layout in (FSDP, DDP) else "async"
    only = {"master_weights": True, "publish": publish, "verify_every": 1}
    with both(Net, layout, change=half, only=only) as now:

        def access() -> AbstractContextManager[Any]:
            return now.own.materialized(now.model)

        steps = iter(range(100))
        edits_count(now.model, now.opt, lambda: now.train_alone([next(steps)]), now.whole, access)


@pytest.mark.parametrize("name", ["fsdp2", "tp"])
@distributed(2)
def test_what_is_written_to_shards_counts(rank, world, name):
    shards_count(pair(name, change=half))


@pytest.mark.parametrize("name", ["hsdp", "tp+fsdp"])
@distributed(4)
def test_what_is_written_to_shards_of_two_axes_counts(rank, world, name):
    shards_count(pair(name, change=half), publish="sync")


@distributed(2)
def test_what_is_written_to_offloaded_shards_counts(rank, world):
    shards_count(fsdp(change=half, offload_policy=CPUOffloadPolicy(pin_memory=False)), period=2)


def half(model: nn.Module) -> None:
    model.to(BF16)


def shards_count(now: Pair, **settings: Any) -> None:
    with dedicated(now.model, master_weights=True, verify_every=1, **settings) as (_, opt):
        steps = iter(range(100))

        def train() -> None:
            now.backward(next(steps))
            opt.step()
            opt.zero_grad()

        edits_count(now.model, opt, train, now.whole)
        if now.case.name == "fsdp2":
            full = {n: torch.full(v.shape, 0.25, dtype=BF16) for n, v in now.whole().items()}
            set_model_state_dict(now.model, full, options=StateDictOptions(full_state_dict=True))
            train()
            opt.synchronize()
            assert all((v == 0.25).all() for v in now.whole().values())
