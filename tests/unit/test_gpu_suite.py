"""The GPU suite as far as a CPU carries it: no failure, no hang and no end of time loses a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.results import Rows
from tests.collectives import ISSUED, issued

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(900)  # one process imports torch, and trains


def on_disk(path: Path) -> Any:
    return json.loads(path.read_text())


def failing(error: BaseException) -> Any:
    return mock.Mock(side_effect=error)


def test_every_row_is_on_disk_whatever_others_raise(tmp_path):
    path = tmp_path / "new" / "rows.json"
    rows = Rows(str(path), CPU)

    def second() -> dict[str, Any]:
        found = on_disk(path)
        assert found["rows"] == [{"name": "a", "ms": 1}]
        assert found["running"] == {"name": "b", "m": 3}, "what runs is told before it begins"
        return {"ms": 2}

    assert rows.attempt("a", lambda: {"ms": 1}) and rows.attempt("b", second, m=3)
    for error in (torch.OutOfMemoryError("80 GiB"), AssertionError(), KeyError("k")):
        assert not rows.attempt(type(error).__name__, failing(error), m=4)
        row = on_disk(path)["rows"][-1]
        assert row["failure"].startswith(row["name"]) and row["m"] == 4
        assert "Traceback" in row["trace"] and row in rows.failed
    assert rows.attempt("good", lambda: {"passed": True})
    assert not rows.attempt("good", failing(AssertionError())), "known: not measured again"
    with pytest.raises(KeyboardInterrupt):
        rows.attempt("slow", failing(KeyboardInterrupt()))
    found = on_disk(path)
    assert found["rows"][-1]["failure"].startswith("interrupted after")
    assert found["running"] is None and {"machine", "versions", "date"} <= found.keys()
    assert len(rows.failed) == 4
    late = Rows(str(path), CPU, budget_s=0.0)
    assert not late.attempt("late", failing(AssertionError("it ran")))
    assert on_disk(path)["left_out"] == ["late"] and not late.failed
    again = Rows(str(path), CPU, resume=True)
    assert again.attempt("late", lambda: {}) and not again.attempt("b", failing(AssertionError()))


BEGIN = """
import json, os, signal, subprocess, sys
path = sys.argv[sys.argv.index("--json") + 1]
def rows(*found, **more):
    json.dump({"rows": found, "running": None, **more}, open(path, "w"))
def stubborn():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pause()
"""


def part(code: str) -> gpu.Part:
    """Without torch, which takes seconds to import."""
    return gpu.Part("one", "", 60.0, ("-S", "-c", BEGIN + code))


@pytest.mark.parametrize(("code", "limit_s", "note"), [
    ("rows({'name': 'a', 'passed': True})", 60.0, ""),
    ("rows({'name': 'a', 'passed': False})", 60.0, "1 of 1 rows: a: out of its limit"),
    ("rows(left_out=['a'])", 60.0, "no time for 1 rows: a, ..., wrote no rows"),
    ("os.abort()", 60.0, "exit code -6"),
    ("stubborn()", 1.0, "out of time"),
])  # fmt: skip
def test_how_a_part_ends(tmp_path, monkeypatch, code, limit_s, note):
    monkeypatch.setattr(gpu, "GRACE_S", 1.0)
    outcome = gpu.run_part(part(code), tmp_path, limit_s)
    assert (outcome["passed"], outcome["note"]) == (not note, note)


WITH_ROWS = """
import os, sys, torch
from benchmarks.results import Rows
rows = Rows(sys.argv[sys.argv.index("--json") + 1], torch.device("cpu"), resume=True)
faults = {"b": os.abort, "d": lambda: 1 / 0}
for name in "abcde":
    rows.attempt(name, faults.get(name, lambda: {"pid": os.getpid()}))
