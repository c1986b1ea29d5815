"""The `dedicated` layout from outside: weights read, written, saved; mistakes, exceptions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import is_distributed
from dmuon.reference import ReferenceMuon
from dmuon.types import ConsensusError, DmuonError, OwnershipError
from tests.distributed.compare import assert_bitwise, gathered, our_hooks, whole
from tests.distributed.harness import distributed
from tests.distributed.layouts import IN_TURN, in_two, layouts, mesh_of, shard_units
from tests.distributed.models import Net, Pieces, batch, seeded, weights
from tests.distributed.twins import MUON, Both, both


@distributed(2)
def test_weights_can_be_read_inside_materialized_only(rank, world):
    with both(Net, "dedicated fsdp") as pair:
        pair.train(range(2))
        model, named = pair.model, dict(pair.model.named_parameters())
        expected = weights(pair.twin)
        for name in pair.matrices:
            full = pair.own.shape_of(name)
            owned = pair.own.owner_of(name) == rank
            with pair.own.materialized(model.get_submodule(name.rpartition(".")[0])):
                assert named[name].shape == full == expected[name].shape
                assert float((named[name] - expected[name]).abs().max()) <= 1e-5, name
                assert named[name] is dict(model.named_parameters())[name]
            assert (named[name].numel() > 0) == owned, name
        with pair.own.materialized(model.blocks[0]):
            with pair.own.materialized(model):
                assert model.blocks[1].up.weight.shape == (56, 24)
            assert model.blocks[0].up.weight.shape == (56, 24)
        pair.train([2])
        pair.check()


@torch.no_grad()
def rewrite(model, seed):
    torch.manual_seed(seed)  # the same on every rank
    if isinstance(model, Pieces):
        nn.init.normal_(model.blocks[0].qkv.weight, std=0.2)  # of several owners
        model.blocks[1].o_proj.weight.mul_(0.5)
        model.blocks[1].w1[1:3] += 0.25
    else:
        nn.init.normal_(model.blocks[0].up.weight, std=0.2)
        nn.init.orthogonal_(model.blocks[1].down.weight)
        model.mid.weight.mul_(0.5)
        model.blocks[2].up.weight[3:5] = 0.25


@distributed(4)
def test_what_is_written_inside_materialized_persists(rank, world):
    for build, more in ((Net, {}), (Pieces, IN_TURN)):
        with both(build, mesh=(2, 2), **more) as pair:
            for step in range(3):
                with pair.own.materialized(pair.model):
                    rewrite(pair.model, step)
                rewrite(pair.twin, step)
                pair.check(1e-5 if step else 0.0)
                pair.train([step])
            pair.check()


def assert_ordinary(model, twin):
    """Whole trained weights on this rank, in a model that nothing of dmuon is left in."""
    expected = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        assert p.shape == expected[name].shape, name
        if not is_distributed(p):
            assert float((p - expected[name]).abs().max()) <= 1e-5, name
    assert our_hooks(model) == []


@layouts("dedicated kept", "dedicated fsdp")
def test_closing_makes_the_model_ordinary_again(rank, world, layout):
    with both(Net, layout) as pair:
        pair.train(range(3))
        pair.own.close()
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)
        if layout == "dedicated fsdp":
            return
        if rank:  # no collective any more: one rank alone can use it
            pair.assert_same_loss(9)
        with pytest.raises(DmuonError, match="closed"):
            pair.opt.step()


@distributed(2)
def test_closing_at_any_time_and_dedicating_again(rank, world):
    with both() as pair:
        pair.own.close()  # before any step
        assert_ordinary(pair.model, pair.twin)
        dedicated(pair.model, world)
        pair.opt = dmuon.Muon(pair.model, **MUON)
        pair.train(range(2))
        pair.backward(9)  # gradients that no step takes
        pair.own.close()
        assert_ordinary(pair.model, pair.twin)


def dedicated(model, world):
    return dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")


@distributed(2)
def test_fully_shard_without_ignored_params_is_found(rank, world):
    """By the optimizer, or by the first forward pass; nothing of dmuon's is closed afterwards."""
    model = seeded()
    dedicated(model, world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of((world,)))
    with pytest.raises(OwnershipError, match=r"ignored_params=own\.dedicated_params"):
        dmuon.Muon(model, **MUON)
    for root in (False, True):
        model = seeded()
        dedicated(model, world)
        for block in [*model.blocks, *([model] if root else [])]:
            fully_shard(block, mesh=mesh_of((world,)))
        with pytest.raises(OwnershipError, match=r"blocks\.0\.up\.weight.*ignored_params"):
            model(batch(0, rank)[0])


