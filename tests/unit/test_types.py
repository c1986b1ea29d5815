"""A user's script under mypy with the flags of ``--strict``: right lines pass, wrong ones fail."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

from dmuon import config, types
from dmuon.api import Dedicate, Request
from dmuon.kernels.choice import BACKENDS
from dmuon.kernels.newton_schulz import COEFFICIENT_SETS

# A line that ends with "# wrong: name" must have an error that names it; no other line one.
SCRIPT = """
# mypy: disallow-untyped-defs, disallow-untyped-calls, disallow-any-generics, warn-return-any
# mypy: no-implicit-reexport, extra-checks, warn-unused-ignores, disallow-subclassing-any
import math

import torch
from torch import nn

import dmuon

model = nn.Linear(4, 4)
opt = dmuon.Muon(model, lr=torch.tensor(0.1), adamw_lr=torch.tensor(0.1), fused=False, foreach=None)
opt = dmuon.Muon(model.parameters(), 1e-3, adjust_lr_fn=0.2, ns_coefficients=(3.0, -4.0, 2.0))
opt = dmuon.Muon(model.named_parameters(), ns_coefficients="quintic", momentum_mode="sgd")
opt = dmuon.Muon([{"params": model.parameters(), "tag": "a"}], period=math.inf, variant="normuon")
opt = dmuon.Muon(model, ns_dtype=torch.float32, momentum_dtype="bfloat16")
opt = dmuon.Muon(model, dedicate={"heads": {"*.qkv.weight": 12}, "solver": "greedy"})
own: dmuon.Ownership = dmuon.dedicate_params(model, layout="dedicated", costs="analytic:H100")
report: dmuon.LoadBalanceReport = opt.report()
planner = dmuon.PlannerOptions(redundancy="auto")
y: torch.Tensor = dmuon.newton_schulz(torch.eye(3), coefficients="simple", dtype="float32")
opt.zero_grad()
dmuon.Muon(model, nonsense=3)  # wrong: nonsense
dmuon.Muon(model, adjust_lr_fn="orig")  # wrong: adjust_lr_fn
dmuon.Muon(model, lr="0.1")  # wrong: lr
dmuon.Muon(model, fused=True)  # wrong: fused
dmuon.Muon(model, maximize=True)  # wrong: maximize
dmuon.Muon(model, ns_coefficients="polar")  # wrong: ns_coefficients
dmuon.Muon(model, momentum_mode="nesterov")  # wrong: momentum_mode
dmuon.Muon(model, ns_dtype="fp16")  # wrong: ns_dtype
dmuon.Muon(model, nonfinite="ignore")  # wrong: nonfinite
dmuon.Muon(model, variant="adamuon")  # wrong: variant
dmuon.Muon(model, momentum_dtype="fp8")  # wrong: momentum_dtype
dmuon.Muon(model, dedicate={"head": {"*.qkv.weight": 12}})  # wrong: dedicate
dmuon.Muon(model, dedicate={"solver": "lp"})  # wrong: dedicate
dmuon.dedicate_params(model, layout="shard")  # wrong: layout
dmuon.dedicate_params(model, solver="lp")  # wrong: solver
dmuon.PlannerOptions(redundancy="all")  # wrong: redundancy
dmuon.KernelOptions(backend="cuda")  # wrong: backend
dmuon.newton_schulz(torch.eye(3), coefficients="polar")  # wrong: coefficients
dmuon.Muonn(model)  # wrong: Muonn
"""


def test_names_in_types_are_those_that_are_taken() -> None:
    assert get_args(types.BackendName) == ("auto", *BACKENDS)
    assert {*get_args(types.CoefficientSet)} == COEFFICIENT_SETS.keys()
    assert types.OthersFlags.__annotations__.keys() == config.FLAGS.keys()
    known = {f.name for f in fields(Request)} - {"ns_dtype"}
    assert Dedicate.__annotations__.keys() == known


def test_mypy_strict_takes_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    script, root = tmp_path / "train.py", Path(__file__).parents[2]
    script.write_text(SCRIPT.lstrip(), encoding="utf-8")
    told = subprocess.run(  # with what `make lint` has found of torch, which takes half a minute
        [sys.executable, "-m", "mypy", script],
        capture_output=True, text=True, check=False, cwd=root, timeout=500,
    )  # fmt: skip
    errors = re.findall(r"train\.py:(\d+): error: (.*)", told.stdout)
    assert errors and not told.stderr, told
    wrong = {}
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(r"# wrong: (\w+)$", line):
            wrong[number] = found[1]
    assert {int(number) for number, _ in errors} == {*wrong}, told.stdout
    for number, text in errors:
        assert wrong[int(number)] in text, (number, text)
