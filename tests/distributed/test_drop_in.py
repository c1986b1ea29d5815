"""``opt = dmuon.Muon(model)`` alone, and what users do around an optimizer: it must be right, or an
error at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import dmuon
from dmuon.tools.parallel_models import ParallelModel
from dmuon.types import ConsensusError, DmuonError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import (
    assert_bitwise,
    assert_equal_on_all_ranks,
    average_gradients,
    gathered,
    our_hooks,
    whole,
)
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, layouts, mesh_of, shard_units
from tests.distributed.models import Net, Used, batch, loss_of, seeded, weights
from tests.distributed.twins import MUON, Both, both

STEPS = 3


def trial(build: Callable[[], nn.Module] = Used, layout: Any = "ddp", **case: Any) -> Both:
    """As users do: the optimizer plans by itself, nobody closes it, and on a plain module the test
    averages."""
    if layout == "ddp":
        case.setdefault("wrap", DistributedDataParallel)
    case = {"averages": False} | case
    return both(build, layout, alone=True, **case).__enter__()


def averaged(t: Both, step: int) -> None:
    """A `round` in which a test averages the gradients of a plain module."""
    t.both_backward(step)
    average_gradients(t.model)


def check(t: Both) -> None:
    t.check()
    assert_equal_on_all_ranks(t.bare)


# ---- one line, on every kind of parallelism -----------------------------------------------------


class Telling(ParallelModel):
    """Names alone say what its parameters are."""

    def __init__(self) -> None:
        super().__init__(width=26, hidden=6, layers=1)
        self.tok_embeddings = self.tok
        del self.tok

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def exchange(opt: dmuon.Muon, model: nn.Module) -> None:
    """As a framework does that shards after the optimizer was made."""
    (group,) = opt.param_groups
    group["params"] = list(model.parameters())


# Whatever parameters come as, before the framework wraps the model and after.
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "named": lambda m: list(m.named_parameters()),
    "bare": lambda m: m.parameters(),
    "groups of bare": lambda m: [{"params": list(m.parameters())[i::2]} for i in range(2)],
    # Modules that nobody keeps.
    "a list of children": lambda m: nn.ModuleList(m.children()),
    "a wrapper": torch.compile,
}


def trained(layout: str, form: str) -> dict[str, Tensor]:
    """The whole weights after some steps of what users may write instead of three lines; a
    collective call."""
    laid = LAYOUTS[layout]
    model: nn.Module = seeded(Telling, 0)
    with both(Telling, layout, alone=True) as pair:  # for its mesh and data
        mesh, data_rank = pair.mesh, pair.data_rank
    opt, give = None, FORMS.get(form.removesuffix(" before"), lambda m: m)
    if form.endswith("before"):
        opt = dmuon.Muon(params=give(model), **MUON)
    elif form == "exchanged":
        opt = dmuon.Muon(model.named_parameters(), **MUON)
    model = laid.wrap(model, mesh)
    if form == "exchanged":
        exchange(opt, model)
    opt = opt or dmuon.Muon(give(model), **MUON)
    for step in range(STEPS):
        loss_of(model, batch(step, data_rank)).backward()
        if layout == "plain":
            average_gradients(model)
        opt.step()
        opt.zero_grad()
    expected = "replicated" if layout in ("ddp", "plain") else "sharded"
    assert opt.ownership.plan.layout.value == expected
    assert len(opt.param_groups) == (2 if "groups" in form else 1), "the user's groups"
    first = next(iter(getattr(model, "module", model).parameters()))
    assert opt.param_groups[0]["params"][0] is first
    return whole(getattr(model, "module", model))


@layouts("fsdp2", "ddp")
def test_one_line_is_three_lines_and_the_reference(rank, world, layout):
    with both(Telling, layout, request={"solver": "auto"}, seed=0) as pair:
        pair.train(range(STEPS))
        pair.check()
        by_three = pair.whole()
    forms = ["before", "groups of bare before", "exchanged", "after", "named", "bare"]
    forms += ["bare before", "groups of bare", "a list of children before", "a wrapper before"]
    for form in forms:
        assert_bitwise(trained(layout, form), by_three, form)


# ---- an average of weights, gradients by hand --------------------------------------------------


@distributed(2)
def test_weights_are_there_when_step_returns(rank, world):
    with both(Used, "reduced") as reduced:
        for t in (trial(), reduced):
            average_of = AveragedModel(t.bare, avg_fn=lambda average, now, count: now.clone())
            for step in range(2):
                before = whole(t.bare)
                t.backward(step)
                t.opt.step()
                average_of.update_parameters(t.bare)
                t.opt.zero_grad()
                t.opt.synchronize()
                after = whole(t.bare)
                assert_bitwise(whole(average_of.module), after)
                assert not any(torch.equal(after[name], old) for name, old in before.items())


@distributed(2)
def test_gradients_made_by_hand(rank, world):
    t = trial(Net, "plain")  # `spare` has no gradient anywhere
    params = list(t.model.parameters())
    for step in range(STEPS):
        found = torch.autograd.grad(t.loss(t.model, step, rank), params, allow_unused=True)
        for p, grad in zip(params, found, strict=True):
            p.grad = grad
        average_gradients(t.model)
        t.joint_backward(step)
        t.advance()
    check(t)


# ---- gradients that nobody averages -------------------------------------------------------------


def spoil(t: Both, fault: str) -> None:
    """On this rank."""
    weight = t.bare.mid.weight
    if fault == "rate":
        t.opt.param_groups[0]["lr"] *= 0.5
    else:
        weight.grad = None if fault == "missing" else weight.grad.to_sparse()


def assert_caught(t: Both, *names: str) -> None:
    """On every rank alike, at the first step."""
    before = weights(t.bare)
    with pytest.raises(OwnershipError) as caught:
        t.opt.step()
    text = str(caught.value)
    assert all(part in text for part in ("DistributedDataParallel", "reduce_to_owner=True", *names))
    assert gathered(text) == [text] * dist.get_world_size()
    assert_bitwise(weights(t.bare), before)
    for state in t.opt.state.values():
        assert not any(bool(torch.as_tensor(value).any()) for value in state.values())
    assert t.opt.stats()["steps"] == 0


@distributed(2)
def test_forgotten_averaging_is_an_error_at_the_first_step(rank, world):
    """Of all gradients; of one, which is named; of a last backward under DDP without sync."""
    t = trial()
    with t.model.no_sync():
        t.backward(0)
    assert_caught(t)
    for name in ("blocks.1.down.weight", "blocks.2.up.bias", "lm_head.weight"):
        t = trial(layout="plain")
        t.backward(0)
        grad = t.model.get_parameter(name).grad
        average_gradients(t.model)
        t.model.get_parameter(name).grad = grad
        assert_caught(t, name)
    t = trial(layout="plain", round=averaged)
    t.both_backward(0)
    assert_caught(t)
    average_gradients(t.model)  # and then all is well
    t.advance()
    t.train(range(1, 4))
    check(t)


@distributed(3)
def test_where_the_host_cannot_read_such_a_step_changes_nothing(rank, world):
    """And the next one raises, on every rank. Ranks that refuse take part in comparing too."""
    for at, fault, text in (
        (0, "not averaged", "gradients differ between ranks.*the wrapper, not the module inside"),
        (1, "sparse", "rank 2 refuses"),
        (4, "missing", "'mid.weight' has a gradient on 2 of 3 ranks"),  # not compared in this step
    ):
        t = trial(layout="plain", round=averaged)
        with host_cannot_read():
            t.train(range(at))
            t.both_backward(at)
            before = weights(t.bare)
            if fault != "not averaged":
                average_gradients(t.model)
            if fault != "not averaged" and rank == 2:
                spoil(t, fault)
            alone = fault == "sparse" and rank == 2
            with pytest.raises(DmuonError, match="dense") if alone else nullcontext():
                t.opt.step()
            for reset in (t.opt.zero_grad, t.twin.zero_grad):
                reset()
            with pytest.raises(DmuonError, match=text):
                t.opt.step()
            assert_bitwise(weights(t.bare), before)
            t.train(range(at, at + 3) if fault != "sparse" else ())
        if fault != "sparse":  # after which that rank is a step behind
            check(t)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def in_bfloat16(state, bucket):
    """What torch's `bf16_compress_hook` does, which DDP refuses on gloo."""
    buffer = bucket.buffer()
    sent = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16 hook"])
