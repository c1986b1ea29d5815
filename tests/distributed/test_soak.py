"""The short form of `make soak`."""

from __future__ import annotations

from tests.distributed.harness import Pools


def test_two_thousand_steps_in_all_layouts_in_turn(pools: Pools) -> None:
    asked = {"seed": 1, "steps": 2000, "seconds": 60.0, "say": False}
    pools(2).run("tests.soak", "soak", asked)
