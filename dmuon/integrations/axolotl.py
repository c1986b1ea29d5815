"""axolotl: ``plugins: [dmuon.integrations.axolotl.DmuonPlugin]``.

``learning_rate``, ``weight_decay``, ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``, ``lr_groups``
and ``embedding_lr`` hold, and ``optim_args`` has further arguments of `dmuon.Muon`.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import dmuon
from dmuon.integrations import keywords


class DmuonPlugin(BasePlugin):  # type: ignore[misc]
    """Gives the trainer `dmuon.Muon` as its optimizer class: axolotl 0.19 lists
    ``create_optimizer`` among the hooks of a plugin and never calls it."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if trainer.optimizer_cls_and_kwargs is not None:
            what = f"two optimizers: dmuon's plugin, and optimizer: {cfg.optimizer}"
            raise ValueError(f"{what}. Leave one of them out of the config")
        own = {
            "lr": trainer.args.learning_rate,
            "adamw_betas": (cfg.adam_beta1 or 0.9, cfg.adam_beta2 or 0.95),
            "adamw_eps": cfg.adam_epsilon or 1e-8,
        }
        trainer.optimizer_cls_and_kwargs = dmuon.Muon, own | keywords(cfg.optim_args)
