"""The `sharded` layout against Muon in one process; every mesh for ten steps is in `test_check`."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.dtensors import local_shard, local_tensor, whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.shards import Box
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from tests.distributed.harness import distributed
from tests.distributed.sharded import MUON, dedicated, pair, reference, train


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum_mode": "sgd", "nesterov": True, "momentum": 0.9},
        {"momentum_mode": "sgd", "nesterov": False, "dampening": 0.1},
        {"nesterov": False, "adjust_lr_fn": "original", "momentum": 0.3},
        {"ns_coefficients": "quintic", "ns_steps": 3, "weight_decay": 0.0},
    ],
    ids=str,
)
@distributed(2)
def test_every_setting_means_what_it_means_in_the_reference(rank, world, settings):
    both = pair("fsdp2")
    train(both, 4, **settings)
    assert both.difference()[0] <= 1e-5, both.difference()


@distributed(2)
def test_a_planted_fault_is_seen(rank, world):
    both = pair("fsdp2")
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        if rank == 0:
            opt._engines[0]._state.momentum[0].add_(0.1)
        both.backward(0)
        opt.step()
        both.joint_backward(0)
        ref.step()
        opt.synchronize()
        assert both.difference()[0] > 1e-4


def assert_replicas_agree(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        for axis, placement in enumerate(p.placements):
            if placement.is_replicate():
                group = p.device_mesh.get_group(axis)
                mine = p.to_local().detach().contiguous()
                other = mine.clone()
                dist.broadcast(other, group=group, group_src=0)
                assert torch.equal(mine, other), name


@distributed(4)
def test_replicas_of_hsdp_are_bitwise_equal_and_so_is_their_momentum(rank, world):
    both = pair("hsdp")
    with dedicated(both.model, ns_dtype=torch.bfloat16, period=3) as (_, opt):
        for step in range(5):
            both.backward(step)
            opt.step()
            opt.zero_grad()
            opt.synchronize()
            assert_replicas_agree(both.model)


def trained_on(mesh_shape: tuple[int, ...], axes: tuple[str, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    model = ParallelModel()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with dedicated(model) as (_, opt):
        for step in range(6):
            loss_of(model, batch(step, dist.get_rank())).backward()
            opt.step()
            opt.zero_grad()
    return [whole_tensor(p) for p in model.parameters()]


@distributed(4)
def test_fsdp_and_hsdp_train_alike(rank, world):
    one = trained_on((4,), ("dp",))
    for shape in ((2, 2), (4, 1), (1, 4)):
        other = trained_on(shape, ("replicate", "shard"))
        worst = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
        assert worst <= 1e-6, (shape, worst)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6))


def trained_with_tp(degree: int, steps: int = 4) -> list[Tensor]:
    """The update must not depend on how many ranks a matrix is cut over."""
    model = small()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "tp"))
    if degree > 1 or world == 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    with dedicated(model) as (_, opt):
        for step in range(steps):
            # The same data on all ranks: only the cutting differs.
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return [whole_tensor(p) for p in model.parameters()]


@distributed(4)
def test_the_update_does_not_depend_on_the_tensor_parallel_degree(rank, world):
    found = {degree: trained_with_tp(degree) for degree in (1, 2, 4)}
    for degree in (2, 4):
        pairs = zip(found[1], found[degree], strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-5, degree


@distributed(2)
def test_a_mesh_of_one_is_no_tensor_parallelism_bitwise(rank, world):
    results = []
    for with_tp in (False, True):
        model = small()
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
        if with_tp:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        with dedicated(model) as (_, opt):
            for step in range(5):
                generator = torch.Generator().manual_seed(7 * step + rank)
                model(torch.randn(8, 12, generator=generator)).square().mean().backward()
                opt.step()
                opt.zero_grad()
        results.append([whole_tensor(p) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Mixed(nn.Module):
    """Parameters whose gradients are set by hand, sharded in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "rows": (7, 5), "cols": (5, 7), "few": (1, 6), "kernel": (6, 4, 3),
            "stack": (3, 4, 5), "fused_weight": (9, 4), "whole": (4, 4),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.randn(shape)))

    def shard(self, mesh: Any) -> None:
        placements = {
            "rows": [Shard(0)], "cols": [Shard(1)], "few": [Shard(0)], "kernel": [Shard(1)],
            "stack": [Shard(1)], "fused_weight": [Shard(0)], "whole": [Replicate()],
        }  # fmt: skip
        for name, placed in placements.items():
            p = getattr(self, f"{name}_weight")
            sharded = nn.Parameter(distribute_tensor(p.detach(), mesh, placed))
            self.register_parameter(f"{name}_weight", sharded)


