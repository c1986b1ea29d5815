"""The cache of measured costs: where it is, what it refuses, and many writers at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.scheduler import cost_cache
from dmuon.scheduler.cost_cache import CacheKey, add, default_directory, path_of, read
from dmuon.scheduler.costs import CostTable

KEY = CacheKey("Some GPU (80 GB)", "2.13.0+cpu", "torch-1", "float16", 5)
A, A_TALL, B = (4, 6, "float32"), (6, 4, "float32"), (8, 8, "bfloat16")
REPOSITORY = Path(__file__).parents[2]


def test_what_is_added_is_found_again_and_merged(tmp_path):
    assert read(tmp_path, KEY).entries == {}
    assert add(tmp_path / "made" / "when needed", KEY, {A: {1: 1.0}}) is None
    folder = tmp_path / "made" / "when needed"
    assert add(folder, KEY, {A_TALL: {2: 3.0}, B: {1: 0.5}}) is None
    assert add(folder, KEY, {A: {1: 0.25}}) is None  # a later time replaces an earlier one
    found = read(folder, KEY)
    assert found.entries == {A: {1: 0.25, 2: 3.0}, B: {1: 0.5}} and found.problem is None


GRAM, STANDARD = "gram[2]/torch/float16", "standard/torch/float16"


def test_a_time_is_kept_with_its_kernel_and_replaced_with_it(tmp_path):
    names = {A: {1: GRAM, 2: GRAM}}
    assert add(tmp_path, KEY, {A: {1: 1.0, 2: 2.0}}, kernels=names) is None
    assert read(tmp_path, KEY).kernels == names
    add(tmp_path, KEY, {A_TALL: {2: 3.0}, B: {1: 1.0}}, kernels={A_TALL: {2: STANDARD}})
    found = read(tmp_path, KEY)
    assert found.entries == {A: {1: 1.0, 2: 3.0}, B: {1: 1.0}}
    assert found.kernels == {A: {1: GRAM, 2: STANDARD}}
    add(tmp_path, KEY, {A: {1: 5.0}})  # measured without a choice: the old one is not its kernel
    assert read(tmp_path, KEY).kernels == {A: {2: STANDARD}}
    add(tmp_path, KEY, {A: {2: 5.0}})
    assert read(tmp_path, KEY).kernels == {}


def test_the_times_of_m_x_m_parts_are_kept_and_merged(tmp_path):
    add(tmp_path, KEY, {}, squares={(4, "float32"): {1: 1.0, 2: 2.0}})
    add(tmp_path, KEY, {A: {1: 1.0}}, squares={(4, "float32"): {2: 3.0}, (8, "bfloat16"): {1: 0.5}})
    found = read(tmp_path, KEY)
    assert found.squares == {(4, "float32"): {1: 1.0, 2: 3.0}, (8, "bfloat16"): {1: 0.5}}
    table = CostTable.load(path_of(tmp_path, KEY))
    assert table.square_ms(A, 2) == 3.0 and found.entries == {A: {1: 1.0}}


def test_a_cache_file_is_a_cost_table(tmp_path):
    add(tmp_path, KEY, {A: {1: 1.0}})
    table = CostTable.load(path_of(tmp_path, KEY))
    assert table.batch_ms(A, 1) == 1.0 and table.origin(A, 1) == "measured"
    assert table.source == f"measured on {KEY.device}"


def test_nothing_but_the_table_and_its_lock_stays_behind(tmp_path):
    for ms in (1.0, 2.0, 3.0):
        add(tmp_path, KEY, {A: {1: ms}})
    name = KEY.file_name()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{name}.lock", name]


@pytest.mark.parametrize("field", [f.name for f in fields(CacheKey)])
def test_every_part_of_the_key_has_a_file_of_its_own(tmp_path, field):
    other = replace(KEY, **{field: 7 if field == "ns_steps" else "another"})
    assert other.file_name() != KEY.file_name()
    add(tmp_path, KEY, {A: {1: 1.0}})
    assert read(tmp_path, other).entries == {}


@given(st.builds(CacheKey, st.text(), st.text(), st.text(), st.text(), st.integers()))
def test_file_names_are_plain(key):
    name = key.file_name()
    assert len(name) < 255 or len(key.torch + key.ns_dtype) > 100
    assert all(c.isascii() and (c.isalnum() or c in ".-") for c in name)
    assert name.endswith(".json")


def written() -> dict[str, Any]:
    """The data of a cache file as it is written."""
    with tempfile.TemporaryDirectory() as folder:
        assert add(folder, KEY, {A: {1: 1.0}}, tuned={A: [1]}) is None
        data: dict[str, Any] = json.loads(path_of(folder, KEY).read_text())
    return data


GOOD = written()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "something else"}',
        json.dumps(GOOD)[:-20],
        json.dumps(GOOD | {"version": 0}),
        json.dumps(GOOD | {"entries": 3}),
        json.dumps(GOOD | {"entries": [{"rows": 4, "cols": 6, "dtype": "int8", "ms": {}}]}),
        json.dumps(GOOD | {"key": asdict(replace(KEY, torch="1.0"))}),
        json.dumps({name: value for name, value in GOOD.items() if name != "key"}),
        json.dumps({name: value for name, value in GOOD.items() if name != "digest"}),
        json.dumps(GOOD).replace("1.0", "2.0"),  # a time, but not what was measured
        json.dumps(GOOD | {"tuned": [[None, "6", [], [{}]]]}),
        json.dumps(GOOD | {"tuned": [[4, 6, "float32", [[1]]]]}),
        "[" * 100_000,
        json.dumps(GOOD).replace("1.0", "9" * 5_000),
    ],
)
def test_a_damaged_foreign_or_older_file_is_ignored_named_and_rebuilt(tmp_path, text):
    path = path_of(tmp_path, KEY)
    path.write_text(json.dumps(GOOD))
    assert read(tmp_path, KEY).entries == {A: {1: 1.0}}
    path.write_text(text)
    found = read(tmp_path, KEY)
    assert found.entries == {} and str(path) in found.problem and "ignored" in found.problem
    assert add(tmp_path, KEY, {B: {2: 2.0}}) is None
    assert read(tmp_path, KEY) == cost_cache.Found({B: {2: 2.0}})


def test_a_file_of_other_bytes_is_ignored(tmp_path):
    path_of(tmp_path, KEY).write_bytes(b"\xff\x00\xfe")
    assert "ignored" in read(tmp_path, KEY).problem


def test_a_place_that_cannot_be_written_is_a_problem_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    problem = add(tmp_path / "file" / "cache", KEY, {A: {1: 1.0}})
    assert "cannot be kept" in problem and "file" in problem
    assert read(tmp_path / "file" / "cache", KEY).entries == {}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    add(tmp_path, KEY, {A: {1: 1.0}})
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_cache.os, "replace", full)
    assert "No space left" in add(tmp_path, KEY, {A: {1: 2.0}})
    assert sorted(tmp_path.iterdir()) == before
    assert read(tmp_path, KEY).entries == {A: {1: 1.0}}


def test_a_lock_that_is_never_freed_does_not_stop_a_writer(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(cost_cache, "_LOCK_PATIENCE_S", 0.05)
    path = path_of(tmp_path, KEY)
    with open(path.with_name(f".{path.name}.lock"), "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert add(tmp_path, KEY, {A: {1: 1.0}}) is None
    assert read(tmp_path, KEY).entries == {A: {1: 1.0}}


# ---- where it is -------------------------------------------------------------------------


def test_the_directory_follows_the_xdg_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "dmuon"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_directory() == tmp_path / "home" / ".cache" / "dmuon"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == tmp_path / "home" / ".cache" / "dmuon"
    monkeypatch.setattr(cost_cache.os.path, "expanduser", lambda path: path)
    assert default_directory() is None


# ---- many writers ------------------------------------------------------------------------

WRITERS = """
import multiprocessing, sys
from dmuon.scheduler.cost_cache import CacheKey, add, read

KEY = CacheKey("shared", "2", "k", "float32", 5)
WRITES = 10

def write(rank, folder, barrier):
    barrier.wait()
    for i in range(WRITES):
        assert add(folder, KEY, {(rank + 1, 100 + i, "float32"): {1: 1.0 + rank}}) is None
        found = read(folder, KEY)  # a whole file at any time
        assert found.problem is None and (rank + 1, 100 + i, "float32") in found.entries

context = multiprocessing.get_context("fork")
barrier = context.Barrier(8)
processes = [
    context.Process(target=write, args=(rank, sys.argv[1], barrier)) for rank in range(8)
]
for process in processes:
    process.start()
for process in processes:
    process.join()
assert [process.exitcode for process in processes] == [0] * 8
entries = read(sys.argv[1], KEY).entries
assert len(entries) == 8 * WRITES, len(entries)
"""


def test_eight_processes_write_at_once_and_nothing_is_lost(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
