"""The matrix products that Newton-Schulz is written over, one class per backend.

Operands are one matrix ``[m, k]`` or a batch ``[b, m, k]``, of one dtype and on one device,
contiguous or the transpose of what is. Results are written to ``out``, so a step allocates nothing.
``out`` is contiguous, because otherwise a batched product in half precision on a CPU takes a path
that is hundreds of times slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmuon.types import Triple

LEAST_STRIP = 256  # rows, where nothing was measured
MAX_STRIPS = 4


Take = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives memory of a shape and dtype."""
Exchange = Iterable[None]
"""Of a product with other ranks: iterate over it before using the result. Empty for others."""
Whole = Callable[[Tensor, Sequence[Triple], Sequence[int]], Callable[[], None]]
"""From matrices, coefficients and restarts: a function that runs the iteration."""


class MatmulOps:
    """``torch``: plain products on any device, and the interface of the other backends.

    ``held``: the dtype in which matrices are kept between products, None for their own.
    ``batch_rows``: the largest m for which a batched call beats one call per matrix, None for any.
    """

    held: torch.dtype | None = None
    batch_rows: int | None = None

    def general(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None = None,
        *,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Exchange:
        """``out = alpha * a @ b + beta * c``, or ``a @ b``; ``out`` shares no operand's memory."""
        is_matrix = out.ndim == 2
        if c is None:
            (torch.mm if is_matrix else torch.bmm)(a, b, out=out)
        else:
            add = torch.addmm if is_matrix else torch.baddbmm
            add(c, a, b, beta=beta, alpha=alpha, out=out)
        return ()

    symmetric = general
    """The same for a product that is known to be symmetric, so that one triangle is enough."""

    def gram(self, x: Tensor, xt: Tensor, *, out: Tensor) -> Exchange:
        """``out = x @ x^T``."""
        return self.symmetric(x, xt, out=out)

    def twice(self, r: Tensor, z: Tensor, *, spare: Tensor, beta: float) -> Exchange:
        """``r = (r @ p) @ p`` with ``p = z + beta I``, all symmetric and commuting."""
        self.symmetric(r, z, r, out=spare, beta=beta)
        return self.symmetric(spare, z, spare, out=r, beta=beta)

    def shifted(
        self, *operands: Tensor, diag: float, out: Tensor, plain: Tensor, **factors: Any
    ) -> Exchange:
        """`symmetric` of a, b, c into ``plain``, and with ``diag`` on its diagonal into ``out``."""
        self.symmetric(*operands, out=plain, **factors)
        out.copy_(plain).diagonal(dim1=-2, dim2=-1).add_(diag)
        return ()

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        """Bytes that a product of a batch, m <= n, allocates for a moment."""
        return 0

    whole: Whole | None = None
    """Prepares the whole iteration on wide matrices ``[b, m, n]``, in place; None: by products."""


class StripsOps(MatmulOps):
    """``torch_strips``, on a CPU: symmetric products compute the lower block triangle in s strips,
    (s + 1) / 2s of the multiplications, and mirror it, where there are two strips of at least
    ``strip`` rows. Batches of these gain nothing.
    """

    def __init__(self, strip: int = LEAST_STRIP) -> None:
        self._strip = strip
        self.batch_rows = 2 * strip - 1

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *, out: Tensor, **factors: float
    ) -> Exchange:
        # Strips of a transposed operand are not contiguous, and in half precision torch copies such
        # an operand before it multiplies, which costs more than the strips save.
        scattered = a.stride(-1) != 1 and a.dtype.itemsize < 4
        count = strips_in(out.shape[-1], self._strip)
        if count == 1 or scattered:
            return self.general(a, b, c, out=out, **factors)
        if out.ndim == 3:
            for i in range(len(out)):
                self.symmetric(a[i], b[i], None if c is None else c[i], out=out[i], **factors)
            return ()
        strips = _strips(len(out), count)
        for low, high in strips:
            add = None if c is None else c[low:high, :high]
            self.general(a[low:high], b[:, :high], add, out=out[low:high, :high], **factors)
        self.mirror(out, strips)
        return ()

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        _, high = _strips(m, strips_in(m, self._strip))[0]
        return 2 * (m - high) * high * itemsize

    def mirror(self, out: Tensor, strips: Sequence[tuple[int, int]]) -> None:
        """Fill the blocks above the diagonal from those below."""
        for low, high in strips[:-1]:
            # Of contiguous blocks torch transposes tile by tile, two to three times as fast.
            out[low:high, high:].copy_(out[high:, low:high].contiguous().mT.contiguous())


