"""Real text that every machine has: the source files of the Python standard library, and Python's
manual in English, as bytes.

Nothing is downloaded. Text is split by file, the manual by paragraph, so that training sees no
validation text. A hash decides, so that every rank and every run agree.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VOCABULARY = 256  # one token per byte

# Left out: installed packages, tests, and `encodings`, which is mostly generated tables.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
MANUAL = "pydoc_data/topics.py"
VALIDATION_PERCENT = 5
FILE_SEPARATOR = b"\n\0\n"


@dataclass(frozen=True)
class Text:
    """Training and validation bytes, as `uint8` arrays."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    train_files: int
    validation_files: int

    def __str__(self) -> str:
        return (
            f"Python standard library: training on {self.train_files} files"
            f" ({self.train.size / 1e6:.2f} MB), validation on {self.validation_files} other files"
            f" ({self.validation.size / 1e6:.2f} MB), one token per byte"
        )

    def training_batch(
        self, step: int, rank: int, *, sequences: int, context: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[sequences, context]`, depending only on (seed, step, rank)."""
        starts = np.random.default_rng([seed, step, rank]).integers(
            0, self.train.size - context, size=sequences
        )
        return _windows(self.train, starts, context)

    def validation_batches(
        self, rank: int, world: int, *, sequences: int, context: int, total: int
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of at least `total` windows, spread evenly over the validation text.

        The number is rounded up to a multiple of `world`, because a layout that communicates in
        forward needs equally many batches on every rank. If `world` divides `total`, the windows
        are the same for every world.
        """
        rounded = -(-total // world) * world
        starts = np.linspace(0, self.validation.size - context - 1, rounded).astype(np.int64)
        mine = starts[rank::world]
        return [
            _windows(self.validation, mine[first : first + sequences], context)
            for first in range(0, len(mine), sequences)
        ]


def load_standard_library(*, manual: bool = True) -> Text:
    """Read the standard library of the running interpreter (about 10 MB), of which `load_manual`
    is a file."""
    root = Path(sysconfig.get_path("stdlib"))
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _source_files(root):
        name = path.relative_to(root).as_posix()
        if name == MANUAL and not manual:
            continue
        sides[_is_validation(name)].append(path.read_bytes())
    train, validation = sides[False], sides[True]
    if not train or not validation:
        raise RuntimeError(
            f"found no source files of the Python standard library under {root}: this interpreter"
            " ships without them; run the example with a Python that has its .py files"
        )
    return Text(_joined(train), _joined(validation), len(train), len(validation))


def load_manual() -> Text:
    """Read what ``help()`` says about syntax: English prose (0.4 MB), each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(chain.from_iterable(text.split("\n\n") for text in topics.values()))
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for paragraph in paragraphs:
        sides[_is_validation(paragraph)].append(paragraph.encode())
    train, validation = (
        np.frombuffer(b"\n\n".join(sides[side]), dtype=np.uint8) for side in (False, True)
    )
    return Text(train, validation, len(sides[False]), len(sides[True]))


def _source_files(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(p for p in found if SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts))


def _is_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < VALIDATION_PERCENT


def _joined(files: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(FILE_SEPARATOR.join(files), dtype=np.uint8)


def _windows(
    text: NDArray[np.uint8], starts: NDArray[np.int64], context: int
) -> tuple[Tensor, Tensor]:
    """Windows of `context + 1` bytes from each start, as inputs and targets shifted by one."""
    tokens = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]
