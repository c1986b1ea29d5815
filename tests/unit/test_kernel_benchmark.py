"""The kernel benchmark: what it counts, how it judges, and that it goes on after a failure."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_contenders as field_of
from benchmarks import kernels
from benchmarks.kernel_contenders import DEFAULT_SETS, QUICK_SETS, SETS, Case, Piece
from benchmarks.results import Rows
from dmuon.catalogue.presets import model_specs
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.types import KernelChoice

CPU = torch.device("cpu")
MIXED = Case("mixed", ((5, 48, 96), (2, 96, 48), (1, 48, 48), (3, 20, 30)))
TOY = Case("toy", ((2, 24, 40),))


def kernels_for(case: Case, kernel: str) -> field_of.Kernels:
    keys = (field_of.kernel_key(*stack[1:]) for stack in case.stacks)
    return {key: dict.fromkeys(range(1, 6), kernel) for key in keys}


def bench_of(**how: Any) -> kernels.Bench:
    return kernels.Bench(CPU, torch.float32, 1, 0.01, 5.0, "no compiler", **how)


# ---- cases and arithmetic ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "name", "layers"),
    [("llama3-8b", "llama-8b", 32), ("qwen2.5-7b", "qwen2.5-7b", 28), ("gpt2", "gpt2", 12)],
)
def test_layers_are_those_of_the_presets(preset, name, layers):
    found = Counter(tuple(sorted((m.rows, m.cols))) for m in model_specs(preset).matrices)
    stacks = SETS[name][-1].stacks
    assert found == {tuple(sorted((m, n))): count * layers for count, m, n in stacks}


def test_sets_are_known_and_the_vla_mix_is_a_layer_of_each_tower():
    found = Counter(tuple(sorted((m.rows, m.cols))) for m in model_specs("vla").matrices)
    for count, m, n in SETS["vla"][-1].stacks:
        # Rounded down: a few projections between the towers have shapes of their layers.
        assert found[m, n] // (27 if m == 1152 else 18) == count, (m, n)
    for names in (*DEFAULT_SETS.values(), *QUICK_SETS.values()):
        assert set(names) <= SETS.keys()
    for cases in SETS.values():
        assert len({case.name for case in cases}) == len(cases)


def test_flops_of_the_forms():
    square, wide = Case("a", ((1, 64, 64),)), Case("b", ((3, 256, 64),))  # tall counts as wide
    assert field_of.standard_flops(square) == 30 * 64**3
    assert field_of.standard_flops(wide) == 3 * 90 * 64**3
    assert field_of.floor_flops(square, torch.float16) == 20 * 64**3
    assert field_of.floor_flops(wide, torch.float16) == 3 * (6 * 4 + 14) * 64**3
    assert field_of.floor_flops(wide, torch.bfloat16) == 3 * (9 * 4 + 11) * 64**3
    llama_ms = field_of.floor_flops(SETS["llama-8b"][-1], torch.float16) / 790e12 * 1e3
    assert llama_ms == pytest.approx(12.72, abs=0.01)
    plain = field_of.executed_flops((1, 256, 256), KernelChoice.parse("standard/torch/float16"))
    tiled = KernelChoice("standard", (), "triton", "float16", "128x64-w4-s3")
    # Two block rows: three quarters of the symmetric products, two of three in a step.
    assert field_of.executed_flops((1, 256, 256), tiled) == plain * (1 + 2 * 0.75) / 3


@pytest.mark.parametrize("backend", ["torch", "torch_strips"])
@pytest.mark.parametrize("form", ["standard", "gram[2]", "gram[1,3]"])
def test_executed_flops_are_those_that_torch_counts(backend, form):
    for m in (64, 512):
        case = Case("", ((1, m, m + 64),))
        chosen = kernels_for(case, f"{form}/{backend}/float32")
        found = field_of.ours(case, case.sources(CPU), torch.float32, chosen, 16)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            found.pieces[0].run()
        assert found.executed == counter.get_total_flops()


# ---- contenders --------------------------------------------------------------------------


@torch.no_grad()
def test_all_contenders_compute_the_same():
    for shape in ((40, 40), (24, 70), (70, 24)):
        x = torch.randn(shape, dtype=torch.float64)
        expected = newton_schulz(x, method="standard", dtype=torch.float64)
        torch.testing.assert_close(field_of.standard_form(x / x.norm()), expected)
    sources, f32 = MIXED.sources(CPU), torch.float32
    references = kernels.references_of(MIXED, f32, CPU)
    chosen = kernels_for(MIXED, "gram[2]/torch_strips/float32")
    found = dict(field_of.contenders(MIXED, sources, f32, chosen))
    found["small batches"] = partial(field_of.ours, MIXED, sources, f32, chosen, 2)
    del found["compiled"]
    assert found.keys() >= {"standard", "gram", "function", "standard_function", "ours"}
    for name, build in found.items():
        contender = build()
        pieces = contender.pieces
        assert [piece.stack for piece in pieces if piece.stack is not None] == [0, 1, 2, 3], name
        assert len(pieces) == (3 + 1 + 1 + 2 if name == "small batches" else 4)
        for _ in range(2):  # the second time on operands written anew
            assert kernels.error_of(contender, references) < 1e-4, name
        wrong = Piece(pieces[0].refill, lambda run=pieces[0].run: run() * 1.01, 0)
        broken = field_of.Contender("wrong", (wrong, *pieces[1:]))
        assert kernels.error_of(broken, references) == pytest.approx(0.01, rel=0.1)


def test_batches_are_those_that_run_and_rounds_those_that_fit():
    assert kernels.batches_of(128, CPU) == {16}
    assert kernels.batches_of(20, CPU) == {16, 4}
    assert kernels.batches_of(20, torch.device("cuda")) == {16, 4, 20}
    assert kernels.rounds(0.3, 1.25) == 4 and kernels.rounds(0.3, 1000.0) == 41
    assert kernels.rounds(0.3, 0.11) == 3, "three rounds at least"
    assert kernels.rounds(0.3, 0.05) == 1, "or one, where it takes far longer than the budget"


# ---- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3, 8])
@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("2 GiB"), KeyboardInterrupt()])
def test_a_contender_that_fails_does_not_lose_the_others(monkeypatch, fault, at):
    """When it is made, warmed up, or timed."""
    contenders, calls = kernels.contenders, []

    def fails(build: Any) -> field_of.Contender:
        if at == 0:
            raise fault
        (piece,) = build().pieces

        def run() -> Any:
            calls.append(1)
            if len(calls) == at:
                raise fault
            return piece.run()

        return field_of.Contender("ours", (Piece(piece.refill, run, 0),))

    def broken(*given: Any) -> Any:
        for name, build in contenders(*given):
            yield name, partial(fails, build) if name == "ours" else build

    monkeypatch.setattr(kernels, "contenders", broken)
    bench, found = bench_of(kernels=kernels_for(TOY, "standard/torch/float32")), {}
    try:
        kernels.run_case(bench, "toys", TOY, lambda row: found.update({row["contender"]: row}))
    except KeyboardInterrupt:
        others = [row for name, row in found.items() if name not in ("ours", "compiled")]
        assert len(others) == 4
        assert all("median_ms" in row or "interrupted" in row["left_out"] for row in others)
        return
    assert found["ours"]["failure"].startswith("OutOfMemoryError: 2 GiB")
    assert found["standard"]["median_ms"] > 0 and found["gram"]["ratio_to_standard"] > 0
    machine = {"device": "cpu", "cpu": "", "cpu_capability": "", "bf16_emulated": False}
    versions = {"torch": "", "python": "", "triton": ""}
    whole = {"date": "", "versions": versions, "left_out": [], "machine": machine}
    text = kernels.page({**whole, "rows": list(found.values())})
    assert "ours of toy left out: OutOfMemoryError" in text


def test_tuning_goes_on_after_a_failure_and_ends_in_time(monkeypatch):
    choose = kernels.measure.choose_kernels

    def failing(cases: Any, *given: Any, **how: Any) -> Any:
        if cases[0].key[:2] == (24, 40):
            raise RuntimeError("no candidate is right")
        return choose(cases, *given, **how)

    monkeypatch.setattr(kernels.measure, "choose_kernels", failing)
    cases = [TOY, Case("next", ((1, 32, 48), (2, 40, 56)))]
    bench, rows = bench_of(), Rows(None, CPU)
    bench.tune(rows, cases, 1e4)
    assert [bool(row.get("failure")) for row in rows.rows] == [True, False, False]
    assert {key[:2] for key in bench.kernels} == {(24, 40), (32, 48), (40, 56)}
    # Compiling and checking count: nothing is begun that would end too late.
    late, rows = bench_of(tune_pace=(1e3, 1.0)), Rows(None, CPU)
    late.tune(rows, cases, 100.0)
    assert not rows.rows and late.kernels.keys() == bench.kernels.keys()


def test_long_calls_are_left_out_with_the_reason():
    bench, case = bench_of(), SETS["sweep"][-1]
    assert kernels.skip_reason(bench, case, "standard") == ""
    bench.pace["standard"] = 10 / field_of.standard_flops(case)
    assert "about 10 s" in kernels.skip_reason(bench, case, "standard")
    assert kernels.skip_reason(bench, case, "compiled") == "no compiler"


# ---- verdicts and the command ------------------------------------------------------------


def document(ratio: float | None, dtype: str, emulated: bool, baseline: str) -> dict[str, Any]:
    contender = "function" if baseline == "standard_function" else "ours"
    row = {"set": "sweep", "case": "1024 x 4096", "dtype": dtype, "threads": 1,
           "contender": contender, f"ratio_to_{baseline}": ratio}  # fmt: skip
    return {"machine": {"device": "cpu", "bf16_emulated": emulated}, "rows": [row]}


@pytest.mark.parametrize(
    ("ratio", "dtype", "emulated", "baseline", "expected"),
    [
        (0.60, "bfloat16", False, "standard", ["kept", "kept"]),
        (0.63, "bfloat16", False, "standard", ["missed", "kept"]),
        (1.04, "bfloat16", False, "standard", ["missed", "missed"]),
        (1.04, "float32", False, "standard", ["shown", "shown"]),
        (1.04, "float32", True, "standard", ["missed", "missed"]),
        (0.03, "bfloat16", True, "standard", ["emulated", "emulated"]),
        (None, "bfloat16", True, "standard", ["emulated", "emulated"]),
        (1.00, "bfloat16", False, "standard_function", ["kept"]),
        (1.04, "bfloat16", False, "standard_function", ["missed"]),
    ],
)
def test_what_counts_as_missed(
    tmp_path, monkeypatch, capsys, ratio, dtype, emulated, baseline, expected
):
    found = document(ratio, dtype, emulated, baseline)
    assert [verdict for *_, verdict in kernels.verdicts(found)] == expected
    monkeypatch.setattr(kernels, "page", lambda found: "")
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(found))
    missed = expected.count("missed")
    assert kernels.main(["--table", "--check", "--json", str(path)]) == int(missed > 0)
    assert capsys.readouterr().out.count(f"x {baseline}, must be <= ") == missed


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
    for row in measured:
        assert row["error"] < 1e-3 and row["median_ms"] > 0 and row["ratio_to_floor"] > 0
        assert row["ratio_to_standard_function"] > 0 and row["p25_ms"] <= row["p75_ms"]
    assert {"date", "versions", "machine"} <= found.keys()
    assert kernels.main(["--table", "--json", str(path)]) == 0
    assert kernels.page(found) in printed and kernels.page(found) in capsys.readouterr().out
