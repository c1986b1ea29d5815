"""Exchange of measured times: when, what is sent, what a report may say of it. What is logged."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import dmuon
from dmuon.comm.transport import Meter, Transport
from dmuon.config import is_exchange_step
from dmuon.scheduler.costs import CostTable
from dmuon.step.engine import StepTelemetry

CPU = torch.device("cpu")


class Watch:
    """A stopwatch that shows ``ms``; None: the device has not come so far."""

    def __init__(self, ms: float | None) -> None:
        self.ms = ms

    def ready(self) -> bool:
        return self.ms is not None

    def milliseconds(self) -> float:
        assert self.ms is not None, "reading it would wait for the device"
        return self.ms


class Pair(Transport):
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


def telemetry_of(
    transport: Transport, times: list[float | None], planned: float | None = None
) -> StepTelemetry:
    telemetry = StepTelemetry(transport, Meter(), CPU, planned)
    steps(telemetry, times)
    return telemetry


def steps(telemetry: StepTelemetry, times: list[float | None]) -> None:
    for ms in times:
        telemetry.begin_step()
        telemetry.watch = Watch(ms)
        telemetry.finish_step()


def test_the_exchange_steps_are_fixed():
    assert [s for s in range(1200) if is_exchange_step(s)] == [4, 16, 64, 256, 512, 768, 1024]


@pytest.mark.parametrize(("times", "sent"), [
    ([1000.0, 1000.0, 2.0, 4.0], 3.0),  # warm-up does not count
    ([50.0] * 8 + [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 500.0], 6.5),  # the last eight do
    ([9.0, 9.0, 2.0, None], 2.0),  # what the device has not reached is left out
    ([0.0] * 4, 0.0),
])  # fmt: skip
def test_the_median_of_the_recent_steps_is_sent(times, sent):
    transport = Pair(other=7.0)
    telemetry = telemetry_of(transport, times)
    assert transport.sent[-1] == sent and telemetry.measured_ms() == (sent, 7.0)


def test_an_owner_of_nothing_needs_no_time_and_nothing_to_do_is_no_measurement():
    telemetry = StepTelemetry(Pair(other=3.0), Meter(), CPU)
    for _ in range(4):
        telemetry.begin_step()  # a real watch that never runs
        telemetry.finish_step()
    assert telemetry.measured_ms() == (0.0, 3.0)
    assert telemetry_of(Pair(other=0.0), [0.0] * 4).measured_ms() is None
    assert telemetry_of(Transport(), [2.5] * 4).measured_ms() == (2.5,), "one rank"


@pytest.mark.parametrize(("planned", "times", "words"), [
    (1.9, [820.0] * 64, ["rank 0 spends 820 ms", "expected 1.9 ms", "432 times"]),
    (500.0, [2.0] * 64, ["spends 2 ms", "expected 500 ms", "1/250"]),
    (None, [820.0] * 10, None),  # prices that are no times of a machine
    (82.1, [820.0] * 10, None),
    (0.1, [4.0] * 10, None),  # of no consequence
    (500.0, [0.0] * 10, None),  # no gradient came
    (1.9, [820.0] * 2 + [2.0] * 8, None),  # warm-up
    # One step as planned before the first look, and the busy minute that follows is no reason
    # as long as the last eight steps hold it.
    (1.9, [820.0] * 3 + [2.0] + [820.0] * 6, None),
])  # fmt: skip
def test_a_step_far_from_its_plan_says_so_once(planned, times, words):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        telemetry_of(Pair(other=1.0), times, planned)
    assert len(found) == (words is not None)
    assert all(word in str(found[0].message) for word in words or ())


def trained(steps: int = 2, **muon) -> tuple[nn.Module, dmuon.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    named = [[(f"{n}.{k}", p) for k, p in part.named_parameters()] for n, part in enumerate(model)]
    groups = [{"params": some, "name": name} for some, name in zip(named, "ab")]
    opt = dmuon.Muon(groups, dedicate={"costs": "analytic"}, **muon)
    for _ in range(steps):
        model(torch.randn(3, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def test_metrics_of_groups_by_their_names():
    _, opt = trained(0)
    assert opt.metrics() == {} and opt.stats()["steps"] == 0
    _, opt = trained(2)
    found = opt.metrics()
    assert {name for name in found if name.startswith("update_rms")} == {
        f"update_rms/{group}/{what}" for group in "ab" for what in ("mean", "max")
    }
    known = {"steps", "grad_norm", "ns_ms", "exposed_ms", "bytes", "skipped", "below_eps"}
    assert known <= found.keys() and "gather_ms" not in found, "nothing travels"
    assert "planned_ratio" not in found, "prices are modelled"
    assert found["update_rms/a/max"] == opt.stats()["update_rms"]["0.weight"]
    assert opt.metrics() == found, "asking changes nothing"
    opt.param_groups[1]["name"] = "a"
    assert {"update_rms/0/max", "update_rms/1/max"} <= opt.metrics().keys()


def test_the_planned_ratio_is_that_of_measured_prices():
    costs = CostTable("measured on a machine", {(8, 8, "float32"): {1: 3.0, 2: 5.0}})
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    opt = dmuon.Muon(model, dedicate={"costs": costs})
    model(torch.randn(3, 8)).sum().backward()
    opt.step()
    found = opt.metrics()
    assert found["planned_ratio"] == pytest.approx(found["ns_ms"] / 5.0)


def test_metrics_are_of_the_gradients_that_a_step_got():
    """Large and small ones, of several dtypes, unscaled, and none at all."""
    model, opt = trained(1, eps=1e-30)
    for value in (1e25, 1e-12):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        opt.step()
        count = sum(p.numel() for p in model.parameters())
        assert opt.metrics()["grad_norm"] == pytest.approx(value * math.sqrt(count), rel=1e-5)
    opt.zero_grad()
    opt.step()
    found = opt.metrics()
    assert found["grad_norm"] == 0 and found["steps"] == 4
    assert not [name for name in found if name.startswith("update_rms")]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(3, 8)).sum()).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) / 1024
    scaler.step(opt)
    assert opt.metrics()["grad_norm"] == pytest.approx(expected, rel=1e-5)
