"""The equivalence check itself: it must be able to fail."""

from __future__ import annotations

import argparse
import doctest
import json
from dataclasses import replace

import pytest
import torch

import dmuon
import dmuon.tools.equivalence
from dmuon.__main__ import main
from dmuon.tools import check as command
from dmuon.tools.equivalence import YARDSTICKS, _moved
from dmuon.tools.parallel_models import CASES, DEDICATED_CASES
from dmuon.tools.parallel_models import batch as parallel_batch
from dmuon.tools.parallel_models import loss_of as parallel_loss
from tests.distributed.harness import distributed
from tests.distributed.models import Casting, Net, batch, loss_of, seeded
from tests.internals import C10dTransport, Orthogonalizer

FP32, BF16 = torch.float32, torch.bfloat16
FIXED = dmuon.KernelOptions(method="gram", backend="torch")


def planted(owner, name, fault):
    """A fault in a method: ``fault(honest, rank, self, ...)`` is called in its place."""

    def plant(monkeypatch, rank):
        honest = getattr(owner, name)
        method = lambda *args, **kwargs: fault(honest, rank, *args, **kwargs)  # noqa: E731
        monkeypatch.setattr(owner, name, method)

    return plant


def scaled(factor, *ranks):
    """These ranks, or the second one, compute wrong updates."""

    def run(honest, rank, *args):
        return factor * honest(*args) if rank in (ranks or (1,)) else honest(*args)

    return planted(Orthogonalizer, "run", run)


def _doubled(honest, rank, self, tensor, *, tag, maximum=False):
    """Muon is blind to one common scale; AdamW's part and the loss are not."""
    return honest(self, tensor.mul_(2) if tag == "rest" else tensor, tag=tag, maximum=maximum)


def stale_weights(monkeypatch, rank):
    """Rank 1 receives for forward what it received the time before."""
    honest, seen = C10dTransport.all_gather, {}

    def all_gather(self, parts, *, tag, **how):
        work = honest(self, parts, tag=tag, **how)
        for src, part in enumerate(parts):
            if tag.startswith("forward") and rank == 1 and src != self.rank:
                work.wait()
                arrived, key = part.clone(), (tag, src, part.numel())
                part.data.copy_(seen.get(key, arrived))
                seen[key] = arrived
        return work

    monkeypatch.setattr(C10dTransport, "all_gather", all_gather)


@pytest.mark.parametrize("kernels", [FIXED, dmuon.KernelOptions()])
@distributed(2)
def test_one_rounding_is_no_difference_but_other_bits(rank, world, kernels):
    with pytest.MonkeyPatch.context() as monkeypatch:
        scaled(1 + 2**-22)(monkeypatch, rank)
        report = dmuon.check_step_equivalence(
            lambda: seeded(Net), loss_of, batch, steps=2, lr=0.02, ns_dtype=FP32, kernels=kernels
        )
    (row,) = report.rows
    assert row.difference <= row.tolerance
    assert row.bitwise is (False if kernels.is_fixed else None)
    assert report.passed is not kernels.is_fixed
    words = str(report).split()
    assert ("other bits" in " ".join(words)) is ("bits" in words) is kernels.is_fixed


BY_NAME = {case.name: case for case in (*CASES, *DEDICATED_CASES)}
# Three axes on four ranks: each rank is a process, of which this machine may have few.
BY_NAME["hsdp+tp"] = replace(BY_NAME["hsdp+tp"], mesh_shape=(2, 1, 2))


def check(name, *, seed=0, layers=2, parallelize=None, **kwargs):
    case = BY_NAME[name]
    mesh = case.make_mesh(torch.get_default_device().type)
    kwargs = {"data_axes": case.data_axes, "ns_dtype": FP32} | kwargs
    return dmuon.check_step_equivalence(
        lambda: seeded(case.build, seed, layers=layers),
        parallel_loss,
        parallel_batch,
        mesh,
        tensor_parallel=lambda model: case.tensor_parallel(model, mesh),
        parallelize=parallelize or (lambda model: case.data_parallel(model, mesh)),
        lr=0.02,
        adamw_eps=1e-4,  # AdamW divides by |g| + eps: an all but zero g has no certain sign
        **kwargs,
    )


