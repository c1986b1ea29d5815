"""`Muon.step` on one GPU: right, captured, and without a wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_parts import LAYOUTS, Setting, one_process, step_row


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
