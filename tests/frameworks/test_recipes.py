"""How transformers stores the experts that docs/moe.md lists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmuon.scheduler.select import collect

PAGE = Path(__file__).parents[2] / "docs" / "moe.md"


# transformers' module and class of the experts, by the names on the page.
EXPERTS = {
    "gpt-oss": ("gpt_oss", "GptOssExperts"),
    "Llama 4": ("llama4", "Llama4TextExperts"),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeExperts"),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextExperts"),
    "Mixtral": ("mixtral", "MixtralExperts"),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3Experts"),
    "GLM-4.5": ("glm4_moe", "Glm4MoeExperts"),
}
SIZES = {"hidden_size": 8, "intermediate_size": 6, "moe_intermediate_size": 6, "hidden_act": "silu",
         "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2,
         "num_experts_per_tok": 1}  # fmt: skip


def rows() -> dict[str, dict[str, Any]]:
    """What the page tells to write, by model."""
    table = re.search(r"<!-- gate_up_proj -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None
    found = {}
    for line in table[1].strip().splitlines()[2:]:
        models, _, _, written = (cell.strip(" `") for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(models.split(", "), eval(f"dict({written})"))
    return found


def test_the_page_lists_these_models():
    assert rows().keys() == EXPERTS.keys()


@pytest.mark.parametrize("model", EXPERTS)
def test_the_pieces_are_gate_and_up(model: str) -> None:
    """Without a gate nothing comes out of an expert; its up is linear (in gpt-oss, affine)."""
    pytest.importorskip("transformers")
    folder, name = EXPERTS[model]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    kind = {"Llama 4": "Llama4TextConfig"}.get(model, name.replace("Experts", "Config"))
    config = getattr(configs, kind)(**SIZES)
    config._attn_implementation = config._experts_implementation = "eager"
    experts = getattr(module, name)(config)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3 * (p.ndim == 3))
    specs = collect(nn.ModuleDict({"experts": experts}), **rows()[model])
    gate, up = (m for m in specs.matrices if "gate_up_proj[0]" in m.name)
    x = torch.randn(4, 8)
    if model == "Llama 4":
        forward = lambda: experts(torch.cat([x, x]))[:4]  # noqa: E731
    else:
        chosen, weights = torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)
        forward = lambda: experts(x, chosen, weights)  # noqa: E731
    with torch.no_grad():
        weight = experts.gate_up_proj
        up.view(weight).zero_()
        without, bias = forward(), 1.0 if model == "gpt-oss" else 0.0
        assert bool(without.abs().max() > 1e-6) == bool(bias)  # (up + 1) * gate there
        up.view(weight).normal_(std=0.3)
        once = forward() - without
        up.view(weight).mul_(2)
        torch.testing.assert_close(forward() - without, 2 * once)
        assert float(once.abs().max()) > 1e-3
        gate.view(weight).zero_()
        assert float(forward().abs().max()) == 0.0
