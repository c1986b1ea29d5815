"""Models to plan for: published architectures, Hugging Face configurations, users' functions.

`python -m tests.unit.test_presets` prints the table of presets that docs/plan-command.md holds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dmuon.catalogue import MODEL_TYPES, PRESETS, build, dtype_of, model_specs
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm, DmuonError, PlanError, SelectionError

MUON, ADAMW = Algorithm.MUON, Algorithm.ADAMW
DOCS = Path(__file__).parents[2] / "docs" / "plan-command.md"

# Elements of the published weights, tied weights once. DeepSeek-V3 without multi-token prediction.
# Elements of the published weights, tied weights once. DeepSeek-V3 without multi-token prediction.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_404_352,
}  # fmt: skip
# Published with an embedding of 257,216 rows, of which pi0 has the 257,152 that are used.
PALIGEMMA_3B = 2_923_466_480 - (257_216 - 257_152) * 2048


def total(specs: ModelSpecs) -> int:
    return sum(p.numel for p in specs.parameters + specs.frozen)


def shapes(specs: ModelSpecs) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in specs.parameters}


def routes(specs: ModelSpecs) -> dict[str, tuple[Algorithm, str]]:
    return {p.name: (p.algorithm, p.reason) for p in specs.parameters}


def built(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in build(config).named_parameters()}


def elements(config: Mapping[str, object]) -> int:
    return sum(p.numel() for p in build(config).parameters())


def test_the_vla_mix_is_paligemma_and_an_action_expert_of_300m():
    parts: Counter[str] = Counter()
    for p in model_specs("vla").parameters:
        parts[p.name.split(".")[0]] += p.numel
    language = ("vision_tower", "multi_modal_projector", "language_model")
    assert sum(parts[part] for part in language) == PALIGEMMA_3B
    assert parts["action_expert"] == pytest.approx(311e6, rel=2e-3)
    assert {"state_proj", "action_in_proj", "action_out_proj"} <= parts.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_elements_of_the_published_weights_and_sends_layers_to_muon(name):
    specs = model_specs(name)
    made_up = {"moe-60x256", "vla"}
    assert name in made_up or total(specs) == PUBLISHED[name]
    assert len(PRESETS[name]["source"]) > 10
    assert {p.dtype for p in specs.parameters} == {"bfloat16"}
    assert specs.frozen == ()
    for parameter in specs.parameters:
        at_an_end = any(part in parameter.name for part in ("embed", "wte", "wpe", "lm_head"))
        if len(parameter.shape) < 2:
            assert (parameter.algorithm, parameter.reason) == (ADAMW, "1-D")
        elif not at_an_end:
            assert parameter.algorithm is MUON, parameter


def test_embeddings_and_heads_are_routed_by_the_rules_of_any_model():
    untied, tied = (routes(model_specs(f"qwen2.5-{size}")) for size in ("7b", "3b"))
    assert untied["model.embed_tokens.weight"] == (ADAMW, "embedding (Embedding)")
    assert untied["lm_head.weight"] == (ADAMW, "output head ('lm_head')")
    assert tied["model.embed_tokens.weight"][1] == "embedding (Embedding), tied to 'lm_head.weight'"
    vla = routes(model_specs("vla"))
    for name in ("position_embedding", "patch_embedding"):
        assert vla[f"vision_tower.embeddings.{name}.weight"][0] is ADAMW


# ---- Hugging Face configurations ---------------------------------------------------------


def config_of(
    kind: str,
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int = 0,
    kv_heads: int = 0,
    intermediate: int = 0,
    **fields: object,
) -> dict[str, object]:
    """A configuration; sizes of 0 are left out."""
    sizes = {
        "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }  # fmt: skip
    return {"model_type": kind} | {k: v for k, v in sizes.items() if v} | fields


# fmt: off
_UNTIED = {"tie_word_embeddings": False}
_LLAMA = config_of("llama", 128256, 4096, 32, 32, 8, 14336, attention_bias=False, **_UNTIED,
                   torch_dtype="bfloat16", architectures=["LlamaForCausalLM"])
_QWEN2 = config_of("qwen2", 152064, 3584, 28, 28, 4, 18944, **_UNTIED)
_QWEN3 = config_of("qwen3", 151936, 1024, 28, 16, 8, 3072, head_dim=128, tie_word_embeddings=True)
_QWEN3_MOE = config_of("qwen3_moe", 151936, 2048, 48, 32, 4, 6144, head_dim=128, num_experts=128,
                       moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[])
_MIXTRAL = config_of("mixtral", 32000, 4096, 32, 32, 8, 14336, num_local_experts=8,
                     sliding_window=None)
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "moe_layer_freq": 1}
_DEEPSEEK_V2 = config_of("deepseek_v2", 102400, 2048, 27, 16, 16, 10944, q_lora_rank=None,
                         moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
                         first_k_dense_replace=1, **_LATENT)
_DEEPSEEK_V3 = config_of("deepseek_v3", 129280, 7168, 61, 128, 128, 18432, q_lora_rank=1536,
                         moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
                         first_k_dense_replace=3, num_nextn_predict_layers=1, **_LATENT)
_GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1600,
         "n_layer": 48, "n_head": 25, "n_ctx": 1024}
_MISTRAL = config_of("mistral", 32000, 4096, 32, 32, 8, 14336)
_GEMMA = config_of("gemma", 256000, 2048, 18, 8, 1, 16384, head_dim=256)
_JAMBA = config_of("jamba", 65536, 4096, 32, 32, 8, 14336, num_experts=16)
_MAMBA = config_of("mamba", 50280, 768, 24)
_MAMBA2 = config_of("mamba2", 32768, 4096, 64, num_heads=128, head_dim=64, n_groups=8,
                    state_size=128)
_BAMBA = config_of("bamba", 128256, 4096, 32, 32, 8, 14336, attn_layer_indices=[9, 18, 27],
                   mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128)
_MLLAMA_TEXT = config_of("mllama_text_model", 128256, 4096, 40, 32, 8, 14336,
                         cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38])
_PRESET_CONFIGS = {
    "llama3-8b": _LLAMA, "qwen2.5-7b": _QWEN2, "qwen3-0.6b": _QWEN3, "qwen3-30b-a3b": _QWEN3_MOE,
    "mixtral-8x7b": _MIXTRAL, "deepseek-v2-lite": _DEEPSEEK_V2, "deepseek-v3": _DEEPSEEK_V3,
    "gpt2-xl": _GPT2,
}
# Elements of the published weights; of Llama-3.2-11B-Vision those of the language model.
_OTHERS = [
    (_MISTRAL, 7_241_732_096),
    (_GEMMA, 2_506_172_416),
    (config_of("gemma2", 256000, 2304, 26, 8, 4, 9216, head_dim=256), 2_614_341_888),
    (config_of("gemma3_text", 262144, 1152, 26, 4, 1, 6912), 999_885_952),
    (config_of("phi3", 32064, 3072, 32, 32, 32, 8192, **_UNTIED), 3_821_079_552),
    (config_of("gpt_oss", 201088, 2880, 24, 64, 8, 2880, num_local_experts=32), 20_914_757_184),
    (config_of("qwen2_moe", 151936, 2048, 24, 16, 16, 5632, num_experts=60,
               moe_intermediate_size=1408, shared_expert_intermediate_size=5632), 14_315_784_192),
    (_JAMBA, 51_570_323_328),
    (_MAMBA, 129_135_360),
    (config_of("falcon_mamba", 65024, 4096, 64, **_UNTIED), 7_272_665_088),
    (_MAMBA2, 7_285_403_648),
    (_BAMBA, 9_780_235_392),
    (_MLLAMA_TEXT, 9_775_192_080),
    ({"model_type": "mllama", "text_config": _MLLAMA_TEXT, "vision_config": {}}, 9_775_192_080),
]
# fmt: on


@pytest.mark.parametrize("preset", _PRESET_CONFIGS)
def test_a_published_configuration_gives_the_parameters_of_its_preset(preset):
    assert built(_PRESET_CONFIGS[preset]) == built(PRESETS[preset]["config"])


@pytest.mark.parametrize(("config", "published"), _OTHERS)
def test_other_configurations_have_as_many_elements_as_the_published_weights(config, published):
    assert elements(config) == published


_ALL = [*_PRESET_CONFIGS.values(), *(config for config, _ in _OTHERS)]


def test_every_known_type_is_tested():
    tested = [*_ALL, PRESETS["vla"]["config"]]
    assert {config["model_type"] for config in tested} == MODEL_TYPES.keys()


SHAPES = {
    "deepseek_v3": {
        "layers.3.mlp.experts.down_proj": (256, 7168, 2048),
        "layers.3.mlp.shared_experts.up_proj.weight": (2048, 7168),
        "layers.60.self_attn.q_b_proj.weight": (24576, 1536),
        "layers.60.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    },
    "mixtral": {"layers.0.block_sparse_moe.experts.w1": (8, 14336, 4096)},
    "gpt2": {"transformer.h.47.attn.c_attn.weight": (1600, 4800)},
    "gpt_oss": {
        "layers.0.self_attn.sinks": (64,),
        "layers.0.mlp.router.weight": (32, 2880),
        "layers.0.mlp.experts.gate_up_proj": (32, 2880, 5760),
    },
    "qwen2_moe": {"layers.0.mlp.shared_expert_gate.weight": (1, 2048)},
    "jamba": {
        "layers.0.mamba.in_proj.weight": (16384, 4096),
        "layers.0.mamba.x_proj.weight": (256 + 2 * 16, 8192),
        "layers.0.mamba.conv1d.weight": (8192, 1, 4),
        "layers.0.feed_forward.up_proj.weight": (14336, 4096),
        "layers.1.feed_forward.experts.up_proj": (16, 14336, 4096),
        "layers.4.self_attn.k_proj.weight": (1024, 4096),
        "final_layernorm.weight": (4096,),
    },
    "bamba": {
        "layers.0.mamba.in_proj.weight": (2 * 8192 + 2 * 128 + 128, 4096),
        "layers.0.mamba.A_log": (128,),
        "layers.9.self_attn.o_proj.weight": (4096, 4096),
    },
    "mllama_text_model": {
        "language_model.embed_tokens.weight": (128264, 4096),
        "language_model.layers.3.cross_attn.q_norm.weight": (128,),
        "language_model.layers.3.cross_attn_attn_gate": (1,),
        "language_model.layers.4.self_attn.v_proj.weight": (1024, 4096),
        "lm_head.weight": (128256, 4096),
    },
}


@pytest.mark.parametrize("kind", SHAPES)
def test_names_and_shapes_of_a_configuration_are_those_of_the_implementation(kind):
    (config,) = [config for config in _ALL if config["model_type"] == kind]
    specs = collect(build(config), allow_meta=True)
    found = {name.removeprefix("model."): shape for name, shape in shapes(specs).items()}
    assert SHAPES[kind].items() <= found.items()
    # What a mixer holds beside its projections is no matrix.
    for name, (algorithm, reason) in routes(specs).items():
        if name.endswith((".A_log", ".D", ".sinks", "_gate.weight", ".experts.down_proj_bias")):
            assert algorithm is ADAMW, (name, reason)
        elif name.endswith((".in_proj.weight", ".cross_attn.q_proj.weight", ".experts.down_proj")):
            assert algorithm is MUON, (name, reason)


def test_absent_keys_have_the_defaults_of_hugging_face():
    small = {**_LLAMA, "num_hidden_layers": 1}
    config = {k: v for k, v in small.items() if k not in ("num_key_value_heads", "torch_dtype")}
    assert built(config) == built({**small, "num_key_value_heads": 32})
    assert built({**small, "head_dim": None}) == built(small)
    odd = built({**small, "num_attention_heads": 30, "head_dim": 64})
    assert odd["model.layers.0.self_attn.q_proj.weight"] == (30 * 64, 4096)
    assert built({**_MAMBA, "time_step_rank": 48}) == built(_MAMBA)
    assert built({**_GPT2, "n_inner": None}) == built(_GPT2)
    narrow = built({**_GPT2, "n_inner": 7})
    assert narrow["transformer.h.0.mlp.c_fc.weight"] == (1600, 7)
    assert "lm_head.weight" in built(_MISTRAL) and "lm_head.weight" not in built(_GEMMA)


@pytest.mark.parametrize(("option", "more"), [
    ({"attention_bias": True}, 32 * (4096 + 2 * 1024 + 4096)),
    ({"mlp_bias": True}, 32 * (2 * 14336 + 4096)),
    ({"tie_word_embeddings": True}, -128256 * 4096),
])  # fmt: skip
def test_options_of_a_configuration_are_followed(option, more):
    assert elements(_LLAMA | option) - PUBLISHED["llama3-8b"] == more


def test_layers_without_experts_are_those_that_the_configuration_names():
    sparse = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    names = built({**_QWEN3_MOE, **sparse})
    assert {n.split(".")[2] for n in names if ".experts." in n} == {"3", "5"}
    assert {n.split(".")[2] for n in names if ".mlp.up_proj" in n} == {"0", "1", "2", "4"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *(({**_LLAMA, "model_type": kind}, r"llama, mamba.*module:function")
          for kind in ("bert", None, 7, ["llama"])),
        *(({k: v for k, v in _LLAMA.items() if k != key}, f"has no '{key}'")
          for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")),
        *(({**_LLAMA, "hidden_size": value}, "hidden_size: expected a whole number from 1")
          for value in ("4096", 0, -4096, True, 10**18, 3.0)),
        ({**_LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({**_LLAMA, "attention_bias": None}, "attention_bias: .* found None"),
        ({**_LLAMA, "head_dim": []}, "head_dim: expected"),
        ({**_LLAMA, "num_attention_heads": 30}, "'head_dim'"),
        *(({**_QWEN3_MOE, "mlp_only_layers": layers}, "mlp_only_layers")
          for layers in (3, "0", ["0"])),
        ({**_MAMBA2, "head_dim": 32}, "'head_dim' = 32, which do not fill"),
        ({**_BAMBA, "mamba_d_head": 32}, "'mamba_d_head' = 32, which do not fill"),
        ({"model_type": "mllama", "text_config": 3}, "text_config: expected an object, found 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_configuration_is_named(config, told):
    with pytest.raises(PlanError, match=told):
        build(config)


def test_the_dtype_is_that_of_the_configuration():
    assert dtype_of({"torch_dtype": "float16"}) == "float16"
    assert dtype_of({"dtype": "float32", "torch_dtype": "float16"}) == "float32"
    assert dtype_of({}) == "bfloat16"
    for wrong in ("float8_e4m3fn", "auto", ["float32"]):
        with pytest.raises(PlanError, match="--dtype"):
            dtype_of({"torch_dtype": wrong})


def test_a_configuration_is_read_from_its_file_or_folder(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    path.write_text(json.dumps(_LLAMA | sizes | {"torch_dtype": "float16"}), encoding="utf-8")
    specs = model_specs(str(path))
    assert model_specs(str(tmp_path)) == specs
    assert {p.dtype for p in specs.parameters} == {"float16"}
    assert {p.dtype for p in model_specs(str(path), "float32").parameters} == {"float32"}
    assert len(specs.matrices) == 14


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for missing in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(PlanError, match=r"(config|missing).json.*No such file"):
            model_specs(str(missing))
    for content, complaint in (
        (b"{", "is no configuration: expected JSON"),
        (b"[1]", "expected an object, found a list"),
        (b"null", "expected an object, found None"),
        (b"[" * 100_000, "nested"),
        (b"\xff\xfe\x00", "is no configuration"),
    ):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=complaint):
            model_specs(str(path))


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=2),
)  # fmt: skip


@settings(max_examples=60)
@given(kind=st.sampled_from(sorted(MODEL_TYPES)), data=st.data())
def test_whatever_a_configuration_holds_there_is_a_model_or_a_clear_error(kind, data):
    whole = {
        **_JAMBA, **_MAMBA2, **_BAMBA, **_OTHERS[6][0], **_MLLAMA_TEXT, **_QWEN3_MOE, **_MIXTRAL,
        **_DEEPSEEK_V3, **_GPT2, "mlp_bias": False, "model_type": kind, "n_inner": None,
        "mamba_d_head": "auto",
    }  # fmt: skip
    config = {
        key: min(value, 8) if isinstance(value, int) and value > 1 else value
        for key, value in whole.items()
    }
    for key in data.draw(st.lists(st.sampled_from(sorted(config.keys() - {"model_type"})))):
        config[key] = data.draw(_VALUES)
    try:
        assert elements(config) > 0
    except PlanError as error:
        assert "model configuration" in str(error)


# ---- users' functions --------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module into a new current folder; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    name = f"user_model_{tmp_path.name}"

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    yield write
    sys.modules.pop(name, None)


GOOD = """
import torch
from torch import nn

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(4, 5))

