"""The GPU suite as far as a CPU carries it: no failure, no hang and no end of time loses a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_accuracy, gpu_parts, kernels, results
from benchmarks.results import LOST, Rows
from dmuon.types import KernelChoice

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # processes import torch several times


def on_disk(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def failing(error: BaseException) -> Any:
    def measure() -> dict[str, Any]:
        raise error

    return measure


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
        assert "test_gpu_suite.py" in row["trace"] and row in rows.failed
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


def test_a_process_goes_on_after_the_row_in_which_another_ended(tmp_path):
    path = tmp_path / "rows.json"
    first = Rows(str(path), CPU)
    first.attempt("a", lambda: {"ms": 1})
    saved: list[str] = []
    first.attempt("b", lambda: saved.append(path.read_text()))
    path.write_text(saved[0])  # as it was while b ran
    rows = Rows(str(path), CPU, resume=True)
    for name in ("a", "b"):
        assert not rows.attempt(name, failing(AssertionError("it ran again")))
    assert rows.attempt("c", lambda: {"ms": 3})
    names = [(row["name"], "failure" in row) for row in on_disk(path)["rows"]]
    assert names == [("a", False), ("b", True), ("c", False)]
    assert not Rows(str(path), CPU).rows, "without resume it begins anew"


def test_a_lost_device_ends_the_process(tmp_path, monkeypatch):
    """After an illegal access every call of a process fails; another one goes on."""
    rows = Rows(str(tmp_path / "rows.json"), CPU)
    rows.device = torch.device("cuda", 0)
    lost = failing(RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: lost())
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        rows.attempt("a", lost)
    assert ended.value.code == LOST
    assert on_disk(tmp_path / "rows.json")["rows"][0]["failure"].startswith("RuntimeError: an ill")


FAKE_SMI = """#!/bin/sh
case "$*" in
*-lms*) while :; do echo "now, 1980 MHz"; sleep 0.1; done;;
*) echo "580.1, 1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 300.1 W, 700.0 W, 45";;
esac
"""


def test_driver_and_clocks_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert results._nvidia_smi() == "nvidia-smi is not on the PATH"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(FAKE_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = results._nvidia_smi()
    assert isinstance(found, dict)
    assert found["driver_version"] == "580.1" and found["clocks.sm"] == "1980 MHz"
    with gpu._clocks(tmp_path):
        while "1980 MHz" not in (tmp_path / "clocks.csv").read_text():
            time.sleep(0.01)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert str(results._nvidia_smi()).startswith("nvidia-smi failed")


# ---- parts -------------------------------------------------------------------------------


def part(code: str, *arguments: str, **how: Any) -> gpu.Part:
    return gpu.Part("one", "", 60.0, ("-c", code, *arguments), **how)


STUBBORN = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
STARTS_ANOTHER = (
    "import pathlib, subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-S', '-c', {STUBBORN!r}])\n"
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
)
PAUSE = "import signal; print('x', flush=True); signal.pause()"


@pytest.mark.parametrize(
    ("code", "limit_s", "note"),
    [
        ("raise SystemExit(3)", 120, "exit code 3"),
        ("import os; os.abort()", 120, "exit code -6"),
        (PAUSE, 4.0, "out of time, interrupted"),
        (STUBBORN, 3.0, "out of time, killed"),
    ],
)
def test_how_a_part_without_rows_ends(tmp_path, code, limit_s, note):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    try:
        outcome = gpu.run_part(part(code, grace_s=1.0), tmp_path, limit_s)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.passed, outcome.note) == (False, note)


def test_what_a_part_started_ends_with_it(tmp_path):
    gpu.run_part(part(STARTS_ANOTHER, "{out}/pid"), tmp_path, 60.0)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":  # until whoever inherits it looks
        time.sleep(0.01)


# b aborts, d raises, e never ends.
WITH_ROWS = """
import os, signal, sys, torch
from benchmarks.results import Rows
rows = Rows(sys.argv[1], torch.device("cpu"), resume=True)
faults = {"b": os.abort, "d": lambda: 1 / 0, "e": signal.pause}
for name in "abcdef":
    rows.attempt(name, faults.get(name, lambda: {"value": 1}))
