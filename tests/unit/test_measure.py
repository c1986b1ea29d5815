"""Measuring within a budget with a made-up device and clock, choosing kernels, the real device."""

from __future__ import annotations

import builtins
import gc
import json
import math
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dmuon
from dmuon.__main__ import main
from dmuon.comm.transport import Transport
from dmuon.config import KernelOptions, PlannerOptions
from dmuon.kernels.choice import backend_version, candidates, fixed_choice, why_not
from dmuon.kernels.newton_schulz import resolve_ns_dtype
from dmuon.kernels.runner import Orthogonalizer
from dmuon.measure import (
    ERROR_LIMITS,
    PASSES,
    Case,
    OwnerTimer,
    cases_of,
    choose_kernels,
    gate_errors,
    in_order,
    measured_costs,
    median_times,
)
from dmuon.scheduler.costs import CostTable, ShapeKey
from dmuon.scheduler.topology import Topology
from dmuon.tools.profile import parse_shapes
from dmuon.types import KernelChoice
from tests.internals import LinkTimer
from tests.unit.models import TinyGPT

MODEL = CostTable.analytic("cpu")
SMALL, MIDDLE, LARGE = (8, 8, "float32"), (64, 64, "float32"), (2048, 2048, "float32")
CPU, F32 = torch.device("cpu"), torch.float32


class FakeTimer:
    """A device on which a case takes ``seconds(case, kernel)``, and its clock; notes every run."""

    device, ns_dtype = CPU, F32

    def __init__(self, seconds: Callable[[Case, str], float]) -> None:
        self.seconds = seconds
        self.now = 100.0
        self.runs: list[tuple[Case, str]] = []
        self.largest = 99  # batch that there is memory for

    def clock(self):
        return self.now

    def reserve(self, runs):
        return [(case, kernel) for case, kernel in runs if case.batch <= self.largest]

    def run(self, case, kernel):
        self.runs.append((case, kernel))
        seconds = self.seconds(case, kernel)
        self.now += seconds
        return 1e3 * seconds


def as_modelled(factor: float = 1.0) -> Callable[[Case, str], float]:
    return lambda case, kernel: factor * MODEL.batch_ms(case.key, case.batch) / 1e3


def times_of(cases, timer, budget_s=1e9, known=None, **kwargs) -> dict[Case, float]:
    runs = [(case, "") for case in in_order(cases, MODEL)]
    deadline = timer.now + budget_s
    found = median_times(runs, timer, MODEL, dict(known or {}), deadline=deadline, **kwargs)
    return {case: ms for (case, _), ms in found.items()}


def alone(*sides: int) -> list[Case]:
    return [Case((side, side, "float32"), 1) for side in sides]


# ---- the timing loop ---------------------------------------------------------------------


def test_a_shape_and_its_transpose_are_measured_once_in_batches_that_can_occur():
    wide, other = (5, 9, "float32"), (5, 9, "bfloat16")
    cases = cases_of([(9, 5, "float32")] * 3 + [wide] * 2 + [other])
    assert cases == (Case(other, 1, 1), *(Case(wide, batch, 5) for batch in (1, 2, 4, 5)))
    for count, most in ((1, [1]), (11, [1, 2, 4, 8, 11]), (99, [1, 2, 4, 8, 16])):
        assert [case.batch for case in cases_of([wide] * count)] == most
    # Nothing is timed or tuned that no plan may have.
    for numel, sizes in ((3 * 64 * 128, [1, 2, 3]), (1, [1])):
        assert [c.batch for c in cases_of([(64, 128, "float32")] * 99, numel)] == sizes


CASES = cases_of([SMALL] * 4 + [MIDDLE] * 2 + [LARGE])


sizes = st.tuples(st.sampled_from([8, 32, 100, 300, 700]), st.integers(1, 4), st.integers(1, 5))


