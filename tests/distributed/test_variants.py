"""Variants of the rule: what is refused, and what is kept. The matrix compares each with the
reference in every layout, and moves its state between layouts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from dmuon.types import CorruptionError, OwnershipError
from tests.distributed.compare import assert_bitwise
from tests.distributed.harness import distributed
from tests.distributed.layouts import mesh_of
from tests.distributed.matrix import Damped
from tests.distributed.test_checkpoints import CASES, Training, cases


def small_model() -> ParallelModel:
    return ParallelModel(width=14, hidden=6, layers=1, experts=4)


def in_shards() -> Any:
    return fully_shard(small_model(), mesh=mesh_of((2,)))


WRONG = [
    (lambda u: u.mean(2, keepdim=True), r"Wrong\(\).*shape \[2, .*found \[2, \d+, 1\]"),
    (lambda u: None, r"Wrong\(\).*found None"),
    (lambda u: 1 / 0, r"Wrong\(\) fails on a stack.*ZeroDivisionError"),
    (lambda u: u / 0, "must give a finite update"),
    (lambda u: u + 1, "must give zeros for a matrix of zeros"),
]


@distributed(2)
def test_what_a_variant_cannot_do_is_refused(rank: int, world: int) -> None:
    def step(opt: dmuon.Muon, model: torch.nn.Module) -> None:
        loss_of(model, batch(0, rank)).backward()
        opt.step()

    model = in_shards()
    opt = dmuon.Muon(model, variant="normuon", period=3)
    with pytest.raises(OwnershipError, match=r"NorMuon.*needs whole rows.*period=1"):
        step(opt, model)
    # What state there is cannot change once it is made.
    for is_later in (False, True):
        model = in_shards()
        opt = dmuon.Muon(model)
        opt.report()
        if is_later:
            step(opt, model)
        opt.param_groups[0]["variant"] = "normuon"
        with pytest.raises(OwnershipError, match=r"'variant'.*None.*'normuon' now"):
            step(opt, model)
    # What one owner alone would find is found by all, before a step.
    for accept, message in WRONG:
        wrong = type("Wrong", (dmuon.Rule,), {"accept": lambda self, u, s, f=accept: f(u)})()
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(in_shards(), variant=wrong).report()


@distributed(2)
def test_a_skipped_step_leaves_what_a_variant_keeps(rank: int, world: int) -> None:
    """Of a step that is not finite nothing stays, and of a matrix without gradient neither."""
    torch.manual_seed(0)
    model = in_shards()
    opt = dmuon.Muon(model, variant="normuon")

    def moments() -> dict[Any, Tensor]:
        entries = opt.state_dict()["state"]
        return {k: whole_tensor(e["row_moment"]) for k, e in entries.items() if "row_moment" in e}

    def backward() -> None:
        opt.zero_grad()
        loss_of(model, batch(0, rank)).backward()

    backward()
    opt.step()
    before = moments()
    assert before and all(bool((m > 0).all()) for m in before.values())
    backward()
    if rank == 1:
        next(p for p in model.parameters() if p.ndim == 2).grad.mul_(float("nan"))
    with pytest.warns(RuntimeWarning, match="was skipped") if rank == 0 else nullcontext():
        opt.step()
    assert_bitwise(moments(), before)
    backward()
    name = "blocks.0.mix.weight"
    dict(model.named_parameters())[name].grad = None
    opt.step()
    names = opt.state_dict()["param_groups"][0]["param_names"]
    for k, m in moments().items():
        assert torch.equal(m, before[k]) is (names[k] == name), names[k]


@cases("dedicated")
def test_corruption_is_told_from_a_variant(rank: int, world: int, name: str) -> None:
    """`verify_every` knows what the variant makes of an update, and still finds a wrong weight."""
    training = Training(CASES[name], variant="normuon", verify_every=1)
    training.train(range(2))
    engine = training.opt._run.engines[0]
    apply = type(engine)._apply

    def wrong(*args: Any) -> None:
        apply(*args)
        for target in next(a for a in args if isinstance(a, list) and isinstance(a[0], Tensor)):
            target.add_(0.1)

    with patch.object(type(engine), "_apply", wrong), pytest.raises(CorruptionError):
        training.train(range(2, 3))


@pytest.mark.parametrize("name", ["ep", "ddp", "dedicated"])
@distributed(4)
def test_the_plan_counts_the_bytes_of_the_state(rank: int, world: int, name: str) -> None:
    """Masters, narrow momentum and what a variant keeps: as many bytes as are saved."""
    laid = CASES[name] if name == "ep" else replace(CASES[name], mesh=(world,))
    settings = {"master_weights": True, "variant": Damped(), "momentum_dtype": "bfloat16"}

    def training(cap: int, dtype: torch.dtype = torch.bfloat16, **muon: Any) -> Training:
        planner = dmuon.PlannerOptions(owner_memory_bytes=cap)
        return Training(laid, dtype=dtype, dedicate={"planner": planner}, **(muon or settings))

    first = training(1 << 20)
    first.train(range(1))
    planned = first.opt.ownership.plan.state_bytes
    everywhere = {"ddp": world, "dedicated": 0}.get(name, 1)
    expected = 0
    for entry in first.whole()["optim"]["state"].values():
        for key, value in entry.items():
            on_params = "exp_avg" in entry or (name == "ddp" and key not in ("size", "count"))
            expected += value.nbytes * (everywhere if on_params else 1) * (key != "step")
    assert sum(planned) == expected
    first.close()
    with pytest.raises(ValueError, match=r"stores \d+ bytes|is too small"):
        training(sum(planned) // world - 1).opt.report()
    if CASES[name].own:  # planned before the optimizer is known
        return
    plain, narrow = (
        max(training(1 << 30, torch.float32, **muon).opt.report().plan.state_bytes)
        for muon in ({"momentum_dtype": None}, {"momentum_dtype": "bfloat16"})
    )
    assert narrow < plain
    training(narrow, torch.float32, momentum_dtype="bfloat16").opt.report()
