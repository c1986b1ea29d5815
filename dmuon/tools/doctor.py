"""Prints versions, devices and dmuon's choices here, with reasons, to be pasted into an issue.

It sends nothing and makes no process group. Exit status 0, even if something is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dmuon import __version__, devices
from dmuon.kernels.choice import described, fixed_choice, measured_speeds, why_not
from dmuon.scheduler.costs import CacheKey, CostTable, cache_directory, read_cache
from dmuon.scheduler.json_files import parse, read_text
from dmuon.scheduler.patterns import has_engine
from dmuon.tools.plan import show

_SHAPES = ((256, 256), (1024, 1024), (1024, 4096))  # shapes whose kernels are named
_BACKENDS = ("gloo", "nccl", "xccl", "hccl", "ucc", "mpi")
_FRAMEWORKS = (
    "transformers", "accelerate", "lightning", "peft", "torchtitan", "torchtune", "litgpt",
    "lerobot", "verl", "nemo-automodel", "axolotl", "ms-swift",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lines = "write the lines there, by name; - for standard output alone"
    parser.add_argument("--json", metavar="PATH", help=lines)


def run(args: argparse.Namespace) -> int:
    """Look, and print the findings."""
    own = devices.of(devices.default_device())
    found = {name: _found(look, own) for name, look in _LOOKS.items()}
    lines = (f"{name:<14} {text}" for name, text in found.items())
    show(lambda: "\n".join(lines), lambda: found, args.json)
    return 0


def _found(look: Callable[[devices.Device], str], own: devices.Device) -> str:
    """Return the findings of ``look`` in one line, without the path of the user's home."""
    try:
        text = look(own)
    except Exception as error:  # the other lines are still wanted
        text = f"failed: {described(error)}"
    home = os.path.expanduser("~").rstrip("/")
    return " ".join((text.replace(home, "~") if home else text).split())


def _versions(*names: str) -> str:
    """Return the installed packages among ``names``, with versions."""
    found = []
    for name in names:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _torch(own: devices.Device) -> str:
    """Return torch's version, and the features that only newer versions have."""
    refuses = "_StridedShard" not in str(torch.serialization.get_safe_globals())
    without = not hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    lacks = ["FSDP2 with parameters that some ranks do not use"] * without
    lacks += ["torch.load(weights_only=True) of FSDP2 on top of tensor parallelism"] * refuses
    return f"{torch.__version__}" + f"; cannot do: {'; '.join(lacks)}" * bool(lacks)


def _cpu(own: devices.Device) -> str:
    free, total = (size / 2**30 for size in devices.host_memory())
    return f"{devices.of('cpu').name()} of {os.cpu_count()}; {free:.1f} of {total:.1f} GiB free"


def _accelerators(own: devices.Device) -> str:
    count = 0 if own.is_cpu else torch.accelerator.device_count()
    each = (devices.of(torch.device(own.device.type, i)) for i in range(count))
    named = Counter(", ".join(filter(None, (one.name(), one.facts()))) for one in each)
    return "; ".join(f"{n} x {name}" for name, n in named.items()) or "none that this torch can use"


def _triton(own: devices.Device) -> str:
    reason = own.why_no_triton() or why_not("triton", own.device, own.ns_dtype())
    used = "used where it is faster" if reason is None else f"not used: {reason}"
    return f"{_versions('triton') or 'not installed'}; {used}"


def _process_groups(own: devices.Device) -> str:
    there = ", ".join(name for name in _BACKENDS if dist.is_backend_available(name))
    kind = own.device.type
    return f"{there}; {dist.get_default_backend_for_device(kind)} for tensors on {kind}"


def _launcher(own: devices.Device) -> str:
    if (world := os.environ.get("WORLD_SIZE")) is None:
        return "none (WORLD_SIZE is not set): one process"
    rank, here = os.environ.get("RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    each = "all on one node (LOCAL_WORLD_SIZE is not set)" if here is None else f"{here} per node"
    return f"rank {rank} of {world}, {each}"


def _newton_schulz(own: devices.Device) -> str:
    dtype, why = own.ns_dtype(), "the fastest that is accurate enough"
    if own.is_cpu:
        why = f"bfloat16 products are {'slow' if dtype is torch.float32 else 'fast'} here (timed)"
    return f"{str(dtype).removeprefix('torch.')} on {own.device}: {why}"


def _kernels(own: devices.Device) -> str:
    device, dtype = own.device, own.ns_dtype()
    speeds = measured_speeds(device, dtype, max(min(shape) for shape in _SHAPES))
    kernels = (fixed_choice(m, n, dtype, device, 5, speeds=speeds) for m, n in _SHAPES)
    named = ", ".join(f"{kernel} for {m}x{n}" for (m, n), kernel in zip(_SHAPES, kernels))
    how = "products were timed" if own.is_cpu else "by rule"
    return f"{named} ({how}; measured plans time each shape)"


def _solver(own: devices.Device) -> str:
    if not has_engine():
        return "greedy and covering search alone; pip install 'pulp[highs]' for the others"
    return f"HiGHS, where greedy is not proven optimal ({_versions('pulp', 'highspy')})"


def _cached(folder: Path) -> Iterator[tuple[CacheKey, CostTable]]:
    """Yield the tables in a folder that can be read, for this version of torch."""
    for file in sorted(folder.glob("*.json")):
        with suppress(KeyError, OSError, TypeError, ValueError):  # not our files
            key = CacheKey(**parse(read_text(file))["key"])
            table, _ = read_cache(folder, key)
            if table and key.torch == torch.__version__:
                yield key, table


def _links(own: devices.Device) -> str:
    found = []
    for key, table in _cached(cache_directory() or Path(os.devnull)):
        if key.kernels == "links" and (at := table.device) is not None:
            where = key.device.partition(": ")[2]
            sizes = parse(where.rpartition("nodes of ")[2])  # the other rate was not measured
            speeds = [f"{at.link / 1e9:.3g} GB/s inside a node"] * (max(sizes) > 1)
            speeds += [f"{at.network / 1e9:.3g} GB/s to other nodes"] * (len(sizes) > 1)
            found.append(f"{where}: {', '.join(speeds)}, per rank")
    return "; ".join(found) or "none measured yet (when it plans on several ranks, dmuon does)"


def _cache(own: devices.Device) -> str:
    if (folder := cache_directory()) is None:
        return "none, since there is no home directory: each run measures its costs"
    files, shapes = sorted(folder.glob("*.json")), []  # of each file that fits
    for key, table in _cached(folder):
        if (key.device + ",").startswith(own.name() + ","):
            shapes.append(len(table.entries))
    size = sum(file.stat().st_size for file in files) / 1024
    fitting = f"{len(shapes)} for this torch, device and threads, with {sum(shapes)} shapes"
    return f"{folder}: {len(files)} files, {size:.0f} KiB; {fitting}"


_LOOKS: dict[str, Callable[[devices.Device], str]] = {
    "dmuon": lambda _: __version__,
    "torch": _torch,
    "python": lambda _: platform.python_version(),
    "system": lambda _: platform.platform(),
    "cpu": _cpu,
    "accelerators": _accelerators,
    "triton": _triton,
    "process groups": _process_groups,
    "launcher": _launcher,
    "newton-schulz": _newton_schulz,
    "kernels": _kernels,
    "solver": _solver,
    "cost cache": _cache,
    "links": _links,
    "frameworks": lambda _: _versions(*_FRAMEWORKS) or "none of those that dmuon knows",
}
