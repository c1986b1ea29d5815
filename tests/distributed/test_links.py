"""Links between two emulated nodes carry what the formulas say."""

from __future__ import annotations

import pytest

from benchmarks import nodes
from benchmarks.links import Case, answered

REASON = nodes.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
HEADERS = 1.05  # bytes of a link over those of what is sent, at most


def test_links_of_ddp_carry_what_the_formulas_say() -> None:
    rows = {row["optimizer"]: row for row in answered(Case("ddp", 2, 2, "1gbit", None, 1))}
    names = ["AdamW, DDP", "dmuon once, DDP", "same-shape all-gather, DDP"]
    for name in [*names, "dmuon, reduced to owner", "dmuon, reduced to owner, DDP"]:
        row = rows[name]
        for prefix in ("", "step_"):
            theory = row[f"{prefix}theory_link_bytes"]
            for way in ("out", "in"):
                sent = row[f"{prefix}link_{way}_bytes"]
                mean = sum(sent) / len(sent)
                assert theory <= mean < HEADERS * theory + 100_000, (name, prefix, way)
    assert all(row["rounds"] == 1 and row["rate"] == "1gbit" for row in rows.values())
