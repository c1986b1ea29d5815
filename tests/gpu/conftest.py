"""Tests that need a GPU: all of them are skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmuon.kernels.choice import why_not


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # pyproject.toml sets this option of pytest-timeout, and --strict-config refuses unknown ones.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed: has no effect")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not("triton", "cuda", torch.float16):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)
