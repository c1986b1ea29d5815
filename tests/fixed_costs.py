"""What tests plan with unless they are about measuring: costs that do not depend on the clock.

Owners and batches decide in which order numbers are added, so a test that compares numbers would
see how busy the machine was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from dmuon.scheduler.costs import CostTable


def analytic_costs(*_: object, momentum: bool = True, **__: object) -> CostTable:
    """In place of `dmuon.measure.measured_costs`."""
    return CostTable.analytic(momentum=momentum)


def usual_seconds(_: object, side: int) -> tuple[float, float, float]:
    """In place of `dmuon.kernels.choice._product_seconds`: strips win from 512 rows on."""
    whole = 5e-6 + 2 * side**3 / 1e11
    return 1e-5, whole, whole * (0.8 if side >= 512 else 1.1)


def fixed_products() -> Any:
    """A patch; a new one each time, because one is entered once."""
    return mock.patch("dmuon.kernels.choice._product_seconds", usual_seconds)


@pytest.fixture(autouse=True, scope="session")
def costs_without_a_clock() -> Iterator[None]:
    with fixed_products(), mock.patch("dmuon.api.measured_costs", analytic_costs):
        yield
