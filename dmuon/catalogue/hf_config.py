"""Architectures from the ``config.json`` of Hugging Face models.

A key that is absent has the default of the Hugging Face configuration class, where that does not
depend on the size of the model; sizes must be there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dmuon.catalogue.modules import (
    GPT2,
    Architecture,
    Decoder,
    Experts,
    LatentAttention,
)
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import PlanError

__all__ = ["MODEL_TYPES", "architecture_of", "dtype_of", "read_config"]

MAX_SIZE = 10_000_000  # of any number in a configuration; beyond it something is wrong


@dataclass(frozen=True, slots=True)
class _Config:
    """Typed reading of one configuration; errors name the key and what was found."""

    data: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; ``default`` stands in for an absent key or a null."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise PlanError(f"the model configuration has no {key!r}")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= MAX_SIZE:
            raise PlanError(
                f"the model configuration has {key!r} = {value!r}, expected a whole number from "
                f"{least} to {MAX_SIZE}"
            )
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise PlanError(
                f"the model configuration has {key!r} = {value!r}, expected true or false"
            )
        return value

    def indices(self, key: str) -> frozenset[int]:
        value = self.data.get(key) or []
        if not isinstance(value, list) or any(not isinstance(i, int) for i in value):
            raise PlanError(
                f"the model configuration has {key!r} = {value!r}, expected a list of layers"
            )
        return frozenset(value)


def _head_dim(config: _Config, default: int | None) -> int:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if default is None and config.data.get("head_dim") is None and hidden % heads:
        raise PlanError(
            f"the model configuration has no 'head_dim', and 'hidden_size' = {hidden} is no "
            f"multiple of 'num_attention_heads' = {heads}"
        )
    return config.size("head_dim", default or hidden // heads)


def _decoder(config: _Config, head_dim: int | None = None, *, tied: bool = False) -> Decoder:
    heads = config.size("num_attention_heads")
    return Decoder(
        vocabulary=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_dim=_head_dim(config, head_dim),
        intermediate=config.size("intermediate_size"),
        tied=config.flag("tie_word_embeddings", tied),
    )


def _with_attention_bias(config: _Config, decoder: Decoder) -> Decoder:
    bias = config.flag("attention_bias")
    return replace(decoder, qkv_bias=bias, output_bias=bias)


def _llama(config: _Config) -> Decoder:
    decoder = _with_attention_bias(config, _decoder(config))
    return replace(decoder, mlp_bias=config.flag("mlp_bias"))


def _mistral(config: _Config) -> Decoder:
    return _decoder(config)


def _qwen2(config: _Config) -> Decoder:
    return replace(_decoder(config), qkv_bias=True)


def _qwen3(config: _Config) -> Decoder:
    return replace(_with_attention_bias(config, _decoder(config, 128)), qk_norm=True)


def _gemma(config: _Config) -> Decoder:
    return _with_attention_bias(config, _decoder(config, 256, tied=True))


def _gemma2(config: _Config) -> Decoder:
    feedforward = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    decoder = _gemma(config)
    return replace(decoder, layer_norms=decoder.layer_norms + feedforward)


def _phi3(config: _Config) -> Decoder:
    return replace(_decoder(config), fused=True)


def _mixtral(config: _Config) -> Decoder:
    experts = Experts(
        config.size("num_local_experts"),
        config.size("intermediate_size"),
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(_decoder(config), experts=experts)


def _dense_unless_every(step: int, layers: int) -> frozenset[int]:
    return frozenset(layer for layer in range(layers) if (layer + 1) % step)


def _qwen3_moe(config: _Config) -> Decoder:
    decoder = _with_attention_bias(config, _decoder(config))
    dense = _dense_unless_every(config.size("decoder_sparse_step", 1), decoder.layers)
    experts = Experts(
        config.size("num_experts"),
        config.size("moe_intermediate_size"),
        dense_layers=dense | config.indices("mlp_only_layers"),
    )
    return replace(decoder, qk_norm=True, experts=experts)


def _deepseek(config: _Config, *, correction_bias: bool = False) -> Decoder:
    latent = LatentAttention(
        query_rank=config.size("q_lora_rank", 0, least=0),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"),
        value_dim=config.size("v_head_dim"),
    )
    decoder = _decoder(config, latent.nope_dim + latent.rope_dim)
    width = config.size("moe_intermediate_size")
    first, step = config.size("first_k_dense_replace", 0, least=0), config.size("moe_layer_freq", 1)
    experts = Experts(
        config.size("n_routed_experts"),
        width,
        shared=width * config.size("n_shared_experts", 0, least=0),
        dense_layers=frozenset(i for i in range(decoder.layers) if i < first or i % step),
        correction_bias=correction_bias,
    )
    return replace(_with_attention_bias(config, decoder), latent=latent, experts=experts)


def _deepseek_v3(config: _Config) -> Decoder:
    return _deepseek(config, correction_bias=True)


def _gpt2(config: _Config) -> GPT2:
    hidden = config.size("n_embd")
    return GPT2(
        vocabulary=config.size("vocab_size"),
        positions=config.size("n_positions"),
        hidden=hidden,
        layers=config.size("n_layer"),
        intermediate=config.size("n_inner", 4 * hidden),
        tied=config.flag("tie_word_embeddings", True),
    )


MODEL_TYPES: Mapping[str, Callable[[_Config], Architecture]] = MappingProxyType(
    {
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek_v3,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _mistral,
        "mixtral": _mixtral,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
    }
)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a configuration describes.

    Raises:
        PlanError: another ``model_type`` than those of `MODEL_TYPES`, or a key is missing or wrong.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise PlanError(
            f"no rule for model_type {kind!r}; known: {', '.join(MODEL_TYPES)}. For any other "
            "model pass --model module:function, a function that returns the model (best built "
            "under torch.device('meta'))"
        )
    return MODEL_TYPES[kind](_Config(config))


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that the configuration names, bfloat16 if it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in ITEM_SIZE:
        raise PlanError(
            f"the model configuration has dtype {name!r}; pass --dtype, one of "
            + ", ".join(ITEM_SIZE)
        )
    return name


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        PlanError: the file cannot be read, or is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{str(path)!r} holds a JSON {type(data).__name__}, expected an object")
    return data
