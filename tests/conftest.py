"""Tests keep measured costs to themselves: their cache is a folder that goes when they are done.

Processes that tests start inherit it. ``--device cuda`` runs the distributed tests on GPUs, with
NCCL, one GPU per rank. Hypothesis draws the same examples every time, and with
``--hypothesis-profile=long`` thousands of others where a test has no number of its own.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import pytest
import torch
from hypothesis import settings

settings.register_profile("dmuon", derandomize=True, deadline=None)
settings.register_profile("long", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("dmuon")

_folder = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the distributed tests"
    )
    parser.addoption(
        "--as-drawn", action="store_true", help="show failing cases of the matrix as they are"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cpu_only(reason): a distributed test for --device cpu alone"
    )
    folder = tempfile.TemporaryDirectory(prefix="dmuon-tests-")
    config.stash[_folder] = folder
    os.environ["XDG_CACHE_HOME"] = folder.name
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no GPU here")


_frozen_at = 0  # the number of modules then


def pytest_runtest_setup() -> None:
    """Freeze imported objects, so that the garbage collector no longer lists them: dmuon searches
    its lists for models, and with transformers imported each search takes 0.2 s."""
    global _frozen_at
    if len(sys.modules) > _frozen_at + 20:
        gc.collect()
        gc.freeze()
        _frozen_at = len(sys.modules)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_folder].cleanup()
