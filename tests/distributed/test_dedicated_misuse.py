"""What can go wrong in the `dedicated` layout, and how it is told; exceptions; the meta device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.config import DedicatedOptions
from dmuon.reference import ReferenceMuon
from dmuon.types import DmuonError, OwnershipError
from tests.distributed.dedicated import MUON, mesh_of, recorded, shard_rest, whole
from tests.distributed.harness import distributed
from tests.distributed.models import batch, largest_difference, loss_of, seeded, weights


def dedicated(model, world, **options):
    return dmuon.dedicate_params(
        model, mesh_of((world,)), layout="dedicated", options=DedicatedOptions(**options)
    )


def joint_step(twin, ref, step, world):
    (sum(loss_of(twin, batch(step, r)) for r in range(world)) / world).backward()
    ref.step()
    ref.zero_grad()


# ---- fully_shard -------------------------------------------------------------------------


@distributed(2)
def test_fully_shard_without_ignored_params_is_found_by_the_optimizer(rank, world):
    model = seeded()
    own = dedicated(model, world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of((world,)))
    with pytest.raises(OwnershipError, match=r"ignored_params=own\.dedicated_params"):
        dmuon.Muon(model, **MUON)
    own.runtime.process_groups.close()


@pytest.mark.parametrize("root", [False, True])
@distributed(2)
def test_fully_shard_without_ignored_params_is_found_by_the_first_forward(rank, world, root):
    model = seeded()
    own = dedicated(model, world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of((world,)))
    if root:
        fully_shard(model, mesh=mesh_of((world,)))
    with pytest.raises(OwnershipError, match=r"blocks\.0\.up\.weight.*ignored_params"):
        model(batch(0, rank)[0])
    own.runtime.process_groups.close()


@distributed(2)
def test_ignored_by_fully_shard_hides_the_parameters_and_puts_them_back(rank, world):
    model, twin = seeded(), seeded()
    names = [n for n, _ in model.named_parameters()]
    own = dedicated(model, world)
    kept = {n: p for n, p in model.named_parameters() if p in own.dedicated_params}
    with own.ignored_by_fully_shard():
        assert not own.dedicated_params & set(model.parameters())
        assert not hasattr(model.blocks[0].up, "weight")
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of((world,)))
        fully_shard(model, mesh=mesh_of((world,)))
    assert [n for n, _ in model.named_parameters()] == names
    assert all(dict(model.named_parameters())[n] is p for n, p in kept.items())
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        joint_step(twin, ref, step, world)
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()


@distributed(2)
def test_hidden_parameters_come_back_after_an_error(rank, world):
    model = seeded()
    names = [n for n, _ in model.named_parameters()]
    own = dedicated(model, world)
    with pytest.raises(RuntimeError, match="mine"), own.ignored_by_fully_shard():
        raise RuntimeError("mine")
    assert [n for n, _ in model.named_parameters()] == names
    own.close()


@distributed(2)
def test_what_the_layout_cannot_be_laid_over(rank, world):
    with pytest.raises(OwnershipError, match="constructor refuses the placeholders"):
        dmuon.dedicate_params(
            DistributedDataParallel(seeded(), find_unused_parameters=True), layout="dedicated"
        )
    model = seeded()
    fully_shard(model, mesh=mesh_of((world,)))
    with pytest.raises(OwnershipError, match="after fully_shard"):
        dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    with pytest.raises(TypeError, match="must be DedicatedOptions"):
        dmuon.dedicate_params(
            seeded(), mesh_of((world,)), layout="dedicated", options=dmuon.ShardedOptions()
        )
    own = dmuon.dedicate_params(seeded(), mesh_of((world,)), layout="replicated")
    with pytest.raises(OwnershipError, match="belongs to layout='dedicated'"):
        own.ignored_by_fully_shard().__enter__()
    own.close()


@distributed(2)
def test_period_scaler_and_a_second_optimizer_are_refused(rank, world):
    model = seeded()
    own = dedicated(model, world)
    with pytest.raises(OwnershipError, match="there is no block step"):
        dmuon.Muon(model, **MUON, period=2)
    dmuon.Muon(model, **MUON)
    with pytest.raises(OwnershipError, match="already have a dmuon.Muon"):
        dmuon.Muon(model, **MUON)
    own.close()


# ---- placeholders ------------------------------------------------------------------------


@distributed(2)
def test_state_dicts_of_placeholders_are_refused_and_whole_ones_work(rank, world):
    model, other = seeded(), seeded(seed=1)
    own = dedicated(model, world)
    with pytest.raises(OwnershipError, match=r"inside `with own\.materialized\(model\):`"):
        model.state_dict()
    with pytest.raises(OwnershipError, match="materialized"):
        model.load_state_dict(other.state_dict())
    with pytest.raises(OwnershipError, match=r"copy\.deepcopy"):
        copy.deepcopy(model)
    with own.materialized(model):
        assert copy.deepcopy(model).mid.weight.shape == (18, 24)
        model.load_state_dict(other.state_dict())
        saved = copy.deepcopy(model.state_dict())
    assert largest_difference(saved, other.state_dict()) == 0
    assert largest_difference(whole(model, own), weights(other)) == 0
    own.close()
    assert largest_difference(weights(model), weights(other)) == 0


@distributed(2)
def test_converting_the_model_afterwards_is_an_error_on_every_rank(rank, world):
    model = seeded()
    own = dedicated(model, world)
    model.bfloat16()
    with pytest.raises(OwnershipError, match=r"is now .* torch\.bfloat16 .* Move or convert"):
        model(batch(0, rank)[0])
    own.runtime.process_groups.close()


@distributed(2)
def test_assigning_other_values_is_an_error_on_every_rank(rank, world):
    model = seeded()
    own = dedicated(model, world)
    model.mid.weight.data = torch.randn(18, 24)
    with pytest.raises(OwnershipError, match=r"mid\.weight.* by an assignment to its data"):
        model(batch(0, rank)[0])
    own.runtime.process_groups.close()


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("mid.weight", "plain"),
        ("blocks.1.up.weight", "plain"),
        ("blocks.0.norm.weight", "plain"),
        ("mid.weight", "fsdp"),
        ("blocks.1.up.weight", "fsdp"),
    ],
)
@distributed(2)
def test_a_parameter_that_was_replaced(rank, world, name, rest):
    """It would never be trained again; told on every rank before a step sends anything."""
    model = seeded()
    own, events = recorded(model, mesh_of((world,)))
    if rest == "fsdp":
        shard_rest(model, own, mesh_of((world,)))
    opt = dmuon.Muon(model, **MUON)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    opt.zero_grad()
    path, _, local = name.rpartition(".")
    shape = own.shape_of(name)
    torch.manual_seed(1)
    setattr(model.get_submodule(path), local, nn.Parameter(torch.randn(shape) / 10))
    loss_of(model, batch(1, rank)).backward()
    sent = len(events)
    with pytest.raises(OwnershipError, match=rf"'{name}' is another parameter object"):
        opt.step()
    assert len(events) == sent
    own.close()


@distributed(2)
def test_weights_that_were_moved_are_followed(rank, world):
    model, twin = seeded(), seeded()
    own = dedicated(model, world)
    for p in model.parameters():
        p.data = p.data.clone()  # what model.to() does, to the same device
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        joint_step(twin, ref, step, world)
        opt.zero_grad()
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()


@distributed(2)
def test_a_step_between_forward_and_backward_is_an_error(rank, world):
    model = seeded()
    own = dedicated(model, world)
    opt = dmuon.Muon(model, **MUON)
    early = loss_of(model, batch(0, rank))
    loss_of(model, batch(1, rank)).backward()
    opt.step()
    with pytest.raises(DmuonError, match="between this forward pass and its backward"):
        early.backward()
    own.close()


# ---- exceptions --------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.now = False

    def forward(self, x):
        if self.now:
            raise RuntimeError("out of luck")
        return self.inner(x)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("who", ["all", "one"])
@distributed(2)
def test_the_step_after_an_exception_in_forward_works(rank, world, who):
    """On one rank: it takes part in the others' step with a batch that counts for nothing."""
    model, twin = seeded(), seeded()
    failing = Fails(model.blocks[1].down)
    model.blocks[1].down = failing
    twin.blocks[1].down = Fails(twin.blocks[1].down)
    own = dedicated(model, world)
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    for step in range(4):
        failing.now = step == 1 and (who == "all" or rank == 1)
        if failing.now:
            with pytest.raises(RuntimeError, match="out of luck"):
                loss_of(model, batch(step, rank))
        else:
            loss_of(model, batch(step, rank)).backward()
        if step == 1 and who == "all":
            continue
        opt.step()
        opt.zero_grad()
        counts = [r for r in range(world) if not (step == 1 and r == 1)]
        (sum(loss_of(twin, batch(step, r)) for r in counts) / world).backward()
        ref.step()
        ref.zero_grad()
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()


