"""The benchmark of whole trainings on nodes: who takes part trains alike, and its means."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import dmuon.api
from benchmarks import end_to_end
from benchmarks.demo import GPTConfig
from benchmarks.end_to_end import REPLICATED, SHARDED, Case, in_the_long_run, work
from benchmarks.nodes import Nodes, emulated, why_not
from benchmarks.results import Row
from dmuon.devices import Cpu
from tests.fixed_costs import analytic_costs, fixed_products

REASON = why_not()
TINY = GPTConfig(width=32, heads=2, hidden=64, depth=1, context=32)
CASES = (
    Case(2, 1, "1gbit", "FSDP2", 64, SHARDED, 2, TINY),
    Case(2, 1, "1gbit", "DDP", 64, REPLICATED, 2, TINY),
)


def in_turn(rank: int, nodes: Nodes) -> list[Row]:
    """`work` of all cases, whose plans need no measured costs. Rates, and so the differences that
    other hyperparameters would make, are large."""
    dmuon.api.measured_costs = analytic_costs  # type: ignore[assignment]
    end_to_end.MUON |= {"lr": 0.02, "weight_decay": 1.0}
    text = end_to_end.demo.load_standard_library()
    with (
        fixed_products(),
        mock.patch.object(Cpu, "ns_dtype", lambda _: torch.float32),
        mock.patch.object(end_to_end.demo, "load_standard_library", lambda: text),
    ):
        return [row for case in CASES for row in work(rank, nodes, case, 2)]


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    with emulated(2, "1gbit") as nodes:
        return nodes.on_ranks(1, in_turn, nodes)


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize("case", CASES, ids=[case.around for case in CASES])
def test_all_that_are_muon_train_alike(case: Case, measured: list[Row]) -> None:
    rows = {row["optimizer"]: row for row in measured if row["set"] == case.name}
    assert set(case.contenders) <= set(rows)
    ours = rows["dmuon"]["loss"]
    assert 0 < ours < math.log(256)
    for name, row in rows.items():
        assert row["link_bytes"] > 0 and row["step_ms"] < row["mean_ms"], name
        if "P=" not in name and name != "AdamW":  # torch's has Newton-Schulz in bfloat16
            near = 2e-3 if name == "torch.optim.Muon" else 1e-5
            assert row["loss"] == pytest.approx(ours, rel=near), name
    assert abs(rows["AdamW"]["loss"] - ours) > 3e-3 * ours
    if case.around == "FSDP2":
        # Half of each matrix goes to its owner, and as much comes back; in two bytes an element
        # where the CPU has bfloat16.
        elements = TINY.depth * (4 * 32 * 32 + 3 * 32 * 64)
        more = rows["dmuon"]["link_bytes"] - rows["dmuon P=inf"]["link_bytes"]
        assert 0.8 * elements < more < 3 * elements


def test_means_with_a_period_mix_full_and_block_steps() -> None:
    # Steps 1 to 6 of P = 5: the fifth is full.
    block = [1.0] * 4
    values = {"dmuon": [10.0, 10.0], "dmuon P=5": [*block, 10.0, 1.0], "dmuon P=inf": [1.0]}
    assert in_the_long_run("dmuon", values) == 10.0
    assert in_the_long_run("dmuon P=5", values) == pytest.approx((10 + 4 * 1) / 5)
    assert in_the_long_run("dmuon P=20", values) == pytest.approx((10 + 19 * 1) / 20)
    assert in_the_long_run("dmuon P=inf", values) == 1.0
    values["dmuon P=5"][4] = 1.0  # a full step that costs what a block step does
    assert in_the_long_run("dmuon P=2", values) == pytest.approx((10 + 1) / 2)
