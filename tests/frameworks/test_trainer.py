"""Hugging Face Trainer: in one process, under DDP, and with FSDP2."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuon
from tests.distributed.harness import distributed
from tests.frameworks import common

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Weights(transformers.TrainerCallback):
    """Keeps the weights as they are when training ends."""

    def on_train_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.sharded = isinstance(next(model.parameters()), DTensor)
        self.found = common.weights(model)


def train(
    folder: Path | str, world: int, *, resume: bool = False, how: str = "factory", **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps taken, and the last weights."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=common.STEPS,
        per_device_train_batch_size=common.JOINT // world,
        train_sampling_strategy="sequential",
        max_grad_norm=common.CLIP,
        lr_scheduler_type="linear",
        warmup_steps=2,
        logging_steps=1,
        save_steps=common.SAVED,
        report_to=[],
        disable_tqdm=True,
        **changes,
    )
    model = common.llama()
    optimizer: dict[str, Any] = {
        "factory": {"optimizer_cls_and_kwargs": (dmuon.hf_factory, dict(common.SETTINGS))},
        "instance": {"optimizers": (common.muon(model), None)} if how == "instance" else {},
    }[how]
    kept = Weights()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=common.Examples(), callbacks=[kept], **optimizer
    )
    at = f"{folder}/checkpoint-{common.SAVED}" if resume else None
    trainer.train(resume_from_checkpoint=at)
    assert kept.sharded == trainer.is_fsdp_enabled
    logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    first = common.SAVED if resume else 0
    return logs[first:], kept.found


@contextlib.contextmanager
def process(rank: int, world: int, fsdp: bool = False) -> Any:
    with common.launched(rank, world), common.accelerate_on_cpu(fsdp):
        yield


@pytest.mark.parametrize("how", ["factory", "instance"])
def test_one_process(tmp_path, how):
    expected = common.by_hand(common.llama)
    with common.accelerate_on_cpu():
        common.assert_same(train(tmp_path, 1, how=how), expected)
        common.assert_same(train(tmp_path, 1, how=how, resume=True), expected)


@distributed()
def runs(rank, world, folder, resume, fsdp=False, how="factory"):
    expected = common.by_hand(common.llama)
    plugin = {"fsdp": True, "fsdp_config": FSDP2} if fsdp else {}
    with process(rank, world, fsdp):
        found = train(folder, world, how=how, resume=resume, **plugin)
        common.assert_same(found, expected)


FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


def test_ddp(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path, how="instance")


def test_fsdp2(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path, fsdp=True)
