"""What the Triton kernels share on the host: shapes, strides, memory, where they can run."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.devices import of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_unavailable(device: torch.device | str) -> str | None:
    """None if these kernels run on a device, else the reason and what to do about it, in words."""
    device = torch.device(device)
    reason = of(device).why_no_triton()
    if reason is not None:
        return reason
    build = triton.knobs.build
    if not (build.impl or build.cc or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler for its launchers; install gcc, or name one in CC"
    return _probed(device)


@triton.jit
def _probe(ptr):
    tl.store(ptr, tl.load(ptr) + 1.0)


@cache
def _probed(device: torch.device) -> str | None:
    """Whether one kernel compiles and runs: a compiler without Python's headers, or a driver that
    is not found, shows only then. Raises what Triton raises."""
    x = torch.ones(1, device=device)
    with on_device_of(x):
        _probe[(1,)](x)
    return None if float(x) == 2.0 else f"a kernel of one addition gave {float(x)} for 1 + 1"


def source_hash() -> str:
    """Twelve hexadecimal digits that change with the source of any of the kernels: to key what is
    measured of them."""
    files = sorted(Path(__file__).parent.glob("triton_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device and its current stream: make it the tensor's."""
    return of(tensor.device).current()


def as_batch(x: Tensor) -> Tensor:
    """One matrix as a batch of one."""
    return x if x.ndim == 3 else x[None]


def strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of a batch; 0 from matrix to matrix where there is only one."""
    return (x.stride(0) if len(x) > 1 else 0, x.stride(1), x.stride(2))


def check(shape: tuple[int, ...], *tensors: Tensor) -> None:
    """Kernels compute addresses from one shape: other tensors would be read out of bounds."""
    for x in tensors:
        if x.shape != shape or x.device != tensors[0].device or x.dtype not in _DTYPES:
            raise ValueError(
                f"a Triton kernel needs {list(shape)} in float16, bfloat16 or float32 on "
                f"{tensors[0].device}, found {list(x.shape)} {x.dtype} on {x.device}"
            )
