"""Masters follow whatever writes to weights between two steps, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from tests.distributed.compare import assert_bitwise
from tests.distributed.harness import distributed
from tests.distributed.layouts import AT_OWNERS, sharded
from tests.distributed.models import half
from tests.distributed.twins import Both, both

BF16 = torch.bfloat16


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


def masters_of(opt: dmuon.Muon) -> list[Tensor]:
    """What a checkpoint holds of them; a collective call."""
    entries = opt.state_dict()["state"].values()
    found = [whole_tensor(e["master_weight"]).clone() for e in entries if "master_weight" in e]
    assert found
    return found


def edits_count(pair: Both, access: Callable[[], Any]) -> None:
    """Inside ``access`` weights may be written to."""
    steps = iter(range(100))

    def write(action: Callable[[Tensor], Any]) -> None:
        pair.opt.synchronize()
        with torch.no_grad(), access():
            for p in pair.model.parameters():
                action(p)

    pair.train_alone([next(steps), next(steps)])
    masters = masters_of(pair.opt)
    # To other weights and back: no bit of a master is lost, and a checkpoint follows.
    kept: list[Tensor] = []
    write(lambda p: kept.append(p.data.clone()))
    write(lambda p: p.data.zero_())
    assert not any(m.any() for m in masters_of(pair.opt))
    write(lambda p: p.copy_(kept.pop(0)))
    assert_bitwise(masters_of(pair.opt), masters)
    pair.train_alone([next(steps)])
    masters = masters_of(pair.opt)
    # Steps of no size show what they start from.
    for group in pair.opt.param_groups:
        group["lr"] = 0.0
    for edit in (halved, clamped, refilled, pruned):
        before = pair.whole()
        write(edit)
        after, saved = pair.whole(), masters_of(pair.opt)
        assert any(not torch.equal(after[n], before[n]) for n in after)
        pair.train_alone([next(steps)])
        pair.opt.synchronize()
        assert_bitwise(pair.whole(), after, edit.__name__)
        assert_bitwise(masters_of(pair.opt), saved)
        for old, new in zip(masters, saved):
            same = old.to(BF16) == new.to(BF16)
            assert torch.equal(old[same], new[same])  # what was not written to keeps its bits
            assert torch.equal(new[~same], new[~same].to(BF16).float())
        masters = saved
    assert all(m.count_nonzero() < m.numel() for m in masters)


OFFLOADED = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("dedicated", "reduced", "fsdp2")},
    "offloaded": (OFFLOADED, {"period": 2}),
}


@pytest.mark.parametrize("name", CASES)
@distributed(2)
def test_what_is_written_to_weights_counts(rank, world, name):
    layout, only = CASES[name]
    only = {"master_weights": True, "verify_every": 1} | only
    with both(layout=layout, change=half, only=only) as pair:
        materialized = lambda: pair.own.materialized(pair.model)  # noqa: E731
        edits_count(pair, materialized if name in AT_OWNERS else nullcontext)
        if name == "fsdp2":
            full = {n: torch.full(v.shape, 0.25, dtype=BF16) for n, v in pair.whole().items()}
            set_model_state_dict(pair.model, full, options=StateDictOptions(full_state_dict=True))
            pair.train_alone([50])
            pair.opt.synchronize()
            assert all((v == 0.25).all() for v in pair.whole().values())
