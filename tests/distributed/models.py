"""Small models and their data for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dmuon.scheduler.select import trainable_parameters
from dmuon.tools import parallel_models
from dmuon.tools.parallel_models import VOCAB, loss_of  # noqa: F401  used with these models


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[size, 16]``, different for every step and rank."""
    tokens, targets = parallel_models.batch(step, rank)
    return tokens[:size], targets[:size]


def seeded(kind: Callable[..., nn.Module] | None = None, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return (kind or Net)(**kwargs)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainable_parameters(model)}


def wrap(model: nn.Module, ddp: bool = True, **kwargs: Any) -> nn.Module:
    kwargs.setdefault("find_unused_parameters", True)  # Net.spare
    return DistributedDataParallel(model, **kwargs) if ddp else model


def half(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def tied(model: Any) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


class Block(nn.Module):
    def __init__(self, width: int = 24, hidden: int = 56) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd widths, wide, tall and square matrices, a layer that can be left out."""

    def __init__(self, width: int = 24, hidden: int = 56, layers: int = 3) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.spare = nn.Linear(width, width)  # used where `use_spare` is set
        self.mid = nn.Linear(width, 18)
        self.lm_head = nn.Linear(18, VOCAB)
        self.use_spare = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.spare(x) if self.use_spare else x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.mid(self.body(self.tok(tokens))))


def net_of(block: Callable[[], nn.Module], layers: int = 3) -> Net:
    model = Net(layers=0)
    model.blocks = nn.ModuleList(block() for _ in range(layers))
    return model


class Used(Net):
    """Every parameter is used, which DDP without find_unused_parameters requires."""

    def __init__(self) -> None:
        super().__init__()
        self.use_spare = True


class Ordered(Net):
    """Runs the blocks in ``order``; ``detached`` cuts the gradient off before the last of them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order: Sequence[int] = range(len(self.blocks))
        self.detached = False

    def body(self, x: Tensor) -> Tensor:
        for place, i in enumerate(self.order):
            if self.detached and place == len(self.order) - 1:
                x = x.detach()
            x = self.blocks[i](x)
        return x + self.spare(x) if self.use_spare else x


class Checkpointed(Net):
    """The blocks ``which`` are run again in backward."""

    def __init__(self, reentrant: bool, which: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.which = which

    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = self.again(block, x) if i in self.which else block(x)
        return x


class Pieces(nn.Module):
    """Parameters of several matrices each, so that one parameter has several owners."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(PiecesBlock() for _ in range(2))
        self.lm_head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class PiecesBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 28)
        self.o_proj = nn.Linear(28, 16, bias=False)
        self.w1 = nn.Parameter(torch.randn(5, 6, 16) * 0.3)
        self.w2 = nn.Parameter(torch.randn(5, 16, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o_proj(torch.tanh(self.qkv(self.norm(x))))
        hidden = F.gelu(torch.einsum("bti,ehi->beth", x, self.w1))
        return x + torch.einsum("beth,eih->bti", hidden, self.w2)


class Casting(Ordered):
    """No biases, and inputs follow the weights' dtype: runs plain under ``param_dtype``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CastingBlock() for _ in range(3))
        self.mid, self.spare = nn.Identity(), nn.Identity()
        self.lm_head = nn.Linear(24, VOCAB)


class CastingBlock(Block):
    def __init__(self) -> None:
        super().__init__(24, 40)
        self.norm, self.up.bias = nn.Identity(), None
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(self.up.weight.dtype)
        hidden = F.gelu(self.up(x.to(self.up.weight.dtype)))
        return x + self.down(hidden).to(x.dtype)


# ---- ways to call a `Net` ------------------------------------------------------------------


def without_root(model: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The root's forward, spelled out: no hook of the root runs."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = block(x)
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


def children_alone(model: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Nor hooks of blocks."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = x + block.down(F.gelu(block.up(block.norm(x))))
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())
