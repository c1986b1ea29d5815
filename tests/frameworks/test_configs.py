"""`plan` for configurations as the hub has them, built by transformers.

tests/configs holds them with their published values; nothing is downloaded, no remote code is run.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.__main__ import main
from dmuon.catalogue import PRESETS, build, model_specs
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.select import collect
from dmuon.types import Algorithm, PlanError
from tests import make_presets

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[1] / "configs"
PAGE = FOLDER.parents[1] / "docs/plan-command.md"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
# Elements of transformers' own models. Of Kimi-K2, DeepSeek-V3 and GLM-4.5 without multi-token
# prediction, which transformers leaves out.
ELEMENTS = {
    "bamba-9b": 9_780_235_392, "deepseek-v3": 671_026_404_352, "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472, "glm-4.5": 352_797_814_784, "gpt-oss-20b": 20_914_757_184,
    "jamba-v0.1": 51_570_323_328, "kimi-k2": 1_026_408_209_408, "llama-4-scout": 108_641_793_536,
    "olmo-2-7b": 7_298_617_344, "qwen2.5-vl-7b": 8_292_166_656, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360, "qwen3-next-80b-a3b": 79_674_391_296, "t5-base": 222_903_552,
    "vit-base": 86_389_248, "whisper-large-v3": 1_543_490_560,
}  # fmt: skip
MUON, ADAMW = Algorithm.MUON, Algorithm.ADAMW
# What some parameters are, by the ends of their names: in all families, then in one.
EVERYWHERE = {
    r"embed_tokens\.weight|shared\.weight|lm_head\.weight": ADAMW,
    r"(^|[._])(pos|position|positional)_?emb\w*(\.weight)?|embed_positions\.weight": ADAMW,
    r"patch_embed\w*\.(\w+\.)?weight|relative_attention_bias\.weight|cls_token": ADAMW,
    r"(mixer|mamba|linear_attn)\.(A_log|D|dt_bias|conv1d\.weight)": ADAMW,
    r"(mlp|feed_forward)\.(gate|router)\.weight": MUON,
    r"experts\.(gate_up_proj|down_proj)$": MUON,
    r"[qkvo]_proj\.weight|\.qkv\.weight|in_proj\w*\.weight|out_proj\.weight": MUON,
    r"(^|\.)(bias|\w+_bias)$|norm\w*\.weight$": ADAMW,
}
HAVE = {
    "gpt-oss-20b": {
        "model.layers.0.self_attn.sinks": ADAMW,
        "model.layers.0.mlp.router.weight": MUON,
    },
    "qwen3-next-80b-a3b": {"model.layers.0.mlp.shared_expert_gate.weight": ADAMW},
    "whisper-large-v3": {"model.encoder.conv2.weight": MUON},
    "t5-base": {"encoder.block.0.layer.0.SelfAttention.q.weight": MUON},
    "gemma-3-4b": {"model.multi_modal_projector.mm_input_projection_weight": MUON},
}


def test_all_families_are_here():
    assert CONFIGS.keys() == ELEMENTS.keys() and len(CONFIGS) >= 15
    assert {"auto_map", "quantization_config"} <= CONFIGS["kimi-k2"].keys()


def test_the_largest_is_planned_in_seconds(tmp_path, capsys):
    begin, path = time.process_time(), tmp_path / "plan.json"  # other tests use the cores, too
    options = ["--mesh", "16x8", "--save", str(path), "--json", "-"]
    assert main(["plan", "--model", str(FOLDER / "kimi-k2.json"), *options]) == 0
    seconds = time.process_time() - begin
    data = json.loads(capsys.readouterr().out)
    assert sum(p["numel"] for p in data["parameters"]) == ELEMENTS["kimi-k2"]
    plan = OwnershipPlan.from_json(path.read_text())
    assert len(plan.owners) == len(plan.specs.matrices) and data["certificate"]["ok"]
    assert path.stat().st_size < 16 << 20
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(CONFIGS)} published models" in page
    assert f"Kimi-K2 ({len(plan.owners):,} matrices)" in page
    assert seconds < 20, seconds


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_transformers_and_parameters_go_where_they_should(name):
    model = build(CONFIGS[name])
    assert sum(p.numel() for p in model.parameters()) == ELEMENTS[name]
    specs = collect(model, allow_meta=True)
    routes = {p.name: p.algorithm for p in specs.parameters}
    assert len(routes) > 100
    for pattern, algorithm in EVERYWHERE.items():
        found = {n for n in routes if re.search(pattern, n)}
        assert {n for n in found if routes[n] is not algorithm} == set(), pattern
    assert HAVE.get(name, {}).items() <= routes.items()
    # Each expert is a matrix.
    for p in specs.parameters:
        if "experts." in p.name and len(p.shape) == 3:
            assert f"{p.shape[0]} matrices" in p.reason


def test_the_file_of_presets_is_what_the_command_writes():
    assert make_presets.text(make_presets.made()) == make_presets.TARGET.read_text()
    assert make_presets.CONFIGS.keys() == PRESETS.keys()


SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def test_a_configuration_is_read_from_its_file_or_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"model_type": "llama", "torch_dtype": "float16"}))
    specs = model_specs(str(path))
    assert model_specs(str(tmp_path)) == specs
    assert {p.dtype for p in specs.parameters} == {"float16"}
    assert {p.dtype for p in model_specs(str(path), "float32").parameters} == {"float32"}
    assert len(specs.matrices) == 14


@pytest.mark.parametrize(("kind", "made"), [
    ("llama", "LlamaForCausalLM"), ("t5", "T5ForConditionalGeneration"),
    ("vit", "ViTForImageClassification"), ("bert", "BertLMHeadModel"),
    ("gemma3", "Gemma3ForConditionalGeneration"), ("clip", "CLIPModel"),
])  # fmt: skip
def test_without_architectures_the_type_decides_and_that_is_said(kind, made, caplog):
    assert type(build({"model_type": kind})).__name__ == made
    assert f"no 'architectures': planned as {made}" in caplog.text


def test_a_configuration_may_hold_infinite_numbers_as_transformers_writes_them(tmp_path):
    shape = {"hidden_size": 32, "num_heads": 2, "head_dim": 32, "num_hidden_layers": 1}
    made = transformers.Mamba2Config(vocab_size=64, **shape)
    made.architectures = ["Mamba2ForCausalLM"]
    made.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '{\n      "__float__": "Infinity"' in text
    with torch.device("meta"):
        expected = sum(p.numel() for p in transformers.Mamba2ForCausalLM(made).parameters())
    for written in (text, re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", text)):
        (tmp_path / "config.json").write_text(written)
        assert sum(p.numel for p in model_specs(str(tmp_path)).parameters) == expected


@pytest.mark.parametrize("kind", ["detr", "maskformer"])
def test_nothing_is_looked_up_on_the_internet(kind, monkeypatch):
    def connect(*args: Any, **given: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    asked = {"use_timm_backbone": False, "backbone": "microsoft/resnet-50"}
    with pytest.raises(PlanError, match="'microsoft/resnet-50'.*internet: give its 'backbone_conf"):
        build({"model_type": kind, "use_pretrained_backbone": True} | asked)


@pytest.mark.parametrize(("config", "made"), [
    ({"architectures": ["MPTForCausalLM"], "model_type": "mpt", "auto_map": {}}, "MptForCausalLM"),
    # Not the first of its model_type: the one for the same task.
    ({"architectures": ["MyForCausalLM"], "model_type": "bart"}, "BartForCausalLM"),
    ({"architectures": ["T5Custom"], "model_type": "t5"}, "T5ForConditionalGeneration"),
    ({"architectures": ["LlamaConfig"], "model_type": "llama"}, "LlamaForCausalLM"),
    ({"architectures": [3], "model_type": "llama"}, "LlamaForCausalLM"),
])  # fmt: skip
def test_an_unknown_class_of_a_known_type_is_replaced_and_that_is_said(config, made, caplog):
    small = {"n_layers": 1, "encoder_layers": 1, "num_layers": 1, "num_hidden_layers": 1}
    assert type(build(config | small)).__name__ == made
    assert re.search(f"has no model .* planned as {made}, its model of model_type", caplog.text)
    assert ("auto_map, is not run" in caplog.text) == ("auto_map" in config)


@pytest.mark.parametrize(("config", "told"), [
    ({}, "needs 'architectures' or 'model_type'"),
    (SMALL, "needs 'architectures' or 'model_type'"),
    ({"text_config": CONFIGS["gemma-3-1b"]}, "text_config would each be a configuration"),
    ({"model_type": "no_such"}, "has no model_type 'no_such'"),
    ({"model_type": 7}, "has no model_type 7"),
    ({"model_type": "no_such", "auto_map": {}}, r"its own code, auto_map, is not run.*module:func"),
    ({"architectures": ["MyForCausalLM"], "model_type": "my_llama", "auto_map": {}},
     r"has no model 'MyForCausalLM'.*is not run"),
    ({"architectures": ["LlamaConfig"]}, "has no model 'LlamaConfig'"),
    ({"architectures": [3]}, "has no model 3"),
    ({"architectures": ["os"]}, "has no model 'os'"),
    (SMALL | {"model_type": "llama", "hidden_size": "big"}, "cannot build the model"),
    (SMALL | {"model_type": "llama", "hidden_act": "no_such"}, "cannot build the model.*no_such"),
    ({"model_type": "gpt2", "n_embd": 7, "n_head": 5}, "cannot build the model"),
    (SMALL | {"model_type": "llama", "dtype": "float8_e4m3fn"}, "pass --dtype"),
])  # fmt: skip
def test_what_cannot_be_built_is_a_clear_error(config, told, capsys):
    with pytest.raises(PlanError, match=f"(?s){told}"):
        build(config)
    assert capsys.readouterr() == ("", ""), "an error is one line, and this is none"
