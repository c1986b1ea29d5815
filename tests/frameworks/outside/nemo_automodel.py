"""nemo-automodel's optimizer and schedule, made from a recipe's YAML, on FSDP2 and gloo.

Its recipes need a GPU: `NeMoAutoModelForCausalLM.from_pretrained` asks for `torch.device("cuda",
...)` (_transformers/auto_model.py:770). So what the recipe does around `cfg.optimizer.build(...)`
and `cfg.lr_scheduler.build(...)` is torch's own here, on a tiny model.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.frameworks import common
from tests.frameworks.outside import cells

CONFIG = """
optimizer:
  _target_: dmuon.integrations.DMuon
  lr: 0.01
  weight_decay: 0.1
  ns_dtype: float32
"""
SCHEDULE = """
lr_scheduler:
  lr_decay_style: linear
  lr_warmup_steps: 2
  init_lr: 0.0
  min_lr: 0.0
"""


def part(saved: str, found: str, options: str) -> None:
    """What a recipe does in each process, on a model of torch."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    model = common.net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    config = RecipeConfig(load_yaml_config("config.yaml"))
    (optimizer,) = config.optimizer.build(model, device_mesh=None)
    steps = SimpleNamespace(epoch_len=None, max_steps=common.STEPS)
    chosen = config.lr_scheduler
    schedules = chosen.build(optimizer, steps) if chosen is not None else []
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": common.Flat(model, optimizer),
    }
    state |= dict(zip(["schedule"], schedules))
    resume = "resume" in options
    if resume:
        dcp.load(state, checkpoint_id=saved)

    def clip() -> None:
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)

    step = SimpleNamespace(step=lambda: [schedule.step(1) for schedule in schedules])
    losses = common.train(
        model, optimizer, step, rank, world,
        resume=resume, clip=clip, save=lambda: dcp.save(state, checkpoint_id=saved),
    )  # fmt: skip
    weights = common.weights(model)
    if rank == 0:
        cells.keep(found, losses, weights)
    dist.barrier()
    os._exit(0)  # what the package imports leaves a thread behind that aborts some processes


def fit(place: Path, how: cells.How) -> float:
    place.mkdir()
    (place / "config.yaml").write_text(CONFIG + SCHEDULE * how.scheduled)
    saved = str((how.saved or place) / "saved")
    given = "-m", "tests.frameworks.outside.nemo_automodel", "part", saved, "found.pt"
    options = " ".join(["clip"] * how.clip + ["resume"] * bool(how.saved))
    variables = {"NEMO_ENABLE_USER_MODULES": "1"} | cells.alone(how)
    cells.launch(*given, options, processes=how.processes, folder=place, **variables)
    return how.deviation(cells.kept(place / "found.pt"), common.net)


CELLS = cells.of(fit, {
    "train": "The optimizer that `RecipeConfig(yaml).optimizer.build(model)` makes, one process.",
    "clip": "Torch's clipping, which the recipe calls on DTensors.",
    "schedule": "Its `OptimizerParamScheduler`: `lr_decay_style: linear`, `lr_warmup_steps: 2`.",
    "accumulate": cells.Absent("the recipe's own loop accumulates, and its model needs a GPU: "
    "_transformers/auto_model.py:770"),
    "save": "FSDP2 on 2 processes, flat state through torch's checkpoints, then resumed on 2.",
    "resume": "What 2 processes saved, on one.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, part=part)
