"""accelerate: `prepare(model, optimizer, scheduler)` in one process, under DDP, and with FSDP2."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.harness import distributed
from tests.frameworks import common

accelerate = pytest.importorskip("accelerate")


def fsdp2(**changes: Any) -> Any:
    settings = {
        "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_cls_names_to_wrap": ["Block"], "cpu_ram_efficient_loading": False,
    }  # fmt: skip
    return accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **(settings | changes))


def train(
    folder: str,
    *,
    resume: bool,
    plugin: Any = None,
    micro_batches: int = 1,
    order: str = "model first",
    given: str = "module",
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps taken and the last weights; saves half-way, or begins there."""
    accelerator = accelerate.Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=micro_batches,
        step_scheduler_with_optimizer=False,
    )  # fmt: skip
    assert accelerator.is_fsdp2 == (plugin is not None)
    model: nn.Module = common.net()
    optimizer: Any = common.muon(model if given == "module" else model.named_parameters())
    whole = [weakref.ref(p) for p in model.parameters()]
    schedule = common.schedule_of(optimizer)
    if order == "model first":
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        optimizer, model, schedule = accelerator.prepare(optimizer, model, schedule)
    if plugin is not None:
        assert all(isinstance(p, DTensor) for p in model.parameters())
        gc.collect()
        assert not any(ref() is not None for ref in whole), "the optimizer keeps unsharded weights"
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step in range(common.SAVED if resume else 0, common.STEPS):
        tokens = common.batch(step, accelerator.process_index, accelerator.num_processes)
        total = torch.zeros(())
        for part in tokens.chunk(micro_batches):
            with accelerator.accumulate(model):
                loss = common.loss_of(model, part)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), common.CLIP)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / micro_batches
        schedule.step()
        losses.append(common.mean_over_ranks(total))
        if step + 1 == common.SAVED and not resume:
            accelerator.save_state(folder)
    return losses, common.weights(model)


def test_one_process(tmp_path):
    expected = common.by_hand(common.net)
    with common.accelerate_on_cpu():
        for resume in (False, True):
            found = train(str(tmp_path), resume=resume, given="named parameters")
            common.assert_same(found, expected)


@distributed()
def runs(rank, world, folder, resume, plugin=None, **arguments):
    expected = common.by_hand(common.net)
    with common.launched(rank, world), common.accelerate_on_cpu(fsdp=plugin is not None):
        made = None if plugin is None else fsdp2(**plugin)
        common.assert_same(train(folder, resume=resume, plugin=made, **arguments), expected)


def test_ddp(pools, tmp_path):
    how = {"order": "optimizer first", "micro_batches": 2}
    common.saved_and_resumed(pools, runs, tmp_path, **how)


@pytest.mark.parametrize(("given", "plugin"), [
    ("module", {"state_dict_type": "FULL_STATE_DICT"}),
    ("named parameters", {"activation_checkpointing": True}),
    ("module", {"cpu_ram_efficient_loading": True}),
], ids=["whole", "activation checkpointing", "loaded on rank 0"])  # fmt: skip
def test_fsdp2(pools, tmp_path, plugin, given):
    common.saved_and_resumed(pools, runs, tmp_path, plugin=plugin, given=given)
