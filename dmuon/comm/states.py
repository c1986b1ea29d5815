"""The states of a layer's weights, of a pass over the model and of a round of gradients.

Each is kept in one attribute, and `State.to` allows the changes that the tables below list. None of
them depends on time, so the collectives issued in a state are the same on every rank.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound="State")


class State(Enum):
    """A member is its label and the names of the states that it may change to."""

    def __init__(self, label: str, follows: str) -> None:
        self.label = label
        self.follows = follows.split()

    def to(self, new: S) -> S:
        """``new``, which may be the same state; RuntimeError, a bug in dmuon, if it may not
        follow."""
        if new is not self and new.name not in self.follows:
            raise RuntimeError(
                f"internal error of dmuon: {type(self).__name__} cannot change from {self.name} to "
                f"{new.name}, only to {', '.join(self.follows)}. Please report it, with the "
                "model's forward pass"
            )
        return new


class WeightState(State):
    """The state of the weights of a layer in the `dedicated` layout.

    ::

        state     parameters show  buffers have   what has happened           may become
        FREED     what is kept     no memory      nothing, or all uses ended  LAUNCHED
        LAUNCHED  what is kept     weights, soon  the broadcasts were issued  IN_USE, FREED
        IN_USE    the buffers      weights        forward or backward runs    RECORDED, FREED
        RECORDED  the buffers      weights        autograd recorded a use     HELD, FREED
        HELD      the buffers      weights        the same                    FREED

    In HELD nothing will announce the backward, so they stay until it is done. A layer in use may be
    broadcast again into the same buffers; this changes no state.
    """

    FREED = "freed", "LAUNCHED"
    LAUNCHED = "launched", "IN_USE FREED"
    IN_USE = "in use", "RECORDED FREED"
    RECORDED = "recorded", "HELD FREED"
    HELD = "held", "FREED"


class PassState(State):
    """Which pass over the model has begun and not ended, on this rank.

    ::

        state     what every rank issues while in it                            may become
        IDLE      nothing                                                       FORWARD, BACKWARD
        FORWARD   the broadcast of each layer, in the order of registration     IDLE
        BACKWARD  the broadcast of each layer in reverse, gradients in between  IDLE

    A pass goes back to IDLE once all of its collectives are issued, so none follows another
    directly.
    """

    IDLE = "idle", "FORWARD BACKWARD"
    FORWARD = "forward", "IDLE"
    BACKWARD = "backward", "IDLE"


class RoundState(State):
    """Where the reduction of gradients is, since they were last cleared.

    ::

        state      meaning                                                      may become
        NONE       no round has been made                                       OPEN
        OPEN       a backward pass runs, or has raised                          DONE, OPEN_OWED
        OPEN_OWED  the same, and another round must follow                      OWED
        DONE       a round has ended; ``p.grad`` holds nothing it has not seen  OPEN, OWED, NONE
        OWED       ``p.grad`` may hold gradients that no round has seen         OPEN, NONE
    """

    NONE = "none", "OPEN"
    OPEN = "open", "DONE OPEN_OWED"
    OPEN_OWED = "open, another one owed", "OWED"
    DONE = "done", "OPEN OWED NONE"
    OWED = "owed", "OPEN NONE"
