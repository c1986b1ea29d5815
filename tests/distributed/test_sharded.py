"""The `sharded` layout: placements, sizes of gradients, replicas, meshes; who gathers, and when."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon import devices
from dmuon.dtensors import local_shard, local_tensor, whole_tensor
from dmuon.scheduler.costs import CostTable
from dmuon.tools.parallel_models import ParallelModel
from dmuon.types import OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, assert_close
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, Layout, data_mesh, mesh_of
from tests.distributed.models import Used, batch, half, loss_of
from tests.distributed.twins import MUON, both

# ---- any placement, any gradient -----------------------------------------------------------


class Shapes(nn.Module):
    """Parameters of these shapes, and modules."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **modules: nn.Module) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.randn(shape)))
        for name, module in modules.items():
            self.add_module(name, module)


def placed(*placements: Placement | tuple[Placement, ...]) -> Layout:
    """Every parameter as it is told, on a mesh of one axis, or of as many as placements."""

    def place(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        places = iter(placements)
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                place = next(places)
                on = place if isinstance(place, tuple) else (place,)
                part = distribute_tensor(p.detach(), mesh, on)
                module.register_parameter(name, nn.Parameter(part))
        return model

    return Layout(wrap=place, from_first=False)


def equal_gradients(pair: Any, step: int, scale: float = 1.0) -> None:
    """Of `both`; those of matrices times ``scale``."""
    params, plain = zip(pair.model.parameters(), pair.twin.parameters(), strict=True), []
    for n, (p, q) in enumerate(params):
        generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + n)
        q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
        q.grad *= scale if q.ndim > 1 else 1.0
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        else:
            plain.append((p * q.grad).sum())
    if plain:  # dmuon takes them in backward
        torch.stack(plain).sum().backward()


ANY = {"rows": (7, 5), "cols": (5, 7), "few": (1, 6), "kernel": (6, 4, 3), "stack": (3, 4, 5),
       "fused_weight": (9, 4), "whole": (4, 4), "beside": (4, 9), "inputs": (6, 7),
       "experts": (2, 5, 6), "woven": (10, 4), "meshed": (4, 10), "knit": (3, 5, 6)}  # fmt: skip
CUTS = {
    "fused_weight_weight": [4, 2, 3],
    "beside_weight": {"sizes": [4, 2, 3], "dim": 1},
    "inputs_weight": {"sizes": [5, 2], "transposed": True},
    "experts_weight": {"sizes": [2, 4], "transposed": True},
    "woven_weight": "interleaved:5",
    "meshed_weight": {"sizes": "interleaved:2", "dim": 1},
    "knit_weight": {"sizes": "interleaved:2", "transposed": True},
}
EVERYTHING = {"select": lambda name, p: True}
ORIGINAL = {"adjust_lr_fn": "original"}  # sees which side the outputs are on


@distributed(4)
def test_any_placement_on_any_dim(rank, world):
    on = [Shard(0), Shard(1), Shard(0), Shard(1), Shard(1), Shard(0), Replicate()]
    laid = placed(*on, Shard(0), Shard(1), Shard(2), Shard(0), Shard(1), Shard(2))
    select = {"splits": CUTS, **EVERYTHING}
    build = partial(Shapes, ANY)
    with both(build, laid, select=select, muon=ORIGINAL, round=equal_gradients) as pair:
        pair.train(range(3))
        pair.check()


TURNED = {"tall": (20, 6), "tall2": (20, 6), "wide": (6, 20), "wide2": (6, 20), "stack": (2, 20, 6)}


