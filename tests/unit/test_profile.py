"""Measuring within a budget, with a made-up device and clock; and the real one, undisturbed."""

from __future__ import annotations

import gc
import io
import math
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import dmuon
from dmuon.comm.transport import LocalTransport
from dmuon.config import MuonDefaults, PlannerOptions
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.kernels.runner import orthogonalize
from dmuon.measure import device_name, measured_costs
from dmuon.operand import normalized_momentum
from dmuon.progress import Progress
from dmuon.scheduler.costs import CostTable, ShapeKey
from dmuon.scheduler.profile import PASSES, Want, batch_sizes, measure, wanted
from dmuon.workbench import NewtonSchulzBench, _free_host_bytes
from tests.unit.models import AllDifferent, TinyGPT

MODEL = CostTable.analytic("cpu")
SMALL, MIDDLE, LARGE = (8, 8, "float32"), (64, 64, "float32"), (2048, 2048, "float32")
CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeBench:
    """A device on which a batch takes ``seconds(key, batch)``; notes every run."""

    seconds: Callable[[ShapeKey, int], float]
    clock: Clock = field(default_factory=Clock)
    runs: list[tuple[ShapeKey, int]] = field(default_factory=list)
    prepared: list[tuple[ShapeKey, int]] = field(default_factory=list)
    too_large: Callable[[ShapeKey, int], bool] = lambda key, batch: False

    def fits(self, key, batch):
        return not self.too_large(key, batch)

    def prepare(self, key, batch):
        self.prepared.append((key, batch))

        def run() -> float:
            self.runs.append((key, batch))
            seconds = self.seconds(key, batch)
            self.clock.now += seconds
            return 1e3 * seconds

        return run


def as_modelled(factor: float = 1.0) -> Callable[[ShapeKey, int], float]:
    return lambda key, batch: factor * MODEL.batch_ms(key, batch) / 1e3


def profile(wants, bench: FakeBench, budget_s: float = 1e9, **kwargs):
    return measure(wants, bench, MODEL, budget_s=budget_s, clock=bench.clock, **kwargs)


# ---- what is wanted ----------------------------------------------------------------------


@given(st.integers(1, 100))
def test_batch_sizes_are_the_powers_of_two_and_the_largest(largest):
    sizes = batch_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert all(size & (size - 1) == 0 for size in sizes[:-1])


def test_a_shape_and_its_transpose_are_wanted_once_in_batches_that_can_occur():
    tall, wide, other = (9, 5, "float32"), (5, 9, "float32"), (5, 9, "bfloat16")
    wants = wanted([tall] * 3 + [wide] * 2 + [other], max_batch=16)
    assert [(w.key, w.batch, w.count) for w in wants] == [
        (other, 1, 1),
        (wide, 1, 5),
        (wide, 2, 5),
        (wide, 3, 5),  # three tall ones can be batched, but not with the wide ones
    ]
    assert max(w.batch for w in wanted([wide] * 99, max_batch=7)) == 7


# ---- measuring ---------------------------------------------------------------------------

WANTS = wanted([SMALL] * 4 + [MIDDLE] * 2 + [LARGE], 16)


def test_everything_is_measured_when_there_is_time():
    entries = profile(WANTS, FakeBench(as_modelled(3.0)))
    assert {(key, b) for key, by in entries.items() for b in by} == {
        (w.key, w.batch) for w in WANTS
    }
    for key, by in entries.items():
        for batch, ms in by.items():
            assert ms == pytest.approx(3.0 * MODEL.batch_ms(key, batch), rel=1e-5)


