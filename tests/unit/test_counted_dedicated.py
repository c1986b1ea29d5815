"""What a step of the `dedicated` layout sends at the size of Llama-3-8B, counted on fake tensors.

The first of eight ranks plans, and runs forward, backward and `step`; nothing has values, nothing
travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dmuon
from tests.accelerator import host_cannot_read
from tests.fake_cuda import _HostCopy, _Watch, llama
from tests.internals import Given, Request, Transport, assemble
from tests.transports import Event, exchanged
from tests.unit.models import tree

WORLD, LAYERS = 8, 32
BLOCK = sum(shape[0] * shape[1] for shape in llama(1).values() if len(shape) == 2)


class First(Transport):
    """The first of ranks that all say the same; it notes each collective, and calls ``look``."""

    world = WORLD

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.look: Callable[[], None] = lambda: None

    def _note(self, event: Event) -> Any:
        self.events.append(event)
        self.look()
        return super().all_gather([], tag=event.tag)

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Any:
        return self._note(Event("broadcast", tag, tensor.nbytes, src))

    def all_gather(self, parts: Sequence[Tensor], *, tag: str) -> Any:
        return self._note(exchanged("all_gather", parts, tag))

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Any:
        return self._note(exchanged("reduce_scatter", parts, tag))

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world


class Block(nn.Module):
    """Uses each parameter of ``inner`` once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for p in self.inner.parameters():
            used = x.expand(-1, p.shape[-1]) * p if p.ndim == 1 else x.expand(-1, p.shape[1]) @ p.mT
            x = x + used.mean(1, True)
        return x


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = tree(llama(LAYERS)).get_submodule("layers")
        self.layers = nn.ModuleList(Block(layer) for layer in layers.children())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def held(tensors: Sequence[Tensor]) -> int:
    """Bytes of their storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture
def eighth():
    """(model, ownership, optimizer, transport) of the first rank."""
    with ExitStack() as stack:
        stack.enter_context(host_cannot_read())
        for target, attribute, value in (
            # In a set data a fake tensor has no pointer; whose storage it shares is what counts.
            (Tensor, "data_ptr", lambda t: t.untyped_storage()._cdata + t.storage_offset()),
            (dmuon.step.engine, "Stopwatch", _Watch),
            (dmuon.step.verdict, "HostCopy", _HostCopy),
            (dmuon.comm.reducer, "HostCopy", _HostCopy),
            (dmuon.optim, "check_planned_together", lambda *args: None),
        ):
            stack.enter_context(mock.patch.object(target, attribute, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model, transport = Llama(), First()
        request = Request(
            "dedicated", costs="analytic:h100", solver="greedy",
        )  # fmt: skip
        topology = dmuon.scheduler.topology.Topology.flat(WORLD)
        own = assemble(Given(model), request, transport, lambda: topology, lambda _: transport)
        yield model, own, dmuon.Muon(model, lr=1e-3, ns_dtype=torch.float16), transport


def test_a_module_group_travels_in_one_collective_each_way(eighth):
    """32 blocks, forward and backward, and 32 for their gradients, where each of the 224 matrices
    was sent alone: 448 broadcasts and 224 reductions. No byte more, and no more in memory."""
    model, own, opt, transport = eighth
    storage, buckets = own.runtime.storage, own.runtime.reducer._buckets
    assert len(own.plan.specs.matrices) == 7 * LAYERS
    weights = [b.buffer for layer in storage.layers for b in layer.buckets]
    freed = [buffer.flat for buffer in weights if buffer._storage is not None]
    gradients = [live.buffer.flat for bucket in buckets for live in bucket.segments]
    most: Counter[str] = Counter()

    def look() -> None:
        most["weights"] = max(most["weights"], held(freed))
        most["gradients"] = max(most["gradients"], held(gradients))

    for _ in range(2):
        transport.events.clear()
        transport.look = look
        model(torch.ones(4, 1)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    counts = Counter(event.op for event in transport.events)
    assert counts["all_gather"] <= 64 and counts["reduce_scatter"] <= 32, counts
    assert not counts["broadcast"] and not counts["reduce"], counts
    assert counts.total() <= 64 + 32 + 3, counts  # of the others', flags and verdict
    sent = Counter()
    for event in transport.events:
        sent[event.op] += event.nbytes
    assert sent["all_gather"] == 2 * 4 * LAYERS * BLOCK
    assert sent["reduce_scatter"] == 4 * LAYERS * BLOCK
    # prefetch=1: the block that runs and the next one, or a bucket that fills while one leaves.
    assert 4 * BLOCK < most["weights"] <= 2 * 4 * BLOCK
    assert 0 < most["gradients"] <= 2 * 4 * BLOCK
    peers = [event.peer for event in transport.events if event.op == "all_gather"]
    assert set(chain(*peers)) == set(range(WORLD)), "all owners send"
    assert max(map(len, peers)) > 4, "several in one collective"
