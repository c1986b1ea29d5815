"""Equal values on all ranks to start from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dmuon.comm.transport import Transport
from dmuon.dtensors import local_tensor

__all__ = ["start_from_first"]


@torch.no_grad()
def start_from_first(tensors: Iterable[tuple[Tensor, Transport]]) -> None:
    """Give every rank the first one's values, as DDP does: (tensor, the ranks to share it).

    Of a `DTensor` the part that is stored here is shared.
    """
    works = []
    for tensor, lane in tensors:
        data = local_tensor(tensor)
        whole = data if data.is_contiguous() else data.contiguous()
        works.append((lane.broadcast(whole, 0, tag="initial weights"), data, whole))
    for work, data, whole in works:
        work.wait()
        if whole is not data:
            data.copy_(whole)
