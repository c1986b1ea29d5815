"""What tests plan with unless they are about measuring: costs that do not depend on the clock.

Owners and batches decide in which order numbers are added, so a test that compares numbers would
see how busy the machine was.
"""

from __future__ import annotations

from dmuon.scheduler.costs import CostTable


def analytic_costs(*_: object, momentum: bool = True, **__: object) -> CostTable:
    """In place of `dmuon.measure.measured_costs`."""
    return CostTable.analytic(momentum=momentum)
