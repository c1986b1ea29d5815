"""A tiny Llama with random weights, and sequences that it can learn; nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCAB, LENGTH = 64, 16


def tiny_llama() -> nn.Module:
    """A model with the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Each token follows from the one before: ``next = 5 * token + 3``, modulo the vocabulary."""

    def __init__(self, count: int = 2048) -> None:
        tokens = [torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(1))]
        for _ in range(LENGTH - 1):
            tokens.append((5 * tokens[-1] + 3) % VOCAB)
        self.tokens = torch.stack(tokens, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}
