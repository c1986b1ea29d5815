"""One rank dies or hangs: what the others see, and that the job goes on from its last checkpoint.

::

    python -m tests.faults                                 (all, some minutes)
    python -m tests.faults --short                         (in CI)
    python -m tests.faults --point verdict --layout hsdp   (one)
    python -m tests.faults --hangs                         (a rank stops and is not dead)

A fault is a point at which one rank of a layout kills itself with SIGKILL, or stops with SIGSTOP.
Then every other rank must end by itself, soon (when the timeout is over, if one hangs), and with an
error that says where it was; and the job, started again, must find a checkpoint that loads, and end
with bitwise the weights of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what takes seconds, before processes are forked
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.pipelining
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

import dmuon
import dmuon.api
from tests.distributed.layouts import Layout, on
from tests.distributed.test_checkpoints import CASES as SMALL
from tests.distributed.test_checkpoints import Training
from tests.fixed_costs import analytic_costs, fixed_products
from tests.internals import C10dTransport, IssuedWork, Orthogonalizer

STEPS, EVERY, AT = 5, 2, 3  # of a run; between checkpoints; the step in which a rank dies
TIMEOUT_S = 10.0  # of process groups
HANG_TIMEOUT_S = 4.0  # of all of them where a rank hangs, because each of these is waited for
PATIENCE_S = 60.0  # until a process that has not ended hangs


# ---- where a rank dies -----------------------------------------------------------------------


def die(folder: Path, fault: Fault) -> None:
    (folder / "died").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP if fault.hangs else signal.SIGKILL)


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Have a method call ``act`` with its arguments before it does its work."""
    method = getattr(owner, name)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self, *args)
        return method(self, *args, **kwargs)

    setattr(owner, name, patched)


def _in_forward(kill: Callable[[], None], training: Training) -> None:
    block = getattr(training.model, "module", training.model).blocks[0]
    block.mlp.register_forward_pre_hook(lambda *_: kill())


def _in_backward(kill: Callable[[], None], training: Training) -> None:
    block = getattr(training.model, "module", training.model).blocks[0]
    block.mlp.register_forward_hook(lambda m, i, out: out.register_hook(lambda _: kill()) and None)


def _before_newton_schulz(kill: Callable[[], None], training: Training) -> None:
    _before(Orthogonalizer, "run", lambda *_: kill())


def _collective(tag: str) -> Callable[..., None]:
    """Where the others issue a collective of dmuon's."""

    def plant(kill: Callable[[], None], training: Training) -> None:
        _before(C10dTransport, "located", lambda _, t: kill() if t.startswith(tag) else None)

    return plant


def _wait(tag: str) -> Callable[..., None]:
    """Where the others wait for one that this rank has issued."""

    def plant(kill: Callable[[], None], training: Training) -> None:
        _before(IssuedWork, "wait", lambda w: kill() if w.tag.startswith(tag) else None)

    return plant


def _method(owner: Any, name: str) -> Callable[..., None]:
    return lambda kill, training: _before(owner, name, lambda *_: kill())


