"""The contract of the Triton kernels in Triton's interpreter; tiles, their order, imports."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from dmuon.kernels import triton_lists
from dmuon.kernels.triton_syrk import (
    TILES,
    default_tile,
    parse_tile,
    source_hash,
    tiles_for,
    why_unavailable,
)
from dmuon.rule import Rule
from dmuon.tensors import Tensors
from tests.internals import Hyper
from tests.triton_contract import *  # noqa: F403
from tests.triton_contract import Kernels

PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)


def interpreted(name: str) -> ModuleType:
    """A second copy of ``dmuon.kernels.<name>`` whose kernels run on the CPU, in numpy.

    The ordinary copy stays what it is, and so does Triton outside of calls into this one.
    """
    spec = importlib.util.find_spec(f"dmuon.kernels.{name}")
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    for public, function in list(vars(module).items()):
        is_own = getattr(function, "__module__", "") == module.__name__
        if is_own and isinstance(function, FunctionType) and not public.startswith("_"):
            setattr(module, public, with_library(function))
    return module


def with_library(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with interpreted_library():
            found = function(*args, **kwargs)
        return with_library(found) if isinstance(found, FunctionType) else found

    return call


@contextmanager
def interpreted_library() -> Iterator[None]:
    """Functions of triton.language that are written in Triton are interpreted too (they were loaded
    to be compiled), and triton.language is as before afterwards.

    Triton's interpreter does not undo all by itself: what it patches for functions that kernels
    call stays, and later compilations in the same process fail.
    """
    before = [dict(vars(owner)) for owner in PATCHED]
    try:
        for name in ("cdiv", "max", "sum", "zeros"):
            setattr(tl, name, InterpretedFunction(getattr(tl, name).fn))
        yield
    finally:
        for owner, old in zip(PATCHED, before, strict=True):
            for name in vars(owner).keys() - old.keys():
                delattr(owner, name)
            for name, value in old.items():
                if vars(owner)[name] is not value and name != "__annotations__":
                    setattr(owner, name, value)


NAMES = ("syrk", "lists")
INTERPRETED = Kernels("cpu", *(interpreted(f"triton_{name}") for name in NAMES))
SYRK = INTERPRETED.syrk


@pytest.fixture
def kernels() -> Kernels:
    return INTERPRETED


def test_interpreting_leaves_triton_as_it_was():
    before = [dict(vars(owner)) for owner in PATCHED]
    SYRK.symm_mm(torch.zeros(3, 4), torch.zeros(3, 4), out=torch.empty(3, 3))
    for owner, old in zip(PATCHED, before):
        changed = {name for name, value in vars(owner).items() if value is not old.get(name)}
        assert changed <= {"__annotations__"}
    assert triton.knobs.runtime.interpret is False


def order_kernel(row_ptr, col_ptr, index_ptr, tiles, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + lane, mask=lane < count, other=0)
    row, col = SYRK.tile_of(index, tiles)
    tl.store(row_ptr + lane, row, mask=lane < count)
    tl.store(col_ptr + lane, col, mask=lane < count)


with triton.knobs.runtime.scope():
    triton.knobs.runtime.interpret = True
    ORDER_KERNEL = triton.jit(order_kernel)


def tiles_in_order(tiles: int, index: torch.Tensor) -> list[tuple[int, int]]:
    row, col = torch.empty(2, len(index), dtype=torch.int32)
    block = triton.next_power_of_2(len(index))
    with interpreted_library():
        ORDER_KERNEL[(1,)](row, col, index.int(), tiles, len(index), BLOCK=block)
    return list(zip(row.tolist(), col.tolist()))


def test_every_tile_comes_once_and_neighbours_share_their_operands():
    for tiles in (*range(1, 20), 33, 64, 65, 200):
        order = tiles_in_order(tiles, torch.arange(tiles * (tiles + 1) // 2))
        assert sorted(order) == [(r, c) for r in range(tiles) for c in range(r + 1)]
        for start in range(0, len(order) - 64, 64) if tiles == 64 else ():
            rows, cols = zip(*order[start : start + 64])
            assert len({*rows}) + len({*cols}) <= 40, "64 tiles row by row touch 65 strips"


def test_the_order_is_right_far_beyond_what_float32_counts():
    tiles = 46340  # more would pass 2^31
    rows = torch.arange(8, tiles, 997, dtype=torch.int64) // 8 * 8
    first = rows * (rows + 1) // 2
    found = tiles_in_order(tiles, torch.cat((first - 1, first)))
    assert found[: len(rows)] == [(r - 1, r - 1) for r in rows.tolist()], "ends of groups"
    assert found[len(rows) :] == [(r, 0) for r in rows.tolist()], "starts of groups"


def test_lists_are_looked_at_once(monkeypatch):
    """A step launches one kernel for all tensors of a pass, and looks at the gradients alone, which
    are new in each step: tables of the other tensors are kept."""
    launched = []
    for name in ("norms_kernel", "advance_kernel", "update_kernel"):
        kernel = mock.MagicMock()
        kernel.__getitem__.side_effect = lambda grid: lambda *args, **how: launched.append(grid)
        monkeypatch.setattr(triton_lists, name, kernel)
    monkeypatch.setattr("dmuon.rule.list_kernels", lambda device: triton_lists)
    real, looks = torch.Tensor.data_ptr, []
    count, h = 672, Hyper(0.1, 0.9, None, 0.95, True)

    def several(dtype: torch.dtype = torch.float32) -> Tensors:
        return Tensors(torch.zeros(8, 16, dtype=dtype) for _ in range(count))

    momentum, targets, updates, out = several(), several(), several(), several(torch.float16)
    scales = torch.ones(count)

    def passes(grads: Tensors) -> None:
        Rule().operand_norms(momentum, grads, h, torch.float32)
        Rule().advance_into(out, momentum, grads.part(0, count), h, torch.float32, scales=scales)
        Rule().apply(targets, updates, h, lr=0.1)

    for _ in range(2):
        passes(several())
    assert len(launched) == 3 * 2
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: looks.append(t) or real(t))
    passes(several())
    assert len(looks) == count, "at gradients alone"


def test_tiles():
    assert [parse_tile(str(tile)) for tile in TILES] == list(TILES)
    assert str(TILES[0]) == "128x64-w8-s3"
    for text in ("", "128x64", "128x64-w8-s3 ", "256x64-w8-s3"):
        with pytest.raises(ValueError, match="a tile is one of 128x64-w8-s3, .*plan again"):
            parse_tile(text)
    assert tiles_for((9, 0)) == TILES and set(tiles_for((8, 0))) < set(TILES)
    for m, dtype in itertools.product((64, 4096), (torch.float32, torch.float16, torch.bfloat16)):
        assert default_tile(m, dtype) in tiles_for((8, 0), dtype)


def test_a_cpu_is_told_why_not():
    assert "move the parameters to a GPU" in why_unavailable("cpu")
    assert len(source_hash()) == 12 and int(source_hash(), 16) >= 0
