"""Measured times reach every rank's report, without a collective call in the report."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dmuon
from tests.distributed.harness import distributed
from tests.distributed.layouts import REDUCING
from tests.distributed.models import Net, batch, loss_of, seeded
from tests.distributed.twins import planned
from tests.internals import WARM_UP
from tests.transports import CountingTransport, RecordingTransport

pytestmark = pytest.mark.cpu_only("measures a CPU")


def planned_for(model, wrapper=RecordingTransport):
    return planned(model, wrapper, options=REDUCING)


def trained(rank, steps, wrapper=RecordingTransport, model=None, **kwargs):
    """A model after some steps, with the events of each step."""
    model = seeded(Net) if model is None else model
    own, transport = planned_for(model, wrapper)
    opt = dmuon.Muon(model, lr=0.02, **kwargs)
    events = []
    for step in range(steps):
        transport.events.clear()
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        events.append(list(transport.events))
    return model, own, opt, transport, events


@pytest.mark.parametrize("publish", ["async", "sync"])
@distributed(1, 3)
def test_every_rank_reports_the_same_measured_times(rank, world, publish):
    model, own, opt, transport, _ = trained(rank, 3, publish=publish)
    assert opt.report().measured_ms is None, "before the first exchange"
    assert opt.report().to_dict()["measured"] is None
    loss_of(model, batch(3, rank)).backward()
    opt.step()
    report = opt.report()
    assert len(report.measured_ms) == world
    names = [own.owned_by(r) for r in range(world)]
    busy = [any("spare" not in name for name in mine) for mine in names]  # it has no gradient
    assert [ms > 0 for ms in report.measured_ms] == busy
    assert "measured" in str(report)
    everyone = transport.gather_objects(report.measured_ms)
    assert all(times == everyone[0] for times in everyone)
    own.close()
    assert opt.report().measured_ms == report.measured_ms, "what was learnt outlives closing"


# Counts how often an exchange of times was waited for.
WATCHED = partial(CountingTransport, counts="telemetry")


@distributed(3)
def test_the_report_is_no_collective_call_and_the_exchange_delays_no_step(rank, world):
    """Waited for only when asked; the collectives of the next step are behind it anyway."""
    _model, own, opt, transport, _ = trained(rank, 4, WATCHED)
    assert transport.waited == 0, "step must not wait for it"
    transport.events.clear()
    # Rank 1 never asks, and rank 0 has its answer before it lets rank 2 ask.
    for asking in (0, 2):
        if rank == asking:
            for _ in range(2):
                assert opt.report().measured_ms is not None
                assert transport.events == [] and transport.waited == 1
        transport.gather_objects(None)
    own.close()


@distributed(2)
def test_the_exchange_is_one_small_collective_at_fixed_steps(rank, world):
    model, own, opt, transport, events = trained(rank, 16)
    assert opt.stats()["bytes"]["telemetry"] == 4 * world
    loss_of(model, batch(16, rank)).backward()
    opt.step()
    assert "telemetry" not in opt.stats()["bytes"], "counted where it was sent"
    telemetry = [[e for e in step if e.tag == "telemetry"] for step in events]
    assert [i + 1 for i, found in enumerate(telemetry) if found] == [4, 16]
    assert all(len(found) <= 1 for found in telemetry)
    assert telemetry[3][0].nbytes == 4 * world
    # Its place among the step's collectives: after all publishing.
    assert [e.tag for e in events[3]][-2:] == ["updates", "telemetry"]
    everyone = transport.gather_objects(events)
    assert everyone[0] == everyone[1]
    own.close()


@distributed(2)
def test_ranks_that_lack_gradients_still_take_part(rank, world):
    """Rank 0 skips a backward, `spare` has a gradient on one rank in one step only."""
    model = seeded(Net)
    own, transport = planned_for(model)
    opt = dmuon.Muon(model)
    for step in range(5):
        model.use_spare = step == 3 and rank == 1
        if not (step == 3 and rank == 0):
            loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
    everyone = transport.gather_objects(transport.events)
    assert everyone[0] == everyone[1]
    assert own.report().measured_ms is not None
    own.close()


@distributed(2)
def test_without_any_gradient_there_is_nothing_to_report(rank, world):
    model = seeded(Net)
    own, transport = planned_for(model)
    opt = dmuon.Muon(model)
    for _ in range(4):
        opt.step()
    assert sum(e.tag == "telemetry" for e in transport.events) == 1
    assert own.report().measured_ms is None
    own.close()


@pytest.mark.parametrize("steps", [4, 5])
@distributed(2)
def test_closing_right_after_an_exchange(rank, world, steps):
    model, own, opt, transport, _ = trained(rank, steps, WATCHED)
    own.close()
    assert transport.waited == 1, "nothing is in flight when the group goes"
    assert opt.report().measured_ms is not None
    again, _ = planned_for(model)
    assert again.report().measured_ms is None, "a new ownership knows nothing yet"
    again.close()


class Halves(torch.nn.Module):
    """Two models in one, each planned on its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Net(), Net(layers=1)


@distributed(2)
def test_several_ownerships_are_measured_apart(rank, world):
    both = seeded(Halves)
    owns = [planned_for(part)[0] for part in (both.a, both.b)]
    opt = dmuon.Muon(both)
    mine = []
    for step in range(4):
        for part in (both.a, both.b):
            loss_of(part, batch(step, rank)).backward()
        opt.step()
        mine.append([own.telemetry.watch.milliseconds() for own in owns])
        assert opt.stats()["ns_ms"] == pytest.approx(sum(mine[-1]))
    with pytest.raises(ValueError, match="2 ownerships"):
        opt.report()
    expected = torch.tensor(mine[WARM_UP:]).double().quantile(0.5, dim=0).tolist()
    everyone = owns[0].runtime.transport.gather_objects(expected)
    for i, own in enumerate(owns):
        theirs = [times[i] for times in everyone]
        assert own.report().measured_ms == pytest.approx(theirs, rel=1e-5)
    for own in owns:
        own.close()
