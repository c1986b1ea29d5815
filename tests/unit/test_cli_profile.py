"""The ``profile`` command, in this process."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from dmuon.scheduler.costs import CostTable, resolve_costs
from dmuon.tools.profile import add_profile_arguments, parse_shapes, run
from dmuon.types import PlanError


def profile(tmp_path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_profile_arguments(parser)
    common = ["--cache-dir", str(tmp_path / "cache"), "--device", "cpu"]
    return run(parser.parse_args([*arguments, *common]))


def test_it_prints_a_table_of_every_shape_and_batch(tmp_path, capsys):
    assert profile(tmp_path, "--shapes", "8x24,16x8", "--max-batch", "3") == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [
        line.split()
        for line in map(str.rstrip, out.splitlines())
        if " measured " in line and "/torch" in line
    ]
    assert [row[0:4] for row in rows if row[1] == "x"] == [
        ["8", "x", "16", "float32"],
        ["8", "x", "24", "float32"],
    ]
    assert [row[4] if row[1] == "x" else row[0] for row in rows] == ["1", "2", "3"] * 2
    assert "6 measured" in out


def test_it_writes_a_table_that_costs_can_be(tmp_path, capsys):
    path = tmp_path / "costs.json"
    options = ("--shapes", "8x24", "--dtype", "bfloat16", "--max-batch", "2", "--out", str(path))
    assert profile(tmp_path, *options) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    table = resolve_costs(str(path), "cpu")
    assert isinstance(table, CostTable)
    assert set(table.entries) == {(8, 24, "bfloat16")}
    assert table.origin((24, 8, "bfloat16"), 2) == "measured"


def test_standard_output_is_the_table_alone(tmp_path, capsys):
    assert profile(tmp_path, "--shapes", "8x8", "--max-batch", "1", "--out", "-") == 0
    out, err = capsys.readouterr()
    assert CostTable.from_dict(json.loads(out)).entries and err == ""


def test_what_is_cached_is_not_measured_again_unless_asked(tmp_path, capsys):
    def times(*more: str) -> dict:
        assert profile(tmp_path, "--shapes", "8x8", "--max-batch", "4", "--out", "-", *more) == 0
        return CostTable.from_json(capsys.readouterr().out).entries

    first = times()
    assert times() == first
    fresh = times("--fresh")
    assert fresh.keys() == first.keys() and times() == fresh


def test_what_the_budget_does_not_reach_is_marked(tmp_path, capsys):
    assert profile(tmp_path, "--shapes", "64x64", "--max-batch", "1", "--budget", "1e-9") == 0
    out = capsys.readouterr().out
    assert "1 analytic" in out and "measured" not in out.replace("measured on", "")


def test_threads_are_set_for_the_measurement_alone(tmp_path, capsys):
    assert profile(tmp_path, "--shapes", "8x8", "--max-batch", "1", "--threads", "2") == 0
    assert "2 threads" in capsys.readouterr().out
    assert torch.get_num_threads() == 1


def test_a_model_may_be_a_function(tmp_path, capsys):
    pytest.importorskip("dmuon.catalogue.presets")
    assert profile(tmp_path, "--model", "tests.unit.models:TinyGPT") == 0
    out = capsys.readouterr().out
    assert "8 x 16" in out and "2 measured" in out  # two of it and two of its transpose: 1, 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "8by8"], r"'8by8' is no shape"),
        (["--shapes", "8x0"], r"'8x0' is no shape"),
        (["--shapes", "8x8", "--dtype", "int8"], r"unknown dtype 'int8'.*float32"),
        (["--shapes", "8x8", "--max-batch", "0"], "--max-batch must be an integer >= 1"),
        (["--shapes", "8x8", "--budget", "0"], "--budget must be a number > 0"),
        (["--shapes", "8x8", "--threads", "0"], "--threads must be at least 1"),
        (["--shapes", "8x8", "--out", "/no/such/folder/x.json"], "cannot write"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(tmp_path, capsys, options, message):
    assert profile(tmp_path, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("python -m dmuon profile: error: ") and err.count("\n") == 1
    with pytest.raises(PlanError, match=message):
        raise PlanError(err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_a_mistake(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_profile_arguments(parser)
    assert run(parser.parse_args(["--shapes", "8x8", "--device", "cuda"])) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_shapes_are_read_once_each():
    assert parse_shapes("4X5,4x5, 6x7") == [(4, 5), (6, 7)]
