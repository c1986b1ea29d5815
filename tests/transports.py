"""Transports for tests and benchmarks: one that notes what is sent, and some that are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.internals import Transport, Work


@dataclass(frozen=True, slots=True)
class Event:
    """One collective as issued: what, for which purpose, how many bytes, and the peer if any, or
    the ranks that own a part of what is exchanged."""

    op: str
    tag: str
    nbytes: int
    peer: int | tuple[int, ...] | None = None


def exchanged(op: str, parts: Sequence[Tensor], tag: str) -> Event:
    owners = tuple(rank for rank, part in enumerate(parts) if part.numel())
    return Event(op, tag, sum(part.nbytes for part in parts), owners)


@dataclass
class RecordingTransport:
    """Passes everything on to ``inner`` and notes each collective in ``events``."""

    inner: Transport
    events: list[Event] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wrapped(self, work: Work, tag: str) -> Work:
        """What is given back of a collective."""
        return work

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        self.events.append(Event("all_reduce", tag, tensor.nbytes))
        return self.wrapped(self.inner.all_reduce(tensor, tag=tag, maximum=maximum), tag)

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Work:
        self.events.append(Event("broadcast", tag, tensor.nbytes, src))
        return self.wrapped(self.inner.broadcast(tensor, src, tag=tag), tag)

    def all_gather(self, parts: Sequence[Tensor], *, tag: str, by: Any = "messages") -> Work:
        self.events.append(exchanged("all_gather", parts, tag))
        return self.wrapped(self.inner.all_gather(parts, tag=tag, by=by), tag)

    def reduce_scatter(self, parts: Sequence[Tensor], *, tag: str) -> Work:
        self.events.append(exchanged("reduce_scatter", parts, tag))
        return self.wrapped(self.inner.reduce_scatter(parts, tag=tag), tag)

    def all_to_all(
        self, output: Tensor, source: Tensor, to: Sequence[int], sent: Sequence[int], *, tag: str
    ) -> Work:
        nbytes = (source.numel() - sent[self.rank]) * source.element_size()
        self.events.append(Event("all_to_all", tag, nbytes))
        return self.wrapped(self.inner.all_to_all(output, source, to, sent, tag=tag), tag)


@dataclass
class _CountedWork:
    inner: Work
    transport: CountingTransport

    def wait(self) -> None:
        self.inner.wait()
        self.transport.waited += 1


@dataclass
class CountingTransport(RecordingTransport):
    """Counts how often collectives with this tag are ``waited`` for; unless they are, nobody sees
    that they have come."""

    counts: str = ""
    waited: int = 0

    def wrapped(self, work: Work, tag: str) -> Any:
        return _CountedWork(work, self) if tag == self.counts else work


@dataclass
class Clock:
    """Seconds that pass only where somebody says so."""

    now: float = 0.0


@dataclass
class _TimedWork:
    inner: Work
    clock: Clock
    ready_at: float

    def wait(self) -> None:
        self.inner.wait()
        self.clock.now = max(self.clock.now, self.ready_at)

    def is_completed(self) -> bool:
        return self.clock.now >= self.ready_at and self.inner.is_completed()


@dataclass
class ClockTransport(RecordingTransport):
    """A slow network by a clock of its own, so that what is waited for can be counted exactly: each
    collective is done ``delay_s`` after its issue, and those in flight at once are so together.

    Who computes lets ``clock.now`` go on; every rank must do so alike.
    """

    delay_s: float = 0.02
    clock: Clock = field(default_factory=Clock)

    def wrapped(self, work: Work, tag: str) -> Work:
        return _TimedWork(work, self.clock, self.clock.now + self.delay_s)
