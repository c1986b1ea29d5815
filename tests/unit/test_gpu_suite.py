"""The GPU suite as far as a CPU carries it: no failure, no hang and no end of time loses a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_parts, results
from benchmarks.results import LOST, Rows

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


def test_a_lost_device_ends_the_process(tmp_path, monkeypatch):
    """After an illegal access every call of a process fails; another one goes on."""
    rows = Rows(str(tmp_path / "rows.json"), CPU)
    rows.device = torch.device("cuda", 0)
    lost = failing(RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        rows.attempt("a", lost)
    assert ended.value.code == LOST
    assert on_disk(tmp_path / "rows.json")["rows"][0]["failure"].startswith("RuntimeError: an ill")


def fake_tool(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


FAKE_SMI = """case "$*" in
*-lms*) while :; do echo "now, 1980 MHz"; sleep 0.1; done;;
*) echo "580.1, 1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 300.1 W, 700.0 W, 45";;
esac"""


def test_driver_and_clocks_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert results._nvidia_smi() == "nvidia-smi is not on the PATH"
    fake_tool(tmp_path, "nvidia-smi", FAKE_SMI, monkeypatch)
    found = results._nvidia_smi()
    assert isinstance(found, dict)
    assert found["driver_version"] == "580.1" and found["clocks.sm"] == "1980 MHz"
    with gpu.clocks(tmp_path):
        while "1980 MHz" not in (tmp_path / "clocks.csv").read_text():
            time.sleep(0.01)
    fake_tool(tmp_path, "nvidia-smi", "exit 9", monkeypatch)
    assert str(results._nvidia_smi()).startswith("nvidia-smi failed")


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


def test_a_part_is_interrupted_and_what_it_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 4.0)
    begin = "signal.signal(2, signal.SIG_IGN); signal.pause()"
    code = f"""
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; {begin}"])
try:
    signal.pause()
except KeyboardInterrupt:
    rows({{"name": "interrupted", "pid": child.pid}})
"""
    # As `main` does: in a shell's background SIGINT would be ignored, here and in what is started.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for limit_s in (8.0, 90.0):  # a busy machine may not have begun before it is interrupted
            outcome = gpu.run_part(part(code), tmp_path, limit_s)
            if (tmp_path / "one.json").exists():
                break
    finally:
        signal.signal(signal.SIGINT, before)
    (row,) = on_disk(tmp_path / "one.json")["rows"]
    assert outcome["note"] == "out of time" and row["name"] == "interrupted"
    stat = Path(f"/proc/{row['pid']}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":  # until whoever inherits it looks
        time.sleep(0.01)


WITH_ROWS = """
import os, sys, torch
from benchmarks.results import Rows
rows = Rows(sys.argv[sys.argv.index("--json") + 1], torch.device("cpu"), resume=True)
faults = {"b": os.abort, "d": lambda: 1 / 0}
for name in "abcde":
    rows.attempt(name, faults.get(name, lambda: {"pid": os.getpid()}))
