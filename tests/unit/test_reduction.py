"""What a round of reduction tells of gradients, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon.comm.reducer as reducer_module
import dmuon.comm.transport
from dmuon.comm.buckets import Slices, gradient_bucket
from dmuon.comm.process_groups import Grid, ProcessGroups
from dmuon.comm.reducer import UNDER_WAY, GradientReducer, OwnedGradients, at_end_of_backward
from dmuon.comm.transport import LocalTransport, Meter, Work
from dmuon.scheduler.plan import units_of
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


def reducer_of(
    model: nn.Module, world: int, transport: LocalTransport | None = None
) -> GradientReducer:
    specs = collect(model)
    plan = plan_of(specs, [0] * len(specs.matrices), 1)
    slices = Slices(plan, Grid((1, world, 1), tuple(range(world))), [None] * len(specs.parameters))
    rest = {p: specs.parameters[p].numel for p in specs.adamw_parameters()}
    members = reversed(range(len(specs.parameters)))
    buckets = [gradient_bucket(slices, [p], rest, 0, None) for p in members]
    groups = ProcessGroups.flat(transport or Alike(world))
    parameters = list(model.parameters())
    owned = OwnedGradients(
        slices, units_of(plan, [0] * len(specs.matrices)), 0, None, torch.device("cpu")
    )
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


class Lagging(LocalTransport):
    """Two ranks alike; the sum is there once someone waits for it, and never by itself."""

    world = 2

    def __init__(self) -> None:
        self.waited: list[bool] = []  # of each wait, whether it held up the stream beside

    def reduce(self, tensor: Tensor, dst: int, *, tag: str) -> Work:
        return self.Work(self, tensor)

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        return super().all_reduce(tensor, tag=tag) if maximum else self.Work(self, tensor)

    class Work:
        def __init__(self, transport: Lagging, tensor: Tensor) -> None:
            self.transport, self.tensor = transport, tensor

        def wait(self) -> None:
            self.transport.waited.append(Beside.inside)
            self.tensor.mul_(2)

        def is_completed(self) -> bool:
            return False


class Beside:
    """A stream of an accelerator that a test looks into."""

    inside = False
    stream = "beside"

    def __init__(self, device: torch.device) -> None:
        self.behind = False  # whether it was given work that the current one did not wait for

    @contextmanager
    def current(self) -> Iterator[None]:
        Beside.inside = self.behind = True
        yield
        Beside.inside = False

    def join(self) -> None:
        self.behind = False


def reduced_in_backward(model: nn.Module) -> GradientReducer:
    """Gradients are taken as soon as they are there."""
    reducer = reducer_of(model, 2, Lagging())

    def accumulated(number: int, _: Tensor) -> None:
        if not reducer.open:
            reducer.begin()
            at_end_of_backward(reducer.finish)
        reducer.accumulated(number)

    for number, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(partial(accumulated, number))
    return reducer


def test_backward_keeps_a_few_buckets_where_none_is_seen_to_arrive(monkeypatch):
    recorded: list[int] = []
    monkeypatch.setattr(reducer_module, "side_stream", Beside)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda t, s: recorded.append(t.untyped_storage().nbytes())
    )
    width, layers = 16, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    reducer = reduced_in_backward(model)
    bucket, alive = 4 * width * width, []

    def count(_: Tensor) -> None:
        buffers = [flight.buffer for live in reducer._buckets for flight in live.flights]
        alive.append(sum(buffer.flat.untyped_storage().nbytes() for buffer in buffers))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    for rounds in (1, 2):  # the second adds to the first
        alive.clear()
        model(torch.randn(3, width)).sum().backward()
        assert max(alive) == UNDER_WAY * bucket
        reducer.ensure(lambda: None)
        assert not reducer._side.behind
        late = [*[True] * (layers - UNDER_WAY), *[False] * UNDER_WAY]
        assert reducer._groups.data.waited == late * rounds
        assert recorded == [bucket] * (layers - UNDER_WAY) * rounds


def test_what_is_collected_beside_is_what_is_collected_at_the_end(monkeypatch):
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: None)
    found = []
    for stream in (Beside, lambda device: None):
        monkeypatch.setattr(reducer_module, "side_stream", stream)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
        reducer = reduced_in_backward(model)
        for _ in range(2):
            model(torch.randn(3, 6)).square().sum().backward()
            model(torch.randn(3, 6)).square().sum().backward()
            reducer.ensure(lambda: None)
            found.append([g.clone() for g in reducer.owned.collected(reducer.present)])
            reducer.clear()
    assert len(found[0]) == 9 and any(g.any() for g in found[0])
    for beside, at_the_end in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, beside, at_the_end))
