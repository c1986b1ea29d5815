"""The matrix of layouts, options, gradients and shapes: cases, and one process that must agree.

A `Case` trains a small model in one layout, perhaps saves it and goes on in another. Weights, state
and losses must be those of a single process without distribution. Gradients are sums of small whole
numbers, exact in every dtype and order of summation, so that a difference is dmuon's doing however
many ranks there are. `covering` draws cases until each kind of layout has met each value of each
option, and `simplest` makes a failing case small.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.config import Schedule
from dmuon.reference import ReferenceMuon
from tests.accelerator import host_cannot_read, nothing_read
from tests.distributed.layouts import Layout, on, shard_units
from tests.distributed.twins import Trained

SAMPLES = 12  # of all ranks in a step: as many for each of 1, 2, 3 and 4
SAVE_AT, STEPS = 2, 4
LR = 0.02

# ---- models ------------------------------------------------------------------------------

KINDS = ("linear", "biased", "fused", "experts", "conv", "embedding", "vector")


@dataclass(frozen=True)
class Piece:
    """A layer of ``rows x cols``; ``count`` experts, or parts of a fused projection."""

    kind: str
    rows: int
    cols: int
    count: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weight."""
        return {
            "fused": (self.count * self.rows, self.cols),
            "experts": (self.count, self.rows, self.cols),
            "conv": (self.rows, self.cols, 3),
            "vector": (self.rows,),
        }.get(self.kind, (self.rows, self.cols))

    @property
    def is_projection(self) -> bool:
        return self.kind in ("linear", "biased", "fused")

    @property
    def is_expert_parallel(self) -> bool:
        """Whether "ep+fsdp" cuts it twice: FSDP2 cuts dim 1 evenly only."""
        return self.kind == "experts" and self.count >= 2 and self.rows % 2 == 0


