"""`Muon.metrics` in every layout: norms of gradients, times by a clock. A profiler's names."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon.devices import HostEvent
from tests.accelerator import host_cannot_read, nothing_read
from tests.distributed.harness import distributed
from tests.distributed.layouts import AT_OWNERS, IN_TWO, LAYOUTS, layouts
from tests.distributed.models import Used
from tests.distributed.twins import Both, both
from tests.transports import Clock, ClockTransport


def world_of(layout: Any) -> int:
    return (LAYOUTS[layout] if isinstance(layout, str) else layout).world


def joint_norm(pair: Both) -> float:
    """Of the twin's gradients, which are of everybody's data."""
    grads = [p.grad for p in pair.twin.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads))


@distributed(2)
def test_block_steps_show_the_norm_of_the_last_full_step(rank, world):
    with both(layout="fsdp2", only={"period": 3}) as pair:
        for step in range(5):
            pair.copy_weights()
            pair.both_backward(step)
            expected = joint_norm(pair) if step % 3 == 0 else expected  # noqa: F821  step 0
            pair.step()
            pair.twin.zero_grad()
            found = pair.opt.metrics()
            assert found["grad_norm"] == pytest.approx(expected, rel=1e-5)
            assert ("gather_ms" in found) is (step % 3 == 0)
            assert found["update_rms/0/max"] > 0 and found["steps"] == step + 1
            assert found["exposed_ms"] > 0 if step % 3 == 0 else found["exposed_ms"] == 0


@distributed(2)
def test_without_full_steps_there_is_no_norm(rank, world):
    with both(layout="fsdp2", only={"period": math.inf}) as pair:
        pair.train_alone(range(2))
        found = pair.opt.metrics()
        assert "grad_norm" not in found and found["update_rms/0/mean"] > 0 == found["bytes"]


# By a network on which everything takes 20 ms, and a rank that computes in no time: how often a
# step waits for what goes to owners, for what comes back, and at all.
ONE_BY_ONE = dmuon.PlannerOptions(max_batch=1)
IN_THREE = {"options": {"min_buckets": 3}, "request": {"planner": ONE_BY_ONE}}
WAITS: dict[str, tuple[Any, dict[str, Any], tuple[int | None, ...]]] = {
    # The verdict; the first two buckets, together, and the third; the last one back.
    "fsdp2": ("fsdp2", IN_THREE, (2, 1, 4)),
    "hsdp": ("hsdp", {}, (1, 2, 4)),  # one bucket: to its owner, back, and along the replicas
    "reduced": ("reduced", {}, (None, 1, 2)),
    "dedicated": ("dedicated", {}, (None, None, 1)),
    "dedicated tp": (IN_TWO, {}, (1, 1, 3)),  # of what is cut
}


@pytest.mark.parametrize(("name", "world"), [(n, world_of(row[0])) for n, row in WAITS.items()])
@distributed()
def test_times_are_what_a_step_waited_for(rank, world, name):
    layout, case, waits = WAITS[name]
    clock = Clock()

    def now(event: HostEvent) -> None:
        event._seconds = clock.now

    transport = partial(ClockTransport, clock=clock)
    case = case | {"layout": layout, "transport": transport}
    with patch.object(HostEvent, "__init__", now), both(**case) as pair:
        for step in range(6):  # the first ones also compare gradients, and exchange times
            pair.backward(step)
            pair.own.runtime.reduce_gradients()  # part of backward, wherever it is waited for
            pair.opt.metrics()  # takes what the step before has left to wait for
            before = clock.now
            pair.events.clear()
            pair.step()
        found, passed = pair.opt.metrics(), 1e3 * (clock.now - before)
        if name == "dedicated tp" and not any(event.tag == "gather" for event in pair.events):
            waits = (None, 1, 2)  # all that is owned near here is whole
        if name == "fsdp2":
            count = len(pair.own.runtime.pipeline.buckets)
            assert count == 3, count
    expected = dict(zip(("gather_ms", "scatter_ms", "exposed_ms"), waits, strict=True))
    for key, count in expected.items():
        assert found.get(key) == (None if count is None else pytest.approx(20.0 * count)), found
    assert passed == pytest.approx(found["exposed_ms"]), "all of the step's time"


@layouts("ddp", "dedicated fsdp")
def test_on_an_accelerator_nothing_is_waited_for(rank, world, layout):
    """Numbers come with the step that follows, and only once somebody has asked."""
    norms = []
    with host_cannot_read(), both(layout=layout) as pair:
        for step in range(5):
            pair.both_backward(step)
            norms.append(joint_norm(pair))
            pair.advance()
            if not step:
                continue
            with nothing_read():
                found = pair.opt.metrics()
            if step == 1:
                assert found == {}, "nobody had asked"
                continue
            assert found["steps"] == step
            assert found["grad_norm"] == pytest.approx(norms[step - 1], rel=1e-5)
            assert found["skipped"] == 0 < found["ns_ms"] + found["exposed_ms"]
            rms = [v for n, v in found.items() if n.startswith("update_rms")]
            assert all(0.1 < value < 0.3 for value in rms)
            assert rms or layout.startswith("dedicated")


@pytest.mark.parametrize(("layout", "host"), [("fsdp2", "does not read"), ("reduced", "reads")])
@distributed(2)
def test_bytes_are_of_the_step_that_is_shown(rank, world, layout, host):
    """Steps that differ: block steps send nothing, and not every step exchanges times."""
    only = {"period": 2} if layout == "fsdp2" else {}
    on_host = host_cannot_read() if host != "reads" else nullcontext()
    with on_host, both(layout=layout, only=only) as pair:
        sent, shown = {}, {}
        for step in range(1, 7):
            pair.backward(step)
            pair.step()
            sent[step] = sum(pair.opt.stats()["bytes"].values())
            found = pair.opt.metrics()
            shown |= {int(found["steps"]): found["bytes"]} if found else {}
        assert len(set(sent.values())) > 1 and len(shown) >= 4, (sent, shown)
        assert shown.items() <= sent.items()


NAMES = {
    "hsdp": {"gather", "newton_schulz", "publish"},
    "reduced": {"newton_schulz", "publish"},
    "dedicated": {"gather", "newton_schulz"},
}


@layouts(*NAMES)
def test_a_profiler_sees_what_a_step_does(rank, world, layout):
    build = Used if layout in AT_OWNERS else None  # what has no gradient is not orthogonalized
    small = patch("dmuon.kernels.runner._SMALL", 0)
    with small, both(build, layout=layout) as pair:
        pair.backward(0)
        pair.step()
        pair.backward(1)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            pair.step()
        found = {event.key: event.count for event in trace.key_averages() if "dmuon::" in event.key}
        kinds = {name.partition(" ")[0].removeprefix("dmuon::") for name in found}
        owns = bool(pair.own.owned_by(rank))
        assert kinds == NAMES[layout] - (set() if owns else {"newton_schulz"})
        layers = [name.partition(" ")[2] for name in found if "::gather" in name]
        assert all(layer.startswith(("blocks", "attention", "mid", "root")) for layer in layers)
        batches = sum(u.owner == rank for u in pair.own.runtime.units)
        runs = {name: n for name, n in found.items() if "newton_schulz" in name}
        assert sum(runs.values()) == batches
        assert all(re.fullmatch(r"\S+ \d+x\[\d+,\d+\]", name) for name in runs)
