"""The differences between types of devices; no other module knows of them.

    of(device) -> Device           facts, memory, events, streams and graphs of a device
    Stopwatch, HostCopy, SideStream   built on these

`Device` serves every accelerator that `torch.accelerator` knows; a type of device that needs other
calls is a subclass and a line of `TYPES`, where tests put a double. Nothing here knows of ranks.
"""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

GPU = "cuda"
"""The type of device that planning assumes if there is none here; ROCm uses the same name."""

_TIMED_ROWS = 128
_AS_FAST = 1.5  # overhead slows small products; large ones gain more from bfloat16


class HostEvent:
    """A `torch.Event` for the CPU, where work is done when the call returns."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end._seconds - self._seconds)


Event = torch.Event | HostEvent
Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Records the launches of a function, and returns a function that replays them."""


class Device:
    """An accelerator. An object holds no state, so callers make one wherever they need it."""

    host_can_read = False  # whether the host can read a tensor without waiting for the device
    is_cpu = False  # tensors lie in the host's memory, and work is done when a call returns
    has_triton = False  # our kernels target such devices; `why_no_triton`: whether they run here
    chunk_bytes = 1 << 28  # bytes that stay in caches from one pass over many tensors to the next

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """Name the hardware and this process's share of it, as the key of cached measurements."""
        module = torch.get_device_module(self.device)
        is_there = getattr(module, "is_available", lambda: True)()
        found = getattr(module, "get_device_name", None) if is_there else None
        return self.device.type if found is None else str(found(self.device))

    def ns_dtype(self) -> torch.dtype:
        """Return the fastest dtype that is accurate enough for Newton-Schulz: float16 has three
        more mantissa bits than bfloat16, and normalized matrices stay in its range."""
        return torch.float16

    def memory(self) -> tuple[float, float]:
        """Return (free, total) bytes; inf if unknown."""
        with suppress(RuntimeError):  # not every accelerator reports it
            return torch.accelerator.get_memory_info(self.device)
        return math.inf, math.inf

    def release_memory(self) -> None:
        """Return torch's cached memory to the device."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def current(self) -> AbstractContextManager[object]:
        """Make this the current device, for kernel launches and events."""
        return torch.accelerator.device_index(self.device.index)

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator that neither reads nor changes the user's random state."""
        return torch.Generator(self.device).manual_seed(seed)

    def event(self, *, timing: bool = False) -> Event:
        """Record an event on the current stream and return it."""
        event = torch.Event(self.device, enable_timing=timing)
        event.record()
        return event

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host's memory; complete once an `event` recorded afterwards is."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def side_stream(self) -> SideStream | None:
        """Return a second stream, or None if the device has only one."""
        return SideStream(self.device)

    def graphs(self) -> Capture | None:
        """Return a function that captures graphs in shared memory, or None without graphs."""
        return None

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of an NVIDIA GPU, (0, 0) for other devices."""
        return 0, 0

    def facts(self) -> str:
        """Describe, for people, other properties that decide which kernels run."""
        return ""

    def why_no_triton(self) -> str | None:
        """Return why our Triton kernels cannot run here and what to do about it, or None."""
        return (
            f"Triton kernels run on GPUs, and this is {self.device}; move the parameters to a GPU"
        )


class Cpu(Device):
    host_can_read = True
    is_cpu = True
    chunk_bytes = 1 << 19

    def name(self) -> str:
        """Include the number of threads, which affects times as much as the model does."""
        model = platform.processor() or platform.machine() or "CPU"
        with suppress(OSError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            if found := re.search(r"^model name\s*:\s*(.+)$", text, re.M):
                model = found[1].strip()
        threads = torch.get_num_threads()
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{model}, {capability}, {threads} thread{'s' if threads > 1 else ''}"

    def ns_dtype(self) -> torch.dtype:
        """Return bfloat16 if its products are fast; float16 is emulated and very slow."""
        return torch.bfloat16 if cpu_has_bf16() else torch.float32

    def memory(self) -> tuple[float, float]:
        return host_memory()

    def release_memory(self) -> None: ...

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self, *, timing: bool = False) -> Event:
        return HostEvent()

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def side_stream(self) -> SideStream | None:
        return None


class Cuda(Device):
    """A GPU by NVIDIA, or by AMD, which torch names the same."""

    has_triton = True

    def graphs(self) -> Capture | None:
        return CudaGraphs(self.device)

    def capability(self) -> tuple[int, int]:
        return _capability(self.device)

    def facts(self) -> str:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        built = f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}, NCCL {nccl}"
        return "{}, compute capability {}.{}".format(built, *self.capability())

    def why_no_triton(self) -> str | None:
        if not torch.cuda.is_available():
            return "PyTorch finds no GPU; check the driver, or install a torch for CUDA or ROCm"
        if torch.version.hip is None and self.capability() < (8, 0):
            found = "{} has compute capability {}.{}".format(self.device, *self.capability())
            return f"{found}; use a GPU with 8.0 (Ampere) or above"
        return None


class Mps(Device):
    """A GPU by Apple, with one stream and the host's memory."""

    def memory(self) -> tuple[float, float]:
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total

    def side_stream(self) -> SideStream | None:
        return None


