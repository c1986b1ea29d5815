"""`Muon.step` on one GPU: right, captured, and without a wait for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_parts import LAYOUTS, Setting, one_process, step_row
from tests.internals import SideStream, Transport, Work
from tests.unit.models import reduced_in_backward


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with one_process(torch.device("cuda", torch.cuda.current_device())):
        yield


# Some steps run eagerly, one is captured, the others are replayed.
SETTINGS = [
    *(
        Setting(layout, "torch", graphs, "float16")
        for layout in LAYOUTS
        for graphs in (False, True)
    ),
    *(Setting(layout, "triton", True, "float16") for layout in LAYOUTS),
    *(Setting("sharded", "torch", graphs, "float16", travels=True) for graphs in (False, True)),
    Setting("sharded", "triton", True, "float16", travels=True, period=2),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_step_is_right_and_never_waits_for_the_device(setting: Setting) -> None:
    """`step` runs under ``torch.cuda.set_sync_debug_mode("error")``: a wait raises."""
    device = torch.device("cuda", torch.cuda.current_device())
    row = step_row(setting, device, may_wait=False)
    assert row["passed"], row


class Slow(Transport):
    """Two equal ranks; sums arrive late, on a stream that stands in for the transfers."""

    world = 2

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._work = torch.randn(4096, 4096, device=device)

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        return self.all_reduce(parts[self.rank], tag=tag)

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            for _ in range(5):
                torch.mm(self._work, self._work)
            tensor.mul_(1 if maximum else 2)
        return SlowWork(self._stream.record_event())


@dataclass
class SlowWork(Work):
    event: torch.Event

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        return False


def test_gradients_collected_on_a_side_stream_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    for stream in (SideStream, lambda device: None):
        monkeypatch.setattr("dmuon.comm.reducer.side_stream", stream)
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512, bias=False, device=device) for _ in range(20)]
        model = nn.Sequential(*layers)
        reducer = reduced_in_backward(model, Slow(device))
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(64, 512, device=device)).square().sum().backward()
            reducer.ensure(lambda: None)
            found.append([g.clone() for g in reducer.owned.collected(reducer.present).values()])
            reducer.clear()
    for beside, at_the_end in zip(found[:3], found[3:]):
        assert len(beside) == 20 and all(map(torch.equal, beside, at_the_end))