sys.exit(1 if rows.failed else 0)
"""


def test_a_part_has_its_other_rows_whatever_some_do(tmp_path):
    one = part(WITH_ROWS, "{out}/one.json", stall_s=15.0, grace_s=10.0)
    outcome = gpu.run_part(one, tmp_path, 240.0)
    rows = on_disk(tmp_path / "one.json")["rows"]
    failures = [(row["name"], row.get("failure", "").split(":")[0][:12]) for row in rows]
    assert failures == [
        ("a", ""), ("b", "the process "), ("c", ""), ("d", "ZeroDivision"), ("e", "interrupted "),
        ("f", ""),
    ]  # fmt: skip
    assert not outcome.passed and outcome.note.startswith("3 of 6 rows: b: the process ended")


def test_parts_fit_a_call_and_those_that_do_not_are_named():
    now = [0.0]
    ran: list[tuple[str, float]] = []

    def run(one: gpu.Part, out: Path, limit_s: float) -> gpu.Outcome:
        ran.append((one.name, limit_s))
        now[0] += limit_s  # the worst case
        return gpu.Outcome(one.name, False, limit_s, "", 0, 0, "")

    later = [one.name for one in gpu.parts()]
    calls = 0
    while later:
        begin = now[0]
        plan = [one for one in gpu.parts() if one.name in later]
        later = gpu.run_parts(plan, Path(), gpu.BUDGET_S, run=run, clock=lambda: now[0])
        assert now[0] - begin <= gpu.BUDGET_S < 600 - 2 * 10
        calls += 1
    assert [name for name, _ in ran] == [one.name for one in gpu.parts()] and calls <= 4
    assert all(limit_s >= one.most_s / 2 for (_, limit_s), one in zip(ran, gpu.parts()))


@pytest.mark.parametrize("has_xdist", [True, False])
def test_the_order_of_the_parts(monkeypatch, has_xdist, capsys):
    """What fills the caches comes first, and what is judged before the rest."""
    spec = object() if has_xdist else None
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: spec)
    commands = {one.name: " ".join(one.command) for one in gpu.parts()}
    assert list(commands) == [one.name for one in gpu.parts(dry=True)] == [
        "smoke", "tests", "accuracy", "step", "kernels_float16", "kernels_bfloat16", "profile",
        "sanitizer", "rest_float16",
    ]  # fmt: skip
    assert commands["tests"].endswith("-n 12 tests/gpu") is has_xdist
    assert "--sets llama-8b experts" in commands["kernels_float16"]
    assert "--tune-s 150" in commands["kernels_float16"]
    assert "llama-8b" not in commands["rest_float16"] and "--both-ways" in commands["accuracy"]
    assert kernels.RATE_PRODUCTS["cuda"][1] == 10, "the floor is a sustained rate"
    text = (ROOT / "tests/triton_contract.py").read_text()
    assert all(f"def {name}(" in text for name in gpu_parts.SANITIZED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2, "without a GPU the plan is printed"
    printed = capsys.readouterr().out
    assert all(name in printed for name in commands)


def test_skipped_tests_are_no_success_on_a_gpu(tmp_path):
    one = replace(part(""), name="tests")
    suites = '<testsuites><testsuite tests="4" skipped="{}"/></testsuites>'
    for skipped, passed in ((4, False), (1, True)):
        (tmp_path / "tests.xml").write_text(suites.format(skipped))
        assert gpu._judge(one, tmp_path, 0, ())[0] is passed
    assert gpu._judge(one, tmp_path, 1, ()) == (False, "exit code 1")


def test_caches_that_do_not_fit_stay_behind(tmp_path):
    out, path = tmp_path / "out", tmp_path / "all.tar.gz"
    for name in ("a.json", "cache/triton/k/one.cubin", "cache/triton/k/one.ttir", "cache/xdg/c"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(os.urandom(200_000))
    assert gpu.pack(out, path) == []
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    assert names == {"gpu/a.json", "gpu/cache/triton/k/one.cubin", "gpu/cache/xdg/c"}
    assert gpu.pack(out, path, limit=150_000) == ["cache/xdg/c", "cache/triton/k/one.cubin"]
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["gpu/a.json"], "results are always in it"


# ---- the whole ---------------------------------------------------------------------------

# Nothing in it needs a solver.
DRY = """
import runpy, sys
sys.modules.update(dict.fromkeys(("pulp", "highspy", "matplotlib")))
sys.argv = ["gpu", "--dry-run", "--out", sys.argv[1]]
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a dry run, unpacked."""
    out = tmp_path_factory.mktemp("gpu")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRY, str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "To go on" not in ended.stdout, "its budget reaches for everything"
    with tarfile.open(out / "gpu.tar.gz") as archive:
        archive.extractall(out / "unpacked", filter="data")
    return out / "unpacked" / "gpu"


def test_a_dry_run_walks_through_every_part_and_survives_its_faults(dry):
    """A row that raises, one that hangs till its part's time is over, one that no signal ends."""
    whole = on_disk(dry / "gpu.json")
    assert (dry.parents[1] / "gpu.json").read_text() == (dry / "gpu.json").read_text()
    assert [one["name"] for one in whole["parts"]] == [one.name for one in gpu.parts()]
    assert all(one["passed"] for one in whole["parts"])
    assert whole["targets"] and all(target["passed"] is None for target in whole["targets"])
    names = {path.name for path in dry.iterdir()}
    assert {"gpu.md", "tests.log", "tests.xml", "full.trace.json.gz", "smoke.log"} <= names
    faults = {
        "accuracy": ("RuntimeError: a planted failure", "planted fault survived"),
        "kernels_bfloat16": ("interrupted after", "out of time, interrupted"),
        "rest_float16": ("the process ended while", "killed, begun again"),
    }
    assert sorted(one.name for one in gpu.parts(dry=True) if one.plant) == sorted(faults)
    notes = {one["name"]: one["note"] for one in whole["parts"]}
    for name, (failure, note) in faults.items():
        rows = on_disk(dry / f"{name}.json")["rows"]
        at = next(i for i, row in enumerate(rows) if "planted" in row)
        assert rows[at]["failure"].startswith(failure)
        assert at > 0 and note in notes[name]
        assert len(rows) > at + 3 or name == "kernels_bfloat16", "whose time was over"


