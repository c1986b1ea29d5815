"""Small models and helpers that the unit tests share."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Slices, gradient_bucket
from dmuon.comm.process_groups import Grid, ProcessGroups
from dmuon.comm.reducer import GradientReducer, OwnedGradients, at_end_of_backward
from dmuon.comm.transport import Transport
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.plan import Batch, OwnershipPlan, units_of
from dmuon.scheduler.select import collect
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout, PlanError
from tests.distributed.compare import assert_bitwise  # noqa: F401  used with these models

WIDTH = 8


class Block(nn.Module):
    """Pre-norm residual MLP; two matrices of one shape each way."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyGPT(nn.Module):
    """Embedding, a ModuleList of blocks, norm, untied head: `[batch, time]` to logits."""

    def __init__(self, blocks: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class Mixed(nn.Module):
    """Everything that is several matrices: experts, splits, heads, repeated shapes.

    `[batch, WIDTH]` to `[batch, WIDTH]`.
    """

    splits: Mapping[str, Sequence[int]] = {"*qkv.weight": (8, 4, 4)}
    heads: Mapping[str, int] = {"*o_proj.weight": 2}

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (1, 3), padding=(0, 1))
        self.deconv = nn.ConvTranspose2d(4, 2, (1, 3), padding=(0, 1))
        self.qkv = nn.Linear(2 * WIDTH, 16)
        self.o_proj = nn.Linear(16, WIDTH, bias=False)
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        image = torch.tanh(self.conv(torch.stack((x, -x), 1)[:, :, None, :]))
        x = self.o_proj(torch.tanh(self.qkv(self.deconv(image).flatten(1))))
        for weight, scale in zip(self.experts.w1, self.scale):  # type: ignore[arg-type]
            x = x + torch.tanh(x @ weight) * scale
        for block in self.blocks:
            x = block(x)
        return x


