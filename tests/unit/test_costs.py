"""Cost tables: interpolation, estimates, origins, files, and what ``costs=`` may be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.scheduler.costs import (
    ANALYTIC_DEVICES,
    ORIGINS,
    CostTable,
    analytic_class,
    canonical_key,
    merge_slowest,
    resolve_costs,
)
from dmuon.types import PlanError

CPU = ANALYTIC_DEVICES["cpu"]
A = (4, 6, "float32")
A_TALL = (6, 4, "float32")
B = (64, 64, "bfloat16")

milliseconds = st.floats(0.001, 1e6)
by_batch = st.dictionaries(st.integers(1, 16), milliseconds, min_size=1, max_size=6)
shape_keys = st.tuples(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from(["float32", "bfloat16", "float64"])
)
square_keys = st.tuples(st.integers(1, 300), st.sampled_from(["float32", "bfloat16"]))
GRAM, STANDARD = "gram[2]/triton-128x64-w4-s3/float16", "standard/torch/float32"


@st.composite
def tables(draw) -> CostTable:
    entries = draw(st.dictionaries(shape_keys, by_batch, max_size=5))
    names = st.sampled_from([GRAM, STANDARD, ""])
    return CostTable(
        source=draw(st.text(max_size=20)),
        entries=entries,
        device=draw(st.sampled_from([None, *ANALYTIC_DEVICES.values()])),
        ns_steps=draw(st.integers(0, 9)),
        entry_origin=draw(st.sampled_from(ORIGINS)),
        kernels={
            canonical_key(key): {batch: draw(names) for batch in by}
            for key, by in entries.items()
            if draw(st.booleans())
        },
        squares=draw(st.dictionaries(square_keys, by_batch, max_size=3)),
    )


def measured(entries, device=CPU) -> CostTable:
    return CostTable("here", entries, device, entry_origin="measured")


# ---- prices ------------------------------------------------------------------------------


def test_an_entry_is_the_price_of_the_shape_and_of_its_transpose():
    table = measured({A: {2: 9.0}})
    assert table.batch_ms(A, 2) == table.batch_ms(A_TALL, 2) == 9.0
    assert table.origin(A, 2) == table.origin(A_TALL, 2) == "measured"


def test_a_shape_given_both_ways_costs_the_larger_time():
    table = CostTable("mine", {A: {1: 2.5, 2: 3.0}, A_TALL: {1: 2.0, 2: 3.5, 4: 7.0}})
    assert [table.batch_ms(A, b) for b in (1, 2, 4)] == [2.5, 3.5, 7.0]


def test_between_two_entries_the_total_is_interpolated():
    table = measured({A: {2: 10.0, 4: 14.0, 8: 8.0}})
    assert table.batch_ms(A, 3) == pytest.approx(12.0)
    assert table.batch_ms(A, 6) == pytest.approx(11.0)
    assert table.origin(A, 3) == table.origin(A, 6) == "interpolated"


@given(by_batch, st.integers(1, 16))
def test_what_is_interpolated_lies_between_its_neighbours(entries, batch):
    table = measured({A: entries})
    ms = table.batch_ms(A, batch)
    if batch in entries:
        assert (ms, table.origin(A, batch)) == (entries[batch], "measured")
    elif min(entries) < batch < max(entries):
        low = max(b for b in entries if b < batch)
        high = min(b for b in entries if b > batch)
        assert min(entries[low], entries[high]) <= ms <= max(entries[low], entries[high])
        assert table.origin(A, batch) == "interpolated"
    else:
        assert table.origin(A, batch) == "estimated"


def test_beyond_the_largest_entry_each_matrix_costs_what_it_costs_there():
    table = measured({A: {1: 3.0, 4: 8.0}})
    assert table.batch_ms(A, 10) == pytest.approx(20.0)
    assert table.origin(A, 10) == "estimated"


def test_below_the_smallest_entry_the_device_model_shrinks_it():
    model = CostTable.analytic("cpu")
    table = measured({B: {4: 10 * model.batch_ms(B, 4)}})
    assert table.batch_ms(B, 2) == pytest.approx(10 * model.batch_ms(B, 2))
    assert table.origin(B, 2) == "estimated"
    # Without a device: as if the batch were filled up.
    assert measured({B: {4: 5.0}}, None).batch_ms(B, 2) == 5.0


def test_an_unknown_shape_is_estimated_by_the_median_ratio_to_the_device_model():
    model = CostTable.analytic("cpu")
    ratios = {1: 2.0, 2: 3.0, 4: 50.0}
    table = measured({A: {b: r * model.batch_ms(A, b) for b, r in ratios.items()}})
    assert table.batch_ms(B, 3) == pytest.approx(3.0 * model.batch_ms(B, 3))
    assert table.origin(B, 3) == "estimated"


def test_without_any_entry_a_price_is_the_device_model_alone():
    table = measured({})
    assert table.batch_ms(B, 2) == CostTable.analytic("cpu").batch_ms(B, 2)
    assert table.origin(B, 2) == CostTable.analytic("cpu").origin(A, 1) == "analytic"


def test_entries_of_a_table_made_by_hand_are_given():
    assert CostTable("mine", {A: {1: 1.0}}).origin(A, 1) == "given"


def test_a_shape_without_entry_or_device_is_an_error_that_says_what_to_do():
    with pytest.raises(PlanError, match=r"mine has no cost for \(64, 64.*batch of 2.*profile"):
        CostTable("mine", {A: {1: 1.0}}).batch_ms(B, 2)
    with pytest.raises(PlanError, match="mine has no cost"):
        CostTable("mine", {A: {1: 1.0}}).origin(B, 2)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({(4, 6): {1: 1.0}}, r"found \(4, 6\)"),
        ({(0, 6, "float32"): {1: 1.0}}, r"\(0, 6"),
        ({(4.0, 6, "float32"): {1: 1.0}}, r"4\.0"),
        ({(4, 6, "int8"): {1: 1.0}}, "int8"),
        ({A: {0: 1.0}}, "0: 1.0"),
        ({A: {True: 1.0}}, "True"),
        ({A: {1: -1.0}}, r"1: -1\.0"),
        ({A: {1: math.nan}}, "nan"),
        ({A: {1: math.inf}}, "inf"),
        ({A: {1: "fast"}}, "fast"),
        ({A: 3.0}, r"3\.0"),
    ],
)
def test_wrong_entries_are_refused_with_what_was_found(entries, message):
    with pytest.raises(PlanError, match=rf"mine.*{message}"):
        CostTable("mine", entries)


def test_an_unknown_origin_is_refused():
    with pytest.raises(PlanError, match="rumoured"):
        CostTable("mine", entry_origin="rumoured")


# ---- kernels and squares -----------------------------------------------------------------


def with_kernels(sizes, names, squares=None) -> CostTable:
    entries = {A: {b: float(b) for b in sizes}}
    return CostTable("mine", entries, CPU, 5, "measured", {A: names}, squares or {})


def test_a_kernel_is_that_of_the_entry_and_between_two_that_of_the_larger():
    table = with_kernels((2, 4, 8), {2: STANDARD, 4: GRAM})
    assert [table.kernel(A, b) for b in range(1, 5)] == [STANDARD, STANDARD, GRAM, GRAM]
    assert [table.kernel(A_TALL, b) for b in (5, 8, 99)] == ["", "", ""]  # 8 names none
    table = with_kernels((1, 4), {1: STANDARD, 4: GRAM})
    assert [table.kernel(A, b) for b in (1, 2, 4, 64)] == [STANDARD, GRAM, GRAM, GRAM]
    table = with_kernels((1, 2), {1: STANDARD, 2: STANDARD, 8: GRAM})  # 8 was not reached
    assert [table.kernel(A, b) for b in (2, 3, 8, 9)] == [STANDARD, GRAM, GRAM, GRAM]
    assert CostTable("mine", device=CPU, kernels={A: {1: GRAM}}).kernel(A_TALL, 1) == GRAM
    assert table.kernel(B, 1) == CostTable.analytic().kernel(A, 1) == ""
    with pytest.raises(ValueError, match="at least 1"):
        table.kernel(A, 0)


def test_the_m_x_m_part_depends_on_the_short_side_and_the_dtype_alone():
    table = with_kernels((1,), {}, {(4, "float32"): {2: 6.0, 4: 8.0}})
    for key in (A, A_TALL, (4, 4, "float32"), (900, 4, "float32")):
        found = [table.square_ms(key, b) for b in (1, 2, 3, 4, 8)]
        assert found == [3.0, 6.0, 7.0, 8.0, 16.0]
    assert table.square_ms(B, 1) is None and table.square_ms((4, 6, "bfloat16"), 1) is None
    assert CostTable.analytic().square_ms(A, 1) is None
    with pytest.raises(ValueError, match="at least 1"):
        table.square_ms(A, 0)


@pytest.mark.parametrize(
    ("kernels", "squares", "message"),
    [
        ({A: {0: GRAM}}, {}, "found 0: "),
        ({A: GRAM}, {}, "a mapping"),
        ({(4, 6, "int8"): {1: GRAM}}, {}, "int8"),
        ({A: {1: "fast"}}, {}, "found 1: 'fast'"),
        ({A: {1: 3}}, {}, "found 1: 3"),
        ({A_TALL: {1: GRAM}}, {}, r"found \(6, 4"),
        ({}, {(0, "float32"): {1: 1.0}}, r"found \(0, "),
        ({}, {(4, "int8"): {1: 1.0}}, "int8"),
        ({}, {4: {1: 1.0}}, "found 4"),
        ({}, {(4, "float32"): {0: 1.0}}, "0: 1.0"),
        ({}, {(4, "float32"): {1: -1.0}}, r"1: -1\.0"),
        ({}, {(4, "float32"): 3.0}, r"3\.0"),
    ],
)
def test_wrong_kernels_and_squares_are_refused_with_what_was_found(kernels, squares, message):
    with pytest.raises(PlanError, match=rf"mine.*{message}"):
        CostTable("mine", {A: {1: 1.0}}, kernels=kernels, squares=squares)


def test_a_table_written_without_kernels_is_still_read():
    data = measured({A: {1: 1.0}}).to_dict()
    del data["kernels"], data["squares"]
    assert CostTable.from_dict(data) == measured({A: {1: 1.0}})


# ---- merging -----------------------------------------------------------------------------


@given(st.lists(st.dictionaries(st.sampled_from([A, A_TALL, B]), by_batch), max_size=4))
def test_merging_takes_the_slowest_of_every_entry(parts):
    merged = merge_slowest(parts)
    every = {(key, b) for part in parts for key, by in part.items() for b in by}
    assert {(key, b) for key, by in merged.items() for b in by} == every
    for key, batch in every:
        times = [part[key][batch] for part in parts if batch in part.get(key, {})]
        assert merged[key][batch] == max(times)


# ---- files -------------------------------------------------------------------------------


@given(tables())
@settings(max_examples=60)
def test_a_table_comes_back_from_json_as_it_was(table):
    again = CostTable.from_json(table.to_json())
    assert again == table
    assert again.to_json() == table.to_json()


def test_a_table_comes_back_from_a_file(tmp_path):
    table = measured({A: {1: 0.1, 16: 1e-3}, B: {2: 7.25}})
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table


GOOD = json.loads(measured({A: {1: 1.0}}).to_json())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON"),
        ("not json at all", "expected JSON, found 'not json"),
        ("[1, 2]", "found format 'list'"),
        ('{"format": "dmuon plan"}', "'dmuon plan', expected 'dmuon cost table'"),
        (json.dumps(GOOD | {"version": 99}), "version 99, this dmuon reads version 1"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "entries"}), "damaged.*entries"),
        (json.dumps(GOOD | {"entries": [{"rows": 1}]}), "damaged.*cols"),
        (json.dumps(GOOD | {"device": {"flops": 1}}), "damaged"),
        (json.dumps(GOOD | {"origin": "rumour"}), "rumour"),
        (json.dumps(GOOD).replace("1.0", "Infinity"), "inf"),
        (json.dumps(GOOD).replace('"rows": 4', '"rows": "4"'), "'4'"),
    ],
)
def test_what_is_no_cost_table_is_refused_by_the_name_of_its_file(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=rf"(?s)costs\.json.*{message}"):
        CostTable.load(path)


def test_a_file_that_is_not_there_or_no_text_is_an_error_that_names_it(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json.*cannot be read"):
        CostTable.load(tmp_path / "nowhere.json")
    (tmp_path / "costs.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"costs\.json.*cannot be read"):
        CostTable.load(tmp_path / "costs.json")


# ---- the costs argument ------------------------------------------------------------------


def test_costs_may_be_a_path_in_any_form(tmp_path):
    table = measured({A: {1: 1.0}})
    for name in ("costs.json", "no-suffix"):
        table.save(tmp_path / name)
        assert resolve_costs(tmp_path / name, "cpu") == table
        assert resolve_costs(str(tmp_path / name), "cpu") == table
    with pytest.raises(PlanError, match=r"missing\.json"):
        resolve_costs("missing.json", "cpu")
    with pytest.raises(PlanError, match="missing"):
        resolve_costs(Path("missing"), "cpu")


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(PlanError, match=r"costs='guessed'.*'measured', 'analytic'.*h200.*path"):
        resolve_costs("guessed", "cpu")
    with pytest.raises(PlanError, match="float"):
        resolve_costs(3.0, "cpu")


def test_measured_needs_devices_and_says_how_to_plan_without():
    with pytest.raises(PlanError, match=r"costs='measured'.*profile"):
        resolve_costs("measured", "cpu")


@pytest.mark.parametrize(
    ("device_type", "name", "expected"),
    [
        ("cpu", "an H200 of sorts", "cpu"),
        ("cuda", "", "cuda"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA B200", "b200"),
        ("cuda", "NVIDIA L4", "cuda"),
        ("xpu", "", "cuda"),
    ],
)
def test_the_device_class_is_found_by_name_and_else_by_type(device_type, name, expected):
    assert analytic_class(device_type, name) == expected


def test_faster_devices_are_cheaper_where_there_is_work_to_do():
    big = (8192, 8192, "bfloat16")
    order = ["cpu", "a100", "h200", "b200"]
    times = [CostTable.analytic(name).batch_ms(big, 1) for name in order]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
