"""Models to plan for without having them: Hugging Face configurations.

Presets are those in `presets.json` beside this file, each with the publication of its numbers.

`model_specs` turns a preset's name, a configuration or a user's own function into what the
scheduler takes; `build` makes the model of a configuration on the meta device.

The modules have the parameter shapes and names of the Hugging Face implementation and no forward,
so that `select.collect` routes them by the same rules as the model itself. Two things differ. Norms
are torch's own. The experts of a layer are stacked to ``[experts, out, in]``, one stack for each
projection, where some implementations keep one module per expert or fuse gate and up.

A key that is absent has the default of the Hugging Face configuration class, where that does not
depend on the size of the model; sizes must be there.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import nn

from dmuon.scheduler.json_files import decode, parse, read_text
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs
from dmuon.types import Heads, PlanError, Splits

Names = tuple[str, str, str]
Layer = Callable[[int], nn.Module]
MAX_SIZE = 10_000_000  # of any number in a configuration; beyond it something is wrong


@dataclass(frozen=True, slots=True)
class _Config:
    """Reads one configuration; errors name the key and the value found."""

    data: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; ``default`` stands in for an absent key, null and "auto"."""
        value = self.data.get(key)
        value = default if value in (None, "auto") else value
        if value is None:
            raise PlanError(f"the model configuration has no {key!r}")
        return self._read(Annotated[int, (least, MAX_SIZE)], key, value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._read(bool, key, self.data.get(key, default))

    def indices(self, key: str) -> frozenset[int]:
        return frozenset(self._read(tuple[int, ...], key, self.data.get(key) or []))

    def part(self, key: str) -> _Config:
        """The configuration of a part of the model."""
        return _Config(self._read(dict[str, Any], key, self.data.get(key)))

    def _read(self, hint: Any, key: str, value: object) -> Any:
        return decode(hint, value, f"the model configuration: {key}")

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def _join(**parts: nn.Module | nn.Parameter | tuple[int, int] | tuple[int, int, bool]) -> nn.Module:
    """A module of these parts; ``(inputs, outputs[, bias])`` stands for a linear layer."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, _linear(*part) if isinstance(part, tuple) else part)
    return module


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _embedding(count: int, hidden: int) -> nn.Embedding:
    # With a weight, because to initialize one on the meta device takes seconds.
    return nn.Embedding(count, hidden, _weight=torch.empty(count, hidden))


_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _trunk(
    c: _Config, layer: Layer, norms: Sequence[str] = _TWO_NORMS, last_norm: str = "norm"
) -> nn.Module:
    """The layers, each with its ``norms``, and the norm after the last of them."""
    layers = nn.ModuleList(map(layer, range(c.size("num_hidden_layers"))))
    for made, name in product(layers, norms):
        made.add_module(name, nn.RMSNorm(c.hidden))
    return _join(layers=layers, **{last_norm: nn.RMSNorm(c.hidden)})


def _head(c: _Config, embedding: nn.Embedding, tied: bool) -> nn.Module:
    """The output head; ``tied`` is the default of the key that shares the embedding's weight."""
    head = _linear(embedding.embedding_dim, c.size("vocab_size"))
    if c.flag("tie_word_embeddings", tied):
        head.weight = embedding.weight
    return head


def _causal(c: _Config, trunk: nn.Module, tied: bool = False) -> nn.Module:
    """A trunk between an embedding and an output head."""
    embedding = trunk.embed_tokens = _embedding(c.size("vocab_size"), c.hidden)
    return _join(model=trunk, lm_head=_head(c, embedding, tied))


def _attention(
    c: _Config,
    head_dim: int | None = None,
    *,
    biased: bool = False,
    qkv_bias: bool | None = None,
    qk_norm: bool = False,
    fused: bool = False,
) -> nn.Module:
    """Grouped-query attention. ``biased`` is the default of the key attention_bias, which families
    with a ``qkv_bias`` of their own do not have."""
    heads = c.size("num_attention_heads")
    if head_dim is None and c.data.get("head_dim") is None and c.hidden % heads:
        raise PlanError(
            f"the model configuration has no 'head_dim', and 'hidden_size' = {c.hidden} is no "
            f"multiple of 'num_attention_heads' = {heads}"
        )
    size = c.size("head_dim", head_dim or c.hidden // heads)
    queries, keys = heads * size, c.size("num_key_value_heads", heads) * size
    bias = c.flag("attention_bias", biased) if qkv_bias is None else qkv_bias
    output = (queries, c.hidden, bias and qkv_bias is None)
    if fused:
        return _join(qkv_proj=(c.hidden, queries + 2 * keys, bias), o_proj=output)
    key = (c.hidden, keys, bias)
    attention = _join(q_proj=(c.hidden, queries, bias), k_proj=key, v_proj=key, o_proj=output)
    if qk_norm:
        attention.q_norm, attention.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
    return attention


def _mlp(c: _Config, width: int | None = None, fused: bool = False) -> nn.Module:
    """A gated MLP."""
    width, bias = width or c.size("intermediate_size"), c.flag("mlp_bias")
    names = {"gate_up_proj": 2 * width} if fused else {"gate_proj": width, "up_proj": width}
    into = {name: (c.hidden, rows, bias) for name, rows in names.items()}
    return _join(**into, down_proj=(width, c.hidden, bias))


def _llama(
    c: _Config,
    *,
    tied: bool = False,
    norms: tuple[str, ...] = _TWO_NORMS,
    fused: bool = False,
    **attention: Any,
) -> nn.Module:
    """Llama, and what differs from it in little. ``fused`` joins q, k, v and gate, up, as in Phi-3;
    ``attention`` are further arguments of `_attention`."""

    def layer(_: int) -> nn.Module:
        return _join(self_attn=_attention(c, fused=fused, **attention), mlp=_mlp(c, fused=fused))

    return _causal(c, _trunk(c, layer, norms), tied)


def _mllama(c: _Config) -> nn.Module:
    """The language model, some of whose layers attend to images. The vision tower is left out."""
    c = c.part("text_config") if "text_config" in c.data else c
    crossed = c.indices("cross_attention_layers")

    def layer(index: int) -> nn.Module:
        if index not in crossed:
            return _join(self_attn=_attention(c), mlp=_mlp(c))
        gates = {"cross_attn_attn_gate": _parameter(1), "cross_attn_mlp_gate": _parameter(1)}
        return _join(cross_attn=_attention(c, qk_norm=True), **gates, mlp=_mlp(c))

    trunk = _trunk(c, layer)
    # The image token and padding.
    embedding = trunk.embed_tokens = _embedding(c.size("vocab_size") + 8, c.hidden)
    return _join(model=_join(language_model=trunk), lm_head=_head(c, embedding, False))


def _mixture(
    c: _Config,
    count: int,
    width: int,
    projections: Names = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
) -> nn.Module:
    """Experts and their router; ``projections`` name gate, up and down."""
    stacks = {name: _parameter(count, width, c.hidden) for name in projections[:2]}
    stacks[projections[2]] = _parameter(count, c.hidden, width)
    return _join(experts=_join(**stacks), **{router: (c.hidden, count)})


def _mixtral(c: _Config) -> nn.Module:
    def layer(_: int) -> nn.Module:
        sizes = c.size("num_local_experts"), c.size("intermediate_size")
        experts = _mixture(c, *sizes, ("w1", "w3", "w2"))
        return _join(self_attn=_attention(c), block_sparse_moe=experts)

    return _causal(c, _trunk(c, layer))


def _gpt_oss(c: _Config) -> nn.Module:
    """Gate and up are one stack, all are stored (in, out); a head has a learned sink."""
    count, width = c.size("num_local_experts"), c.size("intermediate_size")

    def layer(_: int) -> nn.Module:
        attention = _attention(c, 64, biased=True)
        attention.sinks = _parameter(c.size("num_attention_heads"))
        experts = _join(
            gate_up_proj=_parameter(count, c.hidden, 2 * width),
            gate_up_proj_bias=_parameter(count, 2 * width),
            down_proj=_parameter(count, width, c.hidden),
            down_proj_bias=_parameter(count, c.hidden),
        )
        mixture = _join(experts=experts, router=(c.hidden, count, True))
        return _join(self_attn=attention, mlp=mixture)

    return _causal(c, _trunk(c, layer))


def _qwen_moe(c: _Config, shared: bool = False, **attention: Any) -> nn.Module:
    """``shared``: with a shared expert, as in Qwen2."""
    count, width = c.size("num_experts"), c.size("moe_intermediate_size")
    step, dense = c.size("decoder_sparse_step", 1), c.indices("mlp_only_layers")

    def layer(index: int) -> nn.Module:
        made = _join(self_attn=_attention(c, **attention))
        is_dense = index in dense or (index + 1) % step
        made.mlp = mlp = _mlp(c) if is_dense else _mixture(c, count, width)
        if shared and not is_dense:
            mlp.shared_expert = _mlp(c, c.size("shared_expert_intermediate_size"))
            mlp.shared_expert_gate = _linear(c.hidden, 1)
        return made

    return _causal(c, _trunk(c, layer))


def _deepseek(c: _Config, correction_bias: bool = False) -> nn.Module:
    count, width = c.size("n_routed_experts"), c.size("moe_intermediate_size")
    shared = width * c.size("n_shared_experts", 0, least=0)
    first, step = c.size("first_k_dense_replace", 0, least=0), c.size("moe_layer_freq", 1)

    def layer(index: int) -> nn.Module:
        if index < first or index % step:
            return _join(self_attn=_latent_attention(c), mlp=_mlp(c))
        mlp = _mixture(c, count, width)
        if correction_bias:
            mlp.get_submodule("gate").e_score_correction_bias = _parameter(count)
        if shared:
            mlp.shared_experts = _mlp(c, shared)
        return _join(self_attn=_latent_attention(c), mlp=mlp)

    return _causal(c, _trunk(c, layer))


def _latent_attention(c: _Config) -> nn.Module:
    """Low-rank queries, keys and values (DeepSeek-V2 paper, section 2.1)."""
    heads, bias = c.size("num_attention_heads"), c.flag("attention_bias")
    nope, rope, value = map(c.size, ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank, rank = c.size("q_lora_rank", 0, least=0), c.size("kv_lora_rank")
    size = heads * (nope + rope)
    queries: dict[str, Any] = {"q_proj": (c.hidden, size)}
    if query_rank:
        down, norm = (c.hidden, query_rank, bias), nn.RMSNorm(query_rank)
        queries = {"q_a_proj": down, "q_a_layernorm": norm, "q_b_proj": (query_rank, size)}
    return _join(
        **queries,
        kv_a_proj_with_mqa=(c.hidden, rank + rope, bias),
        kv_a_layernorm=nn.RMSNorm(rank),
        kv_b_proj=(rank, heads * (nope + value)),
        o_proj=(heads * value, c.hidden, bias),
    )


def _mixer(
    c: _Config, inner: int, keys: Names, state: int, rank: int = 0, heads: int = 0, groups: int = 1
) -> nn.Module:
    """Mamba (arXiv 2312.00752, section 3.4) with the ``rank`` of the step size; or, with ``heads``,
    Mamba-2 (arXiv 2405.21060, section 7).

    ``keys``: the length of the convolution, and the biases of the projections and of it."""
    kernel, bias, kernel_bias = c.size(keys[0], 4), c.flag(keys[1]), c.flag(keys[2], True)
    channels = inner + (2 * groups * state if heads else 0)
    convolution = nn.Conv1d(channels, channels, kernel, groups=channels, bias=kernel_bias)
    mixer = _join(conv1d=convolution, out_proj=(inner, c.hidden, bias))
    if heads:
        mixer.in_proj = _linear(c.hidden, inner + channels + heads, bias)
        mixer.dt_bias, mixer.A_log, mixer.D = (_parameter(heads) for _ in range(3))
        mixer.norm = nn.RMSNorm(inner)
        return mixer
    mixer.A_log, mixer.D = _parameter(inner, state), _parameter(inner)
    mixer.in_proj = _linear(c.hidden, 2 * inner, bias)
    mixer.x_proj = _linear(inner, rank + 2 * state)
    mixer.dt_proj = _linear(rank, inner, True)
    return mixer


def _check_heads(c: _Config, inner: int, heads: int, key: str, default: int) -> None:
    """Raise PlanError unless the heads fill the inner size; ``key`` is the size of a head."""
    if heads * (size := c.size(key, default)) != inner:
        raise PlanError(
            f"the model configuration has {heads} heads of {key!r} = {size}, which do not fill the "
            f"inner size {inner}"
        )


def _mamba(c: _Config, version: int = 1) -> nn.Module:
    inner = c.size("expand", 2) * c.hidden
    if version == 1:
        rank = c.size("time_step_rank", -(-c.hidden // 16))
        sizes = {"state": c.size("state_size", 16), "rank": rank}
    else:
        sizes = {"heads": c.size("num_heads", 128), "groups": c.size("n_groups", 8)}
        _check_heads(c, inner, sizes["heads"], "head_dim", 64)
        sizes["state"] = c.size("state_size", 128)

    def layer(_: int) -> nn.Module:
        keys = "conv_kernel", "use_bias", "use_conv_bias"
        return _join(norm=nn.RMSNorm(c.hidden), mixer=_mixer(c, inner, keys, **sizes))

    backbone = _trunk(c, layer, (), "norm_f")
    embedding = backbone.embeddings = _embedding(c.size("vocab_size"), c.hidden)
    return _join(backbone=backbone, lm_head=_head(c, embedding, version == 1))


_HYBRID_KEYS = "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias"
_HYBRID_NORMS = ("input_layernorm", "pre_ff_layernorm")


def _jamba(c: _Config) -> nn.Module:
    inner, state = c.size("mamba_expand", 2) * c.hidden, c.size("mamba_d_state", 16)
    rank = c.size("mamba_dt_rank", -(-c.hidden // 16))
    count, width = c.size("num_experts", 16), c.size("intermediate_size")
    every, first = c.size("attn_layer_period", 8), c.size("attn_layer_offset", 4, least=0)
    moe_every = c.size("expert_layer_period", 2)
    moe_first = c.size("expert_layer_offset", 1, least=0)

    def layer(index: int) -> nn.Module:
        is_dense = count == 1 or index % moe_every != moe_first
        forward = _mlp(c) if is_dense else _mixture(c, count, width, router="router")
        if index % every == first:
            return _join(self_attn=_attention(c, qkv_bias=False), feed_forward=forward)
        mixer = _mixer(c, inner, _HYBRID_KEYS, state, rank=rank)
        mixer.dt_layernorm = nn.RMSNorm(rank)
        mixer.b_layernorm, mixer.c_layernorm = nn.RMSNorm(state), nn.RMSNorm(state)
        return _join(mamba=mixer, feed_forward=forward)

    return _causal(c, _trunk(c, layer, _HYBRID_NORMS, "final_layernorm"))


def _bamba(c: _Config) -> nn.Module:
    inner, state = c.size("mamba_expand", 2) * c.hidden, c.size("mamba_d_state", 256)
    heads, groups = c.size("mamba_n_heads", 128), c.size("mamba_n_groups", 1)
    _check_heads(c, inner, heads, "mamba_d_head", inner // heads)
    attending = c.indices("attn_layer_indices")

    def layer(index: int) -> nn.Module:
        if index in attending:
            return _join(self_attn=_attention(c), feed_forward=_mlp(c))
        mixer = _mixer(c, inner, _HYBRID_KEYS, state, heads=heads, groups=groups)
        return _join(mamba=mixer, feed_forward=_mlp(c))

    return _causal(c, _trunk(c, layer, _HYBRID_NORMS, "final_layernorm"))


def _gpt2(c: _Config) -> nn.Module:
    """GPT-2 stores its weights (in, out), and its c_attn holds q, k and v as one matrix."""
    hidden = c.size("n_embd")
    width = c.size("n_inner", 4 * hidden)

    def conv1d(inputs: int, outputs: int) -> nn.Module:
        module = _join(weight=_parameter(inputs, outputs), bias=_parameter(outputs))
        module.nf = outputs  # type: ignore[assignment]
        return module

    def block(_: int) -> nn.Module:
        return _join(
            ln_1=nn.LayerNorm(hidden),
            attn=_join(c_attn=conv1d(hidden, 3 * hidden), c_proj=conv1d(hidden, hidden)),
            ln_2=nn.LayerNorm(hidden),
            mlp=_join(c_fc=conv1d(hidden, width), c_proj=conv1d(width, hidden)),
        )

    embedding = _embedding(c.size("vocab_size"), hidden)
    transformer = _join(
        wte=embedding,
        wpe=_embedding(c.size("n_positions"), hidden),
        h=nn.ModuleList(map(block, range(c.size("n_layer")))),
        ln_f=nn.LayerNorm(hidden),
    )
    return _join(transformer=transformer, lm_head=_head(c, embedding, True))


def _siglip(c: _Config) -> nn.Module:
    """A vision transformer."""
    hidden, width, patch = c.hidden, c.size("intermediate_size"), c.size("patch_size")
    square = (hidden, hidden, True)

    def layer(_: int) -> nn.Module:
        return _join(
            layer_norm1=nn.LayerNorm(hidden),
            self_attn=_join(q_proj=square, k_proj=square, v_proj=square, out_proj=square),
            layer_norm2=nn.LayerNorm(hidden),
            mlp=_join(fc1=(hidden, width, True), fc2=(width, hidden, True)),
        )

    patches = (c.size("image_size") // patch) ** 2
    return _join(
        embeddings=_join(
            patch_embedding=nn.Conv2d(3, hidden, patch, stride=patch),
            position_embedding=_embedding(patches, hidden),
        ),
        encoder=_join(layers=nn.ModuleList(map(layer, range(c.size("num_hidden_layers"))))),
        post_layernorm=nn.LayerNorm(hidden),
    )


def _pi0(c: _Config) -> nn.Module:
    """A vision-language model, and a smaller expert for robot actions, which attends to it."""
    vision, text, expert = map(c.part, ("vision_config", "text_config", "expert_config"))
    width, actions = expert.hidden, c.size("action_dim")

    def layer(_: int) -> nn.Module:
        return _join(self_attn=_attention(expert, 256), mlp=_mlp(expert))

    return _join(
        vision_tower=_siglip(vision),
        multi_modal_projector=_join(linear=(vision.hidden, text.hidden, True)),
        language_model=_llama(text, head_dim=256, tied=True),
        action_expert=_join(model=_trunk(expert, layer)),
        state_proj=(actions, width, True),
        action_in_proj=(actions, width, True),
        action_time_mlp_in=(2 * width, width, True),
        action_time_mlp_out=(width, width, True),
        action_out_proj=(width, actions, True),
    )


_gemma = partial(_llama, head_dim=256, tied=True)

MODEL_TYPES: Mapping[str, Callable[[_Config], nn.Module]] = MappingProxyType({
    "bamba": _bamba,
    "deepseek_v2": _deepseek, "deepseek_v3": partial(_deepseek, correction_bias=True),
    "falcon_mamba": _mamba,
    "gemma": _gemma, "gemma2": partial(_gemma, norms=_FOUR_NORMS),
    "gemma3_text": partial(_gemma, norms=_FOUR_NORMS, qk_norm=True),
    "gpt2": _gpt2, "gpt_oss": _gpt_oss,
    "jamba": _jamba,
    "llama": _llama,
    "mamba": _mamba, "mamba2": partial(_mamba, version=2),
    "mistral": _llama, "mixtral": _mixtral,
    "mllama": _mllama, "mllama_text_model": _mllama,
    "phi3": partial(_llama, fused=True), "pi0": _pi0,
    "qwen2": partial(_llama, qkv_bias=True),
    "qwen2_moe": lambda c: _qwen_moe(c, shared=True, qkv_bias=c.flag("qkv_bias", True)),
    "qwen3": partial(_llama, head_dim=128, qk_norm=True),
    "qwen3_moe": partial(_qwen_moe, qk_norm=True),
})  # fmt: skip


def build(config: Mapping[str, Any], dtype: str | None = None) -> nn.Module:
    """The model that a configuration describes, on the meta device, where it takes no memory.

    ``dtype`` replaces the one that the configuration names.

    Raises:
        PlanError: another ``model_type`` than those of `MODEL_TYPES`, or a key is missing or wrong.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise PlanError(
            f"no rule for model_type {kind!r}; known: {', '.join(MODEL_TYPES)}. For any other pass "
            "--model module:function, a function that returns the model (best on the meta device)"
        )
    with torch.device("meta"):
        return MODEL_TYPES[kind](_Config(config)).to(getattr(torch, dtype or dtype_of(config)))


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that the configuration names, bfloat16 if it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in ITEM_SIZE:
        known = ", ".join(ITEM_SIZE)
        raise PlanError(f"the model configuration has dtype {name!r}; pass --dtype, one of {known}")
    return name


_PRESETS = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(json.loads(_PRESETS))
"""The ``config`` of an architecture, and the publication that its numbers are from (``source``)."""


def _from_function(text: str, dtype: str | None) -> nn.Module:
    """What a function of a module makes, also of a module in the current folder."""
    module_name, _, function_name = text.partition(":")
    folder, doing = os.getcwd(), f"importing {module_name!r}"
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
            doing, function = text, getattr(module, function_name, None)
            model = function() if callable(function) else None
    except (Exception, SystemExit) as error:  # of the user's code: an answer, not a fault of ours
        raise PlanError(f"{doing} failed: {error!r}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    if not callable(function):
        raise PlanError(f"module {module_name!r} has no function {function_name!r}")
    if not isinstance(model, nn.Module):
        raise PlanError(f"{text} returned {type(model).__name__}, expected a torch.nn.Module")
    return model if dtype is None else model.to(getattr(torch, dtype))


def _load(text: str, dtype: str | None) -> nn.Module:
    if preset := PRESETS.get(text.lower()):
        return build(preset["config"], dtype)
    if os.path.exists(text) or text.endswith(".json"):
        path = Path(text, "config.json") if os.path.isdir(text) else Path(text)
        try:
            config = decode(dict[str, Any], parse(read_text(path)))
        except OSError as error:
            raise PlanError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{str(path)!r} is no configuration: {error}") from error
        return build(config, dtype)
    if all(part.strip() for part in text.partition(":")):
        return _from_function(text, dtype)
    # Published names come with an owner and a suffix: "Qwen/Qwen2.5-7B-Instruct".
    name = text.rsplit("/", 1)[-1].lower()
    ways = "or the path of a Hugging Face config.json, or module:function"
    hint = f". Presets: {', '.join(PRESETS)}; {ways}"
    if close := ", ".join(difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)):
        hint = f"; did you mean {close}? python -m dmuon plan --help lists all presets"
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
    if dtype not in (None, *ITEM_SIZE):
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {known}")
    specs = collect(_load(text, dtype), splits=splits, heads=heads, allow_meta=True)
    for p in specs.parameters:
        if p.dtype not in ITEM_SIZE:
            raise PlanError(f"parameter {p.name!r} has dtype {p.dtype}, expected one of {known}")
    return specs
