"""Choosing kernels by rule and by plan, and running them as an optimizer does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmuon
from dmuon.config import KernelOptions
from dmuon.kernels import runner as runner_module
from dmuon.kernels.choice import fixed_choice
from dmuon.kernels.graphs import Graphs
from dmuon.kernels.newton_schulz import (
    iterate_all,
    normalize,
    program_of,
    resolve_coefficients,
)
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.kernels.workspace import Workspace
from dmuon.scheduler.costs import CostTable
from dmuon.types import KernelChoice, PlanError

CPU = torch.device("cpu")
F32 = torch.float32
POLAR = resolve_coefficients("polar_express", 5)
A = KernelChoice("standard", (), "torch", "float32")
B = KernelChoice("gram", (2,), "torch", "float32")
C = KernelChoice("gram", (1, 3), "torch", "float32")


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
