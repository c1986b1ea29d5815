"""What Triton makes of the kernels for GPUs: no spills, tensor cores, memory that fits.

Compiled without a GPU, with the assembler that comes with Triton.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dmuon.kernels import triton_lists, triton_syrk
from dmuon.kernels.triton_syrk import TILES, TILES_FLOAT32, Tile, tiles_for

# Shared memory that a program can have (CUDA C++ Programming Guide, technical specifications).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a kernel. Memory in bytes; ``shared`` is per program."""

    registers: int
    spilled: int
    shared: int
    mma: int
    wgmma: int
    tcgen05: int
    async_copies: int
    wide_stores: int
    wide_loads: int


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    options: Mapping[str, Any],
    arch: int,
    unaligned: tuple[str, ...] = (),
) -> Compiled:
    """Compile for sm_<arch>; ``options`` are constants, and what a launch is told. Arguments in
    neither map are 32-bit integers; all pointers and integers are multiples of 16 but those in
    ``unaligned``."""
    launch = {n: options[n] for n in ("num_warps", "num_stages", "maxnreg") if n in options}
    constants = {name: options[name] for name in options if name not in launch}
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind not in ("constexpr", "fp32") and name not in unaligned
    }
    source = ASTSource(kernel, signature, constants, aligned)
    log = io.StringIO()
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.cache.scope(),
        tempfile.TemporaryDirectory() as folder,  # a result from the cache has no log
        redirect_stdout(log),
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.cache.dir = folder
        # Fusion is Triton's default on a GPU; named, because some versions warn where it is not.
        options = {**launch, "enable_fp_fusion": True}
        result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    (spills,) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    ptx = result.asm["ptx"]
    return Compiled(
        registers=int(registers),
        spilled=max(map(int, spills)),
        shared=result.metadata.shared,
        mma=ptx.count("mma.sync"),
        wgmma=ptx.count("wgmma.mma_async"),
        tcgen05=ptx.count("tcgen05.mma"),
        async_copies=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        wide_stores=ptx.count("st.global.v4"),
        wide_loads=len(re.findall(r"ld\.global[.\w:]*\.v[248]", ptx)),
    )


STRIDES = ("m", "k", "a_batch", "a_row", "a_col", "bt_batch", "bt_row", "bt_col", "c_batch",
           "c_row", "out_batch", "out_row")  # fmt: skip
NOT_EVEN = {"HAS_PLAIN": True, "MASK": True, "unaligned": STRIDES}
USES: dict[str, dict[str, Any]] = {
    "X X^T": {"HAS_C": False},
    "X^T X of a tall X": {"HAS_C": False, "ones": ("a_row", "bt_row")},
    "A B, both stored by rows": {"ones": ("a_col", "bt_row")},
    "bR + cR^2": {},
    "the same and aI + ...": {"HAS_PLAIN": True},
    "the same, cut": {"HAS_PLAIN": True, "MASK": True},
}
"""All that a step does with symmetric products; "cut" where the tile does not divide the size."""
DEFAULT = TILES[0]
MOST = "the same and aI + ..."
GATE = [
    *((90, DEFAULT, use) for use in USES if use != "X X^T"),
    *((90, tile, MOST) for tile in TILES if tile != DEFAULT),
    *((80, tile, MOST) for tile in tiles_for((8, 0))),
    (100, DEFAULT, MOST),
]
PROGRAMS = {(90, DEFAULT): 2}
"""How many share a multiprocessor; else nothing computes while a tile is stored."""


