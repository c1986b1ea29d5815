"""Published measurements beside predictions: the data, the limits, and what moves which row."""

from __future__ import annotations

import pytest

from benchmarks import published
from benchmarks.published import document, missed, rows, summary
from dmuon.scheduler.costs import ANALYTIC_DEVICES

# What a row may say; no rate and no time of a device is among it.
KEYS = {
    "name", "source", "tier", "kind", "unit", "published", "device", "groups", "unknowns",
    "assumption", "ranks", "per_node", "nic", "tokens", "minus", "over", "base_ms", "flops",
    "operations", "period", "block", "calls", "host_bound", "calibrates", "simulate",
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[published.Row]:
    return rows()


def value_of(found: list[published.Row], name: str) -> float:
    (value,) = [row["predicted"] for row in found if row["name"] == name]
    return float(value)


def test_the_rows_are_well_formed() -> None:
    given = document()["rows"]
    assert len({row["name"] for row in given}) == len(given)
    assert {*document()["addresses"]} == {row["source"] for row in given}
    for row in given:
        assert row.keys() <= KEYS and row["unknowns"], row["name"]
        if row["kind"] not in ("headline", "not predicted"):
            assert row["device"] in ANALYTIC_DEVICES, row["name"]
            assert row["published"] > 0 and row["assumption"], row["name"]


def test_the_limits_of_tier_a_hold_but_for_named_misses(found: list[published.Row]) -> None:
    said = summary(found)
    assert said["counted"] >= 20
    assert said["median"] <= 0.15
    assert set(missed(found)) == document()["missed"].keys()
    assert all(document()["missed"].values())


def test_predictions_by_hand(found: list[published.Row]) -> None:
    """From the constants, without the code."""
    rate = 312e12 * 0.683 * 8192**2 / (8192**2 + 1024**2)
    plain = 1e3 * (2 * 8192**3 / rate + 5e-6)
    assert value_of(found, "X X^T 8192 on a100, torch.matmul") == pytest.approx(plain)
    operations = sum(64 * 5 * 2 * (2 * 2560 * m**2 + m**3) for m in (2560, 1280))
    numel, squares = 64 * (2560**2 + 1280 * 2560), 64 * (2560**2 + 1280**2)
    passes = 2 * (3 * numel + 5 * 2 * (numel + squares)) / (0.9 * 3.35e12)
    all_ms = 1e3 * (operations / (989e12 * 0.774) + passes)
    steps = value_of(found, "marin, 2 layers, 5 steps: Newton-Schulz")
    assert steps == pytest.approx(all_ms, rel=0.02)  # and launches, and how full the device is
    # Two all-to-alls of 34 and 16 matrices' selected quarters over two GPUs: half of it stays.
    sent = 2 * (17 * 640 + 8 * 2560) * 5120 * 2
    wire = value_of(found, "dion 96, 2 GPUs: all-to-alls")
    assert wire == pytest.approx(1e3 * sent / (0.8 * 450e9), rel=0.05)
