"""The simulation of a training step: its collectives, its clock, its program, and its command."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dmuon
import dmuon.scheduler.network as network
import dmuon.tools.simulate as tool
from benchmarks import simulate as measured
from benchmarks.results import read_rows
from dmuon.__main__ import main
from dmuon.catalogue import model_specs
from dmuon.scheduler.costs import CostTable, Rates
from dmuon.scheduler.shards import evenly_sharded
from dmuon.scheduler.simulate import (
    DEVICE,
    Exchange,
    Group,
    Load,
    Machine,
    Run,
    adamw,
    block_step,
    blocks_of,
    collective,
    full_step,
    owners_step,
    redundant_step,
    simulate,
)  # fmt: skip
from dmuon.scheduler.solve import solve
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError
from tests import layout_theory as theory
from tests.fake_cuda import llama, rank_of

RATES = Rates(1e14, 1e12, 1e12, 0.0, 0.0, 0.0)
GPU = Machine(RATES, 1e11, 1e10, is_cpu=False)
CPU = replace(GPU, is_cpu=True)
H100 = CostTable.analytic("h100", momentum=False)
LOAD = Load(1024, 1024)


def job(
    layout=Layout.SHARDED, shape=(8,), each=4, model="gpt2", machine=GPU, costs=H100, load=LOAD,
    **how,
):  # fmt: skip
    axes = ("replicate", "shard")[-len(shape) :]
    topology, specs = Topology(shape, axes, each, "cuda"), model_specs(model, "float32")
    shards = evenly_sharded(specs, topology, load.ep, load.tp, whole=layout is not Layout.SHARDED)
    limits = None if layout.keeps_state_at_owners else shards.limits(None)
    plan = solve(specs, topology, costs, layout=layout, limits=limits)
    return network.job_of(plan, shards, costs, machine, load, **how)


# ---- bytes ---------------------------------------------------------------------------------


def sent(of, name) -> float:
    return sum(e.sent for b in of.buckets for e in (b.gather, *b.turns) if e.purpose == name)


def expected(of, shards: int, replicas: int = 1) -> dict[str, float]:
    matrices = theory.Matrices.of(int(of.work.whole), 4, updates=2)
    return theory.sharded(matrices, shards, replicas)


@pytest.mark.parametrize(("shape", "each"), [((8,), 8), ((8,), 2), ((2, 4), 4), ((4, 2), 2)])
def test_routes_carry_what_theory_says(shape, each):
    of = job(shape=shape, each=each)
    theirs = expected(of, shape[-1], math.prod(shape[:-1]))
    for name in ("gather", "scatter", "replicate"):
        assert sent(of, name) == pytest.approx(theirs[name], rel=1e-9), name


def test_what_layouts_publish_and_frameworks_move():
    whole = job().work.whole
    matrices = theory.Matrices.of(int(whole), 4, updates=2)
    of = job(Layout.REPLICATED, each=8)
    assert sent(of, "updates") == pytest.approx(theory.replicated(matrices, 8)["updates"])
    of = job(Layout.REDUCED, each=8)
    assert sent(of, "updates") == pytest.approx(theory.replicated(matrices, 8)["updates"])
    # FSDP2, with replicas, of all parameters.
    of = job(shape=(2, 4))
    every = theory.Matrices.of(sum(p.numel for p in model_specs("gpt2").parameters), 4)
    moved = theory.fsdp(every, 4, 2)
    assert sum(e.sent for b in of.blocks for e in of.gathers(b)) == pytest.approx(moved["forward"])
    reduced = [e for b in of.blocks for e in of.reductions(b)]
    for purpose, key in (("FSDP", "gradients"), ("HSDP", "gradients across replicas")):
        found = sum(e.sent for e in reduced if e.purpose.startswith(purpose))
        assert found == pytest.approx(moved[key]), purpose


def test_what_dedicated_moves():
    of = job(Layout.DEDICATED, shape=(2, 4), load=replace(LOAD, used=2, reduced=4))
    matrices = theory.Matrices.of(int(of.work.whole), 4, used=2)
    expected = theory.dedicated(matrices, 4, 2)
    sent = defaultdict(float)
    for block in of.blocks:
        for each in (*of.gathers(block), *of.reductions(block), of.to_owners(block)):
            sent[each.purpose] += each.sent
    assert sent["weights"] == pytest.approx(expected["forward"])
    for purpose in ("gradients", "gradients across replicas"):
        assert sent[purpose] == pytest.approx(expected[purpose])
    published = sum(of.to_holders(block).sent for block in of.blocks)
    assert published == pytest.approx(expected["publish"])
    # FSDP2 with replicas has the rest.
    rest = theory.Matrices.of(sum(p.numel for p in specs_of("gpt2", "adamw")), 4, used=2)
    of_rest = theory.fsdp(rest, 4, 2)
    assert sent["FSDP all-gather"] == pytest.approx(of_rest["forward"])
    assert sent["gradients of the rest"] == pytest.approx(of_rest["gradients"])
    assert sent["HSDP all-reduce"] == pytest.approx(of_rest["gradients across replicas"])


def specs_of(model, algorithm):
    specs = model_specs(model)
    some = specs.adamw_parameters() if algorithm == "adamw" else specs.muon_parameters()
    return [specs.parameters[i] for i in some]


@pytest.mark.parametrize(
    ("purpose", "how", "program"),
    [
        ("verdict", {}, full_step), ("verdict", {}, owners_step),
        ("clipping", {"clips": True}, adamw),
        ("scatter", {}, full_step), ("replicate", {}, full_step),
        ("weights to holders", {}, owners_step), ("gradients across replicas", {}, owners_step),
    ],
)  # fmt: skip
def test_nothing_is_forgotten(purpose, how, program, monkeypatch):
    """Where one purpose alone takes 50 ms more, so does the step, once or more."""
    layout = Layout.DEDICATED if program is owners_step else Layout.SHARDED
    of = job(layout, shape=(2, 4), **how)
    before = simulate(of, program).ms
    whole = Machine.ms

    def slow(machine, exchange):
        return whole(machine, exchange) + 50 * (exchange.purpose == purpose)

    monkeypatch.setattr(Machine, "ms", slow)
    assert simulate(of, program).ms >= before + 49


def test_collectives():
    for op in ("all_gather", "all_reduce"):
        found = collective("", op, 800.0, Group(8, 4), is_gloo=False)
        assert found.sent == pytest.approx(theory.received(op, 800, 8))
    # Of a reduce-scatter gloo makes an all-reduce: measured on the links of emulated nodes.
    gloo, nccl = (
        collective("", "reduce_scatter", 800, Group(4, 1), is_gloo=g) for g in (True, False)
    )
    assert gloo.sent == 2 * nccl.sent == theory.received("all_reduce", 800, 4)
    assert collective("", "all_gather", 800, Group(4, 4), is_gloo=False).across == 0
    assert not collective("", "all_gather", 800, Group(1, 1), is_gloo=False)
    # Four rings leave a node of four, each at another rank.
    assert collective("", "all_gather", 800, Group(8, 4), is_gloo=False).across == 700 / 4


# ---- the clock -----------------------------------------------------------------------------

MS = 1e7  # bytes that take a millisecond across nodes
FAR = Exchange("far", 1, 1, 0.0, MS, MS)


def test_what_travels_hides_behind_computing():
    run = Run(GPU, 2)
    first = run.send("a", FAR)
    run.compute("work", "work", np.array([0.25, 3.0]))
    second = run.send("b", FAR)  # once the slower one has come to it
    run.wait(first)
    assert run.now.tolist() == [1.0, 3.0]
    run.wait(second)
    assert run.now.tolist() == [4.0, 4.0]
    run.compute("more", "work", np.array([0.5, 1.0]))
    assert run.parts() == {"work": 4.0, "wait for far": 1.0}
    assert run.critical_path() == {"work": 4.0, "far": 1.0}


def test_on_gloo_what_is_under_way_shares_a_wire():
    run = Run(CPU, 1)
    first = run.send("a", FAR)
    run.compute("work", "work", 0.5)
    second = run.send("b", FAR)  # half of the first one is left
    run.wait(first)
    assert run.now.tolist() == [1.5]
    third = run.send("c", FAR)  # half of the second one
    run.wait(third)
    assert run.now.tolist() == [3.0]
    run.wait(second)
    assert [float(run.spans[n].end[0]) for n in (first, second, third)] == [1.5, 2.5, 3.0]
    run.exchange("d", FAR)
    assert run.now.tolist() == [4.0]


def test_the_host_may_be_what_is_slow():
    slow = replace(GPU, rates=replace(RATES, call_s=1e-3))
    run = Run(slow, 1)
    run.compute("small", "work", 0.5, calls=10)
    run.compute("large", "work", 20.0, calls=1)
    assert run.now.tolist() == [30.0]
    assert run.parts() == {"work": 20.5, "host": 9.5}
    run = Run(replace(slow, is_cpu=True), 1)  # where the host computes
    run.compute("small", "work", 0.5, calls=10)
    assert run.now.tolist() == [10.5]


@pytest.mark.parametrize("program", [adamw, full_step, block_step, redundant_step])
@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
def test_parts_and_critical_path_add_up(program, machine):
    step = simulate(job(machine=machine, model="llama3.2-1b", clips=True), program)
    assert sum(step.parts.values()) == pytest.approx(step.ms)
    assert sum(step.critical_path.values()) == pytest.approx(step.ms)


# ---- the program ---------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "replicas"), [(8, 1), (16, 4)])
def test_collectives_are_issued_in_the_order_of_the_step(world, replicas):
    """And as many calls of the host as a step on fake CUDA tensors dispatches."""
    with rank_of(llama(32), world, replicas=replicas) as rank:
        for _ in range(2):
            rank.sent.clear()
            count = rank.step()
        plan, shards = rank.engine._runtime.plan, rank.engine._runtime.shards
        tags = [tag for tag, _ in rank.sent]
    of = network.job_of(plan, shards, H100, replace(GPU, rates=replace(RATES, call_s=1e-6)), LOAD)
    run = Run(of.machine, len(of.work.matrices))
    full_step(run, of, None)
    names = {"verdict": "norms"}
    carried = dict.fromkeys((span.name, span.kind) for span in run.spans if span.on != DEVICE)
    issued = [names.get(kind, kind) for _, kind in carried]  # both levels carry some
    assert issued == [tag for tag in tags if tag != "rms"]
    calls = float(run.host.max()) / 1e-3
    assert calls == pytest.approx(count.launches, rel=0.25)


def test_operations_of_models():
    specs = model_specs("llama3-8b")
    blocks = blocks_of(specs, Load(1, 0))
    head = 128256 * 4096
    assert len(blocks) == 33 and blocks[0].forward == 2 * head
    layers = sum(m.numel for m in specs.matrices)
    assert sum(b.forward for b in blocks) == 2 * (layers + head)
    assert sum(b.backward for b in blocks) == 4 * (layers + head)
    at_length = blocks_of(specs, Load(10, 8192))[1].forward - 10 * blocks[1].forward
    assert at_length == 2.0 * 8192 * 4096 * 10
    # A head that is tied to the embedding computes; frozen weights take no gradients of their own.
    tied = blocks_of(model_specs("gpt2"), Load(1, 0))[0]
    assert tied.forward >= 2 * 50257 * 768
    with pytest.raises(PlanError, match="--active N"):
        blocks_of(model_specs("qwen3-30b-a3b"), Load(1, 0))
    sparse = blocks_of(model_specs("qwen3-30b-a3b"), Load(1, 0, active=8))
    assert sum(b.forward for b in sparse) == pytest.approx(2 * 3.0e9, rel=0.1)  # its "a3b"


@pytest.mark.parametrize(
    "layout", [Layout.SHARDED, Layout.REPLICATED, Layout.REDUCED, Layout.DEDICATED]
)
def test_every_layout_is_simulated(layout):
    of = job(layout)
    step, other = simulate(of), simulate(replace(of, around=Layout.SHARDED), adamw)
    assert 0 < step.optimizer_ms < step.ms
    assert 0 < step.parts["Newton-Schulz"] <= max(sum(b.ms for b in of.buckets)) + 1e-9
    assert "Newton-Schulz" not in other.parts


def test_experts_tensor_parallelism_and_replicas():
    load = Load(1024, 1024, active=8, ep=4)
    of = job(model="qwen3-30b-a3b", load=load)
    step = simulate(of)
    assert step.parts["wait for experts' tokens"] > 0
    of = job(load=replace(LOAD, tp=4))
    assert (of.groups.tp, of.groups.shards) == (Group(4, 4), Group(2, 1))
    whole = sum(m.numel for m in model_specs("gpt2").matrices)
    assert of.work.matrices.tolist() == pytest.approx([whole / 8] * len(of.work.matrices), rel=0.01)
    assert simulate(of).parts["wait for tensor parallelism"] > 0


# ---- what was measured -----------------------------------------------------------------------

ROWS = read_rows(str(measured.RESULTS / "simulate.json"))


@pytest.fixture(scope="module")
def emulated() -> list[dict]:
    return measured.emulated(measured.tables_of(ROWS))


def test_predictions_are_as_near_as_the_page_says(emulated):
    committed = [row for row in ROWS if row["set"] == "emulated"]
    assert len(committed) == len(emulated) >= 60
    for row, now in zip(committed, emulated, strict=True):
        assert now["predicted_ms"] == pytest.approx(row["predicted_ms"], rel=1e-6), row["case"]
    errors = [measured.error(row) for row in emulated]
    assert measured.quantile(errors, 0.5) <= 0.1 and measured.quantile(errors, 0.9) <= 0.2
    # Beside "Muon is free": what is more than AdamW's step, relative to it.
    others = [row for row in emulated if row["optimizer"] != "AdamW"]
    differences = [measured.difference(row) for row in others]
    null = [row["measured_over_AdamW"] - 1 for row in others]
    assert measured.quantile(differences, 0.5) <= 0.4 * measured.quantile(null, 0.5)


def test_advice_is_within_5_percent_of_the_best_that_was_measured(emulated):
    advice = measured.advised(emulated, measured.tables_of(ROWS))
    assert len(advice) >= 10 and {row["what"] for row in advice} == {"layout", "period"}
    assert [row["case"] for row in advice if row["ratio"] > 1.05] == []


# ---- the command ---------------------------------------------------------------------------

ASKED = ["simulate", "--model", "gpt2", "--mesh", "2x4", "--costs", "analytic:h100",
         "--tokens", "2048"]  # fmt: skip


def test_a_table_of_one_process_does_not_do_for_several(tmp_path, capsys):
    path = str(tmp_path / "costs.json")
    alone = replace(RATES, turn_s=0.0, sent_s=0.0)
    table = CostTable.analytic("cpu")
    asked = ["simulate", "--model", "gpt2", "--costs", path]
    replace(table, rates=alone).save(path)
    assert main([*asked, "--mesh", "2x1"]) == 2 and "one process" in capsys.readouterr().err
    replace(table, rates=replace(alone, turn_s=1e-4)).save(path)
    assert main([*asked, "--mesh", "2x1"]) == 2 and "--nic 1Gb/node" in capsys.readouterr().err
    assert main([*asked, "--mesh", "2x1", "--nic", "1Gb/node", "--tokens", "64"]) == 0


def test_the_command(capsys, tmp_path):
    trace, numbers = (str(tmp_path / name) for name in ("t.json", "n.json"))
    more = ["--period", "5", "--trace", trace, "--json", numbers]
    assert main([*ASKED, *more]) == 0
    text = capsys.readouterr().out
    assert "on average with P = 5" in text and "critical path of full step" in text
    found = json.loads(Path(numbers).read_text())
    steps = found["steps"]
    assert list(steps) == ["adamw", "full step", "block step"]
    mean = steps["full step"]["ms"] / 5 + steps["block step"]["ms"] * 4 / 5
    assert found["ms"] == pytest.approx(mean)
    assert found["over"] == pytest.approx(mean / steps["adamw"]["ms"])
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"} and len(events) > 50
    end = max(event["ts"] + event["dur"] for event in events)
    assert end == pytest.approx(1e3 * steps["full step"]["ms"], rel=0.01)


def test_advised_code_asks_for_what_was_simulated(capsys, monkeypatch):
    """Options that a layout does not know are not in its code."""
    kept: list = []
    real = tool.advised
    monkeypatch.setattr(tool, "advised", lambda args: kept.extend(real(args)) or kept)
    asked = ["--redundancy", "1", "--bucket", "8MiB"]
    assert main([*ASKED, "--advise", *asked]) == 0
    for one, why in kept:
        if why.split()[0] in ("saves", "costs", "changes"):  # other redundancies
            continue
        call = one.code.partition("opt = dmuon.")[2] + ")"
        given = eval(call, {"dmuon": dmuon, "model": None, "Muon": lambda model, **more: more})
        assert bool(given) is one.name.startswith("sharded")
        if given:
            assert given["dedicate"] == {
                "planner": dmuon.PlannerOptions(redundancy=1),
                "options": dmuon.ShardedOptions(bucket_bytes=8 << 20),
            }


def test_advice(capsys, monkeypatch):
    made: dict[str, tool.Setting] = {}
    real = tool.Setting.of

    def of(args, **changed):  # each is simulated once
        key = str(sorted(changed.items()))
        return made.get(key) or made.setdefault(key, real(args, **changed))

    monkeypatch.setattr(tool.Setting, "of", of)
    asked = [*ASKED, "--nic", "10Gb/node", "--advise"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--json", "-"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    every_code = {one.name: one.code for one in made.values()}
    ends = " ".join(text.split()).partition(" the fastest is ")[2]
    best = advice[0]["setting"].partition(", P")[0]
    assert f"With costs {ASKED[ASKED.index('--costs') + 1]} the fastest" in " ".join(text.split())
    assert ends.startswith(advice[0]["setting"]) and " ".join(every_code[best].split()) in ends
    assert ("period=" in ends) is (advice[0]["period"] > 1)
    assert "dedicate=" not in ends and "publish=" not in ends, "what was not asked for"
    codes = {name: code.partition("\n")[0] for name, code in every_code.items()}
    assert codes["sharded, HSDP 2x4"] == (
        "fully_shard(model, mesh=init_device_mesh(device, (2, 4), "
        "mesh_dim_names=('replicate', 'shard')))"
    )
    assert codes["replicated, 8"] == "model = DistributedDataParallel(model)"
    assert "reduce_to_owner=True" in codes["reduce_to_owner, 8"]
    assert 'layout="dedicated"' in codes["dedicated, 8"]
    assert [row["ms"] for row in advice[:-2]] == sorted(row["ms"] for row in advice[:-2])
    names = [row["setting"] for row in advice]
    meshes = ["sharded, 8", "sharded, HSDP 2x4", "sharded, HSDP 4x2"]
    every = {*meshes, "replicated, 8", "reduce_to_owner, 8", "dedicated, 8", "dedicated, 2x4"}
    with_period = [row for row in advice if ", P = " in row["setting"]]
    assert every == {name for name in names[:-2] if ", P = " not in name}
    assert {row["setting"].split(", P")[0] for row in with_period} <= {*meshes}
    assert with_period and all(row["period"] > 1 for row in with_period)
    for row in with_period:
        block = row["steps"]["block step"]["ms"]
        assert row["ms"] <= 1.01 * block or "none of these" in row["why"]
        if row["period"] > 1 and row["ms"] <= 1.01 * block:  # a smaller one is not enough
            smaller = max(p for p in tool._PERIODS if p < row["period"])
            full = row["steps"]["Muon"]["ms"]
            assert full / smaller + block * (1 - 1 / smaller) > 1.01 * block
    assert all(row["why"] for row in advice)
    most = sorted(row["memory"] for row in advice[:-2])[2]
    assert main([*asked, "--fits", f"{most}B", "--json", "-"]) == 0
    fitting = json.loads(capsys.readouterr().out)["advice"]
    assert 0 < len(fitting) < len(advice)
    assert all(row["memory"] <= most for row in fitting)
    assert main([*asked, "--fits", "1KiB"]) == 2
    assert "no layout keeps" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "told"), [
    ("--layout dedicated --period 5", "--period is not for --layout dedicated"),
    ("--costs analytic:cpu", "-m dmuon profile"),
    ("--model qwen3-30b-a3b", "--active N"),
    ("--trace /nowhere/x.json", "no directory"),
    ("--trace -", "give a path"),
    ("--active 8", "no stack of experts"),
    ("--model qwen3-30b-a3b --active 800", "stacks of 128 experts"),
    ("--tp 3", "needs ranks that it divides"),
    ("--tp 4 --layout replicated", "--tp is not for --layout replicated"),
])  # fmt: skip
def test_mistakes(more, told, capsys):
    assert main([*ASKED, *more.split()]) == 2
    assert told in capsys.readouterr().err