def product(
    arch: int,
    tile: Tile,
    dtype: str = "fp16",
    *,
    ones: tuple[str, str] = ("a_col", "bt_col"),
    unaligned: tuple[str, ...] = (),
    **how: bool,
) -> Compiled:
    """With c, of sizes that are multiples of 16 but for ``unaligned`` ones. ``ones``: the strides
    that are 1."""
    options = {"HAS_C": True, "HAS_PLAIN": False, "MASK": False, "WIDE": False} | how
    options |= {"BLOCK": tile.block, "BLOCK_K": tile.block_k}
    options |= dict.fromkeys(ones, 1)
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    pointers = ("a_ptr", "bt_ptr", "c_ptr", "out_ptr", "plain_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("alpha", "share", "diag"), "fp32")
    return compiled(triton_syrk.symm_kernel, types, options, arch, unaligned)


@pytest.mark.parametrize(("arch", "tile", "use"), GATE, ids=str)
def test_products_are_fast(arch, tile, use):
    found, programs = product(arch, tile, **USES[use]), PROGRAMS.get((arch, tile), 1)
    programs = 1 if "cut" in use else programs
    assert found.spilled == 0, found
    assert programs * found.registers * 32 * tile.warps <= 65536, found
    assert programs * found.shared <= SHARED_LIMIT[arch], found
    assert found.wide_stores > 0, found
    assert found.async_copies > 0, found
    assert {80: found.mma, 90: found.wgmma, 100: found.tcgen05}[arch] > 0, found


def test_sizes_that_are_not_even_are_copied_element_by_element():
    """Why `ops.TritonOps` leaves them to torch."""
    found = product(90, DEFAULT, **NOT_EVEN)
    assert found.async_copies == 0 == found.wide_stores, found


def test_float32_is_exact_and_does_not_spill():
    found = product(80, TILES_FLOAT32[0], "fp32", HAS_PLAIN=True)
    assert found.spilled == 0
    assert found.mma == found.wgmma == 0, "TF32 would keep 10 bits"


def test_the_gate_sees_spills():
    """Of a tile that takes more registers than its warps have."""
    assert product(80, Tile(128, 64, warps=2, stages=3), HAS_PLAIN=True).spilled > 0


LISTS = {"ALIGNED": True, "TILE": triton_lists._TILE, "num_warps": triton_lists._WARPS}
MOMENTUM = LISTS | {"HELD": tl.float32, "GRAD": tl.bfloat16, "WORKING": tl.float32}
MOMENTUM |= {"EMA": True, "NESTEROV": True}
MASKED = {"HAS_STAYS": True, "HAS_WEIGHT": True, "TARGET": tl.float32, "WEIGHT": tl.bfloat16}
NUMBERS = ("momentum", "weight", "decay", "lr", "first", "beta2", "second", "eps")


@pytest.mark.parametrize(("kernel", "options"), [
    ("norms_kernel", MOMENTUM | {"TILE": triton_lists._NORM_TILE}),
    ("advance_kernel", MOMENTUM | {"OUT": tl.float16, "HAS_OUT": True, "HAS_STAYS": True}),
    ("update_kernel", LISTS | MASKED | {"UPDATE": tl.float16, "CAUTIOUS": True}),
    ("copy_kernel", {"TYPE": tl.float16, "TURNED": True, "BLOCK": triton_lists._BLOCK}),
])  # fmt: skip
def test_list_kernels_move_whole_vectors(kernel, options):
    """Although addresses come from a table: else each thread would move one element at a time."""
    pointers = {"stays_ptr": "*u8", "sums_ptr": "*fp64", "table_ptr": "*i64"}
    pointers |= dict.fromkeys(("scales_ptr", "sizes_ptr", "roots_ptr"), "*fp32")
    options = {"ALIGNED": True, "num_warps": triton_lists._WARPS} | options
    found, loose = (
        compiled(
            getattr(triton_lists, kernel),
            pointers | dict.fromkeys(NUMBERS, "fp32"),
            options | {"ALIGNED": aligned},
            80,
            ("count", "parts", "stays_step"),
        )
        for aligned in (True, False)
    )
    assert found.spilled == 0 and found.wide_loads > 0 == loose.wide_loads, found
    assert found.wide_stores > 0 or kernel == "norms_kernel", found
    assert found.shared <= 48 * 1024 and 2 * found.registers * 32 * 8 <= 65536, found
