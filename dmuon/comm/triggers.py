"""What starts and ends a round of gradient reduction: hooks of autograd, or DDP's buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.reduction import GradientReducer
from dmuon.comm.routes import Window
from dmuon.types import OwnershipError

__all__ = ["at_end_of_backward", "hook_ddp", "hook_parameters"]

Remove = Callable[[], None]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    # The engine's own queue: there is no public name for "when this backward is done", and FSDP2
    # uses the same one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _end(reducer: GradientReducer) -> Callable[[], None]:
    def end() -> None:
        # Nested backward calls (re-entrant checkpointing) each end once; the round may be over.
        if reducer.open:
            reducer.finish()

    return end


def hook_parameters(
    reducer: GradientReducer, parameters: Sequence[nn.Parameter], before_round: Callable[[], None]
) -> list[Remove]:
    """A plain module: each gradient is taken as soon as it has been accumulated."""
    # The engine keeps hooks where the garbage collector does not look; a strong reference back to
    # the parameters would keep all of them for ever.
    weak_reducer, weak_before = weakref.ref(reducer), weakref.WeakMethod(before_round)

    def make(index: int) -> Callable[[Tensor], None]:
        def on_gradient(p: Tensor) -> None:
            reducer, before = weak_reducer(), weak_before()
            if reducer is None or before is None or not reducer.sync:
                return
            if not reducer.open:
                before()
                reducer.begin()
                at_end_of_backward(_end(reducer))
            reducer.take(index, p.grad)
            if reducer.is_matrix[index]:
                p.grad = None  # packed: its memory is free for the rest of backward
            reducer.launch_ready()

        return on_gradient

    return [p.register_post_accumulate_grad_hook(make(i)).remove for i, p in enumerate(parameters)]


class _DDPHook:
    """The one communication hook that a `DistributedDataParallel` can ever get.

    ``on_bucket`` comes and goes with ownerships; without one it does what DDP does by default.
    """

    def __init__(self) -> None:
        self.on_bucket: Callable[[Any], None] | None = None

    def run(self, group: ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
        if self.on_bucket is None:
            return allreduce_hook(group, bucket)
        self.on_bucket(bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


_hook_of_ddp: weakref.WeakKeyDictionary[DistributedDataParallel, _DDPHook] = (
    weakref.WeakKeyDictionary()
)


def _ddp_hook(ddp: DistributedDataParallel) -> _DDPHook:
    hook = _hook_of_ddp.get(ddp)
    if hook is None:
        hook = _DDPHook()
        try:
            # No annotations: DDP compares them with types, and ours are strings.
            ddp.register_comm_hook(ddp.process_group, lambda group, bucket: hook.run(group, bucket))
        except RuntimeError as error:
            raise OwnershipError(
                "DistributedDataParallel did not accept dmuon's communication hook; it takes one "
                f"only, so do not register another ({error})"
            ) from error
        _hook_of_ddp[ddp] = hook
    return hook


def hook_ddp(
    reducer: GradientReducer,
    ddp: DistributedDataParallel,
    parameters: Sequence[nn.Parameter],
    before_round: Callable[[], None],
    make_window: Callable[[Sequence[int]], Window],
) -> list[Remove]:
    """DDP: its buckets are the windows, and what is in them is taken from there."""
    end = _end(reducer)
    index_of = {id(p): i for i, p in enumerate(parameters)}

    def on_bucket(bucket: Any) -> None:
        if bucket.index() == 0:
            before_round()
            reducer.begin([])
        members = [index_of[id(p)] for p in bucket.parameters()]
        reducer.add_window(make_window(members))
        for index, p, grad in zip(members, bucket.parameters(), bucket.gradients(), strict=True):
            reducer.take(index, None if p.grad is None else grad)
        reducer.launch_ready()
        if bucket.is_last():
            # DDP queues its own end (it writes p.grad) right after this hook returns; ours must
            # come after that one, hence the second turn in the queue.
            at_end_of_backward(lambda: at_end_of_backward(end))

    hook = _ddp_hook(ddp)
    hook.on_bucket = on_bucket

    def remove() -> None:
        hook.on_bucket = None

    return [remove]
