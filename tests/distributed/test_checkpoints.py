"""Checkpoints: torch's options, files, periods, damage.

`test_matrix` saves in one layout and goes on in another, with masters and what variants keep.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.dtensors import is_distributed, local_tensor, whole_tensor
from dmuon.kernels import choice
from dmuon.scheduler.select import trainable_parameters
from dmuon.tools.parallel_models import ParallelModel, _expert_parallel, _shard, batch, loss_of
from dmuon.types import ConsensusError, OwnershipError
from tests.distributed.compare import assert_bitwise
from tests.distributed.harness import Pools, distributed
from tests.distributed.layouts import Layout, on
from tests.distributed.twins import Trained
from tests.unit.models import through_a_file

MUON = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}
SAVED_AT, STEPS = 3, 2  # steps before and after
BATCHES = 12  # sequences of all ranks in a step: the same gradient on 1, 2, 3 and 4 data ranks


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return _shard(model, mesh) if "dp" in mesh.mesh_dim_names else model


CASES = {
    "single": on("plain", 1),
    "ddp": on("ddp", 2),
    "reduce_to_owner": on("reduced", 2),
    "reduce_to_owner ddp": on("reduced ddp", 3),
    "dedicated": on("dedicated", 2),
    "dedicated fsdp": on("dedicated fsdp", 3),
    "dedicated hsdp": on("dedicated", 2, 2),
    **{f"fsdp{n}": on("fsdp2", n) for n in (2, 3, 4)},
    "hsdp": on("fsdp2", 2, 2),
    "tp": Layout((2,), ("tp",), wrap=_tensor_parallel),
    "tp+fsdp": Layout((2, 2), ("dp", "tp"), wrap=_tensor_parallel),
    "ep": Layout((2, 2), ("fsdp", "ep"), wrap=partial(_expert_parallel, dim=0)),
}


def cases(*names: str) -> Any:
    """A test of each of these layouts, whose body runs on every rank."""
    each = pytest.mark.parametrize(("name", "world"), [(n, CASES[n].world) for n in names])
    return lambda body: each(distributed()(body))


class Training(Trained):
    """With a scheduler, on data that are the same for each number of ranks."""

    def __init__(
        self,
        laid: Layout,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | None = None,
        **changes: Any,
    ) -> None:
        torch.manual_seed(seed)
        model = ParallelModel(width=14, hidden=6, layers=1, experts=4).to(dtype)
        planning = changes.pop("dedicate", None)
        super().__init__(laid, model, mesh, planning, **MUON | changes)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda t: 1 / (1 + t))

    def train(self, steps: range) -> None:
        for step in steps:
            self.opt.zero_grad()
            all_of_it = [batch(100 * step + n, 0) for n in range(BATCHES)]
            mine = all_of_it[self.rank :: self.ranks]
            tokens, targets = (torch.cat([pair[i][:1] for pair in mine]) for i in (0, 1))
            loss_of(self.model, (tokens, targets)).backward()
            self.opt.step()
            self.schedule.step()

    def load(self, folder: str) -> None:
        super().load(folder)
        self.schedule.last_epoch = SAVED_AT


FULL = {"full_state_dict": True}
# Full and flattened together fail in torch 2.13 for any optimizer, AdamW too.
OPTIONS = {
    "sharded": ({}, {}),
    "flattened": ({"flatten_optimizer_state_dict": True},) * 2,
    "full": (FULL, FULL),
    "from rank 0": ({**FULL, "cpu_offload": True}, {**FULL, "broadcast_from_rank0": True}),
}


@cases("dedicated hsdp", "tp+fsdp")
def test_torchs_options_give_and_take_the_state(rank, world, name):
    """Every form that `get_state_dict` gives is taken back by `set_state_dict`, bit for bit, what a
    variant keeps included."""
    first = Training(CASES[name], variant="normuon")
    first.train(range(SAVED_AT))
    saved = {}
    for form, (saving, _) in OPTIONS.items():
        saved[form] = found = copy.deepcopy(first.state(**saving))
        if form == "from rank 0":
            assert bool(found["model"]) == bool(found["optim"]) == (rank == 0)
        if form == "full":
            assert not any(is_distributed(w) for w in found["model"].values())
            assert found["model"]["blocks.0.mix.weight"].shape == (14, 14)
            entry = found["optim"]["state"]["blocks.0.mlp.experts.w1"]
            assert entry["momentum_buffer"].shape == (4, 6, 14)
    first.train(range(SAVED_AT, SAVED_AT + 2))
    expected = first.weights()
    first.close()
    again = Training(CASES[name], seed=1, variant="normuon")
    again.train(range(1))
    for form, loading in [*((f, options[1]) for f, options in OPTIONS.items()), ("plain", FULL)]:
        state = saved["full" if form == "plain" else form]
        if form == "plain":  # as from `torch.load`
            options = StateDictOptions(**loading)
            set_model_state_dict(again.model, dict(state["model"]), options=options)
            again.opt.load_state_dict(state["optim"])
        else:
            again.put(state, **loading)
        again.schedule.last_epoch = SAVED_AT
        again.train(range(SAVED_AT, SAVED_AT + 2))
        assert_bitwise(again.weights(), expected, form)
    again.close()


@cases("single", "ddp", "fsdp2", "tp+fsdp")
def test_adamws_moments_are_taken_over_through_a_checkpoint(rank, world, name, tmp_path):
    """As docs/from-adamw.md says, and asked for by name alone; what torch says otherwise."""
    training, folder = Training(CASES[name]), str(tmp_path)
    model, opt = training.model, training.opt
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batch(0, 0)).backward()  # ranks of tensor parallelism have the same data
    before.step()
    before.zero_grad()  # or torch takes states that are still empty for complete
    dcp.save({"optimizer": get_optimizer_state_dict(model, before)}, checkpoint_id=folder)
    ours = {"optimizer": get_optimizer_state_dict(model, opt)}
    with pytest.raises(
        dcp.api.CheckpointException, match="Missing key.*(param_names|momentum_buffer)"
    ):
        dcp.load(ours, checkpoint_id=folder)

    read = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = get_optimizer_state_dict(model, read)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, read, state)
    with pytest.raises(OwnershipError, match=r"needs 'momentum_buffer'.*opt.load_state_dict\(\[s"):
        opt.load_state_dict(read.state_dict())
    opt.load_state_dict([read.state_dict()])
    routes = {p.name: p.algorithm.value for p in opt.ownership.plan.specs.parameters}
    taken = 0
    for n, p in trainable_parameters(model):
        if routes[n] == "adamw":
            for key in ("exp_avg", "exp_avg_sq"):
                assert_bitwise(whole_tensor(opt.state[p][key]), whole_tensor(before.state[p][key]))
            taken += 1
        else:
            assert "exp_avg" not in opt.state[p]
            assert not whole_tensor(opt.state[p].get("momentum_buffer", torch.zeros(1))).any()
    assert taken
    training.train(range(2))
    training.close()


@cases("reduce_to_owner", "dedicated hsdp")
def test_what_is_saved_beside_training_and_loaded_without_code(rank, world, name, tmp_path):
    """A save that begins while updates travel and ends when training has gone on."""
    first, folder = Training(CASES[name]), str(tmp_path)
    first.train(range(SAVED_AT))
    group = dist.new_group()  # what the save exchanges must not cross with what training does
    future = dcp.async_save(first.state(), checkpoint_id=folder, process_group=group)
    first.opt.synchronize()
    expected = first.whole()
    first.train(range(SAVED_AT, SAVED_AT + STEPS))
    straight = first.weights()
    future.result()
    dist.destroy_process_group(group)

    again = Training(CASES[name], seed=1)
    again.load(folder)
    assert_bitwise(again.whole(), expected, name)
    again.train(range(SAVED_AT, SAVED_AT + STEPS))
    assert_bitwise(again.weights(), straight, name)

    for what, value in {
        "whole": expected,
        "as it lies": first.state(),
        "of the optimizer": first.opt.state_dict(),
        "of the model": first.model.state_dict(),
    }.items():
        assert_bitwise(through_a_file(value), value, f"{name}, {what}")
    again.opt.load_state_dict(through_a_file(first.opt.state_dict()))
    assert_bitwise(again.whole()["optim"], first.whole()["optim"], name)
    first.close()
    again.close()


IN_BLOCKS = {"fsdp2": "tp", "tp": "hsdp", "hsdp": "tp+fsdp", "tp+fsdp": "fsdp2"}
FULL_STEPS = [0, 1, 3, 7]


def in_mid_period(rank: int, world: int, name: str, folder: str, first: int, last: int) -> None:
    """Steps ``first`` to ``last``, from the checkpoint of another mesh where there is one."""
    training = Training(CASES[name], period=dmuon.LinearPeriod(1, 4, 6))
    training.schedule = torch.optim.lr_scheduler.StepLR(training.opt, 3, gamma=0.5)
    if first:
        state = {**training.state(), "schedule": training.schedule.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        training.put(state)
        training.schedule.load_state_dict(state["schedule"])
        saved = torch.load(f"{folder}/whole.pt", weights_only=True)
        assert_bitwise(training.whole(), saved, name)
    for step in range(first, last):
        assert training.opt.param_groups[0]["lr"] == MUON["lr"] * 0.5 ** (step // 3)
        training.train(range(step, step + 1))
        assert training.opt.stats()["full_step"] is (step in FULL_STEPS), step
    dcp.save({**training.state(), "schedule": training.schedule.state_dict()}, checkpoint_id=folder)
    whole = training.whole()
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    training.close()


def test_a_changing_period_goes_on_on_another_mesh(pools: Pools, tmp_path: Path) -> None:
    """Through four meshes, each of which saves in the middle of a period."""
    name, first = "fsdp2", 0
    for last in (2, 5, 8, 11):
        arguments = {"name": name, "folder": str(tmp_path), "first": first, "last": last}
        pools(CASES[name].world).run(__name__, "in_mid_period", arguments)
        name, first = IN_BLOCKS[name], last


@cases("fsdp2")
def test_what_a_process_measures_does_not_change_how_training_goes_on(rank, world, name, tmp_path):
    """Neither in full steps, whose kernels are in the plan, nor in block steps."""

    def calls_cost(multiplications: float) -> Any:
        speeds = choice.Speeds("torch", multiplications, choice.LEAST_STRIP)
        return patch("dmuon.kernels.choice.measured_speeds", lambda *args: speeds)

    steps = range(SAVED_AT, SAVED_AT + 4)
    with calls_cost(0.0):
        first = Training(CASES[name], period=2)
        first.train(range(SAVED_AT))
        first.save(str(tmp_path))
        first.train(steps)
    expected, ran = first.weights(), first.opt.stats()["kernels"]["ran"]
    first.close()
    with calls_cost(1e12):
        again = Training(CASES[name], seed=1, period=2)
        again.load(str(tmp_path))
        again.train(steps)
    assert again.opt.stats()["kernels"]["ran"] == ran
    assert_bitwise(again.weights(), expected, name)
    again.close()


MIX, NORM = "blocks.0.mix.weight", "blocks.0.norm.weight"
# What is wrong with a state, and the error.
WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "another shape": (lambda s, e: e[MIX].update(momentum_buffer=torch.zeros(15, 14)), MIX),
    "another algorithm": (lambda s, e: e.update({MIX: e[NORM]}), MIX),
    "fewer parameters": (lambda s, e: s["param_groups"][0]["params"].pop(), "in 1 groups"),
    "more parameters": (lambda s, e: s["param_groups"][0]["params"].append("x"), "in 1 groups"),
    "no tensor": (lambda s, e: e[MIX].update(momentum_buffer="momentum"), MIX),
    "not finite": (
        lambda s, e: e[MIX]["momentum_buffer"].view(-1)[-1:].fill_(math.nan),
        f"not finite: momentum_buffer of {MIX}",
    ),
    "no momentum": (
        lambda s, e: [e.pop(n) for n in [*e] if "momentum_buffer" in e[n]],
        "of 3 steps and has no momentum of any matrix",
    ),
}


@cases("dedicated", "fsdp2")
def test_a_state_that_does_not_fit_changes_nothing(rank, world, name, tmp_path):
    training = Training(CASES[name])
    training.train(range(2))
    training.save(str(tmp_path))
    training.train(range(2, 3))
    before = training.whole()

    def refuses(load: Callable[[], Any], told: str, what: str, kind: Any) -> None:
        with pytest.raises(kind, match=told) as caught:
            load()
        assert str(caught.value), what
        assert_bitwise(training.whole(), before, what)

    load = training.opt.load_state_dict
    for what, (change, told) in WRONG.items():
        wrong = copy.deepcopy(before["optim"])
        change(wrong, wrong["state"])
        refuses(partial(load, wrong), told, what, (ValueError, RuntimeError))
    alone, is_last = copy.deepcopy(before["optim"]), rank == world - 1
    on_one = OwnershipError if is_last else ConsensusError
    if is_last:
        alone["state"][NORM]["step"] = "three"
    refuses(partial(load, alone), "step='three'", "wrong on the last rank alone", on_one)
    alone["state"][NORM]["step"] = torch.tensor(3.0)
    alone["param_groups"][0]["muon_step"] = 3 + rank
    refuses(partial(load, alone), "muon_step=", "another state on each rank", ConsensusError)
    parts = copy.deepcopy(training.opt.state_dict())
    last = next(e for e in parts["state"].values() if "momentum_buffer" in e)["momentum_buffer"]
    if is_last:
        local_tensor(last)[-1, -1] = math.inf
    either = OwnershipError, ConsensusError  # of the owner, whoever that is
    refuses(partial(load, parts), "not finite: momentum_buffer", "not finite there alone", either)
    training.load(str(tmp_path))
    training.train(range(2, 4))
    training.close()
