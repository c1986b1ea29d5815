"""A small GPT for the examples: RMSNorm, RoPE, SwiGLU, separate q/k/v/o, an untied head.

It does not use dmuon. Its names are the usual ones, so the default rules find the matrices: the
weights of the blocks, but not the embedding, the head and the gains of norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `width` is a multiple of `2 * heads`, because RoPE turns pairs."""

    vocabulary: int = 256
    context: int = 128
    width: int = 160
    heads: int = 5
    hidden: int = 448
    depth: int = 4
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in fp32 whatever the dtype of `x`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rope(config: GPTConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, `[length, width / heads / 2]` each, of `like`'s device and dtype.

    They are computed in each forward, which costs next to nothing. As buffers they would be cast
    with the model, and `DistributedDataParallel` would broadcast them before each forward.
    """
    pairs = config.width // config.heads // 2
    exponents = torch.arange(pairs, dtype=torch.float32, device=like.device) / pairs
    positions = torch.arange(length, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, config.rope_base**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs `(i, i + half)` of `x`, `[B, heads, T, channels]`, by their angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # As many heads as this rank has: with tensor parallelism it has only some of them.
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        q = rotate(split(self.q_proj(x)), cos, sin)
        k = rotate(split(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, split(self.v_proj(x)), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens `[B, T]` to logits `[B, T, vocabulary]`, T <= context."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        blocks = [Block(config) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.config = config
        self._initialize(config, blocks)

    def _initialize(self, config: GPTConfig, blocks: list[Block]) -> None:
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        # The two projections that write to the residual stream start small, so that its size does
        # not grow with the depth. With a small head the loss starts at log(vocabulary).
        for block in blocks:
            for projection in (block.attention.o_proj, block.mlp.down_proj):
                projection.weight.data.mul_((2 * config.depth) ** -0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        cos, sin = rope(self.config, tokens.shape[1], like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.final_norm(x))
