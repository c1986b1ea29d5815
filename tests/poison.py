"""A gradient that is not finite, from a forward pass that is."""

from __future__ import annotations

import torch


class Poison(torch.autograd.Function):
    """``Poison.apply(weight, value)`` is zero, and its gradient is ``value`` everywhere."""

    @staticmethod
    def forward(ctx, weight, value):
        ctx.shape, ctx.value = weight.shape, value
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return torch.full(ctx.shape, ctx.value), None
