"""What goes where in known models; `python -m tests.unit.test_routing` writes docs/routing.md anew.

The first table is made from published configurations and a preset, the second from small models;
both where transformers is installed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmuon.catalogue import model_specs
from dmuon.scheduler.select import REASONS, Member, _router, collect
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm

DOCS = Path(__file__).parents[2] / "docs" / "routing.md"
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.json"))
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TEXT = _SMALL | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "pad_token_id": 0}
_MOE = _TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
_IMAGE = _SMALL | {"image_size": 32, "patch_size": 8}
# Of transformers: the model, its configuration and its sizes.
REAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _MOE),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", _MOE),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", _MOE | {"intermediate_size_mlp": 96}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL | {"vocab_size": 99}),
    "bert": ("BertForQuestionAnswering", "BertConfig", _SMALL | {"vocab_size": 99}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _SMALL | {"vocab_size": 99}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", _IMAGE),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SMALL | {"conv_dim": (32,) * 7}),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8},
    ),
}  # fmt: skip


def real(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model, config, sizes = REAL[family]
    with torch.device("meta"):
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made


def label(name: str) -> str:
    """The end of a name: of its module, with what is around that if it says little by itself."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    vague = parts[-1] in ("dense", "projection", "proj", "conv", "linear", "out_proj")
    return ".".join(parts[-2:] if vague else parts[-1:])


def rows_of(specs: ModelSpecs) -> tuple[str, str]:
    """The matrices and the larger parameters of AdamW, by the ends of their names."""
    muon, adamw = dict[str, None](), dict[str, dict[str, None]]()
    of = {specs.parameters[m.parameter].name: m for m in specs.matrices}
    for p in specs.parameters:
        if p.algorithm is Algorithm.MUON:
            form = of[p.name].form
            marks = ("ᵀ" if form.is_in_out else "") + (" [E]" if "matrices" in p.reason else "")
            muon[f"`{label(p.name)}`{marks}"] = None
        elif len(p.shape) > 1:
            why = re.split(r" \(|[,:]| parameter '", p.reason)[0]
            why = "one row" if why.endswith("vector") else why
            adamw.setdefault(why, {})[f"`{label(p.name)}`"] = None
    return ", ".join(muon), "; ".join(f"{why}: {', '.join(names)}" for why, names in adamw.items())


def table(models: Mapping[str, Callable[[], ModelSpecs]]) -> list[str]:
    """A row for each model; those that read the same share one."""
    alike = defaultdict[tuple[str, str], list[str]](list)
    for name, specs in models.items():
        alike[rows_of(specs())].append(name)
    return [
        "| model | Muon | AdamW, beside biases and gains |",
        "|---|---|---|",
        *(f"| {', '.join(names)} | {muon} | {adamw} |" for (muon, adamw), names in alike.items()),
    ]


# Not on the page: configurations whose rows would repeat others, and families that have a
# configuration there.
LIKE_OTHERS = ("bamba-9b", "gemma-3-1b", "glm-4.5", "jamba-v0.1", "olmo-2-7b", "qwen3-30b-a3b")
PUBLISHED = ("llama", "mixtral", "gpt_oss", "llama4", "t5", "vit", "whisper")


def configurations() -> list[str]:
    pytest.importorskip("transformers")
    found = {f.stem: partial(model_specs, str(f)) for f in CONFIGS if f.stem not in LIKE_OTHERS}
    return table({**found, "vla (pi0)": partial(model_specs, "vla")})


def modules() -> list[str]:
    return table({name: partial(collect_real, name) for name in REAL if name not in PUBLISHED})


def collect_real(family: str) -> ModelSpecs:
    return collect(real(family), allow_meta=True)


TABLES: dict[str, Callable[[], list[str]]] = {
    "configurations": configurations,
    "transformers": modules,
}


def between(text: str, name: str) -> tuple[int, int]:
    begin = text.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
    return begin, text.index("\n<!-- end -->", begin)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_what_the_code_does(name):
    text, made = DOCS.read_text(encoding="utf-8"), "\n".join(TABLES[name]())
    begin, end = between(text, name)
    assert text[begin:end] == made, "python -m tests.unit.test_routing writes the page anew"


def test_the_page_has_a_row_for_each_rule_in_the_order_of_the_code():
    text = DOCS.read_text(encoding="utf-8")
    begin, end = between(text, "rules")
    said = [row.split(" | ")[1] for row in text[begin:end].splitlines()[2:]]
    assert said == ["Muon" if reason is _router else "AdamW" for reason in REASONS]


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "gpt_oss", "bert", "t5", "mamba"])
def test_names_alone_tell_the_same(family):
    """But for which side of a square weight the outputs are on."""
    model = real(family)
    specs = collect(model, allow_meta=True)
    members = [Member(n, p) for n, p in model.named_parameters(remove_duplicate=False)]
    named = collect(members, allow_meta=True)
    assert [(p.name, p.algorithm) for p in named.parameters] == [
        (p.name, p.algorithm) for p in specs.parameters
    ]
    assert [(m.name, m.shape) for m in named.matrices] == [
        (m.name, m.shape) for m in specs.matrices
    ]


if __name__ == "__main__":
    page = DOCS.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        begin, end = between(page, name)
        page = page[:begin] + "\n".join(make()) + page[end:]
    DOCS.write_text(page, encoding="utf-8")
