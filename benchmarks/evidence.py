"""Measure what docs/evidence.md claims, and write its tables and pictures.

``python -m benchmarks.evidence --measure`` runs the benchmarks of the page into benchmarks/results:
about two hours on two quiet cores, as root. What is there already is not measured again, but with
``--again``. ``python -m benchmarks.evidence`` then fills the tables of all pages and draws the
pictures. In a page a table stands between ``<!-- table: BENCHMARK.NAME -->`` and
``<!-- end of table -->``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import end_to_end, muonbp, simulate
from benchmarks.nodes import NoNodes, why_not
from benchmarks.results import Benchmark, read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"


MEASURED: dict[str, Benchmark] = {
    "end_to_end": end_to_end.BENCHMARK,
    "muonbp": muonbp.BENCHMARK,
    "simulate": simulate.BENCHMARK,
}
_TABLE = re.compile(r"(<!-- table: (\w+)\.(\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    """Those with tables."""
    every = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "README.md"]
    return [path for path in every if _TABLE.search(path.read_text())]


def filled(page: str) -> str:
    """The text of a page with all of its tables as the results have them.

    Raises KeyError for a table that no benchmark makes.
    """
    made: dict[str, dict[str, str]] = {}

    def fill(found: re.Match[str]) -> str:
        begin, benchmark, name, end = found.groups()
        if benchmark not in made:
            tables = MEASURED[benchmark].tables
            assert tables is not None
            made[benchmark] = tables(read_rows(str(RESULTS / f"{benchmark}.json")))
        return f"{begin}\n{made[benchmark][name]}\n\n{end}"

    return _TABLE.sub(fill, page)


def measure(again: bool) -> int:
    """Run the benchmarks one after the other; how many failed.

    Raises NoNodes, and forgets nothing, where nodes cannot be emulated.
    """
    reason = why_not()
    if reason is not None:
        raise NoNodes(reason)
    failed = 0
    for name in MEASURED:
        path = RESULTS / f"{name}.json"
        if again:
            path.unlink(missing_ok=True)
        begin = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), "--resume"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed += code != 0
        print(f"{name}: exit {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run the benchmarks, write no page")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    if args.measure:
        return measure(args.again)
    for name, measured in MEASURED.items():
        if measured.draw is not None:
            measured.draw(read_rows(str(RESULTS / f"{name}.json")), str(IMAGES / f"{name}.png"))
    for page in pages():
        page.write_text(filled(page.read_text()))
        print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
