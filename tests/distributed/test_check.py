"""The equivalence check itself: it must be able to fail."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pkgutil import resolve_name

import pytest
import torch

import dmuon
import dmuon.equivalence
from dmuon.check import NEWTON_SCHULZ
from dmuon.comm.transport import C10dTransport
from dmuon.parallel_models import CASES
from dmuon.parallel_models import batch as parallel_batch
from dmuon.parallel_models import loss_of as parallel_loss
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded


def lost_gradient(monkeypatch, rank):
    honest = C10dTransport.reduce

    def reduce(self, tensor, dst, *, tag):
        return honest(self, tensor.zero_() if self.rank == 1 else tensor, dst, tag=tag)

    monkeypatch.setattr(C10dTransport, "reduce", reduce)


def lost_publication(monkeypatch, rank):
    honest = C10dTransport.broadcast

    def broadcast(self, tensor, src, *, tag):
        if tag == "updates" and src == 0 and self.rank == 1:
            return honest(self, tensor.clone(), src, tag=tag)
        return honest(self, tensor, src, tag=tag)

    monkeypatch.setattr(C10dTransport, "broadcast", broadcast)


def scaled(factor, layout="replicated"):
    def fault(monkeypatch, rank):
        target = NEWTON_SCHULZ[layout]
        honest = resolve_name(target)
        if rank == 1:
            monkeypatch.setattr(target, lambda *a, **k: factor * honest(*a, **k))

    return fault


FAULTS = {
    "slightly wrong": scaled(1.07),
    "half more": scaled(1.5),
    "zero": scaled(0.0),
    "sign": scaled(-1.0),
    "lost gradient": lost_gradient,
    "lost publication": lost_publication,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtypes", ["fp32 fp32", "fp32 bf16", "bf16 bf16"])
@pytest.mark.parametrize("lr", [0.02, 1e-3])
@distributed(2)
def test_planted_faults_are_caught(rank, world, fault, dtypes, lr):
    weights, ns = [{"fp32": torch.float32, "bf16": torch.bfloat16}[d] for d in dtypes.split()]
    with pytest.MonkeyPatch.context() as monkeypatch:
        FAULTS[fault](monkeypatch, rank)
        report = dmuon.check_step_equivalence(
            lambda: seeded(Net).to(weights),
            loss_of,
            batch,
            steps=3,
            lr=lr,
            ns_dtype=ns,
            options=dmuon.ReplicatedOptions(reduce_dtype=torch.float32),
        )
    assert not report.passed and not report, str(report)
    assert "DIFFERS" in str(report)


@distributed(2)
def test_a_scaled_gradient_is_caught_with_sgd_momentum_and_clipping_free_reference(rank, world):
    """Muon is blind to one common scale; AdamW's part and the loss are not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        honest = C10dTransport.all_reduce

        def all_reduce(self, tensor, *, tag, maximum=False):
            return honest(
                self, tensor.mul_(2) if tag == "rest" else tensor, tag=tag, maximum=maximum
            )

        monkeypatch.setattr(C10dTransport, "all_reduce", all_reduce)
        report = dmuon.check_step_equivalence(
            lambda: seeded(Net),
            loss_of,
            batch,
            steps=3,
            lr=0.02,
            adamw_eps=1e-3,
            ns_dtype=torch.float32,
        )
    assert not report.passed


# ---- sharded models ----------------------------------------------------------------------

BY_NAME = {case.name: case for case in CASES}


def names(world):
    return [case.name for case in CASES if case.world == world]


def check(name, *, seed=0, parallelize=None, **kwargs):
    case = BY_NAME[name]
    mesh = case.make_mesh()
    kwargs.setdefault("data_axes", case.data_axes)
    return dmuon.check_step_equivalence(
        lambda: seeded(case.build, seed),
        parallel_loss,
        parallel_batch,
        mesh,
        parallelize=parallelize or (lambda model: case.parallelize(model, mesh)),
        lr=0.02,
        adamw_eps=1e-5,  # AdamW divides by |g| + eps: an all but zero g has no certain sign
        **kwargs,
    )


def agrees(name):
    case = BY_NAME[name]
    report = check(name, ns_dtype=torch.float32)
    assert report.passed, str(report)
    (row,) = report.rows
    assert row.layout == "sharded" and row.criterion == "absolute"
    sizes, axes = row.mesh.split(" ", 1)
    assert sizes == "x".join(map(str, case.mesh_shape)) and axes == " x ".join(case.axes)


