"""An accelerator's branches on a CPU: `host_cannot_read` takes them, `nothing_read` proves them.

Both are context managers, so that they work in the processes of distributed tests too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon import devices

__all__ = ["Pretended", "host_cannot_read", "nothing_read", "reading_allowed"]


class Pretended(devices.Cpu):
    """A CPU whose tensors the host must not read, and which has no caches to fit into."""

    host_can_read = False
    chunk_bytes = devices.Device.chunk_bytes

    __slots__ = ()


@contextmanager
def host_cannot_read() -> Iterator[None]:
    """Ownerships and optimizers that are made and used inside believe to be on an accelerator."""
    with patch.dict(devices.TYPES, cpu=Pretended):
        yield


# Values to the host, or sizes that depend on values: on an accelerator each waits for the device.
# `_local_scalar_dense` is float(), int(), bool(), item() and indexing by a 0-d tensor.
_READS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "allclose",
    "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor", "bincount",
)  # fmt: skip
# Made from Python values (or numpy): on an accelerator a copy from pageable memory, which waits.
_COPIES = ("lift_fresh",)
_BY_MASK = ("index.Tensor", "index_put", "index_put_", "_index_put_impl_")
# What never reaches the dispatcher where the tensor lies on the CPU already.
_METHODS = (Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__)


# Set while the host reads its own copy of what the device had computed long before.
_own_copy = [False]
_READ_COPY = devices.HostCopy.read


@contextmanager
def reading_allowed() -> Iterator[None]:
    """Inside of `nothing_read`."""
    before, _own_copy[0] = _own_copy[0], True
    try:
        yield
    finally:
        _own_copy[0] = before


def _read_own_copy(copy: devices.HostCopy) -> list[Any]:
    with reading_allowed():
        return _READ_COPY(copy)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _own_copy[0]:
            return func(*args, **kwargs)
        if any(issubclass(t, Tensor) and t.__module__.endswith("_api") for t in types):
            return NotImplemented  # a DTensor's: its local operators come by in turn
        name = func.name().removeprefix("aten::")
        given = args[1] if name in _BY_MASK else ()
        masks = [m for m in given if m is not None and m.dtype in (torch.bool, torch.uint8)]
        if name in _READS or masks:
            raise AssertionError(f"{name} reads values back from the device")
        if name in _COPIES:
            raise AssertionError(f"{name}: a tensor is made from values of the host")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # By its name alone: another tensor's device is the accelerator's where there is one.
        places = (*args[1:2], kwargs.get("device")) if func is Tensor.to else ()
        is_move = any(isinstance(place, str) and place.startswith("cpu") for place in places)
        if (func in _METHODS or is_move) and not _own_copy[0]:
            raise AssertionError(f"Tensor.{func.__name__} reads values back from the device")
        # From torch 2.15 on, operators of its own set numbers; before, what `_COPIES` and
        # `_BY_MASK` see did, and all versions are served.
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            raise AssertionError("Tensor.__setitem__ makes a tensor from a value of the host")
        return func(*args, **kwargs)


@contextmanager
def nothing_read() -> Iterator[None]:
    """AssertionError where something inside reads values from tensors, or makes tensors of values.

    What gloo does on its own threads is none of ours. A copy from one tensor to another passes, and
    so does a move to another's device: on a CPU nobody can tell which of them would be the host's.
    """
    with patch.object(devices.HostCopy, "read", _read_own_copy), _Methods(), _Operators():
        yield
