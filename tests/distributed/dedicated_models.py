"""A model on every rank beside its twin in one process, which is trained on everybody's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from tests.distributed.dedicated import MUON, mesh_of, shard_rest, whole
from tests.distributed.models import Net, Zoo, batch, loss_of, weights

PLAIN, FSDP = "plain", "fsdp"  # the `dedicated` layout beside plain or FSDP2 parameters
REPLICATED, DDP = "replicated", "ddp"  # the `replicated` layout on a plain module or under DDP
RESTS = pytest.mark.parametrize("rest", [PLAIN, FSDP])
FREED = pytest.mark.parametrize("freed", [True, False], ids=["freed", "kept"])
KEPT = {"free_after_forward": False}
MODES = pytest.mark.parametrize(
    "mode",
    [{"rest": PLAIN}, {"rest": PLAIN, "options": KEPT}, {"rest": FSDP}],
    ids=["plain", "kept", "fsdp"],
)
ALL_MODES = pytest.mark.parametrize(
    "mode",
    [
        {"rest": PLAIN},
        {"rest": PLAIN, "options": KEPT},
        {"rest": FSDP},
        {"rest": REPLICATED},
        {"rest": DDP},
    ],
    ids=["plain", "kept", "fsdp", "replicated", "ddp"],
)

Loss = Callable[[nn.Module, Any], Tensor]
# (model, step, data rank): sets up what differs from step to step and from rank to rank.
Prepare = Callable[[nn.Module, int, int], None]


@dataclass
class Both:
    """``model`` on every rank and its ``twin``. ``context`` is what their forwards run in."""

    model: nn.Module
    twin: nn.Module
    own: dmuon.Ownership
    opt: dmuon.Muon
    ref: ReferenceMuon
    data_rank: int
    data_world: int
    loss_of: Loss = loss_of
    prepare: Prepare = lambda model, step, rank: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        self.prepare(getattr(model, "module", model), step, rank)
        with self.context():
            return self.loss_of(model, batch(step, rank))

    def backward(self, step: int, parts: int = 1) -> None:
        (self.loss(self.model, step, self.data_rank) / parts).backward()

    def joint_backward(self, step: int, parts: int = 1) -> None:
        for rank in range(self.data_world):
            (self.loss(self.twin, step, rank) / (self.data_world * parts)).backward()

    def advance(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        self.ref.step()
        self.ref.zero_grad()

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.backward(step)
            self.joint_backward(step)
            self.advance()

    def check(self, tolerance: float = 1e-5) -> None:
        found, expected = whole(self.model, self.own), weights(self.twin)
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            difference = float((weight.double() - expected[name].double()).abs().max())
            assert difference <= tolerance, f"{name} is {difference} off"


@contextmanager
def both(
    build: Callable[[], nn.Module] = Net,
    *,
    rest: str = PLAIN,
    mesh: Sequence[int] | None = None,
    change: Callable[[nn.Module], Any] = lambda model: None,
    compiled: Callable[[nn.Module], Any] = lambda model: None,
    options: dict[str, Any] | None = None,
    select: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
    only: dict[str, Any] | None = None,
    solver: str = "greedy",
    **extra: Any,
) -> Iterator[Both]:
    """Every rank starts from weights of its own; those of the first count.

    ``change`` is done to model and twin, ``compiled`` to the model alone, both before planning.
    ``select``: `splits` and `heads`; ``muon``: hyperparameters for both optimizers, ``only``: for
    `Muon` alone; ``extra``: of `Both`.
    """
    rank, select, settings = dist.get_rank(), select or {}, MUON | (muon or {})
    torch.manual_seed(100)
    twin = build()
    torch.manual_seed(100 + rank)
    model = build()
    change(twin), change(model)
    compiled(model)
    grid = mesh_of(mesh or (dist.get_world_size(),))
    if rest in (REPLICATED, DDP):
        # Net.spare is not used at every step.
        model = (
            DistributedDataParallel(model, find_unused_parameters=True) if rest == DDP else model
        )
        own = dmuon.dedicate_params(
            model, options=dmuon.ReplicatedOptions(**options or {}), solver=solver, **select
        )
    else:
        own = dmuon.dedicate_params(
            model,
            grid,
            layout="dedicated",
            options=dmuon.DedicatedOptions(**options or {}),
            solver=solver,
            **select,
        )
    if rest == FSDP:
        shard_rest(model, own, grid)
    opt = dmuon.Muon(model, **settings, **only or {})
    ref = ReferenceMuon(twin, **settings, **select)
    yield Both(model, twin, own, opt, ref, rank, dist.get_world_size(), **extra)
    own.close()


def follow(build: Callable[[], nn.Module] = Net, steps: int = 3, **kwargs: Any) -> None:
    """Train both and compare."""
    with both(build, **kwargs) as pair:
        pair.train(range(steps))
        pair.check()


def trained(
    build: Callable[[], nn.Module] = Net, steps: int = 4, **kwargs: Any
) -> dict[str, Tensor]:
    """The weights after some steps without the twin, for bitwise comparisons."""
    with both(build, **kwargs) as pair:
        for step in range(steps):
            pair.backward(step)
            pair.opt.step()
            pair.opt.zero_grad()
        return whole(pair.model, pair.own)


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def copy_weights(pair: Both) -> None:
    """Set the twin to the model's weights, so that one step is compared, and no trajectory."""
    found = whole(pair.model, pair.own)
    with torch.no_grad():
        for name, p in trainable_parameters(pair.twin):
            p.copy_(found[name])


