"""`swift sft sft.yaml` with `optimizer: dmuon`, all weights of a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def row(tokens: list[int]) -> Any:
    return {"messages": [{"role": "assistant", "content": tiny_llama.text(tokens)}]}


def fit(place: Path, how: cells.How) -> float:
    place.mkdir()
    tiny_llama.write(place.parent, row)
    text = f"{CONFIG}per_device_train_batch_size: {how.batch}"
    (place / "sft.yaml").write_text(tiny_llama.config(text, how, "lr_scheduler_type"))
    (place / "plugin.py").write_text(PLUGIN + ON_CPUS * (how.processes > 1))
    launched = {"NPROC_PER_NODE": str(how.processes)} if how.processes > 1 else {}
    cells.launch("-m", "swift.cli.main", "sft", "sft.yaml", folder=place, **launched)
    expected = {"decay_vectors": False, "loss_at": tiny_llama.loss_with_eos}
    return how.deviation(tiny_llama.found(place / "out"), common.llama, **expected)


CELLS = cells.of(fit, {
    "train": "`swift sft sft.yaml`, one process.",
    "clip": "`max_grad_norm: 0.5`.",
    "schedule": "`lr_scheduler_type: linear`, `warmup_steps: 2`.",
    "accumulate": "`gradient_accumulation_steps: 2`, clipped, scheduled.",
    "save": "DDP on 2 processes (`NPROC_PER_NODE=2`), `save_steps: 3`, then resumed on 2.",
    "resume": "`resume_from_checkpoint` of what 2 processes saved, on one.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS)
