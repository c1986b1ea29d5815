"""The elementwise work around Newton-Schulz, in single passes over lists of tensors.

    norms     reads momentum and gradients for the norms of operands; changes nothing
    advance   reads them again; writes momentum in place and scaled operands to send buffers
    update    writes weights in place, with their masters
    copy      copies parts of matrices, one side of which may be transposed

A launch takes all tensors of the same dtypes, from a table of their addresses in the memory of the
device. Tensors are contiguous, so each is a vector; program ``p`` of the ``parts`` of a tensor does
its tiles p, p + parts, ... A mask ``stays`` is bool, one per tensor or 0-d for all: tensors that
stay are neither read nor written.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon.devices import of
from dmuon.kernels.triton_syrk import check
from dmuon.tensors import Tensors
from dmuon.types import grouped

_TILE = 2048  # elements that a program takes at a time
_NORM_TILE = 1024  # the same for sums in float64
_BLOCK = 64  # rows and columns of a copied tile
_WARPS = 4
_TILES = 16  # of the largest tensor per program, as long as there are few programs
_MAX_PARTS = 1024  # per tensor
_TABLES = 1024  # kept tables; each has a few numbers per tensor

Rows = tuple[tuple[int, ...], ...]
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# ---- shared by kernels ---------------------------------------------------------------------


@triton.jit
def _entry(table_ptr, row, count, tensor, ALIGNED: tl.constexpr):
    value = tl.load(table_ptr + row * count + tensor)
    return tl.multiple_of(value, 16) if ALIGNED else value


@triton.jit
def _pointer(table_ptr, row, count, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + row * count + tensor).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _place(tile, numel, TILE: tl.constexpr):
    """Return the offsets of a tile's elements and its mask; ``tile`` is 64 bits wide."""
    at = tile * TILE + tl.arange(0, TILE)
    return at, at < numel


@triton.jit
def _read(pointer, at, fits):
    return tl.load(pointer + at, mask=fits, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, at, value, fits):
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=fits)


@triton.jit
def _tiles(stays_ptr, step, tensor, numel, HAS_STAYS: tl.constexpr, TILE: tl.constexpr):
    """Return the number of tiles of a tensor; none if it stays."""
    tiles = (numel + TILE - 1) // TILE
    if HAS_STAYS:
        tiles = tl.where(tl.load(stays_ptr + tensor * step) == 0, tiles, 0)
    return tiles


@triton.jit
def _lerp(start, end, weight):
    """Interpolate as torch.lerp does: exact at both ends."""
    near = start + weight * (end - start)
    return tl.where(weight < 0.5, near, end - (end - start) * (1.0 - weight))


@triton.jit
def _advanced(held, grad, momentum, weight, WORKING: tl.constexpr, EMA: tl.constexpr):
    """Return momentum after a step, rounded to the dtype in which it is computed."""
    if EMA:
        held = _lerp(held, grad, weight)
    else:
        held = held * momentum + weight * grad
    return held.to(WORKING).to(tl.float32)