@distributed(2, 4)
def test_any_placement_on_any_dim(rank, world):
    torch.manual_seed(0)
    model, twin = Mixed(), Mixed()
    twin.load_state_dict(model.state_dict())
    model.shard(init_device_mesh("cpu", (world,)))
    splits = {"fused_weight_weight": [4, 2, 3]}
    own = dmuon.dedicate_params(model, splits=splits, select=lambda n, p: True)
    opt = dmuon.Muon(model, **MUON)
    ref = ReferenceMuon(twin, splits=splits, select=lambda n, p: True, **MUON)
    for step in range(4):
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            generator = torch.Generator().manual_seed(100 * step + len(name))
            q.grad = torch.randn(q.shape, generator=generator)
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        opt.step()
        ref.step()
    opt.synchronize()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((whole_tensor(p) - q.detach()).abs().max()) <= 1e-5, name
    own.close()


@pytest.mark.parametrize("period", [1, 2])
@distributed(2)
def test_parameters_of_different_dtypes_in_one_model(rank, world, period):
    """Such as a float32 router in a bfloat16 model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 12).to(torch.bfloat16), nn.Linear(12, 6))
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world,))
    for part in model:
        fully_shard(part, mesh=mesh)
    with dedicated(model, period=period) as (_, opt):
        ref = reference(twin)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            generator = torch.Generator().manual_seed(len(name))
            q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        opt.step()
        ref.step()
        opt.synchronize()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            atol = 1e-5 if p.dtype is torch.float32 else 4e-3  # half a unit of a weight near 0.5
            torch.testing.assert_close(whole_tensor(p), q.detach(), rtol=0, atol=atol)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()  # a block step where the period is 2


@distributed(2)
def test_a_model_that_is_dropped_is_freed(rank, world):
    both = pair("fsdp2")
    own = dmuon.dedicate_params(both.model)
    opt = dmuon.Muon(both.model, **MUON)
    both.backward(0)
    opt.step()
    opt.zero_grad()
    opt.synchronize()
    alive = weakref.ref(both.model)
    transport = own.runtime.transport
    del both, own, opt
    gc.collect()
    assert alive() is None
    transport.close()


@distributed(2)
def test_two_models_in_one_optimizer_are_told_apart(rank, world):
    first, second = pair("fsdp2"), pair("fsdp2", seed=1)
    owns = [dmuon.dedicate_params(p.model) for p in (first, second)]
    params = [*first.model.parameters(), *second.model.parameters()]
    opt = dmuon.Muon(params, **MUON)
    for both in (first, second):
        both.backward(0)
    if rank == 0:
        first.model.blocks[0].mlp.up.weight.grad.to_local().fill_(math.nan)
    before = [whole_tensor(p).clone() for p in first.model.parameters()]
    opt.step()
    stats = opt.stats()
    assert stats["finite"] is False and stats["skipped"] == 1
    matrices = len(owns[0].plan.specs.matrices)
    assert len(stats["update_rms"]) == matrices  # of the second; the first was skipped
    after = [whole_tensor(p) for p in first.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for both in (first, second):
        both.model.zero_grad()
        both.backward(1)
    opt.step()
    assert len(opt.stats()["update_rms"]) == 2 * matrices and opt.stats()["finite"]
    for own in owns:
        own.close()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
@distributed(2)
def test_gradients_of_any_size_give_the_same_update(rank, world, scale):
    torch.manual_seed(0)
    model, twin = small(), small()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with dedicated(model, eps=1e-38, ns_dtype=torch.float32) as (_, opt):
        ref = reference(twin, eps=1e-38)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(len(name)))
            q.grad *= scale if q.ndim > 1 else 1.0
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        opt.step()
        ref.step()
        opt.synchronize()
        assert opt.stats()["finite"]
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert float((whole_tensor(p) - q.detach()).abs().max()) <= 1e-5


@distributed(2)
def test_what_a_rank_holds_is_read_from_metadata(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    p = distribute_tensor(torch.arange(15.0).view(3, 5), mesh["dp"], [Shard(0)])
    shard = local_shard("w", p, rank)
    assert shard.box == Box((2 * rank, 0), (2 - rank, 5))
    whole = distribute_tensor(torch.ones(3, 5), mesh["dp"], [Replicate()])
    assert local_shard("w", whole, rank).replica == (rank,)


# ---- state -------------------------------------------------------------------------------


def steps_of(both: Any, opt: dmuon.Muon, first: int, last: int) -> None:
    for step in range(first, last):
        both.backward(step)
        opt.step()
        opt.zero_grad()


# Both together fail in torch 2.13 for any optimizer, AdamW too.
@pytest.mark.parametrize("flat, full", [(False, False), (True, False), (False, True)])
@distributed(2)
def test_torch_state_dict_functions_work_as_with_adamw(rank, world, flat, full):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    straight = pair("fsdp2")
    with dedicated(straight.model) as (_, opt):
        steps_of(straight, opt, 0, 6)
        expected = straight.whole()
    both = pair("fsdp2")
    with dedicated(both.model) as (_, opt):
        steps_of(both, opt, 0, 3)
        model_state, optimizer_state = get_state_dict(both.model, opt, options=options)
    again = pair("fsdp2", seed=3)
    with dedicated(again.model) as (_, opt):
        set_state_dict(
            again.model, opt, model_state_dict=model_state, optim_state_dict=optimizer_state,
            options=options,
        )  # fmt: skip
        steps_of(again, opt, 3, 6)
        found = again.whole()
    assert all(torch.equal(expected[n], found[n]) for n in expected)


@distributed(4)
def test_a_distributed_checkpoint_reshards(rank, world):
    """Saved on four ranks of FSDP, continued on 2 x 2 of HSDP."""
    folders = [None]
    if rank == 0:
        import tempfile

        folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)

    def train_from(shape: tuple[int, ...], first: int, last: int, load: bool) -> dict[str, Tensor]:
        torch.manual_seed(first)
        model = ParallelModel()
        axes = ("dp",) if len(shape) == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        fully_shard(model, mesh=mesh)
        with dedicated(model) as (_, opt):
            if load:
                state = {
                    "model": get_model_state_dict(model),
                    "opt": get_optimizer_state_dict(model, opt),
                }
                dcp.load(state, checkpoint_id=folders[0])
                model.load_state_dict(state["model"])
                set_optimizer_state_dict(model, opt, state["opt"])
                assert opt.stats()["steps"] == first
            for step in range(first, last):
                loss_of(model, batch(step, dist.get_rank())).backward()
                opt.step()
                opt.zero_grad()
            opt.synchronize()
            if not load:
                state = {
                    "model": get_model_state_dict(model),
                    "opt": get_optimizer_state_dict(model, opt),
                }
                dcp.save(state, checkpoint_id=folders[0])
        return {n: whole_tensor(p) for n, p in model.named_parameters()}

    train_from((4,), 0, 3, load=False)
    resumed = train_from((2, 2), 3, 6, load=True)
    straight = train_from((4,), 0, 6, load=False)
    worst = max(float((straight[n] - resumed[n]).abs().max()) for n in straight)
    assert worst <= 1e-5, worst


@distributed(2)
def test_state_of_another_model_is_refused_and_nothing_is_lost(rank, world):
    both = pair("fsdp2")
    with dedicated(both.model) as (_, opt):
        steps_of(both, opt, 0, 2)
        saved = opt.state_dict()
        before = {k: v.clone() for k, v in opt.state[next(both.model.blocks.parameters())].items()}
        broken = {**saved, "state": dict(list(saved["state"].items())[1:])}
        for key in saved["state"]:
            if "momentum_buffer" in saved["state"][key]:
                broken = {**saved, "state": {k: v for k, v in saved["state"].items() if k != key}}
                break
        with pytest.raises(ValueError, match="no momentum for parameter"):
            opt.load_state_dict(broken)
        shorter = [{**g, "params": g["params"][1:]} for g in saved["param_groups"]]
        with pytest.raises(ValueError, match="parameters in"):
            opt.load_state_dict({**saved, "param_groups": shorter})
        after = opt.state[next(both.model.blocks.parameters())]
        for key, value in before.items():
            assert torch.equal(local_tensor(value), local_tensor(after[key])), key


@distributed(2)
def test_the_report_knows_the_layout(rank, world):
    both = pair("tp")
    with dedicated(both.model) as (own, opt):
        text = str(own.report())
        assert "layout sharded" in text
        owners = own.owner_of("blocks.0.mix.weight")
        assert len(owners) == 2, "a plain weight is there once a rank"
        both.backward(0)
        opt.step()
        rms = opt.stats()["update_rms"]
        for name, value in rms.items():
            if "mlp.up" in name:
                assert 0.1 < value < 0.3, (name, value)
        assert opt._ownerships[0].runtime.transport.gather_objects(rms) == [rms] * world
