"""nemo-automodel's fine-tuning recipe from a YAML, with FSDP2 on gloo.

The recipe asks CUDA for nothing but to reset its peak of memory, which is skipped here (`recipe`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.frameworks import common
from tests.frameworks.outside import cells, tiny_llama

CONFIG = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 4
  local_batch_size: 4
  num_epochs: 1
  max_steps: 6
  ckpt_every_steps: 3
dist_env: {backend: gloo, timeout_minutes: 5}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: ../model
  torch_dtype: float32
  attn_implementation: sdpa
  use_liger_kernel: false
  force_hf: true
distributed:
  strategy: fsdp2
  mp_policy:
    _target_: torch.distributed.fsdp.MixedPrecisionPolicy
    param_dtype: torch.float32
    reduce_dtype: torch.float32
    output_dtype: torch.float32
checkpoint:
  enabled: true
  checkpoint_dir: out
  model_save_format: safetensors
  save_consolidated: true
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: tests.frameworks.outside.nemo_automodel.rows
dataloader:
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: false
optimizer:
  _target_: dmuon.integrations.nemo_automodel.DMuon
  lr: 0.01
  weight_decay: 0.1
  ns_dtype: float32
clip_grad_norm: {max_norm: 1.0e+9}
"""
SCHEDULE = {
    "lr_scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 2, "init_lr": 0.0, "min_lr": 0.0}
}
CLIP = {"clip_grad_norm": {"max_norm": common.CLIP}}


def rows() -> list[dict[str, list[int]]]:
    """The examples; the recipe wants labels that are shifted already."""
    return [
        {"input_ids": t[:-1], "labels": t[1:], "attention_mask": [1] * (len(t) - 1)}
        for t in common.examples().tolist()
    ]


def recipe(config: str) -> None:
    """What `automodel config.yaml` does in each process."""
    torch.cuda.reset_peak_memory_stats = lambda *a: None
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    trainer = TrainFinetuneRecipeForNextTokenPrediction(load_yaml_config(config))
    trainer.setup()
    trainer.run_train_validation_loop()


def fit(
    folder: Path,
    changes: dict[str, Any],
    *,
    local: int = 4,
    processes: int = 1,
    restore: Path | None = None,
) -> float:
    """The deviation of a run of the config with ``changes``."""
    folder.mkdir()
    tiny_llama.write(folder.parent, lambda tokens: {})
    config = yaml.safe_load(CONFIG) | changes
    config["step_scheduler"]["local_batch_size"] = local
    if restore is not None:
        config["checkpoint"]["restore_from"] = str(restore)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    given = "-m", "tests.frameworks.outside.nemo_automodel", "recipe", "config.yaml"
    cells.launch(*given, processes=processes, folder=folder, NEMO_ENABLE_USER_MODULES="1")
    log = (folder / "out" / "training.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in log]
    last = next((folder / "out").glob(f"epoch_*_step_{common.STEPS - 1}"))
    weights = load_file(last / "model" / "consolidated" / "model.safetensors")
    expected = common.by_hand(
        common.llama,
        clip=common.CLIP if changes.keys() >= CLIP.keys() else None,
        rate=common.factor if changes.keys() >= SCHEDULE.keys() else lambda step: 1.0,
    )
    return cells.deviation((losses, weights), expected)


def train(folder: Path) -> float:
    """`TrainFinetuneRecipeForNextTokenPrediction` with FSDP2, one process."""
    return fit(folder / "train", {})


def clip(folder: Path) -> float:
    """`clip_grad_norm: {max_norm: 0.5}`."""
    return fit(folder / "clip", CLIP)


def schedule(folder: Path) -> float:
    """`lr_scheduler: {lr_decay_style: linear, lr_warmup_steps: 2, ...}`."""
    return fit(folder / "schedule", SCHEDULE)


def accumulate(folder: Path) -> float:
    """`global_batch_size: 4`, `local_batch_size: 2`, clipped, scheduled."""
    return fit(folder / "accumulate", CLIP | SCHEDULE, local=2)


def save(folder: Path) -> float:
    """FSDP2 on 2 processes, `ckpt_every_steps: 3`, then resumed on 2."""
    whole = fit(folder / "save", CLIP | SCHEDULE, local=2, processes=2)
    return max(whole, resumed(folder, processes=2))


def resume(folder: Path) -> float:
    """`checkpoint.restore_from` of what 2 processes saved, on one."""
    return resumed(folder, processes=1)


def resumed(folder: Path, processes: int) -> float:
    if not (folder / "save").exists():  # `--cell resume` alone
        fit(folder / "save", CLIP | SCHEDULE, local=2, processes=2)
    at = next((folder / "save" / "out").glob(f"epoch_*_step_{common.SAVED - 1}"))
    place = folder / f"resumed-on-{processes}"
    local = common.JOINT // processes
    return fit(place, CLIP | SCHEDULE, local=local, processes=processes, restore=at)


if __name__ == "__main__":
    cells.main(
        {
            "train": train, "clip": clip, "schedule": schedule, "accumulate": accumulate,
            "save": save, "resume": resume,
        },
        recipe=recipe,
    )  # fmt: skip
