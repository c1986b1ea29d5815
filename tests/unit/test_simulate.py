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


def sent(*exchanges) -> dict[str, float]:
    """Bytes by purpose."""
    found = defaultdict(float)
    for exchange in exchanges:
        found[exchange.purpose] += exchange.sent
    return found


def one_root(nbytes: float, ranks: int) -> float:
    """Received by a rank, in the mean over all, of a broadcast from one of ``ranks`` or a reduce to
    one: whatever tree or ring carries it, each byte arrives at all ranks but one."""
    return nbytes * (ranks - 1) / ranks


@pytest.mark.parametrize(("shape", "each"), [((8,), 8), ((2, 4), 4), ((4, 2), 2)])
def test_routes_carry_what_theory_says(shape, each):
    """An owner lacks what the other shards of its replica have: that comes and goes back; then each
    element goes once to every other replica."""
    of, shards, replicas = job(shape=shape, each=each), shape[-1], math.prod(shape[:-1])
    found = sent(*(e for b in of.buckets for e in (b.gather, *b.turns)))
    updates = 2 * of.work.whole / math.prod(shape)  # bytes a rank
    for name in ("gather", "scatter"):
        assert found[name] == pytest.approx(one_root(updates, shards)), name
    assert found["replicate"] == pytest.approx(updates * (replicas - 1))


def numel(algorithm: str = "") -> int:
    """Of GPT-2, or of what is updated so."""
    specs = model_specs("gpt2")
    return sum(p.numel for p in specs.parameters if algorithm in p.algorithm.value)


def test_what_layouts_publish_and_frameworks_move():
    for layout in (Layout.REPLICATED, Layout.REDUCED):
        of = job(layout, each=8)
        found = sent(*(e for b in of.buckets for e in b.turns))
        assert found["updates"] == pytest.approx(one_root(2 * of.work.whole, 8))
    # FSDP2, with replicas, of all parameters.
    of, every = job(shape=(2, 4)), 4 * numel()
    gathers = sent(*(e for b in of.blocks for e in of.gathers(b)))
    assert sum(gathers.values()) == pytest.approx(one_root(every, 4))
    reduced = sent(*(e for b in of.blocks for e in of.reductions(b)))
    assert sum(v for k, v in reduced.items() if k[0] == "F") == pytest.approx(one_root(every, 4))
    across = sum(v for k, v in reduced.items() if k[0] == "H")
    assert across == pytest.approx(2 * one_root(every / 4, 2))


def test_what_dedicated_moves():
    of = job(Layout.DEDICATED, shape=(2, 4), load=replace(LOAD, used=2, reduced=4))
    whole, rest = of.work.whole, numel("adamw")
    found = sent(*(
        e for b in of.blocks for e in (*of.gathers(b), *of.reductions(b), of.to_owners(b))
    ))  # fmt: skip
    published = sum(of.to_holders(block).sent for block in of.blocks)
    for bytes_sent, expected in (
        (found["weights"], one_root(2 * whole, 4)),
        (found["gradients"], one_root(4 * whole, 4)),
        (found["gradients across replicas"], one_root(4 * whole / 4, 2)),
        (published, one_root(4 * whole / 4, 2)),
        # FSDP2 with replicas has the rest.
        (found["FSDP all-gather"], one_root(2 * rest, 4)),
        (found["gradients of the rest"], one_root(4 * rest, 4)),
        (found["HSDP all-reduce"], 2 * one_root(4 * rest / 4, 2)),
    ):
        assert bytes_sent == pytest.approx(expected)


@pytest.mark.parametrize(("purpose", "how", "program"), [
    ("verdict", {}, full_step), ("verdict", {}, owners_step),
    ("clipping", {"clips": True}, adamw),
    ("scatter", {}, full_step), ("replicate", {}, full_step),
    ("weights to holders", {}, owners_step), ("gradients across replicas", {}, owners_step),
])  # fmt: skip
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
    for op, most in (("all_gather", 700), ("all_reduce", 1400)):
        assert collective("", op, 800.0, Group(8, 4), is_gloo=False).sent == pytest.approx(most)
    # Of a reduce-scatter gloo makes an all-reduce: measured on the links of emulated nodes.
    for is_gloo, most in ((True, 1200), (False, 600)):
        assert collective("", "reduce_scatter", 800, Group(4, 1), is_gloo=is_gloo).sent == most
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


def test_collectives_are_issued_in_the_order_of_the_step():
    """And as many calls of the host as a step on fake CUDA tensors dispatches."""
    with rank_of(llama(16), 16, replicas=4) as rank:
        for _ in range(2):
            rank.sent.clear()
            count = rank.step()
        plan, shards = rank.engine._runtime.plan, rank.engine._runtime.shards
        tags = [tag for tag, _ in rank.sent]
    of = network.job_of(plan, shards, H100, replace(GPU, rates=replace(RATES, call_s=1e-6)), LOAD)
    run = Run(of.machine, len(of.work.matrices))
    full_step(run, of)
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


