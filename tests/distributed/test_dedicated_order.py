"""The order of collectives in the `dedicated` layout, what overlaps with what, and memory."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from dmuon.config import DedicatedOptions
from tests.distributed.dedicated import MUON, mesh_of, recorded
from tests.distributed.harness import distributed
from tests.transports import DelayingTransport, Event

WIDTHS = (8, 12, 20, 6)  # of the layers' inputs and the last output: every layer has its own size


class Mark(torch.autograd.Function):
    """Notes when forward and backward pass by."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(f"forward of {name}")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(f"backward of {ctx.name}")
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, index: int, log: list) -> None:
        super().__init__()
        self.index, self.log = index, log
        self.linear = nn.Linear(WIDTHS[index], WIDTHS[index + 1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Mark.apply(self.linear(x), self.log, self.index).tanh()


class Chain(nn.Module):
    def __init__(self, log: list) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, log) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain(log: list) -> Chain:
    torch.manual_seed(0)
    return Chain(log)


def line(entry: Event | str) -> str:
    if isinstance(entry, str):
        return entry
    peer = "" if entry.peer is None else f" {entry.peer}"
    return f"{entry.op}{peer}: {entry.tag}, {entry.nbytes} bytes"


def one_step(world: int, options: DedicatedOptions, mesh=None, rank: int = 0) -> list[str]:
    """The second step of the chain, as every rank sees it: collectives and marks."""
    log: list = []
    model = chain(log)
    own, events = recorded(model, mesh, options=options, solver="round_robin")
    opt = dmuon.Muon(model, **MUON)
    for step in range(2):
        if step:
            log.clear()
            events.clear()
            log_to(events, model)
        x = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(17 * step + rank))
        model(x).square().mean().backward()
        opt.step()
    found = [line(e) for e in events]
    own.close()
    return found


def log_to(events: list, model: nn.Module) -> None:
    """Marks and collectives in one list, in the order in which they happen."""
    for layer in model.layers:
        layer.log = events


# Owners by round robin: layer 0 and 2 at rank 0, layer 1 at rank 1. Layers of 8 x 12, 12 x 20 and
# 20 x 6 elements of 4 bytes. The first two broadcasts left at the end of the step before.
GOLDEN = """
forward of 0
broadcast 0: forward layers.2, 480 bytes
forward of 1
forward of 2
broadcast 0: backward layers.2, 480 bytes
broadcast 1: backward layers.1, 960 bytes
backward of 2
reduce 0: gradients, 480 bytes
broadcast 0: backward layers.0, 384 bytes
backward of 1
reduce 1: gradients, 960 bytes
backward of 0
reduce 0: gradients, 384 bytes
all_reduce: flags, 6 bytes
broadcast 0: forward layers.0, 384 bytes
broadcast 1: forward layers.1, 960 bytes
""".strip().splitlines()


@distributed(2)
def test_the_events_of_one_step(rank, world):
    assert one_step(world, DedicatedOptions(), rank=rank) == GOLDEN


KEPT = [e for e in GOLDEN if "backward layers" not in e]


@distributed(2)
def test_kept_weights_are_not_sent_again_for_backward(rank, world):
    assert one_step(world, DedicatedOptions(free_after_forward=False), rank=rank) == KEPT


@distributed(4)
def test_the_events_of_one_step_with_replicas(rank, world):
    mesh = mesh_of((2, 2))
    found = one_step(world, DedicatedOptions(prefetch=0), mesh, rank)
    everyone: list = [None] * world
    dist.all_gather_object(everyone, found)
    # Owners in the order of the diagonal: layer 0 at rank 0, 1 at rank 3, 2 at rank 1 or 2.
    for replica in (everyone[:2], everyone[2:]):
        inside = [[e for e in events if e.startswith("broadcast") and "publish" not in e] for
                  events in replica]  # fmt: skip
        assert inside[0] == inside[1]
    for column in (everyone[::2], everyone[1::2]):
        across = [[e for e in events if "publish" in e or "across" in e] for events in column]
        assert across[0] == across[1]
    matrices = sum(e.startswith("broadcast") and "publish" in e for e in everyone[0] + everyone[1])
    assert matrices == 3  # each is published in one column
    reduced = sum("gradients across replicas" in e for e in everyone[0] + everyone[1])
    assert reduced == 3


def waits(rank: int, world: int, delay: float, options: DedicatedOptions, steps: int = 3) -> float:
    """Seconds of a step whose layers compute for a while, over a slow network."""
    model = chain([])
    wrapper = partial(DelayingTransport, delay_s=delay)
    own, _ = recorded(model, None, wrapper, options=options, solver="round_robin")
    opt = dmuon.Muon(model, **MUON)
    for layer in model.layers:
        layer.register_forward_hook(slow)
    best = float("inf")
    for step in range(steps):
        time.sleep(DELAY_S)  # loading data, while what was launched ahead arrives
        dist.barrier()
        begin = time.perf_counter()
        model(torch.randn(5, WIDTHS[0])).square().mean().backward()
        opt.step()
        if step:
            best = min(best, time.perf_counter() - begin)
    own.close()
    slowest = torch.tensor(best)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