def agrees(name, layout, **kwargs):
    case = BY_NAME[name]
    report = check(name, layout=layout, kernels=FIXED, **kwargs)
    assert report.passed, str(report)
    (row,) = report.rows
    assert row.bitwise is True
    assert row.layout == layout and row.criterion == "absolute" and row.tolerance == 1e-5
    assert 0 < row.max_abs_diff <= 1e-5 and row.max_loss_diff <= 1e-5
    sizes, axes = row.mesh.split(" ", 1)
    assert sizes == "x".join(map(str, case.mesh_shape)) and axes == " x ".join(case.axes)


# Every rank builds other weights for the `dedicated` layout, where the first rank's count.
AGREE = [("sharded", "hsdp+tp"), ("dedicated", "tp+fsdp")]


@pytest.mark.parametrize(
    ("layout", "name", "world"), [(*row, BY_NAME[row[1]].world) for row in AGREE]
)
@distributed()
def test_parallel_models(rank, world, layout, name):
    agrees(name, layout, steps=2, seed=rank if layout == "dedicated" else 0)


@distributed(2)
def test_the_twin_has_the_weights_that_fsdp_made_of_all_ranks_weights(rank, world):
    report = check("fsdp2", seed=rank, steps=2)
    assert report.passed, str(report)


def test_gradients_are_moved_by_less_than_a_unit_in_the_last_place():
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    grad = torch.randn(4000, generator=generator) * 10.0 ** torch.linspace(-20, 20, 4000)
    grad[:50] = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        moved = _moved(grad.double(), dtype, generator) - grad
        assert (moved[:50] == 0).all()
        units = moved[50:] / unit_in_the_last_place(grad[50:], dtype)
        assert units.abs().max() < 1 and abs(units.mean()) < 0.03
        assert 0.3 < units.abs().mean() < 0.37
    assert torch.equal(_moved(torch.zeros(3), FP32, generator), torch.zeros(3))


def unit_in_the_last_place(x, dtype):
    return torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(x.double().abs()))


