"""Models that several benchmarks train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Alike", "Stack"]


class Layer(nn.Module):
    """w x w, w x w, 4w x w, w x 4w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.b(torch.relu(self.a(y))) + self.down(torch.relu(self.up(y)))


class Stack(nn.Module):
    """Layers of four matrices, one after the other; ``[..., width]`` to the same."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Alike(nn.Module):
    """``count`` matrices of one shape ``[rows, cols]``, side by side: all have gradients of a size.

    ``[..., cols]`` to ``[count, ..., rows]``.
    """

    def __init__(self, count: int, rows: int, cols: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(cols, rows, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])
