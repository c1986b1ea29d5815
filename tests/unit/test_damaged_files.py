"""Plans, cost tables and caches with damage: a clear error, or a verdict that is right.

Files start as the library writes them, of several models, solvers and layouts. What is done to them
is drawn by hypothesis: keys deleted, repeated and renamed, entries swapped and copied, numbers and
types changed, texts truncated, bytes flipped, lists nested. Whatever is then still called valid is
recomputed from the file's JSON alone, without the library.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import socket
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dmuon.__main__ import CRASHED, main
from dmuon.config import PlannerOptions
from dmuon.report.data import build_report
from dmuon.scheduler import bound, problem
from dmuon.scheduler.certificate import Certificate, certify
from dmuon.scheduler.costs import (
    ANALYTIC_DEVICES,
    CacheKey,
    CostTable,
    add_to_cache,
    read_cache,
)
from dmuon.scheduler.json_files import sha256
from dmuon.scheduler.plan import OwnershipPlan, fitted_plan
from dmuon.scheduler.problem import build_problem
from dmuon.scheduler.solve import solve
from dmuon.scheduler.specs import ITEM_SIZE, OwnerLimits
from dmuon.scheduler.topology import MAX_RANKS, Topology
from dmuon.types import Layout, PlanError, SizeError
from tests.unit.models import plan_of, sealed, specs_of

A, B, C = (64, 64, "float32"), (64, 256, "float32"), (128, 128, "bfloat16")
MOST_PAIRS = 20_000_000  # of knapsacks, in one verdict
MOST_MESSAGE = 1_500

# ---- files as the library writes them ----------------------------------------------------

GRAM = "gram[2]/torch/float16"
GROUPED = CostTable(
    "grouped",
    {A: {1: 1.0, 2: 1.7}, B: {1: 2.0, 2: 3.6}, C: {1: 1.5}},
    ANALYTIC_DEVICES["h100"],
    entry_origin="measured",
    kernels={A: {1: GRAM, 2: GRAM}, B: {1: GRAM, 2: GRAM}, C: {1: "standard/torch/float16"}},
)
TINY = CostTable("tiny", {A: {1: 3.0, 2: 5.0, 3: 8.0}, B: {1: 2.0, 2: 4.0}})


@cache
def plans() -> tuple[OwnershipPlan, ...]:
    h100 = CostTable.analytic("h100")
    loads = {"fixed_ms": (0.1, 0.0, 0.2, 0.0), "fixed_bytes": (5, 0, 0, 9)}
    capped = OwnerLimits(**loads, memory_bytes=1_000_000)
    domains = OwnerLimits(domains=((0, 1, 2, 3), (2, 3), (1,)), domain_of=(0, 1, 2) * 3)
    mesh, on_nodes = (
        Topology((2, 2), ("node", "gpu"), 2),
        Topology.on_nodes((3,), ("dp",), [0, 1, 0]),
    )
    boundless = PlannerOptions(owner_memory_bytes=10**30, max_batch=40)
    flat = Topology.flat
    return (
        solve(specs_of([A] * 4 + [B] * 2), flat(3), TINY),
        solve(specs_of([A, A, B, B, A]), flat(2), TINY, solver="round_robin"),
        solve(specs_of([A, B, C] * 5, rest=2), flat(4), h100, solver="milp", limits=capped),
        solve(specs_of([A, B, C] * 3), mesh, h100, solver="greedy", limits=domains,
              layout=Layout.SHARDED),
        solve(specs_of([A, B] * 4 + [C]), on_nodes, GROUPED),
        solve(specs_of([], rest=2), flat(2), h100),
        # A cap beyond all memory, and large batches.
        solve(specs_of([A] * 30), flat(2), h100, options=boundless),
    )  # fmt: skip


KEY = CacheKey("Some GPU (80 GB)", "2.13.0", "torch-1", "float16", 5)


@cache
def cache_file() -> str:
    with tempfile.TemporaryDirectory() as folder:
        add_to_cache(folder, KEY, GROUPED)
        return Path(folder, KEY.file_name()).read_text()


# ---- damage ------------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 7, 0.5, -0.0, 1e-300, 1e15, 1e16, 1e308, math.inf, math.nan]
    + [2**31, 2**53 + 1, 2**62, 2**63, 10**30, 10**400, -(10**30), "", "x", "3", "\ud800"]
    + ["optimal", "gram[9]/torch/float32", [], {}, [[]], [0], [1.0, 2.0], {"x": 1}, "y" * 5_000]
)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of what is directly inside."""
    if isinstance(data, dict):
        return [(data, key) for key in data]
    return [(data, i) for i in range(len(data))] if isinstance(data, list) else []


