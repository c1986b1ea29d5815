"""torchtitan's own trainer on CPUs and gloo, with dmuon as one more name in its optimizers.

Its debug models train through `torchtitan.train` from a config as the page has it. Replaced is what
asks for a GPU: the device itself, flex attention, whose backward needs one (torchtitan's attention
by `scaled_dot_product_attention` instead), and experts in bfloat16, whose rounding would hide
everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.multiprocessing import start_processes
from torchtitan.tools import utils

import dmuon
from tests.frameworks import common
from tests.frameworks.outside import cells

HERE = "tests.frameworks.outside.torchtitan"
GPU = SimpleNamespace(name="CPU", total_memory=1 << 30)
DEVICE = {
    "device_count": lambda: 1, "set_device": lambda device: None, "current_device": lambda: 0,
    "synchronize": lambda: None, "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: GPU, "memory_stats": lambda device: {},
    "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None,
}  # fmt: skip


# Before torchtitan's other modules are imported.
utils.device_type, utils.device_module = "cpu", SimpleNamespace(**DEVICE)
torch.distributed.set_timeout = lambda timeout, group: None  # newer than torch 2.13

from torchtitan import train  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

# Rounding is amplified less: by Newton-Schulz where gradients of few tokens have a low rank, and by
# AdamW where they are nearly zero.
CALM = {"ns_steps": 3, "adamw_eps": 1e-2}
WHOLE = "tensor", "pipeline"  # axes along which ranks have the same examples


@functools.cache
def stage_mesh(stages: int) -> DeviceMesh:
    """torchtitan numbers ranks by stages first."""
    sizes = stages, torch.distributed.get_world_size() // stages
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "others"))["pp"]


def muon(groups: Any, stages: int = 1, **more: Any) -> dmuon.Muon:
    together = {"nonfinite_group": stage_mesh(stages)} if stages > 1 else {}
    return dmuon.Muon(groups, **together, **more)


class Optimizers(OptimizersContainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "DMuon":
            return muon
        return OptimizersContainer._resolve_optimizer_factory(name)


class Examples(BaseDataLoader):
    """The examples of all frameworks. The last token of each has no label."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        self.rank, self.world = given["dp_rank"], given["dp_world_size"]
        self.parts, self.used = common.JOINT // self.world // given["local_batch_size"], 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while self.used < self.parts * common.STEPS:
            step, part = divmod(self.used, self.parts)
            self.used += 1
            tokens = common.batch(step, self.rank, self.world).chunk(self.parts)[part]
            labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
            positions = torch.arange(common.LENGTH).expand_as(tokens)
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.used // self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["step"] * self.parts


class Tokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        pass

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Losses(MetricsProcessor):
    """It writes all digits."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, loss: float, *rest: Any, **more: Any) -> None:
        with open(f"losses-{torch.distributed.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps(loss) + "\n")


def adapted(config: Trainer.Config) -> Trainer.Config:
    """A config of torchtitan's registry with dmuon, and with what these runs need."""
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    kwargs = {"lr": common.LR, "weight_decay": common.DECAY, **CALM}
    config.optimizer = Optimizers.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="DMuon", optimizer_kwargs=kwargs)
        ],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"DMuon": {"ns_dtype": torch.float32}},
    )
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    training = config.training
    training.seq_len, training.steps, training.max_norm = common.LENGTH, common.STEPS, 1e9
    training.global_batch_size, training.mixed_precision_param = common.JOINT, "float32"
    training.disable_cuda_graphs = True
    # The default needs a newer torch than 2.13.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.dataloader, config.tokenizer = Examples.Config(), Tokenizer.Config()
    config.metrics = Losses.Config(log_freq=1)
    config.checkpoint = CheckpointManager.Config(enable=True, interval=common.SAVED)
    return config


def llama3() -> Trainer.Config:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return adapted(llama3_debugmodel())


def llama3_in_stages() -> Trainer.Config:
    config = llama3()
    config.optimizer.optimizer_factory_kwargs_by_name["DMuon"]["stages"] = 2
    return config


def qwen3_moe() -> Trainer.Config:
    """Two of its eight layers, with 8 of 64 experts. What balances experts counts tokens, which a
    loop by hand would have to do too."""
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = adapted(qwen3_moe_debug())
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        moe, routed = layer.moe, layer.moe.routed_experts
        for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            part.num_experts = 8
        moe.router.gate.out_features, routed.inner_experts.hidden_dim = 8, 128
        moe.router.top_k = routed.token_dispatcher.top_k = 2
        moe.load_balance_coeff = None
    return config


