"""Benchmarks of links, without links: plans in other orders, formulas, counters, tables."""

from __future__ import annotations

import doctest
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.layout_theory import Matrices, sharded
from benchmarks.links import (
    ORDERS,
    QUESTIONS,
    contention,
    crowding,
    ddp_links,
    hsdp_links,
    merged,
    reordered,
)
from dmuon.catalogue import model_specs
from dmuon.config import PlannerOptions
from dmuon.scheduler.costs import CostTable, canonical_key
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.solve import solve
from dmuon.scheduler.topology import Topology, launch_order
from dmuon.types import Layout


@pytest.fixture(scope="module", params=[(4, 2, 1), (2, 4, 16), (4, 8, 3)], ids=str)
def plan(request) -> OwnershipPlan:
    nodes, each, max_batch = request.param
    topology = Topology.flat(nodes * each, ranks_per_node=each)
    costs, options = CostTable.analytic("h200"), PlannerOptions(max_batch=max_batch)
    specs = model_specs("gpt2")
    return solve(specs, topology, costs, layout=Layout.SHARDED, options=options, solver="greedy")


def taken(plan: OwnershipPlan) -> list[Counter[tuple]]:
    """For each rank, how many batches of each shape, size and price it has."""
    found = [Counter() for _ in range(plan.topology.world)]
    for batch in plan.batches:
        key = canonical_key(plan.specs.matrices[batch.matrices[0]].key)
        found[batch.owner][key, len(batch.matrices), batch.ms] += 1
    return found


def check_same_work(old: OwnershipPlan, new: OwnershipPlan, order: str) -> None:
    """Every matrix has one owner, in a batch of its shape, and the loads are those of the plan."""
    members = sorted(i for batch in new.batches for i in batch.matrices)
    assert members == list(range(len(old.specs.matrices)))
    for batch in new.batches:
        assert len({canonical_key(new.specs.matrices[i].key) for i in batch.matrices}) == 1
    place = list(range(old.topology.world))
    if order == "row-major":  # ranks exchange what they have
        place = list(old.topology.owner_order())
        assert sorted(place) == list(range(old.topology.world))
    assert taken(new) == [taken(old)[rank] for rank in place]
    assert new.loads_ms == pytest.approx([old.loads_ms[rank] for rank in place])
    assert new.makespan_ms == old.makespan_ms


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_owners_is_the_same_work(plan, order):
    new = reordered(plan, order)
    check_same_work(plan, new, order)
    assert OwnershipPlan.from_json(new.to_json()).fingerprint() == new.fingerprint()
    if order != "XOR":
        assert new.fingerprint() != plan.fingerprint()


def test_a_matrix_that_is_lost_is_noticed(plan):
    new = reordered(plan, "a node's layers")
    batches = list(new.batches)
    other = next(batch for batch in batches if batch.owner != batches[0].owner)
    twice = replace(batches[0], matrices=other.matrices)
    moved = replace(batches[0], owner=other.owner)
    for fault in (twice, moved):
        with pytest.raises((AssertionError, dmuon_error())):
            check_same_work(plan, replace(new, batches=(fault, *batches[1:])), "a node's layers")


def dmuon_error() -> type[Exception]:
    from dmuon.types import PlanError

    return PlanError


def test_orders_separate_and_crowd_owners(plan):
    crowded = {}
    for order in ORDERS:
        new = reordered(plan, order)
        names = launch_order([m.name for m in new.specs.matrices])
        crowded[order] = contention([new.owners[i] for i in names], new.topology)[0]
    assert crowded["XOR"] < crowded["a node's layers"]
    with pytest.raises(ValueError, match="order is 'rows'; expected one of XOR"):
        reordered(plan, "rows")


# Of 8 matrices of 6 x 12 float32 elements: every message between ranks of different nodes, by hand.
NUMEL, MATRICES = 72, 8


