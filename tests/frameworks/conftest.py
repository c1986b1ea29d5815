from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.distributed.harness import Pools
from tests.fixed_costs import analytic_costs, fixed_products


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Processes apart from those of other tests: frameworks leave much behind in a process."""
    made = Pools()
    yield made
    made.close()


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def costs_without_a_clock() -> Iterator[None]:
    with fixed_products(), mock.patch("dmuon.api.measured_costs", analytic_costs):
        yield
