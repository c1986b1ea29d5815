"""The `sharded` layout against Muon in one process; every mesh is in `test_check`."""

from __future__ import annotations

import copy
import gc
import math
import tempfile
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon import devices
from dmuon.dtensors import local_shard, local_tensor, whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.costs import CostTable
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from tests.distributed.harness import distributed
from tests.distributed.sharded import (
    BY_NAME,
    MUON,
    dedicated,
    pair,
    reference,
    train,
    vocabulary,
)
from tests.fused import FusedModel


def steps_of(model: nn.Module, opt: dmuon.Muon, first: int, last: int) -> None:
    for step in range(first, last):
        loss_of(model, batch(step, dist.get_rank())).backward()
        opt.step()
        opt.zero_grad()


# ---- equal to the reference --------------------------------------------------------------


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
    train(both, 3, **settings)
    assert both.difference()[0] <= 1e-5, both.difference()


def set_gradients(model: nn.Module, twin: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    """Equal gradients, those of matrices times ``scale``."""
    for n, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
        q.grad = torch.randn(
            q.shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed + n)
        ).to(q.dtype)
        q.grad *= scale if q.ndim > 1 else 1.0
        p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        atol = 1e-5 if p.dtype is torch.float32 else 4e-3  # half a unit of a weight near 0.5
        torch.testing.assert_close(
            whole_tensor(p), q.detach(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def everything(name: str, parameter: Tensor) -> bool:
    return True


class Shapes(nn.Module):
    """Parameters of these shapes, and modules."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **modules: nn.Module) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.randn(shape)))
        for name, module in modules.items():
            self.add_module(name, module)

    def shard(self, placements: list[Placement]) -> Shapes:
        """A copy that lies so on all ranks."""
        mesh, made = (
            init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),)),
            copy.deepcopy(self),
        )
        places = iter(placements)
        for module in made.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(p.detach(), mesh, [next(places)])
                module.register_parameter(name, nn.Parameter(placed))
        return made


ANY = {"rows": (7, 5), "cols": (5, 7), "few": (1, 6), "kernel": (6, 4, 3), "stack": (3, 4, 5),
       "fused_weight": (9, 4), "whole": (4, 4), "beside": (4, 9), "inputs": (6, 7),
       "experts": (2, 5, 6)}  # fmt: skip
CUTS = {
    "fused_weight_weight": [4, 2, 3],
    "beside_weight": {"sizes": [4, 2, 3], "dim": 1},
    "inputs_weight": {"sizes": [5, 2], "transposed": True},
    "experts_weight": {"sizes": [2, 4], "transposed": True},
}


@distributed(2, 4)
def test_any_placement_on_any_dim(rank, world):
    twin = Shapes(ANY)
    on = [Shard(0), Shard(1), Shard(0), Shard(1), Shard(1), Shard(0), Replicate()]
    model = twin.shard([*on, Shard(0), Shard(1), Shard(2)])
    select = {"splits": CUTS, "select": everything}
    own = dmuon.dedicate_params(model, **select)
    settings = {"adjust_lr_fn": "original"}  # sees which side the outputs are on
    opt, ref = dmuon.Muon(model, **MUON, **settings), reference(twin, **select, **settings)
    for step in range(3):
        set_gradients(model, twin, 100 * step)
        opt.step()
        ref.step()
    opt.synchronize()
    assert_close(model, twin)
    own.close()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@distributed(4)
def test_fused_weights_stored_in_out_are_cut_along_their_outputs(rank, world, adjust):
    case = replace(BY_NAME["fsdp4"], build=FusedModel)
    both = pair(case)
    cut = {"splits": FusedModel.splits, "heads": FusedModel.heads}
    own = dmuon.dedicate_params(both.model, costs="analytic", **cut)
    shapes = {m.name: m.shape for m in own.plan.specs.matrices}
    assert shapes["blocks.1.c_attn.weight[:, 10:20]"] == (10, 10)
    assert shapes["blocks.0.experts.gate_up_proj[1][:, 0:6]"] == (6, 10)
    assert shapes["blocks.0.c_proj.weight[5:10]"] == (10, 5)
    settings = {"adjust_lr_fn": adjust, "ns_dtype": torch.float32, "lr": 0.02, "adamw_lr": 1e-3}
    opt = dmuon.Muon(both.model, **settings)
    ref = ReferenceMuon(both.twin, **cut, **settings)
    for step in range(6):
        both.both_backward(step)
        opt.step()
        ref.step()
        opt.zero_grad()
        ref.zero_grad()
    opt.synchronize()
    assert both.difference()[0] <= 1e-5, both.difference()
    own.close()


TURNED = {"tall": (20, 6), "tall2": (20, 6), "wide": (6, 20), "wide2": (6, 20), "stack": (2, 20, 6)}


@pytest.mark.parametrize(
    ("adjust", "placement"),
    [("original", Shard(0)), ("match_rms_adamw", Shard(1)), ("original", Replicate())],
    ids=str,
)
@distributed(2)
def test_a_matrix_and_its_transpose_in_one_batch(rank, world, adjust, placement):
    twin = Shapes(TURNED, conv=nn.Conv2d(5, 6, 2, bias=False))
    model = twin.shard([placement] * (len(TURNED) + 1))
    costs = CostTable("made up", {(6, 20, "float32"): {1: 3.0, 8: 3.1}})  # batches are cheap
    own = dmuon.dedicate_params(model, select=everything, costs=costs)
    settings = {"adjust_lr_fn": adjust}
    opt = dmuon.Muon(model, **MUON, **settings, period=3)
    ref = reference(twin, select=everything, **settings)
    assert any(any(unit.transposed) for unit in own.runtime.units)
    set_gradients(model, twin)
    opt.step()
    ref.step()
    opt.synchronize()
    assert_close(model, twin)
    for name, value in opt.stats()["update_rms"].items() if adjust == "original" else ():
        ratio = (20 / 6) ** 0.5 if name.startswith(("tall", "stack")) else 1.0
        assert 0.7 < value / (ratio / 20**0.5) < 1.3, (name, value)
    own.close()


@pytest.mark.parametrize("period", [1, 2])
@distributed(2)
def test_parameters_of_different_dtypes_in_one_model(rank, world, period):
    """Such as a float32 router in a bfloat16 model."""
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 12).to(torch.bfloat16), nn.Linear(12, 6))
    twin = copy.deepcopy(model)
    for part in model:
        fully_shard(part, mesh=init_device_mesh(torch.get_default_device().type, (world,)))
    with dedicated(model, period=period) as (_, opt):
        ref = reference(twin)
        set_gradients(model, twin)
        opt.step()
        ref.step()
        opt.synchronize()
        assert_close(model, twin)
        opt.step()  # a block step where the period is 2


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e30])
@distributed(2)
def test_gradients_of_any_size_give_the_same_update(rank, world, scale):
    model, twin = small(), small()
    fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (world,)))
    with dedicated(model, eps=1.2e-38) as (_, opt):
        ref = reference(twin, eps=1.2e-38)
        set_gradients(model, twin, scale=scale)
        opt.step()
        ref.step()
        opt.synchronize()
        assert opt.stats()["finite"]
        assert_close(model, twin)


# ---- meshes ------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [None, 0, 3])
@distributed(4)
def test_replicas_of_hsdp_are_bitwise_equal(rank, world, slow):
    """Also where one rank has measured products in bfloat16 as slow."""
    both = pair("hsdp")
    is_fast = [rank != slow] if slow is not None else devices._has_bf16
    with (
        patch.object(devices, "_has_bf16", is_fast),
        dedicated(both.model, ns_dtype=torch.bfloat16, period=2) as (_, opt),
    ):
        steps_of(both.model, opt, 0, 4)
        opt.synchronize()
        for name, p in both.model.named_parameters():
            for axis, placement in enumerate(p.placements):
                if placement.is_replicate():
                    mine = local_tensor(p).contiguous()
                    other = mine.clone()
                    dist.broadcast(other, group=p.device_mesh.get_group(axis), group_src=0)
                    torch.testing.assert_close(
                        mine, other, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
                    )


def trained_on(shape: tuple[int, ...], axes: tuple[str, ...]) -> list[Tensor]:
    model, mesh = (
        small(),
        init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=axes),
    )
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"] if "tp" in axes else mesh)
    with dedicated(model) as (_, opt):
        for step in range(4):
            # The same data on all ranks: only the cutting differs.
            x = torch.randn(
                8, 12, generator=torch.Generator(torch.get_default_device()).manual_seed(step)
            )
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return [whole_tensor(p) for p in model.parameters()]


@distributed(4)
def test_the_update_does_not_depend_on_the_mesh(rank, world):
    expected = trained_on((4,), ("dp",))
    for shape, axes in [
        ((2, 2), ("dp", "tp")), ((1, 4), ("dp", "tp")), ((4, 1), ("dp", "tp")),
        ((2, 2), ("replicate", "shard")), ((4, 1), ("replicate", "shard")),
        ((1, 4), ("replicate", "shard")),
    ]:  # fmt: skip
        found = trained_on(shape, axes)
        worst = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
        bitwise = axes[1] == "tp" and shape[1] == 1  # no tensor parallelism at all
        assert worst <= (0 if bitwise else 1e-5), (shape, axes, worst)


def placed(shape: tuple[int, int], mesh: DeviceMesh, tp_dim: int, dp_dim: int) -> tuple[Any, Any]:
    """A weight under tensor parallelism and FSDP2 (HSDP), and its values."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    whole = torch.arange(layer.weight.numel()).view(shape) + 1.0
    layer.weight.data.copy_(whole)
    model = nn.Sequential(layer)
    parallelize_module(model, mesh["tp"], {"0": [ColwiseParallel, RowwiseParallel][tp_dim]()})
    data = tuple(mesh.mesh_dim_names or ())[:-1]
    fully_shard(model, mesh=mesh[data], shard_placement_fn=lambda p: Shard(dp_dim))
    return layer.weight, whole


@distributed(8)
def test_the_box_of_a_shard_is_what_lies_there(rank, world):
    for shape in [(4, 2), (2, 4), (2, 2, 2)]:
        mesh = init_device_mesh(
            torch.get_default_device().type,
            shape,
            mesh_dim_names=("replicate", "dp", "tp")[-len(shape) :],
        )
        for rows in (3, 9, 25, 50257):
            weight, whole = placed((rows, 3), mesh, 0, 0)
            box = local_shard("weight", weight, rank).box
            assert torch.equal(whole[box.slices()].flatten(), local_tensor(weight).flatten())
        assert torch.equal(whole_tensor(weight), whole)
        for dp_dim in (0, 1):  # FSDP2 cuts evenly but for dim 0
            weight, whole = placed((25, 64), mesh, 1, dp_dim)
            box = local_shard("weight", weight, rank).box
            assert torch.equal(whole[box.slices()].flatten(), local_tensor(weight).flatten())


@pytest.mark.parametrize("shape", [(4, 2), (2, 2, 2)], ids=str)
@distributed(8)
def test_uneven_parts_of_uneven_parts_follow_the_reference(rank, world, shape):
    both = pair(vocabulary(shape))
    train(both, 2, select=lambda name, p: name != "wte.weight" and p.ndim == 2)
    head = float((whole_tensor(both.model.lm_head.weight) - both.twin.lm_head.weight).abs().max())
    assert head <= 5e-3, "its gradient is nearly of rank 1, which amplifies rounding; else 0.5"
    both.twin.lm_head.weight.data.copy_(whole_tensor(both.model.lm_head.weight))
    assert both.difference()[0] <= 1e-5, both.difference()


@distributed(8)
def test_uneven_parts_of_uneven_parts_are_saved_whole(rank, world):
    """Neither torch's checkpoints nor its `set_state_dict` know where they lie."""
    whole = StateDictOptions(full_state_dict=True)

    def trained(shape: tuple[int, ...], first: int, last: int, saved: Any = None) -> Any:
        both = pair(vocabulary(shape), seed=first)
        with dedicated(both.model) as (_, opt):
            if saved is not None and len(shape) == 1:
                set_state_dict(
                    both.model, opt, model_state_dict=saved[0], optim_state_dict=saved[1],
                    options=whole,
                )  # fmt: skip
            elif saved is not None:
                for name, p in both.model.named_parameters():
                    everywhere = [Replicate()] * p.device_mesh.ndim
                    full = DTensor.from_local(saved[0][name], p.device_mesh, everywhere)
                    with torch.no_grad():
                        p.copy_(full.redistribute(placements=p.placements))
                opt.load_state_dict(saved[1])
            for step in range(first, last):
                loss_of(both.model, batch(step, 0)).backward()  # the same on all ranks
                opt.step()
                opt.zero_grad()
            opt.synchronize()
            # Of other ranks torch's is empty where it goes to the CPU.
            return get_state_dict(both.model, opt, options=whole)

    straight, _ = trained((4, 2), 0, 4)
    half = trained((4, 2), 0, 2)
    for shape, tolerance in [((4, 2), 0.0), ((8,), 1e-5)]:
        found, _ = trained(shape, 2, 4, half)
        worst = max(float((straight[n] - found[n]).abs().max()) for n in straight)
        assert worst <= tolerance, (shape, worst)


# ---- models ------------------------------------------------------------------------------


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
    opt = dmuon.Muon([*first.model.parameters(), *second.model.parameters()], **MUON)
    for both in (first, second):
        both.backward(0)
    if rank == 0:
        first.model.blocks[0].mlp.up.weight.grad.to_local().fill_(math.nan)
    before = first.whole()
    opt.step()
    stats = opt.stats()
    assert stats["finite"] is False and stats["skipped"] == 1
    matrices = len(owns[0].plan.specs.matrices)
    assert len(stats["update_rms"]) == matrices  # of the second; the first was skipped
    assert all(torch.equal(before[n], w) for n, w in first.whole().items())
    for both in (first, second):
        both.model.zero_grad()
        both.backward(1)
    opt.step()
    assert len(opt.stats()["update_rms"]) == 2 * matrices and opt.stats()["finite"]
    for own in owns:
        own.close()


@distributed(2)
def test_the_report_knows_the_layout(rank, world):
    both = pair("tp")
    with dedicated(both.model) as (own, opt):
        assert "layout sharded" in str(own.report())
        owners = own.owner_of("blocks.0.mix.weight")
        assert len(owners) == 2, "a plain weight is there once a rank"
        both.backward(0)
        opt.step()
        rms = opt.stats()["update_rms"]
        assert all(0.1 < value < 0.3 for name, value in rms.items() if "mlp.up" in name), rms
        assert own.runtime.transport.gather_objects(rms) == [rms] * world


# ---- state -------------------------------------------------------------------------------


# Both together fail in torch 2.13 for any optimizer, AdamW too.
@pytest.mark.parametrize("flat, full", [(False, False), (True, False), (False, True)])
@distributed(2)
def test_torch_state_dict_functions_work_as_with_adamw(rank, world, flat, full):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    both, again = pair("fsdp2"), pair("fsdp2", seed=3)
    with dedicated(both.model) as (_, opt):
        steps_of(both.model, opt, 0, 2)
        saved = copy.deepcopy(get_state_dict(both.model, opt, options=options))
        steps_of(both.model, opt, 2, 4)
    with dedicated(again.model) as (_, opt):
        set_state_dict(
            again.model, opt, model_state_dict=saved[0], optim_state_dict=saved[1], options=options
        )
        steps_of(again.model, opt, 2, 4)
    expected, found = both.whole(), again.whole()
    assert all(torch.equal(expected[n], found[n]) for n in expected)


@distributed(2)
def test_a_distributed_checkpoint_reshards(rank, world):
    """Saved on FSDP, continued on HSDP."""
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    flat = init_device_mesh(torch.get_default_device().type, (2,))
    nested = init_device_mesh(
        torch.get_default_device().type, (2, 1), mesh_dim_names=("replicate", "shard")
    )

    def train_from(mesh: Any, first: int, last: int, load: bool) -> dict[str, Tensor]:
        torch.manual_seed(first)
        model = ParallelModel()
        fully_shard(model, mesh=mesh)
        with dedicated(model) as (_, opt):

            def state() -> dict[str, Any]:
                return {
                    "model": get_model_state_dict(model),
                    "opt": get_optimizer_state_dict(model, opt),
                }

            if load:
                saved = state()
                dcp.load(saved, checkpoint_id=folders[0])
                model.load_state_dict(saved["model"])
                set_optimizer_state_dict(model, opt, saved["opt"])
                assert opt.stats()["steps"] == first
            steps_of(model, opt, first, last)
            opt.synchronize()
            if not load:
                dcp.save(state(), checkpoint_id=folders[0])
        return {n: whole_tensor(p) for n, p in model.named_parameters()}

    straight = train_from(flat, 0, 4, load=False)
    train_from(flat, 0, 2, load=False)
    resumed = train_from(nested, 2, 4, load=True)
    worst = max(float((straight[n] - resumed[n]).abs().max()) for n in straight)
    assert worst <= 1e-5, worst


@distributed(2)
def test_state_of_another_model_is_refused_and_nothing_is_lost(rank, world):
    both = pair("fsdp2")
    with dedicated(both.model) as (_, opt):
        steps_of(both.model, opt, 0, 1)
        saved = opt.state_dict()
        momentum = opt.state[both.model.blocks[0].mix.weight]["momentum_buffer"]
        before = local_tensor(momentum).clone()
        state = saved["state"]
        lost = next(key for key, entry in state.items() if "momentum_buffer" in entry)
        other = {lost: {"master_weight": state[lost]["momentum_buffer"]}}
        broken = {**saved, "state": state | other}
        with pytest.raises(ValueError, match="needs 'momentum_buffer'"):
            opt.load_state_dict(broken)
        shorter = [{**g, "params": g["params"][1:]} for g in saved["param_groups"]]
        with pytest.raises(ValueError, match="parameters in"):
            opt.load_state_dict({**saved, "param_groups": shorter})
        assert torch.equal(before, local_tensor(momentum))
