"""Gradients that are not finite: no layout applies them, and all ranks skip the step alike."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch

from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.types import NonFiniteError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import AT_OWNERS, layouts
from tests.distributed.models import Net
from tests.distributed.twins import both
from tests.transports import RecordingTransport

HOSTS = pytest.mark.parametrize("host", ["reads", "does not read"])
EACH_ENGINE = pytest.mark.parametrize(
    ("kind", "host"), [("ddp", "does not read"), ("fsdp2", "reads"), ("reduced", "does not read")]
)


def on(host):
    return host_cannot_read() if host != "reads" else nullcontext()


class Poison(torch.autograd.Function):
    """Zero, and its gradient is ``value`` everywhere."""

    @staticmethod
    def forward(ctx, weight, value):
        ctx.shape, ctx.value = weight.shape, value
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return torch.full(ctx.shape, ctx.value), None


def poisoned(pair, layout, step, name, value):
    """A backward pass after which the gradient of this weight has a bad value: of what owners
    reduce in backward itself, of others in what this rank has of p.grad."""
    handle = None
    if layout in AT_OWNERS:
        module = pair.bare.get_submodule(name.rpartition(".")[0])
        handle = module.register_forward_hook(
            lambda module, args, output: output + Poison.apply(module.weight, value)
        )
    pair.backward(step)
    if handle is not None:
        handle.remove()
    elif value:
        local_tensor(pair.bare.get_parameter(name).grad).view(-1)[-1] = value


def state_of(pair):
    """Weights and optimizer state, whole."""
    found = pair.whole()
    for key, entry in pair.opt.state_dict()["state"].items():
        found |= {f"{key}.{n}": whole_tensor(torch.as_tensor(v)).clone() for n, v in entry.items()}
    return found


def skips_a_step(pair, layout, name, here, raises=False):
    """Not one bit changes, and training goes on; what was told of it."""
    pair.opt.zero_grad()
    poisoned(pair, layout, 2, name, here)
    before = state_of(pair)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(NonFiniteError, match=name) if raises else nullcontext():
            pair.opt.step()
        stats = pair.opt.stats()
        assert raises or (stats["finite"], stats["skipped"]) == (False, 1)
        assert "grad_norm" not in pair.opt.metrics()
        assert_bitwise(state_of(pair), before)
        for reset in (pair.opt.zero_grad, pair.twin.zero_grad):
            reset()
        pair.train([3])
    pair.check()
    assert pair.opt.stats()["finite"] is True
    return [str(w.message) for w in told if "a step was skipped" in str(w.message)]


@layouts("dedicated fsdp", "reduced ddp", "fsdp2")
def test_raise_is_an_error_on_every_rank(rank, world, layout):
    with both(Net, layout, only={"nonfinite": "raise"}) as pair:
        pair.train(range(2))
        skips_a_step(pair, layout, "mid.weight", math.nan if rank else 0.0, raises=True)


BLOCK = "blocks.1.up.weight"  # every rank has a shard
FAULTS = {1: (2,), 3: (1, 2), 6: (0,), 7: (0,)}  # of which ranks a shard has a nan, by step


def faulty_step(pair, number, rank):
    """A step, perhaps with a nan on this rank; what is told of skipped ones."""
    pair.opt.zero_grad()
    pair.backward(number)
    if rank in FAULTS.get(number, ()):
        local_tensor(pair.bare.get_parameter(BLOCK).grad).view(-1)[-1] = math.nan
    pair.events.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pair.opt.step()
    return [str(w.message) for w in told if "skipped" in str(w.message)]


def own_faults(rank, steps):
    return sum(rank in FAULTS.get(number, ()) for number in steps)


@HOSTS
@distributed(3)
def test_the_next_full_step_tells_all_ranks_what_block_steps_skipped(rank, world, host):
    """Steps 0, 4 and 8 are full; two ranks that skip parts of one step are one skipped step."""
    only = {"period": 4}
    with on(host), both(Net, "fsdp2", only=only, transport=RecordingTransport) as pair:
        late, told, sent = host != "reads", {}, {}
        for number in range(10):
            told[number] = faulty_step(pair, number, rank)
            sent[number] = [event.tag for event in pair.events]
            full = number // 4 * 4
            agreed = sum(number < full for number in FAULTS)
            mine = agreed + own_faults(rank, range(full + 1, number + 1))
            assert pair.opt.stats()["skipped"] == mine, number
            assert late or pair.opt.metrics()["skipped"] == mine
            assert gathered(agreed) == [agreed] * world
        assert not any(sent[n] for n in sent if n % 4)
        assert sent[0] == sent[4] == sent[8], "nothing else is sent"
        assert [n for n in told if told[n]] == ([4 + late, 8 + late] if rank == 0 else [])
        for n, what in ((4, "2 block steps since step 2"), (8, "2 block steps since step 7")):
            for text in told[n + late]:
                assert f"parts of {what} were skipped, because gradients are" in text, text
                assert f"finite: {BLOCK}. They" in text, text
        assert all(bool(w.isfinite().all()) for w in pair.whole().values())


@distributed(3)
def test_raise_tells_all_ranks_what_block_steps_skipped(rank, world):
    only = {"period": 4, "nonfinite": "raise"}
    with both(Net, "fsdp2", only=only, transport=RecordingTransport) as pair:
        for number in range(4):
            faulty_step(pair, number, rank)
        before = pair.whole()
        with pytest.raises(NonFiniteError) as caught:
            faulty_step(pair, 4, rank)
        assert_bitwise(pair.whole(), before)
        text = str(caught.value)
        assert gathered(text) == [text] * world
        assert "parts of 2 block steps since step 2 were skipped and a step was skipped on" in text
        assert BLOCK in text and "skipped so far: 3)" in text
        assert gathered(pair.opt.stats()["skipped"]) == [3] * world
        faulty_step(pair, 5, rank)


@pytest.mark.parametrize(("host", "nonfinite"), [("reads", "raise"), ("does not read", "skip")])
@distributed(3)
def test_without_full_steps_the_rank_itself_tells(rank, world, host, nonfinite):
    """Each counts its own, and nothing is sent."""
    only = {"period": math.inf, "nonfinite": nonfinite}
    with on(host), both(Net, "fsdp2", only=only, transport=RecordingTransport) as pair:
        late, told = host != "reads", {}
        for number in range(9):
            try:
                told[number] = faulty_step(pair, number, rank)
            except NonFiniteError as error:
                told[number] = [str(error)]
            assert not pair.events
        found = [n for n in FAULTS if rank in FAULTS[n]]
        if late and nonfinite == "raise":  # the step that raises is not taken
            found = [n for n in found if n - 1 not in found]
        at = [n + late for n in found]
        assert [n for n in told if told[n]] == at
        for count, n in enumerate(at, 1):
            (text,) = told[n]
            assert f"a block step were skipped on rank {rank}, because gradients" in text, text
            assert f"finite: {BLOCK}. They" in text and f"so far: {count})" in text, text
        if nonfinite == "skip":
            assert pair.opt.stats()["skipped"] == len(at) == own_faults(rank, range(9))
            assert pair.opt.metrics().get("skipped", len(at)) == len(at)
        assert all(bool(w.isfinite().all()) for w in pair.whole().values())


@contextmanager
def by_hand(kind, dtype=torch.float32, **settings):
    """(bare model, optimizer)."""
    only = settings
    with both(Net, kind, change=lambda model: model.to(dtype), only=only) as pair:
        yield pair.bare, pair.opt


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


@pytest.mark.parametrize(("kind", "host"), [("ddp", "reads"), ("fsdp2", "does not read")])
@distributed(2)
def test_what_is_not_finite_on_one_rank_is_named_on_all(rank, world, kind, host):
    """Whole on one rank, a shard or a replica; a matrix or one of AdamW's."""
    with on(host), by_hand(kind, nonfinite="raise") as (model, opt):
        for name in ("blocks.1.up.weight", "mid.weight", "blocks.0.norm.bias", "lm_head.weight"):
            set_gradients(model, 0.1)
            if rank == world - 1:
                local_tensor(model.get_parameter(name).grad).view(-1)[-1] = math.nan
            text = error_of(opt.step, host)
            assert f"gradients are not finite: {name}. Weights" in text, text
            assert gathered(text) == [text] * world
            set_gradients(model, 0.1)
            opt.step()


