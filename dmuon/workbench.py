"""What is timed for measured costs: an owner's update of a batch, and its m x m part alone.

Both are `dmuon.scheduler.profile.Workbench` on this process's device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.streams import Stopwatch
from dmuon.config import KernelOptions, MuonDefaults
from dmuon.kernel_tuning import Kernels
from dmuon.kernels.backends import ops_of
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.iterations import squares_program
from dmuon.kernels.ops import MatmulOps
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.kernels.workspace import Workspace, aligned_bytes
from dmuon.operand import normalized_momentum
from dmuon.scheduler.costs import ShapeKey, square_key
from dmuon.scheduler.specs import ITEM_SIZE
from dmuon.types import KernelChoice

__all__ = ["NewtonSchulzBench", "SquareBench"]

_GROUP = {name: getattr(MuonDefaults(), name) for name in MuonDefaults.__slots__}
_MEMORY_SHARE = 0.25  # of what is free


@dataclass(frozen=True, slots=True)
class NewtonSchulzBench:
    """Times what an owner does in `Muon.step` for one batch: momentum and Newton-Schulz.

    With the default settings of `Muon`, in the dtype that all ranks use, with the chosen
    ``kernels`` (those of the fixed rule where there is none). ``sharing`` processes take their
    operands from the same memory.
    """

    device: torch.device
    ns_dtype: torch.dtype
    sharing: int = 1
    kernels: Kernels = field(default_factory=dict)
    options: KernelOptions = KernelOptions()  # noqa: RUF009  frozen

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether the operands take no more than a quarter of the free memory."""
        free = _free_bytes(self.device)
        if free is None:
            return True
        return _needed_bytes(key, batch, self.ns_dtype) <= _MEMORY_SHARE * free / self.sharing

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """One update of a stack ``[batch, rows, cols]``; a call returns its milliseconds."""
        rows, cols, dtype = key
        muon = MuonDefaults()
        triples = resolve_coefficients(muon.ns_coefficients, muon.ns_steps)
        kernel = self.kernels.get(key, {}).get(batch, "")
        call = Call(((batch, rows, cols),), triples, kernel)
        # A generator of our own, and every factory told its device and dtype: the user's random
        # state and defaults neither change nor matter.
        generator = torch.Generator(self.device).manual_seed(0)
        try:
            grads = torch.empty(
                batch, rows, cols, dtype=getattr(torch, dtype), device=self.device
            ).uniform_(-1, 1, generator=generator)
            buffer = torch.zeros_like(grads)
            runner = Orthogonalizer(self.device, self.ns_dtype, self.options)
            runner.reserve([call])
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        if self.device.type == "cuda":
            for _ in range(2):  # kernels compile in the first, graphs are captured in the second
                self._run(runner, call, buffer, grads)
        return lambda: self._run(runner, call, buffer, grads)

    @torch.no_grad()
    def _run(self, runner: Orthogonalizer, call: Call, buffer: Tensor, grads: Tensor) -> float:
        try:
            with _current(self.device):
                watch = Stopwatch(self.device)
                watch.start()
                (operand,) = runner.operands(call)
                normalized_momentum(buffer, grads, _GROUP, out=operand, fused=runner.is_fused(call))
                orthogonalize(runner, call, [operand])
                watch.stop()
                return watch.milliseconds()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None


@dataclass(frozen=True, slots=True)
class SquareBench:
    """Times the m x m part of Gram Newton-Schulz alone; its shapes are (m, m).

    With the Gram kernel that is chosen most often for matrices of this short side: the m x m parts
    of two forms or tiles differ by little.
    """

    device: torch.device
    ns_dtype: torch.dtype
    kernels: Kernels

    def fits(self, key: ShapeKey, batch: int) -> bool:
        """Whether the operands take no more than a quarter of the free memory."""
        free = _free_bytes(self.device)
        needed = 4 * batch * key[0] ** 2 * self._operands(key)[1].itemsize
        return free is None or needed <= _MEMORY_SHARE * free

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        """One pass over ``[batch, m, m]``; a call returns its milliseconds."""
        m, muon = key[0], MuonDefaults()
        triples = resolve_coefficients(muon.ns_coefficients, muon.ns_steps)
        choice = self._choice(key)
        ops, dtype = self._operands(key)
        workspace = Workspace(self.device)
        try:
            workspace.reserve(3 * aligned_bytes((batch, m, m), dtype))
            eye = torch.eye(m, dtype=dtype, device=self.device)
            r = eye.expand(batch, m, m).contiguous()
            program = squares_program(r, triples, choice.restarts, ops, workspace)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

        def run() -> float:
            with _current(self.device):
                watch = Stopwatch(self.device)
                watch.start()
                program.run()
                watch.stop()
                return watch.milliseconds()

        return run

    def _operands(self, key: ShapeKey) -> tuple[MatmulOps, torch.dtype]:
        """What multiplies, and the dtype in which it holds m x m matrices."""
        ops = ops_of(self._choice(key), self.device, key[0])
        return ops, ops.held or self.ns_dtype

    def _choice(self, key: ShapeKey) -> KernelChoice:
        names = Counter(
            kernel
            for shape, by_batch in self.kernels.items()
            for kernel in by_batch.values()
            if square_key(shape) == square_key(key) and kernel.startswith("gram")
        )
        return KernelChoice.parse(min(names, key=lambda name: (-names[name], name)))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Events are recorded on the current device's stream, which may be another's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _needed_bytes(key: ShapeKey, batch: int, ns_dtype: torch.dtype) -> int:
    rows, cols, dtype = key
    wide = 2 * max(4, ITEM_SIZE[dtype])  # Newton-Schulz normalizes in float32 at least
    stacks = rows * cols * (3 * ITEM_SIZE[dtype] + wide + 3 * ns_dtype.itemsize)
    squares = 6 * min(rows, cols) ** 2 * ns_dtype.itemsize
    return batch * (stacks + squares)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_bytes() if device.type == "cpu" else None


def _free_host_bytes(root: Path = Path("/")) -> int | None:
    """What Linux says is available, or less in a container with a limit; None if unknown."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        free = 1024 * int(re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)[1])  # type: ignore[index]
    except (OSError, TypeError):
        return None
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int((root / "sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group, or "max"
        return free
    return min(free, max(0, limit - used))
