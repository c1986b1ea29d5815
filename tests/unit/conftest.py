"""Every test starts from the same seed and runs on one thread.

The matrices are too small to gain from more threads, and lose much on a busy machine. Nothing is
measured but by tests of measuring.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from tests.fixed_costs import analytic_costs, fixed_products


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def costs_without_a_clock() -> Iterator[None]:
    with fixed_products(), mock.patch("dmuon.api.measured_costs", analytic_costs):
        yield
