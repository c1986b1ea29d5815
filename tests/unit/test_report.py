"""The load-balance report: its numbers, `str()`, `to_dict()` and the page.

`python -m tests.unit.test_report` writes the golden report anew; review the difference.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import dmuon
from dmuon.report import data as report_module
from dmuon.report.data import LoadBalanceReport
from dmuon.report.render import fold_names
from dmuon.scheduler.certificate import Certificate
from dmuon.scheduler.plan import Batch, OwnershipPlan, PriceRow, Search
from dmuon.scheduler.select import collect
from dmuon.scheduler.specs import ModelSpecs, OwnerLimits, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, Layout
from tests.unit.models import Mixed, TinyGPT, plan_of, specs_of

GOLDEN = Path(__file__).parent / "golden" / "report.txt"
WIDE, SQUARE = (4, 6, "float32"), (8, 8, "bfloat16")


def report_of(owners: list[int], world: int, ms: list[float], bound: float) -> LoadBalanceReport:
    keys = [WIDE, SQUARE, WIDE][: len(owners)]
    plan = plan_of(specs_of(keys, rest=2), owners, world)
    batches = tuple(replace(b, ms=t) for b, t in zip(plan.batches, ms))
    return LoadBalanceReport(replace(plan, batches=batches, lower_bound_ms=bound))


def told(report: LoadBalanceReport) -> str:
    """The text on one line."""
    return " ".join(str(report).split())


def priced(specs: ModelSpecs, price: dict[tuple[int, int, str], list[float]], **fields):
    """A plan with these prices: ``price`` maps a shape to the ms of batches of 1, 2, ...

    ``owners`` gives the owner of each matrix; an owner's matrices of a shape are one batch.
    """
    owners, world = fields.pop("owners"), fields.pop("world")
    price = {(min(r, c), max(r, c), dtype): ms for (r, c, dtype), ms in price.items()}
    groups = defaultdict(list)
    for i, matrix in enumerate(specs.matrices):
        groups[owners[i], matrix.key].append(i)
    batches = tuple(Batch(o, tuple(m), price[k][len(m) - 1]) for (o, k), m in groups.items())
    prices = tuple(PriceRow(k, tuple(ms), ("measured",) * len(ms)) for k, ms in price.items())
    plan = plan_of(specs, owners, world)
    return replace(plan, batches=batches, prices=prices, **fields)


def taking_turns(model: nn.Module, world: int, **fields) -> OwnershipPlan:
    """A plan that no solver made: ranks in turn, a batch for each rank and shape."""
    pieces = {k: getattr(model, k) for k in ("splits", "heads") if hasattr(model, k)}
    specs = collect(model, **pieces)
    owners = [i % world for i in range(len(specs.matrices))]
    price = {
        m.key: [0.1 * m.rows + 0.01 * m.cols * b for b in range(1, 100)] for m in specs.matrices
    }
    fields.setdefault("lower_bound_ms", 0.5)
    return priced(specs, price, owners=owners, world=world, **fields)


# ---- numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owners", "world", "ms", "bound", "makespan", "gap", "imbalance", "idle"),
    [
        ([0, 1, 0], 2, [1.0, 2.0, 3.0], 3.2, 4.0, 0.25, 1 / 3, ()),
        ([0, 1], 2, [2.0, 2.0], 2.0, 2.0, 0.0, 0.0, ()),
        ([0], 4, [2.0], 2.0, 2.0, 0.0, 3.0, (1, 2, 3)),  # idle ranks count in the mean
    ],
)
def test_makespan_bound_gap_and_imbalance(owners, world, ms, bound, makespan, gap, imbalance, idle):
    report = report_of(owners, world, ms, bound)
    assert (report.makespan_ms, report.lower_bound_ms) == (makespan, bound)
    assert (report.gap, report.imbalance) == pytest.approx((gap, imbalance))
    assert report.idle == idle


def test_costs_of_zero_divide_nothing():
    report = report_of([0, 1], 2, [0.0, 0.0], bound=0.0)
    assert (report.gap, report.imbalance) == (0.0, 0.0)
    for times in (None, (1.0, 1.0), (0.0, 0.0)):
        found = LoadBalanceReport(report.plan, times)
        assert str(found)
        assert times is None or (found.measured.ratio, found.measured.ratios[0]) == (None, None)


def test_a_model_without_matrices_has_a_report():
    plan = replace(plan_of(specs_of([], rest=1), [], 3), lower_bound_ms=0.0)
    report = LoadBalanceReport(plan, (0.0, 0.0, 0.0))
    assert report.bottleneck is report.to_dict()["bottleneck"] is None
    assert ", 0 matrices\nmesh 3 (dp): 3 ranks on 1 node of cpu" in str(report)


def test_predicted_state_is_what_the_optimizer_allocates():
    model = Mixed()
    own = dmuon.dedicate_params(model, splits=Mixed.splits, heads=Mixed.heads, costs="analytic")
    opt = dmuon.Muon(model)
    model(torch.randn(2, 8)).square().mean().backward()
    opt.step()
    kept = [value for s in opt.state.values() for name, value in s.items() if name != "step"]
    tensors = [t for k in kept for t in (k.values() if isinstance(k, dict) else [k])]
    assert own.report().ranks[0].state_bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_fixed_bytes_are_part_of_a_rank():
    limits = OwnerLimits(fixed_bytes=(10, 20), memory_bytes=5000)
    plan = priced(specs_of([WIDE] * 2), {WIDE: [1.0, 1.8]}, owners=[1, 1], world=2, limits=limits)
    report = LoadBalanceReport(plan)
    assert [r.state_bytes for r in report.ranks] == [10, 20 + 2 * 96]
    told = {"min": 10, "mean": 111.0, "max": 212, "cap": 5000, "fullest_rank": {}}
    assert report.to_dict()["memory"] == told
    assert "cap 4.9 KiB" in str(report)


def test_the_shapes_say_how_matrices_are_batched_and_priced():
    specs = specs_of([WIDE, WIDE, WIDE, SQUARE, WIDE])
    plan = priced(specs, {WIDE: [1.0, 1.5, 1.8], SQUARE: [7.0]}, owners=[0, 0, 0, 1, 1], world=2)
    origins = {WIDE: ("measured", "interpolated", "estimated"), SQUARE: ("measured",)}
    plan = replace(plan, prices=tuple(replace(p, origin=origins[p.key]) for p in plan.prices))
    square, wide = LoadBalanceReport(plan).shapes
    assert (square.rows, square.cols, square.dtype, square.count) == (8, 8, "bfloat16", 1)
    assert (wide.count, wide.batches, wide.single_ms) == (4, ((3, 1), (1, 1)), 1.0)
    assert (wide.total_ms, wide.each_ms) == pytest.approx((2.8, 0.7))
    assert wide.origins == ("estimated", "measured"), "those of the batches that there are"
    text = str(LoadBalanceReport(plan))
    assert re.search(r"^4 x 6 +float32 +4 +3, 1 +0\.700 +2\.800 +1\.000 +estimated", text, re.M)
    unpriced = LoadBalanceReport(replace(plan, prices=())).shapes
    assert all(s.single_ms is None and s.origins == () for s in unpriced)


def measured_plan(bound: float = 4.0, **fields) -> OwnershipPlan:
    """Rank 0 has a matrix for 4 ms, rank 1 four for 1 ms each."""
    price = {SQUARE: [4.0], WIDE: [1.0, 2.0, 3.0, 4.0]}
    specs = specs_of([SQUARE, WIDE, WIDE, WIDE, WIDE])
    return priced(specs, price, owners=[0, 1, 1, 1, 1], world=2, lower_bound_ms=bound, **fields)


def test_measured_times_are_compared_with_predicted_ones():
    report = LoadBalanceReport(measured_plan(), (2.0, 6.0))
    measured = report.measured
    assert (measured.ratios, measured.ratio) == ((0.5, 1.5), 1.0)
    assert (measured.makespan_ms, measured.busiest) == (6.0, 1)
    assert measured.imbalance == pytest.approx(0.5)
    text = told(report)
    assert "makespan 6.000 ms on rank 1, imbalance 50.00%, 1.00 x predicted" in text
    assert re.search(r" 1 4 4\.000 0\.00% 384 B 6\.000 1\.50 ", text)
    assert LoadBalanceReport(measured_plan()).measured is None
    assert "measured ms" not in str(LoadBalanceReport(measured_plan()))


@pytest.mark.parametrize(("certificate", "shown"), [
    (Certificate(True, True, 4.0, 4.0), "certificate valid"),
    (Certificate(True, False, 4.0, 4.0, ("no proof",)), "ms (not proven)"),
    (Certificate(False, False, 4.0, 3.0, ("it lies", "twice")), "INVALID: it lies; twice"),
])  # fmt: skip
def test_the_report_shows_the_verdict_of_the_certificate(monkeypatch, certificate, shown):
    monkeypatch.setattr(report_module, "_certified", lambda plan: certificate)
    report = LoadBalanceReport(measured_plan())
    assert shown in told(report)
    found = report.to_dict()["certificate"]
    assert (found["ok"], found["verdict"]) == (certificate.ok, str(certificate))


# ---- text and dict -----------------------------------------------------------------------


def test_the_dict_has_the_documented_keys_and_the_same_numbers():
    found = Search(engine="HiGHS", note="a note", hit_time_limit=True)
    plan = measured_plan(search=found)
    report = LoadBalanceReport(plan, (2.0, 6.0))
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data.keys() == {
        "owners", "solver", "makespan_ms", "lower_bound_ms", "gap", "imbalance", "status",
        "seconds", "ranks", "parameters", "layout", "costs", "fingerprint", "alternatives_ms",
        "engine", "note", "hit_time_limit", "shapes", "memory", "idle", "bottleneck", "certificate",
        "step",
        "measured", "kernels", "model",
        "source", "mesh", "nodes", "device", "groups",
    }  # fmt: skip
    assert data["owners"] == 2
    assert (data["engine"], data["note"], data["hit_time_limit"]) == ("HiGHS", "a note", True)
    for name in ("makespan_ms", "lower_bound_ms", "gap", "imbalance"):
        assert data[name] == getattr(report, name)
    assert [r["rank"] for r in data["ranks"]] == [0, 1]
    assert all(r.keys() == {"rank", "matrices", "ms", "state_bytes"} for r in data["ranks"])
    assert max(r["ms"] for r in data["ranks"]) == data["makespan_ms"]
    assert data["fingerprint"] == plan.fingerprint()
    assert sum(s["count"] for s in data["shapes"]) == len(plan.specs.matrices)
    assert [p["name"] for p in data["parameters"]] == [p.name for p in plan.specs.parameters]
    assert data["kernels"] == [{"kernel": "", "batches": 2, "matrices": 5}]
    expected = {
        "loads_ms": [2.0, 6.0], "ratios": [0.5, 1.5], "ratio": 1.0, "makespan_ms": 6.0,
        "busiest": 1, "imbalance": 0.5, "straggles_ms": 0.0,
    }  # fmt: skip
    assert data["measured"] == expected
    assert LoadBalanceReport(plan).to_dict()["measured"] is None


def test_one_process_gets_three_lines_and_its_routes(tmp_path):
    plan = taking_turns(TinyGPT(), 1)
    report = LoadBalanceReport(plan, tuple(2 * ms for ms in plan.loads_ms))
    text = str(report)
    labels = [line.split()[0] for line in text.split("\n\n")[1].splitlines() if line[0] != " "]
    assert labels == ["work", "memory", "parameters"]
    assert "certificate" not in text and "Ranks" not in text and "\nParameters\n" in text
    assert f"{report.makespan_ms:.3f} ms a step" in text and ", measured " in text
    assert "<svg" not in page(report, tmp_path)


def test_model_mesh_device_and_groups_are_named():
    model = TinyGPT()
    hyper = {"lr": 0.03, "adamw_lr": 0.004, "weight_decay": 0.25}
    opt = dmuon.Muon(model, **hyper, dedicate={"costs": "analytic"})
    found = opt.report()
    assert str(found).startswith("TinyGPT: ")
    assert (found.to_dict()["device"], found.to_dict()["mesh"]) == ("cpu", {"dp": 1})
    groups = found.to_dict()["groups"]
    assert [(g["group"], g["algorithm"]) for g in groups] == [(0, "muon"), (0, "adamw")]
    assert [g["lr"] for g in groups] == pytest.approx([0.03, 0.004])
    assert {g["weight_decay"] for g in groups} == {0.25}
    assert "group 0 by muon: lr 0.03, weight decay 0.25; group 0 by adamw: lr 0.004" in told(found)


def test_names_that_are_alike_are_folded():
    grid = [f"h.{i}.e.{j}.w" for i in range(3) for j in range(2)]
    assert fold_names(grid) == [("h.{0..2}.e.{0,1}.w", 6)]
    # No pattern names what is not there.
    assert fold_names([*grid, "h.9.e.7.w"]) == [("h.{0..2}.e.{0,1}.w", 6), ("h.9.e.7.w", 1)]
    assert fold_names(["a.3.x2", "a.5.x2", "a.6.x2", "b"]) == [("a.{3,5,6}.x2", 3), ("b", 1)]
    ((long, count),) = fold_names(f"e.{2 * i}" for i in range(99))
    assert (count, len(long) < 40, long.endswith(",...}")) == (99, True, True)


def test_brackets_in_names_are_no_markup():
    model = nn.ModuleDict({"[bold]": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 4)})
    assert "[bold].weight" in str(LoadBalanceReport(taking_turns(model, 4)))


def test_the_report_of_an_ownership_is_that_of_its_plan():
    model = TinyGPT()
    own = dmuon.dedicate_params(model, costs="analytic")
    assert own.report() == LoadBalanceReport(own.plan, model="TinyGPT")
    assert replace(dmuon.Muon(model).report(), groups=()) == own.report()


# ---- the page ----------------------------------------------------------------------------


def page(report: LoadBalanceReport, folder: Path) -> str:
    report.to_html(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def loads_report(loads: list[float], per_node: int | None) -> LoadBalanceReport:
    """One matrix per rank that costs the rank's load, measured as it was predicted."""
    topology = Topology.flat(len(loads), ranks_per_node=per_node)
    plan = plan_of(specs_of([WIDE] * len(loads)), range(len(loads)), len(loads))
    batches = tuple(replace(b, ms=loads[b.owner]) for b in plan.batches)
    plan = replace(plan, topology=topology, batches=batches, lower_bound_ms=1.0)
    return LoadBalanceReport(plan, tuple(loads))


