"""Mistakes give an immediate, clear error on every rank, and nothing hangs afterwards."""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon
import dmuon.api
from dmuon.dtensors import flaw_of_device
from dmuon.types import ConsensusError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.harness import TIMEOUT_S, distributed
from tests.distributed.models import Net, batch, loss_of, seeded, wrap
from tests.distributed.twins import (
    DDP,
    PLAIN,
    REDUCED,
    REDUCING,
    assert_bitwise,
    both,
    is_same,
    mesh_of,
    sharded,
)
from tests.internals import solve_on_first, timeout_of

# Plain models whose gradients dmuon averages.
ASKING = {"options": REDUCING}


def _asked(layout: str) -> dict:
    return ASKING if layout == "replicated" else {"layout": layout}


@contextmanager
def planned(model: nn.Module | None = None, **planning):
    """A dedicated model and its ownership, closed at the end."""
    model = seeded(Net) if model is None else model
    own = dmuon.dedicate_params(model, **(ASKING | planning))
    yield model, own
    own.close()


def one_step(model: nn.Module, opt: dmuon.Muon, rank: int, step: int = 0) -> None:
    loss_of(model, batch(step, rank)).backward()
    opt.step()


ONLY = pytest.mark.parametrize("only_one", [False, True], ids=["all ranks", "one rank"])


MISTAKES = {
    "one-dimensional": (
        lambda m: dmuon.dedicate_params(m, select=lambda n, p: True),
        "tok|bias|norm",
    ),
    "later layout": (lambda m: dmuon.dedicate_params(m, layout="sharded"), "sharded"),
    "unknown solver": (lambda m: dmuon.dedicate_params(m, solver="magic"), "solver"),
    "unknown costs": (lambda m: dmuon.dedicate_params(m, costs="magic"), "costs"),
    "bad splits": (
        lambda m: dmuon.dedicate_params(m, splits={"*.up.weight": [1, 2]}),
        r"splits.*56 rows",
    ),
    "select that raises": (lambda m: dmuon.dedicate_params(m, select=lambda n, p: 1 / 0), "zero"),
    "no module": (lambda m: dmuon.dedicate_params(None), "nn.Module"),
}


@ONLY
@pytest.mark.parametrize("mistake", MISTAKES)
@distributed(2)
def test_planning_mistakes(rank, world, mistake, only_one):
    make, message = MISTAKES[mistake]
    if only_one and mistake in ("unknown solver", "unknown costs"):
        # Solver and costs are used on the first rank, and compared.
        only_one = False
    model = seeded(Net)
    guilty = not only_one or rank == 1
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        if guilty:
            make(model)
        else:
            dmuon.dedicate_params(model)
    with planned(model):  # nothing is left behind
        one_step(model, dmuon.Muon(model), rank)


@distributed(2)
def test_models_that_cannot_be_planned(rank, world):
    with pytest.raises(ValueError, match="sparse=False"):
        dmuon.dedicate_params(nn.Sequential(nn.Linear(4, 5), nn.Embedding(7, 4, sparse=True)))
    halved = seeded(Net)
    if rank == 1:
        halved.mid.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"mid.*bfloat16"):
        dmuon.dedicate_params(halved)


@distributed(2)
def test_mesh_of_the_wrong_device(rank, world):
    mesh = DeviceMesh(torch.get_default_device().type, list(range(world)))
    object.__setattr__(mesh, "_device_type", "cuda")  # there is no such device here
    if mesh.device_type != "cuda":
        raise AssertionError("cannot pretend")
    with pytest.raises(ValueError, match=r"mesh is of 'cuda'.*init_device_mesh\('cpu'"):
        dmuon.dedicate_params(seeded(Net), mesh)