def _half_written(kill: Callable[[], None], training: Training) -> None:
    write = FileSystemWriter.write_data

    def patched(self: Any, plan: Any, planner: Any) -> Any:
        write(self, plan, planner).wait()
        for path in Path(self.path).glob(f"__{dist.get_rank()}_*"):
            os.truncate(path, path.stat().st_size // 2)
        kill()

    FileSystemWriter.write_data = patched


def _in_marker(kill: Callable[[], None], training: Training) -> None:
    Job._mark = lambda *_: kill()  # type: ignore[method-assign]


@dataclass(frozen=True)
class Point:
    """``plant`` is called at ``when`` on the ``victim``: before step `AT`, before its checkpoint,
    or at the start of a job that has one."""

    plant: Callable[..., None]
    when: str = "step"
    victim: int = 1


TAGS = (
    "gradients", "gradients across replicas", "flags", "verdict", "norms", "gather", "scatter",
    "replicate", "updates",
)  # fmt: skip
POINTS = {
    "forward": Point(_in_forward),
    "backward": Point(_in_backward),
    "before Newton-Schulz": Point(_before_newton_schulz),
    # collectives of a step, as `opt.stats()["bytes"]` and errors name them; owners have gradients
    # where there is a "verdict", elsewhere there are "norms"
    **{tag: Point(_collective(tag)) for tag in TAGS},
    **{f"weights of {way}": Point(_collective(way)) for way in ("forward", "backward")},
    **{f"waiting for {tag}": Point(_wait(tag)) for tag in ("scatter", "updates", "publish")},
    # planning
    "planning: process group": Point(_method(C10dTransport, "__init__"), "start"),
    "planning: device": Point(_method(C10dTransport, "begin"), "start"),
    "planning: agreement": Point(_method(C10dTransport, "gather_objects"), "start"),
    "planning: the plan": Point(_method(C10dTransport, "broadcast_object"), "start", victim=0),
    # checkpoints
    "save: state": Point(_collective("saved state"), "save"),
    "save: before the data": Point(_method(FileSystemWriter, "write_data"), "save"),
    "save: half of the data": Point(_half_written, "save"),
    "save: before the metadata": Point(_method(FileSystemWriter, "finish"), "save", victim=0),
    "save: before its rename": Point(_method(type(Path()), "rename"), "save", victim=0),
    "save: before the marker": Point(_in_marker, "save", victim=0),
    "async_save: half of the data": Point(_half_written, "save"),
    "load: metadata": Point(_method(FileSystemReader, "read_metadata"), "start"),
    "load: data": Point(_method(FileSystemReader, "read_data"), "start"),
    "load: state": Point(_collective("saved state"), "start"),
}


# ---- a job -----------------------------------------------------------------------------------

CASES: dict[str, Layout] = {
    **SMALL,
    "dedicated3": on("dedicated", 3),
    "dedicated4": on("dedicated", 4),
    "ddp on nodes": on("ddp", 4),  # two of two ranks
}


def training_of(name: str, timeout_s: float) -> Training:
    """A model and its optimizer, with short timeouts."""
    case, changes = CASES[name], {}
    if not case.own:
        kind = dmuon.ReplicatedOptions if name.startswith("ddp") else dmuon.ShardedOptions
        dedicate: dict[str, Any] = {"options": kind(timeout_s=timeout_s)}
        if "nodes" in name:
            dedicate["planner"] = dmuon.PlannerOptions(ranks_per_node=2, redundancy=1)
        changes = {"dedicate": dedicate}
    else:
        options = replace(case.own.get("options", dmuon.DedicatedOptions()), timeout_s=timeout_s)
        case = replace(case, own={**case.own, "options": options})
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=case.axes)
    for i in range(mesh.ndim):
        mesh.get_group(i).set_timeout(timedelta(seconds=timeout_s))
    return Training(case, seed=1, mesh=mesh, **changes)


def mark(folder: Path, name: str) -> None:
    """Say which checkpoint is the last whole one; there is no moment without any."""
    new = folder / "latest.new"
    new.write_text(name)
    os.replace(new, folder / "latest")


