"""`axolotl train config.yaml` with dmuon's plugin, all weights of a tiny Llama.

It is started as its launchers start it, ``accelerate launch --cpu`` among them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from tests.frameworks import common
from tests.frameworks.outside import cells, tiny_llama

CONFIG = """
base_model: ../model
special_tokens: {pad_token: w01}
plugins:
  - dmuon.integrations.axolotl.DmuonPlugin
  - tests.frameworks.outside.axolotl.OnCpus
optim_args:
  ns_dtype: float32
learning_rate: 0.01
weight_decay: 0.1
lr_scheduler: constant
warmup_steps: 0
max_grad_norm: 0.0
datasets:
  - {path: ../data.jsonl, ds_type: json, type: }
dataset_prepared_path: prepared
shuffle_merged_datasets: false
curriculum_sampling: true
sequence_len: 32
max_steps: 6
num_epochs: 1
bf16: false
tf32: false
attn_implementation: sdpa
logging_steps: 1
save_steps: 3
val_set_size: 0
output_dir: out
"""


class OnCpus(BasePlugin):
    """Lets axolotl run in several processes on CPUs, where it takes the local rank for a device."""

    def register(self, cfg: Any) -> None:
        tiny_llama.several_cpus()

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None


def row(tokens: list[int]) -> Any:
    """An example in tokens, which is not tokenized again."""
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": tokens}


def fit(place: Path, how: cells.How) -> float:
    place.mkdir()
    tiny_llama.write(place.parent, row)
    text = tiny_llama.config(f"{CONFIG}micro_batch_size: {how.batch}", how, "lr_scheduler")
    (place / "config.yaml").write_text(text)
    given = ["-m", "axolotl.cli.train", "config.yaml"]
    variables = {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}
    cells.launch(*given, processes=how.processes, folder=place, **variables)
    # axolotl's groups: no decay of norms, embeddings and the head.
    return how.deviation(tiny_llama.found(place / "out"), common.llama, adamw_weight_decay=0.0)


CELLS = cells.of(fit, {
    "train": "`python -m axolotl.cli.train config.yaml`, one process.",
    "clip": "`max_grad_norm: 0.5`.",
    "schedule": "`lr_scheduler: linear`, `warmup_steps: 2`.",
    "accumulate": "`gradient_accumulation_steps: 2`, clipped, scheduled.",
    "save": "DDP on 2 processes, `save_steps: 3`, then resumed on 2.",
    "resume": "`resume_from_checkpoint` of what 2 processes saved, on one.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS)
