"""Models to plan for: published architectures, Hugging Face configurations, users' functions.

`python -m tests.unit.test_presets` prints the table of presets that docs/plan-command.md holds.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from dmuon.catalogue import PRESETS, dtype_of, model_specs, stages_of
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm, PlanError, SelectionError

MUON, ADAMW = Algorithm.MUON, Algorithm.ADAMW
DOCS = Path(__file__).parents[2] / "docs" / "plan-command.md"

# Elements of the published weights, tied weights once. DeepSeek-V3 without multi-token prediction,
# and without the biases of its routers, which are buffers.
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


planned = cache(model_specs)


def total(specs: ModelSpecs) -> int:
    return sum(p.numel for p in specs.parameters + specs.frozen)


def shapes(specs: ModelSpecs) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in specs.parameters}


def routes(specs: ModelSpecs) -> dict[str, tuple[Algorithm, str]]:
    return {p.name: (p.algorithm, p.reason) for p in specs.parameters}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_elements_of_the_published_weights_and_sends_layers_to_muon(name):
    specs = planned(name)
    made_up = {"moe-60x256", "vla"}
    assert name in made_up or total(specs) == PUBLISHED[name]
    assert f"\n{row(name)}\n" in DOCS.read_text(encoding="utf-8"), (
        "python -m tests.unit.test_presets"
    )
    assert {p.dtype for p in specs.parameters} == {"bfloat16"}
    assert specs.frozen == ()
    for parameter in specs.parameters:
        at_an_end = any(part in parameter.name for part in ("embed", "wte", "wpe", "lm_head"))
        if len(parameter.shape) < 2:
            assert (parameter.algorithm, parameter.reason) == (ADAMW, "1-D")
        elif not at_an_end:
            assert parameter.algorithm is MUON, parameter


def test_embeddings_and_heads_are_routed_by_the_rules_of_any_model():
    untied, tied = (routes(planned(f"qwen2.5-{size}")) for size in ("7b", "3b"))
    assert untied["model.embed_tokens.weight"] == (ADAMW, "embedding (Embedding)")
    assert untied["lm_head.weight"] == (ADAMW, "output head (get_output_embeddings)")
    assert tied["model.embed_tokens.weight"][1] == "embedding (Embedding), tied to 'lm_head.weight'"
    vla = routes(planned("vla"))
    for name in ("position_embedding", "patch_embedding"):
        assert vla[f"vision_tower.embeddings.{name}.weight"][0] is ADAMW


# ---- Hugging Face configurations: more in tests/frameworks/test_configs.py -----------------


def test_without_transformers_presets_are_there_and_configurations_say_what_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises
    assert total(model_specs("qwen3-30b-a3b")) == PUBLISHED["qwen3-30b-a3b"]
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(PlanError, match="pip install transformers, or plan a preset.*gpt2, gpt2-m"):
        model_specs(str(path))


def test_the_dtype_is_that_of_the_configuration():
    assert dtype_of({"torch_dtype": "float16"}) == "float16"
    assert dtype_of({"dtype": "float32", "torch_dtype": "float16"}) == "float32"
    assert dtype_of({"text_config": {"torch_dtype": "float16"}}) == "float16"
    assert dtype_of({}) == dtype_of({"dtype": None}) == "bfloat16"
    for wrong in ("float8_e4m3fn", "auto", ["float32"]):
        with pytest.raises(PlanError, match="--dtype"):
            dtype_of({"torch_dtype": wrong})


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for missing in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(PlanError, match=r"(config|missing).json.*No such file"):
            model_specs(str(missing))
    for content, complaint in (
        (b"{", "is no configuration: expected JSON"),
        (b"[1]", "expected an object, found a list"),
        (b"\xff\xfe\x00", "is no configuration"),
    ):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=complaint):
            model_specs(str(path))


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


@pytest.mark.parametrize(("source", "function", "complaint"), [
    ("", "build", "no function 'build'"),
    ("def build(width): pass", "build", r"failed: TypeError.*width"),
    ("def build(): raise KeyError('depth')", "build", r"failed: KeyError\('depth'\)"),
    ("def build(): return {}", "build", "returned dict, expected a torch.nn.Module"),
    ("1 / 0", "build", r"importing .* failed: ZeroDivisionError"),
    ("raise SystemExit", "build", r"importing .* failed: SystemExit"),
])  # fmt: skip
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


def test_options_reach_the_specs():
    whole = model_specs("qwen2.5-0.5b")
    cut = model_specs("Qwen2.5-0.5B", "float32", splits={"*.gate_proj.weight": [4000, 864]},
                      heads={"*.q_proj.weight": 14})  # fmt: skip
    assert len(cut.matrices) == len(whole.matrices) + 24 * (1 + 13)
    assert {m.dtype for m in cut.matrices} == {"float32"}
    assert shapes(cut) == shapes(whole)
    with pytest.raises(SelectionError, match="matches none of 168 matrix"):
        model_specs("qwen2.5-0.5b", heads={"*.qkv.weight": 2})
    for dtype in ("bf16", "int8", ""):
        with pytest.raises(PlanError, match="unknown dtype"):
            model_specs("gpt2", dtype)


def row(name: str) -> str:
    """Of the table of presets in the documentation."""
    specs = planned(name)
    return f"| `{name}` | {total(specs) / 1e9:,.3f} B | {len(specs.matrices):,} |"


# ---- pipeline stages ---------------------------------------------------------------------

TABLE, HEAD = (0, "embed_tokens", False), "lm_head"


@pytest.mark.parametrize(("name", "how", "layers", "tables"), [
    ("llama3-8b", (4, 1), [range(8), range(8, 16), range(16, 24), range(24, 32)],
     [TABLE, (3, HEAD, False)]),
    ("qwen2.5-3b", (5, 1), [range(7), range(7, 15), range(15, 22), range(22, 29), range(29, 36)],
     [TABLE, (4, HEAD, True)]),
    ("llama3.2-1b", (2, 2), [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]],
     [TABLE, (1, HEAD, True)]),
    ("llama3.2-1b", (2, 2, True), [[*range(4), *range(12, 16)], range(4, 12)],
     [(0, "embed_tokens", True)]),
])  # fmt: skip
def test_stages_share_out_layers_in_order_and_tables_at_the_ends(name, how, layers, tables):
    stages = stages_of(name, None, *how[:2], is_v=len(how) > 2)
    names, found = [m.name for m in planned(name).matrices], []
    assert sorted(m.name for s in stages for m in s.specs.matrices) == sorted(names)
    for stage, numbers in zip(stages, layers, strict=True):
        own = [m.name for m in stage.specs.matrices]
        assert own == sorted(own, key=names.index)
        assert own == [stage.specs.parameters[m.parameter].name for m in stage.specs.matrices]
        assert {int(n.split(".")[2]) for n in own} == {*numbers}
        of = [(p.name.split(".")[-2], p.reason) for p in stage.specs.parameters]
        found += [(stage.rank, n, "tied to" in why) for n, why in of if "embedding" in why]
    assert found == tables


def two_stacks() -> torch.nn.Module:
    """A decoder with experts and its own table, which is tied to that of the encoder."""
    model = torch.nn.ModuleDict()
    for part in ("encoder", "decoder"):
        blocks = torch.nn.ModuleList(torch.nn.MultiheadAttention(4, 1) for _ in "ab")
        model[part] = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "block": blocks})
        model[part]["norm"] = torch.nn.LayerNorm(4)
    model["decoder"]["embed"].weight = model["encoder"]["embed"].weight
    blocks[0].experts = torch.nn.Module()
    blocks[0].experts.up_proj = torch.nn.Parameter(torch.empty(2, 4, 4))
    return model


def test_a_stack_keeps_what_is_beside_it():
    text = f"{__name__}:two_stacks"
    for stage, part in zip(stages_of(text, None, 2), ("encoder", "decoder"), strict=True):
        assert stage.holds == [f"{part}.{n}" for n in ("block.0", "block.1", "embed", "norm")]
        assert stage.is_dense is (part == "encoder")


if __name__ == "__main__":
    print("\n".join(map(row, PRESETS)))
