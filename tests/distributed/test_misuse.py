"""Mistakes give an immediate, clear error on every rank, and nothing hangs afterwards."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import dmuon
import dmuon.api
from dmuon.dtensors import flaw_of_device
from dmuon.tools.parallel_models import ParallelModel
from dmuon.types import ConsensusError, DmuonError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, average_gradients
from tests.distributed.harness import TIMEOUT_S, distributed
from tests.distributed.layouts import REDUCING, mesh_of
from tests.distributed.models import Net, Used, batch, loss_of, seeded, wrap
from tests.distributed.twins import MUON, Both, both, follow, laid_out
from tests.internals import solve_on_first, timeout_of
from tests.transports import RecordingTransport

# Plain models whose gradients dmuon averages.
ASKING = {"options": REDUCING}


@contextmanager
def planned(**planning):
    """A dedicated model and its ownership, closed at the end."""
    model = seeded(Net)
    own = dmuon.dedicate_params(model, **(ASKING | planning))
    yield model, own
    own.close()


def one_step(model: nn.Module, opt: dmuon.Muon, rank: int, step: int = 0) -> None:
    loss_of(model, batch(step, rank)).backward()
    opt.step()


# ---- what cannot be planned ------------------------------------------------------------------


def used():
    return seeded(Used)


def of_shards():
    return laid_out("fsdp2")[0]


def in_ddp():
    return wrap(used(), find_unused_parameters=False)


def halved():
    model = used()
    return model.mid.to(torch.bfloat16) and model


def of_another_size():
    return seeded(Net, hidden=48)


def replaced(local, placement, **shape):
    """A parameter is made of this local tensor."""
    model = of_shards()
    mix = model.blocks[0].mix
    known = {name: getattr(mix.weight, name) for name in shape}
    known["stride"] = known["stride"]() if "stride" in known else None
    made = DTensor.from_local(local, mix.weight.device_mesh, [placement], run_check=False, **known)
    mix.weight = nn.Parameter(made)
    return model


def mesh_of_cuda():
    """There is no such device here."""
    mesh = DeviceMesh(torch.get_default_device().type, [0, 1])
    object.__setattr__(mesh, "_device_type", "cuda")
    return mesh


ALL, ONE, EITHER = [(0, 1)], [(1,)], [(0, 1), (1,)]  # who makes a mistake
HALF = {"layout": "dedicated"}
# A model, what is asked for (of a rank), the error, and who.
PLANNING = [
    (used, {"select": lambda name, p: 1 / 0}, "zero", EITHER),
    (halved, {}, r"mid.*bfloat16", ONE),
    (of_another_size, {}, r"rank 1 has .*up\.weight.*48", ONE),
    (used, lambda rank: {"mesh": mesh_of_cuda()}, r"of 'cuda'.*init_device_mesh\('cpu'", ALL),
    (lambda: nn.Sequential(wrap(used(), True)), ASKING, "DistributedDataParallel itself", ALL),
    (in_ddp, {"layout": "sharded"}, r"does not take DistributedDataParallel.*HSDP", ALL),
    (in_ddp, HALF, "constructor refuses the placeholders", ALL),
    (lambda: fully_shard(used()), HALF, "after fully_shard", ALL),
    # Of shards.
    (partial(replaced, torch.zeros(50, 50), Partial()), {}, r"mix\.weight.*[Rr]edistribute",
     EITHER),
    # A local tensor that is not what the placements say.
    (partial(replaced, torch.zeros(3, 50), Replicate(), shape=0, stride=0), {},
     r"mix\.weight.*stores \[3, 50\]", EITHER),
    (of_shards, {"layout": "replicated"}, r"'tok\.weight' is a DTensor", EITHER),
    (of_shards, {"options": REDUCING}, "must be ShardedOptions, found Replicated", EITHER),
    (of_shards, {"splits": {"*.mix.weight": [20, 30]}}, r"mix\.weight", ONE),
    (of_shards, {"options": dmuon.ShardedOptions(min_buckets=3)}, "disagree.*min_buckets", ONE),
    # Arguments that differ.
    (used, {"options": dmuon.ReplicatedOptions(bucket_bytes=1001)}, "disagree", ONE),
    (used, {"options": dmuon.ReplicatedOptions(reduce_dtype=torch.float64)}, "disagree", ONE),
    (used, {"planner": dmuon.PlannerOptions(max_batch=2)}, "disagree", ONE),
    (used, {"planner": dmuon.PlannerOptions(ranks_per_node=1)}, r"rank 1 has .*LOCAL_W.*=1", ONE),
    (used, {"costs": "analytic:h200"}, "disagree", ONE),
    (used, {"solver": "round_robin"}, "disagree", ONE),
    (used, {"heads": {"*.up.weight": 2}}, "disagree", ONE),
    (used,
     lambda rank: ASKING | {"kernels": dmuon.KernelOptions(method=("standard", "gram")[rank])},
     r"disagree.*KernelOptions\(method='(standard|gram)'", ALL),
]  # fmt: skip


@pytest.mark.parametrize("half", [0, 1])
@distributed(2)
def test_planning_mistakes(rank, world, half):
    for build, asked, message, who in PLANNING[half::2]:
        for guilty in who:
            asked_here = asked(rank) if callable(asked) else asked
            model, own = (build(), asked_here) if rank in guilty else (used(), {})
            if rank not in guilty and (build is of_shards or isinstance(build, partial)):
                model = of_shards()
            with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
                dmuon.dedicate_params(**{"model": model, **own})
    follow(Net, "reduced", steps=1)  # nothing is left behind


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
    for kind_of_model in ("plain", "fsdp2"):
        wrapped = seeded(Net)
        if kind_of_model == "fsdp2":
            fully_shard(wrapped)
        planning = ASKING if kind_of_model == "plain" else {}
        with monkeypatch.context() as patch:
            patch.setattr(dmuon.dtensors, "flaw_of_device", lambda named: flaw)
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


@pytest.mark.parametrize("timeout_s", [None, 7.0])
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


# ---- optimizers ------------------------------------------------------------------------------


@distributed(2)
def test_optimizer_mistakes(rank, world):
    """Of one rank; and settings that are right, but differ."""
    with planned() as (model, _):
        given = [*model.parameters()][1:] if rank == 0 else model
        with pytest.raises(ValueError, match=r"not passed.*tok\.weight"):
            dmuon.Muon(given)
        for settings in ({"master_weights": rank == 0}, {"lr": 0.1 + rank}, {"ns_steps": 3 + rank}):
            with pytest.raises(ValueError, match="disagree"):
                dmuon.Muon(model, **settings)
        one_step(model, dmuon.Muon(model), rank)


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
def test_one_rank_tells_of_updates_that_are_rounded_away(rank, world):
    model = seeded(Net).bfloat16()
    own = dmuon.dedicate_params(model, layout="dedicated")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = dmuon.Muon(model, lr=1e-5, ns_dtype=torch.float32)
    told = own.runtime.transport.gather_objects([str(w.message) for w in caught])
    text = "a typical update of a bfloat16 matrix is 2e-06, and half a unit in the last place"
    (message,) = [m for messages in told for m in messages]
    assert text in message
    one_step(model, opt, rank)
    own.close()


# ---- what a user does between steps ------------------------------------------------------------


def in_grad_scaler(pair):
    scaler = torch.amp.GradScaler(torch.get_default_device().type)
    scaler.scale(pair.loss(pair.model, 1, pair.data_rank)).backward()
    scaler.step(pair.opt)


def a_gradient_by_hand(pair):
    pair.backward(1)
    pair.bare.mid.weight.grad = torch.ones_like(pair.bare.mid.weight)


def a_step_before_backward(pair):
    early = pair.loss(pair.model, 0, pair.data_rank)
    pair.backward(1)
    pair.opt.step()
    early.backward()


def converted(pair):
    pair.model.bfloat16()  # FSDP2 takes this before its first forward only
    pair.backward(1)


def assigned(pair):
    pair.model.mid.weight.data = torch.randn(18, 24)
    pair.backward(1)


def without_spare(pair):
    pair.bare.use_spare = False
    pair.backward(1)


def another(name):
    """It would never be trained again."""

    def replace(pair):
        path, _, local = name.rpartition(".")
        torch.manual_seed(1)
        shape = dict(pair.twin.named_parameters())[name].shape
        setattr(pair.bare.get_submodule(path), local, nn.Parameter(torch.randn(shape) / 10))
        pair.backward(1)

    return replace


def sharded_late(pair):
    """Of a model with tensor parallelism the others stay as they were planned."""
    model, mesh = pair.model, mesh_of((2,))
    for part in [model.blocks[0].mix] if isinstance(model, ParallelModel) else [model]:
        fully_shard(part, mesh=mesh)
    pair.backward(1)


def unfrozen(pair):
    pair.bare.mid.weight.requires_grad_(True)
    pair.backward(1)


def closed(pair):
    pair.own.close()
    pair.backward(1)


def setting(key, value):
    def change(pair):
        (group,) = pair.opt.param_groups
        group[key] = value
        pair.backward(1)

    return change


def sparse(pair):
    pair.backward(1)
    pair.bare.mid.weight.grad = pair.bare.mid.weight.grad.to_sparse()


def missing(pair):
    pair.backward(1)
    pair.bare.mid.weight.grad = None


def unsynchronized(pair):
    with pair.model.no_sync():
        pair.backward(1)


def unaveraged(*names):
    """Of these, or of all."""

    def backward(pair):
        pair.averages = False
        pair.backward(1)
        chosen = [pair.model.get_parameter(n) for n in names] or [*pair.model.parameters()]
        own = [p.grad for p in chosen]
        average_gradients(pair.model)
        for p, grad in zip(chosen, own, strict=True):
            p.grad = grad
        pair.averages = True

    return backward


def weights_of_its_own(name):
    def begin(pair):
        with torch.no_grad():
            pair.model.get_parameter(name).add_(0.01 * dist.get_rank())
        pair.backward(1)

    return begin


def planned_by_itself(**dedicate):
    def plan(pair):
        pair.opt = dmuon.Muon(pair.model, **MUON, dedicate=dedicate)
        pair.backward(1)

    return plan


@dataclass(frozen=True)
class Act:
    """What a user does in place of a backward pass, ``after`` some steps, on all ranks or
    ``on_last`` alone; what is ``told``, and the ``others`` if they are told something else. Where
    the host cannot read (``late``), they are told in the step after. ``case``: arguments of `both`.
    """

    layout: str
    do: Callable[[Both], Any]
    told: str
    others: str = ""
    after: int = 1
    on_last: bool = False
    late: bool = False
    goes_on: bool = False  # then training goes on, once that is mended
    case: dict[str, Any] = field(default_factory=dict)


STRICT = {"wrap": partial(wrap, find_unused_parameters=False, bucket_cap_mb=0.001)}
SPARE = {"change": lambda model: setattr(model, "use_spare", True)}
FROZEN = {"build": Used, "change": lambda model: model.mid.weight.requires_grad_(False)}
ALONE = {"build": Used, "alone": True}  # the optimizer plans by itself
NORM, REFUSES = "blocks.0.norm.weight", "rank 1 refuses"
AVERAGE = r"DistributedDataParallel.*reduce_to_owner=True"
WRONG = {"lr": math.nan, "momentum": 2.0, "ns_steps": "5", "maximize": True}
mends = partial(Act, on_last=True, goes_on=True)
ACTS = [
    Act("reduced", in_grad_scaler, "GradScaler"),
    Act("reduced", a_gradient_by_hand, r"mid\.weight.*after backward"),
    Act("reduced ddp", without_spare, r"spare.*find_unused_parameters", case=STRICT | SPARE),
    Act("dedicated", a_step_before_backward, "between this forward pass and its backward"),
    Act("dedicated", converted, r"is now .* torch\.bfloat16 .* Move or convert"),
    Act("dedicated", assigned, r"mid\.weight.* by an assignment to its data"),
    Act("fsdp2", converted, r"'tok\.weight' is now.*bfloat16.*float32.*own\.close\(\)", after=0),
    Act("fsdp2", closed, r"closed.*dedicate_params"),
    Act("plain", sharded_late, r"fully_shard.*before", after=0, case={"averages": False}),
    Act("tp", sharded_late, r"fully_shard.*before", after=0),
    *(
        Act(layout, another(name), f"'{name}' is another parameter object")
        for layout, name in [
            *product(("dedicated", "reduced ddp"), ("mid.weight", NORM)),
            ("dedicated fsdp", "blocks.1.up.weight"),
            ("tp", "blocks.0.mix.weight"),
        ]
    ),
    *(
        Act(layout, unfrozen, r"mid\.weight.*own\.close", case=FROZEN)
        for layout in ("reduced", "dedicated")
    ),
    # Gradients that nobody averages, and replicas that differ from the start.
    Act("ddp", unsynchronized, AVERAGE, after=0, case=ALONE),
    *(
        Act("plain", unaveraged(*names), "".join(names) + ".*" + AVERAGE, after=0, goes_on=True)
        for names in ((), ("blocks.1.down.weight",), ("blocks.2.up.bias",))
    ),
    Act("plain", unaveraged(), "gradients differ between ranks.*the wrapper, not the module inside",
        after=0, late=True, goes_on=True),
    *(
        Act("plain", weights_of_its_own(name), name, after=0, case=ALONE)
        for name in ("blocks.1.up.weight", "mid.bias")
    ),
    # What one rank cannot plan, or plans otherwise.
    *(
        Act("ddp", planned_by_itself(**asked), told, after=0, on_last=True, case=ALONE)
        for asked, told in [
            ({"layout": "sharded"}, "does not take DistributedDataParallel"),
            ({"splits": {"mid.weight": (9, 9)}}, "mid.weight"),
            ({"select": lambda name, p: p.ndim == 2 and "blocks.0" in name}, "weight"),
            ({"solver": "greedy"}, "gree"),
        ]
    ),
    # What one rank alone finds. By the fourth step gradients are compared rarely.
    mends("ddp", sparse, "not dense", REFUSES, after=4, case=ALONE),
    mends("ddp", missing, "'mid.weight' has a gradient on 1 of 2 ranks", after=4, case=ALONE),
    mends("plain", missing, "'mid.weight' has a gradient on 1 of 2 ranks", after=4, late=True),
    Act("plain", sparse, "dense", REFUSES, on_last=True, late=True),
    *(
        mends(layout, setting(key, wrong), f"{key} must be|'maximize', which nobody reads", REFUSES,
              late=layout == "fsdp2")
        for layout, (key, wrong) in product(("dedicated", "fsdp2"), WRONG.items())
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ACTS)))
@distributed(2)
def test_what_is_done_between_steps_is_told_on_every_rank(rank, world, number):
    """Nothing has changed then."""
    act = ACTS[number]
    is_guilty = rank == world - 1 or not act.on_last
    errors = (ValueError, TypeError) if is_guilty else ConsensusError if act.others else DmuonError
    told = pytest.raises(errors, match=act.told if is_guilty else act.others or act.told)
    transport = None if "alone" in act.case else RecordingTransport
    with (
        host_cannot_read() if act.late else nullcontext(),
        both(layout=act.layout, transport=transport, **act.case) as pair,
    ):
        pair.train(range(act.after))
        groups, before, sent = [dict(group) for group in pair.opt.param_groups], None, 0
        with told if not act.late or (is_guilty and act.others) else nullcontext():
            act.do(pair) if is_guilty else pair.backward(1)
            before, sent = pair.snapshot(), len(pair.events) if transport else 0
            pair.opt.step()
        for group, kept in zip(pair.opt.param_groups, groups):
            group.clear(), group.update(kept)
        if act.late:
            pair.opt.zero_grad()
            with pytest.raises(DmuonError, match=act.others or act.told):
                pair.opt.step()
        if before is not None:
            found = pair.snapshot()
            assert_bitwise(found[: len(before)], before)
            assert not any(map(torch.any, found[len(before) :])), "state that planning made"
        if "another" in act.told:  # a step sends nothing but that before; the others have to know
            assert {event.tag for event in pair.events[sent:]} <= {"verdict", "norms"}
        if (act.layout, act.do) == ("fsdp2", converted):
            with pytest.raises(DmuonError, match=act.told):
                dmuon.clip_grad_norm_(pair.model, 1.0)
        if act.goes_on:
            pair.opt.zero_grad()
            pair.train(range(act.after, act.after + 2))
            pair.check()


@distributed(2)
def test_a_model_that_is_moved_to_where_it_is(rank, world):
    for layout in ("fsdp2", "dedicated", "reduced"):
        with both(layout=layout) as pair:
            for step in range(3):
                pair.train([step])
                pair.model.to("cpu").float()
                if layout != "fsdp2":  # what it does to another device
                    for p in pair.model.parameters():
                        p.data = p.data.clone()
            pair.check()


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


@distributed(2)
def test_keys_of_the_users_own_may_differ_between_ranks(rank, world):
    """What ranks compare are hyperparameters: at planning, at steps and where a state is loaded."""
    with both(Net, "ddp") as pair:
        for group in pair.opt.param_groups:
            group |= {"name": f"of rank {rank}", "tag": object(), f"only_{rank}": rank}
        pair.train([0])
        pair.opt.param_groups[0]["tag"] = rank
        pair.train([1])
        state = pair.opt.state_dict()
        pair.opt.load_state_dict(state)
        pair.train([2])
        pair.check()
        assert pair.opt.param_groups[0]["name"] == f"of rank {rank}"
        pair.opt.param_groups[0]["momentum"] = 0.5 + 0.1 * rank
        pair.backward(3)
        with pytest.raises(ConsensusError, match="different hyperparameters.*momentum"):
            pair.opt.step()


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


@distributed(2)
def test_another_version_on_one_rank_is_named(rank, world):
    for what in ("dmuon.api.code_hash", "torch.__version__"):
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(what, "another" if "torch" in what else lambda: "another")
            told = r"rank 1 has 'code=dmuon .*another.*' where rank 0"
            with pytest.raises(ConsensusError, match=told):
                dmuon.dedicate_params(seeded())


CHANGED = {
    "lr": 0.5, "weight_decay": 0.7, "momentum": 0.9, "nesterov": False, "ns_steps": 6,
    "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-6, "adjust_lr_fn": None,
    "momentum_mode": "sgd", "dampening": 0.1, "cautious_weight_decay": True,
    "adamw_lr_ratio": 0.5, "adamw_betas": (0.8, 0.95), "adamw_eps": 1e-5, "adamw_weight_decay": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "on"), [("reduced", "host"), ("fsdp2", "accelerator")])
@distributed(2)
def test_every_hyperparameter_that_differs_is_named_on_all_ranks(rank, world, kind, on):
    """Each is another one on the last rank, for one step."""
    with host_cannot_read() if on == "accelerator" else nullcontext(), both(Net, kind) as pair:
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


# ---- sharded models --------------------------------------------------------------------------


@distributed(2)
def test_a_mesh_without_all_ranks_of_a_parameter(rank, world):
    model = of_shards()
    alone = mesh_of((world, 1), ("other", "mine"))["mine"]
    with pytest.raises(ValueError, match=rf"also lies on global ranks \[{1 - rank}\].*mesh of all"):
        dmuon.dedicate_params(model, alone)
    dmuon.dedicate_params(model).close()


@distributed(2)
def test_plans_of_another_mesh_or_layout(rank, world):
    def plan_of(model, **kwargs):
        own = dmuon.dedicate_params(model, **kwargs)
        own.close()
        return own.plan

    flat, tensor_parallel = plan_of(of_shards()), plan_of(laid_out("tp")[0])
    with pytest.raises(ValueError, match="layout 'sharded'; this model is 'reduce_to_owner'"):
        plan_of(ParallelModel(), plan=flat, **ASKING)
    # Who owns what is the same wherever momentum lies with the parameters.
    assert plan_of(ParallelModel(), plan=flat).owners == flat.owners
    with pytest.raises(ValueError, match="the saved plan does not fit"):
        plan_of(of_shards(), plan=tensor_parallel)
    with pytest.raises(ValueError, match="disagree"):
        plan_of(of_shards(), plan=flat if rank else None)
    follow(layout="fsdp2", steps=2, request={"plan": flat, "solver": "auto"})