@given(
    st.lists(sizes, min_size=1, max_size=12, unique_by=lambda t: t[:2]),
    st.floats(1e-6, 3.0),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_the_budget_is_overrun_by_one_run_at_most(items, budget, rng):
    lengths: list[float] = []

    def seconds(case, kernel):
        lengths.append(math.exp(rng.uniform(-4, 4)) * as_modelled()(case, kernel))
        return lengths[-1]

    timer = FakeTimer(seconds)
    times_of([Case((m, m, "float32"), b, count) for m, b, count in items], timer, budget)
    assert timer.now - 100.0 - budget <= max(lengths, default=0.0) * (1 + 1e-9)


# ---- choosing kernels --------------------------------------------------------------------

ONE = Case((48, 160, "float32"), 1)
OFFERED = [str(choice) for choice in candidates(48, 160, F32, CPU, 5)]
RULE, OTHER = OFFERED[:2]


def chosen(ms: dict[str, float], cases=(ONE,), cached=None, budget_s=1e6, timer=None, **kwargs):
    timer = timer or FakeTimer(lambda case, kernel: ms.get(kernel, 9.0) / 1e3)
    given = cases, cached or {}, timer, MODEL, KernelOptions(**kwargs)
    return choose_kernels(*given, budget_s=budget_s)


def test_the_fastest_is_chosen_and_the_fixed_rule_wins_a_tie():
    for seconds, passes in ((1e-4, PASSES), (1e-2, 2)):  # by turns
        timer = FakeTimer(lambda _, kernel, s=seconds: s if kernel == OTHER else 1.1 * s)
        assert chosen({}, timer=timer) == {ONE: OTHER}
        assert [kernel for _, kernel in timer.runs] == OFFERED * passes
    assert chosen({RULE: 1.0, OTHER: 0.98}) == {ONE: RULE}
    assert chosen({RULE: 1.0, OTHER: 0.96}) == {ONE: OTHER}


def test_what_is_wrong_is_not_timed():
    errors = {KernelChoice.parse(name): 0.5 * (name == RULE) for name in OFFERED}
    with mock.patch("dmuon.measure.gate_errors", return_value=errors):
        timer = FakeTimer(lambda case, kernel: 1e-3)
        assert chosen({}, timer=timer) == {ONE: OTHER}
        assert RULE not in {kernel for _, kernel in timer.runs}
    errors = dict.fromkeys(errors, 0.9)
    with (
        mock.patch("dmuon.measure.gate_errors", return_value=errors),
        pytest.raises(RuntimeError, match=r"no Newton-Schulz kernel is right for 1 x \[48, 160\]"),
    ):
        chosen({})


def test_what_time_or_memory_do_not_reach_is_left_to_the_rule():
    cases = [Case(ONE.key, batch) for batch in (1, 2)]
    assert chosen({}, cases, budget_s=1e-4) == {}
    small = FakeTimer(lambda *_: 1e-3)
    small.largest = 1
    assert list(chosen({}, cases, timer=small)) == cases[:1]


def test_cached_choices_count_as_long_as_they_are_offered():
    assert chosen({}, cached={ONE: OTHER}, budget_s=0.0) == {ONE: OTHER}
    for stale in ("gram[1,3]/triton-128x64-w4-s3/float32", "gram[1,3]/torch_strips/float16", "x"):
        assert chosen({}, cached={ONE: stale}, budget_s=0.0) == {}


def test_what_need_not_be_measured():
    timer = FakeTimer(lambda *_: 1e-3)
    assert chosen({}, timer=timer, method="gram[1,3]", backend="torch") == {} and not timer.runs
    with pytest.raises(ValueError, match="'triton' cannot run on cpu"):
        chosen({}, backend="triton")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_catches_a_wrong_kernel(dtype):
    choice, real = KernelChoice("gram", (1, 3), "torch", dtype), Orthogonalizer.run
    case, limit = Case((48, 96, "float32"), 2), ERROR_LIMITS[getattr(torch, dtype)]
    assert gate_errors(case, [choice], CPU)[choice] < limit
    for fault in (
        lambda x: x * 1.5,
        lambda x: x.index_fill(2, torch.tensor([0]), math.nan),
        lambda x: x[:1].expand_as(x),  # one of the batch for all
        lambda x: x.tril(),
    ):

        def planted(runner, call, x, fault=fault):
            found = real(runner, call, x)
            return fault(found) if call.kernel == str(choice) else found

        with mock.patch.object(Orthogonalizer, "run", planted):
            assert gate_errors(case, [choice], CPU)[choice] > limit
    with (
        mock.patch.object(Orthogonalizer, "run", side_effect=RuntimeError("PassManager")),
        pytest.raises(RuntimeError, match="PassManager"),  # something is wrong with torch
    ):
        gate_errors(case, [choice], CPU)


TRITON = "gram[2]/triton-64x64-w4-s4/float32"
# Without a driver, without Python's headers, of a broken installation.
FAILURES = [
    AssertionError("libcuda.so cannot found!"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    OSError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found"),
]


@pytest.mark.parametrize("when", ["compile", "run"])
def test_an_optional_kernel_that_fails_is_left_out_with_a_warning(when):
    choices = tuple(map(KernelChoice.parse, [RULE, TRITON, OTHER]))
    real, failure = Orthogonalizer.run, FAILURES[1]

    def fails_of_triton(kernel):
        if "/triton" in kernel:
            raise failure

    def failing(runner, call, x):
        return fails_of_triton(call.kernel) or real(runner, call, x)

    def seconds(case, kernel):
        return fails_of_triton(kernel) or (2e-3 if kernel == RULE else 1e-3)

    right = dict.fromkeys(choices, 0.0)
    planted = mock.patch("dmuon.measure.gate_errors", lambda *_, **how: right)
    if when == "compile":
        planted = mock.patch.object(Orthogonalizer, "run", failing)
    with (
        mock.patch("dmuon.measure.candidates", return_value=choices),
        planted,
        pytest.warns(RuntimeWarning, match=f"'triton' is left out.*{type(failure).__name__}"),
    ):
        assert chosen({}, timer=FakeTimer(seconds)) == {ONE: OTHER}


@pytest.mark.parametrize("failure", [*FAILURES, ImportError("no module")], ids=repr)
def test_a_backend_whose_import_or_probe_fails_is_not_available(failure):
    real = builtins.__import__

    def planted(name, *args, **kwargs):
        if name.split(".")[0] == "triton":
            raise failure
        return real(name, *args, **kwargs)

    assert why_not("triton", "meta", F32) is None
    with mock.patch("dmuon.kernels.triton_syrk.why_unavailable", side_effect=failure):
        assert str(failure)[:20] in why_not("triton", "cuda", F32)
    with mock.patch.dict("sys.modules"), mock.patch("builtins.__import__", planted):
        for name in [name for name in sys.modules if name.startswith("dmuon.kernels.triton")]:
            del sys.modules[name]
        assert str(failure)[:20] in why_not("triton", "cuda", F32)
        assert backend_version("cuda") == "torch"


def test_all_do_without_a_backend_that_one_rank_lacks(tmp_path):
    """And what is chosen so is cached apart."""

    class Two(Transport):
        world = 2

        def gather_objects(self, value):
            lacks = isinstance(value, tuple) and len(value) == 6
            return [value, (*value[:5], "no gcc") if lacks else value]

    def kernels_of(transport) -> set[str]:
        given = transport, KEYS, torch.device("cuda"), PlannerOptions(cache_dir=str(tmp_path))
        how = {"ns_dtype": torch.float16, "timer": timers([], lambda *_: 1e-3)}
        offered = [RULE.replace("float32", "float16"), TRITON.replace("float32", "float16")]
        with mock.patch(
            "dmuon.measure.candidates",
            lambda *how: [KernelChoice.parse(k) for k in offered if how[6] == "auto"],
        ):
            table = measured_costs(*given, **how)
        return {kernel.split("/")[1] for by in table.kernels.values() for kernel in by.values()}

    def faster(case, kernel):
        return 1e-3 if "/triton" in kernel else 2e-3

    right = mock.patch("dmuon.measure.gate_errors", lambda _, c, *a, **k: dict.fromkeys(c, 0.0))
    with (
        mock.patch("dmuon.devices.Cuda.name", return_value="NVIDIA H100"),
        mock.patch("dmuon.measure.why_not", return_value=None),
        mock.patch("dmuon.measure.backend_version", return_value="triton"),
        right,
    ):
        with pytest.warns(RuntimeWarning, match=r"on 1 of 2 ranks.* on rank 1: no gcc"):
            assert kernels_of(Two()) == {"torch"}
        kernels_of(Transport())
    assert len([*tmp_path.glob("*.json")]) == 2


@pytest.mark.parametrize(
    ("burst", "noise", "most"),
    [(1 << 17, {}, 1.02), (0, {1: 0.015}, 2), (0, {0: 0.06, 1: 0.04}, 1.01)],
)
def test_links_are_measured_beyond_a_burst_that_they_let_pass(burst, noise, most):
    """Noise in one exchange, or in the first two, makes them no more than twice as fast."""
    links, rate = LinkTimer(Transport(), torch.device("cpu"), Topology.flat(1)), 25e6
    taken: list[float] = []

    def exchange(step, nbytes):
        taken.append(1e-3 + max(0, nbytes - burst) / rate + noise.get(len(taken), 0))
        return taken[-1]

    with mock.patch.object(links, "exchange", exchange):
        few, per_byte, _ = links.rate(1)
    assert few == taken[0]
    assert 0.98 < 1 / per_byte / rate < most


# ---- the real thing ----------------------------------------------------------------------

KEYS: list[ShapeKey] = [(6, 10, "float32")] * 2 + [(10, 6, "float32"), (8, 8, "bfloat16")]


def costs_of(folder=None, keys=KEYS, device=CPU, **kwargs) -> CostTable:
    options = PlannerOptions(cache_dir=None if folder is None else str(folder))
    return measured_costs(Transport(), keys, device, options, **kwargs)


def timers(made: list[FakeTimer], seconds: Any = None):
    """Makes fake timers, and notes those that measure costs: they are the last of each call."""

    def make(device, ns_dtype, **how):
        made.append(FakeTimer(seconds or as_modelled()))
        made[-1].ns_dtype = ns_dtype
        return made[-1]

    return make


def measured_by(made: list[FakeTimer]) -> set[ShapeKey]:
    keys = {case.key for timer in made for case, _ in timer.runs}
    made.clear()
    return keys


def test_what_is_cached_is_not_measured_again(tmp_path):
    made: list[FakeTimer] = []
    first = costs_of(tmp_path, timer=timers(made))
    assert measured_by(made) == {(6, 10, "float32"), (8, 8, "bfloat16")}
    assert costs_of(tmp_path, timer=timers(made, as_modelled(5.0))) == first and not measured_by(
        made
    )
    new = (3, 4, "float32")
    more = costs_of(tmp_path, [*KEYS, new], timer=timers(made))
    assert measured_by(made) == {new}
    assert more.entries == first.entries | {new: more.entries[new]}
    # The owners of the sharded layout do less, and what has another number of threads is slower.
    alone = costs_of(tmp_path, timer=timers(made), momentum=False)
    assert measured_by(made) == set(first.entries) and not alone.momentum
    torch.set_num_threads(2)
    try:
        costs_of(tmp_path, timer=timers(made))
    finally:
        torch.set_num_threads(1)
    assert measured_by(made) == set(first.entries)
    # On CUDA times of graphs are kept apart from those of eager calls.
    with (
        mock.patch("dmuon.devices.Cuda.name", return_value="H100"),
        mock.patch("dmuon.measure.backend_version", return_value="torch"),
    ):
        for graphs, measures in ((None, True), (True, False), (False, True), (False, False)):
            kernels = KernelOptions(method="standard", backend="torch", cuda_graphs=graphs)
            cuda, timer = torch.device("cuda"), timers(made)
            costs_of(tmp_path, device=cuda, kernels=kernels, timer=timer)
            assert bool(measured_by(made)) == measures, graphs
    fresh = costs_of(tmp_path, timer=timers(made, as_modelled(4.0)), fresh=True)
    assert measured_by(made) == set(first.entries)
    assert fresh.entries[8, 8, "bfloat16"][1] == pytest.approx(
        4 * first.batch_ms(KEYS[-1], 1), rel=1e-5
    )
    assert costs_of(tmp_path).entries == fresh.entries


def test_what_there_was_no_time_for_is_estimated_and_not_remembered(tmp_path):
    table = costs_of(tmp_path, budget_s=1e-9)
    assert table.entries == {}
    assert table.origin(KEYS[0], 1) == "analytic" and table.batch_ms(KEYS[0], 1) > 0
    rule = fixed_choice(6, 10, resolve_ns_dtype("auto", CPU), CPU, 5)
    assert table.kernel(KEYS[0], 1) == str(rule)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def test_measuring_does_not_disturb_and_is_not_disturbed(tmp_path):
    """Random numbers, gradients and memory are as before, whatever the defaults are."""
    seen = set()

    def noted(runner, call, x):
        seen.add((x.device.type, x.dtype))
        return real(runner, call, x)

    real = Orthogonalizer.run
    costs_of(tmp_path / "warm")  # what kernels keep for good is there now
    state, python_state = torch.get_rng_state(), random.getstate()
    before = tensors_alive()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(Orthogonalizer, "run", noted),
            torch.device("meta"),
            torch.autocast("cpu", torch.bfloat16),
            torch.enable_grad(),
        ):
            table = costs_of(tmp_path)
            assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    dtype = resolve_ns_dtype("auto", "cpu")
    assert len(table.entries) == 2 and seen == {("cpu", dtype), ("cpu", F32)}
    assert tensors_alive() == before
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state


def test_a_cpu_is_not_asked_for_batches_of_matrices_that_take_long(tmp_path):
    made: list[FakeTimer] = []

    def seconds(case, kernel):
        return {SMALL: 5e-3, MIDDLE: 3e-3}[case.key] * case.batch

    for _ in range(2):
        table = costs_of(tmp_path, [SMALL, MIDDLE] * 4, timer=timers(made, seconds))
        assert table.entries == {SMALL: {1: 5.0}, MIDDLE: {1: 3.0, 2: 6.0}}
        assert (table.batch_ms(SMALL, 4), table.batch_ms(MIDDLE, 4)) == (20.0, 12.0)
    assert not made[-1].runs, "what is not asked for is not missed"


def test_a_kernel_that_fails_where_costs_are_measured_is_run_by_nobody():
    def seconds(case, kernel):
        if "/triton" in kernel:
            raise FAILURES[0]
        return 1e-3

    keys = [(48, 160, "float32"), (8, 8, "float32")]
    with (
        mock.patch("dmuon.measure.choose_kernels", return_value={ONE: TRITON}),
        pytest.warns(RuntimeWarning, match="'triton' is left out"),
    ):
        table = costs_of(keys=keys, timer=timers([], seconds), fresh=True, ns_dtype=F32)
    assert table.kernels[ONE.key] == {1: RULE}
    assert ONE.key not in table.entries and table.entries[keys[1]] == {1: 1.0}


def test_a_batch_that_needs_more_than_a_quarter_of_the_memory_is_not_tried():
    one, many = [(Case((32, 32, "float32"), batch), "") for batch in (1, 64)]
    with mock.patch("dmuon.devices.host_memory", return_value=(1 << 20, 1 << 30)):
        assert OwnerTimer(CPU, torch.bfloat16).reserve([many, one]) == [one]
        assert OwnerTimer(CPU, torch.bfloat16, sharing=64).reserve([one]) == []


def test_dedicate_params_measures_by_default_but_not_for_a_plan_that_is_given(tmp_path):
    planner = dmuon.PlannerOptions(cache_dir=str(tmp_path))
    with mock.patch("dmuon.api.measured_costs", measured_costs):
        own = dmuon.dedicate_params(TinyGPT(), planner=planner)
    assert own.plan.cost_source.startswith("measured on ")
    assert len(list(tmp_path.glob("*.json"))) == 1
    with mock.patch("dmuon.api.measured_costs", side_effect=AssertionError):
        again = dmuon.dedicate_params(TinyGPT(), plan=own.plan)
    assert again.plan.fingerprint() == own.plan.fingerprint()


def warned(action: Callable[[], CostTable], count: int = 1) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert action().entries
    assert [w.category for w in caught] == [RuntimeWarning] * count
    return "".join(str(w.message) for w in caught)


def test_trouble_with_the_cache_is_a_warning(tmp_path):
    costs_of(tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:-20])
    text = warned(lambda: costs_of(tmp_path))
    assert file.name in text and "ignored and rebuilt" in text
    warned(lambda: costs_of(tmp_path), count=0)
    assert str(file) in warned(lambda: costs_of(file / "cache"))  # cannot be written
    with mock.patch("dmuon.scheduler.costs.cache_directory", return_value=None):
        assert "cache_dir" in warned(costs_of)