def parsed(text: str) -> ElementTree.Element:
    """Every tag is closed in order, but for those that HTML leaves open."""
    return ElementTree.fromstring(re.sub(r"<!doctype html>|<meta[^>]*>", "", text))


@pytest.mark.parametrize(("world", "per_node"), [(2, None), (6, 4), (4096, 8)])
def test_the_page_is_well_formed_self_contained_and_small(tmp_path, world, per_node):
    loads = [1.0 + rank % 7 / 100 for rank in range(world)]
    text = page(loads_report(loads, per_node), tmp_path)
    tags = {element.tag for element in parsed(text).iter()}
    attributes = {name for element in parsed(text).iter() for name in element.attrib}
    assert text.startswith("<!doctype html>") and len(text.encode()) < 100_000
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert attributes.isdisjoint({"src", "href", "xlink:href", "onload", "onclick"})
    assert not re.search(r"https?:|url\(|@import|javascript:|nan%", text)
    pictures = [*parsed(text).iter("svg")]
    assert len(pictures) == 2 and all(1 <= len(svg.findall("g")) <= 64 for svg in pictures)
    for rect in (rect for svg in pictures for rect in svg.findall("g/rect")):
        x, width = (float(rect.get(name).rstrip("%")) for name in ("x", "width"))
        assert x >= 0 <= width and x + width <= 100.5


