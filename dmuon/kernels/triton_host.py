"""What the Triton kernels share on the host: shapes, strides, memory, where they can run."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import triton
from torch import Tensor

__all__ = [
    "DTYPES",
    "as_batch",
    "batch_stride",
    "described",
    "on_device_of",
    "overlap",
    "refuse_overlap",
    "source_hash",
    "why_unavailable",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_CAPABILITY = (8, 0)


def why_unavailable(device: torch.device | str) -> str | None:
    """None if these kernels run on a device, else the reason and what to do about it, in words."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"Triton kernels run on GPUs, and this is {device}; move the parameters to a GPU"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU; check the driver, or install a torch built for CUDA or ROCm"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"{device} has compute capability {found}; use a GPU with 8.0 (Ampere) or above"
    if not _finds_compiler():
        return "Triton finds no C compiler for its launchers; install gcc, or name one in CC"
    return None


def _finds_compiler() -> bool:
    build = triton.knobs.build
    return bool(build.impl or build.cc or shutil.which("gcc") or shutil.which("clang"))


def source_hash() -> str:
    """Twelve hexadecimal digits that change with the source of any of the kernels."""
    files = sorted(Path(__file__).parent.glob("triton_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device and its current stream: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def described(x: Tensor) -> str:
    """Shape and dtype, for messages."""
    return f"{list(x.shape)} {x.dtype}".replace("torch.", "")


def as_batch(x: Tensor) -> Tensor:
    """One matrix as a batch of one."""
    return x if x.ndim == 3 else x[None]


def batch_stride(x: Tensor) -> int:
    """The distance from matrix to matrix in a batch, in elements; 0 where there is only one."""
    return x.stride(0) if len(x) > 1 else 0


def _span(x: Tensor) -> int:
    """Bytes from the first to the last element, both included."""
    steps = ((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (sum(steps) + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors may share memory, judged by the range of addresses.

    Batches whose matrices alternate in memory, such as ``w[:, 0]`` and ``w[:, 1]``, do not.
    """
    if x.device != y.device or x.numel() == 0 or y.numel() == 0:
        return False
    if x.data_ptr() > y.data_ptr():
        x, y = y, x
    distance = y.data_ptr() - x.data_ptr()
    if distance >= _span(x):
        return False
    if x.ndim != 3 or y.ndim != 3 or len(x) == 1 or len(y) == 1:
        return True
    period = x.stride(0) * x.element_size()
    if period <= 0 or period != y.stride(0) * y.element_size():
        return True
    distance %= period
    return distance < _span(x[0]) or distance + _span(y[0]) > period


def refuse_overlap(function: str, **tensors: Tensor | None) -> None:
    """Raises ValueError if the first tensor may share memory with another of them."""
    (name, first), *others = tensors.items()
    assert first is not None
    for other, tensor in others:
        if tensor is not None and overlap(first, tensor):
            raise ValueError(
                f"{function}: {name} shares memory with {other}, and programs that run at the same "
                f"time would read what others have written; give {name} memory of its own"
            )
