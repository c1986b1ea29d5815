"""Every test starts from the same seed and runs on one thread.

The matrices are too small to gain from more threads, and lose much on a busy machine. Nothing is
measured but by tests of measuring.
"""

from __future__ import annotations

import torch

from tests.fixed_costs import costs_without_a_clock  # noqa: F401


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
