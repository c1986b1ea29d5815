"""The GPU suite as far as a CPU carries it: no failure, no hang and no end of time loses a row."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dmuon
from benchmarks import gpu, gpu_parts
from benchmarks.results import Rows
from benchmarks.rivals import RIVALS
from dmuon import devices, rule
from tests.accelerator import Pretended
from tests.collectives import ISSUED, issued

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # one process imports torch, and trains


def on_disk(path: Path) -> Any:
    return json.loads(path.read_text())


def failing(error: BaseException) -> Any:
    return mock.Mock(side_effect=error)


# ---- rows --------------------------------------------------------------------------------


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


def fake_tool(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


# ---- parts -------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("code", "limit_s", "note"),
    [
        ("rows({'name': 'a', 'passed': True})", 60.0, ""),
        ("rows({'name': 'a', 'passed': False})", 60.0, "1 of 1 rows: a: out of its limit"),
        ("rows(left_out=['a'])", 60.0, "no time for 1 rows: a, ..., wrote no rows"),
        ("", 60.0, "wrote no rows"),
        ("sys.exit(3)", 60.0, "exit code 3"),
        ("os.abort()", 60.0, "exit code -6"),
        ("signal.pause()", 2.0, "out of time"),
        ("stubborn()", 2.0, "out of time"),
    ],
)
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


@pytest.mark.parametrize(
    ("text", "code", "passed"),
    [("2 passed, 1 skipped", 0, True), ("1 skipped", 0, False), ("1 failed, 2 passed", 1, False)],
)
def test_skipped_tests_are_no_success(monkeypatch, text, code, passed):
    run = mock.Mock(return_value=subprocess.CompletedProcess([], code, stdout=text, stderr=""))
    monkeypatch.setattr(gpu_parts.subprocess, "run", run)
    monkeypatch.setattr(gpu_parts.importlib.util, "find_spec", lambda name: object())
    rows = Rows(None, CPU)
    gpu_parts.tests(rows, CPU, toy=False)
    assert [row["passed"] for row in rows.rows] == [passed]
    command = run.call_args.args[0]
    assert command[-3:] == ["-n", "12", "tests/gpu"], "what they compile fills the cache"


@pytest.mark.parametrize(("text", "passed"), [("0 errors", True), ("2 errors", False)])
def test_a_sanitizer_without_errors_passes(tmp_path, monkeypatch, text, passed):
    tool = f"echo 1 passed, ERROR SUMMARY: {text}"
    fake_tool(tmp_path, "compute-sanitizer", tool, monkeypatch)
    rows = Rows(None, CPU)
    gpu_parts.sanitizer(rows, CPU, toy=False)
    assert [row["passed"] for row in rows.rows] == [passed] * 3


def packed(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return set(archive.getnames())


# ---- the whole ---------------------------------------------------------------------------

# As on a bare machine: no solver, and dmuon from source.
DRY = """
import runpy, sys
sys.modules.update(dict.fromkeys(("pulp", "highspy", "hypothesis", "matplotlib")))
sys.argv = ["gpu", "--dry-run", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_a_dry_run_measures_something_in_every_part(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The others are these with other arguments, or judged above and below in this process.
    names = ["smoke", "rivals"]
    archive = tmp_path / "brought back" / "all.tar.gz"
    command = [sys.executable, "-c", DRY, "--out", str(tmp_path), "--parts", ",".join(names)]
    command += ["--archive", str(archive)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "To go on" not in ended.stdout, "its budget reaches for everything"
    files = {f"gpu/{name}.{kind}" for name in names for kind in ("json", "log")}
    files |= {"gpu/gpu.json", "gpu/gpu.md"}
    assert files <= packed(archive)
    whole = on_disk(tmp_path / "gpu.json")
    assert [one["name"] for one in whole["rows"]] == names
    assert all(one["passed"] for one in whole["rows"]) and not whole["targets"]

    steps = on_disk(tmp_path / "smoke.json")["rows"]
    trained = [row for row in steps if "update_difference" in row]
    assert {row["setting"].split(",")[0] for row in trained} == set(gpu_parts.LAYOUTS)
    assert {row["travelled"] for row in trained} == {0, 11}, "all matrices travel, or none"
    assert any("period" in row["setting"] for row in trained)
    measured = [r for r in on_disk(tmp_path / "rivals.json")["rows"] if "contender" in r]
    timed = {row["contender"] for row in measured if "median_ms" in row}
    assert {"standard", "ours", "torch.optim.Muon"} <= timed
    assert {row["contender"] for row in measured if "left_out" in row} == {*RIVALS} - timed


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


def test_a_call_that_is_cut_off_leaves_an_archive(tmp_path, monkeypatch):
    one = part("rows({'name': 'a'}); signal.pause()")
    monkeypatch.setattr(gpu, "parts", lambda dry=False: (one,))
    monkeypatch.setattr(gpu, "MINUTES", 1.0)

    def cut_off() -> None:
        while not (tmp_path / "one.json").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    thread = threading.Thread(target=cut_off)
    thread.start()
    try:
        assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    finally:
        thread.join()
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before):
            signal.signal(number, handler)
    assert {"gpu/gpu.json", "gpu/one.json"} <= packed(tmp_path / "gpu.tar.gz")
    assert on_disk(tmp_path / "gpu.json")["rows"][0]["note"] == "stopped from outside"


# ---- verdicts ----------------------------------------------------------------------------


def test_targets(tmp_path):
    assert all(target["passed"] is False for target in gpu.targets(tmp_path)), "nothing there"
    kernel = "gaussian standard/triton/float16"
    row = {"name": kernel, "kernel": kernel, "error": 0.01, "expected": 0.02, "passed": True}

    def judged(ms: float, name: str = "NVIDIA H200", *more: Any) -> list[bool | None]:
        layer = {"median_ms": ms, "ratio_to_floor": ms / 12.72}
        experts = {"median_ms": 1, "ratio_to_floor": 2, "ratio_to_standard": 0.2}
        rows = [
            {"name": "tune 1 x [4096, 4096]", "kernel": "standard/torch/float16"},
            {"case": "llama-8b layer", "contender": "ours",
             "ratio_to_compiled_bfloat16": ms / 27, **layer},
            {"case": "128 experts 768 x 2048", "contender": "ours_whole", **experts},
        ]  # fmt: skip
        found = {"machine": {"gpu": name}, "rows": rows}
        (tmp_path / "kernels.json").write_text(json.dumps(found))
        (tmp_path / "accuracy.json").write_text(json.dumps({"rows": [row, *more]}))
        return [target["passed"] for target in gpu.targets(tmp_path)]

    assert judged(15.0) == [True] * 5
    assert judged(16.0) == [False, False, False, True, True]
    assert judged(15.0, "NVIDIA A100")[0] is None, "the limit is an H200's"
    failed = {"name": "gaussian gram[2]/triton/float16", "failure": "x"}
    assert judged(15.0, "NVIDIA H200", failed)[-1] is False, "a failed row is no accuracy"


@pytest.mark.parametrize("fault", [1.2, float("nan")])
def test_accuracy_sees_a_wrong_kernel_and_runs_both_ways(monkeypatch, fault):
    """Half precision with reduced sums allowed and not; afterwards they are allowed again."""
    right, matmul = gpu_parts.iterated, torch.backends.cuda.matmul
    seen: list[bool] = []

    def wrong(x: torch.Tensor, *given: Any) -> torch.Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            seen.append(matmul.allow_fp16_reduced_precision_reduction)
            assert matmul.allow_bf16_reduced_precision_reduction == seen[-1]
        return fault * right(x, *given)

    small = {key: forms for key, forms in gpu_parts.EXPECTED.items() if key[1] == 96}
    monkeypatch.setattr(gpu_parts, "EXPECTED", small)
    monkeypatch.setattr(gpu_parts, "iterated", wrong)
    rows = Rows(None, CPU)
    gpu_parts.accuracy(rows, CPU, toy=True)
    assert seen.count(True) == seen.count(False) == len(rows.rows) / 2 > 4
    assert [row["reduced"] for row in rows.rows] == seen
    assert matmul.allow_fp16_reduced_precision_reduction and rows.failed == rows.rows


@pytest.mark.parametrize("travels", [False, True])
def test_a_wrong_update_is_seen(monkeypatch, travels):
    setting = gpu_parts.Setting("sharded", travels=travels)
    wrong = gpu_parts.newton_schulz
    monkeypatch.setattr(gpu_parts, "newton_schulz", lambda x, **how: 1.02 * wrong(x, **how))
    with gpu_parts.one_process(CPU):
        row = gpu_parts.step_row(setting, CPU, 2, toy=True)
    assert not row["passed"] and row["update_difference"] > row["limit"]


class Accelerator(Pretended):
    """On which Triton's kernels run, in its interpreter."""

    has_triton = True
    inside_a_step = False

    __slots__ = ()

    def why_no_triton(self) -> None:
        return None


@pytest.mark.parametrize("is_late", [False, True])
def test_kernels_are_probed_when_a_step_is_bound(monkeypatch, is_late):
    """A probe inside `step` would wait for the device, which is an error there; and without its
    kernels a step is as right, so only the route that is told shows it."""
    pytest.importorskip("triton", reason="Triton is made for Linux")
    from dmuon.kernels import triton_syrk
    from tests.unit.test_triton import interpreted

    lists, real = interpreted("triton_lists"), dmuon.Muon.step
    probes: list[torch.device] = []

    def probe(device: torch.device) -> None:
        if Accelerator.inside_a_step:
            raise RuntimeError("called a synchronizing CUDA operation")
        probes.append(device)

    def step(self: dmuon.Muon, *given: Any, **how: Any) -> Any:
        monkeypatch.setattr(Accelerator, "inside_a_step", True)
        try:
            return real(self, *given, **how)
        finally:
            monkeypatch.setattr(Accelerator, "inside_a_step", False)

    monkeypatch.setitem(devices.TYPES, "cpu", Accelerator)
    monkeypatch.setattr(triton_syrk, "_probed", probe)
    monkeypatch.setattr("dmuon.kernels.triton_lists", lists)
    monkeypatch.setattr(dmuon.Muon, "step", step)
    if is_late:  # nobody asks when the step is bound
        ask, asked = rule.list_kernels, itertools.count()
        later = mock.Mock(side_effect=lambda device: ask(device) if next(asked) else None)
        monkeypatch.setattr("dmuon.step.engine.list_kernels", later)
    rule.list_kernels.cache_clear()
    try:
        with gpu_parts.one_process(CPU), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            row = gpu_parts.step_row(gpu_parts.Setting("replicated", "torch"), CPU, 2, toy=True)
    finally:
        rule.list_kernels.cache_clear()
    assert row["update_difference"] <= row["limit"]
    assert row["passed"] is not is_late and probes
    assert any("elementwise" in str(one.message) for one in told) is is_late


@pytest.mark.parametrize("layout", ISSUED)
def test_the_collectives_that_nccl_has_to_run_are_known(layout):
    """As tests/gpu/test_nccl.py counts them."""
    with gpu_parts.one_process(CPU):
        row, counts = issued(layout, CPU)
    assert row["passed"] and counts == ISSUED[layout]
