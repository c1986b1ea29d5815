"""Gradients to their owners, in backward.

One *round* reduces every parameter once. Its buckets are launched in a fixed order, each as soon
as all of its gradients are there; what is missing at the end of backward counts as zero. So the
collectives of a round, and their order, never depend on which gradients a rank happens to have::

    backward   grad ... grad -> bucket 0 leaves    grad ... grad -> bucket 1 leaves   ...
    end        buckets that wait for missing gradients leave, then, with replicas, what their
               results take along the replicas, then the participation flags;
               the averaged rest is written to p.grad
    step       owners add up what arrived (`collect`)

A gradient that is not dense cannot be reduced. Where the host can read, every rank raises at the
end of that backward. Elsewhere it would have to wait for the device: the gradient counts as
missing, the flags travel to the host meanwhile, and every rank raises at the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm import streams
from dmuon.comm.buckets import EVERYONE, Buffer, GradientBucket, Memory, Segment, Slices
from dmuon.comm.hooks import Remove
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.streams import HostCopy
from dmuon.comm.transport import Meter, Work
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.types import Algorithm, DmuonError, OwnershipError

__all__ = ["GradientReducer", "LiveSegment", "at_end_of_backward", "hook_ddp", "hook_parameters"]


class LiveSegment:
    """A segment with its buffer, cut into views of its spans, and what is under way of it.

    ``deliveries`` is where the owner's side keeps (destinations, sources) of what it receives.
    ``relay``: its second level, along replicas, is still to come.
    """

    def __init__(self, segment: Segment, buffer: Buffer) -> None:
        self.segment = segment
        self.buffer = buffer
        self.views = list(buffer.flat.split([span.numel for span in segment.spans]))
        self.deliveries: tuple[list[Tensor], list[Tensor]] | None = None
        self.works: list[Work] = []
        self.relay = False
        buffer.release()

    def arrived(self) -> bool:
        """Whether waiting would take no time, and nothing of it is to follow."""
        return not self.relay and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _LiveBucket:
    """A bucket with its segments. ``end`` is where the next one may begin in shared memory."""

    def __init__(self, bucket: GradientBucket, segments: list[LiveSegment], end: int) -> None:
        self.parameters = bucket.parameters
        self.segments = segments
        self.end = end
        self.targets: dict[int, list[tuple[int, Tensor]]] = {p: [] for p in bucket.parameters}
        for live in segments:
            for span, view in zip(live.segment.spans, live.views, strict=True):
                self.targets[span.parameter].append((span.start, view))
        self.reset()

    def reset(self) -> None:
        self.empty = set(self.parameters)
        self.waiting = set(self.parameters)  # for gradients that are still to come
        self.launched = False

    def fill(self, parameter: int, grad: Tensor | None, scale: float) -> None:
        """Write ``scale * grad`` (zeros for None) to where the parameter's gradient travels."""
        for live in self.segments:
            live.buffer.hold()
        self.empty.discard(parameter)
        if grad is None:
            for _, view in self.targets[parameter]:
                view.zero_()
            return
        flat = grad.detach().reshape(-1)
        for start, view in self.targets[parameter]:
            part = flat.narrow(0, start, view.numel())
            if part.dtype is view.dtype:
                torch.mul(part, scale, out=view)
            else:
                view.copy_(part).mul_(scale)  # in the wider dtype

    def add(self, parameter: int, grad: Tensor, scale: float) -> None:
        """Add ``scale * grad`` to what is there."""
        flat = grad.detach().reshape(-1)
        for start, view in self.targets[parameter]:
            view.add_(flat.narrow(0, start, view.numel()), alpha=scale)


