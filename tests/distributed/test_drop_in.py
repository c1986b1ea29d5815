"""``opt = dmuon.Muon(model)`` alone, and what users do around an optimizer: it must be right, or an
error at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.tools import parallel_models
from dmuon.tools.parallel_models import ParallelCase, ParallelModel, replicated_case
from dmuon.types import ConsensusError, DmuonError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.fsdp import snapshot
from tests.distributed.harness import Pools, distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    largest_difference,
    loss_of,
    seeded,
    weights,
)
from tests.distributed.owners import MUON, assert_bitwise, assert_close, gathered
from tests.distributed.sharded import BY_NAME

STEPS = 5
TOLERANCE = 1e-5  # after five steps; NS runs in float32 (`MUON`)


class Used(Net):
    """Every parameter is used, as DDP without find_unused_parameters wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.use_spare = True


@dataclass
class Trial:
    """A model as it is called on every rank, and its twin in one process on everybody's data."""

    model: nn.Module
    twin: nn.Module
    opt: dmuon.Muon
    ref: ReferenceMuon
    rank: int
    world: int

    @property
    def bare(self) -> Net:
        return getattr(self.model, "module", self.model)

    def loss(self, step: int, parts: int = 1) -> Tensor:
        return loss_of(self.model, batch(step, self.rank)) / parts

    def joint_backward(self, step: int, parts: int = 1) -> None:
        for rank in range(self.world):
            (loss_of(self.twin, batch(step, rank)) / (self.world * parts)).backward()

    def both_backward(self, step: int) -> None:
        self.loss(step).backward()
        self.joint_backward(step)

    def advance(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        self.ref.step()
        self.ref.zero_grad()

    def train(self, steps: range) -> None:
        for step in steps:
            self.both_backward(step)
            self.advance()

    def check(self) -> None:
        assert_close(weights(self.bare), weights(self.twin), TOLERANCE)
        assert_equal_on_all_ranks(self.bare)


def trial(
    rank: int,
    world: int,
    build: Callable[[], nn.Module] = Used,
    ddp: dict[str, Any] | None = None,
    wrap: Callable[..., nn.Module] | None = DistributedDataParallel,
    **muon: Any,
) -> Trial:
    """``wrap=None``: a plain module, so that the test averages."""
    model, twin = seeded(build), seeded(build)
    if wrap is not None:
        model = wrap(model, **(ddp or {}))
    opt = dmuon.Muon(model, **(MUON | muon))
    return Trial(model, twin, opt, ReferenceMuon(twin, **MUON), rank, world)


def average(*params: Tensor) -> None:
    """Of the gradients, by hand."""
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ---- one line, on every kind of parallelism -----------------------------------------------------


class Telling(ParallelModel):
    """Names alone say what its parameters are."""

    def __init__(self) -> None:
        super().__init__(width=26, hidden=6)
        self.tok_embeddings = self.tok
        del self.tok

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


PARALLEL = {name: replace(BY_NAME[name], build=Telling) for name in ("fsdp4", "hsdp", "tp+fsdp")}
PARALLEL["ddp"] = replace(replicated_case(4, DistributedDataParallel), build=Telling)
PARALLEL["plain"] = replace(replicated_case(1), build=Telling)

# Of a user's two groups the second has no decay: norms, biases, and one matrix.
DECAY = 0.3, 0.0
SCHEDULES = (lambda t: 1 / (1 + 0.1 * t)), (lambda t: 1 - 0.05 * t)


def in_second(name: str) -> bool:
    return name.endswith("bias") or "norm" in name or "blocks.0.mix." in name


def two(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Named parameters in two groups."""
    named = list(model.named_parameters())
    return [[(n, p) for n, p in named if in_second(n) is second] for second in (False, True)]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": g, "weight_decay": d} for g, d in zip(two(model), DECAY, strict=True)]


def with_schedules(opt: Any) -> LambdaLR:
    return LambdaLR(opt, list(SCHEDULES))


def exchange(opt: dmuon.Muon, model: nn.Module) -> None:
    """As a framework does that shards after the optimizer was made."""
    (group,) = opt.param_groups
    group["params"] = list(model.parameters())


def trained(case: ParallelCase, form: str, data_rank: int, **muon: Any) -> dict[str, Tensor]:
    """The whole weights after some steps; a collective call."""
    torch.manual_seed(0)
    model = case.build()
    own = None
    muon = MUON | muon
    if form == "before":
        opt = dmuon.Muon(model, **muon)
    elif form == "exchanged":
        opt = dmuon.Muon(model.named_parameters(), **muon)
    model = case.parallelize(
        model, case.make_mesh(torch.get_default_device().type) if dist.is_initialized() else None
    )
    if form.startswith("three"):
        own = dmuon.dedicate_params(model, costs="analytic")
        muon.pop("dedicate", None)
    if form in ("after", "three"):
        opt = dmuon.Muon(model, **muon)
    elif form == "named":
        opt = dmuon.Muon(model.named_parameters(), **muon)
    elif form.endswith("groups"):
        opt = dmuon.Muon(groups(model), **muon)
    elif form == "exchanged":
        exchange(opt, model)
    schedule = with_schedules(opt) if form.endswith("groups") else None
    for step in range(STEPS):
        parallel_models.loss_of(model, parallel_models.batch(step, data_rank)).backward()
        opt.step()
        opt.zero_grad()
        if schedule is not None:
            schedule.step()
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    assert opt.ownership.plan.layout.value == ("sharded" if is_sharded else "replicated")
    assert len(opt.param_groups) == (2 if form.endswith("groups") else 1), "the user's groups"
    bare = getattr(model, "module", model)
    found = {n: whole_tensor(p).detach().clone() for n, p in bare.named_parameters()}
    if own is not None:
        own.close()
    return found


def expected(case: ParallelCase, data_world: int, grouped: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    twin = case.build()
    references: list[Any] = [ReferenceMuon(twin, **MUON)]
    schedules = []
    if grouped:
        references = []
        for named, decay, factor in zip(two(twin), DECAY, SCHEDULES, strict=True):
            is_matrix = [p.ndim == 2 and not n.startswith(("tok", "lm_head")) for n, p in named]
            matrices = [p for (_, p), muon in zip(named, is_matrix, strict=True) if muon]
            others = [p for (_, p), muon in zip(named, is_matrix, strict=True) if not muon]
            mine = [
                ReferenceMuon(matrices, MUON["lr"], decay, ns_dtype=torch.float32),
                torch.optim.AdamW(others, MUON["adamw_lr"], betas=(0.9, 0.95), weight_decay=decay),
            ]
            references += mine
            schedules += [LambdaLR(reference, factor) for reference in mine]
    for step in range(STEPS):
        losses = [
            parallel_models.loss_of(twin, parallel_models.batch(step, r)) for r in range(data_world)
        ]
        torch.stack(losses).mean().backward()
        for each in references:
            each.step()
            each.zero_grad()
        for schedule in schedules:
            schedule.step()
    return {n: p.detach() for n, p in twin.named_parameters()}


def check_forms(name: str, rank: int, world: int, **muon: Any) -> None:
    case = PARALLEL[name]
    in_tensor = 2 if "tp" in case.axes else 1
    run = partial(trained, case, data_rank=rank // in_tensor, **muon)
    by_three, in_groups = run("three"), run("three, groups")
    assert largest_difference(by_three, in_groups) > 1e-3, "decay and schedules count"
    for form in ("after", "before", "named", *(["exchanged"] if world > 1 else [])):
        assert_bitwise(run(form), by_three)
    assert_bitwise(run("groups"), in_groups)
    if rank == 0:
        for found, grouped in ((by_three, False), (in_groups, True)):
            assert_close(found, expected(case, world // in_tensor, grouped), TOLERANCE)


@pytest.mark.parametrize("name", ["fsdp4", "hsdp", "tp+fsdp", "ddp"])
@distributed(4)
def test_one_line_is_three_lines_and_the_reference(rank, world, name):
    check_forms(name, rank, world)


def test_one_line_in_one_process():
    check_forms("plain", 0, 1, dedicate={"costs": "analytic"})


# ---- clipping ----------------------------------------------------------------------------------


@distributed(2)
def test_either_way_to_clip_is_that_of_one_process(rank, world):
    """Torch's and dmuon's by turns; each comes first once, before anything is planned."""
    ways = [
        lambda t, bite: nn.utils.clip_grad_norm_(t.model.parameters(), bite),
        lambda t, bite: dmuon.clip_grad_norm_(t.model, bite),
        lambda t, bite: dmuon.clip_grad_norm_(t.bare, bite),
    ]
    for first in (0, 1):
        t = trial(rank, world)
        for step in range(STEPS):
            t.both_backward(step)
            norm = float(nn.utils.get_total_norm([p.grad for p in t.twin.parameters()]))
            found = float(ways[(first + step) % 3](t, norm / 3))
            nn.utils.clip_grad_norm_(t.twin.parameters(), norm / 3)
            assert abs(found / norm - 1) <= 1e-6
            assert gathered(found) == [found] * world
            t.advance()
        t.check()


# ---- gradients that are not finite --------------------------------------------------------------


def poison(model: nn.Module, name: str, value: float) -> None:
    """Put ``value`` into a gradient on rank 1 alone."""
    if dist.get_rank() == 1:
        grad = model.get_parameter(name).grad
        assert grad is not None
        grad.view(-1)[-1] = value


def someone_elses(opt: dmuon.Muon) -> str:
    """A matrix that rank 0 owns."""
    own = opt.ownership
    return next(m.name for m in own.plan.specs.matrices if own.owner_of(m.name) == 0)


def unchanged(before: list[Tensor], t: Trial) -> bool:
    after = snapshot(t.bare, t.opt)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@distributed(2)
def test_a_nan_on_one_rank_skips_the_step_on_all(rank, world):
    t = trial(rank, world)
    skipped = 0
    for step in range(4):
        if step != 2:  # the very first step too
            wheres = ["mid.weight", "blocks.0.norm.bias", "tok.weight"]
            wheres += [someone_elses(t.opt)] if step else []
            for name in wheres:
                t.loss(step).backward()
                poison(t.bare, name, float("nan"))
                before = snapshot(t.bare, t.opt) if step else None
                t.opt.step()
                t.opt.zero_grad()
                skipped += 1
                assert before is None or unchanged(before, t), name
                assert t.opt.stats()["skipped"] == skipped and not t.opt.stats()["finite"]
        t.train(range(step, step + 1))
        assert t.opt.stats()["skipped"] == skipped and t.opt.stats()["finite"]
    t.check()


SCALES = [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]  # the third step is skipped


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_ and clip", "step alone"])
@pytest.mark.parametrize("where", ["loss", "matrix", "other"])
@distributed(2)
def test_grad_scaler_skips_alike(rank, world, where, unscale):
    """An inf in rank 1's loss, which DDP spreads, or put into p.grad on that rank alone."""
    t = trial(rank, world)
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=2.0**10, growth_interval=2
    )
    scales = []
    for step in range(len(SCALES)):
        bad = step == 2
        factor = float("inf") if bad and where == "loss" and rank == 1 else 1.0
        scaler.scale(t.loss(step) * factor).backward()
        if bad:
            if where != "loss":
                name = someone_elses(t.opt) if where == "matrix" else "blocks.1.norm.weight"
                poison(t.bare, name, float("inf"))
            before = snapshot(t.bare, t.opt)
        else:
            t.joint_backward(step)
        if unscale:
            scaler.unscale_(t.opt)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
            if not bad:
                nn.utils.clip_grad_norm_(t.twin.parameters(), 0.1)
        scaler.step(t.opt)
        scaler.update()
        t.opt.zero_grad()
        if bad:
            assert unchanged(before, t) and t.opt.stats()["skipped"] == 1
            if where != "loss":
                return  # torch lowers the scale of that rank alone: what comes is not averaged
        else:
            t.ref.step()
            t.ref.zero_grad()
        scales.append(scaler.get_scale())
    found = gathered(scales)
    assert found == [SCALES] * world, f"scales by rank and step: {found}"
    t.check()


# ---- an average of weights ----------------------------------------------------------------------


def copies(model: nn.Module) -> list[Tensor]:
    return [local_tensor(p).detach().clone() for p in model.parameters()]


@distributed(2)
def test_weights_are_there_when_step_returns(rank, world):
    t = trial(rank, world)
    average_of = AveragedModel(t.bare, avg_fn=lambda average, current, count: current.clone())
    for step in range(3):
        before = copies(t.bare)
        t.loss(step).backward()
        t.opt.step()
        average_of.update_parameters(t.bare)
        t.opt.zero_grad()
        t.opt.synchronize()
        changes = list(zip(copies(t.bare), before, copies(average_of.module), strict=True))
        assert all(torch.equal(now, averaged) for now, _, averaged in changes)
        assert all(not torch.equal(now, old) for now, old, _ in changes)


# ---- gradients in all ways ----------------------------------------------------------------------


@distributed(2)
def test_gradients_made_by_hand(rank, world):
    t = trial(rank, world, Net, wrap=None)  # `spare` has no gradient anywhere
    params = list(t.model.parameters())
    for step in range(STEPS):
        found = torch.autograd.grad(t.loss(step), params, allow_unused=True)
        for p, grad in zip(params, found, strict=True):
            p.grad = grad
        average(*params)
        t.joint_backward(step)
        t.opt.step()
        t.model.zero_grad()
        t.ref.step()
        t.twin.zero_grad()
    t.check()


@distributed(2)
def test_parameters_that_are_used_on_some_ranks_or_none(rank, world):
    t = trial(rank, world, Net, {"find_unused_parameters": True})
    for step in range(STEPS):
        users = ((), (0,), (1,), (0, 1))[step % 4]
        t.bare.use_spare = rank in users
        t.loss(step).backward()
        for r in range(world):
            t.twin.use_spare = r in users
            (loss_of(t.twin, batch(step, r)) / world).backward()
        before = t.bare.spare.weight.detach().clone()
        t.advance()
        assert torch.equal(before, t.bare.spare.weight) is (not users)
    t.check()


@pytest.mark.parametrize("how", ["DDP's", "dmuon's", "neither"])
@distributed(2)
def test_micro_batches_are_one_batch(rank, world, how):
    t = trial(rank, world)
    quiet = {
        "DDP's": lambda: t.model.no_sync(),
        "dmuon's": lambda: dmuon.no_sync(t.model),  # before planning and after
        "neither": nullcontext,
    }
    for step in range(STEPS):
        for micro in range(3):
            with quiet[how]() if micro < 2 else nullcontext():
                t.loss(10 * step + micro, 3).backward()
            t.joint_backward(10 * step + micro, 3)
        t.opt.step()
        t.model.zero_grad()
        t.ref.step()
        t.twin.zero_grad()
    t.check()


# ---- gradients that nobody averages -------------------------------------------------------------


def assert_untouched(t: Trial, before: dict[str, Tensor]) -> None:
    assert_bitwise(weights(t.bare), before)
    for state in t.opt.state.values():
        assert not any(bool(torch.as_tensor(value).any()) for value in state.values())
    assert t.opt.stats()["steps"] == 0


def assert_caught(t: Trial, *names: str) -> None:
    """On every rank alike, at the first step."""
    before = weights(t.bare)
    with pytest.raises(OwnershipError) as caught:
        t.opt.step()
    text = str(caught.value)
    assert all(part in text for part in ("DistributedDataParallel", "reduce_to_owner=True", *names))
    assert gathered(text) == [text] * t.world
    assert_untouched(t, before)


@distributed(2, 4)
def test_forgotten_averaging_is_an_error_at_the_first_step(rank, world):
    t = trial(rank, world, wrap=None)
    t.both_backward(0)
    assert_caught(t)
    average(*t.model.parameters())  # and then all is well
    t.advance()
    for step in range(1, 4):
        t.both_backward(step)
        average(*t.model.parameters())
        t.advance()
    t.check()


@distributed(2, 4)
def test_one_parameter_that_is_not_averaged_is_named(rank, world):
    for name in ("blocks.1.down.weight", "blocks.2.up.bias", "lm_head.weight"):
        t = trial(rank, world, wrap=None)
        t.loss(0).backward()
        average(*(p for n, p in t.model.named_parameters() if n != name))
        assert_caught(t, name)


@distributed(3)
def test_where_the_host_cannot_read_such_a_step_changes_nothing(rank, world):
    """And the next one raises, on every rank. Ranks that refuse take part in comparing too."""

    def spoil(t: Trial, fault: str) -> None:
        grad = t.bare.mid.weight.grad
        t.bare.mid.weight.grad = None if fault == "missing" else grad.to_sparse()

    for at, fault, text in (
        (0, "not averaged", "gradients differ between ranks"),
        (1, "sparse", "rank 2 refuses"),
        (4, "missing", "'mid.weight' has a gradient on 2 of 3 ranks"),  # not compared in this step
    ):
        t = trial(rank, world, wrap=None)
        with host_cannot_read():
            for step in range(at + 1):
                t.both_backward(step)
                if step < at:
                    average(*t.model.parameters())
                    t.advance()
            before = weights(t.bare)
            if fault != "not averaged":
                average(*t.model.parameters())
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
            for step in range(at, at + 3) if fault != "sparse" else ():
                t.both_backward(step)
                average(*t.model.parameters())
                t.advance()
        if fault != "sparse":  # after which that rank is a step behind
            t.check()


@distributed(2)
def test_a_last_backward_without_sync_is_caught(rank, world):
    t = trial(rank, world)
    with t.model.no_sync():
        t.loss(0).backward()
    assert_caught(t)


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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 hook"])
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
    steps = 260
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


def other_weights(model: nn.Module, only: str | None) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if only in (None, name):
                p.add_(0.01)


@distributed(2, 4)
def test_different_initial_weights_are_named_at_the_first_step(rank, world):
    for only in (None, "blocks.1.up.weight", "mid.bias"):
        for named in (False, True):
            t = trial(rank, world, wrap=None)
            if rank == world - 1:
                other_weights(t.model, only)
            if named:
                t.opt = dmuon.Muon(t.model.named_parameters(), **MUON)
            t.loss(0).backward()
            average(*t.model.parameters())
            before = weights(t.model)
            with pytest.raises(ConsensusError, match=only or "tok.weight"):
                t.opt.step()
            assert_bitwise(weights(t.model), before)


def train_again(t: Trial) -> None:
    """With another optimizer of the same model."""
    t.model.zero_grad()
    t.opt = dmuon.Muon(t.model, **MUON)
    t.train(range(3))
    t.check()


@distributed(2)
def test_what_one_rank_cannot_plan_is_an_error_on_all(rank, world):
    wrong = [
        ({"layout": "sharded"}, "does not take DistributedDataParallel"),
        ({"layout": "nonsense"}, "layout must be one of"),
        ({"plan": "nonsense"}, "plan must be an OwnershipPlan"),
        ({"planner": 3}, "planner must be PlannerOptions"),
    ]
    t = trial(rank, world)
    for dedicate, text in wrong:
        opt = dmuon.Muon(t.model, **MUON, dedicate=dedicate if rank == 1 else None)
        t.loss(0).backward()
        before = weights(t.bare)
        with pytest.raises((DmuonError, TypeError), match=text):
            opt.step()
        assert_bitwise(weights(t.bare), before)
    train_again(t)


@distributed(2)
def test_what_ranks_plan_differently_is_an_error_on_all(rank, world):
    fused = {"splits": {"mid.weight": (9, 9)}}
    other = {"select": lambda name, p: p.ndim == 2 and "blocks" in name and "0" in name}
    t = trial(rank, world)
    for dedicate, text in (
        (fused, "mid.weight"),
        (other, "weight"),
        ({"solver": "greedy"}, "gree"),
    ):
        opt = dmuon.Muon(t.model, **MUON, dedicate=dedicate if rank == 1 else None)
        t.loss(0).backward()
        with pytest.raises(ConsensusError, match=text):
            opt.step()
    train_again(t)


@distributed(2, 4)
def test_what_one_rank_finds_in_a_step_is_an_error_on_all(rank, world):
    """And training goes on where that was mended."""

    def sparse(t: Trial) -> None:
        grad = t.bare.tok.weight.grad
        assert grad is not None
        t.bare.tok.weight.grad = grad.to_sparse()

    def missing(t: Trial) -> None:
        t.bare.mid.weight.grad = None

    def rate(t: Trial) -> None:
        t.opt.param_groups[0]["lr"] *= 0.5

    for fault, text in (
        (sparse, "not dense"),
        (missing, f"'mid.weight' has a gradient on {world - 1} of {world} ranks"),
        (rate, r"lr of opt\.param_groups\[0\] is 0\.02 on rank"),
    ):
        t = trial(rank, world)
        t.train(range(4))  # by now gradients are compared rarely
        t.both_backward(4)
        before = weights(t.bare)
        if rank == world - 1:
            fault(t)
        with pytest.raises(DmuonError, match=text if rank == world - 1 else f"{text}|refuses"):
            t.opt.step()
        assert_bitwise(weights(t.bare), before)
        t.opt.zero_grad()
        t.opt.param_groups[0]["lr"] = MUON["lr"]
        t.twin.zero_grad()
        t.train(range(4, 6))
        t.check()


@distributed(2)
def test_a_parameter_replaced_on_one_rank_is_an_error_on_all(rank, world):
    t = trial(rank, world, wrap=None)
    for step in range(2):
        t.loss(step).backward()
        average(*t.model.parameters())
        if step and rank == 1:
            t.bare.mid.weight.data = t.bare.mid.weight.data.double()
        with pytest.raises(DmuonError, match="mid.weight|refuses") if step else nullcontext():
            t.opt.step()
        t.opt.zero_grad()


@distributed(2)
def test_of_two_models_none_steps_where_the_second_cannot(rank, world):
    models = [seeded(Used), seeded(Used)]
    owns = [dmuon.dedicate_params(model) for model in models]
    opt = dmuon.Muon([p for model in models for p in model.parameters()], **MUON)
    for step in range(2):
        for model in models:
            loss_of(model, batch(step, rank)).backward()
            average(*model.parameters())
        if step and rank == 1:
            models[1].mid.weight.grad = models[1].mid.weight.grad.to_sparse()
        before = [weights(model) for model in models]
        with pytest.raises(DmuonError, match="not dense|refuses") if step else nullcontext():
            opt.step()
        for model, old in zip(models, before, strict=True) if step else ():
            assert_bitwise(weights(model), old)
        opt.zero_grad()
    for own in owns:
        own.close()


@distributed(2)
def test_groups_that_one_rank_broke_before_planning_are_an_error_on_all(rank, world):
    t = trial(rank, world)
    if rank == 1:
        t.opt.param_groups[0]["params"].pop()
    t.loss(0).backward()
    with pytest.raises(DmuonError, match="add groups with opt.add_param_group"):
        t.opt.step()


def refuses(name: str, p: Tensor) -> bool:
    raise RuntimeError("this rank cannot select")


@distributed(2)
def test_what_one_rank_cannot_select_is_an_error_of_its_constructor(rank, world):
    """Which is no collective call; and another optimizer works."""
    wrong = [
        ({"splits": {"mid.weight": (5, 5)}}, "mid.weight"),
        ({"select": refuses}, "this rank cannot select"),
    ]
    t = trial(rank, world)
    for dedicate, text in wrong:
        with pytest.raises(Exception, match=text) if rank == 1 else nullcontext():
            dmuon.Muon(t.model, **MUON, dedicate=dedicate if rank == 1 else None)
    train_again(t)


# ---- state --------------------------------------------------------------------------------------

SHARES = 4  # of every joint batch, so that each world size trains on the same data


def joint_batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    parts = [batch(step, share) for share in range(rank, SHARES, world)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def go_on(model: nn.Module, opt: Any, rank: int, world: int, steps: range) -> None:
    for step in steps:
        loss_of(model, joint_batch(step, rank, world)).backward()
        opt.step()
        opt.zero_grad()


def sharded_blocks(model: Net) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    bare = getattr(model, "module", model)
    return {n: whole_tensor(p).detach().clone() for n, p in bare.named_parameters()}


FULL = StateDictOptions(full_state_dict=True)
BEFORE, ALL = range(3), range(6)


def body(function: Any) -> Any:
    """For `Pools`: what runs on every rank."""
    function.body = function
    return function


@body
def save(rank: int, world: int, folder: Path) -> None:
    """Train without a break; rank 0 alone saves on the way, and the end."""
    model = DistributedDataParallel(seeded(Used))
    opt = dmuon.Muon(model, **MUON)
    go_on(model, opt, rank, world, BEFORE)
    if rank == 0:
        saved = {"model": model.module.state_dict(), "opt": opt.state_dict()}
        torch.save(saved, folder / "saved.pt")
    by_name = get_optimizer_state_dict(model, opt, options=FULL)
    if rank == 0:
        torch.save(by_name, folder / "by_name.pt")
    go_on(model, opt, rank, world, ALL[3:])
    if rank == 0:
        torch.save(weights(model.module), folder / "end.pt")


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def check_end(model: nn.Module, opt: dmuon.Muon, folder: Path, world: int) -> None:
    assert opt.stats()["steps"] == len(ALL)
    found, end = whole_weights(model), load(folder / "end.pt")
    assert_close(found, end, TOLERANCE)
    if world == 2:
        assert_bitwise(found, end)


@body
def resume(rank: int, world: int, folder: Path) -> None:
    """In all orders of loading, planning and wrapping."""
    for when in ("before the wrap", "before the first step", "after a step"):
        saved = load(folder / "saved.pt")
        model: nn.Module = seeded(Used, seed=5)
        opt = None
        if when == "before the wrap":
            opt = dmuon.Muon(model, **MUON)
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
        if world > 1:
            model = DistributedDataParallel(model)
        if opt is None:
            opt = dmuon.Muon(model, **MUON)
            if when == "after a step":
                go_on(model, opt, rank, world, range(17, 18))
            getattr(model, "module", model).load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
        go_on(model, opt, rank, world, ALL[3:])
        check_end(model, opt, folder, world)


@body
def resume_by_name(rank: int, world: int, folder: Path) -> None:
    """By torch's distributed checkpoint into optimizers that have planned nothing, on FSDP2 and
    from there back."""
    model = sharded_blocks(seeded(Used, seed=5))
    opt = dmuon.Muon(model, **MUON)
    set_model_state_dict(model, load(folder / "saved.pt")["model"], options=FULL)
    set_optimizer_state_dict(model, opt, load(folder / "by_name.pt"), options=FULL)
    assert opt.ownership.plan.layout.value == "sharded"
    go_on(model, opt, rank, world, ALL[3:5])
    saved = get_model_state_dict(model, options=FULL)
    by_name = deepcopy(get_optimizer_state_dict(model, opt, options=FULL))  # it has live tensors
    go_on(model, opt, rank, world, ALL[5:])
    found = whole_weights(model)
    assert_close(found, load(folder / "end.pt"), TOLERANCE)
    assert opt.stats()["steps"] == len(ALL)

    again = DistributedDataParallel(seeded(Used, seed=6))
    opt = dmuon.Muon(again, **MUON)
    set_model_state_dict(again, saved, options=FULL)
    set_optimizer_state_dict(again, opt, by_name, options=FULL)
    go_on(again, opt, rank, world, ALL[5:])
    assert_close(whole_weights(again), found, TOLERANCE)
    assert opt.stats()["steps"] == len(ALL)


def test_a_state_of_one_rank_goes_on_at_every_world_size(pools: Pools, tmp_path: Path):
    pools(2).run(__name__, "save", {"folder": tmp_path})
    for world in (1, 2, 4):
        pools(world).run(__name__, "resume", {"folder": tmp_path})


def test_a_state_goes_on_under_fsdp2_through_torchs_checkpoint(pools: Pools, tmp_path: Path):
    pools(2).run(__name__, "save", {"folder": tmp_path})
    pools(2).run(__name__, "resume_by_name", {"folder": tmp_path})


# ---- what it leaves alone, and what it says -----------------------------------------------------


def hooks_of(model: nn.Module) -> dict[tuple[str, str], list[Any]]:
    """All that is registered on modules and parameters."""
    found: dict[tuple[str, str], list[Any]] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hook" in key and isinstance(value, dict | list):
                found[name, key] = list(value)
    for name, p in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[name, key] = list(getattr(p, key) or ())
    return found


@pytest.mark.parametrize("name", ["DDP", "FSDP2", "plain"])
@distributed(2)
def test_nothing_is_registered(rank, world, name):
    for publish in ("sync", "async"):
        model = seeded(Used)
        model = {"DDP": DistributedDataParallel, "FSDP2": sharded_blocks}.get(name, lambda m: m)(
            model
        )
        loss_of(model, batch(0, rank)).backward()  # frameworks register something of their own
        before = hooks_of(model)
        opt = dmuon.Muon(model, **MUON, publish=publish)
        for step in range(2):
            if name == "plain":
                average(*model.parameters())
            opt.step()
            opt.zero_grad()
            loss_of(model, batch(step, rank)).backward()
        assert (hooks_of(model) == before) is (publish == "sync")
        if name == "DDP":
            model.register_comm_hook(None, in_bfloat16)  # which DDP takes once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@distributed(2, 4)
def test_what_travels_and_what_every_rank_keeps(rank, world, dtype):
    t = trial(rank, world, ns_dtype=dtype)
    for step in range(3):
        t.loss(step).backward()
        t.opt.step()
        t.opt.zero_grad()
    stats = t.opt.stats()
    adamw = ("tok.weight", "lm_head.weight")
    matrices = {
        n: p.numel() for n, p in t.bare.named_parameters() if p.ndim == 2 and n not in adamw
    }
    assert stats["bytes"]["updates"] == dtype.itemsize * sum(matrices.values())
    assert "gradients" not in stats["bytes"]
    assert stats["update_rms"].keys() == matrices.keys()
    workspace = stats["step_bytes"]
    assert all(isinstance(n, int) and n >= 0 for n in workspace.values())
    # Of each matrix one rank, its owner, has an operand.
    assert sum(gathered(workspace["operands"])) == 4 * sum(matrices.values())
    for name, p in t.bare.named_parameters():
        keys = {"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert t.opt.state[p].keys() == keys, name
        for key, value in t.opt.state[p].items():
            assert key == "step" or value.shape == p.shape
            first = value.clone()
            dist.broadcast(first, 0)
            assert value.any() and torch.equal(value, first), (name, key)


# ---- whatever form parameters come in -----------------------------------------------------------

FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "named": lambda m: list(m.named_parameters()),
    "bare": lambda m: m.parameters(),
    "groups of bare": lambda m: [{"params": list(m.parameters())[i::2]} for i in range(2)],
}


class Telling3D(Used):
    """A convolution and a head that only modules tell."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(7, 5, 3, padding=1)
        self.back = nn.Linear(5, 7)

    def body(self, x: Tensor) -> Tensor:
        y = super().body(x)
        z = self.back(self.down(y[..., :7].flatten(0, -2).T[None].expand(1, -1, -1))[0].T)
        return torch.cat([y[..., :7] + z.view(*y.shape[:-1], 7), y[..., 7:]], -1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@distributed(2)
def test_every_form_is_the_reference_before_and_after_wrapping(rank, world, form, kind):
    found = []
    for when in ("before", "after", "module"):
        model, twin = seeded(Telling3D), seeded(Telling3D)
        bare = model
        given = model if when == "module" else FORMS[form](model)
        opt = dmuon.Muon(params=given, **MUON) if when == "before" else None
        model = DistributedDataParallel(model) if kind == "ddp" else sharded_blocks(model)
        if opt is None:
            given = model if when == "module" else FORMS[form](model)
            opt = dmuon.Muon(params=given, **MUON)
        t = Trial(model, twin, opt, ReferenceMuon(twin, **MUON), rank, world)
        t.train(range(2))
        assert_close(whole_weights(t.model), weights(twin), TOLERANCE)
        plan = opt.ownership.plan.specs
        found.append({p.name: (p.algorithm, p.reason) for p in plan.parameters})
        assert [m.shape for m in plan.matrices if m.name == "down.weight"] == [(5, 21)]
        assert opt.param_groups[0]["params"][0] is next(iter(bare.parameters()))
    assert found[0] == found[1] == found[2]


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
