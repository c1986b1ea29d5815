"""What Triton makes of the kernels for sm_80 and sm_90: no spills, tensor cores, memory that fits.

Compiled without a GPU, with the assembler that comes with Triton.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

from dmuon.kernels import triton_elementwise, triton_small, triton_syrk
from dmuon.kernels.triton_syrk import TILES, TILES_FLOAT32, Tile, default_tile, tiles_for
from tests.unit.triton_tools import SHARED_LIMIT, Compiled, compiled

ARCHS = (80, 90)
EVERYWHERE = [(arch, tile) for arch in ARCHS for tile in tiles_for((arch // 10, arch % 10))]
POINTERS = ("a_ptr", "bt_ptr", "c_ptr", "out_ptr", "plain_ptr")


def product(
    tile: Tile,
    arch: int,
    dtype: str = "fp16",
    *,
    full: bool = True,
    cut: bool = False,
    transposed: bool = False,
) -> Compiled:
    """``full``: with c and a second result. ``cut``: sizes that the tile does not divide.
    ``transposed``: both operands are stored column by column."""
    constants: dict[str, object] = {
        "HAS_C": True,
        "HAS_PLAIN": full,
        "MASK": cut,
        "WIDE": False,
        "BLOCK": tile.block,
        "BLOCK_K": tile.block_k,
        **dict.fromkeys(("a_row", "bt_row") if transposed else ("a_col", "bt_col"), 1),
    }
    types = dict.fromkeys(POINTERS, f"*{dtype}") | dict.fromkeys(("alpha", "beta", "diag"), "fp32")
    return compiled(
        triton_syrk.symm_kernel, types, constants, arch=arch, warps=tile.warps, stages=tile.stages
    )


def assert_fast(found: Compiled, arch: int) -> None:
    assert found.spilled == 0, found
    assert found.shared <= SHARED_LIMIT[arch], found
    assert found.tensor_core_instructions(arch) > 0, found
    assert found.async_copies > 0, found
    assert found.wide_stores > 0, found


@pytest.mark.parametrize(("arch", "tile"), EVERYWHERE, ids=str)
def test_every_tile_with_the_largest_epilogue(arch, tile):
    assert_fast(product(tile, arch, "fp16"), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_default_tiles_with_the_smallest_epilogue_in_bfloat16(arch):
    for rows in (512, 4096):
        tile = default_tile(rows, torch.bfloat16)
        assert_fast(product(tile, arch, "bf16", full=False), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_that_tiles_do_not_divide_and_transposed_operands(arch):
    assert_fast(product(TILES[0], arch, cut=True), arch)
    assert_fast(product(TILES[0], arch, transposed=True), arch)


def test_two_programs_of_the_default_tile_share_a_hopper_multiprocessor():
    """Else nothing computes while a tile is stored."""
    found = product(TILES[0], 90, full=False)
    assert 2 * found.registers * 32 * TILES[0].warps <= 65536
    assert 2 * found.shared <= SHARED_LIMIT[90]


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_is_exact_and_does_not_spill(arch):
    found = product(TILES_FLOAT32[0], arch, "fp32")
    assert found.spilled == 0
    assert found.mma == found.wgmma == 0, "TF32 would keep 10 bits"


def test_the_gate_sees_spills():
    """Why one tile is for Hopper only; it would be the same with one that is too large."""
    (hopper_only,) = set(TILES) - set(tiles_for((8, 0)))
    assert product(hopper_only, 80).spilled > 0


# ---- before and after ----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_elementwise_kernels_move_whole_vectors(arch):
    tile: dict[str, object] = {"TILE": triton_elementwise._TILE}
    momentum = tile | {"EMA": True, "NESTEROV": True}
    types = {
        **{"buffer_ptr": "*fp32", "grad_ptr": "*bf16", "out_ptr": "*fp16", "update_ptr": "*fp16"},
        **{"weight_ptr": "*fp32", "peaks_ptr": "*fp32", "sums_ptr": "*fp32"},
        **dict.fromkeys(("momentum", "weight", "eps", "decay", "lr"), "fp32"),
    }
    for kernel, constants in (
        (triton_elementwise.momentum_kernel, momentum),
        (triton_elementwise.scale_kernel, momentum | {"PARTS": 1024}),
        (triton_elementwise.update_kernel, tile),
    ):
        found = compiled(
            kernel, types, constants, arch=arch, warps=4, unaligned=("parts", "rounds")
        )
        assert found.spilled == 0, kernel
        assert found.wide_stores > 0, kernel
        assert found.shared <= 48 * 1024, kernel


# ---- small matrices ------------------------------------------------------------------------


def small(size: int, arch: int, dtype: torch.dtype) -> Compiled:
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return compiled(
        triton_small.iteration_kernel,
        {"x_ptr": f"*{name}", "q_ptr": f"*{name}", "triples_ptr": "*fp32", "edges_ptr": "*i32"},
        {
            "M": size,
            "CHUNK": triton_small.chunk_for(dtype),
            "KEEP_Q": size < triton_small.MAX_ROWS,
            "x_col": 1,
        },
        arch=arch,
        warps=triton_small.warps_for(size),
        stages=triton_small.STAGES,
        unaligned=("m", "segments"),
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_small_iterations(arch, size):
    found = small(size, arch, torch.float16)
    # R, Z and the accumulator of 128 rows are as many registers as there are; with mma.sync, whose
    # operands are registers too, some go to memory.
    assert found.spilled <= (1024 if (arch, size) == (80, 128) else 0), found
    assert found.shared <= SHARED_LIMIT[arch], found
    assert found.async_copies > 0, found
    # wgmma multiplies 64 rows at a time.
    assert found.tensor_core_instructions(80 if size < 64 else arch) > 0, found


@pytest.mark.parametrize("arch", ARCHS)
def test_small_iterations_in_bfloat16(arch):
    assert small(64, arch, torch.bfloat16).spilled == 0


def test_small_iterations_in_float32():
    found = small(32, 80, torch.float32)
    assert found.spilled <= 16, found
    assert found.mma == 0
