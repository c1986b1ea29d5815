"""The built-in parallel models alone: their gradients are those of one process on all data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from dmuon.tools.parallel_models import CASES, DEDICATED_CASES, ParallelModel, batch, loss_of
from tests.distributed.harness import distributed

BY_NAME = {case.name: case for case in CASES}


def names(world):
    return [case.name for case in CASES if case.world == world]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data_rank(case, mesh):
    """Row-major position along the data axes, and how many there are."""
    index, count = 0, 1
    for axis, size, at in zip(case.axes, case.mesh_shape, mesh.get_coordinate(), strict=True):
        if axis in case.data_axes:
            index, count = index * size + at, count * size
    return index, count


def parallel_and_twin(case):
    torch.manual_seed(5)
    model = case.build()
    twin = copy.deepcopy(model)
    mesh = case.make_mesh(torch.get_default_device().type)
    parallel = case.parallelize(model, mesh)
    return parallel, twin, mesh


def compare(name):
    case = BY_NAME[name]
    parallel, twin, mesh = parallel_and_twin(case)
    mine, count = data_rank(case, mesh)
    weights = dict(twin.named_parameters())
    for key, p in parallel.named_parameters():
        assert torch.equal(full(p.detach()), weights[key].detach()), f"weights of {key}"
    for step in range(2):
        loss = loss_of(parallel, batch(step, mine))
        loss.backward()
        losses = [loss_of(twin, batch(step, r)) for r in range(count)]
        (sum(losses) / count).backward()
        assert abs(float(loss) - float(losses[mine])) < 1e-5
        for key, p in parallel.named_parameters():
            expected = weights[key].grad
            difference = float((full(p.grad) - expected).abs().max())
            assert difference <= 1e-5, f"gradient of {key}: {difference}"
            assert float(expected.abs().max()) > 1e-4, f"nothing to compare in {key}"
        parallel.zero_grad()
        twin.zero_grad()


@pytest.mark.parametrize("name", names(2))
@distributed(2)
def test_gradients_on_two_ranks(rank, world, name):
    compare(name)


@pytest.mark.parametrize("name", names(4))
@distributed(4)
def test_gradients_on_four_ranks(rank, world, name):
    compare(name)


@pytest.mark.parametrize("name", names(8))
@distributed(8)
def test_gradients_on_eight_ranks(rank, world, name):
    compare(name)


@distributed(4)
def test_the_kinds_of_shards_that_are_meant_to_occur_do(rank, world):
    block = parallel_and_twin(BY_NAME["tp+fsdp"])[0].blocks[0]
    outer, inner = block.mlp.up.weight.placements
    assert type(outer) is not Shard and outer.dim == 0, "strided"
    assert inner == Shard(0)
    assert block.attention.o_proj.weight.placements == (Shard(0), Shard(1))
    assert block.mix.weight.placements == (Shard(0),)
    narrow = parallel_and_twin(BY_NAME["fsdp4"])[0].blocks[0].narrow.up.weight
    assert narrow.to_local().shape[0] == (1 if rank < 3 else 0)
    for name, local in (("ep+fsdp", (1, 6, 50)), ("ep+fsdp, split experts", (2, 3, 50))):
        experts = parallel_and_twin(BY_NAME[name])[0].blocks[0].mlp.experts
        assert experts.w1.to_local().shape == local


@distributed(2)
def test_what_tensor_parallelism_leaves_alone_is_plain(rank, world):
    model = parallel_and_twin(BY_NAME["tp"])[0]
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert {"tok.weight", "lm_head.weight", "blocks.0.mix.weight"} <= set(plain)
    assert len(plain) < len(list(model.parameters()))


def test_every_case_has_a_test():
    assert {case.world for case in CASES} == {2, 4, 8}
    assert len(BY_NAME) == len(CASES)


def test_what_is_only_for_the_dedicated_layout_leaves_the_gradients_to_it():
    model = ParallelModel(layers=1)
    own = [case for case in DEDICATED_CASES if case not in CASES]
    assert [case.name for case in own] == ["plain", "tp+dp"]
    for case in own:
        assert case.data_parallel(model, None) is model
        assert not any(isinstance(p, DTensor) for p in model.parameters())
