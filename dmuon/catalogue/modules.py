"""Architectures as numbers, and their parameters as modules on the meta device.

The modules have the parameter shapes and names of the Hugging Face implementation and no forward,
so that `select.collect` routes them by the same rules as the model itself. Two things differ: norms
are torch's own, and the experts of a layer are stacked to ``[experts, out, in]``, one stack for
each projection, where some implementations keep a module an expert or fuse gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Low-rank queries, keys and values (DeepSeek-V2 paper, section 2.1).

    ``query_rank`` 0 projects queries directly. A head has ``nope_dim + rope_dim`` query and key
    channels and ``value_dim`` value channels.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that replaces the MLP in all layers but ``dense_layers``.

    ``shared`` is the joint width of the shared experts (0: none), ``shared_gate`` scales them.
    ``block``, ``projections`` (gate, up, down), ``router`` and ``shared_name`` are how the
    implementation names its modules. ``fused``: gate and up are one stack, all stored (in, out) and
    with biases, as in gpt-oss.
    """

    count: int
    intermediate: int
    shared: int = 0
    dense_layers: frozenset[int] = frozenset()
    correction_bias: bool = False
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A Mamba mixer: version 1 (``rank`` of the step size), or 2 with ``heads`` and ``groups``.

    ``inner`` channels have a state of ``state`` each and a convolution over ``kernel`` steps.
    """

    inner: int
    state: int
    kernel: int
    rank: int = 0
    heads: int = 0
    groups: int = 1
    bias: bool = False
    kernel_bias: bool = True
    inner_norms: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder-only transformer with gated MLPs: Llama and what descends from it.

    ``vocabulary`` 0 leaves out embedding and head, ``tied`` shares their weight. ``fused`` joins
    q, k, v and gate, up, as Phi-3 does. ``sinks``: a learned logit a head. Layers in ``mixed`` have
    ``mixer`` instead of attention, those in ``crossed`` attend to images (whose embeddings are
    ``extra_tokens``). The last fields are how the implementation names its modules.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    sinks: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mixer: StateSpace | None = None
    mixed: frozenset[int] = frozenset()
    crossed: frozenset[int] = frozenset()
    extra_tokens: int = 0
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    last_norm: str = "norm"
    mlp_name: str = "mlp"
    nested: str = ""


@dataclass(frozen=True, slots=True)
class Mamba:
    """A stack of Mamba mixers alone."""

    vocabulary: int
    hidden: int
    layers: int
    mixer: StateSpace
    tied: bool = True


@dataclass(frozen=True, slots=True)
class GPT2:
    """GPT-2, whose weights are stored (in, out) and whose c_attn holds q, k and v as one matrix."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    intermediate: int
    tied: bool = True


@dataclass(frozen=True, slots=True)
class VisionLanguageAction:
    """A vision-language model beside a smaller expert for robot actions (pi0).

    The first fields are of the vision transformer (SigLIP). The expert has layers of its own, and
    its tokens attend to those of the language model.
    """

    hidden: int
    layers: int
    intermediate: int
    patch: int
    patches: int
    language: Decoder
    expert: Decoder
    action_dim: int


Architecture = Decoder | GPT2 | Mamba | VisionLanguageAction


# ---- parts -------------------------------------------------------------------------------


