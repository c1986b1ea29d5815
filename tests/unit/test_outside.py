"""The page of other frameworks' packages, and the helpers of the runner that makes it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.frameworks.outside import __main__ as runner
from tests.frameworks.outside import cells
from tests.frameworks.outside.environments import ENVIRONMENTS


def test_the_pages_show_what_is_recorded():
    """To renew: ``python -m tests.frameworks.outside``."""
    for page, table in runner.pages().items():
        _, _, rest = page.read_text().partition(runner.BEGIN)
        shown, end, _ = rest.partition(runner.END)
        assert end and shown.strip() == table.strip()


def test_what_is_recorded_has_every_framework_and_every_cell():
    rows = {row["framework"]: row for row in runner.recorded()}
    assert rows.keys() == ENVIRONMENTS.keys()
    for row in rows.values():
        expected = [*cells.TITLES, *ENVIRONMENTS[row["framework"]].more]
        assert [cell["name"] for cell in row["cells"]] == expected
        for cell in row["cells"]:
            assert cell["status"] in (cells.PASSED, cells.ABSENT), (row["framework"], cell)
            assert cell["note"], "it says how it ran, or why there is none"


def test_a_cell_fails_where_losses_or_weights_differ(tmp_path: Path):
    expected = [2.0, 1.0], {"w": torch.zeros(2)}
    shifted = {"w": torch.tensor([0.0, 2e-5])}

    def right(folder: Path) -> float:
        """A note."""
        return cells.deviation(([1.0], {"w": torch.zeros(2)}), expected)

    def wrong(folder: Path) -> float:
        return cells.deviation(([1.0], shifted), expected)

    assert cells.evaluate("train", right, tmp_path) == cells.Cell("train", "passed", 0.0, "A note.")
    failed = cells.evaluate("clip", wrong, tmp_path)
    assert failed.status == "failed" and failed.deviation == pytest.approx(2e-5)
    assert cells.evaluate("train", "it needs a GPU", tmp_path).status == "absent"
    assert cells.deviation(([math.nan], expected[1]), expected) == math.inf
