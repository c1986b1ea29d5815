"""``opt = dmuon.Muon(model)`` alone, and what users do around an optimizer."""

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
from dmuon.types import DmuonError, OwnershipError
from tests.distributed.compare import (
    assert_bitwise,
    assert_equal_on_all_ranks,
    average_gradients,
    our_hooks,
    whole,
)
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, layouts
from tests.distributed.models import Used, batch, loss_of, seeded, weights
from tests.distributed.twins import MUON, both

STEPS = 3


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
        opt.step()
        opt.zero_grad()
    expected = "replicated" if layout == "ddp" else "sharded"
    assert opt.ownership.plan.layout.value == expected
    assert len(opt.param_groups) == (2 if "groups" in form else 1), "the user's groups"
    first = next(iter(getattr(model, "module", model).parameters()))
    assert opt.param_groups[0]["params"][0] is first
    assert our_hooks(getattr(model, "module", model)) == []
    if layout == "ddp":
        model.register_comm_hook(None, in_bfloat16)  # which DDP takes once
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


@distributed(2)
def test_weights_are_there_when_step_returns(rank, world):
    for layout in ("ddp", "reduced"):
        with both(Used, layout) as pair:
            average_of = AveragedModel(pair.bare, avg_fn=lambda average, now, count: now.clone())
            for step in range(2):
                before = whole(pair.bare)
                pair.backward(step)
                pair.opt.step()
                average_of.update_parameters(pair.bare)
                pair.opt.zero_grad()
                pair.opt.synchronize()
                after = whole(pair.bare)
                assert_bitwise(whole(average_of.module), after)
                assert not any(torch.equal(after[name], old) for name, old in before.items())


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
