"""Small models, data and helpers for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.api import Given, Request, assemble, mesh_topology
from dmuon.comm.transport import C10dTransport, Transport
from dmuon.config import PlannerOptions
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.topology import Topology

VOCAB = 50


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd widths, wide, tall and square matrices, a block that can be left out."""

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


class Zoo(nn.Module):
    """What a model can be made of: convolutions, experts, fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 10, 3, padding=1)
        self.deconv = nn.ConvTranspose1d(10, 6, 3, padding=1)
        # No bias: the gradient of a key bias is zero but for rounding, which AdamW blows up.
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.w1 = nn.Parameter(torch.randn(5, 7, 6) * 0.3)
        self.w2 = nn.Parameter(torch.randn(5, 6, 7) * 0.3)
        self.A_log = nn.Parameter(torch.zeros(3, 6))
        self.tok = nn.Embedding(VOCAB, 6)
        self.lm_head = nn.Linear(6, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        x = x + self.deconv(F.gelu(self.conv(x.mT))).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        hidden = F.gelu(torch.einsum("bti,ehi->beth", x, self.w1))
        x = x + torch.einsum("beth,eih->bti", hidden, self.w2) + self.A_log.sum(0)
        return self.lm_head(x)


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens and targets, different for every step and rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7919 * step + rank + 1)
    tokens = torch.randint(0, VOCAB, (size, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(inputs[0])
    return F.cross_entropy(logits.float().flatten(0, 1), inputs[1].flatten())


def seeded(kind: type[nn.Module] = Net, seed: int = 0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    return kind(**kwargs)


def wrap(model: nn.Module, ddp: bool, **kwargs: Any) -> nn.Module:
    kwargs.setdefault("find_unused_parameters", True)  # Net.spare
    return DistributedDataParallel(model, **kwargs) if ddp else model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainable_parameters(model)}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel())


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Bitwise, for every parameter."""
    for name, p in trainable_parameters(model):
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(p.detach(), first), f"{name} differs from rank 0's"


def dedicate(
    model: nn.Module,
    wrapper: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> tuple[dmuon.Ownership, Any]:
    """`dedicate_params` over a wrapped transport, for recordings and delays.

    The transports of a mesh's other process groups share the events of the one that is returned.
    """
    inner = C10dTransport(list(range(dist.get_world_size())))
    transport = inner if wrapper is None else wrapper(inner)

    def topology() -> Topology:
        if mesh is None:
            return Topology.flat(inner.world)
        return mesh_topology(mesh, inner.world, list(model.parameters()), None, PlannerOptions())

    def new_group(partition: Sequence[tuple[int, ...]]) -> Transport:
        group = inner.subgroup(partition)
        return group if wrapper is None else wrapper(group, events=transport.events)

    if kwargs.get("layout", "replicated") == "replicated":
        # A plain model, whose gradients dmuon averages.
        kwargs = {"options": dmuon.ReplicatedOptions(reduce_to_owner=True)} | kwargs
    return assemble(Given(model), Request(**kwargs), transport, topology, new_group), transport


def reference_for(model: nn.Module, **kwargs: Any) -> ReferenceMuon:
    kwargs.setdefault("ns_dtype", torch.float32)
    return ReferenceMuon(model, **kwargs)
