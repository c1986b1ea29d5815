"""Tests keep measured costs to themselves: their cache is a folder that goes when they are done.

Processes that tests start inherit it. Hypothesis draws the same examples every time, and with
``--hypothesis-profile=long`` thousands of others where a test has no number of its own.
"""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("dmuon", derandomize=True, deadline=None)
settings.register_profile("long", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("dmuon")

_folder = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="dmuon-tests-")
    config.stash[_folder] = folder
    os.environ["XDG_CACHE_HOME"] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_folder].cleanup()