class Job:
    """One rank of a training script that saves, and that goes on where the last one ended."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self._folder = folder
        self.training = training_of(fault.layout, fault.timeout_s)
        self.begin = 0
        if (folder / "latest").exists():
            name = (folder / "latest").read_text()
            self.training.load(str(folder / name))
            self.begin = self.training.schedule.last_epoch = int(name.removeprefix("step-"))
        self._saver: Any = None
        self._saving: tuple[Any, str] | None = None
        if fault.point.startswith("async_save"):
            # It meets from a thread, so not in the group in which the model trains meanwhile.
            self._saver = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))

    def save(self, step: int) -> None:
        """Into a folder of its own, which is the last checkpoint when all ranks have written."""
        name = f"step-{step}"
        writer = FileSystemWriter(self._folder / name)
        if self._saver is None:
            dcp.save(self.training.state(), storage_writer=writer)
            self._mark(name)
            return
        self.finish_saving()
        state = self.training.state()
        future = dcp.async_save(state, storage_writer=writer, process_group=self._saver)
        self._saving = future, name

    def finish_saving(self) -> None:
        if self._saving is not None:
            future, name = self._saving
            self._saving = None
            future.result()
            self._mark(name)

    def _mark(self, name: str) -> None:
        if dist.get_rank() == 0:
            mark(self._folder, name)

    def run(self, plant: Callable[..., None]) -> None:
        for step in range(self.begin, STEPS):
            if step == AT:
                plant("step", self.training)
            self.training.train(range(step, step + 1))
            if (step + 1) % EVERY == 0:
                if step >= AT:
                    plant("save", self.training)
                self.save(step + 1)
        self.finish_saving()
        weights = self.training.weights()
        if dist.get_rank() == 0:
            torch.save(weights, self._folder / "final.pt")


def train(folder: Path, fault: Fault, *, dies: bool, **rendezvous: Any) -> None:
    """What every rank runs."""
    torch.set_num_threads(1)
    dmuon.api.measured_costs = analytic_costs  # type: ignore[attr-defined]
    fixed_products().start()
    dist.init_process_group("gloo", timeout=timedelta(seconds=fault.timeout_s), **rendezvous)
    point = POINTS[fault.point]

    def plant(when: str, training: Training | None = None) -> None:
        if dies and point.when == when and dist.get_rank() == point.victim:
            point.plant(lambda: die(folder, fault), training)

    job = None
    try:
        plant("start")
        job = Job(folder, fault)
        job.run(plant)
    except Exception as error:
        _note(error, folder / f"error-{dist.get_rank()}")
        if dist.get_rank() % 2:
            raise  # ends without a word to torch or dmuon
        with contextlib.suppress(Exception):
            if job is not None:
                job.training.close()
        dist.destroy_process_group()
        raise
    job.training.close()
    dist.destroy_process_group()


def _note(error: BaseException, path: Path) -> None:
    """When it was raised, and what the last lines and the frames of the traceback say."""
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(below)
    frames = [f for e in chain for f in traceback.extract_tb(e.__traceback__)]
    told = {
        "at": time.monotonic(),
        "errors": [f"{type(e).__name__}: {e}" for e in chain],
        "frames": [f"{f.filename}:{f.name}" for f in frames],
    }
    path.write_text(json.dumps(told))


# ---- processes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``then``: the layout in which the job is started again, if another; ``hangs``: the rank
    stops, and its connections stay."""

    point: str
    layout: str
    then: str = ""
    hangs: bool = False

    @property
    def timeout_s(self) -> float:
        return HANG_TIMEOUT_S if self.hangs else TIMEOUT_S


@dataclass
class Ended:
    codes: dict[int, int]  # by rank
    times: dict[int, float]
    hung: list[int]


def _fork(rank: int, folder: Path, fault: Fault, store: str, dies: bool) -> int:
    """Start a rank. It has what this process has imported, and ends as any interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    with open(folder / f"output-{rank}", "w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    world = CASES[fault.layout].world
    train(folder, fault, dies=dies, rank=rank, world_size=world, init_method=store)
    if not dies:
        os._exit(0)  # its end is not what is tried, and takes as long as the rest
    sys.exit(0)


def launch(folder: Path, fault: Fault, *, dies: bool = False) -> Ended:
    """Run a job to its end, on all ranks."""
    sys.stdout.flush()
    # As in most jobs: the store dies with rank 0.
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    world = CASES[fault.layout].world
    ranks = {_fork(rank, folder, fault, store, dies): rank for rank in range(world)}
    codes: dict[int, int] = {}
    times: dict[int, float] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(codes) < world - (dies and fault.hangs) and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            times[ranks[pid]] = time.monotonic()
        elif not pid:
            time.sleep(0.005)
    hung = [(pid, rank) for pid, rank in ranks.items() if rank not in codes]
    for pid, rank in hung:
        os.kill(pid, signal.SIGKILL)
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if dies and fault.hangs:
        hung = [(pid, rank) for pid, rank in hung if rank != POINTS[fault.point].victim]
    return Ended(codes, times, [rank for _, rank in hung])


# ---- a fault, and what came of it ------------------------------------------------------------

# Where an error comes from that is no collective of dmuon's.
_OTHERS = {
    "torch/distributed/checkpoint/": "torch: checkpoint",
    "torch/distributed/fsdp/": "torch: FSDP2",
    "torch/nn/parallel/": "torch: DDP",
    "torch/distributed/tensor/": "torch: DTensor",
    "torch/distributed/distributed_c10d.py": "torch: process group",
    "torch/autograd/": "torch: backward",
}


def seen_by(rank: int, folder: Path) -> tuple[str, float]:
    """What a rank's error says of where it was, and when it did."""
    told = json.loads((folder / f"error-{rank}").read_text())
    for text in told["errors"]:
        found = re.search(
            r"of dmuon \(['\"](.*)['\"]\) failed or timed out after (\d+) steps", text
        )
        if found:
            return f"`{found[1]}` after {found[2]} steps", told["at"]
        found = re.search(r"OwnershipError: (\S+).* did not come to it", text)
        if found:
            return f"`{found[1]}` timed out", told["at"]
    in_dmuon = [frame for frame in told["frames"] if "dmuon/comm/transport.py" in frame]
    assert not in_dmuon, f"rank {rank} failed in a collective of dmuon and does not say so: {told}"
    for part, name in _OTHERS.items():
        if any(part in frame for frame in told["frames"]):
            return name, told["at"]
    raise AssertionError(f"rank {rank} does not say where it was: {told}")


