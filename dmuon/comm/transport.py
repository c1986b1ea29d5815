"""Collectives that move bytes between ranks."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.devices import SideStream, Stopwatch, host_can_read, of
from dmuon.types import ConsensusError, OwnershipError


class Work:
    """A pending collective; this base class is complete. ``wait`` blocks the host on CPU, the
    current stream on CUDA."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


Finish = Callable[[], object]
Gathering = Literal["messages", "ring", "broadcasts"]


def wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


class Transport:
    """Collectives over the ranks 0 .. world-1 of one mesh; every rank issues them in one order.

    All tensor operations are in place, asynchronous, and take contiguous tensors; ``tag`` names
    their purpose. Object operations block. This base class is for one rank, the identity.
    """

    rank = 0
    world = 1
    failed = False  # whether a collective has failed; ranks may then be at different ones

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        """Sum (or take the maximum of) ``tensor`` over the ranks, everywhere."""
        return Work()

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Work:
        """Copy ``tensor`` from ``src`` to every rank."""
        return Work()

    def all_gather(self, parts: Sequence[Tensor], *, tag: str, by: Gathering = "messages") -> Work:
        """Copy ``parts[r]`` from rank r to every rank: a `broadcast` from each of them. Parts are
        1-D, of one dtype and any sizes; at least one is not empty. ``by`` matters only on gloo, for
        parts of similar size: direct messages, or a ring that relays them; broadcasts relay along
        trees and need no extra copy."""
        return Work()

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        """Sum ``parts[r]``, as in `all_gather`, into rank r; elsewhere it becomes undefined."""
        return Work()

    def all_to_all(
        self, output: Tensor, source: Tensor, came: Sequence[int], sent: Sequence[int], *, tag: str
    ) -> Work:
        """Send consecutive pieces of ``source`` to the ranks in order, and receive theirs. Both are
        1-D; ``sent[r]`` elements go to rank r, and ``came[r]`` come from it."""
        output.copy_(source)
        return Work()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, by rank."""
        return [value]

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Return ``value`` of rank ``src``, on every rank."""
        return value

    def meet(self, call: str) -> None:
        """Wait until every rank has come to ``call``; OwnershipError if one does not."""

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """Return all ranks as a mesh of one axis; None if there is only one rank."""
        return None

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Transport:
        """Return a transport over this rank's part of a partition of the ranks; collective."""
        return self

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Issued(Work):
    """Collectives that count as one. With ``finish`` the host waits, and calls it once."""

    transport: C10dTransport
    tag: str
    works: list[dist.Work]
    finish: Finish | None = None

    def wait(self) -> None:
        with self.transport.located(self.tag):
            for work in self.works:
                work.wait()
        if self.finish is not None:
            finish, self.finish, self.works = self.finish, None, []
            finish()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


_SMALL_SUM = 1 << 20  # bytes, of all ranks together
# Up to this size reductions on gloo use messages, which need a copy but send less than its rings.
_SMALL = 64 << 20
# Backends that accept lists of tensors of different sizes and launch them together: torch groups
# one broadcast, or reduction, per rank; NCCL skips empty ones.
_GROUPING = ("nccl", "xccl")


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend for tensors of a device in a process group, such as "gloo"."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":") for pair in pairs).get(device.type, "")


_PLANNING = "planning, at dedicate_params or the first step, on all ranks"
_PATIENCE_S = 1800.0  # for the last rank to come to planning; torch's default for new groups

_Key = tuple[tuple[int, ...], float | None]
_Kept = tuple["weakref.ref[dist.ProcessGroup]", _Key | None]
# Unused groups over some of the ranks, by (ranks, timeout). torch names such a group after its
# ranks and the number of live groups, and the store never forgets a name: a new group under an old
# name would find old addresses. So groups are kept and reused.
_idle: dict[_Key, list[weakref.ref[dist.ProcessGroup]]] = {}
# Groups, by name, whose transports were dropped with their models and never closed, with their key
# in `_idle` or None.
_dropped: dict[str, _Kept] = {}


def splits_communicators() -> bool:
    """Whether torch makes a new group by splitting the communicator of all ranks, which all of them
    join: with NCCL if `init_process_group` got a ``device_id``."""
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return is_bound and dist.get_backend() != "gloo"


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long a collective of a group waits for a rank; None if the backend does not say.
    Reads private names, because `ProcessGroup.set_timeout` has no public counterpart."""
    with suppress(AttributeError, RuntimeError):
        assert group is not None
        found = [group._get_backend(d).options._timeout for d in group._device_types]
        return max(found, default=None)
    return None


def _is_even(parts: Sequence[Tensor], most: float = math.inf) -> bool:
    """Whether all parts have at most ``most`` bytes, and no rank's messages would take long."""
    sizes = [part.nbytes for part in parts]
    total, largest = sum(sizes), max(sizes)
    return largest < total <= most and (len(sizes) - 1) * largest <= 2 * total


