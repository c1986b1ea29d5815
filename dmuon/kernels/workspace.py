"""Memory that Newton-Schulz computes in, taken once and used again at every step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dmuon.kernels.recent import Recent

__all__ = ["Workspace", "aligned_bytes"]

Shape = tuple[int, ...]
_ALIGNMENT = 256
_VIEWS = 4096


def aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes that `Workspace.take` uses up for a tensor.

    >>> aligned_bytes((3, 5), torch.float32)
    256
    """
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class Workspace:
    """A stack of tensors in one piece of memory.

    Equal sequences of `take` give equal addresses, which is what a CUDA graph needs. ``grown``
    counts how often more had to be allocated after the first time, ``beside`` how many tensors
    did not fit and got memory of their own.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.grown = 0
        self.beside = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._known: Recent[tuple[int, Shape, torch.dtype], tuple[int, Tensor]] = Recent(_VIEWS)
        self._top = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": Recent(_VIEWS)}  # a copy has views of its own memory

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Have at least ``nbytes``; nothing that was taken before is valid afterwards."""
        assert self._top == 0, "the workspace is in use"
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes > self.nbytes:
            self.grown += self.nbytes > 0
            self._known.clear()
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)  # free it first
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def take(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, valid until the frame that it was taken in ends."""
        key = (self._top, shape, dtype)
        known = self._known.get(key)
        if known is not None:  # the same call as in an earlier step
            self._top, tensor = known
            return tensor
        end = self._top + aligned_bytes(shape, dtype)
        if end > self.nbytes:
            # Beyond what was reserved: correct, but an allocation of its own.
            self.beside += 1
            return torch.empty(shape, dtype=dtype, device=self.device)
        flat = self._memory[self._top : self._top + prod(shape) * dtype.itemsize]
        tensor = flat.view(dtype).view(shape)
        self._top = end
        self._known.add(key, (end, tensor))
        return tensor

    def frame(self) -> Frame:
        """A context; what is taken inside is given back at its end."""
        return Frame(self)


class Frame:
    """See `Workspace.frame`. A class, for entering a generator costs as much as a small product."""

    __slots__ = ("_space", "_top")

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._top = 0

    def __enter__(self) -> None:
        self._top = self._space._top

    def __exit__(self, *_: object) -> None:
        self._space._top = self._top
