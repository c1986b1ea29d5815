"""`Muon.step` on one GPU: right, captured, and without a wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_parts import LAYOUTS, Setting, one_process, step_row
from dmuon.comm.buckets import Buffer
from dmuon.comm.transport import side_stream


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


def test_memory_released_beside_the_current_stream_is_not_used_before_its_transfer_ends() -> None:
    """As gradients are collected in backward; a slow stream stands for the transfers."""
    device = torch.device("cuda", torch.cuda.current_device())
    side, transfers = side_stream(device), torch.Stream(device)
    assert side is not None
    slow, total = torch.randn(4096, 4096, device=device), torch.zeros(1 << 22, device=device)
    for _ in range(20):
        buffer = Buffer(torch.ones(1 << 22, device=device))
        transfers.wait_stream(torch.accelerator.current_stream())
        with transfers:
            for _ in range(5):
                torch.mm(slow, slow)
            buffer.flat.mul_(2)
        arrived = transfers.record_event()
        buffer.flat.record_stream(side.stream)
        with side.current():
            side.stream.wait_event(arrived)
            total.add_(buffer.flat)
            buffer.release()
        torch.full_like(total, 7.0)  # would take the memory
    side.join()
    assert (total == 40).all()