sys.exit(1)
"""


def test_a_part_has_its_other_rows_whatever_some_do(tmp_path):
    one = gpu.Part("one", "", 60.0, ("-c", WITH_ROWS))
    (tmp_path / "one.json").write_text(json.dumps({"rows": [{"name": "old"}], "running": None}))
    outcome = gpu.run_part(one, tmp_path, 240.0)
    rows = on_disk(tmp_path / "one.json")["rows"]
    failures = [(row["name"], row.get("failure", "").split(":")[0][:12]) for row in rows]
    wrong = {"b": "the process ", "d": "ZeroDivision"}
    assert failures == [(name, wrong.get(name, "")) for name in "abcde"]
    assert len({row["pid"] for row in rows if "pid" in row}) == 2, "measured once"
    assert not outcome["passed"] and outcome["failed"] == 2
    assert outcome["note"].startswith("2 of 5 rows: b: the process ended")
    assert outcome["note"].endswith("exit code -6, begun again")


def test_parts_fit_a_call_and_those_that_do_not_are_named():
    now, ran = [0.0], []

    def run(one: gpu.Part, out: Path, limit_s: float) -> dict[str, Any]:
        ran.append(one.name)
        assert limit_s >= one.most_s / 2
        now[0] += limit_s  # the worst case
        return {"name": one.name, "passed": False, "note": "", "seconds": limit_s}

    later, calls = [one.name for one in gpu.parts()], 0
    while later:
        begin = now[0]
        plan = [one for one in gpu.parts() if one.name in later]
        later = gpu.run_parts(plan, Path(), gpu.BUDGET_S, run=run, clock=lambda: now[0])
        assert now[0] - begin <= gpu.BUDGET_S < 600 - 2 * 10
        calls += 1
    assert ran == [one.name for one in gpu.parts()] and calls <= 4


def test_without_a_gpu_the_plan_is_printed(monkeypatch, capsys):
    text = (ROOT / "tests/triton_contract.py").read_text()
    assert all(f"def {name}(" in text for name in gpu_parts.SANITIZED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    printed = capsys.readouterr().out
    assert all(f"python {' '.join(one.command)}" in printed for one in gpu.parts())


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


def test_caches_that_do_not_fit_stay_behind(tmp_path):
    for name in ("a.json", "cache/triton/k/one.cubin", "cache/triton/k/one.ttir", "cache/xdg/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(200_000))
    kept = {"gpu/a.json", "gpu/cache/triton/k/one.cubin", "gpu/cache/xdg/c"}
    assert gpu.pack(tmp_path) == [] and packed(tmp_path) == kept
    left = gpu.pack(tmp_path, limit=150_000)
    assert left == ["cache/xdg/c", "cache/triton/k/one.cubin"]
    assert packed(tmp_path) == {"gpu/a.json"}, "results are always in it"


def packed(out: Path) -> set[str]:
    with tarfile.open(out / "gpu.tar.gz") as archive:
        return set(archive.getnames())


# ---- the whole ---------------------------------------------------------------------------

# Nothing in it needs a solver.
DRY = """
import runpy, sys
sys.modules.update(dict.fromkeys(("pulp", "highspy", "matplotlib")))
sys.argv = ["gpu", "--dry-run", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_a_dry_run_measures_something_in_every_part(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The others are these with other arguments, or judged above and below.
    names = ["smoke", "kernels_float16", "profile"]
    command = [sys.executable, "-c", DRY, "--out", str(tmp_path), "--parts", ",".join(names)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "To go on" not in ended.stdout, "its budget reaches for everything"
    files = {f"gpu/{name}.{kind}" for name in names for kind in ("json", "log")}
    files |= {"gpu/gpu.json", "gpu/gpu.md", "gpu/full.trace.json.gz", "gpu/block.trace.json.gz"}
    assert files <= packed(tmp_path)
    whole = on_disk(tmp_path / "gpu.json")
    assert [one["name"] for one in whole["rows"]] == names
    assert all(one["passed"] for one in whole["rows"]) and not whole["targets"]

    steps = on_disk(tmp_path / "smoke.json")["rows"]
    trained = [row for row in steps if "update_difference" in row]
    assert {row["setting"].split(",")[0] for row in trained} == set(gpu_parts.LAYOUTS)
    assert {row["travelled"] for row in trained} == {0, 11}, "all matrices travel, or none"
    assert any("period" in row["setting"] for row in trained)
    full, block = on_disk(tmp_path / "profile.json")["rows"]
    assert (full["name"], block["name"]) == ("full step", "block step")
    for row in (full, block):
        assert row["host_ms"] > 0 and row["aten_calls"] > 0 and row["kernels"] > 0
        assert {"busy_ms", "idle_ms", "longest_gaps_us", "launches", "step_bytes"} <= row.keys()
    measured = [r for r in on_disk(tmp_path / "kernels_float16.json")["rows"] if "median_ms" in r]
    assert {"standard", "ours"} <= {row["contender"] for row in measured}


def test_a_call_that_is_cut_off_leaves_an_archive(tmp_path, monkeypatch):
    one = part("rows({'name': 'a'}); signal.pause()")
    monkeypatch.setattr(gpu, "parts", lambda dry=False: (one,))
    monkeypatch.setattr(gpu, "BUDGET_S", 60.0)

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
    assert {"gpu/gpu.json", "gpu/one.json"} <= packed(tmp_path)
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
        (tmp_path / "kernels_float16.json").write_text(json.dumps(found))
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