def _unequal(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Make the sizes of ``parts`` unequal, and return the element cut off the first part for that:
    torch would send equal parts through another buffer as large as all of them."""
    first, *others = parts
    if any(part.numel() != first.numel() for part in others):
        return [*parts], []
    return [first[:-1], *others], [first[-1:]]


class C10dTransport(Transport):
    """`torch.distributed` over a process group of its own: a rank that lacks a gradient issues a
    bucket later than others do, and must not cross with, say, the user's batch norm."""

    steps: ClassVar[int] = 0  # of the optimizer that stepped last, for error messages

    def __init__(
        self,
        ranks: Sequence[int],
        timeout_s: float | None = None,
        *,
        parent: dist.ProcessGroup | None = None,
        partition: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """A collective call of ``ranks``, or of all ranks in ``partition``, which contains them.
        ``parent``: a process group of all callers. OwnershipError if torch needs other ranks."""
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        parts = [[*ranks]] if partition is None else [list(part) for part in partition]
        callers = sum(map(len, parts))
        key = (tuple(sorted(ranks)), timeout_s)
        everyone = len(ranks) == dist.get_world_size()
        splits = not everyone and splits_communicators()
        reused = not everyone and not splits and callers < dist.get_world_size()
        group: dist.ProcessGroup | None = None
        if splits:
            known = [] if parent is None else dist.get_process_group_ranks(parent)
            if len(known) != callers or known != sorted(known):
                raise OwnershipError(
                    f"init_process_group(device_id=...) has all {dist.get_world_size()} ranks join "
                    f"in making any process group, and this mesh has only {callers} of them and is "
                    "no group that could be split: leave device_id out and call torch.accelerator."
                    "set_device_index(local_rank) before, or pass a mesh of one axis"
                )
            numbers = [[known.index(rank) for rank in part] for part in parts]
        with self.located(_PLANNING):
            if everyone:
                group = dist.new_group(list(ranks), timeout=timeout)
            elif splits:
                # One call for any number of parts.
                group = dist.split_group(parent, numbers, timeout=timeout)
            elif not reused:
                group, _ = dist.new_subgroups_by_enumeration(parts, timeout=timeout)
            else:
                known_groups = _idle.get(key, [])
                while known_groups and group is None:
                    group = known_groups.pop()()
                if group is None:
                    # A mesh over some of the ranks cannot ask the other ranks to join.
                    group = dist.new_group(
                        list(ranks), timeout=timeout, use_local_synchronization=True
                    )
        assert group is not None, "a group that this rank is no member of"
        # torch.distributed keeps the group. A strong reference here would keep its threads running
        # after destroy_process_group(), until the interpreter's exit aborts them.
        self._group = weakref.ref(group)
        self._kept: _Kept = (self._group, key if reused else None)
        # Only recorded, because ranks drop it at different times, perhaps amid other collectives.
        self._drop = weakref.finalize(self, _dropped.__setitem__, group.group_name, self._kept)
        self._drop.atexit = False
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._timeout_s = timeout_s

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; OwnershipError once it has been destroyed."""
        if (group := self._group()) is None:
            raise OwnershipError(
                "dmuon's process group is gone: torch.distributed was shut down, or the ownership "
                "closed. Call dmuon.dedicate_params(model) again"
            )
        return group

    def _issue(
        self, tag: str, *collectives: Callable[..., dist.Work | None], finish: Finish | None = None
    ) -> Work:
        with self.located(tag):
            found = [issue(group=self.group, async_op=True) for issue in collectives]
        works = [work for work in found if work is not None]
        assert len(works) == len(found), "a collective on a group that this rank is no member of"
        return _Issued(self, tag, works, finish)

    @contextmanager
    def located(self, tag: str) -> Iterator[None]:
        """Say in errors raised inside where this rank was, and what to do."""
        try:
            if self.failed:
                raise RuntimeError("one of its process group has failed before")
            yield
        except RuntimeError as error:
            self.failed = True
            raise RuntimeError(
                f"a collective of dmuon ({tag!r}) failed or timed out after {self.steps} steps: "
                f"{error}. Most likely another rank did not come to it: it died or raised an error "
                "(look at the output of all ranks), or its hyperparameters or period differ. Ranks "
                "may be in different steps: stop them all and continue from the last checkpoint, "
                "as torchrun --max-restarts=N does"
            ) from error

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        if tensor.is_cpu and 0 < self.world * tensor.nbytes <= _SMALL_SUM:
            # gloo would take 2 (world - 1) turns, one after the other, and this takes one.
            came, sent = tensor.new_empty((2, self.world, tensor.numel()))
            sent.copy_(tensor.view(-1))
            reduce: Callable[..., Tensor] = torch.amax if maximum else torch.sum

            def finish() -> None:  # sums in the order of ranks, everywhere
                tensor.copy_(reduce(came, 0).view(tensor.shape))

            return self._issue(tag, partial(dist.all_to_all_single, came, sent), finish=finish)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._issue(tag, partial(dist.all_reduce, tensor, op=op))

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Work:
        return self._issue(tag, partial(dist.broadcast, tensor, group_src=src))

    def all_gather(self, parts: Sequence[Tensor], *, tag: str, by: Gathering = "messages") -> Work:
        mine, ranks = parts[self.rank], [r for r, part in enumerate(parts) if part.numel()]
        backend = backend_of(mine.device, self.group)
        if len(ranks) > 1 and backend in _GROUPING:
            listed, last = _unequal(parts)
            calls = [partial(dist.broadcast, part, group_src=0) for part in last]
            calls.append(partial(dist.all_gather, listed, listed[self.rank]))
        elif by != "broadcasts" and backend == "gloo" and mine.is_cpu and _is_even(parts):
            others = [r for r in range(self.world) if r != self.rank]
            numels = [part.numel() for part in parts]
            if by == "ring":
                came = mine.new_zeros((self.world, max(numels)))  # rows of equal size
                came[self.rank, : mine.numel()].copy_(mine)
                exchange = partial(dist.all_gather, [*came], came[self.rank])
                found = [came[r, : numels[r]] for r in others]
            else:
                coming, going = numels.copy(), [mine.numel()] * self.world
                coming[self.rank] = going[self.rank] = 0
                came, sent = mine.new_empty(sum(coming)), mine.repeat(self.world - 1)
                exchange = partial(dist.all_to_all_single, came, sent, coming, going)
                found = [*came.split([numels[r] for r in others])]
            finish = partial(torch._foreach_copy_, [parts[r] for r in others], found)
            return self._issue(tag, exchange, finish=finish)
        else:
            calls = [partial(dist.broadcast, parts[r], group_src=r) for r in ranks]
        return self._issue(tag, *calls)

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        mine, ranks = parts[self.rank], [r for r, part in enumerate(parts) if part.numel()]
        backend = backend_of(mine.device, self.group)
        if len(ranks) > 1 and backend in _GROUPING:
            listed, last = _unequal(parts)
            calls = [partial(dist.reduce, part, group_dst=0) for part in last]
            calls.append(partial(dist.reduce_scatter, listed[self.rank], listed))
        elif backend == "gloo" and _is_even(parts, _SMALL):
            # Several times as fast as gloo's reductions: each rank adds up what the others send.
            sent = [part.numel() * (r != self.rank) for r, part in enumerate(parts)]
            came = mine.new_empty((self.world - 1, mine.numel()))
            splits = [mine.numel() * (r != self.rank) for r in range(self.world)], sent
            source = torch.cat([part for r, part in enumerate(parts) if r != self.rank])
            exchange = partial(dist.all_to_all_single, came.view(-1), source, *splits)

            def finish() -> None:  # in the order of ranks, so that rounding is the same everywhere
                for other in came[1 : self.rank]:
                    came[0].add_(other)
                for other in (*came[: min(self.rank, 1)], *came[self.rank :]):
                    mine.add_(other)

            return self._issue(tag, exchange, finish=finish)
        else:
            calls = [partial(dist.reduce, parts[r], group_dst=r) for r in ranks]
        return self._issue(tag, *calls)

    def all_to_all(
        self, output: Tensor, source: Tensor, came: Sequence[int], sent: Sequence[int], *, tag: str
    ) -> Work:
        splits = list(came), list(sent)
        return self._issue(tag, partial(dist.all_to_all_single, output, source, *splits))

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        with self.located("agreement of all ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any, src: int) -> Any:
        values = [value]
        with self.located("plan"):
            dist.broadcast_object_list(values, group_src=src, group=self.group)
        return values[0]

    def begin(self, flaw: str | None) -> None:
        """Make the first call of all ranks: release groups whose models are gone on all of them.
        OwnershipError if this rank has a flaw, ConsensusError if another rank has one."""
        with self.located(_PLANNING):
            found = self._met(self._timeout_s or _PATIENCE_S, flaw)
        if flaw is not None:
            raise OwnershipError(flaw)
        if found is not None:
            raise ConsensusError(f"dmuon.dedicate_params failed on {found}")
        mine = {n: kept for n, kept in _dropped.copy().items() if kept[0]() is not None}
        ranks = dist.get_process_group_ranks(self.group)
        names = dict(zip(ranks, self.gather_objects(sorted(mine)), strict=True))
        for name, kept in sorted(mine.items()):
            members = dist.get_process_group_ranks(kept[0]())
            if all(name in names.get(rank, ()) for rank in members):
                del _dropped[name]
                _release(*kept)

    def meet(self, call: str) -> None:
        try:
            self._met(self._timeout_s)
        except RuntimeError as error:
            raise OwnershipError(
                f"{call} is a collective call where momentum or weights lie with their owners, and "
                "another rank did not come to it: call it on every rank, not behind `if rank == "
                f"0`, and write the file on one; or that rank has died (after {self.steps} steps)"
            ) from error

    def _met(self, timeout_s: float | None, flaw: str | None = None) -> str | None:
        """Wait for all ranks, and return a flaw that one of them reported. This uses the store,
        because a collective that only some ranks issue could match another one of the others, and
        give wrong data instead of an error."""
        store, mine = self.group.get_group_store(), f"dmuon: meetings of rank {self.rank}"
        # Counted in the store, because a group may be reused, and its store never forgets.
        key = f"dmuon: meeting {store.add(mine, 1)}"
        flaws = f"{key}: flaws"
        if flaw is not None:
            store.set(f"{flaws} told", f"rank {self.rank}: {flaw}")
        store.add(flaws, int(flaw is not None))
        try:
            if store.add(key, 1) == self.world:
                store.set(f"{key} is complete", "")
            timeout = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
            store.wait([f"{key} is complete"], *timeout)
        except RuntimeError:
            with suppress(RuntimeError):  # the store may have died with its rank
                store.add(key, -1)
                store.add(mine, -1)
            raise
        return store.get(f"{flaws} told").decode() if store.add(flaws, 0) else None

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        if self.world == 1:
            return None
        # On groups that stay, because tensors outlive this transport, and torch remembers meshes.
        every = dist.group.WORLD if self.world == dist.get_world_size() else None
        return DeviceMesh.from_group(every or self.group, device.type)

    def end_planning(self) -> None:
        """From now on wait no longer than the default group, unless a timeout was given."""
        group, asked = self.group, timeout_of(dist.group.WORLD)
        now = timeout_of(group)
        if self._timeout_s is None and asked is not None and now is not None and asked < now:
            group.set_timeout(asked)

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Transport:
        every = dist.get_process_group_ranks(self.group)
        parts = [[every[rank] for rank in part] for part in partition]
        mine = next(part for part in parts if dist.get_rank() in part)
        return C10dTransport(mine, self._timeout_s, parent=self.group, partition=parts)

    def close(self) -> None:
        if self._drop.detach() is not None:
            _release(*self._kept)


class GivenTransport(C10dTransport):
    """A transport over a process group of the user's, for calls that no other work is amid."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._timeout_s = weakref.ref(group), None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)


def _release(reference: weakref.ref[dist.ProcessGroup], key: _Key | None) -> None:
    # The user may have shut down torch.distributed first, which destroys every group.
    if (group := reference()) is None or not dist.is_initialized():
        return
    if key is not None:
        _idle.setdefault(key, []).append(reference)
    else:
        dist.destroy_process_group(group)


class Meter(Counter[str]):
    """Bytes that this rank passed to collectives, by tag. ``waits`` has the times that it waited
    for them, on ``device``, by purpose; the caller that begins a step clears them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, Stopwatch] = {}

    def wait(self, purpose: str, works: list[Work]) -> None:
        """Call `wait_all`, timed."""
        if works:
            watch = self.waits.setdefault(purpose, Stopwatch(self.device))
            watch.start()
            wait_all(works)
            watch.stop()


# ---- devices -----------------------------------------------------------------------------


def connect(transport: Transport, device: torch.device, *, gathers: bool = False) -> None:
    """Run a first all-to-all, or all-gather, in an accelerator's process group; a collective call.
    It connects ranks and waits for them: in a step, two groups could wait for each other."""
    if host_can_read(device) or transport.world == 1:
        return
    sent, splits = torch.zeros(transport.world, device=device), [1] * transport.world
    if gathers:
        transport.all_gather(sent.split(splits), tag="connecting").wait()
    else:
        transport.all_to_all(torch.empty_like(sent), sent, splits, splits, tag="connecting").wait()


def side_stream(device: torch.device) -> SideStream | None:
    """Return a side stream; None if waiting blocks the host, as with gloo, or nothing travels."""
    if not dist.is_initialized() or backend_of(device) == "gloo":
        return None
    return of(device).side_stream()
