"""Plans, cost tables and caches with damage: a clear error, or a verdict that is right."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dmuon.__main__ import CRASHED, main
from dmuon.report.data import LoadBalanceReport
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.costs import CacheKey, CostTable, add_to_cache, read_cache
from dmuon.scheduler.json_files import sha256
from dmuon.scheduler.plan import OwnershipPlan, fitted_plan
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import OwnerLimits
from dmuon.scheduler.topology import Topology
from dmuon.types import PlanError, SizeError
from tests.unit.models import plan_of, sealed, specs_of

A, B = (64, 64, "float32"), (64, 256, "float32")
MOST_MESSAGE = 1_500
GRAM = "gram[2]/torch/float16"
TINY = CostTable(
    "tiny",
    {A: {1: 1.0, 2: 1.7, 3: 2.9}, B: {1: 2.0, 2: 3.6}},
    entry_origin="measured",
    kernels={A: {1: GRAM, 2: GRAM}, B: {1: GRAM}},
)
LIMITS = OwnerLimits((5, 0, 9), 1_000_000, ((0, 1, 2), (1, 2)), (0, 1) * 3)
SPECS, MESH = specs_of([A, B] * 3, rest=1), Topology.on_nodes((3,), ("dp",), [0, 1, 0])
MADE = solve(SPECS, MESH, TINY, limits=LIMITS)
PLAN = replace(MADE, search=replace(MADE.search, seconds=0.25)).to_json()
KEY = CacheKey("Some GPU (80 GB)", "2.13.0", "torch-1", "float16", 5)
many = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@cache
def cache_file() -> str:
    with tempfile.TemporaryDirectory() as folder:
        add_to_cache(folder, KEY, TINY)
        return Path(folder, KEY.file_name()).read_text()


VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 2, 7, 0.5, 1e15, 1e308, math.inf, math.nan, 2**62, 10**30, "", "x"]
    + ["optimal", "gram[9]/torch/float32", [], {}, [[]], [0], [1.0, 2.0], {"x": 1}]
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of all values of a tree."""
    keys = data.keys() if isinstance(data, dict) else range(len(data))
    own = [(data, key) for key in keys]
    inner = (places(data[key]) for key in keys if isinstance(data[key], dict | list))
    return own + [place for of in inner for place in of]


