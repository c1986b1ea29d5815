"""litgpt from a YAML: `optimizer: {class_path: dmuon.Muon, init_args: ...}`.

`litgpt pretrain` steps, schedules and clips once an iteration; on several devices it shards with
FSDP1, whose flattened parameters hold no matrices.
"""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.model import GPT
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.frameworks import common
from tests.frameworks.outside import cells

HERE = "tests.frameworks.outside.litgpt"
WARMUP = 2
FLOOR = 0.001  # train.min_lr
ROW = common.LENGTH - 1  # tokens that are predicted in an example

MODEL = {
    "block_size": ROW, "vocab_size": common.VOCAB, "padded_vocab_size": common.VOCAB,
    "n_layer": 2, "n_head": 4, "n_embd": 16, "bias": False,
}  # fmt: skip
CONFIG = f"""
model_name: tiny
model_config: {{name: tiny, {str(MODEL)[1:-1].replace("'", "").replace("False", "false")}}}
out_dir: trained
precision: 32-true
data:
  class_path: {HERE}.Examples
train:
  global_batch_size: {common.JOINT}
  micro_batch_size: {common.JOINT}
  max_tokens: {common.STEPS * common.JOINT * ROW}
  max_norm: 1000.0
  min_lr: 0.01
  lr_warmup_steps: 0
  save_interval: {common.SAVED}
eval: {{initial_validation: false, final_validation: false}}
optimizer:
  class_path: dmuon.Muon
  init_args:
    lr: 0.01
    weight_decay: 0.1
    ns_dtype: float32
logger_name: csv
devices: 1
seed: 0
"""


class Loader(DataLoader):
    """It goes on where it was, as litgpt's own streaming loaders do."""

    used = 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.used:
                self.used = number + 1
                yield batch
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class Examples(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.size = common.JOINT

    def connect(self, tokenizer: Any = None, batch_size: int = 1, **_: Any) -> None:
        self.size = batch_size

    def train_dataloader(self) -> Any:
        return Loader(common.examples(), self.size)

    val_dataloader = train_dataloader


def model() -> nn.Module:
    """As `litgpt pretrain` begins, which saves nothing before its first step."""
    import lightning
    from litgpt.pretrain import initialize_weights

    fabric = lightning.Fabric(devices=1)
    fabric.seed_everything(0)
    with fabric.init_module(empty_init=True):
        made = GPT(Config(name="tiny", **MODEL))
    initialize_weights(fabric, made, n_layer=2, n_embd=16)
    return made


def loss_at(model: nn.Module, step: int) -> Tensor:
    tokens = common.batch(step)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rate(step: int) -> float:
    """Linear warmup, then a cosine to ``train.min_lr``."""
    if step < WARMUP:
        return step / WARMUP
    done = (step - WARMUP) / (common.STEPS - WARMUP)
    floor = FLOOR / common.LR
    return floor + 0.5 * (1 + math.cos(math.pi * done)) * (1 - floor)


def run(folder: Path, *changes: str, clip: bool = False, scheduled: bool = False) -> float:
    """The deviation of ``litgpt pretrain`` with this config and ``changes``."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(CONFIG)
    given = ["pretrain", "--config", "tiny.yaml", *changes]
    if clip:
        given += ["--train.max_norm", str(common.CLIP)]
    if scheduled:
        given += ["--train.lr_warmup_steps", str(WARMUP), "--train.min_lr", str(FLOOR)]
    shutil.rmtree(folder / "trained" / "logs", ignore_errors=True)
    cells.launch("-m", "litgpt", *given, folder=folder)
    (log,) = (folder / "trained" / "logs").rglob("metrics.csv")
    with log.open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    last = torch.load(folder / "trained" / "final" / "lit_model.pth", weights_only=False)
    expected = common.by_hand(
        model,
        clip=common.CLIP if clip else None,
        rate=rate if scheduled else lambda step: 1.0,
        loss_at=loss_at,
    )
    weights = {name.removeprefix("_orig_mod."): w for name, w in last["model"].items()}
    return cells.deviation((losses, weights), expected)


def train(folder: Path) -> float:
    """`litgpt pretrain --config tiny.yaml`, compiled, one process."""
    return run(folder / "train")


def clip(folder: Path) -> float:
    """`train.max_norm: 0.5`."""
    return run(folder / "clip", clip=True)


def schedule(folder: Path) -> float:
    """`train.lr_warmup_steps: 2`, then its cosine."""
    return run(folder / "schedule", scheduled=True)


def accumulate(folder: Path) -> float:
    """`train.micro_batch_size: 2` of a `global_batch_size` of 4, clipped."""
    return run(folder / "accumulate", "--train.micro_batch_size", "2", clip=True)


def save(folder: Path) -> float:
    """`train.save_interval: 3`, then `--resume` of that step."""
    whole = run(folder / "save", clip=True, scheduled=True)
    at = f"trained/step-{common.SAVED:08d}/lit_model.pth"
    return max(whole, run(folder / "save", "--resume", at, clip=True, scheduled=True))


CELLS = {
    "train": train, "clip": clip, "schedule": schedule, "accumulate": accumulate, "save": save,
    "resume": "On several devices litgpt shards with FSDP1, whose flattened parameters hold no "
    "matrices; dmuon refuses it by name.",
}  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS)