def test_the_smallest_goes_first_then_singles_by_weight_then_larger_batches():
    bench = FakeBench(as_modelled())
    profile(WANTS, bench)
    first = bench.prepared[: len(WANTS)]
    assert first[:3] == [(SMALL, 1), (LARGE, 1), (MIDDLE, 1)]
    assert sorted(first[3:5]) == [(SMALL, 2), (MIDDLE, 2)] and first[5] == (SMALL, 4)
    assert bench.prepared == first * (len(bench.prepared) // len(first)), "pass after pass"
    weight = {w.key: w.count * MODEL.batch_ms(w.key, 1) for w in WANTS}
    twos = [key for key, batch in first if batch == 2]
    assert twos == sorted(twos, key=lambda key: -weight[key])


def test_the_result_is_the_median_without_the_first_pass():
    times = iter([9.0, 0.05, 0.01, 0.02, 0.04, 0.03, *[0.03] * 20])
    entries = profile([Want(SMALL, 1)], FakeBench(lambda key, batch: next(times)))
    assert entries == {SMALL: {1: 30.0}}


def test_a_slow_second_spoils_no_shape():
    """Whatever falls into three passes in the middle takes five times as long."""
    wants = [Want((m, m, "float32"), b) for m in (100, 200, 300) for b in (1, 2)]
    bench = FakeBench(lambda key, batch: 0.0)
    bench.seconds = lambda key, batch: (
        (5.0 if 2 <= (len(bench.runs) - 1) // len(wants) < 5 else 1.0)
        * MODEL.batch_ms(key, batch) / 1e3
    )  # fmt: skip
    entries = profile(wants, bench)
    for want in wants:
        assert entries[want.key][want.batch] == pytest.approx(
            MODEL.batch_ms(want.key, want.batch), rel=1e-5
        )


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e-4, 1e-3])
def test_unsteady_runs_are_repeated_to_the_last_pass(seconds):
    noise = random.Random(0)
    bench = FakeBench(lambda key, batch: seconds * noise.uniform(1, 9))
    profile([Want(SMALL, 1)], bench)
    assert len(bench.runs) == (PASSES if seconds else 6)


def test_steady_runs_stop_at_five():
    bench = FakeBench(lambda key, batch: 1e-4)
    profile([Want(SMALL, 1)], bench)
    assert len(bench.runs) == 6


def test_a_long_run_counts_even_if_there_is_no_time_for_more():
    single = MODEL.batch_ms(LARGE, 1) / 1e3
    bench = FakeBench(as_modelled())
    entries = profile([Want(LARGE, 1)], bench, budget_s=1.5 * single)
    assert len(bench.runs) == 1 and LARGE in entries
    bench = FakeBench(as_modelled())
    assert profile([Want(LARGE, 1)], bench, budget_s=0.5 * single) == {}
    assert bench.runs == []


def test_the_time_is_shared_out_so_that_a_tight_budget_still_reaches_all():
    wants = [Want((m, m, "float32"), 1) for m in (500, 510, 520, 530)]
    total = sum(MODEL.batch_ms(w.key, 1) for w in wants) / 1e3
    bench = FakeBench(as_modelled())
    entries = profile(wants, bench, budget_s=3.2 * total)
    assert len(entries) == 4
    assert max(Counter(bench.runs).values()) <= 4


wants_lists = st.lists(
    st.tuples(st.sampled_from([8, 32, 100, 300, 700]), st.integers(1, 4), st.integers(1, 5)),
    min_size=1,
    max_size=12,
    unique_by=lambda t: t[:2],
)


