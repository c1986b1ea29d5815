"""What the script of a framework gives the runner: one cell of its row for each name in `TITLES`.

A script has a function that trains in a new folder, and a note for each cell, or the reason why
there is none::

    def fit(place: Path, how: cells.How) -> float:
        ...
        return how.deviation(found, build)

    CELLS = cells.of(fit, {"train": "One process.", ..., "resume": Absent("it has one process")})

    if __name__ == "__main__":
        cells.main(CELLS)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.frameworks import common

REPOSITORY = Path(__file__).parents[3]
TITLES = {
    "train": "train",
    "clip": "clip",
    "schedule": "schedule",
    "accumulate": "accumulate",
    "save": "save",
    "resume": "resume on another world size",
}
PASSED, FAILED, ABSENT = "passed", "failed", "absent"

Found = tuple[list[float], dict[str, Tensor]]
"""Losses, and whole weights by name."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table. ``deviation``: the largest difference of a loss or a weight from the
    loop by hand; ``note``: how it ran, what failed, or why there is none."""

    name: str
    status: str
    deviation: float | None = None
    note: str = ""


class Absent(Exception):
    """A cell that cannot run here, with the reason: it needs a GPU, for instance."""


@dataclass(frozen=True)
class How:
    """How a cell trains: clipped, scheduled, in two micro-batches, on how many processes; ``saved``
    is the folder of another run, from whose middle it goes on."""

    clip: bool = False
    scheduled: bool = False
    accumulated: bool = False
    processes: int = 1
    saved: Path | None = None

    @property
    def batch(self) -> int:
        """Examples of a process in a backward."""
        return common.JOINT // self.processes // (1 + self.accumulated)

    def deviation(
        self,
        found: Found,
        build: Callable[[], nn.Module],
        rate: Callable[[int], float] = common.factor,
        **by_hand: Any,
    ) -> float:
        """What was ``found``, from the loop by hand; ``rate`` is the framework's schedule."""
        expected = common.by_hand(
            build,
            clip=common.CLIP if self.clip else None,
            rate=rate if self.scheduled else lambda step: 1.0,
            **by_hand,
        )
        return deviation(found, expected)


Note = str | Absent


def of(
    fit: Callable[[Path, How], float], notes: Mapping[str, Note], processes: int = 2
) -> dict[str, Callable[[Path], float] | str]:
    """The cells of a framework, with a note for each: ``save`` on so many ``processes``."""
    both = How(clip=True, scheduled=True)
    several = replace(both, processes=processes)

    def saved(folder: Path) -> float:
        return fit(folder / "save", several)

    def resumed(folder: Path, how: How) -> float:
        if not (folder / "save").exists():  # `--cell resume` alone
            saved(folder)
        place = folder / f"resumed-on-{how.processes}"
        return fit(place, replace(how, saved=folder / "save"))

    made: dict[str, Callable[[Path], float]] = {
        "train": lambda folder: fit(folder / "train", How()),
        "clip": lambda folder: fit(folder / "clip", How(clip=True)),
        "schedule": lambda folder: fit(folder / "schedule", How(scheduled=True)),
        "accumulate": lambda folder: fit(folder / "accumulate", replace(both, accumulated=True)),
        "save": lambda folder: max(saved(folder), resumed(folder, several)),
        "resume": lambda folder: resumed(folder, both),
    }
    for name, note in notes.items():
        made[name].__doc__ = str(note)
    return {n: str(notes[n]) if isinstance(notes[n], Absent) else made[n] for n in TITLES}


def evaluate(name: str, what: Callable[[Path], float] | str, folder: Path) -> Cell:
    """Run one cell."""
    if isinstance(what, str):
        return Cell(name, ABSENT, note=what)
    try:
        worst = what(folder)
    except Absent as reason:
        return Cell(name, ABSENT, note=str(reason))
    except Exception as error:
        traceback.print_exc()
        return Cell(name, FAILED, note=f"{type(error).__name__}: {error}".splitlines()[0])
    note = (what.__doc__ or "").strip().split("\n")[0]
    return Cell(name, PASSED if worst <= common.TOLERANCE else FAILED, worst, note)


def main(
    functions: Mapping[str, Callable[[Path], float] | str], **parts: Callable[..., Any]
) -> None:
    """Run the cell, or the part, that the command line names.

    ``parts`` are what `launch` runs in other processes: functions of the arguments after the name.
    """
    if sys.argv[1] in parts:
        parts[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=functions)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, help="write the cell there, as JSON")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    cell = evaluate(given.name, functions[given.name], given.folder.resolve())
    text = json.dumps(asdict(cell))
    print(text)
    if given.result is not None:
        given.result.write_text(text)
    sys.exit(cell.status == FAILED)


def launch(*arguments: str, processes: int = 1, folder: Path, **environment: str) -> str:
    """Run ``python ARGUMENTS`` (``-m MODULE ...`` or a script) in ``folder``, with several
    processes under torchrun; what it printed.

    The checkout is importable. A command that fails raises, with the first error that it printed.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    given = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=given | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(ran.stdout)
    if ran.returncode:
        lines = [line for line in ran.stdout.splitlines() if line.strip()] or ["no output"]
        plain = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]
        errors = [line for line in plain if re.match(r"[\w.]+(Error|Exception)\b", line)]
        raise RuntimeError((errors or lines)[0 if errors else -1])
    return ran.stdout


def alone(how: How) -> dict[str, str]:
    """The environment of one process that asks for a process group without torchrun."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**one, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"} if how.processes == 1 else {}


def keep(path: Path | str, losses: list[float], weights: Mapping[str, Tensor]) -> None:
    """Write what a run found, for `kept` in another process."""
    torch.save((losses, dict(weights)), path)


def kept(path: Path | str) -> Found:
    return torch.load(path, weights_only=True)


def deviation(found: Found, expected: Found) -> float:
    """The largest difference of a loss (relative to it above 1) or a weight. Losses may begin later
    than those expected."""
    losses, weights = found
    if not losses or weights.keys() != expected[1].keys():
        raise ValueError(f"{len(losses)} losses; other weights: {weights.keys() ^ expected[1]}")
    pairs = list(zip(losses, expected[0][-len(losses) :], strict=True))
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    differences += [(weights[n] - w).abs().max().item() for n, w in expected[1].items()]
    return math.inf if any(map(math.isnan, differences)) else max(differences)