def here():
    print("building")
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(4, 5))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 7, device="meta", dtype=torch.float16)
"""


def test_a_function_gives_the_model(user_module, capsys):
    name = user_module(GOOD)
    path = list(sys.path)
    specs = model_specs(f"{name}:on_meta")
    assert [(m.name, m.shape, m.dtype) for m in specs.matrices] == [
        ("1.weight", (4, 6), "float32"),
        ("2.weight", (5, 4), "float32"),
    ]
    assert routes(specs)["0.weight"] == (ADAMW, "embedding (Embedding)")
    assert model_specs(f"{name}:here") == specs
    assert sys.path == path
    out, err = capsys.readouterr()
    assert (out, err) == ("", "building\n")


@pytest.mark.parametrize(
    ("source", "function", "complaint"),
    [
        ("", "build", "no function 'build'"),
        ("build = 3", "build", "no function 'build'"),
        ("def build(width): pass", "build", r"failed: TypeError.*width"),
        ("def build(): raise KeyError('depth')", "build", r"failed: KeyError\('depth'\)"),
        ("def build(): raise SystemExit(3)", "build", r"failed: SystemExit\(3\)"),
        ("def build(): return {}", "build", "returned dict, expected a torch.nn.Module"),
        ("1 / 0", "build", r"importing .* failed: ZeroDivisionError"),
        ("raise SystemExit", "build", r"importing .* failed: SystemExit"),
        ("import nothing_of_this_name", "build", "importing .* failed: ModuleNotFoundError"),
        ("def build(:", "build", "importing .* failed: SyntaxError"),
    ],
)
def test_a_function_that_gives_no_model_is_a_clear_error(user_module, source, function, complaint):
    with pytest.raises(PlanError, match=complaint):
        model_specs(f"{user_module(source)}:{function}")
    for text in ("no_such_module_at_all:build", ".relative:build", "a b:c"):
        with pytest.raises(PlanError, match="importing .* failed"):
            model_specs(text)


@pytest.mark.parametrize(("text", "closest"), [
    ("qwen2.5-7", "qwen2.5-7b"), ("lama3-8b", "llama3-8b"), ("mixtral", "mixtral-8x7b"),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("gpt-2", "gpt2"),
])  # fmt: skip
def test_an_unknown_name_is_answered_with_the_closest(text, closest):
    with pytest.raises(PlanError, match=rf"did you mean [^?]*{closest}[,?]"):
        model_specs(text)


@pytest.mark.parametrize("text", ["zzz", "", ":", "a:", ":b", "x" * 5000, "q\\0ü "])
def test_an_odd_name_is_answered_with_all_presets(text):
    with pytest.raises(PlanError, match="no preset and no file") as error:
        model_specs(text)
    assert "did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in PRESETS)
    assert "module:function" in str(error.value)


def test_options_reach_the_specs():
    whole = model_specs("qwen2.5-0.5b")
    cut = model_specs("Qwen2.5-0.5B", "float32", splits={"*.gate_proj.weight": [4000, 864]},
                      heads={"*.q_proj.weight": 14})  # fmt: skip
    assert len(cut.matrices) == len(whole.matrices) + 24 * (1 + 13)
    assert {m.dtype for m in cut.matrices} == {"float32"}
    assert shapes(cut) == shapes(whole)
    with pytest.raises(SelectionError, match="matches no matrix"):
        model_specs("qwen2.5-0.5b", heads={"*.qkv.weight": 2})
    for dtype in ("bf16", "int8", ""):
        with pytest.raises(PlanError, match="unknown dtype"):
            model_specs("gpt2", dtype)


def test_parameters_on_the_meta_device_are_taken_on_request_only():
    meta = nn.Linear(4, 6, device="meta")
    assert collect(nn.Sequential(meta), allow_meta=True) == collect(nn.Sequential(nn.Linear(4, 6)))
    for other, told in (
        (nn.Linear(6, 4, dtype=torch.complex64), r"'1.weight' is complex"),
        (nn.LazyLinear(4, device="meta"), r"'1.weight' is uninitialized"),
    ):
        with pytest.raises(DmuonError, match=told):
            collect(nn.Sequential(meta, other), allow_meta=True)


def table() -> list[str]:
    """The table of presets in the documentation."""
    rows = ["| preset | parameters | matrices | shapes from |", "|---|---:|---:|---|"]
    for name, preset in PRESETS.items():
        specs = model_specs(name)
        billions = f"{total(specs) / 1e9:,.3f} B"
        rows.append(f"| `{name}` | {billions} | {len(specs.matrices):,} | {preset['source']} |")
    return rows


def test_the_documentation_lists_the_presets():
    documented = DOCS.read_text(encoding="utf-8").splitlines()
    expected = table()
    begin = documented.index(expected[0])
    assert documented[begin : begin + len(expected)] == expected


if __name__ == "__main__":
    print("\n".join(table()))