class GradientReducer:
    """Carries out rounds; see the module's docstring.

    ``deliver(segments, first)`` is called with what arrived here as owner, and whether it is of
    the first round since `clear`. The averaged rest is written to ``p.grad``. Without a shared
    ``memory`` each segment has its own while it is under way, and only the parameters of
    ``buckets`` take part.
    """

    def __init__(
        self,
        slices: Slices,
        parameters: Sequence[nn.Parameter],
        process_groups: ProcessGroups,
        memory: Memory | None,
        meter: Meter,
        buckets: Sequence[GradientBucket],
        deliver: Callable[[list[LiveSegment], bool], None],
    ) -> None:
        self.specs = slices.plan.specs
        self.parameters = parameters
        self.sync = True
        self.rounds = 0  # completed since `clear`
        self.owed = False  # whether gradients may lie in p.grad that no round has seen
        self.open = False  # a round has begun and not ended: its backward runs, or has raised
        self.present = [False] * len(parameters)  # on any rank, since `clear`
        self.is_matrix = [p.algorithm is Algorithm.MUON for p in self.specs.parameters]
        # How many gradients one backward accumulates into each parameter: more than one where its
        # storage changed its dtype between two uses.
        self.expected = dict.fromkeys(range(len(parameters)), 1)
        self._slices = slices
        self._shard = slices.grid.place(process_groups.world.rank)[1]
        self._replicated = slices.grid.shape[0] > 1
        self._scale = 1.0 / slices.grid.data_ranks
        self._groups = process_groups
        self._memory = memory
        self._meter = meter
        self._deliver = deliver
        self._buckets = list(buckets)
        self._tracked = sorted({p for bucket in buckets for p in bucket.parameters})
        if memory is not None:
            self._tracked = list(range(len(parameters)))  # of buckets that others cut, too
        self._device = parameters[0].device
        # Of each parameter whether it has a gradient here, then of each whether it is of no use.
        # Ranks combine them by their maximum: a sum would overflow with enough of them.
        self._flags = torch.zeros(2 * len(parameters), dtype=torch.uint8, device=self._device)
        # Flags on their way to a host that does not wait: of rounds since `clear`, and before.
        self._recent_flags: list[HostCopy] = []
        self._earlier_flags: list[HostCopy] = []
        self._local: list[bool] = []
        self._unusable: list[bool] = []
        self._arrived: list[int] = []
        self._live: list[_LiveBucket] = []
        self._live_of: dict[int, _LiveBucket] = {}
        # Buckets return at the same place round after round: their views are made once.
        self._known: dict[tuple[int, tuple[int, ...]], _LiveBucket] = {}
        self._launched = 0
        self._flights: list[LiveSegment] = []

    # ---- a round -----------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Names of the parameters that no bucket of this round holds and that have no gradient."""
        return [
            spec.name
            for p, spec in enumerate(self.specs.parameters)
            if p not in self._live_of and self.parameters[p].grad is None
        ]

    def local_matrix(self) -> str | None:
        """The name of a matrix with a gradient in ``p.grad``, which none has after a round."""
        for p in self._tracked:
            if self.is_matrix[p] and self.parameters[p].grad is not None:
                return self.specs.parameters[p].name
        return None

    def begin(self, buckets: Sequence[GradientBucket] | None = None) -> None:
        """Start a round over ``buckets`` (None: the planned ones).

        A round that a failed backward left open is dropped.
        """
        if self.open:
            self._relay()
            for live in self._flights:
                live.wait()
            self._flights = []
        self.collect()
        self.owed = False
        self.open = True
        self._launched = 0
        self._local = [False] * len(self.parameters)
        self._unusable = [False] * len(self.parameters)
        self._arrived = [0] * len(self.parameters)
        self._live, self._live_of = [], {}
        for bucket in self._buckets if buckets is None else buckets:
            self.add_bucket(bucket)

    def add_bucket(self, bucket: GradientBucket) -> None:
        """Give the next bucket of this round its buffers, right behind the last one's."""
        begin = self._live[-1].end if self._live else 0
        live = self._known.get((begin, bucket.parameters))
        if live is None:
            live = self._known[begin, bucket.parameters] = self._make(bucket, begin)
        live.reset()
        self._live.append(live)
        self._live_of.update(dict.fromkeys(bucket.parameters, live))

    def _make(self, bucket: GradientBucket, begin: int) -> _LiveBucket:
        sizes = [(s.numel, getattr(torch, s.dtype)) for s in bucket.segments]
        end = 0
        if self._memory is None:
            flat = [torch.empty(n, dtype=dtype, device=self._device) for n, dtype in sizes]
        else:
            flat, whole = self._memory.carve(begin, sizes)
            end = begin + whole.numel()
        buffers = [Buffer(tensor, lasting=self._memory is not None) for tensor in flat]
        segments = [LiveSegment(s, b) for s, b in zip(bucket.segments, buffers, strict=True)]
        return _LiveBucket(bucket, segments, end)

    def take(self, parameter: int, grad: Tensor | None) -> None:
        """Copy one local gradient into its bucket; None counts as zero.

        Raises:
            DmuonError: the bucket has left already.
        """
        if grad is not None and grad.layout is not torch.strided:
            self._unusable[parameter] = True
            self.parameters[parameter].grad = grad = None
        if grad is not None:
            self._local[parameter] = True
        live = self._live_of[parameter]
        if parameter in live.empty:
            live.fill(parameter, grad, self._scale)
        elif grad is not None:
            # Nested backward calls, of a module that runs several times.
            if live.launched:
                raise DmuonError(
                    f"parameter {self.specs.parameters[parameter].name!r} got a second gradient in "
                    "one backward, after its first had been sent: a module that runs several times "
                    "under re-entrant checkpointing. Use checkpoint(..., use_reentrant=False)"
                )
            # A matrix's p.grad was emptied after the first; the rest's holds both.
            again = live.add if self.is_matrix[parameter] else live.fill
            again(parameter, grad, self._scale)
        self._arrived[parameter] += 1
        if self._arrived[parameter] >= self.expected[parameter]:
            live.waiting.discard(parameter)

    def gradient_of(self, parameter: int) -> Tensor | None:
        """The local part of what lies in the parameter's ``grad``."""
        p = self.parameters[parameter]
        return None if p.grad is None else local_tensor(gradient_like(p.grad, p))

    def launch_ready(self) -> None:
        """Send every bucket that is full and whose predecessors have left."""
        while self._launched < len(self._live) and not self._live[self._launched].waiting:
            bucket = self._live[self._launched]
            bucket.launched = True
            for live in bucket.segments:
                self._send(live)
            self._launched += 1
            if self._memory is None:
                # What has arrived is a matter of time: nothing is issued, and nothing waited for,
                # because another rank may launch its part at the end of its backward only. The
                # rest stays until the flags are known.
                self._collect(
                    [f for f in self._flights if f.segment.shard != EVERYONE and f.arrived()]
                )

    def _send(self, live: LiveSegment) -> None:
        shard, flat = live.segment.shard, live.buffer.flat
        self._meter.add("gradients", flat)
        if shard == EVERYONE:
            live.works = [self._groups.data.all_reduce(flat, tag="rest")]
        else:
            live.works = [self._groups.gradients.reduce(flat, shard, tag="gradients")]
            live.relay = self._replicated and shard == self._shard
        self._flights.append(live)

    def _relay(self) -> None:
        """Reduce along the replicas what was reduced along the shards.

        Every rank has sent every bucket of the round by now, and this is the order of the first
        level: the same on all ranks of the column, whichever of them is fast. Until then an
        owner's column holds what it has summed, as much as it keeps of the weights.
        """
        tag = "gradients across replicas"
        for live in self._flights:
            if not live.relay:
                continue
            live.wait()
            live.relay, start = False, 0
            for replica, members in groupby(live.segment.spans, lambda span: span.replica):
                numel = sum(span.numel for span in members)
                part = live.buffer.flat.narrow(0, start, numel)
                start += numel
                self._meter.add(tag, part)
                live.works.append(self._groups.replicas.reduce(part, replica, tag=tag))

    def give_up(self, parameters: Iterable[int]) -> None:
        """No gradients of these are to come in this round: send what there is."""
        for p in parameters:
            live = self._live_of[p]
            if p in live.empty:
                self.take(p, self.gradient_of(p))
            live.waiting.discard(p)
        self.launch_ready()

    def finish(self) -> None:
        """End the round: send what is missing as zeros, agree on who took part.

        Raises:
            DmuonError: a rank found a gradient that cannot be reduced. Raised on every rank: here
                where the host can read the flags, else by the next `ensure` after `clear`.
        """
        self.give_up([p for live in self._live for p in sorted(live.waiting)])
        self._relay()
        self.open = False
        self.rounds += 1
        anywhere = self._participation()
        self._write_rest(anywhere)
        for p in self._tracked:
            self.present[p] = self.present[p] or anywhere[p]
            if self.is_matrix[p]:
                # The owner has it now. Left here, a second backward would add to it and
                # reduce the sum again.
                self.parameters[p].grad = None

    def _participation(self) -> list[bool]:
        """Which parameters have a gradient on any rank."""
        number = len(self.parameters)
        complete = all(self._local[p] for p in self._tracked) and not any(self._unusable)
        if complete:
            self._flags[:number].fill_(1)
            self._flags[number:].zero_()
        else:
            self._flags.copy_(torch.tensor(self._local + self._unusable, dtype=torch.uint8))
        self._meter.add("flags", self._flags)
        self._groups.world.all_reduce(self._flags, tag="flags", maximum=True).wait()
        if not streams.host_can_read(self._device):
            # Whether this rank reads them depends on its gradients, so nobody raises by that.
            self._recent_flags.append(HostCopy(self._flags))
            if complete:  # all are present here, hence anywhere
                return [True] * number
            return [bool(flag) for flag in self._flags[:number].tolist()]
        flags = self._flags.tolist()
        self._check_usable(flags[number:])
        return [bool(flag) for flag in flags[:number]]

    def _check_usable(self, unusable: Sequence[int], when: str = "") -> None:
        """Raise DmuonError, the same on every rank, if any rank had a gradient of no use."""
        for spec, is_unusable in zip(self.specs.parameters, unusable, strict=True):
            if is_unusable:
                raise DmuonError(
                    f"parameter {spec.name!r} got a gradient that is not dense (a sparse layout) "
                    f"on some rank{when}; dmuon needs dense gradients (for an embedding: "
                    "sparse=False)"
                )

    def _write_rest(self, anywhere: list[bool]) -> None:
        """Wait for the averaged gradients of the rest and put them in ``p.grad``."""
        grads, means = [], []
        rest = [live for live in self._flights if live.segment.shard == EVERYONE]
        self._flights = [live for live in self._flights if live.segment.shard != EVERYONE]
        for live in rest:
            live.wait()
            for span, view in zip(live.segment.spans, live.views, strict=True):
                if not anywhere[span.parameter]:
                    continue
                parameter = self.parameters[span.parameter]
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                grads.append(local_tensor(parameter.grad))
                means.append(view.view(grads[-1].shape))
        if grads:
            torch._foreach_copy_(grads, means)
        for live in rest:
            live.buffer.release()

    # ---- between rounds ----------------------------------------------------------------------

    def begin_owed(self) -> None:
        """Start the round that the other ranks count on, if there was none here."""
        if not self.open and (self.rounds == 0 or self.owed):
            self.begin()

    def ensure(self) -> None:
        """Have at least one round since `clear`, and none open: what `step` and clipping need.

        A rank whose backward reached no parameter still joins the others' round here.

        Raises:
            DmuonError: a rank found a gradient that cannot be reduced; see `finish`.
        """
        self.begin_owed()
        if self.open:
            self.finish()
        self.collect()
        earlier, self._earlier_flags = self._earlier_flags, []
        when = " in the backward before the last step, which counted it as missing"
        for flags in earlier:
            self._check_usable(flags.read()[len(self.parameters) :], when)

    def collect(self) -> None:
        """Wait for the matrices' gradients and hand over those that arrived here."""
        self._collect(self._flights)

    def _collect(self, flights: Sequence[LiveSegment]) -> None:
        if not flights:
            return
        for live in flights:
            live.wait()
        mine = [live for live in flights if live.segment.shard == self._shard]
        if mine:
            self._deliver(mine, self.rounds == (0 if self.open else 1))
        for live in flights:
            live.buffer.release()
        done = set(map(id, flights))
        self._flights = [live for live in self._flights if id(live) not in done]

    def clear(self) -> None:
        """Forget the gradients reduced so far, as `zero_grad` does."""
        if self.open:
            self.finish()
        self.collect()
        self._earlier_flags += self._recent_flags
        self._recent_flags = []
        self.owed = False
        self.rounds = 0
        self.present = [False] * len(self.parameters)


