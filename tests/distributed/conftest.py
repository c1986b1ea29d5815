from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.distributed.harness import Pools


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


@pytest.fixture(scope="package")  # gone before other tests run beside their threads
def pools(pytestconfig: pytest.Config) -> Iterator[Pools]:
    made = Pools(pytestconfig.getoption("--device"))
    yield made
    made.close()
    assert multiprocessing.active_children() == [], "stray processes"