# ---- the profile command -----------------------------------------------------------------


def profile(tmp_path, *arguments: str) -> int:
    common = ["--cache-dir", str(tmp_path / "cache"), "--device", "cpu"]
    try:
        # Rates take a second, and test_measured.py measures them.
        with mock.patch("dmuon.measure.slowest_s", return_value=1e-3):
            return main(["profile", *common, *arguments])
    except SystemExit as error:  # from argparse
        return error.code


def test_it_prints_a_table_of_every_shape_and_batch(tmp_path, capsys):
    assert profile(tmp_path, "--shapes", "8x24,16x8", "--max-batch", "3") == 0
    out, err = capsys.readouterr()
    assert err == "" and "Newton-Schulz measured on " in out
    cells = [line.split() for line in out.splitlines() if "/torch" in line]
    batches = [" ".join(row[:5] if "x" in row else row[:1]) for row in cells]
    assert batches == ["8 x 16 float32 1", "2", "3", "8 x 24 float32 1", "2", "3"]
    assert profile(tmp_path, "--model", "tests.unit.models:TinyGPT") == 0
    assert "8 x 16 " in capsys.readouterr().out
    options = ("--shapes", "64x64", "--max-batch", "1", "--budget", "1e-9", "--layout", "sharded")
    assert profile(tmp_path, *options) == 0
    out = capsys.readouterr().out
    assert "1 analytic" in out and "measured" not in out.replace("measured on", "")