def test_what_a_dry_run_measures(dry):
    steps = on_disk(dry / "smoke.json")["rows"] + on_disk(dry / "step.json")["rows"]
    trained = [row for row in steps if "update_difference" in row]
    assert {row["setting"].split(",")[0] for row in trained} == set(gpu_parts.LAYOUTS)
    assert {row["travelled"] for row in trained} == {0, 11}, "all matrices travel, or none"
    assert any("period" in row["setting"] for row in trained)
    full, block = on_disk(dry / "profile.json")["rows"]
    assert (full["name"], block["name"]) == ("full step", "block step")
    for row in (full, block):
        assert row["host_ms"] > 0 and row["aten_calls"] > 0 and row["kernels"] > 0
        assert {"busy_ms", "idle_ms", "longest_gaps_us", "launches", "step_bytes"} <= row.keys()
    measured = [row for row in on_disk(dry / "kernels_float16.json")["rows"] if "median_ms" in row]
    assert {"standard", "ours"} <= {row["contender"] for row in measured}
    rows = [row for row in on_disk(dry / "accuracy.json")["rows"] if "planted" not in row]
    assert {row["kernel"].split("/")[2] for row in rows} == {
        "float64", "float32", "float16", "bfloat16"}  # fmt: skip
    ways = [row["reduced"] for row in rows if "float16" in row["kernel"]]
    assert ways.count(True) == ways.count(False) > 0 and all(row["passed"] for row in rows)