@given(wants_lists, st.floats(1e-6, 3.0), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_budget_is_overrun_by_one_run_at_most(items, budget, rng):
    factors: dict[tuple[ShapeKey, int], float] = {}

    lengths: list[float] = []

    def seconds(key, batch):
        factor = factors.setdefault((key, batch), math.exp(rng.uniform(-4, 4)))
        lengths.append(factor * rng.uniform(0.8, 1.25) * MODEL.batch_ms(key, batch) / 1e3)
        return lengths[-1]

    bench = FakeBench(seconds)
    begin = bench.clock.now
    wants = [Want((m, m, "float32"), batch, count) for m, batch, count in items]
    profile(wants, bench, budget_s=budget)
    overrun = bench.clock.now - begin - budget
    assert overrun <= max(lengths, default=0.0) * (1 + 1e-9)


def test_a_device_much_slower_than_modelled_is_noticed_at_the_smallest_shape():
    wants = [Want(SMALL, 1), Want(LARGE, 1), Want(MIDDLE, 1)]
    bench = FakeBench(as_modelled(100.0))
    # Enough by the model for all, and really for the small ones alone.
    budget = 20 * MODEL.batch_ms(LARGE, 1) / 1e3
    entries = profile(wants, bench, budget_s=budget)
    assert LARGE not in bench.prepared and set(entries) == {SMALL, MIDDLE}
    assert bench.clock.now - 100.0 <= budget


def test_what_is_known_already_tells_how_slow_the_device_is():
    bench = FakeBench(as_modelled(100.0))
    known = {SMALL: {1: 100.0 * MODEL.batch_ms(SMALL, 1)}}
    budget = 20 * MODEL.batch_ms(LARGE, 1) / 1e3
    assert profile([Want(LARGE, 1)], bench, budget_s=budget, known=known) == {}
    assert bench.runs == []
    assert profile([Want(LARGE, 1)], FakeBench(as_modelled()), budget_s=budget) != {}


def test_what_does_not_fit_in_memory_is_left_out():
    bench = FakeBench(as_modelled(), too_large=lambda key, batch: batch > 1)
    entries = profile(WANTS, bench)
    assert {b for by in entries.values() for b in by} == {1}

    class Short(FakeBench):
        def prepare(self, key, batch):
            if key == MIDDLE:
                raise MemoryError
            run = super().prepare(key, batch)

            def wrapped():
                if batch == 4:
                    raise MemoryError
                return run()

            return wrapped

    entries = profile(WANTS, Short(as_modelled()))
    assert MIDDLE not in entries and set(entries[SMALL]) == {1, 2}


def test_operands_are_let_go_before_the_next_are_made():
    alive: list[weakref.ref] = []

    class Operands:
        pass

    class Holding(FakeBench):
        def prepare(self, key, batch):
            assert all(ref() is None for ref in alive)
            operands = Operands()
            alive.append(weakref.ref(operands))

            def run():
                assert operands is not None
                return 1.0

            return run

    profile(WANTS, Holding(as_modelled()))
    assert len(alive) == 6 * len(WANTS) and all(ref() is None for ref in alive)


def test_progress_is_told_what_comes_next():
    told: list[tuple[int, Want]] = []
    profile(WANTS, FakeBench(as_modelled()), progress=lambda done, want: told.append((done, want)))
    assert [done for done, _ in told] == list(range(6 * len(WANTS)))
    assert {want for _, want in told} == set(WANTS)


# ---- the real thing ----------------------------------------------------------------------

KEYS: list[ShapeKey] = [(6, 10, "float32")] * 2 + [(10, 6, "float32"), (8, 8, "bfloat16")]


def costs_of(keys=KEYS, folder=None, **kwargs) -> CostTable:
    options = PlannerOptions(cache_dir=None if folder is None else str(folder))
    return measured_costs(LocalTransport(), keys, CPU, options, **kwargs)


def test_one_process_measures_what_its_plan_needs(tmp_path):
    table = costs_of(folder=tmp_path)
    assert set(table.entries) == {(6, 10, "float32"), (8, 8, "bfloat16")}
    assert set(table.entries[6, 10, "float32"]) == {1, 2}
    assert all(0 < ms < 1e4 for by in table.entries.values() for ms in by.values())
    assert table.origin((10, 6, "float32"), 2) == "measured"
    assert table.origin((99, 99, "float32"), 1) == "estimated"
    assert table.source == f"measured on {device_name(CPU)}, 1 process"


def bench_that_counts(made: list[FakeBench], factor: float = 1.0):
    def make(ns_dtype, sharing, chosen):
        made.append(FakeBench(as_modelled(factor)))
        return made[-1]

    return make


def test_the_second_time_nothing_is_measured(tmp_path):
    made: list[FakeBench] = []
    first = costs_of(folder=tmp_path, bench=bench_that_counts(made))
    again = costs_of(folder=tmp_path, bench=bench_that_counts(made, 5.0))
    assert len(made) == 1 and again == first
    # Another model measures only what is new.
    more = costs_of([*KEYS, (3, 4, "float32")], folder=tmp_path, bench=bench_that_counts(made))
    assert {key for key, _ in made[1].prepared} == {(3, 4, "float32")}
    assert more.entries == first.entries | {(3, 4, "float32"): more.entries[3, 4, "float32"]}


def test_fresh_costs_replace_cached_ones(tmp_path):
    made: list[FakeBench] = []
    costs_of(folder=tmp_path, bench=bench_that_counts(made, 4.0))
    fresh = costs_of(folder=tmp_path, bench=bench_that_counts(made), fresh=True)
    assert len(made) == 2
    assert fresh.batch_ms((6, 10, "float32"), 1) == pytest.approx(
        MODEL.batch_ms((6, 10, "float32"), 1), rel=1e-5
    )
    assert costs_of(folder=tmp_path).entries == fresh.entries


def test_no_more_than_max_batch_is_measured(tmp_path):
    options = PlannerOptions(max_batch=3, cache_dir=str(tmp_path))
    table = measured_costs(LocalTransport(), [SMALL] * 9, CPU, options)
    assert set(table.entries[SMALL]) == {1, 2, 3}


def test_a_budget_that_reaches_nothing_leaves_estimates(tmp_path):
    options = PlannerOptions(profile_budget_s=1e-9, cache_dir=str(tmp_path))
    table = measured_costs(LocalTransport(), KEYS, CPU, options)
    assert table.entries == {}
    assert table.origin(KEYS[0], 1) == "analytic" and table.batch_ms(KEYS[0], 1) > 0
    # Nothing is remembered of it.
    assert costs_of(folder=tmp_path).entries


def test_threads_have_costs_of_their_own(tmp_path):
    made: list[FakeBench] = []
    costs_of(folder=tmp_path, bench=bench_that_counts(made))
    torch.set_num_threads(2)
    try:
        costs_of(folder=tmp_path, bench=bench_that_counts(made))
    finally:
        torch.set_num_threads(1)
    assert len(made) == 2


def tensors_alive() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def test_measuring_does_not_disturb_random_numbers_gradients_or_memory(tmp_path):
    costs_of(folder=tmp_path / "warm")  # what kernels keep for good is there now
    state, python_state = torch.get_rng_state(), random.getstate()
    before = tensors_alive()
    with torch.enable_grad():
        costs_of(folder=tmp_path)
        assert torch.is_grad_enabled()
    assert tensors_alive() == before
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state


def test_measuring_works_whatever_the_default_device_and_dtype_are(tmp_path):
    operands = []

    def noted(runner, call, xs):
        operands.extend((x.device.type, x.dtype) for x in xs)
        return orthogonalize(runner, call, xs)

    noting = mock.patch("dmuon.workbench.orthogonalize", noted)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), noting:
            table = costs_of(folder=tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(table.entries) == 2
    assert set(operands) == {("cpu", resolve_ns_dtype("auto", "cpu"))}


def test_what_is_timed_is_what_the_optimizer_runs():
    """The same calls with the same operands, but for the values, as `Muon` with its defaults."""

    def recorded(module: str, action: Callable[[], object]) -> list:
        calls = []

        def momentum(buffer, grad, group, *, out, fused=False):
            settings = {name: group[name] for name in MuonDefaults.__slots__ if "lr" not in name}
            tensors = [(t.shape, t.dtype) for t in (buffer, grad, out)]
            calls.append(("momentum", tensors, settings, fused))
            normalized_momentum(buffer, grad, group, out=out, fused=fused)

        def run(runner, call, xs):
            calls.append(("orthogonalize", call, [(x.shape, x.dtype) for x in xs]))
            return orthogonalize(runner, call, xs)

        with (
            mock.patch(f"{module}.normalized_momentum", momentum),
            mock.patch(f"{module}.orthogonalize", run),
        ):
            action()
        return calls

    model = AllDifferent()
    dmuon.dedicate_params(model, splits=model.splits)
    opt = dmuon.Muon(model)
    model(torch.randn(3, 2, 6)).sum().backward()
    in_training = recorded("dmuon.step.owner_engine", opt.step)
    key = (10, 13, "float32")
    bench = NewtonSchulzBench(CPU, getattr(torch, opt.stats()["ns_dtype"]))
    timed = recorded("dmuon.workbench", bench.prepare(key, 1))
    assert [call[0] for call in timed] == ["momentum", "orthogonalize"]
    for call in timed:
        assert call in in_training


def test_a_batch_that_needs_more_than_a_quarter_of_the_memory_is_not_tried():
    bench = NewtonSchulzBench(CPU, torch.bfloat16)
    with mock.patch("dmuon.workbench._free_bytes", return_value=1 << 20):
        assert bench.fits((32, 32, "float32"), 1)
        assert not bench.fits((32, 32, "float32"), 64)
        assert not NewtonSchulzBench(CPU, torch.bfloat16, sharing=64).fits((32, 32, "float32"), 1)
    with mock.patch("dmuon.workbench._free_bytes", return_value=None):
        assert bench.fits((1 << 20, 1 << 20, "float32"), 1)


def test_free_memory_is_what_the_container_allows(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert _free_host_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    assert _free_host_bytes(tmp_path) == 1024 * 1000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("500\n")
    assert _free_host_bytes(tmp_path) == 1024 * 1000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2500\n")
    assert _free_host_bytes(tmp_path) == 2000


def test_dedicate_params_measures_by_default(tmp_path):
    planner = dmuon.PlannerOptions(cache_dir=str(tmp_path))
    with mock.patch("dmuon.api.measured_costs", measured_costs):
        own = dmuon.dedicate_params(TinyGPT(), planner=planner)
        assert own.plan.cost_source.startswith("measured on ")
        assert len(list(tmp_path.glob("*.json"))) == 1
        # A plan that is given needs no prices.
        with mock.patch("dmuon.api.measured_costs", side_effect=AssertionError):
            again = dmuon.dedicate_params(TinyGPT(), plan=own.plan)
    assert again.plan.fingerprint() == own.plan.fingerprint()


def test_dedicate_params_takes_a_path_and_a_table(tmp_path):
    table = CostTable("by hand", {(8, 16, "float32"): {1: 5.0}}, None)
    table.save(tmp_path / "costs.json")
    makespans = set()
    for costs in (tmp_path / "costs.json", str(tmp_path / "costs.json"), table):
        own = dmuon.dedicate_params(TinyGPT(), costs=costs)
        assert own.plan.cost_source == "by hand"
        makespans.add(own.plan.makespan_ms)
    assert makespans == {20.0}
    with pytest.raises(ValueError, match=r"gone\.json"):
        dmuon.dedicate_params(TinyGPT(), costs=tmp_path / "gone.json")


# ---- what goes wrong with the cache ------------------------------------------------------


def only_warning(action: Callable[[], CostTable]) -> tuple[CostTable, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = action()
    assert [w.category for w in caught] == [RuntimeWarning]
    return table, str(caught[0].message)


def test_a_damaged_cache_is_measured_again_with_a_warning(tmp_path):
    first = costs_of(folder=tmp_path)
    (file,) = tmp_path.glob("*.json")
    good = file.read_text()
    file.write_text(good[: len(good) // 2])
    table, text = only_warning(lambda: costs_of(folder=tmp_path))
    assert file.name in text and "ignored and rebuilt" in text
    assert table.entries.keys() == first.entries.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs_of(folder=tmp_path).entries == table.entries


def test_training_goes_on_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    table, text = only_warning(lambda: costs_of(folder=tmp_path / "file" / "cache"))
    assert table.entries and "file" in text


def test_training_goes_on_without_a_home():
    with mock.patch("dmuon.scheduler.cost_cache.default_directory", return_value=None):
        table, text = only_warning(costs_of)
    assert table.entries and "cache_dir" in text


def test_costs_are_kept_in_the_users_cache_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs_of()
    assert [path.parent.name for path in tmp_path.glob("*/*.json")] == ["dmuon"]


# ---- what the user sees ------------------------------------------------------------------


def shown(times: list[float], terminal: bool = True, shown: bool = True) -> str:
    """What a bar of four wants writes when it is updated at these times."""
    out, now = io.StringIO(), iter([0.0, *times])
    console = Console(file=out, force_terminal=terminal, width=120)
    with Progress(4, shown=shown, console=console, clock=lambda: next(now)) as bar:
        for done, _ in enumerate(times):
            bar.update(done, Want((64, 256, "float32"), 8))
    return out.getvalue()


def test_the_bar_appears_after_two_seconds_on_one_rank_and_a_terminal():
    assert "8 x [64, 256]" in shown([1.0, 2.5]) and "1/4" in shown([1.0, 2.5])
    assert shown([0.5, 1.0, 1.9]) == ""
    assert shown([5.0, 9.0], shown=False) == ""
    assert shown([5.0, 9.0], terminal=False) == ""
