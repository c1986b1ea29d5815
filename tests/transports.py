"""Transports for tests and benchmarks: one that notes what is sent, and one that is slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.internals import Transport, Work

__all__ = ["Clock", "ClockTransport", "DelayingTransport", "Event", "RecordingTransport"]


@dataclass(frozen=True, slots=True)
class Event:
    """One collective as issued: what, for which purpose, how many bytes, and the peer if any."""

    op: str
    tag: str
    nbytes: int
    peer: int | None = None


@dataclass
class RecordingTransport:
    """Passes everything on to ``inner`` and notes each collective in ``events``."""

    inner: Transport
    events: list[Event] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world(self) -> int:
        return self.inner.world

    @property
    def failed(self) -> bool:
        return self.inner.failed

    def reduce(self, tensor: Tensor, dst: int, *, tag: str) -> Work:
        self.events.append(Event("reduce", tag, tensor.nbytes, dst))
        return self.inner.reduce(tensor, dst, tag=tag)

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        self.events.append(Event("all_reduce", tag, tensor.nbytes))
        return self.inner.all_reduce(tensor, tag=tag, maximum=maximum)

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Work:
        self.events.append(Event("broadcast", tag, tensor.nbytes, src))
        return self.inner.broadcast(tensor, src, tag=tag)

    def all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        *,
        tag: str,
    ) -> Work:
        sent = source.numel() - source_splits[self.rank]
        self.events.append(Event("all_to_all", tag, sent * source.element_size()))
        return self.inner.all_to_all(output, source, output_splits, source_splits, tag=tag)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)

    def broadcast_object(self, value: Any, src: int) -> Any:
        return self.inner.broadcast_object(value, src)

    def close(self) -> None:
        self.inner.close()


@dataclass
class _DelayedWork:
    inner: Work
    ready_at: float

    def wait(self) -> None:
        self.inner.wait()
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ready_at and self.inner.is_completed()


@dataclass
class DelayingTransport(RecordingTransport):
    """A slow network: each collective is done ``delay_s`` after its issue at the earliest.

    Collectives in flight at once are delayed together, as on a network with latency.
    """

    delay_s: float = 0.02

    def _delayed(self, work: Work) -> Work:
        return _DelayedWork(work, time.perf_counter() + self.delay_s)

    def reduce(self, tensor: Tensor, dst: int, *, tag: str) -> Work:
        return self._delayed(super().reduce(tensor, dst, tag=tag))

    def all_reduce(self, tensor: Tensor, *, tag: str, maximum: bool = False) -> Work:
        return self._delayed(super().all_reduce(tensor, tag=tag, maximum=maximum))

    def broadcast(self, tensor: Tensor, src: int, *, tag: str) -> Work:
        return self._delayed(super().broadcast(tensor, src, tag=tag))

    def all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        *,
        tag: str,
    ) -> Work:
        work = super().all_to_all(output, source, output_splits, source_splits, tag=tag)
        return self._delayed(work)


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
class ClockTransport(DelayingTransport):
    """A slow network by a clock of its own, so that what is waited for can be counted exactly.

    Who computes lets ``clock.now`` go on; every rank must do so alike.
    """

    clock: Clock = field(default_factory=Clock)

    def _delayed(self, work: Work) -> Work:
        return _TimedWork(work, self.clock, self.clock.now + self.delay_s)
