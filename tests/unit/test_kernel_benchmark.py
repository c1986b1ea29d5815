"""The kernel benchmark: what it counts, how it judges, and that it goes on after a failure."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import Case, Contender, Piece

CPU, F32 = torch.device("cpu"), torch.float32
MIXED = Case("mixed", ((5, 48, 96), (2, 96, 48), (1, 48, 48), (3, 20, 30)))


def test_flops():
    square, wide = Case("a", ((1, 64, 64),)), Case("b", ((3, 256, 64),))  # tall counts as wide
    assert kernels.standard_flops(square) == 30 * 64**3
    assert kernels.standard_flops(wide) == 3 * 90 * 64**3
    assert kernels.floor_flops(square, torch.float16) == 20 * 64**3
    assert kernels.floor_flops(wide, torch.float16) == 3 * (6 * 4 + 14) * 64**3
    assert kernels.floor_flops(wide, torch.bfloat16) == 3 * (9 * 4 + 11) * 64**3


@torch.no_grad()
def test_all_contenders_compute_the_same():
    sources = MIXED.sources(CPU)
    references = kernels.references_of(sources, F32)
    chosen: Any = defaultdict(lambda: "gram[2]/torch_strips/float32")
    found = kernels.contenders(sources, F32, chosen, compiles=False, others=False)
    assert list(found) == ["standard", "gram", "standard_function", "function", "ours"]
    found["small batches"] = partial(kernels.ours, sources, F32, chosen.__getitem__, 2)
    for name, build in found.items():
        contender = build()
        pieces = contender.pieces
        assert [piece.stack for piece in pieces if piece.stack is not None] == [0, 1, 2, 3], name
        assert len(pieces) == (3 + 1 + 1 + 2 if name == "small batches" else 4)
        for _ in range(2):  # the second time on operands written anew
            assert kernels.error_of(contender, references) < 1e-4, name
        wrong = Piece(pieces[0].refill, lambda run=pieces[0].run: run() * 1.01, 0)
        broken = Contender((wrong, *pieces[1:]))
        assert kernels.error_of(broken, references) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(("ratio", "dtype", "emulated", "missed"), [
    (0.60, "bfloat16", False, 0),
    (0.63, "bfloat16", False, 1),
    (1.04, "float32", True, 2),
    (1.04, "bfloat16", True, 0),
    (None, "bfloat16", False, 0),
])  # fmt: skip
def test_what_counts_as_missed(tmp_path, capsys, ratio, dtype, emulated, missed):
    row = {"case": "1024 x 4096", "dtype": dtype, "threads": 1, "contender": "ours"}
    row |= {"failure": "too slow"} if ratio is None else {"ratio_to_standard": ratio}
    row |= {"median_ms": 1.0, "p25_ms": 1.0, "p75_ms": 1.0} if ratio else {}
    machine = {"device": "cpu", "cpu": "", "cpu_capability": "", "bf16_emulated": emulated}
    found = {"machine": machine, "versions": {}, "date": "", "left_out": [], "rows": [row]}
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(found))
    assert kernels.main(["--table", "--check", "--json", str(path)]) == int(missed > 0)
    assert capsys.readouterr().out.count("x standard, must be <= ") == missed


def test_one_run_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "new" / "kernels.json"
    quick = ["--sets", "toy", "--dtype", "float32", "--threads", "1", "--case-s", "0.02"]
    threads = torch.get_num_threads()
    try:
        assert kernels.main([*quick, "--tune-s", "0", "--no-compile", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    measured = [row for row in found["rows"] if "median_ms" in row]
    contenders = {"standard", "gram", "standard_function", "function", "ours"}
    assert {row["contender"] for row in measured} == contenders
    assert len(measured) == len(contenders)
    for row in measured:
        assert row["error"] < 1e-3 and row["median_ms"] > 0 and row["ratio_to_floor"] > 0
        assert row["ratio_to_standard_function"] > 0 and row["p25_ms"] <= row["p75_ms"]
    assert {"date", "versions", "machine"} <= found.keys()
    assert kernels.main(["--table", "--json", str(path)]) == 0
    assert kernels.page(found) in printed and kernels.page(found) in capsys.readouterr().out