class Layer(nn.Module):
    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.kind, self.experts = piece.kind, slice(None)  # the experts that this rank has
        self.is_expert_parallel = piece.is_expert_parallel
        if piece.is_projection:
            rows, cols = piece.shape
            self.proj = nn.Linear(cols, rows, bias=piece.kind == "biased")
        elif piece.kind == "embedding":
            self.tok = nn.Embedding(piece.rows, piece.cols)
        elif piece.kind == "conv":
            self.conv = nn.Conv1d(piece.cols, piece.rows, 3, padding=1, bias=False)
        else:
            self.weight = nn.Parameter(torch.randn(piece.shape) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "experts":
            weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
            return torch.einsum("emn,sen->sem", weight, x[:, self.experts].to(weight.dtype))
        if self.kind == "vector":
            return self.weight * x.to(self.weight.dtype)
        if self.kind == "embedding":
            return self.tok(x)
        if self.kind == "conv":
            return self.conv(x.to(self.conv.weight.dtype))[..., 1].clone()
        return self.proj(x.to(self.proj.weight.dtype))


Inputs = dict[int, tuple[Tensor, Tensor]]


class Model(nn.Module):
    """Layers side by side. Those that ``inputs`` does not name have no gradient."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(piece) for piece in pieces)

    def forward(self, inputs: Inputs, factor: float) -> Tensor:
        losses = []
        for i, (x, t) in inputs.items():
            layer = self.blocks[i]
            t = t[:, layer.experts] if layer.kind == "experts" else t
            losses.append((layer(x).float() * t).sum())
        return torch.stack(losses).sum() * factor


def data(piece: Piece, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the factors of outputs: -1, 0 or 1."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, (SAMPLES, *shape), generator=generator).float()

    rows, cols, count = piece.rows, piece.cols, piece.count
    if piece.kind == "embedding":
        return torch.randint(0, rows, (SAMPLES,), generator=generator), draw(cols)
    inputs = {"experts": (count, cols), "vector": (rows,), "conv": (cols, 3)}
    outputs = {"experts": (count, rows)}
    return (draw(*inputs.get(piece.kind, (cols,))), draw(*outputs.get(piece.kind, piece.shape[:1])))


# ---- layouts -----------------------------------------------------------------------------


def _is_parallel(piece: tuple[int, ...], number: int, axes: tuple[str, ...]) -> bool:
    """Whether a projection of this shape is cut over "tp": by columns, or by rows."""
    size = piece[number % 2]
    # torch loads whole tensors into two shards of one dim only where they are even.
    return size >= 2 if number % 2 or len(axes) == 1 else size % 4 == 0


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Projections by columns and rows in turn, where each rank gets some."""
    axes = mesh.mesh_dim_names
    assert axes is not None
    for i, block in enumerate(model.blocks):
        style = (ColwiseParallel, RowwiseParallel)[i % 2]
        if hasattr(block, "proj") and _is_parallel(block.proj.weight.shape, i, axes):
            whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
            parallelize_module(block, mesh["tp"], {"proj": style(**whole)})
    return model


def _tensor_parallel_shards(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard_units(_tensor_parallel(model, mesh), mesh["dp"])


def _expert_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Experts over "ep", then over "fsdp"; all else over all ranks."""
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp",))
    number, size = mesh["ep"].get_local_rank(), mesh["ep"].size()
    for block in model.blocks:
        if not block.is_expert_parallel:
            fully_shard(block, mesh=everyone)
            continue
        each = -(-len(block.weight) // size)
        block.experts = slice(number * each, (number + 1) * each)
        part = distribute_tensor(block.weight.detach(), mesh["ep"], [Shard(0)])
        block.weight = nn.Parameter(part)
        fully_shard(block, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1))
        block.set_force_sum_reduction_for_comms(True)
        block.set_gradient_divide_factor(float(mesh.size()))
    return fully_shard(model, mesh=everyone)


_EP = Layout((2, 2), ("fsdp", "ep"), wrap=_expert_parallel, from_first=False)
LAYOUTS = {
    "single": on("plain", 1),
    **{f"fsdp{n}": on("fsdp2", n) for n in (2, 3, 4)},
    **{f"ddp{n}": on("ddp", n) for n in (2, 3, 4)},
    **{f"reduced{n}": on("reduced", n) for n in (2, 3)},
    "reduced ddp": on("reduced ddp", 2),
    **{f"dedicated{n}": on("dedicated", n) for n in (2, 3)},
    "dedicated fsdp": on("dedicated fsdp", 2),
    "tp": Layout((2,), ("tp",), wrap=_tensor_parallel),
    "hsdp": on("fsdp2", 2, 2),
    "dedicated hsdp": on("dedicated", 2, 2),
    "dedicated tp": replace(on("dedicated", 2, 2), axes=("dp", "tp"), wrap=_tensor_parallel),
    "tp+fsdp": Layout((2, 2), ("dp", "tp"), wrap=_tensor_parallel_shards),
    "ep+fsdp": _EP,
}
# Layouts of one kind, which differ in their mesh, share the cases of their kind.
KINDS_OF_LAYOUTS = [
    ("single",),
    ("fsdp2", "fsdp3", "fsdp4"),
    ("ddp2", "ddp3", "ddp4"),
    ("reduced2", "reduced3", "reduced ddp"),
    ("dedicated2", "dedicated3"),
    ("tp", "tp+fsdp"),
    ("hsdp", "ep+fsdp"),
    ("dedicated hsdp", "dedicated tp", "dedicated fsdp"),
]
SHARDED = ("fsdp2", "fsdp3", "fsdp4", "hsdp", "tp", "tp+fsdp", "ep+fsdp")
REDUCED = ("reduced2", "reduced3", "reduced ddp")
DEDICATED = ("dedicated2", "dedicated3", "dedicated fsdp", "dedicated hsdp", "dedicated tp")
FREE = ("single", *REDUCED[:2], "dedicated2", "dedicated3", "dedicated hsdp", "dedicated tp")
"""Where a rank may leave out what others run: no framework reduces gradients there."""


def kind_of(name: str) -> type:
    if name in DEDICATED:
        return dmuon.DedicatedOptions
    return dmuon.ShardedOptions if name in SHARDED else dmuon.ReplicatedOptions


def _chunks(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """As `torch.chunk` cuts a dim, empty ones left out."""
    size = -(-(last - first) // parts)
    return [(a, min(a + size, last)) for a in range(first, last, size)]


def boxes(piece: Piece, number: int, name: str) -> list[tuple[tuple[int, int], ...]]:
    """The parts of a weight that ranks of a sharded layout hold, each once: a range in each dim."""
    case = LAYOUTS[name]
    cuts = [(axis, parts, 0) for axis, parts in zip(case.axes, case.mesh or ())]
    if name == "ep+fsdp":
        cuts = [("fsdp", 2, 1), ("ep", 2, 0)] if piece.is_expert_parallel else [("dp", 4, 0)]
    found: list[tuple[tuple[int, int], ...]] = [tuple((0, size) for size in piece.shape)]
    for axis, parts, dim in reversed(cuts):  # "tp" first
        if axis == "tp":
            dim = number % 2
            if not piece.is_projection or not _is_parallel(piece.shape, number, case.axes):
                continue
        if axis != "replicate":
            cut = [(box, part) for box in found for part in _chunks(*box[dim], parts)]
            found = [(*box[:dim], part, *box[dim + 1 :]) for box, part in cut]
    return found


# ---- options -----------------------------------------------------------------------------


class Damped(dmuon.Rule):
    """A user's variant: entries that stay large are damped by a moment per element."""

    state = (dmuon.StateSpec("size", "element"), dmuon.StateSpec("count", "matrix"))

    def __init__(self, beta: float = 0.5) -> None:
        self.beta = beta

    def accept(self, update: Tensor, state: Any) -> Tensor:
        state["count"].add_(1)
        state["size"].lerp_(update.abs().float(), 1 - self.beta)
        return update / (1 + state["size"] * state["count"].view(-1, 1, 1)).to(update.dtype)


# What may differ from case to case; the first value is the plain one.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "gradients": (
        "all", "missing on some ranks", "missing everywhere", "missing at first", "zero",
        "not finite", "late vector", "late matrix", "scaled",
    ),
    "variant": (None, "normuon", "damped"),
    "masters": (False, True),
    "momentum_dtype": (None, "bfloat16"),
    "cautious": (False, True),
    "ns_dtype": ("float32", "bfloat16"),
    "period": (1, 2, 3),
    "redundancy": ("auto", 1, 2, 4),
    "clip": (None, 0.05, math.inf),
    "parts": (1, 2),
    "no_sync": (False, True),
    "host": ("reads", "cannot read"),
    "buckets": ("usual", "small", "one"),
    "max_batch": (16, 1),
    "solver": ("auto", "greedy", "round_robin"),
    "fixed_kernels": (False, "gram", "standard"),
    "verify": (None, 1),
    "reduce_dtype": (None, "float32", "bfloat16"),
    "prefetch": (1, 0, 3),
    "kept": (False, True),
    "rule": ("ema", "plain ema", "sgd", "plain sgd"),
    "adjust": ("match_rms_adamw", "original"),
    "groups": (1, 2),
    "then": ("", "dcp", "full", "rank 0"),
}  # fmt: skip
_LATE = ("late vector", "late matrix")
_RULES = {
    "ema": {},
    "plain ema": {"nesterov": False, "momentum": 0.5, "ns_coefficients": "quintic"},
    "sgd": {"momentum_mode": "sgd", "momentum": 0.9, "ns_steps": 3},
    "plain sgd": {"momentum_mode": "sgd", "nesterov": False, "dampening": 0.25, "eps": 1e-3},
}
# What the second of two param groups says of its own; and its rate has a schedule of its own.
_SECOND = {
    "weight_decay": 0.3, "momentum": 0.8, "ns_steps": 4, "variant": None,
    "adjust_lr_fn": "spectral_unclamped", "adamw_weight_decay": 0.02,
}  # fmt: skip


