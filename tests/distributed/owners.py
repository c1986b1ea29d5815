"""Models in the layouts of owners (`dedicated`, `replicated`), each beside a twin in one process.

::

    with both(Net, "kept", mesh=(2, 2)) as pair:
        pair.train(range(3))   # the twin on everybody's data, by ReferenceMuon
        pair.check()           # the same weights
"""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from tests.distributed.models import Block, Net, Zoo, batch, dedicate, loss_of, weights
from tests.transports import Event

MUON = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}

# The `dedicated` layout beside plain parameters, with weights kept between forward and backward,
# and beside FSDP2's; the `replicated` layout on a plain module and under DistributedDataParallel.
# The last three are forms of `replicated`; REPLICATED and DDP with reduce_to_owner.
PLAIN, KEPT, FSDP = "plain", "kept", "fsdp"
REPLICATED, DDP, WHOLE = "replicated", "ddp", "whole"
DEDICATED = (PLAIN, KEPT, FSDP)
LAYOUTS = (*DEDICATED, REPLICATED, DDP, WHOLE)


def layouts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", names)


def mesh_of(shape: Sequence[int], axes: Sequence[str] | None = None) -> DeviceMesh:
    names = axes or (("replicate", "shard") if len(shape) == 2 else ("dp",))
    return init_device_mesh(
        torch.get_default_device().type, tuple(shape), mesh_dim_names=tuple(names)
    )


def shard_rest(model: nn.Module, own: dmuon.Ownership, mesh: DeviceMesh, **kwargs: Any) -> None:
    """FSDP2 on everything that dmuon does not keep: the blocks, then the root."""
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, ignored_params=own.dedicated_params, **kwargs)


def whole(model: nn.Module, own: dmuon.Ownership) -> dict[str, Tensor]:
    """Copies of the full weights; a collective call."""
    with own.materialized(model):
        return {n: whole_tensor(p).clone() for n, p in trainable_parameters(model)}


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        difference = (weight.double() - expected[name].double()).abs()
        assert bool((difference <= tolerance).all()), f"{name} is {difference.max()} off"


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


Loss = Callable[[nn.Module, Any], Tensor]
# (model, step, data rank): sets up what differs from step to step and from rank to rank.
Prepare = Callable[[nn.Module, int, int], Any]