def joined(step: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's `step` of torch 2.13, called with micro-batches, as newer ones are."""

    def call(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **more: Any) -> Any:
        args = [torch.cat(parts) for parts in zip(*arg_mbs or ())]
        more |= {key: torch.cat([part[key] for part in kwarg_mbs]) for key in kwarg_mbs[0]}
        return step(self, *args, target=torch.cat(target_mbs) if target_mbs else None, **more)

    return call


def summed(set_factor: Callable[..., None]) -> Callable[..., None]:
    """FSDP2's division apart from its sum: gloo has no scaled one."""

    def call(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_factor(self, factor)

    return call


def run(rank: int, place: Path, processes: int, port: int, arguments: list[str]) -> None:
    """What `torchrun -m torchtitan.train` does in each process."""
    os.chdir(place)
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"
    os.environ |= dict(zip(names, map(str, (rank, rank, processes, port))), MASTER_ADDR="localhost")
    sys.argv[1:] = arguments
    for cls, name, change in (
        (PipelineScheduleSingle, "step", joined),
        (PipelineScheduleMulti, "step", joined),
        (FSDPModule, "set_gradient_divide_factor", summed),
    ):
        setattr(cls, name, change(getattr(cls, name)))
    torch.Tensor.bfloat16 = lambda self: self
    train.main()


def build(config: Callable[[], Trainer.Config] = llama3) -> nn.Module:
    given = config()
    given.model_spec.model.update_from_config(config=given)
    torch.manual_seed(0)
    model = given.model_spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def loss_at(model: nn.Module, step: int) -> Tensor:
    tokens = common.batch(step)
    positions = torch.arange(common.LENGTH).expand_as(tokens)
    with mock.patch.object(torch.Tensor, "bfloat16", lambda self: self):
        return common.cross_entropy(model(tokens, positions), tokens)


def rate(step: int) -> float:
    """torchtitan's warmup and linear decay, which never come to 0."""
    return (step + 1) / 2 if step < 2 else 1 - (step - 2) / (common.STEPS - 2)


def fit(
    place: Path, how: cells.How, config: Callable[[], Trainer.Config] = llama3, **mesh: Any
) -> float:
    begin, outputs = place / "begin", place / "outputs" / "checkpoint"
    begin.mkdir(parents=True)
    dcp.save(build(config).state_dict(), checkpoint_id=begin, no_dist=True)
    if how.saved:
        step = f"step-{common.SAVED}"
        shutil.copytree(how.saved / "outputs" / "checkpoint" / step, outputs / step)
    ranks = how.processes // math.prod(mesh.get(f"{axis}_parallel_degree", 1) for axis in WHOLE)
    batch = common.JOINT // ranks // (1 + how.accumulated)
    given = {"checkpoint.initial_load_path": begin, "training.local_batch_size": batch}
    given |= {f"parallelism.{name}": value for name, value in mesh.items()}
    if how.clip:
        given["training.max_norm"] = common.CLIP
    if how.scheduled:
        given |= {"lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 1}
    options = [f"--{name}={value}" for name, value in given.items()]
    options += ["--module", HERE, "--config", config.__name__]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start_processes(run, (place, how.processes, port, options), how.processes, start_method="fork")
    lines = (place / f"losses-{how.processes - 1}.jsonl").read_text().split()
    model = build(config)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=outputs / f"step-{common.STEPS}", no_dist=True)
    model.load_state_dict(state)
    found = [float(line) for line in lines], common.weights(model)
    return how.deviation(found, lambda: build(config), rate, loss_at=loss_at, **CALM)


STAGES = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
MESHES: dict[str, tuple[str, int, Any, dict[str, Any]]] = {
    "hsdp": ("HSDP, 2 x 2.", 4, llama3, {"data_parallel_replicate_degree": 2}),
    "tp": ("FSDP2 x tensor parallelism, 2 x 2.", 4, llama3, {"tensor_parallel_degree": 2}),
    "pp": ("Pipeline parallelism on 2, 1F1B.", 2, llama3_in_stages, STAGES),
    "interleaved": ("Pipeline parallelism on 2, interleaved 1F1B of two stages each.", 2,
                    llama3_in_stages, STAGES | {"pipeline_parallel_schedule": "Interleaved1F1B"}),
    "ep": ("Expert parallelism x FSDP2, 2 x 2.", 4, qwen3_moe, {"expert_parallel_degree": 2}),
}  # fmt: skip


def on(name: str, place: Path, saved: Path | None = None) -> float:
    """Train on a mesh, clipped and scheduled."""
    _, processes, config, mesh = MESHES[name]
    how = cells.How(clip=True, scheduled=True, processes=processes, saved=saved)
    return fit(place, how, config, **mesh)


def moved(folder: Path) -> float:
    """What 2 stages saved, resumed on FSDP2 x tensor parallelism."""
    if not (folder / "pp").exists():  # `--cell moved` alone
        on("pp", folder / "pp")
    return on("tp", folder / "moved", saved=folder / "pp")


CELLS = cells.of(fit, {
    "train": "`torchtitan.train`, llama3's debug model, one process.",
    "clip": "`--training.max_norm=0.5`.",
    "schedule": "`--lr_scheduler.warmup_steps=2`.",
    "accumulate": "`--training.local_batch_size=2` of 4, clipped, scheduled.",
    "save": "FSDP2 on 2 processes, `--checkpoint.interval=3`, then resumed on 2.",
    "resume": "What 2 processes saved, on one.",
})  # fmt: skip
for name, row in MESHES.items():
    CELLS[name] = lambda folder, name=name: on(name, folder / name)
    CELLS[name].__doc__ = row[0]
CELLS["moved"] = moved

if __name__ == "__main__":
    cells.main(CELLS)
