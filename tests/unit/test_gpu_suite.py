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

from benchmarks import gpu, gpu_accuracy, gpu_parts, gpu_targets, results
from benchmarks.kernel_timing import _PRODUCTS
from benchmarks.results import LOST, Rows
from dmuon.kernels.newton_schulz import iterate_with
from dmuon.types import KernelChoice

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # processes import torch several times


# ---- rows --------------------------------------------------------------------------------


def on_disk(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def failing(error: BaseException) -> Any:
    def measure() -> dict[str, Any]:
        raise error

    return measure


def test_every_row_is_on_disk_when_it_is_measured(tmp_path):
    path = tmp_path / "new" / "rows.json"
    rows = Rows(str(path), CPU)

    def second() -> dict[str, Any]:
        found = on_disk(path)
        assert [row["name"] for row in found["rows"]] == ["a"]
        assert found["running"] == {"name": "b", "size": 3}, "what runs is told before it begins"
        return {"ms": 2}

    assert rows.attempt("a", lambda: {"ms": 1})
    assert rows.attempt("b", second, size=3)
    found = on_disk(path)
    assert found["rows"] == [{"name": "a", "ms": 1}, {"name": "b", "size": 3, "ms": 2}]
    assert found["running"] is None and {"machine", "versions", "date"} <= found.keys()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("80 GiB"), ValueError("x"), AssertionError(), KeyError("k")]
)
def test_what_a_row_raises_is_recorded_and_passed_by(tmp_path, error):
    path = tmp_path / "rows.json"
    rows = Rows(str(path), CPU)
    assert not rows.attempt("bad", failing(error), m=4)
    assert rows.attempt("good", lambda: {"passed": True})
    assert not rows.attempt("good", failing(error)), "known: not measured again"
    bad, good = on_disk(path)["rows"]
    assert bad["failure"].startswith(type(error).__name__) and "test_gpu_suite.py" in bad["trace"]
    assert bad["m"] == 4 and good["passed"]
    assert rows.failed == [bad]


def test_an_interrupted_row_is_recorded(tmp_path):
    path = tmp_path / "rows.json"
    rows = Rows(str(path), CPU)
    with pytest.raises(KeyboardInterrupt):
        rows.attempt("slow", failing(KeyboardInterrupt()))
    (row,) = on_disk(path)["rows"]
    assert row["failure"].startswith("interrupted after")


def test_nothing_is_begun_when_time_is_over(tmp_path):
    path = tmp_path / "rows.json"
    rows = Rows(str(path), CPU, budget_s=0.0)
    assert not rows.attempt("late", failing(AssertionError("it ran")))
    found = on_disk(path)
    assert found["left_out"] == ["late"] and not rows.failed


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
    path = tmp_path / "rows.json"
    rows = Rows(str(path), CPU)
    rows.device = torch.device("cuda", 0)
    lost = failing(RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: lost())
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        rows.attempt("a", lost)
    assert ended.value.code == LOST
    assert on_disk(path)["rows"][0]["failure"].startswith("RuntimeError: an illegal")


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


def part(*command: str, **how: Any) -> gpu.Part:
    return gpu.Part("one", "", 60.0, command, **how)


WITH_ROWS = """
import sys, torch
from benchmarks.results import Rows
rows = Rows(sys.argv[1], torch.device("cpu"), resume=True)
for name, code in (("a", "1"), ("b", sys.argv[2]), ("c", "1")):
    rows.attempt(name, lambda: {"value": eval(code)})
sys.exit(1 if rows.failed else 0)
"""


@pytest.mark.parametrize(
    ("code", "limit_s", "note"),
    [
        ("raise SystemExit(3)", 120, "exit code 3"),
        ("import os; os.abort()", 120, "exit code -6"),
        ("import signal; signal.pause()", 5.0, "out of time, interrupted"),
    ],
)
def test_how_a_part_without_rows_ends(tmp_path, code, limit_s, note):
    one = part("-c", f"print('{{out}}', flush=True); {code}", grace_s=1.0)
    outcome = gpu.run_part(one, tmp_path, limit_s)
    assert (outcome.passed, outcome.note) == (False, note)


