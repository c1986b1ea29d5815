"""Small built-in models and the ways to parallelize them that ``python -m dmuon check`` covers.

The same model on one process is the reference. No mesh divides its widths, and some matrices have
fewer rows than ranks. No layer before a softmax has a bias, because the softmax cancels it: its
gradient would be nothing but rounding, which AdamW amplifies.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB = 61


class _Attention(nn.Module):
    """Causal attention with as many heads as the local projections hold."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        size = heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, False) for _ in range(3))
        self.o_proj = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for y in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


def _mlp(width: int, hidden: int) -> nn.Module:
    up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
    return nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))


class _Experts(nn.Module):
    """Experts as 3-D parameters ``w1 [E, hidden, width]`` and ``w2 [E, width, hidden]``. Every
    token goes to every expert, weighted by its gate. Where ranks hold some of the experts each,
    these travel, not the tokens: the parameters and their gradients are the same."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, hidden, width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(count, width, hidden) * hidden**-0.5)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Map tokens ``[t, width]`` and gates ``[t, E]`` to ``[t, width]``."""
        w1, w2 = (
            w.full_tensor(grad_placements=[Partial()]) if isinstance(w, DTensor) else w
            for w in (self.w1, self.w2)
        )
        y = torch.einsum("teh,eih,te->ti", F.gelu(torch.einsum("ti,ehi->teh", x, w1)), w2, gates)
        return y.clone()  # FSDP2 warns about a module that returns a view


class _Moe(nn.Module):
    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = _Experts(count, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        return self.experts(tokens, self.router(tokens).softmax(-1)).view_as(x)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads=2, head_dim=6)
        self.mlp = _Moe(experts, width, hidden) if experts else _mlp(width, hidden)
        self.narrow = _mlp(width, 3)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.norm(x))
        return x + self.mix(self.norm(x + self.narrow(x)))


class ParallelModel(nn.Module):
    """A small language model; if ``experts > 0``, its MLPs are mixtures of that many."""

    def __init__(
        self, width: int = 50, hidden: int = 15, layers: int = 2, experts: int = 0
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(_Block(width, hidden, experts) for _ in range(layers))
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def loss_of(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(model(inputs[0]).float().flatten(0, 1), inputs[1].flatten())


def batch(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets ``[4, 16]`` on torch's default device for a step and data rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(104729 * step + data_rank)
    tokens = torch.randint(0, VOCAB, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _as_it_is(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2 over one data axis, or HSDP over two (replicate, shard)."""
    names = mesh.mesh_dim_names
    assert names is not None
    data = tuple(name for name in names if name != "tp")
    part = mesh if data == names else mesh[data if len(data) > 1 else data[0]]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=part)
    fully_shard(model, mesh=part)
    return model


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut projections by columns or rows; embedding, head, norms and `mix` stay plain tensors."""
    # Between the halves of an MLP activations stay DTensors, which support uneven parts.
    uneven = partial(ColwiseParallel, use_local_output=False)
    plan = {
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(),
        **{f"{mlp}.up": uneven() for mlp in ("mlp", "narrow")},
        **{f"{mlp}.down": RowwiseParallel() for mlp in ("mlp", "narrow")},
    }
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], plan)
    return model


def _expert_parallel(model: nn.Module, mesh: DeviceMesh, dim: int) -> nn.Module:
    """Shard experts over "ep", then their ``dim`` over "fsdp"; all else over all ranks."""
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp",))
    for block in model.blocks:  # type: ignore[union-attr]
        experts = block.mlp.experts  # type: ignore[union-attr]
        for name, p in list(experts.named_parameters()):
            part = distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])
            experts.register_parameter(name, nn.Parameter(part))
        fully_shard(experts, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(dim))
        # The mean over the tokens of all ranks, as a sum and a division: gloo has no scaled sum.
        experts.set_force_sum_reduction_for_comms(True)
        experts.set_gradient_divide_factor(float(mesh.size()))
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model


@dataclass(frozen=True, slots=True)
class ParallelCase:
    """A model and the ways to parallelize it in place over a mesh, ``tensor_parallel`` first; data
    differ along the ``data_axes`` only."""

    name: str
    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    build: Callable[[], nn.Module]
    data_parallel: Callable[[nn.Module, DeviceMesh], nn.Module] = _as_it_is
    tensor_parallel: Callable[[nn.Module, DeviceMesh], nn.Module] = _as_it_is

    @property
    def world(self) -> int:
        """The number of ranks that it needs."""
        return math.prod(self.mesh_shape)

    def make_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Make the mesh over all ranks of the default process group; a collective call."""
        return init_device_mesh(device_type, self.mesh_shape, mesh_dim_names=self.axes)


_MOE = partial(ParallelModel, hidden=6, experts=4)
_DP, _REPLICAS, _EP = ("dp",), ("replicate", "shard"), ("fsdp", "ep")
_WHOLE, _SPLIT = partial(_expert_parallel, dim=0), partial(_expert_parallel, dim=1)


def replicated_case(
    world: int, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> ParallelCase:
    """Return a case of whole models on ``world`` ranks, each passed to ``wrap``."""
    return ParallelCase("", (world,), _DP, _DP, ParallelModel, lambda model, mesh: wrap(model))


_FSDP2 = ParallelCase("fsdp2", (2,), _DP, _DP, ParallelModel, _shard)
_FSDP4 = ParallelCase("fsdp4", (4,), _DP, _DP, partial(ParallelModel, hidden=6), _shard)
_HSDP = ParallelCase("hsdp", (2, 2), _REPLICAS, _REPLICAS, ParallelModel, _shard)
_TP = ParallelCase("tp", (2,), ("tp",), (), ParallelModel, tensor_parallel=_tensor_parallel)
_TP_DP = replace(_TP, name="tp+dp", mesh_shape=(2, 2), axes=("dp", "tp"), data_axes=_DP)
_TP_FSDP = replace(_TP_DP, name="tp+fsdp", data_parallel=_shard)
_THREE = (*_REPLICAS, "tp")
_HSDP_TP = replace(_TP_FSDP, name="hsdp+tp", mesh_shape=(2, 2, 2), axes=_THREE, data_axes=_REPLICAS)
_EP_FSDP = ParallelCase("ep+fsdp", (2, 2), _EP, _EP, _MOE, _WHOLE)
_SPLIT_EP = replace(_EP_FSDP, name="ep+fsdp, split experts", data_parallel=_SPLIT)

# For the `sharded` layout: the framework distributes parameters.
CASES = (_FSDP2, _TP, _FSDP4, _HSDP, _TP_FSDP, _EP_FSDP, _SPLIT_EP, _HSDP_TP)
# For `dedicated`: without ``data_parallel`` dmuon reduces gradients of all parameters.
_PLAIN = ParallelCase("plain", (2,), _DP, _DP, ParallelModel)
DEDICATED_CASES = (_PLAIN, _FSDP2, _FSDP4, _HSDP, _TP_DP, _TP_FSDP)
