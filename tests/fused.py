"""Models with weights that are stored (in, out) and hold several projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """As transformers has it: the weight is stored (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Fused(nn.Module):
    """GPT-2's fused attention weight, and experts as gpt-oss stores them: any dims to the same.

    ``heads`` makes contiguous pieces.
    """

    splits: Mapping[str, Any] = {}
    heads: Mapping[str, Any] = {"*c_proj.weight": {"heads": 2, "dim": 0}}

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(2, width, 12) / width**0.5)
        self.experts.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 12))
        self.experts.down_proj = nn.Parameter(torch.randn(2, 6, width) / 6**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        x = x + self.c_proj(torch.tanh(q) * k + v)
        e = self.experts
        for up, bias, down in zip(e.gate_up_proj, e.gate_up_proj_bias, e.down_proj):
            gate, value = (x @ up + bias).chunk(2, -1)
            x = x + (torch.sigmoid(gate) * value) @ down
        return x
