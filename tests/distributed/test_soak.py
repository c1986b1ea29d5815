"""The short form of `make soak`."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Pools

pytestmark = pytest.mark.cpu_only("its processes use gloo")


def test_two_thousand_steps_in_all_layouts_in_turn(pools: Pools) -> None:
    asked = {"seed": 1, "steps": 2000, "seconds": 60.0, "say": False}
    pools(2).run("tests.soak", "soak", asked)
