"""Agreement between ranks: solve once, share, compare, and fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from dmuon.comm.transport import Transport
from dmuon.types import ConsensusError, first_of, grouped

T = TypeVar("T")


def attempt_in_all(
    transports: Sequence[Transport],
    work: Callable[[], T],
    *,
    what: str = "dmuon.Muon",
    digest: Callable[[T], str] = lambda _: "",
) -> T:
    """Run ``work`` on every rank, exchange outcomes once in each mesh, succeed or fail together.

    A rank whose ``work`` raised raises that error again. ``digest`` describes the result in lines,
    which must be equal on all ranks of a mesh.

    Raises:
        ConsensusError: another rank failed, whose error it quotes, or the results differ.
    """
    value, error = _outcome(work)
    text = digest(value) if transports and error is None else ""  # type: ignore[arg-type]
    for transport in transports:
        _, failure = _outcome(lambda: _compare(transport, what, text, error))  # noqa: B023
        error = error or failure
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _compare(transport: Transport, what: str, text: str, error: Exception | None) -> None:
    """Raise ConsensusError, on every rank, with the first error, or the lines that differ."""
    told = None if error is None else f"{type(error).__name__}: {error}"
    reports = transport.gather_objects((told, hashlib.sha256(text.encode()).hexdigest()))
    for rank, (failure, _) in enumerate(reports):
        if failure is not None:
            raise ConsensusError(f"{what} failed on rank {rank}: {failure}")
    if len(set(reports)) == 1:
        return
    ours, theirs = text.splitlines(), transport.broadcast_object(text, 0).splitlines()
    even = len(ours) == len(theirs)
    both = zip([*ours, "(nothing)"], [*theirs, "(nothing)"])
    # After a line that is missing on one side, all others are shifted.
    pairs = [(repr(a), repr(b)) for a, b in both if a != b][: None if even else 1]
    everyone = transport.gather_objects(tuple(map(first_of, zip(*pairs))))
    mine, firsts = next(found for found in everyone if found)
    ranks = [rank for rank, found in enumerate(everyone) if found and found[0] == mine]
    raise ConsensusError(
        f"{what}: ranks disagree: {_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {mine} "
        f"where rank 0 has {firsts}. Build the same model with the same arguments on every rank"
    )


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, a rank that dies alone would hang the others
        return None, error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {first_of([*map(str, ranks)])}"


def different(values: Sequence[Mapping[str, str]]) -> str:
    """Describe what differs between the values of ranks, by name; "" if nothing does.

    >>> different([{"lr": "1.0", "eps": "0.1"}, {"lr": "1.0", "eps": "0.2"}])
    'eps is 0.1 on rank 0, 0.2 on rank 1'
    """
    found = []
    for name in dict.fromkeys(name for each in values for name in each):
        where = grouped((each.get(name, "missing"), rank) for rank, each in enumerate(values))
        if len(where) > 1:
            places = [f"{value} on {_ranks(ranks)}" for value, ranks in where.items()]
            found.append(f"{name} is {first_of(places)}")
    return first_of(found, 8)


def refused(ranks: Sequence[int] | int) -> ConsensusError:
    """The error of the other ranks in a step that these, or so many of them, refuse to take."""
    who = f"{ranks} ranks refuse" if isinstance(ranks, int) else f"rank {ranks[0]} refuses"
    return ConsensusError(
        f"{who} to take this step, because parameters, gradients or opt.param_groups are wrong "
        "there: the error raised there says what. Nothing was changed on any rank"
    )


def solve_on_first(transport: Transport, solve: Callable[[], str]) -> str:
    """Run ``solve`` on the first rank and give its text to all; ConsensusError where it raised."""
    first = solve if transport.rank == 0 else str
    text = attempt_in_all([transport], first, what="planning")
    return transport.broadcast_object(text, 0)  # type: ignore[no-any-return]
