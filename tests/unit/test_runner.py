"""Newton-Schulz as an optimizer runs it: workspace, graphs, planned kernels, options."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmuon
from dmuon.config import KernelOptions
from dmuon.kernels import runner as runner_module
from dmuon.kernels.choice import fixed_choice
from dmuon.kernels.newton_schulz import prepared, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.scheduler.costs import CostTable
from dmuon.tensors import normalize
from dmuon.types import PlanError
from tests.products import POLAR, by_hand, gaussian

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
STANDARD, GRAM = "standard/torch/float32", "gram[2]/torch/float32"


class Recorder:
    """Captures by keeping the function."""

    captured = replayed = 0

    def __call__(self, call: Callable[[], object]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


def normalized(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return normalize(gaussian(*shape, seed=seed, dtype=F32), dtype)


def check(runner: Orthogonalizer, call: Call, *seeds: int, x: Tensor | None = None) -> None:
    """Runs on new values, written to ``x`` or the call's operand, are Newton-Schulz of each."""
    for seed in seeds:
        values = normalized(*call.shape, seed=seed, dtype=runner.dtype)
        operand = runner.operand(call) if x is None else x
        found = runner.run(call, operand.copy_(values))
        for one, wanted in zip(found, by_hand(values, call.coefficients), strict=True):
            error = (one.double() - wanted).norm() / wanted.norm()
            assert error < (1e-4 if runner.dtype is F32 else 0.2)


@pytest.fixture
def built(monkeypatch) -> list[list[Tensor]]:
    """The memory of each call that is prepared from now on: its operand, and what it takes."""
    found = []

    def noted(x, coefficients, segments, ops, take, **how):
        memory = [x]

        def seen(shape, dtype):
            memory.append(take(shape, dtype))
            return memory[-1]

        if x.device.type != "meta":  # asked for its size
            found.append(memory)
        return prepared(x, coefficients, segments, ops, seen, **how)

    monkeypatch.setattr(runner_module, "prepared", noted)
    return found


@pytest.mark.parametrize(("shape", "kernel"), [
    ((2, 6, 9), "standard/torch"),
    ((1, 9, 6), "gram[1,3]/torch"),
    ((2, 6, 9), "gram[2]/torch_strips"),
])  # fmt: skip
@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("where", ["own", "lasting", "elsewhere"])
def test_a_runner_gives_what_the_iteration_gives(built, shape, kernel, with_graphs, where):
    recorder = Recorder() if with_graphs else None
    runner = Orthogonalizer(CPU, F32, capture=recorder)
    call = Call(shape, POLAR, f"{kernel}/float32")
    lasting = torch.empty(shape)
    if where == "lasting":
        runner.reserve([], [(call, lasting)])
        assert runner.nbytes == runner.call_bytes(call, with_operand=False)
        assert runner.nbytes < runner.call_bytes(call)
    else:
        runner.reserve([call])
        assert runner.nbytes == runner.call_bytes(call)
    assert len(built) == 1 and runner.report()["ran"] == {}
    for seed in range(3):
        elsewhere = lasting if where == "lasting" else torch.empty(shape)
        with torch.autocast("cpu", enabled=seed == 1):  # it does not reach in
            check(runner, call, seed, x=None if where == "own" else elsewhere)
    assert len(built) == (4 if where == "elsewhere" else 1), "prepared once, when it is reserved"
    captured = int(with_graphs and where != "elsewhere")
    report = runner.report()
    assert report["ran"] == {"{} x [{}, {}]".format(*shape): f"{kernel}/float32"}
    assert report["workspace_bytes"] == runner.nbytes
    assert report["cuda_graphs"] == (f"{captured} of 1 captured" if with_graphs else "off")
    if recorder is not None:
        assert (recorder.captured, recorder.replayed) == (captured, 2 * captured)


def test_what_was_reserved_is_prepared_again_where_it_moved(built):
    runner = Orthogonalizer(CPU, F32)
    call, larger = Call((2, 6, 9), POLAR, STANDARD), Call((8, 6, 9), POLAR, STANDARD)
    check(runner, call, 0, 1)  # nothing is reserved: memory is new each time, and nothing is kept
    assert runner.nbytes == 0 and len(built) == 4
    runner.reserve([larger])
    check(runner, call, 0, 1, 2)  # it fits: what was not planned may come again too
    assert len(built) == 4 + 2
    runner.reserve([call, larger])
    for seed in range(3):
        check(runner, larger, seed)
        check(runner, call, seed)
    assert len(built) == 6 + 2


def test_new_settings_are_prepared_for_once_and_what_never_comes_again_does_not_pile_up(built):
    recorder = Recorder()
    runner = Orthogonalizer(CPU, F32, capture=recorder)
    planned = Call((4, 6, 9), POLAR, STANDARD)
    runner.reserve([planned])
    for steps in (5, 3):
        call = Call(planned.shape, resolve_coefficients("polar_express", steps), STANDARD)
        check(runner, call, 0, 1, 2, 3)
    assert (len(built), recorder.captured) == (2, 2)
    for n in range(300):
        triples = tuple((a + 1e-6 * n, b, c) for a, b, c in POLAR)
        changed = Call(planned.shape, triples, STANDARD)
        for call in (changed, changed, Call((1 + n % 4, 2, 3), triples, STANDARD)):
            runner.run(call, runner.operand(call).zero_())
    assert len(runner._prepared) <= 160
    assert "4 x [6, 9]" in runner.report()["ran"]
    check(runner, planned, 0)


