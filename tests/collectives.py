"""The collectives that three steps of one process issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_parts import Setting, step_row

ISSUED: Mapping[str, Mapping[str, int]] = {
    "sharded": {"alltoall_base_": 12, "broadcast_": 2},
    "dedicated": {"alltoall_base_": 9, "broadcast_": 127, "reduce_": 9},
    "replicated": {"alltoall_base_": 6, "broadcast_": 26},
}
"""By layout: of three steps beside the reference, planning included, on whatever device. In the
`sharded` layout matrices travel."""


class _Counting(TorchDispatchMode):
    """`CommDebugMode` follows modules too, and loses its way in backward hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        self.counts[name] += namespace == "c10d"
        return func(*args, **(kwargs or {}))


def issued(layout: str, device: torch.device) -> tuple[dict[str, Any], dict[str, int]]:
    """(the row of the steps, how often each collective of `ISSUED` was called)."""
    setting = Setting(layout, "torch", travels=layout == "sharded")
    with _Counting() as mode:
        row = step_row(setting, device, 3, toy=True)
    return row, {name: mode.counts[name] for name in ISSUED[layout]}
