"""Reduction of gradients to their owners, in backward.

One *round* reduces every parameter once; `RoundState` lists its states. Its buckets are launched in
a fixed order, each as soon as all of its gradients have arrived; a gradient that is missing at the
end of backward counts as zero. So the collectives never depend on which gradients a rank has::

    backward   grad ... grad -> bucket 0 leaves    grad ... grad -> bucket 1 leaves   ...
    end        buckets that wait for missing gradients leave, then, with replicas, the second level
               of all buckets, then the participation flags;
               averaged gradients of adamw parameters are written to p.grad
    step       owners add up the gradients that arrived (`collect`)

Owners stack the gradients of a unit as ``[batch, rows, cols]``. Under tensor parallelism a matrix
arrives in slices, one at each rank with the owner's data coordinates, and the step assembles them.

A gradient that is not dense cannot be reduced: every rank raises at the end of that backward, or,
if the host would have to wait for the device, at the next step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dmuon.comm.buckets import EVERYONE, Buffer, GradientBucket, Segment, Slices
from dmuon.comm.process_groups import ProcessGroups
from dmuon.comm.routes import Part, places
from dmuon.comm.transport import Work, side_stream, wait_all
from dmuon.devices import HostCopy, host_can_read
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import DmuonError, OwnershipError, State, grouped

# ---- stacks of a unit ------------------------------------------------------------------------


def rows_of(stack: Tensor, where: list[int]) -> Tensor:
    """Return the matrices of ``[b, m, n]`` at increasing positions; the stack itself if all."""
    # No index tensor: copying it to an accelerator would wait for the device.
    return stack if len(where) == len(stack) else torch.stack([stack[k] for k in where])


def set_rows(stack: Tensor, where: list[int], rows: Tensor) -> None:
    """Write ``rows`` to increasing positions of ``stack``, in its dtype."""
    if len(where) == len(stack):
        stack.copy_(rows)
    else:
        torch._foreach_copy_([stack[k] for k in where], list(rows.unbind()))


def unstacker(specs: ModelSpecs, unit: Unit) -> Callable[[Tensor], list[Tensor]]:
    """Return a function from a unit's stack to views of its matrices in their parameters' dims."""
    parts = []
    for k, i in enumerate(unit.matrices):
        spec = specs.matrices[i]
        box = spec.box(specs.parameters[spec.parameter].shape)
        parts.append(Part(-1, k, (i,), box, box.shape, spec.form, unit.holds_transpose(k)))
    return lambda stack: [places(stack, part)[0] for part in parts]


class OwnedGradients:
    """The gradients of matrices owned at this rank's data coordinates. This rank computes the units
    ``mine``, the ranks with its data coordinates together the units ``near``. ``here`` has the
    gradients by matrix, in the parameter's dims: views of the owner's stacks, or this rank's slices
    of matrices that tensor parallelism cuts."""

    def __init__(
        self,
        slices: Slices,
        units: Sequence[Unit],
        rank: int,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.slices = slices
        specs = slices.plan.specs
        self.place = place = slices.grid.place(rank)
        self.mine = [u for u in units if u.owner == rank]
        self.near = [u for u in units if slices.place_of[u.matrices[0]][:2] == place[:2]]
        self.here: dict[int, Tensor] = {}
        self._stacks: dict[int, Tensor] = {}  # by a unit's first matrix
        for unit in self.near:
            dtype = reduce_dtype or getattr(torch, specs.matrices[unit.matrices[0]].dtype)
            cut = [i for i in unit.matrices if slices.is_cut(i)]
            if unit.owner == rank and len(cut) < len(unit.matrices):
                stack = torch.zeros(unit.shape, dtype=dtype, device=device)
                self._stacks[unit.matrices[0]] = stack
                self.here |= zip(unit.matrices, unstacker(specs, unit)(stack), strict=True)
            for i in cut:
                _, box = slices.held(i, self.place[2])
                self.here[i] = torch.zeros(box.shape, dtype=dtype, device=device)

    def stack(self, unit: Unit) -> Tensor:
        """Return the gradients of a unit that lies whole on this rank, ``[b, m, n]``."""
        return self._stacks[unit.matrices[0]]

    def collected(self, present: Sequence[bool]) -> dict[int, Tensor]:
        """Return the gradients kept here, by matrix, of parameters with a gradient."""
        matrices = self.slices.plan.specs.matrices
        return {i: g for i, g in self.here.items() if present[matrices[i].parameter]}


# ---- rounds ----------------------------------------------------------------------------------


class RoundState(State):
    """The progress of reducing gradients, since they were last cleared.

    ::

        state      meaning                                                      may become
        NONE       no round has been made                                       OPEN
        OPEN       a backward pass runs, or has raised                          DONE, OPEN_OWED
        OPEN_OWED  the same, and another round must follow                      OWED
        DONE       a round has ended and has reduced all of ``p.grad``          OPEN, OWED, NONE
        OWED       ``p.grad`` may hold gradients that no round has reduced      OPEN, NONE
    """

    NONE = "none", "OPEN"
    OPEN = "open", "DONE OPEN_OWED"
    OPEN_OWED = "open, another one owed", "OWED"
    DONE = "done", "OPEN OWED NONE"
    OWED = "owed", "OPEN NONE"


# Buckets whose memory backward keeps on an accelerator; a side stream waits for older ones.
UNDER_WAY = 4


class _LiveSegment:
    """A segment with its buffer, cut into views of its spans, and its collectives under way.
    ``deliveries``: tensors that collect the gradients owned here, and views to add to them.
    ``to_relay``: whether a reduction along replicas must follow."""

    def __init__(self, segment: Segment, owned: OwnedGradients, device: torch.device) -> None:
        is_here = segment.shard == owned.place[1]
        dtype = getattr(torch, segment.dtype)
        self.segment = segment
        self.buffer = Buffer(torch.empty(segment.numel, dtype=dtype, device=device))
        self.views = list(self.buffer.flat.split([span.numel for span in segment.spans]))
        self.deliveries: tuple[list[Tensor], list[Tensor]] = [], []
        for span, view in zip(segment.spans, self.views) if is_here else ():
            sizes = [owned.slices.held(i, owned.place[2])[1].numel for i in span.matrices]
            for i, part in zip(span.matrices, view.split(sizes)):
                if i in owned.here:
                    self.deliveries[0].append(owned.here[i])
                    self.deliveries[1].append(part.view(owned.here[i].shape))
        self.works: list[Work] = []
        self.to_relay = False
        self.relays = is_here and owned.slices.grid.shape[0] > 1
        self.buffer.release()

    def relay(self, groups: ProcessGroups) -> None:
        """Reduce along the replicas the result of the reduction along the shards."""
        wait_all(self.works)
        self.to_relay, tag = False, "gradients across replicas"
        numels = [0] * groups.replicas.world
        for span in self.segment.spans:  # in the order of replicas
            numels[span.replica] += span.numel
        groups.meter[tag] += self.buffer.flat.nbytes
        parts = list(self.buffer.flat.split(numels))
        self.works.append(groups.replicas.reduce_scatter(parts, tag=tag))


class _LiveBucket:
    """A bucket with its segments, and the views of them that gradients are written to: ``targets``,
    (first element of the gradient, view). Segments of one dtype go to owners in one collective."""

    def __init__(self, bucket: GradientBucket, owned: OwnedGradients, device: torch.device) -> None:
        self.segments = [_LiveSegment(segment, owned, device) for segment in bucket.segments]
        self._slices = owned.slices
        self._scale = 1.0 / math.prod(owned.slices.grid.shape[:2])  # over the data ranks
        self.targets: dict[int, list[tuple[int, Tensor]]] = {p: [] for p in bucket.parameters}
        for live in self.segments:
            for span, view in zip(live.segment.spans, live.views, strict=True):
                self.targets[span.parameter].append((span.start, view))
        self._averaged = [live for live in self.segments if live.segment.shard == EVERYONE]
        # By dtype: the segments for owners, and the buffer for each shard coordinate.
        self._reduced: list[tuple[list[_LiveSegment], list[Tensor]]] = []
        owned_ones = [live for live in self.segments if live.segment.shard != EVERYONE]
        for mine in grouped((live.segment.dtype, live) for live in owned_ones).values():
            parts = [mine[0].buffer.flat[:0]] * owned.slices.grid.shape[1]
            for live in mine:
                parts[live.segment.shard] = live.buffer.flat
            self._reduced.append((mine, parts))

    def send(self, groups: ProcessGroups) -> None:
        for segments, parts in self._reduced:
            work = groups.gradients.reduce_scatter(parts, tag="gradients")
            for live in segments:
                live.works, live.to_relay = [work], live.relays
        for live in self._averaged:
            live.works = [groups.data.all_reduce(live.buffer.flat, tag="rest")]
        groups.meter["gradients"] += sum(live.buffer.flat.nbytes for live in self.segments)

    def fill(self, parameter: int, grad: Tensor | None, *, add: bool) -> None:
        """Write, or add, a share of the mean gradient (zeros for None) to its buffers."""
        for live in self.segments:
            live.buffer.hold()
        flat = None if grad is None else self._slices.flat_of(parameter, grad.detach())
        for start, view in self.targets[parameter]:
            if flat is None:
                view.zero_()
                continue
            part = flat.narrow(0, start, view.numel())
            if add:
                view.add_(part, alpha=self._scale)
            elif part.dtype is view.dtype:
                torch.mul(part, self._scale, out=view)
            else:
                view.copy_(part).mul_(self._scale)  # in the wider dtype


class _Flags:
    """Flags of parameters with a gradient on any rank, and of those whose gradient cannot be
    reduced. They are combined by maximum, because a sum over enough ranks would overflow."""

    def __init__(self, names: Sequence[str], groups: ProcessGroups, device: torch.device) -> None:
        self._names = names
        self._groups = groups
        self._flags = torch.zeros(2 * len(names), dtype=torch.uint8, device=device)
        # Copies under way to a host that does not wait: from rounds since `clear`, and before.
        self._recent: list[HostCopy] = []
        self._earlier: list[HostCopy] = []

    def agree(self, local: list[bool], unusable: list[bool], *, complete: bool) -> list[bool]:
        """Return whether each parameter has a gradient on any rank. ``complete``: all have a dense
        gradient here. DmuonError if any gradient cannot be reduced; if the host cannot read that,
        `raise_noted` raises it."""
        number, flags = len(self._names), self._flags
        flags.zero_()
        if complete:
            flags[:number].fill_(1)
        else:
            flags.copy_(torch.tensor(local + unusable, dtype=torch.uint8))
        self._groups.meter["flags"] += flags.nbytes
        self._groups.world.all_reduce(flags, tag="flags", maximum=True).wait()
        if not host_can_read(flags.device):
            # Whether a rank reads them depends on its own gradients, so no rank raises here.
            self._recent.append(HostCopy(flags))
            # If all are present here, each is present on some rank.
            return [True] * number if complete else [*map(bool, flags[:number].tolist())]
        found = flags.tolist()
        self._check(found)
        return [*map(bool, found[:number])]

    def _check(self, flags: Sequence[int], when: str = "") -> None:
        """Raise DmuonError, the same on every rank, if a gradient on any rank was unusable."""
        flagged = zip(self._names, flags[len(self._names) :])
        for name in (name for name, unusable in flagged if unusable):
            raise DmuonError(
                f"parameter {name!r} got a gradient that is not dense (a sparse layout) on some "
                f"rank{when}; dmuon needs dense gradients (for an embedding: sparse=False)"
            )

    def clear(self) -> None:
        self._earlier += self._recent
        self._recent = []

    def raise_noted(self) -> None:
        """Raise DmuonError if a round before the last `clear` got an irreducible gradient."""
        earlier, self._earlier = self._earlier, []
        when = " in the backward before the last step, which counted it as missing"
        for copy in earlier:
            self._check(copy.read(), when)


class _Round:
    """This rank's part in the open round."""

    def __init__(self, parameters: int, buckets: Sequence[_LiveBucket]) -> None:
        self.local = [False] * parameters  # whether there is a gradient
        self.unusable = [False] * parameters  # whether it cannot be reduced
        self.arrived = [0] * parameters  # gradients accumulated
        self.waiting = [set(bucket.targets) for bucket in buckets]  # parameters, by bucket
        self.launched = 0  # buckets launched