@distributed(2)
def test_the_current_device_was_not_set(rank, world):
    """Raised before anything is sent, which would go to the first device of all ranks."""
    monkeypatch = pytest.MonkeyPatch
    with FakeTensorMode():
        weight = torch.empty(2, 2, device=torch.device("cuda", rank))
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        flaw = flaw_of_device([("bias", torch.zeros(2)), ("w", weight)])
    message = r"parameter 'w' lies on cuda:1.*is cuda:0.*torch\.cuda\.set_device\(local_rank\)"
    assert flaw is None if rank == 0 else re.search(message, flaw)
    for kind_of_model in ("plain", "ddp", "fsdp2"):
        wrapped = wrap(seeded(Net), kind_of_model == "ddp")
        if kind_of_model == "fsdp2":
            fully_shard(wrapped)
        planning = ASKING if kind_of_model == "plain" else {}
        with monkeypatch.context() as patch:
            patch.setattr(dmuon.api, "flaw_of_device", lambda named: flaw)
            patch.setattr(dist, "all_gather_object", lambda *_, **__: pytest.fail("sent"))
            kind, start = (OwnershipError, "") if flaw else (ConsensusError, ".*on rank 1: ")
            with pytest.raises(kind, match=start + message):
                dmuon.dedicate_params(wrapped, **planning)
        own = dmuon.dedicate_params(wrapped, **planning)  # nothing is left behind
        one_step(wrapped, dmuon.Muon(wrapped), rank)
        own.close()


@distributed(4)
def test_a_mesh_whose_groups_wait_longer_than_the_default_group(rank, world):
    """On one rank, with the line that sets it."""
    mesh = mesh_of((2, 2))
    told = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 8))
        fully_shard(model, mesh=mesh)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dmuon.dedicate_params(model).close()
        told.append([str(w.message) for w in caught if "hangs" in str(w.message)])
        for i in range(mesh.ndim):
            mesh.get_group(i).set_timeout(timedelta(seconds=TIMEOUT_S))
    assert told[1] == [] and len(told[0]) == (rank == 0)
    message = r"waits 120 s.*groups of replicate, shard wait 1800 s.*get_group\(i\)\.set_timeout"
    assert all(re.search(message, text) for text in told[0])


@pytest.mark.parametrize("timeout_s", [None, 200.0, 7.0])
@distributed(4)
def test_own_groups_wait_as_the_default_group_does(rank, world, timeout_s):
    """While they plan, as long as torch's new groups; or as long as was asked for."""
    seen, mesh = [], mesh_of((2, 2))
    with pytest.MonkeyPatch.context() as patch:

        def solved(transport, solve):
            seen.append(timeout_of(transport.group))
            return solve_on_first(transport, solve)

        patch.setattr(dmuon.api, "solve_on_first", solved)
        options = dmuon.DedicatedOptions(timeout_s=timeout_s)
        own = dmuon.dedicate_params(seeded(Net), mesh, layout="dedicated", options=options)
    groups = own.runtime.process_groups._all
    assert len(groups) > 3
    found = {timeout_of(group.group) for group in groups}
    assert seen == [timedelta(seconds=timeout_s or 1800)]
    assert found == {timedelta(seconds=timeout_s or TIMEOUT_S)}
    own.close()


OPTIMIZER_MISTAKES = {
    "duplicate": (lambda m: dmuon.Muon([*m.parameters(), m.mid.weight]), "mid.weight.*twice"),
    "missing": (lambda m: dmuon.Muon(list(m.parameters())[1:]), r"not passed.*tok\.weight"),
    "malformed": (lambda m: dmuon.Muon([{"params": m.parameters()}, {"lr": 1.0}]), "params"),
    "lr": (lambda m: dmuon.Muon(m, lr=-1.0), "lr"),
    "coefficients": (lambda m: dmuon.Muon(m, ns_coefficients="magic"), "magic"),
    "period": (lambda m: dmuon.Muon(m, period=5), "period"),
    "dtype": (lambda m: dmuon.Muon(m, ns_dtype="float8"), "float8"),
    "lr of a group": (
        lambda m: dmuon.Muon([{"params": m.parameters(), "lr": "1e-3"}]),
        r"lr must be .*'1e-3' in opt\.param_groups\[0\]",
    ),
}


@ONLY
@pytest.mark.parametrize("mistake", OPTIMIZER_MISTAKES)
@distributed(2)
def test_optimizer_mistakes(rank, world, mistake, only_one):
    make, message = OPTIMIZER_MISTAKES[mistake]
    with planned() as (model, _):
        with pytest.raises((ValueError, TypeError), match=message):
            (make if not only_one or rank == 0 else dmuon.Muon)(model)
        one_step(model, dmuon.Muon(model), rank)


