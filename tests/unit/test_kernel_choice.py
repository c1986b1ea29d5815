"""Choosing kernels by measurement, and running them as an optimizer does."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import dmuon
from dmuon import workbench
from dmuon.config import KernelOptions
from dmuon.kernel_tuning import _Bench, choose_kernels
from dmuon.kernels import backends
from dmuon.kernels import runner as runner_module
from dmuon.kernels.autotune import (
    ERROR_LIMITS,
    ROUNDS,
    Case,
    gate_error,
    gate_reference,
    tune,
)
from dmuon.kernels.choice import candidates, fixed_choice
from dmuon.kernels.graphs import Graphs
from dmuon.kernels.iterations import squares_program
from dmuon.kernels.newton_schulz import (
    iterate_all,
    normalize,
    program_of,
    resolve_coefficients,
)
from dmuon.kernels.ops import TORCH_OPS, MatmulOps
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.kernels.workspace import Workspace
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.profile import Want, wanted
from dmuon.types import KernelChoice, PlanError

CPU = torch.device("cpu")
F32 = torch.float32
POLAR = resolve_coefficients("polar_express", 5)
A = KernelChoice("standard", (), "torch", "float32")
B = KernelChoice("gram", (2,), "torch", "float32")
C = KernelChoice("gram", (1, 3), "torch", "float32")

ONE = Case(4, 6, 1)
AUTO = KernelOptions()


class FakeBench:
    """Times and errors by choice; a clock that runs when something is timed."""

    def __init__(self, ms: dict[KernelChoice, float], errors: dict[KernelChoice, float]) -> None:
        self.ms = ms
        self.errors = errors
        self.now = 0.0
        self.runs: list[KernelChoice] = []

    def error(self, case: Case, choice: KernelChoice) -> float:
        return self.errors.get(choice, 0.0)

    def run(self, case: Case, choice: KernelChoice) -> float:
        self.runs.append(choice)
        self.now += self.ms[choice] / 1e3
        return self.ms[choice]

    def tune(self, offered, budget_s=100.0, cases=(ONE,), estimate=1.0):
        return tune(
            cases,
            self,
            lambda case: offered,
            lambda case: estimate,
            budget_s=budget_s,
            clock=lambda: self.now,
        )


def test_the_fastest_that_is_right_is_chosen():
    bench = FakeBench({A: 3.0, B: 2.0, C: 1.0}, {C: 0.5})
    assert bench.tune([A, B, C]) == {ONE: B}
    assert C not in bench.runs  # what is wrong is not timed
    assert bench.runs == [A, B] * (ROUNDS + 1)


def test_the_fixed_rule_wins_a_tie():
    assert FakeBench({A: 1.0, B: 0.98}, {}).tune([A, B]) == {ONE: A}
    assert FakeBench({A: 1.0, B: 0.96}, {}).tune([A, B]) == {ONE: B}
    assert FakeBench({A: 1.0, B: 2.0}, {A: float("inf")}).tune([A, B]) == {ONE: B}


def test_one_candidate_is_not_measured():
    bench = FakeBench({}, {})
    assert bench.tune([A], budget_s=0.0) == {ONE: A} and not bench.runs


def test_what_the_budget_does_not_reach_is_left_out():
    cases = [Case(4, 6, b) for b in (1, 2, 4)]
    bench = FakeBench({A: 10.0, B: 8.0}, {})
    enough_for_one = 2 * (ROUNDS + 3) * 1.05 * 10e-3
    found = bench.tune([A, B], budget_s=enough_for_one, cases=cases, estimate=10.0)
    assert found == {cases[0]: B}
    assert bench.tune([A, B], budget_s=1e-4, cases=cases) == {}


def test_the_estimate_learns_from_what_was_measured():
    cases = [Case(4, 6, b) for b in (1, 2)]
    bench = FakeBench({A: 1000.0, B: 800.0}, {})  # a thousand times what was estimated
    assert list(bench.tune([A, B], budget_s=20.0, cases=cases)) == cases[:1]


def test_running_out_of_memory_leaves_a_case_to_the_rule():
    class Small(FakeBench):
        def run(self, case, choice):
            if case.batch > 1:
                raise MemoryError
            return super().run(case, choice)

    cases = [Case(4, 6, 2), Case(4, 6, 1)]
    assert Small({A: 2.0, B: 1.0}, {}).tune([A, B], cases=cases) == {cases[1]: B}


def test_no_right_kernel_is_an_error():
    with pytest.raises(RuntimeError, match=r"no Newton-Schulz kernel is right for 1 x \[4, 6\]"):
        FakeBench({}, {A: 0.9, B: 0.9}).tune([A, B])


# --- the gate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48), (300, 700)])
def test_every_candidate_of_a_cpu_passes_the_gate(dtype, shape):
    for choice in candidates(*shape, dtype, CPU, 5):
        assert gate_error(Case(*shape, 3), choice, CPU) < ERROR_LIMITS[dtype] / 2


def broken(name: str) -> MatmulOps:
    """A backend with a fault of one kind."""

    def symmetric(a, b, c=None, *, out, alpha=1.0, beta=0.0, diag=0.0, plain=None):
        if name == "no diagonal":
            diag = 0.0
        if name == "no beta":
            beta = 0.0
        steps = TORCH_OPS.symmetric(
            a, b, c, out=out, alpha=alpha, beta=beta, diag=diag, plain=plain
        )
        if name == "no mirror":
            steps.append(lambda: out.copy_(out.tril()))
        if name == "one matrix of the batch for all" and out.ndim == 3:
            steps.append(lambda: out.copy_(out[:1].expand_as(out)))
        if name == "nan":
            steps.append(lambda: out[..., 0, 0].fill_(float("nan")))
        return steps

    return MatmulOps(name, symmetric, TORCH_OPS.general)


FAULTS = ("no diagonal", "no beta", "no mirror", "one matrix of the batch for all", "nan")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_the_gate_catches_a_wrong_kernel(monkeypatch, fault, dtype):
    real = backends.ops_of
    name = str(dtype).removeprefix("torch.")
    reference = "float32"
    choice = KernelChoice("gram", (1, 3), "torch", name, "x")
    assert gate_error(Case(48, 96, 2), choice, CPU) < ERROR_LIMITS[dtype]

    def planted(one, device, rows=1):
        return real(one, device, rows) if one.dtype == reference and not one.tile else broken(fault)

    monkeypatch.setattr("dmuon.kernels.newton_schulz.ops_of", planted)
    assert not gate_error(Case(48, 96, 2), choice, CPU) <= ERROR_LIMITS[dtype]


# --- choosing for a plan ------------------------------------------------------------------------


def choices_of(wants, cached=None, options=AUTO, clock=None):
    count = itertools.count()
    found, tuned = choose_kernels(
        wants,
        cached or {},
        CostTable.analytic(),
        CPU,
        F32,
        options,
        clock=clock or (lambda: next(count) * 1e-6),
    )
    if options.tune_budget_s:
        assert {key: set(by) for key, by in found.items()} == tuned
    return found


KEYS = [(16, 24, "float32")] * 3 + [(64, 512, "float32")]


def test_every_want_gets_a_choice_that_is_offered():
    wants = wanted(KEYS, 16)
    found = choices_of(wants)
    for want in wants:
        offered = map(str, candidates(*want.key[:2], F32, CPU, 5))
        assert found[want.key][want.batch] in offered


def test_cached_choices_count_as_long_as_they_are_offered():
    wants = [Want((64, 512, "float32"), 1)]
    cached = {(64, 512, "float32"): {1: "gram[1,3]/torch_strips/float32"}}
    no_time = KernelOptions(tune_budget_s=0.0)
    assert choices_of(wants, cached, no_time) == cached
    for stale in ("gram[1,3]/triton-128x64-w4-s3/float32", "gram[1,3]/torch_strips/float16", "x"):
        found = choices_of(wants, {(64, 512, "float32"): {1: stale}}, no_time)
        assert found[64, 512, "float32"][1] == str(fixed_choice(64, 512, F32, CPU, 5))


@pytest.mark.parametrize("method", ["standard", "gram", "gram[1,3]"])
def test_a_fixed_method_is_what_every_batch_gets(method):
    found = choices_of(wanted(KEYS, 16), options=KernelOptions(method=method))
    expected = {"gram": "gram[2]"}.get(method, method)
    assert {kernel for by in found.values() for kernel in by.values()} == {
        f"{expected}/torch_strips/float32"
    }


def test_beyond_the_budget_the_fixed_rule_chooses():
    wants = wanted(KEYS, 16)
    found = choices_of(wants, options=KernelOptions(tune_budget_s=0.0))
    for want in wants:
        assert found[want.key][want.batch] == str(fixed_choice(*want.key[:2], F32, CPU, 5))


# --- graphs, with a capture that is not CUDA's --------------------------------------------------


class Recorder:
    """Captures by keeping the function."""

    def __init__(self, fails: bool = False) -> None:
        self.captured = 0
        self.replayed = 0
        self.fails = fails

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


def test_calls_run_are_captured_and_replayed():
    recorder, calls = Recorder(), []
    graphs = Graphs(capture=recorder)
    for _ in range(4):
        graphs.run("a", lambda: calls.append("a"))
    graphs.run("b", lambda: calls.append("b"))
    assert (recorder.captured, recorder.replayed) == (1, 3)
    assert calls == ["a"] * 4 + ["b"]
    assert graphs.state() == "1 of 2 captured"
    assert copy.deepcopy(graphs).state() == "0 of 0 captured"
    graphs.forget("b")
    assert graphs.state() == "1 of 1 captured"
    graphs.run("a", lambda: calls.append("a"))
    assert (recorder.captured, recorder.replayed) == (1, 4)
    graphs.forget_all()
    for _ in range(2):
        graphs.run("a", lambda: calls.append("a"))
    assert (recorder.captured, recorder.replayed) == (2, 5)


def test_a_failed_capture_is_loud_and_training_goes_on():
    graphs, calls = Graphs(capture=Recorder(fails=True)), []
    graphs.run("a", lambda: calls.append(1))
    with pytest.warns(RuntimeWarning, match="CUDA graphs are off.*not permitted when stream"):
        graphs.run("a", lambda: calls.append(2))
    graphs.run("a", lambda: calls.append(3))
    assert calls == [1, 2, 3]
    assert graphs.state() == "off: operation not permitted when stream is capturing"


# --- running ------------------------------------------------------------------------------------


def batches(*shapes: tuple[int, int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [normalize(torch.randn(*shape, generator=generator), F32) for shape in shapes]


GROUPS = [
    ((2, 6, 9),),
    ((2, 6, 9), (1, 12, 6)),
    ((1, 520, 530),),
    ((2, 520, 530), (1, 520, 560)),
]


@pytest.mark.parametrize("shapes", GROUPS, ids=str)
@pytest.mark.parametrize("kernel", ["standard/torch", "gram[2]/torch_strips", "gram[1,3]/torch"])
@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("where", ["own", "lasting", "elsewhere"])
def test_a_runner_gives_what_the_iteration_gives(shapes, kernel, with_graphs, where):
    recorder = Recorder()
    runner = Orthogonalizer(CPU, F32, graphs=Graphs(capture=recorder) if with_graphs else None)
    call = Call(shapes, POLAR, f"{kernel}/float32")
    lasting = batches(*shapes)
    runner.reserve(*([], [(call, lasting)]) if where == "lasting" else ([call],))
    nbytes = runner.nbytes
    choice = KernelChoice.parse(f"{kernel}/float32")
    for seed in range(3):
        xs = batches(*shapes, seed=seed)
        expected = iterate_all([x.clone() for x in xs], POLAR, choice, Workspace(CPU))
        if where != "elsewhere":
            operands = runner.operands(call) if where == "own" else lasting
            for operand, x in zip(operands, xs, strict=True):
                operand.copy_(x)
            xs = operands
        for found, right in zip(runner.run(call, xs), expected, strict=True):
            assert found.shape == right.shape
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
    assert runner.nbytes == nbytes
    captured = with_graphs and where != "elsewhere"
    assert recorder.replayed == (2 if captured else 0)
    report = runner.report()
    assert report["ran"] == {
        " + ".join(f"{b} x [{m}, {n}]" for b, m, n in shapes): f"{kernel}/float32"
    }
    assert report["workspace_bytes"] == nbytes
    state = f"{int(captured)} of {int(captured)} captured"
    assert report["cuda_graphs"] == (state if with_graphs else "off")


def counted(monkeypatch) -> list[tuple]:
    """The programs that are built from now on."""
    built = []
    monkeypatch.setattr(
        runner_module, "program_of", lambda *args: built.append(args) or program_of(*args)
    )
    return built


@pytest.mark.parametrize("kernel", ["standard/torch", "gram[2]/torch_strips"])
@pytest.mark.parametrize("shapes", [((1, 6, 9),), ((2, 9, 6), (1, 6, 40)), ((2, 530, 540),)])
def test_what_python_does_for_a_call_is_done_once(monkeypatch, shapes, kernel):
    built = counted(monkeypatch)
    runner = Orthogonalizer(CPU, F32)
    call = Call(shapes, POLAR, f"{kernel}/float32")
    choice = KernelChoice.parse(call.kernel)

    def follows(seed: int, *, own: bool) -> None:
        """Results are those of the iteration, also in a region where products are bfloat16."""
        xs = batches(*shapes, seed=seed)
        expected = iterate_all([x.clone() for x in xs], POLAR, choice, Workspace(CPU))
        operands = runner.operands(call) if own else [x.clone() for x in xs]
        for operand, x in zip(operands, xs, strict=True):
            operand.copy_(x)
        with torch.autocast("cpu", enabled=seed % 2 == 1):
            found = runner.run(call, operands)
        for these, those in zip(found, expected, strict=True):
            assert torch.equal(these, those)

    for seed in range(3):  # nothing was reserved: memory is new each time, and nothing is kept
        follows(seed, own=True)
        assert len(built) == seed + 1
    runner.reserve([call])
    for seed in range(4):
        follows(seed, own=True)
    assert len(built) == 4
    follows(4, own=False)  # operands elsewhere
    assert len(built) == 5
    follows(5, own=True)
    assert len(built) == 5
    larger = Call(((8, *shapes[0][1:]), *shapes[1:]), POLAR, call.kernel)
    runner.reserve([call, larger])  # the workspace moves
    for seed in range(2):
        follows(seed, own=True)
    assert len(built) == 6
    runner.reserve([larger])
    for seed in range(2):  # it fits: what was not planned may come again too
        follows(seed, own=True)
    assert len(built) == 7


def test_operands_of_the_caller_are_prepared_for_once_and_told_apart(monkeypatch):
    built = counted(monkeypatch)
    recorder = Recorder()
    runner = Orthogonalizer(CPU, F32, graphs=Graphs(capture=recorder))
    call = Call(((2, 6, 9), (1, 12, 6)), POLAR, str(A))
    part = Call(((1, 12, 6),), POLAR, str(A))  # where nothing of the first has a gradient
    buckets = [batches(*call.shapes), batches(*call.shapes)]
    runner.reserve([], [(call, xs) for xs in buckets])
    assert runner.nbytes == runner.call_bytes(call, with_operands=False)
    assert runner.nbytes < runner.call_bytes(call)
    for seed in range(4):
        for n, bucket in enumerate(buckets):
            for asked, xs in ((call, bucket), (part, bucket[1:])):
                fresh = batches(*asked.shapes, seed=10 * seed + n)
                expected = iterate_all([x.clone() for x in fresh], POLAR, A, Workspace(CPU))
                for x, value in zip(xs, fresh, strict=True):
                    x.copy_(value)
                for found, right in zip(runner.run(asked, xs), expected, strict=True):
                    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
    assert len(built) == 4
    assert recorder.captured == 2  # what was planned
    assert runner.report()["ran"] == {"2 x [6, 9] + 1 x [12, 6]": str(A), "1 x [12, 6]": str(A)}


def test_new_settings_are_prepared_for_once(monkeypatch):
    built = counted(monkeypatch)
    recorder = Recorder()
    runner = Orthogonalizer(CPU, F32, graphs=Graphs(capture=recorder))
    runner.reserve([Call(((2, 6, 9),), POLAR, str(A))])
    for steps in (5, 3):
        call = Call(((2, 6, 9),), resolve_coefficients("polar_express", steps), str(A))
        for _ in range(4):
            runner.run(call, runner.operands(call))
    assert (len(built), recorder.captured) == (2, 2)


def test_what_never_comes_again_does_not_pile_up():
    runner = Orthogonalizer(CPU, F32, graphs=Graphs(capture=Recorder()))
    planned = Call(((4, 6, 9),), POLAR, str(A))
    runner.reserve([planned])
    for n in range(700):
        triples = tuple((a + 1e-6 * n, b, c) for a, b, c in POLAR)
        call = Call(((1 + n % 4, 2, 3 + n % 350),), triples, str(A))
        for _ in range(2):
            runner.run(call, runner.operands(call))
        changed = Call(planned.shapes, triples, str(A))
        for _ in range(2):
            runner.run(changed, runner.operands(changed))
    assert len(runner._programs) == 64
    assert len(runner._graphs._replays) <= 64
    assert len(runner._choices) <= 300
    assert len(runner.report()["ran"]) <= 300
    assert "4 x [6, 9]" in runner.report()["ran"]


@pytest.mark.parametrize("backend", ["torch", "torch_strips", "torch_rounded"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda runner: pickle.loads(pickle.dumps(runner))]
)
def test_a_copy_computes_in_memory_of_its_own(backend, duplicate):
    dtype = "bfloat16" if backend == "torch_rounded" else "float32"
    runner = Orthogonalizer(CPU, getattr(torch, dtype))
    call = Call(((2, 520, 530),), POLAR, f"gram[1,3]/{backend}/{dtype}")
    runner.reserve([call])

    def values(seed: int) -> Tensor:
        return batches(*call.shapes, seed=seed)[0].to(runner.dtype)

    (result,) = runner.run(call, [runner.operands(call)[0].copy_(values(0))])
    kept = result.clone()
    twin = duplicate(runner)
    choice = KernelChoice.parse(call.kernel)
    for seed in (1, 2):
        (found,) = twin.run(call, [twin.operands(call)[0].copy_(values(seed))])
        (expected,) = iterate_all([values(seed)], POLAR, choice, Workspace(CPU))
        assert torch.equal(found, expected)
    assert torch.equal(result, kept)


def test_operands_must_be_those_of_the_call():
    runner = Orthogonalizer(CPU, F32)
    call = Call(((2, 6, 9),), POLAR, str(A))
    runner.reserve([call])
    for _ in range(3):
        runner.run(call, runner.operands(call))
        for wrong in ([], batches((2, 6, 9), (2, 6, 9)), batches((2, 6, 8))):
            with pytest.raises(ValueError, match="xs must have the shapes of the call"):
                runner.run(call, wrong)


def test_a_call_of_other_shapes_runs_too():
    runner = Orthogonalizer(CPU, F32, graphs=Graphs(capture=Recorder()))
    runner.reserve([Call(((1, 6, 9),), POLAR)])
    for _ in range(3):
        (x,) = batches((4, 30, 70))
        (expected,) = iterate_all([x.clone()], POLAR, A, Workspace(CPU))
        (found,) = runner.run(Call(((4, 30, 70),), POLAR, str(A)), [x])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_planned_kernel_gives_way_where_it_does_not_fit():
    runner = Orthogonalizer(CPU, torch.bfloat16)
    planned = Call(((1, 300, 900),), POLAR, "gram[2]/torch/float32")
    assert runner.choice(planned) == fixed_choice(300, 900, torch.bfloat16, CPU, 5)
    two_steps = Call(((1, 300, 900),), POLAR[:2], "gram[2]/torch/bfloat16")
    assert runner.choice(two_steps) == fixed_choice(300, 900, torch.bfloat16, CPU, 2)
    for steps, kernel in ((10, "gram[1,3]"), (6, "gram[1,3]"), (5, "gram[2]"), (4, "gram[1]")):
        more = resolve_coefficients("polar_express", steps)
        unsafe = Call(((1, 300, 900),), more, f"{kernel}/torch/bfloat16")
        assert runner.choice(unsafe) == fixed_choice(300, 900, torch.bfloat16, CPU, steps)
    standard = Call(
        ((1, 300, 900),), resolve_coefficients("polar_express", 9), "standard/torch/bfloat16"
    )
    assert str(runner.choice(standard)) == standard.kernel
    fits = Call(((1, 300, 900),), POLAR, "gram[1,3]/torch/bfloat16")
    assert str(runner.choice(fits)) == "gram[1,3]/torch/bfloat16"


def test_no_steps_leave_the_operands():
    runner = Orthogonalizer(CPU, F32)
    call = Call(((2, 6, 9),), ())
    runner.reserve([call])
    (x,) = batches((2, 6, 9))
    assert torch.equal(runner.run(call, [x.clone()])[0], x)


def test_graphs_need_cuda():
    with pytest.raises(ValueError, match="cuda_graphs=True needs a CUDA device, found cpu"):
        Orthogonalizer(CPU, F32, KernelOptions(cuda_graphs=True))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": 3}, TypeError, "KernelOptions.method must be a string, found 3"),
        ({"backend": None}, TypeError, "KernelOptions.backend must be a string"),
        ({"tune_budget_s": -1.0}, ValueError, "tune_budget_s must be a number >= 0, found -1.0"),
        ({"tune_budget_s": "3"}, TypeError, "tune_budget_s must be a number >= 0, found '3'"),
        ({"tune_budget_s": True}, TypeError, "tune_budget_s must be a number >= 0, found True"),
        ({"cuda_graphs": 1}, TypeError, "cuda_graphs must be True, False or None, found 1"),
        ({"cuda_graphs": "yes"}, TypeError, "cuda_graphs must be True, False or None"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        KernelOptions(**options)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("fast", "kernels must be KernelOptions, found str"),
        (KernelOptions(method="fast"), "method must be one of auto, standard, gram"),
        (KernelOptions(backend="cutlass"), "backend must be 'auto' or one of torch, .*'cutlass'"),
    ],
)
def test_planning_refuses_unknown_kernels(kernels, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dmuon.dedicate_params(torch.nn.Linear(4, 6), kernels=kernels)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (KernelOptions(backend="triton"), "'triton' cannot run on cpu"),
        (KernelOptions(method="gram[4]"), "diverges in torch.float32 over 4 steps"),
        (KernelOptions(cuda_graphs=True), "needs a CUDA device"),
    ],
)
def test_the_optimizer_refuses_what_cannot_run_and_can_be_made_again(kernels, message):
    model = torch.nn.Linear(4, 6)
    own = dmuon.dedicate_params(model, kernels=kernels)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(model, ns_dtype=F32)
    own.close()
    own = dmuon.dedicate_params(model)
    dmuon.Muon(model)
    own.close()


def plan_with(kernel: str) -> dmuon.OwnershipPlan:
    costs = CostTable(
        "by hand", {(4, 6, "float32"): {1: 1.0}}, kernels={(4, 6, "float32"): {1: kernel}}
    )
    own = dmuon.dedicate_params(torch.nn.Linear(4, 6), costs=costs)
    own.close()
    return own.plan


@pytest.mark.parametrize(
    "kernels",
    [
        KernelOptions(method="standard"),
        KernelOptions(method="gram[1,3]"),
        KernelOptions(backend="torch_strips"),
    ],
)
def test_options_that_contradict_a_saved_plan_are_refused(kernels):
    plan = plan_with("gram[2]/torch/float32")
    with pytest.raises(PlanError, match=r"the saved plan runs gram\[2\]/torch/float32"):
        dmuon.dedicate_params(torch.nn.Linear(4, 6), plan=plan, kernels=kernels)
    agreeing = KernelOptions(method="gram", backend="torch")
    dmuon.dedicate_params(torch.nn.Linear(4, 6), plan=plan, kernels=agreeing).close()


@pytest.mark.parametrize("kernel", ["gram[2]/torch/bfloat16", "gram[4]/torch/float32"])
def test_a_plan_with_a_kernel_that_diverges_is_refused(kernel):
    model = torch.nn.Linear(4, 6)
    own = dmuon.dedicate_params(model, plan=plan_with(kernel))
    with pytest.raises(ValueError, match="with which the iteration diverges"):
        dmuon.Muon(model)
    own.close()


@pytest.mark.parametrize("method", ["auto", "standard", "gram", "gram[2]"])
def test_the_number_of_steps_may_change_in_training(method):
    model = torch.nn.Linear(4, 6)
    own = dmuon.dedicate_params(model, kernels=KernelOptions(method=method))
    opt = dmuon.Muon(model, ns_dtype=F32)
    for steps in (5, 1, 9, 2):
        opt.param_groups[0]["ns_steps"] = steps
        before = model.weight.detach().clone()
        model(torch.randn(3, 4)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        change = (model.weight.detach() - before).abs().max()
        assert 0 < float(change) < 1, (steps, opt.stats()["kernels"]["ran"])
    own.close()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_candidate_that_does_not_compile_is_dropped(monkeypatch, backend):
    def fail(*_, **__):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("dmuon.kernel_tuning.gate_error", fail)
    bench = _Bench(CPU, F32, None)
    choice = KernelChoice("gram", (2,), backend, "float32")
    if backend == "triton":
        assert bench.error(ONE, choice) == float("inf")
    else:  # something is wrong with torch itself
        with pytest.raises(RuntimeError, match="PassManager"):
            bench.error(ONE, choice)


def test_the_reference_of_a_case_is_computed_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        "dmuon.kernel_tuning.gate_reference",
        lambda case, *rest: made.append(case) or gate_reference(case, *rest),
    )
    bench = _Bench(CPU, F32, None)
    cases = [Case(16, 48, 2), Case(24, 48, 1)]
    for case in cases:
        for choice in candidates(case.rows, case.cols, F32, CPU, 5):
            assert bench.error(case, choice) == gate_error(case, choice, CPU)
    assert made == cases


def test_candidates_are_timed_in_one_workspace():
    bench = _Bench(CPU, F32, None)
    for case in (Case(64, 64, 2), Case(64, 512, 1)):
        for choice in (A, B, C, A):
            assert bench.run(case, choice) > 0
    runners = [runner for runner, _ in bench._runners.values()]
    assert len({id(runner._workspace) for runner in runners}) == 1


def test_kernels_for_another_dtype_than_runs_are_told_of():
    model = torch.nn.Linear(4, 6)
    own = dmuon.dedicate_params(model, plan=plan_with("gram[2]/torch/float16"))
    with pytest.warns(RuntimeWarning, match="chosen for float16, and .* in float32"):
        opt = dmuon.Muon(model, ns_dtype=F32)
    model(torch.randn(3, 4)).square().sum().backward()
    opt.step()
    assert set(opt.stats()["kernels"]["ran"].values()) == {"standard/torch_strips/float32"}
    own.close()


def test_the_report_shows_all_kernels_of_one_shape():
    runner = Orthogonalizer(CPU, F32)
    for kernel in (A, B, A):
        runner.run(Call(((1, 6, 9),), POLAR, str(kernel)), batches((1, 6, 9)))
    assert runner.report()["ran"] == {"1 x [6, 9]": f"{A} and {B}"}


def test_the_report_of_an_optimizer_says_what_ran():
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 6, bias=False))
    own = dmuon.dedicate_params(model, kernels=KernelOptions(method="gram[1,3]", backend="torch"))
    opt = dmuon.Muon(model, ns_dtype=F32)
    model(torch.randn(3, 6)).square().sum().backward()
    opt.step()
    kernels = opt.stats()["kernels"]
    assert set(kernels["ran"].values()) == {"gram[1,3]/torch/float32"}
    assert kernels["workspace_bytes"] > 0 and kernels["cuda_graphs"] == "off"
    own.close()


def test_the_square_part_is_timed_in_the_dtype_that_is_multiplied():
    """Emulated bfloat16 products take tens of times as long as the rounded float32 ones."""
    key, bf16 = (192, 192, "float32"), torch.bfloat16
    kernels = {key: {1: "gram[1,3]/torch_rounded/bfloat16"}}
    seen = []
    with mock.patch.object(
        workbench,
        "squares_program",
        lambda r, *args: seen.append(r.dtype) or squares_program(r, *args),
    ):
        run = workbench.SquareBench(CPU, bf16, kernels).prepare(key, 2)
        assert run() > 0
        plain = {key: {1: "gram[1,3]/torch/bfloat16"}}
        workbench.SquareBench(CPU, bf16, plain).prepare(key, 1)
    assert seen == [torch.float32, bf16]
