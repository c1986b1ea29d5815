"""torchtune's recipes from a YAML: `optimizer: {_component_: dmuon.Muon, ...}`.

A run is three epochs of the same two steps; the recipe saves after each. The distributed recipe
asks a GPU for its memory, which `distributed` leaves out; the rest runs on CPUs as it is.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from tests.frameworks import common
from tests.frameworks.outside import cells

HERE = "tests.frameworks.outside.torchtune"
EPOCHS = 3
PER_EPOCH = common.STEPS // EPOCHS  # steps
WARMUP = 2
WEIGHTS = "model-00001-of-00001.bin"  # the name that the recipe gives them

SIZES = {
    "vocab_size": common.VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "embed_dim": 16, "max_seq_len": 32, "norm_eps": 1e-5,
}  # fmt: skip
CONFIG = f"""
model: {{_component_: torchtune.models.llama2.llama2, {str(SIZES)[1:-1].replace("'", "")}}}
tokenizer: {{_component_: {HERE}.Tokenizer}}
dataset: {{_component_: {HERE}.examples}}
checkpointer:
  _component_: torchtune.training.FullModelTorchTuneCheckpointer
  checkpoint_dir: ../begin
  checkpoint_files: [{WEIGHTS}]
  model_type: LLAMA2
  output_dir: ${{output_dir}}
output_dir: trained
resume_from_checkpoint: False
seed: 0
shuffle: False
batch_size: 4
epochs: {EPOCHS}
max_steps_per_epoch: null
optimizer:
  _component_: dmuon.Muon
  lr: 0.01
  weight_decay: 0.1
  ns_dtype: float32
optimizer_in_bwd: False
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
gradient_accumulation_steps: 1
compile: False
device: cpu
dtype: fp32
metric_logger: {{_component_: {HERE}.Losses, path: losses.jsonl}}
"""
SCHEDULE = f"""
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: {WARMUP}
"""


class Tokenizer:
    pad_id = 0


def examples(tokenizer: Tokenizer) -> list[dict[str, list[int]]]:
    rows = common.examples()[: PER_EPOCH * common.JOINT].tolist()
    return [{"tokens": row, "labels": row} for row in rows]


class Losses:
    """A metric logger that writes all digits."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w")  # noqa: SIM115 (closed by the recipe)

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self.file.write(json.dumps(float(payload["loss"])) + "\n")

    def close(self) -> None:
        self.file.close()


def distributed(*arguments: str) -> None:
    """The distributed recipe, without what it asks of a GPU: how much memory there is, and to empty
    its cache."""
    from torchtune import training

    recipe = Path(training.__file__).parents[2] / "recipes" / "full_finetune_distributed.py"
    sys.argv = [str(recipe), *arguments]
    asked = "get_memory_stats", "log_memory_stats", "cleanup_before_training"
    with mock.patch.multiple(training, **dict.fromkeys(asked, lambda *_, **__: {})):
        runpy.run_path(str(recipe), run_name="__main__")


def model() -> nn.Module:
    from torchtune.models.llama2 import llama2

    torch.manual_seed(0)
    return llama2(**SIZES)


def rate(step: int) -> float:
    """The factors of the recipe's schedule."""
    one = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(one, WARMUP, common.STEPS)
    return schedule.lr_lambdas[0](step)


def fit(place: Path, how: cells.How) -> float:
    """By `tune run`, or the distributed recipe."""
    begin = place.parent / "begin" / WEIGHTS
    begin.parent.mkdir(exist_ok=True)
    torch.save(model().state_dict(), begin)
    place.mkdir()
    (place / "tiny.yaml").write_text(CONFIG + SCHEDULE * how.scheduled)
    given = ["--config", "tiny.yaml", f"batch_size={how.batch}"]
    given += [f"clip_grad_norm={common.CLIP}"] * how.clip
    given += ["gradient_accumulation_steps=2"] * how.accumulated
    last = place / "trained" / f"epoch_{EPOCHS - 1}"
    if how.saved:  # the last epoch again
        shutil.copytree(how.saved / "trained", place / "trained")
        shutil.rmtree(last)
        at = f"checkpointer.checkpoint_files=[epoch_{EPOCHS - 2}/{WEIGHTS}]"
        given += ["resume_from_checkpoint=True", at]
    command = ["-m", "torchtune._cli.tune", "run", "full_finetune_single_device"]
    if how.processes > 1:
        command = ["-m", HERE, "distributed"]
    cells.launch(*command, *given, processes=how.processes, folder=place)
    losses = [float(line) for line in (place / "losses.jsonl").read_text().split()]
    weights = torch.load(last / WEIGHTS, weights_only=True)
    return how.deviation(
        (losses, weights),
        model,
        rate,
        loss_at=lambda model, step: common.loss_of(model, common.batch(step % PER_EPOCH)),
    )


CELLS = cells.of(fit, {
    "train": "`tune run full_finetune_single_device --config tiny.yaml`.",
    "clip": "`clip_grad_norm: 0.5`.",
    "schedule": "`lr_scheduler: {_component_: ...get_cosine_schedule_with_warmup, "
    "num_warmup_steps: 2}`.",
    "accumulate": "`gradient_accumulation_steps: 2`, clipped, scheduled.",
    "save": "full_finetune_distributed (FSDP2; not what it asks of a GPU) on 2 processes; stopped "
    "after an epoch, then `resume_from_checkpoint: True`.",
    "resume": "What 2 processes saved, with the recipe for a single device.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, distributed=distributed)
