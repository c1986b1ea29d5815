"""ms-swift: ``--optimizer dmuon``, where a file of ``--external_plugins`` imports this module.

``--learning_rate``, ``--weight_decay``, ``--adam_beta1``, ``--adam_beta2`` and ``--adam_epsilon``
hold, and ``--optim_args "momentum=0.9, ns_steps=6"`` has further arguments of `dmuon.Muon`.
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

import dmuon
from dmuon.integrations import keywords


class DmuonCallback(OptimizerCallback):  # type: ignore[misc]
    """`dmuon.Muon` on the param groups that Trainer makes for any optimizer class: norms and biases
    have no weight decay."""

    def create_optimizer(self, model: Any = None) -> Any:
        args = self.args
        betas = args.adam_beta1, args.adam_beta2
        own = {"lr": args.learning_rate, "adamw_betas": betas, "adamw_eps": args.adam_epsilon}
        self.trainer.optimizer_cls_and_kwargs = dmuon.Muon, own | keywords(args.optim_args)
        return super().create_optimizer(model)


optimizers_map["dmuon"] = DmuonCallback