@pytest.mark.parametrize("name", ["sharded", "reduced"])
@distributed(2)
def test_a_matrix_and_its_transpose_in_one_batch(rank, world, name):
    costs = CostTable("made up", {(6, 20, "float32"): {1: 3.0, 8: 3.1}})  # batches are cheap
    build = lambda: Shapes(TURNED, conv=nn.Conv2d(5, 6, 2, bias=False))  # noqa: E731
    asked = {"select": EVERYTHING, "muon": ORIGINAL, "round": equal_gradients}
    asked |= {"request": {"costs": costs, "solver": "auto"}}
    laid = placed(*[Replicate()] * (len(TURNED) + 1)) if name == "sharded" else LAYOUTS[name]
    with both(build, laid, **asked) as pair:
        assert any(any(unit.transposed) for unit in pair.own.runtime.units)
        pair.train([0])
        pair.check()
        rms = pair.opt.stats()["update_rms"]
        for name, value in rms.items():
            ratio = (20 / 6) ** 0.5 if name.startswith(("tall", "stack")) else 1.0
            assert 0.7 < value / (ratio / 20**0.5) < 1.3, (name, value)


# ---- meshes ------------------------------------------------------------------------------


@distributed(4)
def test_replicas_are_bitwise_equal_where_one_rank_has_measured_bfloat16_as_slow(rank, world):
    how = {"muon": {"ns_dtype": torch.bfloat16}, "only": {"period": 2}}
    with patch.object(devices, "_has_bf16", [rank != 3]), both(layout="hsdp", **how) as pair:
        pair.train_alone(range(4))
        pair.opt.synchronize()
        assert_equal_replicas(pair.model)


def assert_equal_replicas(model: nn.Module) -> None:
    """Bit for bit; a collective call."""
    for name, p in model.named_parameters():
        for axis, placement in enumerate(p.placements):
            if placement.is_replicate():
                mine = local_tensor(p).contiguous()
                other = mine.clone()
                dist.broadcast(other, group=p.device_mesh.get_group(axis), group_src=0)
                assert torch.equal(mine, other), name


REPLICATED = {"rows": (7, 5), "few": (1, 6), "cols": (5, 7), "tall": (9, 4), "square": (6, 6),
              "stack": (3, 4, 5), "first": (8, 6), "both": (9, 9), "all": (4, 5)}  # fmt: skip


