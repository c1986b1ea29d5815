"""The schedule of full steps: numbers, functions, checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.config import LinearPeriod, Schedule

periods = st.integers(1, 40)
lengths = st.integers(0, 60)
varying = st.lists(st.floats(1, 12), min_size=1, max_size=10)


def full_steps(schedule: Schedule, count: int) -> list[int]:
    """Those of the next ``count`` steps that are full; the schedule is advanced past them."""
    full = []
    for _ in range(count):
        if schedule.is_full(schedule.t):
            full.append(schedule.t)
        schedule.advance()
    return full


def cycling(values: list[float]) -> Callable[[int], float]:
    return lambda t: values[t % len(values)]


@pytest.mark.parametrize(("period", "count", "full"), [
    (1, 4, [0, 1, 2, 3]),
    (3, 10, [0, 3, 6, 9]),
    (math.inf, 10, []),
    # Rounded down: 2.9 means two steps from one full step to the next.
    (lambda t: 2.9 if t < 6 else 4, 16, [0, 2, 4, 8, 12]),
    # A function that shortens is heeded at once.
    (lambda t: 100 if t < 5 else 2, 10, [0, 5, 7, 9]),
    # It may switch full steps off and on, but not the first.
    (lambda t: math.inf if 3 <= t < 8 else 1, 11, [0, 1, 2, 8, 9, 10]),
    (lambda t: math.inf, 5, [0]),
    # P(t) = 1, 1.5, 2, 2.5, 3, 3, ...
    (LinearPeriod(1, 3, steps=4), 12, [0, 1, 3, 6, 9]),
])  # fmt: skip
def test_full_steps_by_hand(period, count, full):
    schedule = Schedule(period)
    assert schedule.last_full == -1
    seen = []
    for t in range(count):
        assert schedule.t == t
        before = schedule.state()
        assert [schedule.is_full(i) for i in range(20)] == [schedule.is_full(i) for i in range(20)]
        assert schedule.state() == before, "asking changes nothing"
        seen += [t] * schedule.is_full(t)
        schedule.advance()
        assert (schedule.t, schedule.last_full) == (t + 1, seen[-1] if seen else -1)
    assert seen == full


@given(varying, lengths)
def test_distances_of_full_steps_are_those_of_the_function(values, count):
    period = cycling(values)
    full = full_steps(Schedule(period), count)
    assert full[:1] == [0][:count]
    for last, now in pairwise(full):
        assert now - last >= math.floor(period(now))
        assert all(t - last < math.floor(period(t)) for t in range(last + 1, now))


@given(periods, st.integers(1, 100))
def test_a_linear_period_is_whole_where_it_should_be(start, steps):
    # One longer each step: a value a rounding error below would cost a whole step.
    period = LinearPeriod(start, start + steps, steps)
    assert [period(t) for t in range(steps + 1)] == list(range(start, start + steps + 1))


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ((0.5, 20, 90), ValueError, r"start must be a finite number >= 1, found 0\.5"),
    ((2, math.inf, 90), ValueError, r"end must be .*, found inf"),
    ((2, 20, 0), ValueError, r"steps must be an integer >= 1, found 0"),
    ((2, 20, 9.0), TypeError, r"steps must be .*, found 9\.0: write 9"),
    (("2", 20, 90), TypeError, r"start must be .*, found '2'"),
])  # fmt: skip
def test_linear_periods_that_make_no_sense(arguments, error, words):
    with pytest.raises(error, match=rf"LinearPeriod\.{words}"):
        LinearPeriod(*arguments)


@pytest.mark.parametrize(("period", "error"), [
    *((value, TypeError) for value in (True, "5", None)),
    *((value, ValueError) for value in (0, -math.inf, math.nan, 0.5, 2.5)),
])  # fmt: skip
def test_periods_that_make_no_sense(period, error):
    with pytest.raises(error, match=f"period must be a whole number of.*found {period!r}"):
        Schedule(period)


@pytest.mark.parametrize(("value", "error", "first"), [
    *((value, ValueError, 3) for value in (0.99, 0, -2, math.nan, -math.inf)),
    *((value, TypeError, 0) for value in (None, "2", True)),
])  # fmt: skip
def test_a_function_that_goes_wrong_names_the_step_and_the_value(value, error, first):
    schedule = Schedule(lambda t: 2 if t < first else value)
    full_steps(schedule, first)
    told = rf"t={first}, .*must be a number >= 1 .*found {value!r}"
    with pytest.raises(error, match=told):
        schedule.is_full(schedule.t)
    with pytest.raises(error, match=f"t={first}"):
        schedule.advance()
    assert schedule.t == first


ODD = (math.nan, 1.5, 2**70, -1, "3", None, True)


@pytest.mark.parametrize(("state", "words"), [
    ({"step": 3, "period": "2"}, r"lacks \['last_full'\]"),
    ({}, r"lacks \['last_full', 'period', 'step'\]"),
    ({"step": 3, "last_full": 3, "period": "2"}, "step=3, last_full=3"),
    ({"step": 3, "last_full": -2, "period": "2"}, "step=3, last_full=-2"),
    ({"step": -1, "last_full": -1, "period": "2"}, "step=-1, last_full=-1"),
    *(({"step": v, "last_full": 4, "period": "2"}, f"integers.*step={v}") for v in ODD),
    *(({"step": 5, "last_full": v, "period": "2"}, f"integers.*last_full={v}")
      for v in ODD if v != -1),
])  # fmt: skip
def test_a_damaged_state_changes_nothing(state: dict[str, Any], words: str):
    schedule = Schedule(2)
    full_steps(schedule, 3)
    before = schedule.state()
    with pytest.raises(ValueError, match=words):
        schedule.load(state)
    assert schedule.state() == before


class Rising:
    def __call__(self, t: int) -> float:
        return 1 + t


@pytest.mark.parametrize(("period", "text"), [
    (5, "5"),
    (5.0, "5"),
    (math.inf, "inf"),
    (LinearPeriod(2, 20, 90), "LinearPeriod(start=2, end=20, steps=90)"),
    (full_steps, f"{__name__}.full_steps"),
    (Rising(), f"{__name__}.Rising"),
])  # fmt: skip
def test_the_description_is_the_same_in_every_process(period, text):
    assert Schedule(period).describe() == text


@given(
    st.one_of(periods, st.just(math.inf), varying.map(cycling), st.just(LinearPeriod(1, 9, 20))),
    lengths,
    lengths,
)
def test_a_state_continues_the_same_sequence(period, before, after):
    whole = Schedule(period)
    full_steps(whole, before)
    state = whole.state()
    resumed = Schedule(period)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load(state)
    assert resumed.state() == state
    assert full_steps(resumed, after) == full_steps(whole, after)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(("before", "count", "last_full", "after", "then"), [
    (5, 7, 5, LinearPeriod(3, 3, 10), [8, 11]),
    (math.inf, 4, -1, lambda t: 3, [4, 7]),  # block steps alone leave no full step behind
])  # fmt: skip
def test_another_period_goes_on_with_a_warning(before, count, last_full, after, then):
    saved = Schedule(before)
    full_steps(saved, count)
    state = saved.state()
    assert state == {"step": count, "last_full": last_full, "period": str(before)}
    assert {type(v) for v in state.values()} == {int, str}
    schedule = Schedule(after)
    with pytest.warns(RuntimeWarning, match=rf"saved state has period {before},"):
        schedule.load(state)
    assert (schedule.t, schedule.last_full) == (count, last_full)
    assert full_steps(schedule, 6)[:2] == then