def pick(draw: st.DrawFn, data: Any) -> tuple[Any, Any]:
    """A place in the tree: every field has a chance, however many entries another one has."""
    here = places(data)[draw(st.integers(0, len(places(data)) - 1))]
    while places(here[0][here[1]]) and draw(st.integers(0, 3)):
        inside = places(here[0][here[1]])
        here = inside[draw(st.integers(0, len(inside) - 1))]
    return here


def alike(draw: st.DrawFn, value: Any) -> Any:
    """Another value of the same type: what only a verdict can find."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from([0, 1, 2, value + 1, max(value - 1, 0), value * 3 // 2]))
    if isinstance(value, float):
        return value * draw(st.sampled_from([0.0, 0.5, 0.99, 1.000001, 1.01, 2.0]))
    if isinstance(value, str):
        return draw(st.sampled_from(["optimal", "feasible", "sharded", "float32", GRAM, ""]))
    if isinstance(value, list) and value:
        return draw(
            st.sampled_from([value[1:], value[::-1], value[:1] * len(value), value + value])
        )
    return value


def damage_tree(draw: st.DrawFn, data: Any) -> None:
    of, key = pick(draw, data)
    what = draw(st.sampled_from(["alike", "alike", "alike", "value", "delete", "swap", "copy"]))
    if what == "alike":
        of[key] = alike(draw, of[key])
    elif what == "value":
        of[key] = copy.deepcopy(draw(LEAVES))
    elif what == "delete":
        del of[key]
    elif what == "swap":
        there, other = pick(draw, data)
        of[key], there[other] = copy.deepcopy(there[other]), copy.deepcopy(of[key])
    elif isinstance(of, list):
        of.insert(draw(st.integers(0, len(of))), copy.deepcopy(of[key]))
    else:
        name = draw(st.sampled_from(["unknown", "node_of", *of]))
        of[name] = copy.deepcopy(of[key])


def damage_text(draw: st.DrawFn, text: str) -> str:
    at = draw(st.integers(0, len(text) - 1))
    odd = ["", "[", "{", '"', "\\", ",", "-", "\x00", "9" * 5_000, deep(500)]
    here = draw(st.sampled_from(odd))
    if draw(st.booleans()):
        return text[:at] + here + text[at + draw(st.integers(0, 2)) :]
    name = draw(st.sampled_from(re.findall(r'"[a-z_]+": ', text) or ['"x": ']))
    return text[:at] if not here else text.replace(name, f"{name}null, {name}", 1)


@st.composite
def damaged(draw: st.DrawFn, files: Callable[[], tuple[str, ...]]) -> tuple[int, str]:
    """Which file, and its text with one to three damages."""
    number = draw(st.integers(0, len(files()) - 1))
    data = json.loads(files()[number])
    for _ in range(draw(st.integers(1, 3))):
        if places(data):
            damage_tree(draw, data)
    is_plan = isinstance(data, dict) and "digest" in data and "key" not in data
    text = sealed(data) if is_plan and draw(st.integers(0, 3)) else json.dumps(data)
    return number, damage_text(draw, text) if draw(st.integers(0, 3)) == 0 else text


def plan_texts() -> tuple[str, ...]:
    given = (replace(plan, search=replace(plan.search, seconds=0.25)) for plan in plans())
    return tuple(plan.to_json() for plan in given)


def cost_texts() -> tuple[str, ...]:
    return GROUPED.to_json(), TINY.to_json(), cache_file()


many = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


# ---- what a plan says, from its JSON alone -------------------------------------------------


def key_of(matrix: list[Any]) -> tuple[int, int, str]:
    _, _, rows, cols, dtype, *_ = matrix
    return min(rows, cols), max(rows, cols), dtype


def makespan_of(data: dict[str, Any]) -> float:
    """Milliseconds of the busiest rank, by the prices of its batches."""
    matrices, world = data["specs"]["matrices"], math.prod(data["topology"]["shape"])
    price = {tuple(key): ms for key, ms, *_ in data["prices"]}
    loads = list(data["limits"]["fixed_ms"]) or [0.0] * world
    for owner, members, *_ in data["batches"]:
        loads[owner] += price[key_of(matrices[members[0]])][len(members) - 1]
    return max(loads)


def check_owners(data: dict[str, Any]) -> None:
    """Each matrix once, on a rank that may own it, within the cap."""
    matrices, limits = data["specs"]["matrices"], data["limits"]
    owned = Counter(i for _, members, *_ in data["batches"] for i in members)
    assert owned == Counter(range(len(matrices)))
    world = math.prod(data["topology"]["shape"])
    stored = list(limits["fixed_bytes"]) or [0] * world
    for owner, members, *_ in data["batches"]:
        for i in members:
            if limits["domains"]:
                assert owner in limits["domains"][limits["domain_of"][i]]
            _, _, rows, cols, dtype, *_ = matrices[i]
            stored[owner] += (data["layout"] != "sharded") * rows * cols * ITEM_SIZE[dtype]
    assert limits["memory_bytes"] is None or max(stored) <= limits["memory_bytes"]


def check_verdict(text: str, certificate: Certificate) -> None:
    """What is called proven is true of the JSON."""
    assert str(certificate)
    data = json.loads(text)
    if not certificate.ok:
        return
    check_owners(data)
    if not certificate.proven:
        assert not data["prices"] or data["proof"] is None
        return
    makespan, proven = makespan_of(data), certificate.lower_bound_ms
    tolerance = 1e-6 * makespan + 1e-6
    assert certificate.makespan_ms == pytest.approx(makespan, abs=tolerance)
    assert data["lower_bound_ms"] <= min(makespan, proven) + tolerance
    assert data["status"] != "optimal" or proven >= makespan - tolerance


@contextlib.contextmanager
def bounded_work(most: int = MOST_PAIRS) -> Iterator[None]:
    """At most so many pairs are formed by knapsacks inside."""
    formed, products = 0, problem._products

    def counted(points: Any, taken: Any, *args: Any) -> Any:
        nonlocal formed
        formed += len(points) * len(taken)
        assert formed <= most
        return products(points, taken, *args)

    with mock.patch.object(problem, "_products", counted):
        yield


def test_undamaged_plans_hold():
    for plan in plans():
        certificate = certify(plan)
        assert certificate.ok and certificate.proven
        check_verdict(plan.to_json(), certificate)


@many
@given(damaged(plan_texts))
def test_a_damaged_plan_is_refused_or_judged_rightly(case):
    number, text = case
    try:
        plan = OwnershipPlan.from_json(text)
    except PlanError as error:
        assert str(error).startswith("not an ownership plan: ") and len(str(error)) < MOST_MESSAGE
        return
    assert plan.topology.world <= MAX_RANKS
    assert OwnershipPlan.from_json(plan.to_json()) == plan
    assert plan.fingerprint() and plan.makespan_ms >= 0 and max(plan.state_bytes) >= 0
    with bounded_work():
        try:
            certificate = certify(plan)
        except SizeError as error:
            assert "too large" in str(error)
            return
    check_verdict(text, certificate)
    good = plans()[number]
    try:
        fitted = fitted_plan(plan, good.specs, good.topology, good.layout)
    except PlanError:
        return
    assert str(build_report(fitted))  # `dedicate_params` would use it


def edited(data: Any) -> Iterator[None]:
    """Changes every value of a tree in turn, and changes it back."""
    for of, key in places(data):
        value = of[key]
        yield from edited(value)
        if isinstance(value, str):
            of[key] = f"{value}."
        elif isinstance(value, list | dict):
            of[key] = type(value)() if value else [1]
        else:
            of[key] = not value if isinstance(value, bool) or value is None else value + 1
        yield
        of[key] = value


@pytest.mark.parametrize("number", [2, 3])
def test_every_edit_of_a_saved_plan_is_found(number):
    """Of what no price or proof shows, too: sources, notes, engines, alternatives, bytes."""
    data = json.loads(plan_texts()[number])
    edits = 0
    search = data["search"]
    search["seconds"] += 1.0
    OwnershipPlan.from_json(json.dumps(data))
    seconds = search.pop("seconds")
    for _ in edited(data):
        edits += 1
        now = data["search"]
        timed = data | {"search": now | {"seconds": seconds} if isinstance(now, dict) else now}
        with pytest.raises(PlanError):
            OwnershipPlan.from_json(json.dumps(timed))
    assert edits > 200
    better = data | {"search": search | {"note": "better than it looks", "seconds": seconds}}
    with pytest.raises(PlanError, match=r"its digest is not that.*plan again, or change"):
        OwnershipPlan.from_json(json.dumps(better))


# ---- what is no file -----------------------------------------------------------------------


def make_socket(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)  # the path itself may be too long


@pytest.mark.parametrize(
    "make", [os.mkfifo, make_socket, Path.mkdir, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_file_is_not_waited_for(make, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(tmp_path, KEY.file_name())
    make(path)
    table, problem = read_cache(tmp_path, KEY)
    assert table is None and "it is not a regular file" in problem and str(path) in problem
    assert "it is not a regular file" in add_to_cache(tmp_path, KEY, GROUPED)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for arguments in (["--verify", str(path)], ["--model", str(path) + "/", "--mesh", "2"]):
        assert main(["plan", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(PlanError, match="it is not a regular file"):
        CostTable.load(path)


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path):
    path = Path(tmp_path, KEY.file_name())
    names = [f".{path.name}.{i}.tmp" for i in range(2)] + [".other.json.0.tmp", "kept.tmp"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in (names[0], *names[2:]):
        os.utime(tmp_path / name, (0, 0))
    assert add_to_cache(tmp_path, KEY, GROUPED) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, *names[1:]])


@pytest.mark.parametrize("flag", ["--save", "--json", "--html"])
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
    report = build_report(plan)
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


# ---- cost tables and the cache -----------------------------------------------------------


@settings(many, max_examples=60)
@given(damaged(cost_texts))
def test_a_damaged_cost_table_is_refused_or_gives_prices(case):
    _, text = case
    try:
        table = CostTable.from_json(text, "costs='x.json'")
    except PlanError as error:
        assert "costs='x.json'" in str(error) and len(str(error)) < MOST_MESSAGE
        return
    assert CostTable.from_json(table.to_json()) == table
    try:
        plan = solve(specs_of([A, B, C] * 2), Topology.flat(2), table, solver="greedy")
    except PlanError:
        return  # no price for a shape, or one that is out of all range
    assert all(0 <= ms < math.inf for row in plan.prices for ms in row.ms)
    certificate = certify(OwnershipPlan.from_json(plan.to_json()))
    assert certificate.ok
    check_verdict(plan.to_json(), certificate)


def foreign() -> str:
    """Other times, of another torch."""
    other = {"key": asdict(replace(KEY, torch="1.0")), "digest": None}
    data = json.loads(cache_file().replace("1.7", "2.7")) | other
    return json.dumps(data | {"digest": sha256(data)})


@settings(many, max_examples=60)
@given(damaged(lambda: (cache_file(),)))
@example((0, "[" * 100_000))
@example((0, ""))
@example((0, foreign()))
@example((0, cache_file().replace("1.7", "2.7")))  # a time, but not what was measured
def test_a_damaged_or_foreign_cache_is_never_believed_and_made_anew(case):
    _, text = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, KEY.file_name())
        path.write_text(cache_file())
        good, problem = read_cache(folder, KEY)
        assert problem is None and good.entries == GROUPED.entries
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        found, problem = read_cache(folder, KEY)
        if found != good:
            assert found is None and str(path) in problem and "ignored" in problem
        assert add_to_cache(folder, KEY, CostTable("newer", {A: {1: 9.0}})) is None
        again, problem = read_cache(folder, KEY)
        assert problem is None and again.entries[A][1] == 9.0


# ---- files made to take long -------------------------------------------------------------


def hostile(**changes: Any) -> str:
    data = json.loads(plan_texts()[0])
    for path, value in changes.items():
        *steps, last = path.split("__")
        place = data
        for step in steps:
            place = place[step]
        place[last] = value
    return json.dumps(data)


SECONDS = hostile(search__seconds=0)


@pytest.mark.parametrize(("text", "message"), [
    (deep(100_000), "expected JSON, found"),
    ("[" * 1_000_000, "expected JSON, found"),
    (hostile(search__note="X").replace('"X"', deep(100)), "note: expected a text.*found a list"),
    (hostile(search__note="X").replace('"engine"', f'"a": {deep(99)}, "engine"'), "digest"),
    ("[" + "0," * 9_000_000 + "0]", "9,000,001 values, expected at most 8,000,000"),
    (" " * (64 << 20) + "{}", "67,108,866 characters, expected at most 67,108,864"),
    (hostile(topology__shape=[10**9]), "at most 100,000 ranks"),
    (hostile(topology__shape=[10**5] * 2, topology__axes=["a", "b"]), "at most 100,000 ranks"),
    (hostile(search__seconds=10**30), "seconds: expected a number"),
    (SECONDS.replace('"seconds": 0', '"seconds": 1e999'), r"infinite.*1e999"),
    (hostile(search__seconds=math.nan), "NaN"),
    (hostile(search__seconds=10**400), "seconds: expected a number"),
    (SECONDS.replace('"seconds": 0', f'"seconds": {"9" * 5_000}'), "digits|expected a number"),
    (SECONDS.replace('"seconds": 0', '"seconds": 0, "seconds": 1'), "'seconds' twice"),
    (hostile(search__note=["x"]), r"note: expected a text.*found a list"),
    (hostile(specs__parameters=7), "specs.parameters: expected a list, found 7"),
])  # fmt: skip
def test_what_would_take_memory_or_time_is_refused_before_it_does(text, message):
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match=message):
            OwnershipPlan.from_json(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(text) + 10_000_000


def by_hand(keys: list[tuple[int, int, str]], world: int, **limits: Any) -> dict[str, Any]:
    """A plan of all matrices on rank 0, without a solver: its data."""
    data: dict[str, Any] = json.loads(plan_of(specs_of(keys), [0] * len(keys), world).to_json())
    data["prices"] = [[key, [1.0], ["given"], []] for key in dict.fromkeys(keys)]
    data["limits"] |= limits
    return data


def test_many_unlike_domains_are_verified_with_bounded_work():
    """60 shapes in 40 domains, prices and duals that leave every knapsack crowded."""
    shapes, count = 60, 20
    keys = [(64 + 8 * s, 300 + 7 * s, "float32") for s in range(shapes) for _ in range(count)]
    domains = [[r for r in range(80) if (r * 7 + p * 11) % 83 % 2] for p in range(40)]
    domain_of = [i // count % 40 for i in range(len(keys))]
    data = by_hand(keys, 80, domains=domains, domain_of=domain_of)
    for s, price in enumerate(data["prices"]):
        price[1] = [(k + 1) * (1 + (s * 37 + k * 61) % 97 / 3_000) for k in range(count)]
        price[2] *= count
    values = [10**9 + s * 7_919_000 % 10**7 for s in range(shapes)]
    data |= {"proof": [[values, [0] * shapes], -1], "lower_bound_ms": 1_000.0}
    plan = OwnershipPlan.from_json(sealed(data))
    prices = {row.key: row.ms for row in plan.prices}
    problem = build_problem(plan.specs.matrices, plan.topology.world, plan.limits, prices)
    assert len(problem.shapes) == shapes and len({c.allowed for c in problem.classes}) > 50
    bounds = []
    for most in (0, 500_000, 2_000_000):
        with mock.patch.object(bound, "_KNAPSACKS", most), bounded_work(most * 11 // 10):
            certificate = certify(plan)
        assert not certificate.ok and "its price is" in str(certificate)
        bounds.append(certificate.lower_bound_ms)
    assert 0 < bounds[0] <= bounds[1] <= bounds[2]  # coarser knapsacks prove less
    mean = sum(min(ms / (k + 1) for k, ms in enumerate(p[1])) for p in data["prices"]) * count / 80
    assert bounds[0] > mean / 2


def test_a_problem_beyond_all_bounds_is_too_large_to_verify(tmp_path, capsys):
    ranks, shapes = 50_000, 2_100
    keys = [(1 + i, 2_101, "float32") for i in range(shapes)]
    domain_of = [i % 2 for i in range(shapes)]
    data = by_hand(keys, ranks, domains=[list(range(ranks)), [0, 1]], domain_of=domain_of)
    path = tmp_path / "plan.json"
    path.write_text(sealed(data))
    told = r"too large to plan or to verify: 105,000,000 shapes"
    with pytest.raises(SizeError, match=told):
        certify(OwnershipPlan.from_json(path.read_text()))
    assert main(["plan", "--verify", str(path)]) == 2
    assert "too large" in capsys.readouterr().err


def test_a_crash_has_a_status_of_its_own(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan_texts()[0])
    assert main(["plan", "--verify", str(path)]) == 0 and capsys.readouterr()
    for defect in (RecursionError("deep"), MemoryError(), KeyError("x")):
        with mock.patch("dmuon.scheduler.certificate.proven", side_effect=defect):
            status = main(["plan", "--verify", str(path)])
        out, err = capsys.readouterr()
        assert (status, out) == (CRASHED, "")
        assert "Traceback" in err and type(defect).__name__ in err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    page = Path(__file__).parents[2].joinpath("docs", "plan-command.md").read_text()
    assert "3 for a crash" in told and f"| {CRASHED} |" in page