@distributed(2)
def test_ddp_without_find_unused_parameters_says_so(rank, world):
    model = seeded(Net)
    wrapped = wrap(model, True, find_unused_parameters=False, bucket_cap_mb=0.001)
    own = dmuon.dedicate_params(wrapped, **ASKING)
    opt = dmuon.Muon(wrapped)
    model.use_spare = True
    loss_of(wrapped, batch(0, rank)).backward()
    opt.step()
    opt.zero_grad()
    model.use_spare = False
    loss_of(wrapped, batch(1, rank)).backward()
    with pytest.raises(ValueError, match=r"spare.*find_unused_parameters"):
        opt.step()
    own.close()


@pytest.mark.parametrize("layout", ["reduced", "dedicated"])
@distributed(2)
def test_a_state_that_one_rank_alone_asks_for_is_an_error_there(rank, world, layout):
    """And no collective of it has met one of the others'."""
    options = dmuon.ReplicatedOptions(reduce_to_owner=True, timeout_s=1.0)
    asked: dict = {"options": options}
    if layout == "dedicated":
        asked = {"layout": layout, "options": dmuon.DedicatedOptions(timeout_s=1.0)}
    with planned(**asked) as (model, _):
        opt = dmuon.Muon(model)
        one_step(model, opt, rank)
        if rank == 0:
            with pytest.raises(OwnershipError, match=r"opt\.state_dict\(\) is a collective call"):
                opt.state_dict()
        if layout == "dedicated" and rank == 0:
            with pytest.raises(OwnershipError, match=r"model\.state_dict\(\) is a collective"):
                model.state_dict()
        dist.barrier()


@distributed(2)
def test_states_that_differ_between_ranks_are_an_error_on_all_and_change_nothing(rank, world):
    with planned() as (model, _):
        opt = dmuon.Muon(model)
        one_step(model, opt, rank)
        before = copy.deepcopy(opt.state_dict())
        wrong = copy.deepcopy(before)
        if rank == 1:
            number = next(k for k, e in wrong["state"].items() if "momentum_buffer" in e)
            wrong["state"][number]["momentum_buffer"] = torch.zeros(3, 3)
        with pytest.raises((OwnershipError, ConsensusError), match=r"shape \[3, 3\]"):
            opt.load_state_dict(wrong)
        assert_bitwise(opt.state_dict(), before)
        wrong = copy.deepcopy(before)
        wrong["param_groups"][0]["lr"] = 0.5 + rank
        with pytest.raises(ConsensusError, match="ranks disagree"):
            opt.load_state_dict(wrong)
        assert_bitwise(opt.state_dict(), before)
        one_step(model, opt, rank, 1)


DIFFERENT = {
    "bucket_bytes": lambda rank: {"options": dmuon.ReplicatedOptions(bucket_bytes=1000 + rank)},
    "reduce_dtype": lambda rank: {
        "options": dmuon.ReplicatedOptions(reduce_dtype=[None, torch.float64][rank])
    },
    "planner": lambda rank: {"planner": dmuon.PlannerOptions(max_batch=1 + rank)},
    "costs": lambda rank: {"costs": ["analytic:cpu", "analytic:h200"][rank]},
    "solver": lambda rank: {"solver": ["greedy", "round_robin"][rank]},
    "heads": lambda rank: {"heads": [{}, {"*.up.weight": 2}][rank]},
}


@pytest.mark.parametrize("what", DIFFERENT)
@distributed(2)
def test_arguments_that_differ_between_ranks(rank, world, what):
    with pytest.raises(ValueError, match="disagree"):
        dmuon.dedicate_params(seeded(Net), **DIFFERENT[what](rank))


@distributed(2)
def test_optimizer_settings_that_differ_between_ranks(rank, world):
    with planned() as (model, _):
        for settings in ({"master_weights": rank == 0}, {"lr": 0.1 + rank}, {"ns_steps": 3 + rank}):
            with pytest.raises(ValueError, match="disagree"):
                dmuon.Muon(model, **settings)


