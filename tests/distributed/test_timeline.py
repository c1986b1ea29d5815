"""Timelines of steps: spans, idle times and traces of made-up events; and a real step's."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import timeline
from benchmarks.demo import GPTConfig
from benchmarks.results import Row
from benchmarks.timeline import Event, Span, critical_ms, idle_ms, lanes, spans_of, trace_of
from benchmarks.timing import on_ranks

pytestmark = pytest.mark.cpu_only("benchmarks of CPUs")

# Of the main thread, 1, and of gloo's two, 2 and 3; in µs.
EVENTS = [
    Event("before", 1, 0, 1000),
    Event("timeline::step", 1, 5000, 25000),
    Event("timeline::sent 64 32", 1, 6000, 6100),
    Event("dmuon::gather layers.0", 1, 7000, 8000),
    Event("timeline::sent 800 400", 1, 7100, 7200),
    Event("gloo:all_to_all", 2, 7500, 15000),
    Event("gloo:all_to_all", 3, 6050, 6500),
    Event("timeline::wait", 1, 10000, 15000),
    Event("dmuon::newton_schulz 2x[8,8]", 1, 15000, 19000),
    Event("aten::bmm", 1, 16000, 17000),
    Event("dmuon::publish", 1, 20000, 24500),
    Event("timeline::sent 400 800", 1, 20100, 20200),
    Event("timeline::wait", 1, 21000, 24000),
    Event("gloo:all_to_all", 3, 20300, 23900),
    Event("gloo:barrier", 2, 25500, 26000),
]


def test_spans_of_events() -> None:
    spans = spans_of(EVENTS, rank=1, begin_ms=100.0)
    found = [(span.kind, span.begin, span.end) for span in spans if not span.is_message]
    assert found == [
        ("other work", 100, 105),
        ("idle", 105, 110),
        ("other work", 110, 110),
        ("Newton-Schulz", 110, 114),
        ("other work", 114, 116),
        ("idle", 116, 119),
        ("other work", 119, 120),
    ]
    assert [span[1:] for span in spans if span.is_message] == [
        ("agreement", "gloo:all_to_all", 101.05, 101.5, 64, 32),
        ("gather", "gloo:all_to_all", 102.5, 110.0, 800, 400),
        ("scatter", "gloo:all_to_all", 115.3, 118.9, 400, 800),
    ]


def two_ranks() -> list[Span]:
    """The second one begins 2 ms later and ends 5 ms earlier than the first."""
    spans = spans_of(EVENTS, 0, 100.0)
    for span in spans_of(EVENTS, 1, 102.0):
        late = span.begin if span.is_message else min(span.begin, 115.0)
        end = span.end if span.is_message else min(span.end, 115.0)
        spans.append(span._replace(begin=late, end=end))
    return spans


def test_idle_is_all_but_work_until_the_last_rank_ends() -> None:
    # The first: 5 + 4 + 2 + 1 of 20 ms; the second: 5, 3 of Newton-Schulz.
    assert idle_ms(two_ranks()) == [20 - 12, 20 - 8]


def test_the_critical_path_is_the_longer_chain() -> None:
    spans = spans_of(EVENTS, 0, 100.0) + spans_of(EVENTS, 1, 100.0)
    # At 8 kbit/s a byte takes a ms. 2.5 ms are computed before the gather leaves, and 1 after the
    # scatter has come.
    assert critical_ms(spans, 3000.0, 100.0, "8kbit") == 3000 + 800 + 800
    assert critical_ms(spans, 30.0, 1700.0, "8kbit") == pytest.approx(1700 + 2.5 + 1)
    assert critical_ms(spans, 30.0, 0.0, None) == 30


def test_spans_under_way_at_once_are_in_different_lanes() -> None:
    times = [(0, 4), (1, 2), (2, 5), (3, 6), (6, 7)]
    assert lanes([Span(0, "gather", "", *pair) for pair in times]) == [0, 1, 1, 2, 0]


def assert_valid(trace: dict[str, list[Row]], processes: set[str]) -> None:
    """That perfetto shows it: complete events that nest in their thread, and names."""
    trace = json.loads(json.dumps(trace))
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == processes and len(names) == len(processes)
    complete = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in complete} == threads
    assert {pid for pid, _ in threads} == set(names)
    for thread in threads:
        mine = [e for e in complete if (e["pid"], e["tid"]) == thread]
        assert all(e["name"] and e["ts"] >= 0 and e["dur"] >= 0 for e in mine)
        mine.sort(key=lambda e: (e["ts"], e["dur"]))
        # Rounded to µs.
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(mine))
    assert {e["ph"] for e in events} <= {"X", "M", "C"}


def test_a_trace_has_what_perfetto_needs() -> None:
    row = {"optimizer": "made up", "spans": two_ranks()}
    samples = [(0.09, ((0, 0), (0, 0))), (0.105, ((0, 0), (0, 0))), (0.115, ((10_000, 0), (0, 5)))]
    trace = trace_of([row], samples)
    assert_valid(trace, {"made up, rank 0", "made up, rank 1"})
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert [(e["pid"], e["ts"], e["args"]) for e in counters] == [
        (0, 5000, {"out": 8.0, "in": 0.0}),
        (1, 5000, {"out": 0.0, "in": 0.0}),
    ]


@pytest.fixture(scope="module")
def real() -> list[Row]:
    """Rows of steps of two ranks on one machine."""
    # dmuon has ranges for batches of 32,768 elements or more.
    config = GPTConfig(width=192, hidden=512, depth=2, heads=2)
    names = ["dmuon", *timeline.KINDS]
    rows = on_ranks(2, timeline.work, None, config, 2, names)
    for row in rows:
        row["spans"] = [Span(*span) for span in row["spans"]]
    return rows


def test_a_real_step_is_seen_on_every_rank(real: list[Row], tmp_path: Path) -> None:
    for row in real:
        for rank in range(2):
            mine = [span for span in row["spans"] if span.rank == rank]
            kinds = Counter(span.kind for span in mine)
            work = [span for span in mine if not span.is_message]
            assert kinds["Newton-Schulz"] and kinds["idle"] and kinds["gather"], row["optimizer"]
            assert all(a.end == pytest.approx(b.begin, abs=1e-6) for a, b in pairwise(work))
            sent = [span for span in mine if span.kind in ("gather", "scatter")]
            if row["optimizer"] != "gather-then-compute":
                assert kinds["gather"] == kinds["scatter"]
                # Every matrix is cut in two, and owned by one rank.
                numel = 2 * (4 * 192 * 192 + 3 * 192 * 512)
                # Half precision, or float32 where that is as fast.
                nbytes = sum(span.sent + span.received for span in sent)
                assert nbytes in (2 * numel, 4 * numel)
            assert all(work[0].begin < span.begin < work[-1].end for span in sent)
        assert row["compute_ms"] > 0 and row["bound_ms"] == row["compute_ms"]
        assert all(0 < ms < row["profiled_ms"] for ms in row["idle_ms"])
    assert_valid(
        trace_of(real), {f"{r['optimizer']}, rank {rank}" for r in real for rank in (0, 1)}
    )
    timeline.draw(str(tmp_path / "picture.png"), real[:2])
    assert os.path.getsize(tmp_path / "picture.png") > 10_000
    assert timeline.tables(real)["steps"].count("\n") == 1 + len(real)