class Conv1D(nn.Module):
    """As transformers has it: the weight is stored (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Fused(nn.Module):
    """GPT-2's fused attention weight, and experts as gpt-oss stores them: any dims to the same.

    ``heads`` makes contiguous pieces.
    """

    heads: Mapping[str, Any] = {"*c_proj.weight": {"heads": 2, "dim": 0}}

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(2, width, 12) / width**0.5)
        self.experts.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 12))
        self.experts.down_proj = nn.Parameter(torch.randn(2, 6, width) / 6**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        x = x + self.c_proj(torch.tanh(q) * k + v)
        e: Any = self.experts
        for up, bias, down in zip(e.gate_up_proj, e.gate_up_proj_bias, e.down_proj):
            gate, value = (x @ up + bias).chunk(2, -1)
            x = x + (torch.sigmoid(gate) * value) @ down
        return x


def tree(parameters: Mapping[str, Sequence[int]]) -> nn.Module:
    """A module with a bare parameter of the given shape at each dotted path."""
    root = nn.Module()
    for path, shape in parameters.items():
        *parents, name = path.split(".")
        module = root
        for part in parents:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, nn.Parameter(torch.randn(tuple(shape))))
    return root


def routes(model: nn.Module, **options: object) -> dict[str, ParameterSpec]:
    """How `collect` routes each trainable parameter, by name."""
    specs = collect(model, **options)  # type: ignore[arg-type]
    return {p.name: p for p in specs.parameters}


def specs_of(keys: Iterable[tuple[int, int, str]], rest: int = 0) -> ModelSpecs:
    """A model of one-matrix parameters with these (rows, cols, dtype), and some vectors."""
    parameters, matrices = [], []
    for i, (rows, cols, dtype) in enumerate(keys):
        name = f"m{i}.weight"
        parameters.append(ParameterSpec(name, (rows, cols), dtype, Algorithm.MUON, "weight"))
        matrices.append(MatrixSpec(name, i, rows, cols, dtype))
    for i in range(rest):
        parameters.append(ParameterSpec(f"v{i}.bias", (3 + i,), "float32", Algorithm.ADAMW, "1-D"))
    return ModelSpecs(tuple(parameters), tuple(matrices))


def plan_of(specs: ModelSpecs, owners: Sequence[int], world: int, ms: float = 1.0) -> OwnershipPlan:
    """A plan with given owners, every matrix in a batch of its own that takes ``ms``."""
    return OwnershipPlan(
        specs=specs,
        topology=Topology.flat(world),
        batches=tuple(Batch(owner, (i,), ms) for i, owner in enumerate(owners)),
        layout=Layout.REDUCED,
        solver="greedy",
        status="feasible",
        cost_source="made up",
        lower_bound_ms=ms,
    )


def reducer_of(model: nn.Module, transport: Transport, replicas: int = 1) -> GradientReducer:
    """With a bucket for each parameter, where rank 0 owns all matrices."""
    specs, world = collect(model), transport.world
    plan = plan_of(specs, [0] * len(specs.matrices), 1)
    grid = Grid((replicas, world // replicas, 1), tuple(range(world)))
    slices = Slices(plan, grid, [None] * len(specs.parameters))
    rest = {p: specs.parameters[p].numel for p in specs.adamw_parameters()}
    members = reversed(range(len(specs.parameters)))
    buckets = [gradient_bucket(slices, [p], rest, 0, None) for p in members]
    parameters = list(model.parameters())
    units = units_of(plan, [0] * len(specs.matrices))
    owned = OwnedGradients(slices, units, 0, None, parameters[0].device)
    groups = ProcessGroups.flat(transport)
    return GradientReducer(parameters, groups, buckets, owned)


def reduced_in_backward(
    model: nn.Module, transport: Transport, replicas: int = 1
) -> GradientReducer:
    """A reducer whose hooks take each gradient once it is accumulated."""
    reducer = reducer_of(model, transport, replicas)

    def accumulated(number: int, _: Tensor) -> None:
        if not reducer.open:
            reducer.begin()
            at_end_of_backward(reducer.finish)
        reducer.accumulated(number)

    for number, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(partial(accumulated, number))
    return reducer


def sealed(data: dict[str, object]) -> str:
    """A saved plan with this content and, if it can be read at all, the fingerprint that fits."""
    with mock.patch.object(OwnershipPlan, "fingerprint", lambda plan: data.get("fingerprint")):
        try:
            plan = OwnershipPlan.from_json(json.dumps(data))
        except PlanError:
            return json.dumps(data)
    return json.dumps(data | {"fingerprint": plan.fingerprint()})


def plan_of_mixed(world: int = 3) -> OwnershipPlan:
    """The plan of `Mixed` under analytic costs."""
    specs = collect(Mixed(), splits=Mixed.splits, heads=Mixed.heads)
    return solve(specs, Topology.flat(world), CostTable.analytic())


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def inputs(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    """Step -> a batch of its own, the same on every call."""
    return lambda step: torch.randn(
        *shape, generator=torch.Generator().manual_seed(1000 + step)
    ).to(dtype)


def tokens(shape: Sequence[int] = (3, 5), vocabulary: int = 11) -> Callable[[int], Tensor]:
    return lambda step: torch.randint(
        vocabulary, tuple(shape), generator=torch.Generator().manual_seed(1000 + step)
    )


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


Loss = Callable[[nn.Module, Tensor], Tensor]


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batches: Callable[[int], Tensor],
    steps: Iterable[int],
    loss_fn: Loss = mean_square,
) -> list[float]:
    """Plain training loop; returns the losses."""
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    losses = []
    for step in steps:
        loss = loss_fn(model, batches(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the published weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def through_a_file(state: object) -> Any:
    """What `torch.load` makes of what `torch.save` wrote, without trust."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_within(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float
) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        difference = (value - theirs[name]).abs().max().item()
        assert difference <= tolerance, f"{name}: {difference}"


def numbered(*shape: int) -> Tensor:
    """0, 1, 2, ... in row-major order."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def partitions(count: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``count`` as a descending sum of parts up to ``largest``."""
    if count == 0:
        yield ()
    for part in range(min(count, largest), 0, -1):
        for tail in partitions(count - part, part):
            yield (part, *tail)