COMPUTE_S, DELAY_S = 0.2, 0.15


class Busy(torch.autograd.Function):
    """Computes for a while, forward and backward, without taking the processor from others."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(COMPUTE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(COMPUTE_S)
        return grad


def slow(module, args, output):
    return Busy.apply(output)


@distributed(2)
def test_broadcasts_and_reductions_hide_behind_computing(rank, world):
    """Of ten delayed collectives a step, three are on the critical path.

    These are the last broadcast of forward sent again for backward, the reduction of layer 0, and
    the flags behind it. What the next forward pass needs first left with the step before. Without
    prefetching four more are waited for, two in each pass. Bounds lie a delay apart from that.
    """
    fast = waits(rank, world, 0.0, DedicatedOptions())
    hidden = waits(rank, world, DELAY_S, DedicatedOptions())
    exposed = waits(rank, world, DELAY_S, DedicatedOptions(prefetch=0))
    assert hidden - fast < 4 * DELAY_S, (fast, hidden, exposed)
    assert exposed - hidden > 2 * DELAY_S, (fast, hidden, exposed)


# ---- memory ------------------------------------------------------------------------------


class Wide(nn.Module):
    """Blocks of one large matrix each, and hardly any activations."""

    def __init__(self, layers: int = 6, width: int = 96) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


MATRIX = 4 * 96 * 96


def buffer_bytes(own) -> int:
    """Bytes that the groups' buffers take now, apart from what is kept here."""
    return sum(
        live.buffer.flat.untyped_storage().nbytes()
        for group in own.runtime.storage.groups
        for live in group.buckets
        if not live.lasting
    )


def live_bytes() -> int:
    """Bytes of all tensors' storages in this process, each once."""
    gc.collect()
    found = {}
    for o in gc.get_objects():
        if type(o) in (Tensor, nn.Parameter):
            storage = o.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@distributed(2)
def test_ranks_that_do_not_own_a_matrix_have_no_byte_of_it_between_steps(rank, world):
    torch.manual_seed(0)
    model = Wide()
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    opt = dmuon.Muon(model, **MUON)
    for name, p in model.named_parameters():
        stored = own.owner_of(name) == rank
        assert p.untyped_storage().nbytes() > 0 if stored else p.untyped_storage().nbytes() == 0
        assert p.shape == ((96, 96) if stored else (0, 96))
        assert own.shape_of(name) == (96, 96) and p.requires_grad
    assert own.numel() == 6 * 96 * 96
    for step in range(3):
        model(torch.randn(2, 96)).square().mean().backward()
        if step == 0:
            assert buffer_bytes(own) == 0  # between backward and step
        opt.step()
        ahead = 2 - sum(own.owner_of(f"blocks.{i}.weight") == rank for i in range(2))
        assert buffer_bytes(own) == ahead * MATRIX  # launched ahead for the next forward pass
    own.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@distributed(2)
def test_peak_memory_of_the_passes(rank, world, prefetch):
    torch.manual_seed(0)
    model = Wide()
    options = DedicatedOptions(prefetch=prefetch)
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated", options=options)
    opt = dmuon.Muon(model, **MUON)
    peaks = {"forward": 0, "backward": 0}

    def look(phase):
        peaks[phase] = max(peaks[phase], buffer_bytes(own))

    for block in model.blocks:
        block.register_forward_hook(lambda *_: look("forward"))
        block.register_forward_pre_hook(lambda *_: look("forward"))
        block.register_full_backward_hook(lambda *_: look("backward"))
    for _ in range(3):  # from the first step on
        model(torch.randn(2, 96, requires_grad=True)).square().mean().backward()
        opt.step()
    assert 0 < peaks["forward"] <= (prefetch + 1) * MATRIX
    assert 0 < peaks["backward"] <= (prefetch + 1) * MATRIX
    own.close()


@distributed(2)
def test_no_growth_over_200_steps(rank, world):
    torch.manual_seed(0)
    model = Wide(layers=2, width=16)
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    opt = dmuon.Muon(model, **MUON)
    sizes = []
    for step in range(200):
        model(torch.randn(2, 16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step in (20, 199):
            sizes.append((live_bytes(), len(own.runtime.meter.bytes)))
    (before, tags), (after, tags_after) = sizes
    assert after <= before  # what other tests have left may go, nothing may come
    assert tags_after == tags
    own.close()


@distributed(2)
def test_a_model_that_nobody_needs_is_freed(rank, world):
    gc.collect()
    model = Wide(layers=2, width=16)
    own = dmuon.dedicate_params(model, mesh_of((world,)), layout="dedicated")
    opt = dmuon.Muon(model, **MUON)
    for _ in range(2):
        model(torch.randn(2, 16)).square().mean().backward()
        opt.step()
    seen = [weakref.ref(model), weakref.ref(own), weakref.ref(model.blocks[0].weight)]
    own.runtime.process_groups.close()
    del model, own, opt
    gc.collect()  # the model, which keeps its ownership
    gc.collect()  # that one
    assert [ref() for ref in seen] == [None, None, None]
