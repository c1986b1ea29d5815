"""World 1 reaches NCCL: which collectives a few steps issue, and that the steps are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_parts import one_process
from tests.collectives import ISSUED, issued


@pytest.mark.parametrize("layout", ISSUED)
def test_steps_issue_the_collectives_of_a_cpu_over_nccl(layout: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with one_process(device):
        assert dist.get_backend() == "nccl"
        row, counts = issued(layout, device)
    assert row["passed"], row
    assert counts == ISSUED[layout]