def missing_gradients(pair: Any, step: int) -> None:
    """As `equal_gradients`; later the ranks with the first rows of one matrix lack them, and then
    all ranks those of another one."""
    equal_gradients(pair, step)
    mesh = pair.mesh
    if step == 1:
        rows = -(-7 // mesh.shape[1])
        pair.twin.rows_weight.grad[:rows] = 0
        if mesh.get_local_rank(1) == 0:
            pair.model.rows_weight.grad = None
    if step == 2:
        pair.twin.tall_weight.grad = pair.model.tall_weight.grad = None


@distributed(4)
def test_replicas_along_any_axis_with_uneven_shards(rank, world):
    """In one bucket are matrices that other ranks replicate, or more, or none."""
    rows, cols = (Replicate(), Shard(0)), (Replicate(), Shard(1))
    on = [rows, rows, cols, rows, rows, cols, (Shard(0), Replicate()), (Shard(0), Shard(1))]
    how = {"axes": ("replicate", "shard"), "options": dmuon.ShardedOptions()}
    laid = replace(placed(*on, (Replicate(), Replicate())), **how)
    mesh, case = (
        (2, 2),
        {"options": {"min_buckets": 3}, "select": EVERYTHING, "round": missing_gradients},
    )
    with both(partial(Shapes, REPLICATED), laid, mesh=mesh, **case) as pair:
        pair.train(range(4))
        pair.check()
        # Of a replica all gradients are lacking; what it gets is what the others get.
        equal_gradients(pair, 4)
        if pair.mesh.get_local_rank(0) == 1:
            pair.model.square_weight.grad = pair.model.rows_weight.grad = None
        pair.step()
        pair.opt.synchronize()
        assert_equal_replicas(pair.model)


def not_reduced(pair: Any, *names: str) -> None:
    """What gradients are where nobody reduces them over the replicas: each has its own."""
    for name, p in pair.model.named_parameters():
        if not names or name in names:
            seed = 1 + pair.mesh.get_local_rank("replicate")
            generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
            grad = local_tensor(p.grad)
            grad.copy_(torch.randn(grad.shape, generator=generator) * 0.01)


UNREDUCED = [(), ("blocks.0.norm.weight",)]


@pytest.mark.parametrize(
    ("host", "dtype"), [("reads", torch.bfloat16), ("cannot read", torch.float32)], ids=str
)
@distributed(4)
def test_replicas_that_were_not_reduced_are_an_error_that_changes_nothing(rank, world, dtype, host):
    """On all ranks, of all gradients or of one alone; where the host cannot read, one step later.
    What is not finite is skipped, and no error."""
    reads = host == "reads"
    how = {"change": lambda model: model.to(dtype)}
    for names in UNREDUCED:
        with nullcontext() if reads else host_cannot_read(), both(Used, "hsdp", **how) as pair:
            pair.train_alone([0])
            pair.backward(1)
            not_reduced(pair, *names)
            pair.opt.synchronize()
            before = pair.snapshot()
            if not reads:
                pair.step()
            text = f"between ranks: that of parameter '{names[0] if names else ''}.* by [1-9]"
            with pytest.raises(OwnershipError, match=text) as error:
                pair.step()
            assert "has model.set_requires_all_reduce(True)" in str(error.value)
            assert_bitwise(pair.snapshot(), before)
            pair.opt.zero_grad()
            pair.backward(2)
            not_reduced(pair)
            if rank == 3:
                local_tensor(pair.model.lm_head.weight.grad).fill_(math.inf)
            pair.step()
            assert pair.opt.stats()["finite"] is False
            assert_bitwise(pair.snapshot(), before)
            pair.train_alone([3])
            assert pair.opt.stats()["finite"] is True


@distributed(4)
def test_fsdp2_that_never_reduces_over_replicas_gives_no_gradient_and_a_warning(rank, world):
    with both(Used, "hsdp") as pair:
        pair.model.set_requires_all_reduce(False)
        before = pair.snapshot()
        pair.backward(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pair.step()
        found = [str(w.message) for w in told if "no parameter has a gradient" in str(w.message)]
        assert len(found) == int(rank == 0)
        assert all("did you call backward()? (HSDP" in text for text in found)
        assert all("model.set_requires_all_reduce(True)" in text for text in found)
        assert_bitwise(pair.snapshot(), before)


@distributed(4)
def test_reduced_replicas_are_no_error(rank, world):
    """The 16th step compares again. By turns: accumulated with one all-reduce, clipped, zeros but
    for a matrix, none on one replica, none on one rank."""
    with both(Used, "hsdp", change=half) as pair:
        for step in range(18):
            if step % 5 == 0:
                pair.model.set_requires_all_reduce(False)
                pair.backward(100 + step)
                pair.model.set_requires_all_reduce(True)
            pair.backward(step)
            if step % 5 == 1:
                nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)
            for name, p in pair.model.named_parameters() if step % 5 == 2 else ():
                p.grad *= float(name == "mid.weight")
            if step % 5 == 3 and pair.mesh.get_local_rank("replicate") == 1:
                pair.model.mid.weight.grad = None
            if step % 5 == 4 and rank == 2:
                pair.model.mid.weight.grad = None
            pair.step()
        pair.opt.synchronize()
        assert pair.opt.stats()["steps"] == 18 and pair.opt.stats()["skipped"] == 0
        assert_equal_replicas(pair.model)


def numbered(shape: tuple[int, int], mesh: DeviceMesh, tp_dim: int, dp_dim: int) -> Any:
    """A weight under tensor parallelism and FSDP2 (HSDP), and its values."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    whole = torch.arange(layer.weight.numel()).view(shape) + 1.0
    layer.weight.data.copy_(whole)
    model = nn.Sequential(layer)
    parallelize_module(model, mesh["tp"], {"0": [ColwiseParallel, RowwiseParallel][tp_dim]()})
    fully_shard(model, mesh=data_mesh(mesh), shard_placement_fn=lambda p: Shard(dp_dim))
    return layer.weight, whole


@distributed(4)
def test_the_box_of_a_shard_is_what_lies_there(rank, world):
    for shape in [(2, 2), (2, 1, 2)]:
        mesh = mesh_of(shape, ("replicate", "dp", "tp")[-len(shape) :])
        # FSDP2 cuts evenly but for dim 0.
        cases = [((rows, 3), 0, 0) for rows in (3, 9, 25, 50257)]
        for size, tp_dim, dp_dim in (*cases, ((25, 64), 1, 0), ((25, 64), 1, 1)):
            weight, whole = numbered(size, mesh, tp_dim, dp_dim)
            box = local_shard("weight", weight, rank).box
            assert torch.equal(whole[box.slices()].flatten(), local_tensor(weight).flatten())
            if size[0] == 50257:
                assert torch.equal(whole_tensor(weight), whole)


@distributed(4)
def test_uneven_parts_of_uneven_parts_are_saved_whole(rank, world):
    """Neither torch's checkpoints nor its `set_state_dict` know where they lie."""
    whole = StateDictOptions(full_state_dict=True)

    def trained(layout: str, first: int, last: int, saved: Any = None) -> Any:
        with both(ParallelModel, layout, seed=first) as pair:
            model, opt = pair.model, pair.opt
            if saved is not None and layout == "fsdp4":
                state = {"model_state_dict": saved[0], "optim_state_dict": saved[1]}
                set_state_dict(model, opt, **state, options=whole)
            elif saved is not None:
                for name, p in model.named_parameters():
                    everywhere = [Replicate()] * p.device_mesh.ndim
                    full = DTensor.from_local(saved[0][name], p.device_mesh, everywhere)
                    with torch.no_grad():
                        p.copy_(full.redistribute(placements=p.placements))
                opt.load_state_dict(saved[1])
            for step in range(first, last):
                loss_of(model, batch(step, 0)).backward()  # the same on all ranks
                pair.step()
            opt.synchronize()
            # Of other ranks torch's is empty where it goes to the CPU.
            return get_state_dict(model, opt, options=whole)

    straight, _ = trained("tp+fsdp", 0, 3)
    saved = trained("tp+fsdp", 0, 2)
    for layout, tolerance in [("tp+fsdp", 0.0), ("fsdp4", 1e-5)]:
        assert_close(trained(layout, 2, 3, saved)[0], straight, tolerance)


# ---- models ------------------------------------------------------------------------------


@distributed(2)
def test_two_models_in_one_optimizer_are_told_apart(rank, world):
    with (
        both(layout="fsdp2", alone=True) as first,
        both(layout="fsdp2", seed=1, alone=True) as second,
    ):
        pairs = first, second
        owns = [dmuon.dedicate_params(pair.model) for pair in pairs]
        both_of = [*first.model.parameters(), *second.model.parameters()]
        opt = dmuon.Muon(both_of, **MUON)
        for pair in pairs:
            pair.backward(0)
        if rank == 0:
            first.model.blocks[0].mlp.up.weight.grad.to_local().fill_(math.nan)
        before = {n: whole_tensor(p).clone() for n, p in first.model.named_parameters()}
        opt.step()
        stats = opt.stats()
        assert stats["finite"] is False and stats["skipped"] == 1
        matrices = len(owns[0].plan.specs.matrices)
        assert len(stats["update_rms"]) == matrices  # of the second; the first was skipped
        after = {n: whole_tensor(p) for n, p in first.model.named_parameters()}
        assert_bitwise(after, before)
        for pair in pairs:
            pair.model.zero_grad()
            pair.backward(1)
        opt.step()
        assert len(opt.stats()["update_rms"]) == 2 * matrices and opt.stats()["finite"]
        for own in owns:
            own.close()
