"""Exchange of measured times: when, what is sent, and what a report may say of it."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from dmuon import dedicate_params
from dmuon.comm.transport import LocalTransport, Meter
from dmuon.scheduler.costs import CostTable
from dmuon.step.engine import WARM_UP, WINDOW, StepTelemetry, is_exchange_step

CPU = torch.device("cpu")


class Watch:
    """A stopwatch that says what a test wants; ``ready`` False: the device has not come so far."""

    def __init__(self, ms: float, ready: bool = True) -> None:
        self.ms, self.is_ready = ms, ready

    def ready(self) -> bool:
        return self.is_ready

    def milliseconds(self) -> float:
        assert self.is_ready, "reading it would wait for the device"
        return self.ms


class Pair(LocalTransport):
    """Rank 0 of two; the other one contributes ``other``. Results arrive when waited for."""

    world = 2

    def __init__(self, other: float) -> None:
        self.other = other
        self.sent: list[float] = []
        self.waited = 0

    def all_reduce(self, tensor, *, tag, maximum=False):
        assert tag == "telemetry"
        self.sent.append(tensor[0].item())
        transport, other = self, self.other

        class Arriving:
            def wait(self):
                transport.waited += 1
                tensor[1] += other

        return Arriving()


def steps(telemetry: StepTelemetry, watches) -> None:
    for watch in watches:
        telemetry.begin_step()
        telemetry.watch = watch
        telemetry.finish_step()


def test_the_exchange_steps_are_fixed():
    assert [s for s in range(1200) if is_exchange_step(s)] == [4, 16, 64, 256, 512, 768, 1024]


def test_warm_up_does_not_count():
    transport = Pair(other=7.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(1000.0)] * WARM_UP + [Watch(2.0), Watch(4.0)])
    assert transport.sent == [3.0]
    assert telemetry.measured_ms() == (3.0, 7.0)


def test_the_median_of_the_recent_steps_is_sent():
    transport = Pair(other=1.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(50.0)] * 8 + [Watch(float(ms)) for ms in (9, 1, 8, 2, 7, 3, 6, 500)])
    assert transport.sent[1] == 6.5


def test_a_new_exchange_replaces_the_old_one():
    transport = Pair(other=1.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(2.0)] * 4)
    assert telemetry.measured_ms() == (2.0, 1.0)
    transport.other = 5.0
    steps(telemetry, [Watch(3.0)] * 12)
    assert telemetry.measured_ms() == (3.0, 5.0)


def test_a_step_waits_for_the_exchange_of_the_one_before_only():
    transport = Pair(other=1.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(2.0)] * 4)
    assert transport.waited == 0
    steps(telemetry, [Watch(2.0)])
    assert transport.waited == 1
    assert telemetry.measured_ms() == (2.0, 1.0)
    assert transport.waited == 1


def test_what_the_device_has_not_reached_is_left_out():
    transport = Pair(other=1.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(9.0), Watch(9.0), Watch(2.0), Watch(0.0, ready=False)])
    assert transport.sent == [2.0]


def test_a_rank_without_a_number_keeps_its_last_one():
    transport = Pair(other=1.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    steps(telemetry, [Watch(0.0, ready=False)] * 4)
    assert math.isnan(transport.sent[0])
    assert telemetry.measured_ms() is None, "of rank 0 nothing is known yet"
    steps(telemetry, [Watch(4.0)] * 12)
    assert telemetry.measured_ms() == (4.0, 1.0)
    transport.other = math.nan
    steps(telemetry, [Watch(5.0)] * 48)
    assert telemetry.measured_ms() == (5.0, 1.0)


def test_an_owner_of_nothing_needs_no_time():
    transport = Pair(other=3.0)
    telemetry = StepTelemetry(transport, Meter(), CPU)
    for _ in range(4):
        telemetry.begin_step()  # a real watch that never runs
        telemetry.finish_step()
    assert telemetry.measured_ms() == (0.0, 3.0)


def test_nothing_to_do_is_no_measurement():
    telemetry = StepTelemetry(Pair(other=0.0), Meter(), CPU)
    steps(telemetry, [Watch(0.0)] * 4)
    assert telemetry.measured_ms() is None


def test_one_rank_needs_no_group():
    telemetry = StepTelemetry(LocalTransport(), Meter(), CPU)
    steps(telemetry, [Watch(2.5)] * 4)
    assert telemetry.measured_ms() == (2.5,)


def test_bytes_are_counted():
    meter = Meter()
    telemetry = StepTelemetry(Pair(other=1.0), meter, CPU)
    steps(telemetry, [Watch(2.0)] * 3)
    assert not meter.bytes
    steps(telemetry, [Watch(2.0)])
    assert meter.reset() == {"telemetry": 8}


def test_the_window_is_bounded():
    telemetry = StepTelemetry(Pair(other=1.0), Meter(), CPU)
    steps(telemetry, [Watch(1.0)] * 100)
    assert len(telemetry._recent) == WINDOW


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_an_exchange_does_not_wait_for_the_device():
    device = torch.device("cuda")
    telemetry = StepTelemetry(LocalTransport(), Meter(), device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            watch = telemetry.begin_step()
            watch.start()
            torch.cuda._sleep(10_000_000)
            watch.stop()
            telemetry.finish_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert telemetry.measured_ms() is None or telemetry.measured_ms()[0] > 0


def warned(planned: float | None, watches) -> list[str]:
    telemetry = StepTelemetry(Pair(other=1.0), Meter(), CPU, planned)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        steps(telemetry, watches)
    return [str(w.message) for w in found]


def test_a_step_far_from_its_plan_says_so_once():
    (text,) = warned(1.9, [Watch(820.0)] * 64)
    assert "rank 0 spends 820 ms" in text and "expected 1.9 ms" in text and "432 times" in text
    (text,) = warned(500.0, [Watch(2.0)] * 64)
    assert "spends 2 ms" in text and "expected 500 ms" in text and "1/250" in text


@pytest.mark.parametrize(
    ("planned", "ms"),
    [
        (None, [820.0] * 16),  # prices that are no times of a machine
        (82.1, [820.0] * 16),
        (0.1, [4.0] * 16),  # of no consequence
        (500.0, [0.0] * 16),  # no gradient came
        (1.9, [820.0] * 2 + [2.0] * 14),  # warm-up
        (1.9, [820.0] * 3 + [2.0] + [820.0] * 12),  # one step as planned before the first look ...
    ],
)
def test_a_step_near_its_plan_says_nothing(planned: float | None, ms: list[float]):
    # ... and the busy minute that follows is no reason as long as the last eight steps hold it.
    assert warned(planned, map(Watch, ms[:10])) == []


def test_what_a_plan_expects_of_a_rank():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    measured = CostTable("measured on a machine", {(8, 8, "float32"): {1: 3.0, 2: 5.0}})
    own = dedicate_params(model, costs=measured)
    assert own.telemetry._planned_ms == own.plan.loads_ms[0] == 5.0
    own.close()
    own = dedicate_params(model, costs="analytic:cpu")
    assert own.telemetry._planned_ms is None
    own.close()
