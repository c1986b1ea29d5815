"""How the symmetric product is cut into tiles, and which tiles are worth timing where."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

__all__ = ["TILES", "TILES_FLOAT32", "Tile", "default_tile", "tiles_for"]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up: output tiles ``block x block``, ``block_k`` columns at a time.

    >>> str(Tile(128, 64, warps=4, stages=3))
    '128x64-w4-s3'
    """

    block: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block}x{self.block_k}-w{self.warps}-s{self.stages}"

    @classmethod
    def parse(cls, text: str) -> Tile:
        """The inverse of ``str``. Raises ValueError for anything that it does not write."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)-w([1-9]\d*)-s([1-9]\d*)", text, re.ASCII)
        tile = cls(*map(int, found.groups())) if found else None
        if tile is None or not _is_possible(tile):
            raise ValueError(
                f"tile must read as {TILES[0]} does (powers of two >= 16, warps 1 to 16), "
                f"found {text!r}"
            )
        return tile


def _is_possible(tile: Tile) -> bool:
    powers = all(size & (size - 1) == 0 for size in (tile.block, tile.block_k, tile.warps))
    return powers and tile.block >= 16 and tile.block_k >= 16 and tile.warps <= 16


TILES = (
    Tile(128, 64, warps=8, stages=3),
    Tile(128, 64, warps=4, stages=3),
    Tile(128, 64, warps=8, stages=4),
    Tile(64, 64, warps=4, stages=4),
    Tile(64, 128, warps=4, stages=3),
)
"""For float16 and bfloat16; the first is the default for large matrices."""
TILES_FLOAT32 = (Tile(64, 32, warps=8, stages=3),)
# With mma.sync all registers of 4 warps go into a tile of 128 x 128, and some more.
_HOPPER_ONLY = (Tile(128, 64, warps=4, stages=3),)


def tiles_for(capability: tuple[int, int], dtype: torch.dtype = torch.float16) -> tuple[Tile, ...]:
    """The tiles that are worth timing on a GPU of this compute capability.

    None of them spills registers there where sizes and strides are multiples of 16, in the versions
    of Triton that are tested. Other sizes are right, but slower: addresses take registers, and
    loads are not asynchronous.
    """
    if dtype == torch.float32:
        return TILES_FLOAT32
    return tuple(tile for tile in TILES if capability[0] == 9 or tile not in _HOPPER_ONLY)


def default_tile(m: int, dtype: torch.dtype) -> Tile:
    """A tile that runs everywhere, for what has not been timed."""
    if dtype == torch.float32:
        return TILES_FLOAT32[0]
    return Tile(128, 64, warps=8, stages=3) if m > 1024 else Tile(64, 64, warps=4, stages=4)
