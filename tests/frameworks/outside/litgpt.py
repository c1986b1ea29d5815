"""litgpt from a YAML: `optimizer: {class_path: dmuon.Muon, init_args: ...}`.

`litgpt pretrain` steps, schedules and clips once an iteration; on several devices it shards with
FSDP1, whose flattened parameters hold no matrices.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
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


def fit(place: Path, how: cells.How) -> float:
    # Its schedule goes on with every micro-batch.
    how = replace(how, scheduled=how.scheduled and not how.accumulated)
    place.mkdir()
    (place / "tiny.yaml").write_text(CONFIG)
    given = ["pretrain", "--config", "tiny.yaml", "--train.micro_batch_size", str(how.batch)]
    if how.clip:
        given += ["--train.max_norm", str(common.CLIP)]
    if how.scheduled:
        given += ["--train.lr_warmup_steps", str(WARMUP), "--train.min_lr", str(FLOOR)]
    if how.saved:
        at = how.saved / "trained" / f"step-{common.SAVED:08d}" / "lit_model.pth"
        given += ["--resume", str(at)]
    cells.launch("-m", "litgpt", *given, folder=place)
    (log,) = (place / "trained" / "logs").rglob("metrics.csv")
    with log.open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    last = torch.load(place / "trained" / "final" / "lit_model.pth", weights_only=False)
    weights = {name.removeprefix("_orig_mod."): w for name, w in last["model"].items()}
    return how.deviation((losses, weights), model, rate, loss_at=loss_at)


CELLS = cells.of(fit, {
    "train": "`litgpt pretrain --config tiny.yaml`, compiled, one process.",
    "clip": "`train.max_norm: 0.5`.",
    "schedule": "`train.lr_warmup_steps: 2`, then its cosine.",
    "accumulate": "`train.micro_batch_size: 2` of a `global_batch_size` of 4, clipped.",
    "save": "`train.save_interval: 3`, then `--resume` of that step.",
    "resume": cells.Absent("On several devices litgpt shards with FSDP1, whose flattened "
    "parameters hold no matrices; dmuon refuses it by name."),
}, processes=1)  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS)
