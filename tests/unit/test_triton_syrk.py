"""The symmetric product in Triton's interpreter: epilogues, shapes, strides, refusals."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

import triton
import triton.language as tl

from dmuon.kernels.triton_host import overlap
from dmuon.kernels.triton_syrk import TILES, Tile, default_tile, tiles_for
from tests.gpu.kernel_checks import check_symm, on
from tests.unit.triton_tools import interpreted, interpreted_library

SYRK = interpreted("triton_syrk")
HALF = (torch.float16, torch.bfloat16)
T16, T32 = Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)


@pytest.mark.parametrize(
    ("with_c", "with_diag", "with_plain"), [*itertools.product((False, True), repeat=3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_every_epilogue(with_c, with_diag, with_plain, dtype):
    m, k = 70, 50
    check_symm(
        SYRK,
        on("cpu", m, k, dtype=dtype),
        on("cpu", m, k, dtype=dtype),
        on("cpu", m, m, dtype=dtype) if with_c else None,
        out=torch.empty(m, m, dtype=dtype),
        plain=torch.empty(m, m, dtype=dtype) if with_plain else None,
        alpha=-1.75,
        beta=0.6 if with_c else 0.0,
        diag=8.25 if with_diag else 0.0,
        tile=T32,
    )


@pytest.mark.parametrize(
    ("m", "k", "tile"),
    [(1, 1, T16), (1, 40, T16), (16, 32, T16), (17, 31, T16), (64, 64, T32), (150, 9, T16)],
)
def test_sizes(m, k, tile):
    """One tile, many of them (more than a group), whole tiles and cut ones."""
    a, bt = on("cpu", m, k, dtype=torch.float32), on("cpu", m, k, dtype=torch.float32)
    out, plain = torch.empty(2, m, m)
    check_symm(SYRK, a, bt, out=out, plain=plain, diag=-1.0, tile=tile)


def test_no_columns_leave_the_rest():
    c = torch.randn(20, 20)
    c = c + c.mT
    out = torch.empty(20, 20)
    a = torch.empty(20, 0)
    SYRK.symm_mm(a, a, c, out=out, beta=2.0, diag=1.0, tile=T16)
    torch.testing.assert_close(out, 2 * c + torch.eye(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batches_of_strided_matrices(dtype):
    """Operands are transposed views, results lie between other matrices of one workspace."""
    b, m, k = 3, 40, 24
    a = on("cpu", b, k, m, dtype=dtype).mT
    bt = on("cpu", b, m, 2 * k, dtype=dtype)[:, :, ::2]
    workspace = torch.zeros(b, 4, m + 2, m + 3, dtype=dtype)
    c = on("cpu", m, m, b, dtype=dtype).movedim(2, 0)
    out, plain = workspace[:, 1, 1:-1, 2:-1], workspace[:, 2, 1:-1, 2:-1]
    check_symm(SYRK, a, bt, c, out=out, plain=plain, beta=0.5, diag=1.0, tile=T16)
    outside = torch.ones_like(workspace, dtype=torch.bool)
    outside[:, 1:3, 1:-1, 2:-1] = False
    assert not workspace[outside].any(), "nothing is written outside of the results"


def test_one_matrix_for_a_whole_batch():
    shared = torch.randn(30, 12).expand(2, 30, 12)
    check_symm(SYRK, shared, torch.randn(2, 30, 12), out=torch.empty(2, 30, 30), tile=T16)


def test_long_strides_need_wide_offsets():
    far = 2**22 + 1
    memory = torch.empty(2 * far + 64)
    a = memory.as_strided((3, 20), (far, 1))
    a.copy_(torch.randn(3, 20))
    check_symm(SYRK, a, a, out=torch.empty(3, 3), tile=T16)


def test_the_result_may_have_another_dtype():
    a = on("cpu", 40, 24, dtype=torch.float16)
    c = on("cpu", 40, 40, dtype=torch.bfloat16)
    check_symm(SYRK, a, a, c, out=torch.empty(40, 40), beta=1.5, tile=T16)


def test_beta_zero_does_not_read_c():
    a, c = torch.randn(20, 20), torch.full((20, 20), float("nan"))
    out = torch.empty(20, 20)
    SYRK.symm_mm(a, a, c, out=out, beta=0.0, tile=T16)
    assert out.isfinite().all()


def test_a_bad_number_stays_in_its_matrix():
    a = torch.randn(2, 20, 20)
    a[0, 3, 4] = float("nan")
    out = torch.empty(2, 20, 20)
    SYRK.symm_mm(a, a, out=out, tile=T16)
    assert out[0, 3].isnan().all()
    assert out[1].isfinite().all()


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


def test_interpreting_leaves_triton_as_it_was():
    owners = (tl, tl.core, tl.math, tl.tensor)
    before = [dict(vars(owner)) for owner in owners]
    SYRK.symm_mm(torch.zeros(3, 4), torch.zeros(3, 4), out=torch.empty(3, 3), tile=T16)
    changed = [
        name
        for owner, old in zip(owners, before)
        for name, value in vars(owner).items()
        if value is not old.get(name) and name != "__annotations__"
    ]
    assert changed == []
    assert triton.knobs.runtime.interpret is False


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
    index = torch.cat((first - 1, first))
    found = tiles_in_order(tiles, index)
    assert found[: len(rows)] == [(r - 1, r - 1) for r in rows.tolist()], "ends of groups"
    assert found[len(rows) :] == [(r, 0) for r in rows.tolist()], "starts of groups"


# ---- tiles ---------------------------------------------------------------------------------


def test_a_tile_is_read_as_it_is_written():
    assert str(TILES[0]) == "128x64-w8-s3"
    assert [Tile.parse(str(tile)) for tile in TILES] == list(TILES)


@pytest.mark.parametrize(
    "text",
    ["", "128", "128x64", "128x64-w8", "128x64-w8-s3 ", "96x64-w8-s3", "128x8-w8-s3",
     "128x64-w3-s3", "128x64-w32-s3", "128x64-w8-s0", "-128x64-w8-s3", "١٢٨x64-w8-s3"],
)  # fmt: skip
def test_a_bad_tile_is_refused(text):
    with pytest.raises(ValueError, match="tile must read as 128x64-w8-s3"):
        Tile.parse(text)


def test_tiles_of_a_gpu():
    assert tiles_for((9, 0)) == TILES
    assert set(tiles_for((8, 0))) < set(TILES)
    assert len(tiles_for((9, 0), torch.float32)) == 1
    for m, dtype in itertools.product((64, 4096), (torch.float32, *HALF)):
        assert default_tile(m, dtype) in tiles_for((8, 0), dtype)


# ---- refusals ------------------------------------------------------------------------------


def test_shared_memory_is_refused():
    m = torch.zeros(4, 20, 20)
    SYRK.symm_mm(m[0], m[1], m[2], out=m[3], beta=1.0, tile=T16)
    SYRK.symm_mm(m[0], m[0], m[0], out=m[3], beta=1.0, tile=T16)
    for a, bt, c, out, plain in (
        (m[0], m[1], m[2], m[0], None),
        (m[0], m[1], m[2], m[1], None),
        (m[0], m[1], m[2], m[2], None),
        (m[0], m[1], m[2], m[3], m[3]),
        (m[0], m[0], m[0], m[3], m[0]),
        (m[:2], m[1:3], None, m[2:], None),
        (m.flatten()[1:401].view(20, 20), m[1], None, m[0], None),
    ):
        with pytest.raises(ValueError, match="shares memory with .*memory of its own"):
            SYRK.symm_mm(a, bt, c, out=out, beta=1.0, plain=plain, tile=T16)


def test_overlap_is_judged_by_address():
    m = torch.zeros(3, 4, 5, 5)
    assert not overlap(m[0], m[1])
    assert overlap(m[0], m[0, 1:])
    assert not overlap(m[:, 0], m[:, 1])
    assert not overlap(m[:2, 3], m[1:, 0])
    assert overlap(m[:, 1], m[:, 1])
    assert overlap(m[:, 1], m[:, :, 1])
    assert not overlap(m[:0, 0], m[:0, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": torch.zeros(20, 8).double()}, "a and bt must be .* found .*float64"),
        ({"a": torch.zeros(20, 9)}, "a and bt must be"),
        ({"a": torch.zeros(20, 8).half()}, "a and bt must be"),
        ({"a": torch.zeros(20)}, "a and bt must be"),
        ({"out": torch.zeros(20, 21)}, "out must be"),
        ({"out": torch.zeros(20, 20).double()}, "out must be .*float64"),
        ({"out": torch.zeros(20, 40)[:, ::2]}, "out must have contiguous rows"),
        ({"c": torch.zeros(19, 19), "beta": 1.0}, "c must be"),
        ({"plain": torch.zeros(20, 20).half()}, "plain must be torch.float32 as out is"),
        ({"plain": torch.zeros(2, 20, 20)}, "plain must be"),
    ],
)
def test_wrong_tensors_are_refused(changed, message):
    fine = {"a": torch.zeros(20, 8), "bt": torch.zeros(20, 8), "out": torch.zeros(20, 20)}
    SYRK.symm_mm(**fine, tile=T16)
    with pytest.raises(ValueError, match=message):
        SYRK.symm_mm(**fine | changed, tile=T16)


def test_a_cpu_is_told_why_not():
    assert "move the parameters to a GPU" in SYRK.why_unavailable("cpu")


def test_importing_the_package_does_not_import_triton():
    code = "import sys, dmuon; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_hash_is_one_of_the_sources():
    assert len(SYRK.SOURCE_HASH) == 12
    assert int(SYRK.SOURCE_HASH, 16) >= 0