sys.exit(1)
"""


def test_a_row_that_hangs_ends_alone(tmp_path):
    """Where no signal reaches Python either: the part is begun again after that row."""
    code = WITH_ROWS.replace("os.abort", "hang").replace("resume", "row_s=1.0, resume")
    code = code.replace("\nrows =", "\nhang = lambda: ctypes.PyDLL(None).pause()\nrows =")
    one = gpu.Part("one", "", 60.0, ("-c", code.replace("import os", "import ctypes, os")))
    outcome = gpu.run_part(one, tmp_path, 240.0)
    rows = on_disk(tmp_path / "one.json")["rows"]
    assert [row["name"] for row in rows] == [*"abcde"]
    assert rows[1]["failure"] == "the process ended while this was measured"
    assert outcome["note"].endswith("exit code 1, begun again") and not outcome["unfinished"]
    assert "Timeout" in (tmp_path / "one.log").read_text(), "where it hung"


def test_parts_fit_calls_and_what_had_no_time_is_waiting():
    now, ran, outcomes = [0.0], [], {}

    def run(one: gpu.Part, out: Path, limit_s: float) -> dict[str, Any]:
        assert limit_s <= one.most_s
        now[0] += limit_s  # the worst case
        is_cut = limit_s < one.most_s and one.name not in ran
        ran.append(one.name)
        row = {"name": one.name, "passed": False, "note": "", "seconds": limit_s}
        return row | {"unfinished": is_cut}

    calls, names = 0, [one.name for one in gpu.parts()]
    while gpu.waiting(gpu.parts(), outcomes):
        begin, budget_s = now[0], 60 * gpu.MINUTES
        how = {"run": run, "clock": lambda: now[0]}
        gpu.run_parts(gpu.parts(), Path(), budget_s, outcomes, **how)
        assert now[0] - begin <= budget_s < 600 - 2 * 10
        calls += 1
    assert {*ran} == {*names} and calls <= 3, ran
    ended = {"unfinished": True, "limit_s": 75.0}, {"unfinished": False}
    some = dict(zip(names, (*ended, {"unfinished": True, "limit_s": 30.0})))
    left = [one.name for one in gpu.waiting(gpu.parts(), some)]
    assert left == [*names[2:], "smoke"], "what had its time comes last"


def test_the_smoke_run_trains_every_layout():
    rows = Rows(None, CPU)
    gpu_parts.smoke(rows, CPU, toy=True)
    assert not rows.failed
    trained = [row for row in rows.rows if "update_difference" in row]
    assert {row["setting"].split(",")[0] for row in trained} == set(gpu_parts.LAYOUTS)
    assert {row["travelled"] for row in trained} == {0, 11}, "all matrices travel, or none"
    assert any("period" in row["setting"] for row in trained)


def test_a_whole_step_and_the_profiles_of_both_kinds(tmp_path):
    rows = Rows(str(tmp_path / "profile.json"), CPU)
    gpu_parts.profile(rows, CPU, toy=True)
    assert [row["name"] for row in rows.rows] == ["full step", "block step"]
    for row in rows.rows:
        assert row["host_ms"] > 0 and row["aten_calls"] > 0 and row["kernels"] > 0
        assert {"busy_ms", "idle_ms", "longest_gaps_us", "launches", "step_bytes"} <= row.keys()
    assert {path.name for path in tmp_path.glob("*.gz")} == {
        "full.trace.json.gz", "block.trace.json.gz"
    }  # fmt: skip
    rows = Rows(None, CPU)
    gpu_parts.whole(rows, CPU, toy=True)
    assert [row["contender"] for row in rows.rows] == ["dmuon.Muon", "torch.optim.Muon"]
    assert all(row["median_ms"] > 0 for row in rows.rows) and rows.rows[0]["lists"] == "torch"


def test_accuracy_sees_a_wrong_kernel_and_runs_both_ways(monkeypatch):
    """Half precision with reduced sums allowed and not; afterwards they are allowed again."""
    right, matmul = gpu_parts.iterated, torch.backends.cuda.matmul
    seen: list[bool] = []

    def wrong(x: torch.Tensor, *given: Any) -> torch.Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            seen.append(matmul.allow_fp16_reduced_precision_reduction)
            assert matmul.allow_bf16_reduced_precision_reduction == seen[-1]
        return 1.2 * right(x, *given)

    small = {key: forms for key, forms in gpu_parts.EXPECTED.items() if key[1] == 96}
    monkeypatch.setattr(gpu_parts, "EXPECTED", small)
    monkeypatch.setattr(gpu_parts, "iterated", wrong)
    rows = Rows(None, CPU)
    gpu_parts.accuracy(rows, CPU, toy=True)
    assert seen.count(True) == seen.count(False) == len(rows.rows) / 2 > 4
    assert [row["reduced"] for row in rows.rows] == seen
    assert matmul.allow_fp16_reduced_precision_reduction and rows.failed == rows.rows


def test_a_wrong_update_is_seen(monkeypatch):
    wrong = gpu_parts.newton_schulz
    monkeypatch.setattr(gpu_parts, "newton_schulz", lambda x, **how: 1.02 * wrong(x, **how))
    with gpu_parts.one_process(CPU):
        row = gpu_parts.step_row(gpu_parts.Setting("sharded", travels=True), CPU, 2, toy=True)
    assert not row["passed"] and row["update_difference"] > row["limit"]


@pytest.mark.parametrize("layout", ISSUED)
def test_the_collectives_that_nccl_has_to_run_are_known(layout):
    """As tests/gpu/test_nccl.py counts them."""
    with gpu_parts.one_process(CPU):
        row, counts = issued(layout, CPU)
    assert row["passed"] and counts == ISSUED[layout]