def strips_in(rows: int, strip: int) -> int:
    """The number of strips of a symmetric product; 1: it is computed as a whole.

    >>> [strips_in(rows, 256) for rows in (511, 512, 1024, 4096)]
    [1, 2, 4, 4]
    """
    return max(1, min(MAX_STRIPS, rows // strip))


def _strips(rows: int, count: int) -> list[tuple[int, int]]:
    """Row ranges of about one height.

    >>> _strips(700, 2)
    [(0, 350), (350, 700)]
    """
    return list(pairwise(rows * i // count for i in range(count + 1)))


class RoundedOps(StripsOps):
    """``torch_rounded``: products in float32, each result rounded to ``dtype``, as a half-precision
    unit computes. For CPUs without one, where torch's emulation takes 10 to 100 times as long."""

    held = torch.float32

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def temporary_bytes(self, b: int, m: int, n: int, itemsize: int) -> int:
        b = b if m < 2 * self._strip else 1
        return max(b * m * n * itemsize, super().temporary_bytes(b, m, n, 4))

    def general(self, *operands: Tensor | None, out: Tensor, **factors: float) -> Exchange:  # type: ignore[override]
        super().general(*operands, out=out, **factors)  # type: ignore[arg-type]
        out.copy_(out.to(self._dtype))
        return ()

    def shifted(self, *operands: Tensor, out: Tensor, **how: Any) -> Exchange:
        super().shifted(*operands, out=out, **how)
        out.copy_(out.to(self._dtype))
        return ()


class TritonOps(MatmulOps):
    """``triton``: symmetric products by triangles of tiles, see `triton_syrk.symm_mm`; by torch
    where a size is no multiple of 16, which the kernel would copy element by element.

    Factors of m x m are symmetric: the second one is passed as its own transpose, whose columns
    lie together, as tensor cores have it best.
    """

    def __init__(self, multiply: Callable[..., None]) -> None:
        self._multiply = multiply

    def symmetric(self, a: Tensor, b: Tensor, c: Tensor | None = None, **how: Any) -> Exchange:
        if not is_even(*a.shape[-2:]):
            return self.general(a, b, c, **how)
        self._multiply(a, b, c, **how)
        return ()

    def gram(self, x: Tensor, xt: Tensor, *, out: Tensor) -> Exchange:
        return self.symmetric(x, x if is_even(*x.shape[-2:]) else xt, out=out)

    def shifted(self, *operands: Tensor, **how: Any) -> Exchange:
        is_ours = is_even(*operands[0].shape[-2:])
        return (self.symmetric if is_ours else super().shifted)(*operands, **how)


def is_even(*sizes: int) -> bool:
    """Whether Triton's products take matrices of these sizes."""
    return not any(size % 16 for size in sizes)


class WholeOps(MatmulOps):
    """``triton_small``: the whole iteration of a matrix in one program."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole


@dataclass(frozen=True, slots=True)
class Peers:
    """The ``count`` ranks that hold slices of the same matrices; this one is number ``index``.

    ``exchange(to, source, tag)`` takes two tensors ``[count - 1, n]`` with a row for each of the
    others, in order. It sends row j of ``source`` to the j-th of them, and receives into row j of
    ``to``, which is complete when the result's ``wait`` returns.
    """

    index: int
    count: int
    exchange: Callable[[Tensor, Tensor, str], Any]


SUM_DTYPE = {torch.bfloat16: torch.float32}
"""The dtype in which parts of a sum are sent, where it is not that of the iteration: rounding each
part to bfloat16 changes an update more than rounding the sum does (docs/co-owners.md)."""


class SliceOps(MatmulOps):
    """Products of slices ``[b, m, w]`` of matrices, where co-owners hold the other columns.

    The lower block triangle of an m x m matrix is cut into strips of rows, which are dealt out so
    that all k co-owners have about as much of it (k = 2; the upper triangle mirrors the lower)::

        0 . . .      `gram`: each sends every other one its part of their strips, adds up its own
        1 1 . .      strips in float32, and sends the sums to all. So every bit of R comes from one
        1 1 1 .      rank, and R and all that follows from it are the same on all, in half the
        0 0 0 0      bytes. (Two co-owners send each other everything, which takes one message, and
                     add in one order.)

    With ``split``, `symmetric` computes its own strips and sends them to all. ``inner`` multiplies.
    Messages are in ``dtype``, in which the iteration runs; for parts of sums see `SUM_DTYPE`.
    """

    def __init__(
        self,
        inner: MatmulOps,
        peers: Peers,
        split: bool,
        batch: int,
        rows: int,
        dtype: torch.dtype,
        take: Take,
    ) -> None:
        self.held, self._inner, self._peers, self._split = inner.held, inner, peers, split
        k, me = peers.count, peers.index
        count = 2 * k * strips_in(rows, 2 * k * LEAST_STRIP)
        strips = _strips(rows, count)
        by_rank = [  # from both ends, in turn
            [strips[i] for i in range(count) if min(i, count - 1 - i) % k == j] for j in range(k)
        ]
        self._own = by_rank[me]
        self._others = [strips for j, strips in enumerate(by_rank) if j != me]
        self._batch, self._every = batch, strips
        most = max(self._numel(mine) for mine in by_rank)
        # Messages: strips of this rank, for all the others, and theirs.
        sent, came = self._rows = take((k - 1, most), dtype), take((k - 1, most), dtype)
        self._came = [self._tiles(row, s) for row, s in zip(came, self._others, strict=True)]
        self._mine = self._made = self._tiles(sent[0], self._own)
        if self.held is not None:
            self._made = self._tiles(take((most,), self.held), self._own)
        # Parts of sums, for the others and from them; and sums.
        kind = SUM_DTYPE.get(dtype, dtype)
        is_wide = kind is not dtype
        self._parts = self._rows
        if is_wide or k == 2:
            most = self._numel(strips) if k == 2 else most
            self._parts = take((k - 1, most), kind), take((k - 1, most), kind)
        self._gram = take((batch, rows, rows), kind) if is_wide else None
        self._sum = take((most,), torch.promote_types(dtype, torch.float32))

    def _numel(self, strips: Sequence[tuple[int, int]]) -> int:
        return self._batch * sum((high - low) * high for low, high in strips)

    def _tiles(self, flat: Tensor, strips: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Views ``[b, high - low, high]`` of consecutive strips in a buffer."""
        shapes = [(self._batch, high - low, high) for low, high in strips]
        parts = flat[: self._numel(strips)].split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _each(
        self, product: Callable[..., Exchange], *operands: Tensor | None, **how: Any
    ) -> Exchange:
        """A batched product; on a CPU matrix by matrix."""
        if self._batch > 1 and not how["out"].is_cpu:
            return product(*operands, **how)
        tensors = {name: value for name, value in how.items() if isinstance(value, Tensor)}
        for i in range(len(how["out"])):
            mine = {name: value[i] for name, value in tensors.items()}
            product(*(None if a is None else a[i] for a in operands), **(how | mine))
        return ()

    def general(self, *operands: Tensor | None, **how: Any) -> Exchange:  # type: ignore[override]
        return self._each(self._inner.general, *operands, **how)

    def gram(self, x: Tensor, xt: Tensor, *, out: Tensor) -> Iterator[None]:
        part = out if self._gram is None else self._gram
        if self._gram is None:
            self._each(self._inner.gram, x, xt, out=out)
        elif not x.is_cpu:
            torch.bmm(x, xt, out_dtype=part.dtype, out=part)
        else:
            wide = x.float()
            self._each(StripsOps().symmetric, wide, wide.mT, out=part)
        (sent, came), is_pair = self._parts, self._peers.count == 2
        for row, strips in zip(sent, [self._every] if is_pair else self._others, strict=True):
            torch._foreach_copy_(self._tiles(row, strips), _lower(part, strips))
        work = self._peers.exchange(came, sent, "gram")
        yield
        work.wait()
        strips = self._every if is_pair else self._own
        tiles = self._tiles(self._sum, strips)
        torch.sum(came, 0, dtype=self._sum.dtype, out=self._sum)
        torch._foreach_add_(tiles, _lower(part, strips))
        if is_pair:
            self._unpack(out, strips, tiles)
            self._round(out)
            return
        torch._foreach_copy_(self._mine, tiles)
        yield from self._gathered(out, self._mine)

    def symmetric(self, *operands: Tensor | None, **how: Any) -> Exchange:  # type: ignore[override]
        if not self._split:
            return self._each(self._inner.symmetric, *operands, **how)
        return self._shared(operands, how.pop("out"), how)

    def twice(self, r: Tensor, z: Tensor, *, spare: Tensor, beta: float) -> Exchange:
        if not self._split:
            return super().twice(r, z, spare=spare, beta=beta)
        for low, high in self._own:  # what (R P) P needs of R P
            own = r[:, low:high]
            self.general(own, z, own, out=spare[:, low:high], beta=beta)
        return self._shared((spare, z, spare), r, {"beta": beta})

    def shifted(
        self, *operands: Tensor, diag: float, out: Tensor, plain: Tensor, **how: Any
    ) -> Iterator[None]:
        if not self._split:
            how |= {"diag": diag, "out": out, "plain": plain}
            yield from self._each(self._inner.shifted, *operands, **how)
            return
        yield from self._shared(operands, plain, how)
        out.copy_(plain).diagonal(dim1=-2, dim2=-1).add_(diag)
        self._round(out)

    def _round(self, values: Tensor) -> None:
        if self.held is not None:
            values.copy_(values.to(self._rows[0].dtype))

    def _shared(
        self, operands: Sequence[Tensor | None], out: Tensor, how: dict[str, Any]
    ) -> Iterator[None]:
        a, b, c = (*operands, None)[:3]
        assert a is not None and b is not None
        for (low, high), tile in zip(self._own, self._made, strict=True):
            add = None if c is None else c[:, low:high, :high]
            self.general(a[:, low:high], b[:, :, :high], add, out=tile, **how)
        if self.held is not None:
            torch._foreach_copy_(self._mine, self._made)
        yield from self._gathered(out, self._made)

    def _gathered(self, out: Tensor, mine: list[Tensor]) -> Iterator[None]:
        """Collect all strips in ``out``; the first row that is sent holds those of this rank."""
        sent, came = self._rows
        for row in sent[1:]:
            row.copy_(sent[0])
        work = self._peers.exchange(came, sent, "rows")
        self._unpack(out, self._own, mine)
        yield
        work.wait()
        for strips, tiles in zip(self._others, self._came, strict=True):
            self._unpack(out, strips, tiles)

    def _unpack(self, out: Tensor, strips: Sequence[tuple[int, int]], tiles: list[Tensor]) -> None:
        """Write strips of the lower triangle, and their mirror images."""
        own = _lower(out, strips)
        torch._foreach_copy_(own, tiles)
        above = [out[:, :low, low:high] for low, high in strips if low]
        below = [tile.mT[:, :low] for (low, _), tile in zip(strips, own, strict=True) if low]
        if above:
            torch._foreach_copy_(above, below)


def _lower(square: Tensor, strips: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [square[:, low:high, :high] for low, high in strips]