def test_the_page_holds_what_the_text_holds(tmp_path):
    """Names and notes are escaped."""
    evil = ParameterSpec("<script>", (2,), "float32", Algorithm.FROZEN, "<script>")
    plan = measured_plan(search=Search(note="<b>note</b> & more"))
    plan = replace(plan, specs=replace(plan.specs, frozen=(evil,)))
    slow = page(LoadBalanceReport(plan, (2.0, 6.0)), tmp_path)
    assert not [*parsed(slow).iter("script")] and slow.count("&lt;script&gt;") == 2
    assert "&lt;b&gt;note&lt;/b&gt; &amp; more" in slow
    assert slow.count("<tr>") == 1 + 2 + 1 + 2 + 1 + 6, "ranks, shapes, parameters"
    assert "m0.weight, 4.000 ms" in slow


def test_the_page_shows_the_work_of_each_rank_and_each_owner_at_its_place(tmp_path):
    plan = taking_turns(TinyGPT(), 3)
    alone = (replace(b, matrices=(m,), ms=1.0 + m) for b in plan.batches for m in b.matrices)
    plan = replace(plan, batches=tuple(alone))  # several of a shape
    loads, owners = parsed(page(LoadBalanceReport(plan), tmp_path)).iter("svg")
    bars = [
        sum(float(rect.get("width").rstrip("%")) for rect in bar.findall("rect"))
        for bar in loads.findall("g")
    ]
    expected = [ms * max(bars) / plan.makespan_ms for ms in plan.loads_ms]
    assert bars == pytest.approx(expected, abs=0.1)
    found = {}
    for row in owners.findall("g"):
        name, rects = row.find("title").text.partition(":")[0], row.findall("rect")
        for i, (rect, text) in enumerate(zip(rects, row.findall("text")[1:])):
            found[name.replace("*", str(i))] = int(text.text)
            assert rect.get("class") == f"c{text.text}"
    assert found == dict(zip((m.name for m in plan.specs.matrices), plan.owners))


def golden_report() -> str:
    """A small plan with measured times, and one on more ranks than matrices, both made by hand, so
    that the report changes only when the report does."""
    model = Mixed()
    model.blocks[1].requires_grad_(False)
    told = {
        "solver": "milp", "status": "feasible", "cost_source": "made up",
        "search": Search(engine="HiGHS"), "layout": Layout.REDUCED,
        "limits": OwnerLimits(memory_bytes=1 << 20),
    }  # fmt: skip
    other = Search((("greedy", 2.4), ("round_robin", 3.0)), engine="HiGHS")
    small = taking_turns(model, 4, **told | {"lower_bound_ms": 2.2, "search": other})
    small = replace(small, topology=Topology.flat(4, ranks_per_node=2))
    large = replace(taking_turns(model, 24, **told), topology=Topology.flat(24, ranks_per_node=8))
    reports = [LoadBalanceReport(small, (2.5, 2.0, 4.5, 2.6)), LoadBalanceReport(large)]
    return f"\n\n{'-' * 100}\n\n".join(map(str, reports)) + "\n"


def test_the_report_reads_as_the_golden_one():
    assert golden_report() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden_report(), encoding="utf-8")