@pytest.mark.parametrize("name", names(2))
@distributed(2)
def test_ten_steps_on_two_ranks(rank, world, name):
    agrees(name)


@pytest.mark.parametrize("name", names(4))
@distributed(4)
def test_ten_steps_on_four_ranks(rank, world, name):
    agrees(name)


@pytest.mark.parametrize("name", names(8))
@distributed(8)
def test_ten_steps_on_eight_ranks(rank, world, name):
    agrees(name)


@distributed(2)
def test_the_twin_has_the_weights_that_fsdp_made_of_all_ranks_weights(rank, world):
    report = check("fsdp2", seed=rank, steps=2, ns_dtype=torch.float32)
    assert report.passed, str(report)


def lost(tag):
    """Rank 1 does not get what is sent to it under this tag."""

    def fault(monkeypatch, rank):
        honest = C10dTransport.all_to_all

        def all_to_all(self, output, *args, **kwargs):
            if kwargs["tag"] == tag and rank == 1:
                return honest(self, output.zero_().clone(), *args, **kwargs)
            return honest(self, output, *args, **kwargs)

        monkeypatch.setattr(C10dTransport, "all_to_all", all_to_all)

    return fault


SHARDED_FAULTS = {
    "slightly wrong": ("tp+fsdp", scaled(1.07, "sharded")),
    "sign of experts": ("ep+fsdp, split experts", scaled(-1.0, "sharded")),
    "lost gather": ("fsdp4", lost("gather")),
    "lost scatter": ("fsdp4", lost("scatter")),
    "lost copy": ("hsdp", lost("replicate")),
}


@pytest.mark.parametrize("fault", SHARDED_FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(4)
def test_planted_faults_in_sharded_models_are_caught(rank, world, fault, dtype):
    name, plant = SHARDED_FAULTS[fault]
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, rank)
        report = check(name, steps=2, ns_dtype=dtype)
    assert not report.passed, str(report)


@distributed(2)
def test_errors_name_the_axes_and_the_parameters(rank, world):
    with pytest.raises(ValueError, match=r"data_axes names \['shard'\].*axes \['dp'\]"):
        check("fsdp2", data_axes=["shard"])

    def rename(model):
        model.head = model.lm_head
        del model.lm_head
        return BY_NAME["fsdp2"].parallelize(model, BY_NAME["fsdp2"].make_mesh())

    with pytest.raises(ValueError, match=r"turned .*'lm_head.weight'.* into .*'head.weight'"):
        check("fsdp2", parallelize=rename)


def test_data_ranks_are_counted_along_the_data_axes():
    result = doctest.testmod(dmuon.equivalence)
    assert result.attempted > 0 and result.failed == 0


# ---- the command -------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dmuon", "check", "--nproc", "2", "--steps", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_command_passes_and_prints_a_table():
    done = run("--layout", "replicated")
    assert done.returncode == 0, done.stderr
    assert "replicated (DDP)" in done.stdout and "equal" in done.stdout
    assert "DIFFERS" not in done.stdout


def test_the_command_fails_on_a_planted_fault():
    done = run("--plant-fault", "--json", "-")
    assert done.returncode == 1 and done.stdout, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"layout", "mesh", "dtype", "steps", "max_abs_diff", "tolerance", "passed"} <= set(
        rows[0]
    )
    assert [row["passed"] for row in rows] == [False] * 4


@pytest.mark.parametrize("layout", ["sharded", "all"])
def test_the_command_covers_the_meshes_that_fit(layout):
    done = run("--layout", layout, "--json", "-")
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    found = [(r["layout"], r["case"], r["mesh"]) for r in rows if r["layout"] == "sharded"]
    assert found == [("sharded", "fsdp2", "2 dp"), ("sharded", "tp", "2 tp")]
    assert len(rows) - len(found) == (4 if layout == "all" else 0)


def test_the_command_fails_on_a_planted_fault_in_every_sharded_mesh():
    done = run("--layout", "sharded", "--plant-fault")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("DIFFERS") == 2 and "equal" not in done.stdout


def test_the_command_tells_that_no_mesh_fits():
    done = run("--layout", "sharded", "--nproc", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--nproc 1" in done.stderr
