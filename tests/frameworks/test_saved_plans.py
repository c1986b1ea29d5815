"""A plan saved from a model's configuration is what its transformers model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmuon.__main__ import main
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.plan import OwnershipPlan, fitted_plan
from dmuon.scheduler.select import collect
from dmuon.scheduler.topology import Topology

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
OF_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 48, "n_positions": 32}
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


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits(name, tmp_path, capsys):
    kind, sizes = CONFIGS[name]
    config = getattr(transformers, kind)(**sizes)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    path = tmp_path / "plan.json"
    options = ["--mesh", "2x2", "--dtype", "float32", "--save", str(path)]
    assert main(["plan", "--model", str(tmp_path), *options]) == 0
    plan = OwnershipPlan.from_json(path.read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).float()
    found = fitted_plan(plan, collect(model, allow_meta=True), Topology.flat(4), plan.layout)
    certificate = certify(found)
    assert certificate.ok and certificate.proven and found.loads_ms == plan.loads_ms
