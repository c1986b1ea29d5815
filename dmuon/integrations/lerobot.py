"""lerobot: ``--optimizer.type=dmuon``, which
``--optimizer.discover_packages_path=dmuon.integrations.lerobot`` makes known.

``--optimizer.lr``, ``.weight_decay``, ``.betas`` and ``.grad_clip_norm`` hold, and
``--optimizer.others='{ns_steps: 6}'`` has further arguments of `dmuon.Muon`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.optim import OptimizerConfig
from torch import Tensor

import dmuon
from dmuon.integrations import keywords

# lerobot lists the modules of what it discovers, as of a package.
__path__: list[str] = []


@OptimizerConfig.register_subclass("dmuon")
@dataclass
class DmuonConfig(OptimizerConfig):  # type: ignore[misc]
    lr: float = 1e-4
    weight_decay: float = 0.1
    grad_clip_norm: float = 10.0
    betas: tuple[float, float] = (0.9, 0.95)
    others: dict[str, Any] = field(default_factory=dict)

    def build(self, params: Any) -> Any:
        """One `dmuon.Muon`, or one for each entry of a dict of lists, as SAC wants it."""
        own: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        own |= {"adamw_betas": self.betas} | keywords(self.others)
        if not isinstance(params, dict):
            return dmuon.Muon(params, **own)
        if all(isinstance(p, Tensor) for p in params.values()):
            return dmuon.Muon(params.items(), **own)
        return {name: dmuon.Muon(each, **own) for name, each in params.items()}