# ---- what starts and ends a round ------------------------------------------------------------


def at_end_of_backward(callback: Callable[[], None]) -> None:
    # The engine's own queue: there is no public name for "when this backward is done", and FSDP2
    # uses the same one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


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
                at_end_of_backward(_end_of(reducer))
            reducer.take(index, p.grad)
            if reducer.is_matrix[index]:
                p.grad = None  # taken: its memory is free for the rest of backward
            reducer.launch_ready()

        return on_gradient

    return [p.register_post_accumulate_grad_hook(make(i)).remove for i, p in enumerate(parameters)]


def _end_of(reducer: GradientReducer) -> Callable[[], None]:
    def end() -> None:
        # Nested backward calls (re-entrant checkpointing) each end once; the round may be over.
        if reducer.open:
            reducer.finish()

    return end


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
    make_bucket: Callable[[Sequence[int]], GradientBucket],
) -> list[Remove]:
    """DDP: its buckets are ours, and what is in them is taken from there."""
    end = _end_of(reducer)
    index_of = {id(p): i for i, p in enumerate(parameters)}

    def on_bucket(bucket: Any) -> None:
        if bucket.index() == 0:
            before_round()
            reducer.begin([])
        members = [index_of[id(p)] for p in bucket.parameters()]
        reducer.add_bucket(make_bucket(members))
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