@dataclass(eq=False, repr=False)
class GradientReducer:
    """Carries out rounds: matrices' gradients go to ``owned``, averaged gradients of adamw
    parameters to ``p.grad``; parameters in no bucket take no part. ``expected`` is how many
    gradients one backward accumulates into each parameter: more than one if its storage changed its
    dtype between uses."""

    parameters: Sequence[nn.Parameter]
    _groups: ProcessGroups
    buckets: InitVar[Sequence[GradientBucket]]
    owned: OwnedGradients

    def __post_init__(self, buckets: Sequence[GradientBucket]) -> None:
        parameters, owned = self.parameters, self.owned
        self.sync = True
        self.state = RoundState.NONE
        self.rounds = 0  # ended since `clear`
        self.present = [False] * len(parameters)  # whether any rank had a gradient in any of them
        self.expected = dict.fromkeys(range(len(parameters)), 1)
        # Averaged gradients of adamw parameters: the address and version of each.
        self._noted: dict[int, tuple[int, int]] = {}
        device = parameters[0].device
        names = [spec.name for spec in owned.slices.plan.specs.parameters]
        self.flags = _Flags(names, self._groups, device)
        self._side = side_stream(device)
        if self._side is not None:
            for grad in owned.here.values():  # their memory may be freed before that stream is done
                grad.record_stream(self._side.stream)
        self._under_way: list[_LiveSegment] = []
        self._buckets = [_LiveBucket(bucket, owned, device) for bucket in buckets]
        self._round = _Round(len(parameters), self._buckets)
        bucket_of = {p: b for b, bucket in enumerate(self._buckets) for p in bucket.targets}
        self._bucket_of = dict(sorted(bucket_of.items()))

    @property
    def open(self) -> bool:
        """Whether a round has begun and not ended: its backward runs, or has raised."""
        return self.state in (RoundState.OPEN, RoundState.OPEN_OWED)

    def _name(self, parameter: int) -> str:
        return self.owned.slices.plan.specs.parameters[parameter].name

    def _is_matrix(self, parameter: int) -> bool:
        return parameter in self.owned.slices.matrices_of

    # ---- a round -----------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Return names of the parameters without a gradient, taken or not, in this round."""
        not_taken = [p for p in self._bucket_of if not self._round.arrived[p]]
        return [self._name(p) for p in not_taken if self.parameters[p].grad is None]

    def begin(self) -> None:
        """Start a round. The round of a failed backward was finished before; DDP raises then."""
        if self._noted and not any(map(self._is_as_noted, self._noted)):
            self.clear()  # model.zero_grad() cleared the others, so owners' go too
        self.collect()
        self.state = self.state.to(RoundState.OPEN)
        self._round = _Round(len(self.parameters), self._buckets)

    def take(self, parameter: int, grad: Tensor | None) -> None:
        """Copy a local gradient (None: zero) into its bucket; DmuonError if the bucket has left."""
        found, b = self._round, self._bucket_of[parameter]
        if grad is not None and grad.layout is not torch.strided:
            found.unusable[parameter] = True
            self.parameters[parameter].grad = grad = None
        again = found.arrived[parameter] > 0
        if grad is not None:
            found.local[parameter] = True
            if again and b < found.launched:
                # Nested backward calls of a module that runs several times.
                raise DmuonError(
                    f"parameter {self._name(parameter)!r} got a second gradient in one backward, "
                    "after its first had been sent: a module that runs several times under "
                    "re-entrant checkpointing. Use checkpoint(..., use_reentrant=False)"
                )
        if grad is not None or not again:
            # A matrix's p.grad was emptied after the first gradient; others hold the sum of both.
            self._buckets[b].fill(parameter, grad, add=again and self._is_matrix(parameter))
        found.arrived[parameter] += 1
        if found.arrived[parameter] >= self.expected[parameter]:
            found.waiting[b].discard(parameter)

    def gradient_of(self, parameter: int) -> Tensor | None:
        """Return the local part of the parameter's ``grad``."""
        p = self.parameters[parameter]
        if p.grad is None or type(p.grad) is Tensor:
            return p.grad
        return local_tensor(gradient_like(p.grad, p))

    def accumulated(self, parameter: int) -> None:
        """Take a parameter's ``grad`` that autograd has accumulated into; send full buckets."""
        self.take(parameter, self.gradient_of(parameter))
        if self._is_matrix(parameter):
            self.parameters[parameter].grad = None  # its memory is free until backward ends
        self.launch_ready()

    def launch_ready(self) -> None:
        """Send every bucket that is full and whose predecessors have left."""
        found = self._round
        while found.launched < len(self._buckets) and not found.waiting[found.launched]:
            bucket = self._buckets[found.launched]
            bucket.send(self._groups)
            self._under_way += bucket.segments
            found.launched += 1
            # Arrival depends on timing, so this issues nothing and waits for nothing: another rank
            # may launch its part only at the end of its backward.
            here = [live for live in self._to_owners() if not live.to_relay]
            self.collect([s for s in here if all(work.is_completed() for work in s.works)])
            self._collect_on_side_stream()

    def _to_owners(self) -> list[_LiveSegment]:
        return [live for live in self._under_way if live.segment.shard != EVERYONE]

    def _collect_on_side_stream(self) -> None:
        """Collect all but the last buckets on a side stream, on an accelerator, whose host runs
        ahead and finds few that have arrived. The current stream must not wait: a rank that skipped
        a block sends its part only at the end of its backward, and may first need collectives that
        this rank has queued behind the wait."""
        if self._side is None:
            return
        latest = self._buckets[: self._round.launched][-UNDER_WAY:]
        kept = {id(live) for bucket in latest for live in bucket.segments}
        if not (old := [s for s in self._to_owners() if not s.to_relay and id(s) not in kept]):
            return
        for live in old:
            live.buffer.flat.record_stream(self._side.stream)
        with self._side.current():
            self.collect(old)

    def give_up(self, parameters: Iterable[int]) -> None:
        """Expect no more gradients of ``parameters`` in this round, and send their buckets."""
        for p in parameters:
            if not self._round.arrived[p]:
                self.take(p, self.gradient_of(p))
            self._round.waiting[self._bucket_of[p]].discard(p)
        self.launch_ready()

    def finish(self) -> None:
        """End the round, if it is open: send missing gradients as zeros, and agree on who took
        part. DmuonError, on every rank, as in `_Flags.agree`."""
        if not self.open:
            return  # each nested backward (re-entrant checkpointing) ends once
        self.give_up([p for waiting in self._round.waiting for p in sorted(waiting)])
        # Every rank has sent every bucket of the round by now, and this keeps the order of the
        # first level, so it is equal on all ranks of a column, even if some are fast. Until then an
        # owner's column holds its sums, which take as much memory as its weights.
        for live in self._to_owners():
            if live.to_relay:
                live.relay(self._groups)
        is_owed = self.state is RoundState.OPEN_OWED
        self.state = self.state.to(RoundState.OWED if is_owed else RoundState.DONE)
        self.rounds += 1
        local, unusable = self._round.local, self._round.unusable
        complete = all(local[p] for p in self._bucket_of) and not any(unusable)
        anywhere = self.flags.agree(local, unusable, complete=complete)
        self._write_averaged(anywhere)
        for p in self._bucket_of:
            self.present[p] = self.present[p] or anywhere[p]
            if self._is_matrix(p):
                # Otherwise a second backward would add to it and reduce the sum again.
                self.parameters[p].grad = None

    def _write_averaged(self, anywhere: list[bool]) -> None:
        grads, means = [], []
        averaged = [live for live in self._under_way if live.segment.shard == EVERYONE]
        self._under_way = self._to_owners()
        for live in averaged:
            wait_all(live.works)
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
        for live in averaged:
            live.buffer.release()
        self.note_averaged()

    # ---- changes of gradients from outside ---------------------------------------------------

    def note_averaged(self) -> None:
        """Record gradients in ``p.grad``, so that a later change of these alone is noticed."""
        self._noted = {
            p: (grad.data_ptr(), grad._version)
            for p in self._bucket_of
            if not self._is_matrix(p) and (grad := self.parameters[p].grad) is not None
        }

    def _is_as_noted(self, parameter: int, *, exactly: bool = False) -> bool:
        """Whether a gradient is the recorded one, which backward may change unless ``exactly``."""
        grad, (pointer, version) = self.parameters[parameter].grad, self._noted[parameter]
        if grad is None or grad.data_ptr() != pointer:
            return False
        return grad._version == version if exactly else grad._version >= version

    def _check_changes(self, accumulated: bool) -> None:
        """Clear after ``model.zero_grad()``; raise OwnershipError if, after the round, only the
        gradients in ``p.grad`` were changed, or a matrix's gradient was set (see `ensure`)."""
        if self.state is not RoundState.DONE:
            return
        if self._noted and all(self.parameters[p].grad is None for p in self._noted):
            self.clear()
            return
        for p in self._noted:
            if self.parameters[p].grad is not None and not self._is_as_noted(p, exactly=True):
                raise OwnershipError(
                    f"the gradient of {self._name(p)!r} was changed after backward, and those of "
                    "matrices, which lie with their owners, were not: clip with "
                    "dmuon.clip_grad_norm_(model, ...) instead of torch.nn.utils.clip_grad_norm_, "
                    "clear with opt.zero_grad(), or leave reduce_to_owner out"
                )
        matrices = filter(self._is_matrix, self._bucket_of)
        left = next((p for p in matrices if self.parameters[p].grad is not None), None)
        if left is not None and not accumulated:
            raise OwnershipError(
                f"{self._name(left)!r} has a p.grad that was set after backward. Its owner has the "
                "reduced gradient already, so this one would be lost: change gradients in a hook "
                "(p.register_hook), or (layout='replicated') set all of them and run no backward"
            )
        if left is not None:
            self.state = self.state.to(RoundState.OWED)

    # ---- between rounds ----------------------------------------------------------------------

    def set_sync(self, sync: bool) -> None:
        """Set whether backward begins rounds."""
        if sync and not self.sync and self.state is not RoundState.NONE:
            # The next backward, or `step`, must reduce gradients accumulated meanwhile.
            self.state = self.state.to(RoundState.OPEN_OWED if self.open else RoundState.OWED)
        self.sync = sync

    def begin_owed(self) -> None:
        """Start the round that other ranks wait for, if there was none here."""
        if self.state in (RoundState.NONE, RoundState.OWED):
            self.begin()

    def ensure(self, check: Callable[[], None], *, accumulated: bool = False) -> None:
        """Ensure that there was a round since `clear`, and that none is open, as `step` and
        clipping need. A rank whose backward reached no parameter joins the other ranks' round here;
        if ``check`` raises, or a gradient set after the round would be lost, the rank joins first
        and raises then. ``accumulated``: a wrapper may have left gradients for the next round."""
        self.flags.raise_noted()
        flaw: DmuonError | None = None
        try:
            check()
            self._check_changes(accumulated)
        except DmuonError as error:  # may concern this rank alone
            flaw = error
        self.begin_owed()
        self.finish()
        self.collect()
        if flaw is not None:
            raise flaw

    def collect(self, arrived: Sequence[_LiveSegment] | None = None) -> None:
        """Wait for segments (None: all) and add up the gradients that are owned here."""
        if arrived is None and self._side is not None:
            self._side.join()
        # All segments may include averaged gradients, from a round that ended with an error.
        segments = self._under_way if arrived is None else arrived
        for live in segments:
            wait_all(live.works)
        into, parts = ([t for s in segments for t in s.deliveries[k]] for k in (0, 1))
        if into:
            first = self.rounds == (0 if self.open else 1)
            (torch._foreach_copy_ if first else torch._foreach_add_)(into, parts)
        for live in segments:
            live.buffer.release()
        self._under_way = [live for live in self._under_way if live not in segments]

    def clear(self) -> None:
        """Forget the gradients reduced so far, as `zero_grad` does."""
        self.finish()
        self.collect()
        self.flags.clear()
        self.state = self.state.to(RoundState.NONE)
        self.rounds = 0
        self._noted = {}
        self.present[:] = [False] * len(self.parameters)