@triton.jit
def _operand(
    held, grad, momentum, WORKING: tl.constexpr, EMA: tl.constexpr, NESTEROV: tl.constexpr
):
    """Return the operand of Newton-Schulz, from momentum after its step."""
    if not NESTEROV:
        return held
    elif EMA:
        held = _lerp(grad, held, momentum)
    else:
        held = grad + momentum * held
    return held.to(WORKING).to(tl.float32)


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def norms_kernel(
    table_ptr, sums_ptr, count, parts, momentum, weight,
    HELD: tl.constexpr, GRAD: tl.constexpr, WORKING: tl.constexpr,
    EMA: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum squares of operands and of gradients, ``[2, count, parts]`` in float64, where no square
    overflows."""
    program = tl.program_id(0)
    tensor, part = program // parts, program % parts
    numel = _entry(table_ptr, 0, count, tensor, ALIGNED)
    held_ptr = _pointer(table_ptr, 1, count, tensor, HELD, ALIGNED)
    grad_ptr = _pointer(table_ptr, 2, count, tensor, GRAD, ALIGNED)
    total = tl.zeros((TILE,), tl.float64)
    given = tl.zeros((TILE,), tl.float64)
    for tile in range(part, (numel + TILE - 1) // TILE, parts):
        at, fits = _place(tile, numel, TILE)
        grad = _read(grad_ptr, at, fits)
        given += grad.to(tl.float64) * grad.to(tl.float64)
        grad = grad.to(WORKING).to(tl.float32)
        held = _advanced(_read(held_ptr, at, fits), grad, momentum, weight, WORKING, EMA)
        operand = _operand(held, grad, momentum, WORKING, EMA, NESTEROV).to(tl.float64)
        total += operand * operand
    tl.store(sums_ptr + program, tl.sum(total, axis=0))
    tl.store(sums_ptr + count * parts + program, tl.sum(given, axis=0))


@triton.jit
def advance_kernel(
    table_ptr, scales_ptr, stays_ptr, stays_step, count, parts, momentum, weight,
    HELD: tl.constexpr, GRAD: tl.constexpr, OUT: tl.constexpr, WORKING: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_STAYS: tl.constexpr, EMA: tl.constexpr, NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write momentum, and operands times their scales; operands of zero where momentum stays."""
    program = tl.program_id(0)
    tensor, part = program // parts, program % parts
    numel = _entry(table_ptr, 0, count, tensor, ALIGNED)
    held_ptr = _pointer(table_ptr, 1, count, tensor, HELD, ALIGNED)
    grad_ptr = _pointer(table_ptr, 2, count, tensor, GRAD, ALIGNED)
    tiles = _tiles(stays_ptr, stays_step, tensor, numel, HAS_STAYS, TILE)
    if HAS_OUT:
        out_ptr = _pointer(table_ptr, 3, count, tensor, OUT, ALIGNED)
        scale = tl.load(scales_ptr + tensor)
        if HAS_STAYS:
            every = (numel + TILE - 1) // TILE
            for tile in range(tiles + part, every, parts):
                at, fits = _place(tile, numel, TILE)
                _write(out_ptr, at, tl.zeros((TILE,), tl.float32), fits)
    for tile in range(part, tiles, parts):
        at, fits = _place(tile, numel, TILE)
        grad = _read(grad_ptr, at, fits).to(WORKING).to(tl.float32)
        held = _advanced(_read(held_ptr, at, fits), grad, momentum, weight, WORKING, EMA)
        _write(held_ptr, at, held, fits)
        if HAS_OUT:
            operand = _operand(held, grad, momentum, WORKING, EMA, NESTEROV)
            _write(out_ptr, at, operand * scale, fits)


@triton.jit
def update_kernel(
    table_ptr, stays_ptr, stays_step, count, parts, decay, lr,
    TARGET: tl.constexpr, UPDATE: tl.constexpr, WEIGHT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_STAYS: tl.constexpr, CAUTIOUS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute ``target = target * decay - lr * update``, rounded once, also into ``weight``. A
    target that does not round to its weight takes the weight first."""
    program = tl.program_id(0)
    tensor, part = program // parts, program % parts
    numel = _entry(table_ptr, 0, count, tensor, ALIGNED)
    target_ptr = _pointer(table_ptr, 1, count, tensor, TARGET, ALIGNED)
    update_ptr = _pointer(table_ptr, 2, count, tensor, UPDATE, ALIGNED)
    if HAS_WEIGHT:
        weight_ptr = _pointer(table_ptr, 3, count, tensor, WEIGHT, ALIGNED)
    tiles = _tiles(stays_ptr, stays_step, tensor, numel, HAS_STAYS, TILE)
    for tile in range(part, tiles, parts):
        at, fits = _place(tile, numel, TILE)
        target, update = _read(target_ptr, at, fits), _read(update_ptr, at, fits)
        if HAS_WEIGHT:
            weight = _read(weight_ptr, at, fits)
            target = tl.where(target.to(WEIGHT).to(tl.float32) == weight, target, weight)
        if CAUTIOUS:
            decayed = tl.where(target * update >= 0.0, target * decay, target)
        else:
            decayed = target * decay
        target = decayed - lr * update
        _write(target_ptr, at, target, fits)
        if HAS_WEIGHT:
            _write(weight_ptr, at, target, fits)


@triton.jit
def copy_kernel(
    table_ptr, count, parts,
    TYPE: tl.constexpr, TURNED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy ``to[i, j] = source[i, j]``; ``to`` has contiguous rows, ``source`` too or, if
    ``TURNED``, contiguous columns. A tile is loaded in one order and stored in the other, so that
    both access whole lines of memory."""
    program = tl.program_id(0)
    tensor, part = program // parts, program % parts
    rows = _entry(table_ptr, 0, count, tensor, ALIGNED)
    cols = _entry(table_ptr, 1, count, tensor, ALIGNED)
    to_ptr = _pointer(table_ptr, 2, count, tensor, TYPE, ALIGNED)
    source_ptr = _pointer(table_ptr, 3, count, tensor, TYPE, ALIGNED)
    to_step = _entry(table_ptr, 4, count, tensor, ALIGNED)
    source_step = _entry(table_ptr, 5, count, tensor, ALIGNED)
    across = (cols + BLOCK - 1) // BLOCK
    for tile in range(part, across * ((rows + BLOCK - 1) // BLOCK), parts):
        i = (tile // across * BLOCK + tl.arange(0, BLOCK))[:, None]
        j = (tile % across * BLOCK + tl.arange(0, BLOCK))[None, :]
        fits = (i < rows) & (j < cols)
        if TURNED:
            value = tl.load(source_ptr + j * source_step + i, mask=fits, other=0.0)
        else:
            value = tl.load(source_ptr + i * source_step + j, mask=fits, other=0.0)
        tl.store(to_ptr + i * to_step + j, value, mask=fits)


# ---- launches ------------------------------------------------------------------------------


@lru_cache(_TABLES)
def _table(rows: Rows, device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """Return ``[rows, tensors]`` on the device, and whether all are multiples of 16. The contents
    are the cache key, so a table never goes stale; it is copied on the stream that reads it."""
    values = array("q", chain.from_iterable(rows))
    host = torch.frombuffer(values, dtype=torch.int64).view(len(rows), -1)
    host = host if of(device).is_cpu else host.pin_memory()
    return host.to(device, non_blocking=True), not reduce(or_, values) % 16


def _tabled(rows: Rows, device: torch.device) -> tuple[Tensor, bool]:
    stream = 0 if of(device).is_cpu else torch.accelerator.current_stream(device).stream_id
    return _table(rows, device, stream)


def _launches(
    *lists: Sequence[Tensor], tile: int = _TILE
) -> Iterator[tuple[list[int], Tensor, int, dict[str, Any]]]:
    """Yield (positions of tensors with the same dtypes, their table, parts, options)."""
    looked = [*map(Tensors.of, lists)]
    numels, device = looked[0].numels, lists[0][0].device
    if any(x.numels != numels or not x.are_flat or x[0].device != device for x in looked):
        for tensors in zip(*lists, strict=True):
            check(tensors[0].shape, *tensors)
        raise AssertionError("a list kernel takes contiguous tensors")
    if all(numels) and all(len({*x.dtypes}) == 1 for x in looked):
        alike = {(): [*range(len(numels))]}
    else:
        each = zip(*(x.dtypes for x in looked), strict=True)
        alike = grouped((dtypes, n) for n, dtypes in enumerate(each) if numels[n])
    for some in alike.values():
        rows = numels, *(x.pointers for x in looked)
        if len(some) < len(numels):
            rows = tuple(tuple([row[n] for n in some]) for row in rows)
        tiles = triton.cdiv(max(rows[0]), tile)
        parts = min(tiles, max(1, min(_MAX_PARTS, triton.cdiv(tiles, _TILES))))
        table, aligned = _tabled(rows, device)
        yield some, table, parts, {"ALIGNED": aligned, "TILE": tile, "num_warps": _WARPS}


def _mask(stays: Tensor | None, some: list[int], table: Tensor) -> tuple[Tensor, int]:
    """Return the mask of some tensors, and its step from one to the next."""
    if stays is None:
        return table, 0
    stays = stays.view(torch.uint8)
    return (_of(stays, some), 1) if stays.ndim else (stays, 0)


def _of(values: Tensor, some: list[int]) -> Tensor:
    """Return the values at these positions, which are in order."""
    if len(some) == len(values):
        return values.contiguous()
    return values.index_select(0, _tabled((tuple(some),), values.device)[0][0])


def norms(
    buffers: Sequence[Tensor], grads: Sequence[Tensor], working: torch.dtype, **how: Any
) -> Tensor:
    """Return norms of operands and of gradients, ``[2, n]`` float64, not finite where a tensor is
    not. ``working`` is the dtype of the computation, to which operands and momentum are rounded.
    ``how``: ``momentum``, ``weight`` (of the gradient), EMA and NESTEROV."""
    device = buffers[0].device
    found = torch.zeros(2, len(buffers), dtype=torch.float64, device=device)
    with of(device).current():
        for some, table, parts, options in _launches(buffers, grads, tile=_NORM_TILE):
            sums = torch.empty(2, len(some), parts, dtype=torch.float64, device=device)
            held, grad = (_TYPES[tensors[some[0]].dtype] for tensors in (buffers, grads))
            norms_kernel[(len(some) * parts,)](
                table, sums, len(some), parts, HELD=held, GRAD=grad, WORKING=_TYPES[working],
                **how, **options,
            )  # fmt: skip
            values = sums.sum(2).sqrt_()
            if len(some) == len(buffers):
                return values
            found.index_copy_(1, _tabled((tuple(some),), device)[0][0], values)
    return found


def advance(
    out: Sequence[Tensor] | None, buffers: Sequence[Tensor], grads: Sequence[Tensor],
    working: torch.dtype, *, scales: Tensor | None = None, stays: Tensor | None = None, **how: Any,
) -> None:  # fmt: skip
    """Advance momentum in place and, with ``out``, write operands times ``scales`` ``[n]``
    (float32) to it; zeros where momentum stays. See `norms` for the other arguments."""
    lists = [buffers, grads] if out is None else [buffers, grads, out]
    with of(buffers[0].device).current():
        for some, table, parts, options in _launches(*lists):
            held, grad, to = (_TYPES[t[some[0]].dtype] for t in (buffers, grads, lists[-1]))
            advance_kernel[(len(some) * parts,)](
                table, table if scales is None else _of(scales, some), *_mask(stays, some, table),
                len(some), parts, HELD=held, GRAD=grad, OUT=to, WORKING=_TYPES[working],
                HAS_OUT=out is not None, HAS_STAYS=stays is not None,
                **how, **options,
            )  # fmt: skip


def update(
    targets: Sequence[Tensor], updates: Sequence[Tensor], weights: Sequence[Tensor] | None,
    *, decay: float, lr: float, stays: Tensor | None, cautious: bool,
) -> None:  # fmt: skip
    """Compute ``target * decay - lr * update`` in place. If targets are masters of ``weights``,
    they follow these first and are rounded into them; a weight of master's dtype is the master."""
    lists = [targets, updates] if weights is None else [targets, updates, weights]
    with of(targets[0].device).current():
        for some, table, parts, options in _launches(*lists):
            target, change, weight = (_TYPES[t[some[0]].dtype] for t in (*lists[:2], lists[-1]))
            update_kernel[(len(some) * parts,)](
                table, *_mask(stays, some, table), len(some), parts, float(decay), float(lr),
                TARGET=target, UPDATE=change, WEIGHT=weight,
                HAS_WEIGHT=weights is not None and weight != target,
                HAS_STAYS=stays is not None, CAUTIOUS=cautious, **options,
            )  # fmt: skip


def copier(
    targets: Sequence[Tensor], sources: Sequence[Tensor], *, turned: bool
) -> Callable[[], None]:
    """Return a function that copies matrices ``[m, n]`` between equal dtypes. Targets have
    contiguous rows, and so do sources, or contiguous columns if ``turned``."""
    alike: dict[torch.dtype, list[tuple[int, ...]]] = defaultdict(list)
    for to, source in zip(targets, sources, strict=True):
        check(to.shape, to, source)
        assert to.dtype is source.dtype and to.stride(1) == source.stride(0 if turned else 1) == 1
        if to.numel():
            places = to.data_ptr(), source.data_ptr()
            steps = to.stride(0), source.stride(1 if turned else 0)
            alike[to.dtype].append((*to.shape, *places, *steps))
    device, launches = targets[0].device, []
    for dtype, numbers in alike.items():
        most = max(triton.cdiv(n, _BLOCK) * triton.cdiv(m, _BLOCK) for n, m, *_ in numbers)
        parts = min(_MAX_PARTS, triton.cdiv(most, 4))
        launches.append((_TYPES[dtype], (*zip(*numbers, strict=True),), len(numbers), parts))

    def run() -> None:
        with of(device).current():
            for kind, rows, count, parts in launches:
                table, aligned = _tabled(rows, device)
                copy_kernel[(count * parts,)](
                    table, count, parts, TYPE=kind, TURNED=turned, ALIGNED=aligned, BLOCK=_BLOCK,
                    num_warps=_WARPS,
                )  # fmt: skip

    return run
