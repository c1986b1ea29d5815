"""What a round of reduction tells of gradients, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon.comm.reducer as reducer_module
from dmuon import devices
from dmuon.comm.reducer import UNDER_WAY, GradientReducer
from dmuon.comm.transport import Transport, Work
from dmuon.types import DmuonError
from tests.accelerator import Pretended
from tests.unit.models import reduced_in_backward, reducer_of


class Alike(Transport):
    """As many ranks as you like that hand in the same; sums are what a dtype makes of them."""

    def __init__(self, world: int) -> None:
        self.world = world

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        parts[0].mul_(self.world)
        return super().reduce_scatter(parts, tag=tag)

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


@pytest.fixture(params=[1, 2, 255, 256, 2**16])
def reducer(request) -> GradientReducer:
    return reducer_of(Table(), Alike(request.param))


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
    monkeypatch.setitem(devices.TYPES, "cpu", Pretended)
    backward(reducer, sparse=True)
    reducer.ensure(lambda: None)
    assert reducer.parameters[0].grad is None  # counts as missing
    reducer.clear()
    backward(reducer)
    with pytest.raises(DmuonError, match=r"'table'.*not dense.*before the last step"):
        reducer.ensure(lambda: None)
    reducer.clear()
    reducer.ensure(lambda: None)  # told once


class Lagging(Transport):
    """Two equal ranks; a sum is there only once someone waits for it."""

    world = 2

    def __init__(self) -> None:
        self.waited: list[bool] = []  # for each wait, whether it was on the side stream

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        return self.Work(self, parts[0])

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
    """A side stream that records its use."""

    inside = False
    stream = "beside"

    def __init__(self, device: torch.device) -> None:
        self.behind = False  # whether it has work that the current stream has not waited for

    @contextmanager
    def current(self) -> Iterator[None]:
        Beside.inside = self.behind = True
        try:
            yield
        finally:
            Beside.inside = False

    def join(self) -> None:
        self.behind = False


@pytest.fixture
def recorded(monkeypatch) -> list[int]:
    """Bytes of the storages that were marked as used by the side stream, which is a `Beside`."""
    found: list[int] = []

    def record_stream(tensor: Tensor, stream: str) -> None:
        assert stream == Beside.stream
        found.append(tensor.untyped_storage().nbytes())

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    monkeypatch.setattr(reducer_module, "side_stream", Beside)
    return found


def test_backward_keeps_a_few_buckets_where_none_is_seen_to_arrive(recorded):
    width, layers = 16, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    transport = Lagging()
    reducer = reduced_in_backward(model, transport)
    bucket, alive = 4 * width * width, []
    assert recorded == [bucket] * layers  # what is collected in
    recorded.clear()

    def count(_: Tensor) -> None:
        buffers = [live.buffer for bucket in reducer._buckets for live in bucket.segments]
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
        assert transport.waited == late * rounds
        assert recorded == [bucket] * (layers - UNDER_WAY) * rounds


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_collected_on_a_side_stream_is_what_is_collected_at_the_end(
    monkeypatch, recorded, replicas
):
    """With replicas the sums of a column are not ready before the end."""
    found = []
    for has_stream in (True, False):
        if not has_stream:
            monkeypatch.setattr(reducer_module, "side_stream", lambda device: None)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
        transport = Lagging()
        reducer = reduced_in_backward(model, transport, replicas)
        for _ in range(2):
            model(torch.randn(3, 6)).square().sum().backward()
            model(torch.randn(3, 6)).square().sum().backward()
            reducer.ensure(lambda: None)
            found.append([g.clone() for g in reducer.owned.collected(reducer.present).values()])
            reducer.clear()
        assert any(transport.waited) == (has_stream and replicas == 1)
    assert len(found[0]) == 9 and any(g.any() for g in found[0])
    for beside, at_the_end in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, beside, at_the_end))
