"""dmuon in torchtitan's `OptimizersContainer`: one more name that a config may use.

    torchrun --standalone --nproc-per-node=2 examples/frameworks/torchtitan_container.py

The container passes groups ``{"params": [tensors], "param_names": [names], ...}``, selected by
regular expressions over names. If torchtitan is not installed (it is not part of
``dmuon[frameworks]``), the script builds such groups itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tiny import VOCAB, Sequences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


class Decoder(nn.Module):
    """A decoder with the names of torchtitan's Llama."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.output = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.output(x)


def with_torchtitan(model: nn.Module) -> torch.optim.Optimizer:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Optimizers(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
            if name == "DMuon":
                return dmuon.Muon
            return OptimizersContainer._resolve_optimizer_factory(name)

    settings = {"lr": 1e-2, "weight_decay": 0.1}
    config = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r"norm|bias",
                optimizer_name="DMuon",
                optimizer_kwargs=settings | {"weight_decay": 0.0},
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="DMuon", optimizer_kwargs=settings),
        ],
        implementation="for-loop",  # its flags are for torch's optimizers
    )
    return Optimizers(config, model_parts=[model])


def by_the_convention(model: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = []
    for vectors in (True, False):
        part = {n: p for n, p in model.named_parameters() if (p.ndim < 2) == vectors}
        decay = 0.0 if vectors else 0.1
        groups.append(
            {"params": [*part.values()], "param_names": [*part], "lr": 1e-2, "weight_decay": decay}
        )
    return dmuon.Muon(groups)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        optimizer = with_torchtitan(model)
    except ImportError:
        optimizer = by_the_convention(model)
    tokens = Sequences().tokens
    for step in range(40):
        rows = (16 * (dist.get_world_size() * step + dist.get_rank())) % len(tokens)
        batch = tokens[rows : rows + 16]
        logits = model(batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
