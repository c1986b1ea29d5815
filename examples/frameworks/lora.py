"""LoRA adapters of peft with dmuon.

    python examples/frameworks/lora.py

Only the adapters are trained. Each A [rank, in] and each B [out, rank] is a matrix of its own for
Muon; with `only_b` below, A goes to AdamW. docs/frameworks/peft.md says what to expect.
"""

from __future__ import annotations

import torch
from _tiny import Sequences, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import dmuon


def only_b(name: str, parameter: Tensor) -> bool:
    return "lora_B" in name


def train(dedicate: dict[str, object] | None) -> list[float]:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(tiny_llama(), config)
    optimizer = dmuon.Muon(model, lr=1e-2, weight_decay=0.0, dedicate=dedicate)
    data = torch.utils.data.DataLoader(Sequences(1024), batch_size=32)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    for name, dedicate in (("Muon on A and B", None), ("Muon on B", {"select": only_b})):
        losses = train(dedicate)
        print(f"{name:16}", [f"{loss:.3f}" for loss in losses[::8]], f"{losses[-1]:.3f}")


if __name__ == "__main__":
    main()
