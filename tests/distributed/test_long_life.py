"""A process that lives long: models come and go, in notebooks without `close`; nothing stays."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dmuon
import dmuon.optim
from dmuon.dtensors import whole_tensor
from dmuon.ownership import ownership_of
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from dmuon.types import ConsensusError, OwnershipError
from tests.distributed.compare import assert_bitwise, our_hooks
from tests.distributed.layouts import mesh_of
from tests.distributed.test_checkpoints import CASES, Training, cases
from tests.distributed.twins import MUON
from tests.internals import (
    BlockState,
    Orthogonalizer,
    OwnersEngine,
    OwnerState,
    ParamsEngine,
    ParamsRuntime,
)

pytestmark = pytest.mark.cpu_only("counts gloo's threads and files")


def mesh_for(name: str) -> DeviceMesh:
    """Made once a test: torch keeps the process groups of a mesh."""
    return mesh_of(CASES[name].mesh, CASES[name].axes)


def resources() -> dict[str, Any]:
    """Of this process, once all ranks have come here."""
    dist.barrier()
    found: dict[str, Any] = {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads of Python": [thread.name for thread in threading.enumerate()],
    }
    if os.path.isdir("/proc/self/task"):
        found |= {what: len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")}
    return found


@cases("ddp", "dedicated hsdp")
def test_nothing_is_left_of_models_that_are_closed_or_dropped(rank, world, name):
    mesh, hooks, seen = mesh_for(name), [], []
    groups = resources()["groups"]
    for round in range(5):
        closed = round in (0, 1, 4)  # the first one also sets up what torch keeps
        training = Training(CASES[name], mesh=mesh)
        training.train(range(2))
        opt = training.opt
        own = opt.ownership
        hooks += our_hooks(training.bare, training.opt)
        if closed:
            training.close()
            assert our_hooks(training.bare, training.opt) == []
            assert resources()["groups"] == groups
        tensors = [t for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)]
        weak = [weakref.ref(x) for x in (training.model, opt, own, own.runtime, *tensors)]
        del training, opt, own, tensors
        seen.append(collected())
        assert [reference() for reference in weak] == [None] * len(weak)
    closed, dropped = seen[0], seen[2]
    assert seen[1] == seen[4] == closed, f"closed: {seen}"
    assert seen[3] == dropped, f"dropped: {seen}"
    assert bool(hooks) is name.startswith("dedicated"), "those of a running optimizer are seen"


def collected() -> dict[str, Any]:
    """Resources, once what held them is gone."""
    gc.collect()  # the model, which keeps its ownership
    gc.collect()
    return resources()


def renew(training: Training, step: int, state: dict[str, Any]) -> None:
    """Another optimizer of the same model goes on with this state after ``step`` steps."""
    rates = [group["lr"] for group in training.opt.param_groups]
    training.opt = dmuon.Muon(training.model, **MUON)
    training.opt.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.opt, lambda t: 1 / (1 + t), last_epoch=step - 1
    )
    training.schedule, schedule.last_epoch = schedule, step
    for group, rate in zip(training.opt.param_groups, rates, strict=True):
        group["lr"] = rate


@cases("fsdp2", "dedicated")
def test_a_second_optimizer_for_the_same_model(rank, world, name):
    """The cell that makes the optimizer runs again over the same model."""
    case, mesh = CASES[name], mesh_for(name)
    expected = Training(case, mesh=mesh)
    expected.train(range(4))
    training = Training(case, mesh=mesh)
    training.train(range(2))
    if not case.own:  # the optimizer planned by itself, and ends the one before
        renew(training, 2, copy.deepcopy(training.opt.state_dict()))
    else:
        with pytest.raises(OwnershipError, match=r"close\(\)"):
            dmuon.dedicate_params(training.model, mesh, **case.own)
        with pytest.raises(OwnershipError, match=r"own\.close\(\) and dmuon\.dedicate_params"):
            dmuon.Muon(training.model, **MUON)
    training.train(range(2, 4))
    assert_bitwise(training.weights(), expected.weights(), name)
    training.close()
    expected.close()


def places_of(runtime: type) -> dict[str, tuple[Any, str]]:
    """Where memory may run out: what makes runtimes, state, buffers, hooks and workspaces."""
    is_sharded = runtime is ParamsRuntime
    found = {"parameters": (dmuon.groups, "reshard")} if is_sharded else {}
    return found | {
        "runtime": (runtime, "__init__"),
        "engine": (ParamsEngine if is_sharded else OwnersEngine, "_bind"),
        "bind": (runtime, "bind"),
        "state": (BlockState if is_sharded else OwnerState, "__init__"),
        "workspace": (Orthogonalizer, "reserve"),
        "warnings": (dmuon.optim, "_flaw_of_rounding"),
    }


@contextmanager
def planted(owner: Any, name: str, error: Exception | None) -> Iterator[None]:
    """Inside, a function or method raises at its end, unless there is no error."""
    function = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise error

    if error is not None:
        setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, function)


@cases("fsdp2", "dedicated")
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(rank, world, name):
    case, mesh = CASES[name], mesh_for(name)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return case.wrap(ParallelModel(width=14, hidden=6, layers=1, experts=4), mesh)

    def step(model: nn.Module, opt: dmuon.Muon | None) -> dmuon.Muon:
        if case.own:
            dmuon.dedicate_params(model, mesh, **case.own)
            opt = dmuon.Muon(model, **MUON)
        assert opt is not None
        loss_of(model, batch(0, rank)).backward()
        opt.step()
        return opt

    def optimizer(model: nn.Module) -> dmuon.Muon | None:
        return dmuon.Muon(model, **MUON) if not case.own else None

    model = fresh()
    opt = step(model, optimizer(model))
    expected = [whole_tensor(p).clone() for p in model.parameters()]
    runtime = type(opt.ownership.runtime)
    opt.ownership.close()
    for place, (owner, method) in places_of(runtime).items():
        model = fresh()
        opt, groups = optimizer(model), resources()["groups"]
        error = torch.OutOfMemoryError(place) if rank == 1 else None
        kind = ConsensusError if error is None else torch.OutOfMemoryError
        with planted(owner, method, error), pytest.raises(kind, match=place) as caught:
            step(model, opt)
        if error is None:
            assert "failed on rank 1: OutOfMemoryError" in str(caught.value)
        del caught
        assert resources()["groups"] == groups, place
        assert not any(map(ownership_of, model.parameters()))
        assert opt is None or not opt.state
        if (place, name) == ("runtime", "dedicated"):
            continue  # the weights that this rank kept are gone
        assert our_hooks(model, opt) == []
        for p in model.parameters():
            p.grad = None
        opt = step(model, opt)
        found = [whole_tensor(p) for p in model.parameters()]
        assert all(map(torch.equal, found, expected)), place
        opt.ownership.close()
