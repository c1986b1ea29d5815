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
import gc
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dmuon
from dmuon.dtensors import local_tensor
from tests.distributed.layouts import LAYOUTS, mesh_of, on
from tests.distributed.models import Net
from tests.distributed.twins import BlockReference, Both, Trained
from tests.poison import Poison

STEPS = 40  # of a phase
TOLERANCE = 3e-5
WIDTHS = {"width": 16, "hidden": 22, "layers": 2}
ADAMW = 0.1  # its learning rate over Muon's


# ---- layouts ---------------------------------------------------------------------------------

KINDS = {name: LAYOUTS[name] for name in ("fsdp2", "ddp", "dedicated", "reduced ddp")}
OF_FOUR = {"hsdp": on("fsdp2", 2, 2), "dedicated hsdp": on("dedicated", 2, 2)}


@cache
def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """One of a kind: a mesh has process groups that nobody gives back."""
    return mesh_of(shape, axes)


# ---- the twin --------------------------------------------------------------------------------


def twin_of(state: dict[str, Any], rows: int, period: int, t: int) -> tuple[Net, BlockReference]:
    """The same model in one process after ``t`` steps; ``rows`` are its ranks in block steps."""
    model = Net(**WIDTHS)
    model.load_state_dict(state["model"])
    holders = {p: _chunks(p, rows) for p in model.parameters()}
    rates = {"lr": 0.02, "adamw_lr": 0.02 * ADAMW, "ns_dtype": torch.float32}
    ref = BlockReference(model, holders, period, **rates)
    for _ in range(t):
        ref.schedule.advance()
    for name, p in model.named_parameters():
        entry = state["optim"]["state"].get(name, {})
        kept = ref.state if "momentum_buffer" in entry else ref.adamw.state
        if entry:
            kept[p] = {key: torch.as_tensor(v).clone() for key, v in entry.items()}
    return model, ref


def _chunks(p: Tensor, rows: int) -> Tensor:
    """The number of the rank that has each element."""
    found = torch.zeros_like(p.detach())
    for number, part in enumerate(found.chunk(rows)):
        part.fill_(number)
    return found


# ---- a phase ---------------------------------------------------------------------------------


class Phase(Trained):
    """One layout for some steps; ``dice`` fall alike on all ranks."""

    def __init__(self, name: str, dice: random.Random, saved: Any, t: int) -> None:
        self.name, self.dice, self.t = name, dice, t
        self.laid = (KINDS | OF_FOUR)[name]
        shape = self.laid.mesh or (dist.get_world_size(),)
        mesh = _mesh(shape, self.laid.axes)
        torch.manual_seed(dice.randrange(1 << 30))
        model, in_shards = Net(**WIDTHS), not self.laid.from_first
        self.period = dice.choice([1, 2, 3]) if in_shards else 1
        super().__init__(
            replace(self.laid, mesh=shape),
            model,
            mesh,
            {"costs": "analytic"},
            lr=0.02,
            adamw_lr=0.02 * ADAMW,
            ns_dtype=torch.float32,
            period=self.period,
        )
        self.opt.report()  # plans: torch would have an optimizer without state take a step
        if saved is not None:
            self.load_from(*saved)
            assert self.opt.stats()["steps"] == t, (self.opt.stats()["steps"], t)
            assert_equal(self.whole(), saved[0], f"loading into {name}")
        rows = mesh.size(mesh.ndim - 1) if in_shards else 1
        twin, self.ref = twin_of(self.whole(), rows, self.period, t)
        self.pair = Both(self.model, twin, self.opt, [self.ref], mesh)

    def load_from(self, whole: dict[str, Any], folder: str | None) -> None:
        if folder is not None:
            self.load(folder)
            return
        optim = whole["optim"]
        groups = [{k: v for k, v in g.items() if k != "muon_period"} for g in optim["param_groups"]]
        state = {"model": whole["model"], "optim": {**optim, "param_groups": groups}}
        self.put(state, full_state_dict=True)  # a phase has its own period

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.t += 1
        twin = self.pair.twin.state_dict()
        for name, weight in self.whole()["model"].items():
            off = float((weight - twin[name]).abs().max())
            assert off <= TOLERANCE, f"{name} is {off} off after {self.name} at step {self.t}"

    def step(self) -> None:
        dice, t, pair = self.dice, self.t, self.pair
        parts = dice.choice([1, 1, 1, 2, 3])
        # Where the framework reduces, all ranks must have the same gradients missing.
        uses = [dice.random() < 0.5] * self.ranks
        if self.laid.own and isinstance(self.model, Net):
            uses = [dice.random() < 0.5 for _ in range(self.ranks)]
        pair.prepare = lambda model, step, rank: setattr(model, "use_spare", uses[rank])
        is_bad = t % self.period == 0 and dice.random() < 0.03
        culprit = dice.randrange(self.ranks) if is_bad else None
        poisoned = dice.choice(["mid", "blocks.1.down", "blocks.0.norm"])
        lr, waits = dice.choice([0.001, 0.002, 0.004]), dice.random() < 0.5
        for part in range(parts):
            last = part == parts - 1
            syncs = nullcontext() if last or not waits else dmuon.no_sync(self.model)
            with syncs, poison(self.bare, poisoned if last and culprit == self.rank else ""):
                pair.backward(10 * t + part, parts)
            pair.joint_backward(10 * t + part, parts)
        clip = dice.choice([None, None, 0.05])
        if clip is not None and culprit is None:
            norm = dmuon.clip_grad_norm_(self.model, clip)
            expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), clip)
            assert math.isclose(float(norm), float(expected), rel_tol=1e-3), (norm, expected)
        for group in self.opt.param_groups:
            group["lr"] = lr
        self.ref.param_groups[0]["lr"], self.ref.adamw.param_groups[0]["lr"] = lr, lr * ADAMW
        self.opt.step()
        if culprit is None:
            self.ref.step()
        else:
            assert self.opt.stats()["finite"] is False
            self.ref.schedule.advance()
        if dice.random() < 0.02:  # what is saved while updates travel is what is saved afterwards
            early = self.whole()
            self.opt.synchronize()
            assert_equal(self.whole(), early, "saving")
        self.opt.zero_grad()
        pair.twin.zero_grad()


@contextmanager
def poison(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, the gradient of this module's weight is not finite."""
    handle = None
    if name:
        handle = model.get_submodule(name).register_forward_hook(
            lambda module, args, output: output + Poison.apply(module.weight, math.nan)
        )
    yield
    if handle is not None:
        handle.remove()


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
    names = [*KINDS, *(OF_FOUR if world == 4 else ())]
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
                phase.save(path)
            saved = phase.whole(), path
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
