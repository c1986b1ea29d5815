"""Symmetric products in Triton, at half the multiplications: one triangle of tiles; and host code
shared by all Triton kernels.

This file and `triton_lists` are imported only if Triton is installed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.devices import current_device, of

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
GROUP = tl.constexpr(8)
"""Tile rows computed together, so that concurrent programs share their operands in L2."""

# Offsets inside one tile fit into 32 bits while strides stay below this.
_WIDE_STRIDE = 2**22
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_unavailable(device: torch.device | str) -> str | None:
    """Return None if these kernels run on a device, else the reason and what to do about it."""
    device = torch.device(device)
    if (reason := of(device).why_no_triton()) is not None:
        return reason
    # Probe with and without an index at once, so that no later probe has to wait for the device.
    return _probed(device if device.index is not None else current_device(device.type))


@triton.jit
def _probe(ptr):
    tl.store(ptr, tl.load(ptr) + 1.0)


@cache
def _probed(device: torch.device) -> str | None:
    """Run one kernel, because only that reveals a missing compiler, driver or header."""
    x = torch.ones(1, device=device)
    with of(device).current():
        _probe[(1,)](x)
    return None if float(x) == 2.0 else f"a kernel of one addition gave {float(x)} for 1 + 1"


def source_hash() -> str:
    """Return twelve hexadecimal digits of the kernels' source, a key for measurements."""
    files = sorted(Path(__file__).parent.glob("triton_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a batch; 0 between matrices if there is only one."""
    return x.stride() if len(x) > 1 else (0, *x.stride()[1:])


def check(shape: tuple[int, ...], *tensors: Tensor) -> None:
    """Check tensors before launches: kernels use one shape, and would read others out of bounds."""
    for x in tensors:
        if x.shape != shape or x.device != tensors[0].device or x.dtype not in _DTYPES:
            raise ValueError(
                f"a Triton kernel needs {list(shape)} in float16, bfloat16 or float32 on "
                f"{tensors[0].device}, found {list(x.shape)} {x.dtype} on {x.device}"
            )


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile sizes of a product: ``block`` rows and columns of the result, from ``block_k``
    columns of the operands at a time.

    >>> str(Tile(128, 64, warps=4, stages=3))
    '128x64-w4-s3'
    """

    block: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block}x{self.block_k}-w{self.warps}-s{self.stages}"


TILES = (
    Tile(128, 64, warps=8, stages=3),
    Tile(128, 64, warps=4, stages=3),
    Tile(128, 64, warps=8, stages=4),
    Tile(64, 64, warps=4, stages=4),
    Tile(64, 128, warps=4, stages=3),
)
"""Tiles for float16 and bfloat16; the first is the default for large matrices."""
TILES_FLOAT32 = (Tile(64, 32, warps=8, stages=3),)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype = torch.float16) -> tuple[Tile, ...]:
    """Return the tiles worth timing on a GPU of this compute capability: those that spill no
    registers there with any epilogue, in the tested versions of Triton."""
    if dtype == torch.float32:
        return TILES_FLOAT32
    # With mma.sync a tile of 128 x 128 takes all registers of 4 warps, and some more.
    for_all = tuple(tile for tile in TILES if tile.warps * 16 >= tile.block)
    return TILES if capability[0] == 9 else for_all


def default_tile(m: int, dtype: torch.dtype) -> Tile:
    """Return a tile that runs everywhere, for shapes that have not been timed."""
    if dtype == torch.float32:
        return TILES_FLOAT32[0]
    return TILES[0] if m > 1024 else TILES[3]


def parse_tile(text: str) -> Tile:
    """Return the tile with this text. Raises ValueError if no device is offered such a tile."""
    by_text = {str(tile): tile for tile in TILES + TILES_FLOAT32}
    if text not in by_text:
        raise ValueError(f"a tile is one of {', '.join(by_text)}, found {text!r}: plan again")
    return by_text[text]


@triton.jit
def triangle_row(index):
    """Return the row of entry ``index`` in a lower triangle numbered row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # float32 is off by at most one while index < 2^31.
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@triton.jit
def tile_of(index, tiles):
    """Return (row, column) of a tile of the lower triangle: GROUP rows at a time, by columns."""
    first = triangle_row(index) // GROUP * GROUP
    rows = tl.minimum(tiles - first, GROUP)
    inside = index - first * (first + 1) // 2
    # Left of the diagonal block columns are full; inside it tiles are numbered row by row.
    corner = inside - first * rows
    corner_row = triangle_row(tl.maximum(corner, 0))
    corner_col = corner - corner_row * (corner_row + 1) // 2
    row = tl.where(corner < 0, first + inside % rows, first + corner_row)
    col = tl.where(corner < 0, inside // rows, first + corner_col)
    return row, col


@triton.jit
def _inside(value, rows_left, cols_left):
    down = tl.arange(0, value.shape[0])[:, None]
    right = tl.arange(0, value.shape[1])[None, :]
    return (down < rows_left) & (right < cols_left)


@triton.jit
def _load(pointers, rows_left, cols_left, MASK: tl.constexpr):
    if MASK:
        return tl.load(pointers, mask=_inside(pointers, rows_left, cols_left), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(pointers, value, rows_left, cols_left, MASK: tl.constexpr):
    if MASK:
        tl.store(pointers, value, mask=_inside(value, rows_left, cols_left))
    else:
        tl.store(pointers, value)


@triton.jit
def _lower(value):
    index = tl.arange(0, value.shape[0])
    return tl.where(index[:, None] >= index[None, :], value, tl.trans(value))


@triton.jit
def _dot(left, right, total):
    """Compute ``total + left @ right`` in float32."""
    if INTERPRETED:  # the interpreter's bfloat16 products are wrong
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _product(total, a, b, a_step, b_step, k, rows_left, cols_left, MASK: tl.constexpr):
    """Compute ``total + A @ B`` in float32, from pointers to the first columns and rows."""
    for start in range(0, k, a.shape[1]):
        left = _load(a, rows_left, k - start, MASK)
        top = _load(b, k - start, cols_left, MASK)
        total = _dot(left, top, total)
        a += a.shape[1] * a_step
        b += b.shape[0] * b_step
    return total


@triton.jit
def _at(ptr, down, right, row_stride, col_stride):
    return ptr + (down[:, None] * row_stride + right[None, :] * col_stride)


@triton.jit
def _store_both(
    out, plain, value, rows_left, cols_left, HAS_PLAIN: tl.constexpr, MASK: tl.constexpr
):
    _store(out, value, rows_left, cols_left, MASK)
    if HAS_PLAIN:
        _store(plain, value, rows_left, cols_left, MASK)


@triton.jit
def _store_on_diagonal(
    out, plain, value, diag, rows_left, HAS_PLAIN: tl.constexpr, MASK: tl.constexpr
):
    """Store the lower half of a diagonal tile, mirrored: rounding differs between its halves."""
    index = tl.arange(0, value.shape[0])
    on_diagonal = index[:, None] == index[None, :]
    dtype = out.dtype.element_ty
    half: tl.constexpr = dtype.primitive_bitwidth == 16
    if HAS_PLAIN and half:
        # As a vector, so that the float32 tile need not be kept until the second result. (Not in
        # float32: there Triton 3.6 computed wrong elements of cut tiles on an H100 this way.)
        shifted = tl.sum(tl.where(on_diagonal, value, 0.0), axis=1) + diag
        result = _lower(value.to(dtype))
        _store(plain, result, rows_left, rows_left, MASK)
        result = tl.where(on_diagonal, shifted.to(dtype)[:, None], result)
    else:
        if HAS_PLAIN:
            _store(plain, _lower(value.to(dtype)), rows_left, rows_left, MASK)
        result = _lower((value + tl.where(on_diagonal, diag, 0.0)).to(dtype))
    _store(out, result, rows_left, rows_left, MASK)


@triton.jit
def symm_kernel(
    a_ptr, bt_ptr, c_ptr, out_ptr, plain_ptr, m, k,
    a_batch, a_row, a_col, bt_batch, bt_row, bt_col, c_batch, c_row, out_batch, out_row,
    alpha, share, diag,
    HAS_C: tl.constexpr, HAS_PLAIN: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``alpha * (share * c + a @ bt^T) + diag * I`` in the lower triangle of a
    matrix, with its mirror image; see `symm_mm`."""
    tiles = tl.cdiv(m, BLOCK)
    triangle = tiles * (tiles + 1) // 2
    program = tl.program_id(0)
    batch, index = program // triangle, program % triangle
    row, col = tile_of(index, tiles)
    down, right = row.to(tl.int64) * BLOCK, col.to(tl.int64) * BLOCK
    rows_left, cols_left = m - row * BLOCK, m - col * BLOCK
    span, span_k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    if WIDE:  # strides with which offsets inside one tile exceed 2^31
        span, span_k = span.to(tl.int64), span_k.to(tl.int64)
    far = batch.to(tl.int64)
    if HAS_C:
        # The sum begins with c, because adding c afterwards would need more registers.
        c = _at(c_ptr + far * c_batch + down * c_row + right, span, span, c_row, 1)
        value = share * _load(c, rows_left, cols_left, MASK).to(tl.float32)
    else:
        value = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    a = _at(a_ptr + far * a_batch + down * a_row, span, span_k, a_row, a_col)
    b = _at(bt_ptr + far * bt_batch + right * bt_row, span_k, span, bt_col, bt_row)
    value = alpha * _product(value, a, b, a_col, bt_col, k, rows_left, cols_left, MASK)
    out_ptr += far * out_batch
    plain_ptr += far * out_batch
    inside = span[:, None] * out_row + span[None, :]
    direct = down * out_row + right
    # Pointers are made in each branch: made before, they would take the registers of a program.
    if row == col:
        out, plain = out_ptr + direct + inside, plain_ptr + direct + inside
        _store_on_diagonal(out, plain, value, diag, rows_left, HAS_PLAIN, MASK)
    else:
        result = value.to(out_ptr.dtype.element_ty)
        out, plain = out_ptr + direct + inside, plain_ptr + direct + inside
        _store_both(out, plain, result, rows_left, cols_left, HAS_PLAIN, MASK)
        mirrored = right * out_row + down
        out, plain = out_ptr + mirrored + inside, plain_ptr + mirrored + inside
        _store_both(out, plain, tl.trans(result), cols_left, rows_left, HAS_PLAIN, MASK)


def symm_mm(
    a: Tensor,
    bt: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    diag: float = 0.0,
    plain: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Compute ``out = alpha * a @ bt^T + beta * c + diag * I``, known to be symmetric.

    Only tiles of the lower triangle are computed, and each is stored twice, so the result is
    exactly symmetric. ``plain`` gets the same without ``diag``. `a` and `bt` are ``[m, k]`` or
    ``[b, m, k]`` of any strides, float16, bfloat16 or float32 (as IEEE float32, not TF32); `c`,
    `out` and `plain` are ``[m, m]`` or ``[b, m, m]`` with contiguous rows, the latter two of equal
    dtype and strides. Sums and epilogue are float32 and rounded once. `c` is not read if beta is 0.
    A result shares no memory with an operand or with the other result.
    """

    def as_batch(x: Tensor) -> Tensor:
        return x if x.ndim == 3 else x[None]

    a, bt, out = map(as_batch, (a, bt, out))
    batch, m, k = a.shape
    held = out if c is None or beta == 0 else as_batch(c)  # `out` as a placeholder is not read
    kept = out if plain is None else as_batch(plain)
    check(a.shape, a, bt)
    check((batch, m, m), out, held, kept)
    assert a.dtype == bt.dtype and out.dtype == kept.dtype and out.stride() == kept.stride()
    assert m == 1 or out.stride(2) == held.stride(2) == 1, "rows are contiguous"
    if batch == 0 or m == 0:
        return
    tile = tile or default_tile(m, a.dtype)
    blocks = triton.cdiv(m, tile.block)
    inner = [s for x in (a, bt, held, out) for s in x.stride()[1:]]
    # With a factor of zero only c remains.
    scale, share, depth = (float(alpha), beta / alpha, k) if alpha else (1.0, float(beta), 0)
    with of(out.device).current():
        symm_kernel[(batch * blocks * (blocks + 1) // 2,)](
            *(a, bt, held, out, kept, m, depth, *strides(a), *strides(bt)),
            *(*strides(held)[:2], *strides(out)[:2], scale, share, float(diag)),
            HAS_C=held is not out,
            HAS_PLAIN=plain is not None,
            MASK=bool(m % tile.block or k % tile.block_k),
            WIDE=max(inner) >= _WIDE_STRIDE,
            BLOCK=tile.block,
            BLOCK_K=tile.block_k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
