"""Pages hold the tables that the committed results make, and docs/evidence.md is short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.evidence import MEASURED, RESULTS, ROOT, filled, pages

PAGE = ROOT / "docs" / "evidence.md"


def test_tables_are_those_of_the_results() -> None:
    found = pages()
    assert PAGE in found
    for path in found:
        text = path.read_text()
        assert filled(text) == text, f"{path}: run `python -m benchmarks.evidence`"


def test_a_number_that_was_changed_by_hand_is_found() -> None:
    text = PAGE.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| **dmuon** |"))
    changed = text.replace(row, re.sub(r"\d", "0", row, count=1))
    assert changed != text and filled(changed) == text


def test_a_table_that_nobody_makes_is_an_error() -> None:
    page = "<!-- table: end_to_end.nothing -->\n<!-- end of table -->"
    with pytest.raises(KeyError, match="nothing"):
        filled(page)


@pytest.mark.parametrize("name", MEASURED)
def test_results_say_where_and_when(name: str) -> None:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert {"cpu", "cores"} <= set(found["machine"]) and {"torch", "dmuon"} <= set(
        found["versions"]
    )
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert not any("failure" in row for row in found["rows"])


def test_the_page_is_at_most_1500_words() -> None:
    prose = re.sub(r"<!--.*?-->|^\|.*$|```.*?```", "", PAGE.read_text(), flags=re.M | re.S)
    assert len(prose.split()) <= 1500
    # What was not shown comes first.
    assert re.findall(r"^## (.*)$", PAGE.read_text(), re.M)[0] == "What was not shown"


def test_the_readme_points_at_it() -> None:
    assert "docs/evidence.md" in Path(ROOT / "README.md").read_text()


def test_a_benchmark_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evidence, "MEASURED", {"no_such_benchmark": evidence.Measured(lambda rows: {})}
    )
    assert evidence.measure(again=False) == 1