def test_it_writes_a_table_that_costs_can_be(tmp_path, capsys):
    def table(*more: str) -> CostTable:
        options = ("--shapes", "8x24", "--dtype", "bfloat16", "--max-batch", "2", "--out", "-")
        assert profile(tmp_path, *options, *more) == 0
        found = CostTable.from_json(capsys.readouterr().out)
        rates = found.rates
        assert rates is not None and rates.turn_s == rates.sent_s == 0, "alone nothing travels"
        assert min(rates.products, rates.copies, rates.new, rates.call_s) > 0
        return replace(found, rates=None)  # measured again each time

    first = table()
    assert set(first.entries) == {(8, 24, "bfloat16")} and first.momentum
    assert table() == first, "what is cached is not measured again"
    assert table("--fresh") == table()
    assert not table("--layout", "sharded").momentum
    assert "2 threads" in table("--threads", "2").source and torch.get_num_threads() == 1
    path = tmp_path / "costs.json"
    assert profile(tmp_path, "--shapes", "8x8", "--out", str(path)) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    loaded, rows = CostTable.load(path), json.loads(path.read_text())["entries"]
    assert {loaded.origin((8, 8, "float32"), int(b)) for b in rows[0]["ms"]} == {"measured"}


@pytest.mark.parametrize(("options", "message"), [
    ("--shapes 8by8", r"'8by8' is no shape"),
    ("--shapes 8x8 --dtype int8", r"unknown dtype 'int8'.*float32"),
    ("--shapes 8x8 --max-batch 0", "--max-batch: must be positive, found 0"),
    ("--shapes 8x8 --out /no/such/folder/x.json", "cannot write"),
    ("--shapes 8x8 --device cuda", "finds no such device here; try --device cpu"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_status_two(tmp_path, capsys, options, message):
    with mock.patch("dmuon.devices.default_device", return_value=CPU):
        assert profile(tmp_path, *options.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("python -m dmuon profile: error: ") and err.count("\n") == 1
    assert re.search(message, err)
    assert parse_shapes("4X5,4x5, 6x7") == [(4, 5), (6, 7)]


def test_what_runs_out_of_memory_is_left_out():
    def seconds(case, kernel):
        if case.batch == 4:
            raise torch.OutOfMemoryError
        return 1e-3

    assert {case.batch for case in times_of(CASES, FakeTimer(seconds))} == {1, 2}
