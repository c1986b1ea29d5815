"""The page of the load-balance report: self-contained, well-formed, and right in what it shows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dmuon.report.charts import Mark, step_chart
from dmuon.report.html import page, write_whole
from dmuon.report.pictures import MOST_BARS
from dmuon.report.report import build_report
from dmuon.report.slots import Cell, Grid, slot_map
from dmuon.report.svg import CATEGORIES, axis_ticks, ramp
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import MatrixSpec, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm
from tests.unit.models import plan_of

VOID = {"meta", "br", "link", "img"}


def model_plan(
    world: int, per_node: int | None = None, layers: int = 4, name: str = "layers.{}.{}.weight"
) -> OwnershipPlan:
    """Three matrices a layer; ranks take turns in owner order."""
    parameters, matrices = [], []
    for layer in range(layers):
        for part, rows in (("q", 64), ("up", 256), ("down", 32)):
            full = name.format(layer, part)
            parameters.append(ParameterSpec(full, (rows, 64), "float32", Algorithm.MUON, "weight"))
            matrices.append(MatrixSpec(full, len(parameters) - 1, rows, 64, "float32"))
    topology = Topology.flat(world, ranks_per_node=per_node)
    order = topology.owner_order()
    owners = [order[i % world] for i in range(len(matrices))]
    specs = ModelSpecs(tuple(parameters), tuple(matrices))
    plan = plan_of(specs, owners, world)
    batches = tuple(replace(b, ms=matrices[b.matrices[0]].rows / 100) for b in plan.batches)
    return replace(plan, topology=topology, batches=batches, lower_bound_ms=2.0)


class Checker(HTMLParser):
    """Every tag is closed in order; notes tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open[-3:]}"

    def handle_data(self, data):
        self.text.append(data)


