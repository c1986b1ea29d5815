"""Tests keep measured costs to themselves: their cache is a folder that goes when they are done.

Processes that tests start inherit it.
"""

from __future__ import annotations

import os
import tempfile

import pytest

_folder = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="dmuon-tests-")
    config.stash[_folder] = folder
    os.environ["XDG_CACHE_HOME"] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_folder].cleanup()