def damaged(text: str) -> st.SearchStrategy[str]:
    """A file in which something is deleted, replaced, swapped, shortened, or cut off."""

    @st.composite
    def made(draw: st.DrawFn) -> str:
        data = json.loads(text)
        for _ in range(draw(st.integers(1, 3))):
            if not (found := places(data)):
                break
            of, key = draw(st.sampled_from(found))
            what = draw(st.sampled_from(["delete", "value", "scale", "swap", "shorten"]))
            value = of[key]
            if what == "delete":
                del of[key]
            elif what == "value":
                of[key] = copy.deepcopy(draw(VALUES))
            elif what == "swap":
                there, other = draw(st.sampled_from(found))
                of[key], there[other] = copy.deepcopy(there[other]), copy.deepcopy(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                of[key] = type(value)(value * draw(st.sampled_from([0, 0.5, 1.01, 2, 3])))
            elif isinstance(value, list | str):
                of[key] = value[1:]
        if "specs" in data and draw(st.booleans()):
            return sealed(data)
        whole = json.dumps(data)
        return whole[: draw(st.integers(0, len(whole)))] if draw(st.integers(0, 9)) == 0 else whole

    return made()


def check_verdict(text: str, plan: OwnershipPlan) -> None:
    """Compare what is called proven with what the JSON says."""
    certificate, data = certify(plan), json.loads(text)
    if not (certificate.ok and certificate.proven):
        assert certificate.findings
        return
    price = {tuple(key): ms for key, ms, *_ in data["prices"]}
    loads = [0.0] * plan.topology.world
    domains, domain_of = data["limits"]["domains"], data["limits"]["domain_of"]
    for owner, members, *_ in data["batches"]:
        loads[owner] += price[plan.specs.matrices[members[0]].key][len(members) - 1]
        assert all(owner in domains[domain_of[i]] for i in members if domains)
    owned = Counter(i for _, members, *_ in data["batches"] for i in members)
    assert owned == Counter(range(len(plan.specs.matrices)))
    assert certificate.makespan_ms == pytest.approx(max(loads), rel=1e-6, abs=1e-6)
    assert certificate.lower_bound_ms <= max(loads) * (1 + 1e-6) + 1e-6


@many
@given(damaged(PLAN))
@example(PLAN)
def test_a_damaged_plan_is_refused_or_judged_rightly(text):
    try:
        plan = OwnershipPlan.from_json(text)
    except PlanError as error:
        assert str(error).startswith("not an ownership plan: ") and len(str(error)) < MOST_MESSAGE
        return
    assert OwnershipPlan.from_json(plan.to_json()) == plan
    assert plan.makespan_ms >= 0 and max(plan.state_bytes) >= 0
    with contextlib.suppress(SizeError):
        check_verdict(text, plan)
    with contextlib.suppress(PlanError):
        assert str(LoadBalanceReport(fitted_plan(plan, SPECS, MESH, MADE.layout)))


@pytest.mark.parametrize(("path", "value", "message"), [
    ("topology.shape", [10**9], "at most 100,000 ranks"),
    ("topology.shape", "x", r"topology.shape: expected a list, found 'x'"),
    ("search.seconds", 10**31, "search.seconds: expected a number"),
    ("search.seconds", math.nan, "found nan"),
    ("search.note", ["x"], r"note: expected a text.*found a list"),
    ("specs.matrices", [["m"]], r"specs.matrices\[0\]: expected a list of 8 entries"),
    ("layout", "scattered", "layout: expected one of 'auto'"),
])  # fmt: skip
def test_an_error_names_the_field_what_was_found_and_what_was_expected(path, value, message):
    data = json.loads(PLAN)
    *steps, last = path.split(".")
    place = data
    for step in steps:
        place = place[step]
    place[last] = value
    with pytest.raises(PlanError, match=message):
        OwnershipPlan.from_json(json.dumps(data))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(make, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(tmp_path, KEY.file_name())
    make(path)
    table, problem = read_cache(tmp_path, KEY)
    assert table is None and "it is not a regular file" in problem and str(path) in problem
    assert "it is not a regular file" in add_to_cache(tmp_path, KEY, TINY)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for arguments in (["--verify", str(path)], ["--model", str(path) + "/", "--mesh", "2"]):
        assert main(["plan", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(PlanError, match="it is not a regular file"):
        CostTable.load(path)


@pytest.mark.parametrize("flag", ["--save", "--html"])
def test_files_of_the_command_appear_whole(flag, tmp_path):
    made = tmp_path / "linked"
    (tmp_path / "real").write_text("old")
    made.symlink_to("real")
    arguments = ["plan", "--model", "gpt2", "--mesh", "2", "--solver", "greedy", flag, str(made)]
    with mock.patch.object(Path, "replace", side_effect=OSError("killed")):
        assert main(arguments) == 2
    assert made.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    assert main(arguments) == 0
    assert made.is_symlink() and made.read_text() != "old" and len(list(tmp_path.iterdir())) == 2
    assert main([*arguments[:-1], "/dev/null"]) == 0


def test_control_characters_in_names_are_shown_and_not_obeyed(tmp_path, capsys):
    hostile = "a\x1b[2J\u202e\r\x07.<b>"
    specs = specs_of([A, A, B])
    named = {
        kind: tuple(replace(one, name=f"{hostile}{i}") for i, one in enumerate(ones))
        for kind, ones in (("parameters", specs.parameters), ("matrices", specs.matrices))
    }
    plan = solve(replace(specs, **named), Topology.flat(2), TINY)
    lie = replace(plan, limits=OwnerLimits(domains=((0,),), domain_of=(0, 0, 0)))
    (tmp_path / "plan.json").write_text(lie.to_json())
    report = LoadBalanceReport(plan)
    report.to_html(tmp_path / "page.html")
    with pytest.raises(PlanError) as error:
        fitted_plan(plan, specs_of([A]), Topology.flat(2), plan.layout)
    main(["plan", "--verify", str(tmp_path / "plan.json")])
    shown = capsys.readouterr()
    found = [str(report), (tmp_path / "page.html").read_text(), str(error.value), shown.out]
    for text in found:
        assert "\\x1b[2J\\u202e\\r\\x07" in text.replace("<wbr/>", "").replace("\n", "")
    for text in [*found, shown.err]:
        assert all(c.isprintable() or c == "\n" for c in text)


@settings(many, max_examples=30)
@given(damaged(TINY.to_json()))
def test_a_damaged_cost_table_is_refused_or_gives_prices(text):
    try:
        table = CostTable.from_json(text, "costs='x.json'")
    except PlanError as error:
        assert "costs='x.json'" in str(error) and len(str(error)) < MOST_MESSAGE
        return
    assert CostTable.from_json(table.to_json()) == table
    with contextlib.suppress(PlanError):  # no price for a shape, or one that is out of all range
        plan = solve(specs_of([A, B] * 2), Topology.flat(2), table, solver="greedy")
        assert all(0 <= ms < math.inf for row in plan.prices for ms in row.ms)
        assert certify(OwnershipPlan.from_json(plan.to_json())).ok


def foreign() -> str:
    """Other times, of another torch."""
    other = {"key": asdict(replace(KEY, torch="1.0")), "digest": None}
    data = json.loads(cache_file().replace("1.7", "2.7")) | other
    return json.dumps(data | {"digest": sha256(data)})


@settings(many, max_examples=30)
@given(damaged(cache_file()))
@example("[" * 100_000)
@example("")
@example(foreign())
@example(cache_file().replace("1.7", "2.7"))  # a time, but not what was measured
def test_a_damaged_or_foreign_cache_is_never_believed_and_made_anew(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, KEY.file_name())
        path.write_text(cache_file())
        good, problem = read_cache(folder, KEY)
        assert problem is None and good.entries == TINY.entries
        path.write_text(text)
        found, problem = read_cache(folder, KEY)
        if found != good:
            assert found is None and str(path) in problem and "ignored" in problem
        assert add_to_cache(folder, KEY, CostTable("newer", {A: {1: 9.0}})) is None
        again, problem = read_cache(folder, KEY)
        assert problem is None and again.entries[A][1] == 9.0


def test_a_problem_beyond_all_bounds_is_too_large_to_verify(tmp_path, capsys):
    ranks, shapes = 50_000, 2_100
    keys = [(1 + i, 2_101, "float32") for i in range(shapes)]
    data = json.loads(plan_of(specs_of(keys), [0] * shapes, ranks).to_json())
    data["prices"] = [[key, [1.0], ["given"], []] for key in keys]
    data["limits"] |= {
        "domains": [list(range(ranks)), [0, 1]], "domain_of": [i % 2 for i in range(shapes)],
    }  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert main(["plan", "--verify", str(path)]) == 2
    told = "too large to plan or to verify: 105,000,000 shapes"
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_crash_has_a_status_of_its_own(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(PLAN)
    assert main(["plan", "--verify", str(path)]) == 0 and capsys.readouterr()
    for defect in (RecursionError("deep"), MemoryError(), KeyError("x")):
        with mock.patch("dmuon.scheduler.certificate.build_problem", side_effect=defect):
            status = main(["plan", "--verify", str(path)])
        out, err = capsys.readouterr()
        assert (status, out) == (CRASHED, "")
        assert "Traceback" in err and type(defect).__name__ in err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    page = Path(__file__).parents[2].joinpath("docs", "plan-command.md").read_text()
    assert "3 for a crash" in told and f"| {CRASHED} |" in page