@distributed(2)
def test_the_step_after_an_exception_in_backward_works(rank, world):
    model, twin = seeded(), seeded()
    own = dedicated(model, world)
    opt, ref = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    fail = [False]
    model.blocks[1].register_forward_pre_hook(
        lambda module, args: (FailsInBackward.apply(args[0]),) if fail[0] else None
    )
    for step in range(4):
        fail[0] = step == 1
        loss = loss_of(model, batch(step, rank))
        if fail[0]:
            with pytest.raises(RuntimeError, match="out of luck"):
                loss.backward()
            opt.zero_grad()
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
        joint_step(twin, ref, step, world)
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()


# ---- the meta device ---------------------------------------------------------------------


def initialize(model: nn.Module, rank: int) -> None:
    torch.manual_seed(100 + rank)  # every rank draws its own numbers
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=0.3)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


@pytest.mark.parametrize("kind", ["plain", "fsdp", "hsdp"])
@distributed(4)
def test_a_model_made_on_the_meta_device(rank, world, kind):
    mesh = mesh_of((2, 2)) if kind == "hsdp" else mesh_of((world,))
    with torch.device("meta"):
        model = seeded()
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    if kind == "fsdp":
        shard_rest(model, own, mesh)
    with pytest.raises(OwnershipError, match="to_empty"):
        dmuon.Muon(model, **MUON)
    model.to_empty(device="cpu")
    shards = [own.owner_of(n) % 2 for n in ("blocks.0.up.weight", "mid.weight")]
    for name, shard in zip(("blocks.0.up.weight", "mid.weight"), shards, strict=True):
        rows = dict(model.named_parameters())[name].shape[0]
        mine = rank % 2 == shard if kind == "hsdp" else own.owner_of(name) == rank
        assert (rows > 0) == mine  # memory only where it is kept
    initialize(model, rank)
    opt = dmuon.Muon(model, **MUON)
    twin = seeded()
    start = whole(model, own)
    for name, p in twin.named_parameters():
        p.data.copy_(start[name])
        everyone = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(everyone, start[name].contiguous())
        assert all(torch.equal(p.data, other) for other in everyone)
    ref = ReferenceMuon(twin, **MUON)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        joint_step(twin, ref, step, world)
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()
