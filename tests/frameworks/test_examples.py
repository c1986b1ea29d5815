"""The scripts of examples/frameworks run, and what they train learns."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

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