def test_a_part_can_be_interrupted_in_the_background_of_a_shell(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        one = part("-c", "print('{out}', flush=True); import signal; signal.pause()", grace_s=30.0)
        outcome = gpu.run_part(one, tmp_path, 8.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.note == "out of time, interrupted"


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("1 / 0", "1 of 3 rows: b: ZeroDivisionError: division by zero"),
        ("__import__('os').abort()", "1 of 3 rows: b: the process ended"),
    ],
)
def test_a_part_has_its_other_rows_whatever_one_does(tmp_path, code, note):
    one = part("-c", WITH_ROWS, "{out}/one.json", code, grace_s=0.5)
    outcome = gpu.run_part(one, tmp_path, 120.0)
    assert not outcome.passed and outcome.note.startswith(note)
    rows = on_disk(tmp_path / "one.json")["rows"]
    assert [row["name"] for row in rows] == ["a", "b", "c"] and rows[2]["value"] == 1


def test_a_part_goes_on_after_a_row_that_hangs(tmp_path):
    code = "__import__('signal').pause()"
    one = part("-c", WITH_ROWS, "{out}/one.json", code, stall_s=15.0, grace_s=15.0)
    outcome = gpu.run_part(one, tmp_path, 240.0)
    rows = on_disk(tmp_path / "one.json")["rows"]
    assert [(row["name"], "failure" in row) for row in rows] == [("a", 0), ("b", 1), ("c", 0)]
    assert outcome.note.startswith("1 of 3 rows: b: interrupted after")


def test_a_part_whose_planted_row_raises_is_let_alone(tmp_path):
    """Also where it is seen while it runs, as by chance on a busy machine."""
    code = (
        "import json, pathlib, sys, time\n"
        "running = {'name': 'b', 'planted': True}\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'rows': [], 'running': running}))\n"
        "time.sleep(1)\n"
    )
    log, deadline = tmp_path / "log", time.monotonic() + 60
    for fault, ended in (("raise:1", (0, "")), ("hang:1", (-2, "out of time, interrupted"))):
        one = part(
            "-c",
            "import signal; signal.signal(2, signal.SIG_DFL)\n" + code,
            "{out}/one.json",
            plant=fault,
        )
        assert gpu._run(one, tmp_path, log, deadline) == ended
        (tmp_path / "one.json").unlink()


def test_what_a_part_started_ends_with_it(tmp_path):
    """A process that looks at no signal, started by one that does not wait for it."""
    stubborn = "import signal,time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys, pathlib\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {stubborn!r}])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
    )
    gpu.run_part(part("-c", code, "{out}/pid"), tmp_path, 60.0)
    pid = (tmp_path / "pid").read_text()
    while os.path.exists(f"/proc/{pid}"):  # until whoever adopted it has looked
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.01)


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
    assert [name for name, _ in ran] == [one.name for one in gpu.parts()]
    assert calls <= 4
    for (_, limit_s), one in zip(ran, gpu.parts(), strict=True):
        assert limit_s >= one.most_s / 2


def test_the_order_of_the_parts():
    """What fills the caches comes first, and what is judged before the rest."""
    assert [one.name for one in gpu.parts()] == [
        "smoke", "tests", "accuracy", "step", "kernels_float16", "kernels_bfloat16", "profile",
        "sanitizer", "rest_float16",
    ]  # fmt: skip
    assert [one.name for one in gpu.parts()] == [one.name for one in gpu.parts(dry=True)]
    commands = {one.name: " ".join(one.command) for one in gpu.parts()}
    assert "--sets llama-8b experts" in commands["kernels_float16"]
    assert "--tune-s 150" in commands["kernels_float16"]
    assert "llama-8b" not in commands["rest_float16"]
    assert "--both-ways" in commands["accuracy"]


@pytest.mark.parametrize("has_xdist", [True, False])
def test_gpu_tests_run_in_parallel_where_pytest_can(monkeypatch, has_xdist):
    spec = object() if has_xdist else None
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: spec)
    command = next(one.command for one in gpu.parts() if one.name == "tests")
    assert (command[-3:-1] == ("-n", "12")) is has_xdist


def test_skipped_tests_are_no_success_on_a_gpu(tmp_path):
    one = replace(part(), name="tests")
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
    assert gpu.pack(out, path, limit=250_000) == ["cache/xdg/c", "cache/triton/k/one.cubin"]
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["gpu/a.json"], "results are always in it"


