"""Models to plan for without having them: published architectures as tables of numbers.

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

import torch
from torch import nn

from dmuon.catalogue import hf_config
from dmuon.catalogue.modules import (
    GPT2,
    Architecture,
    Decoder,
    Experts,
    LatentAttention,
    VisionLanguageAction,
    build,
)
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs
from dmuon.types import Heads, PlanError, Splits


@dataclass(frozen=True, slots=True)
class Preset:
    """One architecture, and the publication that its numbers are from."""

    architecture: Architecture
    source: str
    dtype: str = "bfloat16"


# ---- dense -------------------------------------------------------------------------------


def _gpt2(hidden: int, layers: int, config: str) -> Preset:
    source = f"GPT-2 paper (Radford et al. 2019), table 2; config.json of openai-community/{config}"
    return Preset(GPT2(50257, 1024, hidden, layers, 4 * hidden), source)


def _llama3(
    hidden: int, layers: int, heads: int, width: int, head_dim: int = 128, small: str = ""
) -> Preset:
    """``small``: the size of a Llama 3.2, which ties its embedding."""
    decoder = Decoder(128256, hidden, layers, heads, 8, head_dim, width, tied=bool(small))
    source = "Llama 3 paper (Dubey et al. 2024), table 3"
    if small:
        source = f"Llama 3.2 model card; config.json of meta-llama/Llama-3.2-{small}"
    return Preset(decoder, source)


def _qwen25(size: str, hidden: int, layers: int, heads: int, kv_heads: int, width: int) -> Preset:
    tied = size in ("0.5B", "1.5B", "3B")
    vocabulary = 151936 if tied else 152064  # padded
    shape = (vocabulary, hidden, layers, heads, kv_heads, hidden // heads, width)
    return Preset(
        Decoder(*shape, tied=tied, qkv_bias=True),
        f"Qwen2.5 technical report (2024), table 1; config.json of Qwen/Qwen2.5-{size}",
    )


def _qwen3(
    size: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    experts: Experts | None = None,
) -> Preset:
    shape, tied = (151936, hidden, layers, heads, kv_heads, 128, width), size in _QWEN3_TIED
    return Preset(
        Decoder(*shape, tied=tied, qk_norm=True, experts=experts),
        f"Qwen3 technical report (2025), tables 1 and 2; config.json of Qwen/Qwen3-{size}",
    )


_QWEN3_TIED = ("0.6B", "1.7B", "4B")
_DENSE = {
    "gpt2": _gpt2(768, 12, "gpt2"),
    "gpt2-medium": _gpt2(1024, 24, "gpt2-medium"),
    "gpt2-large": _gpt2(1280, 36, "gpt2-large"),
    "gpt2-xl": _gpt2(1600, 48, "gpt2-xl"),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 53248),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, 64, small="1B"),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, small="3B"),
    "qwen2.5-0.5b": _qwen25("0.5B", 896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _qwen25("1.5B", 1536, 28, 12, 2, 8960),
    "qwen2.5-3b": _qwen25("3B", 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": _qwen25("7B", 3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen25("14B", 5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen25("32B", 5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _qwen25("72B", 8192, 80, 64, 8, 29568),
    "qwen3-0.6b": _qwen3("0.6B", 1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _qwen3("1.7B", 2048, 28, 16, 8, 6144),
    "qwen3-4b": _qwen3("4B", 2560, 36, 32, 8, 9728),
    "qwen3-8b": _qwen3("8B", 4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3("14B", 5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen3("32B", 5120, 64, 64, 8, 25600),
}

# ---- mixtures of experts -----------------------------------------------------------------


def _mixtral(hidden: int, layers: int, heads: int, width: int, source: str) -> Preset:
    experts = Experts(8, width, block="block_sparse_moe", projections=("w1", "w3", "w2"))
    return Preset(Decoder(32000, hidden, layers, heads, 8, 128, width, experts=experts), source)


_EXPERTS = {
    "qwen3-30b-a3b": _qwen3("30B-A3B", 2048, 48, 32, 4, 6144, Experts(128, 768)),
    "qwen3-235b-a22b": _qwen3("235B-A22B", 4096, 94, 64, 4, 12288, Experts(128, 1536)),
    "mixtral-8x7b": _mixtral(
        4096, 32, 32, 14336, "Mixtral of Experts paper (Jiang et al. 2024), table 1"
    ),
    "mixtral-8x22b": _mixtral(6144, 56, 48, 16384, "config.json of mistralai/Mixtral-8x22B-v0.1"),
    "deepseek-v2-lite": Preset(
        Decoder(
            *(102400, 2048, 27, 16, 16, 192, 10944),
            latent=LatentAttention(0, 512, nope_dim=128, rope_dim=64, value_dim=128),
            experts=Experts(64, 1408, shared=2 * 1408, dense_layers=frozenset({0})),
        ),
        "DeepSeek-V2 paper (2024), appendix B; config.json of deepseek-ai/DeepSeek-V2-Lite",
    ),
    "deepseek-v3": Preset(
        Decoder(
            *(129280, 7168, 61, 128, 128, 192, 18432),
            latent=LatentAttention(1536, 512, nope_dim=128, rope_dim=64, value_dim=128),
            experts=Experts(
                256, 2048, shared=2048, dense_layers=frozenset({0, 1, 2}), correction_bias=True
            ),
        ),
        "DeepSeek-V3 technical report (2024), section 4.2, without multi-token prediction",
    ),
    "moe-60x256": Preset(
        Decoder(128256, 4096, 60, 32, 8, 128, 1536, qk_norm=True, experts=Experts(256, 1536)),
        "made up: a scaling target of about 46,000 matrices",
    ),
}

# ---- robots ------------------------------------------------------------------------------

_VLA = VisionLanguageAction(
    hidden=1152,
    layers=27,
    intermediate=4304,
    patch=14,
    patches=256,
    language=Decoder(257152, 2048, 18, 8, 1, 256, 16384, tied=True),
    expert=Decoder(0, 1024, 18, 8, 1, 256, 4096),
    action_dim=32,
)
_VLA_SOURCE = "pi0 paper (Black et al. 2024): PaliGemma (SigLIP, Gemma 2B) and a 300M action expert"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**_DENSE, **_EXPERTS, "vla": Preset(_VLA, _VLA_SOURCE)}
)

# ---- any model ---------------------------------------------------------------------------


def _from_config(path: Path, dtype: str | None) -> nn.Module:
    config = hf_config.read_config(path)
    return build(hf_config.architecture_of(config), dtype or hf_config.dtype_of(config))


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
    # Whatever the user's code raises is an answer to the user, not a fault of ours.
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


def _unknown(text: str) -> PlanError:
    # Published names come with an owner and a suffix: "Qwen/Qwen2.5-7B-Instruct".
    name = text.rsplit("/", 1)[-1].lower()
    close = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)
    if close:
        return PlanError(
            f"no preset and no file {text!r}; did you mean {', '.join(close)}? "
            "python -m dmuon plan --help lists all presets"
        )
    return PlanError(
        f"no preset and no file {text!r}. Presets: {', '.join(PRESETS)}; or the path of a "
        "Hugging Face config.json, or module:function"
    )


def _load(text: str, dtype: str | None) -> nn.Module:
    preset = PRESETS.get(text.lower())
    if preset is not None:
        return build(preset.architecture, dtype or preset.dtype)
    if os.path.isdir(text):
        return _from_config(Path(text, "config.json"), dtype)
    if os.path.exists(text) or text.endswith(".json"):
        return _from_config(Path(text), dtype)
    if all(part.strip() for part in text.partition(":")):
        return _from_function(text, dtype)
    raise _unknown(text)


def model_specs(
    text: str,
    dtype: str | None = None,
    *,
    splits: Splits | None = None,
    heads: Heads | None = None,
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
    if dtype is not None and dtype not in ITEM_SIZE:
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {', '.join(ITEM_SIZE)}")
    specs = collect(_load(text, dtype), splits=splits, heads=heads, allow_meta=True)
    for parameter in specs.parameters:
        if parameter.dtype not in ITEM_SIZE:
            raise PlanError(
                f"parameter {parameter.name!r} has dtype {parameter.dtype}, expected one of "
                + ", ".join(ITEM_SIZE)
            )
    return specs
