"""`verl.trainer.sft_trainer` with `optim.optimizer_impl=dmuon`, on verl's FSDP2 engine.

verl has no CPU among its platforms; its two registries take one (`OnCpu`).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas
import torch
from safetensors.torch import load_file

from tests.frameworks import common
from tests.frameworks.outside import cells, tiny_llama

CONFIG = """
model.path=../model
model.use_remove_padding=False
+model.override_config.attn_implementation=sdpa
engine.strategy=fsdp2
engine.use_torch_compile=False
+engine.mixed_precision.param_dtype=fp32
+engine.mixed_precision.reduce_dtype=fp32
optim.optimizer_impl=dmuon
optim.optimizer=Muon
optim.lr=0.01
optim.weight_decay=0.1
optim.clip_grad=1e9
optim.override_optimizer_config={ns_dtype:float32}
data.train_files=../data.parquet
data.train_batch_size=4
data.use_dynamic_bsz=False
data.num_workers=0
checkpoint.save_contents=[model,optimizer,extra,hf_model]
checkpoint.load_contents=[model,optimizer,extra]
trainer.total_epochs=1
trainer.save_freq=3
trainer.logger=[console,file]
trainer.default_local_dir=out
trainer.device=cpu
"""
# Both change at every step: 1/2 at the first, then down a quarter of a cosine.
SCHEDULE = ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=2", "optim.min_lr_ratio=0.1"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


class Module:
    """`torch.cpu`, with an answer to what verl asks of the module of an accelerator alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answer = {"mem_get_info": (0, 0), "get_device_name": "cpu"}.get(name, 0)
        return getattr(torch.cpu, name, lambda *a, **k: answer)


ATTRIBUTES = {"device_name": "cpu", "vendor_name": "cpu", "device_module": Module()}
ANSWERS = {
    "communication_backend_name": "gloo", "current_device": "cpu", "device_count": 1,
    "get_device_capability": (None, None), "is_available": True, "is_ipc_supported": False,
    "nvtx_range": contextlib.nullcontext(), "ray_noset_envvars": [], "ray_resource_name": "CPU",
    "visible_devices_envvar": "",
}  # fmt: skip


def sft(*overrides: str) -> None:
    """What `python -m verl.trainer.sft_trainer` does, once a CPU is registered."""
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import set_platform

    body = {n: lambda self, *a, n=n: ANSWERS.get(n) for n in PlatformBase.__abstractmethods__}
    set_platform(type("OnCpu", (PlatformBase,), body | ATTRIBUTES)())

    import verl.utils.distributed
    from verl.trainer import sft_trainer
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp2"], ["cpu"])(FSDPEngineWithLMHead)
    # Its own asks for "cpu:gloo," and the platform's backend again.
    verl.utils.distributed.initialize_global_process_group = torch.distributed.init_process_group
    sys.argv[1:] = overrides
    sft_trainer.main()


def build() -> torch.nn.Module:
    """The model as verl loads it: the tokenizer's pad token, which is an ordinary word here, has no
    gradient as an input."""
    model = common.llama()
    model.get_input_embeddings().padding_idx = tiny_llama.PAD
    return model


def permutation() -> list[int]:
    """The order of `DistributedSampler` in its first epoch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(common.STEPS * common.JOINT, generator=generator).tolist()


def loss_at(model: Any, step: int) -> torch.Tensor:
    chosen = permutation()[step * common.JOINT : (step + 1) * common.JOINT]
    return common.loss_of(model, common.examples()[chosen])


def cosine(step: int) -> float:
    """verl's schedule after a warmup of two steps, down to a tenth."""
    at = (step - 2) / (common.STEPS - 2)
    return step / 2 if step < 2 else 0.55 + 0.45 * math.cos(math.pi * at)


def messages(tokens: list[int]) -> list[dict[str, str]]:
    """An example. Without a prompt verl would count the first token too, predicted from the last
    one of the example before."""
    prompt, answer = tiny_llama.text(tokens[:1]), tiny_llama.text(tokens[1:])
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def fit(place: Path, how: cells.How) -> float:
    place.mkdir()
    tiny_llama.write(place.parent, lambda tokens: {}, chat_template=TEMPLATE)
    rows = [messages(tokens) for tokens in common.examples().tolist()]
    pandas.DataFrame({"messages": rows}).to_parquet(place.parent / "data.parquet")
    overrides = [*CONFIG.split(), f"data.micro_batch_size_per_gpu={how.batch}"]
    overrides += [f"optim.clip_grad={common.CLIP}"] * how.clip + SCHEDULE * how.scheduled
    if how.saved:
        at = how.saved / "out" / f"global_step_{common.SAVED}"
        overrides += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={at}"]
    given = "-m", "tests.frameworks.outside.verl", "sft", *overrides
    variables = {"VERL_FILE_LOGGER_PATH": "log.jsonl"} | cells.alone(how)
    cells.launch(*given, processes=how.processes, folder=place, **variables)
    entries = [json.loads(line)["data"] for line in (place / "log.jsonl").read_text().splitlines()]
    losses = [entry["train/loss"] for entry in entries if "train/loss" in entry]
    last = place / "out" / f"global_step_{common.STEPS}" / "huggingface" / "model.safetensors"
    return how.deviation((losses, load_file(last)), build, cosine, loss_at=loss_at)


CELLS = cells.of(fit, {
    "train": "`sft_trainer` with `engine.strategy=fsdp2`, one process.",
    "clip": "`optim.clip_grad=0.5`.",
    "schedule": "`optim.lr_scheduler_type=cosine`, with a warmup.",
    "accumulate": "`data.micro_batch_size_per_gpu=2` of 4, clipped, scheduled.",
    "save": "FSDP2 on 2 processes, `trainer.save_freq=3`, then `resume_mode=resume_path` on 2.",
    "resume": cells.Absent("verl names the files of a checkpoint by world size and rank "
    "(utils/checkpoint/fsdp_checkpoint_manager.py:213), so that any optimizer resumes on as many "
    "processes only"),
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, sft=sft)
