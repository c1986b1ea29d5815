"""Simulation of a training step from a plan and a few rates; nothing is measured here.

A `Run` is the machine: for each class of equal ranks a host and a device that computes, and one
wire inside nodes and one across them. The functions below it are the program that every rank
executes: they issue the same collectives in the same order as `Pipeline.run`, the engines and the
frameworks do. The bytes of each collective come from outside, from the routes in use::

    host      calls ahead of the device, unless it is the device (a CPU)
    device    forward | backward | operands | ... | Newton-Schulz | apply
    inside         all-gathers, reduce-scatters of the framework
    across                                      gather  scatter

A collective begins once all ranks have reached it and its wires are free. It takes the time of its
turns and of the longer level. docs/simulate.md says what is left out, and how large the errors are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, NamedTuple

import numpy as np

from dmuon.scheduler.costs import CostTable, Rates
from dmuon.scheduler.shards import is_back
from dmuon.scheduler.specs import ITEM_SIZE, ModelSpecs, ParameterSpec
from dmuon.scheduler.topology import Topology, layer_of
from dmuon.types import Algorithm, Layout, PlanError

Floats = np.ndarray[Any, np.dtype[np.float64]]
DEVICE, INSIDE, ACROSS = "device", "inside nodes", "across nodes"
_DDP_BUCKET = 25 << 20  # torch's default
_BASE_S, _TURN_S, _HOP_S = 8.4e-6, 3.4e-6, 10.6e-6  # 14 us to another node
_UNLIMITED = 1e15

# Passes over elements: how often they read or write one in the parameter's dtype, and one in
# Newton-Schulz's, on a CPU (foreach) and elsewhere (one kernel for norms, one for momentum and
# operand, one for decay and update); and host calls, as tests/unit/test_counted.py counts them.
# AdamW reads a gradient, and reads and writes a weight and two moments.
Passes = tuple[tuple[int, int], tuple[int, int], int]
_OPERAND: Passes = (4, 2), (5, 1), 40
_COMMIT: Passes = (3, 0), (0, 0), 10
_APPLY: Passes = (4, 1), (2, 1), 3
_COPY: Passes = (0, 2), (0, 2), 1
_ADAMW: Passes = (7, 0), (7, 0), 12
_NORM: Passes = (1, 0), (1, 0), 4
_UNIT_CALLS, _LAYER_CALLS = 3, 60  # per batch of Newton-Schulz (a graph), per layer in forward
_DISPATCH_S = 3e-6  # of the host per call, before it launches: measured with small tensors


# ---- collectives -------------------------------------------------------------------------


class Group(NamedTuple):
    """A number of ``ranks`` that communicate, ``near`` of them on each node."""

    ranks: int
    near: int

    @classmethod
    def along(cls, topology: Topology, axes: Collection[int]) -> Group:
        """Return the first rank's group along these axes of a mesh."""
        grid = np.arange(topology.world).reshape(topology.shape)
        members = grid[tuple(slice(None) if i in axes else 0 for i in range(grid.ndim))]
        nodes = [topology.node(rank) for rank in members.ravel().tolist()]
        return cls(len(nodes), nodes.count(nodes[0]))


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective: consecutive ``turns``, of which ``hops`` go to other nodes; bytes of the
    busiest rank ``inside`` its node and ``across`` nodes (if ranks share a network card, an equal
    part of the busiest node's); and bytes ``sent`` by a rank, averaged over ranks. ``share`` is the
    fraction of the bandwidth across nodes that it reaches."""

    purpose: str
    turns: float
    hops: float
    inside: float
    across: float
    sent: float
    share: float = 1.0

    def __bool__(self) -> bool:
        return self.sent > 0

    def __mul__(self, times: float) -> Exchange:
        inside, across, sent = (times * each for each in (self.inside, self.across, self.sent))
        return replace(self, inside=inside, across=across, sent=sent)


def collective(purpose: str, op: str, nbytes: float, group: Group, *, is_gloo: bool) -> Exchange:
    """Return a collective on a tensor of ``nbytes`` (the result of an all-gather, the operand of a
    reduce-scatter): rings, which leave a node at different ranks, or direct messages.

    On gloo a reduce-scatter is an all-reduce of which each rank keeps its part.

    >>> collective("", "all_gather", 800, Group(4, 1), is_gloo=False)
    Exchange(purpose='', turns=3, hops=3, inside=0.0, across=600.0, sent=600.0, share=1.0)
    """
    n, near = group
    passes = {"all_gather": 1, "all_to_all": 1, "all_reduce": 2, "reduce_scatter": 1 + is_gloo}[op]
    sent = passes * nbytes * (n - 1) / n
    if op == "all_to_all":
        inside = sent * (near - 1) / max(1, n - 1)
        return Exchange(purpose, min(1, n - 1), n > near, inside, sent - inside, sent)
    turns, hops = passes * (n - 1), passes * (n // near - 1)
    if op == "all_reduce" and not is_gloo:  # trees among nodes
        turns, hops = 2 * (near - 1), 2 * math.ceil(math.log2(max(1, n // near)))
    return Exchange(purpose, turns, hops, sent * (near > 1), sent / near * (n > near), sent)


# ---- the machine -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """The ``rates`` of a rank, and the bytes per second that it sends ``inside`` its node and
    ``across`` nodes. A collective takes ``base_s``, and ``hop_s`` per hop to another node beside
    its turns. ``is_cpu``: the host is the device, and the framework (gloo) waits for each
    collective. ``is_shared``: a node has one network card, and ``across`` is a rank's part."""

    rates: Rates
    inside: float
    across: float
    is_cpu: bool
    base_s: float = 0.0
    hop_s: float = 0.0
    is_shared: bool = True

    @classmethod
    def of(cls, costs: CostTable, topology: Topology) -> Machine:
        """Make the machine of a cost table: with measured rates, or with those of its device and
        the latencies that NCCL assumes (src/graph/tuning.cc, rings with the Simple protocol).

        Raises:
            PlanError: the table has no device; or, for a CPU, it has no rates, has rates of one
                process for several ranks, or has no network card for several nodes.
        """
        device, nic = costs.device, costs.source.partition(", nic ")[2]
        is_shared = nic.lower().endswith("node")
        if device is None or (device.fitted and costs.rates is None):
            raise PlanError(
                f"{costs.source} has no rates of forward, backward and collectives: measure them "
                "with torchrun --nproc-per-node N -m dmuon profile --out PATH (N ranks per node)"
            )
        if device.fitted and costs.rates is not None:  # its cores do the transfers inside a node
            if topology.world > 1 and not costs.rates.turn_s + costs.rates.sent_s:
                raise PlanError(
                    f"{costs.source} was measured by one process, and {topology.world} ranks send: "
                    "measure with torchrun --nproc-per-node N -m dmuon profile (N ranks per node)"
                )
            if topology.nodes > 1 and not nic:
                raise PlanError(
                    f"{topology.nodes} nodes of CPUs: give their network card, --nic 1Gb/node"
                )
            network = device.network if nic else _UNLIMITED
            return cls(costs.rates, _UNLIMITED, network, True, is_shared=is_shared)
        bandwidth, call_s = device.bandwidth, _DISPATCH_S + device.launch_s
        found = costs.rates or Rates(device.flops, bandwidth, bandwidth, call_s, _TURN_S, 0.0)
        return cls(found, device.link, device.network, False, _BASE_S, _HOP_S, is_shared)

    def ms(self, exchange: Exchange) -> float:
        latency = exchange.turns * self.rates.turn_s + exchange.hops * self.hop_s
        latency += self.base_s * bool(exchange)
        return 1e3 * (latency + self.wire_s(exchange)) + self.handling_ms(exchange)

    def wire_s(self, exchange: Exchange) -> float:
        return max(exchange.inside / self.inside, exchange.across / self.across / exchange.share)

    def handling_ms(self, exchange: Exchange) -> float:
        """Return the milliseconds of an exchange that a rank's own cores are busy."""
        return 1e3 * exchange.sent * self.rates.sent_s

    def passes_ms(self, nbytes: float | Floats, *, new: bool = False) -> Any:
        """Return the milliseconds of passes over so many bytes, maybe into ``new`` memory."""
        return 1e3 * nbytes / (self.rates.new if new else self.rates.copies)


@dataclass(frozen=True, slots=True)
class Span:
    """Work or a wait of each class's device, or a transfer on a wire; ``begin`` and ``end`` are
    [classes] ms. ``cause`` is the span waited for, ``of`` the class that a transfer waited for."""

    name: str
    kind: str
    on: str
    begin: Floats
    end: Floats
    cause: int = -1
    of: int = 0


class Run:
    """Executes a program; ``spans`` records work, waits and transfers in the order of issue.
    ``late``: by layer, the updates that it waits for in the next forward."""

    def __init__(self, machine: Machine, classes: int) -> None:
        self.machine = machine
        self.now, self.host = np.zeros(classes), np.zeros(classes)
        self.spans: list[Span] = []
        self.late: dict[int, list[int]] = defaultdict(list)
        self._free = {INSIDE: (0.0, -1), ACROSS: (0.0, -1)}  # since when, the last span
        self._handling: dict[int, float] = {}
        self._carried: dict[int, float] = {}  # ms left on the wires, by gloo's collective
        self._carried_until = 0.0

    def _note(self, name: str, kind: str, on: str, begin: Floats, end: Floats, *why: int) -> int:
        self.spans.append(Span(name, kind, on, begin, end, *why))
        return len(self.spans) - 1

    def compute(self, name: str, kind: str, ms: float | Floats, calls: float = 0) -> None:
        """Compute on the device, by so many calls of the host."""
        calling, begin = 1e3 * calls * self.machine.rates.call_s, self.now
        if self.machine.is_cpu:
            self.now = begin + ms + calling
            self._note(name, kind, DEVICE, begin, self.now)
            return
        called = self.host + calling
        start = np.maximum(begin, self.host)
        self.host, self.now = called, np.maximum(start + ms, called)
        ended = np.minimum(self.now, start + ms)
        if (start > begin).any():
            self._note("host", "host", DEVICE, begin, start)
        self._note(name, kind, DEVICE, start, ended)
        if (self.now > ended).any():
            self._note("host", "host", DEVICE, ended, self.now)

    def send(self, name: str, exchange: Exchange) -> int:
        """Issue a collective; return its number for `wait`."""
        levels = [INSIDE] * (exchange.inside > 0) + [ACROSS] * (exchange.across > 0)
        if self.machine.is_cpu:  # its cores do transfers inside nodes
            levels = levels[-1:]
        else:
            self.host = self.host + 1e3 * self.machine.rates.call_s
        ready = np.maximum(self.now, self.host)
        last = int(ready.argmax())
        begin, cause = float(ready[last]), -1
        if self.machine.is_cpu:
            self._carry(begin)
            self._carried_until = begin
        for level in levels:
            free, before = self._free[level]
            if free > begin:
                begin, cause = free, before
        end = begin + self.machine.ms(exchange)
        times = np.full_like(self.now, begin), np.full_like(self.now, end)
        for level in levels or [INSIDE]:
            number = self._note(name, exchange.purpose, level, *times, cause, last)
        if self.machine.is_cpu:
            self._carried[number] = 1e3 * self.machine.wire_s(exchange)
        else:
            self._free |= dict.fromkeys(levels, (end, number))
        self._handling[number] = self.machine.handling_ms(exchange)
        return number

    def _carry(self, until: float, last: int = -1) -> None:
        """Advance gloo's transfers up to a time, or until ``last`` has arrived. All transfers under
        way get an equal part of the link, so each delays the others."""
        while self._carried and last in (-1, *self._carried):
            first, count = min(self._carried, key=self._carried.__getitem__), len(self._carried)
            ms = min(self._carried[first], (until - self._carried_until) / count)
            for number, left in self._carried.items():
                self._carried[number], span = left - ms, self.spans[number]
                self.spans[number] = replace(span, end=span.end + (count - 1) * ms)
            self._carried_until += count * ms
            if self._carried[first]:
                break
            del self._carried[first]

    def wait(self, *numbers: int) -> None:
        """Make the device wait for these collectives in order; its own part in them takes time in
        any case."""
        for number in numbers:
            self._carry(math.inf, number)
            sent = self.spans[number]
            begin, busy = self.now, self.now + self._handling.pop(number, 0.0)
            self.now = np.maximum(busy, sent.end)
            if (self.now > begin).any():
                self._note(f"wait: {sent.name}", sent.kind, DEVICE, begin, self.now, number)

    def exchange(self, name: str, exchange: Exchange) -> None:
        if exchange:
            self.wait(self.send(name, exchange))

    # ---- summaries -----------------------------------------------------------------------

    def parts(self, since: float = 0.0) -> dict[str, float]:
        """Return milliseconds of the slowest class by kind of work, and by kind of wait."""
        slowest, found = int(self.now.argmax()), defaultdict[str, float](float)
        for span in self.spans:
            if span.on == DEVICE:
                ms = span.end[slowest] - max(since, span.begin[slowest])
                kind = span.kind if span.cause < 0 else f"wait for {span.kind}"
                found[kind] += max(0.0, float(ms))
        return {kind: ms for kind, ms in found.items() if ms > 1e-9}

    def critical_path(self, since: float = 0.0) -> dict[str, float]:
        """Return milliseconds by kind along the chain of spans that waited for each other."""
        found = defaultdict[str, float](float)
        which, moment = int(self.now.argmax()), float(self.now.max())
        at = len(self.spans) - 1
        while at >= 0 and moment > since:
            span = self.spans[at]
            if span.on != DEVICE or span.end[which] <= span.begin[which]:
                at -= 1
                continue
            sent = self.spans[span.cause] if span.cause >= 0 else None
            if sent is None or sent.end[which] < moment - 1e-9:
                found[span.kind] += moment - max(since, float(span.begin[which]))
                moment, at = float(span.begin[which]), at - 1
                continue
            while sent is not None and moment > since:
                at, which = span.cause, sent.of
                found[sent.kind] += moment - max(since, min(moment, float(sent.begin[0])))
                moment, span = float(sent.begin[0]), sent
                sent = self.spans[span.cause] if span.cause >= 0 else None
        return dict(sorted(found.items(), key=lambda item: -item[1]))


# ---- the model ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's work in a step: ``tokens``, in sequences of ``sequence``; ``recompute``: forward
    runs again in backward (activation checkpointing). ``active`` experts see each token. ``tp``
    ranks share each matrix, ``ep`` ranks each stack of experts. ``used`` and ``reduced`` are bytes
    of an element of gathered weights, and of reduced gradients (0: the parameter's). ``width`` is
    that of activations (0: of the first embedding)."""

    tokens: int
    sequence: int
    recompute: bool = False
    active: int = 0
    tp: int = 1
    ep: int = 1
    used: int = 0
    reduced: int = 0
    width: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, or all parameters outside layers (the root), on one rank: operations of ``forward``
    and ``backward``; bytes ``moved`` by elementwise passes in forward; bytes of gathered
    ``weights`` and of ``gradients``, each for (ordinary parameters, experts), and of all parameters
    that AdamW updates (``rest``); bytes of activations ``routed`` to experts, and ``summed`` over
    tensor-parallel ranks."""

    name: str
    forward: float = 0.0
    backward: float = 0.0
    moved: float = 0.0
    weights: tuple[float, float] = (0.0, 0.0)
    gradients: tuple[float, float] = (0.0, 0.0)
    rest: float = 0.0
    routed: float = 0.0
    summed: float = 0.0

    def __add__(self, other: Block) -> Block:
        mine, its = (
            (b.forward, b.backward, b.moved, *b.weights, *b.gradients, b.rest, b.routed, b.summed)
            for b in (self, other)
        )
        forward, backward, moved, w, we, g, ge, *rest = map(add, mine, its)
        return Block(self.name, forward, backward, moved, (w, we), (g, ge), *rest)


def blocks_of(specs: ModelSpecs, load: Load) -> list[Block]:
    """Return the root and the layers in order. Products with a weight cost 2 operations per element
    and token, twice that in backward; attention 4 x sequence x width per token, half of it masked.

    Raises:
        PlanError: the number of active experts does not fit the stacks of experts.
    """
    stacks = {m.parameter for m in specs.matrices if m.form.is_stack}
    fewest = min((specs.parameters[i].shape[0] for i in stacks), default=0)
    if bool(stacks) != bool(load.active) or load.active > fewest:
        there = f"stacks of {fewest} experts" if stacks else "no stack of experts"
        raise PlanError(
            f"found {there}, --active {load.active}: pass --active N, seen by each token"
        )
    tables = [p for p in specs.parameters if p.reason.startswith("embedding")]
    found = {"": Block("root")}
    for i, p in enumerate((*specs.parameters, *specs.frozen)):
        # A table is read, not multiplied, unless it is the output head as well.
        is_used = len(p.shape) > 1 and (p not in tables or "tied to" in p.reason)
        layer = layer_of(p.name)
        own = _of_weight(p, load, is_used, i in stacks, i >= len(specs.parameters))
        found[layer] = found.get(layer, Block(layer)) + own
    first = (tables or specs.parameters)[0]
    if not (width := load.width or (first.shape[-1] if tables else 0)):
        return [*found.values()]
    activations = float(load.tokens * width * (load.used or ITEM_SIZE.get(first.dtype, 2)))
    # The width of all heads: inputs of the projection back to the residual stream, if there is one.
    inside = [p for p in specs.parameters if "att" in p.name.lower() and len(p.shape) > 1]
    attending = {layer_of(p.name): width for p in inside}
    attending |= {layer_of(p.name): math.prod(p.shape[1:]) for p in inside if is_back(p.name)}
    routing = {layer_of(specs.parameters[i].name) for i in stacks if load.ep > 1}
    for layer in found.keys() - {""}:
        attention = 2.0 * load.sequence * attending.get(layer, 0) * load.tokens / load.tp
        routed = activations * load.active * (layer in routing)
        summed = 2 * activations * (load.tp > 1)
        found[layer] += Block("", attention, 2 * attention, routed=routed, summed=summed)
    return [*found.values()]


def _of_weight(
    p: ParameterSpec, load: Load, is_used: bool, is_stack: bool, is_frozen: bool
) -> Block:
    """Return the part of a block that one parameter adds."""
    item = ITEM_SIZE.get(p.dtype, 4)
    parts = load.ep if is_stack else load.tp if len(p.shape) > 1 else 1
    # A rank's experts see tokens of all ranks that share the stack.
    seen = load.tokens * is_used * (load.active if is_stack else 1 / parts)
    operations = 2.0 * p.numel / (p.shape[0] if is_stack else 1) * seen
    sides = sum(p.shape[-2:]) if is_stack else p.shape[0] + p.numel // max(1, p.shape[0])
    moved = 1.5 * (load.used or item) * seen * sides
    weights = p.numel / parts * (load.used or item)
    gradients = p.numel / parts * (load.reduced or item) * (not is_frozen)
    ordinary = not is_stack
    return Block(
        "", operations, operations * (1 if is_frozen else 2), moved,
        (weights * ordinary, weights * is_stack), (gradients * ordinary, gradients * is_stack),
        weights * (p.algorithm is Algorithm.ADAMW),
    )  # fmt: skip


# ---- the parts of a step -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together: the gather, and the turns that bring the updates. By class of
    ranks: ``ms`` and ``units`` of Newton-Schulz, elements ``owned`` and ``held``."""

    gather: Exchange
    turns: tuple[Exchange, ...]
    ms: Floats
    units: Floats
    owned: Floats
    held: Floats


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of the framework: all ranks; ranks that shard ordinary weights, and
    experts; ranks with equal shards; ranks that share stacks of experts, and matrices."""

    world: Group
    shards: Group
    experts: Group
    replicas: Group
    ep: Group
    tp: Group


@dataclass(frozen=True, slots=True)
class Work:
    """Elements of matrices and of AdamW's parameters, by class of ranks, and of the ``whole``
    model's matrices. Newton-Schulz: ms of matrices that lie on one rank alone, by class; (ms,
    batches) of all blocks in a block step, by class, and of every matrix, one by one. Bytes of an
    element of a parameter (``item``) and in Newton-Schulz (``ns_item``)."""

    matrices: Floats
    adamw: Floats
    whole: float
    alone_ms: Floats
    blocks: tuple[Floats, Floats]
    every: tuple[float, int]
    item: int
    ns_item: int


@dataclass(frozen=True, slots=True)
class Job:
    """All parts of a training step. The layout ``around`` the model decides who moves weights and
    gradients: FSDP2, DDP, or dmuon if owners keep momentum. ``ahead`` buckets are under way to
    owners at once, and ``slots`` on their way back. ``uneven``: the bytes of a layer that its
    busiest owner sends, relative to the mean. ``shards_rest``: in `dedicated`, FSDP2 shards the
    parameters that AdamW updates."""

    machine: Machine
    around: Layout
    blocks: Sequence[Block]
    groups: Groups
    load: Load
    buckets: Sequence[Bucket]
    verdict: Exchange
    work: Work
    ahead: int = 2
    slots: int = 2
    uneven: float = 1.0
    clips: bool = False
    shards_rest: bool = True

    @property
    def waits(self) -> bool:
        """Whether the framework waits for each of its collectives at once."""
        return self.machine.is_cpu and self.around is Layout.SHARDED

    def collective(
        self, purpose: str, op: str, nbytes: float, group: Group, *, direct: bool = False
    ) -> Exchange:
        """Return a `collective`; ``direct``: by messages on gloo, as dmuon sends them."""
        op = "all_to_all" if direct and self.machine.is_cpu else op
        return collective(purpose, op, nbytes, group, is_gloo=self.machine.is_cpu)

    def gathers(self, block: Block) -> list[Exchange]:
        """Return the gathers of a block's weights before it runs."""
        groups, found = self.groups, list[Exchange]()
        if self.around is Layout.DEDICATED:
            owned, of = sum(block.weights) - block.rest, groups.shards
            rest = block.rest * (self.shards_rest and not self.machine.is_cpu)
            own = self.collective("weights", "all_gather", owned, of, direct=True) * self.uneven
            found = [own, self.collective("FSDP all-gather", "all_gather", rest, of)]
        elif self.around is Layout.SHARDED:
            both = zip(block.weights, (groups.shards, groups.experts))
            found = [self.collective("FSDP all-gather", "all_gather", n, of) for n, of in both]
        return [each for each in found if each]

    def reductions(self, block: Block) -> list[Exchange]:
        """Return the reductions of a block's gradients."""
        groups, whole, make = self.groups, sum(block.gradients), self.collective
        if self.around is Layout.REPLICATED:
            every = [make("DDP all-reduce", "all_reduce", whole, groups.world)]
        elif self.around is Layout.SHARDED:
            both = [*zip(block.gradients, (groups.shards, groups.experts))]
            every = [make("FSDP reduce-scatter", "reduce_scatter", n, of) for n, of in both]
            shards = [(n / of.ranks, groups.replicas) for n, of in both]
            every += [make("HSDP all-reduce", "all_reduce", n, of) for n, of in shards]
        else:  # matrices' gradients to owners, the others to all ranks, or to shards
            rest = whole * block.rest / (sum(block.weights) or 1)
            of = groups.shards if self.around is Layout.DEDICATED else groups.world
            is_cut = self.around is Layout.DEDICATED and self.shards_rest
            own = make("gradients", "reduce_scatter", whole - rest, of, direct=True) * self.uneven
            every = [own]
            if not (is_cut and self.machine.is_cpu):  # see `of_rest`
                op = "reduce_scatter" if is_cut else "all_reduce"
                every.append(make("gradients of the rest", op, rest, of))
            if self.around is Layout.DEDICATED:
                share = rest / of.ranks if is_cut else rest
                every.append(make("HSDP all-reduce", "all_reduce", share, groups.replicas))
        return [each for each in every if each]

    def to_owners(self, block: Block) -> Exchange:
        """Return the sending of gradients to owners after backward in `dedicated` with replicas."""
        whole = sum(block.gradients) * (self.around is Layout.DEDICATED)
        owned = whole * (1 - block.rest / (sum(block.weights) or 1)) / self.groups.shards.ranks
        purpose = "gradients across replicas"
        return self.collective(purpose, "reduce_scatter", owned, self.groups.replicas, direct=True)

    def of_rest(self, block: Block, op: str) -> Exchange:
        """Return FSDP2's own collective in `dedicated` on gloo, where FSDP2 waits for it."""
        waits = self.around is Layout.DEDICATED and self.shards_rest and self.machine.is_cpu
        return self.collective(f"FSDP {op}", op, block.rest * waits, self.groups.shards)

    def to_holders(self, block: Block) -> Exchange:
        """Return the publishing of a block in `dedicated` with replicas, in the stored dtype."""
        owned = (sum(block.weights) - block.rest) / self.groups.shards.ranks
        owned *= self.work.item / (self.load.used or self.work.item)
        return self.collective("weights to holders", "all_gather", owned, self.groups.replicas)


# ---- forward and backward ----------------------------------------------------------------


class Model:
    """Forward and backward of a job, with the collectives of its framework."""

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.job = run, job

    def _compute(self, block: Block, kind: str) -> None:
        run, job, is_back = self.run, self.job, kind == "backward"
        passes = 1 + (is_back and job.load.recompute)
        operations = block.backward + block.forward * (passes - 1) if is_back else block.forward
        ms = 1e3 * operations / run.machine.rates.products
        ms += run.machine.passes_ms((is_back + passes) * block.moved)
        run.compute(f"{block.name} {kind}", kind, ms, (1 + is_back) * _LAYER_CALLS)
        routed = job.collective("experts' tokens", "all_to_all", block.routed, job.groups.ep)
        summed = job.collective("tensor parallelism", "all_reduce", block.summed, job.groups.tp)
        for _ in range(passes):  # to the experts, and back
            for name, each in (("tokens", routed), ("tokens", routed), ("sums", summed)):
                run.exchange(f"{block.name} {name}", each)

    def _copies(self, nbytes: float) -> None:
        """Copy into and out of the buffers of FSDP2's collectives."""
        if self.job.around is Layout.SHARDED and self.job.groups.shards.ranks > 1:
            ms = self.run.machine.passes_ms(2 * nbytes, new=True)
            self.run.compute("buffers", "copies of FSDP", ms, 4)

    def _gather(self, block: Block) -> list[int]:
        return [self.run.send(block.name, each) for each in self.job.gathers(block)]

    def _arrive(self, block: Block, sent: Iterable[int]) -> None:
        self.run.wait(*sent)
        self._copies(sum(block.weights))

    def _reduce(self, block: Block) -> list[int]:
        self._copies(sum(block.gradients))
        sent = []
        for each in self.job.reductions(block):
            sent.append(self.run.send(block.name, each))
            if self.job.waits:
                self.run.wait(sent.pop())
        return sent

    def _through(self, layers: Sequence[tuple[int, Block]], kind: str) -> Iterator[Block]:
        """Compute layer by layer, each with its weights, while the next layer's weights travel."""
        following = self._gather(layers[0][1]) if layers and not self.job.waits else []
        for n, (i, block) in enumerate(layers):
            arriving = self._gather(block) if self.job.waits else following
            if not self.job.waits:
                following = self._gather(layers[n + 1][1]) if n + 1 < len(layers) else []
            self.run.wait(*(self.run.late.pop(i, ()) if kind == "forward" else ()))
            self._arrive(block, arriving)
            self.run.exchange(f"{block.name} rest", self.job.of_rest(block, "all_gather"))
            self._compute(block, kind)
            if kind == "backward":
                self.run.exchange(f"{block.name} rest", self.job.of_rest(block, "reduce_scatter"))
            yield block

    def forward(self) -> None:
        root, *layers = self.job.blocks
        self._arrive(root, self._gather(root))
        for _ in self._through([*enumerate(layers)], "forward"):
            pass
        self._compute(root, "forward")

    def backward(self) -> None:
        root, *layers = self.job.blocks
        self._compute(root, "backward")
        sent, gathered = list[int](), Block("gradients")
        for block in self._through([*enumerate(layers)][::-1], "backward"):
            gathered += block
            is_bucketed = self.job.around in (Layout.REPLICATED, Layout.REDUCED)
            if not is_bucketed or sum(gathered.gradients) >= _DDP_BUCKET:
                sent += self._reduce(replace(gathered, name=block.name))
                gathered = Block("gradients")
        sent += self._reduce(gathered + root)
        self.run.wait(*sent)
        across = [self.run.send(b.name, each) for b in layers if (each := self.job.to_owners(b))]
        self.run.wait(*across)


# ---- optimizers --------------------------------------------------------------------------

Program = Callable[[Run, Job], None]


def _passes(run: Run, job: Job, name: str, of: Passes, elements: Any, times: int = 1) -> None:
    """Run elementwise passes over so many elements of a rank, with ``times`` as many calls."""
    *each, calls = of
    items, ns_items = each[not run.machine.is_cpu]
    nbytes = (items * job.work.item + ns_items * job.work.ns_item) * elements
    run.compute(name, "elementwise", run.machine.passes_ms(nbytes), times * calls)


def adamw(run: Run, job: Job) -> None:
    """Run AdamW on everything; foreach, or fused."""
    _passes(run, job, "AdamW", _ADAMW, job.work.matrices + job.work.adamw)


def full_step(run: Run, job: Job) -> None:
    """Run Muon with momentum on params: `ParamsEngine._full_step`."""
    _passes(run, job, "operands", _OPERAND, job.work.matrices)
    _Pipelined(run, job).run(run.send("verdict", job.verdict))


class _Pipelined:
    """`Pipeline.run`: by bucket, the collectives under way and the next turn."""

    def __init__(self, run: Run, job: Job) -> None:
        self._run, self._job = run, job
        self._gathers: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._turn = [0] * len(job.buckets)
        self.depth = max((len(b.turns) for b in job.buckets), default=0)

    def run(self, verdict: int) -> None:
        run, job = self._run, self._job
        count = len(job.buckets)
        only_publishes = not any(bucket.gather for bucket in job.buckets)
        is_ahead = bool(job.buckets) and only_publishes and run.machine.is_cpu
        if not is_ahead:
            run.wait(verdict)
        for b in range(job.ahead):
            self._gather(b)
        left = 1.0
        if not only_publishes:
            left = self._meanwhile(1.0, left)
        for b, bucket in enumerate(job.buckets):
            if b in self._gathers:
                run.wait(self._gathers.pop(b))
            _passes(run, job, f"assembly {b}", _COPY, bucket.owned)
            self._gather(b + job.ahead)
            if b >= job.slots:
                if only_publishes:
                    left = self._meanwhile(1 / (count + 1 - b), left)
                while self._turn[b - job.slots] < len(job.buckets[b - job.slots].turns):
                    self._send_turn(b - job.slots)
                self.apply(b - job.slots)
            run.compute(f"bucket {b}", "Newton-Schulz", bucket.ms, _UNIT_CALLS * bucket.units.max())
            _passes(run, job, f"leaving {b}", _COPY, bucket.owned)
            if not b and is_ahead:
                run.wait(verdict)
            self.send_turns(b)
        for b in range(count, count + self.depth):
            self.send_turns(b)
        if only_publishes:
            self._meanwhile(1.0, left)
        for b in range(max(0, count - job.slots), count):
            self.apply(b)

    def _meanwhile(self, part: float, left: float) -> float:
        """Do a part of the work ``left`` on matrices alone, at last all else; return the rest."""
        run, work = self._run, self._job.work
        if work.alone_ms.any():
            now = part * left
            run.compute("alone", "Newton-Schulz", now * work.alone_ms, _UNIT_CALLS)
            alone = work.matrices - sum(bucket.held for bucket in self._job.buckets)
            _passes(run, self._job, "apply what is alone", _APPLY, now * alone)
        if part == 1:
            _passes(run, self._job, "momentum", _COMMIT, work.matrices)
            _passes(run, self._job, "AdamW on the rest", _ADAMW, work.adamw)
        return left * (1 - part)

    def _gather(self, b: int) -> None:
        if b < len(self._job.buckets) and self._job.buckets[b].gather:
            self._gathers[b] = self._run.send(f"gather {b}", self._job.buckets[b].gather)

    def send_turns(self, last: int) -> None:
        """Send the next turn of this bucket, and then of the buckets before it."""
        for back in range(self.depth + 1):
            self._send_turn(last - back)

    def _send_turn(self, b: int) -> None:
        turns = self._job.buckets[b].turns if 0 <= b < len(self._turn) else ()
        if turns and self._turn[b] < len(turns):
            if b in self._sent:
                self._run.wait(self._sent.pop(b))
            exchange = turns[self._turn[b]]
            which = f"{b}.{self._turn[b]}" if self._turn[b] else f"{b}"
            self._sent[b] = self._run.send(f"{exchange.purpose} {which}", exchange)
            self._turn[b] += 1

    def apply(self, b: int) -> None:
        if b in self._sent:
            self._run.wait(self._sent.pop(b))
        _passes(self._run, self._job, f"apply {b}", _APPLY, self._job.buckets[b].held)


def block_step(run: Run, job: Job) -> None:
    """Run MuonBP's block step, without traffic."""
    work, (ms, batches) = job.work, job.work.blocks
    _passes(run, job, "operands", _OPERAND, work.matrices)
    _passes(run, job, "momentum", _COMMIT, work.matrices)
    run.compute("blocks", "Newton-Schulz", ms, _UNIT_CALLS * float(batches.max()))
    _passes(run, job, "apply", _APPLY, work.matrices)
    _passes(run, job, "AdamW on the rest", _ADAMW, work.adamw)


def owners_step(run: Run, job: Job) -> None:
    """Run Muon with momentum at owners, whose prices include it. In `reduce_to_owner` buckets of
    updates go from all owners to all ranks."""
    run.exchange("verdict", job.verdict)
    way, count = _Pipelined(run, job), len(job.buckets)
    for b in range(count + way.depth):
        if b < count:
            bucket, calls = job.buckets[b], _UNIT_CALLS * job.buckets[b].units.max()
            run.compute(f"bucket {b}", "Newton-Schulz", bucket.ms, calls)
            if not bucket.turns:  # its weights lie here
                _passes(run, job, f"apply {b}", _APPLY, bucket.owned)
        way.send_turns(b)
    if job.around is Layout.DEDICATED:
        for i, block in enumerate(job.blocks[1:]):
            if published := job.to_holders(block):
                run.late[i].append(run.send(f"{block.name} to holders", published))
    _passes(run, job, "AdamW on the rest", _ADAMW, job.work.adamw)
    for b, bucket in enumerate(job.buckets):
        if bucket.turns:
            way.apply(b)


def redundant_step(run: Run, job: Job) -> None:
    """Run `torch.optim.Muon`: every rank orthogonalizes everything, after DDP or, if weights are
    sharded, after an all-gather of each momentum in turn ("gather-then-compute")."""
    (ms, count), work = job.work.every, job.work
    each = work.ns_item * work.whole / max(1, count) * (job.around is Layout.SHARDED)
    parts = (each / job.load.tp, job.groups.shards), (each, job.groups.tp)
    gathered = [job.collective("momentum", "all_gather", *part) for part in parts]
    for _ in range(count):
        for part in gathered:
            run.exchange("momentum", part)
    _passes(run, job, "momentum", _COPY, work.matrices, 3 * count)
    run.compute("everything", "Newton-Schulz", ms, 15 * count)
    _passes(run, job, "apply", _APPLY, work.matrices, count)
    _passes(run, job, "AdamW on the rest", _ADAMW, work.adamw)


# ---- answers -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: ``ms`` in all, ``optimizer_ms`` in the optimizer; its spans are those of
    ``run`` from ``since`` on. ``waits``: milliseconds for other stages of a pipeline, by kind."""

    ms: float
    optimizer_ms: float
    run: Run
    since: float
    waits: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of the slowest rank by kind of work, and by kind of wait."""
        return self.run.parts(self.since) | self.waits

    @property
    def critical_path(self) -> dict[str, float]:
        """Milliseconds by kind along the chain of spans that waited for each other."""
        return self.run.critical_path(self.since) | self.waits


def link_ms(job: Job) -> float:
    """Return the milliseconds of all traffic of the job's buckets if the links never wait."""
    machine, every = job.machine, [e for b in job.buckets for e in (b.gather, *b.turns)]
    levels = sum(e.inside for e in every) / machine.inside, sum(e.across / e.share for e in every)
    return 1e3 * max(levels[0], levels[1] / machine.across)


def optimizer_ms(job: Job) -> float:
    """Return the milliseconds of Muon's full step alone."""
    run = Run(job.machine, len(job.work.matrices))
    own_step(job)(run, job)
    return float(run.now.max())


def own_step(job: Job) -> Program:
    """Return the program of Muon in the job's layout."""
    return owners_step if job.around.keeps_state_at_owners else full_step


def simulate(job: Job, program: Program | None = None) -> Step:
    """Return the second of two training steps, so that work left over by a step counts; ``program``
    is the optimizer's (None: `own_step`)."""
    run = Run(job.machine, len(job.work.matrices))
    model, since, begin = Model(run, job), 0.0, 0.0
    for _ in range(2):
        since = float(run.now.max())
        run.host = np.maximum(run.host, run.now)  # which waits for a result, such as the loss
        model.forward()
        model.backward()
        begin = float(run.now.max())
        if job.clips:
            _passes(run, job, "norm", _NORM, job.work.matrices + job.work.adamw)
            run.exchange("clipping", replace(job.verdict, purpose="clipping"))
        (program or own_step(job))(run, job)
    end = float(run.now.max())
    return Step(end - since, end - begin, run, since)


def pipelined(steps: Sequence[Step], microbatches: int, share: float, sent_ms: float) -> Step:
    """Return the step of the stage that is slowest up to its optimizer, with its waits for others.

    The bubble is ``share`` of a microbatch of each other stage: 1 with 1F1B, 1 / v with v parts on
    each rank (Narayanan et al. 2021, section 2.2), and less if gradients of weights fill it (Qi et
    al. 2023, section 2). ``sent_ms`` is one transfer of activations, which delays filling and
    draining. All stages begin their optimizers together, as after clipping."""
    alone = [step.ms - step.optimizer_ms for step in steps]
    step, most = steps[alone.index(max(alone))], max(step.optimizer_ms for step in steps)
    waits = {
        "bubble": share * (sum(alone) - max(alone)) / microbatches,
        "activations between stages": 2 * (len(steps) - 1) * sent_ms,
        "wait for the slowest optimizer": most - step.optimizer_ms,
    }
    waits = {kind: ms for kind, ms in waits.items() if ms > 1e-9}
    return replace(step, ms=step.ms + sum(waits.values()), optimizer_ms=most, waits=waits)
