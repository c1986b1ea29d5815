"""What a round of reduction tells of gradients, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import dmuon.comm.reducer as reducer_module
from dmuon.comm.reducer import UNDER_WAY, RoundState
from dmuon.comm.transport import Transport, Work
from tests.unit.models import reduced_in_backward, reducer_of


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


def test_a_round_that_is_owed_is_made():
    model = nn.Linear(3, 2)
    reducer = reducer_of(model, Transport())
    model(torch.ones(1, 3)).sum().backward()
    reducer.begin()
    with pytest.raises(RuntimeError, match="OPEN to NONE, only to DONE, OPEN_OWED"):
        reducer.state.to(RoundState.NONE)
    reducer.set_sync(False)
    reducer.set_sync(True)
    reducer.finish()
    assert reducer.state is RoundState.OWED, "what was accumulated meanwhile is still to be reduced"
    reducer.ensure(lambda: None)
    assert (reducer.state, reducer.rounds) == (RoundState.DONE, 2)
    reducer.clear()
    assert (reducer.state, reducer.rounds) == (RoundState.NONE, 0)
