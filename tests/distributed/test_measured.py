"""Measured costs, and times in reports: the slowest rank counts, and all have the same."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon import devices
from dmuon.config import KernelOptions, PlannerOptions
from dmuon.kernels.choice import candidates
from dmuon.measure import Case, OwnerTimer, measured_costs
from dmuon.scheduler import costs
from dmuon.scheduler.costs import CostTable, ShapeKey
from dmuon.scheduler.simulate import Machine
from dmuon.scheduler.topology import Topology
from dmuon.tools.profile import measured_rates
from dmuon.types import ConsensusError, PlanError
from tests.distributed.harness import distributed
from tests.distributed.layouts import REDUCING
from tests.distributed.models import Net, batch, loss_of, seeded
from tests.distributed.twins import planned
from tests.fixed_costs import analytic_costs
from tests.internals import C10dTransport
from tests.transports import CountingTransport, RecordingTransport

pytestmark = pytest.mark.cpu_only("measures a CPU")

CPU = torch.device("cpu")
A: ShapeKey = (4, 6, "float32")
B: ShapeKey = (8, 8, "float32")
KEYS = [A, A, A, B]
BATCHES = [(A, 1), (A, 2), (A, 3), (B, 1)]
RULE, OTHER = (str(choice) for choice in candidates(4, 6, torch.float32, CPU, 5)[:2])
PLAIN = KernelOptions(method="standard")


class Timer:
    """Takes no time, and says what it is told to; notes what it measured costs of."""

    def __init__(self, ms: Callable[[ShapeKey, int, str], float]) -> None:
        self.ms = ms
        self.device, self.clock = CPU, time.monotonic
        self.runs: list[tuple[Case, str]] = []

    def __call__(self, device: torch.device, ns_dtype: torch.dtype, *, sharing, **how) -> Timer:
        self.ns_dtype, self.sharing, self.runs = ns_dtype, sharing, []
        return self

    def reserve(self, runs):
        return list(runs)

    def run(self, case: Case, kernel: str) -> float:
        self.runs.append((case, kernel))
        return self.ms(case.key, case.batch, kernel)

    @property
    def measured(self) -> set[tuple[ShapeKey, int]]:
        return {(case.key, case.batch) for case, _ in self.runs}


def always(ms: float) -> Timer:
    return Timer(lambda *_: ms)


@contextmanager
def setting(world: int) -> Iterator[tuple[C10dTransport, Path]]:
    """A transport, and one folder for all ranks with nothing in it; all iterate in float32."""
    transport = C10dTransport(range(world))
    folder = transport.broadcast_object(tempfile.mkdtemp() if transport.rank == 0 else None, 0)
    try:
        with mock.patch("dmuon.measure.resolve_ns_dtype", return_value=torch.float32):
            yield transport, Path(folder)
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
        transport.close()


def costs_of(transport, folder: Path, timer: Timer, kernels=PLAIN, **kwargs) -> CostTable:
    """The table, equal on all ranks. With one candidate a case nothing is chosen."""
    options = PlannerOptions(cache_dir=str(folder))
    table = measured_costs(transport, KEYS, CPU, options, timer=timer, kernels=kernels, **kwargs)
    everyone = transport.gather_objects(table)
    assert all(found == everyone[0] for found in everyone)
    return table


def flat(table: CostTable) -> dict[tuple[ShapeKey, int], float]:
    return {(key, b): ms for key, by in table.entries.items() for b, ms in by.items()}


def edit(folder: Path, change: Callable[[str], str]) -> None:
    """Change a cache's text as another process could have written it: with the digest that fits."""
    (path,) = folder.glob("*.json")
    text = path.read_text()
    assert change(text) != text
    data = json.loads(change(text))
    path.write_text(json.dumps(data | {"digest": costs.sha256(data | {"digest": None})}))


@distributed(2)
def test_ranks_that_find_bfloat16_fast_and_slow_measure_the_same_products(rank, world):
    timer = always(1.0)
    with setting(world) as (transport, folder):
        known = {"return_value": torch.bfloat16}
        with (
            mock.patch("dmuon.measure.resolve_ns_dtype", **known),
            mock.patch.object(devices, "_has_bf16", [rank == 0]),
        ):
            table = costs_of(transport, folder, timer)
        kernels = {kernel for by in table.kernels.values() for kernel in by.values()}
        assert kernels == {kernel for _, kernel in timer.runs}
        assert kernels and all("torch_rounded" in kernel for kernel in kernels)


@distributed(2)
def test_the_slowest_rank_counts_for_each_entry_and_one_writes(rank, world):
    slowest = {pair: i % world for i, pair in enumerate(BATCHES)}
    timer = Timer(lambda key, b, _: 1 + b / 8 + (0.25 if slowest[key, b] == rank else 0.0))
    with setting(world) as (transport, folder):
        with mock.patch.object(costs, "add_to_cache", wraps=costs.add_to_cache) as add:
            table = costs_of(transport, folder, timer)
            assert sum(transport.gather_objects(add.call_count)) == 1
        assert flat(table) == {(key, b): pytest.approx(1.25 + b / 8) for key, b in BATCHES}
        assert f"{world} processes" in table.source and timer.sharing == world
        # What was agreed on is what is kept, and what every rank finds the next time.
        again = always(1.0)
        assert costs_of(transport, folder, again) == table and not again.runs


