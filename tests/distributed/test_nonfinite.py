"""Gradients that are not finite: no layout applies them, and all ranks skip the step alike."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.types import NonFiniteError
from tests.accelerator import host_cannot_read
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded, wrap
from tests.distributed.owners import (
    DDP,
    FSDP,
    KEPT,
    PLAIN,
    REPLICATED,
    WHOLE,
    assert_bitwise,
    both,
    gathered,
    layouts,
    mesh_of,
)
from tests.poison import Poison


def poisoned(pair, step, name, value):
    """A backward pass after which the gradient of this weight has a bad value."""
    module = pair.bare.get_submodule(name.rpartition(".")[0])
    handle = module.register_forward_hook(
        lambda module, args, output: output + Poison.apply(module.weight, value)
    )
    loss_of(pair.model, batch(step, pair.data_rank)).backward()
    handle.remove()


def state_of(pair):
    """Weights and optimizer state, whole."""
    entries = pair.opt.state_dict()["state"]
    found = pair.whole()
    for key, entry in entries.items():
        found |= {f"{key}.{n}": whole_tensor(torch.as_tensor(v)).clone() for n, v in entry.items()}
    return found


CASES = {
    "a matrix on the last rank": ("mid.weight", math.nan, (-1,)),
    "a matrix on all ranks": ("blocks.1.up.weight", math.inf, (0, -1)),
    "AdamW's on the first rank": ("blocks.0.norm.weight", -math.inf, (0,)),
}


@pytest.mark.parametrize("host", ["reads", "does not read"])
@layouts(PLAIN, KEPT, FSDP, REPLICATED, DDP, WHOLE)
@distributed(2)
def test_a_step_is_skipped_on_all_ranks(rank, world, layout, host):
    for name, value, where in CASES.values():
        with host_cannot_read() if host != "reads" else nullcontext(), both(Net, layout) as pair:
            pair.train(range(2))
            before = state_of(pair)
            here = value if rank in [r % world for r in where] else 0.0
            pair.opt.zero_grad()
            poisoned(pair, 2, name, here)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                pair.opt.step()
                assert pair.opt.stats()["finite"] is False
                assert pair.opt.stats()["skipped"] == 1
                assert_bitwise(state_of(pair), before)
                pair.opt.zero_grad()
                pair.twin.zero_grad()
                pair.train([3])  # goes on
                texts = [str(w.message) for w in told if "a step was skipped" in str(w.message)]
            assert len(texts) == (rank == 0)
            if rank == 0:
                assert f"not finite: {name}. Weights" in texts[0], texts
            pair.check()
            assert pair.opt.stats()["finite"] is True
            assert gathered(pair.opt.stats()["skipped"]) == [1] * world


@layouts(PLAIN, FSDP, REPLICATED, WHOLE)
@distributed(2)
def test_raise_is_an_error_on_every_rank(rank, world, layout):
    with both(Net, layout, only={"nonfinite": "raise"}) as pair:
        pair.train(range(2))
        before = state_of(pair)
        pair.opt.zero_grad()
        poisoned(pair, 2, "mid.weight", math.nan if rank else 0.0)
        with pytest.raises(NonFiniteError, match=r"mid\.weight"):
            pair.opt.step()
        assert_bitwise(state_of(pair), before)
        pair.opt.zero_grad()
        pair.twin.zero_grad()
        pair.train([3])
        pair.check()


@layouts(PLAIN, REPLICATED)
@distributed(4)
def test_replicas_skip_too(rank, world, layout):
    mesh = (2, 2) if layout == PLAIN else (4,)
    with both(Net, layout, mesh=mesh) as pair:
        pair.train(range(2))
        before = state_of(pair)
        pair.opt.zero_grad()
        poisoned(pair, 2, "blocks.2.down.weight", math.nan if rank == 3 else 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.opt.step()
        assert_bitwise(state_of(pair), before)
        pair.opt.zero_grad()
        pair.twin.zero_grad()
        pair.train([3])
        pair.check()


@pytest.mark.parametrize("host", ["reads", "does not read"])
@pytest.mark.parametrize("period", [1, 3])
@distributed(2)
def test_raise_waits_for_the_next_full_step(rank, world, period, host):
    """In a block step no rank knows of the others."""
    with host_cannot_read() if host != "reads" else nullcontext():
        model = seeded(Net)
        mesh = mesh_of((world,))
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)
        opt = dmuon.Muon(model, lr=0.02, period=period, nonfinite="raise", ns_dtype=torch.float32)

        def step(number, scale=1.0):
            opt.zero_grad()
            loss_of(model, batch(number, rank)).backward()
            if rank:
                model.blocks[1].up.weight.grad.to_local().mul_(scale)
            opt.step()

        def whole():
            return {n: whole_tensor(p).clone() for n, p in model.named_parameters()}

        step(0)
        before = whole()
        raised, numbers = [], [1, 2, 3, 3, 4]
        for number in numbers:
            try:
                step(number, math.nan if number == 1 and not raised else 1.0)
            except NonFiniteError as error:
                raised.append((number, str(error)))
        late = host != "reads"  # at the beginning of the next step
        at = 3 if period == 3 else 1 + late
        assert [number for number, _ in raised] == [at], raised
        assert gathered(raised[0][1]) == [raised[0][1]] * world
        if period == 1:
            assert "blocks.1.up.weight" in raised[0][1]
        assert all(bool(w.isfinite().all()) for w in whole().values())
        assert not torch.equal(whole()["mid.weight"], before["mid.weight"])
        opt.ownership.close()


def test_what_may_be_asked_for():
    with pytest.raises(ValueError, match="nonfinite"):
        dmuon.Muon(nn.Linear(3, 3), nonfinite="ignore")


@contextmanager
def trained(kind, world, dtype=torch.float32, **settings):
    """(bare model, optimizer) with gradients that tests set by hand."""
    bare = seeded(Net).to(dtype)
    model = wrap(bare, kind == "ddp")
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh_of((world,)))
    if kind == "reduce_to_owner":
        dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions(reduce_to_owner=True))
    opt = dmuon.Muon(model, ns_dtype=torch.float32, **{"lr": 0.02, **settings})
    yield bare, opt
    opt.ownership.close()


def set_gradients(model, value):
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


def error_of(step, host):
    """What a step raises, or on an accelerator the next one."""
    if host != "reads":
        step()
    with pytest.raises(NonFiniteError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("host", ["reads", "does not read"])
@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 1)])
@distributed()
def test_what_is_not_finite_on_one_rank_is_named_on_all(rank, world, kind, host):
    """Whole on one rank, a shard or a replica; a matrix or one of AdamW's."""
    with (
        host_cannot_read() if host != "reads" else nullcontext(),
        trained(kind, world, nonfinite="raise") as (model, opt),
    ):
        for name in ("blocks.1.up.weight", "mid.weight", "blocks.0.norm.bias", "lm_head.weight"):
            set_gradients(model, 0.1)
            if rank == world - 1:
                local_tensor(model.get_parameter(name).grad).view(-1)[-1] = math.nan
            text = error_of(opt.step, host)
            assert f"gradients are not finite: {name}. Weights" in text, text
            assert gathered(text) == [text] * world
            set_gradients(model, 0.1)
            opt.step()


