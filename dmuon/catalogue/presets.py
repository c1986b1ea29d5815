"""Models to plan for without having them: published architectures as Hugging Face configurations.

`model_specs` turns a preset's name, a Hugging Face configuration or a user's own function into what
the scheduler takes.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dmuon.catalogue.hf_config import build, read_config
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs
from dmuon.types import Heads, PlanError, Splits


@dataclass(frozen=True, slots=True)
class Preset:
    """The configuration of one architecture, and the publication that its numbers are from."""

    config: Mapping[str, Any]
    source: str


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim",
)  # fmt: skip


def _config(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **more}


def _gpt2(name: str, hidden: int, layers: int) -> Preset:
    config = {
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": hidden,
        "n_layer": layers,
    }  # fmt: skip
    source = f"GPT-2 paper (Radford et al. 2019), table 2; config.json of openai-community/{name}"
    return Preset(config, source)


def _llama(small: str, *sizes: int) -> Preset:
    """``small``: the size of a Llama 3.2, which ties its embedding."""
    source = "Llama 3 paper (Dubey et al. 2024), table 3"
    if small:
        source = f"Llama 3.2 model card; config.json of meta-llama/Llama-3.2-{small}"
    return Preset(_config("llama", 128256, *sizes, tie_word_embeddings=bool(small)), source)


def _qwen25(size: str, *sizes: int) -> Preset:
    tied = size in ("0.5B", "1.5B", "3B")
    vocabulary = 151936 if tied else 152064  # padded
    return Preset(
        _config("qwen2", vocabulary, *sizes, tie_word_embeddings=tied),
        f"Qwen2.5 technical report (2024), table 1; config.json of Qwen/Qwen2.5-{size}",
    )


def _qwen3(size: str, *sizes: int, **experts: int) -> Preset:
    kind, tied = "qwen3_moe" if experts else "qwen3", size in ("0.6B", "1.7B", "4B")
    return Preset(
        _config(kind, 151936, *sizes, tie_word_embeddings=tied, **experts),
        f"Qwen3 technical report (2025), tables 1 and 2; config.json of Qwen/Qwen3-{size}",
    )


# hidden size, layers, heads, heads of keys, width of the MLP, size of a head
_DENSE = {
    "gpt2": _gpt2("gpt2", 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48),
    "llama3-8b": _llama("", 4096, 32, 32, 8, 14336, 128),
    "llama3-70b": _llama("", 8192, 80, 64, 8, 28672, 128),
    "llama3-405b": _llama("", 16384, 126, 128, 8, 53248, 128),
    "llama3.2-1b": _llama("1B", 2048, 16, 32, 8, 8192, 64),
    "llama3.2-3b": _llama("3B", 3072, 28, 24, 8, 8192, 128),
    "qwen2.5-0.5b": _qwen25("0.5B", 896, 24, 14, 2, 4864, 64),
    "qwen2.5-1.5b": _qwen25("1.5B", 1536, 28, 12, 2, 8960, 128),
    "qwen2.5-3b": _qwen25("3B", 2048, 36, 16, 2, 11008, 128),
    "qwen2.5-7b": _qwen25("7B", 3584, 28, 28, 4, 18944, 128),
    "qwen2.5-14b": _qwen25("14B", 5120, 48, 40, 8, 13824, 128),
    "qwen2.5-32b": _qwen25("32B", 5120, 64, 40, 8, 27648, 128),
    "qwen2.5-72b": _qwen25("72B", 8192, 80, 64, 8, 29568, 128),
    "qwen3-0.6b": _qwen3("0.6B", 1024, 28, 16, 8, 3072, 128),
    "qwen3-1.7b": _qwen3("1.7B", 2048, 28, 16, 8, 6144, 128),
    "qwen3-4b": _qwen3("4B", 2560, 36, 32, 8, 9728, 128),
    "qwen3-8b": _qwen3("8B", 4096, 36, 32, 8, 12288, 128),
    "qwen3-14b": _qwen3("14B", 5120, 40, 40, 8, 17408, 128),
    "qwen3-32b": _qwen3("32B", 5120, 64, 64, 8, 25600, 128),
}

_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


_EXPERTS = {
    "qwen3-30b-a3b": _qwen3(
        "30B-A3B", 2048, 48, 32, 4, 6144, 128, num_experts=128, moe_intermediate_size=768
    ),
    "qwen3-235b-a22b": _qwen3(
        "235B-A22B", 4096, 94, 64, 4, 12288, 128, num_experts=128, moe_intermediate_size=1536
    ),
    "mixtral-8x7b": Preset(
        _config("mixtral", 32000, 4096, 32, 32, 8, 14336, 128, num_local_experts=8),
        "Mixtral of Experts paper (Jiang et al. 2024), table 1",
    ),
    "mixtral-8x22b": Preset(
        _config("mixtral", 32000, 6144, 56, 48, 8, 16384, 128, num_local_experts=8),
        "config.json of mistralai/Mixtral-8x22B-v0.1",
    ),
    "deepseek-v2-lite": Preset(
        _LATENT | {
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
            "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 10944,
            "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        "DeepSeek-V2 paper (2024), appendix B; config.json of deepseek-ai/DeepSeek-V2-Lite",
    ),
    "deepseek-v3": Preset(
        _LATENT | {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
            "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
            "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "q_lora_rank": 1536,
        },
        "DeepSeek-V3 technical report (2024), section 4.2, without multi-token prediction",
    ),
    "moe-60x256": Preset(
        _config(
            "qwen3_moe", 128256, 4096, 60, 32, 8, 1536, 128,
            num_experts=256, moe_intermediate_size=1536,
        ),
        "made up: a scaling target of about 46,000 matrices",
    ),
}  # fmt: skip

_PI0 = {
    "model_type": "pi0",
    "vision_config": {
        "hidden_size": 1152, "num_hidden_layers": 27, "intermediate_size": 4304, "patch_size": 14,
        "image_size": 224,
    },
    "text_config": _config("gemma", 257152, 2048, 18, 8, 1, 16384, 256),
    "expert_config": _config("gemma", 257152, 1024, 18, 8, 1, 4096, 256),
    "action_dim": 32,
}  # fmt: skip
_PI0_SOURCE = "pi0 paper (Black et al. 2024): PaliGemma (SigLIP, Gemma 2B) and a 300M action expert"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**_DENSE, **_EXPERTS, "vla": Preset(_PI0, _PI0_SOURCE)}
)


@contextlib.contextmanager
def _visible_folder(folder: str) -> Iterator[None]:
    """Modules of this folder can be imported; what they print goes to standard error."""
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _from_function(text: str, dtype: str | None) -> nn.Module:
    module_name, _, function_name = text.partition(":")
    # Any error of the user's code is an answer to the user, not a fault of ours.
    with _visible_folder(os.getcwd()):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise PlanError(f"importing {module_name!r} failed: {error!r}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise PlanError(f"module {module_name!r} has no function {function_name!r}")
        try:
            model = function()
        except (Exception, SystemExit) as error:
            raise PlanError(f"{text} failed: {error!r}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"{text} returned {type(model).__name__}, expected a torch.nn.Module")
    return model if dtype is None else model.to(getattr(torch, dtype))


def _load(text: str, dtype: str | None) -> nn.Module:
    preset = PRESETS.get(text.lower())
    if preset is not None:
        return build(preset.config, dtype)
    if os.path.exists(text) or text.endswith(".json"):
        path = Path(text, "config.json") if os.path.isdir(text) else Path(text)
        return build(read_config(path), dtype)
    if all(part.strip() for part in text.partition(":")):
        return _from_function(text, dtype)
    # Published names come with an owner and a suffix: "Qwen/Qwen2.5-7B-Instruct".
    name = text.rsplit("/", 1)[-1].lower()
    close = ", ".join(difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5))
    hint = f"; did you mean {close}? python -m dmuon plan --help lists all presets"
    ways = "or the path of a Hugging Face config.json, or module:function"
    if not close:
        hint = f". Presets: {', '.join(PRESETS)}; {ways}"
    raise PlanError(f"no preset and no file {text!r}{hint}")


def model_specs(
    text: str, dtype: str | None = None, *, splits: Splits | None = None, heads: Heads | None = None
) -> ModelSpecs:
    """The parameters and matrices of the model that ``text`` names.

    ``text`` is a name of `PRESETS`, the path of a Hugging Face ``config.json`` (or its folder), or
    ``module:function``: a function without arguments, importable from here or the current folder,
    that returns a model, best on the meta device. ``dtype`` replaces the model's own. ``splits``
    and ``heads`` are those of `collect`.

    Raises:
        PlanError: nothing of that name, an unreadable configuration, or a function that fails.
        DmuonError: the parameters cannot be routed (see `collect`).
    """
    known = ", ".join(ITEM_SIZE)
    if dtype is not None and dtype not in ITEM_SIZE:
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {known}")
    specs = collect(_load(text, dtype), splits=splits, heads=heads, allow_meta=True)
    for p in specs.parameters:
        if p.dtype not in ITEM_SIZE:
            raise PlanError(f"parameter {p.name!r} has dtype {p.dtype}, expected one of {known}")
    return specs
