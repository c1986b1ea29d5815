"""Models, layouts and checkpoints that nobody thought of: drawn by hypothesis, beside an oracle.

Each example trains a small model in one layout, saves it, loads it into another layout and trains
on; weights and state must be those of one process that was never disturbed. Sixty of them in
`make test`; for thousands::

    pytest tests/distributed/test_properties.py --hypothesis-profile=long --timeout=0

Gradients are sums of small whole numbers, exact in every dtype and order of summation. So what
differs is dmuon's doing, however many ranks there are and however matrices amplify rounding.
"""

from __future__ import annotations

import hashlib
import io
import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.tools.parallel_models import _shard
from tests.distributed.harness import Pools
from tests.distributed.layouts import Layout, in_ddp, on
from tests.distributed.twins import BlockReference, Trained

SAMPLES = 12  # of all ranks in a step: as many for each of 1, 2, 3 and 4
TOLERANCE = 1e-6
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
        """Of its weight."""
        return {
            "fused": (self.count * self.rows, self.cols),
            "experts": (self.count, self.rows, self.cols),
            "conv": (self.rows, self.cols, 3),
            "vector": (self.rows,),
        }.get(self.kind, (self.rows, self.cols))


class Layer(nn.Module):
    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.kind = piece.kind
        if piece.kind in ("linear", "biased", "fused"):
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
            return torch.einsum("emn,sen->sem", self.weight, x.to(self.weight.dtype))
        if self.kind == "vector":
            return self.weight * x.to(self.weight.dtype)
        if self.kind == "embedding":
            return self.tok(x)
        if self.kind == "conv":
            return self.conv(x.to(self.conv.weight.dtype))[..., 1].clone()
        return self.proj(x.to(self.proj.weight.dtype))