@distributed(2)
def test_half_precision_is_judged_by_a_yardstick_of_the_same_trial(rank, world):
    def rows(factor):
        """Updates that are all too long, by half precision's own measure or beyond it."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            scaled(factor, 0, 1)(monkeypatch, rank)
            return dmuon.check_step_equivalence(
                lambda: seeded(Net), loss_of, batch, steps=2, lr=0.02, ns_dtype=BF16
            )

    (row,) = rows(1.0).rows
    assert row.passed and row.criterion.startswith("of an update")
    assert row.difference <= row.tolerance == YARDSTICKS * row.yardstick
    assert torch.finfo(BF16).eps <= row.yardstick < 0.5
    report = rows(1.07)
    (row,) = report.rows
    assert not row.passed and row.criterion == "of an update's norm" and "DIFFERS" in str(report)
    assert row.difference == pytest.approx(0.07, abs=0.02)
    # Noted in the table, the yardstick too.
    assert f"{row.yardstick:.1e}" in str(report) and f"{row.tolerance:.1e}" in str(report)


CAST = {"layout": "dedicated", "options": dmuon.DedicatedOptions(param_dtype=BF16)}
MASTERS = {"master_weights": True, "ns_dtype": BF16}
HALVED = [(Casting, CAST | {"ns_dtype": BF16}), (Net, MASTERS | {"layout": "replicated"})]


@pytest.mark.parametrize("number", range(len(HALVED)))
@distributed(2)
def test_weights_that_are_cast_for_use_and_masters_are_those_of_the_reference(rank, world, number):
    """What casts weights casts those of the yardstick."""
    build, settings = HALVED[number]
    dtype = FP32 if build is Casting else BF16
    report = dmuon.check_step_equivalence(
        lambda: seeded(build).to(dtype), loss_of, batch, steps=3, lr=0.02, **settings
    )
    assert report.passed and report.rows[0].criterion.startswith("of an update"), str(report)


SHARDED = {"layers": 1, "steps": 1}
# Two steps, because weights that arrive late are right in the first one.
DEDICATED = {"layout": "dedicated", "layers": 1, "steps": 2}
# Where a fault is planted, and settings: one row for each way in which something can go wrong.
FAULTS = [
    ("reduced", scaled(1.07), {"of": (FP32, FP32)}),
    ("reduced", scaled(-1.0), {"of": (BF16, BF16)}),
    ("reduced", planted(C10dTransport, "all_reduce", _doubled), {"of": (FP32, FP32), "lr": 0.02}),
    ("tp+fsdp", scaled(1.07), SHARDED | {"ns_dtype": BF16}),
    ("plain", stale_weights, DEDICATED),
]
WORLDS = [2 if name == "reduced" else BY_NAME[name].world for name, *_ in FAULTS]


def check_reduced(of, lr=1e-3):
    weights, ns_dtype = of
    return dmuon.check_step_equivalence(
        lambda: seeded(Net).to(weights),
        loss_of,
        batch,
        steps=2,
        lr=lr,
        adamw_eps=1e-3,
        ns_dtype=ns_dtype,
        options=dmuon.ReplicatedOptions(reduce_to_owner=True, reduce_dtype=FP32),
    )


@pytest.mark.parametrize(("number", "world"), list(enumerate(WORLDS)))
@distributed()
def test_planted_faults_are_caught(rank, world, number):
    name, plant, settings = FAULTS[number]
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, rank)
        report = check_reduced(**settings) if name == "reduced" else check(name, **settings)
    assert not report.passed and not report, str(report)
    assert "DIFFERS" in str(report)


@distributed(2)
def test_errors_name_the_axes_and_the_parameters(rank, world):
    with pytest.raises(ValueError, match=r"data_axes names \['shard'\].*axes \['dp'\]"):
        check("fsdp2", data_axes=["shard"])

    def rename(model):
        model.head = model.lm_head
        del model.lm_head
        return BY_NAME["fsdp2"].data_parallel(model, BY_NAME["fsdp2"].make_mesh())

    with pytest.raises(ValueError, match=r"turned .*'lm_head.weight'.* into .*'head.weight'"):
        check("fsdp2", parallelize=rename)


def test_data_ranks_are_counted_along_the_data_axes():
    result = doctest.testmod(dmuon.tools.equivalence)
    assert result.attempted > 0 and result.failed == 0


COMMAND = ["check", "--nproc", "2", "--steps", "2"]

# Cases of what fits on two processes in the sharded layout.
ON_TWO = ["fsdp2", "tp", "fsdp2 normuon", "fsdp2 cautious", "fsdp2 bf16 momentum"]


def near_tolerance(rows):
    """Rows of float32 weights that use more than half of their tolerance. Rows that are judged by a
    yardstick may use all of theirs: a yardstick is itself a rounding, which depends on the CPU. So
    may cautious ones: where an update is nearly zero, rounding decides whether it decays."""
    judged = [r for r in rows if r["criterion"] == "absolute" and "cautious" not in r["case"]]
    assert judged and all(row["passed"] and row["yardstick"] > 0 for row in rows)
    return [row for row in judged if row["difference"] > row["tolerance"] / 2]


def test_the_command_passes_and_prints_a_table(capsys, tmp_path):
    path = tmp_path / "rows.json"
    assert main([*COMMAND, "--layout", "sharded", "--json", str(path)]) == 0
    told, verdict = capsys.readouterr()
    assert "sharded" in told and told.count("equal") == len(ON_TWO)
    assert "DIFFERS" not in told and "yardstick" in told
    assert max(map(len, told.splitlines())) <= 100 and verdict.splitlines()[-1] == "PASS"
    rows = json.loads(path.read_text())["rows"]
    assert [r["case"] for r in rows] == ON_TWO and {r["layout"] for r in rows} == {"sharded"}
    assert {r["mesh"] for r in rows} == {"2 dp", "2 tp"}
    promised = {"dtype", "steps", "max_abs_diff", "yardstick", "tolerance", "passed"}
    assert promised <= set(rows[0])
    assert near_tolerance(rows) == []


def test_the_command_fails_on_planted_faults(capsys):
    assert main([*COMMAND, "--layout", "sharded", "--plant-fault", "--json", "-"]) == 1
    told = capsys.readouterr()
    rows = json.loads(told.out)["rows"]
    assert told.err.splitlines()[-1] == "FAIL: dmuon differs from the reference"
    assert [row["case"] for row in rows] == ON_TWO
    assert not any(row["passed"] for row in rows)
    assert main(["check", "--layout", "sharded", "--nproc", "1"]) == 2, "no mesh fits"


@pytest.mark.parametrize(
    ("layout", "worlds"), [("replicated", {4}), ("dedicated", {2, 4}), ("all", {2, 4, 8})]
)
def test_the_command_covers_the_meshes(layout, worlds):
    jobs = command._jobs(argparse.Namespace(layout=layout, nproc=None, bitwise=False))
    assert {job.case.world for job in jobs} == worlds
