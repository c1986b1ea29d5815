"""Whether torch's matrix products are given memory that they are fast on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ADDED = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class Products(TorchDispatchMode):
    """Notes matrix products, and in ``slow`` those that take a slow path on a CPU.

    A batched product in half precision is hundreds of times slower where its result, or what is
    added to it, is not contiguous; a factor may be the transposed view of what is. A product of
    two matrices takes leading dims, too, but no other strides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.batched = self.tall = 0
        self.slow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (added := _ADDED.get(func.overloadpacket)) is not None:
            factors, out = args[added:], kwargs.get("out")
            written = [*args[:added], *([] if out is None else [out])]
            is_batched = factors[0].ndim == 3
            self.count += 1
            self.batched += is_batched
            self.tall += out is not None and out.shape[-2] > out.shape[-1]
            if is_batched:
                good = all(t.is_contiguous() for t in written)
                good = good and all(t.is_contiguous() or t.mT.is_contiguous() for t in factors)
            else:
                good = all(t.stride(-1) == 1 for t in written)
                good = good and all(1 in t.stride() for t in factors)
            if not good:
                layouts = [f"{[*t.shape]} by {t.stride()}" for t in (*factors, *written)]
                self.slow.append(f"{func}: {layouts}")
        return func(*args, **kwargs)
