"""`swift sft sft.yaml` with `optimizer: dmuon`, all weights of a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.frameworks import common
from tests.frameworks.outside import cells, tiny_llama

CONFIG = """
model: ../model
model_type: llama
template: dummy
tuner_type: full
torch_dtype: float32
attn_impl: sdpa
dataset: ../data.jsonl
split_dataset_ratio: 0
dataset_shuffle: false
train_dataloader_shuffle: false
load_from_cache_file: false
external_plugins: plugin.py
optimizer: dmuon
optim_args: ns_dtype=float32
learning_rate: 1e-2
weight_decay: 0.1
lr_scheduler_type: constant
warmup_steps: 0
max_grad_norm: 0
max_steps: 6
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
save_steps: 3
logging_steps: 1
output_dir: out
add_version: false
use_hf: true
check_model: false
report_to: none
use_cpu: true
"""
PLUGIN = "import dmuon.integrations.swift\n"
ON_CPUS = "from tests.frameworks.outside import tiny_llama\ntiny_llama.several_cpus()\n"
SCHEDULE = {"lr_scheduler_type": "linear", "warmup_steps": 2}


def row(tokens: list[int]) -> Any:
    return {"messages": [{"role": "assistant", "content": tiny_llama.text(tokens)}]}


def fit(
    folder: Path, changes: dict[str, Any], rate: Any = lambda step: 1.0, processes: int = 1
) -> float:
    """The deviation of a run of the config with ``changes``."""
    folder.mkdir()
    tiny_llama.write(folder.parent, row)
    (folder / "sft.yaml").write_text(yaml.safe_dump(yaml.safe_load(CONFIG) | changes))
    (folder / "plugin.py").write_text(PLUGIN + ON_CPUS * (processes > 1))
    launched = {"NPROC_PER_NODE": str(processes)} if processes > 1 else {}
    cells.launch("-m", "swift.cli.main", "sft", "sft.yaml", folder=folder, **launched)
    clip = changes.get("max_grad_norm")
    expected = common.by_hand(
        common.llama, decay_vectors=False, clip=clip, rate=rate, loss_at=tiny_llama.loss_with_eos
    )
    return cells.deviation(tiny_llama.found(folder / "out"), expected)


NOTES = (
    "`swift sft sft.yaml`, one process.",
    "`max_grad_norm: 0.5`.",
    "`lr_scheduler_type: linear`, `warmup_steps: 2`.",
    "`gradient_accumulation_steps: 2`, clipped, scheduled.",
    "DDP on 2 processes (`NPROC_PER_NODE=2`), `save_steps: 3`, then resumed on 2.",
    "`resume_from_checkpoint` of what 2 processes saved, on one.",
)

if __name__ == "__main__":
    cells.main(tiny_llama.cells_of(fit, SCHEDULE, "per_device_train_batch_size", NOTES))
