"""Links between two emulated nodes carry what the formulas say, and the rows of all orders are
there."""

from __future__ import annotations

import pytest

from benchmarks import nodes
from benchmarks.links import ORDERS, Case, answered

REASON = nodes.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
HEADERS = 1.05  # bytes of a link over those of what is sent, at most


def test_links_of_ddp_carry_what_the_formulas_say() -> None:
    rows = {row["optimizer"]: row for row in answered(Case("ddp", 2, 1, "1gbit", None, 1))}
    for name in ("AdamW, DDP", "dmuon, DDP", "round robin, DDP"):
        row = rows[name]
        for prefix in ("", "step_"):
            theory = row[f"{prefix}theory_link_bytes"]
            for way in ("out", "in"):
                sent = row[f"{prefix}link_{way}_bytes"]
                mean = sum(sent) / len(sent)
                assert theory <= mean < HEADERS * theory + 100_000, (name, prefix, way)
    assert all(row["rounds"] == 1 and row["rate"] == "1gbit" for row in rows.values())


def test_orders_of_owners_have_alike_loads_and_are_all_measured() -> None:
    rows = answered(Case("placement", 2, 1, "1gbit", "dedicated", 1))
    assert [row["optimizer"] for row in rows] == [*ORDERS]
    first, row_major, _ = rows
    for row in rows:
        assert row["loads_ms"] == pytest.approx(first["loads_ms"])
        assert "spans" not in row and 1.0 <= row["crowd_out"] <= 2.0
    # Not the third: gloo reduces what goes to one owner along a ring, which sends more.
    found = [sum(row["link_out_bytes"]) for row in (first, row_major)]
    assert found[0] == pytest.approx(found[1], rel=0.05)
