"""A plan saved from a model's configuration is what its transformers model runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.__main__ import main
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.plan import fitted_plan
from dmuon.scheduler.select import collect
from dmuon.scheduler.topology import Topology
from tests.distributed.harness import distributed
from tests.frameworks.common import SETTINGS, batch, loss_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
OF_GPT2: dict[str, Any] = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 48,
    "n_positions": 32,
}
OF_GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", OF_GPT2),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "mistral": ("MistralConfig", SIZES | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 8}),
    "phi3": ("Phi3Config", SIZES | {"pad_token_id": 0}),
    "gpt_oss": ("GptOssConfig", SIZES | {"head_dim": 8, "num_local_experts": 4}),
    "mamba": ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48}),
}


def config_of(name: str) -> Any:
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**sizes)


def saved_plan(name: str, folder: str, *options: str) -> dmuon.OwnershipPlan:
    """By the command, from a config.json."""
    Path(folder, "config.json").write_text(config_of(name).to_json_string(use_diff=False))
    path = Path(folder, "plan.json")
    made = [*options, "--model", folder, "--dtype", "float32", "--save", str(path)]
    assert main(["plan", *made]) == 0
    return dmuon.OwnershipPlan.from_json(path.read_text())


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(name))
    return model.float()


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits(name, tmp_path, capsys):
    plan = saved_plan(name, str(tmp_path), "--mesh", "2x2")
    with torch.device("meta"):
        specs = collect(model_of(name), allow_meta=True)
    found = fitted_plan(plan, specs, Topology.flat(4), plan.layout)
    certificate = certify(found)
    assert certificate.ok and certificate.proven and found.loads_ms == plan.loads_ms


@distributed(2)
def runs(rank: int, world: int, folder: str, name: str, layout: str) -> None:
    momentum = [] if layout == "reduce_to_owner" else ["--co-owners", "off"]
    plan = saved_plan(name, folder + f"/{rank}", "--mesh", "1x2", *momentum)
    model = model_of(name)
    twin = copy.deepcopy(model)
    options = None
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    else:
        options = dmuon.ReplicatedOptions(reduce_to_owner=True)
    own = dmuon.dedicate_params(model, plan=plan, options=options)
    owners = dict(zip((m.name for m in plan.specs.matrices), plan.owners, strict=True))
    assert {m.name: own.plan.owners[i] for i, m in enumerate(own.plan.specs.matrices)} == owners
    assert certify(own.plan).proven
    opt, reference = dmuon.Muon(model, **SETTINGS), ReferenceMuon(twin, **SETTINGS)
    for step in range(2):
        loss_of(model, batch(step, rank, world)).backward()
        torch.stack([loss_of(twin, batch(step, r, world)) for r in range(world)]).mean().backward()
        for one in (opt, reference):
            one.step()
            one.zero_grad()
    opt.synchronize()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole_tensor(p), q.detach(), rtol=0, atol=1e-5)
    own.close()


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "fsdp2"), ("qwen2", "ddp"), ("gpt2", "reduce_to_owner")]
)
def test_it_runs(pools, name, layout, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pools(2).run(__name__, "runs", {"folder": str(tmp_path), "name": name, "layout": layout})
