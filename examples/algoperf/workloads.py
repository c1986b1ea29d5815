"""Two workloads of seconds that speak AlgoPerf's PyTorch API, on data that are made here.

`CNN` classifies noisy pictures; its convolutions are flattened to matrices. `Transformer` predicts
the next token of random walks. Both are deterministic: a seed gives the same weights and the same
global batches on any number of ranks, of which each rank reads its part. Of AlgoPerf's API they
have what a submission and its runner call, with the same names; types of parameters are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

try:
    from algoperf.spec import ForwardPassMode, LossType
except ImportError:  # the package is not needed here

    class ForwardPassMode(enum.Enum):  # type: ignore[no-redef]
        TRAIN = 0
        EVAL = 1

    class LossType(enum.Enum):  # type: ignore[no-redef]
        SOFTMAX_CROSS_ENTROPY = 0


Batch = dict[str, Tensor]


def ranks() -> tuple[int, int]:
    """This rank, and of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Workload:
    """What both share. ``examples(count, generator)`` of a subclass makes its data."""

    name: str
    step_hint = 60
    num_validation_examples = 256
    loss_type = LossType.SOFTMAX_CROSS_ENTROPY
    build: Callable[[], nn.Module]

    def __init__(self) -> None:
        self.metrics_logger: Any = None

    def attach_metrics_logger(self, metrics_logger: Any) -> None:
        """From now on ``metrics_logger.append_scalar_metrics(metrics, global_step)`` is called."""
        self.metrics_logger = metrics_logger

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``count`` of each."""
        raise NotImplementedError

    def _build_input_queue(
        self, data_rng: list[int], split: str, data_dir: str, global_batch_size: int
    ) -> Iterator[Batch]:
        """This rank's part of endless global batches; the runner alone calls it."""
        rank, world = ranks()
        if global_batch_size % world:
            raise ValueError(f"a batch of {global_batch_size} cannot be shared by {world} ranks")
        part = slice(*(i * (global_batch_size // world) for i in (rank, rank + 1)))
        generator = torch.Generator().manual_seed(2 * data_rng[0] + (split == "train"))
        while True:
            inputs, targets = self.examples(global_batch_size, generator)
            yield {"inputs": inputs[part], "targets": targets[part]}

    def init_model_fn(self, rng: list[int]) -> tuple[nn.Module, None]:
        """The model, in `DistributedDataParallel` on several ranks; it has no other state."""
        torch.manual_seed(rng[0])
        model = self.build()
        return (DistributedDataParallel(model) if ranks()[1] > 1 else model), None

    def model_fn(
        self,
        params: nn.Module,
        augmented_and_preprocessed_input_batch: Batch,
        model_state: None,
        mode: ForwardPassMode,
        rng: list[int],
        update_batch_norm: bool,
        dropout_rate: float = 0.0,
    ) -> tuple[Tensor, None]:
        """Logits, the classes last. There is no dropout."""
        trains = mode is ForwardPassMode.TRAIN
        params.train(trains)
        for module in params.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1 if update_batch_norm else 0.0
        with nullcontext() if trains else torch.no_grad():
            return params(augmented_and_preprocessed_input_batch["inputs"]), None

    def loss_fn(
        self,
        label_batch: Tensor,
        logits_batch: Tensor,
        mask_batch: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Batch:
        """Sum, number and each of the losses of this rank's predictions."""
        losses = F.cross_entropy(
            logits_batch.flatten(0, -2),
            label_batch.flatten(),
            reduction="none",
            label_smoothing=label_smoothing,
        )
        weights = torch.ones_like(losses) if mask_batch is None else mask_batch.flatten()
        losses = losses * weights
        return {"summed": losses.sum(), "n_valid_examples": weights.sum(), "per_example": losses}

    def eval_model(
        self, global_batch_size: int, params: nn.Module, model_state: None, rng: list[int]
    ) -> dict[str, float]:
        """Loss and accuracy on the validation examples. Collective."""
        queue = self._build_input_queue(rng, "validation", "", global_batch_size)
        totals = torch.zeros(3)
        for _ in range(self.num_validation_examples // global_batch_size):
            batch = next(queue)
            logits, _ = self.model_fn(params, batch, None, ForwardPassMode.EVAL, rng, False)
            loss = self.loss_fn(batch["targets"], logits)
            right = (logits.argmax(-1) == batch["targets"]).sum()
            totals += torch.stack([loss["summed"], right, loss["n_valid_examples"]])
        if ranks()[1] > 1:
            dist.all_reduce(totals)
        summed, right, count = totals.tolist()
        return {"validation/loss": summed / count, "validation/accuracy": right / count}


# ---- pictures ------------------------------------------------------------------------------

CLASSES, SIDE, SHIFTS = 10, 16, 4


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; SiLU as in AlgoPerf's ``imagenet_resnet_silu``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm1(self.conv1(x))))
        return F.silu(self.norm2(y) + self.shortcut(x))


class ResNet(nn.Module):
    """``[batch, 3, SIDE, SIDE]`` to ``[batch, CLASSES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(Block(32, 64, 2), Block(64, 128, 2), Block(128, 128, 1))
        self.fc = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.silu(self.norm(self.stem(x)))).mean((-2, -1)))


class CNN(Workload):
    """A picture is a window of the pattern of its class, under noise that is twice as strong."""

    name = "tiny_cnn"
    build = ResNet

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        fixed = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES, 3, *[SIDE + SHIFTS - 1] * 2, generator=fixed)
        windows = patterns.unfold(2, SIDE, 1).unfold(3, SIDE, 1)
        classes = torch.randint(CLASSES, (count,), generator=generator)
        x, y = torch.randint(SHIFTS, (2, count), generator=generator)
        pictures = windows[classes, :, x, y]
        return pictures + 2 * torch.randn(pictures.shape, generator=generator), classes


# ---- tokens --------------------------------------------------------------------------------

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, SUCCESSORS = 64, 32, 128, 4, 3, 4


class Layer(nn.Module):
    """Attention and a perceptron, each after a normalization and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        # No bias: a key's has no gradient but rounding, of which AdamW makes whole steps.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    """Tokens ``[batch, LENGTH]`` to logits ``[batch, LENGTH, VOCABULARY]``."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight
        return self.head(self.norm(self.layers(x)))


class Transformer(Workload):
    """From each token a walk goes on to one of SUCCESSORS others, all alike: the least loss is
    the logarithm of their number, 1.386."""

    name = "tiny_transformer"
    build = LM

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        fixed = torch.Generator().manual_seed(0)
        successors = torch.rand(VOCABULARY, VOCABULARY, generator=fixed).argsort()[:, :SUCCESSORS]
        walk = [torch.randint(VOCABULARY, (count,), generator=generator)]
        for choice in torch.randint(SUCCESSORS, (LENGTH, count), generator=generator):
            walk.append(successors[walk[-1], choice])
        tokens = torch.stack(walk, 1)
        return tokens[:, :-1], tokens[:, 1:]


WORKLOADS: dict[str, type[Workload]] = {kind.name: kind for kind in (CNN, Transformer)}
