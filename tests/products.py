"""Whether torch's matrix products are given memory that they are fast on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}


class Products(TorchDispatchMode):
    """Notes matrix products, and in ``slow`` those that take a slow path on a CPU.

    A batched product in half precision is hundreds of times slower where its result, or what is
    added to it, is not contiguous; a factor may be the transposed view of what is. A product of
    two matrices takes leading dims, too, but no other strides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.batched = 0
        self.tall = 0
        self.slow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in _PRODUCTS:
            added = list(args[: _PRODUCTS[packet]])
            factors = list(args[_PRODUCTS[packet] :])
            out = kwargs.get("out")
            self.count += 1
            self.batched += factors[0].ndim == 3
            self.tall += out is not None and out.shape[-2] > out.shape[-1]
            where = [] if out is None else [out]
            if factors[0].ndim == 3:
                good = all(t.is_contiguous() for t in (*added, *where)) and all(
                    t.is_contiguous() or t.mT.is_contiguous() for t in factors
                )
            else:
                good = all(1 in t.stride() for t in factors) and all(
                    t.stride(-1) == 1 for t in (*added, *where)
                )
            if not good:
                self.slow.append(f"{func}: {[_layout(t) for t in (*added, *factors, *where)]}")
        return func(*args, **kwargs)


def _layout(t: Tensor) -> str:
    return f"{list(t.shape)} by {t.stride()}"
