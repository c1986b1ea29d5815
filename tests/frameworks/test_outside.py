"""Some of the scripts in `tests.frameworks.outside`, with what `make` installs, in this process.

All of them, also on several processes: ``python -m tests.frameworks.outside --all``.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import common
from tests.frameworks.outside import cells


def here(*arguments: str, processes: int = 1, folder: Path) -> None:
    """`cells.launch` without another process."""
    flag, module, *given = arguments
    assert (flag, processes) == ("-m", 1)
    before = os.getcwd(), sys.argv
    os.chdir(folder)
    sys.argv = [module, *given]
    try:
        if module.startswith(cells.__package__):
            getattr(import_module(module), given[0])(*given[1:])
        else:
            runpy.run_module(module, run_name="__main__")
    except SystemExit as exit:
        assert not exit.code
    finally:
        os.chdir(before[0])
        sys.argv = before[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script by its name. Nothing is compiled, which takes minutes where nothing is cached."""
    monkeypatch.setattr(cells, "launch", here)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    return lambda name: import_module(f"tests.frameworks.outside.{name}")


def test_lightning_cli(tmp_path, script):
    """Clipped, scheduled, accumulated; saved and resumed."""
    pytest.importorskip("jsonargparse")
    cli = script("lightning")
    assert cli.CELLS["accumulate"](tmp_path) <= common.TOLERANCE
    assert cli.fit(tmp_path / "save", cells.How(clip=True, scheduled=True)) <= common.TOLERANCE
    assert cli.CELLS["resume"](tmp_path) <= common.TOLERANCE


def test_litgpt(tmp_path, script):
    """Clipped and accumulated; scheduled, saved and resumed."""
    pytest.importorskip("litgpt")
    litgpt = script("litgpt").CELLS
    assert litgpt["accumulate"](tmp_path) <= common.TOLERANCE
    assert litgpt["save"](tmp_path) <= common.TOLERANCE
