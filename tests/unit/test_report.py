"""The load-balance report: its numbers, `str()` and `to_dict()`; `test_report_html` has the page.

`python -m tests.unit.test_report` writes the golden report anew; review the difference.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

import dmuon
from dmuon.report import balance as balance_module
from dmuon.report.balance import launch_owners
from dmuon.report.report import LoadBalanceReport, build_report
from dmuon.report.words import bytes_text, ms_text
from dmuon.scheduler.certificate import Certificate
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.placement import contention, row_major
from dmuon.scheduler.plan import Batch, OwnershipPlan, PriceRow, solve
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout
from tests.unit.models import Mixed, TinyGPT, plan_of, specs_of, tree

GOLDEN = Path(__file__).parent / "golden" / "report.txt"
WIDE, SQUARE = (4, 6, "float32"), (8, 8, "bfloat16")


def report_of(owners: list[int], world: int, ms: list[float], bound: float) -> LoadBalanceReport:
    keys = [WIDE, SQUARE, WIDE][: len(owners)]
    plan = plan_of(specs_of(keys, rest=2), owners, world)
    batches = tuple(replace(b, ms=t) for b, t in zip(plan.batches, ms))
    return build_report(replace(plan, batches=batches, lower_bound_ms=bound))


def priced(specs: ModelSpecs, price: dict[tuple[int, int, str], list[float]], **fields):
    """A plan with these prices: ``price`` maps a shape to the ms of batches of 1, 2, ...

    ``owners`` gives the owner of each matrix; an owner's matrices of a shape are one batch.
    """
    owners, world = fields.pop("owners"), fields.pop("world")
    groups = defaultdict(list)
    for i, matrix in enumerate(specs.matrices):
        groups[owners[i], matrix.key].append(i)
    batches = tuple(Batch(o, tuple(m), price[k][len(m) - 1]) for (o, k), m in groups.items())
    prices = tuple(PriceRow(k, tuple(ms), ("measured",) * len(ms)) for k, ms in price.items())
    plan = plan_of(specs, owners, world)
    return replace(plan, batches=batches, prices=prices, **fields)


def taking_turns(model: nn.Module, world: int, **options) -> OwnershipPlan:
    """A plan that no solver made: ranks in turn, a batch for each rank and shape."""
    specs = collect(model, **options)
    owners = [i % world for i in range(len(specs.matrices))]
    price = {
        m.key: [0.1 * m.rows + 0.01 * m.cols * b for b in range(1, 100)] for m in specs.matrices
    }
    return priced(specs, price, owners=owners, world=world, lower_bound_ms=0.5)


# ---- numbers -----------------------------------------------------------------------------


def test_makespan_bound_gap_and_imbalance():
    report = report_of([0, 1, 0], 2, [1.0, 2.0, 3.0], bound=3.2)
    assert report.makespan_ms == 4.0
    assert report.lower_bound_ms == 3.2
    assert report.gap == pytest.approx(0.25)
    assert report.imbalance == pytest.approx(4.0 / 3.0 - 1)


def test_a_perfect_balance_has_no_gap_and_no_imbalance():
    report = report_of([0, 1], 2, [2.0, 2.0], bound=2.0)
    assert (report.gap, report.imbalance) == (0.0, 0.0)


def test_idle_ranks_count_in_the_mean():
    report = report_of([0], 4, [2.0], bound=2.0)
    assert report.imbalance == pytest.approx(3.0)
    assert report.idle == (1, 2, 3)


def test_costs_of_zero_divide_nothing():
    report = report_of([0, 1], 2, [0.0, 0.0], bound=0.0)
    assert (report.gap, report.imbalance) == (0.0, 0.0)
    str(report)
    measured = build_report(report.plan, [1.0, 1.0]).measured
    assert measured.ratio is None
    assert measured.ratios == (None, None)
    str(build_report(report.plan, [1.0, 1.0]))
    str(build_report(report.plan, [0.0, 0.0]))


def test_a_model_without_matrices_has_a_report():
    specs = ModelSpecs((ParameterSpec("b", (3,), "float32", Algorithm.ADAMW, "1-D"),), ())
    plan = replace(plan_of(specs, [], 3), lower_bound_ms=0.0)
    report = build_report(plan, [0.0, 0.0, 0.0])
    assert report.bottleneck is None
    assert report.to_dict()["bottleneck"] is None
    assert "0 matrices on 3 ranks" in str(report)


def test_state_is_one_momentum_buffer_of_the_parameters_dtype():
    report = report_of([0, 1, 0], 3, [1.0, 1.0, 1.0], bound=1.0)
    assert [r.state_bytes for r in report.ranks] == [2 * 4 * 6 * 4, 8 * 8 * 2, 0]
    assert [r.matrices for r in report.ranks] == [2, 1, 0]
    assert [r.ms for r in report.ranks] == [2.0, 1.0, 0.0]
    assert (report.memory.min, report.memory.max) == (0, 192)
    assert report.memory.mean == pytest.approx(320 / 3)


def test_predicted_state_is_what_the_optimizer_allocates():
    model = Mixed()
    own = dmuon.dedicate_params(model, splits=Mixed.splits, heads=Mixed.heads, costs="analytic")
    opt = dmuon.Muon(model)
    momentum = [s["momentum_buffer"] for s in opt.state.values() if "momentum_buffer" in s]
    tensors = [t for m in momentum for t in (m.values() if isinstance(m, dict) else [m])]
    assert own.report().ranks[0].state_bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_fixed_loads_and_bytes_are_part_of_a_rank():
    specs = specs_of([WIDE, WIDE])
    limits = OwnerLimits(fixed_ms=(3.0, 0.5), fixed_bytes=(10, 20), memory_bytes=5000)
    plan = priced(specs, {WIDE: [1.0, 1.8]}, owners=[1, 1], world=2, limits=limits)
    report = build_report(plan)
    assert [r.ms for r in report.ranks] == [3.0, pytest.approx(2.3)]
    assert [r.state_bytes for r in report.ranks] == [10, 20 + 2 * 96]
    assert report.bottleneck.rank == 1, "the fixed load of a rank is no matrix to split"
    assert report.to_dict()["memory"] == {"min": 10, "mean": 111.0, "max": 212, "cap": 5000}
    assert "cap 4.9 KiB" in str(report)


# ---- shapes ------------------------------------------------------------------------------


def test_the_shapes_say_how_matrices_are_batched_and_priced():
    specs = specs_of([WIDE, WIDE, WIDE, SQUARE, WIDE])
    price = {WIDE: [1.0, 1.5, 1.8], SQUARE: [7.0]}
    plan = priced(specs, price, owners=[0, 0, 0, 1, 1], world=2)
    square, wide = build_report(plan).shapes
    assert (square.rows, square.cols, square.dtype, square.count) == (8, 8, "bfloat16", 1)
    assert (wide.count, wide.batches) == (4, ((3, 1), (1, 1)))
    assert wide.total_ms == pytest.approx(2.8)
    assert wide.each_ms == pytest.approx(0.7)
    assert (wide.single_ms, wide.origins) == (1.0, ("measured",))
    text = str(build_report(plan))
    assert re.search(r"^4 x 6 +float32 +4 +3, 1 +0\.700 +2\.800 +1\.000 +measured", text, re.M)


def test_only_the_origins_of_the_prices_used_are_named():
    plan = priced(specs_of([WIDE, WIDE]), {WIDE: [1.0, 1.5, 1.8]}, owners=[0, 0], world=1)
    row = replace(plan.prices[0], origin=("measured", "interpolated", "estimated"))
    (shape,) = build_report(replace(plan, prices=(row,))).shapes
    assert shape.origins == ("interpolated",)


def test_without_prices_there_is_no_price_of_one_alone():
    report = report_of([0, 1, 0], 2, [1.0, 2.0, 3.0], bound=3.0)
    assert all(s.single_ms is None and s.origins == () for s in report.shapes)
    assert "ms alone" not in str(report)


def test_many_shapes_fold():
    specs = specs_of([(2 + i, 4, "float32") for i in range(30)])
    text = str(build_report(plan_of(specs, [0] * 30, 1)))
    assert "14 more shapes" in text
    assert sum("float32" in line for line in text.splitlines()) == 16


# ---- the bottleneck ----------------------------------------------------------------------


def test_the_bottleneck_is_the_costliest_batch_of_the_busiest_rank():
    report = report_of([0, 1, 0], 2, [1.0, 3.5, 3.0], bound=3.0)
    found = report.bottleneck
    assert (found.rank, found.ms, found.batch_ms) == (0, 4.0, 3.0)
    assert found.matrices == ("m2.weight",)
    assert found.floor is None
    assert "No single matrix is the floor" in " ".join(str(report).split())


def test_the_costliest_matrix_is_the_floor_when_ranks_are_idle():
    tall = (64, 8, "float32")
    plan = priced(specs_of([WIDE, tall]), {WIDE: [1.0], tall: [6.0]}, owners=[0, 1], world=5)
    report = build_report(plan)
    floor = report.bottleneck.floor
    assert (floor.name, floor.rows, floor.cols, floor.count, floor.ms) == (
        "m1.weight", 64, 8, 1, 6.0,
    )  # fmt: skip
    # FLOPs of an m x n matrix with m <= n are as 2 n m^2 + m^3: 8704 for the whole, 4608 a half.
    half = 6.0 * 4608 / 8704
    assert (floor.split.rows, floor.split.cols) == (32, 8)
    assert floor.split.ms == pytest.approx(half)
    assert floor.split.makespan_ms == pytest.approx(half)
    assert floor.split.saves_ms == pytest.approx(6.0 - half)
    text = " ".join(str(report).split())
    assert "3 of 5 ranks own no matrix: 2, 3, 4" in text
    assert f"save about {6.0 - half:.3f} ms of the makespan (47%), but changes the update" in text


def test_a_matrix_alone_on_the_busiest_rank_is_the_floor_without_idle_ranks():
    keys = [SQUARE, WIDE, WIDE]
    price = {SQUARE: [4.0], WIDE: [1.0, 1.5]}
    report = build_report(priced(specs_of(keys), price, owners=[0, 1, 1], world=2))
    assert report.bottleneck.floor.name == "m0.weight"
    # The halves cost 4 * (2*8*16 + 64) / (3*512) = 0.83 each; WIDE is 1, the even share 1.6.
    assert report.bottleneck.floor.split.makespan_ms == pytest.approx(
        (1.5 + 2 * 4 * 320 / 1536) / 2
    )


def test_the_next_floor_limits_what_splitting_saves():
    other = (10, 8, "float32")
    price = {SQUARE: [4.0], other: [3.9]}
    report = build_report(priced(specs_of([SQUARE, other]), price, owners=[0, 1], world=4))
    assert report.bottleneck.floor.split.makespan_ms == 3.9
    assert report.bottleneck.floor.split.saves_ms == pytest.approx(0.1)


def test_a_shape_and_its_transpose_are_one_floor():
    up, down = (32, 8, "float32"), (8, 32, "float32")
    price = {up: [4.0], down: [4.0], WIDE: [0.1]}
    plan = priced(specs_of([up, down, up, WIDE]), price, owners=[0, 1, 2, 3], world=9)
    floor = build_report(plan).bottleneck.floor
    assert (floor.name, floor.count) == ("m0.weight", 3)
    assert floor.split.saves_ms > 1.5, "all three are split"
    assert "(and 2 more that cost as much)" in " ".join(str(build_report(plan)).split())


def test_splitting_saves_nothing_where_a_rank_would_take_both_halves():
    """Three matrices on four ranks: six halves, so some rank has two of them."""
    plan = priced(specs_of([(64, 8, "float32")] * 3), {(64, 8, "float32"): [6.0]},
                  owners=[0, 1, 2], world=4)  # fmt: skip
    assert build_report(plan).bottleneck.floor.split.saves_ms == 0.0
    assert "save about nothing" in str(build_report(plan))


def test_a_single_row_is_not_split():
    row = (1, 8, "float32")
    floor = build_report(
        priced(specs_of([row]), {row: [1.0]}, owners=[0], world=2)
    ).bottleneck.floor
    assert floor.split is None


# ---- measured ----------------------------------------------------------------------------


def measured_plan(bound: float = 4.0, **fields) -> OwnershipPlan:
    """Rank 0 has a matrix for 4 ms, rank 1 four for 1 ms each."""
    price = {SQUARE: [4.0], WIDE: [1.0, 2.0, 3.0, 4.0]}
    specs = specs_of([SQUARE, WIDE, WIDE, WIDE, WIDE])
    return priced(specs, price, owners=[0, 1, 1, 1, 1], world=2, lower_bound_ms=bound, **fields)


def test_nothing_is_measured_at_first():
    report = build_report(measured_plan())
    assert report.measured is None
    assert report.to_dict()["measured"] is None
    assert "measured ms" not in str(report)
    assert "verdict" not in str(report)


def test_measured_times_are_compared_with_predicted_ones():
    measured = build_report(measured_plan(), [2.0, 6.0]).measured
    assert measured.predicted_ms == (4.0, 4.0)
    assert measured.ratios == (0.5, 1.5)
    assert measured.ratio == 1.0
    assert (measured.makespan_ms, measured.busiest) == (6.0, 1)
    assert measured.imbalance == pytest.approx(0.5)
    # Shared out evenly: 4 ms. The 4-ms matrix takes 2, so it is no floor.
    assert measured.best_ms == 4.0
    assert measured.saving_ms == pytest.approx(2.0)
    assert measured.replan
    text = " ".join(str(build_report(measured_plan(), [2.0, 6.0])).split())
    assert "makespan 6.000 ms on rank 1, imbalance 50.00%, 1.00 x predicted" in text
    assert "re-planning would pay: it could save up to 2.000 of 6.000 ms (33%)" in text
    assert 'costs="measured"' in text and "own.close()" in text
    assert re.search(r"1 4 4\.000 6\.000 1\.50 ", text)


@pytest.mark.parametrize(
    ("times", "pays"),
    [
        ([4.0, 4.0], False),
        ([4.0, 4.2], False),  # 0.1 ms, but within 5%
        ([4.0, 8.0], True),
        ([8.0, 4.0], False),  # the matrix is the floor, however slow it is
        ([0.04, 0.08], False),  # not worth a restart
        ([40.0, 80.0], True),
    ],
)
def test_when_re_planning_pays(times, pays):
    report = build_report(measured_plan(), times)
    assert report.measured.replan is pays
    assert ("re-planning would pay" in str(report)) is pays
    assert ("the plan fits" in str(report)) is not pays


def test_an_imbalance_that_no_plan_avoids_is_no_reason():
    """Three equal matrices on two ranks: twice as fast as predicted, and still 2 : 1."""
    plan = priced(specs_of([SQUARE] * 3), {SQUARE: [4.0, 8.0, 12.0]}, owners=[0, 0, 1], world=2,
                  lower_bound_ms=8.0)  # fmt: skip
    measured = build_report(plan, [4.0, 2.0]).measured
    assert measured.imbalance == pytest.approx(1 / 3)
    assert measured.best_ms == 4.0
    assert not measured.replan
    loose = build_report(replace(plan, lower_bound_ms=0.1), [4.0, 2.0])
    assert loose.measured.replan, "without a proven bound it would seem to pay"


def test_a_rank_that_is_slow_in_itself_is_no_reason_but_is_named():
    plan = priced(specs_of([SQUARE] * 8), {SQUARE: [4.0]}, owners=list(range(8)), world=8)
    report = build_report(plan, [4.0] * 7 + [8.0])
    assert not report.measured.replan
    text = " ".join(str(report).split())
    assert "the plan fits" in text
    assert "Rank 7 takes 3.500 ms more than the mean of the ranks that do the same work" in text
    assert "the same work" not in str(build_report(plan, [4.0] * 8))


def test_fixed_loads_count_in_the_measured_balance_but_not_in_the_ratio():
    plan = measured_plan(limits=OwnerLimits(fixed_ms=(10.0, 0.0)))
    measured = build_report(plan, [4.0, 4.0]).measured
    assert measured.ratios == (1.0, 1.0)
    assert measured.loads_ms == (14.0, 4.0)
    assert measured.makespan_ms == 14.0
    assert measured.best_ms == 9.0


def test_a_rank_without_gradients_says_nothing_of_the_speed():
    measured = build_report(measured_plan(bound=4.0), [0.0, 4.0]).measured
    assert measured.ratios == (0.0, 1.0)
    assert measured.best_ms == 4.0
    assert not measured.replan


def test_measured_needs_a_time_for_each_rank():
    with pytest.raises(ValueError, match="3 times for 2 ranks"):
        build_report(measured_plan(), [1.0, 2.0, 3.0])


# ---- contention --------------------------------------------------------------------------


def layered(owners: list[int], topology: Topology) -> OwnershipPlan:
    specs = specs_of([WIDE] * len(owners))
    return replace(plan_of(specs, owners, topology.world), topology=topology)


def test_contention_is_compared_with_ranks_taking_turns():
    topology = Topology.flat(8, ranks_per_node=4)
    order = list(topology.owner_order())
    report = build_report(layered(order * 2, topology))
    assert report.contention.plan == contention(order * 2, topology)
    assert report.contention.row_major == contention(row_major(16, 8), topology)
    assert report.contention.plan.node_max < report.contention.row_major.node_max == 4
    assert report.to_dict()["contention"]["row_major"]["node_max"] == 4
    assert "contention" in str(report)


def test_on_one_node_there_is_no_contention_to_tell():
    report = build_report(layered([0, 1, 2, 3], Topology.flat(4)))
    assert report.contention is None
    assert report.to_dict()["contention"] is None
    assert "contention" not in str(report)


def test_matrices_travel_in_the_order_of_their_layers():
    """`m10` was listed before `m2`, but counts after it."""
    plan = plan_of(specs_of([WIDE] * 12), list(range(12)), 12)
    order = [0, 1, 10, 11, *range(2, 10)]  # as a dictionary sorts names
    matrices = tuple(plan.specs.matrices[i] for i in order)
    shuffled = plan_of(replace(plan.specs, matrices=matrices), order, 12)
    assert launch_owners(shuffled) == list(range(12))


# ---- certificate -------------------------------------------------------------------------


@pytest.fixture
def verdict(monkeypatch):
    """Lets a test choose the verdict; gives the plans that were checked."""
    checked = []

    def choose(certificate):
        def certify(plan):
            checked.append(plan)
            return certificate

        balance_module._certified.cache_clear()
        monkeypatch.setattr(balance_module, "certify", certify)
        return checked

    yield choose
    balance_module._certified.cache_clear()


def test_the_report_shows_the_verdict_of_the_certificate(verdict):
    plan = measured_plan()
    checked = verdict(Certificate(True, True, 4.0, 4.0))
    report = build_report(plan)
    assert checked == [], "only when asked for"
    assert "certificate  valid" in str(report)
    assert "not proven" not in str(report)
    assert report.to_dict()["certificate"]["ok"] is True
    str(build_report(plan, [4.0, 4.0]))
    assert len(checked) == 1, "a plan is checked once"


def test_a_wrong_plan_is_called_invalid(verdict):
    verdict(Certificate(False, False, 4.0, 3.0, ("the plan claims too much", "and more")))
    report = build_report(measured_plan())
    assert "INVALID: the plan claims too much; and more" in str(report)
    found = report.to_dict()["certificate"]
    assert found["ok"] is False
    assert list(found["findings"]) == ["the plan claims too much", "and more"]
    assert found["verdict"] == str(report.certificate)


def test_a_plan_by_hand_has_a_bound_that_is_not_proven():
    text = " ".join(str(report_of([0, 1], 2, [2.0, 2.0], bound=1.0)).split())
    assert "lower bound 1.000 ms (not proven), gap 100.00%" in text
    assert "plan valid, bound not proven: the plan stores no prices" in text


def test_the_bound_of_a_solved_plan_is_proven():
    plan = solve(specs_of([WIDE, SQUARE, WIDE]), Topology.flat(2), CostTable.analytic())
    report = build_report(plan)
    assert report.certificate.proven
    assert "certificate  valid" in str(report)


# ---- to_dict -----------------------------------------------------------------------------


def test_the_dict_has_the_documented_keys_and_the_same_numbers():
    report = build_report(taking_turns(Mixed(), 3, splits=Mixed.splits, heads=Mixed.heads))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    documented = {
        "owners", "solver", "makespan_ms", "lower_bound_ms", "gap", "imbalance", "status",
        "seconds", "ranks", "parameters", "layout", "costs", "fingerprint", "alternatives_ms",
        "engine", "note", "hit_time_limit", "shapes", "memory", "idle", "bottleneck", "certificate",
        "contention", "measured",
    }  # fmt: skip
    assert documented <= data.keys()
    assert data["owners"] == 3
    for name in ("makespan_ms", "lower_bound_ms", "gap", "imbalance"):
        assert data[name] == getattr(report, name)
    assert [r["rank"] for r in data["ranks"]] == [0, 1, 2]
    assert all(r.keys() == {"rank", "matrices", "ms", "state_bytes"} for r in data["ranks"])
    assert max(r["ms"] for r in data["ranks"]) == data["makespan_ms"]
    assert data["fingerprint"] == report.plan.fingerprint()
    assert sum(s["count"] for s in data["shapes"]) == len(report.plan.specs.matrices)


def test_the_dict_with_measured_times_is_json_too():
    plan = replace(measured_plan(), engine="HiGHS", note="a note", hit_time_limit=True)
    data = json.loads(json.dumps(build_report(plan, [2.0, 6.0]).to_dict(), allow_nan=False))
    assert (data["engine"], data["note"], data["hit_time_limit"]) == ("HiGHS", "a note", True)
    assert data["measured"] == {
        "ms": [2.0, 6.0],
        "predicted_ms": [4.0, 4.0],
        "makespan_ms": 6.0,
        "imbalance": 0.5,
        "ratio": 1.0,
        "plannable_ms": 6.0,
        "best_ms": 4.0,
        "saving_ms": 2.0,
        "replan": True,
    }
    assert data["ranks"][0].keys() == {"rank", "matrices", "ms", "state_bytes"}


def test_the_dict_lists_every_parameter_with_its_reason():
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    data = build_report(taking_turns(model, 2)).to_dict()
    listed = {p["name"]: p for p in data["parameters"]}
    assert listed.keys() == {name for name, _ in model.named_parameters()}
    assert all(p["reason"] for p in listed.values())
    assert sum(p["numel"] for p in listed.values()) == sum(p.numel() for p in model.parameters())
    assert listed["blocks.0.up.weight"]["algorithm"] == "frozen"
    assert listed["blocks.1.up.weight"]["algorithm"] == "muon"
    assert listed["lm_head.weight"]["algorithm"] == "adamw"


# ---- str ---------------------------------------------------------------------------------


def shown_ranks(text: str) -> list[int]:
    return [
        int(m) for m in re.findall(r"^ *(\d+) +\d+ +\d+\.\d{3} +.*[\d.]+ [KMG]?i?B", text, re.M)
    ]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("world", [1, 4, 16])
def test_up_to_16_ranks_are_shown_each(world, measured):
    plan = taking_turns(TinyGPT(blocks=4), world)
    text = str(build_report(plan, [1.0] * world if measured else None))
    assert shown_ranks(text) == list(range(world))
    assert "more ranks" not in text
    assert "Load of the ranks" not in text


@pytest.mark.parametrize("world", [17, 1000])
def test_more_ranks_fold_to_the_busiest_and_the_idlest(world):
    report = build_report(taking_turns(TinyGPT(blocks=30), world))
    text = str(report)
    shown = shown_ranks(text)
    assert len(shown) == len(set(shown)) == 10
    assert f"{world - 10} more ranks" in text
    by_load = sorted((r.ms for r in report.ranks), reverse=True)
    assert [report.ranks[r].ms for r in shown] == by_load[:5] + by_load[-5:]
    assert re.search(r"^ *mean +\d+\.\d +\d+\.\d{3}", text, re.M)
    assert len(text.splitlines()) < 60


def test_the_histogram_counts_every_rank_once():
    specs = specs_of([WIDE] * 40)
    plan = plan_of(specs, list(range(40)), 40)
    batches = tuple(replace(b, ms=1.0 + b.owner) for b in plan.batches)
    text = str(build_report(replace(plan, batches=batches)))
    rows = re.findall(r"^ *([\d.]+) - ([\d.]+) +(\d+) +█+$", text, re.M)
    assert [int(n) for _, _, n in rows] == [5] * 8
    assert (float(rows[0][0]), float(rows[-1][1])) == (1.0, 40.0)
    even = str(build_report(plan))
    assert re.search(r"^ *1\.000 +40 +█+$", even, re.M), "equal loads are one bin"


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("world", [1, 4, 16, 17, 1000])
def test_it_fits_a_terminal(world, measured):
    plan = taking_turns(TinyGPT(blocks=4), world)
    text = str(
        build_report(plan, [r.ms * 2 for r in build_report(plan).ranks] if measured else None)
    )
    assert all(len(line) <= 100 for line in text.splitlines())
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text
    assert f"on {world} rank" in text
    assert ("ranks" in text.splitlines()[0]) == (world > 1)


def test_a_console_may_show_it_in_colour():
    console = Console(width=100, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        console.print(build_report(measured_plan()))
    assert "\x1b[" in capture.get()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())
    assert [line.rstrip() for line in plain.rstrip().splitlines()] == str(
        build_report(measured_plan())
    ).splitlines()


def test_what_the_solver_did_is_told():
    plan = replace(
        measured_plan(),
        solver="milp",
        engine="HiGHS",
        status="time_limit",
        hit_time_limit=True,
        note="CBC was asked for but is not installed",
        alternatives=(("greedy", 5.0), ("round_robin", 8.0)),
    )
    text = " ".join(str(build_report(plan)).split())
    assert "MILP (HiGHS): stopped by the time limit, depends on the clock, 0.00 s" in text
    assert "CBC was asked for but is not installed" in text
    assert "greedy 5.000 ms (+25.0%), round robin 8.000 ms (+100.0%)" in text


def test_it_accounts_for_every_parameter_and_element():
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    report = build_report(taking_turns(model, 2))
    rows = re.findall(r"^ *(muon|adamw|frozen) +(\d+) +([\d,]+) +(.+)$", str(report), re.M)
    assert {row[0] for row in rows} == {"muon", "adamw", "frozen"}
    assert sum(int(row[1]) for row in rows) == len(list(model.parameters()))
    elements = sum(int(row[2].replace(",", "")) for row in rows)
    assert elements == sum(p.numel() for p in model.parameters())
    reasons = {p.reason for p in report.plan.specs.parameters}
    assert all(any(reason in row[3] for row in rows) for reason in reasons)


def test_names_with_brackets_survive():
    model = nn.ModuleDict({"[bold]": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 4)})
    model.add_module("a", tree({"w1": (2, 4, 4)}))
    assert "[bold].weight" in str(build_report(taking_turns(model.float(), 64)))


def test_small_times_keep_their_digits():
    assert ms_text(12.3456, 20.0) == "12.346"
    assert ms_text(0.00123456, 0.002) == "0.001235"
    assert ms_text(0.0, 0.0) == "0.000"
    assert [bytes_text(n) for n in (0, 1536, 5 << 30)] == ["0 B", "1.5 KiB", "5.0 GiB"]


def test_the_report_of_an_ownership_is_that_of_its_plan():
    model = TinyGPT()
    own = dmuon.dedicate_params(model, costs="analytic")
    assert own.report() == build_report(own.plan)
    assert dmuon.Muon(model).report() == own.report()


# ---- golden ------------------------------------------------------------------------------


def golden_specs() -> ModelSpecs:
    """Two layers of attention and experts, an embedding, norms, and a frozen tower."""
    parameters, matrices = [], []

    def add(name: str, shape: tuple[int, ...], reason: str, pieces: tuple[str, ...] = ("",)):
        parameters.append(ParameterSpec(name, shape, "bfloat16", Algorithm.MUON, reason))
        rows, cols = (
            (shape[1], shape[2]) if len(shape) == 3 else (shape[0] // len(pieces), shape[1])
        )
        for k, piece in enumerate(pieces):
            place = (len(parameters) - 1, rows, cols, "bfloat16", k * rows * cols)
            matrices.append(MatrixSpec(name + piece, *place))

    for layer in ("layers.0", "layers.1"):
        add(f"{layer}.qkv.weight", (192, 64), "weight, 3 matrices", ("#q", "#k", "#v"))
        add(f"{layer}.experts.w1", (2, 64, 256), "experts, 2 matrices", ("#0", "#1"))
        add(f"{layer}.down.weight", (64, 256), "weight")
    for i in range(2):
        parameters.append(
            ParameterSpec(f"layers.{i}.norm.weight", (64,), "float32", Algorithm.ADAMW, "1-D")
        )
    parameters.append(
        ParameterSpec("tok.weight", (1000, 64), "bfloat16", Algorithm.ADAMW, "embedding")
    )
    frozen = ParameterSpec("tower.weight", (64, 64), "bfloat16", Algorithm.FROZEN, "no gradient")
    return ModelSpecs(tuple(parameters), tuple(matrices), (frozen,))


def golden_plan(topology: Topology, owners: list[int], bound: float) -> OwnershipPlan:
    """A plan by hand, so that the report changes only when the report does."""
    square, wide = (64, 64, "bfloat16"), (64, 256, "bfloat16")
    price = {square: [1.0, 1.5, 2.0, 2.5], wide: [4.0, 7.0, 10.0, 13.0]}
    plan = priced(
        golden_specs(), price, owners=owners, world=topology.world, lower_bound_ms=bound,
        solver="milp", engine="HiGHS", status="feasible", cost_source="made up",
        alternatives=(("greedy", 8.5), ("round_robin", 12.0)),
        limits=OwnerLimits(memory_bytes=1 << 20),
    )  # fmt: skip
    return replace(plan, topology=topology, layout=Layout.REPLICATED)


def golden_report() -> str:
    """A small plan with measured times, and one on more ranks than matrices."""
    owners = [0, 1, 2, 1, 0, 3, 3, 0, 2, 2, 1, 3]
    small = golden_plan(Topology.flat(4, ranks_per_node=2), owners, 7.5)
    large = golden_plan(Topology.flat(24, ranks_per_node=8), list(range(12)), 4.0)
    reports = [build_report(small, [9.5, 8.0, 14.0, 8.5]), build_report(large)]
    return f"\n\n{'-' * 100}\n\n".join(map(str, reports)) + "\n"


def test_the_report_reads_as_the_golden_one():
    assert golden_report() == GOLDEN.read_text(encoding="utf-8")


def test_the_golden_report_notices_a_change():
    plan = taking_turns(TinyGPT(), 2)
    moved = replace(
        plan, batches=tuple(Batch(1 - b.owner, b.matrices, 2 * b.ms) for b in plan.batches)
    )
    assert str(build_report(moved)) != str(build_report(plan))


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden_report(), encoding="utf-8")
