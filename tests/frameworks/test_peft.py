"""peft: LoRA's A and B are matrices like any other; what is frozen is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import distributed
from tests.frameworks import common

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")


CLIP = 0.01  # gradients are small


def adapted(**changes: object) -> nn.Module:
    base = common.llama()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **changes)
    torch.manual_seed(3)
    model = peft.get_peft_model(base, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            # B begins at zero, and then A has no gradient: rounding alone would decide.
            nn.init.normal_(p, std=0.02)
    return model


@distributed()
def runs(rank, world, folder, resume):
    expected = common.by_hand(adapted, clip=CLIP)
    inner = adapted()
    frozen = {n: p.detach().clone() for n, p in inner.named_parameters() if not p.requires_grad}
    model = DistributedDataParallel(inner) if world > 1 else inner
    optimizer = common.muon(model)
    schedule = common.schedule_of(optimizer)
    if resume:
        inner.load_adapter(folder, "default", is_trainable=True)
        optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", weights_only=True))
        schedule.load_state_dict(torch.load(f"{folder}/schedule.pt", weights_only=True))

    def save() -> None:
        if rank == 0:
            inner.save_pretrained(folder)
            torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
            torch.save(schedule.state_dict(), f"{folder}/schedule.pt")

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    how = {"resume": resume, "save": save, "clip": clip}
    losses = common.train(model, optimizer, schedule, rank, world, **how)
    common.assert_same((losses, common.weights(inner)), expected)
    now = dict(inner.named_parameters())
    assert frozen and all(torch.equal(now[name], before) for name, before in frozen.items())


def test_lora(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path)
