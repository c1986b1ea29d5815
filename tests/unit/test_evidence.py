"""Pages hold the tables that the committed results make, and docs/evidence.md is short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.evidence import RESULTS, ROOT, filled, pages

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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_and_when(path: Path) -> None:
    found = json.loads(path.read_text())
    assert {"cpu", "cores"} <= set(found["machine"]) and {"torch", "dmuon"} <= set(
        found["versions"]
    )
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert not any("failure" in row for row in found["rows"])
    assert found.get("running") is None


def words(page: str) -> int:
    """Without code and the tables that commands make."""
    made = r"<!-- table: .*?<!-- end of table -->|<!--.*?-->|```.*?```"
    return len(re.findall(r"\S*\w\S*", re.sub(made, "", page, flags=re.S)))


def test_the_page_is_at_most_1500_words() -> None:
    assert words("a b\n<!-- table: x.y -->\n| c |\n<!-- end of table -->\nd\n| e |") == 4
    assert words(PAGE.read_text()) <= 1500
    assert "Limits" in re.findall(r"^## (.*)$", PAGE.read_text(), re.M)


def test_a_benchmark_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "why_not", lambda: None)
    muonbp = evidence.MEASURED["muonbp"]
    monkeypatch.setattr(evidence, "MEASURED", {"no_such_benchmark": muonbp})
    assert evidence.measure(again=False) == 1


def test_the_page_of_the_simulator_says_where_it_is_wrong() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    assert words(page) <= 1200
    assert "Where it is wrong, and by how much" in re.findall(r"^## (.*)$", page, re.M)
