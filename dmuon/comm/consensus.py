"""Agreement between ranks: solve once, share, compare, and fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dmuon.comm.transport import Transport
from dmuon.types import ConsensusError

__all__ = ["attempt", "solve_on_first"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells the others: its error, or the digest of its result."""

    error: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None
    error: Exception | None


def attempt(
    transport: Transport, work: Callable[[], T], *, what: str, digest: Callable[[T], str]
) -> T:
    """Run ``work`` on every rank, exchange the outcome once, and succeed or fail together.

    A rank whose ``work`` raised raises that error again; the others raise ConsensusError that
    quotes it. ``digest`` describes the result in lines; it must be equal on all ranks.

    Raises:
        ConsensusError: another rank failed, or the results differ.
    """
    outcome, text = _outcome(work), ""
    if outcome.error is not None:
        mine = _Report(f"{type(outcome.error).__name__}: {outcome.error}", "")
    else:
        text = digest(outcome.value)  # type: ignore[arg-type]
        mine = _Report(None, hashlib.sha256(text.encode()).hexdigest())
    reports: list[_Report] = transport.gather_objects(mine)
    if outcome.error is not None:
        raise outcome.error
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise ConsensusError(f"{what} failed on rank {rank}: {report.error}")
    if len({report.digest for report in reports}) > 1:
        _raise_difference(transport, what, text)
    return outcome.value  # type: ignore[return-value]


def _raise_difference(transport: Transport, what: str, text: str) -> None:
    """Raise ConsensusError, on every rank, with the first line that differs from rank 0's."""
    expected = transport.broadcast_object(text, 0)
    found: str | None = None
    if text != expected:
        ours, theirs = text.splitlines(), expected.splitlines()
        size = max(len(ours), len(theirs))
        pad = ["(nothing)"]
        ours, theirs = ours + pad * (size - len(ours)), theirs + pad * (size - len(theirs))
        line = next(i for i in range(size) if ours[i] != theirs[i])
        found = f"rank {transport.rank} has {ours[line]!r} where rank 0 has {theirs[line]!r}"
    differences = [d for d in transport.gather_objects(found) if d is not None]
    raise ConsensusError(
        f"{what}: ranks disagree: {differences[0]}. Build the same model with the same arguments "
        "on every rank"
    )


def _outcome(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(work(), None)
    except Exception as error:  # whatever it is, a rank that dies alone would hang the others
        return _Outcome(None, error)


def solve_on_first(transport: Transport, solve: Callable[[], str]) -> str:
    """Run ``solve`` on the mesh's first rank and give its text to every rank.

    Raises:
        ConsensusError: ``solve`` raised (on the first rank its own error is raised).
    """
    outcome: _Outcome[str] = _Outcome(None, None)
    if transport.rank == 0:
        outcome = _outcome(solve)
    error = None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
    text, remote = transport.broadcast_object((outcome.value, error), 0)
    if outcome.error is not None:
        raise outcome.error
    if remote is not None:
        raise ConsensusError(f"planning failed on rank 0: {remote}")
    return text  # type: ignore[no-any-return]