@distributed(2)
def test_all_measure_what_one_lacks_and_caches_that_differ_are_merged(rank, world):
    with setting(world) as (transport, root):
        own = root / str(rank)  # as on machines with a cache each
        costs_of(transport, own, Timer(lambda key, b, _: 0.25 + b))
        if rank == 1:
            edit(own, lambda text: text.replace("2.25", "2.4").replace("1.25", "0.5"))
        timer = always(2.3)
        merged = {(A, 1): 1.25, (A, 2): 2.4, (A, 3): 3.25, (B, 1): 1.25}
        for _ in range(2):
            assert flat(costs_of(transport, own, timer)) == merged and not timer.runs
        if rank == 0:  # one entry is lost on one rank
            edit(own, lambda text: text.replace('"2": 2.4,', ""))
        # A new time replaces a cached one.
        assert flat(costs_of(transport, own, timer)) == merged | {(A, 2): 2.3}
        assert timer.measured == {(A, 2)}
        if rank == 1:  # and all of them
            shutil.rmtree(own)
        timer = always(2.5 + rank)
        assert set(flat(costs_of(transport, own, timer)).values()) == {3.5}
        assert timer.measured == set(BATCHES)
        if rank == 1:  # its times are of another kernel
            edit(own, lambda text: text.replace('"kernels": []', json_kernels(OTHER)))
        timer = always(2.0)
        table = costs_of(transport, own, timer)
        assert timer.measured == {(B, 1)} and flat(table)[B, 1] == 2.0
        assert {table.kernel(key, b) for key, b in BATCHES} == {RULE}


def json_kernels(name: str) -> str:
    row = {"rows": B[0], "cols": B[1], "dtype": B[2], "kernel": {"1": name}}
    return f'"kernels": [{json.dumps(row)}]'


@distributed(2)
def test_a_rank_that_fails_makes_all_raise_and_leaves_nothing_half_done(rank, world):
    def broken(*_, **how):
        raise RuntimeError("the device is on fire")

    with setting(world) as (transport, folder):
        for step in ("run", "reserve", "__call__"):
            timer = type("Broken", (Timer,), {step: broken} if rank == 1 else {})(lambda *_: 1.0)
            with pytest.raises(RuntimeError if rank == 1 else ConsensusError, match="on fire"):
                costs_of(transport, folder, timer)
        with pytest.raises(ValueError, match="'triton' cannot run on cpu"):
            costs_of(transport, folder, always(1.0), kernels=KernelOptions(backend="triton"))
        assert set(flat(costs_of(transport, folder, always(1.0))).values()) == {1.0}


@distributed(2)
def test_ranks_that_differ_and_damage(rank, world):
    with setting(world) as (transport, folder):
        timer = always(1.0 + rank)
        if rank == 1:  # what one did not reach is taken from the other
            timer.reserve = lambda runs: [run for run in runs if run[0].key == A]
        table = costs_of(transport, folder, timer)
        assert flat(table) == {(A, 1): 2.0, (A, 2): 2.0, (A, 3): 2.0, (B, 1): 1.0}
        (path,) = folder.glob("*.json")
        dist.barrier()
        if rank == 0:
            path.write_text("{")
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            costs_of(transport, folder, always(1.0))
        texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(texts) == (1 if rank == 0 else 0), "one speaks for all that share a cache"
        assert all("ignored and rebuilt" in text for text in texts)
        native = [torch.bfloat16, torch.float32][rank]  # by their instructions
        with mock.patch("dmuon.measure.resolve_ns_dtype", return_value=native):
            costs_of(transport, folder, timer)
        assert timer.ns_dtype is torch.float32


@distributed(2)
def test_the_first_rank_chooses_kernels_for_all_and_they_are_remembered(rank, world):
    def ms(key, b, kernel):
        """The rule's is slow for A, on the first rank alone."""
        return 1.0 if kernel == (OTHER if key == A and rank == 0 else RULE) else 2.0

    def names(kernels: KernelOptions, **how) -> set[tuple[ShapeKey, str]]:
        table = costs_of(transport, folder, timer, kernels=kernels, **how)
        return {(key, table.kernel(key, b)) for key, b in BATCHES}

    with setting(world) as (transport, folder):
        timer = Timer(ms)
        auto = KernelOptions()
        assert names(auto, budget_s=0.0) == {(A, RULE), (B, RULE)} and not timer.runs
        chosen = {(A, OTHER), (B, RULE)}
        assert names(auto) == chosen, "what there was no time to choose is chosen another time"
        assert timer.measured == set(BATCHES)
        with mock.patch("dmuon.measure.gate_errors", side_effect=AssertionError):
            timer.runs.clear()
            assert names(auto) == names(auto, budget_s=0.0) == chosen and not timer.runs
            assert names(PLAIN) == {(A, RULE), (B, RULE)}  # chosen among others
            assert timer.measured == set(BATCHES)