class _Linear(nn.Linear):
    """Without initialization: on the meta device there is nothing to initialize."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta")

    def reset_parameters(self) -> None:
        pass


def _join(**parts: nn.Module | nn.Parameter | tuple[int, int] | tuple[int, int, bool]) -> nn.Module:
    """A module that holds the given parts under the given names, in this order.

    ``(inputs, outputs)`` or ``(inputs, outputs, bias)`` stands for a linear layer.
    """
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, _Linear(*part) if isinstance(part, tuple) else part)
    return module


def _repeat(count: int, layer: Callable[[int], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(layer(index) for index in range(count))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def _embedding(count: int, hidden: int) -> nn.Embedding:
    return nn.Embedding(count, hidden, _weight=torch.empty(count, hidden, device="meta"))


def _head(embedding: nn.Embedding, tied: bool, vocabulary: int) -> nn.Module:
    head = _Linear(embedding.embedding_dim, vocabulary)
    if tied:
        head.weight = embedding.weight
    return head


def _rms_norm(size: int) -> nn.Module:
    return nn.RMSNorm(size, device="meta")


def _layer_norm(size: int) -> nn.Module:
    return nn.LayerNorm(size, device="meta")


# ---- decoders ----------------------------------------------------------------------------


def _mlp(a: Decoder, width: int) -> nn.Module:
    into, down = (a.hidden, width, a.mlp_bias), (width, a.hidden, a.mlp_bias)
    if a.fused:
        return _join(gate_up_proj=(a.hidden, 2 * width, a.mlp_bias), down_proj=down)
    return _join(gate_proj=into, up_proj=into, down_proj=down)


def _mixture(a: Decoder, e: Experts) -> nn.Module:
    router = _Linear(a.hidden, e.count, e.fused)
    if e.correction_bias:
        router.e_score_correction_bias = _parameter(e.count)
    if e.fused:
        stacks = {
            "gate_up_proj": _parameter(e.count, a.hidden, 2 * e.intermediate),
            "gate_up_proj_bias": _parameter(e.count, 2 * e.intermediate),
            "down_proj": _parameter(e.count, e.intermediate, a.hidden),
            "down_proj_bias": _parameter(e.count, a.hidden),
        }
    else:
        gate, up, down = e.projections
        stacks = {name: _parameter(e.count, e.intermediate, a.hidden) for name in (gate, up)}
        stacks[down] = _parameter(e.count, a.hidden, e.intermediate)
    mixture = _join(experts=_join(**stacks), **{e.router: router})
    if e.shared:
        mixture.add_module(e.shared_name, _mlp(a, e.shared))
    if e.shared_gate:
        mixture.add_module(f"{e.shared_name}_gate", _Linear(a.hidden, 1))
    return mixture


def _mixer(hidden: int, m: StateSpace) -> nn.Module:
    """Mamba (arXiv 2312.00752, section 3.4) or, with heads, Mamba-2 (arXiv 2405.21060, section 7).

    The convolution is one filter a channel.
    """
    channels = m.inner + (2 * m.groups * m.state if m.heads else 0)
    convolution = nn.Conv1d(
        channels, channels, m.kernel, groups=channels, bias=m.kernel_bias, device="meta"
    )
    mixer = _join(conv1d=convolution, out_proj=(m.inner, hidden, m.bias))
    if m.heads:
        mixer.in_proj = _Linear(hidden, m.inner + channels + m.heads, m.bias)
        mixer.dt_bias, mixer.A_log, mixer.D = (_parameter(m.heads) for _ in range(3))
        mixer.norm = _rms_norm(m.inner)
        return mixer
    mixer.A_log, mixer.D = _parameter(m.inner, m.state), _parameter(m.inner)
    mixer.in_proj = _Linear(hidden, 2 * m.inner, m.bias)
    mixer.x_proj = _Linear(m.inner, m.rank + 2 * m.state)
    mixer.dt_proj = _Linear(m.rank, m.inner, True)
    if m.inner_norms:
        mixer.dt_layernorm = _rms_norm(m.rank)
        mixer.b_layernorm, mixer.c_layernorm = _rms_norm(m.state), _rms_norm(m.state)
    return mixer


def _attention(a: Decoder, qk_norm: bool) -> nn.Module:
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    output = (queries, a.hidden, a.output_bias)
    if a.fused:
        return _join(qkv_proj=(a.hidden, queries + 2 * keys, a.qkv_bias), o_proj=output)
    key = (a.hidden, keys, a.qkv_bias)
    attention = _join(q_proj=(a.hidden, queries, a.qkv_bias), k_proj=key, v_proj=key, o_proj=output)
    if a.sinks:
        attention.sinks = _parameter(a.heads)
    if qk_norm:
        attention.q_norm, attention.k_norm = _rms_norm(a.head_dim), _rms_norm(a.head_dim)
    return attention


def _latent_attention(a: Decoder, latent: LatentAttention) -> nn.Module:
    queries = a.heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank:
        attention = _join(
            q_a_proj=(a.hidden, latent.query_rank, a.qkv_bias),
            q_a_layernorm=_rms_norm(latent.query_rank),
            q_b_proj=(latent.query_rank, queries),
        )
    else:
        attention = _join(q_proj=(a.hidden, queries))
    compressed = latent.kv_rank + latent.rope_dim
    attention.kv_a_proj_with_mqa = _Linear(a.hidden, compressed, a.qkv_bias)
    attention.kv_a_layernorm = _rms_norm(latent.kv_rank)
    attention.kv_b_proj = _Linear(latent.kv_rank, a.heads * (latent.nope_dim + latent.value_dim))
    attention.o_proj = _Linear(a.heads * latent.value_dim, a.hidden, a.output_bias)
    return attention


def _layer(a: Decoder, index: int) -> nn.Module:
    layer = nn.Module()
    if a.mixer is not None and index in a.mixed:
        layer.mamba = _mixer(a.hidden, a.mixer)
    elif index in a.crossed:
        layer.cross_attn = _attention(a, qk_norm=True)
        layer.cross_attn_attn_gate, layer.cross_attn_mlp_gate = _parameter(1), _parameter(1)
    elif a.latent is not None:
        layer.self_attn = _latent_attention(a, a.latent)
    else:
        layer.self_attn = _attention(a, a.qk_norm)
    if a.experts is None or index in a.experts.dense_layers:
        layer.add_module(a.mlp_name, _mlp(a, a.intermediate))
    else:
        layer.add_module(a.experts.block, _mixture(a, a.experts))
    for name in a.layer_norms:
        layer.add_module(name, _rms_norm(a.hidden))
    return layer


def _decoder(a: Decoder) -> nn.Module:
    model = _join(layers=_repeat(a.layers, lambda index: _layer(a, index)))
    model.add_module(a.last_norm, _rms_norm(a.hidden))
    if not a.vocabulary:
        return _join(model=model)
    embedding = model.embed_tokens = _embedding(a.vocabulary + a.extra_tokens, a.hidden)
    if a.nested:
        model = _join(**{a.nested: model})
    return _join(model=model, lm_head=_head(embedding, a.tied, a.vocabulary))


# ---- others ------------------------------------------------------------------------------


def _mamba(a: Mamba) -> nn.Module:
    embedding = _embedding(a.vocabulary, a.hidden)
    backbone = _join(
        embeddings=embedding,
        layers=_repeat(
            a.layers, lambda _: _join(norm=_rms_norm(a.hidden), mixer=_mixer(a.hidden, a.mixer))
        ),
        norm_f=_rms_norm(a.hidden),
    )
    return _join(backbone=backbone, lm_head=_head(embedding, a.tied, a.vocabulary))


def _gpt2(a: GPT2) -> nn.Module:
    def conv1d(inputs: int, outputs: int) -> nn.Module:
        module = _join(weight=_parameter(inputs, outputs), bias=_parameter(outputs))
        module.nf = outputs  # type: ignore[assignment]
        return module

    def block(_: int) -> nn.Module:
        h, width = a.hidden, a.intermediate
        return _join(
            ln_1=_layer_norm(h),
            attn=_join(c_attn=conv1d(h, 3 * h), c_proj=conv1d(h, h)),
            ln_2=_layer_norm(h),
            mlp=_join(c_fc=conv1d(h, width), c_proj=conv1d(width, h)),
        )

    embedding = _embedding(a.vocabulary, a.hidden)
    transformer = _join(
        wte=embedding,
        wpe=_embedding(a.positions, a.hidden),
        h=_repeat(a.layers, block),
        ln_f=_layer_norm(a.hidden),
    )
    return _join(transformer=transformer, lm_head=_head(embedding, a.tied, a.vocabulary))


def _vla(a: VisionLanguageAction) -> nn.Module:
    h, width = a.hidden, a.expert.hidden

    def vision_layer(_: int) -> nn.Module:
        square = (h, h, True)
        return _join(
            layer_norm1=_layer_norm(h),
            self_attn=_join(q_proj=square, k_proj=square, v_proj=square, out_proj=square),
            layer_norm2=_layer_norm(h),
            mlp=_join(fc1=(h, a.intermediate, True), fc2=(a.intermediate, h, True)),
        )

    vision = _join(
        embeddings=_join(
            patch_embedding=nn.Conv2d(3, h, a.patch, stride=a.patch, device="meta"),
            position_embedding=_embedding(a.patches, h),
        ),
        encoder=_join(layers=_repeat(a.layers, vision_layer)),
        post_layernorm=_layer_norm(h),
    )
    return _join(
        vision_tower=vision,
        multi_modal_projector=_join(linear=(h, a.language.hidden, True)),
        language_model=_decoder(a.language),
        action_expert=_decoder(a.expert),
        state_proj=(a.action_dim, width, True),
        action_in_proj=(a.action_dim, width, True),
        action_time_mlp_in=(2 * width, width, True),
        action_time_mlp_out=(width, width, True),
        action_out_proj=(width, a.action_dim, True),
    )


def build(architecture: Architecture, dtype: str = "bfloat16") -> nn.Module:
    """The parameters of an architecture on the meta device; it takes no memory."""
    match architecture:
        case Decoder():
            model = _decoder(architecture)
        case GPT2():
            model = _gpt2(architecture)
        case Mamba():
            model = _mamba(architecture)
        case VisionLanguageAction():
            model = _vla(architecture)
    return model.to(getattr(torch, dtype))
