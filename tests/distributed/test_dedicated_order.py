"""The order of collectives in the `dedicated` layout, what overlaps with what, and memory."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import IN_TWO
from tests.distributed.models import Net
from tests.distributed.twins import both
from tests.internals import Work
from tests.transports import Clock, ClockTransport, Event, RecordingTransport


class Mark(torch.autograd.Function):
    """Tells when forward and backward pass by."""

    @staticmethod
    def forward(ctx, x, tell, name):
        ctx.tell, ctx.name = tell, name
        tell("forward", name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.tell("backward", ctx.name)
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, index: int, rows: int, cols: int) -> None:
        super().__init__()
        self.index, self.tell = index, lambda phase, index: None
        self.linear = nn.Linear(rows, cols, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Mark.apply(self.linear(x), self.tell, self.index).tanh()


class Chain(nn.Module):
    """Layers of these widths, which tell when they are passed."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths
        sizes = enumerate(pairwise(widths))
        self.layers = nn.ModuleList(Layer(i, *size) for i, size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def telling(self, tell) -> None:
        for layer in self.layers:
            layer.tell = tell


CHAIN = partial(Chain, 8, 12, 20, 6)  # every layer has its own size


def a_step(pair) -> None:
    x = torch.randn(5, pair.model.widths[0], requires_grad=True)
    pair.model(x).square().mean().backward()
    pair.opt.step()
    pair.opt.zero_grad()


def line(entry: Event | str) -> str:
    if isinstance(entry, str):
        return entry
    peer = "" if entry.peer is None else f" {entry.peer}".replace(",)", ")")
    return f"{entry.op}{peer}: {entry.tag}, {entry.nbytes} bytes"


def events_of_a_step(**kwargs) -> list[str]:
    """The second step of the chain, as every rank sees it: collectives and marks."""
    kwargs |= {"transport": RecordingTransport, "request": {"solver": "round_robin"}}
    with both(CHAIN, **kwargs) as pair:
        a_step(pair)
        pair.events.clear()
        pair.model.telling(lambda phase, name: pair.events.append(f"{phase} of {name}"))
        a_step(pair)
        return [line(event) for event in pair.events]


# Owners by round robin: layer 0 and 2 at rank 0, layer 1 at rank 1. Layers of 8 x 12, 12 x 20 and
# 20 x 6 elements of 4 bytes. The first two all-gathers left at the end of the step before.
GOLDEN = """
forward of 0
all_gather (0): forward layers.2, 480 bytes
forward of 1
forward of 2
all_gather (0): backward layers.2, 480 bytes
all_gather (1): backward layers.1, 960 bytes
backward of 2
reduce_scatter (0): gradients, 480 bytes
all_gather (0): backward layers.0, 384 bytes
backward of 1
reduce_scatter (1): gradients, 960 bytes
backward of 0
reduce_scatter (0): gradients, 384 bytes
all_reduce: flags, 6 bytes
all_reduce: verdict, 104 bytes
all_gather (0): forward layers.0, 384 bytes
all_gather (1): forward layers.1, 960 bytes
""".strip().splitlines()


@distributed(2)
def test_the_events_of_one_step(rank, world):
    """Kept weights are not sent again for backward."""
    assert events_of_a_step() == GOLDEN
    assert events_of_a_step(layout="dedicated kept") == [
        e for e in GOLDEN if "backward layers" not in e
    ]


@distributed(4)
def test_the_events_of_one_step_with_replicas(rank, world):
    everyone = gathered(events_of_a_step(mesh=(2, 2), options={"prefetch": 0}))
    # Owners in the order of the diagonal: layer 0 at rank 0, 1 at rank 3, 2 at rank 1 or 2.
    for replica in (everyone[:2], everyone[2:]):
        inside = [[e for e in events if e.startswith("all_gather")] for events in replica]
        assert inside[0] == inside[1]
    for column in (everyone[::2], everyone[1::2]):
        across = [[e for e in events if "publish" in e or "across" in e] for events in column]
        assert across[0] == across[1]
    matrices = sum(e.startswith("broadcast") and "publish" in e for e in everyone[0] + everyone[1])
    assert matrices == 3  # each is published in one column
    reduced = sum("gradients across replicas" in e for e in everyone[0] + everyone[1])
    assert reduced == 3


@distributed(4)
def test_slices_travel_once_to_the_owner_and_back(rank, world):
    """The bytes of a step, for 8 matrices of which 6 are cut in two."""
    with both(Net, IN_TWO, transport=RecordingTransport) as pair:
        for step in range(2):
            pair.events.clear()
            pair.backward(step)
            pair.opt.step()
        sent = {"gather": 0, "scatter": 0, "updates": 0}
        for event in pair.events:
            if event.tag in sent:
                sent[event.tag] += event.nbytes
        total = torch.tensor(list(sent.values()))
        dist.all_reduce(total)
        cut = 6 * 24 * 56 * 4
        whole_ones = (18 + 24) * 24 * 4  # `mid`, and `spare` even without a gradient
        # A broadcast is an event of both ranks.
        assert total.tolist() == [cut // 2, cut // 2, 2 * whole_ones]
        everywhere = [e.tag for e in pair.events if "publish" in e.tag or "across" in e.tag]
        assert everywhere == []  # one replica only


@distributed(2)
def test_broadcasts_and_reductions_hide_behind_computing(rank, world):
    """Of eleven delayed collectives a step, three are on the critical path.

    These are the last layer of forward sent again for backward, the reduction of layer 0
    with the flags beside it, and the verdict. What the next forward pass needs first left with the
    step before.
    Without prefetching four more are waited for, two in each pass.
    """

    def waited(**options) -> float:
        """In delays; a layer computes a little longer than one, and so does loading data."""
        clock = Clock()
        slow = partial(ClockTransport, clock=clock, delay_s=1.0)

        def compute(phase: str, name: int) -> None:
            clock.now += 1.25

        with both(
            CHAIN, transport=slow, options=options, request={"solver": "round_robin"}
        ) as pair:
            pair.model.telling(compute)
            for _ in range(3):
                compute("loading data", 0)
                begin = clock.now
                a_step(pair)
            return clock.now - begin - 6 * 1.25

    assert waited() == 3
    assert waited(prefetch=0) == 7


WIDE = partial(Chain, *[96] * 9)  # large matrices and hardly any activations
MATRIX = 4 * 96 * 96


def tensors() -> list[Tensor]:
    """All that Python sees in this process."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]


def live_bytes(others: list[Tensor]) -> int:
    """Bytes of all storages, each once, but those of ``others``."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
    for t in others:
        found.pop(t.untyped_storage().data_ptr(), None)
    return sum(found.values())


@dataclass
class PromptWork:
    inner: Work

    def wait(self):
        self.inner.wait()

    def is_completed(self):
        self.inner.wait()
        return True


class Prompt(RecordingTransport):
    """Every collective is completed when somebody asks, so that memory does not depend on time."""

    def wrapped(self, work, tag):
        return PromptWork(work)


def memory_of_a_step(layout, prefetch, after=1) -> tuple[dict[str, list[float]], list[bool]]:
    """What is alive at each layer of a step ``after`` others, in matrices; who is stored here."""
    others, options = tensors(), {"prefetch": prefetch}
    with both(WIDE, layout, options=options, transport=Prompt) as pair:
        pair.twin = pair.ref = None
        stored = [p.numel() > 0 for p in pair.model.parameters()]
        for _ in range(after):
            a_step(pair)
        alive = {"start": [], "forward": [], "backward": [], "end": []}

        def look(phase: str, index: int = 0) -> None:
            alive[phase].append(live_bytes(others) / MATRIX)

        look("start")
        pair.model.telling(look)
        a_step(pair)
        look("end")
        return alive, stored


ACTIVATIONS = 0.5  # and other small things, in matrices


@distributed(2)
def test_memory_of_the_passes(rank, world):
    """Beside what is stored: the weights in use and those fetched ahead, and the gradients of one
    or two layers."""
    base = None
    for prefetch in (0, 1, 2):
        alive, stored = memory_of_a_step("dedicated", prefetch)
        ahead = stored[: prefetch + 1].count(False)
        base = alive["start"][0] - ahead if base is None else base
        for between in (*alive["start"], *alive["end"]):
            assert abs(between - base - ahead) < 0.1, "launched ahead for the next forward pass"
        assert 0 < sum(stored) < 8
        assert 0.9 < max(alive["forward"]) - base < prefetch + 1 + ACTIVATIONS
        assert 0.9 < max(alive["backward"]) - base < prefetch + 3 + ACTIVATIONS
    # In the first step, where what is never freed is not there from the start.
    alive, stored = memory_of_a_step("dedicated kept", 0, after=0)
    (base,) = alive["start"]
    assert abs(alive["forward"][-1] - base - stored.count(False)) < ACTIVATIONS, "all are kept"
    assert alive["backward"][-1] - base < 1 + ACTIVATIONS, "sent gradients are freed"


@distributed(2)
def test_no_growth_over_many_steps(rank, world):
    with both(partial(Chain, 16, 16, 16)) as pair:
        others, sizes = tensors(), []
        for step in range(60):
            a_step(pair)
            if step in (20, 59):
                sizes.append((live_bytes(others), set(pair.opt.stats()["bytes"])))
        (before, tags), (after, tags_after) = sizes
        for _ in range(100):  # a thread of gloo's may still hold what it has sent
            if after <= before:
                break
            time.sleep(0.01)
            after = live_bytes(others)
        assert after <= before, (before, after)
        assert tags_after == tags
