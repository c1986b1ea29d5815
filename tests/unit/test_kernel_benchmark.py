"""The kernel benchmark: what it counts, how it judges, and that it goes on after a failure."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_contenders as field_of
from benchmarks import kernel_measure, kernels
from benchmarks.kernel_cases import (
    CPU_SETS,
    CUDA_SETS,
    H200_LAYER_FLOOR_MS,
    QUICK_SETS,
    SETS,
    Case,
    executed_flops,
    floor_flops,
    standard_flops,
)
from benchmarks.kernel_page import misses, page, verdicts
from benchmarks.kernel_timing import Race, matmul_rate, quartiles, ratios
from benchmarks.results import Rows
from dmuon.catalogue.presets import model_specs
from dmuon.kernels.newton_schulz import iterate_with, newton_schulz
from dmuon.types import KernelChoice

CPU = torch.device("cpu")


def layer(name: str) -> Case:
    return SETS[name][-1]


# ---- cases -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "name", "layers"),
    [("llama3-8b", "llama-8b", 32), ("qwen2.5-7b", "qwen2.5-7b", 28), ("gpt2", "gpt2", 12)],
)
def test_layers_are_those_of_the_presets(preset, name, layers):
    found = Counter(tuple(sorted((m.rows, m.cols))) for m in model_specs(preset).matrices)
    ours = {tuple(sorted((m, n))): count * layers for count, m, n in layer(name).stacks}
    assert found == ours


def test_the_vla_mix_is_a_layer_of_each_tower():
    found = Counter(tuple(sorted((m.rows, m.cols))) for m in model_specs("vla").matrices)
    for count, m, n in layer("vla").stacks:
        # Rounded down: a few projections between the towers have shapes of their layers.
        assert found[m, n] // (27 if m == 1152 else 18) == count, (m, n)


def test_sets_are_listed_once_and_known():
    assert set(CUDA_SETS) == SETS.keys()
    assert set(CPU_SETS) < SETS.keys()
    assert {name for names in QUICK_SETS.values() for name in names} <= SETS.keys()
    names = [case.name for cases in SETS.values() for case in cases]
    assert len({(s, c.name) for s, cases in SETS.items() for c in cases}) == len(names)


# ---- what is counted ---------------------------------------------------------------------


def test_flops_of_the_forms():
    square, wide = Case("a", ((1, 64, 64),)), Case("b", ((3, 256, 64),))  # tall counts as wide
    assert standard_flops(square) == 30 * 64**3
    assert standard_flops(wide) == 3 * 90 * 64**3
    assert floor_flops(square, torch.float16) == 20 * 64**3
    assert floor_flops(wide, torch.float16) == 3 * (6 * 4 + 14) * 64**3
    assert floor_flops(wide, torch.bfloat16) == 3 * (9 * 4 + 11) * 64**3


def test_the_floor_of_a_llama_layer_on_an_h200():
    floor_ms = floor_flops(layer("llama-8b"), torch.float16) / 790e12 * 1e3
    assert floor_ms == pytest.approx(H200_LAYER_FLOOR_MS, abs=0.01)


@pytest.mark.parametrize("backend", ["torch", "torch_strips"])
@pytest.mark.parametrize("form", ["standard", "gram[2]", "gram[1,3]"])
@pytest.mark.parametrize("m", [64, 512, 1024])
def test_executed_flops_are_those_that_torch_counts(backend, form, m):
    choice = KernelChoice.parse(f"{form}/{backend}/float32")
    x = torch.randn(1, m, m + 64, device="cpu") / m
    with FlopCounterMode(display=False) as counter:
        iterate_with(x, field_of.TRIPLES, choice)
    assert executed_flops((1, m, m + 64), choice) == counter.get_total_flops()


def test_executed_flops_of_triangles_of_tiles():
    plain = executed_flops((1, 256, 256), KernelChoice.parse("standard/torch/float16"))
    tiled = KernelChoice("standard", (), "triton", "float16", "128x64-w4-s3")
    # Two block rows: three quarters of the symmetric products, two of three in a step.
    assert executed_flops((1, 256, 256), tiled) == plain * (1 + 2 * 0.75) / 3


# ---- contenders --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 40), (24, 70), (70, 24)])
def test_the_baseline_is_the_standard_form(shape):
    x = torch.randn(shape, dtype=torch.float64)
    expected = newton_schulz(x, method="standard", dtype=torch.float64)
    torch.testing.assert_close(field_of.standard_form(x / x.norm()), expected)


MIXED = Case("mixed", ((5, 48, 96), (2, 96, 48), (1, 48, 48), (3, 20, 30)))


def kernels_for(case: Case, kernel: str) -> field_of.Kernels:
    return {
        field_of.kernel_key(m, n): dict.fromkeys(range(1, 6), kernel) for _, m, n in case.stacks
    }


def mixed_field() -> list[field_of.Contender]:
    sources = kernel_measure.sources_of(MIXED, CPU)
    chosen = kernels_for(MIXED, "gram[2]/torch_strips/float32")
    f32 = torch.float32
    return [
        field_of.standard(sources, f32),
        field_of.standard_batched([s if s.shape[1] <= s.shape[2] else s.mT for s in sources], f32),
        field_of.gram(sources, f32),
        field_of.function(sources, f32),
        field_of.standard_function(sources, f32),
        field_of.ours(MIXED, sources, f32, chosen, max_batch=16),
        field_of.ours(MIXED, sources, f32, chosen, max_batch=2, name="ours"),
    ]


def error_of(contender: field_of.Contender) -> float:
    references = kernel_measure.references_of(MIXED, torch.float32, CPU)
    if contender.name == "standard_batched":
        references = [r if r.shape[0] <= r.shape[1] else r.mT for r in references]
    return kernel_measure.error_of(contender, references)


@torch.no_grad()
def test_all_contenders_compute_the_same():
    for contender in mixed_field():
        stacks = sorted(stack for piece in contender.pieces for stack in piece.firsts)
        assert stacks == [0, 1, 2, 3], contender.name
        assert error_of(contender) < 1e-4, contender.name
        assert error_of(contender) < 1e-4, f"{contender.name}: again, on operands written anew"


@torch.no_grad()
def test_a_wrong_contender_is_seen():
    contender, *_ = mixed_field()
    wrong = field_of.Piece(
        contender.pieces[1].refill,
        lambda: [result * 1.01 for result in contender.pieces[1].run()],
        contender.pieces[1].firsts,
    )
    pieces = (contender.pieces[0], wrong, *contender.pieces[2:])
    assert error_of(field_of.Contender("wrong", pieces)) == pytest.approx(0.01, rel=0.1)


def test_calls_of_a_batch_are_no_larger_than_asked_for():
    sources = kernel_measure.sources_of(MIXED, CPU)
    chosen = kernels_for(MIXED, "standard/torch/float32")
    found = field_of.ours(MIXED, sources, torch.float32, chosen, max_batch=2)
    assert len(found.pieces) == 3 + 1 + 1 + 2
    assert found.executed == standard_flops(MIXED)


def test_batches_are_those_that_run():
    assert kernel_measure.batches_of(128, CPU) == {16}
    assert kernel_measure.batches_of(20, CPU) == {16, 4}
    assert kernel_measure.batches_of(3, CPU) == {3}
    assert kernel_measure.batches_of(20, torch.device("cuda")) == {16, 4, 20}


# ---- timing ------------------------------------------------------------------------------


def counting(
    name: str, order: list[str], at: int = 0, fault: BaseException | None = None
) -> field_of.Contender:
    """Notes its calls in ``order``; the one number ``at`` raises ``fault``."""

    def run() -> list[torch.Tensor]:
        order.append(name)
        if fault is not None and order.count(name) == at:
            raise fault
        return []

    return field_of.Contender(name, (field_of.Piece(lambda: None, run, {}),))


def test_contenders_take_turns():
    order: list[str] = []
    field = [counting(name, order) for name in "abc"]
    first_ms = dict.fromkeys("abc", 100.0)  # long ones: one repeat a round
    rate = matmul_rate(CPU, torch.float32)
    race = Race()
    race.run(field, CPU, rate, first_ms, budget_s=1.25)
    assert "".join(order) == "abcbcacab" + "abc"
    assert {len(values) for values in race.times.values()} == {4} == {len(race.rates)}
    order.clear()
    Race().run(field, CPU, rate, first_ms, budget_s=0.11)
    assert len(order) == 9, "three rounds at least"
    order.clear()
    Race().run(field, CPU, rate, first_ms, budget_s=0.05)
    assert len(order) == 3, "or one, where a round takes far longer than the budget"


def test_a_contender_that_fails_in_a_round_leaves_the_race():
    order: list[str] = []
    fault = torch.OutOfMemoryError("too large")
    field = [counting("a", order), counting("b", order, 2, fault), counting("c", order)]
    race = Race()
    race.run(field, CPU, matmul_rate(CPU, torch.float32), dict.fromkeys("abc", 100.0), 1.25)
    assert race.failures == {"b": "OutOfMemoryError: too large"}
    times, rates = race.complete()
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "c": 4}
    assert len(rates) == 4


def test_an_interrupted_race_has_its_complete_rounds():
    order: list[str] = []
    field = [counting("a", order), counting("b", order, 3, KeyboardInterrupt())]
    race = Race()
    with pytest.raises(KeyboardInterrupt):
        race.run(field, CPU, matmul_rate(CPU, torch.float32), dict.fromkeys("ab", 100.0), 2.0)
    times, rates = race.complete()
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    assert len(rates) == 2


# ---- failures ----------------------------------------------------------------------------


TOY = Case("toy", ((2, 24, 40),))


def run_toy(monkeypatch: pytest.MonkeyPatch, faults: dict[str, BaseException]) -> dict[str, Any]:
    """Rows of a case, by contender; those in ``faults`` raise when they run."""
    ours = field_of.ours

    def broken(*args: Any, name: str = "ours", **kwargs: Any) -> field_of.Contender:
        if name in faults:
            raise faults[name]
        return ours(*args, name=name, **kwargs)

    monkeypatch.setattr(field_of, "ours", broken)
    bench = kernel_measure.Bench(CPU, torch.float32, 1, 0.01, 5.0, "no compiler")
    bench.kernels = kernels_for(TOY, "standard/torch/float32")
    found: dict[str, Any] = {}
    kernel_measure.run_case(
        bench, "toys", TOY, lambda row: found.update({str(row["contender"]): row})
    )
    return found


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("2 GiB"), RuntimeError("no kernel image"), KeyError("x")]
)
def test_a_contender_that_fails_does_not_lose_the_others(monkeypatch, fault):
    found = run_toy(monkeypatch, {"ours": fault})
    assert found["ours"]["failure"].startswith(type(fault).__name__ + ": ")
    assert found["standard"]["median_ms"] > 0 and found["gram"]["ratio_to_standard"] > 0
    rows = [{"name": "", **row} for row in found.values()]
    text = page({**document(0.5), "date": "", "versions": {"torch": "", "python": "", "triton": ""},
                 "left_out": [], "machine": {"device": "cpu", "cpu": "", "cpu_capability": "",
                                             "bf16_emulated": False}, "rows": rows})  # fmt: skip
    assert f"ours of toy left out: {type(fault).__name__}" in text


def test_tuning_goes_on_after_a_failure_and_ends_in_time(monkeypatch):
    choose = kernel_measure.choose_kernels
    asked: list[float] = []

    def failing(wants: Any, cached: Any, timer: Any, *args: Any, **kwargs: Any) -> Any:
        budget_s = args[1].tune_budget_s
        if budget_s and wants[0].key[:2] == (24, 40):
            raise RuntimeError("no candidate is right")
        asked.append(budget_s)
        return choose(wants, cached, timer, *args, **kwargs)

    monkeypatch.setattr(kernel_measure, "choose_kernels", failing)
    cases = [TOY, Case("next", ((1, 32, 48), (2, 40, 56)))]
    bench = kernel_measure.Bench(CPU, torch.float32, 1, 0.01, 5.0, "")
    rows = Rows(None, CPU)
    bench.tune(rows, cases, 1e4)
    assert [bool(row.get("failure")) for row in rows.rows] == [True, False, False]
    assert asked[0] == 0.0 and min(asked[1:]) > 0, "the fixed rule's where tuning failed"
    chosen = bench.kernels
    assert {key[:2] for key in chosen} == {(24, 40), (32, 48), (40, 56)}
    # Compiling and checking count: nothing is begun that would end too late.
    late = kernel_measure.Bench(CPU, torch.float32, 1, 0.01, 5.0, "", tune_pace=(1e3, 1.0))
    rows = Rows(None, CPU)
    late.tune(rows, cases, 100.0)
    assert not rows.rows and late.kernels.keys() == chosen.keys()


def test_ratios_are_taken_within_rounds():
    assert ratios([1.0, 10.0, 3.0], [2.0, 20.0, 2.0]) == 0.5
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


# ---- verdicts ----------------------------------------------------------------------------


def document(ratio: float | None, dtype: str = "bfloat16", *, emulated: bool = False) -> dict:
    row = {
        "set": "sweep",
        "case": "1024 x 4096",
        "dtype": dtype,
        "threads": 1,
        "contender": "ours",
        "ratio_to_standard": ratio,
    }
    return {"machine": {"device": "cpu", "bf16_emulated": emulated}, "rows": [row]}


@pytest.mark.parametrize(
    ("ratio", "dtype", "emulated", "expected"),
    [
        (0.60, "bfloat16", False, ["kept", "kept"]),
        (0.63, "bfloat16", False, ["missed", "kept"]),
        (1.04, "bfloat16", False, ["missed", "missed"]),
        (1.04, "float32", False, ["shown", "shown"]),
        (1.04, "float32", True, ["missed", "missed"]),
        (0.03, "bfloat16", True, ["emulated", "emulated"]),
        (None, "bfloat16", True, ["emulated", "emulated"]),
    ],
)
def test_what_counts_as_missed(ratio, dtype, emulated, expected):
    found = document(ratio, dtype, emulated=emulated)
    assert [verdict for _, _, verdict in verdicts(found)] == expected
    assert len(misses(found)) == expected.count("missed")


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, "kept"), (1.04, "missed")])
def test_the_function_has_a_limit_of_its_own(ratio, expected):
    found = document(None)
    found["rows"][0] |= {"contender": "function", "ratio_to_standard_function": ratio}
    assert [verdict for _, _, verdict in verdicts(found)] == [expected]
    assert ["function takes 1.04 x" in text for text in misses(found)] == [True] * (ratio > 1.03)


def test_one_run_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "new" / "kernels.json"
    quick = ["--sets", "odd", "--dtype", "float32", "--threads", "1", "--case-s", "0.02"]
    threads = torch.get_num_threads()
    try:
        assert kernels.main([*quick, "--tune-s", "0", "--no-compile", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "compiled left out: not asked for" in printed, "never silently"
    found = json.loads(path.read_text())
    measured = [row for row in found["rows"] if "left_out" not in row]
    contenders = {"standard", "gram", "standard_function", "function", "ours"}
    assert {row["contender"] for row in measured} == contenders
    assert len(measured) == len(contenders) * len(SETS["odd"])
    assert all("ratio_to_standard_function" in row for row in measured)
    for row in measured:
        assert row["error"] < 1e-3 and row["median_ms"] > 0 and row["ratio_to_floor"] > 0
    assert {"date", "versions", "machine"} <= found.keys()
    assert kernels.main(["--table", "--json", str(path)]) == 0
    assert page(found) in printed and page(found) in capsys.readouterr().out


def test_check_fails_where_a_limit_is_missed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(kernels, "page", lambda found: "")
    for ratio, code in ((0.5, 0), (0.7, 1)):
        path.write_text(json.dumps(document(ratio)))
        assert kernels.main(["--table", "--check", "--json", str(path)]) == code
    assert "0.70 x standard, must be <= 0.62 x standard" in capsys.readouterr().out


def test_long_calls_are_left_out_with_the_reason():
    bench = kernel_measure.Bench(CPU, torch.float32, 1, 1.0, max_call_s=5.0, compiles="no compiler")
    case = SETS["sweep"][-1]
    assert kernel_measure.skip_reason(bench, case, "standard") == ""
    bench.pace["standard"] = 10 / standard_flops(case)
    assert "about 10 s" in kernel_measure.skip_reason(bench, case, "standard")
    assert kernel_measure.skip_reason(bench, case, "compiled") == "no compiler"