@pytest.mark.parametrize("layout", ["replicated", "dedicated", "sharded"])
@distributed(2)
def test_one_rank_tells_of_updates_that_are_rounded_away(rank, world, layout):
    model = seeded(Net).bfloat16()
    if layout == "sharded":
        fully_shard(model, mesh=mesh_of((world,)))
    own = dmuon.dedicate_params(model, **_asked(layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = dmuon.Muon(model, lr=1e-5, ns_dtype=torch.float32)
    told = own.runtime.transport.gather_objects([str(w.message) for w in caught])
    text = "a typical update of a bfloat16 matrix is 2e-06, and half a unit in the last place"
    (message,) = [m for messages in told for m in messages]
    assert text in message
    one_step(model, opt, rank)
    own.close()


@distributed(2)
def test_grad_scaler_is_refused(rank, world):
    with planned() as (model, _):
        opt, scaler = dmuon.Muon(model), torch.amp.GradScaler(torch.get_default_device().type)
        scaler.scale(loss_of(model, batch(0, rank))).backward()
        with pytest.raises(ValueError, match="GradScaler"):
            scaler.step(opt)


@distributed(2)
def test_a_gradient_set_by_hand_after_backward_is_refused(rank, world):
    with planned() as (model, _):
        opt = dmuon.Muon(model)
        loss_of(model, batch(0, rank)).backward()
        model.mid.weight.grad = torch.ones_like(model.mid.weight)
        with pytest.raises(ValueError, match=r"mid\.weight.*after backward"):
            opt.step()


@distributed(2)
def test_a_wrapped_ddp_is_refused(rank, world):
    model = nn.Sequential(wrap(seeded(Net), True))
    with pytest.raises(ValueError, match="DistributedDataParallel itself"):
        dmuon.dedicate_params(model, **ASKING)


@distributed(2)
def test_gradients_set_by_hand_without_a_backward_are_averaged(rank, world):
    with planned() as (model, _):
        opt = dmuon.Muon(model, lr=0.0, weight_decay=0.0)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + 2 * rank)
        opt.step()
        buffers = [s["momentum_buffer"] for s in opt.state.values() if "momentum_buffer" in s]
        assert buffers
        assert all(torch.allclose(b, torch.full_like(b, 0.05 * 2.0)) for b in buffers)


WRONG = {"lr": float("nan"), "momentum": 2.0, "ns_steps": "5", "maximize": True}


# The layouts in which settings are compared, each with a `Net`.
LAID = {"ddp": DDP, "sharded": sharded(build=Net), "replicated": REDUCED, "dedicated": PLAIN}


@contextmanager
def refusing_step(kind: str, on: str, key: str, rank: int, when: str):
    """(pair, what a step raised), where rank 1 sets a wrong value; nothing may have changed."""
    with (
        host_cannot_read() if on == "accelerator" else nullcontext(),
        both(Net, LAID[kind], only={"publish": "sync"}) as pair,
    ):
        (group,) = pair.opt.param_groups
        pair.train_alone([0])
        before, right = pair.snapshot(), dict(group)
        if when == "before backward" and rank == 1:
            group[key] = WRONG[key]
        pair.backward(1)
        if rank == 1:
            group[key] = WRONG[key]
        raised = None
        try:
            pair.opt.step()
        except (TypeError, ValueError) as error:
            raised = error
        assert is_same(pair.snapshot(), before)
        group.pop(key, None)
        group.update(right)
        yield pair, raised


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("replicated", "before backward"),
        ("dedicated", "before backward"),
        ("sharded", "before step"),
    ],
)
@distributed(2)
def test_a_setting_that_turns_wrong_on_one_rank(rank, world, kind, when, key):
    """Every rank raises, nothing has changed, and the next step can be taken."""
    with refusing_step(kind, "host", key, rank, when) as (pair, raised):
        if rank == 1:
            told = str(raised)
            assert f"{key} must be" in told or "'maximize', which nobody reads" in told
        else:
            assert isinstance(raised, ConsensusError)
            assert "rank 1 refuses" in str(raised)
        pair.train_alone([2])


@distributed(3)
def test_a_setting_that_turns_wrong_where_the_host_cannot_read(rank, world):
    """The others learn it on the way: the step changes nothing, and the next one raises."""
    how = ("sharded", "accelerator", "lr", rank, "before step")
    with refusing_step(*how) as (pair, raised):
        assert (raised is not None) == (rank == 1)
        with pytest.raises(ConsensusError, match="rank 1 refuses"):
            pair.train_alone([2])


@distributed(2)
def test_a_period_that_differs_between_ranks(rank, world):
    """Full steps of different numbers meet: an error on every rank."""
    model = seeded(Net)
    fully_shard(model, mesh=mesh_of((world,)))
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, period=period_of_rank)
    one_step(model, opt, rank)
    with pytest.raises(ConsensusError, match="different step counts"):
        for _ in range(3):
            # No forward in between: FSDP's own collectives would wait for the other rank.
            opt.step()
    own.close()