def inject(fault: Fault, folder: Path, honest: Path) -> str:
    """Have a rank die, check the others, start again, compare the weights; what was seen."""
    point = POINTS[fault.point]
    folder.mkdir()
    if point.when == "start":  # of a job that goes on
        shutil.copytree(honest / f"step-{EVERY}", folder / f"step-{EVERY}")
        mark(folder, f"step-{EVERY}")
    ended = launch(folder, fault, dies=True)
    assert not ended.hung, f"ranks {ended.hung} hang"
    assert ended.codes[point.victim] == -signal.SIGKILL, f"nobody died: {ended.codes}"
    others = [rank for rank in ended.codes if rank != point.victim]
    assert all(ended.codes[rank] == 1 for rank in others), f"ended with {ended.codes}"
    died = float((folder / "died").read_text())
    seen = [seen_by(rank, folder) for rank in others]
    last = max(at for _, at in seen) - died
    assert last <= 2 * fault.timeout_s + 2, f"the last error came after {last} s"
    marked = (folder / "latest").read_text()
    assert marked == f"step-{EVERY}", f"{marked} is no whole checkpoint"
    again = launch(folder, replace(fault, layout=fault.then or fault.layout))
    assert set(again.codes.values()) == {0}, f"started again: {again}"
    compare(folder, honest, 1e-6 if fault.then else 0.0)
    return f"after {last:.1f} s: " + "; ".join(dict.fromkeys(text for text, _ in seen))


def compare(folder: Path, honest: Path, tolerance: float) -> None:
    found, expected = (torch.load(at / "final.pt") for at in (folder, honest))
    assert found.keys() == expected.keys()
    off = max(float((found[n] - w).abs().max()) for n, w in expected.items())
    assert off <= tolerance, f"started again: {off} off"


# ---- all of them -----------------------------------------------------------------------------

OWNERS = ("reduce_to_owner", "reduce_to_owner ddp", "dedicated", "dedicated fsdp", "dedicated hsdp")
LAYOUTS = ("fsdp2", "fsdp4", "hsdp", "tp", "ddp", *OWNERS)


def _of(point: str, *layouts: str) -> list[Fault]:
    return [Fault(point, layout) for layout in layouts]