def hand_made(nodes: int, each: int, hsdp: bool) -> tuple[float, float]:
    """Bytes out of a node in dmuon's step, mean over nodes; and received by a rank, from all."""
    world = nodes * each
    between = within = 0.0
    shards = each if hsdp else world
    for owner in range(MATRICES):
        owner %= world
        replica = range(owner // each * each, owner // each * each + each) if hsdp else range(world)
        for rank in replica:
            if rank == owner:
                continue
            piece = 2 * 2 * NUMEL / shards  # there and back, of two bytes
            if rank // each == owner // each:
                within += piece
            else:
                between += piece
        if hsdp:
            between += (nodes - 1) * 2 * NUMEL
    return between / nodes, (between + within) / world


@pytest.mark.parametrize("nodes, each", [(2, 2), (2, 4), (4, 2)])
def test_formulas_of_links_count_messages(nodes, each):
    matrices = Matrices.of(NUMEL * MATRICES, updates=2)
    for mesh in ("HSDP", "FSDP2"):
        link, rank = hand_made(nodes, each, mesh == "HSDP")
        step, turn = hsdp_links(f"dmuon, {mesh}", matrices, nodes)
        assert step == pytest.approx(link)
        replicas = nodes if mesh == "HSDP" else 1
        formula = sharded(matrices, nodes * each // replicas, replicas)
        assert sum(formula.values()) == pytest.approx(rank)
        alone = hsdp_links(f"AdamW, {mesh}", matrices, nodes)
        assert alone[0] == 0 and turn == pytest.approx(step + alone[1])
    assert hsdp_links("same-shape buckets, FSDP2", matrices, nodes)[0] == pytest.approx(step)
    gathered = hsdp_links("gather-then-compute, FSDP2", matrices, nodes)[0]
    assert gathered == pytest.approx(2 * NUMEL * MATRICES * (nodes - 1) / nodes)


def test_formulas_of_ddp():
    matrices, part = Matrices.of(100, updates=2), 3 / 4
    found = {name: ddp_links(name, matrices, 4, 1) for name in links.DDP_KINDS}
    assert found == {
        "AdamW, DDP": (0, 800 * part),
        "dmuon, DDP": (200 * part, 1000 * part),
        "dmuon once, DDP": (200 * part, 1000 * part),
        "redundant, DDP": (0, 800 * part),
        "same-shape all-gather, DDP": (400 * part, 1200 * part),
        "dmuon, reduced to owner, DDP": (200 * part, 600 * part),
        "dmuon, reduced to owner": (200 * part, 600 * part),
        "round robin, DDP": (400 * part, 1200 * part),
        "round robin, reduced to owner": (400 * part, 800 * part),
    }
    found = {name: ddp_links(name, matrices, 2, 2) for name in links.DDP_KINDS}
    assert found["dmuon once, DDP"] == (200 / 2, 200 / 2 + 800 * part)
    assert found["same-shape all-gather, DDP"] == (400 * part, 1200 * part)
    assert found["dmuon, reduced to owner"] == (200 / 2, 200 / 2 + 400)
    assert found["round robin, reduced to owner"] == (400 / 2, 400)


def test_crowding_is_of_moments():
    # Two links: alike in sum; in one case at the same time, in the other one after the other.
    both = [(0.02 * t, ((10 * t, 5), (10 * t, 5))) for t in range(11)]
    turns = [(0.02 * t, ((min(10 * t, 50), 5), (max(10 * t - 50, 0), 5))) for t in range(11)]
    assert crowding(both, [(0.0, 1.0)])[0] == 1.0
    assert crowding(turns, [(0.0, 1.0)])[0] == 2.0
    # Only what is inside spans counts, and windows shorter than `WINDOW_S` are joined.
    assert crowding([*turns, (0.3, ((9999, 5), (50, 5)))], [(0.0, 0.25)])[0] == 2.0
    dense = [(t / 2, counts) for t, counts in turns]
    assert crowding(dense, [(0.0, 1.0)])[0] == pytest.approx(1.8)  # one window sees both
    out, into = crowding(both, [(0.0, 0.05), (0.1, 0.2)])
    assert out == 1.0 and into != into


def row(question: str, **own: object) -> links.Row:
    times = {"median_ms": 10.0, "p10_ms": 9.0, "p90_ms": 12.0, "ratio": 1.0, "ratio_to_adamw": 1.2}
    sent = {key: [1_000_000, 2_000_000] for key in ("link_out_bytes", "link_in_bytes")}
    sent |= {f"step_{key}": [500_000, 500_000] for key in sent}
    theory = {"theory_link_bytes": 1_500_000, "step_theory_link_bytes": 400_000, "bytes": 300_000}
    place = {"question": question, "nodes": 2, "ranks_per_node": 2, "rate": "1gbit"}
    parts = {"backward_ms": 5.0, "step_ms": 3.0, "crowd_out": 1.5, "crowd_in": 1.25}
    names = {"set": "a set", "optimizer": "dmuon", "layout": "sharded"}
    return place | names | times | sent | theory | parts | own


def test_tables_show_rows_of_their_question():
    rows = [row(question) for question in QUESTIONS]
    for name, question in QUESTIONS.items():
        lines = question.told(rows).splitlines()
        assert len(lines) == 3 and "| 2 x 2 | 1gbit |" in lines[2], name
        assert "1.00-2.00" in lines[2] and "| 10 (9-12) |" in lines[2]
    assert "| 0.50 | 0.40 | 1.00-2.00 | 1.50 |" in QUESTIONS["hsdp"].told(rows)
    assert "| 1.50 | 1.25 |" in QUESTIONS["placement"].told(rows)


def test_new_rows_replace_those_of_the_same_place(tmp_path, capsys):
    old = [row("ddp", rate="200mbit", optimizer=name) for name in ("b", "a")]
    new = [row("placement"), row("ddp", rate="200mbit", optimizer="a", median_ms=1.0)]
    found = merged(old, new)
    assert [(r["question"], r["optimizer"], r["median_ms"]) for r in found] == [
        ("placement", "dmuon", 10.0), ("ddp", "b", 10.0), ("ddp", "a", 1.0),
    ]  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": found}))
    assert links.main(["--table", str(path)]) == 0
    assert "| 2 x 2 | 200mbit | a | 1 (9-12) |" in capsys.readouterr().out


def test_the_committed_rows_can_be_added_to():
    rows = links.read_rows(str(Path(links.__file__).parent / "results" / "links.json"))
    assert len(merged(rows, [])) == len(rows) > 50


def test_examples_in_docstrings():
    result = doctest.testmod(links)
    assert result.attempted >= 2 and not result.failed