# ---- start and end of a round ----------------------------------------------------------------


def at_end_of_backward(callback: Callable[[], None]) -> None:
    # The engine's own queue, as in FSDP2: there is no public callback for the end of backward.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def hook_gradients(
    parameters: Iterable[tuple[int, Tensor]], accumulated: Callable[[int], None]
) -> list[Callable[[], None]]:
    """Call the method ``accumulated(number)`` for each parameter with a new gradient."""
    # The engine keeps hooks out of reach of the garbage collector, so a strong reference lasts.
    weak = weakref.WeakMethod(accumulated)

    def on_gradient(number: int, _: Tensor) -> None:
        if (accumulated := weak()) is not None:
            accumulated(number)

    hooks = [(p, partial(on_gradient, number)) for number, p in parameters]
    return [p.register_post_accumulate_grad_hook(hook).remove for p, hook in hooks]


# A `DistributedDataParallel` accepts one communication hook, once. The hook passes buckets to the
# callback in this list; if there is none, it does what DDP does by default.
_handed_to: weakref.WeakKeyDictionary[DistributedDataParallel, list[Callable[[Any], None]]] = (
    weakref.WeakKeyDictionary()
)


def hook_ddp(
    ddp: DistributedDataParallel, on_bucket: Callable[[Any], None]
) -> list[Callable[[], None]]:
    """Let DDP pass its buckets to ``on_bucket`` instead of reducing them."""
    if (to := _handed_to.get(ddp)) is None:
        to, group = [], ddp.process_group

        # No annotations, because DDP compares them with types, and ours are strings.
        def hand_over(to, bucket):
            if not to:
                return allreduce_hook(group, bucket)
            to[0](bucket)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        try:
            ddp.register_comm_hook(to, hand_over)
        except RuntimeError as error:
            raise OwnershipError(
                "DistributedDataParallel did not accept dmuon's communication hook; it takes one "
                f"only, so do not register another ({error})"
            ) from error
        _handed_to[ddp] = to
    to[:] = [on_bucket]
    return [to.clear]