def test_a_call_that_is_cut_off_leaves_an_archive(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--parts", "kernels_bfloat16"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE)  # fmt: skip
    rows = tmp_path / "kernels_bfloat16.json"
    while process.poll() is None and not (rows.exists() and on_disk(rows)["rows"]):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 1 and "Stopped from outside" in printed
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"gpu/gpu.json", "gpu/kernels_bfloat16.json"} <= set(archive.getnames())


# ---- verdicts ----------------------------------------------------------------------------


def test_targets(tmp_path):
    assert all(target.passed is False for target in gpu.targets(tmp_path)), "nothing there"
    kernel = "gaussian standard/triton/float16"
    row = {"name": kernel, "kernel": kernel, "error": 0.01, "expected": 0.02, "passed": True}

    def judged(ms: float, name: str = "NVIDIA H200", *more: Any) -> list[bool | None]:
        layer = {
            "median_ms": ms,
            "ratio_to_floor": ms / 12.72,
            "ratio_to_compiled_bfloat16": ms / 27,
        }
        experts = {"median_ms": 1, "ratio_to_floor": 2, "ratio_to_standard": 0.2}
        rows = [
            {"name": "tune 1 x [4096, 4096]", "kernel": "standard/torch/float16"},
            {"case": "llama-8b layer", "contender": "ours", **layer},
            {"case": "128 experts 768 x 2048", "contender": "ours_whole", **experts},
        ]
        found = {"machine": {"gpu": name}, "rows": rows}
        (tmp_path / "kernels_float16.json").write_text(json.dumps(found))
        (tmp_path / "accuracy.json").write_text(json.dumps({"rows": [row, *more]}))
        return [target.passed for target in gpu.targets(tmp_path)]

    assert judged(15.0) == [True] * 5
    assert judged(16.0) == [False, False, False, True, True]
    assert judged(15.0, "NVIDIA A100")[0] is None, "the limit is an H200's"
    failed = {"name": "gaussian gram[2]/triton/float16", "failure": "x"}
    assert judged(15.0, "NVIDIA H200", failed)[-1] is False, "a failed row is no accuracy"


@pytest.mark.parametrize("fault", [1.2, float("nan")])
def test_accuracy_sees_a_wrong_kernel(fault):
    (_, x, exact), _ = gpu_accuracy.inputs(32, 64)
    choice = KernelChoice.parse("standard/torch/float32")
    assert gpu_accuracy._row("log-spaced", x, exact, choice, 1e-4, CPU)["passed"]
    assert not gpu_accuracy._row("log-spaced", x, fault * exact, choice, 1e-4, CPU)["passed"]


def test_both_ways_differ_by_torchs_switch(monkeypatch):
    """A row runs with reduced sums allowed and one without; afterwards they are allowed again."""
    matmul = torch.backends.cuda.matmul
    seen: list[tuple[bool, bool]] = []

    def noting(*args: Any) -> dict[str, Any]:
        switch = matmul.allow_fp16_reduced_precision_reduction
        seen.append((switch, matmul.allow_bf16_reduced_precision_reduction))
        return {"passed": True}

    monkeypatch.setattr(gpu_accuracy, "_row", noting)
    rows = Rows(None, CPU)
    gpu_accuracy.measure(rows, CPU, both_ways=True)
    assert seen.count((True, True)) > seen.count((False, False)) > 4
    assert matmul.allow_fp16_reduced_precision_reduction
    assert [row["reduced"] for row in rows.rows] == [switch for switch, _ in seen]


@pytest.mark.parametrize("travels", [False, True])
def test_a_wrong_update_is_seen(monkeypatch, travels):
    setting = gpu_parts.Setting("sharded", travels=travels)
    wrong = gpu_parts.newton_schulz
    monkeypatch.setattr(gpu_parts, "newton_schulz", lambda x, **how: 1.02 * wrong(x, **how))
    with gpu_parts.one_process(CPU):
        row = gpu_parts.step_row(setting, CPU, 2, toy=True)
    assert not row["passed"] and row["update_difference"] > row["limit"]


def test_gaps():
    assert gpu_parts.gaps([]) == []
    assert gpu_parts.gaps([(0, 10), (2, 3), (4, 5), (12, 13)]) == [2]