def is_legal(layout: str, option: str, value: Any) -> bool:
    """Whether the layout knows the value at all."""
    plain = value == OPTIONS[option][0]
    if option == "gradients" and (value in _LATE or value == "scaled"):
        return layout not in (*DEDICATED, *REDUCED)
    if option == "redundancy" and not plain:
        return value in {"ddp2": (1, 2), "ddp4": (1, 2, 4), "hsdp": (1, 2)}.get(layout, ())
    known = {
        "period": SHARDED,
        "reduce_dtype": (*DEDICATED, *REDUCED),
        "prefetch": DEDICATED,
        "kept": DEDICATED,
    }
    if option == "masters" and layout == "dedicated tp":
        return plain
    return plain or layout in known.get(option, LAYOUTS)


@dataclass(frozen=True)
class Case:
    """A model, a layout, what differs from the plain case, and the layout of the second half."""

    layout: str
    pieces: tuple[Piece, ...]
    chosen: tuple[tuple[str, Any], ...] = ()
    other: str = ""
    seed: int = 0

    def __getattr__(self, name: str) -> Any:
        if name not in OPTIONS:
            raise AttributeError(name)
        return dict(self.chosen).get(name, OPTIONS[name][0])

    def with_(self, **changes: Any) -> Case:
        changes = dict(self.chosen) | changes
        chosen = tuple((n, v) for n, v in changes.items() if v != OPTIONS[n][0])
        return replace(self, chosen=chosen)

    @property
    def is_consistent(self) -> bool:
        """Whether its options go together."""
        rule = self.period > 1 and (self.variant or self.gradients in (*_LATE, "not finite"))
        late = self.gradients in _LATE and (self.then or self.redundancy != "auto")
        # Gradients that are multiplied with a norm are not exact in half precision, and a
        # `GradScaler` unscales them first.
        narrow = self.masters or self.reduce_dtype == "bfloat16" or self.gradients == "scaled"
        # torch's broadcast does not know the slices that owners keep.
        loads = self.then == "rank 0" and self.other == "dedicated tp"
        # With fixed kernels verification compares bits, which a variant may round in its batch.
        bits = self.fixed_kernels and self.variant
        redundant = self.redundancy != "auto" and self.max_batch == 1
        # Of each of two groups the first piece has to be a matrix.
        second = Piece("", 1, 1) if len(self.pieces) < 2 else self.pieces[1]
        apart = self.groups == 2 and (not second.is_projection or min(second.shape) < 2)
        legal = all(is_legal(layout, *o) for o in self.chosen for layout in self.layouts)
        narrow = narrow and self.clip
        return legal and not (rule or late or bits or redundant or loads or apart or narrow)

    @property
    def layouts(self) -> tuple[str, ...]:
        return (self.layout, self.other) if self.other else (self.layout,)

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        model = Model(self.pieces).to(torch.bfloat16 if self.masters else torch.float32)
        # Updates of several dtypes travel apart. Cases of seed 0 are compared with other layouts'.
        if self.layout in (*REDUCED, *SHARDED) and self.seed:
            model.blocks[1].float()
        return model

    def splits(self) -> dict[str, Any]:
        """One after the other, or alternating where the layouts allow it."""
        is_woven = not {*self.layouts} & {*DEDICATED} and self.seed % 2
        return {
            f"blocks.{i}.proj.weight": f"interleaved:{piece.count}"
            if is_woven and piece.count > 1
            else (piece.rows,) * piece.count
            for i, piece in enumerate(self.pieces)
            if piece.kind == "fused" and min(piece.shape) > 1
        }

    def settings(self) -> dict[str, Any]:
        """Hyperparameters, those of the reference too."""
        found = {"lr": LR, "adamw_lr": LR / 10, "adamw_eps": 1e-3, **_RULES[self.rule]}
        found |= {"ns_dtype": getattr(torch, self.ns_dtype), "adjust_lr_fn": self.adjust}
        found |= {"momentum_dtype": self.momentum_dtype, "cautious_weight_decay": self.cautious}
        return found | {"variant": Damped(0.7) if self.variant == "damped" else self.variant}

    def of_groups(self) -> list[dict[str, Any]]:
        """What each param group says of its own."""
        return [{}, {**_SECOND, "lr": LR / 2, "adamw_lr": LR / 20}][: self.groups]

    def rate(self, step: int, group: int) -> float:
        return LR / (1 + step) if not group else LR / 2 * (1 - 0.1 * step)

    def planning(self, name: str) -> dict[str, Any]:
        """Arguments of `dedicate_params`."""
        kind, options = kind_of(name), dict(LAYOUTS[name].own).get("options", None)
        changes: dict[str, Any] = {}
        if name in DEDICATED:
            changes = {"prefetch": self.prefetch, "free_after_forward": not self.kept}
        elif self.buckets != "usual":
            changes["bucket_bytes"] = 512 if self.buckets == "small" else 1 << 24
            if kind is dmuon.ReplicatedOptions:
                changes["publish_bucket_bytes"] = changes["bucket_bytes"]
            else:
                changes["min_buckets"] = 3 if self.buckets == "small" else 1
        if self.reduce_dtype:
            changes["reduce_dtype"] = getattr(torch, self.reduce_dtype)
        each = {"ddp2": 1, "ddp4": 2 if self.redundancy != 4 else 1, "hsdp": 2}.get(name)
        redundancy = self.redundancy if is_legal(name, "redundancy", self.redundancy) else "auto"
        kernels = dmuon.KernelOptions()
        if self.fixed_kernels:
            kernels = dmuon.KernelOptions(method=self.fixed_kernels, backend="torch")
        return {
            "splits": self.splits(),
            "costs": "analytic",
            "options": replace(options or kind(), **changes),
            "solver": self.solver if redundancy == "auto" else "auto",
            "kernels": kernels,
            "planner": dmuon.PlannerOptions(
                max_batch=self.max_batch, redundancy=redundancy, ranks_per_node=each
            ),
        }

    # -- gradients

    def used(self, step: int, i: int) -> int:
        """Of how many of the samples a piece has a gradient."""
        if i >= max(1, len(self.pieces) - 2):
            if self.gradients == "missing on some ranks" and step != 1:
                return 1
            if self.gradients == "missing everywhere" and step % 2:
                return 0
            if self.gradients == "missing at first" and step == 0:
                return 0
        return SAMPLES

    def is_bad(self, step: int) -> bool:
        return self.gradients in ("not finite", "scaled") and step == 1

    def is_frozen(self, step: int, i: int) -> bool:
        if self.gradients not in _LATE or step >= SAVE_AT or not i:
            return False
        is_vector = self.pieces[i].kind in ("vector", "embedding")
        return is_vector == (self.gradients == "late vector")

    def inputs(self, step: int, part: int, rank: int, ranks: int, *, name: str) -> Inputs:
        """A rank's samples. Where a framework reduces, every rank runs what any rank runs."""
        found: Inputs = {}
        for i, piece in enumerate(self.pieces):
            mine = slice(rank, None, ranks)
            if name == "ep+fsdp" and piece.is_expert_parallel:
                mine = slice(rank // 2, None, 2)  # of both ranks that share the experts
            x, t = data(piece, 1000 * self.seed + 100 * step + i)
            used = torch.arange(SAMPLES) < self.used(step, i)
            if used.any() if name not in FREE or not i else used[mine].any():
                t = t * used.view(-1, *[1] * (t.ndim - 1))
                if self.gradients == "zero" and i >= max(1, len(self.pieces) - 2):
                    t = t * 0
                if self.gradients == "not finite" and self.is_bad(step) and not i:
                    t[0] = math.inf  # on the rank that has the first sample
                found[i] = x[mine][part :: self.parts], t[mine][part :: self.parts]
        return found


# ---- drawing -----------------------------------------------------------------------------

SIZES = (*range(1, 13), 16, 21, 48, 129)


def _pieces(dice: random.Random) -> tuple[Piece, ...]:
    """A projection first, so that there is something for Muon to do."""

    def size() -> int:
        return dice.choice(SIZES)

    rows, cols = size() + 1, size() + 1
    some = Piece("linear", rows, cols), Piece("linear", cols, rows)  # which may share a batch
    kinds = dice.sample(KINDS, dice.randint(1, 4))
    return (*some, *(Piece(kind, size(), size(), dice.randint(1, 4)) for kind in kinds))


def _others(layout: str, case: Case) -> list[str]:
    """Layouts that go on from a checkpoint of this one."""
    near = SHARDED if case.period > 1 else [*LAYOUTS]
    # Ranks that leave pieces out are for layouts that let them.
    return [n for n in near if replace(case, other=n).is_consistent and n != layout]


Choices = tuple[tuple[str, Any], ...]  # options with a value each
# Where the host cannot read, these are computed by other code.
ON_BOTH_HOSTS = ("momentum_dtype", "masters")


def legal(layouts: tuple[str, ...]) -> set[Choices]:
    """What some case must choose: each value of each option that any of these layouts knows."""
    each = [(option, value) for option, values in OPTIONS.items() for value in values]
    each = [one for one in each if any(is_legal(name, *one) for name in layouts)]
    hosts = [one for one in each if one[0] == "host"]
    pairs = {(host, one) for host in hosts for one in each if one[0] in ON_BOTH_HOSTS}
    return pairs | {(one,) for one in each}


def has(case: Case, choices: Choices) -> bool:
    return all(getattr(case, option) == value for option, value in choices)


def covering(layouts: tuple[str, ...], seed: int = 0) -> list[Case]:
    """Cases in which layouts of one kind, in turn, meet each value of each option they know."""
    dice = random.Random(f"{layouts[0]} {seed}")
    todo = legal(layouts)
    found: list[Case] = []
    while todo:
        layout = layouts[len(found) % len(layouts)]
        case = Case(layout, _pieces(dice), seed=dice.randrange(100))
        if any(option == "gradients" for choices in todo for option, _ in choices):
            # Gradients may be missing or late: of a vector, and of a matrix in a batch.
            same = Piece("linear", 4, 6)
            case = replace(case, pieces=(*case.pieces, *[same] * 3, Piece("vector", 5, 1), same))
        wanted = sorted(todo, key=str)
        dice.shuffle(wanted)
        for choices in wanted:
            more, known = case.with_(**dict(choices)), dict(case.chosen)
            if all(known.get(o) in (None, v) for o, v in choices) and more.is_consistent:
                case = more
        for option, values in OPTIONS.items():  # what is covered already meets the others again
            more = case.with_(**{option: dice.choice(values)})
            if dict(case.chosen).get(option) is None and dice.random() < 0.3 and more.is_consistent:
                case = more
        if case.then:
            # In turn, so that each layout goes on from some checkpoint.
            others, turns = _others(layout, case), sum(bool(c.then) for c in found)
            start = (2 * [*LAYOUTS].index(layouts[0]) + 15 * turns + seed) % len(LAYOUTS)
            other = next((name for name in ([*LAYOUTS] * 2)[start:] if name in others), "")
            case = replace(case, other=other) if other else case.with_(then="")
        before = len(todo)
        todo -= {choices for choices in todo if has(case, choices)}
        assert len(todo) < before or len(found) < 100, f"{layouts} never meet {todo}"
        found.append(case)
    return found


def simplest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The simplest case near this one that fails too."""
    while (near := next(filter(fails, _simpler(case)), None)) is not None:
        case = near
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for option, _ in case.chosen:
        yield case.with_(**{option: OPTIONS[option][0]})
    for i, piece in enumerate(case.pieces):
        if i:
            yield replace(case, pieces=case.pieces[:i] + case.pieces[i + 1 :])
        for field in ("rows", "cols", "count"):
            if (size := getattr(piece, field)) > (least := 1 + (not i and field != "count")):
                less = replace(piece, **{field: max(least, size // 2)})
                yield replace(case, pieces=(*case.pieces[:i], less, *case.pieces[i + 1 :]))


# ---- one process, undisturbed ------------------------------------------------------------


class BlockReference(ReferenceMuon):
    """MuonBP in one process: in a block step each rank's part of a matrix is a matrix of its own.

    ``holders``: for each parameter a tensor of its shape with the number of the rank that holds
    the element; one of several replicas. A matrix that one rank holds always takes full steps.
    """

    def __init__(
        self,
        model: nn.Module,
        holders: Mapping[Tensor, Tensor],
        period: Any = 1,
        block_lr_ratio: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        self.schedule, self.holders, self.ratio = Schedule(period), holders, block_lr_ratio or 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        full = self.schedule.is_full(self.schedule.t)
        self.schedule.advance()
        return super().step() if full else self.step_in_blocks()

    @torch.no_grad()
    def step_in_blocks(self) -> None:
        orthogonalize = self._orthogonalize
        for p, views in self._views.items():
            if p.grad is None:
                continue
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            for view in views:
                ranks = view(self.holders[p])
                numbers = ranks.unique().tolist()
                ratio = self.ratio if len(numbers) > 1 else 1.0
                self._orthogonalize = lambda x, ratio=ratio: orthogonalize(x) * ratio
                for number in numbers:
                    box = _box(ranks == number)
                    blocks = (view(t)[box] for t in (p, p.grad, buffer))
                    self._update(*blocks, self.param_groups[0], {})
        self._orthogonalize = orthogonalize
        if self.adamw is not None:
            self.adamw.step()


def _box(mask: Tensor) -> tuple[slice, ...]:
    """Where it is true: a rectangle."""
    places = mask.nonzero()
    ends = zip(places.amin(0).tolist(), places.amax(0).tolist(), strict=True)
    box = tuple(slice(first, last + 1) for first, last in ends)
    assert bool(mask[box].all()), "a rank's part of a matrix is no rectangle"
    return box


def _holders(case: Case, model: Model, name: str) -> dict[Tensor, Tensor]:
    """For `BlockReference`: which rank of a layout holds what."""
    found = {}
    for i, piece in enumerate(case.pieces):
        for p in model.blocks[i].parameters():
            found[p] = torch.zeros(p.shape)
            for number, box in enumerate(boxes(piece, i, name) if p.ndim > 1 else ()):
                found[p][tuple(slice(a, b) for a, b in box)] = number
    return found


def _oracles(case: Case, model: Model) -> list[BlockReference]:
    """One of each param group, of which a model has every other block."""
    block = {"period": case.period, "block_lr_ratio": 0.7 if case.period == 3 else None}
    found = []
    for number, said in enumerate(case.of_groups()):
        part = nn.Module()
        blocks = [*model.blocks.named_children()][number :: case.groups]
        part.blocks = nn.ModuleDict(dict(blocks))
        splits = {k: v for k, v in case.splits().items() if k.split(".")[1] in part.blocks}
        settings = case.settings() | said
        found.append(BlockReference(part, {}, **block, splits=splits, **settings))
    return found


def expected_of(case: Case) -> dict[str, Any]:
    """Losses, and at the end weights and state by name."""
    model = case.model().float()
    oracles = _oracles(case, model)
    losses, start = [], {n: p.detach().clone() for n, p in model.named_parameters()}
    norm = 0.0
    for step in range(STEPS):
        for number, oracle in enumerate(oracles):
            if case.period > 1:
                name = case.layout if step < SAVE_AT or not case.then else case.other
                oracle.holders = _holders(case, model, name)
            oracle.param_groups[0]["lr"] = lr = case.rate(step, number)
            if oracle.adamw is not None:
                oracle.adamw.param_groups[0]["lr"] = lr / 10
        parts = [case.inputs(step, k, 0, 1, name="ddp2") for k in range(case.parts)]
        loss = torch.stack([model(inputs, 1 / 8) for inputs in parts]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        for i, block in enumerate(model.blocks):
            for p in block.parameters() if case.is_frozen(step, i) else ():
                p.grad = None
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        norm = float(
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
        for oracle in oracles:
            oracle.schedule.advance() if case.is_bad(step) else oracle.step()
            oracle.zero_grad()
    state: dict[Tensor, Any] = {}
    for oracle in oracles:
        state |= {**oracle.state, **(oracle.adamw.state if oracle.adamw is not None else {})}
    return {
        "losses": losses,
        "grad_norm": norm,  # of the last step
        "start": start,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "state": {n: state[p] for n, p in model.named_parameters() if state.get(p)},
    }


# ---- in a layout -------------------------------------------------------------------------


class Training(Trained):
    def __init__(self, case: Case, name: str) -> None:
        self.case, self.name = case, name
        only = {"master_weights": case.masters}
        if case.period > 1:
            only |= {"period": case.period, "block_lr_ratio": 0.7 if case.period == 3 else None}
        laid = LAYOUTS[name]

        def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            wrapped = laid.wrap(model, mesh)
            self._freeze(model, 0)  # DDP reduces what it has seen unfrozen
            return wrapped

        super().__init__(
            replace(laid, wrap=wrap), case.model(), planning=case.planning(name),
            groups=self._groups if case.groups > 1 else None,
            verify_every=case.verify, **case.settings(), **only,
        )  # fmt: skip

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named, count = list(model.named_parameters()), self.case.groups
        return [
            {"params": [e for e in named if int(e[0].split(".")[1]) % count == n], **said}
            for n, said in enumerate(self.case.of_groups())
        ]

    def _freeze(self, model: Any, step: int) -> None:
        for i, block in enumerate(model.blocks):
            block.requires_grad_(not self.case.is_frozen(step, i))

    def backward(self, step: int) -> float:
        """Of all parts; this rank's loss."""
        case, total = self.case, 0.0
        scaled = 8.0 if case.gradients == "scaled" else 1.0
        for part in range(case.parts):
            inputs = case.inputs(step, part, self.rank, self.ranks, name=self.name)
            # What is already a mean of three ranks is no whole number of thirds.
            waits = (case.no_sync or self.ranks == 3 or case.masters) and part < case.parts - 1
            with dmuon.no_sync(self.model) if waits else nullcontext():
                if inputs:
                    loss = self.model(inputs, scaled * self.ranks / 8)
                    loss.backward()
                    total += float(loss.detach()) / self.ranks / scaled
        if case.gradients == "scaled":
            self.opt.grad_scale = torch.tensor(scaled)
            self.opt.found_inf = torch.tensor(float(case.is_bad(step)))
        return total

    def train(self, steps: range) -> list[float]:
        case, losses = self.case, []
        quiet = case.host == "reads" or case.gradients not in OPTIONS["gradients"][:5]
        # A rank without a backward learns in `step` what the others send.
        quiet = quiet or (self.name in FREE and case.gradients != "all") or case.verify
        for step in steps:
            if case.gradients in _LATE:
                self._freeze(self.bare, step)
            losses.append(self.backward(step))
            if case.clip:
                dmuon.clip_grad_norm_(self.model, case.clip)
            for number, group in enumerate(self.opt.param_groups):
                group["lr"] = case.rate(step, number) / (10 if "betas" in group else 1)
            with nullcontext() if quiet or step == steps[0] else nothing_read():
                self.opt.step()
            self.opt.grad_scale = self.opt.found_inf = None
            self.opt.zero_grad()
        return losses

    def load_from(self, folder: str, file: bytes) -> None:
        if not file:
            self.load(folder)
            return
        state, from_first = unpacked(file), self.case.then == "rank 0"
        if from_first and torch.distributed.get_rank():
            state = {"model": {}, "optim": {}}
        self.put(state, full_state_dict=True, broadcast_from_rank0=from_first)


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


Result = tuple[list[float], bytes, dict[str, Any]]


def copies(name: str) -> int:
    """How many ranks have the same data: those of tensor parallelism. What it does not cut they
    compute in batches of their own, which may round otherwise in the last bit."""
    return dict(zip(LAYOUTS[name].axes, LAYOUTS[name].mesh or ())).get("tp", 1)


def half(
    rank: int, world: int, work: list[tuple[Case, str]], saved: list[bytes] | None = None
) -> list[Result]:
    """Train each case up to its save or its end, or load what was ``saved`` and train on. Beside a
    case is the folder of its checkpoint. The result: this rank's losses, the state (on other ranks
    than the first its hash, unless they have `copies`), and some of `stats`."""
    warnings.simplefilter("ignore")
    found = []
    for number, (case, folder) in enumerate(work):
        with host_cannot_read() if case.host != "reads" else nullcontext():
            training, state = Training(case, case.layout if saved is None else case.other), b""
            if saved is not None:
                training.load_from(folder, saved[number])
            first = range(SAVE_AT if case.then else STEPS)
            losses = training.train(first if saved is None else range(SAVE_AT, STEPS))
            if saved is None and case.then == "dcp":
                training.save(folder)
            else:
                state = packed(training.whole())
            told = {key: training.opt.stats()[key] for key in ("skipped", "finite")}
            if case.host == "reads":
                told |= {k: v for k, v in training.opt.metrics().items() if k == "grad_norm"}
            training.close()
        is_whole = rank == 0 or copies(case.layout if saved is None else case.other) > 1
        found.append((losses, state if is_whole else hashlib.sha256(state).digest(), told))
    return found
