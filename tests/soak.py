"""Everything that users do around an optimizer, for thousands of steps, against one process.

::

    python -m tests.soak --seconds 600 --world 4       (make soak)

A run is a row of phases. Each trains in another layout than the one before, from the checkpoint
that that one left, beside a twin on everybody's data in one process: missing gradients,
accumulation, clipping, gradients that are not finite, other learning rates and periods, saves while
updates travel. At its end both must have the same weights; threads, file descriptors and memory
must not have grown since the first round through all layouts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dtensors import local_tensor
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.reference import ReferenceMuon
from dmuon.rule import adjusted_lr
from tests.distributed.models import Net, batch, loss_of
from tests.poison import Poison

STEPS = 40  # of a phase
TOLERANCE = 3e-5
WIDTHS = {"width": 16, "hidden": 22, "layers": 2}
ADAMW = 0.1  # its learning rate over Muon's


# ---- layouts ---------------------------------------------------------------------------------


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


@dataclass(frozen=True)
class Layout:
    wrap: Callable[[nn.Module, DeviceMesh], nn.Module] = lambda model, mesh: model
    own: dict[str, Any] | None = None
    replicas: bool = False  # on a mesh of two axes
    shards: bool = False  # so that there are block steps

    def mesh(self, world: int) -> DeviceMesh:
        return _mesh(world, self.replicas)


@cache
def _mesh(world: int, replicas: bool) -> DeviceMesh:
    """One of a kind: a mesh has process groups that nobody gives back."""
    shape, names = ((2, world // 2), ("replicate", "shard")) if replicas else ((world,), ("dp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


REDUCED = {"options": dmuon.ReplicatedOptions(reduce_to_owner=True)}
DEDICATED = {"layout": "dedicated"}
LAYOUTS = {
    "fsdp2": Layout(_fsdp, shards=True),
    "replicated": Layout(_ddp),
    "dedicated": Layout(own=DEDICATED),
    "reduce_to_owner": Layout(_ddp, own=REDUCED),
}
OF_FOUR = {
    "hsdp": Layout(_fsdp, replicas=True, shards=True),
    "dedicated hsdp": Layout(own=DEDICATED, replicas=True),
}


# ---- the twin --------------------------------------------------------------------------------


class Twin:
    """The same model in one process; ``rows`` are its ranks in block steps."""

    def __init__(self, model: dict[str, Tensor], optim: dict[str, Any], rows: int) -> None:
        self.model = Net(**WIDTHS)
        self.model.load_state_dict(model)
        self.ref = ReferenceMuon(self.model, lr=0.02, adamw_lr=0.02 * ADAMW, ns_dtype=torch.float32)
        self.rows = rows
        for name, p in self.model.named_parameters():
            entry = optim["state"].get(name, {})
            state = self.ref.state if "momentum_buffer" in entry else self.ref.adamw.state
            if entry:
                state[p] = {key: torch.as_tensor(v).clone() for key, v in entry.items()}

    @torch.no_grad()
    def step(self, lr: float, full: bool) -> None:
        self.ref.param_groups[0]["lr"] = lr
        self.ref.adamw.param_groups[0]["lr"] = lr * ADAMW
        if full:
            self.ref.step()
            return
        for p in self.ref._views:
            if p.grad is None:
                continue
            state = self.ref.state[p]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.lerp_(p.grad, 0.05)
            operand = p.grad.lerp(buffer, 0.95)
            for weight, block in zip(p.chunk(self.rows), operand.chunk(self.rows), strict=True):
                update = newton_schulz(block, dtype=torch.float32)
                rate = adjusted_lr(lr, "match_rms_adamw", *block.shape)
                weight.mul_(1 - lr * 0.1).sub_(update, alpha=rate)
        self.ref.adamw.step()


# ---- a phase ---------------------------------------------------------------------------------


class Phase:
    """One layout for some steps; ``dice`` fall alike on all ranks."""

    def __init__(self, name: str, dice: random.Random, saved: Any, t: int) -> None:
        self.name, self.dice, self.t = name, dice, t
        self.layout = (LAYOUTS | OF_FOUR)[name]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = self.layout.mesh(self.world)
        torch.manual_seed(dice.randrange(1 << 30))
        self.model = self.layout.wrap(Net(**WIDTHS), mesh)
        self.bare = getattr(self.model, "module", self.model)
        if self.layout.own is not None:
            dmuon.dedicate_params(self.model, mesh, costs="analytic", **self.layout.own)
        self.period = dice.choice([1, 2, 3]) if self.layout.shards else 1
        self.opt = dmuon.Muon(
            self.model,
            lr=0.02,
            adamw_lr=0.02 * ADAMW,
            ns_dtype=torch.float32,
            period=self.period,
            publish=dice.choice(["sync", "async"]),
            dedicate={} if self.layout.own is not None else {"costs": "analytic"},
        )
        self.opt.report()  # plans: torch would have an optimizer without state take a step
        if saved is not None:
            self.load(*saved)
            assert self.opt.stats()["steps"] == t, (self.opt.stats()["steps"], t)
            for found, expected in zip(self.state(), saved[:2], strict=True):
                assert_equal(found, expected, f"loading into {name}")
        rows = mesh.size(mesh.ndim - 1) if self.layout.shards else 1
        self.twin = Twin(*self.state(), rows)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Whole, copied."""
        full = StateDictOptions(full_state_dict=True)
        return copy.deepcopy(get_state_dict(self.model, self.opt, options=full))

    def load(self, model: dict[str, Tensor], optim: dict[str, Any], folder: str | None) -> None:
        options = StateDictOptions(full_state_dict=True)
        optim = {**optim, "param_groups": [dict(g) for g in optim["param_groups"]]}
        for group in optim["param_groups"]:
            group.pop("muon_period", None)  # a phase has its own
        if folder is not None:
            options = StateDictOptions()
            model, found = get_state_dict(self.model, self.opt)
            dcp.load({"model": model, "optim": found}, checkpoint_id=folder)
            optim = found
        set_model_state_dict(self.model, dict(model), options=options)
        set_optimizer_state_dict(self.model, self.opt, optim, options=options)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        model, _ = self.state()
        twin = self.twin.model.state_dict()
        for name, weight in model.items():
            off = float((weight - twin[name]).abs().max())
            assert off <= TOLERANCE, f"{name} is {off} off after {self.name} at step {self.t}"

    def step(self) -> None:
        dice, t = self.dice, self.t
        full = t % self.period == 0
        parts = dice.choice([1, 1, 1, 2, 3])
        # Where the framework reduces, all ranks must have the same gradients missing.
        uses = [dice.random() < 0.5] * self.world
        if self.layout.own is not None and isinstance(self.model, Net):
            uses = [dice.random() < 0.5 for _ in range(self.world)]
        culprit = dice.randrange(self.world) if full and dice.random() < 0.03 else None
        poisoned = dice.choice(["mid", "blocks.1.down", "blocks.0.norm"])
        lr = dice.choice([0.001, 0.002, 0.004])
        waits = dice.random() < 0.5
        for part in range(parts):
            last = part == parts - 1
            syncs = nullcontext() if last or not waits else dmuon.no_sync(self.model)
            with syncs:
                self.backward(
                    self.model,
                    self.rank,
                    10 * t + part,
                    parts,
                    uses[self.rank],
                    last and culprit == self.rank and poisoned,
                )
            for rank in range(self.world):
                twin = self.twin.model
                self.backward(twin, rank, 10 * t + part, parts * self.world, uses[rank], "")
        clip = dice.choice([None, None, 0.05])
        if clip is not None and culprit is None:
            norm = dmuon.clip_grad_norm_(self.model, clip)
            expected = torch.nn.utils.clip_grad_norm_(self.twin.model.parameters(), clip)
            assert math.isclose(float(norm), float(expected), rel_tol=1e-3), (norm, expected)
        for group in self.opt.param_groups:
            group["lr"] = lr
        self.opt.step()
        if culprit is None:
            self.twin.step(lr, full)
        else:
            assert self.opt.stats()["finite"] is False
        if dice.random() < 0.02:  # what is saved while updates travel is what is saved afterwards
            early = self.state()
            self.opt.synchronize()
            for found, expected in zip(self.state(), early, strict=True):
                assert_equal(found, expected, "saving")
        self.opt.zero_grad()
        self.twin.model.zero_grad()
        self.t += 1

    def backward(
        self, model: nn.Module, rank: int, number: int, parts: int, uses: bool, poison: Any
    ) -> None:
        bare = getattr(model, "module", model)
        bare.use_spare = uses
        handle = None
        if poison:
            handle = bare.get_submodule(poison).register_forward_hook(
                lambda module, args, output: output + Poison.apply(module.weight, math.nan)
            )
        (loss_of(model, batch(number, rank, 2)) / parts).backward()
        if handle is not None:
            handle.remove()

    def close(self) -> None:
        self.opt.ownership.close()