@EACH_ENGINE
@distributed(2)
def test_momentum_that_outgrows_its_dtype_is_named_and_never_applied(rank, world, kind, host):
    """Gradients are finite all the time; on ranks that do not meet in one process, the same."""
    settings = {"momentum_mode": "sgd", "nonfinite": "raise"}
    with on(host), by_hand(kind, torch.float16, **settings) as (model, opt):
        for _ in range(2):
            set_gradients(model, 6e3)
            opt.step()
        names = {m.name for m in opt.ownership.plan.specs.matrices}
        assert {"mid.weight", "blocks.0.up.weight"} <= names
        taken, text = 0, ""
        while not text:
            try:
                set_gradients(model, 2e4)
                opt.step()
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


@distributed(2)
def test_momentum_that_is_not_finite_is_named(rank, world):
    with by_hand("fsdp2", nonfinite="raise") as (model, opt):
        set_gradients(model, 0.1)
        opt.step()
        momentum = opt.state[model.mid.weight]["momentum_buffer"]
        if rank == world - 1:
            local_tensor(momentum)[-1, -1] = math.inf
        set_gradients(model, 0.1)
        with pytest.raises(NonFiniteError, match=r"momentum is not finite.*older.*: mid\.weight"):
            opt.step()


def told_of_eps(caught):
    return [str(w.message) for w in caught if "with a norm below" in str(w.message)]


@EACH_ENGINE
@distributed(2)
def test_gradients_below_eps_are_told_once_and_counted(rank, world, kind, host):
    """Zeros are not below it; a smaller eps gives Muon's update, and nothing is said."""
    names = ("blocks.0.up.weight", "mid.weight")
    late = 2 if host != "reads" else 1  # steps until it is told
    late += kind == "reduced"
    for eps in (1e-7, 1e-20):
        with (
            on(host),
            by_hand(kind, eps=eps) as (model, opt),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for step in range(4):
                set_gradients(model, 0.1)
                for name in names:
                    with torch.no_grad():
                        model.get_parameter(name).grad.mul_(1e-12)
                model.blocks[1].down.weight.grad.zero_()
                opt.step()
                told = eps == 1e-7 and step + 1 >= late
                assert len(told_of_eps(caught)) == (told and rank == 0), (step, eps)
                if told:
                    assert opt.stats()["below_eps"] == len(names)
            rms = opt.stats()["update_rms"]
            if eps == 1e-7:
                said = ("got 2 of the matrices", "eps=1e-07", *names)
                assert all(name in text for text in told_of_eps(caught)[:1] for name in said)
                assert rms["mid.weight"] < 0.5 * rms["spare.weight"]
            else:
                assert opt.stats()["below_eps"] == 0
                assert abs(rms["mid.weight"] / rms["spare.weight"] - 1) < 0.3
            assert rms["blocks.1.down.weight"] == 0.0
