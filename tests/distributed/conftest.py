from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness import Pools

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist runs all of them: they share the processes of `pools`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("distributed"))


@pytest.fixture(scope="package")  # gone before other tests run beside their threads
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()
    assert multiprocessing.active_children() == [], "stray processes"
