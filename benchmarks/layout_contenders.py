"""The models of `benchmarks.layouts`, in every layout, with dmuon and with AdamW."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from benchmarks.baselines.contenders import HYPERPARAMETERS, LAYERS, SETS
from benchmarks.layout_theory import Matrices, dedicated, fsdp, received, replicated, sharded
from benchmarks.replicated import Stack
from dmuon.api import assemble
from dmuon.comm.transport import C10dTransport, RecordingTransport, Transport
from dmuon.config import DedicatedOptions, PlannerOptions
from dmuon.dtensors import local_tensor
from dmuon.meshes import group_maker, mesh_topology

# The examples are scripts side by side, no package.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from _gpt import GPT, GPTConfig  # type: ignore[import-not-found]
from _text import load_standard_library  # type: ignore[import-not-found]
from train_gpt import SEQUENCES, next_byte_loss  # type: ignore[import-not-found]

Batch = tuple[Tensor, Tensor]
WIDTH = SETS["first"][0][0]
TIMEOUT_S = 300.0


# ---- models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model and its data; ``blocks`` are what users pass to `fully_shard`."""

    name: str
    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[int, int], Batch]  # of (step, rank)
    loss: Callable[[nn.Module, Batch], Tensor]
    rounds: int


def demo() -> Workload:
    """The model, the text and the loss of ``examples/train_gpt.py``."""
    config, text = GPTConfig(), load_standard_library()

    def batch(step: int, rank: int) -> Batch:
        size = {"sequences": SEQUENCES, "context": config.context}
        windows: Batch = text.training_batch(step, rank, seed=0, **size)
        return windows

    return Workload(
        "demo GPT",
        lambda: GPT(config),
        lambda model: list(model.blocks),  # type: ignore[arg-type]
        batch,
        lambda model, given: next_byte_loss(model, *given),
        rounds=21,
    )


def eight_layers() -> Workload:
    """The set `first` of `benchmarks.step_time`, with norms, on as many tokens as the demo's."""

    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(7919 * step + rank)
        x = torch.randn(2, SEQUENCES, GPTConfig().context, WIDTH, generator=generator)
        return x[0], x[1]

    return Workload(
        f"{LAYERS} layers, w={WIDTH}",
        lambda: Stack(LAYERS, WIDTH),
        lambda model: list(model.layers),  # type: ignore[arg-type]
        batch,
        lambda model, given: (model(given[0]) - given[1]).square().mean(),
        rounds=13,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"demo": demo, "first": eight_layers}


# ---- counting ------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What all transports of one ownership have carried."""

    lanes: list[RecordingTransport] = field(default_factory=list)

    def record(self, transport: Transport) -> Any:
        recording = RecordingTransport(transport)
        self.lanes.append(recording)
        return recording

    def clear(self) -> None:
        for lane in self.lanes:
            lane.events.clear()

    def by_purpose(self, purposes: Sequence[str]) -> dict[str, float]:
        """Bytes received since `clear`, mean over ranks; what is none of ``purposes`` is "rest".

        A tag is a purpose, or a purpose and the name of a group of modules.
        """
        mine: dict[str, float] = defaultdict(float)
        for lane in self.lanes:
            for event in lane.events:
                first = event.tag.split(" ")[0]
                known = [p for p in (event.tag, first) if p in purposes]
                mine[known[0] if known else "rest"] += received(event.op, event.nbytes, lane.world)
        names = [*purposes, "rest"]
        means = torch.tensor([float(mine[name]) for name in names], dtype=torch.float64)
        dist.all_reduce(means)
        return dict(zip(names, means.div_(dist.get_world_size()).tolist(), strict=True))


