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


def fit(
    folder: Path, *changes: str, scheduled: bool = False, clip: bool = False, processes: int = 1
) -> float:
    """The deviation of a run of the config with ``changes``, which are the CLI's options."""
    folder.mkdir()
    (folder / "fit.yaml").write_text(CONFIG + SCHEDULE * scheduled)
    given = ["-m", "tests.frameworks.outside.lightning", "cli", "fit", "--config", "fit.yaml"]
    given += changes
    if clip:
        given += ["--trainer.gradient_clip_val", str(common.CLIP)]
    if processes > 1:
        given += ["--trainer.strategy", "ddp", "--trainer.devices", str(processes)]
    cells.launch(*given, processes=processes, folder=folder)
    expected = common.by_hand(
        common.net,
        clip=common.CLIP if clip else None,
        rate=lambda step: 0.5 + step // PER_EPOCH / 8 if scheduled else 1.0,
        loss_at=lambda model, step: common.loss_of(model, common.batch(step % PER_EPOCH)),
    )
    return cells.deviation(cells.kept(folder / "found.pt"), expected)


def train(folder: Path) -> float:
    """`fit --config fit.yaml`, one process."""
    return fit(folder / "train")


def clip(folder: Path) -> float:
    """`trainer.gradient_clip_val: 0.5`."""
    return fit(folder / "clip", clip=True)


def schedule(folder: Path) -> float:
    """`lr_scheduler: {class_path: torch.optim.lr_scheduler.LinearLR, ...}`, once an epoch."""
    return fit(folder / "schedule", scheduled=True)


def accumulate(folder: Path) -> float:
    """`trainer.accumulate_grad_batches: 2`, clipped, scheduled."""
    halves = "--data.batch_size", "2", "--trainer.accumulate_grad_batches", "2"
    return fit(folder / "accumulate", *halves, clip=True, scheduled=True)


def save(folder: Path) -> float:
    """DDP on 2 processes; ModelCheckpoint, then `--ckpt_path` on 2."""
    whole = fit(folder / "save", "--data.batch_size", "2", clip=True, scheduled=True, processes=2)
    return max(whole, resumed(folder, processes=2))


def resume(folder: Path) -> float:
    """`--ckpt_path` of what 2 processes saved, on one."""
    return resumed(folder, processes=1)


def resumed(folder: Path, processes: int) -> float:
    at = folder / "save" / "epoch=0.ckpt"
    if not at.exists():  # `--cell resume` alone
        fit(at.parent, "--data.batch_size", "2", clip=True, scheduled=True, processes=2)
    batch = "--data.batch_size", str(common.JOINT // processes)
    place = folder / f"resumed-on-{processes}"
    return fit(
        place, "--ckpt_path", str(at), *batch, clip=True, scheduled=True, processes=processes
    )


CELLS = {
    "train": train, "clip": clip, "schedule": schedule, "accumulate": accumulate, "save": save,
    "resume": resume,
}  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, cli=cli)