def simulated(capsys, *more: str) -> dict:
    assert main([*ASKED, "--json", "-", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_pipeline_of_one_stage_is_no_pipeline(capsys):
    alone, one = simulated(capsys), simulated(capsys, "--pp", "1")
    assert len(one["stages"]) == 1 and one.pop("stages")[0].items() >= {"stage": 0}.items()
    assert alone | {"schedule": "1F1B", "microbatches": 1} == one | {"stages": []}


@pytest.mark.parametrize(("how", "share"), [
    ("--pp 4", 1), ("--pp 4x3", 1 / 3), ("--pp 4 --schedule InterleavedZeroBubble", 1 / 3),
    ("--pp 4x2 --schedule ZBVZeroBubble --recompute", 1 / 4),
])  # fmt: skip
def test_the_bubble_of_a_pipeline(capsys, how, share):
    """Of 4 ranks and 8 microbatches of a sequence, by the formulas that the page cites."""
    of = simulated(capsys, "--tokens", "32768", "--period", "5", *how.split())
    assert (of["microbatches"], len(of["stages"])) == (8, 4)
    for name, step in of["steps"].items():
        each = [stage["steps"][name] for stage in of["stages"]]
        alone, optimizer = [s["ms"] - s["optimizer_ms"] for s in each], step["optimizer_ms"]
        bubble = share * (sum(alone) - max(alone)) / 8
        assert step["parts_ms"]["bubble"] == pytest.approx(bubble)
        assert optimizer == max(s["optimizer_ms"] for s in each)
        sent = step["parts_ms"]["activations between stages"]
        across = Machine.of(H100, Topology((2, 4), ("node", "gpu"), 4, "cuda")).across
        assert sent == pytest.approx(6e3 * (4096 * 768 * 2 / across + 22.4e-6))
        assert step["ms"] == pytest.approx(max(alone) + bubble + sent + optimizer)
        assert sum(step["parts_ms"].values()) == pytest.approx(step["ms"])
    # Without a table of its own, too, a stage attends; a tied head computes once.
    each = [stage["steps"]["adamw"]["parts_ms"]["forward"] for stage in of["stages"]]
    whole = simulated(capsys, "--tokens", "32768")["steps"]["adamw"]["parts_ms"]
    assert sum(each) == pytest.approx(whole["forward"], rel=1e-3)


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
    text = " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--json", "-"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    codes = {one.name: " ".join(one.code.split()) for one in made.values()}
    ends = text.partition("With costs analytic:h100 the fastest is ")[2]
    best = advice[0]["setting"].partition(", P")[0]
    assert ends.startswith(advice[0]["setting"]) and codes[best] in ends
    assert ("period=" in ends) is (advice[0]["period"] > 1)
    assert "dedicate=" not in ends and "publish=" not in ends, "what was not asked for"
    assert "mesh_dim_names=('replicate', 'shard')" in codes["sharded, HSDP 2x4"]
    assert codes["replicated, 8"].startswith("model = DistributedDataParallel(model)")
    assert "reduce_to_owner=True" in codes["reduce_to_owner, 8"]
    assert 'layout="dedicated"' in codes["dedicated, 8"]
    assert all(row["why"] for row in advice)
    assert [row["ms"] for row in advice[:-2]] == sorted(row["ms"] for row in advice[:-2])
    meshes = {"sharded, 8", "sharded, HSDP 2x4", "sharded, HSDP 4x2"}
    every = {*meshes, "replicated, 8", "reduce_to_owner, 8", "dedicated, 8", "dedicated, 2x4"}
    with_period = [row for row in advice if ", P = " in row["setting"]]
    assert every == {row["setting"] for row in advice[:-2] if row not in with_period}
    assert with_period and {row["setting"].split(", P")[0] for row in with_period} <= meshes
    for row in with_period:
        block, full = (row["steps"][name]["ms"] for name in ("block step", "Muon"))
        if row["ms"] <= 1.01 * block:  # a smaller period is not enough
            smaller = max(p for p in tool._PERIODS if p < row["period"])
            assert full / smaller + block * (1 - 1 / smaller) > 1.01 * block
        else:
            assert "none of these" in row["why"]
    most = sorted(row["memory"] for row in advice[:-2])[2]
    assert main([*asked, "--fits", f"{most}B", "--json", "-"]) == 0
    fitting = json.loads(capsys.readouterr().out)["advice"]
    assert 0 < len(fitting) < len(advice) and all(row["memory"] <= most for row in fitting)
    assert main([*asked, "--fits", "1KiB"]) == 2
    assert "no layout keeps" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "told"), [
    ("--layout dedicated --period 5", "--period is not for --layout dedicated"),
    ("--costs analytic:cpu", "-m dmuon profile"),
    ("--model qwen3-30b-a3b", "--active N"),
    ("--trace /nowhere/x.json", "no directory"),
    ("--active 8", "no stack of experts"),
    ("--tp 3", "needs ranks that it divides"),
    ("--pp 4 --tokens 8192", "as --microbatches 8 --tokens 32768 do"),
    ("--pp 2 --microbatches 3", "--microbatches 3 must divide --tokens 2048"),
    ("--pp 2 --active 8 --tokens 8192", "no stack of experts"),
    ("--microbatches 2", "add --pp"),
    ("--pp 2 --advise", "drop --pp"),
])  # fmt: skip
def test_mistakes(more, told, capsys):
    assert main([*ASKED, *more.split()]) == 2
    assert told in capsys.readouterr().err