@dataclass
class Both:
    """``model`` on every rank and its ``twin``.

    ``context`` is what their forwards run in, ``round`` what comes before both optimizers' step.
    """

    model: nn.Module
    twin: nn.Module
    own: dmuon.Ownership
    opt: dmuon.Muon
    ref: ReferenceMuon
    transport: Any  # the wrapped one, if any
    data_rank: int
    data_world: int
    loss_of: Loss = loss_of
    prepare: Prepare = lambda model, step, rank: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    round: Callable[[Both, int], Any] = lambda pair, step: pair.both_backward(step)

    @property
    def bare(self) -> Any:
        return getattr(self.model, "module", self.model)

    @property
    def events(self) -> list[Event]:
        return self.transport.events

    @property
    def matrices(self) -> dict[str, int]:
        """Their sizes by name."""
        return {m.name: m.numel for m in self.own.plan.specs.matrices}

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        self.prepare(getattr(model, "module", model), step, rank)
        with self.context():
            return self.loss_of(model, batch(step, rank))

    def backward(self, step: int, parts: int = 1) -> None:
        (self.loss(self.model, step, self.data_rank) / parts).backward()

    def joint_backward(self, step: int, parts: int = 1, without: int | None = None) -> None:
        """The twin's gradients of everybody's data, but those of the rank ``without``."""
        for rank in range(self.data_world):
            if rank != without:
                (self.loss(self.twin, step, rank) / (self.data_world * parts)).backward()

    def both_backward(self, step: int) -> None:
        self.backward(step)
        self.joint_backward(step)

    def advance(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        self.ref.step()
        self.ref.zero_grad()

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.round(self, step)
            self.advance()

    def train_alone(self, steps: Sequence[int]) -> None:
        """The model without its twin."""
        for step in steps:
            self.backward(step)
            self.opt.step()
            self.opt.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        return whole(self.model, self.own)

    def check(self, tolerance: float = 1e-5) -> None:
        assert_close(self.whole(), weights(self.twin), tolerance)

    def copy_weights(self) -> None:
        """Set the twin to the model's weights, so that one step is compared, and no trajectory."""
        found = self.whole()
        with torch.no_grad():
            for name, p in trainable_parameters(self.twin):
                p.copy_(found[name])

    def assert_same_loss(self, step: int) -> None:
        with torch.no_grad():
            found = self.loss(self.model, step, self.data_rank)
            expected = self.loss(self.twin, step, self.data_rank)
        assert abs(float(found) - float(expected)) <= 1e-5


@contextmanager
def both(
    build: Callable[[], nn.Module] = Net,
    layout: str = PLAIN,
    *,
    mesh: Sequence[int] | DeviceMesh | None = None,
    change: Callable[[nn.Module], Any] = lambda model: None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    options: dict[str, Any] | None = None,
    select: dict[str, Any] | None = None,
    request: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
    only: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    transport: Callable[..., Any] | None = None,
    **extra: Any,
) -> Iterator[Both]:
    """Every rank starts from weights of its own; those of the first count.

    ``change`` is done to model and twin, ``wrap`` to the model alone, both before planning.
    ``select``: `splits` and `heads`; ``request``: other arguments of `dedicate_params`; ``muon``:
    hyperparameters for both optimizers, ``only``: for `Muon` alone; ``fsdp``: other arguments of
    `fully_shard`; ``extra``: of `Both`.
    """
    extra = {"data_rank": dist.get_rank(), "data_world": dist.get_world_size()} | extra
    select, options, settings = select or {}, options or {}, MUON | (muon or {})
    torch.manual_seed(100)
    twin = build()
    torch.manual_seed(100 + extra["data_rank"])
    model = build()
    change(twin), change(model)
    if wrap is None and layout in (DDP, WHOLE):
        wrap = partial(DistributedDataParallel, find_unused_parameters=True)  # Net.spare
    model = model if wrap is None else wrap(model)
    grid = mesh if isinstance(mesh, DeviceMesh) else mesh_of(mesh or (dist.get_world_size(),))
    kind = "replicated" if layout in (REPLICATED, DDP, WHOLE) else "dedicated"
    made = dmuon.ReplicatedOptions if kind == "replicated" else dmuon.DedicatedOptions
    options = {"free_after_forward": False} | options if layout == KEPT else options
    if layout in (REPLICATED, DDP):
        options = {"reduce_to_owner": True} | options
    asked = {"layout": kind, "options": made(**options), "solver": "greedy"}
    asked |= select | (request or {})
    wrapped = None
    if transport is None:
        own = dmuon.dedicate_params(
            model, None if mesh is None and layout in (DDP, WHOLE) else grid, **asked
        )
    else:
        own, wrapped = dedicate(model, transport, grid, **asked)
    if layout == FSDP:
        shard_rest(model, own, **({"mesh": grid} | (fsdp or {})))
    # What can go wrong with "sync" can with "async" too.
    opt = dmuon.Muon(model, **settings, **({"publish": "async"} | (only or {})))
    ref = ReferenceMuon(twin, **settings, **select)
    yield Both(model, twin, own, opt, ref, wrapped, **extra)
    own.close()


def follow(build: Callable[[], nn.Module] = Net, *args: Any, steps: int = 3, **kwargs: Any) -> None:
    """Train both and compare."""
    with both(build, *args, **kwargs) as pair:
        pair.train(range(steps))
        pair.check()


# ---- ways to call a model -----------------------------------------------------------------


def without_root(model, inputs):
    """The root's forward, spelled out: no hook of the root runs."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = block(x)
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


def children_alone(model, inputs):
    """Nor hooks of blocks."""
    x = model.tok(inputs[0])
    for block in model.blocks:
        x = x + block.down(F.gelu(block.up(block.norm(x))))
    logits = model.lm_head(model.mid(x))
    return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


# ---- models --------------------------------------------------------------------------------


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


# One owner after the other, where a good plan would keep equal shapes together.
IN_TURN: dict[str, Any] = {
    "select": {"splits": {"*qkv.weight": (8, 8, 12)}, "heads": {"*o_proj.weight": 4}},
    "request": {"solver": "round_robin"},
}


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


class Casting(Ordered):
    """No biases, and inputs follow the weights' dtype: runs plain under ``param_dtype``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CastingBlock() for _ in range(3))
        self.mid, self.spare = nn.Identity(), nn.Identity()
        self.lm_head = nn.Linear(24, 50)


class CastingBlock(Block):
    def __init__(self) -> None:
        super().__init__(24, 40)
        self.norm, self.up.bias = nn.Identity(), None
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(self.up.weight.dtype)
        hidden = F.gelu(self.up(x.to(self.up.weight.dtype)))
        return x + self.down(hidden).to(x.dtype)
