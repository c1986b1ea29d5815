from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.distributed.harness import Pools


@pytest.fixture(scope="package")  # gone before other tests run beside their threads
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()
    assert multiprocessing.active_children() == [], "stray processes"