class Model(nn.Module):
    """Layers side by side. Those that ``runs`` does not name have no gradient."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(piece) for piece in pieces)

    def forward(self, inputs: dict[int, tuple[Tensor, Tensor]], factor: float) -> Tensor:
        losses = [(self.blocks[i](x).float() * t).sum() for i, (x, t) in inputs.items()]
        return torch.stack(losses).sum() * factor


def data(piece: Piece, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and what outputs are multiplied with: -1, 0 or 1."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    draw = lambda *shape: torch.randint(-1, 2, (SAMPLES, *shape), generator=generator).float()  # noqa: E731
    rows, cols, count = piece.rows, piece.cols, piece.count
    if piece.kind == "embedding":
        tokens = torch.randint(0, rows, (SAMPLES,), generator=generator)
        return tokens, draw(cols)
    if piece.kind == "experts":
        return draw(count, cols), draw(count, rows)
    if piece.kind == "vector":
        return draw(rows), draw(rows)
    if piece.kind == "conv":
        return draw(cols, 3), draw(rows)
    return draw(cols), draw(piece.shape[0])


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
    return _shard(model, mesh) if mesh.ndim > 1 else model


LAYOUTS = {
    "single": on("plain", 1),
    **{f"fsdp{n}": on("fsdp2", n) for n in (2, 3, 4)},
    **{f"ddp{n}": on("ddp", n) for n in (2, 3)},
    **{f"reduce_to_owner{n}": on("reduced", n) for n in (2, 3)},
    "reduce_to_owner ddp": on("reduced ddp", 2),
    **{f"dedicated{n}": on("dedicated", n) for n in (2, 3)},
    "dedicated fsdp": on("dedicated fsdp", 2),
    "tp": Layout((2,), ("tp",), wrap=_tensor_parallel),
    "hsdp": on("fsdp2", 2, 2),
    "dedicated hsdp": on("dedicated", 2, 2),
    "tp+fsdp": Layout((2, 2), ("dp", "tp"), wrap=_tensor_parallel),
}
SHARDED = [name for name in LAYOUTS if name.startswith(("fsdp", "hsdp", "tp"))]


def chunks(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """As `torch.chunk` cuts a dim, empty ones left out."""
    size = -(-(last - first) // parts)
    return [(a, min(a + size, last)) for a in range(first, last, size)]


def boxes(piece: Piece, number: int, name: str) -> list[tuple[tuple[int, int], ...]]:
    """The parts of a weight that ranks of a sharded layout hold, each once: a range in each dim."""
    case = LAYOUTS[name]
    found: list[tuple[tuple[int, int], ...]] = [tuple((0, size) for size in piece.shape)]
    for axis, parts in reversed([*zip(case.axes, case.mesh)]):  # "tp" first
        dim = 0
        if axis == "tp":
            dim = number % 2
            is_projection = piece.kind in ("linear", "biased", "fused")
            if not is_projection or not _is_parallel(piece.shape, number, case.axes):
                continue
        if axis != "replicate":
            cut = [(box, part) for box in found for part in chunks(*box[dim], parts)]
            found = [(*box[:dim], part, *box[dim + 1 :]) for box, part in cut]
    return found


# ---- examples ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """What is trained, and how. ``uses``: by step and piece, of how many of the samples it has a
    gradient; ``save``: after how many steps; ``parts``: backward passes of a step."""

    pieces: tuple[Piece, ...]
    first: str
    then: str
    uses: tuple[tuple[int, ...], ...]
    save: int
    door: str = "dcp"
    parts: int = 1
    no_sync: bool = False
    half: bool = False
    publish: str = "sync"
    period: int = 1
    ratio: float | None = None
    muon: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(self.pieces).to(torch.bfloat16 if self.half else torch.float32)

    def splits(self) -> dict[str, tuple[int, ...]]:
        return {
            f"blocks.{i}.proj.weight": (piece.rows,) * piece.count
            for i, piece in enumerate(self.pieces)
            if piece.kind == "fused" and min(piece.shape) > 1
        }

    def settings(self) -> dict[str, Any]:
        """Those that are also the reference's."""
        known = {"lr": LR, "adamw_lr": LR / 10, "adamw_eps": 1e-3, "ns_dtype": torch.float32}
        return known | dict(self.muon)

    def inputs(
        self, step: int, part: int, rank: int, ranks: int, *, alike: bool
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """A rank's samples; ``alike``: every rank runs the pieces that any rank runs."""
        found = {}
        mine = slice(rank, None, ranks)
        for i, piece in enumerate(self.pieces):
            x, t = data(piece, 1000 * self.seed + 100 * step + i)
            used = torch.arange(SAMPLES) < self.uses[step][i]
            # Whoever reduces gradients counts on a backward of every rank: the first piece has one.
            if used.any() if alike or not i else used[mine].any():
                t = t * used.view(-1, *[1] * (t.ndim - 1))
                found[i] = x[mine][part :: self.parts], t[mine][part :: self.parts]
        return found


# Fewer of those that cost most: 0.1 s on two ranks, 0.3 s on four.
_OF = {n: [name for name, case in LAYOUTS.items() if case.world == n] for n in (1, 2, 3, 4)}
layouts = st.sampled_from([1, 1, 2, 2, 2, 2, 2, 2, 2, 4, 3]).flatmap(
    lambda world: st.sampled_from(_OF[world])
)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    size = st.integers(1, 12) | st.sampled_from([1, 2, 3, 16, 21])
    piece = st.builds(Piece, st.sampled_from(KINDS), size, size, st.integers(1, 4))
    pieces = draw(st.lists(piece, max_size=4))
    pieces.insert(0, Piece("linear", draw(size) + 1, draw(size) + 1))  # something for Muon to do
    first, then = draw(layouts), draw(layouts)
    save = draw(st.integers(1, 2))
    steps = save + draw(st.integers(1, 2))
    use = st.sampled_from([SAMPLES, SAMPLES, SAMPLES, 1, 0])
    of_pieces = st.tuples(st.sampled_from([SAMPLES, 1]), *[use] * (len(pieces) - 1))
    period, ratio = 1, None
    if first in SHARDED and then in SHARDED:
        period = draw(st.integers(1, 3))
        ratio = draw(st.sampled_from([None, 0.5])) if period > 1 else None
    mode = draw(st.sampled_from(["ema", "sgd"]))
    muon = {
        "momentum_mode": mode,
        "nesterov": draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.95, 0.5, 0.0])),
        "adjust_lr_fn": draw(st.sampled_from(["match_rms_adamw", "original"])),
    }
    if mode == "sgd" and not muon["nesterov"]:
        muon["dampening"] = draw(st.sampled_from([0.0, 0.25]))
    half, parts = draw(st.booleans()), draw(st.integers(1, 2))
    return Example(
        tuple(pieces),
        first,
        then,
        tuple(draw(of_pieces) for _ in range(steps)),
        save,
        draw(st.sampled_from(["dcp", "full", "rank 0"])),
        parts,
        # What is already a mean of three ranks is no whole number of thirds.
        draw(st.booleans()) or half,
        half,
        draw(st.sampled_from(["sync", "async"])),
        period,
        ratio,
        tuple(muon.items()),
        draw(st.integers(0, 99)),
    )


# ---- one process, undisturbed ------------------------------------------------------------


def holders(example: Example, model: Model, name: str) -> dict[Tensor, Tensor]:
    """Of `BlockReference`: which rank of a layout holds what."""
    found = {}
    for i, piece in enumerate(example.pieces):
        p = next(model.blocks[i].parameters())
        found[p] = torch.zeros(p.shape)
        for number, box in enumerate(boxes(piece, i, name)):
            found[p][tuple(slice(a, b) for a, b in box)] = number
    return found


def expected_of(example: Example) -> dict[str, Any]:
    """Losses, and at the end weights and state by name."""
    model = example.model().float()
    block = {"period": example.period, "block_lr_ratio": example.ratio}
    oracle = BlockReference(model, {}, **block, splits=example.splits(), **example.settings())
    losses = []
    for step in range(len(example.uses)):
        if example.period > 1:
            name = example.first if step < example.save else example.then
            oracle.holders = holders(example, model, name)
        oracle.param_groups[0]["lr"] = lr = LR / (1 + step)
        if oracle.adamw is not None:
            oracle.adamw.param_groups[0]["lr"] = lr / 10
        parts = [example.inputs(step, k, 0, 1, alike=True) for k in range(example.parts)]
        loss = torch.stack([model(inputs, 1 / 8) for inputs in parts]).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        oracle.step()
        oracle.zero_grad()
    state = {**oracle.state, **(oracle.adamw.state if oracle.adamw is not None else {})}
    return {
        "losses": losses,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "state": {n: state[p] for n, p in model.named_parameters() if state.get(p)},
    }


