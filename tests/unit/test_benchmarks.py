"""The harness that all benchmarks share."""

from __future__ import annotations

from benchmarks.timing import Laps, take_turns


def test_contenders_take_turns_and_one_that_fails_takes_part_no_more():
    order: list[str] = []

    def turn(name: str) -> Laps:
        order.append(name)
        if len(order) == 9:
            raise MemoryError("too large")
        return (float(len(order)),)

    failures: dict[str, Exception] = {}
    contenders = {name: lambda n=name: turn(n) for name in "abc"}
    times = take_turns(contenders, 3, warm_up=1, failures=failures)
    assert "".join(order) == "abc" + "bca" + "cab" + "ac"
    assert times == {"a": [(6.0,), (8.0,), (10.0,)], "c": [(5.0,), (7.0,), (11.0,)]}
    assert str(failures["b"]) == "too large"