FAULTS = [
    *_of("forward", *LAYOUTS),
    *_of("backward", "fsdp4", "ddp", "reduce_to_owner ddp", "dedicated fsdp", "dedicated hsdp"),
    *_of("before Newton-Schulz", "fsdp2", "tp", "ddp", "dedicated hsdp"),
    *_of("gradients", "reduce_to_owner ddp", "dedicated"),
    *_of("gradients across replicas", "dedicated hsdp"),
    *_of("flags", "dedicated"),
    *_of("verdict", "reduce_to_owner", "dedicated hsdp"),
    *_of("norms", "fsdp4", "tp", "ddp"),
    *_of("gather", "hsdp", "tp"),
    *_of("scatter", "fsdp4", "tp"),
    *_of("replicate", "hsdp"),
    *_of("updates", "ddp", "ddp on nodes", "reduce_to_owner"),
    *_of("weights of forward", "dedicated", "dedicated hsdp"),
    *_of("weights of backward", "dedicated fsdp"),
    *_of("waiting for scatter", "fsdp2"),
    *_of("waiting for updates", "ddp", "ddp on nodes"),
    *_of("waiting for publish", "dedicated hsdp"),
    *_of("planning: process group", "fsdp4", "dedicated"),
    *_of("planning: agreement", "tp", "dedicated hsdp"),
    *_of("planning: the plan", "ddp"),
    *_of("save: state", "reduce_to_owner"),
    *_of("save: before the data", "ddp"),
    *_of("save: half of the data", "fsdp4", "dedicated hsdp"),
    *_of("save: before the metadata", "fsdp2"),
    *_of("save: before its rename", "hsdp"),
    *_of("save: before the marker", "reduce_to_owner"),
    *_of("async_save: half of the data", "fsdp2", "dedicated"),
    *_of("load: metadata", "fsdp2"),
    *_of("load: data", "fsdp4"),
    *_of("load: state", "reduce_to_owner", "dedicated hsdp"),
    Fault("gather", "fsdp4", then="fsdp3"),
    Fault("gradients", "dedicated4", then="dedicated3"),
    *(Fault("forward", layout, hangs=True) for layout in LAYOUTS),
    Fault("norms", "hsdp", hangs=True),
    Fault("updates", "ddp", hangs=True),
    Fault("updates", "ddp on nodes", hangs=True),
    Fault("verdict", "dedicated hsdp", hangs=True),
    Fault("planning: agreement", "fsdp2", hangs=True),
    Fault("planning: device", "ddp", hangs=True),
]
SHORT = [
    *_of("forward", "dedicated"),
    *_of("updates", "ddp"),
    *_of("async_save: half of the data", "ddp"),
    *_of("load: state", "dedicated"),
    Fault("forward", "dedicated", hangs=True),
]


def undisturbed(root: Path, layout: str) -> Path:
    """Of a job that nobody disturbs."""
    folder = root / f"undisturbed {layout}"
    if not (folder / "final.pt").exists():
        folder.mkdir(exist_ok=True)
        ended = launch(folder, Fault("forward", layout))
        assert set(ended.codes.values()) == {0}, f"undisturbed: {ended}"
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="what CI runs")
    parser.add_argument("--point", help="only where a rank dies here: " + ", ".join(POINTS))
    parser.add_argument("--layout", help="only in this layout: " + ", ".join(CASES))
    parser.add_argument("--hangs", action="store_true", help="only where a rank hangs")
    parser.add_argument("--keep", type=Path, help="a folder that keeps files and outputs")
    given = parser.parse_args()

    def is_asked(fault: Fault) -> bool:
        is_there = given.point in (None, fault.point) and given.layout in (None, fault.layout)
        return is_there and fault.hangs >= given.hangs

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported before a fork is neither looked at again nor, so, copied
    failed, parent = 0, os.getpid()
    root = given.keep or Path(tempfile.mkdtemp())
    root.mkdir(exist_ok=True)
    try:
        for fault in filter(is_asked, SHORT if given.short else FAULTS):
            begin, goes_on = time.monotonic(), f"then {fault.then}" if fault.then else "again"
            what = f"{fault.point}, {fault.layout}, {goes_on}{', hangs' * fault.hangs}"
            try:
                told = inject(fault, root / what, undisturbed(root, fault.layout))
            except AssertionError as error:
                failed += 1
                told = f"FAILED: {error}"
            print(f"{what}: {told} ({time.monotonic() - begin:.1f} s)", flush=True)
    finally:
        if os.getpid() == parent and given.keep is None:  # not in a rank that was forked
            shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
