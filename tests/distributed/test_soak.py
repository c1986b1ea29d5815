"""The short form of `make soak`."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Pools

pytestmark = pytest.mark.cpu_only("its processes use gloo")


def test_hundreds_of_steps_in_all_layouts_in_turn(pools: Pools) -> None:
    asked = {"seed": 1, "steps": 500, "seconds": 15.0, "say": False}
    pools(2).run("tests.soak", "soak", asked)