# ---- contenders ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way to train: who keeps the matrices, who the rest, on how many replicas.

    ``around``: "FSDP2" or "DDP", what distributes the rest and all of the AdamW model; dmuon itself
    takes DDP's part in plain models.
    """

    optimizer: str
    layout: str
    around: str
    replicas: int = 1
    freed: bool | None = None

    @property
    def baseline(self) -> Kind:
        """AdamW on the same model."""
        layout = "sharded" if self.around == "FSDP2" else "replicated"
        return Kind("AdamW", layout, self.around, self.replicas)

    def mesh_shape(self, world: int) -> tuple[int, ...]:
        return (world,) if self.replicas == 1 else (self.replicas, world // self.replicas)

    def label(self, world: int) -> str:
        words = [self.layout]
        if self.freed is not None:
            words.append("freed" if self.freed else "kept")
        if self.optimizer == "AdamW":
            words = ["AdamW"]
        rest = {"FSDP2": "FSDP2", "DDP": "DDP" if self.optimizer == "AdamW" else "plain"}
        words.append(rest[self.around])
        if self.replicas > 1:
            words[-1] = "HSDP " + "x".join(map(str, self.mesh_shape(world)))
        return ", ".join(words)

    def theory(self, matrices: Matrices, world: int) -> dict[str, float]:
        """What dmuon should move for matrices."""
        shards = world // self.replicas
        if self.layout == "dedicated":
            return dedicated(matrices, shards, self.replicas, freed=bool(self.freed))
        if self.layout == "sharded":
            return sharded(matrices, shards, self.replicas)
        return replicated(matrices, world)

    def by_framework(self, matrices: Matrices, world: int) -> float:
        """What FSDP2 moves for matrices, by formula: it is not counted."""
        if self.layout != "sharded":
            return 0.0
        return sum(fsdp(matrices, world // self.replicas, self.replicas).values())


def kinds(world: int) -> list[Kind]:
    """All of them; those on two replicas where there are ranks for it."""
    found = [
        Kind("AdamW", "replicated", "DDP"),
        Kind("AdamW", "sharded", "FSDP2"),
        Kind("dmuon", "replicated", "DDP"),
        Kind("dmuon", "sharded", "FSDP2"),
        Kind("dmuon", "dedicated", "FSDP2", freed=True),
        Kind("dmuon", "dedicated", "FSDP2", freed=False),
        Kind("dmuon", "dedicated", "DDP", freed=True),
        Kind("dmuon", "dedicated", "DDP", freed=False),
    ]
    if world >= 4 and world % 2 == 0:
        found += [
            Kind("AdamW", "sharded", "FSDP2", replicas=2),
            Kind("dmuon", "sharded", "FSDP2", replicas=2),
            Kind("dmuon", "dedicated", "FSDP2", replicas=2, freed=True),
        ]
    return found


class Contender:
    """One kind on its own copy of the model, after `build`."""

    def __init__(self, kind: Kind, load: Workload) -> None:
        self.kind = kind
        self.load = load
        self.traffic = Traffic()
        self.own: dmuon.Ownership | None = None
        self.loss: Tensor | None = None
        self.opt: Any = None

    def build(self) -> None:
        kind, world = self.kind, dist.get_world_size()
        torch.manual_seed(0)
        self.model = self.load.build()
        axes = ("shard",) if kind.replicas == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", kind.mesh_shape(world), mesh_dim_names=axes)
        if kind.layout == "dedicated":  # before fully_shard, which leaves the matrices alone then
            self.own = self._dedicate(mesh)
        if kind.around == "FSDP2":
            self._fully_shard(mesh)
        elif kind.optimizer == "AdamW":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if kind.optimizer == "AdamW":
            self.opt = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPERPARAMETERS)
            return
        self.own = self.own or self._dedicate(mesh if kind.around == "FSDP2" else None)
        self.opt = dmuon.Muon(self.model, **HYPERPARAMETERS)

    def _dedicate(self, mesh: DeviceMesh | None) -> dmuon.Ownership:
        """`dmuon.dedicate_params` with its defaults, over transports that record."""
        world, kind = dist.get_world_size(), self.kind
        make = group_maker(mesh, world, TIMEOUT_S)
        return assemble(
            self.model,
            self.traffic.record(C10dTransport(range(world), TIMEOUT_S)),
            lambda: mesh_topology(mesh, world, self.model, PlannerOptions()),
            layout=kind.layout,
            options=None if kind.freed is None else DedicatedOptions(free_after_forward=kind.freed),
            new_group=lambda partition: self.traffic.record(make(partition)),
        )

    def _fully_shard(self, mesh: DeviceMesh) -> None:
        ignored = set() if self.own is None else self.own.dedicated_params
        for block in self.load.blocks(self.model):
            fully_shard(block, mesh=mesh, ignored_params=ignored)
        fully_shard(self.model, mesh=mesh, ignored_params=ignored)

    # ---- a step ----------------------------------------------------------------------------

    def forward(self, batch: Batch) -> None:
        self.loss = self.load.loss(self.model, batch)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    def whole_step(self, batch: Batch) -> None:
        """Forward, backward and step, with nothing left on its way."""
        self.forward(batch)
        self.backward()
        self.step()
        if self.own is not None:
            self.opt.synchronize()

    # ---- what is kept ----------------------------------------------------------------------

    def matrices(self) -> Matrices | None:
        """Bytes of the matrices: as they are kept, used and reduced, and as updates travel."""
        if self.own is None:
            return None
        specs = self.own.plan.specs
        numel = sum(m.numel for m in specs.matrices)
        kept = {getattr(torch, m.dtype).itemsize for m in specs.matrices}
        assert len(kept) == 1, "models of the benchmark have matrices of one dtype"
        updates = getattr(torch, self.opt.stats()["ns_dtype"]).itemsize
        return Matrices.of(numel, kept.pop(), updates=updates)

    def persistent_bytes(self) -> int:
        """Weights (placeholders too) and optimizer state on this rank, each storage once."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.opt.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        storages = {}
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def close(self) -> None:
        if self.own is not None:
            self.own.close()