# ---- models --------------------------------------------------------------------------------


class Skipping(Net):
    """Runs the blocks in ``order``; ``detached`` cuts the gradient off before the last of them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order: Sequence[int] = range(len(self.blocks))
        self.detached = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for place, i in enumerate(self.order):
            if self.detached and place == len(self.order) - 1:
                x = x.detach()
            x = self.blocks[i](x)
        if self.use_spare:
            x = x + self.spare(x)
        return self.lm_head(self.mid(x))


class Checkpointed(Net):
    """The blocks ``which`` are run again in backward."""

    def __init__(self, reentrant: bool, which: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.which = which

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for i, block in enumerate(self.blocks):
            x = self.again(block, x) if i in self.which else block(x)
        return self.lm_head(self.mid(x))


PIECES = {"splits": {"*qkv.weight": (8, 8, 12)}, "heads": {"*o_proj.weight": 4}}


class Pieces(nn.Module):
    """Parameters of several matrices each, so that one parameter has several owners."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(PiecesBlock() for _ in range(2))
        self.lm_head = nn.Linear(16, 50)

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


class ZooBlocks(nn.Module):
    """Convolutions, experts and attention, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 6)
        self.blocks = nn.ModuleList([ConvBlock(), ConvBlock()])
        self.zoo = Zoo()
        self.lm_head = nn.Linear(6, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x) + self.zoo(tokens)


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(6, 8, (1, 3), padding=(0, 1))
        self.back = nn.ConvTranspose1d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = F.gelu(self.wide(x.mT[:, :, None, :]))
        return x + self.back(image[:, :, 0, :]).mT


class Casting(nn.Module):
    """No biases, and inputs follow the weights' dtype: runs plain under ``param_dtype``."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(CastingBlock() for _ in range(3))
        self.lm_head = nn.Linear(16, 50)
        self.order: Sequence[int] = range(3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for i in self.order:
            x = self.blocks[i](x)
        return self.lm_head(x.float())


class CastingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 40, bias=False)
        self.down = nn.Linear(40, 16, bias=False)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(self.up.weight.dtype)
        hidden = F.gelu(self.up(x.to(self.up.weight.dtype)))
        return x + self.down(hidden).to(x.dtype)


class Sums(nn.Module):
    """Every weight's gradient is ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SumsBlock(3 + i) for i in range(5))

    def forward(self, scale: Tensor) -> Tensor:
        return sum((block(scale) for block in self.blocks), torch.zeros(()))


class SumsBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 7))
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, scale: Tensor) -> Tensor:
        return scale * (self.weight.sum() + self.scale.sum())
