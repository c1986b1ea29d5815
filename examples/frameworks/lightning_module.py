"""Lightning with dmuon: `configure_optimizers`, clipping, a schedule, a checkpoint.

python examples/frameworks/lightning_module.py
torchrun --standalone --nproc-per-node=2 examples/frameworks/lightning_module.py    (DDP)
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import lightning
import torch
from _tiny import Sequences, tiny_llama
from torch import Tensor

import dmuon

STEPS = 40
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny_llama()

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = self.llama(**batch).loss
        if number % 10 == 0 and self.trainer.is_global_zero:
            print(f"batch {number:3}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = dmuon.Muon(self, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def make_trainer(steps: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",  # or "auto"
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def main() -> None:
    data = torch.utils.data.DataLoader(Sequences(), batch_size=16, shuffle=True)
    trainer = make_trainer(STEPS // 2)
    trainer.fit(Module(), data)
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.strategy.broadcast(f"{folder}/half.ckpt")
        trainer.save_checkpoint(path)  # rank 0 writes
        make_trainer(STEPS).fit(Module(), data, ckpt_path=path)
        trainer.strategy.barrier()


if __name__ == "__main__":
    main()
