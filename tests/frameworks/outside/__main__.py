"""Train with other frameworks' own packages, each in an environment of its own.

::

    python -m tests.frameworks.outside litgpt torchtune       # a line per cell, and the table
    python -m tests.frameworks.outside --all --json tests/frameworks/outside/results
    python -m tests.frameworks.outside litgpt --cell clip     # one cell, with its output

With that folder as ``--json`` the table of docs/frameworks/by-name.md is written again; without
names that is all that is done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.frameworks.outside.cells import FAILED, PASSED, REPOSITORY, TITLES, Cell
from tests.frameworks.outside.environments import ENVIRONMENTS, prepared

RESULTS = Path(__file__).parent / "results"
PAGE = REPOSITORY / "docs" / "frameworks" / "by-name.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
PACKAGE = "tests.frameworks.outside"
TIMEOUT_S = 1200
VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))
"""


def run_cell(name: str, cell: str, python: Path, runs: Path, *, loud: bool = False) -> Cell:
    """One cell in a process of its own; without ``loud`` what it prints goes into a file."""
    runs.mkdir(parents=True, exist_ok=True)
    result, log = runs / f"{cell}.json", runs / f"{cell}.log"
    result.unlink(missing_ok=True)
    command = [str(python), "-m", f"{PACKAGE}.{name}", cell, "--folder", str(runs)]
    with log.open("w") as file:
        out: Any = None if loud else file
        try:
            code = subprocess.run(
                [*command, "--result", str(result)],
                cwd=REPOSITORY,
                stdout=out,
                stderr=out,
                timeout=TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = "none within its time"
    if not result.exists():
        return Cell(cell, FAILED, note=f"it gave no result, but exit code {code}: {log}")
    return Cell(**json.loads(result.read_text()))


def run(name: str, cells: list[str], python: Path, runs: Path, *, loud: bool) -> dict[str, Any]:
    """The row of a framework, as it is written to JSON."""
    row = []
    for cell in cells:
        begun = time.monotonic()
        found = run_cell(name, cell, python, runs, loud=loud)
        seconds = time.monotonic() - begun
        print(f"{name:16} {cell:12} {_text(found):10} {seconds:5.1f} s  {command(name, cell)}")
        if found.status != PASSED:
            print(f"{'':30}{found.note}")
        sys.stdout.flush()
        row.append(asdict(found) | {"seconds": round(seconds, 1)})
    shown = [*ENVIRONMENTS[name].shown.split(), "torch"]
    text = subprocess.run(
        [str(python), "-c", VERSIONS, *shown], check=True, text=True, capture_output=True
    )
    return {
        "framework": name,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": json.loads(text.stdout),
        "cells": row,
    }


def command(name: str, cell: str) -> str:
    return f"python -m {PACKAGE} {name} --cell {cell}"


def _text(cell: Cell) -> str:
    return f"{cell.deviation:.0e}" if cell.status == PASSED else cell.status


def table(rows: list[dict[str, Any]]) -> str:
    """The page's table: the deviations, and what each framework ran with."""
    lines = [
        "| framework | " + " | ".join(TITLES.values()) + " | with |",
        "|---" * (2 + len(TITLES)) + "|",
    ]
    for row in rows:
        cells = {
            c["name"]: Cell(**{k: c[k] for k in Cell.__dataclass_fields__}) for c in row["cells"]
        }
        version = next(iter(row["versions"].values()))
        shown = [row["framework"], *(_text(cells[c]) for c in TITLES), f"{version}, {row['date']}"]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join([*lines, ""])


def recorded() -> list[dict[str, Any]]:
    """The committed rows, by name."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def own_table(row: dict[str, Any]) -> str:
    """What a framework has beside the cells of all, for its own page."""
    shown = [c for c in row["cells"] if c["name"] in ENVIRONMENTS[row["framework"]].more]
    lines = [f"| {c['note'].removesuffix('.')} | {c['deviation']:.0e} |" for c in shown]
    return "\n".join(["| how it ran | largest difference |", "|---|---|", *lines, ""])


def pages() -> dict[Path, str]:
    """The table of each page that has one."""
    own = {
        PAGE.with_stem(row["framework"]): own_table(row)
        for row in recorded()
        if ENVIRONMENTS[row["framework"]].more
    }
    return {PAGE: table(recorded()), **own}


def write_pages() -> None:
    for page, text in pages().items():
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--all", action="store_true", help="every framework")
    parser.add_argument("--cell", help="this one alone, and show its output")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write NAME.json there")
    parser.add_argument("--keep", action="store_true", help="keep configs, checkpoints, output")
    parser.add_argument(
        "--envs", type=Path, default=REPOSITORY / "out" / "outside", help="where environments lie"
    )
    given = parser.parse_args()
    names = [*ENVIRONMENTS] if given.all else given.names
    if unknown := [
        n for n in names if n not in ENVIRONMENTS or find_spec(f"{PACKAGE}.{n}") is None
    ]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ENVIRONMENTS)}")
    if given.cell and given.json:
        parser.error("--json takes whole rows, without --cell")
    rows = []
    for name in names:
        print(f"{name}: its environment is {given.envs / name}", flush=True)
        python = prepared(name, given.envs.resolve())
        runs = REPOSITORY / "out" / "outside" / "runs" / name
        shutil.rmtree(runs, ignore_errors=True)
        cells = [given.cell] if given.cell else [*TITLES, *ENVIRONMENTS[name].more]
        rows.append(run(name, cells, python, runs, loud=bool(given.cell)))
        failed = any(cell["status"] == FAILED for cell in rows[-1]["cells"])
        if not given.keep and not failed:
            shutil.rmtree(runs)
        if given.json is not None:
            given.json.mkdir(parents=True, exist_ok=True)
            path = given.json / f"{name}.json"
            path.write_text(json.dumps(rows[-1], indent=2) + "\n")
    if rows and not given.cell:
        print("\n" + table(rows))
    if not names or (given.json is not None and given.json.resolve() == RESULTS):
        write_pages()
    sys.exit(any(cell["status"] == FAILED for row in rows for cell in row["cells"]))


if __name__ == "__main__":
    main()
