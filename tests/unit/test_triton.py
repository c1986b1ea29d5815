"""The contract of the Triton kernels in Triton's interpreter; tiles, their order, imports."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

import triton
import triton.language as tl

from dmuon.kernels.triton_syrk import TILES, default_tile, parse_tile, tiles_for
from tests.triton_contract import *  # noqa: F403
from tests.triton_contract import Kernels
from tests.unit.triton_tools import interpreted, interpreted_library

INTERPRETED = Kernels(
    "cpu", *(interpreted(f"triton_{name}") for name in ("syrk", "elementwise", "small"))
)
SYRK = INTERPRETED.syrk


@pytest.fixture
def kernels() -> Kernels:
    return INTERPRETED


# ---- the order of tiles --------------------------------------------------------------------


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


@pytest.mark.parametrize("tiles", [*range(1, 35), 63, 64, 65, 199, 200])
def test_every_tile_comes_once(tiles):
    order = tiles_in_order(tiles, torch.arange(tiles * (tiles + 1) // 2))
    assert sorted(order) == [(r, c) for r in range(tiles) for c in range(r + 1)]


def test_neighbours_share_their_operands():
    order = tiles_in_order(64, torch.arange(64 * 65 // 2))
    for start in range(0, len(order) - 64, 64):
        rows, cols = zip(*order[start : start + 64])
        assert len({*rows}) + len({*cols}) <= 40, "64 tiles row by row touch 65 strips"


def test_the_order_is_right_far_beyond_what_float32_counts():
    tiles = 46340  # more would pass 2^31
    rows = torch.arange(8, tiles, 997, dtype=torch.int64) // 8 * 8
    first = rows * (rows + 1) // 2
    found = tiles_in_order(tiles, torch.cat((first - 1, first)))
    assert found[: len(rows)] == [(r - 1, r - 1) for r in rows.tolist()], "ends of groups"
    assert found[len(rows) :] == [(r, 0) for r in rows.tolist()], "starts of groups"


# ---- tiles, imports ------------------------------------------------------------------------


def test_a_tile_is_read_as_it_is_written_and_others_are_refused():
    assert str(TILES[0]) == "128x64-w8-s3"
    assert [parse_tile(str(tile)) for tile in TILES] == list(TILES)
    for text in ("", "128x64", "128x64-w8-s3 ", "256x64-w8-s3"):
        with pytest.raises(ValueError, match="a tile is one of 128x64-w8-s3, .*plan again"):
            parse_tile(text)


def test_tiles_of_a_gpu():
    assert tiles_for((9, 0)) == TILES
    assert set(tiles_for((8, 0))) < set(TILES)
    assert len(tiles_for((9, 0), torch.float32)) == 1
    for m, dtype in itertools.product((64, 4096), (torch.float32, torch.float16, torch.bfloat16)):
        assert default_tile(m, dtype) in tiles_for((8, 0), dtype)


def test_interpreting_leaves_triton_as_it_was():
    owners = (tl, tl.core, tl.math, tl.tensor)
    before = [dict(vars(owner)) for owner in owners]
    SYRK.symm_mm(torch.zeros(3, 4), torch.zeros(3, 4), out=torch.empty(3, 3))
    changed = [
        name
        for owner, old in zip(owners, before)
        for name, value in vars(owner).items()
        if value is not old.get(name) and name != "__annotations__"
    ]
    assert changed == [] and triton.knobs.runtime.interpret is False


def test_a_cpu_is_told_why_not_and_importing_the_package_does_not_import_triton():
    assert "move the parameters to a GPU" in SYRK.why_unavailable("cpu")
    assert len(SYRK.SOURCE_HASH) == 12 and int(SYRK.SOURCE_HASH, 16) >= 0
    code = "import sys, dmuon; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
