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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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


class Flat:
    """An optimizer's state as nemo-automodel saves it: flat, by the names of parameters."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


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
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": Flat(model, optimizer)}
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


def fit(folder: Path, options: str = "", *, processes: int = 1, saved: Path | None = None) -> float:
    """The deviation of a run with ``options``: "clip", "schedule", "resume"."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG + SCHEDULE * ("schedule" in options))
    given = "-m", "tests.frameworks.outside.nemo_automodel", "part", str(saved or folder / "saved")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    variables = {"NEMO_ENABLE_USER_MODULES": "1"} | (alone if processes == 1 else {})
    cells.launch(*given, "found.pt", options, processes=processes, folder=folder, **variables)
    expected = common.by_hand(
        common.net,
        clip=common.CLIP if "clip" in options else None,
        rate=common.factor if "schedule" in options else lambda step: 1.0,
    )
    return cells.deviation(cells.kept(folder / "found.pt"), expected)


def train(folder: Path) -> float:
    """The optimizer that `RecipeConfig(yaml).optimizer.build(model)` makes, one process."""
    return fit(folder / "train")


def clip(folder: Path) -> float:
    """Torch's clipping, which the recipe calls on DTensors."""
    return fit(folder / "clip", "clip")


def schedule(folder: Path) -> float:
    """Its `OptimizerParamScheduler`: `lr_decay_style: linear`, `lr_warmup_steps: 2`."""
    return fit(folder / "schedule", "schedule")


def save(folder: Path) -> float:
    """FSDP2 on 2 processes, flat state through torch's checkpoints, then resumed on 2."""
    whole = fit(folder / "save", "clip schedule", processes=2)
    return max(whole, resumed(folder, 2))


def resume(folder: Path) -> float:
    """What 2 processes saved, on one."""
    return resumed(folder, 1)


def resumed(folder: Path, processes: int) -> float:
    if not (folder / "save").exists():  # `--cell resume` alone
        fit(folder / "save", "clip schedule", processes=2)
    place = folder / f"resumed-on-{processes}"
    return fit(place, "clip schedule resume", processes=processes, saved=folder / "save" / "saved")


CELLS: dict[str, Any] = {
    "train": train, "clip": clip, "schedule": schedule, "save": save, "resume": resume,
    "accumulate": "the recipe's own loop accumulates, and its model needs a GPU: "
    "_transformers/auto_model.py:770",
}  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, part=part)