def assert_equal(found: Any, expected: Any, what: str) -> None:
    """Tensors at the same places, bit for bit."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key not in ("param_groups", "muon_period"):
                assert_equal(found[key], value, f"{what}: {key}")
    elif isinstance(expected, Tensor):
        assert torch.equal(local_tensor(found), local_tensor(expected)), what


# ---- a run -----------------------------------------------------------------------------------


def resources() -> dict[str, float]:
    """Threads, file descriptors and resident megabytes of this process, where the system tells."""
    gc.collect()
    if not os.path.isdir("/proc/self/task"):
        return {}
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


ALLOWED = {"threads": 2, "files": 4, "megabytes": 20}  # beyond the first round


def soak(rank: int, world: int, *, seed: int, steps: int, seconds: float, say: bool) -> None:
    """Phases until there were so many steps, or seconds."""
    warnings.simplefilter("ignore")
    _mesh.cache_clear()
    dice, begin, t = random.Random(seed), time.monotonic(), 0
    names = [*LAYOUTS, *(OF_FOUR if world == 4 else ())]
    saved: Any = None
    before: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        for number, name in enumerate(cycle(names)):
            phase = Phase(name, dice, saved, t)
            phase.run(STEPS)
            t, path = phase.t, None
            if number % 3 == 0:
                path = f"{shared[0]}/{number % 6}"
                model, optim = get_state_dict(phase.model, phase.opt)
                dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
            saved = *phase.state(), path
            phase.close()
            del phase
            if number == 2 * len(names) - 1:
                before = resources()
            late = torch.tensor(float(time.monotonic() - begin > seconds))
            dist.broadcast(late, 0)
            if t >= steps or late:
                break
            if say and rank == 0 and number % len(names) == len(names) - 1:
                print(f"{t} steps, {time.monotonic() - begin:.0f} s, {resources()}", flush=True)
        dist.barrier()
    _mesh.cache_clear()
    for what, count in before.items():
        now = resources()[what]
        assert now <= count + ALLOWED[what], f"{what} grew from {count} to {now}"
    if say and rank == 0:
        print(f"{t} steps in {time.monotonic() - begin:.0f} s: as in one process; {resources()}")


soak.body = soak  # for `tests.distributed.harness`


def _process(rank: int, world: int, store: str, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    soak(rank, world, **arguments)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "seed": given.seed,
            "steps": given.steps,
            "seconds": given.seconds,
            "say": True,
        }
        mp.spawn(_process, (given.world, f"{folder}/store", arguments), given.world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