class Gaudi(Device):
    """An accelerator by Intel, made for bfloat16."""

    def ns_dtype(self) -> torch.dtype:
        return torch.bfloat16


class Meta(Device):
    def ns_dtype(self) -> torch.dtype:
        return torch.float32


TYPES: dict[str, type[Device]] = {"cpu": Cpu, GPU: Cuda, "mps": Mps, "hpu": Gaudi, "meta": Meta}
"""Classes by the type of a `torch.device`. Other types, such as "xpu" and "npu", use `Device`."""


def of(device: torch.device | str) -> Device:
    device = device if isinstance(device, torch.device) else torch.device(device)
    return TYPES.get(device.type, Device)(device)


def host_can_read(device: torch.device) -> bool:
    """Return whether the host can read a tensor of ``device`` without waiting for the device."""
    return TYPES.get(device.type, Device).host_can_read


def current_device(kind: str) -> torch.device:
    """Return the device of this type that this process uses."""
    if kind in ("cpu", "meta"):
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def default_device() -> torch.device:
    """Return the accelerator that this process uses, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return current_device("cpu" if found is None else found.type)


# ---- timers, copies and streams ----------------------------------------------------------


class Stopwatch:
    """Milliseconds between `start` and `stop` on ``device``, summed, from events on the current
    stream: nothing waits until `milliseconds` is read. Each step has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = of(device)
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._begin = self._device.event(timing=True)

    def stop(self) -> None:
        self._spans.append((self._begin, self._device.event(timing=True)))

    def ready(self) -> bool:
        """Return whether `milliseconds` can be read without waiting for the device."""
        # The stream runs in order, so the last event decides.
        return not self._spans or self._spans[-1][1].query()

    def milliseconds(self) -> float:
        """Return the sum so far; waits for the device."""
        if self._spans:
            self._spans[-1][1].synchronize()
        return sum((begin.elapsed_time(end) for begin, end in self._spans), start=0.0)


class HostCopy:
    """A small tensor being copied to the host, which does not wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        device = of(tensor.device)
        self._values = device.copy_to_host(tensor)
        self._event = device.event()

    def ready(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self._event.query()

    def read(self) -> list[Any]:
        """Return the values; waits for the copy and all device work before it."""
        self._event.synchronize()
        values: list[Any] = self._values.tolist()
        return values


class SideStream:
    """A second stream, which can wait for transfers without holding up the current one. Call `join`
    before the current stream reads results of this one, and ``record_stream(side.stream)`` on
    tensors whose memory is freed inside `current`.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream, after all work queued on the other. Not reentrant."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with self.stream:
            yield

    def join(self) -> None:
        """Make the current stream wait for everything queued here."""
        torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool, because no graph keeps data there between
    replays, and no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaGraphs, (self._device,)  # a copy gets its own pool

    def __call__(self, call: Callable[[], object]) -> Callable[[], object]:
        with torch.cuda.device(self._device):  # may differ from the current device
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            stream = _capture_stream(torch.cuda.current_device())
            # Record this thread alone, because others (NCCL's watchdog) query events.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                call()
        return graph.replay


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """Share one stream among a device's captures: each stream has its own cuBLAS workspace, 32 MiB
    on Hopper."""
    return torch.cuda.Stream(index)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


# ---- the CPU -----------------------------------------------------------------------------


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return (available, total) bytes of the host, within a container's limit. inf if the system
    does not report them, as outside Linux."""
    free = total = math.inf
    with suppress(OSError):
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        found = {name: 1024.0 * int(kb) for name, kb in re.findall(r"(\w+):\s*(\d+) kB", text)}
        free, total = found.get("MemAvailable", free), found.get("MemTotal", total)
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def cpu_has_bf16() -> bool:
    """Whether bfloat16 products are fast on this CPU, from small products timed once per process. A
    build of torch or a setting of oneDNN may leave the processor's instructions unused, and an
    emulated product takes 5 to 30 times as long as one in float32."""
    if not _has_bf16:
        _has_bf16.append(undisturbed(_bf16_is_fast))
    return _has_bf16[0]


def undisturbed(work: Callable[[], T]) -> T:
    """Run ``work`` in another thread, where no mode of the caller's replaces its products with fake
    ones, and return its result."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


_has_bf16: list[bool] = []  # not a cached function, which torch.compile would trace into


@torch.no_grad()
def _bf16_is_fast() -> bool:
    best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting between threads would dominate
    try:
        for number in range(32):  # the first ones set up the library; a busy machine needs more
            for dtype in best:
                x = torch.ones(_TIMED_ROWS, _TIMED_ROWS, dtype=dtype, device="cpu")
                out = torch.empty_like(x)
                begin = time.perf_counter()
                torch.mm(x, x, out=out)
                best[dtype] = min(best[dtype], time.perf_counter() - begin)
            if number > 2 and best[torch.bfloat16] <= _AS_FAST * best[torch.float32]:
                return True
    finally:
        torch.set_num_threads(threads)
    return False