@distributed(2)
def test_plans_from_measured_costs_are_equal_and_train(rank, world):
    def fingerprint(folder: Path) -> str:
        """Of the plan, equal on all ranks; one step has been made under it."""
        model = seeded(Net)
        options = dmuon.ReplicatedOptions(reduce_to_owner=True)
        own = dmuon.dedicate_params(
            model, options=options, planner=PlannerOptions(cache_dir=str(folder))
        )
        assert own.plan.cost_source.startswith("measured on ")
        (found,) = set(own.runtime.transport.gather_objects(own.plan.fingerprint()))
        opt = dmuon.Muon(model)
        loss_of(model, batch(0, rank)).backward()
        opt.step()
        own.close()
        return found

    with setting(world) as (_, folder), mock.patch("dmuon.api.measured_costs", measured_costs):
        first = fingerprint(folder)
        assert len(list(folder.glob("*.json"))) == 2  # and of links
        with mock.patch.object(OwnerTimer, "run", side_effect=AssertionError):
            assert fingerprint(folder) == first  # it needs no measurement
        # Prices are of what the layout's owners do.
        prices = mock.Mock(side_effect=analytic_costs)
        models = [seeded(Net), fully_shard(seeded(Net))]
        with mock.patch("dmuon.api.measured_costs", prices):
            reducing = dmuon.ReplicatedOptions(reduce_to_owner=True)
            plans = [
                dmuon.dedicate_params(model, options=options).plan
                for model, options in zip(models, (reducing, None))
            ]
        assert [call.kwargs["momentum"] for call in prices.call_args_list] == [True, False]
        assert plans[0].prices[0].ms > plans[1].prices[0].ms
        mine = CostTable("by hand", {A: {1: 1.0 + rank}}, CostTable.analytic().device)
        with pytest.raises(ValueError, match="disagree.*costs=by hand"):
            dmuon.dedicate_params(seeded(Net), costs=mine)


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


@distributed(3)
def test_every_rank_reports_the_same_measured_times(rank, world):
    model, own, opt, transport, _ = trained(rank, 3)
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
def test_closing_right_after_an_exchange(rank, world):
    model, own, opt, transport, _ = trained(rank, 4, WATCHED)
    own.close()
    assert transport.waited == 1, "nothing is in flight when the group goes"
    assert opt.report().measured_ms is not None
    again, _ = planned_for(model)
    assert again.report().measured_ms is None, "a new ownership knows nothing yet"
    again.close()


@contextmanager
def called(name: str) -> Iterator[None]:
    """This rank's device, which is a CPU, is taken for an accelerator of this name."""
    with (
        mock.patch.object(dmuon.api._Found, "device", torch.device(devices.GPU)),
        mock.patch.object(devices.Cuda, "name", lambda self: name),
    ):
        yield


@distributed(2)
def test_analytic_costs_are_those_of_the_device_of_all_ranks(rank, world):
    with called(("NVIDIA H100 80GB HBM3", "NVIDIA H100")[rank]):
        own = dmuon.dedicate_params(seeded(Net), costs="analytic")
    assert own.plan.cost_source == "analytic:h100"
    own.close()
    unknown = r"knows no price of 'NVIDIA L4' \(cuda\): .* of a100, .*gb300"
    for name, kind, message in (
        ("NVIDIA A100-SXM4-80GB", ConsensusError, "analytic:a100.*analytic:h20"),
        ("NVIDIA L4", PlanError if rank == 1 else ConsensusError, unknown),
    ):
        with pytest.raises(kind, match=message), called(("NVIDIA H20", name)[rank]):
            dmuon.dedicate_params(seeded(Net), costs="analytic")
    with called("NVIDIA L4"):  # where the row is named, or a plan given, nobody asks
        named = dmuon.dedicate_params(seeded(Net), costs="analytic:h20")
        saved = named.plan
        named.close()
        dmuon.dedicate_params(seeded(Net), costs="analytic", plan=saved).close()


@distributed(2)
def test_ranks_agree_on_the_rates_of_a_training_step(rank, world):
    transport = C10dTransport(range(world))
    found = measured_rates(transport, CPU)
    assert transport.gather_objects(found) == [found] * world
    assert min(found.products, found.copies, found.new, found.call_s) > 0
    assert found.turn_s > 0 or found.sent_s > 0
    table = CostTable("here", {A: {1: 1.0}}, rates=found)
    assert CostTable.from_json(table.to_json()) == table
    table = replace(table, device=costs.ANALYTIC_DEVICES["cpu"])
    assert Machine.of(table, Topology.flat(world)).rates == found
    transport.close()