def pictures(text: str) -> list[ElementTree.Element]:
    """Every picture, parsed strictly."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


def section(text: str, heading: str) -> str:
    found = re.search(rf"<section><h2>{re.escape(heading)}</h2>(.*?)</section>", text, re.S)
    assert found, heading
    return found.group(1)


WORLDS = [
    (1, None),
    (4, None),
    (8, 4),
    (6, 4),
    (64, 8),
    (65, 8),
    (300, 100),
    (4096, 8),
    (4096, None),
]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_it_is_well_formed_self_contained_and_small(world, per_node, measured):
    plan = model_plan(world, per_node, layers=max(4, world // 2))
    text = page(build_report(plan, [1.1 * ms for ms in plan.loads_ms] if measured else None))
    checked = Checker(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 2_000_000
    assert {tag for tag, _ in checked.tags}.isdisjoint(
        {"script", "link", "img", "iframe", "object"}
    )
    for _, attributes in checked.tags:
        assert attributes.keys().isdisjoint({"src", "href", "xlink:href", "onload", "onclick"})
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert len(pictures(text)) >= 3
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text).lower().split()


@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_nothing_is_drawn_outside_of_its_picture(world, per_node):
    text = page(build_report(model_plan(world, per_node, layers=max(4, world // 3))))
    for picture in pictures(text):
        _, _, width, height = map(float, picture.get("viewBox").split())
        for rect in picture.iter("rect"):
            x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
            assert w >= 0 and h >= 0
            assert x >= -0.1 and x + w <= width + 0.5, ElementTree.tostring(rect)
            assert y >= -0.1 and y + h <= height + 0.5, ElementTree.tostring(rect)


def test_names_are_escaped():
    evil = "<script>.{}.alert('&')</script>\"{}"
    plan = replace(model_plan(4, layers=2, name=evil), note="<b>note</b> & more")
    frozen = ParameterSpec("<script>", (2,), "float32", Algorithm.FROZEN, "<script>")
    plan = replace(plan, specs=replace(plan.specs, frozen=(frozen,)))
    text = page(build_report(plan))
    checked = Checker(text)
    assert "script" not in {tag for tag, _ in checked.tags}
    assert "&lt;b&gt;note&lt;/b&gt; &amp; more" in text
    assert any(re.search(r"<script>\.\d\.alert\('&'\)</script>\"up", data) for data in checked.text)
    pictures(text)


# ---- load per rank -----------------------------------------------------------------------


def test_bars_are_as_high_as_the_loads():
    plan = model_plan(4)
    (picture,) = pictures(section(page(build_report(plan)), "Load per rank"))
    heights = dict.fromkeys(range(4), 0.0)
    counts = dict.fromkeys(range(4), 0)
    tops: dict[int, float] = {}
    for rect in picture.iter("rect"):
        rank = int(re.match(r"rank (\d+):", rect.find("title").text).group(1))
        heights[rank] += float(rect.get("height"))
        counts[rank] += 1
        bottom = float(rect.get("y")) + float(rect.get("height"))
        assert bottom == pytest.approx(tops.get(rank, bottom), abs=1.0), "one on the other"
        tops[rank] = float(rect.get("y"))
    scale = heights[0] / plan.loads_ms[0]
    for rank, ms in enumerate(plan.loads_ms):
        assert heights[rank] / scale == pytest.approx(ms, rel=0.03)
        assert counts[rank] == sum(b.owner == rank for b in plan.batches)


def test_each_shape_has_its_colour_and_the_fixed_load_another():
    plan = model_plan(4)
    plan = replace(plan, limits=OwnerLimits(fixed_ms=(0.5, 0.0, 0.0, 0.0)))
    text = section(page(build_report(plan)), "Load per rank")
    (picture,) = pictures(text)
    fills = {r.get("fill") for r in picture.iter("rect")}
    assert len(fills) == 4
    assert set(CATEGORIES[:3]) < fills
    assert "fixed load" in text
    assert "256 x 64 float32" in text


def test_the_lower_bound_and_the_mean_are_marked():
    report = build_report(model_plan(4))
    text = section(page(report), "Load per rank")
    assert 'class="bound"' in text and "lower bound 2.000 ms" in text
    assert 'class="mean"' in text and f"mean of the ranks {report.mean_ms:.3f} ms" in text


def test_measured_times_are_dots_on_the_bars():
    plan = model_plan(4)
    text = section(page(build_report(plan, [1.0, 2.0, 3.0, 4.0])), "Load per rank")
    assert text.count('class="dot"') == 4
    assert "rank 2: measured 3.000 ms" in text
    assert 'class="dot"' not in section(page(build_report(plan)), "Load per rank")


def test_many_ranks_are_a_curve():
    plan = model_plan(MOST_BARS + 1, 8)
    text = section(page(build_report(plan, plan.loads_ms)), "Load per rank")
    (picture,) = pictures(text)
    assert not list(picture.iter("rect"))
    assert 'class="measured"' in text


def test_the_curve_passes_through_every_value():
    values = [3.0, 3.0, 2.0, 1.0, 1.0, 0.0]
    text = step_chart(values, [Mark(3.0, "bound", "bound")], unit="ms", axis="rank", label="x")
    path = re.search(r'<path d="M62 256([^"]*)V256z" fill', text).group(1)
    heights = [round(float(y), 1) for y in re.findall(r"V([\d.]+)", path)]
    assert len(heights) == 4, "one step for each run of equal values"
    zero, top = heights[-1], heights[0]
    assert [(zero - y) / (zero - top) for y in heights] == pytest.approx(
        [1, 2 / 3, 1 / 3, 0], abs=1e-3
    )
    assert path.endswith("H984"), "to the right end"
    mark = re.search(r'd="M62 ([\d.]+)L984 [\d.]+" class="bound"', text).group(1)
    assert heights[0] == pytest.approx(float(mark), abs=0.1), "on the scale of the axis"


# ---- slot maps ---------------------------------------------------------------------------


def test_the_load_map_has_a_cell_for_each_rank_at_its_place():
    plan = model_plan(8, 4)
    (_, picture) = pictures(section(page(build_report(plan)), "Slot map: load"))
    cells = {}
    for rect in picture.iter("rect"):
        rank = int(re.match(r"rank (\d+):", rect.find("title").text).group(1))
        cells[rank] = rect
    assert sorted(cells) == list(range(8))
    for rank in range(8):
        same_row = float(cells[rank].get("y")) == float(cells[rank // 4 * 4].get("y"))
        same_column = float(cells[rank].get("x")) == float(cells[rank % 4].get("x"))
        assert same_row and same_column, rank
        assert cells[rank].get("fill") == ramp(plan.loads_ms[rank] / plan.makespan_ms)


def test_the_layer_map_has_a_stripe_for_each_layer_of_a_rank():
    plan = model_plan(3, layers=4)  # rank 0 owns every q, rank 1 every up, rank 2 every down
    (_, picture) = pictures(section(page(build_report(plan)), "Slot map: layers"))
    rects = list(picture.iter("rect"))
    assert [r.get("fill") for r in rects] == [ramp(i / 3) for i in range(4)] * 3
    titles = [t.text for t in picture.iter("title")]
    assert titles[0] == "rank 0: layers.0, layers.1, layers.2, layers.3"


def test_idle_ranks_are_grey_on_the_layer_map():
    text = section(page(build_report(model_plan(16, layers=4))), "Slot map: layers")
    assert text.count("no matrix") == 4


def test_too_many_stripes_become_one_a_rank():
    plan = model_plan(4, layers=3000)
    text = section(page(build_report(plan)), "Slot map: layers")
    (_, picture) = pictures(text)
    assert len(list(picture.iter("rect"))) == 4
    assert "The middle one" in text


def test_a_model_without_layers_has_no_layer_map():
    assert "Slot map: layers" not in page(build_report(model_plan(4, name="part{}{}.weight")))


@pytest.mark.parametrize(
    ("nodes", "columns", "size"),
    [
        (1, 1, (1, 1)),
        (4, 8, (8, 4)),
        (32, 8, (8, 32)),
        (33, 8, (33, 8)),  # a column a node
        (512, 8, (128, 4 * 9 - 1)),
        (1, 4096, (64, 65 - 1)),
        (3, 100, (64, 3 * 3 - 1)),
    ],
)
def test_large_meshes_are_folded_without_collisions(nodes, columns, size):
    grid = Grid(nodes, columns)
    places = {grid.place(n, c) for n in range(nodes) for c in range(columns)}
    assert len(places) == nodes * columns
    assert grid.size == size
    assert (max(x for x, _ in places) + 1, max(y for _, y in places) + 1) == size
    assert grid.caption()


def test_nodes_of_different_sizes():
    topology = Topology.on_nodes((5,), ("dp",), [0, 0, 0, 1, 1])
    picture = slot_map(
        topology.slots(), [Cell((ramp(0.5),), f"rank {r}:") for r in range(5)], label="x"
    )
    assert picture.count("<rect") == 5


# ---- contention --------------------------------------------------------------------------


def test_contention_is_shown_before_and_after():
    report = build_report(model_plan(32, 8, layers=12))
    text = section(page(report), "Contention")
    shown = [float(n) for n in re.findall(r'class="dim">([\d.]+)</text>', text)]
    found = report.contention
    expected = [found.row_major.node_max, found.plan.node_max]
    expected += [found.row_major.node_mean, found.plan.node_mean]
    expected += [found.row_major.column_max, found.plan.column_max]
    expected += [found.row_major.column_mean, found.plan.column_mean]
    assert shown == pytest.approx(expected, abs=0.01)
    before, after = pictures(text)[1:]
    assert [t.text for t in before.iter("text")][1:9] == list("12345678"), "all on node 0"
    rows = {r.get("y") for r in after.iter("rect") if r.get("fill").startswith("#")}
    assert len(rows) == 4, "spread over all nodes"


def test_one_node_has_no_contention():
    assert "Contention" not in page(build_report(model_plan(8)))


# ---- words and tables --------------------------------------------------------------------


def test_the_verdict_on_measured_times_is_shown():
    plan = model_plan(3)
    slow = page(build_report(plan, [10.0, 1.0, 1.0]))
    assert 'class="verdict warn"' in slow
    assert "re-planning would pay" in section(slow, "Measured and predicted")
    best = replace(plan, lower_bound_ms=plan.makespan_ms)
    fits = page(build_report(best, plan.loads_ms))
    assert 'class="verdict"' in fits and "the plan fits" in fits
    assert "Measured and predicted" not in page(build_report(plan))


def test_the_tables_list_shapes_ranks_and_parameters():
    text = page(build_report(model_plan(4)))
    assert section(text, "Shapes").count("<tr>") == 1 + 3
    assert section(text, "Ranks").count("<tr>") == 1 + 4
    assert "weight" in section(text, "Parameters")
    many = page(build_report(model_plan(100)))
    assert section(many, "Ranks: the 10 busiest and the 10 idlest").count("<tr>") == 1 + 20


def test_the_ramp_grows_lighter_evenly():
    def lightness(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    shades = [lightness(ramp(i / 20)) for i in range(21)]
    assert shades == sorted(shades)
    assert (ramp(-1.0), ramp(2.0)) == (ramp(0.0), ramp(1.0))


@pytest.mark.parametrize("top", [1e-6, 0.03, 0.9, 1.0, 7.3, 99.0, 123456.0])
def test_axis_ticks_are_few_round_and_inside(top):
    ticks = axis_ticks(top)
    assert 3 <= len(ticks) <= 11
    assert ticks[0] == 0.0 and 0.5 * top < ticks[-1] <= top
    assert axis_ticks(0.0) == [0.0]


# ---- writing -----------------------------------------------------------------------------


def test_the_file_is_written_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    report = build_report(model_plan(4))
    with path.open() as reader:
        report.to_html(path)
        assert reader.read() == "old", "who reads it sees the old one or the new one"
    assert path.read_text(encoding="utf-8") == page(report)
    report.to_html(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory .*missing does not exist"):
        build_report(model_plan(4)).to_html(tmp_path / "missing" / "report.html")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_same_report_gives_the_same_page():
    assert page(build_report(model_plan(8, 4))) == page(build_report(model_plan(8, 4)))