@distributed(2)
def test_ignored_by_fully_shard_hides_the_parameters_and_puts_them_back(rank, world):
    model, twin = seeded(), seeded()
    names = [n for n, _ in model.named_parameters()]
    own = dedicated(model, world)
    kept = {n: p for n, p in model.named_parameters() if p in own.dedicated_params}
    with pytest.raises(RuntimeError, match="mine"), own.ignored_by_fully_shard():
        raise RuntimeError("mine")
    assert [n for n, _ in model.named_parameters()] == names
    with own.ignored_by_fully_shard():
        assert not own.dedicated_params & set(model.parameters())
        assert not hasattr(model.blocks[0].up, "weight")
        shard_units(model, mesh_of((world,)))
    assert [n for n, _ in model.named_parameters()] == names
    assert all(dict(model.named_parameters())[n] is p for n, p in kept.items())
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    pair = Both(model, twin, opt, ref, mesh_of((world,)))
    pair.train(range(2))
    pair.check()
    own.close()
    own = dmuon.dedicate_params(seeded(), layout="replicated")
    with pytest.raises(OwnershipError, match="belongs to layout='dedicated'"):
        own.ignored_by_fully_shard().__enter__()
    own.close()


@distributed(4)
def test_what_is_refused_under_tp(rank, world):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = in_two(seeded(), mesh)
    with pytest.raises(OwnershipError, match="pass the whole mesh"):
        dmuon.dedicate_params(model, layout="dedicated")
    with pytest.raises(OwnershipError, match="param_dtype"):
        options = dmuon.DedicatedOptions(param_dtype=torch.bfloat16)
        dmuon.dedicate_params(model, mesh, layout="dedicated", options=options)
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    with pytest.raises(OwnershipError, match="a slice of a weight only"):
        dmuon.Muon(model, **MUON, master_weights=True)
    own.close()


