from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.harness import Pools
from tests.fixed_costs import costs_without_a_clock  # noqa: F401


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Processes apart from those of other tests: frameworks leave much behind in a process."""
    made = Pools()
    yield made
    made.close()


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)