@pytest.mark.parametrize("host", ["reads", "does not read"])
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "reduce_to_owner"])
@distributed(2)
def test_momentum_that_outgrows_its_dtype_is_named_and_never_applied(rank, world, kind, host):
    """Gradients are finite all the time; on ranks that do not meet in one process, the same."""
    settings = {"momentum_mode": "sgd", "nonfinite": "raise"}
    with (
        host_cannot_read() if host != "reads" else nullcontext(),
        trained(kind, world, torch.float16, **settings) as (model, opt),
    ):
        for _ in range(2):
            set_gradients(model, 6e3)
            opt.step()
        names = {m.name for m in opt.ownership.plan.specs.matrices}
        assert {"mid.weight", "blocks.0.up.weight"} <= names

        def step():
            set_gradients(model, 2e4)
            opt.step()

        taken, text = 0, ""
        while not text:
            try:
                step()
                taken += 1
            except NonFiniteError as error:
                text = str(error)
        assert taken <= 3
        assert "momentum is at the end of the range of float16 (clip gradients" in text
        assert any(name in text for name in names)
        with opt.ownership.materialized(model):
            for name, p in model.named_parameters():
                assert bool(local_tensor(p).isfinite().all()), name
        set_gradients(model, 1.0)
        if host != "reads" and "skipped so far: 1)" in text:
            with suppress(NonFiniteError):
                opt.step()  # of the step above
        opt.step()  # goes on


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
@distributed(2)
def test_momentum_that_is_not_finite_is_named(rank, world, kind):
    with trained(kind, world, nonfinite="raise") as (model, opt):
        set_gradients(model, 0.1)
        opt.step()
        momentum = opt.state[model.mid.weight]["momentum_buffer"]
        if rank == world - 1 or kind != "fsdp2":
            local_tensor(momentum)[-1, -1] = math.inf
        set_gradients(model, 0.1)
        with pytest.raises(NonFiniteError, match=r"momentum is not finite.*older.*: mid\.weight"):
            opt.step()


# ---- finite, but below eps ---------------------------------------------------------------


def told_of_eps(caught):
    return [str(w.message) for w in caught if "with a norm below" in str(w.message)]


@pytest.mark.parametrize("host", ["reads", "does not read"])
@pytest.mark.parametrize(
    ("kind", "world"),
    [("plain", 1), ("fsdp2", 1), ("ddp", 2), ("fsdp2", 2), ("reduce_to_owner", 2)],
)
@distributed()
def test_gradients_below_eps_are_told_once_and_counted(rank, world, kind, host):
    """Zeros are not below it; a smaller eps gives Muon's update, and nothing is said."""
    names = ("blocks.0.up.weight", "mid.weight")
    late = 2 if host != "reads" else 1  # steps until it is told
    late += kind == "reduce_to_owner"
    for eps, size in ((1e-7, 1e-12), (1e-20, 1e-12)):
        with (
            host_cannot_read() if host != "reads" else nullcontext(),
            trained(kind, world, eps=eps) as (model, opt),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for step in range(4):
                set_gradients(model, 0.1)
                for name in names:
                    with torch.no_grad():
                        model.get_parameter(name).grad.mul_(size)
                model.blocks[1].down.weight.grad.zero_()
                opt.step()
                told = eps == 1e-7 and step + 1 >= late
                assert len(told_of_eps(caught)) == (told and rank == 0), (step, eps)
                if told:
                    assert opt.stats()["below_eps"] == len(names)
            rms = opt.stats()["update_rms"]
            if eps == 1e-7:
                texts = told_of_eps(caught)
                assert not texts or all(
                    name in texts[0] for name in ("got 2 of the matrices", "eps=1e-07", *names)
                )
                assert rms["mid.weight"] < 0.5 * rms["spare.weight"]
            else:
                assert opt.stats()["below_eps"] == 0
                assert abs(rms["mid.weight"] / rms["spare.weight"] - 1) < 0.3
            assert rms["blocks.1.down.weight"] == 0.0