@distributed(2)
def test_state_dicts_are_whole_or_by_rows_and_copies_of_placeholders_are_refused(rank, world):
    model, other = seeded(), seeded(seed=1)
    own = dedicated(model, world)
    with pytest.raises(OwnershipError, match=r"copy\.deepcopy"):
        copy.deepcopy(model)
    with own.materialized(model):
        assert copy.deepcopy(model).mid.weight.shape == (18, 24)
        model.load_state_dict(other.state_dict())
        saved = copy.deepcopy(model.state_dict())
    assert_bitwise(saved, other.state_dict())
    by_rows = model.state_dict()["mid.weight"]
    assert by_rows.to_local().shape == (9, 24)
    assert torch.equal(by_rows.full_tensor(), other.mid.weight)
    model.load_state_dict(seeded(seed=2).state_dict())  # whole, on every rank
    assert_bitwise(whole(model, own), weights(seeded(seed=2)))
    model.blocks[0].load_state_dict(other.blocks[0].state_dict())
    model.load_state_dict({"mid.weight": by_rows}, strict=False)
    found = whole(model, own)
    assert torch.equal(found["mid.weight"], other.mid.weight)
    assert torch.equal(found["blocks.0.up.weight"], other.blocks[0].up.weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for mid\.weight: \[3, 3\] was saved"):
        model.load_state_dict({"mid.weight": torch.zeros(3, 3)}, strict=False)
    assert_bitwise(whole(model, own), found)
    with pytest.raises(OwnershipError, match="assign=True"):
        model.blocks[0].load_state_dict(other.blocks[0].state_dict(), assign=True)
    assert torch.equal(whole(model, own)["blocks.0.up.weight"], found["blocks.0.up.weight"])
    model.load_state_dict(other.state_dict())
    own.close()
    assert_bitwise(weights(model), weights(other))


@distributed(3)
def test_weights_that_do_not_fit_on_one_rank_alone_change_none_on_any(rank, world):
    """As a whole dict on every rank, under a module around it, and by torch's set_model_state_dict
    from the first rank."""
    model, other = nn.ModuleDict({"net": seeded()}), nn.ModuleDict({"net": seeded(seed=1)})
    net = model["net"]
    own = dmuon.dedicate_params(net, mesh_of((world,)), layout="dedicated")
    specs = own.plan.specs
    names = {specs.parameters[i].name for i in specs.muon_parameters()}

    def matrices():  # the others torch loads by itself, one after the other
        return {name: value for name, value in whole(net, own).items() if name in names}

    before = matrices()

    def another_shape(state):
        state["net.mid.weight"] = torch.zeros(3, 3)

    def missing(state):
        del state["net.mid.weight"]

    for change, told in ((another_shape, "size mismatch for mid"), (missing, "rank . has '")):
        for culprit in range(world):
            state = other.state_dict()
            if rank == culprit:
                change(state)
            alone = RuntimeError if change is another_shape else ConsensusError
            with pytest.raises(alone if rank == culprit else ConsensusError, match=told):
                model.load_state_dict(state)
            assert_bitwise(matrices(), before)
    state = other.state_dict()
    another_shape(state)
    with pytest.raises(RuntimeError, match="size mismatch for mid"):
        model.load_state_dict(state)
    state = other.state_dict()
    state["net.blocks.0.norm.weight"] = torch.zeros(3)  # which torch finds
    with pytest.raises(RuntimeError, match=r"net\.blocks\.0\.norm"):
        model.load_state_dict(state)
    assert_bitwise(matrices(), before)
    state = other["net"].state_dict()
    del state["mid.weight"]
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises((RuntimeError, ConsensusError), match=r"Missing key 'mid\.weight'"):
        set_model_state_dict(net, state, options=options)
    # What cut a call off does not stay.
    model.load_state_dict(other.state_dict())
    assert_bitwise(whole(net, own), weights(other["net"]))
    net.mid.load_state_dict(seeded(seed=2).mid.state_dict())
    own.close()
    assert torch.equal(net.mid.weight, seeded(seed=2).mid.weight)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of luck")


def fail_in(phase):
    def hook(module, args):
        if phase == "forward":
            raise RuntimeError("out of luck")
        return (FailsInBackward.apply(args[0]),)

    return hook


@pytest.mark.parametrize("layout, phase, who", [
    ("dedicated", "forward", "one"),
    ("dedicated", "backward", "all"),
    ("reduced", "backward", "one"),
])  # fmt: skip
@distributed(2)
def test_the_step_after_an_exception_works(rank, world, layout, phase, who):
    """After one in backward every rank drops the batch. After one in the forward pass of one rank
    it takes part in the others' step with a batch that counts for nothing."""
    with both(Net, layout) as pair:
        for step in range(3):
            fails = step == 1 and (who == "all" or rank == 1)
            removed = pair.model.blocks[1].down.register_forward_pre_hook(fail_in(phase))
            if not fails:
                removed.remove()
                pair.backward(step)
            else:
                with pytest.raises(RuntimeError, match="out of luck"):
                    pair.backward(step)
                removed.remove()
            if step == 1 and (who == "all" or phase == "backward"):
                pair.opt.zero_grad()
                continue
            pair.joint_backward(step, without=1 if step == 1 else None)
            pair.advance()
        pair.check()


@distributed(2)
def test_a_model_made_on_the_meta_device(rank, world):
    mesh = mesh_of((world,))
    with torch.device("meta"):
        model = seeded()
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    shard_units(model, mesh, ignored_params=own.dedicated_params)
    with pytest.raises(OwnershipError, match="to_empty"):
        dmuon.Muon(model, **MUON)
    model.to_empty(device="cpu")
    for name in ("blocks.0.up.weight", "mid.weight"):
        is_here = dict(model.named_parameters())[name].shape[0] > 0
        assert is_here == (own.owner_of(name) == rank)  # memory only where it is kept
    torch.manual_seed(100 + rank)  # every rank draws its own numbers
    for module in model.modules():
        getattr(module, "reset_parameters", lambda: None)()
    pair = Both(model, seeded(), dmuon.Muon(model, **MUON), None, mesh)
    start = pair.whole()
    for everyone in zip(*(each.values() for each in gathered(start))):
        assert all(torch.equal(everyone[0], other) for other in everyone)
    pair.copy_weights()
    pair.ref = ReferenceMuon(pair.twin, **MUON)
    pair.train(range(2))
    pair.check()
    own.close()