@distributed(2)
def test_no_false_alarm_under_ddp(rank, world, kind):
    """A step without any gradient but zeros now and then, the first ones included; and steps in
    which one rank alone has any."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = DistributedDataParallel(seeded(Tiny).to(dtype))
    if kind == "bfloat16 hook":
        model.register_comm_hook(None, in_bfloat16)
    opt = dmuon.Muon(model, lr=0.01)
    generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
    steps = 70  # the 64th is one of those in which gradients are compared
    for step in range(steps):
        x, y = torch.randn(2, 8, 6, generator=generator).to(dtype)
        loss = (model(x) - y).square().mean()
        zero = step % 16 in (0, 3, 15) or (step % 4 == 1 and rank == 0)
        (loss * (0.0 if zero else 1.0)).backward()
        opt.step()
        opt.zero_grad()
    assert opt.stats()["steps"] == steps and opt.stats()["skipped"] == 0
    assert_equal_on_all_ranks(model.module)


# ---- ranks that do not agree --------------------------------------------------------------------


@distributed(2)
def test_different_initial_weights_are_named_at_the_first_step(rank, world):
    for name in ("blocks.1.up.weight", "mid.bias"):
        t = trial(layout="plain")
        with torch.no_grad():
            t.model.get_parameter(name).add_(0.01 * (rank == world - 1))
        t.backward(0)
        average_gradients(t.model)
        before = weights(t.model)
        with pytest.raises(ConsensusError, match=name):
            t.opt.step()
        assert_bitwise(weights(t.model), before)


def train_again(t: Both) -> None:
    """With another optimizer of the same model."""
    t.model.zero_grad()
    t.opt = dmuon.Muon(t.model, **MUON)
    t.train(range(3))
    check(t)


# What one rank cannot plan, and what ranks plan differently.
PLANS = [
    ({"layout": "sharded"}, "does not take DistributedDataParallel"),
    ({"splits": {"mid.weight": (9, 9)}}, "mid.weight"),
    ({"select": lambda name, p: p.ndim == 2 and "blocks" in name and "0" in name}, "weight"),
    ({"solver": "greedy"}, "gree"),
]


@distributed(2)
def test_what_one_rank_cannot_plan_or_plans_differently_is_an_error_on_all(rank, world):
    t = trial()
    for dedicate, text in PLANS:
        opt = dmuon.Muon(t.model, **MUON, dedicate=dedicate if rank == 1 else None)
        t.backward(0)
        before = weights(t.bare)
        with pytest.raises((DmuonError, TypeError), match=text):
            opt.step()
        assert_bitwise(weights(t.bare), before)
    train_again(t)


@distributed(3)
def test_what_one_rank_finds_in_a_step_is_an_error_on_all(rank, world):
    """And training goes on where that was mended."""

    for fault, text in (
        ("sparse", "not dense"),
        ("missing", f"'mid.weight' has a gradient on {world - 1} of {world} ranks"),
        ("rate", r"lr of opt\.param_groups\[0\] is 0\.02 on rank"),
    ):
        t = trial()
        t.train(range(4))  # by now gradients are compared rarely
        t.both_backward(4)
        before = weights(t.bare)
        if rank == world - 1:
            spoil(t, fault)
        with pytest.raises(DmuonError, match=text if rank == world - 1 else f"{text}|refuses"):
            t.opt.step()
        assert_bitwise(weights(t.bare), before)
        t.opt.zero_grad()
        t.opt.param_groups[0]["lr"] = MUON["lr"]
        t.twin.zero_grad()
        t.train(range(4, 6))
        check(t)


@distributed(2)
def test_of_two_models_none_steps_where_the_second_cannot(rank, world):
    models = [seeded(Used), seeded(Used)]
    owns = [dmuon.dedicate_params(model) for model in models]
    opt = dmuon.Muon([p for model in models for p in model.parameters()], **MUON)
    for step in range(2):
        for model in models:
            loss_of(model, batch(step, rank)).backward()
            average_gradients(model)
        if step and rank == 1:
            models[1].mid.weight.grad = models[1].mid.weight.grad.to_sparse()
        before = [weights(model) for model in models]
        with pytest.raises(DmuonError, match="not dense|refuses") if step else nullcontext():
            opt.step()
        if step:
            assert_bitwise([weights(model) for model in models], before)
        opt.zero_grad()
    for own in owns:
        own.close()


def refuses(name: str, p: Tensor) -> bool:
    raise RuntimeError("this rank cannot select")


# ---- what it leaves alone, and what it says -----------------------------------------------------


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
@distributed(2)
def test_nothing_is_registered(rank, world, name):
    model = seeded(Used)
    if name == "DDP":
        model = DistributedDataParallel(model)
    elif name == "FSDP2":
        model = shard_units(model, mesh_of((world,)))
    loss_of(model, batch(0, rank)).backward()
    opt = dmuon.Muon(model, **MUON)
    for step in range(2):
        opt.step()
        opt.zero_grad()
        loss_of(model, batch(step, rank)).backward()
    assert our_hooks(getattr(model, "module", model)) == []
    if name == "DDP":
        model.register_comm_hook(None, in_bfloat16)  # which DDP takes once


@distributed(2)
def test_fsdp1_is_refused_by_name(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (False, True):
        model = FullyShardedDataParallel(
            seeded(Used), use_orig_params=original, device_id=torch.device("cpu")
        )
        for given in (model, model.parameters(), list(model.named_parameters())):
            with pytest.raises(OwnershipError, match=r"FSDP1.*fully_shard"):
                dmuon.Muon(given, **MUON)
        with pytest.raises(OwnershipError, match=r"FSDP1.*fully_shard"):
            dmuon.dedicate_params(model)