# ---- in a layout -------------------------------------------------------------------------


class Training(Trained):
    def __init__(self, example: Example, name: str) -> None:
        self.example, laid = example, LAYOUTS[name]
        super().__init__(
            laid,
            example.model(),
            planning={"splits": example.splits(), "costs": "analytic"},
            **example.settings(),
            period=example.period,
            block_lr_ratio=example.ratio,
            publish=example.publish,
            master_weights=example.half,
        )
        # FSDP2 and DistributedDataParallel have all ranks run the same layers.
        self.alike = not laid.own or laid.shard_rest or laid.wrap is in_ddp

    def train(self, steps: range) -> list[float]:
        example, losses = self.example, []
        for step in steps:
            total = 0.0
            for part in range(example.parts):
                inputs = example.inputs(step, part, self.rank, self.ranks, alike=self.alike)
                last = part == example.parts - 1
                waits = example.no_sync and not last
                with dmuon.no_sync(self.model) if waits else nullcontext():
                    if inputs:
                        loss = self.model(inputs, self.ranks / 8)
                        loss.backward()
                        total += float(loss.detach()) / self.ranks
            for group in self.opt.param_groups:
                group["lr"] = LR / (1 + step)
                if "betas" in group:
                    group["lr"] /= 10
            self.opt.step()
            self.opt.zero_grad()
            losses.append(total)
        return losses

    def load_from(self, folder: str, file: bytes) -> None:
        if not file:
            self.load(folder)
            return
        state, from_first = unpacked(file), self.example.door == "rank 0"
        if from_first and torch.distributed.get_rank():
            state = {"model": {}, "optim": {}}
        self.put(state, full_state_dict=True, broadcast_from_rank0=from_first)


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


def run(
    rank: int, world: int, example: Example, folder: str, file: bytes | None = None
) -> tuple[list[float], bytes]:
    """Train up to the save, or load and train on; this rank's losses, and rank 0's state."""
    training, state = Training(example, example.first if file is None else example.then), b""
    if file is None:
        losses = training.train(range(example.save))
        if example.door == "dcp":
            training.save(folder)
        else:
            state = packed(training.whole())
    else:
        training.load_from(folder, file)
        losses = training.train(range(example.save, len(example.uses)))
        state = packed(training.whole())
    training.close()
    return losses, state if rank == 0 else hashlib.sha256(state).digest()


# ---- the property ------------------------------------------------------------------------


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0


def check(example: Example, pools: Pools) -> None:
    expected, arguments = expected_of(example), {"example": example}
    worlds = [LAYOUTS[name].world for name in (example.first, example.then)]
    with tempfile.TemporaryDirectory() as arguments["folder"]:
        before = pools(worlds[0]).run(__name__, "run", arguments)
        after = pools(worlds[1]).run(__name__, "run", arguments | {"file": before[0][1]})
    assert {state for _, state in after[1:]} <= {hashlib.sha256(after[0][1]).digest()}
    losses = [
        sum(each) / copies(name)
        for found, name in ((before, example.first), (after, example.then))
        for each in zip(*(losses for losses, _ in found))
    ]
    # bfloat16 outputs of a forward pass are not exact.
    tolerances = (2e-2, 0.5) if example.half else (1e-5, 1e-4)
    for one, other in zip(losses, expected["losses"], strict=True):
        assert math.isclose(one, other, rel_tol=tolerances[0], abs_tol=tolerances[1]), losses
    found = unpacked(after[0][1])
    weights, state = found["model"], found["optim"]["state"]
    for name, weight in expected["weights"].items():
        mine = state.get(name, {})
        now = mine.get("master_weight", weights[name])
        rounded = example.half and "master_weight" not in mine
        allowed = 2**-8 * float(weight.abs().max()) if rounded else TOLERANCE
        assert off(now, weight) <= allowed, (name, off(now, weight))
        if "master_weight" in mine:
            assert torch.equal(weights[name], now.to(torch.bfloat16)), name
        for key, value in expected["state"].get(name, {}).items():
            value = torch.as_tensor(value)
            allowed = TOLERANCE * max(1.0, float(value.abs().max()))
            assert off(mine[key], value) <= allowed, (name, key)
    groups = found["optim"]["param_groups"]
    assert all(g.get("muon_step", len(example.uses)) == len(example.uses) for g in groups)


def copies(name: str) -> int:
    """How many ranks have the same data."""
    return dict(zip(LAYOUTS[name].axes, LAYOUTS[name].mesh)).get("tp", 1)


@given(example=examples())
@settings(
    max_examples=settings.default.max_examples * 3 // 5,  # each takes a third of a second
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_model_goes_on_in_any_layout(pools: Pools, example: Example) -> None:
    check(example, pools)
