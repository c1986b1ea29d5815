"""The harness that all benchmarks share, and those that need no page of their own here."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks import muonbp, step_cost
from benchmarks.timing import Laps, take_turns

ROOT = Path(__file__).parents[2]


def test_contenders_take_turns_and_one_that_fails_takes_part_no_more():
    order: list[str] = []

    def turn(name: str) -> Laps:
        order.append(name)
        if len(order) == 9:
            raise MemoryError("too large")
        return (float(len(order)),)

    failures: dict[str, Exception] = {}
    contenders = {name: lambda n=name: turn(n) for name in "abc"}
    times = take_turns(contenders, 3, warm_up=1, failures=failures)
    assert "".join(order) == "abc" + "bca" + "cab" + "ac"
    assert times == {"a": [(6.0,), (8.0,), (10.0,)], "c": [(5.0,), (7.0,), (11.0,)]}
    assert str(failures["b"]) == "too large"


def test_step_cost_compares_two_checkouts(tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = ["--sets", "toy", "--layouts", "replicated", "--json", str(path), "--against"]
    assert step_cost.BENCHMARK.main([*command, str(ROOT), "--check", "--limit", "1000"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["checkout"], row["optimizer"]) for row in rows] == [
        ("here", "dmuon"), ("here", "AdamW"), (ROOT.name, "dmuon"), (ROOT.name, "AdamW"),
    ]  # fmt: skip
    assert rows[0]["matrices"] == 4
    assert rows[0]["us_per_matrix"] == pytest.approx(rows[0]["median_ms"] * 250)
    assert rows[0]["ratio_to_other"] > 0 and "ratio_to_other" not in rows[2]
    assert rows[0]["whole_ms"] > rows[0]["median_ms"]
    with pytest.raises(SystemExit):
        step_cost.BENCHMARK.main([*command, str(tmp_path)])
    assert "there is no dmuon/ in it" in capsys.readouterr().err


def muonbp_rows(seeds: int) -> list[dict]:
    """All of a sweep's rows, with losses by what they are: 2.0 + 0.1 a seed for Muon, 0.001 x
    degree x number of the period above it, twice that where tied."""
    rows = []
    for job in muonbp.jobs_of(seeds, steps=24):
        place = muonbp.PERIODS.index(float(job["period"]))
        above = 1e-3 * job["world"] * place * (1 + (job["step_sizes"] == "tied"))
        large = 1.0 if job["lr"] == muonbp.LARGE else 0.0
        found = {"validation_loss": 2.0 + 0.1 * job["seed"] + above + large}
        found["norms"] = [[0, 75.0], [24, 80.0 + job["world"] + 10 * large]]
        rows.append(job | found)
    return rows


def test_tables_and_picture_of_muonbp(tmp_path, capsys):
    assert doctest.testmod(muonbp) == (0, 1)
    rows = muonbp_rows(seeds=2)
    kinds = [tuple(row[key] for key in muonbp.KEYS) for row in rows]
    assert len(set(kinds)) == len(kinds) == 2 * (1 + 5 * 2 * 2 + 1 + 4) + 2
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows}))
    assert muonbp.BENCHMARK.main(["--tables", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| P = 2 | +2 (+2…+2) | +4 (+4…+4) | +4 (+4…+4) | +8 (+8…+8) |" in lines
    assert "| P = ∞ | +10 (+10…+10) | +20 (+20…+20) | +20 (+20…+20) | +40 (+40…+40) |" in lines
    (muon,) = (line for line in lines if line.startswith("| Muon |"))
    assert muon.split("|")[2:4] == [" 82 (82…82) ", " 2.050 "]
    one = muonbp_rows(seeds=1)
    assert "| P = 2 | +2 | +4 | +4 | +8 |" in muonbp.loss_table(one)
    assert "| P = 4 |  |  |  |  |" in muonbp.loss_table(muonbp.of(one, period=1))
    for some in (rows, muonbp.of(rows, lr=muonbp.LR)):
        muonbp.draw(some, str(tmp_path / "picture.png"))
        assert (tmp_path / "picture.png").stat().st_size > 20_000
