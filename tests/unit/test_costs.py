"""Prices: interpolation, estimates, files, the cache on disk, and what ``costs=`` may be."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.scheduler.costs import (
    ANALYTIC_DEVICES,
    ORIGINS,
    AnalyticDevice,
    CacheKey,
    CostTable,
    add_to_cache,
    analytic_class,
    cache_directory,
    nearest_device,
    read_cache,
    resolve_costs,
)
from dmuon.types import PlanError

CPU = ANALYTIC_DEVICES["cpu"]
MODEL = CostTable.analytic("cpu")
A, A_TALL, B = (4, 6, "float32"), (6, 4, "float32"), (64, 64, "bfloat16")
GRAM, STANDARD = "gram[2]/triton-128x64-w4-s3/float16", "standard/torch/float32"

by_batch = st.dictionaries(st.integers(1, 16), st.floats(0.001, 1e6), min_size=1, max_size=6)
shape_keys = st.tuples(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from(["float32", "bfloat16", "float64"])
)


@st.composite
def tables(draw) -> CostTable:
    names = st.dictionaries(st.integers(1, 16), st.sampled_from([GRAM, STANDARD, ""]), max_size=3)
    return CostTable(
        source=draw(st.text(max_size=20)),
        entries=draw(st.dictionaries(shape_keys, by_batch, max_size=5)),
        device=draw(st.sampled_from([None, *ANALYTIC_DEVICES.values()])),
        ns_steps=draw(st.integers(0, 9)),
        entry_origin=draw(st.sampled_from(ORIGINS)),
        kernels=draw(st.dictionaries(shape_keys, names, max_size=3)),
        momentum=draw(st.booleans()),
    )


def measured(entries, device=CPU, **kwargs) -> CostTable:
    return CostTable("here", entries, device, entry_origin="measured", **kwargs)


def priced(table: CostTable, key, *batches: int) -> list[tuple[float, str]]:
    return [(table.batch_ms(key, b), table.origin(key, b)) for b in batches]


def test_an_entry_is_the_price_of_the_shape_and_of_its_transpose():
    table = measured({A: {2: 9.0}})
    assert priced(table, A, 2) == priced(table, A_TALL, 2) == [(9.0, "measured")]
    table = CostTable("mine", {A: {1: 2.5, 2: 3.0}, A_TALL: {1: 2.0, 2: 3.5, 4: 7.0}})
    assert priced(table, A, 1, 2, 4) == [(2.5, "given"), (3.5, "given"), (7.0, "given")]


@given(by_batch, st.integers(1, 16))
def test_between_and_beyond_the_entries(entries, batch):
    ((ms, origin),) = priced(measured({A: entries}), A, batch)
    below, above = [b for b in entries if b <= batch], [b for b in entries if b >= batch]
    if batch in entries:
        assert (ms, origin) == (entries[batch], "measured")
    elif below and above:
        low, high = max(below), min(above)
        line = entries[low] + (entries[high] - entries[low]) * (batch - low) / (high - low)
        assert ms == pytest.approx(line) and origin == "interpolated"
        assert min(entries[low], entries[high]) <= ms <= max(entries[low], entries[high])
    else:
        assert origin == "estimated"
        if not above:  # each costs what it costs in the largest
            assert ms == pytest.approx(entries[max(below)] / max(below) * batch)


def test_what_is_not_there_is_estimated_by_the_device_model():
    table = measured({B: {4: 10 * MODEL.batch_ms(B, 4)}})
    assert priced(table, B, 2) == [(pytest.approx(10 * MODEL.batch_ms(B, 2)), "estimated")]
    # Without a device: as if the batch were filled up.
    assert priced(measured({B: {4: 5.0}}, None), B, 2) == [(5.0, "estimated")]
    # Of another shape: times the median ratio of the entries to the model.
    ratios = {1: 2.0, 2: 3.0, 4: 50.0}
    table = measured({A: {b: r * MODEL.batch_ms(A, b) for b, r in ratios.items()}})
    assert priced(table, B, 3) == [(pytest.approx(3.0 * MODEL.batch_ms(B, 3)), "estimated")]
    assert priced(measured({}), B, 2) == priced(MODEL, B, 2) == [(MODEL.batch_ms(B, 2), "analytic")]
    table = CostTable("mine", {A: {1: 1.0}})
    for ask in (table.batch_ms, table.origin):
        with pytest.raises(PlanError, match=r"mine has no cost for \(64, 64.*batch of 2.*profile"):
            ask(B, 2)
    for ask in (table.batch_ms, table.kernel):
        with pytest.raises(ValueError, match="batch must be at least 1"):
            ask(A, 0)


def test_newton_schulz_alone_costs_less_by_what_momentum_moves():
    device = AnalyticDevice(1e12, 1e9, 1e-6, 0.0)
    both = [CostTable("x", device=device, momentum=m).batch_ms(B, 4) for m in (True, False)]
    # Momentum is read and written, the gradient read; 6 launches.
    assert both[0] - both[1] == pytest.approx(1e3 * (3 * 4 * 64 * 64 * 2 / 1e9 + 6e-6))
    by_name = [resolve_costs("analytic", "cpu", momentum=m) for m in (True, False)]
    assert by_name == [MODEL, CostTable.analytic("cpu", momentum=False)]


@pytest.mark.parametrize(("given", "message"), [
    ({"entries": {(0, 6, "float32"): {1: 1.0}}}, r"\(0, 6"),
    ({"entries": {(4, 6, "int8"): {1: 1.0}}}, "int8"),
    ({"entries": {A: {0: 1.0}}}, "0: 1.0"),
    *(({"entries": {A: {1: ms}}}, f"1: {ms!r}") for ms in (-1.0, math.nan, math.inf, "fast")),
    ({"entries": {A: 3.0}}, r"3\.0"),
    ({"kernels": {A: {0: GRAM}}}, "found 0: "),
    ({"kernels": {A: {1: "fast"}}}, "found 1: 'fast'"),
    ({"entry_origin": "rumoured"}, "rumoured"),
])  # fmt: skip
def test_wrong_tables_are_refused_with_what_was_found(given, message):
    with pytest.raises(PlanError, match=rf"mine.*{message}"):
        CostTable("mine", **given)


def test_a_kernel_is_that_of_the_entry_and_between_two_that_of_the_larger():
    def names(sizes, kernels, key, *batches: int) -> list[str]:
        table = measured({A: {b: float(b) for b in sizes}}, kernels={A_TALL: kernels})
        return [table.kernel(key, b) for b in batches]

    some = {2: STANDARD, 4: GRAM}
    assert names((2, 4, 8), some, A, 1, 2, 3, 4) == [STANDARD, STANDARD, GRAM, GRAM]
    assert names((2, 4, 8), some, A_TALL, 5, 8, 99) == ["", "", ""]  # 8 names none
    some = {1: STANDARD, 2: STANDARD, 8: GRAM}  # the time of 8 was not reached
    assert names((1, 2), some, A, 2, 3, 8, 9) == [STANDARD, GRAM, GRAM, GRAM]
    assert names((1, 2), some, B, 1) == [""] and MODEL.kernel(A, 1) == ""


@given(tables())
@settings(max_examples=60)
def test_a_table_comes_back_from_json_as_it_was(table):
    again = CostTable.from_json(table.to_json())
    assert again == table and again.to_json() == table.to_json()


GOOD = json.loads(measured({A: {1: 1.0}}).to_json())


@pytest.mark.parametrize(("text", "message"), [
    ("not json at all", "expected JSON, found 'not json"),
    ('{"format": "dmuon plan"}', "'dmuon plan', expected 'dmuon cost table'"),
    (json.dumps(GOOD | {"version": 99}), "version 99, this dmuon reads version 1"),
    (json.dumps(GOOD | {"entries": [{"rows": 1}]}), "damaged.*cols"),
    (json.dumps(GOOD | {"entries": GOOD["entries"] * 2}), "damaged.*twice"),
    (json.dumps(GOOD).replace("1.0", "Infinity"), "inf"),
    (None, "cannot be read"),
])  # fmt: skip
def test_what_is_no_cost_table_is_refused_by_the_name_of_its_file(tmp_path, text, message):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=rf"(?s)costs\.json.*{message}"):
        CostTable.load(path)


def test_costs_may_be_a_table_or_a_path_in_any_form(tmp_path):
    table = measured({A: {1: 0.1, 16: 1e-3}, B: {2: 7.25}})
    assert resolve_costs(table, "cpu", momentum=False) is table
    for name in ("costs.json", "no-suffix"):
        table.save(tmp_path / name)
        assert resolve_costs(tmp_path / name, "cpu") == table
        assert resolve_costs(str(tmp_path / name), "cpu") == table


@pytest.mark.parametrize(("wrong", "message"), [
    ("missing.json", r"missing\.json"),
    (Path("missing"), "missing"),
    ("guessed", r"costs='guessed'.*'measured', 'analytic'.*h200.*path"),
    ("analytic:abacus", "abacus.*known: a100"),
    (3.0, "float"),
    ("measured", r"costs='measured'.*profile"),
])  # fmt: skip
def test_other_costs_are_refused_with_the_choices(wrong, message):
    with pytest.raises(PlanError, match=message):
        resolve_costs(wrong, "cpu")


@pytest.mark.parametrize(("name", "expected"), [
    ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie"),
    ("NVIDIA A800-SXM4-80GB", "a800"), ("NVIDIA A800 80GB PCIe", "a100-pcie"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H800", "h800"), ("NVIDIA H20", "h20"),
    ("NVIDIA H20-3e", "h20"), ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"),
    ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA GB300", "gb300"), ("AMD Instinct MI250X/MI250", "mi250"),
    ("AMD Instinct MI250", "mi250"), ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct MI300X OAM", "mi300x"), ("Ascend910B2", "ascend-910b"),
    ("Ascend910B", "ascend-910b"), ("Ascend910B4-1", "ascend-910b"),
])  # fmt: skip
def test_devices_by_the_names_that_drivers_give(name, expected):
    assert analytic_class("cuda", name) == analytic_class("npu", name) == expected
    assert analytic_class("cpu", name) == "cpu"
    assert nearest_device("cuda", name) == ANALYTIC_DEVICES[expected]


@pytest.mark.parametrize("name", [
    "", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 3090", "NVIDIA A10", "Ascend910_9391",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "Max 1550", "h10",
])  # fmt: skip
def test_a_device_without_a_row_is_an_error_that_lists_them(name):
    with pytest.raises(PlanError, match=r"a100, .*gb300, .*rtx4090, or costs='measured'") as error:
        analytic_class("cuda", name)
    assert (repr(name) if name else "of type cuda") in str(error.value)
    # Measured times need no name: they scale the model.
    assert nearest_device("cuda", name) in ANALYTIC_DEVICES.values()


# Dense half-precision TFLOP/s by the data sheet.
PEAKS = {
    "a100": 312, "a100-40gb": 312, "a100-pcie": 312, "a800": 312, "h100": 989, "h100-pcie": 756,
    "h100-nvl": 835, "h200-nvl": 835, "h200": 989, "h800": 989, "h20": 148, "b200": 2250,
    "gb200": 2250, "b300": 2250, "gb300": 2500, "mi250": 181, "mi300x": 1307, "ascend-910b": 313,
    "rtx4090": 165,
}  # fmt: skip


def test_devices_are_those_of_the_page_and_of_data_sheets():
    page = (Path(__file__).parents[2] / "docs/costs.md").read_text(encoding="utf-8")
    table = page.partition("| `analytic:` |")[2].partition("\n\n")[0]
    found = {}
    for row in table.splitlines()[2:-1]:  # the last one is the CPU's
        _, names, rates, _, *others, _ = row.split("|")
        names = re.findall(r"`([\w-]+)`", names)
        cells = (re.findall(r"\d\S*", cell.partition(";")[0]) for cell in (rates, *others))
        columns = [[float(number.replace(",", "")) for number in cell] for cell in cells]
        if share := re.search(r"(\d+)%", rates):
            columns.insert(1, [peak * int(share[1]) / 100 for peak in columns[0]])
        else:
            columns[:1] = [columns[0][:1], columns[0][1:]]
        for i, name in enumerate(names):
            found[name] = [column[i if len(column) > 1 else 0] for column in columns if column]
    assert {name: row[0] for name, row in found.items()} == PEAKS
    assert found.keys() | {"cpu"} == ANALYTIC_DEVICES.keys()
    for name, (_, reached, hbm, link, nic) in found.items():
        device = ANALYTIC_DEVICES[name]
        assert device.flops == pytest.approx(1e12 * reached, rel=0.01), name
        assert device.bandwidth == pytest.approx(0.9e12 * hbm, rel=0.005), name
        assert device.link == pytest.approx(0.8e9 * link), name
        assert device.network == pytest.approx(0.9e9 / 8 * nic), name


KEY = CacheKey("Some GPU (80 GB)", "2.13.0+cpu", "torch-1", "float16", 5)


def add(folder, entries, kernels=None) -> str | None:
    return add_to_cache(folder, KEY, measured(entries, kernels=kernels or {}))


def entries_in(folder, key=KEY) -> dict:
    table, problem = read_cache(folder, key)
    assert problem is None
    return {} if table is None else table.entries


def test_what_is_added_is_found_again_and_merged_with_its_kernel(tmp_path):
    def kernels() -> dict:
        return read_cache(folder, KEY)[0].kernels

    folder = tmp_path / "made" / "when needed"
    assert entries_in(folder) == {}
    assert add(folder, {A: {1: 1.0, 2: 2.0}}, {A: {1: GRAM, 2: GRAM, 4: GRAM}}) is None
    assert kernels() == {A: {1: GRAM, 2: GRAM, 4: GRAM}}  # of 4 the choice alone
    assert add(folder, {A_TALL: {2: 3.0}, B: {1: 0.5}}, {A: {2: STANDARD}}) is None
    assert kernels() == {A: {1: GRAM, 2: STANDARD, 4: GRAM}}
    # A later time replaces an earlier one; measured without a choice, the old one goes.
    assert add(folder, {A: {1: 0.25}}) is None
    table = measured({A: {1: 0.25, 2: 3.0}, B: {1: 0.5}}, kernels={A: {2: STANDARD, 4: GRAM}})
    assert read_cache(folder, KEY) == (table, None)
    assert CostTable.load(Path(folder, KEY.file_name())) == table, "a cache file is a cost table"
    add(folder, {A: {2: 5.0, 4: 5.0}})
    assert kernels() == {}
    assert [path.name for path in folder.iterdir()] == [KEY.file_name()]


def test_what_cannot_be_written_is_a_problem_in_words_and_leaves_the_old_file(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    assert re.search("cannot be kept.*file", add(tmp_path / "file" / "cache", {A: {1: 1.0}}))
    folder = tmp_path / "cache"
    add(folder, {A: {1: 1.0}})
    before = sorted(folder.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in add(folder, {A: {1: 2.0}})
    assert sorted(folder.iterdir()) == before and entries_in(folder) == {A: {1: 1.0}}


def test_the_directory_follows_the_xdg_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "dmuon"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_directory() == tmp_path / "home" / ".cache" / "dmuon"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_directory() is None