def test_a_planned_kernel_gives_way_where_it_does_not_fit():
    for steps, kernel, fits in (
        (5, GRAM, False),  # another dtype
        (2, "gram[2]/torch/bfloat16", False),
        (6, "gram[1,3]/torch/bfloat16", False),
        (4, "gram[1]/torch/bfloat16", False),
        (9, "standard/torch/bfloat16", True),
        (5, "gram[1,3]/torch/bfloat16", True),
    ):
        call = Call((1, 300, 900), resolve_coefficients("polar_express", steps), kernel)
        rule = fixed_choice(300, 900, BF16, CPU, steps)
        assert str(Orthogonalizer(CPU, BF16).choice(call)) == (kernel if fits else str(rule))


def test_graphs_are_captured_when_memory_is_reserved():
    """Not in a step, because capturing waits for the device."""
    recorder = Recorder()
    runner = Orthogonalizer(CPU, F32, capture=recorder)
    own, lasting = Call((2, 6, 9), POLAR, STANDARD), Call((1, 6, 9), POLAR, GRAM)
    x = torch.full(lasting.shape, math.nan)
    for _ in range(2):  # bound anew, and captured anew
        runner.reserve([own], [(lasting, x)], capture=True)
        assert runner.report()["cuda_graphs"] == "2 of 2 captured" and not runner.report()["ran"]
        before = recorder.captured
        for seed in range(3):
            check(runner, own, seed)
            check(runner, lasting, seed, x=x)
        assert recorder.captured == before, "nothing is captured in a step"
    assert recorder.captured == 4 and recorder.replayed == 12
    assert set(runner.report()["ran"].values()) == {STANDARD, GRAM}


def test_a_failed_capture_is_loud_and_training_goes_on():
    def fails(call):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    runner = Orthogonalizer(CPU, F32, capture=fails)
    calls = [Call((b, 6, 9), POLAR, STANDARD) for b in (1, 2)]
    runner.reserve(calls)
    for call in calls:
        check(runner, call, 0)
    with pytest.warns(RuntimeWarning, match="CUDA graphs are off.*not permitted when stream"):
        check(runner, calls[0], 1)
    for call in calls:
        check(runner, call, 2, 3)
    state = runner.report()["cuda_graphs"]
    assert state == "off: operation not permitted when stream is capturing"


def plan_with(kernel: str) -> dmuon.OwnershipPlan:
    key = (4, 6, "float32")
    costs = CostTable("by hand", {key: {1: 1.0}}, kernels={key: {1: kernel}})
    own = dmuon.dedicate_params(torch.nn.Linear(4, 6), costs=costs)
    own.close()
    return own.plan


def test_options_that_contradict_a_saved_plan_and_plans_that_diverge_are_refused():
    model, plan = torch.nn.Linear(4, 6), plan_with(GRAM)
    for options in ({"method": "standard"}, {"method": "gram[1,3]"}, {"backend": "torch_strips"}):
        with pytest.raises(PlanError, match=r"the saved plan runs gram\[2\]/torch/float32"):
            dmuon.dedicate_params(model, plan=plan, kernels=KernelOptions(**options))
    agreeing = KernelOptions(method="gram", backend="torch")
    dmuon.dedicate_params(model, plan=plan, kernels=agreeing).close()
    for kernel in ("gram[2]/torch/bfloat16", "gram[4]/torch/float32"):
        own = dmuon.dedicate_params(model, plan=plan_with(kernel))
        with pytest.raises(ValueError, match="with which the iteration diverges"):
            dmuon.Muon(model)
        own.close()


def trained(model: torch.nn.Module, opt: dmuon.Muon) -> dict:
    """What ran in one step."""
    model(torch.randn(3, 4)).square().sum().backward()
    opt.step()
    opt.zero_grad()
    opt.synchronize()
    return opt.stats()["kernels"]


def test_reports_say_what_ran():
    runner = Orthogonalizer(CPU, F32)
    for kernel in (STANDARD, GRAM, STANDARD):
        runner.run(Call((1, 6, 9), POLAR, kernel), normalized(1, 6, 9))
    assert runner.report()["ran"] == {"1 x [6, 9]": f"{STANDARD} and {GRAM}"}
    model = torch.nn.Linear(4, 6)
    own = dmuon.dedicate_params(model, kernels=KernelOptions(method="gram[1,3]", backend="torch"))
    kernels = trained(model, dmuon.Muon(model, ns_dtype=F32))
    assert set(kernels["ran"].values()) == {"gram[1,3]/torch/float32"}
    assert kernels["workspace_bytes"] > 0 and kernels["cuda_graphs"] == "off"
    own.close()
    # A plan's kernels may be for another dtype than runs.
    own = dmuon.dedicate_params(model, plan=plan_with("gram[2]/torch/float16"))
    with pytest.warns(RuntimeWarning, match="measured for float16 .* in float32"):
        opt = dmuon.Muon(model, ns_dtype=F32)
    assert set(trained(model, opt)["ran"].values()) == {"standard/torch_strips/float32"}
    own.close()
