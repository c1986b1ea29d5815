"""Newton-Schulz by any products, and whether these are given memory that they are fast on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon.kernels.choice import segments_of
from dmuon.kernels.newton_schulz import prepared, resolve_coefficients
from dmuon.kernels.ops import MatmulOps
from dmuon.types import KernelChoice

POLAR = resolve_coefficients("polar_express", 5)

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


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative distance in Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def by_hand(x: Tensor, triples: Any = POLAR) -> Tensor:
    """The standard form in float64 on normalized matrices."""
    x = x.double()
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def iterated(x: Tensor, restarts: tuple[int, ...], ops: MatmulOps | None = None) -> Tensor:
    """The Gram form with these restarts, safe or not, on normalized ``[b, m, n]`` in place."""
    segments = segments_of(KernelChoice("gram", restarts, "torch", ""), len(POLAR))
    new = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
    return prepared(x, POLAR, segments, ops or MatmulOps(), new)()
