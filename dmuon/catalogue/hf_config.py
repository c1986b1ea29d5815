"""Architectures from the ``config.json`` of Hugging Face models.

A key that is absent has the default of the Hugging Face configuration class, where that does not
depend on the size of the model; sizes must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dmuon.catalogue.modules import (
    GPT2,
    Architecture,
    Decoder,
    Experts,
    LatentAttention,
    Mamba,
    StateSpace,
)
from dmuon.scheduler.json_files import parse, read_text
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import PlanError

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
            raise _wrong(key, value, f"a whole number from {least} to {MAX_SIZE}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def indices(self, key: str) -> frozenset[int]:
        value = self.data.get(key) or []
        if not isinstance(value, list) or any(not isinstance(i, int) for i in value):
            raise _wrong(key, value, "a list of layers")
        return frozenset(value)


def _wrong(key: str, value: object, expected: str) -> PlanError:
    return PlanError(f"the model configuration has {key!r} = {value!r}, expected {expected}")


def _head_dim(config: _Config, default: int | None) -> int:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if default is None and config.data.get("head_dim") is None and hidden % heads:
        raise PlanError(
            f"the model configuration has no 'head_dim', and 'hidden_size' = {hidden} is no "
            f"multiple of 'num_attention_heads' = {heads}"
        )
    return config.size("head_dim", default or hidden // heads)


def _decoder(
    config: _Config,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    biased: bool | None = False,
    **fields: Any,
) -> Decoder:
    """The keys that all decoders have; ``biased`` is the default of the key attention_bias, or None
    where there is no such key. ``fields`` are further ones of `Decoder`.
    """
    heads = config.size("num_attention_heads")
    if biased is not None:
        fields["qkv_bias"] = fields["output_bias"] = config.flag("attention_bias", biased)
    return Decoder(
        vocabulary=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_dim=_head_dim(config, head_dim),
        intermediate=config.size("intermediate_size"),
        tied=config.flag("tie_word_embeddings", tied),
        **fields,
    )


def _llama(config: _Config) -> Decoder:
    return _decoder(config, mlp_bias=config.flag("mlp_bias"))


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _experts(config: _Config, count: str, width: str, **fields: Any) -> Experts:
    """``count`` and ``width`` are keys; ``fields`` are further ones of `Experts`."""
    return Experts(config.size(count), config.size(width), **fields)


def _mixtral(config: _Config) -> Decoder:
    names: dict[str, Any] = {"block": "block_sparse_moe", "projections": ("w1", "w3", "w2")}
    experts = _experts(config, "num_local_experts", "intermediate_size", **names)
    return _decoder(config, biased=None, experts=experts)


def _gpt_oss(config: _Config) -> Decoder:
    how: dict[str, Any] = {"router": "router", "fused": True}
    experts = _experts(config, "num_local_experts", "intermediate_size", **how)
    return _decoder(config, head_dim=64, biased=True, sinks=True, experts=experts)


def _qwen_experts(config: _Config, **fields: Any) -> Experts:
    step, layers = config.size("decoder_sparse_step", 1), config.size("num_hidden_layers")
    dense = frozenset(layer for layer in range(layers) if (layer + 1) % step)
    fields["dense_layers"] = dense | config.indices("mlp_only_layers")
    return _experts(config, "num_experts", "moe_intermediate_size", **fields)


def _qwen2_moe(config: _Config) -> Decoder:
    shared = config.size("shared_expert_intermediate_size")
    experts = _qwen_experts(config, shared=shared, shared_name="shared_expert", shared_gate=True)
    return _decoder(config, biased=None, qkv_bias=config.flag("qkv_bias", True), experts=experts)


def _qwen3_moe(config: _Config) -> Decoder:
    return _decoder(config, qk_norm=True, experts=_qwen_experts(config))


def _deepseek(config: _Config, *, correction_bias: bool = False) -> Decoder:
    latent = LatentAttention(
        query_rank=config.size("q_lora_rank", 0, least=0),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"),
        value_dim=config.size("v_head_dim"),
    )
    width = config.size("moe_intermediate_size")
    first, step = config.size("first_k_dense_replace", 0, least=0), config.size("moe_layer_freq", 1)
    layers = range(config.size("num_hidden_layers"))
    experts = Experts(
        config.size("n_routed_experts"),
        width,
        shared=width * config.size("n_shared_experts", 0, least=0),
        dense_layers=frozenset(i for i in layers if i < first or i % step),
        correction_bias=correction_bias,
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return _decoder(config, head_dim=head_dim, latent=latent, experts=experts)


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


# ---- state spaces ------------------------------------------------------------------------


def _rank(config: _Config, key: str) -> int:
    """The rank of the step size: "auto" is a sixteenth of the hidden size, rounded up."""
    auto = -(-config.size("hidden_size") // 16)
    return auto if config.data.get(key, "auto") == "auto" else config.size(key, auto)


def _mamba(config: _Config, *, version: int = 1) -> Mamba:
    hidden = config.size("hidden_size")
    inner = config.size("expand", 2) * hidden
    sizes: dict[str, Any]
    if version == 1:
        sizes = {"state": config.size("state_size", 16), "rank": _rank(config, "time_step_rank")}
    else:
        heads = config.size("num_heads", 128)
        _check_heads(config, inner, heads, "head_dim", 64)
        groups = config.size("n_groups", 8)
        sizes = {"state": config.size("state_size", 128), "heads": heads, "groups": groups}
    mixer = StateSpace(
        inner=inner,
        kernel=config.size("conv_kernel", 4),
        bias=config.flag("use_bias"),
        kernel_bias=config.flag("use_conv_bias", True),
        **sizes,
    )
    tied = config.flag("tie_word_embeddings", version == 1)
    return Mamba(config.size("vocab_size"), hidden, config.size("num_hidden_layers"), mixer, tied)


def _check_heads(config: _Config, inner: int, heads: int, key: str, default: int) -> None:
    """Heads must fill the inner size; ``key`` is that of the size of a head."""
    size = config.size(key, default)
    if heads * size != inner:
        raise PlanError(
            f"the model configuration has {heads} heads of {key!r} = {size}, which do not fill the "
            f"inner size {inner}"
        )


_JAMBA_NAMES: Mapping[str, Any] = MappingProxyType(
    {
        "layer_norms": ("input_layernorm", "pre_ff_layernorm"),
        "last_norm": "final_layernorm",
        "mlp_name": "feed_forward",
    }
)


def _hybrid_mixer(config: _Config, **fields: Any) -> StateSpace:
    return StateSpace(
        inner=config.size("mamba_expand", 2) * config.size("hidden_size"),
        kernel=config.size("mamba_d_conv", 4),
        bias=config.flag("mamba_proj_bias"),
        kernel_bias=config.flag("mamba_conv_bias", True),
        **fields,
    )


def _jamba(config: _Config) -> Decoder:
    def others(kind: str, period: int, offset: int) -> frozenset[int]:
        """The layers that are not of this kind, which come periodically."""
        period = config.size(f"{kind}_layer_period", period)
        offset = config.size(f"{kind}_layer_offset", offset, least=0)
        return frozenset(i for i in layers if i % period != offset)

    layers = range(config.size("num_hidden_layers"))
    experts = Experts(
        config.size("num_experts", 16),
        config.size("intermediate_size"),
        dense_layers=others("expert", 2, 1),
        block="feed_forward",
        router="router",
    )
    state, rank = config.size("mamba_d_state", 16), _rank(config, "mamba_dt_rank")
    return _decoder(
        config,
        biased=None,
        experts=experts if experts.count > 1 else None,
        mixer=_hybrid_mixer(config, state=state, rank=rank, inner_norms=True),
        mixed=others("attn", 8, 4),
        **_JAMBA_NAMES,
    )


def _bamba(config: _Config) -> Decoder:
    heads, groups = config.size("mamba_n_heads", 128), config.size("mamba_n_groups", 1)
    state = config.size("mamba_d_state", 256)
    mixer = _hybrid_mixer(config, state=state, heads=heads, groups=groups)
    if config.data.get("mamba_d_head", "auto") != "auto":
        _check_heads(config, mixer.inner, heads, "mamba_d_head", mixer.inner // heads)
    mixed = frozenset(range(config.size("num_hidden_layers")))
    mixed -= config.indices("attn_layer_indices")
    mlp_bias = config.flag("mlp_bias")
    return _decoder(config, mlp_bias=mlp_bias, mixer=mixer, mixed=mixed, **_JAMBA_NAMES)


def _mllama(config: _Config) -> Decoder:
    """The language model: the vision tower is left out."""
    inner = config.data.get("text_config", config.data)
    if not isinstance(inner, Mapping):
        raise _wrong("text_config", inner, "an object")
    return _decoder(
        _Config(inner),
        biased=None,
        crossed=_Config(inner).indices("cross_attention_layers"),
        extra_tokens=8,  # the image token and padding
        nested="language_model",
    )


MODEL_TYPES: Mapping[str, Callable[[_Config], Architecture]] = MappingProxyType(
    {
        "bamba": _bamba,
        "deepseek_v2": _deepseek,
        "deepseek_v3": partial(_deepseek, correction_bias=True),
        "falcon_mamba": _mamba,
        "gemma": partial(_decoder, head_dim=256, tied=True),
        "gemma2": partial(_decoder, head_dim=256, tied=True, layer_norms=_FOUR_NORMS),
        "gemma3_text": partial(
            _decoder, head_dim=256, tied=True, qk_norm=True, layer_norms=_FOUR_NORMS
        ),
        "gpt2": _gpt2,
        "gpt_oss": _gpt_oss,
        "jamba": _jamba,
        "llama": _llama,
        "mamba": _mamba,
        "mamba2": partial(_mamba, version=2),
        "mistral": partial(_decoder, biased=None),
        "mixtral": _mixtral,
        "mllama": _mllama,
        "mllama_text_model": _mllama,
        "phi3": partial(_decoder, biased=None, fused=True),
        "qwen2": partial(_decoder, biased=None, qkv_bias=True),
        "qwen2_moe": _qwen2_moe,
        "qwen3": partial(_decoder, head_dim=128, qk_norm=True),
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
        data = parse(read_text(path))
    except OSError as error:
        raise PlanError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{str(path)!r} holds a JSON {type(data).__name__}, expected an object")
    return data
