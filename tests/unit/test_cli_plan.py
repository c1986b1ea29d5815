"""`python -m dmuon plan`: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from dmuon.__main__ import CLOSED_PIPE, main
from dmuon.catalogue import PRESETS, model_specs
from dmuon.config import PlannerOptions
from dmuon.report.data import LoadBalanceReport
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.network import planned
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.shards import evenly_sharded
from dmuon.scheduler.topology import Topology
from dmuon.tools.plan import LAYOUTS, memory_bytes, memory_of
from dmuon.types import Layout

REPOSITORY = Path(__file__).parents[2]
SMALL = ["plan", "--model", "gpt2", "--mesh", "2x2", "--solver", "greedy"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def succeed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    return out


def without_seconds(text: str) -> str:
    return re.sub(r"\d+\.\d+ s\b", "", text)


# ---- one plan ----------------------------------------------------------------------------


def test_it_prints_the_report_of_the_plan_that_solve_makes(capsys):
    specs, topology = model_specs("gpt2"), Topology((2, 2), ("node", "gpu"), 2, "cuda")
    shards = evenly_sharded(specs, topology, whole=True)
    how = CostTable.analytic("h200"), shards, Layout.REDUCED, "greedy", PlannerOptions(), None
    plan = planned(specs, topology, *how)
    fullest = plan.state_bytes.index(max(plan.state_bytes))
    known = LoadBalanceReport(
        plan, model="gpt2", source=PRESETS["gpt2"]["source"],
        memory=tuple(memory_of(plan, shards, fullest).items()),
    )  # fmt: skip
    out = succeed(capsys, *SMALL, "--layout", "reduce_to_owner")
    header, _, _ = out.partition("\n\n")
    assert without_seconds(out.rstrip()) == without_seconds(str(known))
    assert header.splitlines() == [
        "gpt2: 124.44 M parameters (bfloat16), 48 matrices",
        "mesh 2 x 2 (node, gpu): 4 ranks on 2 nodes of h200, layout reduce_to_owner",
        f"costs analytic:h200, plan {plan.fingerprint()}",
        f"shapes: {PRESETS['gpt2']['source']}",
    ]


def half_frozen() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(("options", "parts", "trained"), [
    ("--axes replicate,shard", 4, 4), ("--layout dedicated", 4, 1),
])  # fmt: skip
def test_frozen_weights_are_sharded_with_the_rest(capsys, options, parts, trained):
    """Of the trained ones in `dedicated`, an owner holds all."""
    model = "--model", f"{__name__}:half_frozen"
    argv = ["plan", *model, "--mesh", "2x4", "--json", "-", *options.split()]
    memory = json.loads(succeed(capsys, *argv))["memory"]["fullest_rank"]
    assert memory["weights"] == 4 * 64 * 64 // parts + 4 * 64 * 64 // trained


def test_files_leave_the_report_on_standard_output(capsys, tmp_path):
    data, page = tmp_path / "report.json", tmp_path / "report.html"
    status, out, err = run(capsys, *SMALL, "--json", str(data), "--html", str(page))
    assert (status, sorted(err.splitlines())) == (0, sorted(f"wrote {p}" for p in (data, page)))
    assert without_seconds(out) == without_seconds(succeed(capsys, *SMALL))
    printed = json.loads(succeed(capsys, *SMALL, "--json", "-"))
    assert json.loads(data.read_text()) | {"seconds": 0} == printed | {"seconds": 0}
    assert "</html>" in page.read_text(encoding="utf-8")


def saved(capsys: pytest.CaptureFixture[str], path: Path, *argv: str) -> OwnershipPlan:
    status, _, _ = run(capsys, *(argv or SMALL), "--save", str(path))
    assert status == 0
    return OwnershipPlan.from_json(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("options", "topology"), [
    ("--mesh 4x8", Topology((4, 8), ("node", "gpu"), 8, "cuda")),
    ("--mesh 2X2x4", Topology((2, 2, 4), ("group", "node", "gpu"), 4, "cuda")),
    ("--mesh 16 --ranks-per-node 4", Topology((16,), ("dp",), 4, "cuda")),
    ("--mesh 2x4 --axes replicate,shard", Topology((2, 4), ("replicate", "shard"), 4, "cuda")),
    ("--mesh 4 --costs analytic:cpu", Topology((4,), ("dp",), 4, "cpu")),
])  # fmt: skip
def test_the_mesh_becomes_the_topology(capsys, tmp_path, options, topology):
    argv = ["plan", "--model", "gpt2", "--solver", "greedy", *options.split()]
    assert saved(capsys, tmp_path / "p.json", *argv).topology == topology


def test_options_reach_the_plan(capsys, tmp_path):
    plan = saved(
        capsys, tmp_path / "p.json", *SMALL, "--costs", "analytic:a100", "--dtype", "float32",
        "--max-batch", "3", "--heads", "*.c_attn.weight=3", "--splits", "*.c_fc.weight=3000,72",
        "--splits", "*.attn.c_proj.weight=interleaved:3",
    )  # fmt: skip
    assert plan.cost_source == "analytic:a100"
    assert {m.dtype for m in plan.specs.matrices} == {"float32"}
    assert max(len(b.matrices) for b in plan.batches) == 3
    assert len(plan.specs.matrices) == 12 * (3 + 1 + 3 + 2)
    assert "transformer.h.0.attn.c_proj.weight[:, 1::3]" in {m.name for m in plan.specs.matrices}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_says_who_may_own_and_what_a_rank_holds(capsys, layout):
    data = json.loads(succeed(capsys, *SMALL, "--json", "-", "--layout", layout))
    assert (data["layout"], data["model"], data["device"]) == (layout, "gpt2", "h200")
    assert data["mesh"] == {"node": 2, "gpu": 2} and data["nodes"] == 2
    matrices, others = 2 * 84_934_656, 2 * 39_505_152  # bytes
    shares = {"sharded": (1 / 4, 1 / 4), "replicated": (1, 1), "reduce_to_owner": (1, 1)}
    # In `dedicated` two replicas, of two ranks each.
    found, (part, rest) = data["memory"]["fullest_rank"], shares.get(layout, (1 / 2, 1 / 2))
    # Owners are balanced by time, not by bytes.
    within = {"rel": 0.25 if layout == "dedicated" else 0.01}
    assert found["weights"] == pytest.approx(part * matrices + rest * others, **within)
    at_owner = layout in ("reduce_to_owner", "dedicated")
    momentum = (1 / 4 if at_owner else part) * matrices
    assert found["momentum"] == pytest.approx(momentum, rel=0.25 if at_owner else 0.01)
    assert found["AdamW state"] == pytest.approx(2 * rest * others, rel=0.01)
    assert found["Newton-Schulz"] > 0 and (found["buffers"] > 0) is (layout != "dedicated")


def test_experts_belong_to_the_ranks_that_hold_them(capsys, tmp_path):
    """Mixtral has 8 experts: on 16 ranks, 4 of which are expert-parallel, rank r and all with the
    same r % 4 hold 2 of them."""
    argv = ["plan", "--model", "mixtral-8x7b", "--mesh", "4x4", "--solver", "greedy", "--ep", "4"]
    plan = saved(capsys, tmp_path / "plan.json", *argv)
    found = {}
    for matrix, domain in zip(plan.specs.matrices, plan.limits.domain_of, strict=True):
        ranks = plan.limits.domains[domain]
        if "experts" not in matrix.name:
            assert ranks == tuple(range(16))
            continue
        expert = int(re.search(r"\[(\d+)\]", matrix.name)[1])
        assert ranks == tuple(range(expert // 2, 16, 4))
        found[expert] = ranks
    assert len(found) == 8
    # In each layer, 8 experts are shared out among 4 x 4 ranks, evenly.
    loads = plan.loads_ms
    assert max(loads) < 1.05 * sum(loads) / 16


def test_a_memory_cap_is_kept_or_refused(capsys):
    argv = ["plan", *GPT2, "--layout", "reduce_to_owner", "--json", "-", "--memory"]
    data = json.loads(succeed(capsys, *argv, "195MiB"))  # 150 of them are AdamW's on each rank
    assert max(r["state_bytes"] for r in data["ranks"]) <= 195 * 2**20
    status, out, err = run(capsys, *argv, "1MiB")
    assert (status, out) == (2, "")
    assert "--memory=1048576 is too small" in err and "Raise --memory, or" in err
    status, _, err = run(capsys, "plan", *GPT2, "--memory", "1MiB")
    assert status == 2 and "or raise --memory" in err and "owner_memory" not in err


def test_a_pipeline_plans_equal_stages_once_and_shows_the_slowest(capsys, monkeypatch):
    plans = []

    def made(*how, **more):
        plans.append(planned(*how, **more))
        return plans[-1]

    monkeypatch.setattr("dmuon.scheduler.network.planned", made)
    data = json.loads(succeed(capsys, *SMALL, "--pp", "5", "--json", "-"))
    rows = data["stages"]
    assert len(plans) == 4 and [row["matrices"] for row in rows] == [8, 12, 12, 8, 8]
    assert {row["makespan_ms"] for row in rows} == {plan.makespan_ms for plan in plans}
    slowest = max(rows, key=lambda row: row["makespan_ms"])
    assert (data["model"], slowest["stage"]) == ("gpt2, stage 1", 1)
    assert data.items() >= {key: slowest[key] for key in slowest.keys() & data.keys()}.items()
    alone, one = (json.loads(succeed(capsys, *SMALL, *more, "--json", "-"))
                  for more in ([], ["--pp", "1"]))  # fmt: skip
    assert data.keys() - alone.keys() == {"stages"} and one["fingerprint"] == alone["fingerprint"]


# ---- saved plans -----------------------------------------------------------------------


def test_a_saved_plan_is_the_reported_one_and_is_verified_or_refuted(capsys, tmp_path):
    argv = ["plan", "--model", "gpt2", "--mesh", "2x2", "--time-limit", "1", "--json", "-"]
    path = tmp_path / "plan.json"
    status, printed, _ = run(capsys, *argv, "--save", str(path))
    plan = OwnershipPlan.from_json(path.read_text(encoding="utf-8"))
    assert (status, plan.fingerprint()) == (0, json.loads(printed)["fingerprint"])
    assert f"{plan.makespan_ms:.6g} ms" in succeed(capsys, "plan", "--verify", str(path))
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"bucket_bytes": 1 << 20}))
    status, out, err = run(capsys, "plan", "--verify", str(path))
    assert (status, out) == (2, "") and "its fingerprint is not that of its content" in err
    path.write_text(json.dumps(data | {"lower_bound_ms": data["lower_bound_ms"] * 1.01}))
    status, out, err = run(capsys, "plan", "--verify", str(path))
    assert (status, err) == (1, "")
    assert "bound" in out


# ---- mistakes ----------------------------------------------------------------------------

GPT2 = ["--model", "gpt2", "--mesh", "4", "--time-limit", "0.5"]


@pytest.mark.parametrize(("argv", "complaint"), [
    ([], "--model"),
    (["--model", "gpt2"], "needs --mesh"),
    (["--model", "gpt3", "--mesh", "4x8"], "did you mean gpt2"),
    (["--model", "gone.json", "--mesh", "4x8"], "cannot read 'gone.json': No such file"),
    (["--model", "gone:build", "--mesh", "4x8"], "importing 'gone' failed"),
    (["--model", "gpt2", "--mesh", "4y8"], "'4y8' is no mesh"),
    (["--model", "gpt2", "--mesh", "0x8"], "0 ranks"),
    (["--model", "gpt2", "--mesh", "1000x1000"], "1,000,000 ranks"),
    (["--model", "gpt2", "--mesh", "4x8", "--axes", "dp"], "axis names"),
    ([*GPT2, "--ranks-per-node", "0"], "--ranks-per-node"),
    (["--model", "gpt2", "--mesh", "16", "--ranks-per-node", "5"],
     "16 ranks are no whole number of such nodes, the last would have 1"),
    ([*GPT2, "--costs", "analytic:abacus"], "analytic:abacus"),
    ([*GPT2, "--dtype", "bf16"], "unknown dtype 'bf16'"),
    ([*GPT2, "--memory", "0"], "less than a byte"),
    ([*GPT2, "--max-batch", "0"], "--max-batch"),
    ([*GPT2, "--time-limit", "-1"], "--time-limit"),
    ([*GPT2, "--splits", "*.c_attn.weight=1,2"], "2304 rows"),
    ([*GPT2, "--heads", "*.c_attn.weight=1,2"], "takes one number"),
    ([*GPT2, "--splits", "*.c_attn.weight=interleaved:5"], "2304 rows"),
    ([*GPT2, "--heads", "gone=2"], "matches none of 48 matrix parameters, such as"),
    ([*GPT2, "--json", "gone/report.json"],
     "cannot write 'gone/report.json': there is no directory 'gone'"),
    ([*GPT2, "--save", "."], "cannot write '.': it is a directory"),
    (["--verify", "gone.json", "--mesh", "4", "--html", "h"], "drop --mesh, --html"),
    (["--verify", "gone.json", "--model", "gpt2"], "not allowed with"),
    ([*GPT2, "--frobnicate"], "--frobnicate"),
    ([*GPT2, "--layout", "auto"], "invalid choice: 'auto'"),
    ([*GPT2, "--layout", "replicated", "--ep", "2"], "--ep is for --layout sharded"),
    ([*GPT2, "--ep", "2"], "found no stack"),
    ([*GPT2, "--pp", "2", "--ep", "2"], "found no stack"),
    ([*GPT2, "--pp", "13"], "--pp 13x1 needs as many layers, found 12 in gpt2"),
    ([*GPT2, "--pp", "2x2x2"], "no pipeline"),
    ([*GPT2, "--pp", "0"], "--pp"),
    ([*GPT2, "--pp", "4", "--save", "p"], "--pp makes a plan per stage: drop it, or drop --save"),
    ([*GPT2, "--schedule", "1F1B"], "needs 1 parts a rank, as in --pp 4x1"),
    ([*GPT2, "--pp", "2x2", "--schedule", "1F1B"], "as in --pp 2x1"),
    ([*GPT2, "--pp", "2", "--schedule", "ZBVZeroBubble"], "as in --pp 2x2"),
    (["--model", "qwen3-30b-a3b", "--mesh", "4x6", "--ep", "3"], "found stacks of [128] items"),
    (["--model", "qwen3-30b-a3b", "--mesh", "4x6", "--ep", "16"], "items on 24 ranks"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, argv, complaint):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["plan", *argv])
    except SystemExit as error:  # from argparse
        status = error.code
    captured = capsys.readouterr()
    assert status == 2
    (line,) = captured.err.splitlines()
    assert line.startswith("python -m dmuon")
    assert complaint in line
    assert captured.out == ""  # found before planning
    assert list(tmp_path.iterdir()) == []


def test_sizes_in_memory():
    for text, count in (
        ("12345", 12345), ("80 GiB", 80 * 2**30), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("7B", 7),
    ):  # fmt: skip
        assert memory_bytes(text) == count
    for text in ("", "0", "GiB", "-1", "1e9", "80G", "80 PiB", "1.GiB", "٣", "9" * 400 + "TB"):
        with pytest.raises(ArgumentTypeError):
            memory_bytes(text)


def test_a_closed_pipe_ends_quietly():
    command = [sys.executable, "-m", "dmuon", *SMALL, "--json", "-"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read().decode() == ""
    process.stderr.close()
    assert process.wait() == CLOSED_PIPE


def test_the_report_tells_the_step_on_the_network_card_that_is_named(capsys, tmp_path):
    command = ["plan", "--model", "llama3-8b", "--mesh", "4x8", "--costs", "analytic:h100"]
    command += ["--solver", "greedy"]
    found = {}
    for nic in ("400Gb/gpu", "400Gb/node"):
        saved = tmp_path / "plan.json"
        assert main([*command, "--nic", nic, "--json", "-", "--save", str(saved)]) == 0
        data = json.loads(capsys.readouterr().out)
        found[nic] = data["step"]
        assert data["costs"] == f"analytic:h100, nic {nic}" and data["certificate"]["proven"]
        plan = OwnershipPlan.from_json(saved.read_text())
        assert asdict(plan.step).items() <= data["step"].items(), "a saved plan tells it, too"
    slow, fast = found["400Gb/node"], found["400Gb/gpu"]
    assert slow["link_ms"] == pytest.approx(8 * fast["link_ms"], rel=0.3)
    assert slow["ms"] > fast["ms"] >= max(fast["work_ms"], fast["link_ms"])
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "simulated (each matrix once" in text and "ms on links: the links bind" in text
    assert main([*command, "--nic", "fast"]) == 2
    assert "'fast' is no link rate" in capsys.readouterr().err


# ---- what pages quote --------------------------------------------------------------------


def printed_by(*argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", *argv]) == 0
    return out.getvalue()


def quotes() -> dict[str, dict[str, str]]:
    """By page: what it quotes of the command, as a pattern, and what the command prints now."""
    figure = ["--model", "qwen2.5-14b", "--mesh", "4x8"]
    plan = json.loads(printed_by(*figure, "--json", "-"))
    in_turn, best = plan["alternatives_ms"]["round_robin"], plan["makespan_ms"]
    alone = sum(rank["ms"] for rank in plan["ranks"])
    table = printed_by("--model", "qwen2.5-7b", "--mesh", "4x8")
    table = table[table.index("makespan ") : table.index("\nkernels ")]
    stages = printed_by("--model", "llama3.2-3b", "--mesh", "8", "--pp", "3")
    stages = stages[stages.index(" stage ") : stages.index(" less.") + len(" less.")]
    return {
        "docs/plan-command.md": {
            r"(?<=```text\n)makespan [^`]*(?=\n```)": table,
            r"(?<=```text\n) stage [^`]*(?=\n```)": stages,
            r"[\d.]+ ms(?= at worst)": f"{in_turn:.1f} ms",
            r"(?<=even with dmuon's plan, )[\d.]+ ms": f"{best:.1f} ms",
            r"(?<=every rank would need )[\d,]+ ms": f"{alone:,.0f} ms",
        }
    }


def timeless(text: str) -> str:
    """A report without the seconds that planning took."""
    return re.sub(r"\d\.\d\d s\b", "", text)


def test_pages_quote_what_the_command_prints():
    for page, patterns in quotes().items():
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        for pattern, now in patterns.items():
            (quoted,) = re.findall(pattern, text)
            stale = f"{page} is stale: python -m tests.unit.test_cli_plan"
            assert timeless(quoted) == timeless(now), stale


if __name__ == "__main__":
    for page, patterns in quotes().items():
        path = REPOSITORY / page
        text = path.read_text(encoding="utf-8")
        for pattern, now in patterns.items():
            (quoted,) = re.findall(pattern, text)
            if timeless(quoted) != timeless(now):
                text = text.replace(quoted, now)
        path.write_text(text, encoding="utf-8")


def test_the_executable_is_the_command():
    """Installed beside Python; without arguments it prints its help and exits with 0."""
    command = Path(sys.executable).with_name("dmuon")
    told = subprocess.run([command], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("usage: ") and "simulate" in told.stdout
