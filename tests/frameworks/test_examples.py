"""The scripts of examples/frameworks run, and what they train learns. So does the demo, and it
says who is ahead at equal time."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import runpy
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
    "plain_loop.py": (("transformers",), 2),
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
    assert {script.split()[0] for script in RUNS} == scripts


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


def hand_made(name, step_s, validation, steps=10):
    """A run of steps that take as long, validated as often as there are losses."""
    run = demo.Run(name, 1e-3, losses=[5.0 - step / 10 for step in range(steps)], tokens=steps)
    run.elapsed = [step_s * (step + 1) for step in range(steps)]
    run.step_ms = [1.0] * steps
    ends = [steps * part // len(validation) for part in range(1, len(validation) + 1)]
    run.validation = list(zip(ends, validation, strict=True))
    return run


# After 10 s: dmuon, by a straight line between 2.0 at 6.25 s and 1.6 at 12.5 s; and AdamW's end.
SLOWER = "dmuon 1.7600, AdamW {}. dmuon was at step 8 of 10, its learning-rate schedule"
SLOWER += " unfinished, which counts against it."
AHEAD = {
    "ahead": (1.25, 1.0, 1.9, SLOWER.format("1.9000: dmuon is ahead by 0.140")),
    "behind": (1.25, 1.0, 1.7, SLOWER.format("1.7000: AdamW is ahead by 0.060")),
    "equal": (1.25, 1.0, 1.765, SLOWER.format("1.7650: equal within 0.01")),
    "diverged": (1.25, 1.0, math.nan, SLOWER.format("unknown: no comparison")),
    "as quick": (1.0, 1.0, 1.9, "dmuon 1.6000, AdamW 1.9000: dmuon is ahead by 0.300."),
}


@pytest.mark.parametrize("case", AHEAD)
def test_who_is_ahead_at_equal_time(case):
    dmuon_s, adamw_s, adamw_loss, said = AHEAD[case]
    runs = hand_made("dmuon", dmuon_s, [2.0, 1.6]), hand_made("AdamW", adamw_s, [3.0, adamw_loss])
    quicker = "dmuon" if dmuon_s == adamw_s else "AdamW"
    start = f"At equal time (10.0 s, when {quicker} ended): validation loss "
    assert demo.at_equal_time(*runs) == start + said
