"""The scripts of examples/frameworks run, and what they train learns. So does the demo."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.demo import demo
from tests.distributed.harness import distributed
from tests.frameworks import common

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"

# What each needs beside torch, and the number of processes.
RUNS = {
    "trainer.py": (("transformers", "accelerate"), 2),
    "accelerate_loop.py": (("transformers", "accelerate"), 2),
    "lightning_module.py": (("transformers", "lightning"), 2),
    "torchtitan_container.py": ((), 2),
    "lora.py": (("transformers", "peft"), 1),
    "plain_loop.py --fsdp2": (("transformers",), 2),
}


@distributed()
def runs(rank, world, script):
    name, *arguments = script.split()
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(common.launched(rank, world))
        if "accelerate" in RUNS[script][0]:
            stack.enter_context(common.accelerate_on_cpu())
        # The processes have met, and will go on with other tests.
        for function in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch(f"torch.distributed.{function}"))
        stack.enter_context(mock.patch.object(sys, "argv", [name, *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(FOLDER), *sys.path]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    losses = [float(x) for x in re.findall(r"\b\d\.\d{3,4}\b", printed.getvalue())]
    if rank == 0:
        assert min(losses) < 0.8 * losses[0], printed.getvalue()


@pytest.mark.parametrize("script", RUNS)
def test_example(pools, script):
    needed, world = RUNS[script]
    for name in needed:
        pytest.importorskip(name)
    pools(world).run(__name__, "runs", {"script": script})


def test_all_are_run():
    scripts = {p.name for p in FOLDER.glob("*.py") if not p.name.startswith("_")}
    assert {script.split()[0] for script in RUNS} | {"torchft_replicas.py"} == scripts


def test_replicas_that_leave_and_come_back():
    pytest.importorskip("torchft")
    command = [sys.executable, str(FOLDER / "torchft_replicas.py")]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    off = re.findall(r"replica [01] is within (\S+) of one process", run.stdout)
    assert len(off) == 2 and max(map(float, off)) < 1e-6, run.stdout


@distributed()
def trains(rank, world, folder):
    """The demo, as ``make demo`` runs it, and what it prints."""
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(common.launched(rank, world))
        for function in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch(f"torch.distributed.{function}"))
        command = ["train_gpt.py", "--out", folder, "--steps", "8"]
        stack.enter_context(mock.patch.object(sys, "argv", command))
        stack.enter_context(mock.patch.object(demo, "VALIDATION_WINDOWS", 16))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error", UserWarning)
        demo.main()
    return printed.getvalue()


def test_demo(pools, tmp_path):
    printed, silence = pools(2).run(__name__, "trains", {"folder": str(tmp_path)})
    assert not silence and printed.count("At equal time") == 1
    runs = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert [run["optimizer"] for run in runs] == ["dmuon", "AdamW"]
    for run in runs:
        elapsed = run["elapsed"]
        assert len(elapsed) == len(run["losses"]) == 8
        assert all(a < b for a, b in zip([0.0, *elapsed], elapsed))
        assert run["seconds"] == elapsed[-1] > 8e-3 * run["p10_step_ms"]
        assert [v["step"] for v in run["validation"]] == [2, 3, 4, 6, 7, 8]
        assert [v["seconds"] for v in run["validation"]] == [elapsed[i] for i in (1, 2, 3, 5, 6, 7)]
        assert run["losses"][-1] < 0.9 * run["losses"][0]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_fine_tuning(tmp_path, monkeypatch):
    """Runs that change go on from AdamW's weights, those on the manual from its last ones."""
    import finetune  # `benchmarks.demo` has put the examples on the path

    small = {"LRS": (1e-3,), "MOMENTS": (0, 2), "STEPS": 6, "TUNING_STEPS": 4}
    for name, value in small.items():
        monkeypatch.setattr(finetune, name, value)
    monkeypatch.setattr(demo, "VALIDATION_WINDOWS", 8)
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--json", str(file), "--seeds", "1"])
    finetune.main()
    adamw, *changed, one, other = json.loads(file.read_text())["rows"]
    assert [row["losses"]["0"] for row in changed] == [adamw["losses"]["0"]] * 3
    assert len({row["losses"]["2"] for row in changed}) == 3
    assert all(row["losses"]["2"] < adamw["losses"]["0"] for row in (adamw, *changed))
    assert one["losses"]["0"] == other["losses"]["0"] > max(r["losses"]["4"] for r in (one, other))
    assert one["optimizer"] == "AdamW" != other["optimizer"]
