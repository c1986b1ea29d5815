"""What a round of reduction tells of gradients, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon.comm.transport
from dmuon.comm.buckets import Slices, gradient_bucket
from dmuon.comm.process_groups import Grid, ProcessGroups
from dmuon.comm.reducer import GradientReducer, OwnedGradients
from dmuon.comm.transport import LocalTransport, Meter, Work
from dmuon.scheduler.select import collect
from dmuon.types import DmuonError
from tests.unit.models import plan_of


class Alike(LocalTransport):
    """As many ranks as you like that hand in the same; sums are what a dtype makes of them."""

    def __init__(self, world: int) -> None:
        self.world = world

    def reduce(self, tensor: Tensor, dst: int, *, tag: str) -> Work:
        tensor.mul_(self.world)
        return super().reduce(tensor, dst, tag=tag)

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        if not maximum:
            tensor.mul_(self.world)
        return super().all_reduce(tensor, tag=tag)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 6))
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(5))
        self.spare = nn.Parameter(torch.randn(4, 6))


def reducer_of(model: nn.Module, world: int) -> GradientReducer:
    specs = collect(model)
    plan = plan_of(specs, [0] * len(specs.matrices), 1)
    slices = Slices(plan, Grid((1, world, 1), tuple(range(world))), [None] * len(specs.parameters))
    rest = {p: specs.parameters[p].numel for p in specs.adamw_parameters()}
    members = reversed(range(len(specs.parameters)))
    buckets = [gradient_bucket(slices, [p], rest, 0, None) for p in members]
    groups = ProcessGroups.flat(Alike(world))
    parameters = list(model.parameters())
    owned = OwnedGradients(slices, (), 0, None, torch.device("cpu"))
    return GradientReducer(slices, parameters, groups, Meter(), buckets, owned)


@pytest.fixture(params=[1, 2, 255, 256, 2**16])
def reducer(request) -> GradientReducer:
    return reducer_of(Table(), request.param)


def backward(reducer: GradientReducer, *, sparse: bool = False) -> None:
    table, weight, bias, _ = reducer.parameters
    F.linear(F.embedding(torch.arange(4), table, sparse=sparse), weight, bias).sum().backward()


def test_every_rank_has_a_gradient_or_none_has(reducer):
    backward(reducer)
    reducer.ensure(lambda: None)
    assert reducer.present == [True, True, True, False]


def test_a_sparse_gradient_on_every_rank_is_never_taken_for_none(reducer):
    backward(reducer, sparse=True)
    with pytest.raises(DmuonError, match=r"'table'.*dense.*sparse=False"):
        reducer.ensure(lambda: None)


def test_where_no_host_can_read_it_is_raised_at_the_next_step(reducer, monkeypatch):
    monkeypatch.setattr(dmuon.comm.transport, "READ_AT_ONCE", frozenset())
    backward(reducer, sparse=True)
    reducer.ensure(lambda: None)
    assert reducer.parameters[0].grad is None  # counts as missing
    reducer.clear()
    backward(reducer)
    with pytest.raises(DmuonError, match=r"'table'.*not dense.*before the last step"):
        reducer.ensure(lambda: None)
    reducer.clear()
    reducer.ensure(lambda: None)  # told once
