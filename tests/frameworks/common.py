"""One task for every framework: a few clipped, scheduled steps, saved half-way, and resumed.

The expected losses and weights come from `by_hand`: a plain loop over the joint batch of all ranks
with `ReferenceMuon`, in one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.reference import ReferenceMuon

VOCAB, LENGTH = 48, 8
JOINT = 4  # examples in a step, over all ranks
STEPS, SAVED = 6, 3
LR, DECAY = 1e-2, 0.1
CLIP = 0.5  # gradients' norms are above 1
TOLERANCE = 1e-5
# What wrapped modules add to the names of parameters.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
SETTINGS: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "ns_dtype": torch.float32}


def factor(step: int) -> float:
    """What multiplies the learning rate: warmup over two steps, from 0, then linearly to 0."""
    return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)


def examples() -> Tensor:
    """Tokens ``[STEPS * JOINT, LENGTH]``, in the order in which they are used."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (STEPS * JOINT, LENGTH), generator=generator)


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same as transformers wants them: labels are the tokens."""

    def __len__(self) -> int:
        return STEPS * JOINT

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": examples()[i], "labels": examples()[i]}


def batch(step: int, rank: int = 0, world: int = 1) -> Tensor:
    """The tokens of one rank in one step."""
    return examples()[step * JOINT : (step + 1) * JOINT].chunk(world)[rank]


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of predicting the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Logits of tokens, without a framework's model class."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def llama(**changes: Any) -> nn.Module:
    """A tiny Llama of transformers, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 40, "vocab_size": VOCAB}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=32, **changes)
    return LlamaForCausalLM(config)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of either model on these tokens."""
    output = model(tokens)
    return cross_entropy(output if isinstance(output, Tensor) else output.logits, tokens)


# ---- by hand -----------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable weights, whole, by name. Collective where they are sharded."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
            for prefix in WRAPPERS:
                name = name.replace(prefix, "")
            found[name] = whole.clone()
    return found


def by_hand(
    build: Callable[[], nn.Module],
    *,
    decay_vectors: bool = True,
    clip: float | None = CLIP,
    rate: Callable[[int], float] = factor,
    loss_at: Callable[[nn.Module, int], Tensor] | None = None,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of a plain loop in one process.

    Without ``decay_vectors`` norms and biases have no weight decay. ``rate(step)`` multiplies the
    learning rate; ``loss_at(model, step)`` is the joint loss of a step; ``settings`` are the
    optimizer's.
    """
    model = build()
    optimizer = ReferenceMuon(model, **(SETTINGS | settings))
    groups = [*optimizer.param_groups]
    if optimizer.adamw is not None:
        if not decay_vectors:
            (group,) = optimizer.adamw.param_groups
            vectors = [p for p in group["params"] if p.ndim < 2]
            group["params"] = [p for p in group["params"] if p.ndim >= 2]
            optimizer.adamw.add_param_group({"params": vectors, **_but(group), "weight_decay": 0.0})
        groups += optimizer.adamw.param_groups
    losses = []
    for step in range(STEPS):
        for group in groups:
            group["lr"] = LR * rate(step)
        loss = loss_at(model, step) if loss_at else loss_of(model, batch(step))
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip, "it should bite"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights(model)


def _but(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def assert_same(
    found: tuple[list[float], dict[str, Tensor]],
    expected: tuple[list[float], dict[str, Tensor]],
    tolerance: float = TOLERANCE,
) -> None:
    """The last losses and all weights are those expected; the mean over ranks of each loss."""
    losses, ours = found
    torch.testing.assert_close(losses, expected[0][-len(losses) :], rtol=tolerance, atol=tolerance)
    assert ours.keys() == expected[1].keys()
    for name, weight in expected[1].items():
        difference = (ours[name] - weight).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def train(
    model: nn.Module,
    optimizer: Any,
    schedule: Any,
    rank: int,
    world: int,
    *,
    resume: bool = False,
    save: Callable[[], Any] = lambda: None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    clip: Callable[[], Any] | None = None,
) -> list[float]:
    """The same loop on a rank's examples; the losses. It saves half-way, or with ``resume`` begins
    there."""
    losses = []
    for step in range(SAVED if resume else 0, STEPS):
        loss = loss_of(model, batch(step, rank, world))
        backward(loss)
        clip() if clip is not None else nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        if step + 1 == SAVED and not resume:
            save()
    return losses


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Flat:
    """An optimizer's state as torchtitan and nemo-automodel keep it: flat, by parameters' names."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


# ---- processes ---------------------------------------------------------------------------


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """The environment that torchrun makes, around processes that have met already.

    Everything is as it was afterwards: accelerate writes its plugin into the environment.
    """
    made = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    made |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    made |= {"TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": 1}
    with mock.patch.dict(os.environ, {k: str(v) for k, v in made.items()}):
        yield


@contextlib.contextmanager
def accelerate_on_cpu(fsdp: bool = False) -> Iterator[None]:
    """accelerate's state of a process, new; with ``fsdp`` its FSDP plugin counts on a CPU too.

    accelerate takes its plugin only where there are accelerators (`AcceleratorState.__init__`);
    everything behind that gate runs on gloo as it is.
    """
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    init = AcceleratorState.__init__

    def opened(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            assert self.distributed_type is DistributedType.MULTI_CPU, "the gate is gone"
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    reset()
    if fsdp:
        AcceleratorState.__init__ = opened
    try:
        yield
    finally:
        AcceleratorState.__init__ = init
        reset()


def saved_and_resumed(pools: Any, body: Any, folder: Any, **arguments: Any) -> None:
    """``body`` on two processes, which save; then from there."""
    for resume in (False, True):
        given = {"folder": str(folder), "resume": resume, **arguments}
        pools(2).run(body.__module__, body.__name__, given)


def muon(what: Any, **changes: Any) -> dmuon.Muon:
    """The optimizer under test."""
    return dmuon.Muon(what, **(SETTINGS | changes))
