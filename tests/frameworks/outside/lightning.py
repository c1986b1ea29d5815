"""LightningCLI with a YAML: `optimizer: {class_path: dmuon.Muon, init_args: ...}`.

The CLI's schedulers step once an epoch, so a run is three epochs of the same two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.frameworks import common
from tests.frameworks.outside import cells

EPOCHS = 3
PER_EPOCH = common.STEPS // EPOCHS  # steps

CONFIG = """
trainer:
  accelerator: cpu
  max_epochs: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {dirpath: ., filename: "{epoch}", save_top_k: -1}
data:
  batch_size: 4
optimizer:
  class_path: dmuon.Muon
  init_args:
    lr: 0.01
    weight_decay: 0.1
    ns_dtype: float32
"""
SCHEDULE = """
lr_scheduler:
  class_path: torch.optim.lr_scheduler.LinearLR
  init_args: {start_factor: 0.5, total_iters: 4}
"""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = common.net()
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        loss = common.loss_of(self.net, tokens)
        self.losses.append(common.mean_over_ranks(loss))
        return loss

    def on_train_end(self) -> None:
        n = self.trainer.accumulate_grad_batches
        losses = [sum(self.losses[i : i + n]) / n for i in range(0, len(self.losses), n)]
        if self.trainer.is_global_zero:
            cells.keep("found.pt", losses, common.weights(self.net))


class Examples(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        examples = common.examples()[: PER_EPOCH * common.JOINT]
        of_rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(examples, *of_rank, shuffle=False)
        return DataLoader(examples, self.batch_size, sampler=sampler)


def cli(*arguments: str) -> None:
    """What a user's main.py does."""
    sys.argv[1:] = arguments
    LightningCLI(Net, Examples, save_config_callback=None)


def fit(place: Path, how: cells.How) -> float:
    place.mkdir()
    (place / "fit.yaml").write_text(CONFIG + SCHEDULE * how.scheduled)
    given = ["-m", "tests.frameworks.outside.lightning", "cli", "fit", "--config", "fit.yaml"]
    given += ["--data.batch_size", str(how.batch)]
    if how.clip:
        given += ["--trainer.gradient_clip_val", str(common.CLIP)]
    if how.accumulated:
        given += ["--trainer.accumulate_grad_batches", "2"]
    if how.processes > 1:
        given += ["--trainer.strategy", "ddp", "--trainer.devices", str(how.processes)]
    if how.saved:
        given += ["--ckpt_path", str(how.saved / "epoch=0.ckpt")]
    cells.launch(*given, processes=how.processes, folder=place)
    return how.deviation(
        cells.kept(place / "found.pt"),
        common.net,
        rate=lambda step: 0.5 + step // PER_EPOCH / 8,
        loss_at=lambda model, step: common.loss_of(model, common.batch(step % PER_EPOCH)),
    )


CELLS = cells.of(fit, {
    "train": "`fit --config fit.yaml`, one process.",
    "clip": "`trainer.gradient_clip_val: 0.5`.",
    "schedule": "`lr_scheduler: {class_path: torch.optim.lr_scheduler.LinearLR, ...}`, once an "
    "epoch.",
    "accumulate": "`trainer.accumulate_grad_batches: 2`, clipped, scheduled.",
    "save": "DDP on 2 processes; ModelCheckpoint, then `--ckpt_path` on 2.",
    "resume": "`--ckpt_path` of what 2 processes saved, on one.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, cli=cli)