def period_of_rank(t: int) -> int:
    return 2 + dist.get_rank()


@distributed(2)
def test_a_rank_that_does_not_come_to_a_collective(rank, world):
    with planned(options=dmuon.ReplicatedOptions(timeout_s=0.5)) as (_, own):
        if rank == 0:
            work = own.runtime.transport.all_reduce(torch.ones(1), tag="norms")
            with pytest.raises(RuntimeError, match=r"'norms'.*another rank did not come to it"):
                work.wait()
        dist.barrier()


@pytest.mark.parametrize("what", ["code", "torch"])
@distributed(2)
def test_another_version_on_one_rank_is_named(rank, world, what):
    model, patch = seeded(), pytest.MonkeyPatch()
    with patch.context() as changed:
        if rank and what == "code":
            changed.setattr("dmuon.api.code_hash", lambda: "another")
        elif rank:
            changed.setattr("torch.__version__", "another")
        with pytest.raises(
            ConsensusError, match=r"rank 1 has 'code=dmuon .*another.*' where rank 0"
        ):
            dmuon.dedicate_params(model)


CHANGED = {
    "lr": 0.5,
    "weight_decay": 0.7,
    "momentum": 0.9,
    "nesterov": False,
    "ns_steps": 6,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-6,
    "adjust_lr_fn": None,
    "momentum_mode": "sgd",
    "dampening": 0.1,
    "cautious_weight_decay": True,
    "adamw_lr_ratio": 0.5,
    "adamw_betas": (0.8, 0.95),
    "adamw_eps": 1e-5,
    "adamw_weight_decay": 0.3,
}


@pytest.mark.parametrize("on", ["host", "accelerator"])
@pytest.mark.parametrize("kind", LAID)
@distributed(2)
def test_every_hyperparameter_that_differs_is_named_on_all_ranks(rank, world, kind, on):
    """Each is another one on the last rank, for one step."""
    with (
        host_cannot_read() if on == "accelerator" else nullcontext(),
        both(Net, LAID[kind], only={"publish": "sync"}) as pair,
    ):
        pair.train_alone([0])
        (group,) = pair.opt.param_groups
        own = {"muon_step", "muon_last_full", "muon_period", "variant", "momentum_dtype"}
        assert {k for k in group if k not in ("params", "param_names")} == {*CHANGED, *own}
        before = pair.whole()
        for step, (key, value) in enumerate(CHANGED.items(), 1):
            known = {k: group[k] for k in CHANGED}
            if rank == world - 1:
                group[key] = value
                if key == "dampening":
                    group["momentum_mode"] = "sgd"
            pair.opt.zero_grad()
            pair.backward(step)
            if on != "host":  # it changes nothing, and the next step tells
                pair.opt.step()
                group.update(known)
            told = rf"hyperparameters: .*{key} of opt\.param_groups\[0\] is .* on rank 0, .*"
            match = rf"different {told} on rank {world - 1}\. Set"
            with pytest.raises(ConsensusError, match=match) as caught:
                pair.opt.step()
            group.update(known)
            text = str(caught.value)
            assert repr(value) in text and repr(known[key]) in text, text
            names = [k for k in CHANGED if f" {k} of opt" in text]
            assert names == [key] or (key == "dampening" and "momentum_mode" in names), names
            assert_bitwise(pair.whole(), before, key)
        pair.opt.zero_grad()
        pair.train_alone([30])


@distributed(3)
def test_only_what_differs_is_named_when_planning(rank, world):
    with planned() as (model, _), pytest.raises(ConsensusError) as caught:
        dmuon.Muon(model, momentum=0.9 if rank == 1 else 0.95, adamw_eps=[1e-8, 1e-6, 1e-8][rank])
    assert str(caught.value) == (
        "dmuon.Muon: ranks disagree: rank 1 has 'param_groups[0]: momentum=0.9', "
        "'param_groups[0]: adamw_eps=1e-06' where rank 0 has 'param_groups[0]: momentum=0.95', "
        "'param_groups[0]: adamw_eps=1e-08'. Build the same model with the same arguments on "
        "every rank"
    )