def test_without_a_gpu_the_plan_is_printed(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    printed = capsys.readouterr().out
    assert all(one.name in printed for one in gpu.parts())


# ---- the whole ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a dry run, and how it ended."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return out, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def test_a_dry_run_walks_through_every_part(dry):
    out, ended = dry
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = on_disk(out / "gpu.json")
    assert [one["name"] for one in whole["parts"]] == [one.name for one in gpu.parts()]
    assert all(one["passed"] for one in whole["parts"])
    assert whole["targets"] and all(target["passed"] is None for target in whole["targets"])
    assert "To go on" not in ended.stdout, "its budget reaches for everything"


def test_everything_is_in_the_archive_of_a_dry_run(dry, tmp_path):
    out, _ = dry
    with tarfile.open(out / "gpu.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    names = {str(path.relative_to(tmp_path / "gpu")) for path in (tmp_path / "gpu").rglob("*.*")}
    with_rows = [one.name for one in gpu.parts() if one.name != "tests"]
    assert {"gpu.json", "gpu.md", "tests.log", "tests.xml", "full.trace.json.gz"} <= names
    for name in with_rows:
        assert {f"{name}.json", f"{name}.log"} <= names
        found = on_disk(tmp_path / "gpu" / f"{name}.json")
        assert found["running"] is None
        assert len({row["name"] for row in found["rows"]}) > 1
    # That the archive was written when all was: it holds what the folder holds.
    assert (tmp_path / "gpu" / "gpu.json").read_text() == (out / "gpu.json").read_text()


def test_a_dry_run_survives_its_faults(dry):
    """A row that raises, one that hangs till its part's time is over, one that no signal ends."""
    out, _ = dry
    faults = {
        "accuracy": ("RuntimeError: a planted failure", "planted fault survived"),
        "kernels_bfloat16": ("interrupted after", "out of time, interrupted"),
        "rest_float16": ("the process ended while", "killed, begun again"),
    }
    notes = {one["name"]: one["note"] for one in on_disk(out / "gpu.json")["parts"]}
    for name, (failure, note) in faults.items():
        rows = on_disk(out / f"{name}.json")["rows"]
        at = next(i for i, row in enumerate(rows) if "planted" in row)
        assert rows[at]["failure"].startswith(failure)
        assert at > 0 and note in notes[name]
        if name != "kernels_bfloat16":  # whose time was over
            assert len(rows) > at + 3
    planted = [one.name for one in gpu.parts(dry=True) if one.plant]
    assert sorted(planted) == sorted(faults)


def test_what_a_dry_run_measures(dry):
    out, _ = dry
    steps = on_disk(out / "smoke.json")["rows"] + on_disk(out / "step.json")["rows"]
    trained = [row for row in steps if "update_difference" in row]
    assert {row["setting"].split(",")[0] for row in trained} == set(gpu_parts.LAYOUTS)
    assert {row["travelled"] for row in trained} == {0, 11}, "all matrices travel, or none"
    assert any("(block)" in row["worst"] or "period" in row["setting"] for row in trained)
    full, block = on_disk(out / "profile.json")["rows"]
    assert (full["name"], block["name"]) == ("full step", "block step")
    for row in (full, block):
        assert row["host_ms"] > 0 and row["aten_calls"] > 0 and row["kernels"] > 0
        assert {"busy_ms", "idle_ms", "longest_gaps_us", "launches", "step_bytes"} <= row.keys()
    measured = [row for row in on_disk(out / "kernels_float16.json")["rows"] if "median_ms" in row]
    assert {"standard", "ours"} <= {row["contender"] for row in measured}
    ways = [row["reduced"] for row in on_disk(out / "accuracy.json")["rows"] if "float16" in
            row.get("kernel", "")]  # fmt: skip
    assert ways.count(True) == ways.count(False) > 0


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


# ---- targets, accuracy, training ---------------------------------------------------------


def suite_files(folder: Path, ms: float, gpu_name: str = "NVIDIA H200") -> None:
    rows = [
        {"name": "tune 1 x [4096, 4096]", "kernel": "standard/torch/float16"},
        {
            "case": "llama-8b layer",
            "contender": "ours",
            "median_ms": ms,
            "ratio_to_floor": ms / 12.72,
            "ratio_to_compiled_bfloat16": ms / 27,
        },
        {
            "case": "128 experts 768 x 2048",
            "contender": "ours_whole",
            "median_ms": 1,
            "ratio_to_floor": 2,
            "ratio_to_standard": 0.2,
        },
    ]
    (folder / "kernels_float16.json").write_text(
        json.dumps({"machine": {"gpu": gpu_name}, "rows": rows})
    )
    kernel = "standard/triton/float16"
    row = {"name": f"gaussian {kernel}", "kernel": kernel, "error": 0.01, "expected": 0.02}
    row["passed"] = True
    (folder / "accuracy.json").write_text(json.dumps({"rows": [row]}))


def test_targets(tmp_path):
    assert all(target.passed is False for target in gpu_targets.targets(tmp_path)), "nothing there"
    suite_files(tmp_path, 15.0)
    assert [t.passed for t in gpu_targets.targets(tmp_path)] == [True] * 5
    suite_files(tmp_path, 16.0)
    assert [t.passed for t in gpu_targets.targets(tmp_path)] == [False, False, False, True, True]
    suite_files(tmp_path, 15.0, "NVIDIA A100")
    assert gpu_targets.targets(tmp_path)[0].passed is None, "the limit is an H200's"


def test_a_failed_row_is_no_accuracy(tmp_path):
    suite_files(tmp_path, 15.0)
    path = tmp_path / "accuracy.json"
    rows = on_disk(path)["rows"] + [{"name": "gaussian gram[2]/triton/float16", "failure": "x"}]
    path.write_text(json.dumps({"rows": rows}))
    assert gpu_targets.targets(tmp_path)[-1].passed is False


def test_the_floor_is_a_sustained_rate():
    assert _PRODUCTS["cuda"] == 10


def test_accuracy_of_what_runs_here(tmp_path, capsys):
    path = tmp_path / "accuracy.json"
    assert gpu_accuracy.main(["--device", "cpu", "--json", str(path)]) == 0
    rows = on_disk(path)["rows"]
    assert {row["kernel"].split("/")[-1] for row in rows} == {
        "float64", "float32", "float16", "bfloat16",
    }  # fmt: skip
    assert capsys.readouterr().out.count("pass") == len(rows) >= 11


@pytest.mark.parametrize("fault", [1.2, float("nan")])
def test_accuracy_sees_a_wrong_kernel(monkeypatch, fault):
    (_, x, exact), _ = gpu_accuracy.inputs(32, 64)
    choice = KernelChoice.parse("standard/torch/float32")
    good = gpu_accuracy._row("log-spaced", x, exact, choice, 1e-4, CPU)
    assert good["passed"]
    monkeypatch.setattr(gpu_accuracy, "iterate_with", lambda *args: fault * iterate_with(*args))
    assert not gpu_accuracy._row("log-spaced", x, exact, choice, 1e-4, CPU)["passed"]


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
    for row, (switch, _) in zip(rows.rows, seen, strict=True):
        assert row["reduced"] is switch


def test_gaps():
    assert gpu_parts.gaps([]) == []
    assert gpu_parts.gaps([(0, 10), (2, 3), (4, 5), (12, 13)]) == [2]


def test_the_tests_that_the_sanitizer_runs_exist():
    text = (ROOT / "tests/gpu/test_triton.py").read_text()
    assert all(f"def {name}(" in text for name in gpu_parts.SANITIZED)


@pytest.mark.parametrize("travels", [False, True])
def test_a_wrong_update_is_seen(monkeypatch, travels):
    setting = gpu_parts.Setting("sharded", travels=travels)
    wrong = gpu_parts.newton_schulz
    monkeypatch.setattr(gpu_parts, "newton_schulz", lambda x, **how: 1.02 * wrong(x, **how))
    with gpu_parts.one_process(CPU):
        row = gpu_parts.step_row(setting, CPU, 2, toy=True)
    assert not row["passed"] and row["update_difference"] > row["limit"]


BLOCKED = """
import sys
for name in ("pulp", "highspy", "hypothesis", "matplotlib"):
    sys.modules[name] = None
import torch
from benchmarks import gpu, gpu_accuracy, gpu_parts, kernels
torch.set_num_threads(1)
device = torch.device("cpu")
with gpu_parts.one_process(device):
    for layout in gpu_parts.LAYOUTS:
        setting = gpu_parts.Setting(layout, "torch")
        row = gpu_parts.step_row(setting, device, 3, toy=True)
        print(layout, row["passed"], *row["ran"].values())
"""


def test_nothing_needs_a_solver_and_layouts_agree_with_the_reference():
    found = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = found.stdout.strip().splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "True"] for name in gpu_parts.LAYOUTS]
    assert all("/torch/float32" in line for line in lines)
