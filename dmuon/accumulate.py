"""`no_sync`: backward passes whose gradients stay local for now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmuon.ownership import required_ownerships

__all__ = ["no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward only accumulates gradients locally.

    The first backward after it (or `step`, or `clip_grad_norm_`) reduces what has accumulated, as
    with `DistributedDataParallel.no_sync`, which is used for a wrapped model. On FSDP2 this is
    ``set_requires_gradient_sync(False)``, and only a backward reduces: let the last one of a step
    run outside.

    Raises:
        OwnershipError: the model is not dedicated, or has no `dmuon.Muon` yet.
    """
    runtimes = [o.runtime for o in required_ownerships(model, "dmuon.no_sync")]
    previous = [runtime.set_sync(False) for runtime in runtimes]
    try:
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            yield
    finally:
        for runtime, sync in zip(runtimes, previous, strict=True):
            runtime.set_sync(sync)
